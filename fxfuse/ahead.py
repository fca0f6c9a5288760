"""Compiles ahead: while a graph's first call waits for one region's kernels, the kernels of later regions compile.

A call reaches one region after another, and asks for a region's kernels when it gets there. So at the first region that
has none, the graph is run once on fake tensors, which have shapes, strides, dtypes and devices, but no data. In this
run each fused operator reports its problem (`Ahead.note`), and the problem's kernels are compiled in the background.
The call itself goes on as usual, and takes the compiled kernels from there (`Ahead.draft`).

If the graph cannot run without data (sizes that depend on values), this run ends there. The regions behind that place
compile when the call gets there.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fxfuse import build
from fxfuse.problem import Draft, Problem, TensorMeta

logger = logging.getLogger("fxfuse")

WAITING: Final = build.MOST_OF_A_UNIT
"""Problems per processor whose kernels are requested at once. Kernels that wait for a compiler are compiled in one
unit, so enough of them should wait."""

_calls: Final = threading.local()


class Ahead:
    """The problems of one call, as far as they are foreseen."""

    def __init__(self, without_data: Callable[[], Any]) -> None:
        self._without_data = without_data
        self._drafts: dict[Problem, Future[Draft]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._make: Callable[[Problem, bool], Draft]
        self.is_looking = False
        """Whether the graph is running without data now."""

    @property
    def has_begun(self) -> bool:
        return self._pool is not None

    def draft(self, problem: Problem, strict: bool, make: Callable[[Problem, bool], Draft]) -> Draft:
        """The result of make(problem, strict), perhaps made in the background already. The first call looks ahead."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(WAITING * build.PROCESSORS, thread_name_prefix="fxfuse")
            self._make = make
            self.note(problem, strict)
            self._look()
        foreseen = self._drafts.get(problem)
        return make(problem, strict) if foreseen is None else foreseen.result()

    def note(self, problem: Problem, strict: bool) -> None:
        """Starts to compile the kernels for `problem`."""
        assert self._pool is not None
        if problem not in self._drafts:
            self._drafts[problem] = self._pool.submit(self._make, problem, strict)

    def _look(self) -> None:
        self.is_looking = True
        try:
            self._without_data()
        except Exception as error:  # whatever an operator raises that needs data
            logger.debug("fxfuse: kernels are not foreseen further: %s", error)
        finally:
            self.is_looking = False

    def close(self) -> None:
        """Drops compilations that have not begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def of_call(without_data: Callable[[], Any]) -> Iterator[None]:
    """Inside this context, a graph is called.

    Args:
        without_data: runs the graph on fake tensors (`run_without_data`).
    """
    before = getattr(_calls, "ahead", None)
    _calls.ahead = ahead = Ahead(without_data)
    try:
        yield
    except KeyboardInterrupt:
        ahead.close()  # first, so that no other compilation begins
        if ahead.has_begun:
            build.interrupt()
        raise
    finally:
        _calls.ahead = before
        ahead.close()


def of_this_call() -> Ahead | None:
    """The `Ahead` of the calling thread's innermost `of_call`; None outside of one."""
    return getattr(_calls, "ahead", None)


def run_without_data(
    root: nn.Module, graph: fx.Graph, given: Mapping[fx.Node, Any],
    foresee: Mapping[Any, Callable[[Any, Any, Any], None]],
) -> None:  # fmt: skip
    """Runs `graph` on fake tensors. The model's tensors do not change. Raises what an operator that needs data raises.

    Args:
        root: the module whose submodules the graph calls. Those are torch's own (`program.record.check_graph`).
        given: the values of placeholders and attributes.
        foresee: for functions of the graph, what is called with (arguments, keyword arguments, result) of each call.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        fakes = {node: pytree.tree_map_only(torch.Tensor, mode.from_tensor, value) for node, value in given.items()}
        _WithoutData(root, graph, mode, foresee).run(initial_env=fakes, enable_io_processing=False)


class _WithoutData(fx.Interpreter):
    def __init__(
        self, root: nn.Module, graph: fx.Graph, mode: FakeTensorMode,
        foresee: Mapping[Any, Callable[[Any, Any, Any], None]],
    ) -> None:  # fmt: skip
        super().__init__(root, graph=graph)
        self._mode, self._foresee = mode, foresee

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().call_function(target, args, kwargs)
        if target in self._foresee:
            self._foresee[target](args, kwargs, result)
        return result

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._faked(self.fetch_attr(target))(*args, **kwargs)

    def _faked(self, module: nn.Module) -> nn.Module:
        """A copy of `module` with fake parameters and buffers. An operator on real tensors alone would change those."""
        copy = object.__new__(type(module))
        copy.__dict__.update(module.__dict__)
        for kind in ("_parameters", "_buffers"):
            tensors = module.__dict__[kind]
            copy.__dict__[kind] = {
                name: None if tensor is None else self._mode.from_tensor(tensor) for name, tensor in tensors.items()
            }
        copy.__dict__["_modules"] = {
            name: None if child is None else self._faked(child) for name, child in module._modules.items()
        }
        return copy


def meta_of(fake: torch.Tensor) -> TensorMeta:
    """The meta of the tensor that `fake` stands for. torch's allocators align memory to at least 64 bytes."""
    alignment = math.gcd(16, fake.storage_offset() * fake.element_size()) if fake.device.type == "cuda" else 16
    return TensorMeta.of(fake, fake.device, alignment)
