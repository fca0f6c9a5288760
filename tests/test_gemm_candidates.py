"""gemm.candidates is a pure function of a problem: what it offers, in which order, and how it is packed."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import replace
from typing import Any

import pytest

from fxfuse.cuda import gemm
from fxfuse.cuda.gemm_accuracy import BY_WGMMA, MARGIN, error_of, expected_error
from fxfuse.cuda.gemm_problem import Problem, Tile
from fxfuse.cuda.kernel import Kernel
from fxfuse.cuda.precision import Precision

PRECISIONS: tuple[Precision, ...] = ("tf32x3", "tf32", "fp16", "bf16")


def linear(m: int, n: int, k: int, precision: Precision = "tf32x3") -> Problem:
    """nn.Linear on contiguous, aligned tensors, on an H200."""
    return Problem(
        m,
        n,
        k,
        precision,
        "nk",
        x_stride=k,
        weight_stride=k,
        out_stride=n,
        multiprocessors=132,
        shared_memory=228 * 1024,
    )


def candidates(problem: Problem) -> tuple[Kernel, ...]:
    """Those that cut the result into tiles."""
    others = (gemm.GEMV_HEADER, gemm.FEW_ROWS_HEADER)
    return tuple(kernel for kernel in gemm.candidates(problem) if kernel.header not in others)


def config(kernel_type: str) -> list[str]:
    match = re.fullmatch(r"(?:Split)?Gemm<GemmConfig<(.*)>, \{output\}, \{epilogue\}>", kernel_type)
    assert match, kernel_type
    return match[1].split(", ")


def tile(kernel_type: str) -> tuple[int, int]:
    return int(config(kernel_type)[1]), int(config(kernel_type)[2])


def splits(kernel: Kernel) -> int:
    """Thread blocks that share a tile."""
    return int(struct.unpack("<11q", kernel.params)[8])


@pytest.mark.parametrize("precision", [*PRECISIONS, "fp16x3"])
def test_the_best_comes_first_with_its_estimated_time(precision: Precision) -> None:
    estimates = [kernel.estimate or 0.0 for kernel in candidates(linear(1000, 512, 512, precision))]
    assert estimates == sorted(estimates) and estimates[0] > 0


@pytest.mark.parametrize("precision", [*PRECISIONS, "fp16x3"])
@pytest.mark.parametrize("m", [1, 7, 33, 1000, 100_000])
@pytest.mark.parametrize("n", [1, 129, 8192])
@pytest.mark.parametrize("k", [1, 300, 16384])
def test_every_problem_has_candidates_without_repetition(precision: Precision, m: int, n: int, k: int) -> None:
    kernels = candidates(linear(m, n, k, precision))
    assert kernels
    assert len({(kernel.header, kernel.type) for kernel in kernels}) == len(kernels)


@pytest.mark.parametrize(
    ("m", "n", "k"), [(0, 8, 8), (8, 0, 8), (8, 8, 0), (2**31, 8, 8), (8, 2**31, 8), (8, 8, 2**31)]
)
def test_sizes_beyond_the_template_have_none(m: int, n: int, k: int) -> None:
    assert candidates(linear(m, n, k)) == ()


def test_grid_limits_exclude_small_tiles() -> None:
    offered = {tile(kernel.type) for kernel in candidates(linear(1, 65535 * 64 + 1, 64, "fp16"))}
    assert offered == {(128, 256), (256, 128), (128, 128), (64, 128)}


@pytest.mark.parametrize(
    ("precision", "m", "n", "k", "expected"),
    [
        ("tf32x3", 1024, 8192, 8192, {(128, 128), (128, 64), (64, 128)}),
        ("tf32x3", 16, 8192, 8192, {(16, 64)}),
        ("tf32x3", 32, 8192, 8192, {(32, 64)}),
        ("tf32x3", 16384, 8, 4096, {(128, 16)}),
        ("tf32", 1024, 8192, 8192, {(128, 256), (256, 128), (128, 128)}),
        ("bf16", 1024, 8192, 8192, {(128, 256), (256, 128), (128, 128)}),
        ("bf16", 16, 8192, 8192, {(16, 64), (16, 32)}),
        ("bf16", 32, 8192, 8192, {(32, 64), (16, 64)}),
        ("bf16", 64, 11008, 4096, {(64, 64), (64, 128)}),
        ("fp16", 16384, 8, 4096, {(128, 16)}),
    ],
)
def test_first_choice_on_an_h200(precision: Precision, m: int, n: int, k: int, expected: set[tuple[int, int]]) -> None:
    assert tile(candidates(linear(m, n, k, precision))[0].type) in expected


@pytest.mark.parametrize(
    ("precision", "m", "n", "k", "least", "most"),
    [
        ("tf32x3", 16, 4096, 4096, 2, 8),  # 64 tiles of 16x64 on 132 multiprocessors
        ("tf32x3", 128, 8192, 8192, 2, 4),
        ("tf32x3", 512, 512, 16384, 4, 8),
        ("bf16", 1, 640, 4096, 4, 16),
        ("bf16", 512, 512, 16384, 4, 8),
        ("bf16", 1024, 8192, 8192, 1, 1),
        ("tf32x3", 8192, 8192, 8192, 1, 1),
        ("fp16", 128, 128, 64, 1, 1),
        ("fp16", 64, 64, 1, 1, 1),
    ],
)
def test_sums_are_shared_where_tiles_are_few(
    precision: Precision, m: int, n: int, k: int, least: int, most: int
) -> None:
    problem = replace(linear(m, n, k, precision), eager_error=(81e-8, 30e-8))
    assert least <= splits(candidates(problem)[0]) <= most


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 4096), (16, 300, 2049), (200, 333, 1800), (128, 32768, 32768)])
def test_shares_of_k_are_equal_and_none_is_empty(precision: Precision, m: int, n: int, k: int) -> None:
    for kernel in candidates(linear(m, n, k, precision)):
        count, share = struct.unpack("<11q", kernel.params)[8:10]
        tiles = -(-k // (128 // (2 if precision in ("fp16", "bf16") else 4)))
        assert (count - 1) * share < tiles <= count * share
        assert (f"split {count}" in kernel.name) is (count > 1)
        assert kernel.type.startswith("SplitGemm<") is (count > 1)


def test_the_workspace_holds_a_counter_and_all_parts_of_every_tile() -> None:
    problem = linear(70, 200, 8192, "bf16")
    shared = [kernel for kernel in candidates(problem) if splits(kernel) > 1]
    assert shared
    for kernel in shared:
        m, n = tile(kernel.type)
        tiles = -(-70 // m) * -(-200 // n)
        assert kernel.workspace == 256 * -(-tiles * 8 // 256) + tiles * splits(kernel) * m * n * 4
    assert all(kernel.workspace == 0 for kernel in candidates(problem) if splits(kernel) == 1)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("multiprocessors", [20, 108, 132])
def test_where_tiles_fill_the_device_only_those_of_the_last_wave_are_shared(
    precision: Precision, multiprocessors: int
) -> None:
    problem = replace(linear(3152, 768, 8192, precision), multiprocessors=multiprocessors)
    for kernel in candidates(problem):
        m, n = tile(kernel.type)
        tiles, (alone, count) = -(-3152 // m) * -(-768 // n), struct.unpack("<11q", kernel.params)[7:9]
        if count == 1 or tiles < multiprocessors:
            assert alone == 0
        elif alone > 0:
            assert alone % multiprocessors == 0
            assert kernel.workspace == gemm.shared_sums_bytes(tiles - alone, m * n, count)
        else:  # a multiprocessor has several at a time, or longer sums are less accurate than eager's
            assert tiles < 8 * multiprocessors or precision == "tf32x3"


def test_sharing_the_last_wave_is_first_where_it_is_nearly_empty() -> None:
    whole, more = (candidates(linear(m, 768, 8192, "bf16")) for m in (132 * 128 // 6 * 2, 132 * 128 // 6 * 2 + 900))
    assert splits(more[0]) > 1
    assert struct.unpack("<11q", more[0].params)[7] > 0
    assert (more[0].estimate or 0) < 1.5 * (whole[0].estimate or 0)


def test_one_kernel_serves_any_number_of_splits() -> None:
    tile = Tile(64, 64, 2, 2, stages=4, resident=4, alone=0.5, full=0.7)
    kernels = [gemm._kernel(tile, linear(64, 640, 8192, "bf16"), splits) for splits in (2, 3, 8)]
    assert len({kernel.type for kernel in kernels}) == 1
    assert len({kernel.params for kernel in kernels}) == 3


@pytest.mark.parametrize(
    ("k", "sums", "block"),
    [(64, "kStepwise", 1), (1024, "kPromoted", 1), (4096, "kPromoted", 2), (16384, "kPromoted", 4)],
)
def test_sums_follow_k(k: int, sums: str, block: int) -> None:
    large = next(kernel for kernel in candidates(linear(4096, 8192, k)) if tile(kernel.type) == (128, 128))
    assert config(large.type)[6] == f"Sums::{sums}"
    assert struct.unpack("<11q", large.params)[6] == block


@pytest.mark.parametrize(
    ("m", "n", "k", "multiplier"),
    [
        (4096, 8192, 16, "Bf16x6"),
        (4096, 8192, 31, "Bf16x6"),
        (4096, 8192, 32, "Tf32x3"),
        (1, 8192, 8192, "Bf16x6"),
        (16, 512, 2048, "Bf16x6"),
        (128, 768, 256, "Bf16x6"),
        (16, 8192, 256, "Bf16x6"),
        (16, 8192, 8192, "Tf32x3"),
        (512, 512, 512, "Tf32x3"),
    ],
)
def test_short_sums_and_small_outputs_are_split_into_bf16(m: int, n: int, k: int, multiplier: str) -> None:
    for kernel in candidates(linear(m, n, k)):
        assert config(kernel.type)[0] == multiplier
        assert multiplier == "Tf32x3" or config(kernel.type)[6] == "Sums::kBlockwise"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_tile_spans_less_than_4_gb(precision: Precision) -> None:
    problem = replace(linear(128, 128, 64, precision), x_stride=2**24)
    assert {tile(kernel.type)[0] for kernel in candidates(problem)} <= {16, 32, 64}
    assert candidates(replace(problem, x_stride=2**28)) == ()
    assert candidates(replace(problem, x_stride=2**28, m=1))[0].type


@pytest.mark.parametrize(
    ("eager", "kinds"),
    # what cuBLAS was measured to err by: where it divides sums among many and few thread blocks, and never
    [((1.2e-7, 0.6e-7), {"kBlockwise"}), ((2.4e-7, 0.9e-7), {"kBlockwise"}),
     ((6e-7, 4.2e-7), {"kBlockwise", "kPromoted"})],
)  # fmt: skip
def test_sums_are_as_exact_as_eagers_were_measured_to_be(eager: tuple[float, float], kinds: set[str]) -> None:
    kernels = candidates(replace(linear(1000, 3000, 1024), eager_error=eager))
    assert {config(kernel.type)[6].removeprefix("Sums::") for kernel in kernels} == kinds


@pytest.mark.parametrize(("m", "fills"), [(4096 * 4, True), (512, False)])
def test_where_nothing_was_measured_eager_divides_sums_of_few_tiles(m: int, fills: bool) -> None:
    normal, uniform = expected_error(linear(m, 768, 4096))
    assert (normal, uniform) == pytest.approx((114e-8, 84e-8) if fills else (35e-8, 10e-8))


@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
def test_other_precisions_accumulate_in_tensor_cores(precision: Precision) -> None:
    for kernel in candidates(linear(512, 512, 4096, precision)):
        assert config(kernel.type)[6] == "Sums::kRunning"


@pytest.mark.parametrize(
    ("precision", "changes", "access"),
    [
        ("tf32", {}, ("16", "16")),
        ("tf32", {"x_stride": 65}, ("4", "16")),
        ("tf32", {"x_stride": 65, "m": 1}, ("16", "16")),
        ("tf32", {"x_alignment": 4}, ("4", "16")),
        ("tf32", {"weight_stride": 66}, ("16", "8")),
        ("tf32", {"weight_alignment": 256}, ("16", "16")),
        ("tf32", {"k": 63, "x_stride": 64, "weight_stride": 64}, ("16", "16")),  # of a row's end less is read
        ("fp16", {"k": 63, "x_stride": 63, "weight_stride": 63}, ("2", "2")),
        ("bf16", {"x_alignment": 2}, ("2", "16")),
        ("bf16", {"weight_layout": "kn", "n": 127, "weight_stride": 127}, ("16", "2")),
        ("bf16", {"weight_layout": "kn", "n": 127, "weight_stride": 128}, ("16", "16")),
        ("bf16", {"weight_layout": "kn", "k": 1, "x_stride": 1, "weight_stride": 64}, ("2", "16")),
    ],
)
def test_access_is_what_alignment_allows(
    precision: Precision, changes: dict[str, Any], access: tuple[str, str]
) -> None:
    for kernel in candidates(replace(linear(128, 64, 64, precision), **changes)):
        assert tuple(config(kernel.type)[8:10]) == access


@pytest.mark.parametrize(
    ("changes", "ragged"),
    [
        ({}, False),
        ({"k": 63, "x_stride": 64, "weight_stride": 64}, True),
        ({"k": 63, "x_stride": 63, "weight_stride": 63}, False),  # read element by element
        ({"weight_layout": "kn", "n": 63, "weight_stride": 64}, True),
        ({"weight_layout": "kn", "x_layout": "km", "m": 127, "x_stride": 128}, True),
        ({"n": 63, "m": 127, "out_stride": 63}, False),  # of neither side's rows
    ],
)
def test_rows_that_end_within_a_read_have_kernels_of_their_own(changes: dict[str, Any], ragged: bool) -> None:
    """The others are not to pay for it."""
    kernels = candidates(replace(linear(128, 64, 64, "tf32"), **changes))
    assert kernels and all(("Ragged<" in kernel.type) is ragged for kernel in kernels)


def test_layouts_have_kernels_of_their_own() -> None:
    assert {config(kernel.type)[7] for kernel in candidates(linear(64, 64, 64))} == {"Major::kK"}
    matmul = replace(linear(64, 64, 64), weight_layout="kn")
    assert {config(kernel.type)[7] for kernel in candidates(matmul)} == {"Major::kMN"}


@pytest.mark.parametrize(("precision", "narrowest"), [("tf32", 32), ("bf16", 64)])
def test_rows_of_a_kn_weight_tile_are_swizzled(precision: Precision, narrowest: int) -> None:
    matmul = replace(linear(16, 8192, 4096, precision), weight_layout="kn", weight_stride=8192)
    assert min(tile(kernel.type)[1] for kernel in candidates(matmul)) == narrowest


def test_sizes_are_arguments_of_the_same_kernels() -> None:
    one = {kernel.type for kernel in candidates(linear(1000, 8192, 4096))}
    other = {kernel.type for kernel in candidates(linear(2000, 8192, 4096))}
    assert one <= other


def test_params_are_the_problem_struct() -> None:
    problem = replace(linear(6, 64, 32, "fp16"), x_stride=40, weight_stride=48, out_stride=56, rows_per_batch=3)
    assert struct.unpack("<11q", candidates(problem)[0].params) == (6, 64, 32, 48, 56, 3, 1, 0, 1, 1, 40)
    assert struct.unpack("<11q", candidates(replace(problem, rows_per_batch=0))[0].params)[5] == 6


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_tile_has_stages_that_a_short_k_leaves_empty(precision: Precision) -> None:
    for k in (1, 24, 64, 100, 256, 300):
        case = linear(4096, 256, k, precision)
        for kernel in candidates(case):
            stages, holds = int(config(kernel.type)[5]), config(kernel.type)[11] == "true"
            assert stages == case.tiles_k if holds else stages <= math.ceil((case.tiles_k + 1) / 4) * 4
            assert holds or case.tiles_k > 1


def test_columns_beyond_n_make_a_tile_slower() -> None:
    tiles = [tile(kernel.type) for kernel in candidates(linear(200704, 144, 24, "bf16"))]
    assert tiles.index((128, 32)) < tiles.index((128, 128))  # 160 columns instead of 256


@pytest.mark.parametrize("precision", PRECISIONS)
def test_tiles_fit_into_shared_memory_of_an_a100(precision: Precision) -> None:
    for kernel in candidates(linear(8192, 8192, 8192, precision)):
        m, n = tile(kernel.type)
        stages = int(config(kernel.type)[5])
        assert max(stages * (m + n) * 128, m * (n + 8) * 4) <= 163 * 1024


# ------------------------------------------------------------------------------------- scaled fp16 products


def is_fp16x3(kernel: Kernel) -> bool:
    return kernel.type.startswith("Fp16x3Gemm<")


@pytest.mark.parametrize(
    ("m", "n", "k", "pays"),
    [
        (1024, 8192, 8192, True),
        (16384, 4096, 4096, True),
        (4096, 768, 768, True),
        (16, 8192, 8192, False),
        (8192, 16, 8192, False),
        (256, 256, 256, False),
    ],
)
def test_splitting_into_halves_is_first_where_many_products_share_it(m: int, n: int, k: int, pays: bool) -> None:
    kernels = candidates(linear(m, n, k, "fp16x3"))
    assert is_fp16x3(kernels[0]) is pays
    exact = {kernel for kernel in kernels if not is_fp16x3(kernel)}
    assert exact == set(candidates(linear(m, n, k, "tf32x3")))


def test_halves_and_exponents_are_in_the_workspace() -> None:
    for kernel in candidates(linear(1000, 3000, 1001, "fp16x3")):
        if not is_fp16x3(kernel):
            assert (kernel.workspace > 0) is (splits(kernel) > 1)
            continue
        match = re.match(r"Fp16x3Gemm<Fp16x3Config<(\d+), (\d+), \d+, \d+, \d+, (\d+),", kernel.type)
        assert match
        tile_m, tile_n, chain = map(int, match.groups())
        rows = math.ceil(1000 / tile_m) * tile_m + math.ceil(3000 / tile_n) * tile_n
        k = math.ceil(1001 / max(32, 16 * chain)) * max(32, 16 * chain)
        assert kernel.workspace == 4 * rows * k + 4 * rows


def test_splitting_into_halves_takes_any_alignment_with_the_same_kernels() -> None:
    problem = linear(1024, 8192, 8192, "fp16x3")
    odd = replace(problem, x_stride=8193, weight_stride=8193, x_alignment=4, weight_alignment=4)
    kinds = [{kernel.type for kernel in candidates(each) if is_fp16x3(kernel)} for each in (problem, odd)]
    assert kinds[0] == kinds[1] != set()
    for kernel in candidates(odd):
        assert struct.unpack("<11q", kernel.params)[:4] == (1024, 8192, 8192, 8193)


# ------------------------------------------------------------------------------------- Hopper's own instructions


def hopper(m: int, n: int, k: int, precision: Precision = "bf16") -> Problem:
    return replace(linear(m, n, k, precision), hopper=True)


def by_warpgroups(problem: Problem) -> list[Kernel]:
    return [kernel for kernel in candidates(problem) if "wgmma" in kernel.name]


@pytest.mark.parametrize(
    ("m", "n", "k", "expected"),
    # the fastest, as measured on an H200
    [(4096, 4096, 4096, "128x256"), (6304, 3072, 768, "192x192"), (6304, 768, 3072, "192x192"),
     (2048, 768, 768, "128x96"), (1568, 3072, 768, "128x128"), (200704, 256, 64, "128x256")],
)  # fmt: skip
def test_warpgroups_come_first_where_they_were_the_fastest(m: int, n: int, k: int, expected: str) -> None:
    assert candidates(hopper(m, n, k))[0].name.startswith(f"gemm wgmma bf16 {expected}x64")


def test_warpgroups_need_hopper_16_bits_and_whole_reads() -> None:
    problem = hopper(4096, 4096, 4096)
    assert by_warpgroups(problem)
    for other in (
        replace(problem, hopper=False),
        hopper(4096, 4096, 4096, "tf32"),
        replace(problem, x_alignment=8),
        hopper(4096, 4096, 4100),
    ):
        assert not by_warpgroups(other)


def test_warpgroups_read_16_bits_in_every_order() -> None:
    across = replace(hopper(4096, 4096, 4096), weight_layout="kn")
    for problem in (across, replace(across, x_layout="km")):
        tiles = {kernel.type.split("<Bf16, ")[1].split(", Major")[0] for kernel in by_warpgroups(problem)}
        assert tiles and not any(tile.startswith(("192, 192", "128, 96")) for tile in tiles)  # a product is a slab
    assert candidates(replace(across, x_layout="km", hopper=False))
    assert not by_warpgroups(replace(across, weights=2))


def test_float32_by_warpgroups_needs_sums_of_some_length_and_results_of_some_size() -> None:
    assert by_warpgroups(hopper(4096, 4096, 4096, "tf32x3"))
    for other in (
        hopper(4096, 4096, 96, "tf32x3"),
        hopper(256, 512, 512, "tf32x3"),  # three bfloat16 parts
        hopper(1, 4096, 4096, "tf32x3"),
        hopper(4096, 4096, 4098, "tf32x3"),
        replace(hopper(4096, 4096, 4096, "tf32x3"), hopper=False),
    ):
        assert not by_warpgroups(other)


def test_float32_by_warpgroups_turns_the_weight_over_where_columns_are_a_power_of_two() -> None:
    kernels = by_warpgroups(replace(hopper(4096, 4096, 4096, "tf32x3"), weight_layout="kn"))
    assert kernels and all("Major::kMN" in kernel.type for kernel in kernels)
    assert {re.search(r"128x\d+", kernel.name)[0] for kernel in kernels} == {"128x128", "128x64"}  # type: ignore[index]


@pytest.mark.parametrize(
    ("m", "n", "k", "eager", "expected", "sums"),
    # the fastest of those that are as accurate as eager, as measured on an H200 and an H100
    [(1024, 8192, 8192, (162, 119), "128x128", "kPromoted"), (16384, 4096, 4096, (114, 84), "128x128", "kPromoted"),
     (6304, 3072, 768, (50, 42), "128x128", "kPromoted"), (2048, 768, 768, (50, 41), "128x96", "kPromoted"),
     (100352, 96, 384, (35, 27), "128x96", "kPromoted"), (768, 768, 6304, (54, 17), "128x128", "kPromoted"),
     (768, 768, 2048, (31, 11), "128x128", "kHalved"), (2048, 768, 3072, (20, 7.5), "128x64", "kBlockwise")],
)  # fmt: skip
def test_float32_by_warpgroups_comes_first(
    m: int, n: int, k: int, eager: tuple[float, float], expected: str, sums: str
) -> None:
    judged = replace(hopper(m, n, k, "tf32x3"), eager_error=(eager[0] * 1e-8, eager[1] * 1e-8))
    first = candidates(judged)[0]
    assert first.name.startswith(f"gemm wgmma tf32x3 {expected}x32") and sums in first.type


@pytest.mark.parametrize("eager", [(57e-8, 43e-8), (31e-8, 11e-8), (24e-8, 9e-8), (18e-8, 7.5e-8)])
def test_no_sums_by_warpgroups_are_believed_to_err_more_than_eagers(eager: tuple[float, float]) -> None:
    problem = replace(hopper(768, 768, 2048, "tf32x3"), eager_error=eager)
    kernels = by_warpgroups(problem)
    assert kernels
    for kernel in kernels:
        (way,) = (way for way in BY_WGMMA if way.sums in kernel.type)
        share = 2048 / struct.unpack("<11q", kernel.params)[8]
        assert all(own <= MARGIN * most for own, most in zip(error_of(way, share), eager, strict=True)), kernel.name


@pytest.mark.parametrize(
    ("tiles", "precision"), [(gemm.WGMMA_TILES, "bf16"), (gemm.WGMMA_TF32X3_TILES, "tf32x3")], ids=["bf16", "tf32x3"]
)
def test_hoppers_tiles_fit_its_shared_memory(tiles: tuple[Tile, ...], precision: Precision) -> None:
    problem = hopper(4096, 4096, 4096, precision)
    assert {kernel.type for kernel in by_warpgroups(problem)} >= {gemm._kernel(tile, problem).type for tile in tiles}
    for wgmma in tiles:
        assert wgmma.resident * (wgmma.shared_bytes + gemm.RESERVED_SHARED) <= 228 << 10
    less = by_warpgroups(replace(problem, shared_memory=164 << 10))
    assert {kernel.type for kernel in less} < {kernel.type for kernel in by_warpgroups(problem)}


def test_only_small_tiles_of_warpgroups_are_shared() -> None:
    shared = [kernel.name for kernel in by_warpgroups(hopper(128, 8192, 8192)) if "split" in kernel.name]
    assert shared and all(re.search(r"128x96|64x128|64x64", name) for name in shared)


@pytest.mark.parametrize("precision", [*PRECISIONS, "fp16x3"])
def test_few_rows_are_cut_into_no_tiles_where_all_is_aligned(precision: Precision) -> None:
    def first(problem: Problem) -> str:
        return gemm.candidates(problem)[0].type.split("<")[0]

    wide = precision in ("fp16", "bf16")  # tensor cores multiply beside reading
    one = linear(1, 4096, 4096, precision)
    assert first(one) == "Gemv"
    assert first(linear(4, 4096, 4096, precision)) == ("FewRows" if wide else "Gemv")
    for without in (
        linear(17 if wide else 5, 4096, 4096, precision),
        replace(one, weight_layout="kn"),
        replace(one, x_alignment=8),
        replace(one, weight_stride=4097),
    ):
        assert first(without) not in ("Gemv", "FewRows")
    packed = gemm.candidates(replace(linear(3, 640, 512, precision), x_stride=520, rows_per_batch=1))[0].params
    assert struct.unpack("<8q", packed) == (1, 3, 640, 512, 520, 512, 640, 1)
