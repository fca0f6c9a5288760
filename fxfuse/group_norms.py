"""Group norm of images in channels_last, on a GPU: one operator, of which a program makes one kernel.

On a GPU torch's group norm copies such images to contiguous ones, and its result is contiguous. A convolution behind it
would convert them again. The assignment of layouts (channels_last.py) therefore replaces it by `group_norm`. Loops
compute the operator (program/reductions.py). This file defines its meaning by torch's own operators.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fxfuse.functional import LIBRARY, current_autocast, register_fake
from fxfuse.layout import FORMATS

LIBRARY.define(
    "group_norm_in_channels_last(Tensor input, int group, Tensor? weight, Tensor? bias, float eps) -> Tensor"
)


def in_channels_last(
    x: torch.Tensor, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """The group norm of x, images (batch, channels, height, width) or volumes, in channels_last."""
    return F.group_norm(x, groups, weight, bias, eps).contiguous(memory_format=FORMATS[x.dim()])


LIBRARY.impl("group_norm_in_channels_last", in_channels_last, "CompositeExplicitAutograd")
register_fake("fxfuse::group_norm_in_channels_last", in_channels_last, lib=LIBRARY)


def group_norm(
    x: torch.Tensor, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, wanted: bool
) -> torch.Tensor:
    """As F.group_norm. If it is `wanted`, the result is in channels_last."""
    if isinstance(x, fx.Proxy):  # somebody traces the optimised model
        args = (x, groups, weight, bias, eps, wanted)
        return x.tracer.create_proxy("call_function", group_norm, args, {})
    if not wanted or x.dim() not in FORMATS:
        return F.group_norm(x, groups, weight, bias, eps)
    if not _runs_on_gpu(x) or _is_differentiated(x, weight, bias) or current_autocast(x.device.type) is not None:
        return F.group_norm(x, groups, weight, bias, eps).contiguous(memory_format=FORMATS[x.dim()])
    return _called(x, groups, weight, bias, eps)


def _runs_on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


def _called(*args: Any) -> torch.Tensor:
    found: torch.Tensor = torch.ops.fxfuse.group_norm_in_channels_last(*args)
    return found


def _is_differentiated(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
