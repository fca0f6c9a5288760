"""Convolution kernels for a problem: GEMM, implicit GEMM, direct 3x3, Hopper's, few pixels, depthwise.

`candidates` turns a problem (conv2d_problem.py) into kernels, best first by a model of their cost. The implicit GEMM,
which can run every problem, is defined here. The other families have modules of their own. Everything here is
arithmetic on numbers: no GPU is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from fxfuse.cuda import conv2d_direct, conv2d_few_pixels, conv2d_wgmma, depthwise, gemm
from fxfuse.cuda.conv2d_problem import (
    MULTIPROCESSORS,
    PRODUCTS,
    Conv2dProblem,
    Layout,
    access,
    access_of_x,
    extent,
    pack,
    same,
    slowdown,
)
from fxfuse.cuda.gemm_problem import TILE_BYTES_OF_K, Windows
from fxfuse.cuda.gemm_problem import Problem as GemmProblem
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.precision import MMA
from fxfuse.layout import varying


def unsupported(problem: Conv2dProblem) -> str | None:
    """Why no kernel can run the problem; None if one can."""
    largest = 2**31 - 1  # 32-bit offsets within an image, within a filter and over an image's output pixels
    if problem.groups < 1 or problem.channels % problem.groups or problem.out_channels % problem.groups:
        return f"{problem.groups} groups divide {problem.channels} channels into {problem.out_channels} unevenly"
    if problem.reduction == 0:
        return "the sum behind each output is empty"
    if extent((problem.channels, *problem.size), problem.x_strides[1:]) > largest:
        return "an image spans more than 2^31 elements"
    if extent((problem.group_channels, *problem.kernel), problem.weight_strides[1:]) > largest:
        return "a filter spans more than 2^31 elements"
    dilated = [(kernel - 1) * dilation for kernel, dilation in zip(problem.kernel, problem.dilation, strict=True)]
    if extent((problem.channels, dilated[0] + 1, dilated[1] + 1), problem.x_strides[1:]) > largest:
        return "a dilated filter spans more than 2^31 elements of the image"
    if max(*problem.size, *dilated, *problem.padding) >= 2**29:
        return "a side of the image, of the padding or of the dilated filter is longer than 2^29"
    if problem.out_size[0] * problem.out_size[1] > largest - max(tile.pixels for tile in _TILES):
        return "an output image has more than 2^31 pixels"
    return None


def candidates(problem: Conv2dProblem) -> tuple[Kernel, ...]:
    """The kernels that can run the problem, best first; none if `unsupported` gives a reason.

    - If the layouts allow it, the convolution is a GEMM, and its kernels are the only ones.
    - If a filter has one input channel, depthwise kernels come first; they are the only ones if every channel has one
      filter.
    - The other families are ordered by their cost.
    """
    if unsupported(problem) is not None:
        return ()
    product = _as_gemm(problem)
    if product is not None and (kernels := gemm.candidates(product)):
        return kernels
    of_depthwise = depthwise.kernels(problem)
    if of_depthwise and problem.groups == problem.out_channels:
        return tuple(of_depthwise)  # matrix products of single columns take 40 to 300 times as long
    outputs = problem.pixels * problem.out_channels / problem.multiprocessors
    families = (
        (conv2d_wgmma.kernels(problem), 60),
        (conv2d_direct.kernels(problem), 60),
        (conv2d_few_pixels.kernels(problem), 60),
        (_implicit_gemm(problem), 200),
    )
    # Each family's time to store an output, in units of the implicit GEMM's time for a multiply-add, as measured on an
    # H200 with 8 channels.
    costed = [
        (cost + outputs * store / problem.reduction, kernel) for family, store in families for cost, kernel in family
    ]
    by_cost = sorted(costed, key=lambda costed: costed[0])
    return (*of_depthwise, *(kernel for _, kernel in by_cost if kernel.shared <= problem.most_shared))


# --------------------------------------------------------------------------------------- channels_last as GEMM


def _as_gemm(problem: Conv2dProblem) -> GemmProblem | None:
    """A convolution on channels_last as a GEMM of windows and filters; None if the layouts do not allow it.

    With a 1x1 filter and a stride of 1 the rows of x are the pixels in memory. Otherwise the kernel gathers windows.
    """
    image, channel, row, col = problem.x_strides
    filters_in_order = (1, problem.kernel[1] * problem.channels, problem.channels)
    if (
        problem.groups != 1
        or problem.out_layout != "nhwc"
        or (channel != 1 and problem.channels > 1)
        or not same(problem.weight_strides[1:], filters_in_order, (problem.channels, *problem.kernel))
    ):
        return None
    (height, width), windows = problem.size, None
    pixels_follow = same((image, row), (height * width * col, width * col), (problem.images, height))
    if problem.kernel != (1, 1) or problem.stride != (1, 1) or problem.size != problem.out_size or not pixels_follow:
        if max(problem.kernel) > gemm.MOST_TAPS:
            return None
        windows = Windows(
            size=problem.size,
            channels=problem.channels,
            out_size=problem.out_size,
            kernel=problem.kernel,
            stride=problem.stride,
            padding=problem.padding,
            dilation=problem.dilation,
            x_strides=(image, row, col),
        )
    return GemmProblem(
        m=problem.pixels,
        n=problem.out_channels,
        k=problem.reduction,
        precision=problem.precision,
        weight_layout="nk",
        x_stride=col if width > 1 else row if height > 1 else image,
        weight_stride=problem.weight_strides[0] if problem.out_channels > 1 else problem.reduction,
        out_stride=problem.out_channels,
        x_alignment=problem.x_alignment if windows is None else access_of_x(problem, "nhwc", problem.channels),
        weight_alignment=problem.weight_alignment,
        rows_per_batch=problem.out_size[0] * problem.out_size[1],
        windows=windows,
        multiprocessors=problem.multiprocessors,
        shared_memory=problem.shared_memory,
        shared_memory_per_block=problem.shared_memory_per_block,
        hopper=problem.hopper,
        eager_error=problem.eager_error,
    )


# ------------------------------------------------------------------------------------------- implicit GEMM


@dataclass(frozen=True)
class _Tile:
    """The part of the output that a thread block computes, how its warps divide it, and its cost.

    `cost` is the time per multiply-add on a full device, relative to the best tile of its table, as measured on an H200
    with 3x3 and 1x1 convolutions. Tiles with few filters cost most: each block along the filters fetches the same
    pixels again.
    """

    filters: int
    pixels: int
    warps: tuple[int, int]
    stages: int
    cost: float
    blocks: int = 1
    """Thread blocks for which a multiprocessor must have registers."""


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
"""For accesses of less than 16 bytes: their addresses take registers, which the largest tile then lacks."""

_SMALL_WARP_TILES: Final = (
    _Tile(128, 128, (2, 4), 3, 1.0),
    _Tile(128, 64, (4, 2), 3, 1.1),
    _Tile(64, 128, (2, 4), 3, 1.35),
    _Tile(64, 64, (2, 2), 3, 1.35),
    _Tile(32, 64, (1, 4), 3, 2.5),
)
"""For cases that take even more registers: the fragments of 3xTF32, and 16-bit elements fetched one by one."""

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
"""For 1x1 filters on NCHW, but not in 3xTF32. With short sums many blocks are best: while one stores, others load."""

_SCATTERED: Final = 2.4
"""How much longer a 1x1 convolution's tiles take if accesses to x have less than 16 bytes. Split-K then pays sooner."""


def _blocks(problem: Conv2dProblem, tile: _Tile) -> int:
    return problem.groups * ceil(problem.group_filters / tile.filters) * ceil(problem.pixels / tile.pixels)


def _shared_bytes(tile: _Tile, problem: Conv2dProblem) -> int:
    """Bytes of shared memory of a thread block: the stages, or the tile that is stored (StagedTile in conv2d.cuh, with
    its longer rows)."""
    rows, cols = (tile.filters, tile.pixels) if problem.out_layout == "nchw" else (tile.pixels, tile.filters)
    return max(tile.stages * (tile.filters + tile.pixels) * TILE_BYTES_OF_K, rows * (cols + 16) * 4)


def _tiles_k(problem: Conv2dProblem) -> int:
    """Number of tiles along the reduction."""
    return ceil(problem.reduction * problem.element_bytes / TILE_BYTES_OF_K)


_PART_BYTES: Final = 37e3
_MEETING: Final = 2.7  # microseconds for thread blocks to write their parts of the sums


def _tile_cost(problem: Conv2dProblem, tile: _Tile, splits: int = 1) -> float:
    """The cost of a tile: the number of waves times a block's time, plus the cost of split-K."""
    together = ceil(_blocks(problem, tile) * splits / MULTIPROCESSORS)
    tiles_k = _tiles_k(problem)
    outputs = tile.filters * tile.pixels
    cost = together * outputs * tile.cost * slowdown(together) * ceil(tiles_k / splits) / tiles_k
    if splits > 1:
        cost += (_MEETING + splits * outputs * 4 / _PART_BYTES) * PRODUCTS / problem.reduction
    return cost


def _split_counts(problem: Conv2dProblem, tile: _Tile) -> list[int]:
    """How many thread blocks per tile are worth a candidate: 1, and the fastest split if it pays."""
    blocks, outputs = _blocks(problem, tile), tile.filters * tile.pixels
    costs = {
        splits: _tile_cost(problem, tile, splits)
        for splits in (1, *gemm.share_counts(_tiles_k(problem)))
        if splits == 1 or gemm.shared_sums_bytes(blocks, outputs, splits) <= gemm.MAX_WORKSPACE
    }
    best = min(costs, key=lambda splits: costs[splits])
    return [1, best] if costs[best] < costs[1] * gemm.SHARING_PAYS else [1]


def _implicit_gemm(problem: Conv2dProblem) -> list[tuple[float, Kernel]]:
    """(cost, kernel) for each tile of the implicit GEMM."""
    size = problem.element_bytes
    layout: Layout = "nhwc" if problem.x_strides[1] == 1 and problem.channels > 1 else "nchw"
    x_access = access_of_x(problem, layout, problem.group_channels)
    kernel_sizes = (problem.group_channels, *problem.kernel)
    rows, cols = problem.kernel
    in_order = (
        (rows * cols, cols, 1) if layout == "nchw" else (1, cols * problem.group_channels, problem.group_channels)
    )
    contiguous = same(problem.weight_strides[1:], in_order, kernel_sizes)
    filter_steps = [stride * size for stride in varying(problem.weight_strides[:1], (problem.out_channels,))]
    weight_access = (
        access(size, problem.weight_alignment, problem.reduction * size, *filter_steps) if contiguous else size
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
            f"Conv2dConfig<{MMA[problem.precision]}, {tile.filters}, {tile.pixels}, {tile.warps[0]}, {tile.warps[1]}, "
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
                _shared_bytes(tile, problem),
            )
            kernels.append((_tile_cost(problem, tile, splits), kernel))
    return kernels


_LAYOUT: Final[dict[Layout, str]] = {"nchw": "kNchw", "nhwc": "kNhwc"}


def _is_pointwise(problem: Conv2dProblem) -> bool:
    """Whether every output sums over the channels of a single pixel of x."""
    reaches = zip(problem.out_size, problem.stride, problem.size, strict=True)
    return (
        problem.kernel == (1, 1)
        and problem.padding == (0, 0)
        and all((out - 1) * stride < size for out, stride, size in reaches)
    )


def _sums(problem: Conv2dProblem) -> tuple[str, int]:
    """How the kernel adds up: `Sums` of mainloop.cuh, and the length of a block in tiles. See gemm_accuracy.py."""
    if problem.precision != "tf32x3":
        return "kRunning", 1
    if problem.reduction <= 256:
        return "kStepwise", 1
    if problem.reduction < 2048:
        return "kPromoted", 1
    return "kPromoted", 2 if problem.reduction <= 8192 else 4
