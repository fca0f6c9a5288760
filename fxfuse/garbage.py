"""Pauses Python's garbage collector while graphs are made.

A graph has thousands of nodes, which live as long as the model. The collector would look at them again and again, an
eighth of the time in which a large network's training step is traced and lowered.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

from fxfuse.locks import free_in_children

_lock = free_in_children(threading.Lock())
_pauses = 0
"""How many blocks of `uncollected` run now, in all threads."""
_resumes = False
"""Whether the last of them switches the collector on again: the first one found it on."""


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """A context in which the garbage collector does not run by itself. Also a decorator."""
    global _pauses, _resumes
    with _lock:
        if _pauses == 0:
            _resumes = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _resumes:
                gc.enable()
