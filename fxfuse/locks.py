"""Locks that are free in a forked process, whichever thread holds them in the process that forks."""

from __future__ import annotations

import os
from typing import Any, TypeVar

L = TypeVar("L")


def free_in_children(lock: L) -> L:
    """Returns `lock` (a threading.Lock or RLock). In a child its holder does not exist, and would never release it."""
    renewed: Any = lock  # the standard library's own method for this is not documented
    os.register_at_fork(after_in_child=renewed._at_fork_reinit)
    return lock
