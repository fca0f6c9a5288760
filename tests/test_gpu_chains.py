"""Chains and passes after torch's library on a CUDA device: one launch for the pointwise work, eager's answers.

Expected values come from torch in float64. Skipped without a GPU of compute capability 8.0. Launches that programs
merge are test_loops.py's.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import ON_GPU, Net, Net2, assert_as_eager, batch_norm, gpu_tensor, kernels_launched
from torch import nn

import fxfuse
from fxfuse import program

pytestmark = ON_GPU

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
IN_PLACE = "library + one pass in place"


@pytest.fixture(autouse=True)
def unmerged(monkeypatch):
    monkeypatch.setattr(program, "MERGING", ())


@torch.no_grad()
def check(model, *inputs, dtype=torch.float32):
    """The optimised model's only region, after comparing with eager; inputs stay as they are."""
    model = model.eval().to("cuda", dtype)
    fast = fxfuse.optimize(model, strict=True)
    before = [x.clone() for x in inputs]
    assert_as_eager(model, fast, *inputs)
    assert torch.equal(fast(*inputs), fast(*inputs))
    assert all(map(torch.equal, inputs, before))
    (region,) = fxfuse.explain(fast).regions
    assert region.kernel is not None, region.fallback
    passes = [
        name for name in kernels_launched(lambda: fast(*inputs)) if "pointwise_kernel" in name and "fxfuse" in name
    ]
    assert len(passes) == 1, passes
    return region


def after(operation, **members):
    return Net(lambda m, x: torch.tanh(operation(m, x) * 0.5), **members)


LIBRARY = {
    "conv1d": (after(lambda m, x: m.c(x), c=nn.Conv1d(16, 24, 3)), (3, 16, 51)),
    "conv3d": (after(lambda m, x: m.c(x), c=nn.Conv3d(8, 6, 3, padding=1)), (2, 8, 5, 6, 7)),
    "conv_transpose1d": (after(lambda m, x: m.c(x), c=nn.ConvTranspose1d(16, 24, 3, 2)), (3, 16, 51)),
    "conv_transpose2d": (after(lambda m, x: m.c(x), c=nn.ConvTranspose2d(16, 24, 3, 2)), (3, 16, 9, 7)),
    "conv_transpose3d": (after(lambda m, x: m.c(x), c=nn.ConvTranspose3d(8, 6, 2, 2)), (2, 8, 3, 4, 5)),
    "group_norm": (after(lambda m, x: m.l(x), l=nn.GroupNorm(4, 16)), (3, 16, 7, 7)),
    "bmm": (after(lambda m, x: torch.bmm(x, x.mT)), (3, 77, 40)),
    "baddbmm": (after(lambda m, x: torch.baddbmm(x, x, x, beta=0.5)), (3, 33, 33)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LIBRARY)
def test_the_pass_overwrites_what_a_library_computed(name, dtype):
    model, shape = LIBRARY[name]
    region = check(model, gpu_tensor(*shape, dtype=dtype), dtype=dtype)
    assert (region.anchor, region.kernel) == (name, IN_PLACE)


@pytest.mark.parametrize("name", ["conv_transpose2d", "group_norm"])
def test_results_in_channels_last(name):
    model, shape = LIBRARY[name]
    assert check(model, gpu_tensor(*shape).to(memory_format=torch.channels_last)).anchor == name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [(77, 77), (4, 1, 1, 77), (4, 1, 77, 77), (1, 1, 77, 77), ()], ids=str)
def test_attention_scores(mask, dtype):
    model = Net2(lambda m, q, k: q @ k.mT / math.sqrt(40) + m.mask, mask=gpu_tensor(*mask).cpu())
    q, k = gpu_tensor(4, 3, 77, 40, dtype=dtype), gpu_tensor(4, 3, 77, 40, dtype=dtype)
    region = check(model, q, k, dtype=dtype)
    assert (region.anchor, region.kernel) == ("matmul", IN_PLACE)


CHAINS = {
    "gated halves": (Net(lambda m, x: F.silu(x[..., :100]) * x[..., 100:]), (3, 77, 200)),
    "gated odd halves": (Net(lambda m, x: F.gelu(x[..., :101]) * x[..., 101:]), (3, 77, 202)),
    "gated channels": (Net(lambda m, x: x.chunk(2, 1)[0] * torch.sigmoid(x.chunk(2, 1)[1])), (3, 16, 7, 7)),
    "root mean square": (
        Net(lambda m, x: m.w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), w=torch.randn(100)),
        (3, 77, 100),
    ),
    "batch norm": (Net(lambda m, x: m.bn(x).relu(), bn=batch_norm(16)), (3, 16, 9, 7)),
    "transposed": (Net(lambda m, x: (x.transpose(1, 2) * 2).tanh() + 1), (3, 77, 40)),
    "x is smaller": (Net(lambda m, x: (x.sum(-1, keepdim=True) * 0.1 + x).tanh().exp()), (3, 77, 40)),
    "outer sum": (Net(lambda m, x: (x[:, :, None] + x[:, None]).tanh().exp()), (3, 77)),
    "of one number": (Net(lambda m, x: torch.exp(x) * 2), ()),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_chains(name, dtype):
    model, shape = CHAINS[name]
    region = check(model, gpu_tensor(*shape, dtype=dtype), dtype=dtype)
    assert (region.anchor, region.kernel) == ("pointwise chain", "one pass")


def test_unaligned_tensors():
    for offset in (1, 2, 3):
        check(Net(lambda m, x: torch.exp(x) * 2), gpu_tensor(1000)[offset:])
        check(Net(lambda m, x: torch.exp(x) * 2), gpu_tensor(1000, dtype=torch.bfloat16)[offset:], dtype=torch.bfloat16)


def test_cuda_graphs():
    model = LIBRARY["conv1d"][0].to("cuda", torch.float32).eval()
    x = gpu_tensor(3, 16, 51)
    fast = fxfuse.optimize(model, (x,), strict=True)
    with torch.no_grad():
        fast(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fast(x)
        x.copy_(gpu_tensor(3, 16, 51).flip(0))
        graph.replay()
        torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-4)


def test_autocast():
    model = Net(lambda m, x: F.silu(m.c(x)) * 0.5 + 1, c=nn.Conv1d(16, 24, 3)).cuda().eval()
    fast, x = fxfuse.optimize(model), gpu_tensor(3, 16, 51)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        have, want = fast(x), model(x)
    assert have.dtype == want.dtype
    torch.testing.assert_close(have, want, rtol=0.02, atol=0.02)
