"""One kind of call that needs gradients: a graph's forward and its backward, each fused like any other graph.

The two graphs run without gradients, so that they become programs; one autograd.Function stands for both, or one for
each segment of the backward (segments.py), and the first of them for the forward. Gradients of gradients come from the
graph itself, as torch computes it.
"""

from __future__ import annotations

import contextlib
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import fx, nn

from fxfuse import functional, plans, stream_capture
from fxfuse.errors import FxfuseError
from fxfuse.guard import Guard
from fxfuse.joint import Joint
from fxfuse.program import switches
from fxfuse.program.binding import Bound
from fxfuse.program.values import Lent, Refused, device_of
from fxfuse.segments import buckets_now, segments
from fxfuse.state import TorchRandomState

logger = logging.getLogger("fxfuse")


Returned: TypeAlias = list[tuple[tuple[int, ...], int] | None]
"""Of a graph's results the strides and which memory it is; None for one that is no tensor."""
GIVEN: Final = -1
"""Memory that the graph was given."""


class TrainingStep:
    """Runs one kind of call that needs gradients, and its backward."""

    def __init__(
        self, joint: Joint, fused: Callable[[fx.GraphModule], nn.Module], bound: Bound, returned: Returned
    ) -> None:
        """
        Args:
            returned: by the graph itself, in a call of this kind. Raises Refused if its results share memory.
        """
        self.joint, self._distinct = joint, first_of(bound.tensors)
        first = {id(bound.tensors[at]): at for at in self._distinct}
        self._ties = [(first[id(each)], at) for at, each in enumerate(bound.tensors) if first[id(each)] != at]
        places = joint.reference.places
        pairs = zip(places, returned, strict=True)
        own = {result: item for (kind, result), item in pairs if kind == "result" and item is not None}
        if len({memory for _, memory in own.values()} - {GIVEN}) < len(own):
            raise Refused("its results share memory with each other, or with what it was given")
        if not self._changes_alone(bound.tensors):
            raise Refused("what it changes shares memory with something else that it was given")
        self._strides = [own[result][0] for result in range(joint.results)]
        device = device_of(bound.tensors)
        assert device is not None, "others have no step"
        self.device = device
        of_kept = {at: number for at, (kind, number) in enumerate(joint.kept) if kind == "given"}
        self.segments = segments(joint.backward, len(joint.kept), of_kept, buckets_now())
        self.forward, self.backwards = fused(joint.forward), [fused(segment.graph) for segment in self.segments]
        self._lendable: list[list[int]] = []
        """By segment, which of what it takes is worth lending, as no segment behind takes it."""
        behind: set[int] = set()
        for segment in reversed(self.segments):
            large = [place for place, at in enumerate(segment.kept) if at in joint.large and at not in behind]
            self._lendable.insert(0, large)
            behind.update(segment.kept)
        self._is_prepared = False
        self._constants, self._settings, self.autocast = bound.constants, settings_of(device), _autocast()
        self._guard = Guard(bound.tensors)
        self._addresses = array("Q", bytes(8 * len(bound.tensors)))

    def is_for(self, bound: Bound) -> bool:
        """Whether the call is of this kind."""
        return (
            self._constants == bound.constants
            and self._guard.holds(bound.tensors, self._addresses)
            and len(set(map(id, bound.tensors))) == len(self._distinct)
            and all(bound.tensors[first] is bound.tensors[second] for first, second in self._ties)
            and settings_of(self.device) == self._settings  # on which the guard knows the tensors to be
            and self._changes_alone(bound.tensors)
        )

    def _changes_alone(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether what the forward writes into is no part of anything else that it was given."""
        if not self.joint.changed:
            return True
        memory = Counter(tensors[at].untyped_storage()._cdata for at in self._distinct)
        return all(memory[tensors[self._distinct[n]].untyped_storage()._cdata] == 1 for n in self.joint.changed)

    @property
    def graphs(self) -> Iterator[tuple[str, nn.Module]]:
        """Its graphs, by what they are."""
        yield "forward", self.forward
        count = len(self.backwards)
        for number, backward in enumerate(self.backwards, 1):
            yield "backward" if count == 1 else f"backward ({number} of {count})", backward

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the graph makes of them."""
        given = [tensors[at] for at in self._distinct]
        if is_captured := stream_capture.is_captured(given):
            stream_capture.keep(buffer for _, graph in self.graphs for buffer in graph.buffers())
        # torch tells nobody the state of a GPU's generator while its draws are captured
        random = TorchRandomState() if self.joint.draws and not is_captured else None
        torch._C._set_grad_enabled(False)  # torch.no_grad takes 3 us
        try:
            results, more = self.run_forward(given)
        finally:
            torch._C._set_grad_enabled(True)
        call = _Call(self, given, [each._version for each in given], random)
        token: tuple[torch.Tensor, ...] = ()
        for number in range(len(self.segments) - 1, 0, -1):
            # results come to have these segments in their history: what holds a result would never be freed
            detached = [each.detach() for each in results]
            kept = self._kept_of(number, given, detached, more)
            token = (_Function.apply(call, number, kept, (), *token, *call.of(number)),)
        kept = self._kept_of(0, given, results, more)
        return self.joint.reference.output(given, _Function.apply(call, 0, kept, results, *token, *call.of(0)))

    def run_forward(self, given: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Sequence[torch.Tensor]]:
        """Results, and what is to be kept beside them."""
        if self._is_prepared:
            return self._forwarded(given)
        self._is_prepared = True
        with plans.preparing():
            found = self._forwarded(given)
            self._try_backward(given, *found)
        return found

    def _forwarded(self, given: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Sequence[torch.Tensor]]:
        with _without_autocast():
            found = self.forward.forward(*given)  # not a call: it has no hooks
        results = [_lying(result, strides) for result, strides in zip(found, self._strides, strict=False)]
        return _alone(results, found), found[self.joint.results :]

    def _try_backward(
        self, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor], more: Sequence[torch.Tensor]
    ) -> None:
        """Runs the backward once before anybody asks for it, so that its kernels are compiled beside the forward's."""
        try:
            zeros = [torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) for meta in self.joint.gradients]
            values = self.begun(zeros)
            for number in range(len(self.segments)):
                kept = self._kept_of(number, given, results, more)
                # as it is to be called; there is no program yet, which would take what is lent
                _, values = self.run_segment(number, kept, values, True)
        except torch.cuda.OutOfMemoryError:  # then they are compiled when it is called
            logger.info("fxfuse: too little memory to prepare the backward beside the forward")

    def _kept_of(
        self, number: int, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor],
        more: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:  # fmt: skip
        """What a segment takes of the forward's; what it does not need may be changed in the meantime."""
        sources = {"given": given, "result": results, "more": more}
        return [sources[kind][at] for kind, at in map(self.joint.kept.__getitem__, self.segments[number].kept)]

    def begun(self, gradients: Sequence[torch.Tensor]) -> Values:
        """What the first segment takes: gradients of results."""
        return {
            name: _lying(gradient, meta.strides)
            for name, gradient, meta in zip(self.joint.tangents, gradients, self.joint.gradients, strict=True)
        }

    def run_segment(
        self, number: int, kept: Sequence[torch.Tensor], values: Values, is_last: bool, are_batched: bool = False
    ) -> tuple[Sequence[torch.Tensor | None], Values]:
        """A segment's gradients, and what is there for those behind.

        Args:
            is_last: whether nobody asks for what the forward made and kept for this segment afterwards.
        """
        segment = self.segments[number]
        taken = [values[name] for name in segment.takes]
        if are_batched:
            found = segment.graph(*kept, *taken, Lent())
        else:
            lent = self._lent(number, kept) if is_last else Lent()
            with _without_autocast():
                found = self.backwards[number].forward(*kept, *taken, lent)
        if not segment.passes:
            return found, {}
        count = len(segment.gradients)
        there = {**values, **dict(zip(segment.makes, found[count:], strict=True))}
        return found[:count], {name: value for name, value in there.items() if name in segment.passes}

    def _lent(self, number: int, kept: Sequence[torch.Tensor]) -> Lent:
        """What of that the forward made for the backward alone, no segment behind needs, and nobody has got hold of; if
        it is large."""
        marks, places = bytearray(len(kept)), self._lendable[number]
        for place, mark in zip(places, self._guard.alone([kept[place] for place in places]), strict=True):
            marks[place] = mark
        return Lent(marks) if any(marks) else Lent()  # as if the graph were kept: no other kind of call


Values: TypeAlias = dict[str, torch.Tensor]
"""Of nodes of the backward, by name."""


class _Call(NamedTuple):
    """A call of a step, which its segments share."""

    step: TrainingStep
    given: Sequence[torch.Tensor]
    versions: Sequence[int]
    """How often each of those had been changed."""
    random: TorchRandomState | None
    """Where random numbers were before it, if it draws any."""

    def of(self, number: int) -> list[torch.Tensor]:
        """The tensors whose gradients a segment gives."""
        return [self.given[at] for at in self.step.segments[number].gradients]


def _lying(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor with these strides: in a graph that changes nothing in place, they may have become others."""
    before = tensor.stride()
    if before == strides:
        return tensor
    if all(size <= 1 or one == other for size, one, other in zip(tensor.shape, before, strides, strict=True)):
        return tensor.as_strided(tensor.shape, strides)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _alone(results: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The results, of which views of memory that nobody else has (among what is found) are none: autograd lets nobody
    change a view in place that an autograd.Function has given."""
    if not any(result._is_view() for result in results):
        return tuple(results)
    shares = Counter(map(_beginning, found))
    return tuple(
        torch.ops.aten._unsafe_view.default(result, result.shape).as_strided_(result.shape, result.stride())
        if result._is_view() and shares[_beginning(result)] == 1
        else result
        for result in results
    )


def _beginning(tensor: torch.Tensor) -> int:
    """Where the memory begins that a tensor lies in. Its storage is not asked: the Python object that torch makes for
    that would own the memory from then on, which is not lent then."""
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()


def first_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where each tensor stands first."""
    found: dict[int, int] = {}
    for at, tensor in enumerate(tensors):
        found.setdefault(id(tensor), at)
    return list(found.values())


class _Handed(NamedTuple):
    """What a segment's backward leaves to the next one's."""

    values: Values
    defined: frozenset[int] | None = None
    """The results that have a gradient; None if all have one."""
    are_batched: bool = False
    """Whether values are many at once, under vmap: torch computes with those."""
    derivable: Mapping[int, torch.Tensor | None] | None = None
    """The gradients, if those may have gradients themselves: then there is nothing left to do."""


class _Function(torch.autograd.Function):
    """A segment of the backward, for torch's autograd. The first one to run gives what the forward has computed.

    Autograd runs a segment's backward, then whatever waits for its gradients, then the backward of the next one: that
    one's result in the forward, an empty tensor, is an argument of this one. Its gradient has on it what is `_Handed`.
    """

    @staticmethod
    def forward(
        ctx: Any, call: _Call, number: int, kept: Sequence[torch.Tensor], results: tuple[torch.Tensor, ...],
        *given: torch.Tensor,
    ) -> Any:  # fmt: skip
        ctx.call, ctx.number, ctx.lent = call, number, False
        ctx.set_materialize_grads(False)  # what depends on results that nobody uses has no gradient
        ctx.save_for_backward(*kept)
        if number > 0:
            return torch.empty(0, device=call.step.device)
        differentiable = call.step.joint.differentiable
        if len(differentiable) < len(results):
            ctx.mark_non_differentiable(*(each for at, each in enumerate(results) if at not in differentiable))
        return results

    @staticmethod
    def backward(ctx: Any, *arrived: torch.Tensor) -> tuple[Any, ...]:
        call, number, kept = ctx.call, ctx.number, ctx.saved_tensors
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
            found, values = step.run_segment(number, kept, handed.values, is_last, handed.are_batched)
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


def _begun(call: _Call, gradients: Sequence[torch.Tensor | None]) -> _Handed:
    """What the first segment is handed: the gradients of results, zeros where there is none."""
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


_keeps_graph: Final[Callable[[], bool]] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)
"""Whether there may be another backward of what the one that runs now goes through."""


_IS_GRADS_BATCHED: Final[Any] = torch._C._parse_dispatch_key("Batched")
"""The key of torch's first vmap, which is_grads_batched keeps to. Not all versions name it in DispatchKey."""


def _is_batched(tensor: torch.Tensor) -> bool:
    """Whether it is many at once, under vmap (torch.func's, and is_grads_batched's)."""
    return bool(
        torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or torch._C._dispatch_keys(tensor).has(_IS_GRADS_BATCHED)
    )


def _derivable(call: _Call, gradients: Sequence[torch.Tensor]) -> Mapping[int, torch.Tensor | None]:
    """Gradients that have gradients themselves: by torch, from the graph as it was before it was traced.

    Raises FxfuseError if what the graph was given has been changed in place since, but for buffers that it changed; and
    if it drew random numbers while it was captured as a CUDA graph.
    """
    given, joint = call.given, call.step.joint
    if any(
        each._version != before and number not in joint.changed
        for number, (each, before) in enumerate(zip(given, call.versions, strict=True))
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
    """Inside, torch draws what it drew from that state on; without one, nothing is drawn."""
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
    return switches(device), _autocast(), buckets_now()


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    """The types of devices for which torch.autocast does something, and in which dtype."""
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
    """The graphs cast what is to be cast themselves."""
    now = _autocast()
    return _autocast_as(now, enabled=False) if now else contextlib.nullcontext()
