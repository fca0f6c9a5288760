"""How a CPU kernel goes over a result: its nest of loops, and the values that it holds from one loop to the next.

The compiler vectorises over *lanes*. Lanes are the elements of a row, which are contiguous in the result. Where rows
are adjacent in memory or short, rows are lanes instead: a thread then goes over the elements of several rows at a time.

A value that several loops over a row need is computed once and held in a buffer, if it takes more than a few
instructions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from fxfuse.expression import Call, Expr, Operand, postorder
from fxfuse.layout import contiguous_strides
from fxfuse.program.indices import Index, Quotient, Remainder, Variable, dot, variable
from fxfuse.program.loops import (
    Inside,
    Leaf,
    Loops,
    Position,
    Read,
    Reduced,
    Rows,
    digits_of,
    indices_of,
    kinds_of,
    reductions_of,
    rows_of,
    substituted,
    with_operands,
)
from fxfuse.program.text import LANE, ROW, by_runs, flattened

TURN: Final = "turn"
"""The variable that counts a row's elements where lanes are rows; otherwise it counts pieces of a row."""
BESIDE: Final = 64
"""The most rows that a thread goes over at a time, if lanes are rows: kBeside of loops.h."""
TOGETHER: Final = 8
"""The most rows that a thread goes over at a time otherwise: kTogether of loops.h."""
ELEMENTS_TOGETHER: Final = 4096
"""The most elements of these rows: they should stay in the first-level cache from one loop to the next."""
LEAST_ROW: Final = 4
"""The fewest elements of a row: for fewer, finding the row's place costs more than computing the row."""
SHORT_ROW: Final = 16
"""The most elements of a short row, for which lanes are rows. A vector has about as many elements."""
LEAST_BESIDE: Final = 16
"""The fewest rows that are worth being lanes."""
MOST_FAR: Final = 2
"""The most elements that each lane fetches one by one, in a kernel without reductions."""
MOST_HELD: Final = 2**16
"""The most elements of held values, for all rows that a thread goes over at a time: 256 KB of its stack."""
CHEAP: Final = frozenset(
    {"add", "sub", "mul", "div", "neg", "abs", "square", "sqrt", "rsqrt", "maximum", "minimum", "where", "float32",
     "float16", "bfloat16", "eq", "ne", "lt", "le", "gt", "ge"}
)  # fmt: skip
"""Operations that take a few instructions."""
QUICK: Final = CHEAP - {"div", "sqrt", "rsqrt"}
"""Operations that take about one instruction."""


@dataclass(frozen=True)
class Loop:
    """A loop over a row's elements."""

    length: int
    piece: int
    """The size of a piece. Rows are cut so that the elements of a piece read adjacent elements, or the same one."""
    roots: tuple[Expr, ...]
    """The expressions that are computed. Operand i is the nest's leaves[i]."""


@dataclass(frozen=True)
class Nest:
    """The loops of a kernel: over `rows`, over `lanes` and, where lanes are rows, over the elements of a row."""

    rows: int
    lanes: int
    """The number of lanes for each of the `rows`."""
    lanes_are_rows: bool
    place: Index
    """Where an element of the result lies: in elements from the result's first element or, with `Loops.into`, from the
    beginning of the target's slot."""
    leaves: tuple[Leaf, ...]
    """All leaves, those of reductions included. Their indices depend on the variables ROW, LANE and TURN."""
    loops: tuple[Loop, ...]
    """One for each of the `reductions`, and one that stores the results."""
    reductions: tuple[Reduced, ...]
    """The reductions, as they stand among the leaves."""
    held: tuple[Expr, ...]
    """The values that several loops need, and that are held in buffers."""

    @property
    def together(self) -> int:
        """How many rows a thread goes over at a time."""
        if self.lanes_are_rows:
            return BESIDE
        return max(1, min(TOGETHER, ELEMENTS_TOGETHER // max(loop.length for loop in self.loops)))

    @property
    def elements_held(self) -> int:
        """The number of elements of a held value, for all rows that a thread goes over at a time."""
        return self.together * self.row_held

    @property
    def row_held(self) -> int:
        """The elements of a held value for one row; where elements are lanes, rounded up to whole cache lines."""
        longest = max(loop.length for loop in self.loops)
        return longest if self.lanes_are_rows else -(-longest // 16) * 16


def nest_of(loops: Loops) -> Nest | None:
    """The nest of a kernel for `loops`; None if it could not be vectorised, or would add up the same row repeatedly."""
    if loops.into is not None and (loops.reductions or loops.also):
        return None  # a nest has one place for all results
    if not loops.reductions:
        return _pointwise(loops)
    loops = loops.by_rows
    rows = rows_of(loops)
    if rows is None or rows.are_mixed or _adds_up_again(loops, rows):
        return None
    sizes = [loops.output.shape[dim] for dim in rows.along]
    longest = max(math.prod(sizes), *(row.over.size for row in loops.reductions))
    row_by_row = None
    if not rows.inner:
        row_by_row = _row_by_row(loops, rows)
    elif not rows.along:  # rows of one element each: they may just as well be computed one by one
        row_by_row = _row_by_row(loops, Rows((*rows.outer, *rows.inner), ()))
    beside = _rows_beside(loops, rows)
    if row_by_row is None or beside is None:
        return row_by_row or beside
    are_adjacent = all(stride_of(leaf.index) in (0, 1) for leaf in beside.leaves if isinstance(leaf, Read))
    return beside if longest <= SHORT_ROW or (rows.inner and are_adjacent) else row_by_row


def _adds_up_again(loops: Loops, rows: Rows) -> bool:
    """Whether reductions read about every element more than once, for different rows of the result."""
    outer, _, inner = rows.sizes(loops.output.shape)
    for row in loops.reductions:
        ranges = [leaf.index.range for leaf in row.leaves if isinstance(leaf, Read)]
        most = max((high - low + 1 for low, high in ranges), default=0)
        if outer * inner * row.over.size > 2 * most:
            return True
    return False


def _pointwise(loops: Loops) -> Nest | None:
    """The nest of loops without reductions; None if there is none.

    Lanes are the elements of a row, or of another dimension if memory is read in the order of that dimension.
    """
    sizes, leaves, into = flattened(loops)
    along = _along_last(loops, sizes, leaves, into)
    if along is not None and not any(map(is_far, along.leaves)):
        return along
    found = [_across(loops, sizes, leaves, into, dim) for dim in range(len(sizes) - 1) if sizes[dim] >= LEAST_BESIDE]
    found.append(_across_periods(loops, sizes, leaves, into))
    across = [nest for nest in found if nest is not None]
    if not across:
        return along
    best = min(across, key=lambda nest: (sum(map(is_far, nest.leaves)), stride_of(nest.place)))
    is_adjacent = any(isinstance(leaf, Read) and stride_of(leaf.index) == 1 for leaf in best.leaves)
    return best if along is None or is_adjacent else along


def _across_periods(loops: Loops, sizes: Sequence[int], leaves: Sequence[Leaf], into: Index | None) -> Nest | None:
    """The nest whose lanes are periods of a row; None if there are none, or too few.

    A period is a few elements. The places that are read change in the same way in each.
    """
    last = len(sizes) - 1
    divisors = _divisors(leaves, f"d{last}")
    period = math.gcd(sizes[-1], *divisors) if divisors else 1
    if not 1 < period < LEAST_ROW or sizes[-1] < LEAST_BESIDE * period:
        return None
    cut = [*sizes[:-1], sizes[-1] // period, period]
    value = {f"d{last}": variable(f"d{last}", cut[last]) * period + variable(f"d{last + 1}", period)}
    leaves = [substituted(leaf, value) for leaf in leaves]
    return _across(loops, cut, leaves, None if into is None else into.substituted(value), last)


def _divisors(leaves: Sequence[Leaf], name: str) -> list[int]:
    """The divisors of all quotients and remainders that depend on a variable."""
    atoms = (atom for index in indices_of(leaves) for atom in index.atoms())
    return [atom.by for atom in atoms if isinstance(atom, Quotient | Remainder) and atom.of.depends_on(name)]


def _along_last(loops: Loops, sizes: Sequence[int], leaves: Sequence[Leaf], into: Index | None) -> Nest | None:
    """The nest whose lanes are the elements of a row, or of a part of a row in which conditions do not differ."""
    whole = sizes[-1] if sizes else 1
    length = _alike(leaves, f"d{len(sizes) - 1}", whole)
    count = math.prod(sizes) // length
    if length < LEAST_ROW and count > 1:
        return None
    number, values = variable(ROW, count), dict[str, Index]()
    if sizes:
        parts = whole // length
        values[f"d{len(sizes) - 1}"] = (number % parts) * length + variable(LANE, length)
        number = number // parts
    values |= _digits(number, range(len(sizes) - 1), sizes)
    leaves = [_of_whole_rows(substituted(leaf, values), length) for leaf in leaves]
    place = variable(ROW, count) * length + variable(LANE, length) if into is None else into.substituted(values)
    return _checked(_made(loops, leaves, place, (count, length, False)))


def _across(loops: Loops, sizes: Sequence[int], leaves: Sequence[Leaf], into: Index | None, lanes: int) -> Nest | None:
    """The nest whose lanes are the elements of dimension `lanes`, for each element of the last dimension."""
    last = len(sizes) - 1
    outer = [dim for dim in range(last) if dim != lanes]
    count = math.prod(sizes[dim] for dim in outer)
    values = {
        **_digits(variable(ROW, count), outer, sizes),
        f"d{lanes}": variable(LANE, sizes[lanes]),
        f"d{last}": variable(TURN, sizes[last]),
    }
    place = dot((values[f"d{dim}"] for dim in range(len(sizes))), contiguous_strides(sizes))
    place = place if into is None else into.substituted(values)
    leaves = [substituted(leaf, values) for leaf in leaves]
    return _checked(_made(loops, leaves, place, (count, sizes[lanes], True)))


def _digits(number: Index, dims: Sequence[int], sizes: Sequence[int]) -> dict[str, Index]:
    """The variables of the dimensions `dims`, from an element's number among the elements of these dimensions."""
    values = {}
    for dim in reversed(dims):
        values[f"d{dim}"], number = number % sizes[dim], number // sizes[dim]
    return values


def _row_by_row(loops: Loops, rows: Rows) -> Nest | None:
    output = loops.output
    count, length, _ = rows.sizes(output.shape)
    values = {
        **digits_of(variable(ROW, count), rows.outer, output),
        **digits_of(variable(LANE, length), rows.along, output),
    }
    leaves = [substituted(leaf, values) for leaf in loops.leaves]
    place = variable(ROW, count) * length + variable(LANE, length)
    return _checked(_made(loops, leaves, place, (count, length, False)))


def _rows_beside(loops: Loops, rows: Rows) -> Nest | None:
    """The nest whose lanes are rows: as many of the innermost rows as lie at equal distances in memory.

    None if these are fewer than LEAST_BESIDE.
    """
    output, of_rows = loops.output, (*rows.outer, *rows.inner)
    for first in range(len(of_rows)):
        outer, beside = of_rows[:first], of_rows[first:]
        count, lanes = (math.prod(output.shape[dim] for dim in dims) for dims in (outer, beside))
        length = math.prod(output.shape[dim] for dim in rows.along)
        values = {
            **digits_of(variable(ROW, count), outer, output),
            **digits_of(variable(LANE, lanes), beside, output),
            **digits_of(variable(TURN, length), rows.along, output),
        }
        leaves = [substituted(leaf, values) for leaf in loops.leaves]
        place = (loops.place() - output.offset // output.dtype.itemsize).substituted(values)
        found = _checked(_made(loops, leaves, place, (count, lanes, True)))
        if found is not None:
            return found if lanes >= LEAST_BESIDE else None
    return None


def _made(loops: Loops, leaves: Sequence[Leaf], place: Index, sizes: tuple[int, int, bool]) -> Nest:
    rows, lanes, lanes_are_rows = sizes
    element = TURN if lanes_are_rows else LANE
    length = math.prod(loops.output.shape) // (rows * lanes) if lanes_are_rows else lanes
    reductions = reductions_of(leaves)
    own = [
        (row.over.size, [substituted(leaf, {row.over.name: variable(element, row.over.size)}) for leaf in row.leaves])
        for row in reductions
    ]
    own.append((length, list(leaves)))
    pieces = {size: size if lanes_are_rows else _piece(own, size) for size, _ in own}
    numbers, made = dict[Leaf, int](), list[Loop]()
    expressions = [*([row.expression] for row in reductions), [store.expression for store in loops.stores]]
    for (size, read), roots in zip(own, expressions, strict=True):
        read = [_in_pieces(leaf, size, pieces[size]) for leaf in read]
        at = {number: Operand(numbers.setdefault(leaf, len(numbers))) for number, leaf in enumerate(read)}
        made.append(Loop(size, pieces[size], tuple(with_operands(root, at) for root in roots)))
    every = tuple(numbers)
    held = _to_hold(made, every, (TURN, LANE) if not lanes_are_rows else (TURN,))
    place = _lane_in_pieces(place, length, pieces[length])
    return Nest(rows, lanes, lanes_are_rows, place, every, tuple(made), tuple(reductions), held)


def _piece(own: Sequence[tuple[int, Sequence[Leaf]]], size: int) -> int:
    """How many elements the pieces of a row of `size` elements have: no quotient changes within a piece."""
    return math.gcd(size, *(by for length, leaves in own if length == size for by in _divisors(leaves, LANE)))


def _in_pieces(leaf: Leaf, size: int, piece: int) -> Leaf:
    return leaf if piece == size else substituted(leaf, {LANE: _lane_in_pieces(variable(LANE, size), size, piece)})


def _lane_in_pieces(index: Index, size: int, piece: int) -> Index:
    """The index with LANE, an element's number in its row, written as its piece TURN and its number LANE there."""
    if piece == size:
        return index
    return index.substituted({LANE: variable(TURN, size // piece) * piece + variable(LANE, piece)})


def _checked(nest: Nest) -> Nest | None:
    """The nest if consecutive lanes read adjacent elements of memory, or the same one; else None.

    Without reductions, or if lanes are rows, the elements may also lie at other equal distances.
    """

    def lies_right(leaf: Leaf) -> bool:
        if isinstance(leaf, Reduced):
            return True
        if isinstance(leaf, Position):
            return stride_of(leaf.index) is not None
        if not isinstance(leaf, Read):
            return not leaf.index.depends_on(LANE)
        stride = stride_of(leaf.index)
        may_be_far = nest.lanes_are_rows or not nest.reductions
        if any(one.index.depends_on(LANE) for one in leaf.where):
            return False
        return stride is not None if may_be_far else stride in (0, 1)

    if not nest.reductions and sum(map(is_far, nest.leaves)) > MOST_FAR:
        return None  # windows, products: torch has better kernels for these
    if any(loop.piece < min(loop.length, LEAST_ROW) for loop in nest.loops):
        return None
    return nest if all(map(lies_right, nest.leaves)) and stride_of(nest.place) is not None else None


def stride_of(index: Index) -> int | None:
    """The distance in memory between consecutive lanes, in elements; None if it differs between lanes."""
    stride = 0
    for atom, coefficient in index.terms:
        if isinstance(atom, Variable) and atom.name == LANE:
            stride = coefficient
        elif Index(((atom, 1),)).depends_on(LANE):
            return None
    return stride


def _alike(leaves: Sequence[Leaf], name: str, size: int) -> int:
    """How many elements the pieces of a loop have: every condition holds for all elements of a piece, or for none."""
    conditions = [leaf for leaf in leaves if isinstance(leaf, Inside)]
    conditions += [one for leaf in leaves if isinstance(leaf, Read) for one in leaf.where]
    of_loop = [one for one in conditions if one.index.depends_on(name)]
    steps = [abs(step) for one in of_loop for step in (one.size, one.index.constant)]
    return math.gcd(size, *steps)


def _of_whole_rows(leaf: Leaf, length: int) -> Leaf:
    """The leaf with each condition that is the same for all elements of a row written as a condition of rows."""
    if isinstance(leaf, Inside):
        return by_runs(leaf, length)
    if isinstance(leaf, Read):
        return Read(leaf.slot, leaf.dtype, leaf.index, tuple(by_runs(one, length) for one in leaf.where))
    return leaf


# ------------------------------------------------------------------------------------------------ held values


def _to_hold(loops: Sequence[Loop], leaves: Sequence[Leaf], names: Sequence[str]) -> tuple[Expr, ...]:
    """The costly values that several loops need for the same elements of a row. The variables `names` count these."""
    in_loops: dict[tuple[int, Expr], int] = {}
    for loop in loops:
        for node in {node for root in loop.roots for node in postorder(root)}:
            in_loops[loop.length, node] = in_loops.get((loop.length, node), 0) + 1
    costly: dict[Expr, bool] = {}
    found: dict[Expr, None] = {}

    def is_costly(node: Expr) -> bool:
        if node not in costly:
            if isinstance(node, Operand):
                costly[node] = _is_costly(leaves[node.index])
            else:
                costly[node] = isinstance(node, Call) and (
                    (node.op not in CHEAP and is_of_element(node)) or any(map(is_costly, node.args))
                )
        return costly[node]

    def is_of_element(node: Expr) -> bool:
        read = [leaves[one.index] for one in postorder(node) if isinstance(one, Operand)]
        return depend_on(read, names) and is_float(node, leaves)

    def look(node: Expr, loop: Loop) -> None:
        if not is_costly(node):
            return
        if loop.length > 1 and in_loops[loop.length, node] > 1 and is_of_element(node):
            found[node] = None
        elif isinstance(node, Call):
            for argument in node.args:
                look(argument, loop)

    for loop in loops:
        for root in loop.roots:
            look(root, loop)
    return tuple(found)


def _is_costly(leaf: Leaf) -> bool:
    """Whether reading a leaf takes more than one instruction for a vector."""
    return is_far(leaf) or (isinstance(leaf, Read) and leaf.dtype == torch.float16)


def is_far(leaf: Leaf) -> bool:
    """Whether consecutive lanes read elements that are apart in memory: neither adjacent nor the same."""
    return isinstance(leaf, Read) and stride_of(leaf.index) not in (0, 1)


def depend_on(leaves: Sequence[Leaf], names: Sequence[str]) -> bool:
    return any(index.depends_on(name) for index in indices_of(leaves) for name in names)


def is_float(node: Expr, leaves: Sequence[Leaf]) -> bool:
    return kinds_of(leaves, node)[node] == "float"
