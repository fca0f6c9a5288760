"""A decoder in Llama's style with a static key-value cache, in plain PyTorch: one token and many, beside its peers.

    python benchmarks/decoder.py --output benchmarks/results
    python benchmarks/decoder.py --device cpu --layers 2 --width 64 --heads 4 --hidden 172 --vocabulary 100

The share of the bandwidth is what a call reads at least (weights once, what is attended to once) over its time, as a
part of the speed at which a kernel reads a tensor of 2 GiB here. Contestants as in zoo.py. All share one cache and
write the same values to it.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from contestants import (
    COMPILE,
    EAGER,
    GRAPH,
    OWN,
    PEERS,
    REDUCE,
    Call,
    Contestant,
    compiled,
    measured,
    wait,
    warmed,
)
from suite import PRECISIONS, arguments, provenance, read, write
from tabulate import tabulate
from torch import nn
from torch.nn import functional as F

import fxfuse

THETA = 10000.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; the cache holds `length` tokens, of `key_heads` heads that `heads` heads of queries share."""

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int
    length: int


class RMSNorm(nn.Module):
    """As transformers' own: in float32, and the weight after the cast."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exact = x.to(torch.float32)
        return self.weight * (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of (batch, heads, tokens, channels) with (tokens, channels)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """Each head so many times, as transformers writes it: with a mask torch's enable_gqa has no fast kernel."""
    if times == 1:
        return x
    batch, heads, length, channels = x.shape
    wide = x[:, :, None].expand(batch, heads, times, length, channels)
    return wide.reshape(batch, heads * times, length, channels)


class Attention(nn.Module):
    """Of the tokens at `positions` over the whole cache, which takes their keys and values."""

    def __init__(self, shape: Shape, batch: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.channels = shape.heads, shape.key_heads, shape.width // shape.heads
        self.query, self.out = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(shape.width, shape.key_heads * self.channels, bias=False) for _ in range(2))
        for name in ("keys", "values"):
            cache = torch.zeros(batch, shape.key_heads, shape.length, self.channels)
            self.register_buffer(name, cache, persistent=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        batch, tokens, width = x.shape
        query, key, value = (
            linear(x).view(batch, tokens, -1, self.channels).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        self.keys.index_copy_(2, positions, key)
        self.values.index_copy_(2, positions, value)
        keys, values = (repeated(cache, self.heads // self.key_heads) for cache in (self.keys, self.values))
        found = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        return self.out(found.transpose(1, 2).reshape(batch, tokens, width))


class Layer(nn.Module):
    def __init__(self, shape: Shape, batch: int) -> None:
        super().__init__()
        self.attention_norm, self.unit_norm = RMSNorm(shape.width), RMSNorm(shape.width)
        self.attention = Attention(shape, batch)
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor, *where: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), *where)
        unit = self.unit_norm(x)
        return x + self.down(F.silu(self.gate(unit)) * self.up(unit))


class Decoder(nn.Module):
    """Logits (batch, tokens, vocabulary) for int64 (batch, tokens) at int64 positions (tokens,)."""

    def __init__(self, shape: Shape, batch: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape, batch) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        channels = shape.width // shape.heads
        speeds = THETA ** (-torch.arange(0, channels, 2) / channels)
        angles = torch.outer(torch.arange(shape.length), speeds).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("mask", torch.ones(shape.length, shape.length, dtype=torch.bool).tril(), persistent=False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        where = self.cos[positions], self.sin[positions], self.mask[positions], positions
        for layer in self.layers:
            x = layer(x, *where)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Row:
    """One line of the results."""

    shape: dict[str, int]
    dtype: str
    batch: int
    tokens: int
    ok: bool
    error: float
    eager_error: float
    bytes_read: int
    """By a call, at least."""
    least: float
    """Milliseconds for them."""
    contestants: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    commit: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(sorted(self.shape.items())), self.dtype, self.batch, self.tokens

    def wall(self, name: str) -> float:
        return float(self.contestants[name]["wall"]) if name in self.contestants else math.nan


def bytes_a_millisecond(device: torch.device) -> float:
    """At which a kernel reads what is larger than any cache."""
    large = torch.ones(2**29 if device.type == "cuda" else 2**26, device=device)
    times = []
    for _ in range(10):
        wait(device)
        began = time.perf_counter()
        large.amax()
        wait(device)
        times.append((time.perf_counter() - began) * 1e3)
    return large.nbytes / min(times)


def bytes_read(model: Decoder, positions: torch.Tensor) -> int:
    """Weights of the products, and the cache up to the last position."""
    weights = sum(module.weight.nbytes for module in model.modules() if isinstance(module, nn.Linear))
    caches = sum(
        cache[:, :, : int(positions[-1]) + 1].numel() * cache.element_size()
        for layer in model.layers
        for cache in (layer.attention.keys, layer.attention.values)
    )
    return weights + caches


def measure(
    model: Decoder, shape: Shape, args: tuple[torch.Tensor, ...], compare: Sequence[str], seconds: float, speed: float
) -> Row:
    """One line: every contestant with these arguments."""
    torch._dynamo.reset()  # else the second shape would be compiled for any
    device = args[0].device

    def call(model: Callable[..., Any]) -> Any:
        return model(*args)

    calls: dict[str, Call] = {EAGER: lambda: call(model)}
    left_out = {}
    for peer, mode in ((COMPILE, "default"), (REDUCE, "reduce-overhead")):
        if peer in compare:
            calls[peer] = compiled(model, call, mode)
    fast = fxfuse.optimize(model, args)
    verified = fxfuse.verify(model, fast, args)
    calls[OWN] = lambda: call(fast)
    if device.type == "cuda":
        graphed = fxfuse.optimize(model, args, cuda_graphs=True)
        calls[GRAPH] = lambda: call(graphed)
    left_out |= warmed(calls, device)
    nbytes = bytes_read(model, args[1])
    return Row(
        shape=asdict(shape),
        dtype=str(model.head.weight.dtype).removeprefix("torch."),
        batch=args[0].shape[0],
        tokens=args[0].shape[1],
        ok=verified.ok,
        error=verified.error,
        eager_error=verified.eager_error,
        bytes_read=nbytes,
        least=nbytes / speed,
        contestants={name: asdict(found) for name, found in measured(calls, device, seconds).items()},
        left_out=left_out,
    )


def render(rows: Sequence[Row]) -> str:
    """A table; contestants' columns are in the order of its first line."""
    names = (*PEERS, OWN, GRAPH)
    table = []
    for row in rows:
        each = [Contestant(**row.contestants[name]) if name in row.contestants else None for name in names]

        def column(of: Callable[[Contestant], str], each: Sequence[Contestant | None] = each) -> str:
            return " / ".join("-" if one is None else of(one) for one in each)

        table.append(
            (
                f"{row.shape['layers']} layers of {row.shape['width']}, {row.dtype}",
                "{heads}:{key_heads}".format(**row.shape), row.shape["length"], row.batch, row.tokens,
                "yes" if row.ok else "NO", f"{row.error:.1e} / {row.eager_error:.1e}",
                column(lambda one: f"{one.wall:.2f}"), column(lambda one: f"{one.gpu:.2f}"),
                column(lambda one: f"{one.issue:.2f}"), column(lambda one: str(one.kernels)),
                column(lambda one: f"{one.memory:.0f}"),
                column(lambda one: f"{row.least / one.wall:.2f}"),  # noqa: B023
                f"{min(row.wall(EAGER), row.wall(COMPILE)) / row.wall(OWN):.2f}",
                f"{row.wall(REDUCE) / row.wall(GRAPH):.2f}",
                "; ".join(f"{name}: {why}" for name, why in row.left_out.items()),
            )
        )  # fmt: skip
    headers = (
        "decoder", "heads", "cache", "batch", "tokens", "right", "error / eager's", "wall, ms", "GPU, ms",
        "issuing, ms", "kernels", "memory, MB", "share of the bandwidth", "best peer / fxfuse",
        "reduce-overhead / graph", "did not run",
    )  # fmt: skip
    order = f"Columns with several numbers: {', '.join(names)}."
    return f"{order}\n\n{tabulate(table, headers=headers, tablefmt='github', disable_numparse=True)}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=None, help="which heads share; as many as heads if not given")
    parser.add_argument("--hidden", type=int, default=11008, help="of the gated unit")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--length", type=int, default=512, help="tokens that the cache holds")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 512])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--compare", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--seconds", type=float, default=2.0, help="measuring time for each row")
    given = parser.parse_args()
    device = torch.device(given.device)
    shape = Shape(
        given.layers, given.width, given.heads, given.key_heads or given.heads, given.hidden, given.vocabulary,
        given.length,
    )  # fmt: skip
    facts = provenance(device, given.commit)
    heading = ", ".join(f"{key} {value}" for key, value in facts.items())
    rows = {row.key: row for row in (read(given.output, "decoder", facts, Row) if given.output is not None else [])}
    taken = []
    with torch.no_grad(), PRECISIONS["float32"].in_force(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        speed = bytes_a_millisecond(device)
        heading += f", reads at {speed / 1e6:.0f} GB/s"
        for batch, tokens in itertools.product(given.batch, given.tokens):
            torch.manual_seed(0)
            start = shape.length - tokens
            with torch.device(device):  # not longer: it is a mode that every call of torch would go through
                model = Decoder(shape, batch).eval().to(getattr(torch, given.dtype))
                before, args = (
                    (torch.randint(shape.vocabulary, (batch, end - begin)), torch.arange(begin, end))
                    for begin, end in ((0, start), (start, shape.length))
                )
            if start:  # so that the cache is full
                model(*before)
            row = replace(measure(model, shape, args, given.compare, given.seconds, speed), commit=facts["commit"])
            taken.append(row)
            print(render([row]).splitlines()[-1], flush=True)
            rows[row.key] = row
            if given.output is not None:
                listed = list(rows.values())
                write(given.output, "decoder", facts, f"{heading}\n\n{render(listed)}\n", listed)
    print(f"\n{heading}\n\n{render(taken)}")


if __name__ == "__main__":
    main()
