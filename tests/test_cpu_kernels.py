"""The CPU kernels by themselves: compiled without torch, called through ctypes, compared with torch in float64."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import gelu_keeps_infinity

from fxfuse import build, ops
from fxfuse.codegen import OperandKind
from fxfuse.cpu.codegen import generate
from fxfuse.expression import parse
from fxfuse.reference import evaluate

HEADERS = Path(build.__file__).parent / "cpu" / "kernels"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def compile_library(source: str, directory: Path, name: str, *flags: str) -> ctypes.CDLL:
    """The loaded library; a warning is a failure."""
    path = directory / f"{name}.cpp"
    path.write_text(source)
    library = path.with_suffix(".so")
    command = [
        str(COMPILER), *build.CPU_FLAGS, "-fvisibility=default", *flags, "-Wall", "-Wextra", "-shared", "-fPIC",
        "-I", str(HEADERS), str(path), "-o", str(library),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning:" not in done.stderr, done.stderr
    return ctypes.CDLL(str(library))


# ------------------------------------------------------------------------------------------ primitives


@dataclass(frozen=True)
class Primitive:
    name: str
    reference: Callable[[torch.Tensor], torch.Tensor]
    ulps: float
    """Largest error allowed, in units in the last place of float32."""


PRIMITIVES = [
    Primitive("exp", torch.exp, 1.0),
    Primitive("expm1", torch.expm1, 1.5),
    Primitive("log", torch.log, 1.0),
    Primitive("log1p", torch.log1p, 1.5),
    Primitive("tanh", torch.tanh, 1.5),
    Primitive("sigmoid", torch.sigmoid, 2.5),
    Primitive("erf", torch.erf, 1.5),
    Primitive("sin", torch.sin, 2.0),
    Primitive("cos", torch.cos, 2.0),
    Primitive("sqrt", torch.sqrt, 0.5),
    Primitive("rsqrt", torch.rsqrt, 1.5),
    Primitive("abs", torch.abs, 0.0),
]
ROUNDINGS = {"round_to_half": F16, "round_to_bfloat16": BF16}


@pytest.fixture(scope="module")
def primitives(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = '#include "math.h"\n'
    for name in [*(primitive.name for primitive in PRIMITIVES), *ROUNDINGS]:
        source += (
            f'extern "C" void {name}_(const float* x, float* y, int64_t count) {{\n#pragma omp simd\n'
            f"    for (int64_t i = 0; i < count; ++i) y[i] = fxfuse::{name}(x[i]);\n}}\n"
        )
    for name in ("pow", "minimum", "maximum"):
        source += (
            f'extern "C" void {name}_(const float* a, const float* b, float* y, int64_t count) {{\n'
            f"#pragma omp simd\n    for (int64_t i = 0; i < count; ++i) y[i] = fxfuse::{name}(a[i], b[i]);\n}}\n"
        )
    return compile_library(source, tmp_path_factory.mktemp("primitives"), "primitives")


def call(library: ctypes.CDLL, name: str, *inputs: torch.Tensor) -> torch.Tensor:
    result = torch.full_like(inputs[0], math.nan)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*inputs, result)]
    getattr(library, f"{name}_")(*pointers, ctypes.c_int64(result.numel()))
    return result


def floats(step: int) -> torch.Tensor:
    """Every step-th float by bit pattern: all exponents, both signs, denormals, infinities and NaN."""
    patterns = torch.arange(0, 2**32, step, dtype=torch.int64)
    edges = torch.tensor([0x0, 0x1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000])
    patterns = torch.cat([patterns, edges, edges | 0x80000000])
    return torch.where(patterns < 2**31, patterns, patterns - 2**32).to(torch.int32).view(F32)


def ulp_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest distance in float32 ulps of the exact float64 values; infinity if NaN or inf do not agree.

    Where the exact value exceeds float32's range, the range's end counts one ulp after the largest float.
    """
    assert torch.equal(got.isnan(), want.isnan()), "NaN in different places"
    assert torch.equal(got.isinf() & want.isinf(), want.isinf()), "a finite value for an infinite one"
    valid = want.isfinite()
    value, exact = got[valid].double(), want[valid]
    end = 2.0**128
    value, exact = value.clamp(-end, end), exact.clamp(-end, end)
    exponent = torch.frexp(exact.abs().clamp(min=2.0**-126)).exponent.double()
    return float(((value - exact).abs() / torch.exp2(exponent - 24)).max())


@pytest.mark.parametrize("primitive", PRIMITIVES, ids=lambda primitive: primitive.name)
def test_primitive_is_accurate_over_the_whole_range(primitives: ctypes.CDLL, primitive: Primitive) -> None:
    x = floats(10007)
    got = call(primitives, primitive.name, x)
    assert ulp_error(got, primitive.reference(x.double())) <= primitive.ulps


@pytest.mark.parametrize("name, low", [("tanh", -1), ("erf", -1), ("sin", -1), ("cos", -1), ("sigmoid", 0)])
def test_primitive_stays_within_its_bounds(primitives: ctypes.CDLL, name: str, low: float) -> None:
    got = call(primitives, name, floats(10007))
    got = got[~got.isnan()]
    assert low <= got.min() and got.max() <= 1


@pytest.mark.parametrize("name", ["expm1", "log1p", "tanh", "erf", "sin", "sqrt"])
def test_primitive_keeps_signed_zero(primitives: ctypes.CDLL, name: str) -> None:
    assert torch.equal(call(primitives, name, torch.tensor([0.0, -0.0])).signbit(), torch.tensor([False, True]))


def test_sin_and_cos_reduce_the_largest_arguments(primitives: ctypes.CDLL) -> None:
    # the first is the float that lies closest to a multiple of pi/2
    x = torch.tensor([float.fromhex("0x1.6ac5b2p+84"), 3.4028235e38, 1e22, -1e10, 355.0])
    for name, function in (("sin", math.sin), ("cos", math.cos)):
        want = torch.tensor([function(value) for value in x.tolist()], dtype=torch.float64)
        assert ulp_error(call(primitives, name, x), want) <= 2


@pytest.mark.parametrize("name, dtype", ROUNDINGS.items())
def test_rounding_is_that_of_the_type(primitives: ctypes.CDLL, name: str, dtype: torch.dtype) -> None:
    x = floats(4099)
    x = torch.cat([x, torch.tensor([65519.996, 65520.0, 2.0**-25, 1.5 * 2.0**-24, 2.0**-14, 3.3895314e38])])
    got, want = call(primitives, name, x), x.to(dtype).float()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


EDGES = [
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 1.5, -2.5, math.inf, -math.inf, math.nan, 1e-45, -1e-45,
    1.1754944e-38, 3.4028235e38, -3.4028235e38, 1.0000001, 0.99999994, 8388607.5, 8388608.0, 16777215.0, 16777216.0,
    -16777215.0, 1e10,
]  # fmt: skip


def pairs(values: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor]:
    product = torch.tensor(list(itertools.product(values, values)))
    return product[:, 0].contiguous(), product[:, 1].contiguous()


def test_pow_at_its_edges_and_between(primitives: ctypes.CDLL) -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.exp(torch.randn(200_000, generator=generator) * 3)
    exponent = torch.randn(200_000, generator=generator) * 10
    integer = exponent.round()
    for x, y in (pairs(EDGES), (base, exponent), (-base, integer), (1 + (base - 1) * 1e-6, exponent * 1e5)):
        assert ulp_error(call(primitives, "pow", x, y), torch.pow(x.double(), y.double())) <= 0.6


@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_minimum_and_maximum_propagate_nan(primitives: ctypes.CDLL, name: str) -> None:
    a, b = pairs(EDGES)
    torch.testing.assert_close(call(primitives, name, a, b), getattr(torch, name)(a, b), rtol=0, atol=0, equal_nan=True)


def is_gcc_for_avx2() -> bool:
    """What the vectorisation test is written for."""
    if COMPILER is None or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    version = subprocess.run([COMPILER, "-v"], capture_output=True, text=True).stderr
    return "gcc version" in version


@pytest.mark.skipif(not is_gcc_for_avx2(), reason="reads g++'s vectoriser report, on a machine with AVX2")
def test_every_operation_vectorises(tmp_path: Path) -> None:
    names = [name for name in ops.names() if not re.fullmatch(r"\{\d\}", ops.row(name).code)]
    source = '#include "math.h"\nnamespace fxfuse {\n'
    for name in names:
        op = ops.row(name)
        temporaries, value = ops.expand_code(op, [f"a{i}" for i in range(len(op.params))], "t")
        read = [i for i in range(len(op.params)) if f"{{{i}}}" in op.code]
        values = [(f"a{i}", f"x{i}[i]") for i in read]
        lines = "".join(f"const float {variable} = {text}; " for variable, text in [*values, *temporaries])
        value = f"{value} ? a0 : 1.0f" if op.boolean else value
        parameters = ", ".join(f"const float* __restrict__ x{i}" for i in read)
        source += (
            f"void loop_{name}(float* __restrict__ y, int64_t count, {parameters}) {{\n#pragma omp simd\n"
            f"    for (int64_t i = 0; i < count; ++i) {{ {lines} y[i] = {value}; }}\n}}\n"
        )
    report = tmp_path / "report"
    compile_library(source + "}\n", tmp_path, "loops", f"-fdump-tree-vect-optimized={report}")
    functions = re.findall(r";; Function (?:\S+::)?loop_(\w+) (.*?)(?=;; Function|\Z)", report.read_text(), re.DOTALL)
    vectorised = {name for name, text in functions if "loop vectorized using 32 byte vectors" in text}
    assert vectorised == set(names)


# ------------------------------------------------------------------------------------------- the pass


def kind(dtype: torch.dtype | None, dims: str) -> OperandKind:
    """An operand that varies along the dimensions named by the letters b, r, c."""
    return OperandKind(dtype, ("b" in dims, "r" in dims, "c" in dims))


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ctypes.CDLL]:
    directory = tmp_path_factory.mktemp("passes")
    numbers = itertools.count()

    @functools.cache
    def compiled(text: str, dtype: torch.dtype, kinds: tuple[OperandKind, ...]) -> ctypes.CDLL:
        library = compile_library(generate(parse(text), dtype, kinds), directory, f"pass{next(numbers)}")
        library.fxfuse_launch.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint64]
        return library

    return compiled


Sizes = tuple[int, int, int]


def launch(library: ctypes.CDLL, output: torch.Tensor, operands: Sequence[torch.Tensor | float], threads: int) -> None:
    """Runs the pass on a 3-d `output`; operands have its shape (expanded dimensions have stride 0) or are numbers."""
    params = struct.pack("5q", *output.shape, *output.stride()[:2])
    pointers = [output.data_ptr()]
    for operand in operands:
        if isinstance(operand, torch.Tensor):
            params += struct.pack("3q", *operand.stride())
            pointers.append(operand.data_ptr())
        else:
            params += struct.pack("3q", 0, 0, 0)
            pointers.append(struct.unpack("I", struct.pack("f", operand))[0])
    packed = (ctypes.c_uint64 * len(pointers))(*pointers)
    assert library.fxfuse_launch(params, ctypes.addressof(packed), threads) == 0


def operand_of(sizes: Sizes, dims: str, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    shape = [size if dim in dims else 1 for dim, size in zip("brc", sizes, strict=True)]
    values = torch.randn(shape, generator=generator) * 3
    if dtype == torch.bool:
        values = values > 0
    elif dtype == torch.uint8:
        values = values.abs()
    return values.to(dtype).expand(sizes)


def check(
    compiled: Callable[..., ctypes.CDLL], text: str, output: torch.Tensor, operands: Sequence[torch.Tensor | float],
    dims: Sequence[str], threads: int = 2,
) -> None:  # fmt: skip
    """The pass against the expression in float64; elements of output's storage outside its view must stay."""
    kinds = tuple(
        kind(operand.dtype if isinstance(operand, torch.Tensor) else None, along)
        for operand, along in zip(operands, dims, strict=True)
    )
    library = compiled(text, output.dtype, kinds)
    exact = [
        operand if isinstance(operand, torch.Tensor) and operand.dtype == torch.bool
        else operand.double() if isinstance(operand, torch.Tensor) else torch.tensor(operand, dtype=torch.float64)
        for operand in operands
    ]  # fmt: skip
    want = evaluate(parse(text), output.double(), exact)
    launch(library, output, operands, threads)
    eps = torch.finfo(output.dtype).eps
    torch.testing.assert_close(output.double(), want, rtol=2 * eps, atol=4 * torch.finfo(F32).eps, equal_nan=True)


SIZES: list[Sizes] = [
    (1, 1, 1), (1, 1, 7), (1, 1, 1000), (2, 3, 1), (3, 5, 2), (2, 8, 49), (2, 3, 1023), (1, 2, 1025), (3, 700, 3),
    (2, 3, 5000), (5, 130, 64),
]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dims", ["", "c", "r", "b", "rc", "bc", "br", "brc"])
def test_operands_broadcast(passes: Callable[..., ctypes.CDLL], sizes: Sizes, dims: str) -> None:
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(sizes, generator=generator)
    check(passes, "tanh(acc + o0)", output, [operand_of(sizes, dims, F32, generator)], [dims])


INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@pytest.mark.parametrize(
    "dtype, other", [*((F32, other) for other in (F16, BF16, *INTEGERS)), (F16, F16), (F16, F32), (BF16, BF16)], ids=str
)
def test_dtypes(passes: Callable[..., ctypes.CDLL], dtype: torch.dtype, other: torch.dtype) -> None:
    sizes, generator = (3, 5, 333), torch.Generator().manual_seed(0)
    output = torch.randn(sizes, generator=generator).to(dtype)
    operands = [operand_of(sizes, "c", other, generator), operand_of(sizes, "brc", other, generator)]
    check(passes, "acc * 0.5 + o0 - o1", output, operands, ["c", "brc"])


def test_truth_values_choose(passes: Callable[..., ctypes.CDLL]) -> None:
    sizes, generator = (2, 3, 100), torch.Generator().manual_seed(0)
    output = torch.randn(sizes, generator=generator)
    operands = [operand_of(sizes, "brc", torch.bool, generator), operand_of(sizes, "r", torch.bool, generator)]
    check(passes, "where(o0, acc, where(o1, 0.0, -acc))", output, operands, ["brc", "r"])


def test_numbers_from_the_host(passes: Callable[..., ctypes.CDLL]) -> None:
    output = torch.randn(2, 3, 100)
    check(passes, "acc * o0 + o1", output, [-1.5, math.inf], ["", ""])


def test_operands_of_any_strides(passes: Callable[..., ctypes.CDLL]) -> None:
    generator = torch.Generator().manual_seed(0)
    transposed = torch.randn(4, 70, 5, generator=generator).transpose(1, 2)
    unaligned = torch.randn(1 + 70, generator=generator)[1:].expand(4, 5, 70)
    reversed_rows = torch.randn(4, 10, 70, generator=generator)[:, ::2]
    output = torch.randn(4, 5, 70, generator=generator)
    check(passes, "acc + o0 * o1 - o2", output, [transposed, unaligned, reversed_rows], ["brc", "c", "brc"])


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_rows_with_gaps_between_them(passes: Callable[..., ctypes.CDLL], dtype: torch.dtype) -> None:
    storage = torch.randn(3, 11, 50).to(dtype)
    before = storage.clone()
    view = storage[:, 1::2, 3:40]
    check(passes, "exp(acc) * o0", view, [torch.randn(5, 1).to(dtype).expand(3, 5, 37)], ["r"])
    untouched = torch.ones_like(storage, dtype=torch.bool)
    untouched[:, 1::2, 3:40] = False
    assert torch.equal(storage[untouched], before[untouched])


def test_nan_and_infinity_go_through(passes: Callable[..., ctypes.CDLL]) -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 3e38, -3e38, 1.0])
    texts = [
        "relu(acc)", "clamp(acc, -1, 1)", "silu(acc)", "gelu(acc)", "mish(acc)", "sigmoid(acc)", "hardswish(acc)",
        "leaky_relu(acc, 0.01)", "softplus(acc, 1.0, 20.0)", "elu(acc, 1.0)", "acc * acc - acc * acc",
    ]  # fmt: skip
    if not gelu_keeps_infinity():
        texts.remove("gelu(acc)")  # eager's own places are wrong
    for text in texts:
        output = values.repeat(30).view(1, 1, -1).clone()
        want = evaluate(parse(text), values.repeat(30).view(1, 1, -1), [])
        launch(passes(text, F32, ()), output, [], 1)
        assert torch.equal(output.isnan(), want.isnan()), text
        assert torch.equal(output.isinf(), want.isinf()), text


def test_the_number_of_threads_changes_nothing(passes: Callable[..., ctypes.CDLL]) -> None:
    sizes, generator = (3, 257, 333), torch.Generator().manual_seed(0)
    output = torch.randn(sizes, generator=generator)
    operand = operand_of(sizes, "br", F32, generator)
    library = passes("mish(acc + o0)", F32, (kind(F32, "br"),))
    results = []
    for threads in (1, 2, 3, 7):
        result = output.clone()
        launch(library, result, [operand], threads)
        results.append(result)
    assert all(torch.equal(result, results[0]) for result in results)


def test_an_empty_result_is_left_alone(passes: Callable[..., ctypes.CDLL]) -> None:
    library = passes("tanh(acc + o0)", F32, (kind(F32, "c"),))
    for shape in ((0, 2, 3), (2, 0, 3), (2, 3, 0)):
        launch(library, torch.empty(shape), [torch.zeros(shape)], 2)
