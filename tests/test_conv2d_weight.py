"""Which kernels compute the gradient of a convolution's filters. What they compute: test_emulated_plans.py."""

from dataclasses import replace

import pytest

from fxfuse.cuda import conv2d_weight, gemm


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
        {"groups": 2}, {"x_strides": (64 * 784, 784, 28, 1)}, {"dy_strides": (128 * 784, 784, 28, 1)},
        {"dy_strides": images(8, 128, 30, 31)}, {"images": 0}, {"channels": 3, "precision": "bf16"},
        {"x_alignment": 2, "precision": "fp16"}, {"groups": 64, "filters": 64, "dilation": (2, 2)},
    ],
    ids=str,
)  # fmt: skip
def test_problems_without_a_kernel(other):
    assert conv2d_weight.candidates(problem())
    strides = {"x_strides": images(8, 3, 28, 28)} if "channels" in other else {}
    assert not conv2d_weight.candidates(problem(**strides, **other))


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
