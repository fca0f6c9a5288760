"""Which CUDA kernels are offered for a convolution: arithmetic on sizes and strides, no GPU."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from fxfuse.cuda.conv2d import Conv2dProblem, candidates, pack, unsupported
from fxfuse.cuda.kernel import Kernel


def nchw(channels: int, height: int, width: int) -> tuple[int, int, int, int]:
    return (channels * height * width, height * width, width, 1)


def nhwc(channels: int, height: int, width: int) -> tuple[int, int, int, int]:
    return (height * width * channels, 1, width * channels, channels)


def problem(
    channels: int = 64,
    size: tuple[int, int] = (56, 56),
    filters: int = 64,
    kernel: tuple[int, int] = (3, 3),
    *,
    images: int = 8,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
    layout: str = "nchw",
    weight_layout: str | None = None,
    precision: str = "tf32",
    alignment: int = 16,
) -> Conv2dProblem:
    strides = {"nchw": nchw, "nhwc": nhwc}
    return Conv2dProblem(
        images=images,
        channels=channels,
        size=size,
        out_channels=filters,
        out_size=tuple((s + 2 * padding - k) // stride + 1 for s, k in zip(size, kernel, strict=True)),  # type: ignore[arg-type]
        kernel=kernel,
        stride=(stride, stride),
        padding=(padding, padding),
        dilation=(1, 1),
        groups=groups,
        x_strides=strides[layout](channels, *size),
        weight_strides=strides[weight_layout or layout](channels // groups, *kernel),
        out_layout=layout,  # type: ignore[arg-type]
        precision=precision,  # type: ignore[arg-type]
        x_alignment=alignment,
        weight_alignment=alignment,
    )


def families(of: Conv2dProblem) -> list[str]:
    """The templates of the candidates in order, without repetitions."""
    return list(dict.fromkeys(kernel.type.split("<")[0] for kernel in candidates(of)))


def access(of: Conv2dProblem) -> tuple[int, str, int]:
    """Bytes per copy of x, how filters are read, bytes per copy of filters: of the first implicit GEMM."""
    kernel = next(k for k in candidates(of) if k.type.startswith("Conv2d<"))
    *_, x_access, filters, weight_access = kernel.type.split("Conv2dConfig<")[1].split(">")[0].split(", ")
    return int(x_access), filters.removeprefix("Filters::"), int(weight_access)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (problem(), ["Conv2dDirect", "Conv2d"]),
        (problem(padding=1), ["Conv2dDirect", "Conv2d"]),
        (problem(images=1, size=(7, 7), padding=1), ["Conv2d", "Conv2dDirect"]),  # a direct tile is mostly empty
        (problem(stride=2), ["Conv2d"]),
        (problem(kernel=(5, 5)), ["Conv2d"]),
        (problem(precision="tf32x3"), ["Conv2d"]),
        (problem(precision="bf16"), ["Conv2d"]),
        (problem(layout="nhwc"), ["Conv2d"]),
        (problem(weight_layout="nhwc"), ["Conv2dDirect", "Conv2d"]),  # filters are packed from any strides
        (problem(size=(55, 55), padding=1), ["Conv2dDirect", "Conv2d"]),  # rows start anywhere
        (problem(size=(55, 55), padding=2), ["Conv2d"]),
        (problem(groups=64), ["DepthwiseTileNchw", "Conv2d"]),
        (problem(groups=64, layout="nhwc"), ["DepthwiseTileNhwc", "Conv2d"]),
        (problem(filters=128, groups=64), ["DepthwiseTileNchw", "Conv2d"]),
        (problem(filters=128, groups=64, layout="nhwc"), ["Depthwise", "Conv2d"]),
        (problem(groups=64, kernel=(3, 5)), ["Depthwise", "Conv2d"]),
        (problem(groups=64, kernel=(9, 9)), ["Depthwise", "Conv2d"]),
        (problem(groups=64, stride=3), ["Depthwise", "Conv2d"]),
        (replace(problem(groups=64), dilation=(2, 2), out_size=(52, 52)), ["Depthwise", "Conv2d"]),
        (replace(problem(groups=64), x_strides=(64 * 56 * 56, 56 * 56, 1, 56)), ["Depthwise", "Conv2d"]),
        (problem(groups=64, padding=4), ["Depthwise", "Conv2d"]),
        (problem(groups=64, size=(14, 9000)), ["Depthwise", "Conv2d"]),  # a strip of rows exceeds shared memory
        (problem(channels=66, filters=66, groups=66, layout="nhwc"), ["Depthwise", "Conv2d"]),
    ],
)
def test_families_that_fit_are_offered_in_order(case: Conv2dProblem, expected: list[str]) -> None:
    assert families(case) == expected


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (problem(kernel=(1, 1)), (16, "kContiguous", 16)),  # a row of the reduction is contiguous in x
        (problem(kernel=(1, 1), stride=2), (4, "kContiguous", 16)),
        (problem(kernel=(1, 1), size=(7, 7)), (4, "kContiguous", 16)),  # 49 floats: channels are not 16 bytes apart
        (problem(kernel=(1, 1), size=(7, 7), precision="bf16"), (2, "kContiguous", 16)),
        (problem(kernel=(1, 1), size=(6, 6), precision="bf16"), (8, "kContiguous", 16)),
        (problem(kernel=(1, 1), alignment=4), (4, "kContiguous", 4)),
        (problem(channels=3, kernel=(7, 7), stride=2), (4, "kContiguous", 4)),
        (problem(channels=3, kernel=(7, 7), precision="fp16"), (2, "kContiguous", 2)),
        (problem(layout="nhwc"), (16, "kContiguous", 16)),
        (problem(layout="nhwc", channels=6), (8, "kContiguous", 8)),
        (problem(layout="nhwc", channels=6, precision="bf16"), (4, "kContiguous", 4)),
        (problem(layout="nhwc", weight_layout="nchw"), (16, "kStrided", 4)),
        (problem(layout="nhwc", weight_layout="nchw", kernel=(1, 1)), (16, "kContiguous", 16)),
    ],
)
def test_copies_are_as_wide_as_alignment_allows(case: Conv2dProblem, expected: tuple[int, str, int]) -> None:
    assert access(case) == expected


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (problem(groups=64, padding=1), 16),
        (problem(groups=64), 4),  # without padding rows are shifted by a column in shared memory
        (problem(groups=64, padding=1, size=(14, 14)), 8),
        (problem(groups=64, padding=1, size=(7, 7)), 4),
        (problem(groups=64, padding=1, alignment=4), 4),
        (problem(groups=64, padding=1, precision="bf16"), 16),
        (problem(groups=64, padding=2, kernel=(5, 5), size=(28, 28), precision="fp16"), 8),
        (problem(groups=64, padding=1, size=(14, 14), precision="bf16"), 4),
        (problem(groups=64, padding=1, size=(7, 7), precision="bf16"), 2),
        (problem(groups=64, padding=1, layout="nhwc"), 16),
    ],
)
def test_depthwise_tiles_are_copied_in_pieces_that_are_aligned(case: Conv2dProblem, expected: int) -> None:
    assert candidates(case)[0].type.split("Config<")[1].split(">")[0].split(", ")[-1] == str(expected)


def test_permuted_and_sliced_inputs_need_no_copy() -> None:
    transposed = replace(problem(), x_strides=(64 * 56 * 56, 56 * 56, 1, 56))
    assert families(transposed) == ["Conv2d"]
    assert access(transposed)[0] == 4
    cropped = replace(problem(), x_strides=nchw(64, 60, 60))
    assert families(cropped) == ["Conv2dDirect", "Conv2d"]
    cropped_pointwise = replace(problem(kernel=(1, 1)), x_strides=nchw(64, 60, 60))
    assert access(cropped_pointwise)[0] == 4  # pixels of one row do not follow those of the one before


def direct(of: Conv2dProblem) -> list[Kernel]:
    return [kernel for kernel in candidates(of) if kernel.type.startswith("Conv2dDirect<")]


def test_direct_kernels_know_whether_rows_are_aligned() -> None:
    for case, aligned in (
        (problem(), "true"),
        (problem(size=(55, 55)), "false"),
        (problem(alignment=4), "false"),
        (replace(problem(), x_strides=nchw(64, 60, 60)), "true"),  # a slice whose rows are aligned
    ):
        assert {kernel.type.split("Config<")[1].split(">")[0].split(", ")[-1] for kernel in direct(case)} == {aligned}


def test_few_channels_keep_their_filters_in_shared_memory() -> None:
    first = direct(problem(8, (128, 128), 64, images=128))[0]
    assert "resident" in first.name and first.workspace == 0
    for case in (problem(9), problem(16, groups=2)):
        assert not any("resident" in kernel.name for kernel in direct(case))


def test_packed_filters_need_a_workspace() -> None:
    # whole tiles of 64 filters, whole chunks of 8 channels, 9 taps, 4 bytes
    kernels = {kernel.name: kernel for kernel in direct(problem(60, filters=130, groups=2))}
    kernel = next(kernel for name, kernel in kernels.items() if " 64x(2x128)" in name)
    assert kernel.workspace == 2 * (2 * 64) * (4 * 8) * 9 * 4


def test_wide_images_prefer_tiles_of_whole_rows_and_small_ones_small_tiles() -> None:
    assert "x128)" in direct(problem(64, (128, 128), 128, images=128))[0].name
    assert "x64)" in direct(problem(64, (56, 56), 64, images=128, padding=1))[0].name
    assert "x16)" in direct(problem(256, (14, 14), 256, images=64, padding=1))[0].name


def test_few_blocks_prefer_small_tiles_and_many_blocks_large_ones() -> None:
    assert "32x64" in candidates(problem(512, (7, 7), 512, images=1, padding=1))[0].name
    assert "128x128" in candidates(problem(128, (56, 56), 128, images=256, stride=2))[0].name


def test_every_problem_of_a_kind_shares_its_kernels() -> None:
    small, large = candidates(problem(images=2)), candidates(problem(images=64))
    assert {kernel.type for kernel in small} == {kernel.type for kernel in large}
    assert small[0].params != large[0].params


def test_params_are_the_fields_of_the_struct_in_order() -> None:
    case = replace(problem(8, (20, 30), 16, (3, 5), images=2), stride=(1, 2), padding=(3, 4), dilation=(5, 6))
    assert struct.unpack("<25q", pack(case)) == (
        *(2, 8, 20, 30, 16, 18, 26, 3, 5, 1, 2, 3, 4, 5, 6, 1),
        *(4800, 600, 30, 1, 120, 15, 5, 1, 1),
    )


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (problem(channels=2**10, size=(2**11, 2**11), kernel=(1, 1), images=1), "an image spans"),
        (replace(problem(), groups=3), "unevenly"),
        (replace(problem(), dilation=(2**30, 1)), "dilated filter"),
        (replace(problem(channels=0)), "empty"),
    ],
)
def test_what_32_bit_offsets_cannot_reach_is_refused_with_a_reason(case: Conv2dProblem, reason: str) -> None:
    assert candidates(case) == ()
    assert reason in (unsupported(case) or "")


def test_outputs_beyond_2_31_bytes_are_supported() -> None:
    case = problem(64, (256, 256), 128, images=128, padding=1)
    assert unsupported(case) is None
    assert families(case) == ["Conv2dDirect", "Conv2d"]
