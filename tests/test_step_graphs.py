"""optimize(..., cuda_graphs=True) in training: what is replayed, that gradients are eager's, and whose they are.

Without a GPU a stand-in takes the place of torch's CUDA graphs (fuzz/graphs.py). Models are in float64, so that
results that belong to another call, or that a replay has overwritten, cannot hide behind rounding.
"""

import contextlib
import copy
import gc
import random

import pytest
import torch
import torch.nn.functional as F
from fuzz.graphs import steps_on_a_cpu
from helpers import KNOWS_THE_LAST_BACKWARD, ON_GPU, Net, Net2, linear, randn, relative_error
from test_captured_steps import forbidden
from test_cuda_graphs import graph_launches
from test_segments import CASES, buckets, model_of
from test_training import Attention, convolutional, floats, made, mlp, weighed, with_dropout
from torch import nn

import fxfuse
from fxfuse import cuda_capture, training_step
from fxfuse.module import state_of
from fxfuse.step_graphs import MOST_CAPTURES, STEPS_BEFORE

pytestmark = KNOWS_THE_LAST_BACKWARD

WARM: int = STEPS_BEFORE + 1
"""Steps before the first that is replayed: torch runs the first, while it is not known whether there is a second."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def device(request):
    with steps_on_a_cpu() if request.param == "cpu" else contextlib.nullcontext():
        yield request.param


def twins(model, device):
    """The model, and an optimised copy."""
    model = model.double().to(device)
    return model, fxfuse.optimize(copy.deepcopy(model), cuda_graphs=True)


def data(*shape, device, seed=0, wants=False):
    return randn(*shape, seed=seed).double().to(device).requires_grad_(wants)


def train(model, x, learns=True, zero="before"):
    """A step; what it computed."""
    if zero == "before":
        model.zero_grad()
    result = model(x)
    if zero == "between":
        model.zero_grad()
    weighed(result).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    if learns:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
    return [*(each.detach() for each in floats(result)), *gradients, *(buffer.clone() for buffer in model.buffers())]


def graphs_of(fast):
    """The graphs of the model's only step."""
    (step,) = made(fast)
    return step.replays


def replays(fast):
    """How many forwards were replayed, if nothing speaks against graphs."""
    graphs = [step.replays for step in made(fast)]
    assert not [each.reason for each in graphs if each.reason is not None]
    return sum(each.replays for each in graphs)


def assert_trains_as(model, fast, *shape, steps=WARM + 4, **options):
    device = next(model.parameters()).device
    for seed in range(steps):
        x = data(*shape, device=device, seed=seed)
        torch.testing.assert_close(train(fast, x, **options), train(model, x, **options))


STEPS = {
    # what makes the model; its input's shape
    "mlp": (mlp, (6, 8)),
    "transformer block": (Attention, (2, 5, 16)),
    "convolutions": (convolutional, (4, 3, 10, 10)),
}


@pytest.mark.parametrize("zero", ["before", "between"])
@pytest.mark.parametrize("name", STEPS)
def test_steps_are_replayed(name, zero, device):
    make, shape = STEPS[name]
    torch.manual_seed(0)
    model, fast = twins(make(), device)
    assert_trains_as(model, fast, *shape, zero=zero)
    assert replays(fast) >= 3
    assert graphs_of(fast).captures == 1 and graphs_of(fast).waited == 0


@pytest.mark.parametrize("zero", ["before", "no"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "dropout"])
def test_segments_of_the_backward_are_replayed(name, zero, device):
    """As under DistributedDataParallel; with gradients that are gone at the next step, and with accumulated ones."""
    model, x = model_of(name)
    model, fast = twins(model, device)
    with buckets():
        for seed in range(WARM + 6):
            x = (x if name == "tied weights" else data(*x.shape, device=device, seed=seed)).to(device)
            for each in (model, fast):
                each.zero_grad(seed % 2 == 0)
            torch.testing.assert_close(train(fast, x, False, zero), train(model, x, False, zero))
    (step,) = made(fast)
    assert len(step.segments) > 1 and replays(fast) >= 4


def test_programs_are_captured(device, monkeypatch):
    model, fast = twins(mlp(), device)
    assert_trains_as(model, fast, 6, 8, steps=WARM)
    monkeypatch.setattr(cuda_capture.Buffers, "_copies_at_once", lambda self: None)  # it compiles a kernel
    with forbidden():
        assert_trains_as(model, fast, 6, 8, steps=2)
    assert replays(fast) == 2


def test_programs_for_arguments_at_odd_addresses_are_captured(device):
    model, fast = twins(mlp(), device)
    weights = data(31, device=device)[1:].view(6, 5)
    for seed in range(WARM + 3):
        x = data(49, device=device, seed=seed)[1:].view(6, 8)
        for each in (model, fast):
            each.zero_grad()
            each(x).backward(weights)  # at such an address, too
        torch.testing.assert_close(fast[0].weight.grad, model[0].weight.grad)
    assert replays(fast) == 3
    (step,) = made(fast)
    for graph in (step.forward, *step.backwards):
        assert len(state_of(graph).programs.programs) == 1, "the capture has made another"


def test_kernels_are_chosen_for_replays(device, monkeypatch):
    model, fast = twins(mlp(), device)
    asked = []
    running = training_step.stream_capture.replaying
    monkeypatch.setattr(training_step.stream_capture, "replaying", lambda: asked.append(None) or running())
    assert_trains_as(model, fast, 6, 8, steps=3)
    assert len(asked) >= 2 * 2  # forward and backward of each step that fxfuse runs


def test_gradients_of_inputs(device):
    model, fast = twins(mlp(), device)
    for seed in range(WARM + 3):
        inputs = [data(6, 8, device=device, seed=seed, wants=True) for _ in range(2)]
        for each, x in zip((model, fast), inputs, strict=True):
            train(each, x)
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    assert replays(fast) == 3


@pytest.mark.parametrize("to_none", [True, False])
def test_accumulated_gradients(to_none, device):
    """A gradient that is still there is not overwritten by the next replay."""
    model, fast = twins(mlp(), device)
    for seed in range(WARM + 8):
        x = data(6, 8, device=device, seed=seed)
        if seed % 3 == 0:
            model.zero_grad(to_none)
            fast.zero_grad(to_none)
        torch.testing.assert_close(train(fast, x, False, zero="no"), train(model, x, False, zero="no"))
    assert replays(fast) >= 6
    # the second pair copies gradients; to zeros, which are never the graphs' memory, gradients are added
    assert graphs_of(fast).captures == (2 if to_none else 1)


def test_gradients_that_somebody_keeps(device):
    _, fast = twins(mlp(), device)
    kept = []
    for seed in range(WARM + 5):
        train(fast, data(6, 8, device=device, seed=seed))
        grads = [parameter.grad for parameter in fast.parameters()]
        kept.append((grads, [grad.clone() for grad in grads]))
    for grads, values in kept:
        torch.testing.assert_close(grads, values, rtol=0, atol=0)
    assert replays(fast) >= 3


def test_gradients_are_the_graphs_own_memory(device):
    """No second copy of all gradients is in memory."""
    _, fast = twins(mlp(), device)
    for seed in range(WARM + 1):
        train(fast, data(6, 8, device=device, seed=seed))
    before = [parameter.grad.data_ptr() for parameter in fast.parameters()]
    train(fast, data(6, 8, device=device))
    assert [parameter.grad.data_ptr() for parameter in fast.parameters()] == before
    assert replays(fast) == 2


def test_the_backward_has_its_results_in_what_the_forward_keeps(device):
    """As without graphs, but it frees nothing: the next replay needs that memory again."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(256, 4)).to(device)
    for cuda_graphs in (False, True):
        fast = fxfuse.optimize(copy.deepcopy(model), cuda_graphs=cuda_graphs)
        for seed in range(WARM + 4):
            x = randn(4096, 256, seed=seed).to(device)
            for have, want in zip(train(fast, x, False), train(model, x, False), strict=True):
                assert relative_error(have, want) < 1e-3
        (step,) = made(fast)
        (program,) = state_of(step.backwards[0]).programs.programs
        assert not (cuda_graphs and "release(" in program.code)
        if device == "cpu":  # a GPU's program has other steps
            assert "uint8)" not in program.code, "there is room in what the forward keeps"
            assert cuda_graphs or "release(" in program.code
    assert replays(fast) == 4


def test_results_belong_to_the_caller(device):
    model, fast = twins(mlp(), device)
    wants, haves = [], []
    for seed in range(WARM + 4):
        x = data(6, 8, device=device, seed=seed)
        wants.append(model(x))
        haves.append(fast(x))
        weighed(haves[-1]).backward()
    torch.testing.assert_close(haves, wants)


def test_several_forwards_before_their_backwards(device):
    model, fast = twins(mlp(), device)
    assert_trains_as(model, fast, 6, 8, steps=WARM + 1)
    for _ in range(3):
        found = []
        for each in (model, fast):
            each.zero_grad()
            losses = [weighed(each(data(6, 8, device=device, seed=seed))) * (seed + 1) for seed in range(3)]
            for loss in (losses[1], losses[0], losses[2]):
                loss.backward()
            found.append([parameter.grad for parameter in each.parameters()])
        torch.testing.assert_close(found[1], found[0])
    assert graphs_of(fast).waited == 6 and replays(fast) == 1 + 3


def test_a_backward_that_never_comes(device):
    model, fast = twins(mlp(), device)
    assert_trains_as(model, fast, 6, 8, steps=WARM + 1)
    for seed in range(3):
        x = data(6, 8, device=device, seed=seed)
        torch.testing.assert_close(fast(x), model(x))
    gc.collect()
    assert_trains_as(model, fast, 6, 8, steps=2)
    assert graphs_of(fast).waited == 0 and replays(fast) == 1 + 3 + 2


def test_a_graph_that_is_kept(device):
    model, fast = twins(mlp(), device)
    assert_trains_as(model, fast, 6, 8, steps=WARM + 1)
    x = data(6, 8, device=device)
    for each in (model, fast):
        each.zero_grad()
        loss = weighed(each(x))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
    torch.testing.assert_close(*[[parameter.grad for parameter in each.parameters()] for each in (fast, model)])
    assert_trains_as(model, fast, 6, 8, steps=2)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_of_gradients(device):
    model, fast = twins(mlp(), device)
    assert_trains_as(model, fast, 6, 8, steps=WARM + 1)
    found = []
    for each in (model, fast):
        x = data(6, 8, device=device, wants=True)
        (slope,) = torch.autograd.grad(weighed(each(x)), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), list(each.parameters()), allow_unused=True))
    torch.testing.assert_close(found[1], found[0])


def test_what_is_changed_before_the_backward_is_an_error_as_in_eager(device):
    model, fast = twins(mlp(), device)
    assert_trains_as(model, fast, 6, 8, steps=WARM + 1)
    for each in (model, fast):
        result = each(data(6, 8, device=device))
        with torch.no_grad():
            each[2].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            weighed(result).backward()
    del result
    gc.collect()  # the error has kept the graph
    assert_trains_as(model, fast, 6, 8, steps=3)
    assert replays(fast) == 1 + 1 + 3


def test_statistics_are_updated_once_a_step(device):
    torch.manual_seed(0)
    model, fast = twins(convolutional(), device)
    assert_trains_as(model, fast, 4, 3, 10, 10)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(fast.get_buffer(name), buffer)
    before = fast[1].running_mean._version
    fast(data(4, 3, 10, 10, device=device))
    assert fast[1].running_mean._version > before


def move(model):
    model[0].weight.data = model[0].weight.data.clone()


def replace(model):
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def freeze(model):
    model[0].weight.requires_grad_(False)


@pytest.mark.parametrize("change", [move, replace, freeze])
def test_changes_of_parameters_are_seen(change, device):
    model, fast = twins(mlp(), device)
    assert_trains_as(model, fast, 6, 8, steps=WARM + 2)
    for each in (model, fast):
        change(each)
    assert_trains_as(model, fast, 6, 8, steps=WARM + 4)
    assert replays(fast) >= 3 and sum(step.replays.captures for step in made(fast)) == 2


def test_parameters_that_move_all_the_time(device):
    model, fast = twins(mlp(), device)
    for _ in range(MOST_CAPTURES + 2):
        assert_trains_as(model, fast, 6, 8, steps=WARM + 1)
        for each in (model, fast):
            move(each)
    assert graphs_of(fast).captures == MOST_CAPTURES and "moved" in graphs_of(fast).reason
    assert any("moved" in line for line in fxfuse.explain(fast).cuda_graphs)


def test_parameters_that_move_at_every_step(device):
    model, fast = twins(mlp(), device)
    for _ in range(WARM + 4):
        assert_trains_as(model, fast, 6, 8, steps=1)
        for each in (model, fast):
            move(each)
    assert graphs_of(fast).captures == 0


def test_evaluation_between_steps(device):
    torch.manual_seed(0)
    model, fast = twins(convolutional(), device)
    for _ in range(2):
        assert_trains_as(model.train(), fast.train(), 4, 3, 10, 10)
        assert replays(fast) >= 3
        x = data(4, 3, 10, 10, device=device)
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(fast.eval()(x), model.eval()(x))


def test_two_kinds_take_turns(device):
    model, fast = twins(mlp(), device)
    for seed in range(2 * WARM + 6):
        assert_trains_as(model, fast, 6 + seed % 2, 8, steps=1)
    assert len(made(fast)) == 2 and replays(fast) >= 6


def test_results_that_no_gradient_comes_to(device):
    def forward(m, x):
        y = m.fc(x).tanh()
        return y, y.exp(), x.argmax()

    model, fast = twins(Net(forward, fc=linear()), device)
    for seed in range(WARM + 4):
        x = data(5, 8, device=device, seed=seed)
        for each in (model, fast):
            each.zero_grad()
            each(x)[seed % 2].sum().backward()
        torch.testing.assert_close(fast.fc.weight.grad, model.fc.weight.grad)
    assert replays(fast) == 4


def test_an_argument_whose_gradient_is_that_of_a_result(device):
    """That gradient lies in a buffer, and must be copied out of it."""
    _, fast = twins(Net2(lambda m, x, y: m.fc(x).tanh() + y, fc=linear()), device)
    kept = []
    for seed in range(WARM + 4):
        x, y = (data(5, 8, device=device, seed=seed + at, wants=True) for at in range(2))
        (fast(x, y) * (seed + 1)).sum().backward()
        kept.append(y.grad)
    assert replays(fast) == 4
    for seed, grad in enumerate(kept):
        torch.testing.assert_close(grad, torch.full_like(grad, seed + 1))


@pytest.mark.parametrize("name", ["expanded", "elsewhere"])
def test_arguments_that_graphs_cannot_have(name, device):
    model, fast = twins(Net2(lambda m, x, y: m.fc(x).tanh() * y, fc=linear()), device)
    for seed in range(WARM + 2):
        x = data(5, 8, device=device, seed=seed)
        y = data(1, 8, device=device).expand(5, 8)
        if name == "elsewhere":
            y = torch.tensor(2.0, dtype=torch.float64)
            if device == "cpu":
                pytest.skip("all is on one device")
        for each in (model, fast):
            each.zero_grad()
            each(x, y).sum().backward()
        torch.testing.assert_close(fast.fc.weight.grad, model.fc.weight.grad)
    assert graphs_of(fast).replays == 0
    what = "share memory" if name == "expanded" else "is on cpu"
    assert any(what in line for line in fxfuse.explain(fast).cuda_graphs)


def test_graphs_need_free_memory(device, monkeypatch):
    """What they hold must leave room for steps that are not replayed."""
    free = [2.0**40]
    monkeypatch.setattr(cuda_capture, "free_memory", lambda device: free[0])
    model, fast = twins(mlp(), device)
    assert_trains_as(model, fast, 6, 8)
    assert graphs_of(fast).captures == 1
    free[0] = 4.0 * made(fast)[0].joint.kept_bytes  # of 6 rows
    assert_trains_as(model, fast, 9, 8)
    more, fewer = (step.replays for step in made(fast))
    assert (more.captures, fewer.captures) == (0, 1)
    assert any("too little memory" in line for line in fxfuse.explain(fast).cuda_graphs)


def test_the_report(device):
    model, fast = twins(mlp(), device)
    assert_trains_as(model, fast, 6, 8, steps=WARM + 2)
    assert fxfuse.explain(fast).cuda_graphs == ("2 training steps of the model replayed as CUDA graphs",)
    result = fast(data(6, 8, device=device))
    assert_trains_as(model, fast, 6, 8, steps=1)
    assert "1 training step of the model without CUDA graphs: the backward of an" in str(fxfuse.explain(fast))
    del result
    without = fxfuse.optimize(mlp().double().to(device))
    for _ in range(3):
        train(without, data(6, 8, device=device))
    assert made(without)[0].replays is None and fxfuse.explain(without).cuda_graphs == ()


def test_copies_have_graphs_of_their_own(device):
    model, fast = twins(mlp(), device)
    assert_trains_as(model, fast, 6, 8, steps=WARM + 1)
    twin = copy.deepcopy(fast)
    assert_trains_as(copy.deepcopy(model), twin, 6, 8)
    assert replays(twin) == 4 and replays(fast) == 1


def test_dynamos_graphs(device):
    torch.manual_seed(0)
    model = convolutional().double().to(device)
    torch._dynamo.reset()
    fast = torch.compile(copy.deepcopy(model), backend="fxfuse", options={"cuda_graphs": True})
    for seed in range(WARM + 6):
        x = data(4, 3, 10, 10, device=device, seed=seed)
        torch.testing.assert_close(train(fast, x), train(model, x))
    assert sum(step.replays.replays for step in made(*fxfuse.compiled_graphs(fast))) >= 3


# ------------------------------------------------------------------------------------------ in any order


class Both:
    """A model and its optimised copy, to which the same is done."""

    def __init__(self, device, seed):
        torch.manual_seed(seed)
        self.device = device
        self.models = twins(mlp(), device)
        self.pending, self.held, self.random = [], [], random.Random(seed)

    def forward(self):
        x = data(6, 8, device=self.device, seed=self.random.randrange(100))
        results = [model(x) for model in self.models]
        torch.testing.assert_close(*results)
        self.pending.append(results)

    def backward(self, keeps=False):
        if self.pending:
            at = self.random.randrange(len(self.pending))
            for result in self.pending[at]:
                weighed(result).backward(retain_graph=keeps)
            if not keeps:
                self.held.append((self.pending[at][1].detach(), self.pending.pop(at)[1].detach().clone()))

    def step(self):
        self.forward()
        self.backward()

    def backward_of_a_kept_graph(self):
        self.backward(keeps=True)

    def forget(self):
        self.pending.clear()

    def zero(self):
        to_none = self.random.random() < 0.7
        for model in self.models:
            model.zero_grad(to_none)

    def hold(self):
        self.held += [(each.grad, each.grad.clone()) for each in self.models[1].parameters() if each.grad is not None]
        for model in self.models:
            model.zero_grad()

    def learn(self):
        if not self.pending:
            for model in self.models:
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.grad is not None:
                            parameter -= 0.01 * parameter.grad

    def move(self):
        if not self.pending and self.random.random() < 0.2:
            for model in self.models:
                move(model)

    def evaluate(self):
        with torch.no_grad():
            self.forward()
        self.pending.pop()

    def derive_twice(self):
        found = []
        seed = self.random.randrange(100)
        for model in self.models:
            x = data(6, 8, device=self.device, seed=seed, wants=True)
            (slope,) = torch.autograd.grad(weighed(model(x)), x, create_graph=True)
            found.append(torch.autograd.grad(slope.square().sum(), model[0].weight))
        torch.testing.assert_close(*found)

    def check(self):
        grads = [[parameter.grad for parameter in model.parameters()] for model in self.models]
        for one, other in zip(*grads, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(other, one)
        for tensor, value in self.held:
            assert torch.equal(tensor, value)


OFTEN, SELDOM = ["step", "zero", "learn", "forward", "backward"], [
    "backward_of_a_kept_graph", "forget", "hold", "move", "evaluate", "derive_twice",
]  # fmt: skip


@pytest.mark.parametrize("in_segments", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_anything_in_any_order(seed, in_segments, device):
    with buckets() if in_segments else contextlib.nullcontext():
        do_anything(Both(device, seed))


def do_anything(both):
    for _ in range(WARM):
        both.step()
        both.zero()
    for _ in range(60):
        getattr(both, both.random.choice(4 * OFTEN + SELDOM))()
        both.check()
        if len(both.held) > 60:
            del both.held[:40]
    assert replays(both.models[1]) >= 5


# --------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnGpu:
    def test_a_step_is_two_launches(self):
        model = convolutional().cuda()
        fast = fxfuse.optimize(model, cuda_graphs=True)
        x = randn(4, 3, 10, 10).cuda()
        for _ in range(WARM + 1):
            train(fast, x)
        fast.zero_grad()
        weights, results = torch.ones(4, 5, device="cuda"), []
        assert graph_launches(lambda: results.append(fast(x))) == 1
        assert graph_launches(lambda: results[0].backward(weights)) == 1
        assert replays(fast) == 2

    def test_dropout_draws_eagers_numbers(self):
        model, fast = twins(with_dropout(), "cuda")
        for seed in range(WARM + 4):
            x = data(6, 8, device="cuda", seed=seed)
            found = []
            for each in (model, fast):
                torch.cuda.manual_seed(seed)
                found.append([*train(each, x), torch.rand(3, device="cuda")])
            torch.testing.assert_close(*found)
        assert replays(fast) == 4

    def test_masks_differ_from_replay_to_replay(self):
        _, fast = twins(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Tanh()), "cuda")
        x = data(6, 8, device="cuda")
        found = set()
        for _ in range(WARM + 6):
            result = fast(x)
            found.add(tuple((result == 0).flatten().tolist()))
            result.sum().backward()
        assert len(found) == WARM + 6 and replays(fast) >= 4

    @pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
    def test_autocast_and_a_scaler(self, kind):
        model = convolutional().cuda()
        fast = fxfuse.optimize(copy.deepcopy(model), cuda_graphs=True)
        plain = fxfuse.optimize(copy.deepcopy(model))
        found = []
        for each in (plain, fast):
            optimizer, scaler = torch.optim.SGD(each.parameters(), 0.05), torch.amp.GradScaler("cuda", 64.0)
            losses = []
            for seed in range(WARM + 6):
                optimizer.zero_grad()
                with torch.autocast("cuda", kind):
                    loss = F.cross_entropy(each(randn(4, 3, 10, 10, seed=seed).cuda()), torch.arange(4).cuda())
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                losses.append(loss.item())
            found.append(losses)
        torch.testing.assert_close(*map(torch.tensor, found), rtol=2e-2, atol=1e-2)
        assert replays(fast) >= 4

    def test_streams(self):
        model, fast = twins(mlp(), "cuda")
        assert_trains_as(model, fast, 6, 8, steps=WARM + 1)
        streams = [torch.cuda.Stream() for _ in range(3)]
        for turn in range(12):
            x = data(6, 8, device="cuda", seed=turn)
            stream = streams[turn % 3]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                have = train(fast, x)
            torch.cuda.current_stream().wait_stream(stream)
            torch.testing.assert_close(have, train(model, x))
        assert replays(fast) == 13

    def test_what_waits_for_the_gpu_has_no_graph(self):
        def forward(m, x):
            return m.fc(x).tanh() * x[x > 0].numel()

        model, fast = twins(Net(forward, fc=linear()), "cuda")
        assert_trains_as(model, fast, 5, 8)
        assert F.dropout(torch.ones(1000, device="cuda"), 0.5).sum() > 0, "the generator is not left capturing"

    def test_inside_the_users_own_graph(self):
        model, fast = twins(mlp(), "cuda")
        assert_trains_as(model, fast, 6, 8, steps=WARM + 1)
        x = data(6, 8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        fast.zero_grad()
        with torch.cuda.graph(graph):
            weighed_sum = fast(x).sum()
            weighed_sum.backward()
        x.copy_(data(6, 8, device="cuda", seed=5))
        graph.replay()
        model.zero_grad()
        model(x).sum().backward()
        torch.testing.assert_close([p.grad for p in fast.parameters()], [p.grad for p in model.parameters()])

    def test_memory_is_given_back(self):
        def trained():
            fast = fxfuse.optimize(convolutional().cuda(), cuda_graphs=True)
            for seed in range(WARM + 2):
                train(fast, randn(4, 3, 10, 10, seed=seed).cuda())
            assert replays(fast) == 2

        trained()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            trained()
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < 2**22
