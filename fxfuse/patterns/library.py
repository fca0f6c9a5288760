"""Operations that torch's library runs, and that a pass may follow: the pointwise work after one is one pass.

The operations stay in the graph as they are. If a result is a new tensor that only the pass reads, the pass overwrites
it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxfuse import ops
from fxfuse.hooks import has_hooks
from fxfuse.patterns.anchors import Attribute

_aten: Final = torch.ops.aten


@dataclass(frozen=True)
class _Library:
    """An operation of torch's, in every spelling."""

    name: str
    functions: Sequence[Any]
    """The first one replaces modules of the operation."""
    modules: Sequence[type[nn.Module]] = ()
    params: Sequence[str] = ()
    """Further parameters of the function. Modules hold them in attributes of the same names."""
    methods: Sequence[str] = ()
    fresh: bool = True
    """Whether its result surely lies in memory of its own."""


_NORMALISED: Final = ("weight", "bias", "eps")
_CONVOLVED: Final = ("weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED: Final = ("weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


def _pooling(name: str) -> _Library:
    """Pooling in 1 to 3 dimensions. It is not fresh: nobody promises a copy for windows of one element."""
    dimensions = ("1d", "2d", "3d")
    functions = [getattr(space, f"{name}_pool{d}", None) for d in dimensions for space in (F, torch, _aten)]
    modules = [getattr(nn, f"{name.title().replace('_', '')}Pool{d}") for d in dimensions]
    return _Library(f"{name}_pool", [function for function in functions if function], modules, fresh=False)


_LIBRARY: Final = (
    _Library("conv1d", (F.conv1d, torch.conv1d, _aten.conv1d), (nn.Conv1d,), _CONVOLVED),
    _Library("conv3d", (F.conv3d, torch.conv3d, _aten.conv3d), (nn.Conv3d,), _CONVOLVED),
    _Library("conv_transpose1d", (F.conv_transpose1d, torch.conv_transpose1d, _aten.conv_transpose1d),
             (nn.ConvTranspose1d,), _TRANSPOSED),
    _Library("conv_transpose2d", (F.conv_transpose2d, torch.conv_transpose2d, _aten.conv_transpose2d),
             (nn.ConvTranspose2d,), _TRANSPOSED),
    _Library("conv_transpose3d", (F.conv_transpose3d, torch.conv_transpose3d, _aten.conv_transpose3d),
             (nn.ConvTranspose3d,), _TRANSPOSED),
    _Library("convolution", (torch.convolution, _aten.convolution)),
    _Library("bmm", (torch.bmm, _aten.bmm), methods=("bmm",)),
    _Library("baddbmm", (torch.baddbmm, _aten.baddbmm), methods=("baddbmm",)),
    _Library("matmul", (torch.matmul, operator.matmul, _aten.matmul), methods=("matmul", "__matmul__")),
    _Library("mm", (torch.mm, _aten.mm), methods=("mm",)),
    _Library("addmm", (torch.addmm, _aten.addmm), methods=("addmm",)),
    _Library("layer_norm", (F.layer_norm, torch.layer_norm, _aten.layer_norm), (nn.LayerNorm,),
             ("normalized_shape", *_NORMALISED)),
    _Library("group_norm", (F.group_norm, torch.group_norm, _aten.group_norm), (nn.GroupNorm,),
             ("num_groups", *_NORMALISED)),
    *map(_pooling, ("max", "avg", "adaptive_max", "adaptive_avg")),
)  # fmt: skip

_BY_TARGET: Final[Mapping[Any, _Library]] = {
    **{function: row for row in _LIBRARY for function in row.functions},
    **{module: row for row in _LIBRARY for module in row.modules},
    **{("method", method): row for row in _LIBRARY for method in row.methods},
}


@dataclass(frozen=True)
class LibraryCall:
    """The operation of torch's library that a node computes."""

    name: str
    fresh: bool
    function: Callable[..., torch.Tensor] | None = None
    """Replaces a module: it is called with the module's input and `arguments`. None if the node may stay."""
    arguments: Mapping[str, Any] = field(default_factory=dict)


def find_library(root: nn.Module, node: fx.Node) -> LibraryCall | None:
    """What `node` computes if it is one of these operations, else None."""
    if node.op == "call_module":
        return _module_call(node, root.get_submodule(str(node.target)))
    if "out" in node.kwargs:
        return None
    target = ("method", node.target) if node.op == "call_method" else ops.function_of(node.target)
    row = _BY_TARGET.get(target) if node.op in ("call_function", "call_method") else None
    return None if row is None else LibraryCall(row.name, row.fresh)


def _module_call(node: fx.Node, module: nn.Module) -> LibraryCall | None:
    """A module as a call of its function. As a module, hooks that it gets later would see an overwritten result."""
    row = _BY_TARGET.get(type(module))
    inputs = [*node.args, *node.kwargs.values()]
    if row is None or has_hooks(module) or len(inputs) != 1 or not isinstance(inputs[0], fx.Node):
        return None
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return None
    if not row.fresh:
        return LibraryCall(row.name, False)
    values = {name: getattr(module, name) for name in row.params}
    arguments = {
        name: Attribute(f"{node.target}.{name}") if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }
    return LibraryCall(row.name, True, row.functions[0], arguments)


def as_function(graph: fx.Graph, module: fx.Node, library: LibraryCall) -> fx.Node:
    """Replaces a module's call by a function's, so that nobody but the graph has the result."""
    assert library.function is not None
    with graph.inserting_before(module):
        arguments = {
            name: graph.get_attr(value.path) if isinstance(value, Attribute) else value
            for name, value in library.arguments.items()
        }
        x, name = module.all_input_nodes[0], f"{module.name}_{library.name}"
        call = graph.create_node("call_function", library.function, (x,), arguments, name=name)
    call.meta = dict(module.meta)
    module.replace_all_uses_with(call)
    graph.erase_node(module)
    return call
