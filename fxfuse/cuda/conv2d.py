"""Convolution problems and the kernels that can run them: implicit GEMM, direct 3x3, Hopper's, depthwise, GEMM.

A problem comes in as sizes, strides, alignment and precision; kernels go out, best first by a model of their cost.
Everything here is arithmetic on these numbers: no GPU is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Final, Literal

from fxfuse.cuda import gemm
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.precision import Precision

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
    hopper: bool = False
    """Whether the device has the instructions that only Hopper has."""

    @property
    def element_bytes(self) -> int:
        return 4 if self.precision in ("tf32", "tf32x3") else 2

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


def unsupported(problem: Conv2dProblem) -> str | None:
    """Why no kernel can run the problem; None if one can."""
    largest = 2**31 - 1  # 32-bit offsets within an image, within a filter and over an image's output pixels
    if problem.groups < 1 or problem.channels % problem.groups or problem.out_channels % problem.groups:
        return f"{problem.groups} groups divide {problem.channels} channels into {problem.out_channels} unevenly"
    if problem.reduction == 0:
        return "the sum behind each output is empty"
    if _extent((problem.channels, *problem.size), problem.x_strides[1:]) > largest:
        return "an image spans more than 2^31 elements"
    if _extent((problem.group_channels, *problem.kernel), problem.weight_strides[1:]) > largest:
        return "a filter spans more than 2^31 elements"
    dilated = [(kernel - 1) * dilation for kernel, dilation in zip(problem.kernel, problem.dilation, strict=True)]
    if _extent((problem.channels, dilated[0] + 1, dilated[1] + 1), problem.x_strides[1:]) > largest:
        return "a dilated filter spans more than 2^31 elements of the image"
    if max(*problem.size, *dilated, *problem.padding) >= 2**29:
        return "a side of the image, of the padding or of the dilated filter is longer than 2^29"
    if problem.out_size[0] * problem.out_size[1] > largest - max(tile.pixels for tile in _TILES):
        return "an output image has more than 2^31 pixels"
    return None


def candidates(problem: Conv2dProblem) -> tuple[Kernel, ...]:
    """The kernels that can run the problem, best first; none if `unsupported` gives a reason.

    Depthwise problems have their own kernel, which comes first. The others are matrix products, where the layouts allow
    it, or ordered by what they cost.
    """
    if unsupported(problem) is not None:
        return ()
    product = _as_gemm(problem)
    if product is not None and (kernels := gemm.candidates(product)):
        return kernels
    outputs = problem.pixels * problem.out_channels / problem.multiprocessors
    families = ((_wgmma(problem), 60), (_direct(problem), 60), (_implicit_gemm(problem), 200))
    # Times to store an output as a product's time of the implicit GEMM, as measured on an H200 with 8 channels.
    costed = [
        (cost + outputs * store / problem.reduction, kernel) for family, store in families for cost, kernel in family
    ]
    by_cost = sorted(costed, key=lambda costed: costed[0])
    return (*_depthwise(problem), *(kernel for _, kernel in by_cost))


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


def _extent(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Distance between the first and the last element, in elements."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _access(element_bytes: int, *multiples: int) -> int:
    """The largest power of two up to 16 that divides every one of `multiples`, in bytes."""
    return next(size for size in (16, 8, 4, 2) if size == element_bytes or all(m % size == 0 for m in multiples))


def _same(strides: tuple[int, ...], expected: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether strides are as expected; those of dimensions of size 1 do not matter."""
    return all(size == 1 or stride == e for stride, e, size in zip(strides, expected, sizes, strict=True))


def _varying(strides: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[int]:
    return (stride for stride, size in zip(strides, sizes, strict=True) if size > 1)


# --------------------------------------------------------------------------------------- channels_last as GEMM


def _as_gemm(problem: Conv2dProblem) -> gemm.Problem | None:
    """A convolution on channels_last as a product of its pixels' windows and its filters; None where it is none.

    A row of x is a pixel as it lies in memory, if the filter is a single tap that steps over none.
    """
    image, channel, row, col = problem.x_strides
    filters_in_order = (1, problem.kernel[1] * problem.channels, problem.channels)
    if (
        problem.groups != 1
        or problem.out_layout != "nhwc"
        or (channel != 1 and problem.channels > 1)
        or not _same(problem.weight_strides[1:], filters_in_order, (problem.channels, *problem.kernel))
    ):
        return None
    (height, width), windows = problem.size, None
    pixels_follow = _same((image, row), (height * width * col, width * col), (problem.images, height))
    if problem.kernel != (1, 1) or problem.stride != (1, 1) or problem.size != problem.out_size or not pixels_follow:
        if max(problem.kernel) > gemm.MOST_TAPS:
            return None
        windows = gemm.Windows(
            size=problem.size,
            channels=problem.channels,
            out_size=problem.out_size,
            kernel=problem.kernel,
            stride=problem.stride,
            padding=problem.padding,
            dilation=problem.dilation,
            x_strides=(image, row, col),
        )
    return gemm.Problem(
        m=problem.pixels,
        n=problem.out_channels,
        k=problem.reduction,
        precision=problem.precision,
        weight_layout="nk",
        x_stride=col if width > 1 else row if height > 1 else image,
        weight_stride=problem.weight_strides[0] if problem.out_channels > 1 else problem.reduction,
        out_stride=problem.out_channels,
        x_alignment=problem.x_alignment if windows is None else _x_access(problem, "nhwc", problem.channels),
        weight_alignment=problem.weight_alignment,
        rows_per_batch=problem.out_size[0] * problem.out_size[1],
        windows=windows,
        multiprocessors=problem.multiprocessors,
        shared_memory=problem.shared_memory,
        hopper=problem.hopper,
    )


# ------------------------------------------------------------------------------------------- implicit GEMM


@dataclass(frozen=True)
class _Tile:
    """A thread block's part of the output, how its warps and stages share it, and what it costs.

    `cost` is the time per product on a full device, relative to the best tile of its table, as measured on an H200
    with 3x3 and 1x1 convolutions. Few filters cost most: every block fetches its pixels again.
    """

    filters: int
    pixels: int
    warps: tuple[int, int]
    stages: int
    cost: float
    blocks: int = 1
    """For which a multiprocessor must have registers."""


_TILES: Final = (
    _Tile(128, 64, (2, 2), 3, 1.0),
    _Tile(128, 128, (2, 4), 3, 1.1),
    _Tile(64, 128, (2, 2), 3, 1.35),
    _Tile(64, 64, (2, 2), 4, 1.35),
    _Tile(32, 64, (1, 4), 4, 2.0),
)

_NARROW_TILES: Final = (
    _Tile(128, 128, (2, 4), 3, 1.0),
    _Tile(128, 64, (2, 2), 3, 1.05),
    _Tile(64, 128, (2, 4), 3, 1.35),
    _Tile(64, 64, (2, 2), 4, 1.5),
    _Tile(32, 64, (1, 4), 4, 2.5),
)
"""For float32 in pieces of less than 16 bytes: their addresses take registers from the largest tile."""

_SMALL_WARP_TILES: Final = (
    _Tile(128, 128, (2, 4), 3, 1.0),
    _Tile(128, 64, (4, 2), 3, 1.1),
    _Tile(64, 128, (2, 4), 3, 1.35),
    _Tile(64, 64, (2, 2), 3, 1.35),
    _Tile(32, 64, (1, 4), 3, 2.5),
)
"""For what takes more registers still: 3xTF32 fragments, and 16-bit elements fetched one by one."""

_GATHER_TILES: Final = (
    _Tile(128, 64, (4, 2), 3, 1.0),
    _Tile(64, 64, (2, 4), 3, 1.3),
    _Tile(32, 64, (1, 4), 3, 2.5),
)
"""For 16-bit elements that are fetched one by one from NHWC: each takes a register until it has arrived."""

_POINTWISE_TILES: Final = (
    _Tile(128, 64, (2, 2), 3, 1.0, 3),
    _Tile(64, 64, (2, 2), 3, 1.17, 4),
    _Tile(128, 128, (2, 4), 3, 1.2),
    _Tile(32, 64, (1, 4), 3, 1.6, 4),
)
"""For 1x1 filters in NCHW, but not in 3xTF32. Short sums want many blocks at a time: while one stores, others load."""

_SCATTERED: Final = 2.4
"""How much longer they take where less than 16 bytes of x are copied at a time: sharing sums pays sooner."""

_MULTIPROCESSORS: Final = 108
"""A100. An H200 has 132: close enough for an order."""

_MMA: Final[dict[Precision, str]] = {"tf32x3": "Tf32x3", "tf32": "Tf32", "fp16": "Fp16", "bf16": "Bf16"}


def _blocks(problem: Conv2dProblem, tile: _Tile) -> int:
    return problem.groups * ceil(problem.group_filters / tile.filters) * ceil(problem.pixels / tile.pixels)


def _tiles_k(problem: Conv2dProblem) -> int:
    """Tiles of the reduction."""
    return ceil(problem.reduction * problem.element_bytes / gemm.TILE_BYTES_OF_K)


# Of an H200, per multiprocessor and microsecond: see gemm.py.
_PRODUCTS: Final = 0.84e6
_PART_BYTES: Final = 37e3
_MEETING: Final = 2.7  # microseconds for thread blocks to hand their parts in


def _slower(together: int) -> float:
    """How much longer products take with so few blocks on a multiprocessor: one alone waits for memory.

    Each block more closes 41 % of the gap, as in gemm.py.
    """
    return (1 - 0.6 * 0.59**2) / (1 - 0.6 * 0.59 ** (min(together, 3) - 1))


def _tile_cost(problem: Conv2dProblem, tile: _Tile, splits: int = 1) -> float:
    """Waves of blocks times a block's time."""
    together = ceil(_blocks(problem, tile) * splits / _MULTIPROCESSORS)
    tiles_k = _tiles_k(problem)
    outputs = tile.filters * tile.pixels
    cost = together * outputs * tile.cost * _slower(together) * ceil(tiles_k / splits) / tiles_k
    if splits > 1:
        cost += (_MEETING + splits * outputs * 4 / _PART_BYTES) * _PRODUCTS / problem.reduction
    return cost


def _split_counts(problem: Conv2dProblem, tile: _Tile) -> list[int]:
    """1, and the best number of thread blocks to share each tile's sums if sharing pays."""
    blocks, outputs = _blocks(problem, tile), tile.filters * tile.pixels
    costs = {
        splits: _tile_cost(problem, tile, splits)
        for splits in (1, *gemm.share_counts(_tiles_k(problem)))
        if splits == 1 or gemm.shared_sums_bytes(blocks, outputs, splits) <= gemm.MAX_WORKSPACE
    }
    best = min(costs, key=lambda splits: costs[splits])
    return [1, best] if costs[best] < costs[1] * gemm.SHARING_PAYS else [1]


def _implicit_gemm(problem: Conv2dProblem) -> list[tuple[float, Kernel]]:
    """The implicit GEMMs and what they cost."""
    size = problem.element_bytes
    layout: Layout = "nhwc" if problem.x_strides[1] == 1 and problem.channels > 1 else "nchw"
    x_access = _x_access(problem, layout, problem.group_channels)
    kernel_sizes = (problem.group_channels, *problem.kernel)
    rows, cols = problem.kernel
    in_order = (
        (rows * cols, cols, 1) if layout == "nchw" else (1, cols * problem.group_channels, problem.group_channels)
    )
    contiguous = _same(problem.weight_strides[1:], in_order, kernel_sizes)
    filter_steps = [stride * size for stride in _varying(problem.weight_strides[:1], (problem.out_channels,))]
    weight_access = (
        _access(size, problem.weight_alignment, problem.reduction * size, *filter_steps) if contiguous else size
    )
    tiles: tuple[_Tile, ...]
    pointwise = layout == "nchw" and x_access >= 4 and _is_pointwise(problem)
    if pointwise and problem.precision != "tf32x3":
        tiles = _POINTWISE_TILES
    elif layout == "nhwc" and x_access < 4:
        tiles = _GATHER_TILES
    elif problem.precision == "tf32x3" or min(x_access, weight_access) < 4:
        # The largest tile of 3xTF32 spills.
        tiles = _SMALL_WARP_TILES[1:] if problem.precision == "tf32x3" else _SMALL_WARP_TILES
    elif min(x_access, weight_access) < 16:
        tiles = _NARROW_TILES
    else:
        tiles = _TILES
    if pointwise and x_access < 16:
        tiles = tuple(replace(tile, cost=_SCATTERED * tile.cost) for tile in tiles)
    filters = "kContiguous" if contiguous else "kStrided"
    sums, block_tiles = _sums(problem)
    kernels = []
    for tile in tiles:
        config = (
            f"Conv2dConfig<{_MMA[problem.precision]}, {tile.filters}, {tile.pixels}, {tile.warps[0]}, {tile.warps[1]}, "
            f"{tile.stages}, Sums::{sums}, Layout::{_LAYOUT[layout]}, Layout::{_LAYOUT[problem.out_layout]}, "
            f"{x_access}, Filters::{filters}, {weight_access}, {str(pointwise).lower()}, {tile.blocks}>"
        )
        name = f"conv2d {problem.precision} {tile.filters}x{tile.pixels}, {tile.stages} stages, {layout}"
        blocks, outputs = _blocks(problem, tile), tile.filters * tile.pixels
        for splits in _split_counts(problem, tile):
            shared = splits > 1
            kernel = Kernel(
                f"{name}, split {splits}" if shared else name,
                "conv2d.cuh",
                f"{'SplitConv2d' if shared else 'Conv2d'}<{config}, {{output}}, {{epilogue}}>",
                pack(problem, block_tiles, splits, ceil(_tiles_k(problem) / splits)),
                gemm.shared_sums_bytes(blocks, outputs, splits) if shared else 0,
            )
            kernels.append((_tile_cost(problem, tile, splits), kernel))
    return kernels


_LAYOUT: Final[dict[Layout, str]] = {"nchw": "kNchw", "nhwc": "kNhwc"}


def _is_pointwise(problem: Conv2dProblem) -> bool:
    """Whether every output is a sum over the channels of one pixel of x."""
    reaches = zip(problem.out_size, problem.stride, problem.size, strict=True)
    return (
        problem.kernel == (1, 1)
        and problem.padding == (0, 0)
        and all((out - 1) * stride < size for out, stride, size in reaches)
    )


def _sums(problem: Conv2dProblem) -> tuple[str, int]:
    """How sums are added up: `Sums` of mainloop.cuh, and its blocks' length in tiles. As gemm.py measured it."""
    if problem.precision != "tf32x3":
        return "kRunning", 1
    if problem.reduction <= 256:
        return "kStepwise", 1
    if problem.reduction < 2048:
        return "kPromoted", 1
    return "kPromoted", 2 if problem.reduction <= 8192 else 4


def _x_access(problem: Conv2dProblem, layout: Layout, run: int) -> int:
    """Bytes of x that are contiguous and aligned wherever a block fetches them; in NHWC, of `run` channels."""
    size = problem.element_bytes
    image, channel, row, col = problem.x_strides
    if layout == "nhwc":
        steps = _varying((image, row, col), (problem.images, *problem.size))
        return _access(size, problem.x_alignment, run * size, *(step * size for step in steps))
    pointwise = problem.kernel == (1, 1) and problem.stride == (1, 1) and problem.padding == (0, 0)
    rows_follow = _same((row, col), (problem.size[1], 1), problem.size)
    if not pointwise or not rows_follow or problem.size != problem.out_size:
        return size
    steps = _varying((image, channel), (problem.images, problem.channels))
    pixels = problem.size[0] * problem.size[1]
    return _access(size, problem.x_alignment, pixels * size, *(step * size for step in steps))


# -------------------------------------------------------------------------------------------------- direct


@dataclass(frozen=True)
class DirectTile:
    """A thread block's tile in the direct kernel: Conv2dDirectConfig in conv2d_direct.cuh.

    A warp computes 16 * `mmas` filters of `rows` rows of 8 * `col_mmas` pixels. `cost` is the time per product on a
    full device, relative to the best, as measured on an H200.
    """

    mmas: int
    rows: int
    col_mmas: int
    warps: tuple[int, int, int]
    """Along filters, rows and columns."""
    images: int
    stages: int
    blocks_per_multiprocessor: int
    cost: float
    resident: bool = False
    """Whether all filters stay in shared memory, which takes that all channels are one chunk."""

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """Images, filters, rows and columns."""
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
        """Bytes of packed filters: FilterFragments in filter_fragments.cuh."""
        if self.resident:
            return 0
        filters = self.extents[1]
        chunks = ceil(problem.group_channels / _chunk(problem))
        return problem.groups * ceil(problem.group_filters / filters) * chunks * filters * 9 * _CHUNK_BYTES


_CHUNK_BYTES: Final = 32
"""What the direct kernel copies of a pixel at a time."""

DIRECT_TILES: Final = (
    DirectTile(4, 2, 4, (1, 1, 4), 1, 3, 2, 0.9, resident=True),
    DirectTile(4, 2, 4, (1, 1, 8), 1, 3, 1, 0.66, resident=True),
    DirectTile(4, 2, 4, (1, 1, 4), 1, 3, 2, 1.0),
    DirectTile(4, 2, 4, (1, 1, 4), 1, 2, 2, 1.0),
    DirectTile(4, 2, 4, (1, 1, 8), 1, 3, 1, 0.95),
    DirectTile(4, 2, 4, (1, 2, 2), 1, 3, 2, 1.3),
    DirectTile(4, 2, 4, (2, 2, 1), 1, 3, 2, 1.35),
    DirectTile(4, 4, 2, (1, 4, 1), 1, 3, 2, 1.0),
)

HALF_DIRECT_TILES: Final = (
    DirectTile(4, 2, 4, (1, 1, 4), 1, 2, 2, 0.9, resident=True),
    DirectTile(4, 2, 4, (1, 1, 8), 1, 2, 1, 0.8, resident=True),
    DirectTile(4, 2, 4, (1, 1, 4), 1, 2, 2, 1.0),
    DirectTile(4, 2, 4, (1, 2, 2), 1, 2, 2, 1.3),
    DirectTile(4, 2, 4, (2, 2, 1), 1, 2, 2, 1.35),
)
"""For 16-bit elements, whose patches take twice the shared memory until they are interleaved. Maps of 28 columns and
less are the library's, which is twice as fast there."""

_DIRECT_SPEED: Final = 2.0
"""How much faster than the implicit GEMM's best tile the direct kernel's is, where both fit."""

_CUT_COLS: Final = 45
"""Columns of a tile at which storing pieces of rows would cost as much as all the rest."""

_MAX_TILES: Final = 2**30
_MAX_GRID_YZ: Final = 65535  # CUDA's limit, for the kernel that packs filters


def _chunk(problem: Conv2dProblem) -> int:
    """Channels that the direct kernel copies at a time."""
    return _CHUNK_BYTES // problem.element_bytes


def _direct_cost(problem: Conv2dProblem, tile: DirectTile) -> float:
    """As `_tile_cost`, in the same unit. Blocks that share a multiprocessor share its speed."""
    images, filters, rows, cols = tile.extents
    chunk = _chunk(problem)
    products = filters * images * rows * cols * ceil(problem.group_channels / chunk) * chunk / problem.group_channels
    together = tile.blocks_per_multiprocessor
    waves, rest = divmod(tile.tiles(problem), _MULTIPROCESSORS * together)
    blocks = waves * together + min(together, ceil(rest / _MULTIPROCESSORS))
    # Rows cut into pieces are stored as many short runs: 1.5 times slower for 64 columns, 1.1 for 128 (H200).
    cut = 1 + (_CUT_COLS / cols) ** 2 if cols < problem.out_size[1] else 1.0
    slower = _slower(min(blocks, together)) / _slower(together)  # than with as many blocks as fit
    return blocks * products * tile.cost * cut * slower / _DIRECT_SPEED


def _direct(problem: Conv2dProblem) -> list[tuple[float, Kernel]]:
    """The direct kernels and what they cost."""
    fits = (
        problem.precision != "tf32x3"
        and problem.out_layout == "nchw"
        and problem.kernel == (3, 3)
        and problem.stride == (1, 1)
        and problem.dilation == (1, 1)
        and (problem.groups == 1 or problem.group_channels > 1)
        and problem.groups <= _MAX_GRID_YZ
        and _same(problem.x_strides[3:], (1,), problem.size[1:])
    )
    steps = _varying(problem.x_strides[:3], (problem.images, problem.channels, problem.size[0]))
    size = problem.element_bytes
    aligned = _access(size, problem.x_alignment, *(step * size for step in steps)) == 16
    if not fits or (not aligned and problem.padding[1] > 1):
        return []

    def usable(tile: DirectTile) -> bool:
        images, filters, _, _ = tile.extents
        reach = _extent((images, problem.channels, *problem.size), problem.x_strides)  # of 32-bit offsets
        return (
            tile.tiles(problem) <= _MAX_TILES
            and ceil(problem.group_filters / filters) <= _MAX_GRID_YZ
            and reach < 2**31
            and (not tile.resident or (problem.group_channels <= _chunk(problem) and problem.groups == 1))
        )

    kernels = []
    for tile in filter(usable, DIRECT_TILES if size == 4 else HALF_DIRECT_TILES):
        numbers = (
            *(tile.mmas, tile.rows, tile.col_mmas, *tile.warps, tile.images, tile.stages),
            *(tile.blocks_per_multiprocessor, int(tile.resident)),
        )
        skew = str(-problem.padding[1] % (16 // size)) if aligned else "kAnySkew"
        config = f"{_MMA[problem.precision]}, {', '.join(map(str, numbers))}, {skew}"
        cpp = f"Conv2dDirect<Conv2dDirectConfig<{config}>, {{output}}, {{epilogue}}>"
        kernel = Kernel(
            f"conv2d direct 3x3 {problem.precision} {tile.name}",
            "conv2d_direct.cuh",
            cpp,
            pack(problem),
            tile.workspace(problem),
        )
        kernels.append((_direct_cost(problem, tile), kernel))
    return kernels


# --------------------------------------------------------------------------------------------------- wgmma


@dataclass(frozen=True)
class WgmmaTile:
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


WGMMA_TILES: Final = (
    WgmmaTile((2, 1), 1.0),
    WgmmaTile((1, 2), 1.05),
    WgmmaTile((1, 1), 1.15),
)

_SEGMENT: Final = 128
"""Positions of the patch that an instruction multiplies."""

_STEP_BYTES: Final = 32
"""Of a position's channels, that an instruction multiplies."""

# As in conv2d_wgmma_config.cuh; bytes of shared memory.
_WGMMA_SHARED: Final = {1: 113 << 10, 2: 227 << 10}  # that a thread block may have, by its groups
_WGMMA_HEADER: Final = 512
_MOST_WGMMA_TAPS: Final = 64
_MOST_WGMMA_STAGES: Final = 8

_WGMMA_PRODUCTS: Final = 0.27
"""Time per product, in units of the implicit GEMM's."""
_WGMMA_START: Final = 8.0
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


def _patch(problem: Conv2dProblem, tile: WgmmaTile) -> _Patch | None:
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
    groups = tile.groups[0] * tile.groups[1]
    # A group stores results through shared memory: of both its segments where that takes more time than the products.
    for staged in (2, 1) if _steps(problem) <= 2 * steps else (1,):
        kept = groups * (4 * 8 * (staged * _SEGMENT + 8) * 4 + positions * 4)
        room = _WGMMA_SHARED[groups] - _WGMMA_HEADER - kept
        stages = room // (steps * _STEP_BYTES * (positions + taps * tile.filters))
        if stages >= 2:
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
    stages = min(stages, _MOST_WGMMA_STAGES)
    return _Patch(segment_rows, row_segments, rows, pitch, steps, stages, positions, tiles, staged)


def _steps(problem: Conv2dProblem) -> int:
    return ceil(problem.group_channels * problem.element_bytes / _STEP_BYTES)


def _wgmma_cost(problem: Conv2dProblem, tile: WgmmaTile, patch: _Patch) -> float:
    """As `_tile_cost`, in the same unit."""
    outputs = tile.filters * tile.segments * _SEGMENT
    padding = _steps(problem) * _STEP_BYTES / (problem.group_channels * problem.element_bytes)
    products = ceil(patch.tiles / problem.multiprocessors) * outputs * tile.cost * _WGMMA_PRODUCTS * padding
    return products + _WGMMA_START * _PRODUCTS / problem.reduction


def _wgmma(problem: Conv2dProblem) -> list[tuple[float, Kernel]]:
    """Hopper's kernels and what they cost. Of a single tap the others are faster."""
    taps = problem.kernel[0] * problem.kernel[1]
    fits = (
        problem.hopper
        and problem.precision != "tf32x3"
        and problem.out_layout == "nchw"
        and 1 < taps <= _MOST_WGMMA_TAPS
        and (problem.groups == 1 or problem.group_channels > 1)
    )
    kernels = []
    for tile in WGMMA_TILES if fits else ():
        patch = _patch(problem, tile)
        if patch is None or patch.tiles > _MAX_TILES:
            continue
        # Positions that a thread fetches at once: up to 4, for which it has registers, or 3 if it comes back as often.
        together = 3 if patch.positions <= 384 or 512 < patch.positions <= 768 else 4
        plain = problem.kernel == (3, 3) and problem.stride == problem.dilation == (1, 1)
        numbers = (*tile.groups, 3 if plain else 0, together * problem.element_bytes // 4, patch.staged)
        cpp = (
            f"Conv2dWgmma<Conv2dWgmmaConfig<{_MMA[problem.precision]}, {', '.join(map(str, numbers))}>, "
            f"{{output}}, {{epilogue}}>"
        )
        filters = problem.groups * ceil(problem.group_filters / tile.filters) * tile.filters
        workspace = filters * ceil(_steps(problem) / patch.steps) * patch.steps * taps * _STEP_BYTES
        name = f"conv2d wgmma {problem.precision} {tile.filters}x{tile.segments * _SEGMENT}"
        kernel = Kernel(name, "conv2d_wgmma.cuh", cpp, patch.pack(problem), workspace)
        kernels.append((_wgmma_cost(problem, tile, patch), kernel))
    return kernels


# ----------------------------------------------------------------------------------------------- depthwise

_TILED: Final = frozenset({(3, 1), (3, 2), (5, 1), (5, 2), (7, 1), (7, 2)})
"""(kernel, stride) of depthwise_tile.cuh and depthwise_nhwc.cuh: those of the common networks."""

_STRIP_ROWS: Final = 7
"""DepthwiseTileConfig::kRows."""

_ELEMENT: Final[dict[Precision, str]] = {
    "tf32x3": "float",
    "tf32": "float",
    "fp16": "Float16",
    "bf16": "BFloat16",
}


def _depthwise(problem: Conv2dProblem) -> list[Kernel]:
    """The kernel for one input channel per output channel."""
    layout = problem.out_layout
    if problem.group_channels != 1 or (layout == "nhwc" and problem.x_strides[1] != 1 and problem.channels > 1):
        return []
    element = _ELEMENT[problem.precision]
    access = _tiled_access(problem)
    if access is None:
        cpp = f"Depthwise<{element}, {str(layout == 'nhwc').lower()}, {{output}}, {{epilogue}}>"
        return [Kernel(f"depthwise {layout} {element.lower()}", "depthwise.cuh", cpp, pack(problem))]
    kernel, stride = problem.kernel[0], problem.stride[0]
    name = f"depthwise {layout} {element.lower()}, {kernel}x{kernel}, stride {stride}"
    if layout == "nhwc":
        header, config = "depthwise_nhwc.cuh", f"DepthwiseNhwcConfig<{element}, {kernel}, {stride}>"
        cpp = f"DepthwiseNhwc<{config}, {{output}}, {{epilogue}}>"
    else:
        header, config = "depthwise_tile.cuh", f"DepthwiseTileConfig<{element}, {kernel}, {stride}, {access}>"
        cpp = f"DepthwiseTileNchw<{config}, {{output}}, {{epilogue}}>"
    return [Kernel(name, header, cpp, pack(problem))]


def _tiled_access(problem: Conv2dProblem) -> int | None:
    """Bytes of x that a copy of depthwise_tile.cuh or depthwise_nhwc.cuh takes, None if neither fits the problem."""
    (kernel, width), (stride, _), size = problem.kernel, problem.stride, problem.element_bytes
    square = kernel == width and stride == problem.stride[1] and (kernel, stride) in _TILED
    if not square or problem.dilation != (1, 1):
        return None
    if problem.out_layout == "nhwc":
        one_to_one = problem.channels == problem.out_channels
        # 32-bit offsets along a row; every output reads a row of x
        fits = problem.out_size[1] * problem.channels * size < 2**32 and problem.padding[0] < kernel
        return 16 if one_to_one and fits and _x_access(problem, "nhwc", problem.channels) == 16 else None
    left = problem.padding[1]
    right = (problem.out_size[1] - 1) * stride + kernel - left - problem.size[1]
    # The least tile, seven rows of a plane, with rows of 4 bytes an element as they are and as they leave.
    bytes_of_tile = 4 * (
        ((_STRIP_ROWS - 1) * stride + kernel) * (problem.size[1] + max(left, right) + 8) + 7 * problem.out_size[1]
    )
    planes = problem.images * problem.out_channels
    if problem.x_strides[3] != 1 or left >= kernel or bytes_of_tile > _TILE_BYTES or planes > _MAX_TILES:
        return None
    steps = _varying(problem.x_strides[:3], (problem.images, problem.channels, problem.size[0]))
    shift = (left - kernel // 2) * size % 16  # a row's first column, in shared memory
    return _access(size, problem.x_alignment, problem.size[1] * size, shift, *(step * size for step in steps))


_TILE_BYTES: Final = 160 << 10
"""Shared memory that a block may have on an A100, less what filters take."""
