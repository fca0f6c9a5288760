"""Max-pooling at the end of a region: the epilogue's result is pooled without being stored.

Only the largest of a window's values leaves the kernel, so a result of a convolution is read once and a quarter of it
is written. On a GPU a generated pass pools. Elsewhere, and where that pass cannot, torch pools after the region.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fxfuse import results
from fxfuse.errors import UnsupportedError


class Separate(UnsupportedError):
    """The region can be a kernel, but not together with the pooling after it."""


class MaxPool(NamedTuple):
    """max_pool2d without dilation, in elements along height and width."""

    height: int
    width: int
    stride_height: int
    stride_width: int
    padding_height: int
    padding_width: int
    ceil_mode: bool

    def __str__(self) -> str:
        return (
            f"max_pool2d {self.height}x{self.width}, stride {self.stride_height}x{self.stride_width}, "
            f"padding {self.padding_height}x{self.padding_width}{', ceil_mode' if self.ceil_mode else ''}"
        )

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, pooled by torch."""
        kernel, stride, padding = self[0:2], self[2:4], self[4:6]
        known = results.of_max_pool(tensor, kernel, stride, padding, bool(self.ceil_mode)) if tensor.is_meta else None
        if known is not None:
            return known
        return F.max_pool2d(tensor, kernel, stride, padding, 1, bool(self.ceil_mode))


def pooled(tensor: torch.Tensor, pool: Sequence[int]) -> torch.Tensor:
    """`tensor`, pooled by torch as MaxPool(*pool) says; as it is if `pool` is empty."""
    return MaxPool(*pool)(tensor) if pool else tensor  # type: ignore[arg-type]
