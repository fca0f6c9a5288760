"""The candidates that can run a problem on a CUDA device. tune.py chooses between them.

- Fused kernels (gemm.py, conv2d.py, layer_norm.py; prepare.py describes the problem to them) compute the anchor and the
  epilogue at once. They allocate the output and nothing else, unless the report says so. The bias is one of the
  epilogue's operands, so the kernels know nothing of it.
- The library candidate is the anchor by torch's library, followed by one generated pass (pointwise.py). It is chosen
  where no kernel here can match the library: a fused region is never slower than the operations that it replaced.
- A convolution on NCHW may also run by way of channels_last.

A chain is one generated pass; there is nothing to choose.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from fxfuse import build, ops
from fxfuse.chain import plan_pass
from fxfuse.cuda import codegen, gpu, pointwise, tune
from fxfuse.cuda.exactness import precision_of
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.launch import by_address_on_device, empty_strided, on_device, queue_by_address, queue_tensors
from fxfuse.cuda.pooling import Pooling
from fxfuse.cuda.prepare import Convert, Input, prepare
from fxfuse.cuda.region import Region, with_bias, with_parameters
from fxfuse.errors import BuildError, UnsupportedError
from fxfuse.expression import Acc, Call, postorder
from fxfuse.layout import CHANNELS_LAST, channels_last_strides, contiguous_strides, flatten, group
from fxfuse.operands import OperandPlan, plan_operands
from fxfuse.pooling import Separate
from fxfuse.problem import (
    ANCHORS,
    BY_CONVOLUTION,
    CONVOLUTIONS,
    PRODUCTS,
    Draft,
    Pass,
    Plan,
    Problem,
    Run,
    TensorMeta,
    anchor_alone,
    anchor_meta,
    anchor_weight,
    channel_operands,
    gate_of,
    in_order,
    is_thin,
    typed,
    without_unread,
)

LIBRARY_ALONE = "library"
LIBRARY = "library + one pass"
LIBRARY_POOLED = "library + one pass with max_pool2d"
CHANNELS_LAST_LIBRARY = "library in channels_last + passes"
LIBRARY_PRODUCTS = 3 * 2**30
"""Multiply-adds from which on torch's libraries on Hopper were measured to be ahead, in TF32 and 16 bits."""

TINY_PRODUCTS, TINY_WEIGHT = 2**23, 2**18
"""Multiply-adds and elements of the weight below which every kernel takes as long as a launch: only one is compiled."""

CHANNELS_LAST_PRODUCTS = 2**28
"""Multiply-adds below which the passes to channels_last and back take longer than the library gains there."""
CHANNELS_LAST_CONTESTANTS = 2
"""Most fused kernels that are candidates by way of channels_last, given enough processors."""

logger = logging.getLogger("fxfuse")


def draft(problem: Problem, acc: torch.Tensor) -> Draft:
    """Compiles the kernels that may run `problem`. Calling the draft chooses between them.

    Args:
        acc: the anchor's result as a meta tensor.

    Raises UnsupportedError, ToolchainError or BuildError.
    """
    capability = gpu.capability(problem.x.device)
    if capability < gpu.MINIMUM_CAPABILITY:
        raise UnsupportedError(f"kernels need compute capability 8.0, this GPU has {capability[0]}.{capability[1]}")
    if problem.pool and problem.kind != "conv2d":
        raise Separate("only convolutions and max-pooling share a pass")
    if problem.is_chain:
        return _draft_chain(problem, acc, capability)
    if acc.numel() == 0:
        raise UnsupportedError("the result is empty")
    prepared = prepare(problem, acc)
    shape, strides = prepared.result_shape, prepared.result_strides
    expression, output = typed(problem, torch.empty_strided(shape, strides, dtype=problem.x.dtype, device="meta"))
    region = Region(problem, capability, prepared, expression, output, channel_operands(expression))
    return tune.draft(problem, _ranked(region))


def draft_gated(problem: Problem, acc: torch.Tensor, apart: Callable[[], Draft]) -> Draft:
    """`draft` for a gated linear.

    Args:
        apart: drafts the two linears as two kernels, one after the other. They are used where no single kernel can run,
            and measured against the single kernel elsewhere.
    """
    try:
        return tune.draft(problem, _gated_candidates(problem, acc), apart)
    except (UnsupportedError, BuildError) as error:
        logger.info("fxfuse: %s runs as two linears: %s", problem.label, error)
        return apart()


def _gated_candidates(problem: Problem, acc: torch.Tensor) -> list[tune.Candidate]:
    """The kernels that compute both products at once. Raises UnsupportedError if no template fits."""
    gate, _, others = gate_of(problem.expression, problem.operands)
    if gate != dataclasses.replace(anchor_weight(problem), is_parameter=gate.is_parameter):
        raise UnsupportedError("its weights do not lie in the same way")
    like = torch.empty_strided(acc.shape, contiguous_strides(acc.shape), dtype=acc.dtype, device="meta")
    # for all but the kernel, the gate's product is an operand with acc's shape
    seen = dataclasses.replace(problem, operands=(TensorMeta.of(like, problem.x.device), *others))
    if without_unread(seen, like) is not None:
        raise UnsupportedError("only the dtype of an operand counts")
    prepared = prepare(seen, like)
    if prepared.weight is None or prepared.weight.convert is not None:
        raise UnsupportedError("its weights would have to be copied")
    expression, output = typed(seen, like)
    capability = gpu.capability(problem.x.device)
    return _fused_candidates(Region(problem, capability, prepared, expression, output, channel_operands(expression)))


def _ranked(region: Region) -> list[tune.Candidate]:
    """All candidates for the region, best first by the kernel families' models of time."""
    pooling = Pooling.of(region) if region.problem.pool else None
    first = _library_candidate(region) if pooling is None else _pooled_library_candidate(region, pooling)
    if _is_thin(region):
        return [first]  # of which programs make loops (program/operators.py)
    library = [first, *_channels_last_candidates(region, pooling)]
    try:
        fused = _fused_candidates(region)
    except UnsupportedError as error:
        logger.info("fxfuse: %s runs by the library: %s", region.problem.label, error)
        return library
    if _is_tiny(region):
        del fused[1:]
    if pooling is not None:
        fused = [pooling.after(candidate) for candidate in fused]
    return [*library, *fused] if _library_is_faster(region) else [*fused, *library]


def _is_tiny(region: Region) -> bool:
    """Whether a product is so small that every kernel takes as long as a launch."""
    if region.problem.kind not in PRODUCTS:
        return False
    return _products(region) < TINY_PRODUCTS and math.prod(anchor_weight(region.problem).shape) < TINY_WEIGHT


def _is_thin(region: Region) -> bool:
    problem = region.problem
    if problem.kind not in PRODUCTS - BY_CONVOLUTION - {"gated_linear"}:
        return False
    *_, one, other = anchor_weight(problem).shape
    return is_thin(one, other)


def _products(region: Region) -> int:
    """Number of multiply-adds of the anchor."""
    weight = anchor_weight(region.problem).shape
    kind = region.problem.kind
    if kind == "conv2d_weight":
        depth = region.problem.x.shape[0] * math.prod(region.problem.x.shape[2:])
    else:
        depth = math.prod(weight[1:]) if kind in CONVOLUTIONS else weight[-1] if kind == "linear" else weight[-2]
    return math.prod(region.prepared.result_shape) * depth


def _library_is_faster(region: Region) -> bool:
    """Whether the library is ranked before the fused kernels: a guess, used where nothing is measured.

    Libraries use Hopper's wgmma instructions for all these products. Only some of the kernels here do.
    """
    problem = region.problem
    if problem.kind in (*CONVOLUTIONS, "layer_norm") or region.capability < (9, 0):
        return False
    wide = precision_of(problem) in ("tf32", "fp16", "bf16")
    return wide and _products(region) >= LIBRARY_PRODUCTS


# --------------------------------------------------------------------------------------- fused candidates


def _fused_candidates(region: Region) -> list[tune.Candidate]:
    """The kernels that compute the anchor and its epilogue at once. Raises UnsupportedError if no template fits."""
    prepared = region.prepared
    expression, metas = with_parameters(region.problem, region.expression)
    shape, strides, channel = prepared.result_shape, prepared.result_strides, channel_operands(expression)
    operands = plan_operands(shape, strides, metas, channel, prepared.grouping, prepared.grows)
    assert operands is not None, "results are contiguous in one of the two layouts"
    kernels = prepared.candidates(operands.layout)
    if not kernels:
        raise UnsupportedError("no kernel template fits this problem")
    uses_batch = prepared.splits_rows(operands.layout)

    def candidate(kernel: Kernel) -> tune.Candidate:
        def compiled() -> Run:
            return _fused_runner(region, operands, kernel, region.load(kernel, expression, operands, uses_batch))

        return tune.Candidate(
            kernel.name, kernel.type, compiled, kernel.workspace, computes=computes, estimate=kernel.estimate,
            form=(kernel.type, *epilogue),
        )  # fmt: skip

    epilogue = expression, region.output, operands.kinds, uses_batch, operands.columns, precision_of(region.problem)
    computes = Pass(region.expression, False, "layer_norm") if region.problem.kind == "layer_norm" else None
    return [candidate(kernel) for kernel in kernels]


def _fused_runner(region: Region, operands: OperandPlan, kernel: Kernel, launch: build.Launch) -> Run:
    """A Run that launches the kernel. Nearly all problems get a ByAddress: there each microsecond counts."""
    prepared, problem = region.prepared, region.problem
    index, output = problem.x.device.index, region.output
    shape, strides = prepared.result_shape, prepared.result_strides
    convert_x = _converting(region, problem.x, prepared.x)
    convert_weight = None
    if prepared.weight is not None:
        convert_weight = _converting(region, anchor_weight(problem), prepared.weight)
    inputs = region.inputs
    of_call = 1 + (problem.weight is not None) + len(problem.operands) + (problem.bias is not None)
    all_read = len(operands.kinds) == of_call - inputs  # addmm with beta = 0 has a bias and does not read it
    workspace_size = kernel.workspace
    queue = queue_by_address(problem, operands, kernel, launch)

    def by_address(tensors: tuple[torch.Tensor, ...], addresses: list[int]) -> torch.Tensor:
        out = empty_strided(shape, strides, output)
        own, others = addresses[:inputs], addresses[inputs:]
        if workspace_size:
            workspace = empty_strided((workspace_size,), (1,), torch.uint8)
            queue(others, *own, out.data_ptr(), workspace.data_ptr())
        else:
            queue(others, *own, out.data_ptr())
        return out

    direct = by_address_on_device(index, by_address)
    if operands.are_addresses and convert_x is None and convert_weight is None and all_read:
        return direct

    arguments = operands.addresses()

    def run(
        x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, others: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        x = x if convert_x is None else convert_x(x)
        if convert_weight is not None and weight is not None:
            weight = convert_weight(weight)
        tensors = in_order(x, weight, bias if all_read else None, others)
        pointers, _kept = arguments(tensors[inputs:])
        return direct.launch(tensors, [*(tensor.data_ptr() for tensor in tensors[:inputs]), *pointers])

    return on_device(index, run)


def _converting(region: Region, meta: TensorMeta, needed: Input) -> Convert | None:
    """The copy that makes a tensor like `meta` readable for the kernel, or None if it needs none.

    A copy to channels_last is a generated pass where there is one. Other copies are torch's.
    """
    if needed.convert is None or len(meta.shape) != 4 or needed.meta.strides != channels_last_strides(meta.shape):
        return needed.convert
    found = _copy_to_channels_last(meta)
    if found is None:
        return needed.convert
    kernel, operands = found
    queue = queue_tensors(region.problem, operands, kernel, region.load_copy(kernel, operands))

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        copy = empty_strided(meta.shape, needed.meta.strides, meta.dtype)
        queue((), tensor.data_ptr(), copy.data_ptr())
        return copy

    return convert


# ----------------------------------------------------------------------------------- the library candidate


def _library_candidate(region: Region) -> tune.Candidate:
    """The anchor by torch's library, then one generated pass over its result, in place unless the dtype changes."""
    problem, prepared, output = region.problem, region.prepared, region.output
    biased = problem.kind in CONVOLUTIONS and problem.bias is not None  # torch adds it in a slower pass of its own
    if isinstance(region.expression, Acc) and output == problem.x.dtype and not biased:
        return tune.Candidate(LIBRARY_ALONE, LIBRARY_ALONE, lambda: anchor_alone(problem), always=True, library=True)
    if _is_widened_product(region):
        return tune.Candidate(LIBRARY_ALONE, LIBRARY_ALONE, lambda: _widened_product, always=True, library=True)
    by_pass = _bias_by_pass(region)
    expression, metas = with_bias(problem, region.expression) if by_pass else (region.expression, problem.operands)
    shape, strides = prepared.result_shape, prepared.result_strides
    operands = plan_operands(shape, strides, metas, region.channel, flatten)
    assert operands is not None, "results are contiguous in one of the two layouts"
    kernel = pointwise.kernel(operands.layout, problem.x.dtype, output)

    def compiled() -> Run:
        return _library_runner(region, operands, kernel, region.load(kernel, expression, operands, True), by_pass)

    computes = Pass(expression, len(metas) > len(problem.operands), "library")
    return tune.Candidate(LIBRARY, LIBRARY, compiled, always=True, library=True, computes=computes)


def _is_widened_product(region: Region) -> bool:
    """Whether a region is a 16-bit product cast to float32, which torch's library can write as such (since 2.8).

    Gradients of weights under autocast are such products.
    """
    is_widened = region.expression == Call("float32", (Acc(),))  # x is not float32: casts to the same dtype are gone
    is_one = region.problem.kind == "mm" and is_widened
    return is_one and hasattr(torch.ops.aten.mm, "dtype") and gpu.standing_in() is None


def _widened_product(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, operands: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The Run of a region for which `_is_widened_product` holds."""
    assert weight is not None
    return torch.mm(x, weight, out_dtype=torch.float32)


def _pooled_library_candidate(region: Region, pooling: Pooling) -> tune.Candidate:
    """The convolution by torch's library, then one generated pass that applies the epilogue and pools."""
    expression, metas = with_bias(region.problem, region.expression)
    operands, kernel = pooling.kernel(expression, metas, region.problem.x.dtype)

    def compiled() -> Run:
        launch = region.load(kernel, expression, operands, True)
        return _library_runner(region, operands, kernel, launch, True, pooling)

    return tune.Candidate(LIBRARY_POOLED, LIBRARY_POOLED, compiled, pooling.unpooled_bytes, always=True, library=True)


def _bias_by_pass(region: Region) -> bool:
    """Whether the pass, and not the library, adds the bias.

    A library takes longer for a product with a bias, or uses another kernel for it. A 16-bit product is rounded once
    more if the pass adds the bias. Eager rounds after each operation, so this is no worse than eager if the epilogue
    has an operation that rounds.
    """
    if region.problem.kind not in PRODUCTS:
        return False
    rows = [ops.row(node.op) for node in postorder(region.expression) if isinstance(node, Call)]
    rounds = any(not (row.passing or row.boolean) for row in rows)
    return region.problem.kind in CONVOLUTIONS or region.problem.x.dtype == torch.float32 or rounds


def _library(problem: Problem, bias_by_pass: bool) -> Callable[..., torch.Tensor]:
    """library(x, weight, bias): the anchor by torch's library; bias is None if the pass adds it."""
    options = dict(problem.options)
    if problem.kind == "addmm" and bias_by_pass:  # the pass also applies alpha and beta
        return ANCHORS["mm"]
    if problem.kind == "conv2d" and len(problem.x.shape) == 4 and len(options["padding"]) == 2:
        sides = (options["stride"], options["padding"], options["dilation"], False, (0, 0), options["groups"])
        return lambda x, weight, bias: torch.convolution(x, weight, bias, *sides)  # a microsecond less than conv2d
    return functools.partial(ANCHORS[problem.kind], **options)


def _library_runner(
    region: Region, operands: OperandPlan, kernel: Kernel, launch: build.Launch, bias_by_pass: bool,
    pooling: Pooling | None = None,
) -> Run:  # fmt: skip
    problem, output = region.problem, region.output
    device = problem.x.device
    shape, strides = region.prepared.result_shape, region.prepared.result_strides
    moves = [size > 1 for size in shape]
    anchor = _library(problem, bias_by_pass)
    reads_bias = len(operands.kinds) > len(problem.operands)
    in_place = output == problem.x.dtype and pooling is None
    out_shape, out_strides = (shape, strides) if pooling is None else (pooling.shape, pooling.strides)
    queue = queue_tensors(region.problem, operands, kernel, launch)

    def run(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, others: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        acc = anchor(x, weight, None if bias_by_pass else bias)
        found = acc.stride()
        if found != strides and any(a != b and moved for a, b, moved in zip(found, strides, moves, strict=True)):
            acc = empty_strided(shape, strides, acc.dtype).copy_(acc)
        if reads_bias and bias is not None:
            others = (*others, bias)
        out = acc if in_place else empty_strided(out_shape, out_strides, output)
        queue(others, acc.data_ptr(), out.data_ptr())
        return out

    return on_device(device.index, run)


# ------------------------------------------------------------------------- candidates by way of channels_last


def _channels_last_candidates(region: Region, pooling: Pooling | None = None) -> list[tune.Candidate]:
    """Candidates that compute a convolution of NCHW tensors in channels_last; empty where this cannot be faster.

    One pass copies x and the filters to channels_last. Another applies the epilogue on the way back to NCHW.

    - On Hopper the library's kernels for channels_last use wgmma instructions, its kernels for NCHW do not: 64 to 128
      channels at 128² take 0.99 ms in TF32 instead of 1.75.
    - Where TF32 is not allowed the library has no such kernels. There the fused kernels are faster in channels_last
      than on NCHW, where they gather rows of any length four bytes at a time.
    """
    problem, prepared = region.problem, region.prepared
    x, shape = problem.x, prepared.result_shape
    if problem.kind != "conv2d" or len(x.shape) != 4 or dict(problem.options)["groups"] != 1:
        return []
    weight = anchor_weight(problem)
    if _products(region) < CHANNELS_LAST_PRODUCTS:
        return []
    if prepared.result_strides != contiguous_strides(shape) or 1 in (*x.shape[1:], *shape[1:]):
        return []
    library = _library(problem, True)
    anchors: list[tuple[str, Callable[[], Anchor]]] = [
        (CHANNELS_LAST_LIBRARY, lambda: lambda x, weight: library(x, weight, None))
    ]
    if not _library_gains_there(problem):
        anchors = _channels_last_anchors(region)
    expression, metas = with_bias(problem, region.expression)
    operands = plan_operands(shape, prepared.result_strides, metas, region.channel, prepared.grouping)
    assert operands is not None, "results are contiguous in one of the two layouts"
    image, _, _, pixel = channels_last_strides(shape)
    way = operands.layout, (image, pixel), x.dtype, region.output
    back = pointwise.planes_kernel(*way) or pointwise.transposed_kernel(*way)
    copies = math.prod(x.shape) + math.prod(shape) + (math.prod(weight.shape) if weight.shape[2:] != (1, 1) else 0)
    workspace = copies * x.dtype.itemsize

    def candidate(name: str, anchor: Callable[[], Anchor]) -> tune.Candidate:
        def compiled() -> Run:
            queue = queue_tensors(problem, operands, back, region.load(back, expression, operands, True))
            return _channels_last_runner(region, _to_channels_last(region, x, weight), anchor(), queue)

        return tune.Candidate(name, name, compiled, workspace, always=True)

    found = [candidate(*anchor) for anchor in anchors]
    return found if pooling is None else [pooling.after(candidate) for candidate in found]


def _library_gains_there(problem: Problem) -> bool:
    """Whether the library's kernels for channels_last are candidates: not in exact float32, as they may use TF32."""
    return precision_of(problem) != "tf32x3"


Anchor: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""anchor(x, weight): the convolution alone."""


def _channels_last_anchors(region: Region) -> list[tuple[str, Callable[[], Anchor]]]:
    """The best fused kernels for the convolution alone, with x and the weight in channels_last: (name, build)."""
    problem, weight = region.problem, anchor_weight(region.problem)
    if weight.shape[2:] == (1, 1):
        return []  # the passes would copy as many elements as the convolution computes
    x, filters = (
        TensorMeta(meta.shape, channels_last_strides(meta.shape), meta.dtype, meta.device)
        for meta in (problem.x, weight)
    )
    alone = dataclasses.replace(problem, x=x, weight=filters, bias=None, epilogue="acc", operands=(), pool=())
    acc = anchor_meta(alone)
    # the precision of the NCHW problem: in channels_last the library may use TF32 where it does not in NCHW
    prepared = prepare(alone, acc, precision_of(problem))
    there = Region(alone, region.capability, prepared, Acc(), alone.x.dtype, frozenset())

    def anchor(candidate: tune.Candidate) -> tuple[str, Callable[[], Anchor]]:
        def build_anchor() -> Anchor:
            run = candidate.build()
            return lambda x, weight: run(x, weight, None, ())

        return f"{candidate.name}, in channels_last + passes", build_anchor

    try:
        most = min(CHANNELS_LAST_CONTESTANTS, tune.most_contestants())
        return [anchor(candidate) for candidate in _fused_candidates(there)[:most]]
    except UnsupportedError:
        return []


def _to_channels_last(region: Region, x: TensorMeta, weight: TensorMeta) -> Callable[..., list[torch.Tensor]]:
    """A function that copies x and the weight to channels_last: by a generated pass if planes are contiguous, else by
    torch. Two generated passes are one launch."""
    metas = (x, weight)
    passes = [_copy_to_channels_last(meta) for meta in metas]
    generated = [found for found in passes if found is not None]
    if generated:
        kernel, operands = generated[0]
        if len(generated) == 2:
            kernel = pointwise.transposed_pair(kernel, generated[1][0])
        queue = queue_tensors(region.problem, operands, kernel, region.load_copy(kernel, operands))

    def convert(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        copies: list[torch.Tensor] = []
        addresses: list[int] = []
        for tensor, meta, found in zip((x, weight), metas, passes, strict=True):
            if found is None:
                copies.append(tensor.contiguous(memory_format=torch.channels_last))
                continue
            copies.append(empty_strided(meta.shape, channels_last_strides(meta.shape), meta.dtype))
            addresses += (tensor.data_ptr(), copies[-1].data_ptr())
        if addresses:
            queue((), *addresses)
        return copies

    return convert


def _copy_to_channels_last(meta: TensorMeta) -> tuple[Kernel, OperandPlan] | None:
    """The pass that copies a tensor like `meta` to channels_last; None if the tensor's planes are not contiguous."""
    there = channels_last_strides(meta.shape)
    seen = group(meta.shape, [there, meta.strides], CHANNELS_LAST)
    if seen is None or seen.strides[1][1] != 1 or seen.sizes[1] == 1:
        return None
    operands = plan_operands(meta.shape, there, (), frozenset(), functools.partial(group, groups=CHANNELS_LAST))
    assert operands is not None, "channels_last has three dimensions"
    batch_stride, _, col_stride = seen.strides[1]
    strides = (batch_stride, col_stride)
    return pointwise.transposed_kernel(operands.layout, strides, meta.dtype, meta.dtype, meta.alignment), operands


def _channels_last_runner(
    region: Region,
    convert: Callable[..., list[torch.Tensor]],
    anchor: Anchor,
    back: Callable[..., None],
) -> Run:
    problem, output = region.problem, region.output
    device = problem.x.device
    shape, strides = region.prepared.result_shape, region.prepared.result_strides

    def run(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, others: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        acc = anchor(*convert(x, weight)).contiguous(memory_format=torch.channels_last)
        if bias is not None:
            others = (*others, bias)
        out = empty_strided(shape, strides, output)
        back(others, acc.data_ptr(), out.data_ptr())
        return out

    return on_device(device.index, run)


# ------------------------------------------------------------------------------------------------- chains


def _draft_chain(problem: Problem, acc: torch.Tensor, capability: tuple[int, int]) -> Draft:
    chosen = plan_pass(problem, acc)
    operands, in_place, reads_x = chosen.operands, chosen.in_place, chosen.reads_x
    index = problem.x.device.index
    shape, strides, dtype = chosen.shape, chosen.strides, chosen.dtype
    kernel = pointwise.kernel(operands.layout, dtype, dtype, problem.x.alignment if in_place else pointwise.ACCESS)
    text = codegen.generate(chosen.expression, dtype, operands.kinds, kernel, columns=operands.columns)
    launch = build.load(build.Source(text, capability, f"{kernel.name} for {problem.label}"))
    queue, arguments = queue_by_address(problem, operands, kernel, launch), operands.addresses()

    # acc has the result's address; if the result is a new tensor, the expression has no acc, so nothing reads it
    def write(x: torch.Tensor, pointers: Sequence[int]) -> torch.Tensor:
        out = x if in_place else empty_strided(shape, strides, dtype)
        address = out.data_ptr()
        queue(pointers, address, address)
        return out

    def by_address(tensors: tuple[torch.Tensor, ...], addresses: list[int]) -> torch.Tensor:
        x, *others = addresses
        return write(tensors[0], (*others, x) if reads_x else others)

    def run(x: torch.Tensor, weight: object, bias: object, others: Sequence[torch.Tensor]) -> torch.Tensor:
        pointers, _kept = arguments((*others, x) if reads_x else others)
        return write(x, pointers)

    chosen_run = by_address_on_device(index, by_address) if operands.are_addresses else on_device(index, run)
    plan = Plan(chosen_run, chosen.name)
    return lambda: plan
