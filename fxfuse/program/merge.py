"""Merging: inlines the loops of a program's steps into each other, and makes kernels of those that remain.

A result that only loops (loops.py) read is computed where it is read and never stored, if that costs nothing: it is
read about once, or only moved. The remaining loops become kernels of ours in the list of launches, so that Python also
makes fewer calls of torch.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Final, TypeGuard

import torch

from fxfuse import build, events
from fxfuse.cpu import loops as cpu_kernels
from fxfuse.cpu.codegen import MANY_TIMES
from fxfuse.cuda import gpu
from fxfuse.cuda import loops as kernels
from fxfuse.errors import FxfuseError, MissingKernelError
from fxfuse.expression import Call as ExpressionCall
from fxfuse.expression import Operand
from fxfuse.program.indices import Element, variable
from fxfuse.program.loops import (
    Inexact,
    Inside,
    Leaf,
    Loops,
    Read,
    all_leaves,
    beside,
    has_rows_read,
    inlined,
    is_apart_or_in_place,
    is_read_in_place,
    read_along_rows,
    reads_alike,
    rows_pay,
    substituted,
    times_read,
    with_memory,
    work_of,
)
from fxfuse.program.text import MAX_TENSORS, LoopsKernel
from fxfuse.program.values import Call, Launch, Slot, Value, functions_of, read_by, slots_of, values_in, written_by

logger = logging.getLogger("fxfuse")

MOST_LEAVES: Final = 32
"""The most leaves of one kernel's loops."""
MOST_NODES: Final = 256
"""The most nodes of one kernel's expressions."""
MOST_RESULTS: Final = 4
"""The most results of one kernel. Its threads have registers for all of them."""
MOST_READS_OF_A_ROW: Final = 4
"""The most elements of a producer's row that one element of a reader may need. They are recomputed for each element of
the reader; the row's reduction is not."""
MOST_TIMES: Final = 3
"""How often, on average, the elements of an inlined result may be read on a GPU, if inlining moves no more bytes than
storing the result. On a CPU once: it has no instructions to spare while it waits for memory."""
MOST_BYTES_TOGETHER: Final = 8 << 20
"""The most bytes of results that one launch of several kernels computes. A large GPU writes as much in the time of a
launch."""
COUNT_BYTES: Final = 8
"""Bytes of the number of problems. The params of a launch that may have several problems begin with this number."""
MOST_ADDRESSES: Final = 40
"""The most addresses of such a launch, so that its arguments fit (GemvTogether::kMost in gemv.cuh)."""
SMALL_SHARE: Final = 4
"""Values may live longer than needed if they have at most 1 / SMALL_SHARE of the bytes of a program's largest value."""
ALONE: Final = 2
"""On a CPU, the most steps that take less time to call than a program, if torch computes them as fast as a kernel of
ours."""


class NoKernel(FxfuseError):
    """There is no kernel for loops that torch cannot compute."""


def merged(steps: Sequence[Launch | Call], output: Any, device: torch.device) -> list[Launch | Call]:
    """The steps of a program after merging: kernels in place of the steps that loops compute.

    If torch has to compute steps that kernels should (`_Torchs`), or steps have to store what their readers should have
    computed (`_Stored`), all are merged anew.

    Raises ToolchainError, BuildError, NoKernel. In that case, only the loops of steps have changed.
    """
    while True:
        try:
            return _merged(steps, output, device)
        except _Stored as stored:
            for number in stored.numbers:
                step = steps[number]
                assert isinstance(step, Call)
                step.loops = step.alone
        except _Torchs as torchs:
            if torchs.args:
                logger.warning("fxfuse: torch computes a part of what stands between regions: %s", torchs)
            for number in torchs.numbers:
                if _is_loops_only(steps[number]):
                    raise NoKernel(f"'{steps[number].label}' has no kernel: {torchs}") from torchs
                steps[number].loops = None


class _Torchs(Exception):
    """Steps that torch has to compute, by number, though others were merged as if kernels computed them.

    Either a package lacks a kernel, which is an error to tell of. Or steps overwrite memory in place, and what filled
    it before was left out, since a kernel would compute all of it.
    """

    def __init__(self, numbers: set[int], *error: MissingKernelError) -> None:
        super().__init__(*map(str, error))
        self.numbers = numbers


class _Stored(Exception):
    """Steps that overwrite a part of memory, by number, whose readers do not compute the whole: only the part is to be
    written."""

    def __init__(self, numbers: set[int]) -> None:
        super().__init__()
        self.numbers = numbers


def _merged(steps: Sequence[Launch | Call], output: Any, device: torch.device) -> list[Launch | Call]:
    on_gpu = runs_on_gpu(device)
    generator = kernels if on_gpu else cpu_kernels
    plan = _Plan(steps, output, None if on_gpu else cpu_kernels.suits, products_that_widen(device))
    chosen = plan.computed if on_gpu else _better_than_torchs(plan.computed, steps)
    kernels_of = {number: generator.kernel(loops) for number, loops in chosen.items()}
    found = {number: kernel for number, kernel in kernels_of.items() if kernel is not None}
    for number, step in enumerate(steps):
        if _is_loops_only(step) and number not in found and number not in plan.absent:
            raise NoKernel(f"'{step.label}' has no kernel")
    left = {number for number in plan.computed.keys() - found.keys() if plan.needs_kernel(number)}
    if left:
        raise _Torchs(left)
    if not found and not plan.absent:
        return list(steps)
    together = _together(found, plan, steps) if on_gpu else {number: [number] for number in found}
    architecture = gpu.capability(device) if on_gpu else None
    texts = {first: generator.source_of([found[one] for one in numbers]) for first, numbers in together.items()}
    sources = {text: build.Source(text, architecture, "loops") for text in texts.values()}
    loaded: dict[str, build.Launch] = {}
    for text, launch in zip(sources, build.load_each(list(sources.values())), strict=True):
        if isinstance(launch, MissingKernelError):
            groups = [plan.all_of(numbers) for first, numbers in together.items() if texts[first] == text]
            raise _Torchs(set().union(*groups), launch)
        loaded[text] = launch
    for number in found:
        for store in plan.computed[number].stores:
            slot = store.output.slot
            if plan.made.get(slot) is store.output and plan.begins(
                number, slot
            ):  # memory that torch writes first stays torch's
                _give_memory(store.output)
    for number, (converting, output) in plan.widened.items():
        product = steps[number]
        assert isinstance(product, Call)
        product.result, product.kwargs = output, {"out_dtype": output.dtype}
        product.label = joined_labels([product.label, steps[converting].label])
    result: list[Launch | Call] = []
    for number, step in enumerate(steps):
        if number in together:
            params, references = b"", list[tuple[Slot, int]]()
            for one in together[number]:
                params += found[one].params
                references += found[one].addresses
            written = frozenset(store.output.slot for one in together[number] for store in plan.computed[one].stores)
            in_place = _in_place([plan.computed[one] for one in together[number]])
            event = events.Launch(loaded[texts[number]], params, ())
            targets = [loops.into.target for loops in map(plan.computed.__getitem__, together[number]) if loops.into]
            label = plan.label(together[number])
            result.append(Launch(event, references, written, in_place=in_place, targets=targets, label=label))
        elif number not in found and number not in plan.absent:
            if isinstance(step, Launch) and step.loops is not None and not step.loops.reductions:
                step.in_place = _in_place([step.loops])
            _redirect(step, plan.same)
            result.append(step)
    return result


def _better_than_torchs(computed: Mapping[int, Loops], steps: Sequence[Launch | Call]) -> dict[int, Loops]:
    """The loops for which a CPU gets kernels of ours.

    Loops that torch computes as fast are left to torch only if there would be no program otherwise. In a program a
    launch takes less time than a call of torch, but calling a program takes some time, too.
    """
    alone = {
        number: cpu_kernels.speed_beside_torch(loops)
        for number, loops in computed.items()
        if loops == steps[number].loops and isinstance(steps[number], Call)
    }
    is_program = (
        len(alone) < len(computed)
        or cpu_kernels.Speed.FASTER in alone.values()
        or any(isinstance(step, Launch) for step in steps)
        or len(alone) > ALONE
    )
    slower = {number for number, speed in alone.items() if speed is cpu_kernels.Speed.SLOWER}
    return {number: loops for number, loops in computed.items() if is_program and number not in slower}


def in_one_launch(steps: Sequence[Launch | Call]) -> list[Launch | Call]:
    """The steps, where independent products that can share a launch are one launch (`events.Launch.together`).

    A token's queries, keys and values are such products: one launch waits only once until memory is at full speed.
    """
    result: list[Launch | Call] = []
    for step in steps:
        first = _launch_to_join(result, step) if isinstance(step, Launch) and step.event.together > 1 else None
        if first is None or not isinstance(step, Launch):
            result.append(step)
            continue
        count = (_count_of(first) + 1).to_bytes(COUNT_BYTES, "little")
        params = count + first.event.params[COUNT_BYTES:] + step.event.params
        first.event = dataclasses.replace(first.event, params=params)
        first.in_place = [*_alone(first, step), *_alone(step, first)]
        first.references = [*first.references, *step.references]
        first.writes = frozenset((*first.writes, *step.writes))
        first.label = joined_labels([first.label, step.label])
    return result


def _alone(step: Launch, other: Launch) -> list[tuple[Slot, Slot]]:
    """The pairs of a launch (`Launch.in_place`) whose memory another launch does not read."""
    return [(read, written) for read, written in step.in_place if read not in slots_of(other)]


def joined_labels(labels: Sequence[str]) -> str:
    """The label of several steps as one launch: the nodes of all, and what computes them."""
    pairs = [label.partition(": ") for label in labels]
    nodes = dict.fromkeys(name for names, _, _ in pairs for name in names.split(", "))
    kinds = dict.fromkeys(what for _, _, what in pairs)
    return f"{', '.join(nodes)}: {' and '.join(kinds)}"


def _launch_to_join(before: Sequence[Launch | Call], step: Launch) -> Launch | None:
    """The earlier launch of the same kernel that a step may join; None if there is none.

    That launch and all steps after it must be independent of `step`. A call of torch in between forbids it: memory is
    freed there.
    """
    touched = set(slots_of(step))
    for other in reversed(before):
        if isinstance(other, Call) and other.is_view:
            continue
        if isinstance(other, Call) or other.writes & touched or step.writes & set(slots_of(other)):
            return None
        if functions_of(other.event) == functions_of(step.event):
            addresses = len(other.references) + len(step.references)
            return other if _count_of(other) < step.event.together and addresses <= MOST_ADDRESSES else None
    return None


def _count_of(step: Launch) -> int:
    """The number of problems of a launch that may have several."""
    return int.from_bytes(step.event.params[:COUNT_BYTES], "little")


def runs_on_gpu(device: torch.device) -> bool:
    """Whether a device's kernels are CUDA kernels."""
    return device.type == "cuda"


def _redirect(step: Launch | Call, same: Mapping[Slot, Slot]) -> None:
    """Makes a step use `same[slot]`, which holds the same data, in place of a slot."""
    if isinstance(step, Launch):
        before = Counter(slot for slot, _ in step.references)
        step.references = [(same.get(slot, slot), offset) for slot, offset in step.references]
        now = Counter(slot for slot, _ in step.references)
        pairs = ((read, same.get(read, read), written) for read, written in step.in_place)
        # what the step now reads as something else, too, is not overwritten
        step.in_place = [(slot, written) for read, slot, written in pairs if now[slot] == before[read]]
        return
    for value in step.values():
        value.slot = same.get(value.slot, value.slot)


def _together(found: Mapping[int, LoopsKernel], plan: _Plan, steps: Sequence[Launch | Call]) -> dict[int, list[int]]:
    """Groups of steps that share a launch, by the first step of each.

    There are two kinds of groups:

    - Steps that read only given memory (weights that are standardised, or permuted), wherever they are. They are
      computed earlier than needed. So a group has one form, and is small beside the program's largest value.
    - Steps that follow each other, between two calls of torch: of one form, or small ones of several forms.
    """
    groups: dict[int, _Group] = {}
    latest: dict[tuple[str, bool], int] = {}
    """By form, and whether only given memory is read: the first step of the group that others may join."""
    room = min(MOST_BYTES_TOGETHER, _small_beside(steps))
    of_any_form = ""
    for number, kernel in found.items():
        needs_nothing = plan.needs_nothing(number)
        nbytes = sum(_span(store.output)[1] for store in plan.computed[number].stores)
        names = [(kernel.form, needs_nothing)] if needs_nothing else [(kernel.form, False), (of_any_form, False)]
        for first in dict.fromkeys(latest[name] for name in names if name in latest):
            group = groups[first]
            is_small = group.nbytes + nbytes <= (room if needs_nothing else MOST_BYTES_TOGETHER)
            is_alike = not needs_nothing and all(found[one].form == kernel.form for one in group.numbers)
            fits = kernels.fit_together([found[one] for one in (*group.numbers, number)])
            if fits and (is_small or is_alike) and (needs_nothing or plan.may_join(number, group.numbers)):
                group.numbers.append(number)
                group.nbytes += nbytes
                break
        else:
            first, groups[number] = number, _Group([number], nbytes)
        latest.update((name, first) for name in names)
    return {
        first: kernels.ordered({number: found[number] for number in group.numbers}) for first, group in groups.items()
    }


@dataclasses.dataclass
class _Group:
    """Steps that share a launch."""

    numbers: list[int]
    nbytes: int
    """Bytes of their results."""


def _in_place(together: Sequence[Loops]) -> list[tuple[Slot, Slot]]:
    """Pairs (slot that a launch reads, slot of a result that may share its memory), for loops that share a launch."""
    pairs = []
    for loops in together:
        if loops.into is not None:
            continue
        others = {slot for other in together if other is not loops for slot in _sources(other)}
        others |= {atom.memory for atom in _elements(loops)} | {store.output.slot for store in loops.stores}
        for slot, dtype in dict.fromkeys((read.slot, read.dtype) for read in loops.reads):
            if slot in others or any(read.dtype != dtype for read in loops.reads if read.slot is slot):
                continue
            for output in (store.output for store in loops.stores):
                value = dataclasses.replace(output, slot=slot, dtype=dtype)
                is_alike = (output.offset, output.dtype.itemsize) == (0, dtype.itemsize)
                if is_alike and is_read_in_place(loops, value):
                    pairs.append((slot, output.slot))
    return pairs


def _small_beside(steps: Sequence[Launch | Call]) -> int:
    """The most bytes that may live longer than needed: few beside a program's largest value."""
    return max(map(_largest, steps), default=0) // SMALL_SHARE


def _largest(step: Launch | Call) -> int:
    """Bytes of a step's largest result."""
    if isinstance(step, Launch):
        return max((slot.nbytes for slot in step.writes), default=0)
    return max((_span(value)[1] for value in values_in(step.result)), default=0)


def _give_memory(output: Value) -> None:
    """Turns memory that torch allocated for a result into memory that the program allocates."""
    slot = output.slot
    slot.kind, slot.shape, slot.strides = "memory", output.shape, output.strides
    slot.nbytes = math.prod(output.shape) * output.dtype.itemsize


class _Plan:
    """What becomes of each step that loops compute: a kernel, a part of other kernels, or nothing."""

    def __init__(
        self, steps: Sequence[Launch | Call], output: Any, suits: Callable[[Loops], bool] | None = None,
        widening: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        """
        Args:
            suits: whether a kernel may compute some loops; None if kernels may compute all.
            widening: products of torch's that take the dtype of their result.
        """
        self._suits = suits
        if suits is not None:
            for step in steps:
                loops = step.loops
                is_product = isinstance(step, Call) and step.is_product  # small products are loops, but only for a GPU
                if isinstance(step, Call) and _overwrites_part(step):
                    loops = step.loops = step.alone
                if loops and (is_product or not suits(loops)):
                    step.loops = None
        self.computed: dict[int, Loops] = {}
        """By step number, in order: the loops that a kernel computes, with everything that was inlined."""
        self.absent: set[int] = set()
        """Steps that are left out: other steps compute them, or nothing needs them."""
        self._parts: dict[int, list[int]] = {}
        """By step number: the steps that were inlined into it."""
        self.made: dict[Slot, Value] = {}
        """By slot that torch allocated and that a kernel writes first: the value that the kernel writes."""
        self.same: dict[Slot, Slot] = {}
        """By slot that is not allocated: the other slot that holds the same data."""
        self._left: set[int] = set()
        """Steps that overwrite a part of memory and are left to torch, because the whole is in memory."""
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
        self._drop_unread()
        self._store_on_the_way()
        self._drop_unread()
        self.computed = dict(sorted(self.computed.items()))
        self._drop_repeated()
        self._compute_together()
        self.widened: dict[int, tuple[int, Value]] = {}
        """Products that torch writes as float32 directly. By step number: the step that converted the product, and the
        value that this step made."""
        self._widen_products(widening)
        for number, loops in self.computed.items():
            if loops.into is None and self.begins(number, loops.output.slot):
                self.made[loops.output.slot] = loops.output

    def label(self, numbers: Sequence[int]) -> str:
        """The label of steps that share a launch, with everything that was inlined into them."""
        return joined_labels([self._steps[number].label for number in sorted(self.all_of(numbers))])

    def all_of(self, numbers: Sequence[int]) -> set[int]:
        """These steps, and all that were inlined into them."""
        found, left = set(numbers), list(numbers)
        while left:
            new = set(self._parts.get(left.pop(), ())) - found
            found |= new
            left += new
        return found

    def needs_nothing(self, number: int) -> bool:
        """Whether a step could run at the program's beginning: it reads only given memory that nothing writes."""
        loops = self.computed[number]
        return (
            self.begins(number, loops.output.slot)
            and not loops.also
            and loops.into is None
            and loops.output.slot not in self._leaving
            and all(source.kind == "given" and source not in self._writers for source in _sources(loops))
        )

    def may_join(self, number: int, others: Sequence[int], loops: Loops | None = None) -> bool:
        """Whether a step, or these loops in its place, may be computed together with earlier steps, at the place of the
        first."""
        assert others[-1] < number, "kernels are asked for in their order"
        loops = loops or self.computed[number]
        reads, writes = _sources(loops), {store.output.slot for store in loops.stores}
        return not any(self._is_torchs(one) or self._conflict(one, reads, writes) for one in range(others[0], number))

    def _is_torchs(self, number: int) -> bool:
        """Whether torch computes a step. Kernels are not moved across it: others need the memory that it frees."""
        return isinstance(self._steps[number], Call) and self._stays(number)

    def _stays(self, number: int) -> bool:
        """Whether a step stays as it was recorded: it is neither a view, nor computed by a kernel of loops, nor left
        out."""
        step = self._steps[number]
        is_view = isinstance(step, Call) and step.is_view
        return not is_view and number not in self.computed and number not in self.absent

    def _conflict(self, number: int, reads: set[Slot], writes: set[Slot]) -> bool:
        """Whether a step must not change places with one that reads `reads` and writes `writes`."""
        if number in self.absent:
            return False
        loops = self.computed.get(number)
        step = self._steps[number]
        written = written_by(step) if loops is None else {store.output.slot for store in loops.stores}
        return bool(written & (reads | writes)) or bool(self.touched(number) & writes)

    def _merge(self) -> None:
        """Inlines results into their readers, in the order of the steps."""
        latest: dict[Slot, int] = {}
        """By slot: the step that wrote it last, if its result may be inlined."""
        waiting: dict[int, int] = {}
        """By number of such a step: how many readers still need its result in memory."""
        since: dict[int, dict[Slot, int]] = {}
        """By step number: the slots that it reads, and for each the first step, itself or inlined, that reads it."""
        gone: dict[int, set[int]] = {}
        """By step number: the in-place steps, itself or inlined, that overwrite nothing if the step is inlined."""
        hoped: set[int] = set()
        """Steps that overwrite a part of what torch or a region computed: their readers may compute the whole."""
        parts = self._parts

        def without_parts(number: int) -> None:
            """Undoes the inlining into a step. The inlined results are stored, and the step's readers read them."""
            self.computed[number], since[number], gone[number] = self._alone(number)
            for part in parts[number]:
                waiting[part] += 1
            parts[number] = []

        for number, step in enumerate(self._steps):
            loops = step.loops
            if loops is not None and _overwrites_part(step):
                before = latest.get(loops.output.slot)
                if before is None or not self._with(loops, self.computed[before], number, since[before], gone[before]):
                    if self._may_be_absent(number, loops):
                        hoped.add(number)
                    else:
                        assert isinstance(step, Call)
                        loops = step.loops = step.alone
                        if loops is None:
                            self._left.add(number)
            if loops is not None and self._is_loops(number):
                since[number], gone[number], parts[number] = dict.fromkeys(_sources(loops), number), set(), []
                reads = dict.fromkeys(read.slot for read in loops.reads)
                for slot in sorted(reads, key=functools.partial(operator.is_not, loops.output.slot)):  # its own first
                    producer = latest.get(slot)
                    if producer is None:
                        continue
                    whole = self._with(loops, self.computed[producer], number, since[producer], gone[producer])
                    if whole is None and self._is_wider(producer, parts[producer]):
                        alone, sources, overwrites = self._alone(producer)
                        whole = self._with(loops, alone, number, sources, overwrites)
                        if whole is not None:
                            without_parts(producer)
                    if whole is not None:
                        loops = whole
                        parts[number].append(producer)
                        for source, first in since[producer].items():
                            since[number][source] = min(first, since[number].get(source, first))
                        gone[number] |= gone[producer]
                        waiting[producer] -= 1
                self.computed[number] = loops
                if loops.output.slot in _sources(loops):
                    gone[number].add(number)
            for slot in written_by(step):
                latest.pop(slot, None)
            is_absent = number in self.computed and self._may_be_absent(number, self.computed[number])
            if number in self.computed and not is_absent and self._is_wider(number, parts[number]):
                alone, *_ = self._alone(number)
                is_absent = alone.only_moves and self._may_be_absent(number, alone)
                if is_absent:
                    without_parts(number)
            if is_absent:
                latest[self.computed[number].output.slot] = number
                waiting[number] = len(self._readers_of(number))
        for number, count in waiting.items():
            if count == 0:
                del self.computed[number]
                self.absent.add(number)
        if hoped & self.computed.keys():
            raise _Stored(hoped & self.computed.keys())
        for number, loops in list(self.computed.items()):
            if loops is self._steps[number].loops and self._is_better_without(number, loops):
                del self.computed[number]

    def _is_better_without(self, number: int, loops: Loops) -> bool:
        """Whether a step stays as it was recorded if nothing is inlined into its loops."""
        step, on_gpu = self._steps[number], self._suits is None
        if isinstance(step, Launch):  # its own kernel was chosen; loops are better where they save copies or stage rows
            return not (_reads_copies(step) or (on_gpu and kernels.stages(loops)))
        return on_gpu and not _is_loops_only(step) and not rows_pay(loops)

    def _alone(self, number: int) -> tuple[Loops, dict[Slot, int], set[int]]:
        """A step's loops with nothing inlined; the slots that they read, each with the step's number; and the step, if
        it overwrites one of these slots."""
        loops = self._steps[number].loops
        assert loops is not None
        sources = dict.fromkeys(_sources(loops), number)
        return loops, sources, {number} if loops.output.slot in sources else set()

    def _is_wider(self, number: int, parts: Sequence[int]) -> bool:
        """Whether a step's result is larger in memory than the results inlined into it, and these can be read in its
        place: it has a single reader, or only moves elements."""
        nbytes = sum(_span(self.computed[part].output)[1] for part in parts)
        own = self._steps[number].loops
        if own is None or not 0 < nbytes < _span(own.output)[1]:
            return False
        return own.only_moves or len(self._readers_of(number)) == 1

    # ---- several results

    def _store_on_the_way(self) -> None:
        """Lets the first reader of a result compute it, and store it for the other readers (`Loops.also`)."""
        touched = [self.touched(number) for number in range(len(self._steps))]
        for number in reversed(range(len(self._steps))):  # a reader may be computed by its own reader
            producer = self._loops_of(number)
            if producer is None or producer.also or producer.into is not None:
                continue
            slot = producer.output.slot
            following = (one for one in range(number + 1, len(self._steps)) if slot in touched[one])
            reader = next(following, None)
            loops = None if reader is None else self._loops_of(reader)
            if reader is None or loops is None:
                continue
            is_needed = slot in self._leaving or next(following, None) is not None
            whole = self._with_store(loops, producer, reader, number, is_needed)
            if whole is None:
                continue
            if is_needed and self.begins(number, slot):
                self.made[slot] = producer.output
            self.computed.pop(number, None)
            self.computed[reader] = whole
            self._goes_into(reader, number, [slot])
            touched[number], touched[reader] = set(), self.touched(reader)

    def _goes_into(self, number: int, other: int, slots: Sequence[Slot]) -> None:
        """Notes that step `number` now computes step `other`, and writes these slots in its place."""
        self._parts.setdefault(number, []).append(other)
        self.absent.add(other)
        for slot in slots:
            self._writers[slot] = sorted(number if writer == other else writer for writer in self._writers[slot])

    def _compute_together(self) -> None:
        """Lets one kernel compute several results from the same memory, which is then read once.

        For example the sum of gradients, and the sum of their products with the normalised input. Or the variance of a
        batch, and the running variance that is made of it.
        """
        readers: dict[Slot, list[int]] = {}
        for number in range(len(self._steps)):
            loops = self._loops_of(number)
            for slot in () if loops is None else _sources(loops):
                readers.setdefault(slot, []).append(number)
        end, ends = len(self._steps), dict[int, int]()
        for number in reversed(range(len(self._steps))):
            end = number if self._is_torchs(number) else end
            ends[number] = end  # the next step that torch computes
        for number in sorted(self.computed):
            if number not in self.computed:
                continue
            made = {store.output.slot for store in self.computed[number].stores}
            near = {one for slot in _sources(self.computed[number]) | made for one in readers.get(slot, ())}
            for other in sorted(one for one in near if number < one < ends[number]):
                one, two = self.computed[number], self._without_results_of(number, other)
                if two is None or not _share_reads(one, two):
                    continue
                whole = beside(one, two)
                if whole is None or not _fits(whole) or len(whole.stores) > MOST_RESULTS or not self._pays(whole):
                    continue
                if not self.may_join(other, [number], two):
                    continue
                self.made |= {
                    store.output.slot: store.output for store in two.stores if self.begins(other, store.output.slot)
                }
                self.computed[number] = whole
                self.computed.pop(other, None)
                self._goes_into(number, other, [store.output.slot for store in two.stores])

    def _pays(self, loops: Loops) -> bool:
        """Whether loops with rows are worth a kernel; on a CPU, whether there is one for them."""
        return rows_pay(loops) if self._suits is None else self._suits(loops)

    def _without_results_of(self, number: int, other: int) -> Loops | None:
        """The loops of step `other`, in which the results of step `number` are computed anew, not read.

        In one kernel with step `number` they are computed once. None if there are no such loops.
        """
        one, two = self.computed[number], self._loops_of(other)
        read = {} if two is None else {read.slot: read.dtype for read in two.reads}
        results = [store for store in one.stores if store.output.slot in read]
        if two is None or not results:
            return two
        if not all(
            read[store.output.slot] == store.output.dtype and self._is_there_until(number, store.output, other)
            for store in results
        ):
            return None
        producers = {store.output.slot: Loops(store.output, store.expression, one.leaves) for store in results}
        whole = inlined(two, producers)
        try:
            kinds = [loops.kinds[store.expression] for loops in (whole, two) for store in loops.stores]
        except Inexact:
            return None
        reads_more = not _places_read(whole) <= _places_read(one) | _places_read(two)
        return None if reads_more or kinds[: len(two.stores)] != kinds[len(two.stores) :] else whole

    def _is_there_until(self, number: int, output: Value, other: int) -> bool:
        """Whether a result of step `number` fills its memory, and is still there at step `other`."""
        slot = output.slot
        nbytes = max(slot.nbytes, math.prod(slot.shape) * slot.dtype.itemsize)
        is_whole = slot.kind != "given" and _span(output) == (0, nbytes)
        return is_whole and not any(number < writer < other for writer in self._writers[slot])

    def begins(self, number: int, slot: Slot) -> bool:
        """Whether a slot is memory that torch allocated, and a step is the first to write into it."""
        return slot.kind == "made" and number == next(one for one in self._writers[slot] if one not in self.absent)

    def needs_kernel(self, number: int) -> bool:
        """Whether a step without a kernel of loops would need memory that nothing makes: memory that torch overwrites
        in place, or copies of operands."""
        step, slot = self._steps[number], self.computed[number].output.slot
        if isinstance(step, Launch):
            return _reads_copies(step)
        return not step.is_pure and self.begins(number, slot)

    def _loops_of(self, number: int) -> Loops | None:
        """The loops of a step, with everything that was inlined; None if it has none."""
        if number in self.absent:
            return None
        return self.computed.get(number) or (self._steps[number].loops if self._is_loops(number) else None)

    def touched(self, number: int) -> set[Slot]:
        """Memory that a step reads or writes after merging."""
        if number in self.absent:
            return set()
        loops = self.computed.get(number)
        if loops is None:
            return _read(self._steps[number]) | written_by(self._steps[number])
        return _sources(loops) | {store.output.slot for store in loops.stores}

    def _with_store(self, loops: Loops, producer: Loops, reader: int, number: int, is_needed: bool) -> Loops | None:
        """`loops` with `producer` inlined, and its result stored if it is needed; None where `_with` returns None, or
        where that would not pay."""
        value, slot = producer.output, producer.output.slot
        if any(store.output.slot is slot for store in loops.stores) or len(loops.stores) == MOST_RESULTS:
            return None
        is_alike = math.prod(loops.output.shape) == math.prod(value.shape) and reads_alike(loops, value)
        if not is_alike and (is_needed or not producer.reductions or not self._is_whole(number)):
            return None  # only a reduction is computed once for all elements that read it
        reads = [read for read in loops.reads if read.slot is slot]
        if any(read.where for read in reads) and not (producer.reductions and len(reads) <= MOST_READS_OF_A_ROW):
            return None
        if slot in _sources(producer) and not is_read_in_place(loops, value):
            return None  # the memory that the producer overwrites would be read after that
        since = dict.fromkeys(_sources(producer), number)
        return self._with(loops, producer, reader, since, kept=slot if is_needed else None)

    def _drop_unread(self) -> None:
        """Leaves out steps whose results no step reads any more."""
        needed = set(self._leaving)
        for number in reversed(range(len(self._steps))):
            loops = self.computed.get(number)
            slots = [] if loops is None else [store.output.slot for store in loops.stores]
            if loops is not None and needed.isdisjoint(slots) and all(slot.kind != "given" for slot in slots):
                del self.computed[number]
                self.absent.add(number)
            elif loops is not None:
                needed |= _sources(loops)
            elif number not in self.absent:
                needed |= _read(self._steps[number])

    def _drop_repeated(self) -> None:
        """Leaves out steps whose results exist elsewhere in memory.

        These are copies, in the same layout, of memory that nothing changes afterwards; and results that an earlier
        kernel computed too, from memory that nothing has written into in between.
        """
        first: dict[Any, int] = {}
        room = _small_beside(self._steps)  # the earlier result then lives longer
        of_indices = {one.memory for loops in self.computed.values() for one in _elements(loops)}
        for number, loops in list(self.computed.items()):
            self.computed[number] = loops = with_memory(loops, self.same)
            output = loops.output
            is_written_once = [one for one in self._writers[output.slot] if one not in self.absent] == [number]
            if output.slot.kind != "made" or not is_written_once or loops.also or loops.into is not None:
                continue
            may_go = output.slot not in self._leaving and output.slot not in of_indices
            source = _copied_as_it_lies(loops) if may_go else None
            if source is not None and all(one <= number for one in self._writers.get(source, ())):
                self._drop_for(number, source)
                continue
            if _span(output)[1] > room:
                continue
            key = loops.expression, loops.leaves, output.shape, output.strides, output.dtype, output.offset
            earlier = first.setdefault(key, number)
            slot = self.computed[earlier].output.slot
            if earlier == number or not may_go:
                continue
            writers = {one for source in _sources(loops) for one in self._writers.get(source, ())}
            if slot.alignment < output.slot.alignment or any(earlier < one < number for one in writers):
                continue
            self._drop_for(number, slot)

    def _drop_for(self, number: int, slot: Slot) -> None:
        """Leaves out a step whose result is also in `slot`."""
        self.same[self.computed.pop(number).output.slot] = slot
        self.absent.add(number)

    def _widen_products(self, widening: Sequence[Any]) -> None:
        """Leaves out steps that only convert a product of 16 bits to float32: gradients of weights under autocast.

        The library then writes the product as float32: it is rounded less, and written once.
        """
        if not widening:
            return
        times_read = Counter(slot for loops in self.computed.values() for slot in _sources(loops))
        for number, loops in list(self.computed.items()):
            slot, output = _widened_as_it_lies(loops), loops.output
            if slot is None or slot in self._leaving or times_read[slot] > 1 or len(self._writers.get(slot, ())) != 1:
                continue
            (writer,) = self._writers[slot]
            product = self._steps[writer]
            if not isinstance(product, Call) or product.kwargs or not any(product.target is one for one in widening):
                continue
            if any(map(self._stays, self._readers.get(slot, ()))):
                continue
            if (product.result.shape, product.result.strides) == (output.shape, output.strides):
                self.widened[writer] = number, output
                del self.computed[number]
                self.absent.add(number)

    def _may_be_absent(self, number: int, loops: Loops) -> bool:
        """Whether all readers of a step's result, until it is overwritten, may compute it by `loops`."""
        slot, following = loops.output.slot, self._overwritten_by(number)
        readers = self._readers_of(number)
        return (
            slot.kind != "given"
            and (slot not in _sources(loops) or len(readers) == 1)  # in place: several would need what it overwrites
            and self._is_whole(number)
            and (slot not in self._leaving if following is None else self._is_whole(following))
            and all(map(self._is_loops, readers))
            and (loops.only_moves or self._is_read_once(loops, readers))
        )

    def _overwritten_by(self, number: int) -> int | None:
        """The next step that writes into the memory of a step's result."""
        loops = self._steps[number].loops
        assert loops is not None
        return next((writer for writer in self._writers[loops.output.slot] if writer > number), None)

    def _readers_of(self, number: int) -> list[int]:
        """The steps that read a step's result, up to and including the one that overwrites it."""
        loops, following = self._steps[number].loops, self._overwritten_by(number)
        assert loops is not None
        last = len(self._steps) if following is None else following
        return [reader for reader in self._readers.get(loops.output.slot, ()) if number < reader <= last]

    def _is_whole(self, number: int) -> bool:
        """Whether a step's loops fill all of the memory that they write into."""
        if not self._is_loops(number):
            return False
        loops = self._steps[number].loops
        assert loops is not None
        first = self._steps[self._writers[loops.output.slot][0]]
        return loops.into is None and _span(loops.output) == _made_by(first, loops.output.slot)

    def _is_loops(self, number: int) -> bool:
        """Whether loops compute all results of a step that are read."""
        step = self._steps[number]
        if step.loops is None or number in self._left:
            return False
        made = set(step.writes) if isinstance(step, Launch) else {value.slot for value in values_in(step.result)}
        others = made - {step.loops.output.slot}
        return not any(slot in self._leaving or slot in self._readers for slot in others)

    def _is_read_once(self, producer: Loops, readers: Sequence[int]) -> bool:
        """Whether a result's elements are read about once on average, as `MOST_TIMES` defines it.

        A single reader with reductions may read all elements again: its row is in caches by then.
        """
        value = producer.output
        loops = [loops for loops in (self._steps[number].loops for number in readers) if loops is not None]
        if len(loops) == 1 and (loops[0].reductions or sum(read.slot is value.slot for read in loops[0].reads) == 1):
            return True
        times = sum(times_read(one, value) for one in loops)
        if times <= 1 or self._suits is not None:
            return times <= 1
        of_result, of_sources = _span(value)[1], _bytes_read(producer)
        return times <= MOST_TIMES and times * of_sources <= of_sources + (1 + times) * of_result

    def _with(
        self, loops: Loops, producer: Loops, number: int, since: Mapping[Slot, int], gone: Set[int] = frozenset(),
        kept: Slot | None = None,
    ) -> Loops | None:  # fmt: skip
        """`loops` of step `number` with one producer inlined; None where that would not pay, or change the result.

        Args:
            since: by slot that the producer reads, the step after which it must not be overwritten until `number`.
            gone: steps that overwrite nothing once the producer is inlined.
            kept: the producer's slot, if its result is stored all the same.
        """
        slot = producer.output.slot
        if any(read.dtype != producer.output.dtype for read in loops.reads if read.slot is slot):
            return None
        reduces = bool(loops.reductions or producer.reductions)
        if not (reduces or producer.only_moves) and times_read(loops, producer.output) > 2:
            return None  # it would be computed again for each of many readers
        many_times = MANY_TIMES * _elements_of(producer) <= _elements_of(loops)
        if self._suits is not None and many_times and cpu_kernels.is_slow(producer):
            return None  # such as the angles of rotary positions, for all rows
        if producer.reductions and not has_rows_read(loops, producer):
            return None
        for source in _sources(producer):
            writers = (writer for writer in self._writers.get(source, ()) if writer not in gone)
            if any(since[source] < writer < number for writer in writers):
                return None
        whole = inlined(loops, {slot: producer}, kept)
        overwritten = [store.output for store in loops.stores if store.output.slot in _sources(producer)]
        if loops.into is None and not all(is_read_in_place(whole, value) for value in overwritten):
            return None
        if not is_apart_or_in_place(whole):
            return None
        if not _fits(whole):
            return None
        if reduces and work_of(whole) > work_of(loops) + work_of(producer):
            return None
        if reduces and self._suits is None and not rows_pay(whole):
            return None
        if len(whole.reductions) > len(loops.reductions) + len(producer.reductions):
            return None  # rows other than the result's own would be reduced, too
        if self._suits is not None and not self._suits(whole):
            return None
        if any(isinstance(atom, Element) for atom in _questions(whole)):
            return None  # a condition must not depend on an index that may itself not exist there
        try:
            kinds = [whole.kinds[store.expression] for store in whole.stores]
            before = [loops.kinds[store.expression] for store in loops.stores]
            before += [] if kept is None else [producer.kinds[producer.expression]]
        except Inexact:
            return None
        return whole if kinds == before else None


def _elements_of(loops: Loops) -> int:
    return math.prod(loops.output.shape)


def _fits(loops: Loops) -> bool:
    """Whether loops are within the limits of one kernel."""
    leaves, nodes = loops.size
    return leaves <= MOST_LEAVES and nodes <= MOST_NODES and len(_sources(loops)) <= MAX_TENSORS


def _share_reads(one: Loops, two: Loops) -> bool:
    """Whether one of two loops reads mostly what the other reads: elements along rows, or bytes without rows."""
    if one.reductions or two.reductions:
        reads = read_along_rows(one), read_along_rows(two)
        return 2 * len(reads[0] & reads[1]) >= min(map(len, reads)) > 0
    nbytes = _bytes_by_slot(one), _bytes_by_slot(two)
    both = sum(min(nbytes[0][slot], nbytes[1][slot]) for slot in nbytes[0].keys() & nbytes[1].keys())
    return 2 * both >= min(sum(some.values()) for some in nbytes) > 0


def _copied_as_it_lies(loops: Loops) -> Slot | None:
    """The program's own memory of which a result is a copy in the same layout; None if it is no such copy."""
    if not isinstance(loops.expression, Operand) or loops.output.offset:
        return None
    (read,) = loops.leaves
    if not isinstance(read, Read) or read.where or read.slot.kind == "given" or read.slot.constant is not None:
        return None
    is_alike = (read.index, read.dtype) == (loops.place(), loops.output.dtype)
    return read.slot if is_alike and read.slot.alignment >= loops.output.slot.alignment else None


def products_that_widen(device: torch.device) -> tuple[Any, ...]:
    """torch's products that take the dtype of their result: on GPUs, since torch 2.8."""
    products = [name for name in ("mm", "bmm") if hasattr(getattr(torch.ops.aten, name), "dtype")]
    return tuple(getattr(torch._C._VariableFunctions, name) for name in products) if device.type == "cuda" else ()


def _widened_as_it_lies(loops: Loops) -> Slot | None:
    """The memory of 16-bit values of which a result is the float32 conversion, in the same layout; otherwise None."""
    output = loops.output
    if output.dtype != torch.float32 or output.offset or output.slot.kind != "made" or loops.also or loops.into:
        return None
    expression, leaves = loops.expression, loops.leaves
    if isinstance(expression, ExpressionCall) and expression.op == "float32":
        (expression,) = expression.args
    if not isinstance(expression, Operand) or len(leaves) != 1 or not isinstance(leaves[0], Read) or leaves[0].where:
        return None
    read = leaves[0]
    is_alike = read.dtype in (torch.bfloat16, torch.float16) and read.index == loops.place()
    return read.slot if is_alike else None


def _is_loops_only(step: Launch | Call) -> TypeGuard[Call]:
    """Whether torch cannot compute a step: it has loops, but no function to call."""
    return isinstance(step, Call) and step.target is None


def _reads_copies(step: Launch) -> bool:
    """Whether a kernel reads copies of operands, which its loops do not need."""
    return step.loops is not None and not read_by(step) - step.writes <= _sources(step.loops)


def _overwrites_part(step: Launch | Call) -> bool:
    """Whether a step overwrites a part of memory, and its loops compute the whole, unchanged elements included."""
    if isinstance(step, Launch) or step.loops is None:
        return False
    return step.loops.into is None and step.loops.output not in values_in(step.result)


def _span(value: Value) -> tuple[int, int]:
    """A value's offset in its slot, and its size, in bytes."""
    return value.offset, math.prod(value.shape) * value.dtype.itemsize


def _made_by(step: Launch | Call, slot: Slot) -> tuple[int, int] | None:
    """The offset and size, in bytes, of the value that a step writes into a slot; None if it writes several values."""
    if step.loops is not None and step.loops.output.slot is slot:
        return _span(step.loops.output)
    if isinstance(step, Launch):
        return 0, slot.nbytes
    made = [value for value in values_in(step.result) if value.slot is slot]
    return _span(made[0]) if len(made) == 1 else None


def _questions(loops: Loops) -> list[Any]:
    """The atoms that conditions depend on."""
    conditions = [leaf for leaf in all_leaves(loops.leaves) if isinstance(leaf, Inside)]
    conditions += [one for read in loops.reads for one in read.where]
    return [atom for one in conditions for atom in one.index.atoms()]


def _sources(loops: Loops) -> set[Slot]:
    """The memory that loops read, that of indices included."""
    return {read.slot for read in loops.reads} | {element.memory for element in _elements(loops)}


def _places_read(loops: Loops) -> set[Leaf]:
    """The reads of loops, in which all reductions of rows of one length have the same variable."""
    along = {row.over.name: variable(f"along{row.over.size}", row.over.size) for row in loops.reductions}
    return {substituted(read, along) for read in loops.reads}


def _bytes_read(loops: Loops) -> int:
    """The bytes that loops read from memory, if caches serve repeated reads."""
    return sum(_bytes_by_slot(loops).values())


def _bytes_by_slot(loops: Loops) -> dict[Slot, int]:
    """As `_bytes_read`, for each slot."""
    elements = math.prod(loops.output.shape)
    by_slot: dict[Slot, int] = {}
    for read in loops.reads:
        low, high = read.index.range
        by_slot[read.slot] = by_slot.get(read.slot, 0) + min(elements, high - low + 1) * read.dtype.itemsize
    sizes = {read.slot: math.prod(read.slot.shape) * read.dtype.itemsize for read in loops.reads}
    return {slot: min(max(slot.nbytes, sizes[slot]), nbytes) for slot, nbytes in by_slot.items()}


def _elements(loops: Loops) -> list[Element]:
    """The indices that loops read from memory."""
    atoms = (atom for index in loops.indices for atom in index.atoms())
    return [atom for atom in atoms if isinstance(atom, Element)]


def _read(step: Launch | Call) -> set[Slot]:
    """Memory that a step reads, or its loops, if it has any. A kernel also reads copies that were made for it."""
    if step.loops is None:
        return read_by(step)
    return _sources(step.loops) | (read_by(step) - {step.loops.output.slot} if isinstance(step, Launch) else set())
