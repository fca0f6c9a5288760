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
ELEMENTS: Final = 32
"""Elements of a row that a thread holds at most."""
HELD: Final = 48
"""Elements of several rows: with operands as large and long epilogues, registers suffice."""
TOGETHER: Final = 64
"""Bytes next to each other, two of memory's sectors, that a row's threads read at once."""
WARP: Final = 32
LANES: Final = 256
"""Threads that share a row at most."""
MOST_COLUMNS: Final = ELEMENTS * LANES
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


def unsupported(problem: Problem) -> str | None:
    """Why no kernel runs it, or None."""
    if problem.columns > MOST_COLUMNS:
        return f"rows of {problem.columns} elements; kernels have at most {MOST_COLUMNS}"
    return f"{problem.rows} rows are too many" if problem.rows > MOST_ROWS else None


def candidates(problem: Problem) -> list[Kernel]:
    """The kernels that `problem` can be run by, best first; their tensors are x and the output.

    One row at a time has the fewest registers, two share what they read of the parameters.
    """
    if unsupported(problem) is not None:
        return []
    vector = _vector(problem)
    lanes = _lanes(problem.columns, vector, problem.element.itemsize)
    held = -(-problem.columns // (lanes * vector)) * vector
    return [_kernel(problem, lanes, vector, rows) for rows in ((1, 2) if lanes <= WARP and 2 * held <= HELD else (1,))]


def _vector(problem: Problem) -> int:
    """Elements that a thread reads at once: as many as divide a row and the addresses of all rows allow."""
    size = problem.element.itemsize
    aligned = math.gcd(ACCESS, problem.x_alignment, problem.x_stride * size if problem.rows > 1 else 0)
    return math.gcd(aligned // size, problem.columns)


def _lanes(columns: int, vector: int, size: int) -> int:
    """Threads that share a row: the fewest that hold it and, as far as it goes, read TOGETHER bytes at a time."""
    vectors = columns // vector
    least = min(TOGETHER // (vector * size), vectors)
    lanes = 1
    while lanes < LANES and (lanes < least or -(-vectors // lanes) * vector > ELEMENTS):
        lanes *= 2
    return lanes


def _kernel(problem: Problem, lanes: int, vector: int, rows: int) -> Kernel:
    element = str(problem.element).removeprefix("torch.")
    shape = f"{problem.columns}, {lanes}, {vector}, {rows}"
    return Kernel(
        name=f"layer_norm {lanes}x{vector} x {element}, {rows} row{'' if rows == 1 else 's'} at a time",
        header=HEADER,
        type=f"LayerNorm<{CPP_TYPES[problem.element]}, {{output}}, {{epilogue}}, {shape}>",
        params=struct.pack("<3qd", problem.rows, problem.rows_per_batch, problem.x_stride, problem.eps),
    )
