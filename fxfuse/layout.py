"""How a result and its operands lie in memory, in the three dimensions (batch, row, col) that kernels work in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

Strides = tuple[int, ...]

NCHW = ((0,), (1,), (2, 3))
CHANNELS_LAST = ((0,), (2, 3), (1,))
"""The dimensions of a convolution's tensors that form (batch, row, col): see `group`."""
FORMATS: Final = {4: torch.channels_last, 5: torch.channels_last_3d}
"""torch's memory formats with the channels last, by the number of a tensor's dimensions."""


@dataclass(frozen=True)
class Layout:
    """Sizes of (batch, row, col) and each tensor's strides along them, in elements; stride 0 broadcasts.

    Tensor 0 is the result.
    """

    sizes: tuple[int, int, int]
    strides: tuple[tuple[int, int, int], ...]


def varying(strides: Sequence[int], sizes: Sequence[int]) -> Iterator[int]:
    """The strides of the dimensions with more than one element. The others say nothing of where elements lie."""
    return (stride for stride, size in zip(strides, sizes, strict=True) if size > 1)


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def is_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether torch suggests channels_last for a 4-D tensor, or channels_last_3d for a 5-D one: its own test
    (c10/core/MemoryFormat.h)."""
    least = 0
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * max(shape[dim], 1)
    return True


def channels_last_strides(shape: Sequence[int]) -> Strides:
    """Strides of a 4-D tensor in channels_last, or of a 5-D one in channels_last_3d."""
    batch, channels, *sizes = shape
    first, *pixels = contiguous_strides((batch, *sizes, channels))[:-1]
    return (first, 1, *pixels)


def empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor. It calls torch's operator, because torch.empty_strided refuses a stand-in for a GPU."""
    made: torch.Tensor = torch.ops.aten.empty_strided.default(shape, strides, dtype=dtype, device=device)
    return made


def is_overlapping(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share their memory, as those of expanded tensors do."""
    reach = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def ends_aligned(dtype: torch.dtype, *lengths: int) -> bool:
    """Whether rows of these lengths are multiples of the 16 bytes that products read and write at a time."""
    return all(length * dtype.itemsize % 16 == 0 for length in lengths)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie in memory without gaps, in whatever order, each in a place of its own."""
    span = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return span + 1 == math.prod(shape) and not is_overlapping(shape, strides)


def broadcast_strides(shape: Sequence[int], strides: Sequence[int], target: Sequence[int]) -> Strides:
    """Strides of a tensor of `shape` when it is expanded to `target`'s shape; zero along broadcast dimensions.

    The caller knows that `shape` broadcasts without enlarging `target`.
    """
    missing = len(target) - len(shape)
    return (0,) * missing + tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))


def memory_order(strides: Sequence[int]) -> list[int]:
    """Dimension indices from the slowest varying to the fastest."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def collapse(sizes: Sequence[int], tensors: Sequence[Strides]) -> tuple[list[int], list[list[int]]]:
    """Merges adjacent dimensions that every tensor walks with one stride; drops dimensions of size 1.

    Returns the merged sizes and, for each tensor, the merged strides.
    """
    merged_sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in tensors]
    for dim, size in enumerate(sizes):
        if size == 1:
            continue
        if merged_sizes and all(
            strides[-1] == tensor[dim] * size for strides, tensor in zip(merged, tensors, strict=True)
        ):
            merged_sizes[-1] *= size
            for strides, tensor in zip(merged, tensors, strict=True):
                strides[-1] = tensor[dim]
        else:
            merged_sizes.append(size)
            for strides, tensor in zip(merged, tensors, strict=True):
                strides.append(tensor[dim])
    return merged_sizes, merged


def group(sizes: Sequence[int], tensors: Sequence[Strides], groups: Sequence[Sequence[int]]) -> Layout | None:
    """The layout whose batch, row and col are the given groups of dimensions, each merged into one.

    None if some tensor does not walk a group with a single stride.
    """
    result_sizes: list[int] = []
    result: list[list[int]] = [[] for _ in tensors]
    for dims in groups:
        merged_sizes, merged = collapse([sizes[dim] for dim in dims], [tuple(t[dim] for dim in dims) for t in tensors])
        if len(merged_sizes) > 1:
            return None
        result_sizes.append(merged_sizes[0] if merged_sizes else 1)
        for strides, tensor_merged in zip(result, merged, strict=True):
            strides.append(tensor_merged[0] if tensor_merged else 0)
    batch, row, col = result_sizes
    return Layout((batch, row, col), tuple((s[0], s[1], s[2]) for s in result))


def flatten(sizes: Sequence[int], tensors: Sequence[Strides]) -> Layout | None:
    """The layout with the fewest, longest dimensions that the tensors allow; None if three do not suffice."""
    order = memory_order(tensors[0])
    merged_sizes, merged = collapse([sizes[dim] for dim in order], [tuple(t[dim] for dim in order) for t in tensors])
    if len(merged_sizes) > 3:
        return None
    padding = 3 - len(merged_sizes)
    batch, row, col = [1] * padding + merged_sizes
    return Layout((batch, row, col), tuple((*([0] * padding), *strides) for strides in merged))  # type: ignore[misc]
