"""A training step: a graph's forward and backward for one kind of call, each fused like any other graph.

Both graphs run without gradients, so that they become programs. To autograd they are one autograd.Function. If the
backward is cut into segments (segments.py), there is one for each segment, and the first stands for the forward, too.
Gradients of gradients come from the graph itself, as torch computes it.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import nn

from fxfuse import functional, plans, stream_capture
from fxfuse.errors import FxfuseError
from fxfuse.guard import Guard, beginning
from fxfuse.joint import Joint, results_of
from fxfuse.program import switches_of
from fxfuse.program.binding import Bound
from fxfuse.program.values import Lent, Refused, device_of
from fxfuse.segments import buckets_now, segments
from fxfuse.state import TorchRandomState
from fxfuse.step_graphs import Flight, StepGraphs, graph_is_kept

logger = logging.getLogger("fxfuse")


GIVEN: Final = -1
"""The number of memory that a graph was given."""


class Returned(NamedTuple):
    """A tensor that a graph returned."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    memory: int
    """A number for its memory, the same for results that share it."""


class TrainingStep:
    """Runs the forward and the backward of one kind of call that needs gradients."""

    def __init__(
        self, joint: Joint, fused: Callable[..., nn.Module], bound: Bound, returned: Sequence[Returned | None],
        tables: Sequence[dict[Any, Any]], cuda_graphs: bool = False,
    ) -> None:  # fmt: skip
        """Raises Refused if the results of the graph share memory or are not as traced, or if the memory that it
        changes is shared.

        Args:
            fused: makes a module, with its regions fused, of a graph module. Its second argument, which may be left
                out, are the positions of results that may share an allocation.
            bound: a call of this kind.
            returned: what the graph itself returned in a call of this kind. None for a result that is no tensor.
            tables: dictionaries that must hold the same objects at every call (`Leaves.tables`).
            cuda_graphs: whether the forward and the backward are to be CUDA graphs.
        """
        self.joint, self._distinct = joint, first_of(bound.tensors)
        self.guard = Guard(bound.tensors, tables)
        """Knows a call of this kind by its tensors, and that the tables hold what they held."""
        self._changed = [self._distinct[number] for number in joint.changed]
        self._unchanged = [at for number, at in enumerate(self._distinct) if number not in joint.changed]
        first = {id(bound.tensors[at]): at for at in self._distinct}
        self._ties = [(first[id(each)], at) for at, each in enumerate(bound.tensors) if first[id(each)] != at]
        places = joint.reference.places
        pairs = zip(places, returned, strict=True)
        own = {result: item for (kind, result), item in pairs if kind == "result" and item is not None}
        if len({item.memory for item in own.values()} - {GIVEN}) < len(own):
            raise Refused("its results share memory with each other, or with what it was given")
        for number, node in enumerate(results_of(joint.forward.graph)[: joint.results]):
            if (own[number].shape, own[number].dtype) != (node.meta["val"].shape, node.meta["val"].dtype):
                raise Refused(f"torch's trace gives result {number} another shape or dtype than the operators do")
        if not self._changes_alone(bound.tensors):
            raise Refused("what it changes shares memory with something else that it was given")
        self._strides = [own[result].strides for result in range(joint.results)]
        device = device_of(bound.tensors)
        assert device is not None, "others have no step"
        self.device = device
        of_kept = {at: number for at, (kind, number) in enumerate(joint.kept) if kind == "given"}
        freed = [at for at, (kind, _) in enumerate(joint.kept) if kind == "more"]
        self.segments = segments(joint.backward, len(joint.kept), of_kept, freed, buckets_now())
        self.forward = fused(joint.forward, [joint.results + number for number in joint.small])
        self.backwards = [fused(segment.graph) for segment in self.segments]
        begins = {"given": 0, "result": len(self._distinct), "more": len(self._distinct) + joint.results}
        self._kept = [
            tuple(begins[kind] + at for kind, at in map(joint.kept.__getitem__, segment.kept))
            for segment in self.segments
        ]
        """For each segment, the tensors that it takes: positions among the given, the results and others kept."""
        self.ways: list[_Ways] = []
        """For each segment, the ways of these tensors to its backward; empty until the forward has run once."""
        self._lendable: list[list[int]] = []
        """For each segment, the positions of kept tensors that are worth lending. No later segment takes them."""
        behind: set[int] = set()
        for segment in reversed(self.segments):
            large = [place for place, at in enumerate(segment.kept) if at in joint.large and at not in behind]
            self._lendable.insert(0, large)
            behind.update(segment.kept)
        self._is_prepared = False
        self.replays: StepGraphs | None = None
        """Its CUDA graphs, if there are to be any."""
        if cuda_graphs and _on_gpu(device):
            given = [bound.tensors[at] for at in self._distinct]
            self.replays = StepGraphs(self, given, set(map(id, bound.attributes)))
        self._constants, self._settings, self.autocast = bound.constants, settings_of(device), _autocast()
        self._addresses = array("Q", bytes(8 * len(bound.tensors)))

    def is_for(self, bound: Bound) -> bool:
        """Whether the call is of this kind."""
        return (
            self._constants == bound.constants
            and self.guard.holds(bound.tensors, self._addresses)
            and all(bound.tensors[first] is bound.tensors[second] for first, second in self._ties)
            and settings_of(self.device) == self._settings  # self.device: the guard has checked where tensors are
            and self._are_distinct(bound.tensors)
        )

    def _are_distinct(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether no more tensors are the same than `_ties` says, and no memory is shared with what is written."""
        if self.guard.are_apart([tensors[at] for at in self._distinct] if self._ties else tensors):
            return True  # nearly always, and it takes half of the time of what follows
        return len(set(map(id, tensors))) == len(self._distinct) and self._changes_alone(tensors)

    def _changes_alone(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether no given tensor shares memory with another one that the forward writes into."""
        changed, others = ([tensors[at] for at in places] for places in (self._changed, self._unchanged))
        return not changed or self.guard.are_apart(changed, others)

    @property
    def graphs(self) -> Iterator[tuple[str, nn.Module]]:
        """Its graphs, each with a name."""
        yield "forward", self.forward
        count = len(self.backwards)
        for number, backward in enumerate(self.backwards, 1):
            yield "backward" if count == 1 else f"backward ({number} of {count})", backward

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The graph's result for these tensors."""
        given = [tensors[at] for at in self._distinct]
        if is_captured := stream_capture.is_captured(given):
            stream_capture.keep(buffer for _, graph in self.graphs for buffer in graph.buffers())
        # the state of a GPU's generator cannot be read while draws are captured
        random = TorchRandomState() if self.joint.draws and not is_captured else None
        torch._C._set_grad_enabled(False)  # torch.no_grad takes 3 us
        flight: Flight | None = None
        try:
            replayed = None if self.replays is None or is_captured else self.replays.forward(given)
            if replayed is None:
                results, more = self.run_forward(given)
            else:
                results, more, flight = replayed
        finally:
            torch._C._set_grad_enabled(True)
        call = _Call(self, given, self.guard.versions(given), random, flight)
        token: tuple[torch.Tensor, ...] = ()
        for number in range(len(self.segments) - 1, 0, -1):
            # results get these segments in their history: a segment that kept a result itself would never be freed
            detached = [each.detach() for each in results]
            token = (_applied(call, number, (*given, *detached, *more), (), *token, *call.of(number)),)
        applied = _applied(call, 0, (*given, *results, *more), results, *token, *call.of(0))
        return self.joint.reference.output(given, applied)

    def run_forward(self, given: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Sequence[torch.Tensor]]:
        """The results, and the tensors that are kept beside them. The first call also prepares the backward."""
        if self._is_prepared:
            with self._watched():
                return self.forwarded(given)
        self._is_prepared = True
        with plans.preparing_together():
            found = self.forwarded(given)
            self._try_backward(given, *found)
        return found

    def forwarded(self, given: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Sequence[torch.Tensor]]:
        """As `run_forward`, and nothing else."""
        with self._launching():
            found = self.forward.forward(*given)  # not a call: it has no hooks
        lying = [_lying(result, strides) for result, strides in zip(found, self._strides, strict=False)]
        results, more = _alone(lying, found), found[self.joint.results :]
        if not self.ways:
            self.ways = [_Ways(taken, given, results, more) for taken in self._kept]
        return results, more

    def _try_backward(
        self, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor], more: Sequence[torch.Tensor]
    ) -> None:
        """Runs the backward once in advance, so that its kernels are compiled together with the forward's."""
        try:
            zeros = [torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) for meta in self.joint.gradients]
            values = self.begun(zeros)
            for number in range(len(self.segments)):
                kept = self.kept_of(number, given, results, more)
                # True, as in a real backward. There is no program yet, which would overwrite lent memory
                _, values = self.run_segment(number, kept, values, True)
        except torch.cuda.OutOfMemoryError:  # then the kernels are compiled at the first backward
            logger.info("fxfuse: too little memory to prepare the backward beside the forward")

    def kept_of(
        self, number: int, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor], more: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The tensors of a forward that a segment takes."""
        there = (*given, *results, *more)
        return [there[at] for at in self._kept[number]]

    def begun(self, gradients: Sequence[torch.Tensor]) -> Values:
        """The first values of a backward: the gradients of results, by name, in the traced strides."""
        return {
            name: _lying(gradient, meta.strides)
            for name, gradient, meta in zip(self.joint.tangents, gradients, self.joint.gradients, strict=True)
        }

    def run_segment(
        self, number: int, kept: Sequence[torch.Tensor], values: Values, is_last: bool, are_batched: bool = False
    ) -> tuple[Sequence[torch.Tensor | None], Values]:
        """A segment's gradients, and the values that later segments take.

        Args:
            kept: the tensors of the forward that it takes.
            values: gradients of results, and values of earlier segments, by name.
            is_last: whether the kept tensors are not needed afterwards, so that they may be lent.
            are_batched: whether gradients are batched by vmap. Then torch runs the segment's graph.
        """
        segment = self.segments[number]
        taken = [values[name] for name in segment.takes]
        if are_batched:
            found = segment.graph(*kept, *taken, Lent())
        else:
            lent = self._lent(number, kept) if is_last else Lent()
            with self._launching():
                found = self.backwards[number].forward(*kept, *taken, lent)
        if not segment.passes:
            return found, {}
        count = len(segment.gradients)
        there = {**values, **dict(zip(segment.makes, found[count:], strict=True))}
        return found[:count], {name: value for name, value in there.items() if name in segment.passes}

    def finished(self, flight: Flight | None) -> None:
        """Notes that the last backward of a call is over.

        Args:
            flight: the replay that ran its forward, if it was replayed.
        """
        if flight is not None:
            flight.is_over = True
        elif self.replays is not None:
            self.replays.completed()

    def _may_replay(self) -> bool:
        """Whether there are or may be CUDA graphs of it, which use the memory of what their forward keeps again."""
        return self.replays is not None and self.replays.reason is None

    def _watched(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.replays is None else self.replays.watched()

    @contextlib.contextmanager
    def _launching(self) -> Iterator[None]:
        """A context for running the graphs: without autocast, and with kernels chosen for replays if there are any."""
        with _without_autocast(), stream_capture.replaying() if self._may_replay() else contextlib.nullcontext():
            yield

    def _lent(self, number: int, kept: Sequence[torch.Tensor]) -> Lent:
        """Marks the kept tensors that are lent: large ones made for the backward alone, which nothing else needs.

        No later segment takes them, and no other tensor owns their memory.
        """
        marks, places = bytearray(len(kept)), self._lendable[number]
        lent = Lent.STAYS if self._may_replay() else 1
        for place, is_alone in zip(places, self.guard.alone([kept[place] for place in places]), strict=True):
            marks[place] = lent * is_alone
        return Lent(marks) if any(marks) else Lent()  # the same kind of call as if the graph were kept


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


Values: TypeAlias = dict[str, torch.Tensor]
"""Values of the backward's nodes, by name."""


class _Ways:
    """The ways of the tensors that a segment takes, from the forward to its backward.

    Autograd keeps the tensors that others have, too, and notices changes in the meantime. That takes time for each
    tensor. The tensors that only the backward has are kept in a tuple.
    """

    def __init__(
        self, taken: Sequence[int], given: Sequence[torch.Tensor], results: Sequence[torch.Tensor],
        more: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        """
        Args:
            taken: what the segment takes, by position among the given tensors, the results and `more`.
            more: what the forward keeps beside its results.
        """
        known = {beginning(tensor) for tensor in (*given, *results)}
        first = len(given) + len(results)
        own = {first + at for at, tensor in enumerate(more) if beginning(tensor) not in known}
        seen, unseen = [at for at in taken if at not in own], [at for at in taken if at in own]
        self.seen, self.unseen = _getter(seen), _getter(unseen)
        """Each selects some of the taken tensors: those that others have, too; those that only the backward has."""
        order = {at: place for place, at in enumerate((*seen, *unseen))}
        self._in_order = _getter([order[at] for at in taken])

    def joined(self, seen: Sequence[torch.Tensor], unseen: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Both kinds of tensors, in the order in which the segment takes them."""
        return self._in_order((*seen, *unseen))


def _getter(places: Sequence[int]) -> Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]:
    """A function that takes the elements at these places, all of them in one call into C."""
    if len(places) == 1:
        return lambda items: (items[places[0]],)
    return operator.itemgetter(*places) if places else lambda items: ()


class _Call(NamedTuple):
    """What the segments of one call of a step share."""

    step: TrainingStep
    given: list[torch.Tensor]
    versions: array[int]
    """The version counter of each given tensor after the forward."""
    random: TorchRandomState | None
    """The random state before the call, if the call draws random numbers."""
    flight: Flight | None
    """The replay that ran the forward; None if it was not replayed."""

    def of(self, number: int) -> list[torch.Tensor]:
        """The given tensors whose gradients a segment computes."""
        return [self.given[at] for at in self.step.segments[number].gradients]


def _lying(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor with these strides, copied if needed. A trace without in-place changes may have others than eager."""
    before = tensor.stride()
    if before == strides:
        return tensor
    if all(size <= 1 or one == other for size, one, other in zip(tensor.shape, before, strides, strict=True)):
        return tensor.as_strided(tensor.shape, strides)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _alone(results: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The results, where views whose memory nothing else in `found` shares are made tensors of their own.

    Autograd forbids in-place changes of a view that an autograd.Function returns.
    """
    if not any(result._is_view() for result in results):
        return tuple(results)
    shares = Counter(map(beginning, found))
    return tuple(
        torch.ops.aten._unsafe_view.default(result, result.shape).as_strided_(result.shape, result.stride())
        if result._is_view() and shares[beginning(result)] == 1
        else result
        for result in results
    )


def first_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The first position of each different tensor."""
    found: dict[int, int] = {}
    for at, tensor in enumerate(tensors):
        found.setdefault(id(tensor), at)
    return list(found.values())


class _Handed(NamedTuple):
    """What the backward of a segment hands on to the next one."""

    values: Values
    defined: frozenset[int] | None = None
    """The results, by position among the differentiable ones, that have a gradient; None if all have one."""
    are_batched: bool = False
    """Whether values are batched by vmap. Then torch computes with them."""
    derivable: Mapping[int, torch.Tensor | None] | None = None
    """All gradients, if they may have gradients themselves. Then the segments compute nothing more."""


class _Function(torch.autograd.Function):
    """A segment of the backward, for torch's autograd. That of segment 0 returns the results of the forward.

    In the forward each later segment returns a token, an empty tensor, which is an argument of the segment before it.
    So autograd runs a segment's backward, then whatever waits for its gradients, then the backward of the next segment.
    The token's gradient carries `_Handed` as an attribute.
    """

    @staticmethod
    def forward(
        ctx: Any, call: _Call, number: int, there: Sequence[torch.Tensor], results: tuple[torch.Tensor, ...],
        *given: torch.Tensor,
    ) -> Any:  # fmt: skip
        """
        Args:
            there: the tensors of the call, the results of the forward, and what it keeps beside them.
        """
        ctx.call, ctx.number, ctx.lent = call, number, False
        ctx.set_materialize_grads(False)  # neither unused results nor what only they depend on have gradients
        ways = call.step.ways[number]
        ctx.save_for_backward(*ways.seen(there))
        ctx.unseen = ways.unseen(there)
        if number > 0:
            return torch.empty(0, device=call.step.device)
        differentiable = call.step.joint.differentiable
        if len(differentiable) < len(results):
            ctx.mark_non_differentiable(*(each for at, each in enumerate(results) if at not in differentiable))
        return results

    @staticmethod
    def backward(ctx: Any, *arrived: torch.Tensor) -> tuple[Any, ...]:
        call, number, seen = ctx.call, ctx.number, ctx.saved_tensors
        if ctx.lent:
            raise FxfuseError(
                "an earlier backward of this graph has failed, and what the forward kept for it may be gone; "
                "call the model again, and then backward"
            )
        step, numbers = call.step, call.step.segments[number].gradients
        handed: _Handed = _begun(call, arrived) if number == 0 else arrived[0].handed  # type: ignore[attr-defined]
        found: Sequence[torch.Tensor | None]
        values: Values = {}
        if handed.derivable is not None:
            found = [handed.derivable[at] for at in numbers]
        else:
            ctx.lent = is_last = not (handed.are_batched or _keeps_graph())
            kept = step.ways[number].joined(seen, ctx.unseen)
            if is_last:
                ctx.unseen = ()
            flight = call.flight if is_last else None
            replayed = None if flight is None else flight.backward(number, handed.values)
            if replayed is not None:
                found, values = replayed
            else:
                with step._watched():
                    found, values = step.run_segment(number, kept, handed.values, is_last, handed.are_batched)
            if is_last and number + 1 == len(step.segments):
                step.finished(flight)
            if handed.defined is not None:
                depends = map(step.joint.depends.__getitem__, numbers)
                found = [
                    None if handed.defined.isdisjoint(which) else each
                    for each, which in zip(found, depends, strict=True)
                ]
        if number + 1 == len(step.segments):
            return None, None, None, None, *found
        token = torch.empty(0, device=step.device)
        token.handed = handed._replace(values=values)  # type: ignore[attr-defined]
        return None, None, None, None, token, *found


_applied: Final[Callable[..., Any]] = super(torch.autograd.Function, _Function).apply
"""_Function.apply, which first asks for each argument whether torch.func wraps it. Steps have no such arguments."""


def _begun(call: _Call, gradients: Sequence[torch.Tensor | None]) -> _Handed:
    """What the first segment gets: the gradients of results, zeros where there is none."""
    joint = call.step.joint
    arrived = [gradients[at] for at in joint.differentiable]
    whole = [
        torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) if gradient is None else gradient
        for gradient, meta in zip(arrived, joint.gradients, strict=True)
    ]
    if torch.is_grad_enabled():
        return _Handed({}, derivable=_derivable(call, whole))
    are_batched = any(map(_is_batched, whole))
    values = dict(zip(joint.tangents, whole, strict=True)) if are_batched else call.step.begun(whole)
    if not any(each is None for each in arrived):
        return _Handed(values, None, are_batched)
    defined = frozenset(number for number, gradient in enumerate(arrived) if gradient is not None)
    return _Handed(values, defined, are_batched)


_keeps_graph: Final[Callable[[], bool]] = graph_is_kept or (lambda: True)


_IS_GRADS_BATCHED: Final[Any] = torch._C._parse_dispatch_key("Batched")
"""The dispatch key of torch's older vmap, which is_grads_batched uses. Not all versions name it in DispatchKey."""


def _is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor is batched by a vmap: torch.func's, or that of is_grads_batched."""
    return bool(
        torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or torch._C._dispatch_keys(tensor).has(_IS_GRADS_BATCHED)
    )


def _derivable(call: _Call, gradients: Sequence[torch.Tensor]) -> Mapping[int, torch.Tensor | None]:
    """Gradients that have gradients themselves. torch computes them, from the graph before it was traced.

    Raises FxfuseError if a given tensor has been changed in place since the forward, apart from buffers that the
    forward itself changes. Also if the graph drew random numbers while it was captured as a CUDA graph.
    """
    given, joint = call.given, call.step.joint
    if any(
        now != before and number not in joint.changed
        for number, (now, before) in enumerate(zip(call.step.guard.versions(given), call.versions, strict=True))
    ):
        raise FxfuseError(
            "a tensor that the model was given, or one of its parameters, was changed in place between the forward and "
            "a backward with create_graph=True, which computes the forward again; change it afterwards, or a copy of it"
        )
    if joint.draws and call.random is None:
        raise FxfuseError(
            "gradients of gradients (create_graph=True) of a model that draws random numbers, as dropout does, cannot "
            "be captured as a CUDA graph: they compute the forward again, with the same numbers. Set the probabilities "
            "to 0, capture the model that fxfuse.optimize was given, or run this step without a capture"
        )
    with _drawing_again(call.random), _autocast_as(call.step.autocast):
        results = joint.reference(*given)
    wanted = sorted(joint.gives)
    found = torch.autograd.grad(
        [results[at] for at in joint.differentiable], [given[number] for number in wanted], list(gradients),
        create_graph=True, allow_unused=True,
    )  # fmt: skip
    return dict(zip(wanted, found, strict=True))


@contextlib.contextmanager
def _drawing_again(random: TorchRandomState | None) -> Iterator[None]:
    """A context in which torch draws the same numbers as from the state `random`. None: nothing is drawn."""
    if random is None:
        yield
        return
    now = TorchRandomState()
    random.restore()
    try:
        yield
    finally:
        now.restore()


# ------------------------------------------------------------------------------------------ what it depends on


def settings_of(device: torch.device) -> tuple[Any, ...]:
    """The global settings that a step depends on, for comparison."""
    return [ask() for ask in switches_of(device)], _autocast(), buckets_now()


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    """The types of devices for which torch.autocast is on, each with its dtype."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    found = [(kind, functional.current_autocast(kind)) for kind in ("cpu", "cuda")]
    return tuple((kind, dtype) for kind, dtype in found if dtype is not None)


@contextlib.contextmanager
def _autocast_as(kinds: tuple[tuple[str, torch.dtype], ...], enabled: bool = True) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind, dtype in kinds:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        yield


def _without_autocast() -> contextlib.AbstractContextManager[Any]:
    """A context with torch.autocast off: the casts are nodes of the traced graphs."""
    now = _autocast()
    return _autocast_as(now, enabled=False) if now else contextlib.nullcontext()
