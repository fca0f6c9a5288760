"""Calls in every order of torch's modes: each gives what eager gives under its own, whatever came before it."""

import contextlib
import copy
import random
import threading

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from helpers import Net, Net2, assert_same_kind, linear, randn
from torch import is_grad_enabled, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fxfuse
from fxfuse import cuda_graphs


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class WatchingFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Sub(torch.Tensor):
    pass


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "grad within inference": lambda: _nested(torch.inference_mode, lambda: torch.inference_mode(False)),
    "grad within no_grad": lambda: _nested(torch.no_grad, torch.enable_grad),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast in float16": lambda: torch.autocast("cpu", torch.float16),
    "autocast without gradients": lambda: _nested(torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
    "saved on the CPU": torch.autograd.graph.save_on_cpu,
    "deterministic": deterministic,
    "anomalies": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "default dtype": lambda: default_dtype(torch.float64),
    "default dtype without gradients": lambda: _nested(torch.no_grad, lambda: default_dtype(torch.float64)),
    "default device": lambda: torch.device("meta"),
    "dispatch mode": Watching,
    "function mode": WatchingFunctions,
}


@contextlib.contextmanager
def _nested(outer, inner):
    with outer(), inner():
        yield


def plainly(call, x):
    return call(x)


def forward_derivative(call, x):
    with forward_ad.dual_level():
        result = forward_ad.unpack_dual(call(forward_ad.make_dual(x, torch.ones_like(x))))
        return torch.stack([result.primal, result.tangent])


WAYS = {
    "plainly": plainly,
    "as a subclass": lambda call, x: call(x.as_subclass(Sub)),
    "negated lazily": lambda call, x: call(torch._neg_view(x)),
    "a gradient": lambda call, x: call(x.detach().clone().requires_grad_()),
    "forward derivative": forward_derivative,
    "vmap": lambda call, x: torch.func.vmap(call)(x),
    "func.grad": lambda call, x: torch.func.grad(lambda x: call(x).sum())(x),
    "functional_call": lambda call, x: torch.func.functional_call(
        call, {name: tensor.detach() * 2 for name, tensor in call.named_parameters()}, (x,)
    ),
}  # fmt: skip

MODELS = {
    "prelu": lambda: nn.Sequential(nn.PReLU(), nn.ReLU()),
    "feed forward": lambda: nn.Sequential(linear(), nn.GELU(), nn.LayerNorm(8), nn.SiLU()),
    "gated": lambda: Net(lambda m, x: F.silu(m.a(x)) * m.b(x), a=linear(), b=linear()),
    "dropout in place": lambda: nn.Sequential(linear(), nn.Dropout(0.5, inplace=True), nn.Tanh(), nn.SiLU()),
    "residual": lambda: Net(lambda m, x: x + m.fc(x).tanh_(), fc=linear()),
    "parameters": lambda: Net(lambda m, x: torch.sigmoid(x * m.w + m.v) * m.w, w=randn(8), v=randn(8, seed=1)),
    "numbers": lambda: Net(lambda m, x: torch.where(x > 0, 0.1, 0.7) * m.w.detach() + (x > m.w) * 0.3, w=randn(8)),
    "in place": lambda: Net(lambda m, x: (x * m.w).mul_(2).add_(m.w).sigmoid_(), w=randn(8)),
}  # fmt: skip


def outcome(model, mode, way, x):
    """What a call gives: its result and all gradients, or the type of the exception."""
    torch.manual_seed(0)
    with MODES[mode]():
        try:
            result = WAYS[way](model, x)
        except Exception as error:
            return type(error), (), ()
        gradients = ()
        if result.requires_grad:
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            gradients = torch.autograd.grad(result.float().square().sum(), parameters, allow_unused=True)
    seen = (type(result), result.dtype, result.shape, result.stride(), result.requires_grad, result.is_inference())
    return seen, result.detach().as_subclass(torch.Tensor), gradients


def assert_as_exact(actual, expected, exact, where, rounding=4e-3):
    """Of what a call gives, each tensor is about as near to float64's as eager's: it rounds elsewhere.

    Args:
        rounding: what that may come to, as a part of the tensor's norm; by default of a call in 16 bits.
    """
    for have, want, right in zip(*((each[1], *each[2]) for each in (actual, expected, exact)), strict=True):
        errors = [float((one.double() - right.double()).norm()) for one in (have, want)]
        assert errors[0] <= 2 * errors[1] + rounding * float(right.norm()), (where, errors)


IN_FLOAT32 = 2e-6
"""Of gradients behind a normalisation of rows that are nearly alike: it divides by little."""


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_every_call_is_as_eagers_in_any_order_of_modes(name, seed):
    draw = random.Random(f"{name} {seed}")
    model = MODELS[name]().train(draw.random() < 0.5)
    fast, x, exact_model = fxfuse.optimize(model), randn(3, 8), copy.deepcopy(model).double()
    for step in range(60):
        mode, way = draw.choice(list(MODES)), draw.choice([*WAYS, *["plainly"] * len(WAYS)])
        for repeat in range(draw.choice([1, 1, 3])):  # the third of a kind takes a short cut
            expected, actual = outcome(model, mode, way, x), outcome(fast, mode, way, x)
            where = f"call {step}.{repeat}: {mode}, {way}"
            assert actual[0] == expected[0], where
            if mode == "autocast":
                assert_as_exact(actual, expected, outcome(exact_model, "grad", way, x.double()), where)
                continue
            tolerance = 2e-2 if "autocast" in mode else 1e-5
            for have, want in zip((actual[1], *actual[2]), (expected[1], *expected[2]), strict=True):
                torch.testing.assert_close(
                    have, want, rtol=tolerance, atol=tolerance, msg=lambda text, where=where: f"{where}: {text}"
                )


class Asking(Net):
    """A model that this file defines."""


QUESTIONS = {
    "gradients": lambda x: torch.is_grad_enabled(),
    "gradients, by a name": lambda x: is_grad_enabled(),
    "inference mode": lambda x: torch.is_inference_mode_enabled(),
    "autocast": lambda x: torch.is_autocast_enabled("cpu"),
    "autocast's dtype": lambda x: torch.get_autocast_dtype("cpu") == torch.float16,
    "whether x needs gradients": lambda x: x.requires_grad,
    "where x comes from": lambda x: x.grad_fn is None,
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("where", ["the model", "a child"])
def test_what_a_model_asks_of_torch_is_asked_at_every_call(question, where):
    if "autocast" in question and not hasattr(torch, "get_autocast_dtype"):
        pytest.skip("this torch's functions take no device")
    if where == "a child" and question == "where x comes from":
        pytest.skip("AOTAutograd's own trace answers otherwise than a call")
    model = Asking(lambda m, x: F.relu(m.fc(x)) * (2.0 if QUESTIONS[question](x) else 3.0) + 1, fc=linear())
    model = model if where == "the model" else nn.Sequential(linear(), nn.ReLU(), model, nn.Sigmoid())
    fast, seen = fxfuse.optimize(model), set()
    for _ in range(3):  # the third call is Dynamo's
        for mode in ("grad", "no_grad", "inference", "autocast", "autocast in float16"):
            for needs in (False, True):
                with MODES[mode]():
                    x = randn(3, 8).requires_grad_(needs)
                    expected = model(x)
                    torch.testing.assert_close(fast(x), expected, rtol=2e-2, atol=2e-2)
                    seen.add(float(expected.detach().sum()))
    assert len(seen) > 1


@pytest.mark.parametrize("name", ["prelu", "feed forward", "gated", "in place"])
def test_gradients_after_calls_without(name):
    model = MODELS[name]()
    fast, x = fxfuse.optimize(model), randn(3, 8)
    with torch.no_grad():
        for _ in range(3):
            fast(x)
    assert fast(x).requires_grad
    exact = copy.deepcopy(model).double()
    found = [outcome(one, "grad", "plainly", given) for one, given in ((fast, x), (model, x), (exact, x.double()))]
    assert_as_exact(*found, name, IN_FLOAT32)


def test_a_thread_without_gradients_beside_one_that_trains():
    model = MODELS["feed forward"]()
    fast, x = fxfuse.optimize(model), randn(3, 8)
    expected, stop, found = outcome(model, "grad", "plainly", x), threading.Event(), []
    exact = outcome(copy.deepcopy(model).double(), "grad", "plainly", x.double())

    def evaluate():
        while not stop.is_set():
            found.append(outcome(fast, "no_grad", "plainly", x)[0][4])

    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        for _ in range(100):
            actual = outcome(fast, "grad", "plainly", x)
            assert actual[0] == expected[0]
            assert_as_exact(actual, expected, exact, "beside another thread", IN_FLOAT32)
    finally:
        stop.set()
        thread.join()
    assert found and not any(found)


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_a_subclass_as_an_operand_gives_its_own_type(mode):
    model = Net2(lambda m, x, y: torch.where(y > 0, x, y))
    fast, y = fxfuse.optimize(model), randn(8)
    with MODES[mode]():
        for x in [randn(3, 8).as_subclass(Sub)] * 4 + [randn(3, 8), randn(3, 8).as_subclass(Sub)]:
            assert_same_kind(fast(x, y), model(x, y))


SWITCHES = {
    "default dtype": (torch.set_default_dtype, torch.get_default_dtype, torch.float64),
    "deterministic algorithms": (
        torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, True,
    ),
    "float32 matmul precision": (
        torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, "medium",
    ),
    "cuDNN's TF32": (
        lambda value: setattr(torch.backends.cudnn, "allow_tf32", value), lambda: torch.backends.cudnn.allow_tf32,
        False,
    ),
    "float16 reductions": (
        lambda value: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", value),
        lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction, False,
    ),
    "cuDNN": (
        lambda value: setattr(torch.backends.cudnn, "enabled", value), lambda: torch.backends.cudnn.enabled, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SWITCHES)
def test_a_cuda_graph_is_for_the_switches_that_it_was_captured_with(name):
    write, read, other = SWITCHES[name]
    before, switches = read(), cuda_graphs._switches()
    try:
        write(other)
        assert cuda_graphs._switches() != switches
    finally:
        write(before)
    assert cuda_graphs._switches() == switches
