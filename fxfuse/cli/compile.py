"""`fxfuse compile MODEL`: a model with its kernels as one file, which runs without a compiler (fxfuse.load)."""

from __future__ import annotations

import argparse
import inspect
import json
from typing import Any

import torch

import fxfuse
from fxfuse.arguments import Inputs
from fxfuse.cli import model, terminal


def add(commands: Any) -> None:
    """Adds the parsers of `compile` and `merge`."""
    parser = commands.add_parser(
        "compile", help="write a model with its kernels into one file, for fxfuse.load", description=__doc__,
        epilog=f"{model.HELP}\n\n`fxfuse merge` makes one file of those that several kinds of GPUs wrote.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    model.add_arguments(parser)
    parser.add_argument("--output", "-o", metavar="PATH", required=True, help="the file, as model.fxfuse")
    parser.add_argument(
        "--arch", metavar="NAME", action="append", default=[],
        help='instructions of the CPUs that will run it: "x86-64-v3" (AVX2), "x86-64-v4" (AVX-512); by default those '
        "of this one. Kernels for a GPU are those of the GPU at hand",
    )  # fmt: skip
    parser.add_argument("--no-weights", action="store_true", help="without parameters and buffers: load is given them")
    parser.add_argument("--json", action="store_true", help="what was written, as JSON")
    parser.set_defaults(run=_compile)

    merge = commands.add_parser(
        "merge", help="make one file of those that `compile` wrote on several kinds of machines",
        description="Makes one file of those that `fxfuse compile` wrote of one model on several kinds of machines.",
    )  # fmt: skip
    merge.add_argument("output", metavar="PATH", help="the file to write")
    merge.add_argument("packages", metavar="PACKAGE", nargs="+", help="a file of one kind of machine")
    merge.set_defaults(run=_merge)


def _compile(given: argparse.Namespace) -> int:
    subject = model.load(given)
    terminal.note(f"{subject.describe()}\nThe kernels that are new here are compiled, which takes seconds each.")
    with torch.no_grad():
        fast = fxfuse.optimize(subject.model, subject.args, kwargs=subject.kwargs, **model.options(given))
    saved = fxfuse.save(
        fast, given.output, _inputs(subject), weights=not given.no_weights, architectures=given.arch or ("native",)
    )
    if given.json:
        calls = [str(entry) for entry in saved.entries]
        document = {"path": str(saved.path), "bytes": saved.bytes, "sha256": saved.sha256, "calls": calls}
        print(json.dumps({**document, "kernels": saved.kernels}, indent=1))
    else:
        print(f"{saved}\nsha256 {saved.sha256}\nfast = fxfuse.load({str(saved.path)!r})")
    return 0


def _inputs(subject: model.Subject) -> Inputs:
    """The call's arguments, by name where some have one."""
    if not subject.kwargs:
        return subject.args
    bound = inspect.signature(subject.model.forward).bind(*subject.args, **subject.kwargs)
    return dict(bound.arguments)


def _merge(given: argparse.Namespace) -> int:
    fxfuse.merge(given.output, *given.packages)
    print(f"{given.output}: {', '.join(given.packages)}")
    return 0
