"""`fxfuse bench MODEL`: eager, torch.compile and fxfuse in one run, as a table, JSON and a chart."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any, Final

import fxfuse
from fxfuse.benchmark import Benchmark
from fxfuse.cli import chart, model, terminal

PEERS: Final = ("eager", "torch.compile", "max-autotune")


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "bench", help="time a model beside eager and torch.compile", description=__doc__, epilog=model.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    model.add_arguments(parser)
    parser.add_argument(
        "--compare", nargs="*", choices=PEERS, default=["eager", "torch.compile"], metavar="PEER",
        help=f"of {', '.join(PEERS)} (default: eager torch.compile)",
    )  # fmt: skip
    parser.add_argument("--seconds", type=_seconds, default=2.0, help="measuring time, all together (default: 2)")
    parser.add_argument("--json", action="store_true", help="the times as JSON, in seconds")
    parser.add_argument("--png", type=Path, metavar="PATH", help="draw a chart, too (needs matplotlib)")
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


def run(given: argparse.Namespace) -> int:
    """Measures and prints. Returns 1 if a peer could not run; fxfuse's own failure is raised."""
    if given.png is not None:
        chart.check(given.png)  # before anything is waited for
    subject = model.load(given)
    terminal.note(f"{subject.describe()}\nfxfuse compiles its kernels, and then each peer its own: up to minutes.")
    fast = fxfuse.optimize(subject.model, **model.options(given))  # its first calls compile, as those of its peers do
    found = fxfuse.benchmark(
        subject.model, fast, subject.args, given.compare, kwargs=subject.kwargs, seconds=given.seconds
    )
    if given.png is not None:
        chart.draw(found, subject.describe(), given.png)
    if given.json:
        print(json.dumps(_document(subject, found), indent=1))
    else:
        print(f"{subject.describe()}\n{found}" + (f"\ndrawn: {given.png}" if given.png is not None else ""))
    return 1 if found.failures else 0


def _document(subject: model.Subject, found: Benchmark) -> dict[str, Any]:
    """The results for JSON, times in seconds."""
    rows = [
        {**dataclasses.asdict(timing), "speedup_over_eager": chart.speedup(found, timing)} for timing in found.timings
    ]
    return {
        "model": subject.name,
        "call": subject.describe(),
        "device": found.device,
        "fxfuse": fxfuse.__version__,
        "timings": rows,
        "failures": found.failures,
    }
