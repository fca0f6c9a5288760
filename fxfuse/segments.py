"""Cuts the backward of a training step into consecutive segments, each with the gradients of a bucket of parameters.

DistributedDataParallel sends gradients a bucket at a time, while the rest of the backward runs. A backward that is one
graph has no gradient before it has all of them. So inside DistributedDataParallel it is cut where buckets are complete:

    whole       tangents → [ ... dW3 ... dW2 ... dW1 ] → dW3, dW2, dW1
    segments    tangents → [ ... dW3 ] → dW3
                              │ what the next one reads
                              └→ [ ... dW2, dW1 ] → dW2, dW1

Nothing is computed twice except views, attributes and values that are made of nothing but numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import distributed, fx, nn

from fxfuse.joint import draws, results_of
from fxfuse.late_gradients import late
from fxfuse.row_padding import base_of, is_view

MOST: Final = 6
"""The most segments. Each is a graph of its own and takes the CPU some 50 us a step. With six, a sixth of all gradients
is sent after the last one, and no step that the CPU limits is held up (docs/notebook.md)."""


class Buckets(NamedTuple):
    """The sizes of DistributedDataParallel's buckets: bytes of gradients that are sent at once."""

    first: int
    """Bytes of the first bucket that is sent."""
    others: int
    """Bytes of each other bucket."""


def buckets_now() -> Buckets | None:
    """The buckets of the DistributedDataParallel whose forward is running; None if none is."""
    module: Any = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    if module is None:
        return None
    most = int(module.bucket_bytes_cap)
    return Buckets(min(most, distributed._DEFAULT_FIRST_BUCKET_BYTES), most)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Segment:
    """A segment of a backward: a graph, and the meaning of its arguments and results."""

    graph: fx.GraphModule
    """Its arguments are the `kept` tensors, the values that it `takes`, and a Lent (which kept tensors are lent). Its
    results are the `gradients`, then the values that it `makes`."""
    kept: tuple[int, ...]
    """The tensors kept by the forward that it takes: positions among those of the whole backward."""
    takes: tuple[str, ...]
    """The gradients of results and values of earlier segments that it takes, by name."""
    gradients: tuple[int, ...]
    """The tensors, by number, whose gradients it computes."""
    makes: tuple[str, ...]
    """Its own values that later segments take, by name."""
    passes: frozenset[str]
    """All values that later segments take, by name, those of earlier segments included."""


def segments(
    backward: fx.GraphModule, kept: int, given: Mapping[int, int], freed: Iterable[int], buckets: Buckets | None
) -> tuple[Segment, ...]:
    """A backward's segments, cut where buckets of gradients are complete. A single one computes large gradients late.

    Who gets a gradient may at once change it, or the tensor that it is the gradient of. So no later segment reads
    either.

    Args:
        backward: a graph of torch's operators, none of them in place, with values as `meta["val"]`.
        kept: the number of its arguments that the forward has kept. Gradients of results follow these.
        given: the kept arguments that are tensors of the call: from an argument's position to the tensor's number.
        freed: the positions of kept arguments that nothing but the backward needs.
        buckets: None for one segment.
    """
    arguments = [node for node in backward.graph.nodes if node.op == "placeholder"]
    gradients = results_of(backward.graph)
    if buckets is not None:
        read = {number: arguments[at] for at, number in given.items()}
        uses = {
            number: {use for of in (base_of(node), read.get(number)) if of is not None for use in _uses(of)}
            for number, node in enumerate(gradients)
            if isinstance(node, fx.Node)
        }
        groups = _groups(backward.graph, uses, buckets)
        if len(groups) > 1:
            ends = [{use for number in group for use in (gradients[number], *uses[number])} for group in groups]
            return _cut(backward, groups, _parts(backward.graph, ends, kept), arguments[:kept])
    given_for = tuple(number for number, node in enumerate(gradients) if isinstance(node, fx.Node))
    nodes = [node for node in backward.graph.nodes if node.op not in ("placeholder", "output")]
    wanted = [gradients[number] for number in given_for]
    nodes = late(nodes, wanted, {arguments[at] for at in freed})
    whole = fx.GraphModule(backward, _graph(arguments, nodes, wanted))
    names = tuple(node.name for node in arguments[kept:])
    return (Segment(whole, tuple(range(kept)), names, given_for, (), frozenset()),)


def _uses(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that write or read a value's memory."""
    yield node
    for user in node.users:
        if is_view(user):
            yield from _uses(user)
        elif user.op != "output":
            yield user


def _groups(graph: fx.Graph, uses: Mapping[int, Set[fx.Node]], buckets: Buckets) -> list[list[int]]:
    """For each segment, the numbers of the tensors whose gradients it computes, in the order of their completion.

    Args:
        uses: for each tensor with a gradient: the nodes that must run before the gradient is given.
    """
    places = {node: at for at, node in enumerate(graph.nodes)}
    gradients = results_of(graph)
    ready: dict[int, list[int]] = {}
    for number, of in uses.items():
        ready.setdefault(max(map(places.__getitem__, of)), []).append(number)
    sizes = {number: gradients[number].meta["val"].nbytes for number in uses}
    groups: list[list[int]] = [[]]
    most, others = buckets.first, max(buckets.others, -(-sum(sizes.values()) // (MOST - 1)))
    for place in sorted(ready):
        if sum(map(sizes.__getitem__, groups[-1])) >= most:
            groups.append([])
            most = others
        groups[-1] += ready[place]
    return groups


def _parts(graph: fx.Graph, ends: Sequence[Set[fx.Node]], kept: int) -> list[list[fx.Node]]:
    """The nodes of each segment: those that its `ends` need and no earlier segment has.

    Pointwise operations that would share a kernel with a value of the segment are added to it.

    Args:
        ends: for each segment, the nodes that must be in it or in an earlier one.
        kept: the number of arguments that the forward has kept.
    """
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    waits = set(arguments[kept:])
    for node in graph.nodes:
        if not waits.isdisjoint(node.all_input_nodes):
            waits.add(node)
    there: dict[fx.Node, int] = {}

    def add(node: fx.Node, number: int) -> None:
        stack = [node]
        while stack:
            one = stack.pop()
            if one not in there:
                there[one] = number
                stack += one.all_input_nodes
                stack += [user for user in one.users if user.target is operator.getitem]

    for number, nodes in enumerate(ends):
        for node in nodes:
            add(node, number)
        for node in [node for node, of in there.items() if of == number]:
            behind = _epilogue(node, lambda one: one in there or one not in waits)
            if behind is not None:
                add(behind, number)
    numbers = range(len(ends))
    in_order = [node for node in graph.nodes if node.op != "placeholder" and node in there]
    return [[node for node in in_order if there[node] == number] for number in numbers]


def _epilogue(node: fx.Node, is_there: Callable[[fx.Node], bool]) -> fx.Node | None:
    """The last of the pointwise operations that follow `node`, each the only user of the one before; None if none does.

    Its value is no larger in memory than that of `node`.

    Args:
        is_there: whether the other inputs of these operations are available.
    """
    found, last = None, node
    size = node.meta["val"].nbytes if isinstance(node.meta.get("val"), torch.Tensor) else 0
    while len(last.users) == 1:
        (user,) = last.users
        is_pointwise = torch.Tag.pointwise in getattr(user.target, "tags", ())
        if not (is_view(user) or is_pointwise) or not all(is_there(one) or one is last for one in user.all_input_nodes):
            break
        last = user
        if is_pointwise and user.meta["val"].nbytes <= size:
            found = user
    return found


def _cut(
    backward: fx.GraphModule, groups: Sequence[Sequence[int]], parts: Sequence[Sequence[fx.Node]],
    kept: Sequence[fx.Node],
) -> tuple[Segment, ...]:  # fmt: skip
    """The segments of a backward.

    Args:
        groups: for each segment, the numbers of the tensors whose gradients it computes.
        parts: for each segment, its nodes.
        kept: the arguments that the forward has kept.
    """
    gradients = results_of(backward.graph)
    made_again = _made_again(backward.graph)
    places = {node: at for at, node in enumerate(kept)}
    found: list[Segment] = []
    passes: set[str] = set()
    for group, part in zip(reversed(groups), reversed(parts), strict=True):
        results = [gradients[number] for number in group]
        nodes, sources = _with_sources([node for node in part if node not in made_again], results, made_again)
        held = sorted((node for node in sources if node in places), key=places.__getitem__)
        taken = [node for node in sources if node not in places]
        makes = [node for node in part if node.name in passes and node not in made_again]
        graph = _graph([*held, *taken], nodes, [*results, *makes])
        found.append(
            Segment(
                fx.GraphModule(backward, graph), tuple(places[node] for node in held),
                tuple(node.name for node in taken), tuple(group), tuple(node.name for node in makes), frozenset(passes),
            )
        )  # fmt: skip
        passes |= {node.name for node in taken}
    return tuple(reversed(found))


def _made_again(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that each segment computes for itself: views, attributes, and values made of nothing but numbers."""
    of_numbers: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "placeholder" and of_numbers.issuperset(node.all_input_nodes) and not draws(node):
            of_numbers.add(node)
    return of_numbers.union(filter(is_view, graph.nodes))


def _with_sources(
    nodes: Sequence[fx.Node], results: Iterable[fx.Node], made_again: Set[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """A segment's nodes, with those of `made_again` that they need; and the other nodes whose values it takes."""
    own, placed, sources = set(nodes), dict[fx.Node, None](), dict[fx.Node, None]()

    def place(node: fx.Node) -> None:
        if node in placed or node in sources:
            return
        if node not in own and node not in made_again:
            sources[node] = None
            return
        for one in node.all_input_nodes:
            place(one)
        placed[node] = None

    for node in (*nodes, *results):
        place(node)
    return list(placed), list(sources)


def _graph(arguments: Sequence[fx.Node], nodes: Iterable[fx.Node], results: Iterable[fx.Node]) -> fx.Graph:
    """A graph of copies of these nodes, with one more argument: what is lent (Lent)."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in arguments:
        copied[node] = graph.create_node("placeholder", node.name, name=node.name)
        copied[node].meta = dict(node.meta)
    graph.placeholder("lent")
    for node in nodes:
        copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.output(tuple(copied[node] for node in results))
    return graph
