"""Which loops of programs are kernels on a CPU, and that they give what float64 does."""

import copy
import random
import subprocess

import pytest
import torch
import torch.nn.functional as F
from helpers import Net, Net2, skip_if_python
from test_loops import WRITTEN, Cached
from test_training import made
from torch import nn

import fxfuse
from fxfuse import build, toolchain
from fxfuse.cpu import loops
from fxfuse.module import state_of


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def rms_norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def turned(x):
    """Rotary positions."""
    at = torch.linspace(0, 3, x.shape[-1], dtype=x.dtype)
    first, second = x.chunk(2, -1)
    return x * at.cos() + torch.cat([-second, first], -1) * at.sin()


def padded(x):
    return F.pad(x.relu() * 2, (0, 0, 1, 2))


def masked_softmax(x):
    """A row's own mask, and one for all rows; a row without an element that counts would be NaN."""
    mask = torch.zeros(x.shape[-1], dtype=x.dtype).index_fill(0, torch.arange(1, x.shape[-1], 3), -torch.inf)
    return (x * 0.125 + mask).softmax(-1)


def group_norm(x):
    """Of groups of 5 channels, which have a shift and a scale of their own."""
    at = torch.linspace(1, 2, x.shape[1], dtype=x.dtype)
    return F.silu(F.group_norm(x + at[:, None, None], x.shape[1] // 5, at, at - 1))


def channel_norm(x):
    """ConvNeXt's: pixels are rows, whose elements are apart."""
    return F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2]) * 2


def two_norms(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred, rms_norm(centred)


COMPUTED = {
    "a norm written out": (rms_norm, (5, 64)),
    "a norm of short rows": (rms_norm, (50, 7)),
    "a norm of rows of one element": (rms_norm, (70, 1)),
    "a norm of many short rows": (rms_norm, (2, 131, 5)),
    "softmax and a product": (lambda x: x.softmax(-1) * 2, (6, 40)),
    "softmax of many short rows": (lambda x: x.softmax(-1), (150, 11)),
    "softmax with masks": (masked_softmax, (9, 83)),
    "softmax of few long rows": (lambda x: (x * 3).softmax(-1), (3, 20000)),
    "softmax of rows that lie side by side": (lambda x: x.softmax(1), (2, 21, 9, 13)),
    "log softmax and a sum": (lambda x: x.log_softmax(-1) + x, (33, 50)),
    "the logarithm of a sum": (lambda x: x.logsumexp(-1), (33, 50)),
    "several results": (two_norms, (9, 70)),
    "layer norm and gelu": (lambda x: F.gelu(F.layer_norm(x, x.shape[-1:])), (7, 3, 96)),
    "group norm": (group_norm, (2, 10, 6, 11)),
    "instance norm": (lambda x: F.instance_norm(x).relu(), (2, 3, 9, 9)),
    "a norm of channels": (channel_norm, (2, 40, 9, 9)),
    "vectors of length 1": (lambda x: F.normalize(x, dim=1), (2, 30, 77)),
    "variances": (lambda x: x.var(-1), (40, 37)),
    "a transposed matrix": (lambda x: x.t().contiguous() * 2 + 1, (70, 45)),
    "every other element": (lambda x: x[:, ::2].contiguous() * 2 + 1, (9, 90)),
    "a gated unit": (lambda x: F.glu(x, 1) + 1, (3, 8, 20)),
    "halves that are turned": (turned, (2, 3, 32)),
    "rows that are padded": (padded, (3, 8, 16)),
    "a norm, written out, of a sum": (lambda x: rms_norm(x + x.flip(0)), (6, 40)),
}
"""What is one kernel, of what shape."""
LEFT = {
    "softmax": (lambda x: x.softmax(-1), (6, 40)),
    "sums": (lambda x: x.sum(-1), (6, 40)),
    "what an index chooses": (lambda x: x[torch.tensor([1, 0, 1])] * 2 + 1, (2, 30)),
    "a product of two matrices": (lambda x: x.view(3, 20, 4) @ x.view(3, 4, 20), (12, 20)),
    "a product that is copied": (lambda x: (x.view(3, 20, 4) @ x.view(3, 4, 20)).mT.contiguous() + 1, (12, 20)),
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
            every = (as_tuple(each) for each in (fast(x), compute(x), compute(x.double())))
            for have, want, exact in zip(*every, strict=True):
                assert (have.dtype, have.shape, have.stride()) == (want.dtype, want.shape, want.stride())
                errors = [float((result.double() - exact).norm()) for result in (have, want)]
                assert errors[0] <= 1.1 * errors[1] + torch.finfo(dtype).eps * float(exact.norm())
    finally:
        torch.set_num_threads(before)
    skip_if_python(fast)
    (program,) = state_of(fast).programs.programs
    assert program.launches == 1, program.code
    assert not program.calls, program.code


SHAPES = [(67, 7), (5, 300), (2, 70, 9), (3, 5, 4, 33), (2, 12, 8, 8), (1, 1, 129), (130, 2, 3)]
"""Rows short and long, few and many, not multiples of any vector."""


def drawn_rows(draw, shape):
    """A function of a tensor that reduces rows along dimensions drawn at random, with pointwise work around them."""
    dims = sorted(draw.sample(range(len(shape)), draw.randint(1, min(2, len(shape)))))
    kinds = [draw.choice(["softmax", "centred", "standardised", "greatest", "norm", "logsumexp"]) for _ in range(2)]
    outer = draw.choice([torch.tanh, torch.sigmoid, torch.Tensor.exp, torch.Tensor.relu])

    def reduced(kind, x):
        if kind == "softmax":
            return x.softmax(dims[-1])
        if kind == "centred":
            return x - x.mean(dims, keepdim=True)
        if kind == "standardised":
            return (x - x.mean(dims, keepdim=True)) * torch.rsqrt(x.var(dims, correction=0, keepdim=True) + 1e-3)
        if kind == "greatest":
            return x - x.amax(dims, keepdim=True)
        if kind == "norm":
            return x / (torch.linalg.vector_norm(x, dim=dims, keepdim=True) + 0.1)
        return x - x.logsumexp(dims, keepdim=True)

    return lambda x: reduced(kinds[1], outer(reduced(kinds[0], x) * 1.5)) + x


@torch.no_grad()
@pytest.mark.parametrize("seed", range(40))
def test_drawn_rows_are_as_exact_as_eager(seed):
    draw = random.Random(seed)
    shape = draw.choice(SHAPES)
    compute, order = drawn_rows(draw, shape), draw.sample(range(len(shape)), len(shape))
    fast = fxfuse.optimize(Net(lambda m, x: compute(x)))
    torch.manual_seed(seed)
    x = torch.randn([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
    assert x.shape == shape
    for _ in range(4):
        have = fast(x)
    want, exact = compute(x), compute(x.double())
    assert (have.shape, have.stride()) == (want.shape, want.stride())
    errors = [float((result.double() - exact).abs().max()) for result in (have, want)]
    assert errors[0] <= 4 * errors[1] + 1e-6 * float(exact.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("shape", [(20, 7), (20, 50), (3, 90)], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_rows_without_finite_results_are_eagers(shape, value):
    x = torch.randn(shape)
    x[0], x[1, 3], x[2] = value, value, -torch.inf
    for compute in (lambda x: (x * 2).softmax(-1), lambda x: (x * 2).logsumexp(-1), lambda x: (x + 1).amax(-1) * 2):
        fast = fxfuse.optimize(Net(lambda m, x, compute=compute: compute(x)))
        for _ in range(4):
            torch.testing.assert_close(fast(x), compute(x), equal_nan=True)


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


WINDOWS = {
    "the greatest": lambda x: F.max_pool2d(x, 3, 2, 1) * 3,
    "the greatest, on to the end": lambda x: F.max_pool2d(x, (2, 3), 3, (0, 1), ceil_mode=True) * 3,
    "a mean": lambda x: F.avg_pool2d(x, 3, 2, 1) * 3,
    "a mean of some": lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False) * 3,
    "padded, with itself": lambda x: F.pad(x, (1, 1, 1, 1))[:, :, :-2, 2:] * x,
    "two, put together": lambda x: torch.cat([x.flip(2), x * 2, x], 3) + 1,
}


TRUTHS = {
    "a choice": lambda x, mask: torch.where(mask, x * 2, x - 1),
    "as numbers": lambda x, mask: mask.to(x.dtype) * x + 1,
}


OVER_ELEMENTS, OVER_LANES = "for (int64_t i = begin; i < end; ++i)", "for (int64_t i = 0; i < lanes; ++i)"
"""Loops of kernels/loops.h."""


def vectors_in(text, loop=OVER_ELEMENTS):
    """Whether g++ makes vectors of such a loop of a kernel's source."""
    headers = build.PACKAGE / "cpu" / "kernels"
    lines = (headers / "loops.h").read_text().splitlines()
    (line,) = (number for number, line in enumerate(lines, 1) if loop in line)
    command = [*toolchain.cxx(), "-std=c++17", *build.CPU_FLAGS, "-fopt-info-vec-optimized", f"-I{headers}", "-S"]
    compiled = subprocess.run(
        [*command, "-x", "c++", "-", "-o", "/dev/null"], input=text, text=True, capture_output=True, check=True
    )
    return f"loops.h:{line}:" in compiled.stderr


@pytest.fixture
def texts(monkeypatch):
    """The sources of loops that are compiled, for g++, which tells of vectors."""
    if toolchain.cxx() is None:
        pytest.skip("there is no compiler")
    said = subprocess.run([*toolchain.cxx(), "--version"], text=True, capture_output=True).stdout
    if "Free Software Foundation" not in said:
        pytest.skip("tells of vectors in another way than g++")
    found, source_of = [], loops.source_of
    monkeypatch.setattr(loops, "source_of", lambda kernels: found.append(source_of(kernels)) or found[-1])
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_of_channels_are_vectors(name, texts):
    """Whether an element of a window exists is the same for all channels of a pixel."""
    compute = WINDOWS[name]
    fast = fxfuse.optimize(Net(lambda m, x: compute(x)))
    for _ in range(4):
        x = torch.randn(2, 40, 9, 12).to(memory_format=torch.channels_last)
        torch.testing.assert_close(fast(x), compute(x))
    assert texts and all(map(vectors_in, texts))


@torch.no_grad()
@pytest.mark.parametrize("name", TRUTHS)
def test_what_reads_truth_values_is_vectors(name, texts):
    compute = TRUTHS[name]
    fast = fxfuse.optimize(Net2(lambda m, x, mask: compute(x, mask)))
    for _ in range(4):
        x = torch.randn(2, 40, 9, 12).to(memory_format=torch.channels_last)
        mask = torch.rand(2, 40, 9, 12).to(memory_format=torch.channels_last) < 0.5
        torch.testing.assert_close(fast(x, mask), compute(x, mask))
    assert texts and all(map(vectors_in, texts))


REPEATED = {
    "pixels twice": lambda x: F.interpolate(x, scale_factor=2) + 1,
    "pixels three times": lambda x: (F.interpolate(x, scale_factor=(1, 3)) * 2).relu(),
    "elements twice": lambda x: x.repeat_interleave(2, -1) * 2,
    "elements by turns": lambda x: torch.stack([x.sin(), x * 2, x], -1),
    "pairs turned": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * 0.5,
    "pixels shuffled": lambda x: F.pixel_shuffle(x, 2).relu(),
    "two results": lambda x: (lambda y: (y * 2, y > 0))(F.interpolate(x, scale_factor=2)),
}


@torch.no_grad()
@pytest.mark.parametrize("width", [36, 70, 129])
@pytest.mark.parametrize("name", REPEATED)
def test_elements_that_repeat_are_put_side_by_side_by_vectors(name, width, texts):
    """A row is cut into periods, in which quotients of the place do not change. Its periods are lanes."""
    compute = REPEATED[name]
    fast = fxfuse.optimize(Net(lambda m, x: compute(x)))
    for _ in range(4):
        x = torch.randn(2, 8, 5, width - width % 2 if name == "pairs turned" else width)
        torch.testing.assert_close(fast(x), compute(x))
    assert len(texts) == 1 and "interleave(" in texts[0], texts
    assert vectors_in(texts[0], OVER_LANES)


ANGLES = {
    "of all rows": lambda x: (x * 2) * torch.arange(x.shape[-1], dtype=x.dtype).cos(),
    "behind a norm": lambda x: rms_norm(x) * torch.arange(x.shape[-1], dtype=x.dtype).cos(),
    "of halves": lambda x: turned(x * 2),
    "of a given tensor": lambda x: (x * 2) * x[0, 0, 0].sin(),
}


@torch.no_grad()
@pytest.mark.parametrize("name", ANGLES)
def test_slow_functions_of_small_tensors_are_computed_once(name, texts):
    fast = fxfuse.optimize(Net(lambda m, x: ANGLES[name](x)))
    for _ in range(4):
        x = torch.randn(2, 8, 6, 64)
        torch.testing.assert_close(fast(x), ANGLES[name](x))
    computed = [text.partition(" expression(")[2].partition("return")[0] for text in texts]
    assert not any(("cos(" in one or "sin(" in one) and " * " in one for one in computed), computed


TRIANGLES = {"lower": lambda x: x.tril(-1) * 2, "upper": lambda x: (x + 1).triu(2)}


@torch.no_grad()
@pytest.mark.parametrize("name", TRIANGLES)
def test_triangles_are_vectors_of_rows(name, texts):
    """A row's elements are beside each other in memory, those of a column are not."""
    fast = fxfuse.optimize(Net(lambda m, x: TRIANGLES[name](x)))
    for _ in range(4):
        x = torch.randn(40, 30, 70)
        torch.testing.assert_close(fast(x), TRIANGLES[name](x))
    assert len(texts) == 1 and "kRowsBeside = false" in texts[0] and vectors_in(texts[0])


@torch.no_grad()
@pytest.mark.parametrize("shape", [(2, 40, 17, 70), (3, 64, 5, 16), (1, 100, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_transposed_results_are_stored_by_tiles(shape, dtype, texts):
    """Their lanes are apart in memory: of each, a cache line is computed before any is stored."""
    compute = lambda x: (x.permute(0, 3, 1, 2).contiguous() * 2, x.transpose(1, 3).contiguous())  # noqa: E731
    fast = fxfuse.optimize(Net(lambda m, x: compute(x)))
    for _ in range(4):
        x = (torch.randn(shape) * 9).to(dtype)
        torch.testing.assert_close(fast(x), compute(x), rtol=0, atol=0)
    assert any("kTile" in text for text in texts) or shape[0] == 1, texts


def test_gradients_of_pooling_are_vectors(texts):
    """That of relu, which reads truth values, is computed with them."""

    def compute(x):
        return F.max_pool2d(F.relu(x * 3), 3, 2, 1) * 2

    fast = fxfuse.optimize(Net(lambda m, x: compute(x)))
    for _ in range(5):
        x = torch.randn(2, 40, 9, 12).to(memory_format=torch.channels_last).requires_grad_()
        for one, other in zip(*(torch.autograd.grad(call(x).sum(), x) for call in (fast, compute)), strict=True):
            torch.testing.assert_close(one, other)
    assert len(texts) > 1 and all(map(vectors_in, texts))


@torch.no_grad()
@pytest.mark.parametrize("name", WRITTEN)
def test_parts_of_memory_are_written_as_in_eager(name):
    write, _ = WRITTEN[name]
    model = Cached(write).eval()
    fast = fxfuse.optimize(copy.deepcopy(model))
    for seed in range(5):
        torch.manual_seed(seed)
        given = torch.randn(5, 3, 8), torch.randperm(5)[:3]
        versions = [buffer._version for buffer in fast.buffers()]
        torch.testing.assert_close(fast(*given), model(*given))
        for one, other, before in zip(fast.buffers(), model.buffers(), versions, strict=True):
            torch.testing.assert_close(one, other)
            assert (one._version > before) is (other._version > 0)


def test_running_statistics_are_written_by_kernels():
    model = nn.Sequential(nn.Conv2d(3, 20, 3), nn.BatchNorm2d(20), nn.ReLU(), nn.Conv2d(20, 4, 1)).train()
    fast = fxfuse.optimize(copy.deepcopy(model))
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(2, 3, 9, 9)
        for call in (model, fast):
            call(x).sum().backward()
    for (name, one), other in zip(model.state_dict().items(), fast.state_dict().values(), strict=True):
        torch.testing.assert_close(other, one, msg=name)
    (step,) = made(fast)
    (_, graph), _ = step.graphs
    (forward,) = state_of(graph).programs.programs
    assert set(forward.calls) <= {"convolution", "conv2d"}, forward.code


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
def test_a_row_in_pieces_that_is_changed_in_place_is_changed_once():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        x, scale = torch.rand(1, 60000), torch.tensor([2.0, 3.0, 5.0, 7.0, 11.0, 13.0])
        model = Net(lambda m, x: x.cumsum(1).mul_(scale[:, None].expand(6, 10000).reshape(-1)).sub_(1))
        fast = fxfuse.optimize(model)
        for _ in range(4):
            torch.testing.assert_close(fast(x), model(x))
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
