"""Computes the gradient of a depthwise convolution's filters by a kernel of ours, where it was measured to be quicker
than torch's (cuda/depthwise_gradient.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from fxfuse.cuda import depthwise_gradient, gpu, tune
from fxfuse.problem import Run
from fxfuse.program.own_kernels import may_compute, problem_of, quickest
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
    dy, x, weight, _, stride, padding, dilation, is_transposed, _, groups, wanted = args
    tensors = (dy, x, weight)
    if list(wanted) != FILTERS_ONLY or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return None
    expected = result[1]
    if expected is None or expected.dim() != 4 or is_transposed or set(dilation) != {1}:
        return None
    alike = all(is_plain(tensor) and tensor.dtype == expected.dtype for tensor in tensors)
    if not alike or not may_compute(expected) or not expected.is_contiguous():
        return None
    if not dy.shape[1] == x.shape[1] == weight.shape[0] == groups:
        return None
    pair = [tuple(value) * 2 if len(value) == 1 else tuple(value) for value in (stride, padding)]
    kernels = depthwise_gradient.candidates(
        depthwise_gradient.Problem(
            images=x.shape[0],
            channels=x.shape[1],
            size=tuple(x.shape[2:]),
            out_size=tuple(dy.shape[2:]),
            kernel=tuple(weight.shape[2:]),
            stride=pair[0],
            padding=pair[1],
            element=x.dtype,
            x_strides=x.stride(),
            dy_strides=dy.stride(),
            multiprocessors=gpu.properties(x.device).multi_processor_count,
        )
    )
    if not kernels:
        return None
    options = (("stride", pair[0]), ("padding", pair[1]))
    made = quickest(problem_of(KIND, tensors, options), kernels, _library(pair), expected, 2, tensors)
    return None if made is None else lambda: (None, made(), None)


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
