"""GEMM kernels for a problem: out[m, n] = epilogue(sum over k of x[m, k] * weight[n, k]).

`candidates` turns a `Problem` (sizes, layouts and alignments of one call) into the `Kernel`s of kernels/gemm.cuh that
can solve it, best first by a model of their time. Nothing here needs a GPU.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import Literal

from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.precision import Precision

Layout = Literal["nk", "kn"]

HEADER = "gemm.cuh"
FP16X3_HEADER = "gemm_fp16x3.cuh"
TILE_BYTES_OF_K = 128  # kTileBytesOfK in shared_tile.cuh
SWIZZLED_BYTES = 128  # least row of a tile in shared memory: OperandTile in shared_tile.cuh
MAX_ACCESS = 16  # bytes that one cp.async moves
MAX_INDEX = 2**31 - 1024  # the kernel counts rows, columns and K in int, up to some tiles beyond the end
MAX_GRID_YZ = 65535  # CUDA's limit
FP16X3_TILE_K, FP16X3_STEP_K = 32, 16  # HalvesLoop in gemm_fp16x3.cuh
# Of an H200; the A100's are all about half of them.
SPEED_TF32X3, SPEED_FP16X3 = 84e12, 163e12  # FLOP/s with the best tiles
SPEED_SPLIT = 4.1e12  # bytes/s
SPLIT_LAUNCH = 1.5e6  # products in 3xTF32 that a multiprocessor adds up during another launch
BAND = 8  # kBand in gemm.cuh: tiles along a grid's x


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
    multiprocessors: int = 108
    """Of the device. The default, like the next one, is the A100's."""
    shared_memory: int = 164 * 1024
    """Bytes per multiprocessor."""

    @property
    def element_bytes(self) -> int:
        return 2 if self.precision in ("fp16", "bf16") else 4


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

    @property
    def small_warps(self) -> bool:
        """Whether a warp's accumulators leave registers for another level of sums."""
        return self.m // self.warps_m * (self.n // self.warps_n) <= 32 * 32

    def speed(self, together: int) -> float:
        """With so many of them on a multiprocessor. 0.3: a second one closes 56 to 76 % of the gap."""
        return self.full - (self.full - self.alone) * 0.3 ** (together - 1)

    @property
    def shared_bytes(self) -> int:
        loop = self.stages * (self.m + self.n) * TILE_BYTES_OF_K
        staging = self.m * (self.n + 8) * 4  # kStagingBytes in gemm.cuh
        return max(loop, staging)


# Speeds: H200, K = 4096, x and weight aligned, with 1 and with 12 thread blocks per multiprocessor, as fractions of
# 84 (tf32x3), 222 (tf32) and 485 TFLOP/s (fp16, bf16).
_TILES_TF32X3 = (
    Tile(128, 128, 2, 4, stages=3, resident=1, alone=0.97, full=1.00),
    Tile(128, 64, 2, 2, stages=3, resident=2, alone=0.88, full=0.99),
    Tile(64, 128, 1, 4, stages=3, resident=2, alone=0.88, full=0.98),
    Tile(64, 64, 2, 2, stages=3, resident=2, alone=0.56, full=0.77),
    Tile(64, 64, 2, 4, stages=4, resident=2, alone=0.58, full=0.73),
    Tile(32, 64, 1, 4, stages=6, resident=4, alone=0.56, full=0.71),
    Tile(16, 64, 1, 4, stages=8, resident=4, alone=0.36, full=0.51),
    Tile(16, 32, 1, 2, stages=12, resident=8, alone=0.19, full=0.39),
)
_TILES = (
    Tile(128, 256, 2, 4, stages=3, resident=1, alone=0.98, full=1.00),
    Tile(256, 128, 4, 2, stages=3, resident=1, alone=0.93, full=0.93),
    Tile(128, 128, 2, 2, stages=3, resident=2, alone=0.79, full=0.91),
    Tile(128, 64, 2, 2, stages=4, resident=3, alone=0.65, full=0.78),
    Tile(64, 128, 2, 2, stages=4, resident=3, alone=0.61, full=0.74),
    Tile(64, 64, 2, 2, stages=4, resident=4, alone=0.46, full=0.63),
    Tile(32, 64, 1, 4, stages=8, resident=4, alone=0.31, full=0.42),
    Tile(16, 64, 1, 4, stages=8, resident=8, alone=0.19, full=0.28),
    Tile(16, 32, 1, 2, stages=12, resident=8, alone=0.09, full=0.22),
)
# Of 163 TFLOP/s, splitting not counted.
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
    if problem.precision == "fp16x3":
        return _fp16x3_candidates(problem)
    tiles = _TILES_TF32X3 if problem.precision == "tf32x3" else _TILES
    usable = [tile for tile in tiles if _fits(tile, problem) and _is_accurate(tile, problem)]
    return tuple(_kernel(tile, problem) for tile in sorted(usable, key=lambda tile: estimated_time(tile, problem)))


def _fp16x3_candidates(problem: Problem) -> tuple[Kernel, ...]:
    """Kernels of scaled fp16 products, and those of 3xTF32, which are faster where few rows or columns share the cost
    of splitting."""
    exact = replace(problem, precision="tf32x3")
    timed = [
        (_fp16x3_time(tile, problem), _fp16x3_kernel(tile, chain, problem))
        for tile in _TILES_FP16X3
        if _fits(tile, problem) and (chain := _fp16x3_chain(tile, problem)) is not None
    ]
    timed += [
        (estimated_time(tile, exact), _kernel(tile, exact))
        for tile in _TILES_TF32X3
        if _fits(tile, exact) and _is_accurate(tile, exact)
    ]
    return tuple(kernel for _, kernel in sorted(timed, key=lambda candidate: candidate[0]))


def _fp16x3_time(tile: Tile, problem: Problem) -> float:
    """Time of splitting and multiplying, in the unit of `estimated_time` for 3xTF32: the time in which a multiprocessor
    adds up K products."""
    weight_passes = 2 if problem.weight_layout == "nk" else 3  # (K, N) is read twice: see split_columns
    bytes_of_k = 4 * (2 * problem.m + weight_passes * problem.n)
    split = bytes_of_k / 2 / problem.multiprocessors * SPEED_TF32X3 / SPEED_SPLIT + SPLIT_LAUNCH / problem.k
    # Products of K that a thread block could do while it starts and stores, less if there is another one.
    idle = 300 if tile.resident == 1 else 120
    return split + estimated_time(tile, problem) * (1 + idle / problem.k) * SPEED_TF32X3 / SPEED_FP16X3


def estimated_time(tile: Tile, problem: Problem) -> float:
    """Time of a kernel, in the time that the best tile takes per element of out (or of the tiles' parts beyond it).

    Thread blocks run in waves of as many as the device holds. What all tiles have in common (K, the traffic of
    weights) is left out, because only the order counts.
    """
    blocks = -(-problem.m // tile.m) * -(-problem.n // tile.n)
    resident = min(tile.resident, problem.shared_memory // (tile.shared_bytes + 1024))  # CUDA reserves 1 KB a block
    waves, rest = divmod(blocks, resident * problem.multiprocessors)
    area = tile.m * tile.n
    time = waves * resident * area / tile.speed(resident)
    if rest:
        together = -(-rest // problem.multiprocessors)
        time += together * area / tile.speed(together)
    if problem.precision == "tf32x3" and _sums(tile, problem)[0] == "kStepwise":
        time /= 0.84  # measured as the speeds above
    return time


def _fits(tile: Tile, problem: Problem) -> bool:
    if problem.weight_layout == "kn" and tile.n * problem.element_bytes < SWIZZLED_BYTES:
        return False
    if (problem.precision, problem.weight_layout, tile.m, tile.n) == ("tf32", "kn", 64, 64):
        return False  # ptxas 13.0 keeps it to 96 registers on sm_80 and spills two
    # TileCopy's offsets within a tile have 32 bits.
    weight_rows = tile.n if problem.weight_layout == "nk" else TILE_BYTES_OF_K // problem.element_bytes
    rows = max(min(tile.m, problem.m) * problem.x_stride, weight_rows * problem.weight_stride)
    if rows * problem.element_bytes >= 2**32:
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


def _is_accurate(tile: Tile, problem: Problem) -> bool:
    """Whether the kernel's error is at most that of eager's fp32 GEMM.

    Where 128x128 tiles do not fill the device several times over, cuBLAS divides long sums among thread blocks and
    becomes as accurate as `kBlockwise` only. Seen on an H200 (132 multiprocessors): with 16 tiles from K = 512 on,
    with 192 tiles from K = 1024 or 2048 on, with 512 tiles never.
    """
    if problem.precision != "tf32x3" or tile.small_warps:
        return True
    if _multiplier(problem) == "Bf16x6":
        return False  # it needs registers for three sets of sums
    fills = -(-problem.m // 128) * -(-problem.n // 128) / problem.multiprocessors
    return problem.k <= 256 or fills >= (1 if problem.k < 1024 else 3)


def _sums(tile: Tile, problem: Problem) -> tuple[str, int]:
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
    if _multiplier(problem) == "Bf16x6":
        return "kBlockwise", 2
    if tile.small_warps:  # as many blocks as steps (of 8 k, four to a tile) in a block
        return "kBlockwise", max(1, round(math.sqrt(problem.k / 128)))
    if problem.k <= 256:
        return "kStepwise", 1
    if problem.k < 2048:
        return "kPromoted", 1
    return "kPromoted", 2 if problem.k <= 8192 else 4


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


def _kernel(tile: Tile, problem: Problem) -> Kernel:
    sums, block = _sums(tile, problem)
    weight_rows, weight_cols = problem.n, problem.k
    if problem.weight_layout == "kn":
        weight_rows, weight_cols = weight_cols, weight_rows
    access_x = _access(problem, problem.x_alignment, problem.m, problem.k, problem.x_stride)
    access_weight = _access(problem, problem.weight_alignment, weight_rows, weight_cols, problem.weight_stride)
    config = (
        f"GemmConfig<{_multiplier(problem)}, {tile.m}, {tile.n}, {tile.warps_m}, {tile.warps_n}, {tile.stages}, "
        f"Sums::{sums}, Major::{_MAJOR[problem.weight_layout]}, {access_x}, {access_weight}>"
    )
    tile_k = TILE_BYTES_OF_K // problem.element_bytes
    return Kernel(
        name=f"gemm {problem.precision} {tile.m}x{tile.n}x{tile_k}, {tile.stages} stages",
        header=HEADER,
        type=f"Gemm<{config}, {{output}}, {{epilogue}}>",
        params=_params(problem, block),
    )


def _params(problem: Problem, block_tiles: int) -> bytes:
    """Gemm::Problem in gemm.cuh."""
    return struct.pack(
        "<8q",
        problem.m,
        problem.n,
        problem.k,
        problem.x_stride,
        problem.weight_stride,
        problem.out_stride,
        problem.rows_per_batch or problem.m,
        block_tiles,
    )


def _access(problem: Problem, alignment: int, rows: int, cols: int, stride: int) -> int:
    """Bytes per read of a matrix: the largest power of two that divides all that moves its address (TileCopy)."""
    size = problem.element_bytes
    steps = alignment | cols * size | (stride * size if rows > 1 else 0)
    return min(MAX_ACCESS, steps & -steps)
