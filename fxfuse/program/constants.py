"""Constants: values that a program's steps make of nothing but numbers (positions, masks) are made once.

They are kept as they were when the call was recorded. A value is not kept if it depends on a tensor of a call or a
model, is drawn at random, is returned to the caller, or is overwritten by other steps. Values that merge.py has inlined
into kernels are computed in the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fxfuse.program.values import Call, Launch, Slot, read_by, slots_of, values_in, written_by

MOST_BYTES: Final = 16 << 20
"""The most bytes of constants that a program keeps, smallest first."""


def without_constants(steps: Sequence[Launch | Call], output: Any) -> tuple[list[Launch | Call], list[Slot]]:
    """The steps that must run at every call, and the slots of the constants that these read."""
    found = _constants(steps, output)
    left = [step for step in steps if not _is_constant(step, found)]
    needed = {slot for step in left for slot in slots_of(step)} & found
    return left, sorted(needed, key=lambda slot: slot.name)


def constants_first(steps: Sequence[Launch | Call], output: Any) -> list[Launch | Call]:
    """The steps, those that make constants before the others.

    Steps between which no constant is made can share a kernel: the tables of relative positions, say, by which three
    tensors are indexed.
    """
    found = _constants(steps, output)
    return sorted(steps, key=lambda step: not _is_constant(step, found))


def _constants(steps: Sequence[Launch | Call], output: Any) -> set[Slot]:
    """The slots of the constants that are kept."""
    leaving = {value.slot for value in values_in(output)}
    found = {slot for step in steps for slot in written_by(step) if slot.constant is not None} - leaving
    found -= set(_beyond(found, MOST_BYTES))
    while True:
        constant = [_is_constant(step, found) for step in steps]
        other = _changed(steps, constant) & found
        if not other:
            return found
        found -= other


def _is_constant(step: Launch | Call, found: set[Slot]) -> bool:
    written = written_by(step)
    draws = isinstance(step, Call) and step.draws
    return bool(written) and not draws and (written | read_by(step)) <= found


def _changed(steps: Sequence[Launch | Call], constant: Sequence[bool]) -> set[Slot]:
    """The slots that non-constant steps write, or read before a later constant step writes them."""
    changed: set[Slot] = set()
    read: set[Slot] = set()
    for step, is_constant in zip(steps, constant, strict=True):
        if is_constant:
            changed |= written_by(step) & read
        else:
            changed |= written_by(step)
            read |= read_by(step)
    return changed


def _beyond(slots: set[Slot], most: int) -> list[Slot]:
    """The slots for which there is no room in `most` bytes, if the smallest are kept first."""
    beyond = []
    for slot in sorted(slots, key=_nbytes):
        most -= _nbytes(slot)
        if most < 0:
            beyond.append(slot)
    return beyond


def _nbytes(slot: Slot) -> int:
    assert slot.constant is not None
    return int(slot.constant.untyped_storage().nbytes())
