"""Networks from transformers, with random weights: what is fused is what runs, and the outputs are eager's."""

import pytest
import torch
from helpers import randn
from torch import nn

import fxfuse

transformers = pytest.importorskip("transformers")


def resnet50():
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=10))


def mobilenet_v2(**options):
    config = transformers.MobileNetV2Config(num_labels=10, image_size=64, **options)
    return transformers.MobileNetV2ForImageClassification(config)


def randomised(model):
    """Evaluation mode, with batch statistics that matter."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)
    return model.eval()


NETWORKS = {
    "ResNet-50": (resnet50, 53, 53),
    "MobileNetV2": (mobilenet_v2, 52, 0),  # pads by the input's size, module by module
    "MobileNetV2 with fixed padding": (lambda: mobilenet_v2(tf_padding=False), 52, 52),
}
"""Name: the model, how many convolutions it has, and how many must be fused."""


@pytest.fixture(scope="module", params=NETWORKS)
def network(request):
    make, convolutions, fused = NETWORKS[request.param]
    torch.manual_seed(0)
    model = randomised(make())
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == convolutions
    x = randn(1, 3, 64, 64)
    fast = fxfuse.optimize(model, (x,))
    return model, fast, x, convolutions, fused


def test_outputs_are_eagers(network):
    model, fast, x, *_ = network
    found = fxfuse.verify(model, fast, (x,))
    # ten numbers at the end of fifty layers: the two errors are single draws of much the same noise
    assert found.ok or found.error < 3 * found.eager_error, found
    with torch.no_grad():
        by_position, by_name = fast(x), fast(pixel_values=x)
    assert type(by_name) is type(by_position) is type(model(x))
    assert torch.equal(by_name.logits, by_position.logits)


def test_every_convolution_is_fused_or_has_its_reason(network):
    _, fast, _, convolutions, fused = network
    found = fxfuse.explain(fast)
    anchors = [region for region in found.regions if region.anchor == "conv2d"]
    assert len(anchors) >= fused
    assert all(region.kernel is not None for region in anchors), "what the report calls fused is what runs"
    untraced = [item for item in found.skipped if "runs as Python" in item.reason]
    reasons = [item for item in found.skipped if "conv" in item.node or "runs as Python" in item.reason]
    assert len(anchors) + len(reasons) >= convolutions
    assert all(".py:" in item.reason for item in untraced), "the line that stopped the trace"


def test_fused_regions_are_what_runs(network):
    _, fast, x, _, fused = network
    with torch.no_grad(), torch.profiler.profile() as profile:
        fast(x)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls.get("fxfuse::conv2d", 0) >= fused
    assert calls.get("aten::batch_norm", 0) + calls.get("fxfuse::conv2d", 0) == 52 + (fused == 53)
