"""Kernels that go over rows, beside eager and torch.compile: softmax, norms and means of many sizes and dtypes.

    python benchmarks/rows.py --output benchmarks/results
    python benchmarks/rows.py --only softmax rms_norm --elements 65536 --dtypes float32

Rows are from 1 to 2^20 elements long, so many of them that there are --elements. The share of a copy's speed is
what must be read and written over the time, as a part of the speed at which a large tensor is copied here. Ratios are
of medians in one run.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from contestants import wait
from decoder import RMSNorm
from suite import arguments, provenance, read, write
from tabulate import tabulate
from torch import nn

import fxfuse

PEERS = ("eager", "torch.compile")
LENGTHS = (1, 7, 49, 64, 196, 768, 1000, 4096, 16384, 131072, 2**20)
LARGE = 16 << 20
"""Bytes from which on a kernel has to reach the bandwidth."""


class AddNorm(nn.Module):
    """A residual is added, and both the sum and its norm are wanted."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.norm = RMSNorm(length)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return total, self.norm(total)


class Function(nn.Module):
    """A function of one tensor."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@dataclass(frozen=True)
class Kind:
    """What is computed, for rows of a length."""

    build: Callable[[int], nn.Module]
    inputs: int = 1
    passes: int = 2
    """Tensors of the rows' size that are read or written."""
    least: int = 2
    """Length from which on there is something to compute."""


KINDS = {
    "softmax": Kind(lambda length: nn.Softmax(-1)),
    "log_softmax": Kind(lambda length: nn.LogSoftmax(-1)),
    "layer_norm": Kind(nn.LayerNorm),
    "rms_norm": Kind(RMSNorm, least=1),
    "add, rms_norm": Kind(AddNorm, inputs=2, passes=4, least=1),
    "softmax, scaled": Kind(lambda length: Function(lambda x: (x * 0.125).softmax(-1) * 2.0)),
}
IMAGES = {
    "group_norm, silu": Kind(lambda channels: nn.Sequential(nn.GroupNorm(math.gcd(32, channels), channels), nn.SiLU())),
    "mean 7x7": Kind(lambda channels: Function(lambda x: x.mean((2, 3))), passes=1),
}
CHANNELS, SIDES = (64, 320), {"group_norm, silu": (8, 32), "mean 7x7": (7,)}


@dataclass(frozen=True)
class Row:
    """One line of the results; times in microseconds."""

    kind: str
    shape: list[int]
    dtype: str
    nbytes: int
    least: float
    """Microseconds that a copy of so many bytes takes."""
    ok: bool
    error: float
    eager_error: float
    times: dict[str, float]
    commit: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        return self.kind, tuple(self.shape), self.dtype

    @property
    def ratio(self) -> float:
        """Of the better peer."""
        return min(time for name, time in self.times.items() if name != "fxfuse") / self.times["fxfuse"]

    @property
    def share(self) -> float:
        return self.least / self.times["fxfuse"]


def cases(elements: int) -> Iterator[tuple[str, Kind, tuple[int, ...], int]]:
    """Name and kind, the shape of an input of about so many elements, and what the module is built for."""
    for name, kind in KINDS.items():
        for length in LENGTHS:
            if kind.least <= length <= elements:
                yield name, kind, (max(1, elements // length), length), length
    for name, kind in IMAGES.items():
        for channels in CHANNELS:
            for side in SIDES[name]:
                images = max(1, elements // (channels * side**2))
                yield name, kind, (images, channels, side, side), channels


def bytes_a_microsecond(device: torch.device) -> float:
    """At which a tensor that is larger than any cache is copied: read and written."""
    large = torch.ones(2**28 if device.type == "cuda" else 2**25, device=device)
    taken = []
    for _ in range(7):
        wait(device)
        began = time.perf_counter()
        large.clone()
        wait(device)
        taken.append((time.perf_counter() - began) * 1e6)
    return 2 * large.nbytes / statistics.median(taken)


def measure(
    name: str, kind: Kind, shape: tuple[int, ...], built_for: int, dtype: torch.dtype, device: torch.device,
    compare: Sequence[str], seconds: float, speed: float, commit: str,
) -> Row:  # fmt: skip
    """One line."""
    torch._dynamo.reset()  # else a second shape would be compiled for any
    torch.manual_seed(0)
    model = kind.build(built_for).eval().to(device, dtype)
    inputs = tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(kind.inputs))
    fast = fxfuse.optimize(model, inputs)
    verified = fxfuse.verify(model, fast, inputs)
    for _ in range(3):  # programs begin at the third call
        fast(*inputs)
    found = fxfuse.benchmark(model, fast, inputs, compare=compare, seconds=seconds)
    nbytes = kind.passes * inputs[0].nbytes
    return Row(
        kind=name,
        shape=list(shape),
        dtype=str(dtype).removeprefix("torch."),
        nbytes=nbytes,
        least=nbytes / speed,
        ok=verified.ok,
        error=verified.error,
        eager_error=verified.eager_error,
        times={timing.name: timing.median * 1e6 for timing in found.timings},
        commit=commit,
    )


def _mean(values: list[float]) -> str:
    return f"{math.exp(statistics.fmean(map(math.log, values))):.2f}" if values else "-"


def render(rows: list[Row]) -> str:
    """A table, and what each kind comes to."""
    table = [
        (
            row.kind, "x".join(map(str, row.shape)), row.dtype, f"{row.nbytes / 2**20:.2f}",
            "yes" if row.ok else "NO", f"{row.error:.1e} / {row.eager_error:.1e}",
            " / ".join(f"{row.times[name]:.1f}" for name in (*PEERS, "fxfuse") if name in row.times),
            f"{row.ratio:.2f}", f"{row.share:.2f}",
        )
        for row in rows
    ]  # fmt: skip
    headers = (
        "rows", "shape", "dtype", "MB", "right", "error / eager's", f"us: {', '.join(PEERS)}, fxfuse",
        "better peer / fxfuse", "share of a copy's speed",
    )  # fmt: skip
    summary = []
    for kind in dict.fromkeys(row.kind for row in rows):
        own = [row for row in rows if row.kind == kind]
        large = [row.share for row in own if row.nbytes >= LARGE]
        worst = min(own, key=lambda row: row.ratio)
        summary.append(
            (
                kind, len(own), _mean([row.ratio for row in own]), sum(row.ratio < 1 for row in own),
                f"{worst.ratio:.2f}: {'x'.join(map(str, worst.shape))}, {worst.dtype}",
                f"{min(large):.2f} to {max(large):.2f}" if large else "-",
            )
        )  # fmt: skip
    of_kinds = (
        "rows",
        "lines",
        "geometric mean",
        "below 1",
        "least",
        f"share of a copy's speed from {LARGE >> 20} MB on",
    )
    options = {"tablefmt": "github", "disable_numparse": True}
    return f"{tabulate(summary, headers=of_kinds, **options)}\n\n{tabulate(table, headers=headers, **options)}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="kinds whose name contains one of these")
    parser.add_argument("--elements", type=int, nargs="*", default=[2**16, 2**24], help="of an input")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--compare", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--seconds", type=float, default=0.3, help="measuring time for each line")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no line is begun")
    given = parser.parse_args()
    device = torch.device(given.device)
    facts = provenance(device, given.commit)
    kept = read(given.output, "rows", facts, Row) if given.output is not None else []
    rows = {row.key: row for row in kept}
    taken, began = [], time.monotonic()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        speed = bytes_a_microsecond(device)
        heading = ", ".join(f"{key} {value}" for key, value in facts.items()) + f", copies at {speed / 1e3:.0f} GB/s"
        for dtype in given.dtypes:
            for elements in given.elements:
                for name, *case in cases(elements):
                    if not any(part in name for part in given.only) or time.monotonic() - began > given.budget:
                        continue
                    row = measure(
                        name, *case, getattr(torch, dtype), device, given.compare, given.seconds, speed, facts["commit"]
                    )
                    taken.append(row)
                    rows[row.key] = row
            if given.output is not None:
                listed = list(rows.values())
                write(given.output, "rows", facts, f"{heading}\n\n{render(listed)}\n", listed)
    print(f"{heading}\n\n{render(taken)}")


if __name__ == "__main__":
    main()
