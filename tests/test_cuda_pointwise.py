"""The CUDA pass over a library's result: how it is cut into runs, and on a GPU, its values on odd sizes and layouts.

Expected values come from torch in float64. Tests on the GPU are skipped without one of compute capability 8.0.
"""

import math
import re
import struct

import pytest
import torch
from helpers import gpu_tensor, relative_error

from fxfuse import build, layout
from fxfuse.cuda import codegen, pointwise
from fxfuse.expression import parse
from fxfuse.layout import Layout
from fxfuse.operands import plan_operands
from fxfuse.plans import _meta
from fxfuse.problem import channel_operands
from fxfuse.reference import evaluate

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs an sm_80 GPU"
)


def cut(kernel):
    match = re.fullmatch(r"Pointwise<\w+, \{output\}, \{epilogue\}, (\d+), Runs::(\w+)>", kernel.type)
    assert match, kernel.type
    return int(match[1]), match[2]


def dense(batch, row, col):
    return Layout((batch, row, col), ((row * col, col, 1),))


@pytest.mark.parametrize(
    ("seen", "acc", "output", "alignment", "expected"),
    [
        (dense(1, 1, 4096), torch.float32, torch.float32, 16, (4, "kAligned")),
        (dense(1, 1, 4096), torch.bfloat16, torch.bfloat16, 16, (8, "kAligned")),
        (dense(1, 1, 4096), torch.bfloat16, torch.float32, 16, (4, "kAligned")),
        (dense(1, 1, 4097), torch.float32, torch.float16, 16, (8, "kAligned")),
        (dense(1, 1, 4096), torch.bfloat16, torch.bfloat16, 4, (2, "kAligned")),
        (dense(1, 1, 4096), torch.bfloat16, torch.bfloat16, 2, (1, "kAligned")),
        (dense(1, 1024, 8192), torch.bfloat16, torch.bfloat16, 16, (8, "kWhole")),
        (dense(2, 64, 49), torch.bfloat16, torch.bfloat16, 16, (8, "kStraddling")),
        (dense(2, 64, 49), torch.bfloat16, torch.bfloat16, 8, (4, "kStraddling")),
        (dense(2, 64, 4), torch.bfloat16, torch.bfloat16, 16, (4, "kWhole")),
        (dense(2, 64, 5), torch.bfloat16, torch.bfloat16, 16, (4, "kStraddling")),
        (dense(2, 64, 3), torch.float32, torch.float32, 16, (2, "kStraddling")),
        (dense(2, 1, 49), torch.float32, torch.float32, 16, (4, "kStraddling")),
        (Layout((1, 64, 49), ((0, 56, 1),)), torch.bfloat16, torch.bfloat16, 16, (8, "kAligned")),
        (Layout((1, 64, 49), ((0, 50, 1),)), torch.bfloat16, torch.bfloat16, 16, (2, "kAligned")),
        (Layout((3, 64, 48), ((64 * 48 + 4, 48, 1),)), torch.bfloat16, torch.bfloat16, 16, (4, "kWhole")),
        (dense(3, 2**30 + 1, 7), torch.bfloat16, torch.bfloat16, 16, (1, "kWhole")),
        (dense(2**30, 3, 3), torch.float32, torch.float32, 16, (2, "kStraddling")),
    ],
)
def test_runs_are_as_long_as_alignment_allows(seen, acc, output, alignment, expected):
    assert cut(pointwise.kernel(seen, acc, output, alignment)) == expected


def test_sizes_are_arguments_of_the_same_kernel():
    kernels = [pointwise.kernel(dense(1, rows, 768), torch.float32, torch.float32) for rows in (2, 77, 4096)]
    assert len({kernel.type for kernel in kernels}) == 1


def test_params_are_the_problem_struct():
    kernel = pointwise.kernel(Layout((2, 3, 40), ((200, 56, 1),)), torch.float32, torch.float32)
    assert struct.unpack("<5q", kernel.params) == (2, 3, 40, 200, 56)


@pytest.mark.parametrize(
    ("seen", "strides", "dtype", "alignment", "expected"),
    [
        (dense(8, 64, 3136), (64 * 3136, 64), torch.float32, 16, "16, 32, 64"),
        (dense(8, 64, 3136), (64 * 3136, 64), torch.bfloat16, 16, "16, 64, 64"),
        (dense(8, 49, 512), (49 * 512, 49), torch.float32, 16, "4, 32, 64"),  # planes of 49: not 16 bytes apart
        (dense(8, 49, 512), (49 * 512, 49), torch.bfloat16, 16, "2, 64, 32"),
        (dense(8, 64, 3136), (64 * 3136, 64), torch.float32, 8, "8, 32, 64"),
        (dense(512, 9, 512), (9 * 512, 9), torch.float32, 16, "4, 16, 128"),  # filters
        (dense(1, 64, 3136), (7, 64), torch.float32, 16, "16, 32, 64"),  # one batch: its distance does not matter
    ],
)
def test_transposed_runs_are_as_long_as_alignment_allows(seen, strides, dtype, alignment, expected):
    kernel = pointwise.transposed_kernel(seen, strides, dtype, dtype, alignment)
    assert kernel.type.endswith(f"{{output}}, {{epilogue}}, {expected}>")
    batch, row, col = seen.sizes
    assert struct.unpack("<7q", kernel.params) == (batch, row, col, *strides, row * col, col)


def test_whole_planes_are_turned_where_nothing_varies_within_and_all_is_aligned():
    def fits(batch, row, col, dtype=torch.float32, acc=None, strides=None, operands=(), output=None):
        layout = Layout((batch, row, col), (strides or (row * col, col, 1), *operands))
        kernel = pointwise.planes_kernel(layout, acc or (row * col, row), dtype, output or dtype)
        return kernel is not None

    assert fits(8, 512, 49) and fits(8, 512, 196, torch.bfloat16) and fits(8, 64, 256, operands=[(0, 1, 0), (64, 1, 0)])
    assert not fits(8, 64, 257) and not fits(8, 64, 129, torch.bfloat16, output=torch.float32)
    assert not fits(8, 64, 49, operands=[(64 * 49, 49, 1)])  # a residual
    assert not fits(8, 64, 49, strides=(64 * 50, 50, 1))  # gaps
    assert not fits(8, 66, 49) and not fits(8, 68, 49, torch.bfloat16)  # rows of acc that are not aligned
    assert not fits(8, 64, 49, acc=(64 * 49, 66))


# ----------------------------------------------------------------------------------------------- on a GPU


def apply(text, acc, *operands, output=None):
    """The pass over `acc` by a generated kernel: in place, or into a new tensor if `output` is another dtype."""
    expression = parse(text)
    plan = plan_operands(
        acc.shape, acc.stride(), [_meta(o) for o in operands], channel_operands(expression), layout.flatten
    )
    assert plan is not None
    out = acc if output in (None, acc.dtype) else torch.empty_strided(acc.shape, acc.stride(), dtype=output).cuda()
    kernel = pointwise.kernel(plan.layout, acc.dtype, out.dtype, min(_meta(acc).alignment, _meta(out).alignment))
    source = codegen.generate(expression, out.dtype, plan.kinds, kernel, columns=plan.columns)
    launch = build.load(build.Source(source, torch.cuda.get_device_capability(), text))
    pointers, _kept = plan.addresses()(operands)
    stream = torch.cuda.current_stream().cuda_stream
    launch(kernel.params + plan.packed_strides(), stream, acc.data_ptr(), out.data_ptr(), *pointers)
    return out


def check(text, acc, *operands, output=None):
    exact = evaluate(parse(text), acc.double(), [o.double() if o.is_floating_point() else o for o in operands])
    have = apply(text, acc, *operands, output=output)
    assert have.dtype == (output or acc.dtype)
    assert have.stride() == acc.stride()
    assert relative_error(have, exact) < torch.finfo(have.dtype).eps
    assert torch.equal(have.isnan(), exact.isnan())


SHAPES = [
    (1,), (7,), (100_003,), (5, 1), (33, 3), (64, 49), (77, 8192), (1000, 1001), (3, 5, 7, 7), (2, 64, 2, 2),
    (4, 6, 8, 9),
]  # fmt: skip


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_in_place(shape, dtype):
    check("relu(acc) * o0", gpu_tensor(*shape, dtype=dtype), gpu_tensor(shape[-1], dtype=dtype))
    check("relu(acc) + o0", gpu_tensor(*shape, dtype=dtype), gpu_tensor(*shape, dtype=dtype))


@on_gpu
@pytest.mark.parametrize("output", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, output):
    if dtype != output:
        check("silu(acc + o0)", gpu_tensor(50, 71, dtype=dtype), gpu_tensor(71, dtype=dtype), output=output)


@on_gpu
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "operand", [(24, 1, 1), (1, 24, 1, 1), (2, 24, 7, 9), (1, 1, 7, 9), (2, 1, 1, 1), (2, 24, 1, 1), (1, 24, 7, 9), ()]
)
def test_operands_broadcast(operand, channels_last):
    acc = gpu_tensor(2, 24, 7, 9)
    acc = acc.to(memory_format=torch.channels_last) if channels_last else acc
    check("relu(acc + o0) * o1", acc, gpu_tensor(*operand), gpu_tensor(24, 1, 1))


@on_gpu
@pytest.mark.parametrize("start", [0, 1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_alignment(start, dtype):
    def view(shape):
        return gpu_tensor(math.prod(shape) + start, dtype=dtype)[start:].view(shape)

    check("acc * o0 + o1", view((9, 123)), view((9, 123)), view((123,)))


@on_gpu
@pytest.mark.parametrize("width", [40, 41, 42, 44, 48])
def test_padded_rows_keep_their_padding(width):
    whole = gpu_tensor(9, width)
    before = whole.clone()
    check("acc + o0 * 2.0", whole[:, :39], gpu_tensor(9, 39))
    assert torch.equal(whole[:, 39:], before[:, 39:])


@on_gpu
@pytest.mark.parametrize(
    "shape", [(2**31 + 3 * 2**20, 1), (3, 2**30 + 1), (70_000, 31_001), (2**16 + 3, 2**10 + 1, 33), (2**22 + 1, 1, 513)]
)
def test_more_elements_than_32_bits_count(shape):
    count = math.prod(shape)
    if torch.cuda.mem_get_info()[0] < 4 * count:
        pytest.skip("not enough memory")
    acc = torch.zeros(shape, dtype=torch.float16, device="cuda")
    rows = torch.arange(shape[0], device="cuda").remainder_(1999).half().view(-1, *(1,) * (len(shape) - 1))
    have = apply("acc + o0 + o1", acc, rows, torch.ones(shape[-1], dtype=torch.float16, device="cuda"))
    smallest, largest = have.view(shape[0], -1).aminmax(dim=1)
    assert torch.equal(smallest, rows.flatten() + 1) and torch.equal(largest, rows.flatten() + 1)
