"""What packages brought into this process (deploy/): kernels and measured choices, beside the cache's; and what a
package that is being saved will have to bring.

Kernels of a package are known by what they compute, not by the machine that compiled them: whether its instructions are
known here is asked once, when the package is loaded.
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
"""By build.portable_key: the launch functions of kernels that packages brought."""
choices: Final[dict[str, Any]] = {}
"""By tune's and exactness' keys: what was measured where packages were saved."""
gpus: Final[list[tuple[str, int]]] = []
"""The GPUs on which that was: for others of the architecture, their choices are better than none."""


@dataclass
class Used:
    """What calls needed since somebody began to note it."""

    sources: dict[str, Source] = field(default_factory=dict)
    """By build's keys."""
    choices: dict[str, Any] = field(default_factory=dict)


_noting: Final[list[Used]] = []


@contextlib.contextmanager
def noting() -> Iterator[Used]:
    """Inside, kernels and choices that anybody in this process uses are noted."""
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
    """Inside, in this thread, nothing is compiled: a kernel that neither `package` nor the cache has is missing.

    A class, since every call enters one: a generator would take three times as long.
    """

    def __init__(self, package: str | None, unmeasured: bool = False) -> None:
        """
        Args:
            package: its name for messages; None to compile as ever.
            unmeasured: whether its kernels were chosen without measuring anything.
        """
        self._now = package, unmeasured

    def __enter__(self) -> None:
        self._outer = getattr(_thread, "call", _NO_CALL)
        _thread.call = self._now

    def __exit__(self, *_: object) -> None:
        _thread.call = self._outer


def this_call() -> tuple[str | None, bool]:
    """What `only` was given for this thread's call: a thread that works for it enters only(*this_call())."""
    found: tuple[str | None, bool] = getattr(_thread, "call", _NO_CALL)
    return found


def is_alone() -> bool:
    """Whether this thread's call takes what a package and the cache have, and nothing is compiled."""
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
