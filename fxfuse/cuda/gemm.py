"""GEMM kernels for a problem: out[m, n] = epilogue(sum over k of x[m, k] * weight[n, k]).

`candidates` turns a `Problem` (sizes, layouts and alignments of one call) into the `Kernel`s of kernels/gemm.cuh that
can solve it, best first by a model of their time. Where a tile's thread blocks do not fill the device, several of them
may share a tile's sum over K. Convolutions on channels_last are such problems, too: rows of x that are no matrix are
gathered (`Windows`). Nothing here needs a GPU.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import Final, Literal

from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.precision import Precision

Layout = Literal["nk", "kn"]

HEADER = "gemm.cuh"
WINDOWS_HEADER = "windows.cuh"
WGMMA_HEADER = "gemm_wgmma.cuh"
WGMMA_TF32X3_HEADER = "gemm_wgmma_tf32x3.cuh"
FP16X3_HEADER = "gemm_fp16x3.cuh"
GEMV_HEADER = "gemv.cuh"
TILE_BYTES_OF_K = 128  # kTileBytesOfK in shared_tile.cuh
SWIZZLED_BYTES = 128  # least row of a tile in shared memory: OperandTile in shared_tile.cuh
MAX_ACCESS = 16  # bytes that one cp.async moves
RESERVED_SHARED = 1024  # bytes that CUDA takes for each thread block
MAX_INDEX = 2**31 - 1024  # the kernel counts rows, columns and K in int, up to some tiles beyond the end
MAX_GRID_YZ = 65535  # CUDA's limit
FP16X3_TILE_K, FP16X3_STEP_K = 32, 16  # HalvesLoop in gemm_fp16x3.cuh
BAND = 8  # kBand in gemm.cuh: tiles along a grid's x
MAX_SPLITS = 32  # thread blocks that share a tile: the last one to arrive adds up what all of them leave
LEAST_SHARE = 4  # tiles of K that one of them has: fewer do not fill its pipeline
MAX_WORKSPACE = 256 << 20  # bytes
SHARING_PAYS = 0.95  # from this fraction of the time without it on: the workspace must be allocated, too
MOST_SHARED_BY_WGMMA = 128 * 96  # elements of a tile: larger ones spill when they add up shares
MOST_BLOCKWISE_BY_WGMMA = 64  # columns of a tile: wider ones have no registers for more sums
STAGED_BY_WARPS = 8 * 16 * 64 * 4  # at most, behind the stages: WgmmaTf32x3Gemm
COUNTER_BYTES, WORKSPACE_ALIGNMENT = 8, 256  # of SplitWorkspace in split_k.cuh
MOST_HELD = 4  # tiles of K in stages of their own: more would multiply the kernels to be compiled
LEAST_WGMMA_TF32X3_K = 128  # shorter sums are less accurate than eager's: see _wgmma_sums
LEAST_GATED_ROWS = 16  # two kernels are faster for fewer: tiles have 64 rows, which all stand for those few
MOST_GEMV_ROWS = 4  # of x, for which products cost less than the weight's way from memory
MOST_TAPS = 15  # of a side of a filter: kSideBits in windows.cuh


@dataclass(frozen=True)
class Windows:
    """Rows of x that are gathered: row m is what pixel m of a convolution's output sees, channels fastest.

    Sides are (height, width), strides in elements; channels are contiguous.
    """

    size: tuple[int, int]
    channels: int
    out_size: tuple[int, int]
    kernel: tuple[int, int]
    """At most MOST_TAPS each."""
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    x_strides: tuple[int, int, int]
    """Of images, rows and columns."""

    def reach(self, pixels: int) -> int:
        """Most elements from the first to the last channel that a window of so many successive pixels begins with."""
        images = 1 + -(-pixels // (self.out_size[0] * self.out_size[1]))
        image, row, col = self.x_strides
        return (images - 1) * image + self.size[0] * row + self.size[1] * col


@dataclass(frozen=True)
class Problem:
    """What is to be computed. Sizes and strides in elements, alignments in bytes."""

    m: int
    n: int
    k: int
    precision: Precision
    """How to multiply: x and weight are of the type named for fp16 and bf16, else float32. See cuda/precision.py."""
    weight_layout: Layout
    """"nk": rows of K elements (nn.Linear). "kn": rows of N elements (matmul, addmm)."""
    x_stride: int
    weight_stride: int
    out_stride: int
    """Distances between rows. Within a row elements are contiguous."""
    x_alignment: int = MAX_ACCESS
    weight_alignment: int = MAX_ACCESS
    """Powers of two that divide the address of the first element."""
    rows_per_batch: int = 0
    """Row m of out is row m % rows_per_batch of batch m // rows_per_batch; 0 means one batch."""
    windows: Windows | None = None
    """Where x is gathered: the channels of every pixel then are aligned to `x_alignment`, and so is their number;
    `x_stride` means nothing."""
    multiprocessors: int = 108
    """Of the device. The default, like the next one, is the A100's."""
    shared_memory: int = 164 * 1024
    """Bytes per multiprocessor."""
    hopper: bool = False
    """Whether the device has the instructions that only Hopper has."""
    weights: int = 1
    """2: the epilogue takes a second product of x, with another weight that lies as the first does."""

    @property
    def element_bytes(self) -> int:
        return 2 if self.precision in ("fp16", "bf16") else 4

    @property
    def tile_k(self) -> int:
        """Elements of K in a tile."""
        return TILE_BYTES_OF_K // self.element_bytes

    @property
    def tiles_k(self) -> int:
        return -(-self.k // self.tile_k)

    @property
    def x_elements(self) -> int:
        """That are read from memory."""
        if self.windows is None:
            return self.m * self.k
        out_height, out_width = self.windows.out_size
        images = self.m // (out_height * out_width)
        seen = [
            min(size, out * min(stride, kernel))
            for size, out, stride, kernel in zip(
                self.windows.size, self.windows.out_size, self.windows.stride, self.windows.kernel, strict=True
            )
        ]
        return images * seen[0] * seen[1] * self.windows.channels


@dataclass(frozen=True)
class Tile:
    """A thread block's share of out, how warps divide it, and how fast it was measured to be."""

    m: int
    n: int
    warps_m: int
    warps_n: int
    stages: int
    resident: int
    """Thread blocks for which a multiprocessor has registers."""
    alone: float
    """Speed of a multiprocessor with one of them, as a fraction of its speed with the best tile."""
    full: float
    """The same with many of them."""
    holds_k: bool = False
    """Whether every tile of K has a stage of its own."""
    wgmma: bool = False
    """Whether warpgroups of 64 rows multiply, by Hopper's own instructions (mainloop_wgmma.cuh)."""
    split_stages: int = 0
    """Further stages of what the weight is split into (kSplitStages in mainloop_wgmma_tf32x3.cuh)."""

    @property
    def goes_on(self) -> bool:
        """Whether its thread blocks compute one tile after another (WgmmaGemm).

        Two that share a multiprocessor hide each other's stores as well, with fewer registers.
        """
        return self.wgmma and self.resident != 2 and not self.splits_weight

    @property
    def splits_weight(self) -> bool:
        """Whether its thread blocks split the weight in shared memory (WgmmaTf32x3Gemm)."""
        return self.split_stages > 0

    @property
    def small_warps(self) -> bool:
        """Whether a warp's accumulators leave registers for another level of sums."""
        return self.m // self.warps_m * (self.n // self.warps_n) <= 32 * 32

    def speed(self, together: int) -> float:
        """With so many of them on a multiprocessor: each one more closes 41 % of the gap."""
        return self.full - (self.full - self.alone) * 0.59 ** (together - 1)

    @property
    def shared_bytes(self) -> int:
        loop = (self.stages * (self.m + self.n) + self.split_stages * 2 * self.n) * TILE_BYTES_OF_K
        if self.splits_weight:
            loop += STAGED_BY_WARPS + 128  # and barriers
        staging = self.m * (self.n + 8) * 4  # kStagingBytes in gemm.cuh
        return max(loop, staging)


# Speeds: fractions of _PRODUCTS, fitted with the constants of `estimated_time`.
_TILES_TF32X3 = (
    Tile(128, 128, 2, 4, stages=3, resident=1, alone=1.00, full=1.00),
    Tile(128, 64, 2, 2, stages=3, resident=2, alone=0.92, full=1.04),
    Tile(64, 128, 1, 4, stages=3, resident=2, alone=0.94, full=1.02),
    Tile(64, 64, 2, 2, stages=3, resident=2, alone=0.66, full=0.86),
    Tile(64, 64, 2, 4, stages=4, resident=2, alone=0.74, full=0.78),
    Tile(32, 64, 1, 4, stages=4, resident=5, alone=0.62, full=0.72),
    Tile(16, 64, 1, 4, stages=4, resident=6, alone=0.40, full=0.63),
    Tile(16, 32, 1, 2, stages=12, resident=8, alone=0.26, full=0.44),
    Tile(128, 16, 4, 1, stages=5, resident=3, alone=0.56, full=0.63),
)
_TILES = (
    Tile(128, 256, 2, 4, stages=3, resident=1, alone=1.01, full=1.01),
    Tile(256, 128, 4, 2, stages=3, resident=1, alone=1.04, full=1.04),
    Tile(128, 128, 2, 2, stages=3, resident=2, alone=0.95, full=1.08),
    Tile(256, 64, 4, 2, stages=3, resident=1, alone=0.84, full=0.84),
    Tile(128, 64, 2, 2, stages=4, resident=3, alone=0.80, full=1.08),
    Tile(64, 128, 2, 2, stages=4, resident=3, alone=0.75, full=0.86),
    Tile(64, 64, 2, 2, stages=4, resident=4, alone=0.65, full=0.75),
    Tile(128, 32, 4, 1, stages=4, resident=4, alone=0.50, full=0.60),
    Tile(32, 64, 1, 4, stages=8, resident=4, alone=0.37, full=0.44),
    Tile(16, 64, 1, 4, stages=8, resident=8, alone=0.20, full=0.36),
    Tile(16, 32, 1, 2, stages=12, resident=8, alone=0.19, full=0.30),
    Tile(128, 16, 4, 1, stages=5, resident=4, alone=0.35, full=0.35),
)
WGMMA_TILES = (
    Tile(128, 256, 8, 1, stages=4, resident=1, alone=1.43, full=1.43, wgmma=True),
    Tile(192, 192, 12, 1, stages=4, resident=1, alone=1.39, full=1.39, wgmma=True),
    Tile(128, 128, 8, 1, stages=3, resident=2, alone=1.25, full=1.28, wgmma=True),
    Tile(128, 96, 8, 1, stages=4, resident=2, alone=1.25, full=0.86, wgmma=True),
    Tile(64, 128, 4, 1, stages=3, resident=3, alone=0.64, full=1.99, wgmma=True),
    Tile(64, 64, 4, 1, stages=4, resident=3, alone=0.76, full=1.02, wgmma=True),
)
WGMMA_TF32X3_TILES = (
    Tile(128, 128, 8, 1, stages=4, resident=1, alone=1.58, full=1.58, wgmma=True, split_stages=2),
    Tile(128, 96, 8, 1, stages=5, resident=1, alone=1.36, full=1.36, wgmma=True, split_stages=2),
    Tile(128, 64, 8, 1, stages=6, resident=1, alone=1.25, full=1.25, wgmma=True, split_stages=2),
)
_TILES_FP16X3 = (
    Tile(128, 128, 2, 4, stages=4, resident=1, alone=1.00, full=1.00),
    Tile(128, 64, 4, 1, stages=3, resident=2, alone=0.83, full=0.94),
    Tile(64, 128, 1, 4, stages=3, resident=2, alone=0.84, full=0.95),
    Tile(64, 64, 2, 2, stages=4, resident=2, alone=0.60, full=0.82),
)
_MMA = {"tf32x3": "Tf32x3", "tf32": "Tf32", "fp16": "Fp16", "bf16": "Bf16"}
_MAJOR = {"nk": "kK", "kn": "kMN"}


def candidates(problem: Problem) -> tuple[Kernel, ...]:
    """Kernels that can solve the problem, best first; none where its sizes are beyond the template's.

    All are as accurate as the precision promises. The order is that of `estimated_time`.
    """
    if min(problem.m, problem.n, problem.k) < 1 or max(problem.m, problem.n, problem.k) > MAX_INDEX:
        return ()
    if problem.weights == 2:
        timed = _timed_pair(problem)
    else:
        timed = _timed(problem) if problem.precision != "fp16x3" else _timed_fp16x3(problem)
    return tuple(replace(kernel, estimate=time) for time, kernel in sorted(timed, key=lambda choice: choice[0]))


def _timed(problem: Problem) -> list[tuple[float, Kernel]]:
    """Kernels of gemm.cuh, and of gemv.cuh for few rows, with their times."""
    return _timed_gemv(problem) + [
        (estimated_time(tile, problem, splits), _kernel(tile, problem, splits))
        for tile in _tiles(problem)
        for splits in _split_counts(tile, problem)
    ]


def _timed_gemv(problem: Problem) -> list[tuple[float, Kernel]]:
    few = problem.m <= MOST_GEMV_ROWS and problem.windows is None and problem.weight_layout == "nk"
    if not few or min(_accesses(problem)) < MAX_ACCESS or problem.k > MAX_INDEX // 2:  # it counts beyond K's end
        return []
    rows = 1 if problem.m == 1 else MOST_GEMV_ROWS
    element = {"fp16": "Float16", "bf16": "BFloat16"}.get(problem.precision, "float")
    strides = (problem.x_stride, problem.weight_stride, problem.out_stride)
    kernel = Kernel(
        name=f"gemv {element.lower()}, {rows} row{'s' * (rows > 1)}",
        header=GEMV_HEADER,
        type=f"Gemv<{element}, {{output}}, {{epilogue}}, {rows}>",
        params=struct.pack("<7q", problem.m, problem.n, problem.k, *strides, problem.rows_per_batch or problem.m),
    )
    return [(_memory_time(problem) + _LAUNCH, kernel)]


def _tiles(problem: Problem) -> list[Tile]:
    """Those that fit, with no more stages than K has tiles: more thread blocks then share a multiprocessor."""
    depth = problem.tiles_k
    tiles = _TILES_TF32X3 if problem.precision == "tf32x3" else _TILES
    hoppers: tuple[Tile, ...] = ()
    if _has_wgmma(problem):
        hoppers = WGMMA_TF32X3_TILES if problem.precision == "tf32x3" else WGMMA_TILES
    return [tile for tile in hoppers if _fits(tile, problem)] + [
        replace(tile, stages=depth, holds_k=True)
        if depth <= min(tile.stages, MOST_HELD)
        else replace(tile, stages=min(tile.stages, math.ceil((depth + 1) / 4) * 4))  # few different ones
        for tile in tiles
        if _fits(tile, problem)
    ]


def _has_wgmma(problem: Problem) -> bool:
    """Whether the kernels by warpgroup products can run it."""
    if problem.precision == "tf32x3":
        offered = problem.k >= LEAST_WGMMA_TF32X3_K and _multiplier(problem) == "Tf32x3"
    else:
        offered = problem.precision in ("fp16", "bf16") and problem.weight_layout == "nk"
    return problem.hopper and offered and min(_accesses(problem)) == MAX_ACCESS


def _timed_pair(problem: Problem) -> list[tuple[float, Kernel]]:
    """WgmmaGemm with two weights: takes about as long as with one of twice the columns."""
    if problem.element_bytes != 2 or problem.m < LEAST_GATED_ROWS or not _has_wgmma(problem):
        return []
    joined = replace(problem, n=2 * problem.n)
    tiles = [tile for tile in WGMMA_TILES if tile.goes_on and _fits(tile, joined)]
    return [(estimated_time(tile, joined), _kernel(tile, problem)) for tile in tiles]


def _timed_fp16x3(problem: Problem) -> list[tuple[float, Kernel]]:
    """Kernels of gemm_fp16x3.cuh, and those of 3xTF32, which are faster where few rows or columns share the cost of
    splitting; with their times."""
    return _timed(replace(problem, precision="tf32x3")) + [
        (_splitting_time(problem) + estimated_time(tile, problem), _fp16x3_kernel(tile, chain, problem))
        for tile in _TILES_FP16X3
        if _fits(tile, problem) and (chain := _fp16x3_chain(tile, problem)) is not None
    ]


def _split_counts(tile: Tile, problem: Problem) -> list[int]:
    """1, and the best number of thread blocks to share each tile if sharing pays; of these, the accurate ones."""
    counts = [1] if _is_accurate(tile, problem, 1) else []
    most = estimated_time(tile, problem, 1) * SHARING_PAYS if counts else math.inf
    times = {
        splits: estimated_time(tile, problem, splits)
        for splits in possible_splits(tile, problem)
        if _is_accurate(tile, problem, splits)
    }
    best = min(times, key=lambda splits: times[splits], default=1)
    return [*counts, best] if best > 1 and times[best] < most else counts


def possible_splits(tile: Tile, problem: Problem) -> list[int]:
    """Numbers above 1 of thread blocks that can share each tile, none of which would be left without work."""
    if tile.wgmma and not tile.splits_weight and tile.m * tile.n > MOST_SHARED_BY_WGMMA:
        return []
    counts = share_counts(problem.tiles_k)
    return [splits for splits in counts if workspace_bytes(tile, problem, splits) <= MAX_WORKSPACE]


def share_counts(tiles_k: int) -> list[int]:
    """Numbers above 1 of thread blocks that can share so many tiles of K, none of which would be left without work."""
    most = min(MAX_SPLITS, tiles_k // LEAST_SHARE)
    # Equal shares of whole tiles: 4 shares of 10 are 3, 3, 3 and 1, but 6 are 5 of 2.
    return sorted({-(-tiles_k // -(-tiles_k // splits)) for splits in range(2, most + 1)})


def workspace_bytes(tile: Tile, problem: Problem, splits: int) -> int:
    """Of sums that `splits` thread blocks share."""
    return shared_sums_bytes(_blocks(tile, problem), tile.m * tile.n, splits)


def shared_sums_bytes(tiles: int, elements: int, splits: int) -> int:
    """A counter per tile of so many elements, and each thread block's part of its sums (split_k.cuh)."""
    counters = -(-tiles * COUNTER_BYTES // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    return counters + tiles * splits * elements * 4


def _blocks(tile: Tile, problem: Problem) -> int:
    return -(-problem.m // tile.m) * -(-problem.n // tile.n)


# Of an H200, per multiprocessor and microsecond. An A100 has about half of each, so that the order of candidates is the
# same. Fitted to times of all splits of all tiles for 73 problems in tf32x3 and bf16 (benchmarks/gemm_model.py): the
# model's first choice is within 10 % of the best on 146 of 147. Fitted to half of them, it is on 97 % of the others.
# The speeds of WGMMA_TILES were fitted alone, to 36 problems of networks: the best is among the first three on 35.
# Those of WGMMA_TF32X3_TILES are what large problems reach.
_PRODUCTS: Final[dict[Precision, float]] = {  # of a good tile
    "tf32x3": 84e6 / 264, "fp16x3": 163e6 / 264, "tf32": 222e6 / 264, "fp16": 485e6 / 264, "bf16": 485e6 / 264
}  # fmt: skip
_SPLITTING_BYTES = 31.0e3  # read and written by the pass before fp16x3
_DEVICE_BYTES = 33.0e3  # from or to device memory
_L2_BYTES = 86e3  # from L2
_PART_BYTES = 37e3  # of other thread blocks' sums
_STORED = 7e3  # elements of out, those that tiles have beyond N included
# Microseconds.
_LAUNCH = 3.4  # of a kernel
_WAVE = 1.7  # to fill and drain the pipelines of a wave
_FIRST_BYTES = 2.3  # before device memory is at speed
_LATENCY = 0.39  # from asking for a tile of K to having it
_MEETING = 1.6  # for the last thread block of a tile to know that it is
_HANDING_IN = 1.1  # of the parts of a wave
_SLOWER_SUMS: Final = {False: "kStepwise", True: "kBlockwise"}  # by splits_weight
_NOT_HIDDEN = 0.075  # of what goes on beside something slower


def _splitting_time(problem: Problem) -> float:
    """Microseconds of the pass that writes both operands as halves; it reads a (K, N) weight twice (split_columns)."""
    weight_passes = 2 if problem.weight_layout == "nk" else 3
    moved = problem.element_bytes * problem.k * (2 * problem.m + weight_passes * problem.n)
    return moved / (_SPLITTING_BYTES * problem.multiprocessors) + _LAUNCH


def estimated_time(tile: Tile, problem: Problem, splits: int = 1) -> float:
    """Microseconds that a kernel takes on an H200 (or on a device like it in all but its size).

    Thread blocks run in waves of as many as the device holds. A wave takes as long as its products, its reads from L2
    or its pipeline of copies, whichever is slowest; all of them at least as long as the device's memory.
    """
    share = math.ceil(problem.tiles_k / splits)  # tiles of K
    rows, cols = min(tile.m, problem.m), min(tile.n, problem.n)
    speed = _PRODUCTS[problem.precision]
    if problem.precision == "tf32x3" and _sums(tile, problem, splits)[0] == _SLOWER_SUMS[tile.splits_weight]:
        speed *= 0.84  # measured as the tiles' speeds
    if problem.precision == "tf32x3" and _multiplier(problem) == "Bf16x6":
        speed /= 1.5

    def wave(together: int) -> float:
        products = together * tile.m * tile.n * share * problem.tile_k / (speed * tile.speed(together))
        reads = together * (rows + cols) * share * TILE_BYTES_OF_K / _L2_BYTES
        copies = share / (tile.stages if tile.holds_k else tile.stages - 1) * _LATENCY
        return max(products, reads, copies) + _WAVE

    resident = min(tile.resident, problem.shared_memory // (tile.shared_bytes + RESERVED_SHARED))
    waves, rest = divmod(_blocks(tile, problem) * splits, resident * problem.multiprocessors)
    time = waves * wave(resident) + (wave(-(-rest // problem.multiprocessors)) if rest else 0)
    memory = _memory_time(problem)
    time = max(time, memory) + _NOT_HIDDEN * min(time, memory) + _LAUNCH
    beyond = -(-problem.n // tile.n) * tile.n - problem.n
    time += problem.m * beyond / (_STORED * problem.multiprocessors)
    if splits > 1:
        time += _MEETING + _HANDING_IN * (waves + (rest > 0)) + splits * rows * cols * 4 / _PART_BYTES
        time += splits * problem.m * problem.n * 4 / (_DEVICE_BYTES * problem.multiprocessors)
    return time


def _memory_time(problem: Problem) -> float:
    """Microseconds that device memory takes for all operands and the result."""
    elements = problem.x_elements + problem.n * problem.k + problem.m * problem.n
    return elements * problem.element_bytes / (_DEVICE_BYTES * problem.multiprocessors) + _FIRST_BYTES


def _fits(tile: Tile, problem: Problem) -> bool:
    if problem.weight_layout == "kn" and tile.n * problem.element_bytes < SWIZZLED_BYTES:
        return False
    if tile.splits_weight and problem.weight_layout == "kn" and tile.n & (tile.n - 1):
        return False  # a warpgroup copies whole rows of the weight, and turns over whole columns
    if tile.wgmma and tile.shared_bytes + RESERVED_SHARED > problem.shared_memory:
        return False
    if (problem.precision, problem.weight_layout, tile.m, tile.n) == ("tf32", "kn", 64, 64):
        return False  # ptxas 13.0 keeps it to 96 registers on sm_80 and spills two
    if (problem.precision, tile.m, tile.n) == ("tf32x3", 64, 128) and problem.windows is not None:
        return False  # spills three registers on sm_80
    if (problem.precision, tile.m, tile.n) == ("tf32", 256, 64) and problem.windows is None:
        return False  # spills on sm_80 where rows are not aligned
    if problem.precision == "tf32x3" and _multiplier(problem) == "Bf16x6" and tile.warps_n == 4 and tile.m in (16, 64):
        return False  # spills a register or two on sm_80, with 64 rows where they are not aligned
    # TileCopy's offsets within a tile have 32 bits.
    weight_rows = tile.n if problem.weight_layout == "nk" else TILE_BYTES_OF_K // problem.element_bytes
    x_rows = min(tile.m, problem.m)
    x_reach = x_rows * problem.x_stride if problem.windows is None else problem.windows.reach(x_rows)
    if max(x_reach, weight_rows * problem.weight_stride) * problem.element_bytes >= 2**32:
        return False
    tiles_m, tiles_n = -(-problem.m // tile.m), -(-problem.n // tile.n)
    return tiles_n <= MAX_GRID_YZ and -(-tiles_m // BAND) <= MAX_GRID_YZ


def _multiplier(problem: Problem) -> str:
    """The precision's struct in mma.cuh.

    Short sums need more than 3xTF32, and so do small outputs, which cuBLAS sums up as trees. Error as a multiple of
    eager's for normal and uniform data, on an H200 (outputs of 2048x4096 and 16x512, Sums as `_sums` has them):

        K                       4         16        32        64        256       1024      16384
        Tf32x3, large       2.26/1.78 1.29/0.96 0.97/0.71 0.74/0.55 0.48/0.41 0.25/0.16 0.09/0.07
        Bf16x6, large       0.69/0.74 0.47/0.56
        Tf32x3, small       1.79/1.50 1.20/0.95 1.22/0.97 1.19/1.03 1.27/1.46 0.70/0.96 0.49/1.23
        Bf16x6, small       0.57/0.64 0.43/0.56 0.53/0.67 0.60/0.80 0.56/0.62 0.28/0.43 0.14/0.29

    Where single products dominate (normal * exp(4 * normal)) Tf32x3 errs 1.3 to 3.5 times as much as eager, about
    1e-7: tensor cores truncate where they align eight products to the largest one. Bf16x6 errs 1.0 to 1.5 times as
    much. It takes half as much time again, if tensor cores are what a kernel waits for.
    """
    if problem.precision != "tf32x3":
        return _MMA[problem.precision]
    small = problem.m == 1 or -(-problem.m // 64) * -(-problem.n // 64) <= 32
    short = problem.k < 32 or (problem.m <= 16 and problem.k <= 256)
    return "Bf16x6" if small or short else "Tf32x3"


def _is_accurate(tile: Tile, problem: Problem, splits: int = 1) -> bool:
    """Whether the kernel's error is at most that of eager's fp32 GEMM.

    cuBLAS divides K among thread blocks, too, where 128x128 tiles do not fill the device, and so becomes as accurate as
    `kBlockwise` only. Seen on an H200 (132 multiprocessors), errors in 1e-8 for normal/uniform data:

        tiles                                    K = 1024   2048    4096      8192     16384     32768
        any, at least                               24/9    29/9   41/12     49/13     57/12     57/11
        those that fill whole waves                57/43   57/30   81/43     66/24     81/22    133/47
        64 of one row                              57/43   41/16   57/22     81/30    162/84   229/119
        128 and 256 of one row                     57/43       -   81/43    115/60   229/168   324/238
        kPromoted, 1                               27/23   29/24   32/26     38/30     48/37     63/47
        kPromoted, 1, shares of at most 4096           -       -       -     29/23     32/23     33/23
        kBlockwise, 8                               15/7    15/7    16/7      18/9     20/12     25/16
    """
    if problem.precision != "tf32x3" or tile.small_warps:
        return True
    if tile.splits_weight:
        return _wgmma_sums(tile, problem, splits) is not None
    if _multiplier(problem) == "Bf16x6":
        return False  # it needs registers for three sets of sums
    tiles = -(-problem.m // 128) * -(-problem.n // 128)
    fills = tiles / problem.multiprocessors
    if problem.k <= 256 or fills >= (1 if problem.k < 1024 else 3):
        return True
    share = problem.k / splits
    if 64 < problem.m <= 128 and tiles >= 64 and problem.k >= 8192:
        return share <= (4096 if tiles < 128 else 16384)
    return fills / math.ceil(fills) >= 0.9 and problem.k <= 4096


def _sums(tile: Tile, problem: Problem, splits: int = 1) -> tuple[str, int]:
    """How the kernel adds up along K: `Sums` of mainloop.cuh, and its blocks' length in tiles of K.

    Error of tf32x3 on an H200 as a multiple of cuBLAS's fp32 error, for normal and uniform data (2048x8192 outputs;
    kBlockwise: 512x512, where cuBLAS's own error is up to 10 times smaller):

        K                        16         64        256       1024       4096       8192
        kStepwise         1.30/0.95  0.74/0.56  0.49/0.41  0.39/0.37  0.36/0.36  0.36/0.36
        kPromoted, 1      1.91/1.80  1.72/1.97  0.88/1.01  0.47/0.54  0.28/0.31  0.23/0.25
        kPromoted, 2      1.91/1.80  3.24/4.30  1.64/2.20  0.83/1.13  0.43/0.58  0.32/0.42
        kPromoted, 4      1.91/1.80  3.24/4.30  3.19/4.92  1.60/2.52  0.80/1.28  0.57/0.91
        kBlockwise, 8     1.31/0.95  0.74/0.56  0.49/0.41  0.50/0.60  0.39/0.64  0.30/0.57
    """
    if problem.precision != "tf32x3":
        return "kRunning", 1
    if tile.splits_weight:
        return _wgmma_sums(tile, problem, splits) or ("kPromoted", 1)
    if _multiplier(problem) == "Bf16x6":
        return "kBlockwise", 2
    if tile.small_warps:  # as many blocks as steps (of 8 k, four to a tile) in a block
        return "kBlockwise", max(1, round(math.sqrt(problem.k / 128)))
    if problem.k <= 256:
        return "kStepwise", 1
    # Fewer tiles make cuBLAS more accurate: see _is_accurate.
    if problem.k < 2048 or -(-problem.m // 128) * -(-problem.n // 128) < 3 * problem.multiprocessors:
        return "kPromoted", 1
    return "kPromoted", 2 if problem.k <= 8192 else 4


def _wgmma_sums(tile: Tile, problem: Problem, splits: int) -> tuple[str, int] | None:
    """The same for 3xTF32 by warpgroup products; None where its error would be beyond eager's.

    Tensor cores truncate four times in a tile of K (Tf32x3Consumer), or once or twice where parts of it have sums of
    their own (kBlockwise: it needs registers that larger tiles have not got). Errors in 1e-8 on an H200 for normal and
    uniform data, whatever M and N are, and eager's by the number of 128x128 tiles of its result:

        K                   96     128     256     512     768    1024    2048    3072    4096    8192   16384
        kPromoted        18/13   18/13   19/13   19/14   20/14   21/14   23/16   25/19   27/19   34/24   44/32
        kBlockwise        16/7    16/7    17/7    17/7    17/7    17/7    18/7    18/8    18/8    19/8    21/9
        512 and more     18/15   20/16   29/22   41/31   50/42   57/43   81/60   99/83  114/84 162/119 229/168
        384                                              50/42   57/43   81/60   45/17   51/19   81/30  114/42
        288, 300                                 41/31   50/42   57/43   37/14   45/17   51/19   41/10   58/12
        256                                                      57/43   81/60   99/83  115/85   93/47  133/66
        192                              29/22   41/31   50/42   26/10    29/9   36/11   41/12   58/16   81/22
        150                              29/22    19/8    23/9   26/10   31/11   38/12   44/14   62/20   87/28
        128                                      41/31   50/41   57/43   57/30   70/42   81/43   66/24   94/33
        64, 96                                   41/31   50/42    21/7    29/9   36/11   35/10   49/13   57/11
        64 of one row                            41/31   50/42   57/43   41/16   50/21   57/22   81/30  162/84
        36                       20/16   21/12   24/12    20/7    22/8   31/11   38/12   44/14   61/20   87/28
    """
    tiles = -(-problem.m // 128) * -(-problem.n // 128)
    fills = tiles / problem.multiprocessors
    if problem.k <= 192 or fills >= 3.8 or 1.9 <= fills <= 2:
        promoted = True
    elif fills / math.ceil(fills) >= 0.95:
        promoted = problem.k <= (4096 if fills <= 1 else 2048)
    elif fills >= 2 and 3072 <= problem.k <= 4096:
        promoted = problem.k <= 1024 * splits
    elif 64 < problem.m <= 128 and tiles >= 64 and problem.k >= 4096:
        promoted = True
    elif fills >= 1.4:
        promoted = problem.k < 1024
    else:
        promoted = 64 <= tiles <= problem.multiprocessors and problem.k <= 768
    if promoted:
        return "kPromoted", 1
    if tile.n > MOST_BLOCKWISE_BY_WGMMA:
        return None
    return "kBlockwise", max(1, round(math.sqrt(problem.tiles_k / splits)))  # as many tiles in a block as blocks


def _fp16x3_chain(tile: Tile, problem: Problem) -> int | None:
    """Steps of K that the kernel adds up in tensor cores at a time; None if its error would be beyond eager's.

    Small warps add up these sums as a tree (Fp16x3Config). Error on an H200 as a multiple of cuBLAS's fp32 error, for
    normal and uniform data:

        tiles of 128x128, K        512, 256      512, 1024     512, 4096     448, 2048     192, 3072     16, 16384
        1, as a tree               0.41/0.34     0.22/0.16     0.12/0.09     0.28/0.30     0.39/0.66     0.33/0.98
        2                          0.53/0.55     0.31/0.32     0.22/0.22     0.44/0.67     0.64/1.64     0.75/2.62
        4                          0.86/1.21     0.46/0.65     0.26/0.35     0.59/1.22     0.79/2.59     0.67/2.86

    cuBLAS divides long sums among thread blocks, and is more accurate, where its tiles leave multiprocessors idle. From
    K = 1024 on that was so for 16, 192, 300, 384 and 448 tiles of 128x128, but not for 256, 512 and 576. For 4 tiles
    and K = 16384 not even the tree is exact enough (1.2).
    """
    tiles = -(-problem.m // 128) * -(-problem.n // 128)
    if tile.small_warps:
        return 1 if tiles >= 16 or problem.k <= 4096 else None
    if problem.k < 512:
        return 2
    fills = tiles / problem.multiprocessors
    if problem.k < 1024:
        return 4 if fills >= 1 else None
    if fills >= 3.8 or 1.9 <= fills <= 2:
        return 4
    return 2 if fills >= 3 else None


def _fp16x3_kernel(tile: Tile, chain: int, problem: Problem) -> Kernel:
    """A kernel that splits float32 operands into its workspace and multiplies the halves."""
    block_k = max(FP16X3_TILE_K, FP16X3_STEP_K * chain)
    padded_k = -(-problem.k // block_k) * block_k
    rows = -(-problem.m // tile.m) * tile.m + -(-problem.n // tile.n) * tile.n
    config = f"Fp16x3Config<{tile.m}, {tile.n}, {tile.warps_m}, {tile.warps_n}, {tile.stages}, {chain}"
    tree = "true" if tile.small_warps else "false"
    return Kernel(
        name=f"gemm fp16x3 {tile.m}x{tile.n}x{FP16X3_TILE_K}, {tile.stages} stages",
        header=FP16X3_HEADER,
        type=f"Fp16x3Gemm<{config}, {tree}>, Major::{_MAJOR[problem.weight_layout]}, {{output}}, {{epilogue}}>",
        params=_params(problem, block_tiles=1),
        workspace=4 * rows * (padded_k + 1),  # halves and exponents
    )


def _kernel(tile: Tile, problem: Problem, splits: int = 1) -> Kernel:
    sums, block = _sums(tile, problem, splits)
    family, header, rows = "gemm", HEADER, "MatrixRows"
    if problem.windows is not None:
        family, header, rows = "conv2d as gemm", WINDOWS_HEADER, "WindowRows"
    if problem.weights == 2:
        family = f"gated {family}"
    struct_name = "SplitGemm" if splits > 1 else "WgmmaGemm" if tile.goes_on else "Gemm"
    if tile.splits_weight:
        family, header = f"{family} wgmma", WGMMA_TF32X3_HEADER
        struct_name = "SplitWgmmaTf32x3Gemm" if splits > 1 else "WgmmaTf32x3Gemm"
        config = (
            f"WgmmaTf32x3Config<{tile.m}, {tile.n}, {tile.stages}, Sums::{sums}, "
            f"Major::{_MAJOR[problem.weight_layout]}, {rows}>"
        )
    elif tile.wgmma:
        family, header = f"{family} wgmma", WGMMA_HEADER
        config = (
            f"WgmmaGemmConfig<{_multiplier(problem)}, {tile.m}, {tile.n}, {tile.warps_n}, {tile.stages}, "
            f"{tile.resident}, {rows}{', 2' if problem.weights == 2 else ''}>"
        )
    else:
        access_x, access_weight = _accesses(problem)
        config = (
            f"GemmConfig<{_multiplier(problem)}, {tile.m}, {tile.n}, {tile.warps_m}, {tile.warps_n}, {tile.stages}, "
            f"Sums::{sums}, Major::{_MAJOR[problem.weight_layout]}, {access_x}, {access_weight}"
            f", {rows}, {str(tile.holds_k).lower()}>"
        )
    name = f"{family} {problem.precision} {tile.m}x{tile.n}x{problem.tile_k}, {tile.stages} stages"
    return Kernel(
        name=f"{name}, split {splits}" if splits > 1 else name,
        header=header,
        type=f"{struct_name}<{config}, {{output}}, {{epilogue}}>",
        params=_params(problem, block, splits),
        workspace=workspace_bytes(tile, problem, splits) if splits > 1 else 0,
    )


def _params(problem: Problem, block_tiles: int, splits: int = 1) -> bytes:
    """Gemm::Problem in gemm.cuh; rows of x last: MatrixRows or WindowRows::Host in windows.cuh."""
    rows: tuple[int, ...] = (problem.x_stride,)
    if problem.windows is not None:
        of = problem.windows
        sides = (*of.kernel, *of.stride, *of.padding, *of.dilation)
        rows = (*of.size, of.channels, *of.out_size, *sides, *of.x_strides)
    return struct.pack(
        f"<{9 + len(rows)}q",
        problem.m,
        problem.n,
        problem.k,
        problem.weight_stride,
        problem.out_stride,
        problem.rows_per_batch or problem.m,
        block_tiles,
        splits,
        math.ceil(problem.tiles_k / splits),
        *rows,
    )


def _accesses(problem: Problem) -> tuple[int, int]:
    """Bytes per read of x and of the weight."""
    access_x = problem.x_alignment
    if problem.windows is None:
        access_x = _access(problem, problem.x_alignment, problem.m, problem.k, problem.x_stride)
    weight_rows, weight_cols = problem.n, problem.k
    if problem.weight_layout == "kn":
        weight_rows, weight_cols = weight_cols, weight_rows
    return access_x, _access(problem, problem.weight_alignment, weight_rows, weight_cols, problem.weight_stride)


def _access(problem: Problem, alignment: int, rows: int, cols: int, stride: int) -> int:
    """Bytes per read of a matrix: the largest power of two that divides all that moves its address (TileCopy)."""
    size = problem.element_bytes
    return math.gcd(MAX_ACCESS, alignment, cols * size, stride * size if rows > 1 else 0)
