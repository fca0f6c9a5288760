"""Graphs that are broken around what no trace, program or training step can hold: graph_breaks.py."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import Net, linear, randn
from torch import nn

import fxfuse
from fxfuse import graph_breaks
from fxfuse.module import DYNAMO_KEEPS_OBJECTS, state_of

CALLS = 6


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    monkeypatch.setattr(graph_breaks, "WORTH", 2)


class Experts(nn.Module):
    """Each row goes to the expert that a router chooses: data decide how many rows each gets."""

    def __init__(self, count=3, features=8):
        super().__init__()
        self.before, self.router = nn.Linear(features, features), nn.Linear(features, count)
        self.experts = nn.ModuleList(nn.Linear(features, features) for _ in range(count))
        self.after = nn.Linear(features, features)

    def counts(self, chosen):
        return (chosen[:, None] == torch.arange(len(self.experts))).sum(0)

    def forward(self, x):
        x = F.gelu(self.before(x)) * 0.5 + x
        score, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        groups = x[order].split(self.counts(chosen).tolist())
        done = torch.cat([expert(group) for expert, group in zip(self.experts, groups, strict=True)])
        done = torch.zeros_like(x).index_add(0, order, done) * score[:, None]
        return torch.tanh(self.after(done)).square() + x


def parts_in(fast):
    """The parts of a model's only graph of Dynamo's."""
    (graph,) = state_of(fast).recapture.graphs
    return [graph.get_submodule(name) for name in graph_breaks.parts_of(graph)]


def gradients(model, call, *inputs):
    """The results and the gradients of all parameters and inputs of a loss that every element decides."""
    leaves = [*(item for item in inputs if item.requires_grad), *model.parameters()]
    result = call(*inputs)
    loss = (result * torch.arange(result.shape[-1], dtype=result.dtype).cos()).sum()
    return result, torch.autograd.grad(loss, leaves)


def assert_trains_as(model, fast, *inputs):
    double = copy.deepcopy(model).double()
    twins = [item.detach().double().requires_grad_() for item in inputs]
    want, expected = gradients(double, double, *twins)
    have, found = gradients(model, fast, *inputs)
    torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


needs_dynamo = pytest.mark.skipif(
    not DYNAMO_KEEPS_OBJECTS,
    reason="from torch 2.6 models are captured by Dynamo, and operators have gradients in Python",
)


@needs_dynamo
def test_what_lies_between_sizes_that_data_decide_trains_by_steps():
    torch.manual_seed(0)
    model = Experts()
    fast = fxfuse.optimize(model)
    for seed in range(CALLS):
        assert_trains_as(model, fast, randn(16, 8, seed=seed).requires_grad_())
    first, last = parts_in(fast)
    assert [len(state_of(part).training.steps) for part in (first, last)] == [1, 1]
    report = fxfuse.explain(fast)
    assert any("the model runs in 2 parts" in line and "split" in line for line in report.dynamo), report.dynamo
    assert not any("come from torch" in line for line in report.training), report.training


@needs_dynamo
@torch.no_grad()
def test_they_have_programs():
    torch.manual_seed(0)
    model = Experts().eval()
    fast = fxfuse.optimize(model)
    for seed in range(CALLS):
        x = randn(16, 8, seed=seed)
        torch.testing.assert_close(fast(x), model(x))
    assert [len(state_of(part).programs.programs) for part in parts_in(fast)] == [1, 1]


class OwnLength(Experts):
    """The counts themselves are as many as data decide, which no graph of Dynamo's holds."""

    def counts(self, chosen):
        return chosen.bincount(minlength=len(self.experts))


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad])
def test_what_dynamo_cannot_hold_runs_as_python(mode):
    torch.manual_seed(0)
    model = OwnLength()
    fast = fxfuse.optimize(model)
    with mode():
        for seed in range(CALLS):
            x = randn(16, 8, seed=seed)
            torch.testing.assert_close(fast(x), model(x))


class Grouped(nn.Module):
    """With an operator of a stranger's whose gradient reads data."""

    def __init__(self, features=8):
        super().__init__()
        self.before, self.after = nn.Linear(features, features), nn.Linear(features, features)
        self.weight = nn.Parameter(randn(2, features, features, seed=9))

    def forward(self, x, ends):
        x = torch.tanh(self.before(x)) * 2 + x
        return F.gelu(self.after(torch.ops.fxfuse_test_breaks.grouped(x, self.weight, ends))) + x


def _groups(ends):
    ends = ends.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


@pytest.fixture(scope="module")
def grouped():
    library = torch.library.Library("fxfuse_test_breaks", "DEF")

    def forward(x, weight, ends):
        return torch.cat([x[a:b] @ weight[at] for at, (a, b) in enumerate(_groups(ends))])

    def backward(ctx, gradient):
        x, weight, ends = ctx.saved_tensors
        pieces = [(gradient[a:b], x[a:b]) for a, b in _groups(ends)]
        of_x = torch.cat([piece @ weight[at].t() for at, (piece, _) in enumerate(pieces)])
        return of_x, torch.stack([own.t() @ piece for piece, own in pieces]), None

    library.define("grouped(Tensor x, Tensor weight, Tensor ends) -> Tensor")
    library.impl("grouped", forward, "CPU")
    torch.library.register_fake("fxfuse_test_breaks::grouped", lambda x, weight, ends: torch.empty_like(x))
    torch.library.register_autograd(
        "fxfuse_test_breaks::grouped", backward,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )  # fmt: skip
    yield
    library._destroy()


def graph_of(model, *inputs):
    """Dynamo's graph of a model."""
    graphs = []
    torch._dynamo.reset()
    torch.compile(model, backend=lambda gm, _: graphs.append(gm) or gm.forward, fullgraph=True)(*inputs)
    (graph,) = graphs
    return graph


def broken(graph):
    """The graph with its breaks, and its parts as graph modules."""
    found = graph_breaks.broken(graph, lambda part: part)
    return found, [found.get_submodule(name) for name in graph_breaks.parts_of(found)]


@needs_dynamo
def test_what_lies_around_a_gradient_that_reads_data_trains_by_steps(grouped):
    torch.manual_seed(0)
    model = Grouped()
    torch._dynamo.reset()
    fast = torch.compile(model, backend="fxfuse")
    double = copy.deepcopy(model).double()
    for seed in range(CALLS):
        x, ends = randn(16, 8, seed=seed).requires_grad_(), torch.tensor([3 + seed, 16])
        have, found = gradients(model, lambda x: fast(x, ends), x)  # noqa: B023
        want, expected = gradients(double, lambda x: double(x, ends), x.detach().double().requires_grad_())  # noqa: B023
        for one, other in zip((have, *found), (want, *expected), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    (graph,) = fxfuse.compiled_graphs(fast)
    parts = [graph.get_submodule(name) for name in graph_breaks.parts_of(graph)]
    assert [len(state_of(part).training.steps) for part in parts] == [1, 1]


@needs_dynamo
def test_a_graph_that_a_trace_can_hold_stays_whole(grouped):
    graph = graph_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), randn(4, 8))
    assert broken(graph)[0] is graph
    with torch.no_grad():  # no gradient, so none that reads data
        graph = graph_of(Grouped(), randn(4, 8), torch.tensor([2, 4]))
        assert broken(graph)[0] is graph


@needs_dynamo
def test_an_operator_without_a_gradient_is_no_break():
    library = torch.library.Library("fxfuse_test_whole", "DEF")
    try:
        library.define("rounded(Tensor x) -> Tensor")
        library.impl("rounded", lambda x: x.detach().round(), "CPU")
        torch.library.register_fake("fxfuse_test_whole::rounded", lambda x: torch.empty_like(x))
        model = Net(
            lambda m, x: torch.ops.fxfuse_test_whole.rounded(m.fc(x).tanh() * 2) + m.fc(x).exp().sin(), fc=linear()
        )
        graph = graph_of(model, randn(4, 8))
        assert broken(graph)[0] is graph
    finally:
        library._destroy()


@needs_dynamo
def test_a_graph_with_short_runs_stays_whole(monkeypatch):
    monkeypatch.setattr(graph_breaks, "WORTH", 100)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        graph = graph_of(Views(), randn(4, 6))
    assert broken(graph)[0] is graph


class Views(nn.Module):
    """A value and views of it leave what lies before the break."""

    def forward(self, x):
        made = torch.tanh(x) * 2
        flat = made.reshape(-1)
        first = flat[: int((made[0] > 0).sum())]  # as many as data decide
        return made + 1, flat.exp().sin(), first.sum()


@needs_dynamo
def test_no_two_results_of_a_part_share_memory():
    x = randn(4, 6)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        graph = graph_of(Views(), x)
    whole, (first, *_) = broken(graph)
    memory = [leaf.untyped_storage().data_ptr() for leaf in first(x)]
    assert len(set(memory)) == len(memory)
    for have, want in zip(whole(x), Views()(x), strict=True):
        torch.testing.assert_close(have, want)


class Modes(nn.Module):
    """Modes with a break inside, and without one."""

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = F.relu(x @ x).float() + 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = F.relu(x @ x).tanh()
            x = x[: int((x[0] > 0).sum())]
            x = F.relu(x @ x.t()).tanh()
        with torch.no_grad():
            x = x.sin().cos()
        return x.exp().float()


@needs_dynamo
def test_modes_with_a_break_inside_are_not_in_parts():
    x = randn(8, 8)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        graph = graph_of(Modes(), x)
    whole, parts = broken(graph)
    names = [[getattr(node.target, "__name__", "") for node in part.graph.nodes] for part in (*parts, whole)]
    assert names[0].count("_enter_autocast") == names[0].count("_exit_autocast") == 1
    assert names[-1].count("_enter_autocast") == names[-1].count("_exit_autocast") == 1
    assert sum("_enter_autocast" in one for one in names) == 2
    torch.testing.assert_close(whole(x)[0], Modes()(x))


class Asking(nn.Module):
    """Neither fx nor Dynamo can trace it."""

    def forward(self, x):
        return x * 2 if float(x.sum()) > 1e9 else x + 1


class Broken(nn.Module):
    """A shape, views and a value that is overwritten go past the module that runs as Python."""

    def __init__(self, between):
        super().__init__()
        self.before, self.after = nn.ModuleList(map(linear, (8, 8))), nn.ModuleList(map(linear, (8, 8)))
        self.between = between

    def forward(self, x):
        for layer in self.before:
            x = F.gelu(layer(x)) * 0.5 + x
        rows, (left, right), turned = x.shape[0], x.chunk(2, -1), x.t()
        y = self.between(x.tanh())
        y = y.view(rows, -1) + torch.cat([right, left], -1) + turned.t()
        y.mul_(0.5)
        for layer in self.after:
            y = F.silu(layer(y)) + y
        return y


class Noting(nn.Linear):
    """A linear with a hook that counts, by something that Dynamo does not trace."""

    def __init__(self):
        super().__init__(8, 8)
        self.noted = []
        self.register_forward_hook(lambda *_: self.noted.append(0))


def own_parts(fast):
    parts = state_of(fast).parts
    return () if parts is None else parts.each


@pytest.mark.parametrize("between", [Asking, Noting])
@pytest.mark.parametrize("gradients", [False, True])
def test_graphs_of_fxs_are_broken_around_modules(between, gradients):
    torch.manual_seed(0)
    model = Broken(between())
    fast = fxfuse.optimize(copy.deepcopy(model))
    nodes = [node.name for node in fast.graph.nodes]
    assert not any(name.startswith(graph_breaks.PART) for name in nodes), "people read the graph as a whole"
    for seed in range(12):
        x = randn(16, 8, seed=seed)
        if gradients:
            have, want = (gradients_of(net, x.clone().requires_grad_()) for net in (fast, model))
            torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
        else:
            with torch.no_grad():
                torch.testing.assert_close(fast(x), model(x))
    first, last = own_parts(fast)
    for part in (first, last):
        state = state_of(part)
        assert len(state.training.steps if gradients else state.programs.programs) == 1
    if between is Noting:
        assert len(model.between.noted) == 24, "copies of a model have its hooks"
    report = fxfuse.explain(fast)
    assert any("the model runs in parts" in line and "between" in line for line in report.dynamo), report.dynamo
    found = {region.number for region in state_of(fast).regions}
    assert found and found == {node.kwargs["region"] for node in fast.graph.nodes if "region" in node.kwargs}
    assert fxfuse.source(fast)


def gradients_of(net, x):
    result = net(x)
    loss = (result * torch.arange(result.shape[-1]).cos()).sum()
    return result, torch.autograd.grad(loss, [x, *net.parameters()])


def test_parts_see_what_changes():
    torch.manual_seed(0)
    model = Broken(Asking()).eval()
    fast, x, seen = fxfuse.optimize(model), randn(16, 8), []
    with torch.no_grad():
        for change in (
            lambda: None,
            lambda: setattr(fast.before[0], "weight", nn.Parameter(torch.rand(8, 8))),
            lambda: fast.after[0].bias.mul_(3),
            lambda: fast.after[1].register_forward_hook(lambda *_: seen.append(0)),
            lambda: setattr(fast, "between", nn.Tanh()),
        ):
            change()
            reference = Broken(fast.between if isinstance(fast.between, nn.Tanh) else Asking()).eval()
            reference.load_state_dict(fast.state_dict())
            for _ in range(9):
                torch.testing.assert_close(fast(x), reference(x))
        assert len(seen) == 18
    twin = copy.deepcopy(fast)
    torch.testing.assert_close(twin(x), fast(x))
    assert [*twin.state_dict()] == [*model.state_dict()]


@needs_dynamo
def test_dynamo_is_not_asked_again_where_it_captures_each_call():
    model, seen = Net(lambda m, x: F.gelu(m.l(x)), l=nn.Sequential(linear(), nn.ReLU())).eval(), []
    model.l.register_forward_hook(lambda module, args, result: seen.append(result.detach()))
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for _ in range(12):
            torch.testing.assert_close(fast(randn(4, 8)), F.gelu(F.relu(model.l[0](randn(4, 8)))))
    assert len(seen) == 12
    recapture = state_of(fast).recapture
    assert "again and again" in recapture.reason and not recapture.graphs
