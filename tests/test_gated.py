"""Gated units: where two linears of one x become one call, what that computes, and how it is decided what runs it."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers import CAPABILITY, COPIES, Net, Net2, assert_as_eager, assert_same_kind, linear, randn, regions
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxfuse
from fxfuse import functional, gated, plans
from fxfuse.cuda import plan, tune
from fxfuse.errors import BuildError
from fxfuse.patterns import gated as matching
from fxfuse.problem import Draft, Plan, Problem, TensorMeta, anchor_meta

CUDA = torch.device("cuda:0")
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture
def anywhere(monkeypatch):
    """Gated units are joined on a CPU, too."""
    monkeypatch.setattr(matching, "_on_gpu", lambda tensor: True)


def found(model, dtype=torch.bfloat16):
    """Anchors and epilogues of the model's regions."""
    return [(region.anchor, region.epilogue) for region in regions(fxfuse.optimize(model.to(dtype).eval()))]


# -------------------------------------------------------------------------------------------------- what is matched


def shifted(m, x):
    return (F.gelu(m.f(x) + m.v) + m.u) * (m.g(x) - m.v)


def by_functions(m, x):
    return F.silu(F.linear(x, m.w)) * F.linear(x, m.u, m.v)


PAIR = {"f": linear(), "g": linear()}
GATED = {
    "gate first": (Net(lambda m, x: F.silu(m.f(x)) * m.g(x), **PAIR), "silu(o0) * acc"),
    "gate last": (Net(lambda m, x: m.f(x) * F.silu(m.g(x)), **PAIR), "o0 * silu(acc)"),
    "products alone": (Net(lambda m, x: m.f(x) * m.g(x), **PAIR), "o0 * acc"),
    "more follows": (Net(lambda m, x: x + torch.tanh(F.gelu(m.f(x)) * m.g(x)), **PAIR), "o1 + tanh(gelu(o0) * acc)"),
    "one vector for both": (
        Net(shifted, **PAIR, v=torch.ones(8), u=torch.ones(8)), "(gelu(o0 + o1) + o2) * (acc - o1)"
    ),
    "one bias": (Net(lambda m, x: m.f(x).relu() * m.g(x), f=linear(), g=linear(bias=False)), "relu(o0) * acc"),
    "functions": (Net(by_functions, w=randn(8, 8), u=randn(8, 8), v=randn(8)), "silu(o0) * acc"),
    "in place": (Net(lambda m, x: F.silu(m.f(x)).mul_(m.g(x)), **PAIR), "t0 = silu(acc); assign(t0 * o0, t0)"),
}  # fmt: skip


@pytest.mark.parametrize("name", GATED)
def test_two_linears_of_one_x_are_one_region(name, anywhere):
    model, epilogue = GATED[name]
    assert found(model) == [("gated_linear", epilogue)]


@pytest.mark.parametrize("name", GATED)
def test_elsewhere_they_are_not_joined(name):
    assert all(anchor == "linear" for anchor, _ in found(GATED[name][0]))


def read_twice(m, x):
    gate = F.silu(m.f(x))
    return gate * m.g(x), gate


def overwritten(m, x):
    gate = F.silu(m.f(x))
    x.add_(1)
    return gate * m.g(x)


def with_hook():
    model = Net(lambda m, x: m.f(x) * m.g(x), f=linear(), g=linear())
    model.f.register_forward_hook(lambda module, inputs, result: None)
    return model


APART = {
    "another x": Net2(lambda m, x, y: F.silu(m.f(x)) * m.g(y), **PAIR),
    "read by others": Net(read_twice, **PAIR),
    "x overwritten in between": Net(overwritten, **PAIR),
    "another number of features": Net(lambda m, x: F.silu(m.f(x)) * m.g(x), f=linear(1), g=linear()),
    "rows that are not aligned": Net(lambda m, x: F.silu(m.f(x)) * m.g(x), f=nn.Linear(6, 8), g=nn.Linear(6, 8)),
    "a linear with a hook": with_hook(),
}


@pytest.mark.parametrize("name", APART)
def test_what_is_not_joined(name, anywhere):
    assert all(anchor == "linear" for anchor, _ in found(APART[name]))


def test_float32_is_not_joined(anywhere):
    assert [anchor for anchor, _ in found(GATED["gate first"][0], torch.float32)] == ["linear", "linear"]


def test_of_three_linears_two_are_joined(anywhere):
    model = Net(lambda m, x: F.silu(m.f(x)) * m.g(x) * m.h(x), f=linear(), g=linear(), h=linear())
    assert [anchor for anchor, _ in found(model)] == ["gated_linear", "linear"]


def test_of_two_modes_nothing_is_joined(anywhere):
    graph = torch.fx.symbolic_trace(GATED["gate first"][0].bfloat16()).graph
    last = next(node for node in graph.nodes if node.target == "g")
    with graph.inserting_before(last):
        graph.call_function(torch._C._set_grad_enabled, (False,))
    model = torch.fx.GraphModule(GATED["gate first"][0], graph)
    with torch.no_grad():
        assert [anchor for anchor, _ in found(model)] == ["linear", "linear"]


# ------------------------------------------------------------------------------------------------ what it computes


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", GATED)
@torch.no_grad()
def test_it_computes_what_eager_does(name, dtype, anywhere):
    model = copy.deepcopy(GATED[name][0]).to(dtype).eval()
    fast = fxfuse.optimize(model)
    for x in (
        randn(5, 8, dtype=dtype), randn(8, dtype=dtype), randn(3, 5, 8, dtype=dtype),
        randn(3, 8, 5, dtype=dtype).transpose(1, 2), randn(5, 16, dtype=dtype)[:, ::2], randn(0, 8, dtype=dtype),
    ):  # fmt: skip
        for _ in range(3):
            assert_as_eager(model, fast, x)


@torch.no_grad()
def test_an_operand_may_enlarge_the_result(anywhere):
    model = Net2(lambda m, x, y: (F.silu(m.f(x)) * y) * m.g(x), **PAIR).bfloat16().eval()
    fast = fxfuse.optimize(model)
    for y in (randn(2, 5, 8), randn(2, 8, 5).transpose(1, 2), randn(5, 1), randn(3, 1, 1, 1)):
        assert_as_eager(model, fast, randn(5, 8).bfloat16(), y.bfloat16())


@torch.no_grad()
def test_errors_are_torchs(anywhere):
    model = Net(lambda m, x: F.silu(m.f(x)) * m.g(x), **copy.deepcopy(PAIR)).bfloat16().eval()
    fast = fxfuse.optimize(model)
    for x in (randn(3, 7).bfloat16(), randn(3, 8)):
        assert_as_eager(model, fast, x, raises=RuntimeError)
    model.f.float()
    assert_as_eager(model, fast, randn(3, 8).bfloat16(), raises=RuntimeError)


def test_gradients(anywhere):
    model = Net(shifted, f=linear(), g=linear(), v=randn(8), u=randn(8)).bfloat16()
    fast, x = fxfuse.optimize(model), randn(2, 5, 8).bfloat16()
    results = []
    for call in (model, fast):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        call(leaf).square().sum().backward()
        results.append([leaf.grad, *(parameter.grad.clone() for parameter in model.parameters())])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@torch.no_grad()
def test_autocast(dtype, anywhere):
    """Of all four weights, and of no other operand."""
    model = Net(shifted, f=linear(), g=linear(), v=randn(8), u=randn(8)).half()
    fast, x = fxfuse.optimize(model), randn(3, 8, dtype=dtype)
    assert regions(fast)[0].anchor == "gated_linear"
    with torch.autocast("cpu", torch.bfloat16):
        want, have = model(x), fast(x)
    assert_same_kind(have, want)
    torch.testing.assert_close(have, want, atol=0.02, rtol=0.02)


@torch.no_grad()
def test_torch_compile_and_export(anywhere):
    model, x = copy.deepcopy(GATED["one bias"][0]).bfloat16().eval(), randn(2, 5, 8).bfloat16()
    fast = fxfuse.optimize(model)
    torch.testing.assert_close(torch.compile(fast, backend="aot_eager", fullgraph=True)(x), model(x))
    exported = torch.export.export(fast, (x,))
    assert "fxfuse.gated_linear" in str(exported.graph)
    torch.testing.assert_close(exported.module()(x), model(x))
    decomposed = fxfuse.optimize(torch.export.export(model, (x,)).run_decompositions())
    assert [(region.anchor, region.epilogue) for region in regions(decomposed)] == [("gated_linear", "relu(o0) * acc")]
    torch.testing.assert_close(decomposed(x), model(x))
    torch.testing.assert_close(torch.compile(model, backend="fxfuse")(x), model(x))
    torch.compiler.reset()


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = linear(16), linear(16)

    def forward(self, x):
        return F.silu(self.gate(x)) * self.up(x)


@pytest.mark.parametrize("name", COPIES)
@torch.no_grad()
def test_copies(name, anywhere):
    model, x = Unit().bfloat16().eval(), randn(5, 8).bfloat16()
    fast = fxfuse.optimize(model)
    twin = COPIES[name](fast)
    assert regions(twin)[0].anchor == "gated_linear" and twin.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(twin(x), model(x))
    model.gate.weight.data = randn(16, 8).bfloat16()
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("gate_bias", [None, randn(5, seed=1)], ids=["", "gate bias"])
@pytest.mark.parametrize("bias", [None, randn(5)], ids=["", "bias"])
@torch.no_grad()
def test_the_operator(bias, gate_bias):
    x, weight, gate, operand = randn(3, 8), randn(5, 8), randn(5, 8, seed=1), randn(3, 1)
    want = F.silu(F.linear(x, gate, gate_bias)) * operand * F.linear(x, weight, bias)
    operands = [gate, operand, *([] if gate_bias is None else [gate_bias])]
    for call in (functional.gated_linear, torch.ops.fxfuse.gated_linear):
        torch.testing.assert_close(call(x, weight, bias, operands, "silu(o0) * o1 * acc"), want)
        pooled = call(x[None, None], weight, bias, operands, "silu(o0) * o1 * acc", pool=(2, 2, 1, 1, 0, 0, 0))
        torch.testing.assert_close(pooled, F.max_pool2d(want[None, None], 2, 1))
    on_meta = [tensor.to("meta") for tensor in operands]
    meta_bias = None if bias is None else bias.to("meta")
    arguments = (x.to("meta"), weight.to("meta"), meta_bias, on_meta, "silu(o0) * o1 * acc")
    assert torch.ops.fxfuse.gated_linear(*arguments).shape == want.shape


# ------------------------------------------------------------------------------------------------------- its parts


def problem(epilogue, *others, device=CUDA, gate_bias=False, dtype=torch.bfloat16, features=1024, rows=2048):
    def meta(*shape):
        return TensorMeta.of(torch.empty(shape, dtype=dtype, device="meta"), device)

    weight, bias = dataclasses.replace(meta(features, 768), is_parameter=True), meta(features)
    operands = (weight, *(meta(*shape) for shape in others), *([bias] if gate_bias else []))
    return Problem("gated_linear", (), epilogue, meta(rows, 768), weight, bias, operands)


SPLITS = {
    "silu(o0) * acc": ("silu(acc)", "o0 * acc", (), (-1,)),
    "o0 * silu(acc)": ("acc", "o0 * silu(acc)", (), (-1,)),
    "gelu(o0 + o2) * (acc - o2) + o1": ("gelu(acc + o0)", "o0 * (acc - o1) + o2", (2,), (-1, 2, 1)),
    "acc - o0 * 2": ("acc * 2", "acc - o0", (), (-1,)),
    # more than one number would go from the first to the second
    "t0 = silu(o0); t0 * acc + tanh(t0)": ("acc", "t0 = silu(o0); t0 * acc + tanh(t0)", (), (-1,)),
    "silu(o0) * acc + o0": ("acc", "silu(o0) * acc + o0", (), (-1,)),
    "where(o0 > 0, acc, 0.0)": ("acc", "where(o0 > 0, acc, 0.0)", (), (-1,)),
}


@pytest.mark.parametrize("epilogue", SPLITS)
@pytest.mark.parametrize("gate_bias", [False, True])
def test_the_two_linears_of_one(epilogue, gate_bias):
    whole = problem(epilogue, *((1024,),) * (epilogue.count("o1") + ("o2" in epilogue)), gate_bias=gate_bias)
    parts = gated.split(whole)
    first, second, first_operands, second_operands = SPLITS[epilogue]
    assert (parts.first.epilogue, parts.second.epilogue) == (first, second)
    assert (parts.first_operands, parts.second_operands) == (first_operands, second_operands)
    assert (parts.first.bias is not None) == gate_bias and parts.second.bias == whole.bias


def test_a_first_part_of_other_strides_than_expected():
    """What meta tensors predict is not relied on."""
    x, weight, gate = randn(3, 8), randn(5, 8), randn(5, 8, seed=1)
    metas = [TensorMeta.of(tensor, tensor.device) for tensor in (x, weight, gate)]
    whole = Problem("gated_linear", (), "silu(o0) * acc", *metas[:2], None, (metas[2],))

    def transposed(*tensors):
        return parts.first.reference(*tensors).T.contiguous().T

    def part(run) -> Draft:
        return lambda: Plan(run, "a kernel")

    parts = gated.split(whole)
    made = gated.draft(whole, parts, part(transposed), part(None))()
    assert made.kernel == "a kernel + a kernel"
    torch.testing.assert_close(made.run(x, weight, None, [gate]), F.silu(x @ gate.T) * (x @ weight.T))


# ---------------------------------------------------------------------------------------- which kernels a GPU would run


@pytest.fixture
def gpu(ranked):
    """A function from a problem to the kernels for both weights, or "apart" if there are none."""

    def kernels(problem, capability=(9, 0), draft=lambda problem, candidates, apart: candidates):
        with pytest.MonkeyPatch.context() as patch:
            ranked(dataclasses.replace(problem, kind="linear", epilogue="acc", operands=()), capability)  # sets the GPU
            patch.setattr(tune, "draft", draft)
            return plan.draft_gated(problem, anchor_meta(problem), lambda: "apart")

    return kernels


def test_a_kernel_for_both_on_hopper(gpu):
    names = [candidate.name for candidate in gpu(problem("silu(o0) * acc"))]
    assert names and all(name.startswith("gated gemm wgmma bf16") for name in names)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize(("rows", "kernel"), [(1, "gated gemv bfloat16, 1 row"), (8, "gated gemv mma bf16, 8 rows")])
def test_a_kernel_for_both_and_few_rows_on_any_gpu(rows, kernel, capability, gpu):
    (candidate,) = gpu(problem("silu(o0) * acc", rows=rows), capability)
    assert candidate.name.startswith(kernel)


@pytest.mark.parametrize(
    ("case", "capability"),
    [
        (problem("silu(o0) * acc"), (8, 0)),
        (problem("silu(o0) * acc", dtype=torch.float32), (9, 0)),
        (problem("silu(o0) * acc", rows=8, dtype=torch.float32), (9, 0)),
        (problem("silu(o0) * acc + o1", (3, 2048, 1024)), (9, 0)),
    ],
    ids=["an A100", "float32", "few rows in float32", "enlarged"],
)
def test_elsewhere_the_linears_run_one_by_one(case, capability, gpu):
    assert gpu(case, capability) == "apart"


def test_weights_that_lie_in_other_ways_run_one_by_one(gpu):
    case = problem("silu(o0) * acc")
    other = dataclasses.replace(case.operands[0], strides=(1, 1024))
    assert gpu(dataclasses.replace(case, operands=(other,))) == "apart"
    spread = dataclasses.replace(case.operands[0], strides=(1536, 2))
    assert gpu(dataclasses.replace(case, weight=spread, operands=(spread,))) == "apart"


def test_if_no_kernel_compiles_the_linears_run_one_by_one(gpu):
    def broken(problem, candidates, apart):
        raise BuildError("broken")

    assert gpu(problem("silu(o0) * acc"), draft=broken) == "apart"


def test_a_fake_tensor_may_be_on_a_gpu_that_is_not_there():
    try:
        with FakeTensorMode():
            weight = torch.empty(8, 8, device="cuda:0")
    except RuntimeError as error:  # torch 2.3 built with CUDA wants a driver
        pytest.skip(str(error))
    assert weight.is_cuda and matching._on_gpu(weight) == (CAPABILITY >= (8, 0))


def test_on_a_cpu_the_linears_run_one_by_one(forget):
    x, weights = randn(5, 8).bfloat16(), [randn(8, 8, seed=seed).bfloat16() for seed in (1, 2)]
    functional.gated_linear(x, weights[0], None, [weights[1]], "silu(o0) * acc", region=7)
    (made,) = plans.of_region(7)
    assert made.kernel == "linear by torch + one pass + linear by torch + one pass"


@torch.no_grad()
def test_a_gate_whose_bias_has_been_removed(anywhere):
    model = Net(lambda m, x: F.silu(m.f(x)) * m.g(x), f=linear(), g=linear()).half()
    fast = fxfuse.optimize(model)
    assert [region.anchor for region in regions(fast)] == ["gated_linear"]
    x = randn(5, 8).half()
    for bias in ("f", "g"):
        for _ in range(3):
            assert_as_eager(model, fast, x, exact=False)
        getattr(model, bias).bias = None
        assert_as_eager(model, fast, x, exact=False)
