"""The comparison of contestants: each is a row, with its time and error, or with the reason why it did not run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5)), (torch.randn(4, 8),)
"""


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import compare

    return compare


def compared(compare, tmp_path, model, names, args=None):
    setting = compare.Setting(model, args or (torch.randn(4, 8),), tmp_path)
    with torch.no_grad():
        rows = compare.compared(setting, names, 0.02, compare.Row("m", "float32", "4x8", "", ""))
    return {row.contestant: row for row in rows}


def test_the_script_measures_what_there_is_and_keeps_what_it_measured_before(tmp_path):
    (tmp_path / "own.py").write_text(MODEL)
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    for model in ("mlp", f"{tmp_path / 'own.py'}:build"):
        options = ["--model", model, "--batch", "2", "--device", "cpu", "--seconds", "0.02", "--output", str(tmp_path)]
        command = [sys.executable, "compare.py", *options, "--only", "eager", "fxfuse", "TensorRT"]
        done = subprocess.run(command, cwd=BENCHMARKS, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "speed-up over eager" in done.stdout and f"torch {torch.__version__}" in done.stdout
    (written,) = tmp_path.glob("compare-cpu.json")
    rows = json.loads(written.read_text())["rows"]
    assert {row["model"] for row in rows} == {"mlp", f"{tmp_path / 'own.py'}:build"}
    ran = {row["contestant"] for row in rows if row["median"]}
    assert ran == {"eager", "fxfuse", 'torch.compile, backend="fxfuse"'}
    assert all(row["runs"] >= 5 and 0 < row["minimum"] <= row["median"] for row in rows if row["median"])
    assert all(row["error"] < 1e-5 and row["version"] for row in rows if row["median"])
    reasons = {row["contestant"]: row["reason"] for row in rows if not row["median"]}
    assert reasons == {"fxfuse, CUDA graphs": "CUDA graphs need a GPU", "TensorRT": "TensorRT's engines need a GPU"}
    assert written.with_suffix(".md").read_text().count("| eager ") == 2


def test_a_package_that_is_missing_is_the_rows_reason(compare, tmp_path, monkeypatch):
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: None)
    rows = compared(compare, tmp_path, nn.Linear(8, 8), ["eager", "ONNX Runtime"])
    assert rows["ONNX Runtime"].reason == "not installed: onnx, onnxscript, onnxruntime"
    assert rows["ONNX Runtime"].median is None and rows["eager"].median > 0
    assert "not run: not installed: onnx" in compare.render(list(rows.values()))


def test_onnx_runtime_computes_the_same(compare, tmp_path):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    rows = compared(compare, tmp_path, nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval(), ["eager", "ONNX Runtime"])
    assert not rows["ONNX Runtime"].reason and rows["ONNX Runtime"].error < 1e-6


def test_one_that_fails_is_a_row_and_the_others_are_measured(compare, tmp_path, monkeypatch):
    def broken(setting):
        raise ValueError("it does not compile")

    monkeypatch.setitem(compare.CONTESTANTS, "broken", ("torch", broken))
    rows = compared(compare, tmp_path, nn.Linear(8, 8), ["eager", "broken"])
    assert rows["broken"].reason == "ValueError: it does not compile" and rows["eager"].speed_up == 1.0


def test_errors_are_those_of_results_against_float64(compare, tmp_path, monkeypatch):
    model = nn.Linear(8, 8)
    off = ("torch", lambda setting: lambda: setting.model(*setting.args) * 1.5)
    monkeypatch.setitem(compare.CONTESTANTS, "off", off)
    rows = compared(compare, tmp_path, model, ["eager", "off"])
    assert rows["off"].error == pytest.approx(0.5, rel=1e-4) and rows["eager"].error < 1e-6


def test_speed_up_and_compile_time_are_of_medians(compare, tmp_path, monkeypatch):
    now = [0.0]

    def taking(first, later):
        times = [first]

        def call():
            now[0] += times.pop() if times else later
            return torch.zeros(1)

        return "torch", lambda setting: call

    monkeypatch.setattr(compare.time, "perf_counter", lambda: now[0])
    monkeypatch.setitem(compare.CONTESTANTS, "eager", taking(4.0, 4.0))
    monkeypatch.setitem(compare.CONTESTANTS, "quick", taking(31.0, 1.0))
    rows = compared(compare, tmp_path, nn.Linear(8, 8), ["eager", "quick"])
    assert (rows["quick"].median, rows["quick"].speed_up, rows["quick"].compile_time) == (1e3, 4.0, 30.0)
    assert (rows["eager"].median, rows["eager"].speed_up, rows["eager"].compile_time) == (4e3, 1.0, 0.0)


def test_an_unknown_model_is_refused_with_the_names_there_are(compare):
    with pytest.raises(SystemExit, match=r"no model 'no such'.*small, mlp, ResNet-50"):
        compare.model_of("no such", None)
    with pytest.raises(SystemExit, match=r"no file nowhere\.py"):
        compare.model_of("nowhere.py:build", None)
