"""`fxfuse compile MODEL`: a model with its kernels as one file, which runs without a compiler (fxfuse.load)."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Sequence
from typing import Any

import torch

import fxfuse
from fxfuse.arguments import Inputs
from fxfuse.cli import model, terminal
from fxfuse.cuda import gpu

_ARCHITECTURES = """\
Kernels are for what is here, and measured on a GPU to be chosen. `--arch sm_80,sm_90` makes them for GPUs that are not
here instead: the model is on the CPU, nvcc compiles, no driver is needed. Nothing is measured then: each kernel is the
one that a model of the GPU expects to be the fastest. `--device cuda --arch sm_90` wants an sm_90 here, and measures.
The file is for GPUs alone, and for the CUDA version of torch here (of nvcc, where torch has none).
`fxfuse merge` makes one file of several."""


def add(commands: Any) -> None:
    """Adds the parsers of `compile` and `merge`."""
    parser = commands.add_parser(
        "compile", help="write a model with its kernels into one file, for fxfuse.load", description=__doc__,
        epilog=f"{model.HELP}\n\n{_ARCHITECTURES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    model.add_arguments(parser)
    parser.add_argument("--output", "-o", metavar="PATH", required=True, help="the file, as model.fxfuse")
    parser.add_argument(
        "--arch", metavar="NAME[,NAME]", action="append", default=[],
        help='what will run it: GPUs as "sm_80,sm_90", which need not be here, or CPUs as "x86-64-v3" (AVX2), '
        '"x86-64-v4" (AVX-512); by default what is here. See below',
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
    names = [name for listed in given.arch for name in listed.split(",")] or ["native"]
    is_cross = _is_for_absent(names, given.device)
    if is_cross:
        given.device = torch.device("cpu")
    subject = model.load(given)
    terminal.note(f"{subject.describe()}\nThe kernels that are new here are compiled, which takes seconds each.")
    options = model.options(given)
    if is_cross:  # kernels for this CPU are not wanted
        fast = fxfuse.optimize(subject.model, **options)
    else:
        with torch.no_grad():
            fast = fxfuse.optimize(subject.model, subject.args, kwargs=subject.kwargs, **options)
    saved = fxfuse.save(fast, given.output, _inputs(subject), weights=not given.no_weights, architectures=names)
    if given.json:
        calls = [str(entry) for entry in saved.entries]
        document = {"path": str(saved.path), "bytes": saved.bytes, "sha256": saved.sha256, "calls": calls}
        print(json.dumps({**document, "kernels": saved.kernels}, indent=1))
    else:
        print(f"{saved}\nsha256 {saved.sha256}\nfast = fxfuse.load({str(saved.path)!r})")
    return 0


def _is_for_absent(names: Sequence[str], device: torch.device | None) -> bool:
    """Whether kernels are for GPUs that are not here, or that are not to be used."""
    gpus = {name for name in names if name.startswith("sm_")}
    if device is None and torch.cuda.is_available():
        return bool(gpus - {gpu.architecture(torch.cuda.get_device_capability())})
    return bool(gpus) and (device is None or device.type == "cpu")


def _inputs(subject: model.Subject) -> Inputs:
    """The call's arguments: by name if some are keyword arguments, else by position."""
    if not subject.kwargs:
        return subject.args
    bound = inspect.signature(subject.model.forward).bind(*subject.args, **subject.kwargs)
    return dict(bound.arguments)


def _merge(given: argparse.Namespace) -> int:
    fxfuse.merge(given.output, *given.packages)
    print(f"{given.output}: {', '.join(given.packages)}")
    return 0
