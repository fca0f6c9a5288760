"""The report tells what ran: kernels, torch and why, and only what calls used."""

import copy

import pytest
import torch
from helpers import Net, linear, randn, regions
from torch import nn

import fxfuse
from fxfuse import plans, toolchain
from fxfuse.errors import ToolchainError


def two_layers():
    return nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU()).eval()


def headline(fast):
    return str(fxfuse.explain(fast)).splitlines()[0]


def test_regions_that_nobody_called_are_not_called_fused():
    fast = fxfuse.optimize(two_layers())
    assert headline(fast) == "2 regions found, not called yet"
    assert headline(fxfuse.optimize(nn.Sequential(nn.Dropout()))) == "0 regions fused"


def test_without_no_grad_torch_runs_the_regions_and_the_report_says_so():
    fast = fxfuse.optimize(two_layers())
    fast(randn(2, 8))
    assert [(region.kernel, region.fallback) for region in regions(fast)] == [(None, plans.GRADIENTS_DUE)] * 2
    assert headline(fast) == "2 regions: 2 run by torch"
    assert "torch: gradients are due" in str(fxfuse.explain(fast))


def test_a_region_that_ran_both_ways_says_both():
    fast = fxfuse.optimize(two_layers())
    with torch.no_grad():
        fast(randn(2, 8))
    assert headline(fast) == "2 regions fused" and regions(fast)[0].fallback is None
    fast(randn(2, 8))
    assert headline(fast) == "2 regions fused"
    assert f"{regions(fast)[0].kernel}; torch: gradients are due" in " ".join(str(fxfuse.explain(fast)).split())


def test_gradients_of_one_layer_only():
    model = nn.Sequential(linear().requires_grad_(False), nn.ReLU(), linear(), nn.SiLU(), linear()).eval()
    fast = fxfuse.optimize(model)
    fast(randn(2, 8))
    assert headline(fast) == "2 regions: 1 fused, 1 run by torch"
    assert [region.fallback for region in regions(fast)] == [None, plans.GRADIENTS_DUE]


def by_vmap(fast, x):
    return torch.func.vmap(fast)(x[:, None])


def by_autocast(fast, x):
    with torch.autocast("cpu"):
        return fast(x)


def by_a_watched_call(fast, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), torch.profiler.profile():
        return fast(x)


OTHER_CALLS = {
    "vmap": (by_vmap, False, plans.TRANSFORMED),
    "autocast that casts within": (by_autocast, False, plans.RECAST),
    "the dispatcher's way with gradients": (by_a_watched_call, True, plans.GRADIENTS_DUE),
}


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_other_reasons_to_run_by_torch(name):
    call, gradients, reason = OTHER_CALLS[name]
    model = Net(lambda m, x: m.fc(x).softmax(-1).exp() * 2 + m.fc(x).relu().pow(2), fc=linear()).eval()
    fast = fxfuse.optimize(model)
    with torch.set_grad_enabled(gradients):
        call(fast, randn(2, 8))
    assert any(region.fallback == reason for region in regions(fast)), str(fxfuse.explain(fast))
    assert "(not called yet)" not in str(fxfuse.explain(fast))


def test_what_a_dead_graph_did_is_forgotten():
    fast = fxfuse.optimize(nn.Sequential(linear(), nn.ReLU(), nn.Dropout()))
    fast(randn(2, 8))
    assert regions(fast)[0].fallback == plans.GRADIENTS_DUE
    fast.eval()
    assert headline(fast) == "1 region found, not called yet"
    fast(randn(2, 8))
    assert headline(copy.deepcopy(fast)) == "1 region found, not called yet", "a copy has called nothing"


def test_without_a_compiler_nothing_is_called_fused(new_cache, monkeypatch):
    def missing(cuda):
        raise ToolchainError("no C++ compiler found: install one")

    monkeypatch.setattr(toolchain, "check", missing)
    fast = fxfuse.optimize(two_layers())
    assert "fused" not in headline(fast)
    with torch.no_grad(), pytest.warns(fxfuse.FxfuseWarning, match="no C"):
        fast(randn(2, 8))
    assert headline(fast) == "2 regions: 2 run by torch"
    assert "torch: no C++ compiler found" in str(fxfuse.explain(fast))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.head = linear(), linear()

    def forward(self, x, mask=None, scale=1.0):
        x = torch.relu(self.fc(x))
        if mask is not None:
            x = torch.sigmoid(x + mask)
        return torch.relu(self.head(x)) * scale


def test_traces_that_no_call_used_are_not_counted():
    x = randn(2, 8)
    fast = fxfuse.optimize(Masked().eval())
    with torch.no_grad():
        fast(x, x)
        assert headline(fast) == "2 regions fused"
        assert regions(fast)[0].epilogue == "sigmoid(relu(acc) + o0)"
        assert "(not called yet)" not in str(fxfuse.explain(fast))
        fast(x)
        # the head is the same in both
        assert [region.epilogue for region in regions(fast)].count("relu(acc)") == 1 + 1
        assert headline(fast) == "3 regions fused"


def test_layers_alike_are_one_row_with_a_count():
    model = nn.Sequential(*(layer for _ in range(3) for layer in (linear(), nn.ReLU())), linear(4), nn.Tanh()).eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        fast(randn(2, 8))
    report = fxfuse.explain(fast)
    assert len(report.regions) == 4 and headline(fast) == "4 regions fused"
    rows = [line.split("│")[1:] for line in str(report).splitlines() if "│ linear" in line]
    assert [(row[1].strip(), row[3].strip()) for row in rows] == [("3", "relu(acc)"), ("1", "tanh(acc)")]
    assert "and 2 like it" in rows[0][2]
