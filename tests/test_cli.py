"""The command line: what each command prints, its exit codes, and that failures name the thing and the remedy."""

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_cache import make_entry
from torch import nn

import fxfuse
from fxfuse import build, cache, cli, toolchain
from fxfuse.cli import doctor, model, terminal
from fxfuse.cli.cases import CASES
from fxfuse.cli.model import InputSpec
from fxfuse.deploy import archive

benchmark = sys.modules["fxfuse.benchmark"]

MODELS = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, mask=None):
        x = self.fc(x)
        return torch.relu(x if mask is None else x * mask)

instance = Small()
number = 3

def with_inputs():
    return Small(), (torch.ones(2, 8),)

def with_keywords():
    return Small(), {"x": torch.ones(3, 8), "mask": torch.zeros(3, 8)}

def of_tokens():
    return nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8), nn.ReLU())

def broken():
    raise RuntimeError("no weights here")

class Nested:
    make = Small
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A folder with models, in which a command is started."""
    (tmp_path / "my_models.py").write_text(MODELS)
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_missing")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    yield tmp_path
    sys.modules.pop("my_models", None)


def run(capsys, *arguments):
    """Exit code, stdout and stderr of a command line."""
    try:
        code = cli.main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# --------------------------------------------------------------------------------------------- in general


@pytest.mark.parametrize("command", ["", "doctor", "explain", "bench", "cache", "cache prune"])
def test_help_says_what_a_command_is_for(command, capsys):
    code, out, _ = run(capsys, *command.split(), "--help")
    assert code == 0 and out.startswith(f"usage: fxfuse {command}".strip())
    assert len(out.splitlines()) > 5


def test_help_lists_commands_cases_and_sources(capsys):
    assert {"doctor", "explain", "bench", "cache"} <= set(run(capsys, "--help")[1].split())
    text = run(capsys, "bench", "--help")[1]
    assert all(name in text for name in (*CASES, "timm:NAME", "torchvision:NAME", "transformers:TYPE"))


def test_the_module_and_its_version():
    for arguments, code, said in ((["--version"], 0, f"fxfuse {fxfuse.__version__}"), ([], 2, "COMMAND")):
        done = subprocess.run([sys.executable, "-m", "fxfuse", *arguments], capture_output=True, text=True)
        assert done.returncode == code and said in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("unknown", "invalid choice"),
        ("explain", "MODEL"),
        ("explain nothing", "is no built-in case (linear,"),
        ("explain timm:", "nothing on one side of its colon"),
        ("explain linear --input 3,4", "write 8x3x224x224"),
        ("explain linear --input 3x4:complex64", "is no dtype of inputs"),
        ("explain linear --batch 0", "is no positive number"),
        ("explain linear --device gpu", "is no device"),
        ("bench linear --compare onnx", "invalid choice: 'onnx'"),
        ("bench linear --seconds nan", "is no number of seconds"),
        ("cache", "ACTION"),
        ("cache prune --limit much", "is no number of bytes, such as 500M or 2G"),
    ],
)
def test_wrong_usage(arguments, said, capsys):
    code, out, err = run(capsys, *arguments.split())
    assert code == 2 and said in err and not out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("nowhere.models:Small", "there is no module nowhere.models here; start in its folder, or set PYTHONPATH"),
        ("needs_more:Small", "No module named 'a_package_that_is_missing'; install what it needs"),
        ("my_models:Large", "has no attribute 'Large'"),
        ("my_models:broken", "my_models:broken failed: RuntimeError: no weights here"),
        ("my_models:number", "is to make an nn.Module, or (module, inputs); it makes a int"),
        ("my_models:Small", "says nothing about its inputs; give them: --input"),
        ("my_models:Small --input 2x7", "cannot be called without fxfuse, either: RuntimeError"),
        ("my_models:with_inputs --device cuda:99", "there is no device cuda:99 here; `fxfuse doctor`"),
        ("my_models:with_inputs --device meta", "not for meta"),
        ("transformers:no_such_type", "transformers does not make 'no_such_type'"),
        ("timm:resnet18", "timm:resnet18 needs timm, which cannot be imported"),
    ],
)
def test_what_fails_names_the_remedy(arguments, said, models, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    if arguments.startswith("transformers"):
        pytest.importorskip("transformers")
    code, out, err = run(capsys, "explain", *arguments.split())
    assert code == 1 and not out
    assert err.startswith("fxfuse: error: ") and said in err and "Traceback" not in err


def test_a_traceback_if_it_is_asked_for(models):
    with pytest.raises(model.ModelError) as raised:
        cli.main(["--traceback", "explain", "my_models:broken"])
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_who_stops_reading_ends_a_command_quietly():
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([sys.executable, "-m", "fxfuse", "cache", "size"], stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert done.returncode == 1 and done.stderr == b""


def test_an_interrupt_is_no_traceback(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "status", interrupted)
    code, _, err = run(capsys, "cache", "size")
    assert code == 130 and err == "fxfuse: interrupted\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "coloured"),
    [
        (Terminal, {"TERM": "xterm"}, True),
        (Terminal, {"TERM": "xterm", "NO_COLOR": ""}, True),
        (Terminal, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (Terminal, {"TERM": "dumb"}, False),
        (io.StringIO, {"TERM": "xterm"}, False),
    ],
)
def test_colours_are_for_terminals_that_want_them(stream, environment, coloured, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert terminal.painted("ok", "green", stream()) == ("\x1b[32mok\x1b[0m" if coloured else "ok")


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KB"), (3 << 20, "3.0 MB"), (5 << 40, "5120.0 GB")]
)
def test_sizes_in_words(count, text):
    assert terminal.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (119, "119 s"), (180, "3 min"), (7200, "2 h"), (7e5, "8 days")]
)
def test_ages_in_words(seconds, text):
    assert terminal.age(seconds) == text


# ------------------------------------------------------------------------------------------------ MODEL


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("8x3x224x224", InputSpec(None, (8, 3, 224, 224), None)),
        ("7", InputSpec(None, (7,), None)),
        ("8x128:int64", InputSpec(None, (8, 128), torch.int64)),
        ("mask=8x128:bool", InputSpec("mask", (8, 128), torch.bool)),
        ("x=2", InputSpec("x", (2,), None)),
    ],
)
def test_inputs_are_read(text, spec):
    assert InputSpec.parse(text) == spec


@pytest.mark.parametrize("text", ["", "x", "8x", "8*3", "8x3:", "-1x3", "8x3:float", "8x3:Tensor"])
def test_what_is_no_input_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        InputSpec.parse(text)


def loaded(*arguments):
    return model.load(cli.parser().parse_args(["explain", *arguments, "--device", "cpu"]))


@pytest.mark.parametrize(
    ("spec", "inputs", "called_with"),
    [
        ("my_models:Small", ["--input", "2x8"], ([(2, 8)], {})),
        ("my_models:instance", ["--input", "2x8"], ([(2, 8)], {})),
        ("my_models:Nested.make", ["--input", "x=4x8", "--input", "mask=4x1"], ([], {"x": (4, 8), "mask": (4, 1)})),
        ("my_models:with_inputs", [], ([(2, 8)], {})),
        ("my_models:with_inputs", ["--input", "5x8"], ([(5, 8)], {})),
        ("my_models:with_keywords", [], ([], {"x": (3, 8), "mask": (3, 8)})),
        ("my_models:of_tokens", ["--input", "6x20:int64"], ([(6, 20)], {})),
    ],
)
def test_a_model_by_import_path(spec, inputs, called_with, models):
    subject = loaded(spec, *inputs)
    assert isinstance(subject.model, nn.Module) and not subject.model.training
    args, kwargs = called_with
    assert [tuple(x.shape) for x in subject.args] == args
    assert {name: tuple(x.shape) for name, x in subject.kwargs.items()} == kwargs
    assert "million parameters; called with" in subject.describe()


def test_a_dtype_is_the_models_and_its_inputs(models):
    for arguments in (["my_models:with_inputs"], ["my_models:Small", "--input", "2x8"], ["linear"]):
        subject = loaded(*arguments, "--dtype", "bfloat16")
        assert {x.dtype for x in (*subject.model.parameters(), *subject.args)} == {torch.bfloat16}


@pytest.mark.parametrize("name", CASES)
def test_built_in_cases_run(name):
    subject = loaded(name)
    assert tuple(subject.args[0].shape) == CASES[name].cpu_shape
    with torch.no_grad():
        assert fxfuse.explain(fxfuse.optimize(subject.model)).regions


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [("bert", {"input_ids": (3, 128)}), ("t5", {"input_ids": (3, 128), "decoder_input_ids": (3, 64)})],
)
def test_a_model_of_transformers_is_small_and_has_random_weights(kind, inputs):
    pytest.importorskip("transformers")
    subject = loaded(f"transformers:{kind}", "--batch", "3")
    assert {name: tuple(x.shape) for name, x in subject.kwargs.items()} == inputs and not subject.args
    assert subject.model.config.num_hidden_layers <= 4


def _torchvision():
    def tiny():
        return nn.Conv2d(3, 2, 3)

    def builder(name):
        if name not in ("tiny", "inception_tiny", "video_tiny", "boxes"):
            raise ValueError(f"Unknown model {name}")
        folders = {"video_tiny": "video.", "boxes": "detection."}
        return SimpleNamespace(__module__=f"torchvision.models.{folders.get(name, '')}tiny")

    def get_model(name, weights):
        assert weights is None, "a download"
        return nn.Conv3d(3, 2, 3) if name == "video_tiny" else tiny()

    return SimpleNamespace(models=SimpleNamespace(get_model_builder=builder, get_model=get_model))


def _timm():
    def create_model(name, pretrained):
        assert name == "tiny" and not pretrained, "a download"
        module = nn.Conv2d(3, 2, 3)
        module.default_cfg = {"input_size": (3, 32, 48)}
        return module

    return SimpleNamespace(create_model=create_model)


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("timm:tiny", (2, 3, 32, 48)),
        ("torchvision:tiny", (2, 3, 224, 224)),
        ("torchvision:inception_tiny", (2, 3, 299, 299)),
        ("torchvision:video_tiny", (2, 3, 16, 224, 224)),
    ],
)
def test_models_of_other_packages_by_name(spec, shape, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", _timm())
    monkeypatch.setitem(sys.modules, "torchvision", _torchvision())
    assert tuple(loaded(spec, "--batch", "2").args[0].shape) == shape


@pytest.mark.parametrize(("name", "said"), [("huge", "Unknown model huge"), ("boxes", "its input is not one tensor")])
def test_what_a_package_does_not_make_is_told(name, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", _torchvision())
    with pytest.raises(model.ModelError, match=said):
        loaded(f"torchvision:{name}")


# -------------------------------------------------------------------------------------- explain and bench


def test_explain_prints_the_report(models, capsys):
    code, out, _ = run(capsys, "explain", "my_models:with_inputs", "--device", "cpu")
    assert code == 0 and "called with 2x8:float32" in out
    assert "1 region fused" in out and "linear by torch + one pass" in out


def test_explain_in_full_and_as_a_page(models, capsys, tmp_path):
    page = tmp_path / "report.html"
    arguments = ("explain", "my_models:with_inputs", "--device", "cpu", "--verbose", "--html", str(page))
    code, out, _ = run(capsys, *arguments)
    assert code == 0 and "runs as a program" in out, "it was called often enough"
    assert page.read_text().lower().startswith("<!doctype html>")


def test_explain_as_json(models, capsys):
    code, out, _ = run(capsys, "explain", "my_models:with_inputs", "--device", "cpu", "--json")
    document = json.loads(out)
    assert code == 0 and document["model"] == "my_models:with_inputs"
    assert [region["epilogue"] for region in document["regions"]] == ["relu(acc)"]


@pytest.mark.parametrize("spec", ["my_models:with_inputs", "linear"])
def test_compile_writes_a_file_that_load_runs(spec, models, capsys, tmp_path):
    path = tmp_path / "model.fxfuse"
    code, out, _ = run(capsys, "compile", spec, "--device", "cpu", "-o", str(path), "--json")
    document = json.loads(out)
    assert code == 0 and document["bytes"] == path.stat().st_size and document["calls"] and document["kernels"]
    loaded = fxfuse.load(path, sha256=document["sha256"])
    assert [str(entry) for entry in loaded.entries] == document["calls"] and len(loaded.state_dict()) == 2


def test_compile_without_weights_and_for_other_cpus(models, capsys, tmp_path):
    path = tmp_path / "model.fxfuse"
    arguments = ("compile", "linear", "--device", "cpu", "-o", str(path), "--no-weights", "--arch", "x86-64-v2")
    code, out, _ = run(capsys, *arguments)
    assert code == 0 and f"fast = fxfuse.load({str(path)!r})" in out
    with pytest.raises(fxfuse.PackageError, match="state_dict"):
        fxfuse.load(path)
    code, _, err = run(capsys, "compile", "linear", "--device", "cpu", "-o", str(path), "--arch", "sm_70")
    assert code == 1 and "sm_70" in err


def test_compile_for_gpus_that_are_not_here(models, capsys, tmp_path, monkeypatch):
    path = tmp_path / "model.fxfuse"
    monkeypatch.setattr(toolchain, "nvcc_version", lambda: "13.0")
    monkeypatch.setattr(toolchain, "nvcc_architectures", list)
    found = ("0" * 32, tmp_path / "library.so")
    monkeypatch.setattr(build, "libraries_of", lambda sources: [found] * len(sources))  # nvcc takes seconds
    (tmp_path / "library.so").write_bytes(b"")
    code, out, _ = run(capsys, "compile", "linear", "-o", str(path), "--arch", "sm_80,sm_90", "--json")
    assert code == 0 and any("linear" in kernel for kernel in json.loads(out)["kernels"])
    with archive.opened(path, None, True) as file:
        manifest = archive.Reader(file, "it").manifest
    assert manifest["architectures"] == manifest["unmeasured"] == ["sm_80", "sm_90"]
    code, out, _ = run(capsys, "compile", "--help")
    assert code == 0 and "GPUs that are not here" in " ".join(out.split())


def test_merge_of_one_package_says_what_it_takes(models, capsys, tmp_path):
    code, _, err = run(capsys, "merge", str(tmp_path / "all.fxfuse"), str(tmp_path / "one.fxfuse"))
    assert code == 1 and "at least two packages" in err


def test_bench_prints_a_table(models, capsys):
    arguments = ("bench", "my_models:with_inputs", "--device", "cpu", "--compare", "eager", "--seconds", "0")
    code, out, _ = run(capsys, *arguments)
    assert code == 0 and "called with 2x8:float32" in out and "median ms" in out
    assert [line.split()[1] for line in out.splitlines() if "x " in line and "│" in line] == ["eager", "fxfuse"]


def test_bench_as_json(models, capsys):
    arguments = ("bench", "my_models:with_inputs", "--device", "cpu", "--compare", "eager", "--seconds", "0", "--json")
    code, out, _ = run(capsys, *arguments)
    eager, own = json.loads(out)["timings"]
    assert code == 0 and (eager["name"], own["name"]) == ("eager", "fxfuse")
    assert eager["speedup_over_eager"] == 1 and own["speedup_over_eager"] == eager["median"] / own["median"]
    assert own["first_call"] > 0


def test_bench_fails_where_a_peer_does(models, capsys, monkeypatch):
    def peer(original, name):
        def broken(*args):
            raise RuntimeError("no backend")

        return broken if name == "torch.compile" else original

    monkeypatch.setattr(benchmark, "_peer", peer)
    code, out, _ = run(capsys, "bench", "my_models:with_inputs", "--device", "cpu", "--seconds", "0")
    assert code == 1 and "left out: torch.compile: no backend" in out


@pytest.mark.parametrize(
    ("name", "without", "said"),
    [
        ("chart.png", True, "a chart needs matplotlib"),
        ("chart.svg", False, "does not end in .png"),
        ("nowhere/chart.png", False, "there is no folder"),
    ],
)
def test_a_chart_that_cannot_be_drawn_is_known_before_anything_is_waited_for(
    name, without, said, models, capsys, monkeypatch
):
    monkeypatch.setattr(model, "load", lambda given: pytest.fail("a model is loaded"))
    figure = None if without else SimpleNamespace()
    for module, stand_in in (("matplotlib", figure), ("matplotlib.figure", figure)):
        monkeypatch.setitem(sys.modules, module, stand_in)
    code, _, err = run(capsys, "bench", "linear", "--png", name)
    assert code == 1 and said in err


def test_a_chart(models, capsys):
    pytest.importorskip("matplotlib")
    arguments = ("bench", "my_models:with_inputs", "--device", "cpu", "--compare", "eager", "--seconds", "0")
    code, out, _ = run(capsys, *arguments, "--png", "chart.png")
    assert code == 0 and "drawn: chart.png" in out
    assert (models / "chart.png").read_bytes().startswith(b"\x89PNG") and (models / "chart.png").stat().st_size > 5000


# -------------------------------------------------------------------------------------------------- cache


@pytest.fixture
def kernels(new_cache):
    """A cache with three kernels of 1000 bytes."""
    new_cache.mkdir(mode=0o700)
    return [make_entry(new_cache, number, age=3600.0 * number) for number in range(3)]


def test_kernels_are_listed(kernels, capsys):
    code, out, _ = run(capsys, "cache", "list")
    rows = out.splitlines()[1:]
    assert code == 0 and [path.name in row for path, row in zip(kernels, rows, strict=True)] == 3 * [True]
    assert rows[2].endswith("kernel 2") and "2 h ago" in rows[2]
    assert [entry["path"] for entry in json.loads(run(capsys, "cache", "list", "--json")[1])] == list(map(str, kernels))


def test_no_kernels_are_no_error(new_cache, capsys):
    assert run(capsys, "cache", "list") == (0, f"no kernels in {new_cache}\n", "")
    assert run(capsys, "cache", "verify")[:2] == (0, "0 of 0 kernels are as they were stored\n")


def test_the_size_is_that_of_what_is_stored(kernels, new_cache, capsys):
    cache.write_document(new_cache / "choices" / f"{1:032x}.json", f"{1:032x}", {"name": "a"})
    stored = sum(path.stat().st_size for path in new_cache.rglob("*") if path.is_file())
    code, out, _ = run(capsys, "cache", "size", "--json")
    found = json.loads(out)
    assert code == 0 and (found["kernels"], found["choices"], found["bytes"]) == (3, 1, stored)
    assert found["exists"] and found["writable"] and found["problem"] is None
    assert f"{new_cache}: 3 kernels and 1 measured choices" in run(capsys, "cache", "size")[1]


def test_a_cache_that_others_can_write_is_not_trusted(kernels, new_cache, capsys):
    new_cache.chmod(0o777)
    code, out, _ = run(capsys, "cache", "size")
    assert code == 1 and "not used as it is" in out and "writable by another user" in out
    (check,) = (check for check in doctor.checks(kernels=False) if check.name == "cache")
    assert check.state == "warning" and "FXFUSE_CACHE_DIR" in check.remedy


def test_a_damaged_kernel_is_told(kernels, capsys):
    next(kernels[1].glob("*.so")).write_bytes(b"")
    code, out, _ = run(capsys, "cache", "verify")
    assert code == 1 and f"{kernels[1]}: its library is damaged" in out and "2 of 3 kernels" in out
    assert list(json.loads(run(capsys, "cache", "verify", "--json")[1])["bad"]) == [str(kernels[1])]


def test_pruning_keeps_what_was_used_last(kernels, capsys):
    size = cache.entries()[0].bytes
    code, out, _ = run(capsys, "cache", "prune", "--limit", str(size))
    assert code == 0 and "freed" in out
    assert [path.exists() for path in kernels] == [True, False, False]


def test_clearing_leaves_nothing(kernels, capsys):
    code, out, _ = run(capsys, "cache", "clear", "--json")
    assert code == 0 and json.loads(out)["freed"] > 3000 and not cache.entries()


# ------------------------------------------------------------------------------------------------- doctor


def test_doctor_builds_and_runs_a_kernel(capsys):
    code, out, _ = run(capsys, "doctor", "--json")
    found = json.loads(out)
    checks = {check["name"]: check for check in found["checks"]}
    assert code == 0 and found["ok"]
    assert checks["torch"]["facts"]["version"] == torch.__version__
    kernel = checks["kernel on cpu"]
    assert kernel["state"] == "ok" and kernel["facts"]["kernel"] == "linear by torch + one pass"
    assert kernel["facts"]["seconds"] > 0 and kernel["facts"]["error"] < 1e-6


@pytest.mark.parametrize(
    ("missing", "name", "remedy"), [("cxx", "C++ compiler", "apt install g++"), ("ninja", "ninja", "pip install ninja")]
)
def test_doctor_names_what_is_missing(missing, name, remedy, capsys, monkeypatch):
    monkeypatch.setattr(toolchain, missing, lambda: None)
    code, out, _ = run(capsys, "doctor")
    assert code == 1 and remedy in out and "kernel on cpu     not built" in out
    assert out.endswith(f"2 failed: {name}, kernel on cpu\n")


def test_doctor_says_that_fxfuse_is_switched_off(monkeypatch):
    monkeypatch.setenv("FXFUSE_DISABLE", "1")
    check = doctor.check_fxfuse()
    assert check.state == "warning" and "unset FXFUSE_DISABLE" in check.remedy


def nvcc(folder, version, codes="sm_80 sm_90"):
    program = folder / "nvcc"
    said = f"echo 'Cuda compilation tools, release {version}, V{version}.1'"
    program.write_text(f'#!/bin/sh\n[ "$1" = --list-gpu-code ] && printf "%s\\n" {codes} && exit\n{said}\n')
    program.chmod(0o755)
    return str(program)


A100, B200 = (8, 0), (10, 0)


@pytest.mark.parametrize(
    ("version", "torchs", "gpus", "state", "said"),
    [
        ("12.4", "12.4", [A100], "ok", "torch is built for CUDA 12.4"),
        ("12.6", "12.4", [A100], "ok", "torch is built for CUDA 12.4"),
        ("13.0", "12.4", [A100], "warning", "install the CUDA toolkit 12.4"),
        ("11.8", "12.4", [A100], "failed", "is too old"),
        ("12.4", "12.4", [A100, B200], "failed", "does not compile for sm_100"),
        (None, "12.4", [A100], "failed", "set CUDA_HOME"),
        (None, "12.4", [], "absent", "no GPU to compile for"),
        (None, None, [], "absent", "torch is built for CPUs only"),
        ("13.0", None, [], "absent", "torch is built for CPUs only"),
    ],
)
def test_doctor_compares_nvcc_with_torch_and_the_gpus(version, torchs, gpus, state, said, tmp_path, monkeypatch):
    path = None if version is None else nvcc(tmp_path, version)
    monkeypatch.setattr(toolchain, "nvcc", lambda: path)
    monkeypatch.setattr(torch.version, "cuda", torchs)
    check = doctor.check_nvcc(gpus)
    assert check.state == state and said in check.text + check.remedy
    assert bool(check.remedy) == (state in ("warning", "failed"))


@pytest.mark.parametrize(("capability", "state"), [((7, 5), "warning"), (A100, "ok"), ((9, 0), "ok")])
def test_doctor_lists_gpus_and_their_architecture(capability, state, monkeypatch):
    properties = SimpleNamespace(name="A GPU", major=capability[0], minor=capability[1], total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    (check,) = doctor.check_gpus()
    assert check.state == state and check.text == f"A GPU, sm_{capability[0]}{capability[1]}, 80.0 GB"
    assert ("sm_80" in check.remedy) == (state == "warning")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("raise SystemExit('no torch here')", "no torch here"),
        ('print(\'{"failure": "a wrong result"}\')', "a wrong result"),
        ("import time; time.sleep(60)", "was ended after 3 s"),
    ],
)
def test_doctor_survives_its_probe(code, said, monkeypatch):
    monkeypatch.setattr(toolchain, "limit", lambda: 1.0)
    assert said in doctor._probe([sys.executable, "-c", code], dict(os.environ))["failure"]


def test_a_probe_that_fails_fails_the_check(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_probe", lambda command, environment: {"failure": "BuildError: did not compile"})
    code, out, _ = run(capsys, "doctor")
    assert code == 1 and "BuildError: did not compile" in out and "report this" in out


def test_doctor_has_a_cache_of_its_own_to_build_in(monkeypatch):
    seen = {}
    monkeypatch.setattr(doctor, "_probe", lambda command, environment: seen.update(environment) or {"failure": "none"})
    assert [check.name for check in doctor.checks()][-1] == "kernel on cpu"
    assert seen["FXFUSE_CACHE_DIR"] != os.environ["FXFUSE_CACHE_DIR"]
    assert not Path(seen["FXFUSE_CACHE_DIR"]).exists(), "it is gone afterwards"
