"""optimize(..., cuda_graphs=True): a call of the whole model as one CUDA graph instead of one launch after another.

`Replays` decides for each call. The first call of its kind (shapes, strides and dtypes of the tensors, values of the
other arguments, torch's switches) runs as usual, the second is captured: warm-up calls on a stream of its own, then
torch.cuda.graph with a memory pool that the model's graphs share. Arguments are copied into buffers before a replay,
and results out of the graph's memory after it, so that they belong to the caller; objects among them that only hold
attributes (a cache of keys and values) are made anew.

A graph reads parameters and buffers where they lay when it was captured: changes in place are seen, and if one of them
lies elsewhere now, has been replaced, or if a module has changed its mode, all graphs are dropped. Dynamo's graphs get
theirs as arguments: these are read where they lie, too. What a forward reads from Python (a number in an attribute) or
does there is fixed at the capture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import operator
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import fx, nn
from torch.autograd import forward_ad

from fxfuse import build, recapture, stream_capture
from fxfuse.cuda.precision import tf32_allowed
from fxfuse.errors import FxfuseError
from fxfuse.functional import autocast_dtype
from fxfuse.guard import Guard
from fxfuse.program import copies
from fxfuse.state import Draws, draws_without_readers, unchanged

logger = logging.getLogger("fxfuse")

GRAPHS: Final = 8
"""Kinds of call for which a model keeps graphs, each with the memory of all intermediate results."""
KINDS_REMEMBERED: Final = 64
"""Kinds of call of which is known that they have been met once."""
WARM_UP_CALLS: Final = 2

Forward: TypeAlias = Callable[..., Any]
"""A module's forward, self first."""
Key: TypeAlias = tuple[Any, ...]

_CONSTANTS: Final = (bool, int, str, torch.dtype, torch.device, torch.memory_format, torch.Size)
_TENSORS: Final = (torch.Tensor, nn.Parameter)
_dtype: Final[Callable[..., Any]] = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]


class Unfit(Exception):
    """Why a call cannot be a graph."""


# ------------------------------------------------------------------------------------- arguments, results


def flatten(value: Any, leaves: list[torch.Tensor]) -> Key:
    """What a graph is captured for in an argument; its tensors are appended to `leaves`. Raises Unfit."""
    if type(value) in _TENSORS:
        if value.layout is not torch.strided or value.is_nested or torch._debug_has_internal_overlap(value) == 1:
            raise Unfit("an argument's elements share memory, or it is not strided")
        leaves.append(value)
        return (torch.Tensor, value.shape, value.stride(), value.dtype, value.device)
    if value is None or isinstance(value, _CONSTANTS):
        return (type(value), value)
    if isinstance(value, float):
        return (float, value.hex())  # NaN is no key, and -0.0 is not 0.0
    if type(value) in (tuple, list):
        return (type(value), *(flatten(item, leaves) for item in value))
    if type(value) is dict:
        return (dict, *((name, flatten(item, leaves)) for name, item in value.items()))
    raise Unfit(f"an argument is a {type(value).__name__}")


def map_tensors(
    value: Any, function: Callable[[torch.Tensor], torch.Tensor], made: dict[int, Any] | None = None,
    shared: Container[int] = (),
) -> Any:  # fmt: skip
    """`value` with every tensor replaced; containers, dataclasses and objects are made anew. Raises Unfit for what does
    more than hold attributes.

    Args:
        made: the new objects by the identity of the old ones, which are met again there.
        shared: the identities of objects that are kept.
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
    """Whether another object with the same attributes is as good (a cache of keys and values)."""
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
"""Methods by which an object says that it is more than its attributes."""


def _that_live_on(before: Any, now: Any) -> set[int]:
    """The objects among the results of two calls that are the same. Raises Unfit if one of them holds tensors."""
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


def _buffer(leaf: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return buffer.copy_(leaf.detach())


def _copying(result: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What returns a copy of the result as it is by then, with the same strides."""
    shape, strides = result.shape, result.stride()
    expanded = [size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True)]
    if any(expanded):
        once = _copying(result[tuple(slice(0, 1) if repeated else slice(None) for repeated in expanded)])
        return lambda: once().expand(shape)
    if torch.empty_like(result).stride() == strides:  # in one call of torch's instead of two
        return result.clone
    dtype, device = result.dtype, result.device
    return lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device).copy_(result)


def _copying_into(buffers: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool] | None:
    """What copies tensors into the buffers at once, if they lie where it may read them; None if there is no kernel."""
    try:
        return copies.launch_of(buffers) if buffers and buffers[0].is_cuda else None
    except (FxfuseError, build.NotBuilt) as error:
        logger.info("fxfuse: torch copies arguments: %s", error)
        return None


def _overwrite(buffers: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    if len(buffers) == 1:
        buffers[0].copy_(values[0])
    elif buffers:
        torch._foreach_copy_(buffers, values)


# ------------------------------------------------------------------------------------------- one graph


class Pool:
    """Memory for the graphs of one model, which are replayed one after another: they may use the same."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle = torch.cuda.graph_pool_handle()
        self.capturing = torch.cuda.Stream(device)
        self._used_by = torch.cuda.current_stream(device)
        self._latest_use: tuple[int, int] | None = None

    def use(self, buffers: Sequence[torch.Tensor]) -> None:
        """Lets the current stream wait for whoever used the graphs last.

        `buffers` are those of one graph, which keeps the list as long as it is used.
        """
        use = torch._C._cuda_getCurrentRawStream(self.device.index), id(buffers)
        if use == self._latest_use:
            return
        self._latest_use = use
        stream = torch.cuda.current_stream(self.device)
        if stream != self._used_by:
            stream.wait_stream(self._used_by)
            self._used_by = stream
        for buffer in buffers:
            buffer.record_stream(stream)


class Graph:
    """torch's CUDA graph of one call: with Pool, all that needs a GPU."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, call: Callable[[], Any]) -> None:
        """Runs `call` until all is done that is done once (compiling, measuring, cuDNN's search). Raises Unfit."""
        stream = torch.cuda.current_stream(self._pool.device)
        self._pool.capturing.wait_stream(stream)
        with torch.cuda.stream(self._pool.capturing):
            for _ in range(WARM_UP_CALLS):
                call()
            with _waiting_noticed():  # in a capture it would fail, and torch's allocator would not recover
                call()
        stream.wait_stream(self._pool.capturing)

    def capture(self, call: Callable[[], Any]) -> Any:
        """What `call` returns: tensors that every replay overwrites."""
        pool = self._pool
        with torch.cuda.device(pool.device):
            try:
                # other threads may go on allocating and synchronising
                with (
                    _own_workspaces(),
                    torch.cuda.graph(self._graph, pool.handle, pool.capturing, capture_error_mode="thread_local"),
                ):
                    return call()
            except Exception:
                _recover(pool)
                raise

    def replay(self) -> None:
        self._graph.replay()  # on the current stream of the device that it was captured on, whichever is current


@contextlib.contextmanager
def _own_workspaces() -> Iterator[None]:
    """Inside, cuBLAS takes its workspaces anew, from a graph's pool, and no later call gets those.

    torch keeps one for each stream. A graph would go on writing into that of its warm-up, which others may free: every
    capture by torch.compile does, and in newer torch the end of any graph that was captured on this stream.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _recover(pool: Pool) -> None:
    """Ends what torch leaves open when a capture fails: its allocator and its random generator go on capturing."""
    with contextlib.suppress(Exception):  # where torch has done it
        torch._C._cuda_endAllocateToPool(pool.device.index, pool.handle)
        torch._C._cuda_releasePool(pool.device.index, pool.handle)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=pool.capturing, capture_error_mode="thread_local"):
        torch.zeros(1, device=pool.device)  # capturing anything ends it for the generator


@contextlib.contextmanager
def _waiting_noticed() -> Iterator[None]:
    """Raises Unfit afterwards if the CPU waited for the GPU inside."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    waits = [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
    if waits:
        raise Unfit(f"it waits for the GPU ({waits[0].filename}:{waits[0].lineno})")


_recording: Final = threading.local()


@contextlib.contextmanager
def _preparing() -> Iterator[None]:
    """Inside, models do not replay, and autocast keeps no copies of weights: a graph would read them when they are
    gone."""
    cached = torch.is_autocast_cache_enabled()
    _recording.active = True
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        _recording.active = False


class Recording:
    """A captured call."""

    known: _Latest | None = None
    """How the next call of its kind is recognised, if that is known."""

    def __init__(
        self, module: nn.Module, forward: Forward, args: Sequence[Any], kwargs: dict[str, Any],
        lent: Sequence[torch.Tensor], pool: Pool,
    ) -> None:  # fmt: skip
        """Captures forward(module, *args, **kwargs), which may read tensors that are `lent` to it. Raises Unfit."""
        leaves: list[torch.Tensor] = []
        flatten([args, kwargs], leaves)
        device = pool.device
        self._pool, self._graph = pool, Graph(pool)
        overwritten = [tensor for tensor in lent if not isinstance(tensor, nn.Parameter)]  # perhaps
        # not tensors of the inference mode that the caller may be in: those may not be overwritten outside of it
        with torch.inference_mode(False), torch.no_grad(), unchanged(module, tensors=overwritten), _preparing():
            self._buffers = [_buffer(leaf) for leaf in leaves]
            buffers = iter(self._buffers)
            args, kwargs = map_tensors((tuple(args), kwargs), lambda _: next(buffers))
            versions, draws = self._versions(), Draws(module)
            before: dict[str, Any] = {}
            self._graph.warm_up(lambda: before.update(results=forward(module, *args, **kwargs)))
            if versions != self._versions():
                raise Unfit("it overwrites an argument")
            self._draws: list[Callable[[], Any]] = []
            if draws.any():  # a replay would have the captured ones, wherever they were drawn
                with recapture.as_eager():
                    again = draws_without_readers(lambda: forward(module, *args, **kwargs))
                if again is None or draws.of_its_own():
                    raise Unfit("it draws random numbers")
                self._draws = again
            with stream_capture.keeping() as self._kept:
                results = self._graph.capture(lambda: forward(module, *args, **kwargs))
        self._shared = _that_live_on(before["results"], results)
        kept = [*self._buffers, *module.parameters(), *module.buffers(), *lent]
        storages = {tensor.untyped_storage().data_ptr() for tensor in kept}
        copies: dict[int, Callable[[], torch.Tensor]] = {}

        def check(result: torch.Tensor) -> torch.Tensor:
            if result.device != device:
                raise Unfit(f"a result is on {result.device}")
            if result.numel() and result.untyped_storage().data_ptr() in storages:
                raise Unfit("a result is a view of an argument, a parameter or a buffer")
            copies.setdefault(id(result), _copying(result))
            return result

        self._results = map_tensors(results, check, shared=self._shared)
        self._copies = copies
        """What copies each tensor among the results, by its id: a tensor may be among them more than once."""
        self._copy_arguments = _copying_into(self._buffers)

    def _versions(self) -> list[int]:
        return [buffer._version for buffer in self._buffers]

    def replay(self, leaves: list[torch.Tensor]) -> Any:
        """The results for the tensors of another call of this kind."""
        with torch.no_grad():
            self._pool.use(self._buffers)
            if self._copy_arguments is None or not self._copy_arguments(leaves):
                _overwrite(self._buffers, leaves)
            for draw in self._draws:
                draw()
            self._graph.replay()
            copies = {name: copy() for name, copy in self._copies.items()}
        return map_tensors(self._results, lambda result: copies[id(result)], shared=self._shared)


# ------------------------------------------------------------------------------------------- the model


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


_END: Final = object()


class _State:
    """What graphs depend on in the model: where its tensors lie, and that no Python must run for its modules.

    `lent` are tensors that a call reads where they lie although they are arguments.
    """

    def __init__(self, module: nn.Module, lent: Sequence[torch.Tensor], lends: bool) -> None:
        modules = list(module.modules())
        self._children = modules[1:]
        # Dynamo's graphs have no mode: what depends on one is an argument of their operators
        self._attributes = [vars(item) for item in modules if not (lends and isinstance(item, fx.GraphModule))]
        # the module's own hooks run around its forward
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
        """For the thread's modes on which dispatch keys depend: all tensors as they were."""
        self._unfit = self._why_unfit(module)

    # read at every call, of hundreds of tensors and modules: loops in C

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
        """Whether members and hooks are the same objects, and all tensors lie where they did, as they did.

        Once that was found, one call into C compares them. It sees more than matters here (requires_grad, the thread's
        dispatch keys): where it says no, everything is read.
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
            with contextlib.suppress(FxfuseError, build.NotBuilt):  # everything is read then
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

    def has_modes(self) -> bool:
        """Whether all modules are in the modes that they were in."""
        return self._read_modes() == self._modes

    def holds(self, lent: Sequence[torch.Tensor]) -> bool:
        """Whether all is as it was."""
        return (
            self.has_modes()
            and len(lent) == len(self._lent)
            and all(map(operator.is_, lent, self._lent))
            and self._has_tensors()
        )

    def kind(
        self, recording: Recording, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: Sequence[torch.Tensor]
    ) -> _Latest | None:
        """What recognises a call like this one, of which there is a recording; None if not all can be asked at once."""
        is_plain = all(arg is None or type(arg) in (*_TENSORS, *_CONSTANTS) for arg in (*args, *kwargs.values()))
        if not (is_plain and self.tensors and self._are_plain):
            return None
        try:
            guard = Guard([*self.tensors, *leaves], [*self._tables, *self._hooks])
        except (FxfuseError, build.NotBuilt):
            return None
        return _Latest(recording, guard, self, args, kwargs)

    def check(self, leaves: Sequence[torch.Tensor]) -> torch.device:
        """The device of the model and of a call's tensors. Raises Unfit if they cannot be on one graph."""
        if self._unfit is not None:
            raise Unfit(self._unfit)
        tensors = [*self.tensors[:1], *leaves]
        for tensor in tensors:
            if not _on_gpu(tensor) or tensor.device != tensors[0].device:
                raise Unfit(f"an argument is on {tensor.device}")
        if not tensors:
            raise Unfit("neither the model nor its arguments have tensors")
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*leaves, *self._parameters)):
            raise Unfit("it is called with gradients; torch.no_grad() and torch.inference_mode() switch them off")
        return tensors[0].device


class _Latest:
    """A kind of call, recognised by one call into C (guard.h) and few questions beside it."""

    def __init__(
        self, recording: Recording, guard: Guard, state: _State, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """`guard`: of the model's tensors, as `state` has them, and those of this call, as they are now."""
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
        self._with_gradients = torch.is_grad_enabled()

    def leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
        """The tensors among the arguments, if they and all else are as they were."""
        if kwargs or self._names:
            if tuple(kwargs) != self._names:
                return None
            args = (*args, *kwargs.values())
        if len(args) != self._count or torch.is_grad_enabled() != self._with_gradients:
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
    """Whether somebody wants to see the operators that a call runs: a replay runs none."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or _is_watched_beyond_keys(stream_capture.is_underway)
    )


def _is_watched_beyond_keys(is_capturing: Callable[[], bool]) -> bool:
    """The same, by somebody of whom the thread's dispatch keys, which guards compare, say nothing."""
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
"""What else decides which kernels torch's libraries run."""


def _switches() -> Key:
    autocast = torch.is_autocast_enabled()
    return (
        tf32_allowed("matmul"), tf32_allowed("conv2d"), autocast_dtype("cuda") if autocast else None,
        torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(),
        *[read() for read in _LIBRARY_SWITCHES],
    )  # fmt: skip


class _Split:
    """Which arguments of one of Dynamo's graphs are parameters and buffers: those that lie where they are for good."""

    def __init__(self, args: Sequence[Any]) -> None:
        """Of a first call: Dynamo marks them, and each argument is always of one kind."""
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
        """`forward` as a function of the other arguments."""

        def call(module: nn.Module, *others: Any) -> Any:
            given = list(args)
            for place, other in zip(self._others, others, strict=True):
                given[place] = other
            return forward(module, *given)

        return call


class Replays:
    """The graphs of one model."""

    def __init__(self, lends: bool = False) -> None:
        """Of a model whose parameters and buffers are arguments, if it `lends` them: that of one of Dynamo's graphs."""
        self._lends = lends
        self._split: _Split | None = None
        self._lock = threading.RLock()
        self._state: _State | None = None
        self._pool: Pool | None = None
        self._latest: _Latest | None = None
        self._met: set[Key] = set()
        self._found: dict[Key, Recording | Unfit] = {}
        self.refused: Counter[str] = Counter()
        """Why calls ran without a graph, and how many did."""

    def _recorded_again(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Recording, list[Any]] | None:
        """The recording of the call before and this call's tensors, if this one is of the same kind."""
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
        """Those of the same model from now on, without any graph yet."""
        return Replays(self._lends)

    def call(self, module: nn.Module, forward: Forward, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """forward(module, *args, **kwargs), replayed if that is possible."""
        if getattr(_recording, "active", False):
            return forward(module, *args, **kwargs)
        with self._lock:
            again = self._recorded_again(args, kwargs)
            if again is not None:
                return again[0].replay(again[1])
        if not _is_watched():
            with self._lock:  # buffers are in use from the copies into them to those of the results
                leaves: list[torch.Tensor] = []
                try:
                    recording = self._recording(module, forward, args, kwargs, leaves, at_once=False)
                except Unfit as unfit:
                    self.refused[str(unfit)] += 1
                else:
                    if recording is not None:
                        self._remember(recording, args, kwargs, leaves)
                        return recording.replay(leaves)
        return forward(module, *args, **kwargs)

    def _remember(
        self, recording: Recording, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: list[torch.Tensor]
    ) -> None:
        """Lets the next call of this kind be recognised at once."""
        self._latest = None
        if self._lends or self._state is None:
            return
        if recording.known is None:
            recording.known = self._state.kind(recording, args, kwargs, leaves)
        self._latest = recording.known

    def prepare(
        self, module: nn.Module, forward: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> str | None:
        """Captures forward(module, *args, **kwargs) now; the reason if that is not possible."""
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
        """The recording for this kind of call; None if it has not been met before. Appends its tensors to `leaves`."""
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
            if self._pool is None or self._pool.device != device:
                self._pool = Pool(device)
            found = self._found[key] = _record(module, forward, args, kwargs, lent, self._pool)
        if isinstance(found, Unfit):
            raise found
        return found


def _record(
    module: nn.Module, forward: Forward, args: Sequence[Any], kwargs: dict[str, Any], lent: Sequence[torch.Tensor],
    pool: Pool,
) -> Recording | Unfit:  # fmt: skip
    logger.info("fxfuse: a CUDA graph of %s is captured", type(module).__name__)
    try:
        return Recording(module, forward, args, kwargs, lent, pool)
    except Unfit as unfit:
        return unfit
    except Exception as error:  # of the model (its call will raise it again), or of what cannot be captured
        cause = error.__context__ or error  # ending a failed capture raises another one
        text = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        return Unfit(f"capturing it fails: {text}")
