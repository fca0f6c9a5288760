"""Replaces torch's attention in training steps by kernels of ours, where these were measured to be quicker.

The forward keeps its result and the logarithms of the sums that its softmax divides by (`logsumexp`). Whichever of
torch's operators it is, its backward gets these.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import torch

from fxfuse import ahead, build
from fxfuse.cuda import attention, attention_gradient, exactness, gpu, tune
from fxfuse.cuda.kernel import Kernel
from fxfuse.layout import is_dense
from fxfuse.program.attention import all_kinds_allowed, moving, problem_for
from fxfuse.program.own_kernels import may_compute, problem_of, quickest, source_of
from fxfuse.program.values import alignment, extent, is_plain

LIBRARY: Final = "torch's"


def _operators(suffix: str) -> frozenset[Any]:
    names = (f"_scaled_dot_product_{kind}_attention{suffix}" for kind in ("flash", "efficient", "cudnn"))
    return frozenset(getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name))


FORWARDS: Final = _operators("")
GRADIENTS: Final = _operators("_backward")
PLANNED: Final = FORWARDS | GRADIENTS
"""The operators for which there may be a kernel."""
_READ: Final = ("query", "key", "value")
_READ_BY_GRADIENTS: Final = (*_READ, "out", "logsumexp", "grad_out")
"""The parameters that are tensors, in the order in which a kernel reads them."""


def planned(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], expected: Any) -> Callable[[], Any] | None:
    """A function that computes operator(*args, **kwargs) by a kernel of ours.

    None if there is no kernel for it, or if torch is as quick or more exact.

    Args:
        operator: one of PLANNED.
        expected: torch's results.
    """
    asked = _asked(operator, args, kwargs, expected, alignment)
    if asked is None or not asked.kernels or not all(map(is_plain, asked.tensors)):
        return None
    count = asked.count
    options = (("is_causal", asked.is_causal), ("scale", asked.scale), ("operator", str(operator)), ("results", count))
    problem = problem_of(asked.kind, asked.tensors, options)
    made, unread = tuple(expected[:count]), [one for one in expected[count:] if _is_tensor(one)]
    found = quickest(
        problem, asked.kernels, asked.library(), made, len(asked.tensors), asked.tensors, asked.is_first, unread
    )  # fmt: skip
    if found is None or (gpu.standing_in() is None and not asked.is_no_less_exact(found()[:count], made)):
        return None
    rest = [None if _is_tensor(one) else (one,) for one in expected]  # numbers, and what is not there

    def run() -> tuple[Any, ...]:
        tensors = iter(found())
        return tuple(next(tensors) if one is None else one[0] for one in rest)

    return run


def _is_tensor(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor)


def begin(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], expected: Any) -> None:
    """Begins to compile the kernels that `planned` will ask for; all tensors are fake."""
    asked = _asked(operator, args, kwargs, expected, lambda fake: ahead.meta_of(fake).alignment)
    if asked is not None:
        query = asked.tensors[0]
        capability = gpu.capability(query.device)
        build.begin([source_of(kernel, query.dtype, capability) for kernel in asked.kernels])


@dataclass(frozen=True)
class _Asked(abc.ABC):
    """What a call of one of the operators asks for."""

    operator: Any
    given: Mapping[str, Any]
    """The arguments by the parameters' names."""
    tensors: tuple[torch.Tensor, ...]
    """Those that the kernel reads, in its order. The last one is the mask, if there is one."""
    count: int
    """How many of the results the kernel makes: the first ones. Without dropout nothing reads the others."""
    is_causal: bool
    scale: float
    kernels: tuple[Kernel, ...]
    is_first: bool
    """Whether the kernels come before torch where nothing is measured."""

    kind: ClassVar[str]
    names: ClassVar[tuple[str, ...]]
    """The parameters of `tensors`, but for the mask."""

    @abc.abstractmethod
    def exact(self, tensors: Sequence[torch.Tensor], mask: torch.Tensor | None = None) -> Sequence[torch.Tensor]:
        """The results, in the precision of these tensors, by products and a softmax."""

    def library(self) -> tune.Candidate:
        """torch's candidate."""
        operator, parameters = self.operator, self.operator._schema.arguments
        names = (*self.names, "attn_bias")[: len(self.tensors)]
        given = {name: value for name, value in self.given.items() if name not in names}

        def run(x: torch.Tensor, weight: object, bias: object, others: Sequence[torch.Tensor]) -> Any:
            values = {**given, **dict(zip(names, (x, *others), strict=True))}
            args = [values[_plain(one.name)] for one in parameters if not one.kwarg_only]
            return operator(*args, **{one.name: values[one.name] for one in parameters if one.kwarg_only})

        return tune.Candidate(LIBRARY, LIBRARY, lambda: run, always=True, library=True)

    def is_no_less_exact(self, have: Sequence[torch.Tensor], torchs: Sequence[torch.Tensor]) -> bool:
        """Whether results are as close to float64's as torch's are. Checked for the first head."""
        tensors = [tensor[:1, :1].double() for tensor in self.tensors]
        exact = self.exact(tensors[: len(self.names)], *tensors[len(self.names) :])
        for one, other, best in zip(have, torchs, exact, strict=False):
            # the logarithms may lack the last dimension, and have more rows than there are queries
            own, torchs_own = (result[:1, :1, : best.shape[2]].reshape(best.shape) for result in (one, other))
            if not exactness.is_no_less_exact(own, torchs_own, best):
                return False
        return True

    def scores(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        scores = query @ key.transpose(2, 3) * self.scale
        if mask is not None:
            scores = scores + mask
        if self.is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        return scores


class _Forward(_Asked):
    kind, names = "attention with logarithms", _READ

    def exact(self, tensors: Sequence[torch.Tensor], mask: torch.Tensor | None = None) -> Sequence[torch.Tensor]:
        query, key, value = tensors
        scores = self.scores(query, key, mask)
        return scores.softmax(-1) @ value, scores.logsumexp(-1, keepdim=True)


class _Gradients(_Asked):
    kind, names = "attention's gradients", _READ_BY_GRADIENTS

    def exact(self, tensors: Sequence[torch.Tensor], mask: torch.Tensor | None = None) -> Sequence[torch.Tensor]:
        query, key, value, _, _, dout = tensors
        with torch.enable_grad():
            query, key, value = (tensor.detach().requires_grad_() for tensor in (query, key, value))
            mask = None if mask is None else mask.expand(1, 1, query.shape[2], -1).detach().clone().requires_grad_()
            leaves = [query, key, value, *([] if mask is None else [mask])]
            return torch.autograd.grad(self.scores(query, key, mask).softmax(-1) @ value, leaves, dout)


def _plain(name: str) -> str:
    """A parameter's name as most of the operators have it: one has grad_out_."""
    return name.rstrip("_")


def _asked(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], expected: Any,
    aligned: Callable[[torch.Tensor], int],
) -> _Asked | None:  # fmt: skip
    """What operator(*args, **kwargs) asks for; None if no kernel supports it.

    Args:
        aligned: the alignment of a tensor's address.
    """
    parameters = operator._schema.arguments
    defaults = {one.name: one.default_value for one in parameters if one.has_default_value()}
    named = {**defaults, **dict(zip((one.name for one in parameters), args, strict=False)), **kwargs}
    given = {_plain(name): value for name, value in named.items()}
    if given["dropout_p"] or given.get("return_debug_mask", False) or not all_kinds_allowed():
        return None
    kind: type[_Asked] = _Gradients if operator in GRADIENTS else _Forward
    mask = given.get("attn_bias")
    tensors = (*(given[name] for name in kind.names), *([] if mask is None else [mask]))
    count = 2 if kind is _Forward else 4 if given.get("grad_input_mask", [False])[-1] else 3
    made = expected[:count]
    if not all(map(_is_tensor, (*tensors, *made))) or not may_compute(made[0]):
        return None
    query, key, _ = tensors[:3]
    if any(tensor.dim() != 4 for tensor in tensors[:3]) or query.shape[1] != key.shape[1]:
        return None
    logs = tensors[4] if kind is _Gradients else made[1]
    if logs.dtype != torch.float32 or logs.dim() < 3 or logs.shape[2] < query.shape[2] or logs.stride(2) != 1:
        return None
    is_causal = bool(given["is_causal"])
    if is_causal and query.shape[2] != key.shape[2]:  # the operators hide different keys then
        return None
    out = tensors[3] if kind is _Gradients else made[0]
    masks = tensors[len(kind.names) :]
    forward = problem_for((*tensors[:3], *masks), out, given["scale"], is_causal=is_causal, aligned=aligned)
    if forward is None:
        return None
    if kind is _Gradients:
        kernels = _kernels_of_gradients(forward, tensors, made, aligned)
        is_first = query.dtype == torch.float32
    else:
        kernels = attention.candidates(replace(forward, logs=logs.shape[2])) if logs.is_contiguous() else []
        is_first = attention.is_quicker(forward)
    return kind(operator, given, tensors, count, is_causal, forward.scale, tuple(kernels), is_first)


def _is_nearly_dense(tensor: torch.Tensor) -> bool:
    """Whether at most half of a tensor's memory is between its elements: torch pads rows of a mask's gradient."""
    return extent(tensor) <= 2 * tensor.numel() * tensor.element_size()


def _kernels_of_gradients(
    forward: attention.Problem, tensors: Sequence[torch.Tensor], made: Sequence[torch.Tensor],
    aligned: Callable[[torch.Tensor], int],
) -> list[Kernel]:  # fmt: skip
    query, key, _, out, logs, dout, *masks = tensors
    if dout.shape != query.shape or any(tensor.dtype != query.dtype for tensor in (dout, *made)):
        return []
    if any(tensor.stride(3) != 1 for tensor in (dout, *made)):
        return []
    if not all(is_dense(tensor.shape, tensor.stride()) for tensor in made[:3]):
        return []
    if len(made) > 3 and (made[3].shape != (*query.shape[:3], key.shape[2]) or not _is_nearly_dense(made[3])):
        return []
    if any(mask.dtype != query.dtype or mask.dim() != 4 for mask in masks):
        return []
    of_batch, of_head = (stride * (size > 1) for stride, size in zip(logs.stride()[:2], logs.shape[:2], strict=True))
    return attention_gradient.candidates(
        attention_gradient.Problem(
            forward=forward,
            dout=moving(dout),
            dq=moving(made[0]),
            dk=moving(made[1]),
            dv=moving(made[2]),
            logs=(of_batch, of_head),
            dmask=moving(made[3]) if len(made) > 3 else None,
            alignment=min(map(aligned, (out, dout))),
        )
    )
