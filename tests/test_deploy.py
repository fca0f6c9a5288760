"""Packages: what is saved runs in a process without a compiler and without the model's source; what is damaged, of
other versions, for another machine or not to be trusted is refused."""

import dataclasses
import importlib.util
import inspect
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from helpers import Net2, randn
from torch import fx, nn

import fxfuse
from fxfuse import FxfuseWarning, MissingKernelError, PackageError, build, packaged, toolchain
from fxfuse.cuda import tune
from fxfuse.deploy import archive, graphs, loading, machine, saving, sizes, trees
from fxfuse.deploy.entries import call_of
from fxfuse.errors import BuildError
from fxfuse.problem import TensorMeta

pytestmark = pytest.mark.skipif(toolchain.cxx() is None, reason="packages are made with a compiler")

SOURCE = '''
import torch
from dataclasses import dataclass
from torch import nn
from torch.nn import functional as F


@dataclass
class Found:
    scores: torch.Tensor
    hidden: torch.Tensor


class Perceptron(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4), nn.Tanh())


class Network(nn.Module):
    """A convolution with batch normalisation, twice, a residual, and a classifier."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.body_norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)
        self.unused = nn.Linear(2, 2)
        with torch.no_grad():
            for norm in (self.norm, self.body_norm):
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(x + self.body_norm(self.body(x)))
        return self.head(x.mean((2, 3)))


class Transformer(nn.Module):
    """One layer, before which nothing about shapes is known to torch.fx."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.norm, self.last_norm = nn.LayerNorm(16), nn.LayerNorm(16)
        self.in_projection, self.out_projection = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids, mask=None):
        x = self.embedding(ids)
        qkv = self.in_projection(self.norm(x)).view(*x.shape[:-1], 3, 2, 8)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        bias = None if mask is None else (1.0 - mask[:, None, None, :].to(x.dtype)) * -1e9
        x = x + self.out_projection(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.last_norm(x))))
        return Found(self.head(x), x)
'''

CHILD = """
import importlib.util, json, sys
import torch, fxfuse
from fxfuse import toolchain

torch.set_num_threads(1)
said = {"compiler": toolchain.cxx(), "source": importlib.util.find_spec("their_models") is not None}
for name, examples in torch.load("inputs.pt").items():
    fast = fxfuse.load(name + ".fxfuse", strict=True)
    results = []
    for example in examples:
        for _ in range(4):
            result = fast(**example)
        results.append({**result} if isinstance(result, dict) else result)
    report = fxfuse.explain(fast)
    torch.save([results, dict(fast.state_dict())], name + ".results.pt")
    said[name] = [[region.kernel is not None for region in report.regions], len(report.programs)]
json.dump(said, open("said.json", "w"))
"""


def without_compilers():
    """An environment in which nothing can be compiled, and the kernel cache is empty."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CXX", "CUDA", "FXFUSE"))}
    return {**kept, "PATH": "/nonexistent", "PYTHONPATH": str(Path(fxfuse.__file__).parents[1])}


def test_the_bytes_of_a_tensor_that_nobody_else_has_are_its_own():
    """As those of a GPU's, of which a copy is written."""
    for count in (64, 1000, 100_000):
        view = archive.bytes_of(torch.arange(count).clone())
        others = [torch.full((count,), 7) for _ in range(8)]
        assert bytes(view) == bytes(archive.bytes_of(torch.arange(count))), others[0]


class SeenTwice(nn.Module):
    """Two buffers with the same memory, of which one reads numbers as bits."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("numbers", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.register_buffer("bits", self.numbers.view(torch.int32))

    def forward(self, x):
        return torch.relu(self.fc(x)) * self.numbers, self.bits + 1


def test_one_memory_may_be_tensors_of_several_dtypes(tmp_path):
    model, x = SeenTwice().eval(), randn(3, 4)
    path = tmp_path / "model.fxfuse"
    fxfuse.save(fxfuse.optimize(model), path, x)
    fast = fxfuse.load(path)
    assert fast.bits.dtype is torch.int32
    torch.testing.assert_close(fast(x), model(x))


@pytest.fixture(scope="module")
def their_models(tmp_path_factory):
    """A module that only this process can import."""
    file = tmp_path_factory.mktemp("theirs") / "their_models.py"
    file.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("their_models", file)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "their_models", module)
        spec.loader.exec_module(module)
        # Found must be known to torch.export: how it is taken apart is its owner's business
        torch.export.register_dataclass(module.Found)
        yield module


def ids(batch, length):
    return torch.randint(0, 11, (batch, length), generator=torch.Generator().manual_seed(batch))


CASES = {
    "Perceptron": [{"input": randn(3, 8)}, {"input": randn(7, 8)}],
    "Network": [{"x": randn(2, 3, 8, 8)}],
    "Transformer": [
        {"ids": ids(2, 5)}, {"ids": ids(4, 7)}, {"ids": ids(2, 5), "mask": torch.tensor([[1, 1, 1, 0, 0], [1] * 5])},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def elsewhere(their_models, tmp_path_factory):
    """What a process without a compiler, without a cache and without the models' source made of their packages."""
    folder = tmp_path_factory.mktemp("packages")
    models = {}
    for name, examples in CASES.items():
        torch.manual_seed(0)
        models[name] = getattr(their_models, name)().eval()
        fxfuse.save(fxfuse.optimize(models[name]), folder / f"{name}.fxfuse", *examples)
    torch.save(CASES, folder / "inputs.pt")
    environment = {**without_compilers(), "FXFUSE_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return models, json.loads((folder / "said.json").read_text()), folder


@pytest.mark.parametrize("name", CASES)
def test_a_package_runs_without_a_compiler_and_without_the_models_source(name, elsewhere):
    models, said, folder = elsewhere
    assert said["compiler"] is None and said["source"] is False
    by_kernel, programs = said[name]
    assert by_kernel and all(by_kernel) and programs
    results, state = torch.load(folder / f"{name}.results.pt")
    for example, result in zip(CASES[name], results, strict=True):
        with torch.no_grad():
            expected = models[name](**example)
        expected = expected if isinstance(expected, torch.Tensor) else vars(expected)
        torch.testing.assert_close(result, expected)
    expected = models[name].state_dict()
    assert list(state) == list(expected)
    for path, tensor in expected.items():
        assert torch.equal(state[path], tensor), path


# --------------------------------------------------------------------------------------------- one process


@pytest.fixture
def nothing_compiles(forget, monkeypatch, tmp_path):
    """Call it to go on as another process would, with an empty cache and no compiler."""

    def as_elsewhere():
        forget()
        monkeypatch.setenv("FXFUSE_CACHE_DIR", str(tmp_path / "another cache"))
        monkeypatch.setenv("PATH", "/nonexistent")
        monkeypatch.delenv("CXX", raising=False)

    monkeypatch.setattr(packaged, "kernels", {})
    monkeypatch.setattr(packaged, "choices", {})
    return as_elsewhere


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.fc(x)) + x


@pytest.fixture(scope="module")
def saved(tmp_path_factory, session_cache):
    """A small package, not to be changed."""
    torch.manual_seed(0)
    model = Plain().eval()
    return fxfuse.save(fxfuse.optimize(model), tmp_path_factory.mktemp("saved") / "plain.fxfuse", randn(3, 8)), model


@pytest.fixture
def file(saved, tmp_path):
    """A copy of it."""
    return shutil.copy(saved[0].path, tmp_path / "plain.fxfuse")


def test_what_was_saved_is_said(saved, file):
    written, model = saved
    assert written.bytes == written.path.stat().st_size and written.sha256 == archive.digest_of(file)
    assert [str(entry) for entry in written.entries] == ["(x: float32[3, 8])"]
    assert any("relu(acc)" in label for label in written.kernels)
    fast = fxfuse.load(file)
    assert [str(entry) for entry in fast.entries] == ["(x: float32[3, 8])"]
    assert fxfuse.verify(model, fast, randn(3, 8))
    assert not any(parameter.requires_grad for parameter in fast.parameters())


def rewritten(path, change, name=archive.MANIFEST):
    """The package again, a member of which is what `change` makes of it."""
    with zipfile.ZipFile(path) as before:
        members = {info.filename: before.read(info) for info in before.infolist()}
    members[name] = change(members[name])
    with zipfile.ZipFile(path, "w") as after:
        for member, data in members.items():
            if data is not None:
                after.writestr(member, data)


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


def in_manifest(change):
    """A change of the manifest by one who keeps its digest right."""

    def changed(data):
        document = json.loads(data)
        change(document)
        document["digest"] = archive._digest(document["value"])
        return json.dumps(document).encode()

    return changed


@pytest.mark.parametrize("member", ["graphs.json", "tensors/0", "kernels/"])
def test_a_tampered_member_is_named(member, file):
    with zipfile.ZipFile(file) as package:
        name = next(name for name in package.namelist() if name.startswith(member))
    rewritten(file, flipped, name)
    with pytest.raises(PackageError, match=f"'plain.fxfuse' is damaged: {name} is not what was saved"):
        fxfuse.load(file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.replace(b'"torch"', b'"Torch"'), "its manifest is not what was saved"),
        (lambda data: data[: len(data) // 2], "no package of fxfuse, or not all of one"),
        (lambda data: b"[]", "no package of fxfuse"),
        (lambda data: None, "no package of fxfuse"),
        (in_manifest(lambda document: document.update(format=99)), "has format 99"),
        (in_manifest(lambda document: document.update(kind="a song")), "of 'a song'"),
        (in_manifest(lambda document: document["value"]["members"].popitem()), "it has other members than were saved"),
        (in_manifest(lambda document: document["value"].pop("cpu")), "does not hold what a package"),
        (in_manifest(lambda document: document["value"]["kernels"].update(k={})), "does not hold what a package"),
    ],
)
def test_a_manifest_that_is_not_what_was_saved(change, said, file):
    rewritten(file, change)
    with pytest.raises(PackageError, match=said):
        fxfuse.load(file)


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file(part, file):
    whole = Path(file).read_bytes()
    Path(file).write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(PackageError, match="no package of fxfuse, or not all of one"):
        fxfuse.load(file)


@pytest.mark.parametrize("every", [97])
def test_no_damaged_byte_passes(every, file):
    """Bytes of headers between members are none of the package's: what is loaded then is what was saved."""
    whole = Path(file).read_bytes()
    expected = fxfuse.load(file)(randn(3, 8))
    refused = 0
    for at in range(0, len(whole), every):
        Path(file).write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            fast = fxfuse.load(file)
        except PackageError:
            refused += 1
        else:
            assert torch.equal(fast(randn(3, 8)), expected)
    assert refused > len(whole) // every * 0.9


@pytest.mark.parametrize("name", machine.here())
def test_another_version_or_platform_is_named(name, file, monkeypatch):
    here = machine.here()
    monkeypatch.setattr(machine, "here", lambda: {**here, name: "another one"})
    with pytest.raises(PackageError, match=rf"saved for {re.escape(name)} .*, here it is another one; save it"):
        fxfuse.load(file)


def test_a_cpu_without_the_instructions(file, monkeypatch):
    monkeypatch.setattr(machine, "features", frozenset)
    with pytest.raises(PackageError, match=r"has code for a CPU with .*, which this one has not; save it with"):
        fxfuse.load(file)


def test_a_package_for_a_gpu_needs_one(file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PackageError, match="torch finds none here"):
        machine.check_cuda({"cuda": "13.0"}, "it")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(PackageError, match=r"saved with CUDA 13.0, torch has 12.8 here"):
        machine.check_cuda({"cuda": "13.0"}, "it")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    saved = {"architectures": ["sm_80", "sm_90"], "unmeasured": ["sm_90"]}
    assert not machine.check_gpu(saved, torch.device("cuda", 0), "it")
    with pytest.raises(PackageError, match="has kernels for sm_90; cuda:0 is sm_80"):
        machine.check_gpu({"architectures": ["sm_90"]}, torch.device("cuda", 0), "it")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert machine.check_gpu(saved, torch.device("cuda", 0), "it")
    with pytest.raises(PackageError, match="was saved for cpu, not cuda"):
        fxfuse.load(file, device="cuda")


def test_what_others_could_have_written_is_refused(file, saved, monkeypatch):
    os.chmod(file, 0o666)
    with pytest.raises(PackageError, match="can be written by other users: chmod go-w it first"):
        fxfuse.load(file)
    assert fxfuse.load(file, check_owner=False)
    assert fxfuse.load(file, sha256=saved[0].sha256)
    os.chmod(file, 0o644)
    assert fxfuse.load(file)
    if os.getuid() == 0:
        os.chown(file, 4321, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 4321)
    with pytest.raises(PackageError, match="belongs to another user"):
        fxfuse.load(file)
    assert fxfuse.load(file, sha256=saved[0].sha256)


def test_the_digest_says_which_file_it_is(file):
    with pytest.raises(PackageError, match="it is another file"):
        fxfuse.load(file, sha256="0" * 64)


def test_what_is_no_file(tmp_path):
    with pytest.raises(PackageError, match="cannot be opened: No such file"):
        fxfuse.load(tmp_path / "missing")
    with pytest.raises(PackageError, match=r"cannot be opened|is not a file"):
        fxfuse.load(tmp_path)


# ----------------------------------------------------------------------------------------------- arguments


class Choosy(nn.Module):
    """Takes arguments of every kind, and computes something else for some."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("shift", torch.ones(8), persistent=False)
        self.range = torch.arange(8.0)
        self.unused = nn.ModuleList([nn.Linear(2, 2)])

    def forward(self, x, y=None, scale=2, *rest, flag=True, **further):
        z = torch.relu(self.one(x)) * scale + self.shift + self.range + torch.tensor(3.0)
        if y is not None:
            z = z + torch.tanh(self.other(y))
        if x.shape[0] % 4 == 0:
            z = z * 2
        if not flag:
            z = -z
        for other in rest:
            z = z + other
        self.calls += 1
        return z, {"found": [further.get("extra", 5), x.shape[0], None]}


@pytest.fixture(scope="module")
def choosy(tmp_path_factory, session_cache):
    torch.manual_seed(0)
    model, x, y = Choosy().eval(), randn(4, 8), randn(4, 8, seed=1)
    examples = [
        (x,), (randn(8, 8),), (x, y), {"x": x, "scale": 3, "flag": False}, (x, x, 2, x), {"x": x, "extra": x},
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("choosy") / "choosy.fxfuse"
    fxfuse.save(fxfuse.optimize(model), path, *examples)
    return model, fxfuse.load(path)


X, Y = randn(4, 8, seed=2), randn(4, 8, seed=3)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X,), {}),
        ((), {"x": X}),
        ((X, None, 2), {"flag": True}),
        ((X, Y), {}),
        ((X,), {"y": Y}),
        ((X, None, 3), {"flag": False}),
        ((X, Y, 2, randn(4, 8)), {}),
        ((X,), {"extra": Y}),
        ((X.t().contiguous().t()[:, :8].expand(4, 8),), {}),
    ],
)
def test_calls_like_the_examples_however_they_are_written(args, kwargs, choosy):
    model, fast = choosy
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(fast(*args, **kwargs), model(*args, **kwargs))


@pytest.fixture(scope="module")
def finds_conditions():
    """Whether torch.export finds by itself that a size may vary, and on which condition."""

    class Even(nn.Module):
        def forward(self, x):
            return x * 2 if x.shape[0] % 2 == 0 else x

    auto = getattr(torch.export.Dim, "AUTO", None)
    try:
        program = torch.export.export(Even(), (randn(4),), strict=False, dynamic_shapes=auto and ({0: auto},))
    except Exception:  # torch 2.5: a KeyError of its own, in place of what it has to say
        return False
    (given,) = (node.meta["val"] for node in program.graph.nodes if node.op == "placeholder")
    return not isinstance(given.shape[0], int)


def test_sizes_vary_on_conditions_that_torch_export_finds(choosy, finds_conditions):
    """Of which a graph of its own was not made: the examples have 4 and 8 rows."""
    if not finds_conditions:
        pytest.skip(f"torch.export of torch {torch.__version__} finds no conditions by itself")
    model, fast = choosy
    with torch.no_grad():
        torch.testing.assert_close(fast(randn(12, 8)), model(randn(12, 8)))


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((X[:3],), {}, r"a call with \(x: float32\[3, 8\]\): save it again with an example"),
        ((X.double(),), {}, r"x: float64\[4, 8\]"),
        ((X[None],), {}, r"x: float32\[1, 4, 8\]"),
        ((X, None, 4), {}, "scale: 4"),
        ((X, None, 2.0), {}, r"scale: 2\.0"),
        ((X, None, 2, X), {}, "rest: tuple"),
        ((X,), {"more": X}, "further: dict"),
    ],
)
def test_calls_that_no_example_was_like_are_refused(args, kwargs, said, choosy, finds_conditions):
    with pytest.raises(PackageError, match=said) as caught:
        choosy[1](*args, **kwargs)
    assert "It was saved for calls with\n  (x: float32[" in str(caught.value)
    assert ("% 4) == 0" in str(caught.value)) is finds_conditions


def test_arguments_that_python_would_refuse(choosy):
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        choosy[1]()


def test_the_models_tensors_keep_their_names_and_ties(choosy):
    model, fast = choosy
    assert list(fast.state_dict()) == list(model.state_dict())
    assert fast.one.weight is fast.other.weight
    before = fast.calls.clone()
    fast(X)
    assert torch.equal(fast.calls, before + 1)


def test_a_loaded_model_is_converted_and_given_weights_as_any_module(saved, file):
    fast, model = fxfuse.load(file), Plain().eval()
    fast.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(fast(X[:3]), model(X[:3]))
    fast.eval().requires_grad_(False)
    with pytest.raises(PackageError, match="was saved in evaluation mode, and has no other"):
        fast.train()


def test_sizes_in_which_examples_differ_vary(tmp_path):
    model = Net2(lambda m, x, y: torch.relu(m.fc(x)) + y, fc=nn.Linear(8, 8)).eval()
    path = tmp_path / "sizes.fxfuse"
    fxfuse.save(fxfuse.optimize(model), path, (randn(3, 8), randn(3, 8)), (randn(7, 8), randn(7, 8)))
    fast = fxfuse.load(path)
    (entry,) = fast.entries
    assert entry.leaves[0].sizes == entry.leaves[1].sizes and isinstance(entry.leaves[0].sizes[0], str)
    assert str(sys.maxsize)[:9] not in str(entry)
    with torch.no_grad():
        torch.testing.assert_close(fast(randn(64, 8), randn(64, 8)), model(randn(64, 8), randn(64, 8)))
    with pytest.raises(PackageError, match="no graph for a call"):
        fast(randn(5, 8), randn(6, 8))


def test_sizes_that_may_vary_are_named_by_the_caller(tmp_path):
    model = Plain().eval()
    rows = torch.export.Dim("rows", min=2, max=64)
    path = tmp_path / "rows.fxfuse"
    fxfuse.save(fxfuse.optimize(model), path, randn(3, 8), dynamic_shapes={"x": {0: rows}})
    fast = fxfuse.load(path)
    with torch.no_grad():
        torch.testing.assert_close(fast(randn(64, 8)), model(randn(64, 8)))
    with pytest.raises(PackageError, match=r"<= 64"):
        fast(randn(65, 8))


def test_results_of_classes_that_are_not_there_have_their_parts_by_name():
    record = trees.Record(scores=1, hidden=2)
    assert (record.scores, record["hidden"], record[0], record[:2]) == (1, 2, 1, (1, 2))
    with pytest.raises(AttributeError, match="this result has no 'loss'; it has scores, hidden"):
        record.loss  # noqa: B018


def test_arguments_are_given_by_position_where_they_must_be():
    def forward(a, /, b=2, *rest, c=3, **others): ...

    signature = inspect.signature(forward)
    assert call_of(signature, {"a": 1}) == ((1,), {})
    assert call_of(signature, {"a": 1, "c": 4, "others": {"d": 5}}) == ((1,), {"c": 4, "d": 5})
    assert call_of(signature, {"a": 1, "rest": (7,)}) == ((1, 2, 7), {"c": 3})


# ------------------------------------------------------------------------------------------------- weights


def test_weights_may_stay_elsewhere(saved, tmp_path):
    model, path = saved[1], tmp_path / "without.fxfuse"
    fxfuse.save(fxfuse.optimize(model), path, randn(3, 8), weights=False)
    with zipfile.ZipFile(path) as package:
        assert not [name for name in package.namelist() if name.startswith("tensors/")]
    with pytest.raises(PackageError, match=r"has no weights: give load\(\) a state_dict"):
        fxfuse.load(path)
    fast = fxfuse.load(path, state_dict=model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(fast(randn(3, 8)), model(randn(3, 8)))
    assert fast.fc.weight.data_ptr() != model.fc.weight.data_ptr()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("fc.bias"), "state_dict has no 'fc.bias'"),
        (lambda state: state.update(more=torch.zeros(1)), "state_dict has 'more', which the model"),
        (lambda state: state.update({"fc.bias": torch.zeros(9)}), r"'fc.bias' of state_dict is torch.float32 \[9\]"),
        (lambda state: state.update({"fc.bias": torch.zeros(8).half()}), "'fc.bias' of state_dict is torch.float16"),
    ],
)
def test_weights_of_another_model(change, said, saved, file):
    state = dict(saved[1].state_dict())
    change(state)
    with pytest.raises(PackageError, match=said):
        fxfuse.load(file, state_dict=state)


# ------------------------------------------------------------------------------------------------- kernels


def test_a_kernel_that_the_package_does_not_have(saved, tmp_path, nothing_compiles, monkeypatch):
    model, path = saved[1], tmp_path / "plain.fxfuse"
    monkeypatch.setattr(saving, "_add_kernels", lambda *_: {})
    fxfuse.save(fxfuse.optimize(model), path, randn(3, 8))
    compiler = os.environ["PATH"]
    nothing_compiles()
    fast = fxfuse.load(path)
    with torch.no_grad(), pytest.warns(FxfuseWarning, match=r"'plain.fxfuse' has no kernel for .*save it again"):
        torch.testing.assert_close(fast(randn(3, 8)), model(randn(3, 8)))
    (region,) = fxfuse.explain(fast).regions
    assert region.kernel is None and "has no kernel for" in region.fallback
    with pytest.raises(MissingKernelError, match="load it with build=True where there is a compiler"):
        fxfuse.load(path, strict=True)(randn(3, 8))
    monkeypatch.setenv("PATH", compiler)
    with pytest.raises(MissingKernelError):  # also where there is a compiler, which nobody asked to run
        fxfuse.load(path, strict=True)(randn(3, 8))
    fast = fxfuse.load(path, strict=True, build=True)
    torch.testing.assert_close(fast(randn(3, 8)), model(randn(3, 8)))
    assert fxfuse.explain(fast).regions[0].kernel is not None


def test_nothing_is_compiled_for_what_the_package_has(file, nothing_compiles, monkeypatch):
    monkeypatch.setattr(build, "_load_inline", None)  # where there is a compiler, too
    nothing_compiles()
    fast = fxfuse.load(file, strict=True, build=True)
    for _ in range(4):
        fast(randn(3, 8))
    assert fxfuse.explain(fast).programs


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are x86-64's")
def test_kernels_for_all_cpus_of_a_level(saved, tmp_path, nothing_compiles):
    model, path = saved[1], tmp_path / "v2.fxfuse"
    fxfuse.save(fxfuse.optimize(model), path, randn(3, 8), architectures=("x86-64-v2",))
    with zipfile.ZipFile(path) as package:
        manifest = json.loads(package.read(archive.MANIFEST))["value"]
    assert manifest["cpu"] == machine._LEVELS["x86-64-v2"].split()
    nothing_compiles()
    fast = fxfuse.load(path, strict=True)
    with torch.no_grad():
        torch.testing.assert_close(fast(randn(3, 8)), model(randn(3, 8)))


def test_kernels_that_a_package_brought_are_compiled_for_the_next_one(
    saved, file, tmp_path, nothing_compiles, monkeypatch
):
    """A package's libraries are in no cache."""
    compiler = os.environ["PATH"]
    nothing_compiles()
    fxfuse.load(file)(randn(3, 8))
    monkeypatch.setenv("PATH", compiler)
    again = fxfuse.save(fxfuse.optimize(saved[1]), tmp_path / "again.fxfuse", randn(3, 8))
    assert again.kernels == saved[0].kernels


GPU_B = ["B", 2, "sm_80"]


def test_packages_of_several_machines_become_one(saved, file, tmp_path, nothing_compiles):
    """As of two GPUs: the second one has kernels, choices and an architecture of its own."""
    model, other, merged = saved[1], tmp_path / "other.fxfuse", tmp_path / "merged.fxfuse"
    shutil.copy(file, other)

    def differs(document):
        value = document["value"]
        (first, *_), value["choices"], value["gpus"] = value["kernels"].values(), {"key": {"tf32": True}}, [GPU_B]
        value["architectures"], value["kernels"] = ["sm_80"], {"0" * 32: {**first, "label": "another one"}}

    rewritten(other, in_manifest(differs))
    fxfuse.merge(merged, file, other)
    with zipfile.ZipFile(merged) as package:
        manifest = json.loads(package.read(archive.MANIFEST))["value"]
    assert {"another one", *saved[0].kernels} == {kernel["label"] for kernel in manifest["kernels"].values()}
    assert (manifest["architectures"], manifest["gpus"]) == (["sm_80"], [GPU_B])
    assert manifest["choices"] == {"key": {"tf32": True}}
    nothing_compiles()
    fast = fxfuse.load(merged, strict=True)
    with torch.no_grad():
        torch.testing.assert_close(fast(randn(3, 8)), model(randn(3, 8)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda value: value.update(torch="1.0"), "is for torch .*, package 'other.fxfuse' for 1.0"),
        (lambda value: value["members"]["tensors/0"].update(sha256="0"), "not of one model: their weights differ"),
        (lambda value: value["members"]["graphs.json"].update(sha256="0"), "not of one model: their calls differ"),
    ],
)
def test_packages_of_other_models_stay_apart(change, said, file, tmp_path):
    other = shutil.copy(file, tmp_path / "other.fxfuse")
    rewritten(other, in_manifest(lambda document: change(document["value"])))
    with pytest.raises(PackageError, match=said):
        fxfuse.merge(tmp_path / "merged.fxfuse", file, other)
    with pytest.raises(PackageError, match="at least two"):
        fxfuse.merge(tmp_path / "merged.fxfuse", file)
    assert not (tmp_path / "merged.fxfuse").exists()


def test_a_library_that_cannot_be_loaded(file, nothing_compiles, monkeypatch):
    def fails(key, library):
        raise ImportError("failed to map segment from shared object")

    monkeypatch.setattr(build, "import_library", fails)
    nothing_compiles()
    with pytest.raises(PackageError, match=r"cannot be loaded here: failed to map.*set TMPDIR"):
        fxfuse.load(file)


def test_a_package_is_warmed_up_by_calls_like_those_it_was_saved_for(choosy):
    _, fast = choosy
    before = {name: tensor.clone() for name, tensor in fast.state_dict().items()}
    assert fast.warm_up() is fast
    assert all(torch.equal(tensor, before[name]) for name, tensor in fast.state_dict().items())
    assert all(fxfuse.explain(graph).programs for graph in fast.graphs)


def test_no_files_are_left_of_loading(file, nothing_compiles, monkeypatch, tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(loading.tempfile, "gettempdir", lambda: str(folder))
    nothing_compiles()
    fxfuse.load(file)(randn(3, 8))
    assert not list(folder.iterdir())


def test_choices_are_those_of_the_machine_that_saved(monkeypatch):
    """On another GPU of the architecture; without any, the model's first candidate that the package has a kernel of."""
    x = TensorMeta((1,), (1,), torch.float32, torch.device("cuda", 0))
    problem = dataclasses.make_dataclass("Problem", ["label", "x"])("a problem", x)
    monkeypatch.setattr(tune, "_gpu", lambda device: ("A100 80 GB", 108))
    monkeypatch.setattr(tune, "_key", lambda problem, gpu=None: f"of {gpu or 'the GPU here'}")
    monkeypatch.setattr(tune, "_choices", {})
    monkeypatch.setenv("FXFUSE_TUNE", "1")
    monkeypatch.setattr(packaged, "choices", {})
    monkeypatch.setattr(packaged, "gpus", [("A100 40 GB", 108)])

    def missing(name):
        raise MissingKernelError(name)

    def candidate(name, is_packed):
        make = (lambda: lambda *_: name) if is_packed else (lambda: missing(name))
        return tune.Candidate(name, name, make)

    candidates = [candidate("best", False), candidate("second", True), candidate("third", True)]
    with packaged.only("the package"):
        assert tune.draft(problem, candidates)().kernel == "second"
        with pytest.raises(MissingKernelError, match="best"):
            tune.draft(problem, candidates[:1])
        broken = tune.Candidate("broken", "broken", lambda: (_ for _ in ()).throw(BuildError("broken")))
        assert tune.draft(problem, [broken, *candidates])().kernel == "second"
        choice = {"name": "third", "identity": "third", "measured": [["third", 1e-3]], "errors": []}
        packaged.choices["of ('A100 40 GB', 108)"] = choice
        plan = tune.draft(problem, candidates)()
        assert (plan.kernel, plan.measured) == ("third", (("third", 1e-3),))
        with packaged.noting() as used:
            tune.draft(problem, candidates)
        assert used.choices["of the GPU here"]["name"] == "third"


# ----------------------------------------------------------------------------------------- what is refused


class Deciding(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class Conditional(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


class Pretending(nn.Module):
    def forward(self, x):
        return x * 2 if torch.compiler.is_compiling() else x


@pytest.mark.parametrize(
    ("fast", "inputs", "options", "said"),
    [
        (lambda: fxfuse.optimize(Plain()), X, {}, r"in training mode.*call .eval"),
        (lambda: Plain().eval(), X, {}, "what fxfuse.optimize returned, not a Plain"),
        (lambda: fxfuse.optimize(Deciding().eval()), X, {}, "torch.export cannot capture it for this call"),
        (lambda: fxfuse.optimize(Conditional().eval()), X, {}, r"a part with a graph of its own, .* \(torch.cond"),
        (lambda: fxfuse.optimize(Pretending().eval()), X, {}, "computes something else than the model"),
        (lambda: fxfuse.optimize(Plain().eval()), X, {"architectures": ("arm",)}, "cannot be compiled for 'arm'"),
        (
            lambda: fxfuse.optimize(Plain().eval()),
            X,
            {"architectures": ("sm_70",)},
            "cannot be compiled for 'sm_70'",
        ),
        (lambda: fxfuse.optimize(Plain().eval()), X, {"architectures": "native"}, "is a list of names"),
        (lambda: fxfuse.optimize(Plain().eval()), 3, {}, "example 1 is a int"),
    ],
)
def test_what_cannot_be_saved(fast, inputs, options, said, tmp_path):
    with pytest.raises(fxfuse.FxfuseError, match=said):
        fxfuse.save(fast(), tmp_path / "it.fxfuse", inputs, **options)
    assert not list(tmp_path.iterdir())


def test_arguments_of_classes_of_others_are_refused():
    with pytest.raises(PackageError, match="an example is a Found, whose class the reader"):
        trees.flatten(dataclasses.make_dataclass("Found", ["x"])(1), "an example", False)
    with pytest.raises(PackageError, match=r"the result holds an object that torch.export takes apart"):
        trees.flatten(torch.return_types.max([torch.ones(1), torch.ones(1)]), "the result", True)


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (["x", "call", "os.system", ["true"], []], "calls os.system, which it may not"),
        (["x", "call", "op:aten::save.", [], []], "calls op:aten::save., which it may not"),
        (["x", "call", "op:nobody::knows.default", [], []], "calls nobody::knows, which is no operator here"),
        (["x", "call", "operator.add", [["torch", "load"], 1], []], "a value that is not understood"),
        (["x", "run"], "a node of unknown kind 'run'"),
    ],
)
def test_graphs_call_registered_operators_only(node, said):
    with pytest.raises(PackageError, match=said):
        graphs.rebuilt([node], torch.device("cpu"))


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -0.0, float("inf"), 2 - 1j, "text", [1, (2, [None])], {"a": [1], 2: ()}, slice(1, None, -1), ...,
        torch.float16, torch.strided, torch.channels_last, torch.device("cpu"),
    ],
)  # fmt: skip
def test_plain_values_stay_what_they_are(value):
    through = graphs.decoded(json.loads(json.dumps(graphs.encoded(value))), {})
    assert type(through) is type(value) and repr(through) == repr(value)


def test_values_of_other_classes_are_refused():
    with pytest.raises(PackageError, match="an argument of class Generator, which a package cannot hold"):
        graphs.encoded(torch.Generator())
    graph = fx.Graph()
    graph.call_function(print, (graph.placeholder("x"),))
    with pytest.raises(PackageError, match="calls print, which a package cannot hold"):
        graphs.describe(graph, str)


def test_conditions_on_sizes():
    sympy = pytest.importorskip("sympy")
    s = sympy.Symbol("s0", integer=True)
    for expression in (sympy.Eq(s % 8, 0), sympy.Ne(s * 2 + 1, 9), sympy.And(s >= 2, s < 7)):
        described = json.loads(json.dumps(sizes.described(expression)))
        for number in range(1, 20):
            assert sizes.value(described, {"s0": number}) == bool(expression.subs(s, number))
    assert sizes.text(sizes.described(sympy.Eq(s % 8, 0))) == "(s0 % 8) == 0"
    with pytest.raises(PackageError, match="which a package cannot say"):
        sizes.described(sympy.sin(s))


def test_a_loaded_model_is_copied_by_loading_it_again(file):
    import copy
    import pickle

    fast = fxfuse.load(file)
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(PackageError, match=r"load package|copy the file"):
            copying(fast)
