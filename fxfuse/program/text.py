"""The C++ text of loops' kernels, for both devices: it computes an element's leaves, and where they are in memory.

A *run* is a sequence of elements that one thread computes, and `lane` counts its elements. Statements with the same
value for a whole run stand before the loop over the run, others inside it. On a GPU a thread has a run of a few
elements (cuda/loops.py). On a CPU a run is a row, whose loop the compiler vectorises (cpu/loops.py).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch

from fxfuse.program.indices import Atom, Element, Index, Quotient, Remainder, Variable, variable
from fxfuse.program.loops import (
    Inside,
    Leaf,
    Loops,
    Position,
    Read,
    Reduced,
    divisions_of,
    memory_order,
    substituted,
)
from fxfuse.program.values import Slot, Value

ACCESS: Final = 16  # bytes that one instruction of a GPU reads or writes
MAX_TENSORS: Final = 40
"""The most tensors that one kernel reads: so many fit in its arguments."""
_Place: TypeAlias = tuple[Slot, torch.dtype, Index]
"""Where an element is in memory."""
_Steps: TypeAlias = tuple[Slot, torch.dtype, int]
"""The memory of a read, its dtype, and the distance in elements from one element of a run to the next."""
RUN, LANE = "run", "lane"
ROW = "row"


@dataclass(frozen=True)
class LoopsKernel:
    """A kernel of loops: the text to compile, and the arguments of a launch."""

    form: str
    """The text of its body. Kernels of one form share their compiled code."""
    params: bytes
    """The sizes and other numbers that a launch passes to it."""
    results: tuple[tuple[Slot, int], ...]
    """Where its results begin, in the order of addresses: each a slot, and the offset in it in bytes."""
    tensors: tuple[Slot, ...]
    """The memory that it reads, in the order of addresses, which follow those of results."""
    threads: int = 0
    """On a GPU: the fewest of a block, in a launch with others; so many if rows are staged."""
    is_staged: bool = False
    """On a GPU: whether a block stages rows in shared memory."""

    @property
    def addresses(self) -> list[tuple[Slot, int]]:
        """The addresses of a launch: each a slot, and the offset in it in bytes."""
        return [*self.results, *((slot, 0) for slot in self.tensors)]

    @property
    def argument_bytes(self) -> int:
        """An upper bound on the bytes of its arguments: a divisor is three words, and each part has a spare entry."""
        return 16 * (len(self.params) // 4) + 8 * (len(self.addresses) + 4)


@dataclass
class Held:
    """The part of a short row that a thread keeps in registers. Several loops use it; memory is read once."""

    lanes: int
    """The number of threads that share a row."""
    turns: int
    """The number of runs of the row that a thread has: a constant in the text."""
    vector: int
    """The number of elements of a run."""
    names: dict[Read, str]
    """By read: the variable that holds it. Reads for a result that is longer than the row are included."""
    variables: dict[str, str]
    """The types of these variables."""
    within: Inside
    """The condition that an element of the result is an element of the row."""
    early: Sequence[Read] = ()
    """Reads that only the result needs, and that the first loop makes all the same."""
    filled: set[str] = field(default_factory=set)
    """The variables that a loop has filled already."""

    def turns_over(self, runs: int) -> int:
        """The number of turns of a thread in a loop over so many runs. In the last turn its run may not exist."""
        return -(-runs // self.lanes)

    def turn(self, runs: int) -> str:
        """The text of the index into held variables, in a loop over so many runs.

        It is in range even for turns beyond the row, whose elements are not used.
        """
        return "turn" if self.turns_over(runs) == self.turns else f"turn < {self.turns} ? turn : {self.turns - 1}"


# ------------------------------------------------------------------------------------------------ dimensions


def flattened(loops: Loops) -> tuple[list[int], list[Leaf], Index | None]:
    """The result's sizes in memory order, the leaves by these dimensions' coordinates d0, d1, …, and `into.place`.

    Adjacent dimensions become one, unless this adds quotients or remainders to indices. Without `into`, the place is
    None.
    """
    output = loops.output
    order = memory_order(output)
    sizes = [output.shape[dim] for dim in order]
    places = [] if loops.into is None else [Position(loops.into.place)]
    leaves = [
        substituted(leaf, {f"c{dim}": variable(f"d{at}", output.shape[dim]) for at, dim in enumerate(order)})
        for leaf in (*loops.leaves, *places)
    ]
    for at in reversed(range(len(sizes) - 1)):
        inner = sizes[at + 1]
        both = variable(f"d{at}", sizes[at] * inner)
        later = {f"d{dim}": variable(f"d{dim - 1}", sizes[dim]) for dim in range(at + 2, len(sizes))}
        merged = [substituted(leaf, {f"d{at}": both // inner, f"d{at + 1}": both % inner, **later}) for leaf in leaves]
        if divisions_of(merged) <= divisions_of(leaves):
            leaves, sizes = merged, [*sizes[:at], sizes[at] * inner, *sizes[at + 2 :]]
    count = len(loops.leaves)
    return sizes, leaves[:count], next((leaf.index for leaf in leaves[count:] if isinstance(leaf, Position)), None)


def vector_of(output: Value, length: int) -> int:
    """On a GPU: how many elements of a result are written at once, if `length` of them are contiguous."""
    size, begin = output.dtype.itemsize, math.gcd(output.slot.alignment, output.offset)
    return math.gcd(ACCESS // size, max(begin // size, 1), length)


def in_runs(name: str, length: int, vector: int) -> dict[str, Index]:
    """Replaces the variable `name` of a loop over `length` elements by RUN * vector + LANE."""
    return {name: variable(RUN, length // vector) * vector + variable(LANE, vector)}


def by_runs(condition: Inside, size: int) -> Inside:
    """The condition in terms of runs of `size` elements, not of elements.

    `condition` itself if it may differ between the elements of a run.
    """
    rest = condition.index - variable(LANE, size)
    steps = [condition.size, rest.constant, *(coefficient for _, coefficient in rest.terms)]
    if rest.depends_on(LANE) or any(step % size for step in steps):
        return condition
    return Inside(rest // size, condition.size // size)


# ------------------------------------------------------------------------------------------------------ text


@dataclass(frozen=True)
class _Window:
    """Adjacent elements of memory that are read at once, for all elements of a run."""

    begin: Index
    """In elements from the slot's beginning."""
    length: int
    """The number of elements."""
    chosen: Sequence[int]
    """For each element of the run: the number of the element of the window that it takes."""
    elements: int
    """A bit mask of the elements of the run that take an element of the window. The others are zero."""


class Text:
    """Collects the statements before and inside the loop over a run's elements, and the arguments that they use."""

    def __init__(self, types: Mapping[torch.dtype, str], by_element: bool = False) -> None:
        """
        Args:
            types: the C++ types of dtypes.
            by_element: whether a run is a loop of any length, which the compiler vectorises. Otherwise it is a few
                elements, which are read at once where possible.
        """
        self._types, self._by_element = types, by_element
        self.numbers: list[int] = []
        self.divisors: list[int] = []
        self.tensors: list[Slot] = []
        self.rows: dict[Reduced, str] = {}
        """The variables that hold reductions."""
        self.staged: Mapping[Read, str] = {}
        """By read: an element that has been read already, into shared memory."""
        self.length = 0
        """A row's length, if it is a constant in the text; else 0."""
        self._count = 0
        self.begin(1)

    def begin(self, vector: int, held: Held | None = None, runs: int = 0) -> None:
        """Begins another loop: over `runs` runs of `vector` elements."""
        self.held = held
        self._turn = "" if held is None else held.turn(runs)
        self.before: list[str] = []
        self.within: list[str] = []
        self._vector = vector
        self._names: dict[Atom | Inside | Index, str] = {}
        self._ways: dict[_Place, list[tuple[Inside, ...]]] = {}
        self._read: dict[_Place, str] = {}
        self._always: dict[_Steps, Read] = {}
        """Reads without conditions."""

    def coordinates(self, sizes: Sequence[int]) -> None:
        """Writes statements that take the coordinates of a run from its number, the variable `rest`.

        Args:
            sizes: the sizes of dimensions, the last in runs; empty for a single element.
        """
        names = [*(f"d{dim}" for dim in range(len(sizes) - 1)), RUN] if sizes else []
        self._take(list(zip(names, sizes, strict=True)))

    def coordinates_across(self, sizes: Sequence[int], dim: int, count: int) -> str:
        """As `coordinates`, for runs in another order. Returns the text of the run's number in memory order.

        `rest` counts fastest over `count` runs of the last dimension (a divisor of its size), then over dimension
        `dim`, then over the others.
        """
        names = [*(f"d{dim}" for dim in range(len(sizes) - 1)), "high"]
        sized = [*zip(names, [*sizes[:-1], sizes[-1] // count], strict=True)]
        self._take([*sized[:dim], *sized[dim + 1 :], sized[dim], ("low", count)])
        high = "" if sizes[-1] == count else f"high * {self.number(count)} + "
        self.before.append(f"const unsigned {RUN} = {high}{'0' if count == 1 else 'low'};")
        place = ""
        for name, size in zip([*names[:-1], RUN], sizes, strict=True):
            if size > 1:
                place = f"({place}) * {self.number(size)} + {name}" if place else name
        return place

    def _take(self, sized: Sequence[tuple[str, int]]) -> None:
        """Writes statements that take variables from `rest`. `sized` are their names and sizes, the fastest last."""
        sized = [(name, size) for name, size in sized if size > 1]
        for number, (name, size) in reversed(list(enumerate(sized))):
            value = f"{self._divisor(size)}.take(rest)" if number else "rest"
            self.before.append(f"const unsigned {name} = {value};")

    def leaves(self, leaves: Sequence[Leaf]) -> list[str]:
        """The texts of leaves. Leaves that read the same element, each under its own conditions, share one read."""
        if self._by_element:
            found = {self._steps(leaf): leaf for leaf in leaves if isinstance(leaf, Read) and not leaf.where}
            self._always = {steps: leaf for steps, leaf in found.items() if steps is not None}
        for leaf in leaves:
            if isinstance(leaf, Read) and not any(map(self._varies, leaf.where)):
                self._ways.setdefault((leaf.slot, leaf.dtype, leaf.index), []).append(leaf.where)
        return [self._leaf(leaf) for leaf in leaves]

    def _leaf(self, leaf: Leaf) -> str:
        if self.held is None or not isinstance(leaf, Read) or leaf not in self.held.names:
            return self._computed(leaf)
        name = self.held.names[leaf]
        if name in self.held.filled:
            return f"{name}[{self._turn}][lane]"
        value = self._computed(leaf)
        self.within.append(f"{name}[turn][lane] = {value};")
        self.held.filled.add(name)
        return f"{name}[turn][lane]"

    def _begin(self, read: Read) -> Index:
        """The index of a run's first element, for a read in constant steps."""
        return read.index - variable(LANE, self._vector) * self._step(read)

    def _step(self, read: Read) -> int:
        return dict(read.index.terms).get(_lane(self._vector), 0)

    def _steps(self, read: Read) -> _Steps | None:
        """The memory, dtype and step of a read in constant steps along a run; None for other reads."""
        return None if self._begin(read).depends_on(LANE) else (read.slot, read.dtype, self._step(read))

    def _read_anyway(self, read: Read) -> Index | None:
        """Where a run may begin to read instead if its conditions do not hold: at the beginning of a read without
        conditions, or of the memory. None if neither is known to be as long as a run."""
        steps = self._steps(read)
        if steps is None or any(map(self._varies, read.where)):
            return None
        if steps in self._always:
            return self._begin(self._always[steps])
        slot, dtype, step = steps
        if slot.dtype != dtype or not 0 < len(slot.shape) == len(slot.strides) or not all(slot.shape):
            return None  # it is not known how long the memory is
        last = sum((size - 1) * stride for size, stride in zip(slot.shape, slot.strides, strict=True))
        return Index() if 0 <= step * (self._vector - 1) <= last else None

    def _computed(self, leaf: Leaf) -> str:
        if isinstance(leaf, Inside):
            return self._inside(leaf)
        if isinstance(leaf, Position):
            return self._position(leaf)
        if isinstance(leaf, Reduced):
            return self.rows[leaf]
        if leaf in self.staged:
            return self.staged[leaf]
        place = leaf.slot, leaf.dtype, leaf.index
        ways = self._ways.get(place, [])
        if leaf.where not in ways:
            return self._element(leaf, [leaf.where])
        if place not in self._read:
            self._read[place] = self._element(leaf, ways)
        return self._read[place]

    def _element(self, leaf: Read, ways: Sequence[tuple[Inside, ...]]) -> str:
        """The text of an element, which is read if all conditions of one of the `ways` hold."""
        condition, kind, name = self._if(ways), self._types[leaf.dtype], self._name("r")
        source = self.memory(leaf.slot, leaf.dtype)
        lines: list[str] = []
        begin = leaf.index - variable(LANE, self._vector)
        varies = leaf.index.depends_on(LANE) or any(map(self._varies, leaf.where))
        is_beside = leaf.index.depends_on(LANE) and not begin.depends_on(LANE) and not self._by_element
        if is_beside and not any(map(self._varies, leaf.where)):
            place, size = self._index(begin, lines), leaf.dtype.itemsize
            steps = [*(coefficient for _, coefficient in begin.terms), begin.constant]
            access = math.gcd(self._vector * size, leaf.slot.alignment, *(step * size for step in steps))
            self.before.append(f"Adjacent<{kind}, {self._vector}, {access}> {name} = {{}};")
            self.before.append(f"{condition}{{ {' '.join([*lines, f'{name}.load({source} + ({place}));'])} }}")
            return f"as_number({name}.element[lane])"
        window = self._window(leaf)
        if window is not None:
            return self._chosen(leaf, window, ways)
        instead = self._read_anyway(leaf) if condition and self._by_element else None
        if instead is not None:  # no branches between vectors: a run whose conditions do not hold reads at `instead`
            first, step = self._name("t"), leaf.index - self._begin(leaf)
            self.before.append(f"Place {first} = {self.place(instead)};")
            begun = f"{first} = {self._index(self._begin(leaf), lines)};"
            self.before.append(f"{condition}{{ {' '.join([*lines, begun])} }}")
            lines, condition, place = [], "", f"{first} + {self._index(step, lines)}"
        else:
            place = self._index(leaf.index, lines)
        text = f"{condition}{{ {' '.join([*lines, f'{name} = {source}[{place}];'])} }}"
        (self.within if varies else self.before).extend([f"{kind} {name} = {{}};", text])
        return f"as_number({name})"

    def _if(self, ways: Sequence[Sequence[Inside]]) -> str:
        """An `if` that tests whether all conditions of one of the `ways` hold. Empty if they always do."""
        texts = [dict.fromkeys(one for one in map(self._inside, where) if one != "true") for where in ways]
        least = [one for one in texts if not any(other.keys() < one.keys() for other in texts)]
        each = list(dict.fromkeys(" && ".join(sorted(one)) for one in least))
        if "" in each:
            return ""
        return f"if ({each[0]}) " if len(each) == 1 else f"if ({' || '.join(f'({one})' for one in each)}) "

    def _window(self, leaf: Read) -> _Window | None:
        """A window for a leaf whose elements, in a run, are close together in memory; None if there is none.

        Their distances must be the same in every run (pairs that change places, every other element). The window may
        contain elements that are not used. They are in the same aligned piece of memory as one that is used.
        """
        if self._by_element or self._vector == 1 or not leaf.index.depends_on(LANE):
            return None
        places = [leaf.index.substituted({LANE: Index((), lane)}) for lane in range(self._vector)]
        apart = [place - places[0] for place in places]
        if any(place.terms for place in apart):
            return None
        lanes = [self._lanes(one) for one in leaf.where if self._varies(one)]
        known = [one for one in lanes if one is not None]
        elements = functools.reduce(operator.and_, known, (1 << self._vector) - 1)
        if len(known) < len(lanes) or not elements:
            return None
        first = places[0] + min(place.constant for place in apart)
        steps, size = [coefficient for _, coefficient in first.terms], leaf.dtype.itemsize
        most = ACCESS if known else 2 * ACCESS
        for length in (2, 4, 8, 16):
            chosen = [(place - first).constant + first.constant % length for place in places]
            fits = max(chosen) < length and not any(step % length for step in steps)
            if fits and length * size <= most and leaf.slot.alignment % min(ACCESS, length * size) == 0:
                return _Window(first - first.constant % length, length, chosen, elements)
        return None

    def _chosen(self, leaf: Read, window: _Window, ways: Sequence[tuple[Inside, ...]]) -> str:
        """The text of a run's element, taken from a window. The window is read before the loop."""
        condition = self._if([[one for one in where if not self._varies(one)] for where in ways])
        kind, name, lines = self._types[leaf.dtype], self._name("r"), list[str]()
        access = min(ACCESS, window.length * leaf.dtype.itemsize)
        source = self.memory(leaf.slot, leaf.dtype)
        place = self._index(window.begin, lines)
        self.before.append(f"Adjacent<{kind}, {window.length}, {access}> {name} = {{}};")
        self.before.append(f"{condition}{{ {' '.join([*lines, f'{name}.load({source} + ({place}));'])} }}")
        numbers = sum(number << 4 * lane for lane, number in enumerate(window.chosen))
        element = f"as_number({name}.element[number_of({numbers:#x}ull, lane)])"
        if window.elements == (1 << self._vector) - 1:
            return element
        return f"(is_one_of({window.elements:#x}u, lane) ? {element} : as_number({kind}{{}}))"

    def _lanes(self, condition: Inside) -> int | None:
        """A bit mask of the elements of a run for which a condition holds; None if it differs between runs."""
        if self._by_element or self._vector == 1 or not condition.index.depends_on(LANE):
            return None
        found = 0
        for lane in range(self._vector):
            low, high = condition.index.substituted({LANE: Index((), lane)}).range
            if low >= 0 and high < condition.size:
                found |= 1 << lane
            elif high >= 0 and low < condition.size:
                return None
        return found

    def place(self, index: Index) -> str:
        """The text of an index that is the same for all elements of a run."""
        return self._index(index, self.before)

    def place_of_one(self, index: Index) -> str:
        """The text of an index that differs between the elements of a run."""
        return self._index(index, self.within)

    def _position(self, leaf: Position) -> str:
        lines = self.within if leaf.index.depends_on(LANE) else self.before
        place, name = self._index(leaf.index, lines), self._name("i")
        lines.append(f"const {leaf.kind} {name} = static_cast<int>({place});")
        return name

    def _varies(self, condition: Inside) -> bool:
        """Whether a condition may differ between elements of one run."""
        return self._by_runs(condition).index.depends_on(LANE)

    def _by_runs(self, condition: Inside) -> Inside:
        """The condition by runs of this loop, where possible (`by_runs`)."""
        return by_runs(condition, self._vector)

    def is_of_run(self, condition: Inside) -> bool:
        """Whether a condition is computed once, for all elements of a run."""
        return not (condition.is_always or self._varies(condition))

    def _inside(self, condition: Inside) -> str:
        if condition.is_always:
            return "true"
        is_of_row = self.held is not None and condition == self.held.within
        condition = self._by_runs(condition)
        if condition in self._names:
            return self._names[condition]
        lanes = self._lanes(condition)
        if lanes is not None:
            self._names[condition] = f"is_one_of({lanes:#x}u, lane)"
            return self._names[condition]
        lines = self.within if condition.index.depends_on(LANE) else self.before
        place, name = self._index(condition.index, lines), self._name("b")
        # tells the compiler that turns beyond the row are outside
        turn = f"turn < {self.held.turns} && " if is_of_row and self.held is not None else ""
        lines.append(f"const bool {name} = {turn}{place} < {self.number(condition.size)};")
        self._names[condition] = name
        return name

    def _index(self, index: Index, lines: list[str]) -> str:
        """The text of an index. Statements that it needs are added to `lines`."""
        parts = []
        for atom, coefficient in index.terms:
            name = self._atom(atom, lines)
            if coefficient == 1:
                parts.append(name)
            elif name == RUN and coefficient == self._vector and not self._by_element:
                parts.append(f"{name} * {coefficient}u")  # a run's length is in the text anyway
            else:
                parts.append(f"{name} * {self.number(coefficient)}")
        if index.constant:
            parts.append(self.number(index.constant))
        return " + ".join(parts) or "0u"

    def _atom(self, atom: Atom, lines: list[str]) -> str:
        if isinstance(atom, Variable):
            return atom.name if atom.name != LANE or self._by_element else "static_cast<unsigned>(lane)"
        if atom in self._names:
            return self._names[atom]
        is_free = not any(isinstance(one, Element) or one == _lane(self._vector) for one in _within(atom))
        lines = self.before if is_free else lines  # unneeded arithmetic is harmless, an unneeded read is not
        match atom:
            case Quotient(of, by):
                value = f"{self._divisor(by)}.divide({self._index(of, lines)})"
            case Remainder(of, by):
                whole, divisor = self._name("t"), self._divisor(by)
                lines.append(f"Place {whole} = {self._index(of, lines)};")
                value = f"{divisor}.take({whole})"
            case Element(memory, at, dtype, size, wraps):
                kind = f"integer_at<{'true' if wraps else 'false'}, {self._types[dtype]}>"
                place = self._index(at, lines)
                value = f"{kind}({self._tensor(memory)}, {place}, {self.number(size)})"
        name = self._name("t")
        lines.append(f"const Place {name} = {value};")
        if is_free:
            self._names[atom] = name
        return name

    def _name(self, letter: str) -> str:
        self._count += 1
        return f"{letter}{self._count}"

    def number(self, value: int) -> str:
        """The text of a number: an argument of the kernel, except for a row's length and its number of runs."""
        if self.length and value in (self.length, self.length // self._vector):
            return f"{value}u"
        self.numbers.append(value)
        return f"p.number[{len(self.numbers) - 1}]"

    def _divisor(self, value: int) -> str:
        self.divisors.append(value)
        return f"p.divisor[{len(self.divisors) - 1}]"

    def memory(self, slot: Slot, dtype: torch.dtype) -> str:
        """The text of a pointer to a piece of memory that is read."""
        return f"static_cast<const {self._types[dtype]}*>({self._tensor(slot)})"

    def _tensor(self, slot: Slot) -> str:
        if slot not in self.tensors:
            self.tensors.append(slot)
        return f"p.memory[{self.tensors.index(slot)}]"


def _lane(vector: int) -> Variable:
    return Variable(LANE, vector)


def _within(atom: Atom) -> list[Atom]:
    """The atom and all atoms nested in it."""
    return list(Index(((atom, 1),)).atoms())
