"""Simplification: what it removes, what it must not touch, and that values stay the same."""

import math

import pytest
import torch

from fxfuse import ops
from fxfuse.expression import Acc, Call, Const, parse
from fxfuse.interval import Interval
from fxfuse.reference import evaluate
from fxfuse.simplify import ranges, simplify


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # the reference models
        ("clamp(tanh(clamp(acc * sigmoid(acc) / 2.0, -1, 1)), -1, 1)", "tanh(clamp(silu(acc) * 0.5, -1, 1))"),
        ("t0 = acc + o0; clamp(gelu(tanh(sigmoid(t0) * t0)), -1.0, 1.0)", "gelu(tanh(silu(acc + o0)))"),
        # clamps that change nothing, and clamps that do
        ("relu(relu(acc))", "relu(acc)"),
        ("relu(sigmoid(acc))", "sigmoid(acc)"),
        ("clamp(sigmoid(acc), 0, 1)", "sigmoid(acc)"),
        ("clamp(sigmoid(acc), 0, 0.9)", "clamp(sigmoid(acc), 0, 0.9)"),
        ("clamp(silu(acc), -1, inf)", "silu(acc)"),
        ("maximum(mish(acc), -0.2)", "maximum(mish(acc), -0.2)"),
        ("maximum(mish(acc), -0.4)", "mish(acc)"),
        ("minimum(relu(acc), 6)", "minimum(relu(acc), 6)"),
        ("abs(exp(acc))", "exp(acc)"),
        ("abs(acc - 1)", "abs(acc - 1)"),
        ("clamp(acc, -inf, inf)", "acc"),
        ("clamp(sin(acc) + cos(acc), -3, 3)", "sin(acc) + cos(acc)"),
        ("clamp(sin(acc) * 2, -1, 1)", "clamp(sin(acc) * 2, -1, 1)"),
        ("relu(leaky_relu(acc, 0.01))", "relu(leaky_relu(acc, 0.01))"),
        ("clamp(where(acc > 0, sigmoid(acc), tanh(acc)), -1, 1)", "where(acc > 0, sigmoid(acc), tanh(acc))"),
        # composites
        ("sigmoid(acc) * acc", "silu(acc)"),
        ("acc * tanh(softplus(acc, 1.0, 20.0))", "mish(acc)"),
        ("acc * tanh(softplus(acc, 2.0, 20.0))", "acc * tanh(softplus(acc, 2.0, 20.0))"),
        ("acc * sigmoid(1.702 * acc)", "acc * sigmoid(1.702 * acc)"),
        # arithmetic
        ("acc * 1.0 / 1 - 0", "acc"),
        ("acc + 0.0", "acc + 0.0"),  # turns -0.0 into 0.0
        ("-(-acc)", "acc"),
        ("acc / 4", "acc * 0.25"),
        ("acc / 3", "acc / 3"),
        ("acc / 0.0", "acc / 0.0"),
        ("o0 * 1 + acc", "o0 * 1 + acc"),  # an integer operand would not promote as o0 alone does
        ("where(acc > 0, o0, o0) + acc", "where(acc > 0, o0, o0) + acc"),
        ("clamp(acc, nan, 1)", "clamp(acc, nan, 1)"),
        ("clamp(tanh(acc), -1, nan)", "clamp(tanh(acc), -1, nan)"),
    ],
)
def test_simplify(before, after):
    assert str(simplify(parse(before))) == after


def test_simplified_is_final():
    expression = parse("clamp(tanh(clamp(acc * sigmoid(acc) / 2.0, -1, 1)), -1, 1)")
    assert simplify(simplify(expression)) is simplify(expression)


def _unary_calls():
    """Every operation that takes one tensor, with its default or a plausible parameter."""
    yield "new_full", Call("new_full", (Acc(), Const(1), Const(1.5)))
    for name in ops.names():
        row = ops.row(name)
        rest = list(row.params.values())[1:]
        values = [1.5 if default is ops.REQUIRED else default for default in rest]
        others = (
            "where", "masked_fill", "type_as", "assign", "logical_and", "logical_or", "lerp", "prelu", "new_full",
            "addcmul",
        )  # fmt: skip
        if name not in others and not name.startswith("batch_norm"):
            yield name, Call(name, (Acc(), *(Const(value) for value in values)))


@pytest.mark.parametrize(
    ("name", "expression"), list(_unary_calls()), ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_intervals_hold_every_value(name, expression, dtype):
    """The rule's range contains what torch computes, over the whole line and over a bounded argument."""
    x = torch.cat([torch.linspace(-12, 12, 20001), torch.tensor([0.0, -0.0, 1e30, -1e30, math.inf, -math.inf])]).to(
        dtype
    )
    whole = ranges(expression)[expression]
    bounded = Call(name, (Call("clamp", (Acc(), Const(-0.7), Const(1.3))), *expression.args[1:]))
    inner = ranges(bounded)[bounded]
    for found, result in ((whole, evaluate(expression, x, [])), (inner, evaluate(bounded, x, []))):
        result = result.double()
        result = result[~result.isnan()]
        assert result.min() >= found.lo, f"{name}: {result.min()} below {found}"
        assert result.max() <= found.hi, f"{name}: {result.max()} above {found}"


def test_some_intervals_are_tight():
    def of(text):
        expression = parse(text)
        return ranges(expression)[expression]

    assert of("tanh(acc)") == Interval(-1, 1)
    assert of("sigmoid(acc)") == Interval(0, 1)
    assert of("relu(acc)") == Interval(0, math.inf)
    assert of("clamp(acc, -2, 3)") == Interval(-2, 3)
    assert -0.3 < of("silu(acc)").lo < -0.278
    assert of("gelu(tanh(acc))").lo > -0.175 and of("gelu(tanh(acc))").hi < 0.86
