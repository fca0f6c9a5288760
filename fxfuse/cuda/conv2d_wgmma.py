"""Convolutions on NCHW by Hopper's warpgroup products, with filters of several taps: the kernel of conv2d_wgmma.cuh."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import ceil
from typing import Final

from fxfuse.cuda.conv2d_problem import MAX_TILES, PRODUCTS, Conv2dProblem, pack
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.precision import MMA


@dataclass(frozen=True)
class Tile:
    """A thread block's tile in Hopper's kernel: Conv2dWgmmaConfig in conv2d_wgmma.cuh.

    `groups` of four warps, along filters and pixels, compute 64 filters of two segments of pixels each. One such block
    shares a multiprocessor with another, one of two groups does not. `cost` is the time per output on a full device,
    relative to the best, as measured on an H200.
    """

    groups: tuple[int, int]
    cost: float

    @property
    def filters(self) -> int:
        return 64 * self.groups[0]

    @property
    def segments(self) -> int:
        return 2 * self.groups[1]


TILES: Final = (
    Tile((2, 1), 1.0),
    Tile((1, 2), 1.05),
    Tile((1, 1), 1.15),
)
SPLIT_TILES: Final = (
    Tile((1, 1), 1.0),
    Tile((1, 2), 1.25),
)
"""For 3xTF32. Two blocks on a multiprocessor have room for one stage each."""

_SEGMENT: Final = 128
"""Positions of the patch that an instruction multiplies."""

_STEP_BYTES: Final = 32
"""Of a position's channels, that an instruction multiplies."""

# As in conv2d_wgmma_config.cuh; bytes of shared memory.
_SHARED: Final = {1: 113 << 10, 2: 227 << 10}  # that a thread block may have, by its groups
_HEADER: Final = 512
_MOST_TAPS: Final = 64
_MOST_STAGES: Final = 8

_PER_PRODUCT: Final = 0.27
"""Time per product, in units of the implicit GEMM's."""
_START: Final = 8.0
"""Microseconds more than the implicit GEMM before products begin and after they end, packing the filters included."""


@dataclass(frozen=True)
class _Patch:
    """How the kernel cuts a problem up: Conv2dWgmmaProblem in conv2d_wgmma_config.cuh."""

    segment_rows: int
    row_segments: int
    rows: int
    pitch: int
    steps: int
    stages: int
    positions: int
    tiles: int
    staged: int
    """Segments of 32-bit results for which there is room on their way out."""

    def pack(self, problem: Conv2dProblem) -> bytes:
        fields = (self.segment_rows, self.row_segments, self.rows, self.pitch, self.steps, self.stages)
        return pack(problem) + struct.pack(f"<{len(fields)}q", *fields)


def _patch(problem: Conv2dProblem, tile: Tile) -> _Patch | None:
    """The patch under a tile and its stages, None if too few fit into shared memory."""
    (height, width), taps = problem.out_size, problem.kernel[0] * problem.kernel[1]
    over_rows, over_cols = (
        (kernel - 1) * dilation // stride
        for kernel, dilation, stride in zip(problem.kernel, problem.dilation, problem.stride, strict=True)
    )
    segment_rows, row_segments = min((_SEGMENT + over_cols) // (width + over_cols), height), 1
    if segment_rows == 0:
        segment_rows, row_segments = 1, min(tile.segments, ceil(width / _SEGMENT))
    tile_rows, tile_cols = tile.segments // row_segments * segment_rows, row_segments * _SEGMENT
    rows, pitch = tile_rows + over_rows, min(width, tile_cols) + over_cols
    positions = problem.stride[0] * problem.stride[1] * rows * pitch
    steps = min(_steps(problem), max(1, 8 // taps))
    # Of split numbers a stage has all channels (see `kernels`): one is enough, filled while results are stored.
    fewest = 1 if _parts(problem) > 1 else 2
    groups = tile.groups[0] * tile.groups[1]
    # A group stores results through shared memory: of both its segments where that takes more time than the products.
    for staged in (2, 1) if _steps(problem) <= 2 * steps else (1,):
        kept = groups * (4 * 8 * (staged * _SEGMENT + 8) * 4 + positions * 4)
        room = _SHARED[groups] - _HEADER - kept
        stages = room // (steps * _parts(problem) * _STEP_BYTES * (positions + taps * tile.filters))
        if stages >= fewest:
            break
    else:
        return None
    tiles = (
        problem.images
        * problem.groups
        * ceil(problem.group_filters / tile.filters)
        * ceil(height / tile_rows)
        * ceil(width / tile_cols)
    )
    stages = min(stages, _MOST_STAGES)
    return _Patch(segment_rows, row_segments, rows, pitch, steps, stages, positions, tiles, staged)


def _steps(problem: Conv2dProblem) -> int:
    return ceil(problem.group_channels * problem.element_bytes / _STEP_BYTES)


def _parts(problem: Conv2dProblem) -> int:
    """Of each number, that are multiplied with one another."""
    return 2 if problem.precision == "tf32x3" else 1


def _is_plain(problem: Conv2dProblem) -> bool:
    """Whether the kernel knows the filter when it is compiled."""
    return problem.kernel == (3, 3) and problem.stride == problem.dilation == (1, 1)


def _cost(problem: Conv2dProblem, tile: Tile, patch: _Patch) -> float:
    """In the unit that conv2d_problem.py speaks of."""
    outputs = tile.filters * tile.segments * _SEGMENT
    padding = _steps(problem) * _STEP_BYTES / (problem.group_channels * problem.element_bytes)
    products = ceil(patch.tiles / problem.multiprocessors) * outputs * tile.cost * _PER_PRODUCT * padding
    return products + _START * PRODUCTS / problem.reduction


def kernels(problem: Conv2dProblem) -> list[tuple[float, Kernel]]:
    """Hopper's kernels and what they cost. Of a single tap the others are faster.

    In 3xTF32 only where all channels are one step of a filter that the kernel knows: see multiply_split in
    conv2d_wgmma.cuh.
    """
    taps, split = problem.kernel[0] * problem.kernel[1], _parts(problem) > 1
    fits = (
        problem.hopper
        and (not split or (_is_plain(problem) and _steps(problem) == 1))
        and problem.out_layout == "nchw"
        and 1 < taps <= _MOST_TAPS
        and (problem.groups == 1 or problem.group_channels > 1)
    )
    found = []
    for tile in (SPLIT_TILES if split else TILES) if fits else ():
        patch = _patch(problem, tile)
        if patch is None or patch.tiles > MAX_TILES:
            continue
        # Positions that a thread fetches at once: up to 4, for which it has registers, or 3 if it comes back as often
        # or splits them.
        together = 3 if split or patch.positions <= 384 or 512 < patch.positions <= 768 else 4
        numbers = (*tile.groups, 3 if _is_plain(problem) else 0, together * problem.element_bytes // 4, patch.staged)
        cpp = (
            f"Conv2dWgmma<Conv2dWgmmaConfig<{MMA[problem.precision]}, {', '.join(map(str, numbers))}>, "
            f"{{output}}, {{epilogue}}>"
        )
        filters = problem.groups * ceil(problem.group_filters / tile.filters) * tile.filters
        steps = ceil(_steps(problem) / patch.steps) * patch.steps
        workspace = filters * steps * _parts(problem) * taps * _STEP_BYTES
        name = f"conv2d wgmma {problem.precision} {tile.filters}x{tile.segments * _SEGMENT}"
        kernel = Kernel(name, "conv2d_wgmma.cuh", cpp, patch.pack(problem), workspace)
        found.append((_cost(problem, tile, patch), kernel))
    return found
