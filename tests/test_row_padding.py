"""Rows that products read begin at multiples of 16 bytes: what is longer then, what stays as it is, and who knows."""

import pytest
import torch
from helpers import randn
from torch.fx.experimental.proxy_tensor import make_fx

from fxfuse.row_padding import ALIGNED, pad_rows, take_padded

PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default]


def traced(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


def padded(function, *inputs, keeps_results=True):
    """The graph with gaps in it, and what `pad_rows` says of its results."""
    module = traced(function, *inputs)
    (end,) = (node for node in module.graph.nodes if node.op == "output")
    returned = pad_rows(module.graph, {*end.all_input_nodes} if keeps_results else set())
    module.graph.lint()
    module.recompile()
    expected = torch.utils._pytree.tree_leaves(function(*inputs))
    for have, want in zip(torch.utils._pytree.tree_leaves(module(*inputs)), expected, strict=True):
        assert have.shape == want.shape or not keeps_results
        torch.testing.assert_close(have[..., : want.shape[-1]], want)
        if keeps_results:
            assert have.stride() == want.stride()
    return module, returned


def matrices_of(module, *inputs):
    """What products are really given when the graph runs."""
    found = []

    class Noting(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if target in PRODUCTS:
                found.extend(args[-2:])
            return super().call_function(target, args, kwargs)

    Noting(module).run(*inputs)
    return found


def begin_aligned(matrix):
    stride = max(matrix.stride()[-2:]) * matrix.element_size()
    return stride % ALIGNED == 0


def attention(scores, values):
    return scores.softmax(-1) @ values


def gradient(x, y):
    made = x.exp()
    return made.t() @ y, made.sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (attention, ((2, 3, 53, 53), (2, 3, 53, 8))),
        (attention, ((40, 197), (197, 24))),
        (gradient, ((24, 101), (24, 16))),
        (lambda x, y: torch.addmm(y, x.tanh(), x.tanh().t()), ((24, 101), (24, 24))),
    ],
)
def test_what_loops_make_has_gaps(function, shapes, dtype):
    inputs = [randn(*shape, seed=seed).to(dtype) for seed, shape in enumerate(shapes)]
    first, _ = matrices_of(padded(function, *inputs)[0], *inputs)[:2]
    assert begin_aligned(first)
    assert not begin_aligned(matrices_of(traced(function, *inputs), *inputs)[0])


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, y: x.exp() @ y, ((20, 64), (64, 16))),  # rows are aligned
        (lambda x, y: x.exp() @ y, ((20, 9), (9, 16))),  # short ones: a third as long again
        (lambda x, y: x @ y, ((20, 101), (101, 16))),  # given, and read once
        (lambda x, y: (x.exp(), x.exp() @ y)[::-1], ((20, 101), (101, 16))),
        (lambda x, y: (x.exp().view(-1), x.exp().view(-1).view(20, 101) @ y), ((20, 101), (101, 16))),
        # no view for autograd, but it shares the memory
        (lambda x, y: (torch.ops.aten._unsafe_view(x.exp(), [10, 202]), x.exp() @ y), ((20, 101), (101, 16))),
    ],
)
def test_what_stays_as_it_is(function, shapes):
    inputs = [randn(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    module = traced(function, *inputs)
    (end,) = (node for node in module.graph.nodes if node.op == "output")
    before = str(module.graph)
    shared = [node for node in module.graph.nodes if node.target is torch.ops.aten.exp.default]
    for node in shared[1:]:  # one value, as AOTAutograd leaves it
        node.replace_all_uses_with(shared[0])
        module.graph.erase_node(node)
    before = str(module.graph)
    assert pad_rows(module.graph, {*end.all_input_nodes}) == {} and str(module.graph) == before


def test_what_is_given_is_copied_where_products_multiply_it_often():
    x, y = randn(20, 101), randn(101, 512)
    assert begin_aligned(matrices_of(padded(torch.mm, x, y)[0], x, y)[0])


@pytest.mark.parametrize("is_viewed", [False, True])
def test_who_is_given_a_result_with_gaps_knows_it(is_viewed):
    """Where no view of it is possible it is copied."""

    def forward(x, y):
        made = x.exp()
        return made @ y, made

    def backward(made, z):
        return (made.view(-1) if is_viewed else made.view(2, 10, 101)).clone(), made.t() @ z

    x, y, z = randn(20, 101), randn(101, 16), randn(20, 16)
    first, returned = padded(forward, x, y, keeps_results=False)
    (name,) = returned
    assert returned[name].shape == (20, 104)
    second = traced(backward, x, z)
    given = next(iter(second.graph.nodes))
    given.name = name
    take_padded(second.graph, {name: returned[name]})
    second.recompile()
    made = first(x, y)[1]
    assert made.shape == given.meta["val"].shape and not made._is_view()
    torch.testing.assert_close(second(made, z), backward(made[:, :101].contiguous(), z))
