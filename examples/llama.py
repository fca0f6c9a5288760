"""A decoder in Llama's style, of the size of GPT-2: gated units, rotary embeddings, root mean square normalisation.

    python examples/llama.py
    python examples/llama.py --device cuda --dtype bfloat16 --batch 8

Needs transformers.
"""

from __future__ import annotations

import torch
from network import run
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

LARGE = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048,
    "vocab_size": 32000,
}  # fmt: skip
SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100,
}  # fmt: skip


def build(small: bool) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**(SMALL if small else LARGE), use_cache=False))


def inputs(model: nn.Module, batch: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(model.config.vocab_size, (batch, 128)),)


if __name__ == "__main__":
    run(__doc__, build, inputs)
