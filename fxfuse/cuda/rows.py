"""A region whose anchor is a LayerNorm, as one kernel of loops (loops.py): its rows' sums, and its epilogue.

It is the kernel that a program merges with its neighbours. Here it runs alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxfuse import build
from fxfuse.cuda import loops
from fxfuse.cuda.launch import by_address_on_device, empty_strided, on_device, queue_launch
from fxfuse.cuda.region import Region
from fxfuse.cuda.tune import Candidate
from fxfuse.errors import UnsupportedError
from fxfuse.layout import contiguous_strides
from fxfuse.problem import Pass, Run, TensorMeta
from fxfuse.program.loops import rows_pay
from fxfuse.program.operators import loops_of_layer_norm
from fxfuse.program.text import LoopsKernel
from fxfuse.program.values import Slot, Value


def candidate(region: Region) -> Candidate:
    """The kernel for a region whose anchor is a LayerNorm. Raises UnsupportedError where no kernel computes it."""
    problem = region.problem
    if any(meta.device != problem.x.device for meta in problem.operands):
        raise UnsupportedError("a number on the CPU, which a kernel of loops cannot read")
    copied = TensorMeta(problem.x.shape, contiguous_strides(problem.x.shape), problem.x.dtype, problem.x.device)
    found = next((one for one in (_Rows.of(region, x) for x in (problem.x, copied)) if one is not None), None)
    if found is None:
        raise UnsupportedError("no kernel of loops can compute it")
    name = f"layer_norm of {math.prod(dict(problem.options)['normalized_shape'])} elements"
    return Candidate(
        name, "layer_norm", lambda: _runner(region, name, found),
        computes=Pass(region.expression, False, "layer_norm"), form=found.kernel.form,
    )  # fmt: skip


@dataclass(frozen=True)
class _Rows:
    """A kernel for a region."""

    kernel: LoopsKernel
    slots: Sequence[Slot]
    """The memory of the result, and of the call's tensors (problem.in_order)."""
    x: TensorMeta
    """x as the kernel reads it: a copy, if it is not laid like the call's."""

    @staticmethod
    def of(region: Region, x: TensorMeta) -> _Rows | None:
        """None if a kernel cannot compute it, or would read slowly: where x's rows lie across each other, say."""
        problem, prepared = region.problem, region.prepared
        operands = [_value(meta) for meta in problem.operands]
        x_value, weight, bias = (None if meta is None else _value(meta) for meta in (x, problem.weight, problem.bias))
        slot = Slot("memory", "result")
        result = Value(slot, 0, prepared.result_shape, prepared.result_strides, region.output, "result")
        given = {"input": x_value, "weight": weight, "bias": bias, **dict(problem.options)}
        found = loops_of_layer_norm(region.expression, given, operands, result)
        kernel = loops.kernel(found) if found is not None and rows_pay(found) else None
        read = [value.slot for value in (x_value, weight, *operands, bias) if value is not None]
        return None if kernel is None else _Rows(kernel, [slot, *read], x)


def _value(meta: TensorMeta) -> Value:
    """A tensor of the call, in memory of its own."""
    slot = Slot("given", "", meta.shape, meta.strides, meta.dtype, alignment=meta.alignment)
    return Value(slot, 0, meta.shape, meta.strides, meta.dtype, "")


def _runner(region: Region, name: str, rows: _Rows) -> Run:
    problem, output = region.problem, region.output
    shape, strides = region.prepared.result_shape, region.prepared.result_strides
    source = build.Source(loops.source_of([rows.kernel]), region.capability, f"{name} for {problem.label}")
    queue = queue_launch(problem, name, build.load(source), rows.kernel.params)
    places = [(rows.slots.index(slot), offset) for slot, offset in rows.kernel.addresses]
    index = problem.x.device.index

    def by_address(tensors: tuple[torch.Tensor, ...], addresses: list[int]) -> torch.Tensor:
        out = empty_strided(shape, strides, output)
        memory = (out.data_ptr(), *addresses)
        queue([memory[place] + offset for place, offset in places])
        return out

    direct = by_address_on_device(index, by_address)
    if rows.x is problem.x:
        return direct

    def run(
        x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, others: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        return direct(x.contiguous(), weight, bias, others)

    return on_device(index, run)
