"""The fused operators on CPU: every operand, dtype and layout gives eager's result, by a kernel or with the reason."""

import operator
import warnings

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from helpers import (
    OPCHECK,
    Net,
    Net2,
    assert_as_close_as,
    assert_as_eager,
    assert_same_kind,
    batch_norm,
    conv,
    epilogues,
    linear,
    randn,
    regions,
)
from torch import nn
from torch.utils import _pytree as pytree

import fxfuse

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ALL_DTYPES = (
    *FLOATS, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32,
)  # fmt: skip


def fused(model, *inputs, exact=True, raises=None):
    """Optimises, compares with eager without gradients, and returns the report's only region."""
    fast = fxfuse.optimize(model.eval())
    assert len(regions(fast)) == 1, fxfuse.explain(fast)
    with torch.no_grad():
        assert_as_eager(model, fast, *inputs, exact=exact, raises=raises)
    return regions(fast)[0]


# --------------------------------------------------------------------------------------------- operands

LINEAR_OPERANDS = {
    "scalar tensor": lambda: torch.tensor(1.5),
    "one element": lambda: randn(1),
    "row": lambda: randn(8),
    "row with rank": lambda: randn(1, 1, 8),
    "column": lambda: randn(5, 1),
    "batch": lambda: randn(3, 1, 1),
    "batch and row": lambda: randn(3, 1, 8),
    "all ones": lambda: randn(1, 1, 1),
    "full": lambda: randn(3, 5, 8),
    "transposed": lambda: randn(3, 8, 5).transpose(1, 2),
    "batch innermost": lambda: randn(5, 8, 3).permute(2, 0, 1),
    "strided": lambda: randn(3, 5, 16)[..., ::2],
    "sliced rows": lambda: randn(3, 9, 8)[:, 2:7],
    "reversed by flip": lambda: randn(3, 5, 8).flip(-1),
    "expanded": lambda: randn(1, 5, 1).expand(3, 5, 8),
    "expanded scalar": lambda: torch.tensor(2.0).expand(8),
    "unaligned": lambda: randn(3 * 5 * 8 + 1)[1:].view(3, 5, 8),
    "enlarging in front": lambda: randn(2, 1, 1, 8),
    "nan and inf": lambda: torch.tensor([0.0, -0.0, 1.0, torch.inf, -torch.inf, torch.nan, 1e38, 1e-40]),
}


@pytest.mark.parametrize("name", LINEAR_OPERANDS)
def test_operands_of_a_linear(name):
    model = Net2(lambda m, x, y: (m.fc(x) * y - y).tanh(), fc=linear())
    found = fused(model, randn(3, 5, 8), LINEAR_OPERANDS[name]())
    assert found.kernel == "linear by torch + one pass", "the anchor alone, if an operand enlarges the result"


CONV_OPERANDS = {
    "scalar tensor": lambda: torch.tensor(1.5),
    "row": lambda: randn(5),
    "column": lambda: randn(6, 1),
    "channel": lambda: randn(8, 1, 1),
    "channel with rank": lambda: randn(1, 8, 1, 1),
    "image": lambda: randn(1, 1, 6, 5),
    "batch": lambda: randn(3, 1, 1, 1),
    "gate": lambda: randn(3, 8, 1, 1),
    "full": lambda: randn(3, 8, 6, 5),
    "channels last": lambda: randn(3, 8, 6, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: randn(3, 8, 5, 6).transpose(2, 3),
    "expanded": lambda: randn(1, 8, 1, 5).expand(3, 8, 6, 5),
    "rows and batch": lambda: randn(3, 1, 6, 1),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", CONV_OPERANDS)
def test_operands_of_a_convolution(name, layout):
    model = Net2(lambda m, x, y: (m.c(x) * y - y).tanh(), c=conv())
    found = fused(model, randn(3, 4, 8, 7).to(memory_format=layout), CONV_OPERANDS[name]())
    assert found.kernel is not None, found


@pytest.mark.parametrize("shape", [(), (8,)], ids=str)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_operands_of_every_dtype(dtype, shape):
    skip_unless_promoted(dtype)
    if dtype.is_floating_point:
        operand = randn(*shape).to(dtype)
    else:
        operand = torch.arange(7, 7 + max(1, torch.Size(shape).numel())).reshape(shape).to(dtype)
    for acc_dtype in FLOATS:
        model = Net2(lambda m, x, y: m.fc(x).tanh() * y, fc=linear()).to(acc_dtype)
        assert_reason_or_kernel(fused(model, randn(5, 8, dtype=acc_dtype), operand))


def assert_reason_or_kernel(region):
    assert (region.kernel is None) == (region.fallback is not None), region


WIDE = {
    "compared": lambda m, x, y: (lambda a: torch.where(a > y, a, 0.0))(m.fc(x)),
    "in place": lambda m, x, y: m.fc(x).add_(y),
    "then float": lambda m, x, y: (m.fc(x) * y).float(),
    "type_as": lambda m, x, y: (m.fc(x) + y).type_as(x),
    "chosen by": lambda m, x, y: torch.where(y > 2, m.fc(x), 1.0),
}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_vectors_whose_dtype_kernels_do_not_have(dtype, name):
    """The result is float32 all the same."""
    skip_unless_promoted(dtype)
    refused = refusal_to_compare(dtype) if name == "chosen by" else None
    y = (torch.arange(8) - 0.0).to(dtype)
    fused(Net2(WIDE[name], fc=linear()), randn(5, 8), y, exact=False, raises=refused)


def skip_unless_promoted(dtype):
    """Skips where torch computes nothing with both floats and this dtype: torch 2.3 with unsigned 16 to 64 bits."""
    try:
        torch.zeros(1) * torch.zeros(1, dtype=dtype)
    except RuntimeError as error:
        pytest.skip(f"torch {torch.__version__}: {error}")


def refusal_to_compare(dtype):
    """What torch raises, if it does: it compares most unsigned integers with floats, but not with numbers."""
    try:
        torch.zeros(1, dtype=dtype) > 2  # noqa: B015
    except RuntimeError as error:
        return type(error)
    return None


def test_numbers_given_as_arguments():
    model = Net2(lambda m, x, y: m.fc(x).tanh() * y, fc=linear())
    for number in (2.0, 3, True, float("inf"), torch.tensor(2.0, dtype=torch.float64)):
        fused(model, randn(5, 8), number)


# ---------------------------------------------------------------------------------------- kinds of value


def bools(y):
    return (y > 0) + (y < 0.5)


INTEGERS = {
    "a sum of comparisons": lambda m, x, y: (lambda a: bools(a) * a)(m.fc(x)),
    "a sum of comparisons and a number": lambda m, x, y: (lambda a: (bools(a) + 1) * a)(m.fc(x)),
    "a product of comparisons": lambda m, x, y: (lambda a: ((a > 0) * (a < 1)) * a)(m.fc(x)),
    "a difference to a comparison": lambda m, x, y: (lambda a: (1 - (a > 0) * 1) * a)(m.fc(x)),
    "a sum of counts": lambda m, x, y: (lambda a: ((a > 0) * 200 + (a < 1) * 100) * a)(m.fc(x)),
    "bytes that wrap around": lambda m, x, y: torch.where(m.fc(x) > 0, y, y) + (y + y) * 1.0,
    "bytes that wrap around inside": lambda m, x, y: (torch.where(m.fc(x) > 0, y, y - y) + y) * 1.5,
    "a rounding type_as": lambda m, x, y: m.fc(x).mul(10).type_as(y) * 0.5,
    "a rounding type_as of a half": lambda m, x, y: m.fc(x).mul(1e5).type_as(x.half()) * 0.5,
    "integers chosen": lambda m, x, y: torch.where(m.fc(x) > 0, 3, 4) / 2,
    "integers compared": lambda m, x, y: torch.where(torch.where(m.fc(x) > 0, 3, 4) == 3, x, 0.0),
    "a comparison clamped": lambda m, x, y: (m.fc(x) > 0).clamp(0, 1),
    "a comparison clamped to floats": lambda m, x, y: (m.fc(x) > 0).clamp(0.0, 1.0),
    "a comparison as a float": lambda m, x, y: (m.fc(x) > 0).float(),
    "a comparison squared": lambda m, x, y: (m.fc(x) > 0) ** 2 * 0.5,
    "a comparison's sigmoid": lambda m, x, y: (lambda b: b * torch.sigmoid(b))(m.fc(x) > 0) * x,
    "the same both ways": lambda m, x, y: torch.where(m.fc(x) > 0, m.v, m.v),
    "the same number both ways": lambda m, x, y: torch.where(m.fc(x) > 0, 2.0, 2.0),
    "the same number both ways, inside": lambda m, x, y: torch.minimum(torch.where(m.fc(x) > 0, 2.0, 2.0), x),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_intermediate_values_that_are_not_floats(name):
    model = Net2(INTEGERS[name], fc=linear(), v=randn(8)).eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        assert_as_eager(model, fast, randn(5, 8), torch.full((8,), 200, dtype=torch.uint8), exact=False)


def test_what_torch_runs_gets_all_operands():
    """Of one only the dtype counts; the others are not numbered anew where no kernel is chosen."""

    def forward(m, x):
        y = F.gelu(x)
        torch.ops.aten.relu(y)
        return F.logsigmoid(x * 0.5).type_as(y) + 1 + m.v

    model = Net(forward, v=torch.arange(6.0) + 10)
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for _ in range(4):
            assert_as_eager(model, fast, randn(3, 6, 6, 3).transpose(1, -1))
    (region,) = fxfuse.explain(fast).regions
    assert region.kernel is None and "other strides" in region.fallback


FUNCTIONS = {
    "lerp at infinity": lambda y: torch.lerp(y * torch.inf, y, 0.7),
    "lerp to the end": lambda y: torch.lerp(y * 1e8, y, 1.0),
    "softplus with a low threshold": lambda y: F.softplus(y.clamp(-1, 0.1), 1, 0).clamp(0, 0.5),
    "mish written out": lambda y: y * torch.tanh(F.softplus(y)),
    "silu written out": lambda y: y * torch.sigmoid(y),
    "a clamp with swapped bounds": lambda y: y.clamp(1, -1),
    "a clamp by tensors": lambda y: y.clamp(torch.tensor(-0.5), torch.tensor(0.5)),
    "a clamp with NaN": lambda y: y.clamp(float("nan"), 1.0),
    "a huge constant": lambda y: y * 1e39 - y * 1e300,
    "a tiny constant": lambda y: y * 1e-44 * 1e30,
    "a huge integer": lambda y: y + 10**18,
    "zero to the zero": lambda y: (y * 0) ** 0.0,
    "a negative base": lambda y: y**3.0 + y**2.5 + (-2.0) ** y,
    "divisions by zero": lambda y: y / 0 + 1 / (y * 0) - y / -0.0,
    "masked_fill": lambda y: y.masked_fill(y > 0.5, -torch.inf),
    "masked_fill_": lambda y: (lambda z: z.masked_fill_(z > 0.5, 7.0))(y * 1),
    "addcmul": lambda y: torch.addcmul(y, y, y, value=0.5),
    "threshold": lambda y: F.threshold(y, 0.1, -3.0),
    "hardtanh of relu6": lambda y: F.hardtanh(F.relu6(y * 5), 0, 3),
}


@pytest.mark.parametrize("special", [False, True], ids=["finite", "special"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_their_edges(name, special):
    model = Net2(lambda m, x, y: FUNCTIONS[name](m.fc(x) + y), fc=linear())
    values = torch.tensor([0.0, -0.0, 88.8, torch.inf, -torch.inf, torch.nan, 3e38, -1e-40])
    fused(model, randn(64, 8), values if special else torch.zeros(8))


# ----------------------------------------------------------------------------------------------- anchors


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(8,), (1, 8), (7, 8), (2, 3, 8), (2, 1, 3, 2, 8), (0, 8), (2, 0, 8)], ids=str)
def test_linear_inputs_of_every_rank(shape, dtype):
    for model in (
        Net(lambda m, x: F.silu(m.fc(x)) + m.v, fc=linear(), v=randn(8)),
        Net(lambda m, x: F.silu(x @ m.w) + m.v, w=randn(8, 5), v=randn(5)),
        Net(lambda m, x: F.silu(x @ m.w.t()), w=randn(5, 8)),
    ):
        fused(model.to(dtype), randn(*shape, dtype=dtype))


LAYOUTS = {
    "transposed": lambda: randn(8, 6).t(),
    "strided": lambda: randn(6, 16)[:, ::2],
    "expanded": lambda: randn(1, 8).expand(6, 8),
    "permuted": lambda: randn(8, 3, 6).permute(1, 2, 0),
    "sliced": lambda: randn(4, 9, 8)[:, 1:7],
    "unaligned": lambda: randn(49)[1:].view(6, 8),
    "negated lazily": lambda: torch.randn(6, 8, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_inputs_and_operands_of_every_layout(name):
    model = Net2(lambda m, x, y: torch.tanh(m.fc(x)) + y, fc=linear())
    x = LAYOUTS[name]()
    fused(model, x, torch.zeros(8))
    fused(model, torch.zeros_like(x), x)


CONVOLUTIONS = {
    "plain": {},
    "stride": {"stride": 2},
    "padding": {"padding": (1, 2)},
    "same": {"padding": "same"},
    "same, even kernel": {"kernel_size": (2, 4), "padding": "same", "dilation": (3, 1)},
    "valid": {"padding": "valid"},
    "dilation": {"dilation": 2},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4},
    "pointwise": {"kernel_size": 1},
    "no bias": {"bias": False},
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name, dtype):
    options = {"kernel_size": 3, **CONVOLUTIONS[name]}
    model = Net(lambda m, x: F.hardswish(m.c(x)) * m.v, c=nn.Conv2d(4, 8, **options), v=randn(8, 1, 1)).to(dtype)
    inputs = {
        "batched": randn(3, 4, 9, 10, dtype=dtype),
        "unbatched": randn(4, 9, 10, dtype=dtype),
        "channels last": randn(3, 4, 9, 10, dtype=dtype).to(memory_format=torch.channels_last),
        "one channels-last image": randn(1, 4, 9, 10, dtype=dtype).to(memory_format=torch.channels_last),
        "sliced": randn(3, 6, 9, 12, dtype=dtype)[:, 1:5, :, 1:11],
        "empty batch": randn(0, 4, 9, 10, dtype=dtype),
    }
    for x in inputs.values():
        fused(model, x)


def test_convolution_weights_in_channels_last():
    model = Net(lambda m, x: F.hardswish(m.c(x)) * m.v, c=conv(), v=randn(8, 1, 1)).to(
        memory_format=torch.channels_last
    )
    for x in (randn(3, 4, 9, 10), randn(1, 4, 9, 10), randn(4, 9, 10)):
        assert fused(model, x).kernel is not None


def test_batch_norm_and_prelu_follow_eager():
    image = randn(3, 4, 6, 6)
    assert fused(Net(lambda m, x: m.bn(m.c(x)).relu(), c=conv(), bn=batch_norm()), image).kernel is not None
    assert fused(Net(lambda m, x: m.p(m.c(x)), c=conv(), p=nn.PReLU(8)), image).kernel is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_batch_norm_in_float32_after_a_convolution_in_less(dtype):
    fused(Net(lambda m, x: m.bn(m.c(x)), c=conv().to(dtype), bn=batch_norm()), randn(3, 4, 6, 6, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fallbacks_are_as_close_as_eager(dtype):
    """With gradients enabled the torch reference runs."""
    model = Net(lambda m, x: m.bn(m.c(x)).relu(), c=conv(), bn=batch_norm()).to(dtype).eval()
    assert_as_eager(model, fxfuse.optimize(model), randn(3, 4, 16, 16, dtype=dtype))


CASTS = {
    "half to float": (torch.float16, lambda y: y.float() * 1.2345),
    "float to half": (torch.float32, lambda y: (y * 1.2345).half()),
    "float to half, large": (torch.float32, lambda y: (y * 1e5).half()),
    "float to bfloat16 and back": (torch.float32, lambda y: y.bfloat16().float() * 3),
    "half and back": (torch.float32, lambda y: (y * 1e5).half().float()),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts(name):
    dtype, function = CASTS[name]
    model = Net(lambda m, x: function(m.fc(x)), fc=linear()).to(dtype).eval()
    x = randn(16, 8, dtype=dtype)
    with torch.no_grad():
        expected, actual = model(x), fxfuse.optimize(model)(x)
        exact = function(model.fc(x)).double() if "back" in name else None
    assert_same_kind(actual, expected)
    if exact is None:
        torch.testing.assert_close(actual, expected)
    else:
        assert_as_close_as(actual, expected, exact)


# --------------------------------------------------------------------------------------------- gradients

DIFFERENTIABLE = {
    "linear": (Net2(lambda m, x, y: F.gelu(m.fc(x) * y + m.v), fc=linear(), v=randn(8)), (5, 8), (8,)),
    "matmul": (Net2(lambda m, x, y: F.mish(x @ m.w) - y, w=randn(8, 8)), (2, 5, 8), (5, 1)),
    "addmm": (Net2(lambda m, x, y: torch.addmm(y, x, m.w, alpha=2).tanh(), w=randn(8, 8)), (5, 8), (8,)),
    "detached": (Net2(lambda m, x, y: m.fc(x).detach() * y + y, fc=linear()), (5, 8), (8,)),
    "conv": (Net2(lambda m, x, y: F.elu(m.bn(m.c(x))) * y, c=conv(), bn=batch_norm()), (2, 4, 6, 6), (8, 1, 1)),
    "prelu": (Net2(lambda m, x, y: m.p(m.c(x)) + y, c=conv(), p=nn.PReLU(8)), (2, 4, 6, 6), (2, 8, 4, 4)),
    "clamped": (Net2(lambda m, x, y: (m.fc(x) * m.fc(x).sigmoid()).clamp(-0.1, 0.3) + y, fc=linear()), (5, 8), (1,)),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_eagers(name, training):
    model, *shapes = DIFFERENTIABLE[name]
    model = model.train(training)

    def gradients(call):
        inputs = [randn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
        tensors = [*inputs, *model.parameters()]
        result = call(*inputs)
        return torch.autograd.grad((result * result.detach().cos()).sum(), tensors, allow_unused=True)

    for actual, expected in zip(gradients(fxfuse.optimize(model)), gradients(model), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_gradients_of_complex_numbers_that_are_overwritten():
    model = Net(lambda m, x: F.silu(m.fc(x), inplace=True) * 2, fc=linear()).to(torch.complex64)
    x = randn(3, 8, dtype=torch.complex64)
    gradients = [
        torch.autograd.grad(call(x).abs().sum(), list(model.parameters())) for call in (fxfuse.optimize(model), model)
    ]
    torch.testing.assert_close(*gradients)


def test_second_derivatives():
    model = Net(lambda m, x: m.fc(x).tanh() * m.fc(x), fc=linear()).double()
    assert torch.autograd.gradgradcheck(fxfuse.optimize(model), (randn(2, 8, dtype=torch.float64, requires_grad=True),))


def tanh_model():
    return Net(lambda m, x: m.fc(x).tanh() + m.v, fc=linear(), v=randn(8)).eval().requires_grad_(False)


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda row: f(row).sum()))(x),
    "functional_call": lambda f, x: torch.func.functional_call(f, {"v": torch.ones(8)}, (x,)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms(name):
    model, x = tanh_model(), randn(3, 8)
    torch.testing.assert_close(TRANSFORMS[name](fxfuse.optimize(model), x), TRANSFORMS[name](model, x))


def test_forward_mode_derivatives():
    model, x = tanh_model(), randn(3, 8)

    def tangent(f):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent

    torch.testing.assert_close(tangent(fxfuse.optimize(model)), tangent(model))


def test_inference_mode():
    model = nn.Sequential(linear(), nn.ReLU()).eval()
    fast, x = fxfuse.optimize(model), randn(3, 8)
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), model(x))
        made_inside = fast(x)
    assert made_inside.is_inference()
    with torch.no_grad():
        torch.testing.assert_close(fast(made_inside), model(made_inside))


def test_results_without_gradients_require_none():
    fast = fxfuse.optimize(nn.Sequential(linear(), nn.ReLU()).eval())
    with torch.no_grad():
        assert not fast(randn(3, 8)).requires_grad
    assert fast(randn(3, 8)).requires_grad


AUTOCAST = {
    "linear": Net(lambda m, x: m.fc(x).relu() + m.v, fc=linear(), v=randn(8)),
    "pow": Net(lambda m, x: m.fc(x) ** 2, fc=linear()),
    "mish written out": Net(lambda m, x: (lambda y: y * torch.tanh(F.softplus(y)))(m.fc(x)), fc=linear()),
    "matmul": Net(lambda m, x: (x @ m.w).sigmoid(), w=randn(8, 8)),
    "batch norm": Net(lambda m, x: m.bn(m.c(x.view(-1, 4, 4, 4))), c=conv(), bn=batch_norm()),
    "prelu": Net(lambda m, x: m.p(m.c(x.view(-1, 4, 4, 4))), c=conv(), p=nn.PReLU(8)),
}


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_gives_eagers_dtypes(name):
    model = AUTOCAST[name].eval()
    fast, x = fxfuse.optimize(model), randn(16, 8)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
            expected, actual = model(x), fast(x)
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["linear", "matmul", "batch norm"])
def test_autocast_runs_kernels(name):
    fast = fxfuse.optimize(AUTOCAST[name].eval())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        fast(randn(16, 8))
    (region,) = fxfuse.explain(fast).regions
    assert region.kernel is not None and region.fallback is None


def channels_last(*shape):
    return randn(*shape).to(memory_format=torch.channels_last)


_X, _W, _B, _V = randn(3, 8), randn(5, 8), randn(5), randn(5)
_IMAGE, _FILTERS = randn(2, 4, 6, 6), randn(8, 4, 3, 3)
_CONV = ([1, 1], [0, 0], [1, 1], 1)
_VOLUME, _CONV3D = randn(2, 4, 3, 6, 6), ([1, 1, 1], [0, 0, 0], [1, 1, 1], 1)
OPERATORS = {
    "linear": ("linear", _X, _W, _B, [_V], "relu(acc) * o0"),
    "linear without a bias": ("linear", _X, _W, None, [_V], "relu(acc) * o0"),
    "linear of nothing": ("linear", _X[:0], _W, _B, [_V], "relu(acc) * o0"),
    "linear in float64": ("linear", _X.double(), _W.double(), None, [_V.double()], "relu(acc) * o0"),
    "linear, enlarged": ("linear", _X, _W, _B, [randn(2, 1, 1)], "relu(acc) * o0"),
    "gated_linear": ("gated_linear", _X, _W, None, [randn(5, 8)], "silu(o0) * acc"),
    "matmul": ("matmul", randn(2, 3, 8), _W.t(), None, [], "relu(acc)"),
    "mm": ("mm", _X, _W.t(), None, [], "relu(acc)"),
    "mm of an expanded matrix": ("mm", randn(1, 8).expand(3, 8), _W.t(), None, [], "relu(acc)"),
    "addmm": ("addmm", _X, _W.t(), _B, [], "relu(acc)", 0.5, 2.0),
    "bmm": ("bmm", randn(2, 3, 8), randn(2, 5, 8).mT, None, [randn(5)], "relu(acc) * o0"),
    "conv2d": ("conv2d", _IMAGE, _FILTERS, randn(8), [], "relu(acc)", *_CONV),
    "conv2d in channels_last": ("conv2d", channels_last(2, 4, 6, 6), _FILTERS, None, [], "relu(acc)", *_CONV),
    "conv2d, filters in channels_last": (
        "conv2d", _IMAGE, channels_last(8, 4, 3, 3), None, [], "relu(acc)", *_CONV,
    ),
    "conv2d and logsigmoid": ("conv2d", channels_last(2, 4, 6, 6), _FILTERS, None, [], "logsigmoid(acc)", *_CONV),
    "conv2d and masked_fill": (
        "conv2d", channels_last(2, 4, 6, 6), _FILTERS, None, [randn(4, 4) > 0], "masked_fill(acc, o0, 0.5)", *_CONV,
    ),
    "conv2d of one image": ("conv2d", _IMAGE[0], _FILTERS, None, [], "relu(acc)", *_CONV),
    "conv2d_weight": ("conv2d_weight", randn(2, 8, 4, 4), _IMAGE, None, [], "acc * 2", [3, 3], *_CONV),
    "conv2d_weight in channels_last": (
        "conv2d_weight", channels_last(2, 8, 6, 6), channels_last(2, 4, 6, 6), None, [], "acc", [1, 1], *_CONV,
    ),
    "conv3d": ("conv3d", _VOLUME, randn(8, 4, 1, 3, 3), randn(8), [], "relu(acc)", *_CONV3D),
    "conv3d in channels_last_3d": (
        "conv3d", _VOLUME.to(memory_format=torch.channels_last_3d), randn(8, 4, 3, 1, 1), None, [randn(8, 1, 1, 1)],
        "relu(acc + o0)", *_CONV3D,
    ),
    "conv3d of one volume": ("conv3d", _VOLUME[0], randn(8, 4, 3, 3, 3), None, [], "relu(acc)", *_CONV3D),
    "layer_norm": ("layer_norm", _X, randn(8), randn(8), [], "relu(acc)", [8], 1e-5),
    "layer_norm of columns": ("layer_norm", randn(8, 3).t(), None, None, [], "relu(acc)", [8], 1e-5),
    "pointwise": ("pointwise", _X, None, None, [randn(8)], "tanh(acc) * o0", False),
    "pointwise, overwriting": ("pointwise", _X, None, None, [randn(8)], "tanh(acc) * o0", True),
    "pointwise, nothing": ("pointwise", _X, None, None, [], "acc", False),
    "pointwise, a view": ("pointwise", randn(1, 8).expand(3, 8), None, None, [], "detach(acc)", False),
    "pointwise in other orders": ("pointwise", randn(4, 3).t(), None, None, [randn(3, 4)], "acc + o0", False),
}  # fmt: skip


@OPCHECK
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", OPERATORS)
def test_the_operators_pass_torchs_own_checks(name):
    kind, *arguments = OPERATORS[name]
    torch.library.opcheck(getattr(torch.ops.fxfuse, kind).default, tuple(arguments))


def test_compiled_and_exported():
    model = nn.Sequential(linear(), nn.Tanh()).eval().requires_grad_(False)
    fast, x = fxfuse.optimize(model), randn(3, 8)
    torch.testing.assert_close(torch.compile(fast, backend="aot_eager", fullgraph=True)(x), model(x))
    exported = torch.export.export(fast, (x,))
    assert any(node.target is torch.ops.fxfuse.linear.default for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(x), model(x))


# -------------------------------------------------------------------------------------- when things are wrong

WRONG_SHAPES = {
    "features": (Net(lambda m, x: m.fc(x).relu(), fc=linear()), (randn(3, 5),)),
    "no dimensions": (Net(lambda m, x: m.fc(x).relu(), fc=linear()), (torch.tensor(1.0),)),
    "channels": (Net(lambda m, x: m.c(x).relu(), c=conv()), (randn(1, 3, 8, 8),)),
    "too small an image": (Net(lambda m, x: m.c(x).relu(), c=conv()), (randn(1, 4, 2, 2),)),
    "conv of 2 dimensions": (Net(lambda m, x: m.c(x).relu(), c=conv()), (randn(4, 8),)),
    "batch norm of an unbatched image": (
        Net(lambda m, x: m.bn(m.c(x)), c=conv(), bn=batch_norm()), (randn(4, 8, 8),),
    ),
    "prelu of an unbatched image": (Net(lambda m, x: m.p(m.c(x)), c=conv(), p=nn.PReLU(8)), (randn(4, 8, 8),)),
    "operand": (Net2(lambda m, x, y: m.fc(x) + y, fc=linear()), (randn(3, 8), randn(7))),
    "in-place operand too large": (Net2(lambda m, x, y: m.fc(x).add_(y), fc=linear()), (randn(8), randn(3, 8))),
    "mm of 3 dimensions": (Net(lambda m, x: torch.mm(x, m.w).relu(), w=randn(8, 8)), (randn(2, 3, 8),)),
    "mm of 1 dimension": (Net(lambda m, x: x.mm(m.w).relu(), w=randn(8, 8)), (randn(8),)),
    "addmm's bias too large": (
        Net2(lambda m, x, y: torch.addmm(y, x, m.w), w=randn(8, 8)), (randn(3, 8), randn(2, 1, 8)),
    ),
    "strided 'same'": (
        Net(lambda m, x: F.conv2d(x, m.w, padding="same", stride=2).relu(), w=randn(8, 4, 3, 3)), (randn(1, 4, 8, 8),),
    ),
}  # fmt: skip

WRONG_TYPES = {
    "input's dtype": (Net(lambda m, x: m.fc(x).relu(), fc=linear()), (randn(3, 8, dtype=torch.float64),)),
    "integer input": (Net(lambda m, x: m.fc(x).relu(), fc=linear()), (torch.ones(3, 8, dtype=torch.int64),)),
    "mask of floats": (Net2(lambda m, x, y: m.fc(x).masked_fill(y, 0.0), fc=linear()), (randn(3, 8), randn(8))),
}


def assert_refused_alike(model, strict, inputs):
    fast = fxfuse.optimize(model.eval(), strict=strict)
    with torch.no_grad():
        for _ in range(2):
            assert_as_eager(model, fast, *inputs, raises=Exception)


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_shapes_that_torch_refuses_raise_what_torch_raises(name, strict):
    model, inputs = WRONG_SHAPES[name]
    assert_refused_alike(model, strict, inputs)


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_types_that_torch_refuses_raise_what_torch_raises(name):
    model, inputs = WRONG_TYPES[name]
    assert_refused_alike(model, False, inputs)


UNSUPPORTED = {
    "float64": (torch.float64, "float64"),
    "complex64": (torch.complex64, "complex64"),
}


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_dtypes_without_kernels(name, forget):
    dtype, reason = UNSUPPORTED[name]
    model = Net(lambda m, x: m.fc(x).tanh() * 2, fc=linear()).to(dtype).eval()
    fast, x = fxfuse.optimize(model), randn(3, 8).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=0, atol=0)
        assert reason in regions(fast)[0].fallback and regions(fast)[0].kernel is None
        with pytest.raises(fxfuse.UnsupportedError, match=rf"tanh\(acc\).*{reason}"):
            fxfuse.optimize(model, strict=True)(x)


EMPTY = {
    "enlarged": (Net2(lambda m, x, y: m.fc(x) + y, fc=linear()), (randn(0, 8), randn(3, 1, 8))),
    "integers": (Net(lambda m, x: torch.where(m.fc(x) > 0, 1, 2), fc=linear()), (randn(0, 8),)),
    "another dtype": (Net2(lambda m, x, y: m.fc(x) + y, fc=linear()), (randn(0, 8), randn(8, dtype=torch.float64))),
    "half": (Net(lambda m, x: m.fc(x).half(), fc=linear()), (randn(0, 8),)),
    "no features": (Net(lambda m, x: m.fc(x).relu(), fc=nn.Linear(8, 0)), (randn(3, 8),)),
    "nothing to sum": (Net(lambda m, x: m.fc(x).relu() + 1, fc=nn.Linear(0, 8)), (randn(3, 0),)),
    "channels last": (
        Net(lambda m, x: m.c(x).relu(), c=conv()), (randn(0, 4, 6, 6).to(memory_format=torch.channels_last),),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", EMPTY)
def test_empty_tensors(name):
    model, inputs = EMPTY[name]
    with torch.no_grad():
        assert_as_eager(model, fxfuse.optimize(model.eval()), *inputs)


OTHER_TENSORS = {
    "sparse": lambda: randn(5, 8).relu().to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([randn(3, 8), randn(5, 8)]),
    "jagged": lambda: torch.nested.nested_tensor([randn(3, 8), randn(5, 8)], layout=torch.jagged),
    "parameter": lambda: nn.Parameter(randn(5, 8)),
    "meta": lambda: randn(5, 8).to("meta"),
    "csr": lambda: randn(5, 8).relu().to_sparse_csr(),
}


GRAD_MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning", "ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_other_kinds_of_tensor(name, mode):
    model = Net(lambda m, x: m.fc(x).relu(), fc=linear()).eval()
    if name == "meta":
        model = model.to("meta")
    fast = fxfuse.optimize(model)
    with GRAD_MODES[mode]():
        x = OTHER_TENSORS[name]()
        expected, actual = model(x), fast(x)
    assert (type(actual), actual.layout, actual.device) == (type(expected), expected.layout, expected.device)
    if name in ("nested", "jagged"):
        actual, expected = actual.unbind(), expected.unbind()
    if name != "meta":
        torch.testing.assert_close(actual, expected)


OTHER_OPERANDS = {
    "negated lazily": lambda: torch.randn(5, 8, dtype=torch.complex64).conj().imag,
    "sparse": lambda: randn(5, 8).relu().to_sparse(),
    "meta": lambda: randn(5, 8).to("meta"),
}


@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("name", OTHER_OPERANDS)
def test_other_kinds_of_operand(name, mode):
    """As they are: `clone` would resolve what is lazy. The plan for an ordinary operand exists already."""
    model = Net2(lambda m, x, y: m.fc(x).tanh() * y, fc=linear()).eval()
    fast = fxfuse.optimize(model)
    with GRAD_MODES[mode]():
        x, y = randn(5, 8), OTHER_OPERANDS[name]()
        assert_as_eager(model, fast, x, randn(5, 8))
        if name == "meta":
            with pytest.raises(RuntimeError, match="meta"):
                fast(x, y)
            return
        actual, expected = fast(x, y), model(x, y)
    assert actual.layout == expected.layout
    torch.testing.assert_close(actual.to_dense(), expected.to_dense())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a_sparse_weight():
    model = Net(lambda m, x: m.fc(x).relu(), fc=linear()).eval()
    fast, x = fxfuse.optimize(model), randn(3, 8)
    with torch.no_grad():
        fast(x)
        model.fc.weight = nn.Parameter(model.fc.weight.to_sparse_csr())
        torch.testing.assert_close(fast(x), model(x))


class Wrapped(torch.Tensor):
    """A tensor that implements torch's operators, and no others, itself."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function.namespace != "aten":
            return NotImplemented
        args, kwargs = pytree.tree_map_only(cls, lambda wrapped: wrapped.inner, (args, kwargs or {}))
        return function(*args, **kwargs)


@pytest.mark.parametrize("mode", GRAD_MODES)
def test_a_weight_of_a_class_of_its_own(mode):
    model = Net2(lambda m, x, w: F.linear(x, w).relu()).eval()
    fast, x, weight = fxfuse.optimize(model), randn(3, 8), randn(8, 8)
    with GRAD_MODES[mode]():
        assert len(regions(fast)) == 1
        for call in (model, fast):
            torch.testing.assert_close(call(x, Wrapped(weight)), F.linear(x, weight).relu())


def test_the_functions_take_lists():
    """As torch.ops does."""
    image, kernel = randn(2, 4, 6, 6), randn(8, 4, 3, 3)
    result = fxfuse.functional.conv2d(image, kernel, None, [], "relu(acc)", [1, 1], [0, 0], [1, 1], 1)
    torch.testing.assert_close(result, F.conv2d(image, kernel).relu())


def test_an_unknown_operation_in_a_text_names_the_remedy():
    with pytest.raises(fxfuse.ExpressionError, match="register_pointwise"):
        torch.ops.fxfuse.linear(randn(3, 8), randn(5, 8), None, [], "unheard_of(acc)")


def test_unsupported_in_a_lenient_model_is_an_error_in_a_strict_one():
    model = Net(lambda m, x: m.fc(x).tanh() * 3, fc=linear()).double().eval()
    x = randn(3, 8, dtype=torch.float64)
    with torch.no_grad():
        fxfuse.optimize(model)(x)
        with pytest.raises(fxfuse.UnsupportedError):
            fxfuse.optimize(model, strict=True)(x)


# ---------------------------------------------------------------------------------------------- kernels

ONE_SOURCE = {
    "row": (Net(lambda m, x: m.fc(x).sin() + m.v, fc=linear(), v=randn(8)), lambda n: (randn(n, 8),)),
    "rank 3": (Net(lambda m, x: m.fc(x).sin() - m.v, fc=linear(), v=randn(8)), lambda n: (randn(n, 3, 8),)),
    "column": (Net2(lambda m, x, y: m.fc(x).sin() * y, fc=linear()), lambda n: (randn(n, 8), randn(n, 1))),
    "residual": (Net2(lambda m, x, y: m.fc(x).cos() * y, fc=linear()), lambda n: (randn(n, 8), randn(n, 8))),
    "channel": (Net(lambda m, x: m.c(x).sin() + m.v, c=conv(), v=randn(8, 1, 1)), lambda n: (randn(n, 4, 6, 6),)),
    "channel and residual": (
        Net2(lambda m, x, y: m.c(x).sin() + m.v - y, c=conv(), v=randn(8, 1, 1)),
        lambda n: (randn(n, 4, 6, 6), randn(n, 8, 4, 4)),
    ),
    "gate": (Net2(lambda m, x, y: m.c(x).cos() * y, c=conv()), lambda n: (randn(n, 4, 6, 6), randn(n, 8, 1, 1))),
    "batch norm": (Net(lambda m, x: m.bn(m.c(x)).cos(), c=conv(), bn=batch_norm()), lambda n: (randn(n, 4, 6, 6),)),
    "channels last": (
        Net(lambda m, x: m.c(x).cos() - m.v, c=conv(), v=randn(8, 1, 1)),
        lambda n: (randn(n, 4, 6, 6).to(memory_format=torch.channels_last),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_SOURCE)
def test_a_new_batch_size_compiles_nothing(name, sources, forget):
    model, inputs = ONE_SOURCE[name]
    fast = fxfuse.optimize(model.eval())
    with torch.no_grad():
        for batch in (4, 7, 1, 33, 0):
            assert_as_eager(model, fast, *inputs(batch))
    assert len(sources) == 1


def test_values_do_not_compile_anything(sources, forget):
    model = Net2(lambda m, x, y: m.fc(x).sin() * y, fc=linear()).eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for value in (1.0, 2.5, float("nan")):
            assert_as_eager(model, fast, randn(3, 8), torch.tensor(value))
    assert len(sources) == 1


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_results_and_every_number_of_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = Net2(lambda m, x, y: F.silu(m.fc(x)) * y + m.v, fc=linear(1025), v=randn(1025))
        assert fused(model, randn(331, 8), randn(331, 1)).kernel is not None
        model = Net2(lambda m, x, y: F.silu(m.c(x)) * m.v + y, c=conv(), v=randn(8, 1, 1))
        assert fused(model, randn(5, 4, 67, 71), randn(5, 8, 65, 69)).kernel is not None
    finally:
        torch.set_num_threads(before)


def test_warnings_are_not_errors_of_the_model():
    model = nn.Sequential(linear(), nn.ReLU()).eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        fxfuse.optimize(model)(randn(2, 8))


def test_operators_take_the_spelling_of_the_graph():
    """A fused node is an ordinary operator call that prints what it does."""
    fast = fxfuse.optimize(Net(lambda m, x: operator.mul(m.fc(x), 2).relu(), fc=linear()).eval())
    assert epilogues(fast) == ["relu(acc * 2)"]
    assert "fxfuse_functional_linear" in fast.code and "relu(acc * 2)" in fast.code


def test_nothing_is_left_of_what_was_fused():
    for model in (
        Net(lambda m, x: (x @ m.w.t()).relu(), w=randn(8, 8)),
        Net(lambda m, x: torch.addmm(m.v, x, m.w, beta=0).relu(), w=randn(8, 8), v=randn(8)),
        Net(lambda m, x: m.fc(x).clamp(m.lo, m.hi), fc=linear(), lo=randn(8), hi=randn(8)),
    ):
        fast = fxfuse.optimize(model.eval())
        assert all(node.users or node.op in ("output", "placeholder") for node in fast.graph.nodes), fast.code


# --------------------------------------------------------------------------------------- images of one pixel


@torch.no_grad()
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [1, 5])
def test_images_of_one_pixel_have_eagers_strides(size, memory_format, prepared):
    """Both layouts are the same memory; what follows (interpolation, concatenation) goes by the strides."""

    def forward(m, x):
        y = torch.relu(m.bn(m.conv(m.pool(x))))
        z = torch.tanh(m.conv2(y) * 2)
        return y, z, torch.sigmoid(y * 2 + 1), F.interpolate(y, scale_factor=3), torch.cat([y, z])

    model = Net(forward, pool=nn.AdaptiveAvgPool2d(1), conv=nn.Conv2d(4, 8, 1), bn=batch_norm(),
                conv2=nn.Conv2d(8, 8, 1)).eval()  # fmt: skip
    x = randn(2, 4, size, size).to(memory_format=memory_format)
    fast = fxfuse.optimize(model, (x,) if prepared else None)
    for _ in range(4):
        for have, want in zip(fast(x), model(x), strict=True):
            assert_same_kind(have, want)
