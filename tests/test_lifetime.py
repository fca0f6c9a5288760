"""What belongs to a model goes with it, and a process may optimise as many models as it likes.

By hand, for other numbers of models and kernels: `PYTHONPATH=. python tests/test_lifetime.py --models 2000 --seed 0`.
"""

import argparse
import copy
import gc
import inspect
import linecache
import os
import pickle
import random
import subprocess
import sys
import threading
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import ON_GPU, linear, randn
from torch import fx, nn

import fxfuse
from fxfuse import build, plans
from fxfuse.backend import compile_graph
from fxfuse.module import state_of

ROOT = Path(__file__).parents[1]
OURS = ("FusedModule", "Graph", "Node", "Problem", "Plan", "FusedState", "Captured", "TensorGuards", "function")
"""Types of objects of which there must be no more after a model than before."""


DYNAMOS = ("fx's sources", "sources for tracebacks", "finalizers", "function")
"""Of which Dynamo itself leaves some behind for every graph."""


@pytest.fixture(autouse=True)
def earlier_objects_are_no_garbage():
    """The collector leaves out what was there before: a million objects of what is imported, which take it a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def held():
    """How many entries there are in everything that outlives a model, and how many objects of some types."""
    for thread in threading.enumerate():  # nothing waits for what compiled, and a thread has a function of its own
        if thread.name.startswith("fxfuse"):
            thread.join()
    for _ in range(3):  # one collection may free what the next finds
        gc.collect()
    registries = {
        "plans": plans._plans,
        "epilogues as written": plans.written,
        "latest": plans._latest,
        "short cuts": plans.shortcuts,
        "called without a plan": [region for regions in plans.without_plan.values() for region in regions],
        "finalizers": weakref.finalize._registry,
        "fx's sources": fx.graph_module._loader.eval_cache,
        "sources for tracebacks": linecache.cache,
        "kernels": build._loaded,
    }
    objects = Counter(type(found).__name__.removesuffix("Impl") for found in gc.get_objects())
    return {**{name: len(registry) for name, registry in registries.items()}, **{name: objects[name] for name in OURS}}


class Gate(nn.Module):
    """Control flow: runs as Python, its children fused."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(linear(), nn.ReLU())

    def forward(self, x):
        return self.body(x) if x.sum() > 0 else self.body(-x)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear()

    def forward(self, x, mask=None):
        x = torch.relu(self.fc(x))
        return x if mask is None else x + mask


class Wide(nn.Module):
    """Asks for a size, which fx's tracer does not know."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(linear(), nn.ReLU())

    def forward(self, x):
        return self.body(x) if x.shape[1] > 4 else self.body(-x)


def called(model, *inputs, times=3):
    for _ in range(times):  # the third by a short cut
        model(*inputs)
    return model


def with_gradients(model):
    fast = fxfuse.optimize(model)
    fast(randn(2, 8)).sum().backward()
    return fast


def that_fails(model):
    fast = fxfuse.optimize(model)
    with pytest.raises(RuntimeError, match="shapes"):
        fast(randn(2, 7))
    return fast


def in_both_modes(model):
    fast = fxfuse.optimize(model)
    for mode in (True, False, True):
        called(fast.train(mode), randn(2, 8))
    return fast


LIVES = {
    "called": lambda: called(fxfuse.optimize(nn.Sequential(linear(), nn.ReLU()).eval()), randn(2, 8)),
    "compiled for an example": lambda: fxfuse.optimize(nn.Sequential(linear(), nn.ReLU()).eval(), (randn(2, 8),)),
    "trained": lambda: with_gradients(nn.Sequential(linear(), nn.ReLU())),
    "of both modes": lambda: in_both_modes(nn.Sequential(linear(), nn.ReLU(), nn.Dropout())),
    "with variants": lambda: called(fxfuse.optimize(Masked().eval()), randn(2, 8), randn(2, 8)),
    # once more, and Dynamo would look at it, which keeps the text of graphs that it gave up
    "of Python": lambda: called(fxfuse.optimize(Gate().eval()), randn(2, 8), times=2),
    "captured by Dynamo": lambda: called(fxfuse.optimize(Wide().eval()), randn(2, 8), times=5),
    "copied": lambda: called(copy.deepcopy(fxfuse.optimize(nn.Sequential(linear(), nn.ReLU()).eval())), randn(2, 8)),
    "pickled": lambda: pickle.loads(pickle.dumps(fxfuse.optimize(nn.Sequential(linear(), nn.ReLU()).eval()))),
    "optimised again": lambda: fxfuse.optimize(fxfuse.optimize(nn.Sequential(linear(), nn.ReLU()).eval())),
    "that raises": lambda: that_fails(nn.Sequential(linear(), nn.ReLU()).eval()),
}


@pytest.mark.parametrize("name", LIVES)
def test_everything_that_belongs_to_a_model_goes_with_it(name):
    with torch.set_grad_enabled(name == "trained"):
        LIVES[name]()  # what is kept once: kernels, caches of bounded size, what torch imports
        before = held()
        models = [LIVES[name]() for _ in range(3)]
        alive = [weakref.ref(model) for model in models]
        assert held()["plans"] >= before["plans"]
        del models
        after = held()
    assert [reference() for reference in alive] == [None] * 3
    excepted = DYNAMOS if name == "captured by Dynamo" else ()
    # what other tests left in caches of bounded size may go meanwhile
    assert not {key: count - before[key] for key, count in after.items() if count > before[key] and key not in excepted}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("trains", [False, True])
def test_the_first_calls_leave_no_tensors_to_the_garbage_collector(trains, device, new_cache, forget):
    """In a cycle of references they would live on for long: a whole step's, on a GPU that is full already."""

    def alive(steps):
        model = nn.Sequential(linear(), nn.LayerNorm(8), nn.GELU(), linear(), nn.Sigmoid())
        fast = fxfuse.optimize(model.to(device).train(trains))
        given = []
        for seed in range(steps):
            x = randn(2, 8, seed=seed).to(device).requires_grad_(trains)
            with torch.set_grad_enabled(trains):
                result = fast(x)
            if trains:
                result.square().sum().backward()
            given.append(weakref.ref(x))
            del x, result
        return [reference() is not None for reference in given]

    alive(4)  # what torch imports keeps the frames of its first import
    forget()
    gc.collect()
    gc.disable()
    try:
        assert alive(6) == [False] * 6
    finally:
        gc.enable()


def test_a_graph_of_dynamos_goes_with_the_compiled_model():
    torch.compiler.reset()
    before = held(), set(fxfuse.compiled_graphs())
    model = nn.Sequential(linear(), nn.ReLU()).eval()
    with torch.no_grad():
        torch.compile(model, backend=compile_graph)(randn(2, 8))
    (graph,) = set(fxfuse.compiled_graphs()) - before[1]
    alive = weakref.ref(graph)
    del graph, model
    torch.compiler.reset()
    after = held()
    assert alive() is None
    for name in ("plans", "latest", "short cuts", "called without a plan", "FusedModule"):
        assert after[name] <= before[0][name], name


def test_the_source_stays_readable_as_long_as_the_code():
    fast = fxfuse.optimize(nn.Sequential(linear(), nn.ReLU(), nn.Dropout()))
    forward = inspect.unwrap(type(fast).forward)
    name = forward.__code__.co_filename
    assert "fused" in "".join(linecache.getlines(name))
    fast.eval()
    assert "fused" in "".join(linecache.getlines(name)), "somebody holds the old forward"
    del forward
    gc.collect()
    assert not linecache.getlines(name)


def test_a_region_keeps_the_latest_of_many_sizes(monkeypatch):
    monkeypatch.setattr(plans, "MOST_KEPT", 6)  # two for each size
    model = nn.Sequential(linear(), nn.ReLU()).eval()
    fast = fxfuse.optimize(model)
    (region,) = state_of(fast).regions
    with torch.no_grad():
        for rows in (*range(1, 8), 1, 7, 1):
            torch.testing.assert_close(fast(randn(rows, 8)), model(randn(rows, 8)))
            assert len(plans._plans[region.number]) <= 6
    assert sorted(plan_rows(region)) == [1, 6, 7]


def plan_rows(region):
    return {key[0].x.shape[0] for key in plans._plans[region.number] if not isinstance(key[0], str)}


@pytest.mark.slow
def test_1000_models_in_one_process():
    """A process of its own, so that its memory is its models'."""
    command = [sys.executable, __file__, "--models", "1000", "--kinds", "12"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    output = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert output.returncode == 0, output.stdout + output.stderr


# --------------------------------------------------------------------------------------------- random models

FUNCTIONS = (torch.relu, torch.tanh, torch.sigmoid, F.silu, F.gelu, F.hardswish, F.mish, torch.abs, F.elu, torch.neg)

STEPS = (
    lambda m, x, y, function, number: y * number,
    lambda m, x, y, function, number: y + m.scale,
    lambda m, x, y, function, number: y + x,
    lambda m, x, y, function, number: y.clamp(-number, number),
    lambda m, x, y, function, number: function(y),
)


class Random(nn.Module):
    """Linears, 1x1 convolutions or nothing, each with a few pointwise operations behind it."""

    def __init__(self, draw, kind):
        super().__init__()
        self.channels, self.anchor = kind.choice((4, 8, 12)), kind.choice(("linear", "conv2d", "none"))
        count = kind.choice((1, 2))
        make = {
            "linear": lambda: nn.Linear(self.channels, self.channels),
            "conv2d": lambda: nn.Conv2d(self.channels, self.channels, 1),
            "none": nn.Identity,
        }
        self.layers = nn.ModuleList(make[self.anchor]() for _ in range(count))
        self.scale = nn.Parameter(torch.rand(self.channels) if self.anchor == "linear" else torch.rand(()))
        self.steps = [
            [(kind.randrange(len(STEPS)), kind.choice(FUNCTIONS), round(kind.uniform(0.5, 2.0), 3)) for _ in range(3)]
            for _ in range(count)
        ]
        self.rows = draw.randint(1, 4)

    def input(self):
        return torch.randn(self.rows, self.channels, *(() if self.anchor == "linear" else (5, 5)))

    def forward(self, x):
        for layer, steps in zip(self.layers, self.steps, strict=True):
            y = layer(x)
            for what, function, number in steps:
                y = STEPS[what](self, x, y, function, number)
            x = y
        return x


def resident_megabytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def optimise_many(models, kinds, seed):
    """Optimises and calls random models of so many kinds; memory and what is held must not grow in the second half."""
    growth, before, fused = 0.0, {}, 0
    for i in range(models):
        draw = random.Random(seed * 1_000_003 + i)
        torch.manual_seed(i)
        model = Random(draw, random.Random(seed * 1_000_003 + i % kinds)).train(i % 3 == 0)
        x = model.input()
        fast = fxfuse.optimize(model, (x,)) if i % 2 else fxfuse.optimize(model)
        if i % 5 == 0:
            fast(x)
        with torch.no_grad():
            expected, found = model(x), [fast(x) for _ in range(3)][-1]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        fused += any(region.kernel for region in fxfuse.explain(fast).regions)
        if (i + 1) % (models // 4) == 0:
            del model, fast
            now = held()
            print(f"{i + 1} models, {resident_megabytes():.0f} MB, {now}", flush=True)
            if i + 1 == models // 2:
                growth, before = -resident_megabytes(), now
    growth += resident_megabytes()
    print(f"{growth:.1f} MB more after the second half; {fused} models ran kernels")
    assert fused > models // 2
    if kinds <= models // 4:  # all kernels were there at half-time
        after = held()  # not within the comprehension, which is a function, too
        grown = {name: (before[name], count) for name, count in after.items() if count > before[name]}
        assert not grown, grown
        assert growth < 0.01 * models / 2, "10 KB a model"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=2000)
    parser.add_argument("--kinds", type=int, default=2000, help="how many different models, with kernels of their own")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    optimise_many(options.models, options.kinds, options.seed)
