"""What one of torch's operators computes, element by element: an expression of what lies where in memory.

Pointwise operators, and those that only move elements (copies, padding, concatenation, rolling, gathering), all are
`Loops`: for every element of the result an expression of elements of other tensors, whose places are `Index`es of the
element's coordinates. Views need no words, since places are counted from where a piece of memory begins. So one can be
put into the other (`inlined`): whatever stands between two library calls becomes one kernel (merge.py).

As in fused regions, kernels compute in float32 and round where eager's result is a cast, or lies in memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from fxfuse import ops
from fxfuse.expression import Call as CallExpr
from fxfuse.expression import Const, Expr, Operand, postorder, rewrite
from fxfuse.layout import is_overlapping
from fxfuse.problem import OPERAND_DTYPES, RESULT_DTYPES
from fxfuse.program.indices import Index, dot, element, variable
from fxfuse.program.values import Slot, Value

MOVED: Final = (*OPERAND_DTYPES, torch.float64)
"""Dtypes of which elements can be moved, whatever they mean."""
_INDICES: Final = (torch.int64, torch.int32)
_CASTS: Final = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
LARGEST: Final = 2**31
"""Elements of a result, and indices, are less."""


@dataclass(frozen=True)
class Inside:
    """Whether 0 <= index < size."""

    index: Index
    size: int


@dataclass(frozen=True)
class Read:
    """An element of a piece of memory."""

    slot: Slot
    dtype: torch.dtype
    index: Index
    """In elements, from where the slot begins."""
    where: tuple[Inside, ...] = ()
    """It is read only there; elsewhere nobody asks for it."""


@dataclass(frozen=True)
class Position:
    """An index as a number."""

    index: Index


Leaf: TypeAlias = Read | Inside | Position


@dataclass(frozen=True)
class Loops:
    """result[coordinates] = expression(leaves), for all coordinates of the output."""

    output: Value
    expression: Expr
    """Of operands: the i-th is leaves[i]."""
    leaves: tuple[Leaf, ...]

    @property
    def reads(self) -> list[Read]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Read)]

    @property
    def only_moves(self) -> bool:
        """Whether each element is one of another tensor's, or a number."""
        calls = [node for node in postorder(self.expression) if isinstance(node, CallExpr)]
        return all(node.op == "where" and self._is_place(node.args[0]) for node in calls)

    def _is_place(self, node: Expr) -> bool:
        return isinstance(node, Operand) and isinstance(self.leaves[node.index], Inside)

    @functools.cached_property
    def kinds(self) -> dict[Expr, str]:
        """The C++ type of every value of the expression but numbers that nobody computes with. Raises Inexact."""
        return _kinds(self.expression, self.leaves)

    def place(self) -> Index:
        """Where an element of the result lies, of its coordinates."""
        return place_of(self.output, coordinates(self.output.shape))


def coordinates(shape: Sequence[int]) -> list[Index]:
    """The loop variables of a result of that shape: c0, c1, …"""
    return [variable(f"c{dim}", size) for dim, size in enumerate(shape)]


def place_of(value: Value, at: Sequence[Index]) -> Index:
    """Where an element of a value lies, in elements from where its slot begins."""
    return dot(at, value.strides) + value.offset // value.dtype.itemsize


class _Unknown(Exception):
    """An operator, or an argument of it, that loops do not compute."""


class _Body:
    """The leaves of an expression while it is made."""

    def __init__(self) -> None:
        self._leaves: dict[Leaf, int] = {}

    def leaf(self, leaf: Leaf) -> Expr:
        return Operand(self._leaves.setdefault(leaf, len(self._leaves)))

    def read(self, value: Any, at: Sequence[Index], where: tuple[Inside, ...] = ()) -> Expr:
        """value[at]; fewer dimensions, and those of size 1, broadcast."""
        if not isinstance(value, Value) or value.dtype not in MOVED or value.offset % value.dtype.itemsize:
            raise _Unknown
        own = at[len(at) - len(value.shape) :]
        own = [Index() if size == 1 else one for one, size in zip(own, value.shape, strict=True)]
        return self.leaf(Read(value.slot, value.dtype, place_of(value, own), where))

    def choose(self, where: Sequence[Inside], inside: Expr, outside: Expr) -> Expr:
        for condition in where:
            inside = CallExpr("where", (self.leaf(condition), inside, outside))
        return inside

    def loops(self, output: Value, expression: Expr) -> Loops:
        used = sorted({node.index for node in postorder(expression) if isinstance(node, Operand)})
        leaves = list(self._leaves)
        return Loops(output, _with_operands(expression, {old: Operand(new) for new, old in enumerate(used)}),
                     tuple(leaves[index] for index in used))  # fmt: skip


def _with_operands(expression: Expr, operands: Mapping[int, Expr]) -> Expr:
    """The expression of other operands, by number."""
    return rewrite(expression, lambda node: operands[node.index] if isinstance(node, Operand) else node)


# ------------------------------------------------------------------------------------------------- operators


def loops_of(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Loops | None:
    """What the operator computes; None if loops do not.

    Args:
        args, kwargs: its arguments, tensors as values.
        result: the value of its result, which may be that of an argument that it overwrites.
    """
    if not isinstance(result, Value) or math.prod(result.shape) == 0 or not _is_whole(result):
        return None
    names = [argument.name for argument in overload._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    body, packet = _Body(), overload.overloadpacket
    try:
        rule = _RULES.get(packet)
        made = _pointwise(body, overload, args, kwargs, result) if rule is None else rule(body, given, result)
        loops = body.loops(result, made)
    except (_Unknown, ops.Rejected, KeyError):
        return None
    if any(
        read.slot is result.slot and (read.index, read.dtype) != (loops.place(), result.dtype) for read in loops.reads
    ):
        return None  # it would read what it has overwritten
    largest = max([math.prod(result.shape), *(read.index.range[1] for read in loops.reads)])
    return loops if largest < LARGEST and _is_computed(loops) else None


def _is_whole(value: Value) -> bool:
    """Whether a result fills its memory, so that elements can be counted as they lie."""
    span = sum((size - 1) * stride for size, stride in zip(value.shape, value.strides, strict=True))
    is_dense = span + 1 == math.prod(value.shape) and not is_overlapping(value.shape, value.strides)
    return is_dense and value.offset % value.dtype.itemsize == 0 and value.slot.kind != "given"


class Inexact(Exception):
    """A kernel would compute in another type than torch does."""


_INTEGER: Final = "int64_t"
_OF_INTEGERS: Final = frozenset({"add", "sub", "mul", "where", "eq", "ne", "lt", "le", "gt", "ge",
                                 "logical_and", "logical_or", "logical_not"})  # fmt: skip
"""Rows whose text is right for integers, too, as torch computes with them."""


def _kind(dtype: torch.dtype) -> str:
    if dtype in RESULT_DTYPES:
        return "float"
    return {torch.bool: "bool", torch.float64: "double"}.get(dtype, _INTEGER)


def _kinds(expression: Expr, leaves: Sequence[Leaf]) -> dict[Expr, str]:
    """float32 stands for all that torch computes in that or in 16 bits, int64 for all integers."""
    kinds: dict[Expr, str] = {}
    for node in postorder(expression):
        match node:
            case Operand(index):
                leaf = leaves[index]
                kinds[node] = _kind(leaf.dtype) if isinstance(leaf, Read) else (
                    "bool" if isinstance(leaf, Inside) else _INTEGER
                )  # fmt: skip
            case Const(value):
                kinds[node] = {bool: "bool", int: _INTEGER}.get(type(value), "float")
            case CallExpr(op, args):
                kinds[node] = _kind_of_call(op, args, kinds)
    return kinds


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
    if op in _OF_INTEGERS and every <= {_INTEGER, "bool"}:
        if every == {"bool"} and op != "where":  # sums of truth values are none
            raise Inexact
        return _INTEGER if _INTEGER in every else "bool"
    return "float"


def _is_computed(loops: Loops) -> bool:
    """Whether a kernel computes it in the type that torch has, or a better one; narrower integers are moved only."""
    try:
        kind, output = loops.kinds[loops.expression], loops.output.dtype
    except Inexact:
        return False
    return kind == _kind(output) and (kind != _INTEGER or output == torch.int64 or loops.only_moves)


def _pointwise(body: _Body, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Value) -> Expr:
    spelling = ops.find_function(overload)
    schema = overload._schema
    if spelling is None or overload._overloadname.endswith("out") or len(schema.returns) != 1:
        raise _Unknown
    if schema.is_mutable and not (spelling.in_place and args[0] is result):
        raise _Unknown
    at = coordinates(result.shape)

    def argument(item: Any) -> Any:
        return body.read(item, at) if isinstance(item, Value) else item

    bound = ops.bind(spelling.row, [*map(argument, args)], {name: argument(item) for name, item in kwargs.items()})
    made = spelling.row.build(*bound)
    rows = [ops.row(node.op) for node in postorder(made) if isinstance(node, CallExpr)]
    if any(row.channel_args or row.in_place_of or row.name in ("type_as", *_CASTS.values()) for row in rows):
        raise _Unknown
    return made


def _cast(body: _Body, value: Any, at: Sequence[Index], dtype: torch.dtype) -> Expr:
    made = body.read(value, at)
    kind = _kind(value.dtype)
    if value.dtype == dtype or (kind == _INTEGER and dtype == torch.int64):
        return made
    if kind == _INTEGER and dtype == torch.bool:
        return CallExpr("ne", (made, Const(0)))
    if kind == "bool" and dtype == torch.int64:
        return CallExpr("where", (made, Const(1), Const(0)))
    if dtype not in _CASTS or value.dtype not in OPERAND_DTYPES:
        raise _Unknown
    return CallExpr(_CASTS[dtype], (made,))


def _copy(body: _Body, given: Mapping[str, Any], result: Value) -> Expr:
    return _cast(body, given["self"], coordinates(result.shape), result.dtype)


def _overwrite(body: _Body, given: Mapping[str, Any], result: Value) -> Expr:
    if given["self"] is not result:
        raise _Unknown
    return _cast(body, given["src"], coordinates(result.shape), result.dtype)


def _range(body: _Body, given: Mapping[str, Any], result: Value) -> Expr:
    start, step = given.get("start", 0), given.get("step", 1)
    if _kind(result.dtype) != _INTEGER or type(start) is not int or type(step) is not int:
        raise _Unknown
    return body.leaf(Position(coordinates(result.shape)[0] * step + start))


def _of_truths(row: str) -> _Rule:
    """What torch computes bit by bit, of truth values."""

    def rule(body: _Body, given: Mapping[str, Any], result: Value) -> Expr:
        values = [given[name] for name in ("self", "other") if name in given]
        if result.dtype != torch.bool or not all(isinstance(v, Value) and v.dtype == torch.bool for v in values):
            raise _Unknown
        at = coordinates(result.shape)
        return CallExpr(row, tuple(body.read(value, at) for value in values))

    return rule


def _number(value: Any, dtype: torch.dtype) -> Const:
    """A number that torch turns into one of that dtype."""
    kind = _kind(dtype)
    if not isinstance(value, bool | int | float) or (kind == _INTEGER and not float(value).is_integer()):
        raise _Unknown
    if kind == "double" and math.isfinite(value) and value != int(value):  # a literal is a float
        raise _Unknown
    return Const({"bool": bool, _INTEGER: int}.get(kind, float)(value))


def _fill(name: str | None, number: float = 0) -> _Rule:
    def rule(body: _Body, given: Mapping[str, Any], result: Value) -> Expr:
        if given.get("self") is result:
            raise _Unknown  # in place: what it overwrites may be read elsewhere
        return _number(number if name is None else given[name], result.dtype)

    return rule


def _concatenation(body: _Body, given: Mapping[str, Any], result: Value) -> Expr:
    tensors = [tensor for tensor in given["tensors"] if tensor.shape != (0,)]
    return _beside(body, tensors, given.get("dim", 0) % len(result.shape), result, None)


def _stack(body: _Body, given: Mapping[str, Any], result: Value) -> Expr:
    dim = given.get("dim", 0) % len(result.shape)
    return _beside(body, given["tensors"], dim, result, 1)


def _beside(body: _Body, tensors: Sequence[Value], dim: int, result: Value, stacked: int | None) -> Expr:
    """Tensors one after the other along a dimension; those that are stacked have none there."""
    at, begin, parts = coordinates(result.shape), 0, []
    for tensor in tensors:
        if tensor.dtype != result.dtype:
            raise _Unknown
        size = tensor.shape[dim] if stacked is None else stacked
        here = Inside(at[dim] - begin, size)
        own = [*at[:dim], *([at[dim] - begin] if stacked is None else []), *at[dim + 1 :]]
        if size:
            parts.append((here, body.read(tensor, own, (here,) if len(tensors) > 1 else ())))
        begin += size
    *first, (_, made) = parts
    for here, part in reversed(first):
        made = body.choose([here], part, made)
    return made


def _padding(body: _Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, pad, at = given["self"], given["pad"], coordinates(result.shape)
    where, own = [], list(at)
    for number, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = len(at) - 1 - number
        own[dim] = at[dim] - before
        if before > 0 or after > 0:
            where.append(Inside(own[dim], x.shape[dim]))
    return body.choose(where, body.read(x, own, tuple(where)), _number(given.get("value", 0), result.dtype))


def _roll(body: _Body, given: Mapping[str, Any], result: Value) -> Expr:
    at, dims = coordinates(result.shape), given.get("dims") or ()
    if not dims:
        raise _Unknown
    for dim, shift in zip(dims, given["shifts"], strict=True):
        size = result.shape[dim]
        at[dim % len(at)] = (at[dim] + (-shift % size)) % size
    return body.read(given["self"], at)


def _flip(body: _Body, given: Mapping[str, Any], result: Value) -> Expr:
    at = coordinates(result.shape)
    for dim in {dim % len(at) for dim in given["dims"]}:
        at[dim] = at[dim] * -1 + (result.shape[dim] - 1)
    return body.read(given["self"], at)


def _repeat(body: _Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, at = given["self"], coordinates(result.shape)
    own = at[len(at) - len(x.shape) :]
    return body.read(x, [one % size for one, size in zip(own, x.shape, strict=True)])


def _chosen(index: Any, at: Sequence[Index], size: int, wraps: bool) -> Index:
    """The integer in an index tensor."""
    if not isinstance(index, Value) or index.dtype not in _INDICES or index.offset % index.dtype.itemsize:
        raise _Unknown
    own = at[len(at) - len(index.shape) :]
    own = [Index() if length == 1 else one for one, length in zip(own, index.shape, strict=True)]
    return element(index.slot, place_of(index, own), index.dtype, size, wraps)


def _index_select(body: _Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, at = given["self"], coordinates(result.shape)
    dim = given["dim"] % len(at)
    at[dim] = _chosen(given["index"], [at[dim]], x.shape[dim], False)
    return body.read(x, at)


def _embedding(body: _Body, given: Mapping[str, Any], result: Value) -> Expr:
    weight, at = given["weight"], coordinates(result.shape)
    return body.read(weight, [_chosen(given["indices"], at[:-1], weight.shape[0], False), at[-1]])


def _gather(body: _Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, at = given["self"], coordinates(result.shape)
    dim = given["dim"] % len(at)
    at[dim] = _chosen(given["index"], list(at), x.shape[dim], False)
    return body.read(x, at)


def _index(body: _Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, indices, at = given["self"], given["indices"], coordinates(result.shape)
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    if not dims or dims != list(range(dims[0], dims[-1] + 1)):  # apart, what they choose comes first
        raise _Unknown
    if not all(isinstance(indices[dim], Value) for dim in dims):
        raise _Unknown
    count = max(len(indices[dim].shape) for dim in dims)
    chosen = at[dims[0] : dims[0] + count]
    own = [_chosen(indices[dim], chosen, x.shape[dim], True) for dim in dims]
    return body.read(x, [*at[: dims[0]], *own, *at[dims[0] + count :]])


def _slice_scatter(body: _Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, source, at = given["self"], given["src"], coordinates(result.shape)
    dim, start, size = given.get("dim", 0) % len(at), given.get("start") or 0, result.shape[given.get("dim", 0)]
    if given.get("step", 1) != 1:
        raise _Unknown
    start = min(max(start + size if start < 0 else start, 0), size)
    here = Inside(at[dim] - start, source.shape[dim])
    own = [*at[:dim], at[dim] - start, *at[dim + 1 :]]
    return body.choose([here], body.read(source, own, (here,)), body.read(x, at))


def _nearest(body: _Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, at = given["self"] if "self" in given else given["input"], coordinates(result.shape)
    scales = [given.get("scales_h"), given.get("scales_w")]
    scales = list(given["scale_factors"]) if given.get("scale_factors") else scales
    for dim, scale in zip((2, 3), scales, strict=True):
        times, left = divmod(result.shape[dim], x.shape[dim])
        if left or scale not in (None, times):
            raise _Unknown
        at[dim] = at[dim] // times
    return body.read(x, at)


def _pixel_shuffle(body: _Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, factor = given["self"], given["upscale_factor"]
    *batch, channel, row, column = coordinates(result.shape)
    channel = channel * (factor * factor) + (row % factor) * factor + column % factor
    return body.read(x, [*batch, channel, row // factor, column // factor])


def _pixel_unshuffle(body: _Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, factor = given["self"], given["downscale_factor"]
    *batch, channel, row, column = coordinates(result.shape)
    row = row * factor + (channel // factor) % factor
    return body.read(x, [*batch, channel // (factor * factor), row, column * factor + channel % factor])


_Rule: TypeAlias = Callable[[_Body, Mapping[str, Any], Value], Expr]
_aten = torch.ops.aten
_RULES: Final[Mapping[Any, _Rule]] = {
    _aten.clone: _copy,
    _aten._to_copy: _copy,
    _aten.copy_: _overwrite,
    _aten.full: _fill("fill_value"),
    _aten.full_like: _fill("fill_value"),
    _aten.new_full: _fill("fill_value"),
    _aten.zeros: _fill(None),
    _aten.zeros_like: _fill(None),
    _aten.new_zeros: _fill(None),
    _aten.ones: _fill(None, 1),
    _aten.ones_like: _fill(None, 1),
    _aten.new_ones: _fill(None, 1),
    _aten.scalar_tensor: _fill("s"),
    _aten.arange: _range,
    _aten.bitwise_and: _of_truths("logical_and"),
    _aten.bitwise_or: _of_truths("logical_or"),
    _aten.bitwise_not: _of_truths("logical_not"),
    _aten.cat: _concatenation,
    _aten.stack: _stack,
    _aten.constant_pad_nd: _padding,
    _aten.roll: _roll,
    _aten.flip: _flip,
    _aten.repeat: _repeat,
    _aten.index_select: _index_select,
    _aten.embedding: _embedding,
    _aten.gather: _gather,
    _aten.index: _index,
    _aten.slice_scatter: _slice_scatter,
    _aten.upsample_nearest2d: _nearest,
    _aten.pixel_shuffle: _pixel_shuffle,
    _aten.pixel_unshuffle: _pixel_unshuffle,
}
"""Operators that move elements; all others are looked for in the table of pointwise operations."""


# -------------------------------------------------------------------------------------- one into the other


def inlined(loops: Loops, producers: Mapping[Slot, Loops]) -> Loops:
    """`loops`, which computes what it reads of some slots instead of reading it.

    Args:
        producers: what fills them; what is read of each has the dtype that it makes.
    """
    body = _Body()
    places: dict[int, Expr] = {}
    for number, leaf in enumerate(loops.leaves):
        producer = producers.get(leaf.slot) if isinstance(leaf, Read) else None
        if producer is None:
            places[number] = body.leaf(leaf)
            continue
        assert isinstance(leaf, Read)
        output = producer.output
        at = _coordinates_at(output, leaf.index - output.offset // output.dtype.itemsize)
        values = {f"c{dim}": index for dim, index in enumerate(at)}
        moved: dict[int, Expr] = {}
        for position, inner in enumerate(producer.leaves):
            if isinstance(inner, Inside):
                moved[position] = body.leaf(Inside(inner.index.substituted(values), inner.size))
            elif isinstance(inner, Position):
                moved[position] = body.leaf(Position(inner.index.substituted(values)))
            else:
                where = tuple(Inside(one.index.substituted(values), one.size) for one in inner.where)
                both = tuple(dict.fromkeys((*leaf.where, *where)))
                moved[position] = body.leaf(Read(inner.slot, inner.dtype, inner.index.substituted(values), both))
        places[number] = _with_operands(producer.expression, moved)
    return body.loops(loops.output, _with_operands(loops.expression, places))


def _coordinates_at(output: Value, place: Index) -> list[Index]:
    """The coordinates of the element that lies there."""
    order = sorted(range(len(output.shape)), key=lambda dim: (-output.strides[dim], output.shape[dim] == 1))
    at, is_first = [Index()] * len(output.shape), True
    for dim in order:
        if output.shape[dim] == 1:
            continue
        at[dim] = place // output.strides[dim]
        if not is_first:  # what is read lies inside, so that the first needs no remainder
            at[dim] = at[dim] % output.shape[dim]
        is_first = False
    return at
