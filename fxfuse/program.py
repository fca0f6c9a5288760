"""A call of a fused graph as a program: kernels launched from one list, and between them what torch runs.

The code of a graph looks up a plan for every region, makes a tensor for every result and launches kernels one by one.
A program does that once, for one kind of call (shapes, strides, dtypes, switches): it is recorded from what plans do in
the second call of its kind, node by node. What they launched becomes entries of a list that one call into C works
off (executor.h); results that only kernels read are places in one piece of memory, the arena, reused as values die;
views are addresses. What torch's library runs stays a call from Python. The rest is a function written for this kind of
call, of which `Program.code` is the text.

Weights are read anew at every call, modes and hooks are asked for before (optimize.py). Calls that want gradients, or
are observed, run the graph's own code.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxfuse import build, events, functional, plans
from fxfuse.cuda.precision import tf32_allowed
from fxfuse.errors import FxfuseError
from fxfuse.locks import free_in_children
from fxfuse.patterns.anchors import has_hooks
from fxfuse.problem import ANCHORS

logger = logging.getLogger("fxfuse")

MOST_KEPT: Final = 8
"""Kinds of calls that a graph keeps a program for; the oldest goes first."""
MOST_TRIES: Final = 4
"""Calls that are recorded in vain, since a plan was missing."""
ALIGNMENT: Final = 512
"""Bytes between values in the arena: as torch's allocator aligns them."""

_guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
_reinterpret: Any = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", None)
_KINDS: Final[dict[Any, str]] = {functional.function(kind): kind for kind in ANCHORS}


class _Refused(Exception):
    """A graph or a call that no program can be recorded of; the text says why."""


# -------------------------------------------------------------------------------------------- what may be recorded

_LIBRARIES: Final = ("torch", "operator", "_operator", "builtins", "math", "fxfuse")
_SWITCHES: Final = ("autocast", "set_grad", "_enter", "_exit", "inference_mode", "checkpoint", "no_grad", "hook")
"""Parts of the names of functions that change how others run."""
_METHODS_REFUSED: Final = frozenset(
    {"backward", "requires_grad_", "retain_grad", "numpy", "data_ptr", "set_", "resize_", "resize_as_", "share_memory_",
     "pin_memory", "register_hook", "detach_", "storage", "untyped_storage", "apply_", "map_"}
)  # fmt: skip


def _check_graph(root: nn.Module, graph: fx.Graph) -> None:
    """Raises _Refused if a node is of a kind of which nobody can say what else it does than compute."""
    for node in graph.nodes:
        target: Any = node.target
        if node.op == "placeholder" and str(target).startswith("*"):
            raise _Refused("its arguments are not known one by one")
        if node.op == "call_module":
            module = root.get_submodule(str(target))
            if not type(module).__module__.startswith("torch.nn.") or has_hooks(module):
                raise _Refused(f"'{target}' is a {type(module).__name__}, which may do more than compute")
        if node.op == "call_method" and (not hasattr(torch.Tensor, str(target)) or target in _METHODS_REFUSED):
            raise _Refused(f"the method '{target}' may do more than compute")
        if node.op == "call_function":
            home = (getattr(target, "__module__", None) or "torch").split(".")[0]
            name = getattr(target, "__name__", "")
            if home not in _LIBRARIES or any(part in name for part in _SWITCHES):
                raise _Refused(f"'{name or target}' may do more than compute")


@dataclass(frozen=True)
class _Operation:
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
        random = torch.Tag.nondeterministic_seeded in self.overload.tags
        return not self.overload._schema.is_mutable and not random

    @property
    def is_view(self) -> bool:
        schema = self.overload._schema
        return not schema.is_mutable and any(item.alias_info is not None for item in schema.returns)

    @property
    def allocates(self) -> bool:
        """Whether it makes a tensor without contents."""
        return self.overload in _ALLOCATING


class _Operators(TorchDispatchMode):
    """Which of torch's operators run, and whether what they compute has a shape that depends on tensors' values."""

    def __init__(self, seen: events.Events | None = None) -> None:
        """`seen`: where kernels of ours are noted meanwhile."""
        super().__init__()
        self.operations: list[_Operation] = []
        self.launches: list[events.Launch] = [] if seen is None else seen.launches
        self.depends_on_values = False

    @property
    def computing(self) -> int:
        """How many of them do more than look at memory in another way."""
        return sum(not operation.is_view and not operation.allocates for operation in self.operations)

    @property
    def attends(self) -> bool:
        """Whether attention is among them, of which torch chooses the kind by switches of its own."""
        return any("attention" in operation.overload._schema.name for operation in self.operations)

    @property
    def is_pure(self) -> bool:
        """As of one operation."""
        return all(operation.is_pure for operation in self.operations)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            indexed = func is torch.ops.aten.index.Tensor and not _has_masks(args[1])
            self.depends_on_values |= not indexed
        result = func(*args, **(kwargs or {}))
        self.operations.append(_Operation(func, args, kwargs or {}, result, len(self.launches)))
        return result


def _has_masks(indices: Any) -> bool:
    """Whether the number of elements that the indices choose depends on their values."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


_ALLOCATING: Final = (torch.ops.aten.empty_strided.default, torch.ops.aten.empty.memory_format)


# --------------------------------------------------------------------------------------------------- values


@dataclass(eq=False)
class _Slot:
    """A piece of memory: of an argument or parameter, of a result of torch's, or one that kernels' results take."""

    kind: str
    """"given", "made" by torch, or "memory"."""
    name: str
    """The variable with the tensor that it begins with."""
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    nbytes: int = 0
    escapes: bool = False
    """Whether it lives on after the call."""
    index: int = -1
    """In the table of addresses; -1 in the arena."""
    offset: int = 0
    """In the arena."""
    first: int = -1
    last: int = -1
    """The steps that use it first and last."""

    def touch(self, step: int) -> None:
        self.first = step if self.first < 0 else self.first
        self.last = max(self.last, step)


@dataclass(eq=False)
class _Value:
    """A tensor of the graph."""

    slot: _Slot
    offset: int
    """In bytes from where the slot begins."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    name: str
    wanted: bool = False
    """Whether Python needs it as a tensor."""
    leaves: bool = False
    """Whether the caller gets it: a view is then to be one in torch's eyes, too."""
    viewed_by: _Call | None = None
    """The call that makes it of another tensor without computing."""


@dataclass(frozen=True)
class _Owner:
    """Whose a storage is, while it is recorded."""

    slot: _Slot
    begin: int
    """Address of the slot's first tensor."""
    low: int
    high: int
    """Addresses of the storage."""

    @staticmethod
    def of(slot: _Slot, tensor: torch.Tensor) -> _Owner:
        storage = tensor.untyped_storage()
        return _Owner(slot, tensor.data_ptr(), storage.data_ptr(), storage.data_ptr() + storage.nbytes())


@dataclass(eq=False)
class _Launch:
    event: events.Launch
    references: list[tuple[_Slot, int]]


@dataclass(eq=False)
class _Call:
    target: Any
    """A function, the name of a method, or a module."""
    args: Any
    kwargs: Any
    result: Any
    is_view: bool
    is_pure: bool
    is_method: bool = False
    label: str = ""
    """What it is, for who reads the program."""


def _values_in(tree: Any) -> list[_Value]:
    found: list[_Value] = []

    def visit(item: Any) -> None:
        if isinstance(item, _Value):
            found.append(item)
        elif isinstance(item, tuple | list):
            for part in item:
                visit(part)
        elif isinstance(item, dict):
            for part in item.values():
                visit(part)
        elif isinstance(item, slice):
            visit((item.start, item.stop, item.step))

    visit(tree)
    return found


# ------------------------------------------------------------------------------------------------- recording


class _Recorder:
    """Runs a graph node by node, and notes how it could be run again."""

    def __init__(
        self, root: nn.Module, graph: fx.Graph, given: Mapping[fx.Node, Any], tensors: Sequence[torch.Tensor]
    ) -> None:
        """
        Args:
            given: what placeholders and attributes are.
            tensors: those that every call looks up, in that order: `given` ones, and parameters of modules.
        """
        self.reason: str | None = None
        self.steps: list[_Launch | _Call] = []
        self.output: Any = None
        self.given_count = len(tensors)
        self.ties: list[tuple[int, int]] = []
        """Positions of those that are the same tensor."""
        self.given_slots: dict[int, _Slot] = {}
        self._root, self._graph, self._given = root, graph, given
        self._owners: dict[int, _Owner] = {}
        """By storage; of arguments that share one none, since which one a view is of cannot be told."""
        self._alive: dict[int, int] = {}
        self._count = 0
        shared: set[int] = set()
        for number, tensor in enumerate(tensors):
            if id(tensor) in self.given_slots:
                self.ties.append((self.given_slots[id(tensor)].index, number))
                continue
            slot = self.given_slots[id(tensor)] = _Slot("given", f"g{number}", dtype=tensor.dtype, index=number)
            key, owner = tensor.untyped_storage()._cdata, _Owner.of(slot, tensor)
            if self._owners.setdefault(key, owner) is not owner:
                shared.add(key)
        for key in shared:
            del self._owners[key]

    def run(self) -> Any:
        """The graph's result. Afterwards `reason` says why there is no program, or is None."""
        env: dict[fx.Node, Any] = {}
        known: dict[fx.Node, Any] = {}
        last: dict[fx.Node, fx.Node] = {}
        for node in self._graph.nodes:
            for used in node.all_input_nodes:
                last[used] = node
        dying: dict[fx.Node, list[fx.Node]] = {}
        for used, user in last.items():
            dying.setdefault(user, []).append(used)
        for node in self._graph.nodes:
            if node in self._given:
                env[node] = self._given[node]
                known[node] = self._give(env[node])
                self._retain(env[node])
                continue
            args, kwargs = (_plain(fx.node.map_arg(item, env.__getitem__)) for item in (node.args, node.kwargs))
            if node.op == "output":
                if self.reason is None:
                    self.output = fx.node.map_arg(node.args[0], known.__getitem__)
                return args[0]
            symbols: Any = None
            if self.reason is None:
                symbols = [fx.node.map_arg(item, known.__getitem__) for item in (node.args, node.kwargs)]
            try:
                env[node], known[node] = self._node(node, args, kwargs, symbols)
            except _Refused as refused:  # what ran has run: the rest runs as it comes
                self.reason, env[node] = refused.args
            self._retain(env[node])
            for used in dying.get(node, ()):
                self._forget(env.pop(used))
        raise AssertionError("a graph ends with its output")

    def _give(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.untyped_storage()._cdata not in self._owners:
            self.reason = "arguments share memory"
            return None
        return self._value(value, self.given_slots[id(value)].name)

    def _value(self, tensor: torch.Tensor, name: str, viewed_by: _Call | None = None) -> _Value:
        owner = self._owners[tensor.untyped_storage()._cdata]
        return _Value(
            owner.slot, tensor.data_ptr() - owner.begin, tuple(tensor.shape), tensor.stride(), tensor.dtype, name,
            viewed_by=viewed_by,
        )  # fmt: skip

    def _place_of(self, address: int) -> tuple[_Slot, int] | None:
        """The slot in which an address lies, and how far from its beginning."""
        found = next((owner for owner in self._owners.values() if owner.low <= address < owner.high), None)
        return None if found is None else (found.slot, address - found.begin)

    def _retain(self, value: Any) -> None:
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                key = tensor.untyped_storage()._cdata
                self._alive[key] = self._alive.get(key, 0) + 1

    def _forget(self, dead: Any) -> None:
        """Memory whose last value is gone: what comes to lie there is another's."""
        for tensor in pytree.tree_leaves(dead):
            if isinstance(tensor, torch.Tensor):
                key = tensor.untyped_storage()._cdata
                self._alive[key] -= 1
                if self._alive[key] == 0 and key in self._owners and self._owners[key].slot.kind != "given":
                    del self._owners[key]

    def _name(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _node(self, node: fx.Node, args: Any, kwargs: Any, symbols: Any) -> tuple[Any, Any]:
        if node.op == "call_function" and node.target in _KINDS:
            return self._fused(node, args, kwargs, symbols)
        target: Any = node.target
        if node.op == "call_module":
            target = self._root.get_submodule(str(target))
        if node.op == "call_method":
            result, seen = self._observed(lambda: getattr(args[0], str(node.target))(*args[1:], **kwargs))
        else:
            result, seen = self._observed(lambda: target(*args, **kwargs))
        if symbols is None:
            return result, None
        if seen.depends_on_values:
            raise _Refused(f"what '{node}' is depends on tensors' values", result)
        if (
            seen.computing > 1 and node.op != "call_module" and not seen.attends
        ):  # what modules do they may do otherwise
            value = self._taken_apart(seen, (), _tensors_in((args, kwargs)), _values_in(symbols), result, str(node))
            if value is not None:
                return result, value
        is_method = node.op == "call_method"
        return result, self._called(target, is_method, (args, kwargs), symbols, result, seen, str(node))

    @staticmethod
    def _observed(call: Callable[[], Any], launched: events.Events | None = None) -> tuple[Any, _Operators]:
        with _Operators(launched) as seen:
            return call(), seen

    def _called(
        self, target: Any, is_method: bool, real: Any, symbols: Any, result: Any, seen: _Operators, label: str
    ) -> Any:
        """A step of the call, and its result's values; none where it is made of sizes alone."""
        is_view = not seen.computing
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            if not is_view:
                raise _Refused("an operation returns no tensor", result)
            return result
        given = dict(zip(map(id, _tensors_in(real)), _values_in(symbols), strict=True))
        if is_view and all(id(tensor) in given for tensor in tensors):
            return pytree.tree_map_only(torch.Tensor, lambda tensor: given[id(tensor)], result)
        call = _Call(target, symbols[0], symbols[1], None, is_view, seen.is_pure, is_method, label)
        call.result = self._result_of(call, result, given)
        self.steps.append(call)
        return call.result

    def _result_of(self, call: _Call, result: Any, given: Mapping[int, _Value]) -> Any:
        """The values of a call's result; `given` are those of its arguments, by the tensors' identity."""

        def value(tensor: torch.Tensor) -> _Value:
            if id(tensor) in given:
                return given[id(tensor)]
            if not _is_plain(tensor):
                raise _Refused(f"a {type(tensor).__name__} that is not plain is made", result)
            key, name = tensor.untyped_storage()._cdata, self._name()
            if key not in self._owners:
                call.is_view = False  # of memory that nobody else knows of
                self._owners[key] = _Owner.of(_Slot("made", name, dtype=tensor.dtype), tensor)
                return self._value(tensor, name)
            return self._value(tensor, name, call)

        return pytree.tree_map_only(torch.Tensor, value, result)

    def _fused(self, node: fx.Node, args: Any, kwargs: Any, symbols: Any) -> tuple[Any, Any]:
        """A fused operator: its kernels, if they are all that its plan takes."""
        kind = _KINDS[node.target]
        x, weight, bias, operands, epilogue, *values = args
        options = tuple(map(functional._hashable, values))
        said = (kwargs.get("strict", False), kwargs.get("region", 0), kwargs.get("fp32", "exact"))
        pool = tuple(kwargs.get("pool", ()))
        plan = plans.known_plan(kind, epilogue, options, *said, pool, x, weight, bias, operands)
        if plan is None or plan.provisional:
            raise _Refused(NOT_YET, functional.function(kind)(*args, **kwargs))
        with events.recorded() as seen:
            result, operators = self._observed(lambda: plan.run(x, weight, bias, operands), seen)
        if symbols is None:
            return result, None
        if operators.depends_on_values:
            raise _Refused("what a region is depends on tensors' values", result)
        real, inputs = (x, weight, bias, operands), tuple(symbols[0][:4])
        label = f"{node}: {plan.kernel or 'torch'}"
        value = self._taken_apart(operators, seen.memory, _tensors_in(real), _values_in(inputs), result, label)
        if value is None:
            step = _Call(plan.run, inputs, {}, None, False, False, False, label)
            given = dict(zip(map(id, _tensors_in(real)), _values_in(inputs), strict=True))
            value = step.result = self._result_of(step, result, given)
            self.steps.append(step)
        return result, value

    def _taken_apart(
        self, seen: _Operators, memory: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor],
        values: Sequence[_Value], result: Any, label: str,
    ) -> Any:  # fmt: skip
        """Steps for each operator and kernel that made `result`, and its values.

        None, and no step, if one reads what nobody knows of.
        """
        owners = dict(self._owners)
        known = dict(zip(map(id, tensors), values, strict=True))
        steps: list[_Launch | _Call] = []
        try:
            for tensor in memory:
                self._own_memory(tensor)
            done = 0
            for operation in seen.operations:
                steps += [self._launched(launch) for launch in seen.launches[done : operation.launches]]
                done = operation.launches
                if operation.allocates:
                    self._own_memory(operation.result)
                elif not operation.is_view:
                    steps.append(self._operation(operation, known, label))
            steps += [self._launched(launch) for launch in seen.launches[done:]]
            value = pytree.tree_map_only(torch.Tensor, lambda tensor: self._known(tensor, known), result)
        except _Unknown:
            self._owners = owners
            return None
        kept = {tensor.untyped_storage()._cdata for tensor in _tensors_in(result)}
        self._owners = {key: owner for key, owner in self._owners.items() if key in owners or key in kept}
        self.steps += steps
        return value

    def _own_memory(self, tensor: torch.Tensor) -> None:
        slot = _Slot("memory", self._name(), tuple(tensor.shape), tensor.stride(), tensor.dtype, _extent(tensor))
        self._owners.setdefault(tensor.untyped_storage()._cdata, _Owner.of(slot, tensor))

    def _known(self, tensor: torch.Tensor, known: Mapping[int, _Value]) -> _Value:
        """The value that a tensor is, by what it is or by where it lies."""
        if id(tensor) in known:
            return known[id(tensor)]
        owner = self._owners.get(tensor.untyped_storage()._cdata)
        if owner is None or not _is_plain(tensor) or (owner.slot.kind != "memory" and owner.slot.dtype != tensor.dtype):
            raise _Unknown
        return self._value(tensor, self._name())

    def _operation(self, operation: _Operation, known: dict[int, _Value], label: str) -> _Call:
        """The call of one of torch's operators that computes."""
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda tensor: self._known(tensor, known), (tuple(operation.args), dict(operation.kwargs))
        )

        def made(tensor: torch.Tensor) -> _Value:
            key = tensor.untyped_storage()._cdata
            if key not in self._owners:
                if not _is_plain(tensor):
                    raise _Unknown
                name = self._name()
                self._owners[key] = _Owner.of(_Slot("made", name, dtype=tensor.dtype), tensor)
                known[id(tensor)] = self._value(tensor, name)
            return self._known(tensor, known)

        result = pytree.tree_map_only(torch.Tensor, made, operation.result)
        target = _function_of(operation.overload)
        return _Call(target, args, kwargs, result, False, operation.is_pure, False, f"{label}: {operation.overload}")

    def _launched(self, launch: events.Launch) -> _Launch:
        """A step for a kernel, with every address as a place in somebody's memory."""
        if _functions(launch) is None:
            raise _Unknown
        references: list[tuple[_Slot, int]] = []
        for address in launch.addresses:
            place = self._place_of(address)
            if place is None:
                raise _Unknown
            references.append(place)
        return _Launch(launch, references)


class _Unknown(Exception):
    """Memory of which nobody knows whose it is."""


NOT_YET: Final = "a region has no plan yet"
_PLAIN: Final = frozenset((torch.Tensor, nn.Parameter))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its numbers are those in memory, where its strides say."""
    strided = type(tensor) in _PLAIN and tensor.layout is torch.strided
    return strided and not (tensor.is_neg() or tensor.is_conj() or tensor.is_nested)


def _function_of(overload: Any) -> Any:
    """What calls an operator with the same arguments: torch's own function or method, if there is one: it is quicker.

    Their parsers know the names and orders of the operator's schema, of which they are generated.
    """
    name = overload._schema.name.split("::")[-1]
    if overload.namespace != "aten" or overload._overloadname.endswith("out"):
        return overload
    for home in (torch._C._VariableFunctions, torch._C._nn, torch.Tensor):
        found = getattr(home, name, None)
        if found is not None:
            return found
    return overload


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    """As _values_in, of tensors."""
    found: list[torch.Tensor] = []

    def visit(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, tuple | list):
            for part in item:
                visit(part)
        elif isinstance(item, dict):
            for part in item.values():
                visit(part)
        elif isinstance(item, slice):
            visit((item.start, item.stop, item.step))

    visit(tree)
    return found


_DICTS: Final = (dict, fx.immutable_collections.immutable_dict)
_LISTS: Final = (list, fx.immutable_collections.immutable_list)


def _plain(item: Any) -> Any:
    """fx's own lists and dictionaries as those that the code of a graph makes."""
    if type(item) in _DICTS:
        return {key: _plain(part) for key, part in item.items()}
    if type(item) in _LISTS:
        return [_plain(part) for part in item]
    return tuple(_plain(part) for part in item) if type(item) is tuple else item


def _functions(event: events.Launch) -> tuple[int, int] | None:
    """The addresses of a kernel's two functions (binding.h); None if it is no compiled one."""
    found: tuple[int, int] | None = getattr(getattr(event.function, "__self__", None), "functions", None)
    return found


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to behind its last."""
    if tensor.numel() == 0:
        return 0
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (span + 1) * tensor.element_size()


# ------------------------------------------------------------------------------------------------- planning


def _mark_wanted(steps: Sequence[_Launch | _Call], output: Any) -> list[_Launch | _Call]:
    """Says of each value whether Python needs it as a tensor, and drops views and results that nobody needs."""
    for value in _values_in(output):
        value.wanted = value.leaves = value.slot.escapes = True
    kept: list[_Launch | _Call] = []
    read = {value.slot for value in _values_in(output)}
    for step in reversed(steps):
        if isinstance(step, _Launch):
            read.update(_slots_of(step))
        else:
            made = _values_in(step.result)
            if step.is_pure and not any(value.wanted or value.slot in read for value in made):
                continue  # fx graphs keep what only questions about shapes used
            if step.is_view:
                wanted = [value for value in _values_in(step.result) if value.viewed_by is step and value.wanted]
                if all(_is_reinterpreted(value) for value in wanted):
                    continue  # made of the memory itself where it is needed, or by nobody
            for value in _values_in((step.args, step.kwargs)):
                value.wanted = True
                read.add(value.slot)
        kept.append(step)
    return kept[::-1]


def _is_reinterpreted(value: _Value) -> bool:
    """Whether it can be made of the memory that it lies in, without the calls that led to it."""
    kind, dtype = value.slot.kind, value.slot.dtype
    return not value.leaves and (value.dtype == dtype or (kind == "memory" and not value.slot.escapes))


def _place(slots: Sequence[_Slot]) -> int:
    """Gives each slot an offset in the arena, such that none overlaps another that lives at the same time.

    Largest first, each at the lowest offset that is free: within some per cent of the least in practice. Returns the
    arena's size in bytes.
    """
    placed: list[_Slot] = []
    size = 0
    for slot in sorted(slots, key=lambda slot: (-slot.nbytes, slot.first)):
        others = sorted(
            (other for other in placed if other.first <= slot.last and slot.first <= other.last),
            key=lambda other: other.offset,
        )
        offset = 0
        for other in others:
            if offset + slot.nbytes <= other.offset:
                break
            offset = max(offset, -(-(other.offset + other.nbytes) // ALIGNMENT) * ALIGNMENT)
        slot.offset = offset
        size = max(size, offset + slot.nbytes)
        placed.append(slot)
    return size


class _Writer:
    """The text of a program, and what its names mean."""

    def __init__(self, recorder: _Recorder, device: torch.device) -> None:
        self.names: dict[str, Any] = {"array": array, "reinterpret": _reinterpret}
        self.launches = array("Q")
        self.references = array("Q")
        self.params: list[array[int]] = []
        self.steps = _mark_wanted(recorder.steps, recorder.output)
        self._device = device
        self._given = recorder.given_count
        self._lines: list[str] = []
        self._constants = 0
        self._pending: list[_Launch] = []
        self._written: set[_Value] = set()
        self._variables: set[str] = set()
        self._taken: set[_Slot] = set()
        self._typed: set[str] = set()
        self._read: set[int] = set()
        self._assign_slots()
        self._last_use = self._uses(recorder.output)
        self.code = self._write(recorder)

    # ---- memory

    def _assign_slots(self) -> None:
        memory: dict[_Slot, None] = {}
        table: dict[_Slot, None] = {}
        for number, step in enumerate(self.steps):
            for slot in _slots_of(step):
                slot.touch(number)
                if slot.kind == "memory":
                    memory[slot] = None
                if isinstance(step, _Launch) and slot.kind != "given" and (slot.kind == "made" or slot.escapes):
                    table[slot] = None
        self.arena = [slot for slot in memory if not slot.escapes]
        self.arena_size = _place(self.arena)
        self._arena_index = self._given  # behind the given ones
        for index, slot in enumerate(table, start=self._given + 1):
            slot.index = index
        self._table_size = self._given + 1 + len(table)

    def _uses(self, output: Any) -> dict[str, int]:
        """The last step at which each variable must be there."""
        last: dict[str, int] = {}
        for number, step in enumerate(self.steps):
            if isinstance(step, _Call):
                for value in _values_in((step.args, step.kwargs, step.result)):
                    last[value.name] = last[value.slot.name] = number  # a view is made of what its memory begins with
        for step in self.steps:
            for slot in _slots_of(step) if isinstance(step, _Launch) else ():
                if slot.kind == "made":
                    last[slot.name] = max(last.get(slot.name, -1), slot.last)
        for value in _values_in(output):
            last[value.name] = last[value.slot.name] = len(self.steps)
        return last

    # ---- text

    def _line(self, text: str) -> None:
        self._lines.append(f"    {text}")

    def _constant(self, value: Any) -> str:
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        self._constants += 1
        self.names[f"c{self._constants}"] = value
        return f"c{self._constants}"

    def _write(self, recorder: _Recorder) -> str:
        for number, step in enumerate(self.steps):
            if isinstance(step, _Launch):
                self._pending.append(step)
            else:
                self._flush(number - 1)
                self._call(step)
                self._drop(number)
        self._flush(len(self.steps) - 1)
        self._line(f"return {self._tree(recorder.output)}")
        index = self._device.index or 0
        on_gpu = self._device.type == "cuda"
        self.names["context"] = (
            functools.partial(torch._C._cuda_getCurrentRawStream, index) if on_gpu else torch.get_num_threads
        )
        self.names["empty"], self.names["uint8"] = _allocator(self._device), torch.uint8
        self.names["zeros"] = bytes(8 * (self._table_size - self._given))
        head = [
            *(f"g{i} = given[{i}]" for i in sorted(self._read)),
            "t = array('Q', addresses)",
            "t.frombytes(zeros)",
            "table = t.buffer_info()[0]",
            "stream = context()",
        ]
        if self.arena_size:
            head += [f"arena = empty(({self.arena_size},), (1,), uint8)", f"t[{self._arena_index}] = arena.data_ptr()"]
        head += [f"arena_{dtype} = arena.view({dtype})" for dtype in sorted(self._typed)]
        return "\n".join(["def program(given, addresses):", *(f"    {line}" for line in head), *self._lines]) + "\n"

    def _flush(self, number: int) -> None:
        """One call for the launches that are waiting; memory that outlives the program is taken before."""
        if not self._pending:
            return
        first = len(self.launches) // 4
        for step in self._pending:
            for slot, _ in step.references:
                if slot.kind == "memory" and slot.escapes and slot not in self._taken:
                    self._taken.add(slot)
                    shape = f"{slot.shape}, {slot.strides}, {self._dtype(slot.dtype)}"
                    self._line(f"{slot.name} = empty({shape})")
                    self._line(f"t[{slot.index}] = {slot.name}.data_ptr()")
            self._pack(step)
        self._line(f"launch(b'', stream, LAUNCHES, REFERENCES, table, {first}, {len(self.launches) // 4})")
        self._pending.clear()
        self._drop(number)

    def _pack(self, step: _Launch) -> None:
        functions = _functions(step.event)
        assert functions is not None, "else it would be no step"
        entry, error = functions
        params = array("Q", step.event.params + bytes(-len(step.event.params) % 8 or 8))
        self.params.append(params)
        self.launches.extend(
            (entry, error, params.buffer_info()[0], len(self.references) // 2 | len(step.references) << 32)
        )
        for slot, offset in step.references:
            in_arena = slot.index < 0
            self.references.append(self._arena_index if in_arena else slot.index)
            self.references.append((offset + slot.offset if in_arena else offset) & (2**64 - 1))

    def _dtype(self, dtype: torch.dtype) -> str:
        name = str(dtype).removeprefix("torch.")
        self.names[name] = dtype
        return name

    def _drop(self, number: int) -> None:
        """Lets go of what nobody needs after step `number`."""
        dead = sorted(name for name in self._variables if self._last_use.get(name, -1) <= number)
        if dead:
            self._line(f"del {', '.join(dead)}")
            self._variables.difference_update(dead)

    def _call(self, step: _Call) -> None:
        args = [self._tree(item) for item in step.args]
        kwargs = [f"{name}={self._tree(item)}" for name, item in step.kwargs.items()]
        if step.is_method:
            called = f"{args[0]}.{step.target}({', '.join([*args[1:], *kwargs])})"
        else:
            called = f"{self._constant(step.target)}({', '.join([*args, *kwargs])})"
        called = f"{called}  # {step.label}" if step.label.isprintable() else called
        new = [(path, value) for path, value in _paths(step.result) if self._is_new(value)]
        if not new:
            self._line(called)
        elif isinstance(step.result, _Value):
            self._assign(step.result, called)
        else:
            self._line(f"results = {called}")
            for path, value in new:
                self._assign(value, f"results{path}")
            self._line("del results")

    def _is_new(self, value: _Value) -> bool:
        return value not in self._written and (value.slot.kind != "given" or value.name != value.slot.name)

    def _assign(self, value: _Value, text: str) -> None:
        if value in self._written:
            return
        self._line(f"{value.name} = {text}")
        self._written.add(value)
        self._variables.add(value.name)
        slot = value.slot
        if slot.kind == "made" and slot.index >= 0 and slot.name == value.name:
            self._line(f"t[{slot.index}] = {value.name}.data_ptr()")

    def _tree(self, item: Any) -> str:
        """An argument as text."""
        if isinstance(item, _Value):
            return self._variable(item)
        if isinstance(item, slice):
            return f"slice({self._tree(item.start)}, {self._tree(item.stop)}, {self._tree(item.step)})"
        if isinstance(item, dict):
            content = "{" + ", ".join(f"{key!r}: {self._tree(part)}" for key, part in item.items()) + "}"
            return content if type(item) in _DICTS else f"{self._constant(type(item))}(**{content})"
        if type(item) in _LISTS:
            return f"[{', '.join(self._tree(part) for part in item)}]"
        if (isinstance(item, tuple) and _values_in(item)) or type(item) is tuple:
            parts = f"({''.join(self._tree(part) + ', ' for part in item)})"
            if type(item) is tuple:
                return parts
            stars = "" if hasattr(type(item), "n_fields") else "*"  # torch.return_types take a sequence
            return f"{self._constant(type(item))}({stars}{parts})"
        return self._constant(item)

    def _variable(self, value: _Value) -> str:
        """The name of a value, which is made now if no call has made it."""
        slot = value.slot
        if slot.kind == "given" and value.name == slot.name:
            self._read.add(slot.index)
            return value.name
        if value in self._written:
            return value.name
        self._written.add(value)
        size = value.dtype.itemsize
        if slot.kind == "memory" and not slot.escapes:
            dtype = self._dtype(value.dtype)
            self._typed.add(dtype)
            base, at = f"arena_{dtype}", (slot.offset + value.offset) // size
        elif value.leaves and (value.shape, value.strides, value.offset) == (slot.shape, slot.strides, 0):
            value.name = slot.name
            return value.name
        else:
            base, at = slot.name, value.offset // size
            if slot.kind == "given":
                self._read.add(slot.index)
        if value.leaves:
            self._line(f"{value.name} = {base}.as_strided({value.shape}, {value.strides}, {at})")
        else:
            self._line(f"{value.name} = reinterpret({base}, {value.shape}, {value.strides}, {at})")
        self._variables.add(value.name)
        return value.name


def _slots_of(step: _Launch | _Call) -> list[_Slot]:
    if isinstance(step, _Launch):
        return [slot for slot, _ in step.references]
    return [value.slot for value in _values_in((step.args, step.kwargs, step.result))]


def _paths(tree: Any, path: str = "") -> list[tuple[str, _Value]]:
    """The values of a call's result, each with the subscripts that lead to it."""
    if isinstance(tree, _Value):
        return [(path, tree)]
    if isinstance(tree, tuple | list):
        return [found for i, part in enumerate(tree) for found in _paths(part, f"{path}[{i}]")]
    if isinstance(tree, dict):
        return [found for key, part in tree.items() for found in _paths(part, f"{path}[{key!r}]")]
    return []


def _allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    """empty(shape, strides, dtype) on the device, which is the current one."""
    if device.type == "cuda":
        from fxfuse.cuda.launch import empty_strided

        return empty_strided
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype)


_EXECUTOR: Final = build.Source('#include "executor.h"\n', None, "the executor of programs")


# -------------------------------------------------------------------------------------------------- programs


class Program:
    """What runs one kind of call."""

    def __init__(self, recorder: _Recorder, tensors: Sequence[torch.Tensor], constants: Sequence[Any]) -> None:
        """Of a recorded call of these tensors and other arguments. Raises ToolchainError or BuildError."""
        device = next(tensor.device for tensor in tensors)
        writer = _Writer(recorder, device)
        self.code = writer.code
        self.arena_size = writer.arena_size
        self.launches = len(writer.launches) // 4
        self.calls = sum(isinstance(step, _Call) for step in writer.steps)
        self._kept = writer.launches, writer.references, writer.params
        names = writer.names
        names["launch"] = build.load(_EXECUTOR)
        names["LAUNCHES"], names["REFERENCES"] = (part.buffer_info()[0] for part in self._kept[:2])
        exec(compile(self.code, "<fxfuse program>", "exec"), names)
        self.run: Callable[[Sequence[torch.Tensor], list[int]], Any] = names["program"]
        self._constants = tuple(constants)
        self._switches = _switches(device)
        self._differentiable = any(tensor.requires_grad for tensor in tensors)
        self._device = device
        self._count, self._ties = len(tensors), recorder.ties
        self._guard = _guard_of(tensors)

    def fits(self, tensors: Sequence[torch.Tensor], constants: Sequence[Any]) -> bool:
        """Whether the call is of this kind; no gradient is due in one that is."""
        return (
            len(tensors) == self._count
            and self._guard(tensors)
            and all(tensors[first] is tensors[second] for first, second in self._ties)
            and not (self._differentiable and torch.is_grad_enabled())
            and _are_alike(self._constants, constants)
            and self._switches == _switches(self._device)
        )


def _guard_of(tensors: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool]:
    """guard(tensors): type, dtype, device, sizes, strides, requires_grad and dispatch keys are what they are now.

    Of as many tensors, of which those that are the same now are looked at once: torch's guards refuse to look twice.
    """
    once = {id(tensor): tensor for tensor in tensors}
    sizes, strides = (
        [list(tensor.shape) for tensor in once.values()],
        [list(tensor.stride()) for tensor in once.values()],
    )
    check: Callable[..., bool] = _guards(*once.values(), dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    if len(once) == len(tensors):
        return lambda tensors: check(*tensors)
    first: dict[int, int] = {}
    for position, tensor in enumerate(tensors):
        first.setdefault(id(tensor), position)
    positions = tuple(first.values())
    return lambda tensors: check(*[tensors[position] for position in positions])


def _are_alike(before: Sequence[Any], now: Sequence[Any]) -> bool:
    return len(before) == len(now) and all(type(a) is type(b) and a == b for a, b in zip(before, now, strict=True))


def _switches(device: torch.device) -> tuple[Any, ...]:
    plain = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    if device.type != "cuda":
        return plain
    return *plain, tf32_allowed("linear"), tf32_allowed("conv2d"), torch._C._cuda_getDevice()


class Programs:
    """The programs of one graph."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        self.reason: str | None = None
        """Why there are none."""
        self.programs: list[Program] = []
        self._root, self._graph = root, graph
        self._seen: tuple[Callable[[Sequence[torch.Tensor]], bool], tuple[Any, ...]] | None = None
        self._tries = 0
        self._lock = free_in_children(threading.RLock())
        self._nodes = [node for node in graph.nodes if node.op == "placeholder"]
        self._names = [str(node.target) for node in self._nodes]
        self._attributes: dict[str, tuple[dict[str, Any], str]] = {}
        try:
            if _guards is None or _reinterpret is None:
                raise _Refused("this version of torch lacks what programs are made with")
            if not any(node.target in _KINDS for node in graph.nodes):
                raise _Refused("nothing is fused")
            _check_graph(root, graph)
            for node in graph.nodes:
                if node.op == "get_attr":
                    self._attributes.setdefault(str(node.target), _table_of(root, str(node.target)))
                if node.op == "call_module":  # of these nothing is read here, but they decide what the call is
                    module = root.get_submodule(str(node.target))
                    for name, _ in (*module.named_parameters(), *module.named_buffers()):
                        path = f"{node.target}.{name}"
                        self._attributes.setdefault(path, _table_of(root, path))
        except _Refused as refused:
            self.reason = str(refused)

    def __reduce__(self) -> tuple[Any, ...]:
        """Nobody else's: whoever pickles a graph with its attributes (torch.package) gets none."""
        return _nothing, ()

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """forward(*args, **kwargs), by a program if there is one for such a call or it is time for one."""
        if self.reason is not None or functional._observed(profiled=False) or functional._intercepted():
            return forward(*args, **kwargs)
        if kwargs or len(args) != len(self._names):
            bound = self._bound(args, kwargs)
            if bound is None:
                return forward(*args, **kwargs)
            args_bound = bound
        else:
            args_bound = args
        try:
            attributes = [table[name] for table, name in self._attributes.values()]
        except KeyError:  # it is gone, which the graph's code has words for
            return forward(*args, **kwargs)
        tensors = [*(arg for arg in args_bound if isinstance(arg, torch.Tensor)), *attributes]
        constants = [arg for arg in args_bound if not isinstance(arg, torch.Tensor)]
        for program in self.programs:
            if program.fits(tensors, constants):
                addresses = [tensor.data_ptr() for tensor in tensors]
                if plans._unaligned(addresses):
                    break
                return program.run(tensors, addresses)
        else:
            return self._unknown(forward, args, kwargs, args_bound, attributes, tensors, constants)
        return forward(*args, **kwargs)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """The arguments in the order of the graph's, or None where some are missing or unknown."""
        missing = self._nodes[len(args) :]
        if len(args) > len(self._nodes) or not kwargs.keys() <= {str(node.target) for node in missing}:
            return None
        bound = list(args)
        for node in missing:
            if node.target not in kwargs and not node.args:
                return None
            bound.append(kwargs[str(node.target)] if node.target in kwargs else node.args[0])
        return tuple(bound)

    def _unknown(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], bound: Sequence[Any],
        attributes: Sequence[Any], tensors: Sequence[torch.Tensor], constants: Sequence[Any],
    ) -> Any:  # fmt: skip
        """A call for which there is no program: recorded if the one before was of the same kind."""
        if any(tensor is None for tensor in tensors):  # a parameter that is gone
            return forward(*args, **kwargs)
        if functional._needs_gradient(tensors) or not _are_plain(tensors, constants):
            return forward(*args, **kwargs)
        before = self._seen
        self._seen = None
        if before is None or not (_are_alike(before[1], (len(tensors), *constants)) and before[0](tensors)):
            self._seen = _guard_of(tensors), (len(tensors), *constants)
            return forward(*args, **kwargs)
        given: dict[fx.Node, Any] = dict(zip(self._nodes, bound, strict=True))
        values = dict(zip(self._attributes, attributes, strict=True))
        given.update((node, values[str(node.target)]) for node in self._graph.nodes if node.op == "get_attr")
        recorder = _Recorder(self._root, self._graph, given, tensors)
        result = recorder.run()
        if recorder.reason is not None:
            self._tries += 1
            if recorder.reason != NOT_YET or self._tries == MOST_TRIES:
                self.reason = recorder.reason
                logger.info("fxfuse: no program is made: %s", self.reason)
            return result
        try:
            program = Program(recorder, tensors, constants)
        except Exception as error:
            self.reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
            logger.warning("fxfuse: no program is made", exc_info=error)
            return result
        with self._lock:
            self.programs = [program, *self.programs][:MOST_KEPT]
        return result


def _nothing() -> None:
    return None


def prepare() -> None:
    """Compiles what all programs need, if there is a compiler. Where there is none, programs say so."""
    with contextlib.suppress(FxfuseError):
        build.load(_EXECUTOR)


def _are_plain(tensors: Sequence[torch.Tensor], constants: Sequence[Any]) -> bool:
    devices = {tensor.device for tensor in tensors}
    return (
        len(devices) == 1
        and _PLAIN.issuperset(map(type, tensors))
        and all(
            tensor.layout is torch.strided and not (tensor.is_neg() or tensor.is_conj() or tensor.is_nested)
            for tensor in tensors
        )
        and all(
            value is None or isinstance(value, bool | int | float | str | torch.dtype | tuple) for value in constants
        )
    )


def _table_of(root: nn.Module, path: str) -> tuple[dict[str, Any], str]:
    """The dictionary in which an attribute of a module is, and its name there."""
    *parents, name = path.split(".")
    module = root.get_submodule(".".join(parents))
    for table in (module._parameters, module._buffers, vars(module)):
        if isinstance(table.get(name), torch.Tensor):
            return table, name
    raise _Refused(f"'{path}' is no tensor of a module")
