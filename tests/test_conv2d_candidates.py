"""Which CUDA kernels are offered for a convolution: arithmetic on sizes and strides, no GPU."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

from fxfuse.cuda import conv2d_few_pixels
from fxfuse.cuda.conv2d import candidates, unsupported
from fxfuse.cuda.conv2d_problem import Conv2dProblem, pack
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
    """The templates of the candidates in order, without repetitions; Conv2d whether or not blocks share sums."""
    return list(dict.fromkeys(kernel.type.split("<")[0].replace("SplitConv2d", "Conv2d") for kernel in candidates(of)))


def implicit(of: Conv2dProblem) -> list[Kernel]:
    """The implicit GEMMs."""
    return [kernel for kernel in candidates(of) if "Conv2dConfig<" in kernel.type]


def access(of: Conv2dProblem) -> tuple[int, str, int]:
    """Bytes per copy of x, how filters are read, bytes per copy of filters: of the first implicit GEMM."""
    kernel = next(k for k in implicit(of) if k.type.startswith("Conv2d<"))
    *_, x_access, filters, weight_access, _, _ = kernel.type.split("Conv2dConfig<")[1].split(">")[0].split(", ")
    return int(x_access), filters.removeprefix("Filters::"), int(weight_access)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (problem(), ["Conv2dDirect", "Conv2d"]),
        (problem(padding=1), ["Conv2dDirect", "Conv2d"]),
        (problem(images=1, size=(7, 7), padding=1), ["Conv2dFewPixels", "Conv2d", "Conv2dDirect"]),
        (problem(images=1, size=(7, 7), padding=1, groups=2), ["Conv2d", "Conv2dDirect"]),  # whose tile is mostly empty
        (problem(stride=2), ["Conv2d"]),
        (problem(kernel=(5, 5)), ["Conv2d"]),
        (problem(precision="tf32x3"), ["Conv2d"]),
        (problem(precision="bf16"), ["Conv2dDirect", "Conv2d"]),
        (problem(precision="fp16", size=(55, 55), padding=1), ["Conv2dDirect", "Conv2d"]),
        (problem(precision="bf16", layout="nhwc"), ["Gemm"]),
        (problem(layout="nhwc"), ["Gemm"]),
        (problem(layout="nhwc", kernel=(1, 1)), ["Gemm"]),
        (replace(problem(layout="nhwc", precision="tf32x3"), eager_error=(43e-8, 33e-8)), ["Gemm"]),
        (problem(layout="nhwc", images=1, size=(7, 7), channels=512), ["SplitGemm", "Gemm"]),
        (problem(layout="nhwc", weight_layout="nchw"), ["Conv2d"]),  # filters in another order than the windows'
        (problem(layout="nhwc", weight_layout="nchw", kernel=(1, 1)), ["Gemm"]),
        (problem(layout="nhwc", groups=2), ["Conv2d"]),
        (problem(layout="nhwc", kernel=(16, 1)), ["Conv2d"]),  # more taps than there are bits for
        (problem(weight_layout="nhwc"), ["Conv2dDirect", "Conv2d"]),  # filters are packed from any strides
        (problem(size=(55, 55), padding=1), ["Conv2dDirect", "Conv2d"]),  # rows start anywhere
        (problem(size=(55, 55), padding=2), ["Conv2d"]),
        (problem(groups=64), ["DepthwiseTileNchw"]),
        (problem(groups=64, layout="nhwc"), ["DepthwiseNhwc"]),
        (problem(images=64, groups=64, layout="nhwc", precision="bf16"), ["DepthwiseMma", "DepthwiseNhwc"]),
        (problem(images=1, groups=64, layout="nhwc", precision="bf16"), ["DepthwiseNhwc"]),
        (
            problem(images=1, groups=64, layout="nhwc", precision="bf16", kernel=(7, 7)),
            ["DepthwiseMma", "DepthwiseNhwc"],
        ),
        (problem(images=64, groups=64, layout="nhwc", precision="fp16", stride=2), ["DepthwiseNhwc"]),
        (problem(filters=128, groups=64), ["DepthwiseTileNchw", "Conv2d"]),
        (problem(filters=128, groups=64, layout="nhwc"), ["Depthwise", "Conv2d"]),
        (problem(groups=64, kernel=(3, 5)), ["Depthwise"]),
        (problem(groups=64, kernel=(9, 9)), ["Depthwise"]),
        (problem(groups=64, stride=3), ["Depthwise"]),
        (replace(problem(groups=64), dilation=(2, 2), out_size=(52, 52)), ["Depthwise"]),
        (replace(problem(groups=64), x_strides=(64 * 56 * 56, 56 * 56, 1, 56)), ["Depthwise"]),
        (problem(groups=64, padding=4), ["Depthwise"]),
        (problem(groups=64, padding=2, layout="nhwc"), ["DepthwiseNhwc"]),
        (problem(groups=64, padding=3, layout="nhwc"), ["Depthwise"]),  # outputs of padding alone
        (problem(groups=64, size=(14, 9000)), ["Depthwise"]),  # a strip of rows exceeds shared memory
        (problem(channels=66, filters=66, groups=66, layout="nhwc"), ["Depthwise"]),
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
        (problem(layout="nhwc", groups=2), (16, "kContiguous", 16)),
        (problem(layout="nhwc", channels=12, groups=2), (8, "kContiguous", 8)),
        (problem(layout="nhwc", channels=12, groups=2, precision="bf16"), (4, "kContiguous", 4)),
        (problem(layout="nhwc", weight_layout="nchw"), (16, "kStrided", 4)),
    ],
)
def test_copies_are_as_wide_as_alignment_allows(case: Conv2dProblem, expected: tuple[int, str, int]) -> None:
    assert access(case) == expected


def product(of: Conv2dProblem) -> tuple[int, int, str]:
    """Bytes per copy of x and of filters, and how rows of x are found: of the first matrix product."""
    arguments = candidates(of)[0].type.split("GemmConfig<")[1].split(">")[0].split(", ")
    return int(arguments[8]), int(arguments[9]), arguments[10]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (problem(kernel=(1, 1), layout="nhwc"), (16, 16, "MatrixRows")),
        (problem(kernel=(1, 1), layout="nhwc", channels=6), (8, 8, "MatrixRows")),
        (problem(kernel=(1, 1), layout="nhwc", channels=3, precision="bf16"), (2, 2, "MatrixRows")),
        (problem(kernel=(1, 1), layout="nhwc", alignment=4), (4, 4, "MatrixRows")),
        (problem(kernel=(1, 1), layout="nhwc", stride=2), (16, 16, "WindowRows")),
        (problem(kernel=(1, 1), layout="nhwc", padding=1), (16, 16, "WindowRows")),
        (problem(layout="nhwc", channels=6), (8, 8, "WindowRows")),
        (problem(layout="nhwc", channels=6, precision="bf16"), (4, 4, "WindowRows")),
        (problem(layout="nhwc", channels=3), (4, 4, "WindowRows")),
        (problem(layout="nhwc", channels=3, kernel=(7, 7), stride=2, precision="bf16"), (2, 2, "WindowRows")),
    ],
)
def test_channels_last_is_a_product_of_pixels_and_filters(case: Conv2dProblem, expected: tuple[int, int, str]) -> None:
    assert product(case) == expected


def test_windows_are_described_after_the_product() -> None:
    case = replace(
        problem(8, (20, 30), 16, (3, 5), images=2, layout="nhwc"), stride=(1, 2), padding=(3, 4), dilation=(5, 6)
    )
    fields = struct.unpack("<26q", candidates(case)[0].params)
    assert fields[:6] == (2 * 18 * 26, 16, 8 * 15, 8 * 15, 16, 18 * 26)
    assert fields[10:] == (20, 30, 8, 18, 26, 3, 5, 1, 2, 3, 4, 5, 6, 20 * 30 * 8, 30 * 8, 8)


def test_a_slice_of_images_in_channels_last_is_gathered() -> None:
    whole = problem(kernel=(1, 1), layout="nhwc")
    strides = whole.x_strides
    for cropped in (
        replace(whole, x_strides=(strides[0] * 2, *strides[1:])),  # every second image
        replace(whole, x_strides=nhwc(64, 60, 60)),  # a part of each
    ):
        assert product(cropped) == (16, 16, "WindowRows")
    channels = replace(whole, x_strides=nhwc(96, 56, 56))  # the first 64 of 96 channels
    assert product(channels) == (16, 16, "MatrixRows")


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


def test_direct_kernels_know_how_rows_are_aligned() -> None:
    for case, skew in (
        (problem(), "0"),
        (problem(padding=1), "3"),  # the leftmost pixel is one before a multiple of 16 bytes
        (problem(padding=1, precision="bf16"), "7"),
        (problem(size=(55, 55)), "kAnySkew"),
        (problem(alignment=4), "kAnySkew"),
        (problem(size=(60, 60)), "0"),
        (problem(size=(60, 60), precision="bf16"), "kAnySkew"),  # 120 bytes
        (replace(problem(), x_strides=nchw(64, 60, 60)), "0"),  # a slice whose rows are aligned
    ):
        assert {kernel.type.split("Config<")[1].split(">")[0].split(", ")[-1] for kernel in direct(case)} == {skew}


def test_few_channels_keep_their_filters_in_shared_memory() -> None:
    for channels, precision in ((8, "tf32"), (16, "fp16")):
        first = direct(problem(channels, (128, 128), 64, images=128, precision=precision))[0]
        assert "resident" in first.name and first.workspace == 0
    for case in (problem(9), problem(16, groups=2), problem(17, precision="fp16")):
        assert not any("resident" in kernel.name for kernel in direct(case))


def test_hopper_has_kernels_of_its_own_for_filters_of_several_taps() -> None:
    hopper = replace(problem(filters=128, images=128, size=(128, 128)), hopper=True)
    assert families(hopper)[0] == "Conv2dWgmma"
    assert "Conv2dWgmma" not in families(replace(hopper, hopper=False))
    for without in (
        replace(hopper, precision="tf32x3"),
        replace(problem(kernel=(1, 1)), hopper=True),
        replace(problem(layout="nhwc"), hopper=True),
        replace(problem(groups=64), hopper=True),
        replace(problem(channels=3, kernel=(9, 9)), hopper=True),
    ):
        assert "Conv2dWgmma" not in families(without)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("side", [128, 256])
def test_few_channels_are_hoppers_too_and_leave_in_runs_of_two_rows(side: int, precision: str) -> None:
    few = replace(
        problem(images=128, channels=8, filters=64, size=(side, side), precision=precision), hopper=True
    )  # what is stored is most of the work then
    first = candidates(few)[0]
    assert first.type.startswith("Conv2dWgmma<") and _staged_segments(first) == 2
    many = replace(problem(images=64, filters=128, size=(side, side), precision=precision), hopper=True)
    assert _staged_segments(candidates(many)[0]) == 1


def test_few_channels_in_3xtf32_are_hoppers_where_all_are_one_step_of_a_3x3_filter() -> None:
    few = replace(problem(8, (128, 128), 64, images=128, precision="tf32x3"), hopper=True)
    assert families(few)[:2] == ["Conv2dWgmma", "Conv2dDirect"]
    first = candidates(few)[0]
    assert first.workspace == 2 * 64 * 9 * 8 * 4  # hi and lo of the filters
    assert struct.unpack("<6q", first.params[-48:]) == (1, 1, 2 + 2, 126 + 2, 1, 1)  # one stage has all channels
    assert "Conv2dWgmma" in families(problem_of_hopper(3, precision="tf32x3", padding=1))
    for without in (
        replace(few, hopper=False),
        problem_of_hopper(9, precision="tf32x3"),
        problem_of_hopper(8, precision="tf32x3", stride=2),
        problem_of_hopper(8, precision="tf32x3", kernel=(5, 5)),
    ):
        assert "Conv2dWgmma" not in families(without)


def problem_of_hopper(channels: int, **options: Any) -> Conv2dProblem:
    return replace(problem(channels, **options), hopper=True)


def _staged_segments(kernel: Kernel) -> int:
    return int(kernel.type.split("Conv2dWgmmaConfig<")[1].split(">")[0].split(", ")[-1])


def test_hopper_kernels_are_cut_up_as_shared_memory_allows() -> None:
    """Rows of 126 are a segment each, rows of 26 four in one; a filter of many taps leaves room for one stage."""

    def cuts(of: Conv2dProblem) -> list[tuple[int, ...]]:
        found = (kernel for kernel in candidates(replace(of, hopper=True)) if "wgmma" in kernel.name)
        return [struct.unpack("<6q", kernel.params[-48:]) for kernel in found]

    wide, narrow = problem(filters=128, images=64, size=(128, 128)), problem(size=(28, 28))
    assert cuts(wide)[0] == (1, 1, 2 + 2, 126 + 2, 1, 3)
    assert all(cut[:2] == (4, 1) and cut[3] == 26 + 2 for cut in cuts(narrow))
    assert all(cut[:2] == (1, 2) for cut in cuts(problem(size=(256, 256))))
    assert cuts(problem(channels=64, kernel=(7, 7))) == []


def test_packed_filters_need_a_workspace() -> None:
    # whole tiles of 64 filters, whole chunks of 8 channels, 9 taps, 4 bytes
    kernels = {kernel.name: kernel for kernel in direct(problem(60, filters=130, groups=2))}
    kernel = next(kernel for name, kernel in kernels.items() if " 64x(2x128)" in name)
    assert kernel.workspace == 2 * (2 * 64) * (4 * 8) * 9 * 4
    kernels = {kernel.name: kernel for kernel in direct(problem(60, filters=130, groups=2, precision="bf16"))}
    kernel = next(kernel for name, kernel in kernels.items() if " 64x(2x128)" in name)
    assert kernel.workspace == 2 * (2 * 64) * (2 * 16) * 9 * 2


def test_wide_images_prefer_tiles_of_whole_rows_and_small_ones_small_tiles() -> None:
    assert "x128)" in direct(problem(64, (128, 128), 128, images=128))[0].name
    assert "x64)" in direct(problem(64, (56, 56), 64, images=128, padding=1))[0].name
    assert "x16)" in direct(problem(256, (14, 14), 256, images=64, padding=1))[0].name


def test_few_blocks_prefer_small_tiles_and_many_blocks_large_ones() -> None:
    assert "32x64" in implicit(problem(512, (7, 7), 512, images=1, padding=1))[0].name
    assert "128x128" in candidates(problem(128, (56, 56), 128, images=256, stride=2))[0].name


@pytest.mark.parametrize(
    ("case", "fits"),
    [
        (problem(512, (7, 7), 2048, (1, 1), images=1), True),
        (problem(512, (7, 7), 2048, (1, 1), images=1, precision="bf16"), True),
        (problem(512, (7, 7), 2048, (1, 1), images=1, precision="tf32x3"), False),
        (problem(512, (7, 7), 2048, (1, 1), images=64), False),  # others read the weight less often
        (problem(500, (7, 7), 2048, (1, 1), images=1), False),  # a lane's eight channels would end in the next filter
        (problem(500, (7, 7), 64, images=1, padding=1), True),
        (problem(500, (7, 7), 64, images=1, padding=1, precision="bf16"), False),  # pixels are copied one by one
        (replace(problem(500, (7, 7), 64, images=1, padding=1), x_strides=(1, 1, 7 * 500, 500)), True),
        (problem(512, (60, 60), 16, images=1), False),  # 240 pixels are seen by a tile
        (problem(512, (7, 7), 2048, (5, 5), images=1, padding=2), False),
        (problem(512, (7, 7), 2048, (1, 1), images=1, alignment=4), False),
        (replace(problem(512, (7, 7), 64, (1, 1), images=1), x_strides=(512 * 50, 50, 7, 1)), False),  # planes apart
        (replace(problem(512, (8, 8), 64, (1, 1), images=1), x_strides=(512 * 68, 68, 8, 1)), True),
        (replace(problem(512, (8, 8), 64, (1, 1), images=1), x_strides=(512 * 72, 72, 9, 1)), False),  # rows apart
        (problem(512, (7, 7), 64, images=1, weight_layout="nhwc"), False),
    ],
)
def test_few_pixels_have_kernels_where_all_is_aligned(case: Conv2dProblem, fits: bool) -> None:
    found = conv2d_few_pixels.kernels(case)
    assert bool(found) == fits
    assert all(kernel.params[: -4 * 8] == pack(case) for _, kernel in found)


@pytest.mark.parametrize(
    ("case", "tiling"),
    [
        # a tile's pixels, whether whole planes are copied, elements of a copy and of a group of channels
        (problem(512, (7, 7), 2048, (1, 1), images=1), (49, 1, 8 * 49, 8 * 49)),
        (problem(512, (7, 7), 2048, (1, 1), images=1, precision="bf16"), (25, 1, 8 * 49, 8 * 49 + 8)),
        (problem(512, (14, 14), 512, (1, 1), images=1), (28, 0, 32, 8 * 32 + 8)),
        (problem(512, (8, 8), 512, (1, 1), images=1, stride=2), (16, 0, 64, 8 * 64 + 8)),
        (problem(512, (7, 7), 512, images=1, padding=1), (25, 0, 0, 4 * 66)),
        (problem(256, (14, 14), 64, images=1, padding=1), (28, 0, 0, 4 * 106)),
    ],
)
def test_few_pixels_are_divided_evenly_and_groups_of_channels_stand_8_banks_apart(
    case: Conv2dProblem, tiling: tuple[int, ...]
) -> None:
    packed = [struct.unpack("<4q", kernel.params[-4 * 8 :]) for _, kernel in conv2d_few_pixels.kernels(case)]
    assert tiling in packed
    assert all(group * case.element_bytes // 4 % 32 == 8 for *_, group in packed)


def test_few_pixels_have_stages_for_which_there_is_shared_memory() -> None:
    def stages(case: Conv2dProblem) -> set[str]:
        return {kernel.name.rsplit(", ", 1)[1] for _, kernel in conv2d_few_pixels.kernels(case)}

    assert stages(problem(2048, (7, 7), 512, (1, 1), images=1)) == {"3 stages"}
    assert stages(problem(256, (7, 7), 512, (1, 1), images=1)) == {"1 stage"}  # a chunk for each warp
    assert stages(problem(512, (14, 14), 64, images=1, stride=2, padding=1)) == {"1 stage"}
    assert stages(problem(512, (7, 7), 64, images=1, padding=1)) == {"3 stages"}


def test_every_problem_of_a_kind_shares_its_kernels() -> None:
    small, large = candidates(problem(images=2)), candidates(problem(images=64))
    assert {kernel.type for kernel in small} >= {kernel.type for kernel in large}
    assert small[0].params != large[0].params


def test_params_are_the_fields_of_the_struct_in_order() -> None:
    case = replace(problem(8, (20, 30), 16, (3, 5), images=2), stride=(1, 2), padding=(3, 4), dilation=(5, 6))
    assert struct.unpack("<27q", pack(case, block_tiles=2, splits=3, split_tiles=4)) == (
        *(2, 8, 20, 30, 16, 18, 26, 3, 5, 1, 2, 3, 4, 5, 6, 1),
        *(4800, 600, 30, 1, 120, 15, 5, 1, 2, 3, 4),
    )


def test_thread_blocks_share_long_sums_of_few_outputs() -> None:
    case = problem(512, (7, 7), 512, images=1, padding=1)
    first = implicit(case)[0]
    *_, splits, split_tiles = struct.unpack("<27q", first.params)
    assert first.type.startswith("SplitConv2d<") and splits > 4
    assert splits * split_tiles >= 512 * 9 / 32 > (splits - 1) * split_tiles  # all of the sum, and something for each
    assert first.workspace >= splits * 512 * 49 * 4
    unshared = candidates(problem(128, (56, 56), 128, images=256, stride=2))
    assert unshared and not any(kernel.workspace for kernel in unshared)


def test_one_by_one_filters_in_nchw_have_tiles_of_their_own() -> None:
    def is_pointwise(case: Conv2dProblem) -> bool:
        configs = [kernel.type.split("Conv2dConfig<")[1].split(">")[0] for kernel in implicit(case)]
        return any(config.split(", ")[-2] == "true" for config in configs)

    assert is_pointwise(problem(kernel=(1, 1))) and is_pointwise(problem(kernel=(1, 1), stride=2))
    assert not is_pointwise(problem(kernel=(1, 1), padding=1))
    assert not is_pointwise(replace(problem(kernel=(1, 1)), out_size=(56, 57)))  # padding behind the last column
    assert not is_pointwise(problem(kernel=(1, 1), size=(7, 7), precision="bf16"))  # pixel by pixel through registers
    assert not is_pointwise(problem(kernel=(1, 1), layout="nhwc"))


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
