"""A model's graphs as they are drawn: before and after fusion, with all details that are known of each node."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fxfuse.channels_last import plain
from fxfuse.layout import FORMATS
from fxfuse.module import FusedModule, is_fused, state_of
from fxfuse.problem import OPTION_NAMES, TensorMeta, parsed, run_reference
from fxfuse.program.record import KINDS
from fxfuse.replacement import FusedRegion
from fxfuse.report.collect import name_of
from fxfuse.report.data import CHAIN
from fxfuse.report.layered import Layout, layout_of

CHARACTER: Final = 6.8
"""The mean width of a character of a node's text, in pixels."""
PADDING: Final = 20
"""Pixels beside a node's text."""
LONGEST: Final = 30
"""The most characters of a node's text that are drawn."""
LONGEST_CALL: Final = 400


@dataclass(frozen=True)
class Drawn:
    """One node of a graph."""

    name: str
    """Unique in its graph."""
    title: str
    subtitle: str
    kind: str
    """Decides its colour: the anchor of its region, "graph" for a module with a graph of its own, "input", "output" or
    "" for other nodes."""
    region: int | None
    """The number of its region."""
    details: tuple[tuple[str, str], ...]
    """Its details, as (name, text): expression, shape, dtype, layout, source line, ..."""


@dataclass(frozen=True)
class Drawing:
    """One graph."""

    nodes: tuple[Drawn, ...] = ()
    edges: tuple[tuple[str, str], ...] = ()
    layout: Layout = field(default_factory=lambda: Layout({}, (), 0.0, 0.0))


@dataclass(frozen=True)
class Drawings:
    """A graph before and after fusion."""

    name: str
    """"" for the model's own."""
    before: Drawing
    after: Drawing


def drawings_of(name: str, module: FusedModule, seen: Mapping[str, Any]) -> Drawings:
    """The drawings of one module's graphs. A single node stands for a module that runs as Python.

    Args:
        seen: nodes' values in a call, by name; tensors as TensorMeta. Those in the module's program are known anyway.
    """
    state = state_of(module)
    captured = state.captured
    if captured.graph is None:
        details = (("runs as Python", captured.untraced[0].reason if captured.untraced else "it cannot be traced"),)
        node = Drawn("python", type(captured.root).__name__, "runs as Python", "", None, details)
        drawing = Drawing((node,), (), layout_of({node.name: _width(node)}, ()))
        return Drawings(name, drawing, drawing)
    programs = state.programs.programs if state.programs is not None else []
    known = {**(programs[0].values if programs else {}), **seen}
    inside = {node: region for region in state.regions for node in region.nodes}
    fused = {region.fused: region for region in state.regions}
    return Drawings(
        name,
        _drawing(captured.root, captured.graph, known, inside, name),
        _drawing(captured.root, module._graph, known, fused, name),
    )


def _drawing(
    root: nn.Module, graph: fx.Graph, seen: Mapping[str, Any], regions: Mapping[str, FusedRegion], name: str
) -> Drawing:
    values = values_of(root, graph, seen)
    shown = [node for node in graph.nodes if not _is_hidden(node, seen)]
    nodes = [_drawn(root, node, values, regions.get(node.name), name) for node in shown]
    names = {node.name for node in shown}
    edges = [(used.name, node.name) for node in shown for used in node.all_input_nodes if used.name in names]
    return Drawing(tuple(nodes), tuple(edges), layout_of({node.name: _width(node) for node in nodes}, edges))


def _width(node: Drawn) -> float:
    return CHARACTER * max(len(node.title), len(node.subtitle)) + PADDING


def _is_hidden(node: fx.Node, seen: Mapping[str, Any]) -> bool:
    """Whether a node is not drawn.

    Hidden are parameters and buffers (Dynamo gives them as arguments), which stand in the details of the nodes that
    read them, questions whether tensors are contiguous, and calls without inputs or users.
    """
    if node.op == "get_attr" or node.target is plain:
        return True
    if node.op == "call_function" and not node.users and not node.all_input_nodes:
        return True
    if node.op != "placeholder":
        return False
    known, noted = seen.get(node.name), node.meta.get("example_value")
    is_parameter = isinstance(known, TensorMeta) and known.is_parameter
    return is_parameter or isinstance(noted, nn.Parameter) or "_parameters_" in node.name or "_buffers_" in node.name


_EDGES: Final = {"placeholder": "input", "output": "output"}


def _drawn(
    root: nn.Module, node: fx.Node, values: Mapping[fx.Node, Any], region: FusedRegion | None, graph: str
) -> Drawn:
    is_region = region is not None and node.target in KINDS
    value = described(values.get(node))
    title = node.name if node.op in _EDGES else name_of(node)
    subtitle = " ".join(text for key, text in value if key in ("shape", "dtype"))
    kind = _EDGES.get(node.op, "")
    details: list[tuple[str, str]] = [("node", node.name)]
    if region is not None:
        kind = region.library or (CHAIN if region.kind == "pointwise" else region.kind)
        if is_region:
            title, subtitle = kind, region.epilogue
            details.append(("replaces", ", ".join(region.nodes)))
        details.append(("expression", region.epilogue))
    module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
    if module is not None and is_fused(module):
        assert isinstance(module, FusedModule)
        kind = "graph"
        details.append(("has a graph of its own", f"{graph}.{node.target}".strip(".")))
        title, subtitle = type(state_of(module).captured.root).__name__, subtitle or str(node.target)
    elif module is not None:
        title = type(module).__name__
        details.append(("module", f"{node.target}: {module}".partition("\n")[0]))
    if node.op not in _EDGES and not is_region:
        details.append(("call", _call(node)))
    details += value
    details += _read(root, node, values)
    details += _source(node)
    number = None if region is None else region.number
    return Drawn(node.name, _cut(title), _cut(subtitle), kind, number, tuple(details))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _call(node: fx.Node) -> str:
    arguments = [*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())]
    text = f"{node._pretty_print_target(node.target)}({', '.join(arguments)})"
    return text if len(text) <= LONGEST_CALL else f"{text[: LONGEST_CALL - 1]}…"


def _read(root: nn.Module, node: fx.Node, values: Mapping[fx.Node, Any]) -> Iterator[tuple[str, str]]:
    """The parameters and buffers that a node reads."""
    found = {str(used.target): values.get(used) for used in node.all_input_nodes if used.op == "get_attr"}
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if not is_fused(module):
            tensors = (*module.named_parameters(), *module.named_buffers())
            found.update((f"{node.target}.{name}", tensor) for name, tensor in tensors)
    for name, value in found.items():
        yield "reads", f"{name} {' '.join(text for key, text in described(value) if key in ('shape', 'dtype'))}".strip()


_FRAME: Final = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>.*)')


def _source(node: fx.Node) -> Iterator[tuple[str, str]]:
    """The line of the model that a node came from."""
    frames = list(_FRAME.finditer(node.stack_trace or ""))
    if frames:
        frame = frames[-1]
        yield "source", f"{frame['file']}:{frame['line']} in {frame['function']}"
        if frame["code"].strip():
            yield "line", frame["code"].strip()


# ------------------------------------------------------------------------------------------------- what values are


def described(value: Any) -> list[tuple[str, str]]:
    """Shape, dtype and layout of a tensor, or of each of several; the value of a number or size; else nothing."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        shape = "×".join(map(str, value.shape)) or "scalar"
        return [
            ("shape", shape),
            ("dtype", str(value.dtype).removeprefix("torch.")),
            ("layout", layout_name(value)),
        ]
    if isinstance(value, tuple | list):
        texts = [" ".join(text for _, text in described(item)) for item in value]
        return [("values", "; ".join(texts))] if any(texts) else []
    if isinstance(value, bool | int | float | torch.Size):
        return [("value", str(value))]
    return []


def layout_name(tensor: torch.Tensor) -> str:
    """The layout of a tensor in memory: its name if it has one, else its strides."""
    strides = f"strides ({', '.join(map(str, tensor.stride()))})"
    if not all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride())):  # symbols: they must get no guards
        return strides
    if tensor.is_contiguous():
        return "contiguous"
    memory_format = FORMATS.get(tensor.dim())
    if memory_format is not None and tensor.is_contiguous(memory_format=memory_format):
        return str(memory_format).removeprefix("torch.")
    return strides


class _Unknown(Exception):
    """Nothing is known of an argument."""


def values_of(root: nn.Module, graph: fx.Graph, seen: Mapping[str, Any]) -> dict[fx.Node, Any]:
    """The nodes' values, with fake tensors, as far as they follow from those in `seen` or were noted in the graph.

    Nothing is computed. Only modules of torch.nn are called.

    Args:
        seen: some nodes' values, by name, above all those of arguments; tensors as TensorMeta.
    """
    values: dict[fx.Node, Any] = {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def known(used: fx.Node) -> Any:
        if used not in values:
            raise _Unknown
        return values[used]

    with torch.no_grad(), mode:
        for node in graph.nodes:
            noted = node.meta.get("example_value", node.meta.get("val"))
            try:
                if node.name in seen:
                    values[node] = _argument(seen[node.name])
                elif node.op == "placeholder":
                    raise _Unknown
                elif node.op == "get_attr":
                    values[node] = _fake(_attribute(root, str(node.target)), mode)
                elif node.op != "output":
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), known)
                    values[node] = _called(root, node, args, kwargs)
            except Exception:  # whatever a model's functions raise for fake tensors: the value is unknown then
                if noted is not None:
                    values[node] = noted
    return values


def _argument(value: Any) -> Any:
    if not isinstance(value, TensorMeta):
        return value
    return torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device=value.device)


def _fake(value: Any, mode: FakeTensorMode) -> Any:
    return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value


def _attribute(root: nn.Module, path: str) -> Any:
    value: Any = root
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _called(root: nn.Module, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """What a node's call returns for fake tensors."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = node.target
    if node.op == "call_module":
        target = root.get_submodule(str(target))
        if is_fused(target) or not type(target).__module__.startswith("torch.nn."):
            raise _Unknown
    if target in KINDS:  # not a call of the region, which would need a plan
        x, weight, bias, operands, epilogue, *values = args
        options = tuple(zip(OPTION_NAMES[KINDS[target]], values, strict=False))
        pool = tuple(kwargs.get("pool", ()))
        return run_reference(KINDS[target], options, parsed(epilogue), pool, x, weight, bias, operands)
    return target(*args, **kwargs)
