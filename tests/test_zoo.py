"""The benchmark that draws networks: draws are reproducible, and a row comes back whatever happens to a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def zoo(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import zoo

    return zoo


def test_a_seed_draws_the_same_networks_again(zoo):
    assert zoo.draw(7, 30) == zoo.draw(7, 30)
    assert zoo.draw(7, 30)[:10] == zoo.draw(7, 10)
    assert zoo.draw(7, 30) != zoo.draw(8, 30)


def test_no_family_is_drawn_twice(zoo, monkeypatch):
    monkeypatch.setattr(
        zoo,
        "PACKAGES",
        {"timm": lambda: {"swin_transformer": ["a", "b"], "beit": ["c"]}, "transformers": lambda: {"swin": ["swin"]}},
    )
    assert sorted(network.family for network in zoo.draw(0, 10)) in (["beit", "swin"], ["beit", "swin_transformer"])


def test_a_package_that_is_missing_changes_no_draw_of_the_others(zoo, monkeypatch):
    def missing():
        raise ImportError

    alone = {"transformers": lambda: {"bert": ["bert"], "gpt2": ["gpt2"], "vit": ["vit"]}}
    monkeypatch.setattr(zoo, "PACKAGES", alone)
    expected = zoo.draw(3, 3)
    monkeypatch.setattr(zoo, "PACKAGES", {"timm": missing, **alone})
    assert zoo.draw(3, 3) == expected


def _row(zoo, family, own, graph, **fields):
    times = {"eager": 4.0, "torch.compile": 2.0, "reduce-overhead": 1.0, "fxfuse": own, "fxfuse, CUDA graphs": graph}
    contestants = {name: {"wall": wall, "issue": 1.0} for name, wall in times.items()}
    return zoo.Row(1, "float32", "timm", family, ok=True, contestants=contestants, **fields)


def test_a_summary_names_what_is_below_1_and_what_was_not_drawn(zoo):
    rows = [
        _row(zoo, "fast", 0.5, 0.25),
        _row(zoo, "slow", 4.0, 4.0),
        zoo.Row(1, "float32", "timm", "broken", failure="its process ended with -11 after: timing"),
        zoo.Row(1, "float32", "timm", "absent", not_drawn="its main input is bbox"),
    ]
    summary = zoo.summarise(rows)
    assert "3 networks, 1 not right; best peer / fxfuse 1.41x of 2; reduce-overhead / graph 1.00x of 2" in summary
    assert "Below 1: slow 0.50." in summary and "Below 1 as graphs: slow 0.25." in summary
    assert "broken (its process ended with -11 after: timing)" in summary
    assert "- timm absent: its main input is bbox" in summary
    assert "Did not finish: none." in summary
    assert "absent" not in zoo.render(rows)


def test_a_peer_that_computes_something_else_is_none(zoo):
    x = torch.randn(64)
    calls = {
        "eager": lambda: {"result": x, "more": [x > 0]},
        "torch.compile": lambda: {"result": -x, "more": [x > 0]},
        "reduce-overhead": lambda: {"result": x * 1.01, "more": [x > 0]},
        "fxfuse": lambda: {"result": x},
    }
    failed = zoo.warmed(calls, x.device)
    assert failed == {"torch.compile": "ArithmeticError: it computes something else than eager, 2.00 of the norm apart"}
    assert list(calls) == ["eager", "reduce-overhead", "fxfuse"]


def test_a_peer_of_a_model_that_draws_random_numbers_is_one(zoo):
    calls = {name: lambda: torch.randn(64) for name in ("eager", "torch.compile")}
    assert not zoo.warmed(calls, torch.device("cpu"))


@pytest.mark.slow
def test_one_drawn_network_is_measured_on_a_cpu(zoo, tmp_path):
    names = [network.family for network in zoo.draw(5, 2000)]
    options = ["--seed", "5", "--count", str(names.index("albert") + 1), "--only", "albert", "--device", "cpu"]
    command = [sys.executable, "zoo.py", *options, "--batch", "1", "--seconds", "0.1", "--output", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    subprocess.run(command, cwd=BENCHMARKS, env=environment, check=True)
    (written,) = tmp_path.glob("zoo-*.json")
    (row,) = [row for row in json.loads(written.read_text())["rows"] if row["family"] == "albert"]
    assert row["ok"] and row["reference"] == "float64"
    assert row["contestants"]["eager"]["wall"] > 0 and row["contestants"]["fxfuse"]["wall"] > 0


@pytest.mark.parametrize(
    "spans, total", [([], 0), ([(5, 7), (0, 2)], 4), ([(0, 4), (1, 2), (3, 6)], 6), ([(0, 1), (1, 3)], 3)]
)
def test_kernels_that_overlap_count_once(spans, total, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from contestants import covered

    assert covered(spans) == total
