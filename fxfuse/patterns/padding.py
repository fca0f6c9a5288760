"""Moves zeros around an image from a padding operation into the convolution that reads the image.

TensorFlow's padding is uneven where a stride skips pixels, so models ported from there have such an operation. It
copies the whole image, even where it adds nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxfuse import ops
from fxfuse.hooks import has_hooks
from fxfuse.patterns.anchors import Anchor
from fxfuse.patterns.mutation import Mutations

_PADS: Final = frozenset({F.pad, torch._C._nn.pad, torch.ops.aten.pad, torch.ops.aten.constant_pad_nd})
_PARAMS: Final = ("input", "pad", "mode", "value")


def with_own_padding(
    root: nn.Module, node: fx.Node, anchor: Anchor, mutations: Mutations
) -> tuple[Anchor, fx.Node | None]:
    """The anchor of `node`, on the image before padding, and the padding operation, which nobody needs then.

    Without such an operation, `anchor` itself and None.
    """
    pad = anchor.x
    if anchor.kind != "conv2d" or not isinstance(pad, fx.Node) or list(pad.users) != [node]:
        return anchor, None
    sides = _zeros_around(root, pad)
    if sides is None or not mutations.same_section(pad, node):
        return anchor, None
    x = pad.all_input_nodes[0]
    if mutations.between(mutations.order[pad], mutations.order[node], [x], []):
        return anchor, None
    own = anchor.options["padding"]
    around = [own[0], own[0], own[1], own[1]] if len(own) == 2 else own
    top, bottom, left, right = (there + here for there, here in zip(around, sides, strict=True))
    padding = [top, left] if (top, left) == (bottom, right) else [top, bottom, left, right]
    return dataclasses.replace(anchor, x=x, options={**anchor.options, "padding": padding}), pad


def _zeros_around(root: nn.Module, node: fx.Node) -> tuple[int, int, int, int] | None:
    """The number of zeros that `node` adds at the top, bottom, left and right; None if it does anything else."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if type(module) is not nn.ZeroPad2d or has_hooks(module):
            return None
        values: dict[str, Any] = {"pad": module.padding}
    elif node.op == "call_function" and ops.function_of(node.target) in _PADS:
        names = ("input", "pad", "value") if "constant" in str(node.target) else _PARAMS
        values = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    else:
        return None
    pad, value = values["pad"], values.get("value")
    if values.get("mode", "constant") != "constant" or type(value) not in (int, float, type(None)) or value:
        return None
    if not isinstance(pad, tuple | list) or not all(type(side) is int and side >= 0 for side in pad):
        return None
    left, right, top, bottom, *others = (*pad, 0, 0, 0, 0)[: max(len(pad), 4)]
    return None if any(others) or len(node.all_input_nodes) != 1 else (top, bottom, left, right)
