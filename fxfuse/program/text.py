"""The text of loops' kernels, for whatever device: what an element's leaves are, and where in memory.

Statements that are the same for a run of elements stand before the loop over them, others in it. On a GPU a thread has
a run of a few (cuda/loops.py). On a CPU a row is a run, of whose loop the compiler makes vectors (cpu/loops.py).
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
"""That one kernel reads: so many fit in its arguments."""
_Place: TypeAlias = tuple[Slot, torch.dtype, Index]
"""Of an element."""
RUN, LANE = "run", "lane"
ROW = "row"


@dataclass(frozen=True)
class LoopsKernel:
    """Loops as text to compile and arguments of a launch."""

    form: str
    """The text of its body."""
    params: bytes
    results: tuple[tuple[Slot, int], ...]
    """Where its results begin, in the order of the addresses: slots and bytes from there."""
    tensors: tuple[Slot, ...]
    """What it reads, in the order of the addresses that follow the results'."""

    @property
    def addresses(self) -> list[tuple[Slot, int]]:
        """Of a launch."""
        return [*self.results, *((slot, 0) for slot in self.tensors)]

    @property
    def argument_bytes(self) -> int:
        """At most: a divisor is three words, and each part has a spare."""
        return 16 * (len(self.params) // 4) + 8 * (len(self.addresses) + 4)


@dataclass
class Held:
    """What a thread reads once of a row that several loops go over: short rows fit into its registers."""

    lanes: int
    """Threads of a row."""
    turns: int
    """Of a loop over the row, known to the compiler."""
    vector: int
    names: dict[Read, str]
    """The variables that hold what was read, also as it is read for a result that is longer than the row."""
    variables: dict[str, str]
    """And their types."""
    within: Inside
    """Whether an element of the result is one of the row."""
    filled: set[str] = field(default_factory=set)

    def turns_over(self, runs: int) -> int:
        """How often a thread has one of so many runs, or one beyond them."""
        return -(-runs // self.lanes)

    def turn(self, runs: int) -> str:
        """Of what is held, in a loop over so many runs: nobody asks for an element that is beyond the row."""
        return "turn" if self.turns_over(runs) == self.turns else f"turn < {self.turns} ? turn : {self.turns - 1}"


def digits_of(index: Index, dims: Sequence[int], output: Value) -> dict[str, Index]:
    """The coordinates of an element, of its number among those of the dimensions."""
    values = {}
    for dim in reversed(dims):
        values[f"c{dim}"], index = index % output.shape[dim], index // output.shape[dim]
    return values


# ------------------------------------------------------------------------------------------------ dimensions


def flattened(loops: Loops) -> tuple[list[int], list[Leaf], Index | None]:
    """Sizes in the order of the result's memory, and the leaves by variables d0, d1, … of these; where it is put, too.

    Neighbours become one dimension where no place needs the two digits.
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


def by_runs(condition: Inside, size: int) -> Inside:
    """The same question of whole runs of so many elements, where those of one cannot differ."""
    rest = condition.index - variable(LANE, size)
    steps = [condition.size, rest.constant, *(coefficient for _, coefficient in rest.terms)]
    if rest.depends_on(LANE) or any(step % size for step in steps):
        return condition
    return Inside(rest // size, condition.size // size)


# ------------------------------------------------------------------------------------------------------ text


@dataclass(frozen=True)
class _Window:
    """Elements of memory that a run reads at once."""

    begin: Index
    """In elements from where the slot begins."""
    length: int
    chosen: Sequence[int]
    """By element of the run: which of them it takes."""
    elements: int
    """Of the run, as bits, those that take any; the others have zero."""


class Text:
    """Statements before the loop over a run's elements, and within it; what they take from the arguments."""

    def __init__(self, types: Mapping[torch.dtype, str], by_element: bool = False) -> None:
        """
        Args:
            types: C++ types of dtypes.
            by_element: whether a run is a loop of any length over elements, which the compiler makes vectors of; else
                it is a few, of which some are read at once.
        """
        self._types, self._by_element = types, by_element
        self.numbers: list[int] = []
        self.divisors: list[int] = []
        self.tensors: list[Slot] = []
        self.rows: dict[Reduced, str] = {}
        """Variables with what rows come to."""
        self._count = 0
        self.begin(1)

    def begin(self, vector: int, held: Held | None = None, runs: int = 0) -> None:
        """Begins another loop, over so many runs of so many elements."""
        self.held = held
        self._turn = "" if held is None else held.turn(runs)
        self.before: list[str] = []
        self.within: list[str] = []
        self._vector = vector
        self._names: dict[Atom | Inside | Index, str] = {}
        self._ways: dict[_Place, list[tuple[Inside, ...]]] = {}
        self._read: dict[_Place, str] = {}

    def coordinates(self, sizes: Sequence[int]) -> None:
        """Takes the coordinates of a run from its number, `rest`. `sizes`: in runs, none of a single element."""
        names = [*(f"d{dim}" for dim in range(len(sizes) - 1)), RUN] if sizes else []
        self._take(list(zip(names, sizes, strict=True)))

    def coordinates_across(self, sizes: Sequence[int], dim: int, count: int) -> str:
        """The same where runs are numbered in another order: first so many of the last dimension, a divisor of its
        size, of these then all that `dim` has. The run's number in memory."""
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
        """Variables, the one that counts fastest last."""
        sized = [(name, size) for name, size in sized if size > 1]
        for number, (name, size) in reversed(list(enumerate(sized))):
            value = f"{self._divisor(size)}.take(rest)" if number else "rest"
            self.before.append(f"const unsigned {name} = {value};")

    def leaves(self, leaves: Sequence[Leaf]) -> list[str]:
        """What an expression takes for its leaves. What several of them read of one place, each under conditions of its
        own, is read once."""
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

    def _computed(self, leaf: Leaf) -> str:
        if isinstance(leaf, Inside):
            return self._inside(leaf)
        if isinstance(leaf, Position):
            return self._position(leaf)
        if isinstance(leaf, Reduced):
            return self.rows[leaf]
        place = leaf.slot, leaf.dtype, leaf.index
        ways = self._ways.get(place, [])
        if leaf.where not in ways:
            return self._element(leaf, [leaf.where])
        if place not in self._read:
            self._read[place] = self._element(leaf, ways)
        return self._read[place]

    def _element(self, leaf: Read, ways: Sequence[tuple[Inside, ...]]) -> str:
        """What is read, if the conditions of one of the ways hold."""
        condition, kind, name = self._if(ways), self._types[leaf.dtype], self._name("r")
        source = f"static_cast<const {kind}*>({self._tensor(leaf.slot)})"
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
        place = self._index(leaf.index, lines)
        text = f"{condition}{{ {' '.join([*lines, f'{name} = {source}[{place}];'])} }}"
        (self.within if varies else self.before).extend([f"{kind} {name} = {{}};", text])
        return f"as_number({name})"

    def _if(self, ways: Sequence[Sequence[Inside]]) -> str:
        """Where all conditions of one of the ways hold."""
        texts = [dict.fromkeys(one for one in map(self._inside, where) if one != "true") for where in ways]
        least = [one for one in texts if not any(other.keys() < one.keys() for other in texts)]
        each = list(dict.fromkeys(" && ".join(sorted(one)) for one in least))
        if "" in each:
            return ""
        return f"if ({each[0]}) " if len(each) == 1 else f"if ({' || '.join(f'({one})' for one in each)}) "

    def _window(self, leaf: Read) -> _Window | None:
        """Where all that the elements of a run read lies close together, each at a distance that is the same in every
        run (pairs that change places, every other element), and can be read at once; None if it does not.

        What is read beside lies in the same aligned piece of memory as an element that is asked for.
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
        """What an element of a run reads of a window, which is read before."""
        condition = self._if([[one for one in where if not self._varies(one)] for where in ways])
        kind, name, lines = self._types[leaf.dtype], self._name("r"), list[str]()
        access = min(ACCESS, window.length * leaf.dtype.itemsize)
        source = f"static_cast<const {kind}*>({self._tensor(leaf.slot)})"
        place = self._index(window.begin, lines)
        self.before.append(f"Adjacent<{kind}, {window.length}, {access}> {name} = {{}};")
        self.before.append(f"{condition}{{ {' '.join([*lines, f'{name}.load({source} + ({place}));'])} }}")
        numbers = sum(number << 4 * lane for lane, number in enumerate(window.chosen))
        element = f"as_number({name}.element[number_of({numbers:#x}ull, lane)])"
        if window.elements == (1 << self._vector) - 1:
            return element
        return f"(is_one_of({window.elements:#x}u, lane) ? {element} : as_number({kind}{{}}))"

    def _lanes(self, condition: Inside) -> int | None:
        """The elements of a run for which a condition holds, as bits, if it is the same in every run."""
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
        """A place that is the same for all elements of a run."""
        return self._index(index, self.before)

    def place_of_one(self, index: Index) -> str:
        """A place that each element of a run has for itself."""
        return self._index(index, self.within)

    def _position(self, leaf: Position) -> str:
        lines = self.within if leaf.index.depends_on(LANE) else self.before
        place, name = self._index(leaf.index, lines), self._name("i")
        lines.append(f"const int64_t {name} = static_cast<int>({place});")
        return name

    def _varies(self, condition: Inside) -> bool:
        """Whether elements of one run differ in it."""
        return self._by_runs(condition).index.depends_on(LANE)

    def _by_runs(self, condition: Inside) -> Inside:
        """Of runs of this loop."""
        return by_runs(condition, self._vector)

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
        # known to the compiler of turns beyond the row
        turn = f"turn < {self.held.turns} && " if is_of_row and self.held is not None else ""
        lines.append(f"const bool {name} = {turn}{place} < {self.number(condition.size)};")
        self._names[condition] = name
        return name

    def _index(self, index: Index, lines: list[str]) -> str:
        """The text of a place, after the statements that it needs."""
        parts = []
        for atom, coefficient in index.terms:
            name = self._atom(atom, lines)
            parts.append(name if coefficient == 1 else f"{name} * {self.number(coefficient)}")
        if index.constant:
            parts.append(self.number(index.constant))
        return " + ".join(parts) or "0u"

    def _atom(self, atom: Atom, lines: list[str]) -> str:
        if isinstance(atom, Variable):
            return atom.name if atom.name != LANE or self._by_element else "static_cast<unsigned>(lane)"
        if atom in self._names:
            return self._names[atom]
        is_free = not any(isinstance(one, Element) or one == _lane(self._vector) for one in _within(atom))
        lines = self.before if is_free else lines  # arithmetic may be done where nobody needs it, reading may not
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
        self.numbers.append(value)
        return f"p.number[{len(self.numbers) - 1}]"

    def _divisor(self, value: int) -> str:
        self.divisors.append(value)
        return f"p.divisor[{len(self.divisors) - 1}]"

    def _tensor(self, slot: Slot) -> str:
        if slot not in self.tensors:
            self.tensors.append(slot)
        return f"p.memory[{self.tensors.index(slot)}]"


def _lane(vector: int) -> Variable:
    return Variable(LANE, vector)


def _within(atom: Atom) -> list[Atom]:
    """The atom and those that it is made of."""
    return list(Index(((atom, 1),)).atoms())
