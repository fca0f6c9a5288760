"""Steps of training, forward and backward: fxfuse beside eager and torch.compile.

    python benchmarks/training.py --output benchmarks/results
    python benchmarks/training.py --only BERT --precisions float32 bfloat16 --small
    python benchmarks/training.py --graph --output benchmarks/results

From torchvision and transformers, with random weights. "bfloat16" is torch.autocast around the forward. A step sets
gradients to None, computes a loss and its gradients (steps.py); there is no optimiser. Errors are those of all
parameters' gradients against float64, as a part of their norm, with dropout left out.

With `--compare torch.compile reduce-overhead` there are CUDA graphs of torch.compile's and of fxfuse's, too: of the
forward and of the backward. With --graph, forward, loss and backward are one CUDA graph of each contestant, captured by
torch.cuda.graph once it is at its speed; memory is then what the graph holds. Whoever waits for the GPU in a step has
no graph, and is left out.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from contestants import COMPILE, EAGER, GRAPH, OWN, REDUCE, Call, Contestant, captured, measured, told, wait, warmed
from networks import IMAGE
from steps import CALLS, autocast, error, explained, left_to_torch, step, without_dropout
from suite import PRECISIONS, arguments, provenance, read, write
from tabulate import tabulate
from torch import nn

import fxfuse


@dataclass(frozen=True)
class Network:
    """A model and the shape of its input; of token identifiers if `tokens` is how many there are."""

    build: Callable[[bool], nn.Module]
    """Takes whether it is to be small, as tests on a CPU want it."""
    shape: tuple[int, ...]
    small_shape: tuple[int, ...]
    tokens: int = 0


def _mlp(small: bool) -> nn.Module:
    width = 32 if small else 4096
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers)


def _torchvision(name: str) -> Callable[[bool], nn.Module]:
    def build(small: bool) -> nn.Module:
        import torchvision

        return torchvision.models.get_model(name, weights=None)  # type: ignore[no-any-return]

    return build


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def _bert(small: bool) -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**_SMALL if small else {}), add_pooling_layer=False)


def _vit(small: bool) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**_SMALL if small else {}))


def _gpt2(small: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2} if small else {}
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes))


NETWORKS = {
    "MLP 4 x 4096": Network(_mlp, (4096, 4096), (64, 32)),
    "BERT-base": Network(_bert, (16, 128), (2, 16), tokens=30522),
    "ViT-B/16": Network(_vit, (32, *IMAGE), (2, *IMAGE)),
    "ConvNeXt-T": Network(_torchvision("convnext_tiny"), (32, *IMAGE), (2, *IMAGE)),
    "GPT-2": Network(_gpt2, (4, 512), (2, 16), tokens=50257),
    "ResNet-50": Network(_torchvision("resnet50"), (64, *IMAGE), (2, *IMAGE)),
    "MobileNetV2": Network(_torchvision("mobilenet_v2"), (64, *IMAGE), (2, *IMAGE)),
}


@dataclass(frozen=True)
class Row:
    """One line of the results."""

    network: str
    precision: str
    errors: dict[str, float]
    first: dict[str, float]
    """Seconds of the first steps."""
    contestants: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    why_not: str = ""
    """Why fxfuse leaves gradients to torch, if it does."""
    commit: str = ""
    first_steps: int = 3
    """How many those are, in which all is compiled; until 26 November 2026 not all of it was, of models that Dynamo
    captures."""

    @property
    def key(self) -> tuple[str, str]:
        return self.network, self.precision

    def wall(self, name: str) -> float:
        return float(self.contestants[name]["wall"]) if name in self.contestants else math.nan

    @property
    def gain(self) -> float:
        """Of the better of the peers' times."""
        peers = [self.wall(name) for name in (EAGER, COMPILE) if name in self.contestants]
        return min(peers, default=math.nan) / self.wall(OWN)

    @property
    def gain_of_graphs(self) -> float:
        """Of the time of torch.compile's CUDA graphs."""
        return self.wall(REDUCE) / self.wall(GRAPH)


def _step(model: nn.Module, call: Callable[..., Any], x: torch.Tensor, precision: str) -> Call:
    parameters = list(model.parameters())

    def forward() -> Any:
        with autocast(x.device, precision == "bfloat16"):
            return call(x)

    return lambda: step(parameters, forward)


def _errors(calls: Mapping[str, Call], model: nn.Module, x: torch.Tensor) -> Iterator[tuple[str, float]]:
    """Of each contestant's gradients."""
    exact = copy.deepcopy(model).double()
    _, *expected = _step(exact, exact, x.double() if x.is_floating_point() else x, "float64")()
    del exact
    for name, call in calls.items():
        _, *gradients = call()
        yield name, error(expected, gradients)


def _as_graphs(calls: dict[str, Call], apart: float) -> tuple[dict[str, str], dict[str, float]]:
    """Puts replays in the place of calls. Says of whom there are none, and why; and what graphs hold, in MB."""
    left_out, memory = {}, {}
    for name, call in list(calls.items()):
        try:
            expected = [one.clone() for one in call()]
            calls[name], memory[name] = captured(call)
            if error(expected, calls[name]()) > apart:
                raise ArithmeticError("its graph computes something else than its steps")
        except Exception as reason:
            left_out[name] = told(reason)
            del calls[name]
    return left_out, memory


def measure(
    name: str, precision: str, compare: Sequence[str], seconds: float, small: bool, device: str, graph: bool = False
) -> Row:
    """One line. With `graph`, contestants are replays of their steps."""
    network = NETWORKS[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    shape = network.small_shape if small else network.shape
    model = network.build(small).to(device).train()
    without_dropout(model)
    x = torch.randint(network.tokens, shape, device=device) if network.tokens else torch.randn(shape, device=device)
    calls: dict[str, Call] = {EAGER: _step(model, model, x, precision)}
    if COMPILE in compare:
        calls[COMPILE] = _step(model, torch.compile(model), x, precision)
    if REDUCE in compare:
        calls[REDUCE] = _step(model, torch.compile(model, mode="reduce-overhead"), x, precision)
    fast = fxfuse.optimize(model)
    calls[OWN] = _step(model, fast, x, precision)
    if REDUCE in compare:
        calls[GRAPH] = _step(model, fxfuse.optimize(model, cuda_graphs=True), x, precision)
    first, left_out = {}, {}
    for contestant, call in list(calls.items()):
        began = time.perf_counter()
        try:
            for _ in range(CALLS):
                call()
            wait(x.device)
            first[contestant] = time.perf_counter() - began
        except Exception as reason:
            left_out[contestant] = told(reason)
            del calls[contestant]
    errors = dict(_errors(calls, model, x))
    apart = explained(errors[EAGER])
    left_out |= warmed(calls, x.device, error, apart)
    held: dict[str, float] = {}
    if graph:
        without, held = _as_graphs(calls, apart)
        left_out |= without
    found = measured(calls, x.device, seconds)
    contestants = {who: asdict(replace(one, memory=held.get(who, one.memory))) for who, one in found.items()}
    why_not = left_to_torch(fxfuse.explain(fast))
    return Row(name, precision, errors, first, contestants, left_out, why_not, first_steps=CALLS)


def render(rows: Sequence[Row]) -> str:
    """A table; contestants' columns are in the order of its first line."""
    every = (EAGER, COMPILE, REDUCE, OWN, GRAPH)
    names = [name for name in every if name not in (REDUCE, GRAPH) or any(name in row.contestants for row in rows)]
    table = []
    for row in rows:
        each = [Contestant(**row.contestants[name]) if name in row.contestants else None for name in names]

        def column(of: Callable[[Contestant], str], each: Sequence[Contestant | None] = each) -> str:
            return " / ".join("-" if one is None else of(one) for one in each)

        def listed(values: Mapping[str, float], form: str) -> str:
            return " / ".join(format(values[name], form) if name in values else "-" for name in names)

        table.append(
            (
                row.network, row.precision, listed(row.errors, ".1e"), column(lambda one: f"{one.wall:.2f}"),
                column(lambda one: f"{one.gpu:.2f}"), column(lambda one: str(one.kernels)),
                column(lambda one: f"{one.memory:.0f}"), f"{listed(row.first, '.1f')} ({row.first_steps})",
                f"{row.gain:.2f}", *[f"{row.gain_of_graphs:.2f}"][: REDUCE in names],
                "; ".join([*(f"{name}: {why}" for name, why in row.left_out.items()), row.why_not]),
            )
        )  # fmt: skip
    headers = (
        "network", "precision", "error", "wall, ms", "GPU, ms", "kernels", "memory, MB", "first steps, s",
        "best peer / fxfuse", *["reduce-overhead / graphs"][: REDUCE in names], "remarks",
    )  # fmt: skip
    order = f"Columns with several numbers: {', '.join(names)}. In parentheses, how many steps were the first."
    return f"{order}\n\n{tabulate(table, headers=headers, tablefmt='github', disable_numparse=True)}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="networks whose names contain one of these")
    parser.add_argument("--precisions", nargs="*", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--compare", nargs="*", default=[COMPILE], choices=[COMPILE, REDUCE])
    parser.add_argument("--graph", action="store_true", help="whole steps as CUDA graphs")
    parser.add_argument("--small", action="store_true", help="small models and inputs")
    parser.add_argument("--seconds", type=float, default=3.0, help="measuring time for each row")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no row is begun")
    given = parser.parse_args()
    device = torch.device(given.device)
    if given.graph and device.type != "cuda":
        parser.error("--graph needs a GPU")
    if given.graph and REDUCE in given.compare:
        parser.error(f"--graph captures whole steps, and {REDUCE} captures parts of them: compare one at a time")
    results = "training-graph" if given.graph else "training"
    facts = provenance(device, given.commit)
    heading = ", ".join(f"{key} {value}" for key, value in facts.items())
    heading += "\n\nEach step is one CUDA graph; memory is what it holds." if given.graph else ""
    rows = {row.key: row for row in (read(given.output, results, facts, Row) if given.output is not None else [])}
    taken: list[Row] = []
    began = time.monotonic()
    with PRECISIONS["float32"].in_force(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for precision in given.precisions:
            for name in NETWORKS:
                if not any(part in name for part in given.only) or time.monotonic() - began > given.budget:
                    continue
                options = given.compare, given.seconds, given.small, given.device, given.graph
                row = replace(measure(name, precision, *options), commit=facts["commit"])
                taken.append(row)
                rows[row.key] = row
                print(render([row]).splitlines()[-1], flush=True)
                if given.output is not None:
                    every = list(rows.values())
                    write(given.output, results, facts, f"{heading}\n\n{render(every)}\n", every)
    print(f"\n{heading}\n\n{render(taken)}")
    gains = [row.gain for row in taken if math.isfinite(row.gain)]
    if gains:
        print(f"\ngeometric mean of best peer / fxfuse: {statistics.geometric_mean(gains):.2f}")


if __name__ == "__main__":
    main()
