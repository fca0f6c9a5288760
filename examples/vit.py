"""ViT-B/16, a vision transformer: GELU and residuals join the linears before them; attention stays torch's.

    python examples/vit.py
    python examples/vit.py --device cuda --fp32 fast

Needs transformers.
"""

from __future__ import annotations

import torch
from network import run
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip


def build(small: bool) -> nn.Module:
    """The default configuration is ViT-B/16."""
    return ViTForImageClassification(ViTConfig(**(SMALL if small else {})))


def inputs(model: nn.Module, batch: int) -> tuple[torch.Tensor, ...]:
    side = model.config.image_size
    return (torch.randn(batch, 3, side, side),)


if __name__ == "__main__":
    run(__doc__, build, inputs)
