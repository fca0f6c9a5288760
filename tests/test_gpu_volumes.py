"""Conv3d with flat filters on a CUDA device: kernels for images compute it. Skipped without a GPU."""

import pytest
import torch
from helpers import ON_GPU, Net, Net2, assert_as_eager, gpu_tensor
from torch import nn

import fxfuse
from fxfuse.cuda import tune
from fxfuse.module import state_of

pytestmark = ON_GPU

FLAT = {
    "planes": ((1, 3, 3), (1, 1, 1), (0, 1, 1)),
    "planes, a stride": ((1, 3, 3), (1, 2, 2), (0, 1, 1)),
    "every second plane": ((1, 3, 3), (2, 1, 1), (0, 1, 1)),
    "through planes": ((3, 1, 1), (1, 1, 1), (1, 0, 0)),
    "through planes, a stride": ((3, 1, 1), (2, 1, 1), (1, 0, 0)),
    "pixels": ((1, 1, 1), (1, 1, 1), (0, 0, 0)),
    "every second pixel": ((1, 1, 1), (2, 2, 2), (0, 0, 0)),
}


@torch.no_grad()
@pytest.mark.parametrize("channels", [(16, 24), (3, 45)], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FLAT)
def test_flat_filters_by_our_kernels(name, dtype, memory_format, channels, monkeypatch):
    monkeypatch.setattr(tune, "enabled", lambda: False)  # the first candidate is taken: a kernel where there is one
    kernel, stride, padding = FLAT[name]
    given, made = channels
    norm = nn.BatchNorm3d(made)
    nn.init.uniform_(norm.running_mean), nn.init.uniform_(norm.running_var, 0.5, 2)
    layer = nn.Conv3d(given, made, kernel, stride, padding)
    model = Net2(lambda m, x, y: torch.relu(m.n(m.c(x)) + y), c=layer, n=norm).eval().to("cuda", dtype)
    for batch, size in ((1, (4, 9, 11)), (3, (6, 14, 14))):
        x = gpu_tensor(batch, given, *size, dtype=dtype).to(memory_format=memory_format)
        like = layer(x)
        for y in (torch.randn_like(like), gpu_tensor(batch, made, 1, 1, 1, dtype=dtype)):
            fast = fxfuse.optimize(model, strict=True)
            assert_as_eager(model, fast, x, y)
            (region,) = fxfuse.explain(fast).regions
            assert region.anchor == "conv3d" and region.kernel is not None, region.fallback
            flat = memory_format == torch.channels_last_3d or name in (
                "through planes",
                "through planes, a stride",
                "pixels",
            )
            assert ("library" in region.kernel) is not flat, region.kernel


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_factorised_network(dtype):
    layers = [
        nn.Conv3d(3, 16, (1, 7, 7), (1, 2, 2), (0, 3, 3)), nn.Conv3d(16, 32, (3, 1, 1), 1, (1, 0, 0)),
        *(nn.Conv3d(a, b, k, 1, p) for _ in range(2) for a, b, k, p in
          ((32, 72, (1, 3, 3), (0, 1, 1)), (72, 32, (3, 1, 1), (1, 0, 0)))),
    ]  # fmt: skip

    def forward(m, x):
        x = m.layers[1](m.layers[0](x).relu()).relu()
        for number in (2, 4):
            x = torch.relu(m.layers[number + 1](m.layers[number](x).relu()) + x)
        return x.mean((2, 3, 4))

    model = Net(forward, layers=nn.ModuleList(layers)).eval().to("cuda", dtype).requires_grad_(False)
    x = gpu_tensor(2, 3, 8, 32, 32, dtype=dtype)
    fast = fxfuse.optimize(model, (x,))
    for _ in range(4):
        assert_as_eager(model, fast, x)
    assert state_of(fast).layouts.convolutions == 6
    assert_as_eager(model, fast, gpu_tensor(1, 3, 4, 32, 32, dtype=dtype))
