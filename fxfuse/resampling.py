"""Replaces poolings and interpolations while a training step is traced (joint.py).

torch's own traces of them are right, but slow. An interpolation becomes loads by tables of indices. Its gradient
becomes additions into memory, element by element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fxfuse.layout import FORMATS
from fxfuse.program.values import Refused

_aten: Final = torch.ops.aten
_POOLS: Final = {
    pool: dims
    for dims, name in (((-2, -1), "adaptive_avg_pool2d"), ((-3, -2, -1), "adaptive_avg_pool3d"))
    for pool in (*(getattr(where, name) for where in (F, torch._C._nn, _aten)), getattr(_aten, name).default)
}
"""The dimensions of an image that each pooling function pools."""
_NEAREST: Final = ("nearest", "nearest-exact")
_OPERATORS: Final = {
    ("nearest", 3): "upsample_nearest1d",
    ("nearest", 4): "upsample_nearest2d",
    ("nearest", 5): "upsample_nearest3d",
    ("nearest-exact", 3): "_upsample_nearest_exact1d",
    ("nearest-exact", 4): "_upsample_nearest_exact2d",
    ("nearest-exact", 5): "_upsample_nearest_exact3d",
    ("linear", 3): "upsample_linear1d",
    ("bilinear", 4): "upsample_bilinear2d",
    ("bicubic", 4): "upsample_bicubic2d",
    ("trilinear", 5): "upsample_trilinear3d",
}
"""torch's operators that interpolate, by mode and number of dimensions of the image."""


class Resampling(TorchFunctionMode):
    """A mode in which pooling to one pixel becomes a mean, and interpolations stay whole or become views.

    torch's pooling is a mean, too. But if the image is in channels_last, torch gives the pixel other strides in place,
    and the gradient of that is three copies.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = None
        if function in _POOLS:
            made = _pooled_by_mean(_POOLS[function], *args, **(kwargs or {}))
        elif function is F.interpolate:
            made = _interpolated(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {})) if made is None else made


def _pooled_by_mean(dims: tuple[int, ...], input: torch.Tensor, output_size: Any) -> torch.Tensor | None:
    """The mean of an image; None if pooling leaves more than one pixel. The parameters are torch's."""
    sizes = output_size if isinstance(output_size, Sequence) else [output_size]
    return input.mean(dims, keepdim=True) if all(size == 1 for size in sizes) else None


def _interpolated(
    input: torch.Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> torch.Tensor | None:  # fmt: skip
    """The interpolated image; None if it is left to torch. The parameters are F.interpolate's. Raises Refused."""
    name = _OPERATORS.get((mode, input.dim()))
    if name is None or antialias or not input.is_floating_point() or (size is None) == (scale_factor is None):
        return None
    before, count = input.shape[2:], input.dim() - 2
    scales = None if scale_factor is None else tuple(map(float, _each(scale_factor, count)))
    if scales is None:
        sides = [int(side) for side in _each(size, count)]
    else:
        sides = [math.floor(side * scale) for side, scale in zip(before, scales, strict=True)]
    if recompute_scale_factor:
        scales = None
    factors = [after // side if after % side == 0 else 0 for after, side in zip(sides, before, strict=True)]
    is_exact = all(factor > 0 and factor & (factor - 1) == 0 for factor in factors)
    if mode in _NEAREST and is_exact and scales in (None, tuple(factors)):
        return _repeated(input, factors)
    if mode in _NEAREST and scales is not None and not {1, 2}.isdisjoint(factors):
        raise Refused(
            "torch's trace of an interpolation to the same size, or twice that, takes other pixels than torch"
        )
    corners = () if mode in _NEAREST else (bool(align_corners),)
    return _Whole.apply(input, name, sides, (*corners, *(scales or [None] * count)))  # type: ignore[no-any-return]


def _each(value: Any, count: int) -> Sequence[Any]:
    return value if isinstance(value, Sequence) else [value] * count


def _repeated(input: torch.Tensor, factors: Sequence[int]) -> torch.Tensor:
    """Each pixel repeated, as a view that kernels read. The gradient is a sum. An image in channels_last stays so.

    Args:
        factors: a power of two for each dimension. For other factors torch rounds the reciprocal, and so positions.
    """
    last = list(range(2, input.dim()))
    channels_last = FORMATS.get(input.dim())
    is_last = channels_last is not None and input.is_contiguous(memory_format=channels_last)
    order = [0, *last, 1] if is_last and not input.is_contiguous() else [0, 1, *last]
    x = input.permute(order)
    for dim, factor in zip(last, factors, strict=True):
        at = 2 * order.index(dim) - order.index(2) + 1  # behind its own dimension, and those that were added before
        x = x.unsqueeze(at)
        x = x.expand([factor if place == at else side for place, side in enumerate(x.shape)])
    sides = [side * factor for side, factor in zip(input.shape[2:], factors, strict=True)]
    shape = [*input.shape[:2], *sides]
    return x.reshape([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(input.dim())])


class _Whole(torch.autograd.Function):
    """An interpolation by torch's own operator, as in eager. Its gradient is one of torch's operators, too."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, name: str, sides: Sequence[int], options: Sequence[Any]) -> torch.Tensor:
        ctx.name, ctx.options, ctx.shape = name, options, tuple(input.shape)
        with torch._C._AutoDispatchBelowAutograd():  # above it, torch takes the operator apart
            return getattr(_aten, name).default(input, sides, *options)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        operator = getattr(_aten, f"{ctx.name}_backward").default
        return operator(gradient, list(gradient.shape[2:]), list(ctx.shape), *ctx.options), None, None, None
