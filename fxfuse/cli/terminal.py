"""Text for people: colours where they are wanted, sizes and ages in words."""

from __future__ import annotations

import os
import sys
from typing import Final, TextIO

_COLOURS: Final = {"red": 31, "green": 32, "yellow": 33, "grey": 90}


def is_terminal(stream: TextIO | None) -> bool:
    """Whether the stream is a terminal, which somebody looks at."""
    return stream is not None and stream.isatty()


def painted(text: str, colour: str, stream: TextIO) -> str:
    """`text` in a colour, if the stream is a terminal with colours and NO_COLOR (no-color.org) is not set."""
    plain = not is_terminal(stream) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def note(text: str) -> None:
    """Says what the user waits for, if stderr is a terminal."""
    if is_terminal(sys.stderr):
        print(painted(text, "grey", sys.stderr), file=sys.stderr, flush=True)


def size(count: int) -> str:
    """A number of bytes: "512 B", "1.5 MB" (powers of 1024)."""
    number, units = float(count), ["B", "KB", "MB", "GB"]
    while number >= 1024 and len(units) > 1:
        number, units = number / 1024, units[1:]
    return f"{number:.1f} {units[0]}" if units[0] != "B" else f"{count} B"


def age(seconds: float) -> str:
    """How long ago: "5 s", "3 min", "2 h", "7 days"."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
