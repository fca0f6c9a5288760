"""The benchmark that draws networks: draws are reproducible, and a row comes back whatever happens to a network."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

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


def test_a_network_can_be_named(zoo):
    assert zoo.named("timm:repvgg_a2") == zoo.Network("timm", "repvgg_a2", ("repvgg_a2",))
    for wrong in ("repvgg_a2", "timm:", "somewhere:repvgg_a2"):
        with pytest.raises(ValueError, match="repvgg_a2" if "repvgg" in wrong else "timm"):
            zoo.named(wrong)


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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_of_a_drawn_network_are_measured_on_a_cpu(zoo, tmp_path, dtype):
    names = [network.family for network in zoo.draw(5, 2000)]
    options = ["--seed", "5", "--count", str(names.index("albert") + 1), "--only", "albert", "--device", "cpu"]
    options += ["--train", "--dtype", dtype, "--batch", "1", "--channels", "384", "--limit", "600", "--seconds", "0.1"]
    options += ["--output", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    subprocess.run([sys.executable, "zoo.py", *options], cwd=BENCHMARKS, env=environment, check=True)
    (written,) = tmp_path.glob("zoo-training-*.json")
    (row,) = [row for row in json.loads(written.read_text())["rows"] if row["family"] == "albert"]
    assert row["train"] and row["ok"] and row["reference"] == "float64" and not row["why_not"]
    assert row["contestants"]["eager"]["wall"] > 0 and row["contestants"]["fxfuse"]["wall"] > 0
    assert row["first_result"]["fxfuse"] > 0


class Small(nn.Module):
    """Has parameters that no result depends on, and a result that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return {"y": self.fc(x).tanh(), "mask": x > 0}


def _trial(zoo, **changes):
    torch.manual_seed(0)
    return zoo.Trial(Small().train(), {zoo.IMAGE: torch.randn(4, 8)}, train=True, **changes)


def test_a_step_returns_its_loss_and_the_gradients_that_there_are(zoo):
    trial = _trial(zoo)
    for _ in range(2):  # gradients do not add up
        loss, weight, bias = trial.call(trial.model)
    exact = trial.copied(torch.float64).model
    wave = torch.arange(8.0).cos()
    expected = (exact.fc(trial.inputs[zoo.IMAGE].double()).tanh() - wave).square().mean()
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert zoo.steps.error([exact.fc.weight.grad, exact.fc.bias.grad], [weight, bias]) < 1e-6
    assert zoo.steps.error([weight, bias], [weight]) == math.inf


def test_losses_have_gradients_before_a_normalisation(zoo):
    layer = nn.Linear(8, 8)
    results = {"y": nn.LayerNorm(8)(layer(torch.randn(4, 8))), "half": layer.bias.to(torch.bfloat16), "number": 3}
    results["scalar"] = layer.weight.sum().double()
    zoo.steps.loss_of({"y": results["y"]}).backward()
    assert float(layer.weight.grad.norm()) > 0.05
    losses = [zoo.steps.loss_of({name: result}) for name, result in results.items() if name != "number"]
    assert float(zoo.steps.loss_of(results).detach()) == pytest.approx(sum(float(loss.detach()) for loss in losses))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("factor, ok", [(1.0, True), (1.5, False)])
def test_steps_are_right_if_gradients_are(zoo, autocast, factor, ok):
    trial = _trial(zoo, autocast=autocast)

    class Fast(nn.Module):
        def forward(self, x):
            result = trial.model(x)
            result["y"].register_hook(lambda gradient: gradient * factor)
            return result

    found = zoo._verified(trial, Fast())
    assert found["ok"] is ok and found["reference"] == "float64"
    assert found["error"] == pytest.approx(factor - 1, abs=0.05)
    assert 0 < found["eager_error"] < (0.02 if autocast else 1e-6)


def test_steps_whose_gradients_jump_for_some_inputs_are_right(zoo):
    trial = _trial(zoo)

    class Jumps(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return trial.model(x if self.calls > 1 else x * 1.01)

    fast = Jumps()
    assert zoo._verified(trial, fast)["ok"] and fast.calls == 2


def test_steps_that_float64_does_not_run_are_compared_with_float32(zoo):
    trial = _trial(zoo)
    refuse = trial.model.fc.register_forward_pre_hook(lambda module, args: args[0].float() @ torch.ones(8, 8))
    found = zoo._verified(trial, trial.model)
    refuse.remove()
    assert found["ok"] and found["reference"] == "float32 (RuntimeError in float64)" and found["eager_error"] > 0


def test_steps_have_no_dropout(zoo):
    class StochasticDepth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p, self.mode = 0.2, "row"

    class DropPath(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop_prob, self.scale = 0.1, 0.5

    attention = nn.MultiheadAttention(8, 2, dropout=0.3)
    model = nn.Sequential(nn.Dropout2d(), StochasticDepth(), DropPath(), attention)
    model.config = SimpleNamespace(attention_dropout=0.1, layerdrop=0.1, layer_norm_eps=1e-5, dropout=None)
    zoo.steps.without_dropout(model)
    assert (model[0].p, model[1].p, model[2].drop_prob, model[2].scale, attention.dropout) == (0, 0, 0, 0.5, 0)
    assert vars(model.config) == {"attention_dropout": 0, "layerdrop": 0, "layer_norm_eps": 1e-5, "dropout": None}


def test_what_is_left_to_torch_is_told(zoo):
    report = zoo.fxfuse.Report((), (), training=("gradients of the model come from torch: hooks", "in training, ..."))
    assert zoo.steps.left_to_torch(report) == "gradients of the model come from torch: hooks"
    row = _row(zoo, "swin", 1.0, 1.0, train=True, why_not=zoo.steps.left_to_torch(report))
    assert "come from torch: hooks" in zoo.render([row])
    assert row.key != _row(zoo, "swin", 1.0, 1.0).key
    assert "no steps" in zoo.steps.left_to_torch(zoo.fxfuse.Report((), ()))


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").glob("zoo-nvidia-*.json")), ids=lambda path: path.stem)
def test_results_from_before_there_were_steps_are_read(zoo, path):
    content = json.loads(path.read_text())
    rows = zoo.read(path.parent, "zoo", content["provenance"], zoo.Row)
    assert len(rows) == len(content["rows"]) > 0
    assert not any(row.train for row in rows)


@pytest.mark.parametrize(
    "spans, total", [([], 0), ([(5, 7), (0, 2)], 4), ([(0, 4), (1, 2), (3, 6)], 6), ([(0, 1), (1, 3)], 3)]
)
def test_kernels_that_overlap_count_once(spans, total, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from contestants import covered

    assert covered(spans) == total
