"""Whole networks against eager and torch.compile: what was fused, launches, errors, times, time to the first result.

    python benchmarks/networks.py --output benchmarks/results
    python benchmarks/networks.py --only ResNet BERT --precisions float32 float32-fast bfloat16

From torchvision and transformers, with random weights. Each network runs in a process of its own with an empty kernel
cache ("cold"), then in another one with what the first compiled ("warm"). With --output, rows of earlier runs that are
not measured again stay, each with its commit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from suite import PRECISIONS, Precision, arguments, launches, provenance, read, write
from tabulate import tabulate
from torch import nn

import fxfuse

IMAGE = (3, 224, 224)
GRAPHS = "fxfuse, CUDA graphs"
BACKEND = "fxfuse, by Dynamo"
"""torch.compile(model, backend="fxfuse"), measured where `optimize` leaves parts of a model to Python."""


@dataclass(frozen=True)
class Network:
    """A model and the shape of its input; of token identifiers if `tokens` is how many there are."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int = 0
    channels_last: bool = False
    """Whether its 16-bit version lives in channels_last, as is usual."""


def _torchvision(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        return torchvision.models.get_model(name, weights=None)  # type: ignore[no-any-return]

    return build


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig())


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig())


NETWORKS = {
    "ResNet-50": Network(_torchvision("resnet50"), (64, *IMAGE), channels_last=True),
    "MobileNetV2": Network(_torchvision("mobilenet_v2"), (64, *IMAGE), channels_last=True),
    "VGG-16": Network(_torchvision("vgg16"), (32, *IMAGE), channels_last=True),
    "EfficientNet-B0": Network(_torchvision("efficientnet_b0"), (64, *IMAGE), channels_last=True),
    "ConvNeXt-T": Network(_torchvision("convnext_tiny"), (32, *IMAGE), channels_last=True),
    "ViT-B/16": Network(_vit, (32, *IMAGE)),
    "BERT-base": Network(_bert, (16, 128), tokens=30522),
}


@dataclass(frozen=True)
class Row:
    """One line of the results. Times in milliseconds, medians."""

    network: str
    precision: str
    anchors: int
    """Linears, two-dimensional convolutions and layer normalisations that the model has."""
    regions: int
    """Regions in use that have an anchor."""
    chains: int
    """Passes in use of pointwise work alone."""
    launches: int
    eager_launches: int
    error: float
    eager_error: float
    ok: bool
    times: dict[str, float]
    first_result: dict[str, float]
    """Seconds from the model to its first result, compilation included: torch.compile's, fxfuse's cold and warm."""
    commit: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.network, self.precision


def trained(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # as if trained: not the identity that fresh statistics are
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


@dataclass(frozen=True)
class _Trial:
    """A network before and after, and what it took to get there."""

    model: nn.Module
    fast: nn.Module
    x: torch.Tensor
    seconds: float
    """From the model to the first result."""

    @classmethod
    def of(cls, name: str, how: Precision, small: bool) -> _Trial:
        network = NETWORKS[name]
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(0)
        model = trained(network.build()).to(device, how.dtype)
        shape = (1, *network.shape[1:]) if small else network.shape
        x = torch.randint(network.tokens, shape, device=device) if network.tokens else torch.randn(shape, device=device)
        x = x.to(how.dtype) if x.is_floating_point() else x
        if network.channels_last and how.dtype != torch.float32:
            model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        started = time.perf_counter()
        fast = fxfuse.optimize(model, (x,), fp32=how.fp32)
        fast(x)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return cls(model, fast, x, time.perf_counter() - started)


def first_result(name: str, precision: str, small: bool) -> float:
    """Seconds from a network to its first result by fxfuse, in this process."""
    how = PRECISIONS[precision]
    with torch.no_grad(), how.in_force():
        return _Trial.of(name, how, small).seconds


def measure(name: str, precision: str, compare: Sequence[str], seconds: float, small: bool) -> Row:
    """Optimises, verifies and times one network beside its peers, in this process."""
    how = PRECISIONS[precision]
    with torch.no_grad(), how.in_force():
        trial = _Trial.of(name, how, small)
        model, fast, x = trial.model, trial.fast, trial.x
        verified = fxfuse.verify(model, fast, (x,))
        counts = [launches(lambda: call(x)) if x.is_cuda else 0 for call in (fast, model)]  # noqa: B023
        result = fxfuse.benchmark(model, fast, (x,), compare=compare, seconds=seconds)
        times = {timing.name: timing.median * 1e3 for timing in result.timings}
        if x.is_cuda:
            graphed = fxfuse.optimize(model, (x,), fp32=how.fp32, cuda_graphs=True)
            times[GRAPHS] = (
                fxfuse.benchmark(model, graphed, (x,), compare=(), seconds=seconds / 4).median("fxfuse") * 1e3
            )
        report = fxfuse.explain(fast)
        if any("runs as Python" in item.reason for item in report.skipped):
            torch._dynamo.reset()
            compiled = torch.compile(model, backend="fxfuse")
            times[BACKEND] = (
                fxfuse.benchmark(model, compiled, (x,), compare=(), seconds=seconds / 4).median("fxfuse") * 1e3
            )
    used = {region.nodes: region.chain for region in report.regions if region.kernel}
    return Row(
        network=name,
        precision=precision,
        anchors=sum(isinstance(module, nn.Linear | nn.Conv2d | nn.LayerNorm) for module in model.modules()),
        regions=sum(not chain for chain in used.values()),
        chains=sum(used.values()),
        launches=counts[0],
        eager_launches=counts[1],
        error=verified.error,
        eager_error=verified.eager_error,
        ok=verified.ok,
        times=times,
        first_result={
            "fxfuse cold": trial.seconds,
            **{timing.name: timing.first_call for timing in result.timings if timing.name not in ("eager", "fxfuse")},
        },
    )


def _in_a_process(cache: str, options: list[str]) -> Any:
    """What this script prints with these options, with `cache` as its kernel cache."""
    command = [sys.executable, __file__, *options]
    environment = {**os.environ, "FXFUSE_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": os.path.join(cache, "inductor")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(options)} failed; its messages are above")
    return json.loads(done.stdout.splitlines()[-1])


def render(rows: Sequence[Row]) -> str:
    """A table of the rows, the best peer's time as a multiple of fxfuse's."""
    own_names = ("fxfuse", GRAPHS, BACKEND)
    peers = list(dict.fromkeys(name for row in rows for name in row.times if name not in own_names))
    table = []
    for row in rows:
        own = row.times["fxfuse"]
        best = min((row.times[name] for name in peers if name in row.times), default=float("nan"))
        table.append(
            (
                row.network, row.precision, f"{row.regions} / {row.anchors}", row.chains,
                f"{row.eager_launches} → {row.launches}", f"{row.error:.1e} / {row.eager_error:.1e}",
                *(f"{row.times[name]:.2f}" if name in row.times else "-" for name in (*peers, *own_names)),
                f"{best / own:.2f}x",
                ", ".join(f"{name} {seconds:.1f}" for name, seconds in row.first_result.items()),
            )
        )  # fmt: skip
    headers = (
        "network", "precision", "regions / anchors", "chains", "launches", "error / eager's", *peers, *own_names,
        "best peer / fxfuse", "first result, s",
    )  # fmt: skip
    return tabulate(table, headers=headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--precisions", nargs="*", default=["float32", "bfloat16"], choices=list(PRECISIONS))
    parser.add_argument("--compare", nargs="*", default=["eager", "torch.compile"])
    parser.add_argument("--only", nargs="*", default=[""], help="networks whose name contains one of these")
    parser.add_argument("--seconds", type=float, default=2.0, help="measuring time for each row")
    parser.add_argument("--small", action="store_true", help="batches of one")
    parser.add_argument("--one", nargs=2, metavar=("NETWORK", "PRECISION"), help="print one row as JSON")
    parser.add_argument("--first", nargs=2, metavar=("NETWORK", "PRECISION"), help="print the first result's seconds")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(asdict(measure(*given.one, given.compare, given.seconds, given.small))))
        return
    if given.first:
        print(json.dumps(first_result(*given.first, given.small)))
        return
    facts = provenance(torch.device(given.device), given.commit)
    heading = ", ".join(f"{key} {value}" for key, value in facts.items())
    rows = {row.key: row for row in (read(given.output, "networks", facts, Row) if given.output is not None else [])}
    measured: list[Row] = []
    size = ["--small"] if given.small else []
    for name in (name for name in NETWORKS if any(part in name for part in given.only)):
        for precision in given.precisions:
            with tempfile.TemporaryDirectory() as cache:
                options = ["--seconds", str(given.seconds), "--compare", *given.compare]
                row = Row(**_in_a_process(cache, ["--one", name, precision, *size, *options]))
                warm = _in_a_process(cache, ["--first", name, precision, *size])
            row = replace(row, commit=facts["commit"], first_result=row.first_result | {"fxfuse warm": warm})
            rows[row.key] = row
            measured.append(row)
            print(render([row]).splitlines()[-1], flush=True)
            if given.output is not None:  # after each row, so that an interrupted run leaves what it measured
                text = f"{heading}\n\nMilliseconds, medians of interleaved runs.\n\n{render(list(rows.values()))}\n"
                write(Path(given.output), "networks", facts, text, list(rows.values()))
    print(f"\n{heading}\n{render(measured)}")


if __name__ == "__main__":
    main()
