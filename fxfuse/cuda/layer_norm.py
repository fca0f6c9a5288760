"""LayerNorm kernels for a problem (kernels/layer_norm.cuh): how many threads share a row, and how much each one holds.

`candidates` turns a problem into instantiations of the template. Nothing here needs a GPU.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Final

import torch

from fxfuse.cuda.codegen import CPP_TYPES
from fxfuse.cuda.kernel import Kernel

HEADER: Final = "layer_norm.cuh"
ACCESS: Final = 16
"""Bytes of the widest vector access."""
TOGETHER: Final = 64
"""Contiguous bytes, two sectors, that the threads of a row read at once."""
HELD: Final = 48
"""Most bytes of a row that a thread holds while a warp or less shares the row. So rows of 96 times a power of two leave
no thread idle, and registers are left for the next row."""
ELEMENTS, WHOLE_VECTORS = 24, 32
"""Most elements of a row that a thread has registers for, and the same if every access is ACCESS bytes wide."""
WARP, LANES = 32, 256
"""Most threads that share a row without a barrier, and most that share a row at all."""
MOST_ROWS: Final = 2**31 - 1


@dataclass(frozen=True)
class Problem:
    """A LayerNorm: each row of x is normalised by its own mean and variance."""

    rows: int
    columns: int
    x_stride: int
    """Distance between rows of x in elements. The result's rows have no gaps between them."""
    rows_per_batch: int
    eps: float
    element: torch.dtype
    """x's dtype."""
    x_alignment: int = ACCESS
    """Largest power of two, up to 16, that divides x's address in bytes."""


def candidates(problem: Problem) -> list[Kernel]:
    """The kernel that can run `problem`, in a list; empty if its rows are too long or too many.

    The kernel's tensors are x and the output.
    """
    size, vector = problem.element.itemsize, _vector(problem)
    lanes = _lanes(problem.columns, vector, size)
    most = WHOLE_VECTORS if vector * size == ACCESS else ELEMENTS
    if _held(problem.columns, vector, lanes) > most or problem.rows > MOST_ROWS:
        return []
    return [
        Kernel(
            name=f"layer_norm, {lanes} x {vector} x {str(problem.element).removeprefix('torch.')}",
            header=HEADER,
            type=f"LayerNorm<{CPP_TYPES[problem.element]}, {{output}}, {{epilogue}}, "
            f"{problem.columns}, {lanes}, {vector}>",
            params=struct.pack("<3qd", problem.rows, problem.rows_per_batch, problem.x_stride, problem.eps),
        )
    ]


def _vector(problem: Problem) -> int:
    """Elements of a vector access: as many as divide a row and as the alignment of all rows allows."""
    size = problem.element.itemsize
    aligned = math.gcd(ACCESS, problem.x_alignment, problem.x_stride * size if problem.rows > 1 else 0)
    return math.gcd(aligned // size, problem.columns)


def _lanes(columns: int, vector: int, size: int) -> int:
    """Threads that share a row: the fewest that can hold it and read TOGETHER bytes at a time, if it is that long."""
    least = min(TOGETHER // (vector * size), columns // vector)
    lanes = 1
    while lanes < WARP and (lanes < least or _held(columns, vector, lanes) * size > HELD):
        lanes *= 2
    while lanes < LANES and _held(columns, vector, lanes) > ELEMENTS:
        lanes *= 2
    return lanes


def _held(columns: int, vector: int, lanes: int) -> int:
    """Elements of a row that each of `lanes` threads holds."""
    return -(-columns // (lanes * vector)) * vector
