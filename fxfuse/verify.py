"""verify(): the optimised model's error against float64, beside eager's own."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxfuse.arguments import Inputs, arguments_of
from fxfuse.module import changes_since
from fxfuse.state import RandomState, called_unchanged, seed

ALLOWANCE: Final = 2.0
"""The largest ratio of the error to eager's that is ok, for results of many numbers. Both are one sample of rounding
noise. After fifty layers of a correct network, their ratio was between 0.7 and 1.5 over a few seeds."""
DEVIATIONS: Final = 3.0
"""The same for results of few numbers: how many standard deviations the ratio's logarithm may be above its mean. For
errors of `count` independent numbers, one deviation is 1 / sqrt(count). A result of one number may err by 20 times what
eager happened to err by."""


@dataclass(frozen=True)
class Verification:
    """The outcome of comparing an optimised model with the original; true in a condition if it is ok.

    Errors are relative Frobenius norms, ‖y - y64‖ / ‖y64‖, against the original model in float64 on the same device. If
    there are several outputs, they are those of the output with the largest error.
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


def verify(
    model: nn.Module, fast: nn.Module, inputs: Inputs | None = None, *, kwargs: Mapping[str, Any] | None = None
) -> Verification:
    """Compares the results of `fast` and `model` for the same arguments, and both with the model in float64.

    It is ok if structure, dtypes and shapes are equal, NaN and ±inf stand in the same places, and the error is at most
    twice eager's own plus one ulp of the output's dtype, whatever precision torch's switches allow. Of an output of
    fewer than 19 numbers, eager's error may be small by luck: exp(3 / sqrt(numbers)) times is allowed there. Neither
    the models nor the inputs are changed.

    It is not ok, either, if something that decided the graph has changed since optimize(), in the model or the
    optimised one, and calls do not see it. The problem then names the module and the change.

    Args:
        inputs: a tuple of positional arguments, a dict of keyword arguments, or a tensor; tensors inside tuples, lists
            and dicts are understood.
        kwargs: keyword arguments beside positional ones.

    Raises FxfuseError if the inputs are something else, and whatever `model` raises.
    """
    call = arguments_of(inputs, kwargs, "inputs")
    double = copy.deepcopy(model).double()
    expected = _outputs(model, call)
    try:
        _outputs(fast, call)  # the first call may be torch's, while kernels compile
        actual = _outputs(fast, call)
    except Exception as reason:  # whatever a model may raise that the other one does not
        raised = f"it raises {type(reason).__name__}: {reason}, which the model does not"
        return Verification(False, math.nan, math.nan, _explained(raised, model, fast))
    exact = _outputs(double, pytree.tree_map_only(torch.Tensor, _to_float64, call))
    problem = _difference_in_kind(expected, actual)
    if problem is not None:
        return Verification(False, math.nan, math.nan, _explained(problem, model, fast))
    errors = [
        (_relative_error(have, right), _relative_error(want, right), torch.finfo(want.dtype).eps, want.numel())
        for want, have, right in zip(expected, actual, exact, strict=True)
        if isinstance(want, torch.Tensor) and want.is_floating_point()
    ]
    for error, eager_error, ulp, count in errors:
        allowed = max(ALLOWANCE, math.exp(DEVIATIONS / math.sqrt(max(count, 1))))
        if error > allowed * eager_error + ulp:
            problem = f"the error is {error / max(eager_error, ulp):.1f} times eager's own"
    error, eager_error, *_ = max(errors, default=(0.0, 0.0))
    explained = _explained(problem, model, fast)
    return Verification(explained is None, error, eager_error, explained)


def _explained(problem: str | None, model: nn.Module, fast: nn.Module) -> str | None:
    """`problem` with what has changed since optimize(), or with the remark that the two are different models."""
    changed = changes_since(fast, model)
    if changed and (problem is None or _is_of(model, fast)):
        listed = "; ".join(changed[:_LISTED]) + ("; ..." if len(changed) > _LISTED else "")
        since = f"changed since optimize(): {listed}; call fxfuse.optimize again"
        return since if problem is None else f"{problem}; {since}"
    if problem is not None and not _is_of(model, fast):
        return f"{problem}; the two are different models: verify takes a model and what fxfuse.optimize made of it"
    return problem


_LISTED: Final = 5
"""The most changes that are named."""


def _is_of(model: nn.Module, fast: nn.Module) -> bool:
    """Whether the tensors of both have the same names and shapes."""
    ours, theirs = (
        {name: tensor.shape for named in (whole.named_parameters(), whole.named_buffers()) for name, tensor in named}
        for whole in (getattr(module, "_orig_mod", module) for module in (model, fast))
    )
    return ours == theirs


def _outputs(model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any]:
    """The leaves of what one call returns."""
    randomness = RandomState()
    seed(0)  # dropout drops the same in every run
    try:
        return leaves_of(called_unchanged(model, *call))
    finally:
        randomness.restore()


def leaves_of(value: Any, inside: tuple[Any, ...] = ()) -> list[Any]:
    """The leaves of a value. An object that can only be equal to itself (a cache) stands for its attributes."""
    parts: list[Any]
    if dataclasses.is_dataclass(value):  # transformers' outputs are dictionaries, too
        parts = [getattr(value, item.name) for item in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value)
    elif not _has_equality(value) and hasattr(value, "__dict__"):
        parts = list(vars(value).values())
    else:
        return [value]
    if any(value is outer for outer in inside):
        return []
    return [leaf for part in parts for leaf in leaves_of(part, (*inside, value))]


def _has_equality(value: Any) -> bool:
    return any("__eq__" in vars(base) for base in type(value).__mro__[:-1])


def _to_float64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _difference_in_kind(expected: list[Any], actual: list[Any]) -> str | None:
    """The first difference, in words, that no tolerance covers; None if there is none.

    It is in the number, type, dtype or shape of the outputs, in values without a tolerance, or in where they are not
    finite.
    """
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


def _relative_error(output: torch.Tensor, exact: torch.Tensor) -> float:
    """‖output - exact‖ / ‖exact‖ over the elements that are finite in both."""
    finite = output.isfinite() & exact.isfinite()
    value, reference = output.detach().double()[finite], exact.detach().double()[finite]
    difference, norm = float((value - reference).norm()), float(reference.norm())
    return difference / norm if norm > 0 else difference
