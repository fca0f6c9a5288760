"""What the benchmarks share: models from functions, a measured row per model, precision and layout, tables.

Kernels are compiled for all models of a precision and layout at once; torch.compile, which takes a second for each,
begins meanwhile and finds its own results in its cache when its turn to be measured comes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import itertools
import json
import logging
import math
import platform
import re
import statistics
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tabulate import tabulate
from torch import nn

import fxfuse
from fxfuse import plans

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
    group: str = ""
    """What it is summed up with."""


@dataclass(frozen=True)
class Precision:
    """Dtype of the tensors, and what torch and fxfuse may do with float32."""

    dtype: torch.dtype
    fp32: Literal["exact", "fast"] = "exact"
    tf32: bool = False
    """Whether torch may use TF32 in matrix products."""
    tf32_convolutions: bool = True

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """torch's switches set, and afterwards as they were."""
        before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = self.tf32, self.tf32_convolutions
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


PRECISIONS = {
    "float32": Precision(torch.float32),
    "float32-fast": Precision(torch.float32, fp32="fast"),
    "float32-strict": Precision(torch.float32, tf32_convolutions=False),
    "tf32": Precision(torch.float32, tf32=True),
    "float16": Precision(torch.float16),
    "bfloat16": Precision(torch.bfloat16),
}
CHANNELS_LAST = "channels_last"
LAYOUTS = {"contiguous": torch.contiguous_format, CHANNELS_LAST: torch.channels_last}


@dataclass(frozen=True)
class Row:
    """One line of the results. Times in milliseconds, medians."""

    region: str
    group: str
    precision: str
    layout: str
    kernel: str
    launches: int | None
    error: float
    eager_error: float
    ok: bool
    times: dict[str, float]
    candidates: dict[str, float]
    """Times of all that was measured for the choice, the L2 flushed."""
    commit: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.region, self.precision, self.layout

    @property
    def ratio(self) -> float | None:
        """The best peer's time as a multiple of fxfuse's."""
        peers = [time for name, time in self.times.items() if name != "fxfuse"]
        return min(peers) / self.times["fxfuse"] if peers else None


# ---------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Trial:
    """A model to be measured, with its input, and as fxfuse optimised it."""

    region: Region
    model: nn.Module
    x: torch.Tensor
    fast: fxfuse.FusedModule

    @staticmethod
    def of(region: Region, device: torch.device, how: Precision, layout: str) -> Trial:
        torch.manual_seed(0)
        gpu = device.type == "cuda"
        with torch.device(device):  # not longer: it is a mode that every call of torch would go through
            model = region.build(gpu).eval().to(how.dtype)
            x = torch.randn(region.gpu_shape if gpu else region.cpu_shape).to(how.dtype)
        if layout == CHANNELS_LAST:
            model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        return Trial(region, model, x, fxfuse.optimize(model, fp32=how.fp32))


def prepare(trials: Sequence[Trial], compare: Sequence[str]) -> None:
    """Compiles and chooses the kernels of all trials, and compiles peers as long as that takes."""
    with plans.preparing() as drafts:
        for trial in trials:
            trial.fast(trial.x)
        for trial in trials if "torch.compile" in compare else ():
            if drafts.done():
                break
            torch._dynamo.reset()
            with contextlib.suppress(Exception):  # its turn comes again, and then the error is reported
                torch.compile(trial.model)(trial.x)


def launches(call: Callable[[], object]) -> int:
    """Kernels and memory operations that one call puts on the GPU."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def measure(trial: Trial, precision: str, layout: str, compare: Sequence[str], seconds: float, commit: str) -> Row:
    """Verifies and times one model beside its peers."""
    torch._dynamo.reset()
    model, fast, x = trial.model, trial.fast, trial.x
    verified = fxfuse.verify(model, fast, (x,))
    count = launches(lambda: fast(x)) if x.is_cuda else None
    result = fxfuse.benchmark(model, fast, (x,), compare=compare, seconds=seconds)
    report = next(iter(fxfuse.explain(fast).regions), None)  # on a CPU a convolution alone is none
    return Row(
        region=trial.region.name,
        group=trial.region.group,
        precision=precision,
        layout=layout,
        kernel="torch's own" if report is None else report.kernel or f"torch: {report.fallback}",
        launches=count,
        error=verified.error,
        eager_error=verified.eager_error,
        ok=verified.ok,
        times={timing.name: timing.median * 1e3 for timing in result.timings},
        candidates={name: time * 1e3 for contest in (report.measured if report else ()) for name, time in contest},
        commit=commit,
    )


# ------------------------------------------------------------------------------------------------- tables


def _case(row: Row) -> str:
    return row.precision + (f", {CHANNELS_LAST}" if row.layout == CHANNELS_LAST else "")


def _cells(row: Row, peers: Sequence[str]) -> list[str]:
    times = [f"{row.times[name]:.4g}" if name in row.times else "-" for name in (*peers, "fxfuse")]
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}x"
    launched = "-" if row.launches is None else str(row.launches)
    errors = f"{row.error:.1e} / {row.eager_error:.1e}" + ("" if row.ok else ", NOT OK")
    return [row.region, _case(row), *times, ratio, errors, launched, row.kernel]


def render(rows: Sequence[Row]) -> str:
    """A table of the rows, the best peer's time as a multiple of fxfuse's."""
    peers = list(dict.fromkeys(name for row in rows for name in row.times if name != "fxfuse"))
    headers = ("region", "precision", *peers, "fxfuse", "best peer / fxfuse", "error / eager's", "launches", "kernel")
    return tabulate([_cells(row, peers) for row in rows], headers=headers, tablefmt="github", disable_numparse=True)


def _family(kernel: str) -> str:
    """Its name up to what it computes with: "conv2d direct 3x3", "library in channels_last"."""
    return re.split(r" (?:\+|(?:tf32|tf32x3|fp16|fp16x3|bf16|nchw|nhwc)\b)", kernel)[0]


def summarise(rows: Sequence[Row]) -> str:
    """For each group and precision: how the best peer compares, and what was chosen."""
    groups: dict[tuple[str, str], list[tuple[Row, float]]] = {}
    for row in rows:
        if row.ratio is not None:
            groups.setdefault((row.group or "all", _case(row)), []).append((row, row.ratio))
    table = []
    for names, members in groups.items():
        ratios = [ratio for _, ratio in members]
        mean = math.exp(statistics.mean(map(math.log, ratios)))
        least = next(row for row, ratio in members if ratio == min(ratios))
        slower = sum(ratio < 1 for ratio in ratios)
        chosen = Counter(_family(row.kernel) for row, _ in members).most_common()
        choices = ", ".join(f"{family} {count}" for family, count in chosen)
        table.append((*names, len(ratios), f"{mean:.2f}x", f"{min(ratios):.2f}x: {least.region}", slower, choices))
    headers = ("group", "precision", "regions", "geometric mean", "least", "below 1", "chosen")
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


def _stem(name: str, facts: dict[str, str]) -> str:
    return f"{name}-{facts['device'].split(',')[0].split(' (')[0].replace(' ', '-').lower()}"


def write(folder: Path, name: str, facts: dict[str, str], text: str, rows: Sequence[Any]) -> None:
    """<folder>/<name>-<device>.md with a table and .json with the rows (dataclasses)."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = _stem(name, facts)
    (folder / f"{stem}.md").write_text(text)
    content = {"provenance": facts, "rows": [asdict(row) for row in rows]}
    (folder / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")


def read(folder: Path, name: str, facts: dict[str, str], kind: Callable[..., Any] = Row) -> list[Any]:
    """The rows, dataclasses of this kind, that an earlier run on this device wrote; none if there are none like it.

    Fields that have a default may have been added since.
    """
    path = folder / f"{_stem(name, facts)}.json"
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = {field.name for field in fields}
    missing = dataclasses.MISSING
    needed = {field.name for field in fields if field.default is field.default_factory is missing}
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return [kind(**row) for row in rows if needed <= row.keys() <= names]


# --------------------------------------------------------------------------------------------------- main


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
    parser.add_argument("--layouts", nargs="*", default=["contiguous"], choices=list(LAYOUTS))
    parser.add_argument("--compare", nargs="*", default=["eager", "torch.compile"])
    parser.add_argument("--only", nargs="*", default=[""], help="regions whose name contains one of these")
    parser.add_argument("--seconds", type=float, default=0.3, help="measuring time for each row")
    parser.add_argument("--resume", action="store_true", help="keep the rows of this commit that --output has")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    device = torch.device(given.device)
    facts = provenance(device, given.commit)
    heading = ", ".join(f"{key} {value}" for key, value in facts.items())
    rows = {row.key: row for row in (read(given.output, name, facts) if given.output is not None else [])}
    kept = {key for key, row in rows.items() if given.resume and row.commit == facts["commit"]}
    chosen = [region for region in regions if any(part in region.name for part in given.only)]
    measured: list[Row] = []

    def record(row: Row) -> None:
        rows[row.key] = row
        measured.append(row)
        print(render([row]).splitlines()[-1], flush=True)
        if given.output is not None:  # after each row, so that an interrupted run leaves what it measured
            listed = list(rows.values())
            text = f"{heading}\n\n{summarise(listed)}\n\n{render(listed)}\n"
            write(given.output, name, facts, text, listed)

    for precision, layout in itertools.product(given.precisions, given.layouts):
        how = PRECISIONS[precision]
        with torch.no_grad(), how.in_force():
            todo = [region for region in chosen if (region.name, precision, layout) not in kept]
            trials = [Trial.of(region, device, how, layout) for region in todo]
            prepare(trials, given.compare)
            for trial in trials:
                record(measure(trial, precision, layout, given.compare, given.seconds, facts["commit"]))
            del trials  # before the next ones are made
    print(f"\n{heading}, milliseconds, medians of interleaved runs\n{render(measured)}\n\n{summarise(measured)}")
