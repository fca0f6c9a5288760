"""optimize(..., cuda_graphs=True): which calls are replayed, that results are eager's, and whose they are.

Without a GPU a stand-in takes the place of torch's CUDA graphs: it runs the captured call again, on the buffers that
it was captured with, and overwrites the results that it returned then.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import gc
import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fuzz.graphs import calls_on_a_cpu
from helpers import COPIES, Net, Net2, assert_as_eager, linear, randn
from torch import nn
from torch.overrides import BaseTorchFunctionMode

import fxfuse
from fxfuse import cuda_graphs, plans
from fxfuse.module import state_of
from fxfuse.program.observed import Operators
from fxfuse.state import seed as seed_all

X = randn(5, 8)
ON_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


@pytest.fixture
def stand_in():
    with calls_on_a_cpu():
        yield


@pytest.fixture
def replays(monkeypatch):
    """The recordings that were replayed, one entry a call."""
    calls = []
    replay = cuda_graphs.Recording.replay
    monkeypatch.setattr(
        cuda_graphs.Recording, "replay", lambda self, leaves: (calls.append(self), replay(self, leaves))[1]
    )
    return calls


def report(fast):
    return fxfuse.explain(fast).cuda_graphs


def block():
    torch.manual_seed(0)
    return Net(lambda m, x: F.silu(m.b(F.relu(m.a(x)))) + x, a=linear(), b=linear()).eval()


# ------------------------------------------------------------------------------------------ which calls


def replaced(fast):
    fast.a.weight = nn.Parameter(fast.a.weight * 2)


def moved(fast):
    fast.a.weight.data = fast.a.weight.data.clone()


def frozen(fast):
    fast.a.weight.requires_grad_(False)


def hooked(fast):
    fast.a.register_forward_hook(lambda module, args, result: result)


def in_training(fast):
    fast.b.train()


@contextlib.contextmanager
def with_a_tangent(fast):
    with torch.autograd.forward_ad.dual_level():
        yield


OF_A_KIND = {
    "a parameter that is replaced": replaced,
    "one that lies elsewhere": moved,
    "one that is frozen": frozen,
    "a hook": hooked,
    "a module's mode": in_training,
    "forward derivatives": with_a_tangent,
    "gradients": lambda fast: torch.enable_grad(),
    "inference": lambda fast: torch.inference_mode(),
    "autocast": lambda fast: torch.autocast("cpu", torch.bfloat16),
    "a mode that sees functions": lambda fast: BaseTorchFunctionMode(),
    "a mode that sees operators": lambda fast: Operators(),
}


@pytest.fixture
def without_gradients(stand_in):
    with torch.no_grad():
        yield


@pytest.mark.usefixtures("without_gradients")
class TestCalls:
    def test_the_second_call_of_a_kind_is_captured(self, replays):
        model = block()
        fast = fxfuse.optimize(model, cuda_graphs=True)
        for shape, replayed in (((5, 8), 0), ((5, 8), 1), ((3, 8), 1), ((5, 8), 2), ((3, 8), 3)):
            assert_as_eager(model, fast, randn(*shape, seed=replayed))
            assert len(replays) == replayed
        assert len(set(replays)) == 2 and report(fast) == ("2 CUDA graphs captured",)

    def test_kernels_are_chosen_for_replays(self):
        """Where the CPU issues nothing. A call that cannot be replayed has other plans."""
        fast, plain = (fxfuse.optimize(block(), cuda_graphs=flag) for flag in (True, False))
        for net in (fast, plain):
            net(randn(5, 8))
            with BaseTorchFunctionMode():  # a replay would call no function
                net(randn(3, 8))
        for net, expected in ((fast, [True, False]), (plain, [False, False])):
            for region in state_of(net).regions:
                problems = plans.problems_of(region.number)
                rows = {problem.x.shape[0]: problem.replayed for problem in problems}
                assert [rows[5], rows[3]] == expected

    @pytest.mark.parametrize("named", [(), ("y",), ("x", "y"), ("y", "x")], ids=str)
    def test_a_call_like_the_one_before_is_recognised_at_once(self, named, replays, monkeypatch):
        def calling(net, x, y):
            given = {"x": x, "y": y}
            return net(
                *(given[name] for name in ("x", "y") if name not in named), **{name: given[name] for name in named}
            )

        model = Net2(lambda m, x, y: m.a(x).relu() - y, a=linear()).eval()
        fast = fxfuse.optimize(model, cuda_graphs=True)
        for _ in range(3):
            calling(fast, X, X)

        def refuse(*_, **__):
            raise AssertionError("each question is asked by itself")

        monkeypatch.setattr(cuda_graphs.Replays, "_recording", refuse)
        x, y = randn(5, 8, seed=3), randn(5, 8, seed=4)
        torch.testing.assert_close(calling(fast, x, y), calling(model, x, y))
        assert len(replays) == 3
        others = [(randn(3, 8), X), (X.double(), X), (X.t(), X), (X, X[:1])]
        for pair in others:
            with pytest.raises(AssertionError, match="by itself"):
                calling(fast, *pair)

    @pytest.mark.parametrize("change", OF_A_KIND)
    def test_what_has_changed_is_not_taken_for_the_same(self, change, replays, monkeypatch):
        model = block()
        fast = fxfuse.optimize(model, cuda_graphs=True)
        for _ in range(3):
            fast(X)
        asked = []
        recording = cuda_graphs.Replays._recording
        monkeypatch.setattr(
            cuda_graphs.Replays, "_recording", lambda *args, **options: asked.append(1) or recording(*args, **options)
        )
        with OF_A_KIND[change](fast) or contextlib.nullcontext():
            count = len(replays)
            made = fast(X)
            assert asked or len(replays) == count  # else nobody has asked any more
            want = model(X)
        rounded = {"atol": 2e-2, "rtol": 2e-2} if change == "autocast" else {}  # eager rounds each value to bfloat16
        torch.testing.assert_close(made, want, **rounded)

    def test_objects_among_the_results_are_new_ones(self, replays):
        """As a cache of keys and values: each call has its own, with its own tensors."""

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc, self.settings = linear(), Settings()

            def forward(self, x):
                y = self.fc(x).relu()
                return {"y": y, "cache": Cache().keep(y * 2, y), "settings": self.settings}

        model = Model().eval()
        fast = fxfuse.optimize(model, (X,), cuda_graphs=True)
        calls = [(x, fast(x)) for x in (X, randn(5, 8, seed=1))]
        assert len(replays) == 2
        for x, result in calls:
            want, cache = model(x), result["cache"]
            torch.testing.assert_close(result["y"], want["y"])
            torch.testing.assert_close(cache.tensors, want["cache"].tensors)
            assert type(cache) is Cache and cache.itself is cache and cache.kind is Cache
            assert cache.tensors[1] is result["y"] and result["settings"] is fast.settings
        assert calls[0][1]["cache"] is not calls[1][1]["cache"]

    def test_example_inputs_are_captured_at_once(self, replays):
        model = block()
        fast = fxfuse.optimize(model, (X,), cuda_graphs=True)
        assert report(fast) == ("1 CUDA graph captured",) and not replays
        assert_as_eager(model, fast, randn(5, 8, seed=3))
        assert len(replays) == 1

    @pytest.mark.parametrize("spelling", [{"example_inputs": {"x": X}}, {"kwargs": {"x": X}}], ids=list)
    def test_keywords_are_captured_at_once(self, spelling, replays):
        model = block()
        fast = fxfuse.optimize(model, cuda_graphs=True, **spelling)
        assert report(fast) == ("1 CUDA graph captured",) and not replays
        assert torch.equal(fast(x=randn(5, 8, seed=3)), fxfuse.optimize(model)(randn(5, 8, seed=3)))
        assert len(replays) == 1

    def test_models_that_were_not_asked_to_do_not(self, replays):
        fast = fxfuse.optimize(block())
        for _ in range(3):
            fast(X)
        assert not replays and report(fast) == ()

    def test_numbers_and_names_are_part_of_the_kind(self, replays):
        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = linear()

            def forward(self, x, scale=1.0, mask=None):
                y = self.fc(x).tanh() * scale
                return y if mask is None else y * mask

        model = Scaled().eval()
        fast = fxfuse.optimize(model, cuda_graphs=True)
        for _ in range(3):
            for options in ({}, {"scale": 2.0}, {"scale": 2}, {"mask": X}, {"mask": None}, {"scale": -0.0}):
                assert_as_eager(model, fast, X, exact=False, **options)
        assert len(set(replays)) == 6 and len(replays) == 12

    def test_strides_are_part_of_the_kind(self, replays):
        model = block()
        fast = fxfuse.optimize(model, cuda_graphs=True)
        for x in (X, randn(8, 5).t(), randn(10, 8)[::2], randn(5, 16)[:, ::2]):
            for _ in range(2):
                torch.testing.assert_close(fast(x), model(x))
        assert len(set(replays)) == 4

    def test_torchs_switches_are_part_of_the_kind(self, replays, monkeypatch):
        fast = fxfuse.optimize(block(), cuda_graphs=True)
        for allowed in (False, True):
            monkeypatch.setattr(cuda_graphs, "tf32_allowed", lambda kind: allowed)  # noqa: B023
            fast(X), fast(X)
        assert len(set(replays)) == 2

    def test_there_are_at_most_so_many(self, replays):
        model = block()
        fast = fxfuse.optimize(model, cuda_graphs=True)
        for rows in range(1, cuda_graphs.GRAPHS + 3):
            for _ in range(3):
                assert_as_eager(model, fast, randn(rows, 8))
        assert len(set(replays)) == cuda_graphs.GRAPHS
        assert any("graphs for other kinds of call" in line for line in report(fast))

    def test_one_model_inside_another(self, replays):
        inner = fxfuse.optimize(block(), cuda_graphs=True)
        model = nn.Sequential(inner, linear(), nn.Tanh()).eval()
        fast = fxfuse.optimize(model, cuda_graphs=True)
        for _ in range(3):
            assert_as_eager(block(), inner, X)
            assert_as_eager(model, fast, X, exact=False)
        assert all(graphs.startswith("1 CUDA graph") for graphs in (report(fast)[0], report(inner)[0]))


class Cache:
    """A thing that models return, and may keep."""

    def keep(self, *tensors):
        self.tensors, self.itself, self.kind = list(tensors), self, Cache
        return self


class Settings:
    eps = 0.1


@dataclasses.dataclass
class Output:
    first: torch.Tensor
    rest: tuple


def drawing(m, x):
    return F.dropout(m.fc(x).relu(), 0.5, training=True)


REFUSED = {
    # a model's forward; why
    "an argument itself": (lambda m, x: (m.fc(x), x), "a view of an argument"),
    "a view of an argument": (lambda m, x: (m.fc(x), x[1:]), "a view of an argument"),
    "a parameter": (lambda m, x: (m.fc(x), m.fc.bias), "a view of an argument, a parameter"),
    "an overwritten argument": (lambda m, x: m.fc(x.add_(1)), "overwrites an argument"),
    "random numbers": (drawing, "draws random numbers"),
    "Python's random numbers": (lambda m, x: m.fc(x).relu() * random.random(), "draws random numbers"),
    "numpy's random numbers": (lambda m, x: m.fc(x).relu() * float(np.random.rand()), "draws random numbers"),
    "torch's, drawn as numbers": (lambda m, x: m.fc(x).relu() * torch.rand(1).item(), "draws random numbers"),
    "torch's, in a list": (lambda m, x: m.fc(x).relu() * torch.rand(1).tolist()[0], "draws random numbers"),
    "torch's, for numpy": (lambda m, x: m.fc(x).relu() * float(torch.rand(1).numpy()[0]), "draws random numbers"),
    "torch's, as a result": (lambda m, x: (m.fc(x).relu(), torch.rand(1)), "draws random numbers"),
    "torch's generator of its own": (
        lambda m, x: m.fc(x).relu() * torch.rand(8, generator=m.torchs),
        "draws random numbers",
    ),
    "Python's generator of its own": (lambda m, x: m.fc(x).relu() * m.pythons[0].random(), "draws random numbers"),
    "numpy's generator of its own": (lambda m, x: m.fc(x).relu() * m.numpys.random(), "draws random numbers"),
    "numpy's old generator of its own": (lambda m, x: m.fc(x).relu() * m.old.rand(), "draws random numbers"),
    "an object that is more than its attributes": (lambda m, x: (m.fc(x), iter([1])), "a list_iterator is among"),
    "an object that lives on": (lambda m, x: m.cache.keep(m.fc(x)), "an object that lives on"),
}


@pytest.mark.usefixtures("without_gradients")
class TestRefusals:
    @pytest.mark.parametrize("name", REFUSED)
    def test_calls_that_cannot_be_replayed_run_as_usual(self, name, replays):
        forward, reason = REFUSED[name]
        generators = {
            "torchs": torch.Generator().manual_seed(1),
            "pythons": [random.Random(1)],
            "numpys": np.random.default_rng(1),
            "old": np.random.RandomState(1),
        }
        try:
            copy.deepcopy(generators["torchs"])
        except TypeError:
            if "torchs" in forward.__code__.co_names:
                pytest.skip(f"torch {torch.__version__} cannot copy a generator: the model would share it")
            del generators["torchs"]
        model = Net(forward, fc=linear(), cache=Cache(), **generators).eval()
        fast = fxfuse.optimize(model, cuda_graphs=True)
        for index in range(3):
            inputs = [X.clone(), X.clone()]
            seed_all(index)
            want = model(inputs[0])
            seed_all(index)
            have = fast(inputs[1])
            if not name.startswith("an object"):
                torch.testing.assert_close(have, want)
            torch.testing.assert_close(*inputs)
        assert not replays
        assert report(fast)[0] == "0 CUDA graphs captured" and "2 calls without" in report(fast)[1]
        assert reason in report(fast)[1]

    def test_a_capture_that_gave_no_graph_harms_no_other(self, replays):
        def forward(m, x):
            return x[:2] if x.shape[0] == 5 else m.fc(x).relu()

        model = Net(forward, fc=linear()).eval()
        fast = fxfuse.optimize(model, (X,), cuda_graphs=True)
        fast(X)
        assert "view of an argument" in report(fast)[1]
        for _ in range(3):
            torch.testing.assert_close(fast(X[:4]), model(X[:4]))
        assert len(replays) == 2

    def test_what_is_drawn_and_never_read_is_drawn_at_each_replay(self, replays):
        """As wav2vec's layers, which ask only in training whether they are left out."""

        def forward(m, x):
            for _ in range(2):
                drawn = torch.rand([])
                x = x if m.training and drawn < 0.1 else m.fc(x).relu()
            torch.randint(5, (3,))
            return x

        model = Net(forward, fc=linear()).eval()
        fast = fxfuse.optimize(model, cuda_graphs=True)
        torch.manual_seed(3)
        for call in range(4):
            before = torch.get_rng_state()
            want, after = model(X), torch.get_rng_state()
            torch.set_rng_state(before)
            torch.testing.assert_close(fast(X), want)
            assert torch.equal(torch.get_rng_state(), after)
            assert len(replays) == call
        assert report(fast) == ("1 CUDA graph captured",)

    def test_the_random_state_is_left_alone(self):
        model = Net(drawing, fc=linear()).eval()
        fast = fxfuse.optimize(model, cuda_graphs=True)
        fast(X)
        torch.manual_seed(3)
        want = model(X)
        torch.manual_seed(3)
        torch.testing.assert_close(fast(X), want)

    def test_gradients(self, replays):
        model = block()
        fast = fxfuse.optimize(model, (X,), cuda_graphs=True)
        with torch.enable_grad():
            fast(X).sum().backward()
        assert model.a.weight.grad is not None and not replays
        assert "no_grad" in report(fast)[1]
        with torch.enable_grad():
            model.requires_grad_(False)
            fast(X)
            assert not replays  # the example was called without gradients
            fast(X)
        assert len(replays) == 1

    def test_training(self, replays):
        model = nn.Sequential(linear(), nn.Dropout(1.0), nn.ReLU()).eval()
        fast = fxfuse.optimize(model, (X,), cuda_graphs=True)
        assert fast(X).any() and len(replays) == 1
        fast.train()
        for _ in range(3):
            assert not fast(X).any()
        assert "training mode" in report(fast)[1]
        fast.eval()
        for _ in range(2):
            assert fast(X).any()
        fast[1].train()  # alone
        for _ in range(3):
            assert not fast(X).any()
        assert len(replays) == 2

    def test_hooks_inside_run(self, replays):
        fast = fxfuse.optimize(block(), (X,), cuda_graphs=True)
        seen = []
        handle = fast.a.register_forward_hook(lambda *args: seen.append(1))
        for _ in range(3):
            fast(X)
        assert not replays and "hooks" in report(fast)[1]
        handle.remove()
        fast(X), fast(X)
        assert len(replays) == 1

    def test_own_hooks_run_around_a_replay(self, replays):
        model = block()
        fast = fxfuse.optimize(model, (X,), cuda_graphs=True)
        fast.register_forward_hook(lambda module, args, result: result * 2)
        torch.testing.assert_close(fast(X), model(X) * 2)
        assert len(replays) == 1

    def test_a_model_elsewhere(self, replays, monkeypatch):
        monkeypatch.setattr(cuda_graphs, "_on_gpu", lambda tensor: tensor.is_cuda)
        model = block()
        fast = fxfuse.optimize(model, (X,), cuda_graphs=True)
        for _ in range(3):
            assert_as_eager(model, fast, X)
        assert "'a.weight' is on cpu" in report(fast)[1]
        with pytest.raises(fxfuse.UnsupportedError, match=r"cannot be captured as a CUDA graph: 'a.weight' is on cpu"):
            fxfuse.optimize(model, (X,), cuda_graphs=True, strict=True)

    def test_a_model_with_other_tensors(self, replays):
        model = Net(lambda m, x: m.fc(x).relu() + torch.sparse.mm(m.s, x), fc=linear()).eval()
        model.register_buffer("s", torch.eye(5).to_sparse())
        fast = fxfuse.optimize(model, cuda_graphs=True)
        for _ in range(3):
            assert_as_eager(model, fast, X, exact=False)
        assert not replays and "no plain tensor" in report(fast)[1]

    def test_a_model_that_comes_to_the_gpu_later(self, replays, monkeypatch):
        monkeypatch.setattr(cuda_graphs, "_on_gpu", lambda tensor: tensor.dtype == torch.float64)  # as it were
        model = block()
        fast = fxfuse.optimize(model, cuda_graphs=True)
        fast(X), fast(X)
        model.double()
        for _ in range(3):
            assert_as_eager(model, fast, X.double())
        assert len(replays) == 2

    def test_objects_as_arguments(self, replays):
        model = Net2(lambda m, x, y: m.fc(x).relu(), fc=linear()).eval()
        fast = fxfuse.optimize(model, cuda_graphs=True)
        for _ in range(3):
            assert_as_eager(model, fast, X, Cache(), exact=False)
        assert not replays and "an argument is a Cache" in report(fast)[1]

    def test_errors_are_the_models_own(self):
        model = block()
        fast = fxfuse.optimize(model, (X,), cuda_graphs=True)
        for _ in range(3):
            assert_as_eager(model, fast, randn(5, 9), raises=RuntimeError)

    def test_those_who_watch_operators_see_them(self, replays):
        from torch.utils.flop_counter import FlopCounterMode

        fast = fxfuse.optimize(block(), (X,), cuda_graphs=True)
        with FlopCounterMode(display=False):
            fast(X)
        torch.func.vmap(fast)(randn(3, 5, 8))
        assert not replays


# ------------------------------------------------------------------------------------------- the results


RESULTS = {
    "tuple": lambda m, x: (m.fc(x).relu(), x * 2, 3, None, "text"),
    "dict": lambda m, x: {"a": m.fc(x).relu(), "b": [x + 1, {"c": x - 1}]},
    "named tuple": lambda m, x: torch.return_types.max((m.fc(x), x.argmax(1))),
    "dataclass": lambda m, x: Output(m.fc(x).relu(), (x * 2, None)),
    "ordered": lambda m, x: collections.OrderedDict(a=m.fc(x)),
    "slice": lambda m, x: m.fc(x)[:, 1::2],
    "transposed": lambda m, x: m.fc(x).t(),
    "expanded": lambda m, x: m.fc(x).sum(1, keepdim=True).expand(3, 5, 8),
    "empty": lambda m, x: m.fc(x)[:0],
    "no tensor": lambda m, x: x.dim(),
}


@pytest.mark.usefixtures("without_gradients")
class TestResults:
    @pytest.mark.parametrize("name", RESULTS)
    def test_they_are_eagers(self, name, replays):
        model = Net(RESULTS[name], fc=linear()).eval()
        fast = fxfuse.optimize(model, cuda_graphs=True)
        if name == "dataclass":
            fast(X), fast(X)
            want, have = model(X), fast(X)
            assert type(have) is Output and have.rest[1] is None
            torch.testing.assert_close([have.first, have.rest[0]], [want.first, want.rest[0]])
        else:
            for seed in range(4):
                assert_as_eager(model, fast, randn(5, 8, seed=seed), exact=False)
        assert replays

    def test_they_belong_to_the_caller(self):
        model = block()
        fast = fxfuse.optimize(model, (X,), cuda_graphs=True)
        first = fast(X)
        kept = first.clone()
        fast(-X)
        assert torch.equal(first, kept)
        first.zero_()
        torch.testing.assert_close(fast(X), model(X))

    def test_results_that_share_memory(self):
        def forward(m, x):
            y = m.fc(x).relu()
            return y, y.t(), y[1:, ::2], y.exp(), y[:1].expand(4, 8)

        model = Net(forward, fc=linear()).eval()
        fast = fxfuse.optimize(model, (X,), cuda_graphs=True)
        for _ in range(2):
            have, want = fast(X), model(X)
            torch.testing.assert_close(have, want)
            assert [each.stride() for each in have] == [each.stride() for each in want]
            have[0].mul_(2)
            want[0].mul_(2)
            torch.testing.assert_close(have, want)

    def test_the_same_tensor_stays_the_same(self):
        fast = fxfuse.optimize(
            Net(lambda m, x: (lambda y: (y, y))(m.fc(x).relu()), fc=linear()).eval(), cuda_graphs=True
        )
        results = [fast(X) for _ in range(3)]
        assert all(a is b for a, b in results)

    def test_inputs_are_not_kept(self):
        model = block()
        fast = fxfuse.optimize(model, (X,), cuda_graphs=True)
        x = X.clone()
        fast(x)
        x.zero_()
        torch.testing.assert_close(fast(x), model(x))

    def test_inference_mode_and_no_grad_alternate(self, replays):
        model = block()
        with torch.inference_mode():
            fast = fxfuse.optimize(model, (X,), cuda_graphs=True)
            assert fast(X).is_inference()
        torch.testing.assert_close(fast(X), model(X))
        assert len(replays) == 2 and not fast(X).is_inference()

    def test_a_forward_that_asks_whether_gradients_are_on(self, replays):
        model = Net(lambda m, x: x.sin() * 2 if torch.is_grad_enabled() else x.cos() - 1).eval()
        fast = fxfuse.optimize(model, cuda_graphs=True)
        for _ in range(4):
            for mode in (torch.no_grad, torch.enable_grad):
                with mode():
                    assert_as_eager(model, fast, X)
        assert len(replays) == 6 and len(set(replays)) == 2

    def test_a_result_with_gradients_is_not_replayed(self, replays):
        fast = fxfuse.optimize(Net(lambda m, x: (x * 2).requires_grad_()).eval(), cuda_graphs=True)
        with torch.enable_grad():
            assert all(fast(X).requires_grad for _ in range(3)) and not replays

    def test_threads_take_turns(self):
        model = block()
        fast = fxfuse.optimize(model, (X,), cuda_graphs=True)
        wrong = []

        def call(seed):
            x = randn(5, 8, seed=seed)
            with torch.no_grad():
                want = model(x)
                wrong.extend(seed for _ in range(50) if not torch.allclose(fast(x), want))

        threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


# --------------------------------------------------------------------------------------------- weights


def replace_data(module):
    module.a.weight.data = module.a.weight.data * 2


def transpose(module):
    module.a.weight.data = module.a.weight.data.t()


CHANGES = {
    # what is done, and whether the graph stays as it is
    "in place": (lambda module: module.a.weight.mul_(2), True),
    "load_state_dict": (lambda module: module.load_state_dict(doubled(module)), True),
    "load_state_dict(assign=True)": (lambda module: module.load_state_dict(doubled(module), assign=True), False),
    "data": (replace_data, False),
    "strides": (transpose, False),
    "half": (lambda module: module.bfloat16(), False),
    "another parameter": (lambda module: setattr(module.a, "weight", nn.Parameter(randn(8, 8, seed=7))), False),
    "another module": (lambda module: setattr(module, "a", other_linear()), False),
}


def doubled(module):
    return {name: value * 2 for name, value in module.state_dict().items()}


def other_linear():
    torch.manual_seed(9)
    return nn.Linear(8, 8).eval()


@pytest.mark.usefixtures("without_gradients")
@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_weights_are_seen(name, replays):
    change, stays = CHANGES[name]
    model, other = block(), block()
    fast = fxfuse.optimize(model, (X,), cuda_graphs=True)
    fast(X)
    change(fast)
    change(other)
    x, plain = X.to(other.a.weight.dtype), fxfuse.optimize(other)
    for _ in range(3):
        torch.testing.assert_close(fast(x), plain(x))
    assert len(replays) == (4 if stays else 3) and len(set(replays)) == (1 if stays else 2)


# ---------------------------------------------------------------------------------------- composition


class Pickled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear()

    def forward(self, x):
        return F.silu(self.fc(x)) + x


@pytest.mark.usefixtures("without_gradients")
@pytest.mark.parametrize("name", COPIES)
def test_copies_capture_graphs_of_their_own(name, replays):
    fast = fxfuse.optimize(Pickled().eval(), (X,), cuda_graphs=True)
    twin = COPIES[name](fast)
    assert report(twin) == ("0 CUDA graphs captured",)
    want = fast(X).clone()
    twin.fc.weight.zero_()
    for _ in range(3):
        torch.testing.assert_close(twin(X), F.silu(twin.fc.bias) + X)
        torch.testing.assert_close(fast(X), want)
    assert report(twin) == report(fast) == ("1 CUDA graph captured",)
    assert list(twin.state_dict()) == list(fast.state_dict())


@pytest.mark.usefixtures("without_gradients")
def test_compiled_and_exported(replays):
    model = block()
    fast = fxfuse.optimize(model, (X,), cuda_graphs=True)
    torch.compiler.reset()
    assert_as_eager(model, torch.compile(fast, backend="eager", fullgraph=True), X)
    assert_as_eager(model, torch.export.export(fast, (X,)).module(), X)
    assert not replays
    assert_as_eager(model, fxfuse.optimize(fast), X)
    assert not replays


def compiled(model):
    torch.compiler.reset()
    return torch.compile(model, backend="fxfuse", options={"cuda_graphs": True})


def compiled_report(others):
    (graph,) = set(fxfuse.compiled_graphs()) - others
    return report(graph)


def skip_if_modules_stay():
    if not getattr(torch._dynamo.config, "inline_inbuilt_nn_modules", False):
        pytest.skip(f"Dynamo of torch {torch.__version__} keeps modules, which have modes: no graph in training mode")


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(linear(), nn.BatchNorm1d(8), nn.ReLU())


@pytest.mark.usefixtures("without_gradients")
class TestDynamosGraphs:
    """torch.compile(model, backend="fxfuse", options={"cuda_graphs": True})"""

    @pytest.fixture(autouse=True)
    def no_other_graphs(self):
        torch.compiler.reset()
        gc.collect()
        self.others = set(fxfuse.compiled_graphs())  # those that other tests hold

    @pytest.mark.parametrize("make", [block, lambda: normalised().eval()], ids=["linears", "buffers"])
    def test_parameters_and_buffers_are_not_copied(self, make, replays):
        model = make()
        fast = compiled(model)
        for seed in range(5):
            x = randn(5, 8, seed=seed)
            torch.testing.assert_close(fast(x), model(x))
        assert len(replays) == 4 and compiled_report(self.others) == ("1 CUDA graph captured",)
        assert [buffer.shape for buffer in replays[0]._buffers.tensors] == [X.shape]

    @pytest.mark.parametrize("name", [name for name in CHANGES if name not in ("half", "another module")])
    def test_changes_of_weights_are_seen(self, name, replays):
        change, stays = CHANGES[name]
        model, other = block(), block()
        fast = compiled(model)
        for _ in range(4):
            fast(X)
        assert len(replays) == 3
        change(model)
        change(other)
        for _ in range(4):
            torch.testing.assert_close(fast(X), other(X))
        before, after = set(replays[:3]), set(replays[3:])
        assert after == before if stays else after and not after & before

    def test_statistics_are_updated_once_a_call(self, replays):
        skip_if_modules_stay()
        model, other = normalised().train(), normalised().train()
        fast = compiled(model)
        for seed in range(5):
            x = randn(5, 8, seed=seed)
            torch.testing.assert_close(fast(x), other(x))
            torch.testing.assert_close(dict(model.named_buffers()), dict(other.named_buffers()))
        assert replays

    def test_random_numbers_are_drawn(self, replays):
        skip_if_modules_stay()
        model = nn.Sequential(linear(), nn.Dropout(0.5)).train()
        fast = compiled(model)
        assert len({tuple(fast(X).flatten().tolist()) for _ in range(5)}) == 5
        assert not replays and "draws random numbers" in compiled_report(self.others)[1]

    def test_gradients_are_computed(self, replays):
        model = block()
        fast = compiled(model)
        with torch.enable_grad():
            for _ in range(4):
                fast(X).sum().backward()
        other = block()
        with torch.enable_grad():
            (4 * other(X).sum()).backward()
        torch.testing.assert_close(model.a.weight.grad, other.a.weight.grad)
        assert not replays

    def test_a_parameter_among_the_results(self, replays):
        model = Net(lambda m, x: (F.relu(m.fc(x)), m.fc.weight.t()), fc=linear()).eval()
        fast = compiled(model)
        for _ in range(4):
            torch.testing.assert_close(fast(X), model(X))
        assert fast(X)[1].data_ptr() == model.fc.weight.data_ptr()


# ------------------------------------------------------------------------------------------- on a GPU


def network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.SiLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 64), nn.GELU(), nn.Linear(64, 10),
    )  # fmt: skip
    return model.cuda().eval()


def image(seed=0, batch=4):
    return randn(batch, 3, 32, 32, seed=seed).cuda()


def graph_launches(call):
    with torch.profiler.profile() as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.key == "cudaGraphLaunch")


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs an sm_80 GPU")
class TestOnGpu:
    @pytest.fixture(autouse=True)
    def no_grad(self):
        with torch.no_grad():
            yield

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_network_is_replayed(self, dtype):
        model, x = network().to(dtype), image().to(dtype)
        fast = fxfuse.optimize(model, (x,), cuda_graphs=True)
        assert report(fast) == ("1 CUDA graph captured",)
        assert fxfuse.verify(model, fast, (x,)), fxfuse.verify(model, fast, (x,))
        assert graph_launches(lambda: fast(x)) == 1
        first, second = fast(image(1).to(dtype)), fast(image(2).to(dtype))
        plain = fxfuse.optimize(model)
        assert torch.equal(first, plain(image(1).to(dtype))) and torch.equal(second, plain(image(2).to(dtype)))

    def test_further_kinds(self):
        model = network()
        fast = fxfuse.optimize(model, (image(),), cuda_graphs=True)
        for batch in (1, 2, 4, 1, 2, 4):
            assert fxfuse.verify(model, fast, (image(batch, batch),))
        assert report(fast)[0] == "3 CUDA graphs captured"

    @pytest.mark.parametrize("name", CHANGES)
    def test_changes_of_weights(self, name):
        change, _ = CHANGES[name]
        model, other, x = block().cuda(), block().cuda(), X.cuda()
        fast = fxfuse.optimize(model, (x,), cuda_graphs=True)
        for module in (fast, other):
            change(module)
            module.cuda()
        x = x.to(other.b.weight.dtype)
        plain = fxfuse.optimize(other)
        for _ in range(3):
            torch.testing.assert_close(fast(x), plain(x))

    def test_streams(self):
        model = network()
        fast = fxfuse.optimize(model, (image(),), cuda_graphs=True)
        inputs = [image(seed) for seed in range(6)]
        wants = [model(x) for x in inputs]
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        results = []
        for _ in range(20):
            for x, stream in zip(inputs, streams * 2, strict=True):
                with torch.cuda.stream(stream):
                    results.append(fast(x))
        torch.cuda.synchronize()
        for index, result in enumerate(results):
            torch.testing.assert_close(result, wants[index % 6], rtol=5e-3, atol=5e-3)
        assert report(fast) == ("1 CUDA graph captured",)

    def test_the_library_s_workspaces_are_its_own(self):
        """torch.compile's graphs give those of all streams back, and others get their memory."""
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(9216, 4096), nn.Linear(4096, 1000)).cuda().bfloat16().eval()
        x = torch.randn(16, 9216, device="cuda", dtype=torch.bfloat16)
        fast = fxfuse.optimize(model, (x,), cuda_graphs=True)
        want = fast(x).clone()
        torch._C._cuda_clearCublasWorkspaces()
        others = [torch.zeros(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(64)]
        assert graph_launches(lambda: fast(x)) == 1
        assert torch.equal(fast(x), want)
        assert not any(other.any() for other in others)
        del others
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        assert torch.equal(fast(x), want)

    def test_inside_the_users_own_graph(self):
        model, x = network(), image()
        fast = fxfuse.optimize(model, (x,), cuda_graphs=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fast(x)
        x.copy_(image(5))
        graph.replay()
        torch.testing.assert_close(y, model(image(5)), rtol=5e-3, atol=5e-3)

    def test_waiting_for_the_gpu(self):
        def forward(m, x):
            y = m.fc(x).relu()
            return y if y.sum() > 0 else -y

        model, x = Net(forward, fc=linear()).cuda().eval(), X.cuda()
        fast = fxfuse.optimize(model, (x,), cuda_graphs=True)
        for value in (x, -x):
            torch.testing.assert_close(fast(value), model(value), rtol=1e-4, atol=1e-5)
        assert "it waits for the GPU" in report(fast)[1]

    def test_what_cannot_be_captured_does_no_harm(self):
        def forward(m, x):
            rows, *_ = [*x.shape]  # runs as Python
            torch.cuda.synchronize()  # which torch's debug mode does not notice
            return m.fc(x).relu() * rows

        model, x = Net(forward, fc=linear()).cuda().eval(), X.cuda()
        fast = fxfuse.optimize(model, (x,), cuda_graphs=True)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        assert "capturing it fails" in report(fast)[1]
        assert F.dropout(torch.ones(1000, device="cuda"), 0.5).sum() > 0, "the generator is not left capturing"
        self.test_a_network_is_replayed(torch.float32)

    def test_random_numbers_and_training(self):
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).cuda(), X.cuda()
        fast = fxfuse.optimize(model.train(), (x,), cuda_graphs=True)
        torch.cuda.manual_seed(0)
        want = [model(x) for _ in range(3)]
        torch.cuda.manual_seed(0)
        torch.testing.assert_close([fast(x) for _ in range(3)], want)

    def test_autocast(self):
        model, x = network(), image()
        fast = fxfuse.optimize(model, cuda_graphs=True)
        plain = fxfuse.optimize(model)
        for seed in range(4):
            with torch.autocast("cuda", torch.bfloat16):
                have, want = fast(image(seed)), plain(image(seed))
            assert have.dtype == want.dtype == torch.bfloat16
            torch.testing.assert_close(have, want)
            torch.testing.assert_close(fast(x), plain(x))
        assert report(fast) == ("2 CUDA graphs captured",)

    def test_memory_is_given_back(self):
        x = image()
        fast = fxfuse.optimize(network(), (x,), cuda_graphs=True)
        fast(x)
        del fast
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            fast = fxfuse.optimize(network(), (x,), cuda_graphs=True)
            fast(x)
            del fast
        torch.cuda.synchronize()
        gc.collect()
        assert torch.cuda.memory_allocated() - before < 2**22
