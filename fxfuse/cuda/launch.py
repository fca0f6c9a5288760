"""What a call does once its plan is known: allocate the result, put a kernel on the current stream, switch devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import torch

from fxfuse import build, events
from fxfuse.cuda import gpu
from fxfuse.cuda.kernel import Kernel
from fxfuse.errors import LaunchError
from fxfuse.layout import empty
from fxfuse.operands import OperandPlan
from fxfuse.problem import ByAddress, Problem, Run


def _plain_empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return empty(shape, strides, dtype, _CUDA)


_CUDA: Final = torch.device("cuda")


allocate: Final[Callable[..., torch.Tensor]] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", _plain_empty_strided
)
"""allocate(shape, strides, dtype): a tensor on the current GPU, without contents.

This is the function that torch.compile's code calls, if torch has it. It does not go through the dispatcher, and so
takes a microsecond less than `empty`. Programs call it directly, as their calls are not recorded.
"""


def empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without contents on the current GPU, or on the described GPU in its place. The call is recorded."""
    tensor = (allocate if gpu.standing_in() is None else _plain_empty_strided)(shape, strides, dtype)
    return events.note_memory(tensor) if events.recording else tensor


Queue: TypeAlias = Callable[..., None]
"""queue(operands, *addresses of the kernel's other tensors): launches the kernel on the current stream of its device.

The caller may free what the kernel reads right afterwards: the allocator reuses memory only for later work of this
stream.
"""


def queue_by_address(problem: Problem, operands: OperandPlan, kernel: Kernel, launch: build.Launch) -> Queue:
    """A Queue whose operands are given as addresses."""
    params, index = kernel.params + operands.packed_strides(), problem.x.device.index
    current_stream = gpu.stream_asked()

    def queue(pointers: Sequence[int], *tensors: int) -> None:
        if events.recording:
            events.note_launch(launch, params, (*tensors, *pointers), kernel.together, kernel.in_place)
        try:
            launch(params, current_stream(index), *tensors, *pointers)
        except RuntimeError as error:
            raise LaunchError(f"{problem.label}: {kernel.name} could not be launched: {error}") from error

    return queue


def queue_tensors(problem: Problem, operands: OperandPlan, kernel: Kernel, launch: build.Launch) -> Queue:
    """A Queue whose operands are given as tensors."""
    by_address, addresses = queue_by_address(problem, operands, kernel, launch), operands.addresses()

    def queue(others: Sequence[torch.Tensor], *tensors: int) -> None:
        pointers, _kept = addresses(others)
        by_address(pointers, *tensors)

    return queue


def on_device(index: int, run: Run) -> Run:
    """`run` with GPU `index` made the current one, because launches go to the current GPU."""
    current_device = gpu.index_asked()

    def there(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, others: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        if current_device() == index:
            return run(x, weight, bias, others)
        with torch.cuda.device(index):
            return run(x, weight, bias, others)

    return there


def by_address_on_device(
    index: int, launch: Callable[[tuple[torch.Tensor, ...], list[int]], torch.Tensor]
) -> ByAddress:
    """`on_device` for a launch by addresses."""
    current_device = gpu.index_asked()

    def there(tensors: tuple[torch.Tensor, ...], addresses: list[int]) -> torch.Tensor:
        if current_device() == index:
            return launch(tensors, addresses)
        with torch.cuda.device(index):
            return launch(tensors, addresses)

    return ByAddress(there)
