"""Finds every region of a graph: first those of anchors, then chains of the remaining nodes."""

from __future__ import annotations

from dataclasses import replace

from torch import fx, nn

from fxfuse.ops import Rejected
from fxfuse.patterns.anchors import find_anchor
from fxfuse.patterns.chain import Chains
from fxfuse.patterns.gated import join_gated
from fxfuse.patterns.mutation import Mutations
from fxfuse.patterns.padding import with_own_padding
from fxfuse.patterns.region import Region, Skipped, close, grow
from fxfuse.patterns.tensors import tensors_of


def find_regions(root: nn.Module, graph: fx.Graph, of_batches: bool = False) -> tuple[list[Region], list[Skipped]]:
    """Every region of `graph`, in graph order, and the nodes that were left alone, each with the reason.

    Args:
        of_batches: whether products of batches are anchors. They are in training steps. Elsewhere attention that is
            written as products and a softmax may become torch's own (program/attention_by_hand.py).

    Anchors are taken from last to first. So a residual addition of two anchors' results goes to the later one, whose
    other input is ready by then. Chains come after all anchors, the latest first, so that each is as long as it can be.
    """
    mutations, tensors = Mutations(root, graph), tensors_of(root, graph)
    regions: list[Region] = []
    skipped: dict[fx.Node, str] = {}
    taken: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        try:
            anchor = find_anchor(root, node)
        except Rejected as reason:
            skipped[node] = str(reason)
            continue
        if anchor is None or (anchor.kind == "bmm" and not of_batches):
            continue
        anchor, padding = with_own_padding(root, node, anchor, mutations)
        growth = grow(root, node, anchor, taken, mutations, tensors)
        closed = close(growth, mutations)
        if isinstance(closed, str):
            skipped[node] = closed
        else:
            regions.append(replace(closed, padding=padding))
            taken.update(closed.nodes)
            skipped.update((refused, reason) for refused, reason in growth.refused.items() if refused not in taken)
    regions = join_gated(root, regions, mutations)
    taken.update(node for region in regions for node in region.nodes)
    chains = Chains(root, tensors, mutations)
    for node in reversed(graph.nodes):
        chain = None if node in taken else chains.ending_at(node, taken)
        if isinstance(chain, Region):
            regions.append(chain)
            taken.update(chain.nodes)
        elif chain is not None:
            skipped.setdefault(*chain)
    skipped = {node: reason for node, reason in skipped.items() if node not in taken}
    in_order = sorted(skipped.items(), key=lambda item: mutations.order[item[0]])
    regions.sort(key=lambda region: mutations.order[region.output])
    return regions, [Skipped(node.name, reason) for node, reason in in_order]
