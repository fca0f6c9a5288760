"""verify(): the optimised model's error against float64, beside eager's own."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxfuse.cuda.precision import tf32_allowed

ALLOWANCE: Final = 1.25
"""How much larger than eager's the error may be: both are one sample of rounding noise."""

TF32_ERROR: Final = 2.0**-10
"""Error that TF32's 11 significant bits may cause, where torch's switches allow TF32 for the model's float32."""


@dataclass(frozen=True)
class Verification:
    """The outcome of comparing an optimised model with the original; true in a condition if it is ok.

    Errors are relative Frobenius norms, ‖y - y64‖ / ‖y64‖ over all floating outputs, against the original model run
    in float64 on the same device.
    """

    ok: bool
    error: float
    eager_error: float
    problem: str | None
    """What is wrong, in words, if it is not ok."""

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        verdict = "ok" if self.ok else f"NOT OK: {self.problem}"
        return f"{verdict}: error {self.error:.2e} against float64, eager's own {self.eager_error:.2e}"


def verify(model: nn.Module, fast: nn.Module, inputs: Sequence[Any]) -> Verification:
    """Compares `fast(*inputs)` with `model(*inputs)`, and both with the model in float64.

    It is ok if structure, dtypes and shapes are equal, NaN and ±inf stand in the same places, and the error is at most
    1.25 times eager's own plus one ulp of the output's dtype. Where torch's switches allow TF32 (for convolutions they
    do by default), eager still computes small problems exactly and large ones not; a float32 model on a GPU is then ok
    up to an error of 2^-10. Neither the models nor the inputs are changed.

    Args:
        inputs: positional arguments; tensors inside tuples, lists and dicts are understood.
    """
    with torch.no_grad():
        expected = _outputs(model, inputs)
        actual = _outputs(fast, inputs)
        exact = _outputs(_as_float64(model), pytree.tree_map(_to_float64, list(inputs)))
    problem = _difference_in_kind(expected, actual)
    if problem is not None:
        return Verification(False, float("nan"), float("nan"), problem)
    floating = [i for i, want in enumerate(expected) if isinstance(want, torch.Tensor) and want.is_floating_point()]
    error = _relative_error([actual[i] for i in floating], [exact[i] for i in floating])
    eager_error = _relative_error([expected[i] for i in floating], [exact[i] for i in floating])
    ulp = max((torch.finfo(expected[i].dtype).eps for i in floating), default=0.0)
    bound = ALLOWANCE * eager_error + ulp
    if _may_use_tf32(model, expected):
        bound = max(bound, TF32_ERROR)
    if error > bound:
        problem = f"the error is {error / max(eager_error, ulp):.1f} times eager's own"
    return Verification(problem is None, error, eager_error, problem)


def _may_use_tf32(model: nn.Module, outputs: Sequence[Any]) -> bool:
    if not any(isinstance(out, torch.Tensor) and out.is_cuda and out.dtype == torch.float32 for out in outputs):
        return False
    products, convolutions = tf32_allowed()
    has_convolutions = any(isinstance(module, nn.Conv2d) for module in model.modules())
    return products or (convolutions and has_convolutions)


def _outputs(model: nn.Module, inputs: Sequence[Any]) -> list[Any]:
    copies = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, list(inputs))
    leaves: list[Any] = pytree.tree_leaves(model(*copies))
    return leaves


def _to_float64(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _as_float64(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double()


def _difference_in_kind(expected: list[Any], actual: list[Any]) -> str | None:
    """What no tolerance covers: number, type, dtype and shape of the outputs, and where they are not finite."""
    if len(expected) != len(actual):
        return f"{len(actual)} outputs instead of {len(expected)}"
    for index, (want, have) in enumerate(zip(expected, actual, strict=True)):
        if type(want) is not type(have):
            return f"output {index} is a {type(have).__name__} instead of a {type(want).__name__}"
        if not isinstance(want, torch.Tensor):
            if want != have:
                return f"output {index} is {have!r} instead of {want!r}"
            continue
        if (want.dtype, want.shape) != (have.dtype, have.shape):
            return f"output {index} is {have.dtype} {tuple(have.shape)} instead of {want.dtype} {tuple(want.shape)}"
        if not want.is_floating_point():
            if not torch.equal(want, have):
                return f"output {index} of {want.dtype} differs"
        elif not torch.equal(want.isnan(), have.isnan()):
            return f"output {index} has NaN in other places"
        elif not torch.equal(want.isinf(), have.isinf()) or not torch.equal(want[want.isinf()], have[want.isinf()]):
            return f"output {index} has infinities in other places"
    return None


def _relative_error(outputs: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """‖outputs - exact‖ / ‖exact‖ over all elements that are finite in both."""
    difference = norm = 0.0
    for output, reference in zip(outputs, exact, strict=True):
        value, reference = output.double(), reference.double()
        finite = value.isfinite() & reference.isfinite()
        difference += float((value - reference)[finite].square().sum())
        norm += float(reference[finite].square().sum())
    return math.sqrt(difference / norm) if norm > 0 else math.sqrt(difference)
