"""The kernel of a program's loops on a CPU (kernels/loops.h): the same text as on a GPU, element by element.

The compiler makes vectors of *lanes*. These are the elements of a row, which are contiguous in the result. Or they are
rows, where rows are adjacent in memory or short: then a thread goes over the elements of several rows at a time.

A value that several loops over a row need is computed once and held in a buffer, if it takes more than a few
instructions. `suits` says which loops have such a kernel. Others are torch's.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from fxfuse.codegen import function
from fxfuse.cpu.codegen import CPP_TYPES
from fxfuse.expression import Call, Const, Expr, Operand, postorder
from fxfuse.layout import contiguous_strides
from fxfuse.program.indices import Element, Index, Quotient, Remainder, Variable, dot, variable
from fxfuse.program.loops import (
    Inside,
    Leaf,
    Loops,
    Read,
    Reduced,
    Rows,
    Store,
    indices_of,
    kind_of,
    kinds_of,
    reductions_of,
    rows_of,
    substituted,
    with_operands,
)
from fxfuse.program.text import LANE, MAX_TENSORS, ROW, LoopsKernel, Text, by_runs, digits_of, flattened
from fxfuse.program.values import Value

_TYPES: Final = {**CPP_TYPES, torch.float64: "double"}
_QUALIFIERS: Final = "FXFUSE_INLINE static"
TURN: Final = "turn"
"""The variable that counts a row's elements where lanes are rows, and otherwise pieces of a row."""
BESIDE: Final = 64
"""The number of rows that a thread goes over at a time, if lanes are rows: kBeside of loops.h."""
TOGETHER: Final = 8
"""The most rows that a thread goes over at a time otherwise: kTogether of loops.h."""
ELEMENTS_TOGETHER: Final = 4096
"""The elements of these rows, which are to stay in the first-level cache from one loop to the next."""
LEAST_ROW: Final = 4
"""Elements of a row below which finding its place costs more than computing it."""
SHORT_ROW: Final = 16
"""Lanes are rows up to this number of elements, where a vector has about as many."""
LEAST_BESIDE: Final = 16
"""Rows that are worth being lanes."""
MOST_FAR: Final = 2
"""Elements that are fetched one by one for a lane, where no row is added up."""
MOST_HELD: Final = 2**15
"""Elements of a held value, for all rows that a thread goes over at a time: 128 KB."""
CHEAP: Final = frozenset(
    {"add", "sub", "mul", "div", "neg", "abs", "square", "sqrt", "rsqrt", "maximum", "minimum", "where", "float32",
     "float16", "bfloat16", "eq", "ne", "lt", "le", "gt", "ge"}
)  # fmt: skip
"""Operations that take a few instructions."""
QUICK: Final = CHEAP - {"div", "sqrt", "rsqrt"}
"""Operations that take about one instruction."""

_SOURCE: Final = """\
#include "loops.h"

namespace fxfuse::fxfuse_kernel {{

struct Body {{
    using Output = {output};
    static constexpr int kNumbers = {numbers}, kDivisors = {divisors}, kTensors = {tensors}, kOthers = {others};
    static constexpr int kHeld = {held};
    static constexpr bool kAddsUp = {adds_up}, kHoldsRows = {holds_rows}, kRowsBeside = {rows_beside};

{functions}

    static void run(const LoopsArguments<Body>& arguments, Place first, int64_t count, int64_t begin, int64_t end,
                    float* held) {{
        const LoopsArguments<Body> p = arguments;  // in registers: nothing that is stored changes them
{statements}
    }}
}};

}}  // namespace fxfuse::fxfuse_kernel

extern "C" int fxfuse_launch(const void* params, const uint64_t* pointers, uint64_t threads) {{
    fxfuse::launch_loops<fxfuse::fxfuse_kernel::Body>(params, pointers, threads);
    return 0;
}}

extern "C" const char* fxfuse_error(int) {{ return "no error"; }}
"""


def source_of(kernels: Sequence[LoopsKernel]) -> str:
    """The text of a launch of one of them."""
    (kernel,) = kernels
    return kernel.form


def suits(loops: Loops) -> bool:
    """Whether a kernel would be vectors all through, and compute nothing twice that is costly."""
    if len({read.slot for read in loops.reads}) > MAX_TENSORS:
        return False
    if any(isinstance(atom, Element) for index in loops.indices for atom in index.atoms()):
        return False  # an index beyond the end is an error, which is torch's to raise
    if loops.into is not None or any(store.output.dtype not in _TYPES for store in loops.stores):
        return False
    nest = _nest(loops)
    return nest is not None and (not nest.held or nest.elements_held <= MOST_HELD)


class Beside(enum.Enum):
    """How fast a kernel is beside torch's own operator that computes exactly these loops, without the call."""

    SLOWER, ALIKE, FASTER = range(3)


def beside_torch(loops: Loops) -> Beside:
    """For loops that suit.

    torch goes over the elements of a row in vectors, too, in all its sums and in softmax. It does not go over several
    rows at a time, and takes more passes for variances and logarithms of sums. Its matrix products are better.
    """
    nest = _nest(loops)
    assert nest is not None, "suits() has seen to it"
    *adding, last = nest.loops
    if not adding:
        is_product = not loops.only_moves and any(map(_is_far, nest.leaves))
        return Beside.SLOWER if is_product else Beside.ALIKE
    if len(adding) == 1:
        is_short = nest.lanes_are_rows and adding[0].length <= SHORT_ROW
        return Beside.FASTER if is_short else Beside.ALIKE
    nodes = (node for loop in adding for root in loop.roots for node in postorder(root))
    is_softmax = last.length > 1 and any(isinstance(node, Call) and node.op == "exp" for node in nodes)
    return Beside.FASTER if nest.lanes_are_rows or not is_softmax else Beside.ALIKE


# ---------------------------------------------------------------------------------------------- the nest of loops


@dataclass(frozen=True)
class _Loop:
    """A loop over a row's elements."""

    length: int
    piece: int
    """A row is cut into pieces of so many elements, of which all read what is adjacent, or the same."""
    roots: tuple[Expr, ...]
    """What is computed. Operands are numbers of the nest's leaves."""


@dataclass(frozen=True)
class _Nest:
    """The loops of a kernel: over `rows`, over `lanes`, and where lanes are rows over the elements of these."""

    rows: int
    lanes: int
    """All lanes of one of the `rows`."""
    lanes_are_rows: bool
    place: Index
    """Where an element of the result lies, in elements from the result's first."""
    leaves: tuple[Leaf, ...]
    """By the variables ROW, LANE and TURN. Those of reductions too."""
    loops: tuple[_Loop, ...]
    """One for each of the `reductions`, and one that stores the results."""
    reductions: tuple[Reduced, ...]
    """As they stand among the leaves."""
    held: tuple[Expr, ...]
    """Values that several loops need."""

    @property
    def together(self) -> int:
        """How many rows a thread goes over at a time."""
        if self.lanes_are_rows:
            return BESIDE
        return max(1, min(TOGETHER, ELEMENTS_TOGETHER // max(loop.length for loop in self.loops)))

    @property
    def elements_held(self) -> int:
        """The elements of a held value, for all rows that a thread goes over at a time."""
        return self.together * self.row_held

    @property
    def row_held(self) -> int:
        """The elements of one row of a held value, in a multiple of a cache line where they are lanes."""
        longest = max(loop.length for loop in self.loops)
        return longest if self.lanes_are_rows else -(-longest // 16) * 16


def _nest(loops: Loops) -> _Nest | None:
    """How a kernel goes over a result; None if its loops would be no vectors, or would add up the same row often."""
    if not loops.reductions:
        return _pointwise(loops)
    loops = _divided(loops)
    rows = rows_of(loops)
    if rows is None or _adds_up_again(loops, rows):
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
    are_adjacent = all(_stride(leaf.index) in (0, 1) for leaf in beside.leaves if isinstance(leaf, Read))
    return beside if longest <= SHORT_ROW or (rows.inner and are_adjacent) else row_by_row


def _divided(loops: Loops) -> Loops:
    """The same loops with dimensions divided in two, where reductions depend on the quotient alone (groups)."""
    output = loops.output
    for dim, size in enumerate(output.shape):
        whole = variable(f"c{dim}", size)
        atoms = [atom for row in loops.reductions for index in indices_of(row.leaves) for atom in index.atoms()]
        parts = {atom.by for atom in atoms if isinstance(atom, Quotient) and atom.of == whole}
        part = min(parts, default=1)
        if part == 1 or size % part:
            continue
        values = {
            f"c{later}": variable(f"c{later + 1}", output.shape[later]) for later in range(dim + 1, len(output.shape))
        }
        values[f"c{dim}"] = variable(f"c{dim}", size // part) * part + variable(f"c{dim + 1}", part)

        def divided(value: Value, dim: int = dim, part: int = part) -> Value:
            shape, strides = list(value.shape), list(value.strides)
            shape[dim : dim + 1], strides[dim : dim + 1] = (
                [shape[dim] // part, part],
                [strides[dim] * part, strides[dim]],
            )
            return dataclasses.replace(value, shape=tuple(shape), strides=tuple(strides))

        leaves = tuple(substituted(leaf, values) for leaf in loops.leaves)
        also = tuple(Store(divided(store.output), store.expression) for store in loops.also)
        return _divided(Loops(divided(output), loops.expression, leaves, also))
    return loops


def _adds_up_again(loops: Loops, rows: Rows) -> bool:
    """Whether reductions read about every element more than once, for different rows of the result."""
    outer, _, inner = rows.sizes(loops.output.shape)
    for row in loops.reductions:
        ranges = [leaf.index.range for leaf in row.leaves if isinstance(leaf, Read)]
        most = max((high - low + 1 for low, high in ranges), default=0)
        if outer * inner * row.over.size > 2 * most:
            return True
    return False


def _pointwise(loops: Loops) -> _Nest | None:
    """Lanes are the elements of a row; or of another dimension, if memory is read in the order of that."""
    sizes, leaves, _ = flattened(loops)
    along = _along_last(loops, sizes, leaves)
    if along is not None and not any(map(_is_far, along.leaves)):
        return along
    found = [_across(loops, sizes, leaves, dim) for dim in range(len(sizes) - 1) if sizes[dim] >= LEAST_BESIDE]
    across = [nest for nest in found if nest is not None]
    if not across:
        return along
    best = min(across, key=lambda nest: sum(map(_is_far, nest.leaves)))
    is_adjacent = any(isinstance(leaf, Read) and _stride(leaf.index) == 1 for leaf in best.leaves)
    return best if along is None or is_adjacent else along


def _along_last(loops: Loops, sizes: Sequence[int], leaves: Sequence[Leaf]) -> _Nest | None:
    """Lanes are the elements of a row, or of a part of it for which conditions do not differ."""
    whole = sizes[-1] if sizes else 1
    length = _alike(leaves, f"d{len(sizes) - 1}", whole)
    if length < LEAST_ROW:
        return None
    count = math.prod(sizes) // length
    number, values = variable(ROW, count), dict[str, Index]()
    if sizes:
        parts = whole // length
        values[f"d{len(sizes) - 1}"] = (number % parts) * length + variable(LANE, length)
        number = number // parts
    values |= _digits(number, range(len(sizes) - 1), sizes)
    leaves = [_of_whole_rows(substituted(leaf, values), length) for leaf in leaves]
    place = variable(ROW, count) * length + variable(LANE, length)
    return _checked(_made(loops, leaves, place, (count, length, False)))


def _across(loops: Loops, sizes: Sequence[int], leaves: Sequence[Leaf], lanes: int) -> _Nest | None:
    """Lanes are the elements of dimension `lanes`, for each element of the last dimension."""
    last = len(sizes) - 1
    outer = [dim for dim in range(last) if dim != lanes]
    count = math.prod(sizes[dim] for dim in outer)
    values = {
        **_digits(variable(ROW, count), outer, sizes),
        f"d{lanes}": variable(LANE, sizes[lanes]),
        f"d{last}": variable(TURN, sizes[last]),
    }
    place = dot((values[f"d{dim}"] for dim in range(len(sizes))), contiguous_strides(sizes))
    leaves = [substituted(leaf, values) for leaf in leaves]
    return _checked(_made(loops, leaves, place, (count, sizes[lanes], True)))


def _digits(number: Index, dims: Sequence[int], sizes: Sequence[int]) -> dict[str, Index]:
    """The variables of dimensions, from the number of an element among the elements of these."""
    values = {}
    for dim in reversed(dims):
        values[f"d{dim}"], number = number % sizes[dim], number // sizes[dim]
    return values


def _row_by_row(loops: Loops, rows: Rows) -> _Nest | None:
    output = loops.output
    count, length, _ = rows.sizes(output.shape)
    values = {
        **digits_of(variable(ROW, count), rows.outer, output),
        **digits_of(variable(LANE, length), rows.along, output),
    }
    leaves = [substituted(leaf, values) for leaf in loops.leaves]
    return _checked(
        _made(loops, leaves, variable(ROW, count) * length + variable(LANE, length), (count, length, False))
    )


def _rows_beside(loops: Loops, rows: Rows) -> _Nest | None:
    """Lanes are as many of the innermost rows as have places that are sums of multiples."""
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


def _made(loops: Loops, leaves: Sequence[Leaf], place: Index, sizes: tuple[int, int, bool]) -> _Nest:
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
    numbers, made = dict[Leaf, int](), list[_Loop]()
    expressions = [*([row.expression] for row in reductions), [store.expression for store in loops.stores]]
    for (size, read), roots in zip(own, expressions, strict=True):
        read = [_in_pieces(leaf, size, pieces[size]) for leaf in read]
        at = {number: Operand(numbers.setdefault(leaf, len(numbers))) for number, leaf in enumerate(read)}
        made.append(_Loop(size, pieces[size], tuple(with_operands(root, at) for root in roots)))
    every = tuple(numbers)
    held = _shared(made, every, (TURN, LANE) if not lanes_are_rows else (TURN,))
    place = _lane_in_pieces(place, length, pieces[length])
    return _Nest(rows, lanes, lanes_are_rows, place, every, tuple(made), tuple(reductions), held)


def _piece(own: Sequence[tuple[int, Sequence[Leaf]]], size: int) -> int:
    """Into pieces of how many elements rows of a size are cut, so that quotients do not change within one."""
    atoms = [atom for length, leaves in own if length == size for index in indices_of(leaves) for atom in index.atoms()]
    steps = [atom.by for atom in atoms if isinstance(atom, Quotient | Remainder) and atom.of.depends_on(LANE)]
    return math.gcd(size, *steps)


def _in_pieces(leaf: Leaf, size: int, piece: int) -> Leaf:
    return leaf if piece == size else substituted(leaf, {LANE: _lane_in_pieces(variable(LANE, size), size, piece)})


def _lane_in_pieces(index: Index, size: int, piece: int) -> Index:
    """The index with the number of an element of a row by the number of its piece, TURN, and its number in that."""
    if piece == size:
        return index
    return index.substituted({LANE: variable(TURN, size // piece) * piece + variable(LANE, piece)})


def _checked(nest: _Nest) -> _Nest | None:
    """The nest if lanes that follow each other read what is adjacent in memory, or the same.

    Without reductions, or if lanes are rows, they may be at any equal distances from each other.
    """

    def lies_right(leaf: Leaf) -> bool:
        if isinstance(leaf, Reduced):
            return True
        if not isinstance(leaf, Read):
            return not leaf.index.depends_on(LANE)
        stride = _stride(leaf.index)
        may_be_far = nest.lanes_are_rows or not nest.reductions
        return (stride is not None if may_be_far else stride in (0, 1)) and not any(
            one.index.depends_on(LANE) for one in leaf.where
        )

    if not nest.reductions and sum(map(_is_far, nest.leaves)) > MOST_FAR:
        return None  # windows, products: torch has better kernels of these
    return nest if all(map(lies_right, nest.leaves)) and _stride(nest.place) is not None else None


def _stride(index: Index) -> int | None:
    """How far apart in memory lanes are that follow each other, in elements; None if that differs."""
    stride = 0
    for atom, coefficient in index.terms:
        if isinstance(atom, Variable) and atom.name == LANE:
            stride = coefficient
        elif Index(((atom, 1),)).depends_on(LANE):
            return None
    return stride


def _alike(leaves: Sequence[Leaf], name: str, size: int) -> int:
    """Into pieces of how many elements a loop is cut, of which all conditions hold for all or for none."""
    conditions = [leaf for leaf in leaves if isinstance(leaf, Inside)]
    conditions += [one for leaf in leaves if isinstance(leaf, Read) for one in leaf.where]
    of_loop = [one for one in conditions if one.index.depends_on(name)]
    steps = [abs(step) for one in of_loop for step in (one.size, one.index.constant)]
    return math.gcd(size, *steps)


def _of_whole_rows(leaf: Leaf, length: int) -> Leaf:
    """The leaf with questions of rows where elements of one cannot differ."""
    if isinstance(leaf, Inside):
        return by_runs(leaf, length)
    if isinstance(leaf, Read):
        return Read(leaf.slot, leaf.dtype, leaf.index, tuple(by_runs(one, length) for one in leaf.where))
    return leaf


# ------------------------------------------------------------------------------------------------ held values


def _shared(loops: Sequence[_Loop], leaves: Sequence[Leaf], names: Sequence[str]) -> tuple[Expr, ...]:
    """The costly values that several loops need for the same elements of a row, which the variables `names` count."""
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
        return _depend_on(read, names) and _is_float(node, leaves)

    def look(node: Expr, loop: _Loop) -> None:
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
    """Whether reading it takes more than an instruction for a vector."""
    return _is_far(leaf) or (isinstance(leaf, Read) and leaf.dtype == torch.float16)


def _is_far(leaf: Leaf) -> bool:
    """Whether lanes read elements that are apart in memory."""
    return isinstance(leaf, Read) and _stride(leaf.index) not in (0, 1)


def _depend_on(leaves: Sequence[Leaf], names: Sequence[str]) -> bool:
    return any(index.depends_on(name) for index in indices_of(leaves) for name in names)


def _is_float(node: Expr, leaves: Sequence[Leaf]) -> bool:
    return kinds_of(node, leaves)[node] == "float"


# ------------------------------------------------------------------------------------------------------ text

_KNOWN: Final = Reduced("known", Variable("", 1), Const(0.0), ())
"""Stands for a value that is known already among leaves: a number of type float."""


class _Writer:
    """Writes the functions and statements of a nest."""

    def __init__(self, nest: _Nest) -> None:
        self.nest = nest
        self.text = Text(_TYPES, by_element=True)
        self.functions: list[str] = []
        self._numbers = {node: len(nest.leaves) + number for number, node in enumerate(nest.held)}
        """Of values that are known before an element is computed, among the operands."""
        self._texts: dict[int, str] = {}
        """Of those that are known by now, by number."""
        self.shares = False
        """Whether values that elements of a row share are computed before them."""
        self.buffers = [self._held(node) for node in nest.held]
        """The variables of buffers with held values."""

    def _held(self, node: Expr) -> str:
        return f"held{self._numbers[node]}"

    def before(self, loop: _Loop) -> list[str]:
        """The statements that compute what all elements of a row share, and that is costly."""
        found: dict[Expr, None] = {}
        for root in loop.roots:
            self._look_for_shared(root, found)
        lines: list[str] = []
        self.shares = self.shares or bool(found)
        for node in found:
            self._numbers[node] = number = len(self.nest.leaves) + len(self._numbers)
            self._begin(loop)
            (value,) = self._computed([node], [f"shared{number}_of"], [])
            name = f"shared{number}"
            lines += [f"float {name}[{_ROWS[self.nest.lanes_are_rows]}];"]
            own = [leaf for leaf in self._read_by(node) if not isinstance(leaf, Reduced)]
            of_row = _depend_on(own, (ROW,))
            lines += self.over_rows(f"{name}[i] = {value};", vectors=True, count="count" if of_row else "kTogether")
            self._texts[number] = f"{name}[i]"
        return lines

    def _read_by(self, node: Expr) -> list[Leaf]:
        return [self.nest.leaves[one.index] for one in postorder(node) if isinstance(one, Operand)]

    def _look_for_shared(self, node: Expr, found: dict[Expr, None]) -> None:
        if not isinstance(node, Call) or node in self._numbers:
            return
        is_shared = not _depend_on(self._read_by(node), (TURN,) if self.nest.lanes_are_rows else (TURN, LANE))
        calls = [one for one in postorder(node) if isinstance(one, Call)]
        if is_shared and any(one.op not in QUICK for one in calls) and _is_float(node, self.nest.leaves):
            found[node] = None
            return
        for argument in node.args:
            self._look_for_shared(argument, found)

    def values(self, loop: _Loop, names: Sequence[str]) -> list[str]:
        """The texts of the loop's roots, which functions of these names compute.

        The statements that they need stand in `text` then, before the loop over lanes and in it.
        """
        self._begin(loop)
        held = [node for node in self.nest.held if self._numbers[node] not in self._texts]
        return self._computed(loop.roots, names, held)

    def _begin(self, loop: _Loop) -> None:
        self.text.begin(self.nest.lanes if self.nest.lanes_are_rows else loop.piece)
        if self.nest.lanes_are_rows:
            self._place = f"{TURN} * kBeside + i"
        else:
            within = "lane" if loop.piece == loop.length else f"{TURN} * {self.text.number(loop.piece)} + lane"
            self._place = f"i * {self.text.number(self.nest.row_held)} + {within}"

    def _computed(self, roots: Sequence[Expr], names: Sequence[str], held: Sequence[Expr]) -> list[str]:
        """The texts of expressions, those of `held` among them are computed now, and held."""
        new: dict[Expr, Expr] = {}
        known: dict[Expr, Expr] = {}

        def replaced(node: Expr, is_whole: bool = False) -> Expr:
            """The node with values in it that are known replaced by operands."""
            if node in self._numbers and not is_whole:
                if node in held and node not in new:
                    new[node] = replaced(node, is_whole=True)
                return Operand(self._numbers[node])
            if not isinstance(node, Call):
                return node
            if node not in known:
                known[node] = Call(node.op, tuple(map(replaced, node.args)))
            return known[node]

        expressions = [replaced(root, is_whole=not held and root in self._numbers) for root in roots]
        used = {
            one.index for each in (*new.values(), *expressions) for one in postorder(each) if isinstance(one, Operand)
        }
        numbers = sorted(number for number in used if number < len(self.nest.leaves))
        far = [number for number in numbers if self.nest.lanes_are_rows and _is_far(self.nest.leaves[number])]
        texts = self._fetched(far)
        near = [number for number in numbers if number not in texts]
        texts |= zip(near, self.text.leaves([self.nest.leaves[number] for number in near]), strict=True)
        texts |= self._texts
        for node, expression in new.items():
            name, number = self._held(node), self._numbers[node]
            value = self._call(expression, f"{name}_of", texts)
            self.text.within += [f"const float {name}_now = {value};", f"{name}[{self._place}] = {name}_now;"]
            texts[number], self._texts[number] = f"{name}_now", f"{name}[{self._place}]"
        return [self._call(each, name, texts) for each, name in zip(expressions, names, strict=True)]

    def over_rows(self, *lines: str, vectors: bool = False, count: str = "count") -> list[str]:
        """The statements of `text`, and `lines`, for each row of a block, or for an element of each. `i` counts them.

        Args:
            vectors: whether the statements are to be vectors, of several rows. They are where rows are lanes.
            count: the number of rows, where these are no lanes. All of a block may be more than there are.
        """
        if self.nest.lanes_are_rows:
            return [*self.text.before, *_over_lanes([*self.text.within, *lines], vectors=True)]
        number = "const Place row = first + static_cast<Place>(i);"
        within = self.text.within if vectors else []
        each = [number, *self.text.before, *within, *lines]
        return _loop(f"for (int64_t i = 0; i < {count}; ++i) {{", each, vectors)

    def _fetched(self, numbers: Sequence[int]) -> dict[int, str]:
        """The texts of leaves that are apart in memory for rows that are lanes, which are brought together first.

        The loop that computes is always vectors then, whatever the compiler makes of the loop that fetches.
        """
        if not numbers:
            return {}
        leaves = [self.nest.leaves[number] for number in numbers]
        within, self.text.within = self.text.within, []
        read = self.text.leaves(leaves)
        lines, self.text.within = self.text.within, within
        names = {number: f"fetched{number}" for number in numbers}
        for number, leaf, value in zip(numbers, leaves, read, strict=True):
            assert isinstance(leaf, Read), "else it would not be far"
            self.text.before.append(f"{kind_of(leaf.dtype)} {names[number]}[kBeside];")
            lines.append(f"{names[number]}[i] = {value};")
        self.text.before += _over_lanes(lines)
        return {number: f"{name}[i]" for number, name in names.items()}

    def _call(self, expression: Expr, name: str, texts: Mapping[int, str]) -> str:
        used = sorted({one.index for one in postorder(expression) if isinstance(one, Operand)})
        own = with_operands(expression, {number: Operand(at) for at, number in enumerate(used)})
        leaves = [self.nest.leaves[number] if number < len(self.nest.leaves) else _KNOWN for number in used]
        self.functions.append(function(own, len(used), _QUALIFIERS, kinds_of(own, leaves), name))
        return f"{name}({', '.join(['0.0f', *(texts[number] for number in used)])})"


def kernel(loops: Loops) -> LoopsKernel:
    """The kernel of loops that suit."""
    nest = _nest(loops)
    assert nest is not None, "suits() has seen to it"
    writer = _Writer(nest)
    statements = [
        f"float* const __restrict__ {name} = held + {number} * p.held;" for number, name in enumerate(writer.buffers)
    ]
    if nest.lanes_are_rows:
        statements.append("const Place row = first;")
    for number, (row, loop) in enumerate(zip(nest.reductions, nest.loops, strict=False)):
        statements += _added_up(writer, loop, {"sum": "Sum", "max": "Greatest"}[row.op], number)
        writer.text.rows[row] = f"total{number}[i]"
    statements += _stored(writer, loops)
    form = _SOURCE.format(
        output=_TYPES[loops.output.dtype],
        numbers=len(writer.text.numbers),
        divisors=len(writer.text.divisors),
        tensors=len(writer.text.tensors),
        others=len(loops.also),
        held=len(nest.held),
        adds_up="true" if nest.reductions else "false",
        holds_rows="true" if nest.reductions or writer.shares else "false",
        rows_beside="true" if nest.lanes_are_rows else "false",
        functions="\n\n".join(writer.functions),
        statements="\n".join(f"        {line}" for line in statements),
    )
    computed = nest.rows * (nest.lanes if nest.lanes_are_rows else 1) * sum(loop.length for loop in nest.loops)
    work = min(computed, 2**31 - 1)
    values = [
        nest.rows,
        nest.lanes,
        work,
        nest.together,
        nest.elements_held,
        *writer.text.numbers,
        *writer.text.divisors,
    ]
    results = tuple((store.output.slot, store.output.offset) for store in loops.stores)
    return LoopsKernel(form, struct.pack(f"<{len(values)}i", *values), results, tuple(writer.text.tensors))


_INLINED: Final = "__attribute__((always_inline))"
_ROWS: Final = {True: "kBeside", False: "kTogether"}
"""The number of rows of a block, by whether they are lanes."""


def _added_up(writer: _Writer, loop: _Loop, kind: str, number: int) -> list[str]:
    """The statements that compute a reduction, for each row of a block: the array total{number}."""
    shared, (value,) = writer.before(loop), writer.values(loop, [f"part{number}"])
    text, total, is_block = writer.text, f"total{number}", writer.nest.lanes_are_rows
    head = [*shared, f"float {total}[{_ROWS[is_block]}] = {{}};"]
    if is_block:
        return [
            *head,
            f"come_to_beside<{kind}>({_signed(text, loop.length)}, end - begin, {total}, "
            f"[&](Place {TURN}, {kind}::Total* __restrict__ totals) {_INLINED} {{",
            *writer.over_rows(f"totals[i] = {kind}::of(totals[i], static_cast<{kind}::Total>({value}));"),
            "});",
        ]
    lines = [
        f"come_to<{kind}>({_signed(text, loop.piece)}, [&](Place lane) {_INLINED} -> float {{",
        *(f"    {line}" for line in (*text.within, f"return {value};")),
        "});",
    ]
    if loop.piece == loop.length:
        lines[0] = f"{total}[i] = {lines[0]}"
        return [*head, *writer.over_rows(*lines)]
    lines[0] = f"const {kind}::Total one = {lines[0]}"
    pieces = _over_pieces(writer, loop, [*lines, f"whole = {kind}::of(whole, one);"])
    whole = f"{kind}::Total whole = {kind}::nothing();"
    return [*head, *writer.over_rows(whole, *pieces, f"{total}[i] = static_cast<float>(whole);")]


def _stored(writer: _Writer, loops: Loops) -> list[str]:
    """The statements that store the results."""
    nest, text, loop = writer.nest, writer.text, writer.nest.loops[-1]
    names = [f"other{number - 1}_of" if number else "expression" for number in range(len(loops.stores))]
    shared, values = writer.before(loop), writer.values(loop, names)
    place = f"const Place place = {text.place_of_one(nest.place)};"
    kinds = [_TYPES[store.output.dtype] for store in loops.stores]
    others = [f"static_cast<{kind}*>(p.other[{number}])[place]" for number, kind in enumerate(kinds[1:])]
    targets = ["p.out[place]", *others]
    lines = [place, *(f"set({target}, {value});" for target, value in zip(targets, values, strict=True))]
    if nest.lanes_are_rows:
        head = f"for (Place {TURN} = 0; {TURN} < {text.number(loop.length)}; ++{TURN}) {{"
        return [*shared, *_indented(head, _stored_of_rows(writer, loops, values, place, targets))]
    inner = [*(f"    {line}" for line in (*text.within, *lines)), "});"]
    if loop.piece == loop.length:
        return [*shared, *writer.over_rows(f"for_each(begin, end, [&](Place lane) {_INLINED} {{", *inner)]
    each = f"for_each(0, {_signed(text, loop.piece)}, [&](Place lane) {_INLINED} {{"
    return [*shared, *writer.over_rows(*_over_pieces(writer, loop, [each, *inner]))]


def _stored_of_rows(
    writer: _Writer, loops: Loops, values: Sequence[str], place: str, targets: Sequence[str]
) -> list[str]:
    """The statements that store an element of each row that is a lane: through arrays, if they are apart in memory."""
    if _stride(writer.nest.place) == 1:
        return writer.over_rows(
            place, *(f"set({target}, {value});" for target, value in zip(targets, values, strict=True))
        )
    kinds = [_TYPES[store.output.dtype] for store in loops.stores]
    arrays = [f"{kind} results{number}[kBeside];" for number, kind in enumerate(kinds)]
    computed = writer.over_rows(*(f"set(results{number}[i], {value});" for number, value in enumerate(values)))
    stored = [f"{target} = results{number}[i];" for number, target in enumerate(targets)]
    return [*arrays, *computed, *_over_lanes([place, *stored])]


def _over_lanes(lines: Sequence[str], vectors: bool = False) -> list[str]:
    """The statements for each lane of a block."""
    number = "const Place lane = static_cast<Place>(begin + i);"
    return _loop("for (int64_t i = 0; i < end - begin; ++i) {", [number, *lines], vectors)


def _loop(head: str, lines: Sequence[str], vectors: bool = False) -> list[str]:
    return _indented(f'_Pragma("omp simd") {head}' if vectors else head, lines)


def _indented(head: str, lines: Sequence[str]) -> list[str]:
    return [head, *(f"    {line}" for line in lines), "}"]


def _signed(text: Text, size: int) -> str:
    return f"static_cast<int64_t>({text.number(size)})"


def _over_pieces(writer: _Writer, loop: _Loop, lines: Sequence[str]) -> list[str]:
    """The statements of the writer's text before lanes, and `lines`, for each piece of a row."""
    count = writer.text.number(loop.length // loop.piece)
    before, writer.text.before = writer.text.before, []
    return _indented(f"for (Place {TURN} = 0; {TURN} < {count}; ++{TURN}) {{", [*before, *lines])
