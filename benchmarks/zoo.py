"""Networks nobody has looked at: drawn by seed from torchvision, timm and transformers, beside eager and torch.compile.

    python benchmarks/zoo.py --seed 1 --count 24 --output benchmarks/results
    python benchmarks/zoo.py --seed 1 --count 24 --dtype bfloat16 --slice 0/2
    python benchmarks/zoo.py --seed 1 --count 24 --train --output benchmarks/results
    python benchmarks/zoo.py --seed 1 --count 12 --train --device cpu --channels 384 --batch 4 --compare torch.compile
    python benchmarks/zoo.py --named timm:repvgg_a2 transformers:bert --batch 32

One network for each architecture family, from its configuration, with random weights; of the three packages those that
are installed take turns. Each network has a process of its own. Processes build side by side (kernels, torch.compile)
and are timed one after the other while the others wait; before that, what fxfuse measured on the busy GPU is forgotten
and measured again. A crash, an error or a network that takes too long is a row. A family that eager does not run with
the inputs made here was "not drawn", with the reason. A peer that computes something else than eager counts as one
that did not run.

While they build, each has its share of the processors to itself; torch.compile needs minutes where that is less than
two, and then a --limit of 150 s or more. A row without its time is in no geometric mean. Memory in the pools of CUDA
graphs is not counted.

Wall is a call with the GPU waited for, issuing the part of it before that wait, GPU the time with at least one kernel
there. Time to the first result is taken side by side with other networks' building, for all contestants alike: compare
it within a row only.

With --train a call is a step of training (steps.py): forward, loss, backward, without dropout. Errors are those of all
gradients, bfloat16 is torch.autocast around the forward, the first result is six steps. CUDA graphs of steps are
measured if torch.compile's are, which have to be asked for: --compare eager torch.compile reduce-overhead.

With --named nothing is drawn, and the results stand apart ("named").
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import steps
import torch
from contestants import (
    COMPILE,
    EAGER,
    GRAPH,
    OWN,
    PEERS,
    REDUCE,
    WARM,
    Call,
    Contestant,
    compiled,
    measured,
    of_any_machine,
    told,
    wait,
    warmed,
)
from suite import PRECISIONS, arguments, provenance, read, write
from tabulate import tabulate
from torch import nn
from torch.utils import _pytree as pytree

import fxfuse
from fxfuse.cli.networks import (
    IMAGE,
    Inputs,
    InputsFor,
    UnknownInputs,
    as_if_trained,
    from_timm,
    from_torchvision,
    from_transformers,
)
from fxfuse.state import seed

BATCH = 16
SLOW = 0.25
"""Seconds of an eager call above which the batch is halved."""
CHANNELS = 768
"""The most that transformers' networks have, if no other number is given."""
MOST_PARAMETERS = 150_000_000
ALIASES = {"visiontransformer": "vit", "swintransformer": "swin", "swintransformerv2": "swinv2", "byobnet": "repvgg"}
AGAIN = 2.0
"""Seconds after which a compiler that goes on beyond its time is interrupted once more."""
REDRAWN = 3
"""Other inputs that steps get which look wrong."""
NOTHING_VERIFIED = "eager's error is 0: nothing was verified"
TOO_LONG = "its process took too long"
PREFIX = "ZOO "
"""Begins the lines that a network's process says to this one."""


# ---------------------------------------------------------------------------------------------------- drawing


@dataclass(frozen=True)
class Network:
    """One architecture family and the variants of it to try, in this order."""

    package: str
    family: str
    variants: tuple[str, ...]


def _torchvision() -> dict[str, list[str]]:
    import torchvision

    families: dict[str, list[str]] = {}
    for name in torchvision.models.list_models():
        module = torchvision.models.get_model_builder(name).__module__
        if "quantization" not in module:
            families.setdefault(module.removeprefix("torchvision.models."), []).append(name)
    return families


def _timm() -> dict[str, list[str]]:
    import timm

    return {module: names for module in timm.list_modules() if (names := timm.list_models(module=module))}


def _transformers() -> dict[str, list[str]]:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return {family: [family] for family in MODEL_MAPPING_NAMES}


PACKAGES = {"torchvision": _torchvision, "timm": _timm, "transformers": _transformers}


def _plain(family: str) -> str:
    """One name for a family in whatever package."""
    plain = re.sub(r"[^a-z0-9]", "", family.rsplit(".", 1)[-1].lower())
    return ALIASES.get(plain, plain)


def draw(seed: int, count: int) -> list[Network]:
    """The first `count` families in the seed's order: the installed packages take turns, no family comes twice."""
    queues = []
    for package, families_of in PACKAGES.items():
        try:
            families = families_of()
        except ImportError:
            continue
        # a generator for each package: what one of them has does not decide what is drawn of another
        generator = random.Random(f"{seed} {package}")
        queue = []
        for family in generator.sample(sorted(families), len(families)):
            names = sorted(families[family])
            queue.append(Network(package, family, tuple(generator.sample(names, min(len(names), 6)))))
        queues.append(queue)
    drawn: dict[str, Network] = {}
    for network in itertools.chain.from_iterable(itertools.zip_longest(*queues)):
        if network is not None and len(drawn) < count:
            drawn.setdefault(_plain(network.family), network)
    return list(drawn.values())


def named(text: str) -> Network:
    """The network that PACKAGE:NAME means. Raises ValueError for a package that is not known."""
    package, _, name = text.partition(":")
    if package not in PACKAGES or not name:
        raise ValueError(text)
    return Network(package, name, (name,))


# --------------------------------------------------------------------------------------------------- building


class NotDrawn(Exception):
    """A family that eager cannot run from what is known here."""


def _model(network: Network, channels: int) -> tuple[nn.Module, InputsFor]:
    """The first variant that is not too large, and its inputs."""
    for name in network.variants:
        if network.package == "transformers":
            return from_transformers(name, channels=channels)
        model, inputs_for = from_timm(name) if network.package == "timm" else from_torchvision(name)
        if sum(parameter.numel() for parameter in model.parameters()) <= MOST_PARAMETERS:
            return model, inputs_for
    raise NotDrawn(f"none of {', '.join(network.variants)} has at most {MOST_PARAMETERS / 1e6:.0f} million parameters")


@dataclass
class Trial:
    """A network on its device and a call, or a step of training, that eager answers."""

    model: nn.Module
    inputs: Inputs
    train: bool = False
    autocast: bool = False

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        return (self.inputs[IMAGE],) if IMAGE in self.inputs else ()

    @property
    def kwargs(self) -> Inputs:
        return {name: tensor for name, tensor in self.inputs.items() if name != IMAGE}

    @property
    def batch(self) -> int:
        return next(iter(self.inputs.values())).shape[0]

    @property
    def device(self) -> torch.device:
        return next(iter(self.inputs.values())).device

    @property
    def precision(self) -> torch.dtype:
        """What it is computed in."""
        return torch.bfloat16 if self.autocast else self._parameters[0].dtype

    @cached_property
    def _parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def call(self, model: Callable[..., Any]) -> Any:
        """What the model, or what was made of it, returns; in training the loss and all gradients."""
        return steps.step(self._parameters, lambda: self._forward(model)) if self.train else self._forward(model)

    def _forward(self, model: Callable[..., Any]) -> Any:
        with steps.autocast(self.device, self.autocast):
            return model(*self.args, **self.kwargs)

    def until_first_result(self, call: Call) -> None:
        for _ in range(steps.CALLS if self.train else 1):
            call()
        wait(self.device)

    def optimized(self, **options: Any) -> nn.Module:
        if self.train:  # for an example, kernels of calls without gradients would be compiled
            return fxfuse.optimize(self.model, **options)
        return fxfuse.optimize(self.model, self.args or None, kwargs=self.kwargs or None, **options)

    def redrawn(self) -> Trial:
        """With other inputs: other images, the same tokens in another order."""
        inputs = {name: torch.randn_like(x) if x.is_floating_point() else x[..., torch.randperm(x.shape[-1])]
                  for name, x in self.inputs.items()}  # fmt: skip
        return replace(self, inputs=inputs)

    def copied(self, dtype: torch.dtype) -> Trial:
        """With a copy of the model, in another dtype throughout."""
        inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in self.inputs.items()}
        return Trial(copy.deepcopy(self.model).to(dtype), inputs, self.train)


def build(
    network: Network, dtype: torch.dtype, device: torch.device, batch: int = BATCH, train: bool = False,
    channels: int = CHANNELS,
) -> Trial:  # fmt: skip
    """The network with inputs that eager answers in reasonable time. Raises NotDrawn."""
    torch.manual_seed(0)
    kept = torch.float32 if train else dtype  # steps have autocast
    try:
        model, inputs_for = _model(network, channels)
        as_if_trained(model)
        model = model.train(train).to(device, kept)
        if train:
            steps.without_dropout(model)
    except Exception as reason:  # a package may refuse in any way
        raise NotDrawn(told(reason)) from reason
    refused = ""
    while batch:
        for inputs in inputs_for(batch):
            try:
                trial = Trial(model, {name: x.to(device, kept if x.is_floating_point() else None)
                                      for name, x in inputs.items()}, train, autocast=dtype != kept)  # fmt: skip
                answer = trial.call(model)
                if train and not all(bool(tensor.isfinite().all()) for tensor in answer):
                    raise NotDrawn("its gradients are not finite")
                wait(device)
                started = time.perf_counter()
                trial.call(model)
                wait(device)
                if time.perf_counter() - started <= SLOW or batch == 1:
                    return trial
                break
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
                break
            except Exception as reason:  # a model may refuse in any way
                refused = told(reason)
        else:
            break
        batch //= 2
    raise NotDrawn(refused or "too large")


# -------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Row:
    """One line of the results."""

    seed: int
    dtype: str
    package: str
    family: str
    name: str = ""
    batch: int = 0
    not_drawn: str = ""
    failure: str = ""
    """What went wrong with the network in fxfuse, or its process."""
    ok: bool = False
    error: float = math.nan
    eager_error: float = math.nan
    reference: str = ""
    regions: int = 0
    skipped: int = 0
    contestants: dict[str, Any] = field(default_factory=dict)
    first_result: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Contestants that did not run, or computed something else, with the reason."""
    commit: str = ""
    train: bool = False
    """Whether a call is a step of training."""
    channels: int = CHANNELS
    """The most that transformers' networks had."""
    why_not: str = ""
    """Why fxfuse leaves gradients to torch, if it does."""

    @property
    def key(self) -> tuple[Any, ...]:
        return self.seed, self.dtype, self.package, self.family, self.train, self.channels

    def _wall(self, name: str) -> float:
        return float(self.contestants[name]["wall"]) if name in self.contestants else math.nan

    @property
    def ratio(self) -> float:
        """The better of eager and torch.compile over fxfuse; NaN if one of the three did not run."""
        times = [self._wall(name) for name in (EAGER, COMPILE, OWN)]
        return math.nan if any(math.isnan(wall) for wall in times) else min(times[:2]) / times[2]

    @property
    def eager_ratio(self) -> float:
        return self._wall(EAGER) / self._wall(OWN)

    @property
    def graph_ratio(self) -> float:
        return self._wall(REDUCE) / self._wall(GRAPH)


def _verified(trial: Trial, fast: nn.Module) -> dict[str, Any]:
    """Errors of fxfuse and eager.

    Gradients jump where rounding decides what a ReLU or the largest of a pool lets through, by hundreds of times the
    usual error, and eager's as well: steps that look wrong are looked at again with other inputs.
    """
    found = _verified_once(trial, fast)
    for _ in range(REDRAWN if trial.train else 0):
        if found["ok"]:
            break
        trial = trial.redrawn()
        found = _verified_once(trial, fast)
    return found


def _verified_once(trial: Trial, fast: nn.Module) -> dict[str, Any]:
    """Errors of fxfuse and eager against float64; against float32 without TF32 where float64 does not run.

    What is float32 itself has no error against that: eager's is then what weights give that are half an ulp beside.
    """
    try:
        if trial.train:
            return _compared(trial, fast, _right(trial, torch.float64), trial, "float64")
        found = fxfuse.verify(trial.model, fast, trial.args or None, kwargs=trial.kwargs or None)
        empty = "" if found.eager_error > 0 else NOTHING_VERIFIED
        return {"ok": found.ok and not empty, "error": found.error, "eager_error": found.eager_error,
                "reference": "float64", "failure": found.problem or empty}  # fmt: skip
    except Exception as reason:  # models have float32 in their forwards, and memory has an end
        said = f"float32 ({type(reason).__name__} in float64)"
    with PRECISIONS["float32-strict"].in_force():
        right = _right(trial, torch.float32)
    return _compared(trial, fast, right, _nudged(trial), said)


def _compared(
    trial: Trial, fast: nn.Module, right: Sequence[torch.Tensor], eager: Trial, reference: str
) -> dict[str, Any]:
    """fxfuse's error may be twice that of the trial that stands for eager, and an ulp."""
    distance = steps.error if trial.train else _largest_error
    error, eager_error = distance(right, _tensors(trial, fast)), distance(right, _tensors(eager, eager.model))
    failure = ""
    if not eager_error > 0:
        failure = NOTHING_VERIFIED
    elif not error <= 2 * eager_error + torch.finfo(trial.precision).eps:
        failure = f"the error is {error / eager_error:.1f} times eager's own"
    return {"ok": not failure, "error": error, "eager_error": eager_error, "reference": reference, "failure": failure}


def _right(trial: Trial, dtype: torch.dtype) -> list[torch.Tensor]:
    """By eager in this dtype."""
    exact = trial.copied(dtype)
    return _tensors(exact, exact.model)


def _tensors(trial: Trial, model: nn.Module) -> list[torch.Tensor]:
    """What is right or wrong of a call: its results, or all gradients.

    Models that draw random numbers (to mask their inputs) draw the same each time.
    """
    seed(0)
    leaves = [leaf for leaf in pytree.tree_leaves(trial.call(model)) if isinstance(leaf, torch.Tensor)]
    return leaves[1:] if trial.train else leaves


def _largest_error(expected: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> float:
    return max(steps.error([want], [have]) for want, have in zip(expected, made, strict=True))


def _nudged(trial: Trial) -> Trial:
    """The trial, or one whose weights are up to half an ulp beside if it is float32."""
    if trial.precision != torch.float32:
        return trial
    nudged = trial.copied(torch.float32)
    with torch.no_grad():
        for parameter in nudged.model.parameters():
            parameter.mul_(1 + (torch.rand_like(parameter) - 0.5) * torch.finfo(parameter.dtype).eps)
    return nudged


def _say(**content: Any) -> None:
    """Tells the parent process something. `stage`: what begins now."""
    print(PREFIX + json.dumps(content), flush=True)


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError inside after so many seconds, and again: a compiler may catch what it does not expect."""

    def end(*_: Any) -> None:
        raise TimeoutError("no time left to compile it")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01), AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _forget_choices() -> None:
    """Removes what was measured while other processes had the GPU, too; compiled kernels stay."""
    for path in Path(os.environ["FXFUSE_CACHE_DIR"]).glob("choices*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def one(given: Any, network: Network, only_build: bool) -> None:
    """One network, in this process: builds, waits for a line from the standard input, and says its row.

    With `only_build`: the seconds to fxfuse's first result, which leaves its kernels in the cache.
    """
    device, dtype = torch.device(given.device), getattr(torch, given.dtype)
    began = time.monotonic()
    row = Row(given.seed, given.dtype, network.package, network.family, train=given.train, channels=given.channels)
    with torch.set_grad_enabled(given.train), PRECISIONS["float32"].in_force(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trial = build(network, dtype, device, given.batch, given.train, given.channels)
        except (NotDrawn, UnknownInputs) as reason:
            _say(row=asdict(replace(row, not_drawn=str(reason)[:200])))
            return
        name = f"{type(trial.model).__name__} {getattr(trial.model, 'default_cfg', {}).get('architecture', '')}".strip()
        row = replace(row, name=name, batch=trial.batch)
        if only_build:
            started = time.perf_counter()
            fast = trial.optimized()
            trial.until_first_result(lambda: trial.call(fast))
            _say(seconds=time.perf_counter() - started)
            return
        _say(stage="fxfuse's kernels", row=asdict(row))
        first, left_out = {}, {}
        calls: dict[str, Call] = {EAGER: lambda: trial.call(trial.model)}
        first[OWN] = _cold_seconds(given.limit * 0.5)
        for peer, mode in ((COMPILE, "default"), (REDUCE, "reduce-overhead")):
            if peer not in given.compare:
                continue
            _say(stage=peer, row=asdict(row))
            try:
                started = time.perf_counter()
                call = compiled(trial.model, trial.call, mode)
                with _at_most(given.limit * 0.9 - (time.monotonic() - began)):
                    trial.until_first_result(call)
                first[peer] = time.perf_counter() - started
                calls[peer] = call
            except Exception as reason:  # a peer's compiler may fail in any way
                left_out[peer] = told(reason)
        row = replace(row, first_result=first, left_out=left_out)
        _say(built=True, stage="verifying", row=asdict(row))
        sys.stdin.readline()
        _forget_choices()
        try:
            fast = trial.optimized()
            calls[OWN] = lambda: trial.call(fast)
            for _ in range(WARM):  # what is verified is what will be measured
                calls[OWN]()
            row = replace(row, **_verified(trial, fast))
        except Exception as reason:  # a failure of ours is a row
            _say(row=asdict(replace(row, failure=told(reason))), final=True)
            return
        if device.type == "cuda" and REDUCE in given.compare:
            try:
                graphed = trial.optimized(cuda_graphs=True)
                for _ in range(WARM if trial.train else 1):
                    trial.call(graphed)
                lines = fxfuse.explain(graphed).cuda_graphs
                refused = [line for line in lines if "without" in line or "have no" in line]
                calls[GRAPH] = lambda: trial.call(graphed)
                if refused:
                    left_out = {**left_out, f"{GRAPH} (ran without one)": of_any_machine(refused[0])}
            except Exception as reason:
                left_out = {**left_out, GRAPH: told(reason)}
        _say(stage="timing", row=asdict(row))
        report = fxfuse.explain(fast)
        row = replace(
            row,
            left_out=left_out,
            regions=sum(region.kernel is not None for region in report.regions),
            skipped=len(report.skipped),
            why_not=steps.left_to_torch(report) if trial.train else "",
        )
        if trial.train:
            failed = warmed(calls, device, steps.error, steps.explained(row.eager_error))
        else:
            failed = warmed(calls, device)
        row = replace(row, left_out={**row.left_out, **failed})
        if OWN in failed or EAGER in failed:
            _say(row=asdict(replace(row, ok=False, failure=failed.get(OWN) or failed[EAGER])), final=True)
            return
        contestants = {name: asdict(found) for name, found in measured(calls, device, given.seconds).items()}
        _say(row=asdict(replace(row, contestants=contestants)), final=True)


def _cold_seconds(limit: float) -> float:
    """Seconds to fxfuse's first result in another process, which leaves its kernels in the cache; NaN if none came."""
    command = [sys.executable, __file__, *sys.argv[1:], "--first"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return math.nan
    said = [json.loads(line.removeprefix(PREFIX)) for line in done.stdout.splitlines() if line.startswith(PREFIX)]
    return next((message["seconds"] for message in said if "seconds" in message), math.nan)


class _Process:
    """This script in a process and a process group of its own, killed after `limit` seconds."""

    def __init__(self, options: Sequence[str], environment: dict[str, str], limit: float, processors: set[int]) -> None:
        """
        Args:
            processors: those that it builds on, so that each network has as many, whatever the others do.
        """
        self.said: list[dict[str, Any]] = []
        self.killed = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._process = subprocess.Popen(
            [sys.executable, __file__, *options], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, text=True, start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, processors),
        )  # fmt: skip
        self._allow(limit)

    def _allow(self, limit: float) -> None:
        self._timer = threading.Timer(limit, self._kill)
        self._timer.daemon = True
        self._timer.start()

    def _kill(self) -> None:
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def run_to(self, word: str) -> bool:
        """Reads what it says up to a message with `word`; whether one came. Its time does not run on behind it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(PREFIX):
                self.said.append(json.loads(line.removeprefix(PREFIX)))
                if word in self.said[-1]:
                    self._timer.cancel()
                    return True
        self._timer.cancel()
        return False

    def go_on(self, limit: float) -> None:
        """Lets it measure: its main thread, on any processor."""
        assert self._process.stdin is not None
        os.sched_setaffinity(self._process.pid, os.sched_getaffinity(0))
        self._allow(limit)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def end(self) -> int:
        self._timer.cancel()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):  # compilers that it left, too
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def last_error(self) -> str:
        """The last line that it wrote to its standard error, which is an exception's message if one ended it."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return of_any_machine(lines[-1]) if lines else ""


def _row_of(process: _Process, network: Network, given: Any) -> Row:
    """The last that a network's process said about itself."""
    code = process.end()
    last: dict[str, Any] = next((said for said in reversed(process.said) if "row" in said), {})
    begun = Row(given.seed, given.dtype, network.package, network.family, train=given.train, channels=given.channels)
    row = Row(**last["row"]) if last else begun
    if row.not_drawn or last.get("final"):
        return row
    if not last and process.killed:
        return replace(row, not_drawn="eager's answer took too long")
    stage = next((said["stage"] for said in reversed(process.said) if "stage" in said), "the model")
    why = TOO_LONG if process.killed else f"its process ended with {code}"
    said = "" if process.killed else process.last_error()
    return replace(row, ok=False, failure=f"{why} in: {stage}" + (f": {said}" if said else ""))


# ---------------------------------------------------------------------------------------------------- tables


def _number(value: float, digits: int = 2) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def render(rows: Sequence[Row]) -> str:
    """A table; of the contestants' columns the order is PEERS, fxfuse, its CUDA graph."""
    table = []
    for row in rows:
        if row.not_drawn:
            continue
        each = [Contestant(**row.contestants[name]) if name in row.contestants else None
                for name in (*PEERS, OWN, GRAPH)]  # fmt: skip

        def column(of: Callable[[Contestant], str], each: Sequence[Contestant | None] = each) -> str:
            return " / ".join("-" if one is None else of(one) for one in each)

        name = f"{row.package} {row.family}: {row.name}"
        table.append(
            (
                name if row.channels == CHANNELS else f"{name}, {row.channels} channels", row.dtype, row.batch,
                "yes" if row.ok else f"NO: {row.failure}", f"{row.error:.1e} / {row.eager_error:.1e}",
                f"{row.regions} ({row.skipped})", column(lambda one: str(one.kernels)),
                column(lambda one: str(one.copies)), column(lambda one: _number(one.issue)),
                column(lambda one: _number(one.gpu)), column(lambda one: _number(one.wall)),
                column(lambda one: _number(one.memory, 0)),
                " / ".join(_number(row.first_result.get(name, math.nan), 1) for name in (COMPILE, REDUCE, OWN)),
                _number(row.ratio), _number(row.graph_ratio),
                "; ".join([*(f"{name}: {why}" for name, why in row.left_out.items()), *filter(None, [row.why_not])]),
            )
        )  # fmt: skip
    headers = (
        "network", "dtype", "batch", "right", "error / eager's", "regions (left)", "kernels", "copies", "issuing, ms",
        "GPU, ms", "wall, ms", "memory, MB", "first result, s: compile / reduce / fxfuse", "best peer / fxfuse",
        "reduce-overhead / graph", "remarks",
    )  # fmt: skip
    order = f"Columns with several numbers: {', '.join((*PEERS, OWN, GRAPH))}."
    cells = [[str(cell).replace("|", "/").replace("\n", " ") for cell in line] for line in table]
    return f"{order}\n\n{tabulate(cells, headers=headers, tablefmt='github', disable_numparse=True)}"


def _mean(values: Sequence[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    return f"{statistics.geometric_mean(known):.2f}x of {len(known)}" if known else "none"


def summarise(rows: Sequence[Row]) -> str:
    """Geometric means, the rows below 1, those that are wrong, and what was not drawn."""
    lines = []
    for dtype in dict.fromkeys(row.dtype for row in rows):
        drawn = [row for row in rows if row.dtype == dtype and not row.not_drawn]
        alone = [row.family for row in drawn if row.contestants and math.isnan(row.ratio)]
        below = sorted((row for row in drawn if row.ratio < 1), key=lambda row: row.ratio)
        under = sorted((row for row in drawn if row.graph_ratio < 1), key=lambda row: row.graph_ratio)
        unfinished = [row for row in drawn if row.failure.startswith(TOO_LONG)]
        wrong = [f"{row.family} ({row.failure})" for row in drawn if not row.ok and row not in unfinished]
        lines += [
            f"{dtype}: {len(drawn)} networks, {len(wrong)} not right; best peer / fxfuse "
            f"{_mean([row.ratio for row in drawn])}; reduce-overhead / graph {_mean([r.graph_ratio for r in drawn])}.",
            "Below 1: " + (", ".join(f"{row.family} {row.ratio:.2f}" for row in below) or "none") + ".",
            "Below 1 as graphs: " + (", ".join(f"{row.family} {row.graph_ratio:.2f}" for row in under) or "none") + ".",
            "Without torch.compile's time, in no mean: " + (", ".join(alone) or "none") + ".",
            f"eager / fxfuse, beside no compiler: {_mean([row.eager_ratio for row in drawn])}.",
            "Did not finish: " + ("; ".join(f"{row.family} ({row.failure})" for row in unfinished) or "none") + ".",
            "Not right: " + ("; ".join(wrong) or "none") + ".",
        ]
    absent = [f"- {row.package} {row.family}: {row.not_drawn}".replace("\n", " ") for row in rows if row.not_drawn]
    return "\n\n".join([*lines, "Not drawn, because:\n\n" + ("\n".join(dict.fromkeys(absent)) or "- none")])


# ------------------------------------------------------------------------------------------------------ main


def _slice(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not 0 <= int(index) < int(count):
        raise ValueError(text)
    return int(index), int(count)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument(
        "--named", nargs="+", type=named, metavar="PACKAGE:NAME", help="these networks and no draw; PACKAGE as above"
    )
    parser.add_argument("--count", type=int, default=12, help="families to draw")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--train", action="store_true", help="steps of training")
    parser.add_argument("--slice", type=_slice, default=(0, 1), metavar="i/n", help="every n-th of the draw, from i")
    parser.add_argument(
        "--only", nargs="*", default=[""], help="of the draw, those whose package and family contain one of these"
    )
    parser.add_argument("--compare", nargs="*", default=None, choices=PEERS, help="beside eager, on a CPU by itself")
    parser.add_argument("--batch", type=int, default=BATCH, help="at most so many")
    parser.add_argument(
        "--channels", type=int, default=CHANNELS, help="at most so many, of transformers' networks; a CPU wants fewer"
    )
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a network may take to be built")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no network is begun")
    parser.add_argument("--seconds", type=float, default=2.0, help="measuring time for each network")
    parser.add_argument(
        "--processes",
        type=int,
        default=max(1, (os.cpu_count() or 1) // 3),
        help="built side by side; each keeps about three cores busy",
    )
    parser.add_argument("--network", help="one network, as JSON, in this process")
    parser.add_argument("--first", action="store_true", help="of that network, only the time to the first result")
    given = parser.parse_args()
    if given.compare is None:
        peers = (EAGER, COMPILE) if given.train else PEERS
        given.compare = peers if given.device == "cuda" else (EAGER,)
    if given.network:
        content = json.loads(given.network)
        one(given, Network(content["package"], content["family"], tuple(content["variants"])), given.first)
        return
    began = time.monotonic()
    facts = provenance(torch.device(given.device), given.commit)
    heading = ", ".join(f"{key} {value}" for key, value in facts.items())
    index, parts = given.slice
    todo = [network for network in (given.named or draw(given.seed, given.count))[index::parts]
            if any(part in f"{network.package} {network.family}" for part in given.only)]  # fmt: skip
    results = ("named" if given.named else "zoo") + ("-training" if given.train else "")
    kept = read(given.output, results, facts, Row) if given.output is not None else []
    rows = {row.key: row for row in kept}
    taken: list[Row] = []
    same = ["--seed", str(given.seed), "--dtype", given.dtype, "--device", given.device, "--batch", str(given.batch),
            "--channels", str(given.channels), "--limit", str(given.limit), "--seconds", str(given.seconds),
            *["--train"][: given.train], "--compare", *given.compare]  # fmt: skip

    available = sorted(os.sched_getaffinity(0))
    share = max(1, len(available) // given.processes)

    def built(network: Network, folder: str, place: int) -> _Process:
        cache = tempfile.mkdtemp(dir=folder)
        os.chmod(cache, 0o700)
        environment = {
            **os.environ, "FXFUSE_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": os.path.join(cache, "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "2",
        }  # fmt: skip
        processors = {available[(place * share + number) % len(available)] for number in range(share)}
        process = _Process([*same, "--network", json.dumps(asdict(network))], environment, given.limit, processors)
        process.run_to("built")
        return process

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ThreadPoolExecutor(given.processes) as pool:
        for start in range(0, len(todo), given.processes):
            if time.monotonic() - began > given.budget:
                print(f"no time left for {len(todo) - start} of the draw", flush=True)
                break
            group = todo[start : start + given.processes]
            processes = list(pool.map(built, group, itertools.repeat(folder), itertools.count()))
            for network, process in zip(group, processes, strict=True):
                if process.said and "built" in process.said[-1]:
                    process.go_on(given.limit)
                    process.run_to("final")
                row = replace(_row_of(process, network, given), commit=facts["commit"])
                rows[row.key] = row
                taken.append(row)
                print(render([row]).splitlines()[-1] if not row.not_drawn else f"{row.family}: {row.not_drawn}",
                      flush=True)  # fmt: skip
                if given.output is not None:  # after each row, so that an interrupted run leaves what it measured
                    listed = list(rows.values())
                    text = f"{heading}\n\n{summarise(listed)}\n\n{render(listed)}\n"
                    write(given.output, results, facts, text, listed)
    print(f"\n{heading}\n\n{render(taken)}\n\n{summarise(taken)}")


if __name__ == "__main__":
    main()
