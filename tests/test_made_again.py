"""What the backward of a training step makes again instead of having it kept."""

import copy

import pytest
import torch
from helpers import Net, randn
from test_loops import GPUS, where_steps_are
from test_training import calls_of, made, step_of
from torch import nn
from torch.nn import functional as F

import fxfuse


@pytest.fixture(params=GPUS)
def gpu(request, monkeypatch):
    return where_steps_are(request.param, monkeypatch)


def kept_beside(step):
    """The sizes of what the forward of a step keeps for the backward, beside its results."""
    (end,) = (node for node in step.joint.forward.graph.nodes if node.op == "output")
    return [tuple(node.meta["val"].shape) for node in end.args[0][step.joint.results :]]


def assert_as_eager(model, fast, x):
    for one, other in zip(calls_of(fast, x), step_of(model, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
def test_no_filters_are_kept(groups, channels_last, gpu, monkeypatch):
    """The gradient of an image is a convolution with filters turned round; that of a stride, torch's operator."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # its rounding would hide a wrong filter
    sides = {"padding": 1, "groups": groups}
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3, **sides), nn.ReLU(), nn.Conv2d(16, 24, 3, stride=2, **sides), nn.ReLU(),
        nn.Conv2d(24, 16, 3, **sides), nn.Tanh(), nn.Conv2d(16, 8, 3, **sides), nn.ReLU(), nn.Conv2d(8, 8, 1),
    )  # fmt: skip
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = model.to(gpu, memory_format=layout)
    x = randn(2, 8, 12, 12).to(gpu, memory_format=layout).requires_grad_()
    fast = fxfuse.optimize(copy.deepcopy(model))
    assert_as_eager(model, fast, x)
    filters = {size for name, value in model.named_parameters() for size in _either_way(value.shape, groups)}
    for step in made(fast):
        assert not filters.intersection(kept_beside(step))


def _either_way(shape, groups):
    """The sizes of filters, and of those of which a gradient is made: filters and channels change places."""
    yield tuple(shape)
    if len(shape) == 4:
        yield (shape[1] * groups, shape[0] // groups, *shape[2:])


COPIES = {
    "cloned": lambda m, x: m.linear(x.clone()),
    "a view, cloned": lambda m, x: m.linear(x[0].clone()),
    "turned": lambda m, x: m.linear(x.flip(1)),
    "transposed": lambda m, x: m.linear(x.transpose(1, 3).contiguous()),
    "in channels_last": lambda m, x: m.conv(x.contiguous(memory_format=torch.channels_last)),
    "of a weight": lambda m, x: F.linear(x.tanh(), m.linear.weight.flip(0)),
    "a weight, cloned": lambda m, x: F.linear(x.tanh(), m.linear.weight.clone()),
}


@pytest.mark.parametrize("name", COPIES)
def test_what_was_copied_may_change_before_the_backward(name):
    """As in eager, where the copy is kept."""
    model = Net(lambda m, x: COPIES[name](m, x).tanh(), linear=nn.Linear(6, 6), conv=nn.Conv2d(6, 4, 3))
    fast = fxfuse.optimize(copy.deepcopy(model))
    calls_of(fast, randn(2, 6, 6, 6))
    gradients = []
    for each in (model, fast):
        x = randn(2, 6, 6, 6, seed=1)
        result = each(x)
        with torch.no_grad():
            (each.linear.weight if "weight" in name else x).mul_(2)
        wanted = [each.conv.weight] if name == "in channels_last" else [each.linear.weight]
        gradients += torch.autograd.grad(result.square().sum(), wanted)
    torch.testing.assert_close(*gradients)


def test_a_parameter_that_changes_before_the_backward_is_noticed():
    """It is what the copies are made of, as in eager, where the convolution keeps it."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    fast = fxfuse.optimize(copy.deepcopy(model))
    x = randn(2, 4, 9, 9).requires_grad_()
    calls_of(fast, x)
    for each in (model, fast):
        result = each(x)
        with torch.no_grad():
            each[2].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_a_buffer_that_the_step_changes_is_copied_before():
    """Its value after the forward is another one."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", randn(8))
            self.weight = nn.Parameter(randn(8, seed=1))

        def forward(self, x):
            before = self.seen.flip(0)
            self.seen.mul_(0.5)
            return (x * self.weight * before).tanh() * before

    model = Counting()
    fast = fxfuse.optimize(copy.deepcopy(model))
    x = randn(16, 8, seed=2).requires_grad_()
    for _ in range(4):
        results = [torch.autograd.grad(each(x).sum(), [x, each.weight]) for each in (model, fast)]
        torch.testing.assert_close(*results)
    torch.testing.assert_close(fast.seen, model.seen)
