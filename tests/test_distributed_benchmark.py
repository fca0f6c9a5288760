"""The benchmark of several processes: gradients of all contestants agree, and its table says who took how long."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

if not (distributed.is_available() and distributed.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)


@pytest.mark.slow
def test_two_processes_on_a_cpu(tmp_path):
    command = [sys.executable, "distributed.py", "--device", "cpu", "--small", "--only", "GPT-2", "--bucket-mb", "0.01"]
    command += ["--precisions", "float32", "--compare", "whole", "FSDP2", "--seconds", "0.1", "--output", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    done = subprocess.run(command, cwd=BENCHMARKS, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("distributed-*.json")
    (row,) = json.loads(written.read_text())["rows"]
    assert row["processes"] == 2 and row["segments"] > 1 and not row["why_not"]
    in_data_parallelism = {"eager", "fxfuse", "fxfuse, one segment"}
    assert set(row["unsent"]) == in_data_parallelism <= set(row["times"])
    assert {"FSDP2", "fxfuse, FSDP2"} == set(row["times"]) - in_data_parallelism | set(row["left_out"])
    assert all(time > 0 for time in row["times"].values()) and max(row["errors"].values()) < 1e-6
    assert "best DDP peer / fxfuse" in done.stdout
