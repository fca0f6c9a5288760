"""Guards: one call into C (guard.h) compares a call's tensors with those of an earlier call, and reads addresses."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from fxfuse import build
from fxfuse.errors import UnsupportedError

_COMPARE, _NOTE, _COMPARE_TABLES, _MARK_ALONE, _READ_VERSIONS, _TELL_APART = range(6)
"""Tasks, as in guard.h."""

SOURCE: Final = build.Source('#include "guard.h"\n', None, "the guard of programs", calls_torch=True)


class Guard:
    """The state of some tensors and tables, to compare later ones with.

    It holds each tensor's type, dtype, device, sizes, strides, alignment, requires_grad and dispatch keys, the thread's
    dispatch keys, and the objects in the tables.
    """

    def __init__(
        self, tensors: list[torch.Tensor], tables: Sequence[dict[Any, Any]] = (), alignment: int = 1
    ) -> None:  # fmt: skip
        """Notes the present state.

        Args:
            alignment: a power of two. The largest power of two up to it that divides an address must stay the same.

        Raises ToolchainError, BuildError or UnsupportedError if the state cannot be read.
        """
        self._tables = list(tables)
        self._members: list[Any] = []
        self.note_tables()
        self._offset, self._call = _offset(), build.load(SOURCE)
        self._words = array("Q", bytes(8 * (2 + sum(5 + 2 * tensor.dim() for tensor in tensors))))
        self._count = len(tensors)
        self.addresses = array("Q", bytes(8 * len(tensors)))
        self._rest = self._words.buffer_info()[0], alignment, id(self._tables), id(self._members)
        try:
            self._call(b"", id(tensors), _NOTE, self._offset, self.addresses.buffer_info()[0], *self._rest)
        except RuntimeError as error:
            raise UnsupportedError(str(error)) from None

    def tables_hold(self) -> bool:
        """Whether the tables hold the noted objects."""
        try:
            self._call(b"", 0, _COMPARE_TABLES, id(self._tables), id(self._members))
        except RuntimeError:
            return False
        return True

    def note_tables(self) -> None:
        """Notes the objects that the tables hold now. Called if objects were replaced by others that are as good."""
        self._members[:] = [member for table in self._tables for member in table.values()]

    def holds(self, tensors: list[torch.Tensor], addresses: array[int]) -> bool:
        """Whether `tensors` are like the noted ones, and the tables hold the same objects.

        If so, the tensors' addresses are written to the beginning of `addresses`.
        """
        if len(tensors) != self._count:
            return False
        try:
            self._call(b"", id(tensors), _COMPARE, self._offset, addresses.buffer_info()[0], *self._rest)
        except RuntimeError:
            return False
        return True

    def alone(self, tensors: list[torch.Tensor]) -> bytes:
        """For each of these plain tensors, 1 if no tensor but these uses its memory, else 0."""
        marks = array("B", bytes(len(tensors)))
        self._call(b"", id(tensors), _MARK_ALONE, self._offset, marks.buffer_info()[0])
        return marks.tobytes()

    def are_apart(self, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()) -> bool:
        """Whether none of the plain `tensors` shares memory with another of them, or with one of `others`."""
        both = [*tensors, *others]
        try:
            self._call(b"", id(both), _TELL_APART, self._offset, len(tensors))
        except RuntimeError:
            return False
        return True

    def versions(self, tensors: list[torch.Tensor]) -> array[int]:
        """How often each of these plain tensors was changed in place (`_version`). 0 for inference tensors."""
        versions = array("Q", bytes(8 * len(tensors)))
        self._call(b"", id(tensors), _READ_VERSIONS, self._offset, versions.buffer_info()[0])
        return versions


def beginning(tensor: torch.Tensor) -> int:
    """The address at which a tensor's storage begins.

    The storage itself is not asked: torch would make a Python object for it, which would be one more owner of the
    memory. Memory with two owners is not lent.
    """
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()


@functools.cache
def _offset() -> int:
    """The offset, in a tensor's Python object, of the pointer to its C++ object."""
    word = ctypes.sizeof(ctypes.c_void_p)
    found = [
        {at for at in range(word, torch.Tensor.__basicsize__, word) if _word_at(id(tensor) + at) == tensor._cdata}
        for tensor in (torch.zeros(1), nn.Parameter(torch.zeros(2)))
    ]
    places = found[0] & found[1]
    if len(places) != 1:
        raise UnsupportedError("this version of torch keeps its tensors elsewhere")
    return places.pop()


def _word_at(address: int) -> int | None:
    return ctypes.c_void_p.from_address(address).value
