"""Random programs of pointwise operations, views, in-place operations and torch's library: fusing changes nothing.

Kernels are played by torch's reference, so that thousands of graphs take seconds: what is tested is which nodes join
which region, and what is overwritten. Expected values and the inputs' final contents are eager's own.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from helpers import randn
from torch import nn

import fxfuse
from fxfuse import plans
from fxfuse.chain import plan_pass
from fxfuse.problem import Plan, anchor_meta, run_anchor
from fxfuse.reference import evaluate

PROGRAMS = 200
SIZE = 4


@pytest.fixture(autouse=True)
def kernels_by_torch(monkeypatch):
    """A chain's pass as torch computes it, but in place wherever the kernel would be."""

    def draft(problem, strict):
        in_place = problem.weight is None and plan_pass(problem, anchor_meta(problem)).in_place

        def run(x, weight, bias, operands):
            acc = run_anchor(problem.kind, problem.options, x, weight, bias)
            result = evaluate(problem.expression, acc, operands)
            return x.copy_(result) if in_place else result

        return lambda: Plan(run, "torch")

    monkeypatch.setattr(plans, "_draft", draft)


class Members(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer_norm = nn.LayerNorm(SIZE)
        self.conv = nn.Conv1d(SIZE, SIZE, 1)
        self.linear = nn.Linear(SIZE, SIZE)
        self.relu_ = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout()
        self.scale = nn.Parameter(randn(SIZE))
        self.eval()


NEW = [
    lambda m, a, b: a + b,
    lambda m, a, b: a * b,
    lambda m, a, b: torch.where(a > 0, a, a * 0.5) + b,
    lambda m, a, b: torch.tanh(a),
    lambda m, a, b: a.sigmoid() * a,
    lambda m, a, b: F.relu(a) - 0.5,
    lambda m, a, b: a * m.scale,
    lambda m, a, b: torch.addcmul(a, b, b, value=0.1),
]
"""Pointwise operations with a new result."""
LIBRARY = [
    lambda m, a, b: m.layer_norm(a),
    lambda m, a, b: m.conv(a),
    lambda m, a, b: m.linear(a),
    lambda m, a, b: torch.bmm(a, b),
    lambda m, a, b: a @ b,
    lambda m, a, b: torch.baddbmm(a, b, b),
    lambda m, a, b: F.max_pool1d(a, 1),
    lambda m, a, b: F.layer_norm(a, (SIZE,)),
]
OVERWRITING = [
    lambda m, a, b: a.add_(b),
    lambda m, a, b: a.mul_(0.5),
    lambda m, a, b: F.relu(a, inplace=True),
    lambda m, a, b: m.relu_(a),
    lambda m, a, b: torch.tanh_(a),
]
VIEWS = [
    lambda m, a, b: a.transpose(0, 1),
    lambda m, a, b: a.view(SIZE, SIZE, SIZE),
    lambda m, a, b: a[:],
    lambda m, a, b: a.detach(),
    lambda m, a, b: a.contiguous(),
    lambda m, a, b: m.dropout(a),
    lambda m, a, b: a.float(),
    lambda m, a, b: a.transpose(1, 2).transpose(1, 2),
]


class Program(Members):
    """A random program of two inputs."""

    def __init__(self, seed):
        super().__init__()
        dice = random.Random(seed)
        kinds = dice.choices([NEW, LIBRARY, OVERWRITING, VIEWS], [10, 3, dice.choice([0, 2]), 2], k=dice.randint(3, 12))
        count = 2
        self.steps = []
        for kind in kinds:
            recent = range(max(0, count - 3), count) if dice.random() < 0.7 else range(count)
            self.steps.append((dice.choice(kind), dice.choice(recent), dice.choice(recent)))
            count += 1
        self.returned = [count - 1, *dice.sample(range(count), dice.randint(0, 2))]

    def forward(self, x, y):
        values = [x, y]
        for step, first, second in self.steps:
            values.append(step(self, values[first], values[second]))
        return [values[index] for index in self.returned]


def run(call, seed):
    """Results and what the inputs hold then, or the exception."""
    x, y = randn(SIZE, SIZE, SIZE, seed=seed), randn(SIZE, SIZE, SIZE, seed=seed + 1)
    try:
        with torch.no_grad():
            results = call(x, y)
    except RuntimeError as error:
        return error
    return [*results, x, y]


def test_fusing_changes_nothing():
    regions = in_place = refused = 0
    for seed in range(PROGRAMS):
        torch.manual_seed(seed)
        model = Program(seed)
        fast = fxfuse.optimize(model)
        regions += len(fxfuse.explain(fast).regions)
        in_place += sum(node.target is fxfuse.functional.pointwise and node.args[5] for node in fast.graph.nodes)
        for _ in range(2):
            want, have = run(model, seed), run(fast, seed)
            if isinstance(want, Exception):
                assert isinstance(have, Exception), f"program {seed}: {want}"
                refused += 1
                break
            for mine, eagers in zip(have, want, strict=True):
                assert mine.stride() == eagers.stride(), f"program {seed}\n{fast.code}"
                close = torch.allclose(mine, eagers, rtol=1e-4, atol=1e-5, equal_nan=True)
                assert close, f"program {seed}: {(mine - eagers).abs().max()} beside eager's\n{fast.code}"
            shared = [[a.data_ptr() == b.data_ptr() for a in values for b in values] for values in (have, want)]
            assert shared[0] == shared[1], f"program {seed}: other tensors share memory\n{fast.code}"
    assert refused < PROGRAMS / 10, "most programs are no errors"
    assert regions > PROGRAMS / 2 and in_place > PROGRAMS / 20, "chains are found, and some overwrite"
