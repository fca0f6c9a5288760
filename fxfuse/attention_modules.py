"""torch.nn's modules with attention, as torch.fx can trace them: their products become regions like any other.

torch's forwards ask for the rank of what they are given and for the values of masks, and no proxy knows those. These
compute the same for every rank. They are torch's forwards without fast paths (single operators, of whose products no
kernel of fxfuse could be one). What they do not cover stays a node, which runs torch's forward:

- masks of padding: torch's encoder, without gradients, returns zeros where they hide something;
- dropout of attention in training: the same random numbers need the same operator on the same strides;
- encoder layers with gelu whose fast path computes it by tanh (on a GPU), and so something else;
- attention whose result the caller may see as it lies in memory: torch's forward has the length before the batch there.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import fx, nn
from torch.nn import functional as F

from fxfuse.hooks import has_hooks

Forward = Callable[..., Any]

_GELU: Final = 2
"""nn.TransformerEncoderLayer's mark for an activation by gelu."""


def traceable(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Forward | None:
    """A forward without arguments, which computes module(*args, **kwargs) and can be traced; None if there is none."""
    made = _FORWARDS.get(type(module))
    if made is None or "forward" in vars(module) or any(map(has_hooks, module.modules())):
        return None
    try:
        given = inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError:  # torch says it better
        return None
    given.apply_defaults()
    return made(module, given.arguments)


def _attention(module: Any, given: Mapping[str, Any]) -> Forward | None:
    query, key, value = (given[name] for name in ("query", "key", "value"))
    mask, is_causal = given["attn_mask"], given["is_causal"]
    is_usual = module._qkv_same_embed_dim and module.bias_k is None and not module.add_zero_attn
    is_refused = is_causal and mask is None  # by torch
    if given["key_padding_mask"] is not None or is_refused or not is_usual or (module.training and module.dropout > 0):
        return None

    def forward() -> tuple[Any, Any]:
        q, k, v = _projected(module, query, key, value)
        weights = None
        if given["need_weights"]:
            scores = (q * math.sqrt(1.0 / module.head_dim)) @ k.transpose(-2, -1)
            weights = torch.softmax(scores if mask is None else scores + as_scores(mask, q), -1)
            attended = weights @ v
        elif is_causal:  # the mask says the same
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = None if mask is None else as_scores(mask, q)
            attended = F.scaled_dot_product_attention(q, k, v, scores)
        attended = attended.transpose(-3, -2) if module.batch_first else attended.movedim(-2, 0)
        result = F.linear(attended.flatten(-2), module.out_proj.weight, module.out_proj.bias)
        if weights is not None and given["average_attn_weights"]:
            weights = weights.mean(-3)
        return result, weights

    return forward


@fx.wrap
def as_scores(mask: torch.Tensor, q: torch.Tensor) -> Any:
    """What a mask of nn.MultiheadAttention's adds to the scores of queries (..., heads, length, features).

    Args:
        mask: (length, length of keys), or one for each head of each item of the batch; bool (True hides) or floating.
    """
    scores: Any = F._canonical_mask(mask, "attn_mask", None, "", q.dtype, check_other=False)
    if scores.dim() == 3 and q.dim() == 4:
        return scores.unsqueeze(0) if len(scores) == 1 else scores.unflatten(0, (-1, q.size(1)))
    return scores


@fx.wrap
def keys_for(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: int) -> torch.Tensor:
    """`key`, if it and `value` suit `query`. Otherwise torch's operators might broadcast what its forward refuses.

    Args:
        batch: the dimension of the batch, if there is one.
    """
    is_batched = query.dim() == 3
    if key.shape != value.shape or query.dim() != key.dim() or (is_batched and query.size(batch) != key.size(batch)):
        shapes = [tuple(each.shape) for each in (query, key, value)]
        raise RuntimeError(f"attention gets query, key and value of the shapes {shapes}, which do not fit together")
    return key


def _projected(module: Any, query: Any, key: Any, value: Any) -> list[Any]:
    """The heads' queries, keys and values, each (..., heads, length, features of a head).

    Those of the same tensor are one product.
    """
    size, weight, bias = module.embed_dim, module.in_proj_weight, module.in_proj_bias
    if query is key and key is value:
        shared = [(query, 3)]
    else:
        checked = keys_for(query, key, value, 0 if module.batch_first else 1)
        shared = [(query, 1), (checked, 2)] if key is value else [(query, 1), (checked, 1), (value, 1)]
    found: list[Any] = []
    for x, count in shared:
        if count == 3:
            product = F.linear(x, weight, bias)
        else:
            rows = slice(len(found) * size, (len(found) + count) * size)
            product = F.linear(x, weight[rows], None if bias is None else bias[rows])
        heads = product.unflatten(-1, (count, module.num_heads, module.head_dim))
        found += [heads.select(-3, number) for number in range(count)]
    return [one.transpose(-3, -2) if module.batch_first else one.movedim(0, -2) for one in found]


def _encoder_layer(module: Any, given: Mapping[str, Any]) -> Forward | None:
    has_other_gelu = module.activation_relu_or_gelu == _GELU and not module.training and module.self_attn.batch_first
    if given["src_key_padding_mask"] is not None or has_other_gelu:
        return None

    def forward() -> Any:
        x, mask = given["src"], {"attn_mask": given["src_mask"], "is_causal": given["is_causal"]}
        if module.norm_first:
            x = x + module._sa_block(module.norm1(x), key_padding_mask=None, **mask)
            return x + module._ff_block(module.norm2(x))
        x = module.norm1(x + module._sa_block(x, key_padding_mask=None, **mask))
        return module.norm2(x + module._ff_block(x))

    return forward


def _encoder(module: Any, given: Mapping[str, Any]) -> Forward | None:
    if given["src_key_padding_mask"] is not None:
        return None

    def forward() -> Any:
        x = given["src"]
        for layer in module.layers:  # torch asks the mask's values whether it is causal, if it is not told
            x = layer(x, src_mask=given["mask"], is_causal=bool(given["is_causal"]), src_key_padding_mask=None)
        return x if module.norm is None else module.norm(x)

    return forward


def _decoder_layer(module: Any, given: Mapping[str, Any]) -> Forward | None:
    return lambda: module.forward(**given)


def _decoder(module: Any, given: Mapping[str, Any]) -> Forward | None:
    others = {**given, "tgt_is_causal": bool(given["tgt_is_causal"])}
    first = others.pop("tgt")

    def forward() -> Any:
        x = first
        for layer in module.layers:
            x = layer(x, **others)
        return x if module.norm is None else module.norm(x)

    return forward


def seen_by_caller(graph: fx.Graph, root: nn.Module, results: Mapping[fx.Node, nn.Module]) -> set[nn.Module]:
    """The modules whose results may decide the strides of the graph's.

    Pointwise operations and views pass strides on; of several operands the first one decides.

    Args:
        results: the nodes of modules' results.
    """
    found: set[nn.Module] = set()
    waiting = [node for node in graph.nodes if node.op == "output"]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node in results:
            found.add(results[node])
        module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        before = node.all_input_nodes
        if isinstance(module, _NEW_STRIDES) or node.target in _NEW_STRIDES_OF:
            before = []
        elif node.target in _SUMS and isinstance(node.args[0], fx.Node) and node.args[0].op != "get_attr":
            before = [node.args[0]]
        waiting += [each for each in before if each not in seen]
        seen.update(before)
    return found


_NEW_STRIDES: Final = (nn.Linear, nn.LayerNorm, nn.Embedding)
"""Modules whose results lie in memory in the order of their dimensions."""
_NEW_STRIDES_OF: Final = (F.linear, F.layer_norm, F.scaled_dot_product_attention, torch.matmul, operator.matmul)
_SUMS: Final = (operator.add, operator.iadd, torch.add)


def _transformer(module: Any, given: Mapping[str, Any]) -> Forward | None:
    def forward() -> Any:
        memory = module.encoder(
            given["src"], mask=given["src_mask"], src_key_padding_mask=given["src_key_padding_mask"],
            is_causal=given["src_is_causal"],
        )  # fmt: skip
        names = ("tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask", "tgt_is_causal",
                 "memory_is_causal")  # fmt: skip
        return module.decoder(given["tgt"], memory, **{name: given[name] for name in names})

    return forward


_FORWARDS: Final[Mapping[type[nn.Module], Callable[[Any, Mapping[str, Any]], Forward | None]]] = {
    nn.MultiheadAttention: _attention,
    nn.TransformerEncoderLayer: _encoder_layer,
    nn.TransformerEncoder: _encoder,
    nn.TransformerDecoderLayer: _decoder_layer,
    nn.TransformerDecoder: _decoder,
    nn.Transformer: _transformer,
}
"""By exact class: a subclass may have a forward of its own, which is traced as any other."""
