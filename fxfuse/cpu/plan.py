"""How a region runs on a CPU: the anchor by torch, then one generated pass over its result, in place.

A chain is only a pass. The pass is the epilogue vectorised over the result's memory (cpu/kernels/pointwise.h), with
torch's number of threads. If the epilogue changes the dtype, the result is converted by torch: before the pass to a
wider dtype, after it to a narrower one, so that nothing is rounded twice.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxfuse import build, events
from fxfuse.chain import plan_pass
from fxfuse.cpu import codegen
from fxfuse.cpu.codegen import MANY_TIMES, SLOW
from fxfuse.errors import UnsupportedError
from fxfuse.expression import Acc, Call, Expr, postorder
from fxfuse.layout import flatten
from fxfuse.operands import Addresses, OperandPlan, plan_operands
from fxfuse.pooling import Separate
from fxfuse.problem import (
    Declined,
    Draft,
    Pass,
    Plan,
    Problem,
    anchor_alone,
    channel_operands,
    evaluate_all,
    run_anchor,
    typed,
)
from fxfuse.reference import evaluate


@dataclass(frozen=True)
class _Pass:
    """The generated pass for a result of one layout."""

    launch: build.Launch
    params: bytes
    addresses: Addresses
    before: torch.dtype
    """Dtype in which the pass works; the anchor's result is converted to it first."""
    after: torch.dtype
    """The result's dtype."""


_empty_strided = events.noting(torch.empty_strided)


def _make_pass(problem: Problem, acc: torch.Tensor) -> _Pass:
    meta = torch.empty_strided(acc.shape, acc.stride(), dtype=acc.dtype, device="meta")
    expression, after = typed(problem, meta)
    before = after if after.itemsize > acc.dtype.itemsize else acc.dtype
    operands = plan_operands(acc.shape, acc.stride(), problem.operands, channel_operands(expression), flatten)
    if operands is None:
        raise UnsupportedError(f"the anchor's result has strides {acc.stride()}")
    return _Pass(*_compiled(problem, expression, before, operands), operands.addresses(), before, after)


def _compiled(
    problem: Problem, expression: Expr, dtype: torch.dtype, operands: OperandPlan
) -> tuple[build.Launch, bytes]:
    """The compiled pass that writes a result of that dtype, and its params: the sizes, and all strides."""
    launch = build.load(build.Source(codegen.generate(expression, dtype, operands.kinds), None, problem.label))
    layout = operands.layout
    params = struct.pack("5q", *layout.sizes, layout.strides[0][0], layout.strides[0][1])
    return launch, params + operands.packed_strides()


def _apply(chosen: _Pass, acc: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    if acc.dtype != chosen.before:
        acc = acc.to(chosen.before)
    pointers, _kept = chosen.addresses(operands)
    if events.recording:
        events.note_launch(chosen.launch, chosen.params, (acc.data_ptr(), *pointers))
    chosen.launch(chosen.params, torch.get_num_threads(), acc.data_ptr(), *pointers)
    return acc if chosen.before == chosen.after else acc.to(chosen.after)


def draft(problem: Problem, acc: torch.Tensor) -> Draft:
    """Compiles the pass for `problem`, whose anchor's result is like the meta tensor `acc`.

    Raises UnsupportedError, ToolchainError or BuildError. Raises Separate for a problem with pooling, since torch pools
    as fast as a generated pass would.
    """
    if problem.pool:
        raise Separate("torch pools")
    if problem.is_chain:
        return _draft_chain(problem, acc)
    if isinstance(problem.expression, Acc):
        alone = Plan(anchor_alone(problem), f"{problem.kind} by torch")
        return lambda: alone
    passes: dict[tuple[int, ...], _Pass | None] = {acc.stride(): _make_pass(problem, acc)}
    name = f"{problem.kind} by torch + one pass"

    def run(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, operands: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        acc = run_anchor(problem.kind, problem.options, x, weight, bias)
        if acc.stride() not in passes:  # torch's meta kernel predicts other strides for some layouts
            try:
                passes[acc.stride()] = _make_pass(problem, acc)
            except UnsupportedError:
                passes[acc.stride()] = None
        chosen = passes[acc.stride()]
        return evaluate(problem.expression, acc, operands) if chosen is None else _apply(chosen, acc, operands)

    plan = Plan(run, name, computes=Pass(typed(problem, acc)[0], False, "library"))
    return lambda: plan


def _computed_again(problem: Problem, acc: torch.Tensor, elements: int) -> str | None:
    """The slow function whose values a pass would each compute for MANY_TIMES elements or more; None if there is none.

    Rotary positions are an example: the cosines of a few angles, for all heads and tokens.
    """
    most = elements // MANY_TIMES
    slow = [node for node in postorder(problem.expression) if isinstance(node, Call) and node.op in SLOW]
    if not slow or min(acc.numel(), *(math.prod(operand.shape) for operand in problem.operands), elements) > most:
        return None
    values = evaluate_all(problem, acc)
    small = (node.op for node in slow if isinstance(values[node], torch.Tensor) and values[node].numel() <= most)
    return next(small, None)


def _draft_chain(problem: Problem, acc: torch.Tensor) -> Draft:
    chosen = plan_pass(problem, acc)
    slow = _computed_again(problem, acc, math.prod(chosen.shape))
    if slow is not None:
        raise Declined(f"{slow} of a small tensor would be computed for every element of the result")
    launch, params = _compiled(problem, chosen.expression, chosen.dtype, chosen.operands)
    addresses, in_place, reads_x = chosen.operands.addresses(), chosen.in_place, chosen.reads_x
    shape, strides, dtype = chosen.shape, chosen.strides, chosen.dtype

    def run(x: torch.Tensor, weight: object, bias: object, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        out = x if in_place else _empty_strided(shape, strides, dtype=dtype)
        pointers, _kept = addresses((*operands, x) if reads_x else operands)
        if events.recording:
            events.note_launch(launch, params, (out.data_ptr(), *pointers))
        launch(params, torch.get_num_threads(), out.data_ptr(), *pointers)
        return out

    plan = Plan(run, chosen.name)
    return lambda: plan
