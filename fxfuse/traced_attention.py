"""Attention in a trace, by the kernel of torch's that eager takes for such tensors.

torch chooses a kernel when attention is called. In a trace there are no tensors, only descriptions of them, and of some
that have no mask torch then says that no kernel of its own fits: the trace has products and a softmax instead, whose
weights are kept for the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from fxfuse import functional

_aten = torch.ops.aten
_FLASH: Final = 1
_KERNELS: Final[Mapping[int, str]] = {
    _FLASH: "_scaled_dot_product_flash_attention",
    2: "_scaled_dot_product_efficient_attention",
    3: "_scaled_dot_product_cudnn_attention",
}
"""Operators by torch's numbers of them (torch.nn.attention.SDPBackend)."""
_FLASH_WIDTHS: Final = 8
"""Flash attention takes heads that have a multiple of so many channels."""


class AsEager(TorchFunctionMode):
    """Inside, F.scaled_dot_product_attention on a GPU is the operator that eager calls, if there is no mask."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            made = _by_kernel(**_named(args, given))
            if made is not None:
                return made
        return func(*args, **given)


_NAMES: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Of arguments that need not be given by name."""


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip(_NAMES, args, strict=False)), **kwargs}


def _by_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor | None:  # fmt: skip
    """Attention, in a trace; None if torch may choose itself."""
    if attn_mask is not None or enable_gqa or query.device.type != "cuda" or query.dim() != 4:
        return None
    cast = functional.current_autocast("cuda")
    if cast is not None:  # as torch casts the arguments of attention
        query, key, value = (x.to(cast) if x.dtype != torch.float64 else x for x in (query, key, value))
    number = _chosen((query, key, value), dropout_p, is_causal, scale)
    if number not in _KERNELS:
        return None
    width = query.shape[-1]
    if number == _FLASH and width % _FLASH_WIDTHS:
        return None
    operator = getattr(_aten, _KERNELS[number]).default
    options = {
        "query": query, "key": key, "value": value, "attn_bias": None, "dropout_p": dropout_p, "is_causal": is_causal,
        "compute_log_sumexp": torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)),
        "return_debug_mask": False, "scale": scale,
    }  # fmt: skip
    known = {argument.name for argument in operator._schema.arguments}  # releases differ
    result: torch.Tensor = operator(**{name: option for name, option in options.items() if name in known})[0]
    return result


def _chosen(tensors: Sequence[torch.Tensor], dropout_p: float, is_causal: bool, scale: float | None) -> int:
    """torch's number of the kernel that eager takes for tensors like these."""
    with _disable_current_modes():
        like = [
            torch.empty_strided(
                tuple(map(int, x.shape)), tuple(map(int, x.stride())), dtype=x.dtype, device=x.device
            ).requires_grad_(x.requires_grad)
            for x in tensors
        ]
        return int(_choose(*like, None, dropout_p, is_causal, scale=scale))


_choose: Final[Callable[..., int]] = torch._fused_sdp_choice
