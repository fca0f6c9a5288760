"""Gated units: joins two linears of the same x into one region, where the region of one reads the other's result.

The pattern is act(linear(x, w)) * linear(x, v), as in SwiGLU and GeGLU. The linears are joined only where a kernel
computes both; otherwise they stay two regions. Joined, they become a functional.gated_linear.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx, nn

from fxfuse.cuda import gpu
from fxfuse.expression import Acc, Expr, Operand, rewrite
from fxfuse.ops import Rejected
from fxfuse.patterns.anchors import Anchor, Source, find_anchor, known_tensor
from fxfuse.patterns.mutation import Mutations
from fxfuse.patterns.region import Region

_CHUNK = 8
"""Elements of 16 bits that the kernel reads at a time. The weights' rows must be multiples of it."""


def join_gated(root: nn.Module, regions: list[Region], mutations: Mutations) -> list[Region]:
    """`regions`, where regions of gated units replace those of their linears."""
    ending_at = {region.output: region for region in regions}
    for region in sorted(regions, key=lambda region: mutations.order[region.output]):
        for gate in _read_by(root, region, ending_at):
            if _have_kernel(root, region.anchor.weight, gate.anchor.weight) and _may_join(region, gate, mutations):
                ending_at.pop(gate.output, None)
                ending_at[region.output] = _joined(region, gate, mutations)
                break
    return list(ending_at.values())


def _read_by(root: nn.Module, region: Region, ending_at: dict[fx.Node, Region]) -> Iterable[Region]:
    """The linears of the same x whose results a linear's region reads. Alone they need not be regions."""
    if region.anchor.kind != "linear":
        return
    for source in region.operands:
        found = (ending_at.get(source) or _alone(root, source)) if isinstance(source, fx.Node) else None
        if found is not None and found.anchor.kind == "linear" and found.anchor.x == region.anchor.x:
            yield found


def _alone(root: nn.Module, node: fx.Node) -> Region | None:
    try:
        anchor = find_anchor(root, node)
    except Rejected:
        return None
    return None if anchor is None else Region(anchor, (node,), Acc(), ())


def _may_join(region: Region, gate: Region, mutations: Mutations) -> bool:
    """Whether only the region reads the gate, and the gate may be computed as late as the region."""
    if not set(gate.output.users) <= set(region.nodes):
        return False
    first, last = gate.nodes[0], region.output
    sources = [source for source in (gate.anchor.x, gate.anchor.weight, gate.anchor.bias) if source is not None]
    overwritten = mutations.between(
        mutations.order[first], mutations.order[last], [*sources, *gate.operands], [*gate.nodes, *region.nodes]
    )
    return mutations.same_section(first, region.nodes[0]) and not overwritten


def _have_kernel(root: nn.Module, *weights: Source | None) -> bool:
    """Whether one kernel may take both: 16-bit weights of one shape, on a GPU (before Hopper only for few rows)."""
    one, other = (known_tensor(root, weight) for weight in weights)
    if one is None or other is None or one.dim() != 2 or not all(type(size) is int for size in one.shape):
        return False
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    fits = one.dtype in (torch.float16, torch.bfloat16) and one.shape[1] % _CHUNK == 0
    return alike and fits and _on_gpu(one)


def _on_gpu(tensor: torch.Tensor) -> bool:
    # a fake tensor may be on a GPU that is not there
    return tensor.is_cuda and gpu.is_there() and gpu.capability(tensor.device) >= gpu.MINIMUM_CAPABILITY


def _joined(region: Region, gate: Region, mutations: Mutations) -> Region:
    sources = [source for source in dict.fromkeys((*region.operands, *gate.operands)) if source != gate.output]

    def renamed(epilogue: Expr, operands: tuple[Source, ...], acc: Expr) -> Expr:
        def replaced(node: Expr) -> Expr:
            if isinstance(node, Operand):
                source = operands[node.index]
                return product if source == gate.output else Operand(1 + sources.index(source))
            return acc if isinstance(node, Acc) else node

        return rewrite(epilogue, replaced)

    product = renamed(gate.epilogue, gate.operands, Operand(0))
    epilogue = renamed(region.epilogue, region.operands, Acc())
    anchor = Anchor("gated_linear", region.anchor.x, region.anchor.weight, region.anchor.bias)
    nodes = sorted((*region.nodes, *gate.nodes), key=mutations.order.__getitem__)
    assert gate.anchor.weight is not None, "linears have one"
    operands = [gate.anchor.weight, *sources, *([] if gate.anchor.bias is None else [gate.anchor.bias])]
    return Region(anchor, tuple(nodes), epilogue, tuple(operands))
