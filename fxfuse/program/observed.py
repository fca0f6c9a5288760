"""Observes torch's operators while they run (`Operators`), and finds the functions that call them again."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from fxfuse import events
from fxfuse.dispatch_mode import DispatchMode

_aten: Final = torch.ops.aten
_ALLOCATING: Final = (
    _aten.empty_strided.default, _aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
)  # fmt: skip
"""Operators that make a tensor without contents."""
CHECK_OF_KIND: Final = _aten._assert_tensor_metadata.default
"""Checks a tensor's dtype and sizes, with the same outcome in all calls of a kind."""


@dataclass(frozen=True)
class Operation:
    """A call of one of torch's operators that was observed."""

    overload: Any
    args: Any
    kwargs: Mapping[str, Any]
    result: Any
    launches: int
    """How many kernels of ours had been launched before it."""

    @property
    def is_pure(self) -> bool:
        """Whether its result is its only effect: it overwrites nothing and draws no random numbers."""
        return not (self.overwrites or self.draws or is_for_its_effect(self.overload))

    @property
    def overwrites(self) -> bool:
        """Whether it writes into an argument."""
        return bool(self.overload._schema.is_mutable) or self._updates_statistics

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return draws(self.overload, self.args, self.kwargs)

    @property
    def _updates_statistics(self) -> bool:
        """Whether it is a normalisation that updates running statistics. Their schemas do not mark this as mutation."""
        given = _by_name(self.overload, self.args, self.kwargs)
        return given.get("running_mean") is not None and trains(self.overload, self.args, self.kwargs)

    @property
    def is_view(self) -> bool:
        schema = self.overload._schema
        if self.overload is _aten._unsafe_view.default:  # its schema has no alias, for autograd's sake
            return True
        return not schema.is_mutable and any(item.alias_info is not None for item in schema.returns)

    @property
    def changes_nothing(self) -> bool:
        """Whether it copies elements to where they are, as `x[index] += y` does at its end."""
        if self.overload is not _aten.copy_.default:
            return False
        places = [
            (x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg())
            for x in self.args[:2]
        ]
        return places[0] == places[1]

    @property
    def allocates(self) -> bool:
        """Whether it makes a tensor without contents (`_ALLOCATING`)."""
        return self.overload in _ALLOCATING


def is_for_its_effect(overload: Any) -> bool:
    """Whether an operator gives and overwrites nothing: it is called for the error that it may raise, for example."""
    schema = overload._schema
    return not (schema.returns or schema.is_mutable) and overload is not CHECK_OF_KIND


def draws(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator draws random numbers; attention without dropout does not."""
    is_random = torch.Tag.nondeterministic_seeded in getattr(overload, "tags", ())
    return is_random and _by_name(overload, args, kwargs).get("dropout_p") != 0


def trains(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator computes as in training: it drops something, or updates running statistics.

    A normalisation by its own statistics that keeps no running ones computes the same in both modes.
    """
    given = _by_name(overload, args, kwargs)
    keeps_none = overload._overloadname == "no_stats" or ("running_mean" in given and given["running_mean"] is None)
    return not keeps_none and any(given.get(name) is True for name in ("training", "train", "use_input_stats"))


def _by_name(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """An operator's arguments by name, defaults included."""
    arguments = overload._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return {**defaults, **{one.name: given for one, given in zip(arguments, args, strict=False)}, **kwargs}


class Operators(DispatchMode):
    """A dispatch mode that lists torch's operators as they run. It also notes whether a shape depends on values."""

    def __init__(
        self, seen: events.Events | None = None, apart: Mapping[Any, Callable[..., Any]] | None = None
    ) -> None:
        """
        Args:
            seen: where the launches of our kernels are noted at the same time.
            apart: functions that compute an operator by others, which are listed instead. They may return
                NotImplemented.
        """
        super().__init__()
        self._apart, self._depth = apart or {}, 0
        self.operations: list[Operation] = []
        self.launches: list[events.Launch] = [] if seen is None else seen.launches
        self.depends_on_values = False
        self.strides_before: dict[int, tuple[int, ...]] = {}
        """By a tensor's identity: its strides before those of dimensions of size 1 were changed in place."""

    @property
    def computing(self) -> int:
        """How many operators compute: they neither make a view nor just allocate."""
        return sum(not operation.is_view and not operation.allocates for operation in self.operations)

    @property
    def draws(self) -> bool:
        """Whether any operator draws random numbers."""
        return any(operation.draws for operation in self.operations)

    @property
    def is_pure(self) -> bool:
        """Whether all operators are pure (`Operation.is_pure`)."""
        return all(operation.is_pure for operation in self.operations)

    @property
    def overwrites(self) -> bool:
        """Whether any operator writes into an argument, which may be the result of an earlier one."""
        return any(operation.overwrites for operation in self.operations)

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            indexed = func is _aten.index.Tensor and not _has_masks(args[1])
            self.depends_on_values |= not indexed
        taken_apart = self._taken_apart(func, args, kwargs)
        if taken_apart is not NotImplemented:
            return taken_apart
        changes_view = torch.Tag.inplace_view in func.tags
        before = (places(args[0]), args[0].stride()) if changes_view else None
        result = func(*args, **kwargs)
        if before is None or places(args[0]) != before[0]:
            kept = result
            if _takes_options(func) and isinstance(result, torch.Tensor) and result.is_inference():
                kept = result.detach()  # torch 2.3's torch.zeros fails if anything else holds its result
            self.operations.append(Operation(func, args, kwargs, kept, len(self.launches)))
        else:  # only strides of dimensions of size 1 have changed: torch's pooling to 1 x 1
            self.strides_before.setdefault(id(args[0]), before[1])
        return result

    def _taken_apart(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of an operator by others; NotImplemented if it shall run itself."""
        rule = self._apart.get(func)
        if rule is None and self._depth:  # torch has taken other operators apart before a dispatch mode sees them
            rule = func.decompose
        if rule is None:
            return NotImplemented
        self._depth += 1
        try:
            with self:
                return rule(*args, **kwargs)
        finally:
            self._depth -= 1


@functools.cache
def _takes_options(overload: Any) -> bool:
    """Whether an operator is a factory: it takes `dtype`, `layout`, `device` and `pin_memory`."""
    return {"dtype", "layout", "device", "pin_memory"} <= {argument.name for argument in overload._schema.arguments}


def places(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A tensor's shape, strides (but for dimensions of size 1) and offset, which determine where its elements lie."""
    steps = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    return tensor.shape, steps, tensor.storage_offset()


def _has_masks(indices: Any) -> bool:
    """Whether the number of elements that the indices choose depends on their values."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def function_of(overload: Any) -> Any:
    """A function that calls an operator with the same arguments.

    It is torch's own function or method, which is quicker, or, if there is none, the operator itself. Arguments have
    the same names and order: the parsers of torch's functions are generated from the operators' schemas.
    """
    name = overload._schema.name.split("::")[-1]
    if overload.namespace != "aten" or overload._overloadname.endswith("out"):
        return overload
    if any(str(argument.type) == "List[Optional[Tensor]]" for argument in overload._schema.arguments):
        return overload  # torch's parsers do not take None in a list of indices
    if any(argument.name == "reduction" for argument in overload._schema.arguments):
        return overload  # torch's parsers of losses have another default for `reduction`
    for home in (torch._C._VariableFunctions, torch._C._nn, torch.Tensor):
        found = getattr(home, name, None)
        if isinstance(found, types.BuiltinFunctionType | types.MethodDescriptorType):  # in C, not in Python
            return found
    return overload
