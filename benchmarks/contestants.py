"""Who is compared in a benchmark of whole models, and what a call of each takes."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fxfuse.verify import leaves_of

EAGER, COMPILE, REDUCE, OWN, GRAPH = "eager", "torch.compile", "reduce-overhead", "fxfuse", "fxfuse, CUDA graphs"
PEERS = (EAGER, COMPILE, REDUCE)
Call = Callable[[], Any]
"""Of one contestant, with its arguments."""
WARM = 12
"""Calls after which a contestant is at its speed: CUDA graphs begin at the second one and fxfuse's programs at the
third, at which Dynamo captures what fx cannot trace; programs of training steps begin a few calls behind that, and
CUDA graphs of steps four calls later."""
APART = 0.2
"""Part of a result's norm that rounding does not explain."""
FOLDERS = re.compile(r"(?<![\w.])/\S*?/(?=[\w.-]+/[\w.-]+\.py)")
"""Those of a path to a file in Python, but for the last."""
COPIES = re.compile(r"copy|Memcpy DtoD|nchwToNhwc|nhwcToNchw|transpose", re.IGNORECASE)
"""Names of kernels that only move values."""


@dataclass(frozen=True)
class Contestant:
    """What one of them takes. Times in milliseconds, medians; memory in MB beyond what lies there before a call."""

    wall: float
    issue: float
    kernels: int = 0
    copies: int = 0
    gpu: float = 0.0
    memory: float = 0.0


def wait(device: torch.device) -> None:
    """For what was issued to a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def distance_between(expected: Any, made: Any) -> float:
    """The largest distance between two results' tensors, where they are finite, as a part of the expected one's norm;
    infinite where they are not the same tensors."""
    pairs = [[leaf for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor)] for result in (expected, made)]
    if [leaf.shape for leaf in pairs[0]] != [leaf.shape for leaf in pairs[1]]:
        return math.inf
    worst = 0.0
    for want, have in zip(*pairs, strict=True):
        finite = want.isfinite() & have.isfinite()
        norm, distance = (float(one.double()[finite].norm()) for one in (want, have.double() - want.double()))
        worst = max(worst, distance / max(norm, 1e-30))
    return worst


def warmed(
    calls: dict[str, Call],
    device: torch.device,
    distance: Callable[[Any, Any], float] = distance_between,
    apart: float = APART,
) -> dict[str, str]:
    """Calls each contestant until it is at its speed. Takes out of `calls` those that fail: their reasons.

    A peer that computes something else than eager is none (some models do under a compiler); fxfuse was verified.

    Args:
        distance: of two results, the first one eager's, as a part of its norm.
        apart: how much of it rounding explains.
    """
    failed = {}
    for name, call in list(calls.items()):
        try:
            for _ in range(WARM - 1):
                call()  # nobody keeps what it returns: CUDA graphs of steps would copy gradients from then on
            result = call()
            wait(device)
            if name in PEERS:
                found = distance(expected := calls[EAGER](), result)
                if found > apart and distance(expected, calls[EAGER]()) < apart:  # else eager draws random numbers
                    raise ArithmeticError(f"it computes something else than eager, {found:.2f} of the norm apart")
        except Exception as reason:
            failed[name] = told(reason)
            del calls[name]
    return failed


def told(error: Exception) -> str:
    """What an exception says, for a table."""
    return of_any_machine(f"{type(error).__name__}: {error}")


def of_any_machine(text: str) -> str:
    """The beginning of a text, its paths without the folders of the machine."""
    return FOLDERS.sub("", text)[:200]


def measured(calls: dict[str, Call], device: torch.device, seconds: float) -> dict[str, Contestant]:
    """All contestants in turns, after `warmed`."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or min(map(len, samples.values()), default=5) < 5:
        for name, call in calls.items():
            started = time.perf_counter()
            result = call()
            issued = time.perf_counter()
            wait(device)
            samples[name].append((time.perf_counter() - started, issued - started))
            del result
    found = {
        name: Contestant(*(statistics.median(column) * 1e3 for column in zip(*times, strict=True)))
        for name, times in samples.items()
    }
    return {name: _profiled(found[name], call) for name, call in calls.items()} if device.type == "cuda" else found


def _profiled(contestant: Contestant, call: Call) -> Contestant:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    memory = (torch.cuda.max_memory_allocated() - before) / 1e6
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return replace(
        contestant,
        kernels=len(kernels),
        copies=sum(COPIES.search(event.name) is not None for event in kernels),
        gpu=covered([(event.time_range.start, event.time_range.end) for event in kernels]) / 1e3,
        memory=memory,
    )


def captured(call: Call) -> tuple[Call, float]:
    """Replays of a call that is at its speed, as one CUDA graph, and how many MB the graph holds.

    Replays return the same tensors each time. Raises what keeps a call from being captured: one that waits for the GPU
    raises before, since a capture that fails leaves torch's allocator as it is.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as torch's documentation says: what is set up once is not for a graph
        for _ in range(WARM):
            call()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    def replay() -> Any:
        graph.replay()
        return results

    return replay, (torch.cuda.memory_reserved() - before) / 1e6


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """How long at least one of them lasts: a kernel may be launched while the one before it ends, and wait for that."""
    total, until = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def compiled(model: nn.Module, call: Callable[[Callable[..., Any]], Any], mode: str) -> Call:
    """torch.compile's contestant.

    Args:
        call: calls what it is given with the arguments of the comparison.
    """
    compiled = torch.compile(model, mode=mode)

    def contestant() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return call(compiled)

    return contestant
