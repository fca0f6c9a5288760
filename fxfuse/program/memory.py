"""Memory planning: places results of kernels in arenas, by liveness, for the least peak of a call.

An arena is one allocation, which exists while any of its results is alive. In an arena, results that are not alive at
the same time share memory. A result that is computed in place has the memory of its operand. Where an arena and
torch's own results would together raise the peak, the arena ends, and another begins later.

Kernels that follow each other are launched together, as a list, so what the first of them reads is there until the last
one is launched. Where that raises the peak, the list ends earlier.

Lent memory (values.py) is an arena, too, after its last read. But it is freed instead where what torch allocates needs
the memory more. A result of torch's is an arena for what is computed in its place.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from fxfuse.program.values import Call, Launch, Slot, values_in

ALIGNMENT: Final = 512
"""Bytes to which the offsets of results are aligned: as torch's allocator aligns them."""
UNIT: Final = 16
"""Bytes. An arena's size is a multiple of this, and this is a multiple of every dtype's size."""
SMALL: Final = 1 << 20
"""Bytes. A peak below this is not worth a second arena."""
MOST_CUTS: Final = 32
"""The most cuts of arenas in search of the least peak."""
WORTH: Final = 0.005
"""The part of the peak that must be saved to justify a further allocation or list of launches, or giving lent memory
back. Each takes a microsecond or two."""
FITTING: Final = 0.8
"""The part of a piece of lent memory that a result must fill to be placed there, if loose ones keep too much alive."""
LIMITS: Final = (0.0, 0.3, 0.6)
"""The peaks for which plans with more arenas and lists are tried: 0 is what is alive at once, 1 the peak with few."""
MOST_ORDERS: Final = 8
"""The most orders in which blocks are placed, from one first order."""
NEAR: Final = 6
"""How many of the arenas that end last another one may be joined with."""


@dataclass(eq=False)
class Block:
    """A range of memory for one result, or for several, each computed in place of the one before."""

    slots: list[Slot]
    first: int
    """The number of the first step that uses it."""
    last: int
    """The number of the last step that uses it."""
    nbytes: int
    offset: int = 0
    """In bytes, in its arena."""

    @staticmethod
    def of(slot: Slot) -> Block:
        return Block([slot], slot.first, slot.last, slot.nbytes)


@dataclass(eq=False)
class Arena:
    """A piece of memory that is allocated before the first step that uses it, and freed after the last."""

    blocks: list[Block]
    begin: int = 0
    """The first moment (`_Timeline`) at which it exists."""
    end: int = 0
    """The last moment at which it exists."""
    size: int = 0
    """In bytes: a multiple of every dtype's size. Before its blocks are placed, what is alive in it at once."""
    name: str = ""
    index: int = -1
    """Its position in the table of addresses."""
    typed: set[str] = field(default_factory=set)
    """The dtypes for which the program has a variable with the arena as a tensor of that dtype."""
    lender: Slot | None = None
    """The lent slot, or torch's result, whose memory it is; None if the program allocates the arena."""

    @staticmethod
    def of(blocks: list[Block], moments: Sequence[int]) -> Arena:
        """The smallest arena for these blocks, which are not placed yet."""
        arena = Arena(blocks, size=_rounded(_alive_at_once(blocks), UNIT))
        arena.begin, arena.end = moments[arena.first], moments[arena.last]
        return arena

    @property
    def first(self) -> int:
        """The number of the first step that uses it."""
        return min(block.first for block in self.blocks)

    @property
    def last(self) -> int:
        """The number of the last step that uses it."""
        return max(block.last for block in self.blocks)

    def place(self) -> None:
        self.size = place(self.blocks)


@dataclass(frozen=True)
class Plan:
    """Where results lie."""

    arenas: list[Arena]
    ends: frozenset[int] = frozenset()
    """The steps before which a list of launches ends, although a launch comes before them."""


class _Timeline:
    """What a program needs beside its arenas, by moment.

    A moment is a call of torch, or a list of launches: all of its memory is there at the same time.
    """

    def __init__(self, steps: Sequence[Launch | Call], deaths: Mapping[Slot, int], lent: Mapping[Slot, int]) -> None:
        """
        Args:
            deaths: by lent slot, and by result of torch's that others are computed in the place of, the number of the
                last step that uses its memory.
            lent: the sizes of lent slots in bytes.
        """
        self._steps = steps
        end = len(steps) - 1
        self._spans = [
            (slot.first, end if slot.escapes else deaths.get(slot, slot.last), nbytes)
            for slot, nbytes in _allocated_by_torch(steps).items()
        ]
        """(first step, last step, bytes) of torch's and the caller's results, and of lent memory."""
        self._spans += [(0, last, lent[slot]) for slot, last in deaths.items() if slot in lent] if steps else []
        self.joints = frozenset(
            number + 1 for number, pair in enumerate(itertools.pairwise(steps)) if all(map(_is_launch, pair))
        )
        """The steps before which a list of launches may end."""

    def moments(self, ends: Set[int]) -> list[int]:
        """By step: the moment at which it runs, if lists of launches end before these steps."""
        new = (number not in self.joints or number in ends for number in range(1, len(self._steps)))
        return list(itertools.accumulate(new, initial=0))[: len(self._steps)]

    def others(self, moments: Sequence[int]) -> list[int]:
        """By moment: the bytes of results that torch allocated, or that the caller gets, and of lent memory."""
        changes = [0] * (moments[-1] + 2 if moments else 1)
        for first, last, nbytes in self._spans:
            changes[moments[first]] += nbytes
            changes[moments[last] + 1] -= nbytes
        return list(itertools.accumulate(changes))[:-1]

    def ends_within(self, arenas: Iterable[Arena], limit: float) -> frozenset[int]:
        """The fewest ends of lists with which no moment needs more than `limit` bytes with these arenas.

        Where a single step needs more, it is alone.
        """
        count = len(self._steps)
        begins, changes = [0] * count, [0] * (count + 1)
        for first, last, nbytes in (*self._spans, *((arena.first, arena.last, arena.size) for arena in arenas)):
            begins[first] += nbytes
            changes[first] += nbytes
            changes[last + 1] -= nbytes
        alive = list(itertools.accumulate(changes))
        ends, now = set[int](), 0
        for number, more in enumerate(begins):
            is_joined = number in self.joints and now + more <= limit
            now = now + more if is_joined else alive[number]
            if not is_joined:
                ends.add(number)
        return self.joints & ends


def arenas_of(
    steps: Sequence[Launch | Call], slots: Iterable[Slot], lent: Mapping[Slot, int] = MappingProxyType({}),
    frees: bool = False,
) -> Plan:  # fmt: skip
    """Arenas for the results `slots`, and where lists of launches end for them. Sets the offsets of these slots.

    Args:
        lent: given memory that results may take after its last use, and its sizes in bytes.
        frees: whether lent memory may be freed. If so, results take less of it, or none, where that lowers the peak.
    """
    lent = {slot: nbytes // UNIT * UNIT for slot, nbytes in lent.items()}
    lenders = {**lent, **_overwritten(steps)}
    slots = list(slots)
    found, ends, lowest = list[Arena](), frozenset[int](), math.inf
    for fit in (0.0, FITTING, math.inf) if lent and frees else (0.0,):
        borrowed, blocks = _borrowed(blocks_of(steps, slots, lenders), lenders, len(steps), fit)
        timeline = _Timeline(steps, _deaths(lent, borrowed), lent)
        plan = _planned(blocks, timeline)
        peak = _peak(plan, timeline)
        if peak < lowest * (1 - WORTH):
            found, ends, lowest = [*plan.arenas, *borrowed], plan.ends, peak
    for number, arena in enumerate(found):
        arena.name = f"arena{number}"
        for block in arena.blocks:
            for slot in block.slots:
                slot.offset = block.offset
    return Plan(found, ends)


def _planned(blocks: Sequence[Block], timeline: _Timeline) -> Plan:
    """Arenas for blocks. Lists of launches end early where that is worth it."""
    whole = _with_few_arenas(_cut_where_it_saves(blocks, timeline), timeline)
    peak = _placed_peak(whole, timeline)
    each = timeline.moments(timeline.joints)
    least = max(SMALL, _least(blocks, timeline.others(each), each))
    if peak <= least * (1 + WORTH):
        return whole
    limits = [least + part * (peak - least) for part in LIMITS]
    plans = [whole, *(_within(blocks, timeline, limit) for limit in limits)]
    costs = [_placed_peak(plan, timeline) * (1 + WORTH * (len(plan.arenas) + len(plan.ends))) for plan in plans]
    chosen = plans[costs.index(min(costs))]
    _placed_peak(chosen, timeline)  # again: the other plans have moved its blocks
    return chosen


def _placed_peak(plan: Plan, timeline: _Timeline) -> int:
    """Places all blocks of a plan. Returns its peak."""
    for arena in plan.arenas:
        arena.place()
    return _peak(plan, timeline)


def _peak(plan: Plan, timeline: _Timeline) -> int:
    """The most bytes that are there at once, at least `SMALL`."""
    return max([SMALL, *_at_once(plan.arenas, timeline.others(timeline.moments(plan.ends)))])


def _within(blocks: Sequence[Block], timeline: _Timeline, limit: float) -> Plan:
    """Arenas for blocks, and ends of lists: few of both, but so many that at most `limit` bytes are needed, or nearly.

    At first each launch is a list of its own, and each block an arena. Blocks join arenas before them where the limit
    still allows this, and then so do lists.
    """
    moments = timeline.moments(timeline.joints)
    alone = sorted((Arena.of([block], moments) for block in blocks), key=lambda arena: arena.begin)
    total = _at_once(alone, timeline.others(moments))
    limit = max([limit, *total])
    growing: list[_Growing] = []
    for arena in alone:
        (block,) = arena.blocks
        total[arena.begin : arena.end + 1] = [nbytes - arena.size for nbytes in total[arena.begin : arena.end + 1]]
        nearest = heapq.nlargest(NEAR, growing, key=lambda other: other.end)
        found = next((other for other in nearest if other.takes(block, arena.end, total, limit)), None)
        if found is None:
            found = _Growing(arena.begin, len(moments))
            growing.append(found)
        found.add(block, arena.end, total)
    ends = timeline.ends_within([Arena.of(one.blocks, moments) for one in growing], limit)
    moments = timeline.moments(ends)
    return Plan([Arena.of(one.blocks, moments) for one in growing], ends)


class _Growing:
    """An arena to which blocks are added, in the order of their first moments."""

    def __init__(self, begin: int, steps: int) -> None:
        self.blocks: list[Block] = []
        self.begin, self.end = begin, begin - 1
        """The first and the last moment at which it exists."""
        self._size = 0
        self._alive = [0] * steps
        """By step: the bytes that are alive in it."""

    def takes(self, block: Block, end: int, total: Sequence[int], limit: float) -> bool:
        """Whether there are at most `limit` bytes at once, with `total` by moment beside it, if it has the block, too.

        Args:
            end: the block's last moment.
            total: by moment, the bytes of everything, without the block.
        """
        size = self._size_with(block)
        longer = max(total[self.end + 1 : end + 1], default=0) + size
        return longer <= limit and max(total[self.begin : self.end + 1]) + size - self._size <= limit

    def add(self, block: Block, end: int, total: list[int]) -> None:
        """Adds a block, and to `total` what the arena now needs more. The arguments are those of `takes`."""
        size = self._size_with(block)
        for moment in range(self.begin, max(self.end, end) + 1):
            total[moment] += size - (self._size if moment <= self.end else 0)
        for step in range(block.first, block.last + 1):
            self._alive[step] += _rounded(block.nbytes, ALIGNMENT)
        self.blocks.append(block)
        self.end, self._size = max(self.end, end), size

    def _size_with(self, block: Block) -> int:
        return max(self._size, max(self._alive[block.first : block.last + 1]) + _rounded(block.nbytes, ALIGNMENT))


def _cut_where_it_saves(blocks: Sequence[Block], timeline: _Timeline) -> list[Arena]:
    """Arenas for blocks: the fewest of those that were tried whose peak is the least, or nearly. No list ends early."""
    moments = timeline.moments(frozenset())
    others = timeline.others(moments)
    ways = [[Arena.of(part, moments) for part in _groups(blocks, moments)]]
    while len(ways) <= MOST_CUTS and (cut := _cut(ways[-1], others, moments)) is not None:
        ways.append(cut)
    peaks = [max(_at_once(arenas, others), default=0) for arenas in ways]
    enough = max(SMALL, min(peaks) * (1 + WORTH))
    return ways[next(number for number, peak in enumerate(peaks) if peak <= enough)]


def _least(blocks: Iterable[Block], others: Sequence[int], moments: Sequence[int]) -> int:
    """The bytes that are alive at once, at most: no arenas can have a lower peak."""
    changes = [0] * (len(others) + 1)
    for block in blocks:
        changes[moments[block.first]] += block.nbytes
        changes[moments[block.last] + 1] -= block.nbytes
    return max(map(operator.add, itertools.accumulate(changes), others), default=0)


def side_by_side(slots: Iterable[Slot], steps: int) -> Arena:
    """One allocation for results that leave a program together, one behind the other. Sets the offsets of these slots.

    Args:
        steps: how many the program has. The results live beyond the last one.
    """
    blocks = [Block([slot], slot.first, steps, slot.nbytes) for slot in slots]
    size = 0
    for block in blocks:
        block.offset = block.slots[0].offset = size
        size += _rounded(block.nbytes, ALIGNMENT)
    return Arena(blocks, begin=0, end=0, size=size, name="kept")


def _borrowed(
    blocks: Iterable[Block], lent: Mapping[Slot, int], steps: int, fit: float
) -> tuple[list[Arena], list[Block]]:
    """Places blocks in lent memory: the largest block first, each in the smallest piece of memory that has room.

    In torch's results there is only what is computed in their place: they would be freed sooner without other blocks.
    Returns the arenas that got blocks, and the blocks that found no room.

    Args:
        fit: the part of a piece that a block must fill, if it is not computed in the piece's own place.
    """
    left: list[Block] = []
    arenas: list[Arena] = []
    for block in blocks:
        lender = next((slot for slot in block.slots if slot in lent), None)
        if lender is None:
            left.append(block)
        else:
            arenas.append(Arena([block], block.first, steps, lent[lender], lender=lender))
    arenas.sort(key=lambda arena: arena.size)
    given = [arena for arena in arenas if arena.lender is not None and arena.lender.kind == "given"]
    rest: list[Block] = []
    for block in sorted(left, key=lambda block: (-block.nbytes, block.first)):
        for arena in (arena for arena in given if block.nbytes >= fit * arena.size):
            offset = _free(block, [(other.offset, other) for other in arena.blocks if _meet(block, other)])
            if offset + block.nbytes <= arena.size:
                block.offset = offset
                arena.blocks.append(block)
                break
        else:
            rest.append(block)
    return [arena for arena in arenas if len(arena.blocks) > 1 or len(arena.blocks[0].slots) > 1], rest


def _deaths(lent: Iterable[Slot], arenas: Iterable[Arena]) -> dict[Slot, int]:
    """By lent slot, and by lender of an arena: the number of the last step that uses its memory. 0 if none does."""
    deaths = {slot: max(slot.last, 0) for slot in lent}
    deaths.update((arena.lender, arena.last) for arena in arenas if arena.lender is not None)
    return deaths


def releases(
    steps: Sequence[Launch | Call], arenas: Iterable[Arena], lent: Mapping[Slot, int]
) -> dict[int, list[Slot]]:
    """By step: the lent memory that is to be freed before the step, because nothing uses it any more.

    Freeing takes time and ends a list of launches. So dead memory is freed only where keeping it would raise the peak.
    """
    everywhere = range(len(steps))
    dies = _deaths(lent, arenas)
    total = _Timeline(steps, dies, lent).others(everywhere)
    for arena in arenas:
        if arena.lender is None:
            for step in range(min(block.first for block in arena.blocks), arena.last + 1):
                total[step] += arena.size
    most = max([SMALL, *total]) * (1 + WORTH)
    found: dict[int, list[Slot]] = {}
    dead: list[Slot] = []
    by_death: dict[int, list[Slot]] = {}
    for slot in lent:
        by_death.setdefault(dies[slot], []).append(slot)
    for step in everywhere:
        nbytes = sum(lent[slot] for slot in dead)
        if nbytes >= SMALL and total[step] + nbytes > most:
            found[step], dead = dead, []
        dead += by_death.get(step, ())
    return found


def _meet(one: Block, other: Block) -> bool:
    """Whether two blocks are alive at the same time."""
    return one.first <= other.last and other.first <= one.last


def _cut(arenas: Sequence[Arena], others: Sequence[int], moments: Sequence[int]) -> list[Arena] | None:
    """The same arenas, but one is cut into up to three: the largest that can be cut, at the moment of the peak.

    One part ends before that moment, one holds the blocks that are alive at it, and one begins after it. None if all
    blocks of the arenas that exist at that moment are alive at it.
    """
    total = _at_once(arenas, others)
    moment = max(range(len(total)), key=total.__getitem__, default=-1)
    there = [arena for arena in arenas if arena.begin <= moment <= arena.end]
    for largest in sorted(there, key=lambda arena: -arena.size):
        parts: list[list[Block]] = [[], [], []]
        for block in largest.blocks:
            parts[(moments[block.last] >= moment) + (moments[block.first] > moment)].append(block)
        if len(parts[1]) < len(largest.blocks):
            cut = [Arena.of(part, moments) for part in parts if part]
            return sorted([*(arena for arena in arenas if arena is not largest), *cut], key=lambda arena: arena.begin)
    return None


def _with_few_arenas(arenas: Iterable[Arena], timeline: _Timeline) -> Plan:
    """Fewer arenas: each is joined with one that begins before it, unless this raises the peak. No list ends early."""
    moments = timeline.moments(frozenset())
    alone = [Arena.of(arena.blocks, moments) for arena in arenas]
    total = _at_once(alone, timeline.others(moments))
    peak, nothing = max([SMALL, *total]), [0] * len(total)
    joined: list[Arena] = []
    for arena in sorted(alone, key=lambda arena: arena.begin):
        for other in sorted(joined, key=lambda other: -other.end)[:NEAR]:
            both = Arena.of([*other.blocks, *arena.blocks], moments)
            with_both = _at_once([both], list(map(operator.sub, total, _at_once([arena, other], nothing))))
            if max(with_both) <= peak:
                joined[joined.index(other)], total = both, with_both
                break
        else:
            joined.append(arena)
    return Plan(joined)


def _at_once(arenas: Iterable[Arena], others: Sequence[int]) -> list[int]:
    """By moment: the bytes of all arenas and of `others` together."""
    changes = [0] * (len(others) + 1)
    for arena in arenas:
        changes[arena.begin] += arena.size
        changes[arena.end + 1] -= arena.size
    return list(map(operator.add, itertools.accumulate(changes), others))


def blocks_of(steps: Sequence[Launch | Call], slots: Iterable[Slot], lent: Mapping[Slot, int]) -> list[Block]:
    """A block for each slot. Two slots share one where a kernel reads one for the last time and may write in place."""
    blocks = {slot: Block.of(slot) for slot in slots}
    for slot, nbytes in lent.items():
        blocks[slot] = Block([slot], 0 if slot.kind == "given" else slot.first, slot.last, nbytes)
    for number, read, written in _in_place(steps):
        before, after = blocks.get(read), blocks.get(written)
        if before is None or after is None or (before.last, after.first) != (number, number):
            continue
        if before is not after and before.nbytes == after.nbytes:
            before.slots += after.slots
            before.last = after.last
            blocks.update(dict.fromkeys(after.slots, before))
    return list(dict.fromkeys(blocks.values()))


def _in_place(steps: Iterable[Launch | Call]) -> Iterator[tuple[int, Slot, Slot]]:
    """(step, slot that its kernel reads, slot that it writes) where the two may share memory (`Launch.in_place`)."""
    for number, step in enumerate(steps):
        if isinstance(step, Launch):
            yield from ((number, read, written) for read, written in step.in_place)


def _overwritten(steps: Sequence[Launch | Call]) -> dict[Slot, int]:
    """The sizes in bytes of torch's results that a kernel may overwrite with its own: it is the last to read them."""
    sizes = _allocated_by_torch(steps)
    return {
        read: sizes[read]
        for number, read, _ in _in_place(steps)
        if read in sizes and read.is_own and not read.escapes and read.last == number and read.alignment == UNIT
    }


def place(blocks: Sequence[Block]) -> int:
    """Gives each block an offset, so that blocks that are alive at the same time do not overlap.

    Blocks get the lowest free offset, one after the other. Those that then reach beyond what is alive at once are next
    time placed before the others ("squeaky wheel optimisation", Joslin and Clements, 1999), from each of two first
    orders. In practice the result is the least. Returns the size in bytes, a multiple of every dtype's size.
    """
    least, beside = _alive_at_once(blocks), _beside(blocks)
    best: tuple[int, dict[Block, int]] | None = None
    for first in (lambda block: (-block.nbytes, block.first)), (lambda block: (-block.last, -block.nbytes)):
        order = sorted(blocks, key=first)
        for _ in range(MOST_ORDERS):
            size, offsets = _placed(order, beside)
            if best is None or size < best[0]:
                best = size, offsets
            before, order = order, sorted(order, key=lambda block: offsets[block] + block.nbytes <= least)
            if order == before:
                break
        if best is not None and best[0] <= least:
            break
    size, offsets = best or (0, {})
    for block in blocks:
        block.offset = offsets[block]
    return _rounded(size, UNIT)


def _beside(blocks: Iterable[Block]) -> dict[Block, list[Block]]:
    """For each block, the others that are alive at the same time."""
    found: dict[Block, list[Block]] = {}
    alive: list[Block] = []
    for block in sorted(blocks, key=lambda block: block.first):
        alive = [other for other in alive if other.last >= block.first]
        found[block] = list(alive)
        for other in alive:
            found[other].append(block)
        alive.append(block)
    return found


def _rounded(nbytes: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-nbytes // unit) * unit


def _alive_at_once(blocks: Iterable[Block]) -> int:
    """The most bytes of blocks that are alive at the same time, each rounded up to `ALIGNMENT`."""
    changes: dict[int, int] = {}
    for block in blocks:
        nbytes = _rounded(block.nbytes, ALIGNMENT)
        changes[block.first] = changes.get(block.first, 0) + nbytes
        changes[block.last + 1] = changes.get(block.last + 1, 0) - nbytes
    return max(itertools.accumulate(changes[step] for step in sorted(changes)), default=0)


def _placed(order: Iterable[Block], beside: Mapping[Block, Iterable[Block]]) -> tuple[int, dict[Block, int]]:
    """The size in bytes and the offsets of blocks that are placed in that order.

    Args:
        beside: by block, the others that are alive at the same time.
    """
    offsets: dict[Block, int] = {}
    size = 0
    for block in order:
        offset = _free(block, [(offsets[other], other) for other in beside[block] if other in offsets])
        offsets[block] = offset
        size = max(size, offset + block.nbytes)
    return size, offsets


def _free(block: Block, others: Iterable[tuple[int, Block]]) -> int:
    """The lowest free offset for a block, given the (offset, block) of all others alive at the same time."""
    offset = 0
    for begin, other in sorted(others, key=operator.itemgetter(0)):
        if offset + block.nbytes <= begin:
            break
        offset = max(offset, _rounded(begin + other.nbytes, ALIGNMENT))
    return offset


def _is_launch(step: Launch | Call) -> bool:
    return isinstance(step, Launch)


def _groups(blocks: Sequence[Block], moments: Sequence[int]) -> list[list[Block]]:
    """Groups of blocks whose lifetimes do not overlap: no group is alive at a moment when another is."""
    groups: list[list[Block]] = []
    until = -1
    for block in sorted(blocks, key=lambda block: block.first):
        if moments[block.first] > until:
            groups.append([])
        groups[-1].append(block)
        until = max(until, moments[block.last])
    return groups


def _allocated_by_torch(steps: Sequence[Launch | Call]) -> dict[Slot, int]:
    """The sizes in bytes of results that torch allocated, or that the caller gets."""
    sizes: dict[Slot, int] = {}
    for step in steps:
        if isinstance(step, Launch):
            sizes.update((slot, slot.nbytes) for slot, _ in step.references if slot.kind == "memory" and slot.escapes)
        else:
            for value in values_in(step.result):
                nbytes = value.offset + math.prod(value.shape) * value.dtype.itemsize
                if value.slot.kind == "made" and not value.slot.is_apart:
                    sizes[value.slot] = max(sizes.get(value.slot, 0), nbytes)
    return sizes
