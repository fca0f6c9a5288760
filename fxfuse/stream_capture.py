"""Calls that somebody captures as a CUDA graph: whether one is captured now, and memory that the graph goes on reading.

A capture records launches and runs none of them, so that nothing can be compiled, measured or waited for meanwhile.
Replays read memory at the addresses of the capture. Results and scratch come from the graph's own pool, and live as
long as the graph. Tensors that a program made before (masks, positions: program/constants.py) would be freed with the
program, so they are kept here.
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
    """Whether a call with these tensors is being captured."""
    return any(tensor.is_cuda for tensor in tensors) and gpu.is_capturing()


_for_good: Final[dict[int, torch.Tensor]] = {}
"""The tensors that other people's graphs read, by identity. Nobody says when such a graph is gone."""
_own = threading.local()


@contextlib.contextmanager
def replaying() -> Iterator[None]:
    """A context in which this thread's calls will be replayed as a CUDA graph, or are captured for that."""
    outer, _own.replayed = will_be_replayed(), True
    try:
        yield
    finally:
        _own.replayed = outer


def will_be_replayed() -> bool:
    """Whether this thread's call will be replayed: then the CPU's time for it does not matter."""
    return bool(getattr(_own, "replayed", False))


def keep(tensors: Iterable[torch.Tensor]) -> None:
    """Keeps tensors alive for the graph that is captured now: as long as the dictionary of `keeping`, else for good."""
    kept: dict[int, torch.Tensor] = getattr(_own, "kept", _for_good)
    kept.update((id(tensor), tensor) for tensor in tensors)


@contextlib.contextmanager
def keeping() -> Iterator[dict[int, torch.Tensor]]:
    """A context in which this thread captures a graph. Gives a dictionary of what the graph reads, for its owner."""
    kept: dict[int, torch.Tensor] = {}
    _own.kept = kept
    try:
        yield kept
    finally:
        del _own.kept
