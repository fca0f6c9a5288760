"""BERT-base, a text encoder, on sequences of 128 tokens.

    python examples/bert.py
    python examples/bert.py --device cuda --batch 16 --fp32 fast

Needs transformers.
"""

from __future__ import annotations

import torch
from network import run
from torch import nn
from transformers import BertConfig, BertModel

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100,
}  # fmt: skip


def build(small: bool) -> nn.Module:
    """The default configuration is BERT-base."""
    return BertModel(BertConfig(**(SMALL if small else {})))


def inputs(model: nn.Module, batch: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(model.config.vocab_size, (batch, 128)),)


if __name__ == "__main__":
    run(__doc__, build, inputs)
