"""A graph's first call compiles the kernels of its later regions while it waits for the first ones."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import ON_GPU
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import fxfuse
from fxfuse import ahead, build, plans
from fxfuse.problem import Problem
from fxfuse.program import attention, sources
from fxfuse.state import TorchRandomState

DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[Problem, str]]:
    """The problems whose kernels were asked for, each with the kind of thread: "call" or "background"."""
    seen: Counter[tuple[Problem, str]] = Counter()
    draft, caller = plans._draft, threading.current_thread()

    def counted(problem: Problem, strict: bool) -> object:
        seen[problem, "call" if threading.current_thread() is caller else "background"] += 1
        return draft(problem, strict)

    monkeypatch.setattr(plans, "_draft", counted)
    # as in a process that finds nothing on disk
    monkeypatch.setattr(plans, "_at_hand", lambda problem, strict: None)
    return seen


class Block(nn.Module):
    """Convolutions with strides, a normalisation, a gate of a pooled image, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm, self.gate = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.norm(self.first(x)))
        gate = torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))
        return torch.relu(self.second(y) * gate + y).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + F.gelu(self.out(y))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (Block, (2, 3, 14, 14)),
    "attention": (Attention, (2, 7, 16)),
    "both": (lambda: nn.Sequential(Block(), nn.Linear(8, 16), nn.Tanh(), Attention()), (1, 3, 10, 12)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_what_a_call_will_need_is_foreseen(name: str, device: str, drafted: Counter[tuple[Problem, str]]) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make().eval().to(device), torch.randn(shape, device=device)
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        result = fast(x)
        expected = model.double()(x.double())
    assert {who for _, who in drafted} == {"background"}
    assert set(drafted.values()) == {1}
    assert drafted
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-5)


def test_a_second_call_like_it_asks_for_nothing(drafted: Counter[tuple[Problem, str]]) -> None:
    fast, x = fxfuse.optimize(Attention().eval()), torch.randn(2, 7, 16)
    with torch.no_grad():
        fast(x)
        before = dict(drafted)
        fast(x)
    assert before == drafted


@pytest.mark.parametrize("device", DEVICES)
def test_what_its_program_will_need_is_begun_on_a_gpu(
    device: str, drafted: Counter[tuple[Problem, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []
    monkeypatch.setattr(build, "begin", begun.append)
    fast, x = fxfuse.optimize(Attention().eval().to(device)), torch.randn(2, 7, 16, device=device)
    for _ in range(3):
        with torch.no_grad():
            fast(x)
        assert begun.count(sources(x.device)) == (device == "cuda")


def test_nothing_runs_without_data_where_all_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Attention().eval(), torch.randn(2, 7, 16)
    with torch.no_grad():
        fxfuse.optimize(model)(x)
        monkeypatch.setattr(ahead, "run_without_data", lambda *_: pytest.fail("kernels are there already"))
        fxfuse.optimize(model)(x)


class Chosen(nn.Module):
    """Rows are chosen by their values between two regions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        return F.gelu(self.second(y[y[:, 0] > 0]))


def test_sizes_that_depend_on_values_end_it(drafted: Counter[tuple[Problem, str]]) -> None:
    torch.manual_seed(0)
    model, x = Chosen().eval(), torch.randn(20, 8)
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        result = fast(x)
        expected = model.double()(x.double())
    assert {problem.epilogue: who for problem, who in drafted} == {"tanh(acc)": "background", "gelu(acc)": "call"}
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-5)


class Changing(nn.Module):
    """Overwrites its argument, counts calls in a buffer, keeps statistics and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        self.calls.add_(1)
        return F.dropout(torch.tanh(self.norm(F.gelu(self.first(x)))), 0.5, True)


def test_what_a_forward_changes_changes_once(drafted: Counter[tuple[Problem, str]]) -> None:
    torch.manual_seed(0)
    model, x = Changing(), torch.randn(16, 8)
    other = Changing()
    other.load_state_dict(model.state_dict())
    fast, given, expected_given = fxfuse.optimize(model), x.clone(), x.clone()
    with torch.no_grad():
        torch.manual_seed(1)
        result = fast(given)
        drawn = TorchRandomState()
        torch.manual_seed(1)
        expected = other(expected_given)
    assert drawn.is_present()
    assert drafted
    assert given.equal(expected_given)
    assert fast.calls.item() == 1
    assert fast.norm.num_batches_tracked.item() == 1
    torch.testing.assert_close(fast.norm.running_mean, other.norm.running_mean)
    torch.testing.assert_close(result, expected)


class Seeing(nn.Module):
    """Looks at a value, which no trace can answer; who ran it twice would see more."""

    def __init__(self, seen: list[float]) -> None:
        super().__init__()
        self.see = seen.append

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.see(float(x.sum()))
        return x


def partly_python(seen: list[float]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Seeing(seen), nn.Linear(8, 4), nn.GELU()).eval()


def test_python_runs_once_and_all_kernels_compile_together(drafted: Counter[tuple[Problem, str]]) -> None:
    seen: list[float] = []
    model, x = partly_python(seen), torch.randn(3, 8)
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        first = fast(x)
        assert len(seen) == 1
        assert {problem.epilogue: who for problem, who in drafted} == {
            "tanh(acc)": "background", "gelu(acc)": "background"
        }  # fmt: skip
        before = dict(drafted)
        torch.testing.assert_close(fast(x), first)
        assert before == drafted
        expected = model.double()(x.double())
    torch.testing.assert_close(first.double(), expected, rtol=0, atol=1e-5)


def test_what_raises_at_first_is_prepared_later(drafted: Counter[tuple[Problem, str]]) -> None:
    seen: list[float] = []
    fast = fxfuse.optimize(partly_python(seen))
    with torch.no_grad():
        with pytest.raises(RuntimeError):
            fast(torch.randn(3, 9))
        drafted.clear()
        fast(torch.randn(3, 8))
    assert {who for _, who in drafted} == {"background"}


def test_verify_sees_kernels_although_the_first_call_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = plans._draft

    def wrong(problem: Problem, strict: bool) -> object:
        plan = draft(problem, strict)()
        return lambda: dataclasses.replace(plan, run=lambda *tensors: problem.reference(*tensors) + 1)

    monkeypatch.setattr(plans, "_draft", wrong)
    model = partly_python([])
    assert not fxfuse.verify(model, fxfuse.optimize(model), (torch.randn(3, 8),))


@torch.no_grad()
@pytest.mark.usefixtures("drafted")
@pytest.mark.parametrize("example", [False, True], ids=["the first call", "an example"])
def test_calls_of_attention_are_foreseen(monkeypatch: pytest.MonkeyPatch, example: bool) -> None:
    """By their fake tensors, in the first call, so that their kernels compile beside those of regions."""
    calls: list[tuple[torch.Tensor, ...]] = []
    monkeypatch.setattr(attention, "begin", lambda args, kwargs, result: calls.append((*args, result)))
    model, x = Attention(), torch.randn(2, 5, 16)
    fast = fxfuse.optimize(model, (x,) if example else None)
    torch.testing.assert_close(fast(x), model(x))
    ((query, *_, result),) = calls
    assert isinstance(query, FakeTensor) and query.shape == result.shape
