"""register_pointwise again, as notebooks do, and by Dynamo: the latest meaning counts, for models that exist, too."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import Net, assert_as_eager, conv, epilogues, linear, randn, regions
from torch import nn

import fxfuse
from fxfuse import functional


@pytest.fixture(autouse=True)
def own(own_operations):
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def bent(x):
    return x * x * x


def register(name="bent", code="{0} * {0} * {0}", function=None, **options):
    function = function or bent
    return fxfuse.register_pointwise(name, **{"reference": function, "code": code, "spellings": (function,), **options})


@pytest.fixture
def redefined(monkeypatch):
    """Runs a notebook's cell again: a function of the same name that computes something else."""

    def redefine(function):
        monkeypatch.setitem(globals(), "bent", function)

    return redefine


def network():
    return Net(lambda m, x: bent(m.fc(x)) + 1, fc=linear()).eval()


X = randn(5, 8)


def called(model, times=4):
    """The result after as many calls as make a program."""
    with torch.no_grad():
        for _ in range(times):
            result = model(X)
    return result


def test_the_same_again_changes_nothing():
    first = register()
    fast = fxfuse.optimize(network())
    called(fast)
    graph, program = fast.graph, fxfuse.explain(fast).programs
    assert register() is not None and fxfuse.ops.row("bent") is first
    assert fast._graph is graph or str(fast.graph) == str(graph)
    assert fxfuse.explain(fast).programs == program, "its program is still there"


def test_other_code_for_the_same_function_is_used_from_the_next_call_on():
    register()
    model = network()
    fast = fxfuse.optimize(model)
    torch.testing.assert_close(called(fast), called(model))
    register(code="{0} * {0} * {0} + 100.0f")  # not what the reference computes: so we see which code runs
    torch.testing.assert_close(called(fast), called(model) + 100)
    assert "bent(acc)" in epilogues(fast)[0]


def test_a_function_that_is_defined_again_is_called_by_models_that_are_optimised_already(redefined):
    register()
    model = network()
    fast = fxfuse.optimize(model)
    before = called(fast)

    def bent(x):
        return torch.sin(x) * 2

    redefined(bent)
    register(code="sin({0}) * 2.0f", function=bent)
    expected = called(model)
    assert not torch.allclose(before, expected)
    torch.testing.assert_close(called(fast, 1), expected)
    torch.testing.assert_close(called(fast), expected)
    assert epilogues(fast) == ["bent(acc) + 1"] and regions(fast)[0].kernel


def test_the_old_function_keeps_its_meaning_where_a_model_still_calls_it():
    register()
    old = bent
    model = Net(lambda m, x: m.function(m.fc(x)) + 1, fc=linear(), function=old).eval()
    fast = fxfuse.optimize(model)
    called(fast)
    register(code="-{0}", function=lambda x: -x)
    torch.testing.assert_close(called(fast), called(model))


def scaled(x, by=2.0):
    return x * by


def test_parameters_may_change():
    options = {"reference": scaled, "spellings": (scaled,)}
    fxfuse.register_pointwise("scaled", code="{0} * 2.0f", **options)
    model = Net(lambda m, x: scaled(m.fc(x)) + 1, fc=linear()).eval()
    called(fxfuse.optimize(model))
    params = {"x": fxfuse.ops.REQUIRED, "by": 2.0}
    fxfuse.register_pointwise("scaled", code="{0} * {1}", params=params, **options)
    fast = fxfuse.optimize(model)
    torch.testing.assert_close(called(fast), called(model))
    assert epilogues(fast) == ["scaled(acc, 2.0) + 1"]


def test_an_unfused_call_is_derived_anew_too():
    """After a library's operation one pointwise operation is no region: two are."""
    register()
    model = Net(lambda m, x: bent(x.softmax(-1)).relu(), fc=linear()).eval()
    fast = fxfuse.optimize(model)
    called(fast)
    register(code="{0} * {0} * {0} + 100.0f")
    torch.testing.assert_close(called(fast), called(model) + 100)


def test_operators_called_by_their_text_use_the_latest_code():
    """As those of an exported program are, which no optimised model holds."""
    register()
    x, weight = randn(5, 8), randn(8, 8)
    exact = torch.nn.functional.linear(x, weight) ** 3
    torch.testing.assert_close(functional.linear(x, weight, None, [], "bent(acc)"), exact)
    register(code="{0} * {0} * {0} + 100.0f")
    torch.testing.assert_close(functional.linear(x, weight, None, [], "bent(acc)"), exact + 100)


def test_in_place_twins_are_of_the_new_meaning():
    register()
    assert fxfuse.ops.row("bent_").code == "{0} * {0} * {0}"
    register(code="{0}")
    assert fxfuse.ops.row("bent_").code == "{0}"


@pytest.mark.parametrize("name", ["relu", "silu", "add", "batch_norm"])
def test_fxfuses_own_operations_cannot_be_replaced(name):
    with pytest.raises(fxfuse.FxfuseError, match=f"'{name}' is an operation of fxfuse's own.*another name"):
        register(name)


def test_a_name_with_an_underscore_at_its_end_is_refused():
    with pytest.raises(fxfuse.FxfuseError, match=r"'bent_' ends in an underscore"):
        register("bent_")


def test_what_is_refused_leaves_the_old_meaning():
    register()
    fast = fxfuse.optimize(network())
    with pytest.raises(fxfuse.FxfuseError, match="does not fit"):
        register(code="{3}")
    with pytest.raises(fxfuse.FxfuseError, match=r"already spells the operation 'relu'"):
        register(spellings=(torch.relu,))
    torch.testing.assert_close(called(fast), called(network_of(fast)))
    assert fxfuse.ops.row("bent").code == "{0} * {0} * {0}"


def network_of(fast):
    model = network()
    model.load_state_dict(fast.state_dict())
    return model


# ---------------------------------------------------------------------------------------------- capture


def test_a_function_needs_no_mark_to_stay_one_node():
    register()
    fast = fxfuse.optimize(network())
    assert epilogues(fast) == ["bent(acc) + 1"]


def dynamos(model, **options):
    return torch.compile(model, backend="fxfuse", fullgraph=True, **options)


def test_dynamo_keeps_it_as_one_node_without_a_graph_break():
    register()
    model = network()
    before = set(fxfuse.compiled_graphs())
    fast = dynamos(model)
    with torch.no_grad():
        for _ in range(4):
            assert_as_eager(model, fast, randn(5, 8))
    (graph,) = set(fxfuse.compiled_graphs()) - before
    assert epilogues(graph) == ["bent(acc) + 1"] and regions(graph)[0].kernel


def test_dynamo_uses_the_latest_code():
    register()
    model = network()
    fast = dynamos(model)
    torch.testing.assert_close(called(fast), called(model))
    register(code="{0} * {0} * {0} + 100.0f")
    torch.testing.assert_close(called(fast), called(model) + 100)


def dynamo_notices_that_a_global_is_another(monkeypatch):
    """Whether Dynamo asks at each call if a function that it keeps as a node is still what its name means."""
    name = "bent"
    monkeypatch.setitem(globals(), name, torch._dynamo.allow_in_graph(lambda x: x + 1))
    call = torch.compile(lambda x: bent(x), backend="eager")
    before = call(torch.zeros(1))
    monkeypatch.setitem(globals(), name, torch._dynamo.allow_in_graph(lambda x: x + 2))
    noticed = not torch.equal(call(torch.zeros(1)), before)
    torch.compiler.reset()
    return noticed


def test_dynamo_sees_a_function_that_is_defined_again(redefined):
    with pytest.MonkeyPatch.context() as patch:
        if not dynamo_notices_that_a_global_is_another(patch):
            pytest.skip("torch 2.3's Dynamo does not ask whether a function is still what its name means")
    register()
    model = network()
    fast = dynamos(model)
    called(fast)

    def bent(x):
        return torch.sin(x) * 2

    redefined(bent)
    register(code="sin({0}) * 2.0f", function=bent)
    torch.testing.assert_close(called(fast), called(model))


def test_gradients_by_dynamo_are_eagers():
    register()
    model = network().train()
    fast = dynamos(model)
    for _ in range(3):
        gradients = []
        for call in (model, fast):
            model.zero_grad()
            call(X).square().sum().backward()
            gradients.append(model.fc.weight.grad.clone())
        torch.testing.assert_close(*gradients)


class Bent(nn.Module):
    def forward(self, x):
        return bent(x)


def test_modules_that_spell_it_are_right_by_dynamo():
    register(spellings=(bent, Bent))
    model = nn.Sequential(conv(), Bent(), nn.ReLU()).eval()
    fast = dynamos(model)
    with torch.no_grad():
        for _ in range(3):
            assert_as_eager(model, fast, randn(2, 4, 6, 6))


PROGRAM = """
import sys
import torch
import fxfuse

def bent(x):
    return torch.where(x > 0, x, x * 0.25) * x

fxfuse.register_pointwise("bent", reference=bent, code="({0} > 0.0f ? {0} : {0} * 0.25f) * {0}", spellings=(bent,))
assert "torch._dynamo" not in sys.modules, "registering is quick"

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 8)
    def forward(self, x):
        return bent(self.fc(x)) + 1

model, x = Model().eval(), torch.randn(4, 8)
fast = torch.compile(model, backend="fxfuse", fullgraph=True)
with torch.no_grad():
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(x))
(graph,) = fxfuse.compiled_graphs()
assert fxfuse.explain(graph).regions[0].epilogue == "bent(acc) + 1", fxfuse.explain(graph)
"""


def test_what_is_registered_before_dynamo_is_loaded_is_kept_by_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    subprocess.run([sys.executable, script], check=True, cwd=Path(fxfuse.__file__).parents[1])
