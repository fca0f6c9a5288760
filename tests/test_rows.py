"""How the threads of a GPU share rows: few or many of them, rows that are staged, and rows that are cut into parts."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import Net
from test_loops import checked, device, pictures, texts  # noqa: F401

import fxfuse
from fxfuse import long_rows
from fxfuse.cuda import row_threads
from fxfuse.layout import contiguous_strides
from fxfuse.program import loops, operators
from fxfuse.program.observed import Operators
from fxfuse.program.reductions import LONGEST
from fxfuse.program.values import Slot, Value

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = {
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "a root mean square": lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6),
    "a norm and a sum": lambda x: F.layer_norm(x + 1, x.shape[-1:]) + x,
    "two results": lambda x: (x * 2 + 1, F.layer_norm(x * 2 + 1, x.shape[-1:])),
    "mean": lambda x: x.abs().mean(-1),  # of numbers that do not cancel
    "greatest": lambda x: x.amax(-1, keepdim=True) * 2,
    "divided by a sum": lambda x: x.abs() / x.abs().sum(-1, keepdim=True),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [3, 6, 7, 12, 49])
@pytest.mark.parametrize("name", ROWS)
def test_short_rows_are_staged(name, length, dtype, device, texts, monkeypatch):  # noqa: F811
    """A block's last rows may be missing, and the last piece of memory need not be a whole vector."""
    monkeypatch.setattr(row_threads, "STAGED_LEAST", 1)
    monkeypatch.setattr(row_threads, "STAGED_RUN", 32)
    checked(Net(lambda m, x: ROWS[name](x)), device, 131, length, dtype=dtype)
    assert any("stage<" in text for text in texts), texts


@pytest.mark.parametrize("begin", [1, 4, 8])
def test_rows_that_begin_anywhere(begin, device, monkeypatch):  # noqa: F811
    """Only rows that begin at a vector can be staged."""
    monkeypatch.setattr(row_threads, "STAGED_LEAST", 1)
    monkeypatch.setattr(row_threads, "STAGED_RUN", 32)
    checked(Net(lambda m, x: F.softmax(x[begin : begin + 7 * 131].view(131, 7), -1)), device, 7 * 131 + 16)


@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize("length", [196, 768, 1000, 5000, 16384])
@pytest.mark.parametrize("name", ["softmax", "a norm and a sum", "two results", "mean"])
def test_rows_that_threads_share(name, length, rows, device):  # noqa: F811
    if rows * length > 2**20:
        pytest.skip("more of the same")
    checked(Net(lambda m, x: ROWS[name](x)), device, rows, length)


@pytest.mark.parametrize("words", [0, 4, 8])
@pytest.mark.parametrize("runs", [1, 3, 49, 192, 250, 1024, 8000])
def test_few_rows_have_more_threads(runs, words):
    work = row_threads.Work(2, 20, [4, 4], 8)
    shared = [row_threads.lanes_of(rows, runs, 4, work, words) for rows in (1, 100, 10_000, 1_000_000)]
    assert shared == sorted(shared, reverse=True)
    for lanes in shared:
        assert lanes & (lanes - 1) == 0 and lanes <= row_threads.MOST_THREADS
        assert bool(lanes) == (math.ceil(runs / row_threads.MOST_THREADS) * words <= row_threads.HELD_WORDS)
        assert lanes == 0 or math.ceil(runs / lanes) * words <= row_threads.HELD_WORDS
        assert lanes < 2 * runs or lanes == 1


def test_kernels_with_blocks_of_different_sizes_share_a_launch(device, texts):  # noqa: F811
    """The block is as large as the largest needs."""
    net = Net(lambda m, x: (x.abs().sum(0), F.softmax(x, -1), F.layer_norm(x.neg(), x.shape[-1:]), x[:7].t() * 2))
    made = checked(net, device, 300, 64)
    assert made.launches == 1 and "kBlock = 256" in texts[-1]
    checked(Net(lambda m, x: F.softmax(x, -1)), device, 300, 64)
    assert "kBlock = 128" in texts[-1]


@pytest.mark.parametrize("is_norm", [True, False], ids=["norm", "softmax"])
def test_a_length_is_in_the_text_if_the_model_fixes_it(is_norm, device, texts):  # noqa: F811
    """A mask of a sequence is as long as the sequence, for all rows, but a softmax has no mean."""
    compute = ROWS["a root mean square"] if is_norm else ROWS["softmax"]
    for length in (968, 1000):
        net = Net(lambda m, x: compute(x) * m.weight, weight=torch.randn(length))
        checked(net, device, 300, length)
    assert ("968" in texts[0]) == is_norm and (texts[0] == texts[1]) == (not is_norm)


def test_what_waits_for_no_reduction_is_read_before_it(device, texts):  # noqa: F811
    """Of few rows, a weight is read together with the row."""
    compute = ROWS["a root mean square"]
    checked(Net(lambda m, x: compute(x) * m.weight, weight=torch.randn(768)), device, 2, 768)
    (text,) = texts
    first, after = text.split("across_threads", 1)
    assert "p.memory[1]" in first and "p.memory[1]" not in after


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 8, 16])
def test_groups_are_rows(groups, layout, device, texts):  # noqa: F811
    """All channels of a group are in one row: its sums are taken once."""

    def forward(m, x):
        return F.silu(F.group_norm(x.contiguous(memory_format=layout), groups, m.weight, m.bias)) + 1

    checked(Net(forward, weight=torch.randn(16), bias=torch.randn(16)), device, 3, 16, 5, 6)
    if layout == torch.contiguous_format:
        assert any("held0" in text for text in texts)


@pytest.mark.parametrize(("groups", "channels"), [(2, 16), (4, 40), (3, 48), (1, 8), (16, 64), (4, 36)])
def test_groups_of_channels_that_come_last_are_mixed_rows(groups, channels, device, texts):  # noqa: F811
    """Each row is read once, by runs of a group's channels, and its result is stored by such runs."""

    def forward(m, x):
        x = pictures(x)
        return F.silu(torch.ops.fxfuse.group_norm_in_channels_last(x, groups, m.weight, m.bias, 1e-5)) + x

    model = Net(forward, weight=torch.randn(channels), bias=torch.randn(channels))
    checked(model, device, 3, 5, 7, channels, exact=False)
    (text,) = (text for text in texts if "across_threads" in text)
    vector = min(4, channels // groups & -(channels // groups))
    assert text.count("p.memory[0]") == 1 and (vector == 1 or f"Adjacent<float, {vector}, {4 * vector}>" in text)


def test_long_groups_of_channels_that_come_last_are_cut_into_parts(device):  # noqa: F811
    def forward(m, x):
        return F.silu(torch.ops.fxfuse.group_norm_in_channels_last(pictures(x), 2, m.weight, None, 1e-5)) + 1

    for height, launches in ((64, 1), (65, 3)):  # rows that are as long as may be, and longer ones
        made = checked(Net(forward, weight=torch.randn(8)), device, 2, height, 64, 8, exact=False)
        assert not made.calls and made.launches == launches, made.code


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (5, 7, 9), (37, 41)])
def test_groups_of_few_channels_that_come_last_are_normalised_by_channels(size, device):  # noqa: F811
    """Where a group's channels are too few for runs of memory."""

    def forward(m, x):
        x = x.movedim(-1, 1)
        return F.silu(torch.ops.fxfuse.group_norm_in_channels_last(x, 8, m.weight, m.bias, 1e-5)) + x

    model = Net(forward, weight=torch.randn(24), bias=torch.randn(24))
    made = checked(model, device, 2, *size, 24, exact=False)
    assert not made.calls and made.launches <= 3, made.code


@pytest.mark.parametrize(
    ("dims", "strides", "run"),
    [
        ((1, 2), (96, 12, 1), 96),
        ((1, 2), (96, 1, 8), 96),  # transposed
        ((1, 2), (192, 1, 16), 8),  # transposed, and a part of something larger
        ((0, 2), (96, 12, 1), 12),  # rows of several pieces
        ((0, 1, 2), (1, 3, 24), 288),
    ],
)
def test_reductions_go_along_memory(dims, strides, run):
    """Of 3 x 8 x 12 elements, over some dimensions: how many consecutive ones are read from contiguous memory."""
    x = value("x", (3, 8, 12), strides)
    left = tuple(size for dim, size in enumerate(x.shape) if dim not in dims)
    result = value("y", left, contiguous_strides(left))
    made = operators.loops_of(torch.ops.aten.var.correction, (x, list(dims)), {}, result)
    for row in made.by_rows.reductions:
        (read,) = (leaf for leaf in row.leaves if isinstance(leaf, loops.Read))
        assert loops.contiguous(read.index, row.over.name, row.over.size) == run


def value(name, shape, strides):
    return Value(Slot("memory", name, shape, strides, torch.float32, 1 << 20), 0, shape, strides, torch.float32, name)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
def test_only_a_sum_of_exponentials_is_known_to_have_an_inverse(scale, device, texts):  # noqa: F811
    """Other sums may be 0, infinite or so small that their inverse is infinite."""
    checked(Net(lambda m, x: (x * scale) / (x * scale).sum(-1, keepdim=True) + F.softmax(x, 0)), device, 5, 64)
    checked(Net(lambda m, x: x.exp() / x.exp().sum(-1, keepdim=True)), device, 5, 64)
    assert "divide_by_constant" not in texts[-1]
    checked(Net(lambda m, x: F.softmax(x * 3, -1)), device, 5, 64)
    assert "divide_by_constant" in texts[-1]


NORMS = {
    "layer_norm": lambda m, x: F.layer_norm(x.neg(), x.shape[1:]),
    "group_norm": lambda m, x: F.group_norm(x.neg().unflatten(1, (2, -1)), 1).flatten(1),
}


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("length", [14, 96, 1000])
@pytest.mark.parametrize("name", NORMS)
@torch.no_grad()
def test_rows_of_one_number_are_normalised_to_zero(name, length, dtype, device):  # noqa: F811
    """Their sums are exact in float32, and the mean is such a sum divided by its count."""
    fast = fxfuse.optimize(Net(NORMS[name]).to(device))
    x = torch.tensor([1000.1, -3.3, 0.1]).to(device, dtype)[:, None].expand(3, length).contiguous()
    for _ in range(4):  # a program has kernels of loops from the third call on
        have = fast(x)
    assert have.abs().max() < 1e-6


@pytest.mark.parametrize("name", NORMS)
@torch.no_grad()
def test_an_offset_costs_no_more_digits_than_torchs(name, device):  # noqa: F811
    model = Net(NORMS[name]).to(device)
    fast = fxfuse.optimize(model)
    for offset in (0, 100, 3000):
        torch.manual_seed(offset)
        x = torch.randn(64, 768).to(device) + offset
        want = model(x.double())
        for _ in range(4):
            have = fast(x)
        of_torch = (model(x).double() - want).norm()
        assert (have.double() - want).norm() < 2 * of_torch, offset


HALF = (LONGEST + 4096) // 2
LONG = {
    "softmax": lambda m, x: F.softmax(x, -1),
    "log_softmax": lambda m, x: F.log_softmax(x, -1) * 2,
    "layer_norm": lambda m, x: F.layer_norm(x, x.shape[1:]),
    "layer_norm of several sides": lambda m, x: F.layer_norm(x.view(2, 2, -1), (2, HALF), m.weight, m.bias),
    "group_norm": lambda m, x: F.group_norm(x.view(1, 4, -1, 2), 2, m.scale, m.shift),
    "instance_norm": lambda m, x: F.relu(F.instance_norm(x.view(1, 2, -1, 2), weight=m.scale[:2], bias=m.shift[:2])),
    "mean": lambda m, x: x.mean(-1) + 1,
    "mean of all": lambda m, x: x.mean() + 1,
    "sum": lambda m, x: x.abs().sum(-1, keepdim=True) * 2,  # of numbers that do not cancel
    "sum of all": lambda m, x: x.abs().sum() * 2,
    "greatest": lambda m, x: x.amax(-1) + 1,
    "variance": lambda m, x: x.var(-1) + 1,
    "variance of all": lambda m, x: x.var(correction=0) + 1,
    "of float32": lambda m, x: x.abs().sum(-1, dtype=torch.float32) + x.mean(-1, dtype=torch.float32),
}


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("name", LONG)
def test_long_rows_are_cut_into_parts(name, dtype, device):  # noqa: F811
    weight, scale = torch.linspace(0.5, 2, 2 * HALF).view(2, HALF), torch.linspace(0.5, 2, 4)
    net = Net(LONG[name], weight=weight, bias=1 - weight, scale=scale, shift=1 - scale)
    made = checked(net, device, 2, LONGEST + 4096, dtype=dtype, exact=name != "of float32")
    assert made.launches > 1 and not made.calls, made.code


COLUMNS = {
    "sum": lambda x: x.abs().sum(0) * 2,
    "mean": lambda x: (x * 2).mean(0, keepdim=True),
    "greatest": lambda x: x.neg().amax(0) + 1,
    "variance": lambda x: x.var(0) + 1,
    "mean of pixels": lambda x: F.silu(x.view(2, 50, 60, 24).permute(0, 3, 1, 2)).mean((2, 3)) * 2,
    "mean of a part": lambda x: x[1000:, 3:20].mean(0),
}


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("name", COLUMNS)
def test_long_columns_are_cut_into_parts(name, dtype, device):  # noqa: F811
    """Few columns would leave few threads for each."""
    made = checked(Net(lambda m, x: COLUMNS[name](x)), device, 6000, 24, dtype=dtype)
    assert made.launches > 1 and not made.calls, made.code
    assert checked(Net(lambda m, x: COLUMNS["sum"](x)), device, 600, 24, dtype=dtype).launches == 1
    checked(Net(lambda m, x: x * x.abs().sum().sum(0)), device, 6, 4, dtype=dtype)  # of a tensor without dimensions


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "mean"])
def test_rows_that_cannot_be_cut_are_torchs(name, device):  # noqa: F811
    length = 32771  # a prime number
    assert all(length % divisor for divisor in range(2, math.isqrt(length) + 1))
    made = checked(Net(lambda m, x: LONG[name](m, (x * 2).cumsum(0))), device, 2, length)
    assert made.calls.total() == 2, made.code


def test_what_a_rule_takes_apart_is_what_is_seen():
    """Operators that torch would take apart by itself are seen as what they consist of."""

    def in_parts(x, *_):
        return x.to(torch.float64).unflatten(-1, (2, -1)).sum(-1).sum(-1).to(x.dtype)

    x = torch.randn(3, 8)
    with Operators(apart={torch.ops.aten.sum.dim_IntList: lambda x, *_: NotImplemented}) as seen:
        x.sum(-1)
    assert [operation.overload for operation in seen.operations] == [torch.ops.aten.sum.dim_IntList]
    with Operators(apart={torch.ops.aten.amax.default: in_parts}) as seen:
        made = x.amax(-1)
    torch.testing.assert_close(made, x.sum(-1))
    names = [str(operation.overload.overloadpacket) for operation in seen.operations]
    assert names.count("aten._to_copy") == names.count("aten.sum") == 2 and "aten.to" not in names


@pytest.mark.parametrize("shape", [(2, 40960), (1, 3, 36864)])
@pytest.mark.parametrize("dims", [-1, 1])
def test_parts_are_as_exact_as_torchs_rows(shape, dims):
    torch.manual_seed(0)
    x = torch.randn(shape) + 100
    if x.shape[dims] <= LONGEST // 2:
        assert long_rows.LONG_ROWS[torch.ops.aten.var.correction](x, [dims]) is NotImplemented
        return
    pairs = ((long_rows.variance_of, torch.var), (long_rows.mean_of, torch.mean), (long_rows.sum_of, torch.sum))
    for by_parts, whole in pairs:
        right, of_torch = whole(x.double(), dims), whole(x, dims)
        error = (by_parts(x, [dims]).double() - right).abs().max()
        assert error <= 2 * (of_torch.double() - right).abs().max() + 1e-6 * right.abs().max()


def test_cudnns_batch_norm_of_long_rows_is_taken_apart():
    x, weight, bias = torch.randn(1, 3, 200, 300), torch.randn(3), torch.randn(3)
    rule = long_rows.LONG_ROWS[torch.ops.aten.cudnn_batch_norm.default]
    made, mean, scale, reserved = rule(x, weight, bias, None, None, True, 0.1, 1e-5)
    expected, *statistics = torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    torch.testing.assert_close([made, mean, scale], [expected, *statistics])
    assert not reserved.numel()
    running = torch.zeros(3), torch.ones(3)
    assert rule(x, weight, bias, *running, True, 0.1, 1e-5) is NotImplemented  # which it would have to update
    assert rule(x[..., :5], weight, bias, None, None, True, 0.1, 1e-5) is NotImplemented
