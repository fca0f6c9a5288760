"""How the threads of a GPU share rows: their number, and what they hold in registers or stage in shared memory.

cuda/loops.py writes the kernels. Nothing here needs a GPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fxfuse.cuda.codegen import MOVED_TYPES
from fxfuse.expression import Call, Expr, Operand, postorder
from fxfuse.problem import RESULT_DTYPES
from fxfuse.program.indices import Variable, variable
from fxfuse.program.loops import (
    INTEGER,
    SECTOR,
    Inside,
    Leaf,
    Loops,
    Read,
    Reduced,
    height_of,
    kind_of_element,
    substituted,
)
from fxfuse.program.text import ACCESS, ROW, RUN, Held, Text, in_runs, vector_of

ALONG: Final = "along"
"""The variable along a row of the result."""
THREADS: Final = 128
"""Of a block, if no kernel of its launch needs more: in rows, threads of a block wait for each other."""
COLUMN_THREADS: Final = 256
"""Of a block for rows that are adjacent in memory: so many read longer pieces of it. Other kernels may be in a launch
with these."""
HELD_WORDS: Final = 32
"""Most registers in which a thread holds elements of a row between loops."""
WARP: Final = 32
LINE: Final = 128
"""Bytes that a multiprocessor reads or writes in a cycle, if they are adjacent."""
BUSY: Final = 2**18
"""Threads that keep a GPU busy, 2048 on each of 128 multiprocessors: more of them read no faster."""
ISSUED: Final = 2**14
"""Instructions of threads that such a GPU begins in a cycle, 128 on each of 128 multiprocessors."""
MOVED: Final = 2**11
"""Bytes that it reads or writes in a cycle, a little more than an A100 and a little less than an H200."""
REGISTERS: Final = 2**16
"""Of a multiprocessor."""
MOST_THREADS: Final = 1024
"""Most threads of a block."""
STAGED_ELEMENTS: Final = 64
"""Most elements of a staged row that a thread has: it holds them in registers."""
STAGED_RUN: Final = 2
"""Most elements that threads would read at once from memory, if a row is to be staged instead."""
STAGED_BYTES: Final = 32 << 10
"""Most shared memory of a block that stages its rows."""
STAGED_LEAST: Final = BUSY // 8
"""Fewest threads for which staging pays: with fewer, the time of one row matters."""


def groups_of(reductions: Sequence[Reduced]) -> list[list[Reduced]]:
    """The reductions in groups. One loop computes a group, because no reduction in it depends on another.

    A group stands after those that it depends on.
    """
    found: dict[Variable, list[Reduced]] = {}
    for row in reductions:
        found.setdefault(row.over, []).append(row)
    return [found[over] for over in sorted(found, key=lambda over: height_of(over))]


def vector_of_rows(together: Sequence[Reduced], run: int = 0) -> int:
    """How many elements of a row are read at once by the loop that computes these reductions.

    Args:
        run: how many elements of the row are contiguous; 0 if all are.
    """
    dtypes = (leaf.dtype for row in together for leaf in row.leaves if isinstance(leaf, Read))
    return math.gcd(ACCESS // max((dtype.itemsize for dtype in dtypes), default=1), together[0].over.size, run)


@dataclass(frozen=True)
class Work:
    """What a row of contiguous elements takes, apart from how threads share it."""

    reductions: int
    instructions: int
    """For an element."""
    accesses: Sequence[int]
    """Bytes of an element of each tensor that is read or written along the row."""
    moved: int
    """Bytes that are read and written for an element, without those that all rows share: these are in caches."""


def work_of(loops: Loops, reductions: Sequence[Reduced], leaves: Sequence[Leaf], rows: int, length: int) -> Work:
    """What each of the `rows` rows of `loops` takes. `length`: of a row of the result."""
    found = _along_rows(reductions, leaves, length)
    reads = dict.fromkeys(Read(read.slot, read.dtype, read.index) for read in found)
    along = [read for read in reads if read.index.depends_on(RUN)]
    results = [store.output.dtype.itemsize for store in loops.stores] if length > 1 else []
    own = [read.dtype.itemsize for read in along if rows == 1 or read.index.depends_on(ROW)]
    accesses = [*(read.dtype.itemsize for read in along), *results]
    return Work(len(reductions), _instructions(loops), accesses, sum(own) + sum(results))


def _along_rows(reductions: Sequence[Reduced], leaves: Sequence[Leaf], length: int) -> list[Read]:
    """All reads. In each, RUN is the variable of a loop over a row, whose elements are runs of one."""
    over = [(row.over, row.leaves) for row in reductions]
    return [
        read
        for variable_, each in (*over, (Variable(ALONG, length), leaves))
        for leaf in each
        if isinstance(read := substituted(leaf, {variable_.name: variable(RUN, variable_.size)}), Read)
    ]


def lanes_of(rows: int, runs: int, vector: int, work: Work, words: int = 0) -> int:
    """How many threads share a row of contiguous elements, a power of two; 0 if no number of them can hold a row.

    Many threads shorten the time of one row, and read memory in longer pieces. Few threads leave less to combine. All
    are estimated in cycles of the GPU.

    Args:
        runs: of a row.
        vector: elements of a run.
        words: registers in which a thread holds a run; 0 if none are held.
    """
    widest = vector * max(work.accesses, default=1)

    def cost(lanes: int) -> float:
        # 28 cycles a shuffle, about 60 instructions before and after the row, or cycles until all warps have met
        turns, levels, warps = -(-runs // lanes), min(lanes, WARP).bit_length() - 1, lanes // WARP
        of_warps = 60 + 8 * warps if warps > 1 else 0  # threads wait for each other
        latency = turns * vector * 2 * work.instructions + work.reductions * (levels * 28 + of_warps)
        lines = sum(max(vector * nbytes * WARP / LINE, WARP / lanes) for nbytes in work.accesses)  # of a warp's turn
        each = 60 + turns * (work.instructions * vector + 4 * lines) + work.reductions * (2 * levels + of_warps / 2)
        piece = lanes * widest  # if it does not begin at a sector, one sector more is moved
        moved = rows * runs * vector * work.moved * (1 + (SECTOR / piece if runs * widest % SECTOR else 0))
        issued, read = each * rows * lanes / ISSUED, moved / MOVED
        blocks = max(1, REGISTERS // (max(lanes, THREADS) * (28 + turns * words)))  # of a multiprocessor at a time
        return latency + max(issued, read) + min(issued, read) / blocks  # one block computes while others read

    most = min(MOST_THREADS, 1 << (runs - 1).bit_length())
    numbers = (1 << exponent for exponent in range(most.bit_length()))
    return min((lanes for lanes in numbers if -(-runs // lanes) * words <= HELD_WORDS), key=cost, default=0)


def _instructions(loops: Loops) -> int:
    """About how many instructions an element of a row takes, without those that its row needs once."""
    expressions = [(row.expression, row.leaves) for row in loops.reductions]
    expressions += [(store.expression, loops.leaves) for store in loops.stores]
    count = 4
    for expression, leaves in expressions:
        varying = set[Expr]()
        for node in postorder(expression):
            if isinstance(node, Operand) and isinstance(leaves[node.index], Read):
                varying.add(node)
            elif isinstance(node, Call) and not varying.isdisjoint(node.args):
                varying.add(node)
                count += 2 if node.op in QUICK else 10
    return count


QUICK: Final = frozenset({"add", "sub", "mul", "neg", "abs", "square", "maximum", "minimum", "where", "float32"})
"""Operations of one or two instructions."""


def layout(rows: int, longest: int, nbytes: int) -> tuple[int, int]:
    """(columns, lanes) for rows that are adjacent in memory: numbers of threads for adjacent rows, and for each row.

    There are no more lanes than keep a GPU busy.

    Args:
        rows: number of rows; the adjacent rows of one thread count as one.
        longest: elements of a row.
        nbytes: bytes that a thread reads at once.
    """
    wanted, most, threads = -(-BUSY // rows), max(1, longest // 2), COLUMN_THREADS
    lanes = min(_power_of_two(wanted), _power_of_two(most), threads // max(1, SECTOR // nbytes))
    return (threads if lanes * WARP >= threads else WARP) // lanes, lanes


def _power_of_two(number: int) -> int:
    """The largest power of two that is at most `number`."""
    return 1 << (number.bit_length() - 1)


def holding(
    loops: Loops, reductions: Sequence[Reduced], leaves: Sequence[Leaf], rows: int, length: int, run: int,
    staged: Staged | None,
) -> Held | None:  # fmt: skip
    """The reads that several loops over a row share, if a thread's registers can hold them between loops; else None.

    Args:
        run: how many elements of a row are contiguous.
    """
    size, output = reductions[0].over.size, loops.output
    if not 0 < size <= length or any(row.over.size != size for row in reductions):
        return None
    in_order = groups_of(reductions)
    vector = 1 if staged else math.gcd(vector_of(output, run), *map(vector_of_rows, in_order))
    within = Inside(variable(ALONG, length), size)
    readers, also = Counter[Read](), dict[Read, Read]()
    for together in in_order:
        at = in_runs(together[0].over.name, size, vector)
        # in the order of the leaves, not of a set: a text that differs between processes would be compiled again
        leaves_ = (leaf for row in together for leaf in row.leaves)
        reads = (read for leaf in leaves_ if isinstance(read := substituted(leaf, at), Read))
        readers.update(list(dict.fromkeys(reads)))
    for leaf in leaves:
        if isinstance(leaf, Read) and (size == length or within in leaf.where):
            # if the result is longer than the row, `of_row` has the row's variable, for which `within` always holds
            where = tuple(one for one in leaf.where if one != within)
            alike = Read(leaf.slot, leaf.dtype, leaf.index, where)
            of_row = substituted(substituted(alike, {ALONG: variable(ALONG, size)}), in_runs(ALONG, size, vector))
            assert isinstance(of_row, Read)
            as_read = substituted(leaf, in_runs(ALONG, length, vector))
            assert isinstance(as_read, Read)
            also[as_read] = of_row
    readers.update(list(dict.fromkeys(also.values())))
    shared = [read for read, count in readers.items() if count > 1]
    work = work_of(loops, reductions, leaves, rows, length)

    def lanes_for(reads: Sequence[Read]) -> int:
        words = vector * sum(2 if kind_of_element(read.dtype) in (INTEGER, "double") else 1 for read in reads)
        return lanes_of(rows, size // vector, vector, work, words) if staged is None else staged.lanes

    lanes, early = lanes_for(shared), list[Read]()
    if not shared or not lanes:
        return None
    if rows * lanes <= BUSY // 4 and staged is None:  # the time of one row matters, so no read waits for a reduction
        early = [read for read in also.values() if read not in shared and read.index.depends_on(RUN)]
        with_early = lanes_for([*shared, *early])
        early = early if with_early else []
        shared, lanes = [*shared, *early], with_early or lanes
    turns = -(-size // (vector * lanes))
    names = {read: f"held{number}" for number, read in enumerate(shared)}
    variables = {names[read]: kind_of_element(read.dtype) for read in shared}
    names |= {read: names[of_row] for read, of_row in also.items() if of_row in names}
    inside = substituted(within, in_runs(ALONG, length, vector))
    assert isinstance(inside, Inside)
    return Held(lanes, turns, vector, names, variables, inside, early)


@dataclass(frozen=True)
class Staged:
    """Rows that a thread block stages in shared memory: short ones, which do not begin at sectors of memory.

    The block's rows lie in one piece. It reads them by whole vectors, and writes results in the same way. In between, a
    thread reads single elements. Adjacent threads read different banks.
    """

    size: int
    """Elements of a row."""
    lanes: int
    """The threads that share a row."""
    reads: Mapping[Read, int]
    """The buffer of each read, by how a loop over the row reads it."""
    results: int
    """How many results are staged. They take the place of what was read."""

    @property
    def buffers(self) -> int:
        return max(len(self.reads), self.results)

    @property
    def threads(self) -> int:
        """Of a block: so few that a multiprocessor has room for several."""
        fitting = (threads for threads in (128, 64) if self._nbytes(threads) <= STAGED_BYTES)
        return next(fitting, WARP)

    @property
    def nbytes(self) -> int:
        """Shared memory of a block."""
        return self._nbytes(self.threads)

    def _nbytes(self, threads: int) -> int:
        return self.buffers * threads // self.lanes * self.size * 4

    @property
    def names(self) -> dict[Read, str]:
        """The text of an element, by read."""
        return {read: f"staged{buffer}[own + {RUN}]" for read, buffer in self.reads.items()}

    def before(self, text: Text) -> list[str]:
        """The statements that fill the buffers."""
        lines = [f"constexpr unsigned kSize = {self.size};"]
        lines += [f"alignas(16) __shared__ float staged{buffer}[kOfBlock * kSize];" for buffer in range(self.buffers)]
        lines.append("const unsigned staged = (p.count - first < kOfBlock ? p.count - first : kOfBlock) * kSize;")
        for read, buffer in self.reads.items():
            source = f"{text.memory(read.slot, read.dtype)} + (first * kSize + {text.number(read.index.constant)})"
            lines.append(f"stage<kThreads>(staged{buffer}, {source}, staged);")
        return [*lines, "__syncthreads();", "const unsigned own = threadIdx.x / kLanes * kSize;"]

    def stores(self) -> list[str]:
        """The statements that put a row's results into the buffers."""
        names = ["result", *(f"other{number}" for number in range(self.results - 1))]
        return [f"staged{buffer}[own + {RUN}] = as_number({name}.element[0]);" for buffer, name in enumerate(names)]

    def after(self, loops: Loops) -> list[str]:
        """The statements that write the results from the buffers."""
        others = [
            f"static_cast<{MOVED_TYPES[store.output.dtype]}*>(p.other[{number}])"
            for number, store in enumerate(loops.also)
        ]
        places = enumerate(["out", *others])
        return [
            "__syncthreads();",
            *(f"stage<kThreads>({out} + first * kSize, staged{buffer}, staged);" for buffer, out in places),
        ]


def staging(
    loops: Loops, reductions: Sequence[Reduced], leaves: Sequence[Leaf], rows: int, length: int
) -> Staged | None:
    """How rows are staged; None if they need not be, or cannot be.

    A few short rows are not, since a thread would go over its elements one after another. Nor are rows of which a warp
    reads several in one piece anyway.
    """
    size = reductions[0].over.size
    lanes = size & -size  # so that adjacent threads read different banks
    are_alike = all(row.over.size == size for row in reductions) and length in (1, size) and loops.into is None
    if not are_alike or lanes > WARP or size // lanes > STAGED_ELEMENTS or rows * lanes < STAGED_LEAST:
        return None
    runs = [size // vector_of_rows(together) for together in groups_of(reductions)]
    is_in_one_piece = all(one <= WARP and one & (one - 1) == 0 for one in runs)
    if is_in_one_piece or all(size // one > STAGED_RUN for one in runs):
        return None
    element, found = variable(ROW, rows) * size + variable(RUN, size), dict[Read, int]()
    for read in _along_rows(reductions, leaves, length):
        if read.dtype not in RESULT_DTYPES or read.where:
            continue
        begin, nbytes = read.index - element, read.dtype.itemsize
        if not begin.terms and size * nbytes % SECTOR and not any(
            number % ACCESS for number in (begin.constant * nbytes, read.slot.alignment)
        ):  # fmt: skip
            found.setdefault(read, len(found))
    results = [store.output for store in loops.stores] if length > 1 else []
    staged = Staged(size, lanes, found, len(results))
    are_staged = all(
        each.dtype in RESULT_DTYPES and not (each.slot.alignment % ACCESS or each.offset % ACCESS) for each in results
    )
    return staged if found and are_staged and staged.nbytes <= STAGED_BYTES else None
