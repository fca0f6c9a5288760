"""Finds the values of a graph that are surely tensors. A traced graph says so of few; the others may be numbers."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any, Final

import torch
from torch import fx, nn

from fxfuse import ops
from fxfuse.patterns.anchors import known_tensor, noted
from fxfuse.patterns.mutation import second_arguments

_NOT_TENSORS: Final = frozenset(
    {"size", "dim", "numel", "item", "stride", "tolist", "nelement", "ndimension", "storage_offset", "data_ptr",
     "element_size", "get_device", "type", "finfo", "iinfo", "result_type", "promote_types", "can_cast"}
)  # fmt: skip
"""Names of torch's functions and methods that do not return tensors."""
_TUPLES: Final = frozenset(
    {"split", "chunk", "unbind", "tensor_split", "hsplit", "vsplit", "dsplit", "split_with_sizes", "unsafe_chunk",
     "unsafe_split", "unsafe_split_with_sizes", "topk", "sort", "max", "min", "median", "mode", "kthvalue", "cummax",
     "cummin", "aminmax", "var_mean", "std_mean", "meshgrid", "broadcast_tensors", "unique", "frexp", "slogdet", "svd",
     "qr", "eigh", "lstm", "gru", "rnn_tanh", "rnn_relu", "native_layer_norm", "native_group_norm"}
)  # fmt: skip
"""Names of functions and methods that may return several tensors."""
_TUPLE_MODULES: Final = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_OF_SEQUENCES: Final = frozenset(
    {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "row_stack", "column_stack", "block_diag",
     "broadcast_tensors", "meshgrid", "cartesian_prod", "chain_matmul", "multi_dot", "from_numpy", "tensor"}
)  # fmt: skip
"""Names of functions whose first argument need not be a tensor."""
_VIEWS: Final = ("T", "mT", "H", "mH", "data", "real", "grad")
_ATTRIBUTES: Final = (*_VIEWS, "shape", "dtype", "device", "ndim")


def tensors_of(root: nn.Module, graph: fx.Graph, assumed: Collection[fx.Node] = ()) -> frozenset[fx.Node]:
    """The nodes whose values are tensors, whatever the model is called with. Those in `assumed` count as tensors."""
    used: set[fx.Node] = set(assumed)
    for node in reversed(graph.nodes):
        if any(_works_on(root, user, node, used) for user in node.users):
            used.add(node)
    found: set[fx.Node] = set()
    for node in graph.nodes:
        value = noted(node)
        if isinstance(value, torch.Tensor) or (value is None and (node in used or _is_made(root, node, found))):
            found.add(node)
    return frozenset(found)


def _is_made(root: nn.Module, node: fx.Node, tensors: set[fx.Node]) -> bool:
    """Whether the operation of `node` makes a tensor. `tensors` are known to be tensors."""
    match node.op:
        case "get_attr":
            return known_tensor(root, node) is not None
        case "placeholder":
            return node.type is torch.Tensor
        case "call_module":
            module = root.get_submodule(str(node.target))
            several = isinstance(module, _TUPLE_MODULES) or getattr(module, "return_indices", False)
            return _is_torchs(root, node) and not several
        case "call_method":
            return _is_tensor_method(node.target) and (node.target not in _TUPLES or _is_of_two(node, tensors))
        case "call_function":
            if node.target is getattr:
                return node.args[0] in tensors and node.args[1] in _VIEWS
            if node.target is operator.getitem and node.args[0] not in tensors:
                return _is_tensor_operator(node) or (_makes_several(root, node.args[0]) and type(node.args[1]) is int)
            if _module_of(node.target) == "_operator":
                direct = (arg for arg in node.args if isinstance(arg, fx.Node))  # a tuple may hold others
                return _is_tensor_operator(node) or any(arg in tensors for arg in direct)
            is_tuple = _name_of(node.target) in _TUPLES and not _is_of_two(node, tensors)
            return _is_tensor_function(node.target) and not is_tuple
    return False


def _is_of_two(node: fx.Node, tensors: set[fx.Node]) -> bool:
    """Whether `node` combines two tensors element by element, by a function that reduces a single one (max, min)."""
    is_method = node.op == "call_method"
    found = ops.find_method(str(node.target)) if is_method else ops.find_function(node.target)
    others = second_arguments(node)
    return found is not None and found.of_two_tensors and len(others) == 1 and others[0] in tensors


def _makes_several(root: nn.Module, node: Any) -> bool:
    """Whether the value of `node`, if it is no tensor, is several tensors."""
    if node.op == "call_module":
        return _is_torchs(root, node)
    if node.op == "call_method":
        return node.target in _TUPLES
    return node.op == "call_function" and _is_tensor_function(node.target)


def _works_on(root: nn.Module, user: fx.Node, node: fx.Node, tensors: set[fx.Node]) -> bool:
    """Whether `user` works on `node`, and only works on tensors. `tensors` are known to be tensors."""
    if user.op == "output" or not user.args or (user.args[0] is not node and user.target is not operator.matmul):
        # an operator of one value and numbers makes a tensor only of a tensor
        return user in tensors and _module_of(user.target) == "_operator" and user.all_input_nodes == [node]
    if user.op == "call_module":
        return _is_torchs(root, user)
    if user.op == "call_method":
        return _is_tensor_method(user.target)
    if user.target is getattr:
        return user.args[1] in _ATTRIBUTES
    if _module_of(user.target) == "_operator":
        one = user in tensors and user.all_input_nodes == [node] and user.target is not operator.getitem
        return one or _is_tensor_operator(user)
    return _is_tensor_function(user.target) and _name_of(user.target) not in _OF_SEQUENCES


def _name_of(target: Any) -> str:
    return getattr(ops.function_of(target), "__name__", "")


def _module_of(target: Any) -> str:
    return getattr(target, "__module__", None) or "torch"


def _is_tensor_function(target: Any) -> bool:
    name = _name_of(target)
    ours = _module_of(target).startswith(("torch", "fxfuse.functional"))
    return ops.find_function(target) is not None or (ours and name not in _NOT_TENSORS and not name.startswith("is_"))


def _is_tensor_operator(node: fx.Node) -> bool:
    """Whether `node` is a matrix product, or a subscript that only tensors take."""
    return node.target is operator.matmul or (
        node.target is operator.getitem
        and isinstance(node.args[1], tuple)
        and any(item is None or item is Ellipsis or isinstance(item, slice) for item in node.args[1])
    )


def _is_torchs(root: nn.Module, node: fx.Node) -> bool:
    return type(root.get_submodule(str(node.target))).__module__.startswith("torch.nn")


def _is_tensor_method(name: Any) -> bool:
    return hasattr(torch.Tensor, str(name)) and name not in _NOT_TENSORS
