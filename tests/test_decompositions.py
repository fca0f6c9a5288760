"""What a training step's trace takes apart for a GPU: sums of long rows. The rest is tested by what steps compute."""

import copy
import math

import pytest
import torch
from helpers import randn
from test_loops import GPUS, where_steps_are
from test_training import as_exact, assert_errors_as_eagers, calls_of, made, step_of
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxfuse
from fxfuse.decompositions import decompositions
from fxfuse.module import state_of

DIVIDED = {  # a tensor, and the dimensions that are added up
    "rows": (lambda: randn(4097, 6), [0]),
    "columns that lie in rows": (lambda: randn(5, 4096).t(), [0]),
    "all": (lambda: randn(70, 80), None),
    "images": (lambda: randn(16, 8, 14, 15), [0, 2, 3]),
    "small images": (lambda: randn(3, 8, 5, 7), [0, 2, 3]),
    "images in channels_last": (lambda: randn(16, 8, 14, 15).to(memory_format=torch.channels_last), [-4, -2, -1]),
    "tokens whose number has no divisors": (lambda: randn(32, 197, 7), [0, 1]),
    "between others": (lambda: randn(3, 50, 4, 60), [1, 3]),
    "between others that are turned": (lambda: randn(60, 4, 50, 3).permute(3, 2, 1, 0), [1, 3]),
    "of expanded rows": (lambda: randn(1, 3000, 5).expand(2, 3000, 5), [0, 1]),
    "of parts": (lambda: randn(4096, 12)[:, ::2], [0]),
    "millions": (lambda: randn(3000, 1500), None),
}
WHOLE = {
    "few elements": (lambda: randn(2048, 6), [0]),
    "many rows": (lambda: randn(4096, 9000), [0]),
    "a prime number": (lambda: randn(4099, 2), [0]),
    "small images in channels_last": (lambda: randn(3, 8, 5, 7).to(memory_format=torch.channels_last), [0, 2, 3]),
    "images of one pixel": (lambda: randn(300, 8, 1, 1), [0, 2, 3]),
    "one row": (lambda: randn(1, 8), [0]),
    "a number": (lambda: torch.tensor(2.0), [0]),
    "float64": (lambda: randn(4096, 6).double(), [0]),
    "integers": (lambda: torch.arange(8192).view(4096, 2), [0]),
}


def traced(call, x):
    """The call of x as a graph, taken apart as for a GPU, and the lengths of the rows that its sums add up."""
    graph = make_fx(call, decomposition_table=decompositions("cuda"))(x)
    sums = [node for node in graph.graph.nodes if "aten.sum" in str(node.target) or "aten.mean" in str(node.target)]
    return graph, [node.args[0].meta["val"].numel() // node.meta["val"].numel() for node in sums]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("function", [torch.sum, torch.mean])
@pytest.mark.parametrize("name", DIVIDED)
def test_sums_of_parts(name, function, keepdim, dtype):
    make, dims = DIVIDED[name]
    x, dims = make().to(dtype), dims or [*range(make().dim())]
    graph, lengths = traced(lambda x: function(x, dims, keepdim), x)
    length = math.prod(x.shape[dim] for dim in dims)
    assert len(lengths) > 1 and math.prod(lengths) == length and max(lengths) <= 4 * max(128, math.isqrt(length))
    result, expected = graph(x), function(x.double(), dims, keepdim)
    assert (result.dtype, result.shape, result.stride()) == (dtype, expected.shape, expected.stride())
    size = x.double().abs().sum(dims, keepdim) / (length if function is torch.mean else 1)
    ulp = torch.finfo(dtype).eps * expected.abs()
    assert ((result.double() - expected).abs() <= ulp + 32 * torch.finfo(torch.float32).eps * size).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("correction", [None, 0, 2])
@pytest.mark.parametrize("name", DIVIDED)
def test_variances_of_parts(name, correction, dtype):
    make, dims = DIVIDED[name]
    x, dims = (make() + 50).to(dtype), dims or [*range(make().dim())]
    for keepdim in (False, True):
        graph, lengths = traced(lambda x: torch.var(x, dims, correction=correction, keepdim=keepdim), x)  # noqa: B023
        assert "aten.var" not in graph.code and len(lengths) >= 4  # of parts and of those, of x and of squares
        result, expected = graph(x), torch.var(x.double(), dims, correction=correction, keepdim=keepdim)
        assert (result.dtype, result.shape, result.stride()) == (dtype, expected.shape, expected.stride())
        torch.testing.assert_close(result.double(), expected, rtol=max(1e-5, torch.finfo(dtype).eps), atol=0)


def test_variances_that_are_not_finite_or_of_nothing_left():
    x = randn(4096, 3)
    x[7, 0], x[9, 1] = math.inf, math.nan
    torch.testing.assert_close(traced(lambda x: x.var(0), x)[0](x), x.var(0), equal_nan=True)
    for correction in (4096, 5000):
        graph, _ = traced(lambda x: torch.var(x, 0, correction=correction), x)  # noqa: B023
        assert "aten.var" in graph.code


@pytest.mark.parametrize("name", WHOLE)
def test_other_sums_stay_whole(name):
    make, dims = WHOLE[name]
    assert len(traced(lambda x: x.sum(dims), make())[1]) == 1


def test_sums_in_another_dtype():
    x = randn(4096, 6).bfloat16()
    for dtype, count in ((torch.float32, 2), (torch.float64, 1)):
        graph, lengths = traced(lambda x: x.sum(0, dtype=dtype), x)  # noqa: B023
        assert graph(x).dtype == dtype and len(lengths) == count
        torch.testing.assert_close(graph(x).double(), x.double().sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("gpu", GPUS)
def test_long_sums_are_kernels_of_ours(gpu, monkeypatch):
    device = where_steps_are(gpu, monkeypatch)
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(device)
    x = randn(4, 1025, 16).to(device).requires_grad_()
    fast = fxfuse.optimize(copy.deepcopy(model))
    exact = step_of(copy.deepcopy(model).double(), x.detach().double().requires_grad_())
    for one, other in zip(calls_of(fast, x), exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
    (step,) = made(fast)
    for _, graph in step.graphs:
        (program,) = state_of(graph).programs.programs
        assert "sum" not in program.calls, program.code


@pytest.mark.parametrize("gpu", GPUS)
def test_a_batch_normalisation_is_three_kernels(gpu, monkeypatch):
    """Statistics of parts; those of the batch, with the running ones; and what is normalised."""
    device = where_steps_are(gpu, monkeypatch)
    x = (randn(6, 8, 23, 24) + 3).to(device, memory_format=torch.channels_last).requires_grad_()
    model = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8, momentum=0.3)).to(device)
    fast, exact = fxfuse.optimize(copy.deepcopy(model)), copy.deepcopy(model).double()
    for _ in range(4):
        found = [step_of(fast, x), step_of(model, x), step_of(exact, *as_exact((x,)))]
        assert_errors_as_eagers(*found)
    for one, other in zip(fast.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-6, atol=1e-6)
    (step,) = made(fast)
    (program,) = state_of(step.forward).programs.programs
    assert program.launches <= 6 and not program.calls, [one.what for one in program.steps]


CONVOLUTIONS = {  # a convolution, its input, and whether its filters' gradient is an operator of ours
    "plain": (lambda: nn.Conv2d(5, 9, 1, bias=False), (3, 5, 7, 6), True),
    "with a bias": (lambda: nn.Conv2d(8, 16, 1), (2, 8, 9, 5), True),
    "one filter": (lambda: nn.Conv2d(8, 1, 1), (2, 8, 9, 5), True),
    "one channel": (lambda: nn.Conv2d(1, 8, 1), (2, 1, 9, 5), True),
    "one pixel": (lambda: nn.Conv2d(8, 4, 1), (6, 8, 1, 1), True),
    "with a stride": (lambda: nn.Conv2d(8, 4, 1, stride=2), (2, 8, 9, 5), True),
    "padded": (lambda: nn.Conv2d(8, 4, 1, padding=1), (2, 8, 9, 5), True),
    "in groups": (lambda: nn.Conv2d(8, 4, 1, groups=2), (2, 8, 9, 5), True),
    "3x3 in groups": (lambda: nn.Conv2d(6, 12, 3, padding=1, groups=3), (2, 6, 9, 5), True),
    "in groups, with a stride": (lambda: nn.Conv2d(12, 6, 3, stride=2, groups=3), (2, 12, 9, 5), True),
    "3x3": (lambda: nn.Conv2d(8, 4, 3), (2, 8, 9, 5), True),
    "3x3 of one channel": (lambda: nn.Conv2d(1, 4, 3, padding=1), (2, 1, 9, 5), True),
    "3x3, one filter": (lambda: nn.Conv2d(8, 1, 3, padding=1), (2, 8, 9, 5), True),
    "padded more than its filters are large": (lambda: nn.Conv2d(8, 4, 3, padding=4), (2, 8, 9, 5), True),
    "dilated, of one side": (lambda: nn.Conv2d(8, 4, (1, 3), padding="same", dilation=2), (2, 8, 9, 5), True),
    "3x5 with a stride": (lambda: nn.Conv2d(8, 4, (3, 5), stride=(2, 1), padding=1), (2, 8, 9, 5), True),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8), (2, 8, 9, 5), True),
    "depthwise with a stride": (lambda: nn.Conv2d(8, 8, 5, stride=2, padding=2, groups=8), (2, 8, 9, 5), True),
    "transposed": (lambda: nn.ConvTranspose2d(8, 4, 1), (2, 8, 9, 5), False),
}


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("gpu", GPUS)
def test_gradients_of_convolutions(gpu, name, amp, monkeypatch):
    device = where_steps_are(gpu, monkeypatch)
    make, shape, is_ours = CONVOLUTIONS[name]
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Tanh()).to(device, memory_format=torch.channels_last)
    x = randn(*shape).to(device, memory_format=torch.channels_last).requires_grad_()
    fast, exact = fxfuse.optimize(copy.deepcopy(model)), copy.deepcopy(model).double()
    for _ in range(4):
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=amp):
            found = [step_of(fast, x), step_of(model, x)]
        assert_errors_as_eagers(*found, step_of(exact, *as_exact((x,))), factor=8.0 if amp else 2.0)
    (step,) = made(fast)
    nodes = list(state_of(step.backwards[0]).captured.graph.nodes)
    left = [node.args[0].meta["val"] for node in nodes if "convolution_backward" in str(node.target)]
    is_found = any("conv2d_weight" in str(node.target) for node in nodes)
    if is_ours and not is_found:  # traces of torch 2.3 lay gradients of convolutions otherwise
        assert not left[0].is_contiguous(memory_format=torch.channels_last)
    else:
        assert is_found == is_ours


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("wanted", ["x", "filters"])
def test_gradients_of_convolutions_of_which_one_is_wanted(wanted, kernel, monkeypatch):
    where_steps_are("emulated", monkeypatch)
    model = nn.Sequential(nn.Conv2d(8, 16, kernel).requires_grad_(wanted == "filters"), nn.ReLU())
    x = randn(2, 8, 5, 7).to(memory_format=torch.channels_last).requires_grad_(wanted == "x")
    fast, exact = fxfuse.optimize(copy.deepcopy(model)), copy.deepcopy(model).double()
    for _ in range(4):
        found = [step_of(fast, x), step_of(model, x), step_of(exact, *as_exact((x,)))]
        assert_errors_as_eagers(*found)
    made(fast)
