"""Kernels and measured choices that packages (deploy/) brought into this process, beside those of the cache.

Also notes the kernels and choices that a package needs while it is being saved.

A package's kernels are identified by what they compute, not by the machine that compiled them. Whether this machine
knows that machine's instructions is checked once, when the package is loaded.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from fxfuse.errors import MissingKernelError

if TYPE_CHECKING:
    from fxfuse.build import Source

kernels: Final[dict[str, Callable[..., None]]] = {}
"""The launch functions of kernels that packages brought, by build.portable_key."""
choices: Final[dict[str, Any]] = {}
"""The results that were measured where packages were saved, by the keys of tune.py and exactness.py."""
gpus: Final[list[tuple[str, int]]] = []
"""The GPUs on which they were measured. For other GPUs of the architecture, these choices are better than none."""


@dataclass
class Used:
    """The kernels and choices that calls needed since `noting` began."""

    sources: dict[str, Source] = field(default_factory=dict)
    """The sources of kernels, by build's keys."""
    choices: dict[str, Any] = field(default_factory=dict)


_noting: Final[list[Used]] = []


@contextlib.contextmanager
def noting() -> Iterator[Used]:
    """A context in which all kernels and choices that this process uses are noted."""
    used = Used()
    _noting.append(used)
    try:
        yield used
    finally:
        _noting[:] = [other for other in _noting if other is not used]


def note_kernel(key: str, source: Source) -> None:
    for used in _noting:
        used.sources[key] = source


def note_choice(key: str, value: Any) -> None:
    for used in _noting:
        used.choices[key] = value


# ---------------------------------------------------------------------------------- calls of loaded packages

_thread = threading.local()
_NO_CALL: Final[tuple[str | None, bool]] = None, False


class only:
    """A context in which this thread compiles nothing: a kernel that neither `package` nor the cache has is missing.

    A class, since every call enters one: a generator would take three times as long.
    """

    def __init__(self, package: str | None, unmeasured: bool = False) -> None:
        """
        Args:
            package: its name for messages; None to compile as usual.
            unmeasured: whether its kernels were chosen without measuring anything.
        """
        self._now = package, unmeasured

    def __enter__(self) -> None:
        self._outer = getattr(_thread, "call", _NO_CALL)
        _thread.call = self._now

    def __exit__(self, *_: object) -> None:
        _thread.call = self._outer


def this_call() -> tuple[str | None, bool]:
    """The arguments of `only` in this thread's call. A thread that works for this call enters only(*this_call())."""
    found: tuple[str | None, bool] = getattr(_thread, "call", _NO_CALL)
    return found


def is_alone() -> bool:
    """Whether this thread's call uses only kernels of a package and of the cache, and compiles nothing."""
    return this_call()[0] is not None


def is_unmeasured() -> bool:
    """Whether this thread's call is one of a package whose kernels were chosen without measuring anything."""
    return this_call()[1]


def check_may_build(label: str) -> None:
    """Raises MissingKernelError in a call of a package that compiles nothing."""
    package, _ = this_call()
    if package is not None:
        raise MissingKernelError(
            f"{package} has no kernel for {label}: save it again with a call like this among its examples, or load it "
            "with build=True where there is a compiler"
        )
