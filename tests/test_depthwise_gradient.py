"""Gradients of depthwise filters: their kernel on an emulated GPU and on a GPU, and where there is none.

Expected values come from torch in float64.
"""

from dataclasses import replace

import pytest
import torch
from emulator import available, launch
from helpers import ON_GPU, kernels_launched

from fxfuse.cuda import conv2d_weight, depthwise_gradient, gpu, plan
from fxfuse.cuda.prepare import prepare
from fxfuse.cuda.region import Region
from fxfuse.expression import Acc
from fxfuse.problem import Problem, TensorMeta, anchor_meta

LAST = torch.channels_last
ERRORS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of the results' norm: sums are float32's, and results rounded to the elements' type."""
PRECISIONS = {torch.float32: "tf32", torch.float16: "fp16", torch.bfloat16: "bf16"}
SHAPES = [
    # images, channels, height and width, kernel, stride, padding
    (2, 32, 7, 7, 7, 1, 3),
    (1, 40, 12, 9, 7, 1, 3),  # a tile of channels that is no whole one
    (2, 33, 15, 16, 7, 2, 3),
    (3, 3, 11, 8, 5, 1, 2),
    (2, 8, 9, 13, 5, 2, 2),
    (5, 16, 10, 6, 3, 1, 1),
    (2, 20, 9, 11, 3, 2, 1),
    (1, 1, 5, 4, 3, 1, 0),  # one channel, no padding
    (2, 4, 3, 2, 5, 1, 4),  # more padding than the image has rows
]


def gradient(dy, x, kernel, stride, padding):
    """torch's."""
    channels = x.shape[1]
    weight = torch.empty(channels, 1, kernel, kernel, dtype=x.dtype, device=x.device)
    sizes = [[stride] * 2, [padding] * 2, [1, 1], False, [0, 0], channels]
    return torch.ops.aten.convolution_backward(dy, x, weight, None, *sizes, [False, True, False])[1]


def drawn(images, channels, height, width, kernel, stride, padding):
    """x and dy in channels_last, as parts of larger images."""
    out_height, out_width = ((side + 2 * padding - kernel) // stride + 1 for side in (height, width))
    torch.manual_seed(channels)
    x = torch.randn(images, channels, height + 1, width + 2).to(memory_format=LAST)[:, :, 1:, 2:]
    dy = torch.randn(images, channels, out_height + 2, out_width + 1).to(memory_format=LAST)[:, :, :-2, :-1]
    return dy, x


def described(dy, x, kernel, stride, padding, **device):
    channels = x.shape[1]
    return conv2d_weight.Problem(
        images=x.shape[0], filters=channels, channels=channels, size=tuple(x.shape[2:]), out_size=tuple(dy.shape[2:]),
        kernel=(kernel, kernel), stride=(stride, stride), padding=(padding, padding), dilation=(1, 1), groups=channels,
        precision=PRECISIONS[x.dtype], dy_strides=dy.stride(), x_strides=x.stride(), **device,
    )  # fmt: skip


@pytest.mark.skipif(not available(), reason="the emulation needs Linux and a g++ that knows _Float16")
@pytest.mark.parametrize("multiprocessors", [1, 5])
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_kernel_on_an_emulated_gpu(shape, dtype, multiprocessors):
    dy, x = (tensor.to(dtype) for tensor in drawn(*shape))
    kernel = shape[4]
    want = gradient(dy.double(), x.double(), *shape[4:])
    guard = 5
    memory = torch.full((x.shape[1] * kernel**2 + guard,), 99.0, dtype=dtype)
    made = depthwise_gradient.candidates(described(dy, x, *shape[4:], multiprocessors=multiprocessors))
    assert made
    for each in made:
        launch(each, "acc", (dy, x, memory[:-guard]))
        have = memory[:-guard].view_as(want).double()
        assert float((have - want).norm() / want.norm()) < ERRORS[dtype], each.name
        assert (memory[-guard:] == 99).all(), "writes outside its result"


@pytest.mark.skipif(not available(), reason="the emulation needs Linux and a g++ that knows _Float16")
def test_what_is_beside_an_image_meets_nothing():
    """Neither what lies behind its last column is multiplied, nor with zeros what is infinite."""
    dy, x = drawn(1, 8, 6, 8, 3, 1, 1)
    dy, x = dy[:, :, :, :-1].fill_(1.0), x.fill_(1.0)
    x[0, 3, 0, 7] = float("inf")  # the last column meets no dy but by the filter's last
    want = gradient(dy.double(), x.double()[..., :-1], 3, 1, 1)
    out = torch.empty(8, 1, 3, 3)
    for each in depthwise_gradient.candidates(replace(described(dy, x[..., :-1], 3, 1, 1), x_strides=x.stride())):
        launch(each, "acc", (dy, x, out))
        torch.testing.assert_close(out.double(), want)


def test_blocks_share_images_of_few_channels():
    dy, x = drawn(8, 64, 14, 14, 3, 1, 1)
    (few,) = depthwise_gradient.candidates(described(dy, x, 3, 1, 1, multiprocessors=2))
    (many,) = depthwise_gradient.candidates(described(dy, x, 3, 1, 1, multiprocessors=100))
    assert few.name.endswith("split 2")
    assert many.name.endswith("split 4")  # as many as have a row for every warp
    assert few.workspace < many.workspace


@pytest.mark.parametrize(
    "other",
    [
        {"kernel": (3, 5)}, {"stride": (1, 2)}, {"dilation": (1, 2)}, {"kernel": (9, 9)}, {"stride": (3, 3)},
        {"x_strides": (900, 100, 10, 1)}, {"dy_strides": (900, 100, 10, 1)}, {"images": 0},
    ],
)  # fmt: skip
def test_problems_without_a_kernel(other):
    dy, x = drawn(2, 8, 10, 10, 3, 1, 1)
    problem = described(dy, x, 3, 1, 1)
    assert depthwise_gradient.candidates(problem)
    assert not depthwise_gradient.candidates(replace(problem, **other))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize(
    "shape", [*SHAPES, (8, 96, 56, 56, 7, 1, 3), (16, 32, 112, 112, 3, 1, 1), (4, 144, 75, 75, 5, 2, 2)]
)
def test_a_gpus_kernel(shape, dtype, device):
    dy, x = (tensor.to(device, dtype) for tensor in drawn(*shape))
    kernel, stride, padding = shape[4:]
    sides = [(side, side) for side in (kernel, stride, padding, 1)]
    given = dict(zip(("kernel", "stride", "padding", "dilation"), sides, strict=True), groups=x.shape[1])
    metas = (TensorMeta.of(tensor, tensor.device) for tensor in (dy, x))
    problem = Problem("conv2d_weight", tuple(given.items()), "acc", *metas, None, ())
    acc = anchor_meta(problem)
    region = Region(problem, gpu.capability(dy.device), prepare(problem, acc), Acc(), dtype, frozenset())
    want = gradient(dy.double(), x.double(), kernel, stride, padding)
    found = plan._fused_candidates(region)
    assert found
    for candidate in found:
        run = candidate.build()
        for _ in range(2):  # the workspace holds what the first has left
            have = run(dy, x, None, ()).double()
            assert float((have - want).norm() / want.norm()) < ERRORS[dtype]
        assert len(kernels_launched(lambda run=run: run(dy, x, None, ()))) == 1
