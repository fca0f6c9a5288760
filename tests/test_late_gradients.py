"""The order in which a backward computes large gradients."""

import copy

import torch
from helpers import Net, randn
from test_training import calls_of, made, step_of
from torch import fx, nn

import fxfuse
from fxfuse.joint import results_of
from fxfuse.late_gradients import late
from fxfuse.program.memory import SMALL


def as_meta(*shape):
    return torch.empty(shape, device="meta")


def backward(kept, of_weight, rows):
    """A graph that reads `kept`, large tensors, one after the other, and begins with the gradient of a weight.

    Args:
        kept: the elements of each.
        of_weight: the sizes of the weight.
        rows: how many rows its gradient is made of.
    """
    graph, features = fx.Graph(), of_weight[1]
    tangent, x, *others = (graph.placeholder(name) for name in ("tangent", "x", *(f"kept{at}" for at in range(kept))))
    sizes = (rows, of_weight[0]), (rows, features), *((SMALL,) for _ in others)
    for node, size in zip((tangent, x, *others), sizes, strict=True):
        node.meta["val"] = as_meta(*size)

    def call(overload, *args):
        node = graph.call_function(overload, args)
        node.meta["val"] = overload(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args))
        return node

    aten = torch.ops.aten
    weights = call(aten.mm.default, call(aten.t.default, tangent), x)
    total = call(aten.sum.default, tangent)
    for each in others:
        total = call(aten.add.Tensor, total, call(aten.sum.default, each))
    graph.output((weights, total))
    return graph, {x, *others}


def order_of(graph, freed):
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    return nodes, late(nodes, results_of(graph), freed)


def test_what_is_made_of_little_waits_until_the_rest_is_freed():
    nodes, found = order_of(*backward(4, (1024, 2048), rows=2))
    assert [str(node.target) for node in found[-2:]] == ["aten.t.default", "aten.mm.default"], "with its own view"
    assert found == nodes[2:] + nodes[:2], "the others keep their order"


def test_the_order_stays_where_nothing_is_freed_in_the_meantime():
    nodes, found = order_of(*backward(0, (1024, 2048), rows=2))
    assert found == nodes


def test_small_gradients_come_at_once():
    nodes, found = order_of(*backward(4, (8, 8), rows=2))
    assert found == nodes


def test_a_gradient_that_others_read_comes_before_them():
    graph, freed = backward(4, (1024, 2048), rows=2)
    (end,) = (node for node in graph.nodes if node.op == "output")
    weights, total = end.args[0]
    with graph.inserting_before(end):
        norm = graph.call_function(torch.ops.aten.sum.default, (weights,))
    norm.meta["val"] = as_meta()
    end.args = ((weights, norm, total),)
    nodes, found = order_of(graph, freed)
    assert found == nodes


def test_a_step_computes_a_classifiers_gradient_last():
    """Its values are eager's, however often."""

    def forward(m, x):
        for _ in range(6):
            x = m.hidden(x).tanh()
        return m.classifier(x.mean(0, keepdim=True))

    model = Net(forward, hidden=nn.Linear(64, 64), classifier=nn.Linear(64, 2**15))
    fast, x = fxfuse.optimize(copy.deepcopy(model)), randn(8192, 64).requires_grad_()
    for one, other in zip(calls_of(fast, x, count=4), step_of(model, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    (step,) = made(fast)
    (segment,) = step.segments
    products = [node for node in segment.graph.graph.nodes if node.target is torch.ops.aten.mm.default]
    assert tuple(products[-1].meta["val"].shape) in {(64, 2**15), (2**15, 64)}
