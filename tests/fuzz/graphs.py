"""CUDA graphs without a GPU: a stand-in runs the captured call again, on the buffers that it was captured with, and
overwrites the results that it returned then.

What is lost: launches that a capture misses. What stays: which calls are replayed, what is copied, and what a replay
overwrites.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

import fxfuse
from fxfuse import cuda_capture, cuda_graphs, training_step
from fxfuse.step_graphs import StepGraphs, _Graphs


class PoolStandIn:
    """As torch's pools, it ends with the last of its graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.was_used = device, False
        self.graphs: weakref.WeakSet[GraphStandIn] = weakref.WeakSet()

    def use(self, buffers: Sequence[torch.Tensor]) -> None:
        pass

    def captures(self, graph: GraphStandIn) -> None:
        assert self.graphs or not self.was_used, "this pool has ended"
        self.graphs.add(graph)
        self.was_used = True


class GraphStandIn:
    changed: Sequence[torch.Tensor] = ()
    """Tensors that the captured call may change. A capture leaves them alone: it runs nothing."""

    def __init__(self, pool: PoolStandIn) -> None:
        self.pool = pool
        self.results: list[torch.Tensor] = []

    def warm_up(self, call: Callable[[], Any]) -> None:
        call()

    def capture(self, call: Callable[[], Any]) -> Any:
        self.pool.captures(self)
        self.call = call
        before = [tensor.clone() for tensor in self.changed]
        value = call()
        with torch.no_grad():
            for tensor, old in zip(self.changed, before, strict=True):
                tensor.copy_(old)
        cuda_graphs.map_tensors(value, lambda result: self.results.append(result) or result)
        return value

    def replay(self) -> None:
        results = iter(self.results)

        def overwrite(new: torch.Tensor) -> torch.Tensor:
            # the old result's storage is not asked: that makes a Python object, which is one more owner of the memory
            count = new.untyped_storage().nbytes() // new.element_size()
            with torch.no_grad():
                old, now = (
                    # as bytes: a copy as truth values would change the numbers that lie in the same memory
                    result.detach().as_strided((count,), (1,), 0).view(torch.uint8)
                    for result in (next(results), new)
                )
                old.copy_(now)
            return new

        with cuda_capture.preparing(), torch.random.fork_rng():  # a graph draws nothing on a CPU
            cuda_graphs.map_tensors(self.call(), overwrite)


@contextlib.contextmanager
def calls_on_a_cpu() -> Iterator[None]:
    """Inside, calls without gradients on a CPU have graphs, too."""
    with (
        mock.patch.object(cuda_graphs, "_on_gpu", lambda tensor: tensor.device.type == "cpu"),
        mock.patch.object(cuda_capture, "Pool", PoolStandIn),
        mock.patch.object(cuda_capture, "Graph", GraphStandIn),
    ):
        yield


@contextlib.contextmanager
def steps_on_a_cpu() -> Iterator[None]:
    """Inside, training steps on a CPU have graphs, too, unless they draw random numbers."""
    why_unfit, capture, capture_backward = StepGraphs._why_unfit, StepGraphs._capture, _Graphs.capture_backward

    def why_unfit_here(graphs: StepGraphs, given: Sequence[torch.Tensor]) -> str | None:
        return "it draws" if graphs._step.joint.draws else why_unfit(graphs, given)

    def captured(graphs: StepGraphs, given: Sequence[torch.Tensor]) -> None:
        with mock.patch.object(GraphStandIn, "changed", [given[at] for at in graphs._step.joint.changed]):
            capture(graphs, given)

    def captured_backward(graphs: _Graphs, values: Any) -> None:
        with mock.patch.object(GraphStandIn, "changed", graphs.more):  # it is lent to the backward
            capture_backward(graphs, values)

    with (
        mock.patch.object(training_step, "_on_gpu", lambda device: True),
        mock.patch.object(cuda_capture, "Pool", PoolStandIn),
        mock.patch.object(cuda_capture, "Graph", GraphStandIn),
        mock.patch.object(StepGraphs, "_why_unfit", why_unfit_here),
        mock.patch.object(StepGraphs, "_capture", captured),
        mock.patch.object(_Graphs, "capture_backward", captured_backward),
    ):
        yield


@contextlib.contextmanager
def replayed(device: str) -> Iterator[None]:
    """Inside, models have CUDA graphs, of calls and of training steps."""
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(steps_on_a_cpu())
            stack.enter_context(calls_on_a_cpu())
        stack.enter_context(mock.patch.object(fxfuse, "optimize", functools.partial(fxfuse.optimize, cuda_graphs=True)))
        yield
