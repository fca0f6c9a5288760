"""Attention of torch.nn's modules in terms of its parts: their products become regions like any other.

torch's forwards ask for the rank of what they are given and for the values of masks, and no proxy knows those. The
forwards here compute the same for every rank, and torch.fx can trace them (`traceable`). They have no fast paths: these
are single operators, of whose products no kernel of fxfuse could be one. Dynamo's graphs call single functions for
attention and for encoder layers, which are replaced by their parts (`take_apart`). What neither covers is torch's:

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
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import fx, nn
from torch.nn import functional as F

from fxfuse.hooks import has_hooks
from fxfuse.patterns.anchors import noted

Given = Mapping[str, Any]
"""The arguments of a call, by name."""


@dataclass(frozen=True)
class _Attention:
    """What torch computes attention with. Tensors are proxies."""

    size: int
    """Features of an item."""
    heads: int
    in_weight: Any
    """(3 * size, size): the projections to queries, keys and values."""
    in_bias: Any
    out_weight: Any
    out_bias: Any
    batch_first: bool

    def of(
        self, query: Any, key: Any, value: Any, mask: Any = None, is_causal: bool = False, weighs: bool = False,
        averages: bool = True,
    ) -> tuple[Any, Any]:  # fmt: skip
        """The result; and, if the call `weighs`, the weights of keys: each head's, or their averages.

        The result is not made of the weights, so that they cost nothing where nobody reads them. But with a mask it is:
        a query from which all keys are hidden is NaN then, as torch has it.
        """
        q, k, v = self._projected(query, key, value)
        weights = None
        added = None if mask is None or (is_causal and not weighs) else _node(as_scores, mask, q)
        if weighs:
            scores = (q * math.sqrt(self.heads / self.size)) @ k.transpose(-2, -1)
            weights = torch.softmax(scores if added is None else scores + added, -1)
        if weights is not None and added is not None:
            attended = weights @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, added, is_causal=is_causal and added is None)
        attended = attended.transpose(-3, -2) if self.batch_first else attended.movedim(-2, 0)
        result = F.linear(attended.flatten(-2), self.out_weight, self.out_bias)
        return result, weights.mean(-3) if weights is not None and averages else weights

    def _projected(self, query: Any, key: Any, value: Any) -> list[Any]:
        """The heads' queries, keys and values, each (..., heads, length, features of a head).

        Those of the same tensor are one product.
        """
        if query is key and key is value:
            shared = [(query, 3)]
        else:
            checked = _node(keys_for, query, key, value, 0 if self.batch_first else 1)
            shared = [(query, 1), (checked, 2)] if key is value else [(query, 1), (checked, 1), (value, 1)]
        found: list[Any] = []
        for x, count in shared:
            weight, bias = self.in_weight, self.in_bias
            if count < 3:
                rows = slice(len(found) * self.size, (len(found) + count) * self.size)
                weight, bias = weight[rows], None if bias is None else bias[rows]
            product = F.linear(x, weight, bias).unflatten(-1, (count, self.heads, self.size // self.heads))
            found += [product.select(-3, number) for number in range(count)]
        return [one.transpose(-3, -2) if self.batch_first else one.movedim(0, -2) for one in found]


def _node(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function that is one node, since it asks for ranks and dtypes. Some of `args` are proxies."""
    tracer = next(arg.tracer for arg in args if isinstance(arg, fx.Proxy))
    return tracer.create_proxy("call_function", function, args, {})


def erase_unread(node: fx.Node) -> None:
    """Erases a node that computes weights of keys, if nobody reads it, and then what only it has read."""
    if not node.users and node.op in ("call_function", "call_method"):
        before = node.all_input_nodes
        node.graph.erase_node(node)
        for each in before:
            erase_unread(each)


def as_scores(mask: torch.Tensor, q: torch.Tensor) -> Any:
    """What a mask of nn.MultiheadAttention's adds to the scores of queries (..., heads, length, features).

    Args:
        mask: (length, length of keys), or one for each head of each item of the batch; bool (True hides) or floating.
    """
    scores: Any = F._canonical_mask(mask, "attn_mask", None, "", q.dtype, check_other=False)
    if scores.dim() == 3 and q.dim() == 4:
        return scores.unsqueeze(0) if len(scores) == 1 else scores.unflatten(0, (-1, q.size(1)))
    return scores


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


# --------------------------------------------------------------------------------------------------- modules

Forward = Callable[[], Any]


def traceable(module: nn.Module, args: tuple[Any, ...], kwargs: Given) -> Forward | None:
    """A function that computes module(*args, **kwargs) and can be traced; None if there is none."""
    made = _FORWARDS.get(type(module))
    if made is None or "forward" in vars(module) or any(map(has_hooks, module.modules())):
        return None
    try:
        given = inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError:  # torch says it better
        return None
    given.apply_defaults()
    return made(module, given.arguments)


def _attention(module: Any, given: Given) -> Forward | None:
    is_usual = module._qkv_same_embed_dim and module.bias_k is None and not module.add_zero_attn
    if not is_usual or _is_left(given, module.dropout if module.training else 0.0):
        return None
    attention = _Attention(
        module.embed_dim, module.num_heads, module.in_proj_weight, module.in_proj_bias, module.out_proj.weight,
        module.out_proj.bias, module.batch_first,
    )  # fmt: skip
    return lambda: attention.of(*map(given.__getitem__, _OF_ATTENTION))


_OF_ATTENTION: Final = ("query", "key", "value", "attn_mask", "is_causal", "need_weights", "average_attn_weights")
"""The arguments of `_Attention.of`, as torch names them."""


def _is_left(given: Given, dropout: float) -> bool:
    """Whether a call of attention is left to torch, for its arguments."""
    is_refused = given["is_causal"] and given["attn_mask"] is None  # by torch
    return given["key_padding_mask"] is not None or is_refused or dropout > 0


_GELU: Final = 2
"""nn.TransformerEncoderLayer's mark for an activation by gelu."""


def _encoder_layer(module: Any, given: Given) -> Forward | None:
    has_other_gelu = module.activation_relu_or_gelu == _GELU and not module.training and module.self_attn.batch_first
    if given["src_key_padding_mask"] is not None or has_other_gelu:
        return None
    mask = {"attn_mask": given["src_mask"], "is_causal": given["is_causal"], "key_padding_mask": None}
    return lambda: _residuals(
        given["src"], module.norm_first, lambda x: module._sa_block(x, **mask), module._ff_block, module.norm1,
        module.norm2,
    )  # fmt: skip


def _residuals(
    x: Any, norm_first: bool, attended: Callable[[Any], Any], fed: Callable[[Any], Any],
    norm1: Callable[[Any], Any], norm2: Callable[[Any], Any],
) -> Any:  # fmt: skip
    """An encoder layer of attention and linears, given as functions."""
    if norm_first:
        x = x + attended(norm1(x))
        return x + fed(norm2(x))
    x = norm1(x + attended(x))
    return norm2(x + fed(x))


def _encoder(module: Any, given: Given) -> Forward | None:
    if given["src_key_padding_mask"] is not None:
        return None

    def forward() -> Any:
        x = given["src"]
        for layer in module.layers:  # torch asks the mask's values whether it is causal, if it is not told
            x = layer(x, src_mask=given["mask"], is_causal=bool(given["is_causal"]), src_key_padding_mask=None)
        return x if module.norm is None else module.norm(x)

    return forward


def _decoder_layer(module: Any, given: Given) -> Forward | None:
    return lambda: module.forward(**given)


def _decoder(module: Any, given: Given) -> Forward | None:
    others = {**given, "tgt_is_causal": bool(given["tgt_is_causal"])}
    first = others.pop("tgt")

    def forward() -> Any:
        x = first
        for layer in module.layers:
            x = layer(x, **others)
        return x if module.norm is None else module.norm(x)

    return forward


def _transformer(module: Any, given: Given) -> Forward | None:
    def forward() -> Any:
        memory = module.encoder(
            given["src"], mask=given["src_mask"], src_key_padding_mask=given["src_key_padding_mask"],
            is_causal=given["src_is_causal"],
        )  # fmt: skip
        names = ("tgt_mask", "memory_mask", "tgt_key_padding_mask", "memory_key_padding_mask", "tgt_is_causal",
                 "memory_is_causal")  # fmt: skip
        return module.decoder(given["tgt"], memory, **{name: given[name] for name in names})

    return forward


_FORWARDS: Final[Mapping[type[nn.Module], Callable[[Any, Given], Forward | None]]] = {
    nn.MultiheadAttention: _attention,
    nn.TransformerEncoderLayer: _encoder_layer,
    nn.TransformerEncoder: _encoder,
    nn.TransformerDecoderLayer: _decoder_layer,
    nn.TransformerDecoder: _decoder,
    nn.Transformer: _transformer,
}
"""By exact class: a subclass may have a forward of its own, which is traced as any other."""


# --------------------------------------------------------------------------------------------------- Dynamo's graphs


def take_apart(graph: fx.Graph, root: nn.Module) -> None:
    """Replaces torch's functions for attention and encoder layers in one of Dynamo's graphs by their parts."""
    found = [
        node for node in graph.nodes
        if node.op == "call_function" and node.target in _FUNCTIONS and node.args and _is_batched(node.args[0])
    ]  # fmt: skip
    results = {user: node for node in found for user in node.users if _is_item(user, 0)}
    results.update((node, node) for node in found if node.target is not F.multi_head_attention_forward)
    visible = seen_by_caller(graph, root, results) if found else set()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies: dict[fx.Node, fx.Proxy] = {}

    def proxy(node: fx.Node) -> Any:
        return proxies.setdefault(node, fx.Proxy(node, tracer))

    for node in found:
        names, parts = _FUNCTIONS[node.target]
        given = dict.fromkeys(names) | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        if node in visible or given.keys() != set(names):  # of other releases
            continue
        before = node.prev
        with graph.inserting_before(node):
            made = parts(node, given, proxy)
        if made is None:
            continue
        while before.next is not node:
            before = before.next
            before.meta["stack_trace"] = node.meta.get("stack_trace")  # the model's line
        for user, result in made.items():
            if result is not None:
                user.replace_all_uses_with(result.node)
            graph.erase_node(user)
        if node not in made:
            graph.erase_node(node)


Made = Mapping[fx.Node, Any]
"""By node: the proxy that replaces it. None for a node that nobody uses."""


def _of_attention(node: fx.Node, given: dict[str, Any], proxy: Callable[[fx.Node], Any]) -> Made | None:
    """The parts of F.multi_head_attention_forward, which has the length before the batch."""
    inputs = [given[name] for name in ("query", "key", "value")]
    absent = ("bias_k", "bias_v", "static_k", "static_v", "add_zero_attn", "use_separate_proj_weight")
    dropout = given["dropout_p"] if given["training"] is not False else 0.0
    given["average_attn_weights"] = given["average_attn_weights"] is not False
    given["need_weights"] = given["need_weights"] is not False
    given["is_causal"] = bool(given["is_causal"])
    is_usual = not any(given[name] for name in absent) and type(dropout) is float
    if not is_usual or _is_left(given, dropout) or not all(_is_item(user, 0, 1) for user in node.users):
        return None
    is_read = any(_is_item(user, 1) and user.users for user in node.users)
    if is_read and not given["need_weights"]:
        return None
    # as it came, the batch is first, and turned only for this function
    turned = [_turned(each) for each in inputs]
    batch_first = all(each is not None for each in turned)
    given.update(zip(("query", "key", "value"), turned if batch_first else inputs, strict=True))
    values = {name: fx.node.map_arg(value, proxy) for name, value in given.items()}
    attention = _Attention(
        values["embed_dim_to_check"], values["num_heads"], values["in_proj_weight"], values["in_proj_bias"],
        values["out_proj_weight"], values["out_proj_bias"], batch_first,
    )  # fmt: skip
    result, weights = attention.of(*map(values.__getitem__, _OF_ATTENTION))
    if weights is not None and not is_read:
        erase_unread(weights.node)
        weights = None
    both = (result.transpose(0, 1) if batch_first else result), weights
    return {user: both[_is_item(user, 1)] for user in node.users}


def _of_encoder_layer(node: fx.Node, given: dict[str, Any], proxy: Callable[[fx.Node], Any]) -> Made | None:
    """The parts of torch's operator for an encoder layer, which has the batch first."""
    if given["mask"] is not None or given["use_gelu"]:
        return None
    values: dict[str, Any] = {name: fx.node.map_arg(value, proxy) for name, value in given.items()}
    attention = _Attention(
        values["embed_dim"], values["num_heads"], values["qkv_weight"], values["qkv_bias"], values["proj_weight"],
        values["proj_bias"], batch_first=True,
    )  # fmt: skip

    def norm(number: int) -> Callable[[Any], Any]:
        weight, bias = values[f"norm_weight_{number}"], values[f"norm_bias_{number}"]
        return lambda x: F.layer_norm(x, (attention.size,), weight, bias, values["eps"])

    def fed(x: Any) -> Any:
        x = F.relu(F.linear(x, values["ffn_weight_1"], values["ffn_bias_1"]))
        return F.linear(x, values["ffn_weight_2"], values["ffn_bias_2"])

    is_first = values["norm_first"]
    return {node: _residuals(values["src"], is_first, lambda x: attention.of(x, x, x)[0], fed, norm(1), norm(2))}


def _is_batched(node: Any) -> bool:
    value = noted(node)
    return isinstance(value, torch.Tensor) and value.dim() == 3


def _is_item(node: fx.Node, *numbers: int) -> bool:
    return node.target is operator.getitem and node.args[1] in numbers


def _turned(node: fx.Node) -> Any:
    """The node of which a node is the transpose of its first two dimensions; None if it is none."""
    is_transpose = node.op == "call_method" and node.target == "transpose" and not node.kwargs
    return node.args[0] if is_transpose and {*node.args[1:]} == {0, 1} else None


_FUNCTIONS: Final[Mapping[Any, tuple[tuple[str, ...], Callable[..., Made | None]]]] = {
    F.multi_head_attention_forward: (
        tuple(inspect.signature(F.multi_head_attention_forward).parameters), _of_attention,
    ),
    torch._transformer_encoder_layer_fwd: (
        tuple(each.name for each in torch.ops.aten._transformer_encoder_layer_fwd.default._schema.arguments),
        _of_encoder_layer,
    ),
}  # fmt: skip
"""torch's functions, with the names of their arguments."""


# --------------------------------------------------------------------------------------------------- strides

_Result = TypeVar("_Result")


def seen_by_caller(graph: fx.Graph, root: nn.Module, results: Mapping[fx.Node, _Result]) -> set[_Result]:
    """What the nodes among `results` stand for that may decide the strides of the graph's results.

    Pointwise operations and views pass strides on; of several operands the first one decides.
    """
    found: set[_Result] = set()
    waiting = [node for node in graph.nodes if node.op == "output"]
    visited = set(waiting)
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
        waiting += [each for each in before if each not in visited]
        visited.update(before)
    return found


_NEW_STRIDES: Final = (nn.Linear, nn.LayerNorm, nn.Embedding)
"""Modules whose results lie in memory in the order of their dimensions."""
_NEW_STRIDES_OF: Final = (
    F.linear, F.layer_norm, F.scaled_dot_product_attention, torch.matmul, operator.matmul, *_FUNCTIONS,
)  # fmt: skip
_SUMS: Final = (operator.add, operator.iadd, torch.add)
