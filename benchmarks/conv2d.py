"""Convolutions against eager and torch.compile, in one run: six large ones (and what they take with relu alone), and
the layers of common networks, of some the depthwise ones.

    python benchmarks/conv2d.py --output benchmarks/results
    python benchmarks/conv2d.py --only targets --precisions float32 bfloat16 float16
    python benchmarks/conv2d.py --only "ResNet-50, batch 16" "MobileNetV2, batch 16" --layouts contiguous channels_last
    python benchmarks/conv2d.py --only "EfficientNet-B0, batch 64" "ConvNeXt-T, batch 64" --layouts channels_last

Prints a table and a summary by group and, with --output, writes them with the device, the versions, the date and the
commit, beside the rows that are there from earlier runs. float32 follows torch's default switches, TF32 convolutions;
float32-strict is without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import regions
import torch
import torch.nn.functional as F
from suite import Net, Region, run
from torch import nn

CPU_BATCH = 1
BATCHES = (1, 16, 64)

RESNET50 = (
    # channels in and out, kernel, stride, size in; torchvision's ResNet-50 v1.5
    (3, 64, 7, 2, 224),
    (64, 64, 1, 1, 56), (64, 64, 3, 1, 56), (64, 256, 1, 1, 56), (256, 64, 1, 1, 56),
    (256, 128, 1, 1, 56), (128, 128, 3, 2, 56), (128, 512, 1, 1, 28), (256, 512, 1, 2, 56), (128, 128, 3, 1, 28),
    (512, 256, 1, 1, 28), (256, 256, 3, 2, 28), (256, 1024, 1, 1, 14), (256, 256, 3, 1, 14),
    (1024, 512, 1, 1, 14), (512, 512, 3, 2, 14), (512, 2048, 1, 1, 7), (512, 512, 3, 1, 7),
)  # fmt: skip
MOBILENETV2 = (
    # as above, a kernel above 1 with as many channels out as in being depthwise
    (3, 32, 3, 2, 224), (32, 32, 3, 1, 112), (32, 16, 1, 1, 112), (16, 96, 1, 1, 112), (96, 96, 3, 2, 112),
    (96, 24, 1, 1, 56), (24, 144, 1, 1, 56), (144, 144, 3, 1, 56), (144, 144, 3, 2, 56), (192, 192, 3, 1, 28),
    (192, 64, 1, 1, 14), (64, 384, 1, 1, 14), (384, 384, 3, 1, 14), (576, 576, 3, 2, 14), (160, 960, 1, 1, 7),
    (960, 960, 3, 1, 7), (320, 1280, 1, 1, 7),
)  # fmt: skip
EFFICIENTNET_B0_DEPTHWISE = (
    (32, 32, 3, 1, 112), (96, 96, 3, 2, 112), (144, 144, 3, 1, 56), (144, 144, 5, 2, 56), (240, 240, 5, 1, 28),
    (240, 240, 3, 2, 28), (480, 480, 3, 1, 14), (480, 480, 5, 1, 14), (672, 672, 5, 1, 14), (672, 672, 5, 2, 14),
    (1152, 1152, 5, 1, 7), (1152, 1152, 3, 1, 7),
)  # fmt: skip
CONVNEXT_T_DEPTHWISE = ((96, 96, 7, 1, 56), (192, 192, 7, 1, 28), (384, 384, 7, 1, 14), (768, 768, 7, 1, 7))


def _relu(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.relu(m.bn(m.conv(x)))


def _relu6(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.relu6(m.bn(m.conv(x)))


def _silu(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.silu(m.bn(m.conv(x)))


def _alone(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return m.conv(x)


def _layers(
    network: str, function: object, layers: tuple[tuple[int, ...], ...], depthwise: bool, bias: bool = False
) -> Iterator[Region]:
    for batch in BATCHES:
        for size_in, size_out, kernel, stride, side in layers:
            groups = size_in if depthwise and kernel > 1 and size_in == size_out else 1

            def build(gpu: bool, c=size_in, f=size_out, k=kernel, s=stride, g=groups) -> nn.Module:  # type: ignore[no-untyped-def]
                conv = nn.Conv2d(c, f, k, stride=s, padding=k // 2, groups=g, bias=bias)
                return Net(function, conv=conv, bn=nn.BatchNorm2d(f))

            what = "depthwise " if groups > 1 else f"{size_in}→"
            group = f"{network}, batch {batch}"
            name = f"{group}: {what}{size_out}, {kernel}x{kernel}/{stride}, {side}²"
            yield Region(name, build, (batch, size_in, side, side), (CPU_BATCH, size_in, side, side), group)


def _targets() -> Iterator[Region]:
    for region in regions.REGIONS:
        if "conv" in region.name:
            images, channels, side, _ = region.gpu_shape
            name = f"targets: {images}x{channels}, {side}²: {region.name}"
            yield dataclasses.replace(region, name=name, group="targets")


def _relu_alone() -> Iterator[Region]:
    """The targets' convolutions with the shortest epilogue: what longer ones cost is the difference."""
    for images, size_in, size_out, side in (
        (128, 64, 128, 128), (64, 64, 128, 256), (64, 64, 64, 256), (128, 8, 64, 128), (128, 8, 64, 256),
    ):  # fmt: skip

        def build(gpu: bool, c=size_in, f=size_out) -> nn.Module:  # type: ignore[no-untyped-def]
            return Net(lambda m, x: F.relu(m.conv(x)), conv=nn.Conv2d(c, f, 3))

        name = f"relu alone: {images}x{size_in}→{size_out}, {side}²"
        yield Region(name, build, (images, size_in, side, side), (CPU_BATCH, size_in, side, side), "relu alone")


REGIONS = [
    *_targets(),
    *_relu_alone(),
    *_layers("ResNet-50", _relu, RESNET50, depthwise=False),
    *_layers("MobileNetV2", _relu6, MOBILENETV2, depthwise=True),
    *_layers("EfficientNet-B0", _silu, EFFICIENTNET_B0_DEPTHWISE, depthwise=True),
    *_layers("ConvNeXt-T", _alone, CONVNEXT_T_DEPTHWISE, depthwise=True, bias=True),
]

if __name__ == "__main__":
    run("conv2d", __doc__, REGIONS, ["float32", "bfloat16"])
