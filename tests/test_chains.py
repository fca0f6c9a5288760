"""Chains: pointwise operations after what torch's library computes, or after nothing, as one pass.

Expected values come from torch in float64; results have eager's dtype, shape and strides.
"""

import copy
import itertools
import operator
import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers import Net, Net2, assert_as_eager, assert_same_kind, batch_norm, conv, epilogues, linear, randn, regions
from torch import nn

import fxfuse
from fxfuse import ops
from fxfuse.expression import parse
from fxfuse.plans import _meta
from fxfuse.problem import Problem, settle
from fxfuse.reference import evaluate

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
IN_PLACE = "library + one pass in place"
OUT_OF_PLACE = "library + one pass"
CHAIN = "pointwise chain"


def fused(model, *inputs, exact=True):
    """Optimises, compares with eager without gradients; inputs stay as they are. Returns the report's only region."""
    fast = fxfuse.optimize(model.eval())
    assert len(regions(fast)) == 1, f"{fxfuse.explain(fast)}\n{fast.code}"
    with torch.no_grad():
        assert_as_eager(model, fast, *inputs, exact=exact)
        kept = copy.deepcopy(inputs)
        for _ in range(2):  # then there is a program, whose sums may be others than those of torch's operators
            fast(*inputs)
        first, second = fast(*inputs), fast(*inputs)
    torch.testing.assert_close(inputs, kept, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    return regions(fast)[0]


def regions_of(model, *inputs):
    """The report's regions after comparing with eager."""
    fast = fxfuse.optimize(model.eval())
    with torch.no_grad():
        assert_as_eager(model, fast, *inputs)
    return regions(fast)


# ------------------------------------------------------------------------------- what torch's library computes


def after(operation, **members):
    """A model that runs two pointwise operations after `operation`(model, x)."""
    return Net(lambda m, x: torch.tanh(operation(m, x) * 0.5), **members)


def after2(operation):
    return Net2(lambda m, x, y: torch.tanh(operation(x, y) * 0.5))


def weight(*shape):
    return randn(*shape, seed=1)


LIBRARY = {
    "nn.Conv1d": ("conv1d", after(lambda m, x: m.c(x), c=nn.Conv1d(4, 6, 3, stride=2, padding=1)), (2, 4, 9)),
    "nn.Conv1d same": ("conv1d", after(lambda m, x: m.c(x), c=nn.Conv1d(4, 6, 3, padding="same")), (2, 4, 9)),
    "nn.Conv1d without bias": ("conv1d", after(lambda m, x: m.c(x), c=nn.Conv1d(4, 6, 3, bias=False)), (2, 4, 9)),
    "F.conv1d": ("conv1d", after(lambda m, x: F.conv1d(x, m.w, dilation=2), w=weight(6, 4, 3)), (2, 4, 9)),
    "aten.conv1d": ("conv1d", after(lambda m, x: torch.ops.aten.conv1d(x, m.w), w=weight(6, 4, 3)), (2, 4, 9)),
    "nn.Conv3d": ("conv3d", after(lambda m, x: m.c(x), c=nn.Conv3d(4, 6, 3, padding=1, groups=2)), (2, 4, 5, 6, 7)),
    "F.conv3d": ("conv3d", after(lambda m, x: F.conv3d(x, m.w), w=weight(6, 4, 3, 3, 3)), (2, 4, 5, 6, 7)),
    "nn.ConvTranspose1d": (
        "conv_transpose1d", after(lambda m, x: m.c(x), c=nn.ConvTranspose1d(4, 6, 3, 2, 1, 1)), (2, 4, 9),
    ),
    "nn.ConvTranspose2d": (
        "conv_transpose2d", after(lambda m, x: m.c(x), c=nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2)), (2, 4, 5, 6),
    ),
    "F.conv_transpose2d": (
        "conv_transpose2d", after(lambda m, x: F.conv_transpose2d(x, m.w), w=weight(4, 6, 3, 3)), (2, 4, 5, 6),
    ),
    "nn.ConvTranspose3d": (
        "conv_transpose3d", after(lambda m, x: m.c(x), c=nn.ConvTranspose3d(4, 6, 2, 2)), (2, 4, 3, 4, 5),
    ),
    "aten.convolution": (
        "convolution",
        after(lambda m, x: torch.ops.aten.convolution(x, m.w, None, [1], [1], [1], False, [0], 1), w=weight(6, 4, 3)),
        (2, 4, 9),
    ),
    "nn.LayerNorm": ("layer_norm", after(lambda m, x: m.l(x), l=nn.LayerNorm(8)), (3, 5, 8)),
    "nn.LayerNorm without affine": (
        "layer_norm", after(lambda m, x: m.l(x), l=nn.LayerNorm((5, 8), elementwise_affine=False)), (3, 5, 8),
    ),
    "F.layer_norm": ("layer_norm", after(lambda m, x: F.layer_norm(x, (8,), m.w), w=weight(8)), (3, 5, 8)),
    "nn.GroupNorm": ("group_norm", after(lambda m, x: m.l(x), l=nn.GroupNorm(2, 4)), (2, 4, 5, 6)),
    "F.group_norm": ("group_norm", after(lambda m, x: F.group_norm(x, 2), w=weight(4)), (2, 4, 5, 6)),
}  # fmt: skip


@pytest.mark.parametrize("name", LIBRARY)
def test_the_pass_overwrites_what_a_library_computed(name):
    kind, model, shape = LIBRARY[name]
    found = fused(model, randn(*shape))
    assert (found.anchor, found.epilogue, found.kernel) == (kind, "tanh(acc * 0.5)", IN_PLACE)
    assert len(found.nodes) == 3, "the operation and two that follow it"


PRODUCTS = {
    "torch.bmm": ("bmm", torch.bmm),
    "x.bmm": ("bmm", lambda x, y: x.bmm(y)),
    "aten.bmm": ("bmm", torch.ops.aten.bmm.default),
    "baddbmm": ("baddbmm", lambda x, y: torch.baddbmm(x, x, y, beta=0.5, alpha=2)),
    "x.baddbmm": ("baddbmm", lambda x, y: x.baddbmm(x, y)),
    "matmul": ("matmul", torch.matmul),
    "@": ("matmul", operator.matmul),
    "x.matmul": ("matmul", lambda x, y: x.matmul(y)),
    "of matrices": ("mm", lambda x, y: torch.mm(x[0], y[0])),
    "addmm": ("addmm", lambda x, y: torch.addmm(x[1], x[0], y[0])),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_activations(name):
    kind, product = PRODUCTS[name]
    found = fused(after2(product), randn(3, 8, 8), randn(3, 8, 8, seed=1))
    assert (found.anchor, found.kernel) == (kind, IN_PLACE)


@pytest.mark.parametrize("mask", [(7, 7), (3, 1, 1, 7), (3, 1, 7, 7), (1, 1, 7, 7), (3, 2, 7, 7), ()], ids=str)
def test_attention_scores(mask):
    def forward(m, q, k):
        return torch.matmul(q, k.transpose(-1, -2)) / 8.0**0.5 + m.mask

    model = Net2(forward, mask=randn(*mask))
    found = fused(model, randn(3, 2, 7, 8), randn(3, 2, 7, 8, seed=1))
    assert (found.anchor, found.kernel) == ("matmul", IN_PLACE)
    assert found.nodes == ("matmul", "truediv", "add")


POOLS = {
    "nn.MaxPool2d": Net(lambda m, x: (m.p(x) * 2).relu(), p=nn.MaxPool2d(2)),
    "one element": Net(lambda m, x: (m.p(x) * 2).relu(), p=nn.AvgPool2d(1)),
    "of the input's size": Net(lambda m, x: (m.p(x) * 2).relu(), p=nn.AdaptiveAvgPool2d((None, None))),
    "F.max_pool2d": Net(lambda m, x: (F.max_pool2d(x, 1) * 2).relu()),
    "F.avg_pool2d": Net(lambda m, x: (F.avg_pool2d(x, 2) * 2).relu()),
    "F.adaptive_avg_pool2d": Net(lambda m, x: (F.adaptive_avg_pool2d(x, (6, 6)) * 2).relu()),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", POOLS)
def test_what_pooling_returns_is_never_overwritten(name, layout):
    found = fused(POOLS[name], randn(2, 4, 6, 6).to(memory_format=layout))
    assert found.anchor.endswith("_pool") and found.kernel == OUT_OF_PLACE


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", ["nn.Conv1d", "nn.LayerNorm", "nn.GroupNorm", "nn.ConvTranspose2d"])
def test_dtypes(name, dtype):
    kind, model, shape = LIBRARY[name]
    found = fused(copy.deepcopy(model).to(dtype), randn(*shape).to(dtype))
    assert (found.anchor, found.kernel) == (kind, IN_PLACE)


@pytest.mark.parametrize("name", ["nn.ConvTranspose2d", "nn.GroupNorm"])
def test_results_in_channels_last(name):
    _, model, shape = LIBRARY[name]
    assert fused(model, randn(*shape).to(memory_format=torch.channels_last)).kernel == IN_PLACE


def test_another_dtype_takes_a_new_tensor():
    model = Net(lambda m, x: (m.l(x) * 2).tanh().to(torch.bfloat16), l=nn.LayerNorm(8))
    assert fused(model, randn(3, 8)).kernel == OUT_OF_PLACE


def test_an_operand_that_enlarges_the_result_takes_a_new_tensor():
    model = Net2(lambda m, x, y: (m.l(x) * y.relu()).tanh(), l=nn.LayerNorm(8))
    assert fused(model, randn(1, 8), randn(5, 8)).kernel == OUT_OF_PLACE


def test_one_operation_after_a_library_is_left_alone():
    fast = fxfuse.optimize(Net(lambda m, x: m.c(x).relu(), c=nn.Conv1d(4, 6, 3)).eval())
    (skipped,) = fxfuse.explain(fast).skipped
    assert not regions(fast) and skipped.node == "c" and "only 'relu' follows" in skipped.reason


ESCAPING = {
    "used elsewhere": lambda m, x: (lambda y: (y * 2).tanh() + y.mean(-1, keepdim=True))(m.c(x)),
    "returned": lambda m, x: (lambda y: ((y * 2).tanh(), y))(m.c(x)),
    "a view of it returned": lambda m, x: (lambda y: ((y * 2).tanh(), y[0]))(m.c(x)),
    "seen through a view": lambda m, x: (m.c(x).transpose(0, 1) * 2).tanh(),
    "nothing done": lambda m, x: (m.nothing(x) * 2).tanh(),
}


@pytest.mark.parametrize("name", ESCAPING)
def test_a_result_that_others_see_is_not_overwritten(name):
    members = {"c": nn.Conv1d(4, 4, 1), "nothing": nn.Dropout()}
    model = Net(ESCAPING[name], **members).eval()
    x = randn(2, 4, 9)
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        assert_as_eager(model, fast, x)
        assert_as_eager(model, fast, x)
    assert [(region.anchor, region.kernel) for region in regions(fast)] == [(CHAIN, "one pass")]
    assert torch.equal(x, randn(2, 4, 9))


def test_hooks_see_what_eager_shows_them():
    seen = []
    module = nn.Conv1d(4, 6, 3)
    module.register_forward_hook(lambda module, args, output: seen.append((output, output.clone())))
    model = after(lambda m, x: m.c(x), c=module)
    found = fused(model, randn(2, 4, 9))
    assert (found.anchor, found.kernel) == (CHAIN, "one pass")
    assert all(torch.equal(*pair) for pair in seen)


def test_a_hook_that_comes_later_changes_nothing():
    """A module whose result is overwritten is called as a function, as all that is fused is."""
    model = after(lambda m, x: m.c(x), c=nn.Conv1d(4, 6, 3)).eval()
    fast, seen = fxfuse.optimize(model), []
    model.c.register_forward_hook(lambda module, args, output: seen.append((output, output.clone())))
    with torch.no_grad():
        assert torch.equal(fast(randn(2, 4, 9)), fast(randn(2, 4, 9)))
    assert all(torch.equal(*pair) for pair in seen)


def test_padding_of_other_kinds_stays_a_module():
    model = after(lambda m, x: m.c(x), c=nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"))
    assert fused(model, randn(2, 4, 9)).anchor == CHAIN


def test_a_transposed_convolution_of_a_given_size_stays_a_module():
    model = after(lambda m, x: m.c(x, [10, 12]), c=nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1))
    assert fused(model, randn(2, 4, 5, 6)).anchor == CHAIN


def test_weights_are_read_anew():
    model = after(lambda m, x: m.c(x), c=nn.Conv1d(4, 6, 3)).eval()
    fast, x = fxfuse.optimize(model), randn(2, 4, 9)
    with torch.no_grad():
        fast(x)
        model.c.weight.mul_(2)
        assert_as_eager(model, fast, x)
    assert list(fast.state_dict()) == list(model.state_dict())


# ------------------------------------------------------------------------------------- chains without an anchor

CHAINS = {
    "swish": (Net(lambda m, x: torch.sigmoid(x) * x), "silu(acc)"),
    "sums and activations": (Net(lambda m, x: torch.relu(x + m.b) * 2, b=weight(8)), "relu(o0 + acc) * 2"),
    "gated halves": (Net(lambda m, x: F.gelu(x[..., :4]) * x[..., 4:]), "gelu(acc) * o0"),
    "gated chunks": (Net(lambda m, x: (lambda c: c[0] * torch.sigmoid(c[1]))(x.chunk(2, -1))), "o0 * sigmoid(acc)"),
    "both branches": (Net(lambda m, x: torch.tanh(x[0]) + torch.relu(x[1])), "tanh(acc) + relu(o0)"),
    "choice": (Net(lambda m, x: torch.where(x > 0, x.exp(), -x)), "where(acc > 0, exp(acc), -acc)"),
    "x is smaller": (Net(lambda m, x: (x.sum(-1, keepdim=True).sqrt() + x).tanh()), "tanh(sqrt(acc) + o0)"),
    "outer sum": (Net(lambda m, x: (x[:, :, None] + x[:, None]).tanh().exp()), "exp(tanh(acc + o0))"),
    "transposed": (Net(lambda m, x: (x.transpose(0, 2) * 2).relu()), "relu(acc * 2)"),
    "two orders": (Net(lambda m, x: (x @ x.mT + (x @ x.mT).mT * 2).relu().exp() - 1), None),
    "root mean square": (
        Net(lambda m, x: m.w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), w=weight(8)),
        "o0 * (o1 * rsqrt(acc + 1e-06))",
    ),
    "of parameters": (Net(lambda m, x: (m.w.exp() * 2 + m.b) @ x, w=weight(3, 8, 5), b=weight(5)), "exp(acc) * 2 + o0"),
    "batch norm": (
        Net(lambda m, x: m.bn(x[..., None]).relu(), bn=batch_norm(5)),
        "relu(batch_norm_2d(acc, o0, o1, o2, o3, 1e-05))",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_chains(name):
    model, epilogue = CHAINS[name]
    found = fused(model, randn(3, 5, 8))
    assert found.anchor in (CHAIN, "matmul")
    assert epilogue is None or found.epilogue == epilogue
    assert found.kernel is not None, found.fallback


def test_rotated_positions_of_one_sequence_take_no_copies():
    def forward(m, x):
        q = x.transpose(1, 2)
        half = torch.cat((-q[..., 4:], q[..., :4]), -1)
        return q * m.cos + half * m.sin

    model = Net(forward, cos=randn(1, 1, 5, 8), sin=randn(1, 1, 5, 8, seed=1))
    assert [region.kernel for region in regions_of(model, randn(1, 5, 3, 8))] == ["one pass"]


def test_copies_of_operands_are_reported():
    def forward(m, x):
        return (x.permute(3, 1, 0, 2).exp() * x.permute(0, 2, 1, 3) + x).tanh().abs()

    found = fused(Net(forward), randn(5, 5, 5, 5))
    assert found.kernel == "one pass, operands copied: 1"


def test_a_pass_that_takes_as_many_copies_as_it_saves_passes_is_not_made():
    def forward(m, x):
        return x.permute(3, 1, 0, 2) * x.permute(0, 2, 1, 3) + x

    found = fused(Net(forward), randn(5, 5, 5, 5))
    assert found.kernel is None and "copies beside the pass" in found.fallback


def test_the_longest_chain_is_taken_and_values_that_are_read_elsewhere_are_kept():
    def forward(m, x):
        y = torch.exp(x) + 1
        return y, (torch.sigmoid(x) * y + torch.tanh(x)).relu()

    fast = fxfuse.optimize(Net(forward))
    assert epilogues(fast) == ["exp(acc) + 1", "relu(sigmoid(acc) * o0 + tanh(acc))"]
    with torch.no_grad():
        assert_as_eager(Net(forward), fast, randn(3, 8))


def test_anchors_come_first():
    model = Net(lambda m, x: (torch.exp(x) * 2 + m.fc(x)).relu(), fc=linear())
    fast = fxfuse.optimize(model.eval())
    assert [(region.anchor, region.epilogue) for region in regions(fast)] == [
        (CHAIN, "exp(acc) * 2"), ("linear", "relu(o0 + acc)"),
    ]  # fmt: skip


def gate(m, x, y):
    return torch.sigmoid(m.c(x)) * y


CONSTANT = {
    # what a forward makes of a linear's result y, with the dtype of y; the epilogue
    "zeros_like": (
        lambda y, p: torch.where(y > p, y, torch.zeros_like(y)),
        "where(acc > o0, acc, full_like(acc, 0.0))",
    ),
    "ones_like": (lambda y, p: torch.ones_like(y) + y * p, "full_like(acc, 1.0) + acc * o0"),
    "full_like": (lambda y, p: torch.full_like(y, 2.5, requires_grad=False), "full_like(acc, 2.5)"),
    "of a value inside": (
        lambda y, p: torch.full_like(y.relu() * p, fill_value=True) - p,
        "full_like(relu(acc) * o0, 1.0) - o0",
    ),
    "of another dtype": (
        lambda y, p: torch.zeros_like(y, dtype=torch.bfloat16) + p,
        "bfloat16(full_like(acc, 0.0)) + o0",
    ),
    "new_full": (lambda y, p: torch.minimum(y, y.new_full((), 0.25)) + p, "minimum(acc, new_full(acc, 0, 0.25)) + o0"),
    "new_zeros": (lambda y, p: y.new_zeros(1) - y * p, "new_full(acc, 1, 0.0) - acc * o0"),
    "new_ones": (lambda y, p: y * p + y.new_ones(size=(1, 1)), "acc * o0 + new_full(acc, 2, 1.0)"),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_constants_like_a_value(name):
    forward, epilogue = CONSTANT[name]
    model = Net(lambda m, x: forward(m.fc(x), m.p), fc=linear(), p=randn(8)).eval()
    fast = fxfuse.optimize(model)
    assert epilogues(fast) == [epilogue], fxfuse.explain(fast)
    x = randn(5, 8)
    x[0], x[1] = torch.nan, torch.inf
    with torch.no_grad():
        assert_as_eager(model, fast, x)
    if name != "full_like":
        assert_as_eager(model, fast, x.requires_grad_())
    acc, others = torch.empty(5, 8, device="meta"), (torch.float32, torch.bfloat16, torch.float64)
    for dtype, other in itertools.product((torch.float32, torch.bfloat16), others):  # what promotes what
        found = evaluate(parse(epilogue), acc.to(dtype), [torch.empty(8, dtype=other, device="meta")])
        expected = forward(torch.ones(5, 8, dtype=dtype), torch.ones(8, dtype=other))
        assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())


NOT_CONSTANT = {
    "a size that the input has": lambda y: y.new_zeros(8) + y,
    "another layout": lambda y: torch.zeros_like(y, memory_format=torch.contiguous_format) + y * 2,
    "integers": lambda y: torch.zeros_like(y, dtype=torch.int32) + y,
    "a number that float16 does not hold": lambda y: torch.full_like(y, 1e6) + y,
    "a number that is not known": lambda y: torch.full_like(y, y.shape[0]) + y,
}


@pytest.mark.parametrize("name", NOT_CONSTANT)
def test_other_tensors_like_a_value_are_torchs(name):
    model = Net(lambda m, x: NOT_CONSTANT[name](m.fc(x)), fc=linear()).eval()
    fast = fxfuse.optimize(model)
    assert not any("_like(" in text or "new_" in text for text in epilogues(fast))
    with torch.no_grad():
        assert_as_eager(model, fast, randn(5, 8))


ENLARGED = {
    "a gate": (gate, "conv2d by torch + one pass + one operation of torch's"),
    "and more": (lambda m, x, y: (gate(m, x, y) + y).relu(), "conv2d by torch + one pass + one pass"),
    "at once": (lambda m, x, y: m.c(x) * y, "conv2d by torch + one operation of torch's"),
    "twice": (lambda m, x, y: (lambda z: z.exp() * y + z)(m.c(x)), "conv2d by torch + one pass"),
    "from both sides": (lambda m, x, y: m.c(x).exp() * y + m.c.weight.sum() * y, None),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ENLARGED)
def test_an_operand_that_enlarges_an_anchors_result_is_left_to_a_pass(name, layout):
    """Squeeze and excitation, for one."""
    forward, kernel = ENLARGED[name]
    x, y = (randn(2, 4, *size).to(memory_format=layout) for size in ((1, 1), (5, 6)))
    found = fused(Net2(forward, c=nn.Conv2d(4, 4, 1)), x, y)
    assert found.anchor == "conv2d" and found.fallback is None
    assert kernel is None or found.kernel == kernel


ALONE = {
    "several tensors joined": Net(lambda m, x: torch.cat(x.split(1) + x.split(2) + x.chunk(2))),
    "a tensor joined": Net(lambda m, x: torch.cat(x.split(1) + (x,) + x.split(2) + x.split(2))),  # noqa: RUF005
    "several tensors repeated": Net(lambda m, x: torch.stack(x.unbind(0) * 2 + x.unbind(0))),
    "one operation": Net(lambda m, x: x.relu()),
    "nothing but names": Net(lambda m, x: x.detach().contiguous()),
    "a comparison": Net(lambda m, x: x.exp() > 1),
    "sizes": Net(lambda m, x: x.view(x.size(0) * 2 + 1 - 1, -1)),
    "the input overwritten": Net(lambda m, x: x.add_(1).mul_(2)),
    "a name of the input overwritten": Net(lambda m, x: x.detach().add_(1).mul_(2)),
    "a view overwritten": Net(lambda m, x: x[0].add_(1).mul_(2)),
    "a buffer overwritten": Net(lambda m, x: x @ m.w.data.mul_(1).add_(0), w=weight(8, 8)),
}


@pytest.mark.parametrize("name", ALONE)
def test_is_left_alone(name):
    model = ALONE[name]
    fast = fxfuse.optimize(model)
    assert not regions(fast), fast.code
    with torch.no_grad():
        for _ in range(2):
            inputs = [randn(4, 8), randn(4, 8)]
            results = [call(x) for call, x in zip((model, fast), inputs, strict=True)]
            torch.testing.assert_close(*results)
            torch.testing.assert_close(*inputs)


OVERWRITING = {
    "what a library made": (lambda m, x: F.relu_(m.c(x).add_(m.b)).tanh(), "tanh(relu(assign(acc + o0, acc)))"),
    "what the chain made": (lambda m, x: (x * 2).add_(m.b).relu_(), "relu(assign(acc * 2 + o0, acc * 2))"),
    "augmented": (lambda m, x: operator.imul(operator.iadd(m.c(x), m.b), 2), "assign(acc + o0, acc) * 2"),
}


@pytest.mark.parametrize("name", OVERWRITING)
def test_operations_in_place(name):
    forward, epilogue = OVERWRITING[name]
    found = fused(Net(forward, c=nn.Conv1d(4, 4, 1), b=weight(4, 1)), randn(2, 4, 9))
    assert found.epilogue.replace("t0 = acc * 2; assign(t0 + o0, t0)", "assign(acc * 2 + o0, acc * 2)") or epilogue
    assert found.kernel is not None


def test_a_value_that_is_overwritten_while_others_read_it():
    def forward(m, x):
        y = m.c(x)
        z = y * 2
        y.add_(1)
        return z.relu() * y.tanh()

    model = Net(forward, c=nn.Conv1d(4, 4, 1)).eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        assert_as_eager(model, fast, randn(2, 4, 9))


def test_an_input_that_is_overwritten_on_the_way():
    def forward(m, x, y):
        z = torch.exp(x)
        x.add_(1)
        return z.relu() + y.tanh()

    model = Net2(forward).eval()
    fast, inputs = fxfuse.optimize(model), [[randn(3, 8), randn(3, 8)] for _ in range(2)]
    with torch.no_grad():
        torch.testing.assert_close(model(*inputs[0]), fast(*inputs[1]))
    torch.testing.assert_close(*inputs)


# ------------------------------------------------------------------------------------------- dtypes and devices


def test_integers_are_torchs_even_if_strict():
    model = Net(lambda m, x: torch.abs(x) * 2 + 1)
    fast = fxfuse.optimize(model, strict=True)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        x = torch.arange(5).to(dtype)
        torch.testing.assert_close(fast(x), model(x))
    assert "computes in torch." in regions(fast)[0].fallback


def test_other_numbers_are_torchs_and_strict_says_so():
    model = Net(lambda m, x: torch.exp(x) * 2)
    assert fused(model, randn(5).double()).kernel is None
    with pytest.raises(fxfuse.UnsupportedError, match="float64"), torch.no_grad():
        fxfuse.optimize(model, strict=True)(randn(5).double())
    x = torch.complex(randn(5), randn(5))
    torch.testing.assert_close(fxfuse.optimize(model)(x), model(x))


def test_masks_become_numbers():
    model = Net2(lambda m, x, mask: torch.relu(x) + (1.0 - mask.to(x.dtype)) * -1e4)
    for mask in (torch.tensor([True, False, True]), torch.tensor([1, 0, 1]), randn(3)):
        fast = fxfuse.optimize(model)
        with torch.no_grad():
            assert_as_eager(model, fast, randn(2, 3), mask, exact=False)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (1, 1, 1)], ids=str)
def test_shapes_without_much_in_them(shape):
    fused(Net(lambda m, x: torch.exp(x) * 2 + m.s, s=torch.tensor(1.5)), randn(*shape))


@pytest.mark.parametrize("number", [2.0, 3, True, torch.tensor(2.0), torch.tensor(2.0, dtype=torch.float64)], ids=str)
def test_numbers_given_as_arguments(number):
    fast = fxfuse.optimize(Net2(lambda m, x, s: (torch.exp(x) * (s * 2)).tanh()))
    with torch.no_grad():
        assert_as_eager(Net2(lambda m, x, s: (torch.exp(x) * (s * 2)).tanh()), fast, randn(3, 8), number, exact=False)


def test_arguments_that_may_be_numbers_are_no_chain():
    model = Net2(lambda m, x, s: (s * 2 + 1, x.relu()))
    fast = fxfuse.optimize(model)
    assert not regions(fast) and fast(randn(3), 2)[0] == 5


def layouts():
    """Tensors of one size and many layouts."""
    return [
        randn(3, 4, 5, 6),
        randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
        randn(5, 3, 6, 4).permute(1, 3, 0, 2),
        randn(3, 4, 5, 12)[..., ::2],
        randn(3, 1, 5, 1).expand(3, 4, 5, 6),
        randn(1, 4, 1, 6),
    ]


def unary_operations():
    for name in ops.names():
        row = ops.row(name)
        required = [value for value in row.params.values() if value is ops.REQUIRED]
        if len(required) == 1 and not row.boolean and name not in ("detach", "contiguous", "float16", "bfloat16"):
            yield name


@pytest.mark.parametrize("name", list(unary_operations()))
def test_results_are_laid_out_as_eagers(name):
    row = ops.row(name)
    others = [value for value in row.params.values() if value is not ops.REQUIRED]
    text = f"{name}({', '.join(['acc', *map(repr, others)])}) * o0"
    tensors = [x for x in layouts() if name != "logsigmoid" or x.is_contiguous()]
    for x, y in itertools.product(tensors, tensors):
        want, metas = row.reference(x, *others) * y, (_meta(x), _meta(y))
        problem = Problem("pointwise", (("overwrite", False),), text, metas[0], None, None, metas[1:])
        _, result = settle(problem, metas[0].empty())
        assert (result.shape, result.stride(), result.dtype) == (want.shape, want.stride(), want.dtype)


def test_results_of_every_layout():
    for x, y in itertools.product(layouts(), layouts()):
        have = fxfuse.functional.pointwise(x, None, None, [y], "tanh(acc) * o0 + 1", False)
        want = torch.tanh(x) * y + 1
        assert_same_kind(have, want)
        torch.testing.assert_close(have, want)


def test_other_strides_than_meta_tensors_have_are_torchs():
    x = randn(2, 4, 5, 6).to(memory_format=torch.channels_last)
    for model in (Net(lambda m, x: F.logsigmoid(x) * 2), Net(lambda m, x: F.logsigmoid(m.c(x)), c=conv())):
        assert "other strides" in fused(model, x).fallback


def test_casts_on_the_way():
    model = Net(lambda m, x: (x.to(torch.bfloat16) * 2).tanh().float())
    fast, x = fxfuse.optimize(model), randn(3, 8)
    torch.testing.assert_close(fast(x), torch.tanh(x.to(torch.bfloat16).double() * 2).float())
    assert epilogues(fast) == ["float32(tanh(bfloat16(acc) * 2))"] and regions(fast)[0].kernel == "one pass"


# -------------------------------------------------------------------------------------- everything else that is torch


class Attention(nn.Module):
    """Scores, a mask, a softmax, and a gate in the end."""

    def __init__(self):
        super().__init__()
        self.c = nn.Conv1d(8, 8, 3, padding=1)
        self.l = nn.LayerNorm(8)
        self.mask = nn.Parameter(randn(5, 5))

    def forward(self, x):
        y = F.gelu(self.c(x.mT)).mT * 0.5
        scores = torch.bmm(y, x.mT) / 3.0 + self.mask
        return torch.sigmoid(x) * (self.l(scores.softmax(-1) @ x) * 2 + x)


def test_gradients():
    model, x = Attention(), randn(2, 5, 8)
    fast = fxfuse.optimize(model)
    assert len(regions(fast)) == 2, fxfuse.explain(fast)
    for requires in (False, True):
        gradients = []
        for module in (model, fast):
            leaf = x.clone().requires_grad_(requires)
            model.zero_grad()
            module(leaf).sum().backward()
            gradients.append([leaf.grad, *(parameter.grad.clone() for parameter in model.parameters())])
        for have, want in zip(*gradients, strict=True):
            assert (have is None) == (want is None)
            if have is not None:
                torch.testing.assert_close(have, want)


def test_functional_transformations():
    model, x = Attention().eval(), randn(3, 2, 5, 8)
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(fast)(x), torch.vmap(model)(x))
        torch.testing.assert_close(*(torch.func.jvp(f, (x[0],), (x[1],)) for f in (fast, model)))


def test_autocast():
    model, x = Attention().eval(), randn(2, 5, 8)
    fast = fxfuse.optimize(model)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
            want, have = model(x), fast(x)
        assert_same_kind(have, want)
        torch.testing.assert_close(have, want, atol=0.02, rtol=0.02)


def test_inference_mode_and_other_modes():
    model, x = Attention().eval(), randn(2, 5, 8)
    fast = fxfuse.optimize(model)
    with torch.inference_mode():
        assert_as_eager(model, fast, x)
    with torch.no_grad(), torch.profiler.profile():
        have = fast(x)
    with torch.no_grad():
        torch.testing.assert_close(have, model(x))
        assert copy.deepcopy(fast)(x).equal(have) and pickle.loads(pickle.dumps(fast))(x).equal(have)


@pytest.mark.parametrize("dynamic", [False, True])
def test_dynamo(dynamic):
    torch.compiler.reset()
    before = set(fxfuse.compiled_graphs())
    model = Attention().eval()
    compiled = torch.compile(model, backend="fxfuse", dynamic=dynamic)
    with torch.no_grad():
        for _ in range(2):
            assert_as_eager(model, compiled, randn(2, 5, 8))
    (graph,) = set(fxfuse.compiled_graphs()) - before
    anchors = [region.anchor for region in regions(graph)]
    assert sorted(anchors) == ["bmm", "layer_norm"]
    torch.compiler.reset()


@pytest.mark.parametrize("decomposed", [False, True])
def test_programs_of_torch_export(decomposed):
    model, x = Attention().eval(), randn(2, 5, 8)
    program = torch.export.export(model, (x,))
    program = program.run_decompositions() if decomposed else program
    fast = fxfuse.optimize(program)
    if "native_layer_norm" not in str(program.graph):  # which torch 2.3 makes of it at once
        assert {"bmm", "layer_norm"} <= {region.anchor for region in regions(fast)}
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        torch.testing.assert_close(fast(x), model(x))


def test_an_optimised_model_is_compiled_and_exported():
    model, x = Attention().eval(), randn(2, 5, 8)
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(fast, backend="aot_eager", fullgraph=True)(x), model(x))
        exported = torch.export.export(fast, (x,))
        assert "fxfuse.pointwise" in str(exported.graph)
        torch.testing.assert_close(exported.module()(x), model(x))
    torch.compiler.reset()


def test_the_operator_leaves_its_argument_alone():
    x = randn(3, 8)
    want, kept = torch.tanh(x * 2), x.clone()
    torch.testing.assert_close(torch.ops.fxfuse.pointwise(x, None, None, [], "tanh(acc * 2)", True), want)
    assert x.equal(kept)
    assert fxfuse.functional.pointwise(x, None, None, [], "tanh(acc * 2)", True) is x, "the function may overwrite it"


def test_modes_decide_what_is_a_chain():
    model = Net(lambda m, x: m.d(m.l(x) * 2).relu(), l=nn.LayerNorm(8), d=nn.Dropout(0.5))
    fast = fxfuse.optimize(model)
    assert epilogues(fast) == []
    assert epilogues(fast.eval()) == ["relu(acc * 2)"]


def test_the_report():
    fast = fxfuse.optimize(Attention().eval())
    assert "(not called yet)" in str(fxfuse.explain(fast, verbose=True))
    with torch.no_grad():
        fast(randn(2, 5, 8))
    report = str(fxfuse.explain(fast, verbose=True))
    for text in ("2 regions fused", "bmm", "layer_norm", IN_PLACE, "acc / 3.0 + o0", "sigmoid(o0) * (acc * 2 + o0)"):
        assert text in report, report
    fast = fxfuse.optimize(Net(lambda m, x: x.exp() * 2))
    fast(randn(3))
    report = str(fxfuse.explain(fast, verbose=True))
    assert f" {CHAIN} " in report and " one pass " in report


def test_verification():
    model, x = Attention().eval(), randn(2, 5, 8)
    assert fxfuse.verify(model, fxfuse.optimize(model, (x,), strict=True), (x,)).ok


# ------------------------------------------------------------------------------------------- copies

COPIED = {
    "a clone of an argument": lambda m, x, y: x.clone().contiguous().detach().clone(),
    "a clone and nothing": lambda m, x, y: (x.clone() * 1.0).type_as(x),
    "products with one": lambda m, x, y: ((x * 1.0) * 1).detach(),
    "twice negated": lambda m, x, y: x.neg().neg().float(),
    "a clone, overwritten": lambda m, x, y: x.clone().mul_(2).add_(y),
    "a clone beside another": lambda m, x, y: x.clone() + y * 2,
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", COPIED)
def test_a_copy_is_in_memory_of_its_own_and_laid_out_as_eagers(name, grad):
    model = Net2(COPIED[name])
    fast = fxfuse.optimize(model)
    with torch.set_grad_enabled(grad):
        for x, y in itertools.product(layouts(), layouts()):
            x = x.expand(3, 4, 5, 6).requires_grad_(grad and x._base is None)
            result = assert_as_eager(model, fast, x, y.expand(3, 4, 5, 6))
            assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
            before = x.detach().clone()
            fast(x, y).detach().zero_()
            assert torch.equal(x, before)


BOUNDED = {
    "relu": (F.relu, 0.0),
    "relu6": (F.relu6, 0.0, 3.0),
    "hardtanh": (lambda x: F.hardtanh(x, -1.0, 4.0), -0.5, 2.0),
    "clamp": (lambda x: torch.clamp(x, -1.0, 4.0), -0.5, 2.0),
    "hardtanh of a clamp": (lambda x: F.hardtanh(torch.clamp(x, 0.0, 3.0), 0.0, 6.0), 0.0, 1.5),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_gradients_at_the_bounds_are_torchs(name):
    function, *places = BOUNDED[name]
    model = Net(lambda m, x: function(x * 2.0) * m.v, v=torch.tensor(1.5))
    fast, gradients = fxfuse.optimize(model), []
    assert len(regions(fast)) == 1
    for module in (model, fast):
        x = torch.tensor([*places, -7.0, 0.25, 9.0], requires_grad=True)
        module(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_a_clamp_by_a_tensor_has_the_gradient_of_a_clamp():
    """1 where the value is at its bound; that of maximum is half of it."""
    model = Net2(lambda m, x, y: torch.clamp(x, min=y) * torch.clamp(x, max=y) * torch.clamp(x, y, y))
    fast = fxfuse.optimize(model)
    gradients = []
    for module in (model, fast):
        x, y = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
        module(x, y).sum().backward()
        gradients.append((x.grad, y.grad))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


INTEGERS = {
    "a function": lambda m, x: (x + 0).sigmoid_() * 2,
    "a number": lambda m, x: (x + 0).add_(0.5) * 2,
    "a tensor": lambda m, x: (x + 0).mul_(torch.tensor([1.5])) * 2,
    "alpha": lambda m, x: torch.add(x, x, alpha=0.5) * 2,
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_overwritten_by_integers_alone(name):
    model = Net(INTEGERS[name])
    fast = fxfuse.optimize(model)
    for module in (model, fast):
        with pytest.raises(RuntimeError, match=r"can't be cast|must not be a floating"), torch.no_grad():
            module(torch.ones(4, dtype=torch.int64))


WRITTEN = {
    # at these values what simplifying drops decides on the gradient
    "relu of a clamp": (lambda m, x: torch.relu(x.clamp(0, 1)) * 2, [0.0, 0.5, 1.0]),
    "relu of a root": (lambda m, x: torch.relu(x.sqrt()) * 2, [0.0, 0.5, -1.0]),
    "the size of a clamp": (lambda m, x: torch.abs(x.clamp(0, 1)) * 2, [0.0, 0.5, -1.0]),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_gradients_are_those_of_the_model_as_it_is_written(name):
    forward, values = WRITTEN[name]
    model = Net(forward)
    fast = fxfuse.optimize(model)
    assert len(regions(fast)) == 1
    gradients = []
    for module in (model, fast, copy.deepcopy(fast)):
        x = torch.tensor(values, requires_grad=True)
        module(x).sum().backward()
        gradients.append(x.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=0, atol=0, equal_nan=True)


def test_what_a_model_overwrites_before_backward_is_an_error_as_in_eager():
    def forward(m, x):
        y = torch.relu(-F.logsigmoid(x))  # never below 0: as a kernel it is no relu
        y.mul_(2)
        return y + x

    model = Net(forward)
    for module in (model, fxfuse.optimize(model)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            module(torch.rand(4, requires_grad=True)).sum().backward()
