"""Splits an epilogue whose operands enlarge the result.

The part that has the anchor's shape stays with the anchor. A pass computes the rest. So a gate with one value per
channel, times the tensor that it gates, is one kernel and one pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxfuse.expression import Acc, Call, Expr, Operand, depends_on_acc, postorder, rewrite
from fxfuse.problem import Draft, Plan, Problem, TensorMeta, evaluate_all, in_turn
from fxfuse.reference import evaluate


@dataclass(frozen=True)
class Split:
    """A problem in two parts. The x of the second is the first's result."""

    first: Problem
    second: Problem
    first_operands: tuple[int, ...]
    """The operands of each part, as indices of the whole problem's operands."""
    second_operands: tuple[int, ...]

    @property
    def has_chain(self) -> bool:
        """Whether the second part is worth a pass of ours instead of one operation of torch's.

        On a GPU even a single operation is. Its operands are broadcast, and torch's kernels then read element by
        element.
        """
        operations = sum(isinstance(node, Call) for node in postorder(self.second.expression))
        return operations > 1 or self.second.x.device.type == "cuda"


def split(problem: Problem, acc: torch.Tensor) -> Split | None:
    """`problem` in two parts if an operand enlarges its result; None if none does. Raises Refused.

    Args:
        acc: the anchor's result as a meta tensor.
    """
    value = evaluate_all(problem, acc)
    whole = problem.expression
    if value[whole].shape == acc.shape:
        return None
    cut = [node for node in value if depends_on_acc(node) and value[node].shape == acc.shape]
    for node in reversed(cut):
        rest = _without(whole, node)
        if rest is not None:
            meta = value[node]
            x = TensorMeta.of(meta, problem.x.device)
            first, first_operands = renumbered(node)
            second, second_operands = renumbered(rest)
            return Split(
                dataclasses.replace(
                    problem, epilogue=str(first), operands=_chosen(problem, first_operands), written=None
                ),
                Problem(
                    "pointwise", (("overwrite", False),), str(second), x, None, None, _chosen(problem, second_operands)
                ),
                first_operands,
                second_operands,
            )
    return None


def _without(whole: Expr, part: Expr) -> Expr | None:
    """`whole` as an expression of `part`, which becomes its acc; None if it needs more of the anchor's result."""
    stand_in = Operand(-1)
    rest = rewrite(whole, lambda node: stand_in if node is part else node)
    return None if depends_on_acc(rest) else rewrite(rest, lambda node: Acc() if node is stand_in else node)


def renumbered(expression: Expr) -> tuple[Expr, tuple[int, ...]]:
    """The expression with its operands renumbered from 0, and their former indices."""
    used = [node.index for node in postorder(expression) if isinstance(node, Operand)]
    numbers = {old: new for new, old in enumerate(used)}
    return rewrite(expression, lambda n: Operand(numbers[n.index]) if isinstance(n, Operand) else n), tuple(used)


def _chosen(problem: Problem, indices: Sequence[int]) -> tuple[TensorMeta, ...]:
    return tuple(problem.operands[index] for index in indices)


def draft(parts: Split, first: Draft, second: Draft | None) -> Draft:
    """A draft that runs the first part, then the second. Without a draft, the second part runs in torch."""

    def decide() -> Plan:
        expression, expected = parts.second.expression, parts.second.x

        def by_torch(x: torch.Tensor, weight: object, bias: object, operands: Sequence[torch.Tensor]) -> torch.Tensor:
            return evaluate(expression, x, operands)

        anchored = first()
        rest = Plan(by_torch, "one operation of torch's") if second is None else second()

        def run(
            x: torch.Tensor, weight: object, bias: torch.Tensor | None, operands: Sequence[torch.Tensor]
        ) -> torch.Tensor:
            acc = anchored.run(x, weight, bias, [operands[index] for index in parts.first_operands])
            others = [operands[index] for index in parts.second_operands]
            # meta tensors predict other strides for some layouts
            then = rest.run if acc.stride() == expected.strides else by_torch
            return then(acc, None, None, others)

        return dataclasses.replace(in_turn(anchored, rest, run), measured=anchored.measured)

    return decide
