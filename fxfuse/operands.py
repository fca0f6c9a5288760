"""How a kernel reads an epilogue's operands: their layouts at planning time, their pointers at call time."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from fxfuse.codegen import OperandKind
from fxfuse.errors import UnsupportedError
from fxfuse.layout import Layout, Strides, broadcast_strides, empty
from fxfuse.problem import OPERAND_DTYPES, TensorMeta

Grouping = Callable[[Sequence[int], Sequence[Strides]], "Layout | None"]
"""grouping(sizes, strides) -> layout: the result's dimensions as (batch, row, col).

`sizes` are the result's; `strides` are those of the result and of each operand. None if they do not collapse to three
dimensions.
"""


Addresses: TypeAlias = Callable[[Sequence[torch.Tensor]], tuple[Sequence[int], object]]
"""addresses(operands) -> (the kernel's arguments, tensors that must outlive the launch: copies of operands)"""


@dataclass(frozen=True)
class OperandPlan:
    """How a kernel reads a problem's operands: decided before the first call."""

    layout: Layout
    """Sizes and strides as (batch, row, col). Tensor 0 is the result, tensor 1 + i is operand i."""
    kinds: tuple[OperandKind, ...]
    conversions: tuple[Callable[[torch.Tensor], torch.Tensor] | None, ...]
    """For each operand, the copy to make at every call if kernels cannot address its layout; else None."""

    @property
    def copies(self) -> int:
        """How many operands are copied at every call."""
        return sum(convert is not None for convert in self.conversions)

    @property
    def are_addresses(self) -> bool:
        """Whether the kernel gets each operand's own address: no operand is a CPU scalar or copied."""
        return all(kind.dtype is not None for kind in self.kinds) and not self.copies

    @property
    def columns(self) -> int:
        """Largest power of two, up to 8, that divides the result's number of columns and its batch and row strides."""
        return math.gcd(8, self.layout.sizes[2], *self.layout.strides[0][:2])

    def packed_strides(self) -> bytes:
        """The operands' strides, three int64 each: the kernels' OperandStrides."""
        flat = [stride for strides in self.layout.strides[1:] for stride in strides]
        return struct.pack(f"{len(flat)}q", *flat)

    def addresses(self) -> Addresses:
        """A function that turns the operands of a call into the kernel's arguments."""
        conversions, scalars = self.conversions, tuple(kind.dtype is None for kind in self.kinds)
        if self.are_addresses:
            return lambda operands: ([operand.data_ptr() for operand in operands], operands)

        def addresses(operands: Sequence[torch.Tensor]) -> tuple[Sequence[int], object]:
            values: list[int] = []
            kept: list[torch.Tensor] = []
            for operand, scalar, convert in zip(operands, scalars, conversions, strict=True):
                if scalar:
                    values.append(_float_bits(float(operand)))
                    continue
                kept.append(operand if convert is None else convert(operand))
                values.append(kept[-1].data_ptr())
            return values, kept

        return addresses


def _float_bits(value: float) -> int:
    single = torch.tensor(value, dtype=torch.float32, device="cpu")  # rounds to inf where struct.pack would raise
    return int(single.view(torch.int32).item()) & 0xFFFFFFFF


def _materialised(
    shape: tuple[int, ...], strides: Strides, dtype: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor]:
    def convert(operand: torch.Tensor) -> torch.Tensor:
        return empty(shape, strides, dtype, operand.device).copy_(operand)

    return convert


@dataclass(frozen=True)
class _View:
    """The shapes and strides for which a layout is chosen. A batch of one is treated as a batch of two.

    So a kernel compiled for one batch size serves all of them. Where the batch has size 1, an operand of size 1 may
    broadcast or vary along it. Parameters are assumed to broadcast, activations to vary.
    """

    shape: tuple[int, ...]
    result: Strides
    grows: bool

    @staticmethod
    def of(shape: tuple[int, ...], strides: Strides, grows: bool) -> _View:
        if not grows or len(shape) < 2 or shape[0] != 1:
            return _View(shape, strides, False)
        return _View((2, *shape[1:]), (_extent(shape[1:], strides[1:]), *strides[1:]), True)

    def operand(self, operand: TensorMeta, channel: bool) -> Strides:
        shape, strides = operand.shape, operand.strides
        if channel and operand.shape not in ((), (1,)):
            missing = len(self.shape) - 2
            shape, strides = (*shape, *(1,) * missing), (*strides, *(0,) * missing)
        elif self.grows and len(shape) == len(self.shape) and not operand.is_parameter:
            shape, strides = (2, *shape[1:]), (_extent(shape[1:], strides[1:]), *strides[1:])
        return broadcast_strides(shape, strides, self.shape)

    def actual(self, layout: Layout) -> Layout:
        """The layout with the true batch size. The batch is the slowest part of the first dimension that is not 1."""
        if not self.grows:
            return layout
        batch, row, col = layout.sizes
        if batch > 1:
            batch //= 2
        elif row > 1:
            row //= 2
        else:
            col //= 2
        return Layout((batch, row, col), layout.strides)


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from one batch to the next if there are no gaps between them."""
    return max((size * stride for size, stride in zip(shape, strides, strict=True)), default=1)


def plan_operands(
    result_shape: Sequence[int],
    result_strides: Sequence[int],
    operands: Sequence[TensorMeta],
    channel: frozenset[int],
    grouping: Grouping,
    grows: bool = True,
) -> OperandPlan | None:
    """Plans how a kernel reads `operands`. None if the result does not collapse to (batch, row, contiguous col).

    Args:
        channel: indices of operands that are vectors along dimension 1 of the result.
        grouping: how the kernel sees the result's dimensions as (batch, row, col).
        grows: whether a kernel for a batch of one is to serve larger batches, too.

    An operand whose layout does not fit is copied into the result's own layout at every call. Raises UnsupportedError
    if an operand does not broadcast to the result.
    """
    for index, operand in enumerate(operands):
        _check_shape(operand, index in channel, tuple(result_shape))
    view = _View.of(tuple(result_shape), tuple(result_strides), grows)
    accepted: list[Strides] = [view.result]
    if grouping(view.shape, accepted) is None:
        return None
    everywhere = (0,) * len(view.shape)
    dtypes: list[torch.dtype | None] = []
    conversions: list[Callable[[torch.Tensor], torch.Tensor] | None] = []
    for index, operand in enumerate(operands):
        convert: Callable[[torch.Tensor], torch.Tensor] | None = None
        dtype: torch.dtype | None = operand.dtype
        strides = view.operand(operand, index in channel)
        if operand.device.type == "cpu" and operand.shape == ():
            strides, dtype = everywhere, None
        elif operand.dtype not in OPERAND_DTYPES:
            # a 0-d float64 tensor does not promote the result: eager computes in float32, too
            strides, dtype, convert = everywhere, torch.float32, _to_float32
        elif grouping(view.shape, [*accepted, strides]) is None:
            strides, convert = view.result, _materialised(tuple(result_shape), tuple(result_strides), operand.dtype)
        accepted.append(strides)
        dtypes.append(dtype)
        conversions.append(convert)
    layout = grouping(view.shape, accepted)
    assert layout is not None, "every operand was accepted beside the others"
    if layout.sizes[2] > 1 and layout.strides[0][2] != 1:
        return None  # kernels write along columns
    alignments = [16 if convert else meta.alignment for convert, meta in zip(conversions, operands, strict=True)]
    kinds = tuple(
        OperandKind(dtype, (strides[0] != 0, strides[1] != 0, strides[2] != 0), _access(dtype, strides, alignment))
        for dtype, strides, alignment in zip(dtypes, layout.strides[1:], alignments, strict=True)
    )
    return OperandPlan(view.actual(layout), kinds, tuple(conversions))


def _check_shape(operand: TensorMeta, channel: bool, result: tuple[int, ...]) -> None:
    """Raises UnsupportedError if the operand does not broadcast to the result: kernels would read out of bounds."""
    if channel:
        fits = operand.shape in ((), (1,), result[1:2])
    else:
        last = result[len(result) - len(operand.shape) :]
        fits = len(operand.shape) <= len(result) and all(
            size in (1, whole) for size, whole in zip(operand.shape, last, strict=True)
        )
    if not fits:
        raise UnsupportedError(f"an operand of shape {operand.shape} beside a result of {result}")


def _access(dtype: torch.dtype | None, strides: Sequence[int], alignment: int) -> int:
    """OperandKind.access for an operand with these strides along (batch, row, col)."""
    batch, row, col = strides
    if dtype is None or col != 1:
        return 0
    return math.gcd(16, alignment, batch * dtype.itemsize, row * dtype.itemsize)


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float32)
