"""Breaks graphs around nodes that no program or training step can hold.

In Dynamo's graphs data may decide a size (`tolist`, `nonzero`, a split into the rows of each expert), so that later
sizes differ from call to call. Another package's operator may have a gradient that looks at data. In graphs of fx's
there may be modules that run as Python, or that have hooks. A graph with one such node could have neither a program nor
a training step. So such nodes run one by one, as torch runs them. The nodes between them become graphs of their own:

    x ─ linear ─ relu ─ topk ─ tolist ─ split ─ cat ─ linear ─ gelu
        └──── part_1 ────┘    (node by node)         └─ part_2 ─┘

The nodes keep their order, and so in-place changes and random numbers keep theirs.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Final, TypeAlias

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxfuse.patterns.anchors import noted
from fxfuse.patterns.mutation import SWITCHES, asks_shape
from fxfuse.program.record import why_refused
from fxfuse.row_padding import is_view

PART: Final = "fxfuse_part_"
"""The beginning of the names of parts: of submodules of a graph of Dynamo's, and of functions in one of fx's."""
WORTH: Final = 12
"""Fewest operations that are worth a part: a training step costs the CPU as much as some ten operators."""
_OWN: Final = frozenset({"aten", "prims", "prim", "higher_order", "fxfuse"})
"""The namespaces of operators whose gradients can be traced."""
_VIEWS: Final = frozenset(
    {"view", "reshape", "flatten", "unflatten", "transpose", "permute", "t", "squeeze", "unsqueeze", "expand", "chunk",
     "split", "unbind", "select", "narrow", "detach", "getitem", "view_as", "expand_as", "movedim", "swapaxes"}
)  # fmt: skip
"""Methods and functions that compute nothing: their results are, as a rule, views."""


def broken(gm: fx.GraphModule, made: Callable[[fx.GraphModule], nn.Module]) -> fx.GraphModule:
    """The broken graph; `gm` itself if there are no breaks, or no parts. `gm` gets the parts as submodules.

    Args:
        gm: one of Dynamo's graphs, with fake values in its nodes.
        made: makes a module of a part.
    """

    def called(graph: fx.Graph, part: fx.Graph, arguments: tuple[fx.Node, ...]) -> fx.Node:
        name = next(name for name in map(part_name, itertools.count(1)) if not hasattr(gm, name))
        gm.add_submodule(name, made(fx.GraphModule(gm, part)))
        return graph.call_module(name, arguments)

    graph = _broken(gm.graph, {node for node in gm.graph.nodes if node.op not in _STAYING and _is_apart(node)}, called)
    return gm if graph is None else fx.GraphModule(gm, graph)


def broken_at_modules(
    root: nn.Module, graph: fx.Graph, made: Callable[[fx.Graph], Callable[..., Any]]
) -> fx.Graph | None:
    """One of fx's graphs, broken around what may do more than compute. None if there is no such node, or no part.

    Args:
        root: the module whose modules and tensors the graph refers to.
        made: makes a function of a part, which refers to the same.
    """
    apart = {node for node in graph.nodes if why_refused(root, node) is not None}
    return _broken(graph, apart, lambda whole, part, arguments: whole.call_function(made(part), arguments))


def whole_again(broken: fx.Graph, parts: Mapping[str, fx.Graph]) -> fx.Graph:
    """One graph, with the nodes of parts in the place of their calls.

    Args:
        parts: the graphs of the parts, by the names of the functions that `broken` calls for them.
    """
    graph = fx.Graph()
    copied: dict[fx.Node, Any] = {}
    for node in broken.nodes:
        part = parts.get(getattr(node.target, "__name__", ""))
        if part is not None:
            inputs = (one for one in part.nodes if one.op == "placeholder")
            given = {one: fx.node.map_arg(arg, copied.__getitem__) for one, arg in zip(inputs, node.args, strict=True)}
            copied[node] = graph.graph_copy(part, given)
        elif node.target is operator.getitem and isinstance(copied.get(node.args[0]), tuple):
            copied[node] = copied[node.args[0]][node.args[1]]
        else:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    return graph


Called: TypeAlias = Callable[[fx.Graph, fx.Graph, tuple[fx.Node, ...]], fx.Node]
"""called(graph, part, arguments): the node in `graph` that calls `part`, a new part."""
_STAYING: Final = ("placeholder", "get_attr", "output")


def _broken(whole: fx.Graph, apart: set[fx.Node], called: Called) -> fx.Graph | None:
    """A copy of a graph with calls of its parts. None if it has no breaks (`apart`), or no parts."""
    if not apart:
        return None
    apart = apart | _switches(whole, apart)
    graph, parts = fx.Graph(), 0
    copied: dict[fx.Node, fx.Node] = {}
    for nodes in _runs(whole, apart):
        computing = sum(not (node.op in _STAYING or _is_light(node)) for node in nodes)
        is_part = computing >= WORTH and apart.isdisjoint(nodes)
        parts += is_part
        for node in nodes:
            if not is_part or node.op == "get_attr":
                copied[node] = graph.node_copy(node, copied.__getitem__)
        if is_part:
            _add_part(graph, [node for node in nodes if node.op != "get_attr"], copied, called)
    return graph if parts else None


def part_name(number: int) -> str:
    """The name of a part."""
    return f"{PART}{number}"


def parts_of(module: nn.Module) -> list[str]:
    """The names of the parts of a module that was made of a broken graph."""
    return [name for name, _ in module.named_children() if name.startswith(PART)]


def _is_apart(node: fx.Node) -> bool:
    """Whether a node must run by itself."""
    values = pytree.tree_leaves([noted(node), fx.node.map_arg((node.args, node.kwargs), noted)])
    return any(map(_is_decided_by_data, values)) or not _has_traceable_gradient(node)


def _switches(graph: fx.Graph, apart: Set[fx.Node]) -> set[fx.Node]:
    """The nodes that begin or end a mode (autocast, no_grad), except in pairs without a break between them."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    switches = [node for node in order if getattr(node.target, "__name__", "") in SWITCHES]
    pairs = [(begin, end) for begin in switches for end in begin.users if end in switches]
    grad_modes = [node for node in switches if node.target is torch._C._set_grad_enabled]
    pairs += [pair for pair in zip(grad_modes[::2], grad_modes[1::2], strict=False) if pair[0].args != pair[1].args]
    whole = {
        node
        for pair in pairs
        if not any(order[pair[0]] < order[one] < order[pair[1]] for one in apart)
        for node in pair
    }
    return set(switches) - whole


def _is_decided_by_data(value: Any) -> bool:
    """Whether a number, or a size of a tensor, is known only once the graph runs."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # takes half a second to import

    symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
    numbers = (*value.shape, *value.stride()) if _is_strided(value) else (value,)
    return any(isinstance(number, symbolic) and bool(free_unbacked_symbols(number)) for number in numbers)


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _has_traceable_gradient(node: fx.Node) -> bool:
    """Whether the gradient of another package's operator can be traced: tries it with fake values. True if no gradient
    will be needed."""
    target: Any = node.target
    namespace = getattr(target, "_qualified_op_name", getattr(target, "namespace", "aten")).partition("::")[0]
    if node.op != "call_function" or not isinstance(target, _OPERATORS) or namespace in _OWN:
        return True
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), noted)
    fake = [value for value in pytree.tree_leaves([args, kwargs]) if isinstance(value, torch.Tensor)]
    wanted = [value for value in fake if value.requires_grad]
    mode = getattr(fake[0], "fake_mode", None) if fake else None
    if mode is None or not wanted or not torch.is_grad_enabled():
        return True
    again = {id(value): value.detach().requires_grad_(value.requires_grad) for value in fake}
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda value: again[id(value)], (args, kwargs))
    try:
        with mode:
            results = [leaf for leaf in pytree.tree_leaves(target(*args, **kwargs)) if _has_gradient(leaf)]
            if results:
                ones = list(map(torch.ones_like, results))
                torch.autograd.grad(results, [again[id(value)] for value in wanted], ones, allow_unused=True)
    except Exception:  # whatever the gradient raises, a trace of it would raise, too
        return False
    return True


_OPERATORS: Final = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _runs(graph: fx.Graph, apart: Set[fx.Node]) -> Iterator[list[fx.Node]]:
    """The nodes in their order, in runs. A run's nodes are all apart, all arguments, all results, or none of these."""
    run: list[fx.Node] = []
    kind: Any = None
    for node in graph.nodes:
        now = node.op if node.op in ("placeholder", "output") else node in apart
        if node.op == "get_attr" and run:
            now = kind
        if run and now != kind:
            yield run
            run = []
        kind = now
        run.append(node)
    yield run


def _is_light(node: fx.Node) -> bool:
    """Whether a node takes a single tensor, and only makes a view of it or asks for its shape."""
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    return len(node.all_input_nodes) == 1 and (name in _VIEWS or asks_shape(node) or is_view(node))


def _add_part(graph: fx.Graph, nodes: Sequence[fx.Node], copied: dict[fx.Node, fx.Node], called: Called) -> None:
    """Adds a part to the graph: a call of the module that is made of these nodes.

    Args:
        copied: the nodes of `graph`, by the nodes that they are copies of. New ones are added.
    """
    inside = set(nodes)
    behind = _made_behind([node for node in nodes if not inside.issuperset(node.users)], inside)
    inner = inside.difference(behind)
    leaving = [node for node in nodes if node in inner and not inner.issuperset(node.users)]
    part, own = fx.Graph(), dict[fx.Node, fx.Node]()
    taken = dict.fromkeys(one for node in nodes for one in node.all_input_nodes if one not in inside)
    arguments = [node for node in taken if node.op != "get_attr"]
    for node in arguments:
        own[node] = part.create_node("placeholder", node.name, name=node.name, type_expr=node.type)
        own[node].meta = dict(node.meta)
    for node in (*(node for node in taken if node.op == "get_attr"), *nodes):
        own[node] = part.node_copy(node, own.__getitem__)
    part.output(tuple(own[node] for node in leaving))
    results = called(graph, part, tuple(copied[node] for node in arguments))
    for number, node in enumerate(leaving):
        copied[node] = graph.call_function(operator.getitem, (results, number))
        copied[node].meta = dict(node.meta)
    for node in behind:
        copied[node] = graph.node_copy(node, copied.__getitem__)


def _made_behind(leaving: Sequence[fx.Node], inside: Set[fx.Node]) -> list[fx.Node]:
    """The views that are made behind a part instead of inside: the results of a training step must not share memory
    with each other or with the part's arguments. Shapes are asked for behind it, too: such results are no tensors.
    """
    views: dict[fx.Node, list[fx.Node]] = {}
    counts = Counter[fx.Node]()
    for node in leaving:
        base, views[node] = node, []
        while base in inside and _is_light(base):
            views[node].insert(0, base)
            base = base.all_input_nodes[0]
        counts[base] += 1
        views[node].insert(0, base)
    shared = [of for node, of in views.items() if counts[of[0]] > 1 or of[0] not in inside or any(map(asks_shape, of))]
    return list(dict.fromkeys(view for of in shared for view in of[1:]))
