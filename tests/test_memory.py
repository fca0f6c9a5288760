"""Where results of kernels lie: nothing shares memory with what lives at the same time, and there is little of it."""

import itertools

import numpy as np
import pytest
import torch

from fxfuse import expression
from fxfuse.program import loops, memory, merge, values


def test_results_that_leave_together_lie_side_by_side():
    slots = [memory.Slot("memory", f"v{number}", nbytes=nbytes) for number, nbytes in enumerate((4, 512, 513, 8))]
    arena = memory.side_by_side(slots, 9)
    assert [slot.offset for slot in slots] == [0, 512, 1024, 2048] and arena.size == 2560
    assert arena.last == 9, "it is there when the results are returned"


def test_no_two_values_that_live_at_once_share_memory():
    torch.manual_seed(0)
    for _ in range(200):
        blocks = []
        for _ in range(20):
            first, life = torch.randint(20, (2,)).tolist()
            blocks.append(memory.Block([], first, first + life, int(torch.randint(1, 5000, ()))))
        size = memory.place(blocks)
        for a in blocks:
            assert a.offset % memory.ALIGNMENT == 0 and a.offset + a.nbytes <= size
            for b in blocks:
                if a is not b and a.first <= b.last and b.first <= a.last:
                    assert a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
        assert size <= sum(-(-block.nbytes // memory.ALIGNMENT) * memory.ALIGNMENT for block in blocks)


def drawn_steps(generator):
    """Kernels and calls of torch, with sizes in MB, and the slots of the kernels' results.

    Kernels may write where one of their results lies that nothing reads any more, or one of torch's.
    """
    count = 30
    steps, slots, torchs = [], [], {}
    for number in range(count):
        last = min(count - 1, number + int(generator.integers(1, 8)))
        nbytes = int(generator.integers(1, 64)) << 18
        if generator.random() < 0.4:
            slot = values.Slot("made", f"m{number}", first=number, last=last, is_own=bool(generator.random() < 0.7))
            made = values.Value(slot, 0, (nbytes,), (1,), torch.uint8, slot.name)
            steps.append(values.Call(None, (), {}, made, False, True))
            torchs[slot] = nbytes
            continue
        slot = values.Slot("memory", f"v{number}", nbytes=nbytes, first=number, last=last)
        dying = [one for one in (*slots, *torchs) if one.last == number]
        generator.shuffle(dying)
        for one in dying[:1]:
            slot.nbytes = torchs.get(one, one.nbytes)
        steps.append(values.Launch(None, [(slot, 0)], in_place=[(one, slot) for one in dying]))
        slots.append(slot)
    return steps, slots


def at_once(steps, plan, lent=None):
    """By moment, the bytes of a plan's arenas and of everything else; and each step's moment.

    Lent memory is freed when nothing uses it any more.
    """
    timeline = memory._Timeline(steps, memory._deaths(lent or {}, plan.arenas), lent or {})
    moments = timeline.moments(plan.ends)
    return memory._at_once([arena for arena in plan.arenas if arena.lender is None], timeline.others(moments)), moments


def alive(steps, slots):
    """By step, the bytes of results that are alive."""
    torchs = memory._overwritten(steps)
    blocks = memory.blocks_of(steps, slots, torchs)
    in_torchs = {block.slots[0]: block.last for block in blocks if block.slots[0] in torchs}
    found = memory._Timeline(steps, in_torchs, {}).others(range(len(steps)))
    for block in blocks:
        for step in range(block.first, block.last + 1) if block.slots[0] not in torchs else ():
            found[step] += block.nbytes
    return found


@pytest.mark.parametrize("seed", range(40))
def test_arenas_are_there_while_something_lives_in_them(seed):
    steps, slots = drawn_steps(np.random.default_rng(seed))
    plan = memory.arenas_of(steps, slots)
    placed = [slot for arena in plan.arenas for block in arena.blocks for slot in block.slots if slot.kind == "memory"]
    assert sorted(slot.name for slot in placed) == sorted(slot.name for slot in slots)
    arenas = [arena for arena in plan.arenas if arena.lender is None]
    blocks = [block for arena in arenas for block in arena.blocks]
    total, moments = at_once(steps, plan)
    for end in plan.ends:
        assert isinstance(steps[end - 1], values.Launch) and isinstance(steps[end], values.Launch)
    for before, after in itertools.pairwise(range(len(steps))):
        together = isinstance(steps[before], values.Launch) and isinstance(steps[after], values.Launch)
        assert (moments[before] == moments[after]) == (together and after not in plan.ends)
    for arena in arenas:
        for number, block in enumerate(arena.blocks):
            assert arena.begin <= moments[block.first] and moments[block.last] <= arena.end
            assert block.offset + block.nbytes <= arena.size
            assert all(slot.offset == block.offset for slot in block.slots)
            for other in arena.blocks[:number]:
                assert (
                    block.first > other.last
                    or other.first > block.last
                    or block.offset >= other.offset + other.nbytes
                    or other.offset >= block.offset + block.nbytes
                )
    # nothing is needed at once but what is alive, and what is between that
    others = memory._Timeline(steps, memory._deaths({}, plan.arenas), {}).others(moments)
    assert max(alive(steps, slots)) <= max(total) <= memory.place(blocks) + max(others)


def with_lent(generator, steps):
    """Given memory that some of these steps read, and how many bytes."""
    found = {}
    for number in range(12):
        slot = values.Slot("given", f"g{number}", index=number)
        for step in sorted(generator.integers(0, len(steps), 2).tolist()):
            slot.touch(step)
        found[slot] = (int(generator.integers(1, 96)) << 18) + int(generator.integers(0, 2)) * 4
        last = steps[slot.last]
        if isinstance(last, values.Launch):
            (written,) = (one for one, _ in last.references if one.kind == "memory")
            last.in_place = [*last.in_place, (slot, written)]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_results_lie_in_lent_memory_after_its_last_use_only(seed):
    generator = np.random.default_rng(seed)
    steps, slots = drawn_steps(generator)
    lent = with_lent(generator, steps)
    alone = memory.arenas_of(steps, slots).arenas
    arenas = memory.arenas_of(steps, slots, lent).arenas
    borrowed = [arena for arena in arenas if arena.lender in lent]
    placed = [slot for arena in arenas for block in arena.blocks for slot in block.slots if slot.kind == "memory"]
    assert borrowed and sorted(slot.name for slot in placed) == sorted(slot.name for slot in slots)
    for arena in borrowed:
        assert arena.size <= lent[arena.lender]
        first, *others = arena.blocks
        assert first.slots[0] is arena.lender and first.offset == 0
        for slot in first.slots[1:]:  # each in the place of the one before
            assert slot.offset == 0 and slot.nbytes == arena.size
        lives = [(0, arena.size, 0, arena.lender.last)]
        lives += [(0, arena.size, slot.first, slot.last) for slot in first.slots[1:]]
        lives += [(block.offset, block.nbytes, block.first, block.last) for block in others]
        for number, (offset, nbytes, begin, _) in enumerate(lives):
            assert offset + nbytes <= arena.size
            for at, size, since, until in lives[:number]:
                in_place = (offset, nbytes) == (at, size) and begin >= until  # as one kernel computes it
                apart = begin > until or since > lives[number][3] or offset >= at + size or at >= offset + nbytes
                assert apart or in_place
    nothing = [0] * len(steps)
    own, alone = ([arena for arena in some if arena.lender is None] for some in (arenas, alone))
    assert max(memory._at_once(own, nothing)) <= max(memory._at_once(alone, nothing))


@pytest.mark.parametrize("seed", range(40))
def test_in_torchs_results_lies_only_what_is_computed_in_their_place(seed):
    generator = np.random.default_rng(seed)
    steps, slots = drawn_steps(generator)
    sizes = memory._allocated_by_torch(steps)
    pairs = {(number, pair) for number, step in enumerate(steps) for pair in getattr(step, "in_place", ())}
    arenas = memory.arenas_of(steps, slots, with_lent(generator, steps) if seed % 2 else {}).arenas
    torchs = [arena for arena in arenas if arena.lender is not None and arena.lender.kind == "made"]
    assert torchs
    for arena in torchs:
        (block,) = arena.blocks
        assert arena.lender is block.slots[0] and arena.lender.is_own
        assert all(slot.offset == 0 and slot.nbytes == sizes[arena.lender] for slot in block.slots[1:])
        for pair in itertools.pairwise(block.slots):
            assert pair[0].last == pair[1].first and (pair[1].first, pair) in pairs


@pytest.mark.parametrize("seed", range(40))
def test_lent_memory_is_let_go_of_after_its_last_use_and_where_that_matters(seed):
    generator = np.random.default_rng(seed)
    steps, slots = drawn_steps(generator)
    lent = with_lent(generator, steps)
    arenas = memory.arenas_of(steps, slots, lent).arenas
    released = memory.releases(steps, arenas, lent)
    when = {slot: step for step, some in released.items() for slot in some}
    assert len(when) == sum(map(len, released.values()))
    last = {slot: slot.last for slot in lent} | {arena.lender: arena.last for arena in arenas if arena.lender}
    assert all(step > last[slot] for slot, step in when.items())

    def total(gone):
        """By step, the bytes of all memory, if lent memory is gone from some step on."""
        of_torchs = [arena for arena in arenas if arena.lender is not None and arena.lender not in lent]
        here = memory._Timeline(steps, memory._deaths({}, of_torchs), {}).others(range(len(steps)))
        for arena in arenas:
            for step in range(min(block.first for block in arena.blocks), arena.last + 1):
                here[step] += 0 if arena.lender else arena.size
        for slot, nbytes in lent.items():
            for step in range(min(gone.get(slot, len(steps)), len(steps))):
                here[step] += nbytes
        return here

    at_once = max(total({slot: step + 1 for slot, step in last.items()}))
    assert max(total(when)) <= at_once * (1 + memory.WORTH) + memory.SMALL
    if max(total({})) <= at_once:
        assert not released


@pytest.mark.parametrize("seed", range(40))
def test_what_lives_long_costs_no_memory_beside_torchs(seed):
    """Small results that live through many layers, of which each has large ones of its own, beside torch's."""
    generator = np.random.default_rng(seed)
    steps, slots, count = [], [], 60
    for number in range(count):
        lives_long = generator.random() < 0.25
        last = min(count - 1, number + int(generator.integers(1, 40 if lives_long else 5)))
        nbytes = int(generator.integers(1, 8 if lives_long else 64)) << 18
        if generator.random() < 0.4:
            slot = values.Slot("made", f"m{number}", first=number, last=min(last, number + 2))
            made = values.Value(slot, 0, (nbytes,), (1,), torch.uint8, slot.name)
            steps.append(values.Call(None, (), {}, made, False, True))
        else:
            slots.append(values.Slot("memory", f"v{number}", nbytes=nbytes, first=number, last=last))
            steps.append(values.Launch(None, [(slots[-1], 0)]))
    total, _ = at_once(steps, memory.arenas_of(steps, slots))
    assert max(total) <= 1.05 * max(alive(steps, slots))


def test_memory_that_torch_needs_meanwhile_is_let_go_of():
    """A large result of a kernel, and then one of torch's: their memory is not there at once."""
    slots = [values.Slot("memory", f"v{at}", nbytes=64 << 20, first=at, last=at + 1) for at in (0, 4)]
    small = values.Slot("memory", "small", nbytes=1 << 20, first=1, last=4)
    steps = [values.Launch(None, [(slots[0], 0)]), values.Launch(None, [(small, 0)])]
    for at in (2, 3):
        slot = values.Slot("made", f"m{at}", first=at, last=at)
        made = values.Value(slot, 0, (48 << 20,), (1,), torch.uint8, slot.name)
        steps.append(values.Call(None, (), {}, made, False, True))
    steps += [values.Launch(None, [(slots[1], 0), (small, 0)])] * 2
    plan = memory.arenas_of(steps, [*slots, small])
    names = [[slot.name for block in arena.blocks for slot in block.slots] for arena in plan.arenas]
    assert sorted(map(sorted, names)) == [["small"], ["v0"], ["v4"]] and not plan.ends
    assert max(at_once(steps, plan)[0]) <= 66 << 20


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4])
def test_large_programs_are_planned_with_few_attempts(monkeypatch, share):
    """A training step may have a thousand results. Each is placed some dozen times at most, however hard they fit."""
    generator = np.random.default_rng(0)
    steps, slots, count, placed = [], [], 1000, []
    for number in range(count):
        last = min(count - 1, number + int(generator.integers(1, 12)))
        slot = values.Slot("memory", f"v{number}", nbytes=int(generator.integers(1, 64)) << 18, first=number, last=last)
        if generator.random() < share:
            slot.kind = "made"
            made = values.Value(slot, 0, (slot.nbytes,), (1,), torch.uint8, slot.name)
            steps.append(values.Call(None, (), {}, made, False, True))
        else:
            slots.append(slot)
            steps.append(values.Launch(None, [(slot, 0)]))
    place_in_order = memory._placed
    monkeypatch.setattr(
        memory, "_placed", lambda order, beside: placed.append(len(order)) or place_in_order(order, beside)
    )
    memory.arenas_of(steps, slots)
    assert count * (1 - share) * 0.9 < sum(placed) <= 6 * memory.MOST_ORDERS * count


def test_results_of_changing_sizes_take_what_is_alive_at_once():
    """The beginning of a MobileNet: each result is read once, and two of them are alive at a time."""
    sizes = [10, 13, 13, 7, 39, 10, 7, 21, 21, 4, 12]
    blocks = [memory.Block([], step, step + 1, size << 20) for step, size in enumerate(sizes)]
    assert memory.place(blocks) == max(map(sum, itertools.pairwise(sizes))) << 20


def chain(sizes, by_torch):
    """Steps of which each reads the result of the one before. Sizes are in MB; torch computes some of the results."""
    steps, slots = [], []
    for number, size in enumerate(sizes):
        is_made = number in by_torch
        slot = values.Slot("made" if is_made else "memory", f"v{number}", nbytes=size << 20, first=number)
        slot.last = min(number + 1, len(sizes) - 1)
        made = values.Value(slot, 0, (size << 20,), (1,), torch.uint8, slot.name)
        steps.append(values.Call(None, (), {}, made, False, True) if is_made else values.Launch(None, [(slot, 0)]))
        slots += [] if is_made else [slot]
    return steps, slots


def test_a_list_of_launches_ends_where_a_result_of_torchs_dies():
    """What torch computed is read by the first launch of a list, of which later ones need as much memory."""
    steps, slots = chain([2, 64, 8, 32, 32, 8, 2], by_torch={1})
    plan = memory.arenas_of(steps, slots)
    assert plan.ends == {3}
    assert max(at_once(steps, plan)[0]) == max(alive(steps, slots)) == 72 << 20


def test_a_list_of_launches_ends_before_a_large_result_of_the_call():
    steps, slots = chain([8, 64, 64, 8, 64], by_torch=())
    slots.pop().escapes = True
    plan = memory.arenas_of(steps, slots)
    assert len(plan.ends) <= 3 and max(at_once(steps, plan)[0]) == 128 << 20


def test_lists_of_launches_end_only_where_it_is_worth_a_call():
    """Ten layers, in each of which attention of torch's has a small result: 6 % of the memory is 20 lists too many."""
    steps, slots = chain([4, 32, 32, 4] * 10, by_torch=range(3, 40, 4))
    plan = memory.arenas_of(steps, slots)
    assert not plan.ends and len(plan.arenas) == 1
    assert max(alive(steps, slots)) < max(at_once(steps, plan)[0])


def test_memory_that_is_needed_when_lent_memory_is_gone_is_not_there_before():
    """A small result while everything is lent, and one that is larger than anything that was lent, after all of it."""
    lent = {values.Slot("given", f"g{at}", index=at, first=at, last=at): 32 << 20 for at in range(4)}
    small = values.Slot("memory", "small", nbytes=1 << 20, first=0, last=1)
    large = values.Slot("memory", "large", nbytes=64 << 20, first=5, last=6)
    steps = [values.Launch(None, [(slot, 0)]) for slot in (*lent, small, large, large)]
    steps[4] = values.Call(None, (), {}, None, False, True)
    plan = memory.arenas_of(steps, [small, large], lent)
    arenas = [arena for arena in plan.arenas if arena.lender is None]
    moments = memory._Timeline(steps, {}, {}).moments(plan.ends)
    assert [(arena.begin, arena.size) for arena in arenas] == [(moments[0], 1 << 20), (moments[5], 64 << 20)]


def test_lent_memory_is_freed_where_torch_needs_more_than_the_results_do():
    """As in attention's backward: results that are small, but live long, after what is lent; then torch's own."""
    lent = {values.Slot("given", f"g{at}", index=at, first=at, last=at): 32 << 20 for at in range(4)}
    small = [values.Slot("memory", f"v{at}", nbytes=20 << 20, first=4 + at, last=12) for at in range(4)]
    made = [values.Slot("made", f"m{at}", first=8 + at, last=12) for at in range(4)]
    steps = [values.Launch(None, [(slot, 0)]) for slot in (*lent, *small)]
    for slot in made:
        result = values.Value(slot, 0, (64 << 20,), (1,), torch.uint8, slot.name)
        steps.append(values.Call(None, (), {}, result, False, True))
    steps.append(values.Call(None, (), {}, None, False, True))
    stays = memory.arenas_of(steps, small, lent)
    assert [arena.lender is not None for arena in stays.arenas] == [True] * 4
    assert max(at_once(steps, stays, lent)[0]) == (4 * 32 + 4 * 64) << 20
    freed = memory.arenas_of(steps, small, lent, frees=True)
    assert [arena.lender for arena in freed.arenas] == [None]
    assert max(at_once(steps, freed, lent)[0]) == (4 * 20 + 4 * 64) << 20


@pytest.mark.parametrize("seed", range(40))
def test_freeing_lent_memory_never_raises_the_peak(seed):
    generator = np.random.default_rng(seed)
    steps, slots = drawn_steps(generator)
    lent = {slot: nbytes // memory.UNIT * memory.UNIT for slot, nbytes in with_lent(generator, steps).items()}
    plans = [memory.arenas_of(steps, slots, lent, frees) for frees in (False, True)]
    stays, freed = (max(at_once(steps, plan, lent)[0]) for plan in plans)
    assert freed <= stays


def loops_reading(value, output, at=lambda index: index):
    body = loops.Body()
    index = [at(one) for one in loops.coordinates(output.shape)]
    return body.loops(output, expression.Call("exp", (body.read(value, index),)))


def test_what_lies_in_the_place_of_what_is_read():
    def value(name, dtype=torch.float32):
        return values.Value(values.Slot("memory", name, dtype=dtype), 0, (4, 4), (4, 1), dtype, name)

    x, y, z = map(value, "xyz")
    assert merge._in_place([loops_reading(x, y)]) == [(x.slot, y.slot)]
    # what another thread reads, what another part of the launch reads, and elements of another size
    assert merge._in_place([loops_reading(x, y, lambda index: index * -1 + 3)]) == []
    assert merge._in_place([loops_reading(x, y), loops_reading(x, z)]) == []
    assert merge._in_place([loops_reading(value("x", torch.bfloat16), y)]) == []
