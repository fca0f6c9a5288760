"""Max-pooling whose gradient needs one byte for each window: the place of its largest element in the window.

torch keeps the element's index in the image, eight bytes, and the image itself, although the gradient needs only its
shape. In joint graphs (joint.py), two operators replace torch's, and the places are kept. Loops compute both operators
(program/operators.py). This file defines their meaning by torch's own operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import fx

from fxfuse.functional import LIBRARY, register_fake
from fxfuse.problem import RESULT_DTYPES

_aten: Final = torch.ops.aten
LARGEST_WINDOW: Final = 16
"""The most elements of a window that a thread reads. All but the first read of an element come from caches."""
LEAST_CHANNELS: Final = 16
"""The least number of channels for which vectors pay on a CPU."""
_SIDES: Final = "int[] kernel_size, int[] stride, int[] padding, bool ceil_mode"
LIBRARY.define(f"max_pool_places(Tensor self, {_SIDES}) -> Tensor")
LIBRARY.define(f"max_pool_gradient(Tensor gradient, Tensor places, int[] size, int[] strides, {_SIDES}) -> Tensor")


def _places(
    x: torch.Tensor, sides: Sequence[int], steps: Sequence[int], around: Sequence[int], ceil_mode: bool
) -> torch.Tensor:
    """The place of each window's largest element among the window's elements, in their order, as uint8.

    It is the element that torch takes: the first of equal ones, the last NaN.

    Args:
        x: images (batch, channels, height, width) or volumes (batch, channels, depth, height, width).
        sides, steps, around: the windows' sizes, strides and padding, a number for each dimension of an image.
    """
    pooling = _aten.max_pool2d_with_indices if len(sides) == 2 else _aten.max_pool3d_with_indices
    _, index = pooling(x, sides, steps, around, [1] * len(sides), ceil_mode)
    place, before = torch.zeros_like(index), 1
    for dim in reversed(range(len(sides))):
        size = x.shape[dim - len(sides)]
        within = index % size - _starts(index, dim, sides, steps, around)
        place, before, index = place + within * before, before * sides[dim], index // size
    return place.to(torch.uint8)


def _gradient(
    gradient: torch.Tensor, places: torch.Tensor, size: Sequence[int], strides: Sequence[int], sides: Sequence[int],
    steps: Sequence[int], around: Sequence[int], ceil_mode: bool,
) -> torch.Tensor:  # fmt: skip
    """The gradient of the pooled image, which has this size and these strides."""
    index, before, place = torch.zeros_like(places, dtype=torch.int64), 1, places.long()
    for dim in reversed(range(len(sides))):
        within = place % sides[dim] + _starts(places, dim, sides, steps, around)
        index, before, place = index + within * before, before * size[dim - len(sides)], place // sides[dim]
    x = gradient.new_empty_strided(size, strides)
    pooling = _aten.max_pool2d_with_indices_backward if len(sides) == 2 else _aten.max_pool3d_with_indices_backward
    made = pooling(gradient, x, sides, steps, around, [1] * len(sides), ceil_mode, index)
    return made if made.stride() == tuple(strides) else x.copy_(made)


def _starts(
    like: torch.Tensor, dim: int, sides: Sequence[int], steps: Sequence[int], around: Sequence[int]
) -> torch.Tensor:
    """Where the windows begin along a dimension of the image, in elements."""
    count, after = like.shape[dim - len(sides)], len(sides) - 1 - dim
    starts = torch.arange(count, device=like.device) * steps[dim] - around[dim]
    return starts.view(-1, *(1 for _ in range(after)))


for _name, _meaning in (("max_pool_places", _places), ("max_pool_gradient", _gradient)):
    LIBRARY.impl(_name, _meaning, "CompositeExplicitAutograd")
    register_fake(f"fxfuse::{_name}", _meaning, lib=LIBRARY)


# ------------------------------------------------------------------------------------------- in joint graphs


def keep_places(graph: fx.Graph, is_on_gpu: bool) -> list[fx.Node]:
    """Replaces the indices of max-pooling in a joint graph by places, which it returns. Changes the graph in place.

    Indices stay if something else reads them, if windows are dilated or too large for a thread, and for dtypes that
    kernels do not have. On a CPU only images in channels_last get places, because vectors hold channels.
    """
    found: list[fx.Node] = []
    for node in list(graph.nodes):
        gradient = _GRADIENTS.get(node.target)
        if gradient is None:
            continue
        indices = next((one for one in node.users if one.args[1] == 1), None)
        users = [] if indices is None else list(indices.users)
        if indices is None or not users:
            continue
        if any(user.target is not gradient or user.args[7] is not indices for user in users):
            continue
        x, (_, _, kernel, stride, padding, dilation, ceil_mode, _) = node.args[0], users[0].args
        rank = x.meta["val"].dim() - 2
        sides, steps, around = (for_each(one, rank) for one in (kernel, stride or kernel, padding))
        windows = math.prod(-(-side // step) for side, step in zip(sides, steps, strict=True))
        if rank not in (2, 3) or {*dilation} != {1} or max(math.prod(sides), windows) > LARGEST_WINDOW:
            continue
        if x.meta["val"].dtype not in RESULT_DTYPES or not (is_on_gpu or _has_channels_last(x.meta["val"])):
            continue
        said = sides, steps, around, ceil_mode
        with graph.inserting_before(node):
            places = _called(graph, torch.ops.fxfuse.max_pool_places.default, x, *said)
        found.append(places)
        for user in users:
            value = user.meta["val"]
            with graph.inserting_before(user):
                made = _called(
                    graph, torch.ops.fxfuse.max_pool_gradient.default, user.args[0], places, list(value.shape),
                    list(value.stride()), *said,
                )  # fmt: skip
            made.meta["val"] = value
            user.replace_all_uses_with(made)
            graph.erase_node(user)
        graph.erase_node(indices)
    return found


_GRADIENTS: Final = {
    _aten.max_pool2d_with_indices.default: _aten.max_pool2d_with_indices_backward.default,
    _aten.max_pool3d_with_indices.default: _aten.max_pool3d_with_indices_backward.default,
}


def _has_channels_last(x: torch.Tensor) -> bool:
    return x.dim() == 4 and x.stride(1) == 1 and x.shape[1] >= LEAST_CHANNELS


def for_each(numbers: Sequence[int], rank: int) -> list[int]:
    """A number for each of an image's `rank` dimensions. A single number counts for all."""
    return [*numbers] * (rank if len(numbers) < rank else 1)


def _called(graph: fx.Graph, target: Callable[..., Any], *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    values = torch.fx.node.map_arg(args, lambda one: one.meta["val"])
    node.meta["val"] = target(*values)
    return node
