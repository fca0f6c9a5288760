"""GEMM kernels for a problem: out[m, n] = epilogue(sum over k of x[m, k] * weight[n, k]).

`candidates` turns a problem (gemm_problem.py: sizes, layouts and alignments of one call) into `Kernel`s, best first by
a model of their time. The kernels are those of kernels/gemm*.cuh, gemv.cuh, few_rows.cuh and windows.cuh. All of them
are as accurate as the problem's precision promises (gemm_accuracy.py).

Each thread block computes a tile. The device runs the thread blocks in waves of as many as it can hold. If the last
wave does not fill the device, several thread blocks may share each of its tiles, a part of K each (split-K).
A convolution on channels_last is a GEMM, too: the rows of x are windows, which the kernel gathers (`Windows`). So is
the gradient of its filters, where the rows of the weight are windows.
Nothing here needs a GPU.
"""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Final

from fxfuse.cuda.gemm_accuracy import LEAST_WGMMA_TF32X3_K, fp16x3_chain, is_accurate, multiplier, summation
from fxfuse.cuda.gemm_problem import MAX_ACCESS, RESERVED_SHARED, TILE_BYTES_OF_K, Problem, Tile, Windows
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.precision import ELEMENT, MMA, Precision

HEADER = "gemm.cuh"
WINDOWS_HEADER = "windows.cuh"
WGMMA_HEADER = "gemm_wgmma.cuh"
WGMMA_TF32X3_HEADER = "gemm_wgmma_tf32x3.cuh"
FP16X3_HEADER = "gemm_fp16x3.cuh"
GEMV_HEADER = "gemv.cuh"
FEW_ROWS_HEADER = "few_rows.cuh"
SWIZZLED_BYTES = 128  # least bytes in a row of a tile in shared memory: OperandTile in shared_tile.cuh
MAX_INDEX = 2**31 - 1024  # the kernel counts rows, columns and K in int, up to some tiles beyond the end
MAX_GRID_YZ = 65535  # CUDA's limit
FP16X3_TILE_K, FP16X3_STEP_K = 32, 16  # HalvesLoop in gemm_fp16x3.cuh
BAND = 8  # kBand in gemm.cuh: tiles along a grid's x
MAX_SPLITS = 32  # most thread blocks that share a tile; the last one to arrive adds up the sums of all
LEAST_SHARE = 4  # least tiles of K in a share: fewer do not fill the pipeline
MAX_WORKSPACE = 256 << 20  # bytes
SHARING_PAYS = 0.95  # split-K must take less than this fraction of the time without it: it also allocates a workspace
MOST_SHARED_BY_WGMMA = 128 * 96  # elements of a tile: larger tiles spill when they add up shares
COUNTER_BYTES, WORKSPACE_ALIGNMENT = 8, 256  # of SplitWorkspace in split_k.cuh
MOST_HELD = 4  # most tiles of K that each get a stage of their own: with more there would be more kernels to compile
LEAST_GATED_ROWS = 16  # for fewer rows two kernels are faster: a tile multiplies 64 rows, however many exist
MOST_GEMV_ROWS = 4  # most rows of x for which multiplying takes less time than reading the weight
FEW_ROWS = (8, 16)  # rows of x for which tensor cores multiply while the weight is read (kRows in few_rows.cuh)
MOST_TOGETHER = 4  # most products of few rows in one launch: GemvTogether in gemv.cuh
MMA_COLUMNS = 16  # columns of a tile in few_rows.cuh; for 16 rows two tiles read x once, if enough blocks remain
NEARLY = 0.9  # fraction of the multiprocessors that counts as nearly all
MOST_TAPS = 15  # along a side of a filter: kSideBits in windows.cuh

# `alone` and `full` are fractions of _PRODUCTS, fitted with the constants of `estimated_time`.
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
_MAJOR = {"nk": "kK", "kn": "kMN"}


def candidates(problem: Problem) -> tuple[Kernel, ...]:
    """The kernels that can run the problem, best first by `estimated_time`; none if its sizes exceed the templates'.

    All are as accurate as the precision promises.
    """
    if min(problem.m, problem.n, problem.k) < 1 or max(problem.m, problem.n, problem.k) > MAX_INDEX:
        return ()
    if problem.weights == 2:
        timed = _timed_pair(problem)
    else:
        timed = _timed(problem) if problem.precision != "fp16x3" else _timed_fp16x3(problem)
    return tuple(replace(kernel, estimate=time) for time, kernel in sorted(timed, key=lambda choice: choice[0]))


def _timed(problem: Problem) -> list[tuple[float, Kernel]]:
    """(estimated time, kernel) for one weight, in any precision but fp16x3."""
    return _timed_gemv(problem) + [
        (estimated_time(tile, problem, splits), _kernel(tile, problem, splits))
        for tile in _tiles(problem)
        for splits in _split_counts(tile, problem)
    ]


def _timed_gemv(problem: Problem) -> list[tuple[float, Kernel]]:
    """(estimated time, kernel) for few rows, where reading the weight takes all the time; empty for other problems.

    gemv.cuh multiplies without tensor cores: one row in 16 bits, up to MOST_GEMV_ROWS in float32. few_rows.cuh
    multiplies up to FEW_ROWS[-1] rows in 16 bits by tensor cores.
    """
    if problem.windows is not None or (problem.x_layout, problem.weight_layout) != ("mk", "nk") or problem.batches > 1:
        return []
    if _is_ragged(problem) or min(_accesses(problem)) < MAX_ACCESS or problem.k > MAX_INDEX // 2:
        return []  # these kernels count beyond K's end
    element = ELEMENT[problem.precision]
    strides = (problem.x_stride, problem.weight_stride, problem.out_stride)
    params = struct.pack("<8q", 1, problem.m, problem.n, problem.k, *strides, problem.rows_per_batch or problem.m)
    family, weights = ("gated gemv", ", 2") if problem.weights == 2 else ("gemv", "")
    wide = element != "float"
    if problem.m <= (1 if wide else MOST_GEMV_ROWS):
        rows = 1 if problem.m == 1 else MOST_GEMV_ROWS
        name, header = f"{family} {element.lower()}, {rows} row{'s' * (rows > 1)}", GEMV_HEADER
        kind = f"Gemv<{element}, {{output}}, {{epilogue}}, {rows}{weights}>"
    elif wide and problem.m <= FEW_ROWS[-1]:
        groups = next(number for number, rows in enumerate(FEW_ROWS, 1) if problem.m <= rows)
        enough = 2 * MMA_COLUMNS * problem.multiprocessors * NEARLY
        tiles = 2 if groups == 2 and problem.n * problem.weights >= enough else 1
        name = f"{family} mma {problem.precision}, {FEW_ROWS[groups - 1]} rows, {tiles * MMA_COLUMNS} columns"
        kind = f"FewRows<{MMA[problem.precision]}, {{output}}, {{epilogue}}, {groups}, {tiles}{weights}>"
        header = FEW_ROWS_HEADER
    else:
        return []
    return [(_memory_time(problem) + _LAUNCH, Kernel(name, header, kind, params, together=MOST_TOGETHER))]


def _tiles(problem: Problem) -> list[Tile]:
    """The tiles that fit the problem.

    A tile has no more stages than K has tiles: with fewer stages more thread blocks share a multiprocessor.
    """
    depth = problem.tiles_k
    tiles: tuple[Tile, ...] = _TILES_TF32X3 if problem.precision == "tf32x3" else _TILES
    hoppers: tuple[Tile, ...] = ()
    if _has_wgmma(problem):
        hoppers = WGMMA_TF32X3_TILES if problem.precision == "tf32x3" else WGMMA_TILES
    staged = [
        replace(tile, stages=depth, holds_k=True)
        if depth <= min(tile.stages, MOST_HELD)
        else replace(tile, stages=min(tile.stages, math.ceil((depth + 1) / 4) * 4))  # so that there are few kernels
        for tile in tiles
    ]
    return [tile for tile in (*hoppers, *staged) if _fits(tile, problem)]


def _has_wgmma(problem: Problem) -> bool:
    """Whether the kernels that use wgmma (warpgroup products) can run the problem."""
    if problem.precision == "tf32x3":
        offered = problem.k >= LEAST_WGMMA_TF32X3_K and multiplier(problem) == "Tf32x3"
        offered = offered and problem.weight_windows is None
    else:
        offered = problem.precision in ("fp16", "bf16") and (problem.weights == 1 or problem.weight_layout == "nk")
    return problem.hopper and offered and min(_accesses(problem)) == MAX_ACCESS


def _timed_pair(problem: Problem) -> list[tuple[float, Kernel]]:
    """(estimated time, kernel) for two weights: WgmmaGemm, and `_timed_gemv` for few rows.

    WgmmaGemm takes about as long as with one weight of twice the columns.
    """
    if problem.element_bytes != 2:
        return []
    few = _timed_gemv(problem)
    if problem.m < LEAST_GATED_ROWS or not _has_wgmma(problem):
        return few
    joined = replace(problem, n=2 * problem.n)
    tiles = [tile for tile in WGMMA_TILES if tile.goes_on and _fits(tile, joined)]
    return few + [(estimated_time(tile, joined), _kernel(tile, problem)) for tile in tiles]


def _timed_fp16x3(problem: Problem) -> list[tuple[float, Kernel]]:
    """(estimated time, kernel) in fp16x3: kernels of gemm_fp16x3.cuh, and those of 3xTF32.

    3xTF32 is faster where few rows or columns share the cost of splitting. gemm_fp16x3.cuh has no batches.
    """
    return _timed(replace(problem, precision="tf32x3")) + [
        (_splitting_time(problem) + estimated_time(tile, problem), _fp16x3_kernel(tile, chain, problem))
        for tile in _TILES_FP16X3
        if problem.batches == 1 and _fits(tile, problem) and (chain := fp16x3_chain(tile, problem)) is not None
    ]


def _split_counts(tile: Tile, problem: Problem) -> list[int]:
    """How many thread blocks per tile are worth a candidate: 1, and the fastest split if it pays.

    Numbers that do not give accurate enough sums are left out.
    """
    counts = [1] if is_accurate(tile, problem, 1) else []
    most = estimated_time(tile, problem, 1) * SHARING_PAYS if counts else math.inf
    times = {
        splits: estimated_time(tile, problem, splits)
        for splits in possible_splits(tile, problem)
        if (sums := summation(tile, problem, _fewest_shares(tile, problem, splits))) is not None
        and sums[0] != "kStepwise"  # on sm_80 these sums leave no registers for the parts of other thread blocks
    }
    best = min(times, key=lambda splits: times[splits], default=1)
    return [*counts, best] if best > 1 and times[best] < most else counts


def possible_splits(tile: Tile, problem: Problem) -> list[int]:
    """How many thread blocks (above 1) can share a tile of this problem: `share_counts` whose workspace fits."""
    too_large = tile.wgmma and not tile.splits_weight and tile.m * tile.n > MOST_SHARED_BY_WGMMA
    if too_large or not _shared_tiles(tile, problem):
        return []
    counts = share_counts(problem.tiles_k)
    return [splits for splits in counts if workspace_bytes(tile, problem, splits) <= MAX_WORKSPACE]


def share_counts(tiles_k: int) -> list[int]:
    """How many thread blocks (above 1) can share `tiles_k` tiles of K so that each has work."""
    most = min(MAX_SPLITS, tiles_k // LEAST_SHARE)
    # Shares are whole tiles, equally many in all but the last: 10 tiles in 4 shares are 3, 3, 3 and 1. In 6 shares they
    # would be 5 shares of 2.
    return sorted({-(-tiles_k // -(-tiles_k // splits)) for splits in range(2, most + 1)})


def _shared_tiles(tile: Tile, problem: Problem) -> int:
    """How many tiles are shared with split-K: those of an incomplete last wave.

    All tiles are shared if whole sums are not accurate enough, or if there are several products: a kernel shares the
    same tiles of each of them.
    """
    blocks, wave = _blocks(tile, problem), _resident(tile, problem) * problem.multiprocessors
    return blocks % wave if problem.batches == 1 and (blocks < wave or is_accurate(tile, problem, 1)) else blocks


def _fewest_shares(tile: Tile, problem: Problem, splits: int) -> int:
    """The least number of thread blocks on a tile: 1 if any tile is not shared. The longest sums limit the accuracy."""
    return splits if _shared_tiles(tile, problem) == _blocks(tile, problem) else 1


def workspace_bytes(tile: Tile, problem: Problem, splits: int) -> int:
    """Bytes of workspace if `splits` thread blocks share each of `_shared_tiles`."""
    return shared_sums_bytes(_shared_tiles(tile, problem), tile.m * tile.n, splits)


def shared_sums_bytes(tiles: int, elements: int, splits: int) -> int:
    """Bytes of split_k.cuh's workspace: a counter for each tile, and the float32 sums of each of its thread blocks.

    Args:
        tiles: how many tiles are shared.
        elements: elements of a tile.
    """
    counters = -(-tiles * COUNTER_BYTES // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    return counters + tiles * splits * elements * 4


def _blocks(tile: Tile, problem: Problem) -> int:
    return problem.batches * -(-problem.m // tile.m) * -(-problem.n // tile.n)


def _resident(tile: Tile, problem: Problem) -> int:
    """How many thread blocks a multiprocessor holds at a time."""
    return max(1, min(tile.resident, problem.shared_memory // (tile.shared_bytes + RESERVED_SHARED)))


# Rates of an H200, per multiprocessor and microsecond. An A100 has about half of each, so the order of candidates is
# the same. They are fitted to times of all splits of all tiles for 73 problems in tf32x3 and bf16
# (benchmarks/gemm_model.py): the model's first choice is within 10 % of the best on 146 of 147. If only half of the
# problems are fitted, the same holds for 97 % of the others. The speeds of WGMMA_TILES were fitted separately, to 36
# problems of networks: the best is among the first three on 35. Those of WGMMA_TF32X3_TILES are what large problems
# reach.
_PRODUCTS: Final[dict[Precision, float]] = {  # of a good tile
    "tf32x3": 84e6 / 264, "fp16x3": 163e6 / 264, "tf32": 222e6 / 264, "fp16": 485e6 / 264, "bf16": 485e6 / 264
}  # fmt: skip
_SPLITTING_BYTES = 31.0e3  # read and written by the splitting pass of fp16x3
_DEVICE_BYTES = 33.0e3  # read from or written to device memory
_L2_BYTES = 86e3  # read from L2
_PART_BYTES = 37e3  # other thread blocks' sums, read by the last one of a tile
_STORED = 7e3  # elements of out that are stored, counting those that tiles have beyond N
# Microseconds.
_LAUNCH = 3.4  # to launch a kernel
_WAVE = 1.7  # to fill and drain the pipelines of a wave
_FIRST_BYTES = 2.3  # until device memory is at full speed
_LATENCY = 0.39  # from the copy of a tile of K being issued until it has arrived
_MEETING = 1.6  # until the last thread block of a tile knows that it is the last
_HANDING_IN = 1.1  # for a wave to write its parts of sums
_SLOWED_BY_SUMS: Final[dict[tuple[bool, str], float]] = {  # by (splits_weight, Sums); measured like the tiles' speeds
    (False, "kStepwise"): 0.84, (True, "kBlockwise"): 0.84, (True, "kHalved"): 0.94,
}  # fmt: skip
_NOT_HIDDEN = 0.075  # fraction of the faster one of two overlapping activities that adds to the time


def _splitting_time(problem: Problem) -> float:
    """Microseconds of fp16x3's splitting pass, which writes x and the weight as halves.

    It reads a (K, N) weight twice (split_columns).
    """
    weight_passes = 2 if problem.weight_layout == "nk" else 3
    moved = problem.element_bytes * problem.k * (2 * problem.m + weight_passes * problem.n)
    return moved / (_SPLITTING_BYTES * problem.multiprocessors) + _LAUNCH


def estimated_time(tile: Tile, problem: Problem, splits: int = 1) -> float:
    """Microseconds that a kernel takes on an H200, or on one with another number of multiprocessors.

    Thread blocks run in waves of as many as the device holds. A wave takes as long as the slowest of its products, its
    reads from L2 and its pipeline of copies. All waves together take at least as long as device memory does. With
    `splits` > 1, that many thread blocks share each tile of the last wave (`_shared_tiles`).
    """
    rows, cols = min(tile.m, problem.m), min(tile.n, problem.n)
    speed = _PRODUCTS[problem.precision]
    shares = _fewest_shares(tile, problem, splits)
    sums = summation(tile, problem, shares)
    if sums is not None:
        speed *= _SLOWED_BY_SUMS.get((tile.splits_weight, sums[0]), 1.0)
    if problem.precision == "tf32x3" and multiplier(problem) == "Bf16x6":
        speed /= 1.5

    def wave(together: int, share: int) -> float:
        products = together * tile.m * tile.n * share * problem.tile_k / (speed * tile.speed(together))
        reads = together * (rows + cols) * share * TILE_BYTES_OF_K / _L2_BYTES
        copies = share / (tile.stages if tile.holds_k else tile.stages - 1) * _LATENCY
        return max(products, reads, copies) + _WAVE

    resident = _resident(tile, problem)

    def waves(blocks: int, share: int) -> tuple[int, float]:
        """The number of waves and their time, for `blocks` thread blocks with `share` tiles of K each."""
        full, rest = divmod(blocks, resident * problem.multiprocessors)
        time = full * wave(resident, share)
        return full + (rest > 0), time + (wave(-(-rest // problem.multiprocessors), share) if rest else 0)

    shared = _shared_tiles(tile, problem) if splits > 1 else 0
    _, time = waves(_blocks(tile, problem) - shared, problem.tiles_k)
    meetings, sharing = waves(shared * splits, math.ceil(problem.tiles_k / splits))
    time += sharing
    memory = _memory_time(problem)
    time = max(time, memory) + _NOT_HIDDEN * min(time, memory) + _LAUNCH
    beyond = -(-problem.n // tile.n) * tile.n - problem.n
    time += problem.batches * problem.m * beyond / (_STORED * problem.multiprocessors)
    if splits > 1:
        time += _MEETING + _HANDING_IN * meetings + splits * rows * cols * 4 / _PART_BYTES
        parts = splits * problem.m * problem.n * shared / _blocks(tile, problem)
        time += parts * 4 / (_DEVICE_BYTES * problem.multiprocessors)
    return time


def _memory_time(problem: Problem) -> float:
    """Microseconds that device memory takes to read x and the weight and to write the result."""
    elements = problem.x_elements + problem.weight_elements + problem.batches * problem.m * problem.n
    return elements * problem.element_bytes / (_DEVICE_BYTES * problem.multiprocessors) + _FIRST_BYTES


def _fits(tile: Tile, problem: Problem) -> bool:
    if tile.shared_bytes > problem.most_shared:
        return False  # GPUs outside data centres have 99 KB per thread block
    if problem.weight_layout == "kn" and tile.n * problem.element_bytes < SWIZZLED_BYTES:
        return False
    if problem.x_layout == "km" and tile.m * problem.element_bytes < SWIZZLED_BYTES:
        return False
    if tile.wgmma and problem.weight_layout == "kn" and tile.n & (tile.n - 1):
        return False  # tf32x3: a warpgroup copies whole rows of the weight; 16 bits: products begin with a slab
    if (problem.precision, problem.weight_layout, tile.m, tile.n) == ("tf32", "kn", 64, 64):
        return False  # ptxas 13.0 keeps it to 96 registers on sm_80 and spills two
    if (problem.precision, tile.m, tile.n) == ("tf32x3", 64, 128) and problem.windows is not None:
        return False  # spills three registers on sm_80
    if (problem.precision, tile.m, tile.n) == ("tf32", 256, 64) and problem.windows is None:
        return False  # spills on sm_80 where rows are not aligned
    sixfold = problem.precision == "tf32x3" and multiplier(problem) == "Bf16x6"
    if sixfold and tile.warps_n == 4 and (tile.m in (16, 64) or problem.weight_windows is not None):
        return False  # spills a register or two on sm_80, with 64 rows where they are not aligned
    threefold = problem.precision == "tf32x3" and not sixfold
    if threefold and problem.weight_windows is not None and problem.batches > 1 and (tile.m, tile.warps_n) == (64, 2):
        return False  # spills 18 registers on sm_80 where tiles are shared
    # Offsets within a tile, or within the image of a window, have 32 bits.
    weight_rows = tile.n if problem.weight_layout == "nk" else TILE_BYTES_OF_K // problem.element_bytes
    x_rows = min(tile.m, problem.m)
    x_rows = x_rows if problem.x_layout == "mk" else problem.tile_k
    x_reach = x_rows * problem.x_stride if problem.windows is None else problem.windows.reach(x_rows)
    of_weight = problem.weight_windows
    weight_reach = weight_rows * problem.weight_stride if of_weight is None else of_weight.reach(1)
    if max(x_reach, weight_reach) * problem.element_bytes >= 2**32:
        return False
    tiles_m, tiles_n = -(-problem.m // tile.m), -(-problem.n // tile.n)
    return tiles_n <= MAX_GRID_YZ and problem.batches * -(-tiles_m // BAND) <= MAX_GRID_YZ


def _fp16x3_kernel(tile: Tile, chain: int, problem: Problem) -> Kernel:
    """The kernel that splits x and the weight into halves in its workspace and multiplies the halves."""
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
        shared=tile.shared_bytes,
        workspace=4 * rows * (padded_k + 1),  # halves and exponents
    )


def _kernel(tile: Tile, problem: Problem, splits: int = 1) -> Kernel:
    sums, block = summation(tile, problem, _fewest_shares(tile, problem, splits)) or ("kPromoted", 1)
    family, header, rows = "gemm", HEADER, "MatrixRows"
    if problem.windows is not None:
        family, header, rows = "conv2d as gemm", WINDOWS_HEADER, "WindowRows"
    elif problem.weight_windows is not None:
        family, header, rows = "filters' gradient as gemm", WINDOWS_HEADER, "WindowColumns"
    elif problem.x_layout == "km":
        rows = "MatrixColumns"
    if problem.batches > 1:
        family, rows = f"batched {family}", f"Batched<{rows}>"
    if _is_ragged(problem):
        rows = f"Ragged<{rows}>"
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
            f"WgmmaGemmConfig<{multiplier(problem)}, {tile.m}, {tile.n}, {tile.warps_n}, {tile.stages}, "
            f"{tile.resident}, Major::{_MAJOR[problem.weight_layout]}, {rows}{', 2' if problem.weights == 2 else ''}>"
        )
    else:
        access_x, access_weight = _accesses(problem)
        config = (
            f"GemmConfig<{multiplier(problem)}, {tile.m}, {tile.n}, {tile.warps_m}, {tile.warps_n}, {tile.stages}, "
            f"Sums::{sums}, Major::{_MAJOR[problem.weight_layout]}, {access_x}, {access_weight}"
            f", {rows}, {str(tile.holds_k).lower()}>"
        )
    name = f"{family} {problem.precision} {tile.m}x{tile.n}x{problem.tile_k}, {tile.stages} stages"
    alone = _blocks(tile, problem) - _shared_tiles(tile, problem) if splits > 1 else 0
    assert alone == 0 or problem.batches == 1, "the kernel counts the tiles of each product"
    return Kernel(
        name=f"{name}, split {splits}" if splits > 1 else name,
        header=header,
        type=f"{struct_name}<{config}, {{output}}, {{epilogue}}>",
        params=_params(problem, block, splits, alone),
        shared=tile.shared_bytes,
        workspace=workspace_bytes(tile, problem, splits) if splits > 1 else 0,
        in_place=struct_name != "WgmmaTf32x3Gemm",  # which computes tiles with infinite sums again when all are stored
    )


def _params(problem: Problem, block_tiles: int, splits: int = 1, alone: int = 0) -> bytes:
    """The struct Gemm::Problem of gemm.cuh, packed. Its last fields are those of MatrixRows, MatrixColumns or, in
    windows.cuh, WindowRows::Host or WindowColumns::Host; and, of several products, those of Batched::Host."""
    rows: tuple[int, ...] = (problem.x_stride,)
    if problem.windows is not None:
        rows = _packed(problem.windows)
    if problem.weight_windows is not None:
        rows = problem.x_stride, *_packed(problem.weight_windows)
    if problem.batches > 1:
        rows = *rows, problem.batches, problem.x_step, problem.weight_step
    return struct.pack(
        f"<{10 + len(rows)}q",
        problem.m,
        problem.n,
        problem.k,
        problem.weight_stride,
        problem.out_stride,
        problem.rows_per_batch or problem.m,
        block_tiles,
        alone,
        splits,
        math.ceil(problem.tiles_k / splits),
        *rows,
    )


def _packed(windows: Windows) -> tuple[int, ...]:
    """The fields of WindowRows::Host."""
    sides = (*windows.kernel, *windows.stride, *windows.padding, *windows.dilation)
    return (*windows.size, windows.channels, *windows.out_size, *sides, *windows.x_strides)


def _accesses(problem: Problem) -> tuple[int, int]:
    """Bytes per access of x and of the weight: the largest powers of two that divide the addresses and strides."""
    size = problem.element_bytes
    x_rows = problem.m if problem.x_layout == "mk" else problem.k
    weight_rows = problem.n if problem.weight_layout == "nk" else problem.k
    of_x = [problem.x_stride if x_rows > 1 else 0, problem.x_step]
    of_weight = [problem.weight_stride if weight_rows > 1 else 0, problem.weight_step]
    # beside windows, rows are not ragged
    if problem.windows is not None:
        of_x, of_weight = [], [*of_weight, problem.k]
    if problem.weight_windows is not None:
        of_x, of_weight = [*of_x, problem.m], []
    return (
        math.gcd(MAX_ACCESS, problem.x_alignment, *(step * size for step in of_x)),
        math.gcd(MAX_ACCESS, problem.weight_alignment, *(step * size for step in of_weight)),
    )


def _is_ragged(problem: Problem) -> bool:
    """Whether a row of x or of the weight ends within one access (TileCopy)."""
    if problem.windows is not None or problem.weight_windows is not None:
        return False
    x_row = problem.k if problem.x_layout == "mk" else problem.m
    weight_row = problem.k if problem.weight_layout == "nk" else problem.n
    pairs = zip((x_row, weight_row), _accesses(problem), strict=True)
    return any(row * problem.element_bytes % access for row, access in pairs)
