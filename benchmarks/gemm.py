"""Linear layers of many shapes against eager and torch.compile, in one run.

    python benchmarks/gemm.py --output benchmarks/results
    python benchmarks/gemm.py --only ViT --precisions float32 bfloat16

Prints a table and, with --output, writes it with the device, the versions, the date and the commit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from suite import Net, Region, run
from torch import nn

CPU_ROWS, CPU_FEATURES = 256, 512


def _relu(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(m.fc(x) + m.v)


def _gelu(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(m.fc(x))


def _residual(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + m.fc(x)


def _swish(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.silu(m.fc(x)) * 2


def _conv1d_of_gpt2(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The weight as (in, out)."""
    return F.gelu(torch.addmm(m.v, x, m.w))


def _linear(function: Callable[..., torch.Tensor], m: int, n: int, k: int, name: str) -> Region:
    def build(gpu: bool) -> nn.Module:
        out, features = (n, k) if gpu else (CPU_FEATURES, CPU_FEATURES)
        if function is _conv1d_of_gpt2:
            return Net(function, w=(features, out), v=(out,))
        return Net(function, fc=nn.Linear(features, out), v=(out,))

    return Region(f"{m}x{n}x{k} {name}", build, (m, k), (CPU_ROWS, CPU_FEATURES))


REGIONS = [
    _linear(_relu, 1024, 8192, 8192, "large, + v, relu"),
    _linear(_relu, 16384, 4096, 4096, "large, + v, relu"),
    _linear(_relu, 4096, 4096, 4096, "square, + v, relu"),
    _linear(_swish, 128, 32768, 32768, "wide, swish, * 2"),
    _linear(_gelu, 6304, 3072, 768, "ViT-B up, gelu"),
    _linear(_residual, 6304, 768, 768, "ViT-B projection, residual"),
    _linear(_relu, 6304, 768, 3072, "ViT-B down, + v, relu"),
    _linear(_relu, 6304, 2304, 768, "ViT-B qkv, + v, relu"),
    _linear(_gelu, 4096, 3072, 768, "BERT-base up, gelu"),
    _linear(_residual, 4096, 768, 768, "BERT-base projection, residual"),
    _linear(_relu, 4096, 768, 3072, "BERT-base down, + v, relu"),
    _linear(_conv1d_of_gpt2, 4096, 3072, 768, "GPT-2 up, weight (K, N), gelu"),
    _linear(_relu, 2048, 1024, 1024, "small, + v, relu"),
    _linear(_residual, 1024, 8192, 8192, "large, residual"),
    _linear(_relu, 1, 4096, 4096, "decode, + v, relu"),
    _linear(_relu, 8, 8192, 8192, "decode, + v, relu"),
    _linear(_relu, 16, 11008, 4096, "decode, + v, relu"),
    _linear(_relu, 64, 4096, 4096, "small batch, + v, relu"),
    _linear(_relu, 128, 8192, 8192, "small batch, + v, relu"),
    _linear(_relu, 512, 512, 16384, "long K, + v, relu"),
    _linear(_relu, 16384, 8, 4096, "few features, + v, relu"),
    _linear(_relu, 1001, 1003, 1005, "odd, + v, relu"),
]

if __name__ == "__main__":
    run("gemm", __doc__, REGIONS, ["float32", "float32-fast", "tf32", "bfloat16", "float16"])
