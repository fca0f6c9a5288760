"""Which results of a program's steps never lie in memory: loops put into each other, and kernels for what is left.

Steps between two library calls that loops compute (loops.py) are merged: a result that only loops read is computed
where it is read, if that costs nothing: it is read once, or moved only. What is left are kernels of ours in the list of
launches, so that Python calls less of torch, too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from fxfuse import build, events
from fxfuse.cuda import loops as kernels
from fxfuse.program.indices import Element
from fxfuse.program.loops import (
    Inexact,
    Inside,
    Loops,
    all_leaves,
    indices_of,
    inlined,
    rows_pay,
    work_of,
)
from fxfuse.program.values import Call, Launch, Slot, Value, read_by, values_in, written_by

logger = logging.getLogger("fxfuse")

MOST_LEAVES: Final = 32
MOST_NODES: Final = 256
"""Of one kernel's expression."""
MOST_BYTES_TOGETHER: Final = 8 << 20
"""What a launch computes that has several results: what a large GPU writes in the time of a launch."""
SHARE_TOGETHER: Final = 4
"""They are no more than this part of the largest value of the program."""


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
    together = _together(found, plan, steps)
    architecture = torch.cuda.get_device_capability(device)
    texts = {first: found[first].source(len(numbers)) for first, numbers in together.items()}
    sources = {text: build.Source(text, architecture, "loops") for text in texts.values()}
    with ThreadPoolExecutor(len(sources)) as pool:
        loaded = dict(zip(sources, pool.map(build.load, sources.values()), strict=True))
    result: list[Launch | Call] = []
    for number, step in enumerate(steps):
        if number in together:
            params, references = b"", list[tuple[Slot, int]]()
            for one in together[number]:
                kernel, loops = found[one], plan.computed[one]
                if plan.makes_memory(one):
                    _give_memory(loops)
                params += kernel.params
                references += [(loops.output.slot, loops.output.offset), *((slot, 0) for slot in kernel.tensors)]
            written = frozenset(plan.computed[one].output.slot for one in together[number])
            result.append(Launch(events.Launch(loaded[texts[number]], params, ()), references, written))
        elif number not in found and number not in plan.absent:
            result.append(step)
    return result


def _together(
    found: Mapping[int, kernels.LoopsKernel], plan: _Plan, steps: Sequence[Launch | Call]
) -> dict[int, list[int]]:
    """By the first of them, the steps that one launch computes: kernels of one form that read nothing but what is given
    (weights that are standardised, or brought into another order). They are computed before they are needed: as many as
    a launch is worth, and their memory does not count beside the program's."""
    room = min(MOST_BYTES_TOGETHER, max(map(_largest, steps), default=0) // SHARE_TOGETHER)
    result: dict[int, list[int]] = {}
    latest: dict[str, tuple[int, int]] = {}
    """By form, the first of those that more may join, and how many bytes they make."""
    for number, kernel in found.items():
        nbytes = _span(plan.computed[number].output)[1]
        if plan.needs_nothing(number):
            first, before = latest.get(kernel.form, (number, room))
            if before + nbytes <= room and len(result[first]) < kernel.most_together:
                result[first].append(number)
                latest[kernel.form] = first, before + nbytes
                continue
            latest[kernel.form] = number, nbytes
        result[number] = [number]
    return result


def _largest(step: Launch | Call) -> int:
    """Bytes of the largest of its results."""
    if isinstance(step, Launch):
        return max((slot.nbytes for slot in step.writes), default=0)
    return max((_span(value)[1] for value in values_in(step.result)), default=0)


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
            for slot in written_by(step):
                self._writers.setdefault(slot, []).append(number)
            for slot in _read(step):
                self._readers.setdefault(slot, []).append(number)
        self._merge()

    def makes_memory(self, number: int) -> bool:
        """Whether the memory of a step's result begins with it."""
        slot = self.computed[number].output.slot
        return slot.kind == "made" and number == next(one for one in self._writers[slot] if one not in self.absent)

    def needs_nothing(self, number: int) -> bool:
        """Whether what a step makes could be made at the program's beginning."""
        loops = self.computed[number]
        return (
            self.makes_memory(number)
            and loops.output.slot not in self._leaving
            and all(source.kind == "given" and source not in self._writers for source in _sources(loops))
        )

    def _merge(self) -> None:
        latest: dict[Slot, int] = {}
        """The steps whose results lie there now, and may be computed where they are read."""
        waiting: dict[int, int] = {}
        """By number of such a step: how many others still read its result."""
        since: dict[int, int] = {}
        """By number of step: the first of those that it stands for."""
        for number, step in enumerate(self._steps):
            loops = step.loops
            if loops is not None and self._is_loops(number):
                since[number] = number
                for slot in dict.fromkeys(read.slot for read in loops.reads):
                    producer = latest.get(slot)
                    if producer is None:
                        continue
                    whole = self._with(loops, self.computed[producer], number, since[producer])
                    if whole is not None:
                        loops, since[number] = whole, min(since[number], since[producer])
                        waiting[producer] -= 1
                self.computed[number] = loops
            for slot in written_by(step):
                latest.pop(slot, None)
            if number in self.computed and self._may_be_absent(number):
                latest[self.computed[number].output.slot] = number
                waiting[number] = len(self._readers_of(number))
        for number, count in waiting.items():
            if count == 0:
                del self.computed[number]
                self.absent.add(number)
        self._drop_unread()
        for number, loops in list(self.computed.items()):
            step = self._steps[number]
            if isinstance(step, Launch) and loops is step.loops:  # nothing was put into it: its kernel was chosen
                del self.computed[number]

    def _drop_unread(self) -> None:
        """Results that no step reads any more."""
        needed = set(self._leaving)
        for number in reversed(range(len(self._steps))):
            loops = self.computed.get(number)
            if loops is not None and loops.output.slot not in needed:
                del self.computed[number]
                self.absent.add(number)
            elif loops is not None:
                needed |= _sources(loops)
            elif number not in self.absent:
                needed |= _read(self._steps[number])

    def _may_be_absent(self, number: int) -> bool:
        """Whether what a step writes may be computed where it is read, until the next step overwrites it."""
        loops = self.computed[number]
        slot, following = loops.output.slot, self._overwritten_by(number)
        readers = self._readers_of(number)
        return (
            slot.kind != "given"
            and slot not in _sources(loops)  # what it would have overwritten is there in one case only
            and self._is_whole(number)
            and (slot not in self._leaving if following is None else self._is_whole(following))
            and all(map(self._is_loops, readers))
            and (loops.only_moves or self._is_read_once(slot, readers))
        )

    def _overwritten_by(self, number: int) -> int | None:
        loops = self._steps[number].loops
        assert loops is not None
        return next((writer for writer in self._writers[loops.output.slot] if writer > number), None)

    def _readers_of(self, number: int) -> list[int]:
        """The steps that read what this one writes, the one that overwrites it among them."""
        loops, following = self._steps[number].loops, self._overwritten_by(number)
        assert loops is not None
        last = len(self._steps) if following is None else following
        return [reader for reader in self._readers.get(loops.output.slot, ()) if number < reader <= last]

    def _is_whole(self, number: int) -> bool:
        """Whether loops fill all of the memory that they write into."""
        if not self._is_loops(number):
            return False
        loops = self._steps[number].loops
        assert loops is not None
        first = self._steps[self._writers[loops.output.slot][0]].loops
        return first is not None and _span(loops.output) == _span(first.output)

    def _is_loops(self, number: int) -> bool:
        """Whether loops compute all of a step that anybody reads."""
        step = self._steps[number]
        if step.loops is None:
            return False
        made = set(step.writes) if isinstance(step, Launch) else {value.slot for value in values_in(step.result)}
        others = made - {step.loops.output.slot}
        return not any(slot in self._leaving or slot in self._readers for slot in others)

    def _is_read_once(self, slot: Slot, readers: Sequence[int]) -> bool:
        """Also by one step that reads a row more than once, which then is in caches."""
        if len(readers) != 1:
            return False
        loops = self._steps[readers[0]].loops
        assert loops is not None, "all readers are loops"
        return bool(loops.reductions) or sum(read.slot is slot for read in loops.reads) == 1

    def _with(self, loops: Loops, producer: Loops, number: int, first: int) -> Loops | None:
        """`loops` with one producer put into it; None where that would not pay, or not be the same."""
        slot, output = producer.output.slot, loops.output
        if any(read.dtype != producer.output.dtype for read in loops.reads if read.slot is slot):
            return None
        reduces = bool(loops.reductions or producer.reductions)
        if not (reduces or producer.only_moves) and math.prod(output.shape) > 2 * math.prod(producer.output.shape):
            return None  # computed again for each of many
        if producer.reductions and any(read.where for read in loops.reads if read.slot is slot):
            return None  # there may be no such row
        for source in _sources(producer):
            if source is output.slot or any(first < writer < number for writer in self._writers.get(source, ())):
                return None
        whole = inlined(loops, {slot: producer})
        leaves, nodes = whole.size
        if leaves > MOST_LEAVES or nodes > MOST_NODES or len(_sources(whole)) > kernels.MAX_TENSORS:
            return None
        if reduces and (work_of(whole) > work_of(loops) + work_of(producer) or not rows_pay(whole)):
            return None
        if any(isinstance(atom, Element) for atom in _questions(whole)):
            return None  # an index may be read only where it is one
        try:
            is_alike = whole.kinds[whole.expression] == loops.kinds[loops.expression]
        except Inexact:
            return None
        return whole if is_alike else None


def _span(value: Value) -> tuple[int, int]:
    """Where in its slot a value begins and how long it is, in bytes."""
    return value.offset, math.prod(value.shape) * value.dtype.itemsize


def _questions(loops: Loops) -> list[Any]:
    """What conditions depend on."""
    conditions = [leaf for leaf in all_leaves(loops.leaves) if isinstance(leaf, Inside)]
    conditions += [one for read in loops.reads for one in read.where]
    return [atom for one in conditions for atom in one.index.atoms()]


def _sources(loops: Loops) -> set[Slot]:
    """The memory that they read, indices included."""
    atoms = (atom for index in indices_of(loops.leaves) for atom in index.atoms())
    return {read.slot for read in loops.reads} | {atom.memory for atom in atoms if isinstance(atom, Element)}


def _read(step: Launch | Call) -> set[Slot]:
    """Memory that a step needs, as loops if it is one of those."""
    return read_by(step) if step.loops is None else _sources(step.loops)
