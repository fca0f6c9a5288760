"""Loops: an operator as an expression for each element of its result.

Three kinds of operators are `Loops`: pointwise ones, those that only move elements (copies, padding, concatenation,
rolling, gathering), and reductions of rows. Every element of the result is an expression of elements of other tensors
(`Read`, at an `Index` of the result's coordinates) and of reductions of rows (`Reduced`). An index counts from the
beginning of a piece of memory, so views need no representation of their own. Loops can be inlined into each other
(`inlined`), so the operators between two library calls become few kernels (merge.py). operators.py has the loops of
torch's operators.

As in fused regions, kernels compute in float32. They round where eager casts, or stores a result to memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from fxfuse import ops
from fxfuse.expression import Call, Const, Expr, Operand, postorder, rewrite
from fxfuse.problem import OPERAND_DTYPES, RESULT_DTYPES
from fxfuse.program.indices import Atom, Element, Index, Quotient, Remainder, Variable, dot, variable
from fxfuse.program.values import Slot, Value

MOVED: Final = (*OPERAND_DTYPES, torch.float64)
"""Dtypes whose elements can be moved."""
LARGEST: Final = 2**31
"""Bound on indices, and on the number of a result's elements: both are less."""


@dataclass(frozen=True)
class Inside:
    """A condition: 0 <= index < size."""

    index: Index
    size: int

    @property
    def is_always(self) -> bool:
        low, high = self.index.range
        return low >= 0 and high < self.size


@dataclass(frozen=True)
class Read:
    """An element read from a piece of memory."""

    slot: Slot
    dtype: torch.dtype
    index: Index
    """In elements, from the slot's beginning."""
    where: tuple[Inside, ...] = ()
    """Conditions under which the element is used. Elsewhere it is not read."""


@dataclass(frozen=True)
class Position:
    """An index used as a value."""

    index: Index

    @property
    def kind(self) -> str:
        """The value's C++ type."""
        low, high = self.index.range
        return NARROW if low in _OF_16_BITS and high in _OF_16_BITS else INTEGER


@dataclass(frozen=True)
class Reduced:
    """A reduction of a row: the sum or the maximum of an expression over all values of a variable."""

    op: str
    """"sum" or "max"."""
    over: Variable
    expression: Expr
    """Its i-th operand is leaves[i]."""
    leaves: tuple[Leaf, ...]


Leaf: TypeAlias = Read | Inside | Position | Reduced


def all_leaves(leaves: Iterable[Leaf]) -> Iterator[Leaf]:
    """All leaves, those of reductions included. These come before their reduction."""
    for leaf in leaves:
        if isinstance(leaf, Reduced):
            yield from all_leaves(leaf.leaves)
        yield leaf


def reductions_of(leaves: Iterable[Leaf]) -> list[Reduced]:
    """All reductions among the leaves, each once, and after those that it contains."""
    return list(dict.fromkeys(leaf for leaf in all_leaves(leaves) if isinstance(leaf, Reduced)))


def indices_of(leaves: Iterable[Leaf]) -> Iterator[Index]:
    """All indices in the leaves."""
    for leaf in all_leaves(leaves):
        if not isinstance(leaf, Reduced):
            yield leaf.index
        if isinstance(leaf, Read):
            yield from (one.index for one in leaf.where)


def substituted(leaf: Leaf, values: Mapping[str, Index]) -> Leaf:
    """The leaf with variables replaced by `values`, by name."""
    match leaf:
        case Inside(index, size):
            return Inside(index.substituted(values), size)
        case Position(index):
            return Position(index.substituted(values))
        case Reduced(op, over, expression, leaves):
            return Reduced(op, over, expression, tuple(substituted(inner, values) for inner in leaves))
    where = tuple(Inside(one.index.substituted(values), one.size) for one in leaf.where)
    return Read(leaf.slot, leaf.dtype, leaf.index.substituted(values), where)


@dataclass(frozen=True)
class Store:
    """A result that is stored."""

    output: Value
    expression: Expr
    """Its i-th operand is the loops' leaves[i]."""


@dataclass(frozen=True)
class Into:
    """Where a result is stored if it is a part of an existing tensor: rows of a cache, for example."""

    target: Value
    """The tensor that is written into."""
    place: Index
    """Where an element is stored, by its coordinates: in elements from the beginning of the target's slot."""


@dataclass(frozen=True)
class Loops:
    """output[coordinates] = expression(leaves), for all coordinates of the output."""

    output: Value
    """The result, which is dense. With `into` it only gives the order in which elements are computed."""
    expression: Expr
    """Its i-th operand is leaves[i]."""
    leaves: tuple[Leaf, ...]
    also: tuple[Store, ...] = ()
    """Further results. Their elements lie at the same offsets from the first element as the output's."""
    into: Into | None = None

    @property
    def stores(self) -> tuple[Store, ...]:
        """All results, the output first."""
        return (Store(self.output, self.expression), *self.also)

    @property
    def indices(self) -> Iterator[Index]:
        """All indices that are read or written at, apart from the output's."""
        yield from indices_of(self.leaves)
        if self.into is not None:
            yield self.into.place

    @functools.cached_property
    def reads(self) -> list[Read]:
        """All reads, those of reductions included."""
        return [leaf for leaf in all_leaves(self.leaves) if isinstance(leaf, Read)]

    @functools.cached_property
    def reductions(self) -> list[Reduced]:
        """All reductions, each after those that it contains."""
        return reductions_of(self.leaves)

    @property
    def size(self) -> tuple[int, int]:
        """The number of leaves, and the number of nodes of all expressions."""
        expressions = [*(store.expression for store in self.stores), *(row.expression for row in self.reductions)]
        return len(set(all_leaves(self.leaves))), sum(len(list(postorder(one))) for one in expressions)

    @property
    def only_moves(self) -> bool:
        """Whether each element is a number or an element of another tensor, at most converted to float32.

        Kernels compute in float32, so that conversion is free.
        """
        if self.reductions:
            return False
        calls = [node for node in postorder(self.expression) if isinstance(node, Call)]
        return all(one.op == "float32" or (one.op == "where" and self._is_place(one.args[0])) for one in calls)

    def _is_place(self, node: Expr) -> bool:
        return isinstance(node, Operand) and isinstance(self.leaves[node.index], Inside)

    @functools.cached_property
    def kinds(self) -> Mapping[Expr, str]:
        """The C++ type of every node of the expressions. Raises Inexact."""
        return kinds_of(self.leaves, *(store.expression for store in self.stores))

    @functools.cached_property
    def by_rows(self) -> Loops:
        """The same loops as they are computed row by row: reductions go along memory, and groups are rows."""
        if not self.reductions:
            return self
        return _divided(dataclasses.replace(self, leaves=tuple(map(_along_memory, self.leaves))))

    def place(self) -> Index:
        """Where an element of the output lies, by its coordinates."""
        return place_of(self.output, coordinates(self.output.shape))


def coordinates(shape: Sequence[int]) -> list[Index]:
    """The loop variables of a result of that shape: c0, c1, …"""
    return [variable(f"c{dim}", size) for dim, size in enumerate(shape)]


def place_of(value: Value, at: Sequence[Index]) -> Index:
    """Where the element of a value at coordinates `at` lies, in elements from the beginning of its slot."""
    return dot(at, value.strides) + value.offset // value.dtype.itemsize


def coordinates_in(part: Value, place: Index, size: int) -> tuple[list[Index], list[Inside]]:
    """The coordinates, in `part`, of the element that lies at `place`, and the conditions under which there is one.

    Raises Unknown where the rows of the part are not equally long in memory.

    Args:
        size: the size of the memory, in elements.
    """
    own, where = [Index() for _ in part.shape], list[Inside]()
    begin = part.offset // part.dtype.itemsize
    for dim in memory_order(part):
        stride, count = part.strides[dim], part.shape[dim]
        first, begin = divmod(begin, stride)
        if size % stride or first + count > size // stride:
            raise Unknown
        own[dim] = place // stride - first
        if count < size // stride:
            where.append(Inside(own[dim], count))
        place, size = place % stride, stride
    if size > 1:
        where.append(Inside(place - begin, 1))
    return own, where


class Unknown(Exception):
    """Loops do not support an operator, or an argument of it."""


def from_the_left(dim: int, rank: int) -> int:
    """A dimension counted from the left, whichever way it is given. Raises Unknown for a tensor without dimensions."""
    if rank == 0:
        raise Unknown
    return dim % rank


class Body:
    """Builds an expression: it collects the leaves that the expression's operands refer to."""

    def __init__(self) -> None:
        self._leaves: dict[Leaf, int] = {}

    def leaf(self, leaf: Leaf) -> Expr:
        """The operand for a leaf. Equal leaves are one operand."""
        return Operand(self._leaves.setdefault(leaf, len(self._leaves)))

    def read(self, value: Any, at: Sequence[Index], where: tuple[Inside, ...] = ()) -> Expr:
        """value[at]. Missing dimensions, and those of size 1, broadcast. Raises Unknown."""
        if not isinstance(value, Value) or value.dtype not in MOVED or value.offset % value.dtype.itemsize:
            raise Unknown
        if value.slot.is_apart or len(value.shape) > len(at):
            raise Unknown
        own = at[len(at) - len(value.shape) :]
        own = [Index() if size == 1 else one for one, size in zip(own, value.shape, strict=True)]
        return self.leaf(Read(value.slot, value.dtype, place_of(value, own), where))

    def choose(self, where: Sequence[Inside], inside: Expr, outside: Expr) -> Expr:
        """`inside` where all conditions hold, else `outside`."""
        for condition in where:
            inside = Call("where", (self.leaf(condition), inside, outside))
        return inside

    def reduce(self, op: str, over: Variable, made: Callable[[Body], Expr]) -> Expr:
        """The sum or the maximum, over all values of a variable, of the expression that `made` builds."""
        inner = Body()
        (expression,), leaves = inner.finished(made(inner))
        return self.leaf(Reduced(op, over, expression, leaves))

    def loops(self, output: Value, expression: Expr, also: Sequence[Store] = (), into: Into | None = None) -> Loops:
        expressions, leaves = self.finished(expression, *(store.expression for store in also))
        others = zip((store.output for store in also), expressions[1:], strict=True)
        return Loops(output, expressions[0], leaves, tuple(Store(*other) for other in others), into)

    def finished(self, *expressions: Expr) -> tuple[list[Expr], tuple[Leaf, ...]]:
        """The expressions and the leaves that they use, renumbered."""
        used = sorted({node.index for one in expressions for node in postorder(one) if isinstance(node, Operand)})
        leaves = list(self._leaves)
        operands = {old: Operand(new) for new, old in enumerate(used)}
        return [with_operands(one, operands) for one in expressions], tuple(leaves[index] for index in used)


Rule: TypeAlias = Callable[[Body, Mapping[str, Any], Value], Expr]
"""Makes the expression of an operator's result: rule(body, arguments by name, the result's value). Raises Unknown."""


def with_operands(expression: Expr, operands: Mapping[int, Expr]) -> Expr:
    """The expression with its operands replaced, by number."""
    return rewrite(expression, lambda node: operands[node.index] if isinstance(node, Operand) else node)


# ----------------------------------------------------------------------------------------------------- types


class Inexact(Exception):
    """A kernel would compute in a different type than torch does."""


INTEGER: Final = "int64_t"
NARROW: Final = "int32_t"
"""The type of integers that 16 bits hold, and of choices between such: half as many registers, twice as many lanes.
Results computed from them are INTEGER. No sum or product of two of them needs more than 32 bits."""
_OF_16_BITS: Final = range(-(2**15), 2**15)
_OF_INTEGERS: Final = frozenset({"add", "sub", "mul", "where", "eq", "ne", "lt", "le", "gt", "ge",
                                 "logical_and", "logical_or", "logical_not"})  # fmt: skip
"""Rows of the op table whose C++ text also computes with integers as torch does."""


def kind_of(dtype: torch.dtype) -> str:
    """The C++ type in which kernels compute values of a dtype."""
    if dtype in RESULT_DTYPES:
        return "float"
    return {torch.bool: "bool", torch.float64: "double"}.get(dtype, INTEGER)


def kind_of_element(dtype: torch.dtype) -> str:
    """The C++ type of an element of a dtype that was read: what as_number returns in loops.h and loops.cuh."""
    return NARROW if dtype in (torch.uint8, torch.int8, torch.int16) else kind_of(dtype)


def kinds_of(leaves: Sequence[Leaf], *expressions: Expr) -> Mapping[Expr, str]:
    """The C++ type of every node of the expressions. Raises Inexact.

    float stands for all that torch computes in float32 or in 16 bits, INTEGER or NARROW for all integers.

    Args:
        leaves: the expressions' operands.
    """
    return _kinds_of(tuple(map(_kind_of_leaf, leaves)), *expressions)


@functools.lru_cache(maxsize=1024)  # a network's blocks are alike, and a loops is asked for again when others join it
def _kinds_of(operands: tuple[str, ...], *expressions: Expr) -> Mapping[Expr, str]:
    kinds: dict[Expr, str] = {}
    for node in postorder(*expressions):
        if isinstance(node, Call):
            kinds[node] = _kind_of_call(node.op, node.args, kinds)
        elif isinstance(node, Operand):
            kinds[node] = operands[node.index]
        elif isinstance(node, Const):
            integer = NARROW if node.value in _OF_16_BITS else INTEGER
            kinds[node] = {bool: "bool", int: integer}.get(type(node.value), "float")
    return kinds


ops.on_replacement.append(lambda row: _kinds_of.cache_clear())


def _kind_of_leaf(leaf: Leaf) -> str:
    match leaf:
        case Read():
            return kind_of_element(leaf.dtype)
        case Inside():
            return "bool"
        case Position():
            return leaf.kind
    if kinds_of(leaf.leaves, leaf.expression)[leaf.expression] != "float":
        raise Inexact
    return "float"


def _kind_of_call(op: str, args: Sequence[Expr], kinds: Mapping[Expr, str]) -> str:
    values = args[1:] if op == "where" else args
    found = {kinds[arg] for arg in values if not isinstance(arg, Const)}
    every = {kinds[arg] for arg in values}
    if "double" in found:
        if op != "where" or found != {"double"}:
            raise Inexact
        return "double"
    if ops.row(op).boolean:
        return "bool"
    if ops.row(op).integer:
        return INTEGER
    if op in _OF_INTEGERS and every <= {INTEGER, NARROW, "bool"}:
        if op == "where" and len(every) == 1:
            return every.pop()
        if every == {"bool"}:  # a sum of truth values is no truth value in C++
            raise Inexact
        return INTEGER
    return "float"


# ----------------------------------------------------------------------------------- inlining and joining


def inlined(loops: Loops, producers: Mapping[Slot, Loops], kept: Slot | None = None) -> Loops:
    """`loops` with producers inlined: it computes the elements that it would read from their slots.

    Args:
        producers: by slot, the loops that fill it. `loops` must read the slot with the dtype of their output.
        kept: a producer's slot that must be stored all the same. `loops` must read it in the order of its own output
            (`reads_alike`).
    """
    body = Body()
    names = max(_height(producer.leaves) for producer in producers.values())
    leaves = [_renamed(leaf, names) if names else leaf for leaf in loops.leaves]
    places = {number: _placed(body, leaf, producers) for number, leaf in enumerate(leaves)}
    also = [Store(store.output, with_operands(store.expression, places)) for store in loops.also]
    if kept is not None:
        also.append(Store(producers[kept].output, _placed(body, _read_alike(loops, producers[kept].output), producers)))
    whole = simplified(body.loops(loops.output, with_operands(loops.expression, places), also, loops.into))
    return Loops(whole.output, whole.expression, tuple(map(_numbered, whole.leaves)), whole.also, whole.into)


def beside(one: Loops, two: Loops) -> Loops | None:
    """Both loops as one; None if they cannot be joined.

    They can if their results have the same shape, strides and rows, and neither writes what the other reads.
    """
    outputs = [store.output for store in (*one.stores, *two.stores)]
    lie_alike = all((each.shape, each.strides) == (one.output.shape, one.output.strides) for each in outputs)
    memory = {each.slot for each in outputs}
    is_apart = len(memory) == len(outputs) and memory.isdisjoint(read.slot for read in (*one.reads, *two.reads))
    if not (lie_alike and is_apart) or one.into is not None or two.into is not None:
        return None
    overs = [{row.over for row in loops.reductions} for loops in (one, two)]
    if not (overs[0] <= overs[1] or overs[1] <= overs[0]):
        return None
    body = Body()
    stores = []
    for loops in (one, two):
        places = {number: body.leaf(leaf) for number, leaf in enumerate(loops.leaves)}
        stores += [Store(store.output, with_operands(store.expression, places)) for store in loops.stores]
    whole = body.loops(one.output, stores[0].expression, stores[1:])
    return whole if rows_of(whole) == rows_of(one) == rows_of(two) else None


def with_memory(loops: Loops, same: Mapping[Slot, Slot]) -> Loops:
    """The same loops, reading `same[slot]` in place of a slot. Indices that are read from memory are not redirected."""

    def changed(leaf: Leaf) -> Leaf:
        if isinstance(leaf, Read):
            return Read(same.get(leaf.slot, leaf.slot), leaf.dtype, leaf.index, leaf.where)
        if isinstance(leaf, Reduced):
            return Reduced(leaf.op, leaf.over, leaf.expression, tuple(map(changed, leaf.leaves)))
        return leaf

    if same.keys().isdisjoint(read.slot for read in loops.reads):
        return loops
    return Loops(loops.output, loops.expression, tuple(map(changed, loops.leaves)), loops.also, loops.into)


def reads_alike(loops: Loops, value: Value) -> bool:
    """Whether loops read a value in the order of their output: at the same offset from the first element.

    The read may be one of a reduction.
    """
    return _read_alike(loops, value) in loops.reads


def _read_alike(loops: Loops, value: Value) -> Read:
    return Read(value.slot, value.dtype, _place_alike(loops, value))


def times_read(loops: Loops, value: Value) -> float:
    """How often loops read each element of a value, on average. An estimate."""
    reads = [read for read in loops.reads if read.slot is value.slot]
    each = math.prod(loops.output.shape) / max(math.prod(value.shape), 1)
    return sum(each * _share_inside(read.where) for read in reads)


def _share_inside(where: Iterable[Inside]) -> float:
    """The estimated fraction of coordinates at which all conditions hold.

    The fractions of independent conditions are multiplied. Of conditions that share a variable, the smallest counts.
    """
    shares: dict[frozenset[Atom], float] = {}
    for one in where:
        low, high = one.index.range
        variables: frozenset[Atom] = frozenset(atom for atom in one.index.atoms() if isinstance(atom, Variable))
        share = min(1.0, one.size / (high - low + 1))
        for others in [others for others in shares if others & variables]:
            share, variables = min(share, shares.pop(others)), variables | others
        shares[variables] = share
    return math.prod(shares.values())


def _place_alike(loops: Loops, value: Value) -> Index:
    output = loops.output
    return loops.place() - output.offset // output.dtype.itemsize + value.offset // value.dtype.itemsize


def is_read_in_place(loops: Loops, value: Value) -> bool:
    """Whether the output may be stored in the memory of a value that the loops read.

    Only the threads that compute the result at the same offset, or its row, may read an element of the value.
    """
    loops = loops.by_rows
    rows = rows_of(loops) if loops.reductions else Rows((), ())
    if rows is None or rows.inner:
        return False
    along = Index()
    for dim in rows.along:
        along = along * loops.output.shape[dim] + variable(f"c{dim}", loops.output.shape[dim])
    own = _place_alike(loops, value)
    places = [leaf.index for leaf in loops.leaves if isinstance(leaf, Read) and leaf.slot is value.slot]
    for row in loops.reductions:
        inner = [leaf.index for leaf in row.leaves if isinstance(leaf, Read) and leaf.slot is value.slot]
        places += [index.substituted({row.over.name: along}) for index in inner]
    return all(place == own for place in places)


def is_apart_or_in_place(loops: Loops) -> bool:
    """Whether loops that write into a tensor (`Loops.into`) read none of its memory, or read each element only where
    they overwrite it."""
    into, memory = loops.into, loops.output.slot
    if into is None:
        return True
    of_indices = [atom for index in loops.indices for atom in index.atoms() if isinstance(atom, Element)]
    own = [read for read in loops.reads if read.slot is memory]
    if not own:
        return all(atom.memory is not memory for atom in of_indices)
    in_place = all((read.index, read.dtype) == (into.place, loops.output.dtype) for read in own)
    return in_place and not loops.reductions and not of_indices  # indices may be repeated


def _placed(body: Body, leaf: Leaf, producers: Mapping[Slot, Loops]) -> Expr:
    """The expression for a leaf: the producer's, if the leaf reads a producer's result."""
    if isinstance(leaf, Reduced):
        row = leaf
        return body.reduce(row.op, row.over, lambda inner: with_operands(
            row.expression, {number: _placed(inner, own, producers) for number, own in enumerate(row.leaves)}
        ))  # fmt: skip
    producer = producers.get(leaf.slot) if isinstance(leaf, Read) else None
    if producer is None:
        return body.leaf(leaf)
    assert isinstance(leaf, Read)
    own = min((_leaves_at(producer, place, leaf.where) for place in _places_in(producer, leaf)), key=divisions_of)
    return with_operands(producer.expression, {number: body.leaf(one) for number, one in enumerate(own)})


def _leaves_at(producer: Loops, place: Index, where: tuple[Inside, ...]) -> list[Leaf]:
    """The leaves of a producer's element at `place`, which is used only under the conditions `where`."""
    values = {f"c{dim}": index for dim, index in enumerate(coordinates_at(producer.output, place))}
    leaves = [substituted(inner, values) for inner in producer.leaves]
    return [
        Read(own.slot, own.dtype, own.index, tuple(dict.fromkeys((*where, *own.where))))
        if isinstance(own, Read)
        else own
        for own in leaves
    ]


@functools.lru_cache(maxsize=4096)
def simplified_index(index: Index, where: tuple[Inside, ...]) -> Index:
    """An index with fewer divisions that is equal where the conditions hold; `index` itself if none is found."""
    divisions = _divisions_in([index])
    if not divisions:
        return index
    bounded, sums = _bounded(index, where)
    result = bounded.substituted(sums)
    return result if _divisions_in([result]) < divisions else index


@functools.lru_cache(maxsize=4096)
def _bounded(index: Index, where: tuple[Inside, ...]) -> tuple[Index, Mapping[str, Index]]:
    """The index with each sum that a condition bounds replaced by a variable, and the sums by the variables' names.

    Each variable takes only the values that its condition allows.
    """
    sums: dict[str, Index] = {}
    for number, one in enumerate(where):
        name = f"within{number}"
        if one.index.terms and not one.is_always:
            index, sums[name] = index.with_sum(one.index, variable(name, one.size)), one.index
    return index, sums


def forget_indices() -> None:
    """Empties the caches of simplified indices. They refer to one program's memory and are of no use to another."""
    simplified_index.cache_clear()
    _bounded.cache_clear()


def simplified(loops: Loops) -> Loops:
    """The same loops with simpler indices. An index need be right only where its value is used."""
    if not any(isinstance(leaf, Inside) or (isinstance(leaf, Read) and leaf.where) for leaf in loops.leaves):
        return loops
    expressions = [store.expression for store in loops.stores]
    order = list(dict.fromkeys(node for one in expressions for node in postorder(one)))
    holding: dict[Expr, frozenset[Inside]] = dict.fromkeys(expressions, frozenset())
    """By node, the conditions that hold wherever its value is used."""
    for node in reversed(order):  # users before the values that they use
        if not isinstance(node, Call):
            continue
        for place, argument in enumerate(node.args):
            here = holding[node]
            if node.op == "where" and place == 1 and isinstance(node.args[0], Operand):
                condition = loops.leaves[node.args[0].index]
                here = here | {condition} if isinstance(condition, Inside) else here
            holding[argument] = holding[argument] & here if argument in holding else here
    body = Body()
    changed = {node: _simplified_leaf(body, loops.leaves[node.index], holding[node])
               for node in order if isinstance(node, Operand)}  # fmt: skip

    def change(node: Expr) -> Expr:
        if isinstance(node, Operand):
            return changed[node]
        if isinstance(node, Call) and node.op == "where":
            condition, inside, outside = node.args
            if inside == outside:
                return inside
            if isinstance(condition, Const):
                return inside if condition.value else outside
        return node

    first, *others = (rewrite(one, change) for one in expressions)
    also = [Store(store.output, other) for store, other in zip(loops.also, others, strict=True)]
    return body.loops(loops.output, first, also, loops.into)


def _simplified_leaf(body: Body, leaf: Leaf, holding: Iterable[Inside]) -> Expr:
    """The expression for a leaf whose value is used only where these conditions hold."""
    where = tuple(sorted(holding, key=_simplicity))
    match leaf:
        case Inside(index, size):
            bounded = Inside(_bounded(index, where)[0], size)
            low, high = bounded.index.range
            if bounded.is_always:
                return Const(True)
            if high < 0 or low >= size:
                return Const(False)
            return body.leaf(Inside(simplified_index(index, where), size))
        case Position(index):
            return body.leaf(Position(simplified_index(index, where)))
        case Read(slot, dtype, index, own):
            kept: list[Inside] = []
            for one in sorted(own, key=_simplicity):
                if not Inside(_bounded(one.index, tuple(kept))[0], one.size).is_always:
                    kept.append(Inside(simplified_index(one.index, tuple(kept)), one.size))
            return body.leaf(Read(slot, dtype, simplified_index(index, tuple(kept)), tuple(kept)))
    return body.leaf(leaf)


def _simplicity(condition: Inside) -> tuple[int, int, str, int]:
    """A sort key for conditions: the simplest first."""
    return _divisions_in([condition.index]), len(condition.index.terms), condition.index.key, condition.size


def divisions_of(leaves: Sequence[Leaf]) -> int:
    """How many different quotients and remainders the indices of leaves contain."""
    return _divisions_in(indices_of(leaves))


def _divisions_in(indices: Iterable[Index]) -> int:
    found: set[Atom] = set()
    for index in indices:
        found.update(atom for atom in index.atoms() if isinstance(atom, Quotient | Remainder))
    return len(found)


def _places_in(producer: Loops, read: Read) -> list[Index]:
    """Where the element that is read lies in a producer's result, in elements from its first: one or two indices.

    There may be two if the element is read under conditions. The caller takes the simpler one. There is one if the
    producer has reductions. It lies inside the result whether or not the conditions hold, because reductions are
    computed even where the element is not used.
    """
    output = producer.output
    place = read.index - output.offset // output.dtype.itemsize
    within = _within(place, read.where)
    return [within] if producer.reductions or within == place else [place, within]


def _within(place: Index, where: Sequence[Inside]) -> Index:
    """An index equal to `place` where the conditions hold. Elsewhere the conditions' indices are wrapped into range."""
    for condition in where:
        terms = dict(place.terms)
        shares = {divmod(terms.get(atom, 0), coefficient) for atom, coefficient in condition.index.terms}
        if condition.is_always or len(shares) != 1:
            continue
        ((factor, rest),) = shares
        if factor and not rest:
            place = place + (condition.index % condition.size - condition.index) * factor
    return place


def has_rows_read(loops: Loops, producer: Loops) -> bool:
    """Whether every row of a producer that `loops` would compute exists, even where conditions do not hold."""
    reads = [read for read in loops.reads if read.slot is producer.output.slot and read.where]
    ranges = [_places_in(producer, read)[0].range for read in reads]
    return all(low >= 0 and high < math.prod(producer.output.shape) for low, high in ranges)


# ------------------------------------------------------------------------------------------------------ rows

ROW: Final = "k"
"""Prefix of the variables of reductions: k0, k1, … Each has a greater number than the reductions inside it."""


def row_variable(height: int, size: int) -> Variable:
    """The variable of a reduction that contains `height` nested levels of reductions."""
    return Variable(f"{ROW}{height}", size)


def height_of(over: Variable) -> int:
    """The number that `row_variable` was given."""
    return int(over.name.removeprefix(ROW))


def _height(leaves: Iterable[Leaf]) -> int:
    return max((1 + _height(leaf.leaves) for leaf in leaves if isinstance(leaf, Reduced)), default=0)


def _numbered(leaf: Leaf) -> Leaf:
    """The leaf with its reductions' variables renumbered by their heights, so that equal reductions compare equal."""
    if not isinstance(leaf, Reduced):
        return leaf
    inner = tuple(map(_numbered, leaf.leaves))
    over = row_variable(_height(inner), leaf.over.size)
    if over != leaf.over:
        inner = tuple(substituted(one, {leaf.over.name: variable(over.name, over.size)}) for one in inner)
    return Reduced(leaf.op, over, leaf.expression, inner)


def _renamed(leaf: Leaf, by: int) -> Leaf:
    """The leaf with its reductions' variables renumbered by `by` more, to inline others into it."""
    if not isinstance(leaf, Reduced):
        return leaf
    over = row_variable(height_of(leaf.over) + by, leaf.over.size)
    values = {leaf.over.name: variable(over.name, over.size)}
    own = (_renamed(substituted(inner, values), by) for inner in leaf.leaves)  # this variable before inner ones
    return Reduced(leaf.op, over, leaf.expression, tuple(own))


def memory_order(output: Value) -> list[int]:
    """Dimensions of more than one element, ordered by stride, the largest first."""
    order = sorted(range(len(output.shape)), key=lambda dim: -output.strides[dim])
    return [dim for dim in order if output.shape[dim] > 1]


@dataclass(frozen=True)
class Rows:
    """The rows of a result, each with its own reductions.

    The result's dimensions are divided into three groups, each in the order of memory.
    """

    outer: tuple[int, ...]
    """The dimensions over rows, or over groups of rows that are adjacent in memory."""
    along: tuple[int, ...]
    """The dimensions inside a row."""
    inner: tuple[int, ...] = ()
    """The dimensions of rows that are adjacent in memory. Empty if a row's own elements are contiguous, or runs of them
    are."""
    are_mixed: bool = False
    """Whether parts of other rows lie between the parts of a row: groups of channels in channels_last."""

    def sizes(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """The numbers of elements of `outer`, `along` and `inner`."""
        outer, along, inner = (math.prod(shape[dim] for dim in dims) for dims in (self.outer, self.along, self.inner))
        return outer, along, inner


def digits_of(index: Index, dims: Sequence[int], output: Value) -> dict[str, Index]:
    """The coordinates of an element along `dims`, from its number among the elements of these dimensions."""
    values = {}
    for dim in reversed(dims):
        values[f"c{dim}"], index = index % output.shape[dim], index // output.shape[dim]
    return values


def rows_of(loops: Loops) -> Rows | None:
    """The rows of a result: elements that share their reductions.

    Rows are adjacent in memory (`Rows.inner`) where reductions depend on the innermost dimensions. The exception is
    rows of one element each whose reductions read contiguous memory. Where reductions depend on the outermost
    dimension and on some between others, rows are mixed. None if a row would have to be reduced for each element of
    another row.
    """
    needed: set[str] = set()
    for row in loops.reductions:
        bound = {row.over.name, *(one.over.name for one in all_leaves(row.leaves) if isinstance(one, Reduced))}
        atoms = [atom for index in indices_of(row.leaves) for atom in index.atoms()]
        needed |= {atom.name for atom in atoms if isinstance(atom, Variable)} - bound
    if any(name.startswith(ROW) for name in needed):
        return None
    order = memory_order(loops.output)
    is_needed = [f"c{dim}" in needed for dim in order]
    count = max((place + 1 for place, is_one in enumerate(is_needed) if is_one), default=0)
    plain = Rows(tuple(order[:count]), tuple(order[count:]))
    if count < len(order) and is_needed[0] and not all(is_needed[:count]):
        outer = tuple(dim for dim, is_one in zip(order, is_needed, strict=True) if is_one)
        return Rows(outer, tuple(dim for dim in order if dim not in outer), are_mixed=True)
    if count < len(order) or not order:
        return plain
    begin = next((len(order) - place for place, is_one in enumerate(reversed(is_needed)) if not is_one), 0)
    middle = next((begin - place for place, is_one in enumerate(reversed(is_needed[:begin])) if is_one), 0)
    beside = Rows(tuple(order[:middle]), tuple(order[middle:begin]), tuple(order[begin:]))
    if not all(is_needed[:middle]) or (not beside.along and _reads_beside(loops, plain)):
        return plain
    return beside


def _along_memory(leaf: Leaf) -> Leaf:
    """The leaf, but reductions are taken in an order in which they read contiguous memory, or longer runs of it."""
    if not isinstance(leaf, Reduced):
        return leaf
    over, leaves = leaf.over, tuple(map(_along_memory, leaf.leaves))
    reads = [one for one in leaves if isinstance(one, Read) and one.index.depends_on(over.name)]

    def run(order: Index | None) -> int:
        indices = (read.index if order is None else read.index.substituted({over.name: order}) for read in reads)
        return min((contiguous(index, over.name, over.size) for index in indices), default=over.size)

    if run(None) < over.size:
        order = max(None, *(_in_order_of(read.index, over) for read in reads), key=run)
        if order is not None:
            leaves = tuple(substituted(one, {over.name: order}) for one in leaves)
    return Reduced(leaf.op, over, leaf.expression, leaves)


def _in_order_of(index: Index, over: Variable) -> Index | None:
    """The numbers of a variable's values in the order in which `index` lies in memory; None if there is none.

    A number has digits, of different bases, which the index divides it into. They are ordered by their strides.
    """
    number, bounds = variable(over.name, over.size), {1, over.size}
    for atom in index.atoms():
        if isinstance(atom, Quotient | Remainder):
            within, *others = (inner for inner, _ in atom.of.terms)
            if atom.of == number:
                bounds.add(atom.by)
            elif isinstance(within, Quotient) and within.of == number and not others:
                bounds.add(within.by * atom.by)
    places = sorted(bound for bound in bounds if bound <= over.size)
    if any(after % before for before, after in itertools.pairwise(places)):
        return None
    digits = []
    for place, after in itertools.pairwise(places):
        step = index.substituted({over.name: Index() + place}) - index.substituted({over.name: Index()})
        digits.append((abs(step.constant), place, after // place))
    along, turned = number, Index()
    for _, place, base in sorted(digits):
        turned, along = turned + along % base * place, along // base
    return turned


def _divided(loops: Loops) -> Loops:
    """The same loops with a dimension divided in two wherever reductions depend on its quotient alone (groups).

    So all elements of a group are in one row. A dimension stays whole if that would make more work.
    """
    output = loops.output
    atoms = [atom for row in loops.reductions for index in indices_of(row.leaves) for atom in index.atoms()]
    for dim, size in enumerate(output.shape):
        whole = variable(f"c{dim}", size)
        parts = {atom.by for atom in atoms if isinstance(atom, Quotient) and atom.of == whole}
        part = min(parts, default=1)
        if part == 1 or size % part:
            continue
        values = {
            f"c{later}": variable(f"c{later + 1}", output.shape[later]) for later in range(dim + 1, len(output.shape))
        }
        values[f"c{dim}"] = variable(f"c{dim}", size // part) * part + variable(f"c{dim + 1}", part)

        def in_two(value: Value, dim: int = dim, part: int = part) -> Value:
            shape, strides = list(value.shape), list(value.strides)
            shape[dim : dim + 1] = [shape[dim] // part, part]
            strides[dim : dim + 1] = [strides[dim] * part, strides[dim]]
            return dataclasses.replace(value, shape=tuple(shape), strides=tuple(strides))

        leaves = tuple(substituted(leaf, values) for leaf in loops.leaves)
        also = tuple(Store(in_two(store.output), store.expression) for store in loops.also)
        into = None if loops.into is None else Into(loops.into.target, loops.into.place.substituted(values))
        found = Loops(in_two(output), loops.expression, leaves, also, into)
        if _work_by_rows(found) <= _work_by_rows(loops):
            return _divided(found)
    return loops


def _reads_beside(loops: Loops, rows: Rows) -> bool:
    """Whether each reduction reads adjacent elements of memory, along the row or from row to row."""
    for row in loops.reductions:
        name, size = row.over.name, row.over.size
        if rows.inner:
            name, size = f"c{rows.inner[-1]}", loops.output.shape[rows.inner[-1]]
        for leaf in row.leaves:
            if not isinstance(leaf, Read) or not leaf.index.depends_on(row.over.name):
                continue
            run, nbytes = contiguous(leaf.index, name, size), leaf.dtype.itemsize
            is_beside = run == size or (not rows.inner and run * nbytes >= RUN_OF_ROW)
            is_small = leaf.index.range[1] < _work_by_rows(loops, rows) // SMALL
            if not (is_small or (is_beside and size * nbytes >= (SECTOR if rows.inner else 1))):
                return False
    return not rows.are_mixed or _results_read_beside(loops, rows)


def _results_read_beside(loops: Loops, rows: Rows) -> bool:
    """Whether the elements of mixed rows are computed from runs of memory, and written to runs."""
    large = _work_by_rows(loops, rows) // SMALL
    reads = [leaf for leaf in loops.leaves if isinstance(leaf, Read) and leaf.index.range[1] >= large]
    return all(run * nbytes >= RUN_OF_ROW for run, nbytes in _runs_along(loops, rows, reads))


def _runs_along(loops: Loops, rows: Rows, reads: Iterable[Read]) -> Iterator[tuple[int, int]]:
    """(consecutive elements that are contiguous, bytes of an element) along a row: of the result, and of `reads`."""
    _, length, _ = rows.sizes(loops.output.shape)
    along = digits_of(variable("along", length), rows.along, loops.output)
    for index, dtype in ((loops.place(), loops.output.dtype), *((read.index, read.dtype) for read in reads)):
        yield contiguous(index.substituted(along), "along", length), dtype.itemsize


def run_of(loops: Loops, rows: Rows) -> int:
    """How many elements of a row are contiguous, in its result and in what its reductions read."""
    if not rows.are_mixed:
        return rows.sizes(loops.output.shape)[1]
    runs = [run for run, _ in _runs_along(loops, rows, ())]
    for row in loops.reductions:
        reads = (leaf for leaf in row.leaves if isinstance(leaf, Read) and leaf.index.depends_on(row.over.name))
        runs += [contiguous(read.index, row.over.name, row.over.size) for read in reads]
    return math.gcd(*runs)


def contiguous(index: Index, name: str, size: int) -> int:
    """How many consecutive elements along a variable are contiguous in memory: the length of each such run.

    Args:
        size: the variable's.
    """
    if not (index - variable(name, size)).depends_on(name):
        return size
    run = math.gcd(size, *(atom.by for atom in index.atoms() if isinstance(atom, Quotient | Remainder)
                           and atom.of.depends_on(name)))  # fmt: skip
    in_run = index.substituted({name: variable("run", size // run) * run + variable("lane", run)})
    return 1 if (in_run - variable("lane", run)).depends_on("lane") else run


def work_of(loops: Loops) -> int:
    """How many elements are computed, those of reductions included. LARGEST**2 if this cannot be done row by row."""
    return _work_by_rows(loops.by_rows)


def _work_by_rows(loops: Loops, rows: Rows | None = None) -> int:
    """The same by the rows of these dimensions, or by `rows`."""
    elements = math.prod(loops.output.shape)
    if not loops.reductions:
        return elements
    rows = rows or rows_of(loops)
    if rows is None:
        return LARGEST**2
    outer, _, inner = rows.sizes(loops.output.shape)
    return elements + outer * inner * sum(row.over.size for row in loops.reductions)


def read_along_rows(loops: Loops) -> set[Read]:
    """The reads that vary along a reduced row."""
    reads = ((row, leaf) for row in loops.reductions for leaf in row.leaves if isinstance(leaf, Read))
    return {leaf for row, leaf in reads if leaf.index.depends_on(row.over.name)}


def rows_pay(loops: Loops) -> bool:
    """Whether a kernel whose threads share rows keeps a GPU busy, with reads that are adjacent in memory.

    True for loops without reductions.
    """
    loops = loops.by_rows
    rows = rows_of(loops)
    if not loops.reductions or rows is None:
        return not loops.reductions
    outer, length, inner = rows.sizes(loops.output.shape)
    longest = max(row.over.size for row in loops.reductions)
    if length > 2 * longest or (rows.inner and outer * inner < FEW_ROWS and longest > LONG_ROW):
        return False  # too few threads for so many elements
    reads = (leaf for leaf in all_leaves(loops.leaves) if isinstance(leaf, Read))
    is_small = outer * length * inner <= FEW and all(read.index.range[1] < FEW for read in reads)
    return is_small or _reads_beside(loops, rows)


SECTOR: Final = 32
"""Bytes of a sector, the unit in which a GPU reads memory."""
RUN_OF_ROW: Final = SECTOR // 2
"""Bytes. The least length of the runs of a row, if its elements are not contiguous: the rest of a sector is read for
another row, at about the same time."""
FEW_ROWS: Final = 256
"""The least number of rows that are adjacent in memory with enough threads for long rows."""
LONG_ROW: Final = 4096
"""Elements. A row with more than this is long."""
SMALL: Final = 16
"""A tensor with at most 1 / SMALL of the elements of all rows stays in caches, whatever the order of its reads."""
FEW: Final = 2**18
"""Elements that a GPU reads or writes in the time of a kernel's launch, even if each is in a sector of its own."""


def coordinates_at(output: Value, place: Index) -> list[Index]:
    """The coordinates of the output's element at `place`, in elements from its first."""
    at, is_first = [Index()] * len(output.shape), True
    for dim in memory_order(output):
        at[dim] = place // output.strides[dim]
        if not is_first:  # the place is inside the output, so the first dimension needs no remainder
            at[dim] = at[dim] % output.shape[dim]
        is_first = False
    return at
