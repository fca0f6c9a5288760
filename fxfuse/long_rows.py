"""Reductions of rows that are too few and too long for a GPU: of parts of the rows, then of the parts' results.

A training step takes such reductions apart when it is traced (decompositions.py). A program does so when a call is
recorded, where rows are longer than the kernels of program/reductions.py take, or long and adjacent in memory
(LONG_ROWS; program/record.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from fxfuse.layout import FORMATS
from fxfuse.problem import RESULT_DTYPES
from fxfuse.program.loops import RUN_OF_ROW
from fxfuse.program.reductions import LONGEST

_aten: Final = torch.ops.aten

_MANY: Final = 8192
"""Rows that keep a GPU busy, however long they are: 32 threads each make 2048 for each of 128 multiprocessors."""
_LONG: Final = 2048
"""Elements of a row. If a row has more, dividing it saves more time than a second launch costs."""
_SHORT: Final = 128
"""Elements of a part that need not be divided further."""
_MIXED: Final = 2**14
"""Elements of a group of channels in channels_last. A block of threads that holds more has a multiprocessor to itself:
512 groups of twice as many take 61 us on an H200, and the three kernels of parts 45."""
_TOO_FAR: Final = 4
"""Rows stay whole if parts would be this many times longer or shorter than wanted, as with a prime length."""


def sum_of(
    x: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Sums parts of rows, then the parts' sums. This is for rows that are too few and too long for a GPU, or that are
    not in one piece (those of channels, in NCHW).

    Kernels compute both sums together with the values that are added up. torch's own sum reads these from memory.
    """
    if dtype not in (None, x.dtype, torch.float32):
        return NotImplemented
    total = _by_parts(torch.sum, x, dim, keepdim)
    return total if total is NotImplemented else total.to(x.dtype if dtype is None else dtype)


def greatest_of(x: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
    """As `sum_of`, for the greatest elements."""
    greatest = _by_parts(torch.amax, x, dim, keepdim)
    return greatest if greatest is NotImplemented else greatest.to(x.dtype)


def _by_parts(reduce: Callable[..., torch.Tensor], x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool) -> Any:
    """Reduces parts of rows, then the parts' results, in float32 or float64."""
    added = {one % max(x.dim(), 1) for one in dim} if dim else set(range(x.dim()))
    order = sorted(range(x.dim()), key=lambda one: x.stride()[one], reverse=True)  # of memory
    outer = [one for one in order if one in added and x.shape[one] > 1]
    divided = _divided(x, outer)
    if x.dtype not in RESULT_DTYPES or divided is None:
        return NotImplemented
    count, height = divided
    outer = outer[: len(outer) - count]
    first, kept = order.index(outer[0]), [one for one in order if one not in added]
    before = [one for one in kept if order.index(one) < first]
    left = [*before, *outer, *kept[len(before) :]]  # the partial sums of what is added next lie side by side
    inner = [one for one in order if one not in left]
    cut = left.index(outer[-1])
    parts = exact(x).permute([*left, *inner]).unflatten(cut, (-1, height))
    parts = reduce(parts, [cut + 1, *(len(left) + 1 + place for place in range(len(inner)))])
    total = reduce(parts.permute([left.index(one) for one in (*outer, *sorted(kept))]), list(range(len(outer))))
    return total.view([1 if one in added else size for one, size in enumerate(x.shape)]) if keepdim else total


def _divided(x: torch.Tensor, dims: Sequence[int]) -> tuple[int, int] | None:
    """How rows along `dims` of x, the innermost last, are divided into parts.

    Returns the number of innermost dimensions that a part holds as a whole, and how much of the next dimension it holds
    (a divisor of its size). None if rows stay whole.
    """
    piece: list[int] = []
    for dim in reversed(dims):  # the innermost dimensions that lie in one piece
        if piece and x.stride(dim) != x.stride(piece[0]) * x.shape[piece[0]]:
            break
        piece.insert(0, dim)
    length = math.prod(x.shape[dim] for dim in piece)
    whole = None if len(piece) == len(dims) else (len(piece), 1)
    if length <= _LONG or x.numel() // length >= _MANY:
        return whole
    wanted, count = max(_SHORT, math.isqrt(length)), 1  # so that a part's length is about the number of parts
    lengths: dict[tuple[int, int], int] = {}
    for inner, dim in enumerate(reversed(piece)):
        most = min(x.shape[dim] - 1, _TOO_FAR * wanted // count)
        lengths |= {(inner, height): count * height for height in range(1, most + 1) if x.shape[dim] % height == 0}
        count *= x.shape[dim]
    best = min(lengths, key=lambda one: abs(math.log(lengths[one] / wanted)), default=None)
    return best if best is not None and lengths[best] * _TOO_FAR >= wanted else whole


def mean_of(
    x: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    if dtype not in (None, x.dtype, torch.float32):
        return NotImplemented
    total = sum_of(x, dim, keepdim, dtype=torch.float32)
    if total is NotImplemented:
        return NotImplemented
    return (total / (x.numel() // total.numel())).to(x.dtype if dtype is None else dtype)


def variance_of(
    x: torch.Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Any:
    """The variance, by the squared deviations from the mean."""
    mean = mean_of(x, dim, True, dtype=torch.float32)
    free = 0 if mean is NotImplemented else x.numel() // mean.numel() - (1 if correction is None else correction)
    if free <= 0:
        return NotImplemented
    squares = (exact(x) - mean).square()
    total = sum_of(squares, dim, keepdim)
    total = squares.sum(list(range(x.dim())) if dim is None else dim, keepdim) if total is NotImplemented else total
    return (total / free).to(x.dtype)


def exact(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype in which it is added up: float32 for float16 and bfloat16."""
    return x.float() if x.dtype.itemsize == 2 else x


def by_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A value for each channel, in a shape that broadcasts over images and pixels of x."""
    return values.view([1, -1, *([1] * (x.dim() - 2))])


def affine(made: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """`made`, scaled by the weight and shifted by the bias, if they are given."""
    made = made if weight is None else made * weight
    return made if bias is None else made + bias


def affine_by_channel(made: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """The same with a number of each for every channel of images."""
    return affine(made, *(None if each is None else by_channel(each, made) for each in (weight, bias)))


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    exponents = _exponents(x, dim)
    if exponents is NotImplemented:
        return NotImplemented
    made, total = exponents[0].exp(), exponents[1]
    return (made / total).to(torch.float32 if half_to_float else x.dtype)


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    exponents = _exponents(x, dim)
    if exponents is NotImplemented:
        return NotImplemented
    return (exponents[0] - exponents[1].log()).to(torch.float32 if half_to_float else x.dtype)


def _exponents(x: torch.Tensor, dim: int) -> Any:
    """x less its rows' maxima, and the sums of the exponentials of that."""
    greatest = greatest_of(exact(x), [dim], True)
    if greatest is NotImplemented:
        return NotImplemented
    exponents = exact(x) - greatest
    return exponents, sum_of(exponents.exp(), [dim], True)


def _layer_norm(
    x: torch.Tensor, sides: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> Any:
    found = _normalised(x, [dim - len(sides) for dim in range(len(sides))], eps)
    if found is NotImplemented:
        return NotImplemented
    made, mean, scale = found
    return affine(made, weight, bias).to(x.dtype), mean, scale


def _group_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, images: int, channels: int, pixels: int,
    groups: int, eps: float,
) -> Any:  # fmt: skip
    found = _normalised(x.view(images, groups, -1), [2], eps)
    if found is NotImplemented:
        return NotImplemented
    made, mean, scale = found
    made = affine_by_channel(made.view(x.shape), weight, bias)
    return made.to(x.dtype), mean.squeeze(-1).to(x.dtype), scale.squeeze(-1).to(x.dtype)


def _group_norm_in_channels_last(
    x: torch.Tensor, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> Any:
    """By the statistics of channels, which are adjacent in memory, where one kernel does not pay for the whole: where a
    group is too long, or too few of its channels are adjacent."""
    channels = x.shape[1] // groups
    is_long = x.numel() > x.shape[0] * groups * _MIXED
    if x.dtype not in RESULT_DTYPES or not (is_long or channels * x.dtype.itemsize < RUN_OF_ROW):
        return NotImplemented
    means, variances = (
        None if each is None else each.unflatten(2, (groups, channels)) for each in statistics_of_parts(x)
    )
    assert means is not None
    mean, variance = (each.transpose(1, 2) for each in of_all_parts(means, variances, [1, 3]))
    made = (exact(x).unflatten(1, (groups, channels)).flatten(3) - mean) * torch.rsqrt(variance + eps)
    made = affine_by_channel(made.flatten(1, 2).view(x.shape), weight, bias)
    return made.to(x.dtype).contiguous(memory_format=FORMATS[x.dim()])


def _of_channel(x: torch.Tensor, *_: Any) -> int:
    """The number of elements of a channel of an image."""
    return x.numel() // x.shape[1]


def _batch_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running_mean: torch.Tensor | None,
    running_variance: torch.Tensor | None, training: bool, momentum: float, eps: float,
) -> Any:  # fmt: skip
    """Instance normalisation, which torch computes as batch normalisation of one image with all images' channels."""
    if not training or running_mean is not None or x.shape[0] != 1:
        return NotImplemented
    channels = x.shape[1]
    found = _group_norm(x, weight, bias, 1, channels, _of_channel(x), channels, eps)
    if found is NotImplemented:
        return NotImplemented
    made, mean, scale = found
    return made, mean.flatten().float(), scale.flatten().float()


def _cudnn_batch_norm(*arguments: Any) -> Any:
    """The same by cuDNN's operator. Its last result is for its gradient, which calls without gradients do not read."""
    found = _batch_norm(*arguments)
    return NotImplemented if found is NotImplemented else (*found, found[1][:0])


def _normalised(x: torch.Tensor, dims: Sequence[int], eps: float) -> Any:
    """x with mean 0 and variance 1 along `dims`, its last ones, the means, and what deviations were multiplied with."""
    rows = exact(x).flatten(-len(dims))
    parts = _divided(rows, [rows.dim() - 1])
    if parts is None:
        return NotImplemented
    of_parts = rows.unflatten(-1, (-1, parts[1]))
    means = of_parts.mean(-1, True)
    mean, variance = of_all_parts(means, (of_parts - means).square().mean(-1, True), [-2])
    mean, scale = (each.squeeze(-1).unflatten(-1, [1] * len(dims)) for each in (mean, torch.rsqrt(variance + eps)))
    return (exact(x) - mean) * scale, mean, scale


_PART: Final = 512
"""Most pixels of a part: a block of threads finds their 32 bytes each (of adjacent channels) in its cache again."""
_LEAST: Final = 32
"""Fewest pixels of a part for which taking the mean pays."""


def statistics_of_parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The means and the variances of the channels of parts of images, (images, parts, channels) each.

    The parts of an image have the same number of pixels. If that is one, there are no variances.
    """
    parts, along = _in_parts(x)
    parts = exact(parts)
    if not along:
        return parts.unsqueeze(1), None
    means = parts.mean(along, keepdim=True)
    variances = (parts - means).square().mean(along)
    return means.view(variances.shape), variances


def _in_parts(x: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """x as (images, parts, channels, pixels of a part ...), and the pixels' dimensions. Without pixels, x itself."""
    if x.dim() < 3:
        return x, []
    rows, pixels = x.shape[2], math.prod(x.shape[3:])
    heights = (height for height in range(rows, 0, -1) if rows % height == 0)
    height = next((height for height in heights if height * pixels <= _PART), rows)
    if height * pixels < _LEAST:
        height = rows
    return x.unflatten(2, (rows // height, height)).transpose(1, 2), list(range(3, x.dim() + 1))


def of_all_parts(
    means: torch.Tensor, variances: torch.Tensor | None, dims: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and the variance of rows, from those of their parts along `dims`, which are equally long.

    The variance is that of the parts' means plus the mean of the parts' variances: nothing cancels, and a part is read
    once.

    Args:
        variances: None for parts of one element.
    """
    first = means
    for dim in dims:
        first = first.narrow(dim, 0, 1)
    mean = first + (means - first).mean(dims, True)  # more exact where they are far from zero
    variance = (means - mean).square().mean(dims, True)
    return mean, variance if variances is None else variance + variances.mean(dims, True)


def _dims(x: torch.Tensor, dim: Any) -> Sequence[int]:
    """The dimensions that an operator's argument `dim` means."""
    return [dim] if isinstance(dim, int) else dim or range(x.dim())


def _row_along(x: torch.Tensor, dim: Any = None, *_: Any, **__: Any) -> int:
    return math.prod(x.shape[one] for one in _dims(x, dim))


def _if_long(rule: Callable[..., Any], row: Callable[..., int] = _row_along) -> Callable[..., Any]:
    """Limits a rule to rows of more than LONGEST elements. `row`: the length of one, by the same arguments."""

    @functools.wraps(rule)
    def taken_apart(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_known = x.dtype in RESULT_DTYPES and x.is_contiguous() and x.numel() > LONGEST
        return rule(x, *args, **kwargs) if is_known and row(x, *args, **kwargs) > LONGEST else NotImplemented

    return taken_apart


def _if_long_or_columns(rule: Callable[..., Any]) -> Callable[..., Any]:
    """As `_if_long`, and for more than _LONG elements if rows are adjacent in memory.

    Threads that are beside each other then have adjacent rows, so that few are left for each row.
    """
    of_rows = _if_long(rule)

    @functools.wraps(rule)
    def taken_apart(x: torch.Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_long = x.dtype in RESULT_DTYPES and x.numel() > _LONG and _row_along(x, dim) > _LONG
        found = rule if is_long and min(x.stride(one) for one in _dims(x, dim) if x.shape[one] > 1) > 1 else of_rows
        return found(x, dim, *args, **kwargs)

    return taken_apart


LONG_ROWS: Final[Mapping[Any, Callable[..., Any]]] = {
    _aten.sum.default: _if_long(sum_of),
    _aten.sum.dim_IntList: _if_long_or_columns(sum_of),
    _aten.mean.default: _if_long(mean_of),
    _aten.mean.dim: _if_long_or_columns(mean_of),
    _aten.amax.default: _if_long_or_columns(greatest_of),
    _aten.var.correction: _if_long_or_columns(variance_of),
    _aten._softmax.default: _if_long(_softmax),
    _aten._log_softmax.default: _if_long(_log_softmax),
    _aten.native_layer_norm.default: _if_long(_layer_norm, lambda x, sides, *_: math.prod(sides)),
    _aten.native_group_norm.default: _if_long(
        _group_norm, lambda x, weight, bias, images, channels, pixels, groups, eps: channels // groups * pixels
    ),
    torch.ops.fxfuse.group_norm_in_channels_last.default: _group_norm_in_channels_last,
    _aten.native_batch_norm.default: _if_long(_batch_norm, _of_channel),
    _aten.cudnn_batch_norm.default: _if_long(_cudnn_batch_norm, _of_channel),
}
"""The rules for rows that are longer than a thread block can hold. Each may return NotImplemented."""
