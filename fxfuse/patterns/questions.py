"""Asks questions about a value's rank about an earlier value, so that they keep no region from being fused.

A value inside a region is never made, so nobody may ask for its rank. But pointwise functions, linears and convolutions
keep the rank of their input, so the input is asked instead. The questions come from assertions in a forward (timm's
BatchNormAct2d about its input), or from torch's own BatchNorm, in a subclass (capture.py makes a node of its check).
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxfuse import ops
from fxfuse.ops import Rejected
from fxfuse.patterns.anchors import Anchor, Attribute, find_anchor
from fxfuse.patterns.mutation import spelling
from fxfuse.patterns.values import BATCH_NORMS, is_nothing
from fxfuse.problem import CONVOLUTIONS

_METHODS: Final = frozenset({"dim", "ndimension"})
_NORMALISED: Final = (F.batch_norm, torch.batch_norm)
"""Functions whose further tensors are vectors."""


def rank_of_convolution(x: torch.Tensor, moved: int) -> int:
    """The rank of the result of a convolution whose filters move along `moved` dimensions.

    Raises RuntimeError, in torch's words, for an x that torch's convolution refuses.
    """
    single, batched = moved + 1, moved + 2
    if isinstance(x, torch.Tensor) and x.dim() not in (
        single,
        batched,
    ):  # not while somebody traces the optimised model
        raise RuntimeError(
            f"Expected {single}D (unbatched) or {batched}D (batched) input to conv{moved}d, but got input of size: "
            f"{list(x.shape)}"
        )
    return x.dim()


def rank_of(value: Any) -> int:
    """The rank of a tensor; 0 for a number."""
    return 0 if isinstance(value, bool | int | float | complex) else value.dim()


def rank_of_all(*ranks: int) -> int:
    """The rank that tensors of these ranks broadcast to."""
    return max(ranks)


def ask_earlier(root: nn.Module, graph: fx.Graph) -> None:
    """Moves every question about a value's rank to the values that a region with it would start from."""
    for node in list(graph.nodes):
        source = node.args[0] if asks_rank(node) else None
        if not isinstance(source, fx.Node) or not _sources(root, source):
            continue
        asked = _asked(root, graph, node, source)
        node.replace_all_uses_with(asked)
        graph.erase_node(node)


def _asked(root: nn.Module, graph: fx.Graph, question: fx.Node, value: fx.Node) -> fx.Node:
    """A node that computes the rank of `value` from the ranks of its `_sources` (at least one), as `question` asks.

    The node stands before `value`, since a source may get another shape in place later.
    """
    sources, anchor = _sources(root, value), _anchor(root, value)
    ranks: list[fx.Node] = []
    for source in sources:
        if anchor is None and _sources(root, source):
            ranks.append(_asked(root, graph, question, source))
            continue
        with graph.inserting_before(value):
            if anchor is not None and anchor.kind in CONVOLUTIONS:
                ranks.append(graph.call_function(rank_of_convolution, (source, CONVOLUTIONS[anchor.kind])))
            elif len(sources) > 1:
                ranks.append(graph.call_function(rank_of, (source,)))
            else:
                ranks.append(graph.create_node(question.op, question.target, (source, *question.args[1:])))
    asked = ranks[0]
    if len(ranks) > 1:
        with graph.inserting_before(value):
            asked = graph.call_function(rank_of_all, tuple(ranks))
    for rank in (*ranks, asked):
        rank.meta = dict(question.meta)
    return asked


def _sources(root: nn.Module, value: fx.Node) -> list[fx.Node]:
    """The values whose ranks decide the rank of `value`; none if no region could compute `value`."""
    anchor = _anchor(root, value)
    if anchor is None:
        return _of_same_rank(root, value)
    first = value.all_input_nodes[:1] if isinstance(anchor.x, Attribute) else [anchor.x]
    return [source for source in first if isinstance(source, fx.Node)]


def asks_rank(node: fx.Node) -> bool:
    """Whether the value of `node` is the rank of its argument."""
    if node.op == "call_method":
        return node.target in _METHODS and len(node.args) == 1 and not node.kwargs
    if node.op != "call_function":
        return False
    return node.target is rank_of_convolution or (node.target is getattr and tuple(node.args[1:]) == ("ndim",))


def _anchor(root: nn.Module, node: fx.Node) -> Anchor | None:
    try:
        return find_anchor(root, node)
    except Rejected:
        return None


_OF_FIRST: Final = frozenset({"type_as", "prelu", "new_full"})
"""Rows of the op table whose further tensors do not change the result's shape."""


def _of_same_rank(root: nn.Module, node: fx.Node) -> list[fx.Node]:
    """The arguments of a pointwise function whose ranks decide the result's; none for other nodes."""
    if not node.all_input_nodes:
        return []
    first = node.all_input_nodes[:1]
    if is_nothing(root, node):
        return first
    if node.op == "call_module":
        is_normalised = type(root.get_submodule(str(node.target))) in BATCH_NORMS
    else:
        is_normalised = node.op == "call_function" and ops.function_of(node.target) in _NORMALISED
    found = spelling(root, node)
    if is_normalised or (found is not None and found.row.name in _OF_FIRST):
        return first
    return [] if found is None else list(node.all_input_nodes)
