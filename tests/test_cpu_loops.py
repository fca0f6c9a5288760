"""Which loops of programs are kernels on a CPU, and that they give what float64 does."""

import pytest
import torch
import torch.nn.functional as F
from helpers import Net
from torch import nn

import fxfuse
from fxfuse.module import state_of


def rms_norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def turned(x):
    """Rotary positions."""
    at = torch.linspace(0, 3, x.shape[-1], dtype=x.dtype)
    first, second = x.chunk(2, -1)
    return x * at.cos() + torch.cat([-second, first], -1) * at.sin()


def padded(x):
    return F.pad(x.relu() * 2, (0, 0, 1, 2))


COMPUTED = {
    "a norm written out": (rms_norm, (5, 64)),
    "a norm of short rows": (rms_norm, (50, 7)),
    "halves that are turned": (turned, (2, 3, 32)),
    "rows that are padded": (padded, (3, 8, 16)),
    "a norm, written out, of a sum": (lambda x: rms_norm(x + x.flip(0)), (6, 40)),
}
"""What is one kernel, of what shape."""
LEFT = {
    "softmax": (lambda x: x.softmax(-1) * 2, (6, 40)),
    "columns that are added up": (lambda x: x.mean(0) - x[0], (40, 6)),
    "what an index chooses": (lambda x: x[torch.tensor([1, 0, 1])] * 2 + 1, (2, 30)),
    "elements that are far apart": (lambda x: x.t().contiguous() * 2, (20, 30)),
}
"""What torch is asked for."""


@torch.no_grad()
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_a_kernel_is_as_exact_as_eager(name, dtype, threads):
    compute, shape = COMPUTED[name]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = Net(lambda m, x: compute(x))
        fast = fxfuse.optimize(model)
        for seed in range(4):
            torch.manual_seed(seed)
            x = torch.randn(shape, dtype=dtype)
            have, want, exact = fast(x), compute(x), compute(x.double())
            assert (have.dtype, have.shape, have.stride()) == (want.dtype, want.shape, want.stride())
            errors = [float((result.double() - exact).norm()) for result in (have, want)]
            assert errors[0] <= 1.1 * errors[1] + torch.finfo(dtype).eps * float(exact.norm())
    finally:
        torch.set_num_threads(before)
    (program,) = state_of(fast).programs.programs
    assert program.launches == 1, program.code
    assert not program.calls, program.code


@torch.no_grad()
@pytest.mark.parametrize("name", LEFT)
def test_what_would_be_no_vectors_is_torchs(name):
    compute, shape = LEFT[name]
    fast = fxfuse.optimize(Net(lambda m, x: compute(x)))
    x = torch.randn(shape)
    for _ in range(4):
        torch.testing.assert_close(fast(x), compute(x))
    programs = state_of(fast).programs
    assert programs.reason == "torch runs all of it" or all(program.calls for program in programs.programs)


@torch.no_grad()
def test_sums_of_long_rows_are_as_exact_as_torchs():
    torch.manual_seed(0)
    x = torch.randn(40, 30000) + 100
    fast = fxfuse.optimize(Net(lambda m, x: (x * 1.5).mean(-1, keepdim=True) + x[:, :4]))
    exact = (x.double() * 1.5).mean(-1, keepdim=True) + x[:, :4].double()
    for _ in range(4):
        have = fast(x)
    eager = (x * 1.5).mean(-1, keepdim=True) + x[:, :4]
    assert float((have.double() - exact).abs().max()) <= float((eager.double() - exact).abs().max()) + 2e-5


@torch.no_grad()
def test_many_elements_are_shared_by_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        x = torch.randn(3, 50021)
        for compute in (rms_norm, lambda x: x.flip(0) * 2 + x, lambda x: x.roll(1, 0) - x * 3):
            fast = fxfuse.optimize(Net(lambda m, x, compute=compute: compute(x)))
            for _ in range(4):
                torch.testing.assert_close(fast(x), compute(x))
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def test_memory_is_overwritten_where_it_is_read():
    model = nn.Sequential(nn.Linear(64, 64), Net(lambda m, x: rms_norm(x).mul_(2).add_(x.flip(0))))
    fast = fxfuse.optimize(model)
    for _ in range(4):
        x = torch.randn(8, 64)
        before = x.clone()
        torch.testing.assert_close(fast(x), model(x))
        assert torch.equal(x, before)
