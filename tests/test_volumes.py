"""Conv3d as an anchor: where its filters are flat, so that it is a convolution of images (cuda/prepare.py)."""

import pytest
import torch
import torch.nn.functional as F
from helpers import Net, assert_as_eager, randn, regions
from torch import nn

import fxfuse
from fxfuse import channels_last
from fxfuse.module import state_of
from fxfuse.patterns import anchors


@pytest.fixture
def anywhere(monkeypatch):
    """They are anchors on a CPU, too."""
    monkeypatch.setattr(anchors, "_on_gpu", lambda tensor: True)


def volume(*shape):
    return randn(*(shape or (2, 4, 3, 6, 5)))


def flat(kernel=(1, 3, 3), **options):
    return nn.Conv3d(4, 8, kernel, **options)


def normalised_after_a_question(m, x):
    y = m.c(x)
    torch._assert(y.ndim == 5, "a volume")
    return m.n(y).relu()


NORM = nn.BatchNorm3d(8).requires_grad_(False)
ANCHORS = {
    "module": (Net(lambda m, x: m.c(x).relu(), c=flat(padding=(0, 1, 1))), "relu(acc)"),
    "through planes": (Net(lambda m, x: m.c(x).relu(), c=flat((3, 1, 1), stride=(2, 1, 1), padding=(1, 0, 0))),
                       "relu(acc)"),
    "pixels": (Net(lambda m, x: m.c(x).relu(), c=flat(1, stride=2)), "relu(acc)"),
    "normalised": (
        Net(lambda m, x: m.n(m.c(x)).relu(), c=flat(bias=False), n=NORM),
        "relu(batch_norm_3d(acc, o0, o1, o2, o3, 1e-05))",
    ),
    "residual": (Net(lambda m, x: torch.relu(m.c(x) + x[:, :1]), c=flat(padding=(0, 1, 1))), "relu(acc + o0)"),
    "function": (Net(lambda m, x: F.conv3d(x, m.w, m.b, (1, 2, 2)).tanh(), w=randn(8, 4, 1, 3, 3), b=randn(8)),
                 "tanh(acc)"),
    "torch's function": (Net(lambda m, x: torch.conv3d(x, m.w).tanh(), w=randn(8, 4, 3, 1, 1)), "tanh(acc)"),
    "operator": (Net(lambda m, x: torch.ops.aten.conv3d(x, m.w).tanh(), w=randn(8, 4, 1, 1, 3)), "tanh(acc)"),
    "rank asked for": (Net(normalised_after_a_question, c=flat(), n=NORM), None),
}  # fmt: skip


@pytest.mark.parametrize("name", ANCHORS)
def test_flat_filters_are_anchors(name, anywhere):
    model, epilogue = ANCHORS[name]
    fast = fxfuse.optimize(model.eval())
    found = [(region.anchor, region.epilogue) for region in regions(fast)]
    assert {anchor for anchor, _ in found} == {"conv3d"}
    assert epilogue is None or epilogue in [text for _, text in found]
    assert_as_eager(model, fast, volume())


OTHERS = {
    "not flat": (flat(3), volume()),
    "padded planes": (flat(padding=1), volume()),
    "a stride within planes": (flat((3, 1, 1), stride=2), volume()),
    "groups": (flat(groups=2), volume()),
    "padding in words": (flat(padding="same"), volume()),
    "another padding": (flat(padding=(0, 1, 1), padding_mode="circular"), volume()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_left_to_torch(name, anywhere):
    convolution, x = OTHERS[name]
    model = Net(lambda m, x: m.c(x).relu(), c=convolution).eval()
    fast = fxfuse.optimize(model)
    assert not any(node.target is fxfuse.functional.conv3d for node in fast.graph.nodes)
    assert_as_eager(model, fast, x)


def test_on_a_cpu_torch_convolves():
    fast = fxfuse.optimize(Net(lambda m, x: m.c(x).relu(), c=flat()).eval())
    assert not any(node.target is fxfuse.functional.conv3d for node in fast.graph.nodes)


def factorised(m, x):
    """R(2+1)D's blocks."""
    x = m.layers[1](m.layers[0](x).relu()).relu()
    for number in (2, 4):
        x = torch.relu(m.layers[number + 1](m.layers[number](x).relu()) + x)
    return x.mean((2, 3, 4))


def test_factorised_blocks_work_in_channels_last_3d(anywhere, monkeypatch):
    monkeypatch.setattr(channels_last, "_gains", lambda x: True)
    monkeypatch.setattr(channels_last, "_elements", lambda values: float("inf"))
    layers = [
        nn.Conv3d(3, 8, (1, 3, 3), (1, 2, 2), (0, 1, 1)), nn.Conv3d(8, 16, (3, 1, 1), 1, (1, 0, 0)),
        nn.Conv3d(16, 24, (1, 3, 3), 1, (0, 1, 1)), nn.Conv3d(24, 16, (3, 1, 1), 1, (1, 0, 0)),
        nn.Conv3d(16, 24, (1, 3, 3), 1, (0, 1, 1)), nn.Conv3d(24, 16, (3, 1, 1), 1, (1, 0, 0)),
    ]  # fmt: skip
    model = Net(factorised, layers=nn.ModuleList(layers)).eval().requires_grad_(False)
    x = volume(2, 3, 4, 8, 8)
    fast = fxfuse.optimize(model, (x,))
    assert [region.anchor for region in regions(fast)].count("conv3d") == 6
    assert state_of(fast).layouts.convolutions == 6
    assert_as_eager(model, fast, x)
