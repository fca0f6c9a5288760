"""Binds a call to a graph: its arguments in the graph's order, and the tensors of the model that the graph reads.

`Repeats` says which calls are of one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import fx, nn

from fxfuse.program.record import is_body, is_variable
from fxfuse.program.values import Refused


class Bound(NamedTuple):
    """The arguments and attributes of one call."""

    arguments: Sequence[Any]
    """In the order of the graph's placeholders."""
    attributes: list[torch.Tensor]
    """In the order of `Binding.paths`."""
    tensors: list[torch.Tensor]
    """The arguments that are tensors, then all attributes."""
    constants: tuple[Any, ...]
    """The types of all arguments, and the arguments that are no tensors, to be compared: a program depends on them."""


class Binding:
    """The arguments and attributes that a graph takes."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        """Raises Refused if an attribute is no tensor of a module."""
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self._nodes = [node for node in placeholders if not is_variable(node)]
        self._nothing = {node: None for node in placeholders if is_variable(node)}
        """Variadic placeholders, which nothing reads. Calls that can be bound have no such arguments."""
        self._positional = next((at for at, node in enumerate(placeholders) if is_variable(node)), len(placeholders))
        self._arguments: dict[tuple[type, ...], _Arguments] = {}
        self._attributes: dict[str, tuple[dict[str, Any], str]] = {}
        self._reads = [node for node in graph.nodes if node.op == "get_attr" and not is_body(root, node)]
        self.modules: list[nn.Module] = []
        """The modules that the graph calls."""
        for node in self._reads:
            self._attributes.setdefault(str(node.target), _table_of(root, str(node.target)))
        for node in graph.nodes:
            if node.op == "call_module":
                module = root.get_submodule(str(node.target))
                self.modules.append(module)
                for name, _ in (*module.named_parameters(), *module.named_buffers()):
                    path = f"{node.target}.{name}"
                    self._attributes.setdefault(path, _table_of(root, path))
        self.paths = tuple(self._attributes)
        """The paths of the attributes that it reads, including the tensors of modules that it calls."""

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound | None:
        """Binds a call. None if an argument is missing or unknown, or if an attribute is gone."""
        bound = args
        if kwargs or len(args) != len(self._nodes) or len(args) > self._positional:
            found = self._in_order(args, kwargs)
            if found is None:
                return None
            bound = found
        try:
            attributes = [table[name] for table, name in self._attributes.values()]
        except KeyError:  # the graph's own code then raises a better error
            return None
        kinds = tuple(map(type, bound))
        arguments = self._arguments.get(kinds)
        if arguments is None:
            arguments = self._arguments[kinds] = _Arguments(kinds)
        parts = bound, attributes, [*arguments.tensors(bound), *attributes], arguments.constants(bound)
        return tuple.__new__(Bound, parts)  # in half of the time of Bound(...), at every call

    def values(self, bound: Bound) -> dict[fx.Node, Any]:
        """The values of the graph's placeholders and attribute nodes in a call."""
        given: dict[fx.Node, Any] = {**dict(zip(self._nodes, bound.arguments, strict=True)), **self._nothing}
        attributes = dict(zip(self.paths, bound.attributes, strict=True))
        given.update((node, attributes[str(node.target)]) for node in self._reads)
        return given

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        missing = self._nodes[len(args) :]
        if len(args) > self._positional or not kwargs.keys() <= {str(node.target) for node in missing}:
            return None
        bound = list(args)
        for node in missing:
            if node.target not in kwargs and not node.args:
                return None
            bound.append(kwargs[str(node.target)] if node.target in kwargs else node.args[0])
        return tuple(bound)


class _Arguments:
    """Divides the arguments of calls into tensors and others, for one combination of argument types."""

    def __init__(self, kinds: tuple[type, ...]) -> None:
        self._kinds = kinds
        self._tensors = [place for place, kind in enumerate(kinds) if issubclass(kind, torch.Tensor)]
        self._others = [place for place, kind in enumerate(kinds) if not issubclass(kind, torch.Tensor)]
        self._alone = (kinds,)

    def tensors(self, arguments: Sequence[Any]) -> Sequence[torch.Tensor]:
        return [arguments[place] for place in self._tensors] if self._others else arguments

    def constants(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """The types of all arguments, then the arguments that are no tensors. With the types, True does not equal 1."""
        if not self._others:
            return self._alone
        return self._kinds, *[_constant(arguments[place]) for place in self._others]


def _constant(argument: Any) -> Any:
    """An argument in a form to compare: 0.0 and -0.0 are different."""
    return argument.hex().encode() if type(argument) is float else argument


def _table_of(root: nn.Module, path: str) -> tuple[dict[str, Any], str]:
    """The dictionary that holds an attribute of a module, and its name there."""
    *parents, name = path.split(".")
    module = root.get_submodule(".".join(parents))
    for table in (module._parameters, module._buffers, vars(module)):
        if isinstance(table.get(name), torch.Tensor):
            return table, name
    raise Refused(f"'{path}' is no tensor of a module")


_CONSTANTS: Final = (bool, int, bytes, str, torch.dtype)


def are_constant(constants: tuple[Any, ...]) -> bool:
    """Whether values can be compared, and hold no tensors."""
    return all(value is None or isinstance(value, _CONSTANTS) for value in constants[1:])


PATIENCE: Final = 16
"""After this many calls since a program (or step) was last made, only every 16th call is looked at."""


class Kind:
    """A kind of call that was looked at."""

    def __init__(self, described: Any) -> None:
        self.described = described
        """The description that is equal in all calls of the kind."""
        self.has_repeated = False
        self.results: Any = None
        """Facts about the results of its first call."""


class Repeats:
    """The kinds of the last calls that were looked at."""

    def __init__(self) -> None:
        self._kinds: list[Kind] = []
        """The latest first."""
        self._misses = 0

    def look(self, described: Callable[[], Any], places: int, stays: bool = False) -> Kind | None:
        """The kind of a call. None if the call is not looked at, because sizes or numbers differ at most calls.

        Args:
            described: makes the description that is compared.
            places: how many programs (or steps) may be made before an older one must go. This many kinds are
                remembered, but at least one: with `places` 0, two calls in a row must be of one kind.
            stays: whether a kind that has repeated stays remembered, because nothing is made for it now.
        """
        self._misses += 1
        if self._misses > PATIENCE and self._misses % PATIENCE:
            return None
        new = Kind(described())
        known = [kind for kind in self._kinds if kind.described == new.described]
        others = [kind for kind in self._kinds if kind not in known]
        if known:
            self._kinds = [*known, *others] if stays else others
            known[0].has_repeated = True
            return known[0]
        self._kinds = [new, *others][: max(1, places)]
        return new

    def keep(self, kind: Kind) -> None:
        """Remembers `kind` again, if a call in another thread has met it meanwhile."""
        if not any(each is kind for each in self._kinds):
            self._kinds = [kind, *self._kinds]

    def count_anew(self) -> None:
        """Restarts the count of calls (`PATIENCE`), after something was made for a kind that has repeated."""
        self._misses = 0
