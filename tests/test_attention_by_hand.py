"""Attention that a model writes out, which torch's own attention computes in a program: what is found, and that it is
the same."""

import contextlib
import copy
import inspect
import math
import random

import pytest
import torch
import torch.nn.functional as F
from helpers import Net, Net2, skip_if_python
from test_loops import where
from torch import nn

import fxfuse
import fxfuse.program
from fxfuse import build
from fxfuse.cuda import attention as kernels
from fxfuse.cuda import codegen
from fxfuse.expression import Acc
from fxfuse.layout import contiguous_strides
from fxfuse.module import state_of
from fxfuse.problem import Problem, TensorMeta
from fxfuse.program import attention

BATCH, HEADS, ROWS, CHANNELS = 2, 3, 19, 24
WIDTH = HEADS * CHANNELS


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def parts(m, x):
    q, k, v = m.qkv(x).chunk(3, -1)
    return heads(q), heads(k), heads(v)


def ended(m, x):
    return m.out(x).relu() * 0.5


def together(m, x):
    return ended(m, x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1))


def plain(m, x):
    q, k, v = parts(m, x)
    return together(m, (q @ k.transpose(-2, -1) / math.sqrt(CHANNELS)).softmax(-1) @ v)


def causal(m, x):
    q, k, v = parts(m, x)
    scores = (q @ k.transpose(-2, -1)) * 0.2
    scores = scores.masked_fill(m.seen[:, :, :ROWS, :ROWS] == 0, float("-inf"))
    return together(m, F.dropout(F.softmax(scores, dim=-1), 0.5, m.training) @ v)


def causal_by_where(m, x):
    q, k, v = parts(m, x)
    scores = torch.matmul(q, k.mT)
    hidden = torch.ones(ROWS, ROWS, dtype=torch.bool, device=x.device).tril()
    return together(m, torch.where(hidden, scores, -math.inf).softmax(-1).matmul(v))


def biased(m, x):
    """As in T5: no scale, a bias of heads, softmax in float32."""
    q, k, v = parts(m, x)
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += m.bias
    return together(m, torch.matmul(scores.float().softmax(-1).type_as(scores), v))


def padded(m, x, mask):
    """As in BERT: an argument says which keys there are."""
    q, k, v = parts(m, x)
    hidden = (1.0 - mask[:, None, None].to(x.dtype)) * -1e9
    return together(m, ((q @ k.transpose(-1, -2)) / 4 + hidden).softmax(-1) @ v)


def biased_and_padded(m, x, mask):
    q, k, v = parts(m, x)
    hidden = (1.0 - mask[:, None, None].to(x.dtype)) * -1e9
    return together(m, ((q * 0.3) @ k.transpose(-1, -2) + m.bias + hidden).softmax(-1) @ v)


def by_einsum(m, x):
    q, k, v = m.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
    weights = torch.einsum("blhd,bshd->bhls", q, k).mul(0.25).softmax(-1)
    return ended(m, torch.einsum("bhls,bshd->blhd", weights, v).flatten(2))


def in_windows(m, x):
    """As in Swin: a bias for each head, and a mask for each window."""
    windows = x.unflatten(1, (-1, 4)).flatten(0, 1)
    q, k, v = parts(m, windows)
    scores = (q * CHANNELS**-0.5) @ k.transpose(-2, -1) + m.bias[:, :4, :4]
    scores = scores.view(x.shape[0], -1, HEADS, 4, 4) + m.windows[None, :, None]
    found = scores.view(-1, HEADS, 4, 4).softmax(-1) @ v
    return together(m, found).view(x.shape)


def with_one_head(m, x):
    q, k, v = m.qkv(x).chunk(3, -1)
    return ended(m, torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v))


def other_lengths(m, x):
    """Queries of one input and fewer keys and values, wider than the queries."""
    q, k = heads(m.out(x)), heads(m.out(x[:, 2:7]))
    v = heads(m.qkv(x[:, 2:7]))
    found = (q @ k.transpose(-2, -1) * 0.1).softmax(-1) @ v
    return found.transpose(1, 2).flatten(2)


FOUND = {
    "plain": (plain, ROWS), "causal": (causal, ROWS), "causal by where": (causal_by_where, ROWS),
    "a bias of heads": (biased, ROWS), "einsum": (by_einsum, ROWS), "windows": (in_windows, 12),
    "one head": (with_one_head, ROWS), "other lengths": (other_lengths, ROWS), "padded": (padded, ROWS),
    "a bias, padded": (biased_and_padded, ROWS),
}  # fmt: skip
ADDED = {
    "plain": None, "causal": (1, 1, ROWS, ROWS), "causal by where": (1, 1, ROWS, ROWS),
    "a bias of heads": (1, HEADS, ROWS, ROWS), "einsum": None, "windows": (1, 3 * HEADS, 4, 4), "one head": None,
    "other lengths": None, "padded": (BATCH, 1, 1, ROWS), "a bias, padded": (BATCH, HEADS, ROWS, ROWS),
}  # fmt: skip
"""The shape of what is added to the scores."""


def both_read(m, x):
    q, k, v = parts(m, x)
    weights = (q @ k.transpose(-2, -1)).softmax(-1)
    return together(m, weights @ v), weights


def scores_read(m, x):
    q, k, v = parts(m, x)
    scores = q @ k.transpose(-2, -1)
    return together(m, scores.softmax(-1) @ v), scores.amax(-1)


def capped(m, x):
    q, k, v = parts(m, x)
    return together(m, ((q @ k.transpose(-2, -1)).tanh() * 5).softmax(-1) @ v)


def along_queries(m, x):
    q, k, v = parts(m, x)
    return together(m, (q @ k.transpose(-2, -1)).softmax(-2) @ v)


def turned_over(m, x):
    q, k, v = parts(m, x)
    return together(m, (q @ k.transpose(-2, -1)).mul(-1).softmax(-1) @ v)


def sharpened(m, x):
    q, k, v = parts(m, x)
    return together(m, (q @ k.transpose(-2, -1)).softmax(-1).square() @ v)


def hidden_by_a_little(m, x):
    q, k, v = parts(m, x)
    return together(m, (q @ k.transpose(-2, -1)).masked_fill(m.seen[:, :, :ROWS, :ROWS] == 0, -5.0).softmax(-1) @ v)


def two_products(m, x):
    q, k, v = parts(m, x)
    return together(m, (q @ k.transpose(-2, -1) + k @ q.transpose(-2, -1)).softmax(-1) @ v)


def transposed_scores(m, x):
    q, k, v = parts(m, x)
    return together(m, (q @ k.transpose(-2, -1)).transpose(-2, -1).softmax(-1) @ v)


LEFT = {
    one.__name__.replace("_", " "): one
    for one in (
        both_read, scores_read, capped, along_queries, turned_over, sharpened, hidden_by_a_little, two_products,
        transposed_scores,
    )
}  # fmt: skip


@pytest.fixture
def choices(monkeypatch):
    """What is asked, of programs that run torch's attention wherever they may, on a GPU that is emulated."""
    assert where("emulated", monkeypatch) == "cpu"
    asked = []

    def by_hand(device, tensors, added, scale, period):
        if period:
            return None
        asked.append((tensors, added, scale))
        query, _, value = tensors
        batch, count, rows, _ = query.shape
        strides = torch.empty(batch, rows, count, value.shape[3]).transpose(1, 2).stride()  # as most of torch's kernels
        return attention.Torchs("an operator", strides)

    monkeypatch.setattr(attention, "by_hand", by_hand)
    monkeypatch.setattr(fxfuse.program, "ATTENDING", ("cpu",))

    def as_on_a_gpu(query, key, value, added, *_, scale):
        assert all(tensor.stride(-1) == 1 for tensor in (query, key, value)), "torch's operators read rows"
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=added, scale=scale)
        return found.transpose(1, 2).contiguous().transpose(1, 2), None

    monkeypatch.setattr(attention, "function_of", {"an operator": as_on_a_gpu}.get)
    return asked


@pytest.fixture
def own_choices(choices, monkeypatch):
    """The same for kernels of ours: what is asked, and the kernel. Other attention stays as it was written."""
    asked = []

    def by_hand(device, tensors, added, scale, period):
        query, key, value = (
            one.strides if attention.in_rows(one.strides) else contiguous_strides(one.shape) for one in tensors
        )
        (batch, count, rows, width), (*_, keys, _) = (one.shape for one in tensors[:2])
        of_mask = [0] * 4 if added is None else [n * (added.shape[dim] > 1) for dim, n in enumerate(added.strides)]
        problem = kernels.Problem(
            batch, count, 1, rows, keys, width, tensors[0].dtype, None if added is None else added.dtype, query[:3],
            key[:3], value[:3], attention._by_rows(tensors[0].shape)[:3], tuple(of_mask), period,
            scale=scale, mask_alignment=16,
        )  # fmt: skip
        made = kernels.candidates(problem) if tensors[2].shape[3] == width else ()
        kernel = next((kernel for kernel in made if not kernel.workspace), None)
        asked.append((tensors, added, scale, period, kernel))
        if kernel is None:
            return None
        source = build.Source(codegen.generate(Acc(), tensors[0].dtype, (), kernel), (8, 0), kernel.name)
        return attention.Own(kernel, fxfuse.program.merge.build.load_each([source])[0])

    monkeypatch.setattr(attention, "by_hand", by_hand)
    return asked


def takes_mask(forward):
    return "mask" in inspect.signature(forward).parameters


def model_of(forward):
    torch.manual_seed(1)
    kind = Net2 if takes_mask(forward) else Net
    net = kind(forward, qkv=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, WIDTH)).eval()
    net.register_buffer("seen", torch.ones(1, 1, 24, 24).tril())
    net.bias = nn.Parameter(torch.randn(HEADS, ROWS, ROWS))
    net.register_buffer("windows", torch.where(torch.rand(3, 4, 4) < 0.3, -100.0, 0.0))
    return net


def compared(net, *args, dtype):
    """The program of a model that gave what eager gives."""
    fast = fxfuse.optimize(copy.deepcopy(net))
    for _ in range(3):
        have, want = fast(*args), net(*args)
    exact = copy.deepcopy(net).double()(*(arg.double() if arg.is_floating_point() else arg for arg in args))
    for one, other, right in zip(*map(as_tuple, (have, want, exact)), strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(one.isnan(), right.isnan())
        errors = [float((result.double() - right).nan_to_num().norm()) for result in (one, other)]
        assert errors[0] <= 1.25 * errors[1] + torch.finfo(dtype).eps * float(right.nan_to_num().norm())
    skip_if_python(fast)
    (program,) = state_of(fast).programs.programs
    return program


def as_tuple(made):
    return made if isinstance(made, tuple) else (made,)


def arguments(forward, rows, dtype):
    torch.manual_seed(2)
    x = torch.randn(BATCH, rows, WIDTH, dtype=dtype)
    if not takes_mask(forward):
        return (x,)
    mask = torch.ones(BATCH, rows, dtype=torch.int64)
    mask[1, 6:] = 0
    return x, mask


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FOUND)
def test_attention_is_found_however_it_is_written(name, dtype, choices):
    forward, rows = FOUND[name]
    program = compared(model_of(forward).to(dtype), *arguments(forward, rows, dtype), dtype=dtype)
    assert len(choices) == 1
    assert program.calls["as_on_a_gpu"] == 1 and not program.calls["bmm"], program.code
    _, added, _ = choices[0]
    assert (None if added is None else added.shape) == ADDED[name]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FOUND)
def test_kernels_of_ours_attend_wherever_they_can(name, dtype, own_choices):
    forward, rows = FOUND[name]
    program = compared(model_of(forward).to(dtype), *arguments(forward, rows, dtype), dtype=dtype)
    *_, (_, _, _, _, kernel) = own_choices
    assert (kernel is None) == (name == "other lengths"), kernel
    assert bool(program.calls["bmm"]) == (kernel is None), program.code


@torch.no_grad()
def test_windows_are_batches_and_their_masks_repeat(own_choices):
    """So queries, keys and values are read where their linear writes them, and the queries' factor is attention's."""
    forward, rows = FOUND["windows"]
    program = compared(model_of(forward), *arguments(forward, rows, torch.float32), dtype=torch.float32)
    ((tensors, added, scale, period, _),) = own_choices
    assert (tensors[0].shape, added.shape, period) == ((3 * BATCH, HEADS, 4, CHANNELS), (3, HEADS, 4, 4), 3)
    assert scale == pytest.approx(CHANNELS**-0.5)
    assert len({tensor.slot for tensor in tensors}) == 1
    assert len(program.steps) == 5, program.steps  # two linears with a pass, what is added, attention


@torch.no_grad()
@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_attention_stays_what_it_is(name, choices):
    forward = LEFT[name]
    program = compared(model_of(forward), *arguments(forward, ROWS, torch.float32), dtype=torch.float32)
    assert not choices
    assert not program.calls["as_on_a_gpu"], program.code


@torch.no_grad()
def test_heads_are_read_where_they_lie(choices):
    """No copy of q, k or v is made, nor of the result."""
    program = compared(model_of(plain), *arguments(plain, ROWS, torch.float32), dtype=torch.float32)
    assert program.launches == 1, program.code  # what follows the last linear


@torch.no_grad()
def test_keys_in_columns_are_copied_to_rows(choices):
    """Shifted windows, each with a mask of its own: heads of several windows do not lie in one stride, so the first
    product reads copies, of the keys one in columns. Torch's operators read rows."""

    def forward(m, x):
        return in_windows(m, x.roll(-1, 1)).roll(1, 1)

    program = compared(model_of(forward), *arguments(forward, 12, torch.float32), dtype=torch.float32)
    ((tensors, _, _),) = choices
    assert [tensor.strides[-1] == 1 for tensor in tensors] == [True, False, True]
    assert program.calls["as_on_a_gpu"] == 1 and not program.calls["bmm"], program.code
    copies = [step for step in program.steps if step.is_launch and "rows" in step.what]
    assert len(copies) == 1, program.code


HIDING = {
    "filled": lambda s, mask: s.masked_fill(mask[:, None, None] == 0, -math.inf),
    "added": lambda s, mask: s + mask.log()[:, None, None],
    "made and added": lambda s, mask: s + torch.zeros_like(mask).masked_fill(mask == 0, -math.inf)[:, None, None],
    "made of truth values": lambda s, mask: s + torch.where(mask > 0, 0.0, -math.inf)[:, None, None],
}


@torch.no_grad()
@pytest.mark.parametrize("way", HIDING)
def test_rows_that_an_argument_hides_as_a_whole_are_not_attended(way, choices):
    """softmax makes NaN of them, torch's attention zeros."""

    def forward(m, x, mask):
        q, k, v = parts(m, x)
        return together(m, HIDING[way](q @ k.transpose(-1, -2), mask).softmax(-1) @ v)

    x, mask = torch.randn(BATCH, ROWS, WIDTH), torch.ones(BATCH, ROWS)
    mask[1] = 0
    net = model_of(forward)
    fast = fxfuse.optimize(copy.deepcopy(net))
    for _ in range(3):
        torch.testing.assert_close(fast(x, mask), net(x, mask), equal_nan=True)
    assert fast(x, mask)[1].isnan().all() and not choices


@torch.no_grad()
def test_keys_that_are_overwritten_before_the_values_are_read(choices):
    def forward(m, x):
        q, k, v = m.qkv(x).chunk(3, -1)
        weights = torch.bmm(q, k.transpose(1, 2)).softmax(-1)
        k.zero_()
        return m.out(torch.bmm(weights, v) + k)

    compared(model_of(forward), *arguments(forward, ROWS, torch.float32), dtype=torch.float32)


@torch.no_grad()
def test_where_torchs_is_no_quicker_nothing_changes(choices, monkeypatch):
    monkeypatch.setattr(attention, "by_hand", lambda *_: None)
    program = compared(model_of(causal), *arguments(causal, ROWS, torch.float32), dtype=torch.float32)
    assert program.calls["bmm"] == 2, program.code


def test_an_operator_that_refused_a_call_is_not_called_so_again(monkeypatch):
    """cuDNN's attention in torch 2.11 raises an error for what it cannot do. The second time it ends the process."""
    calls = []

    def refusing(*tensors, scale):
        calls.append(tensors)
        raise RuntimeError("not for such tensors")

    monkeypatch.setattr(attention, "_OPERATORS", {"an operator": "it"})
    monkeypatch.setattr(attention, "function_of", {"an operator": refusing}.get)
    monkeypatch.setattr(attention, "_refused", set())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    metas = [TensorMeta.of(torch.empty(2, 3, 5, 8), torch.device("cpu")) for _ in range(3)]
    for replayed in (False, True):  # which are measured apart
        options = (("scale", 0.5), ("period", 0))
        problem = Problem(attention.BY_HAND, options, "acc", metas[0], None, None, tuple(metas[1:]), replayed=replayed)
        assert attention._if_quicker.__wrapped__(problem) is None
    assert len(calls) == 1


@torch.no_grad()
def test_without_a_kernel_for_what_is_added_nothing_changes(choices, monkeypatch):
    kernel = fxfuse.program.merge.kernels.kernel
    none_of_added = lambda loops: None if loops.output.name.startswith("h") else kernel(loops)  # noqa: E731
    monkeypatch.setattr(fxfuse.program.merge.kernels, "kernel", none_of_added)
    program = compared(model_of(causal), *arguments(causal, ROWS, torch.float32), dtype=torch.float32)
    assert len(choices) == 1 and program.calls["bmm"] == 2, program.code


def drawn(seed):
    """A forward that attends in a way drawn by seed, perhaps one that torch's attention has none of; its inputs."""
    draw = random.Random(seed)
    rows, keys = draw.choice([(19, 19), (1, 23), (18, 7), (33, 33)])
    is_split = draw.random() < 0.8
    steps = [draw.choice([*CHANGES_OF_SCORES]) for _ in range(draw.randint(0, 4))]
    aside = draw.choice(["nothing"] * 6 + ["weights", "scores", "keys overwritten", "values overwritten"])
    softmax = draw.choice(["method", "function", "in float32"])
    scaled = draw.random() < 0.3
    axis = draw.choice([-1] * 8 + [-2])

    def forward(m, x, mask):
        q, k, v = m.qkv(x[:, :rows]), m.qkv(x[:, :keys]) * 0.5, m.qkv(x[:, :keys])
        q, k, v = q[..., :WIDTH], k[..., WIDTH : 2 * WIDTH], v[..., 2 * WIDTH :]
        if is_split:
            q, k, v = heads(q), heads(k), heads(v)
        q = q * 0.3 if scaled else q
        scores = q @ k.transpose(-2, -1)
        before = scores
        for step in steps:
            scores = CHANGES_OF_SCORES[step](m, scores, mask[:, :keys])
        if softmax == "in float32":
            weights = scores.float().softmax(axis).to(v.dtype)
        else:
            weights = scores.softmax(axis) if softmax == "method" else F.softmax(scores, dim=axis)
        if aside == "keys overwritten":
            k.mul_(2)
        if aside == "values overwritten":
            v.mul_(2)
        found = weights @ v
        found = ended(m, found.transpose(1, 2).flatten(2) if is_split else found)
        if aside == "nothing":
            return found, found + 1
        return found, {"weights": weights, "scores": before}.get(aside, k).sum(-1)

    torch.manual_seed(seed)
    mask = (torch.rand(BATCH, max(rows, keys)) < 0.7).int()
    mask[:, 0] = 1
    return forward, is_split, (torch.randn(BATCH, max(rows, keys), WIDTH), mask)


def of_keys(m, mask):
    """A mask (batch, keys) beside scores."""
    return mask[:, None, None] if m.is_split else mask[:, None]


CHANGES_OF_SCORES = {
    "scaled": lambda m, s, mask: s * 0.25,
    "divided": lambda m, s, mask: s / math.sqrt(CHANNELS),
    "scaled in place": lambda m, s, mask: s.mul_(0.5),
    "a bias of keys": lambda m, s, mask: s + m.wide[2, 0, : s.shape[-1]],
    "a bias of rows and keys": lambda m, s, mask: s - m.wide[0, : s.shape[-2], : s.shape[-1]],
    "a bias of heads": lambda m, s, mask: s + m.wide[: HEADS if m.is_split else 1, : s.shape[-2], : s.shape[-1]],
    "a bias in place": lambda m, s, mask: s.add_(m.wide[1, : s.shape[-2], : s.shape[-1]]),
    "a mask, added": lambda m, s, mask: s + of_keys(m, (1.0 - mask) * -1e9),
    "a mask, filled": lambda m, s, mask: s.masked_fill(of_keys(m, mask) == 0, -1e9),
    "what comes later": lambda m, s, mask: s.masked_fill(m.later[: s.shape[-2], : s.shape[-1]], -math.inf),
    "as float32": lambda m, s, mask: s.float().to(s.dtype),
    "halved by a view": lambda m, s, mask: s.view(-1, s.shape[-1]).mul(0.5).view(s.shape),
    "capped": lambda m, s, mask: torch.tanh(s) * 3,
    "by a parameter": lambda m, s, mask: s * m.bias[0, 0, 0],
}


@torch.no_grad()
@pytest.mark.parametrize("seed", range(24))
def test_drawn_attention(seed, choices):
    compared_as_drawn(seed)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(24, 48))
def test_drawn_attention_by_kernels_of_ours(seed, own_choices):
    compared_as_drawn(seed)


def compared_as_drawn(seed):
    forward, is_split, (x, mask) = drawn(seed)
    net = model_of(forward)
    net.is_split = is_split
    net.wide = nn.Parameter(torch.randn(HEADS, 40, 40))
    net.register_buffer("later", torch.ones(40, 40, dtype=torch.bool).triu(1))
    compared(net, x, mask, dtype=torch.float32)
