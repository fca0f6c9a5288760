"""Interpolations in training steps: resampling.py."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import Net, randn
from test_loops import GPUS, where_steps_are
from test_training import assert_errors_as_eagers, calls_of, made, step_of
from torch import nn

import fxfuse
from fxfuse.module import state_of

IMAGES = {3: (2, 4, 6), 4: (2, 4, 6, 5), 5: (2, 3, 4, 3, 5)}
MODES = [
    ("nearest", 3), ("nearest", 4), ("nearest", 5), ("nearest-exact", 3), ("nearest-exact", 4), ("nearest-exact", 5),
    ("linear", 3), ("bilinear", 4), ("bicubic", 4), ("trilinear", 5),
]  # fmt: skip
HOW = {
    "twice": {"scale_factor": 2},
    "four times": {"scale_factor": 4.0},
    "three times": {"scale_factor": 3.0},
    "by a fraction": {"scale_factor": 1.7},
    "by what the sizes say": {"scale_factor": 2.1, "recompute_scale_factor": True},
    "by half": {"scale_factor": 0.5},
    "to a size": {"size": 12},
    "to the same size": {"scale_factor": 1},
}


def compared(model, x):
    """The step of an optimised model after its gradients were compared with float64's."""
    fast = fxfuse.optimize(copy.deepcopy(model))
    expected = step_of(model, x)
    exact = step_of(copy.deepcopy(model).double(), x.detach().double().requires_grad_())
    found = calls_of(fast, x)
    assert found[0].stride() == expected[0].stride()
    assert_errors_as_eagers(found, expected, exact)
    (step,) = made(fast)
    return step


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("mode", "dims"), MODES)
def test_gradients(mode, dims, how, channels_last):
    x = randn(*IMAGES[dims])
    if channels_last:
        if dims == 3:
            pytest.skip("torch has no such layout of three dimensions")
        x = x.to(memory_format=torch.channels_last if dims == 4 else torch.channels_last_3d)
    compared(Net(lambda m, x: F.interpolate(x.tanh(), mode=mode, **HOW[how]).sin()), x.requires_grad_())


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize(("mode", "dims"), [(mode, dims) for mode, dims in MODES if "linear" in mode])
def test_corners(mode, dims, corners):
    call = Net(lambda m, x: F.interpolate(x.tanh(), scale_factor=2.0, mode=mode, align_corners=corners).sin())
    compared(call, randn(*IMAGES[dims]).requires_grad_())


@pytest.mark.parametrize("scale", [1.1, 2.1])
def test_torch_computes_what_its_trace_gets_wrong(scale):
    """A scale of 2.1 that doubles the size: eager takes each pixel twice, torch's decomposition of it does not."""
    model = Net(lambda m, x: F.interpolate(x.tanh(), scale_factor=scale).sin())
    x = randn(2, 4, 6, 5).requires_grad_()
    fast = fxfuse.optimize(copy.deepcopy(model))
    for _ in range(3):
        found = step_of(fast, x)
    for one, other in zip(found, step_of(model, x), strict=True):
        assert torch.equal(one, other)
    assert "takes other pixels" in state_of(fast).training.reason


@pytest.mark.parametrize("size", [(12, 5), (12, 20), (3, 10), (6, 10)])
def test_each_side_by_itself(size):
    compared(Net(lambda m, x: F.interpolate(x.tanh(), size=size).sin()), randn(2, 4, 6, 5).requires_grad_())


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("options", "left"),
    [({"scale_factor": 2}, set()), ({"scale_factor": 2, "mode": "bilinear"}, {"upsample_bilinear2d_backward"})],
)
def test_what_torch_computes_of_them(options, left, gpu, monkeypatch):
    """Repeated pixels are read where they are, and their gradient is a sum; no table of indices is made."""
    device = where_steps_are(gpu, monkeypatch)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Upsample(**options), nn.Conv2d(8, 8, 1), nn.ReLU()).to(device)
    step = compared(model, randn(2, 3, 10, 12).to(device).requires_grad_())
    calls = set()
    for _, graph in step.graphs:
        (program,) = state_of(graph).programs.programs
        calls |= {name.partition(".")[0] for name in program.calls}
    assert calls <= {"convolution", "convolution_backward", "reshape", *left}, calls
