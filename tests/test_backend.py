"""torch.compile(model, backend="fxfuse") and programs of torch.export: the same regions, the same answers."""

from __future__ import annotations

import copy
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import Net, Net2, assert_as_eager, batch_norm, conv, epilogues, linear, outcome, randn
from torch import fx, nn

import fxfuse
from fxfuse import backend

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of torch's own


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    before = set(fxfuse.compiled_graphs())
    yield lambda: [graph for graph in fxfuse.compiled_graphs() if graph not in before]
    torch.compiler.reset()


def compiled(model, **options):
    return torch.compile(model, backend="fxfuse", **options)


IMAGE, ROWS = (2, 4, 9, 10), (2, 3, 8)
NETWORKS = {
    # model, shape of its input, number of regions
    "linear": (Net(lambda m, x: F.silu(m.d(m.fc(x))) * 2, fc=linear(), d=nn.Dropout(0.5)), ROWS, 1),
    "linear, no bias": (Net(lambda m, x: torch.tanh(m.fc(x)) + 1, fc=linear(bias=False)), ROWS, 1),
    "matmul": (Net(lambda m, x: torch.tanh(x @ m.w), w=randn(8, 5)), ROWS, 1),
    "addmm": (Net(lambda m, x: torch.addmm(m.b, x, m.w).relu(), b=randn(5), w=randn(8, 5)), (3, 8), 1),
    "flattened addmm": (
        Net(lambda m, x: F.gelu(torch.addmm(m.b, x.view(-1, 8), m.w).view(2, 3, 5)), b=randn(5), w=randn(8, 5)),
        ROWS, 1,
    ),
    "convolution": (Net(lambda m, x: F.relu6(m.bn(m.c(x))), c=conv(stride=2), bn=batch_norm()), IMAGE, 1),
    "residual": (Net(lambda m, x: F.relu(m.b(F.relu(m.a(x))) + x), a=linear(), b=linear()), ROWS, 2),
    "batch norm after a linear": (
        Net(lambda m, x: F.relu(m.bn(m.fc(x))), fc=linear(5), bn=nn.BatchNorm1d(5)), (4, 8), 1,
    ),
    "in place": (Net(lambda m, x: m.fc(x).relu_().add_(1).mul_(x), fc=linear()), ROWS, 1),
    "where": (Net(lambda m, x: torch.where(m.fc(x) > 0, x, -1.5).clamp(max=2), fc=linear()), ROWS, 1),
}  # fmt: skip


def assert_all_fused(graph, regions):
    report = fxfuse.explain(graph)
    assert len(report.regions) == regions and not report.skipped, report
    assert all(region.kernel and not region.fallback for region in report.regions), report


@pytest.mark.parametrize("name", NETWORKS)
def test_dynamo_graphs_are_fused(name, fresh_dynamo):
    model, shape, regions = NETWORKS[name]
    model = copy.deepcopy(model).eval()
    fast = compiled(model)
    with torch.no_grad():
        for _ in range(2):  # the first call computes with torch
            assert_as_eager(model, fast, randn(*shape))
    (graph,) = fresh_dynamo()
    assert_all_fused(graph, regions)


@pytest.mark.parametrize("decomposed", [False, True], ids=["as exported", "decomposed"])
@pytest.mark.parametrize("name", NETWORKS)
def test_exported_programs_are_fused(name, decomposed):
    model, shape, regions = NETWORKS[name]
    model = copy.deepcopy(model).eval()
    program = torch.export.export(model, (randn(*shape),))
    if decomposed:
        program = program.run_decompositions()
    fast = fxfuse.optimize(program)
    with torch.no_grad():
        assert_as_eager(model, fast, randn(*shape))
    assert_all_fused(fast, regions)
    assert fast.state_dict().keys() >= dict(model.named_parameters()).keys()


@pytest.mark.parametrize("function", [F.gelu, F.mish, F.elu, F.hardswish, F.softplus, F.logsigmoid, torch.square])
def test_decomposed_activations_are_one_region(function):
    model = Net(lambda m, x: function(m.fc(x)), fc=linear()).eval()
    fast = fxfuse.optimize(torch.export.export(model, (randn(3, 8),)).run_decompositions())
    with torch.no_grad():
        assert_as_eager(model, fast, randn(3, 8))
    assert len(fxfuse.explain(fast).regions) == 1


def test_sizes_that_vary_compile_one_more_graph(fresh_dynamo):
    model = Net(lambda m, x: F.gelu(m.fc(x)), fc=linear()).eval()
    fast = compiled(model)
    with torch.no_grad():
        for rows in (2, 3, 5, 9, 17):
            assert_as_eager(model, fast, randn(rows, 4, 8))
    assert len(fresh_dynamo()) == 2


def test_numbers_and_sizes_are_operands(fresh_dynamo):
    model = Net2(lambda m, x, y: F.relu(m.fc(x)) * y + x.shape[0], fc=linear()).eval()
    fast = compiled(model, dynamic=True)
    with torch.no_grad():
        for number in (2, 3, 0.5, 1.25):
            assert_as_eager(model, fast, randn(3, 8), number, exact=False)
    assert all(len(fxfuse.explain(graph).regions) == 1 for graph in fresh_dynamo())


def test_graph_breaks(fresh_dynamo):
    def forward(m, x):
        y = F.relu(m.fc(x))
        if y.sum() > 0:  # a question that no graph answers
            return torch.tanh(m.fc(y))
        return y

    model = Net(forward, fc=linear()).eval()
    with torch.no_grad():
        assert_as_eager(model, compiled(model), randn(3, 8))
    assert sorted(text for graph in fresh_dynamo() for text in epilogues(graph)) == ["relu(acc)", "tanh(acc)"]


def test_gradients(fresh_dynamo):
    model = Net(lambda m, x: F.silu(m.fc(x)).mul(m.w), fc=linear(), w=randn(8))
    gradients = []
    for call in (model, compiled(model)):
        model.zero_grad()
        call(randn(3, 8)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)
    assert len(fresh_dynamo()) == 1


def test_no_region_spans_a_change_of_autocast(fresh_dynamo):
    def forward(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m.fc(x)
        return F.relu(y) + 1

    model = Net(forward, fc=linear()).eval()
    with torch.no_grad():
        assert_as_eager(model, compiled(model), randn(3, 8), exact=False)
    (graph,) = fresh_dynamo()
    report = fxfuse.explain(graph)
    assert [region.nodes for region in report.regions] == [("relu", "add")], "what comes after it is a chain"
    assert "another autocast or gradient mode" in report.skipped[0].reason


def test_arguments_that_are_overwritten():
    def forward(m, x):
        y = F.relu(m.fc(x))
        x.add_(1)
        return y, x

    model = Net(forward, fc=linear()).eval()
    fast = compiled(model)
    with torch.no_grad():
        for _ in range(2):
            inputs = [randn(3, 8), randn(3, 8)]
            results = [call(x) for call, x in zip((model, fast), inputs, strict=True)]
            torch.testing.assert_close(*results)
            torch.testing.assert_close(*inputs)


def test_options_and_modes():
    model = Net(lambda m, x: F.relu(m.fc(x)), fc=linear()).eval()
    x = randn(3, 8)
    assert isinstance(outcome(compiled(model, options={"fp32": "fast", "strict": True}), x), torch.Tensor)
    assert isinstance(outcome(compiled(model, mode="max-autotune"), x), torch.Tensor)
    for options, message in (
        ({"mode": "fastest"}, "no mode 'fastest'; it has default, reduce-overhead, max-autotune, max-auto"),
        ({"options": {"speed": 3}}, "no option 'speed'; it has strict, fp32, cuda_graphs"),
        ({"options": {"fp32": "slow"}}, 'fp32 is "exact" or "fast"'),
        ({"options": {"strict": "yes"}}, "strict is True or False, not 'yes'"),
        ({"options": {"cuda_graphs": "yes"}}, "cuda_graphs is True or False, not 'yes'"),
    ):
        torch.compiler.reset()
        with pytest.raises(Exception, match=message):
            compiled(model, **options)(x)


def test_reduce_overhead_says_once_on_a_cpu_that_it_changes_nothing(monkeypatch, fresh_dynamo):
    monkeypatch.setattr(backend, "_overhead_stays", [])
    x = randn(3, 8)
    with pytest.warns(fxfuse.FxfuseWarning, match="not on a GPU: it runs as it does without") as warned:
        for layers in (1, 2):
            torch.compiler.reset()
            model = nn.Sequential(*(nn.Sequential(linear(), nn.ReLU()) for _ in range(layers))).eval()
            with torch.no_grad():
                for _ in range(3):
                    assert_as_eager(model, compiled(model, mode="reduce-overhead"), x)
    assert len(warned) == 1
    assert not any(fxfuse.explain(graph).cuda_graphs for graph in fresh_dynamo())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_reduce_overhead_is_cuda_graphs_on_a_gpu(mode, monkeypatch):
    """What is on a GPU is told by the arguments, of which parameters are some."""
    captured = []
    monkeypatch.setattr(backend, "fused_graph", lambda gm, settings, cuda_graphs: captured.append(cuda_graphs) or gm)
    on_gpu = torch.empty(3, device="meta")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.is_meta), raising=False)
    backend.compile_graph(fx.symbolic_trace(nn.ReLU()), (torch.ones(2), on_gpu), mode=mode)
    assert [bool(graphs) for graphs in captured] == [mode == "reduce-overhead"]


def test_strict_is_an_option():
    model = Net(lambda m, x: F.relu(m.fc(x)), fc=linear()).eval().double()
    x = randn(3, 8).double()
    with torch.no_grad():
        assert torch.equal(compiled(model)(x), model(x))
        torch.compiler.reset()
        with pytest.raises(fxfuse.UnsupportedError, match=r"float64"):
            compiled(model, options={"strict": True})(x)


IMPORTS = {
    "fxfuse first": "import fxfuse, sys; assert 'torch._dynamo' not in sys.modules; import torch",
    "Dynamo first": "import torch, torch._dynamo; import fxfuse",
    "after Dynamo has looked for backends": "import torch; torch._dynamo.list_backends(); import fxfuse",
}


@pytest.mark.parametrize("name", IMPORTS)
def test_importing_fxfuse_is_enough(name):
    """Whether it is installed or not."""
    program = f"""
{IMPORTS[name]}
model = torch.nn.Sequential(torch.nn.ReLU()).eval()
fast, x = torch.compile(model, backend="fxfuse"), torch.randn(3)
assert torch.equal(fast(x), model(x)) and len(fxfuse.compiled_graphs()) == 1
assert "fxfuse" in torch._dynamo.list_backends()
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=pathlib.Path(fxfuse.__file__).parents[1])


def test_a_compiled_model_can_be_optimised_and_the_reverse():
    model = Net(lambda m, x: F.relu(m.fc(x)), fc=linear()).eval()
    x = randn(3, 8)
    with torch.no_grad():
        assert_as_eager(model, compiled(fxfuse.optimize(model)), x)
        assert epilogues(fxfuse.optimize(compiled(model))) == ["relu(acc)"]


def test_a_compiled_model_inside_one_that_is_prepared():
    inner = Net(lambda m, x: torch.tanh(m.fc(x)), fc=linear()).eval()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.inner = linear(), compiled(inner)

        def forward(self, x):
            y = self.inner(F.relu(self.fc(x)))
            return y if y.sum() < 1e9 else -y  # runs as Python

    model = Outer().eval()
    fast = fxfuse.optimize(model, (randn(3, 8),))
    with torch.no_grad():
        torch.testing.assert_close(fast(randn(3, 8)), model(randn(3, 8)))


class Broken(nn.Module):
    """Two graphs, the second of which reads no parameter."""

    def __init__(self, features=8):
        super().__init__()
        self.fc = linear(features)

    def forward(self, x):
        x = torch.relu(self.fc(x))
        torch._dynamo.graph_break()
        return torch.tanh(x * 2)


def test_graphs_belong_to_the_model_whose_call_made_them(fresh_dynamo):
    one, other = Broken().eval(), Net(lambda m, x: torch.relu(m.fc(x)), fc=linear(7)).eval()
    called = [compiled(model) for model in (one, other)]
    with torch.no_grad():
        for model in called:
            model(randn(2, 8))
    first, second, third = fresh_dynamo()
    assert fxfuse.compiled_graphs(one)[-2:] == fxfuse.compiled_graphs(called[0])[-2:] == (first, second)
    assert fxfuse.compiled_graphs(other)[-1] is third and third not in fxfuse.compiled_graphs(one)
    assert fxfuse.compiled_graphs(nn.Linear(2, 3)) == ()


def test_graphs_that_dynamo_shares_belong_to_each_model_of_the_class(fresh_dynamo):
    one, twin, wider = Broken().eval(), Broken().eval(), Broken(9).eval()
    with torch.no_grad():
        for model in (one, twin, wider):
            compiled(model)(randn(2, 8))
    assert fxfuse.compiled_graphs(twin) == fxfuse.compiled_graphs(one) != ()
    assert fxfuse.compiled_graphs(wider) and set(fxfuse.compiled_graphs(wider)).isdisjoint(fxfuse.compiled_graphs(one))


def test_graphs_of_a_child_belong_to_the_model_around_it(fresh_dynamo):
    model = Net(lambda m, x: m.inner(x) + 1, inner=compiled(Broken().eval())).eval()
    with torch.no_grad():
        model(randn(2, 8))
    new = fresh_dynamo()
    assert len(new) == 2 and fxfuse.compiled_graphs(model) == tuple(new)
    assert set(new) <= set(fxfuse.compiled_graphs(model.inner))
