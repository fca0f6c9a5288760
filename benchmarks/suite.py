"""What the benchmarks share: models from functions, a measured row per model and precision, tables with provenance."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tabulate import tabulate
from torch import nn

import fxfuse

Function = Callable[[Any, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """A model from a function of (self, x), its modules and the shapes of its parameters."""

    def __init__(self, function: Function, **members: object) -> None:
        super().__init__()
        for name, member in members.items():
            setattr(self, name, nn.Parameter(torch.randn(member)) if isinstance(member, tuple) else member)
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(self, x)


@dataclass(frozen=True)
class Region:
    """One model with its input's shape on a GPU and on a CPU."""

    name: str
    build: Callable[[bool], nn.Module]
    """Takes whether it is for a GPU (full size)."""
    gpu_shape: tuple[int, ...]
    cpu_shape: tuple[int, ...]


@dataclass(frozen=True)
class Precision:
    """Dtype of the tensors, and what torch and fxfuse may do with float32."""

    dtype: torch.dtype
    fp32: Literal["exact", "fast"] = "exact"
    tf32: bool = False
    """Whether torch may use TF32 in matrix products."""

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """torch's switch set, and afterwards as it was."""
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


PRECISIONS = {
    "float32": Precision(torch.float32),
    "float32-fast": Precision(torch.float32, fp32="fast"),
    "tf32": Precision(torch.float32, tf32=True),
    "float16": Precision(torch.float16),
    "bfloat16": Precision(torch.bfloat16),
}


@dataclass(frozen=True)
class Row:
    """One line of the results. Times in milliseconds, medians."""

    region: str
    precision: str
    kernel: str
    launches: int | None
    error: float
    eager_error: float
    ok: bool
    compile_seconds: float
    """optimize() with example inputs: tracing, compiling and choosing."""
    times: dict[str, float]
    candidates: dict[str, float]
    """Times of all that was measured for the choice, the L2 flushed."""


def launches(call: Callable[[], object]) -> int:
    """Kernels and memory operations that one call puts on the GPU."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def measure(
    region: Region,
    device: torch.device,
    precision: str,
    compare: Sequence[str],
    seconds: float,
    channels_last: bool = False,
) -> Row:
    """Optimises, verifies and times one model beside its peers."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    gpu = device.type == "cuda"
    how = PRECISIONS[precision]
    with torch.no_grad(), how.in_force():
        with torch.device(device):  # not longer: it is a mode that every call of torch would go through
            model = region.build(gpu).eval().to(how.dtype)
            x = torch.randn(region.gpu_shape if gpu else region.cpu_shape).to(how.dtype)
        if channels_last:
            model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        started = time.perf_counter()
        fast = fxfuse.optimize(model, example_inputs=(x,), fp32=how.fp32)
        compiled = time.perf_counter() - started
        verified = fxfuse.verify(model, fast, (x,))
        count = launches(lambda: fast(x)) if gpu else None
        result = fxfuse.benchmark(model, fast, (x,), compare=compare, seconds=seconds)
    report = fxfuse.explain(fast).regions[0]
    return Row(
        region=region.name + (", channels_last" if channels_last else ""),
        precision=precision,
        kernel=report.kernel or f"torch: {report.fallback}",
        launches=count,
        error=verified.error,
        eager_error=verified.eager_error,
        ok=verified.ok,
        compile_seconds=compiled,
        times={timing.name: timing.median * 1e3 for timing in result.timings},
        candidates={name: time * 1e3 for contest in report.measured for name, time in contest},
    )


def _cells(row: Row, peers: Sequence[str]) -> list[str]:
    own = row.times["fxfuse"]
    times = [f"{row.times[name]:.3f}" if name in row.times else "-" for name in peers]
    best = min((row.times[name] for name in peers if name in row.times), default=None)
    ratio = "-" if best is None else f"{best / own:.2f}x"
    launched = "-" if row.launches is None else str(row.launches)
    errors = f"{row.error:.1e} / {row.eager_error:.1e}"
    return [*times, f"{own:.3f}", ratio, errors, launched, f"{row.compile_seconds:.1f}", row.kernel]


def render(rows: Sequence[Row], compare: Sequence[str]) -> str:
    """A table of the rows, the best peer's time as a multiple of fxfuse's."""
    peers = [name for name in compare if any(name in row.times for row in rows)]
    table = [(row.region, row.precision, *_cells(row, peers)) for row in rows]
    headers = (
        "region", "precision", *peers, "fxfuse", "best peer / fxfuse", "error / eager's", "launches", "compile s",
        "kernel",
    )  # fmt: skip
    return tabulate(table, headers=headers, tablefmt="github", disable_numparse=True)


def provenance(device: torch.device, commit: str | None = None) -> dict[str, str]:
    """Where and with what the numbers were taken. `commit`: for a checkout without git."""
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else f"CPU ({torch.get_num_threads()} threads)",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": commit or git or "unknown",
    }


def write(folder: Path, name: str, facts: dict[str, str], text: str, rows: Sequence[Any]) -> None:
    """<folder>/<name>-<device>.md with a table and .json with the rows (dataclasses)."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{facts['device'].split(',')[0].split(' (')[0].replace(' ', '-').lower()}"
    (folder / f"{stem}.md").write_text(text)
    content = {"provenance": facts, "rows": [asdict(row) for row in rows]}
    (folder / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default=None, help="what to record where the checkout has no git")
    parser.add_argument("--output", type=Path, default=None, help="folder to write the results to")
    return parser


def run(name: str, description: str | None, regions: Sequence[Region], precisions: Sequence[str]) -> None:
    """A benchmark's main(): measures the regions that the command line selects, prints and writes the table."""
    parser = arguments(description)
    parser.add_argument("--precisions", nargs="*", default=list(precisions), choices=list(PRECISIONS))
    parser.add_argument("--compare", nargs="*", default=["eager", "torch.compile"])
    parser.add_argument("--only", default="", help="regions whose name contains this")
    parser.add_argument("--channels-last", action="store_true", help="4-D inputs and weights in channels_last")
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time for each row")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    device = torch.device(given.device)
    facts = provenance(device, given.commit)
    heading = ", ".join(f"{key} {value}" for key, value in facts.items())
    rows: list[Row] = []
    for region in (region for region in regions if given.only in region.name):
        for precision in given.precisions:
            row = measure(region, device, precision, given.compare, given.seconds, given.channels_last)
            rows.append(row)
            print(render(rows[-1:], given.compare).splitlines()[-1], flush=True)
            if given.output is not None:  # after each row, so that an interrupted run leaves what it measured
                text = f"{heading}\n\nMilliseconds, medians of interleaved runs.\n\n{render(rows, given.compare)}\n"
                write(given.output, name + ("-channels-last" if given.channels_last else ""), facts, text, rows)
    print(f"\n{heading}\n{render(rows, given.compare)}")
