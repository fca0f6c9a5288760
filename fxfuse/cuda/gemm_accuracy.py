"""How kernels multiply and add up so that they are as accurate as torch's. Measured errors decide this.

Only 3xTF32 and scaled halves (fp16x3) are concerned. TF32 and 16-bit products are added up in float32 by every tile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fxfuse.cuda.gemm_problem import Errors, Problem, Tile
from fxfuse.cuda.precision import MMA

LEAST_WGMMA_TF32X3_K = 128  # shorter sums by wgmma are less accurate than eager's: see `BY_WGMMA`


def multiplier(problem: Problem) -> str:
    """The struct of mma.cuh that multiplies.

    3xTF32 is not accurate enough for short sums, nor for small outputs, which cuBLAS adds up as trees. Error as a
    multiple of eager's for normal/uniform data, on an H200 (outputs of 2048x4096 and 16x512, Sums as `summation`
    chooses them):

        K                       4         16        32        64        256       1024      16384
        Tf32x3, large       2.26/1.78 1.29/0.96 0.97/0.71 0.74/0.55 0.48/0.41 0.25/0.16 0.09/0.07
        Bf16x6, large       0.69/0.74 0.47/0.56
        Tf32x3, small       1.79/1.50 1.20/0.95 1.22/0.97 1.19/1.03 1.27/1.46 0.70/0.96 0.49/1.23
        Bf16x6, small       0.57/0.64 0.43/0.56 0.53/0.67 0.60/0.80 0.56/0.62 0.28/0.43 0.14/0.29

    Where single products dominate (normal * exp(4 * normal)) Tf32x3 errs 1.3 to 3.5 times as much as eager, about
    1e-7: tensor cores truncate when they align eight products to the largest one. Bf16x6 errs 1.0 to 1.5 times as
    much. Bf16x6 takes 1.5 times as long as Tf32x3 where tensor cores limit a kernel.
    """
    if problem.precision != "tf32x3":
        return MMA[problem.precision]
    small = problem.m == 1 or problem.batches * -(-problem.m // 64) * -(-problem.n // 64) <= 32
    short = problem.k < 32 or (problem.m <= 16 and problem.k <= 256)
    return "Bf16x6" if small or short else "Tf32x3"


@dataclass(frozen=True)
class Way:
    """A way to add up along K, and its errors."""

    sums: str
    """`Sums` of mainloop.cuh."""
    block: int
    """Length of a block in tiles of K; 0 for the square root of the number of tiles (see `summation`)."""
    errors: Mapping[int, Errors]
    """Errors by K, in units of 1e-8, for normal and uniform data: measured on an H200. They depend neither on M and N
    nor on the GPU, but only on the order of roundings and on where tensor cores truncate."""
    columns: int = 128
    """Columns of the widest tile that leaves registers for this way."""


# Fastest first. Tensor cores truncate once in a block of tiles of K (kPromoted) or in every step of 8 k (kStepwise).
BY_MMA: Final = (
    Way("kPromoted", 4, {64: (46, 45), 256: (92, 108), 8192: (92, 108), 32768: (110, 120)}),
    Way("kPromoted", 2, {64: (46, 45), 256: (48, 48), 4096: (49, 49), 8192: (52, 50), 32768: (75, 62)}),
    Way("kPromoted", 1, {16: (14, 10), 64: (25, 21), 1024: (27, 23), 4096: (32, 26), 8192: (38, 30), 32768: (63, 47)}),
    Way("kStepwise", 1, {16: (9, 5), 64: (11, 6), 256: (14, 9), 1024: (22, 16), 4096: (41, 30), 8192: (58, 43)}),
)
# By wgmma, which multiplies the small parts first: four truncations in a tile of K, two in half a tile (kHalved), one
# or two where parts of a tile have sums of their own (kBlockwise).
BY_WGMMA: Final = (
    Way("kPromoted", 1, {128: (18, 13), 1024: (21, 14), 4096: (27, 19), 8192: (34, 24), 16384: (44, 32)}),
    Way("kHalved", 1, {128: (17, 8), 512: (19, 10), 1024: (22, 13), 2048: (26, 17), 8192: (44, 30), 16384: (59, 43)}),
    Way("kBlockwise", 0, {128: (16, 7), 1024: (17, 7), 4096: (18, 8), 16384: (21, 9)}, columns=64),
)
MARGIN: Final = 1.1
"""A way of adding up is chosen only if its expected error is at most this times eager's. The real error of a kernel is
measured (exactness.py), and may be larger."""

# Eager's errors by K where they are not measured. _UNDIVIDED: of sums that cuBLAS does not divide among thread blocks.
# _DIVIDED: the least of sums that it divides, as seen for results of 1 to 576 tiles of 128x128 on 132 multiprocessors.
_UNDIVIDED: Final[Mapping[int, Errors]] = {
    16: (7, 5), 128: (20, 16), 256: (29, 22), 512: (41, 31), 1024: (57, 43), 4096: (114, 84), 16384: (229, 168),
}  # fmt: skip
_DIVIDED: Final[Mapping[int, Errors]] = {
    16: (7, 5), 128: (20, 15), 256: (21, 12), 512: (19, 8), 1024: (22, 8), 4096: (35, 10), 16384: (57, 11),
}  # fmt: skip


def is_accurate(tile: Tile, problem: Problem, splits: int = 1) -> bool:
    """Whether the kernel is as accurate as its precision promises: see `summation`."""
    return summation(tile, problem, splits) is not None


def summation(tile: Tile, problem: Problem, splits: int = 1) -> tuple[str, int] | None:
    """How the kernel adds up along K: `Sums` of mainloop.cuh, and the length of a block in tiles of K.

    This is the fastest way whose expected error is at most MARGIN times eager's; None if the tile has no such way.
    Divided sums are more accurate. cuBLAS divides K among thread blocks where that fills the device; the kernel's sums
    are divided into `splits`.
    """
    if problem.precision != "tf32x3":
        return "kRunning", 1
    if tile.small_warps:
        # a tree, the most accurate way: as many blocks as a block has steps (of 8 k, four to a tile)
        sixfold = multiplier(problem) == "Bf16x6"
        return "kBlockwise", 2 if sixfold else max(1, round(math.sqrt(problem.k / 128)))
    if multiplier(problem) == "Bf16x6":
        return None  # Bf16x6 needs registers for three sets of sums
    eager = problem.eager_error or expected_error(problem)
    share = problem.k / splits
    for way in BY_WGMMA if tile.splits_weight else BY_MMA:
        if tile.n <= way.columns and all(
            own <= MARGIN * most for own, most in zip(error_of(way, share), eager, strict=True)
        ):
            # with block = 0 a block has as many tiles as there are blocks
            return way.sums, way.block or max(1, round(math.sqrt(problem.tiles_k / splits)))
    return None


def expected_error(problem: Problem) -> Errors:
    """Eager's relative errors where they are not measured: from tables."""
    tiles = problem.batches * -(-problem.m // 128) * -(-problem.n // 128)
    fills = tiles / problem.multiprocessors
    return _at(_UNDIVIDED if fills >= 3.8 else _DIVIDED, problem.k)


def error_of(way: Way, k: float) -> Errors:
    """The errors of `way` for sums over `k` elements."""
    return _at(way.errors, k)


def _at(errors: Mapping[int, Errors], k: float) -> Errors:
    """Errors at `k`, interpolated between measured ones; outside their range, the nearest one's."""
    first, *_, last = errors
    k = min(max(k, first), last)
    above = next(known for known in errors if known >= k)
    below = max((known for known in errors if known <= k), default=above)
    part = 0.0 if above == below else math.log(k / below) / math.log(above / below)
    normal, uniform = (
        1e-8 * low * (high / low) ** part for low, high in zip(errors[below], errors[above], strict=True)
    )
    return normal, uniform


def fp16x3_chain(tile: Tile, problem: Problem) -> int | None:
    """How many steps of K tensor cores add up before float32 takes over; None if the error would exceed eager's.

    Tiles with `small_warps` add up these sums as a tree (Fp16x3Config). Error on an H200 as a multiple of cuBLAS's fp32
    error, for normal/uniform data:

        tiles of 128x128, K        512, 256      512, 1024     512, 4096     448, 2048     192, 3072     16, 16384
        1, as a tree               0.41/0.34     0.22/0.16     0.12/0.09     0.28/0.30     0.39/0.66     0.33/0.98
        2                          0.53/0.55     0.31/0.32     0.22/0.22     0.44/0.67     0.64/1.64     0.75/2.62
        4                          0.86/1.21     0.46/0.65     0.26/0.35     0.59/1.22     0.79/2.59     0.67/2.86

    cuBLAS divides long sums among thread blocks where its tiles leave multiprocessors idle, and then is more accurate.
    From K = 1024 on it did so for 16, 192, 300, 384 and 448 tiles of 128x128, but not for 256, 512 and 576. For 4 tiles
    and K = 16384 not even the tree is accurate enough (1.2).
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
