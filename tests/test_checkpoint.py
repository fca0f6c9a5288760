"""Activations that a model does not keep are not kept for it: torch.utils.checkpoint, also with Dropout inside."""

import copy
import functools
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import randn, skip_if_python
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fxfuse
from fxfuse.backend import compile_graph
from fxfuse.module import state_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 64), nn.Linear(64, 8), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.down(F.silu(self.up(x))))


class CallingBlock(Block):
    """As the layers of transformers have had it."""

    def __call__(self, *args, **kwargs):
        call = partial(super().__call__, **kwargs)
        return checkpoint(call, *args, use_reentrant=False) if self.training else call(*args)


class Network(nn.Module):
    def __init__(self, way, block=Block):
        super().__init__()
        self.blocks = nn.Sequential(*(block() for _ in range(3)))
        self.head = nn.Linear(8, 8)
        self.way = way

    def forward(self, x):
        return F.relu(self.head(self.way(self.blocks, x)))


def each(blocks, x, **options):
    for block in blocks:
        x = checkpoint(block, x, **options)
    return x


def plain(blocks, x):
    for block in blocks:
        x = block(x)
    return x


WAYS = {
    "saved tensor hooks": lambda: Network(partial(each, use_reentrant=False)),
    "reentrant": lambda: Network(partial(each, use_reentrant=True)),
    "in sequence": lambda: Network(lambda blocks, x: checkpoint_sequential(blocks, 2, x, use_reentrant=False)),
    "a __call__ of the layer": lambda: Network(plain, CallingBlock),
    "a __call__ of the model": CallingBlock,
    "inside a model": lambda: nn.Sequential(Network(partial(each, use_reentrant=False)), nn.Linear(8, 8), nn.Tanh()),
    "none": lambda: Network(plain),
}


def step(model):
    """Result and gradients of a training step, and the bytes of activations that it kept for the latter."""
    torch.manual_seed(0)
    model.zero_grad()
    x = randn(6, 8).requires_grad_()
    kept = {}

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    y.square().sum().backward()
    return [y, x.grad, *(parameter.grad for parameter in model.parameters())], sum(kept.values())


def assert_same_step(model, fast, keeps=True):
    (actual, kept), (expected, eager_kept) = step(fast), step(model)
    torch.testing.assert_close(actual, expected)
    assert kept <= 1.1 * eager_kept or not keeps


@functools.cache
def dynamo_keeps_what_eager_keeps():
    """Whether a graph of Dynamo, run as it is, keeps no more than the model; in torch 2.3 it keeps the weights, too."""
    model = WAYS["none"]().train()
    return step(torch.compile(model, backend="eager"))[1] <= 1.1 * step(model)[1]


@pytest.mark.parametrize("name", WAYS)
def test_training_keeps_what_eager_keeps(name):
    model = WAYS[name]().train()
    fast = fxfuse.optimize(copy.deepcopy(model))
    reason = {"none": None, "reentrant": "switches autocast or gradients"}.get(name, "checkpoint")
    reasons = [item.reason for item in fxfuse.explain(fast).skipped if "runs as Python" in item.reason]
    assert any(reason in text for text in reasons) if reason else not reasons
    assert_same_step(model, fast)
    assert_same_step(model, copy.deepcopy(fast))
    for training in (False, True):
        model.train(training), fast.train(training)
    assert_same_step(model, fast)


def test_what_is_around_a_checkpoint_is_fused():
    fast = fxfuse.optimize(WAYS["inside a model"]().train())
    assert "tanh(acc)" in [region.epilogue for region in fxfuse.explain(fast).regions]
    fast = fxfuse.optimize(WAYS["a __call__ of the layer"]().train())
    assert "relu(acc)" in [region.epilogue for region in fxfuse.explain(fast).regions]


@pytest.mark.parametrize("name", WAYS)
def test_dynamos_graphs_recompute(name):
    torch.compiler.reset()
    model = WAYS[name]().train()
    before = set(fxfuse.compiled_graphs())
    compiled = torch.compile(copy.deepcopy(model), backend=compile_graph)
    assert_same_step(model, compiled, dynamo_keeps_what_eager_keeps())
    regions = [
        region for graph in fxfuse.compiled_graphs() if graph not in before for region in fxfuse.explain(graph).regions
    ]
    assert "silu(acc)" in [region.epilogue for region in regions]


class Transparent(nn.Module):
    """Its class changes what a call of it is."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def __call__(self, x):
        return super().__call__(x * 2) + 1

    def forward(self, x):
        return F.relu(self.fc(x))


@pytest.mark.parametrize("make", [Transparent, lambda: nn.Sequential(Transparent(), Transparent())])
def test_a_call_of_the_class_is_part_of_the_model(make):
    model = make().eval()
    calls = []
    model.register_forward_hook(lambda *args: calls.append(args))
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        torch.testing.assert_close(fast(randn(3, 8)), model(randn(3, 8)))
    assert len(calls) == 2 and fxfuse.explain(fast).regions


def test_dynamo_may_be_imported_in_the_middle_of_a_trace():
    """torch.utils.checkpoint imports it. It notes Python's functions, of which a trace replaces one."""
    program = """
import sys, torch, fxfuse
from torch import nn
from torch.utils.checkpoint import checkpoint

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(self.a, x, use_reentrant=False)

assert "torch._dynamo" not in sys.modules
fxfuse.optimize(Model())
if "torch._dynamo" not in sys.modules:
    sys.exit()  # torch 2.3 imports it elsewhere
twice = torch.compile(lambda x: x * 2 if isinstance(x, torch.Tensor) else x, fullgraph=True, backend="eager")
assert twice(torch.ones(1)).item() == 2
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_transformers_with_checkpoints_train(name):
    """Layers whose own `__call__` checkpoints them; also in the call that Dynamo captures, whose backward runs them
    once more."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "GPT2LMHeadModel": {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "resid_pdrop": 0,
            "embd_pdrop": 0,
            "attn_pdrop": 0,
        },
        "LlamaForCausalLM": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
    }[name]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(vocab_size=100, use_cache=False, bos_token_id=0, eos_token_id=0, **sizes)).train()
    model.gradient_checkpointing_enable()
    exact, fast = copy.deepcopy(model).double(), fxfuse.optimize(model)
    for call in range(6):
        x = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(call))
        for each in (exact, fast):
            each.zero_grad()
            each(x).logits.square().mean().backward()
        for have, want in zip(model.parameters(), exact.parameters(), strict=True):
            assert float((have.grad - want.grad).norm()) <= 1e-5 * float(want.grad.norm())
    skip_if_python(fast)
    recapture = state_of(fast).recapture
    assert recapture.graphs, recapture.reason
    (graph,) = recapture.graphs
    assert state_of(graph).training.steps
