"""Removes attention masks whose values the graph alone decides: all True, or the lower triangle.

In eager some models look at their mask, and leave it out if it hides nothing. They cannot look while Dynamo captures
them, so the graph makes a mask of nothing but numbers, at every call. torch's fastest kernels are for attention without
a mask, or with `is_causal`. For a mask expanded from one element, torch splits attention into products and a softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxfuse.patterns.anchors import noted
from fxfuse.patterns.mutation import Mutations
from fxfuse.patterns.numbers import erase_unused, value_of

_PARAMS: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def leave_out_masks(root: nn.Module, graph: fx.Graph) -> None:
    """Removes masks of attention that hide nothing, or only later positions (`is_causal`).

    This works only in Dynamo's graphs, whose nodes know their shapes: a mask of a wrong shape stays, and so its error.
    """
    calls = [node for node in graph.nodes if node.target is F.scaled_dot_product_attention and _mask_of(node)]
    if not calls:
        return
    mutations = Mutations(root, graph)
    found: dict[fx.Node, torch.Tensor | None] = {}
    for node in calls:
        mask = _mask_of(node)
        assert mask is not None
        if mask not in found:
            found[mask] = value_of(mask, mutations)
        value = found[mask]
        given = _without_mask(node, value) if value is not None and value.dtype == torch.bool else None
        if given is not None:
            node.args = tuple(given.pop(name) for name in _PARAMS[:3])
            node.kwargs = given
    erase_unused(mask for mask, value in found.items() if value is not None)


def _given(node: fx.Node) -> dict[str, Any]:
    return {**dict(zip(_PARAMS, node.args, strict=False)), **node.kwargs}


def _mask_of(node: fx.Node) -> fx.Node | None:
    given = _given(node)
    mask = given.get("attn_mask")
    drops = given.get("dropout_p", 0.0) != 0.0 or given.get("is_causal", False) is not False
    return None if drops or not isinstance(mask, fx.Node) else mask  # other kernels would drop other elements


def _without_mask(node: fx.Node, mask: torch.Tensor) -> dict[str, Any] | None:
    """The arguments of the same attention without its mask; None if the mask is needed or its shape may be wrong."""
    given = _given(node)
    query, key = (noted(given[name]) for name in ("query", "key"))
    if not isinstance(query, torch.Tensor) or not isinstance(key, torch.Tensor):
        return None
    sizes = (*query.shape[:-1], key.shape[-2])
    if not all(type(size) is int for size in sizes) or not _spreads(mask.shape, sizes):
        return None
    if mask.all():
        return {**given, "attn_mask": None}
    rows, columns = sizes[-2:]
    if rows != columns or mask.shape[-2:] != (rows, columns):
        return None
    triangle = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).tril()
    return {**given, "attn_mask": None, "is_causal": True} if (mask == triangle).all() else None


def _spreads(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a tensor of that shape broadcasts to these sizes."""
    own = sizes[len(sizes) - len(shape) :]
    return len(shape) <= len(sizes) and all(have in (1, want) for have, want in zip(shape, own, strict=True))
