"""Random epilogues over the whole op table, from their text to compiled code, against torch in float64."""

import contextlib
import ctypes
import dataclasses
import itertools
import math
import random
import subprocess
from collections.abc import Sequence
from typing import TypeVar
from unittest import mock

import pytest
import torch
from helpers import gelu_keeps_infinity, randn, softshrink_keeps_nan

from fxfuse import build, ops
from fxfuse.codegen import function
from fxfuse.expression import Acc, Const, Expr, Operand, call, depends_on_acc, parse, postorder
from fxfuse.reference import evaluate
from fxfuse.simplify import simplify

OPERANDS = 3
T = TypeVar("T")

# --------------------------------------------------------------------------------------------- expressions

CASTS = ("float32", "float16", "bfloat16", "type_as", "assign")
"""Change the dtype that torch goes on in, so that float64 is no longer the exact result; see test_functional.py."""

CONSTANTS = ("full_like", "new_full")
"""No functions of what they are given; see test_chains.py."""

LAST = ("addcmul", "add_scaled", "sub_scaled", "clamp_min", "clamp_max")
"""Rows that are an expression's last call only: so all others are what they were before these rows were there."""

PARAMETERS = {
    "clamp": ((-1.5, 0.25), (-1, 1), (0.0, 6.0), (0.5, -0.5), (float("-inf"), 2.0)),
    "hardtanh": ((-1.0, 1.0), (0.0, 6.0), (-0.5, 0.25)),
    "threshold": ((0.1, -3.0), (-1.0, 20.0)),
    "leaky_relu": ((0.01,), (-0.3,), (1.5,)),
    "elu": ((1.0,), (0.3,)),
    "celu": ((1.0,), (0.3,), (-0.7,)),
    "softplus": ((1.0, 20.0), (2.0, 5.0), (0.5, 0.0)),
    "hardshrink": ((0.5,), (0.0,)),
    "softshrink": ((0.5,), (0.0,)),
}
"""Operations whose arguments beyond the first are numbers that the model's author wrote down."""

NUMBERS = (-2.0, -1, -0.5, 0.0, 0.25, 1, 1.0, 2, 3.0, 8, 1.702, 1e-3, 60.0)


def covered():
    return [name for name in ops.names() if name not in (*CASTS, *CONSTANTS) and not ops.row(name).channel_args]


class Draws:
    """Choices that depend on a seed alone: Random.random() is what Python promises never to change."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, count: int) -> int:
        return int(self._random() * count)

    def of(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]


def expression_of(draw: Draws, most_calls: int, last: str | None) -> Expr:
    """A DAG in which later calls take earlier ones; `last` is the last call."""
    numbers: list[Expr] = [Acc(), *(Operand(index) for index in range(OPERANDS))]
    truths: list[Expr] = []
    chosen = [name for name in covered() if name not in LAST]

    def number() -> Expr:  # mostly a recent value: chains and diamonds rather than wide trees
        return draw.of(numbers[-3:] + numbers)

    def number_or_constant() -> Expr:
        return Const(draw.of(NUMBERS)) if draw.below(3) == 0 else number()

    def truth() -> Expr:
        return draw.of(truths) if truths else call("gt", number(), 0.0)

    calls = 1 + draw.below(most_calls)
    for i in range(calls):
        name = last if last is not None and i == calls - 1 else draw.of(chosen)
        count = len(ops.row(name).params)
        if name in PARAMETERS:
            node = call(name, number(), *draw.of(PARAMETERS[name]))
        elif name == "where":
            node = call(name, truth(), number_or_constant(), number_or_constant())
        elif name == "masked_fill":
            node = call(name, number(), truth(), Const(draw.of(NUMBERS)))
        elif name.startswith("logical"):
            node = call(name, *(truth() for _ in range(count)))
        elif name == "addcmul":
            node = call(name, number(), number(), number(), Const(draw.of(NUMBERS)))
        elif name in ("add_scaled", "sub_scaled"):
            node = call(name, number(), number(), Const(draw.of(NUMBERS)))
        elif name in ("clamp_min", "clamp_max"):  # by a number they are maximum and minimum
            node = call(name, number(), number())
        elif name == "lerp":
            node = call(name, number(), number(), number_or_constant())
        elif count == 2 and name not in ("minimum", "maximum") and draw.below(2):
            node = call(name, number_or_constant(), number())
        elif count == 2:
            node = call(name, number(), number_or_constant())
        else:
            node = call(name, number())
        (truths if ops.row(name).boolean else numbers).append(node)
    if ops.row(name).boolean:
        numbers.append(call("where", truths[-1], number(), 0.5))
    return numbers[-1]


def drawn(number: int, most_calls: int = 8, last: str | None = None) -> Expr:
    """The number-th random expression, the same on every machine: the largest of some that use acc."""
    draw = Draws(number)
    endless = iter(lambda: expression_of(draw, most_calls, last), None)
    found = itertools.islice(filter(depends_on_acc, endless), 12)
    return max(found, key=lambda expression: len(list(postorder(expression))))


# --------------------------------------------------------------------------------------------------- values

SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 1e30, -1e30, 1.0, -1.0, 0.5, 20.0, 89.0)


def values(seed: int) -> torch.Tensor:
    """Ordinary numbers of several magnitudes, then special ones, which meet each other in every pair of two seeds."""
    ordinary = torch.cat([randn(400, seed=seed) * scale for scale in (0.1, 1.0, 1.0, 4.0)])
    special = torch.tensor(SPECIAL)
    repeat = special.repeat(len(SPECIAL)) if seed % 2 else special.repeat_interleave(len(SPECIAL))
    return torch.cat([ordinary, repeat])


ACC = values(0)
ARGUMENTS = [values(seed) for seed in range(1, 1 + OPERANDS)]


# In float64, too, torch's formulas lose the digits of 1 + erf and 1 + tanh for negative arguments.
EXACT = {
    name: dataclasses.replace(ops.row(name), reference=reference)
    for name, reference in {
        "gelu": lambda x: 0.5 * x * torch.erfc(-x * math.sqrt(0.5)),
        "gelu_tanh": lambda x: x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    }.items()
}


def quantiles(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The median, 90 % and 99 % of the elements' relative errors, where both are finite."""
    finite = actual.isfinite() & exact.isfinite()
    smallest_normal = torch.finfo(torch.float32).smallest_normal
    errors = (actual.double() - exact).abs() / exact.abs().clamp_min(smallest_normal)
    return (
        errors[finite].quantile(torch.tensor([0.5, 0.9, 0.99], dtype=torch.float64)) if finite.any() else torch.zeros(3)
    )


def kinds(value: torch.Tensor) -> torch.Tensor:
    """0 for a finite number, 1 and -1 for infinities, 2 for NaN."""
    return value.isinf() * value.nan_to_num(0.0).sign() + value.isnan() * 2


def assert_right(actual: torch.Tensor, expression: Expr, acc: torch.Tensor, operands: list[torch.Tensor]) -> None:
    """Elements as close to float64 as eager's float32, and NaN and infinities in the same places.

    Quantiles, because a comparison or a pole may fall to either side of a rounding error, in eager as in ours. For the
    same reason only those places count whose kind does not depend on the last bit of the inputs, and one in 500 may
    differ still: it depends on the last bit of a value inside, such as the 0 that gelu makes of 1 + erf.
    """
    eager = evaluate(expression, acc, operands)
    assert (actual.dtype, actual.shape) == (eager.dtype, eager.shape)
    with mock.patch.dict(ops._by_name, EXACT):
        exact = evaluate(expression, acc.double(), [operand.double() for operand in operands])
    error, eager_error = quantiles(actual, exact), quantiles(eager, exact)
    allowed = 4 * eager_error + 16 * torch.finfo(torch.float32).eps
    assert (error <= allowed).all(), f"{expression}: errors {error.tolist()}, eager's {eager_error.tolist()}"
    keeps = {"gelu": gelu_keeps_infinity, "softshrink": softshrink_keeps_nan}
    if any(name in str(expression) and not does() for name, does in keeps.items()):
        return  # eager's own places are wrong
    stable = torch.ones_like(eager, dtype=torch.bool)
    for towards in (float("inf"), float("-inf")):
        nudged = [torch.where(t.isfinite() & (t != 0), t.nextafter(torch.tensor(towards)), t) for t in (acc, *operands)]
        stable &= kinds(evaluate(expression, nudged[0], nudged[1:])) == kinds(eager)
    wrong = stable & (kinds(actual) != kinds(eager))
    if wrong.sum() > wrong.numel() // 500:
        where = tuple(int(index) for index in wrong.nonzero()[0])
        inputs = [float(t.expand(eager.shape)[where]) for t in (acc, *operands)]
        pytest.fail(f"{expression}: {float(actual[where])} instead of {float(eager[where])} for {inputs}")


# ---------------------------------------------------------------------------------------------------- tests


def test_text_and_expression_are_the_same_thing():
    for number in range(100):
        expression = drawn(number, most_calls=30)
        assert parse(str(expression)) is expression


def test_simplifying_keeps_values():
    for number in range(200):
        expression = drawn(number)
        simpler = simplify(expression)
        assert simplify(simpler) is simpler and depends_on_acc(simpler), expression
        assert_right(evaluate(simpler, ACC, ARGUMENTS), expression, ACC, ARGUMENTS)


HARNESS = """\
#include "math.h"
namespace fxfuse {{
{functors}
template <class Epilogue>
void run(float* __restrict__ acc, const float* __restrict__ o0, const float* __restrict__ o1,
         const float* __restrict__ o2, int64_t count) {{
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) acc[i] = Epilogue::expression(acc[i], o0[i], o1[i], o2[i]);
}}
}}
extern "C" [[gnu::visibility("default")]]
void run_expression(int64_t index, float* acc, const float* o0, const float* o1, const float* o2, int64_t count) {{
    using Run = void (*)(float*, const float*, const float*, const float*, int64_t);
    constexpr Run runs[] = {{{runs}}};
    runs[index](acc, o0, o1, o2, count);
}}
"""

COMPILED = [drawn(number, last=name) for number, name in enumerate(covered())]


@pytest.fixture(scope="module")
def run_expression(tmp_path_factory):
    """The generated functions of all expressions, simplified, in one library: a compiler's start costs a second."""
    folder = tmp_path_factory.mktemp("expressions")
    functors = [
        f"struct E{i} {{\n{function(simplify(e), OPERANDS, 'FXFUSE_INLINE static')}\n}};"
        for i, e in enumerate(COMPILED)
    ]
    runs = ", ".join(f"fxfuse::run<fxfuse::E{i}>" for i in range(len(COMPILED)))
    (folder / "all.cpp").write_text(HARNESS.format(functors="\n".join(functors), runs=runs))
    kernels = build.PACKAGE / "cpu" / "kernels"
    command = ["c++", *build.CPU_FLAGS, "-iquote", str(kernels), "-shared", "-fPIC", "all.cpp", "-o", "all.so"]
    subprocess.run(command, cwd=folder, check=True)
    run = ctypes.CDLL(str(folder / "all.so")).run_expression
    run.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * (1 + OPERANDS), ctypes.c_int64]
    return run


@pytest.mark.parametrize("index", range(len(COMPILED)), ids=covered())
def test_generated_code_computes_the_expression(run_expression, index):
    result = ACC.clone()
    run_expression(index, result.data_ptr(), *(operand.data_ptr() for operand in ARGUMENTS), len(result))
    assert_right(result, COMPILED[index], ACC, ARGUMENTS)


OPERAND_SHAPES = ((), (1,), (7,), (90, 1), (90, 7), (1, 7))
OPERAND_DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.bool)
REFUSED_BY_TORCH = (7, 11, 16)
"""Of the drawn expressions: lerp of several dtypes."""
REFUSED_BY_KERNELS = (1, 10)
"""What torch's kernels refuse for integers: logsigmoid, elu. Its meta functions, which fxfuse asks, refuse elu with
another error, and logsigmoid not at all."""


def call_of(index: int) -> tuple[Expr, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """An expression, x and weight with x @ weight.t() = acc, and operands of any dtype and shape."""
    operands = []
    for i in range(OPERANDS):
        shape, dtype = OPERAND_SHAPES[(index + 2 * i) % 6], OPERAND_DTYPES[(2 * index + i) % 6]
        operands.append((randn(*shape, seed=i) * 4).to(dtype))
    return drawn(index, most_calls=20), ACC[-90:].unsqueeze(1), torch.ones(7, 1), operands


@pytest.mark.parametrize("index", sorted({*range(17)} - {*REFUSED_BY_TORCH, *REFUSED_BY_KERNELS}))
def test_the_operator_computes_the_expression(index):
    expression, x, weight, operands = call_of(index)
    with torch.no_grad():
        actual = torch.ops.fxfuse.linear(x, weight, None, operands, str(simplify(expression)))
    assert_right(actual, expression, x @ weight.t(), operands)


@pytest.mark.parametrize("index", REFUSED_BY_TORCH)
def test_the_operator_refuses_what_torch_refuses(index):
    expression, x, weight, operands = call_of(index)
    with pytest.raises(RuntimeError) as refused:
        evaluate(expression, x @ weight.t(), operands)
    with contextlib.suppress(RuntimeError):
        evaluate(expression, (x @ weight.t()).to("meta"), [operand.to("meta") for operand in operands])
        pytest.skip(
            f"torch {torch.__version__}: its kernels refuse this, but not its meta functions, which fxfuse asks"
        )
    with pytest.raises(refused.type), torch.no_grad():
        torch.ops.fxfuse.linear(x, weight, None, operands, str(simplify(expression)))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs an sm_80 GPU"
)
@pytest.mark.parametrize("index", range(16))
def test_a_cuda_kernel_computes_the_expression(index):
    """The same in the epilogue of a GEMM; x has bfloat16's few digits, so that its product with 1 is exact."""
    expression = simplify(drawn(100 + index, most_calls=20))
    x = ACC.bfloat16().float().unsqueeze(1)
    operands = [operand.unsqueeze(1) for operand in ARGUMENTS]
    weight = torch.ones(7, 1)
    with torch.no_grad():
        actual = torch.ops.fxfuse.linear(
            x.cuda(), weight.cuda(), None, [operand.cuda() for operand in operands], str(expression), strict=True
        )
    acc = x.expand(-1, 7) + 0.0  # a sum that begins with 0 has no -0
    assert_right(actual.cpu(), expression, acc, [operand.expand(-1, 7) for operand in operands])
