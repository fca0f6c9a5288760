"""A call of a fused graph as a program: kernels launched from one list, and between them what torch runs.

The code of a graph looks up a plan for every region, makes a tensor for every result and launches kernels one by one.
A program does that once, for one kind of call (shapes, strides, dtypes, switches): it is recorded from what plans do in
the second call of its kind, node by node. What they launched becomes entries of a list that one call into C works
off (executor.h); results that only kernels read are places in a piece of memory, the arena, reused as values die;
views are addresses. What torch's library runs stays a call from Python. The rest is a function written for this kind of
call, of which `Program.code` is the text.

Weights are read anew at every call, modes and hooks are asked for before (optimize.py). Calls that want gradients, or
are observed, run the graph's own code.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import fx, nn

from fxfuse import build, functional, guard, recapture, stream_capture
from fxfuse.cuda import gpu
from fxfuse.cuda.precision import tf32_allowed
from fxfuse.errors import FxfuseError, LaunchError
from fxfuse.guard import Guard
from fxfuse.locks import free_in_children
from fxfuse.program import attention
from fxfuse.program.attention_by_hand import joined
from fxfuse.program.binding import Binding, Bound, Repeats, are_constant
from fxfuse.program.constants import without_constants
from fxfuse.program.leaves import Leaves
from fxfuse.program.loops import forget_indices
from fxfuse.program.merge import NoKernel, in_one_launch, merged
from fxfuse.program.record import KINDS, NOT_YET, Recorder, check_graph
from fxfuse.program.values import (
    ALIGNMENT,
    PLAIN,
    Call,
    Launch,
    Lent,
    Refused,
    Slot,
    Step,
    address,
    alignment,
    device_of,
    slots_of,
)
from fxfuse.program.write import Writer

logger = logging.getLogger("fxfuse")

MOST_KEPT: Final = 8
"""Kinds of calls that a graph keeps a program for; the oldest goes first."""
MOST_TRIES: Final = 4
"""Calls that are recorded in vain, since a plan was missing."""

MERGING: Final = ("cuda", "cpu")
"""Types of devices for which what stands between regions is merged."""
ATTENDING: Final = ("cuda",)
"""Those on which attention that is written by hand may be torch's own."""

_EXECUTOR: Final = build.Source('#include "executor.h"\n', None, "the executor of programs")
SOURCES: Final = (_EXECUTOR, guard.SOURCE)
"""What all programs need."""


class Program:
    """What runs one kind of call."""

    def __init__(self, recorder: Recorder, tensors: list[torch.Tensor], constants: tuple[Any, ...]) -> None:
        """Of a recorded call of these tensors and other arguments. Raises ToolchainError or BuildError."""
        device = device_of(tensors)
        assert device is not None, "others are not recorded"
        steps, kept = without_constants(in_one_launch(_merged(recorder, device)), recorder.output)
        lent = next((each for each in constants if isinstance(each, Lent)), b"")
        writer = Writer(recorder, steps, kept, device, recorder.lent(lent))
        self.code = writer.code
        self.arena_size = max((arena.size for arena in writer.arenas), default=0)
        """Bytes for results of kernels at once, but for those that the caller gets."""
        self.launches = len(writer.launches) // 4
        self.calls = Counter(step.name for step in writer.steps if isinstance(step, Call))
        """Of torch, by the names of operators and modules."""
        self.constants = tuple(slot.constant for slot in kept if slot.constant is not None)
        """What it made of numbers alone while it was recorded, and reads at every call."""
        self._marks = writer.marks
        self.values = recorder.described()
        """What the graph's nodes are like in such a call, by name; tensors as TensorMeta."""
        self.kernels = tuple(
            (tuple(step.label.partition(": ")[0].split(", ")), build.source_of(step.event.function))
            for step in writer.steps
            if isinstance(step, Launch)
        )
        """What it launches, in order: the names of the nodes that a kernel computes, and its source."""
        self._kept = writer.launches, writer.references, writer.params
        names = writer.names
        names["launch"] = _launching(build.load(_EXECUTOR))
        names["LAUNCHES"], names["REFERENCES"] = (part.buffer_info()[0] for part in self._kept[:2])
        self.repeats = not (writer.borrows or any(_changes_what_is_given(step) for step in writer.steps))
        """Whether the call can be made again after some of it has run."""
        exec(compile(self.code, "<fxfuse program>", "exec"), names)
        self.run: Callable[[Sequence[torch.Tensor], array[int]], Any] = names["program"]
        """run(tensors, table), of which the table of addresses is this call's own."""
        self._constants = constants
        self._switches = switches(device)
        self._differentiable = any(tensor.requires_grad for tensor in tensors)
        self._device = device
        self._ties, self._distances = recorder.ties, recorder.distances
        self._distinct = len(tensors) - len(recorder.ties)
        self._guard = Guard(tensors, alignment=ALIGNMENT)
        self._states = _random_states(recorder.steps, tensors)
        self._blank = array("Q", bytes(8 * writer.table_size))
        for index, tensor in writer.constants.items():
            self._blank[index] = address(tensor)

    @property
    def steps(self) -> tuple[Step, ...]:
        """What it launches and calls, in order; calls that only make views are none."""
        return tuple(step for steps in self._marks.values() for step in steps)

    @contextlib.contextmanager
    def watched(self, around: Callable[[Step], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
        """Inside, each step of the program runs within `around(step)`, launches one by one."""
        names = {**self.run.__globals__, "around": around}
        lines: list[str] = []
        launched = 0
        for number, line in enumerate(self.code.splitlines()):
            for step in self._marks.get(number, ()):
                names[f"step{len(names)}"] = step
                lines.append(f"    with around(step{len(names) - 1}):")
                if step.is_launch:
                    line = f"    launch(b'', stream, LAUNCHES, REFERENCES, table, {launched}, {launched + 1})"
                    launched += 1
                lines.append(f"    {line}")
            if number not in self._marks:
                lines.append(line)
        exec(compile("\n".join(lines), "<fxfuse program, watched>", "exec"), names)
        unwatched, self.run = self.run, names["program"]
        try:
            yield
        finally:
            self.run = unwatched

    def table(self, tensors: list[torch.Tensor], constants: tuple[Any, ...]) -> array[int] | None:
        """Where the tensors lie, if the call is of this kind; no gradient is due in one that is. Else None."""
        if (self._differentiable and torch.is_grad_enabled()) or self._constants != constants:
            return None
        table = self._blank[:]
        alike = tensors
        if self._states:
            if any(_kind(tensors[place]) != _kind(state) for place, state in self._states):
                return None
            alike = list(tensors)
            for place, state in self._states:
                alike[place] = state
        is_alike = (
            self._guard.holds(alike, table)
            and (self.repeats or len(set(map(id, tensors))) == self._distinct)  # what is written must be no other
            and all(tensors[first] is tensors[second] for first, second in self._ties)
            and all(table[second] - table[first] == distance for first, second, distance in self._distances)
            and self._switches == switches(self._device)
        )
        return table if is_alike else None


def _random_states(steps: Sequence[Launch | Call], tensors: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """Those of the tensors, with their places, that lie on a CPU and that only gradients of torch's attention read.

    They say where its forward drew random numbers. In a forward that is captured as a CUDA graph they lie on the GPU:
    torch takes both.
    """
    readers: dict[Slot, list[str]] = {}
    for step in steps:
        for slot in slots_of(step):
            if slot.kind == "given" and slot.is_apart:
                readers.setdefault(slot, []).append(step.name if isinstance(step, Call) else "")
    return [
        (slot.index, tensors[slot.index])
        for slot, names in readers.items()
        if all(name.endswith("attention_backward") for name in names)
    ]


def _kind(tensor: torch.Tensor) -> Any:
    return type(tensor), tensor.shape, tensor.dtype, tensor.requires_grad


def _merged(recorder: Recorder, device: torch.device) -> Sequence[Launch | Call]:
    """The recorded steps, with kernels of ours for what stands between regions."""
    if device.type not in MERGING:
        return recorder.steps
    try:
        if device.type in ATTENDING:
            choose = functools.partial(attention.by_hand, device)
            steps = joined(recorder.steps, recorder.output, choose, recorder.is_lasting)
            with contextlib.suppress(NoKernel):
                return merged(steps, recorder.output, device)
        return merged(recorder.steps, recorder.output, device)
    except FxfuseError as error:
        logger.warning("fxfuse: torch runs what stands between regions: %s", error)
        return recorder.steps


def _with_all_kernels(recorder: Recorder, tensors: Sequence[torch.Tensor], result: Any) -> Any:
    """`result`, when all has been asked for that a program would need, which nobody will run: its GPU is not here."""
    device = device_of(tensors)
    assert device is not None, "others are not recorded"
    _merged(recorder, device)
    for source in SOURCES:
        build.load(source)
    return result


def _launching(launch: Callable[..., None]) -> Callable[..., None]:
    def launched(*args: Any) -> None:
        try:
            launch(*args)
        except RuntimeError as error:
            raise LaunchError(f"a kernel of a program could not be launched: {error}") from error

    return launched


def _changes_what_is_given(step: Launch | Call) -> bool:
    """Whether it may write into an argument or a parameter."""
    if isinstance(step, Launch):
        return any(slot.kind == "given" for slot in step.writes)
    overwrites = step.overwrites and not step.is_pure
    return overwrites and any(value.slot.kind == "given" for value in step.values())


def switches(device: torch.device) -> tuple[Any, ...]:
    kinds = [ask() for ask in _KINDS_OF_ATTENTION]
    plain = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), kinds
    if device.type != "cuda":
        return plain
    return *plain, tf32_allowed("linear"), tf32_allowed("conv2d"), gpu.index_asked()()


_KINDS_OF_ATTENTION: Final[tuple[Callable[[], Any], ...]] = (
    torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled, torch._C._get_math_sdp_enabled,
    getattr(torch._C, "_get_cudnn_sdp_enabled", bool), getattr(torch._C, "_get_sdp_priority_order", tuple),
)  # fmt: skip
"""What torch chooses the kind of attention by."""


class Programs:
    """The programs of one graph."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        self.reason: str | None = None
        """Why there are none."""
        self.programs: list[Program] = []
        self.when_made: Callable[[int, Program], None] | None = None
        """Is told of each new program, and how many there were with it."""
        self._made = 0
        self._root, self._graph = root, graph
        self._repeats = Repeats()
        self._tries = 0
        self._lock = free_in_children(threading.RLock())
        self._pays = any(node.target in KINDS or isinstance(node.target, torch._ops.OpOverload) for node in graph.nodes)
        """Whether a program is worth while even if torch runs all of it: an operator's own function is quicker."""
        try:
            if type(graph._codegen) is not fx.graph.CodeGen:  # torch.export's
                raise Refused("its code takes arguments apart, and puts results together")
            check_graph(root, graph)
            self._binding = Binding(root, graph)
        except Refused as refused:
            self.reason = str(refused)
        self._leaves = Leaves(self._binding.modules if self.reason is None else ())

    def __reduce__(self) -> tuple[Any, ...]:
        """Nobody else's: whoever pickles a graph with its attributes (torch.package) gets none."""
        return type(None), ()

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """forward(*args, **kwargs), by a program if there is one for such a call or it is time for one."""
        if self.reason is not None or functional._observed(profiled=False) or functional._intercepted():
            return forward(*args, **kwargs)
        if not self._leaves.are_as_before():
            return forward(*args, **kwargs)
        bound = self._binding.of(args, kwargs)
        if bound is None:
            return forward(*args, **kwargs)
        tensors, constants = bound.tensors, bound.constants
        for program in self.programs:
            table = program.table(tensors, constants)
            if table is not None:
                if program.constants and stream_capture.is_captured(tensors):
                    stream_capture.keep(program.constants)
                try:
                    return program.run(tensors, table)
                except LaunchError:
                    self.programs = [other for other in self.programs if other is not program]
                    if not program.repeats:
                        raise
                break  # the graph's own code finds which region it is, and what to do
        else:
            return self._unknown(forward, args, kwargs, bound)
        return forward(*args, **kwargs)

    def _unknown(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], bound: Bound) -> Any:
        """A call for which there is no program: recorded if one of the last was of the same kind."""
        tensors, constants = bound.tensors, bound.constants
        if not PLAIN.issuperset(map(type, tensors)):  # a parameter that is gone, or a subclass
            return forward(*args, **kwargs)
        merges = any(tensor.device.type in MERGING for tensor in tensors)
        if not self._pays and not merges:
            self.reason = "nothing is fused"
            return forward(*args, **kwargs)
        if functional._needs_gradient(tensors) or not are_plain(tensors, constants):
            return forward(*args, **kwargs)
        if stream_capture.is_captured(tensors) or recapture.is_waiting():
            return forward(*args, **kwargs)
        places = MOST_KEPT - len(self.programs)
        kind = self._repeats.look(lambda: ([(described(t), alignment(t)) for t in tensors], constants), places)
        if kind is None or not kind.has_repeated:
            return forward(*args, **kwargs)
        try:
            return self._recorded(bound, by_parts=merges)
        finally:
            forget_indices()

    def _recorded(self, bound: Bound, by_parts: bool) -> Any:
        """The graph's result; there is a program of the call afterwards, or a reason."""
        tensors, given = bound.tensors, self._binding.values(bound)
        recorder = Recorder(self._root, self._graph, self._leaves, given, tensors, by_parts)
        result = recorder.run()
        if recorder.reason is not None:
            self._tries += 1
            if recorder.reason != NOT_YET or self._tries == MOST_TRIES:
                self.reason = recorder.reason
                logger.info("fxfuse: no program is made: %s", self.reason)
            return result
        try:
            if gpu.standing_in() is not None:
                return _with_all_kernels(recorder, tensors, result)
            program = Program(recorder, tensors, bound.constants)
        except Exception as error:
            self.reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
            logger.warning("fxfuse: no program is made", exc_info=error)
            return result
        if not program.launches and not self._pays and not any(tensor.is_cuda for tensor in tensors):
            self.reason = "torch runs all of it"  # of which the graph's own code knows as much
            return result
        self._repeats.count_anew()
        with self._lock:
            self.programs = [program, *self.programs][:MOST_KEPT]
        self._made += 1
        if self.when_made is not None:
            self.when_made(self._made, program)
        return result


def described(tensor: torch.Tensor) -> Any:
    """What must be the same in two calls. Whatever else matters a program's own guard sees."""
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def prepare(source: build.Source) -> None:
    """Compiles one of what all programs need, if there is a compiler. Where there is none, programs say so."""
    with contextlib.suppress(FxfuseError):
        build.load(source)


def are_plain(tensors: Sequence[torch.Tensor], constants: tuple[Any, ...]) -> bool:
    return (
        device_of(tensors) is not None
        and all(
            tensor.layout is torch.strided and not (tensor.is_neg() or tensor.is_conj() or tensor.is_nested)
            for tensor in tensors
        )
        and are_constant(constants)
    )
