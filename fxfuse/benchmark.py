"""benchmark(): eager, torch.compile and fxfuse side by side, in one run."""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from tabulate import tabulate
from torch import nn
from torch.utils import _pytree as pytree

from fxfuse import progress
from fxfuse.arguments import Inputs, arguments_of
from fxfuse.errors import FxfuseError
from fxfuse.state import unchanged

EAGER, OWN = "eager", "fxfuse"
"""Names of contestants."""

L2_FLUSH_BYTES: Final = 256 << 20
"""Bytes that are read before each timed run on a GPU: several times any L2, so that every run starts from memory."""
AHEAD_CYCLES: Final = 400_000
"""Cycles that a GPU waits before a timed run (0.2 ms at 2 GHz). The CPU issues the run's kernels meanwhile, so the GPU
does not wait for them during the run: Python needs 0.02 to 0.1 ms for a layer's."""
AHEAD_SECONDS: Final = AHEAD_CYCLES / 2e9
WARM_UP: Final = 5
"""Calls before the timed ones. Compilers work in the first of them. At the third, fxfuse's programs begin, and Dynamo
captures what fx cannot trace."""


@dataclass(frozen=True)
class Timing:
    """One contestant's times, in seconds."""

    name: str
    median: float
    minimum: float
    first_call: float
    """The first call, compilation included."""
    runs: int
    compile_time: float = 0.0
    """The time of the first WARM_UP calls beyond that of as many median calls: compiling, measuring, recording. It does
    not include what fxfuse.optimize compiled before, for `example_inputs`."""


@dataclass(frozen=True)
class Benchmark:
    """A table of timings; str() renders it.

    Its columns: the median and the least time of a call; eager's median divided by this one ("-" if eager was not asked
    for); how much longer the first calls took than later ones (`Timing.compile_time`); the number of timed calls.
    """

    timings: tuple[Timing, ...]
    device: str
    failures: tuple[str, ...] = ()
    """Peers that could not run, each with its error."""

    def median(self, name: str) -> float:
        """The median of the contestant of that name, in seconds."""
        return next(timing.median for timing in self.timings if timing.name == name)

    def __str__(self) -> str:
        eager = next((timing.median for timing in self.timings if timing.name == EAGER), None)
        rows = [
            (
                t.name,
                f"{t.median * 1e3:.3f}",
                f"{t.minimum * 1e3:.3f}",
                "-" if eager is None else f"{eager / t.median:.2f}x",
                f"{t.compile_time:.2f}",
                t.runs,
            )
            for t in self.timings
        ]
        headers = ("", "median ms", "min ms", "speed-up over eager", "compile time s", "runs")
        notes = "".join(f"\nleft out: {failure}" for failure in self.failures)
        table = tabulate(rows, headers=headers, tablefmt="simple_outline", disable_numparse=True)
        return f"{self.device}\n{table}{notes}"


def benchmark(
    model: nn.Module,
    fast: nn.Module,
    inputs: Inputs | None = None,
    compare: Sequence[str] = ("eager", "torch.compile"),
    *,
    kwargs: Mapping[str, Any] | None = None,
    seconds: float = 2.0,
) -> Benchmark:
    """Times `fast` and its peers on the same inputs, interleaved, and reports medians.

    Args:
        inputs: a tuple of positional arguments, a dict of keyword arguments, or a tensor; they stay the same for every
            run.
        kwargs: keyword arguments beside positional ones.
        compare: any of "eager", "torch.compile" and "max-autotune" (torch.compile's mode of that name).
        seconds: how long to measure all contestants together, without the warm-up calls.

    On a GPU each run is timed with events after flushing the L2 cache. The first 0.2 ms that the CPU takes to issue the
    run are hidden, as in a program that keeps the GPU busy. Runs under torch.no_grad(). Raises FxfuseError for an
    unknown peer, or for inputs of another kind. A peer that fails to run is left out; its error is below the table.
    """
    args, keywords = arguments_of(inputs, kwargs, "inputs")
    peers: dict[str, Callable[..., Any]] = {name: _peer(model, name) for name in compare}
    peers[OWN] = fast
    contestants = {name: functools.partial(peer, *args, **keywords) for name, peer in peers.items()}
    device = _device_of(model, (args, keywords))
    time_once = gpu_timer(device) if device.type == "cuda" else _cpu_time
    with unchanged(model, fast):
        warm_up: dict[str, list[float]] = {}
        failed: dict[str, Exception] = {}
        for name, call in contestants.items():
            try:
                with progress.steps("compare", 1, name):
                    warm_up[name] = [_waited_for(call, device) for _ in range(WARM_UP)]
            except Exception as error:  # a peer's compiler may fail in any way; the others are still worth measuring
                if name == OWN:
                    raise
                failed[name] = error
        running = {name: call for name, call in contestants.items() if name not in failed}
        times: dict[str, list[float]] = {name: [] for name in running}
        for call in running.values():  # the timer's own first use
            time_once(call, ())
        with _garbage_of_runs_only():
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline or len(times[OWN]) < 3:
                for name, call in running.items():
                    times[name].append(time_once(call, ()))
    timings = tuple(_timing(name, samples, warm_up[name]) for name, samples in times.items())
    failures = tuple(f"{name}: {failed[name]}" for name in sorted(failed))
    return Benchmark(timings, _describe(device), failures)


def _timing(name: str, samples: Sequence[float], warm_up: Sequence[float]) -> Timing:
    median = statistics.median(samples)
    compile_time = max(0.0, sum(warm_up) - len(warm_up) * median)
    return Timing(name, median, min(samples), warm_up[0], len(samples), compile_time)


@contextlib.contextmanager
def _garbage_of_runs_only() -> Iterator[None]:
    """Inside, Python's garbage collector looks only at objects that were made inside.

    torch.compile leaves millions of objects. A collection that looks at all of them takes longer than the timed run.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _peer(model: nn.Module, name: str) -> Callable[..., Any]:
    if name == EAGER:
        return model
    if name in ("torch.compile", "max-autotune"):
        mode = "default" if name == "torch.compile" else name
        compiled: Callable[..., Any] = torch.compile(model, mode=mode)
        return compiled
    raise FxfuseError(f"benchmark cannot compare with {name!r}; choose from eager, torch.compile, max-autotune")


def _device_of(model: nn.Module, inputs: Any) -> torch.device:
    tensors = [*model.parameters(), *(leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor))]
    return tensors[0].device if tensors else torch.device("cpu")


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"CPU ({torch.get_num_threads()} threads), torch {torch.__version__}"


def _waited_for(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds until the call's results are there."""
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _cpu_time(call: Callable[..., Any], inputs: Sequence[Any]) -> float:
    started = time.perf_counter()
    call(*inputs)
    return time.perf_counter() - started


def gpu_timer(device: torch.device, attempts: int = 1) -> Callable[[Callable[..., Any], Sequence[Any]], float]:
    """A function that flushes the device's L2, runs a call once and returns the seconds between two events.

    `attempts`: the most runs of a call. A run is repeated if the CPU took longer to issue it than the GPU waits, as
    when another thread has Python's lock or the processor. The last run counts.
    """
    flush = torch.zeros(L2_FLUSH_BYTES // 4, device=device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def time_once(call: Callable[..., Any], inputs: Sequence[Any]) -> float:
        for _ in range(attempts):
            flush.sum()  # only reads, so that nothing is written back to memory during the run
            began = time.perf_counter()
            torch.cuda._sleep(AHEAD_CYCLES)
            start.record()
            call(*inputs)
            end.record()
            issued = time.perf_counter() - began
            end.synchronize()
            if issued < AHEAD_SECONDS:
                break
        return float(start.elapsed_time(end)) * 1e-3

    return time_once
