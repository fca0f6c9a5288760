"""Replaces the backward of torch's attention by a kernel of ours, where that was measured to be quicker.

In training steps torch's attention keeps its result and the logarithms of the sums that its softmax divides by
(`logsumexp`). Whichever of torch's operators it was, the backward gets these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from fxfuse import ahead, build
from fxfuse.cuda import attention_gradient, exactness, gpu, tune
from fxfuse.layout import is_dense
from fxfuse.program.attention import moving
from fxfuse.program.own_kernels import may_compute, problem_of, quickest, source_of
from fxfuse.program.values import alignment, is_plain

KIND: Final = "attention's gradients"
LIBRARY: Final = "torch's"
OPERATORS: Final = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention_backward",
    )
    if hasattr(torch.ops.aten, name)
)
"""The operators for which there may be a kernel."""
_READ: Final = ("query", "key", "value", "out", "logsumexp", "grad_out")
"""The parameters that are tensors, in the order in which the kernel reads them."""


def planned(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], expected: Any) -> Callable[[], Any] | None:
    """A function that computes operator(*args, **kwargs) by a kernel of ours.

    None if there is no kernel for it, or if torch is as quick or more exact.

    Args:
        operator: one of OPERATORS.
        expected: torch's results: the gradients for query, key and value, and for a mask.
    """
    asked = _asked(operator, args, kwargs, expected, alignment)
    if asked is None or not all(map(is_plain, asked.tensors)):
        return None
    kernels = attention_gradient.candidates(asked.described)
    if not kernels:
        return None
    made, rest = tuple(expected[:3]), tuple(expected[3:])
    options = (("is_causal", asked.described.is_causal), ("scale", asked.described.scale), ("operator", str(operator)))
    problem = problem_of(KIND, asked.tensors, options)
    is_float = asked.described.element == torch.float32
    found = quickest(problem, kernels, asked.library(), made, len(_READ), asked.tensors, are_first=is_float)
    if found is None or (gpu.standing_in() is None and not _is_no_less_exact(found(), made, asked)):
        return None
    return lambda: (*found(), *rest)


def begin(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], expected: Any) -> None:
    """Begins to compile the kernels that `planned` will ask for; all tensors are fake."""
    asked = _asked(operator, args, kwargs, expected, lambda fake: ahead.meta_of(fake).alignment)
    if asked is not None:
        capability = gpu.capability(asked.tensors[0].device)
        kernels = attention_gradient.candidates(asked.described)
        build.begin([source_of(kernel, asked.described.element, capability) for kernel in kernels])


@dataclass(frozen=True)
class _Asked:
    """What a call of such an operator asks for."""

    operator: Any
    given: Mapping[str, Any]
    """The arguments by the parameters' names."""
    tensors: tuple[torch.Tensor, ...]
    """Those of _READ."""
    described: attention_gradient.Problem

    def library(self) -> tune.Candidate:
        """torch's candidate."""
        parameters = self.operator._schema.arguments
        given = {name: value for name, value in self.given.items() if name not in _READ}

        def run(x: torch.Tensor, weight: object, bias: object, others: Sequence[torch.Tensor]) -> Any:
            values = {**given, **dict(zip(_READ, (x, *others), strict=True))}
            args = [values[_name(one)] for one in parameters if not one.kwarg_only]
            return self.operator(*args, **{one.name: values[one.name] for one in parameters if one.kwarg_only})

        return tune.Candidate(LIBRARY, LIBRARY, lambda: run, always=True, library=True)


def _name(parameter: Any) -> str:
    name: str = parameter.name
    return name.rstrip("_")  # one of the operators has grad_out_


def _asked(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], expected: Any,
    aligned: Callable[[torch.Tensor], int],
) -> _Asked | None:  # fmt: skip
    """What operator(*args, **kwargs) asks for; None if the kernel does not support it.

    Args:
        aligned: the alignment of a tensor's address.
    """
    parameters = operator._schema.arguments
    defaults = {_name(one): one.default_value for one in parameters if one.has_default_value()}
    given = {**defaults, **dict(zip(map(_name, parameters), args, strict=False)), **kwargs}
    if given.get("dropout_p", 0.0) or given.get("attn_bias") is not None:
        return None
    tensors = tuple(given[name] for name in _READ)
    if not all(isinstance(tensor, torch.Tensor) for tensor in (*tensors, *expected[:3])):
        return None
    query, key, value, out, logs, dout = tensors
    own, made = (query, key, value, out, dout), expected[:3]
    if not may_compute(made[0]) or any(tensor.dim() != 4 for tensor in own):
        return None
    if any(tensor.dtype != query.dtype or tensor.stride(3) != 1 for tensor in (*own, *made)):
        return None
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    if any(tensor.shape != (batch, heads, queries, width) for tensor in (out, dout)):
        return None
    if any(tensor.shape != (batch, heads, keys, width) for tensor in (key, value)) or 0 in query.shape or keys == 0:
        return None
    if logs.dtype != torch.float32 or logs.dim() < 3 or logs.shape[2] < queries or logs.stride(2) != 1:
        return None
    if not all(is_dense(tensor.shape, tensor.stride()) for tensor in made):
        return None
    of_batch, of_head = (stride * (size > 1) for stride, size in zip(logs.stride()[:2], logs.shape[:2], strict=True))
    described = attention_gradient.Problem(
        batch=batch,
        heads=heads,
        queries=queries,
        keys=keys,
        width=width,
        element=query.dtype,
        q=moving(query),
        k=moving(key),
        v=moving(value),
        out=moving(out),
        dout=moving(dout),
        dq=moving(made[0]),
        dk=moving(made[1]),
        dv=moving(made[2]),
        logs=(of_batch, of_head),
        is_causal=bool(given["is_causal"]),
        scale=1 / math.sqrt(width) if given["scale"] is None else given["scale"],
        alignment=min(map(aligned, own)),
    )
    return _Asked(operator, given, tensors, described)


def _is_no_less_exact(have: Sequence[torch.Tensor], torchs: Sequence[torch.Tensor], asked: _Asked) -> bool:
    """Whether gradients are as close to float64's as torch's are. Checked for the first head."""
    query, key, value, _, _, dout = (tensor[:1, :1].detach().double() for tensor in asked.tensors)
    with torch.enable_grad():
        leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
        scores = leaves[0] @ leaves[1].transpose(2, 3) * asked.described.scale
        if asked.described.is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        exact = torch.autograd.grad(scores.softmax(-1) @ leaves[2], leaves, dout)
    for one, other, best in zip(have, torchs, exact, strict=True):
        error, allowed = (exactness.relative_error(gradient[:1, :1], best) for gradient in (one, other))
        if error > exactness.ALLOWED["normal"] * allowed + exactness.ULP:
            return False
    return True
