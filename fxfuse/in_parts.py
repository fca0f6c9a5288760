"""Dynamo's graphs with DTensors, of which each process holds a part (tensor parallelism).

Kernels cannot handle DTensors. torch's AOTAutograd takes such a graph apart into operators on the parts that this
process holds, and collectives between them. So forward and backward are two graphs like any other, and are fused:

    linear(x, w: DTensor), gelu, linear(…), redistribute     →     addmm, gelu, addmm, all_reduce, wait_tensor

Collectives run while the GPU does other work, so there are no programs: the graphs' own code runs node by node.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxfuse import plans
from fxfuse.capture import Captured
from fxfuse.decompositions import decompositions
from fxfuse.hooks import is_in_parts
from fxfuse.joint import draws, partition, simplify
from fxfuse.module import FusedModule
from fxfuse.program.values import Refused, device_of
from fxfuse.replacement import Settings

logger = logging.getLogger("fxfuse")

_aten: Final = torch.ops.aten


def has_parts(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether one of Dynamo's graphs reads a DTensor."""
    return any(map(is_in_parts, _tensors(gm, example_inputs)))


def _tensors(gm: nn.Module, example_inputs: Sequence[Any]) -> list[torch.Tensor]:
    found = [*pytree.tree_leaves(list(example_inputs)), *gm.parameters(), *gm.buffers()]
    return [each for each in found if isinstance(each, torch.Tensor)]


def compiled_by_parts(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings, note: Callable[[FusedModule], None]
) -> Callable[..., Any] | None:
    """A function that runs such a graph; None if torch has to.

    Args:
        note: is called with each fused graph: the forward's, and the backward's when it is made.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]

    def fused(half: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        if any(map(draws, half.graph.nodes)):  # a tensor's parts would not draw what the whole tensor does
            raise Refused("it draws random numbers")
        _without_views(half.graph)
        simplify(half.graph, ())
        half.recompile()
        module = FusedModule(Captured(half, copy.deepcopy(half.graph), is_laid_out=True), settings)
        note(module)
        run = plans.prepared_by_first_calls(module.forward)

        def call(*args: Any) -> Any:
            with torch.no_grad():
                return run(*args)

        return make_boxed_func(call)

    device = device_of(_tensors(gm, example_inputs))
    backend = aot_autograd(
        fw_compiler=fused,
        bw_compiler=fused,
        inference_compiler=fused,
        decompositions=decompositions("cpu" if device is None else device.type),
        partition_fn=partition(),
    )
    try:
        return backend(gm, example_inputs)
    except Exception as error:  # tracing any user's model can raise anything
        logger.info("fxfuse: torch computes a graph with DTensors: %s", error)
        return None


def _without_views(graph: fx.Graph) -> None:
    """Drops views that keep the shape, which DTensors make: a region would end at such a view."""
    (end,) = (node for node in graph.nodes if node.op == "output")
    for node in list(graph.nodes):
        if node.target is _aten.view.default and node.args[0].meta["val"].shape == node.meta["val"].shape:
            node.replace_all_uses_with(node.args[0], lambda user: user is not end)
            if not node.users:
                graph.erase_node(node)
