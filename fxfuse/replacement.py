"""Captured graphs with their regions replaced by calls of fused operators."""

from __future__ import annotations

import copy
import itertools
import os
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx, nn

from fxfuse import channels_last, functional, plans, row_major
from fxfuse.capture import Captured
from fxfuse.errors import FxfuseError
from fxfuse.patterns import Attribute, Region, Skipped, ask_earlier, find_regions, keep_numbers
from fxfuse.patterns.anchors import Source, noted
from fxfuse.patterns.library import as_function
from fxfuse.patterns.masks import leave_out_masks
from fxfuse.patterns.numbers import put_sizes_in
from fxfuse.patterns.recompose import recompose
from fxfuse.patterns.tensors import tensors_of
from fxfuse.program.observed import trains


@dataclass(frozen=True)
class Settings:
    """The settings that optimize() was called with."""

    strict: bool = False
    fp32: str = "exact"
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        for name in ("strict", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise FxfuseError(f"{name} is True or False, not {getattr(self, name)!r}")
        if self.fp32 not in ("exact", "fast"):
            raise FxfuseError(f'fp32 is "exact" or "fast", not {self.fp32!r}')

    def changed(self) -> dict[str, Any]:
        """Keyword arguments for the fused operators: the settings of kernels that differ from their defaults."""
        return {name: vars(self)[name] for name in ("strict", "fp32") if vars(self)[name] != getattr(Settings, name)}


_region_numbers: Final = itertools.count(1)


@dataclass(frozen=True)
class FusedRegion:
    """One replaced region, as the report needs it."""

    fused: str
    """The name of the node that replaced the others."""
    number: int
    """Unique in the process. The operator gets it, so that plans can be found by region (plans.of_region)."""
    kind: str
    nodes: tuple[str, ...]
    epilogue: str
    library: str | None = None
    """The operation of torch's library that a chain follows."""


@dataclass(frozen=True)
class Replaced:
    """A graph with fused operators in it."""

    graph: fx.Graph
    regions: tuple[FusedRegion, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    layouts: channels_last.Layouts = field(default_factory=channels_last.Layouts)


def with_regions_replaced(captured: Captured, settings: Settings) -> Replaced:
    """The captured graph, in the model's present mode, with every region as one call and layouts assigned."""
    assert captured.graph is not None
    root, graph = captured.root, copy.deepcopy(captured.graph)
    regions: list[FusedRegion] = []
    skipped: list[Skipped] = []
    layouts = channels_last.Layouts()
    if not is_disabled():
        put_sizes_in(root, graph)
        leave_out_masks(root, graph)
        recompose(root, graph)
        ask_earlier(root, graph)
        found, skipped = find_regions(root, graph, captured.is_laid_out)
        known = tensors_of(root, graph)
        replaced: dict[fx.Node, fx.Node] = {}
        for region in found:
            nodes = tuple(node.name for node in region.nodes)
            number = next(_region_numbers)
            if region.written is not None:
                plans.written[number] = str(region.epilogue), region.written
            fused = _replace(graph, region, number, replaced, settings, known)
            library = None if region.library is None else region.library.name
            epilogue = str(region.epilogue) if region.pool is None else f"{region.epilogue}; {region.pool}"
            regions.append(FusedRegion(fused.name, number, region.anchor.kind, nodes, epilogue, library))
        if not _trains(root, graph):
            row_major.make_tokens_contiguous(root, graph)
            if not captured.is_laid_out:
                layouts = channels_last.assign_layouts(root, graph)
    keep_numbers(graph)
    for node in graph.nodes:
        if node.name == "self":  # a child of this name; the code calls the module itself so
            node._rename("self_1")
    graph.lint()
    return Replaced(graph, tuple(regions), tuple(skipped), layouts)


def _trains(root: nn.Module, graph: fx.Graph) -> bool:
    """Whether calls will want gradients, as far as is known.

    Dynamo captures a graph for a call, which tells. Of torch.export's, only operators that compute as in training tell.
    """
    given = [node for node in graph.nodes if node.op == "placeholder" and noted(node) is not None]
    if not isinstance(root, fx.GraphModule) or not given:
        return root.training
    if "val" in given[0].meta:  # torch.export's
        called = (node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload))
        return any(trains(node.target, node.args, node.kwargs) for node in called)
    tensors = [*map(noted, given), *root.parameters()]  # which Dynamo makes arguments since torch 2.5
    return torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in tensors)


def is_disabled() -> bool:
    """Whether nothing is to be fused (FXFUSE_DISABLE=1)."""
    return os.environ.get("FXFUSE_DISABLE", "") not in ("", "0")


def _replace(
    graph: fx.Graph, region: Region, number: int, replaced: dict[fx.Node, fx.Node], settings: Settings,
    known: frozenset[fx.Node],
) -> fx.Node:  # fmt: skip
    """Replaces the region's nodes by one call of a fused operator, and returns the call.

    `replaced` maps nodes that have been replaced to their replacements. `known` are the nodes that are surely tensors;
    other operands may be numbers.
    """
    anchor, output, nodes = region.anchor, region.output, region.nodes
    if region.library is not None:
        nodes = nodes[1:]
        if region.library.function is not None:
            replaced[region.nodes[0]] = as_function(graph, region.nodes[0], region.library)

    def fetch(source: Source | None) -> fx.Node | None:
        if isinstance(source, Attribute):
            return graph.get_attr(source.path)
        return None if source is None else replaced.get(source, source)

    with graph.inserting_before(output):
        tensors = [fetch(source) for source in (anchor.x, anchor.weight, anchor.bias)]
        operands = [
            fetch(source)
            if isinstance(source, Attribute) or source in known
            else graph.call_function(functional.as_operand, (fetch(source),))
            for source in region.operands
        ]
        options = functional.option_values(anchor.kind, anchor.options)
        pool = {} if region.pool is None else {"pool": tuple(map(int, region.pool))}
        fused = graph.create_node(
            "call_function",
            functional.function(anchor.kind),
            (*tensors, operands, str(region.epilogue), *options),
            {"region": number, **pool, **settings.changed()},
            name=f"{region.nodes[0].name}_fused",
        )
    # without entries about how the old node was called (fx.wrap leaves "is_wrapped")
    kept = ("stack_trace", "nn_module_stack", "val", "example_value")
    fused.meta = {key: value for key, value in output.meta.items() if key in kept}
    output.replace_all_uses_with(fused)
    replaced[output] = fused
    attributes = {arg for node in nodes for arg in node.all_input_nodes if arg.op == "get_attr"}
    for node in reversed(nodes if region.padding is None else (region.padding, *nodes)):
        graph.erase_node(node)
    for attribute in attributes:
        if not attribute.users:
            graph.erase_node(attribute)
    return fused
