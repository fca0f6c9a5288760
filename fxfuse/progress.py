"""Progress of work that takes seconds (capturing, compiling, measuring): events for callbacks, or else tqdm's bars.

    with fxfuse.on_progress(lambda event: print(event.stage, event.done, "of", event.total, event.label)):
        fast = fxfuse.optimize(model, (x,))

Without a callback, bars are drawn on stderr if that is a terminal or a notebook's (FXFUSE_PROGRESS=0: never). Without
tqdm one line says what is being waited for, once for each stage.

Steps are counted where a compiler is started or a measurement made, which takes a thousand times as long as counting. A
call whose plan is known counts nothing. Only the thread that calls a callback waits for it. A forked process counts
from zero and draws nothing.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from torch.utils.hooks import RemovableHandle

from fxfuse.locks import free_in_children

logger = logging.getLogger("fxfuse")

Stage: TypeAlias = Literal["capture", "compile", "measure", "compare"]


@dataclass(frozen=True)
class Progress:
    """How far one stage is, after a step began or ended."""

    stage: Stage
    """"capture": models, by torch's Dynamo or its trace of a training step. "compile": kernels, by a compiler.
    "measure": problems, whose candidates are timed on a GPU. "compare": contestants of `fxfuse.benchmark`, whose first
    calls may compile for minutes."""
    done: int
    total: int
    """Steps requested so far. The number grows while a model's first call finds more. The stage is over when `done`
    reaches `total`; steps requested later count from zero."""
    label: str
    """What the step is about, as "linear: relu(acc + o0)"; "" if that is not known yet."""


Callback: TypeAlias = Callable[[Progress], object]

_callbacks: Final[OrderedDict[int, Callback]] = OrderedDict()
_counts: Final[dict[Stage, list[int]]] = {stage: [0, 0] for stage in get_args(Stage)}
"""For each stage, the steps done and the steps requested."""
_events: Final[collections.deque[Progress]] = collections.deque()
_counting = free_in_children(threading.Lock())
_delivering = free_in_children(threading.Lock())
"""Held by the thread that delivers events. Other threads leave their events to it and do not wait."""


def on_progress(callback: Callback) -> RemovableHandle:
    """Calls `callback` with a `Progress` whenever a step of a stage begins or ends, such as compiling a kernel.

    It may be called in any thread, and never twice at once. It must not call optimised models. If it raises, it is
    removed, and the error is logged. While there is a callback, no bars are drawn.

    Returns a handle: `handle.remove()`, or leaving it as a context manager, ends it.
    """
    handle = RemovableHandle(_callbacks)
    _callbacks[handle.id] = callback
    return handle


def add(stage: Stage, label: str, *, total: int = 0, done: int = 0) -> None:
    """Counts steps that are requested, or done. `deliver` then tells callbacks."""
    with _counting:
        counts = _counts[stage]
        counts[1] += total
        counts[0] = min(counts[0] + done, counts[1])
        if not counts[1]:  # steps from before a fork
            return
        _events.append(Progress(stage, counts[0], counts[1], label))
        if counts[0] == counts[1]:
            counts[:] = 0, 0


def deliver() -> None:
    """Hands events to callbacks, in order, unless another thread is doing so."""
    while _events and _delivering.acquire(blocking=False):
        try:
            while _events:
                _deliver(_events.popleft())
        finally:
            _delivering.release()


@contextlib.contextmanager
def steps(stage: Stage, total: int, label: str = "") -> Iterator[Callable[[str], None]]:
    """A context for `total` steps, the first of which is `label`. Gives a function to call after each, with its label.

    Steps that were not made on leaving, as after an error, count as done.
    """
    left = total

    def step(label: str) -> None:
        nonlocal left
        left -= 1
        add(stage, label, done=1)
        deliver()

    if total:
        add(stage, label, total=total)
        deliver()
    try:
        yield step
    finally:
        if left:
            add(stage, "", done=left)
            deliver()


def _deliver(event: Progress) -> None:
    callbacks: list[tuple[int | None, Callback]] = [*_callbacks.items()]
    if callbacks:
        _bars.close()  # bars from before there was a callback
    for number, callback in callbacks or [(None, _bars.show)]:
        try:
            callback(event)
        except Exception:  # a display's failure must not be a build's
            logger.warning("fxfuse: %r failed and shows no more progress", callback, exc_info=True)
            if number is None:
                _bars.end()
            else:
                _callbacks.pop(number, None)


# ------------------------------------------------------------------------------------------------- bars

_TITLES: Final[dict[Stage, str]] = {stage: f"fxfuse {stage}s" for stage in get_args(Stage)}
_IN_WORDS: Final[dict[Stage, str]] = {
    "capture": "captures the model, which takes seconds",
    "compile": "compiles kernels, which takes seconds each",
    "measure": "measures which kernels are the fastest",
    "compare": "lets each contestant compile, which may take minutes",
}
_FORMAT: Final = "{desc} {n_fmt}/{total_fmt} |{bar:24}| {elapsed}{postfix}"  # no estimate of time: the total is unknown


class _Bars:
    """A bar of tqdm's for each stage that is not over."""

    def __init__(self) -> None:
        self._drawn: dict[Stage, Any] = {}
        self._told: set[Stage] = set()
        """The stages for which a line was printed, where there is no tqdm."""
        self._ended = False

    def show(self, event: Progress) -> None:
        bar = self._drawn.get(event.stage)
        if bar is None:
            if self._ended or event.done == event.total or event.stage in self._told or not _is_seen():
                return
            make = _tqdm()
            if make is None:
                self._told.add(event.stage)
                hint = "" if len(self._told) > 1 else " (pip install tqdm shows how far it is)"
                print(f"fxfuse {_IN_WORDS[event.stage]}{hint}", file=sys.stderr, flush=True)
                return
            bar = self._drawn[event.stage] = make(
                total=event.total, desc=_TITLES[event.stage], bar_format=_FORMAT, leave=False, dynamic_ncols=True
            )
        bar.n, bar.total = event.done, event.total
        bar.set_postfix_str(event.label, refresh=False)
        bar.refresh()
        if event.done == event.total:
            self._drawn.pop(event.stage).close()

    def close(self) -> None:
        """Removes the bars that are drawn."""
        while self._drawn:
            self._drawn.popitem()[1].close()

    def end(self) -> None:
        """Stops drawing. In a forked process, a lock of tqdm's might be held by a thread that does not exist there."""
        self._drawn.clear()
        self._ended = True


_bars: Final = _Bars()


def _is_seen() -> bool:
    """Whether somebody looks at stderr, on a terminal or in a notebook, and wants to see progress there."""
    if os.environ.get("FXFUSE_PROGRESS") == "0" or sys.stderr is None:
        return False
    return sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")


def _tqdm() -> Any:
    """tqdm's class for bars, if it is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None

    class Bar(tqdm):
        monitor_interval = 0  # without a thread that redraws bars

    return Bar


def _renew() -> None:
    """Resets everything in a forked process, which has none of the threads that were making steps."""
    _events.clear()
    for counts in _counts.values():
        counts[:] = 0, 0
    _bars.end()


os.register_at_fork(after_in_child=_renew)
