"""The errors of float32 results against float64: eager's on this machine, and those of kernels.

Errors are measured on a part of a result (`Part`).

- Eager's error decides the precision. A library need not use TF32 where torch's switches allow it: cuDNN computes many
  convolutions of few channels in float32. `precision_of` takes TF32 only for problems whose result by the library has
  TF32's error. That error is measured once and stored on disk. It also decides which kernels in 3xTF32 are candidates:
  those that are expected to have no larger error (gemm_accuracy.py).
- `errors` compares kernels with eager. tune.py leaves out kernels that are less exact.

The error of a kernel is a root mean square over the elements of a result, each in units of its sum of |x| |w|. This is
the componentwise backward error, for which rounding bounds hold whatever the magnitudes are (Higham, Accuracy and
Stability of Numerical Algorithms, 3.5). A Frobenius norm would be decided by the few largest elements: for
normal * exp(4 * normal) by a handful of roundings. Simulated for 16 draws of 48x48 outputs and K = 16, 64, 256, the
same 3xTF32 has 0.6 to 12 times the error of a chain of float32 by that norm, and 1.35 to 1.8 times in these units. For
normal and uniform data, whose sums are alike, both measures are the same.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from fxfuse import cache, packaged
from fxfuse.cuda import gpu
from fxfuse.cuda.gemm_problem import Errors
from fxfuse.cuda.precision import Precision, precision
from fxfuse.layout import is_channels_last
from fxfuse.locks import free_in_children
from fxfuse.problem import (
    BY_ROWS,
    CONVOLUTIONS,
    PRODUCTS,
    Problem,
    Run,
    TensorMeta,
    anchor_weight,
    channel_operands,
    run_anchor,
)
from fxfuse.reference import evaluate

logger = logging.getLogger("fxfuse")

_T = TypeVar("_T")

LEAST_TF32_ERROR: Final = 2.0**-15
"""A product with a larger relative error was computed in TF32. TF32 has 3e-4; float32 has at most 2e-6, for sums of
16384."""
MOST_ROWS, MOST_COLUMNS, MOST_FILTERS = 256, 256, 32
"""Most rows and columns of a matrix product, and most filters of one image, that are computed in float64.

Of a gradient of filters, at most MOST_FILTERS filters and MOST_COLUMNS channels are."""
ALLOWED: Final = {"normal": 1.25, "uniform": 1.25, "wide": 2.0}
"""A kernel's largest allowed error as a multiple of eager's, by the data of x and the weight. "wide" is
normal * exp(4 * normal). There one or two products dominate a sum, so the last rounding of each counts."""
ULP: Final = 2.0**-23
"""Added to the allowed error: the epilogue rounds, too."""


measuring = free_in_children(threading.RLock())
"""Held while anything is measured: one measurement at a time, because the GPU is shared."""


def enabled() -> bool:
    """Whether measuring is possible and wanted: the GPU is real, and FXFUSE_TUNE is not 0."""
    return gpu.standing_in() is None and os.environ.get("FXFUSE_TUNE", "1") != "0"


# ----------------------------------------------------------------------------------------- remembering


def file_of(key: str) -> Path:
    """The file that stores the measurement `key`."""
    return cache.writable() / "choices" / f"{key}.json"


def recall(key: str, read: Callable[[Any], _T]) -> _T | None:
    """The stored measurement `key`, converted by `read`; None if neither a readable cache nor a package has it."""
    for folder in cache.folders():
        try:
            return read(cache.read_document(folder, "choices", f"{key}.json", key=key))
        except FileNotFoundError:
            continue
        except cache.UNREADABLE as error:
            logger.info("fxfuse: what was measured cannot be read and is measured anew: %s", error)
    return read(packaged.choices[key]) if key in packaged.choices else None


def remember(key: str, value: Mapping[str, Any]) -> None:
    """Stores the measurement `key` for other processes, if that is possible."""
    try:
        cache.write_document(file_of(key), key, dict(value))
    except OSError as error:  # this process keeps it in memory
        logger.info("fxfuse: what was measured cannot be stored: %s", error)


# ------------------------------------------------------------------------------------------- what eager does

_of_eager: dict[str, Errors] = {}


def precision_of(problem: Problem) -> Precision:
    """The precision of the problem's anchor: TF32 only if eager's result has TF32's error, too, or with fp32="fast"."""
    allowed = precision(problem.kind, problem.x.dtype, problem.fp32)
    if allowed != "tf32" or problem.fp32 == "fast" or eager_uses_tf32(problem):
        return allowed
    return "tf32x3"


def eager_uses_tf32(problem: Problem) -> bool:
    """Whether torch's library computes this product, for which TF32 is allowed, in TF32. False if unknown."""
    standing = gpu.standing_in()
    if standing is not None:
        standing.is_asked = True
        return standing.tf32
    errors = _errors_of_eager(problem)
    return errors is not None and errors[0] > LEAST_TF32_ERROR


def eager_error(problem: Problem) -> Errors | None:
    """The relative errors of the problem's float32 anchor by torch's library; None if they are unknown.

    They are unknown if they are not stored and cannot be measured now, or if there is too little memory. They also
    count as unknown in calls of a package whose kernels were chosen without measuring.
    """
    return None if gpu.standing_in() is not None or packaged.is_unmeasured() else _errors_of_eager(problem)


def _errors_of_eager(problem: Problem) -> Errors | None:
    key = _key(problem)
    found = _of_eager[key] if key in _of_eager else _measured(problem, key)
    if found is not None:
        packaged.note_choice(key, {"normal": found[0], "uniform": found[1]})
    return found


def _measured(problem: Problem, key: str) -> Errors | None:
    """`_errors_of_eager` at the first request in this process: stored, or measured now."""
    stored = recall(key, lambda value: (float(value["normal"]), float(value["uniform"])))
    if stored is not None:
        return _of_eager.setdefault(key, stored)
    if not enabled() or gpu.is_capturing():
        return None
    with measuring:
        if key not in _of_eager:  # otherwise another thread has measured it meanwhile
            # For each thread that calls it, cuBLAS takes memory (33 MB on Hopper), for good. A thread that ends leaves
            # it to the next one. So the many threads that draft kernels do not call cuBLAS themselves.
            with ThreadPoolExecutor(1) as alone:
                errors = alone.submit(_library_error, problem).result()
            if errors is None:
                return None
            _of_eager[key] = errors
            remember(key, {"normal": errors[0], "uniform": errors[1]})
    return _of_eager[key]


def _key(problem: Problem) -> str:
    """The key of eager's error: a hash of everything that the library's choice of an algorithm depends on."""
    cudnn = torch.backends.cudnn
    parts = (
        gpu.name(problem.x.device), gpu.torch_version(), gpu.cuda_version(), cudnn.version(),
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic, problem.kind, problem.options,
        precision(problem.kind, problem.x.dtype, problem.fp32),
        *(meta and (meta.shape, meta.strides, meta.alignment) for meta in (problem.x, problem.weight, problem.bias)),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _library_error(problem: Problem) -> Errors | None:
    """Measures the errors of the anchor by torch; None if there is too little memory.

    A convolution in channels_last may be in NCHW in eager (channels_last.py converts it). So both layouts are measured,
    and the smaller error counts.
    """
    part, errors = Part(problem), []
    try:
        with torch.cuda.device(problem.x.device), torch.no_grad(), torch.autocast("cuda", enabled=False):
            for data in ("normal", "uniform"):
                x, weight, bias, _ = example(problem, data, with_operands=False)
                exact = part.anchor(x, weight, bias)
                layouts = [(x, weight)]
                if problem.kind in CONVOLUTIONS and is_channels_last(problem.x.shape, problem.x.strides):
                    layouts.append((x.contiguous(), weight.contiguous()))
                results = (run_anchor(problem.kind, problem.options, *there, bias) for there in layouts)
                errors.append(min(relative_error(part.of_result(result), exact) for result in results))
    except torch.cuda.OutOfMemoryError:
        logger.warning("fxfuse: %s: too little memory to measure eager's error; it is computed exactly", problem.label)
        return None
    return errors[0], errors[1]


# ------------------------------------------------------------------------------------------ what kernels do


def is_judged(problem: Problem) -> bool:
    """Whether kernels for the problem are compared with eager: float32 products with fp32="exact", without pooling."""
    exact = problem.x.dtype == torch.float32 and problem.fp32 == "exact"
    return exact and problem.kind in PRODUCTS and not problem.pool


def errors(problem: Problem, runs: Mapping[str, Run]) -> dict[str, float]:
    """The error of each run as a multiple of the allowed one, for the kind of data with which it is worst.

    Above 1 a kernel is less exact than eager. Both results include the epilogue, as a kernel has no result without one.
    Empty if there is too little memory.
    """
    worst = dict.fromkeys(runs, 0.0)
    part = Part(problem)
    try:
        with torch.cuda.device(problem.x.device), torch.no_grad(), torch.autocast("cuda", enabled=False):
            for data, factor in ALLOWED.items():
                tensors = example(problem, data)
                eager, scale = part.of_result(problem.reference(*tensors)), part.magnitude(*tensors[:3])
                # where float32 overflows in eager there is nothing to compare
                exact = torch.where(eager.isfinite(), part.exact(*tensors), torch.inf)
                allowed = factor * relative_error(eager, exact, scale) + ULP
                for name, run in runs.items():
                    try:
                        error = relative_error(part.of_result(run(*tensors)), exact, scale)
                    except torch.cuda.OutOfMemoryError:
                        raise
                    except Exception as failure:  # whatever a kernel's call raises; it is not chosen
                        logger.info("fxfuse: %s has no error, since it fails: %s", name, failure)
                        error = math.inf
                    worst[name] = max(worst[name], error / allowed)
    except torch.cuda.OutOfMemoryError:
        logger.warning("fxfuse: %s: too little memory to compare errors", problem.label)
        return {}
    return worst


def is_no_less_exact(found: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether a result from ordinary data is as close to the exact one as eager's is."""
    return relative_error(found, exact) <= ALLOWED["normal"] * relative_error(eager, exact) + ULP


def relative_error(found: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor | None = None) -> float:
    """Frobenius norm of `found - exact` divided by that of `exact`, over the elements where `exact` is finite.

    Infinity if `found` is not finite there.

    Args:
        scale: the unit of each element; None for the same unit everywhere.
    """
    finite = exact.isfinite()
    unit = 1.0 if scale is None else torch.where(scale > 0, scale, torch.inf)  # sums of nothing but zeros have no error
    difference = float(torch.where(finite, (found.double() - exact) / unit, 0.0).norm())
    norm = float(torch.where(finite, exact / unit, 0.0).norm())
    if not math.isfinite(difference):
        return math.inf  # not NaN, which no comparison finds too large
    return difference / norm if norm > 0 else 0.0


class Part:
    """The part of a problem's result that is computed in float64: some rows and columns, or filters of one image."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._options = problem, problem.options
        weight = anchor_weight(problem)
        self._moved = CONVOLUTIONS.get(problem.kind, 0)  # dimensions that filters move along
        if self._moved:
            ungrouped = dict(problem.options)["groups"] == 1
            filters = _spread(weight.shape[0], MOST_FILTERS if ungrouped else weight.shape[0])
            images = [[0]] if len(problem.x.shape) == self._moved + 2 else []
            self._of_dims: list[list[int] | None] = [*images, filters, *([None] * self._moved)]
            return
        if problem.kind == "conv2d_weight":
            grouped = dict(problem.options)["groups"] > 1
            filters = _spread(problem.x.shape[1], problem.x.shape[1] if grouped else MOST_FILTERS)
            self._of_dims = [filters, None if grouped else _spread(weight.shape[1], MOST_COLUMNS), None, None]
            return
        rows: list[list[int] | None] = []
        room = MOST_ROWS
        for size in reversed(problem.x.shape[:-1]):
            rows.insert(0, _spread(size, room))
            room = max(1, room // min(size, room))
        # the weight's dimension that becomes the result's columns
        self._filters = 0 if problem.kind in BY_ROWS else len(weight.shape) - 1
        self._of_dims = [*rows, _spread(weight.shape[self._filters], MOST_COLUMNS)]

    def of_result(self, result: torch.Tensor) -> torch.Tensor:
        """This part of the result, or of a tensor that broadcasts to it."""
        for dim, chosen in enumerate(reversed(self._of_dims), 1):
            if chosen is not None and dim <= result.dim() and result.shape[-dim] > 1:
                result = result.index_select(-dim, torch.tensor(chosen, device=result.device))
        return result

    def magnitude(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The unit of each element's error: the sum of |x| |w|, plus |bias|."""
        numbers = (int, float)
        options = tuple((name, abs(value) if isinstance(value, numbers) else value) for name, value in self._options)
        return self._anchor(x.abs(), weight.abs(), None if bias is None else bias.abs(), options)

    def anchor(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """This part of the anchor's result in float64."""
        return self._anchor(x, weight, bias, self._options)

    def _anchor(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: Sequence[tuple[str, Any]]
    ) -> torch.Tensor:
        if self._moved:
            filters = self._of_dims[-1 - self._moved]
            if len(self._of_dims) == self._moved + 2:
                x = x[:1]
            chosen = torch.tensor(filters, device=x.device)
            weight = weight.index_select(0, chosen)
            bias = None if bias is None else bias.index_select(0, chosen).double()
            return run_anchor(self._problem.kind, options, x.double(), weight.double(), bias)
        if self._problem.kind == "conv2d_weight":
            x, weight = (
                tensor if part is None else tensor.index_select(1, torch.tensor(part, device=tensor.device))
                for tensor, part in zip((x, weight), self._of_dims, strict=False)
            )
            return run_anchor(self._problem.kind, options, x.double(), weight.double(), bias)
        for dim, rows in enumerate(self._of_dims[:-1]):
            x = x.index_select(dim, torch.tensor(rows, device=x.device))
            if dim == 0 and self._problem.kind == "bmm":
                weight = weight.index_select(0, torch.tensor(rows, device=x.device))
        columns = torch.tensor(self._of_dims[-1], device=x.device)
        weight = weight.index_select(self._filters, columns)
        bias = None if bias is None else self.of_result(bias).double()
        return run_anchor(self._problem.kind, options, x.double(), weight.double(), bias)

    def exact(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, operands: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """This part of the problem's result in float64."""
        by_channel = channel_operands(self._problem.expression)
        channels = self._of_dims[1] if len(self._of_dims) > 1 else None
        chosen = []
        for index, operand in enumerate(operands):
            if index in by_channel and operand.dim() == 1:
                if channels is not None and operand.shape[0] > 1:
                    operand = operand.index_select(0, torch.tensor(channels, device=operand.device))
            elif operand.dim():
                operand = self.of_result(operand)
            chosen.append(operand.double() if operand.is_floating_point() else operand)
        return evaluate(self._problem.expression, self.anchor(x, weight, bias), chosen).double()


def _spread(size: int, most: int) -> list[int]:
    """Up to `most` evenly spaced indices below `size`, the first and the last included."""
    count = min(size, most)
    return [index * (size - 1) // max(1, count - 1) for index in range(count)]


_FILL: Final[dict[str, Callable[[torch.Tensor, torch.Generator], object]]] = {
    "normal": lambda storage, generator: storage.normal_(generator=generator),
    "uniform": lambda storage, generator: storage.uniform_(generator=generator),
    "wide": lambda storage, generator: storage.normal_(generator=generator).mul_(
        torch.empty_like(storage).normal_(0.0, 4.0, generator=generator).exp_()
    ),
}


def example(problem: Problem, data: str = "normal", with_operands: bool = True) -> tuple[Any, ...]:
    """Random tensors like the problem's (x, weight, bias, operands), drawn without torch's own generators.

    Args:
        data: the distribution of x and the weight, a key of ALLOWED.
    """
    generator = torch.Generator(problem.x.device).manual_seed(0)

    def like(meta: TensorMeta, data: str = "normal") -> torch.Tensor:
        if meta.device.type == "cpu" and problem.x.device.type != "cpu":  # a number
            return torch.ones(meta.shape, dtype=meta.dtype)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(meta.shape, meta.strides, strict=True))
        offset = meta.alignment % 16 // meta.dtype.itemsize
        storage = torch.empty(offset + extent, dtype=meta.dtype, device=meta.device)
        if meta.dtype.is_floating_point:
            _FILL[data](storage, generator)
        else:
            storage.random_(0, 2, generator=generator)
        return storage[offset:].as_strided(meta.shape, meta.strides)

    bias = None if problem.bias is None else like(problem.bias)
    weight = None if problem.weight is None else like(problem.weight, data)
    operands = [like(operand) for operand in problem.operands] if with_operands else []
    return like(problem.x, data), weight, bias, operands
