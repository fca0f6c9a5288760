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

from fxfuse import functional
from fxfuse.cuda import gpu
from fxfuse.functional import LIBRARY, register_fake
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
    takes = in_channels_last if _needs_torchs(x, weight, bias) else _operator
    return takes(x, groups, weight, bias, eps)


def _operator(*args: Any) -> torch.Tensor:
    found: torch.Tensor = torch.ops.fxfuse.group_norm_in_channels_last(*args)
    return found


def _needs_torchs(*tensors: torch.Tensor | None) -> bool:
    """Whether torch's own operators must compute a call: elsewhere than on a GPU, with derivatives, under autocast, and
    for distributed tensors and the like."""
    x, given = tensors[0], [tensor for tensor in tensors if tensor is not None]
    return (
        x is None
        or not _runs_on_gpu(x)
        or functional._needs_gradient(given)
        or functional._observed(profiled=False)
        or functional.current_autocast(x.device.type) is not None
        or (gpu.standing_in() is None and any(map(functional._knows_torch_only, given)))
    )


def _runs_on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda
