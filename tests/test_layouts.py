"""Layouts of whole graphs: networks drawn at random, compared with eager in all that a caller sees."""

from __future__ import annotations

import gc
import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from helpers import batch_norm
from torch import fx, nn

import fxfuse
from fxfuse import channels_last, plans
from fxfuse.problem import OPTION_NAMES, parsed, run_reference

CHANNELS = 8


@pytest.fixture(autouse=True)
def as_on_gpu(monkeypatch):
    """Conversions are made on a GPU; the CPU computes the same, here region by region with torch."""

    def by_torch(kind, epilogue, values, strict, region, fp32, pool, *tensors):
        options = tuple(zip(OPTION_NAMES[kind], values, strict=True))
        return run_reference(kind, options, parsed(epilogue), pool, *tensors)

    monkeypatch.setattr(channels_last, "_gains", lambda x: True)
    monkeypatch.setattr(channels_last, "_elements", lambda values: float("inf"))
    monkeypatch.setattr(plans, "run", by_torch)


@fx.wrap
def by_a_stranger(x):
    """What looks at strides: fxfuse cannot know what it does."""
    return x + float(x.stride(1))


class StdConv2d(nn.Conv2d):
    """A convolution whose weights are standardised at every call."""

    def forward(self, x):
        shape = (1, self.out_channels, -1)
        weight = F.batch_norm(self.weight.reshape(shape), None, None, training=True, momentum=0.0, eps=1e-5)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, self.stride, self.padding)


class NormAct(nn.BatchNorm2d):
    """A normalisation with its activation, as timm's: a subclass with a forward of its own."""

    def forward(self, x):
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps)
        return F.relu_(x)


def conv(cin=CHANNELS, cout=CHANNELS, size=3, **options):
    return nn.Conv2d(cin, cout, size, padding=size // 2, **options)


def norm_act():
    module = NormAct(CHANNELS)
    module.load_state_dict(batch_norm(CHANNELS).state_dict())
    return module.eval()


# Each makes one value of one or two earlier ones, all of CHANNELS channels and one size.
STEPS = {
    "convolution": (lambda: conv(), lambda m, x, y: F.relu(m(x))),
    "pointwise convolution": (lambda: conv(size=1), lambda m, x, y: m(x) + y),
    "depthwise": (lambda: conv(groups=CHANNELS, bias=False), lambda m, x, y: F.silu(m(x), inplace=True)),
    "unfused": (lambda: conv(bias=False), lambda m, x, y: m(x)),
    "standardised": (
        lambda: StdConv2d(CHANNELS, CHANNELS, 3, padding=1),
        lambda m, x, y: m(x),
    ),
    "transposed": (lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, padding=1), lambda m, x, y: m(x)),
    "padded": (lambda: nn.Conv2d(CHANNELS, CHANNELS, 3), lambda m, x, y: m(F.pad(x, (1, 1, 1, 1)))),
    "normalised": (batch_norm, lambda m, x, y: m(x)),
    "preactivated": (norm_act, lambda m, x, y: m(x)),
    "added": (None, lambda m, x, y: x + y),
    "added in place": (lambda: conv(), lambda m, x, y: m(x).add_(y)),
    "added to a value": (None, lambda m, x, y: (x * 1.5).__iadd__(y)),
    "concatenated": (lambda: conv(2 * CHANNELS, size=1), lambda m, x, y: m(torch.cat([x, y], 1))),
    "squeezed": (
        lambda: conv(size=1),
        lambda m, x, y: x * torch.sigmoid(m(F.relu(y.mean((2, 3), keepdim=True), inplace=True))),
    ),
    "squeezed by pooling": (lambda: conv(size=1), lambda m, x, y: x * torch.sigmoid(m(F.adaptive_avg_pool2d(x, 1)))),
    "pooled": (lambda: nn.MaxPool2d(3, 1, 1), lambda m, x, y: m(x)),
    "enlarged": (
        lambda: nn.Upsample(scale_factor=2),
        lambda m, x, y: F.avg_pool2d(m(x), 2) + F.interpolate(y, size=x.shape[-2:], mode="bilinear"),
    ),
    "chunks": (None, lambda m, x, y: torch.cat([x.chunk(2, 1)[1], F.relu(y.chunk(2, 1)[0])], 1)),
    "slices": (None, lambda m, x, y: torch.cat((x[:, :3], y[:, 3:] * 2), dim=1)),
    "nothing": (nn.Identity, lambda m, x, y: m(x)),
    "groups": (lambda: nn.GroupNorm(2, CHANNELS), lambda m, x, y: m(x)),
    "rolled": (None, lambda m, x, y: torch.roll(x, 1, 2)),
    "attended": (
        lambda: nn.Sequential(nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, CHANNELS)),
        lambda m, x, y: x + m(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    ),
    "tokens": (
        lambda: nn.LayerNorm(CHANNELS),
        lambda m, x, y: m(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(y.shape) * 0.5,
    ),
    "viewed": (None, lambda m, x, y: x.reshape(x.shape[0], -1).view(y.shape) * 2),
    "by a stranger": (None, lambda m, x, y: by_a_stranger(x)),
    "overwritten": (None, lambda m, x, y: _written(x * 0.5)),
    "overwritten before": (None, lambda m, x, y: _written(x)),
    "scaled in place": (lambda: conv(), lambda m, x, y: _scaled(m(x)) + y),
    "scaled with an alias": (lambda: conv(), lambda m, x, y: _scaled(m(x))[:, :4].repeat(1, 2, 1, 1) + y),
    "made contiguous": (None, lambda m, x, y: x.contiguous()),
    "scaled": (None, lambda m, x, y: x.sum((2, 3))[:, :, None, None] * 0.01 + y),
}


def _written(x):
    x[:, 0] = 0.25
    return x


def _scaled(x):
    x.mul_(0.5)
    return x


class Drawn(nn.Module):
    """A network of random steps, some of whose values leave it."""

    def __init__(self, seed, count, names):
        super().__init__()
        choose = random.Random(seed)
        torch.manual_seed(seed)
        self.stem = conv(3)
        self.names = choose.choices(names, k=count)
        makers = [STEPS[name][0] for name in self.names]
        self.steps = nn.ModuleList(nn.Identity() if make is None else make() for make in makers)
        # recent values are likelier, so that the networks are deep
        self.reads = [
            (max(0, index - choose.choice((0, 0, 0, 1, 2, 5))), choose.randint(0, index)) for index in range(count)
        ]
        self.leaving = sorted({count, *choose.sample(range(count + 1), choose.randint(0, 2))})
        self.tail = choose.choice(("none", "classes", "view"))

    def forward(self, x):
        values = [F.relu(self.stem(x))]
        for name, step, (first, second) in zip(self.names, self.steps, self.reads, strict=True):
            values.append(STEPS[name][1](step, values[first], values[second]))
        leaving = [values[index] for index in self.leaving]
        if self.tail == "classes":
            leaving.append(F.adaptive_avg_pool2d(values[-1], 1).flatten(1))
        if self.tail == "view":
            leaving.append(values[-1][:, 2:4])
        return leaving


def in_layouts(x):
    return x, x.to(memory_format=torch.channels_last), x[:, :, 1:, 2:]


def memory(tensors):
    """Which of the tensors share memory."""
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [[a == b for a in places] for b in places]


def assert_same(model, fast, x):
    ours, theirs = x.clone(), x.clone()
    with torch.no_grad():
        try:
            expected = model(theirs)
        except RuntimeError as error:  # eager's own view is refused for such strides
            with pytest.raises(type(error)):
                fast(ours)
            return
        actual = fast(ours)
    if isinstance(expected, torch.Tensor):
        expected, actual = [expected], [actual]
    assert torch.equal(ours, theirs)
    assert memory([ours, *actual]) == memory([theirs, *expected])
    for have, want in zip(actual, expected, strict=True):
        assert have.stride() == want.stride()
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(40))
def test_drawn_networks_are_as_eager(seed):
    model = Drawn(seed, 4 + seed % 12, list(STEPS)).eval()
    fast = fxfuse.optimize(model)
    for x in in_layouts(torch.randn(2, 3, 6, 8)):
        assert_same(model, fast, x)


FRIENDLY = ("convolution", "scaled in place", "pointwise convolution", "depthwise", "standardised", "preactivated",
            "added in place", "added", "concatenated", "squeezed", "padded", "pooled", "chunks")  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_drawn_networks_are_converted_at_their_borders_only(seed):
    model = Drawn(seed, 24, FRIENDLY).eval()
    fast = fxfuse.optimize(model)
    targets = [node.target for node in fast.graph.nodes]
    leaving = len(model.leaving) + (model.tail == "view")
    assert targets.count(channels_last.to_channels_last) == 1
    assert 1 <= targets.count(channels_last.as_before) <= leaving


@pytest.mark.parametrize("seed", range(4))
def test_weights_in_channels_last_decide_as_in_eager(seed):
    model = Drawn(seed, 12, FRIENDLY).eval()
    fast = fxfuse.optimize(model)
    x = torch.randn(2, 3, 6, 8)
    assert_same(model, fast, x)
    for weight in itertools.islice(model.parameters(), seed, None, 3):  # of some layers
        if weight.dim() == 4:
            weight.data = weight.data.to(memory_format=torch.channels_last)
    assert_same(model, fast, x)


# --------------------------------------------------------------------------------------- networks that people build


class RepVGG(nn.Module):
    """Parallel branches, added in place, and an activation in place after them."""

    def __init__(self):
        super().__init__()
        self.stem = conv(3)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [nn.Sequential(conv(), batch_norm()), nn.Sequential(conv(size=1), batch_norm()), batch_norm()]
            )
            for _ in range(4)
        )

    def forward(self, x):
        x = self.stem(x)
        for wide, narrow, same in self.blocks:
            y = wide(x)
            y += narrow(x)
            y += same(x)
            x = F.relu(y, inplace=True)
        return x.mean((2, 3))


class ResNetV2(nn.Module):
    """Normalised before it is convolved, with computed weights."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3)
        self.norms = nn.ModuleList(norm_act() for _ in range(8))
        self.convolutions = nn.ModuleList(StdConv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(8))

    def forward(self, x):
        x = F.max_pool2d(self.stem(F.pad(x, (1, 1, 1, 1))), 3, 1, 1)
        for index in range(0, 8, 2):
            y = self.convolutions[index](self.norms[index](x))
            y = self.convolutions[index + 1](self.norms[index + 1](y))
            x = y + x
        return F.adaptive_avg_pool2d(x, 1).flatten(1)


class Inverted(nn.Module):
    """Depthwise, expanded, depthwise and projected, with squeeze-excite: MobileNetV4's and EfficientNet's blocks."""

    def __init__(self):
        super().__init__()
        self.stem = conv(3)
        blocks = ((conv(groups=8), conv(8, 16, 1), conv(16, 16, 5, groups=16), conv(16, 8, 1)) for _ in range(3))
        self.blocks = nn.ModuleList(nn.ModuleList(block) for block in blocks)
        self.squeeze = nn.ModuleList(nn.Sequential(conv(16, 4, 1), nn.ReLU(True), conv(4, 16, 1)) for _ in range(3))

    def forward(self, x):
        x = self.stem(x)
        for (first, expand, deep, project), squeeze in zip(self.blocks, self.squeeze, strict=True):
            y = F.relu(deep(F.relu(expand(first(x)))))
            y = y * squeeze(y.mean((2, 3), keepdim=True)).sigmoid()
            x = project(y) + x
        return torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)


class UNet(nn.Module):
    """Down and up again, with concatenations; its result is a picture."""

    def __init__(self):
        super().__init__()
        self.stem, self.last = conv(3), conv(8, 2, 1)
        self.down, self.middle, self.up = conv(8, 16), conv(16, 16), conv(24, 8)

    def forward(self, x):
        high = F.relu(self.stem(x))
        low = F.relu(self.middle(F.relu(self.down(F.max_pool2d(high, 2)))))
        low = F.interpolate(low, size=high.shape[-2:], mode="bilinear", align_corners=False)
        return self.last(F.relu(self.up(torch.cat([high, low], 1))))


class DenseNet(nn.Module):
    """Each layer reads the concatenation of all before it."""

    def __init__(self):
        super().__init__()
        self.stem = conv(3)
        self.layers = nn.ModuleList(nn.Sequential(batch_norm(c), nn.ReLU(), conv(c, 8)) for c in range(8, 40, 8))
        self.transition = nn.Sequential(batch_norm(40), nn.ReLU(inplace=True), conv(40, 8, 1), nn.AvgPool2d(2))

    def forward(self, x):
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.transition(torch.cat(features, 1)).mean([2, 3])


class ShuffleUnits(nn.Module):
    """Halves of the channels, one of which is convolved."""

    def __init__(self):
        super().__init__()
        self.stem = conv(3)
        self.units = nn.ModuleList(nn.Sequential(conv(4, 4, 1), nn.ReLU(), conv(4, 4)) for _ in range(4))

    def forward(self, x):
        x = self.stem(x)
        for unit in self.units:
            first, second = x.chunk(2, dim=1)
            x = torch.cat((unit(second), first), dim=1)
        return F.adaptive_avg_pool2d(x, 1)


class Hybrid(nn.Module):
    """Convolutions, and tokens at the end."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(conv(3), nn.ReLU(), conv(), nn.ReLU(), conv(), nn.ReLU(), conv())
        self.norm, self.head = nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, 3)

    def forward(self, x):
        return self.head(self.norm(self.convolutions(x).flatten(2).transpose(1, 2))).mean(1)


NETWORKS = {
    RepVGG: (1, 0),
    ResNetV2: (1, 1),
    Inverted: (1, 1),
    UNet: (1, 1),
    DenseNet: (1, 0),
    ShuffleUnits: (1, 1),
    Hybrid: (1, 0),
}
"""How many conversions each has, there and back. Those back that remain are of a pooled value, or of a result."""


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.__name__)
def test_networks_are_converted_once(network):
    torch.manual_seed(0)
    model = network().eval()
    fast = fxfuse.optimize(model)
    targets = [node.target for node in fast.graph.nodes]
    found = targets.count(channels_last.to_channels_last), targets.count(channels_last.as_before)
    assert found == NETWORKS[network]
    for x in in_layouts(torch.randn(2, 3, 6, 8)):
        assert_same(model, fast, x)
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    assert f"{convolutions} convolutions run in channels_last" in str(fxfuse.explain(fast, verbose=True))


def test_what_is_known_of_conversions_goes_with_the_graph():
    gc.collect()  # graphs of earlier tests
    before = dict(channels_last._copied)
    fast = fxfuse.optimize(UNet().eval())
    with torch.no_grad():
        fast(torch.randn(2, 3, 6, 8))
    assert len(channels_last._copied) == len(before) + 2
    del fast
    gc.collect()
    assert channels_last._copied.keys() <= before.keys()
