"""Tensors whose device is a GPU and whose memory is a CPU's: a model runs on them where there is no GPU.

torch decomposes operators as on a GPU, and computes the remaining operators on the CPU. Kernels of fxfuse are not
launched (build.load); their results are zeros. So a call shows which kernels it needs, but its values mean nothing.

    with standing_in():
        module(StandIn(x))      # whatever the module makes on "cuda" is such a tensor, too
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from fxfuse.dispatch_mode import DispatchMode

DEVICE: Final = torch.device("cuda", 0)


class StandIn(torch.Tensor):
    """A tensor on DEVICE that shares the memory of `held`, a tensor on a CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> StandIn:
        made: StandIn = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            layout=held.layout, device=DEVICE,
        )  # fmt: skip
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _computed(func, args, kwargs or {})

    def data_ptr(self) -> int:
        """The address of the first element, in the CPU's memory."""
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The tensor's memory, which is a CPU's."""
        return self.held.untyped_storage()

    # In torch these methods access the GPU before they call the dispatcher.

    def __getitem__(self, index: Any) -> StandIn:
        return StandIn(self.held[index])

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        result: torch.Tensor = torch.ops.aten.contiguous.default(self, memory_format=memory_format)
        return result

    def copy_(self, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        result: torch.Tensor = torch.ops.aten.copy_.default(self, other, non_blocking)
        return result

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StandIn({list(self.shape)}, {self.dtype})"


class _Constructors(DispatchMode):
    """Replaces every tensor that is created on a GPU by a StandIn."""

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return _computed(func, args, kwargs)


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Inside, this thread creates a StandIn instead of every tensor on a GPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attended, "AutogradCUDA")
    try:
        with _Constructors():
            yield
    finally:
        library._destroy()


def modes() -> int:
    """How many of this thread's dispatch modes are those of `standing_in`, which observe nothing."""
    return sum(
        isinstance(torch._C._get_dispatch_stack_at(place), _Constructors)
        for place in range(torch._C._len_torch_dispatch_stack())
    )


def _computed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operator, computed on the CPU."""
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, StandIn)]
    device = kwargs.get("device")
    is_on_gpu = bool(given) if device is None else torch.device(device).type == DEVICE.type
    held_args, held_kwargs = pytree.tree_map_only(StandIn, lambda tensor: tensor.held, (tuple(args), dict(kwargs)))
    if device is not None:
        held_kwargs["device"] = torch.device("cpu")
    if not given and not is_on_gpu:
        return func(*held_args, **held_kwargs)
    try:
        result = func(*held_args, **held_kwargs)
    except NotImplementedError:  # an operator that only a GPU has
        result = _blank(func, held_args, held_kwargs)
    if func is torch.ops.aten.empty_strided.default:
        result.zero_()  # kernels are not launched: their results are always the same
    known = {id(tensor.held): tensor for tensor in given}
    if torch.Tag.inplace_view in func.tags:
        _lie_as_held(given[0])

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in known:  # an argument that was overwritten
            return known[id(tensor)]
        return StandIn(tensor) if is_on_gpu else tensor

    return pytree.tree_map_only(torch.Tensor, stand_in, result)


def _blank(func: Any, args: Any, kwargs: Any) -> Any:
    """Zeros with the shapes and strides of an operator's results."""
    given = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), args)
    try:
        result = func(*given, **kwargs)
    except NotImplementedError:  # torch 2.3: flash attention has no meta function; its first result lies like the query
        like = torch.empty_like(given[0].transpose(1, 2)).transpose(1, 2)
        others = [str(returned.type) == "Tensor" for returned in func._schema.returns[1:]]
        result = (like, *(torch.empty(0, device="meta") if is_tensor else 0 for is_tensor in others))

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()

    return pytree.tree_map_only(torch.Tensor, zeros, result)


_aten: Final = torch.ops.aten
_FLASH_WIDTH: Final = 256
"""Most channels of a head for which flash attention runs."""


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """torch's attention by the operator that torch chooses on a GPU (aten/src/ATen/native/transformers/attention.cpp).

    This is flash attention for 16 bits without a mask, else the memory-efficient one. If another thread uses a real GPU
    meanwhile, its attention is computed by matrix products.
    """
    width = query.shape[-1]
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        group = query.shape[-3] // key.shape[-3]
        if not (isinstance(query, StandIn) and _is_flash(query, attn_mask)):
            key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
    if query.dim() != 4 or query.dtype == torch.float64 or not isinstance(query, StandIn):
        return _by_products(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if _is_flash(query, attn_mask):
        scale = width**-0.5 if scale is None else scale
        padded = [torch.constant_pad_nd(one, (0, -width % 8)) if width % 8 else one for one in (query, key, value)]
        operator = _aten._scaled_dot_product_flash_attention.default
        result: torch.Tensor = operator(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return _aten.slice.Tensor(result, -1, 0, width) if width % 8 else result
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = _aten.scalar_tensor.default(float("-inf"), dtype=query.dtype, device=DEVICE)
        attn_mask = _aten.where.ScalarSelf(attn_mask, 0.0, hidden)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    efficient = _aten._scaled_dot_product_efficient_attention.default
    found: torch.Tensor = efficient(query, key, value, attn_mask, False, dropout_p, is_causal, scale=scale)[0]
    return found


def _is_flash(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    return mask is None and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= _FLASH_WIDTH


def _by_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    result: torch.Tensor = _aten._scaled_dot_product_attention_math.default(
        query, key, value, mask, dropout_p, is_causal, scale=scale
    )[0]
    return result


def _lie_as_held(tensor: StandIn) -> None:
    """Gives `tensor` the present sizes and strides of the tensor that it holds."""
    held = tensor.held
    tensor.data = StandIn(held)
    tensor.held = held
