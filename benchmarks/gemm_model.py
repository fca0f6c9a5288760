"""How good the time model of fxfuse/cuda/gemm.py is: every tile with several splits, measured against its first choice.

    python benchmarks/gemm_model.py
    python benchmarks/gemm_model.py --precisions bf16 --all

Prints per problem the fastest kernel, the model's first one, their ratio and torch's matrix product; with --all every
time, which is what the model's constants are fitted to. Medians of interleaved runs, timed as fxfuse.benchmark does.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from tabulate import tabulate

from fxfuse import build
from fxfuse.benchmark import gpu_timer
from fxfuse.cuda import codegen, gemm, gemm_problem
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.precision import Precision
from fxfuse.expression import parse

ROUNDS = 5
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
DTYPES = {"tf32x3": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

SHAPES = [
    (1, 4096, 4096), (4, 14336, 4096), (8, 5120, 5120), (16, 8192, 8192), (24, 4096, 14336), (32, 8192, 8192),
    (48, 8192, 2048), (64, 4096, 4096), (96, 11008, 4096), (128, 8192, 8192), (192, 1024, 4096), (197, 768, 768),
    (256, 2048, 2048), (384, 384, 6144), (512, 512, 16384), (640, 1280, 1280), (1024, 768, 3072), (1024, 1024, 1024),
    (1536, 512, 2048), (2048, 1024, 1024), (2560, 1280, 640), (3152, 768, 768), (4096, 1024, 4096), (6304, 2304, 768),
    (8192, 16, 2048), (16384, 8, 4096), (16384, 64, 1024), (1024, 8192, 8192), (512, 16384, 4096), (128, 32768, 32768),
]  # fmt: skip


def kernels_of(problem: gemm_problem.Problem) -> dict[tuple[gemm_problem.Tile, int], Kernel]:
    """By tile and number of splits. Accuracy is no question here."""
    return {
        (tile, splits): gemm._kernel(tile, problem, splits)
        for tile in gemm._tiles(problem)
        if tile.m == 16 or tile.m < 2 * problem.m
        for splits in {1, *gemm.possible_splits(tile, problem)} & set(SPLITS)
    }


def load(kernels: list[Kernel], precision: Precision) -> dict[str, build.Launch]:
    """Launch functions by the kernel's type, compiled several at a time."""
    capability = torch.cuda.get_device_capability()
    types = {kernel.type: kernel for kernel in kernels}

    def compiled(kernel: Kernel) -> build.Launch:
        text = codegen.generate(parse("relu(acc)"), DTYPES[precision], (), kernel)
        return build.load(build.Source(text, capability, kernel.name))

    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        return dict(zip(types, pool.map(compiled, types.values()), strict=True))


def measure(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median microseconds of each."""
    time_once = gpu_timer(torch.device("cuda"))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            samples[name].append(time_once(call, ()) * 1e6)
    return {name: statistics.median(times) for name, times in samples.items()}


def problem_of(m: int, n: int, k: int, precision: Precision) -> gemm_problem.Problem:
    device = torch.cuda.get_device_properties()
    return gemm_problem.Problem(
        m, n, k, precision, "nk", k, k, n,
        multiprocessors=device.multi_processor_count, shared_memory=device.shared_memory_per_multiprocessor,
        shared_memory_per_block=getattr(device, "shared_memory_per_block_optin", None),
        hopper=(device.major, device.minor) == (9, 0),
    )  # fmt: skip


def times_of(problem: gemm_problem.Problem, loaded: dict[str, build.Launch]) -> dict[str, float]:
    """Microseconds by kernel name; torch's under "torch"."""
    options = {"device": "cuda", "dtype": DTYPES[problem.precision]}
    x, weight = torch.randn(problem.m, problem.k, **options), torch.randn(problem.n, problem.k, **options)
    out = torch.empty(problem.m, problem.n, **options)
    kernels = kernels_of(problem)
    scratch = torch.empty(max(kernel.workspace for kernel in kernels.values()), dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream

    def call(kernel: Kernel) -> Callable[[], object]:
        pointers = [x.data_ptr(), weight.data_ptr(), out.data_ptr()] + [scratch.data_ptr()] * (kernel.workspace > 0)
        return lambda: loaded[kernel.type](kernel.params, stream, *pointers)

    calls = {kernel.name: call(kernel) for kernel in kernels.values()}
    return measure({**calls, "torch": lambda: torch.mm(x, weight.t(), out=out)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs="+", default=["tf32x3", "bf16"], choices=list(DTYPES))
    parser.add_argument("--all", action="store_true", help="print the time of every kernel")
    arguments = parser.parse_args()
    for precision in arguments.precisions:
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        problems = [problem_of(*shape, precision) for shape in SHAPES]
        loaded = load([kernel for problem in problems for kernel in kernels_of(problem).values()], precision)
        rows, ratios = [], []
        for problem in problems:
            times = times_of(problem, loaded)
            torch_time = times.pop("torch")
            kernels = kernels_of(problem)
            modelled = {
                kernel.name: gemm.estimated_time(tile, problem, splits) for (tile, splits), kernel in kernels.items()
            }
            best, first = min(times, key=lambda name: times[name]), min(modelled, key=lambda name: modelled[name])
            ratios.append(times[first] / times[best])
            shape = f"{problem.m}x{problem.n}x{problem.k}"
            rows.append((shape, best, times[best], first, times[first], modelled[first], ratios[-1], torch_time))
            if arguments.all:
                print(shape, *(f"{name}: {time:.1f};" for name, time in times.items()))
        headers = ("problem", "fastest", "us", "the model's first", "us", "modelled", "ratio", f"torch {precision}")
        print(tabulate(rows, headers=headers, floatfmt=("", "", ".1f", "", ".1f", ".1f", ".2f", ".1f")))
        print(f"first within 10 % of the fastest: {sum(ratio <= 1.1 for ratio in ratios)} of {len(ratios)}\n")


if __name__ == "__main__":
    main()
