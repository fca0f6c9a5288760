"""The pass that applies an epilogue to the result of a library: in place if the dtype does not change.

- `kernel`: the instantiation of kernels/pointwise.cuh with the widest vector access that the result's layout allows.
- `transposed_kernel`, `planes_kernel`: the same for a library's result in another layout.
- `max_pool_kernel`: the same with pooling.

Nothing here needs a GPU.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch

from fxfuse.cuda.codegen import CPP_TYPES
from fxfuse.cuda.kernel import Kernel
from fxfuse.layout import Layout
from fxfuse.pooling import MaxPool

HEADER = "pointwise.cuh"
TRANSPOSED_HEADER = "pointwise_transposed.cuh"
PLANES_HEADER = "pointwise_planes.cuh"
MAX_POOL_HEADER = "max_pool.cuh"
ACCESS = 16  # bytes of the widest vector access
PLANES_ROW_BYTES, PLANES_BYTES = 128, 32 << 10  # bytes that a block reads of each pixel, and most that it writes
MAX_SLICE = 2**30  # kMost in pointwise.cuh: elements that one launch writes


def kernel(layout: Layout, acc: torch.dtype, output: torch.dtype, alignment: int = ACCESS) -> Kernel:
    """The pass from a tensor of dtype `acc` to one of dtype `output`, which may be the same tensor.

    Args:
        layout: of the result and the operands, by `operands.plan_operands` (best with `layout.flatten`). The result's
            columns are contiguous. acc has the result's strides.
        alignment: largest power of two that divides both tensors' addresses, in bytes.

    The kernel's tensors are acc and the output.
    """
    vector, runs = _cut(layout, acc.itemsize, output.itemsize, alignment)
    batch, row, col = layout.sizes
    (batch_stride, row_stride, _), *_ = layout.strides
    return Kernel(
        name=f"pointwise {vector} x {str(acc).removeprefix('torch.')}",
        header=HEADER,
        type=f"Pointwise<{CPP_TYPES[acc]}, {{output}}, {{epilogue}}, {vector}, Runs::{runs}>",
        params=struct.pack("<5q", batch, row, col, batch_stride, row_stride),
    )


def transposed_kernel(
    layout: Layout, acc_strides: tuple[int, int], acc: torch.dtype, output: torch.dtype, alignment: int = ACCESS
) -> Kernel:
    """The transposing pass: `kernel` for an acc whose contiguous dimension is row, not col.

    Args:
        acc_strides: acc's strides along batch and col, in elements.
        alignment: largest power of two that divides acc's address, in bytes.
    """
    (batch, row, col), (acc_batch, acc_col) = layout.sizes, acc_strides
    size = acc.itemsize
    steps = (row, acc_batch if batch > 1 else 0, acc_col if col > 1 else 0)
    access = math.gcd(ACCESS, alignment, *(step * size for step in steps))
    rows, cols = 128 // size, 64 if access >= 4 else 32
    if row <= 16 and access < ACCESS:  # a filter's taps
        rows, cols = 16, 128
    return Kernel(
        name=f"transposed {rows}x{cols} {str(acc).removeprefix('torch.')}",
        header=TRANSPOSED_HEADER,
        type=f"PointwiseTransposed<{CPP_TYPES[acc]}, {{output}}, {{epilogue}}, {access}, {rows}, {cols}>",
        params=_transposed_params(layout, acc_strides),
    )


def planes_kernel(layout: Layout, acc_strides: tuple[int, int], acc: torch.dtype, output: torch.dtype) -> Kernel | None:
    """`transposed_kernel` for small planes without gaps between them, which it writes whole; None if it does not fit.

    Args:
        layout: of the result and all operands.
    """
    (batch, row, col), (acc_batch, acc_col) = layout.sizes, acc_strides
    (batch_stride, row_stride, _), *operands = layout.strides
    starts = math.gcd(row, acc_batch if batch > 1 else 0, acc_col) * acc.itemsize
    results = math.gcd(row * col, batch_stride if batch > 1 else 0) * output.itemsize
    written = PLANES_ROW_BYTES // acc.itemsize * col * output.itemsize
    along_cols = any(strides[2] for strides in operands)
    if starts % ACCESS or results % ACCESS or row_stride != col or written > PLANES_BYTES or along_cols:
        return None
    return Kernel(
        name=f"planes {str(acc).removeprefix('torch.')}",
        header=PLANES_HEADER,
        type=f"PointwisePlanes<{CPP_TYPES[acc]}, {{output}}, {{epilogue}}>",
        params=_transposed_params(layout, acc_strides),
    )


def _transposed_params(layout: Layout, acc_strides: tuple[int, int]) -> bytes:
    """The struct TransposedProblem of pointwise_transposed.cuh, packed."""
    return struct.pack("<7q", *layout.sizes, *acc_strides, *layout.strides[0][:2])


def transposed_pair(first: Kernel, second: Kernel) -> Kernel:
    """Two transposing passes with the same epilogue as one launch. Its tensors are the first's, then the second's.

    Their results must have the same number of columns, because the epilogue is compiled for its alignment.
    """
    return Kernel(
        name=f"{first.name} and {second.name}",
        header=TRANSPOSED_HEADER,
        type=f"TransposedPair<{first.type}, {second.type}>",
        params=first.params + second.params,
    )


def max_pool_kernel(
    shape: Sequence[int], channels_last: bool, pool: MaxPool, pooled_size: tuple[int, int], acc: torch.dtype,
    output: torch.dtype,
) -> Kernel:  # fmt: skip
    """The pass that applies the epilogue to a result of dtype `acc` and pools it into one of dtype `output`.

    Args:
        shape: acc's, (image, channel, height, width). acc is dense in NCHW or channels_last, and so is the output.
        pooled_size: height and width of the output.

    Operands are planned for acc's shape, as (image, channel, pixel) or (image, pixel, channel). The kernel's tensors
    are acc and the output.
    """
    images, channels, height, width = shape
    vector = math.gcd(ACCESS // max(acc.itemsize, output.itemsize), channels) if channels_last else 1
    layout = "true" if channels_last else "false"
    return Kernel(
        name=f"max_pool {pool.height}x{pool.width} {'nhwc' if channels_last else 'nchw'}",
        header=MAX_POOL_HEADER,
        type=f"MaxPool<{CPP_TYPES[acc]}, {{output}}, {{epilogue}}, {vector}, {pool.height}, {pool.width}, {layout}>",
        params=struct.pack("<10q", images, channels, height, width, *pooled_size, *pool[2:6]),
        in_place=False,  # outputs that are side by side read the same element of an operand
    )


def _cut(layout: Layout, acc_bytes: int, output_bytes: int, alignment: int) -> tuple[int, str]:
    """Elements of a run, which a thread computes, and how runs cut the result up: `Runs` of epilogue.cuh."""
    vector = ACCESS // output_bytes  # with more, each of a thread's two stores would fill half of every 32-byte sector
    while vector > 1 and min(vector * max(acc_bytes, output_bytes), ACCESS) > alignment:
        vector //= 2
    batch, row, col = layout.sizes
    if batch * row == 1:
        return vector, "kAligned"  # even if the size is a multiple of vector: the size changes with the batch
    in_rows = math.gcd(vector, _row_starts(layout))
    if in_rows < vector and _is_dense(layout):
        while vector > col:  # a run may touch at most two rows
            vector //= 2
        if vector > in_rows:
            return vector, "kStraddling"
    return in_rows, "kWhole" if col % in_rows == 0 else "kAligned"


def _row_starts(layout: Layout) -> int:
    """A number whose largest power-of-two divisor is that of all distances between rows' starts, in elements."""
    batch, row, _ = layout.sizes
    batch_stride, row_stride, _ = layout.strides[0]
    return (batch_stride if batch > 1 else 0) | (row_stride if row > 1 else 0)


def _is_dense(layout: Layout) -> bool:
    """Whether rows have no gaps between them, and slices of them start aligned (slice_sizes in pointwise.cuh)."""
    batch, row, col = layout.sizes
    batch_stride, row_stride, _ = layout.strides[0]
    if (row > 1 and row_stride != col) or (batch > 1 and batch_stride != row * col):
        return False
    size = batch * row * col
    return size <= MAX_SLICE or row * col * ACCESS <= MAX_SLICE or (batch == 1 and col * ACCESS <= MAX_SLICE)
