"""LayerNorm as an anchor: where it is one, what the fused operator computes, and which kernels a GPU would run."""

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import Net, Net2, assert_as_eager, assert_same_kind, epilogues, linear, randn, regions
from torch import nn

import fxfuse
from fxfuse import functional
from fxfuse.cuda import layer_norm, plan
from fxfuse.cuda.precision import tf32_allowed
from fxfuse.patterns import anchors
from fxfuse.problem import Problem, TensorMeta, in_order

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
CUDA = torch.device("cuda:0")


@pytest.fixture
def anywhere(monkeypatch):
    """Normalisations are anchors on a CPU, too."""
    monkeypatch.setattr(anchors, "_on_gpu", lambda tensor: True)


def found(model):
    """Anchors and epilogues of the model's regions."""
    return [(region.anchor, region.epilogue) for region in regions(fxfuse.optimize(model))]


# -------------------------------------------------------------------------------------------------- what is matched

ANCHORS = {
    "module": (Net(lambda m, x: m.l(x), l=nn.LayerNorm(8)), "acc"),
    "module of two dimensions": (Net(lambda m, x: m.l(x), l=nn.LayerNorm((5, 8))), "acc"),
    "module without bias": (Net(lambda m, x: m.l(x).tanh(), l=nn.LayerNorm(8, bias=False)), "tanh(acc)"),
    "module without parameters": (
        Net(lambda m, x: m.l(x) + m.v, l=nn.LayerNorm(8, elementwise_affine=False), v=torch.ones(8)), "acc + o0"
    ),
    "function": (
        Net(lambda m, x: F.layer_norm(x, (8,), m.w, m.v, 1e-6).relu(), w=torch.ones(8), v=torch.ones(8)),
        "relu(acc)",
    ),
    "bias alone": (Net(lambda m, x: F.layer_norm(x, (8,), bias=m.v), v=torch.ones(8)), "acc"),
    "torch's function": (Net(lambda m, x: torch.layer_norm(x, [8], m.w), w=torch.ones(8)), "acc"),
    "operator": (Net(lambda m, x: torch.ops.aten.layer_norm(x, [8], m.w), w=torch.ones(8)), "acc"),
    "cast parameters": (
        Net(lambda m, x: F.layer_norm(x.float(), (8,), m.w.float()).type_as(x), w=torch.ones(8)),
        "type_as(acc, o0)",
    ),
    "residual": (Net(lambda m, x: x + m.l(x), l=nn.LayerNorm(8)), "o0 + acc"),
    "16 bits": (Net(lambda m, x: m.l(x), l=nn.LayerNorm(8)).bfloat16(), "acc"),
}  # fmt: skip


@pytest.mark.parametrize("name", ANCHORS)
def test_on_a_gpu_it_is_an_anchor(name, anywhere):
    model, epilogue = ANCHORS[name]
    assert found(model) == [("layer_norm", epilogue)]


@pytest.mark.parametrize("name", ANCHORS)
def test_on_a_cpu_it_is_torchs(name):
    assert all(region.chain for region in regions(fxfuse.optimize(ANCHORS[name][0])))


def computed_shape(m, x):
    return F.layer_norm(x, x.shape[-1:], m.w)


def with_hook():
    model = Net(lambda m, x: m.l(x), l=nn.LayerNorm(8))
    model.l.register_forward_hook(lambda module, inputs, result: None)
    return model


TORCHS = {
    "float64": Net(lambda m, x: m.l(x), l=nn.LayerNorm(8)).double(),
    "a shape that is computed": Net(computed_shape, w=torch.ones(8)),
    "an eps that is computed": Net(lambda m, x: F.layer_norm(x, (8,), m.w, eps=x.shape[0]), w=torch.ones(8)),
    "no parameters anywhere": Net(lambda m, x: F.layer_norm(x, (8,))),
    "hooks": with_hook(),
}


@pytest.mark.parametrize("name", TORCHS)
def test_what_is_left_to_torch(name, anywhere):
    assert found(TORCHS[name]) == []


def test_other_anchors_keep_their_epilogues(anywhere):
    """A block of a transformer: the residual is the linear's, the normalisations stand alone."""

    def forward(m, x):
        y = m.a(m.n(x)).relu()
        return m.o(x + m.b(y))

    model = Net(forward, n=nn.LayerNorm(8), a=linear(), b=linear(), o=nn.LayerNorm(8))
    norm = ("layer_norm", "acc")
    assert found(model) == [norm, ("linear", "relu(acc)"), ("linear", "o0 + acc"), norm]


def test_an_operand_that_is_known_to_enlarge_the_result_ends_the_region(anywhere):
    model = Net(lambda m, x: m.l(x).tanh() * m.v, l=nn.LayerNorm(1), v=torch.ones(8))
    assert found(model)[0] == ("layer_norm", "tanh(acc)")


def test_between_modules_that_run_as_python_it_stays_a_module(anywhere):
    def forward(m, x):
        y = m.l(x)
        return y if y.sum() > 0 else m.l(-x)  # a question that no graph answers

    model = Net(forward, l=nn.LayerNorm(8)).eval()
    fast = fxfuse.optimize(model)
    assert type(fast.l) is nn.LayerNorm and not regions(fast)
    assert_as_eager(model, fast, randn(3, 8))


# ------------------------------------------------------------------------------------------------ what it computes


class Block(nn.Module):
    """Normalisations of all kinds, and what may follow them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LayerNorm(8), nn.LayerNorm((5, 8), elementwise_affine=False)
        self.c, self.d = nn.LayerNorm(8, bias=False), nn.LayerNorm(8)
        self.fc = nn.Linear(8, 8)
        for norm in (self.a, self.c, self.d):
            for parameter in norm.parameters():
                nn.init.normal_(parameter)

    def forward(self, x):
        y = F.gelu(self.a(x)) * 0.5 + x
        z = self.fc(self.b(y) * 2 + y)
        return self.d(torch.tanh(self.c(z) + x))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@torch.no_grad()
def test_it_computes_what_eager_does(dtype, anywhere):
    model = Block().to(dtype).eval()
    fast = fxfuse.optimize(model)
    assert [region.anchor for region in regions(fast)].count("layer_norm") == 4
    layouts = (
        randn(3, 5, 8, dtype=dtype), randn(5, 3, 8, dtype=dtype).transpose(0, 1),
        randn(3, 8, 5, dtype=dtype).transpose(1, 2), randn(3, 9, 16, dtype=dtype)[:, 2:7, ::2],
        randn(0, 5, 8, dtype=dtype), randn(5, 8, dtype=dtype),
    )  # fmt: skip
    for x in layouts:
        for _ in range(3):
            assert_as_eager(model, fast, x)


@torch.no_grad()
def test_errors_are_torchs(anywhere):
    model = Net(lambda m, x: m.l(x).tanh() * 2, l=nn.LayerNorm(8)).eval()
    fast = fxfuse.optimize(model)
    assert_as_eager(model, fast, randn(3, 8).bfloat16(), exact=False)
    for x, error in (
        (randn(3, 7), RuntimeError),
        (torch.ones(3, 8, dtype=torch.int64), RuntimeError),
        (randn(3, 8, dtype=torch.float64), RuntimeError),
    ):
        assert_as_eager(model, fast, x, raises=error)


def test_parameters_are_read_at_every_call(anywhere):
    model = Net(lambda m, x: m.l(x), l=nn.LayerNorm(8)).eval()
    fast, x = fxfuse.optimize(model), randn(3, 8)
    with torch.no_grad():
        fast(x)
        model.l.weight.data = randn(8)
        torch.testing.assert_close(fast(x), model(x))


def test_gradients(anywhere):
    model = Block()
    fast, x, y = fxfuse.optimize(model), randn(2, 5, 8).requires_grad_(), randn(2, 5, 8).requires_grad_()
    model(x).square().sum().backward()
    expected = [x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
    model.zero_grad()
    fast(y).square().sum().backward()
    torch.testing.assert_close([y.grad, *(parameter.grad for parameter in model.parameters())], expected)


def test_transformations(anywhere):
    model, x = Block().eval(), randn(3, 2, 5, 8)
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(fast)(x), torch.vmap(model)(x))
        torch.testing.assert_close(*(torch.func.jvp(f, (x[0],), (x[1],)) for f in (fast, model)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast(dtype, anywhere):
    for forward in (lambda m, x: m.l(x).tanh() * 2, lambda m, x: m.l(x).exp(), lambda m, x: m.l(m.fc(x))):
        model = Net(forward, l=nn.LayerNorm(8), fc=linear()).eval()
        fast, x = fxfuse.optimize(model), randn(3, 8, dtype=dtype)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            want, have = model(x), fast(x)
        assert_same_kind(have, want)
        torch.testing.assert_close(have, want, atol=0.02, rtol=0.02)


@torch.no_grad()
def test_torch_compile_and_export(anywhere):
    model, x = Block().eval(), randn(2, 5, 8)
    fast = fxfuse.optimize(model)
    torch.testing.assert_close(torch.compile(fast, backend="aot_eager", fullgraph=True)(x), model(x))
    exported = torch.export.export(fast, (x,))
    assert "fxfuse.layer_norm" in str(exported.graph)
    torch.testing.assert_close(exported.module()(x), model(x))
    torch.testing.assert_close(torch.compile(model, backend="fxfuse")(x), model(x))
    torch.compiler.reset()


@torch.no_grad()
def test_copies(anywhere):
    model, x = Block().eval(), randn(2, 5, 8)
    torch.testing.assert_close(copy.deepcopy(fxfuse.optimize(model))(x), model(x))


@pytest.mark.parametrize("weight", [None, randn(8)], ids=["", "weight"])
@pytest.mark.parametrize("bias", [None, randn(8, seed=1)], ids=["", "bias"])
@torch.no_grad()
def test_the_operator(weight, bias):
    x, operand = randn(2, 5, 8), randn(5, 1)
    want = F.layer_norm(x, (8,), weight, bias, 1e-6) * operand
    arguments = (x, weight, bias, [operand], "acc * o0", [8], 1e-6)
    for call in (functional.layer_norm, torch.ops.fxfuse.layer_norm):
        torch.testing.assert_close(call(*arguments), want)
    metas = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in arguments]
    metas[3] = [operand.to("meta")]
    assert torch.ops.fxfuse.layer_norm(*metas).shape == want.shape


@torch.no_grad()
def test_an_operand_that_enlarges_the_result(anywhere):
    model = Net2(lambda m, x, y: m.l(x).tanh() * y, l=nn.LayerNorm(8)).eval()
    fast = fxfuse.optimize(model)
    assert epilogues(fast) == ["tanh(acc) * o0"]
    assert_as_eager(model, fast, randn(5, 8), randn(3, 1, 8))


# ----------------------------------------------------------------------------------------------- what a GPU would run


def problem(*shape, strides=None, normalized=1, dtype=torch.float32, parameters=None, epilogue="acc", operands=()):
    def meta(*sizes, **options):
        return TensorMeta(sizes, torch.empty(sizes, device="meta").stride(), parameters or dtype, CUDA, **options)

    shape_of_parameters = shape[len(shape) - normalized :]
    affine = meta(*shape_of_parameters, is_parameter=True)
    x = dataclasses.replace(meta(*shape), dtype=dtype)
    x = x if strides is None else dataclasses.replace(x, strides=strides)
    options = (("normalized_shape", tuple(shape_of_parameters)), ("eps", 1e-5))
    return Problem("layer_norm", options, epilogue, x, affine, affine, tuple(meta(*sizes) for sizes in operands))


def test_torchs_own_is_a_candidate(ranked):
    *fused, library = ranked(problem(197, 768))
    assert fused and all("layer_norm" in candidate.name for candidate in fused)
    assert (library.name, library.always) == (plan.LIBRARY_ALONE, True)
    assert ranked(problem(197, 768, epilogue="tanh(acc)"))[-1].name == plan.LIBRARY


@pytest.mark.parametrize(("epilogue", "name"), [("acc", plan.LIBRARY_ALONE), ("tanh(acc)", plan.LIBRARY)])
def test_rows_that_no_kernel_holds_are_torchs(epilogue, name, ranked):
    (library,) = ranked(problem(3, layer_norm.WHOLE_VECTORS * layer_norm.LANES + 1, epilogue=epilogue))
    assert library.name == name


def test_a_kernel_serves_any_number_of_rows(ranked):
    """Of a batch of one, too."""

    def identities(*shape):
        posed = problem(*shape, 768, epilogue="acc + o0", operands=((*shape, 768),))
        return [candidate.identity for candidate in ranked(posed)]

    first = identities(3, 197)
    assert first == identities(1, 5) == identities(40, 1) == identities(197)


def test_tf32_is_not_for_it():
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    assert tf32_allowed("linear") and not tf32_allowed("layer_norm") and not tf32_allowed("pointwise")
    torch.backends.cuda.matmul.allow_tf32 = before


LANES = {
    (96, torch.bfloat16): (4, 8), (192, torch.bfloat16): (8, 8), (384, torch.bfloat16): (16, 8),
    (768, torch.bfloat16): (32, 8), (1024, torch.bfloat16): (64, 8), (2048, torch.bfloat16): (128, 8),
    (96, torch.float32): (8, 4), (384, torch.float32): (32, 4), (768, torch.float32): (32, 4),
    (6144, torch.float32): (256, 4),
    (100, torch.bfloat16): (8, 4), (7, torch.float32): (8, 1), (1, torch.float32): (1, 1),
}  # fmt: skip


@pytest.mark.parametrize(("columns", "dtype"), LANES)
def test_threads_hold_few_vectors_of_16_bytes(columns, dtype):
    lanes, vector = LANES[columns, dtype]
    posed = layer_norm.Problem(1000, columns, columns, 1000, 1e-5, dtype)
    (kernel,) = layer_norm.candidates(posed)
    assert kernel.type.endswith(f", {columns}, {lanes}, {vector}>")
    assert math.ceil(columns / (lanes * vector)) * vector <= layer_norm.ELEMENTS
    (unaligned,) = layer_norm.candidates(dataclasses.replace(posed, x_alignment=dtype.itemsize))
    assert unaligned.type.endswith(", 1>")


def test_parameters_of_another_dtype_are_torchs(ranked, forget):
    """torch accepts or refuses them, whichever."""
    tensors = randn(3, 8).bfloat16(), randn(8), randn(8)
    with torch.no_grad():
        have = functional.layer_norm(*tensors, [], "tanh(acc)", (8,), 1e-5, region=10**9)
    assert have.equal(F.layer_norm(tensors[0], (8,), *tensors[1:]).tanh())


def test_tensors_of_a_call_in_order():
    x, weight, bias, operand = (torch.tensor(float(i)) for i in range(4))
    assert in_order(x, weight, bias, [operand]) == (x, weight, operand, bias)
    assert in_order(x, None, bias, [operand]) == (x, operand, bias)
    assert in_order(x, None, None, [operand]) == (x, operand)
