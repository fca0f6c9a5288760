"""Leaf modules: those of torch.nn that a graph calls, and a check that they still compute the same.

A program does not call these modules. It has recorded the operators that they run, which can be merged. So every call
checks that each module and its contents are unchanged. Parameters and buffers are read anew at every call: the check
only asks whether they are present.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from fxfuse.hooks import HOOKS, has_hooks

_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module())) | {"_is_full_backward_hook", "_non_persistent_buffers_set"}
_PLAIN: Final = (bool, int, float, str, type(None), torch.dtype, torch.device)


class Leaves:
    """The state of torch.nn's modules at the time this object is made, for later comparison.

    `module in leaves` says whether everything that a module computes with can be compared.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        known = [module for module in dict.fromkeys(modules) if all(map(_is_known, module.modules()))]
        self._known = frozenset(known)
        self._modules = list(dict.fromkeys(each for module in known for each in module.modules()))
        self._kinds = [type(module) for module in self._modules]
        self._members = [vars(module) for module in self._modules]
        self._counts = [len(members) for members in self._members]
        self._hooks = [members[name] for members in self._members for name in HOOKS]
        self._places = [(members, name) for members in self._members for name in members if _is_own(name)]
        self._lists = [(members, name) for members, name in self._places if isinstance(members[name], list)]
        self._tensors = [
            (table, name)
            for module in self._modules
            for table in (module._parameters, module._buffers)
            for name in table
        ]
        self._absent = [(table, name) for table, name in self._tensors if table[name] is None]
        self._children = [(module._modules, name) for module in self._modules for name in module._modules]
        self._before = self._read()

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._known

    @property
    def tables(self) -> list[dict[Any, Any]]:
        """The dictionaries that a guard compares quickly: modules' attributes, hooks and children.

        `rest_is_as_before` compares the rest. A guard compares objects: it may find a difference where `are_as_before`
        finds equal numbers.
        """
        return [*self._members, *self._hooks, *(module._modules for module in self._modules)]

    def rest_is_as_before(self) -> bool:
        """Whether the state outside `tables` is unchanged.

        A tensor that is gone is not noticed here: the guard compares the tensors of the call.
        """
        for table, name in self._absent:
            if table.get(name) is not None:
                return False
        return [*map(type, self._modules)] == self._kinds and (not self._lists or self.are_as_before())

    def are_as_before(self) -> bool:
        """Whether all modules are unchanged, so that equal calls compute the same."""
        try:
            return (
                not any(self._hooks)
                and [type(module) for module in self._modules] == self._kinds
                and [len(members) for members in self._members] == self._counts
                and self._read() == self._before
            )
        except (KeyError, TypeError):  # an attribute is gone, or no longer a list
            return False

    def _read(self) -> tuple[list[Any], list[tuple[Any, ...]], list[bool], list[nn.Module | None]]:
        return (
            [members[name] for members, name in self._places],
            [tuple(members[name]) for members, name in self._lists],  # lists may be changed in place
            [table[name] is None for table, name in self._tensors],
            [table[name] for table, name in self._children],
        )


def _is_own(name: str) -> bool:
    return name == "training" or name not in _OF_EVERY_MODULE


def _is_known(module: nn.Module) -> bool:
    """Whether a module computes with nothing but comparable attributes, tensors and modules of torch."""
    return (
        type(module).__module__.startswith("torch.nn.modules.")
        and not has_hooks(module)
        and all(_is_constant(value) for name, value in vars(module).items() if _is_own(name))
    )


def _is_constant(value: Any) -> bool:
    """Whether an attribute's value can be compared with a later one."""
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):  # an activation
        return (value.__module__ or "torch").split(".")[0] == "torch"
    if type(value) is list:
        return all(isinstance(item, _PLAIN) for item in value)
    return all(map(_is_constant, value)) if isinstance(value, tuple) else isinstance(value, _PLAIN)
