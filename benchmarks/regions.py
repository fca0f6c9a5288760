"""The reference regions against eager and torch.compile, in one run: times, errors, launches.

    python benchmarks/regions.py --output benchmarks/results            # on the GPU if there is one
    python benchmarks/regions.py --only conv --dtypes float32 bfloat16 --compare eager torch.compile max-autotune

Prints a table and, with --output, writes it as <device>.md and <device>.json with the device, the versions, the date
and the commit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import platform
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn

import fxfuse


class Net(nn.Module):
    """A model from a function of (self, x), its modules and the shapes of its parameters."""

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], torch.Tensor], **members: object) -> None:
        super().__init__()
        for name, member in members.items():
            setattr(self, name, nn.Parameter(torch.randn(member)) if isinstance(member, tuple) else member)
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(self, x)


def _swish_chain(x: torch.Tensor) -> torch.Tensor:
    x = x * torch.sigmoid(x) / 2.0
    return torch.clamp(torch.tanh(torch.clamp(x, -1.0, 1.0)), -1.0, 1.0)


def _gelu_chain(x: torch.Tensor) -> torch.Tensor:
    return F.hardtanh(F.gelu(torch.tanh(torch.sigmoid(x) * x)), -1.0, 1.0)


def _hardswish_by_hand(x: torch.Tensor) -> torch.Tensor:
    return x * torch.clamp((x + 3) / 6, 0, 1)


@dataclass(frozen=True)
class Region:
    """One model with its input's shape on a GPU and on a CPU."""

    name: str
    build: Callable[[bool], nn.Module]
    """Takes whether it is for a GPU (full size)."""
    gpu_shape: tuple[int, ...]
    cpu_shape: tuple[int, ...]


Function = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def _linear(
    function: Function, sizes: tuple[int, int] = (8192, 8192), bias: bool = True
) -> Callable[[bool], nn.Module]:
    def build(gpu: bool) -> nn.Module:
        size_in, size_out = sizes if gpu else (1024, 1024)
        return Net(function, fc=nn.Linear(size_in, size_out, bias=bias), v=(size_out,))

    return build


def _conv(function: Function, channels: tuple[int, int], cpu: tuple[int, int]) -> Callable[[bool], nn.Module]:
    def build(gpu: bool) -> nn.Module:
        size_in, size_out = channels if gpu else cpu
        return Net(function, conv=nn.Conv2d(size_in, size_out, 3), v=(size_out, 1, 1))

    return build


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 + x


MATRIX, SMALL_MATRIX = (1024, 8192), (256, 1024)
IMAGES, SMALL_IMAGES, SMALL_THIN = (64, 64, 256, 256), (16, 16, 64, 64), (16, 8, 64, 64)
REGIONS = [
    Region(
        "a. linear, + bias, relu",
        _linear(lambda m, x: torch.relu(m.fc(x) + m.v), bias=False), MATRIX, SMALL_MATRIX,
    ),
    Region(
        "b. linear, swish, / 2, clamp, tanh, clamp",
        _linear(lambda m, x: _swish_chain(m.fc(x))), MATRIX, SMALL_MATRIX,
    ),
    Region(
        "c. conv, relu, + bias",
        _conv(lambda m, x: torch.relu(m.conv(x)) + m.v, (64, 128), (16, 64)), (128, 64, 128, 128), SMALL_IMAGES,
    ),
    Region(
        "d. linear, + value, swish, tanh, gelu, hardtanh",
        _linear(lambda m, x: _gelu_chain(m.fc(x) + m.v)), MATRIX, SMALL_MATRIX,
    ),
    Region(
        "linear, swish, * 2",
        _linear(lambda m, x: F.silu(m.fc(x)) * 2, (32768, 32768)), (128, 32768), SMALL_MATRIX,
    ),
    Region(
        "linear, * 0.5, + itself",
        _linear(lambda m, x: _double(m.fc(x)), (4096, 4096)), (16384, 4096), SMALL_MATRIX,
    ),
    Region(
        "conv, mish, mish",
        _conv(lambda m, x: F.mish(F.mish(m.conv(x))), (64, 128), (16, 64)), IMAGES, SMALL_IMAGES,
    ),
    Region(
        "conv, * scale, leaky_relu, gelu",
        _conv(lambda m, x: F.gelu(F.leaky_relu(m.conv(x) * m.v)), (64, 64), (16, 64)), IMAGES, SMALL_IMAGES,
    ),
    Region(
        "conv, relu, hardswish by hand",
        _conv(lambda m, x: _hardswish_by_hand(torch.relu(m.conv(x))), (8, 64), (8, 64)), (128, 8, 128, 128), SMALL_THIN,
    ),
    Region(
        "conv, / 2, leaky_relu",
        _conv(lambda m, x: F.leaky_relu(m.conv(x) / 2), (8, 64), (8, 64)), (128, 8, 128, 128), SMALL_THIN,
    ),
    Region(
        "conv, - 0.5, - 0.2, mish",
        _conv(lambda m, x: F.mish(m.conv(x) - 0.5 - 0.2), (8, 64), (8, 64)), (128, 8, 256, 256), SMALL_THIN,
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the results. Times in milliseconds, medians."""

    region: str
    dtype: str
    kernel: str
    launches: int | None
    error: float
    eager_error: float
    ok: bool
    times: dict[str, float]


def launches(call: Callable[[], object]) -> int:
    """Kernels and memory operations that one call puts on the GPU."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def measure(region: Region, device: torch.device, dtype: torch.dtype, compare: list[str], seconds: float) -> Row:
    torch.manual_seed(0)
    torch._dynamo.reset()
    gpu = device.type == "cuda"
    model = region.build(gpu).eval().to(device, dtype)
    x = torch.randn(region.gpu_shape if gpu else region.cpu_shape, device=device).to(dtype)
    with torch.no_grad():
        fast = fxfuse.optimize(model, example_inputs=(x,))
        verified = fxfuse.verify(model, fast, (x,))
        count = launches(lambda: fast(x)) if gpu else None
        result = fxfuse.benchmark(model, fast, (x,), compare=compare, seconds=seconds)
    report = fxfuse.explain(fast).regions[0]
    times = {timing.name: timing.median * 1e3 for timing in result.timings}
    kernel = report.kernel or f"torch: {report.fallback}"
    return Row(region.name, str(dtype)[6:], kernel, count, verified.error, verified.eager_error, verified.ok, times)


def _cells(row: Row, peers: list[str]) -> list[str]:
    own = row.times["fxfuse"]
    times = [f"{row.times[name]:.3f}" if name in row.times else "-" for name in peers]
    best = min((row.times[name] for name in peers if name in row.times), default=None)
    ratio = "-" if best is None else f"{best / own:.2f}x"
    launched = "-" if row.launches is None else str(row.launches)
    return [*times, f"{own:.3f}", ratio, f"{row.error:.1e} / {row.eager_error:.1e}", launched, row.kernel]


def render(rows: list[Row], compare: list[str]) -> str:
    peers = [name for name in compare if any(name in row.times for row in rows)]
    table = [(row.region, row.dtype, *_cells(row, peers)) for row in rows]
    headers = ("region", "dtype", *peers, "fxfuse", "best peer / fxfuse", "error / eager's", "launches", "kernel")
    return tabulate(table, headers=headers, tablefmt="github", disable_numparse=True)


def provenance(device: torch.device) -> dict[str, str]:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else f"CPU ({torch.get_num_threads()} threads)",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": commit or "unknown",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", nargs="*", default=["float32"], choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--compare", nargs="*", default=["eager", "torch.compile"])
    parser.add_argument("--only", default="", help="regions whose name contains this")
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time for each row")
    parser.add_argument("--commit", default=None, help="what to record where the checkout has no git")
    parser.add_argument("--output", type=Path, default=None, help="folder to write the results to")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    device = torch.device(arguments.device)
    rows: list[Row] = []
    for region in (region for region in REGIONS if arguments.only in region.name):
        for name in arguments.dtypes:
            rows.append(measure(region, device, getattr(torch, name), arguments.compare, arguments.seconds))
            print(render(rows[-1:], arguments.compare).splitlines()[-1], flush=True)
    facts = provenance(device)
    if arguments.commit:
        facts["commit"] = arguments.commit
    heading = ", ".join(f"{key} {value}" for key, value in facts.items())
    text = f"{heading}\n\nMilliseconds, medians of interleaved runs.\n\n{render(rows, arguments.compare)}\n"
    print("\n" + text)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        stem = "regions-" + facts["device"].split(",")[0].split(" (")[0].replace(" ", "-").lower()
        (arguments.output / f"{stem}.md").write_text(text)
        content = {"provenance": facts, "rows": [asdict(row) for row in rows]}
        (arguments.output / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
