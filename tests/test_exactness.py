"""What eager's error is and what kernels' may be: measured against float64 on a part of a result. No GPU is needed."""

import contextlib
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import CAPABILITY
from torch import nn
from torch.nn import functional as F

import fxfuse
from fxfuse.cuda import exactness
from fxfuse.problem import Problem, TensorMeta

CPU = torch.device("cpu")
CONV2D = (("stride", (1, 1)), ("padding", (1, 1)), ("dilation", (1, 1)))


def meta(*shape):
    return TensorMeta(shape, torch.empty(shape, device="meta").stride(), torch.float32, CPU)


def problem(kind, x, weight, bias=None, operands=(), epilogue="relu(acc)", options=()):
    bias = None if bias is None else meta(*bias)
    return Problem(kind, options, epilogue, meta(*x), meta(*weight), bias, tuple(meta(*shape) for shape in operands))


CASES = {
    "linear": problem("linear", (500, 64), (400, 64), (400,), ((400,), (500, 1)), "relu(acc + o0) * o1"),
    "rows of a batch": problem("linear", (3, 200, 32), (48, 32), None, ((3, 200, 48), (200, 1)), "acc * o0 + o1"),
    "matmul": problem("matmul", (40, 32), (32, 300), None, ((40, 300),), "acc + o0"),
    "bmm": problem("bmm", (3, 200, 32), (3, 32, 300), None, ((3, 200, 1), (300,)), "relu(acc * o0) + o1"),
    "bmm, many": problem("bmm", (400, 7, 9), (400, 9, 5), None, (), "acc * 2"),
    "conv2d_weight": problem(
        "conv2d_weight", (3, 40, 5, 4), (3, 300, 9, 7), None, (), "acc * 2",
        (("kernel", (3, 2)), ("stride", (2, 2)), ("padding", (1, 1)), ("dilation", (1, 2)), ("groups", 1)),
    ),
    "conv2d_weight, depthwise": problem(
        "conv2d_weight", (2, 40, 9, 7), (2, 40, 9, 7), None, (), "acc", (("kernel", (3, 3)), *CONV2D, ("groups", 40)),
    ),
    "addmm": problem("addmm", (300, 32), (32, 300), (300,), (), "acc", (("beta", 2), ("alpha", 0.5))),
    "conv2d": problem(
        "conv2d", (3, 8, 9, 7), (40, 8, 3, 3), (40,), ((40, 1, 1), (3, 40, 9, 7)), "acc * o0 + o1",
        (*CONV2D, ("groups", 1)),
    ),
    "depthwise": problem("conv2d", (2, 40, 9, 7), (40, 1, 3, 3), None, ((40,),), "prelu(acc, o0)",
                         (*CONV2D, ("groups", 40))),
    "one image": problem("conv2d", (4, 9, 7), (40, 4, 3, 3), (40,), (), "acc", (*CONV2D, ("groups", 1))),
    "channels": problem("conv2d", (2, 4, 9, 7), (64, 4, 3, 3), (64,), ((64,),), "prelu(acc, o0)",
                        (*CONV2D, ("groups", 1))),
}  # fmt: skip


@pytest.fixture
def on_cpu(monkeypatch):
    """Measures on the CPU what it otherwise would on a GPU."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch, "autocast", lambda *of, **options: contextlib.nullcontext())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_part_in_float64_is_that_of_the_whole_result(case):
    x, weight, bias, operands = exactness.example(case)
    part = exactness.Part(case)
    exact = part.exact(x, weight, bias, operands)
    whole = case.reference(
        x.double(), weight.double(), None if bias is None else bias.double(), [operand.double() for operand in operands]
    )
    torch.testing.assert_close(exact, part.of_result(whole), rtol=1e-12, atol=1e-12)
    assert exact.numel() <= max(exactness.MOST_ROWS * exactness.MOST_COLUMNS, 40 * 63)


def rounded_to_tf32(tensor):
    return ((tensor.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def by_tf32(x, weight, bias, operands):
    return torch.relu(F.linear(rounded_to_tf32(x), rounded_to_tf32(weight), bias))


def test_a_kernel_is_judged_by_eagers_own_error(on_cpu):
    plain = problem("linear", (64, 256), (64, 256), (64,))
    errors = exactness.errors(plain, {"eager": plain.reference, "tf32": by_tf32})
    assert 0 < errors["eager"] <= 1 < 100 < errors["tf32"]


def split(tensor):
    """A number as two of TF32, the first one's rounding error the second."""
    high = rounded_to_tf32(tensor)
    return high, rounded_to_tf32(tensor - high)


def by_three_products_of_tf32(x, weight, bias, operands):
    (x, x_low), (weight, weight_low) = split(x), split(weight)
    x, x_low, weight, weight_low, bias = (tensor.double() for tensor in (x, x_low, weight, weight_low, bias))
    return torch.relu(F.linear(x, weight, bias) + F.linear(x_low, weight) + F.linear(x, weight_low)).float()


def in_units_of_the_largest(x, weight, bias, operands):
    """What a Frobenius norm does not see: all digits of the large results, few of the small ones."""
    result = F.linear(x.double(), weight.double(), bias.double())
    unit = result.abs().amax() * 2.0**-26
    return torch.relu(torch.round(result / unit) * unit).float()


@pytest.mark.parametrize(
    ("kernel", "exact"),
    [(by_three_products_of_tf32, True), (by_tf32, False), (in_units_of_the_largest, False)],
)
def test_wide_data_is_judged_element_by_element(kernel, exact, on_cpu, monkeypatch):
    monkeypatch.setattr(exactness, "ALLOWED", {"wide": exactness.ALLOWED["wide"]})
    for features in (16, 64, 256):
        plain = problem("linear", (128, features), (96, features), (96,))
        assert (exactness.errors(plain, {"kernel": kernel})["kernel"] <= 1) is exact


@pytest.mark.parametrize("data", ["normal", "uniform"])
def test_of_sums_that_are_alike_the_measure_is_the_frobenius_norm(data):
    plain = problem("linear", (64, 256), (64, 256), (64,))
    tensors, part = exactness.example(plain, data), exactness.Part(plain)
    exact, found = part.exact(*tensors), by_tf32(*tensors)
    expected = float((found - exact).norm() / exact.norm())
    assert exactness.relative_error(found, exact, part.magnitude(*tensors[:3])) == pytest.approx(expected, rel=0.1)
    assert exactness.relative_error(found, exact) == pytest.approx(expected)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_magnitude_is_the_sum_of_absolute_products(case):
    x, weight, bias, _ = exactness.example(case)
    part = exactness.Part(case)
    negative = {"beta": -2, "alpha": -0.5} if case.kind == "addmm" else {}
    case = dataclasses.replace(case, options=tuple({**dict(case.options), **negative}.items()))
    absolute = [None if tensor is None else tensor.abs() for tensor in (x, weight, bias)]
    torch.testing.assert_close(exactness.Part(case).magnitude(x, weight, bias), part.anchor(*absolute))


def test_what_overflows_in_eager_is_not_compared(on_cpu):
    """Else its error would be infinite, and every kernel within it."""
    plain = problem("linear", (64, 256), (64, 256), (64,), (), "exp(acc * 4.0)")
    tensors = exactness.example(plain)
    assert plain.reference(*tensors).isinf().any() and exactness.Part(plain).exact(*tensors).isfinite().all()

    def by_tf32_and_exp(x, weight, bias, operands):
        return torch.exp(F.linear(rounded_to_tf32(x), rounded_to_tf32(weight), bias) * 4.0)

    errors = exactness.errors(plain, {"eager": plain.reference, "tf32": by_tf32_and_exp})
    assert 0 < errors["eager"] <= 1 < errors["tf32"]


def test_a_kernel_that_fails_is_not_as_exact(on_cpu):
    def failing(*tensors):
        raise ZeroDivisionError

    plain = problem("linear", (64, 256), (64, 256))
    errors = exactness.errors(plain, {"failing": failing, "eager": plain.reference})
    assert errors["failing"] == torch.inf and errors["eager"] <= 1


@pytest.mark.parametrize(
    "change", [{"fp32": "fast"}, {"kind": "layer_norm"}, {"pool": (2, 2, 2, 2, 0, 0, False)}], ids=str
)
def test_what_need_not_be_as_exact_is_not_judged(change):
    plain = problem("linear", (64, 256), (64, 256))
    assert exactness.is_judged(plain) and not exactness.is_judged(dataclasses.replace(plain, **change))


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Where TF32 is allowed, and the library's error is what is appended; notes how often that was measured."""

    class Library:
        error, asked = 0.0, 0

        def measure(self, problem):
            self.asked += 1
            return self.error, self.error

        def new_process(self):
            monkeypatch.setattr(exactness, "_of_eager", {})

    fake = Library()
    fake.new_process()
    monkeypatch.setenv("FXFUSE_TUNE", "1")
    monkeypatch.setenv("FXFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(exactness, "_library_error", fake.measure)
    monkeypatch.setattr(exactness, "precision", lambda kind, dtype, fp32: "tf32")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return fake


@pytest.mark.parametrize(("error", "chosen"), [(3e-4, "tf32"), (2e-7, "tf32x3"), (2.5e-6, "tf32x3")])
def test_tf32_is_used_where_eager_has_its_error(error, chosen, library):
    library.error = error
    for _ in range(2):  # a new process finds what the first has stored
        assert exactness.precision_of(CASES["conv2d"]) == exactness.precision_of(CASES["conv2d"]) == chosen
        assert library.asked == 1
        library.new_process()


def test_fast_float32_is_tf32_wherever_that_is_allowed(library):
    assert exactness.precision_of(dataclasses.replace(CASES["conv2d"], fp32="fast")) == "tf32" and not library.asked


@pytest.mark.parametrize("hindrance", ["switched off", "capture", "memory"])
def test_what_cannot_be_measured_is_computed_exactly_for_now(hindrance, library, monkeypatch):
    library.error = 3e-4
    with monkeypatch.context() as patch:
        if hindrance == "switched off":
            patch.setenv("FXFUSE_TUNE", "0")
        elif hindrance == "capture":
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        else:
            patch.setattr(exactness, "_library_error", lambda problem: None)
        assert exactness.precision_of(CASES["conv2d"]) == "tf32x3" and not library.asked
    assert exactness.precision_of(CASES["conv2d"]) == "tf32"
    monkeypatch.setenv("FXFUSE_TUNE", "0")
    library.new_process()
    assert exactness.precision_of(CASES["conv2d"]) == "tf32" and library.asked == 1  # it is remembered


def test_eager_is_measured_by_threads_that_end(library, monkeypatch):
    """cuBLAS has memory for each thread that has called it, which the next one gets when that one has ended."""
    measuring = []

    def measure(problem):
        assert not [thread for thread in measuring if thread.is_alive()]
        measuring.append(threading.current_thread())
        return 0.0, 0.0

    monkeypatch.setattr(exactness, "_library_error", measure)
    products = [problem("linear", (8, size), (8, size)) for size in range(1, 7)]
    with ThreadPoolExecutor(6) as drafting:
        assert set(drafting.map(exactness.precision_of, products)) == {"tf32x3"}
    assert len(measuring) == 6 and not [thread for thread in measuring if thread.is_alive()]


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000])
def test_damaged_memory_is_measured_anew(text, library):
    library.error = 3e-4
    exactness.precision_of(CASES["conv2d"])
    exactness.file_of(exactness._key(CASES["conv2d"])).write_text(text)
    library.new_process()
    assert exactness.precision_of(CASES["conv2d"]) == "tf32" and library.asked == 2


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_result_that_is_not_finite_is_infinitely_wrong(wrong):
    exact = torch.tensor([1.0, 2.0, torch.inf], dtype=torch.float64)
    assert exactness.relative_error(torch.tensor([1.0, wrong, torch.inf]), exact) == torch.inf
    assert exactness.relative_error(torch.tensor([1.0, 2.0, wrong]), exact) == 0.0


LAYERS = {
    "few channels": (lambda: nn.Conv2d(8, 64, 3), (16, 8, 65, 66)),
    "a stem": (lambda: nn.Conv2d(3, 64, 7, 2, 3), (8, 3, 64, 64)),
    "patches": (lambda: nn.Conv2d(3, 96, 16, 16), (8, 3, 224, 224)),
    "many channels": (lambda: nn.Conv2d(64, 128, 3, padding=1), (16, 64, 56, 56)),
    "1x1": (lambda: nn.Conv2d(256, 64, 1), (16, 256, 28, 28)),
    "grouped": (lambda: nn.Conv2d(64, 64, 3, padding=1, groups=4), (8, 64, 28, 28)),
    "depthwise": (lambda: nn.Conv2d(96, 96, 7, padding=3, groups=96), (8, 96, 28, 28)),
}


@pytest.mark.gpu
@pytest.mark.skipif(CAPABILITY < (8, 0), reason="needs an sm_80 GPU")
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_convolutions_are_as_exact_as_eagers_with_torchs_default_switches(name, channels_last, new_cache, monkeypatch):
    monkeypatch.setenv("FXFUSE_TUNE", "1")
    assert torch.backends.cudnn.allow_tf32
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = nn.Sequential(make(), nn.ReLU()).eval().cuda().to(memory_format=layout)
    x = torch.randn(shape, device="cuda").to(memory_format=layout)
    found = fxfuse.verify(model, fxfuse.optimize(model, (x,)), (x,))
    assert found.ok, found
