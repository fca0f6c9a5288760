"""The report tells what ran: kernels, torch and why, and only what calls used."""

import copy
import dataclasses

import pytest
import torch
from helpers import Net, Net2, check_html, linear, randn, regions
from torch import nn

import fxfuse
from fxfuse import plans, toolchain
from fxfuse.errors import ToolchainError
from fxfuse.module import DYNAMO_KEEPS_OBJECTS as CAPTURES_BY_DYNAMO
from fxfuse.problem import Plan
from fxfuse.report import Report, SkippedReport
from fxfuse.report.collect import gain_of


def two_layers():
    return nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU()).eval()


def headline(fast):
    return str(fxfuse.explain(fast, verbose=True)).splitlines()[0]


def test_regions_that_nobody_called_are_not_called_fused():
    fast = fxfuse.optimize(two_layers())
    assert headline(fast) == "2 regions found, not called yet"
    assert headline(fxfuse.optimize(nn.Sequential(nn.Dropout()))) == "0 regions fused"


class InTrainingByDynamo(nn.Module):
    """fx cannot trace it in training, but in evaluation it can."""

    def __init__(self):
        super().__init__()
        self.fc = linear()

    def forward(self, x):
        y = torch.relu(self.fc(x))
        return sum(y.chunk(2, -1)) if self.training else y


def test_graphs_of_dynamo_that_another_mode_has_are_not_reported():
    fast = fxfuse.optimize(InTrainingByDynamo())
    with torch.no_grad():
        for _ in range(4):
            fast(randn(2, 8))
        if CAPTURES_BY_DYNAMO:
            assert "captured by Dynamo as 1 graph" in str(fxfuse.explain(fast, verbose=True))
        fast.eval()
        fast(randn(2, 8))
    report = fxfuse.explain(fast)
    assert report.dynamo == () and [region.epilogue for region in report.regions] == ["relu(acc)"]


def test_without_no_grad_torch_runs_the_regions_and_the_report_says_so():
    fast = fxfuse.optimize(two_layers())
    fast(randn(2, 8))
    assert [(region.kernel, region.fallback) for region in regions(fast)] == [(None, plans.GRADIENTS_DUE)] * 2
    assert headline(fast) == "2 regions: 2 run by torch"
    assert "torch: gradients are due" in str(fxfuse.explain(fast, verbose=True))


def test_a_region_that_ran_both_ways_says_both():
    fast = fxfuse.optimize(two_layers())
    with torch.no_grad():
        fast(randn(2, 8))
    assert headline(fast) == "2 regions fused" and regions(fast)[0].fallback is None
    fast(randn(2, 8))
    assert headline(fast) == "2 regions fused"
    report = str(fxfuse.explain(fast, verbose=True))
    assert f"{regions(fast)[0].kernel}; torch: gradients are due" in " ".join(report.split())


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
    assert any(region.fallback == reason for region in regions(fast)), str(fxfuse.explain(fast, verbose=True))
    assert "(not called yet)" not in str(fxfuse.explain(fast, verbose=True))


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
    assert "torch: no C++ compiler found" in str(fxfuse.explain(fast, verbose=True))


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
        assert "(not called yet)" not in str(fxfuse.explain(fast, verbose=True))
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
    rows = [line.split("│")[1:] for line in report.text(verbose=True).splitlines() if "│ linear" in line]
    assert [(row[1].strip(), row[3].strip()) for row in rows] == [("3", "relu(acc)"), ("1", "tanh(acc)")]
    assert "and 2 like it" in rows[0][2]


# ------------------------------------------------------------------------------------------------ short and verbose


class Attention(nn.Module):
    """Three linears that nothing pointwise follows, and one that something does."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = linear(), linear(), linear(), linear()

    def forward(self, x):
        q, k, v = self.q(x).view(2, 2, 4), self.k(x).view(2, 2, 4), self.v(x).view(2, 2, 4)
        return torch.relu(self.out((torch.softmax(q @ k.transpose(1, 2), -1) @ v).view(2, 8)))


def called(model, *inputs, times=4):
    fast = fxfuse.optimize(model.eval())
    with torch.no_grad():
        for _ in range(times):
            fast(*inputs)
    return fast


def test_the_short_report_has_a_line_for_each_kind_and_groups_what_was_left_alone():
    report = fxfuse.explain(called(Attention(), randn(2, 8)))
    lines = str(report).splitlines()
    assert lines[0] == "1 region fused"
    assert lines[1].split() == ["linear", "1", "linear", "by", "torch", "+", "one", "pass", "relu(acc)"]
    (operations,) = [line for line in lines if line.startswith("a call: ")]
    assert operations.startswith(f"a call: {report.operations.before} operations before; now 2 kernels and ")
    at = lines.index("left alone: 5")
    assert lines[at + 1].startswith("  3 x (q, k, v): no pointwise operation follows"), "views in all three"
    assert lines[at + 2].startswith("  2 x (matmul, matmul_1): ")


def test_operations_are_counted_before_and_after():
    operations = fxfuse.explain(called(Attention(), randn(2, 8))).operations
    # four linears, two products, softmax, relu; neither views nor transpositions
    assert operations.before == 8
    # the region is a call of addmm and a kernel; softmax is the other
    assert operations.kernels == 2 and operations.after == 8
    assert dict(operations.calls) == {"addmm": 4, "bmm": 2}


def test_what_a_region_moves_is_predicted():
    """relu(linear * 2 + y): eager reads and writes the product, its double and their sum, a pass after the product."""
    model = Net2(lambda m, x, y: torch.relu(m.fc(x) * 2 + y), fc=nn.Linear(64, 32))
    x, y = randn(16, 64), randn(16, 32)
    fast = fxfuse.optimize(model)
    assert fxfuse.explain(fast).regions[0].moved is None
    with torch.no_grad():
        fast(x, y)
    report = fxfuse.explain(fast)
    (region,) = report.regions
    given = 4 * (x.numel() + 64 * 32 + 32 + y.numel())
    result = 4 * y.numel()
    assert region.moved[0] == given + 2 * 3 * result + result
    between = 2 * result if "+" in region.kernel else 0
    assert region.moved[1] == given + between + result
    (line,) = [line for line in str(report).splitlines() if line.startswith("predicted: ")]
    assert line == f"predicted: {region.moved[1] / 1024:.3g} KiB read and written by 1 region a call, " + (
        f"{region.moved[0] / 1024:.3g} KiB by eager's operations ({region.moved[0] / region.moved[1]:.1f}x)"
    )


def test_before_any_call_regions_are_counted_for_kernels():
    operations = fxfuse.explain(fxfuse.optimize(two_layers())).operations
    assert (operations.before, operations.kernels, operations.calls) == (4, 2, ())


def test_everything_is_printed_with_verbose():
    fast = called(two_layers(), randn(2, 8))
    short, long = fxfuse.explain(fast), fxfuse.explain(fast, verbose=True)
    assert short == fxfuse.explain(fast) and short.text(verbose=True) == str(long)
    assert "runs as a program" in str(long) and "runs as a program" not in str(short)
    assert "│ replaces" in str(long) and "│" not in str(short)


def test_the_measured_gain_is_a_sum_over_problems():
    region = fxfuse.explain(fxfuse.optimize(two_layers())).regions[0]
    measured = dataclasses.replace(region, gains=((3e-3, 1e-3), (1e-3, 1e-3)))
    report = Report((measured,), ())
    assert "measured: 2 problems, 4.000 ms by torch's library and a pass, 2.000 ms now (2.00x)" in str(report)


def test_gains_are_of_the_kernel_in_use_against_the_library():
    plan = Plan(None, "gemm 64x64", measured=(("gemm 64x64", 1e-3), ("library + one pass", 2e-3), ("library", 3e-3)))
    assert list(gain_of(plan)) == [(2e-3, 1e-3)]
    assert not list(gain_of(Plan(None, "gemm 64x64", measured=(("gemm 64x64", 1e-3),)))), "nothing to compare with"


def test_a_notebook_shows_a_table_in_which_nothing_is_markup():
    report = fxfuse.explain(called(two_layers(), randn(2, 8)))
    odd = SkippedReport("a", "because <script>alert(1)</script> & so")
    html = dataclasses.replace(report, skipped=(odd,))._repr_html_()
    tags = check_html(html)
    assert tags.count("tr") == 2 and "script" not in tags
    assert "2 regions fused" in html and "relu(acc)" in html and "left alone: 1" in html


# ------------------------------------------------------------------------------------------------------ torch.compile


@pytest.fixture
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x):
        return torch.relu(self.b(torch.relu(self.a(x))))


def test_a_compiled_model_is_explained_after_its_first_call(fresh_dynamo):
    compiled = torch.compile(TwoLayers().eval(), backend="fxfuse")
    with pytest.raises(fxfuse.FxfuseError, match="call it once before"):
        fxfuse.explain(compiled)
    with torch.no_grad():
        compiled(randn(2, 8))
    assert len(regions(compiled)) == 2


def test_graphs_of_one_compiled_model_have_names(fresh_dynamo):
    def forward(m, x):
        x = torch.relu(m.a(x))
        torch._dynamo.graph_break()
        return torch.tanh(m.b(x))

    class InTwo(Net):
        """Of a class of its own: other tests compile models of Net with such parameters."""

    compiled = torch.compile(InTwo(forward, a=linear(), b=linear()).eval(), backend="fxfuse")
    with torch.no_grad():
        compiled(randn(2, 8))
    assert [region.node.partition(".")[0] for region in regions(compiled)] == ["graph1", "graph2"]


def test_other_modules_are_refused(fresh_dynamo):
    with pytest.raises(fxfuse.FxfuseError, match="not a Sequential"):
        fxfuse.explain(two_layers())

    class ByAnother(TwoLayers):
        pass

    compiled = torch.compile(ByAnother().eval(), backend="eager")
    with torch.no_grad():
        compiled(randn(2, 8))
    with pytest.raises(fxfuse.FxfuseError, match='backend="fxfuse"'):
        fxfuse.explain(compiled)
