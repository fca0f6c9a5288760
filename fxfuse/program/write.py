"""Writes a program: turns recorded and merged steps into the text of a Python function, with results in arenas.

Kernel launches are packed into arrays, which `launch` in the text processes (executor.h). Calls of torch become lines.
"""

from __future__ import annotations

import functools
import itertools
import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from fxfuse.cuda import gpu
from fxfuse.layout import contiguous_strides, is_dense
from fxfuse.program.memory import Arena, arenas_of, releases, side_by_side
from fxfuse.program.record import Recorder
from fxfuse.program.values import (
    DICTS,
    LISTS,
    Call,
    Launch,
    Number,
    Slot,
    Step,
    Value,
    functions_of,
    slots_of,
    values_in,
    written_by,
)

MOST_TAKEN: Final = 8
"""The most allocations before one list of launches. An allocation takes about as long as a launch. So without this
limit the GPU would wait for all the allocations of a forward that keeps hundreds of results."""


def _strided(tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
    return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


reinterpret: Any = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", _strided)
"""reinterpret(tensor, shape, strides, offset): a tensor in the same memory, offset elements further on."""


def _count_up_one_by_one(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _counting() -> Callable[[Sequence[torch.Tensor]], None]:
    internals: Any = torch._C
    try:
        internals._increment_version(())
    except (TypeError, RuntimeError):  # older releases take one tensor; 2.3 says so by a RuntimeError
        return _count_up_one_by_one
    counting: Callable[[Sequence[torch.Tensor]], None] = internals._increment_version
    return counting


count_up: Final = _counting()
"""Increments the version counters of tensors, by which autograd sees that they were changed in place."""


def release(tensors: Sequence[torch.Tensor]) -> None:
    """Frees the memory of tensors: gives it back to torch's allocator."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def _mark_wanted(steps: Sequence[Launch | Call], output: Any) -> list[Launch | Call]:
    """Marks the values that Python needs as tensors (`Value.wanted`). Returns the steps without unneeded ones."""
    results = values_in(output)
    for value in results:
        value.wanted = value.leaves = value.slot.escapes = True
    _mark_alone(results)
    kept: list[Launch | Call] = []
    read = {value.slot for value in results}
    for step in reversed(steps):
        if isinstance(step, Launch):
            read.update(slots_of(step))
        else:
            made = values_in(step.result)
            if step.is_pure and not any(value.wanted or value.slot in read for value in made):
                continue  # fx graphs contain nodes that only served questions about shapes
            if step.is_view:
                wanted = [value for value in values_in(step.result) if value.viewed_by is step and value.wanted]
                if all(_is_reinterpreted(value) for value in wanted):
                    continue  # each view is made from its memory where it is needed, if it is needed at all
            for value in values_in((step.args, step.kwargs)):
                value.wanted = True
                read.add(value.slot)
        kept.append(step)
    return kept[::-1]


def _is_reinterpreted(value: Value) -> bool:
    """Whether a view can be made directly from its memory, without the calls that made it when it was recorded."""
    kind, dtype = value.slot.kind, value.slot.dtype
    if value.leaves and not value.alone:
        return False
    return value.dtype == dtype or (kind == "memory" and not value.slot.escapes)


def _mark_alone(results: Sequence[Value]) -> None:
    """Marks the results that are alone in their memory (`Value.alone`). That of kernels is allocated in their shape."""
    counts = Counter(value.slot for value in set(results))
    for value in results:
        slot = value.slot
        value.alone = counts[slot] == 1 and slot.kind in ("memory", "made")
        is_all = is_dense(value.shape, value.strides) and math.prod(value.shape) == math.prod(slot.shape)
        if value.alone and slot.kind == "memory" and value.dtype == slot.dtype and is_all:
            slot.name, slot.shape, slot.strides = value.name, value.shape, value.strides


def _put_products_into_arena(steps: Sequence[Launch | Call]) -> None:
    """Lets torch's products write into arenas (`out=`), so that memory is reused from one to the next."""
    for step in steps:
        if not isinstance(step, Call) or not step.is_product:
            continue
        value = step.result
        slot = value.slot
        is_plain = value.offset == 0 and value.name == slot.name and value.strides == contiguous_strides(value.shape)
        if is_plain and slot.kind == "made" and not slot.escapes and not slot.is_apart:
            slot.kind, slot.shape, slot.strides = "memory", value.shape, value.strides
            slot.nbytes = math.prod(value.shape) * value.dtype.itemsize
            step.kwargs = {**step.kwargs, "out": value}


class Writer:
    """Writes a program: its text, the objects that its names refer to, and its list of launches."""

    def __init__(
        self, recorder: Recorder, steps: Sequence[Launch | Call], kept: Sequence[Slot], device: torch.device,
        lent: Mapping[Slot, int], together: Sequence[int] = (), frees: bool = True,
    ) -> None:  # fmt: skip
        """
        Args:
            kept: memory that was filled while the call was recorded (constants.py).
            lent: given memory that results may take after its last use, and its sizes in bytes.
            together: positions of results that may share an allocation (`Programs.together`).
            frees: whether lent memory may be freed.
        """
        self.names: dict[str, Any] = {"reinterpret": reinterpret}
        self.launches = array("Q")
        self.references = array("Q")
        self.params: list[array[int]] = []
        self.steps = _mark_wanted(steps, recorder.output)
        _put_products_into_arena(self.steps)
        self._device = device
        self._given, self._given_names = recorder.given_count, recorder.given_names
        self._lines: list[str] = []
        self._constants = 0
        self.replays = 0
        """The number of lists of launches that are replayed as a CUDA graph when their addresses are as before."""
        self._pending: list[Launch] = []
        self._waiting: set[Slot | Arena] = set()
        """The memory that must be allocated before the pending launches."""
        self._marks: dict[int, list[Launch | Call]] = {}
        self._written: set[Value] = set()
        self._variables: set[str] = set()
        self._taken: set[Slot | Arena] = set()
        self._arena_of: dict[Slot, Arena] = {}
        self._read: set[int] = set()
        for slot in kept:
            slot.kind, self.names[slot.name] = "constant", slot.constant
        self._assign_slots(kept, lent, [recorder.output[place] for place in together], frees)
        self._name_views()
        self._last_use = self._uses(recorder.output)
        self.code, self.marks = self._write(recorder)
        """The program's text; and, by number of each line that makes launches or calls torch, the steps of the line."""

    # ---- memory

    def _assign_slots(
        self, kept: Sequence[Slot], lent: Mapping[Slot, int], small: Sequence[Any], frees: bool
    ) -> None:  # fmt: skip
        memory: dict[Slot, None] = {}
        table: dict[Slot, None] = {}
        for number, step in enumerate(self.steps):
            for slot in slots_of(step):
                slot.touch(number)
                if slot.kind == "memory":
                    memory[slot] = None
                if isinstance(step, Launch) and slot.kind != "given" and (slot.kind != "memory" or slot.escapes):
                    table[slot] = None
        changed = {slot for step in self.steps for slot in written_by(step)}
        lent = {slot: nbytes for slot, nbytes in lent.items() if not slot.escapes and slot not in changed}
        plan = arenas_of(self.steps, [slot for slot in memory if not slot.escapes], lent, frees)
        self.arenas, self._ends = plan.arenas, plan.ends
        self._releases = releases(self.steps, self.arenas, lent) if frees else {}
        self.arena_size = max((arena.size for arena in self.arenas), default=0)
        """Bytes of the largest arena of results that do not leave the program."""
        alone = [value.slot for value in values_in(small) if value.alone and value.slot in memory]
        if len(alone) > 1:
            self.arenas.append(side_by_side(alone, len(self.steps)))
        lenders = [arena.lender for arena in self.arenas if arena.lender is not None]
        self.borrows = bool(self._releases) or any(slot.kind == "given" for slot in lenders)
        """Whether a call overwrites or frees lent memory."""
        indices = itertools.count(self._given)
        for slot in lenders:
            if slot.kind == "made":
                slot.index = next(indices)
        for arena in self.arenas:
            arena.index = next(indices) if arena.lender is None else arena.lender.index
            own = (slot for block in arena.blocks for slot in block.slots if slot is not arena.lender)
            self._arena_of.update((slot, arena) for slot in own)
        for slot, arena in self._arena_of.items():
            slot.index = arena.index
        for slot in table:
            if slot not in self._arena_of and slot not in lenders:
                slot.index = next(indices)
        self.table_size = next(indices)
        """The number of addresses: given tensors, arenas, torch's results, results for the caller, and constants."""
        self.constants = {slot.index: slot.constant for slot in table if slot in kept and slot.constant is not None}
        """The constants that kernels read, by their positions in the table."""

    def _name_views(self) -> None:
        """Gives equal views of the same memory one variable, so that each is made once."""
        calls = [step for step in self.steps if isinstance(step, Call)]
        by_calls = {value for step in calls for value in values_in(step.result)}
        names: dict[Any, str] = {}
        for step in calls:
            for value in values_in((step.args, step.kwargs)):
                is_made_by_call = value in by_calls and value is not step.kwargs.get("out")
                memory = self._arena_of.get(value.slot)
                is_there = memory is None and (value.name == value.slot.name or value.name in self._given_names)
                if is_made_by_call or is_there or value.leaves:
                    continue
                place = value.offset if memory is None else value.offset + value.slot.offset
                key = memory or value.slot, place, value.shape, value.strides, value.dtype
                value.name = names.setdefault(key, value.name)

    def _uses(self, output: Any) -> dict[str, int]:
        """The last step that needs each variable, by name."""
        last: dict[str, int] = {}
        for number, step in enumerate(self.steps):
            if isinstance(step, Call):
                for value in step.values():
                    last[value.name] = last[value.slot.name] = number  # a view is made from its slot's first tensor
        for step in self.steps:
            for slot in slots_of(step) if isinstance(step, Launch) else ():
                if slot.kind == "made":
                    last[slot.name] = max(last.get(slot.name, -1), slot.last)
        for value in values_in(output):
            last[value.name] = last[value.slot.name] = len(self.steps)
        last.update((arena.name, arena.last) for arena in self.arenas)
        last.update((arena.lender.name, arena.last) for arena in self.arenas if arena.lender is not None)
        return last

    # ---- text

    def _line(self, text: str) -> None:
        self._lines.append(f"    {text}")

    def _constant(self, value: Any) -> str:
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        self._constants += 1
        self.names[f"c{self._constants}"] = value
        return f"c{self._constants}"

    def _write(self, recorder: Recorder) -> tuple[str, dict[int, tuple[Step, ...]]]:
        for number, step in enumerate(self.steps):
            if number in self._releases:
                self._flush(number - 1)
                self._release(self._releases[number])
            elif number in self._ends:
                self._flush(number - 1)
            if isinstance(step, Launch):
                self._pending.append(step)
                self._waiting.update(owner for owner in map(self._to_be_taken, slots_of(step)) if owner is not None)
                if len(self._waiting) >= MOST_TAKEN:
                    self._flush(number)
            else:
                self._flush(number - 1)
                self._call(step)
                self._drop(number)
        self._flush(len(self.steps) - 1)
        self._line(f"return {self._tree(recorder.output)}")
        index = self._device.index or 0
        on_gpu = self._device.type == "cuda"
        self.names["context"] = functools.partial(gpu.stream_asked(), index) if on_gpu else torch.get_num_threads
        self.names["empty"], self.names["uint8"] = _allocator(self._device), torch.uint8
        head = [
            *(f"g{i} = given[{i}]" for i in sorted(self._read)),
            "table = t.buffer_info()[0]",
            "stream = context()",
        ]
        code = "\n".join(["def program(given, t):", *(f"    {line}" for line in head), *self._lines]) + "\n"
        before = 1 + len(head)
        return code, {before + line: tuple(map(Step.of, steps)) for line, steps in self._marks.items()}

    def _flush(self, number: int) -> None:
        """Writes one call for all pending launches, after the allocations that they need."""
        if not self._pending:
            return
        first = len(self.launches) // 4
        for step in self._pending:
            for slot, _ in step.references:
                self._take(slot)
            self._pack(step)
        self._marks[len(self._lines)] = list(self._pending)
        end = len(self.launches) // 4
        self._line(launch_line(first, end, self._cell(end - first)))
        written = dict.fromkeys(target for step in self._pending for target in step.targets)
        given = dict.fromkeys(self._name_of_given(target) for target in written if target.slot.kind == "given")
        if given:
            self.names["count_up"] = count_up
            self._line(f"count_up(({', '.join(given)},))")
        self._pending.clear()
        self._waiting.clear()
        self._drop(number)

    def _cell(self, count: int) -> int | None:
        """The cell for the replays of a list of launches; None if the list has none."""
        if self._device.type != "cuda" or count == 1:  # a graph of one kernel takes as long as its launch
            return None
        self.replays += 1
        return self.replays - 1

    def _release(self, slots: Sequence[Slot]) -> None:
        """Writes a line that frees lent memory."""
        self.names["release"] = release
        self._read.update(slot.index for slot in slots)
        self._line(f"release(({', '.join(slot.name for slot in slots)},))")

    def _name_of_given(self, value: Value) -> str:
        """The variable of the given tensor that a value is, or of the first given tensor in its memory."""
        name = value.name if value.name in self._given_names else value.slot.name
        self._read.add(self._given_names[name])
        return name

    def _to_be_taken(self, slot: Slot) -> Slot | Arena | None:
        """The arena or slot that must be allocated before a slot is used; None if it exists already."""
        owner = self._arena_of.get(slot, slot)
        is_there = slot.kind != "memory" or owner in self._taken
        return None if is_there or (isinstance(owner, Arena) and owner.lender is not None) else owner

    def _take(self, slot: Slot) -> None:
        """Writes the allocation that a slot needs, if it is used for the first time: its arena's, or its own."""
        owner = self._to_be_taken(slot)
        if owner is None:
            return
        self._taken.add(owner)
        if isinstance(owner, Arena):
            self._line(f"{owner.name} = empty(({owner.size},), (1,), uint8)")
            self._variables.add(owner.name)
        else:
            self._line(f"{slot.name} = empty({slot.shape}, {slot.strides}, {self._dtype(slot.dtype)})")
        if owner.index >= 0:
            self._line(f"t[{owner.index}] = {owner.name}.data_ptr()")

    def _typed(self, arena: Arena, dtype: torch.dtype) -> str:
        """The variable that holds an arena as a tensor of a dtype."""
        text = self._dtype(dtype)
        name = f"{arena.name}_{text}"
        if text not in arena.typed:
            arena.typed.add(text)
            whole = arena.name
            if arena.lender is not None:
                if arena.lender.kind == "given":
                    self._read.add(arena.lender.index)
                count = arena.size // arena.lender.dtype.itemsize
                whole = f"reinterpret({arena.lender.name}, ({count},), (1,), 0)"
            self._line(f"{name} = {whole}.view({text})")
            self._variables.add(name)
            self._last_use[name] = arena.last
        return name

    def _pack(self, step: Launch) -> None:
        functions = functions_of(step.event)
        assert functions is not None, "else it would be no step"
        entry, error = functions
        params = array("Q", step.event.params + bytes(-len(step.event.params) % 8 or 8))
        self.params.append(params)
        self.launches.extend(
            (entry, error, params.buffer_info()[0], len(self.references) // 2 | len(step.references) << 32)
        )
        for slot, offset in step.references:
            self.references.append(slot.index)
            self.references.append((offset + slot.offset) & (2**64 - 1))  # slot.offset: in its arena

    def _dtype(self, dtype: torch.dtype) -> str:
        name = str(dtype).removeprefix("torch.")
        self.names[name] = dtype
        return name

    def _drop(self, number: int) -> None:
        """Deletes the variables that nothing needs after step `number`."""
        dead = sorted(name for name in self._variables if self._last_use.get(name, -1) <= number)
        if dead:
            self._line(f"del {', '.join(dead)}")
            self._variables.difference_update(dead)

    def _call(self, step: Call) -> None:
        args = [self._tree(item) for item in step.args]
        kwargs = [f"{name}={self._tree(item)}" for name, item in step.kwargs.items()]
        if step.is_method:
            called = f"{args[0]}.{step.target}({', '.join([*args[1:], *kwargs])})"
        else:
            called = f"{self._constant(step.target)}({', '.join([*args, *kwargs])})"
        called = f"{called}  # {step.label}" if step.label.isprintable() else called
        if isinstance(step.result, Number):
            called = f"{step.result.name} = {called}"
        new = [(path, value) for path, value in _paths(step.result) if self._is_new(value)]
        if not step.is_view:
            self._marks[len(self._lines)] = [step]
        if not new:
            self._line(called)
        elif isinstance(step.result, Value):
            self._assign(step.result, called)
        else:
            self._line(f"results = {called}")
            for path, value in new:
                self._assign(value, f"results{path}")
            self._line("del results")

    def _is_new(self, value: Value) -> bool:
        return value not in self._written and (value.slot.kind != "given" or value.name not in self._given_names)

    def _assign(self, value: Value, text: str) -> None:
        if value in self._written:
            return
        self._line(f"{value.name} = {text}")
        self._written.add(value)
        self._variables.add(value.name)
        slot = value.slot
        if slot.kind == "made" and slot.index >= 0 and slot.name == value.name:
            self._line(f"t[{slot.index}] = {value.name}.data_ptr()")

    def _tree(self, item: Any) -> str:
        """An argument as Python text."""
        if isinstance(item, Value):
            return self._variable(item)
        if isinstance(item, Number):
            return item.name
        if isinstance(item, slice):
            return f"slice({self._tree(item.start)}, {self._tree(item.stop)}, {self._tree(item.step)})"
        if isinstance(item, dict):
            content = "{" + ", ".join(f"{key!r}: {self._tree(part)}" for key, part in item.items()) + "}"
            return content if type(item) in DICTS else f"{self._constant(type(item))}(**{content})"
        if type(item) in LISTS:
            return f"[{', '.join(self._tree(part) for part in item)}]"
        if (isinstance(item, tuple) and values_in(item)) or type(item) is tuple:
            parts = f"({''.join(self._tree(part) + ', ' for part in item)})"
            if type(item) is tuple:
                return parts
            stars = "" if hasattr(type(item), "n_fields") else "*"  # torch.return_types take a sequence
            return f"{self._constant(type(item))}({stars}{parts})"
        return self._constant(item)

    def _variable(self, value: Value) -> str:
        """The variable of a value. If no call has made it, a line that makes it from its memory is written now."""
        slot = value.slot
        if slot.kind == "given" and value.name in self._given_names:
            self._read.add(self._given_names[value.name])
            return value.name
        if value in self._written or (slot.kind == "constant" and value.name == slot.name):
            return value.name
        self._written.add(value)
        if value.name in self._variables:  # an equal view was made
            return value.name
        self._take(slot)
        size = value.dtype.itemsize
        if slot in self._arena_of:
            base, at = self._typed(self._arena_of[slot], value.dtype), (slot.offset + value.offset) // size
        elif value.leaves and slot.kind == "memory" and _is_all_of(value, slot):  # torch's own may have other strides
            value.name = slot.name
            return value.name
        else:
            base, at = slot.name, value.offset // size
            if slot.kind == "given":
                self._read.add(slot.index)
        if value.leaves and not value.alone:
            self._line(f"{value.name} = {base}.as_strided({value.shape}, {value.strides}, {at})")
        else:
            self._line(f"{value.name} = reinterpret({base}, {value.shape}, {value.strides}, {at})")
        self._variables.add(value.name)
        return value.name


def launch_line(first: int, end: int, cell: int | None = None) -> str:
    """The text of a call that makes a program's launches from `first` up to `end`. `cell`: that of their replays."""
    replays = "0, 0" if cell is None else f"REPLAYS, {cell}"
    return f"launch(b'', stream, LAUNCHES, REFERENCES, table, {first}, {end}, {replays})"


def _paths(tree: Any, path: str = "") -> list[tuple[str, Value]]:
    """The values of a call's result, each with the subscripts that lead to it."""
    if isinstance(tree, Value):
        return [(path, tree)]
    if isinstance(tree, tuple | list):
        return [found for i, part in enumerate(tree) for found in _paths(part, f"{path}[{i}]")]
    if isinstance(tree, dict):
        return [found for key, part in tree.items() for found in _paths(part, f"{path}[{key!r}]")]
    return []


def _plain_empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


_allocate_on_cpu: Final[Callable[..., torch.Tensor]] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cpu", _plain_empty_strided
)
"""As cuda.launch.allocate: it does not go through the dispatcher."""


def _allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    """A function empty(shape, strides, dtype) that allocates on the device, which is the current one."""
    if device.type == "cuda":
        from fxfuse.cuda.launch import allocate

        return allocate
    return _allocate_on_cpu


def _is_all_of(value: Value, slot: Slot) -> bool:
    """Whether a value is the whole tensor that is allocated for a slot."""
    return (value.shape, value.strides, value.offset) == (slot.shape, slot.strides, 0)
