"""What the benchmarks print and keep."""

import dataclasses
from pathlib import Path

import pytest


@pytest.fixture
def suite(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import suite

    return suite


@pytest.fixture
def rows(suite):
    def row(region, group, kernel, peer, own):
        times = {"eager": 9.0, "torch.compile": peer, "fxfuse": own}
        return suite.Row(region, group, "float32", "contiguous", kernel, 1, 0.0, 0.0, True, times, {}, "abc")

    return [
        row("first", "network", "conv2d direct 3x3 tf32 64x(4x64), 3 stages", 8.0, 2.0),
        row("second", "network", "library + one pass", 1.0, 4.0),
        row("third", "another", "depthwise nhwc float, 3x3, stride 1", 3.0, 1.0),
    ]


def test_a_summary_has_means_the_least_and_what_was_chosen(suite, rows):
    _, _, network, another = suite.summarise(rows).splitlines()
    cells = [cell.strip() for cell in network.strip("|").split("|")]
    assert cells == ["network", "float32", "2", "1.00x", "0.25x: second", "1", "conv2d direct 3x3 1, library 1"]
    assert "3.00x" in another and "depthwise 1" in another


def test_a_later_run_adds_to_the_rows_of_an_earlier_one(suite, rows, tmp_path):
    facts = {"device": "NVIDIA H200"}
    assert suite.read(tmp_path, "conv2d", facts) == []
    suite.write(tmp_path, "conv2d", facts, "text", rows)
    assert suite.read(tmp_path, "conv2d", facts) == rows
    assert suite.read(tmp_path, "gemm", facts) == []


def test_rows_of_another_form_are_left_out(suite, rows, tmp_path):
    @dataclasses.dataclass
    class Older:
        region: str

    suite.write(tmp_path, "conv2d", {"device": "NVIDIA H200"}, "text", [Older("first"), rows[1]])
    assert suite.read(tmp_path, "conv2d", {"device": "NVIDIA H200"}) == [rows[1]]
