"""`fxfuse cache`: the compiled kernels that are kept on disk."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from fxfuse import cache
from fxfuse.cli import terminal


def add(commands: Any) -> None:
    """Adds the command's parser, and those of its actions."""
    parser = commands.add_parser(
        "cache", help="list, size, verify, prune or clear the kept kernels", description=__doc__,
        epilog="The cache is in FXFUSE_CACHE_DIR, else in the user's cache folder. What it lost is compiled again when "
        "it is needed.",
    )  # fmt: skip
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = actions.add_parser(name, help=text, description=f"{text.capitalize()}.")
        made.add_argument("--json", action="store_true", help="the same as JSON, in bytes and seconds")
        made.set_defaults(run=run)
        return made

    action("list", _list, "name each kernel, last used first")
    action("size", _size, "say where the cache is, how large, and whether it can be used")
    action("verify", _verify, "check each kernel's digest; exit code 1 if one would not be loaded but compiled again")
    prune = action("prune", _prune, "remove kernels beyond a limit, used longest ago, and what killed processes left")
    prune.add_argument(
        "--limit", type=_bytes, help="bytes of kernels to keep: 500M, 2G (default: FXFUSE_CACHE_LIMIT, else 2G)"
    )
    action("clear", _clear, "remove all kernels and measured choices")


def _bytes(text: str) -> int:
    try:
        return cache.parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _say(given: argparse.Namespace, document: Any, text: str) -> None:
    print(json.dumps(document, indent=1) if given.json else text)


def _list(given: argparse.Namespace) -> int:
    now = time.time()
    entries = cache.entries()
    rows = [("size", "used", f"{'folder':41}", "computes")]
    rows += [(terminal.size(entry.bytes), f"{terminal.age(now - entry.used)} ago", entry.path.name, entry.label)
             for entry in entries]  # fmt: skip
    table = "\n".join(f"{size:>9}  {used:>12}  {folder}  {label}" for size, used, folder, label in rows)
    document = [{"path": str(entry.path), "label": entry.label, "bytes": entry.bytes, "used": entry.used}
                for entry in entries]  # fmt: skip
    _say(given, document, table if entries else f"no kernels in {cache.directory()}")
    return 0


def _size(given: argparse.Namespace) -> int:
    status = cache.status()
    usable = status.problem or ("" if status.writable else "it is not writable; processes build in temporary folders")
    text = (
        f"{status.directory}: {status.kernels} kernels and {status.choices} measured choices, "
        f"{terminal.size(status.bytes)} (the last used {terminal.size(status.limit)} of kernels are kept)"
    )
    document = {**vars(status), "directory": str(status.directory)}
    _say(given, document, text + (f"\nnot used as it is: {usable}" if usable else ""))
    return 1 if status.problem else 0


def _verify(given: argparse.Namespace) -> int:
    count = len(cache.entries())
    bad = cache.verify()
    lines = [f"{path}: {reason}" for path, reason in bad.items()]
    verdict = f"{count - len(bad)} of {count} kernels are as they were stored"
    if bad:
        verdict += "; the others are compiled again when they are needed. `fxfuse cache clear` removes all"
    document = {"kernels": count, "bad": {str(path): reason for path, reason in bad.items()}}
    _say(given, document, "\n".join([*lines, verdict]))
    return 1 if bad else 0


def _prune(given: argparse.Namespace) -> int:
    return _freed(given, cache.prune(given.limit))


def _clear(given: argparse.Namespace) -> int:
    freed = cache.clear()
    left = cache.entries()
    for entry in left:
        print(f"fxfuse: {entry.path} could not be removed", file=sys.stderr)
    return _freed(given, freed) or bool(left)


def _freed(given: argparse.Namespace, count: int) -> int:
    _say(given, {"freed": count}, f"{terminal.size(count)} freed in {cache.directory()}")
    return 0
