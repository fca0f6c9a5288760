"""A model's graphs for the calls that it is saved for, captured by torch.export.

Examples that differ only in sizes share a graph with varying sizes, if torch.export finds one. A graph's `Entry` says
which calls it is right for: the arguments, the kinds of tensors among them, conditions on their sizes, and the values
of other arguments.
"""

from __future__ import annotations

import collections
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxfuse.deploy import graphs, sizes
from fxfuse.deploy.trees import Tree, flatten, leaves_like, unflatten
from fxfuse.errors import PackageError, first_line
from fxfuse.recapture import as_eager
from fxfuse.state import called_unchanged, copied

logger = logging.getLogger("fxfuse")

Arguments: TypeAlias = dict[str, Any]
"""A call's arguments by forward's parameter names, as inspect.Signature.bind sorts them; without defaults."""

_AUTO: Final = getattr(torch.export.Dim, "AUTO", None)
"""Marks a size for which torch.export finds out whether it may vary. Available since torch 2.5."""


@dataclass(frozen=True)
class TensorKind:
    """The dtype and sizes that a graph needs of a tensor."""

    dtype: torch.dtype
    sizes: tuple[int | str, ...]
    """Numbers; names for sizes that may vary."""

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.sizes))}]"


@dataclass(frozen=True)
class Entry:
    """A graph, and the calls that it is right for."""

    inputs: Tree
    """The structure of the arguments: a dict by parameters' names."""
    leaves: tuple[Any, ...]
    """For each leaf, a TensorKind or the value that it must have."""
    outputs: Tree
    nodes: list[Any] = field(repr=False)
    """The result of graphs.describe. Its inputs are all leaves."""
    conditions: tuple[Any, ...] = ()
    """Conditions on sizes (sizes.py)."""

    def tensors_of(self, arguments: Arguments) -> list[Any] | None:
        """The leaves of a call's arguments if the graph is right for the call, else None."""
        found = leaves_like(self.inputs, {name: arguments[name] for name, _ in self.inputs[1] if name in arguments})
        if found is None or len(arguments) != len(self.inputs[1]):
            return None
        symbols: dict[str, int] = {}
        for leaf, expected in zip(found, self.leaves, strict=True):
            if isinstance(expected, TensorKind):
                if not isinstance(leaf, torch.Tensor) or leaf.dtype != expected.dtype:
                    return None
                if len(leaf.shape) != len(expected.sizes):
                    return None
                for size, wanted in zip(leaf.shape, expected.sizes, strict=True):
                    if size != (wanted if isinstance(wanted, int) else symbols.setdefault(wanted, size)):
                        return None
            elif type(leaf) is not type(expected) or leaf != expected:
                return None
        if not all(sizes.value(condition, symbols) for condition in self.conditions):
            return None
        return found

    def __str__(self) -> str:
        named = unflatten(self.inputs, iter(self.leaves))
        listed = ", ".join(f"{name}: {value}" for name, value in named.items())
        conditions = ", ".join(map(sizes.text, self.conditions))
        return f"({listed})" + (f" where {conditions}" if conditions else "")

    def described(self) -> dict[str, Any]:
        """The entry as JSON."""
        leaves = [
            ["tensor", graphs.encoded(leaf.dtype), list(leaf.sizes)]
            if isinstance(leaf, TensorKind)
            else ["value", graphs.encoded(leaf)]
            for leaf in self.leaves
        ]
        return {
            "inputs": self.inputs, "leaves": leaves, "outputs": self.outputs, "nodes": self.nodes,
            "conditions": list(self.conditions),
        }  # fmt: skip

    @staticmethod
    def of(described: Mapping[str, Any]) -> Entry:
        """The entry that `described()` turned into JSON."""
        leaves = [
            TensorKind(graphs.decoded(rest[0], {}), tuple(rest[1])) if kind == "tensor" else graphs.decoded(rest[0], {})
            for kind, *rest in described["leaves"]
        ]
        return Entry(
            described["inputs"], tuple(leaves), described["outputs"], described["nodes"],
            tuple(described["conditions"]),
        )  # fmt: skip


# ------------------------------------------------------------------------------------------- signatures


def bound(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """A call's arguments by name, without those that equal their defaults. Raises TypeError as Python would."""
    arguments = signature.bind(*args, **kwargs).arguments
    return {name: value for name, value in arguments.items() if not _is_default(signature.parameters[name], value)}


def call_of(signature: inspect.Signature, arguments: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """args and kwargs of a call with these arguments: by name, except those that must be given by position."""
    kinds = inspect.Parameter
    call = inspect.BoundArguments(signature, collections.OrderedDict(arguments))
    by_position = [item for item in signature.parameters.values() if item.kind is kinds.POSITIONAL_ONLY]
    if any(item.kind is kinds.VAR_POSITIONAL for item in signature.parameters.values() if item.name in arguments):
        call.apply_defaults()
        return call.args, call.kwargs
    last = max((place for place, item in enumerate(by_position) if item.name in arguments), default=-1)
    args = tuple(arguments.get(item.name, item.default) for item in by_position[: last + 1])
    kwargs: dict[str, Any] = {}
    for name, value in arguments.items():
        kind = signature.parameters[name].kind
        if kind is not kinds.POSITIONAL_ONLY:
            kwargs.update(value if kind is kinds.VAR_KEYWORD else {name: value})
    return args, kwargs


def _is_default(parameter: inspect.Parameter, value: Any) -> bool:
    default = parameter.default
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        return not value
    is_plain = isinstance(value, bool | int | float | str) and type(value) is type(default)
    return value is default or (is_plain and bool(value == default))


def described_signature(signature: inspect.Signature) -> list[Any]:
    """The signature as JSON. If a default is no plain value, only its existence is kept."""
    return [
        [item.name, int(item.kind), item.default is not inspect.Parameter.empty, _plain(item.default)]
        for item in signature.parameters.values()
    ]


def _plain(default: Any) -> Any:
    try:
        return graphs.encoded(default)
    except PackageError:
        return None


def signature_of(described: list[Any]) -> inspect.Signature:
    parameter = inspect.Parameter
    known = (
        parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.VAR_POSITIONAL, parameter.KEYWORD_ONLY,
        parameter.VAR_KEYWORD,
    )  # fmt: skip
    kinds = {int(kind): kind for kind in known}
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(name, kinds[kind], default=graphs.decoded(default, {}) if has_default else empty)
            for name, kind, has_default, default in described
        ]
    )


# --------------------------------------------------------------------------------------------- exporting


class _ByName(nn.Module):
    """A model that takes its arguments as one dict, so that torch.export does not ask how they are given."""

    def __init__(self, model: nn.Module, signature: inspect.Signature) -> None:
        super().__init__()
        self.model = model
        self._signature = signature

    def forward(self, arguments: Arguments) -> Any:
        args, kwargs = call_of(self._signature, arguments)
        return self.model(*args, **kwargs)


_PREFIX: Final = "model."


def entries_of(
    model: nn.Module, signature: inspect.Signature, examples: Sequence[Arguments],
    dynamic_shapes: Mapping[str, Any] | None,
) -> tuple[list[Entry], dict[str, torch.Tensor]]:  # fmt: skip
    """Graphs for all examples, and the tensors they read that are neither parameters nor buffers of the model.

    Args:
        dynamic_shapes: the sizes that may vary, by parameters' names, as torch.export.export takes them. None: the
            sizes in which examples differ.

    Raises PackageError for what torch.export cannot capture.
    """
    entries: list[Entry] = []
    constants: dict[str, torch.Tensor] = {}
    left = list(examples)
    while left:
        first = left[0]
        alike = [example for example in left if _are_alike(first, example)]
        if dynamic_shapes is None and len(alike) > 1:
            varying = _exported_varying(model, signature, alike, entries, constants)
        else:
            varying = None
        entries.append(varying or _exported(model, signature, first, dynamic_shapes, len(entries), constants))
        if entries[-1].tensors_of(first) is None:
            # a graph with varying sizes is not right for this example
            entries.insert(len(entries) - 1, _exported(model, signature, first, None, len(entries), constants))
        left = [example for example in left if not any(entry.tensors_of(example) is not None for entry in entries)]
    return entries, constants


def _are_alike(one: Arguments, other: Arguments) -> bool:
    """Whether arguments differ only in sizes of tensors, if at all."""
    (tree, leaves), (other_tree, other_leaves) = (flatten(item, "an example", False) for item in (one, other))
    return tree == other_tree and all(
        (left.dtype, left.dim()) == (right.dtype, right.dim())
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
        else type(left) is type(right) and left == right
        for left, right in zip(leaves, other_leaves, strict=True)
    )


def _exported_varying(
    model: nn.Module, signature: inspect.Signature, alike: Sequence[Arguments], entries: Sequence[Entry],
    constants: dict[str, torch.Tensor],
) -> Entry | None:  # fmt: skip
    """One graph for examples of several sizes; None if torch.export finds none. It need not be right for all."""
    flat = [flatten(example, "an example", False) for example in alike]
    tree = flat[0][0]
    named: dict[tuple[int, ...], Any] = {}
    dims = [_differing(leaves, named) for leaves in zip(*(leaves for _, leaves in flat), strict=True)]
    # sizes of 0 and 1 are never taken for others: take the example whose smallest varying size is largest
    largest = max(alike, key=lambda example: min(_varying_sizes(example, dims), default=0))
    try:
        entry = _exported(model, signature, largest, unflatten(tree, iter(dims)), len(entries), constants)
    except PackageError as error:
        logger.info("fxfuse: examples of several sizes get a graph each: %s", error)
        return None
    varies = any(isinstance(size, str) for kind in entry.leaves if isinstance(kind, TensorKind) for size in kind.sizes)
    return entry if varies and entry.tensors_of(largest) is not None else None


def _differing(leaves: Sequence[Any], named: dict[tuple[int, ...], Any]) -> dict[int, Any] | None:
    """The dimensions in which tensors differ; None for other values.

    Args:
        named: for a torch without Dim.AUTO, the Dim of each size by its values in the examples. Such a torch asks
            which sizes are the same, and refuses sizes that may not be any number.
    """
    if not isinstance(leaves[0], torch.Tensor):
        return None
    varying = {}
    for dim, found in enumerate(zip(*(leaf.shape for leaf in leaves), strict=True)):
        if len(set(found)) > 1:
            name = f"size{len(named)}"
            varying[dim] = named.setdefault(found, torch.export.Dim(name)) if _AUTO is None else _AUTO
    return varying


def _varying_sizes(example: Arguments, dims: Sequence[Any]) -> Iterator[int]:
    for leaf, of_leaf in zip(flatten(example, "an example", False)[1], dims, strict=True):
        yield from (leaf.shape[dim] for dim in of_leaf or ())


@functools.cache
def _export() -> Callable[..., Any]:
    """torch.export.export; before torch 2.6 a function that keeps operators as models call them, which export does not.

    Taken apart, linears and attention would not be there for regions to begin with.
    """
    from torch.export import _trace  # no attribute of torch.export before something is exported

    whole = functools.partial(_trace._export, pre_dispatch=True)
    found = (torch.export.export, getattr(torch.export, "export_for_training", whole))
    return next((export for export in found if _leaves_linears(export)), torch.export.export)


def _leaves_linears(export: Callable[..., Any]) -> bool:
    program = export(nn.Linear(2, 2, device="cpu"), (torch.zeros(2, 2, device="cpu"),), strict=False)
    return any(node.target is torch.ops.aten.linear.default for node in program.graph.nodes)


def _exported(
    model: nn.Module, signature: inspect.Signature, example: Arguments, dynamic_shapes: Mapping[str, Any] | None,
    number: int, constants: dict[str, torch.Tensor],
) -> Entry:  # fmt: skip
    # copies: torch.export treats a tensor that is given twice as one argument
    example = pytree.tree_map_only(torch.Tensor, lambda tensor: copied(tensor.detach()), example)
    inputs, leaves = flatten(example, "an example", False)
    if dynamic_shapes is not None:
        dynamic_shapes = {"arguments": {name: dynamic_shapes.get(name) for name in example}}
    with torch.no_grad(), as_eager():
        args, kwargs = call_of(signature, example)
        outputs, _ = flatten(called_unchanged(model, args, kwargs), "the model's result", True)
        try:
            program = _export()(_ByName(model, signature), (example,), strict=False, dynamic_shapes=dynamic_shapes)
        except Exception as error:  # whatever torch.export and the model raise
            raise PackageError(
                "a package needs the model's graph, and torch.export cannot capture it for this call: "
                f"{first_line(error)}"
            ) from error
    module = program.module()
    tables = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    names = {name for table in tables for name, _ in table}
    rename = functools.partial(_tensor_path, module, names, number, constants)
    placeholders = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    kinds = tuple(map(_kind_of, placeholders, leaves))
    symbols = {size for kind in kinds if isinstance(kind, TensorKind) for size in kind.sizes if isinstance(size, str)}
    nodes = graphs.describe(module.graph, rename)
    return Entry(inputs, kinds, outputs, nodes, tuple(_conditions(program, placeholders, symbols)))


def _tensor_path(
    module: nn.Module, names: set[str], number: int, constants: dict[str, torch.Tensor], target: str
) -> str:
    """The path in the model of an exported module's tensor `target`: its own, or that of a constant in `constants`."""
    if target.removeprefix(_PREFIX) in names:
        return target.removeprefix(_PREFIX)
    value: Any = module
    for name in target.split("."):
        value = getattr(value, name)
    if isinstance(value, nn.Module):
        raise PackageError(
            f"the exported graph has a part with a graph of its own, '{target}' (torch.cond, a region of autocast), "
            "which a package cannot hold"
        )
    if not isinstance(value, torch.Tensor):
        raise PackageError(f"the exported graph reads '{target}', a {type(value).__name__}; a package holds tensors")
    known = next((name for name, other in constants.items() if other is value), None)
    path = known or f"_constant_{number}_{target.replace('.', '_')}"
    constants[path] = value
    return path


def _kind_of(noted: Any, given: Any) -> Any:
    if not isinstance(given, torch.Tensor):
        graphs.encoded(given, "an example")  # raises PackageError if it is no plain value
        return given
    return TensorKind(noted.dtype, tuple(_size(size) for size in noted.shape))


def _size(size: Any) -> int | str:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    if expression.is_Integer:
        return int(expression)
    if not expression.is_Symbol:
        raise PackageError(f"a size is {expression}, which a package cannot ask of a call")
    return str(expression)


def _conditions(program: torch.export.ExportedProgram, placeholders: Sequence[Any], symbols: set[str]) -> Iterator[Any]:
    """Conditions on sizes that vary: their ranges, and what torch.export decided about them."""
    for symbol, values in program.range_constraints.items():
        if str(symbol) in symbols:
            if values.lower.is_Integer and values.lower > 0:
                yield ["ge", str(symbol), int(values.lower)]
            if values.upper.is_Integer and values.upper < sys.maxsize - 1:  # torch 2.3 means no limit by it
                yield ["le", str(symbol), int(values.upper)]
    fake = next((value.fake_mode for value in placeholders if hasattr(value, "fake_mode")), None)
    if fake is None or fake.shape_env is None:
        return
    for guard in fake.shape_env.guards:
        expression = fake.shape_env.simplify(guard.expr)  # sizes that must be equal have one symbol by now
        names = {str(symbol) for symbol in expression.free_symbols}
        if names and names <= symbols:
            condition = sizes.described(expression)
            if not _is_range(condition):
                yield condition
        elif names:
            raise PackageError(f"sizes are to satisfy {expression}, of which not all are sizes of arguments")


def _is_range(condition: Any) -> bool:
    """Whether range constraints state the condition, too."""
    kind, *parts = condition
    return kind in ("lt", "le", "gt", "ge") and {type(part) for part in parts} == {str, int}
