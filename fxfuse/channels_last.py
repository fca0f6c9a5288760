"""Layout assignment: decides which values of a graph are in channels_last, and inserts the conversions.

The values are images (4-D) and, in channels_last_3d, volumes or videos (5-D). The layout of the model's inputs does not
matter. Libraries and kernels convolve faster in channels_last, and most of torch's operators keep the layout. So each
value of the graph gets a layout, eager's own or channels_last, such that the cost in bytes is least. A conversion costs
the bytes of its value. A convolution that is left in NCHW costs a part of the bytes that it reads and writes, because a
library then converts x and the result by itself. The cheapest assignment is a minimal cut of the graph (min_cut.py).

                        eager's                   channels_last                     eager's
    x ──────────────────────── to_channels_last ─ conv ─ relu ─┬─ conv ─ add ─ as_before ── output
                                                               └──────────┘

The caller does not see it: results have the strides that eager would give. Those are known only where all sources of a
value are contiguous, and on some devices nothing would be gained. `plain` checks both at each call.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx, nn
from torch.autograd import forward_ad

from fxfuse.group_norms import group_norm
from fxfuse.layout import FORMATS, contiguous_strides
from fxfuse.min_cut import NEVER, SINK, SOURCE, Network
from fxfuse.patterns.anchors import known_tensor, noted
from fxfuse.patterns.layouts import (
    Role,
    forgets,
    is_contiguous_copy,
    is_copied,
    is_never_contiguous,
    is_permuted,
    known_elements,
    may_copy,
    noted_strides,
    role_of,
    stays_contiguous,
)
from fxfuse.patterns.library import as_function, find_library
from fxfuse.patterns.mutation import Mutations
from fxfuse.patterns.values import is_tensor

LEFT: Final = 0.6
"""The cost of a convolution that is left in NCHW, as a fraction of the mean of the bytes of x and of its result. So
four convolutions of one size are worth two conversions, and three are not."""
_PRICE: Final = 1000
"""The price of a conversion of one channel of the model's image."""


@dataclass(frozen=True)
class Conversion:
    """A place in the graph where a value changes its layout."""

    number: int
    """Unique in the process. The conversion's node passes it on, so that `bytes_of` knows what it copied."""
    value: str
    """The name of the node whose value is converted."""
    reader: str
    """The name of the first node that reads it in the other layout."""
    there: bool
    """True: to channels_last. False: back."""


@dataclass(frozen=True)
class Layouts:
    """The result of the assignment, for the report."""

    convolutions: int = 0
    """The number of convolutions in channels_last."""
    conversions: tuple[Conversion, ...] = ()


# --------------------------------------------------------------------------------------------- at a call

_stride: Final = torch.Tensor.stride
_copied: Final[dict[int, int]] = {}
"""By a conversion's number: the bytes that it copied when it last copied anything."""


def bytes_of(number: int) -> int | None:
    """The bytes that a conversion copied when it last copied anything; None if it never has."""
    return _copied.get(number)


def _forget(numbers: Iterable[int]) -> None:
    """Drops the entries of conversions whose graph no longer exists."""
    for number in numbers:
        _copied.pop(number, None)


def plain(
    values: Sequence[Any], parameters: Sequence[torch.Tensor] = (), *others: bool, least: int = 0
) -> bool:  # fmt: skip
    """Whether values work in channels_last in this call: all their sources are contiguous, and it is faster there.

    Args:
        values: the sources that are arguments or results of other nodes.
        parameters: the sources that are weights.
        others: flags of the same kind, which must be true, too.
        least: on a CPU, how many elements `values` must have. A library there converts the weights at every call.
    """
    if torch.compiler.is_compiling():  # a compiler assigns layouts by itself
        return False
    if _is_transformed():
        return False
    proxy = _proxy_among((*values, *parameters, *others))
    if proxy is not None:  # the optimised model is being traced
        kwargs = {"least": least} if least else {}
        return proxy.tracer.create_proxy("call_function", plain, (values, parameters, *others), kwargs)  # type: ignore[no-any-return]
    return (
        all(others)
        and (least == 0 or _elements(values) >= least)
        and all(_is_plain(value) for value in values)
        and _are_contiguous(tuple(map(_shape, parameters)), tuple(map(_stride, parameters)))
    )


def _is_transformed() -> bool:
    """Whether torch.func or forward-mode derivatives are active. Inside vmap no tensor says whether it is in
    channels_last, and torch's derivatives of group norms want contiguous ones."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def to_channels_last(x: Any, wanted: bool, number: int = 0) -> Any:
    """x in channels_last if that is `wanted`, else x itself."""
    proxy = _proxy_among((x, wanted))
    if proxy is not None:
        return proxy.tracer.create_proxy("call_function", to_channels_last, (x, wanted, number), {})
    if not wanted or not isinstance(x, torch.Tensor) or x.dim() not in FORMATS or not _gains(x):
        return x
    memory_format = FORMATS[x.dim()]
    if x.is_contiguous(memory_format=memory_format) and x.stride(1) == 1:
        return x
    # With one channel or one pixel both layouts are the same in memory, but a convolution chooses by strides. This is
    # no view: the gradient of an in-place change of a view takes torch three copies.
    _copied[number] = x.numel() * x.element_size()
    return x.clone(memory_format=memory_format)


def as_before(
    y: Any, converted: bool, number: int = 0, stays: bool = False, strides: tuple[int, ...] | None = None
) -> Any:
    """y with the strides that it has in eager, if it was `converted`; y itself if not, or if it `stays` converted.

    Args:
        strides: eager's, if they are not those of a contiguous tensor.
    """
    proxy = _proxy_among((y, converted, stays))
    if proxy is not None:
        return proxy.tracer.create_proxy("call_function", as_before, (y, converted, number, stays, strides), {})
    if not converted or stays or not isinstance(y, torch.Tensor):
        return y
    # also where only strides of dimensions of size 1 differ
    if y.stride() == (contiguous_strides(y.shape) if strides is None else strides):
        return y
    _copied[number] = y.numel() * y.element_size()
    if strides is None:
        return y.clone(memory_format=torch.contiguous_format)
    order = sorted(range(y.dim()), key=strides.__getitem__, reverse=True)
    back = [order.index(dim) for dim in range(y.dim())]
    made = y.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
    return made if made.stride() == strides else made.as_strided(y.shape, strides)  # dimensions of size 1 again


def _proxy_among(values: Sequence[Any]) -> Any:
    """The first fx.Proxy, or None. A plain loop, which Dynamo of torch 2.6 can trace."""
    for value in values:
        if isinstance(value, fx.Proxy):
            return value
    return None


_shape: Final[Any] = torch.Tensor.shape.__get__  # type: ignore[attr-defined]


def _is_plain(value: Any) -> bool:
    """Whether a source is contiguous, not in channels_last, and on a device where channels_last is faster."""
    if not isinstance(value, torch.Tensor):
        return True
    if value.dim() not in FORMATS:
        return value.is_contiguous()
    if not value.is_contiguous() or (value.dim() == 4 and not _gains(value)):  # 5-D values stay as they are then
        return False
    # Where both layouts are the same in memory, torch's operators choose one of them by strides.
    both = value.is_contiguous(memory_format=FORMATS[value.dim()])
    return not both or value.stride() == contiguous_strides(value.shape)


@functools.lru_cache(maxsize=256)
def _are_contiguous(shapes: tuple[Sequence[int], ...], strides: tuple[tuple[int, ...], ...]) -> bool:
    return all(found == contiguous_strides(shape) for shape, found in zip(shapes, strides, strict=True))


def _gains(x: torch.Tensor) -> bool:
    """Whether the tensor's device convolves its dtype faster in channels_last: GPUs do, and oneDNN does for images."""
    if x.is_cuda:
        return True
    is_image = x.dim() == 4 and x.dtype in _OF_ONEDNN
    return is_image and x.device.type == "cpu" and bool(torch.backends.mkldnn.is_available())


def _elements(values: Sequence[Any]) -> float:
    """The number of elements of all values. Infinite on a GPU, which converts weights as fast as anything else."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return math.inf if any(tensor.is_cuda for tensor in tensors) else sum(tensor.numel() for tensor in tensors)


_OF_ONEDNN: Final = (torch.float32, torch.bfloat16, torch.float16)


# ---------------------------------------------------------------------------------------------- in a graph


def assign_layouts(root: nn.Module, graph: fx.Graph) -> Layouts:
    """Inserts conversions into `graph`, whose regions are fused already, where the minimal cut is."""
    known = _Known(root, graph)
    if not any(role.is_convolution for role in known.roles.values()):
        return Layouts()
    inside = _cheapest(known)
    return _Conversions(known, inside).put() if inside else Layouts()


class _Known:
    """What is known of a graph before the assignment.

    A *picture* is a value that may be in channels_last: an image, a volume or a video.

    Attributes:
        roles: the roles of nodes that may work in channels_last. Their results are pictures.
        sizes: (channels, pixels) of every value, relative to the others.
        dimensions: the ranks of pictures.
        origins: for every value, its sources: if all of them are contiguous, the value has its noted strides in eager,
            or is contiguous if none are noted.
        tied: groups of nodes in `roles` that must have one layout, because one overwrites memory that others read.
        has_strangers: whether the graph calls modules of other packages than torch, which may do anything.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        self.root = root
        self.graph = graph
        self.roles: dict[fx.Node, Role] = {}
        self.sizes: dict[fx.Node, tuple[float, float]] = {}
        self.dimensions: dict[fx.Node, int] = {}
        self.origins: dict[fx.Node, frozenset[fx.Node]] = {}
        self.tied: list[list[fx.Node]] = []
        self._permuted = {node for node in graph.nodes if is_permuted(node)}
        self._noted: set[fx.Node] = set()  # values with permuted sources, whose strides are noted
        self.mutations = Mutations(root, graph)
        self.has_strangers = any(node.op == "call_module" and self._is_stranger(node) for node in graph.nodes)
        roles = {node: role_of(root, node) for node in graph.nodes}
        for role in roles.values():
            if role is not None and role.is_convolution:
                self.dimensions[role.inputs[0]] = role.dimensions or 4
        pictures = set(self.dimensions)
        for node, role in roles.items():
            self.origins[node] = self._origins_of(node, role)
            if role is None or not (role.is_convolution or node in pictures or pictures.intersection(role.inputs)):
                self.sizes[node] = next((self.sizes[arg] for arg in node.all_input_nodes), (3.0, 1.0))
                continue
            self.sizes[node] = self._size(role, [arg for arg in role.inputs if arg in pictures])
            self.dimensions.setdefault(node, role.dimensions or max(self.dimensions.get(arg, 0) for arg in role.inputs))
            pictures.add(node)
            # without noted strides, values with permuted sources are in channels_last in eager, or in neither layout
            if self._permuted.isdisjoint(self.origins[node]):
                self.roles[node] = role
        self._sizes_are_noted = all(known_elements(node) is not None for node in self.roles)
        for memory in _merged(self.mutations.visible()):
            self._tie(memory, [node for node in graph.nodes if self.mutations.memory(node) & memory])

    def _tie(self, memory: frozenset[object], sharing: list[fx.Node]) -> None:
        """Gives one layout to nodes that share overwritten memory: eager's if other nodes or inputs share it, too."""
        made = all(isinstance(item, fx.Node) and item.op != "placeholder" for item in memory)
        if made and self.roles.keys() >= set(sharing) and len({self.unknown(node) for node in sharing}) == 1:
            self.tied.append(sharing)
        else:
            for node in sharing:
                self.roles.pop(node, None)

    def unknown(self, node: fx.Node) -> frozenset[fx.Node]:
        """The origins of a node that are results of unknown operations."""
        return frozenset(arg for arg in self.origins[node] if arg.op not in ("placeholder", "get_attr"))

    def _origins_of(self, node: fx.Node, role: Role | None) -> frozenset[fx.Node]:
        """The sources of `node`'s value (`origins`). Noted strides take permuted sources into account."""
        if not is_tensor(node):
            return frozenset()
        if node.op in ("placeholder", "get_attr") or not (role is not None or stays_contiguous(self.root, node)):
            return frozenset({node})
        origins = frozenset[fx.Node]().union(*(self.origins[arg] for arg in node.all_input_nodes))
        permuted = origins & self._permuted
        if permuted and may_copy(node):
            return frozenset({node})
        if noted_strides(node) is None or not (permuted or self._noted.intersection(node.all_input_nodes)):
            return origins
        self._noted.add(node)
        return origins - permuted

    def _is_stranger(self, node: fx.Node) -> bool:
        kind = type(self.root.get_submodule(str(node.target)))
        return not kind.__module__.startswith(("torch.nn", "torch.export"))  # the latter checks a program's arguments

    def _size(self, role: Role, pictures: Sequence[fx.Node]) -> tuple[float, float]:
        first = max(pictures or role.inputs[:1], key=lambda arg: self.sizes[arg][1])
        channels, pixels = self.sizes[first]
        if role.channels == 0:  # the sum over all inputs
            channels = sum(self.sizes[arg][0] for arg in role.inputs)
        elif role.channels is not None:
            channels = role.channels
        if role.several:
            channels /= 2
        return channels, pixels * role.grows

    def price(self, node: fx.Node) -> int:
        """The price of converting a node's value."""
        elements = (
            known_elements(node) if self._sizes_are_noted else None
        )  # noted sizes and relative ones are not comparable
        channels, pixels = self.sizes[node]
        return max(1, elements if elements is not None else round(_PRICE * channels * pixels))

    def left(self, node: fx.Node) -> int:
        """The cost of leaving a convolution in eager's layout."""
        if self.is_in_channels_last(node):
            return 0
        first = self.roles[node].inputs[0]
        read = self.price(first) if first in self.sizes else self.price(node)
        return round(LEFT * (read + self.price(node)) / 2)

    def rearranged(self, node: fx.Node) -> int:
        """The number of elements of a convolution's weight; 0 if both layouts are the same in memory."""
        if node.op == "call_module":
            weight: Any = getattr(self.root.get_submodule(str(node.target)), "weight", None)
        else:
            weight = known_tensor(self.root, node.args[1] if len(node.args) > 1 else node.kwargs.get("weight"))
        if not isinstance(weight, torch.Tensor) or weight.dim() not in FORMATS:
            return 0
        is_both = 1 in (weight.shape[1], weight[0, 0].numel())
        return 0 if is_both else weight.numel()

    def strides(self, node: fx.Node) -> tuple[int, ...] | None:
        """The strides of a node's value in eager, if its origins are contiguous; None if it is contiguous then."""
        strides = noted_strides(node) if node in self._noted or node in self._permuted else None
        return None if strides is None or strides == contiguous_strides(noted(node).shape) else strides

    def is_in_channels_last(self, node: fx.Node) -> bool:
        """Whether a node's value is known to be in channels_last in eager, too."""
        value = noted(node)
        is_known = self.strides(node) is not None and value.dim() in FORMATS
        return is_known and bool(value.is_contiguous(memory_format=FORMATS[value.dim()]))

    def behind(self, value: fx.Node) -> fx.Node:
        """The source of `value`, if `value` is a contiguous copy of a permutation; otherwise `value` itself.

        The source may be in channels_last already. It must not be overwritten afterwards, nor may the copy.
        """
        if not is_contiguous_copy(value):
            return value
        (source,) = value.args
        if not isinstance(source, fx.Node) or not any(map(is_never_contiguous, self.origins[source])):
            return value
        order = self.mutations.order
        is_overwritten = self.mutations.between(order[value], len(order), [value, source], [])
        return value if is_overwritten else source

    def forgets(self, value: fx.Node, user: fx.Node) -> bool:
        """Whether no result of `user` depends on the strides of `value`, a picture."""
        return forgets(self.root, value, user, self.dimensions[value])

    def outside(self, node: fx.Node) -> bool:
        """Whether a node's value may be a picture, but keeps eager's layout in any case."""
        return node not in self.roles and node.op != "get_attr" and is_tensor(node)


def _merged(memories: Iterable[frozenset[object]]) -> list[frozenset[object]]:
    """The same sets, where overlapping ones are united."""
    merged: list[frozenset[object]] = []
    for memory in memories:
        apart = [other for other in merged if not other & memory]
        merged = [*apart, memory.union(*(other for other in merged if other & memory))]
    return merged


def _cheapest(known: _Known) -> set[fx.Node]:
    """The nodes whose results are in channels_last in the cheapest assignment."""
    network = Network()
    values = dict.fromkeys(itertools.chain.from_iterable((node, *role.inputs) for node, role in known.roles.items()))
    for value in values:
        role = known.roles.get(value)
        if role is None and not known.outside(value):
            continue
        price = known.price(value)
        readers = [user for user in value.users if user in known.roles and value in known.roles[user].inputs]
        if role is None:
            vertex: Any = SINK
        else:
            vertex = value
            if role.is_convolution:
                network.add(SOURCE, value, known.left(value) + (price if is_copied(value) else 0))
            back = NEVER if role.is_alias or role.several else 1 if known.is_in_channels_last(value) else price
            network.add(value, ("back", value), back)
            others = [user for user in value.users if user not in readers and not known.forgets(value, user)]
            for reader in [*readers, *([SINK] if others else [])]:
                network.add(("back", value), reader, NEVER)
        there = price if known.behind(value) is value and not known.is_in_channels_last(value) else 1
        network.add(("there", value), vertex, NEVER if role is not None and role.several else there)
        for reader in readers:
            network.add(reader, ("there", value), NEVER)
    for first, *others in known.tied:
        for other in others:
            network.add(first, other, NEVER)
            network.add(other, first, NEVER)
    chosen = network.with_source()
    return {node for node in known.roles if node in chosen}


class _Conversions:
    """Inserts conversions where values enter and leave channels_last."""

    _numbers = itertools.count(1)

    def __init__(self, known: _Known, inside: set[fx.Node]) -> None:
        self._known = known
        self._graph = known.graph
        self._inside = inside
        self._order = {node: index for index, node in enumerate(known.graph.nodes)}
        self._reads = [node for node in known.graph.nodes if node.op == "get_attr"]
        self._flags: dict[frozenset[fx.Node], fx.Node] = {}
        self._made: dict[Any, tuple[fx.Node, int]] = {}
        self._found: list[Conversion] = []

    def put(self) -> Layouts:
        nodes = list(self._graph.nodes)
        ordered = [node for node in nodes if node in self._inside]
        self._put_base_flag(ordered)
        for node in ordered:
            for value in self._known.roles[node].inputs:
                self._read_inside(node, value)
        for value in ordered:
            self._read_outside(value)
        for node in ordered:
            if self._known.roles[node].is_group_norm:
                self._in_channels_last(node)
        self._put_least(ordered)
        numbers = [conversion.number for conversion in self._found]
        weakref.finalize(self._graph, _forget, numbers).atexit = False
        roles = self._known.roles
        return Layouts(sum(roles[node].is_convolution for node in ordered), tuple(self._found))

    # ----- what decides

    def _put_base_flag(self, ordered: Sequence[fx.Node]) -> None:
        """Inserts the flag that all others depend on: whether the model's arguments and parameters are plain."""
        origins = frozenset().union(*(self._known.origins[node] for node in ordered))
        given = [node for node in self._graph.nodes if node.op == "placeholder" and node in origins]
        paths = [str(node.target) for node in self._reads if node in origins]
        paths += [f"{node.target}.weight" for node in ordered if self._is_convolution_module(node)]
        with self._graph.inserting_before(ordered[0]):
            parameters = [self._parameter(path, ordered[0]) for path in dict.fromkeys(paths) if self._is_weight(path)]
            self._flags[frozenset()] = self._graph.call_function(plain, (given, parameters))

    def _put_least(self, ordered: Sequence[fx.Node]) -> None:
        """Sets `least` of the base flag: how many elements of arguments make up for converting the weights.

        Nothing is set if both layouts of all weights are the same in memory.
        """
        flag, known = self._flags[frozenset()], self._known
        convolutions = [node for node in ordered if known.roles[node].is_convolution]
        order = {node.name: node for node in self._order}
        gain = sum(map(known.left, convolutions)) - sum(known.price(order[item.value]) for item in self._found)
        weights = sum(map(known.rearranged, convolutions))
        given: Any = flag.args[0]
        if weights and given:
            size = sum(map(known.price, given))
            flag.kwargs = {"least": math.ceil(weights * size / gain) if gain > 0 else 2**62}

    def _parameter(self, path: str, place: fx.Node) -> fx.Node:
        """A node that reads the parameter before `place`: the only one, unless a stranger may replace the parameter."""
        found: fx.Node | None = next((node for node in self._reads if node.target == path), None)
        if found is None or self._known.has_strangers:
            return self._graph.get_attr(path)
        if self._order[found] > self._order[place]:
            place.prepend(found)
        return found

    def _is_convolution_module(self, node: fx.Node) -> bool:
        return node.op == "call_module" and self._known.roles[node].is_convolution

    def _is_weight(self, path: str) -> bool:
        """Whether the tensor at `path` has several dimensions, so that it may have other strides."""
        node = fx.Node(self._graph, "", "get_attr", path, (), {})
        tensor = known_tensor(self._known.root, node)
        return tensor is not None and tensor.dim() > 1

    def _flag(self, node: fx.Node) -> fx.Node:
        """The node whose value, at a call, says whether `node` works in channels_last."""
        key = self._known.unknown(node)
        if key not in self._flags:
            values = sorted(key, key=self._order.__getitem__)
            with self._graph.inserting_before(node):
                self._flags[key] = self._graph.call_function(plain, (values, (), self._flags[frozenset()]))
        return self._flags[key]

    # ----- what is converted

    def _read_inside(self, node: fx.Node, value: fx.Node) -> None:
        """Lets `node` read `value` in channels_last."""
        flag = self._flag(node)
        if value in self._inside:
            if self._flag(value) is not flag:
                self._replace(node, value, self._converted(node, value, False, (self._flag(value), flag)))
        elif not self._known.is_in_channels_last(value) and (self._known.outside(value) or value in self._known.roles):
            self._replace(node, value, self._converted(node, value, True, (flag,)))

    def _read_outside(self, value: fx.Node) -> None:
        """Lets all other nodes read `value` with eager's strides."""
        for user in sorted(value.users, key=lambda user: self._order.get(user, -1)):
            reads = user not in self._order or (user in self._inside and value in self._known.roles[user].inputs)
            if not reads and not self._known.forgets(value, user):
                self._replace(user, value, self._converted(user, value, False, (self._flag(value),)))

    def _in_channels_last(self, node: fx.Node) -> None:
        """Lets a group norm give its result in channels_last, which torch's does not on a GPU."""
        flag = self._flag(node)
        if node.op == "call_module":
            library = find_library(self._known.root, node)
            assert library is not None, "a group norm without hooks, else it would have no role"
            node = as_function(self._graph, node, library)
        names = (("input", None), ("num_groups", None), ("weight", None), ("bias", None), ("eps", 1e-5))
        given = [node.args[place] if place < len(node.args) else node.kwargs.get(name, default)
                 for place, (name, default) in enumerate(names)]  # fmt: skip
        node.target, node.args, node.kwargs = group_norm, (*given, flag), {}

    def _converted(self, reader: fx.Node, value: fx.Node, there: bool, flags: tuple[fx.Node, ...]) -> fx.Node:
        """The conversion of `value` for `reader`. Readers share it, unless the value is overwritten in between."""
        behind = self._known.behind
        key = (value, there, flags)
        place = self._order[reader]
        if key in self._made:
            made, since = self._made[key]
            if not self._known.mutations.between(since, place, [value], []):
                return made
        conversion = Conversion(next(self._numbers), value.name, reader.name, there)
        with self._graph.inserting_before(reader):
            if there:
                made = self._graph.call_function(to_channels_last, (behind(value), *flags, conversion.number))
            else:
                converted, *stays = flags
                strides = self._known.strides(value)
                kwargs: dict[str, Any] = {} if strides is None else {"strides": strides}
                made = self._graph.call_function(as_before, (value, converted, conversion.number, *stays), kwargs)
        self._made[key] = made, place
        self._found.append(conversion)
        return made

    @staticmethod
    def _replace(user: fx.Node, value: fx.Node, instead: fx.Node) -> None:
        user.replace_input_with(value, instead)
