"""explain(): what was fused into what, what was not and why, and which kernels run."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from tabulate import tabulate
from torch import fx

from fxfuse import plans
from fxfuse.channels_last import Layouts, bytes_of
from fxfuse.errors import FxfuseError
from fxfuse.module import FusedModule, is_fused, state_of, stops
from fxfuse.replacement import FusedRegion

CHAIN: Final = "pointwise chain"
"""Instead of an anchor, where there is none."""

_T = TypeVar("_T")

_COLUMN: int = 60
"""Characters at which long cells of the table wrap."""


@dataclass(frozen=True)
class RegionReport:
    """One region of the model."""

    node: str
    """The node that replaced the others, with the path of the submodule whose graph it is in."""
    anchor: str
    """"linear", "gated_linear" (two linears of one x), "matmul", "conv2d", "conv3d" or "layer_norm"; what torch's
    library computes ("bmm"), if a pass follows it; or CHAIN."""
    nodes: tuple[str, ...]
    """Names of the nodes it replaced."""
    epilogue: str
    kernel: str | None
    """The kernel in use; None before the first call, and where torch runs the region."""
    fallback: str | None
    """Why torch ran it for some of the calls, if it did: "gradients are due", or what no kernel can do."""
    measured: tuple[tuple[tuple[str, float], ...], ...] = ()
    """For each problem that was measured, the candidates' names and times in seconds."""
    error: float | None = None
    """The largest error of a chosen kernel as a multiple of what eager's allows, where they were compared."""
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
    """How many convolutions run in channels_last although the model's tensors are contiguous, and each
    conversion with the bytes it copies."""
    cuda_graphs: tuple[str, ...] = ()
    """For a model that is replayed as CUDA graphs: how many there are, and why calls ran without one."""
    dynamo: tuple[str, ...] = ()
    """What Dynamo captured, since tracing stopped."""
    programs: tuple[str, ...] = ()
    """Calls without gradients that run as lists of launches, and why others do not."""
    training: tuple[str, ...] = ()
    """The graphs of forward and backward that calls with gradients run as, and why others do not."""

    def __str__(self) -> str:
        def wrap(text: str) -> str:
            return "\n".join(textwrap.wrap(text, _COLUMN)) or "-"

        parts = [_headline(self.regions)]
        if self.regions:
            alike: dict[tuple[str, str, str], list[RegionReport]] = {}
            for region in self.regions:
                alike.setdefault((region.anchor, region.epilogue, _how(region)), []).append(region)
            rows = [
                (anchor, len(regions), wrap(_replaced(regions)), wrap(epilogue), wrap(how))
                for (anchor, epilogue, how), regions in alike.items()
            ]
            headers = ("anchor", "count", "replaces", "epilogue", "kernel")
            parts.append(tabulate(rows, headers=headers, tablefmt="simple_outline"))
        parts += self.channels_last
        parts += self.cuda_graphs
        parts += self.dynamo
        parts += self.programs
        parts += self.training
        if self.skipped:
            parts.append(f"{len(self.skipped)} not fused")
            reasons = [(item.node, wrap(item.reason)) for item in self.skipped]
            parts.append(tabulate(reasons, headers=("node", "reason"), tablefmt="simple_outline"))
        return "\n".join(parts)


def _headline(regions: Sequence[RegionReport]) -> str:
    """How many regions there are; those are called fused that ran as a kernel."""
    total = f"{len(regions)} region{'' if len(regions) == 1 else 's'}"
    fused = sum(region.kernel is not None for region in regions)
    by_torch = sum(region.kernel is None and region.fallback is not None for region in regions)
    if fused == len(regions):
        return f"{total} fused"
    counts = {"fused": fused, "run by torch": by_torch, "not called yet": len(regions) - fused - by_torch}
    if not fused + by_torch:
        return f"{total} found, not called yet"
    return f"{total}: " + ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def _replaced(regions: Sequence[RegionReport]) -> str:
    """The nodes of the first of some regions that are alike, and how many more there are."""
    first, *others = regions
    return ", ".join(first.nodes) + (f"; and {len(others)} like it" if others else "")


def _how(region: RegionReport) -> str:
    ways = [region.kernel] if region.kernel else []
    for contest in region.measured:
        ranked = sorted(contest, key=lambda item: item[1])
        times = ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in ranked)
        ways.append(f"measured: {times}")
    if region.error is not None:
        ways.append(f"error {region.error:.2g}x of what eager's allows")
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
    layouts: list[str] = []
    for path, module in _traces(fast):
        prefix = f"{path}." if path else ""
        recapture = state_of(module).recapture
        without = "" if recapture is None or recapture.reason is None else f"; Dynamo: {recapture.reason}"
        regions += [_region_report(region, prefix) for region in state_of(module).regions]
        for untraced in state_of(module).captured.untraced:
            if not untraced.path or not is_fused(module.get_submodule(untraced.path)):  # which speak for themselves
                reason = f"runs as Python, since tracing stopped at {untraced.reason}{without}"
                skipped.append(SkippedReport((prefix + untraced.path).strip(".") or "the model", reason))
        skipped += [SkippedReport(prefix + item.node, item.reason) for item in state_of(module).skipped]
        layouts += _layouts_report(state_of(module).layouts, prefix)
    programs = _once(line for path, module in _traces(fast) for line in _programs_report(path, module))
    training = _once(line for path, module in _traces(fast) for line in _training_report(path, module))
    dynamo = tuple(_dynamo_report(fast, path, len(graphs)) for path, graphs in _recaptured(fast).items())
    return Report(_once(regions), _once(skipped), _once(layouts), _graphs_report(fast), dynamo, programs, training)


def _layouts_report(layouts: Layouts, prefix: str) -> Iterator[str]:
    """How many convolutions are in channels_last, and what is converted for them."""
    if not layouts.convolutions:
        return
    count = len(layouts.conversions)
    yield (
        f"{layouts.convolutions} convolutions run in channels_last, with {count} conversion{'' if count == 1 else 's'}"
    )
    for item in layouts.conversions:
        copied = bytes_of(item.number)
        how = "no copy so far" if copied is None else f"{copied / 2**20:.3g} MB a call"
        way = "converted for" if item.there else "brought back for"
        yield f"  '{prefix}{item.value}' is {way} '{prefix}{item.reader}': {how}"


def _once(items: Iterable[_T]) -> tuple[_T, ...]:
    """Without repetition: two traces of a module may have the same regions."""
    return tuple(dict.fromkeys(items))


def _graphs_report(fast: FusedModule) -> tuple[str, ...]:
    replays = state_of(fast).replays
    if replays is None:
        return ()
    refused = (
        f"{count} call{'' if count == 1 else 's'} without a CUDA graph: {reason}"
        for reason, count in replays.refused.items()
    )
    return (f"{replays.graphs} CUDA graph{'' if replays.graphs == 1 else 's'} captured", *refused)


def _traces(fast: FusedModule) -> Iterator[tuple[str, FusedModule]]:
    """The graphs that calls of the model used, with the paths of their modules; before any call, those it has."""
    whole = _recaptured(fast)
    for path, module in fast.named_modules():
        if path in whole:
            yield from ((path, trace) for trace in whole[path])
        elif isinstance(module, FusedModule) and not any(_is_below(path, other) for other in whole):
            used = [trace for trace in (module, *state_of(module).variants.values()) if _is_used(trace, module)]
            yield from ((path, trace) for trace in used or [module])


def _recaptured(fast: FusedModule) -> dict[str, tuple[FusedModule, ...]]:
    """Dynamo's graphs of what fx could not trace, by the path of their module."""
    found: dict[str, tuple[FusedModule, ...]] = {}
    for path, module in fast.named_modules():
        recapture = state_of(module).recapture if isinstance(module, FusedModule) else None
        if recapture is not None and recapture.graphs and not any(_is_below(path, other) for other in found):
            found[path] = recapture.graphs
    return found


def _dynamo_report(fast: FusedModule, path: str, graphs: int) -> str:
    """Why Dynamo captured the module of that path, and as how many graphs."""
    module = fast.get_submodule(path)
    assert isinstance(module, FusedModule)
    reason = next(stops(state_of(module).captured))
    what = f"'{path}'" if path else "the model"
    return (
        f"{what} was captured by Dynamo as {graphs} graph{'' if graphs == 1 else 's'}, since tracing stopped at "
        f"{reason}"
    )


def _programs_report(path: str, module: FusedModule) -> Iterator[str]:
    """What a graph's programs consist of, or why it has none."""
    yield from _programs_of(f"'{path}'" if path else "the model", module)


def _training_report(path: str, module: FusedModule) -> Iterator[str]:
    """What became of calls that needed gradients."""
    training = state_of(module).training
    what = f"'{path}'" if path else "the model"
    if training is None:
        return
    if training.reason is not None:
        yield f"gradients of {what} come from torch: {training.reason}"
    for step in training.steps:
        for name, half in (("forward", step.forward), ("backward", step.backward)):
            assert isinstance(half, FusedModule)
            yield from _programs_of(f"in training, the {name} of {what}", half)
        yield from (f"in training, {line}" for line in _layouts_report(step.joint.layouts, ""))


def _programs_of(what: str, module: FusedModule) -> Iterator[str]:
    programs = state_of(module).programs
    if programs is None:
        return
    for program in programs.programs:
        calls = ", ".join(f"{name} {count}" for name, count in program.calls.most_common())
        yield (
            f"{what} runs as a program: kernels launched: {program.launches}, calls of torch: {program.calls.total()}"
            f"{f' ({calls})' if calls else ''}, memory for results at once: {program.arena_size / 2**20:.1f} MB"
        )
    if not programs.programs and programs.reason is not None and state_of(module).regions:
        yield f"{what} runs node by node: {programs.reason}"


def _is_below(path: str, other: str) -> bool:
    return not other or path.startswith(f"{other}.")


def _is_used(trace: FusedModule, module: FusedModule) -> bool:
    """Whether a call used `trace`, one of `module`'s. Variants without regions are: they are made for a call."""
    regions = state_of(trace).regions
    if not regions:
        return trace is not module
    return any(plans.of_region(region.number) or plans.reasons_without_plan(region.number) for region in regions)


def _region_report(region: FusedRegion, prefix: str) -> RegionReport:
    made = plans.of_region(region.number)
    by = "" if region.library is None else "library + "
    kernels = dict.fromkeys(by + plan.kernel for plan in made if plan.kernel is not None)
    without_plan = plans.reasons_without_plan(region.number)
    reasons = dict.fromkeys([*without_plan, *(plan.reason for plan in made if plan.reason is not None)])
    return RegionReport(
        node=prefix + region.fused,
        chain=region.kind == "pointwise",
        anchor=region.library or (CHAIN if region.kind == "pointwise" else region.kind),
        nodes=tuple(prefix + node for node in region.nodes),
        epilogue=region.epilogue,
        kernel="; ".join(kernels) or None,
        fallback="; ".join(reasons) or None,
        measured=tuple(dict.fromkeys(plan.measured for plan in made if plan.measured)),
        error=max((error for plan in made for name, error in plan.errors if name == plan.kernel), default=None),
        workspace=max((plan.workspace for plan in made), default=0),
    )
