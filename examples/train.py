"""Trains the same network twice, by eager and by fxfuse, and draws both losses into a picture.

    python examples/train.py                                 # a small network on spirals, on a CPU
    python examples/train.py --gpt2 --device cuda            # steps of GPT-2 on random tokens; tokens a second, too
    python examples/train.py --device cuda --cuda-graphs     # where a GPU waits for the CPU

--gpt2 needs transformers. Both begin with the same weights and see the same data; the losses differ by rounding alone.
"""

from __future__ import annotations

import argparse
import copy
import math
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fxfuse

Batch = tuple[torch.Tensor, torch.Tensor]
COLOURS = ((200, 60, 40), (30, 90, 200))
"""Red: eager. Blue: fxfuse, whose line lies over the other."""


def spirals(batch: int) -> Batch:
    """Points of three spirals, and which spiral each is of."""
    which, along = torch.randint(3, (batch,)), torch.rand(batch)
    angle = along * 4 + which * (2 * math.pi / 3) + torch.randn(batch) * 0.1
    return torch.stack([along * angle.sin(), along * angle.cos()], 1), which


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.BatchNorm1d(128), nn.SiLU(),
        nn.Linear(128, 3),
    )  # fmt: skip


class LanguageModel(nn.Module):
    """GPT-2's logits for tokens, by transformers."""

    def __init__(self, small: bool) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100} if small else {}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens).logits
        return logits


def train(
    model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], draw: Callable[[], Batch], steps: int, device: str
) -> tuple[list[float], float]:
    """The losses of all steps, and seconds that the last half of them took."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, began = [], time.perf_counter()
    for step in range(steps):
        if step == steps // 2:
            wait(device)
            began = time.perf_counter()
        x, target = (each.to(device) for each in draw())
        optimizer.zero_grad()
        loss = F.cross_entropy(call(x).flatten(0, -2), target.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    wait(device)
    return [float(loss) for loss in losses], time.perf_counter() - began


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def picture(curves: list[list[float]], path: Path, width: int = 640, height: int = 360) -> None:
    """Writes the curves as a PNG: steps to the right, losses upwards from zero."""
    pixels = torch.full((height, width, 3), 255, dtype=torch.uint8)
    highest = max(max(curve) for curve in curves)
    for curve, colour in zip(curves, COLOURS, strict=False):
        values = F.interpolate(torch.tensor(curve)[None, None], size=width, mode="linear", align_corners=True)[0, 0]
        rows = ((1 - values / highest) * (height - 3)).long().clamp(0, height - 3)
        for thickness in range(2):
            pixels[rows + thickness, torch.arange(width)] = torch.tensor(colour, dtype=torch.uint8)
    lines = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in pixels)
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, red, green and blue
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    written = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + written)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt2", action="store_true", help="GPT-2 instead of the small network")
    parser.add_argument("--small", action="store_true", help="a GPT-2 for a CPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cuda-graphs", action="store_true", help="fxfuse replays the forward and the backward")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=None, help="points (default: 256), or sequences (4)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--output", type=Path, default=Path("losses.png"))
    given = parser.parse_args()
    torch.manual_seed(0)
    model = (LanguageModel(given.small) if given.gpt2 else small_network()).to(given.device).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if given.gpt2:
        batch, vocabulary = given.batch or 4, model.model.config.vocab_size

        def draw() -> Batch:
            tokens = torch.randint(vocabulary, (batch, given.length + 1))
            return tokens[:, :-1], tokens[:, 1:]

    else:
        batch = given.batch or 256

        def draw() -> Batch:
            return spirals(batch)

    twin = copy.deepcopy(model)
    curves = []
    fast = fxfuse.optimize(twin, cuda_graphs=given.cuda_graphs)
    for name, trained, call in (("eager", model, model), ("fxfuse", twin, fast)):
        losses, seconds = train(trained, call, draw, given.steps, given.device)
        curves.append(losses)
        each = seconds / (given.steps - given.steps // 2)
        speed = f", {batch * given.length / each:.0f} tokens a second" if given.gpt2 else ""
        print(f"{name}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {each * 1e3:.2f} ms a step{speed}")
    apart = max(abs(one - other) / one for one, other in zip(*curves, strict=True))
    print(f"the losses of a step are {apart:.1e} apart, at most, as a part of their value")
    picture(curves, given.output)
    print(f"drawn into {given.output}: eager red, fxfuse blue over it")


if __name__ == "__main__":
    main()
