"""LayerNorm on a CUDA device: one launch, eager's answers.

Expected values come from torch in float64. Skipped without a GPU of compute capability 8.0.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers import ON_GPU, Net, Net2, assert_as_eager, assert_same_kind, gpu_tensor, kernels_launched, linear
from torch import nn

import fxfuse

pytestmark = ON_GPU

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COLUMNS = (1, 7, 96, 100, 192, 384, 768, 1000, 1023, 1024, 2048, 4099, 8192)


def norm(*shape, **options):
    """A LayerNorm whose parameters all matter."""
    module = nn.LayerNorm(shape, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def _same(tensor, before):
    return torch.equal(tensor.nan_to_num(77), before.nan_to_num(77))


@torch.no_grad()
def check(model, *inputs, dtype=torch.float32, kernels=("layer_norm_kernel",)):
    """The optimised model's only region, after comparing with eager; it launches these kernels."""
    model = model.eval().to("cuda", dtype)
    fast = fxfuse.optimize(model, strict=True)
    before = [x.clone() for x in inputs]
    for _ in range(3):
        assert_as_eager(model, fast, *inputs)
    have, want = fast(*inputs), model(*inputs)  # of these very tensors, and not of copies in another layout
    assert_same_kind(have, want)
    tolerance = 1e-4 if want.dtype == dtype == torch.float32 else 0.02  # eager rounds what it normalised to `dtype`
    torch.testing.assert_close(have, want, equal_nan=True, rtol=tolerance, atol=tolerance)
    assert all(map(_same, inputs, before))
    (region,) = fxfuse.explain(fast).regions
    assert region.anchor == "layer_norm" and region.kernel.startswith("layer_norm"), region
    launched = kernels_launched(lambda: fast(*inputs))
    assert len(launched) == len(kernels), launched
    assert "fxfuse" in launched[-1] and kernels[-1] in launched[-1], launched
    return region


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_rows_of_every_length(columns, dtype):
    for rows in (1, 3, 1001):
        check(Net(lambda m, x: m.l(x), l=norm(columns)), gpu_tensor(rows, columns, dtype=dtype), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_epilogues_with_residuals(columns, dtype):
    model = Net2(lambda m, x, y: F.gelu(m.l(x)) * 0.5 + y, l=norm(columns))
    check(model, gpu_tensor(2, 77, columns, dtype=dtype), gpu_tensor(2, 77, columns, dtype=dtype) * 2, dtype=dtype)


AFFINE = {
    "without bias": lambda: Net(lambda m, x: m.l(x), l=norm(96, bias=False)),
    "without parameters": lambda: Net(
        lambda m, x: m.l(x) * m.v, l=nn.LayerNorm(96, elementwise_affine=False), v=torch.randn(96)
    ),
    "bias alone": lambda: Net(lambda m, x: F.layer_norm(x, (96,), bias=m.v), v=torch.randn(96)),
    "two dimensions": lambda: Net(lambda m, x: m.l(x), l=norm(77, 96)),
    "all dimensions": lambda: Net(lambda m, x: F.layer_norm(x[0, :2], (2, 96), m.v), v=torch.randn(2, 96)),
    "a large eps": lambda: Net(lambda m, x: m.l(x), l=norm(96, eps=0.5)),
    "to float32": lambda: Net(lambda m, x: m.l(x).float() * 2, l=norm(96)),
    "to bfloat16": lambda: Net(lambda m, x: m.l(x).to(torch.bfloat16), l=norm(96)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", AFFINE)
def test_parameters_and_results_of_every_kind(name, dtype):
    check(AFFINE[name](), gpu_tensor(3, 77, 96, dtype=dtype), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operands_of_every_shape(dtype):
    x = gpu_tensor(4, 33, 192, dtype=dtype)
    for shape in ((192,), (33, 1), (33, 192), (4, 1, 192), (4, 33, 1), (4, 1, 1), (1, 33, 192), ()):
        model = Net2(lambda m, x, y: torch.tanh(m.l(x) * y + 1), l=norm(192))
        check(model, x, gpu_tensor(*shape, dtype=dtype), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(dtype):
    model = Net(lambda m, x: m.l(x), l=norm(96))
    check(model, gpu_tensor(500, 200, dtype=dtype)[:, :96], dtype=dtype)
    check(model, gpu_tensor(500 * 96 + 1, dtype=dtype)[1:].view(500, 96), dtype=dtype)
    check(model, gpu_tensor(1, 96, dtype=dtype).expand(50, 96), dtype=dtype)
    channels_last = gpu_tensor(2, 96, 14, 15, dtype=dtype).to(memory_format=torch.channels_last)
    check(model, channels_last.permute(0, 2, 3, 1), dtype=dtype)
    copied = ("copy", "layer_norm_kernel")
    check(model, gpu_tensor(2, 96, 14, 15, dtype=dtype).permute(0, 2, 3, 1), dtype=dtype, kernels=copied)
    check(model, gpu_tensor(5, 50, 96, dtype=dtype)[:, 1:], dtype=dtype, kernels=copied)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [7, 96, 768, 2048])
def test_special_values(columns, dtype):
    x = gpu_tensor(64, columns, dtype=dtype)
    x[3, 1], x[7, 0], x[11, columns - 1] = torch.nan, torch.inf, -torch.inf
    x[20], x[50] = 0.0, 100.0 + x[50]
    check(Net(lambda m, x: m.l(x).relu(), l=norm(columns)), x, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [7, 96, 768, 2048])
@torch.no_grad()
def test_rows_of_one_number_are_normalised_to_zero(columns, dtype):
    """Which torch's own kernel does not do: it rounds the mean, and its sum of large numbers overflows."""
    model = norm(columns).to("cuda", dtype).eval()
    numbers = torch.tensor([1000.1, -3.3, torch.finfo(dtype).max / 4], device="cuda").to(dtype)
    have = fxfuse.optimize(nn.Sequential(model), strict=True)(numbers[:, None].expand(3, columns).contiguous())
    assert torch.equal(have, model.bias.expand(3, columns))


@torch.no_grad()
def test_many_rows():
    """More than blocks run at once, by far."""
    model = norm(96).cuda().bfloat16().eval()
    fast, x = fxfuse.optimize(nn.Sequential(model)), gpu_tensor(300_001, 96, dtype=torch.bfloat16)
    want = F.layer_norm(x.float(), (96,), model.weight.float(), model.bias.float())
    torch.testing.assert_close(fast(x).float(), want, rtol=2**-8, atol=1e-5)


@pytest.mark.sanitizer
@torch.no_grad()
def test_a_few_for_the_sanitizer():
    for dtype, columns in ((torch.float32, 7), (torch.bfloat16, 100), (torch.bfloat16, 768), (torch.float16, 1023),
                           (torch.bfloat16, 2048), (torch.float32, 8192)):  # fmt: skip
        x, weight, residual = (gpu_tensor(*shape, columns, dtype=dtype) for shape in ((2, 501), (), (2, 501)))
        have = fxfuse.functional.layer_norm(x, weight, None, [residual], "acc + o0", (columns,), 1e-5, strict=True)
        want = F.layer_norm(x.double(), (columns,), weight.double()) + residual.double()
        torch.testing.assert_close(have.double(), want, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_autocast(dtype):
    model = Net(lambda m, x: m.l(m.fc(x)).tanh() * 0.5, fc=linear(), l=norm(8)).cuda().eval()
    fast, x = fxfuse.optimize(model), gpu_tensor(33, 8, dtype=dtype)
    for target in (torch.bfloat16, torch.float16):
        with torch.autocast("cuda", dtype=target):
            have, want = fast(x), model(x)
        assert_same_kind(have, want)
        torch.testing.assert_close(have, want, rtol=0.02, atol=0.02)


@torch.no_grad()
def test_parameters_of_another_dtype():
    """What eager says to them."""
    model = Net(lambda m, x: m.l(x).tanh(), l=norm(96)).cuda().eval()
    x = gpu_tensor(5, 96, dtype=torch.bfloat16)
    assert_as_eager(model, fxfuse.optimize(model), x, exact=False, raises=RuntimeError)


def test_gradients():
    model = Net(lambda m, x: m.l(x).tanh() * x, l=norm(96)).cuda()
    fast = fxfuse.optimize(model)
    gradients = []
    for module in (model, fast):
        x = gpu_tensor(5, 96).requires_grad_()
        model.zero_grad()
        module(x).square().sum().backward()
        gradients.append([x.grad, *(parameter.grad.clone() for parameter in model.parameters())])
    torch.testing.assert_close(*gradients)


@torch.no_grad()
def test_cuda_graphs():
    model = Net(lambda m, x: m.l(x).tanh(), l=norm(768)).cuda().eval()
    x = gpu_tensor(197, 768)
    fast = fxfuse.optimize(model, (x,), strict=True)
    fast(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fast(x)
    x.copy_(gpu_tensor(197, 768).flip(0))
    graph.replay()
    torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_block_of_a_transformer():
    def forward(m, x):
        return m.o(x + m.b(F.gelu(m.a(m.n(x)))))

    members = {"n": norm(96), "a": nn.Linear(96, 384), "b": nn.Linear(384, 96), "o": norm(96)}
    for dtype in DTYPES:
        model, x = Net(forward, **members).to("cuda", dtype).eval(), gpu_tensor(3, 50, 96, dtype=dtype)
        fast = fxfuse.optimize(model, (x,), strict=True)
        assert [region.anchor for region in fxfuse.explain(fast).regions] == [
            "layer_norm", "linear", "linear", "layer_norm"
        ]  # fmt: skip
        assert_as_eager(model, fast, x)
