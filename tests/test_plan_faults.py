"""Whatever goes wrong while a plan is made or run, the region runs by torch and one warning says so; strict raises."""

import warnings

import pytest
import torch
from helpers import Net2, assert_as_eager, linear, randn, regions
from torch import nn

import fxfuse
from fxfuse import build, plans
from fxfuse.cpu import plan as cpu_plan


class Mistake(Exception):
    """What nobody expects."""


@pytest.fixture
def model():
    return nn.Sequential(linear(), nn.ReLU(), nn.Tanh()).eval()


def fail(error):
    def failing(*args, **kwargs):
        raise error

    return failing


def planning(monkeypatch, error):
    monkeypatch.setattr(cpu_plan, "draft", fail(error))


def looking_at_dtypes(monkeypatch, error):
    monkeypatch.setattr(cpu_plan, "typed", fail(error))


def deciding(monkeypatch, error):
    monkeypatch.setattr(cpu_plan, "draft", lambda problem, acc: fail(error))


def launching(monkeypatch, error):
    monkeypatch.setattr(build, "load", lambda source: fail(error))


STEPS = [planning, looking_at_dtypes, deciding, launching]


@torch.no_grad()
@pytest.mark.filterwarnings("default::fxfuse.FxfuseWarning")
@pytest.mark.parametrize("error", [Mistake("oh"), ZeroDivisionError("oh"), MemoryError("oh")], ids=repr)
@pytest.mark.parametrize("prepared", [False, True], ids=["at a call", "for an example"])
@pytest.mark.parametrize("step", STEPS)
def test_the_region_runs_by_torch_and_one_warning_names_it(model, forget, monkeypatch, step, prepared, error):
    step(monkeypatch, error)
    x = randn(3, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fast = fxfuse.optimize(model, (x,) if prepared else None)
        for _ in range(4):
            assert_as_eager(model, fast, x)
    (warning,) = [w for w in caught if w.category is fxfuse.FxfuseWarning]
    assert "linear: tanh(relu(acc))" in str(warning.message) and type(error).__name__ in str(warning.message)
    assert "please report it" in str(warning.message)
    assert regions(fast)[0].kernel is None and regions(fast)[0].fallback == f"{type(error).__name__}: oh"


@torch.no_grad()
@pytest.mark.parametrize("step", STEPS)
def test_a_strict_model_raises(model, forget, monkeypatch, step):
    step(monkeypatch, Mistake("oh"))
    with pytest.raises(Mistake, match="oh"):
        fxfuse.optimize(model, strict=True)(randn(3, 8))


@torch.no_grad()
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), torch.cuda.OutOfMemoryError("full")], ids=repr)
@pytest.mark.parametrize("step", STEPS)
def test_what_is_nobodys_mistake_is_not_swallowed(model, forget, monkeypatch, step, error):
    step(monkeypatch, error)
    with pytest.raises(type(error)):
        fxfuse.optimize(model)(randn(3, 8))


@torch.no_grad()
@pytest.mark.filterwarnings("default::fxfuse.FxfuseWarning")
def test_a_plan_that_fails_after_a_while(model, forget, without_programs):
    """By then calls take a short cut."""
    fast, x = fxfuse.optimize(model), randn(3, 8)
    for _ in range(4):
        assert_as_eager(model, fast, x)
    (region,) = (node.kwargs["region"] for node in fast.graph.nodes if "region" in node.kwargs)
    assert region in plans.shortcuts or plans._guards is None
    plans.shortcuts[region] = fail(Mistake("a short cut"))
    for key, plan in plans._plans[region].items():
        plans._plans[region][key] = plans.dataclasses.replace(plan, run=fail(Mistake("a launch")))
    with pytest.warns(fxfuse.FxfuseWarning, match="a launch"):
        assert_as_eager(model, fast, x)
    for _ in range(4):
        assert_as_eager(model, fast, x)
    assert regions(fast)[0].fallback == "Mistake: a launch"


@torch.no_grad()
def test_torchs_own_error_is_not_taken_for_a_mistake(forget, monkeypatch):
    """A GPU that computes nothing more, say: what torch raises then is what the caller gets."""
    model = Net2(lambda m, x, y: torch.relu(m.fc(x) + y), fc=linear()).eval()
    fast = fxfuse.optimize(model)
    launching(monkeypatch, Mistake("a launch"))
    monkeypatch.setattr(plans.Problem, "reference", fail(RuntimeError("the GPU is lost")))
    with pytest.raises(RuntimeError, match="the GPU is lost"):
        fast(randn(3, 8), randn(3, 8))
