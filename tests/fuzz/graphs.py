"""CUDA graphs without a GPU: a stand-in runs the captured call again, on the buffers that it was captured with, and
overwrites the results that it returned then. It also overwrites whatever graphs captured later have in the same pool:
its intermediate tensors may lie there.

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
from fxfuse.guard import beginning
from fxfuse.program.values import extent
from fxfuse.step_graphs import StepGraphs, _Graphs


class PoolStandIn:
    """As torch's pools, it ends with the last of its graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graphs: list[weakref.ref[GraphStandIn]] = []
        """In the order of their captures."""

    def use(self, buffers: Sequence[torch.Tensor]) -> None:
        pass

    def captures(self, graph: GraphStandIn) -> None:
        there = self.there()
        assert there or not self.graphs, "this pool has ended"
        self.graphs.append(weakref.ref(graph))

    def there(self) -> list[GraphStandIn]:
        """The graphs that still exist."""
        return [graph for each in self.graphs if (graph := each()) is not None]

    def overwrite_after(self, graph: GraphStandIn) -> None:
        """What later graphs have made, unless it lies in the results of this one or of an earlier one."""
        graphs = self.there()
        first = graphs.index(graph) + 1
        ours = {beginning(result) for each in graphs[:first] for result in each.results}
        for later in graphs[first:]:
            for result in later.results:
                if beginning(result) not in ours:
                    _bytes(result).fill_(0xFF)


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
        self.call, self.gradients = call, torch.is_grad_enabled()
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
            count = new.untyped_storage().nbytes()
            _bytes(next(results), count).copy_(_bytes(new, count))
            return new

        self.pool.overwrite_after(self)
        # a graph draws nothing on a CPU
        with cuda_capture.preparing(), torch.random.fork_rng(), torch.set_grad_enabled(self.gradients):
            value = self.call()
        cuda_graphs.map_tensors(value, overwrite)


def _bytes(tensor: torch.Tensor, count: int | None = None) -> torch.Tensor:
    """The first bytes of a tensor's memory; by default up to its own end."""
    # its storage is not asked: that makes a Python object, which is one more owner of the memory
    size = tensor.element_size()
    end = int(tensor.storage_offset()) + extent(tensor) // size if count is None else count // size
    # as bytes: a copy as truth values would change the numbers that lie in the same memory
    return tensor.detach().as_strided((end,), (1,), 0).view(torch.uint8)


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
