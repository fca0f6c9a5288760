"""Replaces one operator of torch's by a kernel of ours, where the kernel was measured to be quicker."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxfuse import build, stream_capture
from fxfuse.cuda import codegen, gpu, tune
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.launch import empty_strided, on_device, queue_by_address
from fxfuse.errors import FxfuseError
from fxfuse.expression import Acc
from fxfuse.layout import contiguous_strides, flatten
from fxfuse.operands import plan_operands
from fxfuse.problem import RESULT_DTYPES, Problem, Run, TensorMeta
from fxfuse.program.values import alignment

logger = logging.getLogger("fxfuse")


def may_compute(expected: torch.Tensor) -> bool:
    """Whether a kernel of ours may compute a result of this dtype on this device."""
    if not expected.is_cuda or expected.dtype not in RESULT_DTYPES:
        return False
    return gpu.capability(expected.device) >= gpu.MINIMUM_CAPABILITY


def quickest(
    problem: Problem, kernels: Sequence[Kernel], library: tune.Candidate,
    expected: torch.Tensor | Sequence[torch.Tensor], count: int, tensors: Sequence[torch.Tensor], are_first: bool,
    unread: Sequence[torch.Tensor] = (),
) -> Callable[[], Any] | None:  # fmt: skip
    """A function that computes `expected` from `tensors` by the quickest kernel.

    None if torch is the quickest, or if no kernel could be made.

    Args:
        problem: the key under which the choice is measured and remembered (`problem_of`).
        library: torch's candidate.
        expected: torch's result, or its results.
        count: how many of the tensors the kernels read: the first ones.
        are_first: whether the kernels come before torch's candidate where nothing is measured.
        unread: more results of torch's, which nothing reads. The kernels' have no contents.
    """
    capability = gpu.capability(problem.x.device)
    try:
        own = [candidate(kernel, problem, expected, capability, count, unread) for kernel in kernels]
        plan = tune.draft(problem, [*own, library] if are_first else [library, *own])()
    except FxfuseError as error:
        logger.warning("fxfuse: torch computes %s: %s", problem.label, error)
        return None
    return None if plan.kernel == library.name else lambda: plan.run(tensors[0], None, None, tensors[1:])


def problem_of(kind: str, tensors: Sequence[torch.Tensor], options: tuple[tuple[str, object], ...]) -> Problem:
    """The problem for tensors like these; `options` hold everything else on which the result depends."""
    first, *others = (TensorMeta.of(tensor, tensor.device, alignment(tensor)) for tensor in tensors)
    replayed = stream_capture.will_be_replayed()
    return Problem(kind, options, "acc", first, None, None, tuple(others), replayed=replayed)


def source_of(kernel: Kernel, dtype: torch.dtype, capability: tuple[int, int]) -> build.Source:
    """What is compiled for a kernel whose results have this dtype."""
    return build.Source(codegen.generate(Acc(), dtype, (), kernel), capability, kernel.name)


def candidate(
    kernel: Kernel, problem: Problem, expected: torch.Tensor | Sequence[torch.Tensor], capability: tuple[int, int],
    count: int, unread: Sequence[torch.Tensor] = (),
) -> tune.Candidate:  # fmt: skip
    """A kernel that makes a result like `expected` from `count` tensors, the first of which is the problem's x.

    If several results are expected, it makes a tuple of them, with tensors without contents like `unread`.
    """
    is_one = isinstance(expected, torch.Tensor)
    results = [expected] if isinstance(expected, torch.Tensor) else expected
    made = [(tuple(result.shape), result.stride(), result.dtype) for result in (*results, *unread)]
    written, (shape, _, dtype) = len(results), made[0]
    operands = plan_operands(shape, contiguous_strides(shape), (), frozenset(), flatten)
    assert operands is not None, "there are none"

    def compiled() -> Run:
        queue = queue_by_address(problem, operands, kernel, build.load(source_of(kernel, dtype, capability)))

        def run(x: torch.Tensor, weight: object, bias: object, others: Sequence[torch.Tensor]) -> Any:
            out = tuple(itertools.starmap(empty_strided, made))
            addresses = [tensor.data_ptr() for tensor in (x, *others[: count - 1], *out[:written])]
            if kernel.workspace:
                workspace = empty_strided((kernel.workspace,), (1,), torch.uint8)
                addresses.append(workspace.data_ptr())
            queue((), *addresses)
            return out[0] if is_one else out

        return on_device(problem.x.device.index, run)

    return tune.Candidate(kernel.name, kernel.type, compiled, kernel.workspace)
