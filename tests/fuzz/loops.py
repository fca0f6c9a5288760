"""Programs as on a GPU, without one: what stands between regions is merged, and torch computes the kernels' loops.

What is lost: the generated CUDA text is not run. What stays: which loops were put into which, where their elements
lie, what each launch reads and writes, and that neither other launches nor other threads write what one reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from fxfuse import build, ops
from fxfuse.cuda import loops as kernels
from fxfuse.expression import Call, Const, Expr, Operand, postorder
from fxfuse.program import loops, merge
from fxfuse.program.indices import Element, Index, Quotient, Remainder, Variable
from fxfuse.program.text import LoopsKernel
from fxfuse.program.values import Slot, Value

_Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64), ctypes.c_uint64)
_Message = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)

_known: dict[tuple[str, bytes], tuple[loops.Loops, LoopsKernel]] = {}
"""By text and arguments: kernels for which these are the same compute the same of other memory."""
_callbacks: list[Any] = []
"""What programs have the addresses of."""


@contextlib.contextmanager
def interpreted_loops() -> Iterator[None]:
    """Inside, programs for a CPU are merged as those for a GPU are, and their kernels interpreted."""
    generate = kernels.kernel

    def remembering(one: loops.Loops) -> LoopsKernel | None:
        kernel = generate(one)
        if kernel is not None:
            _known[kernel.form, kernel.params] = one, kernel
        return kernel

    with (
        mock.patch.object(kernels, "kernel", remembering),
        mock.patch.object(kernels, "source_of", lambda found: json.dumps(kernels.forms_of(found))),
        mock.patch.object(merge, "build", types.SimpleNamespace(load_each=_load_each, Source=build.Source)),
        mock.patch.object(merge, "runs_on_gpu", lambda device: True),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: (8, 0)),
    ):
        yield
    _known.clear()
    _callbacks.clear()


def _load_each(sources: Sequence[build.Source]) -> list[Any]:
    return list(map(_load, sources))


def _load(source: build.Source) -> Any:
    forms: dict[str, int] = json.loads(source.text)
    sizes = {form: next(len(params) for known, params in _known if known == form) for form in forms}
    order = [form for form, count in forms.items() for _ in range(count)]
    failed: list[BaseException] = []

    def launch(params: int, pointers: Any, _: int) -> int:
        try:
            _run(order, sizes, ctypes.string_at(params, sum(sizes[form] for form in order)), pointers)
        except BaseException as error:
            failed.append(error)
            return 1
        return 0

    function, message = _Function(launch), _Message(lambda code: repr(failed[-1]).encode())
    _callbacks.extend((function, message))
    addresses = tuple(ctypes.cast(one, ctypes.c_void_p).value for one in (function, message))
    return types.MethodType(lambda *_: None, types.SimpleNamespace(functions=addresses))


def _run(order: Sequence[str], sizes: Mapping[str, int], params: bytes, pointers: Any) -> None:
    """What a launch of kernels of these forms does, which run at a time."""
    parts = []
    at = 0
    for form in order:
        own, params = params[: sizes[form]], params[sizes[form] :]
        one, kernel = _known[form, own]
        addresses = [pointers[at + place] for place in range(len(kernel.addresses))]
        at += len(addresses)
        parts.append(_Kernel(one, kernel, addresses))
    for one in parts:
        one.compute()
    for one in parts:
        for other in parts:
            if one is not other and torch.isin(one.written(), torch.cat([other.read(), other.written()])).any():
                raise AssertionError("kernels of one launch write what others of it use")
    for one in parts:
        one.store()


_EVERYWHERE = torch.tensor(True)


class _Kernel:
    """Loops over memory at these addresses."""

    def __init__(self, one: loops.Loops, kernel: LoopsKernel, addresses: Sequence[int]) -> None:
        self._loops = one
        self._results = addresses[: len(kernel.results)]
        self._memory = dict(zip(kernel.tensors, addresses[len(kernel.results) :], strict=True))
        self._read: list[torch.Tensor] = [torch.zeros(0, dtype=torch.int64)]
        self._made: list[tuple[torch.Tensor, torch.Tensor]] = []

    def compute(self) -> None:
        """Reads and computes all that is stored."""
        shape = self._loops.output.shape
        values: dict[str, torch.Tensor] = {}
        for dim, size in enumerate(shape):
            values[f"c{dim}"] = torch.arange(size).view(-1, *[1] * (len(shape) - dim - 1))
        place = self._loops.place() - self._loops.output.offset // self._loops.output.dtype.itemsize
        places = self._index(place, values).expand(shape)
        for store, address in zip(self._loops.stores, self._results, strict=True):
            dtype = store.output.dtype
            into = self._loops.into if store.output is self._loops.output else None
            there = places if into is None else self._index(into.place, values).expand(shape)
            made = self._evaluated(store.expression, self._loops.leaves, values)
            self._made.append((address + there * dtype.itemsize, torch.as_tensor(made).expand(shape).to(dtype)))
        self._check_order()

    def _check_order(self) -> None:
        """Threads that read what the kernel overwrites read it at the places that they write."""
        if not all(loops.is_read_in_place(self._loops, output) for output in self._overwritten()):
            raise AssertionError("a kernel overwrites what other threads of it read")

    def _overwritten(self) -> list[Value]:
        """Results that lie where it reads."""
        read = {one.slot for one in self._loops.reads}
        if self._loops.into is not None and self._loops.output.slot in read:
            if not loops.is_apart_or_in_place(self._loops):
                raise AssertionError("a kernel overwrites a part of what it reads")
            read.remove(self._loops.output.slot)
        return [store.output for store in self._loops.stores if store.output.slot in read]

    def read(self) -> torch.Tensor:
        """Addresses of elements."""
        return torch.cat(self._read)

    def written(self) -> torch.Tensor:
        return torch.cat([places.flatten() for places, _ in self._made])

    def store(self) -> None:
        for places, made in self._made:
            first, size = int(places.min()), made.element_size()
            memory = (ctypes.c_char * (int(places.max()) + size - first)).from_address(first)
            torch.frombuffer(memory, dtype=made.dtype)[(places - first) // size] = made

    # ---- what is computed

    def _evaluated(self, expression: Expr, leaves: Sequence[loops.Leaf], values: Mapping[str, torch.Tensor]) -> Any:
        made: dict[Expr, Any] = {}
        for node in postorder(expression):
            match node:
                case Operand(index):
                    made[node] = self._leaf(leaves[index], values)
                case Const(number):
                    made[node] = number
                case Call(op, args):
                    numbers = op not in _OF_TENSORS
                    made[node] = _as_number(ops.row(op).reference(*_tensors((made[arg] for arg in args), numbers)))
        return made[expression]

    def _leaf(self, leaf: loops.Leaf, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        match leaf:
            case loops.Position(index):
                return self._index(index, values)
            case loops.Inside():
                return self._is_inside(leaf, values)
            case loops.Reduced(op, over, expression, leaves):
                inner = {name: value.unsqueeze(-1) for name, value in values.items()}
                terms = self._evaluated(expression, leaves, inner | {over.name: torch.arange(over.size)})
                terms = terms.expand(*terms.shape[:-1], over.size) if terms.dim() else terms.expand(over.size)
                return terms.sum(-1) if op == "sum" else terms.amax(-1)
        where = _EVERYWHERE
        for condition in leaf.where:
            where = where & self._is_inside(condition, values)
        elements = self._elements(leaf.slot, leaf.dtype, self._index(leaf.index, values, where), where)
        return _as_number(elements)

    def _is_inside(self, condition: loops.Inside, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        index = self._index(condition.index, values)
        return (index >= 0) & (index < condition.size)

    def _index(
        self, index: Index, values: Mapping[str, torch.Tensor], where: torch.Tensor = _EVERYWHERE
    ) -> torch.Tensor:
        """`where`: where what it is made of may be read."""
        total = torch.tensor(index.constant)
        for atom, coefficient in index.terms:
            match atom:
                case Variable(name):
                    value = values[name]
                case Quotient(of, by):
                    value = self._index(of, values, where) // by
                case Remainder(of, by):
                    value = self._index(of, values, where) % by
                case Element(memory, at, dtype, size, wraps):
                    value = self._elements(memory, dtype, self._index(at, values, where), where).long()
                    value = torch.where(value < 0, value + size, value) if wraps else value
            total = total + value * coefficient
        return total

    def _elements(self, slot: Slot, dtype: torch.dtype, places: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        """Elements of a piece of memory; something conspicuous where they are not to be read."""
        places, where = torch.broadcast_tensors(places, where)
        result = torch.full(places.shape, _CONSPICUOUS[dtype], dtype=dtype)
        wanted = places[where]
        if wanted.numel() == 0:
            return result
        assert int(wanted.min()) >= 0, "a kernel reads what lies before a piece of memory"
        self._read.append((self._memory[slot] + wanted * dtype.itemsize).flatten())
        extent = (int(wanted.max()) + 1) * dtype.itemsize
        memory = (ctypes.c_char * extent).from_address(self._memory[slot])
        result[where] = torch.frombuffer(memory, dtype=dtype)[wanted]
        return result


_CONSPICUOUS = dict.fromkeys((torch.float64, torch.float32, torch.float16, torch.bfloat16), torch.nan) | {
    torch.bool: True, torch.uint8: 201, torch.int8: -101, torch.int16: -20101, torch.int32: -2**30 - 1,
    torch.int64: -2**40 - 1,
}  # fmt: skip


_OF_TENSORS = ("maximum", "minimum", "clamp_min", "clamp_max")
"""Rows whose functions in torch take no numbers; a window beyond an image's border is one."""


def _tensors(items: Iterable[Any], numbers: bool) -> list[Any]:
    """Numbers beside tensors as they are, if `numbers`; others as tensors."""
    found = list(items)
    if numbers and any(isinstance(item, torch.Tensor) for item in found):
        return found
    return [torch.as_tensor(item) for item in found]


def _as_number(value: torch.Tensor) -> torch.Tensor:
    """As kernels compute with it: in float32 what has less bits, integers as those of 64."""
    if value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value if value.is_floating_point() or value.dtype is torch.bool else value.long()
