"""Whole runs of convolutions in channels_last, whatever layout the model's inputs have.

GPU libraries and kernels are faster there, and torch's operators pass the layout on: it takes one conversion where a
run begins, and one back wherever a value leaves it, so that everybody else sees the strides that eager would give.

A run starts at a convolution and takes in every operation that keeps the layout and works on values of the run alone.
Whether a call converts is decided when it comes: on a GPU, for an input that is contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxfuse import functional, ops
from fxfuse.layout import contiguous_strides
from fxfuse.patterns.anchors import has_hooks
from fxfuse.patterns.mutation import Mutations, spelling
from fxfuse.patterns.questions import asks_rank
from fxfuse.patterns.values import is_nothing

LEAST: Final = 4
"""Convolutions that a run must have to be converted."""

_aten = torch.ops.aten
_POOL_MODULES: Final = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.BatchNorm2d, nn.Identity, nn.Dropout)
_POOLS: Final = frozenset(
    {F.max_pool2d, torch.max_pool2d, _aten.max_pool2d, F.avg_pool2d, _aten.avg_pool2d, F.adaptive_avg_pool2d,
     _aten.adaptive_avg_pool2d}
)  # fmt: skip
_CATS: Final = frozenset({torch.cat, torch.concat, _aten.cat})


@dataclass(frozen=True)
class Run:
    """Nodes of a graph that work in channels_last if `source` is converted."""

    source: fx.Node
    nodes: list[fx.Node] = field(default_factory=list)
    convolutions: list[fx.Node] = field(default_factory=list)


def convert_runs(root: nn.Module, graph: fx.Graph) -> list[Run]:
    """Puts conversions around the runs of `graph`, whose regions are fused already. Returns the runs."""
    mutations = Mutations(root, graph)
    if mutations.visible():  # a conversion copies, and what is overwritten would be overwritten in the copy only
        return []
    runs = [run for run in _find_runs(root, graph) if len(run.convolutions) >= LEAST]
    for run in runs:
        _convert(graph, run)
    return runs


# --------------------------------------------------------------------------------------------- at a call


def to_channels_last(x: torch.Tensor) -> torch.Tensor:
    """x in channels_last if that is worth while for the run that begins with it, else x."""
    if isinstance(x, fx.Proxy):  # somebody traces the optimised model
        return x.tracer.create_proxy("call_function", to_channels_last, (x,), {})
    return x.contiguous(memory_format=torch.channels_last) if _gains(x) else x


def as_before(y: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """A value of the run that began with `source`, with the strides that it would have without conversion."""
    if isinstance(y, fx.Proxy):
        return y.tracer.create_proxy("call_function", as_before, (y, source), {})
    strides = contiguous_strides(y.shape)
    if not _gains(source) or y.stride() == strides:
        return y
    if y.is_contiguous():  # but for the strides of dimensions of size 1
        return y.as_strided(y.shape, strides)
    return y.contiguous()


def _gains(x: torch.Tensor) -> bool:
    # Where both layouts are the same in memory, torch's operators do not agree which one a tensor has.
    return _on_gpu(x) and x.dim() == 4 and x.is_contiguous() and not x.is_contiguous(memory_format=torch.channels_last)


def _on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


# ---------------------------------------------------------------------------------------------- in a graph


def _find_runs(root: nn.Module, graph: fx.Graph) -> list[Run]:
    runs: list[Run] = []
    of: dict[fx.Node, Run] = {}
    for node in graph.nodes:
        if _is_convolution(root, node):
            x = node.all_input_nodes[0]
            run = of.get(x)
            if run is None:
                run = next((run for run in runs if run.source is x), None) or Run(x)
                if not run.nodes:
                    runs.append(run)
            run.convolutions.append(node)
        elif _keeps_layout(root, node):
            inputs = [arg for arg in node.all_input_nodes if arg.op != "get_attr"]
            run = of.get(inputs[0]) if inputs else None
            if run is None or any(of.get(arg) is not run for arg in inputs):
                continue
        else:
            continue
        run.nodes.append(node)
        of[node] = run
    return runs


def _is_convolution(root: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return type(module) is nn.Conv2d and not has_hooks(module) and len(node.all_input_nodes) == 1
    return node.op == "call_function" and node.target is functional.conv2d


def _keeps_layout(root: nn.Module, node: fx.Node) -> bool:
    """Whether the result is in channels_last if all inputs are, as far as torch's operators go."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if has_hooks(module) or module.training or getattr(module, "return_indices", False):
            return False
        return type(module) in _POOL_MODULES or spelling(root, node) is not None
    if node.op == "call_method":
        return spelling(root, node) is not None
    if node.op != "call_function":
        return False
    if is_nothing(root, node):
        return True
    target = ops.function_of(node.target)
    if target in _CATS:
        return node.args[1:] == (1,) or node.kwargs == {"dim": 1}
    return target in _POOLS or target is functional.pointwise or spelling(root, node) is not None


def _convert(graph: fx.Graph, run: Run) -> None:
    inside = set(run.nodes)
    with graph.inserting_before(run.nodes[0]):
        converted = graph.call_function(to_channels_last, (run.source,))
    for node in run.convolutions:
        if node.all_input_nodes[0] is run.source:
            if node.args:  # its x, and not the same tensor among its operands
                node.args = (converted, *node.args[1:])
            else:
                node.kwargs = {"input": converted}
    for node in run.nodes:
        outside = [user for user in node.users if user not in inside and not asks_rank(user)]
        if outside:
            with graph.inserting_after(node):
                restored = graph.call_function(as_before, (node, run.source))
            for user in outside:
                user.replace_input_with(node, restored)
