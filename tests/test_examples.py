"""Every example runs, small and on the CPU, and verifies."""

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", ["resnet50", "mobilenetv2", "vit", "bert", "gpt2"])
def test_network_examples(name, capsys, monkeypatch):
    options = ["--small", "--device", "cpu", "--compare", "eager", "--seconds", "0.01"]
    monkeypatch.setattr(sys, "argv", [name, *options])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "\nok: error" in printed, printed
    assert " regions in use" in printed and "\n0 regions in use" not in printed, printed


def test_text_is_the_same_by_all_ways_to_write_it(capsys, monkeypatch):
    options = [
        "--size",
        "tiny",
        "--device",
        "cpu",
        "--tokens",
        "9",
        "--batch",
        "2",
        "--compare",
        "eager",
        "--times",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["llama", *options])
    runpy.run_path(str(EXAMPLES / "llama.py"), run_name="__main__")
    table = [line for line in capsys.readouterr().out.splitlines() if ": generate " in line or ": loop " in line]
    assert len(table) == 4
    assert all(line.rstrip().endswith("100%") for line in table), table


@pytest.mark.parametrize(
    "options",
    [[], ["--gpt2", "--small", "--length", "16", "--batch", "2"], ["--cuda-graphs"]],
    ids=["", "gpt2", "graphs"],
)
def test_training_follows_eager(options, capsys, monkeypatch, tmp_path):
    path = tmp_path / "losses.png"
    monkeypatch.setattr(sys, "argv", ["train", "--steps", "20", "--output", str(path), *options])
    runpy.run_path(str(EXAMPLES / "train.py"), run_name="__main__")
    printed = capsys.readouterr().out
    apart = float(printed.partition("the losses of a step are ")[2].split()[0])
    assert apart < 1e-4, printed
    assert path.read_bytes().startswith(b"\x89PNG")
