"""Zeros that an operation of its own puts around a convolution's image: the convolution pads instead."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import Net, assert_as_eager, conv, epilogues, randn
from torch import nn

import fxfuse

PADDED = {
    "F.pad": lambda m, x: m.c(F.pad(x, (1, 1, 1, 1))).relu(),
    "uneven": lambda m, x: m.c(F.pad(x, (0, 1, 0, 1))).relu(),
    "by a convolution that pads, too": lambda m, x: m.wide(F.pad(x, (2, 0, 1, 3))).relu(),
    "one dimension": lambda m, x: m.c(F.pad(x, (2, 1))).relu(),
    "nothing": lambda m, x: m.c(F.pad(x, (0, 0, 0, 0))).relu(),
    "no other dimension": lambda m, x: m.c(F.pad(x, (1, 2, 0, 1, 0, 0), "constant", 0.0)).relu(),
    "nn.ZeroPad2d": lambda m, x: m.c(m.zeros(x)).relu(),
    "a function": lambda m, x: F.conv2d(F.pad(x, (1, 1, 2, 2), value=0), m.c.weight, None, 2).relu(),
    "aten": lambda m, x: torch.ops.aten.conv2d(torch.ops.aten.constant_pad_nd(x, [1, 0, 1, 0]), m.c.weight).relu(),
    "behind a chain": lambda m, x: m.c(F.pad((x * 2 + 1).sigmoid(), (1, 0, 1, 0))).relu(),
}
KEPT = {
    "another number": lambda m, x: m.c(F.pad(x, (1, 1, 1, 1), value=0.5)).relu(),
    "reflected": lambda m, x: m.c(F.pad(x, (1, 1, 1, 1), mode="reflect")).relu(),
    "cut": lambda m, x: m.c(F.pad(x, (-1, 1, 1, 1))).relu(),
    "several images": lambda m, x: m.c(F.pad(x, (0, 0, 0, 0, 0, 0, 1, 1))).relu(),
    "others read it": lambda m, x: (lambda y: m.c(y).relu() + y.mean())(F.pad(x, (1, 1, 1, 1))),
    "overwritten": lambda m, x: (lambda x, y: (x.mul_(2), m.c(y).relu())[1])(*(lambda z: (z, F.pad(z, (1, 1))))(x + 1)),
}


def model_of(forward):
    return Net(forward, c=conv(), wide=conv(padding=(1, 2)), zeros=nn.ZeroPad2d((1, 0, 2, 1)))


def pads_left(fast):
    targets = [str(node.target) for node in fast.graph.nodes]
    return sum("pad" in target.lower() or target == "zeros" for target in targets)


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_convolution_pads(name, memory_format):
    model = model_of(PADDED[name])
    fast, x = fxfuse.optimize(copy.deepcopy(model)), randn(2, 4, 9, 7).to(memory_format=memory_format)
    assert pads_left(fast) == 0
    with torch.no_grad():
        for _ in range(3):
            assert_as_eager(model, fast, x)
    for net in (model, fast):
        net(x).square().sum().backward()
    torch.testing.assert_close(fast.c.weight.grad, model.c.weight.grad)


@torch.no_grad()
@pytest.mark.parametrize("name", KEPT)
def test_all_other_padding_stays(name):
    model = model_of(KEPT[name])
    fast, x = fxfuse.optimize(copy.deepcopy(model)), randn(2, 4, 9, 7)
    assert pads_left(fast) == 1 and any("relu" in epilogue for epilogue in epilogues(fast))
    for _ in range(3):
        assert_as_eager(model, fast, x)
