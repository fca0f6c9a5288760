"""Attention on a CUDA device: one launch, no less exact than torch's.

Expected values come from torch in float64. Skipped without a GPU of compute capability 8.0.
"""

import copy
import functools
import math
import random

import pytest
import test_attention_by_hand as by_hand
import torch
import torch.nn.functional as F
from helpers import ON_GPU, kernels_launched
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxfuse
from fxfuse.cuda import attention as kernels
from fxfuse.cuda import exactness, tune
from fxfuse.problem import Plan
from fxfuse.program import attention, attention_training

pytestmark = ON_GPU

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _drawn(seed):
    """Sizes, tensors and mask of a problem that a kernel of ours has."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dtype = draw.choice(DTYPES)
    group, queries = draw.choice([(1, 1), (1, 1), (2, 1), (4, 1), (8, 1), (1, 3), (2, 4), (3, 2)])
    batch, key_heads, keys = draw.randint(1, 9), draw.randint(1, 12), draw.choice([1, 7, 64, 129, 513, 2000, 4097])
    width = draw.choice([8, 40, 64, 80, 96, 128] if dtype == torch.float32 else [16, 64, 80, 128, 192, 256])
    if seed % 2:  # many queries
        group, queries = draw.choice([(1, 49), (1, 197), (2, 70), (3, 9), (1, 300)])
        keys, width = draw.choice([7, 49, 64, 129, 513]), draw.choice([8, 32, 40, 64, 96, 128])
    heads = key_heads * group
    query = torch.randn(batch, queries, heads, width, device="cuda", dtype=dtype).transpose(1, 2)
    cache = torch.randn(2, batch, key_heads, keys + 5, width, device="cuda", dtype=dtype)
    key, value = cache[:, :, :, :keys].unbind()
    mask, is_causal = None, False
    kind = draw.choice(["none", "length", "bool", "numbers", "causal"])
    if kind == "causal":
        is_causal = True
    elif kind == "length":
        mask = (torch.arange(keys, device="cuda") < draw.randint(1, keys)).expand(1, 1, queries, keys)
    elif kind != "none":
        shape = draw.choice([1, batch]), draw.choice([1, heads]), draw.choice([1, queries]), keys
        mask = torch.rand(shape, device="cuda") < 0.7
        mask[..., 0] = True
        if kind == "numbers":
            mask = torch.where(mask, torch.randn(shape, device="cuda"), -math.inf).to(dtype)
    return query, key, value, mask, is_causal, draw.choice([None, 0.3])


def _exact(query, key, value, mask, is_causal, scale, dtype=torch.float64):
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.to(dtype).repeat_interleave(group, 1) for tensor in (key, value))
    mask = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
    return F.scaled_dot_product_attention(query.to(dtype), key, value, mask, 0.0, is_causal, scale=scale)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(60))
def test_every_kernel_is_no_less_exact_than_torch(seed, monkeypatch):
    problem = query, key, value, mask, is_causal, scale = _drawn(seed)
    found, draft = [], tune.draft

    def noting(problem, candidates):
        found.extend(candidates)
        return draft(problem, [candidate for candidate in candidates if not candidate.library][:1])

    monkeypatch.setattr(tune, "draft", noting)
    exact, eager = _exact(*problem), _exact(*problem, query.dtype)
    args, options = (query, key, value, mask), {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if is_causal:
        options["is_causal"] = True
    planned = attention.planned(args, options, eager)
    ours = [candidate for candidate in found if not candidate.library]
    if not ours:  # torch's flash attention has no equal of ours
        assert mask is None and query.dtype != torch.float32 and key.shape[2] > kernels.FLASH
        return
    assert planned is not None
    for candidate in ours:
        have = candidate.build()(query, None, None, [tensor for tensor in args[1:] if tensor is not None])
        assert have.stride() == eager.stride()
        error, allowed = (float((result.double() - exact).norm() / exact.norm()) for result in (have, eager))
        assert error <= 1.1 * allowed + 1e-7, (candidate.name, error, allowed)


# ------------------------------------------------------------------------------------------ gradients


class _Noted(TorchDispatchMode):
    """Notes the calls of torch's operators for attention and its gradients, and their results."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function in attention_training.PLANNED:
            self.calls[function in attention_training.GRADIENTS] = function, args, kwargs or {}, result
        return result


def _drawn_to_train(seed):
    """Query, key, value and maybe a mask that need gradients, the result's gradient, and whether attention is causal.

    The mask has one of the shapes that people give: a bias of windows, or padding.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dtype = draw.choice(DTYPES)
    batch, heads = draw.randint(1, 6), draw.randint(1, 9)
    queries, keys = draw.choice([(49, 49), (197, 197), (300, 77), (17, 400), (512, 512), (65, 33)])
    width = draw.choice([8, 24, 32, 64, 96, 128])
    made = [
        torch.randn(batch, size, heads, width, device="cuda", dtype=dtype).transpose(1, 2)
        for size in (queries, keys, keys, queries)
    ]
    is_causal, leaves = queries == keys and draw.random() < 0.4, [tensor.requires_grad_() for tensor in made[:3]]
    kind = "none" if is_causal else draw.choice(["none", "bias", "padding"])
    if kind != "none":
        shape = (1, heads, queries, keys) if kind == "bias" else (batch, 1, 1, keys)
        mask = torch.randn(shape, device="cuda").masked_fill(torch.rand(shape, device="cuda") < 0.2, -math.inf)
        mask[..., 0] = 0
        leaves.append(mask.to(dtype).requires_grad_(kind == "bias"))
    return leaves, made[3], is_causal


@pytest.mark.parametrize("is_gradient", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize("seed", range(24))
def test_training_is_no_less_exact_than_torchs(seed, backend, is_gradient, monkeypatch):
    leaves, dout, is_causal = _drawn_to_train(seed)
    attend = functools.partial(F.scaled_dot_product_attention, is_causal=is_causal)
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)), _Noted() as noted:
        try:
            torch.autograd.grad(attend(*leaves), [leaf for leaf in leaves if leaf.requires_grad], dout)
        except RuntimeError as error:
            pytest.skip(f"torch: {error}")
    draft = tune.draft

    def ours(problem, candidates):
        for candidate in candidates:  # they run as when they are measured
            candidate.build()(*exactness.example(problem))
        return draft(problem, [candidate for candidate in candidates if not candidate.library])

    monkeypatch.setattr(tune, "draft", ours)
    call = noted.calls[is_gradient]
    planned = attention_training.planned(*call)
    assert planned is not None
    query, key, value, *masks = (leaf.detach().double().requires_grad_() for leaf in leaves)
    scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    masks = [mask.expand(scores.shape) for mask in masks]
    for mask in masks:
        scores = scores + mask
    exact = scores.softmax(-1) @ value, scores.logsumexp(-1, keepdim=True)
    if is_gradient:
        exact = torch.autograd.grad(exact[0], [query, key, value, *masks], dout.double())
    results, again = planned(), planned()
    assert len(results) == len(call[3])
    for have, torchs, best, other in zip(results, call[3], exact, again, strict=False):
        if have is None:  # nobody asked for the mask's gradient
            continue
        assert (have.shape, have.stride(), have.dtype) == (torchs.shape, torchs.stride(), torchs.dtype)
        assert torch.equal(have, other)
        # the logarithms may lack the last dimension, and have more rows than there are queries
        have, torchs = (one[:, :, : best.shape[2]].reshape(best.shape) for one in (have, torchs))
        error, allowed = (float((one.double() - best).norm() / best.norm()) for one in (have, torchs))
        assert error <= 1.1 * allowed + 1e-7, (error, allowed)


class Trained(nn.Module):
    """Attention of eight heads, causal or with a learned bias."""

    def __init__(self, dtype, biased):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(8, 130, 130, dtype=dtype)) if biased else None
        self.qkv, self.out = nn.Linear(256, 768, dtype=dtype), nn.Linear(256, 256, dtype=dtype)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 8, 32).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, self.bias, is_causal=self.bias is None)
        return self.out(attended.transpose(1, 2).flatten(2)).relu()


@pytest.mark.parametrize("biased", [False, True])
def test_a_training_step_attends_by_our_kernels(biased, monkeypatch):
    monkeypatch.setenv("FXFUSE_TUNE", "0")  # what comes first
    torch.manual_seed(0)
    model = Trained(torch.float32, biased).cuda()
    exact = copy.deepcopy(model).double()
    x, dy = (torch.randn(3, 130, 256, device="cuda") for _ in range(2))
    fast = fxfuse.optimize(copy.deepcopy(model))

    def step(model, x, dy):
        model.zero_grad()
        x = x.clone().requires_grad_()
        model(x).backward(dy)
        return [x.grad, *(parameter.grad for parameter in model.parameters())]

    for _ in range(4):
        have = step(fast, x, dy)
    eager, best = step(model, x, dy), step(exact, x.double(), dy.double())
    for one, other, double in zip(have, eager, best, strict=True):
        error, allowed = (float((gradient - double).norm() / double.norm()) for gradient in (one, other))
        assert error <= 1.5 * allowed + 1e-7, (error, allowed)
    launched = kernels_launched(lambda: step(fast, x, dy))
    assert sum("attention_kernel" in name for name in launched) == 1, launched
    assert sum("attention_gradient_kernel" in name for name in launched) == 2, launched


class Cached(nn.Module):
    """Attention of one token to a cache that takes its key and value."""

    def __init__(self, heads, key_heads, length, width, dtype, repeats):
        super().__init__()
        self.repeats = repeats
        self.qkv = nn.Linear(256, (heads + 2 * key_heads) * width, dtype=dtype)
        self.sizes = heads, key_heads, width
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(2, key_heads, length, width, dtype=dtype))

    def forward(self, x, at, mask):
        heads, key_heads, width = self.sizes
        parts = self.qkv(x).view(2, 1, heads + 2 * key_heads, width).transpose(1, 2)
        query, key, value = parts.split([heads, key_heads, key_heads], 1)
        self.keys.index_copy_(2, at, key)
        self.values.index_copy_(2, at, value)
        if not self.repeats:
            return F.scaled_dot_product_attention(query, self.keys, self.values, mask, enable_gqa=heads > key_heads) * 2
        group, length = heads // key_heads, self.keys.shape[2]
        keys, values = (
            cache[:, :, None].expand(2, key_heads, group, length, width).reshape(2, heads, length, width)
            for cache in (self.keys, self.values)
        )
        return F.scaled_dot_product_attention(query, keys, values, mask) * 2


@torch.no_grad()
@pytest.mark.parametrize(("heads", "key_heads", "repeats"), [(4, 4, False), (8, 2, False), (8, 2, True)])
def test_a_token_attends_to_a_cache_by_one_kernel(heads, key_heads, repeats, monkeypatch):
    monkeypatch.setenv("FXFUSE_TUNE", "0")  # the first of our own
    torch.manual_seed(0)
    model = Cached(heads, key_heads, 700, 64, torch.bfloat16, repeats).eval().cuda()
    other = Cached(heads, key_heads, 700, 64, torch.bfloat16, repeats).eval().cuda()
    other.load_state_dict(model.state_dict())
    x = torch.randn(2, 1, 256, device="cuda", dtype=torch.bfloat16)
    at, places = torch.tensor([0], device="cuda"), torch.arange(700, device="cuda")
    fast = fxfuse.optimize(model, (x, at, (places <= 0)[None]))
    for token in range(6):
        args = torch.randn_like(x), torch.tensor([token], device="cuda"), (places <= token)[None]
        have, want = fast(*args), other(*args)
        assert torch.allclose(have.float(), want.float(), rtol=2e-2, atol=2e-2), token
    launched = kernels_launched(lambda: fast(*args))
    assert sum("attention_kernel" in name for name in launched) == 1
    assert len(launched) <= 4, launched  # the linear, the cache's, attention and what follows: nothing is repeated


class Attending(nn.Module):
    def forward(self, query, key, value, mask):
        return F.scaled_dot_product_attention(query, key, value, mask).relu()


@torch.no_grad()
def test_who_may_look_at_nothing_finds_nothing():
    query, key, value = (torch.randn(1, 2, size, 64, device="cuda") for size in (2, 300, 300))
    mask = torch.ones(2, 300, dtype=torch.bool, device="cuda")
    mask[0] = False
    model = Attending()
    fast = fxfuse.optimize(model, (query, key, value, mask))
    for _ in range(3):
        have = fast(query, key, value, mask)
    assert torch.allclose(have, model(query, key, value, mask), atol=1e-5)


def test_kinds_of_attention_that_are_asked_for_are_torchs():
    query, key, value = (torch.randn(1, 2, size, 64, device="cuda") for size in (1, 300, 300))
    expected = F.scaled_dot_product_attention(query, key, value)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attention.planned((query, key, value), {}, expected) is None
    assert attention.planned((query, key, value), {"dropout_p": 0.1}, expected) is None


# ------------------------------------------------------------------------------------------ written by hand


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chosen", ["what is quicker", "ours", *attention._OPERATORS.values()])
@pytest.mark.parametrize("name", by_hand.FOUND)
def test_attention_by_hand(name, chosen, dtype, monkeypatch):
    """By each of torch's operators that takes such tensors, by a kernel of ours, and as measured."""
    attention._if_quicker.cache_clear()
    if chosen != "what is quicker":

        def draft(problem, candidates):
            by_name = {candidate.name: candidate for candidate in candidates}
            ours = [candidate for candidate in candidates if candidate.name.startswith("attention ")]
            candidate = ours[0] if chosen == "ours" and ours else by_name.get(chosen, candidates[-1])
            return lambda: Plan(candidate.build(), candidate.name)

        monkeypatch.setattr(attention.tune, "draft", draft)
    forward, rows = by_hand.FOUND[name]
    model = by_hand.model_of(forward).to("cuda", dtype)
    args = [arg.cuda() for arg in by_hand.arguments(forward, rows, dtype)]
    by_hand.compared(model, *args, dtype=dtype)
    attention._if_quicker.cache_clear()
