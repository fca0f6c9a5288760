"""Calls that somebody captures as a CUDA graph: whether one is captured now, and memory that the graph goes on reading.

A capture takes launches down and runs none of them, so that nothing can be compiled, measured or waited for meanwhile.
Replays read memory where it lay then. Results and scratch come from the graph's own pool, and live as long as it does;
what a program made before (masks, positions: program/constants.py) would go with the program, so it is kept here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch

from fxfuse.cuda import gpu


def is_underway() -> bool:
    """Whether the current stream is being captured."""
    return torch.cuda.is_initialized() and gpu.is_capturing()


def is_captured(tensors: Sequence[torch.Tensor]) -> bool:
    """The same, asked by a call of these tensors."""
    return any(tensor.is_cuda for tensor in tensors) and gpu.is_capturing()


_for_good: Final[dict[int, torch.Tensor]] = {}
"""By identity, what graphs of others read: nobody says when one of them is gone."""
_own = threading.local()


@contextlib.contextmanager
def replaying() -> Iterator[None]:
    """Inside, this thread's calls will be replayed as a CUDA graph, or are captured for that."""
    outer, _own.replayed = will_be_replayed(), True
    try:
        yield
    finally:
        _own.replayed = outer


def will_be_replayed() -> bool:
    """Whether this thread's call will be replayed: then the CPU's time for it does not matter."""
    return bool(getattr(_own, "replayed", False))


def keep(tensors: Iterable[torch.Tensor]) -> None:
    """Lets tensors outlive whoever has them, for the graph that is captured now: as long as the one of `keeping`, or
    for good."""
    kept: dict[int, torch.Tensor] = getattr(_own, "kept", _for_good)
    kept.update((id(tensor), tensor) for tensor in tensors)


@contextlib.contextmanager
def keeping() -> Iterator[dict[int, torch.Tensor]]:
    """Inside, this thread captures a graph whose owner keeps what it reads: the dictionary that is given."""
    kept: dict[int, torch.Tensor] = {}
    _own.kept = kept
    try:
        yield kept
    finally:
        del _own.kept
