"""optimize(..., cuda_graphs=True): a training step's forward and each segment of its backward as a CUDA graph.

- *When.* After some steps of a kind its forward and backward have programs. The next step captures what they launch.
- *Arguments.* Parameters and buffers are read where they lie. If one has moved, all is captured again. Other
  arguments, and the gradients of results, are copied into buffers before a replay.
- *What the forward keeps for the backward* stays in the graphs' memory. So a forward is replayed only if the backward
  of the replay before is over, or can never come. Meanwhile calls run one launch after another.
- *Results* are copied: callers often have the last ones at the next call. *Gradients* are not: those of parameters are
  usually gone by then. If one is still there at the next backward, that runs one launch after another, and all is
  captured again. From then on gradients are copied, too.
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

    def __init__(self, graphs: StepGraphs, own: _Graphs) -> None:
        self._graphs, self._own = graphs, own
        self._is_replayed = False
        """Whether the segments of the backward so far were replayed."""
        self.is_over = False
        """Whether the backward is over, so that the next forward may overwrite what this one has kept."""

    def backward(self, number: int, values: Values) -> tuple[list[torch.Tensor | None], Values] | None:
        """A segment's gradients, and the values that later segments take, by a replay.

        None if it has to run one launch after another: gradients of the last replay are still in use.

        Args:
            number: of the segment.
            values: as `TrainingStep.run_segment` takes them.
        """
        found = self._graphs.backward(self._own, number, values) if self._is_replayed or number == 0 else None
        self._is_replayed = found is not None
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
        self._graphs: _Graphs | None = None
        self._flight: Callable[[], Flight | None] = lambda: None
        self._lock = threading.RLock()

    def _why_unfit(self, given: Sequence[torch.Tensor]) -> str | None:
        if graph_is_kept is None:
            return "this version of torch does not say whether a backward keeps its graph"
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
            graphs = self._graphs_for(given)
            if graphs is None:
                return None
            results = graphs.forward(given)
            self.replays += 1
            flight = Flight(self, graphs)
            self._flight = weakref.ref(flight)
            return Replayed(results, graphs.more, flight)

    def backward(
        self, graphs: _Graphs, number: int, values: Values
    ) -> tuple[list[torch.Tensor | None], Values] | None:  # fmt: skip
        """As `Flight.backward`."""
        with self._lock:
            if number == 0 and graphs.has_gradients_in_use():
                self._copies_gradients, self._graphs = True, None
                return None
            if number == graphs.backwards:
                try:
                    graphs.capture_backward(values)
                except Exception as error:
                    self._give_up(error)
                    return None
            return graphs.backward(number, values)

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

    def _graphs_for(self, given: Sequence[torch.Tensor]) -> _Graphs | None:
        """The graphs, captured if it is time for it."""
        addresses = [given[at].data_ptr() for at in self._fixed]
        if addresses != self._addresses:
            self._addresses, self._graphs, self._steps = addresses, None, 0
        if self._graphs is None and self._steps >= STEPS_BEFORE:
            self._capture(given)
        return self._graphs

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
            self._graphs = _Graphs(self._step, given, self._fixed, self._copies_gradients)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Notes the reason why there are no graphs: whatever cannot be captured may raise anything."""
        self._graphs, self.reason = None, cuda_capture.reason_of(error)
        logger.info("fxfuse: a training step has no CUDA graphs", exc_info=error)


def _stays(tensor: torch.Tensor) -> bool:
    """Whether a tensor usually keeps its place in memory. Dynamo gives its graphs parameters and buffers as arguments,
    and marks the buffers."""
    return isinstance(tensor, nn.Parameter) or getattr(tensor, "_dynamo_static_input_type", None) is not None


class _Backward(NamedTuple):
    """The graph of a segment of the backward."""

    graph: cuda_capture.Graph
    hand_out: list[Callable[[], torch.Tensor | None]]
    """Functions that return the gradients."""
    lent: list[torch.Tensor]
    """The gradients that are not copied: each has memory of its own."""
    values: Values
    """What later segments take."""


class _Graphs:
    """The graph of the forward and those of the backward's segments."""

    def __init__(
        self, step: TrainingStep, given: Sequence[torch.Tensor], fixed: Sequence[int], copies_gradients: bool
    ) -> None:
        """Captures the forward.

        Args:
            fixed: positions of given tensors that are read in place.
            copies_gradients: whether all gradients are copied.
        """
        self._step, self._copies_gradients = step, copies_gradients
        # torch ends a pool with the last of its graphs, so those that take the place of these have another
        self._pool = cuda_capture.Pool(step.device)
        # the next forward's intermediate tensors are not where gradients are, which may still be in use then
        self._pool_of_backwards = cuda_capture.Pool(step.device)
        self._moving = sorted(set(range(len(given))) - set(fixed))
        self._changed = sorted(step.joint.changed)
        self._there = list(given)
        with torch.no_grad(), cuda_capture.preparing():
            # programs are for such tensors: of this alignment, and with or without gradients
            self._arguments = cuda_capture.Buffers.like([given[at] for at in self._moving], are_aligned=False)
            for at, buffer in zip(self._moving, self._arguments.tensors, strict=True):
                self._there[at] = buffer.requires_grad_(given[at].requires_grad)
            self._forward = cuda_capture.Graph(self._pool)
            with stream_capture.keeping() as self._kept:
                stream_capture.keep(buffer for _, graph in step.graphs for buffer in graph.buffers())
                self._results, self.more = self._forward.capture(lambda: step.forwarded(self._there))
        self._copies = [cuda_capture.copying(result) for result in self._results]
        self._arrived = cuda_capture.Buffers([])
        """For the gradients of results."""
        self._backwards: list[_Backward] = []

    def capture_backward(self, values: Values) -> None:
        """Captures the next segment, in the thread that runs backwards: programs are for its dispatch keys.

        Args:
            values: what the first segment takes.
        """
        step, number = self._step, len(self._backwards)
        seen = [
            result.detach().requires_grad_() if at in step.joint.differentiable else result
            for at, result in enumerate(self._results)
        ]
        kept = step.kept_of(number, self._there, seen, self.more)
        with torch.no_grad():
            if number == 0:
                self._arrived = cuda_capture.Buffers.like(list(values.values()), are_aligned=False)
        taken = self._backwards[-1].values if self._backwards else dict(zip(values, self._arrived.tensors, strict=True))

        def run() -> tuple[list[torch.Tensor | None], Values]:
            found, made = step.run_segment(number, kept, taken, True)
            # a view's base would be one more owner of its memory
            return [gradient if gradient is None else gradient.detach() for gradient in found], made

        graph = cuda_capture.Graph(self._pool_of_backwards)
        with torch.no_grad(), cuda_capture.preparing(), stream_capture.keeping() as kept_alive:
            gradients, made = graph.capture(run)
        self._kept.update(kept_alive)
        others = {
            beginning(each)
            for each in (*self._there, *self._arrived.tensors, *self._results, *self.more, *made.values())
        }
        owners = Counter(beginning(gradient) for gradient in gradients if gradient is not None)
        own = _Backward(graph, [], [], made)
        for gradient in gradients:
            if gradient is None:
                own.hand_out.append(lambda: None)
            elif self._copies_gradients or beginning(gradient) in others or owners[beginning(gradient)] > 1:
                own.hand_out.append(cuda_capture.copying(gradient))
            else:
                own.lent.append(gradient)
                own.hand_out.append(gradient.detach)
        self._backwards.append(own)

    def forward(self, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Replays the forward. Returns the results."""
        self._pool.use(self._arguments.tensors)
        self._arguments.fill([given[at] for at in self._moving])
        self._forward.replay()
        count_up([given[at] for at in self._changed])
        return tuple(copy() for copy in self._copies)

    @property
    def backwards(self) -> int:
        """The number of the backward's segments that are captured."""
        return len(self._backwards)

    def has_gradients_in_use(self) -> bool:
        """Whether somebody uses gradients of the last replay."""
        return not all(self._step.guard.alone([gradient for each in self._backwards for gradient in each.lent]))

    def backward(self, number: int, values: Values) -> tuple[list[torch.Tensor | None], Values]:
        """Replays a segment of the backward."""
        backward = self._backwards[number]
        self._pool.use(self._arrived.tensors)
        if number == 0:
            self._arrived.fill(list(values.values()))
        backward.graph.replay()
        return [hand_out() for hand_out in backward.hand_out], backward.values
