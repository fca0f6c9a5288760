"""Compiles every kernel template, with generated epilogues, for sm_80: no GPU needed.

With nvcc: no register spills, no arrays in local memory, at most 163 KB of shared memory. With NVRTC 12.1, if it is
installed: the sources stay within CUDA 12.1. A few of the kernels that other architectures are offered are compiled for
those, within the shared memory that they have. With nvdisasm and --arch 90, too: no kernel reads memory before it has
waited for the kernel before it. Exits non-zero with a table of what failed.

    python .ci/check_cuda.py [--arch 80] [--only SUBSTRING] [--each NUMBER]
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import util
from pathlib import Path

import torch
from tabulate import tabulate

from fxfuse import build
from fxfuse.build import PACKAGE
from fxfuse.codegen import OperandKind
from fxfuse.cuda import (
    attention,
    attention_gradient,
    codegen,
    conv2d,
    conv2d_weight,
    gemm,
    gemm_problem,
    layer_norm,
    loops,
    pointwise,
)
from fxfuse.cuda.conv2d_problem import Conv2dProblem
from fxfuse.cuda.conv2d_problem import Layout as ImageLayout
from fxfuse.cuda.gpu import ARCHITECTURES
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.precision import Precision
from fxfuse.expression import Acc, parse
from fxfuse.layout import Layout, contiguous_strides
from fxfuse.pooling import MaxPool
from fxfuse.program.loops import inlined, reads_alike
from fxfuse.program.operators import loops_of
from fxfuse.program.text import LoopsKernel
from fxfuse.program.values import Slot, Value

HOPPER = "90a"
"""Kernels by warpgroup products take its own instructions."""
SHARED_LIMIT = ARCHITECTURES[8, 0].shared_memory_per_block_optin
HOPPER_SHARED = ARCHITECTURES[9, 0].shared_memory_per_multiprocessor
OTHERS = {
    name: ARCHITECTURES[capability].shared_memory_per_block_optin
    for name, capability in {"86": (8, 6), "89": (8, 9), "100a": (10, 0), "120a": (12, 0)}.items()
}
"""Further architectures, and bytes of shared memory that a block has there."""
KERNELS = PACKAGE / "cuda" / "kernels"
NAMESPACE = "fxfuse_kernel_"
"""What a kernel's namespace is called in a unit, before its number."""


SPILLED = {
    # What is needed once a tile may be kept elsewhere; other architectures may spill a register or two.
    "Wgmma": 64, "DirectConfig<Tf32x3": 64, "sm_": 64, "TiledAttention<Tf32x3": 96,
    # Two kernels, each with a second loop that runs if a result is not finite. Most of this is in that loop.
    "AttentionGradient<Tf32x3": 512, "AttentionGradient<": 64,
}  # fmt: skip
"""Bytes of spilled registers that kernels may have whose names contain this."""
# Long, with special functions, a vector and a full operand: what it needs of registers must not cause spills.
EPILOGUE = parse("t0 = acc + o0 + o1; gelu(tanh(clamp(mish(t0) * sigmoid(t0), -1.0, 1.0)))")
OPERANDS = (
    OperandKind(torch.float32, (False, True, True), 16),
    OperandKind(torch.float32, (False, False, True), 16),
)
GATED_EPILOGUE = parse("gelu(tanh(clamp(mish(acc + o0 + o1) * sigmoid(o2 + o1), -1.0, 1.0)))")
"""With a second product, o2."""
CHANNEL_EPILOGUE = parse("gelu(mish(acc + o0))")
CHANNEL_OPERANDS = (OperandKind(torch.float32, (False, True, False), 0),)
"""For kernels that store in another way where no operand varies along the columns."""
OUTPUTS: dict[Precision, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "tf32x3": torch.float32,
    "fp16x3": torch.float32,
}
IMAGE = 56  # height and width of the images in the convolutions


def gemms(precision: Precision, first: int | None) -> Iterator[Kernel]:
    """The first candidates of a large, a wide, a skinny and an odd problem, with the weight in both layouts.

    In 3xTF32 also of one whose sums cuBLAS divides: Hopper's kernel adds up more carefully there. And the first two of
    several products whose rows end within a read, and of several small ones with long sums.
    """
    element = 4 if OUTPUTS[precision] == torch.float32 else 2
    for layout in ("nk", "kn"):
        n, k = (512, 509) if layout == "nk" else (509, 512)
        many = gemm_problem.Problem(512, n, k, precision, layout, 512, 512, n, batches=16, hopper=True)
        many = replace(many, x_step=512 * 512, weight_step=512 * 512, shared_memory=HOPPER_SHARED)
        yield from gemm.candidates(many)[: first or 2]
        m, n, k = (192, 256, 1 << 14) if layout == "nk" else (192, 128, 1 << 14)
        small = replace(many, m=m, n=n, k=k, x_stride=k, weight_stride=k if layout == "nk" else n, out_stride=n)
        yield from gemm.candidates(replace(small, x_step=m * k, weight_step=n * k))[: first or 2]
        for m, n, k, alignment in (
            (1024, 8192, 8192, 16),
            (128, 8192, 8192, 16),
            (16, 4096, 4096, 16),
            (8, 4096, 4096, 16),
            (8, 640, 4096, 16),
            (16, 640, 4096, 16),
            (4, 4096, 4096, 16),
            (1, 4096, 4096, 16),
            (129, 257, 513, element),
            *(((2048, 768, 3072, 16),) if precision == "tf32x3" else ()),
        ):
            stride = k if layout == "nk" else n
            problem = gemm_problem.Problem(m, n, k, precision, layout, k, stride, n, alignment, alignment)
            problem = replace(problem, hopper=True, shared_memory=HOPPER_SHARED)
            yield from gemm.candidates(problem)[:first]
            if precision != "fp16x3" and layout == "kn" and m > 16:
                yield from gemm.candidates(replace(problem, x_layout="km", x_stride=m))[:first]


def gated(precision: Precision) -> tuple[Kernel, ...]:
    """The kernels that multiply with two weights."""
    problem = gemm_problem.Problem(1024, 8192, 8192, precision, "nk", 8192, 8192, 8192, hopper=True, weights=2)
    return gemm.candidates(replace(problem, shared_memory=HOPPER_SHARED))


def convolutions(precision: Precision, first: int | None) -> Iterator[Kernel]:
    """The first candidates of 3x3, a stem, depthwise (also with two filters a channel) and 1x1, in both layouts.

    Channels_last has filters in its own order, for 3x3 also in NCHW's.
    """
    shapes = (
        # channels, filters, kernel, groups, height and width
        (64, 128, 3, 1, IMAGE), (8, 64, 3, 1, IMAGE), (8, 64, 3, 1, IMAGE + 1), (3, 64, 7, 1, IMAGE),
        (64, 64, 3, 64, IMAGE), (64, 64, 5, 64, IMAGE), (64, 64, 7, 64, IMAGE), (64, 64, 9, 64, IMAGE),
        (64, 128, 3, 64, IMAGE),
        (64, 256, 1, 1, IMAGE), (24, 144, 1, 1, IMAGE), (512, 512, 3, 1, 9),
        (512, 64, 1, 1, 7), (512, 128, 3, 1, 9),
    )  # fmt: skip
    layouts: tuple[ImageLayout, ...] = ("nchw", "nhwc")
    problems = [(layout, layout, shape) for layout in layouts for shape in shapes]
    for layout, filter_layout, (channels, filters, kernel, groups, side) in (*problems, ("nhwc", "nchw", shapes[0])):
        problem = Conv2dProblem(
            images=8,
            channels=channels,
            size=(side, side),
            out_channels=filters,
            out_size=(side - kernel + 1, side - kernel + 1),
            kernel=(kernel, kernel),
            stride=(1, 1),
            padding=(0, 0),
            dilation=(1, 1),
            groups=groups,
            x_strides=_strides(layout, channels, side),
            weight_strides=_strides(filter_layout, channels // groups, kernel),
            out_layout=layout,
            precision=precision,
            shared_memory=HOPPER_SHARED,
            hopper=True,
        )
        yield from conv2d.candidates(problem)[:first]
        if groups == channels:
            yield from conv2d.candidates(replace(problem, images=64))[:1]  # by tensor cores, if there is enough to do
            side = (IMAGE - kernel) // 2 + 1
            yield from conv2d.candidates(replace(problem, stride=(2, 2), out_size=(side, side)))[:1]


def _strides(layout: ImageLayout, channels: int, side: int) -> tuple[int, int, int, int]:
    steps = (side * side, side, 1) if layout == "nchw" else (1, side * channels, channels)
    return (channels * side * side, *steps)


def passes(output: torch.dtype) -> Iterator[Kernel]:
    """The passes over a library's result with rows of a multiple of 16 bytes and of any length."""
    for row_length in (4096, 49):
        layout = Layout((8, 64, row_length), ((64 * row_length, row_length, 1),))
        yield pointwise.kernel(layout, output, output)
        yield pointwise.transposed_kernel(layout, (64 * row_length, 64), output, output)
        if (planes := pointwise.planes_kernel(layout, (64 * row_length, 64), output, output)) is not None:
            yield planes
    for channels_last, window in ((True, (2, 2)), (True, (3, 3)), (True, (5, 5)), (False, (2, 2)), (False, (3, 3))):
        pool = MaxPool(*window, 2, 2, 0, 0, False)
        yield pointwise.max_pool_kernel((8, 64, 56, 56), channels_last, pool, (27, 27), output, output)
    filters = Layout((64, 9, 512), ((9 * 512, 512, 1),))
    of_filters = pointwise.transposed_kernel(filters, (9 * 512, 9), output, output)
    of_x = pointwise.transposed_kernel(Layout((8, 196, 512), ((196 * 512, 512, 1),)), (196 * 512, 196), output, output)
    yield pointwise.transposed_pair(of_x, of_filters)


def normalisations(output: torch.dtype) -> Iterator[Kernel]:
    """Rows that few threads share, a warp, and several; whose threads hold as many elements as any do."""
    for columns in (96, 768, 1000, 1024, 2048, 8192, 6143, 7):
        yield from layer_norm.candidates(layer_norm.Problem(4096, columns, columns, 512, 1e-5, output))


def attentions(output: torch.dtype, clusters: bool) -> Iterator[Kernel]:
    """Of one query and of several that share keys, with masks of truth values and numbers and without, few and many
    channels; by clusters of blocks, too, or not. Of many queries, whose mask may be causal."""
    size = output.itemsize
    for group, queries, width, mask, is_shared in (
        (1, 1, 128, torch.bool, True), (4, 1, 128, torch.bool, True), (8, 1, 512 // size, output, True),
        (2, 1, 64, None, True), (2, 4, 128, output, False), (1, 1, 80, torch.float32, True),
    ):  # fmt: skip
        rows, shared = (width * 512, width * 4096, width), (4096, 0 if is_shared else 4096, 0 if is_shared else 4096, 1)
        strides = (rows, rows, rows, rows, shared)
        problem = attention.Problem(2, 4, group, queries, 4096, width, output, mask, *strides)
        for batch, largest in ((1, 1), (4, 16 if clusters else 1), (64, 1)):
            yield from attention.candidates(replace(problem, batch=batch, largest_cluster=largest))[:1]
    for queries, width, mask, is_causal in (
        (49, 32, output, False), (196, 64, None, False), (196, 64, None, True), (300, 128, torch.bool, False),
    ):  # fmt: skip
        rows = (width * queries, width * queries, width)
        of_mask = (0, 0, 0, 0) if mask is None else (0, queries * queries, queries, 1)
        yield from attention.candidates(
            attention.Problem(
                2, 4, 1, queries, queries, width, output, mask, rows, rows, rows, rows, of_mask, is_causal=is_causal
            )
        )


def gradients_of_attention(output: torch.dtype) -> Iterator[Kernel]:
    """Without a mask, with a causal one, and with one whose gradient is asked for; few and many channels."""
    rows = 196
    for width, mask, is_causal in ((64, None, False), (128, None, True), (32, output, False)):
        strides = (4 * rows * width, rows * width, width)
        of_mask = (0, 0, 0, 0) if mask is None else (0, rows * rows, rows, 1)
        dmask = None if mask is None else (4 * rows * rows, rows * rows, rows)
        forward = attention.Problem(
            2, 4, 1, rows, rows, width, output, mask, *[strides] * 4, of_mask, is_causal=is_causal
        )  # fmt: skip
        problem = attention_gradient.Problem(forward, *[strides] * 4, (4 * rows, rows), dmask)
        yield from attention_gradient.candidates(problem)


def filter_gradients(precision: Precision, first: int | None) -> Iterator[Kernel]:
    """Of 3x3 convolutions whose pixels are read 16 bytes at a time, or fewer, also in groups; depthwise: every filter
    and stride."""
    for channels, filters, side, images, groups in (
        (256, 512, 28, 32, 1), (64, 64, 56, 32, 1), (66, 62, 14, 4, 1), (256, 256, 28, 32, 8), (66, 66, 14, 4, 11),
    ):  # fmt: skip
        strides = (channels * side * side, 1, channels * side, channels)
        of_dy = (filters * side * side, 1, filters * side, filters)
        problem = conv2d_weight.Problem(
            images, filters, channels, (side, side), (side, side), (3, 3), (1, 1), (1, 1), (1, 1), groups, precision,
            of_dy, strides, hopper=True, shared_memory=HOPPER_SHARED,
        )  # fmt: skip
        yield from conv2d_weight.candidates(problem)[:first]
    for side, stride in itertools.product((3, 5, 7), (1, 2)):
        strides = (96 * IMAGE * IMAGE, 1, 96 * IMAGE, 96)
        yield from conv2d_weight.candidates(
            conv2d_weight.Problem(
                32, 96, 96, (IMAGE, IMAGE), (IMAGE // stride, IMAGE // stride), (side, side), (stride, stride),
                (side // 2, side // 2), (1, 1), 96, precision, strides, strides,
            )
        )  # fmt: skip


def between_regions(output: torch.dtype) -> Iterator[str]:
    """What stands between library calls: windows of a rolled and padded image, a sum of chosen rows and a mask, its
    softmax, standardised weights, means of images in channels_last and their windows, columns' softmax, a product, rows
    of all kinds: short, long, few, and those of groups."""
    aten = torch.ops.aten

    def value(name: str, *shape: int, dtype: torch.dtype = output) -> Value:
        return Value(Slot("made", name, dtype=dtype), 0, shape, contiguous_strides(shape), dtype, name)

    x, rolled, padded = value("x", 8, 56, 56, 96), value("rolled", 8, 56, 56, 96), value("padded", 8, 63, 63, 96)
    windows = replace(padded, shape=(8, 9, 9, 7, 7, 96), strides=(381024, 42336, 672, 6048, 96, 1))
    residual, normed = value("residual", 8, 56, 56, 96), value("normed", 8, 56, 56, 96)
    table, rows, chosen = value("table", 169, 3), value("rows", 49, 49, dtype=torch.int64), value("chosen", 49, 49, 3)
    products, summed = value("products", 512, 3, 49, 49), value("summed", 512, 3, 49, 49)
    mask = replace(chosen, shape=(1, 3, 49, 49), strides=(7203, 1, 147, 3))
    weights = (value("weights", 1, 512, 4608), value("gain", 512), None, None, None, True, 0.0, 1e-6)
    pictures, halved = (value(f"{side}", 16, side, side, 256) for side in (56, 28))
    pictures, halved = (
        replace(x, shape=(16, 256, *x.shape[1:3]), strides=(math.prod(x.shape[1:]), 1, x.shape[1] * 256, 256))
        for x in (pictures, halved)
    )
    columns = value("columns", 8, 150, 64, 64)
    factors = (value("one", 26, 13, 13), value("other", 26, 13, 49))
    short, long, longest = value("short", 65536, 7), value("long", 1024, 16384), value("longest", 512, 32768)
    few, groups, of_groups = value("few", 16, 4096), value("groups", 64, 320, 16, 16), value("normal", 64, 320, 16, 16)
    before: list[LoopsKernel] = []
    for first, second in (
        (loops_of(aten.roll.default, (x, [3, 3], [1, 2]), {}, rolled), None),
        (
            loops_of(aten.constant_pad_nd.default, (rolled, [0, 0, 0, 7, 0, 7]), {}, padded),
            loops_of(aten.clone.default, (windows,), {}, value("out", *windows.shape)),
        ),
        (
            loops_of(aten.index.Tensor, (table, [rows]), {}, chosen),
            loops_of(aten.add.Tensor, (products, mask), {}, summed),
        ),
        (
            loops_of(aten.add.Tensor, (products, mask), {}, summed),
            loops_of(aten._softmax.default, (summed, -1, False), {}, value("softmax", *summed.shape)),
        ),
        (
            loops_of(aten.add.Tensor, (rolled, x), {}, residual),
            loops_of(aten._fused_rms_norm.default, (residual, [96], value("scale", 96), 1e-6), {}, normed),
        ),
        (
            loops_of(aten.add.Tensor, (rolled, x), {}, residual),
            loops_of(aten.gelu.default, (residual,), {}, normed),
        ),
        (loops_of(aten.native_batch_norm.default, weights, {}, value("standardised", 1, 512, 4608)), None),
        (loops_of(aten.mean.dim, (pictures, [2, 3], True), {}, value("mean", 16, 256, 1, 1)), None),
        (loops_of(aten.avg_pool2d.default, (pictures, [2, 2], [2, 2]), {}, halved), None),
        (loops_of(aten.max_pool2d_with_indices.default, (pictures, [3, 3], [2, 2], [1, 1]), {}, halved), None),
        (loops_of(aten._softmax.default, (columns, 1, False), {}, value("of columns", *columns.shape)), None),
        (loops_of(aten.bmm.default, factors, {}, value("product", 26, 13, 49)), None),
        *(
            (loops_of(aten._softmax.default, (x, -1, False), {}, value("of rows", *x.shape)), None)
            for x in (short, long)
        ),
        (loops_of(aten._log_softmax.default, (longest, -1, False), {}, value("of longest", 512, 32768)), None),
        (loops_of(aten.mean.dim, (short, [-1]), {}, value("means", 65536)), None),
        (
            loops_of(aten._fused_rms_norm.default, (few, [4096], value("gains", 4096), 1e-6), {}, value("y", 16, 4096)),
            None,
        ),
        (
            loops_of(aten.native_group_norm.default, (groups, None, None, 64, 320, 256, 32, 1e-6), {}, of_groups),
            loops_of(aten.silu.default, (of_groups,), {}, value("activated", 64, 320, 16, 16)),
        ),
    ):
        assert first is not None
        wholes = [first if second is None else inlined(second, {first.output.slot: first})]
        if second is not None and reads_alike(second, first.output):  # the first one's result is stored, too
            wholes.append(inlined(second, {first.output.slot: first}, first.output.slot))
        for made in map(loops.kernel, wholes):
            assert made is not None
            yield loops.source_of([made])
            together = [made, *(one for one in before[-1:] if loops.fit_together([made, one]))]
            while loops.fit_together([made, *together]):
                together.insert(0, made)
            yield loops.source_of(together)
            before.append(made)


def sources(arch: int) -> dict[str, str]:
    """Text of every distinct kernel that these problems have as candidates, by its type."""
    found: dict[str, str] = {}
    for precision, output in OUTPUTS.items():
        first = 1 if precision == "fp16" else None  # its code is bfloat16's but for the instructions' names
        kernels = [*gemms(precision, first), *passes(output), *normalisations(output)]
        if precision != "fp16x3":
            kernels += convolutions(precision, first)
        for number, text in enumerate(between_regions(output)):
            found[f"loops {number} of {output}"] = text
        for kernel in gated(precision)[:first]:
            found[kernel.type] = codegen.generate(GATED_EPILOGUE, output, OPERANDS, kernel, columns=8)
        alone = [*attentions(output, arch >= 90), *gradients_of_attention(output)]
        if precision != "fp16x3":
            alone += filter_gradients(precision, first)
        for kernel in alone:
            found[kernel.type] = codegen.generate(Acc(), output, (), kernel, tf32=precision == "tf32")
        for kernel in kernels:
            by_channel = kernel.header == pointwise.PLANES_HEADER
            found[kernel.type] = codegen.generate(
                CHANNEL_EPILOGUE if by_channel else EPILOGUE, output, CHANNEL_OPERANDS if by_channel else OPERANDS,
                kernel, columns=8, tf32=precision == "tf32",
            )  # fmt: skip
            if kernel.header == "conv2d_wgmma.cuh" or (kernel.header == "conv2d_direct.cuh" and output.itemsize == 2):
                found[f"{kernel.type}, operands by channel"] = codegen.generate(
                    CHANNEL_EPILOGUE, output, CHANNEL_OPERANDS, kernel, columns=8
                )
    return found


def others() -> Iterator[tuple[str, str, str]]:
    """Type, text and architecture of the first kernels that architectures beside the main one are offered."""
    strides = _strides("nchw", 64, IMAGE)
    for arch, shared in OTHERS.items():
        room = {"shared_memory": shared + gemm_problem.RESERVED_SHARED}
        for precision in ("tf32x3", "tf32", "fp16x3", "bf16"):
            product = gemm_problem.Problem(1024, 8192, 8192, precision, "nk", 8192, 8192, 8192, **room)
            image = Conv2dProblem(
                8, 64, (IMAGE, IMAGE), 128, (IMAGE, IMAGE), (3, 3), (1, 1), (1, 1), (1, 1), 1, strides,
                _strides("nchw", 64, 3), "nchw", precision, **room,
            )  # fmt: skip
            kernels = gemm.candidates(product)[:1]
            kernels += conv2d.candidates(image)[:1] if precision != "fp16x3" else ()
            for kernel in kernels:
                if kernel.shared > shared:
                    raise SystemExit(f"{kernel.name} takes {kernel.shared} bytes of shared memory on sm_{arch}")
                text = codegen.generate(
                    EPILOGUE, OUTPUTS[precision], OPERANDS, kernel, columns=8, tf32=precision == "tf32"
                )
                yield kernel.type, text, arch


def kind_of(label: str) -> str:
    """A kernel's type without its numbers."""
    return re.sub(r"\d+", "", label)


def spread(labels: Iterable[str], most: int) -> set[str]:
    """Of each kind of kernels at most so many, the smallest and the largest tile among them."""
    found: set[str] = set()
    for _, alike in itertools.groupby(sorted(labels, key=kind_of), kind_of):
        ordered = sorted(alike, key=lambda label: list(map(int, re.findall(r"\d+", label))))
        count = min(most, len(ordered))
        found.update(ordered[(len(ordered) - 1) * place // max(1, count - 1)] for place in range(count))
    return found


def units(catalogue: list[tuple[str, str, str]]) -> Iterator[tuple[dict[str, str], str]]:
    """Texts by type, and an architecture, of kernels that are compiled together: they include the same headers."""

    def headers(item: tuple[str, str, str]) -> tuple[str, list[str]]:
        _, text, arch = item
        return arch, re.findall(r"#include .*", text)

    for (arch, _), alike in itertools.groupby(sorted(catalogue, key=headers), headers):
        kernels = [(label, text) for label, text, _ in alike]
        for first in range(0, len(kernels), build.MOST_TOGETHER):
            yield dict(kernels[first : first + build.MOST_TOGETHER]), arch


@dataclass
class Outcome:
    """What the compilers said of one source."""

    name: str
    registers: int = 0
    spills: int = 0
    local: int = 0
    """Bytes of local memory per thread: spilled registers, and arrays whose indices the compiler does not know."""
    shared: int = 0
    error: str = ""


def compile_with_nvcc(texts: dict[str, str], arch: str) -> list[Outcome]:
    """Compiles kernels, by their types, as one unit: its headers are most of what there is to read."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.cu"
        source.write_text(_unit(texts))
        command = [
            "nvcc", *build.CUDA_FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}",
            "-cubin", "-Xptxas", "-v",
            "-I", str(KERNELS), "-I", str(PACKAGE), "-o", str(Path(folder) / "kernel.cubin"), str(source),
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            if len(texts) == 1:
                return [Outcome(name, error=result.stderr.strip()) for name in texts]
            return [outcome for name, text in texts.items() for outcome in compile_with_nvcc({name: text}, arch)]
        outcomes = [_resources(name, number, result.stderr) for number, name in enumerate(texts)]
        if int(arch.rstrip("a")) >= 90 and shutil.which("nvdisasm") is not None:
            early = _early_accesses(Path(folder) / "kernel.cubin")
            for number, outcome in enumerate(outcomes):
                outcome.error = outcome.error or early.get(number, "")
    return outcomes


def _unit(texts: dict[str, str]) -> str:
    return build.unit_text({name: build.Source(text, (8, 0)) for name, text in texts.items()})


def _resources(name: str, number: int, said: str) -> Outcome:
    """What ptxas said of one kernel of a unit: its functions' names contain its namespace's."""
    parts = [part for part in said.split("ptxas info    : Compiling entry function ") if _number(part) == number]
    if not parts:
        return Outcome(name, error="ptxas did not mention it")
    text = "".join(parts)
    return Outcome(
        name,
        registers=max(map(int, re.findall(r"Used (\d+) registers", text)), default=0),
        spills=sum(map(int, re.findall(r"(\d+) bytes spill stores", text))),
        local=max(map(int, re.findall(r"(\d+) bytes stack frame", text)), default=0),
        shared=max(map(int, re.findall(r"(\d+) bytes smem", text)), default=0),
    )


def _number(function: str) -> int | None:
    """The number of a function's kernel in its unit, from the text's first line; None if the line names no kernel."""
    found = re.search(rf"(\d+){NAMESPACE}(\d+)", function.partition("\n")[0])
    # mangled names begin with their length, which tells the number's digits from those that follow
    return int(found[2][: int(found[1]) - len(NAMESPACE)]) if found else None


def _early_accesses(binary: Path) -> dict[int, str]:
    """What kernels do with memory before they wait for the kernel before them (ACQBULK), by their numbers."""
    text = subprocess.run(["nvdisasm", "-c", str(binary)], capture_output=True, text=True, check=True).stdout
    found = {}
    for kernel in re.split(r"\n\.text\.", text)[1:]:
        number = _number(kernel)
        assert number is not None, kernel.partition("\n")[0]
        operations = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]+)", kernel)
        wait = next((place for place, name in enumerate(operations) if name.startswith("ACQBULK")), None)
        if wait is None:
            found[number] = "does not wait for the kernel before it"
            continue
        early = [name for name in operations[:wait] if name.startswith(("LDG", "LD.", "ST", "RED", "ATOM", "UTMA"))]
        if early:
            found[number] = f"{', '.join(early)} before it waits for the kernel before it"
    return found


def nvrtc_errors(texts: dict[str, str], arch: str) -> dict[str, str]:
    """What NVRTC 12.1 says of kernels' device code, by their types; of those that compile, nothing."""
    said = _nvrtc_log(_unit(texts), arch)
    if said and len(texts) > 1:
        return {key: text for name in texts for key, text in nvrtc_errors({name: texts[name]}, arch).items()}
    return {name: f"NVRTC 12.1: {said}" for name in texts if said}


def _nvrtc_log(text: str, arch: str) -> str:
    """What NVRTC 12.1 says of a unit; empty if it compiles."""
    nvrtc = ctypes.CDLL(_wheel_file("nvidia.cuda_nvrtc", "lib/libnvrtc.so.12"))
    include = _wheel_file("nvidia.cuda_runtime", "include")
    # NVRTC has no standard library; the kernels need no more of it than this.
    headers = {
        "cstdint": "typedef signed char int8_t; typedef unsigned char uint8_t; typedef short int16_t;"
        "typedef unsigned short uint16_t; typedef int int32_t; typedef unsigned uint32_t;"
        "typedef long long int64_t; typedef unsigned long long uint64_t; typedef unsigned long long uintptr_t;",
    }
    program = ctypes.c_void_p()
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", len(headers), texts, names)
    includes = [f"-I{folder}" for folder in (KERNELS, PACKAGE, include)]
    options = [f"--gpu-architecture=compute_{arch}", "--std=c++17", "-default-device", *includes]
    code = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    )
    if code == 0:
        return ""
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    return log.value.decode()


def _wheel_file(package: str, path: str) -> str:
    spec = util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return str(Path(next(iter(spec.submodule_search_locations))) / path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="80", help="compute capability, e.g. 80 or 90")
    parser.add_argument("--only", default="", help="check only kernels whose name contains this")
    parser.add_argument("--each", type=int, help="check so many of those that differ in numbers only")
    arguments = parser.parse_args()
    catalogue = [
        (label, text, HOPPER if "Wgmma" in label else arguments.arch)
        for label, text in sources(int(arguments.arch.rstrip("a"))).items()
        if arguments.only in label
    ]
    with_nvrtc = util.find_spec("nvidia") is not None and util.find_spec("nvidia.cuda_nvrtc") is not None

    if arguments.each is not None:
        kept = spread((label for label, _, _ in catalogue), arguments.each)
        catalogue = [item for item in catalogue if item[0] in kept]
    further = [(f"sm_{arch}: {label}", text, arch) for label, text, arch in others()]
    catalogue += [item for item in further if arguments.only in item[0]]
    # Tiles differ in numbers only: one of each kind is enough to see whether the language is CUDA 12.1's.
    kinds = {kind_of(label): label for label, _, arch in catalogue if arch not in OTHERS}
    representative = set(kinds.values() if with_nvrtc else ())

    def check(unit: tuple[dict[str, str], str]) -> list[Outcome]:
        texts, arch = unit
        outcomes = compile_with_nvcc(texts, arch)
        of_kinds = {name: text for name, text in texts.items() if name in representative}
        errors = nvrtc_errors(of_kinds, arch) if of_kinds else {}
        for outcome in outcomes:
            outcome.error = outcome.error or errors.get(outcome.name, "")
        return outcomes

    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        outcomes = [outcome for unit in pool.map(check, units(catalogue)) for outcome in unit]
    rows = []
    failed = []
    for outcome in outcomes:
        problem = outcome.error.splitlines()[0] if outcome.error else ""
        allowed = next((allowed for part, allowed in SPILLED.items() if part in outcome.name), 0)
        problem = problem or (f"{outcome.spills} bytes spilled" if outcome.spills > allowed else "")
        problem = problem or (f"{outcome.local} bytes of local memory" if outcome.local > allowed else "")
        problem = problem or ("more than 163 KB shared" if outcome.shared > SHARED_LIMIT else "")
        rows.append((outcome.name, outcome.registers, outcome.spills, problem or "ok"))
        if problem:
            failed.append(outcome)
    print(tabulate(rows, headers=("kernel", "registers", "spilled bytes", f"sm_{arguments.arch}")))
    for outcome in failed:
        print(f"\n{outcome.name}:\n{outcome.error}")
    print(f"NVRTC 12.1 {'checked' if with_nvrtc else 'not installed'}")
    print(f"{len(outcomes) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
