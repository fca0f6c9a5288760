"""torch's operators as loops (loops.py): pointwise ones, those that move elements, and reductions.

A rule makes the expression of an operator's result from its arguments (`_RULES`). Pointwise operators have their row in
the op table (ops.py).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch

from fxfuse import ops
from fxfuse.errors import UnsupportedError
from fxfuse.expression import Acc, Call, Const, Expr, Operand, postorder, rewrite
from fxfuse.layout import contiguous_strides, is_dense, is_overlapping
from fxfuse.pool_places import LARGEST_WINDOW, for_each
from fxfuse.problem import OPERAND_DTYPES, RESULT_DTYPES, Problem, channel_operands, is_thin, settle
from fxfuse.program.indices import Index, dot, element
from fxfuse.program.loops import (
    INTEGER,
    LARGEST,
    MOVED,
    NARROW,
    Body,
    Inexact,
    Inside,
    Into,
    Loops,
    Position,
    Rule,
    Unknown,
    coordinates,
    coordinates_in,
    from_the_left,
    inlined,
    is_apart_or_in_place,
    kind_of,
    place_of,
)
from fxfuse.program.reductions import LAYER_NORM, REDUCTIONS
from fxfuse.program.values import Slot, Value

_INDICES: Final = (torch.int64, torch.int32)
_CASTS: Final = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def loops_of(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Loops | None:
    """The loops that compute an operator; None if loops cannot.

    Args:
        args, kwargs: its arguments. Values stand for tensors. Only tensors that torch made of numbers stay.
        result: the value of its result, which may be that of an argument that it overwrites.
    """
    if isinstance(result, tuple) and result:  # merge.py makes sure that the other results are not read
        result = result[0]
    if not isinstance(result, Value) or math.prod(result.shape) == 0:
        return None
    args, given = _arguments(overload, args, kwargs)
    if _is_whole(result):
        loops = _loops_of_whole(overload, args, kwargs, given, result)
    else:
        loops = _loops_of_part(overload, args, kwargs, result)
    return loops or loops_into(overload, args, kwargs, result)


def _arguments(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The positional arguments, and all arguments by name. Tensors that torch made of numbers are numbers again."""
    args = [arg.item() if isinstance(arg, torch.Tensor) else arg for arg in args]
    names = [argument.name for argument in overload._schema.arguments]
    return args, {**dict(zip(names, args, strict=False)), **kwargs}


def _loops_of_whole(
    overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Mapping[str, Any], result: Value
) -> Loops | None:
    """Loops for a result that fills its memory."""
    body = Body()
    try:
        rule = _RULES.get(overload.overloadpacket)
        made = _pointwise(body, overload, args, kwargs, result) if rule is None else rule(body, given, result)
        loops = body.loops(result, made)
    except (Unknown, ops.Rejected, KeyError):
        return None
    return loops if _is_possible(loops) else None


def _loops_of_part(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Value) -> Loops | None:
    """Loops over the whole memory of which torch overwrites a part: each element is the new one, or unchanged."""
    slot, body = result.slot, Body()
    whole = Value(slot, 0, slot.shape, slot.strides, slot.dtype, slot.name)
    if not overload._schema.is_mutable or slot.dtype != result.dtype or not _is_whole(whole):
        return None
    strides = torch.empty(result.shape, device="meta").stride()
    part, at = Value(Slot("memory", ""), 0, result.shape, strides, result.dtype, ""), coordinates(whole.shape)
    try:
        new = Body()
        if overload.overloadpacket in (_aten.copy_, _aten.fill_):
            value = args[1]
            is_read = isinstance(value, Value)
            made = _cast(new, value, coordinates(part.shape), part.dtype) if is_read else _number(value, part.dtype)
        else:
            made = _pointwise(new, overload, args, kwargs, result)
        of_part = new.loops(part, made)
        own, where = coordinates_in(result, place_of(whole, at), math.prod(whole.shape))
        made = body.choose(where, body.read(part, own, tuple(where)), body.read(whole, at))
    except (Unknown, ops.Rejected, KeyError):
        return None
    loops = inlined(body.loops(whole, made), {part.slot: of_part})
    return loops if _is_possible(loops) else None


def loops_into(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Loops | None:
    """Loops that write only the part of a tensor that an operator writes (`Loops.into`); None if loops cannot."""
    rule = _PARTS.get(overload.overloadpacket)
    if not overload._schema.is_mutable or not isinstance(result, Value):
        return None
    args, given = _arguments(overload, args, kwargs)
    if result.slot.is_apart or result.offset % result.dtype.itemsize:
        return None
    if is_overlapping(result.shape, result.strides) or torch.are_deterministic_algorithms_enabled():
        return None  # where an index is repeated, deterministic torch lets the last one win
    try:
        body = Body()
        if rule is not None:
            shape, order, own, value = rule(given, result)
            at = coordinates(shape)
            made = _cast(body, value, at, result.dtype) if isinstance(value, Value) else _number(value, result.dtype)
        else:  # pointwise
            shape, order, own = result.shape, _order_of(result), coordinates(result.shape)
            made = _pointwise(body, overload, args, kwargs, result)
        if math.prod(shape) == 0:
            return None
        dense = Value(result.slot, 0, shape, _dense_strides(shape, order), result.dtype, result.name)
        loops = body.loops(dense, made, into=Into(result, place_of(result, own)))
    except (Unknown, ops.Rejected, KeyError):
        return None
    if not is_apart_or_in_place(loops) or place_of(result, own).range[1] >= LARGEST:
        return None  # it would read elements that other threads have overwritten
    return loops if _is_possible(loops) else None


def _dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor whose dimensions are in this order in memory, the one of largest stride first."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


_Part: TypeAlias = tuple[tuple[int, ...], Sequence[int], list[Index], Any]
"""A part of a tensor that is written: its shape, its dimensions in the order of memory, the coordinates of each element
in the tensor, and the new elements."""


def _copied_part(given: Mapping[str, Any], result: Value) -> _Part:
    value = given["src"] if "src" in given else given["value"]
    return result.shape, _order_of(result), coordinates(result.shape), value


def _order_of(value: Value) -> list[int]:
    return sorted(range(len(value.shape)), key=lambda dim: -value.strides[dim])


def _copied_rows(given: Mapping[str, Any], result: Value) -> _Part:
    source, dim = given["source"], from_the_left(given["dim"], len(result.shape))
    if not isinstance(source, Value) or len(source.shape) != len(result.shape):
        raise Unknown
    at = coordinates(source.shape)
    own = [*at[:dim], _chosen(given["index"], [at[dim]], result.shape[dim], False), *at[dim + 1 :]]
    return source.shape, _order_of(result), own, source


def _indexed_part(given: Mapping[str, Any], result: Value) -> _Part:
    indices = given["indices"]
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    if given.get("accumulate") or not dims or dims != list(range(dims[0], dims[-1] + 1)):
        raise Unknown
    if not all(isinstance(indices[dim], Value) for dim in dims):
        raise Unknown
    chosen = torch.broadcast_shapes(*(indices[dim].shape for dim in dims))
    shape = (*result.shape[: dims[0]], *chosen, *result.shape[dims[-1] + 1 :])
    at, end = coordinates(shape), dims[0] + len(chosen)
    within = [_chosen(indices[dim], at[dims[0] : end], result.shape[dim], True) for dim in dims]
    return shape, range(len(shape)), [*at[: dims[0]], *within, *at[end:]], given["values"]


def loops_of_chain(problem: Problem, x: Value, operands: Sequence[Value], result: Value) -> Loops | None:
    """The loops of a chain; None if loops cannot compute it."""
    try:
        expression, _ = settle(problem, problem.x.empty())
    except UnsupportedError:
        return None
    return _loops_of_epilogue(expression, lambda body, at: body.read(x, at), operands, result)


def loops_of_pass(expression: Expr, acc: Value, operands: Sequence[Value], result: Value) -> Loops | None:
    """The loops of an epilogue after a library has computed `acc`, perhaps in the result's memory.

    None if loops cannot compute it.
    """
    alike = dataclasses.replace(acc, shape=result.shape, strides=result.strides)
    return _loops_of_epilogue(expression, lambda body, at: body.read(alike, at), operands, result)


def loops_of_layer_norm(
    expression: Expr, given: Mapping[str, Any], operands: Sequence[Value], result: Value
) -> Loops | None:
    """The loops of LayerNorm and an epilogue; None if loops cannot compute them.

    Args:
        given: the arguments of aten's native_layer_norm, by name.
    """
    return _loops_of_epilogue(expression, lambda body, _: LAYER_NORM(body, given, result), operands, result)


def _loops_of_epilogue(
    expression: Expr, acc: Callable[[Body, Sequence[Index]], Expr], operands: Sequence[Value], result: Value
) -> Loops | None:
    """The loops of an epilogue; `acc` makes the expression of acc at given coordinates."""
    last = len(operands)  # acc gets the next number: a chain may read it like an operand
    try:
        whole = rewrite(expression, lambda node: Operand(last) if isinstance(node, Acc) else node)
        along_channels = channel_operands(whole)
        body, at = Body(), coordinates(result.shape)

        def leaf(node: Expr) -> Expr:
            if not isinstance(node, Operand):
                return node
            own = (at[1:2] or [Index()]) if node.index in along_channels else at
            return acc(body, own) if node.index == last else body.read(operands[node.index], own)

        loops = body.loops(result, rewrite(whole, leaf))
    except (Unknown, UnsupportedError):
        return None
    return loops if _is_whole(result) and _is_possible(loops) else None


def _is_possible(loops: Loops) -> bool:
    """Whether a kernel can compute these loops as torch does."""
    output = loops.output
    place = loops.place() if loops.into is None else loops.into.place
    if output.dtype not in MOVED:
        return False
    if any(read.slot is output.slot and (read.index, read.dtype) != (place, output.dtype) for read in loops.reads):
        return False  # it would read elements that it has overwritten
    largest = max([math.prod(output.shape), *(read.index.range[1] for read in loops.reads)])
    return largest < LARGEST and _is_computed(loops)


def _is_whole(value: Value) -> bool:
    """Whether a result fills its memory, so that loops can go over it in the order of memory."""
    in_own_memory = value.slot.kind != "given" and not value.slot.is_apart
    return in_own_memory and value.offset % value.dtype.itemsize == 0 and is_dense(value.shape, value.strides)


def _is_computed(loops: Loops) -> bool:
    """Whether a kernel computes in torch's type, or a more exact one."""
    try:
        kind, output = loops.kinds[loops.expression], loops.output.dtype
    except Inexact:
        return False
    if (INTEGER if kind == NARROW else kind) != kind_of(output):
        return False
    may_wrap = kind_of(output) == INTEGER and output != torch.int64
    return not may_wrap or loops.only_moves or _is_chosen(loops.expression, torch.iinfo(output).max)


def _is_chosen(expression: Expr, most: int) -> bool:
    """Whether a value is one of several constants from 0 to `most`. A kernel may compute it as a wider integer."""
    if isinstance(expression, Call) and expression.op == "where":
        return all(_is_chosen(one, most) for one in expression.args[1:])
    return isinstance(expression, Const) and type(expression.value) is int and 0 <= expression.value <= most


def _pointwise(body: Body, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Value) -> Expr:
    """The expression of a pointwise operator, from its row of the op table. Raises Unknown."""
    spelling = ops.find_function(overload)
    schema = overload._schema
    if spelling is None or overload._overloadname.endswith("out") or len(schema.returns) != 1:
        raise Unknown
    if schema.is_mutable and not (spelling.in_place and args[0] is result):
        raise Unknown
    at = coordinates(result.shape)
    halves: set[Expr] = set()

    def argument(item: Any) -> Any:
        if not isinstance(item, Value):
            return item
        read = body.read(item, at)
        if item.dtype == torch.float16:
            halves.add(read)
        return read

    bound = ops.bind(spelling.row, [*map(argument, args)], {name: argument(item) for name, item in kwargs.items()})
    made = spelling.row.build(*bound)
    rows = [ops.row(node.op) for node in postorder(made) if isinstance(node, Call)]
    if any(row.channel_args or row.in_place_of or row.name in ("type_as", *_CASTS.values()) for row in rows):
        raise Unknown
    if halves:
        made = rewrite(made, lambda node: _with_overflow(node, halves))
    if result.dtype == torch.bool and isinstance(made, Call):  # products and sums of truth values
        made = Call({"mul": "logical_and", "add": "logical_or"}.get(made.op, made.op), made.args)
    return rewrite(made, _of_integers) if kind_of(result.dtype) == INTEGER else made


def _with_overflow(node: Expr, halves: Collection[Expr]) -> Expr:
    """A question for infinities or NaN, about float16 values as they are in memory, not as a kernel computed them."""
    if not isinstance(node, Call) or not ops.asks_for_overflow(node):
        return node
    return Call(node.op, tuple(Call("float16", (arg,)) if arg in halves else arg for arg in node.args))


def _of_integers(node: Expr) -> Expr:
    """The same node for integers, by rows of the op table whose C++ text is right for integers."""
    match node:
        case Call("minimum" | "clamp_max", (a, b)):
            return Call("where", (Call("lt", (a, b)), a, b))
        case Call("maximum" | "clamp_min", (a, b)):
            return Call("where", (Call("gt", (a, b)), a, b))
        case Call("clamp", (x, low, high)):
            return _of_integers(Call("minimum", (_of_integers(Call("maximum", (x, low))), high)))
        case Call("neg", (x,)):
            return Call("sub", (Const(0), x))
        case Call("abs", (x,)):
            return Call("where", (Call("lt", (x, Const(0))), Call("sub", (Const(0), x)), x))
    return node


def _cast(body: Body, value: Any, at: Sequence[Index], dtype: torch.dtype) -> Expr:
    """value[at] converted to a dtype. Raises Unknown."""
    made = body.read(value, at)
    kind = kind_of(value.dtype)
    if value.dtype == dtype or (kind == INTEGER and dtype == torch.int64):
        return made
    if kind in (INTEGER, "float") and dtype == torch.bool:
        return Call("ne", (made, Const(0) if kind == INTEGER else Const(0.0)))
    if kind == "bool" and kind_of(dtype) == INTEGER:
        return Call("where", (made, Const(1), Const(0)))
    if kind == "float" and dtype == torch.int64:  # of the value as it is in memory, not as a kernel computed it
        return Call("int64", (Call(_CASTS[value.dtype], (made,)),))
    if dtype not in _CASTS or value.dtype not in OPERAND_DTYPES:
        raise Unknown
    return Call(_CASTS[dtype], (made,))


def _copy(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    return _cast(body, given["self"], coordinates(result.shape), result.dtype)


def _overwrite(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    if given["self"] is not result:
        raise Unknown
    return _replaced(body, given, result)


def _replaced(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    return _cast(body, given["src"], coordinates(result.shape), result.dtype)


def _range(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    start, step = given.get("start", 0), given.get("step", 1)
    if kind_of(result.dtype) != INTEGER or type(start) is not int or type(step) is not int:
        raise Unknown
    return body.leaf(Position(coordinates(result.shape)[0] * step + start))


def _of_truths(row: str) -> Rule:
    """The rule of a bitwise operator on truth values."""

    def rule(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
        values = [given[name] for name in ("self", "other") if name in given]
        if result.dtype != torch.bool or not all(isinstance(v, Value) and v.dtype == torch.bool for v in values):
            raise Unknown
        at = coordinates(result.shape)
        return Call(row, tuple(body.read(value, at) for value in values))

    return rule


def _number(value: Any, dtype: torch.dtype) -> Const:
    """A number as torch converts it to a dtype. Raises Unknown."""
    kind = kind_of(dtype)
    if not isinstance(value, bool | int | float) or (kind == INTEGER and not float(value).is_integer()):
        raise Unknown
    if kind == "double" and math.isfinite(value) and value != int(value):  # literals in kernels are floats
        raise Unknown
    return Const({"bool": bool, INTEGER: int}.get(kind, float)(value))


def _fill(name: str | None, number: float = 0) -> Rule:
    """The rule of an operator that fills its result with a number: the argument `name`, or `number` if that is None."""

    def rule(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
        if given.get("self") is result:
            raise Unknown  # in place: the overwritten values may be read elsewhere
        return _number(number if name is None else given[name], result.dtype)

    return rule


def _concatenation(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    tensors = [tensor for tensor in given["tensors"] if tensor.shape != (0,)]
    return _beside(body, tensors, from_the_left(given.get("dim", 0), len(result.shape)), result, None)


def _stack(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    dim = from_the_left(given.get("dim", 0), len(result.shape))
    return _beside(body, given["tensors"], dim, result, 1)


def _beside(body: Body, tensors: Sequence[Value], dim: int, result: Value, stacked: int | None) -> Expr:
    """Concatenates tensors along a dimension. With `stacked` (1) the tensors themselves do not have this dimension."""
    at, begin, parts = coordinates(result.shape), 0, []
    for tensor in tensors:
        if tensor.dtype != result.dtype:
            raise Unknown
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


def _padding(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, pad, at = given["self"], given["pad"], coordinates(result.shape)
    where, own = [], list(at)
    for number, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = len(at) - 1 - number
        own[dim] = at[dim] - before
        if before > 0 or after > 0:
            where.append(Inside(own[dim], x.shape[dim]))
    return body.choose(where, body.read(x, own, tuple(where)), _number(given.get("value", 0), result.dtype))


def _roll(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    at, dims = coordinates(result.shape), given.get("dims") or ()
    if not dims:
        raise Unknown
    for dim, shift in zip(dims, given["shifts"], strict=True):
        size = result.shape[dim]
        at[from_the_left(dim, len(at))] = (at[dim] + (-shift % size)) % size
    return body.read(given["self"], at)


def _flip(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    at = coordinates(result.shape)
    for dim in {from_the_left(dim, len(at)) for dim in given["dims"]}:
        at[dim] = at[dim] * -1 + (result.shape[dim] - 1)
    return body.read(given["self"], at)


def _glu(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, at = given["self"], coordinates(result.shape)
    dim = from_the_left(given.get("dim", -1), len(at))
    gate = [*at[:dim], at[dim] + result.shape[dim], *at[dim + 1 :]]
    return Call("mul", (body.read(x, at), Call("sigmoid", (body.read(x, gate),))))


def _prelu(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    at = coordinates(result.shape)
    x, weight = body.read(given["self"], at), body.read(given["weight"], at)
    return Call("where", (Call("gt", (x, Const(0.0))), x, Call("mul", (weight, x))))


def _nan_to_num(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, read = given["self"], body.read(given["self"], coordinates(result.shape))
    if kind_of(result.dtype) != "float":
        raise Unknown
    seen = Call("float16", (read,)) if x.dtype == torch.float16 else read
    limits = torch.finfo(result.dtype)
    made = seen
    for name, default, asked in (
        ("neginf", limits.min, Call("eq", (seen, Const(-math.inf)))),
        ("posinf", limits.max, Call("eq", (seen, Const(math.inf)))),
        ("nan", 0.0, Call("isnan", (seen,))),
    ):
        number = given.get(name)
        made = Call("where", (asked, _number(default if number is None else number, result.dtype), made))
    return made


def _repeat(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, at = given["self"], coordinates(result.shape)
    own = at[len(at) - len(x.shape) :]
    return body.read(x, [one % size for one, size in zip(own, x.shape, strict=True)])


def _chosen(index: Any, at: Sequence[Index], size: int, wraps: bool) -> Index:
    """The integer in an index tensor at `at`, as an index into a dimension of this size. Raises Unknown."""
    if not isinstance(index, Value) or index.dtype not in _INDICES or index.offset % index.dtype.itemsize:
        raise Unknown
    if index.slot.is_apart:
        raise Unknown
    own = at[len(at) - len(index.shape) :]
    own = [Index() if length == 1 else one for one, length in zip(own, index.shape, strict=True)]
    return element(index.slot, place_of(index, own), index.dtype, size, wraps)


def _index_select(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, at = given["self"], coordinates(result.shape)
    dim = from_the_left(given["dim"], min(len(at), len(x.shape)))
    at[dim] = _chosen(given["index"], [at[dim]], x.shape[dim], False)
    return body.read(x, at)


def _embedding(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    weight, at = given["weight"], coordinates(result.shape)
    return body.read(weight, [_chosen(given["indices"], at[:-1], weight.shape[0], False), at[-1]])


def _gather(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, at = given["self"], coordinates(result.shape)
    dim = from_the_left(given["dim"], min(len(at), len(x.shape)))
    at[dim] = _chosen(given["index"], list(at), x.shape[dim], False)
    return body.read(x, at)


def _index(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, indices, at = given["self"], given["indices"], coordinates(result.shape)
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    if not dims or dims != list(range(dims[0], dims[-1] + 1)):  # not adjacent: torch puts the chosen dimensions first
        raise Unknown
    if not all(isinstance(indices[dim], Value) for dim in dims):
        raise Unknown
    count = max(len(indices[dim].shape) for dim in dims)
    chosen = at[dims[0] : dims[0] + count]
    own = [_chosen(indices[dim], chosen, x.shape[dim], True) for dim in dims]
    return body.read(x, [*at[: dims[0]], *own, *at[dims[0] + count :]])


def _index_put(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    """Writes one value wherever a mask is true. torch would count such elements, and wait for the count."""
    x, value, at = given["self"], given["values"], coordinates(result.shape)
    mask, *others = given["indices"]
    if others or not isinstance(mask, Value) or mask.dtype != torch.bool or given.get("accumulate"):
        raise Unknown
    if isinstance(value, Value):
        own = at[len(mask.shape) :]
        if len(value.shape) > len(own) and value.shape[0] == 1:
            value = dataclasses.replace(value, shape=value.shape[1:], strides=value.strides[1:])
        if len(value.shape) > len(own) or value.dtype != result.dtype:
            raise Unknown  # a different value for each element
        put = body.read(value, own)
    else:
        put = _number(value, result.dtype)
    return Call("where", (body.read(mask, at[: len(mask.shape)]), put, body.read(x, at)))


def _triangle(row: str) -> Rule:
    """The rule of tril and triu: elements on one side of a diagonal, and zeros elsewhere."""

    def rule(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
        at = coordinates(result.shape)
        places = [body.leaf(Position(one)) for one in (at[-1], at[-2] + given.get("diagonal", 0))]
        return Call("where", (Call(row, tuple(places)), body.read(given["self"], at), _number(0, result.dtype)))

    return rule


def _slice_scatter(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, source, at = given["self"], given["src"], coordinates(result.shape)
    dim = from_the_left(given.get("dim", 0), len(at))
    start, step, size = given.get("start") or 0, given.get("step", 1), result.shape[dim]
    start = min(max(start + size if start < 0 else start, 0), size)
    place = at[dim] // step - start // step
    here = [Inside(place, source.shape[dim])]
    if step > 1:
        here.append(Inside(at[dim] % step - start % step, 1))
    own = [*at[:dim], place, *at[dim + 1 :]]
    return body.choose(here, body.read(source, own, tuple(here)), body.read(x, at))


def _select_scatter(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, source, at = given["self"], given["src"], coordinates(result.shape)
    dim = from_the_left(given["dim"], len(at))
    here = Inside(at[dim] - given["index"] % result.shape[dim], 1)
    return body.choose([here], body.read(source, [*at[:dim], *at[dim + 1 :]], (here,)), body.read(x, at))


def _scales(given: Mapping[str, Any], rank: int) -> Sequence[float | None]:
    """The scale of each dimension that a resampling operator is given; None if it follows from the sizes."""
    if given.get("scale_factors"):
        return list(given["scale_factors"])
    return [given.get(name) for name in (["scales"] if rank == 1 else ["scales_d", "scales_h", "scales_w"][-rank:])]


def _nearest(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    """Each element several times. Where the sizes are no multiples, torch's rounding decides which are near."""
    x, at = given["self"] if "self" in given else given["input"], coordinates(result.shape)
    for dim, scale in enumerate(_scales(given, len(at) - 2), 2):
        times, left = divmod(result.shape[dim], x.shape[dim])
        if left or scale not in (None, times):
            raise Unknown
        at[dim] = at[dim] // times
    return body.read(x, at)


def _linear(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    """Interpolation between the nearest two elements along each dimension. Positions are fractions of integers."""
    x, at = given["self"] if "self" in given else given["input"], coordinates(result.shape)
    if not isinstance(x, Value) or kind_of(x.dtype) != "float":
        raise Unknown
    ways = []
    for dim, scale in enumerate(_scales(given, len(at) - 2), 2):
        size, length = x.shape[dim], result.shape[dim]
        if scale is not None and scale * size != length and not given["align_corners"]:
            raise Unknown
        place, by = (at[dim] * 2 + 1) * size - length, 2 * length  # the centres of pixels are aligned
        if given["align_corners"]:
            place, by = at[dim] * (size - 1), max(1, length - 1)
        before, share = place // by, body.leaf(Position(place % by))
        share = Call("mul", (share, Call("reciprocal", (body.leaf(Position(Index() + by)),))))
        both = [Inside(before, size), Inside(before + 1, size)]  # at the border only one of them exists
        share = body.choose(both[1:], body.choose(both[:1], share, Const(1.0)), Const(0.0))
        ways.append([(both[0], Call("sub", (Const(1.0), share))), (both[1], share)])
    parts: list[Expr] = []
    for where in itertools.product(*ways):
        places, shares = tuple(one for one, _ in where), [share for _, share in where]
        read = body.read(x, [*at[:2], *(one.index for one in places)], places)
        parts.append(Call("mul", (body.choose(places, read, Const(0.0)), _joined("mul", shares))))
    return _joined("add", parts)


def _pixel_shuffle(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, factor = given["self"], given["upscale_factor"]
    *batch, channel, row, column = coordinates(result.shape)
    channel = channel * (factor * factor) + (row % factor) * factor + column % factor
    return body.read(x, [*batch, channel, row // factor, column // factor])


def _pixel_unshuffle(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, factor = given["self"], given["downscale_factor"]
    *batch, channel, row, column = coordinates(result.shape)
    row = row * factor + (channel // factor) % factor
    return body.read(x, [*batch, channel // (factor * factor), row, column * factor + channel % factor])


def _window(
    body: Body, x: Any, result: Value, sides: Sequence[int], steps: Sequence[int], around: Sequence[int],
    apart: Sequence[int], outside: float,
) -> list[tuple[tuple[Inside, ...], Expr]]:  # fmt: skip
    """The elements of a window of x, each with the conditions under which it exists. Elsewhere it is `outside`.

    Args:
        sides: the window's sizes.
        steps: its strides.
        around: the padding.
        apart: the dilation.
    """
    if not isinstance(x, Value) or kind_of(x.dtype) != "float" or math.prod(sides) > LARGEST_WINDOW:
        raise Unknown
    rank, at = len(sides), coordinates(result.shape)
    starts = [one * step - pad for one, step, pad in zip(at[-rank:], steps, around, strict=True)]
    found = []
    for offsets in itertools.product(*map(range, sides)):
        own = [start + offset * step for start, offset, step in zip(starts, offsets, apart, strict=True)]
        places = [Inside(one, size) for one, size in zip(own, x.shape[-rank:], strict=True)]
        where = _needed(*places)
        found.append((where, body.choose(where, body.read(x, [*at[:-rank], *own], where), Const(outside))))
    return found


def _unfold(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    """torch's im2col: the windows of images as columns.

    One dimension is over channels, rows and columns of a window, the other over windows.
    """
    x, (height, width) = given["self"], given["kernel_size"]
    *batch, row, window = coordinates(result.shape)
    across = _windows_along(x.shape[-1], width, given, 1)
    places = [
        (window // across) * given["stride"][0] + (row // width % height) * given["dilation"][0] - given["padding"][0],
        (window % across) * given["stride"][1] + (row % width) * given["dilation"][1] - given["padding"][1],
    ]
    where = tuple(Inside(one, size) for one, size in zip(places, x.shape[-2:], strict=True))
    read = body.read(x, [*batch, row // (height * width), *places], where)
    return body.choose(where, read, _number(0, result.dtype))


def _fold(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    """torch's col2im: each pixel is the sum of all windows' elements that lie on it.

    A window begins every `stride` pixels, so only ceil(side / stride) windows per dimension lie on a pixel.
    """
    x, sides, steps = given["self"], given["kernel_size"], given["stride"]
    counts = [-(-side // step) for side, step in zip(sides, steps, strict=True)]
    if kind_of(x.dtype) != "float" or tuple(given["dilation"]) != (1, 1) or math.prod(counts) > LARGEST_WINDOW:
        raise Unknown
    *batch, channel, row, column = coordinates(result.shape)
    windows = [_windows_along(result.shape[dim - 2], sides[dim], given, dim) for dim in range(2)]
    starts = [pixel + pad for pixel, pad in zip((row, column), given["padding"], strict=True)]
    parts = []
    for backwards in itertools.product(*map(range, counts)):
        at = [start // step - back for start, step, back in zip(starts, steps, backwards, strict=True)]
        within = [start % step + step * back for start, step, back in zip(starts, steps, backwards, strict=True)]
        where = tuple(Inside(*one) for one in zip([*at, *within], [*windows, *sides], strict=True))
        place = (channel * sides[0] + within[0]) * sides[1] + within[1]
        read = body.read(x, [*batch, place, at[0] * windows[1] + at[1]], where)
        parts.append(body.choose(where, read, Const(0.0)))
    return _joined("add", parts)


def _windows_along(size: int, side: int, given: Mapping[str, Any], dim: int) -> int:
    """The number of windows along a dimension of an image."""
    reach = given["dilation"][dim] * (side - 1) + 1
    return int((size + 2 * given["padding"][dim] - reach) // given["stride"][dim] + 1)


def _numbers(given: Mapping[str, Any], name: str, rank: int, default: Sequence[int]) -> Sequence[int]:
    """An argument with a number for each dimension of images (`for_each`)."""
    return for_each(given.get(name) or default, rank)


def _avg_pool(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, rank = given["self"], len(given["kernel_size"])
    sides, around = given["kernel_size"], _numbers(given, "padding", rank, (0,))
    steps = _numbers(given, "stride", rank, sides)
    if not _end_within(result, x, sides, steps, around):
        raise Unknown
    parts = _window(body, x, result, sides, steps, around, (1,) * rank, 0.0)
    count: Expr = Const(float(given.get("divisor_override") or math.prod(sides)))
    if given.get("divisor_override") is None and not given.get("count_include_pad", True):
        count = _joined("add", [body.choose(where, Const(1.0), Const(0.0)) for where, _ in parts])
    return Call("div", (_joined("add", [part for _, part in parts]), count))


def _adaptive_avg_pool(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    x = given["self"]
    sizes = list(zip(x.shape[-2:], result.shape[-2:], strict=True))
    if any(size % count for size, count in sizes):
        raise Unknown
    sides = [size // count for size, count in sizes]
    return _avg_pool(body, {"self": x, "kernel_size": sides}, result)


def _max_pool(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    return _joined("maximum", [part for _, part in _pooled(body, given, result)])


def _pooled(body: Body, given: Mapping[str, Any], result: Value) -> list[tuple[tuple[Inside, ...], Expr]]:
    """The elements of a window that is pooled, as `_window` returns them."""
    sides = given["kernel_size"]
    rank = len(sides)
    around, apart = (_numbers(given, name, rank, (one,)) for name, one in (("padding", 0), ("dilation", 1)))
    steps = _numbers(given, "stride", rank, sides)
    return _window(body, given["self"], result, sides, steps, around, apart, -math.inf)


def _max_pool_places(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    """The places of largest elements (pool_places.py)."""
    parts = _pooled(body, given, result)
    place: Expr = Const(0)
    for number, (where, _) in reversed(list(enumerate(parts))):
        place = body.choose(where, Const(number), place)  # the first that exists, if none is larger than -inf
    largest = parts[0][1]
    for number, (_, part) in enumerate(parts[1:], 1):
        for is_taken in (Call("gt", (part, largest)), Call("ne", (part, part))):  # one by one: see maximum in math.h
            place = Call("where", (is_taken, Const(number), place))
        largest = Call("maximum", (largest, part))
    return place


def _windows_at(
    of_windows: Any, at: Sequence[Index], sides: Sequence[int], steps: Sequence[int], around: Sequence[int]
) -> list[tuple[list[Index], list[Index], tuple[Inside, ...]]]:
    """The windows that a pixel lies in. For each: its coordinates, the pixel's coordinates in it, and the conditions
    under which there is such a window."""
    rank, along = len(sides), []
    for one, side, step, pad, size in zip(at[-rank:], sides, steps, around, of_windows.shape[-rank:], strict=True):
        last, offset = (one + pad) // step, (one + pad) % step
        ways = [(last - back, offset + back * step) for back in range(-(-side // step))]
        along.append([(place, within, _needed(Inside(place, size), Inside(within, side))) for place, within in ways])
    if math.prod(map(len, along)) > LARGEST_WINDOW:
        raise Unknown
    return [
        (
            [*at[:-rank], *(place for place, _, _ in chosen)],
            [within for _, within, _ in chosen],
            tuple(one for _, _, where in chosen for one in where),
        )
        for chosen in itertools.product(*along)
    ]


def _needed(*conditions: Inside) -> tuple[Inside, ...]:
    """The conditions that may fail."""
    return tuple(one for one in conditions if one.index.range[0] < 0 or one.index.range[1] >= one.size)


def _max_pool_gradient(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    """The gradient of each window goes to the pixel at the window's place (pool_places.py)."""
    gradient, places, sides = given["gradient"], given["places"], given["kernel_size"]
    if kind_of(gradient.dtype) != "float":
        raise Unknown
    parts = []
    at = coordinates(result.shape)
    for window, within, where in _windows_at(gradient, at, sides, given["stride"], given["padding"]):
        own = body.leaf(Position(dot(within, contiguous_strides(sides))))
        is_largest = Call("eq", (body.read(places, window, where), own))
        part = Call("where", (is_largest, body.read(gradient, window, where), Const(0.0)))
        parts.append(body.choose(where, part, Const(0.0)))
    return _joined("add", parts)


def _avg_pool_backward(rank: int) -> Rule:
    """The rule of average pooling's gradient."""

    def rule(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
        gradient, divisor = given["grad_output"], given.get("divisor_override")
        sides, around = (_numbers(given, name, rank, (0,)) for name in ("kernel_size", "padding"))
        steps = _numbers(given, "stride", rank, sides)
        if not _end_within(gradient, result, sides, steps, around):
            raise Unknown
        counts_all = divisor is not None or given["count_include_pad"] or not any(around)
        count = Const(float(math.prod(sides) if divisor is None else divisor))
        parts = []
        for window, _, where in _windows_at(gradient, coordinates(result.shape), sides, steps, around):
            part: Expr = body.read(gradient, window, where)
            if not counts_all:
                part = Call("div", (part, _pixels_in(body, window, result, sides, steps, around)))
            parts.append(body.choose(where, part, Const(0.0)))
        total = _joined("add", parts)
        return Call("div", (total, count)) if counts_all else total

    return rule


def _pixels_in(
    body: Body, window: Sequence[Index], image: Value, sides: Sequence[int], steps: Sequence[int], around: Sequence[int]
) -> Expr:
    """How many of a window's pixels lie in the image."""
    rank, along = len(sides), []
    for place, side, step, pad, size in zip(window[-rank:], sides, steps, around, image.shape[-rank:], strict=True):
        wheres = [_needed(Inside(place * step + (at - pad), size)) for at in range(side)]
        along.append(_joined("add", [body.choose(where, Const(1.0), Const(0.0)) for where in wheres]))
    return _joined("mul", along)


def _adaptive_avg_pool_backward(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    gradient = given["grad_output"]
    sizes = list(zip(result.shape[-2:], gradient.shape[-2:], strict=True))
    if any(size % count for size, count in sizes):
        raise Unknown
    sides = [size // count for size, count in sizes]
    whole = {"grad_output": gradient, "kernel_size": sides, "count_include_pad": True}
    return _avg_pool_backward(2)(body, whole, result)


def _end_within(
    windows: Value, image: Value, sides: Sequence[int], steps: Sequence[int], around: Sequence[int]
) -> bool:
    """Whether no window ends beyond an image's padding. torch divides the sums of such windows by fewer elements."""
    rank = len(sides)
    sizes = zip(windows.shape[-rank:], steps, sides, image.shape[-rank:], around, strict=True)
    return all((count - 1) * step + side <= size + 2 * pad for count, step, side, size, pad in sizes)


def _product(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    """A product of matrices that is small (positions by frequencies, tables of relative positions) or thin (between the
    heads of attention)."""
    a, b = given["self"], given["mat2"]
    terms = a.shape[-1] if isinstance(a, Value) else 0
    is_small = 0 < terms <= LARGEST_WINDOW and terms * math.prod(result.shape) <= SMALL_PRODUCT
    return _sums(body, a, b, result) if is_small else _thin(body, a, b, result)


def _added_product(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    """A thin product, to which something is added."""
    if given.get("beta", 1) != 1 or given.get("alpha", 1) != 1:
        raise Unknown
    a, b = (given.get(f"mat{n}", given.get(f"batch{n}")) for n in (1, 2))
    return Call("add", (body.read(given["self"], coordinates(result.shape)), _thin(body, a, b, result)))


def _thin(body: Body, a: Any, b: Any, result: Value) -> Expr:
    if not isinstance(a, Value) or not is_thin(a.shape[-1], min(result.shape[-2:])):
        raise Unknown
    return _sums(body, a, b, result)


def _sums(body: Body, a: Value, b: Any, result: Value) -> Expr:
    """The sums of a product, term by term."""
    if not isinstance(b, Value) or a.dtype not in RESULT_DTYPES:
        raise Unknown
    *batch, row, column = coordinates(result.shape)
    steps = [Index() + step for step in range(a.shape[-1])]
    return _joined(
        "add",
        [Call("mul", (body.read(a, [*batch, row, k]), body.read(b, [*batch, k, column]))) for k in steps],
    )


def _joined(row: str, parts: Sequence[Expr]) -> Expr:
    """All parts, joined by a binary row of the op table."""
    return functools.reduce(lambda total, part: Call(row, (total, part)), parts)


SMALL_PRODUCT: Final = 2**22
"""The most terms of a product, in all its sums together. With more terms, a library's kernel takes more than a
microsecond, and is as quick."""


_aten = torch.ops.aten
_RULES: Final[Mapping[Any, Rule]] = {
    _aten.clone: _copy,
    _aten._to_copy: _copy,
    _aten.copy_: _overwrite,
    _aten.copy: _replaced,
    _aten.full: _fill("fill_value"),
    _aten.full_like: _fill("fill_value"),
    _aten.fill: _fill("value"),
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
    _aten.glu: _glu,
    _aten._prelu_kernel: _prelu,
    _aten.nan_to_num: _nan_to_num,
    _aten.repeat: _repeat,
    _aten.index_select: _index_select,
    _aten.embedding: _embedding,
    _aten.gather: _gather,
    _aten.index: _index,
    _aten.index_put: _index_put,
    _aten.index_put_: _index_put,
    _aten.slice_scatter: _slice_scatter,
    _aten.select_scatter: _select_scatter,
    _aten.tril: _triangle("le"),
    _aten.triu: _triangle("ge"),
    _aten.avg_pool1d: _avg_pool,
    _aten.avg_pool2d: _avg_pool,
    _aten.avg_pool3d: _avg_pool,
    _aten._adaptive_avg_pool2d: _adaptive_avg_pool,
    _aten.max_pool2d_with_indices: _max_pool,
    _aten.max_pool3d_with_indices: _max_pool,
    torch.ops.fxfuse.max_pool_places: _max_pool_places,
    torch.ops.fxfuse.max_pool_gradient: _max_pool_gradient,
    _aten.avg_pool2d_backward: _avg_pool_backward(2),
    _aten.avg_pool3d_backward: _avg_pool_backward(3),
    _aten._adaptive_avg_pool2d_backward: _adaptive_avg_pool_backward,
    _aten.im2col: _unfold,
    _aten.col2im: _fold,
    _aten.upsample_nearest1d: _nearest,
    _aten.upsample_nearest2d: _nearest,
    _aten.upsample_nearest3d: _nearest,
    _aten._upsample_nearest_exact1d: _nearest,
    _aten._upsample_nearest_exact2d: _nearest,
    _aten._upsample_nearest_exact3d: _nearest,
    _aten.upsample_linear1d: _linear,
    _aten.upsample_bilinear2d: _linear,
    _aten.upsample_trilinear3d: _linear,
    _aten.mm: _product,
    _aten.bmm: _product,
    _aten.addmm: _added_product,
    _aten.baddbmm: _added_product,
    _aten.pixel_shuffle: _pixel_shuffle,
    _aten.pixel_unshuffle: _pixel_unshuffle,
    **REDUCTIONS,
}
"""Rules of operators that are not pointwise. All others are looked up in the op table."""

_PARTS: Final[Mapping[Any, Callable[[Mapping[str, Any], Value], _Part]]] = {
    _aten.copy_: _copied_part,
    _aten.fill_: _copied_part,
    _aten.index_copy_: _copied_rows,
    _aten.index_put_: _indexed_part,
}
"""Operators that write into a part of an existing tensor, and what they write."""
