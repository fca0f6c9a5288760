"""Kernels for the gradient of a depthwise convolution's filters (kernels/depthwise_gradient.cuh).

Nothing here needs a GPU.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from fxfuse.cuda.gemm import shared_sums_bytes
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.precision import ELEMENT

if TYPE_CHECKING:
    from fxfuse.cuda.conv2d_weight import Problem

HEADER: Final = "depthwise_gradient.cuh"
_CHANNELS: Final = 32
"""Channels of a thread block (kWarp)."""
_WARPS: Final = 8
_BLOCKS: Final = 2
"""Thread blocks that a multiprocessor holds (kBlocks)."""
_SHARES: Final = {(3, 1): (4, 3), (3, 2): (2, 3), (5, 1): (2, 5), (5, 2): (1, 5), (7, 1): (1, 4), (7, 2): (1, 4)}
"""By kernel and stride: how many rows of dy a thread reads at a time, and for how many rows of the filter it has sums.
These sums, and the window of x that the thread multiplies, are in registers."""
_MOST_SPLITS: Final = 2**15
_MAX_GRID_Y: Final = 65535


def candidates(problem: Problem) -> list[Kernel]:
    """The kernel that can run `problem`, in a list; empty if there is none. The filter has to be a small square.

    Its tensors are dy, x, the output (channels, 1, kernel, kernel), contiguous, and a workspace.
    """
    (kernel, width), (stride, other) = problem.kernel, problem.stride
    if kernel != width or stride != other or (kernel, stride) not in _SHARES or problem.dilation != (1, 1):
        return []
    channels = problem.channels
    if channels > 1 and (problem.x_strides[1], problem.dy_strides[1]) != (1, 1):
        return []
    tiles, (rows, height) = -(-channels // _CHANNELS), _SHARES[kernel, stride]
    strips = problem.images * -(-problem.out_size[0] // rows)
    if tiles > _MAX_GRID_Y or min(strips, channels, *problem.out_size) < 1:
        return []
    turns = _WARPS // -(-kernel // height)
    splits = max(1, min(_BLOCKS * problem.multiprocessors // tiles, -(-strips // turns), _MOST_SPLITS))
    element = ELEMENT[problem.precision]
    return [
        Kernel(
            name=f"depthwise filters' gradient {element.lower()}, {kernel}x{kernel}, stride {stride}, split {splits}",
            header=HEADER,
            type=f"DepthwiseGradient<{element}, {{output}}, {{epilogue}}, {kernel}, {stride}, {rows}, {height}>",
            params=_params(problem, splits),
            workspace=shared_sums_bytes(tiles, kernel * kernel * _CHANNELS, splits),
        )
    ]


def _params(problem: Problem, splits: int) -> bytes:
    """The struct DepthwiseGradientProblem of depthwise_gradient.cuh, packed."""
    strides = (*_along(problem.x_strides), *_along(problem.dy_strides))
    sizes = (problem.images, problem.channels, *problem.size, *problem.out_size, *problem.padding)
    return struct.pack("<15q", *sizes, *strides, splits)


def _along(strides: tuple[int, int, int, int]) -> tuple[int, int, int]:
    """The strides of image, row and column."""
    image, _, row, col = strides
    return image, row, col
