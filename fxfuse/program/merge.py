"""Which results of a program's steps never lie in memory: loops put into each other, and kernels for what is left.

Steps between two library calls that loops compute (loops.py) are merged: a result that only loops read is computed
where it is read, if that costs nothing: it is read once, or moved only. What is left are kernels of ours in the list of
launches, so that Python calls less of torch, too.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from fxfuse import build, events
from fxfuse.cuda import loops as kernels
from fxfuse.expression import postorder
from fxfuse.program.indices import Element
from fxfuse.program.loops import Inexact, Inside, Loops, inlined
from fxfuse.program.values import Call, Launch, Slot, values_in

logger = logging.getLogger("fxfuse")

MOST_LEAVES: Final = 32
MOST_NODES: Final = 256
"""Of one kernel's expression."""


def merged(steps: Sequence[Launch | Call], output: Any, device: torch.device) -> list[Launch | Call]:
    """The steps of a program with kernels in the place of what loops compute.

    Raises ToolchainError, BuildError; nothing has changed then.
    """
    plan = _Plan(steps, output)
    found: dict[int, kernels.LoopsKernel] = {}
    for number, loops in plan.computed.items():
        kernel = kernels.kernel(loops)
        if kernel is not None:
            found[number] = kernel
    if not found:
        return list(steps)
    architecture = torch.cuda.get_device_capability(device)
    sources = {kernel.source: build.Source(kernel.source, architecture, "loops") for kernel in found.values()}
    with ThreadPoolExecutor(min(len(sources), os.cpu_count() or 1)) as pool:
        loaded = dict(zip(sources, pool.map(build.load, sources.values()), strict=True))
    result: list[Launch | Call] = []
    for number, step in enumerate(steps):
        if number in found:
            kernel, loops = found[number], plan.computed[number]
            if plan.makes_memory(number):
                _give_memory(loops)
            event = events.Launch(loaded[kernel.source], kernel.params, ())
            references = [(loops.output.slot, loops.output.offset), *((slot, 0) for slot in kernel.tensors)]
            result.append(Launch(event, references, frozenset({loops.output.slot})))
        elif number not in plan.absent:
            result.append(step)
    return result


def _give_memory(loops: Loops) -> None:
    """Makes what torch allocated for a result a piece of the program's own memory."""
    output, slot = loops.output, loops.output.slot
    slot.kind, slot.shape, slot.strides = "memory", output.shape, output.strides
    slot.nbytes = math.prod(output.shape) * output.dtype.itemsize


class _Plan:
    """What becomes of the steps that loops compute."""

    def __init__(self, steps: Sequence[Launch | Call], output: Any) -> None:
        self.computed: dict[int, Loops] = {}
        """By number of step: what a kernel computes, with all that was put into it."""
        self.absent: set[int] = set()
        """Steps that nothing is left of."""
        self._steps = steps
        self._leaving = {value.slot for value in values_in(output)}
        self._writers: dict[Slot, list[int]] = {}
        self._readers: dict[Slot, list[int]] = {}
        for number, step in enumerate(steps):
            for slot in _written(step):
                self._writers.setdefault(slot, []).append(number)
            for slot in _read(step):
                self._readers.setdefault(slot, []).append(number)
        self._merge()

    def makes_memory(self, number: int) -> bool:
        """Whether the memory of a step's result begins with it."""
        slot = self.computed[number].output.slot
        return slot.kind == "made" and self._writers[slot][0] == number

    def _merge(self) -> None:
        open_: dict[Slot, tuple[int, Loops, int]] = {}
        """Results that may be computed where they are read: step, loops, and the first step that they stand for."""
        waiting: dict[Slot, int] = {}
        for number, step in enumerate(self._steps):
            loops = step.loops if isinstance(step, Call) else None
            if loops is None:
                continue
            since = number
            for slot in dict.fromkeys(read.slot for read in loops.reads):
                if slot not in open_:
                    continue
                _, producer, first = open_[slot]
                whole = self._with(loops, producer, number, first)
                if whole is not None:
                    loops, since = whole, min(since, first)
                    waiting[slot] -= 1
            self.computed[number] = loops
            slot = loops.output.slot
            if self._may_be_absent(number, loops):
                open_[slot] = number, loops, since
                waiting[slot] = len(self._readers.get(slot, ()))
        for slot, (number, _, _) in open_.items():
            if waiting[slot] == 0:
                del self.computed[number]
                self.absent.add(number)
        self._drop_unread()

    def _drop_unread(self) -> None:
        """Results that no step reads any more."""
        needed = set(self._leaving)
        for number in reversed(range(len(self._steps))):
            loops = self.computed.get(number)
            if loops is not None and loops.output.slot.kind == "made" and loops.output.slot not in needed:
                del self.computed[number]
                self.absent.add(number)
            elif loops is not None:
                needed |= _sources(loops)
            elif number not in self.absent:
                needed |= _read(self._steps[number])

    def _may_be_absent(self, number: int, loops: Loops) -> bool:
        slot = loops.output.slot
        readers = self._readers.get(slot, ())
        return (
            slot.kind == "made"
            and slot not in self._leaving
            and self._writers[slot] == [number]
            and all(self._is_loops(reader) for reader in readers)
            and (loops.only_moves or self._leaves_that_read(slot) == 1)
        )

    def _is_loops(self, number: int) -> bool:
        step = self._steps[number]
        return isinstance(step, Call) and step.loops is not None

    def _leaves_that_read(self, slot: Slot) -> int:
        steps = (self._steps[number] for number in self._readers.get(slot, ()))
        return sum(read.slot is slot for step in steps if isinstance(step, Call) and step.loops is not None
                   for read in step.loops.reads)  # fmt: skip

    def _with(self, loops: Loops, producer: Loops, number: int, first: int) -> Loops | None:
        """`loops` with one producer put into it; None where that would not pay, or not be the same."""
        slot, output = producer.output.slot, loops.output
        if any(read.dtype != producer.output.dtype for read in loops.reads if read.slot is slot):
            return None
        if not producer.only_moves and math.prod(output.shape) > 2 * math.prod(producer.output.shape):
            return None  # computed again for each of many
        for source in _sources(producer):
            if source is output.slot or any(first < writer < number for writer in self._writers.get(source, ())):
                return None
        whole = inlined(loops, {slot: producer})
        is_large = len(whole.leaves) > MOST_LEAVES or sum(1 for _ in postorder(whole.expression)) > MOST_NODES
        if is_large or len(_sources(whole)) > kernels.MAX_TENSORS:
            return None
        if any(isinstance(atom, Element) for atom in _questions(whole)):
            return None  # an index may be read only where it is one
        try:
            is_alike = whole.kinds[whole.expression] == loops.kinds[loops.expression]
        except Inexact:
            return None
        return whole if is_alike else None


def _questions(loops: Loops) -> list[Any]:
    """What conditions depend on."""
    conditions = [leaf for leaf in loops.leaves if isinstance(leaf, Inside)]
    conditions += [one for read in loops.reads for one in read.where]
    return [atom for one in conditions for atom in one.index.atoms()]


def _sources(loops: Loops) -> set[Slot]:
    """The memory that they read, indices included."""
    indices = [leaf.index for leaf in loops.leaves]
    indices += [one.index for read in loops.reads for one in read.where]
    chosen = {atom.memory for index in indices for atom in index.atoms() if isinstance(atom, Element)}
    return {read.slot for read in loops.reads} | chosen


def _written(step: Launch | Call) -> set[Slot]:
    if isinstance(step, Launch):
        return set(step.writes)
    if step.is_view:
        return set()
    made = {value.slot for value in values_in(step.result)}
    arguments = {value.slot for value in values_in((step.args, step.kwargs))}
    return made - arguments if step.is_pure else made | arguments


def _read(step: Launch | Call) -> set[Slot]:
    """Memory that a step needs; views are made where they are needed."""
    if isinstance(step, Launch):
        return {slot for slot, _ in step.references}
    if step.is_view:
        return set()
    if step.loops is not None:
        return _sources(step.loops)
    return {value.slot for value in values_in((step.args, step.kwargs))}
