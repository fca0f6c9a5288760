"""Runs a gated linear as two problems, wherever one kernel for both weights cannot run or is no faster.

act(linear(x, w)) * linear(x, v) can be two regions, one for each linear, where the second reads the first one's result.
Its parts run like that. patterns/gated.py puts them together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxfuse import ops
from fxfuse.expression import Acc, Call, Expr, Operand, depends_on_acc, postorder, rewrite
from fxfuse.problem import Draft, Plan, Problem, TensorMeta, anchor_meta, evaluate_all, gate_of, in_turn
from fxfuse.split import renumbered

_PRODUCT = Operand(0)
"""The operand that stands for the product with the second weight in a gated linear's epilogue."""
_FIRST = -1
"""Sentinel operand index: the first part's result."""


@dataclass(frozen=True)
class Parts:
    """A gated linear's two linears."""

    first: Problem
    """The linear of the second weight, with the operations that need its result alone."""
    second: Problem
    first_operands: tuple[int, ...]
    """The indices, in the whole problem, of each part's operands; _FIRST stands for the first part's result."""
    second_operands: tuple[int, ...]
    biased: bool
    """Whether the first part has a bias."""


def split(problem: Problem) -> Parts:
    """The parts of a gated linear. Raises Refused."""
    gate, gate_bias, _ = gate_of(problem.expression, problem.operands)
    cut = _cut(problem.expression)
    alone, first_operands = renumbered(rewrite(cut, lambda node: Acc() if node is _PRODUCT else node))
    rest, second_operands = renumbered(rewrite(problem.expression, lambda n: Operand(_FIRST) if n is cut else n))
    chosen = tuple(problem.operands[index] for index in first_operands)
    part = dataclasses.replace(problem, kind="linear", options=(), written=None)
    first = dataclasses.replace(part, epilogue=str(alone), weight=gate, bias=gate_bias, operands=chosen)
    result = evaluate_all(first, anchor_meta(first))[first.expression]
    meta = TensorMeta.of(result, problem.x.device)
    others = tuple(meta if index == _FIRST else problem.operands[index] for index in second_operands)
    second = dataclasses.replace(part, epilogue=str(rest), operands=others)
    return Parts(first, second, first_operands, second_operands, gate_bias is not None)


def _cut(epilogue: Expr) -> Expr:
    """What the first part computes: all that needs its product alone, if that makes one value, else the product."""
    nodes = list(postorder(epilogue))
    alone = {node for node in nodes if _PRODUCT in postorder(node) and not depends_on_acc(node)}
    met = {arg for node in nodes if isinstance(node, Call) and node not in alone for arg in node.args if arg in alone}
    return met.pop() if len(met) == 1 and not any(map(ops.is_boolean, met)) else _PRODUCT


def draft(problem: Problem, parts: Parts, first: Draft, second: Draft) -> Draft:
    """Runs the first part, then the second."""

    def decide() -> Plan:
        one, other = first(), second()
        expected = parts.second.operands[parts.second_operands.index(_FIRST)]

        def run(
            x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, operands: Sequence[torch.Tensor]
        ) -> torch.Tensor:
            gate_bias = operands[-1] if parts.biased else None
            result = one.run(x, operands[0], gate_bias, [operands[index] for index in parts.first_operands])
            if result.stride() != expected.strides:  # meta tensors predict other strides for some layouts
                return problem.reference(x, weight, bias, operands)
            others = [result if index == _FIRST else operands[index] for index in parts.second_operands]
            return other.run(x, weight, bias, others)

        return in_turn(one, other, run)

    return decide
