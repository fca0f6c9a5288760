"""The op table: one row per pointwise operation, and everything about it in that row.

A `PointwiseOp` row has its torch reference (fallback, test oracle, source of gradients), its C++ text (used by the
CUDA and the CPU code generators alike), its interval rule, and all its spellings in torch. A `Composite` row is a
spelling whose meaning is an expression of other rows (relu6 is a hardtanh). `find_function`, `find_method` and
`find_module` look up what a traced graph calls; `row` looks up a name in an epilogue's text. Adding an operation is
adding a row; users add theirs with `register_pointwise`.

C++ text: `{0}`, `{1}`, … stand for the arguments (variables or literals, type float, or bool for comparisons);
`{name} = …;` before the final expression introduces a float. `divide(a, b)` is a faster a / b for |b| from 2^-126 to
2^126. The other functions are those of cuda/kernels/math.cuh and cpu/kernels/math.h. They take and return floats, and
treat NaN and infinities as torch does.
"""

from __future__ import annotations

import inspect
import math
import operator
import re
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxfuse import expression, interval
from fxfuse.errors import ExpressionError, FxfuseError
from fxfuse.expression import NUMBERS, Call, Const, Expr, Number, postorder
from fxfuse.layout import is_dense

REQUIRED: Final = object()
"""Default of a parameter that has none."""

UNARY: Final[Mapping[str, Any]] = {"input": REQUIRED}
BINARY: Final[Mapping[str, Any]] = {"input": REQUIRED, "other": REQUIRED}


class Rejected(Exception):
    """A spelling's arguments ask for something that its row does not do. str() is the reason for the report."""


def call(name: str, *args: Expr | Number) -> Call:
    """The expression of a row's call. Raises Rejected for other arguments that a graph may pass (None, a tuple)."""
    for arg in args:
        if not isinstance(arg, Expr | bool | int | float):
            raise Rejected(f"{name}'s argument {arg!r} is neither a tensor nor a number")
    return expression.call(name, *args)


@dataclass(frozen=True)
class PointwiseOp:
    """One operation of the expression language."""

    name: str
    reference: Callable[..., Any]
    """Computes the operation on tensors and Python numbers, with torch's dtype promotion and broadcasting."""
    code: str
    """C++ text; see the module's docstring."""
    interval: interval.Rule = interval.anything
    params: Mapping[str, Any] = field(default_factory=lambda: UNARY)
    """Parameter names as torch has them (and as torch.nn modules name their attributes), with defaults."""
    spellings: Sequence[Any] = ()
    """Functions, module types and method names beside those found under `name` itself (see `_spellings_of`)."""
    boolean: bool = False
    """Whether the result is a truth value (C++ bool) rather than a number."""
    integer: bool = False
    """Whether the result is an integer (int64_t). Only loops between regions compute such (program/operators.py)."""
    commutative: bool = False
    passing: bool = False
    """Whether a range of arguments is returned as it is, negated or as a constant: there eager rounds nothing more."""
    channel_args: tuple[int, ...] = ()
    """Arguments that are vectors along dimension 1 of the result (or one number for all)."""
    formats: Mapping[str, Sequence[torch.memory_format]] = field(default_factory=dict)
    """For each type of device, the layouts that torch's result takes over from its argument. For an argument in another
    layout the result is contiguous, which meta tensors do not tell. On a device that is missing here, the result has
    the strides of meta tensors."""
    in_place_of: str | None = None
    """For an in-place operation, the name of the row that computes the same into a tensor of its own."""
    recast: bool = False
    """Whether torch.autocast casts the arguments of one of its spellings (to float32; for prelu, from it)."""

    def is_called_in(self, epilogue: str) -> bool:
        """Whether an epilogue's text calls the operation, perhaps in place."""
        return re.search(rf"\b{self.name}_?\(", epilogue) is not None

    def build(self, *args: Any) -> Expr:
        """The expression for bound arguments: expressions, or numbers that become constants."""
        if self.commutative and not isinstance(args[0], Expr):
            args = args[::-1]
        return call(self.name, *args)


@dataclass(frozen=True)
class Composite:
    """A spelling that means an expression of other rows."""

    name: str
    expand: Callable[..., Expr]
    """Takes the bound arguments (expressions, numbers, None, strings); returns the expression or raises Rejected."""
    params: Mapping[str, Any] = field(default_factory=lambda: UNARY)
    spellings: Sequence[Any] = ()
    of_two_tensors: bool = False
    """Whether its functions mean something else unless both arguments are tensors (torch.max(x, 1) reduces)."""

    def build(self, *args: Any) -> Expr:
        return self.expand(*args)


Row = PointwiseOp | Composite


class Callee(Protocol):
    """Whatever has a name and parameters: a row of this table, or an anchor."""

    @property
    def name(self) -> str: ...

    @property
    def params(self) -> Mapping[str, Any]: ...


# ----------------------------------------------------------------------------------------- references


def _minimum(a: Any, b: Any) -> Any:
    return torch.minimum(a, b) if isinstance(b, torch.Tensor) else torch.clamp_max(a, b)


def _maximum(a: Any, b: Any) -> Any:
    return torch.maximum(a, b) if isinstance(b, torch.Tensor) else torch.clamp_min(a, b)


def _add_scaled(a: torch.Tensor, b: torch.Tensor, alpha: Any) -> torch.Tensor:
    result = torch.add(a, b, alpha=alpha)
    return a + b if result.is_meta else result  # meta tensors compute the product first, which has its own strides


def _sub_scaled(a: torch.Tensor, b: torch.Tensor, alpha: Any) -> torch.Tensor:
    result = torch.sub(a, b, alpha=alpha)
    return a - b if result.is_meta else result


def _clamp_between(x: torch.Tensor, lo: Any, hi: Any) -> torch.Tensor:
    result = torch.clamp(x, lo, hi)
    if result.is_meta and isinstance(lo, torch.Tensor):  # as above
        return torch.addcmul(x, lo, hi).to(result.dtype)
    return result


def _batch_norm(x: torch.Tensor, mean: Any, var: Any, weight: Any, bias: Any, eps: float) -> torch.Tensor:
    affine = [value if isinstance(value, torch.Tensor) else None for value in (weight, bias)]
    parameters = [value for value in (mean, var, *affine) if value is not None]
    if x.is_meta and x.dim() > 1 and all(value.shape == x.shape[1:2] for value in parameters):
        dtypes = {value.dtype for value in parameters}
        if dtypes != {x.dtype} and (dtypes != {torch.float32} or x.dtype not in (torch.float16, torch.bfloat16)):
            raise RuntimeError(f"a normalisation of {x.dtype} by parameters of {dtypes}")
        if is_dense(x.shape, x.stride()):  # otherwise torch would import its compiler for this (1 to 5 s)
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return torch.empty_like(x)
    return F.batch_norm(x, mean, var, affine[0], affine[1], False, 0.0, eps)


@fx.node.has_side_effect
def check_rank(rank: Any, ranks: Sequence[int]) -> None:
    """Raises the ValueError of nn.BatchNorm1d and its like for a tensor whose rank they do not accept."""
    if isinstance(rank, fx.Proxy):  # somebody traces the optimised model
        rank.tracer.create_proxy("call_function", check_rank, (rank, tuple(ranks)), {})
    elif rank not in ranks:
        expected = " or ".join(f"{rank}D" for rank in ranks)
        raise ValueError(f"expected {expected} input (got {rank}D input)")


def _batch_norm_of(*ranks: int) -> Callable[..., torch.Tensor]:
    """The reference of nn.BatchNorm1d and its like: a normalisation that accepts these ranks."""

    def reference(x: torch.Tensor, *parameters: Any) -> torch.Tensor:
        check_rank(x.dim(), ranks)
        return _batch_norm(x, *parameters)

    return reference


def _assign(value: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    if value.shape != old.shape:  # in torch's words
        shapes = f"{list(old.shape)} doesn't match the broadcast shape {list(value.shape)}"
        raise RuntimeError(f"output with shape {shapes}")
    if not torch.can_cast(value.dtype, old.dtype):
        raise RuntimeError(f"result type {value.dtype} can't be cast to the desired output type {old.dtype}")
    value = value.to(old.dtype)
    if old.layout is not torch.strided or old.is_nested or value.stride() == old.stride():
        return value
    return old.new_empty_strided(old.shape, old.stride()).copy_(value)  # an overwritten tensor keeps its strides


def _logical(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The reference of logical_and or logical_or. torch has no meta function for them, but a decomposition that orders
    strides anew."""

    def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.eq(a, b) if a.is_meta and b.is_meta else function(a, b)

    return reference


def _silu(x: torch.Tensor) -> torch.Tensor:
    """silu. For complex numbers torch has gradients only if x is overwritten, which an expression does not tell."""
    return F.silu(x.clone(), inplace=True) if x.is_complex() else F.silu(x)


def _logsigmoid(x: torch.Tensor) -> torch.Tensor:
    """logsigmoid. torch itself makes this contiguous copy on a CPU, but neither meta nor fake tensors tell."""
    return F.logsigmoid(x.contiguous() if x.device.type == "cpu" else x)


def _cast(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.to(dtype)


# ----------------------------------------------------------------------------------------- composites


def _scaled(row: str, a: Any, b: Any, alpha: Any) -> Expr:
    """`row` of a and b * alpha. For two tensors it is one operation: a separate product may have other strides."""
    if isinstance(a, Expr) and isinstance(b, Expr) and alpha != 1:
        return call(f"{row}_scaled", a, b, alpha)
    if alpha != 1:
        b = call("mul", b, alpha) if isinstance(b, Expr) else b * alpha
    return call(row, a, b)


def _add(a: Any, b: Any, alpha: Any) -> Expr:
    return _scaled("add", a, b, alpha)


def _sub(a: Any, b: Any, alpha: Any) -> Expr:
    return _scaled("sub", a, b, alpha)


def _rsub(a: Any, b: Any, alpha: Any) -> Expr:
    return _sub(b, a, alpha)


def _div(a: Any, b: Any, rounding_mode: Any) -> Expr:
    if rounding_mode is not None:
        raise Rejected(f"division with rounding_mode={rounding_mode!r}")
    return call("div", a, b)


def _pow(base: Any, exponent: Any) -> Expr:
    """pow. torch itself computes the `special` exponents by multiplication and square roots, with their NaN and inf."""
    if isinstance(base, Expr) and not isinstance(exponent, Expr):
        special: dict[float, Callable[[Expr], Expr]] = {
            1.0: lambda x: x,
            2.0: lambda x: call("square", x),
            3.0: lambda x: call("mul", call("square", x), x),
            0.5: lambda x: call("sqrt", x),
            -0.5: lambda x: call("rsqrt", x),
            -1.0: lambda x: call("reciprocal", x),
            -2.0: lambda x: call("reciprocal", call("square", x)),
        }
        if isinstance(exponent, int | float) and float(exponent) in special:
            return special[float(exponent)](base)
    return call("pow", base, exponent)


def _clamp(x: Any, lo: Any, hi: Any) -> Expr:
    if lo is None and hi is None:
        raise Rejected("clamp without bounds")
    if lo is not None and hi is not None:
        if isinstance(lo, Expr) is not isinstance(hi, Expr):
            raise Rejected("clamp between a tensor and a number, which torch refuses")
        return call("clamp", x, lo, hi)
    if hi is None:  # maximum of two tensors halves the gradient where they are equal
        return call("clamp_min" if isinstance(lo, Expr) else "maximum", x, lo)
    return call("clamp_max" if isinstance(hi, Expr) else "minimum", x, hi)


def _gelu(x: Any, approximate: Any) -> Expr:
    rows = {"none": "gelu", "tanh": "gelu_tanh"}
    if approximate not in rows:
        raise Rejected(f"gelu with approximate={approximate!r}")
    return call(rows[approximate], x)


def _elu(x: Any, alpha: Any, scale: Any, input_scale: Any) -> Expr:
    if (scale, input_scale) != (1, 1):
        raise Rejected("elu with scale or input_scale")
    return call("elu", x, alpha)


def _normalised(x: Any, mean: Any, var: Any, weight: Any, bias: Any, training: Any, eps: Any) -> Expr:
    if training is not False or mean is None or var is None:
        raise Rejected("batch_norm by the batch's own statistics")
    if isinstance(eps, Expr):
        raise Rejected("batch_norm with an eps that is not known before the model runs")
    return call("batch_norm", x, mean, var, 1.0 if weight is None else weight, 0.0 if bias is None else bias, eps)


def _batch_norm_function(
    x: Any, mean: Any, var: Any, weight: Any, bias: Any, training: Any, momentum: Any, eps: Any
) -> Expr:
    return _normalised(x, mean, var, weight, bias, training, eps)


def _batch_norm_operator(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: Any, momentum: Any, eps: Any, cudnn_enabled: Any
) -> Expr:
    return _normalised(x, mean, var, weight, bias, training, eps)


def _where_method(x: Any, condition: Any, other: Any) -> Expr:
    return call("where", condition, x, other)


_CAST_ROWS: Final = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def _to(x: Any, dtype: Any) -> Expr:
    if dtype not in _CAST_ROWS:
        raise Rejected(f"cast to {dtype}")
    return call(_CAST_ROWS[dtype], x)


_HARMLESS: Final = {"layout": None, "device": None, "pin_memory": False, "requires_grad": False, "memory_format": None}
"""Arguments of functions that make a tensor like a given one, with the values that leave it like that one."""


def _number_of(name: str, value: Any) -> Number:
    """The number that a tensor is filled with. Raises Rejected unless each dtype holds it: torch refuses others."""
    if not isinstance(value, bool | int | float) or (math.isfinite(value) and abs(value) > _MOST_OF_HALF):
        raise Rejected(f"{name} of {value!r}, which is no number that each dtype holds")
    return float(value)


_MOST_OF_HALF: Final = 65504


def _filled(filled: Call, name: str, dtype: Any, options: Sequence[Any]) -> Expr:
    if any(option not in (None, False) for option in options):
        raise Rejected(f"{name} of another device or layout")
    return filled if dtype is None else _to(filled, dtype)


def _full_like(x: Any, value: Any, dtype: Any, *options: Any) -> Expr:
    return _filled(call("full_like", x, _number_of("full_like", value)), "full_like", dtype, options)


def _new_full(x: Any, size: Any, value: Any, dtype: Any, *options: Any) -> Expr:
    sizes = (size,) if isinstance(size, int) else size
    if not isinstance(sizes, tuple | list) or any(type(length) is not int or length != 1 for length in sizes):
        raise Rejected("a new tensor of several elements")
    return _filled(call("new_full", x, len(sizes), _number_of("new_full", value)), "new_full", dtype, options)


def _constant_rows() -> list[Row]:
    """Rows of tensors filled with one number. Dtype and perhaps shape are those of a value, which is not read."""
    given, value = {"input": REQUIRED}, {"fill_value": REQUIRED}
    like, new = {"dtype": None, **_HARMLESS}, {"size": REQUIRED}
    return [
        PointwiseOp("full_like", torch.full_like, "{1}", interval.last, {**given, **value}),
        PointwiseOp("new_full", lambda x, rank, value: x.new_full((1,) * rank, value), "{2}", interval.last,
                    {**given, "rank": REQUIRED, **value}),
        Composite("full_like", _full_like, {**given, **value, **like}),
        Composite("zeros_like", lambda x, *rest: _full_like(x, 0, *rest), {**given, **like}),
        Composite("ones_like", lambda x, *rest: _full_like(x, 1, *rest), {**given, **like}),
        Composite("new_full", _new_full, {**given, **new, **value, **like}),
        Composite("new_zeros", lambda x, size, *rest: _new_full(x, size, 0, *rest), {**given, **new, **like}),
        Composite("new_ones", lambda x, size, *rest: _new_full(x, size, 1, *rest), {**given, **new, **like}),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------- the table

_SIXTH: Final = "0.16666667f"
_BATCH_NORM_CODE: Final = "({0} - {1}) * (rsqrt({2} + {5}) * {3}) + {4}"
_BATCH_NORM: Final = {
    "input": REQUIRED, "running_mean": REQUIRED, "running_var": REQUIRED, "weight": 1.0, "bias": 0.0, "eps": REQUIRED,
}  # fmt: skip
_BATCH_NORM_FORMATS: Final = dict.fromkeys(
    ("cpu", "cuda"), (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
)
_unit = interval.increasing(-1.0, 1.0)
_truth = interval.always(0.0, 1.0)
_positive = interval.increasing(0.0)
_nonnegative_parameter = interval.increasing(sign=lambda parameter: parameter >= 0)

_ROWS: Final[list[Row]] = [
    # arithmetic
    PointwiseOp("add", operator.add, "{0} + {1}", interval.add, BINARY, commutative=True),
    PointwiseOp("sub", operator.sub, "{0} - {1}", interval.subtract, BINARY),
    PointwiseOp("mul", operator.mul, "{0} * {1}", interval.multiply, BINARY,
                ("multiply", operator.mul, operator.imul), commutative=True),
    PointwiseOp("div", operator.truediv, "{0} / {1}", interval.divide, BINARY, (operator.truediv, operator.itruediv)),
    PointwiseOp("neg", operator.neg, "-{0}", interval.negate, UNARY, ("negative", operator.neg), passing=True),
    PointwiseOp("abs", torch.abs, "abs({0})", interval.valley(0.0, 0.0), UNARY, ("absolute", operator.abs),
                passing=True),
    PointwiseOp("square", torch.square, "{0} * {0}", interval.valley(0.0, 0.0), recast=True),
    PointwiseOp("pow", torch.pow, "pow({0}, {1})", params={"input": REQUIRED, "exponent": REQUIRED}, recast=True),
    PointwiseOp("sqrt", torch.sqrt, "sqrt({0})", _positive, recast=True),
    PointwiseOp("rsqrt", torch.rsqrt, "rsqrt({0})", recast=True),
    PointwiseOp("reciprocal", torch.reciprocal, "1.0f / {0}", recast=True),
    Composite("add", _add, {**BINARY, "alpha": 1}, (operator.add, operator.iadd)),
    Composite("sub", _sub, {**BINARY, "alpha": 1}, ("subtract", operator.sub, operator.isub)),
    Composite("rsub", _rsub, {**BINARY, "alpha": 1}),
    Composite("div", _div, {**BINARY, "rounding_mode": None}, ("divide", "true_divide")),
    Composite("pow", _pow, {"input": REQUIRED, "exponent": REQUIRED}, (operator.pow, operator.ipow)),
    # not sums of products: three tensors together decide the strides of the result
    PointwiseOp("add_scaled", _add_scaled, "{0} + {1} * {2}", interval.add_scaled, {**BINARY, "alpha": REQUIRED}),
    PointwiseOp("sub_scaled", _sub_scaled, "{0} - {1} * {2}", interval.sub_scaled, {**BINARY, "alpha": REQUIRED}),
    PointwiseOp("addcmul", lambda x, a, b, value: torch.addcmul(x, a, b, value=value), "{0} + {1} * {2} * {3}",
                interval.addcmul, {"input": REQUIRED, "tensor1": REQUIRED, "tensor2": REQUIRED, "value": 1},
                recast=True),
    PointwiseOp("lerp", torch.lerp,
                "abs({2}) < 0.5f ? {0} + {2} * ({1} - {0}) : {1} - ({1} - {0}) * (1.0f - {2})",
                params={"input": REQUIRED, "end": REQUIRED, "weight": REQUIRED}),
    # special functions
    PointwiseOp("exp", torch.exp, "exp({0})", _positive, UNARY, recast=True),
    PointwiseOp("expm1", torch.expm1, "expm1({0})", interval.increasing(-1.0), UNARY, (torch.special.expm1,),
                recast=True),
    PointwiseOp("log", torch.log, "log({0})", interval.increasing(), recast=True),
    PointwiseOp("log1p", torch.log1p, "log1p({0})", interval.increasing(), UNARY, (torch.special.log1p,),
                recast=True),
    PointwiseOp("sin", torch.sin, "sin({0})", interval.always(-1.0, 1.0)),
    PointwiseOp("cos", torch.cos, "cos({0})", interval.always(-1.0, 1.0)),
    PointwiseOp("tanh", torch.tanh, "tanh({0})", _unit, UNARY, (nn.Tanh,)),
    PointwiseOp("sigmoid", torch.sigmoid, "sigmoid({0})", interval.increasing(0.0, 1.0), UNARY,
                (nn.Sigmoid, torch.special.expit)),
    PointwiseOp("erf", torch.erf, "erf({0})", _unit, UNARY, (torch.special.erf,)),
    # rounding
    PointwiseOp("floor", torch.floor, "floor({0})", interval.increasing(), passing=True),
    PointwiseOp("ceil", torch.ceil, "ceil({0})", interval.increasing(), passing=True),
    PointwiseOp("trunc", torch.trunc, "trunc({0})", interval.increasing(), UNARY, ("fix",), passing=True),
    PointwiseOp("round", torch.round, "round_half_to_even({0})", interval.increasing(), UNARY, (torch.special.round,),
                passing=True),
    PointwiseOp("sign", torch.sign, "{0} > 0.0f ? 1.0f : {0} < 0.0f ? -1.0f : 0.0f", _unit, passing=True),
    PointwiseOp("frac", torch.frac, "{0} - trunc({0})"),
    # comparison and choice
    PointwiseOp("lt", operator.lt, "{0} < {1}", _truth, BINARY, ("less", operator.lt), boolean=True),
    PointwiseOp("le", operator.le, "{0} <= {1}", _truth, BINARY, ("less_equal", operator.le), boolean=True),
    PointwiseOp("gt", operator.gt, "{0} > {1}", _truth, BINARY, ("greater", operator.gt), boolean=True),
    PointwiseOp("ge", operator.ge, "{0} >= {1}", _truth, BINARY, ("greater_equal", operator.ge), boolean=True),
    PointwiseOp("eq", operator.eq, "{0} == {1}", _truth, BINARY, (operator.eq,), boolean=True),
    PointwiseOp("ne", operator.ne, "{0} != {1}", _truth, BINARY, ("not_equal", operator.ne), boolean=True),
    PointwiseOp("isnan", torch.isnan, "{0} != {0}", _truth, boolean=True),
    PointwiseOp("isinf", torch.isinf, "abs({0}) == infinity()", _truth, boolean=True),
    PointwiseOp("isfinite", torch.isfinite, "abs({0}) < infinity()", _truth, boolean=True),
    PointwiseOp("logical_and", _logical(torch.logical_and), "({0} != 0) & ({1} != 0)", _truth, BINARY, boolean=True),
    PointwiseOp("logical_or", _logical(torch.logical_or), "({0} != 0) | ({1} != 0)", _truth, BINARY, boolean=True),
    PointwiseOp("logical_not", torch.logical_not, "!{0}", _truth, boolean=True),
    PointwiseOp("where", torch.where, "{0} ? {1} : {2}", interval.either,
                {"condition": REQUIRED, "input": REQUIRED, "other": REQUIRED}, (torch.where, torch.ops.aten.where),
                passing=True),
    Composite("where", _where_method, {"input": REQUIRED, "condition": REQUIRED, "other": REQUIRED}, ("where",)),
    # not a where: the result has the dtype of the first argument, and is always contiguous
    PointwiseOp("masked_fill", torch.masked_fill, "{1} ? {2} : {0}", interval.filled,
                {"input": REQUIRED, "mask": REQUIRED, "value": REQUIRED}, passing=True),
    PointwiseOp("minimum", _minimum, "minimum({0}, {1})", interval.minimum, BINARY, commutative=True, passing=True),
    PointwiseOp("maximum", _maximum, "maximum({0}, {1})", interval.maximum, BINARY, commutative=True, passing=True),
    Composite("min", lambda a, b: call("minimum", a, b), BINARY, of_two_tensors=True),
    Composite("max", lambda a, b: call("maximum", a, b), BINARY, of_two_tensors=True),
    PointwiseOp("clamp", _clamp_between, "minimum(maximum({0}, {1}), {2})", interval.clamp,
                {"input": REQUIRED, "min": REQUIRED, "max": REQUIRED}, passing=True),
    Composite("clamp", _clamp, {"input": REQUIRED, "min": None, "max": None}, ("clip",)),
    PointwiseOp("clamp_min", torch.clamp_min, "maximum({0}, {1})", interval.maximum,
                {"input": REQUIRED, "min": REQUIRED}, passing=True),
    PointwiseOp("clamp_max", torch.clamp_max, "minimum({0}, {1})", interval.minimum,
                {"input": REQUIRED, "max": REQUIRED}, passing=True),
    Composite("clamp_min", lambda x, lo: _clamp(x, lo, None), {"input": REQUIRED, "min": REQUIRED}),
    Composite("clamp_max", lambda x, hi: _clamp(x, None, hi), {"input": REQUIRED, "max": REQUIRED}),
    # not a clamp: the gradient at the bounds is 0, and the result has strides of its own
    PointwiseOp("hardtanh", F.hardtanh, "minimum(maximum({0}, {1}), {2})", interval.clamp,
                {"input": REQUIRED, "min_val": -1.0, "max_val": 1.0}, (nn.Hardtanh,), passing=True),
    Composite("relu6", lambda x: call("hardtanh", x, 0.0, 6.0), UNARY, (nn.ReLU6,)),
    # activations
    PointwiseOp("relu", torch.relu, "maximum({0}, 0.0f)", interval.increasing(0.0), UNARY, (nn.ReLU,), passing=True),
    PointwiseOp("leaky_relu", F.leaky_relu, "{0} > 0.0f ? {0} : {0} * {1}", _nonnegative_parameter,
                {"input": REQUIRED, "negative_slope": 0.01}, (nn.LeakyReLU,), passing=True),
    PointwiseOp("prelu", F.prelu, "{0} > 0.0f ? {0} : {1} * {0}", params={"input": REQUIRED, "weight": REQUIRED},
                spellings=(nn.PReLU,), channel_args=(1,), passing=True, recast=True),
    # In evaluation mode. A missing weight is 1, a missing bias 0. patterns/values.py finds the modules.
    PointwiseOp("batch_norm", _batch_norm, _BATCH_NORM_CODE, params=_BATCH_NORM, channel_args=(1, 2, 3, 4),
                formats=_BATCH_NORM_FORMATS),
    PointwiseOp("batch_norm_1d", _batch_norm_of(2, 3), _BATCH_NORM_CODE, params=_BATCH_NORM,
                channel_args=(1, 2, 3, 4), formats=_BATCH_NORM_FORMATS),
    PointwiseOp("batch_norm_2d", _batch_norm_of(4), _BATCH_NORM_CODE, params=_BATCH_NORM,
                channel_args=(1, 2, 3, 4), formats=_BATCH_NORM_FORMATS),
    PointwiseOp("batch_norm_3d", _batch_norm_of(5), _BATCH_NORM_CODE, params=_BATCH_NORM,
                channel_args=(1, 2, 3, 4), formats=_BATCH_NORM_FORMATS),
    Composite("batch_norm", _batch_norm_function,
              {"input": REQUIRED, "running_mean": REQUIRED, "running_var": REQUIRED, "weight": None, "bias": None,
               "training": False, "momentum": 0.1, "eps": 1e-5}, (F.batch_norm,)),
    Composite("batch_norm", _batch_norm_operator,
              {"input": REQUIRED, "weight": REQUIRED, "bias": REQUIRED, "running_mean": REQUIRED,
               "running_var": REQUIRED, "training": REQUIRED, "momentum": REQUIRED, "eps": REQUIRED,
               "cudnn_enabled": REQUIRED}, (torch.batch_norm, torch.ops.aten.batch_norm)),
    PointwiseOp("elu", F.elu, "{0} > 0.0f ? {0} : {1} * expm1({0})", _nonnegative_parameter,
                {"input": REQUIRED, "alpha": 1.0}, (nn.ELU,), passing=True),
    Composite("elu", _elu, {"input": REQUIRED, "alpha": 1.0, "scale": 1, "input_scale": 1}),
    PointwiseOp("selu", torch.selu, "{0} > 0.0f ? 1.05070099f * {0} : 1.75809934f * expm1({0})",
                interval.increasing(-1.7581), UNARY, (nn.SELU,)),
    PointwiseOp("celu", torch.celu, "{0} > 0.0f ? {0} : {1} * expm1({0} / {1})",
                interval.increasing(sign=lambda alpha: alpha > 0), {"input": REQUIRED, "alpha": 1.0}, (nn.CELU,),
                passing=True),
    PointwiseOp("gelu", F.gelu, "gelu({0})",
                interval.valley(-0.75179, -0.16998, left_limit=0.0), spellings=(), passing=True),
    PointwiseOp("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh({0})",
                interval.valley(-0.75246, -0.17005, left_limit=0.0), passing=True),
    Composite("gelu", _gelu, {"input": REQUIRED, "approximate": "none"}, (nn.GELU,)),
    PointwiseOp("silu", _silu, "{0} * sigmoid({0})",
                interval.valley(-1.27847, -0.27847, left_limit=0.0), UNARY, (nn.SiLU,), passing=True),
    PointwiseOp("mish", F.mish, "mish({0})",
                interval.valley(-1.19245, -0.30885, left_limit=0.0), UNARY, (nn.Mish,), passing=True),
    PointwiseOp("softplus", F.softplus, "{0} * {1} > {2} ? {0} : log1p(exp({0} * {1})) / {1}",
                interval.increasing(0.0, sign=lambda beta, threshold: beta > 0 and threshold >= 10),
                {"input": REQUIRED, "beta": 1.0, "threshold": 20.0}, (nn.Softplus,), passing=True, recast=True),
    PointwiseOp("softsign", F.softsign, "{0} / (1.0f + abs({0}))", interval.always(-1.0, 1.0), UNARY, (nn.Softsign,)),
    PointwiseOp("hardswish", F.hardswish, f"{{0}} * minimum(maximum({{0}} + 3.0f, 0.0f), 6.0f) * {_SIXTH}",
                interval.valley(-1.5, -0.375, left_limit=0.0), UNARY, (nn.Hardswish,), passing=True),
    PointwiseOp("hardsigmoid", F.hardsigmoid, f"minimum(maximum({{0}} + 3.0f, 0.0f), 6.0f) * {_SIXTH}",
                interval.increasing(0.0, 1.0), UNARY, (nn.Hardsigmoid,)),
    PointwiseOp("hardshrink", F.hardshrink, "({0} >= -{1} && {0} <= {1}) ? 0.0f : {0}", interval.anything,
                {"input": REQUIRED, "lambd": 0.5}, (nn.Hardshrink,), passing=True),
    # the last branch also hands NaN through: NaN * 0 is NaN
    PointwiseOp("softshrink", F.softshrink, "{0} > {1} ? {0} - {1} : ({0} < -{1} ? {0} + {1} : {0} * 0.0f)",
                _nonnegative_parameter, {"input": REQUIRED, "lambd": 0.5}, (nn.Softshrink,)),
    PointwiseOp("tanhshrink", F.tanhshrink, "tanhshrink({0})", interval.increasing(), UNARY, (nn.Tanhshrink,)),
    PointwiseOp("threshold", F.threshold, "{0} <= {1} ? {2} : {0}", interval.anything,
                {"input": REQUIRED, "threshold": REQUIRED, "value": REQUIRED}, (nn.Threshold,), passing=True),
    PointwiseOp("logsigmoid", _logsigmoid, "minimum({0}, 0.0f) - log1p(exp(-abs({0})))",
                interval.increasing(-math.inf, 0.0), UNARY, (nn.LogSigmoid, torch.ops.aten.log_sigmoid),
                formats={"cpu": (torch.contiguous_format,)}),
    # no arithmetic: kept because gradients and strides depend on them
    PointwiseOp("detach", torch.detach, "{0}", interval.same, passing=True),
    PointwiseOp("contiguous", lambda x: x.contiguous(), "{0}", interval.same, passing=True),
    PointwiseOp("clone", torch.clone, "{0}", interval.same, passing=True),
    *_constant_rows(),
    # casts; type_as and assign become one of the others, or nothing, where dtypes are known (problem.py)
    PointwiseOp("float32", _cast(torch.float32), "{0}", interval.same, passing=True),
    PointwiseOp("float16", _cast(torch.float16), "round_to_half({0})", interval.anything),
    PointwiseOp("bfloat16", _cast(torch.bfloat16), "round_to_bfloat16({0})", interval.same),
    PointwiseOp("int64", _cast(torch.int64), "static_cast<int64_t>({0})", integer=True),
    PointwiseOp("type_as", lambda x, other: x.type_as(other), "{0}", interval.same, BINARY),
    # an in-place operation. Arguments: its result, and the value whose dtype and shape it keeps
    PointwiseOp("assign", _assign, "{0}", interval.same, BINARY),
    Composite("to", _to, {"input": REQUIRED, "dtype": REQUIRED}, ("to", "type", torch.ops.aten._to_copy)),
    Composite("float", lambda x: _to(x, torch.float32), UNARY, ("float",)),
    Composite("half", lambda x: _to(x, torch.float16), UNARY, ("half",)),
    Composite("bfloat16", lambda x: _to(x, torch.bfloat16), UNARY, ("bfloat16",)),
]  # fmt: skip


# --------------------------------------------------------------------------------------------- look-up


@dataclass(frozen=True)
class Spelling:
    """What a graph node's target means: a row, and whether it overwrites its first argument."""

    row: Row
    in_place: bool

    @property
    def of_two_tensors(self) -> bool:
        """See Composite.of_two_tensors."""
        return isinstance(self.row, Composite) and self.row.of_two_tensors


_by_name: dict[str, PointwiseOp] = {}
_by_spelling: dict[Any, Spelling] = {}

_IN_PLACE_OPERATORS: Final = frozenset({operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow})
_NAMESPACES: Final = (torch, F, torch.ops.aten)


def _method(name: str) -> tuple[str, str]:
    return ("method", name)


def _spellings_of(row: Row) -> dict[Any, Spelling]:
    """Every function, method name and module type that means `row`.

    A name (the row's own, and each string in `spellings`) stands for the functions of that name in torch and
    torch.nn.functional, the Tensor method and the operator that torch.export writes, each with its in-place twin; other
    spellings stand for themselves.
    """
    found: dict[Any, Spelling] = {}
    names = [item for item in row.spellings if isinstance(item, str)]
    # torch.where and Tensor.where order their arguments differently, as do batch_norm's functions. So each has a row.
    if row.name not in ("where", "batch_norm"):
        names.append(row.name)
    for name in names:
        for suffix, in_place in (("", False), ("_", True)):
            spelled = name + suffix
            if hasattr(torch.Tensor, spelled):
                found[_method(spelled)] = Spelling(row, in_place)
            if name != "where":
                for namespace in _NAMESPACES:
                    function = getattr(namespace, spelled, None)
                    if callable(function):
                        found[function] = Spelling(row, in_place)
    for item in row.spellings:
        if not isinstance(item, str):
            found[item] = Spelling(row, item in _IN_PLACE_OPERATORS)
    return found


def _insert(row: Row) -> None:
    if isinstance(row, PointwiseOp):
        _by_name[row.name] = row
    _by_spelling.update(_spellings_of(row))


for _row in _ROWS:
    _insert(_row)


_overwriting: dict[str, PointwiseOp] = {}
"""The rows of the in-place operations that `row` was asked for so far."""


def row(name: str) -> PointwiseOp:
    """The row that an epilogue's text calls `name`. Raises ExpressionError if there is none.

    A name that ends in an underscore is the operation in place. Its result has the dtype and the strides of the first
    argument, those of dimensions of size 1 included.
    """
    try:
        return _by_name.get(name) or _overwriting.get(name) or _overwriting_row(_by_name[name.removesuffix("_")])
    except KeyError:
        raise ExpressionError(
            f"operation {name!r} is not in the table; add it with fxfuse.register_pointwise({name!r}, …) "
            "before running a model that uses it"
        ) from None


def _overwriting_row(base: PointwiseOp) -> PointwiseOp:
    name = f"{base.name}_"

    def reference(x: Any, *args: Any) -> Any:
        return _assign(base.reference(x, *args), x)

    _overwriting[name] = replace(base, name=name, reference=reference, commutative=False, in_place_of=base.name)
    return _overwriting[name]


def asks_for_overflow(node: Call) -> bool:
    """Whether a node asks if its argument is infinite or NaN. In float16 that depends on how it was rounded."""
    is_alike = node.args[0] == node.args[-1]
    is_with_infinity = any(isinstance(arg, Const) and arg.value in (math.inf, -math.inf) for arg in node.args)
    compares = node.op in ("eq", "ne", "lt", "le", "gt", "ge")
    return node.op in ("isnan", "isinf", "isfinite") or (compares and (is_alike or is_with_infinity))


def names() -> tuple[str, ...]:
    """The names of all operations that a region's expression may have."""
    return tuple(name for name, row in _by_name.items() if not row.integer)


def function_of(target: Any) -> Any:
    """A call_function target as tables have it: for an overload, its operator (torch.ops.aten.relu)."""
    return target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target


def find_function(target: Any) -> Spelling | None:
    """The row that a call_function target spells."""
    try:
        return _by_spelling.get(function_of(target))
    except TypeError:  # an unhashable callable is no spelling
        return None


def find_method(name: str) -> Spelling | None:
    """The row that a Tensor method spells."""
    return _by_spelling.get(_method(name))


def find_module(module: nn.Module) -> Spelling | None:
    """The row that a module computes. Only exact types count, since a subclass may compute anything."""
    spelling = _by_spelling.get(type(module))
    if spelling is None:
        return None
    return Spelling(spelling.row, bool(getattr(module, "inplace", False)))


def split_in_place(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any], bool]:
    """Separates the flag `inplace` of torch.nn.functional's Python functions from a call's other arguments."""
    remaining, named = list(args), dict(kwargs)
    flag = named.pop("inplace", False)
    if inspect.isfunction(target):
        names = list(inspect.signature(target).parameters)
        if "inplace" in names and names.index("inplace") < len(remaining):
            flag = remaining.pop(names.index("inplace"))
    return remaining, named, bool(flag)


def bind(row: Callee, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arguments of a call in the order of row.params, defaults filled in. Raises Rejected with the reason."""
    params = row.params
    bound: dict[str, Any] = {}
    if len(args) > len(params):
        raise Rejected(f"{row.name} with {len(args)} arguments")
    for name, arg in zip(params, args, strict=False):
        bound[name] = arg
    for name, arg in kwargs.items():
        name = "input" if name == "self" else name
        if name not in params or name in bound:
            raise Rejected(f"{row.name} with argument {name}={arg!r}")
        bound[name] = arg
    for name, default in params.items():
        if name not in bound:
            if default is REQUIRED:
                raise Rejected(f"{row.name} without argument {name}")
            bound[name] = default
    for name, value in bound.items():
        if type(value) is int and value not in NUMBERS:
            raise Rejected(f"{row.name}'s argument {name} is a number that torch does not take")
    return tuple(bound[name] for name in params)


def module_arguments(row: Row, module: nn.Module) -> dict[str, Any]:
    """The operation's parameters, tensors included, read from a module's attributes (nn.ELU has .alpha)."""
    return {name: getattr(module, name) for name in list(row.params)[1:] if hasattr(module, name)}


def register_pointwise(
    name: str,
    *,
    reference: Callable[..., torch.Tensor],
    code: str,
    spellings: Sequence[Any] = (),
    params: Mapping[str, Any] | None = None,
    interval: interval.Rule = interval.anything,
) -> PointwiseOp:
    """Teach fxfuse an operation of your own: one row of the op table.

        def cubed(x):
            return x * x * x

        fxfuse.register_pointwise("cubed", reference=cubed, code="{0} * {0} * {0}", spellings=(cubed,))

    A call of a function that is a spelling stays one node of the graph: with `fxfuse.optimize` if the model calls it by
    a global name, with Dynamo always. Otherwise the function is traced through, and the result is the same.

    A name that was registered before is replaced, as when a notebook's cell runs again. Models that are optimised
    already use the operation's new meaning from their next call on. Registering the same again changes nothing. Dynamo
    of torch 2.3 does not notice that a function was defined again: call `torch.compiler.reset()` there.

    Args:
        name: the operation's name in an epilogue's text: an identifier that is no operation of fxfuse's own and does
            not end in an underscore.
        reference: the operation in torch, on tensors of any shape and dtype, elementwise in its first argument.
            Used as fallback, for gradients and for dtype promotion.
        code: C++ expression with {0}, {1}, … for the arguments (float); the functions of the math headers
            (exp, log1p, tanh, erf, minimum, …) may be called, and `{t} = …;` introduces a temporary.
        spellings: the forms of the operation in a graph: functions (call_function targets), nn.Module types, or method
            names.
        params: parameter names with defaults (`fxfuse.ops.REQUIRED` for none); one required argument if omitted.
        interval: rule for the result's range (see fxfuse.interval); no knowledge if omitted.

    Raises FxfuseError if the name cannot be an operation's or is one of fxfuse's own, if the code does not fit the
    parameters, or if a spelling is another operation's. Then nothing has changed.
    """
    _check_name(name)
    old = _by_name.get(name)
    new = PointwiseOp(name, reference, code, interval, params or UNARY, tuple(spellings), recast=True)
    if new == old:
        return new
    try:
        expand_code(new, [f"x{i}" for i in range(len(new.params))], "t")
    except (IndexError, KeyError, ValueError) as error:
        raise FxfuseError(
            f"register_pointwise: code {code!r} of {name!r} does not fit its parameters: {error}"
        ) from None
    strange = [
        item for item in spellings if not (isinstance(item, str) or (callable(item) and isinstance(item, Hashable)))
    ]
    if strange:
        raise FxfuseError(f"register_pointwise: {strange[0]!r} is no function, module type or method name")
    for item in spellings:
        other = _by_spelling.get(_method(item) if isinstance(item, str) else item)
        if other is not None and other.row is not old:
            raise FxfuseError(f"register_pointwise: {item!r} already spells the operation {other.row.name!r}")
    if old is not None:
        for item in old.spellings:
            del _by_spelling[_method(item) if isinstance(item, str) else item]
        _overwriting.pop(f"{name}_", None)
    _by_name[name] = new
    for item in spellings:
        _by_spelling[_method(item) if isinstance(item, str) else item] = Spelling(new, False)
    if _DYNAMO in sys.modules:
        keep_in_dynamos_graphs()
    if old is not None:
        for forget in on_replacement:
            forget(old)
    return new


on_replacement: Final[list[Callable[[PointwiseOp], None]]] = []
"""Functions that are called with each row that register_pointwise replaces. They drop what was derived from it."""

_BUILT_IN: Final = frozenset(_by_name)
_DYNAMO: Final = "torch._dynamo"


def _check_name(name: str) -> None:
    """Raises FxfuseError unless a user's operation can have this name."""
    if (
        not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
        or name in ("acc", "inf", "nan")
        or (name[0] in "ot" and name[1:].isdigit())
    ):
        raise FxfuseError(f"register_pointwise: {name!r} cannot be an operation's name")
    if name.endswith("_"):
        raise FxfuseError(f"register_pointwise: {name!r} ends in an underscore, which stands for an operation in place")
    if name in _BUILT_IN:
        raise FxfuseError(
            f"register_pointwise: {name!r} is an operation of fxfuse's own, which cannot be replaced; "
            "choose another name"
        )


def own_functions() -> tuple[Callable[..., Any], ...]:
    """The functions that are spellings of the user's operations."""
    rows = [row for name, row in _by_name.items() if name not in _BUILT_IN]
    return tuple(item for row in rows for item in row.spellings if inspect.isfunction(item))


def own_code(expression: Expr) -> tuple[tuple[str, str], ...]:
    """The names and C++ texts of the user's operations in an expression, whose own text has only the names."""
    called = dict.fromkeys(node.op for node in postorder(expression) if isinstance(node, Call))
    return tuple((name, row(name).code) for name in called if (row(name).in_place_of or name) not in _BUILT_IN)


def keep_in_dynamos_graphs() -> None:
    """Lets Dynamo keep calls of `own_functions` as nodes. It would trace through these functions otherwise.

    Called once Dynamo is about to capture a model: importing it takes a second.
    """
    import torch._dynamo

    for function in own_functions():
        torch._dynamo.allow_in_graph(function)


def expand_code(op: PointwiseOp, args: Sequence[str], prefix: str) -> tuple[list[tuple[str, str]], str]:
    """C++ for `op` applied to argument texts: (variable, text) pairs to compute first, then the value's text.

    `prefix` makes the temporaries' names unique.
    """
    *definitions, value = [part.strip() for part in op.code.split(";")]
    names: dict[str, str] = {}
    temporaries: list[tuple[str, str]] = []
    for definition in definitions:
        name, _, text = definition.partition("=")
        variable = name.strip().strip("{}")
        text = text.strip().format(*args, **names)
        names[variable] = f"{prefix}_{variable}"
        temporaries.append((names[variable], text))
    return temporaries, value.format(*args, **names)


def is_recast(expression: Expr) -> bool:
    """Whether torch.autocast might cast what the expression's operations work on (see PointwiseOp.recast)."""
    return any(
        # number / tensor is the tensor's reciprocal
        row(node.op).recast or (node.op == "div" and isinstance(node.args[0], Const))
        for node in postorder(expression)
        if isinstance(node, Call)
    )


def is_boolean(expression: Expr) -> bool:
    """Whether the value is a truth value (comparisons and what combines them)."""
    if isinstance(expression, Const):
        return isinstance(expression.value, bool)
    return isinstance(expression, Call) and row(expression.op).boolean
