"""How AOTAutograd takes operators apart when it traces a training step (joint.py).

Most rules are torch's own decompositions. Ours replace those that would draw random numbers that eager does not draw,
or leave a GPU with too few rows (long_rows.py).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch._decomp import get_decompositions
from torch._dispatch.python import no_python_dispatcher
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fxfuse.long_rows import (
    affine,
    affine_by_channel,
    by_channel,
    exact,
    mean_of,
    of_all_parts,
    statistics_of_parts,
    sum_of,
    variance_of,
)
from fxfuse.problem import RESULT_DTYPES

_aten: Final = torch.ops.aten


_TAKEN_APART: Final = (
    "elu_backward", "gelu_backward", "hardsigmoid_backward", "hardswish_backward", "hardtanh_backward",
    "leaky_relu_backward", "log_sigmoid_backward", "mish_backward", "_prelu_kernel_backward", "sigmoid_backward",
    "silu_backward", "softplus_backward", "softshrink_backward", "tanh_backward", "threshold_backward",
    "native_dropout_backward", "select_backward", "slice_backward", "mse_loss_backward", "smooth_l1_loss_backward",
    "huber_loss_backward", "binary_cross_entropy_backward", "nll_loss_forward", "nll_loss_backward", "addcmul",
    "addcdiv", "detach", "t",
)  # fmt: skip
"""Operators that torch's own decompositions make expressions of others."""
_ROWS: Final = (
    "_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm_backward", "native_group_norm_backward",
)  # fmt: skip
"""Such operators that also take sums of rows."""


class KeptForAutograd(TorchFunctionMode):
    """Lets autograd see operators whole that torch's trace would take apart before autograd.

    - Softshrink's parts multiply by 0. So its gradient would be NaN where the arriving gradient is NaN or infinite.
      Eager's is 0 there.
    - The parts of multilabel_margin_loss add up more than the loss where a row has fewer targets than classes, in torch
      2.3 to 2.13.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with no_python_dispatcher() if function in _KEPT else contextlib.nullcontext():
            return function(*args, **(kwargs or {}))


_KEPT: Final = (
    F.softshrink, _aten.softshrink.default, F.multilabel_margin_loss, _aten.multilabel_margin_loss.default,
)  # fmt: skip


@functools.cache
def decompositions(device: str) -> dict[Any, Callable[..., Any]]:
    """The rules for a device, by operator.

    On a CPU torch computes all gradients of a convolution in one pass. It also adds up in float64 there what batch
    normalisation needs. This matters where there are few numbers: without pixels.
    """
    names = (*_TAKEN_APART, *_ROWS)
    taken_apart = get_decompositions([getattr(_aten, name) for name in names if hasattr(_aten, name)])
    known: dict[Any, Callable[..., Any]] = {
        **taken_apart,
        _aten.native_dropout.default: _native_dropout,
        _aten.nll_loss_backward.default: _nll_loss_backward,
        _aten.var_mean.correction: _var_mean,
        _aten.native_layer_norm.default: _layer_norm,
        _aten.native_group_norm.default: _group_norm,
        _aten._native_batch_norm_legit_functional.default: _batch_norm,
        _aten.native_batch_norm_backward.default: _batch_norm_backward,
    }
    if device != "cpu":
        sums = dict.fromkeys((_aten.sum.default, _aten.sum.dim_IntList), sum_of)
        means = dict.fromkeys((_aten.mean.default, _aten.mean.dim), mean_of)
        known |= {_aten.var.correction: variance_of, _aten.convolution_backward.default: _convolution_backward}
        return {**known, **sums, **means}
    norms = (_aten._native_batch_norm_legit_functional.default, _aten.native_batch_norm_backward.default)
    return {**known, **{norm: _if_pixels(known[norm]) for norm in norms}}


def _if_pixels(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Limits a rule to images, by its first tensor. For rows of features, torch's own kernel stays."""

    @functools.wraps(rule)
    def taken_apart(first: torch.Tensor, *others: Any) -> Any:
        return rule(first, *others) if first.dim() > 2 else NotImplemented

    return taken_apart


def _native_dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    """Dropout of everything (p = 1): eager draws no random numbers for it."""
    if p != 1 or not train:
        return NotImplemented
    return x * 0, torch.zeros_like(x, dtype=torch.bool)


def _nll_loss_backward(
    gradient: torch.Tensor, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int,
    ignored: int, total_weight: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Compares classes with the target, which is pointwise. torch's rule writes into zeros: two more passes."""
    dim, targets = x.dim() - 1, target.unsqueeze(-1)
    of_sample = -(gradient / total_weight if reduction == _MEAN else gradient)
    of_sample = of_sample.unsqueeze(-1) if of_sample.dim() == dim > 0 else of_sample
    if weight is not None:
        of_sample = of_sample * weight
    classes = torch.arange(x.shape[dim], device=x.device)
    return torch.where((classes == targets) & (targets != ignored), of_sample, 0.0)


_MEAN: Final = 1  # at::Reduction


def _var_mean(
    x: torch.Tensor, dim: Sequence[int] | None = None, *, correction: int | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two reductions, each of a kind that kernels know."""
    dims = list(range(x.dim())) if dim is None else dim
    return torch.var(x, list(dims), correction=correction, keepdim=keepdim), torch.mean(x, list(dims), keepdim=keepdim)


def _layer_norm(
    x: torch.Tensor, sides: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> Any:
    """As torch's rule. But that rounds the statistics of 16-bit numbers on a CPU: deviations in the backward would be
    from another mean, and be large where the numbers of a row are nearly equal."""
    x, dtype = x.contiguous(), x.dtype
    made, mean, scale = _normalised(exact(x), list(range(x.dim() - len(sides), x.dim())), eps)
    return affine(made, weight, bias).to(dtype), mean, scale


def _group_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, images: int, channels: int, pixels: int,
    groups: int, eps: float,
) -> Any:  # fmt: skip
    """As torch's rule, but statistics are not rounded, and deviations are from the mean on a CPU, too."""
    parts = exact(x).reshape(images, groups, channels // groups, pixels)
    made, mean, scale = _normalised(parts, [2, 3], eps)
    made = affine_by_channel(made.view(x.shape), weight, bias)
    return made.to(x.dtype), mean.view(images, groups), scale.view(images, groups)


def _normalised(x: torch.Tensor, dims: list[int], eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x with mean 0 and variance 1 along `dims`, the means, and what deviations were multiplied with."""
    mean, variance = torch.mean(x, dims, True), torch.var(x, dims, correction=0, keepdim=True)
    scale = torch.rsqrt(variance + eps)
    return (x - mean) * scale, mean, scale


def _batch_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running_mean: torch.Tensor,
    running_variance: torch.Tensor, training: bool, momentum: float, eps: float,
) -> Any:  # fmt: skip
    """Batch normalisation with the batch's own statistics. They are computed first for parts of each image: these are
    enough rows to keep a GPU busy, and short enough to be read a second time from a cache.
    """
    if not training:
        return NotImplemented
    statistics = statistics_of_parts(x)
    mean, variance = (each.flatten() for each in of_all_parts(*statistics, [0, 1]))
    scale = torch.rsqrt(variance + eps)
    made = affine_by_channel((exact(x) - by_channel(mean, x)) * by_channel(scale, x), weight, bias)
    count = x.numel() // x.shape[1]
    unbiased = variance * (count / max(count - 1, 1))
    counted = [
        before * (1 - momentum) + now * momentum for before, now in ((running_mean, mean), (running_variance, unbiased))
    ]
    # as eager's lies: a dropout that follows draws in the order of memory
    result = made.to(x.dtype).contiguous(memory_format=suggest_memory_format(x))
    return result, mean, scale, *counted


def _batch_norm_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, running_mean: torch.Tensor | None,
    running_variance: torch.Tensor | None, mean: torch.Tensor | None, scale: torch.Tensor | None, training: bool,
    eps: float, wanted: Sequence[bool],
) -> Any:  # fmt: skip
    if not training or mean is None or scale is None:
        return _torchs_batch_norm_backward()(
            gradient, x, weight, running_mean, running_variance, mean, scale, training, eps, wanted
        )
    of_result, count = exact(gradient), x.numel() // x.shape[1]
    deviation = (exact(x) - by_channel(mean, x)) * by_channel(scale, x)
    of_bias, of_weight = _sums_by_channel(of_result), _sums_by_channel(of_result * deviation)
    factor = scale if weight is None else scale * weight
    left = of_result - by_channel(of_bias / count, x) - deviation * by_channel(of_weight / count, x)
    dtype = x.dtype if weight is None else weight.dtype
    return (left * by_channel(factor, x)).to(x.dtype), of_weight.to(dtype), of_bias.to(dtype)


def _sums_by_channel(x: torch.Tensor) -> torch.Tensor:
    """The sums over images and pixels."""
    return x.sum([0, *range(2, x.dim())])


def _convolution_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Sequence[int] | None,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], is_transposed: bool,
    output_padding: Sequence[int], groups: int, wanted: Sequence[bool],
) -> Any:  # fmt: skip
    """Makes the gradients of x, of the filters and of the bias three operators, where there are kernels for them.

    That is so in channels_last, and for depthwise convolutions. Elsewhere only the bias's is taken apart.

    - The gradient of x is a convolution with flipped filters, unless there is a stride.
    - That of the filters is an operator of ours (problem.py: "conv2d_weight").
    """
    is_of_images = x.dim() == 4 and not is_transposed and x.dtype in RESULT_DTYPES
    is_depthwise = is_of_images and x.shape[1] == groups == weight.shape[0] > 1
    is_last = all(each.is_contiguous(memory_format=torch.channels_last) for each in (gradient, x))
    is_apart = is_depthwise or (is_of_images and is_last)
    along = [list(side) * (x.dim() - 2) if len(side) == 1 else list(side) for side in (stride, padding, dilation)]
    taps = weight.shape[2:]
    left = [step * (size - 1) - pad for size, pad, step in zip(taps, *along[1:], strict=True)]
    flips = is_apart and wanted[0] and set(along[0]) == {1} and min(left) >= 0
    by_torch = [wanted[0] and not flips, wanted[1] and not is_apart, False]
    if by_torch == list(wanted):
        return NotImplemented
    of_x = of_weight = None
    if any(by_torch):
        sides = (stride, padding, dilation, is_transposed, output_padding, groups)
        of_x, of_weight, _ = _aten.convolution_backward(gradient, x, weight, bias_sizes, *sides, by_torch)
    if flips:
        filters = weight.flip(2, 3) if math.prod(taps) > 1 else weight
        if not is_depthwise:  # of each group, filters and channels change places
            filters = filters.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
            filters = filters.contiguous(memory_format=torch.channels_last)
        of_x = _aten.convolution(gradient, filters, None, [1, 1], left, along[2], False, [0, 0], groups)
    if is_apart and wanted[1]:
        of_weight = torch.ops.fxfuse.conv2d_weight(gradient, x, None, [], "acc", list(taps), *along, groups)
    of_bias = _sums_by_channel(exact(gradient)) if wanted[2] else None
    return of_x, of_weight, None if of_bias is None else of_bias.to(gradient.dtype)


@functools.cache
def _torchs_batch_norm_backward() -> Callable[..., Any]:
    overload = _aten.native_batch_norm_backward.default
    return get_decompositions([overload])[overload]
