"""optimize(..., cuda_graphs=True): a call of the whole model as one CUDA graph instead of one launch after another.

Calls that need gradients have other graphs (step_graphs.py).

`Replays` decides for each call.

- *Kinds of call.* A kind is the shapes, strides and dtypes of the tensors, the values of the other arguments, and
  torch's switches. The first call of a kind runs as usual. The second is captured: warm-up calls on a stream of its
  own, then torch.cuda.graph with a memory pool that all graphs of the model share.
- *Arguments and results.* Before a replay, arguments are copied into buffers. After it, results are copied out of the
  graph's memory, so that they belong to the caller. Objects among the results that only hold attributes (a cache of
  keys and values) are made anew.
- *Parameters and buffers.* A graph reads them at the addresses that they had at the capture. So it sees changes in
  place. If the address of one has changed, one has been replaced, or a module has changed its mode, all graphs are
  dropped. Dynamo's graphs get parameters and buffers as arguments; these are read in place, too.
- *Python.* What a forward reads from Python (a number in an attribute), or does there, is fixed at the capture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import operator
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import fx, nn
from torch.autograd import forward_ad

from fxfuse import build, cuda_capture, recapture, stream_capture
from fxfuse.cuda.precision import tf32_allowed
from fxfuse.cuda_capture import Unfit
from fxfuse.errors import FxfuseError
from fxfuse.functional import autocast_dtype
from fxfuse.guard import Guard, beginning
from fxfuse.state import Draws, draws_without_readers, unchanged

logger = logging.getLogger("fxfuse")

GRAPHS: Final = 8
"""Most kinds of call for which a model keeps graphs. Each graph keeps the memory of all intermediate results."""
WITH_GRADIENTS: Final = "it is called with gradients; torch.no_grad() and torch.inference_mode() switch them off"
"""The reason why such calls have no graph here; training steps have graphs of their own (step_graphs.py)."""
KINDS_REMEMBERED: Final = 64
"""Most kinds of call that are remembered because they have come once."""

Forward: TypeAlias = Callable[..., Any]
"""A module's forward, self first."""
Key: TypeAlias = tuple[Any, ...]

_CONSTANTS: Final = (bool, int, str, torch.dtype, torch.device, torch.memory_format, torch.Size)
_TENSORS: Final = (torch.Tensor, nn.Parameter)
_dtype: Final[Callable[..., Any]] = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------- arguments, results


def flatten(value: Any, leaves: list[torch.Tensor]) -> Key:
    """The part of an argument that decides its kind of call. Its tensors are appended to `leaves`. Raises Unfit."""
    if type(value) in _TENSORS:
        if value.layout is not torch.strided or value.is_nested or torch._debug_has_internal_overlap(value) == 1:
            raise Unfit("an argument's elements share memory, or it is not strided")
        leaves.append(value)
        return (torch.Tensor, value.shape, value.stride(), value.dtype, value.device)
    if value is None or isinstance(value, _CONSTANTS):
        return (type(value), value)
    if isinstance(value, float):
        return (float, value.hex())  # NaN does not equal itself, and -0.0 equals 0.0
    if type(value) in (tuple, list):
        return (type(value), *(flatten(item, leaves) for item in value))
    if type(value) is dict:
        return (dict, *((name, flatten(item, leaves)) for name, item in value.items()))
    raise Unfit(f"an argument is a {type(value).__name__}")


def map_tensors(
    value: Any, function: Callable[[torch.Tensor], torch.Tensor], made: dict[int, Any] | None = None,
    shared: Container[int] = (),
) -> Any:  # fmt: skip
    """`value` with `function` applied to every tensor. Containers, dataclasses and other objects are made anew.

    Raises Unfit for an object that does more than hold attributes.

    Args:
        made: collects the new objects, by the ids of the old ones. So an object that occurs twice is made once.
        shared: the ids of objects that are kept.
    """
    made = {} if made is None else made

    def mapped(item: Any) -> Any:
        return map_tensors(item, function, made, shared)

    if type(value) in _TENSORS:
        return function(value)
    if value is None or isinstance(value, (*_CONSTANTS, float, type)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in dataclasses.fields(value) if item.init]
        return dataclasses.replace(value, **{name: mapped(getattr(value, name)) for name in names})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(mapped, value))
    if type(value) in (tuple, list):
        return type(value)(map(mapped, value))
    if type(value) in (dict, OrderedDict):
        return type(value)((name, mapped(item)) for name, item in value.items())
    if not _only_holds_attributes(value):
        raise Unfit(f"a {type(value).__name__} is among its results")
    if id(value) in shared:
        return value
    if id(value) not in made:
        made[id(value)] = twin = object.__new__(type(value))
        vars(twin).update((name, mapped(item)) for name, item in vars(value).items())
    return made[id(value)]


def _only_holds_attributes(value: Any) -> bool:
    """Whether an object can be replaced by a new one with the same attributes (a cache of keys and values)."""
    kind = type(value)
    return (
        all(getattr(kind, name, None) is getattr(object, name, None) for name in _OF_OBJECTS)
        and hasattr(value, "__dict__")
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
        and not isinstance(value, nn.Module)
    )


_OF_OBJECTS: Final = (
    "__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__", "__del__",
)  # fmt: skip
"""Methods that a class defines if its objects are more than their attributes."""


def _that_live_on(before: Any, now: Any) -> set[int]:
    """The ids of objects that are among the results of both calls. Raises Unfit if one of them holds tensors."""
    earlier: dict[int, Any] = {}
    later: dict[int, Any] = {}
    map_tensors(before, lambda tensor: tensor, earlier)
    map_tensors(now, lambda tensor: tensor, later)
    same = earlier.keys() & later.keys()

    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise Unfit("an object that lives on, with tensors, is among its results")

    for identity in same:
        map_tensors(later[identity], refuse)
    return same


class Recording:
    """A captured call, which can be replayed for other calls of its kind."""

    known: _Latest | None = None
    """Recognises the next call of this kind; None before the first replay, or if that is not possible."""

    def __init__(
        self, module: nn.Module, forward: Forward, args: Sequence[Any], kwargs: dict[str, Any],
        lent: Sequence[torch.Tensor], pool: cuda_capture.Pool,
    ) -> None:  # fmt: skip
        """Captures forward(module, *args, **kwargs). Raises Unfit.

        Args:
            lent: arguments that the graph reads in place (see `_Split`).
        """
        leaves: list[torch.Tensor] = []
        flatten([args, kwargs], leaves)
        device = pool.device
        self._pool, self._graph = pool, cuda_capture.Graph(pool)
        overwritten = [tensor for tensor in lent if not isinstance(tensor, nn.Parameter)]  # buffers, perhaps
        gradients = torch.is_grad_enabled()  # a forward may ask; leaving inference mode turns them on
        # the caller may be in inference mode, whose tensors may not be overwritten outside of it
        with (
            torch.inference_mode(False),
            unchanged(module, gradients=gradients, tensors=overwritten),
            cuda_capture.preparing(),
        ):
            self._buffers = cuda_capture.Buffers.like(leaves)
            buffers = iter(self._buffers.tensors)
            args, kwargs = map_tensors((tuple(args), kwargs), lambda _: next(buffers))
            versions, draws = self._versions(), Draws(module)
            before: dict[str, Any] = {}
            self._graph.warm_up(lambda: before.update(results=forward(module, *args, **kwargs)))
            if versions != self._versions():
                raise Unfit("it overwrites an argument")
            self._draws: list[Callable[[], Any]] = []
            if draws.any():  # every replay would repeat the numbers drawn at the capture
                with recapture.as_eager():
                    again = draws_without_readers(lambda: forward(module, *args, **kwargs))
                if again is None or draws.of_its_own():
                    raise Unfit("it draws random numbers")
                self._draws = again
            with stream_capture.keeping() as self._kept:
                results = self._graph.capture(lambda: forward(module, *args, **kwargs))
        self._shared = _that_live_on(before["results"], results)
        kept = [*self._buffers.tensors, *module.parameters(), *module.buffers(), *lent]
        storages = {tensor.untyped_storage().data_ptr() for tensor in kept}
        groups: dict[tuple[int, torch.dtype], dict[int, torch.Tensor]] = {}

        def check(result: torch.Tensor) -> torch.Tensor:
            if result.device != device:
                raise Unfit(f"a result is on {result.device}")
            if result.numel() and result.untyped_storage().data_ptr() in storages:
                raise Unfit("a result is a view of an argument, a parameter or a buffer")
            if result.requires_grad:
                raise Unfit("a result has gradients of its own")
            groups.setdefault((beginning(result), result.dtype), {})[id(result)] = result
            return result

        self._results = map_tensors(results, check, shared=self._shared)
        self._copies = [(list(group), cuda_capture.copying_together(list(group.values()))) for group in groups.values()]
        """For each memory, the ids of the results in it, and the function that copies them. A tensor may occur several
        times among the results."""

    def _versions(self) -> list[int]:
        return [buffer._version for buffer in self._buffers.tensors]

    def replay(self, leaves: list[torch.Tensor]) -> Any:
        """Replays the graph for a call of this kind with the tensors `leaves`. Returns the results."""
        with torch.no_grad():
            self._pool.use(self._buffers.tensors)
            self._buffers.fill(leaves)
            for draw in self._draws:
                draw()
            self._graph.replay()
            copies = {
                name: copy for names, copying in self._copies for name, copy in zip(names, copying(), strict=True)
            }
        return map_tensors(self._results, lambda result: copies[id(result)], shared=self._shared)


# ------------------------------------------------------------------------------------------- the model


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


_END: Final = object()


class _State:
    """The state of the model that graphs depend on: addresses of its tensors, modes, and hooks, which need Python.

    `lent` are arguments of a call that a graph reads in place: parameters and buffers of one of Dynamo's graphs.
    """

    def __init__(self, module: nn.Module, lent: Sequence[torch.Tensor], lends: bool) -> None:
        modules = list(module.modules())
        self._children = modules[1:]
        # Dynamo's graphs have no mode: operators that depend on it get it as an argument
        self._attributes = [vars(item) for item in modules if not (lends and isinstance(item, fx.GraphModule))]
        # hooks of the root run outside of its forward, and so outside of the graph
        self._hooks = [hooks for item in self._children for hooks in (item._forward_hooks, item._forward_pre_hooks)]
        tables = [(item._parameters, item._buffers, item._modules) for item in modules]
        self._tables = [table for three in tables for table in three if table]
        self._lent = lent
        self._parameters = [*module.parameters(), *lent]
        self.tensors = [*module.parameters(), *module.buffers(), *lent]
        self._are_plain = all(type(item) in _TENSORS and item.layout is torch.strided for item in self.tensors)
        self._modes = self._read_modes()
        self._hooked = any(self._hooks)
        self._members = [member for table in self._tables for member in table.values()]
        self._places = self._read_places()
        self._guards: dict[tuple[bool, bool], Guard] = {}
        """Guards for all tensors, by the thread's modes that its dispatch keys depend on (inference mode, autocast)."""
        self._unfit = self._why_unfit(module)

    # read at every call, for hundreds of tensors and modules: by loops in C

    def _read_modes(self) -> list[bool]:
        return [attributes["training"] for attributes in self._attributes]

    def _has_members(self) -> bool:
        """Whether the model's parameters, buffers and modules are the same objects."""
        members = itertools.chain.from_iterable(table.values() for table in self._tables)
        return all(map(operator.is_, itertools.chain(members, (_END,)), (*self._members, _END)))

    def _read_places(self) -> list[Any]:
        if not self._are_plain:
            return []
        return [list(map(read, self.tensors)) for read in (torch.Tensor.data_ptr, torch.Tensor.stride, _dtype)]

    def _has_tensors(self) -> bool:
        """Whether parameters, buffers, modules and hooks are the same objects, and tensors have the same addresses,
        strides and dtypes.

        After the first such comparison a guard compares them, in one call into C. It also compares properties that do
        not matter here (requires_grad, the thread's dispatch keys). So if it fails, everything is read one by one.
        """
        modes = torch.is_inference_mode_enabled(), torch.is_autocast_enabled()
        guard = self._guards.get(modes)
        if guard is not None:
            addresses = guard.addresses[:]
            if guard.holds(self.tensors, addresses):
                return addresses == guard.addresses
        if not self._has_members() or any(self._hooks) != self._hooked or self._read_places() != self._places:
            return False
        if self._are_plain and self.tensors:
            with contextlib.suppress(FxfuseError, build.NotBuilt):  # without a guard everything is read at every call
                self._guards[modes] = Guard(self.tensors, [*self._tables, *self._hooks])
        return True

    def _why_unfit(self, module: nn.Module) -> str | None:
        if any(self._modes):
            return "a module is in training mode"
        if self._hooked:
            return "a module has hooks"
        if not self._are_plain:
            return "a parameter or buffer is no plain tensor"
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if not _on_gpu(tensor) or tensor.device != self.tensors[0].device:
                return f"'{name}' is on {tensor.device}"
        for tensor in self._lent:
            if not _on_gpu(tensor) or tensor.device != self.tensors[0].device:
                return f"a parameter or buffer is on {tensor.device}"
        return None

    def has_gradients(self) -> bool:
        """Whether a parameter may get a gradient."""
        return any(tensor.requires_grad for tensor in self._parameters)

    def has_modes(self) -> bool:
        """Whether all modules are in the same modes as before."""
        return self._read_modes() == self._modes

    def holds(self, lent: Sequence[torch.Tensor]) -> bool:
        """Whether the model's state is the same as before."""
        return (
            self.has_modes()
            and len(lent) == len(self._lent)
            and all(map(operator.is_, lent, self._lent))
            and self._has_tensors()
        )

    def kind(
        self, recording: Recording, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: Sequence[torch.Tensor]
    ) -> _Latest | None:
        """Recognises further calls like this one, which has a recording; None if a guard cannot compare all of it."""
        is_plain = all(arg is None or type(arg) in (*_TENSORS, *_CONSTANTS) for arg in (*args, *kwargs.values()))
        if not (is_plain and self.tensors and self._are_plain):
            return None
        try:
            guard = Guard([*self.tensors, *leaves], [*self._tables, *self._hooks])
        except (FxfuseError, build.NotBuilt):
            return None
        return _Latest(recording, guard, self, args, kwargs)

    def check(self, leaves: Sequence[torch.Tensor]) -> torch.device:
        """The device of the model and of a call's tensors. Raises Unfit if they cannot be in one graph."""
        if torch.is_grad_enabled() and (self.has_gradients() or any(tensor.requires_grad for tensor in leaves)):
            raise Unfit(WITH_GRADIENTS)
        if self._unfit is not None:
            raise Unfit(self._unfit)
        tensors = [*self.tensors[:1], *leaves]
        for tensor in tensors:
            if not _on_gpu(tensor) or tensor.device != tensors[0].device:
                raise Unfit(f"an argument is on {tensor.device}")
        if not tensors:
            raise Unfit("neither the model nor its arguments have tensors")
        return tensors[0].device


class _Latest:
    """Recognises the next call of a kind: by one call into C (guard.h) and a few comparisons."""

    def __init__(
        self, recording: Recording, guard: Guard, state: _State, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """`guard` is for the model's tensors, in the order of `state`, followed by the tensors of this call."""
        self.recording = recording
        self._guard, self._state = guard, state
        args, self._names = (*args, *kwargs.values()), tuple(kwargs)
        self._addresses = guard.addresses[: len(state.tensors)]
        self._others = [(place, arg) for place, arg in enumerate(args) if type(arg) not in _TENSORS]
        self._places = [place for place, arg in enumerate(args) if type(arg) in _TENSORS]
        on_gpu = state.tensors[0].is_cuda
        self._count = len(args)
        self.is_capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing if on_gpu else bool
        self._switches = _switches()

    def leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
        """The tensors among the arguments, if the call is of this kind and the model's state is the same; else None."""
        if kwargs or self._names:
            if tuple(kwargs) != self._names:
                return None
            args = (*args, *kwargs.values())
        if len(args) != self._count:
            return None
        for place, before in self._others:
            if args[place] is not before and (type(args[place]) is not type(before) or args[place] != before):
                return None
        leaves = [args[place] for place in self._places]
        addresses = self._guard.addresses[:]
        is_alike = (
            self._guard.holds([*self._state.tensors, *leaves], addresses)
            and addresses[: len(self._addresses)] == self._addresses
            and self._state.has_modes()
            and _switches() == self._switches
        )
        return leaves if is_alike else None


def _is_watched() -> bool:
    """Whether something observes the operators that a call runs (modes, traces, captures): a replay runs none."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or _is_watched_beyond_keys(stream_capture.is_underway)
    )


def _is_watched_beyond_keys(is_capturing: Callable[[], bool]) -> bool:
    """`_is_watched` by things that have no dispatch key, so that guards do not notice them."""
    return bool(torch._C._len_torch_function_stack() or forward_ad._current_level >= 0 or is_capturing())


_LIBRARY_SWITCHES: Final[tuple[Callable[[], Any], ...]] = tuple(
    getattr(torch._C, name)
    for name in (
        "_get_cudnn_enabled", "_get_cudnn_benchmark", "_get_cudnn_deterministic",
        "_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled", "_get_cudnn_sdp_enabled",
    )
    if hasattr(torch._C, name)
)  # fmt: skip
"""Further switches that decide which kernels torch's libraries run."""


def _switches() -> Key:
    """The global settings that a graph depends on."""
    autocast = torch.is_autocast_enabled()
    return (
        torch.is_grad_enabled(), tf32_allowed("matmul"), tf32_allowed("conv2d"),
        autocast_dtype("cuda") if autocast else None,
        torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(),
        *[read() for read in _LIBRARY_SWITCHES],
    )  # fmt: skip


class _Split:
    """Divides the arguments of one of Dynamo's graphs: parameters and buffers, which keep their addresses, are lent."""

    def __init__(self, args: Sequence[Any]) -> None:
        """Divides the arguments of a first call, in which Dynamo marks parameters and buffers. Later ones are alike."""
        marked = [
            isinstance(arg, nn.Parameter) or getattr(arg, "_dynamo_static_input_type", None) is not None for arg in args
        ]
        self._lent = [place for place, is_lent in enumerate(marked) if is_lent]
        self._others = [place for place, is_lent in enumerate(marked) if not is_lent]

    def lent(self, args: Sequence[Any]) -> list[torch.Tensor]:
        return [args[place] for place in self._lent]

    def others(self, args: Sequence[Any]) -> list[Any]:
        return [args[place] for place in self._others]

    def calling(self, forward: Forward, args: Sequence[Any]) -> Forward:
        """`forward` as a function of the arguments that are not lent."""

        def call(module: nn.Module, *others: Any) -> Any:
            given = list(args)
            for place, other in zip(self._others, others, strict=True):
                given[place] = other
            return forward(module, *given)

        return call


class Replays:
    """The graphs of one model."""

    def __init__(self, lends: bool = False) -> None:
        """`lends`: whether the model is one of Dynamo's graphs, which gets its parameters and buffers as arguments."""
        self._lends = lends
        self._split: _Split | None = None
        self._lock = threading.RLock()
        self._state: _State | None = None
        self._pool: cuda_capture.Pool | None = None
        self._latest: _Latest | None = None
        self._met: set[Key] = set()
        self._found: dict[Key, Recording | Unfit] = {}
        self.refused: Counter[str] = Counter()
        """The reasons why calls ran without a graph, with the number of such calls."""

    def _recorded_again(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Recording, list[Any]] | None:
        """The previous call's recording and this call's tensors, if both calls are of the same kind; else None."""
        latest = self._latest
        if latest is None or _is_watched_beyond_keys(latest.is_capturing):
            return None
        leaves = latest.leaves(args, kwargs)
        return None if leaves is None else (latest.recording, leaves)

    @property
    def graphs(self) -> int:
        """How many graphs there are."""
        return sum(isinstance(found, Recording) for found in self._found.values())

    def fresh(self) -> Replays:
        """New Replays for the same model, without any graph."""
        return Replays(self._lends)

    def call(self, module: nn.Module, forward: Forward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """forward(module, *args, **kwargs), replayed if that is possible."""
        if cuda_capture.is_preparing():
            return forward(module, *args, **kwargs)
        if torch.is_grad_enabled() and self._state is not None and self._state.has_gradients():
            self.refused[WITH_GRADIENTS] += 1
            return forward(module, *args, **kwargs)
        with self._lock:
            again = self._recorded_again(args, kwargs)
            if again is not None:
                return again[0].replay(again[1])
        is_new = False
        if not _is_watched():
            with self._lock:  # the graph's buffers are in use until the results are copied
                leaves: list[torch.Tensor] = []
                try:
                    recording = self._recording(module, forward, args, kwargs, leaves, at_once=False)
                except Unfit as unfit:
                    self.refused[str(unfit)] += 1
                else:
                    if recording is not None:
                        self._remember(recording, args, kwargs, leaves)
                        return recording.replay(leaves)
                    is_new = True  # the next call of this kind is captured
        with stream_capture.replaying() if is_new else contextlib.nullcontext():
            return forward(module, *args, **kwargs)

    def _remember(
        self, recording: Recording, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: list[torch.Tensor]
    ) -> None:
        """Lets `_Latest` recognise the next call of this kind."""
        self._latest = None
        if self._lends or self._state is None:
            return
        if recording.known is None:
            recording.known = self._state.kind(recording, args, kwargs, leaves)
        self._latest = recording.known

    def prepare(
        self, module: nn.Module, forward: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> str | None:
        """Captures forward(module, *args, **kwargs) now. Returns the reason if that is not possible, else None."""
        with self._lock, torch.no_grad():
            try:
                self._recording(module, forward, args, dict(kwargs), [], at_once=True)
            except Unfit as unfit:
                return str(unfit)
        return None

    def _recording(
        self, module: nn.Module, forward: Forward, args: Sequence[Any], kwargs: dict[str, Any],
        leaves: list[torch.Tensor], at_once: bool,
    ) -> Recording | None:  # fmt: skip
        """The recording for this kind of call; None if the kind is new. Appends the call's tensors to `leaves`.

        Args:
            at_once: whether a kind that is new is captured, too.
        """
        lent: Sequence[torch.Tensor] = ()
        if self._lends:
            if self._split is None:
                self._split = _Split(args)
            lent = self._split.lent(args)
            forward, args = self._split.calling(forward, args), self._split.others(args)
        if self._state is None or not self._state.holds(lent):
            self._met, self._found, self._pool, self._latest = set(), {}, None, None
            self._state = _State(module, lent, self._lends)
        key = (_switches(), flatten([tuple(args), kwargs], leaves))
        device = self._state.check(leaves)
        found = self._found.get(key)
        if found is None:
            if key not in self._met and not at_once:
                if len(self._met) < KINDS_REMEMBERED:
                    self._met.add(key)
                return None
            if self.graphs >= GRAPHS:
                raise Unfit(f"there are {GRAPHS} graphs for other kinds of call")
            if self._pool is None or self._pool.device != device or not self.graphs:  # it ends with its last graph
                self._pool = cuda_capture.Pool(device)
            with stream_capture.replaying():
                found = self._found[key] = _record(module, forward, args, kwargs, lent, self._pool)
        if isinstance(found, Unfit):
            raise found
        return found


def _record(
    module: nn.Module, forward: Forward, args: Sequence[Any], kwargs: dict[str, Any], lent: Sequence[torch.Tensor],
    pool: cuda_capture.Pool,
) -> Recording | Unfit:  # fmt: skip
    logger.info("fxfuse: a CUDA graph of %s is captured", type(module).__name__)
    try:
        return Recording(module, forward, args, kwargs, lent, pool)
    except Unfit as unfit:
        return Unfit(str(unfit))  # without its traceback, which would keep the graph and its memory
    except Exception as error:  # of the model (its call will raise it again), or of what cannot be captured
        return Unfit(cuda_capture.reason_of(error))
