"""A problem: a region with concrete tensors, as a value. Plans (cpu/plan.py, cuda/plan.py) are made for one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F

from fxfuse.errors import UnsupportedError
from fxfuse.expression import Call, Expr, Operand, parse, postorder
from fxfuse.reference import evaluate

Run: TypeAlias = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None", Sequence[torch.Tensor]], torch.Tensor]
"""run(x, weight, bias, operands) -> result"""

RESULT_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
OPERAND_DTYPES: Final = (
    *RESULT_DTYPES, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


@dataclass(frozen=True)
class TensorMeta:
    """All that a plan may depend on of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    alignment: int
    """Largest power of two, up to 16, that divides the data's address."""

    def empty(self) -> torch.Tensor:
        """A meta tensor like it."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Problem:
    """One region's computation on tensors of given shapes, strides, dtypes and device."""

    kind: str
    """The fused operator: a key of ANCHORS."""
    options: tuple[tuple[str, Any], ...]
    """Of the anchor: a convolution's stride, padding, dilation, groups."""
    epilogue: str
    x: TensorMeta
    weight: TensorMeta
    bias: TensorMeta | None
    operands: tuple[TensorMeta, ...]

    @property
    def expression(self) -> Expr:
        return parsed(self.epilogue)

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.kind}: {self.epilogue}"


@dataclass(frozen=True)
class Plan:
    """How a problem is run."""

    run: Run
    kernel: str | None
    """The kernel's name; None if torch runs it."""
    reason: str | None = None
    """Why torch runs it, if it does."""


@functools.lru_cache(maxsize=4096)
def parsed(epilogue: str) -> Expr:
    """The epilogue's expression; parsed once."""
    return parse(epilogue)


# --------------------------------------------------------------------------------------------- anchors


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def _matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = torch.matmul(x, weight)
    return product if bias is None else product + bias


def _conv2d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
) -> torch.Tensor:  # fmt: skip
    if len(padding) == 4:
        top, bottom, left, right = padding
        x, padding = F.pad(x, (left, right, top, bottom)), (0, 0)
    return F.conv2d(x, weight, bias, tuple(stride), tuple(padding), tuple(dilation), groups)


ANCHORS: Final[Mapping[str, Callable[..., torch.Tensor]]] = {"linear": _linear, "matmul": _matmul, "conv2d": _conv2d}
"""What each fused operator computes before its epilogue, in torch."""


def run_anchor(
    kind: str, options: Sequence[tuple[str, Any]], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The anchor's result by torch."""
    return ANCHORS[kind](x, weight, bias, **dict(options))


# ---------------------------------------------------------------------------------------------- checks


def channel_operands(expression: Expr) -> frozenset[int]:
    """Operands that are read as one value per channel of a convolution (`channel(oN)`)."""
    return frozenset(
        node.args[0].index
        for node in postorder(expression)
        if isinstance(node, Call) and node.op == "channel" and isinstance(node.args[0], Operand)
    )


def result_dtype(problem: Problem, acc: torch.Tensor) -> torch.dtype:
    """The dtype of the region's result, given its anchor's (a meta tensor with eager's strides).

    Raises UnsupportedError if the result is not one that a kernel can write in acc's place: another shape, other
    strides, or a dtype that kernels do not have.
    """
    result = evaluate(problem.expression, acc, [operand.empty() for operand in problem.operands])
    if result.shape != acc.shape:
        raise UnsupportedError(f"an operand enlarges the result from {tuple(acc.shape)} to {tuple(result.shape)}")
    if result.dtype not in RESULT_DTYPES:
        raise UnsupportedError(f"the result's dtype is {result.dtype}; kernels have float32, float16 and bfloat16")
    different = [dim for dim, size in enumerate(acc.shape) if size > 1 and result.stride(dim) != acc.stride(dim)]
    if different:
        raise UnsupportedError(f"eager's result has strides {result.stride()}, its anchor's {acc.stride()}")
    return result.dtype
