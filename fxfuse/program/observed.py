"""Which of torch's operators run meanwhile, and what calls one of them again."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxfuse import events

_aten: Final = torch.ops.aten
_ALLOCATING: Final = (
    _aten.empty_strided.default, _aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
)  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """One of torch's operators that ran."""

    overload: Any
    args: Any
    kwargs: Mapping[str, Any]
    result: Any
    launches: int
    """How many kernels of ours were launched before."""

    @property
    def is_pure(self) -> bool:
        """Whether nobody could tell if it had not run, but for its result."""
        return not (self.overwrites or self.draws)

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
        """Whether it normalises and writes running statistics, of which the schemas of such operators say nothing."""
        given = _by_name(self.overload, self.args, self.kwargs)
        trains = any(given.get(name) for name in ("training", "train", "use_input_stats"))
        return trains and given.get("running_mean") is not None

    @property
    def is_view(self) -> bool:
        schema = self.overload._schema
        if self.overload is _aten._unsafe_view.default:  # for autograd only it is none
            return True
        return not schema.is_mutable and any(item.alias_info is not None for item in schema.returns)

    @property
    def allocates(self) -> bool:
        """Whether it makes a tensor without contents."""
        return self.overload in _ALLOCATING


def draws(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator draws random numbers; attention without dropout does not."""
    is_random = torch.Tag.nondeterministic_seeded in getattr(overload, "tags", ())
    return is_random and _by_name(overload, args, kwargs).get("dropout_p") != 0


def _by_name(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """An operator's arguments by name, those that have their default too."""
    arguments = overload._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return {**defaults, **{one.name: given for one, given in zip(arguments, args, strict=False)}, **kwargs}


class Operators(TorchDispatchMode):
    """Which of torch's operators run, and whether what they compute has a shape that depends on tensors' values."""

    def __init__(self, seen: events.Events | None = None) -> None:
        """`seen`: where kernels of ours are noted meanwhile."""
        super().__init__()
        self.operations: list[Operation] = []
        self.launches: list[events.Launch] = [] if seen is None else seen.launches
        self.depends_on_values = False
        self.strides_before: dict[int, tuple[int, ...]] = {}
        """By identity of a tensor, strides that it had before some of dimensions of size 1 were set."""

    @property
    def computing(self) -> int:
        """How many of them do more than look at memory in another way."""
        return sum(not operation.is_view and not operation.allocates for operation in self.operations)

    @property
    def draws(self) -> bool:
        """As of one operation."""
        return any(operation.draws for operation in self.operations)

    @property
    def is_pure(self) -> bool:
        """As of one operation."""
        return all(operation.is_pure for operation in self.operations)

    @property
    def overwrites(self) -> bool:
        """As of one operation; perhaps only what it has made itself."""
        return any(operation.overwrites for operation in self.operations)

    def __torch_dispatch__(
        self, func: Any, _: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            indexed = func is _aten.index.Tensor and not _has_masks(args[1])
            self.depends_on_values |= not indexed
        changes_view = torch.Tag.inplace_view in func.tags
        before = (places(args[0]), args[0].stride()) if changes_view else None
        result = func(*args, **(kwargs or {}))
        if before is None or places(args[0]) != before[0]:
            kept = result
            if _takes_options(func) and isinstance(result, torch.Tensor) and result.is_inference():
                kept = result.detach()  # whoever else holds what torch.zeros returns makes it fail in torch 2.3
            self.operations.append(Operation(func, args, kwargs or {}, kept, len(self.launches)))
        else:  # torch's pooling to 1 x 1
            self.strides_before.setdefault(id(args[0]), before[1])
        return result


@functools.cache
def _takes_options(overload: Any) -> bool:
    """Whether it makes a tensor of a dtype, on a device and in a layout that it is told."""
    return {"dtype", "layout", "device", "pin_memory"} <= {argument.name for argument in overload._schema.arguments}


def places(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Which element of its memory each element is: strides of dimensions of size 1 say nothing."""
    steps = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    return tensor.shape, steps, tensor.storage_offset()


def _has_masks(indices: Any) -> bool:
    """Whether the number of elements that the indices choose depends on their values."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def function_of(overload: Any) -> Any:
    """What calls an operator with the same arguments: torch's own function or method, if there is one: it is quicker.

    Their parsers know the names and orders of the operator's schema, of which they are generated.
    """
    name = overload._schema.name.split("::")[-1]
    if overload.namespace != "aten" or overload._overloadname.endswith("out"):
        return overload
    if any(str(argument.type) == "List[Optional[Tensor]]" for argument in overload._schema.arguments):
        return overload  # where there is no index the parsers want tensors, too
    if any(argument.name == "reduction" for argument in overload._schema.arguments):
        return overload  # the default of which is another one for the parsers of losses
    for home in (torch._C._VariableFunctions, torch._C._nn, torch.Tensor):
        found = getattr(home, name, None)
        if isinstance(found, types.BuiltinFunctionType | types.MethodDescriptorType):  # and none in Python
            return found
    return overload
