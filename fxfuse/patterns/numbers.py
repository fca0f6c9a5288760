"""Values that a graph makes of nothing but numbers: they are the same at every call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx, nn

from fxfuse.dispatch_mode import DispatchMode
from fxfuse.patterns.anchors import noted
from fxfuse.patterns.mutation import Mutations

LARGEST: Final = 2**24
"""The most elements of a value that is computed here."""
_TAKE_SIZES: Final = frozenset(
    {"as_strided", "expand", "new_empty", "new_ones", "new_zeros", "repeat", "reshape", "view"}
)
"""Methods that take a tensor and otherwise only sizes."""


def put_sizes_in(root: nn.Module, graph: fx.Graph) -> None:
    """Replaces sizes that the graph computes as tensors of one element by numbers: Longformer's `torch.div(512, 256)`.

    This works only in Dynamo's graphs, where the nodes' values are noted.
    """
    mutations: Mutations | None = None
    sizes: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op != "call_method" or node.target not in _TAKE_SIZES:
            continue
        for size in node.all_input_nodes:
            if size not in sizes and size is not node.args[0] and _is_size(size):
                mutations = mutations or Mutations(root, graph)
                value = value_of(size, mutations)
                sizes[size] = size if value is None else int(value)
        kept, *given = node.args
        given, kwargs = fx.node.map_arg((given, node.kwargs), lambda size: sizes.get(size, size))
        node.args, node.kwargs = (kept, *given), kwargs
    erase_unused(size for size, value in sizes.items() if value is not size)


def _is_size(node: fx.Node) -> bool:
    value = noted(node)
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and value.shape == () and not value.is_cuda


class _Unknown(Exception):
    """The result of an operation depends on more than its arguments."""


class _Functions(DispatchMode):
    """Refuses operators that write, draw random numbers, or return uninitialised memory."""

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name:
            raise _Unknown
        return func(*args, **kwargs)


def made_of(made: fx.Node) -> list[fx.Node]:
    """`made` and all nodes that its value is made of, in graph order."""
    found: set[fx.Node] = set()
    waiting = [made]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return [node for node in made.graph.nodes if node in found]


def value_of(made: fx.Node, mutations: Mutations) -> torch.Tensor | None:
    """The value of `made` at every call; None if it depends on anything but the graph, or is too large."""
    known, nodes = noted(made), made_of(made)
    if not isinstance(known, torch.Tensor) or not all(type(size) is int for size in known.shape):
        return None
    if known.numel() > LARGEST or not all(map(_is_torchs, nodes)):
        return None
    if mutations.between(-1, len(mutations.order), nodes, []):
        return None
    values: dict[fx.Node, Any] = {}
    try:
        with torch.no_grad(), _Functions():
            for node in nodes:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                function: Any = node.target
                if node.op == "call_method":
                    function = getattr(type(args[0]), str(node.target))
                values[node] = function(*args, **kwargs)
    except Exception:  # whatever torch or somebody else's function raises, the call itself will raise again
        return None
    value = values[made]
    return value if type(value) is torch.Tensor and value.numel() else None


def _is_torchs(node: fx.Node) -> bool:
    """Whether `node` calls a function of torch or an operator of Python: `_Functions` sees all that these do."""
    home = (getattr(node.target, "__module__", None) or "torch").split(".")[0]
    return node.op == "call_method" or (node.op == "call_function" and home in ("torch", "_operator"))


def erase_unused(values: Iterable[fx.Node]) -> None:
    """Erases values that nobody reads, and the nodes that only they are made of.

    The values must be made of nothing but numbers.
    """
    for value in values:
        for made in reversed(made_of(value)):
            if not made.users:
                made.graph.erase_node(made)
