"""ResNet-50, an image classifier: convolution, batch normalisation, residual and ReLU become one kernel each.

    python examples/resnet50.py
    python examples/resnet50.py --device cuda --dtype bfloat16 --batch 64

Needs transformers.
"""

from __future__ import annotations

import torch
from network import run
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification


def build(small: bool) -> nn.Module:
    """The default configuration is ResNet-50."""
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]} if small else {}
    return ResNetForImageClassification(ResNetConfig(**sizes, num_labels=10 if small else 1000))


def inputs(model: nn.Module, batch: int) -> tuple[torch.Tensor, ...]:
    side = 224 if len(model.config.depths) == 4 else 32
    return (torch.randn(batch, 3, side, side),)


if __name__ == "__main__":
    run(__doc__, build, inputs)
