"""CUDA source for a kernel of loops (program/loops.py). It depends only on the loops' form; sizes are arguments.

Each thread computes runs: elements that are contiguous in the result. The reads of a run are of four kinds, which
`Text._computed` distinguishes:

- contiguous elements, read by one vector access;
- elements close together (pairs that change places), read at once and then selected;
- one value for the whole run;
- anything else, read element by element.

Nothing here needs a GPU.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch

from fxfuse.codegen import function
from fxfuse.cuda.codegen import CPP_TYPES, functions
from fxfuse.expression import Call, Expr, Operand, postorder
from fxfuse.problem import RESULT_DTYPES
from fxfuse.program.indices import Index, Variable, variable
from fxfuse.program.loops import (
    INTEGER,
    SECTOR,
    Inside,
    Leaf,
    Loops,
    Position,
    Read,
    Reduced,
    all_leaves,
    divided,
    height_of,
    kind_of_element,
    kinds_of,
    reductions_of,
    rows_of,
    substituted,
    with_operands,
)
from fxfuse.program.text import ACCESS, LANE, MAX_TENSORS, ROW, RUN, Held, LoopsKernel, Text, digits_of, flattened
from fxfuse.program.values import Value

THREADS: Final = 128
"""Of a block, if no kernel of its launch needs more: in rows, threads of a block wait for each other."""
COLUMN_THREADS: Final = 256
"""Of a block for rows that are adjacent in memory: so many read longer pieces of it. Other kernels may be in a launch
with these."""
ARGUMENT_BYTES: Final = 4000
"""Most bytes of a kernel's arguments, a little less than the limit."""
MAX_ADDRESSES: Final = 64
"""Most addresses of a launch (binding.h)."""
MOST_FORMS: Final = 4
"""Most forms in a launch: its kernel needs as many registers as the form that needs most."""
Key = TypeVar("Key")

_ALONG = "along"
_TYPES: Final = {**CPP_TYPES, torch.float64: "double"}
HELD_WORDS: Final = 32
"""Most registers in which a thread holds elements of a row between loops."""
WARP: Final = 32
LINE: Final = 128
"""Bytes that a multiprocessor reads or writes in a cycle, if they are adjacent."""
BUSY: Final = 2**18
"""Threads that keep a GPU busy, 2048 on each of 128 multiprocessors: more of them read no faster."""
ISSUED: Final = 2**14
"""Instructions of threads that such a GPU begins in a cycle, 128 on each of 128 multiprocessors."""
MOVED: Final = 2**11
"""Bytes that it reads or writes in a cycle, a little more than an A100 and a little less than an H200."""
REGISTERS: Final = 2**16
"""Of a multiprocessor."""
MOST_THREADS: Final = 1024
"""Most threads of a block."""
STAGED_ELEMENTS: Final = 64
"""Most elements of a staged row that a thread has: it holds them in registers."""
STAGED_RUN: Final = 2
"""Most elements that threads would read at once from memory, if a row is to be staged instead."""
STAGED_BYTES: Final = 32 << 10
"""Most shared memory of a block that stages its rows."""
STAGED_LEAST: Final = BUSY // 8
"""Fewest threads for which staging pays: with fewer, the time of one row matters."""

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

constexpr int kBlock = {threads};

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
    static constexpr int kVector = {vector}, kAccess = {access}, kThreads = kBlock, kOfBlock = kThreads;
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
    static constexpr int kColumns = {columns}, kLanes = {lanes}, kThreads = {threads}, kOfBlock = kThreads / kLanes;

{functions}

    static __device__ __forceinline__ void compute(const LoopsArguments<Body>& p, unsigned row, unsigned thread,
                                                   bool exists, unsigned first, Output* out) {{
{loops}
    }}
    static __device__ __forceinline__ void run(const LoopsArguments<Body>& p, unsigned block) {{
        run_rows(p, block);
    }}"""


def stages(loops: Loops) -> bool:
    """Whether a kernel of these loops stages its rows in shared memory."""
    found = kernel(loops) if loops.reductions else None
    return found is not None and found.is_staged


def ordered(kernels: Mapping[Key, LoopsKernel]) -> list[Key]:
    """The keys of `kernels`, grouped by form: the order of params and addresses in a launch of all of them."""
    forms = list(dict.fromkeys(kernel.form for kernel in kernels.values()))
    return sorted(kernels, key=lambda key: forms.index(kernels[key].form))


def fit_together(kernels: Sequence[LoopsKernel]) -> bool:
    """Whether one launch can run all `kernels`."""
    addresses = sum(len(kernel.addresses) for kernel in kernels)
    argument_bytes = sum(kernel.argument_bytes for kernel in kernels)
    fits = addresses <= MAX_ADDRESSES and argument_bytes <= ARGUMENT_BYTES and len(forms_of(kernels)) <= MOST_FORMS
    threads = {kernel.threads for kernel in kernels}
    may_differ = max(threads) <= COLUMN_THREADS and not any(kernel.is_staged for kernel in kernels)
    return fits and (len(threads) == 1 or may_differ)


def forms_of(kernels: Sequence[LoopsKernel]) -> Counter[str]:
    """The forms (the texts of bodies) of `kernels`, and how many kernels have each."""
    return Counter(kernel.form for kernel in kernels)


def source_of(kernels: Sequence[LoopsKernel]) -> str:
    """The CUDA source of a launch of `kernels`, which are in the order of `ordered`."""
    forms = forms_of(kernels)
    bodies = [f"namespace form{number} {{\n{form}}}  // namespace form{number}\n" for number, form in enumerate(forms)]
    each = [f"fxfuse::Alike<form{number}::Body, {count}>" for number, count in enumerate(forms.values())]
    threads = max(kernel.threads for kernel in kernels)
    return _TEMPLATE.format(threads=threads, bodies="\n".join(bodies), forms=", ".join(each))


def kernel(loops: Loops) -> LoopsKernel | None:
    """The kernel of `loops`; None if it would read more than MAX_TENSORS tensors."""
    text = Text(_TYPES)
    body, count, threads = _rows(loops, text) if loops.reductions else (*_runs(loops, text), THREADS)
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
    return LoopsKernel(form, params, results, tuple(text.tensors), threads, bool(text.staged))


def _functions(computed: Sequence[tuple[Expr, torch.dtype]]) -> str:
    """The namespace of math.cuh whose functions are exact enough for all results, (expression, dtype) each."""
    found = {functions(one, dtype if dtype in RESULT_DTYPES else torch.float32, False) for one, dtype in computed}
    return found.pop() if len(found) == 1 else functions(computed[0][0], torch.float32, False)


def _casts(expression: Expr) -> bool:
    """Whether the expression contains casts, so that torch computes it in several dtypes."""
    return functions(expression, torch.bfloat16, False) == functions(expression, torch.float32, False)


def _vector(output: Value, length: int) -> int:
    """How many elements of a result are written at once, if `length` of them are contiguous."""
    size, begin = output.dtype.itemsize, math.gcd(output.slot.alignment, output.offset)
    return math.gcd(ACCESS // size, max(begin // size, 1), length)


def _cut(name: str, length: int, vector: int) -> dict[str, Index]:
    """Replaces the variable `name` of a loop over `length` elements by RUN * vector + LANE."""
    return {name: variable(RUN, length // vector) * vector + variable(LANE, vector)}


def _indented(lines: Sequence[str], by: int) -> str:
    return "\n".join(f"{' ' * by}{line}" for line in lines)


_QUALIFIERS: Final = "static __device__ __forceinline__"


def _runs(loops: Loops, text: Text) -> tuple[str, int]:
    """The body of a kernel without reductions, in which a thread computes a run, and the number of runs."""
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
        at = 0 if across is None else len(text.before)  # `rest` is the place only before the coordinates are computed
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
    """The order of threads where a read is contiguous along another dimension than the last, as in a transposition.

    Returns (that dimension, a number of runs). Consecutive threads go over this number of runs of the last dimension,
    and then along the other dimension. So they read and write whole sectors. Returns None if threads go over the last
    dimension, in the order of memory.

    Args:
        sizes: the result's, in runs.
        nbytes: bytes of a run.
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
"""Least size of the other dimension for which `_across` changes the order of threads."""
WRITTEN: Final = 2 * SECTOR
"""Most contiguous bytes that consecutive threads write in that order."""


def _access_into(loops: Loops, into: Index, width: int) -> int:
    """Bytes of a vector store of a run of `width` elements at `into`; 0 if the run is not contiguous there."""
    begin = into - variable(LANE, width)
    if begin.depends_on(LANE):
        return 0
    steps, size = [*(coefficient for _, coefficient in begin.terms), begin.constant], loops.output.dtype.itemsize
    return math.gcd(ACCESS, width * size, loops.output.slot.alignment, *(step * size for step in steps))


def _put(into: Index, access: int, width: int, out: str, inside: str, text: Text) -> list[str]:
    """The statements that store a run at `into`, after the loop over the run.

    With `access` 0 there are none: statements inside the loop store the elements one by one.
    """
    if not access:
        place = text.place_of_one(into)
        text.within.append(f"{inside}{out}[{place}] = result.element[lane];")
        return []
    return [f"result.store({out} + ({text.place(into - variable(LANE, width))}));"]


def _function(loops: Loops, number: int) -> str:
    """The C++ function that computes store `number` of `loops`."""
    name = f"other{number - 1}_of" if number else "expression"
    expression, leaves = loops.stores[number].expression, loops.leaves
    return function(expression, len(leaves), _QUALIFIERS, loops.kinds, name, _normal(leaves))


def _others(loops: Loops, width: int, arguments: str, text: Text) -> list[str]:
    """The C++ functions of the further results. Their calls are added to the loop over a run of `width` elements."""
    for number, store in enumerate(loops.also):
        access = _access(store.output, width)
        text.before.insert(0, f"Adjacent<{_TYPES[store.output.dtype]}, {width}, {access}> other{number};")
        text.within.append(f"set(other{number}.element[lane], other{number}_of({arguments}));")
    return [_function(loops, number + 1) for number in range(len(loops.also))]


def _stores(loops: Loops) -> list[str]:
    """The statements that store the further results at `place`."""
    return [
        f"other{number}.store(static_cast<{_TYPES[store.output.dtype]}*>(p.other[{number}]) + place);"
        for number, store in enumerate(loops.also)
    ]


def _access(output: Value, width: int) -> int:
    """Bytes of a vector store of a run of `width` elements of a result."""
    return math.gcd(ACCESS, width * output.dtype.itemsize, output.slot.alignment, output.offset)


def _rows(loops: Loops, text: Text) -> tuple[str, int, int]:
    """The body of a kernel with reductions, the number of its rows, or of its groups of adjacent rows, and the number
    of threads of a block.

    Some threads share a row or a few adjacent rows.
    """
    loops = divided(loops)
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
    staged = None if rows.inner else _staged(loops, reductions, leaves, outer, length)
    held = None if rows.inner else _held(loops, reductions, leaves, outer, length, staged)
    text.length = _fixed_length(reductions, leaves, outer * inner)
    functions_, loops_, longest = [], [], 1
    if staged is not None:
        text.staged = staged.names
        loops_ += staged.before(text)
    if held is not None:
        loops_ += [f"{kind} {name}[{held.turns}][{held.vector}];" for name, kind in held.variables.items()]
    turns = itertools.count()
    for together in _together(reductions):
        over = together[0].over
        vector = 1 if rows.inner or staged else _vector_of_rows(together) if held is None else held.vector
        text.begin(max(vector, beside), held, over.size // vector)
        at, which = _cut(over.name, over.size, vector), "lane" if rows.inner else "0"
        inside = "" if held is None else "if (inside) "
        before, after = [], []
        for row, turn in zip(together, turns, strict=False):
            terms = ["0.0f", *text.leaves([substituted(leaf, at) for leaf in row.leaves])]
            kind, total = {"sum": "Sum", "max": "Greatest"}[row.op], f"total{turn}"
            kinds = kinds_of(row.leaves, row.expression)
            normal = _normal(row.leaves)
            functions_.append(function(row.expression, len(row.leaves), _QUALIFIERS, kinds, f"part{turn}", normal))
            text.within.append(f"const float of{turn} = part{turn}({', '.join(terms)});")
            text.within.append(f"{inside}{total}.add({which}, of{turn});")
            before.append(f"Totals<{kind}, {beside}> {total};")
            after.append(f"{total}.template across_threads<kColumns, kLanes, kThreads, {turn}>();")
            text.rows[row] = f"{total}.value[{which}]"
        if held is not None:
            text.leaves(held.early)
        runs = "kSize" if staged else text.number(over.size // vector)
        loops_ += [*before, *_loop(runs, over.size // vector, max(vector, beside), text), *after]
        longest = max(longest, over.size // vector)
    vector = 1 if rows.inner or staged else _vector(output, length) if held is None else held.vector
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
    if staged is not None and staged.results:
        loops_ += [*_loop("kSize", length, width, text, staged.stores()), *staged.after(loops)]
    else:
        stores = _stores(loops)
        if into is None or loops.also:
            text.before.append(f"const unsigned place = {text.place(index)};")
        stores += ["result.store(out + place);"] if into is None else _put(into, access, width, "out", inside, text)
        stores = [f"{inside}{store}" for store in stores]
        runs = text.number(length // vector)
        loops_ += ["if (!exists) return;", *_loop(runs, length // vector, width, text, stores)]
    longest = max(longest, length // vector)
    count = outer * inner // beside
    if rows.inner:
        columns, lanes = _layout(count, longest, beside * widest)
    elif staged is not None:
        columns, lanes = 1, staged.lanes
    elif held is not None:
        columns, lanes = 1, held.lanes
    else:
        columns, lanes = 1, _lanes_of_rows(count, longest, width, _work(loops, reductions, leaves, outer, length))
    least = COLUMN_THREADS if rows.inner else THREADS if staged is None else staged.threads
    threads = max(least, lanes)
    functions_text = "\n\n".join(functions_)
    loops_text = _indented(loops_, 8)
    of_block = "kBlock" if staged is None else threads  # shared memory for staged rows was chosen for so many
    body = _ROWS.format(columns=columns, lanes=lanes, threads=of_block, functions=functions_text, loops=loops_text)
    return body, count, threads


def _fixed_length(reductions: Sequence[Reduced], leaves: Sequence[Leaf], rows: int) -> int:
    """The length of the rows if the model fixes it, as in norms: there is a mean, and a weight for all rows. Else 0.

    A fixed length is a constant in the kernel's text. That saves up to a third of the instructions of a short row. Any
    other is an argument, so that a softmax over a sequence is not compiled for every length of a sequence.
    """
    size = reductions[0].over.size
    found = [leaf for leaf in all_leaves(leaves) if isinstance(leaf, Read)]
    has_mean = Position(Index() + size) in all_leaves(leaves)
    of_all_rows = any(_is_along(leaf.index, size) for leaf in found)
    are_alike = all(row.over.size == size for row in reductions)
    return size if rows > 1 and has_mean and of_all_rows and are_alike else 0


def _is_along(index: Index, size: int) -> bool:
    """Whether an index goes along a row of so many elements and depends on nothing else."""
    match index.terms:
        case [(Variable(name, length), 1)]:
            return name != ROW and length == size
    return False


@dataclass(frozen=True)
class _Staged:
    """Rows that a thread block stages in shared memory: short ones, which do not begin at sectors of memory.

    The block's rows lie in one piece. It reads them by whole vectors, and writes results in the same way. In between, a
    thread reads single elements. Adjacent threads read different banks.
    """

    size: int
    """Elements of a row."""
    lanes: int
    """The threads that share a row."""
    reads: Mapping[Read, int]
    """The buffer of each read, by how a loop over the row reads it."""
    results: int
    """How many results are staged. They take the place of what was read."""

    @property
    def buffers(self) -> int:
        return max(len(self.reads), self.results)

    @property
    def threads(self) -> int:
        """Of a block: so few that a multiprocessor has room for several."""
        fitting = (threads for threads in (128, 64) if self._nbytes(threads) <= STAGED_BYTES)
        return next(fitting, WARP)

    @property
    def nbytes(self) -> int:
        """Shared memory of a block."""
        return self._nbytes(self.threads)

    def _nbytes(self, threads: int) -> int:
        return self.buffers * threads // self.lanes * self.size * 4

    @property
    def names(self) -> dict[Read, str]:
        """The text of an element, by read."""
        return {read: f"staged{buffer}[own + {RUN}]" for read, buffer in self.reads.items()}

    def before(self, text: Text) -> list[str]:
        """The statements that fill the buffers."""
        lines = [f"constexpr unsigned kSize = {self.size};"]
        lines += [f"alignas(16) __shared__ float staged{buffer}[kOfBlock * kSize];" for buffer in range(self.buffers)]
        lines.append("const unsigned staged = (p.count - first < kOfBlock ? p.count - first : kOfBlock) * kSize;")
        for read, buffer in self.reads.items():
            source = f"{text.memory(read.slot, read.dtype)} + (first * kSize + {text.number(read.index.constant)})"
            lines.append(f"stage<kThreads>(staged{buffer}, {source}, staged);")
        return [*lines, "__syncthreads();", "const unsigned own = threadIdx.x / kLanes * kSize;"]

    def stores(self) -> list[str]:
        """The statements that put a row's results into the buffers."""
        names = ["result", *(f"other{number}" for number in range(self.results - 1))]
        return [f"staged{buffer}[own + {RUN}] = as_number({name}.element[0]);" for buffer, name in enumerate(names)]

    def after(self, loops: Loops) -> list[str]:
        """The statements that write the results from the buffers."""
        others = [
            f"static_cast<{_TYPES[store.output.dtype]}*>(p.other[{number}])" for number, store in enumerate(loops.also)
        ]
        places = enumerate(["out", *others])
        return [
            "__syncthreads();",
            *(f"stage<kThreads>({out} + first * kSize, staged{buffer}, staged);" for buffer, out in places),
        ]


def _staged(
    loops: Loops, reductions: Sequence[Reduced], leaves: Sequence[Leaf], rows: int, length: int
) -> _Staged | None:
    """How rows are staged; None if they need not be, or cannot be.

    A few short rows are not, since a thread would go over its elements one after another. Nor are rows of which a warp
    reads several in one piece anyway.
    """
    size = reductions[0].over.size
    lanes = size & -size  # so that adjacent threads read different banks
    are_alike = all(row.over.size == size for row in reductions) and length in (1, size) and loops.into is None
    if not are_alike or lanes > WARP or size // lanes > STAGED_ELEMENTS or rows * lanes < STAGED_LEAST:
        return None
    runs = [size // _vector_of_rows(together) for together in _together(reductions)]
    is_in_one_piece = all(one <= WARP and one & (one - 1) == 0 for one in runs)
    if is_in_one_piece or all(size // one > STAGED_RUN for one in runs):
        return None
    element, found = variable(ROW, rows) * size + variable(RUN, size), dict[Read, int]()
    for read in _along_rows(reductions, leaves, length):
        if read.dtype not in RESULT_DTYPES or read.where:
            continue
        begin, nbytes = read.index - element, read.dtype.itemsize
        if not begin.terms and size * nbytes % SECTOR and not any(
            number % ACCESS for number in (begin.constant * nbytes, read.slot.alignment)
        ):  # fmt: skip
            found.setdefault(read, len(found))
    results = [store.output for store in loops.stores] if length > 1 else []
    staged = _Staged(size, lanes, found, len(results))
    are_staged = all(
        each.dtype in RESULT_DTYPES and not (each.slot.alignment % ACCESS or each.offset % ACCESS) for each in results
    )
    return staged if found and are_staged and staged.nbytes <= STAGED_BYTES else None


def _normal(leaves: Sequence[Leaf]) -> list[Expr]:
    """The operands that are sums of exponentials of differences from their greatest exponent.

    One of these is 1, so the sum is a normal number, and so is its inverse.
    """
    return [Operand(place) for place, leaf in enumerate(leaves) if isinstance(leaf, Reduced) and _is_from_one(leaf)]


_NOWHERE: Final = Operand(-1)
"""What the greatest exponent is not made of."""


def _is_from_one(row: Reduced) -> bool:
    match row:
        case Reduced("sum", over, Call("exp", (Call("sub", (x, Operand(place))),)), leaves):
            greatest = leaves[place]
        case _:
            return False
    if not isinstance(greatest, Reduced) or greatest.op != "max" or greatest.over.size != over.size:
        return False
    of_row = {over.name: variable(greatest.over.name, over.size)}
    alike = {leaf: Operand(place) for place, leaf in enumerate(greatest.leaves)}
    operands = {place: alike.get(substituted(leaf, of_row), _NOWHERE) for place, leaf in enumerate(leaves)}
    return with_operands(x, operands) == greatest.expression


def _together(reductions: Sequence[Reduced]) -> list[list[Reduced]]:
    """The reductions in groups. One loop computes a group, because no reduction in it depends on another.

    A group stands after those that it depends on.
    """
    found: dict[Variable, list[Reduced]] = {}
    for row in reductions:
        found.setdefault(row.over, []).append(row)
    return [found[over] for over in sorted(found, key=lambda over: height_of(over))]


def _vector_of_rows(together: Sequence[Reduced]) -> int:
    """How many elements of a row are read at once by the loop that computes these reductions."""
    dtypes = (leaf.dtype for row in together for leaf in row.leaves if isinstance(leaf, Read))
    return math.gcd(ACCESS // max((dtype.itemsize for dtype in dtypes), default=1), together[0].over.size)


def _held(
    loops: Loops, reductions: Sequence[Reduced], leaves: Sequence[Leaf], rows: int, length: int, staged: _Staged | None
) -> Held | None:
    """The reads that several loops over a row share, if a thread's registers can hold them between loops; else None."""
    size, output = reductions[0].over.size, loops.output
    if not 0 < size <= length or any(row.over.size != size for row in reductions):
        return None
    in_order = _together(reductions)
    vector = 1 if staged else math.gcd(_vector(output, length), *map(_vector_of_rows, in_order))
    within = Inside(variable(_ALONG, length), size)
    readers, also = Counter[Read](), dict[Read, Read]()
    for together in in_order:
        at = _cut(together[0].over.name, size, vector)
        # in the order of the leaves, not of a set: a text that differs between processes would be compiled again
        leaves_ = (leaf for row in together for leaf in row.leaves)
        reads = (read for leaf in leaves_ if isinstance(read := substituted(leaf, at), Read))
        readers.update(list(dict.fromkeys(reads)))
    for leaf in leaves:
        if isinstance(leaf, Read) and (size == length or within in leaf.where):
            # if the result is longer than the row, `of_row` has the row's variable, for which `within` always holds
            where = tuple(one for one in leaf.where if one != within)
            alike = Read(leaf.slot, leaf.dtype, leaf.index, where)
            of_row = substituted(substituted(alike, {_ALONG: variable(_ALONG, size)}), _cut(_ALONG, size, vector))
            assert isinstance(of_row, Read)
            as_read = substituted(leaf, _cut(_ALONG, length, vector))
            assert isinstance(as_read, Read)
            also[as_read] = of_row
    readers.update(list(dict.fromkeys(also.values())))
    shared = [read for read, count in readers.items() if count > 1]
    work = _work(loops, reductions, leaves, rows, length)

    def lanes_for(reads: Sequence[Read]) -> int:
        words = vector * sum(2 if kind_of_element(read.dtype) in (INTEGER, "double") else 1 for read in reads)
        return _lanes_of_rows(rows, size // vector, vector, work, words) if staged is None else staged.lanes

    lanes, early = lanes_for(shared), list[Read]()
    if not shared or not lanes:
        return None
    if rows * lanes <= BUSY // 4 and staged is None:  # the time of one row matters, so no read waits for a reduction
        early = [read for read in also.values() if read not in shared and read.index.depends_on(RUN)]
        with_early = lanes_for([*shared, *early])
        early = early if with_early else []
        shared, lanes = [*shared, *early], with_early or lanes
    turns = -(-size // (vector * lanes))
    names = {read: f"held{number}" for number, read in enumerate(shared)}
    variables = {names[read]: kind_of_element(read.dtype) for read in shared}
    names |= {read: names[of_row] for read, of_row in also.items() if of_row in names}
    inside = substituted(within, _cut(_ALONG, length, vector))
    assert isinstance(inside, Inside)
    return Held(lanes, turns, vector, names, variables, inside, early)


@dataclass(frozen=True)
class _Work:
    """What a row of contiguous elements takes, apart from how threads share it."""

    reductions: int
    instructions: int
    """For an element."""
    accesses: Sequence[int]
    """Bytes of an element of each tensor that is read or written along the row."""
    moved: int
    """Bytes that are read and written for an element, without those that all rows share: these are in caches."""


def _work(loops: Loops, reductions: Sequence[Reduced], leaves: Sequence[Leaf], rows: int, length: int) -> _Work:
    """What each of the `rows` rows of `loops` takes. `length`: of a row of the result."""
    found = _along_rows(reductions, leaves, length)
    reads = dict.fromkeys(Read(read.slot, read.dtype, read.index) for read in found)
    along = [read for read in reads if read.index.depends_on(RUN)]
    results = [store.output.dtype.itemsize for store in loops.stores] if length > 1 else []
    own = [read.dtype.itemsize for read in along if rows == 1 or read.index.depends_on(ROW)]
    accesses = [*(read.dtype.itemsize for read in along), *results]
    return _Work(len(reductions), _instructions(loops), accesses, sum(own) + sum(results))


def _along_rows(reductions: Sequence[Reduced], leaves: Sequence[Leaf], length: int) -> list[Read]:
    """All reads. In each, RUN is the variable of a loop over a row, whose elements are runs of one."""
    over = [(row.over, row.leaves) for row in reductions]
    return [
        read
        for variable_, each in (*over, (Variable(_ALONG, length), leaves))
        for leaf in each
        if isinstance(read := substituted(leaf, {variable_.name: variable(RUN, variable_.size)}), Read)
    ]


def _lanes_of_rows(rows: int, runs: int, vector: int, work: _Work, words: int = 0) -> int:
    """How many threads share a row of contiguous elements, a power of two; 0 if no number of them can hold a row.

    Many threads shorten the time of one row, and read memory in longer pieces. Few threads leave less to combine. All
    are estimated in cycles of the GPU.

    Args:
        runs: of a row.
        vector: elements of a run.
        words: registers in which a thread holds a run; 0 if none are held.
    """
    widest = vector * max(work.accesses, default=1)

    def cost(lanes: int) -> float:
        # 28 cycles a shuffle, about 60 instructions before and after the row, or cycles until all warps have met
        turns, levels, warps = -(-runs // lanes), min(lanes, WARP).bit_length() - 1, lanes // WARP
        of_warps = 60 + 8 * warps if warps > 1 else 0  # threads wait for each other
        latency = turns * vector * 2 * work.instructions + work.reductions * (levels * 28 + of_warps)
        lines = sum(max(vector * nbytes * WARP / LINE, WARP / lanes) for nbytes in work.accesses)  # of a warp's turn
        each = 60 + turns * (work.instructions * vector + 4 * lines) + work.reductions * (2 * levels + of_warps / 2)
        piece = lanes * widest  # if it does not begin at a sector, one sector more is moved
        moved = rows * runs * vector * work.moved * (1 + (SECTOR / piece if runs * widest % SECTOR else 0))
        issued, read = each * rows * lanes / ISSUED, moved / MOVED
        blocks = max(1, REGISTERS // (max(lanes, THREADS) * (28 + turns * words)))  # of a multiprocessor at a time
        return latency + max(issued, read) + min(issued, read) / blocks  # one block computes while others read

    most = min(MOST_THREADS, 1 << (runs - 1).bit_length())
    numbers = (1 << exponent for exponent in range(most.bit_length()))
    return min((lanes for lanes in numbers if -(-runs // lanes) * words <= HELD_WORDS), key=cost, default=0)


def _instructions(loops: Loops) -> int:
    """About how many instructions an element of a row takes, without those that its row needs once."""
    expressions = [(row.expression, row.leaves) for row in loops.reductions]
    expressions += [(store.expression, loops.leaves) for store in loops.stores]
    count = 4
    for expression, leaves in expressions:
        varying = set[Expr]()
        for node in postorder(expression):
            if isinstance(node, Operand) and isinstance(leaves[node.index], Read):
                varying.add(node)
            elif isinstance(node, Call) and not varying.isdisjoint(node.args):
                varying.add(node)
                count += 2 if node.op in QUICK else 10
    return count


QUICK: Final = frozenset({"add", "sub", "mul", "neg", "abs", "square", "maximum", "minimum", "where", "float32"})
"""Operations of one or two instructions."""


def _layout(rows: int, longest: int, nbytes: int) -> tuple[int, int]:
    """(columns, lanes) for rows that are adjacent in memory: numbers of threads for adjacent rows, and for each row.

    There are no more lanes than keep a GPU busy.

    Args:
        rows: number of rows; the adjacent rows of one thread count as one.
        longest: elements of a row.
        nbytes: bytes that a thread reads at once.
    """
    wanted, most, threads = -(-BUSY // rows), max(1, longest // 2), COLUMN_THREADS
    lanes = min(_power_of_two(wanted), _power_of_two(most), threads // max(1, SECTOR // nbytes))
    return (threads if lanes * WARP >= threads else WARP) // lanes, lanes


def _power_of_two(number: int) -> int:
    """The largest power of two that is at most `number`."""
    return 1 << (number.bit_length() - 1)


def _loop(runs: str, count: int, vector: int, text: Text, after: Sequence[str] = ()) -> list[str]:
    """The loop of a row's threads over its runs.

    If elements are held in registers, every thread makes the same number of turns. The loop is then unrolled, and no
    turn's reads wait for another's.

    Args:
        runs: the C++ name of the number of runs.
        count: the number of runs.
        after: statements after the loop over a run.
    """
    head = [f"for (unsigned run = thread; run < {runs}; run += kLanes) {{"]
    if text.held is not None:
        has_all = count % text.held.lanes == 0  # no thread has a turn beyond the row
        head = [
            "#pragma unroll",
            f"for (unsigned turn = 0; turn < {text.held.turns_over(count)}; ++turn) {{",
            f"    const bool inside = {'true' if has_all else f'thread + turn * kLanes < {runs}'};",
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
