"""Layers as other libraries write them: fused, or the reason; the same answer in every mode.

First the shapes of code in plain torch, then every layer module of timm and torchvision where these are installed.
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from helpers import Net, Net2, assert_as_eager, conv, epilogues, fx_traces, linear, outcome, randn
from torch import nn

import fxfuse

IMAGE, ROWS = (2, 4, 6, 6), (2, 5, 8)


class NormAct(nn.BatchNorm2d):
    """A normalisation with a forward, an assertion, a dropout and an activation of its own."""

    def __init__(self, channels, act=nn.ReLU):
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), act(inplace=True)
        with torch.no_grad():
            self.running_var.uniform_(0.5, 2)
            self.running_mean.normal_()

    def forward(self, x):
        torch._assert(x.ndim == 4, "expected 4D input")
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        use_batch = self.training or (self.running_mean is None and self.running_var is None)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, use_batch, self.momentum, self.eps
        )
        return self.act(self.drop(x))


class SuperNormAct(nn.BatchNorm2d):
    """A normalisation that leaves the arithmetic to torch's own forward."""

    def __init__(self, channels, act=nn.ReLU):
        super().__init__(channels)
        self.act = act(inplace=True)
        with torch.no_grad():
            self.running_var.uniform_(0.5, 2)
            self.running_mean.normal_()

    def forward(self, x):
        return self.act(super().forward(x))


class Named(nn.BatchNorm1d):
    """A subclass without a forward of its own."""


class SplitNorm(nn.BatchNorm2d):
    """Statistics by halves of a batch in training, as timm's SplitBatchNorm2d."""

    def forward(self, x):
        if self.training:
            return torch.cat([super(SplitNorm, self).forward(half) for half in x.split(1)])
        return super().forward(x)


class Frozen(nn.Module):
    """Statistics and parameters in buffers."""

    def __init__(self, channels):
        super().__init__()
        for index, name in enumerate(("weight", "bias", "mean", "var")):
            self.register_buffer(name, randn(channels, seed=index).abs() + 0.1)

    def forward(self, x):
        weight, bias, mean, var = (
            getattr(self, name).reshape(1, -1, 1, 1) for name in ("weight", "bias", "mean", "var")
        )
        scale = weight * (var + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


class Standardised(nn.Conv2d):
    """A convolution by a weight that is normalised at every call."""

    def forward(self, x):
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1), None, None, training=True, momentum=0.0, eps=1e-6
        ).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class DropPath(nn.Module):
    """Nothing in evaluation; in training whole samples are dropped."""

    def forward(self, x):
        if not self.training:
            return x
        keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.5)
        return x * keep.div_(0.5)


class Scale(nn.Module):
    def __init__(self, shape, inplace=False):
        super().__init__()
        self.gamma, self.inplace = nn.Parameter(randn(8)), inplace
        self.shape = shape

    def forward(self, x):
        gamma = self.gamma.view(self.shape)
        return x.mul_(gamma) if self.inplace else x * gamma


class ResponseNorm(nn.Module):
    """GRN of channels last."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(randn(8)), nn.Parameter(randn(8, seed=1))

    def forward(self, x):
        norm = x.norm(p=2, dim=1, keepdim=True)
        norm = norm / (norm.mean(dim=-1, keepdim=True) + 1e-6)
        return x + torch.addcmul(self.bias.view(1, 1, -1), self.weight.view(1, 1, -1), x * norm)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(randn(8))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Permute(nn.Module):
    def forward(self, x):
        return torch.permute(x, (0, 2, 3, 1))


class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.fc2(F.relu(self.fc1(self.pool(x)))))


class ChannelAttention(nn.Module):
    """ECA: a convolution over the channels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def forward(self, x):
        y = self.conv(x.mean((2, 3)).view(x.shape[0], 1, -1))
        return x * y.view(x.shape[0], -1, 1, 1).sigmoid().expand_as(x)


THEN_RELU = "relu(batch_norm(acc, o0, o1, o2, o3, 1e-05))"
BATCH_NORM = THEN_RELU.replace("relu(", "relu_(")
"""With an activation of its own, in place."""
LAYERS = {
    # layers; shape of the input; epilogues in evaluation; words of the reasons for what stays torch's
    "a normalisation with an activation": ([conv(), NormAct(8)], IMAGE, [BATCH_NORM], ""),
    "two of them": ([conv(), NormAct(8), NormAct(8)], IMAGE, [
        "relu_(batch_norm(relu_(batch_norm(acc, o0, o1, o2, o3, 1e-05)), o4, o5, o6, o7, 1e-05))"
    ], ""),
    "a normalisation by torch's forward": ([conv(), SuperNormAct(8)], IMAGE, [BATCH_NORM], ""),
    "one after a normalisation of torch's": ([conv(), nn.BatchNorm2d(8), SuperNormAct(8)], IMAGE, [
        "relu_(batch_norm(batch_norm_2d(acc, o0, o1, o2, o3, 1e-05), o4, o5, o6, o7, 1e-05))"
    ], ""),
    "a normalisation of another name": ([linear(), Named(5), nn.ReLU()], ROWS, [THEN_RELU], ""),
    "a split normalisation": ([conv(), SplitNorm(8), nn.ReLU()], IMAGE, [THEN_RELU], ""),
    "a normalisation in three dimensions": (
        [nn.Conv3d(4, 8, 3), type("Norm3d", (nn.BatchNorm3d,), {})(8), nn.ReLU()], (1, 4, 4, 4, 4), [THEN_RELU], ""
    ),
    "frozen statistics": ([conv(), Frozen(8), nn.ReLU()], IMAGE, [
        "o0 * rsqrt(acc + 1e-05)", "o0 - acc * o1", "relu(acc * o0 + o1)"
    ], ""),
    "a standardised weight": ([Standardised(4, 8, 3), nn.ReLU()], IMAGE, ["relu(acc)"], ""),
    "and a normalisation": ([Standardised(4, 8, 3), NormAct(8)], IMAGE, [BATCH_NORM], ""),
    "a drop path": ([linear(), DropPath(), nn.GELU()], ROWS, ["gelu(acc)"], ""),
    "a scale": ([linear(), Scale((8,)), DropPath()], ROWS, ["acc * o0"], ""),
    "a scale in place": ([conv(), Scale((1, 8, 1, 1), inplace=True)], IMAGE, ["assign(acc * o0, acc)"], ""),
    "a response norm": ([linear(), nn.GELU(), ResponseNorm()], ROWS, [
        "gelu(acc)", "o0 + addcmul(o1, o2, o0 * (o3 / (acc + 1e-06)), 1)"
    ], ""),
    "a layer norm of channels": ([conv(), LayerNorm2d(8), nn.GELU()], IMAGE, [], "goes to 'permute'"),
    "an RMS norm by hand": ([linear(), RMSNorm()], ROWS, ["o0 * rsqrt(acc + 1e-06) * o1"], "is also used by 'pow_1'"),
    "a permutation": ([conv(), nn.ReLU(), Permute(), linear(), nn.GELU()], IMAGE, ["relu(acc)", "gelu(acc)"], ""),
    "a block": ([nn.Sequential(conv(), nn.BatchNorm2d(8), nn.ReLU(inplace=True))], IMAGE, [
        "relu_(batch_norm_2d(acc, o0, o1, o2, o3, 1e-05))"
    ], ""),
    "a squeeze and excite": ([conv(), SqueezeExcite()], IMAGE, ["relu(acc)", "o0 * sigmoid(acc)"], "another region"),
    "a channel attention": ([conv(), ChannelAttention()], IMAGE, [], "is also used by 'mean'"),
}  # fmt: skip
if hasattr(nn, "RMSNorm"):  # since torch 2.4
    LAYERS["nn.RMSNorm"] = ([linear(), nn.RMSNorm(8), nn.GELU()], ROWS, [], "goes to '_1' (RMSNorm)")


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_other_libraries_are_fused_or_the_report_says_why(name):
    layers, shape, expected, reason = LAYERS[name]
    model = nn.Sequential(*layers).eval()
    fast = fxfuse.optimize(model)
    report = fxfuse.explain(fast)
    assert epilogues(fast) == expected, report
    assert reason in " ".join(skipped.reason for skipped in report.skipped)
    assert not any("runs as Python" in skipped.reason for skipped in report.skipped), report
    assert_as_eager(model, fast, randn(*shape).requires_grad_())  # by the regions' torch reference
    torch.manual_seed(0)
    expected = model.train()(randn(*shape))
    torch.manual_seed(0)
    torch.testing.assert_close(fast.train()(randn(*shape)), expected)


def test_a_question_about_a_sum_ends_no_region():
    parts = {"a": conv(), "b": conv(), "act": nn.ReLU(inplace=True), "norm": NormAct(8)}
    model = Net(lambda m, x: m.norm(m.act(m.a(x) + m.b(x))), **parts).eval()
    fast = fxfuse.optimize(model)
    expected = ["acc", "relu_(batch_norm(relu_(o0 + acc), o1, o2, o3, o4, 1e-05))"]
    assert epilogues(fast) in (expected, expected[1:]), fxfuse.explain(fast)
    assert_as_eager(model, fast, randn(*IMAGE).requires_grad_())
    for shape, refused in ((IMAGE[1:], AssertionError), ((6, 6), RuntimeError)):
        assert_as_eager(model, fast, randn(*shape).requires_grad_(), raises=refused)


def test_a_question_about_the_rank_is_answered_as_eager_answers_it():
    model = nn.Sequential(conv(), nn.ReLU(), NormAct(8)).eval()
    fast = fxfuse.optimize(model)
    assert epilogues(fast) == ["relu_(batch_norm(relu(acc), o0, o1, o2, o3, 1e-05))"]
    assert_as_eager(model, fast, randn(*IMAGE).requires_grad_())
    for shape, refused in ((IMAGE[1:], AssertionError), ((6, 6), RuntimeError), ((1, *IMAGE), RuntimeError)):
        assert_as_eager(model, fast, randn(*shape).requires_grad_(), raises=refused)


@pytest.mark.parametrize("before", [[], [conv()], [conv(), nn.ReLU(), nn.BatchNorm2d(8).eval()]])
def test_torchs_normalisations_refuse_other_ranks_in_their_words(before):
    channels = 8 if before else 4
    model = nn.Sequential(*before, SuperNormAct(channels)).eval()
    fast = fxfuse.optimize(model)
    assert len(epilogues(fast)) == 1
    again = fxfuse.optimize(torch.fx.symbolic_trace(fast)) if not before else fast
    exported = torch.export.export(fast, (randn(*IMAGE),)).module()
    for run in (fast, again, exported, copy.deepcopy(fast)):
        assert_as_eager(model, run, randn(*IMAGE).requires_grad_())
    for shape in (IMAGE[1:], (1, *IMAGE)):
        refused = outcome(model, randn(*shape))
        assert isinstance(refused, ValueError | RuntimeError)
        for run in (fast, again):
            found = outcome(run, randn(*shape))
            assert (type(found), str(found)) == (type(refused), str(refused))
    assert nn.BatchNorm2d._check_input_dim.__module__ == "torch.nn.modules.batchnorm"


def test_a_rank_that_changes_in_place_is_asked_for_in_time():
    def forward(m, x):
        x = x * 2
        y = m.fc(x).relu()
        x.unsqueeze_(0)
        return y.tanh() + y.dim(), x

    model = Net(forward, fc=linear()).eval()
    with torch.no_grad():
        assert_as_eager(model, fxfuse.optimize(model), randn(3, 8))


SMALLEST = {
    # functions of two tensors; the epilogue
    "torch.min": (lambda m, x: torch.min(m.fc(x), torch.tensor(0.5, device=x.device)), "minimum(acc, o0)"),
    "torch.max": (lambda m, x: torch.max(m.fc(x), torch.tensor(0.0)), "maximum(acc, o0)"),
    "by name": (lambda m, x: torch.max(m.fc(x), other=m.p), "maximum(acc, o0)"),
    "a method": (lambda m, x: m.fc(x).max(m.p) * 2, "maximum(acc, o0) * 2"),
    "new_full": (lambda m, x: torch.min(m.fc(x), x.new_full((), 0.5)), "minimum(acc, o0)"),
    "minimum": (lambda m, x: torch.minimum(m.fc(x), torch.tensor(0.5, device=x.device)), "minimum(acc, o0)"),
    "where": (lambda m, x: torch.where(m.fc(x) > m.p, 1.0, torch.tensor(0.5)), "where(acc > o0, 1.0, o1)"),
    "a parameter": (lambda m, x: torch.min(m.fc(x), m.p) * m.p, "minimum(acc, o0) * o0"),
    "one value's": (lambda m, x: torch.max(m.fc(x).relu(), x), "maximum(relu(acc), o0)"),
    "along a dimension": (lambda m, x: torch.max(m.fc(x).relu() * 2, 1)[0], "relu(acc) * 2"),
    "along a named dimension": (lambda m, x: (m.fc(x).relu() * 2).min(dim=1).values, "relu(acc) * 2"),
    "of all": (lambda m, x: (m.fc(x).relu() * 2).max(), "relu(acc) * 2"),
}


@pytest.mark.parametrize("name", SMALLEST)
def test_minima_and_maxima_of_tensors_without_dimensions(name):
    forward, epilogue = SMALLEST[name]
    model = Net(forward, fc=linear(), p=torch.tensor(0.25)).eval()
    fast = fxfuse.optimize(model)
    if name not in ("torch.min", "minimum") or fx_traces(lambda x: torch.tensor(0.5, device=x.device)):
        assert epilogues(fast) == [epilogue]
    assert_as_eager(model, fast, randn(3, 8).requires_grad_())


def test_an_argument_of_max_may_be_a_dimension():
    model = Net2(lambda m, x, y: torch.max(m.fc(x).relu(), y), fc=linear()).eval()
    fast = fxfuse.optimize(model)
    assert "may have a dimension" in str(fxfuse.explain(fast, verbose=True))
    with torch.no_grad():
        for y in (randn(3, 8), 1):
            assert_as_eager(model, fast, randn(3, 8), y)


# --------------------------------------------------------------------------------------------- the libraries

TRIED = (
    lambda layer: layer(8), lambda layer: layer(), lambda layer: layer(8, 8), lambda layer: layer(8, 8, 3),
    lambda layer: layer(8, num_heads=2),
)  # fmt: skip
"""Arguments that a layer of eight channels may take."""
HEADS = (
    # what comes before the layer, and its input
    (lambda: conv(), IMAGE),
    (lambda: linear(), (2, 6, 8)),
    (lambda: linear(), (2, 5, 6, 8)),
)

TIMM_FUSED = {
    "BatchNormAct2d": BATCH_NORM, "ConvNormAct": BATCH_NORM, "FrozenBatchNormAct2d": "relu(acc * o0 + o1)",
    "GELU": "gelu(acc)", "GELUTanh": "gelu_tanh(acc)", "HardMish": "assign(acc * (clamp(acc + 2, 0, 2) * 0.5), acc)",
    "LayerScale": "acc * o0", "LayerScale2d": "acc * o0", "Mish": "mish(acc)", "Mlp": "gelu(acc)",
    "QuickGELU": "acc * sigmoid(acc * 1.702)", "SqueezeExcite": "o0 * sigmoid(acc)", "Swish": "assign(silu(acc), acc)",
}  # fmt: skip
TIMM_AS_PYTHON = {
    "AttentionPool2d", "AvgPool2dSame", "Conv2dSame", "FourierEmbed", "MaxPool2dSame", "SyncBatchNormAct",
}  # fmt: skip
"""Layers whose forward asks for what no graph knows: sizes that decide on padding, a list's length, a rank."""


def _after_a_head(make_layer):
    """The layer after a linear or convolution that it takes, and an input; None if it takes none of these."""
    for make in TRIED:
        for head, shape in HEADS:
            try:
                model = nn.Sequential(head(), make(make_layer)).eval()
                model(randn(*shape))
            except Exception:  # whatever a layer says about arguments that are not for it
                continue
            return model, randn(*shape)
    return None


def test_every_layer_of_timm():
    layers = pytest.importorskip("timm.layers")
    tried, found, as_python = 0, {}, set()
    for name, layer in sorted(vars(layers).items()):
        built = _after_a_head(layer) if inspect.isclass(layer) and issubclass(layer, nn.Module) else None
        if built is None:
            continue
        tried += 1
        model, x = built
        fast = fxfuse.optimize(model)
        report, found[name] = fxfuse.explain(fast), epilogues(fast)
        assert report.regions or report.skipped or not list(model[1].parameters()), name
        if any("runs as Python" in skipped.reason for skipped in report.skipped):
            as_python.add(name)
        assert_as_eager(model, fast, x.requires_grad_())
    assert tried >= 90
    assert as_python <= TIMM_AS_PYTHON
    missing = {
        name: found[name] for name, epilogue in TIMM_FUSED.items() if epilogue not in found.get(name, [epilogue])
    }
    assert not missing


TORCHVISION = {
    # a layer from torchvision's ops and models; an epilogue of it behind a convolution, if there is one
    "Conv2dNormActivation": (lambda ops, models: ops.Conv2dNormActivation(8, 8), "relu_(batch_norm_2d("),
    "SqueezeExcitation": (lambda ops, models: ops.SqueezeExcitation(8, 4), "sigmoid(acc)"),
    "FrozenBatchNorm2d": (lambda ops, models: ops.FrozenBatchNorm2d(8), "acc * o0 + o1"),
    "Permute": (lambda ops, models: nn.Sequential(nn.ReLU(), ops.Permute([0, 2, 3, 1])), "relu(acc)"),
    "MLP": (lambda ops, models: nn.Sequential(ops.Permute([0, 2, 3, 1]), ops.MLP(8, [16, 8])), "relu(acc)"),
    "StochasticDepth": (lambda ops, models: nn.Sequential(ops.StochasticDepth(0.5, "row"), nn.SiLU()), "silu(acc)"),
    "DropBlock2d": (lambda ops, models: nn.Sequential(ops.DropBlock2d(0.5, 3), nn.SiLU()), "silu(acc)"),
    "BasicBlock": (lambda ops, models: models.resnet.BasicBlock(8, 8), "relu_(batch_norm_2d("),
    "Bottleneck": (lambda ops, models: models.resnet.Bottleneck(8, 2), "relu_(batch_norm_2d("),
    "InvertedResidual": (lambda ops, models: models.mobilenetv2.InvertedResidual(8, 8, 1, 6), "clamp(batch_norm_2d("),
    "CNBlock": (lambda ops, models: models.convnext.CNBlock(8, 1e-6, 0.1), "gelu(acc)"),
    "LayerNorm2d": (lambda ops, models: models.convnext.LayerNorm2d(8), None),
    "BasicConv2d": (lambda ops, models: models.inception.BasicConv2d(8, 8, kernel_size=1), "relu_(batch_norm_2d("),
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_layers_of_torchvision(name):
    torchvision = pytest.importorskip("torchvision")
    layer, epilogue = TORCHVISION[name]
    model = nn.Sequential(conv(), layer(torchvision.ops, torchvision.models)).eval()
    fast = fxfuse.optimize(model)
    report = fxfuse.explain(fast)
    assert not any("runs as Python" in skipped.reason for skipped in report.skipped), report
    assert epilogue is None or any(epilogue in found for found in epilogues(fast)), report
    assert_as_eager(model, fast, randn(*IMAGE).requires_grad_())
