"""Text of a language model in Llama's style, token by token: eager, torch.compile and fxfuse side by side.

    python examples/llama.py
    python examples/llama.py --size 7b --layers 8 --batch 8
    python examples/llama.py --size tiny --device cpu

Each of them writes in two ways: by transformers' `generate` with a static cache, and by a loop of plain PyTorch that
keeps a cache of its own. The most probable token follows, so that all write the same in float32; in 16 bits two tokens
may be as probable as each other. The share of the bandwidth is what each token needs at least (weights and cache once)
over its time, beside the speed at which a tensor is read here.

The weights are random: nothing is downloaded. Needs transformers.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.utils import logging as transformers_logging

import fxfuse

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 100,
    },
    "small": {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12,
        "intermediate_size": 2048, "vocab_size": 32000,
    },
    "7b": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "intermediate_size": 11008, "vocab_size": 32000,
    },
    "8b": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256,
    },
}  # fmt: skip
"""Of Llama 2 7B and Llama 3 8B, of GPT-2, and of a test."""

EAGER, COMPILE, OWN, GRAPH = "eager", "torch.compile", "fxfuse", "fxfuse, CUDA graphs"
Writer = Callable[[], torch.Tensor]
"""Writes once: the tokens (batch, prompt + new)."""


def written(model: nn.Module, prompt: torch.Tensor, count: int, cache: StaticCache) -> torch.Tensor:
    """`count` tokens after the prompt, by a loop of plain PyTorch: nothing waits for the GPU before the end.

    Args:
        model: or what calls it.
        prompt: int64 (batch, tokens).
        cache: for prompt and new tokens; what it holds is overwritten.

    Returns:
        int64 (batch, tokens + count).
    """
    cache.reset()
    tokens = [prompt]
    for _ in range(count):
        logits = model(input_ids=tokens[-1], past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        tokens.append(logits[:, -1:].argmax(-1))
    return torch.cat(tokens, 1)


def generated(model: Any, prompt: torch.Tensor, count: int, **options: Any) -> torch.Tensor:
    """The same by transformers' generate, with a static cache of its own."""
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count, min_new_tokens=count,
        cache_implementation="static", pad_token_id=0, **options,
    )  # fmt: skip


def ways_to_write(model: LlamaForCausalLM, prompt: torch.Tensor, count: int, names: list[str]) -> dict[str, Writer]:
    """By who writes and how."""
    length = prompt.shape[1] + count
    ways: dict[str, Writer] = {}
    for name in names:
        if name == COMPILE:
            mode = "reduce-overhead" if prompt.is_cuda else "default"
            one_token = torch.compile(model, mode=mode)

            def call(one_token: Any = one_token, **inputs: Any) -> Any:  # the prompt has another shape each time
                torch.compiler.cudagraph_mark_step_begin()
                return (one_token if inputs["input_ids"].shape[1] == 1 else model)(**inputs)

            whole, options = model, {}  # on a GPU generate itself compiles
        else:
            options = {"disable_compile": True}
            whole = model if name == EAGER else fxfuse.optimize(model, cuda_graphs=name == GRAPH)
            call = whole
        cache = StaticCache(config=model.config, max_cache_len=length)
        ways[f"{name}: generate"] = lambda whole=whole, options=options: generated(whole, prompt, count, **options)
        ways[f"{name}: loop"] = lambda call=call, cache=cache: written(call, prompt, count, cache)
    return ways


def wait(device: torch.device) -> None:
    """For what was issued to a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(write: Writer, device: torch.device, times: int) -> float:
    """Median seconds."""
    taken = []
    for _ in range(times):
        wait(device)
        began = time.perf_counter()
        write()
        wait(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def bytes_of_a_token(model: LlamaForCausalLM, batch: int, length: int) -> int:
    """That are read at least for one token of each of a batch: weights, and the cache up to there."""
    weights = sum(module.weight.nbytes for module in model.modules() if isinstance(module, nn.Linear))
    config = model.config
    channels = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    return weights + 2 * config.num_hidden_layers * batch * length * channels * model.lm_head.weight.element_size()


def bytes_a_second(device: torch.device) -> float:
    """At which a tensor is read that is larger than any cache."""
    large = torch.ones(2**29 if device.type == "cuda" else 2**26, device=device)
    return large.nbytes / timed(large.amax, device, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, choices=("float32", "float16", "bfloat16"), help="bfloat16 on a GPU")
    parser.add_argument("--size", default=None, choices=SIZES, help="7b on a GPU and tiny on a CPU if not given")
    parser.add_argument("--layers", type=int, default=None, help="fewer than the model has")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=32, help="tokens that are given")
    parser.add_argument("--tokens", type=int, default=128, help="that follow")
    parser.add_argument("--compare", nargs="*", default=[EAGER, COMPILE], choices=[EAGER, COMPILE])
    parser.add_argument("--times", type=int, default=3, help="that each writes; the median counts")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    transformers_logging.set_verbosity_error()
    device = torch.device(given.device)
    on_gpu = device.type == "cuda"
    sizes = SIZES[given.size or ("7b" if on_gpu else "tiny")]
    if given.layers is not None:
        sizes = {**sizes, "num_hidden_layers": given.layers}
    length = given.prompt + given.tokens
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=length)).eval()
        prompt = torch.randint(sizes["vocab_size"], (given.batch, given.prompt))
    model = model.to(getattr(torch, given.dtype or ("bfloat16" if on_gpu else "float32")))
    names = [EAGER, *(name for name in given.compare if name != EAGER), OWN, *([GRAPH] if on_gpu else [])]
    rows = []
    with torch.no_grad():
        speed = bytes_a_second(device)
        least = bytes_of_a_token(model, given.batch, given.prompt + given.tokens // 2) / speed
        expected = None
        for way, write in ways_to_write(model, prompt, given.tokens, names).items():
            for _ in range(3):  # fxfuse's programs begin at the third call of a kind
                tokens = write()
            expected = tokens if expected is None else expected
            seconds = timed(write, device, given.times)
            same = (tokens == expected)[:, given.prompt :].float().mean()
            each = seconds / given.tokens
            rows.append((way, f"{given.batch / each:.0f}", f"{each * 1e3:.2f}", f"{least / each:.2f}", f"{same:.0%}"))
            print(f"{way}: {given.batch / each:.0f} tokens/s", flush=True)
    headers = ("who: how", "tokens/s", "ms a token", "share of the bandwidth", "the same as eager's")
    print(f"\n{tabulate(rows, headers=headers, disable_numparse=True)}\n")
    print(f"A tensor is read at {speed / 1e9:.0f} GB/s.")


if __name__ == "__main__":
    main()
