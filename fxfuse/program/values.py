"""The parts of a program while it is recorded: pieces of memory, tensors in them, kernel launches, calls of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import fx, nn

from fxfuse import events
from fxfuse.cuda.stand_in import StandIn

if TYPE_CHECKING:
    from fxfuse.program.loops import Loops


class Refused(Exception):
    """A graph or a call cannot be recorded as a program; the text says why."""


class Lent(bytes):
    """An argument of a graph: for each tensor of the call one byte, which says whether its memory is lent.

    After the last read of lent memory, the program may place results there. Such memory has no other owner, and nobody
    reads it after the call (`Guard.alone`). The program may also free it, unless the byte is STAYS.
    """

    STAYS: Final = 2

    @property
    def stays(self) -> bool:
        """Whether lent memory stays allocated: CUDA graphs use it again."""
        return self.STAYS in self


@dataclass(eq=False)
class Slot:
    """A piece of memory: an argument's or parameter's, that of a result of torch's, or one for results of kernels."""

    kind: str
    """"given" (an argument or parameter), "made" (allocated by torch), "memory" (for results of kernels: allocated by
    the program), or "constant" (filled while the call was recorded)."""
    name: str
    """The variable, in the program's code, that holds the tensor at the slot's beginning."""
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    nbytes: int = 0
    alignment: int = 16
    """The largest power of two, up to 16, that divides its address; the same in every call."""
    escapes: bool = False
    """Whether it outlives the call."""
    index: int = -1
    """Its position in the table of addresses: its arena's, if it lies in one. -1 if no kernel uses it."""
    offset: int = 0
    """In bytes, in its arena."""
    is_apart: bool = False
    """Whether it lies on a CPU while the program is for a GPU. Then only torch reads it."""
    is_own: bool = False
    """Whether nothing but the program holds it, although torch made it: it is the result of an operator of torch's."""
    constant: torch.Tensor | None = None
    """The tensor at its beginning, if it was computed from nothing but numbers and other constants (constants.py)."""
    first: int = -1
    """The number of the first step that uses it."""
    last: int = -1
    """The number of the last step that uses it."""

    def touch(self, step: int) -> None:
        self.first = step if self.first < 0 else self.first
        self.last = max(self.last, step)


@dataclass(eq=False)
class Value:
    """A tensor of the graph: a view of a slot."""

    slot: Slot
    offset: int
    """In bytes from the slot's beginning."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    name: str
    wanted: bool = False
    """Whether Python needs a tensor object for it."""
    leaves: bool = False
    """Whether the caller gets it. Then a view must be a view for autograd, too, unless it is alone."""
    alone: bool = False
    """Whether the caller gets it, and nothing else in its memory, which is new."""
    viewed_by: Call | None = None
    """The call that makes it as a view of another tensor."""


@dataclass(frozen=True)
class Number:
    """A number that Python reads from a tensor's values at every call, and only tests."""

    name: str


@dataclass(frozen=True)
class Owner:
    """The slot that a storage belongs to, while a call is recorded."""

    slot: Slot
    begin: int
    """Address of the slot's first tensor."""
    low: int
    """The address at which the storage begins."""
    high: int
    """The address just behind the storage."""

    @staticmethod
    def of(slot: Slot, tensor: torch.Tensor) -> Owner:
        storage = tensor.untyped_storage()
        if slot.kind == "given":
            slot.alignment = alignment(tensor)  # the same in all calls: the guard checks it
        else:
            slot.alignment = math.gcd(ALIGNMENT, tensor.storage_offset() * tensor.element_size())
        return Owner(slot, address(tensor), storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """The device of all tensors, except that some may lie on a CPU; None if there are several others, or no tensors."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        devices.discard(torch.device("cpu"))
    return next(iter(devices)) if len(devices) == 1 else None


ALIGNMENT: Final = 16
"""The most bytes that a kernel reads at once. No kernel gains from an address with a larger alignment."""


def alignment(tensor: torch.Tensor) -> int:
    """The largest power of two, up to `ALIGNMENT`, that divides a tensor's address."""
    return math.gcd(ALIGNMENT, tensor.data_ptr())


def address(tensor: torch.Tensor) -> int:
    """The address of a tensor's first element. Also for a tensor without elements, whose `data_ptr` is 0."""
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()


@dataclass(eq=False)
class Launch:
    """A step that launches a kernel of ours."""

    event: events.Launch
    references: list[tuple[Slot, int]]
    """The addresses that the kernel gets: each a slot, and the offset in it in bytes."""
    writes: Set[Slot] = frozenset()
    """The slots among the references that it may write into."""
    loops: Loops | None = None
    """What it computes, if kernels of loops could compute it, too."""
    in_place: Sequence[tuple[Slot, Slot]] = ()
    """Pairs (slot that it reads, slot that it writes) that may share memory."""
    targets: Sequence[Value] = ()
    """Existing tensors of which it overwrites a part."""
    label: str = ""
    """As `Call.label`."""


@dataclass(eq=False)
class Call:
    """A step that calls torch from Python."""

    target: Any
    """A function, the name of a method, or a module. None if torch cannot compute it: `loops` must have a kernel."""
    args: Any
    kwargs: Any
    result: Any
    is_view: bool
    is_pure: bool
    is_method: bool = False
    label: str = ""
    """A description for readers of the program: "nodes of the graph: what computes them"."""
    loops: Loops | None = None
    """What it computes, if kernels of loops can compute it."""
    draws: bool = False
    """Whether it draws random numbers."""
    alone: Loops | None = None
    """Where the call overwrites a part of memory and `loops` compute the whole: loops that write that part alone."""
    overwrites: bool = True
    """Whether the call may write into its arguments. Counts only where it is not pure."""

    @property
    def name(self) -> str:
        """The name of what is called."""
        if isinstance(self.target, nn.Module):
            return type(self.target).__name__
        return str(getattr(self.target, "__name__", self.target)).removesuffix(".default")

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product of torch's, which can write into existing memory (`out=`)."""
        return any(self.target is product for product in _PRODUCTS)

    def values(self) -> list[Value]:
        """Its arguments and results."""
        return values_in((self.args, self.kwargs, self.result))


_PRODUCTS: Final = [getattr(torch._C._VariableFunctions, name) for name in ("mm", "addmm", "bmm", "baddbmm")]


@dataclass(frozen=True)
class Step:
    """A description of a launch or a call, for those who watch a program run."""

    is_launch: bool
    """Whether it launches a kernel of ours; otherwise it calls torch."""
    nodes: tuple[str, ...]
    """Names of the graph's nodes that it computes, alone or together with other steps."""
    what: str
    """The name of the kernel or the operator."""

    @staticmethod
    def of(step: Launch | Call) -> Step:
        nodes, *what = step.label.split(": ")
        name = "kernel" if isinstance(step, Launch) else step.name
        return Step(isinstance(step, Launch), tuple(nodes.split(", ")), what[-1] if what else name)


_T = TypeVar("_T")


def _found_in(tree: Any, kind: type[_T]) -> Iterator[_T]:
    """All instances of `kind` in nested tuples, lists, dictionaries and slices, in their order."""
    if isinstance(tree, kind):
        yield tree
        return
    parts: Iterable[Any] = ()
    if isinstance(tree, tuple | list):
        parts = tree
    elif isinstance(tree, dict):
        parts = tree.values()
    elif isinstance(tree, slice):
        parts = tree.start, tree.stop, tree.step
    for part in parts:
        yield from _found_in(part, kind)


def values_in(tree: Any) -> list[Value]:
    """The values in the arguments or the result of a call."""
    return list(_found_in(tree, Value))


def numbers_in(tree: Any) -> list[Number]:
    """The numbers in the arguments or the result of a call. Their values are known only at a call."""
    return list(_found_in(tree, Number))


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in the arguments or the result of a recorded call, in the same order as `values_in`."""
    return list(_found_in(tree, torch.Tensor))


DICTS: Final = (dict, fx.immutable_collections.immutable_dict)
LISTS: Final = (list, fx.immutable_collections.immutable_list)


def as_plain(item: Any) -> Any:
    """fx's immutable lists and dictionaries converted to plain ones, such as the code of a graph makes."""
    if type(item) in DICTS:
        return {key: as_plain(part) for key, part in item.items()}
    if type(item) in LISTS:
        return [as_plain(part) for part in item]
    return tuple(as_plain(part) for part in item) if type(item) is tuple else item


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are exactly those in memory at its strides: no lazy negation, no zeros without
    memory (gradients of complex numbers have these), no subclass.

    A tensor of torch.func's is not plain, even if a buffer has kept it beyond its transformation.
    """
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
        return False
    is_other = tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor() or tensor.is_nested
    return not (is_other or torch._C._functorch.is_functorch_wrapped_tensor(tensor))


PLAIN: Final = frozenset((torch.Tensor, nn.Parameter, StandIn))


def slots_of(step: Launch | Call) -> list[Slot]:
    """All memory that a step reads or writes."""
    if isinstance(step, Launch):
        return [slot for slot, _ in step.references]
    return [value.slot for value in step.values()]


def read_by(step: Launch | Call) -> set[Slot]:
    """Memory that a step reads. A view reads none: views are made where they are needed."""
    if isinstance(step, Launch):
        return {slot for slot, _ in step.references}
    if step.is_view:
        return set()
    return {value.slot for value in values_in((step.args, step.kwargs))}


def written_by(step: Launch | Call) -> set[Slot]:
    """Memory that a step may write into."""
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
    """The addresses of a kernel's two functions (binding.h); None if the kernel is not a compiled one."""
    found: tuple[int, int] | None = getattr(getattr(event.function, "__self__", None), "functions", None)
    return found


def extent(tensor: torch.Tensor) -> int:
    """Bytes from the beginning of a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (span + 1) * tensor.element_size()
