"""explain(): what was fused into what, what was not and why, and which kernels run."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tabulate import tabulate
from torch import fx

from fxfuse import plans
from fxfuse.errors import FxfuseError
from fxfuse.optimize import FusedModule, FusedRegion, state_of

CHAIN: Final = "pointwise chain"
"""Instead of an anchor, where there is none."""

_COLUMN: int = 60
"""Characters at which long cells of the table wrap."""


@dataclass(frozen=True)
class RegionReport:
    """One region of the model."""

    node: str
    """The node that replaced the others, with the path of the submodule whose graph it is in."""
    anchor: str
    """"linear", "gated_linear" (two linears of one x), "matmul", "conv2d" or "layer_norm"; what torch's library
    computes ("bmm"), if a pass follows it; or CHAIN."""
    nodes: tuple[str, ...]
    """Names of the nodes it replaced."""
    epilogue: str
    kernel: str | None
    """The kernel in use; None before the first call, and where torch runs the region."""
    fallback: str | None
    """Why torch runs it for some tensors it was called with, if it does."""
    measured: tuple[tuple[tuple[str, float], ...], ...] = ()
    """For each problem that was measured, the candidates' names and times in seconds."""
    chain: bool = False
    """Whether it is pointwise work alone, after torch's library or without any anchor."""
    workspace: int = 0
    """Bytes of scratch memory that a call allocates beside its output, at most."""


@dataclass(frozen=True)
class SkippedReport:
    """One node that was left as it was."""

    node: str
    reason: str


@dataclass(frozen=True)
class Report:
    """What optimize() did to a model; str() is a table."""

    regions: tuple[RegionReport, ...]
    skipped: tuple[SkippedReport, ...]
    channels_last: tuple[str, ...] = ()
    """Which convolutions run in channels_last on a GPU although the model's tensors are contiguous."""
    cuda_graphs: tuple[str, ...] = ()
    """For a model that is replayed as CUDA graphs: how many there are, and why calls ran without one."""

    def __str__(self) -> str:
        def wrap(text: str) -> str:
            return "\n".join(textwrap.wrap(text, _COLUMN)) or "-"

        fused = [
            (
                region.anchor,
                wrap(", ".join(region.nodes)),
                wrap(region.epilogue),
                wrap(_how(region)),
            )
            for region in self.regions
        ]
        parts = [f"{len(self.regions)} region{'' if len(self.regions) == 1 else 's'} fused"]
        if fused:
            headers = ("anchor", "replaces", "epilogue", "kernel")
            parts.append(tabulate(fused, headers=headers, tablefmt="simple_outline"))
        parts += self.channels_last
        parts += self.cuda_graphs
        if self.skipped:
            parts.append(f"{len(self.skipped)} not fused")
            rows = [(item.node, wrap(item.reason)) for item in self.skipped]
            parts.append(tabulate(rows, headers=("node", "reason"), tablefmt="simple_outline"))
        return "\n".join(parts)


def _how(region: RegionReport) -> str:
    ways = [region.kernel] if region.kernel else []
    for contest in region.measured:
        ranked = sorted(contest, key=lambda item: item[1])
        times = ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in ranked)
        ways.append(f"measured: {times}")
    if region.workspace:
        ways.append(f"scratch memory {region.workspace / 2**20:.1f} MB")
    if region.fallback:
        ways.append(f"torch: {region.fallback}")
    return "; ".join(ways) or "(not called yet)"


def explain(fast: fx.GraphModule) -> Report:
    """The report on a model that optimize() returned, submodules that were fused on their own included.

    Raises FxfuseError for any other module.
    """
    if not isinstance(fast, FusedModule):
        raise FxfuseError(f"explain takes what fxfuse.optimize returned, not a {type(fast).__name__}")
    regions: list[RegionReport] = []
    skipped: list[SkippedReport] = []
    runs: list[str] = []
    for path, module in _fused_modules(fast):
        prefix = f"{path}." if path else ""
        regions += [_region_report(region, prefix) for region in state_of(module).regions]
        for untraced in state_of(module).captured.untraced:
            name = prefix + untraced.path if untraced.path else path or "the model"
            skipped.append(SkippedReport(name, f"runs as Python, since tracing stopped at {untraced.reason}"))
        skipped += [SkippedReport(prefix + item.node, item.reason) for item in state_of(module).skipped]
        runs += [
            f"{run.convolutions} convolutions from '{prefix}{run.source}' on run in channels_last on a GPU"
            for run in state_of(module).runs
        ]
    return Report(tuple(regions), tuple(skipped), tuple(runs), _graphs_report(fast))


def _graphs_report(fast: FusedModule) -> tuple[str, ...]:
    replays = state_of(fast).replays
    if replays is None:
        return ()
    refused = (
        f"{count} call{'' if count == 1 else 's'} without a CUDA graph: {reason}"
        for reason, count in replays.refused.items()
    )
    return (f"{replays.graphs} CUDA graph{'' if replays.graphs == 1 else 's'} captured", *refused)


def _fused_modules(fast: FusedModule) -> Iterator[tuple[str, FusedModule]]:
    for path, module in fast.named_modules():
        if isinstance(module, FusedModule):
            yield path, module
            for variant in state_of(module).variants.values():
                yield path, variant


def _region_report(region: FusedRegion, prefix: str) -> RegionReport:
    made = plans.of_region(region.number)
    by = "" if region.library is None else "library + "
    kernels = dict.fromkeys(by + plan.kernel for plan in made if plan.kernel is not None)
    reasons = dict.fromkeys(plan.reason for plan in made if plan.reason is not None)
    return RegionReport(
        node=prefix + region.fused,
        chain=region.kind == "pointwise",
        anchor=region.library or (CHAIN if region.kind == "pointwise" else region.kind),
        nodes=tuple(prefix + node for node in region.nodes),
        epilogue=region.epilogue,
        kernel="; ".join(kernels) or None,
        fallback="; ".join(reasons) or None,
        measured=tuple(dict.fromkeys(plan.measured for plan in made if plan.measured)),
        workspace=max((plan.workspace for plan in made), default=0),
    )
