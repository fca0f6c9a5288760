"""Graphs of torch.export as data: nodes by name, operators by name, nothing that Python would have to unpickle.

This is not torch.export's own format. `torch.export.load` unpickles what it cannot read otherwise, and the graphs that
it returns take arguments apart by themselves, which programs (program/) do not support. Here a graph is a list of
nodes. Each calls an operator that is registered with torch, or one of the functions in `FUNCTIONS`; its
arguments are other nodes, tensors of the model by their paths, and plain values.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import fx

from fxfuse.errors import PackageError

FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    **{
        f"operator.{name}": getattr(operator, name)
        for name in (
            "getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "pos", "abs",
            "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_",
        )
    },
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc", "sqrt")},
    **{
        f"torch.{name}": getattr(torch, name)
        for name in ("sym_float", "sym_int", "sym_max", "sym_min", "sym_not", "sym_ite", "sym_sum")
        if hasattr(torch, name)
    },
}  # fmt: skip
"""Functions that a graph may call beside registered operators: arithmetic on sizes."""
_NAMES: Final = {id(function): name for name, function in FUNCTIONS.items()}

_FORBIDDEN: Final = ("aten::from_file", "aten::save")
"""Operators that read or write files."""
_NO_EFFECT: Final = ("aten::_assert_tensor_metadata", "aten::sym_constrain_range", "aten::sym_constrain_range_for_size")
"""Operators that only state what a package checks at each call (dtypes, sizes), or what holds anyhow."""


# --------------------------------------------------------------------------------------------- writing


def describe(graph: fx.Graph, rename: Callable[[str], str]) -> list[Any]:
    """The nodes of an exported graph, whose placeholders are tensors and plain values.

    Args:
        rename: maps the path of a tensor in the graph's module to its path in the model.

    Raises PackageError for what cannot be written down, naming the node.
    """
    nodes = []
    for node in graph.nodes:
        if node.op == "call_module" and not node.users:  # _guards_fn, which checks the arguments
            continue
        if node.op == "call_function" and _named(node) in _NO_EFFECT and not node.users:
            continue
        if node.op == "get_attr":
            if node.users:
                nodes.append([node.name, "tensor", rename(str(node.target))])
        elif node.op == "placeholder":
            nodes.append([node.name, "input"])
        elif node.op == "output":
            nodes.append([node.name, "output", encoded(node.args[0], node)])
        elif node.op == "call_function":
            kwargs = [[name, encoded(value, node)] for name, value in node.kwargs.items()]
            nodes.append([node.name, "call", _target(node), [encoded(arg, node) for arg in node.args], kwargs])
        else:
            raise PackageError(f"'{node.name}' is a {node.op}, which a package cannot hold")
    return nodes


def _named(node: fx.Node) -> str:
    return node.target.name().partition(".")[0] if isinstance(node.target, torch._ops.OpOverload) else ""


def _target(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if _named(node) in _FORBIDDEN:
            raise PackageError(f"'{node.name}' calls {_named(node)}, which a package may not")
        return f"op:{target.name().partition('.')[0]}.{target._overloadname}"
    if id(target) in _NAMES:
        return _NAMES[id(target)]
    raise PackageError(
        f"'{node.name}' calls {getattr(target, '__name__', target)}, which a package cannot hold; it has operators "
        "that are registered with torch, and no functions with graphs of their own (torch.cond, autocast regions)"
    )


def encoded(value: Any, where: object = "") -> Any:
    """A plain value, or one with nodes in it, as JSON. Raises PackageError for any other."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return ["float", value.hex()]  # NaN and infinity, too
    if isinstance(value, complex):
        return ["complex", value.real.hex(), value.imag.hex()]
    if isinstance(value, fx.Node):
        return ["node", value.name]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", [encoded(item, where) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[encoded(key, where), encoded(item, where)] for key, item in value.items()]]
    if isinstance(value, slice):
        return ["slice", [encoded(part, where) for part in (value.start, value.stop, value.step)]]
    if isinstance(value, torch.device):
        return ["device", value.type]  # its index is chosen when the package is loaded
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return ["torch", str(value).removeprefix("torch.")]
    if value is Ellipsis:
        return ["ellipsis"]
    raise PackageError(f"'{where}' has an argument of class {type(value).__name__}, which a package cannot hold")


# --------------------------------------------------------------------------------------------- reading


def rebuilt(nodes: list[Any], device: torch.device) -> fx.Graph:
    """The graph that `describe` wrote down. The model's tensors are get_attr nodes.

    Args:
        device: where nodes make tensors that they made on a device of this type.

    Raises PackageError for a node of another kind, or an operator that is not registered here.
    """
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    for name, kind, *rest in nodes:
        if kind == "input":
            made[name] = graph.placeholder(name)
        elif kind == "tensor":
            made[name] = graph.get_attr(rest[0])
        elif kind == "call":
            target, args, kwargs = rest
            made[name] = graph.create_node(
                "call_function", _callable(target), tuple(decoded(arg, made, device) for arg in args),
                {str(key): decoded(value, made, device) for key, value in kwargs}, name=name,
            )  # fmt: skip
        elif kind == "output":
            made[name] = graph.output(decoded(rest[0], made, device))
        else:
            raise PackageError(f"the package's graph has a node of unknown kind {kind!r}")
    graph.lint()
    return graph


def _callable(target: str) -> Callable[..., Any]:
    if target in FUNCTIONS:
        return FUNCTIONS[target]
    qualified, _, overload = target.removeprefix("op:").partition(".")
    namespace, _, name = qualified.partition("::")
    if not target.startswith("op:") or qualified in _FORBIDDEN:
        raise PackageError(f"the package's graph calls {target}, which it may not")
    try:
        found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    except (AttributeError, RuntimeError):
        raise PackageError(
            f"the package's graph calls {qualified}, which is no operator here: import the library that registers it "
            "before fxfuse.load"
        ) from None
    return found


def decoded(value: Any, nodes: Mapping[str, fx.Node], device: torch.device | None = None) -> Any:
    """The value that `encoded` wrote down. Raises PackageError if it is none of those."""
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "node":
        return nodes[rest[0]]
    if kind == "float":
        return float.fromhex(rest[0])
    if kind == "complex":
        return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
    if kind in ("list", "tuple"):
        items = [decoded(item, nodes, device) for item in rest[0]]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {decoded(key, nodes, device): decoded(item, nodes, device) for key, item in rest[0]}
    if kind == "slice":
        return slice(*(decoded(part, nodes, device) for part in rest[0]))
    if kind == "device":
        return device if device is not None and device.type == rest[0] else torch.device(rest[0])
    if kind == "torch":
        found = getattr(torch, rest[0], None)
        if isinstance(found, torch.dtype | torch.layout | torch.memory_format):
            return found
    if kind == "ellipsis":
        return Ellipsis
    raise PackageError(f"the package's graph has a value that is not understood: {value!r}")
