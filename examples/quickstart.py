"""Four models, one kernel each: what fxfuse does, how exact it is, and how fast.

    python examples/quickstart.py                  # on the GPU if there is one, else on the CPU with smaller sizes
    python examples/quickstart.py --device cpu --compare eager

For each model: its graph before and after, the report, the error against float64 beside eager's own, and a table of
times. Kernels are compiled at the first run (seconds) and taken from the cache afterwards.
"""

from __future__ import annotations

import argparse
import logging
import time

import torch
import torch.nn.functional as F
from torch import fx, nn

import fxfuse


class LinearBiasReLU(nn.Module):
    """a. Linear without bias, a bias of one's own, ReLU."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.fc = nn.Linear(features, features, bias=False)
        self.bias = nn.Parameter(torch.randn(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x) + self.bias)


class LinearSwishClamp(nn.Module):
    """b. Swish written by hand, a division, a clamp, tanh, and a clamp that tanh makes redundant."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.fc = nn.Linear(features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x)
        x = x * torch.sigmoid(x)
        x = x / 2.0
        x = torch.clamp(x, -1.0, 1.0)
        x = torch.tanh(x)
        return torch.clamp(x, -1.0, 1.0)


class ConvReLUBias(nn.Module):
    """c. A convolution, ReLU, and then a bias: the order matters."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, 3)
        self.bias = nn.Parameter(torch.randn(channels_out, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x)) + self.bias


class LinearSwishTanhGelu(nn.Module):
    """d. A longer chain; the hardtanh is redundant after gelu(tanh(.)), which interval analysis proves."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.fc = nn.Linear(features, features)
        self.add_value = nn.Parameter(torch.randn(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x) + self.add_value
        x = torch.sigmoid(x) * x
        x = torch.tanh(x)
        x = F.gelu(x)
        return F.hardtanh(x, min_val=-1.0, max_val=1.0)


def reference_models(device: torch.device) -> list[tuple[str, nn.Module, torch.Tensor]]:
    """Name, model and input of each, at full size on a GPU and at one that a laptop does quickly on a CPU."""
    gpu = device.type == "cuda"
    features, rows = (8192, 1024) if gpu else (1024, 256)
    images, channels_in, channels_out, size = (128, 64, 128, 128) if gpu else (16, 16, 64, 64)
    x = torch.randn(rows, features)
    image = torch.randn(images, channels_in, size, size)
    return [
        ("a. linear + bias, relu", LinearBiasReLU(features), x),
        ("b. linear, swish, / 2, clamp, tanh, clamp", LinearSwishClamp(features), x),
        ("c. conv2d, relu, + bias", ConvReLUBias(channels_in, channels_out), image),
        ("d. linear + value, swish, tanh, gelu, hardtanh", LinearSwishTanhGelu(features), x),
    ]


def show(name: str, model: nn.Module, x: torch.Tensor, compare: list[str], seconds: float) -> None:
    """Everything fxfuse can say about one model."""
    print(f"\n{'=' * 100}\n{name}    input {tuple(x.shape)}\n{'=' * 100}")
    print("before:\n" + _code(fx.symbolic_trace(model)))
    started = time.perf_counter()
    fast = fxfuse.optimize(model, example_inputs=(x,))
    print(f"optimized in {time.perf_counter() - started:.2f} s\nafter:\n" + _code(fast))
    print(fxfuse.explain(fast, verbose=True))
    print(f"\n{fxfuse.verify(model, fast, (x,))}\n")
    print(fxfuse.benchmark(model, fast, (x,), compare=compare, seconds=seconds))


def _code(module: fx.GraphModule) -> str:
    lines = [line.split(";  ")[0] for line in module.code.strip().splitlines()]  # without "x = None" to free memory
    return "\n".join(f"    {line}" for line in lines if line.strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compare", nargs="*", default=["eager", "torch.compile"], help="of eager, torch.compile, max-autotune"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="measuring time for each model")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("fxfuse").setLevel(logging.INFO)  # progress while kernels compile
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    with torch.no_grad():
        for name, model, x in reference_models(device):
            show(name, model.eval().to(device), x.to(device), arguments.compare, arguments.seconds)


if __name__ == "__main__":
    main()
