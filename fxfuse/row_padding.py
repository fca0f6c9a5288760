"""Pads rows that matrix products read, so that each row begins at a multiple of 16 bytes.

Matrix products read memory 16 bytes at a time. Rows of 50257 or of 197 elements are not aligned to that: a library's
kernels and ours then read them element by element, at a half or a tenth of the speed. Where loops make such a matrix
(program/operators.py), their kernel leaves gaps behind the rows at no cost. Other matrices are copied if products use
each element often enough.

    x ─ softmax ─┬─ mm          x ─ softmax ─ pad ─ slice ─┬─ mm
                 └─ sum                                    └─ sum

The caller does not see it: results do not change. The backward keeps the longer rows.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from typing import Any, Final

import torch
from torch import fx

from fxfuse.program.loops import rows_pay
from fxfuse.program.operators import loops_of
from fxfuse.program.values import Slot, Value

_aten: Final = torch.ops.aten

ALIGNED: Final = 16
"""Bytes that products read at once."""
LONGER: Final = 1 / 16
"""The largest gap, as a fraction of its row."""
COPY_PAYS: Final = 512
"""The number of columns of products from which a copy pays. To copy an element takes the time of some 200
multiplications, and products are then at least twice as fast."""
_PRODUCTS: Final = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}
_SAME_ROWS: Final = {
    _aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.view.default, _aten.expand.default,
    _aten._unsafe_view.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.default,
}  # fmt: skip
"""Views through which a product may read a matrix."""


def pad_rows(graph: fx.Graph, unchanged: Set[fx.Node]) -> dict[str, torch.Tensor]:
    """Pads rows in a graph of torch's operators, whose values are in `meta["val"]`.

    Args:
        unchanged: results whose strides the caller sees. They are not padded.

    Returns the values, by name, that the graph returns and that now have other strides or longer rows. The graph that
    takes them must be told (`take_padded`).
    """
    (end,) = (node for node in graph.nodes if node.op == "output")
    last = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    returned: dict[str, torch.Tensor] = {}
    for made, columns in _read_by_products(graph).items():
        is_free = made.op == "call_function" and _is_loops(made)
        value = made.meta["val"]
        size, gap = value.shape[-1], -value.shape[-1] % (ALIGNED // value.dtype.itemsize)
        longer = _aten.constant_pad_nd(value, [0, gap])
        views = _views(made, longer[..., :size])
        if views is None or not unchanged.isdisjoint((made, *views)) or (not is_free and columns < COPY_PAYS):
            continue
        lying = {made: longer[..., :size], **views}
        leaving = {node.name: now for node, now in lying.items() if end in node.users}
        if leaving and not is_free:
            continue
        returned |= leaving
        if made.name in leaving:
            returned[made.name] = longer
        with graph.inserting_after(last[0] if made.op == "placeholder" else made):
            padded = graph.call_function(_aten.constant_pad_nd.default, (made, [0, gap]))
        with graph.inserting_after(padded):
            part = graph.call_function(_aten.slice.Tensor, (padded, value.dim() - 1, 0, size))
        end.replace_input_with(made, padded)
        made.replace_all_uses_with(part, lambda user, padded=padded: user is not padded)  # type: ignore[misc]
        padded.meta["val"], part.meta["val"] = longer, longer[..., :size]
        _note(views)
    return returned


def _read_by_products(graph: fx.Graph) -> dict[fx.Node, int]:
    """The matrices with unaligned rows that products read, and how often products use each of their elements."""
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.target in _PRODUCTS:
            a, b = node.args[-2:]
            for matrix, columns in ((a, b.meta["val"].shape[-1]), (b, a.meta["val"].shape[-2])):
                source = _source(matrix)
                if source is not None and _begins_anywhere(source):
                    found[source] = found.get(source, 0) + columns
    return found


def take_padded(graph: fx.Graph, given: Mapping[str, torch.Tensor]) -> None:
    """Adapts a graph to padded arguments.

    Where a view of an argument is impossible with the new strides, the argument is copied to its former strides.

    Args:
        given: the new values of arguments, by name (`pad_rows`).
    """
    for node in [node for node in graph.nodes if node.op == "placeholder" and node.name in given]:
        before, now = node.meta["val"], given[node.name]
        part = now[..., : before.shape[-1]]
        views, inserted = _views(node, part), node
        if now.shape != before.shape:
            inserted = _inserted(graph, node, _aten.slice.Tensor, (node, now.dim() - 1, 0, before.shape[-1]))
            inserted.meta["val"] = part
        if views is None:
            options: dict[str, Any] = {"memory_format": torch.contiguous_format}
            copy = _inserted(graph, inserted, _aten.clone.default, (inserted,), options)
            copy.meta["val"], views = before, {}
        node.meta["val"] = now
        _note(views)


def _inserted(
    graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> fx.Node:
    """Inserts a call that takes a node, and replaces the node for all other users."""
    with graph.inserting_after(node):
        made = graph.call_function(target, args, kwargs)
    node.replace_all_uses_with(made, lambda user: user is not made)
    return made


def is_view(node: fx.Node) -> bool:
    """Whether a node is a view of its only tensor argument: an operator's result, or an element of one."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args or node.all_input_nodes != [node.args[0]]:
        return False
    if node.target is _aten._unsafe_view.default:  # its schema has no alias, for autograd's sake
        return True
    first = node.target._schema.arguments[0].alias_info
    return first is not None and not first.is_write


def base_of(node: fx.Node) -> fx.Node:
    """The value whose memory a view shows; any other value itself."""
    while is_view(node):
        (node,) = node.all_input_nodes
    return node


def _source(matrix: Any) -> fx.Node | None:
    """The node that a matrix is a view of, where the views keep rows whole; the matrix itself if it is no such view."""
    node = matrix
    while isinstance(node, fx.Node) and node.target in _SAME_ROWS:
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _begins_anywhere(node: fx.Node) -> bool:
    """Whether a node's value is contiguous, with rows that are not aligned but long enough for a gap."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or not value.is_contiguous() or not value.numel():
        return False
    row = value.shape[-1] * value.dtype.itemsize
    return value.dtype.is_floating_point and 0 < -row % ALIGNED <= row * LONGER


def _is_loops(node: fx.Node) -> bool:
    """Whether a kernel of loops can compute a node."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False

    def value(one: fx.Node) -> Any:
        meta = one.meta.get("val")
        if not isinstance(meta, torch.Tensor):
            return meta
        shape, strides = tuple(meta.shape), tuple(meta.stride())
        return Value(Slot("made", one.name, shape, strides, meta.dtype), 0, shape, strides, meta.dtype, one.name)

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    loops = loops_of(node.target, args, kwargs, value(node))
    return loops is not None and rows_pay(loops)


def _views(node: fx.Node, value: Any) -> dict[fx.Node, Any] | None:
    """The values of all views of a node, if the node's value is `value`; None if one of the views is impossible."""
    found: dict[fx.Node, Any] = {}
    for user in filter(is_view, node.users):
        try:
            found[user] = user.target(value, *user.args[1:], **user.kwargs)  # type: ignore[operator]
        except (RuntimeError, ValueError):  # raised for tensors, and for fake tensors
            return None
        inner = _views(user, found[user])
        if inner is None:
            return None
        found |= inner
    return found


def _note(values: Mapping[fx.Node, Any]) -> None:
    """Sets the values of nodes (`meta["val"]`)."""
    for node, value in values.items():
        node.meta["val"] = value
