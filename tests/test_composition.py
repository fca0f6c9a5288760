"""Optimised models in others' hands: torch.compile, torch.export, files and copies."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from helpers import COPIES, assert_as_eager, linear, randn
from torch import fx, nn

import fxfuse
from fxfuse import build

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of torch's own


class Optional(nn.Module):
    """Arguments with defaults, a dictionary out, modules that depend on the mode."""

    def __init__(self):
        super().__init__()
        self.fc, self.drop, self.norm = linear(), nn.Dropout(0.5), nn.BatchNorm1d(8)

    def forward(self, x, mask=None, scale=1.0, **options):
        y = F.silu(self.norm(self.drop(self.fc(x)))) * scale
        return {"y": y if mask is None else y * mask}


class Python(nn.Module):
    """Asks for sizes, which no trace can answer."""

    def __init__(self):
        super().__init__()
        self.inner, self.fc = Optional(), linear()

    def forward(self, x):
        return F.gelu(self.fc(self.inner(x, scale=2.0)["y"])).view(*x.shape[:-1], 2, 4)


class Convolutions(nn.Module):
    """A run that is converted to channels_last on a GPU."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x)) + x
        return x


CASES = {
    # the model, a call's arguments, fused operators in its graph
    "traced": (Optional, (randn(3, 8),), 1),
    "another argument": (Optional, (randn(3, 8), randn(3, 8, seed=1)), 1),
    "Python": (Python, (randn(3, 8),), 1),
    "convolutions": (Convolutions, (randn(2, 4, 6, 6),), 4),
}


def fused_operators(graph):
    return sum(node.op == "call_function" and "fxfuse" in str(node.target) for node in graph.nodes)


@pytest.fixture(params=CASES)
def case(request):
    make, inputs, operators = CASES[request.param]
    torch.manual_seed(0)
    torch.compiler.reset()
    model = make().eval()
    with torch.no_grad():
        fast = fxfuse.optimize(model)
        fast(*inputs)  # a call with other arguments than the default ones is traced now, not by Dynamo
        yield model, fast, inputs, operators


def test_compiled_without_a_graph_break(case):
    model, fast, inputs, operators = case
    graphs = []

    def backend(graph_module, example_inputs):
        graphs.append(graph_module.graph)
        return graph_module

    assert_as_eager(model, torch.compile(fast, backend=backend, fullgraph=True), *inputs)
    assert [fused_operators(graph) for graph in graphs] == [operators]


@pytest.mark.parametrize("backend", ["aot_eager", "fxfuse"])
def test_compiled_by_other_backends(case, backend):
    model, fast, inputs, _ = case
    assert_as_eager(model, torch.compile(fast, backend=backend), *inputs)


def test_compiled_by_inductor():
    model = nn.Sequential(linear(), nn.Mish()).eval()
    with torch.no_grad():
        assert_as_eager(model, torch.compile(fxfuse.optimize(model)), randn(3, 8), exact=False)


def test_compiled_for_arguments_that_were_not_met_before():
    model = Optional().eval()
    fast = torch.compile(fxfuse.optimize(model), backend="eager", fullgraph=True)
    with torch.no_grad():
        assert_as_eager(model, fast, randn(3, 8), mask=randn(3, 8, seed=1), exact=False)


def test_many_optimised_models_are_compiled():
    """Dynamo keeps a few results for each code object; each model has its own."""
    models = [Optional().eval() for _ in range(12)]
    graphs = []

    def backend(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module

    torch.compiler.reset()
    with torch.no_grad():
        for model in models:
            assert_as_eager(model, torch.compile(fxfuse.optimize(model), backend=backend), randn(3, 8))
    assert len(graphs) == len(models)


def through_a_file(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


PROGRAMS = {
    "exported": lambda program: program,
    "decomposed": lambda program: program.run_decompositions(),
    "saved": through_a_file,
}


@pytest.mark.parametrize("how", PROGRAMS)
@pytest.mark.parametrize("strict", [False, True], ids=["interpreted", "by Dynamo"])
def test_exported(case, how, strict):
    model, fast, inputs, operators = case
    program = PROGRAMS[how](torch.export.export(fast, inputs, strict=strict))
    assert fused_operators(program.graph) == operators
    assert program.state_dict.keys() == model.state_dict().keys()
    assert_as_eager(model, program.module(), *inputs)


def test_exported_for_any_number_of_rows():
    model = Optional().eval()
    rows = torch.export.Dim("rows", min=2)
    with torch.no_grad():
        program = torch.export.export(fxfuse.optimize(model), (randn(3, 8),), dynamic_shapes={"x": {0: rows}})
        for n in (2, 5, 33):
            assert_as_eager(model, program.module(), randn(n, 8), exact=False)


@pytest.mark.parametrize("strict", [False, True], ids=["interpreted", "by Dynamo"])
def test_an_exported_program_calls_the_models_hooks(strict):
    model = nn.Sequential(linear(), nn.ReLU()).eval()
    fast, plain = fxfuse.optimize(model), fx.symbolic_trace(model)
    for module in (model, fast, plain):
        module.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        module.register_forward_hook(lambda module, args, result: result * 2)
    try:
        torch.export.export(plain, (randn(3, 8),), strict=strict)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        pytest.skip(f"torch {torch.__version__} exports no graph module with hooks: {error}")
    program = torch.export.export(fast, (randn(3, 8),), strict=strict)
    with torch.no_grad():
        assert_as_eager(model, program.module(), randn(3, 8), exact=False)


class Remembering(nn.Module):
    """Keeps something in Python attributes at every call."""

    def __init__(self):
        super().__init__()
        self.count, self.met, self.mean = 0, [], torch.zeros(())

    def forward(self, x):
        self.count += 1
        self.met.append(self.count)
        self.mean = self.mean + x.mean()
        return x * self.count + len(self.met)


@pytest.mark.parametrize("nested", [False, True])
def test_torch_export_leaves_attributes_as_they_were(nested):
    model = nn.Sequential(Remembering(), nn.Tanh()) if nested else Remembering()
    fast = fxfuse.optimize(model)
    torch.export.export(fast, (randn(3, 8),))
    found = fast[0] if nested else fast
    assert (found.count, found.met) == (0, [])
    assert type(found.mean) is torch.Tensor and found.mean == 0
    assert_as_eager(model, fast, randn(3, 8), exact=False)


@pytest.mark.parametrize("how", PROGRAMS)
def test_an_exported_program_can_be_optimised_again(how):
    model = Optional().eval()
    program = PROGRAMS[how](torch.export.export(fxfuse.optimize(model), (randn(3, 8),)))
    with torch.no_grad():
        assert_as_eager(model, fxfuse.optimize(program), randn(3, 8), exact=False)


class Varied(nn.Module):
    """A linear, a convolution and a chain; no region but the last one has operands."""

    def __init__(self):
        super().__init__()
        self.fc, self.conv = nn.Linear(8, 8), nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, x):
        image = torch.relu(self.conv(torch.tanh(self.fc(x))[None, None]))
        return image.sum((0, 1)) + (x * 2).relu()


@pytest.mark.slow
def test_aotinductors_packages_call_the_fused_operators(tmp_path):
    """Where fxfuse is imported; empty lists of operands reach operators as None."""
    inductor = pytest.importorskip("torch._inductor")
    if not hasattr(inductor, "aoti_load_package"):
        pytest.skip(f"torch {torch.__version__} has no such packages")
    model, x = Varied().eval(), randn(3, 8)
    with torch.no_grad():
        program = torch.export.export(fxfuse.optimize(model), (x,))
        assert fused_operators(program.graph) == 3
        compiled = inductor.aoti_load_package(
            inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        )
        torch.testing.assert_close(compiled(x), model(x))
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("how", COPIES)
def test_copies_find_their_kernels(case, how, forget, monkeypatch):
    """In a process that has loaded nothing, and with no compiler."""
    model, fast, inputs, _ = case
    forget()
    twin = COPIES[how](fast)
    monkeypatch.setattr(build, "_load_inline", None)
    assert_as_eager(model, twin, *inputs)
    used = [region for region in fxfuse.explain(twin).regions if region.kernel]
    assert used and not any(region.fallback for region in used)
