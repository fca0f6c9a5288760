"""A region's meaning in torch: its epilogue evaluated with the op table's references.

This is the fallback when no kernel can run, the oracle of the tests, and the source of gradients. On meta tensors it
gives the dtype, shape and strides that a region's result has in eager.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from fxfuse import ops
from fxfuse.errors import ExpressionError
from fxfuse.expression import Acc, Call, Const, Expr, Operand, postorder


@functools.lru_cache(maxsize=4096)
def _in_order(expression: Expr) -> tuple[Expr, ...]:
    return tuple(postorder(expression))


_T = TypeVar("_T")


def operand_at(operands: Sequence[_T], index: int) -> _T:
    """The operand that an epilogue calls o<index>. Raises ExpressionError if the call has too few operands."""
    if index >= len(operands):
        raise ExpressionError(f"the epilogue reads o{index}, but the call has {len(operands)} operands")
    return operands[index]


def evaluate(expression: Expr, acc: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Evaluates `expression` on tensors: one torch call per node, each value computed once.

    Args:
        acc: the anchor's result, any shape and floating dtype.
        operands: tensors that broadcast with it, in the order of the expression's operand indices.
    """
    value: dict[Expr, Any] = {}
    for node in _in_order(expression):
        match node:
            case Acc():
                value[node] = acc
            case Operand(index):
                value[node] = operand_at(operands, index)
            case Const(number):
                value[node] = number
            case Call(op, args):
                value[node] = ops.row(op).reference(*(value[arg] for arg in args))
            case _:
                raise AssertionError(f"unknown expression node {type(node).__name__}")
    result = value[expression]
    assert isinstance(result, torch.Tensor), "an epilogue depends on acc, so it is a tensor"
    return result
