"""Records a call: runs a graph node by node, and notes the steps that would compute the same again.

The input is a graph and the values of its inputs. The output is the graph's result, and `Recorder.steps`: kernel
launches and calls of torch (values.py has their classes).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import fx, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils import _pytree as pytree

from fxfuse import events, functional, plans
from fxfuse.cuda import gpu
from fxfuse.errors import first_line
from fxfuse.hooks import has_hooks, why_no_kernel
from fxfuse.layout import FORMATS, varying
from fxfuse.long_rows import LONG_ROWS, by_channel
from fxfuse.problem import ANCHORS, CONVOLUTIONS, Plan, Problem, TensorMeta
from fxfuse.program import attention, attention_training, merge
from fxfuse.program.leaves import Leaves
from fxfuse.program.loops import Loops, rows_pay
from fxfuse.program.observed import Operation, Operators, function_of, places
from fxfuse.program.operators import (
    loops_into,
    loops_of,
    loops_of_chain,
    loops_of_layer_norm,
    loops_of_pass,
)
from fxfuse.program.values import (
    Call,
    Launch,
    Number,
    Owner,
    Refused,
    Slot,
    Value,
    address,
    as_plain,
    device_of,
    extent,
    functions_of,
    is_plain,
    numbers_in,
    tensors_in,
    values_in,
)

logger = logging.getLogger("fxfuse")

KINDS: Final[dict[Any, str]] = {functional.function(kind): kind for kind in ANCHORS}
"""The fused operators, and the kind of region that each runs."""
NOT_YET: Final = "a region has no plan yet"

# -------------------------------------------------------------------------------------------- what may be recorded

_LIBRARIES: Final = ("torch", "torchvision", "operator", "_operator", "builtins", "math", "fxfuse")
_SWITCHES: Final = ("autocast", "set_grad", "_enter", "_exit", "inference_mode", "checkpoint", "no_grad", "hook")
"""Parts of the names of functions that change how other functions run."""
_PLAIN: Final = (
    bool | int | float | complex | str | bytes | None | slice | range | torch.dtype | torch.device | torch.layout
    | torch.memory_format | torch.finfo | torch.iinfo | type
)  # fmt: skip
"""Types of results that hold no tensors."""
_NUMBERS: Final = bool | int | float | None
_AUTOCAST: Final = ("_enter_autocast", "_exit_autocast")
_METHODS_REFUSED: Final = frozenset(
    {"backward", "requires_grad_", "retain_grad", "numpy", "data_ptr", "set_", "resize_", "resize_as_", "share_memory_",
     "pin_memory", "register_hook", "detach_", "storage", "untyped_storage", "apply_", "map_"}
)  # fmt: skip


def is_variable(node: fx.Node) -> bool:
    """Whether a placeholder is variadic (*args, **kwargs)."""
    return node.op == "placeholder" and str(node.target).startswith("*")


def is_body(root: nn.Module, node: fx.Node) -> bool:
    """Whether an attribute that a graph reads is the graph that Dynamo makes of an autograd.Function's forward or
    backward, without tensors of its own. Other operators that take graphs cannot be recorded."""
    *path, name = str(node.target).split(".")
    found = getattr(root.get_submodule(".".join(path)), name, None)
    is_graph = isinstance(found, fx.GraphModule) and not [*found.parameters(), *found.buffers()]
    return is_graph and all(getattr(user.target, "__name__", "") == _OF_FUNCTION for user in node.users)


_OF_FUNCTION: Final = "autograd_function_apply"


def check_graph(root: nn.Module, graph: fx.Graph, with_gradients: bool = False) -> None:
    """Raises Refused if a node may do more than compute. Such a node cannot be recorded.

    Args:
        with_gradients: whether the graph will run as it is, so that gradients may be switched off in it.
    """
    depth = 0
    for node in graph.nodes:
        target: Any = node.target
        if is_variable(node) and node.users:
            raise Refused("its arguments are not known one by one")
        refusal = why_refused(root, node)
        if refusal is not None:
            raise Refused(refusal)
        if node.op == "get_attr" and is_body(root, node):
            body = root.get_submodule(str(target))
            assert isinstance(body, fx.GraphModule)
            check_graph(body, body.graph, with_gradients)
        if getattr(target, "namespace", "").endswith(("c10d_functional", "c10d_functional_autograd")):
            raise Refused(f"'{node}' is a collective, which runs beside what else there is to do")
        if node.op == "call_function":
            home = (getattr(target, "__module__", None) or "torch").split(".")[0]
            name = getattr(target, "__name__", "")
            depth += (name == "_vmap_increment_nesting") - (name == "_vmap_decrement_nesting")
            if isinstance(target, type) and issubclass(target, dict) and dataclasses.is_dataclass(target):
                continue  # transformers' results: they hold what they are given
            if name in _AUTOCAST:  # nodes under autocast are recorded as single operators, or refused
                continue
            if with_gradients and name == "_set_grad_enabled":
                continue
            known = home in _LIBRARIES or _is_allowed_in_graphs(target)
            if not known or any(part in name for part in _SWITCHES):
                raise Refused(f"'{name or target}' may do more than compute")
    if depth:
        raise Refused("a vmap begins and does not end")


def why_refused(root: nn.Module, node: fx.Node) -> str | None:
    """Why a module or method that a node calls may do more than compute. None if it does not, and for functions."""
    target = str(node.target)
    if node.op == "call_method" and (not hasattr(torch.Tensor, target) or target in _METHODS_REFUSED):
        return f"the method '{target}' may do more than compute"
    if node.op != "call_module":
        return None
    module = root.get_submodule(target)
    if has_hooks(module):
        return f"'{target}' {why_no_kernel(module)}"
    is_known = type(module).__module__.startswith("torch.nn.")
    return None if is_known else f"'{target}' is a {type(module).__name__}, which may do more than compute"


def _is_allowed_in_graphs(function: Any) -> bool:
    """Whether a function was given to `torch.compiler.allow_in_graph`, as einx's are: it only computes."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    return rules is not None and bool(rules.is_callable_allowed(function))


_aten: Final = torch.ops.aten


_OF_NESTED: Final = _aten._nested_tensor_from_mask.default
"""torch's operator by which an encoder leaves out what is padded."""
_FAST_PATHS: Final[Mapping[Any, Sequence[int]]] = {
    _aten._transformer_encoder_layer_fwd.default: (7, 18),  # use_gelu, mask
    _aten._native_multi_head_attention.default: (9,),  # mask
}
"""torch's operators for a whole module, and the positions of the arguments with which they compute something else."""
_OWN: Final = ("aten", "fxfuse")
"""The namespaces of operators that keep no result."""
_INDEXED: Final = (_aten.index, _aten.index_put, _aten.index_put_)
"""Operators whose second argument is a list of index tensors, which may lie on a CPU."""
_FILLED: Final = {
    getattr(_aten, f"{prefix}{name}{suffix}"): number
    for name, number in (("zeros", 0), ("ones", 1), ("full", None), ("empty", None))
    for prefix, suffix in (("new_", ""), ("", "_like"))
} | {_aten.new_empty_strided: None}
"""Operators that read only the shape and dtype of a tensor, and the number that fills their result. None if an argument
gives the number, or if nothing fills the result."""


def full_strided(
    shape: Sequence[int], strides: Sequence[int], number: complex, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A new tensor filled with `number`."""
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).fill_(number)


# ------------------------------------------------------------------------------------------------- recording


class Recorder:
    """Runs a graph node by node, and notes the steps that would compute the same again."""

    def __init__(
        self, root: nn.Module, graph: fx.Graph, leaves: Leaves, given: Mapping[fx.Node, Any],
        tensors: Sequence[torch.Tensor], by_parts: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            leaves: the modules that may be recorded as their operators. Every call checks that they are unchanged.
            given: the values of placeholders and attributes.
            tensors: the tensors of a call, in the program's order: those in `given`, and parameters of modules.
            by_parts: whether modules with attention run without torch's single operator for the whole module, so that
                the operators between their products can be merged.
        """
        self.reason: str | None = None
        self.steps: list[Launch | Call] = []
        self._noted: dict[fx.Node, Any] = {}
        """The symbolic results of nodes: values in the place of tensors."""
        self._tensors = tensors
        self.output: Any = None
        self.given_count = len(tensors)
        self.ties: list[tuple[int, int]] = []
        """Pairs of positions at which a call has the same tensor."""
        self._root, self._graph, self._leaves, self._given = root, graph, leaves, given
        self._by_parts = by_parts
        self._device = device_of(tensors)
        self._owners: dict[int, Owner] = {}
        """The owner of each storage. Where arguments share a storage, it is the one at the lowest address: from there
        kernels of loops count elements, without a sign."""
        self._numbers: dict[int, int] = {}
        """The positions of given tensors, by identity."""
        self._autocast_then = self._autocast()
        self._alive: dict[int, int] = {}
        self._count = 0
        self.distances: list[tuple[int, int, int]] = []
        """For arguments that share a storage: (its owner, another, bytes from the owner's address to the other's)."""
        attributes = {id(given[node]) for node in graph.nodes if node.op == "get_attr" and node in given}
        self._lasting: set[str] = set()
        """Names of the given slots of parameters and buffers. Dynamo passes these as arguments, with a mark."""
        self.given_names: dict[str, int] = {}
        memory: dict[int, list[tuple[Slot, torch.Tensor]]] = {}
        """By storage: the slots of the given tensors in it."""
        for number, tensor in enumerate(tensors):
            if id(tensor) in self._numbers:
                self.ties.append((self._numbers[id(tensor)], number))
                continue
            self._numbers[id(tensor)] = number
            name = f"g{number}"
            self.given_names[name] = number
            if id(tensor) in attributes or hasattr(tensor, "_dynamo_static_input_type"):
                self._lasting.add(name)
            slot = self._slot("given", name, tensor)
            slot.index = number
            memory.setdefault(tensor.untyped_storage()._cdata, []).append((slot, tensor))
        for key, given_there in memory.items():
            owner = self._owners[key] = Owner.of(*min(given_there, key=lambda pair: address(pair[1])))
            self.distances += [(owner.slot.index, slot.index, address(tensor) - owner.begin)
                               for slot, tensor in given_there if slot is not owner.slot]  # fmt: skip

    def lent(self, marks: bytes) -> dict[Slot, int]:
        """Lent memory: the slots that results may be placed in after their last use, and their sizes in bytes.

        Args:
            marks: for each tensor, whether its memory is lent (Lent).
        """
        found: dict[Slot, int] = {}
        for tensor, mark in zip(self._tensors, marks, strict=False):
            owner = self._owners[tensor.untyped_storage()._cdata]
            begin = address(tensor) - owner.begin
            if mark and not owner.slot.is_apart:
                found[owner.slot] = max(found.get(owner.slot, 0), begin + extent(tensor))
        return found

    def run(self) -> Any:
        """Runs the graph and returns its result. Afterwards `reason` is None, or says why there is no program."""
        env: dict[fx.Node, Any] = {}
        known = self._noted
        last: dict[fx.Node, fx.Node] = {}
        for node in self._graph.nodes:
            for used in node.all_input_nodes:
                last[used] = node
        dying: dict[fx.Node, list[fx.Node]] = {}
        for used, user in last.items():
            dying.setdefault(user, []).append(used)
        for nodes in _groups(self._graph):
            node = nodes[-1]
            if node in self._given:
                env[node] = self._given[node]
                known[node] = self._give(env[node])
                self._retain(env[node])
                continue
            if node.op == "get_attr":  # is_body
                env[node] = known[node] = self._root.get_submodule(str(node.target))
                continue
            if node.op == "output":
                if self.reason is None:
                    self.output = fx.node.map_arg(node.args[0], known.__getitem__)
                return _filled(node.args, env)[0]
            made, note = self._ran(node, env) if len(nodes) == 1 else self._ran_together(nodes, env)
            env.update(made)
            if self.reason is None:
                try:
                    found = note(known)
                    known.update(found)
                    self._retain([made[node] for node in found])
                except Refused as refused:  # the remaining nodes run without being recorded
                    self.reason = str(refused)
                except Exception as error:
                    self.reason = f"{type(error).__name__}: {first_line(error)}"
                    logger.warning("fxfuse: '%s' could not be noted in a program", node, exc_info=error)
            for used in itertools.chain.from_iterable(dying.get(node, ()) for node in nodes):
                dead = env.pop(used)
                if used in known:
                    self._forget(dead)
        raise AssertionError("a graph ends with its output")

    def described(self) -> dict[str, Any]:
        """The results of the graph's nodes, by name: tensors as TensorMeta, and numbers. Others are left out."""
        found: dict[str, Any] = {}
        for node, value in self._noted.items():
            given = self._given.get(node)
            if isinstance(given, torch.Tensor):
                found[node.name] = TensorMeta.of(given, given.device)
            elif isinstance(value, Value) and self._device is not None:
                device = torch.device("cpu") if value.slot.is_apart else self._device
                found[node.name] = TensorMeta(value.shape, value.strides, value.dtype, device)
            elif isinstance(value, _NUMBERS):
                found[node.name] = value
        return found

    def is_lasting(self, slot: Slot) -> bool:
        """Whether a slot belongs to the model, or was computed from numbers alone: it depends on no call's argument."""
        return slot.constant is not None or slot.name in self._lasting

    def _give(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return self._value(value, f"g{self._numbers[id(value)]}")

    def _value(self, tensor: torch.Tensor, name: str, viewed_by: Call | None = None) -> Value:
        owner = self._owners[tensor.untyped_storage()._cdata]
        offset = address(tensor) - owner.begin
        if offset < 0:  # as_strided can do that
            raise Refused("a view begins before the tensor that it is a view of")
        shape, strides = tuple(tensor.shape), tensor.stride()
        return Value(owner.slot, offset, shape, strides, tensor.dtype, name, viewed_by=viewed_by)

    def _place_of(self, address: int) -> tuple[Slot, int] | None:
        """The slot in which an address lies, and the offset in it in bytes."""
        found = next((owner for owner in self._owners.values() if owner.low <= address < owner.high), None)
        return None if found is None else (found.slot, address - found.begin)

    def _retain(self, value: Any) -> None:
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                key = tensor.untyped_storage()._cdata
                self._alive[key] = self._alive.get(key, 0) + 1

    def _forget(self, dead: Any) -> None:
        """Drops the owners of memory whose last value is dead: torch may reuse the address for something else."""
        if self.reason is not None:
            return
        for tensor in pytree.tree_leaves(dead):
            if isinstance(tensor, torch.Tensor):
                key = tensor.untyped_storage()._cdata
                self._alive[key] -= 1
                if self._alive[key] == 0 and key in self._owners and self._owners[key].slot.kind != "given":
                    del self._owners[key]

    def _slot(self, kind: str, name: str, tensor: torch.Tensor, made_of: Iterable[Value] | None = None) -> Slot:
        """A slot that begins with `tensor`, which was computed from the values `made_of`."""
        is_constant = made_of is not None and all(value.slot.constant is not None for value in made_of)
        constant = tensor if is_constant else None
        return Slot(
            kind, name, tuple(tensor.shape), tensor.stride(), tensor.dtype, is_apart=tensor.device != self._device,
            constant=constant,
        )  # fmt: skip

    def _autocast(self) -> torch.dtype | None:
        """The dtype that torch.autocast uses now; None if it is off."""
        return None if self._device is None else functional.current_autocast(self._device.type)

    def _name(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _ran(self, node: fx.Node, env: dict[fx.Node, Any]) -> tuple[dict[fx.Node, Any], Note]:
        """Runs a node. Returns its result, and the function that notes it in the program."""
        args, kwargs = _filled((node.args, node.kwargs), env)
        is_fused = node.op == "call_function" and node.target in KINDS
        if is_fused and self._autocast() == self._autocast_then:
            return self._ran_fused(node, args, kwargs)
        given = tensors_in((args, kwargs))
        before = list(map(_metadata, given))
        module = self._root.get_submodule(str(node.target)) if node.op == "call_module" else None

        def call() -> Any:
            return _called(node, args, kwargs, self._root)

        result, seen = self._observed(call)
        if self._by_parts and module is not None and module in self._leaves and _has_fast_path(module, seen):
            expected = result
            result, seen = self._observed(lambda: _lying_as(expected, _by_its_parts(call)))
        own = self._by_own_kernel(node, args, kwargs, given, result)
        if own is not None:
            with events.recorded() as launched:
                result, kernel = self._observed(own, launched)

        def note(known: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
            symbols = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
            target: Any = node.target if module is None else module
            if getattr(target, "__name__", "") in _AUTOCAST:
                return {node: None}
            is_asked = seen.depends_on_values or numbers_in(symbols)
            if is_asked and isinstance(result, bool | int | float | None):
                return {node: self._asked(node, target, symbols, result)}
            if numbers_in(symbols):
                raise Refused(f"what '{node}' is depends on tensors' values")
            if seen.depends_on_values:
                raise Refused(f"what '{node}' is depends on tensors' values")
            if list(map(_metadata, given)) != before:
                raise Refused(f"'{node}' changes the shape or the strides of a tensor in place")
            if own is not None:
                with contextlib.suppress(_Unknown):
                    values = values_in(symbols)
                    return {node: self._taken_apart(kernel, launched.memory, given, values, result, str(node))}
            may_change = module is not None and module not in self._leaves  # another call may compute something else
            if seen.computing and not may_change:
                with contextlib.suppress(_Unknown):
                    return {node: self._taken_apart(seen, (), given, values_in(symbols), result, str(node))}
            if seen.computing and self._autocast() != self._autocast_then:
                raise Refused(f"'{node}' runs under a torch.autocast of the model's own")
            is_method = node.op == "call_method"
            return {node: self._called(target, is_method, (args, kwargs), symbols, result, seen, str(node))}

        return {node: result}, note

    def _by_own_kernel(
        self, node: fx.Node, args: Any, kwargs: Any, given: Sequence[torch.Tensor], result: Any
    ) -> Callable[[], Any] | None:
        """A function that computes a node's result by a kernel of ours; None if there is none that is quicker."""
        if not self._by_parts or self._autocast() is not None or self.reason is not None:
            return None
        if node.target in attention.CALLS:
            return attention.planned(args, kwargs, result, functools.partial(self._repeated, node, given))
        if node.target in attention_training.PLANNED:
            return attention_training.planned(node.target, args, kwargs, result)
        return None

    def _repeated(self, node: fx.Node, given: Sequence[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor whose heads an argument of a node repeats, if it lies in given memory; otherwise None."""
        symbols = fx.node.map_arg((node.args, node.kwargs), self._noted.__getitem__)
        values = dict(zip(map(id, given), values_in(symbols), strict=True))
        source = attention.repeated(values[id(tensor)], self.steps)
        if source is None or source.slot.kind != "given":
            return None
        first = self._tensors[source.slot.index]
        begin = int(first.storage_offset()) + source.offset // source.dtype.itemsize
        return first.detach().as_strided(source.shape, source.strides, begin)

    def _asked(self, node: fx.Node, target: Any, symbols: Any, result: Any) -> Number | None:
        """Adds a step that reads a number from tensors' values, tests such a number, or raises if a test fails."""
        answer = None if result is None else Number(self._name())
        is_method = node.op == "call_method"
        self.steps.append(Call(target, symbols[0], symbols[1], answer, False, False, is_method, str(node)))
        return answer

    def _ran_together(self, nodes: Sequence[fx.Node], env: dict[fx.Node, Any]) -> tuple[dict[fx.Node, Any], Note]:
        """As `_ran`, for the nodes of a vmap together: only its final results are tensors with memory of their own."""
        inner, made = frozenset(nodes), dict(env)
        needed = dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in inner)
        results = [node for node in nodes if not node.users.keys() <= inner]

        def compute() -> None:
            for node in nodes:
                args, kwargs = _filled((node.args, node.kwargs), made)
                made[node] = _called(node, args, kwargs, self._root)

        _, seen = self._observed(compute)
        real, found = [env[node] for node in needed], [made[node] for node in results]

        def note(known: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
            symbols = [known[node] for node in needed]
            if seen.depends_on_values:
                raise Refused(f"what '{nodes[-1]}' is depends on tensors' values")
            try:
                values = self._taken_apart(seen, (), tensors_in(real), values_in(symbols), found, str(nodes[-1]))
            except _Unknown:
                raise Refused(f"what is computed up to '{nodes[-1]}' has no memory of its own") from None
            return dict(zip(results, values, strict=True))

        return {node: made[node] for node in nodes}, note

    def _observed(self, call: Callable[[], Any], launched: events.Events | None = None) -> tuple[Any, Operators]:
        on_gpu = self._device is not None and merge.runs_on_gpu(self._device)
        with Operators(launched, _APART if on_gpu else None) as seen:
            return call(), seen

    def _called(
        self, target: Any, is_method: bool, real: Any, symbols: Any, result: Any, seen: Operators, label: str
    ) -> Any:
        """Adds a step that calls `target`, and returns the values of its result.

        No step is added if the result holds no tensor and depends on sizes alone, or if it is the arguments themselves.
        """
        is_view = not seen.computing
        leaves = pytree.tree_leaves(result)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        unknown = next((leaf for leaf in leaves if not isinstance(leaf, torch.Tensor | _PLAIN)), None)
        if unknown is not None:
            raise Refused(f"'{label}' makes a {type(unknown).__name__}")
        if not tensors and is_view:
            return result
        if not tensors and result is not None:
            raise Refused(f"what '{label}' is depends on tensors' values")
        given = dict(zip(map(id, tensors_in(real)), values_in(symbols), strict=True))
        if is_view and all(id(tensor) in given for tensor in tensors):
            return pytree.tree_map_only(torch.Tensor, lambda tensor: given[id(tensor)], result)
        call = Call(target, symbols[0], symbols[1], None, is_view, seen.is_pure, is_method, label, draws=seen.draws)
        call.overwrites = seen.overwrites
        call.result = self._result_of(call, result, given)
        self.steps.append(call)
        return call.result

    def _result_of(self, call: Call, result: Any, given: Mapping[int, Value]) -> Any:
        """The values of a call's result.

        Args:
            given: the values of its arguments, by the tensors' identity.
        """

        def value(tensor: torch.Tensor) -> Value:
            if id(tensor) in given:
                return given[id(tensor)]
            if not is_plain(tensor):
                raise Refused(f"a {type(tensor).__name__} that is not plain is made")
            key, name = tensor.untyped_storage()._cdata, self._name()
            if key not in self._owners:
                call.is_view = False  # its memory is new, so it is no view of anything known
                self._owners[key] = Owner.of(self._slot("made", name, tensor, given.values()), tensor)
                return self._value(tensor, name)
            return self._value(tensor, name, call)

        return pytree.tree_map_only(torch.Tensor, value, result)

    def _ran_fused(self, node: fx.Node, args: Any, kwargs: Any) -> tuple[dict[fx.Node, Any], Note]:
        """As `_ran`, for a fused operator. It is recorded as its kernels, if its plan runs nothing else."""
        kind = KINDS[node.target]
        x, weight, bias, operands, epilogue, *values = args
        options = tuple(map(functional._hashable, values))
        said = (kwargs.get("strict", False), kwargs.get("region", 0), kwargs.get("fp32", "exact"))
        pool = tuple(kwargs.get("pool", ()))
        posed = (kind, epilogue, options, *said, pool, x, weight, bias, operands)
        plan = plans.known_plan(*posed)
        if plan is None or plan.provisional:
            return {node: functional.function(kind)(*args, **kwargs)}, _not_yet
        with events.recorded() as seen:
            result, operators = self._observed(lambda: plan.run(x, weight, bias, operands), seen)

        def note(known: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
            real = x, weight, bias, operands
            inputs: Any = fx.node.map_arg(node.args[:4], known.__getitem__)
            reads_number = any(tensor.dim() == 0 and tensor.device.type == "cpu" for tensor in (x, *operands))
            if operators.depends_on_values and not reads_number:
                raise Refused("what a region is depends on tensors' values")
            label = f"{node}: {plan.kernel or 'torch'}"
            value = None
            if not reads_number:  # else the number would be fixed in the kernel's recorded arguments
                with contextlib.suppress(_Unknown):
                    value = self._taken_apart(
                        operators, seen.memory, tensors_in(real), values_in(inputs), result, label
                    )
            if value is None:
                step = Call(plan.run, inputs, {}, None, False, False, False, label)
                given = dict(zip(map(id, tensors_in(real)), values_in(inputs), strict=True))
                value = step.result = self._result_of(step, result, given)
                self.steps.append(step)
            elif not pool and isinstance(self.steps[-1], Launch):
                if seen.launches[-1].in_place:
                    self.steps[-1].in_place = _operands_in_place(kind, inputs, value)
                if len(seen.launches) == 1:
                    loops = self._loops_of(plan, kind, lambda: plans.problem_of(*posed), inputs, value)
                    self.steps[-1].loops = self._paying(loops)
                    if loops is not None:  # it reads other new memory: copies of operands
                        self.steps[-1].writes = frozenset([loops.output.slot])
            return {node: value}

        return {node: result}, note

    def _paying(self, loops: Loops | None) -> Loops | None:
        """The loops, unless a GPU's kernel would be slow at their rows, so that the recorded one stays."""
        if loops is None or self._device is None or not merge.runs_on_gpu(self._device):
            return loops
        return loops if rows_pay(loops) else None

    def _loops_of(
        self, plan: Plan, kind: str, problem: Callable[[], Problem], inputs: Sequence[Any], result: Value
    ) -> Loops | None:
        """The loops that compute the same as a plan's launch, which is the last step; None if there are none."""
        x, weight, bias, operands = inputs
        if kind == "pointwise":
            return loops_of_chain(problem(), x, operands, result)
        if plan.computes is None:
            return None
        if plan.computes.acc == "layer_norm":
            given = {"input": x, "weight": weight, "bias": bias, **dict(problem().options)}
            return loops_of_layer_norm(plan.computes.expression, given, operands, result)
        before = self.steps[-2]
        made = values_in(before.result) if isinstance(before, Call) else []
        if len(made) != 1 or math.prod(made[0].shape) != math.prod(result.shape):
            return None
        if plan.computes.reads_bias:
            planes = (1,) * (len(result.shape) - 2) if kind in CONVOLUTIONS else ()
            strides = (*bias.strides, *(0 for _ in planes))
            operands = [*operands, dataclasses.replace(bias, shape=(*bias.shape, *planes), strides=strides)]
        return loops_of_pass(plan.computes.expression, made[0], operands, result)

    def _taken_apart(
        self, seen: Operators, memory: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor],
        values: Sequence[Value], result: Any, label: str,
    ) -> Any:  # fmt: skip
        """Adds a step for each operator and kernel that made `result`, and returns the values of `result`.

        Raises _Unknown, and adds no step, if one of them reads memory without a known owner, or if a tensor gets
        another shape in place.
        """
        if any(torch.Tag.inplace_view in operation.overload.tags for operation in seen.operations):
            raise _Unknown
        before = len(self._owners)
        known: dict[int, Any] = dict(zip(map(id, tensors), values, strict=True))
        steps: list[Launch | Call] = []
        are_constant = all(value.slot.constant is not None for value in values)
        try:
            for tensor in memory:
                self._own_memory(tensor, are_constant)
            done = 0
            for operation in seen.operations:
                steps += [self._launched(launch, label) for launch in seen.launches[done : operation.launches]]
                done = operation.launches
                if operation.allocates:
                    self._own_memory(operation.result, are_constant)
                elif operation.overload is _aten.lift_fresh.default and self._is_number(operation.result):
                    known[id(operation.result)] = operation.result
                elif not operation.is_view and not operation.changes_nothing:
                    steps += self._operations(operation, known, label)
            steps += [self._launched(launch, label) for launch in seen.launches[done:]]
            for tensor in tensors_in(result):
                if id(tensor) in seen.strides_before:  # the step's result has these strides, the tensor is a view of it
                    self._known(tensor, known).strides = seen.strides_before[id(tensor)]
                    known[id(tensor)] = self._value(tensor, self._name())
            value = pytree.tree_map_only(torch.Tensor, lambda tensor: self._known(tensor, known), result)
        except _Unknown:
            for key in self._latest(before):
                del self._owners[key]
            raise
        new = self._latest(before)
        written = {self._owners[key].slot for key in new}
        written.update(made.slot for made in values_in(value))  # a plan may overwrite its input in place
        for step in steps:
            if isinstance(step, Launch):  # plans write nowhere else
                step.writes = written.intersection(slot for slot, _ in step.references)
        kept = {tensor.untyped_storage()._cdata for tensor in tensors_in(result)}
        for key in new:
            if key not in kept:
                del self._owners[key]
        self.steps += steps
        return value

    def _latest(self, before: int) -> list[int]:
        """The storages that have had an owner since there were `before` of them. None has lost its owner since."""
        return list(itertools.islice(reversed(self._owners), len(self._owners) - before))

    def _is_number(self, tensor: torch.Tensor) -> bool:
        """Whether torch itself made this tensor of a Python number, without an operator for it (x[index] = 0)."""
        is_one = tensor.dim() == 0 and tensor.device.type == "cpu"
        return is_one and tensor.untyped_storage()._cdata not in self._owners

    def _own_memory(self, tensor: torch.Tensor, is_constant: bool) -> None:
        if tensor.device != self._device:
            raise _Unknown
        slot = Slot("memory", self._name(), tuple(tensor.shape), tensor.stride(), tensor.dtype, extent(tensor))
        slot.constant = tensor if is_constant else None
        self._owners.setdefault(tensor.untyped_storage()._cdata, Owner.of(slot, tensor))

    def _known(self, tensor: torch.Tensor, known: dict[int, Any]) -> Any:
        """The value of a tensor, found by its identity or by its memory. A number's tensor stands for itself.

        Raises _Unknown if its memory has no known owner.
        """
        if id(tensor) in known:
            return known[id(tensor)]
        owner = self._owners.get(tensor.untyped_storage()._cdata)
        if owner is None or not is_plain(tensor) or (owner.slot.kind != "memory" and owner.slot.dtype != tensor.dtype):
            raise _Unknown
        return known.setdefault(id(tensor), self._value(tensor, self._name()))

    def _operations(self, operation: Operation, known: dict[int, Any], label: str) -> list[Launch | Call]:
        """Steps for one of torch's operators: the call, after the copies that torch would make inside it."""
        moved, operation = self._indices_moved(operation, known, label)
        operation = self._number_filled_in(operation, known)
        call = self._operation(operation, known, label)
        if moved:
            return [*moved, call]
        place = _weight_for_channels_last(operation)
        if place is None:
            return [call]
        weight, filters = call.args[place], operation.args[place]
        slot = Slot("made", self._name(), dtype=weight.dtype)
        memory_format = FORMATS[filters.dim()]
        strides = filters.to(memory_format=memory_format).stride()
        there = Value(slot, 0, weight.shape, strides, weight.dtype, slot.name)
        kwargs = {"memory_format": memory_format}
        loops = loops_of(_aten.clone.default, (weight,), kwargs, there)
        copy = Call(torch.clone, (weight,), kwargs, there, False, True, False, f"{label}: its weight", loops)
        return [copy, dataclasses.replace(call, args=(*call.args[:place], there, *call.args[place + 1 :]))]

    def _indices_moved(self, operation: Operation, known: dict[int, Any], label: str) -> tuple[list[Call], Operation]:
        """Copies of constant indices from the CPU to the device, and the operation that reads the copies.

        torch would copy them at every call, and wait for that. constants.py keeps the copies.
        """
        if operation.overload.overloadpacket not in _INDEXED:
            return [], operation
        target, indices, *others = operation.args
        calls, there = [], list(indices)
        for number, index in enumerate(indices):
            if index is None or index.device == target.device:
                continue
            value = self._known(index, known)
            if not isinstance(value, Value) or value.slot.constant is None:
                continue
            kwargs = {"device": target.device}
            there[number] = index.to(**kwargs)
            copied = Operation(_aten._to_copy.default, (index,), kwargs, there[number], operation.launches)
            calls.append(self._operation(copied, known, f"{label}: an index"))
        return calls, dataclasses.replace(operation, args=(target, there, *others))

    def _number_filled_in(self, operation: Operation, known: dict[int, Any]) -> Operation:
        """The operation, but a copy of a constant number from the CPU becomes a fill on the device.

        torch would copy the number at every call, and wait for that.
        """
        if operation.overload is not _aten._to_copy.default:
            return operation
        (number,), result = operation.args, operation.result
        value = self._known(number, known)
        is_one = isinstance(value, Value) and value.slot.constant is not None and number.shape == ()
        if not is_one or number.device == result.device or number.is_inference() or number._version:
            return operation
        kwargs = {"dtype": result.dtype, "device": result.device}
        return dataclasses.replace(
            operation, overload=_aten.new_full.default, args=(number, (), number.item()), kwargs=kwargs
        )

    def _operation(self, operation: Operation, known: dict[int, Any], label: str) -> Call:
        """The step for one of torch's operators that computes."""
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda tensor: self._known(tensor, known), (tuple(operation.args), dict(operation.kwargs))
        )

        new = _made_of_nothing(operation)

        def made(tensor: torch.Tensor) -> Any:
            key = tensor.untyped_storage()._cdata
            if key not in self._owners:
                if not is_plain(tensor):
                    raise _Unknown
                name = self._name()
                made_of = [] if new is not None else values_in((args, kwargs))
                slot = self._slot("made", name, tensor, made_of)
                slot.is_own = operation.overload.namespace in _OWN  # others may return what they have returned before
                self._owners[key] = Owner.of(slot, tensor)
                known[id(tensor)] = self._value(tensor, name)
            return self._known(tensor, known)

        result = pytree.tree_map_only(torch.Tensor, made, operation.result)
        loops = loops_of(operation.overload, args, kwargs, result)
        target, args, kwargs = new or (function_of(operation.overload), args, kwargs)
        return Call(
            target,
            args,
            kwargs,
            result,
            False,
            operation.is_pure,
            False,
            f"{label}: {operation.overload}",
            loops,
            operation.draws,
            alone=None if loops is None or loops.into else loops_into(operation.overload, args, kwargs, result),
            overwrites=operation.overwrites,
        )

    def _launched(self, launch: events.Launch, label: str) -> Launch:
        """The step for a kernel launch, with every address as a slot and an offset. Raises _Unknown."""
        if functions_of(launch) is None:
            raise _Unknown
        references: list[tuple[Slot, int]] = []
        for begin in launch.addresses:
            place = self._place_of(begin)
            if place is None:
                raise _Unknown
            references.append(place)
        return Launch(launch, references, label=label)


def _made_of_nothing(operation: Operation) -> tuple[Any, Any, Any] | None:
    """A function and arguments that make the result of `zeros_like` and the like without the tensor given to them.

    The given tensor then need not be in memory. None for all other operators.
    """
    packet, result = operation.overload.overloadpacket, operation.result
    if packet not in _FILLED or operation.overload._overloadname.endswith("out"):
        return None
    args = tuple(result.shape), tuple(result.stride())
    kwargs = {"dtype": result.dtype, "device": result.device}
    if "empty" in str(packet):
        return torch.empty_strided, args, kwargs
    number = _FILLED[packet]
    if number is None:
        names = [argument.name for argument in operation.overload._schema.arguments]
        number = {**dict(zip(names, operation.args, strict=False)), **operation.kwargs}["fill_value"]
    return full_strided, (*args, number), kwargs


def _weight_for_channels_last(operation: Operation) -> int | None:
    """The position of a weight that torch would copy into the image's layout (channels_last) for cuDNN; None if none.

    The operation is a convolution, or a gradient of one that includes the image's.
    """
    if operation.overload is _aten.convolution.default and not operation.kwargs:
        place, (image, weight, *options) = 1, operation.args
    elif operation.overload is _aten.convolution_backward.default and operation.args[-1][0]:
        place, (_, image, weight, _, *options, _) = 2, operation.args
        options = [None, *options]  # without a bias
    else:
        return None
    memory_format = FORMATS.get(image.dim())
    is_copied = (
        memory_format is not None
        and image.is_contiguous(memory_format=memory_format)
        and not image.is_contiguous()
        and weight.is_contiguous()
        and not weight.is_contiguous(memory_format=memory_format)
        and _runs_in_cudnn(image, weight, *options)
    )
    return place if is_copied else None


def _runs_in_cudnn(*arguments: Any) -> bool:
    """Whether torch would run a convolution of these arguments by cuDNN."""
    internals: Any = torch._C
    if gpu.standing_in() is not None:  # torch would ask the CPU
        return True
    found = internals._select_conv_backend(*arguments)
    return found in (internals._ConvBackend.Cudnn, internals._ConvBackend.CudnnTranspose)


def _bias_apart(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Any) -> Any:
    """A convolution by cuDNN, and then its bias: torch, too, adds it in a pass of its own, which others may join."""
    if bias is None or not _runs_in_cudnn(x, weight, bias, *options):
        return NotImplemented
    made = _aten.convolution(x, weight, None, *options)
    return made.add_(by_channel(bias, made))


_APART: Final = {**LONG_ROWS, _aten.convolution.default: _bias_apart}
"""Operators that a GPU's programs compute by others. Each rule may return NotImplemented."""


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """A tensor's shape, strides and offset in its storage; None if the tensor is not plain."""
    return (tensor.shape, tensor.stride(), tensor.storage_offset()) if is_plain(tensor) else None


Note: TypeAlias = Callable[[dict[fx.Node, Any]], dict[fx.Node, Any]]
"""note(known) adds a node's steps, and returns the symbolic results of nodes. `known` are those of earlier nodes.
Raises Refused."""


def _not_yet(_: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
    raise Refused(NOT_YET)


def _operands_in_place(kind: str, inputs: Sequence[Any], result: Value) -> list[tuple[Slot, Slot]]:
    """Pairs (slot of a region's operand, slot of its result) that may share memory, for `Launch.in_place`.

    The operand lies as the result does (cuda/kernel.py: `Kernel.in_place`), and the region reads it as nothing else. In
    a pointwise region x is an operand, too.
    """
    operands = [inputs[0], *inputs[3]] if kind == "pointwise" else inputs[3]
    slots = Counter(value.slot for value in values_in(inputs))

    def lies(value: Value) -> tuple[Any, ...]:
        return value.offset, value.shape, tuple(varying(value.strides, value.shape)), value.dtype.itemsize

    alike = (value for value in values_in(operands) if slots[value.slot] == 1 and lies(value) == lies(result))
    return [(value.slot, result.slot) for value in alike]


def _filled(item: Any, env: Mapping[fx.Node, Any]) -> Any:
    """Arguments of a node, with the results of other nodes filled in."""
    return as_plain(fx.node.map_arg(item, env.__getitem__))


def _called(node: fx.Node, args: Any, kwargs: Any, root: nn.Module) -> Any:
    """Calls a node's function, method or module, and returns the result."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = root.get_submodule(str(node.target)) if node.op == "call_module" else node.target
    if target is torch.tensor and _is_number(args, kwargs):
        return torch.full((), *args, **kwargs)  # torch.tensor would copy it from the CPU, and wait for that
    return target(*args, **kwargs)


def _is_number(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether torch.tensor(*args, **kwargs) is of a single number, and does not round it to an integer."""
    if len(args) != 1 or type(args[0]) not in (bool, int, float) or not kwargs.keys() <= {"dtype", "device"}:
        return False
    dtype = kwargs.get("dtype")
    return type(args[0]) is not float or dtype is None or dtype.is_floating_point


def _has_fast_path(module: nn.Module, seen: Operators) -> bool:
    """Whether torch may compute a module by a single operator, and its parts would compute the same.

    Nothing inside a single operator could be merged. But the parts are not always the same: the operator for an encoder
    layer computes gelu by tanh, with masks rows that are hidden as a whole become NaN, and an encoder turns what is
    padded into zeros.
    """
    kinds, parts = nn.MultiheadAttention | nn.TransformerEncoderLayer, list(module.modules())
    has_one = any(isinstance(part, kinds) for part in parts) and not any(part.training for part in parts)
    return has_one and not any(map(_differs_from_parts, seen.operations))


def _differs_from_parts(operation: Operation) -> bool:
    """Whether an operator that a module with a fast path calls computes something else than the module's parts."""
    args = operation.args
    given = [args[position] for position in _FAST_PATHS.get(operation.overload, ()) if position < len(args)]
    return operation.overload is _OF_NESTED or any(one is not None and one is not False for one in given)


def _by_its_parts(call: Callable[[], Any]) -> Any:
    """The result of call() without modules' fast paths: no module takes one while a torch function mode is active."""
    with BaseTorchFunctionMode():
        return call()


def _lying_as(expected: Any, made: Any) -> Any:
    """The tensors `made`, copied where their strides are not those of `expected`."""

    def lying(want: Any, have: Any) -> Any:
        if not isinstance(have, torch.Tensor) or places(have)[:2] == places(want)[:2]:
            return have
        return torch.empty_strided(want.shape, want.stride(), dtype=have.dtype, device=have.device).copy_(have)

    return pytree.tree_map(lying, expected, made)


def _groups(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The nodes in groups: each alone, but all nodes of a vmap, from its begin to its end, in one group.

    Inside a vmap, the values are no tensors that could be inspected.
    """
    group: list[fx.Node] = []
    depth = 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        depth += (name == "_vmap_increment_nesting") - (name == "_vmap_decrement_nesting")
        group.append(node)
        if depth <= 0:
            yield group
            group = []
    assert not group, "check_graph has seen to it"


class _Unknown(Exception):
    """Memory has no known owner, so what uses it cannot be recorded step by step."""
