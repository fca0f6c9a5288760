"""Max-pooling that a region may end with, in every spelling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxfuse import ops
from fxfuse.hooks import has_hooks
from fxfuse.pooling import MaxPool

_FUNCTIONS: Final[frozenset[Callable[..., Any]]] = frozenset(
    {F.max_pool2d, torch.max_pool2d, torch.ops.aten.max_pool2d}
)
_PARAMETERS: Final = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")


def pool_after(root: nn.Module, node: fx.Node) -> tuple[fx.Node, MaxPool] | None:
    """The node that pools `node`'s value, and what it computes; None if there is none or others use the value."""
    (user,) = node.users if len(node.users) == 1 else (None,)
    pool = None if user is None else find_pool(root, user)
    return None if user is None or pool is None or user.all_input_nodes != [node] else (user, pool)


def find_pool(root: nn.Module, node: fx.Node) -> MaxPool | None:
    """The max-pooling that `node` computes of its one input; None if it is not one that a region may end with."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if type(module) is not nn.MaxPool2d or len(node.args) != 1 or node.kwargs or has_hooks(module):
            return None
        given = {name: getattr(module, name) for name in _PARAMETERS[1:]}
    elif node.op == "call_function" and ops.function_of(node.target) in _FUNCTIONS:
        given = {**dict(zip(_PARAMETERS, node.args, strict=False)), **node.kwargs}
        if len(node.args) > len(_PARAMETERS) or not given.keys() <= set(_PARAMETERS):
            return None
    else:
        return None
    kernel = _pair(given.get("kernel_size"))
    stride = kernel if given.get("stride") in (None, [], ()) else _pair(given["stride"])
    padding, dilation = _pair(given.get("padding", 0)), _pair(given.get("dilation", 1))
    if kernel is None or stride is None or padding is None or dilation != (1, 1) or given.get("return_indices"):
        return None
    if min(*kernel, *stride) < 1 or min(padding) < 0:
        return None  # torch raises an error for this
    if any(2 * reach > size for reach, size in zip(padding, kernel, strict=True)):
        return None  # torch raises an error for this
    return MaxPool(*kernel, *stride, *padding, bool(given.get("ceil_mode", False)))


def _pair(value: Any) -> tuple[int, int] | None:
    """An option as two numbers, given as one for both dimensions or one for each; None if they are not known."""
    pair = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, Sequence) else ()
    if len(pair) == 1:
        pair *= 2
    return (pair[0], pair[1]) if len(pair) == 2 and all(isinstance(size, int) for size in pair) else None
