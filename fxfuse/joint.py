"""Traces a graph's forward and backward as two graphs of torch's operators.

AOTAutograd traces both as one joint graph. torch's partitioner divides it: it decides what the forward keeps for the
backward, and what the backward recomputes. A function of tensors alone is traced, so a graph's other arguments are
constants. Buffers that the graph changes in place (running statistics of batch normalisation) are values in the trace:
the forward computes their new values, and copies these into the buffers at its end. Operators without results, such as
checks that raise an error (`torch.linalg.inv`), are not traced, since torch loses them: the forward calls them at its
end, too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict
from torch.utils import _pytree as pytree

from fxfuse import checkpoints, made_again
from fxfuse.channels_last import Layouts, assign_layouts
from fxfuse.decompositions import KeptForAutograd, decompositions
from fxfuse.dispatch_mode import DispatchMode
from fxfuse.errors import first_line
from fxfuse.layout import is_dense
from fxfuse.locks import free_in_children
from fxfuse.patterns.masks import leave_out_masks
from fxfuse.patterns.numbers import made_of
from fxfuse.pool_places import keep_places
from fxfuse.problem import TensorMeta
from fxfuse.program import merge, observed
from fxfuse.program.memory import SMALL
from fxfuse.program.values import Refused, device_of
from fxfuse.resampling import Resampling
from fxfuse.row_padding import base_of, is_view, pad_rows, take_padded

_aten: Final = torch.ops.aten


@dataclass(frozen=True)
class Joint:
    """The forward and the backward graph, and the meaning of their arguments and results.

    The tensors of a call (inputs, parameters and buffers, each once) are known by their numbers.
    """

    forward: fx.GraphModule
    """From the tensors of a call to `results` tensors, then further tensors that are kept for the backward alone."""
    backward: fx.GraphModule
    """From the `kept` tensors and the gradients of results to a gradient for each tensor of the call, or None."""
    results: int
    """The number of results."""
    differentiable: tuple[int, ...]
    """The results that have gradients, by number."""
    kept: tuple[tuple[str, int], ...]
    """The backward's first arguments: each ("given", number of a tensor of the call), ("result", number of a result),
    or ("more", number of a further tensor of the forward)."""
    depends: tuple[frozenset[int], ...]
    """For each tensor of the call: the gradients of results, by position among `differentiable`, that its own gradient
    depends on."""
    gives: frozenset[int]
    """The tensors of the call, by number, that get a gradient."""
    tangents: tuple[str, ...]
    """Names of the backward's arguments that are gradients of results."""
    gradients: tuple[TensorMeta, ...]
    """The gradients of results for which the backward was traced."""
    changed: frozenset[int]
    """The buffers, by number, that the forward overwrites."""
    kept_bytes: int
    """Bytes of the tensors that the forward makes and keeps for the backward alone."""
    large: tuple[int, ...]
    """The positions in `kept` of those of these tensors that are large enough to be lent."""
    small: tuple[int, ...]
    """The further tensors of the forward, by number, that are too small to be lent."""
    draws: bool
    """Whether the forward draws random numbers."""
    reference: Traced
    """The graph itself as a function of the tensors, which torch computes."""
    layouts: Layouts
    """The layouts of values in both graphs."""


def joint_of(
    root: nn.Module, graph: fx.Graph, values: Mapping[fx.Node, Any], attributes: Mapping[str, torch.Tensor],
    tensors: Sequence[torch.Tensor],
) -> Joint:  # fmt: skip
    """Traces a graph's forward and backward.

    Args:
        values: the values of its placeholders and attribute nodes.
        attributes: all tensors of modules that it reads, by path.
        tensors: all tensors in both, each once.

    Raises Refused if AOTAutograd cannot trace it, or if the graph changes its inputs in a way that two graphs cannot.
    """
    laid_out: dict[fx.Node, fx.Node] = {}
    graph, layouts = _laid_out(root, graph, laid_out)
    traced = Traced(root, graph, {laid_out[node]: value for node, value in values.items()}, attributes, tensors)
    try:
        with _TRACING, torch.enable_grad(), _draws_are_kept():
            device = device_of(tensors)
            taken_apart = decompositions("cpu" if device is None else device.type)
            joint = _traced_with_gradients()(
                traced.without_effects, tuple(tensors), trace_joint=True, decompositions=taken_apart
            )
    except Refused:
        raise
    except Exception as error:  # tracing any user's model can raise anything
        raise Refused(f"torch's AOTAutograd cannot trace it: {first_line(error)[:300]}") from error
    with _TRACING:
        return _parted(joint, traced, layouts, tensors)


def _laid_out(root: nn.Module, graph: fx.Graph, nodes: dict[fx.Node, fx.Node]) -> tuple[fx.Graph, Layouts]:
    """A copy of the graph, ready to be traced, and its layouts (channels_last.py).

    The backward's values have the same layouts, because a gradient is traced in the layout of its value. Attention
    masks that hide nothing are left out: with a mask torch would trace products and a softmax, whose weights the
    backward keeps.

    Args:
        nodes: is filled with the copy of each node.
    """
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, nodes))
    leave_out_masks(root, copied)
    return copied, assign_layouts(root, copied)


_TRACING: Final = free_in_children(threading.RLock())
"""Held while AOTAutograd runs: threads share its state."""


class Traced:
    """A graph as a function of tensors alone, for AOTAutograd to trace. A call notes the structure of its results."""

    def __init__(
        self, root: nn.Module, graph: fx.Graph, values: Mapping[fx.Node, Any],
        attributes: Mapping[str, torch.Tensor], tensors: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        self._root, self._graph = root, graph
        # numbers, not tensors: no call's tensors are kept alive
        self._constants = {node: value for node, value in values.items() if not isinstance(value, torch.Tensor)}
        self._given = {node: numbers[id(value)] for node, value in values.items() if node not in self._constants}
        self._attributes = {path: numbers[id(tensor)] for path, tensor in attributes.items()}
        self.buffers = [number for number, tensor in enumerate(tensors) if _may_change(tensor)]
        """The tensors, by number, that the graph may change in place. Dynamo passes buffers as arguments."""
        self.places: list[tuple[str, int]] = []
        """For each leaf of the graph's result: ("given", number), ("result", number) or ("constant", number)."""
        self.structure: Any = None
        self.constants: list[Any] = []
        self.differentiable: tuple[int, ...] = ()
        self.results = 0
        self.effects: list[_Effect] = []
        """The operators that `without_effects` has left out, in their order."""

    def without_effects(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As a call, but operators without results are noted instead of called. Their tensors are the last results."""
        with _WithoutEffects() as without:
            results = self(*tensors)
        self.effects = without.effects
        return (*results, *(tensor.detach() for tensor in without.tensors))

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The results, then the new values of buffers. The buffers themselves are not changed."""
        own = list(tensors)
        for number in self.buffers:
            own[number] = own[number].clone()
        values = {**self._constants, **{node: own[number] for node, number in self._given.items()}}
        attributes = {path: own[number] for path, number in self._attributes.items()}
        # restores the grad mode if the graph changes it and then fails
        grad_mode = torch.set_grad_enabled(torch.is_grad_enabled())
        with grad_mode, checkpoints.marked(self._graph), KeptForAutograd(), Resampling():
            result = _Interpreter(self._root, self._graph, values, attributes).run_graph()
        leaves, structure = pytree.tree_flatten(_mutable(result))
        of_given = {id(tensor): number for number, tensor in enumerate(own)}
        by_identity: dict[int, tuple[int, torch.Tensor]] = {}
        places: list[tuple[str, int]] = []
        constants: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                if not isinstance(leaf, _PLAIN):
                    raise Refused(f"it returns a {type(leaf).__name__}")
                places.append(("constant", len(constants)))
                constants.append(leaf)
            elif id(leaf) in of_given:
                places.append(("given", of_given[id(leaf)]))
            else:
                number, _ = by_identity.setdefault(id(leaf), (len(by_identity), leaf))
                places.append(("result", number))
        results = [tensor for _, tensor in by_identity.values()]
        there = Counter(map(id, [*own, *results, *(tensor._base for tensor in results)]))
        results = [
            _aten._unsafe_view(tensor, tensor.shape)  # nothing else has the base, so this need not be a view
            if tensor._base is not None and there[id(tensor._base)] == 1
            else tensor
            for tensor in results
        ]
        if any(own[number].requires_grad for number in self.buffers):
            raise Refused("it changes a buffer to something that has gradients")
        self.places, self.structure, self.constants, self.results = places, structure, constants, len(results)
        self.differentiable = tuple(number for number, tensor in enumerate(results) if tensor.requires_grad)
        return (*results, *(own[number] for number in self.buffers))

    def output(self, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> Any:
        """The graph's result in its own structure."""
        sources = {"given": given, "result": results, "constant": self.constants}
        return pytree.tree_unflatten([sources[kind][number] for kind, number in self.places], self.structure)


@dataclass(frozen=True)
class _Effect:
    """A call of an operator that has no results."""

    overload: Any
    leaves: Sequence[Any]
    """Of its arguments; `_TENSOR` stands for a tensor."""
    structure: Any

    @property
    def takes(self) -> int:
        """The number of its tensors."""
        return sum(leaf is _TENSOR for leaf in self.leaves)

    def arguments(self, tensors: Iterator[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Its arguments, and those with keywords, with the next of `tensors` in place of its own."""
        leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.structure)  # type: ignore[no-any-return]


_TENSOR: Final = object()


class _WithoutEffects(DispatchMode):
    """A mode in which operators without results are noted instead of called, if their arguments are plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.effects: list[_Effect] = []
        self.tensors: list[torch.Tensor] = []
        """Those of all of them, in their order."""

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not observed.is_for_its_effect(func):
            return func(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
        if not all(isinstance(leaf, torch.Tensor | _PLAIN) for leaf in leaves):
            return func(*args, **kwargs)
        self.tensors += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.effects.append(
            _Effect(func, [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure)
        )
        return None


def _may_change(tensor: torch.Tensor) -> bool:
    """Whether a graph may change a tensor in place: it has no gradients, and a copy of it has the same strides."""
    if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
        return False
    return is_dense(tensor.shape, tensor.stride())


def _mutable(result: Any) -> Any:
    """A graph's result with plain lists and dictionaries in place of fx's immutable ones."""
    match result:
        case tuple() if hasattr(result, "_fields"):
            return type(result)(*map(_mutable, result))
        case list() | tuple():
            return (list if isinstance(result, list) else tuple)(map(_mutable, result))
        case dict() if type(result) in (dict, immutable_dict):
            return {key: _mutable(value) for key, value in result.items()}
    return result


_PLAIN: Final = bool | int | float | complex | str | None | torch.dtype | torch.device | torch.Size


class _Interpreter(fx.Interpreter):
    """Runs a graph with other tensors in place of its attributes and of its modules' parameters and buffers."""

    def __init__(
        self, root: nn.Module, graph: fx.Graph, values: Mapping[fx.Node, Any], attributes: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__(root, graph=graph)
        self._values, self._attributes = values, attributes

    def run_graph(self) -> Any:
        return self.run(initial_env=dict(self._values), enable_io_processing=False)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module, prefix = _twin(self.fetch_attr(target)), f"{target}."
        own = {path[len(prefix) :]: value for path, value in self._attributes.items() if path.startswith(prefix)}
        return torch.func.functional_call(module, own, args, kwargs)


def _twin(module: nn.Module) -> nn.Module:
    """A copy of a module with its own tables of tensors, so that replacing these does not disturb other threads."""
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__.update(module.__dict__)
    for table in ("_parameters", "_buffers"):
        twin.__dict__[table] = dict(module.__dict__[table])
    twin.__dict__["_modules"] = {
        name: None if child is None else _twin(child) for name, child in module._modules.items()
    }
    return twin


def _parted(joint: fx.GraphModule, traced: Traced, layouts: Layouts, tensors: Sequence[torch.Tensor]) -> Joint:
    """Divides the joint graph into a forward and a backward. Raises Refused."""
    given = [node for node in joint.graph.nodes if node.op == "placeholder"]  # gradients of results follow
    simplify(joint.graph, [given[number] for number in traced.buffers])
    device = device_of(tensors)
    is_on_gpu = device is not None and merge.runs_on_gpu(device)
    places = keep_places(joint.graph, is_on_gpu)
    if any(checkpoints.AGAIN in node.meta and draws(node) for node in joint.graph.nodes):
        raise Refused("a checkpoint in it draws random numbers")
    ordered = _in_an_order()
    if any(node.target is ordered for node in joint.graph.nodes):
        raise Refused("an operation of its backward does more than to give a result")
    count = traced.results + len(traced.buffers)
    behind_effects = count + sum(effect.takes for effect in traced.effects)
    _add_results(joint.graph, behind_effects, places)
    every = behind_effects + len(places)
    drawn = sum(map(draws, joint.graph.nodes))
    if traced.differentiable:
        with checkpoints.drawing_nothing(joint.graph), _draws_stay_apart(joint.graph):
            forward, backward = partition()(joint, None, num_fwd_outputs=every)
    else:
        forward, backward = joint, _nothing(len(tensors))
    if drawn > sum(map(draws, [*forward.graph.nodes, *backward.graph.nodes])):
        raise Refused("it draws random numbers that nobody reads")
    primals = [node for node in forward.graph.nodes if node.op == "placeholder"]
    (end,) = (node for node in forward.graph.nodes if node.op == "output")
    outputs = list(end.args[0])
    results, becoming, saved = outputs[: traced.results], outputs[traced.results : count], outputs[every:]
    if not all(isinstance(node, fx.Node) for node in outputs):
        raise Refused("it keeps something for its backward that is no tensor")
    if len({*results, *primals}) < len(results) + len(primals):
        raise Refused("two of its results are one, or one is what it was given")
    changed = {
        primals[number]: node for number, node in zip(traced.buffers, becoming, strict=True) if node != primals[number]
    }
    decided = _decided_by(changed)
    if any(node in decided for node in (*results, *saved)):
        raise Refused("a buffer that it changes decides what it computes")
    with forward.graph.inserting_before(end):
        of_effects = iter(outputs[count:behind_effects])
        for effect in traced.effects:
            forward.graph.call_function(effect.overload, *effect.arguments(of_effects))
        for buffer, node in changed.items():
            forward.graph.call_function(_aten.copy_.default, (buffer, node))
    made_again.copies(forward.graph, backward.graph, {*primals} - changed.keys())
    made_again.views(forward.graph, backward.graph, {*primals, *results})
    _compute_early(forward.graph, [*results, *becoming])
    taken = [node for node in backward.graph.nodes if node.op == "placeholder"]
    names = {node.name for node in taken}
    more = [node for node in forward.graph.nodes if node.name in names and node not in (*results, *primals)]
    end.args = ((*results, *more),)
    made_again.leave_out_unread(forward.graph)
    sources = {"given": primals, "result": results, "more": more}
    by_name = {node.name: (kind, at) for kind, nodes in sources.items() for at, node in enumerate(nodes)}
    tangents = [node for node in taken if node.name.startswith("tangents_")]
    kept = taken[: len(taken) - len(tangents)]
    if len(tangents) != len(traced.differentiable) or taken[len(kept) :] != tangents:
        raise Refused("torch's AOTAutograd has gradients for other results than have them")
    if any(node.name not in by_name for node in kept):
        raise Refused("its backward takes what its forward does not give")
    if is_on_gpu:
        take_padded(backward.graph, pad_rows(forward.graph, {*results}))
        (gradients,) = (node for node in backward.graph.nodes if node.op == "output")
        pad_rows(backward.graph, {*gradients.all_input_nodes})
    gives = frozenset(at for at, node in enumerate(results_of(backward.graph)) if isinstance(node, fx.Node))
    if traced.differentiable and not gives:
        raise Refused("its results have gradients, but nothing gets any")
    _lay_as_leaves(backward.graph, tensors)
    for half in (forward, backward):
        _view_or_copy(half.graph)
        half.recompile()
    values = [node.meta["val"] for node in tangents]
    return Joint(
        forward=forward,
        backward=backward,
        results=traced.results,
        differentiable=traced.differentiable,
        kept=tuple(by_name[node.name] for node in kept),
        depends=_dependences(backward, tangents),
        gives=gives,
        tangents=tuple(node.name for node in tangents),
        gradients=tuple(TensorMeta.of(value, value.device) for value in values),
        changed=frozenset(primals.index(node) for node in changed),
        kept_bytes=sum(map(_nbytes, more)),
        large=tuple(at for at, node in enumerate(kept) if by_name[node.name][0] == "more" and _nbytes(node) >= SMALL),
        small=tuple(at for at, node in enumerate(more) if _nbytes(node) < SMALL),
        draws=any(map(draws, forward.graph.nodes)),
        reference=traced,
        layouts=layouts,
    )


def _add_results(joint: fx.Graph, at: int, nodes: Sequence[fx.Node]) -> None:
    """Makes nodes results of the forward, from position `at` on, in a joint graph.

    To torch's partitioner, a node that only the backward reads is work of the backward. What such a node reads is never
    computed again, unless the node is pointwise. So the relu before a pooling would not be, and its mask would be kept,
    although the backward has what both can be computed from.
    """
    (end,) = (node for node in joint.nodes if node.op == "output")
    outputs = list(end.args[0])
    end.args = ([*outputs[:at], *nodes, *outputs[at:]],)
    if "desc" in end.meta:  # torch's descriptions of the results
        said = pytree.arg_tree_leaves(end.meta["desc"])
        end.meta["desc"] = [*said[:at], *(None for _ in nodes), *said[at:]]


def _nothing(count: int) -> fx.GraphModule:
    """A backward that gives None for each of `count` tensors: no result has gradients."""
    graph = fx.Graph()
    graph.output((None,) * count)
    return fx.GraphModule(nn.Module(), graph)


def _lay_as_leaves(backward: fx.Graph, tensors: Sequence[torch.Tensor]) -> None:
    """Makes gradients of contiguous leaves contiguous. Otherwise torch's autograd would copy them, one by one."""
    (end,) = (node for node in backward.nodes if node.op == "output")
    gradients = list(end.args[0])
    for number, (node, tensor) in enumerate(zip(gradients, tensors, strict=False)):  # none where no result has any
        if not isinstance(node, fx.Node) or not tensor.is_leaf or not tensor.is_contiguous():
            continue
        with backward.inserting_before(end):
            if not node.meta["val"].is_contiguous():
                gradients[number] = backward.call_function(_aten.clone.default, (node,), _CONTIGUOUS)
            elif _is_of_filters(node):
                gradients[number] = backward.call_method("contiguous", (node,))
            else:
                continue
        gradients[number].meta["val"] = node.meta["val"].clone(**_CONTIGUOUS)
    end.args = (tuple(gradients),)


_CONTIGUOUS: Final[dict[str, Any]] = {"memory_format": torch.contiguous_format}


def _view_or_copy(graph: fx.Graph) -> None:
    """Replaces views by reshapes: the tensors that they show may have other strides than in the trace, where torch may
    be wrong (about an indexed tensor's, for example)."""
    for node in graph.nodes:
        if node.target is _aten.view.default:
            node.target = _aten.reshape.default


def _is_of_filters(node: fx.Node) -> bool:
    """Whether a node is the gradient of a convolution's filters.

    Libraries return gradients of filters in channels_last where they convolve in it. torch's metadata does not show it.
    """
    if node.target is not operator.getitem:
        return False
    gradients, place = node.args
    return bool(getattr(gradients, "target", None) is _aten.convolution_backward.default and place == 1)


def _compute_early(graph: fx.Graph, results: Iterable[fx.Node]) -> None:
    """Moves nodes that only the backward needs directly behind the last value that they read.

    The partitioner leaves them behind the results. So the values that they read would live until the forward's end.
    """
    needed = {node for result in results for node in made_of(result)}
    placed = {node for node in graph.nodes if node.op == "placeholder"}
    late = {node for node in graph.nodes if not (node in needed or node in placed or node.op == "output")}
    late = {node for node in late if not draws(node) and node.target is not _aten.copy_.default}
    for node in [node for node in graph.nodes if node not in placed and node not in late]:
        made, last = [node], node
        for one in made:
            placed.add(one)
            for user in one.users:
                if user in late and user not in made and placed.issuperset(user.all_input_nodes):
                    if last.next is not user:  # else torch 2.3 warns
                        last.append(user)
                    last = user
                    made.append(user)


def simplify(graph: fx.Graph, buffers: Sequence[fx.Node]) -> None:
    """Removes nodes that served the trace alone, and replaces others by simpler ones. Changes the graph in place.

    Nothing is changed in place in this graph. So the copies of buffers that `Traced` makes are removed, and others that
    no result shows: a dropout that drops nothing makes one. Removed are also views that change no shape or undo another
    view, and aliases. A view that drops the dimensions of size 1 of a sum becomes part of the sum. In `where`, tensors
    of one number become numbers. Conversions whose results leave the graph name only the dtype. Conjugates and
    negatives are computed at once: a program reads a tensor's memory as its values. Checks of a tensor's dtype and
    sizes are removed: they were made in the trace, and those that torch 2.13 makes of zeros without memory fail when
    they are run.
    """
    of_trace = {next(iter(buffer.users)) for buffer in buffers if buffer.users}  # `Traced` makes them first
    for node in list(graph.nodes):
        if node.target is observed.CHECK_OF_KIND:
            graph.erase_node(node)
            continue
        copies = node.target is _aten.clone.default and not node.kwargs
        copies = copies and (node in of_trace or _is_needless(node))
        views = node.target is _aten._unsafe_view.default and _size(node) == _size(node.args[0])
        if copies or views or node.target is _aten.alias.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        if node.target is _aten.view.default and _is_as_before(node):
            node.replace_all_uses_with(node.args[0].args[0])
        if node.target is _aten.view.default and _is_sum_with_ones(node.args[0]) and _size(node) == _kept(node.args[0]):
            node.target, node.args = _aten.sum.dim_IntList, node.args[0].args[:2]
        if node.target in _NOT_LAZY:
            node.target = _NOT_LAZY[node.target]
            node.meta["val"] = node.target(node.args[0].meta["val"])
        if node.target is _aten.bernoulli.p and _is_fresh(node.args[0]):
            node.target = _aten.bernoulli_.float  # draws in the order of memory, as dropout does in eager
        if node.target is _aten._to_copy.default and all(user.op == "output" for user in node.users):
            node.kwargs = _without_its_own(node)
        if node.target is _aten.where.self:
            _, first, second = node.args
            if _is_number(first, second):
                node.target, node.args = _aten.where.ScalarSelf, (node.args[0], first.args[0], second)
            elif _is_number(second, first):
                node.target, node.args = _aten.where.ScalarOther, (node.args[0], first, second.args[0])


def _is_needless(copy: fx.Node) -> bool:
    """Whether a copy may be what it is a copy of: it has the same strides, and only its values are read.

    Not a copy of what the step is given: who calls it may change that before the backward, which reads the copy.
    """
    before: Any = copy.args[0]
    is_alike = copy.meta["val"].stride() == before.meta["val"].stride()
    return is_alike and base_of(before).op != "placeholder" and not _is_shown(copy)


def _is_shown(node: fx.Node) -> bool:
    """Whether a result of the graph may be in a node's memory, or a view of it depends on where that begins."""
    memory = {"output", _aten.as_strided.default}
    return any({user.op, user.target} & memory or (is_view(user) and _is_shown(user)) for user in node.users)


_NOT_LAZY: Final = {_aten._conj.default: _aten._conj_physical.default, _aten._neg_view.default: _aten.neg.default}
"""Operators that torch computes only when the result is read, and those that compute the same at once."""


def _without_its_own(conversion: fx.Node) -> dict[str, Any]:
    """The arguments of a conversion but for its argument's own layout and device, which autograd names.

    So the kernel that computes a weight's gradient converts it, too. Elsewhere a conversion's result stays a value of
    its own: other nodes read it, and it takes half of the memory.
    """
    before = conversion.args[0].meta["val"]  # type: ignore[union-attr]
    own = {"layout": before.layout, "device": before.device}
    return {name: value for name, value in conversion.kwargs.items() if name not in own or value != own[name]}


def _is_as_before(view: fx.Node) -> bool:
    """Whether a view undoes another view."""
    before: Any = view.args[0]
    values = [node.meta["val"] for node in (view, *before.args[:1])] if before.target is _aten.view.default else []
    return len(values) == 2 and values[0].shape == values[1].shape and values[0].stride() == values[1].stride()


def _is_sum_with_ones(node: fx.Node) -> bool:
    """Whether a node is a sum with `keepdim`, and has a single user."""
    is_sum = node.target is _aten.sum.dim_IntList and node.args[2:] == (True,) and not node.kwargs
    return is_sum and bool(node.args[1]) and len(node.users) == 1


def _kept(node: fx.Node) -> tuple[int, ...]:
    """The sizes of the dimensions that a sum does not reduce."""
    size, dims = _size(node.args[0]), node.args[1]
    assert isinstance(dims, list | tuple)
    over = {dim % max(len(size), 1) for dim in dims if isinstance(dim, int)}
    return tuple(length for dim, length in enumerate(size) if dim not in over)


def _nbytes(node: fx.Node) -> int:
    return int(node.meta["val"].numel() * node.meta["val"].element_size())


def _is_fresh(node: fx.Node) -> bool:
    """Whether a node is uninitialised memory with a single user."""
    return node.target is _aten.empty_like.default and len(node.users) == 1


def _is_number(node: fx.Node, beside: fx.Node) -> bool:
    """Whether a node is a number as a tensor, with the dtype of `beside`."""
    is_one = node.target is _aten.scalar_tensor.default and beside.target is not _aten.scalar_tensor.default
    return is_one and node.meta["val"].dtype == beside.meta["val"].dtype


def _size(node: Any) -> Any:
    return tuple(node.meta["val"].shape)


def _decided_by(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that depend on the values of `nodes`.

    In training mode the results of a batch normalisation do not depend on the running statistics that it updates.
    """
    found: set[fx.Node] = set()
    left = [(node, user) for node in nodes for user in node.users]
    while left:
        before, node = left.pop()
        counts = getattr(node.target, "overloadpacket", None) in _COUNTING and before in node.args[3:5]
        if node not in found and not counts:
            found.add(node)
            left += [(node, user) for user in node.users]
    return found


_COUNTING: Final = tuple(
    getattr(_aten, name)
    for name in ("_native_batch_norm_legit_functional", "_batch_norm_with_update_functional")
    if hasattr(_aten, name)
)
"""Batch normalisation in training mode. Arguments 3 and 4 are the running statistics that it updates."""


def _dependences(backward: fx.GraphModule, tangents: Sequence[fx.Node]) -> tuple[frozenset[int], ...]:
    """For each result of the backward: the tangents, by number, that it depends on."""
    found: dict[fx.Node, frozenset[int]] = {}
    for node in backward.graph.nodes:
        of_inputs = [found[one] for one in node.all_input_nodes]
        found[node] = frozenset([tangents.index(node)] if node in tangents else ()).union(*of_inputs)
    return tuple(found[one] if isinstance(one, fx.Node) else frozenset() for one in results_of(backward.graph))


def results_of(graph: fx.Graph) -> Sequence[Any]:
    """The results of a graph, or None for some: the arguments of its output node."""
    (end,) = (node for node in graph.nodes if node.op == "output")
    return end.args[0]  # type: ignore[no-any-return]


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    return observed.draws(node.target, node.args, node.kwargs)


# ------------------------------------------------------------------------------------------- torch's parts


def _traced_with_gradients() -> Callable[..., Any]:
    from torch._functorch.aot_autograd import aot_export_joint_simple  # takes a second to import

    return aot_export_joint_simple


@contextlib.contextmanager
def _draws_are_kept() -> Iterator[None]:
    """A context in which fx removes no call that draws random numbers, even if nobody reads them.

    Newer versions of torch remove none. If one were lost, all that is drawn afterwards would be other numbers than in
    eager.
    """
    if "impure_random" in inspect.signature(fx.Node.is_impure).parameters:
        yield
        return
    kept: set[Any] = fx.node._side_effectful_functions
    new = _drawing() - kept
    kept |= new
    try:
        yield
    finally:
        kept -= new


@contextlib.contextmanager
def _draws_stay_apart(graph: fx.Graph) -> Iterator[None]:
    """A context in which torch's partitioner joins no equal calls of the graph that draw random numbers.

    It knows only some of these operators. The caller holds the lock of traces.
    """
    from torch._functorch import compile_utils

    known: list[Any] = getattr(compile_utils, "rand_ops", [])
    new = {node.target.overloadpacket for node in graph.nodes if draws(node)}.difference(known)
    known.extend(new)
    try:
        yield
    finally:
        for one in new:
            known.remove(one)


@functools.cache
def _drawing() -> frozenset[Any]:
    """torch's operators that draw random numbers."""
    names = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    parts = (name.partition(".") for name in names)
    found = (getattr(getattr(_aten, packet, None), overload or "default", None) for packet, _, overload in parts)
    return frozenset(one for one in found if torch.Tag.nondeterministic_seeded in getattr(one, "tags", ()))


def _in_an_order() -> Any:
    """The operator that newer versions of torch trace in place of others whose order matters."""
    from torch._higher_order_ops.effects import with_effects

    return with_effects


def partition() -> Callable[..., tuple[fx.GraphModule, fx.GraphModule]]:
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition
