"""Every architecture that kernels are made for is offered kernels that fit it. No GPU is needed here."""

import dataclasses
import itertools
import math

import pytest
import torch

from fxfuse import build
from fxfuse.cuda import gemm_problem, plan
from fxfuse.cuda import prepare as prepared
from fxfuse.cuda.gpu import ARCHITECTURES
from fxfuse.problem import Problem, TensorMeta

CUDA = torch.device("cuda:0")
DTYPES = (torch.float32, torch.bfloat16)


def meta(*shape, dtype, channels_last=False, alignment=16):
    format_ = torch.channels_last if channels_last else torch.contiguous_format
    strides = torch.empty(shape, device="meta").to(memory_format=format_).stride()
    return TensorMeta(shape, strides, dtype, CUDA, alignment)


def linear(rows, features, depth, dtype, fp32="exact", alignment=16):
    x, weight = (meta(*shape, dtype=dtype, alignment=alignment) for shape in ((rows, depth), (features, depth)))
    return Problem("linear", (), "gelu(acc)", x, weight, None, (), fp32)


def conv2d(channels, filters, side, kernel, dtype, channels_last=False, groups=1, images=8):
    x = meta(images, channels, side, side, dtype=dtype, channels_last=channels_last)
    weight = meta(filters, channels // groups, kernel, kernel, dtype=dtype, channels_last=channels_last)
    sides = (kernel // 2, kernel // 2)
    options = (("stride", (1, 1)), ("padding", sides), ("dilation", (1, 1)), ("groups", groups))
    return Problem("conv2d", options, "relu(acc)", x, weight, None, ())


SIZES = ((1, 4096, 4096), (4, 4096, 4096), (16, 8192, 8192), (128, 512, 2048), (1024, 8192, 8192), (16384, 8, 4096))
IMAGES = (
    (8, 64, 128, 3), (64, 128, 56, 3), (64, 128, 57, 3), (3, 64, 224, 7), (64, 256, 56, 1), (512, 64, 7, 1),
    (512, 128, 9, 3),
)  # fmt: skip
PROBLEMS = {
    "linear": [linear(*sizes, dtype, fp32) for sizes in SIZES for dtype in DTYPES for fp32 in ("exact", "fast")],
    "unaligned": [linear(129, 257, 513, dtype, alignment=dtype.itemsize) for dtype in DTYPES],
    "conv2d": [conv2d(*sizes, dtype, last) for sizes, dtype, last in itertools.product(IMAGES, DTYPES, (False, True))],
    "depthwise": [
        conv2d(64, 64, 500, kernel, dtype, last, groups=64)
        for kernel, dtype, last in itertools.product((3, 5, 7, 9), DTYPES, (False, True))
    ],
    "one image": [conv2d(*sizes, torch.float32, images=1) for sizes in IMAGES],
}


@pytest.fixture(params=ARCHITECTURES, ids=lambda capability: "sm_{}{}".format(*capability))
def capability(request):
    return request.param


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("kind", PROBLEMS)
def test_kernels_fit_what_a_thread_block_has(kind, tf32, capability, ranked, monkeypatch):
    kernels = []

    def noted(problem, acc, *multiplied):
        family = prepare(problem, acc, *multiplied)

        def candidates(layout):
            kernels[:] = family.candidates(layout)
            return kernels

        return dataclasses.replace(family, candidates=candidates)

    prepare = prepared.prepare
    monkeypatch.setattr(plan, "prepare", noted)
    limit = ARCHITECTURES[capability].shared_memory_per_block_optin
    before = torch.backends.cuda.matmul.allow_tf32
    with torch.backends.cudnn.flags(allow_tf32=tf32):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            for problem in PROBLEMS[kind]:
                assert [candidate.name for candidate in ranked(problem, capability) if not candidate.always], problem
                assert kernels and all(kernel.shared <= limit for kernel in kernels), problem
                assert capability == (9, 0) or not any("Wgmma" in kernel.type for kernel in kernels)
                estimates = [kernel.estimate for kernel in kernels if kernel.estimate is not None]
                assert all(math.isfinite(estimate) for estimate in estimates)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


def test_the_products_of_large_tiles_are_left_to_gpus_that_have_room_for_them(ranked):
    problem = linear(1024, 8192, 8192, torch.bfloat16)
    large = {
        capability: any("128x256" in candidate.name for candidate in ranked(problem, capability))
        for capability in ARCHITECTURES
    }
    room = {capability: gpu.shared_memory_per_multiprocessor for capability, gpu in ARCHITECTURES.items()}
    assert large == {capability: of_multiprocessor > 128 << 10 for capability, of_multiprocessor in room.items()}


def test_where_torch_does_not_tell_a_block_has_all_but_what_cuda_takes():
    problem = gemm_problem.Problem(64, 64, 64, "bf16", "nk", 64, 64, 64)
    for architecture in ARCHITECTURES.values():
        of_multiprocessor = dataclasses.replace(problem, shared_memory=architecture.shared_memory_per_multiprocessor)
        assert of_multiprocessor.most_shared == architecture.shared_memory_per_block_optin


@pytest.mark.parametrize(
    ("capability", "code"), [((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100"), ((12, 1), "sm_121")]
)
def test_the_compiler_is_asked_for_the_architecture_at_hand(capability, code):
    assert build._flags(build.Source("", capability, ""))[-1].endswith(f"code={code}")
