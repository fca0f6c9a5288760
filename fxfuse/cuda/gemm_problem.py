"""A matrix product as its kernels see it (`Problem`), and the tiles that a kernel cuts its result into (`Tile`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fxfuse.cuda.precision import Precision, element_bytes

Layout = Literal["nk", "kn"]
XLayout = Literal["mk", "km"]
Errors = tuple[float, float]
"""Relative errors against float64, for normal and for uniform data."""

TILE_BYTES_OF_K = 128  # kTileBytesOfK in shared_tile.cuh
MAX_ACCESS = 16  # bytes that one cp.async moves
RESERVED_SHARED = 1024  # bytes that CUDA takes for each thread block
STAGED_BY_WARPS = 8 * 16 * 64 * 4  # bytes behind the stages for the warps' stores, at most: WgmmaTf32x3Gemm


@dataclass(frozen=True)
class Windows:
    """A convolution's windows as the rows of a matrix. A row holds the elements that an output pixel sees, channels
    fastest.

    Sides are (height, width), strides are in elements, channels are contiguous.
    """

    size: tuple[int, int]
    channels: int
    out_size: tuple[int, int]
    kernel: tuple[int, int]
    """As the rows of x, at most MOST_TAPS each."""
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    x_strides: tuple[int, int, int]
    """Strides of images, rows and columns."""

    def reach(self, pixels: int) -> int:
        """Upper bound of the distance in elements between first channels of any two of `pixels` consecutive windows."""
        images = 1 + -(-pixels // (self.out_size[0] * self.out_size[1]))
        image, row, col = self.x_strides
        return (images - 1) * image + self.size[0] * row + self.size[1] * col

    def elements(self, pixels: int) -> int:
        """Number of elements that the windows of all images' `pixels` output pixels read from memory."""
        seen = [
            min(size, out * min(stride, kernel))
            for size, out, stride, kernel in zip(self.size, self.out_size, self.stride, self.kernel, strict=True)
        ]
        return pixels // (self.out_size[0] * self.out_size[1]) * seen[0] * seen[1] * self.channels


@dataclass(frozen=True)
class Problem:
    """A matrix product, or `batches` of one size. Sizes and strides are in elements, alignments in bytes."""

    m: int
    n: int
    k: int
    precision: Precision
    """The arithmetic: see cuda/precision.py. x and the weight are fp16 or bf16 if it says so, else float32."""
    weight_layout: Layout
    """"nk": rows of K elements (nn.Linear). "kn": rows of N elements (matmul, addmm)."""
    x_stride: int
    weight_stride: int
    out_stride: int
    """x_stride, weight_stride, out_stride: distances between rows. Within a row elements are contiguous."""
    x_alignment: int = MAX_ACCESS
    weight_alignment: int = MAX_ACCESS
    """x_alignment, weight_alignment: powers of two, up to 16, that divide the address of the first element."""
    rows_per_batch: int = 0
    """Row m of out is row m % rows_per_batch of batch m // rows_per_batch; 0 means one batch."""
    windows: Windows | None = None
    """Set if the kernel gathers x. Then every pixel's channels are aligned to `x_alignment`, their size in bytes is a
    multiple of it, and `x_stride` means nothing."""
    weight_windows: Windows | None = None
    """Set if the kernel gathers the weight, whose rows are K windows: a gradient of filters. x is "km", and the same
    holds for `weight_alignment`, which is at least 4, and `weight_stride`. Of several products each has windows of its
    own channels."""
    multiprocessors: int = 108
    """Multiprocessors of the device. This default and the next one are the A100's."""
    shared_memory: int = 164 * 1024
    """Bytes per multiprocessor."""
    shared_memory_per_block: int | None = None
    """Bytes that a thread block may have. None: a multiprocessor's bytes, less those that CUDA takes for each block."""
    hopper: bool = False
    """Whether the device is a Hopper GPU (sm_90), and so has wgmma."""
    weights: int = 1
    """2 for a gated linear: the epilogue also takes x's product with a second weight of the first one's layout."""
    x_layout: XLayout = "mk"
    """"mk": rows of K elements. "km": rows of M elements (a weight's gradient); only with a "kn" weight."""
    batches: int = 1
    """Number of products. Their rows of out follow each other; x and weight are `x_step` and `weight_step` apart."""
    x_step: int = 0
    weight_step: int = 0
    eager_error: Errors | None = None
    """The error of torch's own product, which limits the error of 3xTF32; None if it was not measured."""

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
        """Number of elements of x that are read from memory."""
        return self.batches * self.m * self.k if self.windows is None else self.windows.elements(self.m)

    @property
    def weight_elements(self) -> int:
        """Number of elements of the weight that are read from memory."""
        of = self.weight_windows
        return self.batches * (self.n * self.k if of is None else of.elements(self.k))


@dataclass(frozen=True)
class Tile:
    """The part of out that a thread block computes, how its warps divide it, and its measured speed."""

    m: int
    n: int
    warps_m: int
    warps_n: int
    stages: int
    resident: int
    """Number of thread blocks for which a multiprocessor has registers."""
    alone: float
    """Speed of a multiprocessor with one such thread block, as a fraction of its speed with the best tile."""
    full: float
    """Speed of a multiprocessor with many such thread blocks, as the same fraction."""
    holds_k: bool = False
    """Whether every tile of K has a stage of its own."""
    wgmma: bool = False
    """Whether warpgroups of 64 rows multiply by Hopper's wgmma instructions (mainloop_wgmma.cuh)."""
    split_stages: int = 0
    """Additional stages for the two parts of the split weight (kSplitStages in mainloop_wgmma_tf32x3.cuh)."""

    @property
    def goes_on(self) -> bool:
        """Whether the kernel is WgmmaGemm, whose persistent thread blocks compute one tile after another.

        Two thread blocks that share a multiprocessor hide stores as well with one tile each, in fewer registers.
        (WgmmaTf32x3Gemm, for `splits_weight`, is persistent in any case.)
        """
        return self.wgmma and self.resident != 2 and not self.splits_weight

    @property
    def splits_weight(self) -> bool:
        """Whether thread blocks split the weight for 3xTF32 in shared memory (WgmmaTf32x3Gemm)."""
        return self.split_stages > 0

    @property
    def small_warps(self) -> bool:
        """Whether a warp's accumulators leave enough registers to add up sums as a tree."""
        return self.m // self.warps_m * (self.n // self.warps_n) <= 32 * 32

    def speed(self, together: int) -> float:
        """Speed with `together` thread blocks on a multiprocessor. Each one more closes 41 % of the gap to `full`."""
        return self.full - (self.full - self.alone) * 0.59 ** (together - 1)

    @property
    def shared_bytes(self) -> int:
        loop = (self.stages * (self.m + self.n) + self.split_stages * 2 * self.n) * TILE_BYTES_OF_K
        if self.splits_weight:
            loop += STAGED_BY_WARPS + 128  # and barriers
        staging = self.m * (self.n + 8) * 4  # kStagingBytes in gemm.cuh
        return max(loop, staging)
