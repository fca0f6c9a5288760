"""Finds attention that a model writes out, and replaces it by a kernel of attention that was measured to be quicker.

The pattern is `softmax(q @ k.T * scale + bias) @ v`: two batched products, and between them loops that compute a
softmax. The first product makes the scores. They may be scaled, be masked (hidden), or have a tensor added. The added
tensor is stored once, as small as possible. The scores are never in memory. attention.py has the contest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from fxfuse.expression import Call as Term
from fxfuse.expression import Const, Expr, Operand, postorder
from fxfuse.layout import contiguous_strides
from fxfuse.problem import RESULT_DTYPES
from fxfuse.program.attention import Chosen, as_scaled_from, in_rows
from fxfuse.program.loops import (
    Body,
    Inside,
    Leaf,
    Loops,
    Read,
    Reduced,
    all_leaves,
    coordinates,
    coordinates_at,
    inlined,
    place_of,
    substituted,
    with_operands,
)
from fxfuse.program.reductions import SOFTMAX
from fxfuse.program.values import Call, Launch, Slot, Value, read_by, slots_of, values_in, written_by

HIDDEN: Final = -1e9
"""The largest number that hides (masks) a score. A score that is added to it makes no difference."""
ALIGNED: Final = 8
"""The added tensor's rows are padded to a multiple of this many elements. Otherwise torch copies the tensor."""
_CASTS: Final = ("float32", "bfloat16", "float16")

Choose = Callable[[Sequence[Value], Value | None, float, int], Chosen | None]
"""choose([query, key, value], added or None, scale, period): as attention.by_hand."""


def joined(
    steps: Sequence[Launch | Call], output: Any, choose: Choose, is_lasting: Callable[[Slot], bool]
) -> list[Launch | Call]:
    """The steps with attention in place of pairs of products and the steps between them.

    Args:
        output: the values that the caller gets.
        is_lasting: whether a slot belongs to the model, not to a call. The model's own masks are assumed to hide no
            whole row.
    """
    found = list(steps)
    leaving = {value.slot for value in values_in(output)}
    for number, last in enumerate(step for step in steps if _is_product(step)):
        match = _match(found, found.index(last), leaving, is_lasting, f"h{number}") if last in found else None
        for one in () if match is None else _ways(match, _Memory(found[: match.last], is_lasting)):
            chosen = choose(one.tensors, one.added_as_read, one.scale, one.period)
            if chosen is not None:
                found = _replaced(found, one, chosen)
                break
    return found


@dataclass(frozen=True)
class _Match:
    """Attention that was found among the steps."""

    gone: frozenset[int]
    """The steps that it replaces, by number."""
    name: str
    """The prefix for names of new values."""
    last: int
    """The number of the product with the values."""
    tensors: tuple[Value, ...]
    """Query, key, value: (batch, heads, rows, channels)."""
    scale: float
    unscaled: float
    """The factor of the scores as the products make them: `scale` without those of queries and keys."""
    added: Loops | None
    """The loops that make the tensor that is added to the scaled scores, padded; None if nothing is added."""
    added_as_read: Value | None
    """The added tensor, without the padding of its rows (`ALIGNED`)."""
    result: Value
    """The result of the last product."""
    matrices: tuple[Value, ...]
    """Query, key, value: (batch * heads, rows, channels), as the products read them."""
    period: int = 0
    """Batches after which the added tensor repeats; 0 if it does not."""


def _is_product(step: Launch | Call) -> bool:
    """Whether a step is a batched product."""
    return isinstance(step, Call) and step.target is torch.bmm and "out" not in step.kwargs


def _match(
    steps: Sequence[Launch | Call], last: int, leaving: set[Slot], is_lasting: Callable[[Slot], bool], name: str
) -> _Match | None:
    """The attention that ends with the product `steps[last]`; None if there is none, or if it cannot be replaced."""
    weights, values, result = _values_of(steps[last])
    memory = _Memory(steps[:last], is_lasting)
    chain = _Chain(memory)
    writer = memory.writer(weights.slot, last)
    loops = None if writer is None else chain.composed(writer)
    if loops is None or chain.scores is None:
        return None
    query, keys_in_columns, scores = _values_of(steps[chain.scores])
    dtypes = {value.dtype for value in (query, keys_in_columns, scores, weights, values, result)}
    inner = frozenset((*chain.steps, chain.scores))
    if len(dtypes) > 1 or query.dtype not in RESULT_DTYPES or not _are_needed_here_only(steps, inner, last, leaving):
        return None
    exponent = _softmaxed(loops)
    if exponent is None:
        return None
    is_scores = {
        number for number, leaf in enumerate(loops.leaves) if isinstance(leaf, Read) and leaf.slot is scores.slot
    }
    try:
        scale, added = _Affine(loops.leaves, is_scores, memory, query.dtype).of(exponent)
    except _Other:
        return None
    split = _split(loops, weights, scores, is_scores, [] if added is None else _operands(added))
    if split is None:
        return None
    matrices = query, _transposed(keys_in_columns), values
    tensors, factor = _read_with_heads(matrices, split.sizes[1], name, steps[:last])
    made, read = (None, None) if added is None else _added(added, split, query.dtype, name) or (None, None)
    if (added is not None and made is None) or not memory.holds((*tensors, *(made.reads if made else ())), inner):
        return None
    return _Match(inner | {last}, name, last, tensors, scale * factor, scale, made, read, result, matrices)


def _ways(match: _Match, memory: _Memory) -> Iterator[_Match]:
    """The match with other numbers of batches and heads, if so more tensors are read where they lie; then itself.

    An image's windows are batches for its tensors. The added tensor makes them heads, if it differs from window to
    window. As batches, it repeats after each image.
    """
    heads, added = match.tensors[0].shape[1], match.added_as_read
    if match.added is not None and added is not None and added.shape[:2] == (1, heads):
        of_head, *others = added.strides[1:]
        for fewer in (number for number in range(heads // 2, 0, -1) if heads % number == 0):
            tensors, factor = _read_with_heads(match.matrices, fewer, match.name, memory.steps)
            if _lying(tensors, match.matrices) <= _lying(match.tensors, match.matrices):
                continue
            if memory.holds((*tensors, *match.added.reads), match.gone - {match.last}):
                period, strides = heads // fewer, (of_head * fewer, of_head, *others)
                added = dataclasses.replace(added, shape=(period, fewer, *added.shape[2:]), strides=strides)
                yield dataclasses.replace(
                    match, tensors=tensors, scale=match.unscaled * factor, added_as_read=added, period=period
                )
                break
    yield match


def _lying(tensors: Sequence[Value], matrices: Sequence[Value]) -> int:
    """How many tensors are read where they were before they were copied for the products."""
    return sum(one.slot is not other.slot for one, other in zip(tensors, matrices, strict=True))


def _read_with_heads(
    matrices: Sequence[Value], heads: int, name: str, steps: Sequence[Launch | Call]
) -> tuple[tuple[Value, ...], float]:
    """The matrices as (batch, heads, rows, channels), where they lie before they are copied for the products.

    Also returns the factor of the scores that queries or keys were scaled with on the way.
    """
    *others, values = (_with_heads(value, heads, f"{name}_{number}") for number, value in enumerate(matrices))
    (query, of_query), (key, of_key) = (as_scaled_from(value, steps) for value in others)
    factor = of_query * of_key
    if not 0 < factor < math.inf:  # else the scale of attention would turn the scores over
        (query, key), factor = others, 1.0
    there, of_values = as_scaled_from(values, steps)
    return (query, key, there if of_values == 1.0 else values), factor


def _values_of(product: Launch | Call) -> tuple[Value, Value, Value]:
    """The two factors and the result of a product."""
    assert isinstance(product, Call)
    left, right = product.args
    return left, right, product.result


class _Memory:
    """Facts about slots before the last product: their writers, and whether they are the model's own, or finite."""

    def __init__(self, steps: Sequence[Launch | Call], is_lasting: Callable[[Slot], bool]) -> None:
        self.steps = steps
        self._written = [written_by(step) for step in steps]
        self._is_lasting = is_lasting
        self._lasting: dict[Slot, bool] = {}
        self._finite: dict[Slot, bool] = {}

    def writer(self, slot: Slot, before: int) -> int | None:
        """The last step before `before` that writes into a slot."""
        return next((number for number in range(before - 1, -1, -1) if slot in self._written[number]), None)

    def holds(self, read: Sequence[Value | Read], gone: frozenset[int]) -> bool:
        """Whether the memory of these values holds the same at the last product as where the steps `gone` read it."""
        later = [written for number, written in enumerate(self._written) if number > min(gone) and number not in gone]
        # one write is allowed: attention's values may be made in between, as only the last product reads them
        return all(
            slot.kind != "given" and sum(slot in written for written in self._written) == 1
            for slot in {one.slot for one in read}
            if any(slot in written for written in later)
        )

    def lasts(self, slot: Slot) -> bool:
        """Whether a slot's contents are the model's own, or computed from nothing else."""
        if slot not in self._lasting:
            self._lasting[slot] = False  # ends the recursion where a slot is computed from itself, in place
            writers = [step for step, written in zip(self.steps, self._written, strict=True) if slot in written]
            sources = {read for step in writers for read in read_by(step)} - {slot}
            is_made = bool(writers and sources) and all(map(self.lasts, sources))
            self._lasting[slot] = is_made or self._is_lasting(slot)
        return self._lasting[slot]

    def is_finite(self, expression: Expr, leaves: Sequence[Leaf], dtype: torch.dtype) -> bool:
        """Whether an expression is computed from the model's own memory alone, or from finite values alone.

        Finite values are integers, truth values, and numbers that are finite in `dtype`.
        """
        used = [leaves[index] for index in _operands(expression)]
        if all(self.lasts(leaf.slot) for leaf in used if isinstance(leaf, Read)):
            return True
        numbers = [node.value for node in postorder(expression) if isinstance(node, Const)]
        if any(abs(number) > torch.finfo(dtype).max for number in numbers):
            return False
        return all(self._is_finite(leaf, dtype) for leaf in used)

    def _is_finite(self, leaf: Leaf, dtype: torch.dtype) -> bool:
        if isinstance(leaf, Reduced):
            return self.is_finite(leaf.expression, leaf.leaves, dtype)
        if not isinstance(leaf, Read) or not leaf.dtype.is_floating_point or self.lasts(leaf.slot):
            return True
        if leaf.slot not in self._finite:
            self._finite[leaf.slot] = False
            writer = self.writer(leaf.slot, len(self.steps))
            loops = None if writer is None else self.steps[writer].loops
            self._finite[leaf.slot] = (
                loops is not None and loops.into is None and self.is_finite(loops.expression, loops.leaves, dtype)
            )
        return self._finite[leaf.slot]


class _Chain:
    """Inlines the steps between two products into one, and notes these steps and the first product."""

    def __init__(self, memory: _Memory) -> None:
        self._memory = memory
        self.steps: set[int] = set()
        """The steps that were inlined, by number."""
        self.scores: int | None = None
        """The number of the first product, which makes the scores."""

    def composed(self, number: int) -> Loops | None:
        """A step's loops with all steps back to the product inlined.

        None if the step has no plain loops, depends on no product, or on several.
        """
        loops = self._memory.steps[number].loops
        if loops is None or loops.into is not None or loops.also:
            return None
        of_scores = False
        for slot in dict.fromkeys(read.slot for read in loops.reads):
            writer = self._memory.writer(slot, number)
            if writer is None:
                continue
            if _is_product(self._memory.steps[writer]):
                if self.scores not in (None, writer):
                    return None
                self.scores, of_scores = writer, True
                continue
            producer = self.composed(writer)
            dtypes = {read.dtype for read in loops.reads if read.slot is slot}
            if producer is None or dtypes != {producer.output.dtype}:
                continue
            loops, of_scores = inlined(loops, {slot: producer}), True
        if not of_scores:
            return None
        self.steps.add(number)
        return loops


def _are_needed_here_only(steps: Sequence[Launch | Call], inner: frozenset[int], last: int, leaving: set[Slot]) -> bool:
    """Whether only the steps `inner` and `last` use the results of the steps `inner`."""
    made = {slot for number in inner for slot in written_by(steps[number])}
    if made & leaving or any(slot.kind == "given" for slot in made):
        return False
    for number, step in enumerate(steps):
        if number in inner or number == last or (isinstance(step, Call) and step.is_view):
            continue
        if made.intersection(slots_of(step)):
            return False
    return True


# --------------------------------------------------------------------------------- the softmax and its input


def _softmaxed(loops: Loops) -> Expr | None:
    """The expression whose softmax along the last dimension the loops compute; None if they compute none."""
    expression = loops.expression
    while isinstance(expression, Term) and expression.op in _CASTS:
        (expression,) = expression.args
    match expression:
        case Term("div", (Term("exp", (Term("sub", (exponent, _)),)), _)):
            scores = Slot("memory", "scores")
            shape, strides = loops.output.shape, loops.output.strides
            inner = Value(scores, 0, shape, strides, torch.float32, "scores")
            alike = Value(Slot("memory", ""), 0, shape, strides, torch.float32, "")
            of_scores, softmax = Body(), Body()
            taken = {number: of_scores.leaf(leaf) for number, leaf in enumerate(loops.leaves)}
            made = of_scores.loops(inner, with_operands(exponent, taken))
            whole = softmax.loops(alike, SOFTMAX(softmax, {"self": inner, "dim": len(shape) - 1}, alike))
            whole = inlined(whole, {scores: made})
            same = _spelled(whole.expression, whole.leaves) == _spelled(expression, loops.leaves)
            return exponent if same else None
    return None


def _spelled(expression: Expr, leaves: Sequence[Leaf]) -> Any:
    """An expression with its leaves in place of operands, so that their numbering does not matter."""
    match expression:
        case Operand(index):
            leaf = leaves[index]
            if isinstance(leaf, Reduced):
                return leaf.op, leaf.over, _spelled(leaf.expression, leaf.leaves)
            return leaf
        case Term(op, args):
            return op, *(_spelled(arg, leaves) for arg in args)
    return expression


class _Other(Exception):
    """The expression is not of the form scale * scores + something added."""


class _Affine:
    """Takes an expression apart into scale * scores + an added expression."""

    def __init__(self, leaves: Sequence[Leaf], scores: set[int], memory: _Memory, dtype: torch.dtype) -> None:
        """
        Args:
            scores: the numbers of the leaves that read the scores.
            dtype: the scores' dtype.
        """
        self._leaves, self._scores, self._memory, self._dtype = leaves, scores, memory, dtype

    def of(self, expression: Expr) -> tuple[float, Expr | None]:
        """The scale, and the added expression or None. Raises _Other."""
        match expression:
            case Operand(index) if index in self._scores:
                return 1.0, None
            case Term(op, (x,)) if op in _CASTS:
                return self.of(x)
            case Term("mul" | "div" as op, (x, y)):
                scaled, factor = (x, self._number(y)) if op == "div" or self._depends(x) else (y, self._number(x))
                return self._scaled(scaled, 1 / factor if op == "div" and factor else factor)
            case Term("add", (x, y)):
                scaled, other = (x, y) if self._depends(x) else (y, x)
                return self._plus(scaled, other)
            case Term("sub", (x, y)):
                return self._plus(x, Term("neg", (y,)))
            case Term("masked_fill", (x, mask, value)):
                return self._hidden(mask, x, self._number(value), is_where_mask_is=True)
            case Term("where", (mask, x, y)):
                if self._depends(y):
                    return self._hidden(mask, y, self._number(x), is_where_mask_is=True)
                return self._hidden(mask, x, self._number(y), is_where_mask_is=False)
        raise _Other

    def _number(self, expression: Expr) -> float:
        """The value of an expression that is a constant, or a constant tensor of one element. Raises _Other."""
        if isinstance(expression, Const):
            return float(expression.value)
        leaf = self._leaves[expression.index] if isinstance(expression, Operand) else None
        if isinstance(leaf, Read) and leaf.slot.constant is not None and leaf.slot.constant.numel() == 1:
            return float(leaf.slot.constant)
        raise _Other

    def _depends(self, expression: Expr) -> bool:
        return not self._scores.isdisjoint(_operands(expression))

    def _scaled(self, x: Expr, factor: float) -> tuple[float, Expr | None]:
        scale, added = self.of(x)
        if not 0 < factor < math.inf:
            raise _Other
        return scale * factor, None if added is None else Term("mul", (added, Const(factor)))

    # If minus infinity hides a whole row, the row is NaN in eager, but zeros in torch's attention. So tensors of a call
    # must not hide scores by minus infinity.

    def _plus(self, x: Expr, other: Expr) -> tuple[float, Expr | None]:
        if self._depends(other) or not self._memory.is_finite(other, self._leaves, self._dtype):
            raise _Other
        scale, added = self.of(x)
        return scale, other if added is None else Term("add", (added, other))

    def _hidden(self, mask: Expr, x: Expr, value: float, is_where_mask_is: bool) -> tuple[float, Expr]:
        reads = [leaf for leaf in map(self._leaves.__getitem__, _operands(mask)) if isinstance(leaf, Read)]
        is_infinite = -value > torch.finfo(self._dtype).max
        if self._depends(mask) or not value <= HIDDEN:
            raise _Other
        if is_infinite and not all(self._memory.lasts(read.slot) for read in reads):
            raise _Other
        scale, added = self.of(x)
        both = Const(value), Const(0.0) if added is None else added
        return scale, Term("where", (mask, *(both if is_where_mask_is else both[::-1])))


# ------------------------------------------------------------------------------------ batches, heads and memory


def _operands(expression: Expr) -> list[int]:
    return [node.index for node in postorder(expression) if isinstance(node, Operand)]


def _depend(leaves: Sequence[Leaf], name: str) -> bool:
    return any(not isinstance(leaf, Reduced) and leaf.index.depends_on(name) for leaf in all_leaves(leaves))


@dataclass(frozen=True)
class _Split:
    """The matrices of a batched product, divided into batches and heads so that the added tensor is smallest."""

    sizes: tuple[int, ...]
    """The numbers of batches, heads, rows and keys."""
    leaves: tuple[Leaf, ...]
    """The leaves of the softmax, by these four coordinates."""
    added: tuple[int, ...]
    """The shape of the added tensor: `sizes`, but 1 for dimensions on which it does not depend."""


def _split(loops: Loops, weights: Value, scores: Value, which: set[int], added: Sequence[int]) -> _Split | None:
    """The best division into batches and heads.

    None if the softmax is not along the rows of `weights`, or if a leaf reads the score of another query or key than
    the weight's own.

    Args:
        which: the numbers of the leaves that read scores.
        added: the numbers of the leaves on which the added tensor depends.
    """
    best: _Split | None = None
    count, rows, keys = weights.shape
    for heads in _numbers_of_heads(loops.output.shape, count):
        sizes = count // heads, heads, rows, keys
        batch, head, row, key = coordinates(sizes)
        at = batch * heads + head, row, key
        place = place_of(weights, at) - loops.output.offset // loops.output.dtype.itemsize
        own = coordinates_at(loops.output, place)
        values = {f"c{dim}": index for dim, index in enumerate(own)}
        leaves = tuple(substituted(leaf, values) for leaf in loops.leaves)
        whole = Read(scores.slot, scores.dtype, place_of(scores, at))
        if own[-1] != key or any(leaves[number] != whole for number in which):
            return None
        used = [leaves[number] for number in added]
        shape = tuple(size if _depend(used, f"c{dim}") else 1 for dim, size in enumerate(sizes))
        if best is None or math.prod(shape) < math.prod(best.added):
            best = _Split(sizes, leaves, shape)
    return best


def _numbers_of_heads(shape: Sequence[int], count: int) -> list[int]:
    """The possible numbers of heads of `count` matrices. Those that the shape of the scores suggests come first."""
    said = [math.prod(shape[dim:-2]) for dim in range(len(shape) - 3, 0, -1)]
    divisors = [number for number in range(1, count + 1) if count % number == 0]
    return list(dict.fromkeys([*(number for number in said if number in divisors), *divisors]))


def _transposed(value: Value) -> Value:
    """A value (count, columns, rows) viewed as (count, rows, columns)."""
    (count, columns, rows), (of_matrix, of_column, of_row) = value.shape, value.strides
    strides = of_matrix, of_row, of_column
    return Value(value.slot, value.offset, (count, rows, columns), strides, value.dtype, value.name)


def _with_heads(value: Value, heads: int, name: str) -> Value:
    """A value (batch * heads, rows, columns) viewed as (batch, heads, rows, columns)."""
    (count, rows, columns), (of_matrix, of_row, of_column) = value.shape, value.strides
    shape, strides = (count // heads, heads, rows, columns), (of_matrix * heads, of_matrix, of_row, of_column)
    return Value(value.slot, value.offset, shape, strides, value.dtype, name)


def _added(expression: Expr, split: _Split, dtype: torch.dtype, name: str) -> tuple[Loops, Value] | None:
    """Loops that make the added tensor with padded rows, and the value without the padding.

    None if the tensor contains reductions, or would lose precision in `dtype`.
    """
    used = {index: split.leaves[index] for index in _operands(expression)}
    reads = [leaf for leaf in used.values() if isinstance(leaf, Read)]
    if any(isinstance(leaf, Reduced) for leaf in used.values()):
        return None
    if dtype != torch.float32 and any(read.dtype in (torch.float32, torch.float64) for read in reads):
        return None
    *others, keys = split.added
    whole = *others, -(-keys // ALIGNED) * ALIGNED
    slot = Slot("made", name, whole, contiguous_strides(whole), dtype)
    body, at = Body(), coordinates(whole)
    values = {f"c{dim}": one for dim, one in enumerate(at)}
    inside = (Inside(at[3], keys),) if whole[3] > keys else ()

    def within(leaf: Leaf) -> Leaf:
        leaf = substituted(leaf, values)
        return Read(leaf.slot, leaf.dtype, leaf.index, (*inside, *leaf.where)) if isinstance(leaf, Read) else leaf

    made = with_operands(expression, {index: body.leaf(within(leaf)) for index, leaf in used.items()})
    loops = body.loops(Value(slot, 0, whole, slot.strides, dtype, name), body.choose(inside, made, Const(0.0)))
    return loops, Value(slot, 0, split.added, slot.strides, dtype, f"{name}_added")


def _copied_to_rows(value: Value, name: str, label: str) -> tuple[Value, Call]:
    """A query, key or value whose channels are adjacent, and the step that copies it from `value`."""
    strides = contiguous_strides(value.shape)
    there = Value(Slot("made", name, value.shape, strides, value.dtype), 0, value.shape, strides, value.dtype, name)
    return there, _copy(value, there, f"{label}: rows")


def _copy(value: Value, there: Value, label: str) -> Call:
    """The step that copies a value to another one of the same shape."""
    body = Body()
    loops = body.loops(there, body.read(value, coordinates(value.shape)))
    return Call(None, (value,), {}, there, False, True, False, label, loops)


def _replaced(steps: Sequence[Launch | Call], match: _Match, chosen: Chosen) -> list[Launch | Call]:
    """The steps with a match replaced by what was chosen for it."""
    label = "attention written by hand"
    new: list[Launch | Call] = []
    tensors = list(match.tensors)
    for number, tensor in enumerate(tensors):
        if not in_rows(tensor.strides):  # as keys that were copied for the product: merge.py makes one copy of the two
            tensors[number], copy = _copied_to_rows(tensor, f"{match.name}_rows{number}", label)
            new.append(copy)
    if match.added is not None:
        there = match.added.output
        arguments = there.shape, there.strides
        new.append(Call(None, arguments, {}, there, False, True, False, f"{label}: what is added", match.added))
    step, found = chosen.step(tensors, match.added_as_read, match.scale, f"{match.name}_made", label)
    new.append(step)
    as_before = _with_heads(match.result, tensors[0].shape[1], f"{match.name}_as_before")
    new.append(_copy(found, as_before, f"{label}: its result"))
    kept = [(number, step) for number, step in enumerate(steps) if number not in match.gone]
    before = [step for number, step in kept if number < match.last]
    return [*before, *new, *(step for number, step in kept if number > match.last)]
