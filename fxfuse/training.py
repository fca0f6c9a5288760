"""The training steps (training_step.py) of one graph: which calls they run, and when one is made.

Calls that need gradients come in. The second call of a kind (shapes, dtypes, which tensors want gradients, autocast) is
traced (joint.py).

Whoever captures a step as a CUDA graph (torch.cuda.graph, torch.cuda.make_graphed_callables) captures the programs.
Nothing is traced during a capture: a kind of call that has no step by then is captured as torch runs it, with a
warning.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxfuse import build, checkpoints, functional, progress, recapture, stream_capture
from fxfuse.errors import FxfuseWarning, first_line
from fxfuse.garbage import uncollected
from fxfuse.hooks import is_in_parts, keep_otherwise
from fxfuse.joint import joint_of
from fxfuse.locks import free_in_children
from fxfuse.program import MOST_KEPT, are_plain, described, sources
from fxfuse.program.binding import Binding, Bound, Repeats
from fxfuse.program.leaves import Leaves
from fxfuse.program.record import check_graph
from fxfuse.program.values import PLAIN, Refused, device_of
from fxfuse.training_step import GIVEN, Returned, TrainingStep, first_of, settings_of

logger = logging.getLogger("fxfuse")

CALLS_BEFORE_CAPTURE: Final = 4
"""Steps of one kind after which both graphs have programs, if fx could trace the model whole."""


class Training:
    """The training steps of one graph."""

    def __init__(
        self, root: nn.Module, graph: fx.Graph, fused: Callable[..., nn.Module], cuda_graphs: bool = False
    ) -> None:
        """
        Args:
            graph: the captured graph, of torch's operations.
            fused, cuda_graphs: as for TrainingStep.
        """
        self._root, self._captured, self._fused, self._cuda_graphs = root, graph, fused, cuda_graphs
        self._lock = free_in_children(threading.RLock())
        self._begin()

    def _begin(self) -> None:
        """Resets everything, as if there had been no call. The graph's modules are taken as they are now."""
        self.reason: str | None = None
        """Why the graph has no steps; None while it may have some."""
        self.steps: list[TrainingStep] = []
        self.were_in_parts = False
        """Whether a call had tensors of which each process holds a part. torch computes such calls."""
        self._repeats = Repeats()
        self.captured_without_step = 0
        """The number of calls that were captured in somebody's CUDA graph as torch runs them."""
        try:
            self._graph = checkpoints.inlined(self._root, self._captured)
            check_graph(self._root, self._graph, with_gradients=True)
            self._binding = Binding(self._root, self._graph)
            self._leaves = Leaves(self._binding.modules)
        except Refused as refused:
            self.reason = str(refused)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as None, as programs are."""
        return type(None), ()

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of forward(*args, **kwargs), by a step if the call needs gradients and its kind has one."""
        if self.reason is not None or functional._observed(profiled=False) or _is_intercepted():
            return forward(*args, **kwargs)
        bound = self._binding.of(args, kwargs)
        if bound is None or not functional._needs_gradient(bound.tensors):
            return forward(*args, **kwargs)
        step = self._step_for(bound)
        if step is None or not self._leaves.rest_is_as_before():
            if not self._leaves.are_as_before():  # for example, a dropout has another probability
                self._begin()
                return self.call(forward, args, kwargs)
            if self.steps and not self.steps[0].guard.tables_hold():  # equal objects; all steps note them together
                for each in self.steps:
                    each.guard.note_tables()
                step = self._step_for(bound)
        if step is None and _may_have_step(bound):
            if stream_capture.is_captured(bound.tensors):
                self._tell_of_capture()
                return forward(*args, **kwargs)
            waits = recapture.is_waiting()
            kind = self._repeats.look(lambda: _kind(bound), MOST_KEPT - len(self.steps), stays=waits)
            if kind is not None and kind.results is not None:
                step = None if waits else self._made(bound, kind.results)
            elif kind is not None:
                result = forward(*args, **kwargs)
                kind.results = _returned(result, bound.tensors)
                self._repeats.keep(kind)  # calls that overlap would forget each other's kinds for ever
                return result
        if step is None and not self.were_in_parts:
            self.were_in_parts = any(map(is_in_parts, bound.tensors))
        return forward(*args, **kwargs) if step is None else step(bound.tensors)

    def _step_for(self, bound: Bound) -> TrainingStep | None:
        return next((step for step in self.steps if step.is_for(bound)), None)

    def _tell_of_capture(self) -> None:
        """Warns that a capture gets torch's own forward and backward, which every replay then computes."""
        self.captured_without_step += 1
        warnings.warn(
            f"fxfuse: a training step of {type(self._root).__name__} is captured as a CUDA graph, and fxfuse has none "
            f"for such calls yet: run {CALLS_BEFORE_CAPTURE} steps of the same shapes, dtypes and modes before the "
            "capture.\nThe graph computes what torch computes.", FxfuseWarning, stacklevel=2,
        )  # fmt: skip

    @uncollected()
    def _made(self, bound: Bound, returned: list[Returned | None]) -> TrainingStep | None:
        """A new step for calls of this kind. If there can be none, None, and `reason` says why."""
        tensors, binding = bound.tensors, self._binding
        device = device_of(tensors)
        assert device is not None, "others have no step"
        build.begin(sources(device))  # the trace takes longer
        with self._lock:
            try:
                attributes = dict(zip(binding.paths, bound.attributes, strict=True))
                given = [tensors[at] for at in first_of(tensors)]
                with progress.steps("capture", 1, f"a training step of {type(self._root).__name__}"):
                    joint = joint_of(self._root, self._graph, binding.values(bound), attributes, given)
                step = TrainingStep(joint, self._fused, bound, returned, self._leaves.tables, self._cuda_graphs)
            except Refused as refused:
                self.reason = str(refused)
                logger.info("fxfuse: gradients come from torch: %s", self.reason)
                return None
            except Exception as error:
                self.reason = first_line(error)
                logger.warning("fxfuse: gradients come from torch", exc_info=error)
                return None
            self._repeats.count_anew()
            self.steps = [step, *self.steps][:MOST_KEPT]
            return step


def _may_have_step(bound: Bound) -> bool:
    """Whether steps support a call's tensors and other arguments."""
    return (
        are_plain(bound.tensors, bound.constants)
        and all(map(torch.numel, bound.tensors))  # for empty tensors torch's operators and traces differ in shapes
    )


def _kind(bound: Bound) -> Any:
    """A call's kind, for comparison: its calls share a step."""
    device = device_of(bound.tensors)
    assert device is not None, "others may have no step"
    return list(map(described, bound.tensors)), bound.constants, settings_of(device)


def _is_intercepted() -> bool:
    """Whether a dispatch mode, a transformation or saved-tensor hooks intercept a call. Autocast does not count."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or keep_otherwise()
    )


def _returned(result: Any, tensors: Sequence[torch.Tensor]) -> list[Returned | None]:
    """What a call with these tensors returned. None for a result that is no tensor."""
    numbers: dict[int, int] = {each.untyped_storage()._cdata: GIVEN for each in tensors if _is_strided(each)}
    found: list[Returned | None] = []
    for leaf in pytree.tree_leaves(result):
        if _is_strided(leaf):
            number = numbers.setdefault(leaf.untyped_storage()._cdata, len(numbers))
            found.append(Returned(tuple(leaf.shape), leaf.dtype, leaf.stride(), number))
        else:
            found.append(None)
    return found


def _is_strided(leaf: Any) -> bool:
    return type(leaf) in PLAIN and leaf.layout is torch.strided
