"""The cheapest division of a network's vertices into those with a source and those with a sink (max-flow, min-cut).

Dinic's algorithm (E. A. Dinic, 1970): flow along shortest paths, as many at a time as there are.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from typing import Final

SOURCE: Final = "source"
SINK: Final = "sink"
NEVER: Final = 10**15
"""The price of an edge that must not be cut."""


class Network:
    """Directed edges, each with a whole number that it costs to have its tail with the source and its head not."""

    def __init__(self) -> None:
        self._heads: list[Hashable] = []
        self._left: list[int] = []
        self._edges: dict[Hashable, list[int]] = defaultdict(list)

    def add(self, tail: Hashable, head: Hashable, price: int) -> None:
        """An edge; its reverse has the next index."""
        for start, end, left in ((tail, head, price), (head, tail, 0)):
            self._edges[start].append(len(self._heads))
            self._heads.append(end)
            self._left.append(left)

    def with_source(self) -> set[Hashable]:
        """The vertices on the source's side of the cheapest cut; the fewest of them, if several cuts are."""
        levels = self._levels()
        while SINK in levels:
            following = dict.fromkeys(levels, 0)
            while self._push(levels, following):
                pass
            levels = self._levels()
        return set(levels)

    def _levels(self) -> dict[Hashable, int]:
        """How far each vertex is from the source, along edges that have something left."""
        levels: dict[Hashable, int] = {SOURCE: 0}
        queue = deque(levels)
        while queue:
            vertex = queue.popleft()
            for edge in self._edges[vertex]:
                head = self._heads[edge]
                if self._left[edge] and head not in levels:
                    levels[head] = levels[vertex] + 1
                    queue.append(head)
        return levels

    def _push(self, levels: dict[Hashable, int], following: dict[Hashable, int]) -> bool:
        """Sends what it can along one shortest path; `following` says which edges of a vertex are spent."""
        path: list[int] = []
        vertex: Hashable = SOURCE
        while vertex != SINK:
            edges = self._edges[vertex]
            while following[vertex] < len(edges):
                edge = edges[following[vertex]]
                head = self._heads[edge]
                if self._left[edge] and levels.get(head) == levels[vertex] + 1:
                    path.append(edge)
                    vertex = head
                    break
                following[vertex] += 1
            else:
                if not path:
                    return False
                vertex = self._heads[path.pop() ^ 1]
                following[vertex] += 1
        amount = min(self._left[edge] for edge in path)
        for edge in path:
            self._left[edge] -= amount
            self._left[edge ^ 1] += amount
        return True
