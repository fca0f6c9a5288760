"""A model with a part that cannot be traced: what make.py makes the third report of."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm(self.second(F.silu(self.first(x)))))


class EarlyExit(nn.Module):
    """Answers at once where it is sure: a question about values, which no trace can answer."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.sure, self.unsure = nn.Linear(features, classes), nn.Linear(features, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = F.gelu(self.sure(x))
        if float(logits.detach().softmax(-1).max()) > 0.9:
            return logits
        return torch.tanh(self.unsure(x)) * 2 + logits


class Classifier(nn.Module):
    """Two parts that are traced around one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.Sequential(Block(16), Block(16))
        self.exit, self.scale = EarlyExit(16, 10), nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.relu(self.stem(x))).mean((2, 3))
        return torch.sigmoid(self.scale(self.exit(x)))
