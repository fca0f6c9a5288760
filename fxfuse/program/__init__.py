"""A program: a recorded call of a fused graph, as a list of kernel launches with calls of torch between them.

The graph's own code looks up a plan for every region, makes a tensor for every result and launches kernels one by one.
A program does these things once, for one kind of call (shapes, strides, dtypes, switches). The second call of a kind is
recorded, node by node, from what its plans do:

- Kernel launches become entries of a list. One call into C makes all launches between two calls of torch (executor.h).
- Results that only kernels read are offsets in a piece of memory, the arena, which is reused as values die.
- Views are addresses.
- Operators that torch's library runs stay calls from Python.

`Program.code` is the text of the Python function that does all this for calls of this kind.

Weights are read anew at every call. optimize.py checks modes and hooks before a program runs. Calls that need
gradients, or that are observed, run the graph's own code.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import fx, nn

from fxfuse import ahead, build, functional, guard, plans, recapture, stream_capture
from fxfuse.cuda import gpu
from fxfuse.cuda.precision import tf32_allowed
from fxfuse.errors import FxfuseError, LaunchError, first_line
from fxfuse.garbage import uncollected
from fxfuse.guard import Guard
from fxfuse.locks import free_in_children
from fxfuse.program import attention, attention_training
from fxfuse.program.attention_by_hand import joined
from fxfuse.program.binding import Binding, Bound, Repeats, are_constant
from fxfuse.program.constants import constants_first, without_constants
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
    is_plain,
    slots_of,
)
from fxfuse.program.write import Writer, launch_line

logger = logging.getLogger("fxfuse")

MOST_KEPT: Final = 8
"""The most programs that a graph keeps, one for each kind of call; the oldest is dropped first."""
MOST_TRIES: Final = 4
"""The number of recordings that may fail because a plan was missing. After that the graph gets no programs."""

MERGING: Final = ("cuda", "cpu")
"""Types of devices on which the operators between regions are merged into kernels of loops."""
ATTENDING: Final = ("cuda",)
"""Types of devices on which attention that a model writes out may be replaced by torch's own operators."""


def _executor(device: torch.device) -> build.Source:
    architecture = gpu.capability(device) if device.type == "cuda" else None
    return build.Source('#include "executor.h"\n', architecture, "the executor of programs")


def sources(device: torch.device) -> tuple[build.Source, ...]:
    """Compiled parts that every program on a device needs."""
    return _executor(device), guard.SOURCE


class Program:
    """A recorded call, which runs all calls of its kind."""

    def __init__(
        self, recorder: Recorder, tensors: list[torch.Tensor], constants: tuple[Any, ...],
        tables: Sequence[dict[Any, Any]] = (), together: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Merges the recorded steps, and writes the program's code. Raises ToolchainError or BuildError.

        Args:
            tensors: the tensors of the recorded call, the model's included (`Bound.tensors`).
            constants: the call's other arguments, and the types of all arguments (`Bound.constants`).
            tables: dictionaries that must hold the same objects at every call (`Leaves.tables`).
            together: as `Programs.together`.
        """
        device = device_of(tensors)
        assert device is not None, "others are not recorded"
        steps, kept = without_constants(in_one_launch(_merged(recorder, device)), recorder.output)
        lent = next((each for each in constants if isinstance(each, Lent)), Lent())
        writer = Writer(recorder, steps, kept, device, recorder.lent(lent), together, frees=not lent.stays)
        self.code = writer.code
        self.arena_size = writer.arena_size
        """Bytes of the largest arena. Arenas hold the results of kernels, except those that the caller gets."""
        self.launches = len(writer.launches) // 4
        self.calls = Counter(step.name for step in writer.steps if isinstance(step, Call))
        """How often it calls torch, by the names of operators and modules."""
        self.constants = tuple(slot.constant for slot in kept if slot.constant is not None)
        """Tensors that were made of numbers alone while the call was recorded, and that every call reads."""
        self._marks = writer.marks
        self.values = recorder.described()
        """The results of the graph's nodes in such a call, by name; tensors as TensorMeta."""
        self.kernels = tuple(
            (tuple(step.label.partition(": ")[0].split(", ")), build.source_of(step.event.function))
            for step in writer.steps
            if isinstance(step, Launch)
        )
        """The kernels that it launches, in order: for each, the names of the nodes that it computes, and its source."""
        self._kept = writer.launches, writer.references, writer.params
        names = writer.names
        names["LAUNCHES"], names["REFERENCES"] = (part.buffer_info()[0] for part in self._kept[:2])
        if self.launches:
            executor = build.load(_executor(device))
            names["launch"] = _launching(executor)
            names["REPLAYS"] = _replays(self, executor, writer.replays)
        self.repeats = not (writer.borrows or any(_changes_what_is_given(step) for step in writer.steps))
        """Whether the call can be repeated after a part of it has run: it overwrites no argument, parameter or lent
        memory."""
        exec(compile(self.code, "<fxfuse program>", "exec"), names)
        self.run: Callable[[Sequence[torch.Tensor], array[int]], Any] = names["program"]
        """run(tensors, table). Every call needs its own table of addresses, from `table`."""
        self._constants = constants
        names_of_calls = " ".join(self.calls).lower()
        self._asked = switches_of(device, "attention" in names_of_calls or "transformer" in names_of_calls)
        self._switches = [ask() for ask in self._asked]
        self._differentiable = any(tensor.requires_grad for tensor in tensors)
        self._device = device
        self._ties, self._distances = recorder.ties, recorder.distances
        self._distinct = len(tensors) - len(recorder.ties)
        self._guard = Guard(tensors, tables, ALIGNMENT)
        self._states = _random_states(recorder.steps, tensors)
        self._blank = array("Q", bytes(8 * writer.table_size))
        for index, tensor in writer.constants.items():
            self._blank[index] = address(tensor)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Its launches and calls of torch, in order. Calls that only make views are left out."""
        return tuple(step for steps in self._marks.values() for step in steps)

    @contextlib.contextmanager
    def watched(self, around: Callable[[Step], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
        """A context in which each step of the program runs within `around(step)`. Launches are made one by one."""
        names = {**self.run.__globals__, "around": around}
        lines: list[str] = []
        launched = 0
        for number, line in enumerate(self.code.splitlines()):
            for step in self._marks.get(number, ()):
                names[f"step{len(names)}"] = step
                lines.append(f"    with around(step{len(names) - 1}):")
                if step.is_launch:
                    line = f"    {launch_line(launched, launched + 1)}"
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
        """The addresses of the tensors, for `run`, if the call is of this program's kind and needs no gradient.

        Otherwise None.
        """
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
            and (self.repeats or len(set(map(id, tensors))) == self._distinct)  # a tensor that is written has no alias
            and all(tensors[first] is tensors[second] for first, second in self._ties)
            and all(table[second] - table[first] == distance for first, second, distance in self._distances)
            and self._switches == [ask() for ask in self._asked]
        )
        return table if is_alike else None


def _random_states(steps: Sequence[Launch | Call], tensors: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """The random states that attention's forward leaves for its backward, with their positions among the tensors.

    They lie on a CPU, and nothing but that backward reads them. In a forward that is captured as a CUDA
    graph they lie on the GPU. torch's backward takes either.
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
    """The recorded steps after merging: kernels of loops for the operators between regions.

    If that fails, the recorded steps themselves.
    """
    if device.type not in MERGING:
        return recorder.steps
    in_order = constants_first(recorder.steps, recorder.output)
    try:
        if device.type in ATTENDING:
            choose = functools.partial(attention.by_hand, device)
            steps = joined(in_order, recorder.output, choose, recorder.is_lasting)
            with contextlib.suppress(NoKernel):
                return merged(steps, recorder.output, device)
        return merged(in_order, recorder.output, device)
    except FxfuseError as error:
        logger.warning("fxfuse: torch runs what stands between regions: %s", error)
        return recorder.steps


def _with_all_kernels(recorder: Recorder, tensors: Sequence[torch.Tensor], result: Any) -> Any:
    """Requests every kernel that a program would need, and returns `result`. Its GPU is only described, not present."""
    device = device_of(tensors)
    assert device is not None, "others are not recorded"
    _merged(recorder, device)
    for source in sources(device):
        build.load(source)
    return result


def _launching(launch: Callable[..., None]) -> Callable[..., None]:
    def launched(*args: Any) -> None:
        try:
            launch(*args)
        except RuntimeError as error:
            raise LaunchError(f"a kernel of a program could not be launched: {error}") from error

    return launched


def _replays(program: Program, executor: build.Launch, count: int) -> int:
    """The address of cells for replays (executor.h), which are freed with the program."""
    cells = array("Q", bytes(8 * count))
    address = int(cells.buffer_info()[0])

    def free(cells: array[int]) -> None:
        executor(b"", 0, 0, 0, 0, 0, 0, address, len(cells))

    if count:
        weakref.finalize(program, free, cells).atexit = False  # CUDA may be gone by then
    return address


def _changes_what_is_given(step: Launch | Call) -> bool:
    """Whether a step may write into an argument or a parameter."""
    if isinstance(step, Launch):
        return any(slot.kind == "given" for slot in step.writes)
    overwrites = step.overwrites and not step.is_pure
    return overwrites and any(value.slot.kind == "given" for value in step.values())


def switches_of(device: torch.device, attends: bool = True) -> list[Callable[[], Any]]:
    """Functions that return the global settings that a program depends on.

    Args:
        attends: whether torch chooses an attention operator in it. On a GPU it may have been chosen already.
    """
    asked: list[Callable[[], Any]] = [torch.get_default_dtype, torch.are_deterministic_algorithms_enabled]
    if attends or device.type == "cuda":
        asked += _KINDS_OF_ATTENTION
    if device.type == "cuda":
        asked += [functools.partial(tf32_allowed, kind) for kind in ("linear", "conv2d")]
        asked.append(gpu.index_asked())
    return asked


_KINDS_OF_ATTENTION: Final[tuple[Callable[[], Any], ...]] = (
    torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled, torch._C._get_math_sdp_enabled,
    getattr(torch._C, "_get_cudnn_sdp_enabled", bool), getattr(torch._C, "_get_sdp_priority_order", tuple),
)  # fmt: skip
"""The settings by which torch chooses an attention operator."""


class Programs:
    """The programs of one graph."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        self.reason: str | None = None
        """Why the graph has no programs; None while it may have some."""
        self.programs: list[Program] = []
        self.together: Sequence[int] = ()
        """Positions of results that may share an allocation. It is freed when the last of them is."""
        self.when_made: Callable[[int, Program], None] | None = None
        """Called with each new program: (how many were made so far, the program)."""
        self._made = 0
        self._root, self._graph = root, graph
        self._repeats = Repeats()
        self._tries = 0
        self._lock = free_in_children(threading.RLock())
        self._pays = any(node.target in KINDS or isinstance(node.target, torch._ops.OpOverload) for node in graph.nodes)
        """Whether a program pays even if torch runs all of it: a program calls the operators by quicker functions."""
        try:
            if type(graph._codegen) is not fx.graph.CodeGen:  # torch.export's
                raise Refused("its code takes arguments apart, and puts results together")
            check_graph(root, graph)
            self._binding = Binding(root, graph)
        except Refused as refused:
            self.reason = str(refused)
        self._leaves = Leaves(self._binding.modules if self.reason is None else ())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as None: a graph that is pickled with its attributes (torch.package) has no programs."""
        return type(None), ()

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of forward(*args, **kwargs), by a program if there is one for this kind of call.

        The second call of a kind is recorded as a new program.
        """
        if self.reason is not None or functional._observed(profiled=False):
            return forward(*args, **kwargs)
        if not self._leaves.rest_is_as_before():
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
                break  # the graph's own code finds out which region failed, and handles it
        else:
            with ahead.of_call(functools.partial(self._without_data, bound)):
                return self._unknown(forward, args, kwargs, bound)
        return forward(*args, **kwargs)

    def _unknown(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], bound: Bound) -> Any:
        """Runs a call that has no program. It is recorded if one of the latest calls was of the same kind."""
        tensors, constants = bound.tensors, bound.constants
        if functional._intercepted() or not self._leaves.are_as_before():
            return forward(*args, **kwargs)
        if not PLAIN.issuperset(map(type, tensors)):  # a parameter that is gone, or a subclass
            return forward(*args, **kwargs)
        merges = any(tensor.device.type in MERGING for tensor in tensors)
        if not self._pays and not merges:
            self.reason = "nothing is fused"
            return forward(*args, **kwargs)
        if functional._needs_gradient(tensors) or not are_plain(tensors, constants):
            return forward(*args, **kwargs)
        if stream_capture.is_captured(tensors):
            return forward(*args, **kwargs)
        places, waits = MOST_KEPT - len(self.programs), recapture.is_waiting()
        kind = self._repeats.look(lambda: ([(described(t), alignment(t)) for t in tensors], constants), places, waits)
        if kind is None or not kind.has_repeated or waits:
            result = forward(*args, **kwargs)
            if plans.is_preparing() and any(node.target in attention.CALLS for node in self._graph.nodes):
                self._begin_attention(bound)
            return result
        try:
            return self._recorded(bound, by_parts=merges)
        finally:
            forget_indices()

    def _begin_attention(self, bound: Bound) -> None:
        """Begins to compile the kernels of attention that the next call measures, beside those of this call."""
        try:
            foresee = dict.fromkeys(attention.CALLS, attention.begin)
            ahead.run_without_data(self._root, self._graph, self._binding.values(bound), foresee)
        except Exception as error:  # whatever an operator raises that needs data
            logger.debug("fxfuse: kernels of attention are not foreseen further: %s", error)

    def _without_data(self, bound: Bound) -> None:
        try:
            foresee: dict[Any, Callable[[Any, Any, Any], None]] = dict.fromkeys(attention.CALLS, attention.begin)
            for operator in attention_training.PLANNED:
                foresee[operator] = functools.partial(attention_training.begin, operator)
            ahead.run_without_data(self._root, self._graph, self._binding.values(bound), foresee)
        finally:
            device = device_of(bound.tensors)
            if device is not None and device.type == "cuda":  # a CPU has enough to do with this call
                build.begin(sources(device))  # which the next call needs

    @uncollected()
    def _recorded(self, bound: Bound, by_parts: bool) -> Any:
        """Runs and records a call, and returns its result.

        Afterwards there is a program for it or a `reason`, unless a plan was missing or the GPU is only described.
        """
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
            program = Program(recorder, tensors, bound.constants, self._leaves.tables, self.together)
        except Exception as error:
            self.reason = first_line(error)
            logger.warning("fxfuse: no program is made", exc_info=error)
            return result
        if not program.launches and not self._pays and not any(tensor.is_cuda for tensor in tensors):
            self.reason = "torch runs all of it"  # the graph's own code does that as well
            return result
        self._repeats.count_anew()
        with self._lock:
            self.programs = [program, *self.programs][:MOST_KEPT]
        self._made += 1
        if self.when_made is not None:
            self.when_made(self._made, program)
        return result


def described(tensor: torch.Tensor) -> Any:
    """The properties of a tensor that are equal in all calls of one kind. A program's own guard checks the rest."""
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def prepare(source: build.Source) -> None:
    """Compiles one of `sources`, if there is a compiler. Otherwise programs report later that there is none."""
    with contextlib.suppress(FxfuseError):
        build.load(source)


def are_plain(tensors: Sequence[torch.Tensor], constants: tuple[Any, ...]) -> bool:
    """Whether programs support a call: strided tensors on one device (and some on a CPU), and comparable constants."""
    return all(map(is_plain, tensors)) and device_of(tensors) is not None and are_constant(constants)
