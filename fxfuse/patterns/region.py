"""Growing a region from an anchor over its pointwise users.

A region is an anchor, one output node, and the nodes between them, whose values nobody outside reads. Growing goes
forward through the graph. Each node that the op table knows gets an expression of the anchor's result and operands.
Then the latest node that closes the region becomes its output: all users of all other values lie inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn

from fxfuse import ops
from fxfuse.expression import Acc, Expr, Operand, depends_on_acc, postorder, rewrite
from fxfuse.ops import Rejected
from fxfuse.patterns.anchors import Anchor, Source, known_tensor
from fxfuse.patterns.library import LibraryCall
from fxfuse.patterns.mutation import Mutations
from fxfuse.patterns.pooling import pool_after
from fxfuse.patterns.values import Growth, check_overwritten, value_of
from fxfuse.pooling import MaxPool
from fxfuse.problem import CONVOLUTIONS, RESULT_DTYPES
from fxfuse.simplify import simplify


@dataclass(frozen=True)
class Region:
    """An anchor and what follows it, as one fused operator call."""

    anchor: Anchor
    nodes: tuple[fx.Node, ...]
    """The nodes it replaces in graph order: the anchor's first, the output last."""
    epilogue: Expr
    """The simplified expression of the anchor's result and `operands`."""
    operands: tuple[Source, ...]
    library: LibraryCall | None = None
    """If a chain (chain.py) follows an operation of torch's library: that operation, the first of `nodes`."""
    written: Expr | None = None
    """The epilogue as the model has it, if simplifying changed it. Eager's gradients follow from this one."""
    pool: MaxPool | None = None
    """The max-pooling of the epilogue's result; its node is the last of `nodes`."""
    padding: fx.Node | None = None
    """The node that padded the anchor's input, which the anchor now pads itself. Nobody else reads the node."""

    @property
    def output(self) -> fx.Node:
        return self.nodes[-1]


@dataclass(frozen=True)
class Skipped:
    """A node that fxfuse looked at and left as it was."""

    node: str
    reason: str


# ---------------------------------------------------------------------------------------- growing, closing


def grow(
    root: nn.Module, anchor_node: fx.Node, anchor: Anchor, taken: set[fx.Node], mutations: Mutations,
    tensors: frozenset[fx.Node],
) -> Growth:  # fmt: skip
    """Grows from an anchor over all nodes that compute with its result, except those of other regions.

    `tensors` are the graph's nodes that are surely tensors.
    """
    growth = Growth(root, anchor_node, anchor, tensors, {anchor_node: Acc()})
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
            value = value_of(growth, node)
            if value is not None:
                check_overwritten(growth, node, mutations)
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


def _members(growth: Growth, output: fx.Node) -> list[fx.Node]:
    """The nodes of the region that ends at `output`, in the order they were grown (graph order)."""
    inside: set[fx.Node] = set()
    stack = [output]
    while stack:
        node = stack.pop()
        if node not in inside and node in growth.values:
            inside.add(node)
            stack.extend(node.all_input_nodes)
    return [node for node in growth.values if node in inside]


def _obstacle(growth: Growth, members: list[fx.Node], mutations: Mutations) -> str | None:
    """Why the region `members` cannot be one kernel, or None."""
    inside = set(members)
    output = members[-1]
    if ops.is_boolean(growth.values[output]):
        return f"'{output.name}' is a comparison, and a kernel's result is a number"
    for node in members[:-1]:
        for user in node.users:
            if user not in inside:
                return f"'{node.name}' is also used by {describe(growth.root, user)}"
    return _overwritten(growth, members, output, mutations)


def _overwritten(growth: Growth, members: list[fx.Node], moved_to: fx.Node, mutations: Mutations) -> str | None:
    """Why `members` cannot be computed as late as at `moved_to`, or None."""
    anchor, inside = growth.anchor, set(members)
    reads = [(growth.anchor_node, source) for source in (anchor.x, anchor.weight, anchor.bias) if source is not None]
    reads += [(node, arg) for node in members[1:] for arg in node.all_input_nodes if arg not in inside]
    for node, source in reads:
        if mutations.between(mutations.order[node], mutations.order[moved_to], [source], members):
            return f"an input of '{node.name}' is overwritten before '{moved_to.name}'"
    return None


def _pool_after(growth: Growth, members: list[fx.Node], mutations: Mutations) -> tuple[fx.Node, MaxPool] | None:
    """The pooling that the region of a convolution may end with."""
    found = pool_after(growth.root, members[-1]) if growth.anchor.kind == "conv2d" else None
    if found is None or not mutations.same_section(growth.anchor_node, found[0]):
        return None
    return None if _overwritten(growth, members, found[0], mutations) else found


def compact(written: Expr, epilogue: Expr, operands: list[Source]) -> tuple[Expr, tuple[Source, ...], Expr | None]:
    """Keeps the operands that the epilogue reads, numbered in the order in which its text names them.

    Returns Region.epilogue, .operands and .written.
    """
    used = [node.index for node in postorder(epilogue) if isinstance(node, Operand)]
    numbers: Mapping[int, int] = {old: new for new, old in enumerate(used)}

    def renumbered(root: Expr) -> Expr:
        return rewrite(root, lambda node: Operand(numbers[node.index]) if isinstance(node, Operand) else node)

    read = {node.index for node in postorder(written) if isinstance(node, Operand)}
    other = written is not epilogue and read <= numbers.keys()
    return renumbered(epilogue), tuple(operands[index] for index in used), renumbered(written) if other else None


def describe(root: nn.Module, node: fx.Node) -> str:
    """A node for the report: its name and what it is."""
    if node.op == "output":
        return "the model's output"
    if node.op == "call_module":
        return f"'{node.name}' ({type(root.get_submodule(str(node.target))).__name__})"
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"'{node.name}' ({target})"


def is_region_alone(kind: str, weight: torch.Tensor | None, has_bias: bool) -> bool:
    """Whether an anchor of this kind is a region even if nothing pointwise follows it.

    Only on a GPU:

    - Normalisations, which are anchors nowhere else.
    - All anchors in float32: many have faster kernels than torch's.
    - Products in 16 bits: those with few rows have faster kernels, and the rows are not known before the call.
    - Convolutions in 16 bits with a bias: torch adds it in a pass that takes twice as long as fxfuse's.
    """
    if kind == "layer_norm":
        return True
    if weight is None or not weight.is_cuda:
        return False
    if weight.dtype == torch.float32:
        return True
    return weight.dtype in RESULT_DTYPES and (has_bias if kind in CONVOLUTIONS else True)


def close(growth: Growth, mutations: Mutations) -> Region | str:
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
        if len(members) == 1 and isinstance(epilogue, Acc):
            anchor = growth.anchor
            if not is_region_alone(anchor.kind, known_tensor(growth.root, anchor.weight), anchor.bias is not None):
                break
        pool = _pool_after(growth, members, mutations)
        nodes = tuple(members) if pool is None else (*members, pool[0])
        compacted, operands, written = compact(growth.values[output], epilogue, growth.operands)
        pooling = None if pool is None else pool[1]
        return Region(growth.anchor, nodes, compacted, operands, written=written, pool=pooling)
    if reasons:
        return reasons[0]
    if growth.refused:
        return next(iter(growth.refused.values()))
    users = ", ".join(describe(growth.root, user) for user in growth.anchor_node.users)
    return f"no pointwise operation follows: its result goes to {users or 'nobody'}"
