"""Training: calls that need gradients run as two fused graphs, and give what eager's calls give, gradients included."""

import contextlib
import copy
import dataclasses
import itertools
import math
import random
import statistics
import threading
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    CAPABILITY,
    COPIES,
    KNOWS_THE_LAST_BACKWARD,
    Net,
    Net2,
    batch_norm,
    linear,
    outcome,
    randn,
    skip_if_absent,
    skip_if_dynamo_refuses,
    skip_if_python,
)
from test_loops import GPUS, where_steps_are
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import fxfuse
from fxfuse import channels_last, plans, training
from fxfuse.module import DYNAMO_KEEPS_OBJECTS, FusedModule, state_of
from fxfuse.patterns.numbers import made_of
from fxfuse.program.binding import PATIENCE

FEW_ULPS = 4 * torch.finfo(torch.float32).eps


def graphs_of(fast):
    """The graphs that an optimised model runs: its own, those below it, and those that Dynamo captured."""
    modules = [module for module in fast.modules() if isinstance(module, FusedModule)]
    recaptures = [state_of(module).recapture for module in modules]
    return [*modules, *(graph for each in recaptures if each is not None for graph in each.graphs)]


def made(*graphs):
    """The steps that were made of these graphs, or of an optimised model's, of which there is one at least."""
    every = [graph for each in graphs for graph in graphs_of(each)]
    found = [state_of(graph).training for graph in every if state_of(graph).training is not None]
    steps = [step for each in found for step in each.steps]
    if not steps:
        for graph in every:
            skip_if_python(graph)
    assert steps, f"all gradients come from torch: {[each.reason for each in found]}"
    return steps


def refused(fast):
    """Why there are no steps of it."""
    steps = state_of(fast).training
    assert steps is not None and not steps.steps
    return steps.reason


def floats(result):
    """The tensors of a result that may have gradients, in the order of pytree."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def weighed(result):
    """A number of which every value of the result has another share."""
    return sum((leaf * randn(*leaf.shape, seed=7).to(leaf)).sum() for leaf in floats(result))


def parameters_of(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def step_of(model, *inputs):
    """Results of a call, and the gradients of its inputs and of the model's parameters."""
    inputs = [as_new(x) for x in inputs]
    result = model(*inputs)
    wanted = [each for each in (*inputs, *parameters_of(model)) if each.requires_grad]
    gradients = torch.autograd.grad(weighed(result), wanted, allow_unused=True)
    return [*(leaf.detach() for leaf in floats(result)), *gradients]


def as_new(tensor):
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def calls_of(fast, *inputs, count=3):
    """The last of several calls of one kind: a step runs it."""
    for _ in range(count - 1):
        step_of(fast, *inputs)
    found = step_of(fast, *inputs)
    made(fast)
    return found


def as_exact(value):
    return pytree.tree_map_only(
        torch.Tensor,
        lambda x: x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x, value,
    )  # fmt: skip


def assert_errors_as_eagers(actual, expected, exact, where="", factor=2.0, noise=FEW_ULPS):
    """Each tensor is about as near to float64's as eager's is; None stands where eager has it.

    A gradient that is zero, as that of a bias before a normalisation, is a sum of roundings: of numbers of the size
    that the other tensors have.
    """
    assert len(actual) == len(expected) == len(exact)
    largest = max((float(right.norm()) for right in exact if right is not None), default=0.0)
    for number, (have, want, right) in enumerate(zip(actual, expected, exact, strict=True)):
        if want is None:
            assert have is None, (where, number)
            continue
        assert have is not None, (where, number)
        assert (have.dtype, have.shape) == (want.dtype, want.shape), (where, number)
        ours, eagers = (float((each.double() - right).norm()) for each in (have, want))
        scale = float(right.norm())
        assert math.isfinite(scale), f"{where}: float64 itself gives {right}"
        scale = largest if scale < 1e-12 * largest else scale
        assert ours <= factor * eagers + noise * scale, f"{where}, tensor {number}: error {ours}, eager's {eagers}"


CAPTURES = pytest.mark.skipif(not DYNAMO_KEEPS_OBJECTS, reason="Dynamo of a torch before 2.6 knows fewer operators")


# ------------------------------------------------------------------------------------------ values and gradients


class Attention(nn.Module):
    """A block of a transformer."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


class Tied(nn.Module):
    """A language model whose head's weight is that of its embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.fc = nn.Linear(8, 8)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.norm(x + F.silu(self.fc(x))))


def tokens(seed, shape=(3, 5), most=11):
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed))


def wanting(*shape):
    """A function from a seed to an input that has gradients."""
    return lambda seed: (randn(*shape, seed=seed).requires_grad_(),)


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, bias=False), nn.BatchNorm2d(12, momentum=0.3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5),
    )  # fmt: skip


MODELS = {
    # what makes the model; its inputs from a seed
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 5)), wanting(6, 8)),
    "transformer block": (Attention, wanting(2, 5, 16)),
    "convolutions": (convolutional, wanting(4, 3, 10, 10)),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 1)),
        wanting(2, 3, 7, 6),
    ),
    "tied embedding": (Tied, lambda seed: (tokens(seed),)),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv1d(6, 2, 1), nn.Tanh()),
        wanting(3, 4, 9),
    ),
    "batch norm of rows": (
        lambda: nn.Sequential(nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)),
        wanting(10, 8),
    ),
    "batch norm of series": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3, bias=False), nn.BatchNorm1d(6), nn.SiLU()), wanting(3, 4, 9),
    ),
    "batch norm without parameters": (
        lambda: nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 3, 3)), wanting(3, 4, 6, 5),
    ),
    "batch norm without statistics": (
        lambda: nn.Sequential(nn.BatchNorm2d(4, track_running_stats=False), nn.Conv2d(4, 3, 3)), wanting(3, 4, 6, 5),
    ),
    "frozen batch norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), batch_norm(), nn.ReLU(), nn.Conv2d(8, 4, 3)), wanting(2, 3, 8, 9),
    ),
    "depthwise": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4, padding=1), nn.Hardswish(), nn.Conv2d(4, 6, 1)),
        wanting(2, 4, 6, 7),
    ),
    "cross entropy": (
        lambda: Net2(lambda m, x, y: F.cross_entropy(m.fc(x), y, label_smoothing=0.1), fc=linear(6)),
        lambda seed: (randn(7, 8, seed=seed).requires_grad_(), tokens(seed, (7,), 6)),
    ),
    "nll of log_softmax": (
        lambda: Net2(lambda m, x, y: F.nll_loss(F.log_softmax(m.fc(x), -1), y, reduction="sum"), fc=linear(6)),
        lambda seed: (randn(7, 8, seed=seed).requires_grad_(), tokens(seed, (7,), 6)),
    ),
    "a part by Dynamo": (
        lambda: Net(lambda m, x: [F.gelu(each) for each in m.fc(x).chunk(3, -1)], fc=linear(12)), wanting(5, 8),
    ),
    "softmax": (lambda: Net(lambda m, x: F.softmax(m.fc(x), -1) * x, fc=linear()), wanting(4, 3, 8)),
    "gated": (lambda: Net(lambda m, x: F.silu(m.a(x)) * m.b(x), a=linear(16), b=linear(16)), wanting(5, 8)),
}  # fmt: skip


def follow(model, *others):
    """Gives the others the model's parameters, in place."""
    with torch.no_grad():
        for other in others:
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                theirs.copy_(mine)


@pytest.mark.parametrize("name", MODELS)
def test_values_gradients_and_buffers_are_as_near_to_float64_as_eagers(name):
    make, inputs_of = MODELS[name]
    torch.manual_seed(0)
    model = make()
    fast, exact = fxfuse.optimize(copy.deepcopy(model)), copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    for call in range(5):
        inputs = inputs_of(call)
        found = [step_of(fast, *inputs), step_of(model, *inputs), step_of(exact, *as_exact(inputs))]
        assert_errors_as_eagers(*found, where=f"{name}, call {call}")
        assert [each.stride() for each in found[0] if each is not None] == [
            each.stride() for each in found[1] if each is not None
        ]
        buffers = [dict(each.named_buffers()) for each in (fast, model, exact)]
        assert buffers[0].keys() >= buffers[1].keys()
        for key, want in buffers[1].items():
            assert_errors_as_eagers([buffers[0][key]], [want], [buffers[2][key].double()], where=f"call {call}: {key}")
        weighed(model(*inputs)).backward()
        fast(*inputs), exact(*as_exact(inputs))  # what they count goes on, too
        optimizer.step()
        follow(model, fast, exact)
    assert len(made(fast)) == 1


# ----------------------------------------------------------------------------------------------- conventions

NAN, INF = math.nan, math.inf
KINKS = {
    # function, inputs at which its derivative is a matter of convention
    "relu": (F.relu, [0.0, -0.0, NAN, 1.0, -1.0, INF, -INF]),
    "relu6": (F.relu6, [0.0, -0.0, 6.0, 3.0, 7.0, -1.0]),
    "hardtanh": (lambda x: F.hardtanh(x, -0.5, 1.0), [-0.5, 1.0, 0.25, 2.0, -2.0]),
    "clamp": (lambda x: x.clamp(-1, 2), [-1.0, 2.0, NAN, 0.0, 3.0, -3.0, INF, -INF]),
    "clamp min": (lambda x: x.clamp(min=0.5), [0.5, NAN, 1.0, 0.0]),
    "abs": (torch.abs, [0.0, -0.0, NAN, 1.5, -1.5]),
    "sign times": (lambda x: torch.sign(x) * x, [0.0, -0.0, NAN, 1.5, -1.5]),
    "hardswish": (F.hardswish, [-3.0, 3.0, 0.0, 4.0, -4.0]),
    "hardsigmoid": (F.hardsigmoid, [-3.0, 3.0, 0.0, 4.0, -4.0]),
    "hardshrink": (F.hardshrink, [-0.5, 0.5, 0.0, 0.75, -0.75]),
    "softshrink": (F.softshrink, [-0.5, 0.5, 0.0, 0.75, -0.75]),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.25), [0.0, -0.0, NAN, 1.0, -1.0]),
    "prelu": (lambda x: F.prelu(x, torch.full((1,), 0.25)), [0.0, -0.0, NAN, 1.0, -1.0]),
    "elu": (lambda x: F.elu(x, 0.5), [0.0, -0.0, 1.0]),
    "threshold": (lambda x: F.threshold(x, 0.5, 20.0), [0.5, NAN, 1.0, 0.0]),
    "maximum of itself": (lambda x: torch.maximum(x, x), [0.0, -0.0, NAN, 1.5]),
    "maximum with a number": (lambda x: torch.maximum(x, torch.zeros_like(x)), [0.0, -0.0, NAN, 1.0, -1.0]),
    "minimum of negations": (lambda x: torch.minimum(x, -x), [0.0, -0.0, NAN, 1.0, -1.0]),
    "amax": (lambda x: x.amax(-1), [1.0, 1.0, 0.0, 1.0]),
    "max of a dimension": (lambda x: x.max(-1).values, [1.0, 1.0, 0.0, 1.0]),
    "max of all": (lambda x: x.max(), [1.0, 1.0, 0.0, 1.0]),
    "max pool": (lambda x: F.max_pool1d(x, 2), [1.0, 1.0, 0.0, 0.0]),
    "sqrt": (torch.sqrt, [0.0, 1.0, 4.0]),
    "norm": (lambda x: x.norm(dim=-1), [0.0, 0.0]),
    "pow of 0": (lambda x: x**0, [0.0, NAN, 1.0]),
    "where": (lambda x: torch.where(x > 0, x.sqrt(), x * 0), [0.0, 1.0, 4.0]),
}


def gradient_of(call, x, seed=3):
    x = x.detach().clone().requires_grad_()
    result = call(x)
    incoming = torch.ones_like(result) if seed is None else randn(*result.shape, seed=seed)
    return torch.autograd.grad(result, x, incoming)[0]


@pytest.mark.parametrize("name", KINKS)
def test_derivatives_at_kinks_are_eagers(name):
    function, points = KINKS[name]
    model = Net(lambda m, x: function(x))
    fast = fxfuse.optimize(model)
    for repeats in (1, 11):  # of which the first is shorter than a vector register
        x = torch.tensor([points] * repeats)
        (own,) = torch.autograd.grad(function(x.requires_grad_()).sum(), x)
        if not torch.equal(own[:1].expand_as(own).nan_to_num(99), own.nan_to_num(99)):
            pytest.skip(f"torch {torch.__version__}: eager's own derivative depends on where in memory a value lies")
        for _ in range(3):
            torch.testing.assert_close(gradient_of(fast, x), gradient_of(model, x), rtol=0, atol=0, equal_nan=True)
    assert len(made(fast)) == 2


@pytest.mark.parametrize("function", [F.relu6, F.hardtanh, F.elu, F.hardswish, F.hardshrink, F.softshrink, F.selu])
def test_derivatives_at_nan_are_one_of_eagers(function):
    """Eager's loops over vectors and over what is left of them give different ones."""
    x = torch.full((33,), NAN)
    model = Net(lambda m, x: function(x))
    fast = fxfuse.optimize(model)
    for _ in range(3):
        found, allowed = (set(map(str, gradient_of(call, x, seed=None).tolist())) for call in (fast, model))
    made(fast)
    assert found <= allowed


PIECES = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "softshrink, as torch.export names it": lambda x: torch.ops.aten.softshrink.default(x, 0.25),
    "threshold": lambda x: F.threshold(x, 0.5, 20.0),
    "clamp": lambda x: x.clamp(-1, 2),
    "where": lambda x: torch.where(x > 0, x, x * 2),
}


@pytest.mark.parametrize("name", PIECES)
def test_gradients_that_are_not_finite_arrive_as_in_eager(name):
    """Each piece of the function meets each of them."""
    function = PIECES[name]
    model = Net(lambda m, x: function(x))
    fast = fxfuse.optimize(model)
    x, incoming = torch.meshgrid(
        torch.tensor([-4.0, -0.75, -0.1, 0.1, 0.75, 4.0, 7.0]), torch.tensor([NAN, INF, -INF, 2.0]), indexing="ij"
    )
    for _ in range(3):
        own, found = (
            torch.autograd.grad(call(given), given, incoming)[0]
            for call, given in ((model, x.clone().requires_grad_()), (fast, x.clone().requires_grad_()))
        )
        torch.testing.assert_close(found, own, rtol=0, atol=0, equal_nan=True)
    assert len(made(fast)) == 1


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("rows", [(), (3,)])
def test_a_rows_targets_end_at_minus_one(rows, reduction):
    """torch's decomposition of this loss counts too much where fewer targets than classes are given."""
    model = Net2(lambda m, x, target: F.multilabel_margin_loss(x * 0.5, target, reduction=reduction) * 2)
    fast = fxfuse.optimize(model)
    target = torch.tensor([3, 0, -1, 2, 1, -1, 5]).expand(*rows, 7)
    for seed in range(3):
        x = randn(*rows, 7, seed=seed).requires_grad_()
        results = [call(x, target) for call in (fast, model)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(result.sum(), x) for result in results))
    if not rows and reduction == "none":  # a scalar; torch's trace has a vector of one
        assert "another shape" in refused(fast)
    else:
        assert len(made(fast)) == 1


TIES = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp by tensors": lambda x, y: x.clamp(min=y),
    "clamp between tensors": lambda x, y: x.clamp(y, y),
    "max": torch.max,
    "where greater": lambda x, y: torch.where(x > y, x, y),
    "fmax": torch.fmax,
    "fmin": torch.fmin,
}


@pytest.mark.parametrize("name", TIES)
def test_derivatives_at_ties_are_eagers(name):
    model = Net2(lambda m, x, y: TIES[name](x, y))
    fast = fxfuse.optimize(model)
    x, y = torch.tensor([[0.0, 1.0, 2.0, NAN, 1.0, -0.0]] * 7), torch.tensor([[0.0, 1.0, 1.0, 1.0, NAN, 0.0]] * 7)
    for _ in range(3):
        inputs = x.clone().requires_grad_(), y.clone().requires_grad_()
        found = [torch.autograd.grad(call(*inputs), inputs, randn(7, 6, seed=3)) for call in (fast, model)]
        torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
    made(fast)


# ----------------------------------------------------------------------------------------- what people train with


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 5))


def with_dropout():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 5))


def triple(model):
    """An optimised copy, the model, and a copy in float64."""
    return fxfuse.optimize(copy.deepcopy(model)), model, copy.deepcopy(model).double()


def warm(fast, *inputs):
    """A model that has a step for such calls."""
    calls_of(fast, *inputs)
    return fast


def backward(result):
    weighed(result).backward()


def all_gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def assert_training_as_eagers(train, make=mlp, *, inputs=None, rows=6, **options):
    """What `train` returns, a list of tensors, of an optimised model with steps is as exact as eager's."""
    inputs = (randn(rows, 8).requires_grad_(),) if inputs is None else inputs
    fast, model, exact = triple(make())
    warm(fast, *inputs)
    for _ in range(3):  # what calls count, they count in all
        step_of(model, *inputs), step_of(exact, *as_exact(inputs))
    found = [
        [each if each is None else each.detach() for each in train(call, *map(as_new, given))]
        for call, given in ((fast, inputs), (model, inputs), (exact, as_exact(inputs)))
    ]
    made(fast)
    assert_errors_as_eagers(*found, **options)


@pytest.mark.parametrize("name", ["mlp", "transformer block", "batch norm of series", "softmax"])
def test_autocast(name):
    make, inputs_of = MODELS[name]
    torch.manual_seed(0)
    fast, model, exact = triple(make())
    for call in range(4):
        inputs = inputs_of(call)
        with torch.autocast("cpu", torch.bfloat16):
            found = [step_of(fast, *inputs), step_of(model, *inputs)]
        assert_errors_as_eagers(*found, step_of(exact, *as_exact(inputs)), noise=2**-7, where=f"call {call}")
    made(fast)


def test_gradients_of_weights_under_autocast_are_converted_by_the_products_kernel():
    """Autograd turns them over twice, and names the layout and the device of the conversion."""
    fast, model, exact = triple(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))
    x = randn(6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            found = [step_of(fast, x), step_of(model, x)]
    assert_errors_as_eagers(*found, step_of(exact, x.double()), noise=2**-7)
    (step,) = made(fast)
    (backward,) = step.backwards
    (end,) = (node for node in backward.graph.nodes if node.op == "output")
    products = [node for node in end.args[0] if node.target is fxfuse.functional.mm]
    assert [node.args[-1] for node in products] == ["float32(acc)", "float32(acc)"]


def test_autocast_left_before_the_backward():
    fast, model, exact = triple(mlp())
    for call in range(4):
        gradients = []
        for each, dtype in ((fast, torch.float32), (model, torch.float32), (exact, torch.float64)):
            x = randn(6, 8, seed=call).to(dtype).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=each is not exact):
                result = each(x)
            gradients.append(torch.autograd.grad(weighed(result), [x, *each.parameters()]))
        assert_errors_as_eagers(*gradients, noise=2**-7)
    made(fast)
    for _ in range(3):  # without autocast they are of another kind
        x = randn(6, 8).requires_grad_()
        found = [step_of(fast, x), step_of(model, x), step_of(exact, *as_exact((x,)))]
        assert_errors_as_eagers(*found)
    assert len(made(fast)) == 2


def accumulate(model, x):
    for number in range(1, 5):
        backward(model(x * number))
    return [x.grad, *all_gradients(model)]


def backward_twice(model, x):
    result = model(x)
    weighed(result).backward(retain_graph=True)
    backward(result)
    return [x.grad, *all_gradients(model)]


def two_calls_before_their_backwards(model, x):
    first, second = model(x), model(x.detach() * 2)
    backward(second), backward(first)
    return [x.grad, *all_gradients(model)]


def one_result_in_another_call(model, x):
    result = model(x)
    again = model(torch.cat([result, result[:, :3]], -1))
    backward(again)
    return [result, again, x.grad, *all_gradients(model)]


def hooks_on_tensors(model, x):
    seen = []
    x.register_hook(lambda gradient: seen.append(gradient.clone()))
    first = next(model.parameters())
    handle = first.register_hook(lambda gradient: gradient * 2)
    result = model(x)
    result.register_hook(lambda gradient: gradient * 3)
    backward(result)
    handle.remove()
    return [*seen, x.grad, *all_gradients(model)]


def step_in_the_backward(model, x):
    handles = []
    for parameter in model.parameters():

        def update(parameter):
            with torch.no_grad():
                parameter -= 0.01 * parameter.grad
            parameter.grad = None

        handles.append(parameter.register_post_accumulate_grad_hook(update))
    for _ in range(3):
        backward(model(x))
    for handle in handles:
        handle.remove()
    return [x.grad, *model.parameters()]


def full_backward_hooks(model, x):
    seen = []
    handles = [
        model.register_full_backward_hook(lambda module, of_input, of_output: seen.extend([*of_input, *of_output])),
        model.register_full_backward_pre_hook(lambda module, of_output: tuple(each * 2 for each in of_output)),
    ]
    for _ in range(3):
        backward(model(x))
    for handle in handles:
        handle.remove()
    return [*seen, x.grad, *all_gradients(model)]


def forward_hooks(model, x):
    handles = [
        model.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        model.register_forward_hook(lambda module, args, result: result + 1),
    ]
    for _ in range(3):
        backward(model(x))
    for handle in handles:
        handle.remove()
    return [x.grad, *all_gradients(model)]


def transposed_gradient(model, x):
    result = model(x)
    (result.t() * randn(*result.t().shape).to(x.dtype)).sum().backward()
    return [x.grad, *all_gradients(model)]


def expanded_gradient(model, x):
    model(x).sum().backward()
    return [x.grad, *all_gradients(model)]


def strided_gradient(model, x):
    result = model(x)
    incoming = randn(result.shape[0], 2 * result.shape[1]).to(x.dtype)[:, ::2]
    result.backward(incoming)
    return [x.grad, *all_gradients(model)]


def a_part_of_the_result(model, x):
    backward(model(x)[1:3, :2])
    return [x.grad, *all_gradients(model)]


def result_changed_afterwards(model, x):
    result = model(x)
    result.mul_(2).relu_()
    backward(result)
    return [result, x.grad, *all_gradients(model)]


def biases_changed_before_the_backward(model, x):
    result = model(x)
    with torch.no_grad():
        model[2].bias.mul_(2)
    backward(result)
    return [x.grad, *all_gradients(model)]


def weight_that_nobody_needs_changed(model, x):
    result = model(x.detach())
    with torch.no_grad():
        model[0].weight.mul_(2)  # only the gradient of x, which nobody wants, is made of it
    backward(result)
    return all_gradients(model)


def input_that_is_a_view(model, x):
    for _ in range(3):
        backward(model((x * 2).t().contiguous().t()))
    return [x.grad, *all_gradients(model)]


def saved_on_cpu(model, x):
    with torch.autograd.graph.save_on_cpu():
        result = model(x)
    backward(result)
    return [x.grad, *all_gradients(model)]


def saved_otherwise(model, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.numpy(force=True), torch.from_numpy):
        for _ in range(3):
            result = model(x)
    backward(result)
    return [x.grad, *all_gradients(model)]


def checkpointed(model, x, use_reentrant=False):
    for _ in range(3):
        backward(checkpoint(model, x, use_reentrant=use_reentrant))
    return [x.grad, *all_gradients(model)]


def checkpointed_by_reentering(model, x):
    return checkpointed(model, x, use_reentrant=True)


def gradient_penalty(model, x):
    torch.manual_seed(1)
    result = model(x)
    (gradient,) = torch.autograd.grad(weighed(result), x, create_graph=True)
    (weighed(result) + (gradient.norm(dim=-1) - 1).square().mean()).backward()
    return [result, gradient, x.grad, *all_gradients(model)]


def penalty_of_parameters(model, x):
    gradients = torch.autograd.grad(weighed(model(x)), list(model.parameters()), create_graph=True)
    sum(gradient.square().sum() for gradient in gradients).backward()
    return [*gradients, x.grad, *all_gradients(model)]


def hessian_times_vector(model, x):
    return list(torch.autograd.functional.hvp(lambda x: weighed(torch.tanh(model(x))), x, randn(*x.shape).to(x.dtype)))


def gradient_of_functional_call(model, x):
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters, x):
        return weighed(torch.func.functional_call(model, parameters, (x,)))

    found = torch.func.grad(loss)(parameters, x.detach())
    return list(found.values())


def gradients_of_each_sample(model, x):
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x[None],)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x.detach())
    return list(found.values())


def functional_call_with_gradients(model, x):
    others = {name: (parameter.detach() * 0.5).requires_grad_() for name, parameter in model.named_parameters()}
    for _ in range(3):
        result = torch.func.functional_call(model, others, (x,))
    return [result, *torch.autograd.grad(weighed(result), [x, *others.values()])]


TRAININGS = [
    accumulate, backward_twice, two_calls_before_their_backwards, one_result_in_another_call, hooks_on_tensors,
    step_in_the_backward, full_backward_hooks, forward_hooks, transposed_gradient, expanded_gradient, strided_gradient,
    a_part_of_the_result, result_changed_afterwards, biases_changed_before_the_backward,
    weight_that_nobody_needs_changed, input_that_is_a_view, saved_on_cpu, saved_otherwise, checkpointed,
    checkpointed_by_reentering, gradient_penalty, penalty_of_parameters, hessian_times_vector,
    gradient_of_functional_call, gradients_of_each_sample, functional_call_with_gradients,
]  # fmt: skip


@pytest.mark.parametrize("train", TRAININGS, ids=lambda train: train.__name__)
def test_training_gives_what_eager_gives(train):
    assert_training_as_eagers(train)


@pytest.mark.parametrize("name", ["convolutions", "batch norm of rows", "group norm", "gated"])
def test_gradients_of_gradients(name):
    make, inputs_of = MODELS[name]
    torch.manual_seed(0)
    assert_training_as_eagers(gradient_penalty, make, inputs=inputs_of(0), factor=3)


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "SGD, foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
}


def losses_of(model, optimizer, batches, target):
    found = []
    for x in batches:

        def closure(x=x):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), target)
            loss.backward()
            return loss

        found.append(optimizer.step(closure).detach())
    return torch.stack(found)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_follow_eagers_losses(name):
    fast, model, _ = triple(mlp())
    try:
        OPTIMIZERS[name](copy.deepcopy(model).parameters())
    except RuntimeError as error:
        pytest.skip(f"torch {torch.__version__}: {error}")
    batches, target = [randn(6, 8)] * 10, randn(6, 5, seed=99)
    found, expected = (losses_of(each, OPTIMIZERS[name](each.parameters()), batches, target) for each in (fast, model))
    assert len(made(fast)) == 1
    assert expected[-1] < 0.9 * expected[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("of_its_model", [False, True], ids=["of the optimised", "of its model"])
def test_averaged_models(of_its_model):
    found = []
    for optimise in (True, False):
        model = mlp()
        trained = fxfuse.optimize(model) if optimise else model
        for seed in range(3):
            step_of(trained, randn(6, 8, seed=seed).requires_grad_())
        average = torch.optim.swa_utils.AveragedModel(
            model if of_its_model else trained, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
        for seed in range(3):
            optimizer.zero_grad()
            backward(trained(randn(6, 8, seed=seed)))
            optimizer.step()
            average.update_parameters(model if of_its_model else trained)
        found.append([*step_of(average, randn(6, 8).requires_grad_()), *average.parameters()])
        if optimise:
            made(trained)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(2))
def test_any_subset_wants_gradients(seed):
    draw = random.Random(seed)
    fast, model, exact = triple(nn.Sequential(mlp(), nn.LayerNorm(5), linear_of(5)))
    for _ in range(5):
        wanted = [draw.random() < 0.5 for _ in model.parameters()]
        of_input = draw.random() < 0.5 or not any(wanted)
        for each in (fast, model, exact):
            for parameter, needed in zip(each.parameters(), wanted, strict=True):
                parameter.requires_grad_(needed)
        for call in range(3):
            inputs = (randn(6, 8, seed=call).requires_grad_(of_input),)
            found = [step_of(fast, *inputs), step_of(model, *inputs), step_of(exact, *as_exact(inputs))]
            assert_errors_as_eagers(*found, where=f"{wanted}, {of_input}")
    assert len(made(fast)) > 2


def linear_of(features):
    return nn.Linear(features, 4)


class Adapted(nn.Module):
    """A linear layer that stays what it is, and what is learned beside it."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 16).requires_grad_(False)
        self.a, self.b = nn.Parameter(randn(8, 2)), nn.Parameter(randn(2, 16, seed=1))

    def forward(self, x):
        return F.gelu(self.fc(x) + (x @ self.a) @ self.b * 0.5)


class Shared(nn.Module):
    """Two layers with one weight, and one layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.c(F.silu(self.c(F.silu(self.b(F.silu(self.a(x)))))))


PARAMETERS = {
    "adapter": lambda: nn.Sequential(Adapted(), nn.Linear(16, 5).requires_grad_(False)),
    "shared": Shared,
    "weight_norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 16)), nn.GELU(), nn.Linear(16, 5)
    ),
    "spectral_norm": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16)), nn.GELU(), nn.Linear(16, 5)
    ),
    "the older weight_norm": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 16)), nn.GELU()),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_that_are_made_of_others_shared_or_frozen(name):
    torch.manual_seed(0)
    model = PARAMETERS[name]()
    fast = fxfuse.optimize(PARAMETERS[name]())
    fast.load_state_dict(model.state_dict())
    for call in range(5):
        x = randn(6, 8, seed=call).requires_grad_(name != "adapter")
        torch.testing.assert_close(step_of(fast, x), step_of(model, x), rtol=1e-5, atol=1e-5)
        buffers = dict(fast.named_buffers())
        for key, buffer in model.named_buffers():
            torch.testing.assert_close(buffers[key], buffer)
    if name in ("adapter", "shared"):
        made(fast)


Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Output:
    """A result, as libraries of models return it."""

    value: torch.Tensor
    loss: torch.Tensor


RESULTS = {
    "dict": (lambda y, z: {"y": y, "z": [z, None]}, lambda r: [r["y"], r["z"][0]]),
    "tuple": (lambda y, z: (y, (z, 3, "text")), lambda r: [r[0], r[1][0]]),
    "namedtuple": (lambda y, z: Pair(y, z), lambda r: [r.first, r.second]),
    "list with None": (lambda y, z: [None, y, z], lambda r: r[1:]),
    "dataclass": (lambda y, z: Output(y, z), lambda r: [r.value, r.loss]),
    "one twice": (lambda y, z: (y, z, y), lambda r: [r[0], r[1]]),
    "one without gradients": (lambda y, z: (y, z, (y > 0), z.detach() * 2), lambda r: [r[0], r[1]]),
    "a size": (lambda y, z: (y, z, y.shape, y.dtype), lambda r: [r[0], r[1]]),
}


@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)], ids=["both used", "first used", "second used"])
@pytest.mark.parametrize("name", RESULTS)
def test_kinds_of_results(name, used):
    returned, taken = RESULTS[name]
    model = Net(lambda m, x: returned(F.silu(m.a(x)), m.b(x) * x), a=linear(), b=linear())
    fast, model, exact = triple(model)
    for _ in range(4):
        found = []
        for call, dtype in ((fast, torch.float32), (model, torch.float32), (exact, torch.float64)):
            x = randn(5, 8).to(dtype).requires_grad_()
            result = call(x)
            values = [taken(result)[number] for number in used]
            gradients = torch.autograd.grad(weighed(values), [x, *call.parameters()], allow_unused=True)
            found.append((result, [*(value.detach() for value in values), *gradients]))
        have, want = (result for result, _ in found[:2])
        tensors = [each for _, each in found]
        assert type(have) is type(want)
        leaves = [pytree.tree_leaves(each) for each in (have, want)]
        for mine, eagers in zip(*leaves, strict=True):
            assert type(mine) is type(eagers)
            if isinstance(eagers, torch.Tensor):
                assert (mine.requires_grad, mine.dtype) == (eagers.requires_grad, eagers.dtype)
            elif not dataclasses.is_dataclass(eagers):
                assert mine == eagers
        # where eager has no gradients, since nobody uses a result, zeros are as good
        shapes = [next((each.shape for each in three if each is not None), ()) for three in zip(*tensors, strict=True)]
        tensors = [
            [torch.zeros(shape) if each is None else each for each, shape in zip(own, shapes, strict=True)]
            for own in tensors
        ]
        assert_errors_as_eagers(*tensors)
    if name not in ("dataclass", "namedtuple"):
        made(fast)
    if name == "one twice":
        assert have[0] is have[2]


def test_a_result_that_is_an_input():
    model = Net(lambda m, x: (x, m.fc(x).relu()), fc=linear())
    fast, model, exact = triple(model)
    for _ in range(4):
        x = randn(5, 8).requires_grad_()
        assert fast(x)[0] is x
        found = [step_of(each, given) for each, given in ((fast, x), (model, x), (exact, *as_exact((x,))))]
        assert_errors_as_eagers(*found)
    made(fast)


SHARING = {
    "a transposed view": lambda v: (v, v.t()),
    "a part": lambda v: (v, v[1:]),
    "two parts": lambda v: v.chunk(2),
}


@pytest.mark.parametrize("name", SHARING)
def test_results_that_share_memory_come_from_torch(name):
    model = Net(lambda m, x: SHARING[name](F.silu(m.fc(x))), fc=linear())
    fast, model, exact = triple(model)
    for _ in range(4):
        x = randn(6, 8).requires_grad_()
        found = [step_of(each, given) for each, given in ((fast, x), (model, x), (exact, *as_exact((x,))))]
        assert_errors_as_eagers(*found)
        first, second = fast(x)
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert refused(fast)


def test_a_view_of_the_input():
    model = Net(lambda m, x: (x.view(2, 3, 8), m.fc(x).relu()), fc=linear())
    fast = fxfuse.optimize(copy.deepcopy(model))
    for _ in range(4):
        x = randn(6, 8).requires_grad_()
        torch.testing.assert_close(step_of(fast, x), step_of(model, x))
        assert fast(x)[0].data_ptr() == x.data_ptr()
    assert refused(fast)


def assert_raises_as_eager(spoil, words, make=mlp):
    """What `spoil` does of a model and an input raises the same exception, for the same reason."""
    x = randn(6, 8).requires_grad_()
    fast = warm(fxfuse.optimize(make()), x)
    for each in (fast, make()):
        with pytest.raises(RuntimeError, match=words):
            spoil(each, as_new(x))
    made(fast)


def backward_of_what_is_gone(model, x):
    result = model(x)
    weighed(result).backward()
    weighed(result).backward()


def input_changed_before_the_backward(model, x):
    given = x * 1
    result = model(given)
    with torch.no_grad():
        given.mul_(2)
    backward(result)


def weight_changed_before_the_backward(model, x):
    result = model(x)
    with torch.no_grad():
        model[2].weight.mul_(2)
    backward(result)


FORBIDDEN = {
    backward_of_what_is_gone: "second time",
    input_changed_before_the_backward: "modified",
    weight_changed_before_the_backward: "modified",
}


@pytest.mark.parametrize("spoil", FORBIDDEN, ids=lambda spoil: spoil.__name__)
def test_what_eager_forbids(spoil):
    assert_raises_as_eager(spoil, FORBIDDEN[spoil])


def test_a_changed_result_that_the_backward_needs():
    def change(model, x):
        result = model(x)
        result.add_(1)
        backward(result)

    assert_raises_as_eager(change, "modified", lambda: nn.Sequential(mlp(), nn.Sigmoid()))


@pytest.mark.parametrize("kind", COPIES)
def test_copies_of_models_with_steps(kind):
    fast, model, exact = triple(mlp())
    warm(fast, randn(6, 8).requires_grad_())
    other = COPIES[kind](fast)
    assert not any(mine is others for mine, others in zip(fast.parameters(), other.parameters(), strict=True))
    for call in range(4):
        inputs = (randn(6, 8, seed=call).requires_grad_(),)
        expected = step_of(model, *inputs), step_of(exact, *as_exact(inputs))
        assert_errors_as_eagers(step_of(other, *inputs), *expected)
        assert_errors_as_eagers(step_of(fast, *inputs), *expected)
    assert made(other)[0] is not made(fast)[0]


def test_two_threads_train_two_copies():
    batches, target = [randn(6, 8, seed=seed) for seed in range(20)], randn(6, 5, seed=99)
    make = OPTIMIZERS["SGD"]
    eager = mlp()
    expected = losses_of(eager, make(eager.parameters()), batches, target)
    fasts, found = [fxfuse.optimize(mlp()) for _ in range(2)], {}

    def train(number):
        found[number] = losses_of(fasts[number], make(fasts[number].parameters()), batches, target)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        made(fasts[number])
        torch.testing.assert_close(found[number], expected, rtol=1e-5, atol=1e-6)


def test_two_threads_train_one_model():
    fast, model, exact = triple(mlp())
    inputs = (randn(6, 8).requires_grad_(),)
    expected, right, found = step_of(model, *inputs), step_of(exact, *as_exact(inputs)), []
    threads = [
        threading.Thread(target=lambda: found.extend(step_of(fast, *inputs) for _ in range(20))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made(fast)
    assert len(found) == 40
    for each in found:
        assert_errors_as_eagers(each, expected, right)


def test_calls_of_two_threads_that_overlap_have_steps(monkeypatch):
    fast, *_ = triple(mlp())
    inputs, caller, returned = (randn(6, 8).requires_grad_(),), threading.current_thread(), training._returned

    def overlapping(*given):
        if threading.current_thread() is caller:
            other = threading.Thread(target=step_of, args=(fast, *inputs))
            other.start()
            other.join()
        return returned(*given)

    monkeypatch.setattr(training, "_returned", overlapping)
    for _ in range(3):
        step_of(fast, *inputs)
    made(fast)


def test_a_last_smaller_batch():
    fast, model, exact = triple(nn.Sequential(mlp(), nn.BatchNorm1d(5)))
    for epoch in range(4):
        for rows in (6, 6, 6, 4):
            inputs = (randn(rows, 8, seed=epoch).requires_grad_(),)
            found = [step_of(fast, *inputs), step_of(model, *inputs), step_of(exact, *as_exact(inputs))]
            assert_errors_as_eagers(*found, where=f"{rows} rows")
            counted = [[buffer.double() for buffer in each.buffers()] for each in (fast, model, exact)]
            assert_errors_as_eagers(*counted, where=f"{rows} rows")
    made(fast)


class Switched(nn.Module):
    """Its calls depend on the mode."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).mean((-1, -2)))


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_modes(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    fast, model, exact = triple(Switched())
    stepped = 0
    for call in range(60):
        training, with_gradients = draw.random() < 0.7, draw.random() < 0.7
        inputs = (randn(draw.choice([2, 4]), 3, 6, 7, seed=call).requires_grad_(draw.random() < 0.7),)
        found = []
        for each, given in ((fast, inputs), (model, inputs), (exact, as_exact(inputs))):
            each.train(training)
            if with_gradients:
                found.append(step_of(each, *given))
            else:
                with torch.no_grad():
                    found.append([each(*given)])
        assert_errors_as_eagers(*found, where=f"call {call}: {training}, {with_gradients}")
        counted = [[buffer.double() for buffer in each.buffers()] for each in (fast, model, exact)]
        assert_errors_as_eagers(*counted, where=f"call {call}")
        steps = state_of(fast).training
        stepped += bool(steps is not None and steps.steps)
    assert stepped


# ------------------------------------------------------------------------------------------ what changes meanwhile


def assert_errors_of_calls(fast, model, exact, *inputs, **options):
    found = [step_of(fast, *inputs), step_of(model, *inputs), step_of(exact, *as_exact(inputs))]
    assert_errors_as_eagers(*found, **options)
    counted = [[buffer.double() for buffer in each.buffers()] for each in (fast, model, exact)]
    assert_errors_as_eagers(*counted, **options)


def replace_parameters(model):
    dtype = model[0].weight.dtype
    model[0].weight = nn.Parameter(randn(32, 8, seed=5).to(dtype))
    model[2].weight.data = randn(5, 32, seed=6).to(dtype)


def load_a_state(model):
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)


def hook_a_layer(model):
    model[0].register_forward_hook(lambda module, args, result: result * 2)


def hook_a_layers_gradient(model):
    model[0].register_full_backward_hook(lambda module, of_input, of_output: (of_input[0] * 2,))


def replace_a_layer(model):
    setattr(model, "1", nn.Tanh())


def freeze_a_layer(model):
    model[0].requires_grad_(False)


def other_statistics(model):
    model[3].momentum, model[3].eps = 0.7, 0.1


def evaluate_a_layer(model):
    model[3].eval()


CHANGES = [
    replace_parameters, load_a_state, hook_a_layer, hook_a_layers_gradient, replace_a_layer, freeze_a_layer,
    other_statistics, evaluate_a_layer,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_of_a_model_with_steps(change):
    models = triple(nn.Sequential(*mlp(), nn.BatchNorm1d(5)))
    for call in range(3):
        assert_errors_of_calls(*models, randn(6, 8, seed=call).requires_grad_())
    made(models[0])
    for each in models:
        change(each)
    for call in range(4):
        assert_errors_of_calls(*models, randn(6, 8, seed=call).requires_grad_(), where=f"call {call}")


def test_another_chance_of_dropout():
    fast, model, _ = triple(with_dropout())
    x = randn(6, 8).requires_grad_()
    warm(fast, x)
    for each in (fast, model):
        each[2].p = 0.9
    for _ in range(4):
        found = []
        for each in (fast, model):
            torch.manual_seed(3)
            found.append(step_of(each, x))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    made(fast)


def test_a_thread_that_comes_while_another_runs_a_steps_first_forward():
    """It finds the step prepared, and not yet how what it keeps gets to the backward."""
    fast, model, exact = triple(mlp())
    x = randn(6, 8).requires_grad_()
    warm(fast, x)
    (step,) = made(fast)
    step.ways = []
    found = [step_of(fast, x), step_of(model, x), step_of(exact, *as_exact((x,)))]
    assert_errors_as_eagers(*found)


class OfItsOwn(torch.autograd.Function):
    """A product whose gradient for the first factor is doubled."""

    @staticmethod
    def forward(ctx, one, other):
        ctx.save_for_backward(one, other)
        return one * other

    @staticmethod
    def backward(ctx, gradient):
        one, other = ctx.saved_tensors
        return gradient * other * 2, gradient * one


def test_functions_with_gradients_of_their_own():
    """Dynamo keeps what they compute as graphs in attributes."""
    torch.manual_seed(0)
    model = Net(lambda m, x: OfItsOwn.apply(F.gelu(m.one(x)), m.other(x)).relu(), one=linear(), other=linear())
    fast = torch.compile(copy.deepcopy(model), backend="fxfuse")
    for call in range(5):
        x = randn(6, 8, seed=call).requires_grad_()
        torch.testing.assert_close(step_of(fast, x), step_of(model, x), rtol=1e-5, atol=1e-6)
    (graph,) = fxfuse.backend.compiled_graphs(fast)
    assert len(state_of(graph).training.steps) == 1, state_of(graph).training.reason
    with torch.no_grad():
        for call in range(4):
            x = randn(6, 8, seed=call)
            torch.testing.assert_close(fast(x), model(x))


def chosen(m, x):
    """One of two graphs, by a value."""
    y = F.gelu(m.one(x))
    return torch.cond(y.sum() > 0, lambda y: m.other(y) * 2, lambda y: y.sin() - 1, (y,)).relu()


def attending(m, x):
    """Scores that a function changes."""
    attention = pytest.importorskip("torch.nn.attention.flex_attention")
    q, k, v = m.three(x).view(2, 16, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
    return attention.flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score - 0.1 * (i - j).abs()).relu()


TAKING_GRAPHS = {
    "cond": (Net(chosen, one=linear(), other=linear()), (4, 8), True),
    "flex_attention": (Net(attending, three=nn.Linear(32, 96)), (2, 16, 32), False),
}


@CAPTURES
@pytest.mark.parametrize("name", TAKING_GRAPHS)
def test_operators_that_take_graphs_are_torchs(name):
    """torch refuses to run most of them where their operators are watched."""
    model, shape, trains = TAKING_GRAPHS[name]
    fast = torch.compile(copy.deepcopy(model), backend="fxfuse")
    for call in range(5):
        x = randn(*shape, seed=call) - 4.0 * (call % 2)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
        if trains:
            found = [step_of(each, x.clone().requires_grad_()) for each in (fast, model)]
            torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_an_equal_chance_of_dropout_is_no_other_one():
    fast, _, _ = triple(with_dropout())
    x = randn(6, 8).requires_grad_()
    warm(fast, x)
    (step,) = made(fast)
    before = fast[2].p
    fast[2].p = float(str(before))
    assert fast[2].p is not before
    for _ in range(3):
        step_of(fast, x)
    assert made(fast) == [step]


def test_buffers_that_come_to_share_memory():
    """Kernels would overwrite one with what the other becomes."""
    fast, model, exact = triple(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()))
    for call in range(3):
        assert_errors_of_calls(fast, model, exact, randn(2, 3, 5, 6, seed=call).requires_grad_())
    made(fast)
    for each in (fast, model, exact):
        norm = each[1]
        both = torch.stack([norm.running_mean, norm.running_var])
        norm.running_mean, norm.running_var = both[0], both[0]
    for call in range(3):
        assert_errors_of_calls(fast, model, exact, randn(2, 3, 5, 6, seed=call).requires_grad_(), where=f"call {call}")
        torch.testing.assert_close(fast[1].running_var, model[1].running_var)


@pytest.mark.parametrize("name", ["transformer block", "batch norm of series"])
def test_models_in_bfloat16(name):
    make, inputs_of = MODELS[name]
    torch.manual_seed(0)
    models = triple(make().bfloat16())
    for call in range(4):
        inputs = [x.detach().bfloat16().requires_grad_() for x in inputs_of(call)]
        assert_errors_of_calls(*models, *inputs, where=f"call {call}", noise=2**-7)
    made(models[0])


def test_another_dtype_and_back():
    fast, model, exact = triple(mlp())
    x = randn(6, 8).requires_grad_()
    warm(fast, x)
    fast.double()
    for _ in range(3):
        torch.testing.assert_close(step_of(fast, *as_exact((x,))), step_of(exact, *as_exact((x,))))
    fast.float()
    for _ in range(3):
        assert_errors_of_calls(fast, model, exact, x)
    assert len(made(fast)) == 2


def test_one_tensor_twice_is_another_kind():
    models = triple(Net2(lambda m, x, y: F.silu(m.fc(x)) * y, fc=linear()))
    for same in (True, True, True, False, False, False, True, False):
        found = []
        for call in models:
            x = randn(6, 8).to(call.fc.weight.dtype).requires_grad_()
            y = x if same else (x.detach() * 2).requires_grad_()
            result = call(x, y)
            found.append(torch.autograd.grad(weighed(result), [x, call.fc.weight] if same else [x, y, call.fc.weight]))
        assert_errors_as_eagers(*found)
    assert len(made(models[0])) == 2


def test_numbers_are_constants_of_a_step():
    models = triple(Net2(lambda m, x, scale: F.silu(m.fc(x) * scale) + scale, fc=linear()))
    for scale in (0.5, 0.5, 0.5, 2, 2, 2, True, 0.5):
        found = []
        for call in models:
            x = randn(6, 8).to(call.fc.weight.dtype).requires_grad_()
            result = call(x, scale)
            found.append([result.detach(), *torch.autograd.grad(weighed(result), [x, *call.parameters()])])
        assert_errors_as_eagers(*found, where=f"{scale}")
    assert len(made(models[0])) == 2


class Counting(nn.Module):
    """Keeps a running mean of its results, which may be part of them."""

    def __init__(self, uses_it):
        super().__init__()
        self.fc, self.uses_it = linear(), uses_it
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        y = F.silu(self.fc(x))
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y + self.mean if self.uses_it else y * 2


@pytest.mark.parametrize("uses_it", [False, True], ids=["beside", "within"])
def test_buffers_that_a_model_counts_into(uses_it):
    models = triple(Counting(uses_it))
    for call in range(5):
        assert_errors_of_calls(*models, randn(6, 8, seed=call).requires_grad_(), where=f"call {call}")
    if uses_it:
        assert "buffer" in refused(models[0])
    else:
        made(models[0])


def test_channels_last():
    torch.manual_seed(0)
    fast, model, exact = triple(convolutional().to(memory_format=torch.channels_last))
    for call in range(4):
        found = []
        x = randn(4, 3, 10, 10, seed=call).to(memory_format=torch.channels_last)
        for each, given in ((fast, x), (model, x), (exact, x.double())):
            given = given.detach().requires_grad_()
            found.append(torch.autograd.grad(weighed(each(given)), [given, *each.parameters()]))
        assert_errors_as_eagers(*found)
        assert [mine.stride() for mine in found[0]] == [eagers.stride() for eagers in found[1]]
    made(fast)


def test_results_may_be_changed_in_place():
    """Also those that are views of what a kernel has computed."""
    torch.manual_seed(0)
    model = Net(lambda m, x: (m.b(torch.tanh(m.a(x))), m.b(x)[0], m.a(x).T), a=linear(), b=linear())
    fast, x = fxfuse.optimize(copy.deepcopy(model)), randn(3, 8)
    for call in (fast, fast, fast, fast, model):
        for parameter in call.parameters():
            parameter.grad = None
        results = call(x)
        for result in results:
            result.mul_(2).add_(1)
        weighed([result.square() for result in results]).backward()
    made(fast)
    for have, want in zip(fast.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(have.grad, want.grad)


def test_results_that_the_backward_takes_may_not_be_changed():
    def forward(m, x):
        y = m.a(x)
        return y[:, :2], m.b(y)

    fast, x = fxfuse.optimize(Net(forward, a=linear(), b=linear())), randn(3, 8)
    for _ in range(4):
        part, result = fast(x)
        with pytest.raises(RuntimeError, match="inplace"):
            (part.mul_(2).sum() + result.sum()).backward()
    made(fast)


def test_results_without_gradients_have_none():
    model = Net(lambda m, x: (F.silu(m.fc(x)).detach(), m.fc(x) > 0), fc=linear())
    fast = fxfuse.optimize(copy.deepcopy(model))
    for _ in range(4):
        x = randn(5, 8).requires_grad_()
        found, expected = fast(x), model(x)
        torch.testing.assert_close(found, expected)
        assert not any(each.requires_grad for each in found)
    made(fast)


# ---------------------------------------------------------------------------------------------- torch.compile


@pytest.fixture
def new_graphs():
    """Call it for the graphs that Dynamo has given the backend since the test began."""
    torch.compiler.reset()
    before = set(fxfuse.compiled_graphs())
    yield lambda: [graph for graph in fxfuse.compiled_graphs() if graph not in before]
    torch.compiler.reset()


def broken(m, x):
    y = F.silu(m.a(x))
    torch._dynamo.graph_break()
    return m.b(y) * 2


def block_of(m, x):
    return x + m.b(F.silu(m.a(x)))


def without_gradients_in_between(m, x):
    """As transformers' rotary positions are made."""
    y = F.silu(m.a(x))
    with torch.no_grad():
        gate = torch.sigmoid(m.b(y))
    return m.b(y) * gate


COMPILED = {
    # what makes the model, inputs, how many graphs have steps
    "mlp": (*MODELS["mlp"], 1),
    "transformer block": (*MODELS["transformer block"], 1),
    "convolutions": (*MODELS["convolutions"], 1),  # Dynamo's graphs change buffers that they are given
    "tied embedding": (*MODELS["tied embedding"], 1),
    "no_grad": (lambda: Net(without_gradients_in_between, a=linear(16), b=nn.Linear(16, 4)), wanting(5, 8), 1),
    "graph break": (lambda: Net(broken, a=linear(16), b=nn.Linear(16, 4)), wanting(5, 8), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
def test_what_dynamo_compiles_trains(name, new_graphs):
    make, inputs_of, graphs = COMPILED[name]
    torch.manual_seed(0)
    model = make()
    exact, fast = copy.deepcopy(model).double(), torch.compile(copy.deepcopy(model), backend="fxfuse")
    for call in range(4):
        inputs = inputs_of(call)
        found = [step_of(fast, *inputs), step_of(model, *inputs), step_of(exact, *as_exact(inputs))]
        assert_errors_as_eagers(*found, where=f"call {call}")
        counted = [[buffer.double() for buffer in each.buffers()] for each in (fast, model, exact)]
        assert_errors_as_eagers(*counted, where=f"call {call}")
    trained = [training for graph in new_graphs() if (training := state_of(graph).training) is not None]
    assert sum(bool(training.steps) for training in trained) >= graphs


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["by hooks", "by reentering"])
@pytest.mark.parametrize("compiled", [False, True], ids=["optimised", "compiled"])
def test_a_model_with_a_checkpoint_inside_trains(use_reentrant, compiled, new_graphs):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))

    def forward(m, x):
        return torch.tanh(m.c(checkpoint(m.block, m.d(x), use_reentrant=use_reentrant)))

    fast, model, exact = triple(Net(forward, block=block, c=linear(), d=linear()))
    if compiled:
        fast = torch.compile(copy.deepcopy(model), backend="fxfuse")
    for call in range(5):
        inputs, found = (randn(5, 8, seed=call).requires_grad_(),), []
        for each, (x,) in ((fast, inputs), (model, inputs), (exact, as_exact(inputs))):
            each.zero_grad()
            x = as_new(x)
            backward(each(x))  # torch.autograd.grad does not reenter
            found.append([x.grad, *all_gradients(each)])
        assert_errors_as_eagers(*found, where=f"call {call}")
    regions = [region for graph in (new_graphs() if compiled else [fast]) for region in fxfuse.explain(graph).regions]
    assert regions, "nothing of it is fused"


class Layers(nn.Module):
    """Some that compute their activations again in the backward."""

    def __init__(self, forward, checkpointed=True, **options):
        super().__init__()
        self.forward_of, self.checkpointed, self.options = forward, checkpointed, options
        self.layers = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(16, 64), "b": nn.Linear(64, 16)}) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(self.forward_of, layer, x, use_reentrant=False, **self.options)
            else:
                x = self.forward_of(layer, x)
        return x.tanh()


def gated_layer(layer, x):
    return x + layer["b"](F.silu(layer["a"](F.layer_norm(x, (16,)))))


def dropping_layer(layer, x):
    return x + layer["b"](F.dropout(layer["a"](x), 0.5))


def dynamos(fast):
    """The graphs by Dynamo of what was optimised."""
    recapture = state_of(fast).recapture
    return [] if recapture is None else list(recapture.graphs)


class ByHand(nn.Module):
    """Of which a fused child keeps other tensors than eager does."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        h = self.a(x)
        return self.b(0.5 * h * (1.0 + torch.tanh(0.8 * (h + 0.04 * h * h * h)))) + x


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["by hooks", "by reentering"])
def test_modules_under_checkpoints_keep_the_same_twice(use_reentrant):
    """Also in the call that Dynamo captures, whose backward runs them once more."""
    torch.manual_seed(0)
    model = Net(lambda m, x: [x := checkpoint(layer, x, use_reentrant=use_reentrant) for layer in m.layers][-1])
    model.layers = nn.ModuleList(ByHand() for _ in range(3))
    fast, model, exact = triple(model)
    for call in range(6):
        found = []
        for each, dtype in ((fast, torch.float32), (model, torch.float32), (exact, torch.float64)):
            each.zero_grad()
            x = randn(6, 16, seed=call).to(dtype).requires_grad_()
            backward(each(x))  # torch.autograd.grad does not reenter
            found.append([x.grad, *all_gradients(each)])
        assert_errors_as_eagers(*found, where=f"call {call}")
    skip_if_python(fast)
    made(*dynamos(fast))


def test_attention_under_a_checkpoint_is_computed_again():
    """torch's operator for it has the mark of those that draw random numbers."""

    def attend(layer, x):
        q = layer["a"](x).unflatten(-1, (4, 16)).transpose(1, 2)
        return x + layer["b"](F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    fast, model, exact = triple(Layers(attend))
    for call in range(5):
        x = randn(2, 8, 16, seed=call).requires_grad_()
        found = [step_of(fast, x), step_of(model, x), step_of(exact, *as_exact((x,)))]
        assert_errors_as_eagers(*found, where=f"call {call}")
    skip_if_python(fast)
    (step,) = made(*dynamos(fast))
    assert step.joint.kept_bytes < 4 * 2 * 8 * 16 * 4


def test_copies_that_nobody_sees_are_not_made():
    """Such as that of a dropout that drops nothing: what a product's gradients need is kept once."""
    kept = []
    for drop in (nn.Identity(), nn.Dropout(0.0)):
        torch.manual_seed(0)
        fast, model, exact = triple(Net(lambda m, x: m.drop(x.softmax(-1)) @ m.fc.weight, fc=linear(), drop=drop))
        for call in range(4):
            x = randn(32, 8, seed=call).requires_grad_()
            assert_errors_as_eagers(step_of(fast, x), step_of(model, x), step_of(exact, *as_exact((x,))))
        (step,) = made(fast)
        kept.append(step.joint.kept_bytes)
    assert kept[0] == kept[1] == 32 * 8 * 4


@pytest.mark.parametrize(
    "copied",
    [lambda x: x.clone(), lambda x: x.clone().view(-1), lambda x: x.clone().split(4, 1)[1],
     lambda x: x[1:].clone().as_strided((4, 8), (8, 1), 0)],
    ids=["itself", "a view", "a part", "a view by places"],
)  # fmt: skip
def test_copies_that_a_result_shows_are_made(copied):
    fast, model, exact = triple(Net(lambda m, x: ((h := m.fc(x).tanh()), copied(h)), fc=linear()))
    for call in range(4):
        x = randn(6, 8, seed=call).requires_grad_()
        assert_errors_as_eagers(step_of(fast, x), step_of(model, x), step_of(exact, *as_exact((x,))))
        first, second = fast(x)
        expected = second.detach().clone()
        first.data.zero_()
        torch.testing.assert_close(second.detach(), expected, rtol=0, atol=0)
    made(fast)


def test_checkpoints_are_parts_of_a_step():
    """What eager would compute again is, and no more is kept than what goes into each."""
    torch.manual_seed(0)
    kept = []
    for checkpointed in (False, True):
        fast, model, exact = triple(Layers(gated_layer, checkpointed))
        for call in range(5):
            x = randn(32, 16, seed=call).requires_grad_()
            found = [step_of(fast, x), step_of(model, x), step_of(exact, *as_exact((x,)))]
            assert_errors_as_eagers(*found, where=f"call {call}")
        skip_if_python(fast)
        (step,) = made(*(dynamos(fast) or [fast]))
        kept.append(step.joint.kept_bytes)
    own, inputs = kept[1], 2 * 32 * 16 * 4  # the first layer's is given
    assert inputs <= own < kept[0] / 4, kept
    again = [node for node in step.joint.backward.graph.nodes if node.target is torch.ops.aten.addmm.default]
    assert len(again) >= 3


@pytest.mark.parametrize(
    ("forward", "options", "reason"),
    [
        (dropping_layer, {}, "random numbers"),
        (gated_layer, {"context_fn": lambda: (contextlib.nullcontext(), contextlib.nullcontext())}, "checkpoint"),
    ],
    ids=["random numbers", "contexts of its own"],
)
def test_checkpoints_that_are_left_to_torch(forward, options, reason):
    torch.manual_seed(0)
    fast, model, exact = triple(Layers(forward, **options))
    for call in range(5):
        x, found = randn(32, 16, seed=call).requires_grad_(), []
        for each, given in ((fast, x), (model, x), (exact, x.double())):
            torch.manual_seed(call)
            found.append(step_of(each, given))
        assert_errors_as_eagers(*found, where=f"call {call}")
    steps = [state_of(graph).training for graph in (fast, *dynamos(fast)) if state_of(graph).training is not None]
    assert not any(training.steps for training in steps)
    assert all(reason in training.reason for training in steps if training.reason is not None)


def test_a_model_under_a_checkpoint_from_its_first_call_on():
    fast, model, exact = triple(mlp())
    for call in range(4):
        found = []
        for each, dtype in ((fast, torch.float32), (model, torch.float32), (exact, torch.float64)):
            each.zero_grad()
            x = randn(6, 8, seed=call).to(dtype).requires_grad_()
            backward(checkpoint(each, x, use_reentrant=False))
            found.append([x.grad, *all_gradients(each)])
        assert_errors_as_eagers(*found, where=f"call {call}")
    calls_of(fast, x.detach().float().requires_grad_())  # elsewhere it has steps


# -------------------------------------------------------------------------------------------- finite differences

POSITIVE = (0.3, 2.5)
POINTWISE = {
    # function, an interval without kinks in which it is asked
    "sin": (torch.sin, None), "exp": (torch.exp, None), "expm1": (torch.expm1, None), "erf": (torch.erf, None),
    "gelu": (F.gelu, None), "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), None), "silu": (F.silu, None),
    "mish": (F.mish, None), "softplus": (F.softplus, None), "softplus 2": (lambda x: F.softplus(x, 2, 3), POSITIVE),
    "tanh": (torch.tanh, None), "sigmoid": (torch.sigmoid, None), "elu": (F.elu, (-2.0, -0.1)),
    "selu": (F.selu, (-2.0, -0.1)), "celu": (lambda x: F.celu(x, 0.7), (-2.0, -0.1)),
    "logsigmoid": (F.logsigmoid, None), "softsign": (F.softsign, POSITIVE),
    "tanhshrink": (F.tanhshrink, None), "rsqrt": (torch.rsqrt, POSITIVE),
    "log": (torch.log, POSITIVE), "log1p": (torch.log1p, POSITIVE), "log2": (torch.log2, POSITIVE),
    "sqrt": (torch.sqrt, POSITIVE), "pow 3": (lambda x: x**3, None), "pow 1.5": (lambda x: x**1.5, POSITIVE),
    "number to the power": (lambda x: 1.5**x, None), "reciprocal": (torch.reciprocal, POSITIVE),
    "cos": (torch.cos, None), "atan": (torch.atan, None), "hardswish": (F.hardswish, (-2.5, -0.5)),
    "hardsigmoid": (F.hardsigmoid, (-2.5, -0.5)), "leaky_relu": (F.leaky_relu, (-2.5, -0.5)),
    "clamp": (lambda x: x.clamp(0.2, 3), POSITIVE), "abs": (torch.abs, (-2.5, -0.5)), "square": (torch.square, None),
    "log of softmax": (lambda x: F.log_softmax(x, -1), None), "softmax": (lambda x: F.softmax(x, 0), None),
    "mean": (lambda x: x.mean(-1), None), "var": (lambda x: x.var(-1), None), "std": (lambda x: x.std(0), None),
    "sum": (lambda x: x.sum((0, 1)), None), "logsumexp": (lambda x: x.logsumexp(-1), None),
    "cumsum": (lambda x: x.cumsum(-1), None), "prod": (lambda x: x.prod(-1), POSITIVE),
    "normalize": (lambda x: F.normalize(x, dim=-1), POSITIVE), "norm": (lambda x: x.norm(dim=-1), POSITIVE),
    "flip and roll": (lambda x: x.flip(0).roll(1, -1) * x, None), "tril": (lambda x: x.tril() * x, None),
}  # fmt: skip

MORE = {
    # function; shapes of its inputs
    "mse_loss": (F.mse_loss, [(3, 4), (3, 4)]),
    "binary_cross_entropy_with_logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), [(3, 4), (3, 4)],
    ),
    "prelu by one number": (F.prelu, [(3, 4), (1,)]),
    "mul": (lambda x, y: x * y, [(3, 4), (4,)]),
    "div": (lambda x, y: x / y.exp(), [(3, 4), (3, 1)]),
    "lerp": (lambda x, y, z: torch.lerp(x, y, z), [(3, 4), (3, 4), (3, 4)]),
    "lerp by a number": (lambda x, y: torch.lerp(x, y, 0.3), [(3, 4), (4,)]),
    "addcmul": (lambda x, y, z: torch.addcmul(x, y, z, value=0.5), [(3, 4), (3, 4), (4,)]),
    "addcdiv": (lambda x, y, z: torch.addcdiv(x, y, z.exp(), value=0.5), [(3, 4), (3, 4), (4,)]),
    "where": (lambda x, y: torch.where(x > y, x * 2, y * 3), [(3, 4), (3, 4)]),
    "pow": (lambda x, y: x.exp() ** y, [(3, 4), (3, 4)]),
    "atan2": (torch.atan2, [(3, 4), (3, 4)]),
    "hypot": (torch.hypot, [(3, 4), (3, 4)]),
    "prelu": (F.prelu, [(3, 4), (4,)]),
    "glu": (lambda x: F.glu(x, -1), [(3, 4)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), [(3, 4), (4,), (4,)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), [(3, 4), (4,)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(2, 4, 3), (4,), (4,)]),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), [(3, 4, 2), (4,), (4,)],
    ),
    "instance_norm": (lambda x: F.instance_norm(x), [(2, 3, 4)]),
    "linear": (lambda x, w, b: F.silu(F.linear(x, w, b)), [(3, 4), (5, 4), (5,)]),
    "matmul": (lambda x, y: torch.tanh(x @ y), [(2, 3, 4), (2, 4, 3)]),
    "einsum": (lambda x, y: torch.einsum("bij,kj->bki", x, y), [(2, 3, 4), (5, 4)]),
    "conv2d": (lambda x, w, b: torch.tanh(F.conv2d(x, w, b, padding=1)), [(1, 2, 4, 4), (3, 2, 3, 3), (3,)]),
    "conv1d": (lambda x, w: F.silu(F.conv1d(x, w, stride=2)), [(2, 3, 7), (4, 3, 3)]),
    "conv_transpose2d": (lambda x, w: torch.tanh(F.conv_transpose2d(x, w)), [(1, 2, 3, 3), (2, 2, 2, 2)]),
    "avg_pool2d": (lambda x: F.avg_pool2d(x * x, 2), [(1, 2, 4, 4)]),
    "interpolate": (lambda x: F.interpolate(x * x, scale_factor=2.0, mode="bilinear"), [(1, 2, 3, 3)]),
    "pad": (lambda x: F.pad(x * x, (1, 2)), [(3, 4)]),
    "attention": (F.scaled_dot_product_attention, [(1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)]),
    "huber_loss": (lambda x, y: F.huber_loss(x, y, delta=0.7), [(3, 4), (3, 4)]),
    "kl_div": (lambda x, y: F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction="sum"), [(3, 4), (3, 4)]),
    "cat and chunk": (lambda x, y: torch.cat([x.sin(), y], -1).chunk(2, -1)[1] * 2, [(3, 4), (3, 4)]),
    "index": (lambda x: x[[0, 2, 2]] * x[1], [(3, 4)]),
    "gather": (lambda x: x.gather(-1, torch.tensor([[0, 0], [3, 1], [2, 2]])) ** 2, [(3, 4)]),
    "in place": (lambda x, y: (x * y).add_(y).sigmoid_() * x, [(3, 4), (4,)]),
}  # fmt: skip


class NetOf3(Net):
    """With three inputs."""

    def forward(self, x, y, z):
        return self._forward(self, x, y, z)


def assert_gradients_are_differences(function, inputs):
    """In float64, those of a step."""
    kind = {1: Net, 2: Net2, 3: NetOf3}[len(inputs)]
    fast = warm(fxfuse.optimize(kind(lambda m, *inputs: function(*inputs))), *inputs)
    assert torch.autograd.gradcheck(fast, inputs, atol=1e-7, rtol=1e-6)
    assert len(made(fast)) == 1, "those calls were of other kinds"


@pytest.mark.parametrize("name", POINTWISE)
def test_gradients_of_pointwise_functions_are_differences(name):
    function, interval = POINTWISE[name]
    low, high = interval or (-2.0, 2.0)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(3, 4, generator=generator, dtype=torch.float64) * (high - low) + low
    assert_gradients_are_differences(function, (x.requires_grad_(),))


@pytest.mark.parametrize("name", MORE)
def test_gradients_of_functions_of_many_tensors_are_differences(name):
    function, shapes = MORE[name]
    inputs = tuple(randn(*shape, seed=seed).double().requires_grad_() for seed, shape in enumerate(shapes))
    skip_if_absent(outcome(function, *inputs))
    assert_gradients_are_differences(function, inputs)


@pytest.mark.parametrize("name", ["gelu", "softplus", "softmax", "var", "rsqrt"])
def test_second_derivatives_are_differences(name):
    function, interval = POINTWISE[name]
    low, high = interval or (-2.0, 2.0)
    x = torch.rand(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * (high - low) + low
    fast = warm(fxfuse.optimize(Net(lambda m, x: function(x))), x.requires_grad_())
    assert torch.autograd.gradgradcheck(fast, (x,), atol=1e-7, rtol=1e-6)
    assert len(made(fast)) == 1


def test_gradients_of_one_normalised_image_are_differences():
    """torch's batch normalisation on a CPU, in 2.3 to 2.13, reads such a gradient of one image in the wrong order."""
    model = Net(lambda m, x: m.norm(x).flatten(2).transpose(1, 2).tanh(), norm=nn.BatchNorm2d(3)).double()
    fast, x = fxfuse.optimize(model), randn(1, 3, 2, 4).double().requires_grad_()
    warm(fast, x)
    assert torch.autograd.gradcheck(lambda x: fast(x).contiguous(), (x,))
    assert len(made(fast)) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", [lambda m, x: m.rows(x), lambda m, x: F.group_norm(x.view(4, 6, 1), 6)])
def test_rows_of_equal_numbers_have_no_gradient(norm, dtype):
    """The same statistics are in the forward and in the backward: not rounded, since 1 / sqrt(eps) magnifies errors."""
    model = Net(lambda m, x: norm(m, F.relu(x * m.scale).to(dtype) + 1), scale=nn.Parameter(torch.ones(())),
                rows=nn.LayerNorm(1))  # fmt: skip
    fast = fxfuse.optimize(model)
    for _ in range(4):
        x = randn(4, 6, 1).requires_grad_()
        (gradient,) = torch.autograd.grad((fast(x).float() * torch.arange(6).cos()[:, None]).sum(), x)
        assert not gradient.any()
    made(fast)


def test_a_function_that_is_allowed_in_graphs_is_traced():
    def opaque(x):
        return x.sin().cumsum(0) if x.shape[0] == 4 else x

    torch.compiler.allow_in_graph(opaque)
    model = Net(lambda m, x: m.b(opaque(m.a(x.view(*x.shape[:-1], -1)).relu())), a=linear(), b=linear())
    fast, model, _ = triple(model)
    x = randn(4, 8).requires_grad_()
    for _ in range(4):
        torch.testing.assert_close(step_of(fast, x), step_of(model, x))
    skip_if_dynamo_refuses(model, x)
    made(fast)


# --------------------------------------------------------------------------------------------------- dropout


def twice_with(drawn):
    """Makes a model that draws twice in the same way."""
    return lambda: Net(lambda m, x: m.b(m.a(x).tanh() * drawn(x)).tanh() * drawn(x), a=linear(), b=linear())


DROPPING = {
    "dropout": (with_dropout, (6, 8)),
    "in place": (lambda: nn.Sequential(mlp(), nn.Dropout(0.5, inplace=True), nn.Tanh()), (6, 8)),
    "twice": (lambda: nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 16), nn.SiLU(), nn.Dropout(0.5)), (6, 8)),
    "dropout2d": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout2d(0.5)), (2, 3, 6, 6)),
    "alpha dropout": (lambda: nn.Sequential(nn.Linear(8, 16), nn.SELU(), nn.AlphaDropout(0.2)), (6, 8)),
    "rand_like": (lambda: Net(lambda m, x: m.fc(x) * torch.rand_like(x), fc=linear()), (6, 8)),
    "all": (lambda: Net(lambda m, x: F.dropout(m.fc(x), 1.0) + x * torch.rand_like(x), fc=linear()), (6, 8)),
    "uniform": (twice_with(lambda x: torch.zeros_like(x).uniform_()), (6, 8)),
    "exponential": (twice_with(lambda x: torch.ones_like(x).exponential_()), (6, 8)),
    "randn_like": (twice_with(torch.randn_like), (6, 8)),
    "gumbel": (twice_with(lambda x: F.gumbel_softmax(x.detach())), (6, 8)),
    "attention": (
        lambda: Net(lambda m, x: F.scaled_dot_product_attention(m.fc(x), x, x, dropout_p=0.3), fc=linear()), (2, 5, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_draws_what_eager_draws(name):
    make, shape = DROPPING[name]
    torch.manual_seed(0)
    fast, model, _ = triple(make())
    results = []
    for call in range(5):
        x, found = randn(*shape, seed=1).requires_grad_(), []
        for each in (fast, model):
            torch.manual_seed(call)
            first = step_of(each, x)
            found.append([*first, *step_of(each, x), torch.get_rng_state()])
        torch.testing.assert_close(found[0][:-1], found[1][:-1], rtol=1e-5, atol=1e-5)
        assert torch.equal(found[0][-1], found[1][-1]), "the generator is elsewhere afterwards"
        results += [found[0][0], found[0][len(found[0]) // 2]]
    made(fast)
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(results, 2))


def test_gradients_of_gradients_with_dropout():
    fast, model, _ = triple(with_dropout())
    x = randn(6, 8).requires_grad_()
    warm(fast, x)
    found = [gradient_penalty(each, as_new(x)) for each in (fast, model)]
    made(fast)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------- many steps


def curve(model, inputs, target, order):
    """200 losses of a copy of a model, whose batches have their samples in this order: sums in another."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for x in [inputs[number % len(inputs)] for number in range(200)]:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[order]), target[order])
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return model, torch.stack(found)


@pytest.mark.parametrize("name", ["mlp", "transformer block", "group norm"])
def test_200_losses_are_as_near_to_eagers_as_other_summation_orders(name):
    """Of smooth networks: behind kinks (max-pooling) a rounding decides where gradients go."""
    make, inputs_of = MODELS[name]
    torch.manual_seed(0)
    model, inputs = (
        make(),
        [inputs_of(seed)[0].detach().repeat(4, *[1] * (inputs_of(0)[0].dim() - 1)) for seed in range(8)],
    )
    inputs = [x + 0.1 * randn(*x.shape, seed=seed) for seed, x in enumerate(inputs)]
    target, count = randn(*model(inputs[0]).shape, seed=99), len(inputs[0])
    orders = [torch.arange(count), *(torch.randperm(count) for _ in range(6))]
    eager, *others = [curve(model, inputs, target, order)[1] for order in orders]
    trained, own = curve(fxfuse.optimize(model), inputs, target, orders[0])
    made(trained)
    spread = statistics.median(float(((other - eager) / eager).abs().max()) for other in others)
    assert eager[-8:].mean() < 0.9 * eager[:8].mean(), "it learns nothing"
    apart = float(((own - eager) / eager).abs().max())
    assert 0 < apart <= 2 * spread


# --------------------------------------------------------------------------------------- as it is on a GPU


@pytest.fixture(params=GPUS)
def gpu(request, monkeypatch):
    """A GPU, or a CPU that takes operators apart as for one, whose programs run on the emulated GPU."""
    return where_steps_are(request.param, monkeypatch)


def affine_norms():
    return nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4, affine=False),
        nn.GroupNorm(2, 4), nn.Flatten(), nn.LayerNorm(144), nn.Linear(144, 8), nn.BatchNorm1d(8), nn.GELU(),
    )  # fmt: skip


def depthwise():
    """With and without a stride; more padding than "same", none, a dilation, several filters a channel, even sides."""
    return nn.Sequential(
        nn.Conv2d(6, 6, 7, padding=3, groups=6), nn.GELU(), nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=6),
        nn.ReLU(), nn.Conv2d(6, 6, 5, padding=6, groups=6, bias=False), nn.Conv2d(6, 6, 3, groups=6),
        nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=6), nn.Conv2d(6, 12, 3, padding=1, groups=6),
        nn.Conv2d(12, 12, (4, 2), groups=12),
    )  # fmt: skip


class WrittenOut(nn.Module):
    """Attention of tokens in rows that begin anywhere."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        weights = (query @ key.transpose(-2, -1) * 0.3).softmax(-1)
        return x + self.out((weights @ value).transpose(1, 2).flatten(2)), weights.amax()


class Classified(nn.Module):
    """A loss of classes in rows that begin anywhere; some samples are ignored."""

    def __init__(self, **options):
        super().__init__()
        self.head, self.options = nn.Linear(8, 65), options
        self.register_buffer("weight", torch.rand(65) + 0.5 if options.pop("weighed", False) else None)
        self.register_buffer("targets", torch.tensor([3, 0, 64, 7, 1, 7]))

    def forward(self, x):
        scores = self.head(x)
        return F.cross_entropy(scores, self.targets, self.weight, **self.options), scores.relu()


def rows_of(*shape):
    return lambda seed: (randn(*shape, seed=seed),)


ON_A_GPU = {
    "attention written out": (WrittenOut, rows_of(3, 53, 16)),
    "rows that are given": (lambda: nn.Linear(8, 65), rows_of(600, 8)),
    "rows of a weight": (lambda: nn.Sequential(nn.Linear(67, 8), nn.Tanh()), rows_of(600, 67)),
    "classes": (Classified, rows_of(6, 8)),
    "weighed classes": (lambda: Classified(weighed=True, ignore_index=7), rows_of(6, 8)),
    "classes by sample": (lambda: Classified(reduction="none", ignore_index=0), rows_of(6, 8)),
    "a sum of classes": (lambda: Classified(reduction="sum", weighed=True, label_smoothing=0.1), rows_of(6, 8)),
    "depthwise": (depthwise, lambda seed: (randn(3, 6, 13, 14, seed=seed),)),
    "norms": (affine_norms, lambda seed: (randn(5, 4, 8, 8, seed=seed) * 3 + 1,)),
    "far from zero": (lambda: nn.BatchNorm2d(3), lambda seed: (randn(4, 3, 6, 7, seed=seed) + 30,)),
    "large images": (lambda: nn.BatchNorm2d(3), lambda seed: (randn(2, 3, 34, 45, seed=seed) + 30,)),
    "series in parts": (lambda: nn.BatchNorm1d(2), lambda seed: (randn(3, 2, 1200, seed=seed) + 30,)),
    "series of a prime length": (lambda: nn.BatchNorm1d(2), lambda seed: (randn(3, 2, 1009, seed=seed) + 1,)),
    "batch norm of series": MODELS["batch norm of series"],
    "transformer block": MODELS["transformer block"],
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", ON_A_GPU)
def test_what_a_gpu_takes_apart(name, channels_last, gpu):
    make, inputs_of = ON_A_GPU[name]
    torch.manual_seed(0)
    fast, model, exact = triple(make().to(gpu))
    for call in range(4):
        inputs = [x.detach().to(gpu) for x in inputs_of(call)]
        if channels_last and inputs[0].dim() == 4:
            inputs[0] = inputs[0].to(memory_format=torch.channels_last)
        inputs[0].requires_grad_()
        found = [step_of(fast, *inputs), step_of(model, *inputs), step_of(exact, *as_exact(inputs))]
        assert_errors_as_eagers(*found, where=f"call {call}", factor=4.0)
        counted = [[buffer.double() for buffer in each.buffers()] for each in (fast, model, exact)]
        assert_errors_as_eagers(*counted, where=f"call {call}", factor=4.0)
    made(fast)


@pytest.mark.gpu
@pytest.mark.skipif(CAPABILITY < (8, 0), reason="needs an sm_80 GPU")
@pytest.mark.parametrize(
    ("tokens", "autocast", "counts"), [(53, False, [2, 4]), (48, False, [2, 4]), (48, True, [0, 0])]
)
def test_products_of_attention_are_kernels_of_ours_on_a_gpu(tokens, autocast, counts):
    """In float32, or where rows end anywhere: all six, forward and backward."""
    model = WrittenOut().cuda()
    fast, x = fxfuse.optimize(model), randn(3, tokens, 16).cuda().requires_grad_()
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = weighed(fast(x))
        loss.backward()
    (step,) = made(fast)
    halves = [list(half.graph.nodes) for _, half in step.graphs]
    assert [[node.target is fxfuse.functional.bmm for node in nodes].count(True) for nodes in halves] == counts


def test_kernels_of_both_halves_are_compiled_together(monkeypatch):
    """At the second call, before anybody asks for a gradient: the backward waits for no compiler."""
    asked = []
    monkeypatch.setattr(plans, "_at_hand", lambda problem, strict: None)  # whatever other tests have compiled
    collect = plans.collect
    monkeypatch.setattr(plans, "collect", lambda note: collect(lambda call: (asked.append(call.region), note(call))))
    model = Net(lambda m, x: m.b(torch.tanh(m.a(x)) * 2).sigmoid() * 3, a=linear(), b=linear())
    fast, x = fxfuse.optimize(model), randn(5, 8)
    fast(x)
    asked.clear()
    result = fast(x)
    (step,) = made(fast)
    regions = [{region.number for region in state_of(half).regions} for _, half in step.graphs]
    assert all(regions) and set(asked) == regions[0] | regions[1]
    asked.clear()
    backward(result)
    assert not asked


def test_what_nobody_uses_has_no_gradient():
    torch.manual_seed(0)
    fast, model, _ = triple(Net(lambda m, x: (m.a(x), m.b(x).tanh()), a=linear(), b=linear()))
    for call in range(4):
        x = randn(5, 8, seed=call)
        for each in (fast, model):
            each.zero_grad()
            backward(each(x)[0])
        assert fast.b.weight.grad is None is model.b.weight.grad
        torch.testing.assert_close(fast.a.weight.grad, model.a.weight.grad)
    made(fast)


def test_many_gradients_at_once(recwarn):
    fast, model, _ = triple(mlp())
    warm(fast, randn(6, 8).requires_grad_())
    x = randn(6, 8).requires_grad_()
    every = torch.randn(7, *model(x).shape)
    found = [torch.autograd.grad(each(x), x, every, is_grads_batched=True)[0] for each in (fast, model)]
    torch.testing.assert_close(*found)
    assert not [each for each in recwarn if issubclass(each.category, fxfuse.FxfuseWarning)]


def test_a_kind_that_comes_after_many_others_has_a_step():
    """A call is looked at now and then only, and others, whose results lie otherwise, come in between."""
    fast, model, exact = triple(Net(lambda m, x: m.a(x).transpose(0, -1) * 2, a=linear()))
    for rows in range(1, 3 * PATIENCE):
        fast(randn(rows, 8).requires_grad_())
    for _ in range(3 * PATIENCE):
        x = randn(5, 8).requires_grad_()
        assert fast(x).stride() == model(x).stride()
    made(fast)
    found = [step_of(fast, x), step_of(model, x), step_of(exact, *as_exact((x,)))]
    assert_errors_as_eagers(*found)


def test_results_without_gradients():
    """A region is computed, and nothing that comes of it is returned; random numbers are eager's."""

    def forward(m, x):
        (m.a(x) * 2).to(torch.bfloat16)
        return m.drop(x)

    fast, model, _ = triple(Net(forward, a=linear(), drop=nn.Dropout(0.25)))
    for x in (randn(6, 8), randn(1, 8).expand(6, 8)):
        for _ in range(4):
            results = []
            for each in (fast, model):
                torch.manual_seed(0)
                results.append(each(x))
                results.append(torch.rand(2))
            assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    made(fast)


def test_kinds_that_alternate():
    """Each has a step, with results that lie as those of its own first call."""
    fast, model, exact = triple(Net(lambda m, x: m.a(x).transpose(0, -1) * 2, a=linear()))
    for _ in range(3):
        for rows in (5, 3):
            x = randn(rows, 8).requires_grad_()
            assert fast(x).stride() == model(x).stride()
            found = [step_of(fast, x), step_of(model, x), step_of(exact, *as_exact((x,)))]
            assert_errors_as_eagers(*found)
    assert len(state_of(fast).training.steps) == 2


def test_what_torch_begins_and_a_kernel_overwrites():
    """A short product stays torch's, and the pass behind it, in its place, is a kernel: memory is torch's."""
    torch.manual_seed(0)
    narrow = Net(
        lambda m, x: m.last((y := F.gelu(m.first(x))) + F.gelu(m.extra(y))),
        first=nn.Linear(8, 16), extra=nn.Linear(16, 16), last=nn.Linear(16, 4),
    )  # fmt: skip
    fast, model, exact = triple(narrow)
    for call in range(6):
        x = randn(6, 8, seed=call).requires_grad_()
        found = [step_of(fast, x), step_of(model, x), step_of(exact, *as_exact((x,)))]
        assert_errors_as_eagers(*found, where=f"call {call}")
    made(fast)


# --------------------------------------------------------------------------------------- memory that a step keeps


def wide():
    """A model whose intermediate results are large enough to be worth letting go of."""
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())))


@KNOWS_THE_LAST_BACKWARD
@pytest.mark.parametrize("is_view", [False, True])
def test_what_the_forward_kept_is_gone_after_its_last_use(is_view):
    torch.manual_seed(0)
    fast, model, exact = triple(nn.Sequential(*wide(), nn.Unflatten(1, (2, 256))) if is_view else wide())
    x = randn(1024, 512)
    warm(fast, x)
    result = fast(x)
    kept = result.grad_fn.unseen
    backward(result)
    assert sum(each.untyped_storage().nbytes() == 0 for each in kept) >= 3
    found = [step_of(fast, x), step_of(model, x), step_of(exact, *as_exact((x,)))]
    assert_errors_as_eagers(*found)


class Attention(nn.Module):
    """Queries, keys and values are views of one result; what they give is kept for two gradients, in two shapes."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).tanh()


def test_small_tensors_are_kept_in_one_allocation():
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(3)]
    fast, model, exact = triple(nn.Sequential(*parts))
    x = randn(6, 16)
    warm(fast, x)
    for _ in range(2):
        result = fast(x)
        kept = result.grad_fn.unseen
        memory = {each.untyped_storage().data_ptr() for each in kept}
        assert len(memory) < len(kept) - 3
        result.sum().backward(retain_graph=True)  # a kind of its own, whose arguments share memory
        fast.zero_grad()
        backward(result)
    found = [step_of(fast, x), step_of(model, x)]
    assert_errors_as_eagers(*found, step_of(exact, *as_exact((x,))))
    (step,) = made(fast)
    (forward,) = state_of(step.forward).programs.programs
    (shared,) = [line for line in forward.code.splitlines() if "kept = empty" in line]
    assert f"(({forward.arena_size},)" not in shared, "what is kept is no memory for results at once"


@pytest.mark.parametrize("autocast", [False, True])
def test_a_step_keeps_memory_and_no_views_of_it(autocast):
    """A view, beside what it is of, would be another owner of memory that is not lent then; each is a call of torch."""
    torch.manual_seed(0)
    fast, model, exact = triple(nn.Sequential(Attention(), Attention()))
    x = randn(2, 5, 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        warm(fast, x)
        for _ in range(6):
            result = fast(x)
            kept = result.grad_fn.unseen
            # with an older torch, what shares an allocation is a view of all of it
            assert not any(each._is_view() and each._base.dim() > 1 for each in kept)
            own = {each.data_ptr() for each in (*fast.parameters(), x, result)}
            memory = sorted((each.data_ptr(), each.nbytes) for each in kept if each.data_ptr() not in own)
            assert all(begin + size <= end for (begin, size), (end, _) in itertools.pairwise(memory))
            backward(result)
        found = [step_of(fast, x), step_of(model, x)]
    assert_errors_as_eagers(*found, step_of(exact, *as_exact((x,))))
    (step,) = made(fast)
    views = {"view", "transpose", "transpose.int", "permute", "select", "select.int", "_unsafe_view", "t"}
    for name, graph in step.graphs:
        programs = state_of(graph).programs.programs
        assert programs, name
        assert name == "backward" or not views & programs[0].calls.keys(), programs[0].calls


@pytest.mark.gpu
@pytest.mark.skipif(CAPABILITY < (8, 0), reason="needs an sm_80 GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [128, 197])
@pytest.mark.parametrize("autocast", [False, True])
def test_attention_without_a_mask_is_the_kernel_that_eager_calls(dtype, rows, autocast):
    """Nobody keeps the weights of all pairs."""
    torch.manual_seed(0)
    heads, width = 12, 64

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(heads * width, heads * width) for _ in range(3))

        def forward(self, x):
            q, k, v = (each(x).unflatten(-1, (heads, width)).transpose(1, 2) for each in (self.q, self.k, self.v))
            return x + F.scaled_dot_product_attention(q, k, v, scale=0.1).transpose(1, 2).flatten(2)

    fast, model, exact = triple(Layer().cuda().to(dtype))
    x = randn(4, rows, heads * width).cuda().to(dtype)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        warm(fast, x)
        found = [step_of(fast, x), step_of(model, x)]
    assert_errors_as_eagers(*found, step_of(exact, *as_exact((x,))))
    (step,) = made(fast)
    assert step.joint.kept_bytes < 6 * x.numel() * 4
    for name, graph in step.graphs:
        (called,) = [each for each in graph.graph.nodes if "_scaled_dot_product" in str(each.target)]
        assert "math" not in str(called.target), name


def test_what_the_backward_needs_is_computed_early():
    """torch's partitioner leaves it behind the results, so that what it is made of would be there until then."""

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            return x + F.relu(self.linear(x)).mean(-1, keepdim=True)  # the backward needs where it is above 0

    fast, model, exact = triple(nn.Sequential(*(Mean() for _ in range(8))))
    x = randn(2, 6, 16)
    warm(fast, x)
    assert_errors_as_eagers(step_of(fast, x), step_of(model, x), step_of(exact, *as_exact((x,))))
    (step,) = made(fast)
    graph = step.joint.forward.graph
    places = {node: at for at, node in enumerate(graph.nodes)}
    (end,) = (node for node in graph.nodes if node.op == "output")
    needed = {node for result in end.args[0][: step.joint.results] for node in made_of(result)}
    late = [node for node in places if node not in needed and node.op == "call_function"]
    late = [node for node in late if any(one.op == "call_function" for one in node.all_input_nodes)]
    assert len(late) > 6
    for node in late:
        behind = max(map(places.__getitem__, node.all_input_nodes))
        between = [one for one in places if behind < places[one] < places[node]]
        assert needed.isdisjoint(between), f"{node} stands behind {between}"


def test_a_part_of_much_is_kept_alone():
    """Of a large result a row is needed: the view is kept, as it may be all that is there of it."""
    fast, model, exact = triple(Net(lambda m, x: m.b(torch.tanh(m.a(x))[:, 0]).sin(), a=linear(), b=linear()))
    x = randn(6, 7, 8)
    warm(fast, x)
    found = [step_of(fast, x), step_of(model, x), step_of(exact, *as_exact((x,)))]
    assert_errors_as_eagers(*found)


SUMS = {
    "all": lambda m, x: m.fc(x) + m.p.expand(5, 8),
    "of one row": lambda m, x: m.fc(x[:1]) * m.p,
    "of a row in two dimensions": lambda m, x: m.fc(x)[None] + m.p.view(1, 1, 8),
}


@pytest.mark.parametrize("name", SUMS)
def test_gradients_that_are_sums(name):
    fast, model, exact = triple(Net(SUMS[name], fc=linear(), p=randn(8)))
    x = randn(5, 8)
    warm(fast, x)
    found = [step_of(fast, x), step_of(model, x), step_of(exact, *as_exact((x,)))]
    assert_errors_as_eagers(*found)


def test_what_somebody_else_holds_stays():
    torch.manual_seed(0)
    fast, _, _ = triple(wide())
    x = randn(1024, 512)
    warm(fast, x)
    result = fast(x)
    others = [each.detach() for each in (*result.grad_fn.saved_tensors, *result.grad_fn.unseen)]
    before = [each.clone() for each in others]
    backward(result)
    torch.testing.assert_close(others, before, rtol=0, atol=0)


def test_a_graph_that_is_kept_has_as_many_backwards_as_one_likes():
    torch.manual_seed(0)
    fast, model, exact = triple(wide())
    x = randn(1024, 512)
    warm(fast, x)
    found = []
    for each, given in ((fast, x), (model, x), (exact, x.double())):
        result = each(given)
        loss = result.square().mean()
        wanted = list(each.parameters())
        found.append([torch.autograd.grad(loss, wanted, retain_graph=again) for again in (True, True, False)])
    own, eager, expected = found
    for at in range(3):
        assert_errors_as_eagers(own[at], eager[at], expected[at], where=f"backward {at}")
    for one, other in zip(own[0], own[2], strict=True):
        torch.testing.assert_close(one, other)


@KNOWS_THE_LAST_BACKWARD
def test_a_backward_that_failed_is_not_repeated_with_what_is_left():
    torch.manual_seed(0)
    fast, _, _ = triple(wide())
    x = randn(1024, 512)
    warm(fast, x)
    (step,) = made(fast)
    result = fast(x)
    (half,) = step.backwards
    forward = half.forward

    def failing(*args):
        forward(*args)
        raise MemoryError("none left")

    half.forward = failing
    with pytest.raises(MemoryError):
        result.sum().backward(retain_graph=False)
    half.forward = forward
    with pytest.raises(fxfuse.FxfuseError, match="call the model again"):
        result.sum().backward()
    backward(fast(x))


@pytest.mark.gpu
@pytest.mark.skipif(CAPABILITY < (8, 0), reason="needs an sm_80 GPU")
def test_a_step_takes_no_more_memory_than_eagers():
    torch.manual_seed(0)
    fast, model, _ = triple(wide().cuda())
    x, most = randn(8192, 512).cuda(), []
    for each in (fast, model):
        for _ in range(4):
            each.zero_grad()
            backward(each(x))
        each.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        backward(each(x))
        most.append(torch.cuda.max_memory_allocated() - before)
    assert most[0] <= most[1] * 1.02


class OneOrMany(nn.Module):
    """That fx cannot trace, and Dynamo can; its children are graphs until then."""

    def __init__(self, captured):
        super().__init__()
        self.first, self.second = (Net(lambda m, x: m.fc(x).relu() * 2 + 1, fc=linear()) for _ in range(2))
        self.captured = captured

    def forward(self, x):
        if not self.captured and x.sum() > 1e9:
            return x
        return self.second(self.first(x) if x.shape[0] > 1 else x)


@pytest.mark.parametrize("captured", [True, False])
def test_children_of_a_model_that_dynamo_may_capture_wait_for_it(captured):
    fast, model, exact = triple(OneOrMany(captured))
    skip_if_python(fast)
    x = randn(4, 8)
    counted = []
    for _ in range(6):
        step_of(fast, x)
        counted.append([len(state_of(child).training.steps) for child in (fast.first, fast.second)])
    assert counted[:2] == [[0, 0], [0, 0]]
    assert counted[-1] == ([0, 0] if captured else [1, 1])
    assert len(made(fast)) == (1 if captured else 2)
    assert_errors_of_calls(fast, model, exact, x)


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_gradients_of_filters_lie_as_the_filters(memory_format):
    """Whatever order a library gives them in: else torch's autograd copies them, one by one."""
    fast, model, exact = triple(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU()))
    x = randn(2, 8, 9, 9).to(memory_format=memory_format)
    warm(fast, x)
    made(fast)
    gradients = torch.autograd.grad(weighed(fast(x)), list(fast.parameters()))
    assert [each.stride() for each in gradients] == [each.stride() for each in fast.parameters()]
    assert_errors_of_calls(fast, model, exact, x)


ONE_PIXEL = {  # made of 5 x 5
    "classifier of convolutions": lambda: nn.Conv2d(16, 32, 5),
    "pooling": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 32, 1)),
    "pooling by a function": lambda: nn.Sequential(
        Net(lambda m, x: F.adaptive_avg_pool2d(x, output_size=(1, 1))), nn.Conv2d(16, 32, 1)
    ),
}


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "anew"])
@pytest.mark.parametrize("name", ONE_PIXEL)
def test_one_pixel_that_is_laid_out_anew_costs_no_copies_in_the_backward(name, in_place, monkeypatch):
    monkeypatch.setattr(channels_last, "_gains", lambda x: True)
    monkeypatch.setattr(channels_last, "_elements", lambda values: math.inf)
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), ONE_PIXEL[name](), nn.ReLU(in_place),
        nn.Conv2d(32, 32, 1), nn.ReLU(in_place), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip
    fast, model, exact = triple(model)
    x = randn(3, 8, 5, 5)
    warm(fast, x)
    (step,) = made(fast)
    targets = {str(node.target) for half in (step.joint.forward, step.joint.backward) for node in half.graph.nodes}
    assert not {target for target in targets if "as_strided" in target or "new_empty" in target}
    assert_errors_of_calls(fast, model, exact, x)


def test_views_of_what_torch_traces_in_other_strides():
    """torch's trace of an indexed tensor in another order of memory has other strides than the tensor."""
    model = Net(lambda m, x: (x.swapaxes(0, 1) + 1)[:, torch.tensor([0, -1, 0])] @ m.weight)
    model.weight = nn.Parameter(randn(1, 4))
    x = randn(1, 5, 3).transpose(0, 2)
    fast, model, exact = triple(model)
    found, expected = calls_of(fast, x), step_of(model, x)
    assert_errors_as_eagers(found, expected, step_of(exact, *as_exact((x,))))
    made(fast)


def test_a_buffer_that_a_transformation_leaves_behind():
    """In eager the buffer is a tensor of torch.func's from then on."""

    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x):
            self.scale = self.scale * 0.5 + 0 * x.sum()
            return x * self.scale.detach()

    for model in (Halved(), fxfuse.optimize(Halved())):
        x, results = randn(3, 5), []
        results += [model(x) for _ in range(3)]
        results.append(torch.func.grad(lambda x, model=model: model(x).sum())(x))
        results += [model(x).detach() for _ in range(3)]
        torch.testing.assert_close(results[2], x / 8)
        torch.testing.assert_close(results[-1], x / 128)


def test_a_buffer_that_an_inference_leaves_behind():
    """Inference tensors do not count their changes."""
    model = Net(lambda m, x: m.linear(x).relu() * m.scale.sum(), linear=nn.Linear(8, 8))
    model.register_buffer("scale", torch.ones(8))
    fast, model, exact = triple(model)
    x = randn(3, 8)
    warm(fast, x)
    made(fast)
    for each in (fast, model, exact):
        with torch.inference_mode():
            each.scale = each.scale * 0.5
    for _ in range(3):
        assert_errors_of_calls(fast, model, exact, x)


class Rotated(nn.Module):
    """Positions as turns of complex numbers; the gradient of their product is one with a conjugate."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("turns", torch.polar(torch.ones(6, 4), torch.arange(24.0).view(6, 4)))

    def forward(self, x):
        x = torch.tanh(self.before(x) * 2)
        turned = torch.view_as_complex(x.view(2, 6, 4, 2)) * self.turns
        return torch.tanh(self.after(torch.view_as_real(turned).flatten(2)) * 2), turned.conj().imag


def test_complex_numbers_have_programs():
    torch.manual_seed(0)
    model, x = Rotated(), randn(2, 6, 8).requires_grad_()
    fast = fxfuse.optimize(copy.deepcopy(model))
    double = copy.deepcopy(model)
    double.turns = double.turns.to(torch.complex128)
    exact = step_of(double.double(), x.detach().double().requires_grad_())
    assert_errors_as_eagers(calls_of(fast, x, count=4), step_of(model, x), exact)
    (step,) = made(fast)
    for name, graph in step.graphs:
        assert state_of(graph).programs.programs, (name, state_of(graph).programs.reason)


class Solving(nn.Module):
    """torch's solve, inverse and Cholesky factor call operators without results, which raise what torch raises."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, square):
        y = torch.linalg.solve(square, torch.tanh(self.before(x) * 2))
        factor = torch.linalg.cholesky(square @ square.mT)
        return torch.tanh(self.after(y @ torch.linalg.inv(factor)) * 2), factor


@pytest.mark.parametrize("grad", [True, False])
def test_checks_of_torchs_raise_its_errors(grad):
    torch.manual_seed(0)
    fast, model, exact = triple(Solving())
    x, square = randn(8, 8).requires_grad_(grad), (randn(8, 8, seed=1) + 6 * torch.eye(8)).requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        for _ in range(4):
            if grad:
                assert_errors_of_calls(fast, model, exact, x, square)
            else:
                torch.testing.assert_close(fast(x, square), model(x, square))
        for each in (model, fast):
            with pytest.raises(torch.linalg.LinAlgError, match="solve"):
                each(x, torch.zeros(8, 8).requires_grad_(grad))
        torch.testing.assert_close(fast(x, square), model(x, square))
    graphs = [graph for step in made(fast) for _, graph in step.graphs] if grad else [fast]
    assert all(state_of(graph).programs.programs for graph in graphs)


def test_results_whose_gradients_are_nothing():
    """How many elements are not zero has a gradient, but nothing gets one."""
    model = Net(lambda m, x: torch.linalg.vector_norm(m.fc(x).relu(), 0) * 2, fc=linear())
    fast, x = fxfuse.optimize(copy.deepcopy(model)), randn(4, 8)
    for _ in range(4):
        expected, result = model(x), fast(x)
        assert result.requires_grad and expected.requires_grad
        torch.testing.assert_close(result, expected)
        result.backward()
        expected.backward()
        assert fast.fc.weight.grad is None and model.fc.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_that_are_zeros_without_memory(dtype):
    """torch (2.13) leaves checks in the trace of sgn's gradient that fail when they are run."""
    model = Net(lambda m, x: torch.sgn(m.fc(x) * 2) + x.abs(), fc=linear()).to(dtype)
    fast = fxfuse.optimize(copy.deepcopy(model))
    for seed in range(4):
        x = randn(4, 8, seed=seed).to(dtype).requires_grad_()
        for have, want in zip(step_of(fast, x), step_of(model, x), strict=True):
            torch.testing.assert_close(have, want)


TRANSPOSED = {
    "series": (nn.BatchNorm1d, (2, 5, 6), (1, 2)),
    "images": (nn.BatchNorm2d, (2, 4, 5, 6), (1, 3)),
    "volumes": (nn.BatchNorm3d, (2, 4, 5, 3, 6), (1, 4)),
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_dropout_behind_a_normalisation_of_transposed_values_draws_in_eagers_order(name):
    """Eager normalises into contiguous memory."""
    norm, shape, dims = TRANSPOSED[name]
    model = Net(lambda m, x: F.dropout(m.norm(x.transpose(*dims)) * 2, 0.4), norm=norm(6))
    fast = fxfuse.optimize(copy.deepcopy(model))
    for seed in range(4):
        x = randn(*shape, seed=seed)
        found = []
        for each in (fast, model):
            torch.manual_seed(seed)
            found.append(step_of(each, x))
        for have, want in zip(*found, strict=True):
            torch.testing.assert_close(have, want)
    made(fast)
