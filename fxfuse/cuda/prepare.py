"""Describes a problem to its kernel family: the tensors that the kernels read and write, and the candidates.

`prepare` is the entry point. A tensor whose layout no kernel can address is copied at every call, as eager's own
kernels would copy it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from fxfuse.cuda import conv2d, conv2d_weight, gemm, gemm_problem, gpu, layer_norm
from fxfuse.cuda.conv2d_problem import Conv2dProblem
from fxfuse.cuda.exactness import eager_error, precision_of
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.precision import Precision
from fxfuse.errors import UnsupportedError
from fxfuse.layout import (
    CHANNELS_LAST,
    NCHW,
    Layout,
    Strides,
    channels_last_strides,
    collapse,
    contiguous_strides,
    empty,
    flatten,
    group,
    is_channels_last,
)
from fxfuse.operands import Grouping
from fxfuse.problem import BY_ROWS, Problem, TensorMeta, anchor_weight, as_images

Convert = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Input:
    """x or the weight as the kernel reads it."""

    meta: TensorMeta
    """The tensor after `convert`."""
    convert: Convert | None = None
    """The copy to make at every call if no kernel can address the tensor's own layout; else None."""


def _copied(meta: TensorMeta, strides: tuple[int, ...]) -> Input:
    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return empty(meta.shape, strides, meta.dtype, tensor.device).copy_(tensor)

    return Input(TensorMeta(meta.shape, strides, meta.dtype, meta.device, 16), convert)


@dataclass(frozen=True)
class Prepared:
    """A problem as its kernel family sees it."""

    x: Input
    weight: Input | None
    """None for a LayerNorm, whose weight is an operand of the epilogue."""
    result_shape: tuple[int, ...]
    result_strides: tuple[int, ...]
    grouping: Grouping
    candidates: Callable[[Layout], Sequence[Kernel]]
    """candidates(layout) -> kernels, best first; `layout` is the result's, as (batch, row, col)."""
    splits_rows: Callable[[Layout], bool]
    """splits_rows(layout): whether operands differ between the batches, so that the kernel must compute (batch, row)
    from a row's number."""
    grows: bool = True
    """Whether the first dimension is a batch: see plan_operands."""


def _is_hopper(device: Any) -> bool:
    """Whether `device`, properties of a GPU, has compute capability 9.0."""
    return (device.major, device.minor) == (9, 0)


def _shared_per_block(device: Any) -> int | None:
    """Bytes of shared memory that a thread block may have; None where torch does not say (before 2.4).

    Args:
        device: properties of a GPU.
    """
    return getattr(device, "shared_memory_per_block_optin", None)


_EXACT: Final = ("tf32x3", "fp16x3")
"""Precisions whose kernels must be as exact as eager."""


# ---------------------------------------------------------------------------------------------- linear


def _rows(meta: TensorMeta, dimensions: int = 1) -> tuple[Input, int]:
    """x as a matrix with contiguous rows, and its row stride. A row is x's last `dimensions` dimensions.

    x is copied if its strides do not allow this.
    """
    first = len(meta.shape) - dimensions
    features = math.prod(meta.shape[first:])
    sizes, (strides,) = collapse(meta.shape[:first], [meta.strides[:first]])
    _, (within,) = collapse(meta.shape[first:], [meta.strides[first:]])
    if len(sizes) <= 1 and within in ([], [1]):
        return Input(meta), strides[0] if sizes else features
    return _copied(meta, contiguous_strides(meta.shape)), features


def _x_matrix(problem: Problem, layout: gemm_problem.Layout) -> tuple[Input, gemm_problem.XLayout, int]:
    """x, its layout ("mk": K contiguous, "km": M contiguous) and its row stride.

    Args:
        layout: the weight's.
    """
    meta, batched = problem.x, problem.kind == "bmm"
    if len(meta.shape) == 2 + batched:
        (m, k), (of_m, of_k) = meta.shape[-2:], meta.strides[-2:]
        turned = of_m == 1 and of_k >= m > 1 < k
        if turned and layout == "kn" and problem.kind != "gated_linear":
            return Input(meta), "km", of_k
    if batched:
        within = Input(meta) if of_k == 1 or k == 1 else _copied(meta, contiguous_strides(meta.shape))
        return within, "mk", within.meta.strides[1]
    rows, stride = _rows(meta)
    return rows, "mk", stride


def _matrix(meta: TensorMeta, kind: str) -> tuple[Input, gemm_problem.Layout, int]:
    """The weight, its layout ("nk": K contiguous, "kn": N contiguous) and its row stride."""
    layouts: tuple[gemm_problem.Layout, gemm_problem.Layout] = ("nk", "kn")
    first, second = layouts if kind in BY_ROWS else layouts[::-1]
    (rows, cols), (row_stride, col_stride) = meta.shape[-2:], meta.strides[-2:]
    if col_stride == 1 or cols == 1:
        return Input(meta), first, row_stride if rows > 1 else cols
    if row_stride == 1 or rows == 1:
        return Input(meta), second, col_stride
    return _copied(meta, contiguous_strides(meta.shape)), first, cols


def _grouping(sizes: Sequence[int], tensors: Sequence[Strides], dimensions: int = 1) -> Layout | None:
    """Prepared.grouping of a result with rows: the last `dimensions` dimensions are col, the others batch and row."""
    first = len(sizes) - dimensions
    leading, merged = collapse(sizes[:first], [strides[:first] for strides in tensors])
    last, within = collapse(sizes[first:], [strides[first:] for strides in tensors])
    if len(leading) > 2 or len(last) > 1:
        return None
    missing = 2 - len(leading)
    batch, row = [1] * missing + leading
    strides = tuple((*([0] * missing), *rows, *(cols or [0])) for rows, cols in zip(merged, within, strict=True))
    return Layout((batch, row, math.prod(last)), strides)  # type: ignore[arg-type]


def _splits_rows(
    operands: Sequence[TensorMeta], leading: tuple[int, ...], dimensions: int = 1
) -> Callable[[Layout], bool]:
    """Prepared.splits_rows for a result with rows.

    Where possible, the shapes of the operands decide, so that a batch of one compiles no kernel of its own.

    Args:
        leading: sizes of the result's dimensions before those of its columns.
        dimensions: how many dimensions its columns have.
    """
    rows_of = (operand.shape[:-dimensions] for operand in operands)
    per_row = [rows for rows in rows_of if any(size != 1 for size in rows)]
    partial = any(rows != leading for rows in per_row)
    return lambda result: partial or result.sizes[0] > 1


def _prepare_gemm(problem: Problem, acc: torch.Tensor, multiplied: Precision) -> Prepared:
    matrix, batched = anchor_weight(problem), problem.kind == "bmm"
    if len(matrix.shape) != 2 + batched or len(problem.x.shape) < 1 + 2 * batched:
        raise UnsupportedError(f"a weight of shape {matrix.shape} is no matrix")
    features_in, features_out = matrix.shape[::-1] if problem.kind in BY_ROWS else matrix.shape[-2:]
    weight, layout, weight_stride = _matrix(matrix, problem.kind)
    device = gpu.properties(problem.x.device)
    x, x_layout, x_stride = _x_matrix(problem, layout)
    shape = tuple(acc.shape)
    judged_by = eager_error(problem) if multiplied in _EXACT else None

    def candidates(result: Layout) -> Sequence[Kernel]:
        described = gemm_problem.Problem(
            m=math.prod(shape[batched:-1]),
            n=features_out,
            k=features_in,
            precision=multiplied,
            weight_layout=layout,
            x_stride=x_stride,
            weight_stride=weight_stride,
            out_stride=features_out,
            x_alignment=x.meta.alignment,
            weight_alignment=weight.meta.alignment,
            rows_per_batch=result.sizes[1],
            multiprocessors=device.multi_processor_count,
            shared_memory=device.shared_memory_per_multiprocessor,
            shared_memory_per_block=_shared_per_block(device),
            hopper=_is_hopper(device),
            weights=2 if problem.kind == "gated_linear" else 1,
            x_layout=x_layout,
            batches=shape[0] if batched else 1,
            x_step=x.meta.strides[0] if batched else 0,
            weight_step=weight.meta.strides[0] if batched else 0,
            eager_error=judged_by,
        )
        return gemm.candidates(described)

    splits_rows = _splits_rows(problem.operands, shape[:-1])
    return Prepared(x, weight, shape, contiguous_strides(shape), _grouping, candidates, splits_rows)


# ---------------------------------------------------------------------------------------------- conv2d


def _prepare_conv2d(problem: Problem, acc: torch.Tensor, multiplied: Precision) -> Prepared:
    options = dict(problem.options)
    unbatched = len(problem.x.shape) == 3
    x, weight = problem.x, anchor_weight(problem)
    if unbatched:
        x = TensorMeta((1, *x.shape), (x.shape[0] * x.strides[0], *x.strides), x.dtype, x.device, x.alignment)
    (images, channels, *size), (out_channels, _, *kernel) = x.shape, weight.shape
    sides = options["padding"]
    top, left = (sides[0], sides[2]) if len(sides) == 4 else sides
    out_height, out_width = acc.shape[-2:]
    shape: tuple[int, ...] = (images, out_channels, out_height, out_width)
    channels_last = is_channels_last(x.shape, x.strides) or is_channels_last(weight.shape, weight.strides)
    strides = channels_last_strides(shape) if channels_last else contiguous_strides(shape)
    groups: tuple[tuple[int, ...], ...] = CHANNELS_LAST if channels_last else NCHW
    # As in cuDNN, a result in channels_last is computed from an input in channels_last.
    needs_copy = channels_last and channels > 1 and x.strides[1] != 1
    source = _copied(x, channels_last_strides(x.shape)) if needs_copy else Input(x)
    # Windows of channels_last pixels are multiplied with filters in channels_last order; cuDNN copies filters, too.
    in_order = options["groups"] > 1 or tuple(kernel) == (1, 1) or is_channels_last(weight.shape, weight.strides)
    reorders = channels_last and channels > 1 and not in_order
    filters = _copied(weight, channels_last_strides(weight.shape)) if reorders else Input(weight)
    if unbatched:
        shape, strides = shape[1:], strides[1:]
        groups = tuple(tuple(dim - 1 for dim in dims if dim > 0) for dims in groups)
        if source.convert is not None:
            source = Input(source.meta, functools.partial(_convert_unbatched, source.convert))

    device = gpu.properties(x.device)
    judged_by = eager_error(problem) if multiplied in _EXACT else None

    def candidates(result: Layout) -> Sequence[Kernel]:
        described = Conv2dProblem(
            images=images,
            channels=channels,
            size=(size[0], size[1]),
            out_channels=out_channels,
            out_size=(out_height, out_width),
            kernel=(kernel[0], kernel[1]),
            stride=options["stride"],
            padding=(top, left),
            dilation=options["dilation"],
            groups=options["groups"],
            x_strides=source.meta.strides,  # type: ignore[arg-type]
            weight_strides=filters.meta.strides,  # type: ignore[arg-type]
            out_layout="nhwc" if channels_last else "nchw",
            precision=multiplied,
            x_alignment=source.meta.alignment,
            weight_alignment=filters.meta.alignment,
            multiprocessors=device.multi_processor_count,
            shared_memory=device.shared_memory_per_multiprocessor,
            shared_memory_per_block=_shared_per_block(device),
            hopper=_is_hopper(device),
            eager_error=judged_by,
        )
        reason = conv2d.unsupported(described)
        if reason is not None:
            raise UnsupportedError(reason)
        return conv2d.candidates(described)

    def grouping(sizes: Sequence[int], tensors: Sequence[Strides]) -> Layout | None:
        return group(sizes, tensors, groups)

    def splits_rows(result: Layout) -> bool:
        return any(batch != result.sizes[1] * row for batch, row, _ in result.strides[1:])

    return Prepared(source, filters, shape, strides, grouping, candidates, splits_rows)


def _convert_unbatched(convert: Convert, x: torch.Tensor) -> torch.Tensor:
    return convert(x.unsqueeze(0))


# ------------------------------------------------------------------------------- the gradient of conv2d's filters


def _prepare_conv2d_weight(problem: Problem, acc: torch.Tensor, multiplied: Precision) -> Prepared:
    dy, x, options = problem.x, anchor_weight(problem), dict(problem.options)
    shape = tuple(acc.shape)
    device = gpu.properties(dy.device)
    judged_by = eager_error(problem) if multiplied in _EXACT else None

    def candidates(result: Layout) -> Sequence[Kernel]:
        described = conv2d_weight.Problem(
            images=dy.shape[0],
            filters=dy.shape[1],
            channels=x.shape[1],
            size=x.shape[2:],  # type: ignore[arg-type]
            out_size=dy.shape[2:],  # type: ignore[arg-type]
            kernel=options["kernel"],
            stride=options["stride"],
            padding=options["padding"],
            dilation=options["dilation"],
            groups=options["groups"],
            precision=multiplied,
            dy_strides=dy.strides,  # type: ignore[arg-type]
            x_strides=x.strides,  # type: ignore[arg-type]
            dy_alignment=dy.alignment,
            x_alignment=x.alignment,
            multiprocessors=device.multi_processor_count,
            shared_memory=device.shared_memory_per_multiprocessor,
            shared_memory_per_block=_shared_per_block(device),
            hopper=_is_hopper(device),
            eager_error=judged_by,
        )
        return conv2d_weight.candidates(described)

    def splits_rows(result: Layout) -> bool:
        return False  # there is one batch

    grouping = functools.partial(group, groups=((), (0,), (2, 3, 1)))
    return Prepared(Input(dy), Input(x), shape, channels_last_strides(shape), grouping, candidates, splits_rows, False)


# ---------------------------------------------------------------------------------------------- conv3d


def _prepare_conv3d(problem: Problem, acc: torch.Tensor, multiplied: Precision) -> Prepared:
    """A convolution of volumes with flat filters, as one of images in the same memory.

    For other filters and layouts `candidates` raises UnsupportedError.
    """
    shape, strides = tuple(acc.shape), acc.stride()
    try:
        return _as_images(problem, shape, strides, multiplied)
    except UnsupportedError as error:
        reason = str(error)

    def candidates(result: Layout) -> Sequence[Kernel]:
        raise UnsupportedError(reason)

    assert problem.weight is not None
    return Prepared(Input(problem.x), Input(problem.weight), shape, strides, flatten, candidates, lambda result: True)


def _as_images(problem: Problem, shape: tuple[int, ...], strides: Strides, multiplied: Precision) -> Prepared:
    x, weight, options = problem.x, anchor_weight(problem), dict(problem.options)
    moved = as_images(weight.shape[2:], options["stride"], options["padding"])
    if moved is None or len(x.shape) != 5:
        raise UnsupportedError("a convolution of volumes whose filters are not flat")
    planes = moved == (1, 2)
    dims = ((0, 2), (1,), (3,), (4,)) if planes else ((0,), (1,), (2,), (3, 4))
    images, in_memory = _merged(shape, strides, dims)
    sizes, steps = x.shape, x.strides
    if planes:  # every stride-th plane is an image
        sizes = (*sizes[:2], shape[2], *sizes[3:])
        steps = (*steps[:2], steps[2] * options["stride"][0], *steps[3:])
    missing = 2 if planes else 4
    shape_of_filters, steps_of_filters = (of[:missing] + of[missing + 1 :] for of in (weight.shape, weight.strides))
    along = {name: tuple(options[name][dim] for dim in moved) for name in ("stride", "padding", "dilation")}
    flat = dataclasses.replace(
        problem,
        kind="conv2d",
        options=tuple({**along, "groups": options["groups"]}.items()),
        x=TensorMeta(*_merged(sizes, steps, dims), x.dtype, x.device, x.alignment),
        weight=TensorMeta(shape_of_filters, steps_of_filters, weight.dtype, weight.device, weight.alignment),
    )
    found = _prepare_conv2d(flat, torch.empty(images, device="meta"), multiplied)
    if found.x.convert is not None or found.weight is None or found.result_strides != in_memory:
        raise UnsupportedError("volumes in an order that is not that of images")
    read = found.weight
    if read.convert is not None:
        read = Input(read.meta, functools.partial(_convert_flat, read.convert, missing))
    of_images = CHANNELS_LAST if in_memory == channels_last_strides(images) else NCHW
    groups = [[dim for image in part for dim in dims[image]] for part in of_images]
    grouping = functools.partial(group, groups=groups)
    return dataclasses.replace(found, weight=read, result_shape=shape, result_strides=strides, grouping=grouping)


def _merged(
    sizes: Sequence[int], strides: Sequence[int], dims: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of a tensor after merging each group of dimensions in `dims` into one.

    Raises UnsupportedError if a group is not evenly spaced in memory.
    """
    found = [collapse([sizes[dim] for dim in one], [tuple(strides[dim] for dim in one)]) for one in dims]
    if any(len(merged) > 1 for merged, _ in found):
        raise UnsupportedError("planes that do not follow one another in memory")
    steps = [merged[0] if merged else strides[one[-1]] for (_, (merged,)), one in zip(found, dims, strict=True)]
    return tuple(math.prod(sizes[dim] for dim in one) for one in dims), tuple(steps)


def _convert_flat(convert: Convert, missing: int, filters: torch.Tensor) -> torch.Tensor:
    return convert(filters.squeeze(missing))


# ------------------------------------------------------------------------------------------ layer_norm


def _prepare_layer_norm(problem: Problem, acc: torch.Tensor, multiplied: Precision) -> Prepared:
    options, shape = dict(problem.options), tuple(acc.shape)
    dimensions = len(options["normalized_shape"])
    leading = shape[: len(shape) - dimensions]
    x, x_stride = _rows(problem.x, dimensions)

    def candidates(result: Layout) -> Sequence[Kernel]:
        described = layer_norm.Problem(
            rows=math.prod(leading),
            columns=result.sizes[2],
            x_stride=x_stride,
            rows_per_batch=result.sizes[1],
            eps=options["eps"],
            element=problem.x.dtype,
            x_alignment=x.meta.alignment,
        )
        return layer_norm.candidates(described)

    grouping = functools.partial(_grouping, dimensions=dimensions)
    splits_rows = _splits_rows(problem.operands, leading, dimensions)
    strides = contiguous_strides(shape)
    return Prepared(x, None, shape, strides, grouping, candidates, splits_rows, grows=bool(leading))


_FAMILIES = {
    "conv2d": _prepare_conv2d,
    "conv2d_weight": _prepare_conv2d_weight,
    "conv3d": _prepare_conv3d,
    "layer_norm": _prepare_layer_norm,
}


def prepare(problem: Problem, acc: torch.Tensor, multiplied: Precision | None = None) -> Prepared:
    """Describes `problem` to its kernel family. Raises UnsupportedError.

    Args:
        acc: the anchor's result as a meta tensor.
        multiplied: the precision of products; None for the one that is as exact as eager for this problem.
    """
    return _FAMILIES.get(problem.kind, _prepare_gemm)(problem, acc, multiplied or precision_of(problem))
