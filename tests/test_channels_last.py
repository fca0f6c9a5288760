"""Convolutions in channels_last: nobody outside sees it, and conversions stand at the borders only."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import ON_GPU, OPCHECK, Net, Net2, assert_as_eager, batch_norm, randn, with_stochastic_depth
from test_training import made, step_of
from torch import nn
from torch.autograd import forward_ad

import fxfuse
from fxfuse import channels_last, functional, group_norms
from fxfuse.backend import compiled_graphs
from fxfuse.module import state_of

GAINS, ELEMENTS = channels_last._gains, channels_last._elements


@pytest.fixture(autouse=True)
def as_on_gpu(monkeypatch):
    """Conversions are made of all dtypes, as on a GPU; the CPU computes the same."""
    monkeypatch.setattr(channels_last, "_gains", lambda x: True)
    monkeypatch.setattr(channels_last, "_elements", lambda values: float("inf"))


def convolutions(*channels):
    return nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(channels))


def chain(m, x):
    for layer in m.layers:
        x = F.relu(layer(x))
    return x


def residual(m, x):
    x = F.relu(m.stem(x))
    for layer in m.layers:
        x = F.relu(m.bn(layer(x)) + x)
    return m.pool(x).flatten(1)


def deep(m, x):
    for layer in m.layers:
        x = with_stochastic_depth(F.silu(layer(x)), m.training) + x
    return x


def dense(m, x):
    features = [x := F.relu(m.layers[0](x))]
    for layer in m.layers[1:]:
        features.append(F.silu(layer(features[-1])))
    return m.last(torch.cat(features, 1)), F.max_pool2d(features[0], 2)


def gated(m, x):
    x = chain(m, x)
    gate = torch.sigmoid(m.squeeze(F.adaptive_avg_pool2d(x, 1)))
    return x * gate, x.view(x.shape[0], -1)


def activated(m, x):
    for layer in m.layers:
        y = layer(x)
        x = torch.sigmoid(y) * y + F.avg_pool2d(y, 3, 1, 1)  # pooling in between: no region takes it all
    return x


def in_place(m, x):
    x = F.relu(m.layers[0](x))
    for layer in m.layers[1:]:
        y = F.max_pool2d(layer(x), 3, 1, 1)
        y += x
        x = y
    return x


def reduced(m, x):
    y = F.avg_pool2d(chain(m, x), 3, 1, 1)
    return torch.max(y, 1), y.max(), y.min(dim=2, keepdim=True).values, torch.max(y, F.avg_pool2d(y, 3, 1, 1))


def dropping_nothing(m, x):
    for layer in m.layers:
        x = F.dropout(layer(x), 0.0, training=True).sin()
    return x


class NormOfItsOwn(nn.BatchNorm2d):
    """Asks for the rank of what it is given, as torch's forward does."""

    def forward(self, x):
        return super().forward(x).relu()


def normalised(m, x):
    for layer in m.layers:
        x = m.norm(layer(x))
    return x


def normalised_pixels(m, x):
    """Rows of channels, as in ConvNeXt, SAM and CvT."""
    for layer in m.layers:
        x = layer(x)
        mean = x.mean(1, keepdim=True)
        x = (x - mean) / ((x - mean).pow(2).mean([1], keepdim=True) + 1e-5).sqrt() * m.scale[:, None, None]
        spread = torch.var(x, dim=1, unbiased=False, keepdim=True) + x.std(1, True, True)
        x = (x - torch.mean(x, dim=1, keepdim=True)) / (spread + 1).sqrt() + x.amax(1, keepdim=True)
    return x, mean


def of_length_one(m, x):
    """The RMSNorm of denoising-diffusion-pytorch."""
    for layer in m.layers:
        x = F.silu(F.normalize(layer(x), dim=1) * m.scale.view(1, -1, 1, 1) * 8**0.5)
    return x


MODELS = {
    "of length one": Net(of_length_one, layers=convolutions(3, 8, 8, 8, 8), scale=nn.Parameter(torch.rand(8))),
    "normalised pixels": Net(normalised_pixels, layers=convolutions(3, 8, 8, 8, 8), scale=nn.Parameter(torch.rand(8))),
    "normalised": Net(normalised, layers=convolutions(3, 8, 8, 8, 8), norm=NormOfItsOwn(8)),
    "dropping nothing": Net(dropping_nothing, layers=convolutions(3, 8, 8, 8, 8)),
    "activated": Net(activated, layers=convolutions(3, 8, 8, 8, 8)),
    "in place": Net(in_place, layers=convolutions(3, 8, 8, 8, 8)),
    "chain": Net(chain, layers=convolutions(3, 8, 8, 16, 8)),
    "residual": Net(
        residual,
        stem=nn.Conv2d(3, 8, 3),
        layers=convolutions(8, 8, 8, 8),
        bn=batch_norm(),
        pool=nn.AdaptiveAvgPool2d(1),
    ),
    "deep": Net(deep, layers=convolutions(3, 3, 3, 3, 3)),
    "dense": Net(dense, layers=convolutions(3, 4, 4, 4, 4), last=nn.Conv2d(16, 4, 1)),
    "gated": Net(gated, layers=convolutions(3, 8, 8, 8), squeeze=nn.Conv2d(8, 8, 1)),
    "reduced": Net(reduced, layers=convolutions(3, 8, 8, 8, 8)),
    "unfused": Net(lambda m, x: m.layers(x) * 2, layers=nn.Sequential(*convolutions(3, 4, 5, 6, 7))),
}


def borders(fast):
    """How many conversions there and back the graph has."""
    targets = [node.target for node in fast.graph.nodes]
    return targets.count(channels_last.to_channels_last), targets.count(channels_last.as_before)


def convolution_names(fast):
    return [node.name for node in fast.graph.nodes if node.target is functional.conv2d or node.op == "call_module"]


def volumes(*channels, **options):
    return nn.ModuleList(nn.Conv3d(a, b, 3, padding=1, **options) for a, b in itertools.pairwise(channels))


def residual_volumes(m, x):
    x = F.max_pool3d(F.relu(m.stem(x)), 3, 1, 1)
    for layer in m.layers:
        x = F.relu(m.bn(layer(x)) + x)
    return m.pool(x).flatten(1)


def dense_volumes(m, x):
    features = [x := F.relu(m.layers[0](x))]
    for layer in m.layers[1:]:
        features.append(F.silu(layer(features[-1])))
    return m.last(torch.cat(features, 1)), F.avg_pool3d(features[0], 2), features[1].mean((2, 3))


VOLUMES = {
    "chain": Net(chain, layers=volumes(3, 8, 8, 16, 8)),
    "residual": Net(
        residual_volumes,
        stem=nn.Conv3d(3, 8, 3, bias=False),
        layers=volumes(8, 8, 8, 8),
        bn=nn.BatchNorm3d(8),
        pool=nn.AdaptiveAvgPool3d(1),
    ),
    "dense": Net(dense_volumes, layers=volumes(3, 4, 4, 4, 4), last=nn.Conv3d(16, 4, 1)),
    "upsampled": Net(
        lambda m, x: m.up(chain(m, x)).relu(), layers=volumes(3, 4, 5, 6, 7), up=nn.ConvTranspose3d(7, 3, 2, 2)
    ),
}


DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", VOLUMES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "slice"])
def test_volumes_are_convolved_in_channels_last_3d(name, layout, device, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of few channels it is used in channels_last only
    model = copy.deepcopy(VOLUMES[name]).eval().to(device)
    fast = fxfuse.optimize(model)
    x = randn(2, 3, 5, 9, 10).to(device)
    x = {"contiguous": x, "channels_last": x.to(memory_format=torch.channels_last_3d), "slice": x[..., 1:, 2:]}[layout]
    with torch.no_grad():
        for _ in range(3):  # the last as a program
            assert_as_eager(model, fast, x)
    assert borders(fast)[0] == 1
    if layout == "contiguous":
        assert "convolutions run in channels_last" in str(fxfuse.explain(fast, verbose=True))


@pytest.mark.parametrize("dimensions, back", [((2, 3, 4), 0), ((-1, -2, -3), 0), ((2, 3), 1)])
def test_only_means_of_all_voxels_have_no_strides_of_volumes(dimensions, back):
    fast = fxfuse.optimize(Net(lambda m, x: chain(m, x).mean(dimensions) * 2, layers=volumes(3, 4, 4, 4, 4)).eval())
    assert borders(fast) == (1, back)


def test_what_is_convolved_is_a_volume_before_it_is():
    """Also what no convolution has made: the strides of a mean of some of its dimensions depend on its own."""

    def forward(m, x):
        parts = F.silu(x), x.tanh(), x.sin()
        y = sum(layer(part) for layer, part in zip(m.first, parts, strict=True))
        return chain(m, y), parts[0].mean((2, 3))

    first = nn.ModuleList(nn.Conv3d(3, 4, 3, padding=1) for _ in range(3))
    model = Net(forward, first=first, layers=volumes(4, 4, 4, 4)).eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        assert_as_eager(model, fast, randn(2, 3, 4, 5, 6))
    assert borders(fast) == (2, 1), "the mean reads what eager has"


def test_volumes_convolved_in_groups_stay_as_they_are():
    fast = fxfuse.optimize(Net(chain, layers=volumes(4, 4, 4, 4, 4, groups=4)).eval())
    assert borders(fast) == (0, 0)


def beside_a_stride(m, x):
    """As in MobileOne's first block: what each pixel gives is added to what its neighbours give."""
    for one, other, layer in zip(m.pixels, m.layers[::2], m.layers[1::2], strict=True):
        x = F.relu(layer(F.relu(one(x) + other(x))))
    return x


@pytest.mark.parametrize(
    ("captured", "channels", "are_last"),
    [(False, 3, False), (False, 15, False), (False, 16, True), (True, 3, False), (True, 15, False)],
)
def test_a_cpu_convolves_few_channels_of_pixels_with_a_stride_as_they_are(captured, channels, are_last):
    """oneDNN writes beyond the memory of their filters' gradient in channels_last."""
    torch._dynamo.reset()
    sizes = [(channels, 16), (16, 16), (16, 16), (16, 16)]
    layers = nn.ModuleList(nn.Conv2d(*size, 3, 2 - place % 2, 1) for place, size in enumerate(sizes))
    pixels = nn.ModuleList([nn.Conv2d(channels, 16, 1, 2), nn.Conv2d(16, 16, 1, 2)])
    model = Net(beside_a_stride, layers=layers, pixels=pixels)
    fast = torch.compile(model, backend="fxfuse") if captured else fxfuse.optimize(model)
    x = randn(2, channels, 18, 18)
    for _ in range(3):
        found = step_of(fast, x)
    for one, other in zip(found, step_of(model, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    (step,) = made(*compiled_graphs(fast)) if captured else made(fast)
    gradients = torch.ops.aten.convolution_backward.default
    of_pixels = [
        x.meta["val"].stride(1) == 1
        for dy, x, weight, *_ in (node.args for node in step.joint.backward.graph.nodes if node.target is gradients)
        if weight.meta["val"].shape[2:] == (1, 1)
    ]
    assert of_pixels == [True, are_last]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "slice"])
def test_results_and_strides_are_eagers(name, layout):
    model = MODELS[name].eval()
    fast = fxfuse.optimize(model)
    x = randn(2, 3, 9, 10)
    x = {"contiguous": x, "channels_last": x.to(memory_format=torch.channels_last), "slice": x[:, :, 1:, 2:]}[layout]
    # eager's own view of a convolution's result is refused there: what eager cannot do is not compared
    refused = RuntimeError if (name, layout) == ("gated", "channels_last") else None
    with torch.no_grad():
        assert_as_eager(model, fast, x, raises=refused)
    assert borders(fast)[0] == 1
    report = str(fxfuse.explain(fast, verbose=True))
    assert "run in channels_last" in report
    copied = x.numel() * 4 / 2**20
    expected = "no copy so far" if layout == "channels_last" else f"{copied:.3g} MB a call"
    assert f"'x' is converted for '{convolution_names(fast)[0]}': {expected}" in report


@pytest.mark.parametrize("name", ["residual", "dense", "gated", "in place"])
def test_calls_that_run_as_programs_are_converted_too(name):
    model = MODELS[name].eval()
    fast = fxfuse.optimize(model)
    for seed in range(4):  # the second of a kind is recorded
        with torch.no_grad():
            assert_as_eager(model, fast, randn(2, 3, 9, 10, seed=seed))
    assert "runs as a program" in str(fxfuse.explain(fast, verbose=True))


@pytest.mark.parametrize(
    ("name", "back"),
    [(name, 2 if name in ("dense", "normalised pixels") else 1) for name in MODELS],
)
def test_conversions_stand_at_the_borders(name, back, monkeypatch):
    fast = fxfuse.optimize(MODELS[name].eval())
    assert borders(fast) == (1, back)
    layouts = []
    convolution = torch.conv2d

    def spy(x, *rest):
        layouts.append(x.is_contiguous(memory_format=torch.channels_last))
        return convolution(x, *rest)

    monkeypatch.setattr(F, "conv2d", spy)
    with torch.no_grad():
        fast(randn(2, 3, 9, 10))
    assert layouts and all(layouts)


def beside_tokens(m, x):
    """The sum lies as its first part does. The other is in channels_last in eager: tokens that are seen as an image."""
    x = F.relu(m.first(x))
    tokens = x.flatten(2).transpose(1, 2).contiguous()
    x = x + m.second(tokens.transpose(1, 2).unflatten(2, x.shape[2:]))
    for layer in m.layers:
        x = F.relu(torch.cat(layer(x).chunk(2, 1), 1)) * m.scale
    return x


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_dynamo_notes_as_contiguous_is_so_whatever_it_comes_from(dynamic):
    torch._dynamo.reset()
    first, second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)
    scale = nn.Parameter(torch.rand(1, 8, 1, 1))
    model = Net(beside_tokens, first=first, second=second, layers=convolutions(*[8] * 7), scale=scale).eval()
    fast = torch.compile(model, backend="fxfuse", dynamic=dynamic)
    with torch.no_grad():
        for _ in range(3):
            assert_as_eager(model, fast, randn(2, 3, 9, 10))
    graphs = [graph for graph in compiled_graphs(fast) if dynamic == any("Sym" in str(type(n.meta.get("example_value")))
                                                                        for n in graph.graph.nodes)]  # fmt: skip
    (inside,) = {state_of(graph).layouts.convolutions for graph in graphs}
    assert inside < 6 if dynamic else inside >= 6, "with sizes that vary, nothing is known of strides"


def pooled_tokens(m, x, change=lambda image: image):
    """As in multiscale vision transformers: tokens are an image for one convolution."""
    image = change(x.view(2, 6, 5, 8).permute(0, 3, 1, 2).contiguous())
    y = m.norm(m.conv(image).reshape(2, 2, 4, 30).transpose(2, 3).reshape(2, 60, 4))
    return y * 2 + x.sum()


def attending(m, x):
    """What heads make of tokens is an image again: a copy, as no view of it is one."""
    x = chain(m, x)
    heads = m.mix(x.flatten(2).transpose(1, 2)).view(2, 45, 2, 8)
    return chain(m, heads.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("captured", ["by fx", "by Dynamo"])
def test_images_that_attention_makes_are_convolved_in_channels_last(captured, monkeypatch):
    model = Net(attending, layers=convolutions(8, 8, 8, 8, 8), mix=nn.Linear(8, 8)).eval()
    fast = fxfuse.optimize(model) if captured == "by fx" else torch.compile(model, backend="fxfuse")
    with torch.no_grad():
        for seed in range(4):
            assert_as_eager(model, fast, randn(2, 8, 9, 10, seed=seed))
    layouts, convolution = [], torch.conv2d
    if captured == "by fx":
        assert borders(fast) == (2, 1)
        monkeypatch.setattr(
            F, "conv2d", lambda x, *rest: layouts.append(x.is_contiguous(memory_format=torch.channels_last))
            or convolution(x, *rest)
        )  # fmt: skip
        fxfuse.optimize(model)(randn(2, 8, 9, 10))
        assert len(layouts) == 8 and all(layouts)
    else:
        (graph,) = fxfuse.backend.compiled_graphs(model)
        assert borders(graph) == (2, 1)


def test_images_that_are_views_of_tokens_stay_as_they_are():
    """Where a reshape copies nothing, what comes of it lies as in eager."""

    def forward(m, x):
        return chain(m, x.transpose(1, 2).reshape(2, 8, 9, 10))

    model = Net(forward, layers=convolutions(8, 8, 8, 8, 8)).eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for seed in range(4):
            x = randn(2, 90, 8, seed=seed)
            assert_as_eager(model, fast, x)
            assert_as_eager(model, fast, x.transpose(1, 2).contiguous().transpose(1, 2))  # of which it is a view


def turned(m, x):
    """Sums whose strides are those of their first term: in neither layout."""
    x = chain(m, x)
    return beyond(m, x.mT + x)


def beside_attention(m, x):
    """As in the middle of an image's decoder: the sums lie as the tokens do, in channels_last."""
    x = chain(m, x)
    tokens = x.flatten(2).mT
    return beyond(m, (tokens.softmax(-1) @ (tokens.mT @ tokens)).mT.view(x.shape) + x)


def beyond(m, x):
    for layer in m.behind:
        x = x + F.relu(layer(F.relu(x)))
    return x, x.mean([2, 3])


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("body", [turned, beside_attention])
def test_strides_that_dynamo_notes_are_restored(body, batch, gradients):
    layers, behind = convolutions(3, 8, 8, 8, 8), convolutions(8, 8, 8, 8, 8)
    model, x = Net(body, layers=layers, behind=behind).eval(), randn(batch, 3, 9, 9)
    torch._dynamo.reset()
    fast = torch.compile(model, backend="fxfuse")
    x.requires_grad_(gradients)
    for _ in range(4):
        with torch.set_grad_enabled(gradients):
            results, expected = fast(x), model(x)
        assert [one.stride() for one in results] == [one.stride() for one in expected]
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)
        if gradients:
            wanted = [torch.autograd.grad(sum(one.square().sum() for one in each), [x, *model.parameters()])
                      for each in (results, expected)]  # fmt: skip
            torch.testing.assert_close(*wanted, rtol=1e-4, atol=1e-4)
    *_, graph = compiled_graphs(model)
    if not gradients:
        back = [node.kwargs for node in graph.graph.nodes if node.target is channels_last.as_before]
        assert state_of(graph).layouts.convolutions == (8 if body is turned else 4)
        assert any(kwargs.get("strides") == results[0].stride() for kwargs in back) == (body is turned)


def depthwise():
    return nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)


def test_images_that_are_copies_of_tokens_lie_as_the_tokens_do():
    model = Net(pooled_tokens, conv=depthwise(), norm=nn.LayerNorm(4)).eval()
    fast = fxfuse.optimize(model)
    for seed in range(4):
        with torch.no_grad():
            assert_as_eager(model, fast, randn(2, 30, 8, seed=seed))
    assert borders(fast) == (1, 0)
    assert "is converted for 'conv': no copy so far" in str(fxfuse.explain(fast, verbose=True))


def test_programs_give_pooled_images_the_strides_that_torch_sets():
    """Those of dimensions of size 1, after the fact."""
    model = Net(lambda m, x: (lambda y: (y, y.sigmoid()))(F.adaptive_avg_pool2d(m.layer(x).relu(), 1)),
                layer=nn.Conv2d(3, 8, 3)).eval()  # fmt: skip
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for seed in range(4):
            x = randn(2, 3, 9, 10, seed=seed).to(memory_format=torch.channels_last)
            assert_as_eager(model, fast, x)
            assert [y.stride() for y in fast(x)] == [y.stride() for y in model(x)]


def test_results_that_are_one_tensor_stay_one():
    model = Net(lambda m, x: (lambda y: (y, y.contiguous()))(chain(m, x)), layers=convolutions(3, 8, 8, 8, 8)).eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for _ in range(4):
            assert_as_eager(model, fast, randn(2, 3, 9, 10))
            first, second = fast(randn(2, 3, 9, 10))
            assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize("change", [F.relu_, lambda image: (image.mul_(2), image)[1]])
def test_images_that_are_overwritten_are_copies_of_the_tokens(change):
    model = Net(lambda m, x: pooled_tokens(m, x, change), conv=depthwise(), norm=nn.LayerNorm(4)).eval()
    fast = fxfuse.optimize(model)
    for seed in range(4):
        with torch.no_grad():
            assert_as_eager(model, fast, randn(2, 30, 8, seed=seed))


def test_gradients_pass_through():
    model = MODELS["residual"].eval()
    fast = fxfuse.optimize(model)
    gradients = []
    for call in (model, fast):
        x = randn(2, 3, 9, 10).requires_grad_()
        call(x).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("size", [(2, 3, 1, 1), (2, 3, 3, 1), (1, 1, 9, 10)])
def test_shapes_whose_layouts_coincide(size):
    model = Net(chain, layers=convolutions(size[1], 8, 1, 4, 8)).eval()
    with torch.no_grad():
        assert_as_eager(model, fxfuse.optimize(model), randn(*size))


def test_few_convolutions_and_training_stay_as_they_are():
    assert borders(fxfuse.optimize(Net(chain, layers=convolutions(3, 8, 8)).eval())) == (0, 0)
    assert borders(fxfuse.optimize(MODELS["chain"].train())) == (0, 0)


def test_two_inputs_are_converted_each():
    model = Net2(lambda m, x, y: chain(m, x) + chain(m, y), layers=convolutions(3, 8, 8, 8, 8)).eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        assert_as_eager(model, fast, randn(2, 3, 9, 10), randn(2, 3, 9, 10, seed=1))
    assert borders(fast)[0] == 2


def test_values_that_are_overwritten_are_left_alone():
    def forward(m, x):
        y = chain(m, x)
        z = y.view(-1)
        z[0] = 5.0
        return y, z

    model = Net(forward, layers=convolutions(3, 8, 8, 8, 8)).eval()
    fast = fxfuse.optimize(model)
    assert borders(fast) == (1, 1), "before the last convolution, not behind it"
    with torch.no_grad():
        assert_as_eager(model, fast, randn(2, 3, 9, 10))


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "images", "converted"), [
    (torch.float32, 20, True), (torch.float64, 20, False), (torch.float32, 1, False),
])  # fmt: skip
def test_a_cpu_convolves_in_channels_last_what_onednn_computes_if_images_outweigh_weights(
    dtype, images, converted, monkeypatch
):
    monkeypatch.setattr(channels_last, "_gains", GAINS)
    monkeypatch.setattr(channels_last, "_elements", ELEMENTS)
    model = Net(chain, layers=convolutions(3, 16, 16, 16, 16)).eval().to(dtype)
    fast = fxfuse.optimize(model)
    assert_as_eager(model, fast, randn(images, 3, 9, 9, dtype=dtype))
    copied = [channels_last.bytes_of(conversion.number) for conversion in state_of(fast).layouts.conversions]
    assert copied and all((size is not None) is converted for size in copied)


@pytest.mark.parametrize("gradients", [False, True])
def test_dynamos_graphs_work_in_channels_last_unless_they_train(gradients):
    torch._dynamo.reset()
    model, x = (
        nn.Sequential(*(nn.Sequential(layer, batch_norm(), nn.ReLU()) for layer in convolutions(3, 8, 8, 8, 8))),
        randn(2, 3, 9, 9),
    )
    model.eval()
    before = set(compiled_graphs())
    compiled = torch.compile(model, backend="fxfuse")
    with torch.set_grad_enabled(gradients):
        for _ in range(3):
            assert_as_eager(model, compiled, x)
    (graph,) = set(compiled_graphs()) - before
    layouts = state_of(graph).layouts
    assert (layouts.convolutions, len(layouts.conversions)) == ((0, 0) if gradients else (4, 2))


class Grouped(nn.Module):
    """Blocks as of a diffusion model: two kinds of group norm, convolutions, and a residual."""

    def __init__(self, channels=16, groups=2, blocks=3):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(groups, channels) for _ in range(blocks))
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2 * blocks))
        self.groups, self.scale = groups, nn.Parameter(torch.randn(channels))

    def forward(self, x):
        x = self.first(x)
        for number, norm in enumerate(self.norms):
            y = self.convolutions[2 * number](F.silu(norm(x)))
            x = x + self.convolutions[2 * number + 1](F.gelu(F.group_norm(y, self.groups, self.scale)))
        return x


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_group_norms_keep_channels_last(on_gpu, gradients, monkeypatch):
    """Also on a GPU, where torch's makes contiguous results of them; with gradients by torch's operators."""
    calls, operator = [], group_norms._operator
    monkeypatch.setattr(group_norms, "_runs_on_gpu", lambda x: on_gpu)
    monkeypatch.setattr(group_norms, "_operator", lambda *args: calls.append(args) or operator(*args))
    torch.manual_seed(0)
    model, x = Grouped().eval(), randn(2, 3, 9, 10)
    fast = fxfuse.optimize(copy.deepcopy(model))
    assert borders(fast) == (1, 1) and state_of(fast).layouts.convolutions == 7
    x.requires_grad_(gradients)
    for _ in range(4):
        with torch.set_grad_enabled(gradients):
            result, expected = fast(x), model(x)
        assert result.stride() == expected.stride()
        torch.testing.assert_close(result, expected)
        if gradients:
            wanted = [torch.autograd.grad(one.square().sum(), [x, *net.parameters()])
                      for one, net in ((result, fast), (expected, model))]  # fmt: skip
            torch.testing.assert_close(*wanted, rtol=1e-4, atol=1e-4)
    assert bool(calls) == (on_gpu and not gradients)


def test_convolutions_run_inside_of_vmap():
    """Where no tensor says whether it is in channels_last. Also with weights of several models."""
    model, x = Net(chain, layers=convolutions(3, 8, 8, 8, 8)).eval(), randn(3, 2, 3, 9, 10)
    fast = fxfuse.optimize(copy.deepcopy(model))
    assert borders(fast) == (1, 1)
    with torch.no_grad():
        actual, expected = (torch.vmap(net)(x) for net in (fast, model))
        torch.testing.assert_close(actual, expected)
        stacked = {name: torch.stack([value, value * 2]) for name, value in model.named_parameters()}
        several = [torch.vmap(lambda weights, net=net: torch.func.functional_call(net, weights, (x[0],)))(stacked)
                   for net in (fast, model)]  # fmt: skip
        torch.testing.assert_close(*several)


def test_transformations_go_through_group_norms_by_torchs_operators(monkeypatch):
    monkeypatch.setattr(group_norms, "_runs_on_gpu", lambda x: True)
    model, x = Grouped().eval().requires_grad_(False), randn(3, 2, 3, 9, 10)
    fast = fxfuse.optimize(copy.deepcopy(model))
    assert borders(fast) == (1, 1)
    with monkeypatch.context() as patched:
        patched.setattr(group_norms, "_operator", lambda *_: pytest.fail("torch knows no derivative of it"))
        with torch.no_grad():
            torch.testing.assert_close(torch.vmap(fast)(x), torch.vmap(model)(x))
        torch.testing.assert_close(*(torch.func.jvp(net, (x[0],), (x[1],)) for net in (fast, model)))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x[0], x[1])
            torch.testing.assert_close(*(forward_ad.unpack_dual(net(dual)).tangent for net in (fast, model)))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            assert fast(x[0]).dtype == model(x[0]).dtype


@pytest.mark.parametrize("groups", [8, 2])
def test_group_norms_of_any_groups_keep_channels_last(groups):
    """Of one channel each, too, and without a weight."""
    model = Net(lambda m, x: m.a(F.group_norm(m.b(m.a(m.b(x))), groups)), a=nn.Conv2d(8, 8, 3),
                b=nn.Conv2d(8, 8, 3, padding=2)).eval()  # fmt: skip
    fast = fxfuse.optimize(model)
    assert any(node.target is group_norms.group_norm for node in fast.graph.nodes)
    with torch.no_grad():
        assert_as_eager(model, fast, randn(2, 8, 9, 10))


@OPCHECK
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_operator_for_group_norms_is_one_in_good_standing(layout):
    x, weight = randn(2, 16, 5, 6).contiguous(memory_format=layout), randn(16)
    arguments = (x, 2, weight, None, 1e-5)
    torch.library.opcheck(torch.ops.fxfuse.group_norm_in_channels_last.default, arguments)
    made = torch.ops.fxfuse.group_norm_in_channels_last(*arguments)
    assert made.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(made, F.group_norm(x, 2, weight))


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=ON_GPU) for dtype in (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize(
    ("channels", "groups", "size"),
    [(64, 4, 17), (320, 32, 16), (48, 3, 100), (64, 32, 17), (32, 2, 130), (64, 32, 130)],
)
@torch.no_grad()
def test_group_norms_on_a_gpu(channels, groups, size, dtype):
    torch.manual_seed(0)
    model, x = Grouped(channels, groups).eval().to("cuda", dtype), torch.randn(2, 3, size, size + 2).to("cuda", dtype)
    exact, eager = copy.deepcopy(model).double()(x.double()), model(x)
    fast = fxfuse.optimize(copy.deepcopy(model))
    for _ in range(4):
        result = fast(x)
        assert result.stride() == eager.stride()
        errors = [(one.double() - exact).norm() for one in (result, eager)]
        assert errors[0] <= 1.5 * errors[1] + 1e-6 * exact.norm()
    assert state_of(fast).layouts.convolutions == 7
    (made,) = state_of(fast).programs.programs
    assert not made.calls.keys() & {"group_norm_in_channels_last", "native_group_norm"}


def split_and_enlarged(m, x):
    """Some channels, in each way that there is, and images that become larger."""
    x = F.relu(m.layers[0](x))
    a, b = x.split(4, 1)
    a = F.interpolate(F.relu(m.halves[0](a)), scale_factor=2.0, mode="bilinear")
    b = F.interpolate(F.relu(m.halves[1](b)), scale_factor=2.0)
    c = F.interpolate(F.relu(m.halves[0](x[:, :4])), scale_factor=2.0, mode="nearest-exact")
    d = F.interpolate(F.relu(m.halves[1](x.narrow(1, 4, 4))), scale_factor=2.0)
    x = torch.cat([a + c, b + d], 1)
    for layer in m.layers[1:]:
        x = F.relu(layer(x))
    return x


def normalised_in_groups(m, x):
    """What comes of an operator that torch.export does not take apart is overwritten."""
    for layer in m.layers:
        x = F.relu(F.group_norm(layer(x), 2, m.scale), inplace=True)
    return x


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("body", [chain, split_and_enlarged, normalised_in_groups])
def test_exported_programs_work_in_channels_last(body, gradients):
    """Whether gradients are wanted is not known when a program is optimised, so operators in training mode decide."""
    layers = convolutions(3, 8, 8, 8, 8)
    model = Net(body, layers=layers, halves=convolutions(4, 4, 4), scale=nn.Parameter(torch.randn(8))).eval()
    x = randn(2, 3, 9, 9)
    exported = torch.export.export(model, (x,)).module()
    targets = {str(node.target) for node in exported.graph.nodes}
    if body is not chain and not targets & {"aten.upsample_bilinear2d.vec", "aten.group_norm.default"}:
        pytest.skip(f"torch {torch.__version__} exports these operations as others")
    with torch.set_grad_enabled(gradients):
        fast = fxfuse.optimize(exported)
    assert_as_eager(model, fast, x)
    layouts = state_of(fast).layouts
    assert (layouts.convolutions, len(layouts.conversions)) == ((8, 2) if body is split_and_enlarged else (4, 2))


@pytest.mark.parametrize(
    ("body", "trains"),
    [
        (lambda m, x: F.dropout(chain(m, x), training=True), True),
        (lambda m, x: F.batch_norm(chain(m, x), m.mean, m.var, training=True), True),
        (
            lambda m, x: chain(m, x) + F.batch_norm(m.mean.view(1, 4, 2), None, None, training=True).view(1, 8, 1, 1),
            False,
        ),
    ],
    ids=["dropout", "running statistics", "standardised"],
)
def test_exported_programs_that_train_stay_as_they_are(body, trains):
    model = Net(body, layers=convolutions(3, 8, 8, 8, 8)).eval()
    model.register_buffer("mean", torch.randn(8))
    model.register_buffer("var", torch.ones(8))
    fast = fxfuse.optimize(torch.export.export(model, (randn(2, 3, 9, 9),)).module())
    assert state_of(fast).layouts.convolutions == (0 if trains else 4)
