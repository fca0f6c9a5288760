"""Shapes, strides and dtypes of results, found without torch's meta functions.

Those are written in Python, and the first one imports Dynamo and sympy, which takes one to five seconds. The cases here
are the ones that most networks consist of. For all others, and for whatever torch might refuse, a function here returns
None; then torch's meta function is asked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from fxfuse.layout import Strides, channels_last_strides, contiguous_strides
from fxfuse.ops import PointwiseOp

if TYPE_CHECKING:
    from fxfuse.problem import TensorMeta

_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
_OF_FLOATS: Final = frozenset({
    "neg", "abs", "square", "sqrt", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "sin", "cos", "tanh",
    "sigmoid", "erf", "relu", "selu", "gelu", "gelu_tanh", "silu", "mish", "softsign", "hardswish", "hardsigmoid",
    "tanhshrink", "logsigmoid", "leaky_relu", "hardtanh", "add", "sub", "mul", "div", "pow", "minimum", "maximum",
    "clamp", "clamp_min", "clamp_max", "lt", "le", "gt", "ge", "eq", "ne",
})  # fmt: skip
"""Rows of the op table that accept any floating tensors. Their results have the tensors' dtype, or bool."""
_NUMBER_FIRST: Final = frozenset({"add", "sub", "mul", "div", "pow"})
"""Those that may have a number before a tensor."""
_NUMBERS_BEHIND: Final = frozenset({"leaky_relu", "hardtanh", "clamp"})
"""Those known only for numbers behind the tensor: torch does not take all combinations."""


def of_row(row: PointwiseOp, args: Sequence[Any]) -> torch.Tensor | None:
    """The row's result for meta tensors of one dtype, in simple layouts, and numbers; None in other cases."""
    name, tensors = row.in_place_of or row.name, [arg for arg in args if isinstance(arg, torch.Tensor)]
    if name not in _OF_FLOATS or not tensors or (name in _NUMBERS_BEHIND and len(tensors) > 1):
        return None
    if args[0] is not tensors[0] and row.name not in _NUMBER_FIRST:
        return None
    dtype = tensors[0].dtype
    if dtype not in _FLOATS or any(tensor.dtype != dtype for tensor in tensors):
        return None
    if any(type(arg) not in (int, float) for arg in args if not isinstance(arg, torch.Tensor)):
        return None
    if name == "hardtanh" and not args[1] <= args[2]:
        return None
    found = _layout([(tuple(tensor.shape), tensor.stride()) for tensor in tensors])
    if found is None or (row.in_place_of is not None and found != (tensors[0].shape, tensors[0].stride())):
        return None
    made = torch.bool if row.boolean and row.in_place_of is None else dtype
    return torch.empty_strided(*found, dtype=made, device="meta")


def _layout(tensors: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[tuple[int, ...], Strides] | None:
    """The shape and the strides of a result of tensors with these, which broadcast; None if that is not simple.

    torch orders the result's dimensions as those of its arguments are. Here all of them are contiguous; or some are in
    channels_last, and the others, contiguous, have at most one number for each channel of each image.
    """
    shape = _broadcast([shape for shape, _ in tensors])
    if shape is None:
        return None
    others = [each for each in tensors if each[1] != contiguous_strides(each[0])]
    if not others:
        return shape, contiguous_strides(shape)
    if len(shape) not in (4, 5) or min(shape[1:]) < 2:
        return None
    last, pixels = channels_last_strides(shape), len(shape) - 2
    if any(each != (shape, last) for each in others):
        return None
    if any(each not in others and math.prod(each[0][-pixels:]) > 1 for each in tensors):
        return None
    return shape, last


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """torch.broadcast_shapes, which imports sympy; None where that raises."""
    found: list[int] = []
    for sizes in itertools.zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1):
        different = set(sizes) - {1}
        if len(different) > 1:
            return None
        found.append(different.pop() if different else 1)
    return tuple(found[::-1])


def of_max_pool(
    image: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil_mode: bool
) -> torch.Tensor | None:
    """A meta image, pooled as by F.max_pool2d; None if torch must be asked."""
    found = _layout([(tuple(image.shape), image.stride())])
    if ceil_mode or found is None or image.dim() != 4 or image.dtype not in _FLOATS or 0 in image.shape:
        return None
    if min(*kernel, *stride) < 1 or any(not 0 <= 2 * pad <= size for size, pad in zip(kernel, padding, strict=True)):
        return None
    shape, strides = found
    pixels = [
        (size + 2 * pad - taps) // step + 1
        for size, taps, step, pad in zip(shape[2:], kernel, stride, padding, strict=True)
    ]
    if min(pixels) < 1:
        return None
    pooled = (*shape[:2], *pixels)
    is_last = strides != contiguous_strides(shape)
    made = channels_last_strides(pooled) if is_last else contiguous_strides(pooled)
    return torch.empty_strided(pooled, made, dtype=image.dtype, device="meta")


def of_anchor(
    kind: str, options: Mapping[str, Any], x: TensorMeta, weight: TensorMeta | None, bias: TensorMeta | None
) -> tuple[int, ...] | None:
    """The shape of an anchor's result, which has x's dtype; None if torch must be asked.

    The result is contiguous, but for convolutions and gradients of their filters, whose strides are not looked at here.

    Args:
        options: of a convolution: checked to be in range, and the filters to fit into the padded image.
    """
    if any(meta is not None and meta.dtype != x.dtype for meta in (weight, bias)) or x.dtype not in _FLOATS:
        return None
    if kind == "layer_norm":
        normalized = tuple(options["normalized_shape"])
        fits = 0 < len(normalized) <= len(x.shape) and x.shape[len(x.shape) - len(normalized) :] == normalized
        return x.shape if fits and all(meta is None or meta.shape == normalized for meta in (weight, bias)) else None
    if weight is None:
        return None
    if kind in ("conv2d", "conv3d"):
        return _of_convolution(options, x.shape, weight.shape)
    if kind == "conv2d_weight":
        return _of_filters(options, x.shape, weight.shape)
    is_contiguous = x.strides == contiguous_strides(x.shape)
    if kind in ("linear", "gated_linear"):
        fits = is_contiguous and len(weight.shape) == 2 and x.shape[-1:] == weight.shape[1:]
        fits &= bias is None or bias.shape == weight.shape[:1]
        return (*x.shape[:-1], weight.shape[0]) if fits else None
    if kind == "matmul":
        fits = is_contiguous and len(x.shape) > 1 and len(weight.shape) == 2
    else:
        fits = len(x.shape) == len(weight.shape) == {"mm": 2, "addmm": 2, "bmm": 3}.get(kind)
        fits = fits and x.shape[:-2] == weight.shape[:-2]
    if not fits or x.shape[-1] != weight.shape[-2]:
        return None
    shape = (*x.shape[:-1], weight.shape[-1])
    return shape if bias is None or _broadcast([bias.shape, shape]) == shape else None


def _of_convolution(options: Mapping[str, Any], image: Sequence[int], filters: Sequence[int]) -> tuple[int, ...] | None:
    moved = len(filters) - 2
    sizes = [options[name] for name in ("stride", "padding", "dilation")]
    if len(image) != moved + 2 or any(len(size) != moved for size in sizes):
        return None
    if image[1] != filters[1] * options["groups"] or math.prod((*image, *filters)) == 0:
        return None
    pixels = (
        (size + 2 * pad - step * (taps - 1) - 1) // stride + 1
        for size, taps, stride, pad, step in zip(image[2:], filters[2:], *sizes, strict=True)
    )
    return (image[0], filters[0], *pixels)


def _of_filters(options: Mapping[str, Any], gradient: Sequence[int], image: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of the filters of a convolution, if a gradient of this shape is one of its result."""
    if (
        len(gradient) != 4
        or len(image) != 4
        or options["groups"] < 1
        or min(*options["stride"], *options["kernel"]) < 1
    ):
        return None
    filters = (gradient[1], image[1] // options["groups"], *options["kernel"])
    return filters if _of_convolution(options, image, filters) == tuple(gradient) else None
