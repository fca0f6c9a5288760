"""The kernel for gradients of attention (kernels/attention_gradient.cuh), for queries, keys and values of equal heads.

torch's memory-efficient attention, which it takes in float32, uses no tensor cores there.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Final

import torch

from fxfuse.cuda.attention import (
    ACCESS,
    FLASH,
    MAX_GRID_YZ,
    MMA_ROWS,
    MOST_KEYS,
    MOST_WARPS,
    Strides,
    fits_by_tiles,
)
from fxfuse.cuda.codegen import CPP_TYPES
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.precision import MMA

HEADER: Final = "attention_gradient.cuh"
MOST_WIDTH: Final = 128
"""Most channels for which a thread has registers."""


@dataclass(frozen=True)
class Problem:
    """The gradients of out[b, h, l] = softmax(q[b, h, l] . k[b, h] * scale + mask[b, h, l]) . v[b, h] for query l.

    Channels are contiguous in all tensors. They have the same heads.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    """Channels of keys, and of values."""
    element: torch.dtype
    q: Strides
    k: Strides
    v: Strides
    out: Strides
    dout: Strides
    dq: Strides
    dk: Strides
    dv: Strides
    logs: tuple[int, int]
    """Strides of batch and head of the logarithms (natural) of the sums that the softmax divides by, one a query."""
    mask: torch.dtype | None = None
    mask_strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Strides of batch, head, query and key; 0 where the mask broadcasts."""
    dmask: Strides | None = None
    """None if the mask's gradient is not asked for. That has an element for each query and key, and 1 as its stride
    along keys."""
    is_causal: bool = False
    """Whether query l sees the keys up to l alone. There is no mask then."""
    scale: float = 1.0
    alignment: int = ACCESS
    """Largest power of two, up to 16, that divides the addresses of q, k, v, out and dout in bytes."""


def candidates(problem: Problem) -> list[Kernel]:
    """The kernels that can run `problem`, best first.

    Their tensors are q, k, v, out, the logarithms, dout, the mask if there is one, dq, dk, dv, dmask if it is asked
    for, and a workspace.
    """
    width, size = problem.width, problem.element.itemsize
    read = (problem.q, problem.k, problem.v, problem.out, problem.dout)
    moves = math.gcd(*(stride * size for strides in read for stride in strides), problem.alignment, ACCESS)
    if moves < ACCESS or any(stride % 2 for made in (problem.dq, problem.dk, problem.dv) for stride in made):
        return []
    sizes = (problem.batch, problem.heads, problem.keys, problem.queries)
    if min(sizes) < 1 or max(sizes[:2]) > MAX_GRID_YZ or max(sizes[2:]) > MOST_KEYS:
        return []
    if width % 8 or width * size % ACCESS or width > MOST_WIDTH:
        return []
    if problem.mask is None and size == 2 and problem.keys > FLASH:
        return []
    if problem.is_causal and not fits_by_tiles(problem.batch * problem.heads, max(problem.queries, problem.keys)):
        return []
    warps = min(MOST_WARPS, -(-max(problem.queries, problem.keys) // MMA_ROWS))
    mma = MMA["tf32x3" if problem.element == torch.float32 else "fp16" if problem.element == torch.float16 else "bf16"]
    mask = "CausalMask" if problem.is_causal else "NoMask" if problem.mask is None else CPP_TYPES[problem.mask]
    learned, (tile, blocks) = str(problem.dmask is not None).lower(), _shape(width, size)
    element = str(problem.element).removeprefix("torch.")
    numbers = f"{width}, {tile}, {warps}, {learned}, {blocks}"
    return [
        Kernel(
            name=f"gradients of attention {element} {width}, {'causal, ' * problem.is_causal}{MMA_ROWS * warps} rows",
            header=HEADER,
            type=f"AttentionGradient<{mma}, {mask}, {numbers}, {{output}}, {{epilogue}}>",
            params=_params(problem),
            workspace=problem.batch * problem.heads * problem.queries * 4,
        )
    ]


def _shape(width: int, size: int) -> tuple[int, int]:
    """The rows of a tile that blocks read, keys or queries, and how many blocks share a multiprocessor's registers."""
    if width <= 32:
        return 32, 4
    if width <= 64:
        return 32, 3 if size == 2 else 2
    return 32 if size == 2 else 16, 2


def _params(problem: Problem) -> bytes:
    """The struct AttentionGradientProblem of attention_gradient.cuh, packed."""
    tensors = (
        problem.q, problem.k, problem.v, problem.out, problem.dout, problem.dq, problem.dk, problem.dv
    )  # fmt: skip
    return struct.pack(
        "<37qd",
        problem.batch,
        problem.heads,
        problem.queries,
        problem.keys,
        *problem.logs,
        *(stride for strides in tensors for stride in strides),
        *problem.mask_strides[:3],
        *(problem.dmask or (0, 0, 0)),
        problem.mask_strides[3],
        problem.scale,
    )
