"""The benchmark of rows: what it measures is right, and its table says so."""

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_each_kind_is_a_line_that_is_right(tmp_path):
    command = [sys.executable, "rows.py", "--device", "cpu", "--elements", "64", "--dtypes", "float32"]
    command += ["--compare", "eager", "--seconds", "0.02", "--output", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    done = subprocess.run(command, cwd=BENCHMARKS, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("rows-*.json")
    rows = json.loads(written.read_text())["rows"]
    assert all(row["ok"] for row in rows)
    assert {row["kind"] for row in rows} >= {"softmax", "rms_norm", "add, rms_norm", "group_norm, silu", "mean 7x7"}
    assert all(set(row["times"]) == {"eager", "fxfuse"} and min(row["times"].values()) > 0 for row in rows)
    assert "better peer / fxfuse" in done.stdout
