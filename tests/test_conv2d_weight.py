"""Kernels for the gradient of a convolution's filters: which there are, and what they compute on the emulated GPU.

Inputs are small integers, so that results must equal float64's.
"""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from emulator import available, launch
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from fxfuse.cuda import conv2d_weight, gemm

LAST = torch.channels_last


def images(count, channels, *side):
    """Strides of images in channels_last."""
    height, width = side
    return (count and channels * height * width, 1, channels * width, channels)


def problem(channels=64, filters=128, kernel=3, precision="tf32", stride=1, side=28, **others):
    out = (side + 2 * (kernel // 2) - kernel) // stride + 1
    described = conv2d_weight.Problem(
        images=8, filters=filters, channels=channels, size=(side, side), out_size=(out, out), kernel=(kernel, kernel),
        stride=(stride, stride), padding=(kernel // 2, kernel // 2), dilation=(1, 1), groups=1, precision=precision,
        dy_strides=images(8, filters, out, out), x_strides=images(8, channels, side, side),
    )  # fmt: skip
    return replace(described, **others)


def rows(described):
    """The structs that read x and the weight, of all kernels."""
    kernels = conv2d_weight.candidates(described)
    return {name for name in ("WindowColumns", "MatrixColumns") for kernel in kernels if name in kernel.type}


@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "bf16", "fp16"])
@pytest.mark.parametrize("hopper", [False, True])
def test_windows_are_gathered_where_they_are_no_pixels(precision, hopper):
    device = {"precision": precision, "hopper": hopper, "shared_memory": 228 << 10}
    assert rows(problem(**device)) == {"WindowColumns"}
    assert rows(problem(kernel=1, stride=2, **device)) == {"WindowColumns"}
    assert rows(problem(kernel=1, **device)) == {"MatrixColumns"}
    of_parts = problem(kernel=1, **device)  # pixels of a larger image
    assert rows(replace(of_parts, x_strides=images(8, 64, 30, 31))) == {"WindowColumns"}
    assert all(
        "wgmma" not in kernel.name for kernel in conv2d_weight.candidates(problem(precision="tf32x3", hopper=True))
    )


@pytest.mark.parametrize(
    "other",
    [
        {"x_strides": (64 * 784, 784, 28, 1)}, {"dy_strides": (128 * 784, 784, 28, 1)},
        {"dy_strides": images(8, 128, 30, 31)}, {"images": 0}, {"channels": 3, "precision": "bf16"},
        {"x_alignment": 2, "precision": "fp16"}, {"groups": 64, "filters": 64, "dilation": (2, 2)},
    ],
    ids=str,
)  # fmt: skip
def test_problems_without_a_kernel(other):
    assert conv2d_weight.candidates(problem())
    strides = {"x_strides": images(8, 3, 28, 28)} if "channels" in other else {}
    assert not conv2d_weight.candidates(problem(**strides, **other))


@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "bf16"])
def test_each_group_is_a_product(precision):
    described = problem(64, 128, precision=precision, groups=4, side=56)
    assert rows(described) == {"WindowColumns"} and rows(replace(described, kernel=(1, 1), padding=(0, 0)))
    kernels = conv2d_weight.candidates(described)
    assert all("Batched<WindowColumns>" in kernel.type for kernel in kernels)
    assert any("split" in kernel.name for kernel in kernels), "few tiles, and long sums"


def test_reads_are_as_wide_as_channels_allow():
    for channels, precision, access in ((64, "tf32", 16), (6, "tf32", 8), (3, "tf32", 4), (6, "bf16", 4)):
        kernel, *_ = conv2d_weight.candidates(problem(channels, 128, precision=precision))
        assert f"Major::kMN, 16, {access}, WindowColumns" in kernel.type


def test_long_sums_are_shared_by_thread_blocks():
    kernel, *_ = conv2d_weight.candidates(problem(64, 64, side=56))
    assert kernel.name.startswith("filters' gradient as gemm") and "split" in kernel.name
    assert 0 < kernel.workspace <= gemm.MAX_WORKSPACE


def test_depthwise_filters_have_a_kernel_of_their_own():
    (kernel,) = conv2d_weight.candidates(problem(64, 64, groups=64))
    assert kernel.name.startswith("depthwise filters' gradient float, 3x3")
    assert not conv2d_weight.candidates(problem(64, 64, kernel=9, groups=64))


# ----------------------------------------------------------------------------------- generated convolutions

DTYPES = {"tf32": torch.float32, "bf16": torch.bfloat16}
TILES = {"tf32": gemm._TILES[4], "bf16": gemm._TILES[5]}  # 128x64, 64x128


@st.composite
def convolutions(draw):
    """Sizes of a convolution, channels and filters of each group, and how its input and its result's gradient lie in
    memory."""
    pair = st.tuples
    kernel, stride = draw(pair(*[st.integers(1, 5)] * 2)), draw(pair(*[st.integers(1, 3)] * 2))
    padding, dilation = draw(pair(*[st.integers(0, 4)] * 2)), draw(pair(*[st.integers(1, 3)] * 2))
    size = draw(pair(*[st.integers(1, 14)] * 2))
    out = [
        (side + 2 * pad - step * (taps - 1) - 1) // move + 1
        for side, taps, move, pad, step in zip(size, kernel, stride, padding, dilation, strict=True)
    ]
    assume(min(out) >= 1)
    images, groups = draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 2, 3, 5]))
    channels, filters = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24])), draw(st.integers(1, 150 // groups))
    assume(groups == 1 or channels * filters > 1)
    gaps, each = draw(pair(*[st.booleans()] * 2)), (groups, channels, filters)
    return images, each, size, tuple(out), kernel, stride, padding, dilation, gaps


def drawn(images, channels, size, dtype, has_gaps):
    """Images in channels_last; with gaps they are parts of larger ones, of which all else is NaN."""
    numbers = torch.Generator().manual_seed(images + channels + sum(size))
    values = torch.randint(-3, 4, (images, channels, *size), generator=numbers).to(dtype)
    if not has_gaps:
        return values.to(memory_format=LAST)
    around = torch.full((images, channels, size[0] + 3, size[1] + 2), math.nan, dtype=dtype).to(memory_format=LAST)
    part = around[:, :, 2:-1, 1:-1]
    part.copy_(values)
    return part


@pytest.mark.skipif(not available(), reason="the emulation needs Linux and g++ 12 or newer")
@pytest.mark.parametrize("multiprocessors", [1, 40])
@pytest.mark.parametrize("precision", DTYPES)
@seed(1)
@settings(
    max_examples=60, deadline=None, database=None, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)  # fmt: skip
@given(case=convolutions())
def test_generated_convolutions(case, precision, multiprocessors):
    images, (groups, of_each, filters), size, out, kernel, stride, padding, dilation, (x_has_gaps, dy_has_gaps) = case
    dtype, channels, filters = DTYPES[precision], groups * of_each, groups * filters
    x, dy = drawn(images, channels, size, dtype, x_has_gaps), drawn(images, filters, out, dtype, dy_has_gaps)
    made = conv2d_weight.Problem(
        images, filters, channels, size, out, kernel, stride, padding, dilation, groups, precision, dy.stride(),
        x.stride(), math.gcd(16, dy.data_ptr()), math.gcd(16, x.data_ptr()), multiprocessors=multiprocessors,
    )  # fmt: skip
    with mock.patch.multiple(gemm, _TILES=(TILES[precision],), WGMMA_TILES=()):
        kernels = conv2d_weight.candidates(made)
    shape = (filters, of_each, *kernel)
    options = (list(stride), list(padding), list(dilation), False, [0, 0], groups, [False, True, False])
    empty = torch.empty(shape, dtype=torch.float64)
    want = torch.ops.aten.convolution_backward(dy.double(), x.double(), empty, None, *options)[1].to(dtype)
    for each in kernels:
        have = torch.full(shape, 99, dtype=dtype).to(memory_format=LAST)
        launch(each, "acc", (dy, x, have), tf32=precision == "tf32")
        assert torch.equal(have, want), each.name
    assert kernels or dy_has_gaps or (precision == "bf16" and of_each % 2 == 1)
