"""Operands on their way into a kernel: their layouts at planning time, their pointers at call time."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxfuse.codegen import OperandKind
from fxfuse.layout import Layout, Strides, broadcast_strides
from fxfuse.problem import OPERAND_DTYPES, TensorMeta

Grouping = Callable[[Sequence[int], Sequence[Strides]], "Layout | None"]
"""Takes the result's sizes and the strides of the result and operands; None if they do not fit three dimensions."""


@dataclass(frozen=True)
class OperandPlan:
    """What is decided about a problem's operands before the first call."""

    layout: Layout
    """Tensor 0 is the result, tensor 1 + i operand i."""
    kinds: tuple[OperandKind, ...]
    conversions: tuple[Callable[[torch.Tensor], torch.Tensor] | None, ...]
    """What each operand goes through at every call: a copy for layouts that kernels cannot address, else None."""

    def packed_strides(self) -> bytes:
        """Three int64 strides per operand, as the kernels' OperandStrides."""
        flat = [stride for strides in self.layout.strides[1:] for stride in strides]
        return struct.pack(f"{len(flat)}q", *flat)

    def pointers(self, operands: Sequence[torch.Tensor], keep: list[Any]) -> list[int]:
        """The kernel's arguments for these operands; `keep` receives what must outlive the launch."""
        values: list[int] = []
        for operand, kind, convert in zip(operands, self.kinds, self.conversions, strict=True):
            if kind.dtype is None:
                values.append(_float_bits(float(operand)))
                continue
            if convert is not None:
                operand = convert(operand)
                keep.append(operand)
            values.append(operand.data_ptr())
        return values


def _float_bits(value: float) -> int:
    single = torch.tensor(value, dtype=torch.float32)  # rounds to inf where struct.pack would raise
    return int(single.view(torch.int32).item()) & 0xFFFFFFFF


def _materialised(
    shape: tuple[int, ...], strides: Strides, dtype: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor]:
    def convert(operand: torch.Tensor) -> torch.Tensor:
        copy = torch.empty_strided(shape, strides, dtype=dtype, device=operand.device)
        return copy.copy_(operand)

    return convert


def plan_operands(
    result_shape: Sequence[int],
    result_strides: Sequence[int],
    operands: Sequence[TensorMeta],
    channel: frozenset[int],
    grouping: Grouping,
) -> OperandPlan | None:
    """How a kernel reads `operands` beside a result of that shape and strides.

    Args:
        channel: indices of operands that stand for one value per channel, (C,) meaning (C, 1, 1).
        grouping: how the kernel sees the result's dimensions as (batch, row, col).

    An operand whose layout does not fit is copied into the result's own layout at every call. None if the result
    itself does not fit.
    """
    shape, result = tuple(result_shape), tuple(result_strides)
    accepted: list[Strides] = [result]
    if grouping(shape, accepted) is None:
        return None
    dtypes: list[torch.dtype | None] = []
    conversions: list[Callable[[torch.Tensor], torch.Tensor] | None] = []
    for index, operand in enumerate(operands):
        if operand.device.type == "cpu" and operand.shape == ():
            accepted.append((0,) * len(shape))
            dtypes.append(None)
            conversions.append(None)
            continue
        own_shape, own_strides = operand.shape, operand.strides
        if index in channel:
            own_shape, own_strides = (operand.shape[0], 1, 1), (operand.strides[0], 0, 0)
        strides = broadcast_strides(own_shape, own_strides, shape)
        if operand.dtype not in OPERAND_DTYPES:
            # a zero-dimensional float64 tensor: it does not promote the result, so float32 is what eager computes in
            accepted.append((0,) * len(shape))
            dtypes.append(torch.float32)
            conversions.append(lambda tensor: tensor.to(torch.float32))
        elif grouping(shape, [*accepted, strides]) is not None:
            accepted.append(strides)
            dtypes.append(operand.dtype)
            conversions.append(None)
        else:
            accepted.append(result)
            dtypes.append(operand.dtype)
            conversions.append(_materialised(shape, result, operand.dtype))
    layout = grouping(shape, accepted)
    assert layout is not None, "every operand was accepted beside the others"
    kinds = tuple(
        OperandKind(dtype, (strides[0] != 0, strides[1] != 0, strides[2] != 0))
        for dtype, strides in zip(dtypes, layout.strides[1:], strict=True)
    )
    return OperandPlan(layout, kinds, tuple(conversions))
