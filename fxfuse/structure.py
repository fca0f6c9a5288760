"""The modules, hooks and attributes that a graph was traced through, and what has changed since.

A trace goes through the forwards of modules, and its graph depends on their state. `Structure` notes that state. It
answers two questions later:

- At every call: was a module replaced, or did one get a hook? (`is_as_traced`, some 8 us for 200 modules)
- For verify(): which properties that decide the graph differ now, in words? (`changes`)
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import fx, nn

from fxfuse.hooks import has_hooks, hooks_of

Unwrap: TypeAlias = Callable[[nn.Module], nn.Module]
"""unwrap(module): the module that a fused module replaces; any other module itself."""

OF_GRAPH_MODULES: Final = frozenset(vars(fx.GraphModule(nn.Module(), fx.Graph()))) - frozenset(vars(nn.Module())) | {
    "_in_spec",
    "_out_spec",
}
"""Attributes that torch.fx gives to every graph module."""
_OF_EVERY_MODULE: Final = (
    OF_GRAPH_MODULES | frozenset(vars(nn.Module())) | {"_is_full_backward_hook", "_non_persistent_buffers_set"}
)
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)
_MISSING: Final = object()
_TENSOR: Final = object()
"""Stands for any parameter or buffer: graphs read them anew, and depend only on whether they are None."""


@dataclass(frozen=True)
class _Module:
    """The properties of a module that decide a graph."""

    kind: type
    children: tuple[str, ...]
    attributes: Mapping[str, Any]
    hooked: bool


@dataclass
class Structure:
    """The modules that a graph was traced through, as they were at the trace."""

    modules: Mapping[str, _Module] = field(default_factory=dict)
    """The modules by path."""
    _empty: list[Mapping[Any, Any]] = field(default_factory=list)
    """The tables of hooks, and of modules, that were empty at the trace."""
    _tables: list[dict[str, nn.Module | None]] = field(default_factory=list)
    """The tables of modules that were not empty."""
    _children: list[dict[str, nn.Module | None]] = field(default_factory=list)
    """The contents of `_tables`, copied."""

    def is_as_traced(self, unwrap: Unwrap) -> bool:
        """Whether all modules are the same, and none of them got a hook."""
        if any(self._empty):
            return False
        if self._tables == self._children:
            return True
        now = list(map(dict, self._tables))
        if not all(map(_are_same, now, self._children, [unwrap] * len(now))):
            return False
        self._children = now  # some modules were fused on their own, for calls with other arguments
        return True


def _are_same(now: Mapping[str, nn.Module | None], before: Mapping[str, nn.Module | None], unwrap: Unwrap) -> bool:
    def behind(module: nn.Module | None) -> nn.Module | None:
        return None if module is None else unwrap(module)

    return now.keys() == before.keys() and all(behind(now[name]) is behind(before[name]) for name in now)


def structure_of(root: nn.Module, is_apart: Callable[[nn.Module], bool]) -> Structure:
    """The structure of `root`, without the modules that the graph calls and that were not traced through.

    Args:
        is_apart: whether a module is one of those.
    """
    found = dict(_traced(root, "", is_apart, set()))
    unhooked = [module for module in found.values() if module is not root and not has_hooks(module)]
    tables = [module._modules for module in found.values() if module._modules]
    return Structure(
        {path: _described(module) for path, module in found.items()},
        [hooks for module in unhooked for hooks in hooks_of(module)]
        + [module._modules for module in found.values() if not module._modules],
        tables,
        list(map(dict, tables)),
    )


def _traced(
    module: nn.Module, path: str, is_apart: Callable[[nn.Module], bool], seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    seen.add(module)
    yield path, module
    for name, child in module._modules.items():
        if child is not None and child not in seen and not is_apart(child):
            yield from _traced(child, f"{path}.{name}" if path else name, is_apart, seen)


def _described(module: nn.Module) -> _Module:
    attributes = {name: _plain(value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    for table in (module._parameters, module._buffers):
        attributes.update((name, None if tensor is None else _TENSOR) for name, tensor in table.items())
    kept = {name: value for name, value in attributes.items() if value is not _MISSING}
    return _Module(type(module), tuple(module._modules), kept, has_hooks(module))


def _plain(value: Any) -> Any:
    """A form of `value` that can be compared later, also in another copy of the model; _MISSING if there is none."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, types.FunctionType | types.MethodType):
        return value.__code__  # each copy of a model may have a function object of its own
    if isinstance(value, types.BuiltinFunctionType):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return _MISSING


def changes(structure: Structure, root: nn.Module, prefix: str, is_own: bool, unwrap: Unwrap) -> list[str]:
    """The properties that decide the graph and differ in `root` now, in words.

    Args:
        prefix: the path of `root`.
        is_own: whether `root` is the optimised model's own root. Its hooks are the optimised model's, and not reported.
    """
    found: list[str] = []
    for path, before in structure.modules.items():
        try:
            module = unwrap(root.get_submodule(path))
        except AttributeError:
            continue  # reported for its parent, as other children
        now = _described(module)
        name = f"{prefix}{path}".rstrip(".")
        which = f"module '{name}'" if name else "the model"
        if now.kind is not before.kind:
            found.append(f"{which} is a {now.kind.__name__}, traced as a {before.kind.__name__}")
            continue
        if now.hooked and not before.hooked and (path or not is_own):
            found.append(f"{which} has got a hook, or a forward of its own")
        if now.children != before.children:
            found.append(f"{which} has the children {_listed(now.children)}, traced with {_listed(before.children)}")
        found += [
            f"{attribute} of {which} is {_shown(now.attributes.get(attribute, _MISSING))}, traced as {_shown(value)}"
            for attribute, value in before.attributes.items()
            if value is not _TENSOR and not is_same(now.attributes.get(attribute, _MISSING), value)
        ]
    return found


def is_same(now: Any, before: Any) -> bool:
    """Whether a graph traced with `before` is right for `now`. Functions are compared by their code."""
    plain = _plain(now)
    return now is before or (type(now) is type(before) and plain is not _MISSING and bool(plain == _plain(before)))


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _shown(value: Any) -> str:
    if value is _MISSING or value is _TENSOR:
        return "missing" if value is _MISSING else "a tensor"
    return getattr(value, "__name__", None) or getattr(value, "co_name", None) or repr(value)
