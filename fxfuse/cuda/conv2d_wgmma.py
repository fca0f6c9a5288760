"""Hopper's kernel for convolutions on NCHW with filters of several taps, by wgmma (conv2d_wgmma.cuh)."""

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
    """The tile of a thread block: Conv2dWgmmaConfig in conv2d_wgmma.cuh.

    `groups` is the number of warpgroups along filters and along pixels. Each computes 64 filters of two segments of
    pixels. Two blocks of one warpgroup share a multiprocessor; a block of two warpgroups has its own. `cost` is the
    time per output on a full device, relative to the best tile, as measured on an H200.
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
"""Positions of the patch that one instruction multiplies."""

_STEP_BYTES: Final = 32
"""Bytes of a position's channels that one instruction multiplies."""

# As in conv2d_wgmma_config.cuh; bytes of shared memory.
_SHARED: Final = {1: 113 << 10, 2: 227 << 10}  # most of a thread block, by its number of warpgroups
_HEADER: Final = 512
_MOST_TAPS: Final = 64
_MOST_STAGES: Final = 8

_PER_PRODUCT: Final = 0.27
"""Time per multiply-add, in units of the implicit GEMM's."""
_START: Final = 8.0
"""Microseconds before the first and after the last product, packing filters included, beyond the implicit GEMM's."""


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
    """Segments of 32-bit results for which shared memory has room while they are stored."""

    def pack(self, problem: Conv2dProblem) -> bytes:
        fields = (self.segment_rows, self.row_segments, self.rows, self.pitch, self.steps, self.stages)
        return pack(problem) + struct.pack(f"<{len(fields)}q", *fields)


def _patch(problem: Conv2dProblem, tile: Tile) -> _Patch | None:
    """The patch of x under a tile, and its stages; None if too few stages fit into shared memory."""
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
    # In 3xTF32 a stage has all channels (see `kernels`). One is enough: it is filled while results are stored.
    fewest = 1 if _parts(problem) > 1 else 2
    groups = tile.groups[0] * tile.groups[1]
    # A warpgroup stores results through shared memory: both its segments if storing takes longer than the products.
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
    """Parts into which each number is split: two in 3xTF32."""
    return 2 if problem.precision == "tf32x3" else 1


def _is_plain(problem: Conv2dProblem) -> bool:
    """Whether the filter (3x3, stride and dilation 1) is a compile-time constant of the kernel."""
    return problem.kernel == (3, 3) and problem.stride == problem.dilation == (1, 1)


def _cost(problem: Conv2dProblem, tile: Tile, patch: _Patch) -> float:
    """The cost in the unit of conv2d_problem.py."""
    outputs = tile.filters * tile.segments * _SEGMENT
    padding = _steps(problem) * _STEP_BYTES / (problem.group_channels * problem.element_bytes)
    products = ceil(patch.tiles / problem.multiprocessors) * outputs * tile.cost * _PER_PRODUCT * padding
    return products + _START * PRODUCTS / problem.reduction


def kernels(problem: Conv2dProblem) -> list[tuple[float, Kernel]]:
    """(cost, kernel) for each tile that fits the problem. With a single tap other kernels are faster.

    In 3xTF32 there are kernels only for plain filters (`_is_plain`) and channels of one step: see multiply_split in
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
        # Positions that a thread fetches at once: 4, for which it has registers; 3 if these take no more turns, or if
        # the thread splits numbers (3xTF32).
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
