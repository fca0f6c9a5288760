"""A convolution as its kernels see it: sizes, strides, alignment, precision, and what follows from them.

The kernel families share this module: conv2d.py, conv2d_direct.py, conv2d_wgmma.py, conv2d_few_pixels.py and
depthwise.py. It is arithmetic on numbers: no GPU is needed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Literal

from fxfuse.cuda.gemm_problem import RESERVED_SHARED, Errors
from fxfuse.cuda.precision import Precision, element_bytes
from fxfuse.layout import varying

Layout = Literal["nchw", "nhwc"]


@dataclass(frozen=True)
class Conv2dProblem:
    """out[n, k, oy, ox] = sum of x[n, c, oy * stride - padding + r * dilation, ...] * weight[k, c, r, s].

    x is (images, channels, height, width), the weight (out_channels, channels / groups, *kernel), both with any strides
    (in elements). The output is contiguous in `out_layout`. `padding` is above and to the left of x; the padding
    below and to the right follows from `out_size`. Alignments are those of the first element's address, in bytes.
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
    """Multiprocessors of the device. This default and the next one are the A100's."""
    shared_memory: int = 164 * 1024
    """Bytes per multiprocessor."""
    shared_memory_per_block: int | None = None
    """Bytes that a thread block may have. None: a multiprocessor's bytes, less those that CUDA takes for each block."""
    hopper: bool = False
    """Whether the device is a Hopper GPU (sm_90), and so has wgmma."""
    eager_error: Errors | None = None
    """The error of torch's own convolution, which limits the error of 3xTF32; None if it was not measured."""

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
        """Number of products in the sum of one output element."""
        return self.group_channels * self.kernel[0] * self.kernel[1]

    @property
    def pixels(self) -> int:
        """Output pixels of all images."""
        return self.images * self.out_size[0] * self.out_size[1]


MAX_TILES: Final = 2**30  # in a launch


def pack(problem: Conv2dProblem, block_tiles: int = 1, splits: int = 1, split_tiles: int = 0) -> bytes:
    """struct Conv2dProblem of cuda/kernels/conv2d_problem.cuh. Only the implicit GEMM uses the other arguments."""
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
    """Distance between a tensor's first and last element, in elements."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def access(element_bytes: int, *multiples: int) -> int:
    """Bytes of a vector access: the largest of 16, 8, 4 and 2 that divides all `multiples`; at least one element."""
    return next(size for size in (16, 8, 4, 2) if size == element_bytes or all(m % size == 0 for m in multiples))


def same(strides: tuple[int, ...], expected: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether `strides` equal `expected`, apart from dimensions of size 1."""
    return all(size == 1 or stride == e for stride, e, size in zip(strides, expected, sizes, strict=True))


def access_of_x(problem: Conv2dProblem, layout: Layout, run: int) -> int:
    """Bytes of a vector access to x that is contiguous and aligned wherever a block fetches x.

    Args:
        layout: in "nhwc" an access covers channels, in "nchw" pixels of a plane.
        run: channels that are contiguous for one pixel, in "nhwc".
    """
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
# The families estimate their costs in one unit: the time of a multiply-add by the implicit GEMM's best tile, on one
# multiprocessor of a full device.

MULTIPROCESSORS: Final = 108
"""The A100's. An H200 has 132: close enough to order candidates."""

PRODUCTS: Final = 0.84e6
"""Multiply-adds of an H200, per multiprocessor and microsecond: see gemm.py."""


def slowdown(together: int) -> float:
    """How much longer products take with `together` blocks on a multiprocessor than with three: few wait for memory.

    Each further block closes 41 % of the gap, as in Tile.speed of gemm_problem.py.
    """
    return (1 - 0.6 * 0.59**2) / (1 - 0.6 * 0.59 ** (min(together, 3) - 1))
