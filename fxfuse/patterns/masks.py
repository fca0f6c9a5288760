"""Attention masks whose values the graph itself says: all True, or the lower triangle.

Models that look at their mask in eager, and leave it out if it hides nothing, cannot look while Dynamo captures them:
the graph makes a mask of nothing but numbers, at every call. torch has its fastest kernels for attention without one,
or with `is_causal`; for a mask that is expanded from one element it takes attention apart into products and a softmax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxfuse.patterns.anchors import noted
from fxfuse.patterns.mutation import Mutations

LARGEST: Final = 2**24
"""Elements of a mask that is looked at."""
_PARAMS: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def leave_out_masks(root: nn.Module, graph: fx.Graph) -> None:
    """Calls attention without masks that hide nothing, or nothing but what comes later.

    Only in Dynamo's graphs, whose nodes know their shapes: a mask of a wrong shape stays, and its error with it.
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
            found[mask] = _value(mask, mutations)
        value = found[mask]
        given = _without_mask(node, value) if value is not None else None
        if given is not None:
            node.args = tuple(given.pop(name) for name in _PARAMS[:3])
            node.kwargs = given
    for mask in found:
        for made in reversed(_made_of(mask)):
            if not made.users:
                graph.erase_node(made)


def _given(node: fx.Node) -> dict[str, Any]:
    return {**dict(zip(_PARAMS, node.args, strict=False)), **node.kwargs}


def _mask_of(node: fx.Node) -> fx.Node | None:
    given = _given(node)
    mask = given.get("attn_mask")
    drops = given.get("dropout_p", 0.0) != 0.0 or given.get("is_causal", False) is not False
    return None if drops or not isinstance(mask, fx.Node) else mask  # other kernels would drop other elements


def _without_mask(node: fx.Node, mask: torch.Tensor) -> dict[str, Any] | None:
    """The arguments of the same attention without its mask; None if it needs it, or if its shape may be wrong."""
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


# ----------------------------------------------------------------------------------------------- their values


class _Unknown(Exception):
    """What an operation computes depends on more than its arguments."""


class _Functions(TorchDispatchMode):
    """Refuses operators that write, draw random numbers, or leave memory as it is."""

    def __torch_dispatch__(
        self, func: Any, _: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name:
            raise _Unknown
        return func(*args, **(kwargs or {}))


def _made_of(mask: fx.Node) -> list[fx.Node]:
    """All that it is made of, and itself, in the order of the graph."""
    found: set[fx.Node] = set()
    waiting = [mask]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return [node for node in mask.graph.nodes if node in found]


def _value(mask: fx.Node, mutations: Mutations) -> torch.Tensor | None:
    """What it is at every call; None if that depends on anything but the graph."""
    known, nodes = noted(mask), _made_of(mask)
    if not isinstance(known, torch.Tensor) or not all(type(size) is int for size in known.shape):
        return None
    if known.numel() > LARGEST or not all(map(_is_torchs, nodes)):
        return None
    if mutations.between(-1, len(mutations.order), nodes, []):
        return None
    values: dict[fx.Node, Any] = {}
    try:
        with torch.no_grad(), _Functions():
            for node in nodes:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                function: Any = node.target
                if node.op == "call_method":
                    function = getattr(type(args[0]), str(node.target))
                values[node] = function(*args, **kwargs)
    except Exception:  # whatever torch, or a function of somebody else, raises: the call itself will do it again
        return None
    value = values[mask]
    return value if type(value) is torch.Tensor and value.dtype == torch.bool and value.numel() else None


def _is_torchs(node: fx.Node) -> bool:
    """Whether it calls a function of torch or Python's operators: `_Functions` sees all that those do."""
    home = (getattr(node.target, "__module__", None) or "torch").split(".")[0]
    return node.op == "call_method" or (node.op == "call_function" and home in ("torch", "_operator"))
