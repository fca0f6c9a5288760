"""How kernels multiply and add up, so that they are as accurate as torch's own: decided by measured errors.

Only 3xTF32 and scaled halves are at stake. TF32 and 16-bit products are added up in float32 by whatever tile.
"""

from __future__ import annotations

import math

from fxfuse.cuda.gemm_problem import Problem, Tile
from fxfuse.cuda.precision import MMA

LEAST_WGMMA_TF32X3_K = 128  # shorter sums are less accurate than eager's: see `_wgmma_sums`
MOST_BLOCKWISE_BY_WGMMA = 64  # columns of a tile: wider ones have no registers for more sums


def multiplier(problem: Problem) -> str:
    """The precision's struct in mma.cuh.

    Short sums need more than 3xTF32, and so do small outputs, which cuBLAS sums up as trees. Error as a multiple of
    eager's for normal and uniform data, on an H200 (outputs of 2048x4096 and 16x512, Sums as `summation` has them):

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
        return MMA[problem.precision]
    small = problem.m == 1 or -(-problem.m // 64) * -(-problem.n // 64) <= 32
    short = problem.k < 32 or (problem.m <= 16 and problem.k <= 256)
    return "Bf16x6" if small or short else "Tf32x3"


def is_accurate(tile: Tile, problem: Problem, splits: int = 1) -> bool:
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
    if multiplier(problem) == "Bf16x6":
        return False  # it needs registers for three sets of sums
    tiles = -(-problem.m // 128) * -(-problem.n // 128)
    fills = tiles / problem.multiprocessors
    if problem.k <= 256 or fills >= (1 if problem.k < 1024 else 3):
        return True
    share = problem.k / splits
    if 64 < problem.m <= 128 and tiles >= 64 and problem.k >= 8192:
        return share <= (4096 if tiles < 128 else 16384)
    return fills / math.ceil(fills) >= 0.9 and problem.k <= 4096


def summation(tile: Tile, problem: Problem, splits: int = 1) -> tuple[str, int]:
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
    if multiplier(problem) == "Bf16x6":
        return "kBlockwise", 2
    if tile.small_warps:  # as many blocks as steps (of 8 k, four to a tile) in a block
        return "kBlockwise", max(1, round(math.sqrt(problem.k / 128)))
    if problem.k <= 256:
        return "kStepwise", 1
    # Fewer tiles make cuBLAS more accurate: see `is_accurate`.
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


def fp16x3_chain(tile: Tile, problem: Problem) -> int | None:
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
