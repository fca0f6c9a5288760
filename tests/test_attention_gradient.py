"""Gradients of attention: the kernel on an emulated GPU, and which problems it takes.

Expected values come from torch in float64.
"""

import dataclasses
import math

import pytest
import torch
from emulator import available, launch

from fxfuse.cuda import attention, attention_gradient, gpu
from fxfuse.cuda.stand_in import StandIn
from fxfuse.program import attention_training

ERRORS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Allowed errors, relative to the norm of a gradient."""


def described(query, key, value, out, dout, logs, made, is_causal=False, scale=0.3, mask=None):
    """The problem of these tensors; the mask's gradient is asked for if there are four to be made."""
    strides = (0, 0, 0, 0) if mask is None else mask.expand(*query.shape[:3], key.shape[2]).stride()
    batch, heads, queries, width = query.shape
    forward = attention.Problem(
        batch, heads, 1, queries, key.shape[2], width, query.dtype, None if mask is None else mask.dtype,
        *(tensor.stride()[:3] for tensor in (query, key, value, out)), strides, is_causal=is_causal, scale=scale,
    )  # fmt: skip
    return attention_gradient.Problem(
        forward, *(tensor.stride()[:3] for tensor in (dout, *made[:3])), logs.stride()[:2],
        made[3].stride()[:3] if len(made) > 3 else None,
    )  # fmt: skip


def exact(query, key, value, dout, is_causal, scale=0.3, mask=None):
    """The result, the logarithms of the softmax's sums, and the gradients, in float64.

    The last gradient is that of the mask, expanded to all queries and keys, if there is one.
    """
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    scores = leaves[0] @ leaves[1].transpose(2, 3) * scale
    if mask is not None:
        leaves.append(mask.double().expand(scores.shape).clone().requires_grad_())
        scores = scores + leaves[3]
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -math.inf)
    out = scores.softmax(-1) @ leaves[2]
    return out.detach(), scores.detach().logsumexp(-1), torch.autograd.grad(out, leaves, dout.double())


PROBLEMS = [
    # batch, heads, queries, keys, width, dtype, causal
    (2, 3, 49, 49, 32, torch.float32, False),
    (1, 2, 130, 77, 64, torch.float32, False),
    (1, 2, 100, 100, 64, torch.float32, True),
    (1, 1, 40, 90, 24, torch.float32, True),
    (2, 1, 90, 40, 8, torch.float32, True),
    (1, 1, 5, 3, 64, torch.float32, False),
    (1, 2, 150, 150, 64, torch.bfloat16, True),
    (2, 2, 70, 133, 40, torch.float16, False),
    (1, 1, 65, 65, 128, torch.bfloat16, False),
    (1, 1, 50, 70, 128, torch.float32, True),
]


@pytest.mark.skipif(not available(), reason="the emulation needs Linux and a g++ that knows _Float16")
@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_kernel_on_an_emulated_gpu(problem):
    batch, heads, queries, keys, width, dtype, is_causal = problem
    torch.manual_seed(0)
    query, dout = (torch.randn(batch, queries, heads, width).to(dtype).transpose(1, 2) for _ in range(2))
    key = torch.randn(batch, heads, keys + 3, width).to(dtype)[:, :, :keys]
    value = torch.randn(batch, heads, keys, width).to(dtype)
    out, logs, want = exact(query, key, value, dout, is_causal)
    out = out.to(dtype)
    padded = torch.full((batch, heads, queries + 5), math.inf)  # as torch's memory-efficient attention has them
    padded[..., :queries] = logs
    made = [torch.full((batch, size + 1, heads, width), 99.0, dtype=dtype) for size in (queries, keys, keys)]
    views = [tensor[:, :-1].transpose(1, 2) for tensor in made]
    kernels = attention_gradient.candidates(described(query, key, value, out, dout, padded, views, is_causal))
    assert kernels
    for kernel in kernels:
        launch(kernel, "acc", (query, key, value, out, padded, dout, *views))
        for name, have, expected, whole in zip(("dq", "dk", "dv"), views, want, made, strict=True):
            error = float((have.double() - expected).norm() / expected.norm())
            assert error < ERRORS[dtype], (kernel.name, name, error)
            assert (whole[:, -1] == 99).all(), "writes outside its result"


@pytest.mark.skipif(not available(), reason="the emulation needs Linux and a g++ that knows _Float16")
def test_infinite_gradients_do_as_in_eager():
    """Float32's products are computed in parts, of which an infinity has none."""
    torch.manual_seed(0)
    query, key, value, dout = (torch.randn(1, 2, 40, 32) for _ in range(4))
    dout[0, 0, 7, 5], dout[0, 1, 9, 3] = math.inf, math.nan
    value[0, 0, :, 5] = value[0, 0, :, 5].abs()  # products with an infinity have one sign
    out, logs, want = exact(query, key, value, dout, False)
    made = [torch.empty_like(query) for _ in want]
    logs = logs.float()
    (kernel,) = attention_gradient.candidates(described(query, key, value, out.float(), dout, logs, made))
    launch(kernel, "acc", (query, key, value, out.float(), logs, dout, *made))
    for have, expected in zip(made, want, strict=True):
        assert torch.equal(have.isfinite(), expected.isfinite())
        assert torch.where(expected.isfinite(), have - expected, 0).abs().max() < 1e-5
    assert [bool(expected.isfinite().any()) for expected in want] == [True, False, True]
    assert torch.equal(made[2].isinf(), want[2].isinf()) and made[2].isinf().any()


@pytest.mark.skipif(not available(), reason="the emulation needs Linux and a g++ that knows _Float16")
@pytest.mark.parametrize("is_learned", [False, True], ids=["given", "learned"])
@pytest.mark.parametrize(
    ("shape", "sizes", "dtype"),
    [
        ((1, 3, 49, 49), (2, 3, 49, 49, 32), torch.float32),  # a bias of windows
        ((2, 1, 1, 77), (2, 2, 40, 77, 64), torch.float32),  # padding
        ((2, 2, 70, 33), (2, 2, 70, 33, 40), torch.bfloat16),
    ],
)
def test_masks_of_numbers(shape, sizes, dtype, is_learned):
    batch, heads, queries, keys, width = sizes
    torch.manual_seed(0)
    query, dout = (torch.randn(batch, heads, queries, width).to(dtype) for _ in range(2))
    key, value = (torch.randn(batch, heads, keys, width).to(dtype) for _ in range(2))
    mask = torch.where(torch.rand(shape) < 0.3, -math.inf, torch.randn(shape)).to(dtype)
    mask[..., 0] = 1
    out, logs, want = exact(query, key, value, dout, False, mask=mask)
    out, logs = out.to(dtype), logs.float()
    made = [torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)]
    if is_learned:
        made.append(torch.full((batch, heads, queries, keys + 5), 99.0, dtype=dtype)[..., :keys])
    (kernel,) = attention_gradient.candidates(described(query, key, value, out, dout, logs, made, mask=mask))
    launch(kernel, "acc", (query, key, value, out, logs, dout, mask, *made))
    for have, expected in zip(made, want, strict=False):
        assert float((have.double() - expected).norm() / expected.norm()) < ERRORS[dtype]


@pytest.mark.skipif(not available(), reason="the emulation needs Linux and a g++ that knows _Float16")
def test_a_query_that_sees_nothing_has_no_gradient():
    torch.manual_seed(0)
    query, key, value, dout = (torch.randn(1, 1, 20, 16) for _ in range(4))
    mask = torch.zeros(1, 1, 20, 20)
    mask[:, :, 3] = -math.inf
    out, logs, made = torch.empty_like(query), torch.empty(1, 1, 32), [torch.empty_like(query) for _ in range(3)]
    of_mask = mask.stride()
    forward = attention.Problem(
        1, 1, 1, 20, 20, 16, torch.float32, torch.float32, *[query.stride()[:3]] * 4, of_mask, logs=32
    )
    (kernel,) = attention.candidates(forward)
    launch(kernel, "acc", (query, key, value, mask, out, logs), output=torch.float32)
    assert (out[:, :, 3] == 0).all() and logs[0, 0, 3] == math.inf
    (kernel,) = attention_gradient.candidates(described(query, key, value, out, dout, logs, made, mask=mask))
    launch(kernel, "acc", (query, key, value, out, logs, dout, mask, *made))
    assert all(gradient.isfinite().all() for gradient in made)
    assert (made[0][:, :, 3] == 0).all()


def test_problems_without_a_kernel():
    query = torch.empty(2, 4, 100, 64, dtype=torch.bfloat16)
    problem = described(*[query] * 5, torch.empty(2, 4, 100), [query] * 3)
    assert attention_gradient.candidates(problem)
    for other in ({"alignment": 8}, {"dout": (0, 0, 0), "alignment": 2}):
        assert not attention_gradient.candidates(dataclasses.replace(problem, **other)), other
    for other in (
        {"width": 60}, {"width": 256}, {"alignment": 8}, {"keys": 0}, {"group": 2},
        {"keys": 5000},  # torch's flash attention is quicker
        {"k": (100, 100, 65)},
    ):  # fmt: skip
        forward = dataclasses.replace(problem.forward, **other)
        assert not attention_gradient.candidates(dataclasses.replace(problem, forward=forward)), other


def _asked(name, queries=40, keys=40, dtype=torch.float32, heads=2, **given):
    """What a call of torch's operator asks for on an A100 that is only described."""
    q, out, dout = (StandIn(torch.zeros(1, queries, heads, 32, dtype=dtype)).transpose(1, 2) for _ in range(3))
    k, v = (StandIn(torch.zeros(1, keys, 2, 32, dtype=dtype)).transpose(1, 2) for _ in range(2))
    logs = StandIn(torch.zeros(1, heads, -(-queries // 32) * 32))
    number = StandIn(torch.zeros((), dtype=torch.int64))
    if name.endswith("backward"):
        args = {"grad_out_": dout, "query": q, "key": k, "value": v, "attn_bias": None, "out": out, "logsumexp": logs,
                "philox_seed": number, "philox_offset": number, "dropout_p": 0.0,
                "grad_input_mask": [True, True, True, False]}  # fmt: skip
        expected = q, k, v, None
    else:
        args = {"query": q, "key": k, "value": v, "attn_bias": None, "compute_log_sumexp": True}
        expected = out, logs, number, number
    operator = getattr(torch.ops.aten, name).default
    with gpu.instead_of(gpu.Standing(gpu.of_architecture("sm_80"), False)):
        return attention_training._asked(operator, (), args | given, expected, lambda tensor: 16)


@pytest.mark.parametrize("suffix", ["", "_backward"])
def test_which_calls_of_torchs_operators_have_kernels(suffix):
    name = f"_scaled_dot_product_efficient_attention{suffix}"
    asked = _asked(name)
    assert asked.kernels and asked.scale == pytest.approx(32**-0.5) and not asked.is_causal and asked.is_first
    assert _asked(name, is_causal=True).is_causal
    assert _asked(name, queries=70).kernels
    assert _asked(name, dropout_p=0.1) is None
    assert _asked(name, heads=4) is None
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert _asked(name) is None  # who asks for torch's kernel gets it


def test_causal_attention_to_other_lengths_is_torchs():
    """The operators differ in which keys they hide then."""
    name = "_scaled_dot_product_efficient_attention"
    assert _asked(name, is_causal=True).kernels
    assert _asked(name, queries=30, is_causal=True) is None


def test_torch_defines_the_logarithms_so():
    """What torch's attention keeps for its gradients: natural logarithms."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 6, 8) for _ in range(3))
    _, logs, _ = exact(query, key, value, query, False)
    _, have = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=0.3)
    assert torch.allclose(have.double(), logs)
