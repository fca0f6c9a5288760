"""Which values of a graph are surely tensors: a traced graph says so of few, and the others may be numbers."""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
from torch import fx, nn

from fxfuse import ops
from fxfuse.patterns.anchors import known_tensor, noted

_NOT_TENSORS: Final = frozenset(
    {"size", "dim", "numel", "item", "stride", "tolist", "nelement", "ndimension", "storage_offset", "data_ptr",
     "element_size", "get_device", "type", "finfo", "iinfo", "result_type", "promote_types", "can_cast"}
)  # fmt: skip
"""Names of torch's functions and methods that return something else."""


def tensors_of(root: nn.Module, graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes whose values are tensors (or tuples of them), whatever the model is called with."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        value = noted(node)
        if isinstance(value, torch.Tensor) or (value is None and (_is_made(root, node, found) or _is_used(root, node))):
            found.add(node)
    return frozenset(found)


def _is_made(root: nn.Module, node: fx.Node, tensors: set[fx.Node]) -> bool:
    """Whether it is one by what made it, `tensors` being known to be."""
    if node.op == "get_attr":
        return known_tensor(root, node) is not None
    if node.op == "placeholder":
        return node.type is torch.Tensor
    if node.op == "call_module":
        return _is_torchs(root, node)
    if node.op == "call_method":
        return _is_tensor_method(node.target)
    if node.op != "call_function":
        return False
    module, name = getattr(node.target, "__module__", None) or "torch", getattr(node.target, "__name__", "")
    if node.target is getattr:
        return node.args[0] in tensors and node.args[1] in ("T", "mT", "H", "mH", "data", "real", "grad")
    if module == "_operator":
        return any(arg in tensors for arg in node.all_input_nodes)
    if ops.find_function(node.target) is not None:
        return True
    return module.startswith(("torch", "fxfuse.functional")) and not (name in _NOT_TENSORS or name.startswith("is_"))


def _is_used(root: nn.Module, node: fx.Node) -> bool:
    """Whether it is one by its use: as what torch's modules, functions and Tensor's methods work on."""

    def works_on_it(user: fx.Node) -> bool:
        if not user.args or user.args[0] is not node:
            return False
        if user.op == "call_function":
            module = getattr(user.target, "__module__", None) or "torch"
            return module.startswith(("torch", "fxfuse.functional")) and user.target is not operator.getitem
        return _is_torchs(root, user) if user.op == "call_module" else _is_tensor_method(user.target)

    return any(works_on_it(user) for user in node.users if user.op != "output")


def _is_torchs(root: nn.Module, node: fx.Node) -> bool:
    return type(root.get_submodule(str(node.target))).__module__.startswith("torch.nn")


def _is_tensor_method(name: Any) -> bool:
    return hasattr(torch.Tensor, str(name)) and name not in _NOT_TENSORS
