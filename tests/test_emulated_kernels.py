"""The CUDA kernels themselves, on the emulated GPU (emulator.py): no GPU is needed.

Inputs are small integers, so that products and sums are exact in every precision: results must equal float64's.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from emulator import Operand, Together, available, launch, launch_together

from fxfuse.cuda import (
    conv2d,
    conv2d_direct,
    conv2d_few_pixels,
    conv2d_weight,
    conv2d_wgmma,
    depthwise,
    gemm,
    gemm_problem,
    layer_norm,
    pointwise,
)
from fxfuse.cuda.conv2d_problem import Conv2dProblem
from fxfuse.layout import Layout, channels_last_strides
from fxfuse.pooling import MaxPool

pytestmark = pytest.mark.skipif(not available(), reason="the emulation needs Linux and g++ 12 or newer")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PRECISIONS = {"tf32": torch.float32, "tf32x3": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EPILOGUE = "relu(acc + o0)"


def integers(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def convolution(x, weight, precision="tf32", stride=1, padding=0, dilation=1, groups=1, hopper=False):
    """The problem of a convolution whose result lies as x does."""
    (n, c, *size), (k, _, *kernel) = x.shape, weight.shape
    out = tuple((s + 2 * padding - dilation * (r - 1) - 1) // stride + 1 for s, r in zip(size, kernel, strict=True))
    layout = "nhwc" if x.stride(1) == 1 and c > 1 else "nchw"
    twice = [(value, value) for value in (stride, padding, dilation)]
    fields = (n, c, tuple(size), k, out, tuple(kernel), *twice, groups, x.stride(), weight.stride(), layout, precision)
    alignments = (math.gcd(16, x.data_ptr()), math.gcd(16, weight.data_ptr()))
    return Conv2dProblem(*fields, *alignments, multiprocessors=2, shared_memory=163 << 10, hopper=hopper)


def check_convolution(kernel, x, weight, residual=False, **options):
    """Runs `kernel` with relu after adding a bias, or a tensor as large as the result, which is laid as that is.

    What surrounds the result in memory must stay as it is.
    """
    problem = convolution(x, weight, **options)
    options.pop("precision", None)
    nhwc, guard = problem.out_layout == "nhwc", 64
    shape = (problem.images, problem.out_channels, *problem.out_size)
    memory = torch.full((torch.Size(shape).numel() + 2 * guard,), 99, dtype=x.dtype)
    out = memory[guard:-guard].view(shape)
    if nhwc:
        out = out.as_strided(shape, channels_last_strides(shape))
    added = integers(*shape, dtype=x.dtype) if residual else integers(1, shape[1], 1, 1, dtype=x.dtype)
    want = F.relu(F.conv2d(x.double(), weight.double(), **options) + added.double()).to(x.dtype)
    if residual:
        added = added.to(memory_format=torch.channels_last) if nhwc else added
        strides = (added.stride(0), added.stride(3) if nhwc else added.stride(1), 1)
    else:
        strides = (0, 0, 1) if nhwc else (0, 1, 0)
    by_mma = launch(kernel, EPILOGUE, (x, weight, out), (Operand(added, strides),), tf32=problem.precision == "tf32")
    assert not (by_mma and "wgmma" in kernel.name), kernel.name
    same = (out == want) | (out.isnan() & want.isnan())
    assert same.all(), (kernel.name, x.shape, weight.shape, options)
    assert (memory[:guard] == 99).all() and (memory[-guard:] == 99).all(), (kernel.name, "writes outside its result")


# ---------------------------------------------------------------------------------------------- convolutions

DIRECT = [
    *(("tf32", tile) for tile in conv2d_direct.TILES),
    *(("tf32x3", tile) for tile in conv2d_direct.SPLIT_TILES),
    *(("bf16", tile) for tile in conv2d_direct.HALF_TILES),
    ("fp16", conv2d_direct.HALF_TILES[-1]),
]


WGMMA = [
    ("tf32", conv2d_wgmma.TILES[0]),
    *(pytest.param("tf32", tile, marks=pytest.mark.slow) for tile in conv2d_wgmma.TILES[1:]),
    ("tf32x3", conv2d_wgmma.SPLIT_TILES[0]),
    pytest.param("tf32x3", conv2d_wgmma.SPLIT_TILES[1], marks=pytest.mark.slow),
    ("bf16", conv2d_wgmma.TILES[-1]),
]


@pytest.mark.parametrize(("precision", "tile"), DIRECT, ids=lambda value: getattr(value, "name", value))
def test_direct_convolution(precision, tile, monkeypatch):
    tiles = {"tf32": "TILES", "tf32x3": "SPLIT_TILES"}.get(precision, "HALF_TILES")
    monkeypatch.setattr(conv2d_direct, tiles, (tile,))
    dtype = PRECISIONS[precision]
    # rows that start anywhere, and aligned ones; more filters than a tile has, fewer channels than a chunk
    for channels, height, width, padding in ((5, 5, 13, 0), (7, 6, 32, 1)):
        x, weight = integers(2, channels, height, width, dtype=dtype), integers(70, channels, 3, 3, dtype=dtype)
        kernel = conv2d_direct.kernels(convolution(x, weight, precision, padding=padding))[0][1]
        check_convolution(kernel, x, weight, residual=padding == 1, precision=precision, padding=padding)


WGMMA_CONVOLUTIONS = (
    ((2, 5, 5, 13), (70, 5, 3, 3), {}),
    ((2, 44, 5, 5), (9, 44, 3, 3), {}),  # fewer positions than threads, more chunks than stages
    ((2, 20, 6, 32), (136, 20, 3, 3), {"padding": 1}),
    ((1, 3, 5, 300), (9, 3, 3, 3), {}),
    ((1, 3, 7, 128), (20, 3, 3, 3), {}),  # rows that follow one another in memory, an odd number of them
    ((1, 3, 7, 300), (9, 3, 3, 3), {"padding": 1}),
    ((2, 3, 19, 18), (24, 3, 3, 3), {"stride": 2, "padding": 1}),
    ((3, 8, 9, 12), (18, 4, 1, 7), {"dilation": 2, "padding": 6, "groups": 2}),
)
SPLIT_CONVOLUTIONS = (
    *(case for case in WGMMA_CONVOLUTIONS if case[0][1] <= 8 and case[2].keys() <= {"padding"}),
    ((3, 16, 9, 12), (18, 8, 3, 3), {"padding": 1, "groups": 2}),
    ((5, 8, 8, 130), (9, 8, 3, 3), {"padding": 1}),  # more tiles than blocks
)


@pytest.mark.parametrize(("precision", "tile"), WGMMA, ids=lambda value: getattr(value, "groups", value))
def test_convolution_by_warpgroup_products(precision, tile, monkeypatch):
    split = precision == "tf32x3"
    monkeypatch.setattr(conv2d_wgmma, "SPLIT_TILES" if split else "TILES", (tile,))
    dtype = PRECISIONS[precision]
    for shape, filters, options in SPLIT_CONVOLUTIONS if split else WGMMA_CONVOLUTIONS:
        x, weight = integers(*shape, dtype=dtype), integers(*filters, dtype=dtype)
        kernel = conv2d_wgmma.kernels(convolution(x, weight, precision, hopper=True, **options))[0][1]
        operands = [(x, weight)]
        if split:  # of either operand parts that one TF32 cannot hold, so that results are still exact; infinities
            fine_x, fine_weight = (of + integers(*of.shape, seed=1) / 2**13 for of in (x, weight))
            special = fine_x.clone()
            special[0, 0, 1, 2], special[-1, -1, -1, -1], special[0, -1, 3, 0] = math.inf, -math.inf, math.nan
            operands = [(fine_x, weight), (x, fine_weight), (special, weight)]
        for operand in operands:
            check_convolution(kernel, *operand, residual="stride" in options or "padding" not in options,
                              precision=precision, **options)  # fmt: skip


FEW_PIXELS = {
    "whole planes": ((1, 200, 7, 7), (70, 200, 1, 1), {}),  # a part of a chunk, a part of the filters
    "long sums": ((2, 520, 5, 5), (9, 520, 1, 1), {}),  # warps with several chunks, and with none
    "tiles": ((1, 64, 12, 16), (40, 64, 1, 1), {}),
    "stride": ((1, 40, 7, 16), (20, 40, 1, 1), {"stride": 2}),
    "3x3": ((1, 44, 7, 7), (13, 44, 3, 3), {"padding": 1}),
    "3x3, several images": ((2, 168, 14, 15), (8, 168, 3, 3), {"padding": 1}),
    "3x3, stride": ((1, 24, 12, 13), (20, 24, 3, 3), {"stride": 2, "padding": 1}),
    "3x3, long sums": ((1, 296, 8, 8), (9, 296, 3, 3), {}),
}


@pytest.mark.parametrize("name", FEW_PIXELS)
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_convolution_of_few_pixels(name, precision, monkeypatch):
    shape, filters, options = FEW_PIXELS[name]
    x, weight = integers(*shape, dtype=PRECISIONS[precision]), integers(*filters, dtype=PRECISIONS[precision])
    problem = dataclasses.replace(convolution(x, weight, precision, **options), multiprocessors=99)
    kernels = []
    for tile in conv2d_few_pixels.TILES[problem.kernel]:
        monkeypatch.setattr(conv2d_few_pixels, "TILES", {problem.kernel: (tile,)})
        kernels += conv2d_few_pixels.kernels(problem)
    assert bool(kernels) == (precision == "tf32" or "3x3" not in name)
    for _, kernel in kernels:
        check_convolution(kernel, x, weight, residual="stride" in options, precision=precision, **options)


GATHERED = {
    "3x3": ((2, 20, 9, 10), (24, 20, 3, 3), {"padding": 1}),
    "stem": ((2, 3, 19, 18), (24, 3, 7, 7), {"stride": 2, "padding": 3}),
    "1x1 with stride": ((2, 20, 7, 8), (24, 20, 1, 1), {"stride": 2}),
    "dilated": ((1, 4, 12, 11), (17, 4, 3, 2), {"dilation": 2, "padding": 1}),
    "long sum": ((1, 96, 5, 5), (16, 96, 3, 3), {"padding": 1}),
}


CASES = [("3x3", "tf32"), ("3x3", "bf16"), ("stem", "bf16"), ("1x1 with stride", "tf32"), ("dilated", "tf32"),
           ("long sum", "bf16"), ("long sum", "tf32x3"), ("stem", "tf32x3")]  # fmt: skip


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_implicit_gemm(name, precision):
    shape, filters, options = GATHERED[name]
    x, weight = integers(*shape, dtype=PRECISIONS[precision]), integers(*filters, dtype=PRECISIONS[precision])
    kernels = [kernel for _, kernel in conv2d._implicit_gemm(convolution(x, weight, precision, **options))]
    for kernel in (kernels[0], kernels[-1]):
        check_convolution(kernel, x, weight, residual=kernel is kernels[-1], precision=precision, **options)


def test_implicit_gemm_of_groups_and_of_planes_of_49():
    x, weight = integers(3, 24, 7, 7), integers(40, 24, 1, 1)
    for _, kernel in conv2d._implicit_gemm(convolution(x, weight)):
        check_convolution(kernel, x, weight)
    for x in (integers(2, 12, 8, 9), integers(2, 12, 8, 9).to(memory_format=torch.channels_last)):
        weight = integers(18, 4, 3, 3)
        kernel = conv2d._implicit_gemm(convolution(x, weight, groups=3))[0][1]
        check_convolution(kernel, x, weight, groups=3)


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_windows_of_channels_last(name, precision):
    shape, filters, options = GATHERED[name]
    dtype = PRECISIONS[precision]
    x, weight = (integers(*sizes, dtype=dtype).to(memory_format=torch.channels_last) for sizes in (shape, filters))
    kernels = conv2d.candidates(convolution(x, weight, precision, **options))
    assert all("as gemm" in kernel.name for kernel in kernels)
    shared = [kernel for kernel in kernels if "split" in kernel.name]
    for kernel in dict.fromkeys((kernels[0], kernels[-1], *shared[:1])):
        check_convolution(kernel, x, weight, residual=kernel is kernels[-1], precision=precision, **options)


@pytest.mark.parametrize(
    ("size", "stride", "precision"),
    [(3, 1, "tf32"), (3, 2, "bf16"), (5, 1, "bf16"), (5, 2, "tf32"), (7, 1, "bf16"), (4, 3, "tf32")],
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_depthwise_convolution(size, stride, precision, channels_last):
    dtype = PRECISIONS[precision]
    for height, width, padding in ((14, 14, size // 2), (9, 23, 0)):
        x, weight = integers(3, 16, height, width, dtype=dtype), integers(16, 1, size, size, dtype=dtype)
        if channels_last:
            x, weight = x.to(memory_format=torch.channels_last), weight.to(memory_format=torch.channels_last)
        options = {"stride": stride, "padding": padding, "groups": 16}
        for kernel in depthwise.kernels(convolution(x, weight, precision, **options)):
            check_convolution(kernel, x, weight, residual=padding == 0, precision=precision, **options)


def test_a_kernel_may_have_more_shared_memory_than_its_last_launch():
    types = set()
    for width in (960, 2400, 1600):  # whose rows of seven outputs take 64, 160 and 107 KB
        x, weight = integers(1, 2, 9, width), integers(2, 1, 3, 3)
        (kernel,) = depthwise.kernels(convolution(x, weight, padding=1, groups=2))
        types.add(kernel.type)
        check_convolution(kernel, x, weight, padding=1, groups=2)
    assert len(types) == 1


@pytest.mark.parametrize(
    ("size", "stride", "precision"),
    [
        (3, 1, "tf32"), (3, 2, "fp16"), (5, 1, "tf32"), (5, 2, "bf16"), (7, 1, "tf32"), (7, 2, "bf16"),
        (3, 1, "bf16"), (5, 1, "fp16"), (7, 1, "bf16"),
    ],
)  # fmt: skip
def test_depthwise_convolution_on_channels_last(size, stride, precision, monkeypatch):
    monkeypatch.setattr(depthwise, "_ENOUGH", {size: 0})
    dtype, headers = PRECISIONS[precision], ["depthwise_nhwc.cuh"]
    if precision != "tf32" and stride == 1:
        headers.insert(0, "depthwise_mma.cuh")
    for shape, padding in (
        ((1, 8, 23, 60), size // 2),  # bands of rows, tiles side by side, the last of them narrower
        ((2, 72, 9, 8), size - 1),  # more channels than a tile has, a part of them in the last; a strip of one column
        ((5, 40, 1, 1), size // 2),  # fewer rows than stages, most of every window outside
        ((3, 8, size, 30), 0),
        ((2, 8, 7, 7), min(1, size // 2)),
        ((3, 16, 5, 13), size // 2),  # rows of two images side by side
    ):
        x = integers(*shape, dtype=dtype).to(memory_format=torch.channels_last)
        channels = shape[1]
        options = {"stride": stride, "padding": padding, "groups": channels}
        filters = integers(channels, 1, size, size + 1, dtype=dtype)
        # taps that follow each other and are copied by 16 bytes; the same, not aligned; and apart
        adjacent, shifted = filters[..., :-1].contiguous(), filters.flatten()[1:][: channels * size * size]
        for weight in (adjacent, shifted.view(channels, 1, size, size), filters[..., 1:]):
            kernels = depthwise.kernels(convolution(x, weight, precision, **options))
            assert [kernel.header for kernel in kernels] == headers
            for kernel in kernels:
                check_convolution(kernel, x, weight, residual=weight is adjacent, precision=precision, **options)


@pytest.mark.parametrize(("size", "precision"), [(3, "bf16"), (5, "fp16"), (7, "bf16")])
def test_depthwise_convolution_by_tensor_cores_keeps_infinities_and_nan_in_their_channels(size, precision, monkeypatch):
    monkeypatch.setattr(depthwise, "_ENOUGH", {size: 0})
    dtype, options = PRECISIONS[precision], {"padding": size // 2, "groups": 48}
    x = integers(3, 48, 11, 19, dtype=dtype).to(memory_format=torch.channels_last)
    weight = integers(48, 1, size, size, dtype=dtype)
    x[0, 3, 4, 5], x[1, 20, 0, 0], x[1, 41, 7, 18], x[2, 0, -1, -1] = math.inf, math.nan, math.inf, -math.inf
    kernels = depthwise.kernels(convolution(x, weight, precision, **options))
    assert kernels[0].header == "depthwise_mma.cuh"
    for kernel, residual in itertools.product(kernels, (False, True)):
        check_convolution(kernel, x, weight, residual, precision=precision, **options)


# ------------------------------------------------------------------------------------------- products and passes


@pytest.mark.parametrize(
    ("m", "n", "k", "precision", "layout", "of_x"),
    [
        (5, 7, 40, "tf32x3", "nk", "mk"), (70, 36, 130, "tf32x3", "kn", "mk"),
        (5, 7, 40, "bf16", "kn", "mk"), (70, 36, 130, "bf16", "nk", "mk"),
        (70, 36, 130, "tf32", "nk", "mk"), (5, 7, 40, "fp16", "nk", "mk"),
        (70, 36, 130, "fp16x3", "nk", "mk"), (70, 36, 130, "fp16x3", "kn", "mk"),
        (5, 7, 40, "tf32x3", "kn", "km"), (70, 36, 130, "tf32x3", "kn", "km"), (136, 36, 130, "tf32x3", "kn", "km"),
        (70, 36, 130, "tf32", "kn", "km"), (5, 7, 40, "tf32", "kn", "km"),
        (70, 36, 130, "bf16", "kn", "km"), (5, 7, 40, "fp16", "kn", "km"), (272, 72, 136, "fp16", "kn", "km"),
    ],
)  # fmt: skip
def test_matrix_product(m, n, k, precision, layout, of_x):
    dtype = PRECISIONS.get(precision, torch.float32)
    x, bias, residual = integers(m, k, dtype=dtype), integers(n, dtype=dtype), integers(m, n, dtype=dtype)
    own = x if of_x == "mk" else x.T.contiguous()
    weight = integers(n, k, dtype=dtype) if layout == "nk" else integers(k, n, dtype=dtype)
    strides = own.stride(0), weight.stride(0), n
    problem = gemm_problem.Problem(m, n, k, precision, layout, *strides, 16, 16, multiprocessors=2, x_layout=of_x)
    matrix = weight.double() if layout == "nk" else weight.double().T
    want = (F.relu(F.linear(x.double(), matrix, bias.double())) - residual).to(dtype)
    kernels = gemm.candidates(problem)
    shared = [kernel for kernel in kernels if kernel.workspace]
    operands = Operand(bias, (0, 0, 1)), Operand(residual, (m * n, n, 1))
    for kernel in dict.fromkeys((kernels[0], kernels[-1], *shared[:1])):
        out = torch.full((m, n), 99, dtype=dtype)
        launch(kernel, "relu(acc + o0) - o1", (own, weight, out), operands, tf32=precision == "tf32")
        assert torch.equal(out, want), kernel.name


@pytest.mark.parametrize(
    ("precision", "header", "sizes"),
    [
        ("tf32x3", gemm.GEMV_HEADER, ((1, 9, 16), (1, 41, 2064), (3, 6, 1040), (4, 130, 72))),
        ("tf32", gemm.GEMV_HEADER, ((1, 41, 2064), (3, 6, 1040))),
        ("bf16", gemm.GEMV_HEADER, ((1, 9, 16), (1, 41, 2064))),
        ("fp16", gemm.GEMV_HEADER, ((1, 41, 2064),)),
        ("bf16", gemm.FEW_ROWS_HEADER, ((2, 9, 16), (3, 41, 2064), (8, 16, 1040), (9, 33, 72), (16, 130, 1032))),
        ("fp16", gemm.FEW_ROWS_HEADER, ((5, 6, 1040), (13, 35, 520))),
    ],
)
def test_few_rows(precision, header, sizes):
    dtype, guard = PRECISIONS.get(precision, torch.float32), 5
    for rows, n, k in sizes:
        x, bias, weight = integers(rows, k, dtype=dtype), integers(n, dtype=dtype), integers(n, k, dtype=dtype)
        residual = integers(rows, n, dtype=dtype)
        kernels = gemm.candidates(gemm_problem.Problem(rows, n, k, precision, "nk", k, k, n, multiprocessors=132))
        (kernel,) = (kernel for kernel in kernels[:2] if kernel.header == header)
        memory = torch.full((rows * n + guard,), 99, dtype=dtype)
        out = memory[:-guard].view(rows, n)
        operands = (Operand(bias, (0, 0, 1)), Operand(residual, (rows * n, n, 1)))
        launch(kernel, "relu(acc + o0) - o1", (x, weight, out), operands, tf32=precision == "tf32")
        want = F.relu(F.linear(x.double(), weight.double(), bias.double())) - residual
        assert torch.equal(out, want.to(dtype)), (rows, n, k)
        assert (memory[-guard:] == 99).all(), "writes outside its result"


@pytest.mark.parametrize(
    ("precision", "rows", "n", "k"),
    [
        ("bf16", 1, 9, 2064), ("fp16", 1, 64, 72), ("bf16", 2, 13, 136), ("fp16", 8, 40, 1040), ("bf16", 11, 35, 520),
        ("bf16", 16, 300, 72),
    ],
)  # fmt: skip
def test_few_rows_of_a_gated_unit(precision, rows, n, k):
    dtype, guard = PRECISIONS[precision], 5
    x, up, gate = integers(rows, k, dtype=dtype), integers(n, k, dtype=dtype), integers(n, k, dtype=dtype)
    bias, residual = integers(n, dtype=dtype), integers(rows, n, dtype=dtype)
    problem = gemm_problem.Problem(rows, n, k, precision, "nk", k, k, n, multiprocessors=2, weights=2)
    (kernel,) = gemm.candidates(problem)
    memory = torch.full((rows * n + guard,), 99, dtype=dtype)
    out = memory[:-guard].view(rows, n)
    operands = (Operand(bias, (0, 0, 1)), Operand(residual, (rows * n, n, 1)))
    # the first weight's product is acc, the other's the operand beyond those that are read
    launch(kernel, "relu(acc + o0) * 2 + o2 - o1", (x, up, gate, out), operands)
    exact = F.relu(F.linear(x.double(), up.double(), bias.double())) * 2 + x.double() @ gate.double().T - residual
    assert torch.equal(out, exact.to(dtype)), kernel.name
    assert (memory[-guard:] == 99).all(), "writes outside its result"


@pytest.mark.parametrize(
    ("precision", "rows", "sizes"),
    [
        ("bf16", 1, ((9, 16), (41, 2064), (300, 136))),
        ("fp16", 7, ((33, 520), (6, 1040))),
        ("tf32x3", 3, ((41, 72), (6, 1040), (1, 8), (12, 200))),
    ],
)
def test_products_of_one_launch(precision, rows, sizes):
    dtype, products, wanted = PRECISIONS.get(precision, torch.float32), [], []
    for n, k in sizes:
        x, bias, weight = integers(rows, k, dtype=dtype), integers(n, dtype=dtype), integers(n, k, dtype=dtype)
        problem = gemm_problem.Problem(rows, n, k, precision, "nk", k, k, n, multiprocessors=132)
        kernel = next(kernel for kernel in gemm.candidates(problem) if kernel.together > 1)
        out = torch.full((rows, n), 99, dtype=dtype)
        products.append(Together(kernel.params, (x, weight, out), (Operand(bias, (0, 0, 1)),)))
        wanted.append(F.relu(F.linear(x.double(), weight.double(), bias.double())).to(dtype))
    launch_together(kernel, "relu(acc + o0)", products)
    for product, want in zip(products, wanted, strict=True):
        assert torch.equal(product.tensors[-1], want)


def hoppers(kernels):
    return [kernel for kernel in kernels if "wgmma" in kernel.name]


HOPPERS = [*(("bf16", tile) for tile in gemm.WGMMA_TILES), ("fp16", gemm.WGMMA_TILES[-1])]
ORDERS = [
    (*case, *order)
    for case in HOPPERS
    for order in (("nk", "mk"), ("kn", "mk"), ("kn", "km"))
    if order[0] == "nk" or case[1].n & (case[1].n - 1) == 0
]  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "tile", "layout", "x_layout"), ORDERS,
    ids=lambda value: value if isinstance(value, str) else f"{value.m}x{value.n}",
)  # fmt: skip
def test_matrix_product_by_warpgroups(precision, tile, layout, x_layout, monkeypatch):
    monkeypatch.setattr(gemm, "WGMMA_TILES", (tile,))
    dtype = PRECISIONS[precision]
    # part of a tile, several tiles with parts at the ends; fewer tiles of K than stages, and more
    for m, n, k in ((5, 8, 40), (tile.m + 6, tile.n + 12, 5 * 64 + 8)):
        x, bias, weight = integers(m, k, dtype=dtype), integers(n, dtype=dtype), integers(n, k, dtype=dtype)
        own = with_gaps(x if x_layout == "mk" else x.T)  # every read has 16 bytes
        other = with_gaps(weight if layout == "nk" else weight.T)
        problem = gemm_problem.Problem(
            m, n, k, precision, layout, own.stride(0), other.stride(0), n, multiprocessors=2,
            shared_memory=228 << 10, hopper=True, x_layout=x_layout,
        )  # fmt: skip
        residual = integers(m, n, dtype=dtype)
        want = (F.relu(F.linear(x.double(), weight.double(), bias.double())) - residual).to(dtype)
        operands = Operand(bias, (0, 0, 1)), Operand(residual, (m * n, n, 1))
        kernels = hoppers(gemm.candidates(problem))
        assert kernels
        for kernel in kernels:
            out = torch.full((m, n), 99, dtype=dtype)
            launch(kernel, "relu(acc + o0) - o1", (own, other, out), operands)
            assert torch.equal(out, want), kernel.name


GATED = [*(("bf16", tile) for tile in gemm.WGMMA_TILES if tile.goes_on), ("fp16", gemm.WGMMA_TILES[0])]


@pytest.mark.parametrize(
    ("precision", "tile"), GATED, ids=lambda value: value if isinstance(value, str) else f"{value.m}x{value.n}"
)
@pytest.mark.parametrize("output", [None, torch.float32])
def test_products_with_two_weights_by_warpgroups(output, precision, tile, monkeypatch):
    monkeypatch.setattr(gemm, "WGMMA_TILES", (tile,))
    dtype = PRECISIONS[precision]
    # part of a tile; columns that end within a slice; several tiles, rows and runs of columns that end within them
    for m, n, k in ((17, 8, 40), (tile.m + 6, tile.n // 2 + 24, 5 * 64 + 8), (tile.m, tile.n + 9, 64)):
        x, weights = integers(m, k, dtype=dtype), [integers(n, k, dtype=dtype, seed=seed) for seed in (0, 1)]
        residual, bias = integers(m, n, dtype=dtype), integers(n, dtype=dtype)
        problem = gemm_problem.Problem(
            m, n, k, precision, "nk", k, k, n, multiprocessors=2, shared_memory=228 << 10, hopper=True, weights=2
        )
        one, other = (x.double() @ weight.double().T for weight in weights)
        want = (one * torch.relu(other + bias) + residual).to(output or dtype)
        (kernel,) = gemm.candidates(problem)
        memory = torch.full((m * n + 128,), 99, dtype=output or dtype)
        out = memory[64:-64].view(m, n)
        operands = (Operand(residual, (0, n, 1)), Operand(bias, (0, 0, 1)))
        launch(kernel, "acc * relu(o2 + o1) + o0", (x, *weights, out), operands)
        assert torch.equal(out, want), kernel.name
        assert (memory[:64] == 99).all() and (memory[-64:] == 99).all(), (kernel.name, "writes outside its result")


SPLITTING = [
    pytest.param(tile, splits, layout, x_layout, marks=pytest.mark.slow if splits == 3 and layout == "kn" else ())
    for tile in gemm.WGMMA_TF32X3_TILES
    for splits, layout, x_layout in (
        (1, "nk", "mk"), (3, "nk", "mk"), (1, "kn", "mk"), (3, "kn", "mk"), (1, "kn", "km"), (3, "kn", "km"),
    )
    if layout == "nk" or tile.n != 96
]  # fmt: skip


@pytest.mark.parametrize(
    ("tile", "splits", "layout", "x_layout"), SPLITTING, ids=lambda value: getattr(value, "n", value)
)
def test_float32_product_by_warpgroups(tile, splits, layout, x_layout):
    """Of numbers with more bits than TF32 has, in x or in the weight, and of infinities and NaN."""

    def run(epilogue, x, weight):
        out = torch.full((m, n), 99.0)
        weight = weight if layout == "nk" else weight.T.contiguous()
        x = x if x_layout == "mk" else x.T.contiguous()
        operands = Operand(bias, (0, 0, 1)), Operand(residual, (m * n, n, 1))
        return launch(kernel, epilogue, (x, weight, out), operands), out

    # part of a tile; several tiles with parts at the ends, fewer tiles of K than stages and more
    for m, n, k in ((5, 8, 40), (tile.m + 6, tile.n + 12, 3 * 32), (tile.m + 6, tile.n + 12, 11 * 32 + 8)):
        if k < 32 * splits:
            continue
        m = m if x_layout == "mk" else -(-m // 4) * 4  # every read has 16 bytes
        x, bias, weight, residual = integers(m, k), integers(n), integers(n, k), integers(m, n)
        strides = k if x_layout == "mk" else m, k if layout == "nk" else n, n
        problem = gemm_problem.Problem(
            m, n, k, "tf32x3", layout, *strides, multiprocessors=132, shared_memory=228 << 10, x_layout=x_layout
        )
        kernel = gemm._kernel(tile, problem, splits)
        for of_x, of_weight in ((4099, 1), (1, 4099))[0 if k > 96 else 1 :]:  # 13 bits
            want = F.relu(F.linear(x.double() * of_x, weight.double() * of_weight, bias.double())) - residual
            want = want.float()
            by_mma, out = run("relu(acc + o0) - o1", x * of_x, weight * of_weight)
            assert torch.equal(out, want) and not by_mma, kernel.name
    x[3, 5], x[10, 7], x[m - 1, k - 1] = float("nan"), float("inf"), -float("inf")
    weight[6, 7], weight[n - 1, 0], weight[4, 7] = -float("inf"), float("inf"), 0
    x[:, 0] += 4099
    want = (F.linear(x.double(), weight.double(), bias.double()) - residual).float()
    assert want.isnan().any() and want.isposinf().any() and want.isneginf().any()
    by_mma, out = run("acc + o0 - o1", x, weight)
    assert by_mma
    torch.testing.assert_close(out, want, rtol=1e-6, atol=0, equal_nan=True)


def with_gaps(matrix):
    """The same in rows that begin at multiples of 16 bytes, with NaN between them."""
    row = 16 // matrix.element_size()
    longer = torch.full((matrix.shape[0], -(-matrix.shape[1] // row) * row), float("nan"), dtype=matrix.dtype)
    longer[:, : matrix.shape[1]] = matrix
    return longer


@pytest.mark.parametrize(
    ("precision", "layout", "x_layout", "sums"),
    [
        ("tf32x3", "nk", "mk", None), ("tf32x3", "kn", "km", None), ("bf16", "nk", "mk", None),
        ("bf16", "kn", "mk", None), ("tf32x3", "nk", "mk", "kHalved"), ("tf32x3", "kn", "mk", "kHalved"),
        ("tf32x3", "kn", "km", "kHalved"), ("tf32x3", "kn", "km", "kPromoted"),
    ],
)  # fmt: skip
def test_of_rows_with_gaps_nothing_else_is_read(precision, layout, x_layout, sums, monkeypatch):
    """Sizes are odd, strides are not. By warpgroups if it is said how they add up."""
    dtype = PRECISIONS.get(precision, torch.float32)
    m, n, k = 133, 77, 11 * 32 + 5
    x, weight, bias = integers(m, k, dtype=dtype), integers(n, k, dtype=dtype), integers(n, dtype=dtype)
    own = with_gaps(x if x_layout == "mk" else x.T)
    other = with_gaps(weight if layout == "nk" else weight.T)
    problem = gemm_problem.Problem(
        m, n, k, precision, layout, own.stride(0), other.stride(0), n, multiprocessors=132, x_layout=x_layout,
        hopper=sums is not None, shared_memory=228 << 10,
    )  # fmt: skip
    kernels = gemm.candidates(problem)[:2]
    if sums is not None:
        monkeypatch.setattr(gemm, "summation", lambda *_: (sums, 1))
        kernels = [gemm._kernel(gemm.WGMMA_TF32X3_TILES[0], problem, splits) for splits in (1, 2)]
    want = F.relu(F.linear(x.double(), weight.double(), bias.double())).to(dtype)
    for kernel in kernels:
        assert "16, 16" in kernel.type or sums is not None, kernel.name
        out = torch.full((m, n), 99, dtype=dtype)
        launch(kernel, EPILOGUE, (own, other, out), (Operand(bias, (0, 0, 1)),))
        assert torch.equal(out, want), kernel.name


@pytest.mark.parametrize(
    ("precision", "layout", "x_layout", "by_warpgroups"),
    [
        ("tf32x3", "nk", "mk", False), ("tf32x3", "kn", "km", False), ("tf32", "kn", "mk", False),
        ("bf16", "kn", "mk", False), ("tf32x3", "nk", "mk", True), ("tf32x3", "kn", "mk", True),
        ("tf32x3", "kn", "km", True), ("bf16", "nk", "mk", True), ("bf16", "kn", "mk", True),
        ("fp16", "kn", "km", True),
    ],
)  # fmt: skip
def test_products_of_batches(precision, layout, x_layout, by_warpgroups):
    """Of sizes that fill no tile, apart in memory; operands vary by batch, by row and by column."""
    dtype, tf32 = PRECISIONS.get(precision, torch.float32), precision == "tf32"
    batches, m, n, k = 3, 133, 77, 4 * 32 + 5
    x, weight = integers(batches, m, k, dtype=dtype), integers(batches, n, k, dtype=dtype)
    bias, residual = integers(n, dtype=dtype), integers(batches, m, n, dtype=dtype)
    own, other = (
        torch.stack([with_gaps(matrix.T if turned else matrix) for matrix in matrices])
        for matrices, turned in ((x, x_layout == "km"), (weight, layout == "kn"))
    )
    problem = gemm_problem.Problem(
        m, n, k, precision, layout, own.stride(1), other.stride(1), n, multiprocessors=2, x_layout=x_layout,
        hopper=by_warpgroups, shared_memory=228 << 10, rows_per_batch=m, batches=batches, x_step=own.stride(0),
        weight_step=other.stride(0), eager_error=(1e-6, 1e-6),
    )  # fmt: skip
    kernels = [kernel for kernel in gemm.candidates(problem) if ("wgmma" in kernel.name) is by_warpgroups]
    want = F.relu(torch.einsum("bmk,bnk->bmn", x.double(), weight.double()) + bias.double()) + residual.double()
    operands = (Operand(bias, (0, 0, 1)), Operand(residual, (m * n, n, 1)))
    for kernel in kernels[:2]:
        assert kernel.name.startswith("batched") and kernel.workspace == 0
        out = torch.full((batches, m, n), 99, dtype=dtype)
        launch(kernel, "relu(acc + o0) + o1", (own, other, out), operands, tf32=tf32)
        assert torch.equal(out, want.to(dtype)), kernel.name


@pytest.mark.parametrize(
    ("precision", "tile"),
    [("tf32x3", gemm._TILES_TF32X3[3]), ("bf16", gemm._TILES[6]), ("bf16", gemm.WGMMA_TILES[-1]),
     ("tf32x3", gemm.WGMMA_TF32X3_TILES[-1])],
    ids=lambda value: value if isinstance(value, str) else f"{value.m}x{value.n}",
)  # fmt: skip
def test_products_of_batches_share_tiles(precision, tile, monkeypatch):
    """Of few tiles with long sums: a product's tiles, two in either direction, are each shared by several blocks."""
    for name in ("_TILES", "_TILES_TF32X3", "WGMMA_TILES", "WGMMA_TF32X3_TILES"):
        monkeypatch.setattr(gemm, name, (tile,) if tile in getattr(gemm, name) else ())
    dtype = PRECISIONS[precision]
    batches, m, n, k = 9, tile.m + 5, tile.n + 8, 640 if dtype == torch.float32 else 2560
    x, weight = integers(batches, m, k, dtype=dtype), integers(batches, n, k, dtype=dtype)
    bias, residual = integers(n, dtype=dtype), integers(batches, m, n, dtype=dtype)
    problem = gemm_problem.Problem(
        m, n, k, precision, "nk", k, k, n, multiprocessors=400, hopper=tile.wgmma, shared_memory=228 << 10,
        rows_per_batch=m, batches=batches, x_step=m * k, weight_step=n * k, eager_error=(1e-6, 1e-6),
    )  # fmt: skip
    shared = [kernel for kernel in gemm.candidates(problem) if "split" in kernel.name]
    want = F.relu(torch.einsum("bmk,bnk->bmn", x.double(), weight.double()) + bias.double()) + residual.double()
    operands = (Operand(bias, (0, 0, 1)), Operand(residual, (m * n, n, 1)))
    assert shared
    for kernel in shared:
        out = torch.full((batches, m, n), 99, dtype=dtype)
        launch(kernel, "relu(acc + o0) + o1", (x, weight, out), operands)
        assert torch.equal(out, want.to(dtype)), kernel.name


LAST_WAVES = [
    ("tf32x3", gemm._TILES_TF32X3[3]), ("bf16", gemm._TILES[6]),
    ("bf16", gemm.WGMMA_TILES[-1]), ("tf32x3", gemm.WGMMA_TF32X3_TILES[-1]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "tile"), LAST_WAVES, ids=lambda value: value if isinstance(value, str) else f"{value.m}x{value.n}"
)
def test_tiles_of_the_last_wave_are_shared(precision, tile):
    tile, dtype = dataclasses.replace(tile, resident=1), PRECISIONS[precision]
    m, n, k = 9 * tile.m - 5, 2 * tile.n - 8, 11 * (32 if dtype == torch.float32 else 64)  # 18 tiles in two bands
    x, bias, weight = integers(m, k, dtype=dtype), integers(n, dtype=dtype), integers(n, k, dtype=dtype)
    residual = integers(m, n, dtype=dtype)
    operands = Operand(bias, (0, 0, 1)), Operand(residual, (m * n, n, 1))
    want = (F.relu(F.linear(x.double(), weight.double(), bias.double())) - residual).to(dtype)
    for multiprocessors, shared in ((5, 3), (16, 2), (17, 1)):
        problem = gemm_problem.Problem(
            m, n, k, precision, "nk", k, k, n, multiprocessors=multiprocessors, shared_memory=228 << 10, hopper=True
        )
        kernel = gemm._kernel(tile, problem, 2)
        assert kernel.workspace == gemm.shared_sums_bytes(shared, tile.m * tile.n, 2)
        out = torch.full((m, n), 99, dtype=dtype)
        launch(kernel, "relu(acc + o0) - o1", (x, weight, out), operands)
        assert torch.equal(out, want), (kernel.name, multiprocessors)
    x[m - 1, 3], x[2, 7] = math.inf, math.nan  # in a shared tile, and in one that is not
    want = (F.relu(F.linear(x.double(), weight.double(), bias.double())) - residual).to(dtype)
    launch(kernel, "relu(acc + o0) - o1", (x, weight, out), operands)
    torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["3x3", "1x1 with stride", "long sum"])
def test_windows_by_warpgroups(name):
    shape, filters, options = GATHERED[name]
    shape, filters = (shape[0], -(-shape[1] // 8) * 8, *shape[2:]), (filters[0], -(-filters[1] // 8) * 8, *filters[2:])
    x, weight = (
        integers(*sizes, dtype=torch.bfloat16).to(memory_format=torch.channels_last) for sizes in (shape, filters)
    )
    problem = convolution(x, weight, "bf16", hopper=True, **options)
    kernels = hoppers(conv2d.candidates(dataclasses.replace(problem, shared_memory=228 << 10)))
    goes_on = [kernel for kernel in kernels if "WgmmaGemm<" in kernel.type]
    shared = [kernel for kernel in kernels if "split" in kernel.name]
    for kernel in dict.fromkeys((kernels[-1], goes_on[-1], *shared[:1])):
        check_convolution(kernel, x, weight, residual="split" in kernel.name, precision="bf16", **options)


@pytest.mark.parametrize("splits", [1, 2])
def test_windows_in_float32_by_warpgroups(splits):
    shape, filters, options = GATHERED["3x3"]
    shape, filters = (shape[0], -(-shape[1] // 4) * 4, *shape[2:]), (filters[0], -(-filters[1] // 4) * 4, *filters[2:])
    x, weight = (integers(*sizes).to(memory_format=torch.channels_last) for sizes in (shape, filters))
    problem = conv2d._as_gemm(convolution(x, weight, "tf32x3", hopper=True, **options))
    problem = dataclasses.replace(problem, multiprocessors=132)
    kernel = gemm._kernel(gemm.WGMMA_TF32X3_TILES[-1], problem, splits)
    check_convolution(kernel, x * 4099, weight, residual=splits > 1, precision="tf32x3", **options)


NOT_IN_TF32 = (64, 64), (256, 64)  # they spill registers
WEIGHT_TILES = [
    *(("tf32", tile) for tile in gemm._TILES if min(tile.m, tile.n) >= 32 and (tile.m, tile.n) not in NOT_IN_TF32),
    *(("bf16", tile) for tile in gemm.WGMMA_TILES if tile.n & (tile.n - 1) == 0),
    ("bf16", gemm._TILES[6]), ("fp16", gemm._TILES[4]), ("tf32x3", gemm._TILES_TF32X3[3]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "tile"), WEIGHT_TILES, ids=lambda value: value if isinstance(value, str) else f"{value.m}x{value.n}"
)
@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 1), (1, 3)])
def test_windows_as_the_weight(precision, tile, stride, groups, monkeypatch):
    """Gradients of filters, of images that NaN surround in memory; more filters and columns than a tile has."""
    monkeypatch.setattr(gemm, "WGMMA_TILES", (tile,) if tile.wgmma else ())
    for name in ("_TILES", "_TILES_TF32X3"):
        monkeypatch.setattr(gemm, name, () if tile.wgmma else (tile,))
    dtype, kernel, padding = PRECISIONS[precision], (3, 2), (1, 0)
    channels, filters, size = 16 * groups, (tile.m + 8) * groups, (12 + 2 * stride, 11 + stride)
    out = tuple((s + 2 * pad - r) // stride + 1 for s, pad, r in zip(size, padding, kernel, strict=True))
    dy = integers(3, filters, *out, dtype=dtype).to(memory_format=torch.channels_last)
    around = torch.full((3, channels, size[0] + 2, size[1] + 2), math.nan, dtype=dtype)
    x = around.to(memory_format=torch.channels_last)[:, :, 1:-1, 1:-1]
    x.copy_(integers(3, channels, *size, dtype=dtype))
    strides = dy.stride(), x.stride()
    problem = conv2d_weight.Problem(
        3, filters, channels, size, out, kernel, (stride, stride), padding, (1, 1), groups, precision, *strides,
        multiprocessors=2, shared_memory=228 << 10, hopper=tile.wgmma, eager_error=(1e-6, 1e-6),
    )  # fmt: skip
    shape, sides = (filters, 16, *kernel), ([stride, stride], list(padding), [1, 1], False, [0, 0], groups)
    weight = torch.empty(shape, dtype=torch.float64)
    given = (dy.double(), x.double(), weight, None, *sides, [False, True, False])
    want = torch.ops.aten.convolution_backward(*given)[1].to(dtype)
    kernels = conv2d_weight.candidates(problem)
    assert kernels
    for each in kernels:
        assert "WindowColumns" in each.type and f"{tile.m}x{tile.n}x" in each.name
        have = torch.full(shape, 99, dtype=dtype).to(memory_format=torch.channels_last)
        launch(each, "acc", (dy, x, have), tf32=precision == "tf32")
        assert torch.equal(have, want), each.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [64, 49])
def test_the_pass_in_place(dtype, length):
    value, bias = integers(2, 13, length, dtype=dtype), integers(13, dtype=dtype)
    want = F.relu(value + bias.view(-1, 1))
    layout = Layout((2, 13, length), ((13 * length, length, 1),))
    kernel = pointwise.kernel(layout, dtype, dtype)
    launch(kernel, EPILOGUE, (value, value), (Operand(bias, (0, 1, 0)),))
    assert torch.equal(value, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [64, 49])
def test_the_pass_into_a_new_tensor(dtype, length):
    """An expression without acc, as a chain's: what the new tensor held does not matter."""
    value, bias = integers(2, 13, length, dtype=dtype), integers(13, dtype=dtype)
    out = torch.full_like(value, torch.nan)
    kernel = pointwise.kernel(Layout((2, 13, length), ((13 * length, length, 1),)), dtype, dtype)
    operands = (Operand(value, (13 * length, length, 1)), Operand(bias, (0, 1, 0)))
    launch(kernel, "relu(o0 + o1)", (out, out), operands)
    assert torch.equal(out, F.relu(value + bias.view(-1, 1)))


@pytest.mark.parametrize("output", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("channels", "pixels"),
    [(35, 41), (40, 49), (72, 196), (33, 130), (130, 300), (9, 512)],  # the last: filters
)
def test_the_pass_back_from_channels_last(channels, pixels, dtype, output):
    images = 2
    acc, bias = integers(images, pixels, channels, dtype=dtype), integers(channels, dtype=dtype)
    residual = integers(images, channels, pixels, dtype=output)
    layout = Layout((images, channels, pixels), ((channels * pixels, pixels, 1),))
    kernel = pointwise.transposed_kernel(layout, (channels * pixels, channels), dtype, output)
    out = torch.full((images, channels, pixels), 99, dtype=output)
    operands = (Operand(bias, (0, 1, 0)), Operand(residual, (channels * pixels, pixels, 1)))
    launch(kernel, "relu(acc + o0) - o1", (acc, out), operands)
    assert torch.equal(out, (F.relu(acc + bias).transpose(1, 2) - residual).to(output))


@pytest.mark.parametrize("output", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "pixels"), [(8, 1), (40, 49), (136, 100), (72, 128), (64, 15)])
def test_the_pass_back_by_whole_planes(channels, pixels, dtype, output):
    images, guard = 3, 8
    acc, bias = integers(images, pixels, channels, dtype=dtype), integers(channels, dtype=dtype)
    gate = integers(images, channels)
    layout = Layout((images, channels, pixels), ((channels * pixels, pixels, 1), (0, 1, 0), (channels, 1, 0)))
    kernel = pointwise.planes_kernel(layout, (channels * pixels, channels), dtype, output)
    memory = torch.full((images * channels * pixels + guard,), 99, dtype=output)
    out = memory[:-guard].view(images, channels, pixels)
    launch(kernel, "relu(acc + o0) * o1", (acc, out), (Operand(bias, (0, 1, 0)), Operand(gate, (channels, 1, 0))))
    assert torch.equal(out, (F.relu(acc + bias).mT * gate.unsqueeze(-1)).to(output))
    assert (memory[-guard:] == 99).all(), "writes outside its result"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_passes_by_one_launch(dtype):
    x, filters = integers(2, 36, 100, dtype=dtype), integers(5, 36, 9, dtype=dtype)
    passes = [
        pointwise.transposed_kernel(
            Layout((len(acc), acc.shape[2], 36), ((36 * acc.shape[2], 36, 1),)), acc.stride()[:2], dtype, dtype
        )
        for acc in (x, filters)
    ]
    outs = [torch.full(acc.mT.shape, 99, dtype=dtype) for acc in (x, filters)]
    launch(pointwise.transposed_pair(*passes), "acc", (x, outs[0], filters, outs[1]))
    assert torch.equal(outs[0], x.mT) and torch.equal(outs[1], filters.mT)


def test_infinities_and_nan_stay_where_they_belong(monkeypatch):
    monkeypatch.setattr(conv2d_direct, "TILES", conv2d_direct.TILES[5:6])
    x, weight = integers(1, 4, 9, 12), integers(8, 4, 3, 3)
    x[0, 0, 2, 3], x[0, 1, 8, 11], x[0, 3, 0, 0] = float("inf"), float("nan"), float("-inf")
    problem = convolution(x, weight, padding=1)
    want = F.conv2d(x.double(), weight.double(), padding=1)
    for kernel in (conv2d_direct.kernels(problem)[0][1], conv2d._implicit_gemm(problem)[0][1]):
        out = torch.zeros(1, 8, 9, 12)
        launch(kernel, "acc * 2", (x, weight, out), tf32=True)
        assert torch.equal(out.isnan(), want.isnan()) and torch.equal(out.isposinf(), want.isposinf()), kernel.name


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "stride", "padding", "ceil_mode"),
    [((2, 2), (2, 2), (0, 0), False), ((3, 3), (2, 2), (1, 1), False), ((3, 2), (1, 3), (1, 0), True),
     ((5, 5), (1, 1), (2, 2), False), ((3, 3), (2, 2), (0, 0), True)],
)  # fmt: skip
def test_max_pooling_of_an_epilogue(size, stride, padding, ceil_mode, dtype, channels_last):
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    for channels in (12, 24):  # of 16 bits: three and one in a vector
        shape = (3, channels, 9, 12)
        acc, residual = (integers(*shape, dtype=dtype, seed=s).contiguous(memory_format=memory_format) for s in (0, 1))
        acc[0, 3, 4, 5], acc[1, 2, 0, 0], acc[2, :, 3] = float("nan"), float("inf"), float("-inf")
        bias = integers(channels, dtype=dtype)
        value = torch.maximum(acc + bias.view(-1, 1, 1), residual)
        want = F.max_pool2d(value.float(), size, stride, padding, 1, ceil_mode).to(dtype)
        pool = MaxPool(*size, *stride, *padding, ceil_mode)
        out = torch.full_like(want, 99).contiguous(memory_format=memory_format)
        kernel = pointwise.max_pool_kernel(shape, channels_last, pool, tuple(want.shape[2:]), dtype, dtype)
        plane = acc.stride(0)
        strides = ((0, 0, 1), (plane, channels, 1)) if channels_last else ((0, 1, 0), (plane, 9 * 12, 1))
        operands = (Operand(bias, strides[0]), Operand(residual, strides[1]))
        launch(kernel, "maximum(acc + o0, o1)", (acc, out), operands)
        assert torch.equal(out.nan_to_num(77), want.nan_to_num(77)), (channels, (out != want).sum())


# -------------------------------------------------------------------------------------------------- normalisations

COLUMNS = (1, 7, 96, 100, 192, 768, 1000, 2048, 4099, 8192)


def normalised(x, eps=1e-5):
    return F.layer_norm(x.double(), x.shape[-1:], eps=eps)


def layer_norms(x, rows_per_batch=None, eps=1e-5):
    """Kernels for the rows of x."""
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    stride, alignment = x.stride(-2), math.gcd(16, x.data_ptr())
    return layer_norm.candidates(
        layer_norm.Problem(rows, columns, stride, rows_per_batch or rows, eps, x.dtype, alignment)
    )


def run_layer_norm(kernel, epilogue, x, operands=(), dtype=None):
    """Its result; what surrounds that in memory must stay as it is."""
    guard, shape = 64, x.shape
    memory = torch.full((x.numel() + 2 * guard,), 99, dtype=dtype or x.dtype)
    out = memory[guard:-guard].view(shape)
    launch(kernel, epilogue, (x, out), operands)
    assert (memory[:guard] == 99).all() and (memory[-guard:] == 99).all(), (kernel.name, "writes outside its result")
    return out


def assert_rounded(have, want, name):
    """As close as rounding once to the result's dtype allows, after float32's own errors."""
    eps = torch.finfo(have.dtype).eps
    torch.testing.assert_close(
        have.double(), want, rtol=0.51 * eps + 1e-6, atol=2e-6, msg=lambda text: f"{name}: {text}"
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_layer_norm(columns, dtype):
    """Odd numbers of rows, parameters, and a residual; the parameters' own dtype."""
    rows = 67 if columns < 200 else 5
    generator = torch.Generator().manual_seed(columns)
    x, residual = ((torch.randn(rows, columns, generator=generator) * 2 + 3).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(columns, generator=generator).to(dtype) for _ in range(2))
    operands = (Operand(weight, (0, 0, 1)), Operand(residual, (0, columns, 1)), Operand(bias, (0, 0, 1)))
    want = normalised(x) * weight.double() + bias.double() + residual.double()
    kernels = layer_norms(x)
    assert kernels
    for kernel in kernels:
        assert_rounded(run_layer_norm(kernel, "acc * o0 + o2 + o1", x, operands), want, kernel.name)
        assert_rounded(run_layer_norm(kernel, "acc", x), normalised(x), kernel.name)


def test_layer_norm_of_rows_that_lie_apart_and_unaligned():
    for dtype, offset in ((torch.bfloat16, 0), (torch.bfloat16, 1), (torch.float32, 2)):
        x = torch.randn(9 * 200 + offset, generator=torch.Generator().manual_seed(0)).to(dtype)[offset:]
        x = x.view(9, 200)[:, :96]
        for kernel in layer_norms(x):
            assert_rounded(run_layer_norm(kernel, "acc", x), normalised(x), kernel.name)


def test_layer_norm_with_operands_of_a_batch():
    """Modulation by a scale for each image, as in diffusion transformers; results in another dtype."""
    x = torch.randn(3, 5, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = torch.randn(3, 192, generator=torch.Generator().manual_seed(1))
    for kernel in layer_norms(x, rows_per_batch=5):
        have = run_layer_norm(kernel, "acc * (o0 + 1)", x, (Operand(scale, (192, 0, 1)),), torch.float32)
        assert_rounded(have, normalised(x) * (scale.double()[:, None] + 1), kernel.name)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [96, 2048])
def test_layer_norm_of_special_values(columns, dtype):
    """NaN and infinities make NaN of their rows; rows of one value are zero, however large that is."""
    x = torch.randn(8, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1, 3], x[2, columns - 1], x[3, 0] = float("nan"), float("inf"), float("-inf")
    x[4], x[5], x[6], x[7] = torch.finfo(dtype).max, 1000.1, 100.0 + x[6], 1e4 / 3
    for kernel in layer_norms(x):
        have = run_layer_norm(kernel, "acc", x)
        assert have[1:4].isnan().all() and not have[[0, 4, 5, 6, 7]].isnan().any(), kernel.name
        assert have[[4, 5, 7]].abs().max() < 1e-6, kernel.name
        eager = (F.layer_norm(x[6], (columns,)).double() - normalised(x)[6]).norm()
        assert (have[6].double() - normalised(x)[6]).norm() <= 1.5 * eager, "an offset does not cancel digits"


def test_layer_norm_takes_what_it_is_made_for():
    most, unaligned = layer_norm.WHOLE_VECTORS * layer_norm.LANES, layer_norm.ELEMENTS * layer_norm.LANES
    for columns, fits in ((most, True), (most + 8, False), (unaligned - 1, True), (unaligned + 1, False)):
        assert bool(layer_norms(torch.zeros(3, columns))) == fits
