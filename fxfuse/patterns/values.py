"""Turns each pointwise node of a graph into an expression of a region's acc and operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxfuse import ops
from fxfuse.expression import Call, Expr, Operand, call
from fxfuse.hooks import has_hooks
from fxfuse.ops import Rejected
from fxfuse.patterns.anchors import Anchor, Attribute, Source, known_tensor, noted
from fxfuse.patterns.mutation import Mutations, second_arguments, spelling
from fxfuse.problem import CONVOLUTIONS, MAX_OPERANDS

_DROPOUT_MODULES: Final = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
BATCH_NORMS: Final[Mapping[type[nn.Module], str]] = {
    nn.BatchNorm1d: "batch_norm_1d", nn.BatchNorm2d: "batch_norm_2d", nn.BatchNorm3d: "batch_norm_3d"
}  # fmt: skip
MODE_DEPENDENT: Final[tuple[type[nn.Module], ...]] = (*_DROPOUT_MODULES, *BATCH_NORMS)
"""Modules that join a region in one mode and end it in the other."""
_DROPOUT_FUNCTIONS: Final = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.ops.aten.dropout,
)  # fmt: skip
_TORCHVISIONS: Final = {
    ("torchvision.ops.stochastic_depth", "stochastic_depth"): 3,
    ("torchvision.ops.drop_block", "drop_block2d"): 5,
    ("torchvision.ops.drop_block", "drop_block3d"): 5,
}
"""Functions that drop samples or blocks, with the position of their flag `training`. torchvision's models call them
wrapped, so they are nodes of graphs. They are named here so that torchvision is not imported."""


MAX_OPERATIONS: Final = 256
"""The most operations of a region. A kernel of so many takes a compiler seconds, one of 2000 half a minute."""


class Full(Rejected):
    """A region has no room for a node that would fit otherwise."""


@dataclass
class Growth:
    """The state of growing one region: an expression for each node reached, and the operands they read."""

    root: nn.Module
    anchor_node: fx.Node
    anchor: Anchor
    tensors: frozenset[fx.Node] = frozenset()
    """The graph's nodes whose values are surely tensors."""
    values: dict[fx.Node, Expr] = field(default_factory=dict)
    operands: list[Source] = field(default_factory=list)
    refused: dict[fx.Node, str] = field(default_factory=dict)

    def operand(self, source: Source) -> Operand:
        if source not in self.operands:
            if len(self.operands) == MAX_OPERANDS:
                raise Full(f"a region reads at most {MAX_OPERANDS} tensors beside its first one")
            self.operands.append(source)
        return Operand(self.operands.index(source))

    def argument(self, arg: Any) -> Any:
        """A call's argument as the op table takes it: an expression for a node, anything else as it is."""
        if not isinstance(arg, fx.Node):
            return arg
        if arg in self.values:
            return self.values[arg]
        if arg.op == "call_method" and arg.target == "item" and noted(arg) is not None:
            return self.operand(arg.all_input_nodes[0])  # Dynamo passes a number like this; the 0-d tensor is the same
        if not is_tensor(arg):
            raise Rejected(f"operand '{arg.name}' may not be a tensor")
        self._check_broadcast(arg)
        return self.operand(arg)

    def _check_broadcast(self, source: Source) -> None:
        """Refuses an operand that is known to enlarge the result."""
        tensor = known_tensor(self.root, source)
        weight = known_tensor(self.root, self.anchor.weight)
        if tensor is None:
            return
        rank = None
        if self.anchor.kind == "layer_norm":
            dimension, features = -1, self.anchor.options["normalized_shape"][-1]
        elif weight is None or weight.dim() < 2:
            return
        elif self.anchor.kind in CONVOLUTIONS:
            moved = CONVOLUTIONS[self.anchor.kind]
            dimension, features, rank = -1 - moved, weight.shape[0], 2 + moved
        elif self.anchor.kind == "conv2d_weight":
            dimension, features, rank = -3, weight.shape[1] // self.anchor.options["groups"], 4
        else:
            dimension, features = -1, weight.shape[0 if self.anchor.kind == "linear" else 1]
        size = tensor.shape[dimension] if tensor.dim() >= -dimension else 1
        # a symbolic size is not compared: the answer would have to hold for other calls, too
        too_wide = isinstance(size, int) and isinstance(features, int) and size not in (1, features)
        if too_wide or (rank is not None and tensor.dim() > rank):
            name = source.name if isinstance(source, fx.Node) else source.path
            raise Rejected(f"operand '{name}' of shape {tuple(tensor.shape)} would enlarge the result")


def is_tensor(node: fx.Node) -> bool:
    """Whether the node's value is a tensor, as far as the graph tells; sizes and numbers are not."""
    stack, seen = [node], {node}
    while stack:
        node = stack.pop()
        if isinstance(noted(node), torch.Tensor):
            return True
        if node.op == "call_function" and getattr(node.target, "__module__", "") in ("_operator", "math", "builtins"):
            if node.target is getattr:
                if node.args[1] in ("T", "mT", "H", "mH", "data", "real", "grad"):
                    return True
                continue
            new = [arg for arg in node.all_input_nodes if arg not in seen]  # it is a tensor if one of these is
            seen.update(new)
            stack.extend(new)
        elif _is_tensor_itself(node):
            return True
    return False


def _is_tensor_itself(node: fx.Node) -> bool:
    """The same as `is_tensor`, for a node whose arguments do not decide it."""
    if node.op == "placeholder":
        numbers = (int, float, bool)
        default = node.args[0] if node.args else None
        return node.type not in numbers and not isinstance(default, numbers)
    if node.op == "call_method":
        return node.target not in ("size", "dim", "numel", "item", "stride", "tolist", "nelement", "ndimension")
    return True


# ------------------------------------------------------------------------- what a node makes of a value


def _module_arguments(growth: Growth, row: ops.Row, node: fx.Node, module: nn.Module) -> dict[str, Any]:
    """The arguments of a module's operation. Tensors become operands, read from the module at every call."""
    return {
        name: growth.operand(Attribute(f"{node.target}.{name}")) if isinstance(value, torch.Tensor) else value
        for name, value in ops.module_arguments(row, module).items()
    }


def _is_inactive_dropout(node: fx.Node, module: nn.Module | None) -> bool:
    if module is not None:
        return isinstance(module, _DROPOUT_MODULES) and (not module.training or module.p == 0)
    if node.op != "call_function":
        return False
    target = ops.function_of(node.target)
    if target in _DROPOUT_FUNCTIONS:
        position = 2
    else:
        name = (getattr(target, "__module__", ""), getattr(target, "__name__", ""))
        if name not in _TORCHVISIONS:
            return False
        position = _TORCHVISIONS[name]
    training = node.args[position] if len(node.args) > position else True
    chance = node.args[1] if len(node.args) > 1 else node.kwargs.get("p")
    drops_nothing = isinstance(chance, int | float) and chance == 0  # and draws no random numbers
    return drops_nothing or node.kwargs.get("training", node.kwargs.get("train", training)) is False


def _batch_norm(growth: Growth, node: fx.Node, module: nn.modules.batchnorm._BatchNorm) -> Expr:
    """Normalisation in evaluation mode, from the module's current buffers."""
    if module.training or module.running_mean is None or module.running_var is None:
        raise Rejected(f"'{node.name}' normalises by the batch's own statistics")
    row = ops.row(BATCH_NORMS[type(module)])
    arguments = {
        name: value for name, value in _module_arguments(growth, row, node, module).items() if value is not None
    }
    return row.build(*ops.bind(row, [growth.argument(node.all_input_nodes[0])], arguments))


def is_nothing(root: nn.Module, node: fx.Node) -> bool:
    """Whether the value of `node` is its argument: it does nothing, or nothing in the present mode."""
    module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
    return type(module) is nn.Identity or _is_inactive_dropout(node, module)


def value_of(growth: Growth, node: fx.Node) -> Expr | None:
    """The node's expression; None if it is no pointwise operation. Raises Rejected if it is one that does not fit."""
    if len(growth.values) > MAX_OPERATIONS:
        raise Full(f"a region has at most {MAX_OPERATIONS} operations")
    module = growth.root.get_submodule(str(node.target)) if node.op == "call_module" else None
    if module is not None and has_hooks(module):
        raise Rejected(f"'{node.name}' has hooks")
    if is_nothing(growth.root, node):
        return growth.values.get(node.all_input_nodes[0])
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and type(module) in BATCH_NORMS:
        return _batch_norm(growth, node, module)
    found = spelling(growth.root, node)
    if found is None:
        return None
    if found.of_two_tensors and not growth.tensors.issuperset(second_arguments(node)):
        raise Rejected(f"'{node.name}' may have a dimension for its second argument")
    args, kwargs, _ = ops.split_in_place(node.target, node.args, node.kwargs)
    args = [growth.argument(arg) for arg in args]
    kwargs = {name: growth.argument(arg) for name, arg in kwargs.items()}
    if module is not None:
        kwargs.update(_module_arguments(growth, found.row, node, module))
    value = found.row.build(*ops.bind(found.row, args, kwargs))
    if not found.in_place:
        return value
    overwritten = overwritten_by(node)
    if overwritten not in growth.values:
        raise Rejected(f"'{node.name}' overwrites a tensor from outside the region")
    if ops.is_boolean(value):
        raise Rejected(f"'{node.name}' overwrites a number with a truth value")
    # an in-place result keeps its tensor's dtype, shape and strides, those of dimensions of size 1 included
    old = growth.values[overwritten]
    of_numbers = all(arg is overwritten for arg in node.all_input_nodes)
    if of_numbers and isinstance(value, Call) and value.args[0] is old:
        return Call(f"{value.op}_", value.args)
    return call("assign", value, old)


def overwritten_by(node: fx.Node) -> fx.Node:
    """The node that an in-place node writes into: its first argument, by position or by name."""
    first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    if not isinstance(first, fx.Node):
        raise Rejected(f"'{node.name}' overwrites something that is not a tensor of the graph")
    return first


def check_overwritten(growth: Growth, node: fx.Node, mutations: Mutations) -> None:
    """Refuses an in-place node if a later node reads the old value that it overwrites."""
    found = spelling(growth.root, node)
    if found is None or not found.in_place:
        return
    overwritten = overwritten_by(node)
    memory = mutations.memory(overwritten)
    for alias in (other for other in growth.values if mutations.memory(other) & memory):
        for user in alias.users:
            if user is not node and mutations.order[user] > mutations.order[node]:
                raise Rejected(f"'{node.name}' overwrites a value that '{user.name}' reads later")
