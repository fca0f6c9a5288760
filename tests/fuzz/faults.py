"""Faults to plant, one at a time: what the fuzzer must find."""

from __future__ import annotations

import contextlib
import dataclasses
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from fxfuse import functional, operands, plans, problem, state
from fxfuse.cpu import codegen
from fxfuse.cpu import plan as cpu_plan
from fxfuse.expression import Call, Expr, rewrite
from fxfuse.module import FusedModule

Patch = tuple[Any, str, Callable[..., Any]]


def _strides(change: Callable[[list[int]], list[int]]) -> Patch:
    """Operands are read with other strides (batch, row, col)."""
    true = operands.OperandPlan.packed_strides

    def packed(self: operands.OperandPlan) -> bytes:
        numbers = list(struct.unpack(f"{len(true(self)) // 8}q", true(self)))
        changed = [one for i in range(0, len(numbers), 3) for one in change(numbers[i : i + 3])]
        return struct.pack(f"{len(changed)}q", *changed)

    return operands.OperandPlan, "packed_strides", packed


def _stale_shortcut() -> Patch:
    true = plans._shortcut

    def blind(*args: Any) -> Any:
        with mock.patch.object(torch, "is_grad_enabled", lambda: False):
            return true(*args)

    return plans, "_shortcut", blind


def _swapped_operands() -> Patch:
    true = plans.run

    def run(*args: Any, **options: Any) -> torch.Tensor:
        *first, given = args[:11]
        alike = len(given) == 2 and given[0].shape == given[1].shape and given[0].dtype == given[1].dtype
        return true(*first, given[::-1] if alike else given, *args[11:], **options)

    return plans, "run", run


def _overwritten() -> Patch:
    true = cpu_plan.plan_pass

    def plan_pass(posed: problem.Problem, acc: torch.Tensor) -> Any:
        chosen = true(posed, acc)
        fits = (acc.shape, acc.dtype, acc.stride()) == (chosen.shape, chosen.dtype, chosen.strides)
        return dataclasses.replace(chosen, in_place=True) if fits else chosen

    return cpu_plan, "plan_pass", plan_pass


def _frozen_parameter() -> Patch:
    true, kept = FusedModule._fxfuse_tensor, dict[Any, Any]()

    def first_read(self: FusedModule, module: Any, name: str) -> Any:
        return kept.setdefault((self, module, name), true(self, module, name))

    return FusedModule, "_fxfuse_tensor", first_read


def _copied_output() -> Patch:
    true = FusedModule.recompile

    def recompile(self: FusedModule) -> Any:
        code, forward = true(self), type(self).forward
        type(self).forward = lambda self, *args, **kwargs: (  # type: ignore[method-assign]
            pytree.tree_map_only(torch.Tensor, _copied, forward(self, *args, **kwargs))
        )
        return code

    return FusedModule, "recompile", recompile


def _copied(view: torch.Tensor) -> torch.Tensor:
    if not view._is_view() or 0 in view.stride():
        return view
    return view.new_empty_strided(view.shape, view.stride()).copy_(view)


def _shared_result() -> Patch:
    """All calls of a region have one result's memory, as a buffer would that is kept for the next call."""
    true, kept = plans.run, dict[Any, torch.Tensor]()

    def run(*args: Any, **options: Any) -> torch.Tensor:
        result = true(*args, **options)
        first = kept.setdefault((args[4], result.shape, result.dtype, result.stride()), result)
        return first if first is result or first.is_inference() else first.copy_(result)

    return plans, "run", run


def _wrong_type() -> Patch:
    true = cpu_plan._apply

    def apply(chosen: Any, acc: torch.Tensor, given: Any) -> torch.Tensor:
        return true(dataclasses.replace(chosen, after=chosen.before), acc, given)

    return cpu_plan, "_apply", apply


def _missing_cast() -> Patch:
    true = codegen.generate

    def generate(expression: Expr, *args: Any) -> str:
        def uncast(node: Expr) -> Expr:
            return node.args[0] if isinstance(node, Call) and node.op in ("half", "bfloat16") else node

        return true(rewrite(expression, uncast), *args)

    return codegen, "generate", generate


def _no_hooks() -> Patch:
    return sys.modules["fxfuse.module"], "_watching", lambda forward: forward


FAULTS: dict[str, Callable[[], Patch]] = {
    "a stale short cut": _stale_shortcut,
    "a wrong stride": lambda: _strides(lambda three: [0, 0, 0]),
    "a wrong broadcast": lambda: _strides(lambda three: [three[0], 0, three[2]]),
    "a dropped bias": lambda: (problem.ANCHORS, "linear", lambda x, weight, bias: F.linear(x, weight)),
    "a missing cast": _missing_cast,
    "a wrong result type": _wrong_type,
    "swapped operands": _swapped_operands,
    "an overwritten value": _overwritten,
    "a frozen random draw": lambda: (state.RandomState, "is_present", lambda self: True),
    "a constant instead of a parameter": _frozen_parameter,
    "a lost gradient": lambda: (functional, "_needs_gradient", lambda tensors: False),
    "a hook not called": _no_hooks,
    "a broken alias": _copied_output,
    "a shared result": _shared_result,
    "a mode not noticed": lambda: (FusedModule, "_retrace", lambda self: None),
    "strides not restored": lambda: (plans, "_with_strides", lambda result, strides: result),
}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Inside, fxfuse has the fault; in all of its modules that import what is patched."""
    owner, attribute, instead = FAULTS[name]()
    with contextlib.ExitStack() as stack:
        if isinstance(owner, dict):
            stack.enter_context(mock.patch.dict(owner, {attribute: instead}))
        else:
            true = getattr(owner, attribute)
            stack.enter_context(mock.patch.object(owner, attribute, instead))
            for module_name, module in list(sys.modules.items()):
                if module_name.startswith("fxfuse.") and vars(module).get(attribute) is true:
                    stack.enter_context(mock.patch.object(module, attribute, instead))
        yield
