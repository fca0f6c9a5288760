"""Captures a call as a CUDA graph, and replays it: the graph, its memory, its arguments and its results.

Arguments are copied into buffers before a replay. A replay overwrites the tensors that the captured call returned.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from fxfuse import build
from fxfuse.errors import FxfuseError
from fxfuse.program import copies
from fxfuse.program.values import ALIGNMENT, alignment, extent

logger = logging.getLogger("fxfuse")

WARM_UP_CALLS: Final = 2


class Unfit(Exception):
    """A call cannot be a graph; the message says why."""


# ------------------------------------------------------------------------------------- arguments, results


class Buffers:
    """The memory in which a graph finds its arguments."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """`tensors`: nobody else needs what is in them."""
        self.tensors = list(tensors)
        self._launch = self._copies_at_once()

    def _copies_at_once(self) -> Callable[[Sequence[torch.Tensor]], bool] | None:
        """Copies into the buffers by one launch, and returns False if it cannot read the tensors where they are.

        None if there is no kernel for that. Then torch copies.
        """
        if not (self.tensors and self.tensors[0].is_cuda):
            return None
        try:
            return copies.launch_of(self.tensors)
        except (FxfuseError, build.NotBuilt) as error:
            logger.info("fxfuse: torch copies arguments: %s", error)
            return None

    @classmethod
    def like(cls, arguments: Sequence[torch.Tensor], are_aligned: bool = True) -> Buffers:
        """Buffers with the arguments' sizes, strides, dtypes and values.

        Args:
            are_aligned: whether their addresses may have a larger alignment than the arguments' (`alignment`). Programs
                are for one.
        """
        tensors = [_empty_like(each, ALIGNMENT if are_aligned else alignment(each)) for each in arguments]
        for tensor, argument in zip(tensors, arguments, strict=True):
            tensor.copy_(argument.detach())
        return cls(tensors)

    def fill(self, arguments: list[torch.Tensor]) -> None:
        """Copies arguments of the same sizes, strides and dtypes into the buffers."""
        if self._launch is not None and self._launch(arguments):
            return
        if len(self.tensors) == 1:
            self.tensors[0].copy_(arguments[0])
        elif self.tensors:
            torch._foreach_copy_(self.tensors, arguments)


def _empty_like(tensor: torch.Tensor, aligned: int) -> torch.Tensor:
    """A tensor with the same sizes, strides and dtype, and with this alignment."""
    shape, strides, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    if aligned == ALIGNMENT:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    memory = torch.empty((aligned + extent(tensor)) // tensor.element_size(), dtype=dtype, device=device)
    return memory.as_strided(shape, strides, aligned // tensor.element_size())


def copying(result: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that returns a copy of the result, with the same strides, as it is at the time of its call."""
    shape, strides = result.shape, result.stride()
    expanded = [size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True)]
    if any(expanded):
        once = copying(result[tuple(slice(0, 1) if repeated else slice(None) for repeated in expanded)])
        return lambda: once().expand(shape)
    if torch.empty_like(result).stride() == strides:  # clone is one call of torch instead of two
        return result.clone
    dtype, device = result.dtype, result.device
    return lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device).copy_(result)


def copying_together(results: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """The same for results of one dtype in one memory. Their copies share memory as they do."""
    if len(results) == 1:
        copy = copying(results[0])
        return lambda: [copy()]
    first = min(int(result.storage_offset()) for result in results)
    end = max(int(result.storage_offset()) + extent(result) // result.element_size() for result in results)
    memory = results[0].as_strided((end - first,), (1,), first)
    shapes = [(result.shape, result.stride(), int(result.storage_offset()) - first) for result in results]

    def copies() -> list[torch.Tensor]:
        copy = memory.clone()
        return [copy.as_strided(*shape) for shape in shapes]

    return copies


# ------------------------------------------------------------------------------------------- one graph


class Pool:
    """The memory that graphs share which are replayed one after another: all of a model's, or those of a step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle = torch.cuda.graph_pool_handle()
        self.capturing = torch.cuda.Stream(device)
        self._used_by = torch.cuda.current_stream(device)
        self._latest_use: tuple[int, int] | None = None

    def use(self, buffers: Sequence[torch.Tensor]) -> None:
        """Makes the current stream wait for the stream that used the graphs last.

        Args:
            buffers: the buffers of one graph. The list must exist as long as the graph, because it is known by its id.
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
    """torch's CUDA graph of one call. Only this class and Pool need a GPU."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, call: Callable[[], Any]) -> None:
        """Runs `call` until everything that happens once is done (compiling, measuring, cuDNN's search).

        Raises Unfit if the CPU waits for the GPU.
        """
        stream = torch.cuda.current_stream(self._pool.device)
        self._pool.capturing.wait_stream(stream)
        with torch.cuda.stream(self._pool.capturing):
            for _ in range(WARM_UP_CALLS):
                call()
            with waiting_noticed() as waits:  # it would fail in a capture, and torch's allocator would not recover
                call()
        stream.wait_stream(self._pool.capturing)
        if waits:
            raise Unfit(waits[0])

    def capture(self, call: Callable[[], Any]) -> Any:
        """Captures `call` and returns its results: tensors that every replay overwrites."""
        pool = self._pool
        stream = torch.cuda.current_stream(pool.device)
        with torch.cuda.device(pool.device):
            try:
                # other threads may go on allocating and synchronising
                with (
                    _own_workspaces(),
                    torch.cuda.graph(self._graph, pool.handle, pool.capturing, capture_error_mode="thread_local"),
                ):
                    return call()
            except Exception:
                torch.cuda.set_stream(stream)  # which torch.cuda.graph has not done if it could not begin
                _recover(pool)
                raise

    def replay(self) -> None:
        self._graph.replay()  # on the current stream of the device of its capture, whichever device is current


def free_memory(device: torch.device) -> float:
    """Bytes that can be allocated on a GPU, of the driver and of torch's allocator."""
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@contextlib.contextmanager
def _own_workspaces() -> Iterator[None]:
    """Inside, cuBLAS allocates new workspaces, from the graph's pool. No later call gets them.

    torch keeps a workspace for each stream. A graph would go on writing into that of its warm-up, which others may
    free: every capture by torch.compile frees it, and in newer torch the end of any graph captured on this stream.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _recover(pool: Pool) -> None:
    """Cleans up after a failed capture, in which torch's allocator and its random generator go on capturing."""
    with contextlib.suppress(Exception):  # torch may have done this
        torch._C._cuda_endAllocateToPool(pool.device.index, pool.handle)
        torch._C._cuda_releasePool(pool.device.index, pool.handle)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=pool.capturing, capture_error_mode="thread_local"):
        torch.zeros(1, device=pool.device)  # any completed capture ends the generator's


@contextlib.contextmanager
def waiting_noticed() -> Iterator[list[str]]:
    """Gives a list that contains, after the block, a reason for each time that the CPU waited for the GPU inside."""
    waits: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    waits += [
        f"it waits for the GPU ({warning.filename}:{warning.lineno})"
        for warning in caught
        if "synchronizing CUDA operation" in str(warning.message)
    ]


_recording: Final = threading.local()


@contextlib.contextmanager
def preparing() -> Iterator[None]:
    """Inside, models do not replay, and autocast keeps no copies of weights: a graph would read them after they are
    freed."""
    cached = torch.is_autocast_cache_enabled()
    _recording.active = True
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        _recording.active = False


def is_preparing() -> bool:
    """Whether this thread is inside of `preparing`."""
    return getattr(_recording, "active", False)


def reason_of(error: Exception) -> str:
    """Why a capture failed that raised this error, in a line."""
    cause = error.__context__ or error  # ending a failed capture raises another exception
    text = (str(cause).strip() or type(cause).__name__).splitlines()[0]
    return f"capturing it fails: {text}"
