"""Records what a forward does to tensors without a proxy: those that it makes itself, and those in its attributes.

fx records operations on proxies. `torch.ones(8)`, `self.scale * 2` or `torch.rand(1).item()` have none and would be
computed once, while tracing, for all calls. `Recording` sees these calls, too, and makes nodes of them. The forward
gets real tensors, which answer for their shape and dtype. Asking one for its values ends the trace.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property

from fxfuse import ops
from fxfuse.state import RandomState

_METADATA: Final = frozenset(
    {"shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse",
     "is_quantized", "is_nested", "is_mkldnn", "itemsize", "nbytes", "names", "size", "dim", "ndimension", "numel",
     "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "element_size", "__len__",
     "storage_offset", "get_device", "type", "is_same_size", "result_type", "dim_order"}
)  # fmt: skip
"""Attributes, methods and functions that tracing allows on tensors: they do not depend on the tensors' values."""
_RESHAPING: Final = frozenset(
    {"resize_", "resize_as_", "set_", "t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_",
     "as_strided_", "rename_"}
)  # fmt: skip
"""Methods that change more of a tensor than its values: its shape, strides, memory or names."""
_ATTACHING: Final = frozenset(
    {"__set__", "__delete__", "backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
)
"""Methods that change something other than values, which a graph would not repeat."""
_UPDATING: Final = frozenset({"batch_norm", "instance_norm", "embedding", "embedding_bag", "native_batch_norm"})
"""Functions that may write into arguments without saying so in their name."""


class Recording(TorchFunctionMode):
    """A mode in which torch's calls on tensors become nodes of the tracer's graph, with proxies or without."""

    def __init__(self, tracer: fx.Tracer) -> None:
        super().__init__()
        self._tracer = tracer
        self._nodes: dict[int, tuple[torch.Tensor, fx.Node]] = {}
        self._made: dict[int, int] = {}  # the memory of tensors that the forward made, and how often it was written
        self._constant: set[int] = set()  # the memory of those that were made from constants only

    def node_of(self, tensor: torch.Tensor) -> fx.Node | None:
        """The node whose value `tensor` is, if the trace saw where it comes from."""
        with torch._C.DisableTorchFunction():
            written = self._made.get(_memory(tensor))
            if written is not None and tensor._version != written:
                raise fx.proxy.TraceError("a tensor that it made is overwritten in a way that a graph does not hold")
        return self._nodes.get(id(tensor), (None, None))[1]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = tuple(args), dict(kwargs or {})
        leaves = list(_leaves((args, kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        symbolic = any(isinstance(leaf, fx.Proxy) for leaf in leaves)
        if symbolic and not tensors:
            return func(*args, **kwargs)  # which fx records
        name = _name(func)
        if not symbolic and name in _METADATA:
            return func(*args, **kwargs)
        if name in _ATTACHING or isinstance(kwargs.get("out"), torch.Tensor):
            raise fx.proxy.TraceError(f"'{name}' changes a tensor in a way that a graph does not hold")
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise fx.proxy.TraceError(f"'{name}' draws from a generator of its own, which a graph does not hold")
        if _overwrites(func, name, args, kwargs):
            return self._overwrite(func, name, args, kwargs, symbolic)
        if symbolic:
            return self._tracer.proxy(self._node(func, args, kwargs))
        return self._compute(func, name, args, kwargs, tensors)

    def _overwrite(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], symbolic: bool
    ) -> Any:
        """A call that writes into its first argument. While tracing, only memory that the forward made is written."""
        target = args[0] if args else kwargs.get("input")
        if not isinstance(target, torch.Tensor):
            if symbolic:
                return func(*args, **kwargs)
            raise fx.proxy.TraceError(f"'{name}' overwrites several tensors, which a graph does not hold")
        own = _memory(target) in self._made
        if name in _RESHAPING and (symbolic or not own):
            raise fx.proxy.TraceError(f"'{name}' changes the shape of a tensor that is there before the call")
        node = self._node(func, args, kwargs)
        if symbolic or not all(self._is_constant(leaf) for leaf in _leaves((args, kwargs))):
            self._constant.discard(_memory(target))
        if own:
            if not symbolic:
                _without_drawing(func, args, kwargs)
            elif target.is_floating_point():
                target.detach().fill_(torch.nan)  # its values are unknown, and nobody may use them later
            self._made[_memory(target)] = target._version
        if name == "__setitem__":
            return None
        self._nodes[id(target)] = target, node
        return target

    def _compute(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:  # fmt: skip
        """The result of a call on real tensors, or on none. The graph computes it anew at every call."""
        if name in _UPDATING and any(_memory(tensor) not in self._made for tensor in tensors):
            raise fx.proxy.TraceError(f"'{name}' may overwrite a tensor that is there before the call")
        result = _without_drawing(func, args, kwargs)
        if not any(isinstance(leaf, torch.Tensor) for leaf in _leaves(result)):
            if tensors:
                raise fx.proxy.TraceError(f"'{name}' asks for the values of a tensor, which differ from call to call")
            return result  # a question about torch, or a switch
        # constants have no gradients, so it does not matter whether these are switched off
        constant = all(map(self._is_constant, tensors))
        with torch.enable_grad() if constant else contextlib.nullcontext():
            node = self._node(func, args, kwargs)
        result = self._noted(result, node, tensors)
        if constant:
            self._constant.update(_memory(leaf) for leaf in _leaves(result) if isinstance(leaf, torch.Tensor))
        return result

    def _is_constant(self, value: Any) -> bool:
        """Whether nothing went into the value that gradients or calls might change."""
        return not isinstance(value, torch.Tensor) or (_memory(value) in self._constant and not value.requires_grad)

    def _noted(self, result: Any, node: fx.Node, given: Sequence[torch.Tensor]) -> Any:
        """`result`, with its tensors noted as the value of `node` or of a part of it."""
        if isinstance(result, torch.Tensor):
            if any(result is tensor for tensor in given):
                result = torch.ops.aten.alias(result)  # an object of its own: `x.float()` may return x
            elif _memory(result) and all(_memory(result) != _memory(tensor) for tensor in given):
                self._made[_memory(result)] = result._version
            self._nodes[id(result)] = result, node
            return result
        if not isinstance(result, tuple | list):
            raise fx.proxy.TraceError(f"a {type(result).__name__} of tensors is made, which a graph does not hold")
        for index, item in enumerate(result):
            if any(item is tensor for tensor in given):
                continue  # known already
            part = self._tracer.create_node("call_function", operator.getitem, (node, index), {})
            self._noted(item, part, given)
        return result

    def _node(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        kind, target, args = _as_node(func, args)
        arguments: Any = self._tracer.create_arg(args)
        keywords: Any = self._tracer.create_arg(kwargs)
        return self._tracer.create_node(kind, target, arguments, keywords)


def _as_node(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any, tuple[Any, ...]]:
    """The kind, target and arguments of this call's node, in the form that a proxy's calls have."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return "call_function", getattr, (args[0], _name(func))
    if name.startswith("__") and hasattr(operator, name):
        return "call_function", getattr(operator, name), args
    if name.startswith("__r") and hasattr(operator, f"__{name[3:]}"):
        return "call_function", getattr(operator, f"__{name[3:]}"), args[::-1]
    if is_tensor_method_or_property(func):
        return "call_method", name, args
    return "call_function", func, args


def _name(func: Callable[..., Any]) -> str:
    """The function's, method's or attribute's name."""
    name = getattr(func, "__name__", "")
    return str(getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name)


def _overwrites(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call writes into its first argument."""
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.is_mutable
    method = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    augmented = name.startswith("__i") and hasattr(operator, f"__{name[3:]}") and hasattr(operator, name)
    return method or augmented or ops.split_in_place(func, args, kwargs)[2]


def _leaves(value: Any) -> Iterator[Any]:
    """The leaves of a call's arguments or results. The parts of a slice are leaves, too."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def _memory(tensor: torch.Tensor) -> int:
    """A number that identifies a tensor's memory; 0 for a tensor without memory of its own (a sparse one)."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0


def _without_drawing(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of func(*args, **kwargs). Restores the random state afterwards: the graph draws at its calls."""
    randomness = RandomState()
    try:
        return func(*args, **kwargs)
    finally:
        randomness.restore()


@contextlib.contextmanager
def no_saved_tensors_hooks() -> Iterator[None]:
    """A context in which this thread cannot enter torch.autograd.graph.saved_tensors_hooks, which graphs do not hold.

    torch.utils.checkpoint enters them. If it were traced through, all that it is meant to discard would be saved.
    """
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    thread, enter = threading.get_ident(), hooks.__enter__

    def refuse(self: Any) -> Any:
        if threading.get_ident() != thread:
            return enter(self)
        raise fx.proxy.TraceError(
            "what backward needs is kept in another way (checkpoint), which a graph does not hold"
        )

    hooks.__enter__ = refuse
    try:
        yield
    finally:
        hooks.__enter__ = enter
