"""How a call finds its plan: by key, or by a short cut once two calls in a row were alike."""

import shutil
import threading
import time

import pytest
import torch
from helpers import Net2, assert_as_eager, linear, randn
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fxfuse
from fxfuse import ahead, build, plans
from fxfuse.problem import Plan, postpone

pytestmark = pytest.mark.skipif(plans._guards is None, reason="this torch has no TensorGuards")


class Module:
    """An optimised linear with an operand after a few equal calls, and its region."""

    def __init__(self):
        self.model = Net2(lambda m, x, y: torch.relu(m.fc(x) + y), fc=linear(), unused=linear()).eval()
        self.x, self.y = randn(5, 8), randn(5, 8, seed=1)
        self.fast = fxfuse.optimize(self.model)
        (self.region,) = (node.kwargs["region"] for node in self.fast.graph.nodes if "region" in node.kwargs)
        with torch.no_grad():
            for _ in range(3):
                self.fast(self.x, self.y)

    def assert_right(self, x=None, y=None):
        inputs = (self.x if x is None else x, self.y if y is None else y)
        for _ in range(3):  # the later ones by a short cut of their own
            assert_as_eager(self.model, self.fast, *inputs)


@pytest.fixture
def module():
    return Module()


def test_the_third_call_takes_a_short_cut(module, monkeypatch):
    with torch.no_grad():
        expected = module.model(module.x, module.y)
        monkeypatch.setattr(plans, "run", None)  # the long way
        torch.testing.assert_close(module.fast(module.x, module.y), expected)


OTHERS = {
    "rows": lambda x: randn(7, 8),
    "features' strides": lambda x: randn(8, 5).t(),
    "rows' strides": lambda x: randn(10, 8)[::2],
    "dtype": lambda x: x.double(),
    "dimensions": lambda x: x[None],
    "subclass": lambda x: x.as_subclass(type("Sub", (torch.Tensor,), {})),
    "parameter": nn.Parameter,
    "negative bit": torch._neg_view,
    "zero": torch._efficientzerotensor,
}


@pytest.mark.parametrize("name", [name for name in OTHERS if name not in ("dtype", "zero")])
@torch.no_grad()
def test_another_x_is_another_call(module, name):
    x = OTHERS[name](module.x)
    module.assert_right(x, randn(*x.shape, seed=1))
    module.assert_right()


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "zero"])
@torch.no_grad()
def test_another_operand_is_another_call(module, name):
    y = OTHERS[name](module.y)
    module.assert_right(randn(y.shape[-2], 8), y)
    module.assert_right()


@torch.no_grad()
def test_replaced_parameters_are_another_call(module):
    module.model.fc.weight.data = randn(8, 8, seed=7).t()
    module.assert_right()
    module.model.double()
    module.assert_right(module.x.double(), module.y.double())


def test_a_gradient_that_is_due_is_another_call(module):
    module.assert_right()
    module.fast(module.x, module.y).sum().backward()
    assert module.model.fc.weight.grad is not None
    y = module.y.clone().requires_grad_()
    with torch.no_grad():
        module.assert_right(y=y)


class _Dispatch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen += function.namespace == "fxfuse"
        return function(*args, **(kwargs or {}))


class _Function(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen += "fxfuse" in str(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [_Dispatch, _Function])
@torch.no_grad()
def test_who_watches_operators_sees_them(module, mode):
    with mode() as watching:
        module.fast(module.x, module.y)
    assert watching.seen == 1


@torch.no_grad()
def test_the_profiler_sees_the_operator(module, without_programs):
    with torch.profiler.profile() as profile:
        module.fast(module.x, module.y)
    assert any(event.name == "fxfuse::linear" for event in profile.events())


@torch.no_grad()
def test_autocast_is_another_call(module):
    for _ in range(3):
        with torch.autocast("cpu"):
            result, expected = module.fast(module.x, module.y), module.model(module.x, module.y)
        assert result.dtype == expected.dtype
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
        module.assert_right()


@torch.no_grad()
def test_transformations_are_another_call(module):
    xs = randn(3, 5, 8, seed=3)
    torch.testing.assert_close(
        torch.func.vmap(module.fast, (0, None))(xs, module.y), torch.func.vmap(module.model, (0, None))(xs, module.y)
    )
    module.assert_right()


def test_inference_mode_is_another_call(module):
    with torch.inference_mode():
        module.assert_right()
    with torch.no_grad():
        module.assert_right()


@torch.no_grad()
def test_calls_that_alternate_each_get_their_own_result(module):
    inputs = [(randn(rows, 8, seed=rows), randn(rows, 8)) for rows in (5, 7, 9)]
    for x, y in (*inputs, *inputs[:2], *inputs[:2], *inputs[:1]) * 2:
        assert_as_eager(module.model, module.fast, x, y)


@torch.no_grad()
def test_an_assigned_plan_drops_the_short_cut(module, without_programs):
    answer = torch.zeros(())
    for key in list(plans._plans[module.region]):
        plans.assign(module.region, key, Plan(lambda *_: answer, "zero"))
    for _ in range(4):
        assert module.fast(module.x, module.y) is answer


@torch.no_grad()
def test_a_forgotten_region_has_none(module):
    plans.forget([module.region])
    assert module.region not in plans.shortcuts
    module.assert_right()


# ----------------------------------------------------------------------------------- many regions, few problems


@torch.no_grad()
def test_regions_that_pose_one_problem_share_its_plan(new_cache, monkeypatch):
    model = nn.Sequential(*(layer for _ in range(3) for layer in (linear(), nn.ReLU())), linear(4), nn.ReLU()).eval()
    drafted, draft = [], plans._draft

    def counting(problem, strict):
        drafted.append(problem)
        return draft(problem, strict)

    monkeypatch.setattr(plans, "_draft", counting)
    x = randn(5, 8)
    fast = fxfuse.optimize(model, (x,))
    # is it compiled already? then compiled; the first one's kernel, which is the second's, may be meanwhile
    assert 2 + 1 <= len(drafted) <= 2 + 2 and len(set(drafted)) == 2
    regions = [node.kwargs["region"] for node in fast.graph.nodes if "region" in node.kwargs]
    assert [len(plans.of_region(region)) for region in regions] == [1, 1, 1, 1]
    assert_as_eager(model, fast, x)
    fxfuse.optimize(model, (x,))
    assert len(drafted) == 2 + 2 + 2  # it is


# --------------------------------------------------------------------------------------- an example's call


@pytest.fixture
def drafted(monkeypatch):
    """Two linears whose drafts wait for each other's turn; notes what happens, with the thread that it happens in."""

    class Drafted:
        def __init__(self):
            self.model = nn.Sequential(linear(), nn.ReLU(), linear(), nn.Tanh()).eval()
            self.events, self.may_compile = [], {}
            for epilogue in ("relu(acc)", "tanh(acc)"):
                self.may_compile[epilogue] = threading.Event()

        def draft(self, problem, strict):
            what = problem.epilogue
            self.note("compiling", what)
            assert self.may_compile[what].wait(60), f"{what} is not compiled before it is waited for"

            def decide():
                self.note("measured", what)
                for event in self.may_compile.values():
                    event.set()
                return Plan(problem.reference, what)

            return decide

        def note(self, *event):
            self.events.append((*event, threading.current_thread() is threading.main_thread()))

        def wait_for(self, *event):
            deadline = time.monotonic() + 60
            while event not in [noted[:2] for noted in self.events]:
                assert time.monotonic() < deadline, f"{event} did not happen"
                time.sleep(0.001)

    found = Drafted()
    monkeypatch.setattr(plans, "_draft", found.draft)
    monkeypatch.setattr(plans, "_at_hand", lambda problem, strict: None)
    yield found
    for event in found.may_compile.values():
        event.set()


@torch.no_grad()
def test_compiling_begins_while_the_example_runs_and_measuring_when_it_has(drafted):
    x, fast = randn(5, 8), fxfuse.optimize(drafted.model)
    with plans.preparing() as drafts:
        fast(x)
        drafted.wait_for("compiling", "relu(acc)")
        drafted.wait_for("compiling", "tanh(acc)")
        assert not drafts.done()
        drafted.may_compile["tanh(acc)"].set()
        drafted.note("the example's call", "ends")
    compiled, ended, measured = drafted.events[:2], drafted.events[2], drafted.events[3:]
    assert sorted(compiled) == [("compiling", "relu(acc)", False), ("compiling", "tanh(acc)", False)]
    assert ended == ("the example's call", "ends", True)
    # the other one is compiled once this one is measured
    assert measured == [("measured", "tanh(acc)", True), ("measured", "relu(acc)", True)]
    assert_as_eager(drafted.model, fast, x)
    assert drafted.events[3:] == measured


@torch.no_grad()
def test_others_are_measured_while_a_draft_that_needs_more_kernels_waits_for_them(drafted, monkeypatch):
    first, more, whole = threading.Event(), threading.Event(), drafted.draft

    def draft(problem, strict):
        decide, done = whole(problem, strict), []
        if problem.epilogue == "tanh(acc)":
            assert first.wait(60)

        def asking():
            if problem.epilogue == "relu(acc)" and not done:
                drafted.note("needs more", problem.epilogue)
                first.set()
                postpone(lambda: done.append(more.wait(60)))
            plan = decide()
            more.set()
            return plan

        return asking

    monkeypatch.setattr(plans, "_draft", draft)
    for event in drafted.may_compile.values():
        event.set()
    x, fast = randn(5, 8), fxfuse.optimize(drafted.model)
    with plans.preparing():
        fast(x)
    decided = [event for event in drafted.events if event[0] != "compiling"]
    assert [event[:2] for event in decided] == [
        ("needs more", "relu(acc)"), ("measured", "tanh(acc)"), ("measured", "relu(acc)"),
    ]  # fmt: skip
    assert all(in_main_thread for *_, in_main_thread in decided)
    assert_as_eager(drafted.model, fast, x)


@torch.no_grad()
def test_a_call_that_fails_leaves_nothing_to_compile(drafted, monkeypatch):
    monkeypatch.setattr(ahead, "WAITING", 1)
    monkeypatch.setattr(build, "PROCESSORS", 1)  # one draft at a time
    fast = fxfuse.optimize(drafted.model)
    with pytest.raises(ZeroDivisionError), plans.preparing() as drafts:
        fast(randn(5, 8))
        drafted.wait_for("compiling", "relu(acc)")
        _ = 1 / 0
    drafted.may_compile["relu(acc)"].set()
    drafts._pool.shutdown()
    assert drafted.events == [("compiling", "relu(acc)", False)]
    assert not any(plans.of_region(node.kwargs["region"]) for node in fast.graph.nodes if "region" in node.kwargs)


@torch.no_grad()
def test_a_draft_that_fails_fails_the_optimisation(drafted, monkeypatch):
    def draft(problem, strict):
        raise fxfuse.BuildError(problem.epilogue)

    monkeypatch.setattr(plans, "_draft", draft)
    with pytest.raises(fxfuse.BuildError, match="acc"):
        fxfuse.optimize(drafted.model, (randn(5, 8),))


@torch.no_grad()
def test_a_model_within_another_one_prepares_its_own_calls(drafted):
    inner = fxfuse.optimize(nn.Sequential(linear(), nn.Tanh()).eval())
    outer = fxfuse.optimize(nn.Sequential(linear(), nn.ReLU()).eval())
    for event in drafted.may_compile.values():
        event.set()
    with plans.preparing():
        outer(randn(5, 8))
        with plans.preparing():
            inner(randn(5, 8))
        assert [what for happened, what, _ in drafted.events if happened == "measured"] == ["tanh(acc)"]
        outer(randn(7, 8))
    measured = [what for happened, what, _ in drafted.events if happened == "measured"]
    assert measured == ["tanh(acc)", "relu(acc)", "relu(acc)"]


@torch.no_grad()
def test_a_call_that_is_captured_prepares_nothing(drafted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for event in drafted.may_compile.values():
        event.set()
    fxfuse.optimize(drafted.model, (randn(5, 8),))
    assert all(in_the_calling_thread for *_, in_the_calling_thread in drafted.events)


# -------------------------------------------------------------------------------------------- a new process


@torch.no_grad()
def test_what_is_compiled_already_runs_at_once(new_cache, forget, monkeypatch):
    model = nn.Sequential(linear(), nn.ReLU(), linear(4), nn.GELU(), linear(), nn.SiLU()).eval()
    model[4] = nn.Linear(4, 8)
    x = randn(5, 8)
    fxfuse.optimize(model, (x,))
    forget()
    texts = new_cache.glob("*/kernel.txt")
    shutil.rmtree(next(text.parent for text in texts if "expression" in text.read_text()))
    fast, begun = fxfuse.optimize(model), plans.Drafts.note
    calls = []
    monkeypatch.setattr(plans.Drafts, "note", lambda drafts, call: (calls.append(call), begun(drafts, call)))
    with plans.preparing():
        result = fast(x)
    torch.testing.assert_close(result, model(x))
    assert len(calls) == 1
    monkeypatch.setattr(plans, "_draft", None)
    assert_as_eager(model, fast, x)


@torch.no_grad()
def test_outside_of_a_collection_everything_is_compiled(new_cache):
    calls = []
    with plans.collect(calls.append):
        fast = fxfuse.optimize(nn.Sequential(linear(), nn.ReLU()).eval())
        fast(randn(5, 8))
    assert len(calls) == 1 and not plans.of_region(calls[0].region)
    fast(randn(5, 8))
    assert plans.of_region(calls[0].region)
