"""Max-pooling at the end of a convolution's region: where it joins, and that the result is eager's."""

import pytest
import torch
import torch.nn.functional as F
from helpers import Net, Net2, assert_as_eager, batch_norm, conv, linear, randn, regions
from torch import nn

import fxfuse
from fxfuse import functional
from fxfuse.pooling import MaxPool

JOINED = {
    "module": (lambda m, x: m.pool(torch.relu(m.conv(x))), nn.MaxPool2d(2), (2, 2, 2, 2, 0, 0, 0)),
    "of two numbers": (
        lambda m, x: m.pool(torch.relu(m.conv(x))), nn.MaxPool2d((3, 2), (1, 2), (1, 0), ceil_mode=True),
        (3, 2, 1, 2, 1, 0, 1),
    ),
    "function": (lambda m, x: F.max_pool2d(torch.relu(m.conv(x)), 3, 2, 1), None, (3, 3, 2, 2, 1, 1, 0)),
    "torch's function": (
        lambda m, x: torch.max_pool2d(torch.relu(m.conv(x)), [3], stride=[2]), None, (3, 3, 2, 2, 0, 0, 0)
    ),
    "operator": (
        lambda m, x: torch.ops.aten.max_pool2d(torch.relu(m.conv(x)), [2, 2], [2, 2]), None, (2, 2, 2, 2, 0, 0, 0)
    ),
    "keywords": (
        lambda m, x: F.max_pool2d(kernel_size=2, input=torch.relu(m.conv(x)), ceil_mode=True), None,
        (2, 2, 2, 2, 0, 0, 1),
    ),
}  # fmt: skip


def pools(fast):
    return [node.kwargs["pool"] for node in fast.graph.nodes if "pool" in node.kwargs]


@pytest.mark.parametrize("name", JOINED)
@torch.no_grad()
def test_pooling_joins_the_region(name):
    forward, module, pool = JOINED[name]
    model = Net(forward, conv=conv(), **({} if module is None else {"pool": module})).eval()
    fast = fxfuse.optimize(model)
    assert pools(fast) == [pool]
    (region,) = fxfuse.explain(fast).regions
    assert len(region.nodes) == 3 and str(MaxPool(*pool)) in region.epilogue
    for x in (randn(2, 4, 11, 12), randn(2, 4, 11, 12).to(memory_format=torch.channels_last), randn(4, 11, 12)):
        for _ in range(3):
            assert_as_eager(model, fast, x)
    assert "max_pool2d" in fxfuse.explain(fast).regions[0].kernel


def overwriting(m, x, y):
    z = m.conv(x) + y
    y.add_(1)
    return F.max_pool2d(z, 2)


APART = {
    "indices": lambda m, x, y: F.max_pool2d(torch.relu(m.conv(x)), 2, return_indices=True),
    "dilation": lambda m, x, y: F.max_pool2d(torch.relu(m.conv(x)), 2, dilation=2),
    "another user": lambda m, x, y: (z := torch.relu(m.conv(x)), F.max_pool2d(z, 2)),
    "after a linear": lambda m, x, y: F.max_pool2d(torch.relu(m.fc(x)), 2),
    "an operand is overwritten in between": overwriting,
    "too much padding": lambda m, x, y: F.max_pool2d(torch.relu(m.conv(x)), 2, padding=2),
    "a stride of 0": lambda m, x, y: F.max_pool2d(torch.relu(m.conv(x)), 2, stride=0),
    "a window that is computed": lambda m, x, y: F.max_pool2d(torch.relu(m.conv(x)), y.shape[0]),
}


@pytest.mark.parametrize("name", APART)
@torch.no_grad()
def test_pooling_stays_apart(name):
    model = Net2(APART[name], conv=conv(padding=1), fc=linear()).eval()
    fast = fxfuse.optimize(model)
    assert len(regions(fast)) == 1 and not pools(fast)
    refused = RuntimeError if name in ("too much padding", "a stride of 0") else None
    assert_as_eager(model, fast, randn(2, 4, 8, 8), randn(2, 8, 8, 8), raises=refused)


def test_pooling_with_hooks_stays_apart():
    model = nn.Sequential(conv(), nn.ReLU(), nn.MaxPool2d(2)).eval()
    model[2].register_forward_hook(lambda module, inputs, result: None)
    assert not pools(fxfuse.optimize(model))


def test_what_follows_the_pooling_is_a_region_of_its_own():
    model = Net(lambda m, x: torch.tanh(m.bn(m.pool(torch.relu(m.conv(x))))), conv=conv(), bn=batch_norm(),
                pool=nn.MaxPool2d(2)).eval()  # fmt: skip
    fast, x = fxfuse.optimize(model), randn(2, 4, 11, 12)
    report = fxfuse.explain(fast).regions
    assert [region.anchor for region in report] == ["conv2d", "pointwise chain"] and len(pools(fast)) == 1
    with torch.no_grad():
        assert_as_eager(model, fast, x)


def test_gradients_and_training():
    model = nn.Sequential(conv(), nn.ReLU(), nn.MaxPool2d(2))
    fast = fxfuse.optimize(model)
    x, y = (randn(2, 4, 11, 12).requires_grad_() for _ in range(2))
    model(x).square().sum().backward()
    expected = [x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
    model.zero_grad()
    fast(y).square().sum().backward()
    torch.testing.assert_close([y.grad, *(parameter.grad for parameter in model.parameters())], expected)


@torch.no_grad()
def test_the_operator_pools():
    x, weight, operands = randn(2, 4, 11, 12), randn(8, 4, 3, 3), [randn(8, 1, 1)]
    arguments = (x, weight, None, operands, "relu(acc + o0)", [1, 1], [0, 0], [1, 1], 1)
    want = F.max_pool2d(torch.relu(F.conv2d(x, weight) + operands[0]), 3, 2, 1)
    for call in (functional.conv2d, torch.ops.fxfuse.conv2d):
        torch.testing.assert_close(call(*arguments, pool=[3, 3, 2, 2, 1, 1, 0]), want)
    meta = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in arguments]
    meta[3] = [operands[0].to("meta")]
    assert torch.ops.fxfuse.conv2d(*meta, pool=[3, 3, 2, 2, 1, 1, 0]).shape == want.shape


@torch.no_grad()
def test_an_operand_that_enlarges_the_result():
    model = Net2(lambda m, x, y: F.max_pool2d(torch.relu(m.conv(x)) * y, 2), conv=conv()).eval()
    fast = fxfuse.optimize(model)
    assert len(pools(fast)) == 1
    assert_as_eager(model, fast, randn(1, 4, 8, 8), randn(3, 8, 6, 6))


@torch.no_grad()
def test_torch_compile_and_export():
    model, x = nn.Sequential(conv(), nn.ReLU(), nn.MaxPool2d(2)).eval(), randn(2, 4, 11, 12)
    fast = fxfuse.optimize(model)
    torch.testing.assert_close(torch.compile(fast, fullgraph=True)(x), model(x))
    torch.testing.assert_close(torch.export.export(fast, (x,)).module()(x), model(x))
    torch.testing.assert_close(torch.compile(model, backend="fxfuse")(x), model(x))
