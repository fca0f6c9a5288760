"""Rules for operators that reduce rows, by sum or maximum: softmax, means, sums, norms and normalisations.

Reductions are in float32, as torch's are. Squared deviations are summed in a second pass over the row, so that nothing
cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

import fxfuse.group_norms  # noqa: F401 - defines an operator that is a key below
from fxfuse.expression import Call, Const, Expr
from fxfuse.problem import RESULT_DTYPES
from fxfuse.program.indices import Index, variable
from fxfuse.program.loops import Body, Position, Rule, Unknown, coordinates, row_variable
from fxfuse.program.values import Value

LONGEST: Final = 2**15
"""The most elements of a row. One thread block reduces a row."""

Place = Callable[[Index], list[Index]]
"""place(index): the coordinates, in a tensor, of the element of a row with this index."""


class _Row:
    """The row of a tensor that belongs to an element of a result."""

    def __init__(self, x: Any, size: int, place: Place) -> None:
        if not isinstance(x, Value) or x.dtype not in RESULT_DTYPES or not 1 <= size <= LONGEST:
            raise Unknown
        self.size = size
        self._x, self._place = x, place

    def element(self, body: Body, at: Index) -> Expr:
        return body.read(self._x, self._place(at))

    def reduced(self, body: Body, op: str, made: Callable[[Body, Expr], Expr], height: int = 0) -> Expr:
        """The reduction of `made(body, element)` over all elements of the row.

        Args:
            op: "sum" or "max".
            height: how many levels of reductions are nested inside `made`.
        """
        if self.size == 1:
            return made(body, self.element(body, Index()))
        over = row_variable(height, self.size)
        return body.reduce(op, over, lambda inner: made(inner, self.element(inner, variable(over.name, over.size))))

    def greatest(self, body: Body) -> Expr:
        return self.reduced(body, "max", lambda _, x: x)

    def mean(self, body: Body) -> Expr:
        # Not by _over: the compiler may contract a product with what is added to it, in one place and not in another,
        # and deviations must be from the same number everywhere. Where all elements are one 16-bit number, their sum is
        # exact, so that the quotient is this number.
        total = self.reduced(body, "sum", lambda _, x: x)
        return Call("div", (total, body.leaf(Position(Index() + self.size))))

    def squares(self, body: Body) -> Expr:
        return self.reduced(body, "sum", lambda _, x: Call("mul", (x, x)))

    def deviations(self, body: Body) -> Expr:
        """The sum of the squared deviations from the mean."""

        def square(inner: Body, x: Expr) -> Expr:
            left = Call("sub", (x, self.mean(inner)))
            return Call("mul", (left, left))

        return self.reduced(body, "sum", square, 1)

    def normalised(self, body: Body, x: Expr, eps: float) -> Expr:
        variance = _over(body, self.deviations(body), self.size)
        return Call("mul", (Call("sub", (x, self.mean(body))), _inverse_root(variance, eps)))


def _over(body: Body, total: Expr, count: int) -> Expr:
    """total / count, as total * (1 / count): as torch does on a GPU, with one division for all rows of a thread.

    The count is an argument of the kernel, so rows of different lengths share the kernel.
    """
    return Call("mul", (total, Call("reciprocal", (body.leaf(Position(Index() + count)),))))


def _inverse_root(x: Expr, eps: float) -> Expr:
    return Call("rsqrt", (Call("add", (x, Const(float(eps)))),))


def _row_along(x: Any, dims: Any, at: Sequence[Index]) -> _Row:
    """The row of x along `dims` (None: all dimensions), at the coordinates `at` in the others."""
    if not isinstance(x, Value) or not x.shape:
        raise Unknown
    rank = len(x.shape)
    chosen = sorted({dim % rank for dim in ([dims] if isinstance(dims, int) else dims or range(rank))})
    sizes = [x.shape[dim] for dim in chosen]

    def place(along: Index) -> list[Index]:
        coordinates = list(at)
        for dim, size in zip(reversed(chosen), reversed(sizes), strict=True):
            coordinates[dim] = along % size
            along = along // size
        return coordinates

    return _Row(x, math.prod(sizes), place)


def _kept(x: Any, given: Mapping[str, Any], result: Value) -> list[Index]:
    """The coordinates in x for an element of a reduction's result: zeros along the reduced dimensions."""
    if not isinstance(x, Value) or given.get("dtype") not in (None, result.dtype):
        raise Unknown
    at = coordinates(result.shape)
    if len(result.shape) == len(x.shape):
        return at
    dims = given.get("dim")
    gone = {dim % len(x.shape) for dim in ([dims] if isinstance(dims, int) else dims or range(len(x.shape)))}
    rest = iter(at)
    return [Index() if dim in gone else next(rest) for dim in range(len(x.shape))]


def _reduction(made: Callable[[_Row, Body, Mapping[str, Any]], Expr]) -> Rule:
    """The rule of an operator that reduces along its argument `dim`; `made(row, body, given)` is the result."""

    def rule(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
        row = _row_along(given["self"], given.get("dim"), _kept(given["self"], given, result))
        return made(row, body, given)

    return rule


def _variance(row: _Row, body: Body, given: Mapping[str, Any]) -> Expr:
    if "unbiased" in given:
        raise Unknown
    left = row.size - (1 if given.get("correction") is None else given["correction"])
    if left <= 0 or left != int(left):
        raise Unknown
    return _over(body, row.deviations(body), int(left))


def _norm(row: _Row, body: Body, given: Mapping[str, Any]) -> Expr:
    if given.get("ord", 2) != 2:
        raise Unknown
    return Call("sqrt", (row.squares(body),))


def _softmax(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    exponent, total = _exponents(body, given, result)
    return Call("div", (Call("exp", (exponent,)), total))


def _safe_softmax(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    """Softmax, but zeros where a whole row is minus infinity."""
    row = _row_along(given["self"], given["dim"], coordinates(result.shape))
    is_masked = Call("eq", (row.greatest(body), Const(-math.inf)))
    return Call("where", (is_masked, Const(0.0), _softmax(body, given, result)))


def _log_softmax(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    exponent, total = _exponents(body, given, result)
    return Call("sub", (exponent, Call("log", (total,))))


def _log_sum_exp(row: _Row, body: Body, given: Mapping[str, Any]) -> Expr:
    """log(sum(exp(x))). As in torch, an infinite maximum is not subtracted: infinity - infinity would be NaN."""

    def shift(inner: Body) -> Expr:
        greatest = row.greatest(inner)
        return Call("where", (Call("eq", (Call("abs", (greatest,)), Const(math.inf))), Const(0.0), greatest))

    total = row.reduced(body, "sum", lambda inner, x: Call("exp", (Call("sub", (x, shift(inner))),)), 1)
    return Call("add", (Call("log", (total,)), shift(body)))


def _exponents(body: Body, given: Mapping[str, Any], result: Value) -> tuple[Expr, Expr]:
    """An element minus its row's maximum, and the sum of the exponentials of such differences over the row."""
    at = coordinates(result.shape)
    row = _row_along(given["self"], given["dim"], at)
    total = row.reduced(
        body, "sum", lambda inner, x: Call("exp", (Call("sub", (x, row.greatest(inner))),)), 1
    )  # fmt: skip
    return Call("sub", (body.read(given["self"], at), row.greatest(body))), total


def _affine(body: Body, made: Expr, given: Mapping[str, Any], at: Sequence[Index]) -> Expr:
    """`made`, scaled by the weight and shifted by the bias, if they are given. `at`: their coordinates."""
    for name, row in (("weight", "mul"), ("bias", "add")):
        if given.get(name) is not None:
            made = Call(row, (made, body.read(given[name], at)))
    return made


def _layer_norm(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, at, rank = given["input"], coordinates(result.shape), len(given["normalized_shape"])
    row = _row_along(x, [-1 - dim for dim in range(rank)], at)
    return _affine(body, row.normalised(body, body.read(x, at), given["eps"]), given, at[len(at) - rank :])


def _rms_norm(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, at, rank = given["input"], coordinates(result.shape), len(given["normalized_shape"])
    row = _row_along(x, [-1 - dim for dim in range(rank)], at)
    eps = given.get("eps")
    if eps is None:  # the fused operator's default is the epsilon of the type that it computes in, not of x's
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    made = Call("mul", (body.read(x, at), _inverse_root(_over(body, row.squares(body), row.size), eps)))
    return _affine(body, made, given, at[len(at) - rank :])


def _group_norm(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    x, at, groups = given["input"], coordinates(result.shape), given["group"]
    if not isinstance(x, Value) or x.shape != result.shape:
        raise Unknown
    channels = x.shape[1] // groups

    def place(along: Index) -> list[Index]:
        found = []
        for size in reversed(x.shape[2:]):
            found.append(along % size)
            along = along // size
        return [at[0], (at[1] // channels) * channels + along, *reversed(found)]

    row = _Row(x, channels * math.prod(x.shape[2:]), place)
    return _affine(body, row.normalised(body, body.read(x, at), given["eps"]), given, [at[1]])


def _batch_norm(body: Body, given: Mapping[str, Any], result: Value) -> Expr:
    """Batch normalisation with given statistics, or with the batch's own where no running statistics are kept.

    The latter is how weights are standardised.
    """
    x, at = given["input"], coordinates(result.shape)
    trains = given.get("training", given.get("train", "running_mean" not in given))
    mean, variance = given.get("running_mean"), given.get("running_var")
    if not isinstance(x, Value) or x.dtype not in RESULT_DTYPES or (trains and mean is not None):
        raise Unknown
    eps = given["epsilon"] if "epsilon" in given else given["eps"]
    if trains:
        row = _row_along(x, [dim for dim in range(len(x.shape)) if dim != 1], at)
        return _affine(body, row.normalised(body, body.read(x, at), eps), given, [at[1]])
    left = Call("sub", (body.read(x, at), body.read(mean, [at[1]])))
    scale = _inverse_root(body.read(variance, [at[1]]), eps)
    return _affine(body, Call("mul", (left, scale)), given, [at[1]])


LAYER_NORM: Final[Rule] = _layer_norm
SOFTMAX: Final[Rule] = _softmax
_aten = torch.ops.aten
REDUCTIONS: Final[Mapping[Any, Rule]] = {
    getattr(_aten, name): rule
    for name, rule in {
        "_softmax": _softmax,
        "_safe_softmax": _safe_softmax,
        "_log_softmax": _log_softmax,
        "mean": _reduction(lambda row, body, _: row.mean(body)),
        "sum": _reduction(lambda row, body, _: row.reduced(body, "sum", lambda _, x: x)),
        "amax": _reduction(lambda row, body, _: row.greatest(body)),
        "var": _reduction(_variance),
        "linalg_vector_norm": _reduction(_norm),
        "logsumexp": _reduction(_log_sum_exp),
        "native_layer_norm": _layer_norm,
        "_fused_rms_norm": _rms_norm,
        "native_group_norm": _group_norm,
        "native_batch_norm": _batch_norm,
        "cudnn_batch_norm": _batch_norm,
        "_native_batch_norm_legit": _batch_norm,
        "_native_batch_norm_legit_functional": _batch_norm,
        "_native_batch_norm_legit_no_training": _batch_norm,
        "_batch_norm_no_update": _batch_norm,
    }.items()
    if hasattr(_aten, name)
} | {torch.ops.fxfuse.group_norm_in_channels_last: _group_norm}  # fmt: skip
