"""The fuzzer runs clean, and finds faults that are planted (tests/fuzz)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import faults

ROOT = Path(__file__).parent.parent
FOUND_WITHIN = {
    "a stale short cut": (200, None),
    "a wrong stride": (50, None),
    "a wrong broadcast": (50, None),
    "a dropped bias": (50, None),
    "a missing cast": (200, None),
    "a wrong result type": (300, "dtype"),
    "swapped operands": (200, None),
    "an overwritten value": (50, None),
    "a frozen random draw": (200, None),
    "a constant instead of a parameter": (200, None),
    "a lost gradient": (50, None),
    "a hook not called": (400, None),
    "a broken alias": (50, "aliasing"),
    "a shared result": (50, None),
    "a mode not noticed": (50, None),
    "strides not restored": (400, "strides"),
}
"""By planted fault, models of seeds from 0 on, and what tells it if nothing else can. What is found must be absent
without the fault."""


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_every_fault_is_planted():
    assert set(FOUND_WITHIN) == set(faults.FAULTS)


def test_random_models_are_right():
    done = fuzz("--models", "300", "--seed", "0", "--slow", "0")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "300 models from seed 0" in done.stdout


def test_processes_share_the_models_with_compiled_kernels_and_without():
    """Two processes draw every second model; of seeds 0 to 999 the first two have compiled kernels."""
    done = fuzz("--models", "9", "--seed", "0", "--slow", "0", "--jobs", "2", "--compile", "0.002")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "9 models from seed 0" in done.stdout


def test_a_fault_is_found_by_several_processes(tmp_path):
    output = tmp_path / "findings.jsonl"
    fault = ("--fault", "a dropped bias", "--output", str(output))
    done = fuzz("--models", "50", "--seed", "0", "--slow", "0", "--jobs", "2", *fault)
    assert done.returncode == 1
    assert "a dropped bias: found after" in done.stdout
    (finding,) = map(json.loads, output.read_text().splitlines())
    assert finding["kind"] in ("value", "gradients") and finding["seed"] < 50


@pytest.mark.slow
@pytest.mark.parametrize("fault", FOUND_WITHIN)
def test_planted_fault_is_found(fault):
    models, kind = FOUND_WITHIN[fault]
    done = fuzz("--models", str(models), "--seed", "0", "--slow", "0", "--fault", fault)
    assert f"{fault}: found after" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]
    assert kind is None or f"by its {kind}" in done.stdout
