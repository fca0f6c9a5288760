"""What a new process waits for: ResNet-50 from a package, from AOTInductor's, by torch.compile and by optimize.

    python benchmarks/deployment.py [--busy] [--output results]

Each way is a process of its own, with an empty compiler's cache where it compiles. Columns: the file's size; seconds to
make it, where that happens before; to load the model (or to build it in Python); of the first three calls, each; a
later call's milliseconds. The imports of torch, fxfuse and transformers are not counted, those that a call makes are. A
package needs no transformers at all, and no compiler.

--busy counts seconds of CPUs, compilers' included, in the place of those on the clock: for a machine that others use,
with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from suite import provenance, write
from tabulate import tabulate

CALLS: Final = 15
BUSY: Final = "FXFUSE_BENCHMARK_BUSY"


@dataclass(frozen=True)
class Row:
    way: str
    file_mb: float | None
    make_s: float | None
    load_s: float
    first_s: float
    second_s: float
    third_s: float
    later_ms: float


def clock() -> float:
    if BUSY not in os.environ:
        return time.perf_counter()
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def model_and_inputs() -> tuple[torch.nn.Module, torch.Tensor]:
    from transformers import ResNetConfig, ResNetForImageClassification  # its default sizes are ResNet-50's

    torch.manual_seed(0)
    return ResNetForImageClassification(ResNetConfig()).eval(), torch.randn(1, 3, 224, 224)


def made_package(path: Path) -> None:
    import fxfuse

    model, x = model_and_inputs()
    fxfuse.save(fxfuse.optimize(model), path, {"pixel_values": x})


def made_aoti(path: Path) -> None:
    model, x = model_and_inputs()
    with torch.no_grad():
        program = torch.export.export(model, (), {"pixel_values": x}, strict=False)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def loaded_package(path: Path) -> Callable[..., Any]:
    import fxfuse

    return fxfuse.load(path, strict=True)


def loaded_aoti(path: Path) -> Callable[..., Any]:
    return torch._inductor.aoti_load_package(str(path))


def compiled(path: Path) -> Callable[..., Any]:
    return torch.compile(model_and_inputs()[0])


def optimised(path: Path) -> Callable[..., Any]:
    import fxfuse

    return fxfuse.optimize(model_and_inputs()[0])


WAYS: Final = {
    "fxfuse.load": (made_package, loaded_package),
    "AOTInductor": (made_aoti, loaded_aoti),
    "torch.compile, nothing cached": (None, compiled),
    "torch.compile, cached": (None, compiled),
    "fxfuse.optimize, nothing cached": (None, optimised),
    "fxfuse.optimize, cached": (None, optimised),
    "eager": (None, lambda path: model_and_inputs()[0]),
}  # fmt: skip


def make(way: str, path: Path) -> None:
    """In a process: writes the way's file, and says how many seconds that took."""
    started = clock()
    WAYS[way][0](path)  # type: ignore[misc]
    print(json.dumps(clock() - started))


def run(way: str, path: Path) -> None:
    """In a process: loads and calls, and says how long that took, in seconds."""
    import fxfuse  # noqa: F401 - not counted

    if way != "fxfuse.load":
        import transformers.models.resnet.modeling_resnet  # noqa: F401 - not counted
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        started = clock()
        model = WAYS[way][1](path)
        loaded = clock()
        samples = []
        for _ in range(CALLS):
            before = clock()
            model(pixel_values=x)
            samples.append(clock() - before)
    print(json.dumps([loaded - started, *samples[:3], statistics.median(samples[3:]) * 1e3]))


def in_process(what: str, way: str, path: Path, caches: Path) -> Any:
    environment = {
        **os.environ, "FXFUSE_CACHE_DIR": str(caches / "fxfuse"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }  # fmt: skip
    command = [sys.executable, __file__, what, way, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{way}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", action="store_true", help="count seconds of CPUs")
    parser.add_argument("--output", help="folder for the results as JSON")
    given = parser.parse_args()
    if given.busy:
        os.environ[BUSY] = "1"
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        for way, (maker, _) in WAYS.items():
            path = Path(name) / f"{len(rows)}.pt2"
            caches = Path(name) / way.partition(",")[0].replace(" ", "-")  # "cached": those of the process before
            size = seconds = None
            if maker is not None:
                seconds = in_process("make", way, path, caches)
                size = path.stat().st_size / 2**20
                caches = Path(name) / "nothing"
            rows.append(Row(way, size, seconds, *in_process("run", way, path, caches)))
            print(f"{way}: done", file=sys.stderr)
    facts = {**provenance(torch.device("cpu")), "seconds": "of CPUs" if given.busy else "on the clock"}
    headers = ("way", "file MB", "make s", "load s", "first call s", "second call s", "third call s", "later call ms")
    table = tabulate(map(dataclasses.astuple, rows), headers, floatfmt=".3g", missingval="-", tablefmt="github")
    text = f"{', '.join(f'{name} {value}' for name, value in facts.items())}\n\n{table}\n"
    print(text)
    if given.output:
        write(Path(given.output), "deployment", facts, text, rows)


if __name__ == "__main__":
    if sys.argv[1:2] in (["make"], ["run"]):
        (make if sys.argv[1] == "make" else run)(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
