"""`fxfuse explain MODEL`: what is fused into what, which kernels run, and what was left alone and why."""

from __future__ import annotations

import argparse
import json
from typing import Any, Final

import torch

import fxfuse
from fxfuse.cli import model, terminal

CALLS: Final = 4
"""Calls before the report. From the third of a kind on they run as a program, which is in the report, too."""


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "explain", help="what fxfuse makes of a model, and why", description=__doc__, epilog=model.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    model.add_arguments(parser)
    parser.add_argument("--verbose", action="store_true", help="every region and every node that was left alone")
    parser.add_argument("--html", metavar="PATH", help="write a page with graphs, times and a roofline, too")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Prints the report on a model that was called a few times."""
    subject = model.load(given)
    terminal.note(f"{subject.describe()}\nThe kernels that are new here are compiled, which takes seconds each.")
    with torch.no_grad():
        fast = fxfuse.optimize(subject.model, subject.args, kwargs=subject.kwargs, **model.options(given))
        for _ in range(CALLS):
            fast(*subject.args, **subject.kwargs)
    report = fxfuse.explain(fast, verbose=given.verbose)
    if given.json:
        print(json.dumps({"model": subject.name, **report.as_dict()}, indent=1))
    else:
        print(f"{subject.describe()}\n{report}")
    if given.html is not None:
        report.to_html(given.html, subject.args, kwargs=subject.kwargs)
        terminal.note(f"written: {given.html}")
    return 0
