"""Packages for GPUs that are not here: models on a CPU are planned on tensors that stand in for a GPU's. No GPU is
needed; tests/test_gpu_deploy.py loads such a package on one."""

import contextlib
import ctypes
import dataclasses
import json
import logging
import struct
import threading
import types

import emulator
import pytest
import torch
import torch.nn.functional as F
from helpers import randn
from torch import nn

import fxfuse
from fxfuse import PackageError, build, guard, packaged, program, toolchain
from fxfuse.cuda import exactness, gpu, tune
from fxfuse.cuda.stand_in import DEVICE, StandIn, standing_in
from fxfuse.deploy import archive, cross, saving, tensors
from fxfuse.deploy.loaded import module_of
from fxfuse.program.observed import Operators

NVCC = pytest.mark.skipif(
    toolchain.cxx() is None or toolchain.nvcc_version() is None, reason="kernels for a GPU are compiled by nvcc"
)
ARCHITECTURES = ("sm_80", "sm_90")
GPUS = [gpu.of_architecture(name) for name in ARCHITECTURES]


class Network(nn.Module):
    """Convolutions, a gated unit, attention, and work between regions that programs merge."""

    def __init__(self, attends=True):
        super().__init__()
        self.attends = attends
        self.stem, self.norm = nn.Conv2d(8, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.gate, self.up = nn.Linear(32, 64), nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        x = torch.relu(self.norm(self.stem(x))).flatten(2).transpose(1, 2)
        if self.attends:
            heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        x = x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt() + torch.arange(32, device=x.device)
        return self.down(F.silu(self.gate(x)) * self.up(x)).softmax(-1)


def network(dtype, **options):
    torch.manual_seed(0)
    return Network(**options).eval().to(dtype)


@pytest.fixture
def traced(monkeypatch):
    """A function from a model and an example to what its package would bring, by architecture; nothing is compiled."""
    packed = {}

    def add_kernels(writer, sources, cpu):
        packed["sources"] = list(sources.values())
        return {}

    monkeypatch.setattr(saving, "_add_kernels", add_kernels)
    monkeypatch.setattr(toolchain, "nvcc_version", lambda: "13.0")
    monkeypatch.setattr(toolchain, "nvcc_architectures", list)

    def trace(path, model, *examples, architectures=ARCHITECTURES):
        fxfuse.save(fxfuse.optimize(model), path, *examples, architectures=architectures)
        return packed["sources"], manifest_of(path)

    return trace


def manifest_of(path):
    with archive.opened(path, None, True) as file:
        return archive.Reader(file, "it").manifest


# --------------------------------------------------------------------------------------------- the package


def cubins(library):
    """The architectures of a library's code for GPUs: fatbin's header, and that of each part (kind 2 is a cubin)."""
    found, at = set(), library.find(b"\x50\xed\x55\xba")
    while at >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", library, at)
        part, end = at + header, at + header + size
        while part < end:
            kind, _, part_header, part_size = struct.unpack_from("<HHIQ", library, part)
            found.add((kind, *struct.unpack_from("<I", library, part + 28)))
            part += part_header + part_size
        at = library.find(b"\x50\xed\x55\xba", at + 1)
    return found


@NVCC
@pytest.mark.slow
def test_a_package_has_compiled_kernels_for_each_architecture(tmp_path):
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU()).to(torch.bfloat16).eval()
    path, x = tmp_path / "model.fxfuse", randn(4, 16).bfloat16()
    saved = fxfuse.save(fxfuse.optimize(model), path, x, architectures=ARCHITECTURES)
    with archive.opened(path, saved.sha256, True) as file:
        reader = archive.Reader(file, "it")
        members = {name: reader.read(name) for name in reader.manifest["members"]}  # each is what its digest says
    manifest = reader.manifest
    assert manifest["architectures"] == manifest["unmeasured"] == list(ARCHITECTURES)
    assert manifest["cuda"] == gpu.cuda_version()
    found = [cubins(members[kernel["member"]]) for kernel in manifest["kernels"].values()]
    assert {(2, 80)} in found and {(2, 90)} in found
    assert all(code <= {(2, 80), (2, 90)} and len(code) <= 1 for code in found)
    labels = {kernel["label"] for kernel in manifest["kernels"].values()}
    assert labels >= {source.label for source in program.sources(torch.device("cpu"))}
    if not torch.cuda.is_available():
        with pytest.raises(PackageError, match="was saved for a GPU, and torch finds none here"):
            fxfuse.load(path)


def test_the_model_and_its_buffers_stay_what_they_are(traced, tmp_path):
    model = network(torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = randn(2, 8, 8, 8).bfloat16()
    kept = x.clone()
    traced(tmp_path / "it", model, x)
    assert torch.equal(x, kept)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_everything_is_on_the_gpu_that_was_on_the_cpu(traced, tmp_path):
    path = tmp_path / "it"
    traced(path, network(torch.float32), randn(2, 8, 8, 8))
    with archive.opened(path, None, True) as file:
        described = json.loads(archive.Reader(file, "it").read("graphs.json"))
    assert described["device"] == "cuda"
    text = json.dumps(described["entries"])
    assert '["device", "cuda"]' in text and '["device", "cpu"]' not in text
    assert {tensor["device"] for tensor in described["tensors"]} == {"cuda"}


def test_kernels_of_regions_and_of_what_lies_between_them_are_there_for_each_architecture(traced, tmp_path):
    sources, manifest = traced(tmp_path / "it", network(torch.bfloat16), randn(2, 8, 8, 8).bfloat16())
    for chosen in GPUS:
        labels = [source.label for source in sources if source.architecture == chosen.capability]
        assert {"loops", "the executor of programs"} <= set(labels)
        for part in ("conv2d: relu(batch_norm", "silu", "bf16"):
            assert any(part in label for label in labels), part
    assert [source.label for source in sources if not source.is_cuda] == [guard.SOURCE.label]
    assert [tuple(one) for one in manifest["gpus"]] == [
        (alike.name, alike.multi_processor_count, alike.architecture) for chosen in GPUS for alike in chosen.alike()
    ]
    assert manifest["choices"] and all(choice["measured"] == [] for choice in manifest["choices"].values())


class Attending(nn.Module):
    """Causal attention of four heads."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_kernels_of_attention_are_there(traced, tmp_path):
    """Exported graphs call torch's operator for it, and not its function."""
    sources, _ = traced(tmp_path / "it", Attending().eval().bfloat16(), randn(2, 40, 32).bfloat16())
    for chosen in GPUS:
        labels = [source.label for source in sources if source.architecture == chosen.capability]
        assert any(label.startswith("attention bfloat16 8, causal") for label in labels), labels


@pytest.mark.parametrize(("allowed", "kinds"), [(True, {"tf32", "tf32x3"}), (False, {"tf32x3"})])
def test_where_torch_may_use_tf32_there_are_kernels_for_both_answers(allowed, kinds, traced, tmp_path):
    model = nn.Sequential(nn.Conv2d(8, 64, 3, padding=1), nn.ReLU()).eval()
    with torch.backends.cudnn.flags(allow_tf32=allowed):
        sources, _ = traced(tmp_path / "it", model, randn(8, 8, 32, 32), architectures=("sm_80",))
    found = {kind for source in sources for kind in ("tf32", "tf32x3") if f" {kind} " in source.label}
    assert found == kinds


# -------------------------------------------------------------------------------------- where it is loaded


@contextlib.contextmanager
def loaded_as_by(path, chosen, brought, missing, tf32=False):
    """A package's module as a GPU would load it, whose tensors others stand in for; kernels that are not `brought` are
    noted, and missing."""
    with archive.opened(path, None, True) as file:
        reader = archive.Reader(file, "it")
        described = json.loads(reader.read("graphs.json"))
        on_cpu = {**described, "tensors": [{**one, "device": "cpu"} for one in described["tensors"]]}
        values = tensors.read(reader, on_cpu, torch.device("cpu"), None)
    known = {build.portable_key(source) for source in brought}
    load = build.load

    def load_brought(source):
        if build.portable_key(source) not in known:
            missing.append(source.label)
            packaged.check_may_build(source.label)
        return load(source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "load", load_brought)
        patch.setattr(tune, "enabled", lambda: True)  # choices are looked up
        patch.setattr(tune, "_choices", {})
        patch.setattr(packaged, "choices", dict(reader.manifest["choices"]))
        alike = [tuple(one) for *one, architecture in reader.manifest["gpus"] if architecture == chosen.architecture]
        patch.setattr(packaged, "gpus", alike)
        with gpu.instead_of(gpu.Standing(chosen, tf32)), torch.no_grad(), standing_in():
            tree = tensors.tree_of(described, {name: StandIn(value) for name, value in values.items()})
            yield module_of(described, tree, DEVICE, "it", builds=False, unmeasured=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_of_the_architecture_asks_for_what_the_package_brings(dtype, traced, tmp_path):
    path, examples = tmp_path / "it", [randn(batch, 8, 8, 8).to(dtype) for batch in (2, 16)]
    sources, _ = traced(path, network(dtype), *examples)
    for described in (alike for chosen in GPUS for alike in chosen.alike()):
        chosen = dataclasses.replace(described, name="a real one")
        for tf32 in (False, True):
            missing = []
            with loaded_as_by(path, chosen, sources, missing, tf32) as module:
                for x in examples if len(module.entries) > 1 else (*examples, randn(5, 8, 8, 8).to(dtype)):
                    for _ in range(2):
                        module(StandIn(x.clone()))
            assert missing == [], chosen


def test_what_one_missing_kernel_was_for_torch_computes_alone(traced, tmp_path, caplog):
    path, x = tmp_path / "it", randn(2, 8, 8, 8).bfloat16()
    sources, _ = traced(path, network(torch.bfloat16), x, architectures=("sm_80",))
    loops = [source for source in sources if source.label == "loops"]
    assert len(loops) > 1
    left_out, merged = loops[0], []
    missing = []
    brought = [source for source in sources if source is not left_out]
    with (
        caplog.at_level(logging.WARNING, "fxfuse"),
        loaded_as_by(path, GPUS[0], brought, missing) as module,
        packaged.noting() as used,
    ):
        for _ in range(2):
            module(StandIn(x.clone()))
    assert "torch computes a part of what stands between regions: it has no kernel for loops" in caplog.text
    merged = [source for source in used.sources.values() if source.label == "loops"]
    assert merged and all(source.text != left_out.text for source in merged)


# --------------------------------------------------------------------------------------- tensors that stand in


@pytest.mark.skipif(not emulator.available(), reason="the emulation needs Linux and g++ 12 or newer")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_planned_for_a_gpu_that_is_not_here_computes_what_eager_does(dtype, tmp_path, monkeypatch):
    """On the emulated GPU kernels run where the tensors that stand in are: in the CPU's memory."""
    model = network(dtype, attends=False)  # attention of a GPU has no values here
    examples = [randn(batch, 8, 8, 8).to(dtype) for batch in (2, 3)]
    load, ran = build.load, []

    def load_emulated(source):
        if not source.is_cuda or source.label == "loops":  # the program is not run
            return load(source)
        library = emulator.compiled(source.text)

        def launch(params, stream, *pointers):
            ran.append(source.label)
            code = library.fxfuse_launch(params, (ctypes.c_uint64 * len(pointers))(*pointers), ctypes.c_uint64(stream))
            assert code == 0, library.fxfuse_error(code)

        return types.MethodType(lambda self, *given: launch(*given), types.SimpleNamespace(functions=(0, 0)))

    monkeypatch.setattr(build, "load", load_emulated)
    results = []
    forward = cross.module_of

    def module_of(*args, **options):
        module = forward(*args, **options)
        monkeypatch.setattr(module, "forward", noting(module.forward), raising=False)
        return module

    def noting(call):
        def noted(*args, **kwargs):
            results.append(call(*args, **kwargs))
            return results[-1]

        return noted

    monkeypatch.setattr(cross, "module_of", module_of)
    monkeypatch.setattr(saving, "_add_kernels", lambda *given: {})
    monkeypatch.setattr(toolchain, "nvcc_version", lambda: "13.0")
    monkeypatch.setattr(toolchain, "nvcc_architectures", list)
    with torch.backends.cudnn.flags(allow_tf32=False):
        for x in examples:
            fxfuse.save(fxfuse.optimize(model), tmp_path / "it", x, architectures=("sm_80",))
    assert len(ran) >= 8
    calls = 2 * len(GPUS[0].alike())
    exact = [model.double()(x.double()) for x in examples for _ in range(calls)]
    assert len(results) == len(exact)
    for result, expected in zip(results, exact, strict=True):
        assert result.is_cuda and result.dtype == dtype
        torch.testing.assert_close(result.held.double(), expected, **TOLERANCE[dtype])


TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.bfloat16: {"rtol": 0.05, "atol": 0.02}}
"""Of values between 0 and 1 behind several products."""


def test_attention_is_what_a_gpu_computes_it_by():
    """Which operator, and how its result lies, decides on the kernels around it."""
    for dtype, mask, operator in (
        (torch.bfloat16, None, "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, StandIn(torch.ones(1, 1, 6, 6, dtype=torch.bool)), "_scaled_dot_product_efficient_attention"),
        (torch.float32, None, "_scaled_dot_product_efficient_attention"),
    ):
        query = StandIn(randn(2, 6, 4, 16).to(dtype)).transpose(1, 2)
        with torch.no_grad(), standing_in(), Operators() as seen:
            result = F.scaled_dot_product_attention(query, query, query, mask)
        assert operator in [operation.overload._schema.name.split("::")[1] for operation in seen.operations]
        assert result.is_cuda and (result.shape, result.stride()) == (query.shape, query.stride())
    with torch.no_grad():  # outside it is torch's own
        assert F.scaled_dot_product_attention(*[query.held] * 3).abs().sum() > 0


def test_tensors_that_stand_in_are_views_and_are_overwritten_as_others_are():
    held = torch.zeros(4, 6)
    with torch.no_grad(), standing_in():
        tensor = StandIn(held.view(4, 6))
        tensor[1:3].add_(1)
        tensor.t().select(0, 0).fill_(5)
        made = torch.ops.aten.arange.default(4, device=DEVICE)
        moved = tensor.unsqueeze_(0)
        assert tensor.to("cpu").is_cpu and type(made + tensor.sum()) is StandIn
    assert moved is tensor and tensor.shape == (1, 4, 6) and tensor.device == DEVICE
    assert tensor.data_ptr() == held.data_ptr() and held[1:3, 1:].eq(1).all() and held[:, 0].eq(5).all()


# ------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("architectures", "version", "known", "said"),
    [
        (("sm_75",), "13.0", [], r"cannot be compiled for 'sm_75'; for GPUs there are sm_80, sm_86"),
        (("sm_80",), None, [], r"need nvcc, and none is found: install the CUDA toolkit of the version that torch has"),
        (("sm_80", "sm_120"), "12.4", ["sm_80"], r"nvcc 12.4 does not compile for sm_120; install a newer CUDA"),
        (("sm_80", "x86-64-v9"), "13.0", [], r"cannot be compiled for 'x86-64-v9'; for CPUs there are"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_for_is_refused(architectures, version, known, said, tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "nvcc_version", lambda: version)
    monkeypatch.setattr(toolchain, "nvcc_architectures", lambda: known)
    with pytest.raises(PackageError, match=said):
        fxfuse.save(fxfuse.optimize(nn.Linear(2, 2).eval()), tmp_path / "it", randn(2, 2), architectures=architectures)
    assert not (tmp_path / "it").exists()


def test_a_model_on_a_gpu_is_compiled_for_that_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert saving._targets(("sm_80",), DEVICE) == ("native", [])
    with pytest.raises(PackageError, match=r"on \(sm_80\). Move the model and the examples to the CPU to compile"):
        saving._targets(("sm_90",), DEVICE)


def test_other_threads_plan_for_the_gpu_that_they_have(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    found = []

    def ask():
        found.append((gpu.capability(DEVICE), exactness.enabled()))

    monkeypatch.setenv("FXFUSE_TUNE", "1")
    with gpu.instead_of(gpu.Standing(GPUS[1])):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        ask()
    assert found == [((8, 9), True), ((9, 0), False)]
