"""Kernels for the gradient of a convolution's filters, where channels are contiguous.

    out[k, c, r, s] = sum over n, p, q of dy[n, k, p, q] * x[n, c, p * stride - padding + r * dilation, ...]

This is a matrix product for each group, whose weight is gathered from windows (gemm.py): row (n, p, q) of the weight is
the window of that output pixel. Of a 1x1 convolution without padding and stride the windows are the pixels themselves.
Depthwise convolutions have a kernel of their own (depthwise_gradient.py). Nothing here needs a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fxfuse.cuda import depthwise_gradient, gemm, gemm_problem
from fxfuse.cuda.conv2d_problem import access, same
from fxfuse.cuda.gemm_problem import MAX_ACCESS, Errors, Windows
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.precision import Precision, element_bytes
from fxfuse.layout import varying

LEAST_ACCESS = 4  # bytes of one cp.async


@dataclass(frozen=True)
class Problem:
    """Sides are (height, width). Strides are in elements, in the order of the tensors' dimensions; alignments of the
    first elements' addresses are in bytes. The output is contiguous in channels_last."""

    images: int
    filters: int
    channels: int
    """filters, channels: of all groups together."""
    size: tuple[int, int]
    """Height and width of x."""
    out_size: tuple[int, int]
    """Height and width of dy."""
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    precision: Precision
    dy_strides: tuple[int, int, int, int]
    x_strides: tuple[int, int, int, int]
    dy_alignment: int = MAX_ACCESS
    x_alignment: int = MAX_ACCESS
    multiprocessors: int = 108
    """Multiprocessors of the device. This default and the next one are the A100's."""
    shared_memory: int = 164 * 1024
    """Bytes per multiprocessor."""
    shared_memory_per_block: int | None = None
    """As gemm_problem.Problem has it."""
    hopper: bool = False
    """Whether the device is a Hopper GPU (sm_90), and so has wgmma."""
    eager_error: Errors | None = None
    """The error of torch's own gradient, which limits the error of 3xTF32; None if it was not measured."""


def candidates(problem: Problem) -> Sequence[Kernel]:
    """The kernels that can run the problem, best first by their estimates; none if no template fits.

    Their tensors are dy, x, the output, and a workspace.
    """
    if min(problem.images, *problem.out_size, *problem.size) < 1:
        return ()
    if problem.groups == problem.filters == problem.channels:
        of_depthwise = depthwise_gradient.candidates(problem)
        if of_depthwise or problem.channels > 1:
            return of_depthwise
    product = _as_gemm(problem)
    return () if product is None else gemm.candidates(product)


def _as_gemm(problem: Problem) -> gemm_problem.Problem | None:
    """The gradient as a product of dy, (filters, pixels), and windows, (pixels, taps and channels), for each group."""
    has_channels = problem.channels == 1 or problem.x_strides[1] == 1
    has_filters = problem.filters == 1 or problem.dy_strides[1] == 1
    of_dy = _pixel_stride(problem.dy_strides, (problem.images, *problem.out_size))
    if not has_channels or not has_filters or of_dy is None:
        return None
    filters, channels = problem.filters // problem.groups, problem.channels // problem.groups
    of_x = _pixel_stride(problem.x_strides, (problem.images, *problem.size))
    is_pointwise = problem.kernel == problem.stride == (1, 1) and problem.size == problem.out_size
    image, _, row, col = problem.x_strides
    windows, alignment = None, problem.x_alignment
    if not is_pointwise or of_x is None:
        size = element_bytes(problem.precision)
        steps = varying((image, row, col), (problem.images, *problem.size))
        alignment = access(size, alignment, channels * size, *(step * size for step in steps))
        windows = Windows(
            size=problem.size,
            channels=channels,
            out_size=problem.out_size,
            kernel=problem.kernel,
            stride=problem.stride,
            padding=problem.padding,
            dilation=problem.dilation,
            x_strides=(image, row, col),
        )
        if alignment < LEAST_ACCESS:
            return None
    columns = math.prod(problem.kernel) * channels
    return gemm_problem.Problem(
        m=filters,
        n=columns,
        k=problem.images * math.prod(problem.out_size),
        precision=problem.precision,
        weight_layout="kn",
        x_layout="km",
        x_stride=of_dy,
        weight_stride=0 if of_x is None else of_x,
        out_stride=columns,
        x_alignment=problem.dy_alignment,
        weight_alignment=alignment,
        weight_windows=windows,
        batches=problem.groups,
        x_step=filters,
        weight_step=channels,
        multiprocessors=problem.multiprocessors,
        shared_memory=problem.shared_memory,
        shared_memory_per_block=problem.shared_memory_per_block,
        hopper=problem.hopper,
        eager_error=problem.eager_error,
    )


def _pixel_stride(strides: tuple[int, int, int, int], sizes: tuple[int, int, int]) -> int | None:
    """The distance between pixels, if those of all images lie evenly spaced one after another; else None."""
    image, _, row, col = strides
    images, height, width = sizes
    if width == 1:
        col = row if height > 1 else image
    return col if same((image, row), (height * width * col, width * col), (images, height)) else None
