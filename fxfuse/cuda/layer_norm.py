"""LayerNorm: how many threads share a row, and how much each of them holds (kernels/layer_norm.cuh).

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
"""Bytes that one instruction reads or writes."""
TOGETHER: Final = 64
"""Bytes next to each other, two of memory's sectors, that a row's threads read at once."""
HELD: Final = 48
"""Bytes of a row in a thread, where a warp suffices: rows of 96 times a power of two then leave no thread idle, and
registers are left for the next row."""
ELEMENTS, WHOLE_VECTORS = 24, 32
"""Elements of a row in a thread at most, and where all are read ACCESS bytes at a time: registers suffice."""
WARP, LANES = 32, 256
"""Threads that share a row without a barrier, and at most."""
MOST_ROWS: Final = 2**31 - 1


@dataclass(frozen=True)
class Problem:
    """Rows of x, normalised each by its own mean and variance."""

    rows: int
    columns: int
    x_stride: int
    """Distance between rows in elements; those of the result follow each other without gaps."""
    rows_per_batch: int
    eps: float
    element: torch.dtype
    """x's dtype."""
    x_alignment: int = ACCESS
    """Largest power of two, up to 16, that divides x's address in bytes."""


def candidates(problem: Problem) -> list[Kernel]:
    """The kernels that `problem` can be run by: one, or none. Their tensors are x and the output."""
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
    """Elements that a thread reads at once: as many as divide a row and the addresses of all rows allow."""
    size = problem.element.itemsize
    aligned = math.gcd(ACCESS, problem.x_alignment, problem.x_stride * size if problem.rows > 1 else 0)
    return math.gcd(aligned // size, problem.columns)


def _lanes(columns: int, vector: int, size: int) -> int:
    """Threads that share a row: the fewest that hold it and, as far as it goes, read TOGETHER bytes at a time."""
    least = min(TOGETHER // (vector * size), columns // vector)
    lanes = 1
    while lanes < WARP and (lanes < least or _held(columns, vector, lanes) * size > HELD):
        lanes *= 2
    while lanes < LANES and _held(columns, vector, lanes) > ELEMENTS:
        lanes *= 2
    return lanes


def _held(columns: int, vector: int, lanes: int) -> int:
    """Elements of a row in each of `lanes` threads."""
    return -(-columns // (lanes * vector)) * vector
