"""The contents of a report, as data. text.py, notebook.py and page.py show them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn

from fxfuse.arguments import Inputs
from fxfuse.module import FusedModule

CHAIN: Final = "pointwise chain"
"""Stands for the anchor of a region that has none."""


@dataclass(frozen=True)
class RegionReport:
    """One region of the model."""

    node: str
    """The node that replaced the others, with the path of the submodule whose graph it is in."""
    anchor: str
    """"linear", "gated_linear" (two linears of one x), "matmul", "conv2d", "conv3d" or "layer_norm"; an operation of
    torch's library ("bmm"), if a pass follows it; or CHAIN."""
    nodes: tuple[str, ...]
    """Names of the nodes it replaced."""
    epilogue: str
    kernel: str | None
    """The kernel in use; None before the first call, and where torch runs the region."""
    fallback: str | None
    """Why torch ran it for some of the calls: "gradients are due", or a thing that no kernel can do. Else None."""
    measured: tuple[tuple[tuple[str, float], ...], ...] = ()
    """For each problem that was measured, the candidates' names and times in seconds."""
    error: float | None = None
    """The largest error of a chosen kernel, as a multiple of the error that eager's allows; None if not compared."""
    chain: bool = False
    """Whether it is pointwise work alone, after torch's library or without any anchor."""
    workspace: int = 0
    """Bytes of scratch memory that a call allocates beside its output, at most."""
    gains: tuple[tuple[float, float], ...] = ()
    """For each problem that was measured: the seconds of torch's library followed by one pass, and the seconds of the
    kernel in use."""
    moved: tuple[int, int] | None = None
    """Bytes that its latest call reads and writes, in eager and now: a prediction from shapes and dtypes alone. None
    before the first call, and where torch runs the region."""
    number: int = field(default=0, compare=False)
    """Unique in the process; not compared, since two traces of a module may have the same region."""


@dataclass(frozen=True)
class SkippedReport:
    """One node that was left as it was."""

    node: str
    reason: str


@dataclass(frozen=True)
class Operations:
    """The operations of a call without gradients, before and now."""

    before: int
    """Operations of the graphs as they were captured. Views, and questions about shapes, do not count."""
    kernels: int
    """Kernels of fxfuse that a call launches now. Where no program runs (yet), each region counts as one."""
    calls: tuple[tuple[str, int], ...]
    """torch's operators that a call runs beside these kernels, and how often; the most frequent first."""
    has_python: bool = False
    """Whether parts of the model run as Python. Nothing is known of their operations."""

    @property
    def after(self) -> int:
        """Kernels and calls."""
        return self.kernels + sum(count for _, count in self.calls)


@dataclass(frozen=True)
class Report:
    """What optimize() did to a model. str() is its short form, or all of it if it was made with verbose=True."""

    regions: tuple[RegionReport, ...]
    skipped: tuple[SkippedReport, ...]
    channels_last: tuple[str, ...] = ()
    """How many convolutions run in channels_last although the model's tensors are contiguous, and each
    conversion with the bytes it copies."""
    cuda_graphs: tuple[str, ...] = ()
    """For a model that is replayed as CUDA graphs: how many there are, and why calls ran without one."""
    dynamo: tuple[str, ...] = ()
    """What Dynamo captured because tracing stopped."""
    programs: tuple[str, ...] = ()
    """The programs (lists of launches) that calls without gradients run as, and why others do not."""
    training: tuple[str, ...] = ()
    """The graphs of forward and backward that calls with gradients run as, and why others do not."""
    operations: Operations = Operations(0, 0, ())
    verbose: bool = False
    """Whether str() gives the whole report."""
    graphs: tuple[tuple[str, FusedModule], ...] = field(default=(), repr=False, compare=False)
    """The graphs that the report is about, with their names; "" is the model's own."""
    model: nn.Module | None = field(default=None, repr=False, compare=False)
    """The model that the report is about."""

    def text(self, verbose: bool = False) -> str:
        """The report as text: a few lines, or all of it."""
        from fxfuse.report import text

        return text.everything(self) if verbose else text.short(self)

    def __str__(self) -> str:
        return self.text(self.verbose)

    def as_dict(self) -> dict[str, Any]:
        """The whole report, as dicts, lists, strings and numbers."""
        said = (one for one in dataclasses.fields(self) if one.compare and one.name != "verbose")
        return {one.name: _plain(getattr(self, one.name)) for one in said}

    def _repr_html_(self) -> str:
        """A compact table, for notebooks."""
        from fxfuse.report import notebook

        return notebook.html_of(self)

    def to_html(
        self, path: str | os.PathLike[str], inputs: Inputs | None = None, *, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Writes one HTML page that needs nothing else: the graph before and after, launches, regions, a roofline.

        Args:
            path: the file, which is overwritten.
            inputs: the arguments of a call, as `verify` takes them. If given, the model and its eager form are called
                with copies of them a few times, without gradients, and timed: kernel by kernel on a GPU, operator by
                operator on a CPU. The device's bandwidth and speed are measured, too, for the roofline.
            kwargs: keyword arguments of that call beside positional ones.

        Raises FxfuseError for inputs of another kind, OSError if the file cannot be written, and whatever the model
        raises when it is called.
        """
        from fxfuse.report import page

        page.write(self, path, inputs, kwargs)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value
