"""optimize(..., cuda_graphs=True): a training step's forward and its backward, each as one CUDA graph.

- *When.* After some steps of a kind both graphs have programs. Then both are captured, in the next step.
- *Arguments.* Parameters and buffers are read where they lie. If one has moved, both are captured again. Other
  arguments, and the gradients of results, are copied into buffers before a replay.
- *What the forward keeps for the backward* stays in the graphs' memory. So a forward is replayed only if the backward
  of the replay before is over, or can never come. Meanwhile calls run one launch after another.
- *Results* are copied: callers often have the last ones at the next call. *Gradients* are not: those of parameters are
  usually gone by then. If one is still there at the next backward, that runs one launch after another, and both graphs
  are captured again. From then on gradients are copied, too.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import nn

from fxfuse import cuda_capture, stream_capture
from fxfuse.guard import beginning
from fxfuse.program.write import count_up

if TYPE_CHECKING:
    from fxfuse.training_step import TrainingStep, Values

logger = logging.getLogger("fxfuse")

STEPS_BEFORE: Final = 3
"""Steps of one kind, with parameters in the same places, before the forward and the backward are captured."""
MOST_CAPTURES: Final = 8
"""The number of captures after which the graphs of one kind of step are given up: its parameters move all the time."""

ROOM: Final = 4
"""How often what the forward keeps must fit into the free memory before a capture. The graphs hold it for good, and at
most about as much again for the backward's results. Steps that are not replayed need as much beside that."""

graph_is_kept: Final[Callable[[], bool] | None] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", None
)
"""Whether the running backward keeps its graph (`retain_graph`), so that there may be another one. None: older versions
of torch do not say so."""


class Replayed(NamedTuple):
    """What a replay of the forward gives."""

    results: tuple[torch.Tensor, ...]
    more: Sequence[torch.Tensor]
    """What it keeps beside the results, in the graphs' memory."""
    flight: Flight


class Flight:
    """A replay of the forward whose backward may come."""

    def __init__(self, graphs: StepGraphs, pair: _Pair) -> None:
        self._graphs, self._pair = graphs, pair
        self.is_over = False
        """Whether the backward is over, so that the next forward may overwrite what this one has kept."""

    def backward(self, values: Values) -> list[torch.Tensor | None] | None:
        """The gradients, by a replay; None if some of the last replay's are still in use.

        Args:
            values: the gradients of results (`TrainingStep.begun`).
        """
        found = self._graphs.backward(self._pair, values)
        self.is_over = found is not None
        return found


class StepGraphs:
    """The CUDA graphs of one training step."""

    def __init__(self, step: TrainingStep, given: Sequence[torch.Tensor], attributes: Container[int]) -> None:
        """
        Args:
            given: the tensors of a call, each once.
            attributes: the ids of those that are attributes of the model.
        """
        self._step = step
        self._fixed = [at for at, each in enumerate(given) if id(each) in attributes or _stays(each)]
        self.reason: str | None = self._why_unfit(given)
        """Why there are no graphs; None while there are or may be some."""
        self.captures = 0
        self.replays = 0
        """The number of forwards that were replayed."""
        self.waited = 0
        """The number of forwards that were not, since the backward of an earlier one was still to come."""
        self._addresses: list[int] = []
        """Where the fixed tensors were at the latest call."""
        self._steps = 0
        """The number of steps since then that ran one launch after another."""
        self._copies_gradients = False
        self._pair: _Pair | None = None
        self._flight: Callable[[], Flight | None] = lambda: None
        self._lock = threading.RLock()

    def _why_unfit(self, given: Sequence[torch.Tensor]) -> str | None:
        if graph_is_kept is None:
            return "this version of torch does not say whether a backward keeps its graph"
        if len(self._step.segments) > 1:
            return "its backward has parts, between which DistributedDataParallel sends gradients"
        if not self._step.joint.changed <= set(self._fixed):
            return "it overwrites an argument"
        for at, each in enumerate(given):
            if each.device != self._step.device:
                return f"a tensor that it reads is on {each.device}"
            if at not in self._fixed and torch._debug_has_internal_overlap(each) == 1:
                return "an argument's elements share memory"
        return None

    def forward(self, given: Sequence[torch.Tensor]) -> Replayed | None:
        """The forward by a replay; None if the call has to run one launch after another."""
        if self.reason is not None:
            return None
        with self._lock:
            flight = self._flight()
            if flight is not None and not flight.is_over:
                self.waited += 1
                return None
            pair = self._pair_for(given)
            if pair is None:
                return None
            results = pair.forward(given)
            self.replays += 1
            flight = Flight(self, pair)
            self._flight = weakref.ref(flight)
            return Replayed(results, pair.more, flight)

    def backward(self, pair: _Pair, values: Values) -> list[torch.Tensor | None] | None:
        """As `Flight.backward`."""
        with self._lock:
            if not pair.may_replay_backward():
                self._copies_gradients, self._pair = True, None
                return None
            if not pair.has_backward:
                try:
                    pair.capture_backward()
                except Exception as error:
                    self._give_up(error)
                    return None
            return pair.backward(values)

    def completed(self) -> None:
        """Counts a step that ran one launch after another."""
        self._steps += 1

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """A context for a forward or backward that runs one launch after another: does the CPU wait for the GPU?"""
        if self.reason is not None or self._steps != STEPS_BEFORE - 1 or self._step.device.type != "cuda":
            yield
            return
        with cuda_capture.waiting_noticed() as waits:
            yield
        if waits:
            self.reason = waits[0]

    def _pair_for(self, given: Sequence[torch.Tensor]) -> _Pair | None:
        """Both graphs, captured if it is time for it."""
        addresses = [given[at].data_ptr() for at in self._fixed]
        if addresses != self._addresses:
            self._addresses, self._pair, self._steps = addresses, None, 0
        if self._pair is None and self._steps >= STEPS_BEFORE:
            self._capture(given)
        return self._pair

    def _capture(self, given: Sequence[torch.Tensor]) -> None:
        if self.captures == MOST_CAPTURES:
            self.reason = f"its parameters have moved after each of {MOST_CAPTURES} captures"
            return
        kept, free = self._step.joint.kept_bytes, cuda_capture.free_memory(self._step.device)
        if free < ROOM * kept:
            self.reason = (
                f"too little memory: its forward keeps {kept / 2**20:.0f} MB, and {free / 2**20:.0f} MB are free"
            )
            return
        self.captures += 1
        logger.info("fxfuse: the forward and the backward of a training step are captured as CUDA graphs")
        try:
            self._pair = _Pair(self._step, given, self._fixed, self._copies_gradients)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Notes the reason why there are no graphs: whatever cannot be captured may raise anything."""
        self._pair, self.reason = None, cuda_capture.reason_of(error)
        logger.info("fxfuse: a training step has no CUDA graphs", exc_info=error)


def _stays(tensor: torch.Tensor) -> bool:
    """Whether a tensor usually keeps its place in memory. Dynamo gives its graphs parameters and buffers as arguments,
    and marks the buffers."""
    return isinstance(tensor, nn.Parameter) or getattr(tensor, "_dynamo_static_input_type", None) is not None


class _Pair:
    """The graph of the forward and that of the backward."""

    def __init__(
        self, step: TrainingStep, given: Sequence[torch.Tensor], fixed: Sequence[int], copies_gradients: bool
    ) -> None:
        """Captures the forward.

        Args:
            fixed: positions of given tensors that are read in place.
            copies_gradients: whether all gradients are copied.
        """
        self._step, self._copies_gradients = step, copies_gradients
        # torch ends a pool with the last of its graphs, so the pair that takes the place of this one has another
        self._pool = cuda_capture.Pool(step.device)
        self._moving = [at for at in range(len(given)) if at not in set(fixed)]
        self._changed = sorted(step.joint.changed)
        joint, self._there = step.joint, list(given)
        with torch.no_grad(), cuda_capture.preparing():
            self._arguments = cuda_capture.Buffers.like([given[at] for at in self._moving])
            for at, buffer in zip(self._moving, self._arguments.tensors, strict=True):
                self._there[at] = buffer.requires_grad_(given[at].requires_grad)  # programs are for such tensors
            self._arrived = cuda_capture.Buffers(
                [
                    torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device=meta.device)
                    for meta in joint.gradients
                ]
            )
            self._buffers = [*self._arguments.tensors, *self._arrived.tensors]
            self._forward = cuda_capture.Graph(self._pool)
            with stream_capture.keeping() as self._kept:
                stream_capture.keep(buffer for _, graph in step.graphs for buffer in graph.buffers())
                self._results, self.more = self._forward.capture(lambda: step.forwarded(self._there))
        self._copies = [cuda_capture.copying(result) for result in self._results]
        self._backward: cuda_capture.Graph | None = None
        self._lent: list[torch.Tensor] = []
        """The gradients that are not copied: each has memory of its own."""
        self._hand_out: list[Callable[[], torch.Tensor | None]] = []
        """Functions that return the gradients."""

    def capture_backward(self) -> None:
        """Captures the backward, in the thread that runs backwards: programs are for its dispatch keys."""
        joint = self._step.joint
        seen = [
            result.detach().requires_grad_() if number in joint.differentiable else result
            for number, result in enumerate(self._results)
        ]
        kept = self._step.kept_of(0, self._there, seen, self.more)
        values = dict(zip(joint.tangents, self._arrived.tensors, strict=True))

        def run() -> list[torch.Tensor | None]:
            found, _ = self._step.run_segment(0, kept, values, True)
            # a view's base would be one more owner of its memory
            return [gradient if gradient is None else gradient.detach() for gradient in found]

        graph = cuda_capture.Graph(self._pool)
        with torch.no_grad(), cuda_capture.preparing(), stream_capture.keeping() as self._kept_by_backward:
            gradients = graph.capture(run)
        others = {beginning(each) for each in (*self._there, *self._arrived.tensors, *self._results, *self.more)}
        owners = Counter(beginning(gradient) for gradient in gradients if gradient is not None)
        for gradient in gradients:
            if gradient is None:
                self._hand_out.append(lambda: None)
            elif self._copies_gradients or beginning(gradient) in others or owners[beginning(gradient)] > 1:
                self._hand_out.append(cuda_capture.copying(gradient))
            else:
                self._lent.append(gradient)
                self._hand_out.append(gradient.detach)
        self._backward = graph

    def forward(self, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Replays the forward. Returns the results."""
        self._pool.use(self._buffers)
        self._arguments.fill([given[at] for at in self._moving])
        self._forward.replay()
        count_up([given[at] for at in self._changed])
        return tuple(copy() for copy in self._copies)

    @property
    def has_backward(self) -> bool:
        """Whether the backward is captured."""
        return self._backward is not None

    def may_replay_backward(self) -> bool:
        """Whether nobody uses the gradients of the last replay."""
        return all(self._step.guard.alone(self._lent))

    def backward(self, values: Values) -> list[torch.Tensor | None]:
        """Replays the backward. Returns the gradients."""
        assert self._backward is not None
        self._pool.use(self._buffers)
        self._arrived.fill(list(values.values()))
        self._backward.replay()
        return [hand_out() for hand_out in self._hand_out]
