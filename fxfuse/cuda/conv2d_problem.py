"""A convolution as its kernels see it: sizes, strides, alignment and precision, and what follows from them.

What the kernel families (conv2d.py, conv2d_direct.py, conv2d_wgmma.py, depthwise.py) have in common. Everything here is
arithmetic on numbers: no GPU is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from fxfuse.cuda.gemm_problem import RESERVED_SHARED, Errors
from fxfuse.cuda.precision import Precision, element_bytes

Layout = Literal["nchw", "nhwc"]


@dataclass(frozen=True)
class Conv2dProblem:
    """out[n, k, oy, ox] = sum of x[n, c, oy * stride - padding + r * dilation, ...] * weight[k, c, r, s].

    x is (images, channels, height, width), the weight (out_channels, channels / groups, *kernel), both with any
    strides (in elements); the output is contiguous in `out_layout`. `padding` is above and to the left of x: what is
    below and to the right follows from `out_size`. Alignments are in bytes, of the first element.
    """

    images: int
    channels: int
    size: tuple[int, int]
    out_channels: int
    out_size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    x_strides: tuple[int, int, int, int]
    weight_strides: tuple[int, int, int, int]
    out_layout: Layout
    precision: Precision
    x_alignment: int = 16
    weight_alignment: int = 16
    multiprocessors: int = 108
    """Of the device. The default, like the next one, is the A100's."""
    shared_memory: int = 164 * 1024
    """Bytes per multiprocessor."""
    shared_memory_per_block: int | None = None
    """Bytes that a thread block may have; None: all of a multiprocessor's but what CUDA takes for each."""
    hopper: bool = False
    """Whether the device has the instructions that only Hopper has."""
    eager_error: Errors | None = None
    """What torch's own convolution errs by, which 3xTF32 may; None if nobody has measured it."""

    @property
    def most_shared(self) -> int:
        """Bytes of shared memory that a thread block may have."""
        known = self.shared_memory_per_block
        return self.shared_memory - RESERVED_SHARED if known is None else known

    @property
    def element_bytes(self) -> int:
        return element_bytes(self.precision)

    @property
    def group_channels(self) -> int:
        return self.channels // self.groups

    @property
    def group_filters(self) -> int:
        return self.out_channels // self.groups

    @property
    def reduction(self) -> int:
        """Length of the sum behind one output."""
        return self.group_channels * self.kernel[0] * self.kernel[1]

    @property
    def pixels(self) -> int:
        """Output pixels of all images."""
        return self.images * self.out_size[0] * self.out_size[1]


MAX_TILES: Final = 2**30  # of a launch


def pack(problem: Conv2dProblem, block_tiles: int = 1, splits: int = 1, split_tiles: int = 0) -> bytes:
    """struct Conv2dProblem of cuda/kernels/conv2d_problem.cuh; all but the problem is the implicit GEMM's."""
    fields = (
        problem.images,
        problem.channels,
        *problem.size,
        problem.out_channels,
        *problem.out_size,
        *problem.kernel,
        *problem.stride,
        *problem.padding,
        *problem.dilation,
        problem.groups,
        *problem.x_strides,
        *problem.weight_strides,
        block_tiles,
        splits,
        split_tiles,
    )
    return struct.pack(f"<{len(fields)}q", *fields)


def extent(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Distance between the first and the last element, in elements."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def access(element_bytes: int, *multiples: int) -> int:
    """The largest power of two up to 16 that divides every one of `multiples`, in bytes."""
    return next(size for size in (16, 8, 4, 2) if size == element_bytes or all(m % size == 0 for m in multiples))


def same(strides: tuple[int, ...], expected: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether strides are as expected; those of dimensions of size 1 do not matter."""
    return all(size == 1 or stride == e for stride, e, size in zip(strides, expected, sizes, strict=True))


def varying(strides: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[int]:
    return (stride for stride, size in zip(strides, sizes, strict=True) if size > 1)


def access_of_x(problem: Conv2dProblem, layout: Layout, run: int) -> int:
    """Bytes of x that are contiguous and aligned wherever a block fetches them; in NHWC, of `run` channels."""
    size = problem.element_bytes
    image, channel, row, col = problem.x_strides
    if layout == "nhwc":
        steps = varying((image, row, col), (problem.images, *problem.size))
        return access(size, problem.x_alignment, run * size, *(step * size for step in steps))
    pointwise = problem.kernel == (1, 1) and problem.stride == (1, 1) and problem.padding == (0, 0)
    rows_follow = same((row, col), (problem.size[1], 1), problem.size)
    if not pointwise or not rows_follow or problem.size != problem.out_size:
        return size
    steps = varying((image, channel), (problem.images, problem.channels))
    pixels = problem.size[0] * problem.size[1]
    return access(size, problem.x_alignment, pixels * size, *(step * size for step in steps))


# --------------------------------------------------------------------------------------------------- costs
# Families that stand for the same problem say what they cost in one unit: a product's time by the implicit GEMM's best
# tile on a full device, on one multiprocessor.

MULTIPROCESSORS: Final = 108
"""A100. An H200 has 132: close enough for an order."""

PRODUCTS: Final = 0.84e6
"""Of an H200, per multiprocessor and microsecond: see gemm.py."""


def slowdown(together: int) -> float:
    """How much longer products take with so few blocks on a multiprocessor: one alone waits for memory.

    Each block more closes 41 % of the gap, as in gemm.py.
    """
    return (1 - 0.6 * 0.59**2) / (1 - 0.6 * 0.59 ** (min(together, 3) - 1))
