"""What is changed after optimize(): seen at the next call, or named by verify(); and names that models may have."""

import copy
import pickle
import threading
import warnings

import pytest
import torch
from helpers import COPIES, Net, assert_as_eager, epilogues, linear, randn, skip_if_python
from torch import fx, nn
from torch.nn.utils import parametrizations, prune

import fxfuse
from fxfuse import module as fused_module
from fxfuse.module import FusedModule

X = randn(5, 8)


class Model(nn.Module):
    """Containers, leaves and an attribute, all of which its trace goes through."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.25)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.scale = 2.0

    def forward(self, x):
        return self.block(self.drop(self.act(self.first(x))) * self.scale)


def model():
    torch.manual_seed(0)
    return Model().eval()


def plus_one(module, args, result):
    return result + 1


CHANGES = {
    "a hook on a leaf": lambda m: m.act.register_forward_hook(plus_one),
    "a hook on a container": lambda m: m.block.register_forward_hook(plus_one),
    "a hook before an anchor": lambda m: m.first.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    "another activation": lambda m: setattr(m, "act", nn.Tanh()),
    "another activation inside": lambda m: m.block.__setitem__(1, nn.Tanh()),
    "one module more": lambda m: m.block.append(nn.Tanh()),
    "an attribute that forward reads": lambda m: setattr(m, "scale", 0.5),
    "no bias": lambda m: setattr(m.first, "bias", None),
    "another bias": lambda m: setattr(m.first, "bias", nn.Parameter(randn(8, seed=3))),
    "a pruned weight": lambda m: prune.random_unstructured(m.block[0], "weight", 0.5),
    "a parametrised weight": lambda m: parametrizations.weight_norm(m.block[0]),
}


@pytest.mark.parametrize("calls", [0, 3])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_the_optimised_model_are_seen_at_the_next_call(name, calls):
    expected, fast = model(), fxfuse.optimize(model())
    with torch.no_grad():
        for _ in range(calls):
            fast(X)
        for each in (expected, fast):
            torch.manual_seed(0)  # for what is pruned
            CHANGES[name](each)
        for _ in range(4):
            torch.testing.assert_close(fast(X), expected(X))
        fast.train().eval()
        torch.testing.assert_close(fast(X), expected(X))


def test_a_hook_is_called_at_every_call_until_it_is_removed():
    seen, fast = [], fxfuse.optimize(model())
    handle = fast.act.register_forward_hook(lambda module, args, result: seen.append(type(result)))
    with torch.no_grad():
        fast(X), fast(X)
        handle.remove()
        fast(X)
    assert seen == [torch.Tensor] * 2
    fast.train().eval()
    assert epilogues(fast) == ["relu(acc) * 2.0", "relu(acc)"]


def test_attributes_that_are_set_before_every_call_are_not_traced_each_time(monkeypatch):
    fast, expected = fxfuse.optimize(model()), model()
    traces = []
    retrace = FusedModule._retrace
    monkeypatch.setattr(FusedModule, "_retrace", lambda self: (traces.append(self), retrace(self)))
    with torch.no_grad():
        for scale in (0.5, 0.75, 1.0, 1.0, 1.0):
            fast.scale = expected.scale = scale
            torch.testing.assert_close(fast(X), expected(X))
    assert len(traces) == 1 and fast.scale == 1.0 and epilogues(fast)[0] == "relu(acc)"


UNSEEN = {
    "drop": (lambda m: setattr(m.drop, "p", 0.5), "p of module 'drop' is 0.5, traced as 0.25"),
    "forward": (
        lambda m: setattr(m.act, "forward", torch.tanh),
        "module 'act' has got a hook, or a forward of its own",
    ),
    "bias": (lambda m: setattr(m.block[0], "bias", nn.Parameter(randn(8))), "bias of module 'block.0' is a tensor"),
}
"""Changes inside of the model that no call looks for, and what verify() says."""


@pytest.mark.parametrize("name", UNSEEN)
def test_verify_names_changes_that_calls_do_not_see(name):
    change, text = UNSEEN[name]
    original = model()
    original.block[0].bias = None
    fast = fxfuse.optimize(original)
    assert fxfuse.verify(original, fast, (X,))
    change(fast)
    found = fxfuse.verify(original, fast, (X,))
    assert not found and text in found.problem and "call fxfuse.optimize again" in found.problem
    fast.train().eval()
    change(original)
    assert fxfuse.verify(original, fast, (X,))


OF_THE_MODEL = {
    "a hook on a leaf": "module 'act' has got a hook",
    "a hook on a container": "module 'block' has got a hook",
    "another activation": "module 'act' is a Tanh, traced as a ReLU",
    "another activation inside": "module 'block.1' is a Tanh, traced as a ReLU",
    "one module more": "module 'block' has the children '0', '1', '2', traced with '0', '1'",
    "an attribute that forward reads": "scale of the model is 0.5, traced as 2.0",
}


@pytest.mark.parametrize("name", OF_THE_MODEL)
def test_verify_names_changes_of_the_model_that_was_optimised(name):
    original = model()
    fast = fxfuse.optimize(original)
    CHANGES[name](original)
    found = fxfuse.verify(original, fast, (X,))
    assert not found and OF_THE_MODEL[name] in found.problem
    assert fxfuse.verify(original, fxfuse.optimize(original), (X,))


@pytest.mark.parametrize("name", ["a pruned weight", "a parametrised weight"])
def test_a_weight_that_the_model_has_no_more_is_named(name):
    original = model()
    fast = fxfuse.optimize(original)
    CHANGES[name](original)
    with pytest.raises(fxfuse.FxfuseError, match=r"'block\.0\.weight' is gone.*call fxfuse\.optimize again"):
        fast(X)


@torch.no_grad()
@pytest.mark.parametrize("name", ["a pruned weight", "a parametrised weight"])
def test_a_copy_of_the_optimised_model_is_pruned_on_its_own(name):
    original, expected = model(), model()
    fast = fxfuse.optimize(original)
    result, twin = fast(X), copy.deepcopy(fast)
    for each in (twin, expected):
        torch.manual_seed(0)
        CHANGES[name](each)
    torch.testing.assert_close(twin(X), expected(X))
    assert_as_eager(original, fast, X)
    torch.testing.assert_close(fast(X), result, rtol=0, atol=0)
    assert list(original.state_dict()) == list(fast.state_dict()) == list(model().state_dict())


@torch.no_grad()
@pytest.mark.parametrize("pruned", ["the model", "the optimised one"])
def test_what_pruning_one_took_from_both_comes_back_to_both(pruned):
    original = model()
    fast = fxfuse.optimize(original)
    one, other = (original, fast) if pruned == "the model" else (fast, original)
    CHANGES["a pruned weight"](one)
    expected = one(X)
    with pytest.raises((fxfuse.FxfuseError, AttributeError), match=r"weight"):
        other(X)
    prune.remove(one.block[0], "weight")
    for each in (one, other):
        torch.testing.assert_close(each(X), expected)


def test_verify_tells_unrelated_models_apart():
    for other in (nn.Linear(4, 4), nn.Sequential(nn.Linear(8, 8))):
        found = fxfuse.verify(nn.Linear(8, 8), fxfuse.optimize(other), (X,))
        assert not found and "the two are different models" in found.problem
    assert "it raises RuntimeError" in fxfuse.verify(nn.Linear(8, 8), nn.Linear(4, 4), (X,)).problem


def test_parameters_without_a_shape_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lazy = nn.Sequential(nn.Sequential(nn.LazyLinear(8)), nn.ReLU()).eval()
    with pytest.raises(fxfuse.CaptureError, match=r"module '0\.0' \(LazyLinear\).*call the model once"):
        fxfuse.optimize(lazy)
    with torch.no_grad():
        lazy(X)
        assert_as_eager(lazy, fxfuse.optimize(lazy), X)


# ------------------------------------------------------------------------------------------------ names


class InDict(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name, self.items = name, nn.ModuleDict({name: nn.Sequential(nn.Linear(8, 8), nn.ReLU())})
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.last(self.items[self.name](x)))


class AsChild(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name, self.last = name, nn.Linear(8, 8)
        self.add_module(name, nn.Linear(8, 8))

    def forward(self, x):
        return torch.relu(self.last(self._modules[self.name](x).relu()))


class AsParameter(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name, self.tensors = name, nn.ParameterDict({name: nn.Parameter(randn(8))})
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.last(x) * self.tensors[self.name])


PLACES = {place.__name__: place for place in (InDict, AsChild, AsParameter)}
NAMES = [
    "self", "graph", "_graph", "_code", "code", "_fxfuse", "_fxfuse_tensor", "_python_forward", "meta", "_tracer_cls",
    "recompile", "getattr", "torch", "a b", "0", "'", "last_fused",
]  # fmt: skip
UNPRINTABLE = ["in", "class", "None", "ﬁ", '"', "\\", "\n", "a\nimport os"]
"""Names that torch.fx would write as code that does not mean them."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES + UNPRINTABLE)
def test_names_of_modules_and_parameters_never_meet_generated_code(name, place):
    original = PLACES[place](name).eval()
    fast = fxfuse.optimize(original)
    assert list(fast.state_dict()) == list(original.state_dict())
    assert [path for path, _ in fast.named_modules()] == [path for path, _ in original.named_modules()]
    with torch.no_grad():
        for twin in (fast, *(make(fast) for make in COPIES.values())):
            torch.testing.assert_close(twin(X), original(X))
        fast.train().eval()
        torch.testing.assert_close(fast(X), original(X))
    reasons = " ".join(item.reason for item in fxfuse.explain(fast).skipped)
    assert ("cannot stand in generated code" in reasons) is (name in UNPRINTABLE)


@pytest.mark.parametrize("place", PLACES)
def test_no_name_is_executed(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    original = PLACES[place]('a"), open("executed", "w"), getattr(self, "b').eval()
    fast = fxfuse.optimize(original)
    with torch.no_grad():
        torch.testing.assert_close(fast(X), original(X))
        torch.testing.assert_close(pickle.loads(pickle.dumps(fast))(X), original(X))
        torch.testing.assert_close(fx.GraphModule(fast, fast.graph)(X), original(X))
    assert not list(tmp_path.iterdir())


cpu, zeros = torch.device("cpu"), torch.zeros
ARGUMENTS = ["torch", "device", "getattr", "input", "inf", "slice", "self"]


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_names_of_arguments_hide_nothing(argument):
    own = "this" if argument == "self" else "self"
    source = f"def forward({own}, x, {argument}=None):\n"
    source += f"    y = ({own}.fc(x).relu() + zeros(8, device=cpu))[first]\n"
    source += f"    return y if {argument} is None else y * {argument}\n"
    names = {"zeros": zeros, "cpu": cpu, "first": slice(0, 2)}
    exec(source, names)
    original = type("Named", (Net,), {"forward": names["forward"]})(None, fc=linear()).eval()
    fast = fxfuse.optimize(original)
    with torch.no_grad():
        torch.testing.assert_close(fast(X), original(X))
        torch.testing.assert_close(fast(X, X[0]), original(X, X[0]))


class Block(nn.Sequential):
    pass


def test_fused_children_are_of_their_own_classes_where_python_asks():
    def forward(m, x):
        blocks = [child for child in m.children() if isinstance(child, Block)]
        return blocks[0](x) if x.sum() < 1e9 else x

    original = Net(forward, block=Block(linear(), nn.ReLU())).eval()
    fast = fxfuse.optimize(original)
    assert isinstance(fast.block, FusedModule | Block) and epilogues(fast) == ["relu(acc)"]
    with torch.no_grad():
        assert_as_eager(original, fast, X, exact=False)
    assert copy.deepcopy(fast).block.__class__ is Block


REMOVED = {
    "a normalisation's": (nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()), randn(2, 3, 5, 5), (1,)),
    "all but one": (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()), randn(5, 8), (0, 1)),
}


@torch.no_grad()
@pytest.mark.parametrize("name", REMOVED)
def test_parameters_that_are_set_to_none_are_gone_at_once(name):
    model, x, paths = REMOVED[name]
    model = copy.deepcopy(model).eval()
    fast = fxfuse.optimize(model)
    for _ in range(3):
        assert_as_eager(model, fast, x, exact=False)
    for path in paths:
        model[path].bias = None
        fast[path].bias = None
    for _ in range(3):
        assert_as_eager(model, fast, x, exact=False)
    model[1].weight = fast[1].weight = None
    assert_as_eager(model, fast, x, exact=False)


class Parametrised(nn.Module):
    """Reads a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.weight, self.act = nn.Parameter(randn(8, 8)), nn.Dropout(0.5)

    def forward(self, x):
        return torch.tanh(self.act(x @ self.weight)) * 2


@pytest.mark.parametrize("change", ["a hook", "a mode"])
def test_weights_that_are_there_for_one_call_are_gone_at_the_next(change):
    """torch.func.functional_call puts plain tensors in the place of parameters; the model is traced meanwhile."""
    model = Parametrised().train(change == "a mode")
    fast = fxfuse.optimize(model)
    for module in (model, fast):
        if change == "a hook":
            module.act.register_forward_hook(lambda module, args, result: result + 1)
        else:
            module.register_forward_pre_hook(lambda module, args: module.eval() and None)
    weights = {name: value * 0.5 for name, value in model.named_parameters()}
    with torch.no_grad():
        torch.testing.assert_close(
            torch.func.functional_call(fast, weights, (X,)), torch.func.functional_call(model, weights, (X,))
        )
        assert_as_eager(model, fast, X, exact=False)
        model.weight.mul_(2)
        assert_as_eager(model, fast, X, exact=False)


@torch.no_grad()
def test_hooks_on_children_of_what_dynamo_captured():
    model = Net(lambda m, x: m.b(torch.relu(m.a(x))) if x.shape[0] > 2 else x, a=linear(), b=linear()).eval()
    fast, x = fxfuse.optimize(copy.deepcopy(model)), randn(4, 8)
    for _ in range(4):
        assert_as_eager(model, fast, x)
    skip_if_python(fast)
    assert fxfuse.explain(fast).dynamo
    handles = [net.a.register_forward_hook(lambda module, args, result: result + 1) for net in (model, fast)]
    for _ in range(5):
        assert_as_eager(model, fast, x)
    for handle in handles:
        handle.remove()
    for _ in range(5):
        assert_as_eager(model, fast, x)


class Flagged(nn.Module):
    def __init__(self):
        super().__init__()
        self.flag, self.drop, self.fc = True, nn.Dropout(0.5), linear()

    def forward(self, x):
        y = self.drop(self.fc(x)).relu()
        return y * 2 if self.flag else y + 1


def test_a_thread_does_not_use_a_graph_that_another_replaces(monkeypatch):
    model = Flagged().eval()
    fast, x = fxfuse.optimize(model), torch.randn(4, 8)
    replaced, begun, go_on = fused_module.with_regions_replaced, threading.Event(), threading.Event()

    def waiting(*args):
        begun.set()
        assert go_on.wait(20)
        return replaced(*args)

    results = []
    threads = [threading.Thread(target=lambda: results.append(fast(x))) for _ in range(2)]
    fast(x)
    model.flag = fast.flag = False
    fast(x)  # in Python; the next call traces
    monkeypatch.setattr(fused_module, "with_regions_replaced", waiting)
    threads[0].start()
    assert begun.wait(20)
    threads[1].start()
    threads[1].join(0.3)
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert len(results) == 2
    for result in results:
        torch.testing.assert_close(result, model(x))


def test_a_mode_and_an_attribute_at_once():
    model = Flagged().train()
    fast, x = fxfuse.optimize(model), torch.randn(4, 8)
    fast(x)
    for each in (model, fast):
        each.flag = False
        each.drop.eval()
    for _ in range(3):
        torch.testing.assert_close(fast(x), model(x))


def test_compilers_see_attributes_that_were_set():
    """A compiler that meets an optimised model after one of its attributes was set traces the model as it is now."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = linear()
            self.flag = True

        def forward(self, x):
            return self.fc(x).relu() * 2 if self.flag else self.fc(x)

    model, plain = Model().eval(), Model().eval()
    its_own = torch.compile(plain, backend="eager")
    before, plain.flag = its_own(randn(4, 8)), False
    if (its_own(randn(4, 8)) < 0).any() == (before < 0).any():
        pytest.skip(f"torch {torch.__version__}: Dynamo does not see attributes that are set")
    fast = fxfuse.optimize(copy.deepcopy(model))
    compiled = torch.compile(fast, backend="eager")
    for flag in (True, False, True):
        model.flag = fast.flag = flag
        with torch.no_grad():
            for _ in range(3):
                assert_as_eager(model, compiled, randn(4, 8))
