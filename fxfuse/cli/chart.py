"""A benchmark as a picture: one bar for each contestant. Needs matplotlib."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Final

import fxfuse
from fxfuse.benchmark import Benchmark, Timing
from fxfuse.errors import FxfuseError

_OWN, _PEER = "#2f7ed8", "#b8bec6"
_TITLE: Final = 90
"""Characters at which a title wraps."""


def speedup(found: Benchmark, timing: Timing) -> float | None:
    """How many times as fast as eager a contestant is, by medians; None if eager was not measured."""
    eager = next((other.median for other in found.timings if other.name == "eager"), None)
    return None if eager is None else eager / timing.median


def check(path: Path) -> None:
    """Raises FxfuseError if no chart could be drawn there, and says what helps."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise FxfuseError(f"a chart needs matplotlib ({error}): pip install matplotlib, or leave --png out") from error
    if path.suffix != ".png":
        raise FxfuseError(f"a chart is a PNG file, and {path} does not end in .png")
    if not path.absolute().parent.is_dir():
        raise FxfuseError(f"there is no folder {path.absolute().parent} for a chart")


def draw(found: Benchmark, title: str, path: Path) -> None:
    """Writes the medians as a PNG file. Raises FxfuseError where nothing can be written."""
    from matplotlib.figure import Figure  # and not pyplot, which would choose a window system

    names = [timing.name for timing in found.timings]
    times = [timing.median * 1e3 for timing in found.timings]
    figure = Figure(figsize=(8, 1.6 + 0.5 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(names, times, color=[_OWN if name == "fxfuse" else _PEER for name in names])
    ratios = [speedup(found, timing) for timing in found.timings]
    labels = [f"{time:.3f} ms" + ("" if ratio is None else f", {ratio:.2f}x")
              for time, ratio in zip(times, ratios, strict=True)]  # fmt: skip
    axes.bar_label(bars, labels, padding=4)
    axes.set_xlim(0, 1.3 * max(times))  # room for the longest bar's label
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"ms a call, median (and speed-up over eager); {found.device}, fxfuse {fxfuse.__version__}")
    axes.set_title("\n".join(textwrap.wrap(title, _TITLE)), fontsize="medium", loc="left")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise FxfuseError(f"the chart cannot be written: {error}") from error
