"""torch.nn's modules with attention: their products are regions, and the answer is that of torch's own forwards."""

import copy

import pytest
import torch
from helpers import ON_GPU, Net, Net2, assert_as_eager, regions
from torch import nn

import fxfuse
from fxfuse.module import state_of

SIZE = 16
SHAPES = {"batched": (3, 5, SIZE), "not batched": (5, SIZE)}
CALLS = {
    "self": lambda part, x, y: part(x, x, x, need_weights=False),
    "with weights": lambda part, x, y: part(x, x, x),
    "with each head's weights": lambda part, x, y: part(x, x, x, average_attn_weights=False),
    "cross": lambda part, x, y: part(x, y, y),
    "three tensors": lambda part, x, y: part(x, y, y * 2 + x.mean(), need_weights=False),
    "by keyword": lambda part, x, y: part(value=y, key=y, query=x, need_weights=False),
}
LAYERS = {
    "an encoder layer": lambda **options: nn.TransformerEncoderLayer(SIZE, 2, 24, 0.0, **options),
    "an encoder": lambda **options: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(SIZE, 2, 24, 0.0, **options), 2, enable_nested_tensor=False
    ),
    "an encoder with a norm": lambda **options: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(SIZE, 2, 24, 0.0, activation="gelu", **options),
        2,
        nn.LayerNorm(SIZE),
        enable_nested_tensor=False,
    ),
    "a decoder layer": lambda **options: nn.TransformerDecoderLayer(SIZE, 2, 24, 0.0, **options),
    "a decoder": lambda **options: nn.TransformerDecoder(
        nn.TransformerDecoderLayer(SIZE, 2, 24, 0.0, **options), 2, nn.LayerNorm(SIZE)
    ),
}


def attending(call, part):
    """A model whose attention is followed by a linear."""
    return Net2(lambda m, x, y: m.fc(call(m.part, x, y)[0]), part=part, fc=nn.Linear(SIZE, 8))


def whole(fast):
    """The modules with attention that are nodes."""
    kinds = nn.MultiheadAttention | nn.TransformerEncoderLayer | nn.TransformerEncoder | nn.TransformerDecoder
    return [
        node
        for node in fast.graph.nodes
        if node.op == "call_module" and isinstance(fast.get_submodule(node.target), kinds)
    ]


def inputs(shape, seed=0):
    torch.manual_seed(seed)
    return torch.randn(shape), torch.randn(shape)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("first", [True, False], ids=["batch first", "batch second"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", CALLS)
def test_attention(name, bias, first, shape):
    x, y = inputs(shape)
    model = attending(CALLS[name], nn.MultiheadAttention(SIZE, 4, bias=bias, batch_first=first)).eval()
    fast = fxfuse.optimize(model)
    assert not whole(fast)
    for _ in range(3):
        with torch.no_grad():
            assert_as_eager(model, fast, x, y)
    assert_as_eager(model, fast, x.requires_grad_(), y)


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("first", [True, False], ids=["batch first", "batch second"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["norm first", "norm last"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, norm_first, first, train):
    x, y = inputs((3, 5, SIZE))
    part = LAYERS[name](norm_first=norm_first, batch_first=first)
    call = (lambda m, x, y: m.fc(m.part(x, y))) if "decoder" in name else (lambda m, x, y: m.fc(m.part(x + y)))
    model = Net2(call, part=part, fc=nn.Linear(SIZE, 8)).train(train)
    fast = fxfuse.optimize(model)
    has_other_gelu = "norm" in name and first and not train
    assert bool(whole(fast)) == has_other_gelu
    for _ in range(3):
        with torch.no_grad():
            assert_as_eager(model, fast, x, y)


def test_gradients_are_eagers():
    x, y = inputs((3, 5, SIZE))
    model = Net2(
        lambda m, x, y: m.fc(m.part(x, y)), part=LAYERS["a decoder"](batch_first=True), fc=nn.Linear(SIZE, 8)
    ).train()
    fast = fxfuse.optimize(copy.deepcopy(model))
    exact = copy.deepcopy(model).double()
    for _ in range(3):
        for each, given in ((model, (x, y)), (fast, (x, y)), (exact, (x.double(), y.double()))):
            each.zero_grad()
            each(*given).square().sum().backward()
        for (name, have), want, right in zip(
            fast.named_parameters(), model.parameters(), exact.parameters(), strict=True
        ):
            torch.testing.assert_close(have.grad.double(), right.grad, rtol=1e-4, atol=1e-4, msg=name)
            assert have.grad.stride() == want.grad.stride()


MASKED = {
    "a mask": lambda part, x, mask: part(x, x, x, attn_mask=mask),
    "padding": lambda part, x, mask: part(x, x, x, key_padding_mask=mask[:3]),
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_masks_are_left_to_torchs_forward(name, dtype):
    mask = torch.ones(5, 5).tril_()[[4, 3, 2, 1, 0]] < 1
    mask = mask if dtype == torch.bool else torch.zeros(5, 5).masked_fill(mask, -2.0)
    model = attending(MASKED[name], nn.MultiheadAttention(SIZE, 4, batch_first=True)).eval()
    fast = fxfuse.optimize(model)
    assert len(whole(fast)) == 1
    with torch.no_grad():
        for _ in range(3):
            assert_as_eager(model, fast, inputs((3, 5, SIZE))[0], mask, exact=False)


def causal(m, x):
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    return m.fc(m.part(x, mask=mask, is_causal=True))


def test_a_causal_encoder_is_left_to_torchs_forward():
    model = Net(causal, part=LAYERS["an encoder"](batch_first=True), fc=nn.Linear(SIZE, 8)).eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for _ in range(3):
            assert_as_eager(model, fast, inputs((3, 5, SIZE))[0], exact=False)


def test_dropout_draws_eagers_numbers():
    model = attending(CALLS["self"], nn.MultiheadAttention(SIZE, 4, dropout=0.5, batch_first=True)).train()
    fast = fxfuse.optimize(model)
    assert len(whole(fast)) == 1
    for seed in range(3):
        results = []
        for each in (model, fast):
            torch.manual_seed(seed)
            results.append(each(*inputs((3, 5, SIZE), seed)))
        torch.testing.assert_close(*results)


def test_dropout_is_off_and_on_again():
    model = attending(CALLS["self"], nn.MultiheadAttention(SIZE, 4, dropout=0.5, batch_first=True)).eval()
    fast = fxfuse.optimize(model)
    assert not whole(fast)
    x, y = inputs((3, 5, SIZE))
    for train in (False, True, False, True):
        results = []
        for each in (model.train(train), fast.train(train)):
            torch.manual_seed(1)
            results.append(each(x, y))
        torch.testing.assert_close(*results)


LEAVING = {
    "as it is": lambda m, x, y: m.part(x, x, x, need_weights=False)[0],
    "in a pass": lambda m, x, y: m.part(x, y, y)[0].relu() * 2,
    "first of a sum": lambda m, x, y: m.part(x, y, y)[0] + x,
    "second of a sum": lambda m, x, y: x + m.part(x, y, y)[0],
    "normalised": lambda m, x, y: m.norm(x + m.part(x, x, x)[0]),
    "a view": lambda m, x, y: m.part(x, y, y)[0].transpose(0, 1)[1:],
}


@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "no gradients"])
@pytest.mark.parametrize("name", LEAVING)
def test_strides_that_the_caller_sees_are_eagers(name, gradients):
    """With the batch first torch's result has the length first in memory, unless it takes its fast path."""
    part = nn.MultiheadAttention(SIZE, 4, batch_first=True)
    model = Net2(LEAVING[name], part=part, norm=nn.LayerNorm(SIZE)).eval()
    fast = fxfuse.optimize(model)
    assert bool(whole(fast)) == (name not in ("second of a sum", "normalised"))
    with torch.set_grad_enabled(gradients):
        for _ in range(3):
            assert_as_eager(model, fast, *inputs((3, 5, SIZE)))


CHANGES = {
    "another projection": lambda part: setattr(
        part, "out_proj", nn.modules.linear.NonDynamicallyQuantizableLinear(SIZE, SIZE)
    ),
    "other values": lambda part: part.in_proj_weight.data.mul_(2),
    "other parameters": lambda part: setattr(part, "in_proj_weight", nn.Parameter(torch.ones(3 * SIZE, SIZE))),
    "a hook": lambda part: part.register_forward_hook(lambda module, args, result: (result[0] * 3, None)),
    "a hook inside": lambda part: part.out_proj.register_forward_pre_hook(lambda module, args: None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_after_the_trace(name):
    model = attending(CALLS["self"], nn.MultiheadAttention(SIZE, 4, batch_first=True)).eval()
    fast = fxfuse.optimize(copy.deepcopy(model))
    with torch.no_grad():
        for _ in range(3):
            assert_as_eager(model, fast, *inputs((3, 5, SIZE)), exact=False)
        for each in (model, fast):
            torch.manual_seed(1)
            CHANGES[name](each.part)
        for _ in range(3):
            assert_as_eager(model, fast, *inputs((3, 5, SIZE)), exact=False)


class Doubled(nn.MultiheadAttention):
    """A subclass with a forward of its own."""

    def forward(self, query, key, value, **options):
        result, weights = super().forward(query, key, value, **options)
        return result * 2, weights


OTHERS = {
    "a subclass": lambda: Doubled(SIZE, 4, batch_first=True),
    "other sizes": lambda: nn.MultiheadAttention(SIZE, 4, kdim=SIZE, vdim=SIZE, add_bias_kv=True, batch_first=True),
    "a zero": lambda: nn.MultiheadAttention(SIZE, 4, add_zero_attn=True, batch_first=True),
    "a parametrization": lambda: nn.utils.parametrizations.weight_norm(
        nn.MultiheadAttention(SIZE, 4, batch_first=True), "in_proj_weight"
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_modules_are_right(name):
    model = attending(CALLS["self"], OTHERS[name]()).eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for _ in range(3):
            assert_as_eager(model, fast, *inputs((3, 5, SIZE)), exact=False)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_kernels_on_a_gpu(dtype, device):
    """The residual is the output product's epilogue, and q, k and v are read where one product has written them."""
    torch.manual_seed(0)

    def forward(m, x):
        for attention, norm in zip(m.attentions, m.norms, strict=True):
            y = norm(x)
            x = x + attention(y, y, y, need_weights=False)[0]
        return m.fc(x)

    attentions = nn.ModuleList([nn.MultiheadAttention(128, 4, batch_first=True) for _ in range(2)])
    model = Net(forward, attentions=attentions, norms=nn.ModuleList([nn.LayerNorm(128) for _ in range(2)]))
    model.fc = nn.Linear(128, 8)
    model = model.eval().to(device, dtype)
    x = torch.randn(3, 37, 128, device=device, dtype=dtype)
    fast = fxfuse.optimize(model, (x,))
    with torch.no_grad():
        for _ in range(3):
            assert_as_eager(model, fast, x)
    made = state_of(fast).programs.programs[0]
    assert set(made.calls) <= {name for name in made.calls if "scaled_dot_product" in name}, made.code
    assert {region.epilogue for region in regions(fast)} >= {"acc", "o0 + acc"}
