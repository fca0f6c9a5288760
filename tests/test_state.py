"""What a forward makes, draws and keeps is eager's at every call, and preparing a model leaves nothing of it behind."""

import collections
import copy
import random
import types

import numpy as np
import pytest
import torch
from helpers import Net, assert_as_eager, linear, outcome, randn
from torch import nn

import fxfuse

X = randn(5, 8)
SCALE = torch.full((8,), 2.0)


class Counter:
    def __init__(self):
        self.calls = 0


def filling(m, x):
    v = torch.ones(10)
    v[0] = x.sum()
    v[1] += v[0]
    return m.fc(x).relu() * v[:8]


def adding_up(m, x):
    loss = torch.tensor(0.0)
    for weight in range(3):
        loss += m.fc(x).relu().mean() * weight
    return loss


def overwriting_constants(m, x):
    v = torch.arange(8.0).mul_(2)
    v.view(2, 4)[1].add_(1)
    return m.fc(x).relu() * v


def drifting(m, x):
    m.t += 0.125
    return m.fc(x).relu() * m.t


def averaging(m, x):
    m.b += x.mean(0)
    return m.fc(x).relu() * m.b


def counting_in_a_buffer(m, x):
    m.b += 1
    m.b *= 2
    return m.fc(x).relu() * m.b


def cached(m, x):
    if "scale" not in CACHE:
        CACHE["scale"] = torch.ones(8) * 2
    return m.fc(x).relu() * CACHE["scale"]


CACHE = {}

RECORDED = {
    "a fresh tensor that is filled": (filling, {}),
    "a fresh tensor that is added to": (adding_up, {}),
    "a fresh tensor that is overwritten with constants": (overwriting_constants, {}),
    "fresh tensors that are returned": (lambda m, x: (m.fc(x).relu() * SCALE, torch.zeros(3), [torch.ones(2)[0]]), {}),
    "an attribute that is overwritten": (drifting, {"t": torch.ones(8)}),
    "a buffer that is added to": (averaging, {"buffer b": torch.zeros(8)}),
    "a counter in a buffer": (counting_in_a_buffer, {"buffer b": torch.ones(())}),
    "a draw": (lambda m, x: m.fc(x).relu() * torch.rand(8), {}),
    "a draw of another kind": (lambda m, x: m.fc(x).relu() * torch.empty(8).bernoulli_(0.5), {}),
    "a draw by weights that are made": (lambda m, x: m.fc(x).relu() * torch.bernoulli(torch.full((8,), 0.5)), {}),
    "several results": (lambda m, x: m.fc(x).relu() * torch.arange(16.0).split(8)[1].sort()[0], {}),
    "iteration": (lambda m, x: sum(m.fc(x).relu() * t for t in torch.arange(3.0)), {}),
    "shapes": (lambda m, x: m.fc(x).relu() * len(torch.ones(3)) * torch.eye(8)[:5].size(0), {}),
    "operators": (lambda m, x: m.fc(x).relu() * (2 - torch.ones(8)) * (SCALE - x) * (2 ** torch.ones(8)), {}),
    "an index": (lambda m, x: m.fc(x).relu() * torch.arange(8.0)[(x > 0).long()], {}),
    "like a parameter": (lambda m, x: m.fc(x).relu() * m.fc.weight.new_ones(8), {}),
    "parameters from a list": (lambda m, x: m.fc(x).relu() * list(m.parameters())[1].abs(), {}),
    "a global tensor": (lambda m, x: m.fc(x).relu() * SCALE, {}),
    "a cached tensor": (cached, {}),
}

PYTHON = {
    "a buffer that is replaced": (lambda m, x: (setattr(m, "b", m.b * 0.5), m.fc(x).relu() * m.b)[1],
                                  {"buffer b": torch.ones(8)}, "buffer"),
    "a value that is drawn": (lambda m, x: m.fc(x).relu() if torch.rand(1).item() < 0.5 else x, {}, "'item' asks"),
    "the value of an attribute": (lambda m, x: (m.t.add_(1), m.fc(x).relu() * m.t.item())[1], {"t": torch.ones(())},
                                  "'item' asks"),
    "Python's random numbers": (lambda m, x: m.fc(x).relu() * random.choice([1, 2, 3, 4]), {}, "random numbers"),
    "numpy's random numbers": (lambda m, x: m.fc(x).relu() * float(np.random.rand()), {}, "random numbers"),
    "a seed": (lambda m, x: (torch.manual_seed(3), m.fc(x).relu() * torch.rand(8))[1], {}, "random numbers"),
    "a generator of one's own": (lambda m, x: m.fc(x).relu() * torch.rand(8, generator=m.g),
                                 {"g": lambda: torch.Generator().manual_seed(1)}, "generator of its own"),
    "Python's generator of one's own": (lambda m, x: m.fc(x).relu() * m.r.random(), {"r": random.Random(3)},
                                        "sets the attribute 'r'"),
    "numpy's generator of one's own": (lambda m, x: m.fc(x).relu() * m.r.random(), {"r": np.random.default_rng(3)},
                                       "sets the attribute 'r'"),
    "numpy's old generator of one's own": (lambda m, x: m.fc(x).relu() * m.r.rand(), {"r": np.random.RandomState(3)},
                                           "sets the attribute 'r'"),
    "a tensor from numpy": (lambda m, x: m.fc(x).relu() * torch.from_numpy(np.ones(8, np.float32)).add_(x[0].detach()),
                            {}, "made anew at every call"),
    "a tensor by its type": (lambda m, x: m.fc(x).relu() * torch.Tensor([1.0] * 8).add_(x[0].detach()), {},
                             "made anew at every call"),
    "a queue": (lambda m, x: (m.q.append(1), m.fc(x).relu() * len(m.q))[1], {"q": collections.deque()},
                "sets the attribute 'q'"),
    "an object": (lambda m, x: (setattr(m.o, "calls", m.o.calls + 1), m.fc(x).relu() * m.o.calls)[1],
                  {"o": Counter()}, "sets the attribute 'o'"),
    "a namespace": (lambda m, x: (setattr(m.o, "calls", m.o.calls + 1), m.fc(x).relu() * m.o.calls)[1],
                    {"o": types.SimpleNamespace(calls=0)}, "sets the attribute 'o'"),
}  # fmt: skip


def made(forward, members):
    """A model of one linear layer and `members`; the same at every time."""
    torch.manual_seed(0)
    model = Net(forward, fc=linear()).eval()
    for name, value in members.items():
        value = value() if callable(value) else copy.deepcopy(value)
        if name.startswith("buffer "):
            model.register_buffer(name.removeprefix("buffer "), value)
        else:
            setattr(model, name, value)
    return model


def states():
    numbers = np.random.get_state()
    return random.getstate(), numbers[1].tobytes(), numbers[2:], torch.get_rng_state().numpy().tobytes()


def history(model, gradients):
    """Outputs and gradients of a few calls, and the random states after them."""
    CACHE.clear()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    found = []
    for factor in (1, -2, 3):
        with torch.set_grad_enabled(gradients):
            result = model(X * factor)
        found.append(result)
        if gradients and (result[0] if isinstance(result, tuple) else result).requires_grad:
            model.zero_grad()
            (result[0] if isinstance(result, tuple) else result).sum().backward()
            found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return found, states()


@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "none"])
@pytest.mark.parametrize("name", [*RECORDED, *PYTHON])
def test_every_call_is_as_in_eager(name, gradients):
    forward, members, *reason = {**RECORDED, **PYTHON}[name]
    model, fast = made(forward, members), made(forward, members)
    before = states()
    fast = fxfuse.optimize(fast)
    assert states() == before
    report = fxfuse.explain(fast)
    if reason or torch.__version__ >= "2.13":  # older ones show fewer calls to whoever traces
        assert [text in item.reason for text, item in zip(reason, report.skipped, strict=True)] == [True] * len(reason)
        assert bool(report.regions) is not bool(reason)
    torch.testing.assert_close(history(fast, gradients), history(model, gradients))
    if not isinstance(outcome(copy.deepcopy, model), TypeError):  # torch 2.3 does not copy a generator
        copy.deepcopy(fast)


def keeping(m, x):
    m.calls += 1
    m.seen.append(m.calls)
    m.kept = m.fc(x).relu()
    m.t += 1
    m.b += 1
    m.o.calls += 1
    m.drawn = random.random() + np.random.rand()
    return m.kept * m.calls * m.t * m.b * len(m.seen) * m.o.calls + m.drawn + torch.rand(8)


KEPT = {"calls": 0, "seen": [], "t": torch.zeros(8), "o": Counter(), "buffer b": torch.zeros(8)}


@pytest.mark.parametrize("inside", [False, True])
def test_an_example_leaves_nothing_behind(inside):
    models = [made(keeping, KEPT) for _ in range(2)]
    if inside:
        models = [nn.Sequential(model, nn.Tanh()) for model in models]
    before = states()
    fast = fxfuse.optimize(models[1], (X,))
    stateful = fast[0] if inside else fast
    assert states() == before
    assert stateful.calls == stateful.o.calls == 0 and not stateful.seen and not hasattr(stateful, "kept")
    assert not stateful.t.any() and not stateful.b.any()
    torch.testing.assert_close(history(fast, False), history(models[0], False))


def test_an_examples_strides_are_those_of_its_calls():
    """Also of a part of another tensor: kernels are compiled for strides."""
    seen = []
    model = Net(lambda m, x: seen.append(x.stride()) or m.fc(x).relu() * (1 if x.shape[0] else 2), fc=linear()).eval()
    whole = torch.randn(4, 16)
    for x in (
        whole[:, :8],
        whole[::2, ::2],
        whole.t()[:8].t(),
        whole[:1, :8].expand(4, 8),
        whole[:0, :8],
        whole[0, 8:],
    ):
        seen.clear()
        fxfuse.optimize(model, (x,))
        assert {stride for stride in seen if isinstance(stride, tuple)} == {x.stride()}


def test_verify_leaves_nothing_behind():
    model = made(keeping, KEPT)
    fast = fxfuse.optimize(made(keeping, KEPT))
    before = states()
    assert fxfuse.verify(model, fast, (X,)), "every run begins with the same state and draws the same numbers"
    assert states() == before
    assert model.calls == model.o.calls == fast.calls == 0 and not model.seen and not hasattr(model, "kept")
    assert not model.t.any() and not model.b.any()


def force(m, x):
    return -torch.autograd.grad(m.fc(x).relu().sum(), x)[0]


def force_of_its_own_leaf(m, x):
    x = x.detach().requires_grad_()
    with torch.no_grad():
        scale = m.fc(x).relu() + 1
    return torch.autograd.grad((m.fc(x).relu() * scale).sum(), x, create_graph=True)[0]


def adapting(m, x):
    m.fc(x).relu().mean().backward()
    return m.fc(x).relu() * m.fc.bias.grad


def overwriting_what_was_computed(m, x):
    y = x.mul_(2)
    return torch.autograd.grad(m.fc(y).relu().sum(), y)[0]


DERIVED = {
    "derivatives by the input": (force, lambda: X.clone().requires_grad_()),
    "derivatives by a leaf that it makes": (force_of_its_own_leaf, lambda: X.clone()),
    "gradients of its parameters": (adapting, lambda: X.clone()),
    "an input that was computed": (overwriting_what_was_computed, lambda: X.clone().requires_grad_() * 1),
}


@pytest.mark.parametrize("name", DERIVED)
def test_a_forward_may_ask_for_derivatives(name):
    forward, given = DERIVED[name]
    model, other, x = made(forward, {}), made(forward, {}), given()
    other.fc.bias.grad = torch.ones(8)
    fast = fxfuse.optimize(other, (x,))
    assert other.fc.bias.grad.eq(1).all() and other.fc.weight.grad is None
    assert x.is_leaf is given().is_leaf and not (x.is_leaf and x.grad is not None) and torch.equal(x, given())
    other.zero_grad()
    torch.testing.assert_close(fast(given()), model(given()))
    for each in (model, fast):
        each.zero_grad()
    assert fxfuse.verify(model, fast, (x,))
    assert all(parameter.grad is None for parameter in (*model.parameters(), *fast.parameters()))


def test_what_no_mode_allows_is_raised():
    model = made(lambda m, x: m.fc(x).relu() @ torch.ones(3), {})
    with pytest.raises(RuntimeError, match="size"):
        fxfuse.optimize(model, (X,))
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        fxfuse.optimize(made(force, {}), (X.clone().requires_grad_(),))


MISSING = {
    "a convolution of it": lambda m, x, y=None: m.conv(y).relu() + 1,
    "a normalisation of it": lambda m, x, y=None: m.ln(y).relu() + 1,
    "a sum with it": lambda m, x, y=None: m.fc(x) + y,
    "a power": lambda m, x, y=None: (m.fc(x) ** y).relu(),
    "a mask that it is": lambda m, x, y=None: m.fc(x).masked_fill(y, 0.0).relu(),
    "a text": lambda m, x, y="a": m.fc(x) + y,
    "a tuple": lambda m, x, y=(1, 2): m.fc(x) + y,
    "a list": lambda m, x, y=[1, 2]: m.fc(x) + y,
}


@pytest.mark.parametrize("name", MISSING)
def test_an_argument_that_is_missing_is_missed_when_the_model_runs(name):
    class Model(nn.Module):
        forward = MISSING[name]

        def __init__(self):
            super().__init__()
            self.fc, self.ln, self.conv = linear(), nn.LayerNorm(8), nn.Conv2d(4, 4, 1)

    model = Model().eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        assert_as_eager(model, fast, X, raises=Exception)
