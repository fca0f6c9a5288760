"""Copies several tensors by one launch of a kernel of loops. torch's copies take the CPU 10 to 30 us each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fxfuse import build
from fxfuse.cuda import gpu
from fxfuse.cuda import loops as kernels
from fxfuse.program.loops import LARGEST, Body, Unknown, coordinates
from fxfuse.program.text import LoopsKernel
from fxfuse.program.values import ALIGNMENT, Slot, Value


def launch_of(buffers: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool] | None:
    """A function copy(tensors) that copies tensors into the buffers, on the current stream of their GPU.

    The tensors must have the buffers' dtypes, sizes and strides. copy returns False, and copies nothing, if an address
    is not aligned to `ALIGNMENT`.

    Returns None if a buffer cannot be filled in this way, or if one launch cannot copy them all. Raises ToolchainError,
    BuildError.
    """
    found: dict[int, LoopsKernel] = {}
    for number, buffer in enumerate(buffers):
        kernel = _copy(buffer)
        if kernel is None:
            return None
        found[number] = kernel
    if not kernels.fit_together(list(found.values())):
        return None
    order = kernels.ordered(found)
    together = [found[number] for number in order]
    device = buffers[0].device
    launch = build.load(build.Source(kernels.source_of(together), gpu.capability(device), "copies of arguments"))
    params = b"".join(kernel.params for kernel in together)
    targets = [buffers[number].data_ptr() for number in order]
    current_stream = gpu.stream_asked()

    def copy(tensors: Sequence[torch.Tensor]) -> bool:
        addresses, all_bits = [], 0
        for number, target in zip(order, targets, strict=True):
            address = tensors[number].data_ptr()
            all_bits |= address
            addresses += [target, address]
        if all_bits & (ALIGNMENT - 1):
            return False
        launch(params, current_stream(device.index), *addresses)
        return True

    return copy


def _copy(buffer: torch.Tensor) -> LoopsKernel | None:
    """The kernel that fills a buffer; None if it is not dense or not aligned, or if loops cannot move its dtype."""
    count = buffer.numel()
    span = 1 + sum((size - 1) * stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
    if not 0 < count < LARGEST or span != count or buffer.data_ptr() % ALIGNMENT:
        return None
    target, source = (Value(Slot("memory", name), 0, (count,), (1,), buffer.dtype, name) for name in ("to", "from"))
    body = Body()
    try:
        return kernels.kernel(body.loops(target, body.read(source, coordinates((count,)))))
    except (Unknown, KeyError):
        return None
