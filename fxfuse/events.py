"""Notes what plans do while a program is recorded (program/): which kernels they launch, which memory they allocate."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch


@dataclass(frozen=True)
class Launch:
    """One kernel that was launched."""

    function: Callable[..., None]
    """The kernel's binding (build.Launch)."""
    params: bytes
    addresses: tuple[int, ...]
    together: int = 1
    """Most such problems that one launch of the kernel may run (cuda/kernel.py)."""
    in_place: bool = True
    """Whether the result may lie in an operand's memory (cuda/kernel.py)."""


@dataclass
class Events:
    """What one thread's plans did, in order."""

    launches: list[Launch] = field(default_factory=list)
    memory: list[torch.Tensor] = field(default_factory=list)
    """Tensors that were allocated for results and scratch. They are kept, so that no address is allocated twice."""


recording: Final[dict[int, Events]] = {}
"""Events by thread. Empty unless a program is being recorded, so that a check costs nothing."""


@contextlib.contextmanager
def recorded() -> Iterator[Events]:
    """Inside, notes what plans of this thread do."""
    events = recording[threading.get_ident()] = Events()
    try:
        yield events
    finally:
        del recording[threading.get_ident()]


def note_launch(
    function: Callable[..., None], params: bytes, addresses: Sequence[int], together: int = 1, in_place: bool = True
) -> None:  # fmt: skip
    """Notes that `function` is launched with `params` on `addresses`."""
    events = recording.get(threading.get_ident())
    if events is not None:
        events.launches.append(Launch(function, params, tuple(addresses), together, in_place))


def note_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Notes that `tensor` was allocated; returns it."""
    events = recording.get(threading.get_ident())
    if events is not None:
        events.memory.append(tensor)
    return tensor


def noting(function: Any) -> Any:
    """Wraps `function`, which allocates tensors, so that each is noted."""

    def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = function(*args, **kwargs)
        return note_memory(tensor) if recording else tensor

    return allocate
