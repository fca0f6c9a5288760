"""The benchmark of a decoder with a static cache: its model computes what attention over all tokens at once does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SIZES = {"layers": 2, "width": 32, "heads": 4, "key_heads": 2, "hidden": 48, "vocabulary": 50, "length": 12}


@pytest.fixture
def decoder(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import decoder

    return decoder


def test_tokens_one_by_one_give_what_all_at_once_do(decoder):
    torch.manual_seed(0)
    model = decoder.Decoder(decoder.Shape(**SIZES), 3).eval().double()
    tokens, positions = torch.randint(50, (3, 12)), torch.arange(12)
    with torch.no_grad():
        together = model(tokens, positions)
        alone = [model(tokens[:, at : at + 1], positions[at : at + 1]) for at in range(12)]
    torch.testing.assert_close(torch.cat(alone, 1), together)
    assert together.std() > 0.1  # no row is like all others


def test_a_row_says_what_each_contestant_takes(tmp_path):
    sizes = [part for name, size in SIZES.items() for part in (f"--{name.replace('_', '-')}", str(size))]
    command = [sys.executable, "decoder.py", *sizes, "--device", "cpu", "--compare", "eager", "--tokens", "1", "5"]
    command += ["--batch", "2", "--dtype", "float32", "--seconds", "0.1", "--output", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    subprocess.run(command, cwd=BENCHMARKS, env=environment, check=True)
    (written,) = tmp_path.glob("decoder-*.json")
    rows = json.loads(written.read_text())["rows"]
    assert [(row["batch"], row["tokens"], row["ok"]) for row in rows] == [(2, 1, True), (2, 5, True)]
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 50 * 32
    caches = 2 * 2 * 2 * 12 * 16
    assert all(row["bytes_read"] == (weights + caches) * 4 for row in rows)
    assert all(row["contestants"][name]["wall"] > 0 for row in rows for name in ("eager", "fxfuse"))
