"""The reference regions against eager and torch.compile, in one run: times, errors, launches.

    python benchmarks/regions.py --output benchmarks/results            # on the GPU if there is one
    python benchmarks/regions.py --only conv --precisions float32 bfloat16 --compare eager torch.compile max-autotune

Prints a table and a summary and, with --output, writes them as regions-<device>.md and .json with the device, the
versions, the date and the commit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from suite import Function, Net, Region, run
from torch import nn


def _swish_chain(x: torch.Tensor) -> torch.Tensor:
    x = x * torch.sigmoid(x) / 2.0
    return torch.clamp(torch.tanh(torch.clamp(x, -1.0, 1.0)), -1.0, 1.0)


def _gelu_chain(x: torch.Tensor) -> torch.Tensor:
    return F.hardtanh(F.gelu(torch.tanh(torch.sigmoid(x) * x)), -1.0, 1.0)


def _hardswish_by_hand(x: torch.Tensor) -> torch.Tensor:
    return x * torch.clamp((x + 3) / 6, 0, 1)


def _linear(
    function: Function, sizes: tuple[int, int] = (8192, 8192), bias: bool = True
) -> Callable[[bool], nn.Module]:
    def build(gpu: bool) -> nn.Module:
        size_in, size_out = sizes if gpu else (1024, 1024)
        return Net(function, fc=nn.Linear(size_in, size_out, bias=bias), v=(size_out,))

    return build


def _conv(function: Function, channels: tuple[int, int], cpu: tuple[int, int]) -> Callable[[bool], nn.Module]:
    def build(gpu: bool) -> nn.Module:
        size_in, size_out = channels if gpu else cpu
        return Net(function, conv=nn.Conv2d(size_in, size_out, 3), v=(size_out, 1, 1))

    return build


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 + x


MATRIX, SMALL_MATRIX = (1024, 8192), (256, 1024)
IMAGES, SMALL_IMAGES, SMALL_THIN = (64, 64, 256, 256), (16, 16, 64, 64), (16, 8, 64, 64)
REGIONS = [
    Region(
        "a. linear, + bias, relu",
        _linear(lambda m, x: torch.relu(m.fc(x) + m.v), bias=False), MATRIX, SMALL_MATRIX,
    ),
    Region(
        "b. linear, swish, / 2, clamp, tanh, clamp",
        _linear(lambda m, x: _swish_chain(m.fc(x))), MATRIX, SMALL_MATRIX,
    ),
    Region(
        "c. conv, relu, + bias",
        _conv(lambda m, x: torch.relu(m.conv(x)) + m.v, (64, 128), (16, 64)), (128, 64, 128, 128), SMALL_IMAGES,
    ),
    Region(
        "d. linear, + value, swish, tanh, gelu, hardtanh",
        _linear(lambda m, x: _gelu_chain(m.fc(x) + m.v)), MATRIX, SMALL_MATRIX,
    ),
    Region(
        "linear, swish, * 2",
        _linear(lambda m, x: F.silu(m.fc(x)) * 2, (32768, 32768)), (128, 32768), SMALL_MATRIX,
    ),
    Region(
        "linear, * 0.5, + itself",
        _linear(lambda m, x: _double(m.fc(x)), (4096, 4096)), (16384, 4096), SMALL_MATRIX,
    ),
    Region(
        "conv, mish, mish",
        _conv(lambda m, x: F.mish(F.mish(m.conv(x))), (64, 128), (16, 64)), IMAGES, SMALL_IMAGES,
    ),
    Region(
        "conv, * scale, leaky_relu, gelu",
        _conv(lambda m, x: F.gelu(F.leaky_relu(m.conv(x) * m.v)), (64, 64), (16, 64)), IMAGES, SMALL_IMAGES,
    ),
    Region(
        "conv, relu, hardswish by hand",
        _conv(lambda m, x: _hardswish_by_hand(torch.relu(m.conv(x))), (8, 64), (8, 64)), (128, 8, 128, 128), SMALL_THIN,
    ),
    Region(
        "conv, / 2, leaky_relu",
        _conv(lambda m, x: F.leaky_relu(m.conv(x) / 2), (8, 64), (8, 64)), (128, 8, 128, 128), SMALL_THIN,
    ),
    Region(
        "conv, - 0.5, - 0.2, mish",
        _conv(lambda m, x: F.mish(m.conv(x) - 0.5 - 0.2), (8, 64), (8, 64)), (128, 8, 256, 256), SMALL_THIN,
    ),
]  # fmt: skip


if __name__ == "__main__":
    run("regions", __doc__, REGIONS, ["float32"])
