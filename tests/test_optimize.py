"""optimize(): the result goes on being the user's model, whatever is done with either of them afterwards."""

import copy
import dataclasses
import gc
import io
import logging
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
import torch.package
from helpers import (
    COPIES,
    Net,
    Net2,
    assert_as_eager,
    assert_same_kind,
    batch_norm,
    conv,
    epilogues,
    linear,
    randn,
    regions,
)
from torch import fx, nn

import fxfuse
from fxfuse import functional, plans
from fxfuse.module import state_of
from fxfuse.optimize import compile_for
from fxfuse.problem import ANCHORS

IMAGE = randn(4, 4, 8, 8)
OPERATORS = [functional.function(kind) for kind in ANCHORS]


def network():
    """A bit of everything; lambdas cannot be pickled, so it is a class."""
    return Network().eval()


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(conv(), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 1), nn.Hardswish())
        self.drop = nn.Dropout(0.5)
        self.scale = nn.Parameter(randn(8, 1, 1))
        self.register_buffer("shift", randn(8, 1, 1, seed=1))
        self.register_buffer("hidden", randn(8, seed=2), persistent=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.drop(F.silu(self.body(x) * self.scale + self.shift))
        x = F.dropout(x, 0.25, training=self.training)
        x = x.mean((2, 3)) * self.hidden
        return torch.sigmoid(self.head(x)) * 2


# ------------------------------------------------------------------------------------ shared parameters


def test_parameters_and_buffers_are_shared_under_the_same_names():
    model = network()
    fast = fxfuse.optimize(model)
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = list(getattr(fast, kind)()), list(getattr(model, kind)())
        assert [name for name, _ in ours] == [name for name, _ in theirs]
        assert all(a is b for (_, a), (_, b) in zip(ours, theirs, strict=True))
    assert list(fast.state_dict()) == list(model.state_dict())
    assert [name for name, _ in fast.named_modules()] == [name for name, _ in model.named_modules()]


class ExtraState(nn.Linear):
    def get_extra_state(self):
        return torch.tensor(3.0)

    def set_extra_state(self, state):
        self.loaded = state


def test_state_dict_hooks_run():
    model, calls = network(), []
    model.register_load_state_dict_post_hook(lambda module, keys: calls.append("loaded"))
    # with "_" in torch 2.3
    saving = getattr(model, "register_state_dict_post_hook", None) or model._register_state_dict_hook
    saving(lambda module, state, prefix, metadata: calls.append("saved"))
    fast = fxfuse.optimize(model)
    fast.load_state_dict(fast.state_dict())
    assert calls == ["saved", "loaded"]


def other_weights():
    torch.manual_seed(1)
    state = network().state_dict()
    return {name: value + 0.1 if value.is_floating_point() else value for name, value in state.items()}


def other_convolution():
    torch.manual_seed(2)
    return nn.Conv2d(8, 8, 1, bias=False)


def step(module):
    for parameter in module.parameters():
        parameter.data.add_(0.1)


UPDATES = {
    "load_state_dict": lambda module: module.load_state_dict(other_weights()),
    "load_state_dict(assign=True)": lambda module: module.load_state_dict(other_weights(), assign=True),
    "in place": step,
    "another parameter": lambda module: setattr(module.body[3], "weight", nn.Parameter(randn(8, 8, 1, 1))),
    "another buffer": lambda module: setattr(module, "shift", randn(8, 1, 1, seed=5)),
    "an own buffer": lambda module: module.register_buffer("shift", randn(8, 1, 1, seed=6)),
    "running statistics": lambda module: module.body[1].running_mean.add_(1),
    "another module": lambda module: module.body.__setitem__(3, other_convolution()),
    "double": lambda module: module.double(),
    "bfloat16": lambda module: module.to(torch.bfloat16),
    "half": lambda module: module.half(),
    "to channels last": lambda module: module.to(memory_format=torch.channels_last),
    "through another dtype": lambda module: module.double().float(),
    "requires_grad_": lambda module: module.requires_grad_(False),
}


@pytest.mark.parametrize("name", UPDATES)
def test_later_changes_of_the_optimised_model_are_seen(name):
    model = network()
    fast = fxfuse.optimize(copy.deepcopy(model), (IMAGE,))
    with torch.no_grad():
        UPDATES[name](fast)
        UPDATES[name](model)
        x = IMAGE.to(next(model.parameters()).dtype)
        assert_same_kind(fast(x), model(x))
        tolerance = {} if x.dtype.itemsize > 2 else {"rtol": 0.05, "atol": 0.02}
        torch.testing.assert_close(fast(x), model(x), **tolerance)


SEEN_IN_THE_ORIGINAL = ("load_state_dict", "in place", "running statistics", "double", "bfloat16", "half")


@pytest.mark.parametrize("name", SEEN_IN_THE_ORIGINAL)
def test_later_changes_of_the_model_are_seen(name):
    model = network()
    fast = fxfuse.optimize(model, (IMAGE,))
    with torch.no_grad():
        UPDATES[name](model)
        x = IMAGE.to(next(model.parameters()).dtype)
        assert fast(x).dtype == model(x).dtype
        tolerance = {} if x.dtype.itemsize > 2 else {"rtol": 0.05, "atol": 0.02}
        torch.testing.assert_close(fast(x), model(x), **tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_conversion_leaves_model_and_optimised_model_alike(dtype):
    """Parameters are shared, so whoever is converted, both are: never half of either."""
    for convert_fast in (True, False):
        model = network()
        fast = fxfuse.optimize(model)
        (fast if convert_fast else model).to(dtype)
        for module in (model, fast):
            assert {t.dtype for t in module.state_dict().values() if t.is_floating_point()} == {dtype}


def test_an_optimiser_trains_both():
    model = network()
    fast = fxfuse.optimize(model).train()
    optimiser = torch.optim.SGD(fast.parameters(), lr=0.1)
    before = model.head.weight.detach().clone()
    fast(IMAGE).sum().backward()
    optimiser.step()
    assert not torch.equal(model.head.weight, before)
    optimiser.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


# ---------------------------------------------------------------------------------------- train and eval


def test_train_and_eval_switch_what_the_model_does():
    model = network()
    fast = fxfuse.optimize(model)
    in_eval = epilogues(fast)
    assert len(in_eval) == 3
    with torch.no_grad():
        assert_as_eager(model, fast, IMAGE)
        for mode in (True, False, True):
            model.train(mode), fast.train(mode)
            assert fast.training is mode and all(module.training is mode for module in fast.modules())
            torch.manual_seed(0)
            expected = model(IMAGE)
            torch.manual_seed(0)
            torch.testing.assert_close(fast(IMAGE), expected)
    assert epilogues(fast.eval()) == in_eval


def test_training_updates_running_statistics_once_a_call():
    model = network().train()
    fast = fxfuse.optimize(model)
    fast(IMAGE)
    assert model.body[1].num_batches_tracked == fast.body[1].num_batches_tracked == 1


def test_modes_of_single_modules_count():
    """Frozen batch normalisation in training, active dropout in evaluation."""
    model = network()
    fast = fxfuse.optimize(model)
    for module in (model, fast):
        module.train()
        module.body[1].eval()
    torch.manual_seed(0)
    expected = model(IMAGE)
    torch.manual_seed(0)
    torch.testing.assert_close(fast(IMAGE), expected)
    for module in (model, fast):
        module.eval()
        module.drop.train()
    torch.manual_seed(0)
    expected = model(IMAGE)
    torch.manual_seed(0)
    torch.testing.assert_close(fast(IMAGE), expected)
    for module in (model, fast):
        module.eval()
    assert_as_eager(model, fast, IMAGE)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_gradients_of_every_parameter_are_eagers(training):
    model = network().train(training)
    fast = fxfuse.optimize(model)

    def gradients(call):
        torch.manual_seed(0)
        x = IMAGE.clone().requires_grad_()
        return torch.autograd.grad(call(x).square().sum(), [x, *model.parameters()])

    torch.testing.assert_close(gradients(fast), gradients(model))


# --------------------------------------------------------------------------------------- copies and files


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", COPIES)
def test_copies_work_and_share_nothing(name, training):
    model = network().train(training)
    fast = fxfuse.optimize(model)
    twin = COPIES[name](fast)
    assert twin.training is training and epilogues(twin) == epilogues(fast)
    assert list(twin.state_dict()) == list(fast.state_dict())
    twin.eval()
    model.eval()
    with torch.no_grad():
        expected = model(IMAGE)
        torch.testing.assert_close(twin(IMAGE), expected)
        step(model)
        torch.testing.assert_close(twin(IMAGE), expected)
        step(twin)
        torch.testing.assert_close(twin(IMAGE), model(IMAGE))


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Mish())

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else -self.inner(x)


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_untraceable_models_work(name):
    model = nn.Sequential(Untraceable(), nn.Linear(8, 8), nn.ReLU()).eval()
    twin = COPIES[name](fxfuse.optimize(model))
    assert sorted(epilogues(twin)) == ["mish(acc)", "relu(acc)"]
    with torch.no_grad():
        torch.testing.assert_close(twin(randn(3, 8)), model(randn(3, 8)))


def test_copies_keep_attributes_and_hooks():
    fast = fxfuse.optimize(network())
    fast.note = {"a": [1]}
    calls = []
    fast.register_forward_hook(Appending(calls))
    twin = copy.deepcopy(fast)
    assert twin.note == {"a": [1]} and twin.note is not fast.note
    assert len(twin._forward_hooks) == 1


class Appending:
    def __init__(self, calls):
        self.calls = calls

    def __call__(self, module, args, output):
        self.calls.append(type(module).__name__)


def test_optimising_twice():
    model = network()
    once = fxfuse.optimize(model)
    twice = fxfuse.optimize(once)
    assert epilogues(twice) == epilogues(once)
    assert all(a is b for a, b in zip(twice.parameters(), model.parameters(), strict=True))
    with torch.no_grad():
        assert_as_eager(model, twice, IMAGE)
    assert epilogues(fxfuse.optimize(fxfuse.optimize(Untraceable().eval()))) == ["mish(acc)"]


@pytest.mark.parametrize("make", [lambda: network(), lambda: Untraceable().eval()], ids=["traced", "untraceable"])
def test_settings_of_the_second_time_count(make):
    def fp32(fast):
        calls = [node for module in fast.modules() if isinstance(module, fx.GraphModule) for node in module.graph.nodes]
        return {node.kwargs.get("fp32", "exact") for node in calls if node.target in OPERATORS}

    once = fxfuse.optimize(make(), fp32="fast")
    twice = fxfuse.optimize(once)
    assert (fp32(once), fp32(twice)) == ({"fast"}, {"exact"})
    for again in (copy.deepcopy(once), pickle.loads(pickle.dumps(once)), once.train(), once.eval()):
        assert fp32(again) == {"fast"}


@pytest.mark.parametrize("fp32", ["FAST", "", None, True, ["fast"]], ids=str)
def test_fp32_is_exact_or_fast(fp32):
    with pytest.raises(fxfuse.FxfuseError, match='"exact" or "fast"'):
        fxfuse.optimize(network(), fp32=fp32)


class Scaled(nn.Module):
    """Its second argument may be a number."""

    def __init__(self):
        super().__init__()
        self.fc = linear()

    def forward(self, x, y):
        return self.fc(x).tanh() * y


def in_a_package(fast):
    file = io.BytesIO()
    with torch.package.PackageExporter(file) as exporter:
        exporter.extern("**")
        exporter.save_pickle("package", "model.pkl", fast)
    file.seek(0)
    loaded = torch.package.PackageImporter(file).load_pickle("package", "model.pkl")
    assert fxfuse.explain(loaded).regions  # fused, not the text of its code
    return loaded


REBUILT = {
    "traced": fx.symbolic_trace,
    "transformed": lambda fast: fx.Transformer(fast).transform(),
    "interpreted": lambda fast: fx.Interpreter(fast).run,
    "another graph module": lambda fast: fx.GraphModule(fast, copy.deepcopy(fast.graph)),
    "another graph module, pickled": lambda fast: pickle.loads(pickle.dumps(fx.GraphModule(fast, fast.graph))),
    "packaged": in_a_package,
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("name", REBUILT)
def test_the_graph_in_other_hands(name):
    model = Scaled().eval()
    rebuilt, x = REBUILT[name](fxfuse.optimize(model)), randn(5, 8)
    with torch.no_grad():
        for y in (randn(8), 2.5):
            torch.testing.assert_close(rebuilt(x, y), model(x, y))


# --------------------------------------------------------------------------------------------- lifetime


def test_plans_live_as_long_as_their_graph():
    def waiting():
        return sum(info.func is plans.forget for info in weakref.finalize._registry.values())

    for _ in range(3):  # what other tests left: one collection may free what the next finds
        gc.collect()
    before, finalizers = set(plans._plans), waiting()
    model = nn.Sequential(linear(), nn.ReLU(), nn.Dropout())
    fast = fxfuse.optimize(model)
    for mode in (True, False, True, False):
        fast.train(mode)
        fast[2].train(not mode)
        with torch.no_grad():
            fast(randn(2, 8))
    assert len(set(plans._plans) - before) == 1
    assert waiting() == finalizers + 1
    alive = weakref.ref(fast)
    del fast
    gc.collect()
    assert alive() is None and set(plans._plans) <= before and waiting() == finalizers


def test_a_region_may_be_forgotten_while_its_plan_is_made(monkeypatch, forget):
    """As when another thread switches the model's mode."""
    model = nn.Sequential(linear(), nn.ReLU()).eval()
    fast = fxfuse.optimize(model)
    draft = plans._draft

    def forgetting(*args):
        plans.forget([region.number for region in state_of(fast).regions])
        return draft(*args)

    monkeypatch.setattr(plans, "_draft", forgetting)
    with torch.no_grad():
        assert_as_eager(model, fast, randn(2, 8))


@pytest.mark.parametrize("prepared", [False, True])
def test_a_provisional_plan_is_for_one_call(prepared, monkeypatch, forget):
    model = nn.Sequential(linear(), nn.ReLU()).eval()
    fast = fxfuse.optimize(model)
    draft = plans._draft

    def provisional(*args):
        plan = draft(*args)()
        return lambda: dataclasses.replace(plan, provisional=True)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(plans, "_draft", provisional)
        if prepared:
            compile_for(fast, (randn(2, 8),))
        assert_as_eager(model, fast, randn(2, 8))
        assert regions(fast)[0].kernel is None
    with torch.no_grad():
        assert_as_eager(model, fast, randn(2, 8))
    assert regions(fast)[0].kernel is not None


def test_a_plan_in_two_parts_is_provisional_if_one_of_them_is(monkeypatch, forget):
    model = Net2(lambda m, x, y: torch.relu(m.fc(x)) * y, fc=linear()).eval()
    fast, inputs = fxfuse.optimize(model), (randn(2, 8), randn(3, 1, 8))  # the second enlarges the result
    draft = plans._device_draft

    def provisional(problem, acc):
        plan = draft(problem, acc)()
        return lambda: dataclasses.replace(plan, provisional=not problem.is_chain)

    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(plans, "_device_draft", provisional)
            assert_as_eager(model, fast, *inputs)
            assert regions(fast)[0].kernel is None
        assert_as_eager(model, fast, *inputs)
    assert regions(fast)[0].kernel is not None


# ----------------------------------------------------------------------------------------- example_inputs


def test_example_inputs_compile_now(sources, forget):
    model = network()
    fast = fxfuse.optimize(model, (IMAGE,))
    assert len(sources) == 3 and all(region.kernel for region in regions(fast))
    sources.clear()
    with torch.no_grad():
        assert_as_eager(model, fast, IMAGE)
    assert all("loops.h" in text for text in sources), "only what stands between regions waits for a program"


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_example_inputs_change_nothing(training):
    model = nn.Sequential(nn.ReLU(inplace=True), conv(), nn.BatchNorm2d(8), nn.Dropout()).train(training)
    before = copy.deepcopy(model.state_dict())
    x, state = IMAGE.clone(), torch.get_rng_state()
    fast = fxfuse.optimize(model, (x,))
    assert torch.equal(x, IMAGE), "the input was overwritten"
    assert torch.equal(torch.get_rng_state(), state), "random numbers were drawn"
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} was updated"
    assert fast.training is training


def test_example_inputs_may_be_anything_the_model_takes():
    model = Net2(lambda m, x, y: m.fc(x["a"]).relu() * y[0], fc=linear()).eval()
    fast = fxfuse.optimize(model, ({"a": randn(2, 8)}, [3.0, None]))
    with torch.no_grad():
        assert_as_eager(model, fast, {"a": randn(2, 8)}, [3.0, None])


def test_strict_raises_while_optimising_if_there_are_example_inputs():
    model = Net(lambda m, x: m.fc(x).tanh() + 4, fc=linear()).double().eval()
    with pytest.raises(fxfuse.UnsupportedError, match="float64"):
        fxfuse.optimize(model, (randn(2, 8, dtype=torch.float64),), strict=True)


def test_strict_is_kept_through_modes_and_copies():
    model = Net(lambda m, x: m.fc(x).tanh() + 5, fc=linear()).double().eval()
    fast = fxfuse.optimize(model, strict=True)
    for strict in (fast.train().eval(), copy.deepcopy(fast), fxfuse.optimize(fast, strict=True)):
        with pytest.raises(fxfuse.UnsupportedError), torch.no_grad():
            strict(randn(2, 8, dtype=torch.float64))


# ------------------------------------------------------------------------------------------- the surface


def test_disabled_by_the_environment(monkeypatch):
    monkeypatch.setenv("FXFUSE_DISABLE", "1")
    model = network()
    fast = fxfuse.optimize(model)
    assert isinstance(fast, fx.GraphModule) and epilogues(fast) == []
    assert not any("fxfuse" in str(node.target) for node in fast.graph.nodes)
    with torch.no_grad():
        torch.testing.assert_close(fast(IMAGE), model(IMAGE), rtol=0, atol=0)
    monkeypatch.setenv("FXFUSE_DISABLE", "0")
    assert len(epilogues(fxfuse.optimize(model))) == 3


def test_the_result_is_a_graph_module_that_prints():
    fast = fxfuse.optimize(network())
    assert isinstance(fast, fx.GraphModule)
    assert "fxfuse_functional_conv2d" in fast.code
    assert "Conv2d(4, 8" in str(fast)
    fast.graph.lint()


def test_a_region_is_one_node():
    fast = fxfuse.optimize(network())
    targets = [node.target for node in fast.graph.nodes if node.op == "call_function"]
    assert targets.count(functional.conv2d) == 2
    assert targets.count(functional.linear) == 1
    assert not any(node.op == "call_module" for node in fast.graph.nodes)


def test_attributes_and_methods_of_the_model_are_there():
    class Configured(Net):
        def describe(self):
            return f"{self.config} {tuple(self.fc.weight.shape)}"

    model = Configured(lambda m, x: m.fc(x).relu(), fc=linear(), config="c")
    fast = fxfuse.optimize(model)
    assert fast.config == "c" and fast.describe() == "c (8, 8)"
    with pytest.raises(AttributeError, match="nothing"):
        fast.nothing  # noqa: B018


def test_sequences_stay_sequences():
    model = nn.Sequential(linear(), nn.ReLU(), linear()).eval()
    fast = fxfuse.optimize(model)
    assert len(fast) == 3 and [type(m) for m in fast] == [nn.Linear, nn.ReLU, nn.Linear]
    assert fast[0].weight is model[0].weight and bool(fast)


def test_the_report_reads_well():
    fast = fxfuse.optimize(network())
    before = str(fxfuse.explain(fast, verbose=True))
    assert before.startswith("3 regions found, not called yet\n") and "(not called yet)" in before
    with torch.no_grad():
        fast(IMAGE)
    after = fxfuse.explain(fast)
    assert [region.anchor for region in after.regions] == ["conv2d", "conv2d", "linear"]
    assert after.regions[2].nodes == ("head", "sigmoid", "mul_2")
    assert all(region.kernel and region.fallback is None for region in after.regions)
    assert str(after).startswith("3 regions fused\n")
    assert "(not called yet)" not in str(after) and after.regions[0].kernel in str(after)


def test_the_report_gives_the_reason_of_a_fallback():
    fast = fxfuse.optimize(Net(lambda m, x: m.fc(x).relu(), fc=linear()).eval())
    with torch.no_grad():
        fast.double()(randn(2, 8, dtype=torch.float64))
    assert "float64" in regions(fast)[0].fallback and "float64" in str(fxfuse.explain(fast, verbose=True))
    with torch.no_grad():
        fast.float()(randn(2, 8))
    assert regions(fast)[0].kernel and "float64" in str(fxfuse.explain(fast, verbose=True)), "both are said"


def test_explain_takes_what_optimize_returned():
    for value in (network(), fx.symbolic_trace(network())):
        with pytest.raises(fxfuse.FxfuseError, match="optimize returned"):
            fxfuse.explain(value)


def test_compiling_is_logged(new_cache, caplog):
    caplog.set_level(logging.INFO, logger="fxfuse")
    with torch.no_grad():
        fxfuse.optimize(nn.Sequential(linear(), nn.Softsign()).eval())(randn(2, 8))
    assert any("compiling linear: softsign(acc)" in record.message for record in caplog.records)


# ---------------------------------------------------------------------------------- register_pointwise


def smooth_step(x, sharpness=1.0):
    return torch.sigmoid(x * sharpness) * 2 - 1


def cubed(x):
    return x * x * x


class Cubed(nn.Module):
    def forward(self, x):
        return cubed(x)


fx.wrap("smooth_step")
fx.wrap("cubed")


@pytest.fixture(scope="module", autouse=True)
def registered(own_operations):
    fxfuse.register_pointwise(
        "smooth_step", reference=smooth_step, code="{s} = sigmoid({0} * {1}); 2.0f * {s} - 1.0f",
        spellings=(smooth_step,), params={"x": fxfuse.ops.REQUIRED, "sharpness": 1.0},
        interval=fxfuse.interval.always(-1.0, 1.0),
    )  # fmt: skip
    fxfuse.register_pointwise("cubed", reference=cubed, code="{0} * {0} * {0}", spellings=(cubed, Cubed))


OWN = {
    "function": (lambda m, x: cubed(m.fc(x)), "cubed(acc)"),
    "parameters": (lambda m, x: smooth_step(m.fc(x), sharpness=2.0), "smooth_step(acc, 2.0)"),
    "default parameter": (lambda m, x: smooth_step(m.fc(x)) + 1, "smooth_step(acc, 1.0) + 1"),
    "module": (lambda m, x: m.act(m.fc(x)), "cubed(acc)"),
    "interval": (lambda m, x: smooth_step(m.fc(x)).clamp(-1, 1), "smooth_step(acc, 1.0)"),
    "last in the region, then more": (lambda m, x: m.fc(cubed(m.fc(x)).softmax(-1)).relu(), "cubed(acc)"),
}


@pytest.mark.parametrize("name", OWN)
def test_own_operations_are_fused(name):
    forward, epilogue = OWN[name]
    model = Net(forward, fc=linear(), act=Cubed()).eval()
    fast = fxfuse.optimize(model)
    assert epilogues(fast)[0] == epilogue
    with torch.no_grad():
        assert_as_eager(model, fast, randn(5, 8))
    assert regions(fast)[0].kernel is not None
    x = randn(5, 8).requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(fast(x).sum(), x), torch.autograd.grad(model(x).sum(), x))


def test_tracing_works_after_an_own_operation_was_fused(monkeypatch):
    """torch.fx marks calls of wrapped functions; a fused call is none."""
    monkeypatch.setattr(fx._symbolic_trace, "_wrapped_fns_to_patch", dict(fx._symbolic_trace._wrapped_fns_to_patch))
    fxfuse.optimize(Net(lambda m, x: cubed(m.fc(x)), fc=linear()).eval())
    fx.symbolic_trace(nn.Sequential(linear(), nn.ReLU()))


BAD_ROWS = {
    "taken name": ("relu", {}),
    "no identifier": ("not an identifier", {}),
    "an operand's name": ("o1", {}),
    "a temporary's name": ("t12", {}),
    "the accumulator": ("acc", {}),
    "a number's name": ("inf", {}),
    "a name that no text can have": ("é", {}),
    "unknown placeholder": ("bad", {"code": "{1}"}),
    "unknown temporary": ("bad", {"code": "{a} + {0}"}),
    "broken braces": ("bad", {"code": "{0"}),
    "taken spelling": ("bad", {"spellings": (torch.relu,)}),
    "taken method": ("bad", {"spellings": ("relu_",)}),
    "taken module": ("bad", {"spellings": (nn.ReLU,)}),
    "unhashable spelling": ("bad", {"spellings": ([],)}),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_refused_and_leave_nothing(name):
    operation, options = BAD_ROWS[name]
    before = fxfuse.ops.names()
    with pytest.raises(fxfuse.FxfuseError, match="register_pointwise"):
        fxfuse.register_pointwise(operation, **{"reference": cubed, "code": "{0}", **options})
    assert fxfuse.ops.names() == before


def test_outcomes_of_a_model_called_wrongly_are_eagers():
    model = network()
    fast = fxfuse.optimize(model)
    for args in ((), (IMAGE, IMAGE), (None,)):
        assert_as_eager(model, fast, *args, raises=TypeError)


def test_batch_norm_statistics_are_read_at_every_call():
    model = Net(lambda m, x: m.bn(m.c(x)).relu(), c=conv(), bn=batch_norm()).eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        assert_as_eager(model, fast, IMAGE)
        model.bn.running_var.mul_(4)
        assert_as_eager(model, fast, IMAGE)


def test_a_models_own_names_are_not_hidden():
    """Those that an earlier version kept its own state under, too."""
    names = ("captured", "settings", "regions", "skipped", "modes", "variants", "variant", "reset", "own_attributes")
    model = Net(
        lambda m, x: sum(getattr(m, name)(x).relu() for name in names), **{name: linear() for name in names}
    ).eval()
    fast = fxfuse.optimize(model)
    assert len(regions(fast)) == len(names)
    x = randn(3, 8)
    torch.testing.assert_close(fast(x), model(x))
    for twin in (copy.deepcopy(fast), fast.train().eval()):
        torch.testing.assert_close(twin(x), model(x))
    assert list(fast.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("strides", [(8, 1, 1, 1), (8, 1, 8, 8)])
def test_results_for_images_of_one_pixel_have_eagers_strides(strides):
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.SiLU(), nn.Conv2d(8, 8, 1), nn.Sigmoid()).eval()
    with torch.no_grad():
        assert_as_eager(model, fxfuse.optimize(model), torch.randn(4, 8, 1, 1).as_strided((4, 8, 1, 1), strides))


@pytest.mark.parametrize("strides", [(8, 1, 1, 1), (8, 1, 8, 8)])
def test_an_image_of_one_pixel_that_padding_enlarges_has_eagers_strides(strides):
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=2), nn.SiLU()).eval()
    with torch.no_grad():
        assert_as_eager(model, fxfuse.optimize(model), torch.randn(4, 8, 1, 1).as_strided((4, 8, 1, 1), strides))


def test_parameters_and_buffers_that_are_replaced_are_found():
    """The code reads modules' tables."""
    model = nn.Sequential(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)), nn.ReLU()).eval()
    fast, x = fxfuse.optimize(model), torch.randn(3, 4, 5, 5)
    with torch.no_grad():
        fast(x)
        model.get_submodule("0.0").weight = nn.Parameter(torch.rand(4, 4, 1, 1))
        fast.get_submodule("0.1").running_mean = torch.rand(4)
        torch.testing.assert_close(fast(x), model(x))
        assert fast.get_submodule("0.1").running_mean is model.get_submodule("0.1").running_mean
