"""Modules that a graph calls as they are, and what of them decides what they compute.

A program does not call them: it has the operators that they ran while it was recorded, which are its own to merge and
to launch. So every call asks whether each of them is what it was. Of their parameters and buffers, which are read anew,
only whether there is one matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from fxfuse.patterns.anchors import has_hooks
from fxfuse.structure import HOOKS

_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module())) | {"_is_full_backward_hook", "_non_persistent_buffers_set"}
_PLAIN: Final = (bool, int, float, str, type(None), torch.dtype, torch.device)


class Leaves:
    """Modules of torch.nn, as they are now."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [module for module in dict.fromkeys(modules) if _is_known(module)]
        self._known = frozenset(self._modules)
        self._kinds = [type(module) for module in self._modules]
        self._members = [vars(module) for module in self._modules]
        self._counts = [len(members) for members in self._members]
        self._hooks = [members[name] for members in self._members for name in HOOKS]
        self._places = [(members, name) for members in self._members for name in members if _is_own(name)]
        self._tensors = [
            (table, name)
            for module in self._modules
            for table in (module._parameters, module._buffers)
            for name in table
        ]
        self._values, self._missing = self._read()

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._known

    def are_as_before(self) -> bool:
        """Whether the same call of each computes the same."""
        try:
            return (
                not any(self._hooks)
                and [type(module) for module in self._modules] == self._kinds
                and [len(members) for members in self._members] == self._counts
                and (self._values, self._missing) == self._read()
            )
        except KeyError:  # an attribute is gone
            return False

    def _read(self) -> tuple[list[Any], list[bool]]:
        return (
            [members[name] for members, name in self._places],
            [table[name] is None for table, name in self._tensors],
        )


def _is_own(name: str) -> bool:
    return name == "training" or name not in _OF_EVERY_MODULE


def _is_known(module: nn.Module) -> bool:
    """Whether attributes that can be compared, and tensors, are all that it computes with."""
    return (
        type(module).__module__.startswith("torch.nn.modules.")
        and not module._modules
        and not has_hooks(module)
        and all(_is_constant(value) for name, value in vars(module).items() if _is_own(name))
    )


def _is_constant(value: Any) -> bool:
    return all(map(_is_constant, value)) if isinstance(value, tuple) else isinstance(value, _PLAIN)
