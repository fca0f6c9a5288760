"""verify() tells right from wrong; benchmark() measures what it is asked to."""

import copy
import dataclasses
import gc
import inspect
import re
import sys
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from helpers import Net, batch_norm, conv, linear, randn
from torch import nn

import fxfuse
from fxfuse import plans
from fxfuse.verify import ALLOWANCE

X = randn(16, 8)
benchmark = sys.modules["fxfuse.benchmark"]
"""The module: fxfuse.benchmark is its function."""


def model(**changes):
    torch.manual_seed(0)
    net = Net(changes.get("forward", lambda m, x: m.fc(x).tanh()), fc=linear())
    return net.to(changes.get("dtype", torch.float32)).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_right_model_is_ok(dtype):
    original = model(dtype=dtype)
    found = fxfuse.verify(original, fxfuse.optimize(original), (X.to(dtype),))
    assert found and found.ok and found.problem is None
    assert str(found).startswith("ok: error ")
    assert found.error <= 1.25 * found.eager_error + torch.finfo(dtype).eps


def test_errors_are_relative_frobenius_norms_against_float64():
    original = model()
    found = fxfuse.verify(original, model(forward=lambda m, x: m.fc(x).tanh() * 1.5), (X,))
    with torch.no_grad():
        exact = copy.deepcopy(original).double()(X.double())
        eager_error = (original(X).double() - exact).norm() / exact.norm()
    assert found.error == pytest.approx(0.5, rel=1e-5)
    assert found.eager_error == pytest.approx(float(eager_error), rel=1e-5)


@pytest.mark.parametrize(("precision", "ok"), [("highest", True), ("high", True), ("highest", False), ("high", False)])
def test_twice_eagers_error_and_an_ulp_are_allowed_whatever_the_switches_say(precision, ok):
    original = model()
    with torch.no_grad():
        exact = copy.deepcopy(original).double()(X.double())
        eager_error = float((original(X).double() - exact).norm() / exact.norm())
    allowed = ALLOWANCE * eager_error + torch.finfo(torch.float32).eps
    off = (0.75 if ok else 1.5) * allowed  # the perturbed output's own rounding is a quarter of an ulp

    class Perturbed(nn.Module):
        def forward(self, x):
            return (exact * (1 + off)).float()

    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        found = fxfuse.verify(original, Perturbed(), (X,))
    finally:
        torch.set_float32_matmul_precision(previous)
    assert found.ok is ok, str(found)


@pytest.mark.parametrize(("count", "allowed"), [(1, 20.1), (2, 8.3), (9, 2.7), (19, 2.0), (24, 2.0)])
def test_few_numbers_may_be_further_off_than_eagers_happen_to_be(count, allowed):
    original = model(forward=lambda m, x: m.fc(x).tanh().flatten()[:count])
    with torch.no_grad():
        exact = copy.deepcopy(original).double()(X.double())
    eager = exact * (1 + 1e-5)  # an error that rounding does not change

    class Perturbed(nn.Module):
        def __init__(self, off):
            super().__init__()
            self.off = off

        def forward(self, x):
            return (exact * (1 + self.off)).to(x.dtype)

    class Original(nn.Module):
        def forward(self, x):
            return exact if x.dtype == torch.float64 else eager.float()

    assert fxfuse.verify(Original(), Perturbed(0.95 * allowed * 1e-5), (X,)).ok
    assert not fxfuse.verify(Original(), Perturbed(1.1 * allowed * 1e-5), (X,)).ok


def poke(value, places=((3, 2),)):
    def forward(m, x):
        y = m.fc(x).tanh().clone()
        for place in places:
            y[place] = value
        return y

    return forward


WRONG = {
    "a value": (poke(0.5), "times eager's own"),
    "a slightly wrong function": (lambda m, x: m.fc(x).tanh() * 1.00001, "times eager's own"),
    "NaN": (poke(float("nan")), "NaN"),
    "infinity": (poke(float("inf")), "infinit"),
    "dtype": (lambda m, x: m.fc(x).tanh().double(), "float64"),
    "shape": (lambda m, x: m.fc(x).tanh()[None], r"\(1, 16, 8\)"),
    "number of outputs": (lambda m, x: (m.fc(x).tanh(), x), "2 outputs instead of 1"),
    "type": (lambda m, x: 3, "int instead of a Tensor"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_model_is_not(name):
    forward, problem = WRONG[name]
    found = fxfuse.verify(model(), model(forward=forward), (X,))
    assert not found and not found.ok
    assert re.search(problem, found.problem) and "NOT OK" in str(found)


class Cache:
    """An object that is equal to itself only."""

    def __init__(self, value):
        self.layers, self.owner = [value], self


def test_objects_are_compared_by_their_attributes():
    original = model(forward=lambda m, x: Cache(m.fc(x)))
    assert fxfuse.verify(original, fxfuse.optimize(original), (X,))
    assert not fxfuse.verify(original, model(forward=lambda m, x: Cache(m.fc(x) * 2)), (X,))


def test_nonfinite_values_in_the_same_places_are_ok():
    original = model(forward=poke(float("nan"), ((0, 0),)))
    assert fxfuse.verify(original, copy.deepcopy(original), (X,))
    original = model(forward=poke(float("-inf"), ((0, 0),)))
    assert fxfuse.verify(original, copy.deepcopy(original), (X,))
    assert not fxfuse.verify(original, model(forward=poke(float("inf"), ((0, 0),))), (X,))


def test_a_small_output_beside_a_large_one_counts():
    def outputs(small):
        return lambda m, x: {"large": m.fc(x) * 1e6, "small": m.fc(x).tanh() * small}

    assert fxfuse.verify(model(forward=outputs(1e-3)), model(forward=outputs(1e-3)), (X,))
    assert not fxfuse.verify(model(forward=outputs(1e-3)), model(forward=outputs(2e-3)), (X,))


def test_structures_of_inputs_and_outputs():
    def forward(m, x):
        return {"y": (m.fc(x["a"][0]).relu(), None, "text", x["b"]), "i": x["a"][0].argmax(-1)}

    original = model(forward=forward)
    assert fxfuse.verify(original, fxfuse.optimize(original), ({"a": [X], "b": torch.arange(3)},))


class TwoInputs(nn.Module):
    """As transformers' models are called: some arguments by name."""

    def __init__(self):
        super().__init__()
        self.fc = linear()

    def forward(self, x, shift, scale=None):
        y = self.fc(x).relu()
        return y + shift if scale is None else y * scale + shift


KEYWORDS = {"scale": randn(16, 1, seed=1), "shift": randn(8, seed=2)}
SPELLINGS = {
    "positional and keywords": (((X,),), {"kwargs": KEYWORDS}),
    "a list and keywords": (([X],), {"kwargs": KEYWORDS}),
    "a tensor and keywords": ((X,), {"kwargs": {"shift": KEYWORDS["shift"]}}),
    "a dict": (({"x": X, **KEYWORDS},), {}),
    "another mapping": ((UserDict({"x": X, **KEYWORDS}),), {}),  # transformers' BatchEncoding is one
    "keywords alone": ((), {"kwargs": {"x": X, **KEYWORDS}}),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_inputs_are_spelled_alike_everywhere(spelling, monkeypatch):
    positional, keywords = SPELLINGS[spelling]
    torch.manual_seed(0)
    original = TwoInputs().eval()
    fast = fxfuse.optimize(original, *positional, **keywords)
    calls = []
    fast.register_forward_pre_hook(lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    assert fxfuse.verify(original, fast, *positional, **keywords)
    fxfuse.benchmark(original, fast, *positional, compare=(), seconds=0.0, **keywords)
    for args, kwargs in calls:
        bound = inspect.signature(original.forward).bind(*args, **kwargs).arguments
        assert torch.equal(bound["x"], X) and torch.equal(bound["shift"], KEYWORDS["shift"])
    monkeypatch.setattr(plans, "_draft", None)  # nothing is left to be compiled
    with torch.no_grad():
        for args, kwargs in list(calls):  # each is one more
            fast(*args, **kwargs)


def test_a_tensor_is_the_only_argument():
    original = model()
    fast = fxfuse.optimize(original, X)
    assert fxfuse.verify(original, fast, X)
    assert fxfuse.benchmark(original, fast, X, compare=(), seconds=0.0).median("fxfuse") > 0


WRONG_INPUTS = {
    "an array": ((X.numpy(),), {}, "is a ndarray; pass a tuple"),
    "a number": ((3,), {}, "is a int; pass a tuple"),
    "a generator": (((x for x in [X]),), {}, "is a generator; pass a tuple"),
    "keywords twice": (({"x": X},), {"kwargs": {"shift": X}}, "give one of them"),
    "keys that are no names": (({0: X},), {}, r"0 is no name; pass \(\w*inputs,\)"),
    "keywords that are no mapping": (((X,),), {"kwargs": X}, "kwargs is a Tensor; pass a dict"),
}


@pytest.mark.parametrize("name", WRONG_INPUTS)
def test_other_inputs_are_refused_in_words(name):
    positional, keywords, words = WRONG_INPUTS[name]
    original = model()
    for function in (fxfuse.verify, fxfuse.benchmark):
        with pytest.raises(fxfuse.FxfuseError, match=words):
            function(original, original, *positional, **keywords)
    with pytest.raises(fxfuse.FxfuseError, match=words):
        fxfuse.optimize(original, *positional, **keywords)


@dataclasses.dataclass
class Output:
    value: torch.Tensor


def test_dataclass_outputs():
    original = model(forward=lambda m, x: Output(m.fc(x).relu()))
    assert fxfuse.verify(original, fxfuse.optimize(original), (X,))
    assert not fxfuse.verify(original, model(forward=lambda m, x: Output(m.fc(x))), (X,))


def test_nothing_is_changed():
    original = nn.Sequential(nn.ReLU(inplace=True), conv(), nn.BatchNorm2d(8), nn.Dropout(0.0)).train()
    before, image = copy.deepcopy(original.state_dict()), randn(2, 4, 6, 6)
    assert fxfuse.verify(original, fxfuse.optimize(original), (image,))
    assert torch.equal(image, randn(2, 4, 6, 6))
    assert all(torch.equal(value, before[name]) for name, value in original.state_dict().items())


def test_dropout_drops_the_same_in_all_runs():
    original = nn.Sequential(linear(), nn.ReLU(), nn.Dropout()).train()
    assert fxfuse.verify(original, fxfuse.optimize(original), (X,))


def test_random_weights_of_reference_blocks():
    original = nn.Sequential(conv(), batch_norm(), nn.Hardswish(), nn.Conv2d(8, 8, 3, groups=8), nn.GELU()).eval()
    assert fxfuse.verify(original, fxfuse.optimize(original), (randn(2, 4, 16, 16),))


# ------------------------------------------------------------------------------------------- benchmark


def test_the_table_has_the_contestants_asked_for():
    original = model()
    found = fxfuse.benchmark(original, fxfuse.optimize(original), (X,), compare=("eager",), seconds=0.05)
    assert [timing.name for timing in found.timings] == ["eager", "fxfuse"]
    for timing in found.timings:
        assert 0 < timing.minimum <= timing.median and timing.first_call > 0 and timing.runs >= 3
        assert timing.name in str(found)
    assert found.median("eager") == found.timings[0].median
    assert "CPU" in str(found) and torch.__version__ in str(found)


def test_fxfuse_alone():
    original = model()
    found = fxfuse.benchmark(original, fxfuse.optimize(original), (X,), compare=(), seconds=0.01)
    assert [timing.name for timing in found.timings] == ["fxfuse"]
    assert cells(found)["fxfuse"]["speed-up over eager"] == "-"


def cells(found):
    """The printed table, by row and column."""
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in str(found).splitlines() if "│" in line]
    return {row[0]: dict(zip(lines[0], row, strict=True)) for row in lines[1:]}


def test_columns_say_what_they_mean():
    timings = (
        benchmark.Timing("eager", 4e-3, 3e-3, 0.5, 7),
        benchmark.Timing("torch.compile", 8e-3, 7e-3, 9.0, 7, compile_time=9.5),
        benchmark.Timing("fxfuse", 2e-3, 1e-3, 1.0, 7, compile_time=1.25),
    )
    table = cells(benchmark.Benchmark(timings, "CPU"))
    assert table["fxfuse"] == {
        "": "fxfuse", "median ms": "2.000", "min ms": "1.000", "speed-up over eager": "2.00x",
        "compile time s": "1.25", "runs": "7",
    }  # fmt: skip
    assert [table[name]["speed-up over eager"] for name in ("eager", "torch.compile")] == ["1.00x", "0.50x"]


class Slow(nn.Module):
    """Whose first calls take so many seconds by a clock of its own, and all later ones one."""

    now = 0.0

    def __init__(self, *seconds):
        super().__init__()
        self.left = list(seconds)

    def forward(self, x):
        Slow.now += self.left.pop(0) if self.left else 1.0
        return x


def test_compile_time_is_what_the_first_calls_take_beyond_later_ones(monkeypatch):
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: Slow.now)
    slow = Slow(30.0, 1.0, 20.0)
    found = fxfuse.benchmark(Slow(), slow, (X,), compare=("eager",), seconds=0.0)
    eager, own = found.timings
    assert (eager.compile_time, eager.first_call) == (0.0, 1.0)
    assert (own.compile_time, own.first_call, own.median) == (29.0 + 19.0, 30.0, 1.0)


def test_an_unknown_peer_is_refused():
    original = model()
    with pytest.raises(fxfuse.FxfuseError, match=r"'onnx'.*eager, torch\.compile"):
        fxfuse.benchmark(original, fxfuse.optimize(original), (X,), compare=("onnx",))


def test_a_peer_that_fails_is_left_out_and_the_table_says_so():
    broken = model(forward=lambda m, x: m.no_such_layer(x))
    found = fxfuse.benchmark(broken, fxfuse.optimize(model()), (X,), compare=("eager",), seconds=0.01)
    assert [timing.name for timing in found.timings] == ["fxfuse"]
    assert "eager" in str(found) and "no_such_layer" in str(found)


def test_fxfuses_own_failure_is_raised():
    with pytest.raises(RuntimeError):
        fxfuse.benchmark(model(), fxfuse.optimize(model()), (randn(3, 5),), compare=(), seconds=0.01)


def test_gradients_are_off_and_modes_stay():
    original = nn.Sequential(linear(), nn.Tanh(), nn.Dropout()).train()
    seen = []
    original.register_forward_hook(lambda module, args, output: seen.append((output.requires_grad, module.training)))
    fxfuse.benchmark(original, model(), (X,), compare=("eager",), seconds=0.01)
    assert set(seen) == {(False, True)} and original.training


class _Gpu:
    """torch.cuda as a timer uses it. The n-th run takes n milliseconds, and `late[n - 1]` seconds to be issued."""

    def __init__(self, monkeypatch, late):
        self.runs, self.now, self.late = 0, 0.0, late
        event = SimpleNamespace(
            record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: float(self.runs)
        )
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None, raising=False)
        monkeypatch.setattr(benchmark.time, "perf_counter", lambda: self.now)

    def run(self):
        self.now += self.late[self.runs]
        self.runs += 1


@pytest.mark.parametrize(
    ("late", "attempts", "counts"),
    [([0.0], 3, 1), ([1.0, 0.0], 3, 2), ([1.0, 1.0, 1.0], 3, 3), ([1.0], 1, 1)],
)
def test_a_run_whose_launches_came_too_late_is_made_again(late, attempts, counts, monkeypatch):
    gpu = _Gpu(monkeypatch, late)
    monkeypatch.setattr(benchmark, "L2_FLUSH_BYTES", 4)
    assert benchmark.gpu_timer(torch.device("cpu"), attempts)(gpu.run, ()) == pytest.approx(counts * 1e-3)
    assert gpu.runs == counts


def test_the_collector_looks_at_nothing_old_while_runs_are_timed():
    frozen = []

    class Model(nn.Module):
        def forward(self, x):
            frozen.append(gc.get_freeze_count())
            return x + 1

    fxfuse.benchmark(Model(), Model(), (torch.zeros(3),), compare=["eager"], seconds=0.01)
    assert frozen[0] == 0 < frozen[-1] and gc.get_freeze_count() == 0
