"""Computes the gradient of a depthwise convolution's filters by a kernel of ours, where it was measured to be quicker
than torch's (cuda/depthwise_gradient.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import fx

from fxfuse import build
from fxfuse.cuda import depthwise_gradient, gpu, tune
from fxfuse.cuda.kernel import Kernel
from fxfuse.problem import Run
from fxfuse.program.own_kernels import may_compute, problem_of, quickest, source_of
from fxfuse.program.values import is_plain

KIND: Final = "depthwise filters' gradient"
LIBRARY: Final = "convolution_backward"
"""The name of torch's candidate."""
FILTERS_ONLY: Final = [False, True, False]
"""Which gradients the operator computes, for (input, filters, bias): those of the filters alone."""
_aten: Final = torch.ops.aten


def planned(args: Sequence[Any], result: Sequence[torch.Tensor | None]) -> Callable[[], Any] | None:
    """A function that computes aten.convolution_backward(*args) by a kernel of ours. torch's result was `result`.

    None if there is no kernel for it, or if torch is as quick.
    """
    tensors, expected = tuple(args[:3]), result[1]
    if expected is None or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return None
    alike = all(is_plain(tensor) and tensor.dtype == expected.dtype for tensor in tensors)
    if not alike or not may_compute(expected) or not expected.is_contiguous():
        return None
    kernels = _kernels(args)
    if not kernels:
        return None
    pair = _pair(args)
    options = (("stride", pair[0]), ("padding", pair[1]))
    made = quickest(problem_of(KIND, tensors, options), kernels, _library(pair), expected, 2, tensors)
    return None if made is None else lambda: (None, made(), None)


def foreseen(graph: fx.Graph) -> list[build.Source]:
    """The kernels that programs of a traced graph may ask for, if activations will be in channels_last."""
    found: dict[str, build.Source] = {}
    for node in graph.nodes:
        if node.target is not _aten.convolution_backward.default:
            continue
        args = fx.node.map_arg(node.args, lambda used: used.meta.get("val"))
        if all(isinstance(each, torch.Tensor) and each.dim() == 4 and may_compute(each) for each in args[:3]):
            dy, x, weight = (torch.empty_like(tensor, memory_format=torch.channels_last) for tensor in args[:3])
            for kernel in _kernels((dy, x, weight, *args[3:])):
                source = source_of(kernel, weight.dtype, gpu.capability(weight.device))
                found[source.text] = source
    return list(found.values())


def _kernels(args: Sequence[Any]) -> list[Kernel]:
    """The kernels that can compute aten.convolution_backward(*args)."""
    dy, x, weight, _, _, _, dilation, is_transposed, _, groups, wanted = args
    if list(wanted) != FILTERS_ONLY or weight.dim() != 4 or is_transposed or set(dilation) != {1}:
        return []
    if not dy.shape[1] == x.shape[1] == weight.shape[0] == groups:
        return []
    stride, padding = _pair(args)
    return depthwise_gradient.candidates(
        depthwise_gradient.Problem(
            images=x.shape[0],
            channels=x.shape[1],
            size=tuple(x.shape[2:]),
            out_size=tuple(dy.shape[2:]),
            kernel=tuple(weight.shape[2:]),
            stride=stride,
            padding=padding,
            element=x.dtype,
            x_strides=x.stride(),
            dy_strides=dy.stride(),
            multiprocessors=gpu.properties(x.device).multi_processor_count,
        )
    )


def _pair(args: Sequence[Any]) -> list[tuple[int, int]]:
    """Strides and padding, each by height and width."""
    return [tuple(value) * 2 if len(value) == 1 else tuple(value) for value in args[4:6]]


def _library(pair: Sequence[tuple[int, ...]]) -> tune.Candidate:
    stride, padding = pair

    def compiled() -> Run:
        def run(dy: torch.Tensor, weight: object, bias: object, others: Sequence[torch.Tensor]) -> torch.Tensor:
            x, filters = others
            sizes = (stride, padding, [1, 1], False, [0, 0], x.shape[1], FILTERS_ONLY)
            gradient: torch.Tensor = _aten.convolution_backward(dy, x, filters, None, *sizes)[1]
            return gradient

        return run

    return tune.Candidate(LIBRARY, LIBRARY, compiled, always=True, library=True)
