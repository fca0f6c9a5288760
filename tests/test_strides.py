"""Results have eager's strides: what meta tensors say of each operation is what torch's kernels do."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import ON_GPU, Net, Net2, assert_as_eager, randn, regions
from torch import nn

import fxfuse
from fxfuse import ops

LAYOUTS = {
    "contiguous": lambda: torch.rand(2, 3, 4, 5),
    "channels last": lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "permuted": lambda: torch.rand(5, 2, 4, 3).permute(1, 3, 2, 0),
    "transposed": lambda: torch.rand(2, 3, 5, 4).transpose(2, 3),
    "expanded": lambda: torch.rand(2, 1, 4, 1).expand(2, 3, 4, 5),
    "expanded everywhere": lambda: torch.rand(()).expand(2, 3, 4, 5),
    "sliced": lambda: torch.rand(2, 6, 4, 10)[:, ::2, :, ::2],
    "sliced channels last": lambda: torch.rand(2, 6, 4, 5).to(memory_format=torch.channels_last)[:, :3],
    "overlapping": lambda: torch.rand(200).as_strided((2, 3, 4, 5), (20, 5, 2, 1)),
    "permuted, columns expanded": lambda: torch.rand(1, 2, 4, 3).permute(1, 3, 2, 0).expand(2, 3, 4, 5),
    "permuted, channels expanded": lambda: torch.rand(5, 2, 4, 1).permute(1, 3, 2, 0).expand(2, 3, 4, 5),
    "one image in channels last": lambda: torch.rand(1, 3, 4, 5).to(memory_format=torch.channels_last),
    "one column in channels last": lambda: torch.rand(2, 3, 4, 1).to(memory_format=torch.channels_last),
    "row": lambda: torch.rand(5),
}


def arguments(name, first, second):
    """Arguments for the row, whose tensors have those layouts."""
    row = ops.row(name)
    x, y = LAYOUTS[first](), LAYOUTS[second]()
    if name == "batch_norm_1d":
        x = x.flatten(2) if x.dim() > 2 else x
    if name == "batch_norm_3d":
        x = x.unsqueeze(2) if x.dim() == 4 else x
    if row.channel_args:
        channels = [torch.rand(x.shape[1:2]) for _ in row.channel_args]
        return [x, *channels, *[1e-5] * (len(row.params) - 1 - len(channels))]
    if name in ("where", "masked_fill"):
        return [x > 0.5, y, 0.0] if name == "where" else [x, y > 0.5, 0.0]
    if name == "addcmul":
        return [x, y, x, 0.5]
    required = [value for value in row.params.values() if value is ops.REQUIRED]
    numbers = [0.5] * (len(row.params) - 1)
    if name == "new_full":
        return [x, 1, 0.5]
    if len(required) == 1 or name in ("clamp", "threshold", "full_like"):
        return [x, *numbers]
    return [x, y, *numbers[1:]]


def as_meta(tensor):
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def described(call, args):
    try:
        result = call(*args)
    except (RuntimeError, ValueError, IndexError) as error:
        return type(error)
    # strides of dimensions of size 1 are looked up at the first call (plans._free_strides)
    strides = [stride for size, stride in zip(result.shape, result.stride(), strict=True) if size > 1]
    return result.dtype, result.shape, strides


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("name", ops.names())
def test_meta_tensors_have_the_strides_that_torchs_kernels_give(name, device):
    row, compared = ops.row(name), 0
    for first, second in itertools.product(LAYOUTS, LAYOUTS):
        args = [arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in arguments(name, first, second)]
        if name == "assign" and ("expanded" in second or second == "overlapping"):
            continue  # torch overwrites no such tensor
        formats = row.formats.get(device)
        if formats is not None and not any(args[0].is_contiguous(memory_format=kept) for kept in formats):
            continue  # no kernel is made of these
        expected = described(row.reference, args)
        assert described(row.reference, [as_meta(arg) for arg in args]) == expected, (first, second)
        compared += isinstance(expected, tuple)
    assert compared >= len(LAYOUTS)


FLOATS = [torch.bfloat16, torch.float16, torch.float32]


@torch.no_grad()
@pytest.mark.parametrize("dtype", FLOATS)
def test_expanded_tensors_of_any_dtype_have_eagers_strides(dtype):
    model = Net(lambda m, x: x[..., :1].expand_as(x) * x * m.v + m.v, v=randn(8)).to(dtype)
    fast = fxfuse.optimize(model)
    assert len(regions(fast)) == 1
    for order in itertools.permutations(range(3)):
        x = torch.rand([(3, 4, 8)[i] for i in order]).permute([order.index(i) for i in range(3)])
        assert_as_eager(model, fast, x.to(dtype), exact=False)


@torch.no_grad()
@pytest.mark.parametrize(
    "dtypes", list(itertools.permutations([torch.bfloat16, torch.float16, torch.float32], 2)), ids=str
)
def test_expanded_tensors_beside_others_dtypes_have_eagers_strides(dtypes):
    """On a CPU torch makes a copy of one that it has to convert, which has strides of its own."""
    model = Net2(lambda m, x, y: (x[..., :1].expand_as(x) * y).tanh() + y[..., :1])
    fast = fxfuse.optimize(model)
    assert len(regions(fast)) == 1
    for order in itertools.permutations(range(3)):
        x = torch.rand([(3, 4, 8)[i] for i in order]).permute([order.index(i) for i in range(3)])
        assert_as_eager(model, fast, *map(x.to, dtypes), exact=False)


CHAINS = {
    "masked_fill": lambda m, x, y: (x * 2).masked_fill(y > 0.5, 0.0),
    "masked_fill_": lambda m, x, y: (x * 2).masked_fill_(y > 0.5, 0.0),
    "where": lambda m, x, y: torch.where(y > 0.5, x * 2, 0.0),
    "in place": lambda m, x, y: (x * 2).add_(y).relu_(),
    "in place, numbers alone": lambda m, x, y: F.hardtanh((x * 2).mul_(3), -0.5, 0.5, True),
    "addcmul": lambda m, x, y: torch.addcmul(x, y, x, value=0.1) * y,
    "add with alpha": lambda m, x, y: torch.add(x, y, alpha=0.5) * y,
    "rsub with alpha": lambda m, x, y: torch.rsub(x, y, alpha=0.5) * y,
    "clamp between tensors": lambda m, x, y: torch.clamp(x, y, y) * 2,
    "clamp above a tensor": lambda m, x, y: torch.clamp(x, min=y) * 2,
    "logical": lambda m, x, y: torch.where(torch.logical_and(x, y), 1.0, 0.5) * 2,
    "batch norm": lambda m, x, y: F.batch_norm(x * 2, m.mean, m.var) + y,
    "constants": lambda m, x, y: torch.full_like(x * 2, 0.5) * x + y * y.new_ones(1),
    "logsigmoid": lambda m, x, y: F.logsigmoid(x * 2) + y,
}
ONES = {
    "one channel": lambda: torch.rand(2, 1, 4, 5).as_strided((2, 1, 4, 5), (20, 1, 5, 1)),
    "one pixel": lambda: torch.rand(2, 3, 1, 1).to(memory_format=torch.channels_last),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CHAINS)
def test_chains_have_eagers_strides(name):
    whole = [layout for layout in LAYOUTS.values() if layout().shape == (2, 3, 4, 5) and layout().stride(0) != 20]
    model = Net2(CHAINS[name], mean=randn(3), var=randn(3).exp()).eval()
    fast = fxfuse.optimize(model)
    assert len(regions(fast)) == 1
    pairs = [*itertools.product(whole, whole), (ONES["one pixel"], ONES["one pixel"])]
    if name != "batch norm":  # of three channels
        pairs.append((ONES["one channel"], ONES["one channel"]))
    for x, y in pairs:
        assert_as_eager(model, fast, x(), y(), exact=False)


@torch.no_grad()
def test_a_number_for_each_row():
    """The stride of a dimension of size 1 decides that of a result that is larger there."""
    model = Net(lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * m.p, p=randn(6))
    assert_as_eager(model, fxfuse.optimize(model), randn(2, 4, 1, 6), exact=False)


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("size", [1, 5])
def test_a_convolution_in_channels_last_and_masked_fill(size, padding):
    for forward in (
        lambda m, x, y: m.c(x).masked_fill(y > 0, 0.0),
        lambda m, x, y: m.c(x).relu().masked_fill_(y > 0, 0.0),
    ):
        model = Net2(forward, c=nn.Conv2d(4, 4, 1, padding=padding)).eval()
        fast = fxfuse.optimize(model)
        for memory_format in (torch.contiguous_format, torch.channels_last):
            x = randn(2, 4, size, size).to(memory_format=memory_format)
            for _ in range(3):
                assert_as_eager(model, fast, x, randn(2, 1, 1, 1))


@torch.no_grad()
def test_a_filled_tensor_keeps_its_dtype():
    model = Net(lambda m, x: (x * 2).masked_fill(x > 0, m.v).tanh())
    model.register_buffer("v", torch.tensor(2.5, dtype=torch.float64))
    fast = fxfuse.optimize(model)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert_as_eager(model, fast, randn(3, 8, dtype=dtype), exact=False)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_padded_pixel_and_a_weight_in_channels_last(dtype):
    """The result is larger than the tensor whose dtype it gets."""
    model = Net(lambda m, x: torch.sigmoid(m.c(x) * 2).type_as(x), c=nn.Conv2d(4, 4, 1, padding=1))
    model.c.to(memory_format=torch.channels_last)
    fast = fxfuse.optimize(model.eval().to(dtype))
    for size in (1, 3):
        for memory_format in (torch.contiguous_format, torch.channels_last):
            assert_as_eager(model, fast, randn(2, 4, size, size, dtype=dtype).to(memory_format=memory_format))
