"""How far eager's own results move if each of its operations errs by one unit in the last place.

An optimised model rounds at other places than eager, adds in another order and computes functions by other formulas.
What it may differ by depends on the model: a difference of nearly equal numbers, or a sum that is zero but for
rounding, is all error. So eager runs again, several times, and every floating-point number that an operation computes
is moved to a neighbour, up or down at random, in forward and in backward, in the dtype that it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

SAMPLES = 24
"""Runs: what a rounding can do with probability 1/4 happens in one of them but for once in 1000 cases."""

_OTHERWISE: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    # the input's sign for zeros where torch goes element by element (the end of a tensor, a GPU, AOTAutograd), none in
    # vectors
    torch.ops.aten.softshrink.default: lambda x: torch.where(x == 0, torch.full_like(x, -0.0), x),
    # eager's sixth is that of float32 in float64, too
    torch.ops.aten.hardsigmoid_backward.default: lambda x: x * (2 - 6 * float(torch.tensor(6.0).reciprocal())),
    # of infinity NaN in vectors of float32 and bfloat16, infinity in float16 and element by element
    torch.ops.aten.gelu.default: lambda x: torch.where(x.isposinf(), torch.full_like(x, math.nan), x),
}
"""What torch computes now in one way, now in another: the other, of the one."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Perturbed(TorchDispatchMode):
    """Inside, what torch's operations compute is wrong by one unit in the last place."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._dice: dict[torch.device, torch.Generator] = {}  # the model's own random numbers stay what they are

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        given = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        computes = any(tensor.is_floating_point() or tensor.is_complex() for tensor in given)
        if not computes or torch.Tag.nondeterministic_seeded in func.tags or torch.Tag.inplace_view in func.tags:
            return result  # numbers that the model makes or draws
        for value, returned in zip(result if isinstance(result, tuple | list) else [result], returns, strict=False):
            is_view = returned.alias_info is not None and not returned.alias_info.is_write
            if not is_view:
                for tensor in pytree.tree_leaves(value):
                    self._move(tensor)
                    if func in _OTHERWISE:
                        tensor.copy_(_OTHERWISE[func](tensor))
        return result

    def _move(self, value: Any) -> None:
        """Moves each number of a tensor, in place; zeros, infinities and NaN stay."""
        if isinstance(value, torch.Tensor) and value.is_complex():
            value = torch.view_as_real(value)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
            return
        bits = value.detach().clone().view(_BITS[value.dtype.itemsize])
        if value.device not in self._dice:
            self._dice[value.device] = torch.Generator(value.device).manual_seed(self._seed)
        dice = self._dice[value.device]
        steps = torch.randint(0, 2, value.shape, generator=dice, device=value.device) * 2 - 1
        moved = (bits + steps.to(bits.dtype)).view(value.dtype)
        keep = (value == 0) | ~value.isfinite() | ~moved.isfinite()
        value.copy_(torch.where(keep, value, moved))


def explains(want: torch.Tensor, have: torch.Tensor, samples: Sequence[torch.Tensor]) -> bool:
    """Whether `have` is no farther from `want` than the perturbed results are, at most.

    The distance is the Frobenius norm over what is finite in all; where `have` is not finite and `want` is, or the
    other way around, one of the perturbed results must differ from `want` so, too.
    """
    want, have = want.double(), have.double()
    moved = [sample.detach().double() for sample in samples]
    changed = _kind(want) != _kind(have)
    could = torch.stack([_kind(sample) != _kind(want) for sample in moved]).any(0)
    if bool((changed & ~could).any()):
        return False
    finite = want.isfinite() & have.isfinite()
    distance = float((have - want)[finite].norm())
    bounds = [float((sample - want)[finite & sample.isfinite()].norm()) for sample in moved]
    return distance <= max(bounds)


def _kind(value: torch.Tensor) -> torch.Tensor:
    """0 for finite numbers, 1 and -1 for infinities, 2 for NaN."""
    return torch.where(value.isnan(), 2.0, torch.where(value.isinf(), value.sign(), 0.0))
