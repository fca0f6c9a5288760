"""What kernels read and write lies within the tensors that they are given, whoever calls, and with whatever."""

import random

import pytest
import torch
import torch.nn.functional as F
from helpers import Net2, assert_as_eager, batch_norm, conv, linear, randn, regions
from torch import nn

import fxfuse
from fxfuse.problem import OPTION_NAMES, Problem, Refused, TensorMeta, anchor_meta, parsed, run_reference

TYPED = {
    "chain": (Net2(lambda m, x, y: torch.sigmoid(x * 2 + 1).type_as(y)), (3, 8)),
    "linear": (Net2(lambda m, x, y: torch.sigmoid(m.fc(x) * 2 + 1).type_as(y), fc=linear()), (3, 8)),
    "gated": (Net2(lambda m, x, y: (F.silu(m.a(x)) * m.b(x)).type_as(y) * 2, a=linear(), b=linear()), (3, 8)),
    "convolution": (Net2(lambda m, x, y: torch.sigmoid(m.c(x) * 2 + 1).type_as(y), c=conv()), (2, 4, 6, 6)),
    "in place": (
        Net2(lambda m, x, y: (x * 2).masked_fill_(x > 0, 0.5).type_as(y).contiguous()), (2, 4, 6, 6),
    ),
    "and broadcast": (Net2(lambda m, x, y: (x * 2 + 1).type_as(y) * m.v, v=randn(8)), (3, 8)),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", TYPED)
def test_a_tensor_of_which_only_the_dtype_counts_may_have_any_shape(name):
    model, shape = TYPED[name]
    fast = fxfuse.optimize(model.eval())
    assert len(regions(fast)) == (2 if name == "gated" else 1)
    for dtype in (torch.float32, torch.bfloat16):
        for like in ((), (0,), (1,), (5, 1, 7), (1, 8), shape):
            for x in (randn(*shape), randn(*shape).transpose(-1, -2).contiguous().transpose(-1, -2)):
                for _ in range(3):
                    assert_as_eager(model, fast, x, torch.zeros(like, dtype=dtype), exact=False)
    assert regions(fast)[0].kernel is not None


ROLES = {
    "a vector along channels and along columns": lambda m, x, y: F.prelu(m.c(x), y) + y,
    "a cast vector along channels": lambda m, x, y: F.prelu(m.c(x), y.bfloat16().float()) * 2,
    "channels computed": lambda m, x, y: F.prelu(m.c(x), y * 2 + 1) * 2,
    "channels and all": lambda m, x, y: F.prelu(m.c(x), y[:1]) + y[:1],
}


@torch.no_grad()
@pytest.mark.parametrize("name", ROLES)
def test_vectors_along_channels(name):
    """There are as many channels as columns, so that nothing but values can tell."""
    model = Net2(ROLES[name], c=nn.Conv2d(4, 8, 1)).eval()
    assert_as_eager(model, fxfuse.optimize(model), randn(2, 4, 3, 8), randn(8), exact=False)


_PLAIN = ([1, 1], [0, 0], [1, 1], 1)
_VOLUMES = ([1, 1, 1], [0, 0, 0], [1, 1, 1], 1)
REFUSED = {
    "a bias too short": ("conv2d", (randn(1, 4, 6, 6), randn(8, 4, 3, 3), randn(4)), _PLAIN),
    "a bias of two dimensions": ("conv2d", (randn(1, 4, 6, 6), randn(8, 4, 3, 3), randn(8, 1)), _PLAIN),
    "channels": ("conv2d", (randn(1, 3, 6, 6), randn(8, 4, 3, 3), None), _PLAIN),
    "channels of a volume": ("conv3d", (randn(1, 3, 4, 6, 6), randn(8, 4, 1, 3, 3), None), _VOLUMES),
    "planes": ("conv3d", (randn(1, 4, 1, 6, 6), randn(8, 4, 3, 1, 1), None), _VOLUMES),
    "a volume's negative padding": (
        "conv3d",
        (randn(1, 4, 4, 6, 6), randn(8, 4, 1, 3, 3), None),
        ([1, 1, 1], [0, -1, 0], [1, 1, 1], 1),
    ),
    "filters": ("conv2d", (randn(1, 4, 6, 6), randn(8, 4, 3), None), _PLAIN),
    "groups": ("conv2d", (randn(1, 6, 6, 6), randn(8, 2, 3, 3), None), ([1, 1], [0, 0], [1, 1], 3)),
    "no stride": ("conv2d", (randn(1, 4, 6, 6), randn(8, 4, 3, 3), None), ([0, 1], [0, 0], [1, 1], 1)),
    "no dilation": ("conv2d", (randn(1, 4, 6, 6), randn(8, 4, 3, 3), None), ([1, 1], [0, 0], [1, 0], 1)),
    "negative padding": ("conv2d", (randn(1, 4, 6, 6), randn(8, 4, 3, 3), None), ([1, 1], [0, -1], [1, 1], 1)),
    "rows": ("linear", (randn(3, 7), randn(5, 8), None), ()),
    "a long bias": ("linear", (randn(3, 8), randn(5, 8), randn(7)), ()),
    "columns": ("mm", (randn(3, 8), randn(7, 5), None), ()),
}


@torch.no_grad()
@pytest.mark.parametrize("name", REFUSED)
def test_an_operator_raises_what_torch_raises(name):
    kind, tensors, options = REFUSED[name]
    eager = {"conv2d": F.conv2d, "conv3d": F.conv3d, "linear": F.linear, "mm": lambda x, w, _: torch.mm(x, w)}[kind]
    with pytest.raises(RuntimeError) as expected:
        eager(*tensors, *options)
    with pytest.raises(RuntimeError) as found:
        getattr(torch.ops.fxfuse, kind)(*tensors, [], "relu(acc)", *options)
    assert str(found.value) == str(expected.value)
    metas = [None if tensor is None else TensorMeta.of(tensor, tensor.device) for tensor in tensors]
    named = tuple(zip(OPTION_NAMES[kind], map(_hashable, options), strict=True))
    with pytest.raises(Refused):  # wherever it is to run
        anchor_meta(Problem(kind, named, "relu(acc)", *metas, ()))


EPILOGUES = (
    "acc", "relu(acc)", "detach(acc)", "acc * o0 + 1.0", "type_as(sigmoid(acc * 2 + 1), o0)",
    "type_as(relu(o0), acc)", "prelu(acc, o0)", "prelu(acc, o0) + o0",
)  # fmt: skip


class Draw:
    """Arguments of the operators, most of them valid, in all layouts."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def size(self):
        return self.random.choice([0, 1, 1, 2, 3, 4, 4, 8])

    def near(self, shape):
        """The shape, or one that differs in a dimension."""
        shape = list(shape)
        if shape and self.random.random() < 0.05:
            shape[self.random.randrange(len(shape))] = self.size()
        return shape

    def tensor(self, shape):
        shape = list(shape)
        way = self.random.randrange(8)
        if way == 0:
            return randn(*(self.random.choice([1, size]) if size else 0 for size in shape)).expand(shape)
        if way == 1:
            return randn(*shape[::-1]).permute(list(reversed(range(len(shape)))))
        if way == 2:
            return randn(*(2 * size for size in shape))[tuple(slice(None, None, 2) for _ in shape)]
        if way == 3 and len(shape) == 4:
            return randn(*shape).to(memory_format=torch.channels_last)
        if way == 4:
            return randn(200).as_strided(shape, [self.random.randrange(4) for _ in shape])
        return randn(*shape).to(self.random.choice([torch.float32] * 9 + [torch.float64]))

    def call(self):
        """(kind, x, weight, bias, operands, epilogue, options)"""
        kind = self.random.choice(["linear", "mm", "conv2d", "layer_norm", "pointwise"])
        rows, depth, columns = self.size(), self.size(), self.size()
        weight = bias = None
        options = ()
        if kind == "conv2d":
            result = (2, 4, 3, self.random.choice([1, 4]))
            x, weight = self.tensor(self.near((2, 2, 3, result[3]))), self.tensor(self.near((4, 2, 1, 1)))
            bias, options = self.random.choice([None, self.tensor(self.near((4,)))]), ([1, 1], [0, 0], [1, 1], 1)
        elif kind in ("linear", "mm"):
            result = (rows, columns)
            shape = (columns, depth) if kind == "linear" else (depth, columns)
            x, weight = self.tensor(self.near((rows, depth))), self.tensor(self.near(shape))
            bias = self.tensor(self.near((columns,))) if kind == "linear" else None
        else:
            result = (rows, depth, columns)[self.random.randrange(3) :]
            x = self.tensor(result)
            options = (list(self.near(result[-1:])), 1e-5) if kind == "layer_norm" else (self.random.random() < 0.5,)
        beside = [result, result[1:], result[-1:], result[1:2], (), (1,) * len(result), (0,), (7, 3)]
        operands = [self.tensor(self.near(self.random.choice(beside))) for _ in range(self.random.choice([1, 1, 3]))]
        return kind, x, weight, bias, operands, self.random.choice(EPILOGUES), options


@torch.no_grad()
def test_operators_called_with_anything():
    """They give what torch gives, or raise what it raises, and change nothing that they are given."""
    succeeded = 0
    for seed in range(250):
        kind, x, weight, bias, operands, epilogue, options = Draw(seed).call()
        tensors = [tensor for tensor in (x, weight, bias, *operands) if tensor is not None]
        before, error = [tensor.clone() for tensor in tensors], None
        named = tuple(zip(OPTION_NAMES[kind], map(_hashable, options), strict=True))
        try:
            expected = run_reference(kind, named, parsed(epilogue), (), x, weight, bias, operands)
        except Exception as raised:
            error = raised
        if error is not None:
            with pytest.raises(type(error)):
                getattr(torch.ops.fxfuse, kind)(x, weight, bias, operands, epilogue, *options)
            continue
        result = getattr(torch.ops.fxfuse, kind)(x, weight, bias, operands, epilogue, *options)
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape), seed
        # of numbers in 16 bits torch rounds every intermediate result
        tolerance = 1e-4 if all(tensor.dtype == torch.float32 for tensor in tensors) else 5e-2
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True)), seed
        succeeded += 1
    assert succeeded > 100


def _hashable(value):
    return tuple(value) if isinstance(value, list) else value


@torch.no_grad()
def test_parameters_of_other_dtypes_are_refused_as_torch_refuses_them():
    model = Net2(lambda m, x, y: m.bn(m.c(x)) * 2, c=conv(), bn=batch_norm()).eval()
    model.bn.running_var = model.bn.running_var.bool()
    assert_as_eager(model, fxfuse.optimize(model), randn(1, 4, 6, 6), 1, raises=RuntimeError)
