"""The kernel of a program's loops (program/loops.py): CUDA source that depends on their form only, sizes as arguments.

A run of elements that lie side by side in the result is a thread's. Of what it reads some lies side by side, too, some
close together (pairs that change places), which is read at once and chosen from, some is the same for the whole run,
and the rest is read element by element: `_Text._computed` says which. Nothing here needs a GPU.
"""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

import torch

from fxfuse.codegen import function
from fxfuse.cuda.codegen import CPP_TYPES, functions
from fxfuse.expression import Expr
from fxfuse.problem import RESULT_DTYPES
from fxfuse.program.indices import Atom, Element, Index, Quotient, Remainder, Variable, variable
from fxfuse.program.loops import (
    SECTOR,
    Inside,
    Leaf,
    Loops,
    Position,
    Read,
    Reduced,
    all_leaves,
    divisions_of,
    kinds_of,
    memory_order,
    rows_of,
    substituted,
)
from fxfuse.program.values import Slot, Value

ACCESS: Final = 16  # bytes that one instruction reads or writes
THREADS: Final = 256
ARGUMENT_BYTES: Final = 4000
"""Of a kernel, at most, and some to spare."""
MAX_ADDRESSES: Final = 64
"""Of a launch (binding.h)."""
MAX_TENSORS: Final = 40
"""That one kernel reads: so many fit in its arguments."""
MOST_FORMS: Final = 4
"""Of a launch: its kernel needs as many registers as the largest."""
Key = TypeVar("Key")

_TYPES: Final = {**CPP_TYPES, torch.float64: "double"}
_NUMBERS: Final = {dtype: "float" if dtype.is_floating_point else "int64_t" for dtype in _TYPES} | {
    torch.bool: "bool",
    torch.float64: "double",
}
"""As expressions have elements (loops.cuh, as_number)."""
HELD_WORDS: Final = 32
"""Registers for what a thread of a short row reads once."""
_Place: TypeAlias = tuple[Slot, torch.dtype, Index]
"""Of an element."""
_RUN, _LANE = "run", "lane"
_ROW, _ALONG = "row", "along"
WARP: Final = 32
LONGEST_OF_A_WARP: Final = 512
"""Runs of a row that one warp has; a block has longer ones."""
TURNS_OF_A_WARP: Final = 4
"""Beyond which a block is quicker, if it has nothing else to do."""
BUSY: Final = 2**18
"""Threads beyond which more of them read no faster: 2048 on each of 128 multiprocessors."""

_BODY: Final = """\
using namespace {functions};

struct Body {{
    using Output = {output};
    static constexpr int kNumbers = {numbers}, kDivisors = {divisors}, kTensors = {tensors}, kOthers = {others};
{body}
}};
"""
_TEMPLATE: Final = """\
#include "rows.cuh"
#include "math.cuh"

namespace fxfuse::fxfuse_kernel {{

{bodies}
}}  // namespace fxfuse::fxfuse_kernel

#ifndef __CUDACC_RTC__
extern "C" int fxfuse_launch(const void* params, const uint64_t* pointers, uint64_t stream) {{
    using namespace fxfuse::fxfuse_kernel;
    return fxfuse::launch_loops<{forms}>(params, pointers, reinterpret_cast<cudaStream_t>(stream));
}}

extern "C" const char* fxfuse_error(int code) {{ return cudaGetErrorString(static_cast<cudaError_t>(code)); }}
#endif
"""
_RUNS: Final = """\
    static constexpr int kVector = {vector}, kAccess = {access}, kOfBlock = kLoopsThreads;
    static constexpr bool kPlaced = {placed};

{function}

    static __device__ __forceinline__ void compute(const LoopsArguments<Body>& p, unsigned rest,
                                                   Adjacent<Output, kVector, kAccess>& result) {{
{before}
#pragma unroll
        for (int lane = 0; lane < kVector; ++lane) {{
{within}
        }}
{after}
    }}
    static __device__ __forceinline__ void run(const LoopsArguments<Body>& p, unsigned block) {{
        run_loops(p, block);
    }}"""
_ROWS: Final = """\
    static constexpr int kColumns = {columns}, kLanes = {lanes}, kOfBlock = kLoopsThreads / kLanes;

{functions}

    static __device__ __forceinline__ void compute(const LoopsArguments<Body>& p, unsigned row, unsigned thread,
                                                   bool exists, Output* out) {{
{loops}
    }}
    static __device__ __forceinline__ void run(const LoopsArguments<Body>& p, unsigned block) {{
        run_rows(p, block);
    }}"""


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


def ordered(kernels: Mapping[Key, LoopsKernel]) -> list[Key]:
    """The keys of kernels of one form after each other: the order of their params and addresses in a launch of all."""
    forms = list(dict.fromkeys(kernel.form for kernel in kernels.values()))
    return sorted(kernels, key=lambda key: forms.index(kernels[key].form))


def fit_together(kernels: Sequence[LoopsKernel]) -> bool:
    """Whether a launch may have them."""
    addresses = sum(len(kernel.addresses) for kernel in kernels)
    argument_bytes = sum(kernel.argument_bytes for kernel in kernels)
    return addresses <= MAX_ADDRESSES and argument_bytes <= ARGUMENT_BYTES and len(forms_of(kernels)) <= MOST_FORMS


def forms_of(kernels: Sequence[LoopsKernel]) -> Counter[str]:
    """The texts of bodies, and how many kernels have each."""
    return Counter(kernel.form for kernel in kernels)


def source_of(kernels: Sequence[LoopsKernel]) -> str:
    """The text of a launch of these, in an order as `ordered` has it."""
    forms = forms_of(kernels)
    bodies = [f"namespace form{number} {{\n{form}}}  // namespace form{number}\n" for number, form in enumerate(forms)]
    each = [f"fxfuse::Alike<form{number}::Body, {count}>" for number, count in enumerate(forms.values())]
    return _TEMPLATE.format(bodies="\n".join(bodies), forms=", ".join(each))


def kernel(loops: Loops) -> LoopsKernel | None:
    """The kernel; None if it would read more tensors than fit."""
    text = _Text()
    body, count = _rows(loops, text) if loops.reductions else _runs(loops, text)
    if len(text.tensors) > MAX_TENSORS:
        return None
    output = loops.output.dtype
    computed = [(store.expression, store.output.dtype) for store in loops.stores]
    computed += [(row.expression, output) for row in loops.reductions if _casts(row.expression)]
    form = _BODY.format(
        functions=_functions(computed),
        output=_TYPES[output],
        numbers=len(text.numbers),
        divisors=len(text.divisors),
        tensors=len(text.tensors),
        others=len(loops.also),
        body=body,
    )
    values = [count, *text.numbers, *text.divisors]
    params = struct.pack(f"<{len(values)}I", *(value % 2**32 for value in values))
    results = tuple((store.output.slot, store.output.offset) for store in loops.stores)
    return LoopsKernel(form, params, results, tuple(text.tensors))


def _functions(computed: Sequence[tuple[Expr, torch.dtype]]) -> str:
    """The namespace of functions that are exact enough for all results."""
    found = {functions(one, dtype if dtype in RESULT_DTYPES else torch.float32, False) for one, dtype in computed}
    return found.pop() if len(found) == 1 else functions(computed[0][0], torch.float32, False)


def _casts(expression: Expr) -> bool:
    """Whether it is computed in several dtypes."""
    return functions(expression, torch.bfloat16, False) == functions(expression, torch.float32, False)


def _vector(output: Value, length: int) -> int:
    """How many elements of a result, `length` of which lie side by side, are written at once."""
    size, begin = output.dtype.itemsize, math.gcd(output.slot.alignment, output.offset)
    return math.gcd(ACCESS // size, max(begin // size, 1), length)


def _cut(name: str, length: int, vector: int) -> dict[str, Index]:
    """The variable of a loop over `length` elements as runs of `vector` elements."""
    return {name: variable(_RUN, length // vector) * vector + variable(_LANE, vector)}


def _indented(lines: Sequence[str], by: int) -> str:
    return "\n".join(f"{' ' * by}{line}" for line in lines)


_QUALIFIERS: Final = "static __device__ __forceinline__"


def _runs(loops: Loops, text: _Text) -> tuple[str, int]:
    """The body of a kernel in which each thread has a run of elements, and how many runs there are."""
    sizes, leaves, into = _flattened(loops)
    vector = _vector(loops.output, sizes[-1] if sizes else 1)
    text.begin(vector)
    if sizes:
        cut = _cut(f"d{len(sizes) - 1}", sizes[-1], vector)
        leaves = [substituted(leaf, cut) for leaf in leaves]
        into = None if into is None else into.substituted(cut)
    text.coordinates([*sizes[:-1], sizes[-1] // vector] if sizes else [])
    arguments = ", ".join(["0.0f", *text.leaves(leaves)])
    text.within.append(f"set(result.element[lane], expression({arguments}));")
    if loops.also:
        text.before.insert(0, "const unsigned place = rest * kVector;")
    access = ACCESS if into is None else _access_into(loops, into, vector)
    after = _stores(loops) + ([] if into is None else _put(into, access, vector, "p.out", "", text))
    body = _RUNS.format(
        vector=vector,
        access=access or ACCESS,
        placed=str(into is not None).lower(),
        function="\n\n".join([_function(loops, 0), *_others(loops, vector, arguments, text)]),
        before=_indented(text.before, 8),
        within=_indented(text.within, 12),
        after=_indented(after, 8),
    )
    return body, math.prod(sizes) // vector


def _access_into(loops: Loops, into: Index, width: int) -> int:
    """Bytes that an instruction may write at once, of runs of so many elements; 0 if these do not lie side by side."""
    begin = into - variable(_LANE, width)
    if begin.depends_on(_LANE):
        return 0
    steps, size = [*(coefficient for _, coefficient in begin.terms), begin.constant], loops.output.dtype.itemsize
    return math.gcd(ACCESS, width * size, loops.output.slot.alignment, *(step * size for step in steps))


def _put(into: Index, access: int, width: int, out: str, inside: str, text: _Text) -> list[str]:
    """What puts a run's results where they belong; if they lie apart, one by one, in the loop over the run."""
    if not access:
        place = text.place_of_one(into)
        text.within.append(f"{inside}{out}[{place}] = result.element[lane];")
        return []
    return [f"result.store({out} + ({text.place(into - variable(_LANE, width))}));"]


def _function(loops: Loops, number: int) -> str:
    """What computes a result."""
    name = f"other{number - 1}_of" if number else "expression"
    return function(loops.stores[number].expression, len(loops.leaves), _QUALIFIERS, loops.kinds, name)


def _others(loops: Loops, width: int, arguments: str, text: _Text) -> list[str]:
    """What computes the further results, which are added to the loop over a run of `width` elements."""
    for number, store in enumerate(loops.also):
        access = _access(store.output, width)
        text.before.insert(0, f"Adjacent<{_TYPES[store.output.dtype]}, {width}, {access}> other{number};")
        text.within.append(f"set(other{number}.element[lane], other{number}_of({arguments}));")
    return [_function(loops, number + 1) for number in range(len(loops.also))]


def _stores(loops: Loops) -> list[str]:
    """What puts the further results in memory, at `place`."""
    return [
        f"other{number}.store(static_cast<{_TYPES[store.output.dtype]}*>(p.other[{number}]) + place);"
        for number, store in enumerate(loops.also)
    ]


def _access(output: Value, width: int) -> int:
    """Bytes that an instruction may write at once, of runs of so many elements."""
    return math.gcd(ACCESS, width * output.dtype.itemsize, output.slot.alignment, output.offset)


def _rows(loops: Loops, text: _Text) -> tuple[str, int]:
    """The body of a kernel in which some threads share a row, or rows side by side, and how many of these there are."""
    rows, output = rows_of(loops), loops.output
    assert rows is not None, "merge.py and operators.py make no others"
    outer, length, inner = rows.sizes(output.shape)
    widest = max((read.dtype.itemsize for read in loops.reads), default=1)
    beside = math.gcd(ACCESS // widest, output.shape[rows.inner[-1]]) if rows.inner else 1
    number = variable(_ROW, outer * inner // beside) * beside + variable(_LANE, beside)
    values = {
        **_digits(number, (*rows.outer, *rows.inner), output),
        **_digits(variable(_ALONG, length), rows.along, output),
    }
    leaves = [substituted(leaf, values) for leaf in loops.leaves]
    reductions = list(dict.fromkeys(leaf for leaf in all_leaves(leaves) if isinstance(leaf, Reduced)))
    held = None if rows.inner else _held(reductions, leaves, output, outer, length)
    functions_, loops_, longest = [], [], 1
    if held is not None:
        loops_ += [f"{kind} {name}[{held.turns}][{held.vector}];" for name, kind in held.variables.items()]
    for turn, row in enumerate(reductions):
        vector = 1 if rows.inner else _vector_of_row(row) if held is None else held.vector
        text.begin(max(vector, beside), held, row.over.size // vector)
        at = _cut(row.over.name, row.over.size, vector)
        terms = ["0.0f", *text.leaves([substituted(leaf, at) for leaf in row.leaves])]
        kind, total = {"sum": "Sum", "max": "Greatest"}[row.op], f"total{turn}"
        kinds = kinds_of(row.expression, row.leaves)
        functions_.append(function(row.expression, len(row.leaves), _QUALIFIERS, kinds, f"part{turn}"))
        which = "lane" if rows.inner else "0"
        inside = "" if held is None else "if (inside) "
        text.within.append(f"{inside}{total}.add({which}, part{turn}({', '.join(terms)}));")
        runs = text.number(row.over.size // vector)
        loops_ += [
            f"Totals<{kind}, {beside}> {total};",
            *_loop(runs, row.over.size // vector, max(vector, beside), text),
            f"{total}.template across_threads<kColumns, kLanes, kLoopsThreads, {turn}>();",
        ]
        text.rows[row] = f"{total}.value[{which}]"
        longest = max(longest, row.over.size // vector)
    vector = 1 if rows.inner else _vector(output, length) if held is None else held.vector
    width, at = max(vector, beside), _cut(_ALONG, length, vector)
    text.begin(width, held, length // vector)
    arguments = ", ".join(["0.0f", *text.leaves([substituted(leaf, at) for leaf in leaves])])
    functions_.append(_function(loops, 0))
    into = None if loops.into is None else loops.into.place.substituted(values).substituted(at)
    access = _access(output, width) if into is None else _access_into(loops, into, width)
    text.before.insert(0, f"Adjacent<Output, {width}, {access or ACCESS}> result;")
    text.within.append(f"set(result.element[lane], expression({arguments}));")
    functions_ += _others(loops, width, arguments, text)
    index = (number // inner) * (length * inner) + at[_ALONG] * inner + number % inner - variable(_LANE, width)
    inside = "" if held is None else "if (inside) "
    stores = _stores(loops)
    if into is None or loops.also:
        text.before.append(f"const unsigned place = {text.place(index)};")
    stores += ["result.store(out + place);"] if into is None else _put(into, access, width, "out", inside, text)
    stores = [f"{inside}{store}" for store in stores]
    loops_ += ["if (!exists) return;", *_loop(text.number(length // vector), length // vector, width, text, stores)]
    longest = max(longest, length // vector)
    count = outer * inner // beside
    if rows.inner:
        columns, lanes = _layout(count, longest, beside * widest)
    elif held is not None:
        columns, lanes = 1, held.lanes
    else:
        columns, lanes = 1, THREADS if longest > LONGEST_OF_A_WARP else _lanes_of_rows(count, longest)
    body = _ROWS.format(columns=columns, lanes=lanes, functions="\n\n".join(functions_), loops=_indented(loops_, 8))
    return body, count


def _vector_of_row(row: Reduced) -> int:
    """How many elements of a row are read at once."""
    widest = max((leaf.dtype.itemsize for leaf in row.leaves if isinstance(leaf, Read)), default=1)
    return math.gcd(ACCESS // widest, row.over.size)


@dataclass
class _Held:
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


def _held(reductions: Sequence[Reduced], leaves: Sequence[Leaf], output: Value, rows: int, length: int) -> _Held | None:
    """What is read by more than one loop, if it is little enough to be held."""
    size = reductions[0].over.size
    if not 0 < size <= length or any(row.over.size != size for row in reductions):
        return None
    vector = math.gcd(_vector(output, length), *map(_vector_of_row, reductions))
    within = Inside(variable(_ALONG, length), size)
    readers, also = Counter[Read](), dict[Read, Read]()
    for row in reductions:
        at = _cut(row.over.name, size, vector)
        # in the order of the leaves, not of a set: the text must be the same in every process, or it is compiled again
        reads = (read for leaf in row.leaves if isinstance(read := substituted(leaf, at), Read))
        readers.update(list(dict.fromkeys(reads)))
    for leaf in leaves:
        if isinstance(leaf, Read) and (size == length or within in leaf.where):
            # where the result is longer, by the row's variable: what its condition asks is always so
            where = tuple(one for one in leaf.where if one != within)
            alike = Read(leaf.slot, leaf.dtype, leaf.index, where)
            of_row = substituted(substituted(alike, {_ALONG: variable(_ALONG, size)}), _cut(_ALONG, size, vector))
            assert isinstance(of_row, Read)
            as_read = substituted(leaf, _cut(_ALONG, length, vector))
            assert isinstance(as_read, Read)
            also[as_read] = of_row
    readers.update(list(dict.fromkeys(also.values())))
    shared = [read for read, count in readers.items() if count > 1]
    words = vector * sum(1 if _NUMBERS[read.dtype] in ("float", "bool") else 2 for read in shared)
    lanes = _lanes_of_rows(rows, size // vector)
    while lanes < THREADS and -(-size // (vector * lanes)) * words > HELD_WORDS:
        lanes *= 2
    turns = -(-size // (vector * lanes))
    if not shared or turns * words > HELD_WORDS:
        return None
    names = {read: f"held{number}" for number, read in enumerate(shared)}
    variables = {names[read]: _NUMBERS[read.dtype] for read in shared}
    names |= {read: names[of_row] for read, of_row in also.items() if of_row in names}
    inside = substituted(within, _cut(_ALONG, length, vector))
    assert isinstance(inside, Inside)
    return _Held(lanes, turns, vector, names, variables, inside)


def _lanes_of_rows(rows: int, longest: int) -> int:
    """How many threads share a row whose elements lie side by side: a part of a warp, or a warp; a block where rows are
    so few that a GPU has threads to spare."""
    is_spare = rows * THREADS <= BUSY and longest > TURNS_OF_A_WARP * WARP
    return THREADS if is_spare else min(WARP, 1 << (longest - 1).bit_length())


def _layout(rows: int, longest: int, nbytes: int) -> tuple[int, int]:
    """How many threads have rows side by side, and how many others read on: no more than keep a GPU busy.

    Args:
        rows: how many there are; those that a thread has are one.
        longest: elements of a row.
        nbytes: what a thread reads at once.
    """
    wanted, most = -(-BUSY // rows), max(1, longest // 2)
    lanes = min(_power_of_two(wanted), _power_of_two(most), THREADS // max(1, SECTOR // nbytes))
    return (THREADS if lanes * WARP >= THREADS else WARP) // lanes, lanes


def _power_of_two(number: int) -> int:
    """The greatest that is not greater."""
    return 1 << (number.bit_length() - 1)


def _digits(index: Index, dims: Sequence[int], output: Value) -> dict[str, Index]:
    """The coordinates of an element, of its number among those of the dimensions."""
    values = {}
    for dim in reversed(dims):
        values[f"c{dim}"], index = index % output.shape[dim], index // output.shape[dim]
    return values


def _loop(runs: str, count: int, vector: int, text: _Text, after: Sequence[str] = ()) -> list[str]:
    """The loop of a row's threads over its runs, whose number has a name; with what is held every thread has as many
    turns, whose reads need not wait for each other."""
    head = [f"for (unsigned run = thread; run < {runs}; run += kLanes) {{"]
    if text.held is not None:
        head = [
            "#pragma unroll",
            f"for (unsigned turn = 0; turn < {text.held.turns_over(count)}; ++turn) {{",
            f"    const bool inside = thread + turn * kLanes < {runs};",
            f"    const unsigned run = inside ? thread + turn * kLanes : {runs} - 1;",
        ]
    return [
        *head,
        *(f"    {line}" for line in text.before),
        "#pragma unroll",
        f"    for (int lane = 0; lane < {vector}; ++lane) {{",
        *(f"        {line}" for line in text.within),
        "    }",
        *(f"    {line}" for line in after),
        "}",
    ]


# ------------------------------------------------------------------------------------------------ dimensions


def _flattened(loops: Loops) -> tuple[list[int], list[Leaf], Index | None]:
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


class _Text:
    """Statements before the loop over a run's elements, and within it; what they take from the arguments."""

    def __init__(self, vector: int = 1) -> None:
        self.numbers: list[int] = []
        self.divisors: list[int] = []
        self.tensors: list[Slot] = []
        self.rows: dict[Reduced, str] = {}
        """Variables with what rows come to."""
        self._count = 0
        self.begin(vector)

    def begin(self, vector: int, held: _Held | None = None, runs: int = 0) -> None:
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
        names = [*(f"d{dim}" for dim in range(len(sizes) - 1)), _RUN]
        for dim in reversed(range(len(sizes))):
            if sizes[dim] == 1:
                continue
            is_first = all(size == 1 for size in sizes[:dim])
            value = "rest" if is_first else f"{self._divisor(sizes[dim])}.take(rest)"
            self.before.append(f"const unsigned {names[dim]} = {value};")

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
        condition, kind, name = self._if(ways), _TYPES[leaf.dtype], self._name("r")
        source = f"static_cast<const {kind}*>({self._tensor(leaf.slot)})"
        lines: list[str] = []
        begin = leaf.index - variable(_LANE, self._vector)
        if leaf.index.depends_on(_LANE) and not begin.depends_on(_LANE) and not any(map(self._varies, leaf.where)):
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
        varies = leaf.index.depends_on(_LANE) or any(map(self._varies, leaf.where))
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
        if self._vector == 1 or not leaf.index.depends_on(_LANE):
            return None
        places = [leaf.index.substituted({_LANE: Index((), lane)}) for lane in range(self._vector)]
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
        kind, name, lines = _TYPES[leaf.dtype], self._name("r"), list[str]()
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
        if self._vector == 1 or not condition.index.depends_on(_LANE):
            return None
        found = 0
        for lane in range(self._vector):
            low, high = condition.index.substituted({_LANE: Index((), lane)}).range
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
        lines = self.within if leaf.index.depends_on(_LANE) else self.before
        place, name = self._index(leaf.index, lines), self._name("i")
        lines.append(f"const int64_t {name} = static_cast<int>({place});")
        return name

    def _varies(self, condition: Inside) -> bool:
        """Whether elements of one run differ in it."""
        return self._by_runs(condition).index.depends_on(_LANE)

    def _by_runs(self, condition: Inside) -> Inside:
        """The same question of whole runs, where elements of one cannot differ."""
        rest = condition.index - variable(_LANE, self._vector)
        steps = [condition.size, rest.constant, *(coefficient for _, coefficient in rest.terms)]
        if rest.depends_on(_LANE) or any(step % self._vector for step in steps):
            return condition
        return Inside(rest // self._vector, condition.size // self._vector)

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
        lines = self.within if condition.index.depends_on(_LANE) else self.before
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
            return atom.name if atom.name != _LANE else "static_cast<unsigned>(lane)"
        if atom in self._names:
            return self._names[atom]
        is_free = not any(isinstance(one, Element) or one == _lane(self._vector) for one in _within(atom))
        lines = self.before if is_free else lines  # arithmetic may be done where nobody needs it, reading may not
        match atom:
            case Quotient(of, by):
                value = f"{self._divisor(by)}.divide({self._index(of, lines)})"
            case Remainder(of, by):
                whole, divisor = self._name("t"), self._divisor(by)
                lines.append(f"unsigned {whole} = {self._index(of, lines)};")
                value = f"{divisor}.take({whole})"
            case Element(memory, at, dtype, size, wraps):
                kind = f"integer_at<{'true' if wraps else 'false'}, {_TYPES[dtype]}>"
                place = self._index(at, lines)
                value = f"{kind}({self._tensor(memory)}, {place}, {self.number(size)})"
        name = self._name("t")
        lines.append(f"const unsigned {name} = {value};")
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
    return Variable(_LANE, vector)


def _within(atom: Atom) -> list[Atom]:
    """The atom and those that it is made of."""
    return list(Index(((atom, 1),)).atoms())
