"""Chains: pointwise operations outside of anchors' regions, as one pass from existing tensors to a new one.

A chain is an output node and every pointwise node before it whose value only the chain reads. One of the tensors that
the chain reads is its acc, the others are operands. If acc is the fresh result of an operation of torch's library
(library.py) and nobody else reads acc, the pass overwrites it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx, nn

from fxfuse import ops
from fxfuse.expression import Acc, depends_on_acc
from fxfuse.ops import Rejected
from fxfuse.patterns.anchors import Anchor, noted
from fxfuse.patterns.library import LibraryCall, find_library
from fxfuse.patterns.mutation import Mutations, spelling
from fxfuse.patterns.region import Region, compact
from fxfuse.patterns.values import BATCH_NORMS, Full, Growth, check_overwritten, is_nothing, overwritten_by, value_of
from fxfuse.simplify import is_fresh, simplify

LEAST: Final = 2
"""The least number of operations in a chain for which eager makes a pass each. One alone gains nothing."""

_CONVERSIONS: Final = frozenset({"type_as", "to", "float", "half", "bfloat16"})
_FREE: Final = _CONVERSIONS | {"detach", "contiguous"}
"""Rows of the op table that may cost nothing in eager."""


@dataclass(frozen=True)
class _Source:
    """The tensor that is a chain's acc."""

    node: fx.Node
    library: LibraryCall | None = None
    """The call of torch's library that computes the tensor, if only the chain reads it."""

    @property
    def owned(self) -> bool:
        """Whether the pass may overwrite the tensor."""
        return self.library is not None and self.library.fresh


class Chains:
    """Finds the chains of one graph."""

    def __init__(self, root: nn.Module, tensors: frozenset[fx.Node], mutations: Mutations) -> None:
        self._root = root
        self._mutations = mutations
        self._tensors = tensors

    def ending_at(self, output: fx.Node, taken: set[fx.Node]) -> Region | tuple[fx.Node, str] | None:
        """The chain that ends at `output`, a node that no region has taken; None if there is none.

        If too little follows an operation of torch's library for a pass of fxfuse, that operation and the reason.
        """
        value = noted(output)
        if output not in self._tensors or (isinstance(value, torch.Tensor) and not value.is_floating_point()):
            return None
        if self._only_widens(output):
            return None
        refused: set[fx.Node] = set()
        while output not in refused:
            members = self._members(output, taken | refused)
            source = self._source(members, taken)
            if source is None:
                return None
            anchor = Anchor("pointwise", source.node, None)
            growth = Growth(self._root, source.node, anchor, self._tensors, {source.node: Acc()})
            misfit = self._first_misfit(growth, members, source)
            if misfit is None:
                return self._closed(growth, members, source)
            refused.add(misfit)
        return None

    def _only_widens(self, node: fx.Node) -> bool:
        """Whether a node is known to convert to a wider dtype. A chain ends before such a node: the narrow value takes
        less memory, and kernels that read it convert it at no cost."""
        found = spelling(self._root, node)
        if found is None or found.row.name not in _CONVERSIONS:
            return False
        value, narrow = noted(node), noted(node.args[0] if node.args else None)
        are_known = isinstance(value, torch.Tensor) and isinstance(narrow, torch.Tensor)
        return are_known and narrow.dtype.itemsize < value.dtype.itemsize

    def _members(self, output: fx.Node, excluded: set[fx.Node]) -> list[fx.Node]:
        """`output` and the pointwise nodes before it whose users are all among them, in graph order."""
        order = self._mutations.order
        inside: set[fx.Node] = set()
        heap = [(-order[output], output)]  # the latest first: a node's users come before it
        seen = {output}
        while heap:
            _, node = heapq.heappop(heap)
            closed = node is output or all(user in inside for user in node.users)
            if not closed or not self._is_pointwise(node, output) or node in excluded:
                continue
            inside.add(node)
            for arg in node.all_input_nodes:
                if arg not in seen:
                    seen.add(arg)
                    heapq.heappush(heap, (-order[arg], arg))
        return sorted(inside, key=order.__getitem__)

    def _is_pointwise(self, node: fx.Node, output: fx.Node) -> bool:
        return (
            node in self._tensors
            and self._mutations.same_section(node, output)
            and (self._launches(node) > 0 or is_nothing(self._root, node) or spelling(self._root, node) is not None)
        )

    def _launches(self, node: fx.Node) -> int:
        """The least number of passes over memory that eager makes for a node."""
        if node.op == "call_module" and type(self._root.get_submodule(str(node.target))) in BATCH_NORMS:
            return 1
        found = spelling(self._root, node)
        return int(found is not None and found.row.name not in _FREE)

    def _source(self, members: list[fx.Node], taken: set[fx.Node]) -> _Source | None:
        """The tensor that becomes acc, of those that `members` read: at best one to overwrite, at worst a parameter."""
        inside = set(members)
        read = [arg for node in members for arg in node.all_input_nodes if arg not in inside and arg in self._tensors]

        def library(leaf: fx.Node) -> LibraryCall | None:
            apart = leaf in taken or not inside.issuperset(leaf.users)
            return None if apart else find_library(self._root, leaf)

        sources = [_Source(leaf, library(leaf)) for leaf in dict.fromkeys(read)]

        def rank(source: _Source) -> tuple[bool, ...]:
            return not source.owned, source.library is None, source.node.op == "get_attr"

        return min(sources, key=rank, default=None)

    def _first_misfit(self, growth: Growth, members: list[fx.Node], source: _Source) -> fx.Node | None:
        """Gives each of `members` its expression. Returns the first one that has none in this chain, or None.

        If the chain becomes full, returns the last node that fits: another chain ends there.
        """
        latest: fx.Node | None = None
        own = {*members, source.node} if source.owned else set(members)
        for node in members:
            try:
                value = value_of(growth, node)
                self._check_written(node, own)
                check_overwritten(growth, node, self._mutations)
            except Full:
                return latest or node
            except Rejected:
                return node
            latest = node
            if value is None or (node is members[-1] and ops.is_boolean(value)):
                return node
            growth.values[node] = value
        return None

    def _check_written(self, node: fx.Node, own: set[fx.Node]) -> None:
        """Refuses an in-place node whose effect might be visible outside of the chain."""
        found = spelling(self._root, node)
        if found is not None and found.in_place and not self._mutations.memory(overwritten_by(node)) <= own:
            raise Rejected(f"'{node.name}' overwrites a tensor from outside the chain")

    def _closed(self, growth: Growth, members: list[fx.Node], source: _Source) -> Region | tuple[fx.Node, str] | None:
        output, order = members[-1], self._mutations.order
        for node in members:
            outside = [arg for arg in node.all_input_nodes if arg not in growth.values or arg is source.node]
            if self._mutations.between(order[node], order[output], outside, members):
                return None
        if sum(map(self._launches, members)) < LEAST:
            return (source.node, f"only '{output.name}' follows, one pass in torch, too") if source.owned else None
        value = growth.values[output]
        epilogue = simplify(value, fresh_acc=source.owned)
        if isinstance(epilogue, Acc) or not depends_on_acc(epilogue):
            return None
        if is_fresh(value, source.owned) and not is_fresh(epilogue, source.owned):
            return None  # eager computes a new tensor; simplified, it would be one from outside
        anchor = Anchor("pointwise", source.node, None, options={"overwrite": source.owned})
        nodes = members if source.library is None else [source.node, *members]
        compacted, operands, written = compact(value, epilogue, growth.operands)
        return Region(anchor, tuple(nodes), compacted, operands, library=source.library, written=written)
