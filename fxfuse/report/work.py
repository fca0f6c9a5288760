"""The work of a region, operations and bytes, from its problem alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from fxfuse.dispatch_mode import DispatchMode
from fxfuse.problem import Plan, Problem, TensorMeta


@dataclass(frozen=True)
class Work:
    """The work of one call of a region."""

    flops: int
    """Floating-point operations: two for each product of a sum; for any other operation, one for each element of its
    result."""
    nbytes: int
    """Bytes that the region has to read and write: its tensors and its result, each once."""
    saved: int
    """Bytes that eager reads and writes beside those: intermediate results, without those in `left`."""
    left: int
    """Bytes of intermediate results that are still read and written, where torch's library computes the anchor and a
    pass follows."""
    shape: tuple[int, ...]
    """The shape of the result."""
    strides: tuple[int, ...]
    dtype: torch.dtype


def work_of(problem: Problem, plan: Plan) -> Work | None:
    """The work of a call with this problem and this plan. None if torch refuses the tensors."""
    counted = _counted(problem)
    if counted is None:
        return None
    flops, moved, anchor, result = counted
    given = [problem.x, problem.weight, problem.bias, *problem.operands]
    nbytes = sum(bytes_of(meta) for meta in given if meta is not None) + bytes_of(TensorMeta.of(result, result.device))
    between = max(0, moved - nbytes)
    left = between if plan.kernel is None else 2 * anchor if " + " in plan.kernel else 0  # several launches
    left = min(left, between)
    return Work(flops, nbytes, between - left, left, tuple(result.shape), result.stride(), result.dtype)


def bytes_of(meta: TensorMeta) -> int:
    """Bytes of a tensor's elements; those that an expanded dimension repeats count once."""
    sizes = (size for size, stride in zip(meta.shape, meta.strides, strict=True) if stride)
    return math.prod(sizes) * meta.dtype.itemsize if 0 not in meta.shape else 0


@functools.lru_cache(maxsize=4096)
def _counted(problem: Problem) -> tuple[int, int, int, torch.Tensor] | None:
    """Eager's operations, the bytes that it reads and writes, those of the anchor's result, and the result (meta)."""
    weight, bias = (None if meta is None else meta.empty() for meta in (problem.weight, problem.bias))
    x, operands = problem.x.empty(), [meta.empty() for meta in problem.operands]
    counter = _Counter()
    try:
        with torch.no_grad(), counter:
            result = problem.reference(x, weight, bias, operands)
    except Exception:  # whatever torch raises for tensors that it does not take
        return None
    anchor = 0 if problem.is_chain else counter.first
    return counter.flops, counter.moved, anchor, result


class _Counter(DispatchMode):
    """Counts what operators on meta tensors would compute and move."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.moved = self.first = 0

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        aliases = [item.alias_info for item in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in aliases):  # a view
            return result
        made = _bytes_in(result)
        self.moved += made + _bytes_in((args, kwargs))
        self.first = self.first or made
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            # torch 2.3 calls the result `out`; each ignores the other's name
            self.flops += formula(*args, **kwargs, out_val=result, out=result)
        else:
            self.flops += sum(leaf.numel() for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result


def _bytes_in(tree: Any) -> int:
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return sum(bytes_of(TensorMeta.of(tensor, tensor.device)) for tensor in tensors)
