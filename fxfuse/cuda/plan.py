"""How a region runs on a CUDA device: the candidates for a problem, from which tune.py chooses.

The problem is described to its kernel family (gemm.py, conv2d.py), whose kernels compute anchor and epilogue at once
and allocate the output and nothing else, unless the report says so. The bias joins the operands: kernels know nothing
of it. Tensors whose layout no kernel addresses are copied at every call, as eager's own kernels would. Beside them
stands the anchor by torch's library, followed by one generated pass (pointwise.py): where a library is out of reach,
as in 16 bits on Hopper, that is the choice, so that a fused region is never slower than what it replaced.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fxfuse import build
from fxfuse.cuda import codegen, conv2d, gemm, pointwise, tune
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.precision import precision
from fxfuse.errors import LaunchError, UnsupportedError
from fxfuse.expression import Acc, Expr, Operand, call, rewrite
from fxfuse.layout import (
    Layout,
    Strides,
    channels_last_strides,
    collapse,
    contiguous_strides,
    flatten,
    group,
    is_channels_last,
)
from fxfuse.operands import Grouping, OperandPlan, plan_operands
from fxfuse.problem import Draft, Problem, Run, TensorMeta, channel_operands, run_anchor, typed

MINIMUM_CAPABILITY = (8, 0)
"""cp.async and the tensor-core instructions used came with Ampere."""

LIBRARY = "library + one pass"
LIBRARY_PRODUCTS = 2**32
"""Multiplications from which on Hopper's libraries were measured to be ahead in TF32 and 16 bits."""

logger = logging.getLogger("fxfuse")
current_stream, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice

Convert = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Input:
    """One of the anchor's tensors as the kernel reads it."""

    meta: TensorMeta
    """After `convert`."""
    convert: Convert | None = None
    """A copy to make at every call, where no kernel can address the tensor as it lies."""


def _copied(meta: TensorMeta, strides: tuple[int, ...]) -> _Input:
    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(meta.shape, strides, dtype=meta.dtype, device=meta.device).copy_(tensor)

    return _Input(TensorMeta(meta.shape, strides, meta.dtype, meta.device, 16), convert)


@dataclass(frozen=True)
class _Prepared:
    """A problem in a kernel family's terms."""

    x: _Input
    weight: _Input
    result_shape: tuple[int, ...]
    result_strides: tuple[int, ...]
    grouping: Grouping
    candidates: Callable[[Layout], Sequence[Kernel]]
    """Given how the result is seen as (batch, row, col)."""
    splits_rows: Callable[[Layout], bool]
    """Whether the kernel must tell a batch's rows from another's."""


# ---------------------------------------------------------------------------------------------- linear


def _rows(meta: TensorMeta) -> tuple[_Input, int]:
    """x as a matrix whose rows are contiguous, and the distance between them."""
    features = meta.shape[-1]
    sizes, merged = collapse(meta.shape[:-1], [meta.strides[:-1]])
    if len(sizes) <= 1 and (meta.strides[-1] == 1 or features == 1):
        return _Input(meta), merged[0][0] if sizes else features
    return _copied(meta, contiguous_strides(meta.shape)), features


def _matrix(meta: TensorMeta, kind: str) -> tuple[_Input, gemm.Layout, int]:
    """The weight, its layout ("nk": K contiguous, "kn": N contiguous) and the distance between its rows."""
    layouts: tuple[gemm.Layout, gemm.Layout] = ("nk", "kn")
    first, second = layouts if kind == "linear" else layouts[::-1]
    (rows, cols), (row_stride, col_stride) = meta.shape, meta.strides
    if col_stride == 1 or cols == 1:
        return _Input(meta), first, row_stride if rows > 1 else cols
    if row_stride == 1 or rows == 1:
        return _Input(meta), second, col_stride
    return _copied(meta, (cols, 1)), first, cols


def _gemm_grouping(sizes: Sequence[int], tensors: Sequence[Strides]) -> Layout | None:
    """col is the last dimension; the others become batch and row."""
    leading, merged = collapse(sizes[:-1], [strides[:-1] for strides in tensors])
    if len(leading) > 2:
        return None
    missing = 2 - len(leading)
    batch, row = [1] * missing + leading
    strides = tuple(
        (*([0] * missing), *rows, tensor[-1] if sizes[-1] > 1 else 0)
        for rows, tensor in zip(merged, tensors, strict=True)
    )
    return Layout((batch, row, sizes[-1]), strides)  # type: ignore[arg-type]


def _prepare_gemm(problem: Problem, acc: torch.Tensor) -> _Prepared:
    if len(problem.weight.shape) != 2 or not problem.x.shape:
        raise UnsupportedError(f"a weight of shape {problem.weight.shape} is no matrix")
    features_in, features_out = problem.weight.shape[::-1] if problem.kind == "linear" else problem.weight.shape
    x, x_stride = _rows(problem.x)
    weight, layout, weight_stride = _matrix(problem.weight, problem.kind)
    shape = tuple(acc.shape)
    device = torch.cuda.get_device_properties(problem.x.device)

    def candidates(result: Layout) -> Sequence[Kernel]:
        described = gemm.Problem(
            m=math.prod(shape[:-1]),
            n=features_out,
            k=features_in,
            precision=precision(problem.kind, problem.x.dtype, problem.fp32),
            weight_layout=layout,
            x_stride=x_stride,
            weight_stride=weight_stride,
            out_stride=features_out,
            x_alignment=x.meta.alignment,
            weight_alignment=weight.meta.alignment,
            rows_per_batch=result.sizes[1],
            multiprocessors=device.multi_processor_count,
            shared_memory=device.shared_memory_per_multiprocessor,
        )
        return gemm.candidates(described)

    # Decided by shapes of operands where possible, so that a batch of one compiles no kernel of its own.
    per_row = [operand.shape[:-1] for operand in problem.operands if any(size != 1 for size in operand.shape[:-1])]
    partial = any(rows != shape[:-1] for rows in per_row)

    def splits_rows(result: Layout) -> bool:
        return partial or result.sizes[0] > 1

    return _Prepared(x, weight, shape, contiguous_strides(shape), _gemm_grouping, candidates, splits_rows)


# ---------------------------------------------------------------------------------------------- conv2d


def _prepare_conv2d(problem: Problem, acc: torch.Tensor) -> _Prepared:
    options = dict(problem.options)
    unbatched = len(problem.x.shape) == 3
    x, weight = problem.x, problem.weight
    if unbatched:
        x = TensorMeta((1, *x.shape), (x.shape[0] * x.strides[0], *x.strides), x.dtype, x.device, x.alignment)
    (images, channels, *size), (out_channels, _, *kernel) = x.shape, weight.shape
    sides = options["padding"]
    top, left = (sides[0], sides[2]) if len(sides) == 4 else sides
    out_height, out_width = acc.shape[-2:]
    shape: tuple[int, ...] = (images, out_channels, out_height, out_width)
    channels_last = is_channels_last(x.shape, x.strides) or is_channels_last(weight.shape, weight.strides)
    strides = channels_last_strides(shape) if channels_last else contiguous_strides(shape)
    groups: tuple[tuple[int, ...], ...] = ((0,), (2, 3), (1,)) if channels_last else ((0,), (1,), (2, 3))
    # A result in channels_last is computed from an input in channels_last, as cuDNN does.
    needs_copy = channels_last and channels > 1 and x.strides[1] != 1
    source = _copied(x, channels_last_strides(x.shape)) if needs_copy else _Input(x)
    if unbatched:
        shape, strides = shape[1:], strides[1:]
        groups = tuple(tuple(dim - 1 for dim in dims if dim > 0) for dims in groups)
        if source.convert is not None:
            source = _Input(source.meta, functools.partial(_convert_unbatched, source.convert))

    def candidates(result: Layout) -> Sequence[Kernel]:
        described = conv2d.Conv2dProblem(
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
            weight_strides=weight.strides,  # type: ignore[arg-type]
            out_layout="nhwc" if channels_last else "nchw",
            precision=precision(problem.kind, x.dtype),
            x_alignment=source.meta.alignment,
            weight_alignment=weight.alignment,
        )
        reason = conv2d.unsupported(described)
        if reason is not None:
            raise UnsupportedError(reason)
        return conv2d.candidates(described)

    def grouping(sizes: Sequence[int], tensors: Sequence[Strides]) -> Layout | None:
        return group(sizes, tensors, groups)

    return _Prepared(source, _Input(weight), shape, strides, grouping, candidates, lambda result: True)


def _convert_unbatched(convert: Convert, x: torch.Tensor) -> torch.Tensor:
    return convert(x.unsqueeze(0))


# ------------------------------------------------------------------------------------------------ plan


def _with_bias(problem: Problem, expression: Expr) -> tuple[Expr, tuple[TensorMeta, ...]]:
    """The epilogue on the bare accumulator, and the operands with the bias as the last."""
    if problem.bias is None:
        return expression, problem.operands
    meta = problem.bias
    acc: Expr = Acc()
    bias: Expr = Operand(len(problem.operands))
    if problem.kind == "conv2d":
        meta = TensorMeta((*meta.shape, 1, 1), (*meta.strides, 0, 0), meta.dtype, meta.device, meta.alignment)
    elif problem.kind == "addmm":
        scale = dict(problem.options)
        acc = acc if scale["alpha"] == 1 else call("mul", acc, scale["alpha"])
        if scale["beta"] == 0:  # torch then does not read the bias
            return _with_acc(expression, acc), problem.operands
        bias = bias if scale["beta"] == 1 else call("mul", bias, scale["beta"])
    return _with_acc(expression, call("add", acc, bias)), (*problem.operands, meta)


def _with_acc(expression: Expr, acc: Expr) -> Expr:
    return rewrite(expression, lambda node: acc if isinstance(node, Acc) else node)


def draft(problem: Problem, acc: torch.Tensor) -> Draft:
    """Compiles what may run `problem`, whose anchor's result is like the meta tensor `acc`.

    Raises UnsupportedError, ToolchainError or BuildError.
    """
    capability = torch.cuda.get_device_capability(problem.x.device)
    if capability < MINIMUM_CAPABILITY:
        raise UnsupportedError(f"kernels need compute capability 8.0, this GPU has {capability[0]}.{capability[1]}")
    if acc.numel() == 0:
        raise UnsupportedError("the result is empty")
    prepared = (_prepare_conv2d if problem.kind == "conv2d" else _prepare_gemm)(problem, acc)
    shape, strides = prepared.result_shape, prepared.result_strides
    expression, output = typed(problem, torch.empty_strided(shape, strides, dtype=problem.x.dtype, device="meta"))
    region = _Region(problem, capability, prepared, expression, output, channel_operands(expression))
    return tune.draft(problem, _ranked(region))


@dataclass(frozen=True)
class _Region:
    """A problem with what every candidate for it needs to know."""

    problem: Problem
    capability: tuple[int, int]
    prepared: _Prepared
    expression: Expr
    """The epilogue, its dtypes settled."""
    output: torch.dtype
    channel: frozenset[int]
    """Operands that are read along dimension 1 of the result."""

    def load(self, kernel: Kernel, expression: Expr, operands: OperandPlan, uses_batch: bool) -> build.Launch:
        text = codegen.generate(expression, self.output, operands.kinds, kernel, uses_batch)
        return build.load(build.Source(text, self.capability, f"{kernel.name} for {self.problem.label}"))


def _ranked(region: _Region) -> list[tune.Candidate]:
    """Every way to run the region, best first by the kernel families' models."""
    library = _library_candidate(region)
    try:
        fused = _fused_candidates(region)
    except UnsupportedError as error:
        logger.info("fxfuse: %s runs by the library: %s", region.problem.label, error)
        return [library]
    return [library, *fused] if _library_is_faster(region) else [*fused, library]


def _library_is_faster(region: _Region) -> bool:
    """A guess for where nothing is measured: Hopper's libraries use instructions (wgmma) that these kernels do not."""
    problem = region.problem
    if problem.kind == "conv2d" or region.capability < (9, 0):
        return False
    depth = problem.weight.shape[1 if problem.kind == "linear" else 0]
    products = math.prod(region.prepared.result_shape) * depth
    return precision(problem.kind, problem.x.dtype) in ("tf32", "fp16", "bf16") and products >= LIBRARY_PRODUCTS


# --------------------------------------------------------------------------------------- fused candidates


def _fused_candidates(region: _Region) -> list[tune.Candidate]:
    """The anchor and its epilogue as one kernel. Raises UnsupportedError if no template fits."""
    prepared = region.prepared
    expression, metas = _with_bias(region.problem, region.expression)
    operands = plan_operands(prepared.result_shape, prepared.result_strides, metas, region.channel, prepared.grouping)
    assert operands is not None, "results are contiguous in one of the two layouts"
    kernels = prepared.candidates(operands.layout)
    if not kernels:
        raise UnsupportedError("no kernel template fits this problem")
    uses_batch = prepared.splits_rows(operands.layout)

    def candidate(kernel: Kernel) -> tune.Candidate:
        def compiled() -> Run:
            return _fused_runner(region, operands, kernel, region.load(kernel, expression, operands, uses_batch))

        return tune.Candidate(kernel.name, kernel.type, compiled, kernel.workspace)

    return [candidate(kernel) for kernel in kernels]


def _fused_runner(region: _Region, operands: OperandPlan, kernel: Kernel, launch: build.Launch) -> Run:
    problem, prepared = region.problem, region.prepared
    params = kernel.params + operands.packed_strides()
    device, index = problem.x.device, problem.x.device.index
    shape, strides, output = prepared.result_shape, prepared.result_strides, region.output
    convert_x, convert_weight = prepared.x.convert, prepared.weight.convert
    reads_bias = len(operands.kinds) > len(problem.operands)  # addmm with beta = 0 has one and does not
    addresses = operands.addresses()
    workspace_size = kernel.workspace

    def run(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, others: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        if current_device() != index:  # a launch goes to the current device
            with torch.cuda.device(index):
                return run(x, weight, bias, others)
        if convert_x is not None:
            x = convert_x(x)
        if convert_weight is not None:
            weight = convert_weight(weight)
        out = torch.empty_strided(shape, strides, dtype=output, device=device)
        pointers, _kept = addresses((*others, bias) if reads_bias and bias is not None else others)
        if workspace_size:
            workspace = torch.empty(workspace_size, dtype=torch.uint8, device=device)
            pointers = (workspace.data_ptr(), *pointers)
        try:
            launch(params, current_stream(index), x.data_ptr(), weight.data_ptr(), out.data_ptr(), *pointers)
        except RuntimeError as error:
            raise LaunchError(f"{problem.label}: {kernel.name} could not be launched: {error}") from error
        return out

    return run


# ----------------------------------------------------------------------------------- the library candidate


def _library_candidate(region: _Region) -> tune.Candidate:
    """The anchor by torch's library, then one generated pass over its result, in place unless the dtype changes.

    A matrix product's bias is added by the library, before it rounds its result. A convolution's is added by the pass:
    torch would make a pass of its own for it.
    """
    problem, prepared, output = region.problem, region.prepared, region.output
    by_pass = problem.kind == "conv2d"
    expression, metas = _with_bias(problem, region.expression) if by_pass else (region.expression, problem.operands)
    shape, strides = prepared.result_shape, prepared.result_strides
    operands = plan_operands(shape, strides, metas, region.channel, flatten)
    assert operands is not None, "results are contiguous in one of the two layouts"
    kernel = pointwise.kernel(operands.layout, problem.x.dtype, output)

    def compiled() -> Run:
        return _library_runner(region, operands, kernel, region.load(kernel, expression, operands, True), by_pass)

    return tune.Candidate(LIBRARY, LIBRARY, compiled, always=True)


def _library_runner(
    region: _Region, operands: OperandPlan, kernel: Kernel, launch: build.Launch, bias_by_pass: bool
) -> Run:
    problem, output = region.problem, region.output
    params = kernel.params + operands.packed_strides()
    device, index = problem.x.device, problem.x.device.index
    shape, strides = region.prepared.result_shape, region.prepared.result_strides
    moves = [size > 1 for size in shape]
    in_place = output == problem.x.dtype
    addresses = operands.addresses()

    def run(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, others: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        if current_device() != index:  # a launch goes to the current device
            with torch.cuda.device(index):
                return run(x, weight, bias, others)
        acc = run_anchor(problem.kind, problem.options, x, weight, None if bias_by_pass else bias)
        if any(have != want and moved for have, want, moved in zip(acc.stride(), strides, moves, strict=True)):
            acc = torch.empty_strided(shape, strides, dtype=acc.dtype, device=device).copy_(acc)
        out = acc if in_place else torch.empty_strided(shape, strides, dtype=output, device=device)
        pointers, _kept = addresses((*others, bias) if bias_by_pass and bias is not None else others)
        try:
            launch(params, current_stream(index), acc.data_ptr(), out.data_ptr(), *pointers)
        except RuntimeError as error:
            raise LaunchError(f"{problem.label}: {kernel.name} could not be launched: {error}") from error
        return out

    return run
