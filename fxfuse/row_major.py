"""Makes tokens contiguous once, where an image becomes a matrix whose columns are contiguous.

`conv(x).flatten(2).transpose(1, 2)` begins most vision transformers. If nothing that follows makes it contiguous,
torch's pointwise operators keep that order of dimensions, from one residual to the next. Then each LayerNorm and linear
of the model copies what it reads:

    image ─ conv ─ flatten ─ transpose ─┬─ layer_norm ─ … ─ add ─┬─ layer_norm ─ … ─ add ─ …
                                        └────────────────────────┘

The matrix is copied at its beginning, if no value that leaves the graph can have strides that depend on its own. (Where
the convolution works in channels_last the matrix is contiguous already, and `contiguous` copies nothing.)
"""

from __future__ import annotations

from typing import Final

import torch
from torch import fx, nn

from fxfuse import functional
from fxfuse.hooks import has_hooks
from fxfuse.patterns.anchors import noted
from fxfuse.patterns.layouts import forgets, is_contiguous_copy, is_never_contiguous, is_pool, name_of, role_of
from fxfuse.patterns.mutation import Mutations, asks_shape, spelling
from fxfuse.patterns.values import is_nothing

_PASSING_ON: Final = frozenset(
    {"permute", "transpose", "swapaxes", "movedim", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze",
     "getitem", "slice", "chunk", "split", "unbind", "narrow", "select", "expand", "cat", "stack", "roll", "pad",
     "matmul", "bmm", "scaled_dot_product_attention", "softmax", "mean", "sum", "amax", "amin", "conv2d", "max_pool2d",
     "avg_pool2d", "adaptive_avg_pool2d", "clone"}
)  # fmt: skip
"""Names of operations whose values do not depend on the strides of their inputs, but whose result's strides may."""
_PASSING_ON_MODULES: Final = (
    nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.BatchNorm2d, nn.Softmax, nn.Flatten,
)  # fmt: skip
_OURS: Final = frozenset({functional.pointwise, functional.linear, functional.layer_norm, functional.conv2d})
FEWEST: Final = 2
"""The least number of readers that would copy the matrix, for one copy to pay."""


def make_tokens_contiguous(root: nn.Module, graph: fx.Graph) -> None:
    """Inserts `contiguous` into `graph`, whose regions are fused already."""
    mutations = Mutations(root, graph)
    written = frozenset().union(*mutations.visible())
    for value in [node for node in graph.nodes if is_never_contiguous(node) and _is_of_image(root, node)]:
        followers = _followers(root, value)
        if followers is None or any(mutations.memory(node) & written for node in followers):
            continue
        readers = [user for node in followers for user in node.users if _copies(root, node, user)]
        if len(readers) >= FEWEST:
            with graph.inserting_after(value):
                copy = graph.call_method("contiguous", (value,))
            value.replace_all_uses_with(copy, lambda user, copy=copy: user is not copy)
            for node in followers:
                if _is_view(node):  # with the new strides a view may be impossible
                    node.target = "reshape" if node.op == "call_method" else torch.ops.aten.reshape.default


def _is_of_image(root: nn.Module, value: fx.Node) -> bool:
    """Whether `value` permutes an image that was convolved or pooled.

    Images that are made of tokens are already suitable: they are in channels_last.
    """
    source = next(iter(value.all_input_nodes), None)
    while source is not None:
        role = role_of(root, source)
        if role is not None and (role.is_convolution or is_pool(root, source)):
            return True
        if role is None and name_of(source) not in ("flatten", "reshape", "view"):
            return False
        source = next(iter(source.all_input_nodes if role is None else role.inputs), None)
    return False


def _followers(root: nn.Module, value: fx.Node) -> list[fx.Node] | None:
    """`value` and all nodes whose strides may depend on its own; None if something outside might see these strides."""
    followers = {value: None}
    waiting = [value]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user in followers or _is_end(root, node, user):
                continue
            if is_contiguous_copy(user) and is_never_contiguous(node) and node is not value:
                continue  # a copy whatever the strides, and its result does not depend on them
            if not _passes_on(root, user):
                return None
            followers[user] = None
            waiting.append(user)
    return list(followers)


def _is_end(root: nn.Module, node: fx.Node, user: fx.Node) -> bool:
    """Whether the result of `user` does not depend on the strides of `node`."""
    return asks_shape(user) or _is_cat_of_matrices(user) or _copies(root, node, user)


def _is_cat_of_matrices(user: fx.Node) -> bool:
    """Whether `user` concatenates tensors of three dimensions. Its result is then not in channels_last."""
    if name_of(user) != "cat" or not user.args or not isinstance(user.args[0], list | tuple):
        return False
    return any(isinstance(arg, fx.Node) and _rank(arg) == 3 for arg in user.args[0])


def _rank(node: fx.Node) -> int | None:
    """The number of dimensions of a node's value; None if it is not known."""
    value = noted(node)
    if isinstance(value, torch.Tensor):
        return value.dim()
    first = node.args[0] if node.args else None
    if is_never_contiguous(node) and isinstance(first, fx.Node):
        return 3 if name_of(first) == "flatten" and first.args[1:] == (2,) else _rank(first)
    return None


def _copies(root: nn.Module, node: fx.Node, user: fx.Node) -> bool:
    """Whether `user` makes `node` contiguous before it reads it."""
    is_one = user.op == "call_module" or user.target in _OURS or name_of(user) in ("linear", "layer_norm")
    return is_one and forgets(root, node, user)


def _passes_on(root: nn.Module, node: fx.Node) -> bool:
    """Whether strides of its inputs change nothing in a node's result but its strides."""
    if node.op not in ("call_module", "call_function", "call_method") or "out" in node.kwargs:
        return False
    module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
    if module is not None and has_hooks(module):
        return False
    if is_nothing(root, node) or node.target in _OURS or type(module) in _PASSING_ON_MODULES:
        return True
    found = spelling(root, node)
    if found is not None:
        return not found.in_place
    return _is_view(node) or (module is None and name_of(node) in _PASSING_ON)


def _is_view(node: fx.Node) -> bool:
    """Whether a node is x.view(…) to another shape."""
    if node.op == "call_function":
        return node.target is torch.ops.aten.view.default
    others = node.args[1:]
    return node.op == "call_method" and node.target == "view" and all(isinstance(a, int | fx.Node) for a in others)
