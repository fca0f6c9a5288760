"""Growing a region from an anchor over its pointwise users.

A region is the anchor and every node between it and one output node whose values nobody outside sees. Growing goes
forward through the graph giving each node that the op table knows an expression in terms of the anchor's result and
operands; then the latest node that closes the region (all users of all other values lie inside) becomes its output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxfuse import ops
from fxfuse.expression import Acc, Expr, Operand, call, depends_on_acc, postorder, rewrite
from fxfuse.ops import Rejected
from fxfuse.patterns.anchors import Anchor, Attribute, Source, find_anchor, has_hooks, known_tensor, noted
from fxfuse.patterns.mutation import Mutations, spelling
from fxfuse.simplify import simplify


@dataclass(frozen=True)
class Region:
    """An anchor and what follows it, as one fused operator call."""

    anchor: Anchor
    nodes: tuple[fx.Node, ...]
    """The nodes it replaces in graph order: the anchor's first, the output last."""
    epilogue: Expr
    """Simplified; in terms of the anchor's result and `operands`."""
    operands: tuple[Source, ...]

    @property
    def output(self) -> fx.Node:
        return self.nodes[-1]


@dataclass(frozen=True)
class Skipped:
    """A node that fxfuse looked at and left as it was."""

    node: str
    reason: str


_DROPOUT_MODULES: Final = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
_BATCH_NORMS: Final = {nn.BatchNorm1d: "batch_norm_1d", nn.BatchNorm2d: "batch_norm_2d"}
MODE_DEPENDENT: Final = (*_DROPOUT_MODULES, *_BATCH_NORMS)
"""Modules that join a region in one mode and end it in the other."""
_DROPOUT_FUNCTIONS: Final = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.ops.aten.dropout,
)  # fmt: skip


@dataclass
class _Growth:
    """The state of growing one region: an expression for each node reached, and the operands they read."""

    root: nn.Module
    anchor_node: fx.Node
    anchor: Anchor
    values: dict[fx.Node, Expr] = field(default_factory=dict)
    operands: list[Source] = field(default_factory=list)
    refused: dict[fx.Node, str] = field(default_factory=dict)

    def operand(self, source: Source) -> Operand:
        if source not in self.operands:
            self.operands.append(source)
        return Operand(self.operands.index(source))

    def argument(self, arg: Any) -> Any:
        """A call's argument as the op table takes it: an expression, a number, or what else it is."""
        if not isinstance(arg, fx.Node):
            return arg
        if arg in self.values:
            return self.values[arg]
        if arg.op == "call_method" and arg.target == "item" and noted(arg) is not None:
            return self.operand(arg.all_input_nodes[0])  # Dynamo's way to pass a number; as a 0-d tensor it is the same
        if not _is_tensor(arg):
            raise Rejected(f"operand '{arg.name}' may not be a tensor")
        self._check_broadcast(arg)
        return self.operand(arg)

    def _check_broadcast(self, source: Source) -> None:
        """Refuses an operand that is known to enlarge the result."""
        tensor = known_tensor(self.root, source)
        weight = known_tensor(self.root, self.anchor.weight)
        if tensor is None or weight is None or weight.dim() < 2:
            return
        if self.anchor.kind == "conv2d":
            dimension, features, rank = -3, weight.shape[0], 4
        else:
            dimension, features, rank = -1, weight.shape[0 if self.anchor.kind == "linear" else 1], None
        size = tensor.shape[dimension] if tensor.dim() >= -dimension else 1
        # a size that is a symbol is not asked: the answer would hold for other calls, too
        too_wide = isinstance(size, int) and isinstance(features, int) and size not in (1, features)
        if too_wide or (rank is not None and tensor.dim() > rank):
            name = source.name if isinstance(source, fx.Node) else source.path
            raise Rejected(f"operand '{name}' of shape {tuple(tensor.shape)} would enlarge the result")


def _is_tensor(node: fx.Node) -> bool:
    """Whether the node's value is a tensor, as far as the graph tells; sizes and numbers are not."""
    if isinstance(noted(node), torch.Tensor):
        return True
    if node.op == "placeholder":
        numbers = (int, float, bool)
        default = node.args[0] if node.args else None
        return node.type not in numbers and not isinstance(default, numbers)
    if node.op == "call_method":
        return node.target not in ("size", "dim", "numel", "item", "stride", "tolist", "nelement", "ndimension")
    if node.op == "call_function" and getattr(node.target, "__module__", "") in ("_operator", "math", "builtins"):
        if node.target is getattr:
            return node.args[1] in ("T", "mT", "H", "mH", "data", "real", "grad")
        return bool(node.all_input_nodes) and any(_is_tensor(arg) for arg in node.all_input_nodes)
    return True


# ------------------------------------------------------------------------- what a node makes of a value


def _module_arguments(growth: _Growth, row: ops.Row, node: fx.Node, module: nn.Module) -> dict[str, Any]:
    """A module's parameters of its operation; tensors become operands read from the module at every call."""
    return {
        name: growth.operand(Attribute(f"{node.target}.{name}")) if isinstance(value, torch.Tensor) else value
        for name, value in ops.module_arguments(row, module).items()
    }


def _is_inactive_dropout(node: fx.Node, module: nn.Module | None) -> bool:
    if module is not None:
        return isinstance(module, _DROPOUT_MODULES) and (not module.training or module.p == 0)
    if node.op != "call_function" or ops.function_of(node.target) not in _DROPOUT_FUNCTIONS:
        return False
    training = node.kwargs.get("training", node.kwargs.get("train", node.args[2] if len(node.args) > 2 else True))
    return training is False


def _batch_norm(growth: _Growth, node: fx.Node, module: nn.BatchNorm1d | nn.BatchNorm2d) -> Expr:
    """Evaluation-mode normalisation from the live buffers."""
    if module.training or module.running_mean is None or module.running_var is None:
        raise Rejected(f"'{node.name}' normalises by the batch's own statistics")
    row = ops.row(_BATCH_NORMS[type(module)])
    arguments = {
        name: value for name, value in _module_arguments(growth, row, node, module).items() if value is not None
    }
    return row.build(*ops.bind(row, [growth.argument(node.all_input_nodes[0])], arguments))


def _value_of(growth: _Growth, node: fx.Node) -> Expr | None:
    """The node's expression; None if it is no pointwise operation. Raises Rejected if it is one that does not fit."""
    module = growth.root.get_submodule(str(node.target)) if node.op == "call_module" else None
    if module is not None and has_hooks(module):
        raise Rejected(f"'{node.name}' has hooks")
    if type(module) is nn.Identity or _is_inactive_dropout(node, module):
        return growth.values.get(node.all_input_nodes[0])
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and type(module) in _BATCH_NORMS:
        return _batch_norm(growth, node, module)
    found = spelling(growth.root, node)
    if found is None:
        return None
    args, kwargs, _ = ops.split_in_place(node.target, node.args, node.kwargs)
    args = [growth.argument(arg) for arg in args]
    kwargs = {name: growth.argument(arg) for name, arg in kwargs.items()}
    if module is not None:
        kwargs.update(_module_arguments(growth, found.row, node, module))
    value = found.row.build(*ops.bind(found.row, args, kwargs))
    if not found.in_place:
        return value
    overwritten = _overwritten(node)
    if overwritten not in growth.values:
        raise Rejected(f"'{node.name}' overwrites a tensor from outside the region")
    if ops.is_boolean(value):
        raise Rejected(f"'{node.name}' overwrites a number with a truth value")
    # an in-place result keeps its tensor's dtype and shape; numbers never change them, other tensors could
    tensors = [arg for arg in node.all_input_nodes if arg is not overwritten]
    return call("assign", value, growth.values[overwritten]) if tensors else value


# ---------------------------------------------------------------------------------------- growing, closing


def _grow(root: nn.Module, anchor_node: fx.Node, anchor: Anchor, taken: set[fx.Node], mutations: Mutations) -> _Growth:
    growth = _Growth(root, anchor_node, anchor, {anchor_node: Acc()})
    for node in sorted(_descendants(anchor_node), key=mutations.order.__getitem__):
        if node.op == "output" or not any(arg in growth.values for arg in node.all_input_nodes):
            continue
        if node in taken:
            growth.refused[node] = f"'{node.name}' belongs to another region"
            continue
        if not mutations.same_section(anchor_node, node):
            growth.refused[node] = f"'{node.name}' runs under another autocast or gradient mode"
            continue
        try:
            value = _value_of(growth, node)
            if value is not None:
                _check_overwritten(growth, node, mutations)
        except Rejected as reason:
            growth.refused[node] = str(reason)
            continue
        if value is not None and depends_on_acc(value):
            growth.values[node] = value
    return growth


def _descendants(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if user not in found:
            found.add(user)
            stack.extend(user.users)
    return found


def _overwritten(node: fx.Node) -> fx.Node:
    """What an in-place node writes into: its first argument, by position or by name."""
    first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    if not isinstance(first, fx.Node):
        raise Rejected(f"'{node.name}' overwrites something that is not a tensor of the graph")
    return first


def _check_overwritten(growth: _Growth, node: fx.Node, mutations: Mutations) -> None:
    """An in-place node may only join if nobody reads the old tensor object after it."""
    found = spelling(growth.root, node)
    if found is None or not found.in_place:
        return
    overwritten = _overwritten(node)
    memory = mutations.memory(overwritten)
    for alias in (other for other in growth.values if mutations.memory(other) & memory):
        for user in alias.users:
            if user is not node and mutations.order[user] > mutations.order[node]:
                raise Rejected(f"'{node.name}' overwrites a value that '{user.name}' reads later")


def _members(growth: _Growth, output: fx.Node) -> list[fx.Node]:
    """The nodes of the region that ends at `output`, in the order they were grown (graph order)."""
    inside: set[fx.Node] = set()
    stack = [output]
    while stack:
        node = stack.pop()
        if node not in inside and node in growth.values:
            inside.add(node)
            stack.extend(node.all_input_nodes)
    return [node for node in growth.values if node in inside]


def _obstacle(growth: _Growth, members: list[fx.Node], mutations: Mutations) -> str | None:
    """Why the region `members` cannot be one kernel, or None."""
    inside = set(members)
    output = members[-1]
    if ops.is_boolean(growth.values[output]):
        return f"'{output.name}' is a comparison, and a kernel's result is a number"
    for node in members[:-1]:
        for user in node.users:
            if user not in inside:
                return f"'{node.name}' is also used by {_describe(growth.root, user)}"
    moved_to = mutations.order[output]
    anchor = growth.anchor
    reads = [(growth.anchor_node, source) for source in (anchor.x, anchor.weight, anchor.bias) if source is not None]
    reads += [(node, arg) for node in members[1:] for arg in node.all_input_nodes if arg not in inside]
    for node, source in reads:
        if mutations.between(mutations.order[node], moved_to, [source], members):
            return f"an input of '{node.name}' is overwritten before '{output.name}'"
    return None


def _compact(epilogue: Expr, operands: list[Source]) -> tuple[Expr, tuple[Source, ...]]:
    """Keeps the operands that the epilogue reads, numbered in the order in which its text names them."""
    used = [node.index for node in postorder(epilogue) if isinstance(node, Operand)]
    renumbered: Mapping[int, int] = {old: new for new, old in enumerate(used)}
    compacted = rewrite(epilogue, lambda node: Operand(renumbered[node.index]) if isinstance(node, Operand) else node)
    return compacted, tuple(operands[index] for index in used)


def _describe(root: nn.Module, node: fx.Node) -> str:
    """A node for the report: its name and what it is."""
    if node.op == "output":
        return "the model's output"
    if node.op == "call_module":
        return f"'{node.name}' ({type(root.get_submodule(str(node.target))).__name__})"
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"'{node.name}' ({target})"


def is_region_alone(weight: torch.Tensor | None) -> bool:
    """Whether an anchor with this weight is a region even if nothing pointwise follows it.

    In float32 on a GPU there are faster kernels for many than torch's.
    """
    return weight is not None and weight.is_cuda and weight.dtype == torch.float32


def _close(growth: _Growth, mutations: Mutations) -> Region | str:
    """The largest region of `growth` that can be one kernel, or why there is none."""
    reasons: list[str] = []
    for output in reversed(growth.values):
        members = _members(growth, output)
        if members[0] is not growth.anchor_node:
            continue
        obstacle = _obstacle(growth, members, mutations)
        if obstacle is not None:
            reasons.append(obstacle)
            continue
        epilogue = simplify(growth.values[output])
        if (
            len(members) == 1
            and isinstance(epilogue, Acc)
            and not is_region_alone(known_tensor(growth.root, growth.anchor.weight))
        ):
            break
        return Region(growth.anchor, tuple(members), *_compact(epilogue, growth.operands))
    if reasons:
        return reasons[0]
    if growth.refused:
        return next(iter(growth.refused.values()))
    users = ", ".join(_describe(growth.root, user) for user in growth.anchor_node.users)
    return f"no pointwise operation follows: its result goes to {users or 'nobody'}"


def find_regions(root: nn.Module, graph: fx.Graph) -> tuple[list[Region], list[Skipped]]:
    """Every region of `graph`, in graph order, and the nodes that were left alone with the reason.

    Anchors are taken from last to first, so that a residual addition of two anchors' results goes to the later one,
    whose other input is then ready.
    """
    mutations = Mutations(root, graph)
    regions: list[Region] = []
    skipped: dict[fx.Node, str] = {}
    taken: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        try:
            anchor = find_anchor(root, node)
        except Rejected as reason:
            skipped[node] = str(reason)
            continue
        if anchor is None:
            continue
        growth = _grow(root, node, anchor, taken, mutations)
        closed = _close(growth, mutations)
        if isinstance(closed, str):
            skipped[node] = closed
        else:
            regions.append(closed)
            taken.update(closed.nodes)
            skipped.update((refused, reason) for refused, reason in growth.refused.items() if refused not in taken)
    skipped = {node: reason for node, reason in skipped.items() if node not in taken}
    in_order = sorted(skipped.items(), key=lambda item: mutations.order[item[0]])
    return regions[::-1], [Skipped(node.name, reason) for node, reason in in_order]
