"""Orders the backward of a training step so that large gradients come late, where this lowers the peak of memory.

At the beginning of a backward all that the forward has kept is still there. The gradient of a large weight behind few
activations (a classifier's) would be computed first, and be added to it. But such a gradient is made of little, which
may as well wait until the rest is freed:

    kept    ████████████ ██████████ ████████ ██████ ████       kept    ████████████ ██████████ ████████ ██████ ████
    dW                   ██████████████████████████████        dW                                              ████
            dW first: both at once                                     dW last

DistributedDataParallel waits for the first gradients. So a backward that is cut for it (segments.py) stays as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence, Set
from typing import Final

import torch
from torch import fx

from fxfuse.joint import draws
from fxfuse.program.memory import SMALL
from fxfuse.row_padding import base_of

MOST: Final = 32
"""The most gradients that are considered, the largest first."""
WORTH: Final = 0.005
"""The part of the peak that computing a gradient late must save. It then reads from memory what was in a cache."""


def late(nodes: Sequence[fx.Node], gradients: Iterable[fx.Node], freed: Set[fx.Node]) -> list[fx.Node]:
    """The nodes of a backward in an order that takes less memory: some large gradients are computed last.

    Args:
        nodes: in an order in which they can be computed; no arguments.
        gradients: those of the nodes that are the backward's results.
        freed: the arguments whose memory is freed after their last use.
    """
    results = dict.fromkeys(node for node in gradients if node.op != "placeholder")
    large = sorted((node for node in results if _nbytes(node) >= SMALL), key=_nbytes, reverse=True)
    candidates = list(itertools.islice(filter(None, (_apart(nodes, node) for node in large)), MOST))
    if not candidates:
        return list(nodes)
    timeline = _Timeline(nodes, candidates, results.keys(), freed)
    order = list(nodes)
    peak, is_better = timeline.peak(order), True
    while is_better:
        is_better = False
        for each in candidates:
            changed = sorted(order, key=each.__contains__)  # stable: the others keep their order
            lower = timeline.peak(changed)
            if lower < peak * (1 - WORTH):
                order, peak, is_better = changed, lower, True
    return order


def _apart(nodes: Sequence[fx.Node], gradient: fx.Node) -> Set[fx.Node]:
    """A gradient and the nodes that nothing else needs; nothing if it cannot be computed alone."""
    if any(user.op != "output" for user in gradient.users):
        return set()
    own = {gradient}
    for node in reversed(nodes):
        if node.users and own.issuperset(node.users):
            own.add(node)
    return set() if any(map(draws, own)) else own


class _Timeline:
    """What is in memory in an order of the nodes: what the forward has kept, the gradients, and what late ones are made
    of. Other values are there for a little while, and most join a kernel.
    """

    def __init__(
        self, nodes: Sequence[fx.Node], candidates: Iterable[Set[fx.Node]], results: Set[fx.Node], freed: Set[fx.Node]
    ) -> None:
        """
        Args:
            candidates: gradients that may be late, each with the nodes that nothing else needs.
        """
        read = {one for each in candidates for node in each for one in node.all_input_nodes}
        bases = {base_of(node) for node in (*freed, *results, *read)}
        self._sizes = {base: _nbytes(base) for base in bases if base in freed or base.op != "placeholder"}
        self._kept = [base for base in self._sizes if base in freed]
        self._given = {base_of(node) for node in results}
        self._touched = {
            node: [base for one in (node, *node.all_input_nodes) if (base := base_of(one)) in self._sizes]
            for node in nodes
        }

    def peak(self, order: Sequence[fx.Node]) -> int:
        """The most bytes that are there at once."""
        first, last = dict.fromkeys(self._kept, 0), dict.fromkeys(self._kept, 0)
        for place, node in enumerate(order):
            for base in self._touched[node]:
                first.setdefault(base, place)
                last[base] = place
        changes = [0] * (len(order) + 1)
        for base, place in first.items():
            changes[place] += self._sizes[base]
            if base not in self._given:
                changes[last[base] + 1] -= self._sizes[base]
        return max(itertools.accumulate(changes))


def _nbytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.nbytes if isinstance(value, torch.Tensor) else 0
