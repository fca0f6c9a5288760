"""Results without torch's meta functions: whatever is known is what the meta functions say."""

import itertools
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxfuse
from fxfuse import ops, results
from fxfuse.layout import channels_last_strides, contiguous_strides
from fxfuse.problem import OPTION_NAMES, TensorMeta, run_anchor

SHAPES = [(4, 6), (2, 3, 4, 5), (2, 3, 4, 5, 6), (7,), (1, 4, 1), ()]
IMAGES = [(2, 3, 4, 5), (1, 3, 4, 5)]


def meta(shape, strides=None, dtype=torch.float32):
    return torch.empty_strided(shape, strides or contiguous_strides(shape), dtype=dtype, device="meta")


def assert_as_torchs(row, args):
    found = results.of_row(row, args)
    if found is None:
        return False
    expected = row.reference(*args)
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype), row.name
    return True


def layouts():
    """Tensors of one dtype that broadcast."""
    for shape in SHAPES:
        yield [meta(shape)] * 2
    for image in IMAGES:
        last = meta(image, channels_last_strides(image))
        for other in [image, (2, 3, 1, 1), (1, 3, 1, 1), (3, 1, 1), (), (2, 1, 1, 1), (5,), (4, 5), (3, 4, 5)]:
            yield [last, meta(other)]
            yield [meta(other), last]
            yield [meta(image), meta(other)]
        yield [last, last]
    yield [meta((4, 6)), meta((6, 4), (1, 6)).t()]
    yield [meta((4, 6), (1, 4)), meta((4, 6))]
    yield [meta((4, 6), (12, 2)), meta((4, 6), (12, 2))]
    yield [meta((4, 1)), meta((1, 6))]
    yield [meta((4, 1, 5)), meta((3, 1))]
    yield [meta((2, 1, 4, 5), (20, 1, 5, 1)), meta((2, 3, 4, 5))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name + end for name in sorted(results._OF_FLOATS) for end in ("", "_")])
def test_of_rows(name, dtype):
    row, known = ops.row(name), 0
    for pair in layouts():
        pair = [tensor.to(dtype) if tensor.dtype != dtype else tensor for tensor in pair]
        for count in range(1, min(2, len(row.params)) + 1):
            numbers = [0.5 + place for place in range(len(row.params) - count)]
            known += assert_as_torchs(row, [*pair[:count], *numbers])
            known += bool(numbers) and assert_as_torchs(row, [*numbers, *pair[:count]])
    assert known >= len(SHAPES)


def test_of_max_pools():
    known = 0
    for image, kernel, stride, padding in itertools.product(
        [(2, 3, 7, 9), (1, 3, 8, 5)], [(2, 2), (3, 2), (1, 1)], [(2, 2), (1, 2)], [(0, 0), (1, 1), (0, 1)]
    ):
        for strides in (contiguous_strides(image), channels_last_strides(image)):
            found = results.of_max_pool(meta(image, strides), kernel, stride, padding, False)
            if found is not None:
                expected = F.max_pool2d(meta(image, strides), kernel, stride, padding)
                assert (found.shape, found.stride()) == (expected.shape, expected.stride())
                known += 1
    assert known > 40


@pytest.mark.parametrize(
    ("image", "kernel", "stride", "padding", "ceil_mode"),
    [
        ((2, 3, 7, 9), (3, 3), (2, 2), (2, 2), False),
        ((2, 3, 2, 9), (3, 3), (2, 2), (0, 0), False),
        ((2, 3, 7, 9), (2, 2), (0, 2), (0, 0), False),
        ((3, 7, 9), (2, 2), (2, 2), (0, 0), False),
        ((2, 3, 7, 9), (2, 2), (2, 2), (0, 0), True),
    ],
)
def test_max_pools_that_torch_is_asked_about(image, kernel, stride, padding, ceil_mode):
    assert results.of_max_pool(meta(image), kernel, stride, padding, ceil_mode) is None


def test_what_torch_may_refuse_is_not_known():
    x = meta((2, 3))
    assert results.of_row(ops.row("add"), [x, meta((4,))]) is None
    assert results.of_row(ops.row("sub"), [x, True]) is None
    assert results.of_row(ops.row("add"), [x, meta((2, 3), dtype=torch.float16)]) is None
    assert results.of_row(ops.row("neg"), [meta((2, 3), dtype=torch.int64)]) is None
    assert results.of_row(ops.row("hardtanh"), [x, 1.0, -1.0]) is None
    assert results.of_row(ops.row("hardtanh"), [x, -1.0, 1.0]) is not None
    assert results.of_row(ops.row("clamp"), [x, x, 1.0]) is None
    assert results.of_row(ops.row("minimum"), [1.0, x]) is None
    assert results.of_row(ops.row("add_"), [meta((3,)), x]) is None
    assert results.of_row(ops.row("softshrink"), [x, -1.0]) is None
    assert results.of_row(ops.row("float16"), [x]) is None


def described(tensor):
    return None if tensor is None else TensorMeta.of(tensor, torch.device("cpu"))


def convolution(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    moved = len(weight) - 2
    options = {"stride": (stride,) * moved, "padding": (padding,) * moved, "dilation": (dilation,) * moved}
    return f"conv{moved}d", {**options, "groups": groups}, x, weight, bias


def of_filters(gradient, image, kernel, stride=1, padding=0, dilation=1, groups=1):
    sides = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    options = {name: (side, side) for name, side in sides.items()}
    return "conv2d_weight", {**options, "groups": groups}, gradient, image, None


ANCHORS = [
    *(
        convolution((2, 6, 9, 11), (8, 6 // groups, kernel, kernel), bias, stride, padding, dilation, groups)
        for kernel, stride, padding, dilation, groups, bias in itertools.product(
            (1, 3), (1, 2), (0, 2), (1, 2), (1, 2), (None, (8,))
        )
    ),
    convolution((2, 4, 5, 6, 7), (8, 4, 3, 3, 3), (8,), 2, 1),
    convolution((6, 9, 11), (8, 6, 3, 3)),  # no batch
    of_filters((2, 8, 9, 11), (2, 6, 9, 11), 3, padding=1),
    of_filters((2, 8, 4, 5), (2, 6, 9, 11), 3, 2, 1, 2, 2),
    ("linear", {}, (5, 6), (7, 6), (7,)),
    ("linear", {}, (2, 5, 6), (7, 6), None),
    ("linear", {}, (6,), (7, 6), (7,)),
    ("gated_linear", {}, (2, 5, 6), (7, 6), None),
    ("mm", {}, (5, 6), (6, 7), None),
    ("bmm", {}, (3, 5, 6), (3, 6, 7), None),
    ("matmul", {}, (5, 6), (6, 7), None),
    ("matmul", {}, (2, 3, 5, 6), (6, 7), None),
    ("addmm", {"beta": 1, "alpha": 2}, (5, 6), (6, 7), (7,)),
    ("addmm", {"beta": 1, "alpha": 1}, (5, 6), (6, 7), (5, 7)),
    ("addmm", {"beta": 1, "alpha": 1}, (5, 6), (6, 7), (5, 1)),
    ("layer_norm", {"normalized_shape": (5, 6), "eps": 1e-5}, (2, 5, 6), (5, 6), (5, 6)),
    ("layer_norm", {"normalized_shape": (6,), "eps": 1e-5}, (2, 5, 6), None, None),
]
REFUSED = [
    convolution((2, 6, 9, 11), (8, 5, 3, 3)),
    of_filters((2, 8, 9, 11), (2, 6, 9, 11), 3),
    of_filters((3, 8, 9, 11), (2, 6, 9, 11), 3, padding=1),
    of_filters((8, 9, 11), (6, 9, 11), 3, padding=1),
    ("linear", {}, (5, 6), (7, 5), None),
    ("linear", {}, (5, 6), (7, 6), (6,)),
    ("mm", {}, (5, 6), (5, 7), None),
    ("matmul", {}, (2, 5, 6), (5, 7), None),
    ("matmul", {}, (6,), (6, 7), None),  # not refused, but not known
    ("addmm", {"beta": 1, "alpha": 1}, (5, 6), (6, 7), (6,)),
    ("addmm", {"beta": 1, "alpha": 1}, (5, 6), (6, 7), (2, 5, 7)),
    ("bmm", {}, (3, 5, 6), (2, 6, 7), None),
    ("layer_norm", {"normalized_shape": (5,), "eps": 1e-5}, (2, 5, 6), (5,), (5,)),
    ("layer_norm", {"normalized_shape": (6,), "eps": 1e-5}, (2, 5, 6), (5,), None),
]


@pytest.mark.parametrize(("kind", "options", "x", "weight", "bias"), ANCHORS)
def test_of_anchors(kind, options, x, weight, bias):
    tensors = [None if shape is None else meta(shape) for shape in (x, weight, bias)]
    given = tuple((name, options[name]) for name in OPTION_NAMES[kind])
    found = results.of_anchor(kind, options, *map(described, tensors))
    expected = run_anchor(kind, given, *tensors)
    if len(x) == len(weight or x) - 1 and kind.startswith("conv"):
        assert found is None
    else:
        assert found == expected.shape
        assert kind.startswith("conv") or expected.stride() == contiguous_strides(found)
    tensors[0] = tensors[0].half()
    assert results.of_anchor(kind, options, *map(described, tensors)) == (None if weight else expected.shape)


@pytest.mark.parametrize(("kind", "options", "x", "weight", "bias"), REFUSED)
def test_anchors_that_torch_refuses_are_not_known(kind, options, x, weight, bias):
    tensors = [None if shape is None else meta(shape) for shape in (x, weight, bias)]
    assert results.of_anchor(kind, options, *map(described, tensors)) is None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.gate, self.last = nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1), nn.Linear(8, 16)
        self.rows = nn.LayerNorm(16)

    def forward(self, x):
        y = torch.relu(self.norm(self.first(x)))
        y = nn.functional.relu6(self.second(y))
        y = y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))
        y = self.rows(nn.functional.gelu(self.last(y.flatten(2).mean(-1))))
        return torch.softmax(y + 1.0, -1)


RUN = textwrap.dedent("""
    import sys
    import torch
    import torch.utils.checkpoint  # which imports sympy in torch 2.3
    before = set(sys.modules)
    import fxfuse
    fast, x = fxfuse.load(sys.argv[1]), torch.load(sys.argv[2])
    with torch.no_grad():
        for _ in range(3):
            y = fast(x["x"])
    print(sorted({"torch._dynamo", "torch._inductor", "sympy"} & (sys.modules.keys() - before)))
    torch.testing.assert_close(y.double(), x["y"], rtol=0, atol=1e-6)  # imports sympy
""")


def test_a_package_runs_without_torchs_compiler(tmp_path):
    """Its imports would take longer than all the rest."""
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(2, 3, 12, 12)
    fxfuse.save(fxfuse.optimize(model), tmp_path / "it.fxfuse", (x,))
    with torch.no_grad():
        torch.save({"x": x, "y": model.double()(x.double())}, tmp_path / "example.pt")
    command = [sys.executable, "-c", RUN, tmp_path / "it.fxfuse", tmp_path / "example.pt"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == "[]"
