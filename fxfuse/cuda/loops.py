"""The kernel of a program's loops (program/loops.py): CUDA source that depends on their form only, sizes as arguments.

A run of elements that lie side by side in the result is a thread's. Of what it reads some lies side by side, too, some
close together (pairs that change places), which is read at once and chosen from, some is the same for the whole run,
and the rest is read element by element: `Text._computed` says which. Nothing here needs a GPU.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import torch

from fxfuse.codegen import function
from fxfuse.cuda.codegen import CPP_TYPES, functions
from fxfuse.expression import Expr
from fxfuse.problem import RESULT_DTYPES
from fxfuse.program.indices import Index, Variable, variable
from fxfuse.program.loops import (
    SECTOR,
    Inside,
    Leaf,
    Loops,
    Read,
    Reduced,
    height_of,
    kinds_of,
    reductions_of,
    rows_of,
    substituted,
)
from fxfuse.program.text import ACCESS, LANE, MAX_TENSORS, ROW, RUN, Held, LoopsKernel, Text, digits_of, flattened
from fxfuse.program.values import Value

THREADS: Final = 256
ARGUMENT_BYTES: Final = 4000
"""Of a kernel, at most, and some to spare."""
MAX_ADDRESSES: Final = 64
"""Of a launch (binding.h)."""
MOST_FORMS: Final = 4
"""Of a launch: its kernel needs as many registers as the largest."""
Key = TypeVar("Key")

_ALONG = "along"
_TYPES: Final = {**CPP_TYPES, torch.float64: "double"}
_NUMBERS: Final = {dtype: "float" if dtype.is_floating_point else "int64_t" for dtype in _TYPES} | {
    torch.bool: "bool",
    torch.float64: "double",
}
"""As expressions have elements (loops.cuh, as_number)."""
HELD_WORDS: Final = 32
"""Registers for what a thread of a short row reads once."""
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
    text = Text(_TYPES)
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
    return {name: variable(RUN, length // vector) * vector + variable(LANE, vector)}


def _indented(lines: Sequence[str], by: int) -> str:
    return "\n".join(f"{' ' * by}{line}" for line in lines)


_QUALIFIERS: Final = "static __device__ __forceinline__"


def _runs(loops: Loops, text: Text) -> tuple[str, int]:
    """The body of a kernel in which each thread has a run of elements, and how many runs there are."""
    sizes, leaves, into = flattened(loops)
    vector = _vector(loops.output, sizes[-1] if sizes else 1)
    text.begin(vector)
    if sizes:
        cut = _cut(f"d{len(sizes) - 1}", sizes[-1], vector)
        leaves = [substituted(leaf, cut) for leaf in leaves]
        into = None if into is None else into.substituted(cut)
    runs, place = [*sizes[:-1], sizes[-1] // vector] if sizes else [], "rest"
    across = _across(runs, leaves, vector * loops.output.dtype.itemsize) if into is None else None
    if across is None:
        text.coordinates(runs)
    else:
        place = text.coordinates_across(runs, *across)
    arguments = ", ".join(["0.0f", *text.leaves(leaves)])
    text.within.append(f"set(result.element[lane], expression({arguments}));")
    if loops.also or across is not None:
        at = 0 if across is None else len(text.before)  # `rest` is used up by then
        text.before.insert(at, f"const unsigned place = ({place}) * kVector;")
    access = ACCESS if into is None else _access_into(loops, into, vector)
    after = _stores(loops) + ([] if into is None else _put(into, access, vector, "p.out", "", text))
    if across is not None:
        after.append("result.store(p.out + place);")
    body = _RUNS.format(
        vector=vector,
        access=access or ACCESS,
        placed=str(into is not None or across is not None).lower(),
        function="\n\n".join([_function(loops, 0), *_others(loops, vector, arguments, text)]),
        before=_indented(text.before, 8),
        within=_indented(text.within, 12),
        after=_indented(after, 8),
    )
    return body, math.prod(sizes) // vector


def _across(sizes: Sequence[int], leaves: Sequence[Leaf], nbytes: int) -> tuple[int, int] | None:
    """Which other dimension threads that follow each other go over where something is read that lies along that one, as
    in a transposition: then what they read, and what they write, are whole sectors. And before that so many runs of the
    last dimension. None if they go over the last dimension as memory does.

    Args:
        sizes: in runs.
        nbytes: of a run.
    """
    found = Counter[int]()
    for read in (leaf for leaf in leaves if isinstance(leaf, Read)):
        steps = {term.name: abs(step) for term, step in read.index.terms if isinstance(term, Variable)}
        apart = steps.get(LANE, steps.get(RUN, 0)) * read.dtype.itemsize
        for dim, size in enumerate(sizes[:-1]):
            if steps.get(f"d{dim}") == 1 and apart >= SECTOR and size >= LEAST_ALONG:
                found[dim] += read.dtype.itemsize
    if not found:
        return None
    dim, _ = found.most_common(1)[0]
    most = max(1, WRITTEN // nbytes)
    count = max(number for number in range(1, most + 1) if sizes[-1] % number == 0)
    is_worth_it = count * nbytes >= SECTOR // 2 and math.prod(sizes[dim + 1 :]) > 2 * most
    return (dim, count) if is_worth_it else None


LEAST_ALONG: Final = 8
"""Elements that lie side by side, of which less are not worth another order."""
WRITTEN: Final = 2 * SECTOR
"""Bytes side by side that threads which follow each other write."""


def _access_into(loops: Loops, into: Index, width: int) -> int:
    """Bytes that an instruction may write at once, of runs of so many elements; 0 if these do not lie side by side."""
    begin = into - variable(LANE, width)
    if begin.depends_on(LANE):
        return 0
    steps, size = [*(coefficient for _, coefficient in begin.terms), begin.constant], loops.output.dtype.itemsize
    return math.gcd(ACCESS, width * size, loops.output.slot.alignment, *(step * size for step in steps))


def _put(into: Index, access: int, width: int, out: str, inside: str, text: Text) -> list[str]:
    """What puts a run's results where they belong; if they lie apart, one by one, in the loop over the run."""
    if not access:
        place = text.place_of_one(into)
        text.within.append(f"{inside}{out}[{place}] = result.element[lane];")
        return []
    return [f"result.store({out} + ({text.place(into - variable(LANE, width))}));"]


def _function(loops: Loops, number: int) -> str:
    """What computes a result."""
    name = f"other{number - 1}_of" if number else "expression"
    return function(loops.stores[number].expression, len(loops.leaves), _QUALIFIERS, loops.kinds, name)


def _others(loops: Loops, width: int, arguments: str, text: Text) -> list[str]:
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


def _rows(loops: Loops, text: Text) -> tuple[str, int]:
    """The body of a kernel in which some threads share a row, or rows side by side, and how many of these there are."""
    rows, output = rows_of(loops), loops.output
    assert rows is not None, "merge.py and operators.py make no others"
    outer, length, inner = rows.sizes(output.shape)
    widest = max((read.dtype.itemsize for read in loops.reads), default=1)
    beside = math.gcd(ACCESS // widest, output.shape[rows.inner[-1]]) if rows.inner else 1
    number = variable(ROW, outer * inner // beside) * beside + variable(LANE, beside)
    values = {
        **digits_of(number, (*rows.outer, *rows.inner), output),
        **digits_of(variable(_ALONG, length), rows.along, output),
    }
    leaves = [substituted(leaf, values) for leaf in loops.leaves]
    reductions = reductions_of(leaves)
    held = None if rows.inner else _held(reductions, leaves, output, outer, length)
    functions_, loops_, longest = [], [], 1
    if held is not None:
        loops_ += [f"{kind} {name}[{held.turns}][{held.vector}];" for name, kind in held.variables.items()]
    turns = itertools.count()
    for together in _together(reductions):
        over = together[0].over
        vector = 1 if rows.inner else _vector_of_rows(together) if held is None else held.vector
        text.begin(max(vector, beside), held, over.size // vector)
        at, which = _cut(over.name, over.size, vector), "lane" if rows.inner else "0"
        inside = "" if held is None else "if (inside) "
        before, after = [], []
        for row, turn in zip(together, turns, strict=False):
            terms = ["0.0f", *text.leaves([substituted(leaf, at) for leaf in row.leaves])]
            kind, total = {"sum": "Sum", "max": "Greatest"}[row.op], f"total{turn}"
            kinds = kinds_of(row.expression, row.leaves)
            functions_.append(function(row.expression, len(row.leaves), _QUALIFIERS, kinds, f"part{turn}"))
            text.within.append(f"{inside}{total}.add({which}, part{turn}({', '.join(terms)}));")
            before.append(f"Totals<{kind}, {beside}> {total};")
            after.append(f"{total}.template across_threads<kColumns, kLanes, kLoopsThreads, {turn}>();")
            text.rows[row] = f"{total}.value[{which}]"
        runs = text.number(over.size // vector)
        loops_ += [*before, *_loop(runs, over.size // vector, max(vector, beside), text), *after]
        longest = max(longest, over.size // vector)
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
    index = (number // inner) * (length * inner) + at[_ALONG] * inner + number % inner - variable(LANE, width)
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


def _together(reductions: Sequence[Reduced]) -> list[list[Reduced]]:
    """Those that one loop adds up, since none is made of another; in an order in which each comes after those that it
    is made of."""
    found: dict[Variable, list[Reduced]] = {}
    for row in reductions:
        found.setdefault(row.over, []).append(row)
    return [found[over] for over in sorted(found, key=lambda over: height_of(over))]


def _vector_of_rows(together: Sequence[Reduced]) -> int:
    """How many elements of rows are read at once, that one loop adds up."""
    dtypes = (leaf.dtype for row in together for leaf in row.leaves if isinstance(leaf, Read))
    return math.gcd(ACCESS // max((dtype.itemsize for dtype in dtypes), default=1), together[0].over.size)


def _held(reductions: Sequence[Reduced], leaves: Sequence[Leaf], output: Value, rows: int, length: int) -> Held | None:
    """What is read by more than one loop, if it is little enough to be held."""
    size = reductions[0].over.size
    if not 0 < size <= length or any(row.over.size != size for row in reductions):
        return None
    loops = _together(reductions)
    vector = math.gcd(_vector(output, length), *map(_vector_of_rows, loops))
    within = Inside(variable(_ALONG, length), size)
    readers, also = Counter[Read](), dict[Read, Read]()
    for together in loops:
        at = _cut(together[0].over.name, size, vector)
        # in the order of the leaves, not of a set: the text must be the same in every process, or it is compiled again
        leaves_ = (leaf for row in together for leaf in row.leaves)
        reads = (read for leaf in leaves_ if isinstance(read := substituted(leaf, at), Read))
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
    return Held(lanes, turns, vector, names, variables, inside)


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


def _loop(runs: str, count: int, vector: int, text: Text, after: Sequence[str] = ()) -> list[str]:
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
