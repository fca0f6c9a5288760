"""What the backward of a training step makes again, instead of taking it from the forward.

The partitioner decides by bytes what the forward keeps. It does not see what costs nothing to keep, since it exists
anyway: the tensors that the step is given, and the memory that views show.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Final

import torch
from torch import fx

from fxfuse.row_padding import is_view

_aten: Final = torch.ops.aten
_COPIES: Final = frozenset({_aten.clone.default, _aten.flip.default})
"""Operators that copy a tensor, perhaps to another layout or in another order."""


def copies(forward: fx.Graph, backward: fx.Graph, given: Set[fx.Node]) -> None:
    """Lets the backward take given tensors instead of copies that only it reads, and make these where it reads them.

    Such copies are filters turned round for the gradient of x. They would be kept from the forward on. Copies that the
    forward reads stay kept: eager keeps them, too, and who made one may then change what it is a copy of.

    Args:
        given: tensors that the forward is given and does not change.
    """
    own = {node.name: node for node in forward.nodes}
    for placeholder in [node for node in backward.nodes if node.op == "placeholder" and node.name in own]:
        base, made = _made_of(own[placeholder.name], given, _moves)
        if placeholder.users and base in given and any(node.target in _COPIES for node in made) and _is_unread(made):
            taken = _placeholder(backward, base, before=placeholder)
            first = next(node for node in backward.nodes if placeholder in node.all_input_nodes)
            _replace(backward, placeholder, taken, made, before=first)


def _is_unread(made: Sequence[fx.Node]) -> bool:
    """Whether nothing in the forward reads these steps, but for the views at their beginning."""
    copied = itertools.dropwhile(is_view, made)
    return all(user.op == "output" or user in made for node in copied for user in node.users)


def views(forward: fx.Graph, backward: fx.Graph, known: Set[fx.Node]) -> None:
    """Lets the backward take tensors that own memory instead of views of them, and make the views itself.

    Where the base is an input or a result of the forward (`known`), autograd can then see if it is changed in the
    meantime. Where the forward makes the base, one tensor then owns the memory, so it may be lent. Views that show only
    a part of such a base stay as they are: the part may be all that is kept in memory.
    """
    own = {node.name: node for node in forward.nodes}
    placeholders = [node for node in backward.nodes if node.op == "placeholder"]
    others = {node.name for node in backward.nodes} - {node.name for node in placeholders}
    found = {node: _made_of(own[node.name], known, is_view) for node in placeholders if node.name in own}
    shown = Counter[fx.Node]()
    for placeholder, (base, _) in found.items():
        shown[base] += placeholder.meta["val"].numel()
    for placeholder, (base, made) in found.items():
        is_whole = base in known or shown[base] >= base.meta["val"].numel()
        if made and is_whole and base.name not in others:  # others: the backward recomputes it
            taken = _placeholder(backward, base, before=placeholder)
            *_, last = (node for node in backward.nodes if node.op == "placeholder")
            _replace(backward, placeholder, taken, made, before=last.next)


def leave_out_unread(forward: fx.Graph) -> None:
    """Removes copies and views that nothing reads any more."""
    for node in reversed(forward.nodes):
        if not node.users and _moves(node):
            forward.erase_node(node)


def _moves(node: fx.Node) -> bool:
    """Whether a node is a view or a copy of one tensor."""
    return is_view(node) or node.target in _COPIES


def _made_of(node: fx.Node, known: Set[fx.Node], is_step: Callable[[fx.Node], bool]) -> tuple[fx.Node, list[fx.Node]]:
    """The node that a value is made of in steps of one argument each, back to a known one, and these steps."""
    made: list[fx.Node] = []
    while node not in known and is_step(node):
        made.insert(0, node)
        (node,) = node.all_input_nodes
    return node, made


def _placeholder(backward: fx.Graph, node: fx.Node, before: fx.Node) -> fx.Node:
    """The argument of the backward that a node of the forward is. It is inserted if there is none."""
    placeholders = (one for one in backward.nodes if one.op == "placeholder")
    there: fx.Node | None = next((one for one in placeholders if one.name == node.name), None)
    if there is not None:
        return there
    with backward.inserting_before(before):
        one = backward.create_node("placeholder", node.name, name=node.name)
    one.name = node.name  # fx gives no name twice, those of erased nodes included
    one.meta = dict(node.meta)
    return one


def _replace(
    backward: fx.Graph, placeholder: fx.Node, base: fx.Node, made: Iterable[fx.Node], before: fx.Node
) -> None:  # fmt: skip
    """Makes the steps `made` of `base` in the backward, before a node, in place of an argument."""
    with backward.inserting_before(before):
        for step in made:
            base = backward.node_copy(step, lambda _, source=base: source)  # type: ignore[misc]
    placeholder.replace_all_uses_with(base)
    backward.erase_node(placeholder)
