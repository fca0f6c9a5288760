"""Overwritten values: which nodes write into a tensor they did not make, and which tensors may share memory.

A fused node reads its inputs where the region ends, later than the nodes it replaces did. That is only right if
nothing overwrites an input in between. `Mutations.between` answers this, conservatively.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxfuse import functional, ops
from fxfuse.patterns.anchors import Attribute, Source
from fxfuse.problem import ANCHORS, parsed
from fxfuse.simplify import is_fresh

_CASTS: Final = frozenset({"to", "float", "half", "bfloat16", "type_as", "contiguous", "detach"})
"""Rows of the op table whose result may be their argument itself."""

_FRESH_MODULES: Final = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm, nn.MaxPool2d, nn.AvgPool2d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Embedding,
)  # fmt: skip
_FRESH_FUNCTIONS: Final = frozenset(
    {torch.cat, torch.stack, torch.matmul, torch.bmm, torch.mm, torch.addmm, operator.matmul, F.conv2d, torch.conv2d,
     F.conv_transpose2d, torch.conv_transpose2d, F.batch_norm, torch.batch_norm, F.layer_norm, F.group_norm, F.linear,
     *(functional.function(kind) for kind in ANCHORS if kind != "pointwise")}
)  # fmt: skip
_FRESH_NAMES: Final = frozenset(
    {"mean", "sum", "prod", "var", "std", "amax", "amin", "softmax", "log_softmax", "cumsum", "bmm", "baddbmm",
     "interpolate", "pad", "scaled_dot_product_attention"}
)  # fmt: skip
"""Names of torch's functions and methods that always make a new tensor."""
_FRESH_COMPOSITES: Final = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear",
                 "matmul", "batch_norm", "layer_norm", "group_norm", "max_pool2d", "adaptive_avg_pool2d")
)  # fmt: skip
"""Composite operators of torch.export's graphs that always make a new tensor."""
_IN_PLACE_FUNCTIONS: Final = frozenset(
    {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow, operator.ifloordiv, operator.imod,
     operator.iand, operator.ior, operator.ixor, operator.imatmul, operator.setitem}
)  # fmt: skip


def update_(name: str, value: Any, other: Any) -> Any:
    """`value += other`, for the name "iadd": overwrites a tensor; of a number it returns another one."""
    return getattr(operator, name)(value, other)


def keep_numbers(graph: fx.Graph) -> None:
    """Replaces `x += 1` by a call of update_, where x has other readers or is no node.

    The graph's code has the statement `x += 1`, which would give the name x a new value if x is a number.
    """
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _IN_PLACE_FUNCTIONS and node.target is not operator.setitem:
            value = node.args[0]
            if not isinstance(value, fx.Node) or len(value.users) > 1:
                node.args = (node.target.__name__, *node.args)
                node.target = update_


def spelling(root: nn.Module, node: fx.Node) -> ops.Spelling | None:
    """The op table's row that `node` calls, and whether it does so in place; None if there is none."""
    if node.op == "call_module":
        return ops.find_module(root.get_submodule(str(node.target)))
    if node.op not in ("call_method", "call_function"):
        return None
    is_method = node.op == "call_method"
    found = ops.find_method(str(node.target)) if is_method else ops.find_function(node.target)
    if found is not None and found.of_two_tensors and len(second_arguments(node)) != 1:
        return None
    if is_method:
        return found
    if found is not None and ops.split_in_place(node.target, node.args, node.kwargs)[2]:
        return ops.Spelling(found.row, True)
    return found


def second_arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes that a call takes beside its first argument; none if it has keywords besides input and other."""
    others = [*node.args, *node.kwargs.values()][1:]
    return [other for other in others if isinstance(other, fx.Node)] if node.kwargs.keys() <= {"input", "other"} else []


_QUESTIONS: Final = frozenset({"size", "dim", "numel", "nelement", "ndimension"})
_ATTRIBUTES: Final = frozenset({"shape", "dtype", "device", "ndim"})


def asks_shape(node: fx.Node) -> bool:
    """Whether `node` asks a tensor for its shape, dtype or device, and does not look at its values or strides."""
    if node.op == "call_method":
        return node.target in _QUESTIONS
    if node.op != "call_function":
        return False
    is_attribute = node.target is getattr and len(node.args) == 2 and node.args[1] in _ATTRIBUTES
    return is_attribute or getattr(node.target, "__module__", "") == "fxfuse.patterns.questions"


SWITCHES: Final = frozenset(
    {"_enter_autocast", "_exit_autocast", "_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode"}
)
"""Functions in Dynamo's graphs that change what the operations after them compute."""


class Mutations:
    """The overwriting nodes of one graph, and the memory that each node's result may live in."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        self._root = root
        self.order: dict[fx.Node, int] = {}
        self._section: dict[fx.Node, int] = {}
        self._roots: dict[fx.Node, frozenset[object]] = {}
        self._writes: list[tuple[int, frozenset[object]]] = []
        self._writers: dict[int, fx.Node] = {}
        section = 0
        for index, node in enumerate(graph.nodes):
            self.order[node] = index
            section += node.op == "call_function" and getattr(node.target, "__name__", "") in SWITCHES
            self._section[node] = section
            written = self._written(node)
            if written:
                self._writers[index] = node
                self._writes.append((index, frozenset().union(*(self.memory(arg) for arg in written))))
            self._roots[node] = self._memory_of(node)

    def memory(self, source: Source) -> frozenset[object]:
        """What `source` may share memory with: nodes, and paths of parameters and buffers."""
        if isinstance(source, Attribute):
            return frozenset({source.path})
        assert isinstance(source, fx.Node)
        return self._roots[source]

    def visible(self) -> list[frozenset[object]]:
        """The memory of each write that is visible in other ways than by the writing node's result."""
        return [memory for index, memory in self._writes if self._is_visible(index, memory)]

    def _is_visible(self, index: int, memory: frozenset[object]) -> bool:
        if any(not isinstance(item, fx.Node) or item.op == "placeholder" for item in memory):
            return True  # an argument of the model, a parameter or a buffer
        same_shape = spelling(self._root, self._writers[index]) is not None
        return any(
            self.order[arg] < index < order and memory & self._roots[arg]
            for node, order in self.order.items()
            for arg in node.all_input_nodes
            if not (same_shape and asks_shape(node))
        )

    def same_section(self, node: fx.Node, other: fx.Node) -> bool:
        """Whether both run under the same autocast and gradient mode, as far as the graph itself switches them."""
        return self._section[node] == self._section[other]

    def between(self, read: int, moved_to: int, sources: Iterable[Source], skip: Iterable[fx.Node]) -> bool:
        """Whether a node after position `read` and before `moved_to` may overwrite one of `sources`."""
        skipped = {self.order[node] for node in skip}
        memory = frozenset().union(*(self.memory(source) for source in sources))
        return any(
            read < index < moved_to and index not in skipped and written & memory for index, written in self._writes
        )

    def _written(self, node: fx.Node) -> list[fx.Node]:
        """Arguments that `node` may overwrite."""
        inputs = node.all_input_nodes
        if node.op == "call_module":
            module = self._root.get_submodule(str(node.target))
            if getattr(module, "inplace", False):
                return inputs[:1]
            known = type(module).__module__.startswith("torch.nn")
            return [] if known else inputs
        if node.op == "call_method":
            name = str(node.target)
            in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
            return inputs[:1] if in_place else []
        if node.op == "call_function":
            if isinstance(node.target, torch._ops.OpOverload):
                return inputs if node.target._schema.is_mutable else []
            if "out" in node.kwargs:
                return inputs
            in_place = ops.split_in_place(node.target, node.args, node.kwargs)[2]
            name = getattr(node.target, "__name__", "")
            is_operator = getattr(node.target, "__module__", "") == "_operator"  # and_, or_, not_ write nowhere
            is_named_so = name.endswith("_") and not name.endswith("__") and not is_operator
            if in_place or node.target in _IN_PLACE_FUNCTIONS or is_named_so:
                return inputs[:1]
        return []

    def _memory_of(self, node: fx.Node) -> frozenset[object]:
        if node.op == "get_attr":
            return frozenset({str(node.target)})
        if asks_shape(node):
            return frozenset()
        if node.op == "placeholder" or self._is_fresh(node):
            return frozenset({node})
        found = spelling(self._root, node)
        sources = node.all_input_nodes[:1] if found is not None else node.all_input_nodes  # what it overwrites or casts
        return frozenset({node}).union(*(self._roots[arg] for arg in sources))

    def _is_fresh(self, node: fx.Node) -> bool:
        """Whether the result surely lies in memory of its own."""
        found = spelling(self._root, node)
        if found is not None:
            return not found.in_place and found.row.name not in _CASTS
        if node.op == "call_module":
            return isinstance(self._root.get_submodule(str(node.target)), _FRESH_MODULES)
        if isinstance(node.target, torch._ops.OpOverload):
            return _returns_fresh(node.target)
        if node.target is functional.pointwise:
            epilogue, overwrites = node.args[4:6]
            return not overwrites and is_fresh(parsed(str(epilogue)), fresh_acc=False)
        if node.op == "call_method":
            return node.target in _FRESH_NAMES
        home, name = (getattr(node.target, item, None) or "" for item in ("__module__", "__name__"))
        ours = not home or home.startswith("torch")  # torch's compiled functions have no module
        return node.target in _FRESH_FUNCTIONS or (ours and name in _FRESH_NAMES and "out" not in node.kwargs)


def _returns_fresh(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator's schema says that its results are no views. Composite operators' schemas do not say it."""
    composite = operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    may_view = composite and operator.overloadpacket not in _FRESH_COMPOSITES
    return not may_view and all(result.alias_info is None for result in operator._schema.returns)
