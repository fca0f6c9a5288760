"""Special functions on CUDA (cuda/kernels/math.cuh): errors against float64, in units in the last place of the result.

All functions are compiled into one kernel; row i of its input goes through function i.
"""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import ON_GPU

from fxfuse import build
from fxfuse.codegen import OperandKind
from fxfuse.cuda import codegen, pointwise
from fxfuse.expression import parse
from fxfuse.layout import Layout

pytestmark = ON_GPU

INFINITY = math.inf
SMALL = 2.0**-118
"""Below, results may be 0: a sigmoid below 2^-126 is, also where it is multiplied by its argument."""


@dataclasses.dataclass(frozen=True)
class Function:
    """An epilogue, its value in float64, and how exact it must be where."""

    text: str
    exact: Callable[[torch.Tensor], torch.Tensor]
    ulps: float = 2.0
    low: float = -INFINITY
    high: float = INFINITY
    """Arguments of which the bound holds."""


def single(number):
    return torch.tensor(number, dtype=torch.float32).item()


def gelu(x):
    return x * 0.5 * torch.special.erfc(-x * math.sqrt(0.5))


def gelu_tanh(x):
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def mish(x):
    n = torch.exp(x) * (torch.exp(x) + 2)
    return torch.where(x > 50, x, x * n / (n + 2))


def logsigmoid(x):
    return torch.clamp_max(x, 0) - torch.log1p(torch.exp(-x.abs()))


def tanhshrink(x):
    series = x**3 / 3 - 2 * x**5 / 15 + 17 * x**7 / 315 - 62 * x**9 / 2835
    return torch.where(x.abs() < 0.01, series, x - torch.tanh(x))


DIVISORS = [6.0, -0.75, 49.0, 1e-30, 1e30]

# The bounds of functions whose value changes faster than their argument, relatively, hold where it does not.
FUNCTIONS = [
    *(Function(f"acc / {c}", lambda x, c=c: x / single(c), ulps=1.5) for c in DIVISORS),
    Function("exp(acc)", torch.exp),
    Function("expm1(acc)", torch.expm1),
    Function("log(acc)", torch.log),
    Function("log1p(acc)", torch.log1p),
    Function("sin(acc)", torch.sin, low=-1e5, high=1e5),
    Function("cos(acc)", torch.cos, low=-1e5, high=1e5),
    Function("tanh(acc)", torch.tanh),
    Function("sigmoid(acc)", torch.sigmoid, ulps=2.25, low=-1.27),
    Function("erf(acc)", torch.erf),
    Function("rsqrt(acc)", torch.rsqrt),
    Function("sqrt(acc)", torch.sqrt, ulps=0.5),
    Function("floor(acc)", torch.floor, ulps=0.0),
    Function("ceil(acc)", torch.ceil, ulps=0.0),
    Function("trunc(acc)", torch.trunc, ulps=0.0),
    Function("round(acc)", torch.round, ulps=0.0),
    Function("sign(acc)", torch.sign, ulps=0.0),
    Function("pow(acc, 2.5)", lambda x: torch.pow(x, 2.5)),
    Function("silu(acc)", lambda x: x * torch.sigmoid(x), ulps=2.5, low=-1.3),
    Function("mish(acc)", mish, ulps=4.0),
    Function("gelu(acc)", gelu, ulps=2.5, low=-1.0),
    Function("gelu_tanh(acc)", gelu_tanh, ulps=2.6, low=-1.0),
    Function("elu(acc, 1.0)", F.elu),
    Function("celu(acc, 1.5)", lambda x: F.celu(x, 1.5), ulps=2.5),
    Function("selu(acc)", F.selu, ulps=2.25),
    Function("softplus(acc, 1.0, 20.0)", lambda x: torch.where(x > 20, x, torch.log1p(torch.exp(x))), ulps=2.5),
    Function("logsigmoid(acc)", logsigmoid, ulps=2.5),
    Function("softsign(acc)", F.softsign),
    Function("tanhshrink(acc)", tanhshrink, ulps=4.5),
    Function("hardswish(acc)", F.hardswish, high=5e37),
]


def arguments(dtype):
    """Every 4096th float, and a fine grid where functions bend; as float32 of the values that `dtype` has."""
    bits = torch.arange(-(2**31), 2**31, 4099, device="cuda").to(torch.int32)
    x = torch.cat([bits.view(torch.float32), torch.linspace(-30, 30, 2**20 + 1, device="cuda")])
    x = torch.cat([x, torch.tensor([0.0, -0.0, INFINITY, -INFINITY, math.nan], device="cuda")])
    return x.to(dtype).float()


def evaluate_all(x, output, tf32=False):
    """Every function of x, computed for a result of dtype `output`, as float64."""
    text = FUNCTIONS[0].text
    for index, function in enumerate(FUNCTIONS[1:], 1):
        text = f"where(o0 == {float(index)}, {function.text}, {text})"
    rows = len(FUNCTIONS)
    index = torch.arange(rows, dtype=torch.float32, device="cuda")
    acc = x.repeat(rows, 1)
    out = torch.empty(acc.shape, dtype=output, device="cuda")
    seen = Layout((1, rows, x.numel()), ((0, x.numel(), 1), (0, 1, 0)))
    kernel = pointwise.kernel(seen, acc.dtype, output)
    source = codegen.generate(
        parse(text), output, [OperandKind(torch.float32, (False, True, False))], kernel, tf32=tf32
    )
    launch = build.load(build.Source(source, torch.cuda.get_device_capability(), "special functions"))
    strides = torch.tensor([0, 1, 0]).numpy().tobytes()
    stream = torch.cuda.current_stream().cuda_stream
    launch(kernel.params + strides, stream, acc.data_ptr(), out.data_ptr(), index.data_ptr())
    return dict(zip(FUNCTIONS, out.double(), strict=True))


@pytest.fixture(scope="module", params=["float32", "tf32", "float16", "bfloat16"])
def values(request):
    tf32 = request.param == "tf32"
    dtype = torch.float32 if tf32 else getattr(torch, request.param)
    x = arguments(dtype)
    return dtype, tf32, x, evaluate_all(x, dtype, tf32)


def errors(have, exact, dtype):
    """Distances in ulps of `dtype`; 0 where the exact value overflows or is too small to be told from 0."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(exact)  # the exact value is in [0.5, 1) * 2^exponent
    ulp = torch.ldexp(torch.full_like(exact, info.eps), exponent - 1)
    told_apart = (exact.abs() < info.max) & (exact.abs() >= max(info.tiny, SMALL))
    return torch.where(told_apart, (have - exact).abs() / ulp, 0.0)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.text)
def test_error(function, values):
    dtype, tf32, x, results = values
    have, exact = results[function], function.exact(x.double())
    info = torch.finfo(dtype)
    single = dtype == torch.float32
    inside = (x >= function.low) & (x <= function.high) if single else x.abs() <= 1e5
    inside &= x >= -20 if tf32 else True
    assert torch.equal(have.isnan(), exact.isnan())
    assert torch.equal(have[inside] == INFINITY, exact[inside] >= info.max * (1 + info.eps / 4))
    assert bool((have[exact.abs() < max(info.tiny, SMALL)].abs() <= 2 * max(info.tiny, SMALL)).all())
    error = torch.where(inside, errors(have, exact, dtype), 0.0)
    worst = int(error.argmax())
    # TF32: a sixty-fourth of the 2^-11 to which it rounds. 16 bits: half an ulp by rounding the result, an eighth by
    # the function
    allowed = max(2**6, function.ulps) if tf32 else function.ulps if single else 0.625
    assert float(error[worst]) <= allowed, f"{float(error[worst])} at {float(x[worst])}"


def test_division_by_a_number_is_rounded_once(values):
    dtype, tf32, x, results = values
    if dtype != torch.float32 or tf32:
        pytest.skip("as torch divides by a number: an ulp off")
    for function, divisor in zip(FUNCTIONS, DIVISORS, strict=False):
        exact = x / torch.full_like(x, divisor)
        normal = (x.abs() >= 2.0**-100) & ((exact.abs() >= 2.0**-126) | (exact == 0)) | (x == 0) | x.isinf()
        assert torch.equal(results[function][normal], exact[normal].double()), function.text
