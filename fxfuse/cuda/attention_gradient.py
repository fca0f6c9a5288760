"""The kernel for gradients of attention (kernels/attention_gradient.cuh), for queries, keys and values of equal heads.

torch's memory-efficient attention, which it takes in float32, uses no tensor cores there.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Final

from fxfuse.cuda import attention
from fxfuse.cuda.attention import (
    ACCESS,
    FLASH,
    MAX_GRID_YZ,
    MMA_ROWS,
    MOST_KEYS,
    MOST_WARPS,
    Strides,
    fits_by_tiles,
    mask_of,
    mma_of,
)
from fxfuse.cuda.kernel import Kernel

HEADER: Final = "attention_gradient.cuh"
MOST_WIDTH: Final = 128
"""Most channels for which a thread has registers."""


@dataclass(frozen=True)
class Problem:
    """The gradients of an attention's q, k, v and mask. Channels are contiguous in all tensors."""

    forward: attention.Problem
    """The attention. Its out and its q, k and v are read."""
    dout: Strides
    dq: Strides
    dk: Strides
    dv: Strides
    logs: tuple[int, int]
    """Strides of batch and head of the logarithms (natural) of the sums that the softmax divides by, one a query."""
    dmask: Strides | None = None
    """None if the mask's gradient is not asked for. That has an element for each query and key, and 1 as its stride
    along keys."""
    alignment: int = ACCESS
    """Largest power of two, up to 16, that divides the addresses of out and dout in bytes."""


def candidates(problem: Problem) -> list[Kernel]:
    """The kernels that can run `problem`, best first; none where heads of queries share keys.

    Their tensors are q, k, v, out, the logarithms, dout, the mask if there is one, dq, dk, dv, dmask if it is asked
    for, and a workspace.
    """
    forward = problem.forward
    width, size = forward.width, forward.element.itemsize
    read = (forward.q, forward.k, forward.v, forward.out, problem.dout)
    moves = math.gcd(*(stride * size for strides in read for stride in strides), problem.alignment, forward.alignment)
    if moves < ACCESS or any(stride % 2 for made in (problem.dq, problem.dk, problem.dv) for stride in made):
        return []
    sizes = (forward.batch, forward.key_heads, forward.keys, forward.queries)
    if forward.group > 1 or min(sizes) < 1 or max(sizes[:2]) > MAX_GRID_YZ or max(sizes[2:]) > MOST_KEYS:
        return []
    if width % 8 or width * size % ACCESS or width > MOST_WIDTH:
        return []
    if forward.mask is None and size == 2 and forward.keys > FLASH:
        return []
    most_rows = max(forward.queries, forward.keys)
    if forward.is_causal and not fits_by_tiles(forward.batch * forward.key_heads, most_rows):
        return []
    warps = min(MOST_WARPS, -(-most_rows // MMA_ROWS))
    learned, (tile, blocks) = str(problem.dmask is not None).lower(), _shape(width, size)
    element = str(forward.element).removeprefix("torch.")
    numbers = f"{width}, {tile}, {warps}, {learned}, {blocks}"
    return [
        Kernel(
            name=f"gradients of attention {element} {width}, {'causal, ' * forward.is_causal}{MMA_ROWS * warps} rows",
            header=HEADER,
            type=f"AttentionGradient<{mma_of(forward)}, {mask_of(forward)}, {numbers}, {{output}}, {{epilogue}}>",
            params=_params(problem),
            workspace=forward.batch * forward.key_heads * forward.queries * 4,
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
    forward = problem.forward
    tensors = (
        forward.q, forward.k, forward.v, forward.out, problem.dout, problem.dq, problem.dk, problem.dv
    )  # fmt: skip
    return struct.pack(
        "<37qd",
        forward.batch,
        forward.key_heads,
        forward.queries,
        forward.keys,
        *problem.logs,
        *(stride for strides in tensors for stride in strides),
        *forward.mask_strides[:3],
        *(problem.dmask or (0, 0, 0)),
        forward.mask_strides[3],
        forward.scale,
    )
