"""Plans a problem without an anchor as one pass: over x in place, or into a new tensor with x as a further operand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxfuse.errors import UnsupportedError
from fxfuse.expression import Acc, Call, Expr, Operand, depends_on_acc, postorder, rewrite
from fxfuse.layout import Strides, flatten, is_overlapping
from fxfuse.operands import OperandPlan, plan_operands
from fxfuse.problem import Declined, Problem, Refused, channel_operands, check_operand, settle


@dataclass(frozen=True)
class Pass:
    """What a pass computes, and where it writes the result."""

    expression: Expr
    """With its dtypes settled. It reads operands alone unless the pass is in place."""
    operands: OperandPlan
    """The problem's operands, followed by x if `reads_x`."""
    shape: tuple[int, ...]
    strides: Strides
    dtype: torch.dtype
    in_place: bool
    reads_x: bool
    """Whether x is read as a further operand: not if the pass is in place, nor if only x's dtype counts."""

    @property
    def name(self) -> str:
        """The name in the report: every kernel that the pass takes."""
        name = "one pass in place" if self.in_place else "one pass"
        return f"{name}, operands copied: {self.operands.copies}" if self.operands.copies else name


def plan_pass(problem: Problem, acc: torch.Tensor) -> Pass:
    """Plans the pass of `problem` over an x that is like the meta tensor `acc`.

    Raises UnsupportedError; Declined (one of them) where eager's own passes are no worse.
    """
    expression, result = _settle(problem, acc)
    if result.numel() == 0:
        raise Declined("the result is empty")
    shape, strides = tuple(result.shape), result.stride()
    in_place = (
        dict(problem.options)["overwrite"]
        and (acc.shape, acc.dtype) == (result.shape, result.dtype)
        and all(size == 1 or have == want for size, have, want in zip(shape, acc.stride(), strides, strict=True))
    )
    if is_overlapping(shape, strides):
        raise UnsupportedError(f"elements of the result share memory: it has strides {strides}")
    metas = problem.operands
    reads_x = not in_place and depends_on_acc(expression)
    if reads_x:
        check_operand(problem.x)
        x = Operand(len(metas))
        expression = rewrite(expression, lambda node: x if isinstance(node, Acc) else node)
        metas = (*metas, problem.x)
    channel = channel_operands(expression)
    operands = plan_operands(shape, strides, metas, channel, flatten)
    if operands is None:
        raise UnsupportedError(f"the result has strides {strides}")
    if operands.copies and shape[:1] == (1,):  # a kernel for this batch alone may need no copies
        operands = plan_operands(shape, strides, metas, channel, flatten, grows=False) or operands
    chosen = Pass(expression, operands, shape, strides, result.dtype, in_place, reads_x)
    copies = operands.copies
    calls = sum(isinstance(node, Call) for node in postorder(problem.expression))
    if copies and copies + 1 >= max(2, calls):
        raise Declined(f"it would take {copies} copies beside the pass: operands lie in memory in too many orders")
    return chosen


def _settle(problem: Problem, acc: torch.Tensor) -> tuple[Expr, torch.Tensor]:
    """As problem.settle, but a chain without floating-point inputs that it does not support raises Declined."""
    try:
        return settle(problem, acc)
    except Refused:
        raise
    except UnsupportedError as error:
        if any(meta.dtype.is_floating_point for meta in (problem.x, *problem.operands)):
            raise
        raise Declined(str(error)) from None
