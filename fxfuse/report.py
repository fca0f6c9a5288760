"""explain(): what was fused into what, what was not and why, and which kernels run."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tabulate import tabulate
from torch import fx

from fxfuse import functional
from fxfuse.errors import FxfuseError
from fxfuse.optimize import FusedModule, FusedRegion
from fxfuse.problem import Plan, Problem

_COLUMN: int = 60
"""Characters at which long cells of the table wrap."""


@dataclass(frozen=True)
class RegionReport:
    """One region of the model."""

    node: str
    """The node that replaced the others, with the path of the submodule whose graph it is in."""
    anchor: str
    """"linear", "matmul" or "conv2d"."""
    nodes: tuple[str, ...]
    """Names of the nodes it replaced."""
    epilogue: str
    kernel: str | None
    """The kernel in use; None before the first call, and where torch runs the region."""
    fallback: str | None
    """Why torch runs it for some tensors it was called with, if it does."""


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

    def __str__(self) -> str:
        def wrap(text: str) -> str:
            return "\n".join(textwrap.wrap(text, _COLUMN)) or "-"

        fused = [
            (
                region.anchor,
                wrap(", ".join(region.nodes)),
                wrap(region.epilogue),
                wrap(region.kernel or (f"torch: {region.fallback}" if region.fallback else "(not called yet)")),
            )
            for region in self.regions
        ]
        parts = [f"{len(self.regions)} region{'' if len(self.regions) == 1 else 's'} fused"]
        if fused:
            headers = ("anchor", "replaces", "epilogue", "kernel")
            parts.append(tabulate(fused, headers=headers, tablefmt="simple_outline"))
        if self.skipped:
            parts.append(f"{len(self.skipped)} not fused")
            rows = [(item.node, wrap(item.reason)) for item in self.skipped]
            parts.append(tabulate(rows, headers=("node", "reason"), tablefmt="simple_outline"))
        return "\n".join(parts)


def explain(fast: fx.GraphModule) -> Report:
    """The report on a model that optimize() returned, submodules that were fused on their own included.

    Raises FxfuseError for any other module.
    """
    if not isinstance(fast, FusedModule):
        raise FxfuseError(f"explain takes what fxfuse.optimize returned, not a {type(fast).__name__}")
    regions: list[RegionReport] = []
    skipped: list[SkippedReport] = []
    for path, module in _fused_modules(fast):
        prefix = f"{path}." if path else ""
        regions += [_region_report(module, region, prefix) for region in module.regions]
        for untraced in module.captured.untraced:
            name = prefix + untraced.path if untraced.path else path or "the model"
            skipped.append(SkippedReport(name, f"runs as Python, since tracing stopped at {untraced.reason}"))
        skipped += [SkippedReport(prefix + item.node, item.reason) for item in module.skipped]
    return Report(tuple(regions), tuple(skipped))


def _fused_modules(fast: FusedModule) -> Iterator[tuple[str, FusedModule]]:
    for path, module in fast.named_modules():
        if isinstance(module, FusedModule):
            yield path, module


def _region_report(module: FusedModule, region: FusedRegion, prefix: str) -> RegionReport:
    plans = [plan for problem, plan in functional.plans() if _is_of(module, region, problem)]
    kernels = list(dict.fromkeys(plan.kernel for plan in plans if plan.kernel is not None))
    reasons = list(dict.fromkeys(_reason(plan) for plan in plans if plan.kernel is None))
    return RegionReport(
        node=prefix + region.fused,
        anchor=region.kind,
        nodes=tuple(prefix + node for node in region.nodes),
        epilogue=region.epilogue,
        kernel="; ".join(kernels) or None,
        fallback="; ".join(reasons) or None,
    )


def _reason(plan: Plan) -> str:
    assert plan.reason is not None
    return plan.reason


def _is_of(module: FusedModule, region: FusedRegion, problem: Problem) -> bool:
    """Whether `problem` is one that this region poses: the same computation on a weight like its own."""
    if (problem.kind, problem.epilogue) != (region.kind, region.epilogue):
        return False
    node = next((node for node in module.graph.nodes if node.name == region.fused), None)
    if node is None:  # the user edited the graph
        return False
    options = functional.options_of(region.kind, node.args[5:])
    weight = node.args[1]
    if options != problem.options or not isinstance(weight, fx.Node):
        return False
    if weight.op != "get_attr":
        return True
    tensor = module
    for name in str(weight.target).split("."):
        tensor = getattr(tensor, name)
    assert isinstance(tensor, torch.Tensor)
    meta = problem.weight
    return (tuple(tensor.shape), tensor.dtype, tensor.device) == (meta.shape, meta.dtype, meta.device)
