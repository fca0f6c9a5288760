"""How nodes treat the layout of their inputs: which operations compute the same, and as fast, in channels_last (of 5-D
values channels_last_3d). A *picture* is a value that may be in either layout: an image or a volume.

The values that torch computes do not depend on strides. But some operations give contiguous results for any input, some
look at strides (view, as_strided), and what Python code does is unknown. For those `role_of` is None.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxfuse import functional, ops
from fxfuse.hooks import has_hooks
from fxfuse.layout import FORMATS, contiguous_strides
from fxfuse.patterns.anchors import known_tensor, noted
from fxfuse.patterns.mutation import asks_shape, spelling
from fxfuse.patterns.values import is_nothing

_aten: Final = torch.ops.aten


@dataclass(frozen=True)
class Role:
    """What is known of a node that may work in channels_last. Its result is contiguous if its inputs are, and in
    channels_last if they are."""

    inputs: tuple[fx.Node, ...]
    """The inputs that are read in one layout or the other; no weights."""
    is_convolution: bool = False
    is_alias: bool = False
    """Whether the result may be an input itself or a view of it; results of in-place operations do not count."""
    several: bool = False
    """Whether the result is a tuple of tensors."""
    grows: float = 1.0
    """The number of the result's pixels for each pixel of the first input, approximately."""
    channels: int | None = None
    """The number of the result's channels, if it is not the first input's; 0: the sum over all inputs."""
    dimensions: int | None = None
    """The rank of the result, if it is known: 4 of an image, 5 of a volume."""
    is_group_norm: bool = False
    """Whether it must be replaced by one whose result is in channels_last on a GPU, too (group_norms.py)."""


_ROWS_OF_STRIDES: Final = frozenset({"contiguous", "clone"})
"""Rows of the op table that decide on their results' strides themselves."""
_ROWS_OF_ALIASES: Final = frozenset({"to", "float", "half", "bfloat16", "type_as", "detach"})
_FEW_PIXELS: Final = 0.02
"""`Role.grows` of operations that reduce an image to one pixel or a few."""

_POOL_MODULES: Final = (nn.MaxPool2d, nn.AvgPool2d, nn.MaxPool3d)
_ADAPTIVE_MODULES: Final = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool3d)
_SAME_MODULES: Final = (nn.BatchNorm2d, nn.BatchNorm3d, nn.ZeroPad2d, nn.ConstantPad2d, nn.ZeroPad3d, nn.ConstantPad3d)
_UPSAMPLING_MODULES: Final = (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d)
_CONVOLUTION_MODULES: Final = (nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d, nn.ConvTranspose3d)

_TRANSPOSED: Final = {
    F.conv_transpose2d: 4, torch.conv_transpose2d: 4, _aten.conv_transpose2d: 4,
    F.conv_transpose3d: 5, torch.conv_transpose3d: 5, _aten.conv_transpose3d: 5,
}  # fmt: skip
_CONVOLUTIONS: Final = {
    functional.conv2d: 4, F.conv2d: 4, torch.conv2d: 4, _aten.conv2d: 4,
    functional.conv3d: 5, F.conv3d: 5, torch.conv3d: 5, _aten.conv3d: 5,
    **_TRANSPOSED,
}  # fmt: skip
"""By function: the rank of the values that it convolves."""
_POOLS: Final = frozenset(
    {F.max_pool2d, torch.max_pool2d, _aten.max_pool2d, F.avg_pool2d, _aten.avg_pool2d, F.max_pool3d, torch.max_pool3d,
     _aten.max_pool3d}
)  # fmt: skip
"""Without average pooling of volumes: torch computes it on contiguous tensors."""
_ADAPTIVE: Final = frozenset(
    {F.adaptive_avg_pool2d, _aten.adaptive_avg_pool2d, F.adaptive_avg_pool3d, _aten.adaptive_avg_pool3d}
)
_GROUP_NORMS: Final = frozenset({F.group_norm, torch.group_norm, _aten.group_norm})
_NORMALISATIONS: Final = frozenset({F.batch_norm, torch.batch_norm, _aten.batch_norm})
_CATS: Final = frozenset({torch.cat, torch.concat, torch.concatenate, _aten.cat})
_PADS: Final = frozenset({F.pad, torch._C._nn.pad, _aten.pad, _aten.constant_pad_nd})
_MODES: Final = ("nearest", "nearest-exact", "bilinear")
"""Modes in which torch's kernels for a GPU enlarge images in channels_last."""
_ENLARGING: Final = {_aten.upsample_nearest2d: 2, _aten._upsample_nearest_exact2d: 2, _aten.upsample_bilinear2d: 3}
"""Operators for these modes: the position of the scale factors."""
_REDUCTIONS: Final = frozenset({"mean", "sum", "amax", "amin"})
_DEVIATIONS: Final = frozenset({"var", "std"})
_PARTS: Final = frozenset({"chunk", "split", "split_with_sizes"})


def role_of(root: nn.Module, node: fx.Node) -> Role | None:
    """The role of `node`; None if its inputs must have the layout that eager gives them."""
    if node.op == "call_module":
        return _of_module(root, node, root.get_submodule(str(node.target)))
    given = {name for name in ("out", "memory_format") if node.kwargs.get(name) is not None}
    if node.op not in ("call_function", "call_method") or given:
        return None
    if is_nothing(root, node):
        return Role(tuple(node.all_input_nodes[:1]), is_alias=True)
    target = str(node.target) if node.op == "call_method" else ops.function_of(node.target)
    if target in _CONVOLUTIONS:
        return _of_convolution(root, node, target)
    if target is functional.pointwise:
        return Role(_pictures(node), grows=_pooled(node)) if _pictures(node) else None
    return _of_spelling(root, node) or _of_library(root, node, target)


def is_pool(root: nn.Module, node: fx.Node) -> bool:
    """Whether `node` pools an image."""
    if node.op == "call_module":
        return type(root.get_submodule(str(node.target))) in (*_POOL_MODULES, *_ADAPTIVE_MODULES)
    return node.op == "call_function" and ops.function_of(node.target) in _POOLS | _ADAPTIVE


def _of_module(root: nn.Module, node: fx.Node, module: nn.Module) -> Role | None:
    inputs = tuple(node.all_input_nodes)
    kind = type(module)
    if has_hooks(module) or len(inputs) != 1:
        return None
    if kind in _CONVOLUTION_MODULES:
        assert isinstance(module, nn.modules.conv._ConvNd)
        area, dimensions = _area(module.stride), len(module.stride) + 2
        if _is_left(dimensions, module.groups, None if module.transposed else module.weight, area):
            return None
        return Role(inputs, True, grows=area if module.transposed else 1 / area, channels=module.out_channels,
                    dimensions=dimensions)  # fmt: skip
    if getattr(module, "return_indices", False):
        return None
    if is_nothing(root, node):
        return Role(inputs, is_alias=True)
    if kind in _POOL_MODULES:
        return Role(inputs, grows=1 / _area(getattr(module, "stride", 1), 3 if kind is nn.MaxPool3d else 2))
    if kind in _ADAPTIVE_MODULES:
        return Role(inputs, grows=_FEW_PIXELS)
    if kind is nn.GroupNorm:
        return Role(inputs, is_group_norm=True)
    if kind in _UPSAMPLING_MODULES:
        scale = getattr(module, "scale_factor", None)
        return Role(inputs, grows=_area(scale or 2)) if getattr(module, "mode", "") in _MODES else None
    return Role(inputs) if kind in _SAME_MODULES else _of_spelling(root, node)


def _of_spelling(root: nn.Module, node: fx.Node) -> Role | None:
    """The role of a pointwise operation."""
    found = spelling(root, node)
    if found is None or found.row.name in _ROWS_OF_STRIDES or not _pictures(node):
        return None
    return Role(_pictures(node), is_alias=found.row.name in _ROWS_OF_ALIASES and not found.in_place)


def _pictures(node: fx.Node) -> tuple[fx.Node, ...]:
    """The inputs of a pointwise operation that may have either layout; no parameters."""
    return tuple(filter(_may_be_picture, node.all_input_nodes))


def _may_be_picture(arg: Any) -> TypeGuard[fx.Node]:
    """Whether `arg` may be in either layout, as far as is known. In Dynamo's graphs parameters are arguments."""
    if not isinstance(arg, fx.Node):
        return False
    value, source = noted(arg), arg
    while _is_in_another_shape(source):
        source = source.all_input_nodes[0]
    if source.op == "get_attr" or isinstance(noted(source), nn.Parameter):
        return False
    return not isinstance(value, torch.Tensor) or value.dim() in FORMATS


def _is_in_another_shape(node: fx.Node) -> bool:
    """Whether `node` is all of one tensor in another shape: `weight[:, None, None]`, `weight.view(-1, 1, 1)`."""
    if len(node.all_input_nodes) != 1 or node.op not in ("call_function", "call_method"):
        return False
    if name_of(node) != "getitem":
        return name_of(node) in ("unsqueeze", "view", "reshape")
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(one is None or one is ... or one == slice(None) for one in index)


def _of_convolution(root: nn.Module, node: fx.Node, target: Any) -> Role | None:
    x = _argument(node, 0, "input")
    weight = known_tensor(root, _argument(node, 1, "weight"))
    dimensions = _CONVOLUTIONS[target]
    fused = target in (functional.conv2d, functional.conv3d)
    groups, stride = _argument(node, 8 if fused else 6, "groups"), _argument(node, 5 if fused else 3, "stride")
    transposed = target in _TRANSPOSED
    area = _area(stride, dimensions - 2)
    if not isinstance(x, fx.Node) or _is_left(dimensions, groups, None if transposed else weight, area):
        return None
    operands = [arg for arg in node.args[3] if _may_be_picture(arg)] if fused else []  # type: ignore[union-attr]
    grows = area if transposed else 1 / area
    channels = None if weight is None or weight.dim() not in FORMATS or transposed else int(weight.shape[0])
    return Role((x, *operands), True, grows=grows * _pooled(node), channels=channels, dimensions=dimensions)


def _is_left(dimensions: int, groups: Any, weight: torch.Tensor | None, area: float) -> bool:
    """Whether a convolution is left as it is.

    torch has kernels of its own for contiguous volumes in groups. On a CPU, oneDNN (3.3 to 3.12) writes beyond memory
    when it computes the gradient of filters of one pixel with a stride, for fewer than 16 channels in channels_last.

    Args:
        weight: its filters, if they are known and it is not transposed.
        area: the number of pixels that its stride takes one of.
    """
    if dimensions == 5:
        return groups not in (None, 1)
    if weight is None or weight.dim() != 4 or weight.device.type != "cpu" or area <= 1:
        return False
    return weight.shape[2:].numel() == 1 < weight.shape[1] < 16


def _of_library(root: nn.Module, node: fx.Node, target: Any) -> Role | None:
    inputs = tuple(node.all_input_nodes)
    if not inputs:
        return None
    first = inputs[:1]
    if target in _POOLS:
        strides = _argument(node, 2, "stride")
        returns_indices = node.kwargs.get("return_indices", len(node.args) > 6 and node.args[6])
        sides = strides or _argument(node, 1, "kernel_size")
        return None if returns_indices else Role(first, grows=1 / _area(sides, 3 if "3d" in target.__name__ else 2))
    if target in _ADAPTIVE:
        return Role(first, grows=_FEW_PIXELS)
    if target in _NORMALISATIONS:
        return Role(first) if isinstance(node.args[0] if node.args else None, fx.Node) else None
    if target in _GROUP_NORMS:
        x = _argument(node, 0, "input")
        return Role((x,), is_group_norm=True) if isinstance(x, fx.Node) else None
    if target in _CATS:
        return Role(inputs, channels=0) if _is(_argument(node, 1, "dim"), 1, -3) else None
    if target in _PADS:
        sides, mode = _argument(node, 1, "pad"), _argument(node, 2, "mode")
        return Role(first) if mode in (None, "constant", 0) and isinstance(sides, tuple | list) else None
    if target is F.interpolate:
        scale = _argument(node, 2, "scale_factor")
        return Role(first, grows=_area(scale or 2)) if (_argument(node, 3, "mode") or "nearest") in _MODES else None
    if target in _ENLARGING:
        return Role(first, grows=_area(_argument(node, _ENLARGING[target], "scale_factors") or 2))
    if target is F.normalize:
        dim = _argument(node, 2, "dim")
        return Role(first) if dim is None or _is(dim, 1, -3) else None
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name in _REDUCTIONS and any(reduces_pictures(node, dimensions, keep=True) for dimensions in FORMATS):
        return Role(first, grows=_FEW_PIXELS)
    if name in _REDUCTIONS | _DEVIATIONS and _reduces_channels(node, name):
        return Role(first, channels=1)
    if name in _PARTS and _is(_argument(node, 2, "dim"), 1, -3):
        return Role(first, is_alias=True, several=True)
    if target is operator.getitem:
        return _of_subscript(node)
    if name == "narrow" or target is _aten.slice:
        return Role(first, is_alias=True) if _takes_channels(node, name) else None
    return None


def _of_subscript(node: fx.Node) -> Role | None:
    """The role of a subscript that takes one of several tensors, or some channels of one tensor."""
    value, index = node.args
    if not isinstance(value, fx.Node) or len(node.all_input_nodes) != 1:
        return None
    if isinstance(index, int):
        return Role((value,), is_alias=True) if name_of(value) in _PARTS else None
    whole = slice(None)
    is_channels = (
        isinstance(index, tuple)
        and 2 <= len(index) <= 5
        and isinstance(index[1], slice)
        and index[1].step is None
        and all(item == whole for position, item in enumerate(index) if position != 1)
    )
    return Role((value,), is_alias=True) if is_channels else None


def _takes_channels(node: fx.Node, name: str) -> bool:
    """Whether a `narrow` or `torch.ops.aten.slice` takes some channels of its input, or all of it."""
    dim = _argument(node, 1, "dim")
    if name == "narrow":
        return _is(dim, 1, -3)
    start, end, step = (_argument(node, place, key) for place, key in ((2, "start"), (3, "end"), (4, "step")))
    is_whole = start in (None, 0) and (end is None or end == sys.maxsize)
    return step in (None, 1) and (_is(dim, 1, -3) or is_whole)


# ------------------------------------------------------------------------------------- what forgets strides

_FORGETFUL: Final = frozenset(
    {functional.layer_norm, functional.linear, F.layer_norm, torch.layer_norm, _aten.layer_norm, F.linear, _aten.linear}
)
_FORGETFUL_MODULES: Final = (nn.LayerNorm, nn.Linear)
_REARRANGING: Final = frozenset({"permute", "transpose", "flatten", "reshape"})
"""Names of operations that take any strides, and whose result is a view if it can be one."""


def forgets(root: nn.Module, value: fx.Node, user: fx.Node, dimensions: int = 4) -> bool:
    """Whether no result of `user`, a user of `value`, depends on the strides of `value`.

    `dimensions` is the rank of the picture that `value` comes from.
    """
    if asks_shape(user) or (is_never_contiguous(value) and is_contiguous_copy(user)):
        return True
    if user.op == "call_module":
        module = root.get_submodule(str(user.target))
        return type(module) in _FORGETFUL_MODULES and not has_hooks(module)
    if user.op not in ("call_function", "call_method") or not user.args or user.args[0] is not value:
        return False
    target = str(user.target) if user.op == "call_method" else ops.function_of(user.target)
    if target in _FORGETFUL:
        return user.all_input_nodes.count(value) == 1 and not _is_operand(value, user)
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name in _REDUCTIONS:
        return reduces_pictures(user, dimensions, keep=False)
    return (
        name in _REARRANGING
        and bool(user.users)
        and all(forgets(root, user, later, dimensions) for later in user.users)
    )


def is_contiguous_copy(node: fx.Node) -> bool:
    """Whether `node` is x.contiguous(), which returns x itself if x is contiguous already."""
    return node.op == "call_method" and node.target == "contiguous" and len(node.args) == 1 and not node.kwargs


def is_copied(value: fx.Node) -> bool:
    """Whether `value` is permuted and then made contiguous, which may take no copy in channels_last."""
    return any(
        name_of(user) in _REARRANGING
        and ((is_never_contiguous(user) and any(map(is_contiguous_copy, user.users))) or is_copied(user))
        for user in value.users
    )


def _is_operand(value: fx.Node, user: fx.Node) -> bool:
    """Whether `user`, a fused operator, reads `value` in its epilogue, too."""
    return any(isinstance(arg, list | tuple) and value in arg for arg in user.args)


def reduces_pictures(node: fx.Node, dimensions: int, keep: bool) -> bool:
    """Whether a reduction is over all pixels of pictures with this rank, and nothing else.

    `keep`: whether the reduced dimensions must stay, with size 1, or must not.
    """
    reduced, kept = _argument(node, 1, "dim"), _argument(node, 2, "keepdim")
    if not isinstance(reduced, tuple | list) or not all(isinstance(dim, int) for dim in reduced):
        return False
    pixels = {dim % dimensions for dim in reduced if isinstance(dim, int)}
    return bool(kept) == keep and pixels == set(range(2, dimensions))


def _reduces_channels(node: fx.Node, name: str) -> bool:
    """Whether a reduction is over the channels of pictures, which stay with size 1: a LayerNorm of pixels by hand."""
    reduced, kept = _argument(node, 1, "dim"), _argument(node, 3 if name in _DEVIATIONS else 2, "keepdim")
    return kept is True and (_is(reduced, 1) or (isinstance(reduced, tuple | list) and list(reduced) == [1]))


# ------------------------------------------------------------------------------ where contiguous stays contiguous

_NEVER: Final = frozenset({"permute", "transpose", "swapaxes", "movedim", "moveaxis", "expand"})


def is_never_contiguous(node: fx.Node) -> bool:
    """Whether the result of `node` is not contiguous, except where sizes are 1."""
    return node.op in ("call_method", "call_function") and name_of(node) in _NEVER


def may_copy(node: fx.Node) -> bool:
    """Whether `node` is a reshape that may copy: then its result is contiguous, although its input is not.

    Noted strides decide. Where none are noted, each call checks (`channels_last.plain`).
    """
    value = noted(node)
    known = isinstance(value, torch.Tensor)
    return name_of(node) in ("reshape", "flatten") and (not known or value.is_contiguous())


def is_permuted(node: fx.Node) -> bool:
    """Whether the result of `node`, an operation, is known not to be contiguous: by what it does, or by its strides."""
    strides = noted_strides(node) if node.op not in ("placeholder", "get_attr") else None
    return is_never_contiguous(node) or (strides is not None and strides != contiguous_strides(noted(node).shape))


def noted_strides(node: fx.Node) -> tuple[int, ...] | None:
    """The strides that Dynamo or torch.export noted for the value of `node`: eager's in each call. None if none are
    noted, if they vary with sizes, or if elements overlap or lie apart from each other."""
    value = noted(node)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or known_elements(node) is None:
        return None
    strides = tuple(value.stride())
    if not all(isinstance(stride, int) for stride in strides):
        return None
    by_stride = sorted((stride, size) for stride, size in zip(strides, value.shape, strict=True) if size != 1)
    places = itertools.accumulate((size for _, size in by_stride), operator.mul, initial=1)
    is_dense = all(stride == place for (stride, _), place in zip(by_stride, places, strict=False))
    return strides if is_dense else None


_STAYING: Final = frozenset(
    {"reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "reshape_as", "view_as", "layer_norm", "linear",
     "matmul", "mm", "addmm", "gated_linear", "group_norm", "mean", "sum", "var", "std", "amax", "amin"}
)  # fmt: skip


def stays_contiguous(root: nn.Module, node: fx.Node) -> bool:
    """Whether the result of `node` is surely contiguous if all its inputs are."""
    if node.op == "call_module":
        return type(root.get_submodule(str(node.target))) in (nn.Linear, nn.LayerNorm, nn.GroupNorm, nn.Flatten)
    if node.op not in ("call_method", "call_function"):
        return False
    return name_of(node) in _STAYING or _is_in_another_shape(node)


# -------------------------------------------------------------------------------------------------- arguments


def name_of(node: fx.Node) -> str:
    """The name of the function, operator or method that `node` calls."""
    return str(node.target) if node.op == "call_method" else getattr(ops.function_of(node.target), "__name__", "")


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _is(value: Any, *expected: int) -> bool:
    return type(value) is int and value in expected


def _area(sides: Any, count: int = 2) -> float:
    """The product of a stride or scale over its dimensions (`count` if it is one number); 1 if it is not known."""
    try:
        found = sides if isinstance(sides, Sequence) and len(sides) in (2, 3) else (sides,) * count
        return max(math.prod(map(float, found)), 1e-3)
    except (TypeError, ValueError):
        return 1.0


def _pooled(node: fx.Node) -> float:
    """The fraction of pixels that the pooling at the end of a fused operator leaves; 1 without pooling."""
    pool = node.kwargs.get("pool", ())
    return 1 / _area(pool[2:4]) if isinstance(pool, Sequence) and pool else 1.0


def known_elements(node: fx.Node) -> int | None:
    """The number of elements of a node's value, a tensor or several, if Dynamo or torch.export noted it; else None."""
    value = noted(node)
    tensors: Sequence[Any] = value if isinstance(value, tuple | list) else [value]
    if not all(isinstance(one, torch.Tensor) and all(isinstance(size, int) for size in one.shape) for one in tensors):
        return None
    return sum(int(one.numel()) for one in tensors)
