"""The fuzzer runs clean, and finds faults that are planted (tests/fuzz)."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOUND_WITHIN = {
    "a stale short cut": 400,
    "a wrong stride": 50,
    "a wrong broadcast": 50,
    "a dropped bias": 50,
    "swapped operands": 200,
    "an overwritten value": 50,
    "a frozen random draw": 200,
    "a constant instead of a parameter": 200,
    "a lost gradient": 50,
    "a hook not called": 400,
    "a broken alias": 200,
    "a mode not noticed": 50,
}
"""Models of seeds from 0 on, by planted fault. What is found must be absent without the fault."""


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_random_models_are_right():
    done = fuzz("--models", "300", "--seed", "0", "--slow", "0")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "300 models from seed 0" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("fault", FOUND_WITHIN)
def test_planted_fault_is_found(fault):
    done = fuzz("--models", str(FOUND_WITHIN[fault]), "--seed", "0", "--slow", "0", "--fault", fault)
    assert f"{fault}: found after" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]
