"""Steps of training as benchmarks compare them: forward, loss, backward; there is no optimiser.

The loss is the mean square distance of what the model returns from a wave. Errors are those of all parameters'
gradients, as a part of their norm: some gradients are nothing but rounding (that of a bias before a BatchNorm), and
have no error of their own.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from contestants import APART, Call
from torch import nn

import fxfuse
from fxfuse.verify import leaves_of

CALLS = 6
"""Steps after which all that is compiled is there: fxfuse makes a step at the second, of models that Dynamo captures at
the fourth, and its programs at the one after that."""
_DROPS = re.compile("drop|stochastic_?depth", re.IGNORECASE)
"""In names of what leaves values out at random, and of its probabilities."""


def step(parameters: Sequence[nn.Parameter], forward: Call) -> list[torch.Tensor]:
    """The loss and the gradients of the parameters that have one, in their order."""
    for parameter in parameters:
        parameter.grad = None
    loss = loss_of(forward())
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in parameters if parameter.grad is not None)]


def loss_of(result: Any) -> torch.Tensor:
    """A number that all that a model returns decides."""
    losses = [_distance(torch.atleast_1d(leaf)) for leaf in leaves_of(result) if _has_gradients(leaf)]
    return torch.stack(losses).sum()


def _distance(tensor: torch.Tensor) -> torch.Tensor:
    """Mean square distance from a wave along the last dimension.

    The mean square alone is the same whatever comes before a normalisation: gradients there would be only rounding.
    """
    wave = torch.arange(tensor.shape[-1], device=tensor.device, dtype=torch.float32).cos()
    return (tensor - wave).square().mean()


def _has_gradients(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def autocast(device: torch.device, enabled: bool) -> contextlib.AbstractContextManager[Any]:
    """Around a forward in bfloat16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def without_dropout(model: nn.Module) -> None:
    """Sets the probabilities to nothing in modules and in configurations, so that gradients can be compared."""
    for owner in [item for module in model.modules() for item in (module, getattr(module, "config", None))]:
        drops = _DROPS.search(type(owner).__name__)
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if isinstance(value, float) and (_DROPS.search(name) or (drops and name == "p")):
                setattr(owner, name, 0.0)


def error(expected: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> float:
    """How far the tensors of `made` are from those expected, as a part of the norm of all."""
    if len(expected) != len(made):
        return math.inf
    apart = sum(_square(have.double() - want.double()) for want, have in zip(expected, made, strict=True))
    return math.sqrt(apart) / max(math.sqrt(sum(map(_square, expected))), 1e-30)


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum())


def left_to_torch(report: fxfuse.Report) -> str:
    """Why fxfuse leaves gradients to torch, if it does."""
    reasons = [line for line in report.training if "come from torch" in line]
    return "; ".join(reasons) if report.training else "gradients come from torch: it has no steps"


def explained(eager_error: float) -> float:
    """How far two contestants' gradients may be apart by rounding, as a part of their norm: some networks with random
    weights make much of it, eager's own gradients are as far from float64's."""
    return max(APART, 2 * eager_error)
