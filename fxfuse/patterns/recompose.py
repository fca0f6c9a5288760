"""Puts together what AOTAutograd, torch.export and some models take apart, so that regions can grow over it.

view, addmm or mm, view                             → linear or matmul of any number of dimensions
_native_batch_norm_legit_no_training, getitem 0     → batch_norm
view, view back (where something was overwritten)   → nothing
transpose, transpose back (gradients of weights)    → nothing
"""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxfuse import ops
from fxfuse.patterns.anchors import known_tensor, noted

_aten = torch.ops.aten
_VIEWS: Final = (_aten.view, _aten.reshape, _aten._unsafe_view, torch.reshape)
_ADDMM: Final = (_aten.addmm, torch.addmm)
_MM: Final = (_aten.mm, torch.mm)


def recompose(root: nn.Module, graph: fx.Graph) -> None:
    """Rewrites `graph` where Dynamo or torch.export noted the shapes of values, or its own nodes compute them."""
    for node in list(graph.nodes):
        target = ops.function_of(node.target)
        if target in (*_ADDMM, *_MM):
            _recompose_product(root, graph, node, target in _ADDMM)
        elif target is _aten._native_batch_norm_legit_no_training:
            _recompose_batch_norm(graph, node)
        elif _is_view(node):
            _remove_view_back(graph, node)
        elif (away := _transposed(node)) is not None:
            _remove_transposed_back(graph, node, away)


def _sizes(value: Any) -> list[str] | None:
    """A tensor's sizes as text: comparing symbols themselves would tie the graph to these sizes."""
    return [str(size) for size in value.shape] if isinstance(value, torch.Tensor) else None


def _is_view(node: Any) -> bool:
    if not isinstance(node, fx.Node) or not node.args:
        return False
    if node.op == "call_method":
        return node.target in ("view", "reshape")
    return node.op == "call_function" and ops.function_of(node.target) in _VIEWS


def _transposed(weight: Any) -> fx.Node | None:
    """The matrix whose transpose `weight` is; None if it is no transpose."""
    if not isinstance(weight, fx.Node) or weight.op != "call_function" or not weight.args:
        return None
    target = ops.function_of(weight.target)
    source, *dims = weight.args
    swaps = (
        (target is _aten.t and not dims)
        or (target is _aten.permute and dims == [[1, 0]])
        or (target is _aten.transpose and dims in ([0, 1], [1, 0], [-2, -1], [-1, -2]))
    )
    return source if swaps and isinstance(source, fx.Node) else None


def _recompose_product(root: nn.Module, graph: fx.Graph, product: fx.Node, has_bias: bool) -> None:
    if product.kwargs:  # alpha, beta
        return
    bias, flat, right = product.args if has_bias else (None, *product.args)
    views = list(product.users)
    if not _is_view(flat) or not all(map(_is_view, views)):
        return
    assert isinstance(flat, fx.Node)
    if not _keeps_rows(product, bias, flat) and not _says_it_keeps_rows(root, product, bias, flat, right):
        return
    x = flat.args[0]
    weight = _transposed(right)
    with graph.inserting_before(product):
        if weight is None and bias is None:
            whole = graph.call_function(torch.matmul, (x, right))
        else:
            weight = graph.call_method("t", (right,)) if weight is None else weight
            whole = graph.call_function(F.linear, (x, weight, bias))
    for view in views:
        whole.meta = dict(view.meta)
        view.replace_all_uses_with(whole)
        _erase_unused(graph, view)


def _keeps_rows(product: fx.Node, bias: Any, flat: fx.Node) -> bool:
    """Whether noted sizes show that the views only flatten all dimensions of x but the last, and restore them."""
    rows, features = _sizes(noted(flat.args[0])), _sizes(noted(product))
    if rows is None or features is None or _sizes(noted(flat)) != [features[0], rows[-1]]:
        return False
    shape = [*rows[:-1], features[1]]
    if any(_sizes(noted(view)) != shape for view in product.users):
        return False
    return not isinstance(bias, fx.Node) or _sizes(noted(bias)) == features[1:]


def _says_it_keeps_rows(root: nn.Module, product: fx.Node, bias: Any, flat: fx.Node, right: Any) -> bool:
    """The same as `_keeps_rows`, shown by nodes that compute the sizes:

    x.view(-1, x.size(-1)), result.view(x.size()[:-1] + (features,)).
    """
    matrix, vector = known_tensor(root, right), known_tensor(root, bias)
    if matrix is None or matrix.dim() != 2 or (bias is not None and (vector is None or vector.dim() != 1)):
        return False
    x, features = flat.args[0], matrix.shape[1]
    if vector is not None and vector.shape[0] != features:
        return False

    def keeps(shape: Any) -> bool:
        if not isinstance(shape, fx.Node) or shape.target is not operator.add or len(shape.args) != 2:
            return False
        rows, last = shape.args
        return _is_item(rows, x, slice(None, -1, None)) and last == (features,)

    if len(flat.args) != 3 or flat.args[1] != -1 or not _is_last_size(flat.args[2], x):
        return False
    return all(len(view.args) == 2 and keeps(view.args[1]) for view in product.users)


def _is_last_size(size: Any, x: Any) -> bool:
    asked = isinstance(size, fx.Node) and size.op == "call_method" and size.target == "size" and size.args == (x, -1)
    return asked or _is_item(size, x, -1)


def _is_item(value: Any, x: Any, index: Any) -> bool:
    """Whether `value` is x.shape[index] or x.size()[index]."""
    if not isinstance(value, fx.Node) or value.target is not operator.getitem or value.args[1] != index:
        return False
    shape = value.args[0]
    return isinstance(shape, fx.Node) and (
        (shape.op == "call_method" and shape.target == "size" and shape.args == (x,))
        or (shape.op == "call_function" and shape.target is getattr and shape.args == (x, "shape"))
    )


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erases `node`, and the nodes it was made of that nobody else uses."""
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for arg in inputs:
        if not arg.users and arg.op != "placeholder":
            _erase_unused(graph, arg)


def _recompose_batch_norm(graph: fx.Graph, node: fx.Node) -> None:
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users):
        return
    x, weight, bias, mean, var, momentum, eps = node.args
    with graph.inserting_before(node):
        normalised = graph.call_function(F.batch_norm, (x, mean, var, weight, bias, False, momentum, eps))
    for user in list(node.users):
        normalised.meta = dict(user.meta)
        user.replace_all_uses_with(normalised)
        graph.erase_node(user)
    graph.erase_node(node)


def _remove_view_back(graph: fx.Graph, node: fx.Node) -> None:
    away = node.args[0]
    origin = away.args[0] if isinstance(away, fx.Node) and _is_view(away) else None
    if not isinstance(origin, fx.Node) or _sizes(noted(origin)) is None:
        return
    if _sizes(noted(origin)) == _sizes(noted(node)) and noted(origin).is_contiguous():
        node.replace_all_uses_with(origin)
        graph.erase_node(node)
        if isinstance(away, fx.Node) and not away.users:
            graph.erase_node(away)


def _remove_transposed_back(graph: fx.Graph, node: fx.Node, away: fx.Node) -> None:
    """Replaces `node`, the transpose of `away`, by the matrix whose transpose `away` is."""
    origin = _transposed(away)
    if origin is None or len(_sizes(noted(origin)) or ()) != 2:
        return
    node.replace_all_uses_with(origin, delete_user_cb=lambda user: user.op != "output")  # a graph's result stays a view
    if not node.users:
        _erase_unused(graph, node)
