"""The kernel of a program's loops on a CPU (kernels/loops.h): the same text as on a GPU, element by element.

The elements of a row of the result, which lie side by side, are one loop, which the compiler vectorises where what it
reads lies side by side, too, or is the same for the whole row: `suits` says whether all of it does. Others are torch's.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Final

import torch

from fxfuse.codegen import function
from fxfuse.cpu.codegen import CPP_TYPES
from fxfuse.expression import Call, Expr, postorder
from fxfuse.program.indices import Element, Index, variable
from fxfuse.program.loops import (
    Inside,
    Leaf,
    Loops,
    Read,
    Reduced,
    indices_of,
    kinds_of,
    reductions_of,
    rows_of,
    substituted,
)
from fxfuse.program.text import LANE, MAX_TENSORS, ROW, LoopsKernel, Text, by_runs, digits_of, flattened

_TYPES: Final = {**CPP_TYPES, torch.float64: "double"}
_QUALIFIERS: Final = "FXFUSE_INLINE static"
LEAST_ROW: Final = 4
"""Elements of a row below which finding its place costs more than computing it."""

_SOURCE: Final = """\
#include "loops.h"

namespace fxfuse::fxfuse_kernel {{

struct Body {{
    using Output = {output};
    static constexpr int kNumbers = {numbers}, kDivisors = {divisors}, kTensors = {tensors}, kOthers = {others};
    static constexpr bool kAddsUp = {adds_up};

{functions}

    static void run(const LoopsArguments<Body>& arguments, Place row, int64_t begin, int64_t end) {{
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
    """Whether a kernel would be vectors all through."""
    if len({read.slot for read in loops.reads}) > MAX_TENSORS:
        return False
    if any(isinstance(atom, Element) for index in loops.indices for atom in index.atoms()):
        return False  # an index beyond the end is an error, which is torch's to raise
    if loops.into is not None or any(store.output.dtype not in _TYPES for store in loops.stores):
        return False
    if any(_is_costly(row.expression) for row in loops.reductions):
        return False  # it would be computed once for the sum, and once more for the result
    found = _rows(loops)
    if found is None:
        return False
    _, length, leaves = found
    reductions = reductions_of(leaves)
    if length < LEAST_ROW and not reductions:
        return False
    along = [(LANE, length, leaves), *((row.over.name, row.over.size, row.leaves) for row in reductions)]
    return all(_lies_along(leaf, name, size) for name, size, inner in along for leaf in inner)


CHEAP: Final = frozenset(
    {"add", "sub", "mul", "div", "neg", "abs", "square", "sqrt", "rsqrt", "maximum", "minimum", "where", "float32",
     "float16", "bfloat16", "eq", "ne", "lt", "le", "gt", "ge"}
)  # fmt: skip
"""Operations that take a few instructions."""


def _is_costly(expression: Expr) -> bool:
    return any(node.op not in CHEAP for node in postorder(expression) if isinstance(node, Call))


def _lies_along(leaf: Leaf, name: str, size: int) -> bool:
    """Whether elements that follow each other are next to each other in memory, or the same."""
    if isinstance(leaf, Reduced) or size == 1:
        return True
    indices = list(indices_of([leaf]))
    if not isinstance(leaf, Read):
        return not any(index.depends_on(name) for index in indices)
    place, conditions = leaf.index, [one.index for one in leaf.where]
    if any(index.depends_on(name) for index in conditions):
        return False
    return not place.depends_on(name) or not (place - variable(name, size)).depends_on(name)


def _rows(loops: Loops) -> tuple[int, int, list[Leaf]] | None:
    """How many rows there are, how long they are, and the leaves by the variables row and lane; None if rows that are
    added up lie side by side."""
    if not loops.reductions:
        sizes, leaves, _ = flattened(loops)
        whole = sizes[-1] if sizes else 1
        length = _alike(leaves, f"d{len(sizes) - 1}", whole)
        count = math.prod(sizes) // length
        number, values = variable(ROW, count), dict[str, Index]()
        if sizes:
            parts = whole // length
            values[f"d{len(sizes) - 1}"] = (number % parts) * length + variable(LANE, length)
            number = number // parts
        for dim in reversed(range(len(sizes) - 1)):
            values[f"d{dim}"], number = number % sizes[dim], number // sizes[dim]
        return count, length, [_of_whole_rows(substituted(leaf, values), length) for leaf in leaves]
    rows, output = rows_of(loops), loops.output
    if rows is None or rows.inner:
        return None
    count, length, _ = rows.sizes(output.shape)
    values = {
        **digits_of(variable(ROW, count), rows.outer, output),
        **digits_of(variable(LANE, length), rows.along, output),
    }
    return count, length, [substituted(leaf, values) for leaf in loops.leaves]


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


def kernel(loops: Loops) -> LoopsKernel:
    """The kernel of loops that suit."""
    found = _rows(loops)
    assert found is not None, "suits() has seen to it"
    count, length, leaves = found
    text, functions, statements = Text(_TYPES, by_element=True), list[str](), list[str]()
    reductions = reductions_of(leaves)
    for turn, row in enumerate(reductions):
        text.begin(row.over.size)
        terms = text.leaves([substituted(leaf, {row.over.name: variable(LANE, row.over.size)}) for leaf in row.leaves])
        functions.append(_function(row.expression, row.leaves, f"part{turn}"))
        kind = {"sum": "Sum", "max": "Greatest"}[row.op]
        value = f"return part{turn}({', '.join(['0.0f', *terms])});"
        statements += [
            *text.before,
            f"const float total{turn} = come_to<{kind}>(static_cast<int64_t>({text.number(row.over.size)}), "
            "[&](Place lane) __attribute__((always_inline)) -> float {",
            *(f"    {line}" for line in (*text.within, value)),
            "});",
        ]
        text.rows[row] = f"total{turn}"
    text.begin(length)
    arguments = ", ".join(["0.0f", *text.leaves(leaves)])
    lines = [*text.within, "const Place place = row * static_cast<Place>(p.length) + lane;"]
    for number, store in enumerate(loops.stores):
        name = f"other{number - 1}_of" if number else "expression"
        functions.append(function(store.expression, len(loops.leaves), _QUALIFIERS, loops.kinds, name))
        kind = _TYPES[store.output.dtype]
        to = "p.out[place]" if number == 0 else f"static_cast<{kind}*>(p.other[{number - 1}])[place]"
        lines.append(f"set({to}, {name}({arguments}));")
    statements += [
        *text.before,
        "for_each(begin, end, [&](Place lane) __attribute__((always_inline)) {",
        *(f"    {line}" for line in lines),
        "});",
    ]
    form = _SOURCE.format(
        output=_TYPES[loops.output.dtype],
        numbers=len(text.numbers),
        divisors=len(text.divisors),
        tensors=len(text.tensors),
        others=len(loops.also),
        adds_up="true" if reductions else "false",
        functions="\n\n".join(functions),
        statements="\n".join(f"        {line}" for line in statements),
    )
    values = [count, length, *text.numbers, *text.divisors]
    results = tuple((store.output.slot, store.output.offset) for store in loops.stores)
    return LoopsKernel(form, struct.pack(f"<{len(values)}i", *values), results, tuple(text.tensors))


def _function(expression: Expr, leaves: Sequence[Leaf], name: str) -> str:
    return function(expression, len(leaves), _QUALIFIERS, kinds_of(expression, leaves), name)
