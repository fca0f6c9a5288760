"""The CPU kernel of a program's loops (kernels/loops.h).

program/text.py writes it, as on a GPU, but element by element. nest.py chooses the kernel's own loops. `suits` says
which loops have a kernel; torch computes the others.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from fxfuse.codegen import MASK, function
from fxfuse.cpu.codegen import CPP_TYPES, SLOW
from fxfuse.cpu.nest import (
    MOST_HELD,
    QUICK,
    SHORT_ROW,
    TURN,
    Loop,
    Nest,
    depend_on,
    is_far,
    is_float,
    nest_of,
    stride_of,
)
from fxfuse.expression import Call, Const, Expr, Operand, postorder
from fxfuse.program.indices import Element, Index, Variable
from fxfuse.program.loops import (
    NARROW,
    Inside,
    Leaf,
    Loops,
    Read,
    Reduced,
    kind_of_element,
    kinds_of,
    with_operands,
)
from fxfuse.program.text import LANE, MAX_TENSORS, ROW, LoopsKernel, Text

_TYPES: Final = {**CPP_TYPES, torch.float64: "double"}
_QUALIFIERS: Final = "FXFUSE_INLINE static"
_SOURCE: Final = """\
#include "loops.h"

namespace fxfuse::fxfuse_kernel {{

struct Body {{
    using Output = {output};
    static constexpr int kNumbers = {numbers}, kDivisors = {divisors}, kTensors = {tensors}, kOthers = {others};
    static constexpr int kHeld = {held};
    static constexpr bool kWholeRows = {whole_rows}, kHoldsRows = {holds_rows}, kRowsBeside = {rows_beside};

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
    """The source of a launch of `kernels`, which is a single one."""
    (kernel,) = kernels
    return kernel.form


def suits(loops: Loops) -> bool:
    """Whether a kernel can compute `loops` in vectors throughout, and nothing costly twice."""
    if len({read.slot for read in loops.reads}) > MAX_TENSORS:
        return False
    if any(isinstance(atom, Element) for index in loops.indices for atom in index.atoms()):
        return False  # an index out of range is an error, which torch has to raise
    if any(store.output.dtype not in _TYPES for store in loops.stores):
        return False
    nest = nest_of(loops)
    return nest is not None and len(nest.held) * nest.elements_held <= MOST_HELD


def is_slow(loops: Loops) -> bool:
    """Whether loops without reductions compute a slow function of each element."""
    calls = (node.op for node in postorder(loops.expression) if isinstance(node, Call))
    return not loops.reductions and not SLOW.isdisjoint(calls)


class Speed(enum.Enum):
    """A kernel's speed compared with torch's own operator for exactly these loops, not counting the call."""

    SLOWER, ALIKE, FASTER = range(3)


def speed_beside_torch(loops: Loops) -> Speed:
    """The speed of the kernel of `loops`, for which `suits` holds.

    torch, too, vectorises over the elements of a row in all its sums and in softmax. It does not go over several rows
    at a time, and takes more passes for variances and logarithms of sums.
    """
    nest = nest_of(loops)
    assert nest is not None, "suits() has seen to it"
    *adding, last = nest.loops
    if not adding:
        if nest.lanes_are_rows and _are_interleaved(nest.place, last.length) and not any(map(is_far, nest.leaves)):
            return Speed.FASTER
        fetches = not loops.only_moves and any(map(is_far, nest.leaves))
        return Speed.SLOWER if fetches else Speed.ALIKE
    if len(adding) == 1:
        is_short = nest.lanes_are_rows and adding[0].length <= SHORT_ROW
        return Speed.FASTER if is_short else Speed.ALIKE
    nodes = (node for loop in adding for root in loop.roots for node in postorder(root))
    is_softmax = last.length > 1 and any(isinstance(node, Call) and node.op == "exp" for node in nodes)
    return Speed.FASTER if nest.lanes_are_rows or not is_softmax else Speed.ALIKE


# ------------------------------------------------------------------------------------------------------ text

_KNOWN: Final = Reduced("known", Variable("", 1), Const(0.0), ())
"""Stands among leaves for a value that is already computed: a number of type float."""


class _Writer:
    """Writes the functions and statements of a nest."""

    def __init__(self, nest: Nest) -> None:
        self.nest = nest
        self.text = Text(_TYPES, by_element=True)
        self.functions: list[str] = []
        self._numbers = {node: len(nest.leaves) + number for number, node in enumerate(nest.held)}
        """The operand numbers of held and shared values, which follow those of the leaves."""
        self._texts: dict[int, str] = {}
        """The texts of those of these values that are computed by now, by operand number."""
        self.shares = False
        """Whether any values that elements of a row share are computed before the elements."""
        self.buffers = [self._held(node) for node in nest.held]
        """The variables that point to the buffers of held values."""

    def _held(self, node: Expr) -> str:
        return f"held{self._numbers[node]}"

    def before(self, loop: Loop) -> list[str]:
        """The statements that compute the costly values that all elements of a row share."""
        found: dict[Expr, None] = {}
        for root in loop.roots:
            self._look_for_shared(root, found)
        lines: list[str] = []
        self.shares = self.shares or bool(found)
        for node in found:
            number = len(self.nest.leaves) + len(self._numbers)
            name = f"shared{number}"
            self.begin(loop)
            (value,) = self._computed([node], [f"{name}_of"], [])
            lines += [f"float {name}[{_ROWS[self.nest.lanes_are_rows]}];"]
            own = [leaf for leaf in self._read_by(node) if not isinstance(leaf, Reduced)]
            of_row = depend_on(own, (ROW,))
            lines += self.over_rows(f"{name}[i] = {value};", vectors=True, count="count" if of_row else "kTogether")
            self._numbers[node], self._texts[number] = number, f"{name}[i]"
        return lines

    def _read_by(self, node: Expr) -> list[Leaf]:
        return [self.nest.leaves[one.index] for one in postorder(node) if isinstance(one, Operand)]

    def _look_for_shared(self, node: Expr, found: dict[Expr, None]) -> None:
        if not isinstance(node, Call) or node in self._numbers:
            return
        is_shared = not depend_on(self._read_by(node), (TURN,) if self.nest.lanes_are_rows else (TURN, LANE))
        calls = [one for one in postorder(node) if isinstance(one, Call)]
        if is_shared and any(one.op not in QUICK for one in calls) and is_float(node, self.nest.leaves):
            found[node] = None
            return
        for argument in node.args:
            self._look_for_shared(argument, found)

    def values(self, loop: Loop, names: Sequence[str]) -> list[str]:
        """The texts of the loop's roots: calls of the functions `names`.

        Statements that the calls need are added to `text`, before the loop over lanes and inside it.
        """
        self.begin(loop)
        held = [node for node in self.nest.held if self._numbers[node] not in self._texts]
        return self._computed(loop.roots, names, held)

    def begin(self, loop: Loop) -> None:
        """Begins the text of a loop: the places in it are named anew."""
        self.text.begin(self.nest.lanes if self.nest.lanes_are_rows else loop.piece)
        if self.nest.lanes_are_rows:
            self._place = f"{TURN} * kBeside + i"
        else:
            within = "lane" if loop.piece == loop.length else f"{TURN} * {self.text.number(loop.piece)} + lane"
            self._place = f"i * {self.text.number(self.nest.row_held)} + {within}"

    def _computed(self, roots: Sequence[Expr], names: Sequence[str], held: Sequence[Expr]) -> list[str]:
        """The texts of expressions. Values of `held` that they contain are computed now, and put into their buffers."""
        new: dict[Expr, Expr] = {}
        known: dict[Expr, Expr] = {}

        def replaced(node: Expr, is_whole: bool = False) -> Expr:
            """The node with held and shared values replaced by operands. If `is_whole`, the node itself is not."""
            if node in self._numbers and not is_whole:
                if node in held and node not in new:
                    new[node] = replaced(node, is_whole=True)
                return Operand(self._numbers[node])
            if not isinstance(node, Call):
                return node
            if node not in known:
                known[node] = Call(node.op, tuple(map(replaced, node.args)))
            return known[node]

        expressions = [replaced(root) for root in roots]
        used = {
            one.index for each in (*new.values(), *expressions) for one in postorder(each) if isinstance(one, Operand)
        }
        numbers = sorted(number for number in used if number < len(self.nest.leaves))
        far = [number for number in numbers if self.nest.lanes_are_rows and is_far(self.nest.leaves[number])]
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
        """The statements of `text`, and `lines`, for each row of a block. `i` counts the rows.

        Where rows are lanes, they compute one element of each row.

        Args:
            vectors: whether the loop over rows is to be vectorised. Where rows are lanes, it always is.
            count: the number of rows, where rows are not lanes. kTogether may be more rows than there are.
        """
        if self.nest.lanes_are_rows:
            return [*self.text.before, *_over_lanes([*self.text.within, *lines], vectors=True)]
        number = "const Place row = first + static_cast<Place>(i);"
        within = self.text.within if vectors else []
        each = [number, *self.text.before, *within, *lines]
        return _loop(f"for (int64_t i = 0; i < {count}; ++i) {{", each, vectors)

    def _fetched(self, numbers: Sequence[int]) -> dict[int, str]:
        """The texts of leaves that are apart in memory for lanes that are rows. A loop of its own fetches them first.

        So the loop that computes is always vectorised, whatever the compiler makes of the loop that fetches.
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
            self.text.before.append(f"{kind_of_element(leaf.dtype)} {names[number]}[kBeside];")
            lines.append(f"{names[number]}[i] = {value};")
        self.text.before += _over_lanes(lines)
        return {number: f"{name}[i]" for number, name in names.items()}

    def _call(self, expression: Expr, name: str, texts: Mapping[int, str]) -> str:
        used = sorted({one.index for one in postorder(expression) if isinstance(one, Operand)})
        own = with_operands(expression, {number: Operand(at) for at, number in enumerate(used)})
        leaves = [self.nest.leaves[number] if number < len(self.nest.leaves) else _KNOWN for number in used]
        kinds, given = dict(kinds_of(leaves, own)), [texts[number] for number in used]
        for at in self._masks(own, leaves, kinds):
            kinds[Operand(at)] = MASK
            mask = f"{name}_mask{at}"
            self.text.before.append(f"const Mask {mask}({given[at]});")
            given[at] = mask
        self.functions.append(function(own, len(used), _QUALIFIERS, kinds, name))
        return f"{name}({', '.join(['0.0f', *given])})"

    def _masks(self, expression: Expr, leaves: Sequence[Leaf], kinds: Mapping[Expr, str]) -> list[int]:
        """The operands that are conditions of whole rows and only choose between floats or between NARROW integers."""
        found = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Inside) and self.text.is_of_run(leaf)]
        others = {
            argument
            for node in postorder(expression)
            if isinstance(node, Call)
            for argument in (node.args[1:] if node.op == "where" and kinds[node] in ("float", NARROW) else node.args)
        }
        return [at for at in found if Operand(at) not in others and Operand(at) != expression]


def kernel(loops: Loops) -> LoopsKernel:
    """The kernel of `loops`, for which `suits` holds."""
    nest = nest_of(loops)
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
        whole_rows="true" if nest.reductions or any(loop.piece < loop.length for loop in nest.loops) else "false",
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
"""The C++ constant for the most rows of a block, by whether rows are lanes."""


def _added_up(writer: _Writer, loop: Loop, kind: str, number: int) -> list[str]:
    """The statements that compute a reduction for each row of a block, into the array total{number}."""
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
    kinds = [_TYPES[store.output.dtype] for store in loops.stores]
    others = [f"static_cast<{kind}*>(p.other[{number}])[place]" for number, kind in enumerate(kinds[1:])]
    targets = ["p.out[place]", *others]
    if nest.lanes_are_rows and stride_of(nest.place) != 1 and _strides(nest.place).get(TURN) == 1:
        return [*shared, *_by_tiles(writer, loop, kinds, targets, values)]
    place = f"const Place place = {text.place_of_one(nest.place)};"
    lines = [place, *(f"set({target}, {value});" for target, value in zip(targets, values, strict=True))]
    if nest.lanes_are_rows:
        head = f"for (Place {TURN} = 0; {TURN} < {text.number(loop.length)}; ++{TURN}) {{"
        if stride_of(nest.place) == 1:
            return [*shared, *_indented(head, writer.over_rows(*lines))]
        # results go to places that are apart in memory, so vectors write them to arrays first
        arrays = [f"{kind} results{number}[kBeside];" for number, kind in enumerate(kinds)]
        computed = writer.over_rows(*(f"set(results{number}[i], {value});" for number, value in enumerate(values)))
        stored = _over_lanes([place, *(f"{target} = results{number}[i];" for number, target in enumerate(targets))])
        return [*shared, *_indented(head, [*arrays, *computed, *stored])]
    inner = [*(f"    {line}" for line in (*text.within, *lines)), "});"]
    if loop.piece == loop.length:
        return [*shared, *writer.over_rows(f"for_each(begin, end, [&](Place lane) {_INLINED} {{", *inner)]
    each = f"for_each(0, {_signed(text, loop.piece)}, [&](Place lane) {_INLINED} {{"
    return [*shared, *writer.over_rows(*_over_pieces(writer, loop, [each, *inner]))]


MOST_INTERLEAVED: Final = 4
"""The most elements that each lane has beside each other in the result, for them to be put there by vectors."""


def _are_interleaved(place: Index, length: int) -> bool:
    """Whether each lane's `length` results, a few, lie beside each other, behind those of the lane before."""
    if not 1 < length <= MOST_INTERLEAVED:
        return False
    return stride_of(place) == length and _strides(place).get(TURN) == 1


def _strides(place: Index) -> dict[str, int]:
    """The stride of each variable that stands in an index by itself."""
    return {atom.name: stride for atom, stride in place.terms if isinstance(atom, Variable)}


def _by_tiles(
    writer: _Writer, loop: Loop, kinds: Sequence[str], targets: Sequence[str], values: Sequence[str]
) -> list[str]:
    """The statements that compute tiles, lane beside lane, and then store them, of each lane a run of elements.

    Each lane's results lie side by side, but lanes are apart: if all lanes were stored one element after another, their
    cache lines would be written to many times.
    """
    first, last, whole = f"first_{TURN}", f"last_{TURN}", writer.text.number(loop.length)
    is_interleaved = _are_interleaved(writer.nest.place, loop.length)
    size = str(loop.length) if is_interleaved else "kTile"
    computed = writer.over_rows(
        *(f"set(results{number}[{TURN} - {first}][i], {value});" for number, value in enumerate(values))
    )
    writer.begin(loop)
    place = f"const Place place = {writer.text.place_of_one(writer.nest.place)};"
    if is_interleaved:
        stores = (f"interleave(&{target}, results{number}, end - begin);" for number, target in enumerate(targets))
        stored = ["const Place lane = static_cast<Place>(begin);", *writer.text.before, place, *stores]
    else:
        stores = (f"(&{target})[at] = results{number}[at][i];" for number, target in enumerate(targets))
        run = _indented(f"for (Place at = 0; at < {last} - {first}; ++at) {{", list(stores))
        stored = [*writer.text.before, *_over_lanes([*writer.text.within, place, *run])]
    tile = [
        *(f"{kind} results{number}[{size}][kBeside];" for number, kind in enumerate(kinds)),
        *_indented(f"for (Place {TURN} = {first}; {TURN} < {last}; ++{TURN}) {{", computed),
        f"const Place {TURN} = {first};",
        *stored,
    ]
    if is_interleaved:
        return [f"constexpr Place {first} = 0, {last} = {size};", *tile]
    end = f"const Place {last} = {first} + {size} < {whole} ? {first} + {size} : {whole};"
    return _indented(f"for (Place {first} = 0; {first} < {whole}; {first} += {size}) {{", [end, *tile])


def _over_lanes(lines: Sequence[str], vectors: bool = False) -> list[str]:
    """The loop that runs `lines` for each lane of a block."""
    number = "const Place lane = static_cast<Place>(begin + i);"
    return _loop("for (int64_t i = 0; i < end - begin; ++i) {", [number, *lines], vectors)


def _loop(head: str, lines: Sequence[str], vectors: bool = False) -> list[str]:
    return _indented(f'_Pragma("omp simd") {head}' if vectors else head, lines)


def _indented(head: str, lines: Sequence[str]) -> list[str]:
    return [head, *(f"    {line}" for line in lines), "}"]


def _signed(text: Text, size: int) -> str:
    return f"static_cast<int64_t>({text.number(size)})"


def _over_pieces(writer: _Writer, loop: Loop, lines: Sequence[str]) -> list[str]:
    """The loop over the pieces of a row: the statements before lanes, which move here from the text, and `lines`."""
    count = writer.text.number(loop.length // loop.piece)
    before, writer.text.before = writer.text.before, []
    return _indented(f"for (Place {TURN} = 0; {TURN} < {count}; ++{TURN}) {{", [*before, *lines])
