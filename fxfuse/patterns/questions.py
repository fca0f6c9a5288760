"""Questions about a value's rank, which a forward asks in an assertion (timm's BatchNormAct2d of what it is given), or
torch's own BatchNorm, for a subclass of it (capture.py makes a node of its check).

A value inside a region is never made, so that a question about it would keep the region from being fused. Pointwise
functions, linears and convolutions have the rank of what they are given: they are asked about that instead.
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

_METHODS: Final = frozenset({"dim", "ndimension"})
_NORMALISED: Final = (F.batch_norm, torch.batch_norm)
"""Functions whose further tensors are vectors."""


def rank_of_conv2d(x: torch.Tensor) -> int:
    """The rank of a convolution's result; raises for an x that torch's convolution refuses, in its words."""
    if isinstance(x, torch.Tensor) and x.dim() not in (3, 4):  # not while somebody traces the optimised model
        raise RuntimeError(
            f"Expected 3D (unbatched) or 4D (batched) input to conv2d, but got input of size: {list(x.shape)}"
        )
    return x.dim()


def ask_earlier(root: nn.Module, graph: fx.Graph) -> None:
    """Lets every question about a value's rank ask about what a region with that value would start from."""
    for node in list(graph.nodes):
        passed = _passed(root, node.args[0]) if asks_rank(node) else []
        if not passed:
            continue
        anchor = _anchor(root, passed[-1])
        source = passed[-1].all_input_nodes[0] if anchor is None or isinstance(anchor.x, Attribute) else anchor.x
        with graph.inserting_before(passed[-1]):  # now: later it may have been given another shape in place
            if anchor is not None and anchor.kind == "conv2d":
                asked = graph.call_function(rank_of_conv2d, (source,))
            else:
                asked = graph.create_node(node.op, node.target, (source, *node.args[1:]))
        asked.meta = dict(node.meta)
        node.replace_all_uses_with(asked)
        graph.erase_node(node)


def _passed(root: nn.Module, source: Any) -> list[fx.Node]:
    """The nodes that made `source`, latest first, each with the rank of what it is given; an anchor is the last."""
    passed: list[fx.Node] = []
    while isinstance(source, fx.Node):
        anchor = _anchor(root, source)
        earlier = _of_same_rank(root, source) if anchor is None else anchor.x
        if not isinstance(earlier, fx.Node):
            break
        passed.append(source)
        source = earlier
        if anchor is not None:
            break
    return passed


def asks_rank(node: fx.Node) -> bool:
    """Whether its value is the rank of its argument."""
    if node.op == "call_method":
        return node.target in _METHODS and len(node.args) == 1 and not node.kwargs
    if node.op != "call_function":
        return False
    return node.target is rank_of_conv2d or (node.target is getattr and tuple(node.args[1:]) == ("ndim",))


def _anchor(root: nn.Module, node: fx.Node) -> Anchor | None:
    try:
        return find_anchor(root, node)
    except Rejected:
        return None


def _of_same_rank(root: nn.Module, node: fx.Node) -> fx.Node | None:
    """The argument of a node that surely has its result's rank, of a pointwise function of one tensor."""
    if not node.all_input_nodes:
        return None
    first = node.all_input_nodes[0]
    if is_nothing(root, node):
        return first
    if node.op == "call_module":
        is_normalised = type(root.get_submodule(str(node.target))) in BATCH_NORMS
    else:
        is_normalised = node.op == "call_function" and ops.function_of(node.target) in _NORMALISED
    if is_normalised or (spelling(root, node) is not None and len(node.all_input_nodes) == 1):
        return first
    return None
