"""Tokens that are the columns of a matrix are made contiguous once, where nobody can see it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import Net, assert_as_eager, randn
from torch import nn

import fxfuse
from fxfuse import channels_last
from fxfuse.module import state_of


def transformer(m, x, embed=lambda m, x: m.conv(x).flatten(2).transpose(1, 2), leave=lambda m, x: m.norm(x)):
    x = embed(m, x)
    for _ in range(2):
        x = x + m.out(F.gelu(m.fc(m.norm(x))))
    return leave(m, x)


def model_of(**changed):
    layers = {"conv": nn.Conv2d(3, 8, 4, 4), "norm": nn.LayerNorm(8), "fc": nn.Linear(8, 16), "out": nn.Linear(16, 8)}
    token = nn.Parameter(torch.randn(1, 1, 8))
    layers["again"] = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    return Net(lambda m, x: transformer(m, x, **changed), **layers, token=token).eval()


def test_images_that_are_made_of_tokens_stay_as_they_lie():
    """As in ConvNeXt, whose normalisations are of pixels: convolutions work in channels_last there."""

    def forward(m, x):
        for _ in range(3):
            x = x + m.conv(m.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return m.norm(x.permute(0, 2, 3, 1))

    fast = fxfuse.optimize(Net(forward, conv=nn.Conv2d(8, 8, 3, padding=1), norm=nn.LayerNorm(8)).eval())
    assert not any(node.target == "contiguous" for node in fast.graph.nodes)


def with_positions(m, x):
    x = m.conv(x)
    return x.flatten(2).transpose(1, 2) + torch.arange(6).view(1, 6, 1)


def with_token(m, x):
    x = m.conv(x).flatten(2).transpose(1, 2)
    return torch.cat([m.token.expand(x.shape[0], -1, -1), x], 1)


def overwritten(m, x):
    x = m.conv(x).flatten(2).transpose(1, 2)
    x[:, 0] = 1
    return x


# how to begin and to end, and how many copies the graph has then, with the model's own
CHANGES = {
    "plain": ({}, 1),
    "permuted": ({"embed": lambda m, x: m.conv(x).flatten(2).permute(0, 2, 1)}, 1),
    "with positions": ({"embed": with_positions}, 1),
    "a mean leaves": ({"leave": lambda m, x: m.fc(x.mean(1))}, 1),
    "an image leaves": ({"leave": lambda m, x: m.norm(x).transpose(1, 2).reshape(x.shape[0], 8, 2, 3)}, 1),
    "a view of it": ({"leave": lambda m, x: m.norm(x.view(x.shape[0], 2, 3, 8)).flatten(1, 2)}, 1),
    "a view of its image": (
        {"leave": lambda m, x: m.norm(x.transpose(1, 2).view(x.shape[0], 8, 2, 3).permute(0, 2, 3, 1))},
        1,
    ),
    "an image of tokens is convolved": (
        {"leave": lambda m, x: m.norm(m.again(m.norm(x).transpose(1, 2).reshape(-1, 8, 2, 3)).permute(0, 2, 3, 1))},
        1,
    ),
    "with a token": ({"embed": with_token}, 0),
    "the stream leaves": ({"leave": lambda m, x: x}, 0),
    "part of the stream leaves": ({"leave": lambda m, x: (m.norm(x), x[:, 1])}, 0),
    "strides are asked for": ({"leave": lambda m, x: m.norm(x) + x.stride(1)}, 0),
    "what needs strides reads it": (
        {"leave": lambda m, x: (m.norm(x), x.transpose(1, 2).view(x.shape[0], 8, 2, 3).sum(1))},
        0,
    ),
    "it is overwritten": ({"embed": overwritten}, 0),
    "a copy of it is overwritten": ({"leave": lambda m, x: m.norm(x.contiguous().mul_(2) + x)}, 1),
    "two copies of it leave": ({"leave": lambda m, x: (x.contiguous(), x.contiguous())}, 2),
    "a copy of the image is overwritten": (
        {"leave": lambda m, x: m.norm(x.transpose(1, 2).contiguous().mul_(2).transpose(1, 2) + x)},
        1,
    ),
}


@pytest.fixture(params=[False, True], ids=["", "channels_last"])
def layouts(request, monkeypatch):
    """As on a CPU, and as on a GPU, where convolutions work in channels_last."""
    if request.param:
        monkeypatch.setattr(channels_last, "_gains", lambda x: True)
        monkeypatch.setattr(channels_last, "_elements", lambda values: float("inf"))


@pytest.mark.parametrize("name", CHANGES)
def test_results_and_strides_are_eagers(name, layouts):
    changed, copies = CHANGES[name]
    model = model_of(**changed)
    fast = fxfuse.optimize(model)
    assert sum(node.target == "contiguous" for node in fast.graph.nodes) == copies
    for seed in range(4):
        with torch.no_grad():
            assert_as_eager(model, fast, randn(2, 3, 8, 12, seed=seed))
    assert_as_eager(model, fast, randn(3, 3, 8, 12).to(memory_format=torch.channels_last))


EXPORTED = {
    "slice": lambda m, x: m.norm(x[:, 1:]),
    "view": lambda m, x: m.norm(x.view(x.shape[0], 2, 3, 8)),
}


@torch.no_grad()
@pytest.mark.parametrize("name", EXPORTED)
def test_operators_of_exported_programs_pass_it_on(name):
    x = randn(2, 3, 8, 12)
    program = torch.export.export(model_of(leave=EXPORTED[name]), (x,))
    targets = " ".join(str(node.target) for node in program.graph.nodes)
    if "linear" not in targets:
        pytest.skip("this torch.export takes linears apart")
    assert name in targets
    fast = fxfuse.optimize(program)
    assert sum(node.target == "contiguous" for node in fast.graph.nodes) == 1
    for _ in range(3):
        have, want = fast(x), program.module()(x)
        torch.testing.assert_close(have, want)
        assert have.stride() == want.stride()


def test_normalisations_get_what_is_contiguous(layouts, monkeypatch):
    fast = fxfuse.optimize(model_of())
    given = []
    layer_norm = F.layer_norm
    monkeypatch.setattr(F, "layer_norm", lambda x, *rest: (given.append(x.is_contiguous()), layer_norm(x, *rest))[1])
    fast.graph.eliminate_dead_code()
    with torch.no_grad():
        fast(randn(2, 3, 8, 12))
    assert given and all(given)
    assert state_of(fast).regions
