"""Attention masks that a graph of Dynamo makes of nothing but numbers: left out where they hide nothing."""

import pytest
import torch
import torch.nn.functional as F
from helpers import Net, Net2, assert_as_eager, randn
from torch import nn

import fxfuse
from fxfuse.module import DYNAMO_KEEPS_OBJECTS, state_of
from fxfuse.patterns import masks

QUERY, OTHER = (2, 3, 6, 8), (2, 3, 5, 8)


def attention(q, k, mask, **options):
    return F.scaled_dot_product_attention(q.sin(), k, k, attn_mask=mask, **options) * 2


def positions(q, k):
    rows, columns = torch.arange(q.shape[-2]), torch.arange(k.shape[-2])
    return rows[None, None, :, None], columns[None, None, None, :]


def of_ones(m, q, k):
    """As transformers expands it: every stride is 0."""
    return torch.arange(q.shape[-2]).new_ones((), dtype=torch.bool).expand(q.shape[0], 1, q.shape[-2], k.shape[-2])


def causal(m, q, k):
    """With a question about packed sequences, whose answer is known, too."""
    rows, columns = positions(q, k)
    of = torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(q.shape[-2]).diff() != 1]).cumsum(0)
    return (columns <= rows) & (of[rows] == of[columns])


LEFT_OUT = {
    "all True": (of_ones, QUERY, QUERY, False),
    "all True, of other lengths": (of_ones, QUERY, OTHER, False),
    "all True, by one row": (lambda m, q, k: torch.ones(1, k.shape[-2], dtype=torch.bool), QUERY, OTHER, False),
    "causal": (causal, QUERY, QUERY, True),
    "causal, by tril": (lambda m, q, k: torch.ones(6, 6).tril() > 0, QUERY, QUERY, True),
    "one position sees itself": (causal, (2, 3, 1, 8), (2, 3, 1, 8), False),
}
KEPT = {
    "causal, of other lengths": (causal, QUERY, OTHER),
    "partly False": (lambda m, q, k: torch.arange(k.shape[-2])[None] > 1, QUERY, OTHER),
    "of an argument's values": (lambda m, q, k: (q.sum(-1, True) == q.sum(-1, True)) & of_ones(m, q, k), QUERY, OTHER),
    "of a buffer": (lambda m, q, k: of_ones(m, q, k) & m.seen, QUERY, OTHER),
    "random": (lambda m, q, k: torch.rand(1, k.shape[-2]) < 2, QUERY, OTHER),
    "memory as it is": (lambda m, q, k: torch.empty(1, k.shape[-2]).fill_(1) > 0, QUERY, OTHER),
    "changed in place": (
        lambda m, q, k: torch.ones(6, 5, dtype=torch.bool).logical_and_(q[0, 0, 0, 0] < 9),
        QUERY,
        OTHER,
    ),
    "numbers": (lambda m, q, k: torch.zeros(1, k.shape[-2]), QUERY, OTHER),
}


def captured(model, *inputs):
    """The arguments of attention in Dynamo's graph, after masks were left out, and the kinds of its other nodes."""
    found = []

    def backend(module, _):
        masks.leave_out_masks(module, module.graph)
        module.graph.lint()
        module.recompile()
        found.append(module.graph)
        return module

    torch._dynamo.reset()
    result = torch.compile(model, backend=backend)(*inputs)
    torch.testing.assert_close(result, model(*inputs))
    (graph,) = found
    (call,) = (node for node in graph.nodes if node.target is F.scaled_dot_product_attention)
    return masks._given(call), [str(node.target) for node in graph.nodes]


def made_with(mask, **options):
    model = Net2(lambda m, q, k: attention(q, k, mask(m, q, k), **options))
    model.register_buffer("seen", torch.ones(6, 1, dtype=torch.bool))
    return model


@pytest.mark.parametrize("name", LEFT_OUT)
def test_left_out(name):
    mask, query, key, is_causal = LEFT_OUT[name]
    given, targets = captured(made_with(mask, scale=0.5), randn(*query), randn(*key))
    assert given["attn_mask"] is None and given.get("is_causal", False) is is_causal and given["scale"] == 0.5
    assert not any("arange" in target or "ones" in target for target in targets), targets


@pytest.mark.parametrize("name", KEPT)
def test_kept(name):
    mask, query, key = KEPT[name]
    given, _ = captured(made_with(mask), randn(*query), randn(*key))
    assert given["attn_mask"] is not None and not given.get("is_causal", False)


def test_dropout_drops_what_it_would_have_dropped():
    given, _ = captured(made_with(of_ones, dropout_p=1e-30), randn(*QUERY), randn(*OTHER))
    assert given["attn_mask"] is not None


def test_a_mask_that_others_read_is_there_for_them():
    def forward(m, q, k):
        mask = causal(m, q, k)
        return attention(q, k, mask) + mask.sum()

    given, targets = captured(Net2(forward), randn(*QUERY), randn(*QUERY))
    assert given["is_causal"] and any("arange" in target for target in targets)


def test_a_wrong_shape_is_still_an_error():
    model = made_with(lambda m, q, k: torch.ones(4, 4, dtype=torch.bool))
    inputs = randn(*QUERY), randn(*OTHER)
    with pytest.raises(RuntimeError):
        model(*inputs)
    with pytest.raises(Exception, match=r"expand|shape|size|broadcast"):  # Dynamo's own, or torch's
        torch.compile(model, backend="fxfuse")(*inputs)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_values_and_gradients(name):
    mask, query, key, _ = LEFT_OUT[name]
    model = made_with(mask)
    fast = torch.compile(model, backend="fxfuse")
    with torch.no_grad():
        for seed in range(4):
            assert_as_eager(model, fast, randn(*query, seed=seed), randn(*key, seed=seed + 9))
    grads = []
    for call in (model, fast, model):
        dtype = torch.float64 if grads and call is model else torch.float32
        q, k = (randn(*shape).to(dtype).requires_grad_() for shape in (query, key))
        call(q, k).square().sum().backward()
        grads.append((q.grad, k.grad))
    for eager, ours, exact in zip(*grads, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4)
        assert (ours.double() - exact).norm() <= 4 * (eager.double() - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.parametrize("name", LEFT_OUT)
def test_steps_of_training_have_none(name):
    mask, query, key, is_causal = LEFT_OUT[name]
    torch.compiler.reset()
    before = set(fxfuse.compiled_graphs())
    fast = torch.compile(made_with(mask), backend="fxfuse")
    q, k = randn(*query).requires_grad_(), randn(*key).requires_grad_()
    for _ in range(3):
        fast(q, k).sum().backward()
    (graph,) = set(fxfuse.compiled_graphs()) - before
    (step,) = state_of(graph).training.steps
    (call,) = (node for node in step.joint.forward.graph.nodes if "scaled_dot_product" in str(node.target))
    assert call.kwargs.get("attn_mask") is None and (True in call.args[3:]) is is_causal
    assert not [node for node in step.joint.forward.graph.nodes if "arange" in str(node.target)]


@pytest.mark.skipif(not DYNAMO_KEEPS_OBJECTS, reason="models are captured whole from torch 2.6 on")
def test_a_models_mask_while_dynamo_captures_it(monkeypatch):
    """As encoders of transformers have it: none in eager, one of ones where nobody can look."""
    found, without_mask = [], masks._without_mask
    monkeypatch.setattr(masks, "_without_mask", lambda *given: found.append(without_mask(*given)) or found[-1])

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x, *_):
            q = self.fc(x.view(*x.shape[:-1], 8))
            return attention(q, q, of_ones(self, q, q) if torch.compiler.is_dynamo_compiling() else None)

    model = Encoder().eval()
    fast = fxfuse.optimize(model, (randn(*QUERY),))
    with torch.no_grad():
        for seed in range(4):
            assert_as_eager(model, fast, randn(*QUERY, seed=seed))
    assert found
    assert all(given["attn_mask"] is None for given in found)


def test_models_of_one_argument_and_no_mask_are_as_they_were():
    model = Net(lambda m, x: attention(x, x, None))
    assert_as_eager(model, fxfuse.optimize(model), randn(*QUERY))
