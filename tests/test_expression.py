"""The expression language: text and value are the same thing."""

import copy
import functools
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fxfuse import ExpressionError, UnsupportedError, functional, ops
from fxfuse.expression import Acc, Const, Operand, call, parse, postorder

ACC = Acc()


@pytest.mark.parametrize(
    "text",
    [
        "acc",
        "tanh(clamp(silu(acc) * 0.5, -1, 1))",
        "t0 = acc + o0; t0 * sigmoid(t0)",
        "-acc - -1.5",
        "-(acc + 1) * o1",
        "1 - (acc - o0) - 2",
        "acc / (o0 / o1)",
        "acc - (o0 - o1)",
        "where(acc > 0.0, acc, -inf)",
        "clamp(acc, -0.0, nan)",
        "where((acc < 1) == True, acc, 1e-05)",
        "where(o3 != 0, acc, -(-acc))",
    ],
)
def test_text_round_trips(text):
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("acc+o0*2", "acc + o0 * 2"),
        ("( acc )", "acc"),
        ("--acc", "-(-acc)"),
        ("relu( acc ,)", None),
        ("acc*-2", "acc * -2"),
    ],
)
def test_other_ways_to_write_it(text, same):
    if same is None:
        with pytest.raises(ExpressionError):
            parse(text)
    else:
        assert parse(text) is parse(same)


@pytest.mark.parametrize(
    "text",
    ["", "acc +", "acc acc", "relu(acc", "foo", "acc @ o0", "t0 * 2", "t0 = acc; t0 = acc; t0", "acc; acc",
     "x = 1; acc", "__import__('os')", "acc.real", "acc[0]", "1 if acc else 2"],
)  # fmt: skip
def test_nothing_but_the_grammar_is_read(text):
    with pytest.raises(ExpressionError):
        parse(text)


def test_errors_give_the_position():
    with pytest.raises(ExpressionError, match=r"position 6"):
        parse("acc + )")


MISUSE = {
    # text; what the message says
    "nested calls": ("relu(" * 10_000 + "acc" + ")" * 10_000, "nest too deep .* position 320 "),
    "nested parentheses": ("(" * 10_000 + "acc" + ")" * 10_000, "nest too deep"),
    "open parentheses": ("(" * 10_000, "nest too deep"),
    "a number of 5000 digits": ("acc * " + "9" * 5000, "number too large for torch at position 6 "),
    "a number of 65 bits": (f"acc * {2**64}", "number too large for torch at position 6 "),
    "a negative number of 65 bits": (f"acc * -{2**63 + 1}", "number too small for torch at position 7 "),
    "an operand of 5000 digits": ("acc * o" + "9" * 5000, "unknown name"),
    "digits of another script": ("acc * ٣", "unexpected character at position 5 "),
    "a long text": ("acc + " * 5000 + "?", r"position 29999 of epilogue '….*'$"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_any_text_is_read_or_refused_in_words(name):
    text, words = MISUSE[name]
    with pytest.raises(ExpressionError, match=words) as refused:
        parse(text)
    assert len(str(refused.value)) < 300


def test_signs_do_not_nest():
    value = parse("-" * 10_000 + "acc")
    assert len(list(postorder(value))) == 10_001 and parse(str(value)) is value


@given(st.text(st.sampled_from("acc o0 t0=;+-*/<>().,e1923 relu where clamp inf nan True _ ٣ \n\0"), max_size=40))
def test_random_text_is_read_or_refused(text):
    try:
        value = parse(text)
    except ExpressionError:
        return
    assert parse(str(value)) is value


MEANINGLESS = {
    # epilogue; what the message says
    "too few operands": ("acc + o0 * o1", "reads o1, but the call has 1 operands"),
    "no such operation": ("frobnicate(acc)", "'frobnicate' is not in the table"),
    "too few arguments": ("clamp(acc, 0.0)", r"clamp takes 3 \(input, min, max\), not 2 arguments: clamp\(acc, 0.0\)"),
    "too many arguments": ("relu(acc, 1.0)", "relu takes 1 .*, not 2"),
    "no arguments": ("acc + relu()", "relu takes 1 .*, not 0"),
    "division of numbers by zero": ("acc + 1 / 0", "on numbers alone: 1 / 0"),
    "a function of a number": ("acc + tanh(1.0)", r"on numbers alone: tanh\(1.0\)"),
    "a number": ("2.5", "2.5 is a number"),
}


@pytest.mark.parametrize("call", [torch.ops.fxfuse.linear, functional.linear], ids=["operator", "function"])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", MEANINGLESS)
def test_epilogues_without_a_meaning_are_refused(name, gradients, call):
    epilogue, words = MEANINGLESS[name]
    x, weight = torch.ones(2, 4), torch.ones(3, 4, requires_grad=gradients)
    with pytest.raises(ExpressionError, match=words):
        call(x, weight, None, [torch.ones(3)], epilogue)
    if "o1" in epilogue:
        with pytest.raises(ExpressionError, match=r"reads o1, but the call has 1 operands"):
            torch.ops.fxfuse.gated_linear(x, weight, None, [weight], epilogue)


def test_more_operands_than_a_kernel_takes():
    x, weight = torch.ones(2, 4), torch.ones(3, 4)
    operands = [torch.full((3,), float(index)) for index in range(70)]
    epilogue = " + ".join(["acc", *(f"o{index}" for index in range(70))])
    call = functools.partial(torch.ops.fxfuse.linear, x, weight, None, operands, epilogue)
    assert torch.equal(call(), F.linear(x, weight) + sum(range(70)))
    with pytest.raises(UnsupportedError, match="70 operands; kernels take 48"):
        call(strict=True)


def test_equal_structure_is_the_same_object():
    assert call("mul", ACC, Operand(0)) is call("mul", ACC, Operand(0))
    assert call("mul", ACC, 2) is not call("mul", ACC, 2.0), "int and float promote differently"
    assert Const(1) is not Const(True)
    assert Const(0.0) is not Const(-0.0)
    assert Const(float("nan")) is Const(float("nan"))


def test_copies_and_pickles_are_the_same_object():
    expression = parse("t0 = acc + o0; t0 * sigmoid(t0)")
    assert copy.deepcopy(expression) is expression
    assert pickle.loads(pickle.dumps(expression)) is expression


def test_shared_values_do_not_blow_up():
    expression = ACC
    for _ in range(2000):  # 2^2000 nodes as a tree
        expression = call("mul", expression, call("sigmoid", expression))
    assert len(list(postorder(expression))) == 4001
    assert parse(str(expression)) is expression


def test_long_chains_do_not_exhaust_the_stack():
    expression = ACC
    for _ in range(5000):
        expression = call("tanh", expression)
    assert parse(str(expression)) is expression


def test_postorder_yields_arguments_before_users():
    seen = set()
    for node in postorder(parse("t0 = acc + o0; t0 * sigmoid(t0) - relu(acc)")):
        assert all(arg in seen for arg in getattr(node, "args", ()))
        seen.add(node)


def test_what_passes_through_is_not_rounded():
    """Large arguments in bfloat16 give what float64 gives."""
    x = torch.linspace(96, 120, 50).bfloat16()
    y = torch.randn(50, generator=torch.Generator().manual_seed(0)).bfloat16()
    further = {
        "where": (x, y), "masked_fill": (y > 0, 0.5), "minimum": (y,), "maximum": (y,), "clamp": (-1, 0.5),
        "clamp_min": (y,), "clamp_max": (y,), "hardshrink": (0.5,),
        "threshold": (0.25, 2), "leaky_relu": (0.01,), "prelu": (y[:1],), "elu": (1.0,), "celu": (1.0,),
        "softplus": (1, 20),
    }  # fmt: skip
    rows = [ops.row(name) for name in ops.names() if ops.row(name).passing]
    assert {"relu", "neg", "where", "gelu"} <= {row.name for row in rows}
    for row in rows:
        first = y > 0 if row.name == "where" else x
        args = (first, *further.get(row.name, ()))
        wide = [arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args]
        assert torch.equal(row.reference(*args).double(), row.reference(*wide).double()), row.name


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3),
    "with gaps": lambda x: x[:, :, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_of_meta_tensors_is_what_torch_says_of_them(layout, dtype):
    x, parameters = LAYOUTS[layout](torch.ones(2, 3, 4, 6, dtype=dtype)).to("meta"), torch.ones(3, device="meta")
    expected = torch.nn.functional.batch_norm(x, parameters, parameters, parameters, parameters)
    found = ops.row("batch_norm").reference(x, *[parameters] * 4, 1e-5)
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    with pytest.raises(RuntimeError):
        ops.row("batch_norm").reference(x, *[torch.ones(4, device="meta")] * 4, 1e-5)


def test_batch_norm_of_meta_tensors_imports_no_compiler():
    program = (
        "import sys, torch; from fxfuse import ops; x = torch.ones(2, 3, 4, 4, device='meta')\n"
        "ops.row('batch_norm').reference(x, *[x[0, :, 0, 0]] * 4, 1e-5); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
