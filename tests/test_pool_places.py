"""The places of largest elements that max-pooling keeps for its gradient, in the place of torch's indices."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import OPCHECK, Net, conv, randn
from test_loops import GPUS, where_steps_are
from test_training import calls_of, made, step_of
from torch import nn

import fxfuse
from fxfuse.module import state_of

NAN, LOW = math.nan, -math.inf
POOLS = {  # the image's size, then sides, stride, padding, ceil_mode
    "pairs": ((8, 6), [2, 2], [2, 2], [0, 0], False),
    "overlapping": ((9, 8), [3, 3], [2, 2], [1, 1], False),
    "on to the end": ((7, 8), [2, 3], [3, 2], [0, 1], True),
    "with gaps": ((8, 8), [1, 2], [3, 3], [0, 0], False),
    "volumes": ((4, 5, 6), [2, 1, 3], [1, 2, 2], [1, 0, 1], False),
    "one window": ((3, 3), [3, 3], [1, 1], [0, 0], False),
}
CONTENTS = {
    "of equal elements": lambda x: x.round(),
    "of infinities": lambda x: x.masked_fill(x < 1, LOW),
    "of NaN": lambda x: x.masked_fill(x > 1, NAN),
    "of infinities alone": lambda x: x.masked_fill(x < 9, LOW),
}


def images(name, contents, channels_last):
    """Images in one of two layouts. On a CPU torch takes windows in channels_last whose elements are all -inf for ones
    of the first depth."""
    size, *said = POOLS[name]
    if channels_last and len(size) == 3 and "infinities" in contents:
        pytest.skip("torch's own gradient goes to other windows")
    x = randn(2, 3, *size)
    if channels_last:
        x = x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    return x, said


def torchs(x, sides, steps, around, ceil_mode):
    pool = F.max_pool2d if len(sides) == 2 else F.max_pool3d
    return pool(x, sides, steps, around, 1, ceil_mode)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("name", POOLS)
def test_the_gradient_goes_where_torchs_goes(name, contents, channels_last):
    x, said = images(name, contents, channels_last)
    x = CONTENTS[contents](x).requires_grad_()
    result = torchs(x, *said)
    gradient = randn(*result.shape, seed=2)
    (expected,) = torch.autograd.grad(result, x, gradient)
    places = torch.ops.fxfuse.max_pool_places(x.detach(), *said)
    assert (places.dtype, places.shape) == (torch.uint8, result.shape)
    matters = [dim for dim in range(result.dim()) if result.shape[dim] > 1]
    assert [places.stride(dim) for dim in matters] == [result.stride(dim) for dim in matters]
    actual = torch.ops.fxfuse.max_pool_gradient(gradient, places, x.shape, x.stride(), *said)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert actual.stride() == x.stride()


@OPCHECK
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", POOLS)
def test_the_operators_pass_torchs_own_checks(name):
    size, *said = POOLS[name]
    for x in (randn(2, 3, *size), randn(2, *size, 3).movedim(-1, 1), randn(4, 3, *size)[::2]):
        places = torch.ops.fxfuse.max_pool_places(x, *said)
        torch.library.opcheck(torch.ops.fxfuse.max_pool_places.default, (x, *said))
        arguments = (randn(*places.shape), places, list(x.shape), list(torch.empty_like(x).stride()), *said)
        torch.library.opcheck(torch.ops.fxfuse.max_pool_gradient.default, arguments)


@pytest.fixture(params=GPUS)
def gpu(request, monkeypatch):
    return where_steps_are(request.param, monkeypatch)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("name", POOLS)
def test_a_step_keeps_places(name, contents, channels_last, gpu):
    x, said = images(name, contents, channels_last)
    model = Net(lambda m, x: torchs(CONTENTS[contents](x * m.scale), *said).exp())
    model.scale = nn.Parameter(torch.ones(()))
    model.to(gpu)
    x = x.to(gpu).requires_grad_()
    fast = fxfuse.optimize(copy.deepcopy(model))
    found, expected = calls_of(fast, x), step_of(model, x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    for step in made(fast):
        kept = [node.meta["val"].dtype for node in step.joint.backward.graph.nodes if node.op == "placeholder"]
        assert torch.uint8 in kept and torch.int64 not in kept
        for _, graph in step.graphs:
            (program,) = state_of(graph).programs.programs
            assert not [name for name in program.calls if "pool" in name], program.code


def test_no_mask_is_kept_of_a_relu_before_the_pooling(gpu):
    """The backward of the normalisation reads what it can be computed from."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)).to(gpu)
    fast, x = fxfuse.optimize(copy.deepcopy(model)), randn(2, 3, 8, 8).to(gpu)
    for one, other in zip(calls_of(fast, x), step_of(model, x), strict=True):
        torch.testing.assert_close(one, other)
    for step in made(fast):
        kept = [node.meta["val"] for node in step.joint.backward.graph.nodes if node.op == "placeholder"]
        assert [value.dtype for value in kept if value.dtype != torch.float32] == [torch.uint8]


IMAGES = [name for name, (size, *_) in POOLS.items() if len(size) == 2]


@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("name", IMAGES)
def test_a_step_on_a_cpu_keeps_places_of_images_in_channels_last(name, contents):
    size, *said = POOLS[name]
    model = Net(lambda m, x: torchs(x * m.scale, *said).exp())
    model.scale = nn.Parameter(torch.ones(()))
    x = CONTENTS[contents](randn(2, 21, *size)).to(memory_format=torch.channels_last).requires_grad_()
    fast = fxfuse.optimize(copy.deepcopy(model))
    for one, other in zip(calls_of(fast, x, count=4), step_of(model, x), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    for step in made(fast):
        for _, graph in step.graphs:
            (program,) = state_of(graph).programs.programs
            assert not [name for name in program.calls if "pool" in name], program.code


@pytest.mark.parametrize("x", [randn(2, 21, 6, 8), randn(2, 3, 6, 8).to(memory_format=torch.channels_last)])
def test_on_a_cpu_other_images_have_torchs_indices(x):
    fast = fxfuse.optimize(Net(lambda m, x: F.max_pool2d(x * 2, 2)))
    x = x.requires_grad_()
    for one, other in zip(calls_of(fast, x), step_of(Net(lambda m, x: F.max_pool2d(x * 2, 2)), x), strict=True):
        torch.testing.assert_close(one, other)
    for step in made(fast):
        assert "max_pool_places" not in step.joint.forward.code


LEFT = {
    "indices are read": lambda m, x: (lambda made: (made[0], made[1] * 2.0))(
        torch.ops.aten.max_pool2d_with_indices(m.conv(x), [2, 2])
    ),
    "dilated": lambda m, x: F.max_pool2d(m.conv(x), 2, 1, 0, 2),
    "large": lambda m, x: F.max_pool2d(m.conv(x), 5, 1, 2),
    "one image": lambda m, x: F.max_pool2d(m.conv(x)[0], 2),
    "float64": lambda m, x: F.max_pool2d(m.conv(x).double(), 2).float(),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_pooling_is_left_alone(name, gpu):
    model = Net(LEFT[name], conv=conv()).to(gpu)
    x = randn(2, 4, 9, 8).to(gpu).requires_grad_()
    fast = fxfuse.optimize(copy.deepcopy(model))
    for one, other in zip(calls_of(fast, x), step_of(model, x), strict=True):
        torch.testing.assert_close(one, other)
    for step in made(fast):
        assert "max_pool_places" not in step.joint.forward.code
