"""Running a model without leaving a trace: buffers and random numbers as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


@contextlib.contextmanager
def unchanged(*modules: nn.Module) -> Iterator[None]:
    """Inside, runs without gradients; afterwards, the modules' buffers and torch's random state are what they were.

    Batch normalisation in training mode counts into its buffers, dropout draws random numbers.
    """
    buffers = {buffer: buffer.clone() for module in modules for buffer in module.buffers()}
    devices = {tensor.device.index for module in modules for tensor in module.parameters() if tensor.is_cuda}
    with torch.no_grad(), torch.random.fork_rng(devices):
        try:
            yield
        finally:
            for buffer, value in buffers.items():
                buffer.copy_(value)


def copies(inputs: Any) -> Any:
    """The inputs of a call with every tensor copied, since a model may overwrite them."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, inputs)
