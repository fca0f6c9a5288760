"""Attention's kernels on an emulated GPU, which of them there are, and what keys repeat.

Expected values come from torch in float64.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from emulator import available, launch

from fxfuse.cuda import attention
from fxfuse.layout import contiguous_strides
from fxfuse.program.attention import repeated
from fxfuse.program.operators import loops_of
from fxfuse.program.values import Call, Slot, Value

ERRORS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def described(query, key, value, mask, out, scale=0.3, **others):
    """The problem of these tensors."""
    batch, heads, queries, width = query.shape
    mask_strides = (0, 0, 0, 0) if mask is None else mask.expand(batch, heads, queries, key.shape[2]).stride()
    return attention.Problem(
        batch, key.shape[1], heads // key.shape[1], queries, key.shape[2], width, query.dtype,
        None if mask is None else mask.dtype, *(tensor.stride()[:3] for tensor in (query, key, value, out)),
        mask_strides=mask_strides, mask_alignment=16, scale=scale, **others,
    )  # fmt: skip


CAUSAL = "causal"

PROBLEMS = [
    # batch, key heads, group, queries, keys, width, dtype, mask, whether each query has its own, multiprocessors
    (1, 2, 1, 1, 77, 64, torch.float32, None, False, 2),
    (2, 4, 1, 1, 300, 64, torch.bfloat16, torch.bool, False, 2),
    (1, 2, 2, 1, 133, 40, torch.float16, torch.float16, False, 16),
    (1, 2, 2, 2, 97, 128, torch.float32, torch.float32, True, 8),
    (2, 1, 4, 2, 1000, 128, torch.bfloat16, torch.bool, True, 16),
    (1, 3, 1, 3, 5, 80, torch.bfloat16, torch.bool, True, 2),
    (1, 1, 1, 1, 150, 256, torch.float16, torch.float32, False, 8),
    # many queries
    (2, 3, 1, 49, 49, 32, torch.bfloat16, torch.bfloat16, True, 2),
    (1, 2, 1, 130, 77, 64, torch.float16, None, False, 2),
    (1, 2, 2, 70, 133, 40, torch.bfloat16, torch.bool, True, 2),
    (2, 1, 1, 20, 9, 24, torch.float16, torch.float32, True, 2),
    (1, 1, 1, 200, 100, 128, torch.bfloat16, torch.float32, True, 2),
    (2, 2, 1, 49, 49, 32, torch.float32, torch.float32, True, 2),
    (1, 2, 1, 70, 300, 64, torch.float32, None, False, 2),
    (1, 1, 3, 9, 50, 128, torch.float32, torch.bool, True, 2),
    (1, 2, 1, 33, 17, 8, torch.float32, torch.float32, False, 2),
    (2, 2, 1, 150, 150, 64, torch.bfloat16, CAUSAL, False, 2),
    (1, 2, 3, 70, 70, 32, torch.float16, CAUSAL, False, 2),  # blocks whose rows are of two heads
    (1, 2, 1, 100, 77, 64, torch.float32, CAUSAL, False, 2),
    (1, 2, 1, 40, 300, 128, torch.float32, CAUSAL, False, 2),
    (1, 2, 2, 3, 20, 64, torch.bfloat16, CAUSAL, False, 2),
]


@pytest.mark.skipif(not available(), reason="the emulation needs Linux and a g++ that knows _Float16")
@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_kernel_on_an_emulated_gpu(problem):
    batch, key_heads, group, queries, keys, width, dtype, mask_dtype, own, multiprocessors = problem
    torch.manual_seed(0)
    heads = key_heads * group
    query = torch.randn(batch, queries, heads, width).to(dtype).transpose(1, 2)
    key = torch.randn(batch, key_heads, keys + 3, width).to(dtype)[:, :, :keys]
    value = torch.randn(batch, key_heads, keys, width).to(dtype)
    mask, is_causal = None, mask_dtype == CAUSAL
    if mask_dtype is not None and not is_causal:
        mask = torch.rand(1, heads if own else 1, queries if own else 1, keys) < 0.5
        mask[..., 0], mask[..., keys // 2 :] = True, False  # whole tiles at the end are hidden
        if mask_dtype != torch.bool:
            mask = torch.where(mask, torch.randn(mask.shape), -math.inf).to(mask_dtype)
    guard = 7
    memory = torch.full((batch * queries * heads * width + guard,), 99.0, dtype=dtype)
    out = memory[:-guard].view(batch, queries, heads, width).transpose(1, 2)
    numbers = mask if mask is None or mask.dtype == torch.bool else mask.double()
    repeats = [tensor.double().repeat_interleave(group, 1) for tensor in (key, value)]
    want = F.scaled_dot_product_attention(query.double(), *repeats, numbers, 0.0, is_causal, scale=0.3)
    problem = described(query, key, value, mask, out, is_causal=is_causal, multiprocessors=multiprocessors)
    kernels = attention.candidates(problem)
    assert kernels
    for kernel in kernels:
        memory.fill_(99.0)
        launch(kernel, "acc", (query, key, value, *([] if mask is None else [mask]), out))
        assert float((out.double() - want).abs().max()) < ERRORS[dtype], kernel.name
        assert (memory[-guard:] == 99).all(), "writes outside its result"


@pytest.mark.skipif(not available(), reason="the emulation needs Linux and a g++ that knows _Float16")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "dtype"), [(5, 40, torch.float32), (70, 70, torch.bfloat16)])
def test_logarithms_for_the_gradients(queries, keys, dtype, is_causal):
    """Infinities behind those of the queries, as torch's memory-efficient attention has them."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, size, 32).to(dtype) for size in (queries, keys, keys))
    out, logs = torch.empty_like(query), torch.full((2, 3, -(-queries // 32) * 32), math.nan)
    kernels = attention.candidates(described(query, key, value, None, out, is_causal=is_causal, logs=logs.shape[2]))
    scores = query.double() @ key.double().transpose(2, 3) * 0.3
    if is_causal:
        scores = scores.masked_fill(torch.ones(queries, keys, dtype=torch.bool).triu(1), -math.inf)
    assert kernels
    for kernel in kernels:
        launch(kernel, "acc", (query, key, value, out, logs), output=dtype)
        assert torch.allclose(logs[..., :queries].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
        assert (logs[..., queries:] == math.inf).all()
        assert float((out.double() - scores.softmax(-1) @ value.double()).abs().max()) < ERRORS[dtype]


@pytest.mark.skipif(not available(), reason="the emulation needs Linux and a g++ that knows _Float16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinite_keys_and_values_do_as_in_eager(dtype):
    """Float32's products are computed in parts, of which an infinity has none."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 40, 32).to(dtype) for _ in range(3))
    query[0, 0, :, 5] = query[0, 0, :, 5].abs()
    key[0, 0, 7, 5] = -math.inf  # a weight of 0 for all queries
    key[0, 1, 9, 3] = math.inf  # NaN where the query's channel is positive
    value[0, 0, 11, 2] = math.inf
    value[0, 0, 12, 4] = math.nan
    out = torch.empty_like(query)
    want = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), scale=0.3)
    (kernel,) = attention.candidates(described(query, key, value, None, out))
    launch(kernel, "acc", (query, key, value, out))
    assert torch.equal(out.isnan(), want.isnan()) and torch.equal(out.isinf(), want.isinf())
    assert 0 < int(want.isnan().sum()) < want.numel() and int(want.isinf().sum()) == 40
    finite = want.isfinite()
    assert float((out.double() - want)[finite].abs().max()) < ERRORS[dtype]


def test_blocks_share_the_keys_of_few_heads():
    query, cache = torch.empty(1, 8, 1, 128), torch.empty(1, 8, 4096, 128)
    problem = described(query, cache, cache, None, query)
    splits = [kernel for kernel in attention.candidates(problem) if "split" in kernel.name]
    assert splits
    assert all(kernel.workspace for kernel in splits)
    clusters = attention.candidates(described(query, cache, cache, None, query, largest_cluster=16))
    assert any("cluster of 8" in kernel.name and not kernel.workspace for kernel in clusters)
    many = described(query.expand(128, 8, 1, 128), *[cache.expand(128, 8, 4096, 128)] * 2, None, query)
    assert not any(kernel.workspace for kernel in attention.candidates(many))


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((1, 2, 90, 160), (1, 2, 100, 160)),  # more channels than a warp has registers for with many queries
        ((1, 2, 90, 60), (1, 2, 100, 60)),  # no multiple of 8 channels
        ((1, 2, 1, 130), (1, 2, 100, 130)),  # no multiple of 16 bytes
        ((1, 2, 1, 256), (1, 2, 100, 256)),  # more channels than a warp has registers for
        ((1, 2, 1, 64), (1, 2, 0, 64)),
    ],
)
def test_problems_without_a_kernel(query, key):
    query, key = torch.empty(query), torch.empty(key)
    assert not attention.candidates(described(query, key, key, None, query))


@pytest.mark.parametrize(
    ("queries", "keys", "width", "dtype", "first"),
    [
        (1, 5000, 128, torch.bfloat16, True),
        (49, 49, 32, torch.bfloat16, True),
        (512, 512, 64, torch.bfloat16, False),
        (512, 512, 64, torch.float32, True),
        (512, 512, 128, torch.float32, False),
    ],
)
def test_which_comes_first_where_nothing_is_measured(queries, keys, width, dtype, first):
    query, key = (torch.empty(1, 2, size, width, dtype=dtype) for size in (queries, keys))
    assert attention.is_quicker(described(query, key, key, None, query)) == first


def _value(name, *shape):
    return Value(Slot("made", name, dtype=torch.float32), 0, shape, contiguous_strides(shape), torch.float32, name)


def _copied(cache, *shape):
    """A step that copies a value expanded to a shape."""
    sizes = (*cache.shape[:2], shape[2], *cache.shape[2:])
    batch, head, row, channel = cache.strides
    wide = Value(cache.slot, cache.offset, sizes, (batch, head, 0, row, channel), cache.dtype, "wide")
    made = _value("made", *shape)
    loops = loops_of(torch.ops.aten.clone.default, (wide,), {"memory_format": torch.contiguous_format}, made)
    assert loops is not None
    return Call(torch.clone, (wide,), {}, made, False, True, loops=loops), made


def test_keys_that_repeat_heads_are_seen_through():
    cache = _value("cache", 2, 3, 50, 8)
    step, made = _copied(cache, 2, 3, 4, 50, 8)
    seen = Value(made.slot, 0, (2, 12, 50, 8), contiguous_strides((2, 12, 50, 8)), made.dtype, "keys")
    found = repeated(seen, [step])
    assert found is not None
    assert found.slot is cache.slot
    assert (found.shape, found.strides, found.offset) == (cache.shape, cache.strides, 0)
    part = Value(made.slot, 0, (2, 12, 20, 8), seen.strides, made.dtype, "part")
    assert repeated(part, [step]).shape == (2, 3, 20, 8)
    one = _value("one", 1, 1, 50, 8)
    step, made = _copied(one, 1, 1, 4, 50, 8)
    seen = Value(made.slot, 0, (1, 4, 50, 8), contiguous_strides((1, 4, 50, 8)), made.dtype, "keys")
    assert repeated(seen, [step]).shape == (1, 1, 50, 8)


def test_keys_that_are_something_else_are_not_seen_through():
    cache = _value("cache", 2, 3, 50, 8)
    step, made = _copied(cache, 2, 3, 4, 50, 8)
    alternating = Value(made.slot, 0, (2, 12, 50, 8), (4800, 400, 8, 1), made.dtype, "keys")
    assert repeated(alternating, []) is None
    turned = Value(made.slot, 0, (2, 12, 50, 8), (4800, 8, 96, 1), made.dtype, "keys")
    assert repeated(turned, [step]) is None
    target = Value(cache.slot, 0, cache.shape, cache.strides, cache.dtype, "cache")
    later = Call(torch.Tensor.mul_, (target, 2), {}, target, False, False)
    seen = Value(made.slot, 0, (2, 12, 50, 8), contiguous_strides((2, 12, 50, 8)), made.dtype, "keys")
    assert repeated(seen, [step, later]) is None, "the cache is another since it was copied"
