"""Recapture: models that fx cannot trace whole are captured by Dynamo at a later call.

fx traces without knowing the arguments. So a question about a shape or dtype ends a trace: the module runs as Python,
and its children are graphs of their own. Dynamo knows the arguments, and guards what it has learnt from them.

- Capturing takes seconds. So it is done for models that are called again and again, at the third call, or for
  `example_inputs`.
- A model is captured whole or not at all: with graph breaks, a part of it would have run before the rest turned out to
  need Python. If it is not captured, each module inside it that runs as Python is tried in the same way.
- Some models compute something else while they are captured (transformers' PaliGemma hides other positions). So the
  first graph is compared with eager. If they differ, or if only the graph fails, the model stays Python.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxfuse import checkpoints, ops, progress, stream_capture
from fxfuse.errors import first_line
from fxfuse.garbage import uncollected
from fxfuse.hooks import hooks_of, keep_otherwise
from fxfuse.locks import free_in_children
from fxfuse.segments import buckets_now
from fxfuse.state import Draws, unchanged

if TYPE_CHECKING:
    from fxfuse.module import FusedModule
    from fxfuse.replacement import Settings

logger = logging.getLogger("fxfuse")

CALLS_BEFORE: Final = 2
"""Calls that run as Python first. Most models that are called once or twice are not called again."""
FAILURES: Final = 4
"""Calls in a row that Dynamo fails to capture, after which it is not asked again."""

FURTHEST: Final[Mapping[torch.dtype, tuple[float, float]]] = {
    torch.float64: (1e-6, 1e-6), torch.float32: (1e-3, 0.05), torch.bfloat16: (0.1, 0.1), torch.float16: (0.1, 0.1),
}  # fmt: skip
"""The largest distance of a graph's results from eager's, relative to their norm: (on a CPU, on a GPU). On a GPU
layouts decide which of the library's kernels round to TF32. Rounding stays below these limits, another mask exceeds
them."""
ULPS, LIKE_ROUNDING = 128.0, 4
"""A graph's results may be LIKE_ROUNDING times as far from eager's as eager's own results move when inputs change by
ULPS ulp. Detectors of transformers with random weights give the same boxes for 1 ulp, and others for 8 to 128."""
AGAIN: Final = 3
"""Captures for calls of one kind after which Dynamo is not asked again: it would capture every call anew, as where a
hook appends to a list, whose length Dynamo guards."""
_CONSTANTS: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format)


class _Flags(threading.local):
    """This thread's flags. Reading a class's default is six times as fast as not finding an attribute of the thread."""

    now = False
    eager = False
    waiting = False
    made: list[Any] | None = None


_capturing = _Flags()
_numbers = itertools.count()


def is_capturing() -> bool:
    """Whether Dynamo is capturing one of these models. Then fused children are traced as the original modules."""
    return _capturing.now


is_capturing._dynamo_marked_constant = True  # type: ignore[attr-defined]  # no guard: it is asked while tracing only


def is_eager() -> bool:
    """Whether fused children run as the original modules, for a comparison with eager."""
    return _capturing.eager


is_eager._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_waiting() -> bool:
    """Whether one of these models runs as Python for now, before it is captured.

    Meanwhile its children make no programs or training steps: these would be of no use after the capture.
    """
    return _capturing.waiting


is_waiting._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def _said(name: str) -> Iterator[None]:
    """A context in which the flag `name` is set for this thread."""
    before = getattr(_capturing, name)
    setattr(_capturing, name, True)
    try:
        yield
    finally:
        setattr(_capturing, name, before)


def _whole_graphs() -> contextlib.AbstractContextManager[Any]:
    """A context in which Dynamo does not divide graphs for DistributedDataParallel.

    Inside its forward Dynamo would divide a graph at its buckets, and refuses small ones. Here the backward is cut at
    the buckets instead (segments.py), and the forward stays one graph.
    """
    if buckets_now() is None:
        return contextlib.nullcontext()
    return torch._dynamo.config.patch(optimize_ddp=False)  # type: ignore[no-any-return]


def _methods_logging_once() -> frozenset[_Named]:
    """Methods of loggers that do nothing the second time, such as transformers' `warning_once`."""
    methods = vars(logging.Logger).values()
    return frozenset(_Named(method) for method in methods if isinstance(method, functools._lru_cache_wrapper))


@contextlib.contextmanager
def _logged_once(methods: frozenset[_Named]) -> Iterator[None]:
    """A context in which Dynamo leaves out calls of these methods. The forward has run as Python before, so they have
    logged already."""
    if not methods:
        yield
        return
    config: Any = torch._dynamo.config
    name = "ignore_logging_functions" if hasattr(config, "ignore_logging_functions") else "ignore_logger_methods"
    ignored: set[Any] = getattr(config, name)  # the second name is that of older versions
    new = methods - ignored
    ignored |= new
    try:
        yield
    finally:
        ignored -= new


class _Named(str):
    """A name that stands for a function in a set. Dynamo of torch 2.11 copies and sorts the set, and writes it into its
    metrics."""

    function: Any

    def __new__(cls, function: Any) -> _Named:
        named = super().__new__(cls, function.__name__)
        named.function = function
        return named

    def __hash__(self) -> int:
        return hash(self.function)

    def __eq__(self, other: object) -> bool:
        return (other.function if isinstance(other, _Named) else other) is self.function

    def __deepcopy__(self, _: Any) -> _Named:
        return self


def as_eager() -> contextlib.AbstractContextManager[None]:
    """A context in which fused modules run as the original modules."""
    return _said("eager")


class Recapture:
    """The graphs of one model that Dynamo has captured."""

    def __init__(self, root: nn.Module, settings: Settings) -> None:
        self.reason: str | None = None
        """Why Dynamo captured no graph in its last attempt."""
        self._root = weakref.ref(root)
        self._settings = settings
        self._calls = 0
        self._failures = 0
        self._captures = Counter[Any]()
        self._graphs: weakref.WeakSet[FusedModule] = weakref.WeakSet()
        self._run: Callable[..., Any] | None = None
        self._tables: list[Mapping[int, Any]] = []
        self._hooks_then: list[int] = []
        self._logging_once = _methods_logging_once()
        self._lock = free_in_children(threading.RLock())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as None, as programs are."""
        return type(None), ()

    @property
    def graphs(self) -> tuple[FusedModule, ...]:
        """The graphs that exist, for the report."""
        return tuple(self._graphs)

    def hurry(self) -> None:
        """Makes the next call the one that is captured."""
        self._calls = max(self._calls, CALLS_BEFORE)

    def call(self, python: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of python(*args, **kwargs), by a graph of Dynamo's if there is one or it is time for one."""
        if self._failures >= FAILURES or _is_watched((*args, *kwargs.values())) or keep_otherwise():
            return python(*args, **kwargs)
        if self._run is None and stream_capture.is_underway():  # results of a capture cannot be compared
            return python(*args, **kwargs)
        if self._calls < CALLS_BEFORE:
            self._calls += 1
            before = self._literals() if self._calls == CALLS_BEFORE else {}
            with _said("waiting"):
                result = python(*args, **kwargs)
            if self._calls < CALLS_BEFORE:
                return result
            now = self._literals()
            changed = next((name for (module, name), value in before.items() if now.get((module, name)) != value), None)
            if changed is not None:  # Dynamo captures anew for each value, and does not count calls that raise
                self._failures, self.reason = FAILURES, f"its forward sets '{changed}'"
            return result
        if self._run is not None and self._hooks() != self._hooks_then:  # Dynamo does not guard hooks
            self._run, self._calls = None, 0
            return python(*args, **kwargs)
        count = len(self._graphs)
        try:
            with _said("now"), _logged_once(self._logging_once), _whole_graphs():
                if self._run is None:
                    return self._first(python, args, kwargs)
                result = self._run(*args, **kwargs)
        except Exception as error:
            if not _is_dynamos(error):
                raise
            # Unsupported code stays unsupported at the next call; other errors may depend on the arguments
            errors = torch._dynamo.exc  # a UserError: the model asks for a tensor's value
            is_final = isinstance(error, errors.Unsupported | errors.UserError)
            self._failures = FAILURES if is_final else self._failures + 1
            self.reason = first_line(error)
            if self._failures >= FAILURES:  # graphs that Dynamo made before it gave up are not used
                self._graphs.clear()
            logger.info("fxfuse: %s was not captured by Dynamo: %s", type(self._root()).__name__, self.reason)
            return python(*args, **kwargs)  # graphs are whole, so nothing has run yet
        self._failures = 0
        if len(self._graphs) > count:
            self._count_capture(args, kwargs)
        return result

    def _count_capture(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Counts the captures for calls of one kind, and gives up if there are many."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
        kind = torch.is_grad_enabled(), *((each.shape, each.dtype, each.requires_grad) for each in tensors)
        self._captures[kind] += 1
        if self._captures[kind] == AGAIN:
            self._failures, self.reason = FAILURES, "it captures calls of one kind anew again and again"
            self._graphs.clear()
            logger.info("fxfuse: %s runs as Python: Dynamo: %s", type(self._root()).__name__, self.reason)

    @uncollected()
    def _first(self, python: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Eager's result, compared with that of a graph that is captured first.

        The graph runs on copies of the arguments. If they cannot be copied, the graph computes the result, and nothing
        is compared. If the graph draws random numbers, nothing is compared either.
        """
        from fxfuse.module import state_of

        run, copies, root = self._compiled(), _copied(args, kwargs), self._root()
        assert root is not None  # its module calls this
        if copies is None:
            with progress.steps("capture", 1, type(root).__name__):
                return run(*args, **kwargs)
        made: list[Any] = []
        failure: str | None = None
        _capturing.made = made
        try:
            with progress.steps("capture", 1, type(root).__name__), unchanged(root, gradients=torch.is_grad_enabled()):
                draws = Draws(root)
                try:
                    run(*copies[0], **copies[1])
                except _Stopped:
                    pass
                except Exception as error:  # whatever an operation raises
                    if _is_dynamos(error):
                        raise
                    failure = first_line(error)  # its traceback would keep the copies alive
                is_random = draws.any()
        finally:
            _capturing.made = None
        # the second forward of a checkpoint, in the backward, must keep the same tensors as its first
        captured = [state_of(graph).captured.graph for graph in self._graphs]
        has_checkpoints = any(graph is not None and checkpoints.has_any(graph) for graph in captured)
        if has_checkpoints:
            result = python(*args, **kwargs)
        else:
            with as_eager():
                result = root.forward(*args, **kwargs)
        if failure is not None:  # torch's sizes of masked_select are too small where the mask has more dimensions
            self._stay_python(f"Dynamo's graph fails where eager does not: {failure}")
            return result
        apart = 0.0 if is_random else _apart(result, [made, copies])  # copies: arguments may be among the results
        if apart > 1 and apart > LIKE_ROUNDING * self._own_noise(args, kwargs, result):
            self._stay_python(
                f"Dynamo's graph computes something else than eager ({apart:.1f} "
                "times as far apart as rounding explains)"
            )
        return result

    def _stay_python(self, reason: str) -> None:
        self._failures, self.reason = FAILURES, reason
        self._graphs.clear()
        logger.warning("fxfuse: %s runs as Python: %s", type(self._root()).__name__, reason)

    def _own_noise(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
        """How far eager's own results move if the arguments change by `ULPS`: as much as rounding in a deep network.

        A model that picks the best few of many values, as detectors do, may then pick others.
        """
        copies, root = _copied(args, kwargs, by=ULPS), self._root()
        if copies is None or root is None:
            return 0.0
        with unchanged(root, gradients=torch.is_grad_enabled()), as_eager():
            other = root.forward(*copies[0], **copies[1])
        return _apart(result, [other])

    def _literals(self) -> dict[tuple[nn.Module, str], Any]:
        """The attributes of all modules that are numbers, truth values or text."""
        root = self._root()
        assert root is not None  # its module calls this
        return {
            (module, name): value
            for module in root.modules()
            for name, value in vars(module).items()
            if isinstance(value, bool | int | float | str)
        }

    def _hooks(self) -> list[int]:
        """The number of every registered hook. Numbers are never used twice."""
        return list(itertools.chain.from_iterable(filter(None, self._tables)))

    def _compiled(self) -> Callable[..., Any]:
        """The model's forward, compiled by Dynamo with fxfuse as the backend."""
        with self._lock:
            if self._run is None:
                root = self._root()
                assert root is not None  # its module calls this
                self._tables = [table for module in root.modules() for table in hooks_of(module)]
                self._hooks_then = self._hooks()

                def forward(*args: Any, **kwargs: Any) -> Any:
                    return root.forward(*args, **kwargs)

                # Dynamo keeps what it compiles by code object (a few results for each) and in the function's globals.
                # Its tables let each of the two keep the other alive. So this model has its own of both
                names = {"__name__": __name__, "__builtins__": __builtins__, "torch": torch}  # its code may read these
                # Dynamo keeps what it learns about varying sizes by the code's name and line, shared between models
                code = forward.__code__.replace(co_name=f"forward_{next(_numbers)}")
                own = types.FunctionType(code, names, closure=forward.__closure__)
                weakref.finalize(self, torch._C._dynamo.eval_frame.reset_code, own.__code__).atexit = False
                backend = functools.partial(_fused, self._settings, weakref.ref(self._graphs))
                ops.keep_in_dynamos_graphs()
                self._run = torch.compile(own, backend=backend, fullgraph=True)
            return self._run


def _fused(
    settings: Settings, graphs: weakref.ref[weakref.WeakSet[FusedModule]],
    gm: fx.GraphModule, example_inputs: Sequence[Any],
) -> Callable[..., Any]:  # fmt: skip
    """The backend for `torch.compile`. Dynamo keeps it for ever, so it must not hold the model."""
    from fxfuse.backend import fused_graph, prepared
    from fxfuse.module import drop_source_with

    drop_source_with(type(gm).forward)
    fused = fused_graph(gm, settings)
    known = graphs()
    if known is not None:
        known.add(fused)
    call = prepared(fused)

    def run(*inputs: Any) -> Any:
        results = call(*inputs)
        made = _capturing.made
        if made is not None:
            made.append(results)
            raise _Stopped
        return results

    return run


class _Stopped(Exception):
    """Ends a call after its graph has run, before Dynamo applies the forward's side effects on Python objects."""


def _copied(args: Sequence[Any], kwargs: Mapping[str, Any], by: float = 0.0) -> Any:
    """Copies of arguments, which share nothing with them; None if something cannot be copied.

    Args:
        by: the number of ulp by which floating-point tensors are made larger.
    """
    twins: dict[int, torch.Tensor] = {}

    def twin(value: Any) -> Any:
        if isinstance(value, _CONSTANTS):
            return value
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        if id(value) not in twins:
            if type(value) not in (torch.Tensor, nn.Parameter) or torch._debug_has_internal_overlap(value) == 1:
                raise TypeError
            with torch.no_grad():
                new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
                new.copy_(value)
                if by and value.is_floating_point():
                    new.mul_(1 + by * torch.finfo(value.dtype).eps)
            new.requires_grad_(value.requires_grad)
            vars(new).update(vars(value))  # marks for Dynamo are attributes
            twins[id(value)] = new
        return twins[id(value)]

    try:
        return pytree.tree_map(twin, (tuple(args), dict(kwargs)))
    except Exception:  # whatever an object's own copying raises
        return None


def _apart(expected: Any, made: Any) -> float:
    """The largest distance of a graph's results from eager's, as a multiple of `FURTHEST`.

    A graph's results are in another order than eager's. So each of eager's is compared with all of the same shape,
    dtype and device, and the nearest counts.
    """
    from fxfuse.verify import leaves_of

    found = [leaf for leaf in leaves_of(made) if isinstance(leaf, torch.Tensor)]
    worst = 0.0
    for want in leaves_of(expected):
        if isinstance(want, torch.Tensor) and want.dtype in FURTHEST and not want.is_meta:
            kind = want.shape, want.dtype, want.device
            alike = [have for have in found if (have.shape, have.dtype, have.device) == kind]
            apart = min((distance(want, have) for have in alike), default=0.0)
            worst = max(worst, apart / FURTHEST[want.dtype][want.is_cuda])
    return worst


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The distance of two tensors relative to the norm of the first, over elements that are finite in both."""
    finite = one.isfinite() & other.isfinite()
    size, apart = (float(part.detach().double()[finite].norm()) for part in (one, one - other))
    return apart / size if size else apart


def _is_watched(values: Sequence[Any]) -> bool:
    """Whether this call is traced, transformed or observed, so that the model's own operations must run."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or any(isinstance(value, fx.Proxy) for value in values)
    )


def _is_dynamos(error: Exception) -> bool:
    """Whether an error is Dynamo's, because it cannot capture. Errors of the model have other classes."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException) or type(error).__module__.startswith(_CAPTURING)


_CAPTURING: Final = ("torch._dynamo", "torch._subclasses", "torch.fx.experimental")
"""The modules whose errors may leave Dynamo: it computes with fake tensors and symbols for sizes."""
