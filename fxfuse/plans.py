"""The plans of each region: made at the first call with a new problem, looked up at later calls.

A plan is what runs a problem: a kernel, torch's library, or torch operation by operation. `run` is the entry point.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import operator
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch

from fxfuse import ahead, build, dump, gated, packaged, progress, split, stream_capture
from fxfuse.cuda import gpu
from fxfuse.cuda.precision import tf32_allowed
from fxfuse.errors import (
    BuildError,
    ExpressionError,
    FxfuseError,
    FxfuseWarning,
    ToolchainError,
    UnsupportedError,
    first_line,
)
from fxfuse.expression import Expr, operand_count
from fxfuse.layout import FORMATS, contiguous_strides
from fxfuse.locks import free_in_children
from fxfuse.ops import PointwiseOp, on_replacement
from fxfuse.pooling import Separate, pooled
from fxfuse.problem import (
    OPTION_NAMES,
    PRODUCTS,
    RESULT_DTYPES,
    ByAddress,
    Declined,
    Draft,
    Plan,
    Postponed,
    Problem,
    Refused,
    Run,
    TensorMeta,
    anchor_meta,
    in_order,
    may_postpone,
    without_unread,
)

logger = logging.getLogger("fxfuse")

Key: TypeAlias = tuple[Any, ...]
Said: TypeAlias = tuple[str, str, tuple[Any, ...], bool, str, tuple[Any, ...]]
"""A call's arguments other than tensors: kind, epilogue, the anchor's options, strict, fp32, pool."""


# -------------------------------------------------------------------------------------------- look-up

MOST_KEPT: Final = 1024
"""Entries that a region keeps in `_plans`, two for each kind of call. The oldest are dropped first. There is a limit
because some models meet new sizes for ever."""

_plans: dict[int, dict[Key, Plan]] = {}
_lock = free_in_children(threading.RLock())
_collecting = threading.local()

GRADIENTS_DUE: Final = "gradients are due"
TRANSFORMED: Final = "torch.func, forward-mode derivatives or tensors that are not strided need single operations"
IN_PARTS: Final = "each process holds a part of its tensors (DTensor)"
RECAST: Final = "torch.autocast casts within it"
REMOVED: Final = "a parameter that it reads has been set to None"

without_plan: Final[dict[str, set[int]]] = {
    reason: set() for reason in (GRADIENTS_DUE, TRANSFORMED, IN_PARTS, RECAST, REMOVED)
}
"""The regions with calls that torch ran without a plan being looked up, by reason."""


written: Final[dict[int, tuple[str, Expr]]] = {}
"""The regions whose epilogue was simplified: the simplified text, and the epilogue as the model wrote it."""


def as_written(region: int, epilogue: str) -> Expr | None:
    """The region's epilogue as the model wrote it; None if it was not simplified.

    Where torch runs the region, it runs this one: gradients and errors are then eager's. The text is compared because a
    program saved by torch.export may contain region numbers that this process does not have, or uses for other regions.
    """
    text, expression = written.get(region, (None, None))
    return expression if text == epilogue else None


def of_region(region: int) -> list[Plan]:
    """The distinct plans that this region has used in this process."""
    plans = list(_plans.get(region, {}).values())  # a copy: other threads may add to them
    return list({id(plan): plan for plan in plans}.values())


def problems_of(region: int) -> dict[Problem, Plan]:
    """This region's problems in this process and their plans, the latest last."""
    return {key[0]: plan for key, plan in list(_plans.get(region, {}).items()) if isinstance(key[0], Problem)}


def reasons_without_plan(region: int) -> list[str]:
    """The reasons why torch ran calls of the region without a plan being looked up."""
    return [reason for reason, regions in without_plan.items() if region in regions]


def forget(regions: Sequence[int]) -> None:
    """Drops everything that is stored for `regions`, which no longer exist."""
    dump.forget(regions)
    for region in regions:
        shortcuts.pop(region, None)
        _latest.pop(region, None)
        _plans.pop(region, None)
        written.pop(region, None)
        for called in without_plan.values():
            called.discard(region)


def forget_operation(row: PointwiseOp) -> None:
    """Drops the plans of all regions whose epilogue calls `row`: the operation has been redefined."""
    with _lock:
        for region, found in list(_plans.items()):
            texts = {key[1] for key in list(found) if isinstance(key[0], str)}  # keys by problem have the same texts
            if any(row.is_called_in(text) for text in texts):
                shortcuts.pop(region, None)
                _latest.pop(region, None)
                _plans.pop(region, None)


on_replacement.append(forget_operation)


def assign(region: int, key: Key, plan: Plan) -> None:
    """Sets the plan for the region's calls with `key`, replacing any earlier one."""
    with _lock:
        shortcuts.pop(region, None)
        _plans.setdefault(region, {})[key] = plan


def _cuda_state(tensor: torch.Tensor) -> Key:
    address = tensor.data_ptr()
    # get_device() takes half the time of .device. It is -1 for CPU and meta; a meta tensor has no address.
    return (
        tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), address & 15 if address else None,
        type(tensor),
    )  # fmt: skip


def _cpu_state(tensor: torch.Tensor) -> Key:  # no alignment: a CPU's vector loads take any address
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, 0, type(tensor))


def _meta(tensor: torch.Tensor) -> TensorMeta:
    alignment = math.gcd(16, tensor.data_ptr()) if tensor.is_cuda else 16
    return TensorMeta.of(tensor, tensor.device, alignment)


def _key(
    kind: str, epilogue: str, values: tuple[Any, ...], strict: bool, fp32: str, pool: tuple[Any, ...],
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, operands: Sequence[torch.Tensor],
) -> Key:  # fmt: skip
    """The look-up key of a call: everything that its plan depends on."""
    cuda = x.is_cuda
    state = _cuda_state if cuda else _cpu_state
    return (
        kind, epilogue, values, strict, fp32, pool,
        tf32_allowed(kind) if cuda and kind in PRODUCTS and x.dtype is torch.float32 else None,
        torch.get_default_dtype(),  # the dtype of a float beside a bool or integer tensor
        None if bias is None else state(bias), None if weight is None else state(weight), state(x),
        *map(state, operands),
    )  # fmt: skip


def known_plan(
    kind: str, epilogue: str, values: tuple[Any, ...], strict: bool, region: int, fp32: str, pool: tuple[Any, ...],
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, operands: Sequence[torch.Tensor],
) -> Plan | None:  # fmt: skip
    """The plan that `run` would look up; None if the region has none for this call yet."""
    found = _plans.get(region)
    return (
        None
        if found is None
        else found.get(_key(kind, epilogue, values, strict, fp32, pool, x, weight, bias, operands))
    )


def problem_of(
    kind: str, epilogue: str, values: tuple[Any, ...], strict: bool, region: int, fp32: str, pool: tuple[Any, ...],
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, operands: Sequence[torch.Tensor],
) -> Problem:  # fmt: skip
    """The Problem of a call with these arguments."""
    key = _key(kind, epilogue, values, strict, fp32, pool, x, weight, bias, operands)
    return _problem(region, key, x, weight, bias, operands)


def run(
    kind: str, epilogue: str, values: tuple[Any, ...], strict: bool, region: int, fp32: str, pool: tuple[Any, ...],
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, operands: Sequence[torch.Tensor],
    directly: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Runs one call of a fused operator by its plan, which the first call makes. No gradient is needed.

    The key holds everything that a plan depends on. Building and looking it up is what a call costs beside its launch.

    Args:
        directly: whether the call came without torch's dispatcher. Only then may calls like it get a short cut.
    """
    key = _key(kind, epilogue, values, strict, fp32, pool, x, weight, bias, operands)
    found = _plans.get(region)
    plan = None if found is None else found.get(key)
    if plan is None:
        problem = _problem(region, key, x, weight, bias, operands)
        pending: _Pending | None = getattr(_collecting, "pending", None)
        plan = None if pending is None else pending.plan_at_hand(_posed(key, problem), problem, strict)
        if pending is not None and plan is None:
            result = problem.reference(x, weight, bias, operands)
            pending.note(_FirstCall(region, key, problem, strict, _free_strides(result, x, operands)))
            return result
        draft = None
        if plan is None and (found is None or _posed(key, problem) not in found):
            draft = _new_draft(problem, strict)  # without the lock: other threads may take part in it
        with _lock:
            found = _plans.setdefault(region, {})  # a reference of our own: the region may be forgotten meanwhile
            plan = plan or found.get(_posed(key, problem))
            if plan is None:
                draft = draft or _draft(problem, strict)
                with progress.steps("measure", int(_is_measured(problem))):
                    plan = draft()
        try:
            result = plan.run(x, weight, bias, operands)
        except Exception as error:
            return _run_instead(region, key, plan, error, x, weight, bias, operands)
        strides = _free_strides(result, x, operands)
        if strides is not None and plan.kernel is not None:
            strides = problem.reference(x, weight, bias, operands).stride()
        _keep(region, found, key, problem, plan, strides)
        return result if strides is None else _with_strides(result, strides)
    if region and directly:
        _note(region, key, plan, x, weight, bias, operands)
    try:
        return plan.run(x, weight, bias, operands)
    except Exception as error:
        return _run_instead(region, key, plan, error, x, weight, bias, operands)


def foresee(
    kind: str, epilogue: str, values: tuple[Any, ...], strict: bool, region: int, fp32: str, pool: tuple[Any, ...],
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, operands: Sequence[torch.Tensor],
) -> None:  # fmt: skip
    """Notes one call of a fused operator on fake tensors, if this thread looks ahead (ahead.py)."""
    this = ahead.of_this_call()
    if this is not None and this.is_looking:
        said = (kind, epilogue, values, strict, fp32, pool)
        this.note(_problem(region, said, x, weight, bias, operands, ahead.meta_of), strict)


def _problem(
    region: int,
    key: Key,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    operands: Sequence[torch.Tensor],
    meta: Callable[[torch.Tensor], TensorMeta] | None = None,
) -> Problem:
    """The Problem of a call with this key."""
    meta = meta or _meta
    kind, epilogue, values, _, fp32, pool = key[:6]
    options = tuple(zip(OPTION_NAMES[kind], values, strict=True))
    weight_meta, bias_meta = (None if tensor is None else meta(tensor) for tensor in (weight, bias))
    return Problem(
        kind, options, epilogue, meta(x), weight_meta, bias_meta, tuple(map(meta, operands)), fp32, pool,
        as_written(region, epilogue), stream_capture.will_be_replayed(),
    )  # fmt: skip


def _run_instead(
    region: int, key: Key, plan: Plan, error: Exception,
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, operands: Sequence[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """The result by torch, for a call whose plan raised `error`. From now on torch runs all calls with this key.

    If torch raises, too, eager would have raised with these tensors, or the GPU no longer computes anything. A kernel
    that could not be launched has written nothing, so a tensor that a pass would have overwritten is unchanged.
    """
    strict = key[3]
    if plan.kernel is None or strict or not _is_ours(error):
        try:
            raise error
        finally:
            del error  # its traceback has this frame: all callers would stay until they are collected
    problem = _problem(region, key, x, weight, bias, operands)
    result = problem.reference(x, weight, bias, operands)
    _warn_once(problem, error)
    assign(region, key, Plan(problem.reference, None, _said_of(error)))
    return result


def _free_strides(result: torch.Tensor, x: torch.Tensor, operands: Sequence[torch.Tensor]) -> tuple[int, ...] | None:
    """The result's strides if eager's may differ from them and must be looked up; None if its layout determines them.

    A dimension of size 1 may have any stride in memory. Each of torch's operators chooses it in its own way where the
    arguments are not plainly contiguous. Images of one pixel are both contiguous and in channels_last.
    """
    if 1 not in result.shape or result.dim() < 2:
        return None
    is_pixel = result.dim() in FORMATS and math.prod(result.shape[2:]) == 1
    alike = (tensor for tensor in (x, *operands) if tensor.dim() == result.dim())
    if is_pixel or any(tensor.stride() != contiguous_strides(tensor.shape) for tensor in alike):
        return result.stride()
    return None


def _with_strides(result: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    return result if result.stride() == strides else result.as_strided(result.shape, strides)


# ----------------------------------------------------------------------------------------- short cuts

Shortcut: TypeAlias = Callable[[Said, tuple[torch.Tensor, ...]], torch.Tensor | None]

shortcuts: dict[int, Shortcut] = {}
"""shortcuts[region](said, tensors): the result if the call is like the region's latest two, else None.

A look-up by key costs the CPU twice as much as a launch. A short cut replaces it by one call of torch's TensorGuards,
which torch.compile's code uses, too. The guard compares the tensors with those of the earlier call: type, dtype,
device, sizes, strides, requires_grad, and the dispatch keys under which this thread would run an operator on them
(hence autocast, inference mode, dispatch modes, transformations, conjugation, negation).

The guard does not compare the grad mode, nor the switches that only plans depend on: the short cut does. functional.py
has checked for function modes, traces, profilers and forward-mode derivatives before. Only calls that did not come
through the dispatcher make short cuts: inside the dispatcher a thread has other keys.
"""
_latest: dict[int, Key] = {}
"""The key of each region's latest look-up. A key that comes twice in a row gets a short cut."""
_guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)


def _note(
    region: int, key: Key, plan: Plan,
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, operands: Sequence[torch.Tensor],
) -> None:  # fmt: skip
    if _latest.get(region) != key:
        _latest[region] = key
        return
    tensors = in_order(x, weight, bias, operands)
    on_gpu = [tensor.is_cuda for tensor in tensors]
    if _guards is None or any(on_gpu) != all(on_gpu) or (all(on_gpu) and _unaligned([t.data_ptr() for t in tensors])):
        return
    with _lock:
        if _plans.get(region, {}).get(key) is plan:  # otherwise it was forgotten or replaced meanwhile
            shortcuts[region] = _shortcut(key, plan, tensors, weight is not None, bias is not None)


def _unaligned(addresses: list[int]) -> int:
    return functools.reduce(operator.or_, addresses) & 15


def _shortcut(key: Key, plan: Plan, tensors: tuple[torch.Tensor, ...], has_weight: bool, has_bias: bool) -> Shortcut:
    expected, (tf32, default_dtype), kind = key[:6], key[6:8], key[0]
    differentiable = any(tensor.requires_grad for tensor in tensors)
    sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    same = _guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # None would mean "any"
    grad_enabled, get_default_dtype = torch.is_grad_enabled, torch.get_default_dtype
    cuda, run = tensors[0].is_cuda, plan.run
    launch = run.launch if isinstance(run, ByAddress) else None
    operands = slice(1 + has_weight, len(tensors) - has_bias)
    count = len(tensors)

    def attempt(said: Said, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        if (
            said != expected
            or len(tensors) != count  # a bias has been set to None
            or (differentiable and grad_enabled())  # a gradient is needed: no plan runs this call
            or not same(*tensors)
            or get_default_dtype() is not default_dtype
            or (tf32 is not None and tf32_allowed(kind) != tf32)
        ):
            return None
        if cuda:
            addresses = [tensor.data_ptr() for tensor in tensors]
            if _unaligned(addresses):
                return None
            if launch is not None:
                return launch(tensors, addresses)
        return run(tensors[0], tensors[1] if has_weight else None, tensors[-1] if has_bias else None, tensors[operands])

    return attempt


# ------------------------------------------------------------------------------------------- preparing


@dataclass(frozen=True)
class _FirstCall:
    """A call that found no plan."""

    region: int
    key: Key
    problem: Problem
    strict: bool
    strides: tuple[int, ...] | None
    """Eager's result strides, where the result must be given them (`_free_strides`); else None."""


@dataclass
class _Pending:
    """A thread's state inside `collect`: where calls without a plan go, and the plans that were found at hand."""

    note: Callable[[_FirstCall], None]
    plans: dict[Key, Plan | None] = field(default_factory=dict)

    def plan_at_hand(self, posed: Key, problem: Problem, strict: bool) -> Plan | None:
        """The plan, if everything that it needs was measured and compiled by an earlier process; else None."""
        if posed not in self.plans:
            self.plans[posed] = _at_hand(problem, strict)
        return self.plans[posed]


def _at_hand(problem: Problem, strict: bool) -> Plan | None:
    if _is_measured(problem):  # quicker than trying
        return None
    try:
        with build.built_only():
            return _draft(problem, strict)()
    except build.NotBuilt:
        return None


def _is_measured(problem: Problem) -> bool:
    """Whether the candidates for `problem` still have to be measured, if it has several."""
    if problem.is_chain or problem.x.device.type != "cuda":
        return False
    from fxfuse.cuda.tune import is_undecided

    return is_undecided(problem)


@contextlib.contextmanager
def collect(note: Callable[[_FirstCall], None]) -> Iterator[None]:
    """Inside this context, calls without a plan run by torch and are passed to `note`.

    A plan for which nothing must be compiled or measured is made at once instead.
    """
    outer = getattr(_collecting, "pending", None)  # set if this model runs inside another
    _collecting.pending = _Pending(note)
    try:
        yield
    finally:
        _collecting.pending = outer


class Drafts:
    """The drafts for noted calls: one for each problem, compiled in the background from the first note on."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(ahead.WAITING * build.PROCESSORS, thread_name_prefix="fxfuse")
        self._drafts: dict[Key, Future[Draft]] = {}
        self._calls: dict[Future[Draft], list[_FirstCall]] = {}
        self._others: list[Future[None]] = []

    def beside(self, work: Callable[[], None]) -> None:
        """Starts other `work` that later calls will need."""
        self._others.append(self._pool.submit(work))

    def note(self, call: _FirstCall) -> None:
        """Starts to compile the kernels for `call`, unless an earlier call had the same problem."""
        posed = _posed(call.key, call.problem)
        if posed not in self._drafts:
            self._drafts[posed] = self._pool.submit(_draft, call.problem, call.strict)
        self._calls.setdefault(self._drafts[posed], []).append(call)

    def done(self) -> bool:
        """Whether the kernels of all calls noted so far are compiled."""
        return all(draft.done() for draft in self._calls)

    def decide(self) -> None:
        """Makes the plans, each as soon as its kernels are compiled; one after another, because this measures.

        Then waits for the work of `beside`.
        """
        labels = {
            draft: calls[0].problem.label for draft, calls in self._calls.items() if _is_measured(calls[0].problem)
        }
        compiling: dict[Future[Any], Future[Draft]] = {draft: draft for draft in self._calls}
        """The drafts, by what each of them waits for: itself, or more kernels."""
        with progress.steps("measure", len(labels)) as measured:
            while compiling:
                for ready in wait(compiling, return_when=FIRST_COMPLETED).done:
                    draft = compiling.pop(ready)
                    ready.result()
                    try:
                        with may_postpone():
                            plan = draft.result()()
                    except Postponed as postponed:
                        compiling[self._pool.submit(postponed.compile)] = draft
                        continue
                    self._assign(draft, plan)
                    if draft in labels:
                        measured(labels[draft])
        for other in self._others:
            other.result()

    def _assign(self, draft: Future[Draft], plan: Plan) -> None:
        """Makes it the plan of all calls with the draft's problem."""
        with _lock:
            for call in self._calls[draft]:
                found = _plans.setdefault(call.region, {})
                _keep(call.region, found, call.key, call.problem, plan, call.strides)

    def close(self) -> None:
        """Drops compilations that have not begun. The others go on into the kernel cache; nothing waits for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def preparing() -> Iterator[Drafts]:
    """Inside this context, torch runs calls without a plan, and the kernels that they need are compiled meanwhile.

    On leaving, the plans for those calls are made, in the calling thread: torch's libraries choose their algorithms
    anew in each thread. During the capture of a CUDA graph nothing is prepared, because nothing can be measured.
    """
    drafts = Drafts()
    try:
        if stream_capture.is_underway():
            yield drafts
            return
        with collect(drafts.note):
            yield drafts
        drafts.decide()
    except KeyboardInterrupt:
        drafts.close()  # first, so that no other compilation begins
        build.interrupt()
        raise
    finally:
        drafts.close()


def is_preparing() -> bool:
    """Whether this thread is inside `preparing`."""
    return getattr(_collecting, "pending", None) is not None


def preparing_together() -> contextlib.AbstractContextManager[Any]:
    """`preparing`; inside another one, an empty context. The outer one makes all plans: kernels compile together."""
    return contextlib.nullcontext() if is_preparing() else preparing()


def prepared_by_first_calls(call: Callable[..., Any], calls: int = 1) -> Callable[..., Any]:
    """Wraps `call`: its first runs compute by torch and compile all kernels that they need (`preparing`)."""
    left = calls

    def run(*args: Any) -> Any:
        nonlocal left
        if not left:
            return call(*args)
        left -= 1
        with preparing():
            return call(*args)

    return run


def _keep(
    region: int, found: dict[Key, Plan], key: Key, problem: Problem, plan: Plan, strides: tuple[int, ...] | None
) -> None:
    """Stores the plan twice: for the problem, and for calls with `key`, whose results get `strides` if given."""
    if plan.provisional:
        return
    found[_posed(key, problem)] = plan
    found[key] = plan if strides is None else dataclasses.replace(plan, run=_restrided(plan.run, strides))
    for oldest in list(found)[: max(0, len(found) - MOST_KEPT)]:
        found.pop(oldest, None)  # another thread may have removed it
    dump.plan_made(region)


def _restrided(run: Run, strides: tuple[int, ...]) -> Run:
    if isinstance(run, ByAddress):
        launch = run.launch
        return ByAddress(lambda tensors, addresses: _with_strides(launch(tensors, addresses), strides))
    return lambda x, weight, bias, operands: _with_strides(run(x, weight, bias, operands), strides)


def _posed(key: Key, problem: Problem) -> Key:
    """The second key of a plan: the problem, `strict`, TF32 and the default dtype.

    Calls with different look-up keys may have the same problem. They then share one plan.
    """
    return (problem, *key[3:4], *key[6:8])


# ---------------------------------------------------------------------------------------------- making


def _new_draft(problem: Problem, strict: bool) -> Draft:
    """`_draft`. If something must be compiled for it, what the call needs later is compiled at the same time."""
    this = ahead.of_this_call()
    if this is None or _is_bound_to_this_thread():
        return _draft(problem, strict)
    if not this.has_begun:
        plan = _at_hand(problem, strict)
        if plan is not None:
            return lambda: plan
    return this.draft(problem, strict, _draft)


def _is_bound_to_this_thread() -> bool:
    """Whether plans depend on what only this thread knows: a described GPU, a package, a capture, what may compile."""
    return (
        gpu.standing_in() is not None
        or packaged.this_call() != (None, False)
        or stream_capture.is_underway()
        or not build.may_build()
    )


def _draft(problem: Problem, strict: bool) -> Draft:
    """The draft of `problem`: its kernels, or torch's reference and the reason for it, which raises if `strict`."""
    try:
        draft = _compiled(problem, strict)
    except Exception as error:
        return _instead(problem, strict, error)

    def decide() -> Plan:
        try:
            return draft()
        except Exception as error:
            return _instead(problem, strict, error)()

    return decide


def _drafts(problems: Sequence[Problem], strict: bool) -> list[Draft]:
    """The drafts of several problems, whose kernels compile together."""
    if len(problems) == 1 or _is_bound_to_this_thread():
        return [_draft(problem, strict) for problem in problems]
    with ThreadPoolExecutor(len(problems)) as pool:
        return list(pool.map(functools.partial(_draft, strict=strict), problems))


def _compiled(problem: Problem, strict: bool) -> Draft:
    """The kernels for `problem`.

    Raises UnsupportedError, ToolchainError or BuildError. Any other exception is a mistake of fxfuse.
    """
    if 0 in (*problem.x.shape, *(problem.weight.shape if problem.weight else ())):
        raise Declined("a tensor is empty")
    acc = anchor_meta(problem)  # first, so that torch's own errors come first
    _check_tensors(problem)
    if problem.kind == "gated_linear":
        return _draft_gated(problem, acc, strict)
    parts = None if problem.is_chain else split.split(problem, acc)
    if parts is not None:
        if problem.pool:
            raise Separate("operands enlarge the result")
        first, *rest = _drafts([parts.first, parts.second] if parts.has_chain else [parts.first], strict)
        return split.draft(parts, first, rest[0] if rest else None)
    smaller = without_unread(problem, acc)
    if smaller is not None:
        return _choosing(problem, _draft(smaller[0], strict), smaller[1])
    return _device_draft(problem, acc)


def _instead(problem: Problem, strict: bool, error: Exception) -> Draft:
    """The draft of `problem` after planning raised `error`: torch runs it, or a kernel and then torch's pooling.

    Raises `error` if the caller must hear of it.
    """
    if isinstance(error, Separate):
        return _then_pooled(_draft(dataclasses.replace(problem, pool=()), strict), problem.pool)
    if isinstance(error, UnsupportedError):
        if strict and not isinstance(error, Refused | Declined):
            raise UnsupportedError(f"{problem.label}: {error}") from None
        return _reference_draft(problem, str(error))
    if strict or not _is_ours(error):
        try:
            raise error
        finally:
            del error  # as in `_run_instead`
    _warn_once(problem, error)
    return _reference_draft(problem, _said_of(error))


_NOT_OURS: Final = (ExpressionError, build.NotBuilt, torch.cuda.OutOfMemoryError)
"""Exceptions that the caller must see: an invalid epilogue, `build.built_only`'s answer, a GPU out of memory."""


def _is_ours(error: Exception) -> bool:
    """Whether torch may run the region after a kernel failed with `error`."""
    return not isinstance(error, _NOT_OURS)


def _said_of(error: Exception) -> str:
    """What the report says of `error`."""
    text = first_line(error)
    return text if isinstance(error, FxfuseError) else f"{type(error).__name__}: {text}"


def _choosing(problem: Problem, draft: Draft, indices: Sequence[int]) -> Draft:
    """`draft`, which takes only the operands at `indices`, as a draft of `problem`, which has all of them."""
    first = 1 + (problem.weight is not None)
    bias = [] if problem.bias is None else [first + len(problem.operands)]
    positions = [*range(first), *(first + index for index in indices), *bias]

    def chosen(run: Run) -> Run:
        if isinstance(run, ByAddress):
            launch = run.launch
            return ByAddress(
                lambda tensors, at: launch(tuple(tensors[i] for i in positions), [at[i] for i in positions])
            )
        return lambda x, weight, bias, operands: run(x, weight, bias, [operands[index] for index in indices])

    def decide() -> Plan:
        plan = draft()
        run = problem.reference if plan.kernel is None else chosen(plan.run)
        return dataclasses.replace(plan, run=run, computes=None)

    return decide


def _device_draft(problem: Problem, acc: torch.Tensor) -> Draft:
    if problem.x.device.type == "cuda":
        from fxfuse.cuda.plan import draft
    else:
        from fxfuse.cpu.plan import draft
    with build.noted() as sources:
        made = draft(problem, acc)

    def decide() -> Plan:
        plan = made()
        return plan if plan.sources else dataclasses.replace(plan, sources=tuple(sources))

    return decide


def _draft_gated(problem: Problem, acc: torch.Tensor, strict: bool) -> Draft:
    if problem.pool:
        raise Separate("only convolutions and max-pooling share a pass")
    named = operand_count(problem.expression)
    if len(problem.operands) > named + 1:  # unread operands behind the gate's bias
        left = range(named + 1)
        smaller = dataclasses.replace(problem, operands=problem.operands[: named + 1])
        return _choosing(problem, _draft(smaller, strict), left)
    parts = gated.split(problem)

    def apart() -> Draft:
        return gated.draft(problem, parts, *_drafts([parts.first, parts.second], strict))

    if problem.x.device.type != "cuda":
        return apart()
    from fxfuse.cuda.plan import draft_gated

    return draft_gated(problem, acc, apart)


def _then_pooled(draft: Draft, pool: tuple[Any, ...]) -> Draft:
    """`draft` followed by torch's pooling."""

    def decide() -> Plan:
        plan = draft()

        def run(
            x: torch.Tensor, weight: object, bias: torch.Tensor | None, operands: Sequence[torch.Tensor]
        ) -> torch.Tensor:
            return pooled(plan.run(x, weight, bias, operands), pool)

        kernel = None if plan.kernel is None else f"{plan.kernel} + max_pool2d by torch"
        return dataclasses.replace(plan, run=run, kernel=kernel, computes=None)

    return decide


def _reference_draft(problem: Problem, reason: str) -> Draft:
    logger.info("fxfuse: %s runs in torch: %s", problem.label, reason)
    plan = Plan(problem.reference, None, reason)
    return lambda: plan


def _check_tensors(problem: Problem) -> None:
    anchored = () if problem.is_chain else (problem.x, problem.weight, problem.bias)
    for tensor in (tensor for tensor in anchored if tensor is not None):
        if tensor.dtype != problem.x.dtype:
            # some of torch's normalisations accept mixed dtypes
            error = Refused if problem.kind in PRODUCTS else UnsupportedError
            raise error(f"tensors of {problem.x.dtype} and {tensor.dtype} meet in one {problem.kind}")
        if tensor.dtype not in RESULT_DTYPES:
            raise UnsupportedError(f"kernels have float32, float16 and bfloat16, not {tensor.dtype}")
        if tensor.device != problem.x.device:
            raise UnsupportedError(f"tensors on {problem.x.device} and {tensor.device} meet in one {problem.kind}")
    for operand in problem.operands:
        if operand.device != problem.x.device and not (operand.device.type == "cpu" and operand.shape == ()):
            raise UnsupportedError(f"an operand is on {operand.device}, the anchor on {problem.x.device}")


_warned: set[str] = set()


def _warn_once(problem: Problem, error: Exception) -> None:
    """Issues a FxfuseWarning about `error`, once for each text."""
    text = str(error)
    if not isinstance(error, ToolchainError | BuildError):
        text = f"{problem.label}: {type(error).__name__}: {text}\nThis is a mistake of fxfuse; please report it."
        logger.info("fxfuse: %s", text, exc_info=error)
    if text not in _warned:
        _warned.add(text)
        warnings.warn(f"fxfuse: {text}\nThe model runs as torch runs it.", FxfuseWarning, stacklevel=6)
