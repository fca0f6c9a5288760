"""Kernels for convolutions with one input channel per output channel (depthwise*.cuh)."""

from __future__ import annotations

from typing import Final

from fxfuse.cuda.conv2d_problem import MAX_TILES, Conv2dProblem, access, access_of_x, pack
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.precision import ELEMENT, MMA
from fxfuse.layout import varying

_TILED: Final = frozenset({(3, 1), (3, 2), (5, 1), (5, 2), (7, 1), (7, 2)})
"""(kernel, stride) pairs of the tiled kernels, which are all but depthwise.cuh: those of the common networks."""

_ENOUGH: Final = {3: 80_000, 5: 15_500, 7: 0}
"""Outputs per multiprocessor from which on depthwise_mma.cuh is faster on an H200, by the filter's side."""
_STRIP_ROWS: Final = 7
"""DepthwiseTileConfig::kRows."""


def kernels(problem: Conv2dProblem) -> list[Kernel]:
    """The kernels for one input channel per output channel, best first."""
    layout = problem.out_layout
    if problem.group_channels != 1 or (layout == "nhwc" and problem.x_strides[1] != 1 and problem.channels > 1):
        return []
    element, packed = ELEMENT[problem.precision], pack(problem)
    copied = _tiled_access(problem)
    if copied is None:
        cpp = f"Depthwise<{element}, {str(layout == 'nhwc').lower()}, {{output}}, {{epilogue}}>"
        return [Kernel(f"depthwise {layout} {element.lower()}", "depthwise.cuh", cpp, packed)]
    kernel, stride = problem.kernel[0], problem.stride[0]
    name = f"depthwise {layout} {element.lower()}, {kernel}x{kernel}, stride {stride}"
    if layout == "nchw":
        config = f"DepthwiseTileConfig<{element}, {kernel}, {stride}, {copied}>"
        cpp = f"DepthwiseTileNchw<{config}, {{output}}, {{epilogue}}>"
        return [Kernel(name, "depthwise_tile.cuh", cpp, packed)]
    cpp = f"DepthwiseNhwc<DepthwiseNhwcConfig<{element}, {kernel}, {stride}>, {{output}}, {{epilogue}}>"
    ring = Kernel(name, "depthwise_nhwc.cuh", cpp, packed)
    if not _by_tensor_cores(problem):
        return [ring]
    config = f"DepthwiseMmaConfig<{MMA[problem.precision]}, {kernel}>"
    cpp = f"DepthwiseMma<{config}, {{output}}, {{epilogue}}>"
    # Both are measured: with a long epilogue tensor cores may gain nothing.
    # A block that finds infinite sums computes all its outputs again, after they are stored.
    return [Kernel(f"{name}, tensor cores", "depthwise_mma.cuh", cpp, packed, in_place=False), ring]


def _by_tensor_cores(problem: Conv2dProblem) -> bool:
    """Whether depthwise_mma.cuh is faster than depthwise_nhwc.cuh with a short epilogue: only with stride 1."""
    if problem.out_layout != "nhwc" or problem.element_bytes != 2 or problem.stride != (1, 1):
        return False
    return problem.pixels * problem.out_channels >= _ENOUGH[problem.kernel[0]] * problem.multiprocessors


def _tiled_access(problem: Conv2dProblem) -> int | None:
    """Bytes of a copy from x in the tiled kernels; None if they cannot run the problem and depthwise.cuh must."""
    (kernel, width), (stride, _), size = problem.kernel, problem.stride, problem.element_bytes
    square = kernel == width and stride == problem.stride[1] and (kernel, stride) in _TILED
    if not square or problem.dilation != (1, 1):
        return None
    if problem.out_layout == "nhwc":
        one_to_one = problem.channels == problem.out_channels
        # offsets along a row have 32 bits; every output reads at least one row of x
        longest = (problem.out_size[1] + kernel) * max(problem.channels, problem.x_strides[3]) * size
        fits = longest < 2**32 and problem.padding[0] < kernel
        return 16 if one_to_one and fits and access_of_x(problem, "nhwc", problem.channels) == 16 else None
    left = problem.padding[1]
    right = (problem.out_size[1] - 1) * stride + kernel - left - problem.size[1]
    # The smallest tile is seven rows of a plane: the rows that it reads, and those that it stores, 4 bytes an element.
    bytes_of_tile = 4 * (
        ((_STRIP_ROWS - 1) * stride + kernel) * (problem.size[1] + max(left, right) + 8) + 7 * problem.out_size[1]
    )
    planes = problem.images * problem.out_channels
    most = problem.most_shared - _FILTER_BYTES
    if problem.x_strides[3] != 1 or left >= kernel or bytes_of_tile > most or planes > MAX_TILES:
        return None
    steps = varying(problem.x_strides[:3], (problem.images, problem.channels, problem.size[0]))
    shift = (left - kernel // 2) * size % 16  # a row's first column, in shared memory
    return access(size, problem.x_alignment, problem.size[1] * size, shift, *(step * size for step in steps))


_FILTER_BYTES: Final = 3 << 10
"""Most bytes of a block's shared memory that filters and addresses take."""
