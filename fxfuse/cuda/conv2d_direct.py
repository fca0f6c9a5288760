"""The direct kernel for 3x3 convolutions on NCHW with stride 1 (conv2d_direct.cuh)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final

from fxfuse.cuda.conv2d_problem import (
    MAX_TILES,
    MULTIPROCESSORS,
    Conv2dProblem,
    access,
    extent,
    pack,
    same,
    slowdown,
)
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.precision import MMA, Precision, element_bytes
from fxfuse.layout import varying


@dataclass(frozen=True)
class Tile:
    """The tile of a thread block: Conv2dDirectConfig in conv2d_direct.cuh.

    A warp computes 16 * `mmas` filters for `rows` rows of 8 * `col_mmas` pixels. `cost` is the time per multiply-add on
    a full device, relative to the best tile, as measured on an H200.
    """

    mmas: int
    rows: int
    col_mmas: int
    warps: tuple[int, int, int]
    """Number of warps along filters, rows and columns."""
    images: int
    stages: int
    blocks_per_multiprocessor: int
    cost: float
    resident: bool = False
    """Whether all filters stay in shared memory. This requires that all channels are one chunk."""

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """Images, filters, rows and columns of the tile."""
        along_filters, along_rows, along_cols = self.warps
        return self.images, 16 * self.mmas * along_filters, self.rows * along_rows, 8 * self.col_mmas * along_cols

    @property
    def name(self) -> str:
        images, filters, rows, cols = self.extents
        of_images = f"{images}x" if images > 1 else ""
        return f"{filters}x{of_images}({rows}x{cols}), {self.stages} stages{', resident filters' * self.resident}"

    def tiles(self, problem: Conv2dProblem) -> int:
        images, filters, rows, cols = self.extents
        return (
            ceil(problem.images / images)
            * problem.groups
            * ceil(problem.group_filters / filters)
            * ceil(problem.out_size[0] / rows)
            * ceil(problem.out_size[1] / cols)
        )

    def workspace(self, problem: Conv2dProblem) -> int:
        """Bytes of the packed filters: FilterFragments in filter_fragments.cuh."""
        if self.resident:
            return 0
        filters = self.extents[1]
        chunks = ceil(problem.group_channels / _chunk(problem))
        return problem.groups * ceil(problem.group_filters / filters) * chunks * filters * 9 * _CHUNK_BYTES

    def shared_bytes(self, precision: Precision) -> int:
        """Bytes of shared memory of a thread block: Conv2dDirectConfig::kSharedBytes."""
        images, filters, rows, cols = self.extents
        size = element_bytes(precision)
        plane = images * (rows + 2) * (cols + 2 * (16 // size))
        pitch = plane + (40 - plane % 16) % 16
        stage = _CHUNK_BYTES * pitch + (_CHUNK_BYTES * plane if size == 2 else 0)
        filter_bytes = 9 * filters * _CHUNK_BYTES * (2 if precision == "tf32x3" else 1)  # split beforehand
        return self.stages * (stage + (0 if self.resident else filter_bytes)) + self.resident * filter_bytes


_CHUNK_BYTES: Final = 32
"""Bytes of a pixel's channels that the direct kernel copies at a time: a chunk."""

TILES: Final = (
    Tile(4, 2, 4, (1, 1, 4), 1, 3, 2, 0.9, resident=True),
    Tile(4, 2, 4, (1, 1, 8), 1, 3, 1, 0.66, resident=True),
    Tile(4, 2, 4, (1, 1, 4), 1, 3, 2, 1.0),
    Tile(4, 2, 4, (1, 1, 4), 1, 2, 2, 1.0),
    Tile(4, 2, 4, (1, 1, 8), 1, 3, 1, 0.95),
    Tile(4, 2, 4, (1, 2, 2), 1, 3, 2, 1.3),
    Tile(4, 2, 4, (2, 2, 1), 1, 3, 2, 1.35),
    Tile(4, 4, 2, (1, 4, 1), 1, 3, 2, 1.0),
)

HALF_TILES: Final = (
    Tile(4, 2, 4, (1, 1, 4), 1, 2, 2, 0.9, resident=True),
    Tile(4, 2, 4, (1, 1, 8), 1, 2, 1, 0.8, resident=True),
    Tile(4, 2, 4, (1, 1, 4), 1, 2, 2, 1.0),
    Tile(4, 2, 4, (1, 2, 2), 1, 2, 2, 1.3),
    Tile(4, 2, 4, (2, 2, 1), 1, 2, 2, 1.35),
)
"""For 16-bit elements, whose patches take twice the shared memory until they are interleaved. On maps of 28 columns and
less the library is twice as fast."""

SPLIT_TILES: Final = (Tile(2, 1, 4, (2, 1, 2), 1, 2, 3, 0.8, resident=True),)
"""For 3xTF32. Operands and sums take twice the registers; filters, which are split beforehand, take twice the shared
memory. With more channels than a chunk, wgmma by way of channels_last is faster."""

_SPEED: Final = 2.0
"""How much faster the direct kernel's best tile is than the implicit GEMM's, where both fit."""

_CUT_COLS: Final = 45
"""Columns of a tile at which storing pieces of rows costs as much as everything else."""

_MAX_GRID_YZ: Final = 65535  # CUDA's limit, for the kernel that packs filters


def _chunk(problem: Conv2dProblem) -> int:
    """Channels of a chunk."""
    return _CHUNK_BYTES // problem.element_bytes


def _cost(problem: Conv2dProblem, tile: Tile) -> float:
    """The cost in the unit of conv2d_problem.py. Blocks that share a multiprocessor share its speed."""
    images, filters, rows, cols = tile.extents
    chunk = _chunk(problem)
    products = filters * images * rows * cols * ceil(problem.group_channels / chunk) * chunk / problem.group_channels
    together = tile.blocks_per_multiprocessor
    waves, rest = divmod(tile.tiles(problem), MULTIPROCESSORS * together)
    blocks = waves * together + min(together, ceil(rest / MULTIPROCESSORS))
    # Rows cut into pieces are stored as many short runs: 1.5 times as slow for 64 columns, 1.1 for 128 (H200).
    cut = 1 + (_CUT_COLS / cols) ** 2 if cols < problem.out_size[1] else 1.0
    slower = slowdown(min(blocks, together)) / slowdown(together)  # relative to as many blocks as fit
    return blocks * products * tile.cost * cut * slower / _SPEED


def kernels(problem: Conv2dProblem) -> list[tuple[float, Kernel]]:
    """(cost, kernel) for each tile of the direct kernel that fits the problem."""
    fits = (
        problem.out_layout == "nchw"
        and problem.kernel == (3, 3)
        and problem.stride == (1, 1)
        and problem.dilation == (1, 1)
        and (problem.groups == 1 or problem.group_channels > 1)
        and problem.groups <= _MAX_GRID_YZ
        and same(problem.x_strides[3:], (1,), problem.size[1:])
    )
    steps = varying(problem.x_strides[:3], (problem.images, problem.channels, problem.size[0]))
    size = problem.element_bytes
    aligned = access(size, problem.x_alignment, *(step * size for step in steps)) == 16
    if not fits or (not aligned and problem.padding[1] > 1):
        return []

    def usable(tile: Tile) -> bool:
        images, filters, _, _ = tile.extents
        reach = extent((images, problem.channels, *problem.size), problem.x_strides)  # offsets have 32 bits
        return (
            tile.tiles(problem) <= MAX_TILES
            and ceil(problem.group_filters / filters) <= _MAX_GRID_YZ
            and reach < 2**31
            and (not tile.resident or (problem.group_channels <= _chunk(problem) and problem.groups == 1))
        )

    found = []
    of_precision = HALF_TILES if size == 2 else SPLIT_TILES if problem.precision == "tf32x3" else TILES
    for tile in filter(usable, of_precision):
        numbers = (
            *(tile.mmas, tile.rows, tile.col_mmas, *tile.warps, tile.images, tile.stages),
            *(tile.blocks_per_multiprocessor, int(tile.resident)),
        )
        skew = str(-problem.padding[1] % (16 // size)) if aligned else "kAnySkew"
        config = f"{MMA[problem.precision]}, {', '.join(map(str, numbers))}, {skew}"
        cpp = f"Conv2dDirect<Conv2dDirectConfig<{config}>, {{output}}, {{epilogue}}>"
        kernel = Kernel(
            f"conv2d direct 3x3 {problem.precision} {tile.name}",
            "conv2d_direct.cuh",
            cpp,
            pack(problem),
            tile.workspace(problem),
            tile.shared_bytes(problem.precision),
        )
        found.append((_cost(problem, tile), kernel))
    return found
