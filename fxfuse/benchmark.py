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

from fxfuse.arguments import Inputs, arguments_of
from fxfuse.errors import FxfuseError
from fxfuse.state import unchanged

L2_FLUSH_BYTES: Final = 256 << 20
"""Read between timed runs on a GPU, several times any L2, so that every run starts from memory."""
AHEAD_CYCLES: Final = 400_000
"""For which a GPU waits before a timed run (0.2 ms at 2 GHz), so that it does not wait in between for the CPU to issue
the run's kernels: Python needs 0.02 to 0.1 ms for a layer's."""
AHEAD_SECONDS: Final = AHEAD_CYCLES / 2e9


@dataclass(frozen=True)
class Timing:
    """One contestant's times, in seconds."""

    name: str
    median: float
    minimum: float
    first_call: float
    """The first call, compilation included."""
    runs: int


@dataclass(frozen=True)
class Benchmark:
    """A table of timings; str() renders it."""

    timings: tuple[Timing, ...]
    device: str
    failures: tuple[str, ...] = ()
    """Peers that could not run, each with its error."""

    def median(self, name: str) -> float:
        """The median of the contestant of that name, in seconds."""
        return next(timing.median for timing in self.timings if timing.name == name)

    def __str__(self) -> str:
        base = self.timings[-1].median  # fxfuse comes last
        rows = [
            (
                t.name,
                f"{t.median * 1e3:.3f}",
                f"{t.minimum * 1e3:.3f}",
                f"{t.median / base:.2f}x",
                f"{t.first_call:.2f}",
                t.runs,
            )
            for t in self.timings
        ]
        headers = ("", "median ms", "min ms", "of fxfuse's", "first call s", "runs")
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
        compare: of "eager", "torch.compile" and "max-autotune" (torch.compile's mode of that name).
        seconds: how long to measure all contestants together, first calls not counted.

    On a GPU each run is timed with events after flushing the L2 cache. The first 0.2 ms that the CPU takes to issue it
    are hidden, as in a program that keeps the GPU busy. Runs under torch.no_grad(). Raises FxfuseError for an unknown
    peer, or for inputs of another kind; a peer that fails to run is left out, with its error below the table.
    """
    args, keywords = arguments_of(inputs, kwargs, "inputs")
    peers: dict[str, Callable[..., Any]] = {name: _peer(model, name) for name in compare}
    peers["fxfuse"] = fast
    contestants = {name: functools.partial(peer, *args, **keywords) for name, peer in peers.items()}
    device = _device_of(model, (args, keywords))
    time_once = gpu_timer(device) if device.type == "cuda" else _cpu_time
    with unchanged(model, fast):
        first_calls = {name: _first_call(call, device) for name, call in contestants.items()}
        failed = {name for name, (_, error) in first_calls.items() if error is not None}
        if "fxfuse" in failed:
            error = first_calls["fxfuse"][1]
            assert error is not None
            raise error
        running = {name: call for name, call in contestants.items() if name not in failed}
        times: dict[str, list[float]] = {name: [] for name in running}
        for call in running.values():  # the second call still allocates and autotunes
            time_once(call, ())
        with _garbage_of_runs_only():
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline or len(times["fxfuse"]) < 3:
                for name, call in running.items():
                    times[name].append(time_once(call, ()))
    timings = tuple(
        Timing(name, statistics.median(samples), min(samples), first_calls[name][0], len(samples))
        for name, samples in times.items()
    )
    failures = tuple(f"{name}: {first_calls[name][1]}" for name in sorted(failed))
    return Benchmark(timings, _describe(device), failures)


@contextlib.contextmanager
def _garbage_of_runs_only() -> Iterator[None]:
    """Inside, Python's collector looks at what was made inside.

    torch.compile leaves millions of objects: to look at all of them takes longer than the run in whose time it falls.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _peer(model: nn.Module, name: str) -> Callable[..., Any]:
    if name == "eager":
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


def _first_call(call: Callable[[], Any], device: torch.device) -> tuple[float, Exception | None]:
    started = time.perf_counter()
    try:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # a peer's compiler may fail in any way; the others are still worth measuring
        return float("nan"), error
    return time.perf_counter() - started, None


def _cpu_time(call: Callable[..., Any], inputs: Sequence[Any]) -> float:
    started = time.perf_counter()
    call(*inputs)
    return time.perf_counter() - started


def gpu_timer(device: torch.device, attempts: int = 1) -> Callable[[Callable[..., Any], Sequence[Any]], float]:
    """A function that runs a call on the device once, its L2 flushed, and returns the seconds between two events.

    `attempts`: how often a run is made at most whose launches took the CPU longer than the GPU waits for them, as when
    another thread has Python's lock or the processor. The last one counts.
    """
    flush = torch.zeros(L2_FLUSH_BYTES // 4, device=device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def time_once(call: Callable[..., Any], inputs: Sequence[Any]) -> float:
        for _ in range(attempts):
            flush.sum()  # what is only read leaves nothing to be written back during the run
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
