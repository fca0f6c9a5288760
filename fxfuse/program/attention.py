"""Contests between attention kernels, decided by measuring.

`planned` replaces torch's attention by a kernel of ours (cuda/attention.py). `by_hand` replaces the products and
softmax of a model that writes attention out, by one of torch's attention operators or by a kernel of ours
(attention_by_hand.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F

from fxfuse import ahead, build, events, packaged, stream_capture
from fxfuse.cuda import attention, exactness, gpu, tune
from fxfuse.cuda.kernel import Kernel
from fxfuse.errors import BuildError, FxfuseError, MissingKernelError, ToolchainError
from fxfuse.expression import Call as Term
from fxfuse.expression import Const, Expr, Operand
from fxfuse.problem import Problem, Run, TensorMeta
from fxfuse.program.indices import Element, Index, dot
from fxfuse.program.loops import Body, Read, coordinates, inlined
from fxfuse.program.observed import function_of
from fxfuse.program.own_kernels import candidate as candidate_of
from fxfuse.program.own_kernels import may_compute, problem_of, quickest, source_of
from fxfuse.program.values import Call, Launch, Slot, Value, alignment, is_plain, written_by

logger = logging.getLogger("fxfuse")

CALLS: Final = frozenset({F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default})
"""What graphs call for attention: traced ones torch's function, exported ones its operator. Both have one signature."""
KIND: Final = "attention"
LIBRARY: Final = "scaled_dot_product_attention"
"""The name of torch's candidate in `planned`."""
BY_HAND: Final = "attention by hand"
"""The kind of the problems of `by_hand`."""
APART: Final = "products and softmax"
"""The name of the candidate that leaves attention as the model wrote it."""
_PARAMETERS: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""The positional parameters of F.scaled_dot_product_attention. The others are given by name."""


def planned(
    args: Sequence[Any], kwargs: Mapping[str, Any], expected: torch.Tensor,
    source: Callable[[torch.Tensor], torch.Tensor | None] = lambda tensor: None,
) -> Callable[[], torch.Tensor] | None:  # fmt: skip
    """A function that computes F.scaled_dot_product_attention(*args, **kwargs) by a kernel of ours.

    None if there is no kernel for it, or if torch is as quick.

    Args:
        expected: torch's result.
        source: for keys or values whose heads were repeated, to match the number of the queries' heads: returns the
            tensor before the repetition, which is read instead. Returns None for other tensors.
    """
    asked = _asked(args, kwargs)
    if asked is None or not may_compute(expected) or not all(map(is_plain, asked.tensors)):
        return None
    tensors = list(asked.tensors)
    sources = [found for found in map(source, tensors[1:3]) if found is not None]
    repeats = len(sources) == 2
    if repeats:
        tensors[1:3] = sources
    described = problem_for(tensors, expected, asked.scale, is_causal=asked.is_causal)
    kernels = attention.candidates(described) if described else []
    if described is None or not kernels:
        return None
    named = {"is_causal": asked.is_causal, "scale": asked.scale, "enable_gqa": described.group > 1, "repeats": repeats}
    options = tuple(named.items())
    problem = problem_of(KIND, tensors, options)
    first = attention.is_quicker(described)
    found = quickest(problem, kernels, _library(options), expected, len(tensors), tensors, first)
    if found is None or described.element != torch.float32 or gpu.standing_in() is not None:
        return found
    return found if _is_no_less_exact(found(), expected, asked) else None


def begin(args: Sequence[Any], kwargs: Mapping[str, Any], expected: torch.Tensor) -> None:
    """Begins to compile the kernels that `planned` will ask for; all tensors are fake."""
    asked = _asked(args, kwargs)
    if asked is not None and may_compute(expected):
        described = problem_for(
            asked.tensors, expected, asked.scale, is_causal=asked.is_causal,
            aligned=lambda fake: ahead.meta_of(fake).alignment,
        )  # fmt: skip
        kernels = attention.candidates(described) if described else []
        build.begin([source_of(kernel, expected.dtype, gpu.capability(expected.device)) for kernel in kernels])


@dataclass(frozen=True)
class _Asked:
    """What a call of F.scaled_dot_product_attention asks for."""

    tensors: tuple[torch.Tensor, ...]
    """Query, key, value, and the mask if there is one."""
    scale: float | None
    is_causal: bool


def _asked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Asked | None:
    """What F.scaled_dot_product_attention(*args, **kwargs) asks for.

    None if kernels of ours cannot compute that, whatever its sizes are.
    """
    given = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
    names = _PARAMETERS[: 3 if given.get("attn_mask") is None else 4]
    tensors = tuple(given[name] for name in names if isinstance(given[name], torch.Tensor))
    if given.get("dropout_p", 0.0) or len(tensors) < len(names) or not all_kinds_allowed():
        return None
    return _Asked(tensors, given.get("scale"), bool(given.get("is_causal", False)))


def _is_no_less_exact(have: torch.Tensor, torchs: torch.Tensor, asked: _Asked) -> bool:
    """Whether a result is as close to float64's as torch's is. Checked for the first head."""
    query, key, value = (tensor[:1, :1].double() for tensor in asked.tensors[:3])
    scores = *torchs.shape[:3], key.shape[2]
    mask = next((mask.expand(scores)[:1, :1] for mask in asked.tensors[3:]), None)
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    exact = F.scaled_dot_product_attention(query, key, value, mask, 0.0, asked.is_causal, scale=asked.scale)
    return exactness.is_no_less_exact(have[:1, :1], torchs[:1, :1], exact)


_aten: Final = torch.ops.aten
_FLASH: Final = _aten._scaled_dot_product_flash_attention.default
_OPERATORS: Final = {
    getattr(_aten, name).default: label
    for name, label in {
        "_scaled_dot_product_flash_attention": "flash attention",
        "_scaled_dot_product_efficient_attention": "memory-efficient attention",
        "_scaled_dot_product_cudnn_attention": "cuDNN's attention",
    }.items()
    if hasattr(_aten, name)
}
"""The operators that F.scaled_dot_product_attention chooses from. Called directly they take the CPU half as long."""


class Chosen(Protocol):
    """What computes attention that was written by hand."""

    def step(
        self, tensors: Sequence[Value], added: Value | None, scale: float, name: str, label: str
    ) -> tuple[Launch | Call, Value]:
        """The step that computes it, and the step's result.

        Args:
            tensors: query, key and value (batch, heads, rows, channels); their channels are adjacent.
            added: what is added to the scaled scores, or None.
            name: of the result.
        """


@dataclass(frozen=True)
class Torchs:
    """One of torch's attention operators, chosen for some tensors."""

    operator: Any
    strides: tuple[int, ...]
    """The strides of its first result, which is attention's."""

    def step(
        self, tensors: Sequence[Value], added: Value | None, scale: float, name: str, label: str
    ) -> tuple[Launch | Call, Value]:
        query, key, value = tensors
        if added is not None:
            strides = tuple(stride * (size > 1) for stride, size in zip(added.strides, added.shape, strict=True))
            added = dataclasses.replace(added, shape=(*query.shape[:3], key.shape[2]), strides=strides)
        shape = *query.shape[:3], value.shape[3]
        slot = Slot("made", name, shape, self.strides, query.dtype)
        found = Value(slot, 0, shape, self.strides, query.dtype, name)
        function, args, options = call_of(self.operator, tensors, added, scale)
        return Call(function, args, options, (found,), False, True, False, label), found


@dataclass(frozen=True)
class Own:
    """A kernel of ours, chosen for some tensors."""

    kernel: Kernel
    launch: build.Launch

    def step(
        self, tensors: Sequence[Value], added: Value | None, scale: float, name: str, label: str
    ) -> tuple[Launch | Call, Value]:
        shape = tensors[0].shape
        strides = _by_rows(shape)
        slot = Slot("memory", name, shape, strides, tensors[0].dtype, math.prod(shape) * tensors[0].dtype.itemsize)
        found = Value(slot, 0, shape, strides, slot.dtype, name)
        references = [(value.slot, value.offset) for value in (*tensors, *([] if added is None else [added]), found)]
        launch = events.Launch(self.launch, self.kernel.params, ())
        return Launch(launch, references, frozenset({slot}), label=f"{label}: {self.kernel.name}"), found


def _by_rows(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor (batch, heads, rows, channels) that lies as (batch, rows, heads, channels)."""
    _, heads, rows, width = shape
    return rows * heads * width, width, heads * width, 1


def call_of(
    operator: Any, tensors: Sequence[Any], added: Any, scale: float
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A call of one of torch's attention operators: (function, arguments, keyword arguments).

    Args:
        tensors: query, key, value.
        added: a tensor of the scores' shape that is added to them, or None.
    """
    more = () if operator is _FLASH else (added, False)
    return function_of(operator), (*tensors, *more), {"scale": scale}


def by_hand(
    device: torch.device, tensors: Sequence[Value], added: Value | None, scale: float, period: int = 0
) -> Chosen | None:
    """What replaces products and softmax; None if nothing is quicker and as exact.

    It is measured against the products and softmax alone, as if everything between them cost nothing.

    Args:
        tensors: query, key and value (batch, heads, rows, channels). What does not lie in rows is copied (`in_rows`),
            and the time of that counts.
        added: what is added to the scaled scores, or None.
        period: batches after which `added` repeats, which torch's operators cannot read; 0 if it does not repeat.
    """
    if not exactness.enabled() or packaged.is_unmeasured() or not all_kinds_allowed():
        return None
    metas = [
        TensorMeta(value.shape, value.strides, value.dtype, device, math.gcd(value.slot.alignment, value.offset))
        for value in (*tensors, *(() if added is None else (added,)))
    ]
    return _if_quicker(
        Problem(
            BY_HAND, (("scale", scale), ("period", period)), "acc", metas[0], None, None, tuple(metas[1:]),
            replayed=stream_capture.will_be_replayed(),
        )
    )  # fmt: skip


_refused: Final[set[tuple[Any, ...]]] = set()
"""Calls of torch's operators that raised an error. Where cuDNN's attention (torch 2.11) did, a second such call would
end the process."""


def in_rows(strides: Sequence[int]) -> bool:
    """Whether torch's operators read a query, key or value with these strides: its channels are adjacent."""
    return strides[-1] == 1


@functools.lru_cache(maxsize=256)
def _if_quicker(problem: Problem) -> Chosen | None:
    scale, period = (dict(problem.options)[name] for name in ("scale", "period"))
    scores = (*problem.x.shape[:3], problem.operands[0].shape[2])

    def rows_of(x: torch.Tensor, others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [one if in_rows(one.stride()) else one.contiguous() for one in (x, *others[:2])]

    def by(operator: Any, x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
        added = others[2].expand(scores) if len(others) > 2 else None
        if added is not None and 2 * others[2].numel() > math.prod(scores):
            added = added.clone()  # it is as large as the scores, so the time to make it counts
        function, args, options = call_of(operator, rows_of(x, others), added, scale)
        result: torch.Tensor = function(*args, **options)[0]
        return result

    def candidate(operator: Any) -> tune.Candidate:
        def run(x: torch.Tensor, weight: object, bias: object, others: Sequence[torch.Tensor]) -> torch.Tensor:
            return by(operator, x, others)

        name = _OPERATORS[operator]
        return tune.Candidate(name, name, lambda: run, always=True, library=True, is_called=True)

    def own(kernel: Kernel, capability: tuple[int, int], expected: torch.Tensor) -> tune.Candidate:
        one = candidate_of(kernel, problem, expected, capability, 1 + len(problem.operands))

        def build() -> Run:
            kernels = one.build()

            def run(x: torch.Tensor, weight: object, bias: object, others: Sequence[torch.Tensor]) -> torch.Tensor:
                x, *rows = rows_of(x, others)
                return kernels(x, None, None, [*rows, *others[2:]])

            return run

        return dataclasses.replace(one, build=build, always=True)

    def apart(x: torch.Tensor, weight: object, bias: object, others: Sequence[torch.Tensor]) -> torch.Tensor:
        query, key, value = (tensor.flatten(0, 1) for tensor in (x, *others[:2]))
        return torch.bmm(torch.bmm(query, key.transpose(1, 2)).softmax(-1), value)

    made: dict[str, Chosen] = {}
    contestants: list[tune.Candidate] = []
    try:
        with torch.cuda.device(problem.x.device), torch.no_grad():
            x, _, _, others = exactness.example(problem)
            for operator, name in _OPERATORS.items() if not period else ():
                call = operator, *((one.shape, one.stride(), one.dtype) for one in (x, *others))
                if (operator is _FLASH and len(others) > 2) or call in _refused:
                    continue
                _refused.add(call)
                with contextlib.suppress(RuntimeError, TypeError):  # not for such tensors, or not in this version
                    result = by(operator, x, others)
                    _refused.discard(call)
                    if _is_as_exact(result, x, others, scale):
                        made[name] = Torchs(operator, result.stride())
                        contestants.append(candidate(operator))
            expected = torch.empty_strided(x.shape, _by_rows(x.shape), dtype=x.dtype, device=x.device)
            for kernel in _own_kernels(rows_of(x, others), others[2:], expected, scale, period):
                capability = gpu.capability(x.device)
                with contextlib.suppress(BuildError, ToolchainError, MissingKernelError):
                    one = own(kernel, capability, expected)
                    if _is_as_exact(one.build()(x, None, None, others), x, others, scale):
                        made[kernel.name] = Own(kernel, build.load(source_of(kernel, x.dtype, capability)))
                        contestants.append(one)
            contestants.append(tune.Candidate(APART, APART, lambda: apart, always=True, library=True, is_called=True))
            return made.get(tune.draft(problem, contestants)().kernel or APART) if made else None
    except (FxfuseError, torch.cuda.OutOfMemoryError) as error:
        logger.warning("fxfuse: attention by products and softmax stays what it is: %s", error)
        return None


def _own_kernels(
    rows: Sequence[torch.Tensor], added: Sequence[torch.Tensor], expected: torch.Tensor, scale: float, period: int
) -> list[Kernel]:
    """The kernels of ours that compute attention by one launch, from these tensors alone."""
    if not may_compute(expected) or rows[2].shape[3] != expected.shape[3]:
        return []
    described = problem_for([*rows, *added], expected, scale, period)
    return [kernel for kernel in attention.candidates(described) if not kernel.workspace] if described else []


def _is_as_exact(result: torch.Tensor, query: torch.Tensor, others: Sequence[torch.Tensor], scale: float) -> bool:
    """Whether a result is as close to float64's as that of products and softmax. Checked for the first two heads."""
    key, value, *added = (tensor[:1, :2] for tensor in others)
    query, part = query[:1, :2], result[:1, :2]

    def attended(dtype: torch.dtype) -> torch.Tensor:
        scores = query.to(dtype) @ key.to(dtype).transpose(2, 3) * scale
        for bias in added:
            scores = scores + bias.to(dtype)
        return scores.softmax(-1) @ value.to(dtype)

    exact = attended(torch.float64)
    return exactness.is_no_less_exact(part, attended(query.dtype), exact)


def repeated(value: Value, steps: Sequence[Launch | Call]) -> Value | None:
    """The value whose heads were repeated, each several times in a row, to make `value`; None if there is none.

    Both have the dimensions (batch, heads, rows, channels).
    """
    copied = _copied(value, steps)
    if copied is None or copied.factor != 1.0:
        return None
    batch, heads, rows, width = value.shape
    begin, (of_batch, _, of_row, of_channel) = copied.begin, copied.strides
    group = next((head for head in range(1, heads) if copied.place_of(0, head, 0, 0) != begin), heads)
    if group == 1 or heads % group:
        return None
    strides = of_batch, copied.place_of(0, group % heads, 0, 0) - begin, of_row, of_channel
    at = coordinates(value.shape)
    if copied.read.index != dot([at[0], at[1] // group, at[2], at[3]], strides) + begin:
        return None
    return copied.source((batch, heads // group, rows, width), strides)


def as_scaled_from(value: Value, steps: Sequence[Launch | Call]) -> tuple[Value, float]:
    """What a value (batch, heads, rows, channels) was copied from, and the product of the factors on the way.

    That is the value itself, and 1, unless the last step that wrote it copied another one, scaled or not.
    """
    factor = 1.0
    while True:
        copied = _copied(value, steps)
        if copied is None or copied.read.index != dot(coordinates(value.shape), copied.strides) + copied.begin:
            return value, factor
        value, factor = copied.source(value.shape, copied.strides, value.name), factor * copied.factor


@dataclass(frozen=True)
class _Copied:
    """The source of a value that was copied."""

    read: Read
    """The read of the source for an element, by the value's coordinates."""
    factor: float
    """What the source is multiplied with."""
    shape: tuple[int, ...]
    """The value's shape."""

    def place_of(self, *at: int) -> int:
        """Where the source of the element at these coordinates lies, in elements from the beginning of its slot."""
        names = {f"c{dim}": Index((), coordinate) for dim, coordinate in enumerate(at)}
        return self.read.index.substituted(names).constant

    @property
    def begin(self) -> int:
        """Where the source of the first element lies."""
        return self.place_of(*(0 for _ in self.shape))

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides between the first two elements of each dimension; 0 for dimensions of size 1."""
        ends = [[int(dim == other and size > 1) for other in range(4)] for dim, size in enumerate(self.shape)]
        return tuple(self.place_of(*end) - self.begin for end in ends)

    def source(self, shape: tuple[int, ...], strides: tuple[int, ...], name: str | None = None) -> Value:
        dtype, slot = self.read.dtype, self.read.slot
        return Value(slot, self.begin * dtype.itemsize, shape, strides, dtype, name or slot.name)


def _copied(value: Value, steps: Sequence[Launch | Call]) -> _Copied | None:
    """The source of a value (batch, heads, rows, channels), if a copy wrote it and the source is unchanged since."""
    writers = [number for number, step in enumerate(steps) if value.slot in written_by(step)]
    copied = steps[writers[-1]].loops if writers else None
    factor = None if copied is None else _factor(copied.expression)
    if copied is None or factor is None or copied.into is not None or copied.also or len(value.shape) != 4:
        return None
    body, at = Body(), coordinates(value.shape)
    seen = inlined(body.loops(value, body.read(value, at)), {value.slot: copied})
    if len(seen.leaves) != 1 or _factor(seen.expression) != factor or not isinstance(seen.leaves[0], Read):
        return None
    read = seen.leaves[0]
    if read.where or read.dtype != value.dtype or any(read.slot in written_by(step) for step in steps[writers[-1] :]):
        return None
    if any(isinstance(atom, Element) for atom in read.index.atoms()):
        return None
    return _Copied(read, factor, value.shape)


def _factor(expression: Expr) -> float | None:
    """The number with which an expression multiplies an element; None if it computes something else."""
    match expression:
        case Operand():
            return 1.0
        case Term("mul", (Operand(), Const(number))) | Term("mul", (Const(number), Operand())):
            return float(number)
        case Term("div", (Operand(), Const(number))) if number:
            return 1 / float(number)
    return None


def all_kinds_allowed() -> bool:
    """Whether all kinds of torch's attention are enabled."""
    cuda = torch.backends.cuda
    return all((cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()))


def problem_for(
    tensors: Sequence[torch.Tensor], expected: torch.Tensor, scale: float | None, period: int = 0,
    is_causal: bool = False, aligned: Callable[[torch.Tensor], int] = alignment,
) -> attention.Problem | None:  # fmt: skip
    """The problem for our kernels; None if they do not support these tensors.

    Args:
        period: batches after which the mask repeats; 0 if it does not.
        aligned: the alignment of a tensor's address.
    """
    query, key, value, *masks = tensors
    own = (*tensors[:3], expected)
    if any(tensor.dim() != 4 or tensor.dtype != expected.dtype or tensor.stride(3) != 1 for tensor in own):
        return None
    if any(tensor.device != expected.device for tensor in tensors):
        return None
    batch, heads, queries, width = query.shape
    _, key_heads, keys, _ = key.shape
    if key.shape != (batch, key_heads, keys, width) or value.shape != key.shape or expected.shape != query.shape:
        return None
    if 0 in query.shape or 0 in key.shape or heads % key_heads:
        return None
    mask_strides = 0, 0, 0, 0
    for mask in masks:
        if mask.dtype not in (torch.bool, torch.float32, query.dtype):
            return None
        of_batch, of_head, of_query, of_key = mask.expand(period or batch, heads, queries, keys).stride()
        mask_strides = of_batch, of_head, of_query, of_key
    device = gpu.properties(query.device)
    return attention.Problem(
        batch=batch,
        key_heads=key_heads,
        group=heads // key_heads,
        queries=queries,
        keys=keys,
        width=width,
        element=query.dtype,
        mask=masks[0].dtype if masks else None,
        q=moving(query),
        k=moving(key),
        v=moving(value),
        out=moving(expected),
        mask_strides=mask_strides,
        mask_period=period,
        is_causal=is_causal,
        scale=1 / math.sqrt(width) if scale is None else scale,
        alignment=min(map(aligned, tensors[:3])),
        mask_alignment=min(map(aligned, masks), default=1),
        multiprocessors=device.multi_processor_count,
        largest_cluster=attention.largest_cluster((device.major, device.minor)),
    )


def moving(tensor: torch.Tensor) -> attention.Strides:
    """The strides of batch, head and row; 0 for dimensions of size 1."""
    batch, head, row = (stride * (size > 1) for stride, size in zip(tensor.stride()[:3], tensor.shape[:3], strict=True))
    return batch, head, row


def _library(options: tuple[tuple[str, Any], ...]) -> tune.Candidate:
    """torch's candidate. A mask of truth values is replaced by numbers, made once, as in programs (`Recorder`)."""
    named = {name: option for name, option in options if option}  # older versions know no enable_gqa
    repeats = named.pop("repeats", False) and named.pop("enable_gqa")

    def compiled() -> Run:
        numbers: list[torch.Tensor] = []

        def run(x: torch.Tensor, weight: object, bias: object, others: Sequence[torch.Tensor]) -> torch.Tensor:
            key, value, *mask = others
            if mask and mask[0].dtype == torch.bool:
                if not numbers:
                    numbers.append(torch.zeros_like(mask[0], dtype=x.dtype))
                mask = numbers
            if repeats:
                key, value = (tensor.repeat_interleave(x.shape[1] // key.shape[1], 1) for tensor in (key, value))
            return F.scaled_dot_product_attention(x, key, value, mask[0] if mask else None, **named)

        return run

    return tune.Candidate(LIBRARY, LIBRARY, compiled, always=True, library=True)
