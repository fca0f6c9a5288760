"""Collects the report on a model from its graphs, their regions' plans and their programs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

import torch
from torch import fx, nn

from fxfuse import plans
from fxfuse.backend import compiled_graphs
from fxfuse.channels_last import Layouts, bytes_of
from fxfuse.cuda_graphs import WITH_GRADIENTS
from fxfuse.deploy import LoadedModule
from fxfuse.errors import FxfuseError
from fxfuse.graph_breaks import PART, part_name, parts_of
from fxfuse.module import DYNAMO_KEEPS_OBJECTS, FusedModule, is_fused, state_of, stops
from fxfuse.patterns.anchors import noted
from fxfuse.problem import Plan
from fxfuse.program.record import why_refused
from fxfuse.replacement import FusedRegion
from fxfuse.report.data import CHAIN, Operations, RegionReport, Report, SkippedReport
from fxfuse.report.work import work_of
from fxfuse.step_graphs import StepGraphs
from fxfuse.training import CALLS_BEFORE_CAPTURE

_T = TypeVar("_T")


def explain(fast: nn.Module, verbose: bool = False) -> Report:
    """The report on a model that optimize() returned, submodules that were fused on their own included.

    Args:
        fast: what optimize() or load() returned, or torch.compile(model, backend="fxfuse") once it has been called.
        verbose: whether the report prints all that it knows, instead of a few lines.

    Raises FxfuseError for any other module.
    """
    roots = _roots(fast)
    regions: list[RegionReport] = []
    skipped: list[SkippedReport] = []
    layouts: list[str] = []
    why_not_recaptured = None if DYNAMO_KEEPS_OBJECTS else "not asked by a torch before 2.6"
    graphs = [(_joined(name, path), module) for name, root in roots for path, module in _traces(root)]
    for path, module in graphs:
        prefix = f"{path}." if path else ""
        recapture = state_of(module).recapture
        why = recapture.reason if recapture is not None else why_not_recaptured
        without = "" if why is None else f"; Dynamo: {why}"
        regions += [_region_report(region, prefix) for region in state_of(module).regions]
        for untraced in state_of(module).captured.untraced:
            if not untraced.path or not is_fused(module.get_submodule(untraced.path)):  # others report themselves
                reason = f"runs as Python, since tracing stopped at {untraced.reason}{without}"
                skipped.append(SkippedReport((prefix + untraced.path).strip(".") or "the model", reason))
        skipped += [SkippedReport(prefix + item.node, item.reason) for item in state_of(module).skipped]
        layouts += _layouts_report(state_of(module).layouts, prefix)
    return Report(
        _once(regions),
        _once(skipped),
        _once(layouts),
        _once(line for _, root in roots for line in _graphs_report(root)),
        tuple(line for name, root in roots for line in _dynamo_report(name, root)),
        _once(line for path, module in graphs for line in _programs_report(path, module)),
        _once(line for path, module in graphs for line in _training_report(path, module)),
        operations_of(dict(reversed(graphs)).values()),
        verbose,
        tuple(graphs),
        fast,
    )


def _roots(fast: nn.Module) -> list[tuple[str, FusedModule]]:
    """The fused modules that a report on `fast` is about, with their names. Raises FxfuseError."""
    if isinstance(fast, FusedModule):
        return [("", fast)]
    if isinstance(fast, LoadedModule):
        return [(f"call{number}", graph) for number, graph in enumerate(fast.graphs, 1)]
    inner = getattr(fast, "_orig_mod", None)  # torch.compile's
    graphs = compiled_graphs(fast) if isinstance(fast, nn.Module) else ()
    if graphs:
        return [("" if len(graphs) == 1 else f"graph{number}", graph) for number, graph in enumerate(graphs, 1)]
    if isinstance(inner, FusedModule):
        return [("", inner)]
    if inner is not None:
        raise FxfuseError(
            f'this compiled {type(inner).__name__} has no graph of fxfuse: compile it with backend="fxfuse", and call '
            "it once before fxfuse.explain"
        )
    raise FxfuseError(
        "explain takes what fxfuse.optimize returned, or a module that torch.compile(..., "
        f'backend="fxfuse") made and that was called, not a {type(fast).__name__}'
    )


def _joined(name: str, path: str) -> str:
    return f"{name}.{path}" if name and path else name or path


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
    steps = [
        (path, step.replays)
        for path, module in _traces(fast)
        if (training := state_of(module).training) is not None
        for step in training.steps
        if step.replays is not None
    ]
    lines = (
        [f"{replays.graphs} CUDA {_plural('graph', replays.graphs)} captured"] if replays.graphs or not steps else []
    )
    lines += (
        f"{count} {_plural('call', count)} without a CUDA graph: {reason}"
        for reason, count in replays.refused.items()
        if not (steps and reason == WITH_GRADIENTS)  # those have graphs of their own
    )
    for path, graphs in steps:
        lines += _step_graphs_report(f"'{path}'" if path else "the model", graphs)
    return tuple(lines)


def _step_graphs_report(what: str, graphs: StepGraphs) -> Iterator[str]:
    """How often a training step was replayed as CUDA graphs, and why not more often."""
    if graphs.reason is not None:
        yield f"training steps of {what} have no CUDA graphs: {graphs.reason}"
    if graphs.replays:
        yield f"{graphs.replays} training {_plural('step', graphs.replays)} of {what} replayed as CUDA graphs"
    if graphs.waited:
        yield (
            f"{graphs.waited} training {_plural('step', graphs.waited)} of {what} without CUDA graphs: the backward of "
            "an earlier call was still to come"
        )


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def _traces(fast: FusedModule) -> Iterator[tuple[str, FusedModule]]:
    """The graphs that the model's calls used, with the paths of their modules. Before any call, the graphs it has."""
    whole = _recaptured(fast)
    for path, module in fast.named_modules():
        if path in whole:
            for trace in whole[path]:
                yield path, trace
                yield from ((_joined(path, part), trace.get_submodule(part)) for part in parts_of(trace))  # type: ignore[misc]
        elif isinstance(module, FusedModule) and not any(_is_below(path, other) for other in whole):
            used = [trace for trace in (module, *state_of(module).variants.values()) if _is_used(trace, module)]
            for trace in used or [module]:
                yield from _running(path, trace)


def _running(path: str, module: FusedModule) -> Iterator[tuple[str, FusedModule]]:
    """The graph, or the parts that run in its place and what calls them."""
    parts = state_of(module).parts
    yield path, module if parts is None else parts.whole
    for number, part in enumerate(() if parts is None else parts.each, 1):
        yield _joined(path, part_name(number)), part


def _recaptured(fast: FusedModule) -> dict[str, tuple[FusedModule, ...]]:
    """Dynamo's graphs of the modules that fx cannot trace in their present mode, by the module's path."""
    found: dict[str, tuple[FusedModule, ...]] = {}
    for path, module in fast.named_modules():
        if not isinstance(module, FusedModule) or any(_is_below(path, other) for other in found):
            continue
        recapture, captured = state_of(module).recapture, state_of(module).captured
        if recapture is not None and recapture.graphs and any(stops(captured)):
            found[path] = recapture.graphs
    return found


def _dynamo_report(name: str, fast: FusedModule) -> Iterator[str]:
    """Which modules Dynamo captured, why, and as how many graphs. Which others run in parts."""
    for path, graphs in _recaptured(fast).items():
        module = fast.get_submodule(path)
        assert isinstance(module, FusedModule)
        reason = next(stops(state_of(module).captured))
        whole = _joined(name, path)
        what = f"'{whole}'" if whole else "the model"
        count = f"{len(graphs)} graph{'' if len(graphs) == 1 else 's'}"
        yield f"{what} was captured by Dynamo as {count}, since tracing stopped at {reason}"
        for graph in graphs:
            yield from _breaks_report(what, graph)
    for path, module in _traces(fast):
        between = _between_parts(module)
        if between:
            what = f"'{_joined(name, path)}'" if _joined(name, path) else "the model"
            yield f"{what} runs in parts: what stands between them ({', '.join(between[:6])}) may do more than compute"


def _breaks_report(what: str, graph: FusedModule) -> Iterator[str]:
    """How many parts one of Dynamo's graphs is broken into, and what stands between them."""
    parts = parts_of(graph)
    if parts:
        whole = state_of(graph).captured.graph
        assert whole is not None, "Dynamo's graphs have one"
        between = [node for node in whole.nodes if any(map(_is_tensor, node.all_input_nodes))]
        names = Counter(name_of(node) for node in between if node.op != "output" and node.target not in parts)
        shown = ", ".join(name for name, _ in names.most_common(6))
        yield (
            f"{what} runs in {len(parts)} parts: what stands between them ({shown}) depends on sizes that data decide, "
            "or has a gradient that cannot be traced, and runs node by node"
        )


def _between_parts(module: FusedModule) -> list[str]:
    """The names of what stands between the parts that this graph calls; none if it calls none."""
    root, graph = state_of(module).captured.root, state_of(module).captured.graph
    nodes = () if graph is None else graph.nodes
    if isinstance(root, fx.GraphModule) or not any(map(_is_part, nodes)):
        return []
    return [str(node.target) for node in nodes if why_refused(root, node) is not None]


def _is_part(node: fx.Node) -> bool:
    """Whether a node of a graph of fx's calls a part of it."""
    return node.op == "call_function" and getattr(node.target, "__name__", "").startswith(PART)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(noted(node), torch.Tensor)


def _programs_report(path: str, module: FusedModule) -> Iterator[str]:
    """What a graph's programs consist of, or why it has none."""
    yield from _programs_of(f"'{path}'" if path else "the model", module)


def _training_report(path: str, module: FusedModule) -> Iterator[str]:
    """How calls that needed gradients ran."""
    training = state_of(module).training
    what = f"'{path}'" if path else "the model"
    if training is None:
        return
    if training.reason is not None and not parts_of(module):
        yield f"gradients of {what} come from torch: {training.reason}"
    if training.captured_without_step:
        yield (
            f"gradients of {what} come from torch in CUDA graphs that were captured before there was a step for such "
            f"calls: {training.captured_without_step} (after {CALLS_BEFORE_CAPTURE} of a kind there is one)"
        )
    if training.were_in_parts:
        yield f"gradients of {what} come from torch where {plans.IN_PARTS}"
    for step in training.steps:
        yield f"in training, {what} keeps {step.joint.kept_bytes / 2**20:.1f} MB for the backward"
        for name, graph in step.graphs:
            assert isinstance(graph, FusedModule)
            yield from _programs_of(f"in training, the {name} of {what}", graph)
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
    """Whether a call used `trace`, one of `module`'s. Variants without regions count: they are made for a call."""
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
        gains=tuple(dict.fromkeys(gain for plan in made for gain in gain_of(plan))),
        moved=_moved(region),
        number=region.number,
    )


def _moved(region: FusedRegion) -> tuple[int, int] | None:
    problems = list(plans.problems_of(region.number).items())
    if not problems or problems[-1][1].kernel is None:
        return None
    work = work_of(*problems[-1])
    return None if work is None else (work.nbytes + work.left + work.saved, work.nbytes + work.left)


def gain_of(plan: Plan) -> Iterator[tuple[float, float]]:
    """The seconds of torch's library with a pass behind it, and of the kernel in use, if both were measured."""
    times = dict(plan.measured)
    library = [seconds for name, seconds in plan.measured if name.startswith("library")]
    if library and plan.kernel in times:
        yield min(library), times[plan.kernel]


# ------------------------------------------------------------------------------------------ how much there is to do

_FREE: Final = frozenset(
    {"view", "reshape", "flatten", "unflatten", "permute", "transpose", "t", "squeeze", "unsqueeze", "expand",
     "expand_as", "broadcast_to", "movedim", "moveaxis", "swapaxes", "swapdims", "narrow", "select", "chunk", "split",
     "unbind", "getitem", "getattr", "size", "dim", "numel", "shape", "stride", "detach", "alias", "as_operand",
     "plain", "check_rank", "type", "view_as", "unsafe_chunk", "unsafe_split", "_unsafe_view", "split_with_sizes"}
)  # fmt: skip
"""Functions and methods that make views, or answer questions."""
_ARITHMETIC_ON_SIZES: Final = ("operator", "_operator", "builtins", "math")


def computes(node: fx.Node) -> bool:
    """Whether a node is an operation, and not an argument, attribute, view or question, as far as its name tells."""
    if node.op == "call_module":
        return True
    if node.op not in ("call_function", "call_method"):
        return False
    name = name_of(node)
    if name in _FREE or name.endswith("_nesting"):
        return False
    return not _is_arithmetic(node) or _reads_tensor(node)


def name_of(node: fx.Node) -> str:
    """The short name of what a node calls."""
    if node.op == "call_module" or isinstance(node.target, str):
        return str(node.target)
    name = str(getattr(node.target, "__name__", node.target))
    return name.partition(".")[0]


def _is_arithmetic(node: fx.Node) -> bool:
    """Whether a node may compute with sizes."""
    return getattr(node.target, "__module__", None) in _ARITHMETIC_ON_SIZES


def _reads_tensor(node: fx.Node) -> bool:
    """Whether a node reads a tensor, as far as can be told: sizes come from `size`, `shape` and other sizes."""
    left, seen = deque(node.all_input_nodes), set(node.all_input_nodes)
    while left:
        one = left.popleft()
        name = name_of(one)
        if one.op in ("placeholder", "get_attr", "call_module"):
            return True
        if name in ("size", "dim", "numel", "getattr"):
            if name == "getattr" and one.args[1] not in ("shape", "ndim", "dtype", "device"):
                return True
        elif not _is_arithmetic(one):
            return True
        else:
            left += [other for other in one.all_input_nodes if other not in seen]
            seen.update(one.all_input_nodes)
    return False


def operations_of(graphs: Iterable[FusedModule]) -> Operations:
    """The operations of a call that runs each of these graphs once."""
    before = kernels = 0
    has_python = False
    calls: Counter[str] = Counter()
    for module in graphs:
        state = state_of(module)
        captured = state.captured.graph
        if captured is None:
            has_python = True
            continue
        before += _count(captured, module)
        programs = state.programs.programs if state.programs is not None else []
        if programs:
            kernels += programs[0].launches
            calls += programs[0].calls
            continue
        fused = {region.fused for region in state.regions}
        kernels += len(fused)
        calls.update(
            _label(node, module) for node in module._graph.nodes if node.name not in fused and _counts(node, module)
        )
    return Operations(before, kernels, tuple(calls.most_common()), has_python)


def _count(graph: fx.Graph, module: FusedModule) -> int:
    return sum(_counts(node, module) for node in graph.nodes)


def _counts(node: fx.Node, module: FusedModule) -> bool:
    """Whether a node counts as an operation. Calls of fused modules and of parts do not: their graphs are counted."""
    if _is_part(node) or (node.op == "call_module" and is_fused(_called(node, module))):
        return False
    return computes(node)


def _label(node: fx.Node, module: FusedModule) -> str:
    return type(_called(node, module)).__name__ if node.op == "call_module" else name_of(node)


def _called(node: fx.Node, module: FusedModule) -> nn.Module:
    """The module that a node calls, in the captured model: a child may have the name of a graph module's attribute."""
    return state_of(module).captured.root.get_submodule(str(node.target))
