"""Training steps that somebody captures as CUDA graphs, by torch.cuda.graph or torch.cuda.make_graphed_callables.

Without a GPU a stand-in says that a capture is under way: what torch forbids then fails, and calls run as they come.
"""

import contextlib
import copy
import gc
import importlib
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import ON_GPU, Net, Net2, linear, randn, relative_error, skip_if_python
from test_loops import EMULATED, where_steps_are
from test_training import (
    MODELS,
    Attention,
    as_exact,
    assert_errors_as_eagers,
    convolutional,
    floats,
    made,
    mlp,
    step_of,
    triple,
    warm,
    with_dropout,
)
from torch import nn

import fxfuse
from fxfuse import build, stream_capture, training
from fxfuse.module import state_of
from fxfuse.program import Programs, _random_states
from fxfuse.program.values import Call, Launch, Slot, Value
from fxfuse.state import TorchRandomState
from fxfuse.training import CALLS_BEFORE_CAPTURE


def weighed_by_position(m, x):
    """What is made of numbers alone, by operators that no kernel of ours has, programs keep."""
    at = torch.arange(8, device=x.device).to(x.dtype).cumsum(0).cumsum(0)
    return m.fc(x).tanh() * at


class DroppingAttention(nn.Module):
    """Of torch, whose backward draws the forward's random numbers again."""

    def __init__(self, p=0.3):
        super().__init__()
        self.qkv, self.out, self.p = nn.Linear(32, 96), nn.Linear(32, 32), p

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p)
        return x + F.dropout(F.gelu(self.out(attended.transpose(1, 2).flatten(2))), self.p)


STEPS = {
    # what makes the model; its input's shape
    "mlp": (mlp, (6, 8)),
    "transformer block": (Attention, (2, 5, 16)),
    "convolutions": (convolutional, (4, 3, 10, 10)),
    "positions": (lambda: Net(weighed_by_position, fc=linear()), (3, 8, 8)),
    "batch norm of series": (MODELS["batch norm of series"][0], (3, 4, 9)),
    "attention without dropout": (lambda: DroppingAttention(0.0), (2, 8, 32)),
    "dropout": (with_dropout, (6, 8)),
    "attention with dropout": (DroppingAttention, (2, 8, 32)),
}
DRAWING = ("dropout", "attention with dropout")


X = randn(5, 8)


def made_of(name):
    make, shape = STEPS[name]
    torch.manual_seed(0)
    return make(), shape


# ------------------------------------------------------------------------------- a capture that is none


def refuse(what):
    def refusing(*_, **__):
        raise AssertionError(f"{what} during a capture")

    return refusing


@contextlib.contextmanager
def forbidden(*, may_be_unknown=False):
    """Inside, nothing is compiled, traced or recorded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load", refuse("a kernel is built"))
        patch.setattr(training, "joint_of", refuse("a step is traced"))
        patch.setattr(Programs, "_recorded", refuse("a program is recorded"))
        if not may_be_unknown:
            patch.setattr(Programs, "_unknown", refuse("a graph runs without a program"))
        yield


@contextlib.contextmanager
def capture(**options):
    """Inside, calls are told that they are captured, and what torch forbids then fails as it does there."""

    def unreadable(*_):
        raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture.")

    with pytest.MonkeyPatch.context() as patch, forbidden(**options):
        patch.setattr(stream_capture, "is_underway", lambda: True)
        patch.setattr(stream_capture, "is_captured", lambda tensors: True)
        patch.setattr(TorchRandomState, "__init__", unreadable)
        yield


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """What is kept for good."""
    found = {}
    monkeypatch.setattr(stream_capture, "_for_good", found)
    return found


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cpu") for name in STEPS),
        *(pytest.param(name, "emulated", marks=EMULATED) for name in ("positions", "attention with dropout")),
    ],
)
def test_a_captured_step_runs_the_programs_of_one_that_is_not(name, device, monkeypatch):
    """Operators are taken apart as for a CPU, or as for a GPU, which is emulated."""
    if device == "emulated":
        where_steps_are(device, monkeypatch)
    model, shape = made_of(name)
    fast, x = fxfuse.optimize(model), randn(*shape).requires_grad_()
    for _ in range(CALLS_BEFORE_CAPTURE):
        step_of(fast, x)
    found = []
    for around in (contextlib.nullcontext, capture):
        for buffer in fast.buffers():
            buffer.fill_(1)
        torch.manual_seed(1)
        with around():
            found.append([*step_of(fast, x), *(buffer.clone() for buffer in fast.buffers())])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    made(fast)


@pytest.mark.parametrize("calls", range(CALLS_BEFORE_CAPTURE))
def test_a_capture_that_comes_too_early_is_torchs_and_says_so(calls):
    fast, model, exact = triple(mlp())
    x = randn(6, 8).requires_grad_()
    for _ in range(calls):
        step_of(fast, x)
    has_step = calls >= 2
    warned = contextlib.nullcontext() if has_step else pytest.warns(fxfuse.FxfuseWarning, match="before the capture")
    with warnings.catch_warnings(), capture(may_be_unknown=True):
        warnings.simplefilter("error")
        with warned:
            found = step_of(fast, x)
    assert_errors_as_eagers(found, step_of(model, x), step_of(exact, *as_exact([x])))
    said = "\n".join(fxfuse.explain(fast).training)
    assert ("come from torch in CUDA graphs" in said) is not has_step
    warm(fast, x)


def test_a_model_whose_gradients_are_torchs_anyway_warns_of_no_capture():
    def views(m, x):
        y = m.fc(x)
        return y, y[1:]

    fast, x = fxfuse.optimize(Net(views, fc=linear())), randn(5, 8).requires_grad_()
    for _ in range(4):
        step_of(fast, x)
    with warnings.catch_warnings(), capture(may_be_unknown=True):
        warnings.simplefilter("error")
        step_of(fast, x)


def penalty(model, x):
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), list(model.parameters()))


def test_gradients_of_gradients_are_captured():
    fast, model, exact = triple(mlp())
    x = randn(6, 8).requires_grad_()
    warm(fast, x)
    with capture():
        found = penalty(fast, x)
    assert_errors_as_eagers(found, penalty(model, x), penalty(exact, *as_exact([x])))


def test_gradients_of_gradients_of_what_draws_cannot_be():
    fast, x = fxfuse.optimize(with_dropout()), randn(6, 8).requires_grad_()
    warm(fast, x)
    with capture(), pytest.raises(fxfuse.FxfuseError, match=r"create_graph=True.*probabilities"):
        penalty(fast, x)


def test_attention_without_dropout_draws_nothing():
    """So no state of a generator is read at each step."""
    fast = fxfuse.optimize(DroppingAttention(0.0))
    warm(fast, randn(2, 8, 32).requires_grad_())
    (step,) = made(fast)
    assert not step.joint.draws
    names = [str(node.target) for node in step.forward.graph.nodes]
    assert any("scaled_dot_product" in name for name in names), names


def test_what_programs_keep_outlives_them_for_the_graph_that_reads_it(kept):
    """A model that is evaluated in between, and trained again, has other programs."""
    fast, x = fxfuse.optimize(Net(weighed_by_position, fc=linear())), randn(3, 8, 8).requires_grad_()
    for _ in range(CALLS_BEFORE_CAPTURE + 1):
        step_of(fast, x)
    assert not kept

    def constants():
        halves = [half for step in made(fast) for _, half in step.graphs]
        return [one for half in halves for program in state_of(half).programs.programs for one in program.constants]

    captured = list(map(weakref.ref, constants()))
    assert captured
    with capture():
        step_of(fast, x)
    fast.eval().train()
    warm(fast, x)
    others = list(map(weakref.ref, constants()))
    fast.eval()
    gc.collect()
    assert all(one() is not None for one in captured)
    assert all(one() is None for one in others)


def test_a_graph_of_fxfuses_own_keeps_what_it_reads(kept):
    fast, x = fxfuse.optimize(Net(weighed_by_position, fc=linear()).eval()), randn(3, 8, 8)
    with torch.no_grad():
        for _ in range(3):
            fast(x)
        skip_if_python(fast)
        (program,) = state_of(fast).programs.programs
        assert program.constants
        with capture(), stream_capture.keeping() as own:
            fast(x)
        assert list(own.values()) == list(program.constants) and not kept
        with capture():
            fast(x)
        assert list(kept.values()) == list(program.constants)


def by_shape(m, x):
    """Of which fx knows nothing, and Dynamo does."""
    y = F.gelu(m.a(x))
    return m.b(y if y.shape[0] > 2 else y * 2)


def test_what_dynamo_would_capture_runs_as_python():
    fast, x = fxfuse.optimize(Net(by_shape, a=linear(), b=linear())), randn(5, 8).requires_grad_()
    for _ in range(2):
        step_of(fast, x)
    whole = state_of(fast).recapture
    with capture(may_be_unknown=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", fxfuse.FxfuseWarning)
        for _ in range(3):
            step_of(fast, x)
    skip_if_python(fast)
    assert not whole.graphs
    step_of(fast, x)
    assert whole.graphs


def evaluated(model):
    model[2].eval()


class Scaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.scale = linear(), 2.0

    def forward(self, x, bias=None):
        y = self.fc(x).tanh() * self.scale
        return y if bias is None else y + bias


@pytest.mark.parametrize("change", [evaluated, lambda model: None], ids=["a mode", "nothing"])
def test_what_would_be_traced_anew_runs_as_the_model_is(change):
    model = nn.Sequential(linear(), nn.Tanh(), nn.Dropout(0.5))
    fast, x = fxfuse.optimize(model), randn(5, 8).requires_grad_()
    warm(fast, x)
    change(fast)
    torch.manual_seed(3)
    with capture(may_be_unknown=True):
        found = fast(x)
    torch.manual_seed(3)
    want = torch.tanh(model[0](x))
    torch.testing.assert_close(found, want if not fast[2].training else F.dropout(want, 0.5))


def test_other_arguments_than_were_traced_run_as_the_model_is():
    model = Scaling()
    fast, x = fxfuse.optimize(model), randn(5, 8).requires_grad_()
    warm(fast, x)
    fast.scale = 3.0
    with capture(may_be_unknown=True):
        for options in ({"bias": x}, {}, {}):
            want = model.fc(x).tanh() * 3 + (x if options else 0)
            torch.testing.assert_close(fast(x, **options), want)
    assert not state_of(fast).variants


def test_states_of_random_numbers_may_lie_on_either_device():
    """Attention's own, on a CPU but in a capture; whatever else lies there is part of a program's kind."""
    tensors = [torch.zeros(()) for _ in range(5)]
    slots = [Slot("given", f"g{at}", index=at, is_apart=at > 0) for at in range(5)]
    values = [Value(slot, 0, (), (), torch.float32, slot.name) for slot in slots]
    gradient = torch._C._VariableFunctions.mul
    attention = type("_scaled_dot_product_efficient_attention_backward", (), {})
    steps = [
        Call(attention, tuple(values[:4]), {}, (), False, True),
        Call(gradient, (values[3],), {}, (), False, True),
        Launch(None, [(slots[4], 0)]),
    ]
    assert _random_states(steps, tensors) == [(1, tensors[1]), (2, tensors[2])]


def test_where_such_states_lie_is_no_part_of_a_programs_kind():
    """Strides stand for the device."""
    fast = fxfuse.optimize(Net2(lambda m, x, y: m.fc(x).relu() * y, fc=linear()).eval())
    here, there = torch.ones(1), torch.ones(5)[::5]
    with torch.no_grad():
        for _ in range(3):
            fast(X, here)
        programs = state_of(fast).programs
        (program,) = programs.programs

        def is_of_its_kind(y):
            bound = programs._binding.of((X, y), {})
            return program.table(bound.tensors, bound.constants) is not None

        assert is_of_its_kind(here) and not is_of_its_kind(there)
        program._states = [(1, here)]
        assert is_of_its_kind(here) and is_of_its_kind(there)
        for other in (torch.ones(2), torch.ones(()), there.double(), nn.Parameter(there)):
            assert not is_of_its_kind(other)


def test_the_benchmark_leaves_out_whose_graph_is_wrong_or_none(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    benchmark = importlib.import_module("training")

    def captured(call):
        result = call()
        if len(result) == 1:
            raise RuntimeError("called a synchronizing CUDA operation")
        return (lambda: result if result[1].any() else [one + 1 for one in result]), 7.0

    monkeypatch.setattr(benchmark, "captured", captured)
    calls = {
        "eager": lambda: [torch.ones(2)],
        "torch.compile": lambda: [torch.ones(2), torch.zeros(2)],
        "fxfuse": lambda: [torch.ones(2), torch.ones(2)],
    }
    left_out, memory = benchmark._as_graphs(calls, apart=0.2)
    assert list(calls) == ["fxfuse"] and calls["fxfuse"]()[1].equal(torch.ones(2)) and memory["fxfuse"] == 7.0
    assert "synchronizing" in left_out["eager"] and "something else" in left_out["torch.compile"]


# ------------------------------------------------------------------------------------------- real captures


def on_gpu(test):
    for mark in ON_GPU:
        test = mark(test)
    return test


SETTLED = 8
"""Steps after which nothing changes any more, also where Dynamo captures the model."""


def loss_of(result):
    """As `weighed`, of numbers that a GPU makes: nothing can be brought there while it is captured."""
    waves = [torch.arange(leaf.numel(), device=leaf.device).double().cos().view(leaf.shape) for leaf in floats(result)]
    return sum((leaf.double() * wave).sum() for leaf, wave in zip(floats(result), waves, strict=True))


def trained(model, x, autocast=False):
    """The loss and all gradients of a step, in tensors of its own."""
    leaves = [x, *model.parameters()]
    for leaf in leaves:
        leaf.grad = None
    # without its cache: casts of weights that were made before a capture would be no part of it
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast, cache_enabled=False):
        loss = loss_of(model(x))
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def captured(step, steps=SETTLED, **options):
    """A graph of a step, as torch's documentation captures one, and what it writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(steps):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with forbidden(**options), torch.cuda.graph(graph):
        results = step()
    return graph, results


def three(model):
    """Two optimised copies and one as it is, on a GPU."""
    return [fxfuse.optimize(copy.deepcopy(model).cuda()) for _ in range(2)] + [copy.deepcopy(model).cuda()]


def new_data(x, seed):
    with torch.no_grad():
        x.copy_(randn(*x.shape, seed=seed))


def assert_near(actual, expected, limit, where):
    """Each tensor, by the norm of their difference as a part of the expected one's."""
    assert len(actual) == len(expected), where
    apart = [relative_error(have, want) for have, want in zip(actual, expected, strict=True)]
    assert max(apart) <= limit, f"{where}: apart by {[f'{one:.1e}' for one in apart]}"


def state_and(model, results):
    """Copies of results and buffers, of counters as floating-point numbers."""
    return [one.detach().clone() if one.is_floating_point() else one.double() for one in (*results, *model.buffers())]


@on_gpu
@pytest.mark.filterwarnings("error::fxfuse.FxfuseWarning")
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("name", STEPS)
def test_replays_give_what_steps_give(name, autocast, monkeypatch):
    """With other data each, and the same random numbers; batch statistics are counted by replays, too."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of few channels it is used in channels_last only
    model, shape = made_of(name)
    exact = copy.deepcopy(model).cuda().double()
    fast, twin, eager = three(model)
    x, others = randn(*shape).cuda().requires_grad_(), randn(*shape).cuda().requires_grad_()
    graph, results = captured(lambda: trained(fast, x, autocast))
    for _ in range(SETTLED):
        trained(twin, others, autocast), trained(eager, others, autocast), trained(exact, *as_exact([others]))
    for seed in range(1, 5):
        new_data(x, seed), new_data(others, seed)
        torch.manual_seed(seed)
        graph.replay()
        found = state_and(fast, results)
        torch.manual_seed(seed)
        want = state_and(twin, trained(twin, others, autocast))
        assert_near(found, want, 1e-2 if autocast else 1e-5, f"replay {seed}, beside the same step uncaptured")
        if not (autocast or name in DRAWING):
            right = state_and(exact, trained(exact, *as_exact([others])))
            eagers = state_and(eager, trained(eager, others))
            # but for the loss: one number's error is a matter of luck
            assert_errors_as_eagers(found[1:], eagers[1:], right[1:], where=f"replay {seed}", factor=4.0)
    graph.replay()
    first = state_and(fast, results)
    graph.replay()
    again = state_and(fast, results)
    assert (relative_error(again[0], first[0]) > 1e-5) is (name in DRAWING), "replays draw new numbers, if any"
    made(fast), made(twin)


@on_gpu
@pytest.mark.filterwarnings("error::fxfuse.FxfuseWarning")
@pytest.mark.parametrize("name", ["transformer block", "dropout"])
def test_replays_add_to_gradients_that_are_there(name):
    model, shape = made_of(name)
    fast, twin, _ = three(model)
    xs = [randn(*shape).cuda() for _ in range(2)]

    def accumulate(model, x):
        loss_of(model(x)).backward()
        return [parameter.grad for parameter in model.parameters()]

    graph, results = captured(lambda: accumulate(fast, xs[0]))
    for _ in range(SETTLED):
        accumulate(twin, xs[1])
    for each in (fast, twin):
        each.zero_grad(set_to_none=False)
    torch.manual_seed(5)
    for seed in range(3):
        new_data(xs[0], seed)
        graph.replay()
    torch.manual_seed(5)
    for seed in range(3):
        new_data(xs[1], seed)
        want = accumulate(twin, xs[1])
    assert all(have is parameter.grad for have, parameter in zip(results, fast.parameters(), strict=True))
    assert_near(results, want, 1e-5, "after three replays")


@on_gpu
@pytest.mark.filterwarnings("error::fxfuse.FxfuseWarning")
@pytest.mark.parametrize("name", ["mlp", "transformer block", "convolutions"])
def test_losses_of_captured_steps_with_an_optimizer_follow_eagers(name):
    model, shape = made_of(name)
    fast, _, eager = three(model)
    x, target = randn(*shape).cuda(), None
    with torch.no_grad():
        target = torch.ones_like(copy.deepcopy(eager)(x))

    def stepping(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

        def step():
            optimizer.zero_grad(set_to_none=True)
            loss = F.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    graph, loss = captured(stepping(fast))
    step, losses = stepping(eager), []
    for _ in range(SETTLED):
        step()
    for seed in range(20):
        new_data(x, seed)
        graph.replay()
        losses.append((loss.clone(), step()))
    torch.testing.assert_close(*map(torch.stack, zip(*losses, strict=True)), rtol=1e-2, atol=1e-5)
    assert_near(list(fast.parameters()), list(eager.parameters()), 1e-2, "parameters after 20 steps")


@on_gpu
@pytest.mark.filterwarnings("error::fxfuse.FxfuseWarning")
@pytest.mark.parametrize("name", ["mlp", "transformer block", "positions", "dropout", "attention with dropout"])
def test_graphed_callables_give_what_steps_give(name):
    """Forward and backward are a graph each."""
    model, shape = made_of(name)
    fast, twin, _ = three(model)
    sample = randn(*shape).cuda().requires_grad_()
    graphed = torch.cuda.make_graphed_callables(fast, (sample,))
    for _ in range(SETTLED):
        trained(twin, sample)
    for seed in range(1, 5):
        x = randn(*shape, seed=seed).cuda().requires_grad_()
        found = []
        for each in (graphed, twin):
            torch.manual_seed(seed)
            found.append(state_and(each, trained(each, x)))
        assert_near(*(each[1:] for each in found), 1e-5, f"call {seed}")  # but for the loss, as above
    made(fast)


@on_gpu
def test_a_graph_outlives_the_programs_that_it_was_captured_of():
    """Evaluating a model drops its steps; what replays read must not become somebody else's memory."""
    fast, _, _ = three(Net(weighed_by_position, fc=linear()))
    x = randn(3, 8, 8).cuda().requires_grad_()
    for _ in range(SETTLED):  # so that what programs keep is this stream's, which takes it again
        trained(fast, x)
    graph, results = captured(lambda: trained(fast, x))
    halves = [half for step in made(fast) for _, half in step.graphs]
    assert any(program.constants for half in halves for program in state_of(half).programs.programs)
    del halves
    graph.replay()
    before = state_and(fast, results)
    with torch.no_grad():
        for _ in range(4):
            fast.eval()(x)
    fast.train()
    gc.collect()
    torch.cuda.synchronize()
    junk = [torch.full((size,), torch.nan, device="cuda") for size in (2, 8, 32, 128, 512) for _ in range(200)]
    graph.replay()
    assert_near(state_and(fast, results), before, 0.0, "after an evaluation")
    assert junk


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("name", STEPS)
def test_so_many_steps_come_before_a_capture(name, device):
    model, shape = made_of(name)
    fast, x = fxfuse.optimize(model.to(device)), randn(*shape).to(device).requires_grad_()
    skip_if_python(fast)
    missing, first = {"forward", "backward"}, {}
    for count in range(1, SETTLED + 1):
        trained(fast, x)
        for half, graph in made(fast)[0].graphs if state_of(fast).training.steps else ():
            if half in missing and state_of(graph).programs.programs:
                first[half] = count
        missing -= first.keys()
    assert not missing, f"no program of the {missing}; of the others after {first}"
    assert max(first.values()) <= CALLS_BEFORE_CAPTURE, first


@on_gpu
def test_a_step_that_is_captured_unseen_is_torchs():
    fast, _, eager = three(mlp())
    x = randn(6, 8).cuda().requires_grad_()
    want = trained(eager, x)  # and torch's libraries are there
    with pytest.warns(fxfuse.FxfuseWarning, match="before the capture"):
        graph, results = captured(lambda: trained(fast, x), steps=0, may_be_unknown=True)
    graph.replay()
    assert_near(results, want, 1e-5, "the first replay")


@on_gpu
@pytest.mark.parametrize("name", STEPS)
def test_no_step_waits_for_the_gpu(name):
    model, shape = made_of(name)
    fast, x = fxfuse.optimize(model.cuda()), randn(*shape).cuda().requires_grad_()
    for _ in range(SETTLED + 1):
        trained(fast, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        trained(fast, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_gpu
@pytest.mark.filterwarnings("error::fxfuse.FxfuseWarning")
@pytest.mark.parametrize("compiled", [False, True], ids=["by optimize", "by torch.compile"])
def test_steps_of_what_dynamo_captured(compiled):
    torch.compiler.reset()
    model = Net(by_shape, a=linear(), b=linear())
    fast, _, eager = three(model)
    fast = torch.compile(copy.deepcopy(model).cuda(), backend="fxfuse") if compiled else fast
    x = randn(5, 8).cuda().requires_grad_()
    graph, results = captured(lambda: trained(fast, x))
    for seed in range(1, 4):
        new_data(x, seed)
        graph.replay()
        found = state_and(fast, results)
        assert_near(found, trained(eager, x), 1e-5, f"replay {seed}")
