"""Results of regions in the memory of an operand that nothing else reads: a network's residuals take no more of it.

That kernels may do so is test_emulated_kernels.py's. Programs for a GPU are recorded here on tensors that stand in for
its own; the last test needs a GPU of compute capability 8.0. Expected values come from torch in float64.
"""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers import ON_GPU, randn
from torch import nn

import fxfuse
from fxfuse import program, toolchain
from fxfuse.deploy import saving
from fxfuse.module import state_of
from fxfuse.program import record
from fxfuse.program.values import Launch, Slot, Value


def value(name, shape=(4, 6), strides=(6, 1), dtype=torch.float32, offset=0, slot=None):
    return Value(slot or Slot("memory", name), offset, shape, strides, dtype, name)


def test_an_operand_that_lies_as_the_result_does_may_share_its_memory():
    x, weight, bias, out = value("x", (4, 5), (5, 1)), value("w", (6, 5), (5, 1)), value("b", (6,), (1,)), value("out")
    residual = value("r")
    assert record._operands_in_place("linear", (x, weight, bias, (residual, 2.0)), out) == [(residual.slot, out.slot)]
    assert record._operands_in_place("linear", (x, weight, None, (value("r", dtype=torch.int32),)), out)
    for name, other in {
        "another order": value("r", strides=(1, 4)),
        "a part of its memory": value("r", offset=8),
        "broadcast": value("r", strides=(0, 1)),
        "fewer dimensions": value("r", (6,), (1,)),
        "larger elements": value("r", dtype=torch.float64),
        "x itself": dataclasses.replace(residual, slot=x.slot),
        "the weight's": dataclasses.replace(residual, slot=weight.slot),
    }.items():
        assert record._operands_in_place("linear", (x, weight, bias, (other,)), out) == [], name
    assert record._operands_in_place("linear", (x, weight, bias, (residual, residual)), out) == [], "read twice"
    assert record._operands_in_place("pointwise", (residual, None, None, ()), out) == [(residual.slot, out.slot)]
    assert record._operands_in_place("pointwise", (residual, None, None, (residual,)), out) == [], "read twice"
    one_image = value("r", (1, 6, 4), (99, 4, 1)), value("out", (1, 6, 4), (24, 4, 1))
    assert record._operands_in_place("linear", (x, weight, bias, one_image[:1]), one_image[1]), "a stride of nothing"


class Residuals(nn.Module):
    """Blocks that add to what they read. Of the latter, the last is read by what comes after, too."""

    def __init__(self, width=24, blocks=3):
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(blocks))
        self.downs = nn.ModuleList(nn.Linear(3 * width, width) for _ in range(blocks))
        self.first = nn.Linear(width, width)

    def forward(self, x):
        x = F.relu(self.first(x))
        for up, down in zip(self.ups, self.downs, strict=True):
            before = x
            x = x + down(F.relu(up(x)))
        return F.softmax(x, -1) * before


class Gated(nn.Module):
    """A squeeze-and-excite block: the gate, times the tensor that it gates, plus a residual."""

    def __init__(self, channels=16):
        super().__init__()
        self.first, self.down = nn.Conv2d(8, channels, 1), nn.Conv2d(8, channels, 1)
        self.squeeze, self.excite = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)
        self.last = nn.Conv2d(channels, 8, 1)

    def forward(self, x):
        x = x.relu() * 2
        y = self.first(x)
        gate = self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))).sigmoid()
        return self.last(F.relu(gate * y + self.down(x)))


COPIES = {
    "added": lambda last, x: last(x) + x.clone(),
    "multiplied": lambda last, x: last(x.clone()) + x,
    "both": lambda last, x: last(x.clone()) + x.clone(),
    "added, and turned over": lambda last, x: last(x.sin()) + x.clone() + x.clone().mT,
}


class OfACopy(nn.Module):
    """Reads something and a copy of it. The copy is left out, and its reader reads the other's memory."""

    def __init__(self, width=24, way="added"):
        super().__init__()
        self.first, self.last, self.way = nn.Linear(width, width), nn.Linear(width, width), way

    def forward(self, x):
        z = COPIES[self.way](self.last, F.relu(self.first(x)))
        return F.softmax(z, -1) * z


def overwritten(model, x, folder, monkeypatch):
    """How many regions of the model's program for an H100 may write where an operand lies."""
    steps = []
    merged = program._merged
    monkeypatch.setattr(program, "_merged", lambda *given: steps.append(merged(*given)) or steps[-1])
    monkeypatch.setattr(saving, "_add_kernels", lambda *given: {})
    monkeypatch.setattr(toolchain, "nvcc_version", lambda: "13.0")
    monkeypatch.setattr(toolchain, "nvcc_architectures", list)
    fxfuse.save(fxfuse.optimize(model.eval()), folder / "it", x, architectures=("sm_90",))
    return {
        sum(bool(step.in_place) for step in of if isinstance(step, Launch) and "_fused" in step.label) for of in steps
    }


def test_a_residual_is_added_where_it_lies(tmp_path, monkeypatch):
    assert overwritten(Residuals(), randn(50, 24), tmp_path, monkeypatch) == {3}


def test_a_gate_and_the_residual_behind_it_lie_where_the_gated_tensor_did(tmp_path, monkeypatch):
    assert overwritten(Gated(), randn(2, 8, 12, 12), tmp_path, monkeypatch) == {2}


@pytest.mark.parametrize("way", COPIES)
def test_what_is_read_as_something_else_too_is_not_overwritten(way, tmp_path, monkeypatch):
    assert overwritten(OfACopy(way=way), randn(24, 24), tmp_path, monkeypatch) == {0}


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=ON_GPU) for dtype in (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("special", [False, True], ids=["finite", "infinite"])
@pytest.mark.parametrize("name", ["linear", "linear, large", *COPIES, "gate", "gate, channels_last"])
@torch.no_grad()
def test_residuals_on_a_gpu(name, special, dtype):
    torch.manual_seed(0)
    x, model = {
        "linear": lambda: (torch.randn(53, 40), Residuals(40)),
        "linear, large": lambda: (torch.randn(2100, 520), Residuals(520)),
        **{way: lambda way=way: (torch.randn(264, 264), OfACopy(264, way)) for way in COPIES},
        "gate": lambda: (torch.randn(3, 8, 29, 31), Gated()),
        "gate, channels_last": lambda: (torch.randn(3, 8, 29, 31), Gated().to(memory_format=torch.channels_last)),
    }[name]()
    if special:
        x[0].view(-1)[::7], x[-1].view(-1)[::5] = float("inf"), float("nan")
    model, x = model.eval().to("cuda", dtype), x.to("cuda", dtype)
    x = x.to(memory_format=torch.channels_last) if "channels_last" in name else x
    exact, eager = copy.deepcopy(model).double()(x.double()), model(x)
    fast = fxfuse.optimize(model)
    for _ in range(4):
        result = fast(x)
        assert torch.equal(result.isnan(), eager.isnan())
        apart, of_eager = ((one.double() - exact).nan_to_num(0, 0, 0).norm() for one in (result, eager))
        assert apart <= 2 * of_eager + 1e-6 * exact.nan_to_num(0, 0, 0).norm()
    (made,) = state_of(fast).programs.programs
    if name == "linear, large":  # a block's hidden tensor, what it reads, and what comes of it, in the same place
        assert made.arena_size < 1.2 * (3 + 1) * x.numel() * x.element_size() + 2**23, made.code
