"""FXFUSE_DUMP=folder: writes everything that is built to files for people to read.

Each process makes a folder of its own in that folder, which only its user can read, and logs its path:

    run-20260131-120000-k3v9x2/
        kernels/linear-relu-acc-1f0c9d52.cpp    the source of each kernel, as it is compiled
        001-ResNet/
            before.py, after.py                 the graph's code as it was captured, and with fused regions
            map.txt                             line by line of the model: nodes, lines of both files, region, kernels
            program-1.txt                       what a call runs: kernels launched, calls of torch, and its code

This module decides where files go, and writes those of kernels; listing.py writes the others. Without the variable
nothing is written. A file that cannot be written is left out with a warning, and no call fails for it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

logger = logging.getLogger("fxfuse")

VARIABLE: Final = "FXFUSE_DUMP"
KERNELS: Final = "kernels"
_LONGEST_NAME: Final = 60
"""Characters of a label in a file's name."""


def is_on() -> bool:
    """Whether files are to be written."""
    return bool(os.environ.get(VARIABLE))


@functools.cache
def _folder(parent: str, process: int) -> Path:
    """This process's folder, private to its user. Raises OSError if none can be made."""
    base = Path(parent).expanduser()
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"run-{time.strftime('%Y%m%d-%H%M%S')}-", dir=base))
    logger.warning("fxfuse: %s: what is built is written to %s", VARIABLE, folder)
    return folder


_warned: Final[set[str]] = set()


def write(text: str, *names: str) -> None:
    """Writes a file in the process's folder, if files are to be written. `names` are the parts of its path there."""
    parent = os.environ.get(VARIABLE)
    if not parent:
        return
    try:
        path = _folder(parent, os.getpid()).joinpath(*names)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        if str(error) not in _warned:
            _warned.add(str(error))
            logger.warning("fxfuse: %s=%s: something is not written: %s", VARIABLE, parent, error)


_numbers: Final = itertools.count(1)


def new_name(what: str) -> str:
    """The name of a folder for a graph: "001-ResNet"."""
    return f"{next(_numbers):03}-{_plain(what)}"


def _plain(text: str) -> str:
    """The text as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text)[:_LONGEST_NAME].strip("-.") or "unnamed"


# ---------------------------------------------------------------------------------------------- kernels


def file_name(label: str, key: str, cuda: bool) -> str:
    """The name of a kernel's file."""
    return f"{_plain(label)}-{key[:8]}.{'cu' if cuda else 'cpp'}"


def kernel(text: str, label: str, key: str, cuda: bool, flags: Sequence[str]) -> None:
    """Writes the source of a kernel that is loaded, whether it is compiled now or comes from the cache.

    Args:
        label: what the kernel computes.
        key: a hash of what decides its machine code.
        flags: its compiler's flags.
    """
    if is_on():
        head = [label, f"compiled with {' '.join(flags)}", f"kept in the cache as {key}"]
        lines = [f"// {line}" for item in head for line in item.splitlines()]
        write("\n".join([*lines, "", text]), KERNELS, file_name(label, key, cuda))


# --------------------------------------------------------------------------------------- plans of regions

_rewriting: Final[dict[int, Callable[[], None]]] = {}
"""By region, the function that rewrites the files that name its kernels."""


def when_planned(regions: Sequence[int], rewrite: Callable[[], None]) -> None:
    """Lets `rewrite` be called whenever a plan for one of these regions is made."""
    if is_on():
        _rewriting.update(dict.fromkeys(regions, rewrite))


def plan_made(region: int) -> None:
    """Reports that a plan for a region was made."""
    rewrite = _rewriting.get(region)
    if rewrite is not None:
        rewrite()


def forget(regions: Sequence[int]) -> None:
    """Drops the entries of regions that no longer exist."""
    for region in regions:
        _rewriting.pop(region, None)
