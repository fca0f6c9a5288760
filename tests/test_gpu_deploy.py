"""Packages of models on a GPU: kernels and measured choices come back in a process that can neither compile nor find
the cache. (tests/test_deploy.py has all that needs no GPU.)"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ON_GPU, gpu_tensor
from torch import nn

import fxfuse

pytestmark = ON_GPU

CHILD = """
import json, sys
import torch, fxfuse
from fxfuse import toolchain

fast = fxfuse.load("model.fxfuse", strict=True)
inputs = torch.load("inputs.pt")
for _ in range(4):
    results = [fast(x.cuda()) for x in inputs]
report = fxfuse.explain(fast)
torch.save([result.cpu() for result in results], "results.pt")
json.dump({
    "compilers": [toolchain.cxx(), toolchain.nvcc()], "kernels": [region.kernel for region in report.regions],
    "graphs": report.cuda_graphs, "programs": report.programs,
}, open("said.json", "w"))
"""


class Network(nn.Module):
    """Convolutions with batch normalisation and a residual, a gated unit, and a chain between regions."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.body = nn.Conv2d(32, 32, 1)
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(x + self.body(x)).mean((2, 3))
        x = x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x)) + x


def loaded_without_compilers(folder, tune):
    """What a process said that ran the package in the folder, and can neither compile nor find the cache."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CXX", "CUDA_HOME", "FXFUSE"))}
    environment = {
        **kept, "PATH": "/nonexistent", "PYTHONPATH": str(Path(fxfuse.__file__).parents[1]), "FXFUSE_TUNE": tune,
        "CUDA_HOME": "/nonexistent", "FXFUSE_CACHE_DIR": str(folder / "cache"),
    }  # fmt: skip
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "has no kernel" not in done.stderr and "torch runs" not in done.stderr
    said = json.loads((folder / "said.json").read_text())
    assert said["compilers"] == [None, None]
    assert said["kernels"] and all(said["kernels"])
    return said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tune", ["0", "1"], ids=["the first candidates", "measured"])
@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["", "CUDA graphs"])
def test_a_package_brings_kernels_and_choices(dtype, tune, cuda_graphs, tmp_path, monkeypatch):
    monkeypatch.setenv("FXFUSE_TUNE", tune)
    torch.manual_seed(0)
    model = Network().eval().to("cuda", dtype)
    inputs = [gpu_tensor(batch, 16, 32, 32, dtype=dtype) for batch in (2, 16)]
    fast = fxfuse.optimize(model, cuda_graphs=cuda_graphs)
    fxfuse.save(fast, tmp_path / "model.fxfuse", *inputs)
    torch.save([x.cpu() for x in inputs], tmp_path / "inputs.pt")
    said = loaded_without_compilers(tmp_path, tune)
    assert bool(said["graphs"]) == cuda_graphs
    tolerance = 5e-3 if dtype == torch.float32 else 0.05  # convolutions of torch's are TF32's
    with torch.no_grad():
        for x, result in zip(inputs, torch.load(tmp_path / "results.pt"), strict=True):
            torch.testing.assert_close(result, model(x).cpu(), rtol=tolerance, atol=tolerance)


class Transformer(nn.Module):
    """Two blocks of attention, behind an embedding with positions, and a root mean square norm written out."""

    def __init__(self):
        super().__init__()
        self.tokens, self.qkv = nn.Linear(16, 64), nn.ModuleList(nn.Linear(64, 192) for _ in range(2))
        self.out, self.norm = nn.ModuleList(nn.Linear(64, 64) for _ in range(2)), nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        x = self.tokens(x.flatten(2).transpose(1, 2))
        x = x + torch.arange(x.shape[1], device=x.device).to(x.dtype).mul(0.01).sin().unsqueeze(-1)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + out(attended)
            x = x + self.down(nn.functional.gelu(self.up(x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt())))
        return x


MAKER = """
import sys
import torch, fxfuse
sys.path.insert(0, sys.argv[1])
from test_gpu_deploy import Network, Transformer

assert not torch.cuda.is_available()
torch.manual_seed(0)
model = {"Network": Network, "Transformer": Transformer}[sys.argv[2]]().eval()
model.to(getattr(torch, sys.argv[3]))
inputs = torch.load("inputs.pt")
fast = fxfuse.optimize(model)
fxfuse.save(fast, "model.fxfuse", *inputs, architectures=(sys.argv[4],))
torch.save(model.double().state_dict(), "weights.pt")
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tune", ["0", "1"])
@pytest.mark.parametrize("kind", [Network, Transformer])
def test_a_package_that_was_compiled_without_a_gpu(kind, dtype, tune, tmp_path):
    """Made by a process that sees no GPU; loaded by one that sees no compiler, and compared with eager in float64."""
    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability())
    inputs = [torch.randn(batch, 16, 32, 32, dtype=dtype) for batch in (2, 16)]
    torch.save(inputs, tmp_path / "inputs.pt")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(fxfuse.__file__).parents[1])}
    name = str(dtype).removeprefix("torch.")
    command = [sys.executable, "-c", MAKER, str(Path(__file__).parent), kind.__name__, name, architecture]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "FxfuseWarning" not in done.stderr, done.stderr
    said = loaded_without_compilers(tmp_path, tune)
    assert said["programs"]
    model = kind().eval().double().cuda()
    model.load_state_dict(torch.load(tmp_path / "weights.pt"))
    tolerance = 5e-3 if dtype == torch.float32 else 0.06  # convolutions of torch's are TF32's
    with torch.no_grad():
        for x, result in zip(inputs, torch.load(tmp_path / "results.pt"), strict=True):
            expected = model(x.cuda().double()).cpu()
            assert torch.dist(result.double(), expected) <= tolerance * expected.norm()
