"""What a program is made of while it is recorded: memory, the tensors in it, kernels and calls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import fx, nn

from fxfuse import events
from fxfuse.cuda.stand_in import StandIn

if TYPE_CHECKING:
    from fxfuse.program.loops import Loops


class Refused(Exception):
    """A graph or a call that no program can be recorded of; the text says why."""


class Lent(bytes):
    """An argument of a graph that says of the tensors of the call, one byte each, in whose memory results may lie once
    nothing more is read of them: nobody else has it, and nobody asks for it after the call (Guard.alone)."""


@dataclass(eq=False)
class Slot:
    """A piece of memory: of an argument or parameter, of a result of torch's, or one that kernels' results take."""

    kind: str
    """"given", "made" by torch, or "memory"."""
    name: str
    """The variable with the tensor that it begins with."""
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    nbytes: int = 0
    alignment: int = 16
    """Largest power of two, up to 16, that divides its address; in every call the same."""
    escapes: bool = False
    """Whether it lives on after the call."""
    index: int = -1
    """In the table of addresses, its arena's if it lies in one; -1 if no kernel knows it."""
    offset: int = 0
    """In its arena."""
    is_apart: bool = False
    """Whether it lies on a CPU beside a program for a GPU: only torch reads it."""
    constant: torch.Tensor | None = None
    """What it begins with, if it was made of nothing but numbers and other such memory (constants.py)."""
    first: int = -1
    last: int = -1
    """The steps that use it first and last."""

    def touch(self, step: int) -> None:
        self.first = step if self.first < 0 else self.first
        self.last = max(self.last, step)


@dataclass(eq=False)
class Value:
    """A tensor of the graph."""

    slot: Slot
    offset: int
    """In bytes from where the slot begins."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    name: str
    wanted: bool = False
    """Whether Python needs it as a tensor."""
    leaves: bool = False
    """Whether the caller gets it: a view is then to be one in torch's eyes, too."""
    viewed_by: Call | None = None
    """The call that makes it of another tensor without computing."""


@dataclass(frozen=True)
class Number:
    """What Python learns of a tensor's values at every call, and only asks questions about."""

    name: str


@dataclass(frozen=True)
class Owner:
    """Whose a storage is, while it is recorded."""

    slot: Slot
    begin: int
    """Address of the slot's first tensor."""
    low: int
    high: int
    """Addresses of the storage."""

    @staticmethod
    def of(slot: Slot, tensor: torch.Tensor) -> Owner:
        storage = tensor.untyped_storage()
        if slot.kind == "given":
            slot.alignment = alignment(tensor)  # in all calls: the guard sees to it
        else:
            slot.alignment = math.gcd(ALIGNMENT, tensor.storage_offset() * tensor.element_size())
        return Owner(slot, address(tensor), storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """The device on which they lie, but for some on a CPU; None if there are several."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        devices.discard(torch.device("cpu"))
    return next(iter(devices)) if len(devices) == 1 else None


ALIGNMENT: Final = 16
"""Bytes that kernels read at a time at most: an address that is a multiple of it is as good as any."""


def alignment(tensor: torch.Tensor) -> int:
    """The largest power of two, up to `ALIGNMENT`, that divides its address."""
    return math.gcd(ALIGNMENT, tensor.data_ptr())


def address(tensor: torch.Tensor) -> int:
    """Where a tensor begins, also one without elements, of which torch says 0."""
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()


@dataclass(eq=False)
class Launch:
    event: events.Launch
    references: list[tuple[Slot, int]]
    writes: Set[Slot] = frozenset()
    """Of these what it may write into."""
    loops: Loops | None = None
    """What it computes, if kernels of loops can, too."""
    in_place: Sequence[tuple[Slot, Slot]] = ()
    """Pairs of memory that it reads and memory that it writes, of which the second may lie where the first does."""
    targets: Sequence[Value] = ()
    """Tensors that it overwrites a part of."""
    label: str = ""
    """As `Call.label`."""


@dataclass(eq=False)
class Call:
    target: Any
    """A function, the name of a method, or a module; None if there is none, and `loops` must have a kernel."""
    args: Any
    kwargs: Any
    result: Any
    is_view: bool
    is_pure: bool
    is_method: bool = False
    label: str = ""
    """What it is, for who reads the program: "nodes of the graph: what computes them"."""
    loops: Loops | None = None
    """What it computes, if kernels of ours can."""
    draws: bool = False
    """Whether it draws random numbers."""
    alone: Loops | None = None
    """If `loops` compute all of the memory of which it overwrites a part: loops that put only that part there."""
    overwrites: bool = True
    """Whether it may write into its arguments if it is not pure."""

    @property
    def name(self) -> str:
        """Of what is called."""
        if isinstance(self.target, nn.Module):
            return type(self.target).__name__
        return str(getattr(self.target, "__name__", self.target)).removesuffix(".default")

    def values(self) -> list[Value]:
        """Those that it gets and makes."""
        return values_in((self.args, self.kwargs, self.result))


@dataclass(frozen=True)
class Step:
    """A launch or a call of a program, for who watches it run."""

    is_launch: bool
    """Whether it is a kernel of ours; else a call of torch."""
    nodes: tuple[str, ...]
    """Names of the graph's nodes that it computes, alone or with others."""
    what: str
    """The kernel or the operator."""

    @staticmethod
    def of(step: Launch | Call) -> Step:
        nodes, *what = step.label.split(": ")
        name = "kernel" if isinstance(step, Launch) else step.name
        return Step(isinstance(step, Launch), tuple(nodes.split(", ")), what[-1] if what else name)


_T = TypeVar("_T")


def _found_in(tree: Any, kind: type[_T]) -> list[_T]:
    """What is of one kind in tuples, lists, dictionaries and slices, in their order."""
    found: list[_T] = []

    def visit(item: Any) -> None:
        if isinstance(item, kind):
            found.append(item)
        elif isinstance(item, tuple | list):
            for part in item:
                visit(part)
        elif isinstance(item, dict):
            for part in item.values():
                visit(part)
        elif isinstance(item, slice):
            visit((item.start, item.stop, item.step))

    visit(tree)
    return found


def values_in(tree: Any) -> list[Value]:
    """The values in the arguments or the result of a call."""
    return _found_in(tree, Value)


def numbers_in(tree: Any) -> list[Number]:
    """The numbers that only a call knows, in the same."""
    return _found_in(tree, Number)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors that they are while it is recorded, in the same order."""
    return _found_in(tree, torch.Tensor)


DICTS: Final = (dict, fx.immutable_collections.immutable_dict)
LISTS: Final = (list, fx.immutable_collections.immutable_list)


def as_plain(item: Any) -> Any:
    """fx's own lists and dictionaries as those that the code of a graph makes."""
    if type(item) in DICTS:
        return {key: as_plain(part) for key, part in item.items()}
    if type(item) in LISTS:
        return [as_plain(part) for part in item]
    return tuple(as_plain(part) for part in item) if type(item) is tuple else item


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its numbers are those in memory, where its strides say."""
    strided = type(tensor) in PLAIN and tensor.layout is torch.strided
    return strided and not (tensor.is_neg() or tensor.is_conj() or tensor.is_nested)


PLAIN: Final = frozenset((torch.Tensor, nn.Parameter, StandIn))


def slots_of(step: Launch | Call) -> list[Slot]:
    """All memory that a step has to do with."""
    if isinstance(step, Launch):
        return [slot for slot, _ in step.references]
    return [value.slot for value in step.values()]


def read_by(step: Launch | Call) -> set[Slot]:
    """Memory that a step needs; views are made where they are needed."""
    if isinstance(step, Launch):
        return {slot for slot, _ in step.references}
    if step.is_view:
        return set()
    return {value.slot for value in values_in((step.args, step.kwargs))}


def written_by(step: Launch | Call) -> set[Slot]:
    """Memory that it may write into."""
    if isinstance(step, Launch):
        return set(step.writes)
    if step.is_view or isinstance(step.result, Number):
        return set()
    made = {value.slot for value in values_in(step.result)}
    if step.loops is not None:
        return made
    arguments = {value.slot for value in values_in((step.args, step.kwargs))}
    return made - arguments if step.is_pure or not step.overwrites else made | arguments


def functions_of(event: events.Launch) -> tuple[int, int] | None:
    """The addresses of a kernel's two functions (binding.h); None if it is no compiled one."""
    found: tuple[int, int] | None = getattr(getattr(event.function, "__self__", None), "functions", None)
    return found


def extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to behind its last."""
    if tensor.numel() == 0:
        return 0
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (span + 1) * tensor.element_size()
