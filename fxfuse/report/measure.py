"""Measures, on request, a call of the model and of its eager form, step by step, and the device's peak speeds."""

from __future__ import annotations

import bisect
import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import fx, nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import _pytree as pytree

from fxfuse.benchmark import benchmark
from fxfuse.module import FusedModule, is_fused, state_of
from fxfuse.problem import TensorMeta
from fxfuse.program.binding import Binding
from fxfuse.program.values import Refused, Step
from fxfuse.recapture import as_eager
from fxfuse.state import unchanged

CALLS_BEFORE: Final = 6
"""Calls before anything is measured. Dynamo captures at the third, and each graph records its own second call."""
PROFILED: Final = 5
"""Calls that are profiled. The shortest counts."""
SECONDS: Final = 1.0
"""The time for which whole calls, eager and fused, are timed."""
_COPIED_BYTES: Final = {"cuda": 1 << 28, "cpu": 1 << 26}
"""The size of the copy that measures bandwidth: more than caches hold."""
_PRODUCT: Final = {"cuda": 4096, "cpu": 512}
"""Rows and columns of the matrices whose product measures speed."""
_PEAK_SECONDS: Final = 0.3
"""The time for which each peak is measured."""
_ANNOTATION: Final = "fxfuse step "


@dataclass(frozen=True)
class Span:
    """A kernel, operator or launch."""

    name: str
    start: float
    """Seconds since the first span of its track began."""
    seconds: float
    graph: str = ""
    nodes: tuple[str, ...] = ()
    """The nodes of that graph that it computes; empty if they are not known."""
    ours: bool = False
    """Whether it is a kernel of fxfuse."""


@dataclass(frozen=True)
class Track:
    """What one call did, in order."""

    name: str
    spans: tuple[Span, ...]
    is_timed: bool = True


@dataclass(frozen=True)
class Measured:
    """What was measured of a model, and of its device."""

    device: str
    eager: float
    """Median seconds of a call."""
    fused: float
    tracks: tuple[Track, ...]
    bandwidth: float
    """Bytes that the fastest copy reads and writes in a second."""
    speeds: tuple[tuple[str, float], ...]
    """Floating-point operations a second of torch's fastest matrix product, for each dtype ("float32")."""
    values: Seen
    """The nodes' values in a call, as far as they could be noted."""


def warm_up(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Calls the model with copies of the arguments until it runs as it will from then on."""
    args, kwargs = _copies(args, kwargs)
    with unchanged(model):
        for _ in range(CALLS_BEFORE):
            model(*args, **kwargs)


def _copies(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    copies: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.detach().clone(), (tuple(args), dict(kwargs))
    )
    return copies


def measured(
    model: nn.Module, graphs: Sequence[tuple[str, FusedModule]], args: Sequence[Any], kwargs: Mapping[str, Any],
    dtypes: Iterable[torch.dtype],
) -> Measured:  # fmt: skip
    """Calls the model, which is warmed up, and its eager form with copies of the arguments, and measures both.

    Args:
        model: what optimize() returned, or torch.compile made.
        graphs: those of its graphs whose programs are to be watched, with their names.
        dtypes: the dtypes of the matrix products whose speed is to be measured.
    """
    args, kwargs = _copies(args, kwargs)
    eager = _Eager(model)
    times = benchmark(eager, model, args, ("eager",), kwargs=kwargs, seconds=SECONDS)
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    device = next((tensor.device for tensor in (*tensors, *model.parameters())), torch.device("cpu"))
    with unchanged(model):
        steps: list[tuple[str, Step]] = []
        before = _profiled(lambda: eager(*args, **kwargs), device, steps)
        with _watched(graphs, steps):
            after = _profiled(lambda: model(*args, **kwargs), device, steps)
        values = values_in_call(model, args, kwargs)
    tracks = Track("eager", before), Track("fxfuse", after)
    speeds = tuple((str(dtype).removeprefix("torch."), speed_of(device, dtype)) for dtype in dict.fromkeys(dtypes))
    fused = times.median("fxfuse")
    return Measured(times.device, times.median("eager"), fused, tracks, bandwidth_of(device), speeds, values)


Seen: TypeAlias = dict[FusedModule, dict[str, Any]]
"""For each graph, its nodes' values by name; tensors as TensorMeta."""


def values_in_call(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Seen:
    """The nodes' values of a model's own graph, and of the graphs that it calls, in a call that runs node by node.

    Empty for graphs that Dynamo made, which note their tensors, and for modules that run as Python, children included.
    """
    found: Seen = {}
    if isinstance(model, FusedModule):
        _run_noting(model, args, kwargs, found)
    return found


def _run_noting(module: FusedModule, args: Sequence[Any], kwargs: Mapping[str, Any], found: Seen) -> Any:
    """module(*args, **kwargs), node by node if its graph takes such arguments."""
    state = state_of(module)
    bound = None
    if state.captured.graph is not None:
        with contextlib.suppress(Refused):  # an attribute that is no tensor
            bound = Binding(state.captured.root, module._graph).of(tuple(args), dict(kwargs))
    if bound is None:
        return module(*args, **kwargs)
    return _Noting(module, found).run(*bound.arguments)


class _Noting(fx.Interpreter):
    """Runs a graph, and notes its nodes' values."""

    def __init__(self, module: FusedModule, found: Seen) -> None:
        super().__init__(module)
        self._found = found
        self._values = found.setdefault(module, {})

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if type(value) is torch.Tensor and value.layout is torch.strided:
            self._values[n.name] = TensorMeta.of(value, value.device)
        elif isinstance(value, bool | int | float):
            self._values[n.name] = value
        return value

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module: Any = self.submodules[target]
        return _run_noting(module, args, kwargs, self._found) if is_fused(module) else module(*args, **kwargs)


def steps_of(graphs: Sequence[tuple[str, FusedModule]]) -> Track:
    """The steps of a model's programs, in order, untimed."""
    spans: list[Span] = []
    for name, module in graphs:
        programs = state_of(module).programs
        for step in programs.programs[0].steps if programs is not None and programs.programs else ():
            spans.append(Span(step.what, float(len(spans)), 1.0, name, step.nodes, step.is_launch))
    return Track("fxfuse", tuple(spans), is_timed=False)


class _Eager(nn.Module):
    """The model as it was before optimize() or torch.compile."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.model, FusedModule):
            return self.model._orig_mod(*args, **kwargs)  # type: ignore[operator]
        with as_eager():
            return state_of(self.model).captured.root.forward(*args, **kwargs)


@contextlib.contextmanager
def _watched(graphs: Sequence[tuple[str, FusedModule]], steps: list[tuple[str, Step]]) -> Iterator[None]:
    """A context in which the programs' steps run within ranges that a profiler notes, numbered by place in `steps`."""

    def around(graph: str) -> Callable[[Step], contextlib.AbstractContextManager[Any]]:
        def note(step: Step) -> contextlib.AbstractContextManager[Any]:
            steps.append((graph, step))
            return record_function(f"{_ANNOTATION}{len(steps) - 1}")

        return note

    with contextlib.ExitStack() as stack:
        for name, module in graphs:
            programs = state_of(module).programs
            for program in programs.programs if programs is not None else ():
                stack.enter_context(program.watched(around(name)))
        yield


def _profiled(call: Callable[[], Any], device: torch.device, steps: Sequence[tuple[str, Step]]) -> tuple[Span, ...]:
    """The spans of the shortest of a few calls."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    found: list[tuple[Span, ...]] = []
    call()
    for _ in range(PROFILED):
        with profile(activities=activities) as seen:
            call()
            if on_gpu:
                torch.cuda.synchronize(device)
        found.append(spans_of(seen.events() or (), steps, on_gpu))
    return min(found, key=lambda spans: spans[-1].start + spans[-1].seconds if spans else 0.0)


def spans_of(events: Iterable[Any], steps: Sequence[tuple[str, Step]], on_gpu: bool) -> tuple[Span, ...]:
    """A profiler's events as spans: kernels on a GPU, the outermost operators on a CPU; a program's steps among them.

    Args:
        events: torch.profiler's FunctionEvents.
        steps: the steps of the ranges, with the names of their graphs. A range's name ends with its step's number.
    """
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    there = [event for event in events if event.device_type == kind and (on_gpu or _is_operator(event.name))]
    there.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    ranges = [event for event in there if event.name.startswith(_ANNOTATION)]
    starts = [event.time_range.start for event in ranges]
    shown = [event for event in there if event not in ranges] if on_gpu else _outermost(there)
    origin = min((event.time_range.start for event in shown), default=0.0)
    spans: list[Span] = []
    for event in shown:
        begin, end = event.time_range.start, event.time_range.end
        around = ranges[bisect.bisect_right(starts, begin) - 1] if starts and starts[0] <= begin else None
        if around is None or around.time_range.end < begin:
            spans.append(Span(kernel_name(event.name), (begin - origin) * 1e-6, (end - begin) * 1e-6))
            continue
        graph, step = steps[int(around.name.removeprefix(_ANNOTATION))]
        name = step.what if event is around or step.is_launch else kernel_name(event.name)
        spans.append(Span(name, (begin - origin) * 1e-6, (end - begin) * 1e-6, graph, step.nodes, step.is_launch))
    return tuple(spans)


def kernel_name(name: str) -> str:
    """A kernel's name for people, without parameters and template arguments, but with an elementwise kernel's function.

    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, …>(int, …)" is
    "vectorized_elementwise_kernel: CUDAFunctor_add". Other names, such as those of operators, stay as they are.
    """
    if "<" not in name and "(" not in name:
        return name
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    own = re.split(r"[<(]", plain, maxsplit=1)[0].removeprefix("at::native::").strip()
    computes = [found for found in _FUNCTORS.findall(plain) if found not in (own, *_WRAPPERS)]
    return f"{own}: {computes[-1]}" if own.endswith(_ELEMENTWISE) and computes else own


_ELEMENTWISE: Final = ("elementwise_kernel", "reduce_kernel")
_FUNCTORS: Final = re.compile(r"\b\w*Functor\w*|\b\w*Ops\b|\blaunch_\w+|\b\w+_kernel_(?:cuda|impl)\b")
_WRAPPERS: Final = ("BinaryFunctor", "AUnaryFunctor", "BUnaryFunctor", "launch_clamp_kernel_impl")


def _is_operator(name: str) -> bool:
    """Whether an event on a CPU is an operator or a program's step, and not a range that contains some."""
    return "::" in name or name.startswith(_ANNOTATION)


def _outermost(events: Iterable[Any]) -> list[Any]:
    """The events that lie in no other. `events` are in the order of their beginnings."""
    found: list[Any] = []
    for event in events:
        if not found or event.time_range.start >= found[-1].time_range.end:
            found.append(event)
    return found


# ---------------------------------------------------------------------------------------------------------- peaks


def bandwidth_of(device: torch.device) -> float:
    """The most bytes that a copy on the device reads and writes in a second, measured."""
    source = torch.zeros(_COPIED_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES[device.type] / _shortest(lambda: target.copy_(source), device)


def speed_of(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of torch's matrix product, under torch's switches as they are, measured."""
    size = _PRODUCT[device.type]
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _shortest(lambda: torch.mm(one, other), device)


def _shortest(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the fastest call of those that fit into `_PEAK_SECONDS`, of which there is at least one. A call before
    these does not count."""

    def once() -> float:
        if device.type != "cuda":
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    with torch.no_grad():
        call()
        deadline = time.perf_counter() + _PEAK_SECONDS
        best = once()
        while time.perf_counter() < deadline:
            best = min(best, once())
    return best
