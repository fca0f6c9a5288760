"""Which candidates a CUDA problem has, and that each generates its source. No GPU is needed here."""

import dataclasses
import itertools

import pytest
import torch

from fxfuse import build
from fxfuse.cuda import exactness, gpu, plan
from fxfuse.pooling import Separate
from fxfuse.problem import Problem, TensorMeta

CUDA = torch.device("cuda:0")
CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def meta(*shape, dtype=torch.float32, device=CUDA, **options):
    strides = torch.empty(shape, device="meta").stride()
    return TensorMeta(shape, strides, dtype, device, **options)


def linear(rows, features, depth, dtype=torch.float32, **options):
    x, weight = meta(rows, depth, dtype=dtype), meta(features, depth, dtype=dtype, is_parameter=True)
    bias = meta(features, dtype=dtype, is_parameter=True)
    fields = {"epilogue": "tanh(acc + o0) * o1", "operands": (meta(rows, 1), meta(device=CPU)), **options}
    return Problem("linear", (), x=x, weight=weight, bias=bias, **fields)


def conv2d(padding, groups, channels_last, dtype):
    x = meta(4, 16, 9, 10, dtype=dtype)
    if channels_last:
        x = TensorMeta(x.shape, (16 * 90, 1, 160, 16), dtype, CUDA)
    weight, bias = (meta(*shape, dtype=dtype, is_parameter=True) for shape in ((32, 16 // groups, 3, 3), (32,)))
    options = (("stride", (1, 1)), ("padding", padding), ("dilation", (1, 1)), ("groups", groups))
    return Problem("conv2d", options, "tanh(acc) + o0", x, weight, bias, (meta(32, 1, 1, is_parameter=True),))


PROBLEMS = [
    *(linear(*sizes, dtype) for sizes in ((1, 1, 1), (7, 100, 33), (4096, 4096, 1024)) for dtype in FLOATS),
    *(conv2d(*options) for options in itertools.product(((1, 1), (0, 1, 1, 0)), (1, 2), (False, True), FLOATS)),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"{problem.kind} {problem.x.shape} {problem.x.dtype}")
def test_candidates_have_names_of_their_own_and_generate_their_source(problem, ranked, monkeypatch):
    texts = []
    monkeypatch.setattr(build, "load", lambda source: texts.append(source.text))
    monkeypatch.setattr(plan, "CHANNELS_LAST_PRODUCTS", 0)
    candidates = ranked(problem)
    names = [candidate.name for candidate in candidates]
    assert len(set(names)) == len(names)
    through_channels_last = (
        problem.kind == "conv2d" and dict(problem.options)["groups"] == 1 and problem.x.strides[1] != 1
    )
    libraries = [plan.LIBRARY, plan.CHANNELS_LAST_LIBRARY] if through_channels_last else [plan.LIBRARY]
    assert [candidate.name for candidate in candidates if candidate.always] == libraries
    for candidate in candidates:
        candidate.build()
    copies = [text for text in texts if "tanh" not in text]
    # of x and of the weight, by one pass; of a weight whose x is in channels_last, for each kernel of ours
    assert sum("TransposedPair" in text for text in copies) == through_channels_last
    assert len({text for text in copies if "TransposedPair" not in text}) <= 1
    assert len(texts) == len(candidates) + len(copies)


@pytest.mark.parametrize(
    ("images", "channels_last", "groups", "tf32", "offered"),
    [
        (64, False, 1, True, True),
        (1, False, 1, True, False),  # too little work
        (64, True, 1, True, False),  # it is there
        (64, False, 2, True, False),
        (64, False, 1, False, False),
    ],
)
def test_the_library_goes_by_way_of_channels_last_where_that_was_measured_to_pay(
    images, channels_last, groups, tf32, offered, ranked, monkeypatch
):
    monkeypatch.setattr(plan, "precision_of", lambda problem: "tf32" if tf32 else "tf32x3")
    strides = (128 * 784, 1, 28 * 128, 128) if channels_last else (128 * 784, 784, 28, 1)
    x = TensorMeta((images, 128, 28, 28), strides, torch.float32, CUDA)
    weight = meta(128, 128 // groups, 3, 3, is_parameter=True)
    options = (("stride", (1, 1)), ("padding", (1, 1)), ("dilation", (1, 1)), ("groups", groups))
    candidates = {c.name: c for c in ranked(Problem("conv2d", options, "relu(acc)", x, weight, None, ()))}
    assert (plan.CHANNELS_LAST_LIBRARY in candidates) is offered
    if offered:  # copies of x, of the weight and the library's result
        workspace = candidates[plan.CHANNELS_LAST_LIBRARY].workspace
        assert workspace == 4 * (2 * images * 128 * 784 + 128 * 128 * 9)


@pytest.mark.parametrize(
    "problem, capability, first",
    [
        (linear(8192, 8192, 8192, torch.bfloat16), (8, 0), False),
        (linear(8192, 8192, 8192, torch.bfloat16), (9, 0), True),
        (linear(64, 256, 256, torch.bfloat16), (9, 0), False),
        (linear(8192, 8192, 8192), (9, 0), False),
    ],
    ids=["A100", "Hopper", "Hopper, small", "Hopper, float32"],
)
def test_the_library_comes_first_where_it_was_measured_to_be_ahead(problem, capability, first, ranked):
    names = [candidate.name for candidate in ranked(problem, capability)]
    assert names.index(plan.LIBRARY) == (0 if first else len(names) - 1)


@pytest.mark.parametrize(
    ("epilogue", "dtype", "by_pass"),
    [
        ("relu(acc)", torch.bfloat16, False),
        ("where(acc > 0, -acc, 1)", torch.bfloat16, False),
        ("gelu(acc)", torch.bfloat16, False),
        ("sigmoid(acc)", torch.bfloat16, True),
        ("relu(acc + 1)", torch.float16, True),
        ("relu(acc)", torch.float32, True),
    ],
)
def test_the_pass_adds_the_bias_where_nothing_is_rounded_more_often_than_by_eager(
    epilogue, dtype, by_pass, ranked, monkeypatch
):
    texts = []
    monkeypatch.setattr(build, "load", lambda source: texts.append(source.text))
    library = ranked(linear(64, 256, 256, dtype, epilogue=epilogue, operands=()))[-1]
    assert library.name == plan.LIBRARY
    library.build()
    assert ("operand0" in texts[0]) is by_pass


def test_fast_float32_is_offered_where_it_is_asked_for(ranked):
    asked = ranked(linear(4096, 4096, 4096, fp32="fast"))
    assert asked[0].name.startswith("gemm fp16x3") and asked[0].workspace > 4 * 2 * 4096 * 4096
    assert any("tf32x3" in candidate.name for candidate in asked)
    assert not any("fp16x3" in candidate.name for candidate in ranked(linear(4096, 4096, 4096)))
    assert not any(
        "fp16x3" in candidate.name for candidate in ranked(linear(4096, 4096, 4096, torch.float16, fp32="fast"))
    )


def test_filters_are_put_in_the_order_of_channels_last(ranked):
    """Windows of pixels are multiplied with them; only groups are left to the implicit GEMM."""
    named = [ranked(conv2d((1, 1), groups, True, torch.float32))[0].name for groups in (1, 2)]
    assert [name.split(" tf32")[0] for name in named] == ["conv2d as gemm", "conv2d"]


def test_an_anchor_alone_runs_by_the_library_without_a_pass(ranked, monkeypatch):
    loaded = []
    monkeypatch.setattr(build, "load", lambda source: loaded.append(source.text))
    library = next(c for c in ranked(linear(64, 256, 256, epilogue="acc", operands=())) if c.always)
    x, weight, bias = torch.randn(3, 256), torch.randn(8, 256), torch.randn(8)
    assert torch.equal(library.build()(x, weight, bias, []), torch.nn.functional.linear(x, weight, bias))
    assert library.name == plan.LIBRARY_ALONE and not loaded


def test_a_product_that_becomes_float32_is_written_so_by_the_library(ranked, monkeypatch):
    """A gradient of a weight under autocast: kernels of ours do, too."""
    if not hasattr(torch.ops.aten.mm, "dtype"):
        pytest.skip(f"torch {torch.__version__}: its products write 16 bits")
    called = []
    x, weight = (meta(768, 768, dtype=torch.bfloat16) for _ in range(2))
    widened = Problem("mm", (), x=x, weight=weight, bias=None, epilogue="float32(acc)", operands=())
    assert plan.LIBRARY in [candidate.name for candidate in ranked(widened)]  # a GPU's tensors that lie on a CPU
    monkeypatch.setattr(gpu, "standing_in", lambda: None)
    library = next(candidate for candidate in ranked(widened) if candidate.always)
    assert library.name == plan.LIBRARY_ALONE
    monkeypatch.setattr(torch, "mm", lambda *tensors, **options: called.append((len(tensors), options)))
    library.build()(torch.empty(0), torch.empty(0), None, [])
    assert called == [(2, {"out_dtype": torch.float32})]


def test_a_convolutions_bias_is_added_by_a_pass_of_ours(ranked):
    problem = dataclasses.replace(conv2d((1, 1), 1, True, torch.bfloat16), epilogue="acc", operands=())
    assert problem.bias is not None
    assert plan.LIBRARY in [candidate.name for candidate in ranked(problem)]
    assert plan.LIBRARY_ALONE in [candidate.name for candidate in ranked(dataclasses.replace(problem, bias=None))]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_candidates_with_pooling(channels_last, dtype, ranked, monkeypatch):
    """What fuses is pooled after; the library's pass pools itself."""
    texts = []
    monkeypatch.setattr(build, "load", lambda source: texts.append(source.text))
    monkeypatch.setattr(plan, "CHANNELS_LAST_PRODUCTS", 0)
    plain = conv2d((1, 1), 1, channels_last, dtype)
    pooled = dataclasses.replace(plain, pool=(2, 2, 2, 2, 0, 0, 0))
    names = [candidate.name for candidate in ranked(plain)]
    candidates = ranked(pooled)
    expected = {plan.LIBRARY: plan.LIBRARY_POOLED}
    assert [candidate.name for candidate in candidates] == [expected.get(n, f"{n} + max_pool2d") for n in names]
    unpooled = 4 * 32 * 9 * 10 * dtype.itemsize
    for candidate in candidates:
        assert candidate.workspace >= unpooled
        candidate.build()
    pooling = {text for text in texts if "MaxPool<" in text}
    assert len(pooling) == 2 and sum("tanh" in text for text in pooling) == 1


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (dataclasses.replace(conv2d((1, 1), 1, False, torch.float32), pool=(9, 10, 1, 1, 0, 0, 0)), "layout"),
        (dataclasses.replace(linear(4, 4, 4), pool=(2, 2, 2, 2, 0, 0, 0)), "only convolutions"),
    ],
)
def test_pooling_that_torch_must_do(problem, reason, ranked):
    with pytest.raises(Separate, match=reason):
        ranked(problem)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("allowed", [False, True], ids=["not allowed", "not what eager does on NCHW"])
def test_without_tf32_kernels_of_ours_are_tried_in_channels_last(kernel, allowed, ranked, monkeypatch):
    texts = []
    monkeypatch.setattr(build, "load", lambda source: texts.append(source.text))
    monkeypatch.setattr(plan, "CHANNELS_LAST_PRODUCTS", 0)
    monkeypatch.setattr(build, "PROCESSORS", 64)
    x, weight = meta(4, 16, 30, 31), meta(64, 16, kernel, kernel, is_parameter=True)
    options = (("stride", (1, 1)), ("padding", (1, 1)), ("dilation", (1, 1)), ("groups", 1))
    problem = Problem("conv2d", options, "tanh(acc)", x, weight, meta(64, is_parameter=True), ())
    monkeypatch.setattr(exactness, "eager_uses_tf32", lambda problem: problem.x.strides[1] == 1)
    with torch.backends.cudnn.flags(allow_tf32=allowed):
        there = [candidate for candidate in ranked(problem, (9, 0)) if "in channels_last" in candidate.name]
        assert len(there) == (0 if kernel == 1 else plan.CHANNELS_LAST_CONTESTANTS)
        for candidate in there:
            assert candidate.always and candidate.name.startswith("conv2d as gemm") and "tf32x3" in candidate.name
            candidate.build()
            gemm, *passes = sorted(set(texts), key=lambda text: "WindowRows" not in text)
            assert "WindowRows" in gemm and "tanh" not in gemm
            assert sorted("tanh" in text for text in passes) == [False, True]  # there, and back
            texts.clear()
