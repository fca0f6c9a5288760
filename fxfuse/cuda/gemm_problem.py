"""Matrix products as their kernels see them, and the tiles that kernels cut them into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fxfuse.cuda.precision import Precision, element_bytes

Layout = Literal["nk", "kn"]
XLayout = Literal["mk", "km"]
Errors = tuple[float, float]
"""Relative errors against float64, of normal and of uniform data."""

TILE_BYTES_OF_K = 128  # kTileBytesOfK in shared_tile.cuh
MAX_ACCESS = 16  # bytes that one cp.async moves
RESERVED_SHARED = 1024  # bytes that CUDA takes for each thread block
STAGED_BY_WARPS = 8 * 16 * 64 * 4  # at most, behind the stages: WgmmaTf32x3Gemm


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
    shared_memory_per_block: int | None = None
    """Bytes that a thread block may have; None: all of a multiprocessor's but what CUDA takes for each."""
    hopper: bool = False
    """Whether the device has the instructions that only Hopper has."""
    weights: int = 1
    """2: the epilogue takes a second product of x, with another weight that lies as the first does."""
    x_layout: XLayout = "mk"
    """"mk": rows of K elements. "km": rows of M elements, of float32, beside a weight in "kn": a weight's gradient."""
    batches: int = 1
    """Products of this size, whose rows of out follow each other; x and weight are `x_step` and `weight_step` apart."""
    x_step: int = 0
    weight_step: int = 0
    eager_error: Errors | None = None
    """What torch's own product errs by, which 3xTF32 may; None if nobody has measured it."""

    @property
    def most_shared(self) -> int:
        """Bytes of shared memory that a thread block may have."""
        known = self.shared_memory_per_block
        return self.shared_memory - RESERVED_SHARED if known is None else known

    @property
    def element_bytes(self) -> int:
        return element_bytes(self.precision)

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
            return self.batches * self.m * self.k
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
