"""Steps of training on several GPUs: fxfuse beside eager and torch.compile, in DistributedDataParallel and FSDP2.

    python benchmarks/distributed.py --output benchmarks/results
    python benchmarks/distributed.py --only GPT-2 --precisions bfloat16 --compare torch.compile --budget 120

It starts a process for each GPU (NCCL), or two on a CPU (gloo). Each has inputs of its own and, for each contestant, a
model with the same random weights. "bfloat16" is torch.autocast around the forward. A step sets gradients to None,
computes a loss and its gradients (steps.py), and ends when all of them are there; there is no optimiser.

Times are those of the slowest process. A step "unsent" is one in DistributedDataParallel.no_sync: what it takes less is
what sending gradients adds. Errors are those of all parameters' gradients, the mean over the processes, against
float64, as a part of their norm.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import functools
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from contestants import COMPILE, EAGER, OWN, WARM, Call, told, wait
from steps import autocast, error, explained, left_to_torch, step
from suite import PRECISIONS, arguments, provenance, read, write
from tabulate import tabulate
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

import fxfuse
from fxfuse import training_step
from fxfuse.module import state_of

WHOLE, FSDP, OWN_FSDP = "fxfuse, one segment", "FSDP2", "fxfuse, FSDP2"
CHOICES = {COMPILE: (COMPILE,), "whole": (WHOLE,), "FSDP2": (FSDP, OWN_FSDP)}
"""What --compare may name beside eager and fxfuse in DistributedDataParallel."""
NAMES = (EAGER, COMPILE, OWN, WHOLE, FSDP, OWN_FSDP)
STEPS_AT_ONCE = 4
"""Between two waits for the GPU."""
LEAST_ROUNDS = 3
SECONDS_OF_A_COLLECTIVE = 300
"""One process may compile while others wait."""


# ---------------------------------------------------------------------------------------------------- networks


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_mlp(x)), approximate="tanh"))


class LanguageModel(nn.Module):
    """GPT-2, but for its dropout: of tokens (batch, length) the logits (batch, length, vocabulary)."""

    def __init__(self, width: int, heads: int, layers: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Network:
    """A model and the shape of its input on each process; of token identifiers if `tokens` is how many there are."""

    build: Callable[[bool], nn.Module]
    """Takes whether it is to be small, as tests on a CPU want it."""
    shape: tuple[int, ...]
    small_shape: tuple[int, ...]
    tokens: int = 0
    small_tokens: int = 0
    blocks: str = ""
    """The module whose children FSDP2 shards, each for itself; none: FSDP2 is left out."""


def _gpt2(small: bool) -> nn.Module:
    return LanguageModel(32, 2, 2, 16, 64) if small else LanguageModel(768, 12, 12, 1024, 50257)


def _resnet50(small: bool) -> nn.Module:
    import torchvision

    return torchvision.models.get_model("resnet50", weights=None)  # type: ignore[no-any-return]


NETWORKS = {
    "GPT-2": Network(_gpt2, (4, 512), (2, 8), 50257, 64, "blocks"),
    "ResNet-50": Network(_resnet50, (64, 3, 224, 224), (2, 3, 64, 64)),
}


# ------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class Row:
    """One line of the results. Times in milliseconds, medians; memory in MB, a process's most while it steps."""

    network: str
    precision: str
    processes: int
    times: dict[str, float]
    unsent: dict[str, float]
    memory: dict[str, float]
    errors: dict[str, float]
    first: dict[str, float]
    """Seconds of the steps before those that are measured: what compiling takes."""
    segments: int = 0
    """Of fxfuse's backward."""
    left_out: dict[str, str] = field(default_factory=dict)
    why_not: str = ""
    """Why fxfuse leaves gradients to torch, if it does."""
    commit: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.network, self.precision, self.processes

    @property
    def gain(self) -> float:
        """Of the better of the peers' times."""
        peers = [self.times[name] for name in (EAGER, COMPILE) if name in self.times]
        return min(peers, default=math.nan) / self.times.get(OWN, math.nan)


def render(rows: Sequence[Row]) -> str:
    """A table; contestants' columns are in the order of its first line."""
    names = [name for name in NAMES if any(name in (*row.times, *row.left_out) for row in rows)]

    def listed(values: Mapping[str, float], form: str) -> str:
        return " / ".join(format(values[name], form) if name in values else "-" for name in names)

    table = [
        (
            row.network, row.precision, row.processes, listed(row.errors, ".1e"), listed(row.times, ".2f"),
            listed(row.unsent, ".2f"), listed(row.memory, ".0f"), listed(row.first, ".0f"), row.segments,
            f"{row.gain:.2f}", "; ".join([*(f"{name}: {why}" for name, why in row.left_out.items()), row.why_not]),
        )
        for row in rows
    ]  # fmt: skip
    headers = (
        "network", "precision", "processes", "error", "step, ms", "unsent, ms", "memory, MB", "first steps, s",
        "segments", "best DDP peer / fxfuse", "remarks",
    )  # fmt: skip
    order = f"Columns with several numbers: {', '.join(names)}; DistributedDataParallel where nothing else is said."
    return f"{order}\n\n{tabulate(table, headers=headers, tablefmt='github', disable_numparse=True)}"


# ------------------------------------------------------------------------------------------------------ contestants


@dataclass(frozen=True)
class Stepping:
    """A contestant in one process."""

    model: nn.Module
    """That was wrapped or sharded: its parameters have the gradients."""
    call: Call
    unsent: Call | None = None

    def gradients(self) -> list[torch.Tensor]:
        found = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]


def _sharded(model: nn.Module, blocks: str, device: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for block in model.get_submodule(blocks).children():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def contestant(
    name: str, model: nn.Module, network: Network, x: torch.Tensor, precision: str, bucket_mb: float | None
) -> Stepping:
    """One of NAMES; `model` becomes its own."""

    def wrapped(inner: nn.Module) -> nn.Module:
        options: dict[str, Any] = {} if bucket_mb is None else {"bucket_cap_mb": bucket_mb}
        return DistributedDataParallel(inner, device_ids=[x.device.index] if x.is_cuda else None, **options)

    if name == EAGER:
        wrapper = called = wrapped(model)
    elif name == COMPILE:
        wrapper = wrapped(model)
        called = torch.compile(wrapper)  # type: ignore[assignment]
    elif name in (OWN, WHOLE):
        wrapper = called = wrapped(fxfuse.optimize(model))
    else:
        wrapper = called = _sharded(model if name == FSDP else fxfuse.optimize(model), network.blocks, x.device)
    # parameters of a sharded model are others than before
    parameters = list(wrapper.parameters())

    def forward() -> Any:
        uncut = mock.patch.object(training_step, "buckets_now", lambda: None)
        with autocast(x.device, precision == "bfloat16"), uncut if name == WHOLE else contextlib.nullcontext():
            return called(x)

    def unsent() -> Any:
        with wrapper.no_sync():  # type: ignore[operator]
            return step(parameters, forward)

    is_sharded = name in (FSDP, OWN_FSDP)
    return Stepping(wrapper, lambda: step(parameters, forward), None if is_sharded else unsent)


def exact_gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The mean over the processes, in float64."""
    exact = copy.deepcopy(model).double()
    inputs = x.double() if x.is_floating_point() else x
    _, *gradients = step(list(exact.parameters()), lambda: exact(inputs))
    for gradient in gradients:
        distributed.all_reduce(gradient)
        gradient /= distributed.get_world_size()
    return gradients


def most(number: float, device: torch.device) -> float:
    """Over the processes, which all ask."""
    tensor = torch.tensor(number, dtype=torch.float64, device=device)
    distributed.all_reduce(tensor, distributed.ReduceOp.MAX)
    return float(tensor)


def timed(call: Call, device: torch.device) -> float:
    """Milliseconds of a step in the slowest process."""
    most(0, device)  # all begin at once
    wait(device)
    began = time.perf_counter()
    for _ in range(STEPS_AT_ONCE):
        call()
    wait(device)
    return most((time.perf_counter() - began) / STEPS_AT_ONCE * 1e3, device)


def prepared(make: Callable[[], Stepping], device: torch.device) -> tuple[Stepping | str, float]:
    """A contestant at its speed, or why there is none; and how many seconds that took."""
    began = time.perf_counter()
    found: Stepping | str
    try:
        found = make()
        for call in (found.unsent, found.call):
            for _ in range(WARM if call is not None else 0):
                call()  # type: ignore[misc]
        wait(device)
    except Exception as reason:
        found = told(reason)
    if most(isinstance(found, str), device) and not isinstance(found, str):
        found = "another process failed"
    return found, most(time.perf_counter() - began, device)


def segments_of(fast: nn.Module) -> int:
    """How many the backward of its training step has at most; 0 if there is none."""
    states = [state_of(graph).training for _, graph in fxfuse.explain(fast).graphs]
    return max((len(one.segments) for state in states if state is not None for one in state.steps), default=0)


def measure(name: str, precision: str, given: argparse.Namespace, device: torch.device, until: float) -> Row:
    """One line, by all processes together.

    Args:
        until: when no contestant is begun any more, by time.monotonic().
    """
    network = NETWORKS[name]
    torch.compiler.reset()
    torch.manual_seed(0)
    model = network.build(given.small).to(device).train()
    torch.manual_seed(1 + distributed.get_rank())
    shape, tokens = (network.small_shape, network.small_tokens) if given.small else (network.shape, network.tokens)
    x = torch.randint(tokens, shape, device=device) if tokens else torch.randn(shape, device=device)
    expected = exact_gradients(model, x)
    chosen = [each for kind in given.compare for each in CHOICES[kind]]
    stepping: dict[str, Stepping] = {}
    errors, first, left_out = {}, {}, {}
    for who in (EAGER, OWN, *sorted(chosen, key=NAMES.index)):
        if who in (FSDP, OWN_FSDP) and not network.blocks:
            continue
        if who != EAGER and most(time.monotonic() > until, device):
            left_out[who] = "no time was left"
            continue
        make = functools.partial(contestant, who, copy.deepcopy(model), network, x, precision, given.bucket_mb)
        one, first[who] = prepared(make, device)
        if isinstance(one, str):
            left_out[who] = one
            continue
        errors[who] = error(expected, one.gradients())
        if errors[who] > explained(errors[EAGER]):
            left_out[who] = f"its gradients are wrong by {errors[who]:.1e}"
            continue
        stepping[who] = one
    del expected
    rounds: dict[str, list[float]] = {who: [] for who in stepping}
    unsent: dict[str, list[float]] = {who: [] for who, one in stepping.items() if one.unsent is not None}
    memory = {}
    began = time.perf_counter()
    while min(map(len, rounds.values())) < LEAST_ROUNDS or most(time.perf_counter() - began, device) < given.seconds:
        for who, one in stepping.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
            rounds[who].append(timed(one.call, device))
            if device.type == "cuda":
                memory[who] = most((torch.cuda.max_memory_allocated(device) - before) / 2**20, device)
            if one.unsent is not None:
                unsent[who].append(timed(one.unsent, device))
    fast: Any = stepping[OWN].model.module if OWN in stepping else None
    return Row(
        name, precision, distributed.get_world_size(),
        {who: statistics.median(each) for who, each in rounds.items()},
        {who: statistics.median(each) for who, each in unsent.items()},
        memory, errors, first, 0 if fast is None else segments_of(fast), left_out,
        "" if fast is None else left_to_torch(fxfuse.explain(fast)),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- processes


def serve(rank: int, processes: int, folder: str, given: argparse.Namespace) -> None:
    """One of the processes; the first one prints and writes."""
    is_gpu = given.device == "cuda"
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    distributed.init_process_group(
        "nccl" if is_gpu else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes,
        timeout=datetime.timedelta(seconds=SECONDS_OF_A_COLLECTIVE),
    )  # fmt: skip
    facts = provenance(device, given.commit)
    heading = ", ".join(f"{key} {value}" for key, value in facts.items())
    is_first, folder_of_results = rank == 0, given.output
    kept = read(folder_of_results, "distributed", facts, Row) if is_first and folder_of_results is not None else []
    rows = {row.key: row for row in kept}
    taken: list[Row] = []
    began = time.monotonic()
    with PRECISIONS["float32"].in_force(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in NETWORKS:
            for precision in given.precisions:
                out_of_time = most(time.monotonic() - began > given.budget, device)
                if not any(part in name for part in given.only) or out_of_time:
                    continue
                row = measure(name, precision, given, device, began + given.budget)
                row = Row(**{**vars(row), "commit": facts["commit"]})
                taken.append(row)
                rows[row.key] = row
                if is_first:
                    print(render([row]).splitlines()[-1], flush=True)
                if is_first and folder_of_results is not None:
                    every = list(rows.values())
                    write(folder_of_results, "distributed", facts, f"{heading}\n\n{render(every)}\n", every)
    if is_first:
        print(f"\n{heading}\n\n{render(taken)}")
    distributed.destroy_process_group()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--processes", type=int, default=None, help="one for each GPU; two on a CPU")
    parser.add_argument("--only", nargs="*", default=[""], help="networks whose names contain one of these")
    parser.add_argument("--precisions", nargs="*", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--compare", nargs="*", default=[COMPILE, "FSDP2"], choices=list(CHOICES))
    parser.add_argument("--bucket-mb", type=float, default=None, help="bucket_cap_mb, if not torch's default")
    parser.add_argument("--small", action="store_true", help="small models and inputs")
    parser.add_argument("--seconds", type=float, default=3.0, help="measuring time for each row")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which nothing is begun")
    given = parser.parse_args()
    given.device = torch.device(given.device).type
    processes = given.processes or (torch.cuda.device_count() if given.device == "cuda" else 2)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(serve, args=(processes, folder, given), nprocs=processes)


if __name__ == "__main__":
    main()
