"""Built-in models for a command line: a table of the kinds of models that fxfuse is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import nn


class GatedUnit(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(features, hidden, bias=False)
        self.up = nn.Linear(features, hidden, bias=False)
        self.down = nn.Linear(hidden, features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Residual(nn.Module):
    """Two convolutions with batch normalisation, the input added before the last ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + x)


class Block(nn.Module):
    """A transformer's block: attention and an MLP, each behind a LayerNorm and added to its input."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.mlp = nn.Sequential(nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


@dataclass(frozen=True)
class Case:
    """One model with an input, larger on a GPU."""

    description: str
    build: Callable[[bool], nn.Module]
    """Makes the model. The argument: whether it is for a GPU."""
    gpu_shape: tuple[int, ...]
    cpu_shape: tuple[int, ...]


CASES: Final = {
    "linear": Case(
        "a linear and ReLU",
        lambda gpu: nn.Sequential(nn.Linear(8192, 8192) if gpu else nn.Linear(1024, 1024), nn.ReLU()),
        (1024, 8192), (256, 1024),
    ),
    "mlp": Case(
        "two linears with GELU between them",
        lambda gpu: nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)),
        (8192, 1024), (64, 1024),
    ),
    "swiglu": Case(
        "a gated unit: down(silu(gate(x)) * up(x))",
        lambda gpu: GatedUnit(4096, 11008) if gpu else GatedUnit(512, 1376),
        (2048, 4096), (64, 512),
    ),
    "conv": Case(
        "a convolution, batch normalisation and SiLU",
        lambda gpu: nn.Sequential(nn.Conv2d(64, 128, 3), nn.BatchNorm2d(128), nn.SiLU()),
        (128, 64, 128, 128), (8, 64, 32, 32),
    ),
    "residual": Case(
        "a residual block of two convolutions",
        lambda gpu: Residual(128 if gpu else 32),
        (64, 128, 56, 56), (8, 32, 32, 32),
    ),
    "block": Case(
        "a transformer's block: attention and an MLP",
        lambda gpu: Block(768, 12) if gpu else Block(256, 4),
        (32, 512, 768), (4, 64, 256),
    ),
}  # fmt: skip
