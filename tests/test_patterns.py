"""What is matched: models in, regions with their epilogues and the reasons for everything left alone out."""

import operator
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import Net, Net2, assert_as_eager, conv, fx_traces, linear, with_stochastic_depth
from torch import fx, nn

import fxfuse
from fxfuse import ops


def ones(*shape):
    return torch.ones(shape)


def report(model):
    return fxfuse.explain(fxfuse.optimize(model.eval()))


def swish_chain(m, x):
    x = m.fc(x)
    x = x * torch.sigmoid(x)
    x = x / 2.0
    x = torch.clamp(x, min=-1.0, max=1.0)
    x = torch.tanh(x)
    return torch.clamp(x, min=-1.0, max=1.0)


def gelu_chain(m, x):
    x = m.fc(x) + m.v
    x = torch.sigmoid(x) * x
    x = torch.tanh(x)
    x = F.gelu(x)
    return F.hardtanh(x, min_val=-1, max_val=1)


def inplace_functions(m, x):
    x = m.fc(x)
    x = F.relu(x, inplace=True)
    x = F.hardtanh(x, -2, 2, True)
    return x.tanh_()


def flattened(m, x):
    """A linear as GPT-2 has it."""
    y = torch.addmm(m.v, x.view(-1, x.size(-1)), m.w)
    return y.view(x.size()[:-1] + (5,)).relu()  # noqa: RUF005 - unpacking sizes stops a trace


ONE_REGION = {
    # the reference models
    "a": (Net(lambda m, x: torch.relu(m.fc(x) + m.v), fc=linear(bias=False), v=ones(8)), "relu(acc + o0)"),
    "b": (Net(swish_chain, fc=linear()), "tanh(clamp(silu(acc) * 0.5, -1.0, 1.0))"),
    "c": (Net(lambda m, x: torch.relu(m.conv(x)) + m.b, conv=conv(), b=ones(8, 1, 1)), "relu(acc) + o0"),
    "d": (Net(gelu_chain, fc=linear(), v=ones(8)), "gelu(tanh(silu(acc + o0)))"),
    "a number and alpha": (Net(lambda m, x: m.fc(x).add(3, alpha=2).sub(0.5, alpha=4), fc=linear()), "acc + 6 - 2.0"),
    # anchors
    "F.linear": (Net(lambda m, x: F.linear(x, m.w, m.v).relu(), w=ones(8, 8), v=ones(8)), "relu(acc)"),
    "matmul": (Net(lambda m, x: torch.matmul(x, m.w).relu(), w=ones(8, 5)), "relu(acc)"),
    "@": (Net(lambda m, x: (x @ m.w).relu(), w=ones(8, 5)), "relu(acc)"),
    "x.mm": (Net(lambda m, x: x.mm(m.w).relu(), w=ones(8, 5)), "relu(acc)"),
    "@ w.t()": (Net(lambda m, x: (x @ m.w.t()).relu(), w=ones(5, 8)), "relu(acc)"),
    "@ w.T": (Net(lambda m, x: (x @ m.w.T).relu(), w=ones(5, 8)), "relu(acc)"),
    "addmm": (Net(lambda m, x: torch.addmm(m.v, x, m.w).relu(), w=ones(8, 5), v=ones(5)), "relu(acc)"),
    "flattened addmm": (Net(flattened, w=ones(8, 5), v=ones(5)), "relu(acc)"),
    "flattened mm": (
        Net(
            lambda m, x: torch.mm(x.reshape(-1, x.shape[-1]), m.w).view(operator.add(x.shape[:-1], (5,))).relu(),
            w=ones(8, 5),
        ),
        "relu(acc)",
    ),
    "addmm alpha beta": (
        Net(lambda m, x: torch.addmm(m.v, x, m.w, beta=0.5, alpha=2).relu(), w=ones(8, 5), v=ones(5)),
        "relu(acc)",
    ),
    "addmm beta 0": (Net(lambda m, x: torch.addmm(m.v, x, m.w, beta=0).relu(), w=ones(8, 5), v=ones(5)), "relu(acc)"),
    "F.conv2d": (Net(lambda m, x: F.conv2d(x, m.w, m.v, 2, (1, 0)).relu(), w=ones(8, 4, 3, 3), v=ones(8)), "relu(acc)"),
    "same": (Net(lambda m, x: m.conv(x).relu(), conv=conv(padding="same")), "relu(acc)"),
    "valid": (Net(lambda m, x: m.conv(x).relu(), conv=conv(padding="valid")), "relu(acc)"),
    "depthwise": (Net(lambda m, x: m.conv(x).relu(), conv=conv(groups=4)), "relu(acc)"),
    # values
    "used twice": (Net(lambda m, x: (lambda y: y * torch.tanh(y + 1))(m.fc(x)), fc=linear()), "acc * tanh(acc + 1)"),
    "dag": (
        Net(lambda m, x: (lambda y: torch.where(y > 0, y, y.exp() - 1) + y.abs())(m.fc(x)), fc=linear()),
        "where(acc > 0, acc, exp(acc) - 1) + abs(acc)",
    ),
    "operand twice": (Net(lambda m, x: m.fc(x) * m.v + m.v, fc=linear(), v=ones(8)), "acc * o0 + o0"),
    "residual": (Net(lambda m, x: torch.relu(m.fc(x) + x), fc=linear()), "relu(acc + o0)"),
    "reversed": (Net(lambda m, x: 1 / (2 - 3 * m.fc(x)), fc=linear()), "1 / (2 - acc * 3)"),
    "scalar operand": (Net(lambda m, x: m.fc(x) * m.s, fc=linear(), s=torch.tensor(2.0)), "acc * o0"),
    # nodes that do nothing
    "dropout": (Net(lambda m, x: m.d(m.fc(x)).relu(), fc=linear(), d=nn.Dropout(0.5)), "relu(acc)"),
    "F.dropout of nothing": (Net(lambda m, x: F.dropout(m.fc(x), 0.0, training=True).relu(), fc=linear()), "relu(acc)"),
    "F.dropout": (Net(lambda m, x: F.dropout(m.fc(x), training=m.training).relu(), fc=linear()), "relu(acc)"),
    "stochastic depth": (
        Net(lambda m, x: with_stochastic_depth(m.conv(x), m.training) + x, conv=nn.Conv2d(3, 3, 3, padding=1)),
        "acc + o0",
    ),
    "identity": (Net(lambda m, x: m.i(m.fc(x)).relu(), fc=linear(), i=nn.Identity()), "relu(acc)"),
    "contiguous": (Net(lambda m, x: m.fc(x).contiguous().relu(), fc=linear()), "relu(contiguous(acc))"),
    "detach": (Net(lambda m, x: m.fc(x).detach().relu(), fc=linear()), "relu(detach(acc))"),
    "clone": (Net(lambda m, x: m.fc(x).clone().relu(), fc=linear()), "relu(acc)"),
    # in place
    "relu_": (Net(lambda m, x: m.fc(x).relu_(), fc=linear()), "relu_(acc)"),
    "inplace=True": (Net(lambda m, x: m.r(m.conv(x)), conv=conv(), r=nn.ReLU(inplace=True)), "relu_(acc)"),
    "in-place functions": (Net(inplace_functions, fc=linear()), "tanh_(hardtanh_(relu_(acc), -2, 2))"),
    "add_": (Net(lambda m, x: m.fc(x).add_(m.v), fc=linear(), v=ones(8)), "assign(acc + o0, acc)"),
    "add_ number": (Net(lambda m, x: m.fc(x).add_(1).mul_(2), fc=linear()), "mul_(add_(acc, 1), 2)"),
    # parameters of modules
    "prelu": (Net(lambda m, x: m.p(m.fc(x)), fc=linear(), p=nn.PReLU()), "prelu(acc, o0)"),
    "prelu per channel": (
        Net(lambda m, x: m.p(m.conv(x)), conv=conv(), p=nn.PReLU(8)), "prelu(acc, o0)",
    ),
    "batch norm": (
        Net(lambda m, x: m.bn(m.conv(x)).relu(), conv=conv(), bn=nn.BatchNorm2d(8)),
        "relu(batch_norm_2d(acc, o0, o1, o2, o3, 1e-05))",
    ),
    "batch norm without affine": (
        Net(lambda m, x: m.bn(m.conv(x)), conv=conv(), bn=nn.BatchNorm2d(8, affine=False, eps=0.5)),
        "batch_norm_2d(acc, o0, o1, 1.0, 0.0, 0.5)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_REGION)
def test_becomes_one_region(name):
    model, epilogue = ONE_REGION[name]
    found = report(model)
    assert [region.epilogue for region in found.regions] == [epilogue]
    assert found.skipped == ()
    assert found.regions[0].kernel is None, "nothing ran yet"


def test_region_report():
    found = report(ONE_REGION["b"][0]).regions[0]
    assert found.anchor == "linear"
    assert found.nodes == ("fc", "sigmoid", "mul", "truediv", "clamp", "tanh", "clamp_1")


LEFT_ALONE = {
    "bare": (Net(lambda m, x: m.fc(x), fc=linear()), "fc", "no pointwise operation follows"),
    "pooling": (Net(lambda m, x: F.max_pool2d(m.c(x), 2), c=conv()), "c", "no pointwise operation follows"),
    "padding_mode": (Net(lambda m, x: m.c(x).relu(), c=conv(padding_mode="reflect", padding=1)), "c", "reflect"),
    "activation @ activation": (Net2(lambda m, x, y: (x @ y).relu()), "matmul", "not a parameter"),
    "3-D weight": (Net(lambda m, x: (x @ m.w).relu(), w=ones(2, 8, 8)), "matmul", "3 dimensions"),
    "comparison": (Net(lambda m, x: m.fc(x) > 0, fc=linear()), "fc", "comparison"),
    "runtime stride": (
        Net(lambda m, x: F.conv2d(x, m.w, stride=x.size(0)).relu(), w=ones(8, 4, 3, 3)), "conv2d", "not known before",
    ),
    "another flattening": (
        Net(
            lambda m, x: torch.mm(x.view(-1, x.size(0)), m.w).view(operator.add(x.shape[:-1], (5,))).relu(),
            w=ones(8, 5),
        ),
        "mm", "no pointwise operation follows",
    ),
    "enlarging operand": (Net(lambda m, x: m.fc(x) + m.v, fc=linear(1), v=ones(5)), "fc", "would enlarge the result"),
    "enlarging rank": (Net(lambda m, x: m.c(x) * m.v, c=conv(), v=ones(2, 1, 1, 1, 1)), "c", "would enlarge"),
    "size operand": (Net(lambda m, x: m.fc(x) * x.size(0), fc=linear()), "fc", "may not be a tensor"),
    "rounding division": (
        Net(lambda m, x: torch.div(m.fc(x), 2, rounding_mode="floor"), fc=linear()), "fc", "rounding_mode='floor'",
    ),
    "cast to int": (Net(lambda m, x: m.fc(x).to(torch.int32), fc=linear()), "fc", "cast to torch.int32"),
    "into an input": (
        Net(lambda m, x: x.add_(m.fc(x)), fc=linear()), "fc", "overwrites a tensor from outside",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_is_left_alone_with_a_reason(name):
    model, node, reason = LEFT_ALONE[name]
    found = report(model)
    assert found.regions == ()
    if name == "runtime stride" and not fx_traces(lambda x: F.conv2d(x, x, stride=x.size(0))):
        node, reason = "the model", "runs as Python"
    assert {item.node: item.reason for item in found.skipped}.get(node, "").find(reason) >= 0, found.skipped


def hooked():
    layer = linear()
    layer.register_forward_hook(lambda module, args, output: output + 1)
    return layer


def test_modules_with_hooks_are_left_alone():
    found = report(Net(lambda m, x: m.fc(x).relu(), fc=hooked()))
    assert found.regions == () and "hooks" in found.skipped[0].reason


def test_subclasses_are_not_taken_for_their_base():
    class Doubling(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    class Odd(nn.ReLU):
        def forward(self, x):
            return -x

    class Leaf(fx.Tracer):
        def is_leaf_module(self, m, name):
            return True

    for members in ({"fc": Doubling(8, 8), "r": nn.ReLU()}, {"fc": linear(), "r": Odd()}):
        model = Net(lambda m, x: m.r(m.fc(x)), **members)
        graph = fx.GraphModule(model, Leaf().trace(model))
        assert fxfuse.explain(fxfuse.optimize(graph)).regions == ()


def epilogues(model):
    return [region.epilogue for region in report(model).regions]


def test_an_escaping_value_ends_its_region():
    def forward(m, x):
        y = m.fc(x).relu()
        return y.tanh(), y

    assert epilogues(Net(forward, fc=linear())) == ["relu(acc)"]


def test_an_escaping_accumulator_leaves_nothing():
    def forward(m, x):
        y = m.fc(x)
        return y.tanh(), y

    found = report(Net(forward, fc=linear()))
    assert found.regions == () and "also used by" in found.skipped[0].reason


def test_a_diamond_is_one_region():
    def forward(m, x):
        y = m.fc(x).relu()
        return y.tanh() + y.sigmoid()

    assert epilogues(Net(forward, fc=linear())) == ["t0 = relu(acc); tanh(t0) + sigmoid(t0)"]


def test_the_later_anchor_takes_a_shared_addition():
    def forward(m, x):
        return (m.f(x).relu() + m.g(x)).tanh()

    assert epilogues(Net(forward, f=linear(), g=linear())) == ["relu(acc)", "tanh(o0 + acc)"]


def test_gated_units_multiply_in_the_second_region():
    def forward(m, x):
        return F.silu(m.f(x)) * m.g(x)

    assert epilogues(Net(forward, f=linear(), g=linear())) == ["silu(acc)", "o0 * acc"]


def test_a_rejected_operation_ends_the_region_before_it():
    found = report(Net(lambda m, x: torch.div(m.fc(x).relu(), 2, rounding_mode="trunc").tanh(), fc=linear()))
    assert [region.epilogue for region in found.regions] == ["relu(acc)"]
    assert [item.node for item in found.skipped] == ["div"]


def test_train_mode_dropout_and_batch_norm_end_a_region():
    model = Net(lambda m, x: m.d(m.c(x).relu()).tanh(), c=conv(), d=nn.Dropout(0.5))
    assert [r.epilogue for r in fxfuse.explain(fxfuse.optimize(model.train())).regions] == ["relu(acc)"]
    model = Net(lambda m, x: m.bn(m.c(x)).relu(), c=conv(), bn=nn.BatchNorm2d(8))
    found = fxfuse.explain(fxfuse.optimize(model.train()))
    assert found.regions == () and "batch's own statistics" in found.skipped[0].reason


# ------------------------------------------------------------------------------------------ overwriting


def test_an_overwritten_value_that_is_read_later_stays():
    def forward(m, x):
        y = m.fc(x)
        z = y.relu_()
        return z.tanh() + y  # y now is relu(y)

    model = Net(forward, fc=linear())
    x = torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(fxfuse.optimize(model)(x), model(x))
    assert not any("relu" in region.epilogue for region in report(model).regions)


def test_an_overwritten_value_that_only_its_old_name_sees_stays():
    def forward(m, x):
        y = m.fc(x).relu()
        y.tanh_()
        return y

    model = Net(forward, fc=linear())
    x = torch.randn(3, 8)
    assert epilogues(model) == ["relu(acc)"]
    with torch.no_grad():
        torch.testing.assert_close(fxfuse.optimize(model)(x), model(x))


def test_an_input_overwritten_on_the_way_is_read_in_time():
    def forward(m, x, y):
        z = m.fc(x)
        x.add_(1)  # between the anchor and the end of what could be the region
        return z.relu() + y

    model = Net2(forward, fc=linear())
    assert "overwritten" in report(model).skipped[0].reason
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(fxfuse.optimize(model)(x.clone(), y), model(x.clone(), y))


def test_an_overwritten_view_of_an_input_counts_too():
    def forward(m, x, y):
        z = m.fc(x)
        x[:, :2].zero_()
        return z.relu() + y

    assert [region.anchor for region in report(Net2(forward, fc=linear())).regions] == ["pointwise chain"]


def test_an_operand_overwritten_before_its_use_is_fine():
    def forward(m, x, y):
        z = m.fc(x)
        y.add_(1)
        return z.relu() + y

    model = Net2(forward, fc=linear())
    assert epilogues(model) == ["relu(acc) + o0"]


def test_overwriting_something_else_is_fine():
    def forward(m, x, y):
        z = m.fc(x)
        w = y * 2
        w.add_(1)
        return z.relu() + w

    assert epilogues(Net2(forward, fc=linear())) == ["relu(acc) + o0"]


# ------------------------------------------------------------------------------------ every spelling


def spelled_nodes():
    """One graph node for every spelling in the op table that takes one tensor and numbers."""
    module_arguments = {nn.Threshold: (0.1, 20.0), nn.Softshrink: (0.4,)}
    for target, found in ops._by_spelling.items():
        required = [v for v in found.row.params.values() if v is ops.REQUIRED]
        numbers = (0.5,) * (len(required) - 1)
        if found.row.name in (
            "type_as",
            "where",
            "masked_fill",
            "addcmul",
            "lerp",
            "prelu",
            "logical_and",
            "logical_or",
            "to",
            "assign",
            "batch_norm",
        ):
            continue  # tensors only; tested one by one above and in test_kernels.py
        if found.row.name in ("maximum", "minimum"):
            continue
        if isinstance(target, tuple):
            yield f"x.{target[1]}", "call_method", target[1], numbers
        elif isinstance(target, type):
            yield target.__name__, "call_module", target(*module_arguments.get(target, ())), ()
        else:
            module = getattr(target, "__module__", None) or "torch"
            yield f"{module}.{target.__name__}", "call_function", target, numbers


SPELLED = {name: rest for name, *rest in spelled_nodes()}


def test_there_are_enough_spellings():
    assert len(SPELLED) > 180


@pytest.mark.parametrize("name", SPELLED)
def test_every_spelling_means_what_torch_computes(name):
    """fc → tanh → the spelling → * 1.5: matched as one region, whose reference equals the traced model."""
    op, target, numbers = SPELLED[name]
    model = Net(None, fc=linear())
    graph = fx.Graph()
    value = graph.call_function(torch.tanh, (graph.call_module("fc", (graph.placeholder("x"),)),))
    if op == "call_module":
        model.act = target
        target = "act"
    value = graph.create_node(op, target, (value, *numbers))
    graph.output(graph.call_function(operator.mul, (value, 1.5)))
    traced = fx.GraphModule(model, graph).eval()
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    try:
        expected = traced(x)
    except (RuntimeError, TypeError) as error:
        pytest.skip(f"torch itself refuses: {error}")
    fast = fxfuse.optimize(traced)
    if name.rstrip("_").endswith(
        ("lt", "le", "gt", "ge", "eq", "ne", "less", "greater", "equal", "not")
    ) and name.endswith("_"):
        assert "truth value" in str(fxfuse.explain(fast, verbose=True))
        return
    assert len(fxfuse.explain(fast).regions) == 1, fxfuse.explain(fast)
    actual = fast(x.requires_grad_())  # a gradient is needed: the region's torch reference runs
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, equal_nan=True, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------------ anchors that nothing follows


def test_an_anchor_alone_is_a_region_where_kernels_are_faster(monkeypatch):
    """In float32 on a GPU; here as if this were one."""
    for module in ("fxfuse.patterns.region", "fxfuse.module"):
        monkeypatch.setattr(
            sys.modules[module], "is_region_alone", lambda kind, weight, _: weight.dtype == torch.float32
        )

    def forward(m, x):
        y = m.fc(x)
        return y if y.shape[0] > 0 else m.c(y)  # a question that no graph answers

    for model in (Net(lambda m, x: m.fc(x).sum(0), fc=linear()), Net(forward, fc=linear(), c=linear())):
        fast = fxfuse.optimize(model.eval())
        assert "acc" in [region.epilogue for region in fxfuse.explain(fast).regions]
        assert list(fast.state_dict()) == list(model.state_dict())
        assert_as_eager(model, fast, torch.randn(3, 8))
    half = fxfuse.optimize(Net(lambda m, x: m.fc(x).sum(0), fc=linear()).to(torch.bfloat16))
    assert not fxfuse.explain(half).regions


PARTS = {
    "rows": lambda w: w[4:],
    "every other row": lambda w: w[::2],
    "rows of rows": lambda w: w[2:][:4],
    "a row in several dimensions": lambda w: w.unflatten(0, (2, 4))[1:][0],
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_parameter_is_known(monkeypatch, name):
    """Its rows, as nn.MultiheadAttention's projections of other tensors have them."""
    seen = []

    def is_region_alone(kind, weight, has_bias):
        seen.append(weight)
        return weight is not None

    monkeypatch.setattr(sys.modules["fxfuse.patterns.region"], "is_region_alone", is_region_alone)
    weight = torch.randn(8, 8)
    model = Net(lambda m, x: F.linear(x, PARTS[name](m.w)).sum(0), w=weight)
    fast = fxfuse.optimize(model)
    if name == "a row in several dimensions":
        assert seen == [None]
    else:
        assert torch.equal(seen[0], PARTS[name](weight)) and not seen[0].requires_grad
        assert [region.epilogue for region in fxfuse.explain(fast).regions] == ["acc"]
    assert_as_eager(model, fast, torch.randn(3, 8))
    with torch.no_grad():
        model.w.mul_(2)
    assert_as_eager(model, fast, torch.randn(3, 8))


def test_a_part_that_torch_refuses_is_refused_at_the_call():
    model = Net(lambda m, x: F.linear(x, m.w[::-1]).relu(), w=torch.randn(8, 8))
    assert_as_eager(model, fxfuse.optimize(model), torch.randn(3, 8), raises=ValueError)


def test_an_operand_that_is_known_to_be_too_wide_ends_the_region():
    """It is a part of a buffer, whose size the model knows."""
    model = Net(lambda m, x: (m.fc(x).relu() * m.b[2:]).tanh(), fc=linear(1))
    model.register_buffer("b", torch.randn(10))
    fast = fxfuse.optimize(model)
    assert "relu(acc)" in [region.epilogue for region in fxfuse.explain(fast).regions]
    assert_as_eager(model, fast, torch.randn(3, 8))


# ----------------------------------------------------------------------------------------- more than a kernel takes


def chained(m, x):
    for _ in range(1000):
        x = torch.tanh(x * 1.5)
    return x


def gathered(m, x):
    y = m.fc(x)
    return sum((torch.tanh(y * i) for i in range(700)), x)


LONG = {
    "an anchor": Net(lambda m, x: chained(m, m.fc(x)), fc=linear()),
    "a chain": Net(chained),
    "one value used often": Net(gathered, fc=linear()),
}


@pytest.mark.parametrize("name", LONG)
def test_thousands_of_operations_are_fused_in_pieces(name):
    model, x = LONG[name], torch.randn(2, 8)
    fast = fxfuse.optimize(model)
    regions = fxfuse.explain(fast).regions
    assert 8 <= len(regions) <= 20 and sum(len(region.nodes) for region in regions) >= 2000
    assert_as_eager(model, fast, x.requires_grad_())  # the regions' torch reference runs


def test_many_operands_are_read_by_several_regions():
    members = {f"p{index}": torch.randn(8) for index in range(130)}

    def forward(m, x):
        x = m.fc(x)
        for name in members:
            x = x + getattr(m, name)
        return x

    model = Net(forward, fc=linear(), **members)
    fast = fxfuse.optimize(model)
    report = fxfuse.explain(fast)
    assert len(report.regions) == 3 and sum(len(region.nodes) for region in report.regions) == 131
    assert_as_eager(model, fast, torch.randn(2, 8).requires_grad_())


@pytest.mark.parametrize(
    "number", [2**63, 2**64, -(2**63) - 1, 10**400], ids=["64 bits", "65 bits", "negative", "huge"]
)
def test_integers_are_numbers_as_far_as_torch_takes_them(number):
    model = Net(lambda m, x: (m.fc(x) * number).relu() if number == 2**63 else m.fc(x) * number, fc=linear())
    fast = fxfuse.optimize(model)
    assert len(fxfuse.explain(fast).regions) == (number == 2**63)
    assert_as_eager(model, fast, torch.randn(2, 8).requires_grad_(), raises=None if number == 2**63 else OverflowError)
