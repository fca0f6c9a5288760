"""The float32 GEMM of scaled fp16 products on a CUDA device, launched as cuda/plan.py does.

Expected values come from torch in float64, allowed errors from eager's float32. Skipped without a GPU of compute
capability 8.0.
"""

import struct

import pytest
import torch
from helpers import ON_GPU, assert_same_specials, relative_error

from fxfuse import build
from fxfuse.codegen import OperandKind
from fxfuse.cuda import codegen, gemm, gemm_problem
from fxfuse.expression import parse

pytestmark = ON_GPU

FULL = OperandKind(torch.float32, (True, True, True))
CHOICES = [(tile, chain) for tile in gemm._TILES_FP16X3 for chain in ((1,) if tile.small_warps else (2, 4))]


def problem_of(x, weight, layout):
    m, k = x.shape
    n = weight.shape[0] if layout == "nk" else weight.shape[1]
    device = torch.cuda.get_device_properties(x.device)
    return gemm_problem.Problem(
        m,
        n,
        k,
        "fp16x3",
        layout,
        x_stride=x.stride(0),
        weight_stride=weight.stride(0),
        out_stride=n,
        x_alignment=x.data_ptr() & -x.data_ptr(),
        weight_alignment=weight.data_ptr() & -weight.data_ptr(),
        multiprocessors=device.multi_processor_count,
    )


def multiply(x, weight, layout="nk", choice=None, epilogue="acc", operands=(), rows_per_batch=0, output=torch.float32):
    """x times the weight, (N, K) for "nk" and (K, N) for "kn", by `choice` of tile and chain or by the first of the
    candidates that split."""
    problem = problem_of(x, weight, layout)
    if choice is None:
        kernel = next(kernel for kernel in gemm.candidates(problem) if "fp16x3" in kernel.name)
    else:
        kernel = gemm._fp16x3_kernel(*choice, problem)
    assert kernel.workspace > 0
    text = codegen.generate(parse(epilogue), output, [FULL] * len(operands), kernel, uses_batch=rows_per_batch > 0)
    launch = build.load(build.Source(text, torch.cuda.get_device_capability()))
    rows = rows_per_batch or problem.m
    params = bytearray(kernel.params)
    struct.pack_into("<q", params, 6 * 8, rows)
    for _ in operands:
        params += struct.pack("<3q", rows * problem.n, problem.n, 1)
    out = torch.full((problem.m, problem.n), float("nan"), dtype=output, device=x.device)
    # Filled with NaN. Beyond its end the workspace must not be touched.
    workspace = torch.full((kernel.workspace + 256,), 0xFF, dtype=torch.uint8, device=x.device)
    pointers = (x, weight, out, workspace, *operands)
    launch(bytes(params), torch.cuda.current_stream().cuda_stream, *(tensor.data_ptr() for tensor in pointers))
    assert (workspace[kernel.workspace :] == 0xFF).all()
    return out


def tensor(*shape, make=torch.randn):
    return make(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(sum(shape)))


def product(x, weight, layout="nk"):
    return x @ (weight.t() if layout == "nk" else weight)


def errors(have, x, weight, layout="nk"):
    """Of `have`, and of eager's own."""
    exact = product(x.double(), weight.double(), layout)
    return relative_error(have, exact), relative_error(product(x, weight, layout), exact)


SIZES = [
    (1, 1, 1), (1, 8, 8), (7, 33, 129), (33, 7, 1), (64, 64, 64), (100, 1000, 77), (129, 257, 513), (1000, 31, 1000),
    (5, 300, 2048), (257, 3, 4097), (130, 70, 17000),
]  # fmt: skip


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_any_size(m, n, k, layout):
    x, weight = tensor(m, k), tensor(n, k) if layout == "nk" else tensor(k, n)
    for choice in CHOICES:  # accurate enough or not
        error, _ = errors(multiply(x, weight, layout, choice), x, weight, layout)
        assert error < 5e-7


LAYOUTS = {
    "rows apart": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    "rows apart, odd": lambda x: torch.cat([x, x[:, :1]], dim=1)[:, : x.shape[1]],
    "unaligned": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "expanded": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("weight_layout", ["nk", "kn"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout, weight_layout):
    x, weight = LAYOUTS[layout](tensor(50, 72)), LAYOUTS[layout](tensor(72, 72) + 1)
    error, _ = errors(multiply(x, weight, weight_layout), x, weight, weight_layout)
    assert error < 5e-7


@pytest.mark.parametrize("rows_per_batch", [0, 7])
@pytest.mark.parametrize("output", [torch.float32, torch.bfloat16])
def test_the_epilogue_gets_the_unscaled_sum(rows_per_batch, output):
    x, weight, residual = tensor(35, 100), tensor(41, 100), tensor(35, 41)
    have = multiply(x, weight, epilogue="relu(acc + o0)", operands=(residual,), rows_per_batch=rows_per_batch,
                    output=output)  # fmt: skip
    want = (product(x.double(), weight.double()) + residual).relu()
    torch.testing.assert_close(have.double(), want.to(output).double(), rtol=1e-2 if output != torch.float32 else 1e-6,
                               atol=1e-5)  # fmt: skip


@pytest.mark.parametrize("k", [1024, 1500, 4096, 16384])
@pytest.mark.parametrize("make", [torch.randn, torch.rand])
@pytest.mark.parametrize(("m", "n"), [(512, 512), (2048, 2048), (1024, 7168), (2048, 8192)])
def test_it_is_as_exact_as_eagers_float32(m, n, k, make):
    x, weight = tensor(m, k, make=make), tensor(n, k, make=make)
    error, eager_error = errors(multiply(x, weight), x, weight)
    assert error <= eager_error


def test_scales_are_exact():
    x, weight = tensor(160, 2048), tensor(192, 2048)
    of_x = torch.exp2(torch.arange(160, dtype=torch.float64, device="cuda") // 2 - 40)[:, None].float()
    of_weight = torch.exp2(70 - torch.arange(192, dtype=torch.float64, device="cuda") * 2 // 3)[:, None].float()
    assert torch.equal(multiply(x * of_x, weight * of_weight), multiply(x, weight) * of_x * of_weight.t())


@pytest.mark.parametrize("spread", [0, 4])
def test_precision_ends_at_a_range_within_rows(spread):
    """The limit that the documentation states: the numbers of a row share a scale, so where large x meet small weights
    and small x large weights, the small ones have lost their bits. Eager has no such limit."""
    d = torch.exp(spread * tensor(4096))
    x, weight = tensor(160, 4096) * d, tensor(192, 4096) / d
    error, eager_error = errors(multiply(x, weight), x, weight)
    assert (error <= eager_error) is (spread == 0)


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_nan_and_infinity_are_where_eager_has_them(layout):
    x, weight = tensor(150, 96), tensor(140, 96)
    x[3, 5], x[10, 7], x[149, 95], x[30, :2] = float("nan"), float("inf"), -float("inf"), float("inf")
    weight[8, 7], weight[139, 0], weight[77, 7], weight[20, 3] = -float("inf"), float("inf"), 0, float("nan")
    x[60], weight[61] = 0, 0
    want = product(x, weight)
    have = multiply(x, weight if layout == "nk" else weight.t().contiguous(), layout)
    assert_same_specials(have, want)
    finite = want.isfinite()
    torch.testing.assert_close(have[finite], want[finite], rtol=1e-4, atol=1e-5)


def test_results_overflow_and_vanish_as_eagers():
    x, weight = tensor(40, 64, make=torch.rand), tensor(48, 64, make=torch.rand)
    x[30:] *= -1
    x[:10] *= 1e30
    x[10:20] *= 1e-38
    x[20:25] *= 1e-42  # subnormal
    x[25] = 0
    weight[:10] *= 1e15
    weight[10:20] *= 1e-5
    weight[20] *= 1e-40
    weight[21] = 0
    have, want = multiply(x, weight), product(x, weight)
    assert have.isposinf().any() and not have.isnan().any()
    assert torch.equal(want.isposinf(), have.isposinf()) and torch.equal(want.isneginf(), have.isneginf())
    exact = product(x.double(), weight.double())
    finite = have.isfinite()
    torch.testing.assert_close(have[finite].double(), exact[finite], rtol=1e-3, atol=1e-37)
