"""What a new process waits for: ResNet-50 from a package, from AOTInductor's, by torch.compile and by optimize.

    python benchmarks/deployment.py [--device cuda] [--batch 32] [--busy] [--only AOTInductor] [--output results]

Each way is a process of its own, with an empty compiler's cache where it compiles. Columns: the file's size; seconds to
make it, where that happens before; to load the model (or to build it in Python); of the first three calls, each; a
later call's milliseconds. The imports of torch, fxfuse and transformers are not counted, those that a call makes are. A
package needs no transformers at all, and no compiler. On a GPU a call ends when its result is there, and CUDA is
initialised before the clock starts.

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
class Setting:
    """Where ResNet-50 runs, and of how many images."""

    device: str
    batch: int

    def images(self) -> torch.Tensor:
        return torch.randn(self.batch, 3, 224, 224, device=self.device)

    def model(self) -> torch.nn.Module:
        from transformers import ResNetConfig, ResNetForImageClassification  # its default sizes are ResNet-50's

        torch.manual_seed(0)
        model: torch.nn.Module = ResNetForImageClassification(ResNetConfig()).eval()
        return model.to(self.device)

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


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


def made_package(path: Path, setting: Setting) -> None:
    import fxfuse

    fxfuse.save(fxfuse.optimize(setting.model()), path, {"pixel_values": setting.images()})


def made_aoti(path: Path, setting: Setting) -> None:
    with torch.no_grad():
        program = torch.export.export(setting.model(), (), {"pixel_values": setting.images()}, strict=False)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def loaded_package(path: Path, setting: Setting) -> Callable[..., Any]:
    import fxfuse

    return fxfuse.load(path, strict=True)


def loaded_aoti(path: Path, setting: Setting) -> Callable[..., Any]:
    return torch._inductor.aoti_load_package(str(path))


def compiled(path: Path, setting: Setting) -> Callable[..., Any]:
    return torch.compile(setting.model())


def optimised(path: Path, setting: Setting) -> Callable[..., Any]:
    import fxfuse

    return fxfuse.optimize(setting.model())


WAYS: Final = {
    "fxfuse.load": (made_package, loaded_package),
    "AOTInductor": (made_aoti, loaded_aoti),
    "torch.compile, nothing cached": (None, compiled),
    "torch.compile, cached": (None, compiled),
    "fxfuse.optimize, nothing cached": (None, optimised),
    "fxfuse.optimize, cached": (None, optimised),
    "eager": (None, lambda path, setting: setting.model()),
}  # fmt: skip


def make(way: str, path: Path, setting: Setting) -> None:
    """In a process: writes the way's file, and says how many seconds that took."""
    torch.zeros(1, device=setting.device)
    started = clock()
    WAYS[way][0](path, setting)  # type: ignore[misc]
    print(json.dumps(clock() - started))


def run(way: str, path: Path, setting: Setting) -> None:
    """In a process: loads and calls, and says how long that took, in seconds."""
    import fxfuse  # noqa: F401 - not counted

    if way != "fxfuse.load":
        import transformers.models.resnet.modeling_resnet  # noqa: F401 - not counted
    x = setting.images()
    setting.wait()
    with torch.no_grad():
        started = clock()
        model = WAYS[way][1](path, setting)
        setting.wait()
        loaded = clock()
        samples = []
        for _ in range(CALLS):
            before = clock()
            model(pixel_values=x)
            setting.wait()
            samples.append(clock() - before)
    print(json.dumps([loaded - started, *samples[:3], statistics.median(samples[3:]) * 1e3]))


def in_process(what: str, way: str, path: Path, setting: Setting, caches: Path) -> Any:
    environment = {
        **os.environ, "FXFUSE_CACHE_DIR": str(caches / "fxfuse"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }  # fmt: skip
    command = [sys.executable, "-X", "faulthandler", __file__, what, way, str(path), setting.device, str(setting.batch)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = "\n".join(done.stderr.splitlines()[-20:])
        raise RuntimeError(f"{way}: to {what} it ended with {done.returncode}: {said}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(way: str, folder: Path, setting: Setting) -> Row:
    """Raises RuntimeError if one of the processes fails."""
    caches = folder / way.partition(",")[0].replace(" ", "-")  # "cached": those of the process before
    if WAYS[way][0] is None:
        return Row(way, None, None, *in_process("run", way, folder, setting, caches))
    path = folder / f"{way}.pt2"
    seconds = in_process("make", way, path, setting, caches)
    size = path.stat().st_size / 2**20
    return Row(way, size, seconds, *in_process("run", way, path, setting, folder / "nothing"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch", type=int, default=1, help="images a call")
    parser.add_argument("--commit", default="", help="what to record where the checkout has no git")
    parser.add_argument(
        "--only",
        nargs="*",
        default=[""],
        help="ways whose names contain one of these; a cached one needs the one before it",
    )
    parser.add_argument("--busy", action="store_true", help="count seconds of CPUs")
    parser.add_argument("--output", help="folder for the results as JSON")
    given = parser.parse_args()
    if given.busy:
        os.environ[BUSY] = "1"
    setting = Setting(given.device, given.batch)
    rows: list[Row] = []
    failed: list[str] = []
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        for way in WAYS:
            if not any(part in way for part in given.only):
                continue
            try:
                rows.append(measure(way, Path(name), setting))
            except RuntimeError as error:
                failed.append(str(error))
            print(f"{way}: done after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    facts = {
        **provenance(torch.device(setting.device), given.commit),
        "batch": str(setting.batch), "seconds": "of CPUs" if given.busy else "on the clock",
    }  # fmt: skip
    headers = ("way", "file MB", "make s", "load s", "first call s", "second call s", "third call s", "later call ms")
    table = tabulate(map(dataclasses.astuple, rows), headers, floatfmt=".3g", missingval="-", tablefmt="github")
    text = f"{', '.join(f'{name} {value}' for name, value in facts.items())}\n\n{table}\n"
    print(text)
    if given.output:
        write(Path(given.output), "deployment", facts, text, rows)
    if failed:
        raise SystemExit("\n\n".join(failed))


if __name__ == "__main__":
    if sys.argv[1:2] in (["make"], ["run"]):
        way, path, device, batch = sys.argv[2:]
        (make if sys.argv[1] == "make" else run)(way, Path(path), Setting(device, int(batch)))
    else:
        main()
