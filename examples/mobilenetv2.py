"""MobileNetV2, a network for phones: pointwise and depthwise convolutions, ReLU6, residuals without activation.

    python examples/mobilenetv2.py
    python examples/mobilenetv2.py --device cuda --dtype bfloat16 --batch 64

Needs transformers.
"""

from __future__ import annotations

import torch
from network import run
from torch import nn
from transformers import MobileNetV2Config, MobileNetV2ForImageClassification


def build(small: bool) -> nn.Module:
    """Without tf_padding, which computes paddings in Python from the image's size: no graph can hold that."""
    sizes = {"depth_multiplier": 0.25, "image_size": 32, "num_labels": 10} if small else {"num_labels": 1000}
    return MobileNetV2ForImageClassification(MobileNetV2Config(tf_padding=False, **sizes))


def inputs(model: nn.Module, batch: int) -> tuple[torch.Tensor, ...]:
    side = model.config.image_size
    return (torch.randn(batch, 3, side, side),)


if __name__ == "__main__":
    run(__doc__, build, inputs)
