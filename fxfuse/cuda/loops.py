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
from typing import Final, TypeVar

import torch

from fxfuse.codegen import function
from fxfuse.cuda import row_threads
from fxfuse.cuda.codegen import MOVED_TYPES, functions
from fxfuse.cuda.row_threads import ALONG
from fxfuse.expression import Call, Expr, Operand
from fxfuse.problem import RESULT_DTYPES
from fxfuse.program.indices import Index, Variable, variable
from fxfuse.program.loops import (
    SECTOR,
    Leaf,
    Loops,
    Position,
    Read,
    Reduced,
    all_leaves,
    digits_of,
    kinds_of,
    reductions_of,
    rows_of,
    run_of,
    substituted,
    with_operands,
)
from fxfuse.program.text import (
    ACCESS,
    LANE,
    MAX_TENSORS,
    ROW,
    RUN,
    LoopsKernel,
    Text,
    flattened,
    in_runs,
    vector_of,
)
from fxfuse.program.values import Value

ARGUMENT_BYTES: Final = 4000
"""Most bytes of a kernel's arguments, a little less than the limit."""
MAX_ADDRESSES: Final = 64
"""Most addresses of a launch (binding.h)."""
MOST_FORMS: Final = 4
"""Most forms in a launch: its kernel needs as many registers as the form that needs most."""
Key = TypeVar("Key")

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
    may_differ = max(threads) <= row_threads.COLUMN_THREADS and not any(kernel.is_staged for kernel in kernels)
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
    text = Text(MOVED_TYPES)
    body, count, threads = _rows(loops, text) if loops.reductions else (*_runs(loops, text), row_threads.THREADS)
    if len(text.tensors) > MAX_TENSORS:
        return None
    output = loops.output.dtype
    computed = [(store.expression, store.output.dtype) for store in loops.stores]
    computed += [(row.expression, output) for row in loops.reductions if _casts(row.expression)]
    form = _BODY.format(
        functions=_functions(computed),
        output=MOVED_TYPES[output],
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


def _indented(lines: Sequence[str], by: int) -> str:
    return "\n".join(f"{' ' * by}{line}" for line in lines)


_QUALIFIERS: Final = "static __device__ __forceinline__"


def _runs(loops: Loops, text: Text) -> tuple[str, int]:
    """The body of a kernel without reductions, in which a thread computes a run, and the number of runs."""
    sizes, leaves, into = flattened(loops)
    vector = vector_of(loops.output, sizes[-1] if sizes else 1)
    text.begin(vector)
    if sizes:
        cut = in_runs(f"d{len(sizes) - 1}", sizes[-1], vector)
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
        text.before.insert(0, f"Adjacent<{MOVED_TYPES[store.output.dtype]}, {width}, {access}> other{number};")
        text.within.append(f"set(other{number}.element[lane], other{number}_of({arguments}));")
    return [_function(loops, number + 1) for number in range(len(loops.also))]


def _stores(loops: Loops) -> list[str]:
    """The statements that store the further results at `place`."""
    return [
        f"other{number}.store(static_cast<{MOVED_TYPES[store.output.dtype]}*>(p.other[{number}]) + place);"
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
    loops = loops.by_rows
    rows, output = rows_of(loops), loops.output
    assert rows is not None, "merge.py and operators.py make no others"
    outer, length, inner = rows.sizes(output.shape)
    widest = max((read.dtype.itemsize for read in loops.reads), default=1)
    beside = math.gcd(ACCESS // widest, output.shape[rows.inner[-1]]) if rows.inner else 1
    number = variable(ROW, outer * inner // beside) * beside + variable(LANE, beside)
    values = {
        **digits_of(number, (*rows.outer, *rows.inner), output),
        **digits_of(variable(ALONG, length), rows.along, output),
    }
    leaves = [substituted(leaf, values) for leaf in loops.leaves]
    reductions = reductions_of(leaves)
    run = run_of(loops, rows)
    staged = None if rows.inner or rows.are_mixed else row_threads.staging(loops, reductions, leaves, outer, length)
    held = None if rows.inner else row_threads.holding(loops, reductions, leaves, outer, length, run, staged)
    text.length = _fixed_length(reductions, leaves, outer * inner)
    functions_, loops_, longest = [], [], 1
    if staged is not None:
        text.staged = staged.names
        loops_ += staged.before(text)
    if held is not None:
        loops_ += [f"{kind} {name}[{held.turns}][{held.vector}];" for name, kind in held.variables.items()]
    turns = itertools.count()
    for together in row_threads.groups_of(reductions):
        over = together[0].over
        vector = (
            1 if rows.inner or staged else row_threads.vector_of_rows(together, run) if held is None else held.vector
        )
        text.begin(max(vector, beside), held, over.size // vector)
        at, which = in_runs(over.name, over.size, vector), "lane" if rows.inner else "0"
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
    vector = 1 if rows.inner or staged else vector_of(output, run) if held is None else held.vector
    width, at = max(vector, beside), in_runs(ALONG, length, vector)
    text.begin(width, held, length // vector)
    arguments = ", ".join(["0.0f", *text.leaves([substituted(leaf, at) for leaf in leaves])])
    functions_.append(_function(loops, 0))
    into = None if loops.into is None else loops.into.place.substituted(values).substituted(at)
    access = _access(output, width) if into is None else _access_into(loops, into, width)
    text.before.insert(0, f"Adjacent<Output, {width}, {access or ACCESS}> result;")
    text.within.append(f"set(result.element[lane], expression({arguments}));")
    functions_ += _others(loops, width, arguments, text)
    index = (number // inner) * (length * inner) + at[ALONG] * inner + number % inner
    if rows.are_mixed:
        index = (loops.place() - output.offset // output.dtype.itemsize).substituted(values).substituted(at)
    index = index - variable(LANE, width)
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
        columns, lanes = row_threads.layout(count, longest, beside * widest)
    elif staged is not None:
        columns, lanes = 1, staged.lanes
    elif held is not None:
        columns, lanes = 1, held.lanes
    else:
        work = row_threads.work_of(loops, reductions, leaves, outer, length)
        columns, lanes = 1, row_threads.lanes_of(count, longest, width, work)
    least = row_threads.COLUMN_THREADS if rows.inner else row_threads.THREADS if staged is None else staged.threads
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
