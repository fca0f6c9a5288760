"""Convolutions of few pixels on NCHW: the kernel of conv2d_few_pixels.cuh."""

from __future__ import annotations

from math import ceil
from typing import Final

from fxfuse.cuda.conv2d_problem import PRODUCTS, Conv2dProblem, access, pack, same, varying
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.precision import MMA

# As in conv2d_few_pixels.cuh.
_PIXELS: Final = 64
_GROUPS: Final = 4  # of channels in a chunk
_PIECE_BYTES: Final = 16
_SHARED: Final = 163 << 10  # bytes that a block may have
_FILTERS: Final = {(1, 1): (8, 16, 32), (3, 3): (8,)}
"""Of a block, by the filter's size. With more taps their weights would take all registers."""
_MOST_STAGES: Final = 3
_MOST_BLOCKS: Final = 4
"""On a multiprocessor, one after another. Beyond, others read x and the weight less often."""

# Microseconds of an H200's multiprocessor.
_START: Final = 1.5  # more than the implicit GEMM, for warps to add up what they have
_PER_READ: Final = 0.9e-3  # for 32 lanes to read an element of a pixel and prepare it
_PER_KILOBYTE: Final = 0.012  # copied from L2


def kernels(problem: Conv2dProblem) -> list[tuple[float, Kernel]]:
    """The kernels for few pixels and what they cost, in the unit that conv2d_problem.py speaks of."""
    if not _fits(problem):
        return []
    channels, taps = problem.channels, problem.kernel[0] * problem.kernel[1]
    chunks = ceil(channels / (_GROUPS * _group(problem)))
    warps = 8 if chunks > 4 else 4
    stage_bytes = _stage_bytes(problem)
    stages = min(_MOST_STAGES, ceil(chunks / warps), (_SHARED - stage_bytes // _GROUPS) // (warps * stage_bytes))
    if stages == 0:
        return []
    tiles = problem.images * ceil(problem.out_size[0] * problem.out_size[1] / _PIXELS)
    found = []
    for filters in _FILTERS[problem.kernel]:
        waves = ceil(tiles * ceil(problem.out_channels / filters) / problem.multiprocessors)
        if waves > _MOST_BLOCKS:
            continue
        reads, copied = _PIXELS * channels * taps / 32, chunks * stage_bytes / 1024
        microseconds = _START + waves * (_PER_READ * reads + _PER_KILOBYTE * copied)
        config = f"{MMA[problem.precision]}, {problem.kernel[0]}, {problem.kernel[1]}, {filters}, {warps}, {stages}"
        kernel = Kernel(
            f"conv2d few pixels {problem.kernel[0]}x{problem.kernel[1]} {problem.precision}, {filters} filters, "
            f"{warps} warps, {stages} stage{'s' * (stages > 1)}",
            "conv2d_few_pixels.cuh",
            f"Conv2dFewPixels<Conv2dFewPixelsConfig<{config}>, {{output}}, {{epilogue}}>",
            pack(problem),
        )
        found.append((microseconds * PRODUCTS / (channels * taps), kernel))
    return sorted(found, key=lambda costed: costed[0])[:2]


def _fits(problem: Conv2dProblem) -> bool:
    size, (height, width) = problem.element_bytes, problem.size
    plane, taps = height * width, problem.kernel[0] * problem.kernel[1]
    if (
        problem.precision == "tf32x3"
        or problem.kernel not in _FILTERS
        or problem.groups != 1
        or problem.dilation != (1, 1)
        or problem.out_layout != "nchw"
        or problem.channels % _group(problem)
        or not same(problem.x_strides[2:], (width, 1), problem.size)
        or not same(problem.weight_strides[1:], (taps, problem.kernel[1], 1), (problem.channels, *problem.kernel))
    ):
        return False
    whole = _whole_planes(problem)
    if whole and problem.x_strides[1] != plane:
        return False
    starts = 1 if whole else 2
    of_x = varying(problem.x_strides[:starts], (problem.images, problem.channels)[:starts])
    of_filters = varying(problem.weight_strides[:1], (problem.out_channels,))
    return all(
        access(size, alignment, *(step * size for step in steps)) == _PIECE_BYTES
        for alignment, steps in ((problem.x_alignment, of_x), (problem.weight_alignment, of_filters))
    )


def _group(problem: Conv2dProblem) -> int:
    """Channels: Conv2dFewPixelsConfig::kGroup."""
    return 8 if problem.kernel == (1, 1) else _PIECE_BYTES // problem.element_bytes


def _whole_planes(problem: Conv2dProblem) -> bool:
    """Whether planes are copied whole, since they start anywhere: Conv2dFewPixelsTiling::whole_planes."""
    piece = _PIECE_BYTES // problem.element_bytes
    return bool(problem.size[0] * problem.size[1] % piece or problem.x_strides[1] % piece)


def _stage_bytes(problem: Conv2dProblem) -> int:
    """Shared memory for a warp's chunk of x: Conv2dFewPixelsTiling::stage_bytes."""
    size, plane, out_width = problem.element_bytes, problem.size[0] * problem.size[1], problem.out_size[1]
    piece, pixels = _PIECE_BYTES // size, problem.out_size[0] * out_width
    tile_pixels = ceil(pixels / ceil(pixels / _PIXELS))
    rows = (tile_pixels + out_width - 2) // out_width + 1
    reach = ((rows - 1) * problem.stride[0] + problem.kernel[0]) * problem.size[1] + piece
    elements = plane if _whole_planes(problem) else ceil(min(reach, plane) / piece) * piece
    words = _group(problem) * elements * size // 4
    return (words + (8 - words) % 32) * 4 * _GROUPS
