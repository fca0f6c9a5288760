"""The kernel for 1x1 and 3x3 convolutions of few pixels on NCHW (conv2d_few_pixels.cuh)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import ceil
from typing import Final

from fxfuse.cuda.conv2d_problem import PRODUCTS, Conv2dProblem, access, pack, same
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.precision import MMA
from fxfuse.layout import varying


@dataclass(frozen=True)
class Tile:
    """The tile of a thread block, and the number of warps that share its channels: Conv2dFewPixelsConfig."""

    filters: int
    pixels: int
    warps: int


TILES: Final = {
    (1, 1): (Tile(16, 64, 8), Tile(16, 32, 8), Tile(32, 32, 8)),
    (3, 3): (Tile(8, 32, 8), Tile(16, 32, 8)),
}
"""Tiles by the filter's size. With more filters in a tile, the weights would take all registers."""

# As in conv2d_few_pixels.cuh.
_GROUPS: Final = 4  # groups of channels in a chunk
_PIECE_BYTES: Final = 16
_MOST_SHARED: Final = 163 << 10  # bytes that a block may have: kMostShared
_PLANES: Final = (66, 106, 170)
"""Elements of a channel that a tile may see: each kernel is compiled for one of these."""
_MOST_STAGES: Final = 3
_MOST_BLOCKS: Final = 4
"""Most blocks on a multiprocessor, one after another. With more, other kernels read x and the weight less often."""

# Microseconds on a multiprocessor of an H200, fitted to 20 measured times: most are within a quarter of them.
_START: Final = 1.0  # more than the implicit GEMM, for warps to add up their sums
_PER_READ, _PER_READ_AND_FILTER = 1.0e-3, 0.08e-3  # of 32 lanes: read an element of a pixel; per filter, multiply it
_PER_KILOBYTE: Final = 0.02  # copied from L2


@dataclass(frozen=True)
class _Tiling:
    """How an image is divided into tiles, and what a warp copies of it: Conv2dFewPixelsProblem."""

    pixels: int
    """Pixels of a tile."""
    whole_planes: bool
    """Whether planes are copied whole: see `_whole_planes`."""
    run: int
    """Elements of one copy, for 1x1 filters: of a plane, or of all planes of a group."""
    group: int
    """Elements from one group of channels to the next in shared memory: 8 banks apart, as adjacent lanes read them."""
    plane: int
    """Conv2dFewPixelsConfig::kPlane."""

    def pack(self, problem: Conv2dProblem) -> bytes:
        return pack(problem) + struct.pack("<4q", self.pixels, self.whole_planes, self.run, self.group)


def kernels(problem: Conv2dProblem) -> list[tuple[float, Kernel]]:
    """(cost, kernel) for the two cheapest tiles that fit the problem, in the unit of conv2d_problem.py."""
    if not _fits(problem):
        return []
    (rows, cols), channels = problem.kernel, problem.channels
    taps, group = rows * cols, _group(problem)
    chunks = ceil(channels / (_GROUPS * group))
    # With several taps: bytes of shared memory through which a warp's lanes exchange the weights of eight filters.
    exchange = 8 * _GROUPS * group * taps * problem.element_bytes if taps > 1 else 0
    found = []
    room = min(_MOST_SHARED, problem.most_shared)
    for tile in TILES[problem.kernel]:
        tiling = _tiling(problem, tile.pixels)
        if tiling is None:
            continue
        stage_bytes = _GROUPS * tiling.group * problem.element_bytes
        stages = min(_MOST_STAGES, ceil(chunks / tile.warps), (room // tile.warps - exchange) // stage_bytes)
        tiles = problem.images * ceil(problem.out_size[0] * problem.out_size[1] / tiling.pixels)
        waves = ceil(tiles * ceil(problem.out_channels / tile.filters) / problem.multiprocessors)
        if waves > _MOST_BLOCKS or stages < 1:
            continue
        reads, copied = tile.pixels * channels * taps / 32, chunks * stage_bytes / 1024
        per_read = _PER_READ + _PER_READ_AND_FILTER * tile.filters
        microseconds = _START + waves * (per_read * reads + _PER_KILOBYTE * copied)
        numbers = (rows, cols, tile.filters, tile.pixels, tile.warps, stages, tiling.plane)
        config = f"{MMA[problem.precision]}, {', '.join(map(str, numbers))}"
        kernel = Kernel(
            f"conv2d few pixels {rows}x{cols} {problem.precision} {tile.filters}x{tile.pixels}, {tile.warps} warps, "
            f"{stages} stage{'s' * (stages > 1)}",
            "conv2d_few_pixels.cuh",
            f"Conv2dFewPixels<Conv2dFewPixelsConfig<{config}>, {{output}}, {{epilogue}}>",
            tiling.pack(problem),
        )
        found.append((microseconds * PRODUCTS / (channels * taps), kernel))
    return sorted(found, key=lambda costed: costed[0])[:2]


def _fits(problem: Conv2dProblem) -> bool:
    size, (_, width), taps = problem.element_bytes, problem.size, problem.kernel[0] * problem.kernel[1]
    if (
        problem.kernel not in TILES
        or problem.precision == "tf32x3"
        or problem.groups != 1
        or problem.dilation != (1, 1)
        or problem.out_layout != "nchw"
        or problem.channels % _group(problem)
        or not same(problem.weight_strides[1:], (taps, problem.kernel[1], 1), (problem.channels, *problem.kernel))
    ):
        return False
    of_filters = varying(problem.weight_strides[:1], (problem.out_channels,))
    if access(size, problem.weight_alignment, *(step * size for step in of_filters)) < _PIECE_BYTES:
        return False
    if taps > 1:
        return size == 4  # elements are copied one by one
    whole = _whole_planes(problem)
    if (
        problem.padding != (0, 0)
        or not same(problem.x_strides[2:], (width, 1), problem.size)
        or (whole and problem.x_strides[1] != problem.size[0] * width)
    ):
        return False
    starts = 1 if whole else 2
    of_x = varying(problem.x_strides[:starts], (problem.images, problem.channels)[:starts])
    return access(size, problem.x_alignment, *(step * size for step in of_x)) == _PIECE_BYTES


def _group(problem: Conv2dProblem) -> int:
    """Channels of a group: Conv2dFewPixelsConfig::kGroup."""
    return 8 if problem.kernel == (1, 1) else _PIECE_BYTES // problem.element_bytes


def _whole_planes(problem: Conv2dProblem) -> bool:
    """Whether planes are copied whole, because they are not aligned."""
    piece = _PIECE_BYTES // problem.element_bytes
    return bool(problem.size[0] * problem.size[1] % piece or problem.x_strides[1] % piece)


def _tiling(problem: Conv2dProblem, pixels: int) -> _Tiling | None:
    """The tiling with at most `pixels` pixels in a tile; None if a tile sees more of a channel than any of _PLANES."""
    size, (height, width), (out_height, out_width) = problem.element_bytes, problem.size, problem.out_size
    channels = _group(problem)
    tile_pixels = ceil(out_height * out_width / ceil(out_height * out_width / pixels))
    ends = (tile_pixels + out_width - 2) // out_width  # most ends of rows in a tile
    if problem.kernel != (1, 1):
        rows = min(ends, out_height - 1) * problem.stride[0] + problem.kernel[0]
        seen = rows * ((out_width - 1) * problem.stride[1] + problem.kernel[1])
        plane = next((plane for plane in _PLANES if plane >= seen), None)
        return None if plane is None else _Tiling(tile_pixels, False, 0, channels * plane, plane)
    if _whole_planes(problem):
        run = elements = channels * height * width
    else:
        # From the tile's first pixel of x, rounded down to a whole piece, to its last.
        piece = _PIECE_BYTES // size
        at_end = max(0, problem.stride[0] * width - problem.stride[1] * out_width)
        reach = (tile_pixels - 1) * problem.stride[1] + ends * at_end + piece
        run = ceil(min(reach, height * width) / piece) * piece
        elements = channels * run
    words = elements * size // 4
    return _Tiling(tile_pixels, _whole_planes(problem), run, (words + (8 - words) % 32) * 4 // size, 0)
