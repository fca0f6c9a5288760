"""torch.nn's modules with attention: their products are regions, and the answer is that of torch's own forwards."""

import copy

import pytest
import torch
from helpers import ON_GPU, Net, Net2, assert_as_eager, regions
from torch import nn

import fxfuse
from fxfuse import attention_modules
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
    "an encoder and a decoder": lambda **options: nn.Transformer(SIZE, 2, 1, 1, 24, 0.0, **options),
}


def attending(call, part):
    """A model whose attention is followed by a linear."""
    return Net2(lambda m, x, y: m.fc(call(m.part, x, y)[0]), part=part, fc=nn.Linear(SIZE, 8))


def whole(fast):
    """The modules with attention that are nodes."""
    kinds = tuple(attention_modules._FORWARDS)
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


@pytest.mark.parametrize("read", [True, False], ids=["read", "not read"])
def test_weights_that_nobody_reads_are_not_computed(read):
    """Most models call attention with torch's default, which asks for weights, and drop them."""
    part = nn.MultiheadAttention(SIZE, 4, batch_first=True)
    model = Net(lambda m, x: m.fc(m.part(x, x, x)[0]) + (m.part(x, x, x)[1].sum() if read else 0), part=part)
    model.fc = nn.Linear(SIZE, 8)
    fast = fxfuse.optimize(model.eval())
    targets = [str(node.target) for node in fast.graph.nodes]
    assert any("softmax" in target for target in targets) == read
    assert sum("scaled_dot" in target for target in targets) == 1 + read
    with torch.no_grad():
        for _ in range(3):
            assert_as_eager(model, fast, inputs((3, 5, SIZE))[0])


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


def hidden(*shape):
    """A mask that hides some keys of each query, but not all."""
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False
    return mask


MASKED = {
    "a mask": lambda part, x, mask: part(x, x, x, attn_mask=mask[0], need_weights=False),
    "a mask and weights": lambda part, x, mask: part(x, x, x, attn_mask=mask[0]),
    "a mask for each head": lambda part, x, mask: part(x, x, x, attn_mask=mask, need_weights=False),
    "padding": lambda part, x, mask: part(x, x, x, key_padding_mask=mask[0, :3]),
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["batch first", "batch second"])
@pytest.mark.parametrize("name", MASKED)
def test_masks(name, first, dtype):
    x, _ = inputs((3, 5, SIZE) if first else (5, 3, SIZE))
    mask = hidden(12, 5, 5)
    mask = mask if dtype == torch.bool else torch.randn(12, 5, 5).masked_fill(mask, -torch.inf)
    model = attending(MASKED[name], nn.MultiheadAttention(SIZE, 4, batch_first=first)).eval()
    fast = fxfuse.optimize(model)
    assert len(whole(fast)) == (name == "padding")
    with torch.no_grad():
        for _ in range(3):
            assert_as_eager(model, fast, x, mask, exact=False)
    assert_as_eager(model, fast, x.requires_grad_(), mask, exact=False)


PADDED = {
    "attention": (lambda **options: nn.MultiheadAttention(SIZE, 4, **options), lambda part, x, mask: part(
        x, x, x, key_padding_mask=mask, need_weights=False
    )[0]),
    "a layer": (LAYERS["an encoder layer"], lambda part, x, mask: part(x, src_key_padding_mask=mask)),
    "an encoder": (LAYERS["an encoder"], lambda part, x, mask: part(x, src_key_padding_mask=mask)),
    "a nested encoder": (
        lambda **options: nn.TransformerEncoder(nn.TransformerEncoderLayer(SIZE, 2, 24, 0.0, **options), 2),
        lambda part, x, mask: part(x, src_key_padding_mask=mask),
    ),
}  # fmt: skip
"""Modules with attention, and calls with a mask of what is padded."""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("padded", [1, 3, 5], ids=["one", "three", "all"])
@pytest.mark.parametrize("first", [True, False], ids=["batch first", "batch second"])
@pytest.mark.parametrize("name", PADDED)
def test_padding(name, first, padded, device):
    """Without gradients torch's operators leave zeros where something is padded, and NaN where all is."""
    make, call = PADDED[name]
    model = Net2(lambda m, x, mask: m.fc(call(m.part, x, mask)), part=make(batch_first=first), fc=nn.Linear(SIZE, 8))
    model = model.eval().to(device)
    fast = fxfuse.optimize(model)
    x = inputs((3, 5, SIZE) if first else (5, 3, SIZE))[0].to(device)
    mask = torch.zeros(3, 5, dtype=torch.bool, device=device)
    mask[1, 5 - padded :] = True
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            for _ in range(4):
                assert_as_eager(model, fast, x, mask, exact=False)


@pytest.mark.parametrize("each", [True, False], ids=["for each head", "for all"])
def test_masks_of_what_is_not_batched(each):
    model = attending(MASKED["a mask for each head" if each else "a mask"], nn.MultiheadAttention(SIZE, 4)).eval()
    fast = fxfuse.optimize(model)
    assert not whole(fast)
    assert_as_eager(model, fast, inputs((5, SIZE))[0], hidden(4, 5, 5), exact=False)


def test_a_mask_that_torch_refuses_is_refused():
    model = attending(MASKED["a mask"], nn.MultiheadAttention(SIZE, 4)).eval()
    for mask in (torch.zeros(1, 5, 5, dtype=torch.int), torch.zeros(1, 4, 4)):
        assert_as_eager(
            model, fxfuse.optimize(model), inputs((5, 3, SIZE))[0], mask, raises=(AssertionError, RuntimeError)
        )
    causal = attending(lambda part, x, y: part(x, x, x, is_causal=True), nn.MultiheadAttention(SIZE, 4)).eval()
    assert_as_eager(causal, fxfuse.optimize(causal), *inputs((5, 3, SIZE)), raises=RuntimeError)


@pytest.mark.parametrize("first", [True, False], ids=["batch first", "batch second"])
@pytest.mark.parametrize("shapes", [[(3, 5), (1, 5)], [(3, 5), (3, 1)], [(5,), (1, 5)], [(1, 5), (5,)]], ids=str)
def test_what_does_not_fit_together_is_refused(shapes, first):
    model = attending(CALLS["cross"], nn.MultiheadAttention(SIZE, 4, batch_first=first)).eval()
    fast = fxfuse.optimize(model)
    x, y = (torch.randn(*shape, SIZE) for shape in shapes)
    fits = shapes == [(3, 5), (3, 1)] if first else shapes == [(3, 5), (1, 5)]
    if fits:
        assert_as_eager(model, fast, x, y)
    else:
        with pytest.raises((AssertionError, RuntimeError)):
            model(x, y)
        with pytest.raises(RuntimeError, match="do not fit together"):
            fast(x, y)


CAUSAL = {
    "told": lambda m, x, mask: m.fc(m.part(x, mask=mask, is_causal=True)),
    "not told": lambda m, x, mask: m.fc(m.part(x, mask=mask)),
    "made": lambda m, x, y: m.fc(m.part(x, mask=nn.Transformer.generate_square_subsequent_mask(5))),
    "decoded": lambda m, x, mask: m.fc(m.other(x, x * 2, tgt_mask=mask)),
    "decoded, told": lambda m, x, mask: m.fc(m.other(x, x * 2, tgt_mask=mask, tgt_is_causal=True)),
    "translated": lambda m, x, mask: m.fc(m.both(x, x * 2, mask, mask, mask)),
    "translated, padded": lambda m, x, mask: m.fc(m.both(x, x, src_key_padding_mask=mask[:3].isinf(), tgt_mask=mask)),
    "decoded, hidden": lambda m, x, mask: m.fc(m.other(x, x * 2, mask, memory_mask=mask)),
}


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("first", [True, False], ids=["batch first", "batch second"])
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_layers(name, first, train):
    parts = {"part": LAYERS["an encoder"](batch_first=first), "other": LAYERS["a decoder"](batch_first=first)}
    both = LAYERS["an encoder and a decoder"](batch_first=first)
    model = Net2(CAUSAL[name], **parts, both=both, fc=nn.Linear(SIZE, 8)).train(train)
    fast = fxfuse.optimize(model)
    assert len(whole(fast)) == ("padded" in name)
    x, mask = inputs((3, 5, SIZE) if first else (5, 3, SIZE))[0], nn.Transformer.generate_square_subsequent_mask(5)
    with torch.no_grad():
        for _ in range(3):
            assert_as_eager(model, fast, x, mask, exact=False)
    assert_as_eager(model, fast, x.requires_grad_(), mask, exact=False)


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


def functions(model):
    """torch's functions for attention and encoder layers that are left in the graphs which Dynamo captured."""
    graphs = fxfuse.compiled_graphs(model)
    assert graphs
    return [node.target for fast in graphs for node in fast.graph.nodes if node.target in attention_modules._FUNCTIONS]


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield lambda model: torch.compile(model, backend="fxfuse")
    torch._dynamo.reset()


def assert_as_eager_with_gradients(model, fast, *inputs):
    """Results in both modes, and gradients of the parameters."""
    for _ in range(3):
        with torch.no_grad():
            assert_as_eager(model, fast, *inputs, exact=False)
    for _ in range(3):
        gradients = []
        for each in (model, fast):
            model.zero_grad()
            each(*inputs).square().sum().backward()
            gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        for name, want in gradients[0].items():
            torch.testing.assert_close(gradients[1][name], want, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("first", [True, False], ids=["batch first", "batch second"])
@pytest.mark.parametrize("name", [*CALLS, *(name for name in MASKED if name != "padding")])
def test_attention_in_dynamos_graphs(name, first, compiled):
    x, y = inputs((3, 5, SIZE) if first else (5, 3, SIZE))
    y = hidden(12, 5, 5) if name in MASKED else y
    call = MASKED.get(name) or CALLS[name]
    model = attending(call, nn.MultiheadAttention(SIZE, 4, batch_first=first)).eval()
    fast = compiled(model)
    assert_as_eager_with_gradients(model, fast, x, y)
    assert not functions(model)


@pytest.mark.parametrize("norm_first", [True, False], ids=["norm first", "norm last"])
@pytest.mark.parametrize("name", ["an encoder layer", "an encoder", "an encoder with a norm", "a decoder"])
def test_layers_in_dynamos_graphs(name, norm_first, compiled):
    x, y = inputs((3, 5, SIZE))
    part = LAYERS[name](norm_first=norm_first, batch_first=True)
    call = (lambda m, x, y: m.fc(m.part(x, y))) if "decoder" in name else (lambda m, x, y: m.fc(m.part(x + y)))
    model = Net2(call, part=part, fc=nn.Linear(SIZE, 8)).eval()
    fast = compiled(model)
    assert_as_eager_with_gradients(model, fast, x, y)
    left = set(functions(model))
    assert not left or ("norm" in name and left == {torch._transformer_encoder_layer_fwd}), "gelu by tanh"


def test_parts_in_dynamos_graphs_know_the_models_line(compiled):
    model = attending(CALLS["self"], nn.MultiheadAttention(SIZE, 4, batch_first=True)).eval()
    with torch.no_grad():
        compiled(model)(*inputs((3, 5, SIZE)))
    (fast,) = fxfuse.compiled_graphs(model)
    (attention,) = (node for node in fast.graph.nodes if "scaled_dot" in str(node.target))
    assert __file__ in attention.meta["stack_trace"]


LEFT = {
    "padding": lambda part, x, mask: part(x, x, x, key_padding_mask=mask),
    "the caller sees it": lambda part, x, mask: part(x, x * 2, x * 2),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_in_dynamos_graphs(name, compiled):
    part = nn.MultiheadAttention(SIZE, 4, batch_first=True)
    model = Net2(lambda m, x, mask: LEFT[name](m.part, x, mask)[0] * 2, part=part).eval()
    fast = compiled(model)
    assert_as_eager_with_gradients(model, fast, inputs((3, 5, SIZE))[0], hidden(3, 5))


def test_attention_of_what_fx_cannot_trace():
    """The whole model is captured by Dynamo."""

    def forward(m, x):
        y = CALLS["self"](m.part, x, x)[0]
        return m.fc(y) if y.shape[0] > 2 else y.sum()

    model = Net(forward, part=nn.MultiheadAttention(SIZE, 4, batch_first=True), fc=nn.Linear(SIZE, 8)).eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for _ in range(6):
            assert_as_eager(model, fast, inputs((3, 5, SIZE))[0], exact=False)


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
