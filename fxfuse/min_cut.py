"""The minimum cut of a network between a source and a sink, found by maximum flow.

Dinic's algorithm (E. A. Dinic, 1970): each round pushes flow along shortest paths until none is left.
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
    """Directed edges with whole-number prices. A cut pays for each edge from the source's side to the sink's."""

    def __init__(self) -> None:
        self._heads: list[Hashable] = []
        self._left: list[int] = []
        self._edges: dict[Hashable, list[int]] = defaultdict(list)

    def add(self, tail: Hashable, head: Hashable, price: int) -> None:
        """Adds an edge. Its reverse has the next index."""
        for start, end, left in ((tail, head, price), (head, tail, 0)):
            self._edges[start].append(len(self._heads))
            self._heads.append(end)
            self._left.append(left)

    def with_source(self) -> set[Hashable]:
        """The vertices on the source's side of the cheapest cut. Of several cheapest cuts, that with the fewest."""
        levels = self._levels()
        while SINK in levels:
            following = dict.fromkeys(levels, 0)
            while self._push(levels, following):
                pass
            levels = self._levels()
        return set(levels)

    def _levels(self) -> dict[Hashable, int]:
        """The distance from the source of each vertex that can be reached by edges with capacity left."""
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
        """Pushes as much flow as fits along one shortest path. Returns whether there was one.

        `following` has the index of each vertex's first edge that is not used up.
        """
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
