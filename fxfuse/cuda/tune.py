"""The choice between a problem's candidates: measured once, stored on disk.

- Candidates arrive ranked by a model of their time. The first few are compiled and measured on tensors like the
  problem's (random data, L2 flushed, runs interleaved, medians).
- For a float32 product only candidates that are as exact as eager can win (exactness.py).
- The choice is stored under FXFUSE_CACHE_DIR. Its key contains the GPU, the versions of what was measured, and the
  problem. A size that changes from call to call enters the key as the power of two above it. So a network that meets
  many batch sizes or sequence lengths measures only a few times.
- FXFUSE_TUNE=0 measures nothing and takes the candidate that is ranked first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import math
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from fxfuse import build, ops, packaged
from fxfuse.benchmark import gpu_timer
from fxfuse.cuda import exactness, gpu
from fxfuse.cuda.exactness import enabled, precision_of
from fxfuse.errors import (
    BuildError,
    ExpressionError,
    LaunchError,
    MissingKernelError,
    ToolchainError,
    UnsupportedError,
)
from fxfuse.locks import free_in_children
from fxfuse.problem import BY_CONVOLUTION, Draft, Pass, Plan, Problem, Run, TensorMeta, anchor_weight, postpone

logger = logging.getLogger("fxfuse")

MOST_CONTESTANTS: Final = 3
"""How many of the first candidates are compiled and measured, given enough processors. Those with `always` always are.

The third was the fastest by more than 1 % for 5 of 111 problems on an H200, the fourth for one.
"""
UNPROMISING: Final = 1.2
"""Candidates whose estimated time is more than this times the best estimate are not compiled."""
ALIKE: Final = 1.05
"""Candidates whose estimated time is at most this times the best estimate are alike. Among them, those whose kernel is
compiled for another problem anyway come first. So ResNet-50 needs 8 kernels for its convolutions instead of 12, and
RegNet 11 instead of 17 (counted, one for each problem). They are expected to take 1.004 times as long in the mean.
"""
ROUNDS: Final = 9
"""Timed runs of each candidate; the median counts."""
ATTEMPTS: Final = 3
"""Attempts at a timed run: other kernels compile meanwhile, in threads that may hold Python's lock for milliseconds."""
FIRST_ROUNDS, HOPELESS = 3, 1.3
"""After FIRST_ROUNDS runs, candidates whose median is more than HOPELESS times the fastest median are dropped."""
SHORT: Final = 100e-6
"""Seconds on the GPU below which the CPU's time for a call counts, too."""
WAIT_SHARE: Final = 0.5
"""The share of the waiting time that is added to a call's time. Waiting time is how much longer the CPU takes to issue
a call than the GPU takes to run it. In a model of calls that wait, all of it counts; between long kernels none of it
does. In a CUDA graph the share is 0 (`Problem.replayed`)."""
CALL_SHARE: Final = 1.0
"""The same share where all candidates are calls of torch. A program does not shorten their time on the CPU, while
fxfuse's kernels are entries in its list."""
CALLS, ISSUE_ROUNDS = 10, 5
"""The CPU's time is taken for CALLS calls in a row, ISSUE_ROUNDS times."""
APART: Final = "one after the other"
"""The identity of a plan that runs the parts of a problem one after the other, each by its own plan."""
NOISE: Final = 0.02
"""A candidate is preferred to those ranked before it only if it is faster by more than this fraction."""


@dataclass(frozen=True)
class Candidate:
    """One way to run a problem: a kernel template with a tile, or torch's library with a pass."""

    name: str
    """Its name in reports, unique among a problem's candidates."""
    identity: str
    """The same for problems that differ only in sizes."""
    build: Callable[[], Run]
    """Compiles what it needs (seconds). May raise BuildError or ToolchainError."""
    workspace: int = 0
    """Bytes of scratch memory that a call allocates."""
    always: bool = False
    """Whether it is measured whatever its rank is."""
    is_called: bool = False
    """Whether programs, too, call it and the other candidates from Python (see CALL_SHARE)."""
    library: bool = False
    """Whether torch's library computes its anchor, so that it is as exact as eager."""
    computes: Pass | None = None
    """What its only launch computes, if that can be merged into another kernel of a program; else None."""
    estimate: float | None = None
    """Its time by a model, in a unit shared by the problem's candidates; None if there is no model."""
    form: Hashable = None
    """What its kernel is compiled from: equal for problems that need the same kernel; None if unknown."""


@dataclass(frozen=True)
class _Choice:
    """The chosen candidate and what was measured."""

    name: str
    identity: str
    measured: tuple[tuple[str, float], ...]
    """(name, median in seconds) of each candidate that was measured, in order of rank."""
    errors: tuple[tuple[str, float], ...] = ()
    """(name, error) where errors were measured, as multiples of the largest error that eager's allows."""


def is_undecided(problem: Problem) -> bool:
    """Whether the candidates for `problem` would have to be measured, if it has several."""
    return enabled() and _recall(problem) is None


def draft(problem: Problem, candidates: Sequence[Candidate], apart: Callable[[], Draft] | None = None) -> Draft:
    """Compiles the candidates that may be chosen. Calling the draft measures them, if needed, and gives the plan.

    Args:
        candidates: at least one, best first.
        apart: drafts a plan made of several plans, one after the other. It is measured beside the candidates.

    A candidate that fails is left out with a warning, whatever it raises. Raises the first candidate's error if nothing
    compiles, and ToolchainError if there is no compiler.
    """
    stored = _recall(problem) if enabled() else None
    if stored is not None:
        if apart is not None and stored.identity == APART:
            two = apart()
            return lambda: dataclasses.replace(two(), measured=stored.measured)
        chosen = _find(candidates, stored)
        if packaged.is_alone():
            return _at_hand(candidates, chosen, stored)
        if chosen is not None:
            with _left_out_if_it_fails(chosen):  # if so, the others are tried, as if nothing were stored
                plan = _plan(chosen, _built(chosen), stored)
                return lambda: plan
    if packaged.is_alone():
        return _at_hand(candidates)
    decided = not enabled() or (len(candidates) == 1 and apart is None)
    if decided or gpu.is_capturing():
        # nothing can be measured during a capture: this plan is for the captured call only
        plan = dataclasses.replace(_plan(candidates[0], _built(candidates[0])), provisional=not decided)
        if gpu.standing_in() is not None:  # where the package is loaded, the choice must be the same
            unmeasured = _Choice(candidates[0].name, candidates[0].identity, ())
            packaged.note_choice(_key(problem), dataclasses.asdict(unmeasured))
        return lambda: plan
    build.check_may_build(problem.label)  # here, and not in the threads that compile
    contestants = _contestants(candidates)
    with ThreadPoolExecutor(1) as pool:
        drafting = None if apart is None else pool.submit(apart)  # beside the candidates
        ready, error = _compile(contestants)
    if error is not None and not ready:
        try:
            raise error
        finally:
            del error  # its traceback has this frame: all callers would stay until they are collected
    if drafting is None:
        rest = _Rest([candidate for candidate in candidates if candidate not in contestants])
        return lambda: _decide(problem, ready, rest)
    parts = drafting.result()
    return lambda: _decide_beside(problem, ready, parts())


def _at_hand(candidates: Sequence[Candidate], chosen: Candidate | None = None, stored: _Choice | None = None) -> Draft:
    """The `chosen` candidate, else the best one whose kernel need not be compiled.

    Raises the first candidate's MissingKernelError if there is none.
    """
    missing: MissingKernelError | None = None
    for candidate in candidates if chosen is None else [chosen, *candidates]:
        try:
            with _left_out_if_it_fails(candidate):
                plan = _plan(candidate, candidate.build(), stored if candidate is chosen else None)
                return lambda: plan
        except MissingKernelError as error:
            missing = missing or error
    raise missing or UnsupportedError("no kernel of the package can be used")


def most_contestants() -> int:
    """How many of the first candidates to measure on this machine: one to three, at most one for four processors.

    Compiling a candidate takes a processor one to two seconds. Over the 309 problems in benchmarks/results (H200) the
    candidate ranked first takes 1.016 times as long as the fastest of three, in geometric mean; the faster of the first
    two takes 1.006 times as long. So a machine with few processors waits for fewer compilers and loses little.
    """
    return min(MOST_CONTESTANTS, max(1, build.PROCESSORS // 4))


def _contestants(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates to compile and measure, in order of rank. At least one is without `always`, if there is any."""
    with _choosing:
        candidates = _familiar_first(candidates)
        others = [candidate for candidate in candidates if not candidate.always]
        ranked = candidates[: most_contestants()]
        first = [candidate for candidate in ranked if not candidate.always] or others[:1]
        least = min((candidate.estimate for candidate in first if candidate.estimate is not None), default=math.inf)
        chosen = [candidate for candidate in first if (candidate.estimate or 0) <= UNPROMISING * least]
        _familiar.update(candidate.form for candidate in chosen if candidate.form is not None)
    return [candidate for candidate in candidates if candidate.always or candidate in chosen]


_choosing = free_in_children(threading.Lock())
_familiar: Final[set[Hashable]] = set()
"""The forms of all contestants so far, whatever their problem."""


def _familiar_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """`candidates` reordered: among those that are alike (ALIKE), the ones with a familiar kernel come first."""
    estimates = [candidate.estimate for candidate in candidates if candidate.estimate is not None]
    most = ALIKE * min(estimates, default=math.inf)
    places = [
        place for place, candidate in enumerate(candidates)
        if candidate.form is not None and candidate.estimate is not None and candidate.estimate <= most
    ]  # fmt: skip
    alike = [candidates[place] for place in places]
    found = list(candidates)
    for place, candidate in zip(places, sorted(alike, key=lambda one: one.form not in _familiar), strict=True):
        found[place] = candidate
    return found


def _plan(candidate: Candidate, run: Run, choice: _Choice | None = None) -> Plan:
    measured, errors = ((), ()) if choice is None else (choice.measured, choice.errors)
    return Plan(
        run, candidate.name, measured=measured, errors=errors, workspace=candidate.workspace,
        computes=candidate.computes, sources=_sources.get(run, ()),
    )  # fmt: skip


_sources: Final[weakref.WeakKeyDictionary[Run, tuple[build.Source, ...]]] = weakref.WeakKeyDictionary()
"""The sources of the kernels that a built candidate launches."""


def _built(candidate: Candidate) -> Run:
    with build.begun() as missing, build.noted() as sources:
        run = candidate.build()
    if missing:
        with build.noted() as sources:
            run = candidate.build()
    _sources[run] = tuple(sources)
    return run


def _find(candidates: Sequence[Candidate], stored: _Choice) -> Candidate | None:
    """The candidate with the stored choice's name; else (other sizes) the best one with its identity."""
    by_name = {candidate.name: candidate for candidate in reversed(candidates)}
    by_identity = {candidate.identity: candidate for candidate in reversed(candidates)}
    return by_name.get(stored.name) or by_identity.get(stored.identity)


_OF_ALL: Final = (ToolchainError, ExpressionError, build.NotBuilt, torch.cuda.OutOfMemoryError)
"""Exceptions that are no candidate's fault: the other candidates would raise them, too, or the caller must see them."""


@contextlib.contextmanager
def _left_out_if_it_fails(candidate: Candidate) -> Iterator[list[Exception]]:
    """Inside, an exception of the candidate's own only ends the block, with a warning. The list then contains it."""
    failure: list[Exception] = []
    try:
        yield failure
    except _OF_ALL:
        raise
    except Exception as error:  # a mistake of fxfuse, unless it is one of fxfuse's own exceptions
        expected = isinstance(error, BuildError | LaunchError)
        text = str(error) if expected else f"{type(error).__name__}: {error} (please report it)"
        logger.warning("fxfuse: %s is left out: %s", candidate.name, text, exc_info=not expected)
        failure.append(error.with_traceback(None))  # which has the frame that has this list


def _compile(candidates: Sequence[Candidate]) -> tuple[list[tuple[Candidate, Run]], Exception | None]:
    """Compiles candidates, several at a time.

    Returns those that compiled, in order of rank, and the error of the first one that did not, if any.
    """

    def attempt(candidate: Candidate) -> Run | Exception:
        with _left_out_if_it_fails(candidate) as failure:
            return _built(candidate)
        return failure[0]

    with ThreadPoolExecutor(max_workers=max(1, len(candidates))) as pool, build.interrupted_together():
        results = list(zip(candidates, pool.map(attempt, candidates), strict=True))
    ready = [(candidate, result) for candidate, result in results if not isinstance(result, Exception)]
    return ready, next((result for _, result in results if isinstance(result, Exception)), None)


# ------------------------------------------------------------------------------------------- measuring


def _decide_beside(problem: Problem, ready: Sequence[tuple[Candidate, Run]], apart: Plan) -> Plan:
    candidate = Candidate(apart.kernel or APART, APART, lambda: apart.run, apart.workspace)
    plan = _decide(problem, [*ready, (candidate, apart.run)])
    return dataclasses.replace(apart, measured=plan.measured) if plan.kernel == candidate.name else plan


class _Rest:
    """Candidates that are compiled only if no other one is exact."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = candidates[:MOST_CONTESTANTS]
        self._compiled: list[tuple[Candidate, Run]] | None = None

    def compiled(self) -> list[tuple[Candidate, Run]]:
        """Those that compile. Within `may_postpone` this raises Postponed the first time."""
        if self._compiled is None and self._candidates:
            postpone(self._compile)
        return self._compiled or []

    def _compile(self) -> None:
        self._compiled, _ = _compile(self._candidates)


def _decide(problem: Problem, ready: Sequence[tuple[Candidate, Run]], rest: _Rest | None = None) -> Plan:
    """The plan of the fastest candidate that is as exact as eager. If no kernel is, the best of `rest` are tried, too.

    Args:
        ready: candidates that are compiled, in order of rank.
    """
    with exactness.measuring:
        stored = _recall(problem)  # another region may have had the same problem
        known = {candidate.name: (candidate, run) for candidate, run in ready}
        if stored is not None and stored.name in known:
            return _plan(*known[stored.name], stored)
        errors = _errors(problem, ready)
        if rest is not None and errors and min(errors.values()) > 1:
            more = rest.compiled()
            found = _errors(problem, more)
            errors |= found
            if min(found.values(), default=math.inf) <= 1:
                known.update({candidate.name: (candidate, run) for candidate, run in more})
        times = _measure(problem, list(known.values()))
        if not times:
            return _plan(*ready[0])
        exact = {name: time for name, time in times.items() if errors.get(name, 0.0) <= 1} or times
        best = min(exact.values())
        name = next(name for name, time in exact.items() if time <= best * (1 + NOISE))
        candidate, run = known[name]
        choice = _Choice(name, candidate.identity, tuple(times.items()), tuple(errors.items()))
        _remember(problem, choice)
        return _plan(candidate, run, choice)


def _errors(problem: Problem, ready: Sequence[tuple[Candidate, Run]]) -> dict[str, float]:
    """Errors by name, of candidates whose anchor is not the library's; empty where eager's error is no limit."""
    runs = {candidate.name: run for candidate, run in ready if not candidate.library}
    return exactness.errors(problem, runs) if runs and exactness.is_judged(problem) else {}


def _measure(problem: Problem, ready: Sequence[tuple[Candidate, Run]]) -> dict[str, float]:
    """Seconds per call by name, in order of rank, of the candidates that run; empty if there is too little memory."""
    device = problem.x.device
    samples: dict[str, list[float]] = {}
    times: dict[str, float] = {}
    try:
        with torch.cuda.device(device), torch.no_grad():
            tensors = exactness.example(problem)
            time_once = gpu_timer(device, ATTEMPTS)
            for candidate, run in ready:
                with _left_out_if_it_fails(candidate):
                    run(*tensors)  # the first run loads code
                    samples[candidate.name] = []
            contest = [(candidate, run) for candidate, run in ready if candidate.name in samples]
            for done in range(ROUNDS):
                if done == FIRST_ROUNDS and contest:
                    medians = {name: statistics.median(taken) for name, taken in samples.items()}
                    most = HOPELESS * min(medians.values())
                    contest = [(candidate, run) for candidate, run in contest if medians[candidate.name] <= most]
                for candidate, run in contest:
                    with _left_out_if_it_fails(candidate) as failure:
                        samples[candidate.name].append(time_once(run, tensors))
                    if failure:
                        del samples[candidate.name]
                contest = [(candidate, run) for candidate, run in contest if candidate.name in samples]
            times = {name: statistics.median(taken) for name, taken in samples.items()}
            if times and min(times.values()) < SHORT and not problem.replayed:
                for candidate, run in ready:
                    if candidate.name in times:
                        with _left_out_if_it_fails(candidate) as failure:
                            share = CALL_SHARE if candidate.is_called else WAIT_SHARE
                            waits = _time_to_issue(run, tensors) - times[candidate.name]
                            times[candidate.name] += share * max(0.0, waits)
                        if failure:
                            del times[candidate.name]
    except torch.cuda.OutOfMemoryError:
        logger.warning("fxfuse: %s: too little memory to measure candidates; the model's first is taken", problem.label)
        return {}
    return times


def _time_to_issue(run: Run, tensors: tuple[Any, ...]) -> float:
    """The CPU's seconds for a call: the least of several measurements, since other programs use the CPU, too.

    Each is over a number of calls too small to fill the GPU's queue.
    """
    samples = []
    for _ in range(ISSUE_ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(CALLS):
            run(*tensors)
        samples.append((time.perf_counter() - started) / CALLS)
    return min(samples)


# ----------------------------------------------------------------------------------------- remembering

_choices: dict[str, _Choice] = {}


def _gpu(device: torch.device) -> tuple[str, int]:
    properties = gpu.properties(device)
    return properties.name, properties.multi_processor_count


@functools.cache
def _generators() -> str:
    """Hash of the modules that propose candidates. So a new tile is measured against the old choice."""
    return build.digest_of(sorted(Path(__file__).parent.glob("*.py")))


def _key(problem: Problem, other: tuple[str, int] | None = None) -> str:
    """The name of the file for the problem's choice: a hash of everything that the choice depends on.

    Args:
        other: the name and multiprocessors of another GPU, in place of the problem's.
    """

    def tensor(meta: TensorMeta, fixed: bool) -> tuple[Any, ...]:
        order = sorted(range(len(meta.shape)), key=lambda dim: (-meta.strides[dim], dim))
        sizes = meta.shape if fixed else tuple((size - 1).bit_length() for size in meta.shape)
        return sizes, order, meta.strides[-1:] == (1,), meta.dtype, meta.alignment

    def leading(meta: TensorMeta) -> tuple[Any, ...]:
        """x of a matrix product: its leading dimensions count as one number of rows."""
        rows = math.prod(meta.shape[:-1])
        return ((rows - 1).bit_length(), len(meta.shape), meta.strides[-1:] == (1,), meta.dtype, meta.alignment)

    by_images = problem.kind == "conv2d_weight"  # both sides are images, whose number and sizes change
    parts = (
        *(other or _gpu(problem.x.device)), gpu.torch_version(), gpu.cuda_version(),
        build.package_digest(), _generators(),
        problem.kind, problem.options, problem.epilogue, *ops.own_code(problem.expression), problem.pool,
        precision_of(problem), problem.replayed,
        tensor(problem.x, False) if problem.kind in BY_CONVOLUTION else leading(problem.x),
        problem.weight and tensor(problem.weight, not by_images),
        *([problem.x.shape[1], anchor_weight(problem).shape[1]] if by_images else []),
        problem.bias and tensor(problem.bias, True),
        [tensor(operand, operand.is_parameter) for operand in problem.operands],
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _recall(problem: Problem) -> _Choice | None:
    key = _key(problem)
    if key not in _choices:
        stored = exactness.recall(key, _choice)
        # a choice measured on another GPU of the architecture is better than none
        _, own = _gpu(problem.x.device) if packaged.gpus else ("", 0)
        for other in sorted(packaged.gpus, key=lambda gpu: abs(gpu[1] - own)):
            value = packaged.choices.get(_key(problem, other)) if stored is None else None
            stored = stored if value is None else _choice(value)
        if stored is None:
            return None
        _choices[key] = stored
    packaged.note_choice(key, dataclasses.asdict(_choices[key]))
    return _choices[key]


def _remember(problem: Problem, choice: _Choice) -> None:
    key = _key(problem)
    _choices[key] = choice
    exactness.remember(key, dataclasses.asdict(choice))


def _choice(value: Any) -> _Choice:
    """The choice in a stored JSON document."""
    times, errors = (
        tuple((str(name), float(number)) for name, number in value[field]) for field in ("measured", "errors")
    )
    return _Choice(str(value["name"]), str(value["identity"]), times, errors)
