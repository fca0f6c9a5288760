"""GPT-2, a decoder, on sequences of 128 tokens.

    python examples/gpt2.py
    python examples/gpt2.py --device cuda --dtype bfloat16 --batch 8 --cuda-graphs

Needs transformers.
"""

from __future__ import annotations

import torch
from network import run
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2}


def build(small: bool) -> nn.Module:
    """The default configuration is the small GPT-2."""
    return GPT2LMHeadModel(GPT2Config(**(SMALL if small else {}), use_cache=False))


def inputs(model: nn.Module, batch: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(model.config.vocab_size, (batch, 128)),)


if __name__ == "__main__":
    run(__doc__, build, inputs)
