"""What AOTAutograd, torch.export and some models take apart, put together, so that regions can grow over it.

view, addmm or mm, view                             → linear or matmul of more than two dimensions
_native_batch_norm_legit_no_training, getitem 0     → batch_norm
view, view back (where something was overwritten)   → nothing
"""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import fx

from fxfuse import ops
from fxfuse.patterns.anchors import noted

_aten = torch.ops.aten
_VIEWS: Final = (_aten.view, _aten.reshape, _aten._unsafe_view, torch.reshape)
_ADDMM: Final = (_aten.addmm, torch.addmm)
_MM: Final = (_aten.mm, torch.mm)


def recompose(graph: fx.Graph) -> None:
    """Rewrites `graph`, where Dynamo or torch.export noted the shapes of its values; the rest stays as it is."""
    for node in list(graph.nodes):
        target = ops.function_of(node.target)
        if target in (*_ADDMM, *_MM):
            _recompose_product(graph, node, target in _ADDMM)
        elif target is _aten._native_batch_norm_legit_no_training:
            _recompose_batch_norm(graph, node)
        elif _is_view(node):
            _remove_view_back(graph, node)


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
    """The matrix of which `weight` is the transpose."""
    if not isinstance(weight, fx.Node) or weight.op != "call_function":
        return None
    target = ops.function_of(weight.target)
    source, *dims = weight.args
    swaps = (
        (target is _aten.t and not dims)
        or (target is _aten.permute and dims == [[1, 0]])
        or (target is _aten.transpose and dims in ([0, 1], [1, 0], [-2, -1], [-1, -2]))
    )
    return source if swaps and isinstance(source, fx.Node) else None


def _recompose_product(graph: fx.Graph, product: fx.Node, has_bias: bool) -> None:
    if product.kwargs:  # alpha, beta
        return
    bias, flat, right = product.args if has_bias else (None, *product.args)
    weight = _transposed(right)
    if not _is_view(flat) or not all(map(_is_view, product.users)):
        return
    assert isinstance(flat, fx.Node)
    x = flat.args[0]
    rows, features = _sizes(noted(x)), _sizes(noted(product))
    if rows is None or features is None or _sizes(noted(flat)) != [features[0], rows[-1]]:
        return
    shape = [*rows[:-1], features[1]]
    if any(_sizes(noted(view)) != shape for view in product.users):
        return
    if isinstance(bias, fx.Node) and _sizes(noted(bias)) != features[1:]:
        return
    with graph.inserting_before(product):
        if weight is not None:
            whole = graph.call_function(F.linear, (x, weight, bias))
        else:
            whole = graph.call_function(torch.matmul, (x, right))
            whole.meta = dict(next(iter(product.users)).meta)
            whole = whole if bias is None else graph.call_function(torch.add, (whole, bias))
    for view in list(product.users):
        whole.meta = dict(view.meta)
        view.replace_all_uses_with(whole)
        graph.erase_node(view)
    graph.erase_node(product)
    for node in (flat, right):
        if isinstance(node, fx.Node) and not node.users:
            graph.erase_node(node)


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
