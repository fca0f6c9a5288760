"""Places the nodes of a graph for drawing: in layers from top to bottom, each node below all that it reads.

A node's layer is its longest path from the inputs. Edges over several layers go through way-points, which have places
in the layers between, as nodes have (Sugiyama, Tagawa, Toda: Methods for Visual Understanding of Hierarchical System
Structures, 1981). Nodes of a layer are ordered by the median place of their neighbours above, then below, a few times.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

LAYER: Final = 74
"""The distance from one layer to the next, in pixels at zoom 1."""
GAP: Final = 26
"""The gap between neighbours in a layer."""
MOST_WAYPOINTS: Final = 40
"""The most layers that an edge crosses by way-points. Longer edges (of a mask that every layer reads) go straight."""
_SWEEPS: Final = 8
"""How often orders and places are improved, alternately from above and from below."""
_TO_THE_MIDDLE: Final = 0.06
"""The part of its distance from the middle that a node loses from layer to layer, lest deep graphs drift to a side."""


@dataclass(frozen=True)
class Layout:
    """The centres of nodes, and the points through which edges go, both ends included."""

    centres: Mapping[str, tuple[float, float]]
    routes: tuple[tuple[tuple[float, float], ...], ...]
    """In the order of the edges."""
    width: float
    height: float


def layout_of(widths: Mapping[str, float], edges: Sequence[tuple[str, str]]) -> Layout:
    """The layout of a graph without cycles.

    Args:
        widths: the widths of the nodes, each node after all that lead to it.
        edges: from a node to a later one.
    """
    layers_of = _layers(widths, edges)
    size: dict[str, float] = dict(widths)
    rows: list[list[str]] = [[] for _ in range(max(layers_of.values(), default=-1) + 1)]
    for name, layer in layers_of.items():
        rows[layer].append(name)
    above: dict[str, list[str]] = {name: [] for name in widths}
    below: dict[str, list[str]] = {name: [] for name in widths}
    paths: list[list[str]] = []
    for number, (first, last) in enumerate(edges):
        between = range(layers_of[first] + 1, layers_of[last])
        path = [first]
        for layer in between if len(between) <= MOST_WAYPOINTS else ():
            point = f"{number}/{layer}"
            size[point], layers_of[point] = 0.0, layer
            above[point], below[point] = [], []
            rows[layer].append(point)
            path.append(point)
        path.append(last)
        paths.append(path)
        if len(between) <= MOST_WAYPOINTS:
            for one, other in itertools.pairwise(path):
                below[one].append(other)
                above[other].append(one)
    x = _places(rows, size, above, below)
    left = min((x[name] - size[name] / 2 for name in size), default=0.0)
    centres = {name: (x[name] - left, LAYER * (layers_of[name] + 0.5)) for name in size}
    width = max((centres[name][0] + size[name] / 2 for name in size), default=0.0)
    routes = tuple(tuple(centres[name] for name in path) for path in paths)
    return Layout({name: centres[name] for name in widths}, routes, width, LAYER * len(rows))


def _layers(widths: Mapping[str, float], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """The longest path to each node. A node without inputs is in the layer right above the first node that reads it."""
    into: dict[str, list[str]] = {name: [] for name in widths}
    out_of: dict[str, list[str]] = {name: [] for name in widths}
    for first, last in edges:
        into[last].append(first)
        out_of[first].append(last)
    layers: dict[str, int] = {}
    for name in widths:
        layers[name] = max((layers[one] + 1 for one in into[name]), default=0)
    for name in widths:
        if not into[name] and out_of[name]:
            layers[name] = min(layers[one] for one in out_of[name]) - 1
    return layers


def _places(
    rows: Sequence[list[str]], size: Mapping[str, float], above: Mapping[str, list[str]],
    below: Mapping[str, list[str]],
) -> dict[str, float]:  # fmt: skip
    """The horizontal centres of nodes, without overlaps."""
    x: dict[str, float] = {}
    for row in rows:
        _pack(row, size, x)
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        for row in rows if downwards else reversed(rows):
            neighbours = above if downwards else below
            wanted = {
                name: (1 - _TO_THE_MIDDLE) * _median([x[one] for one in neighbours[name]], x[name]) for name in row
            }
            row.sort(key=wanted.__getitem__)
            _place(row, size, wanted, x)
    return x


def _median(numbers: Sequence[float], otherwise: float) -> float:
    return statistics.median(numbers) if numbers else otherwise


def _pack(row: Sequence[str], size: Mapping[str, float], x: dict[str, float]) -> None:
    """Places a row side by side, around 0."""
    at = -(sum(size[name] for name in row) + GAP * (len(row) - 1)) / 2
    for name in row:
        x[name] = at + size[name] / 2
        at += size[name] + GAP


def _place(row: Sequence[str], size: Mapping[str, float], wanted: Mapping[str, float], x: dict[str, float]) -> None:
    """Places a row as near to the wanted places as order and sizes allow.

    The result is the mean of two rows without overlaps: one placed from the left, the other from the right.
    """
    from_left: list[float] = []
    for name in row:
        least = from_left[-1] + (size[row[len(from_left) - 1]] + size[name]) / 2 + GAP if from_left else wanted[name]
        from_left.append(max(wanted[name], least))
    from_right: list[float] = []
    for name in reversed(row):
        after = row[len(row) - len(from_right)] if from_right else name
        most = from_right[-1] - (size[after] + size[name]) / 2 - GAP if from_right else wanted[name]
        from_right.append(min(wanted[name], most))
    for name, one, other in zip(row, from_left, reversed(from_right), strict=True):
        x[name] = (one + other) / 2
