"""A problem prepared for a CUDA device: what all its candidates need to know."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxfuse import build
from fxfuse.cuda import codegen
from fxfuse.cuda.exactness import precision_of
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.prepare import Prepared
from fxfuse.expression import Acc, Expr, Operand, call, rewrite
from fxfuse.operands import OperandPlan
from fxfuse.problem import CONVOLUTIONS, Problem, TensorMeta, gate_of


@dataclass(frozen=True)
class Region:
    """A problem with its description for the kernel family and its typed epilogue."""

    problem: Problem
    capability: tuple[int, int]
    prepared: Prepared
    expression: Expr
    """The epilogue with explicit casts (problem.typed)."""
    output: torch.dtype
    channel: frozenset[int]
    """Indices of operands that are read along dimension 1 of the result."""

    @property
    def inputs(self) -> int:
        """How many of a call's tensors (problem.in_order) the fused kernel reads itself: x and the weights."""
        if self.prepared.weight is None:
            return 1
        return 3 if self.problem.kind == "gated_linear" else 2

    def load(self, kernel: Kernel, expression: Expr, operands: OperandPlan, uses_batch: bool) -> build.Launch:
        tf32 = precision_of(self.problem) == "tf32"
        text = codegen.generate(expression, self.output, operands.kinds, kernel, uses_batch, operands.columns, tf32)
        return build.load(build.Source(text, self.capability, f"{kernel.name} for {self.problem.label}"))

    def load_copy(self, kernel: Kernel, operands: OperandPlan) -> build.Launch:
        """Loads `kernel` as a pass that only copies, in x's dtype."""
        text = codegen.generate(Acc(), self.problem.x.dtype, (), kernel, columns=operands.columns)
        return build.load(build.Source(text, self.capability, f"{kernel.name}, copied for {self.problem.label}"))


def with_parameters(problem: Problem, expression: Expr) -> tuple[Expr, tuple[TensorMeta, ...]]:
    """The epilogue and operands after folding in the parameters that the fused kernel does not read itself.

    These are the bias, the gate's bias, and a LayerNorm's weight and bias. Operands are in the order of a call's
    tensors (problem.in_order): a LayerNorm's weight is the first operand, its bias the last.
    """
    if problem.kind == "gated_linear":
        return _with_product(problem, expression)
    if problem.kind != "layer_norm":
        return with_bias(problem, expression)
    metas, acc, first = problem.operands, Acc(), 0
    scaled: Expr = acc
    if problem.weight is not None:
        metas, scaled, first = (problem.weight, *metas), call("mul", acc, Operand(0)), 1
    if problem.bias is not None:
        metas, scaled = (*metas, problem.bias), call("add", scaled, Operand(len(metas)))

    def replaced(node: Expr) -> Expr:
        return scaled if isinstance(node, Acc) else Operand(node.index + first) if isinstance(node, Operand) else node

    return rewrite(expression, replaced), metas


def _with_product(problem: Problem, expression: Expr) -> tuple[Expr, tuple[TensorMeta, ...]]:
    """`with_parameters` for a gated linear: acc and one operand after the last are its two products, without biases."""
    _, gate_bias, metas = gate_of(problem.expression, problem.operands)
    biases: list[Expr] = []
    for bias in (gate_bias, problem.bias):
        if bias is not None:
            biases.append(Operand(len(metas)))
            metas = (*metas, bias)
    product: Expr = Operand(len(metas))
    acc: Expr = Acc()
    if problem.bias is not None:
        acc = call("add", acc, biases[-1])
    if gate_bias is not None:
        product = call("add", product, biases[0])

    def replaced(node: Expr) -> Expr:
        if isinstance(node, Operand):
            return product if node.index == 0 else Operand(node.index - 1)
        return acc if isinstance(node, Acc) else node

    return rewrite(expression, replaced), metas


def with_bias(problem: Problem, expression: Expr) -> tuple[Expr, tuple[TensorMeta, ...]]:
    """The epilogue and operands after folding in the bias, and addmm's alpha and beta. The bias is the last operand."""
    if problem.bias is None:
        return expression, problem.operands
    meta = problem.bias
    acc: Expr = Acc()
    bias: Expr = Operand(len(problem.operands))
    if problem.kind in CONVOLUTIONS:
        pixels = CONVOLUTIONS[problem.kind]
        shape, strides = (*meta.shape, *(1,) * pixels), (*meta.strides, *(0,) * pixels)
        meta = TensorMeta(shape, strides, meta.dtype, meta.device, meta.alignment)
    elif problem.kind == "addmm":
        scale = dict(problem.options)
        acc = acc if scale["alpha"] == 1 else call("mul", acc, scale["alpha"])
        if scale["beta"] == 0:  # torch then does not read the bias
            return _with_acc(expression, acc), problem.operands
        bias = bias if scale["beta"] == 1 else call("mul", bias, scale["beta"])
    return _with_acc(expression, call("add", acc, bias)), (*problem.operands, meta)


def _with_acc(expression: Expr, acc: Expr) -> Expr:
    return rewrite(expression, lambda node: acc if isinstance(node, Acc) else node)
