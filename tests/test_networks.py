"""Networks from transformers, with random weights: what is fused is what runs, and the outputs are eager's."""

import copy

import pytest
import torch
from helpers import outcome, randn
from torch import nn

import fxfuse

transformers = pytest.importorskip("transformers")


def resnet50():
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=10))


def mobilenet_v2(**options):
    config = transformers.MobileNetV2Config(num_labels=10, image_size=64, **options)
    return transformers.MobileNetV2ForImageClassification(config)


def randomised(model):
    """Evaluation mode, with batch statistics that matter."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)
    return model.eval()


NETWORKS = {
    "ResNet-50": (resnet50, 53, 53),
    "MobileNetV2": (mobilenet_v2, 52, 52),  # pads by the input's size, which Dynamo knows
    "MobileNetV2 with fixed padding": (lambda: mobilenet_v2(tf_padding=False), 52, 52),
}
"""Name: the model, how many convolutions it has, and how many of them are fused."""


def assert_within_twice_eagers_error(model, fast, *inputs):
    """Give or take an ulp."""
    found = fxfuse.verify(model, fast, inputs)
    assert found.ok, found
    assert found.error <= 2 * found.eager_error + torch.finfo(torch.float32).eps, found


@pytest.fixture(scope="module", params=NETWORKS)
def network(request):
    make, convolutions, fused = NETWORKS[request.param]
    torch.manual_seed(0)
    model = randomised(make())
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == convolutions
    x = randn(1, 3, 64, 64)
    fast = fxfuse.optimize(model, (x,))
    return model, fast, x, convolutions, fused


def test_outputs_are_eagers(network):
    model, fast, x, *_ = network
    assert_within_twice_eagers_error(model, fast, x)
    with torch.no_grad():
        for _ in range(4):  # then both have programs
            fast(x), fast(pixel_values=x)
        by_position, by_name = fast(x), fast(pixel_values=x)
    assert type(by_name) is type(by_position) is type(model(x))
    assert torch.equal(by_name.logits, by_position.logits)


def test_every_convolution_is_fused_or_has_its_reason(network):
    _, fast, _, convolutions, fused = network
    found = fxfuse.explain(fast)
    anchors = [region for region in found.regions if region.anchor == "conv2d"]
    assert len(anchors) == fused
    assert all(region.kernel is not None and region.fallback is None for region in anchors), found
    untraced = [item for item in found.skipped if "runs as Python" in item.reason]
    reasons = [item for item in found.skipped if "conv" in item.node or "runs as Python" in item.reason]
    assert len(anchors) + len(reasons) >= convolutions
    assert all(".py:" in item.reason for item in untraced), "the line that stopped the trace"


def test_fused_regions_are_what_runs(network):
    _, fast, x, _, fused = network
    with torch.no_grad(), torch.profiler.profile() as profile:
        fast(x)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls.get("aten::batch_norm", 0) + fused == 52 + (fused == 53)


# ----------------------------------------------------------------------------------------- all kinds of forward

TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99}
VISION = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
GPT2 = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
OPT = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 64, "num_attention_heads": 2,
    "word_embed_proj_dim": 32,
}  # fmt: skip
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
CONVNEXT = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1]}
RESNET = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 2]}
SEGFORMER = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3],
    "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16,
}  # fmt: skip
WHISPER = {
    "vocab_size": 99, "num_mel_bins": 8, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "max_source_positions": 20, "max_target_positions": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
CLIP = {
    "text_config": {**TEXT, "max_position_embeddings": 16, "eos_token_id": 98, "bos_token_id": 97, "pad_token_id": 1},
    "vision_config": VISION,
    "projection_dim": 16,
}

TINY = {
    # the model, its configuration, the names of its inputs
    "BERT": ("BertForSequenceClassification", "BertConfig", TEXT, "input_ids attention_mask"),
    "RoBERTa": ("RobertaModel", "RobertaConfig", TEXT, "input_ids"),
    "DistilBERT": (
        "DistilBertModel", "DistilBertConfig",
        {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}, "input_ids",
    ),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", GPT2, "input_ids"),
    "OPT": ("OPTForCausalLM", "OPTConfig", OPT, "input_ids"),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", TEXT, "input_ids"),
    "T5": ("T5Model", "T5Config", T5, "input_ids decoder_input_ids"),
    "ViT": ("ViTForImageClassification", "ViTConfig", VISION, "pixel_values"),
    "DeiT": ("DeiTModel", "DeiTConfig", VISION, "pixel_values"),
    "Swin": ("SwinModel", "SwinConfig", SWIN, "pixel_values"),
    "ConvNeXt": ("ConvNextModel", "ConvNextConfig", CONVNEXT, "pixel_values"),
    "ResNet": ("ResNetModel", "ResNetConfig", RESNET, "pixel_values"),
    "MobileNetV2": (
        "MobileNetV2Model", "MobileNetV2Config", {"image_size": 32, "depth_multiplier": 0.35}, "pixel_values",
    ),
    "SegFormer": ("SegformerForSemanticSegmentation", "SegformerConfig", SEGFORMER, "pixel_values"),
    "Whisper": ("WhisperModel", "WhisperConfig", WHISPER, "input_features decoder_input_ids"),
    "CLIP": ("CLIPModel", "CLIPConfig", CLIP, "input_ids pixel_values attention_mask"),
}  # fmt: skip

INPUTS = {
    "input_ids": lambda batch: torch.randint(4, 90, (batch, 9)),
    "decoder_input_ids": lambda batch: torch.randint(4, 90, (batch, 5)),
    "attention_mask": lambda batch: torch.ones(batch, 9, dtype=torch.long).index_fill_(1, torch.arange(6, 9), 0),
    "pixel_values": lambda batch: randn(batch, 3, 32, 32),
    "input_features": lambda batch: randn(batch, 8, 40),
}


class ByName(nn.Module):
    """Calls a model with names for its arguments."""

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs):
        return self.model(**dict(zip(self.names, inputs, strict=True)))


def tiny(name):
    """A model and the names of its inputs."""
    model_name, config_name, options, names = TINY[name]
    torch.manual_seed(0)
    model = randomised(getattr(transformers, model_name)(getattr(transformers, config_name)(**options)))
    return model, names.split()


REGIONS = {
    "BERT": 8, "RoBERTa": 8, "DistilBERT": 4, "GPT-2": 4, "OPT": 5, "Llama": 11, "T5": 4, "ViT": 2, "DeiT": 3,
    "Swin": 4, "ConvNeXt": 10, "ResNet": 12, "MobileNetV2": 0, "SegFormer": 2, "Whisper": 2, "CLIP": 6,
}  # fmt: skip
"""How many regions ran as kernels when they were counted (transformers 5.x); there may be more one day."""

THROUGH_DYNAMO = {"BERT": 8, "GPT-2": 6, "T5": 16, "Swin": 14, "Whisper": 8, "CLIP": 12}


AS_COUNTED = int(transformers.__version__.partition(".")[0]) >= 5


def enough(counted):
    return counted if AS_COUNTED else min(counted, 1)


def kernels(*graphs):
    """How many regions of these models ran as kernels."""
    return sum(region.kernel is not None for graph in graphs for region in fxfuse.explain(graph).regions)


def assert_outputs_are_eagers(model, fast, names, batch):
    inputs = {name: INPUTS[name](batch) for name in names}
    doubled = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    exact = outcome(copy.deepcopy(model).double(), **doubled)
    if isinstance(exact, RuntimeError):  # nothing to judge by
        pytest.skip(f"transformers {transformers.__version__} with torch {torch.__version__}, in float64: {exact}")
    with torch.no_grad():
        assert type(fast(**inputs)) is type(model(**inputs))
    assert_within_twice_eagers_error(ByName(model, names), ByName(fast, names), *inputs.values())


@pytest.mark.parametrize("name", TINY)
def test_whatever_a_forward_does_the_outputs_are_eagers(name):
    model, names = tiny(name)
    fast = fxfuse.optimize(model)
    for batch in (2, 3):
        assert_outputs_are_eagers(model, fast, names, batch)
    assert kernels(fast) >= enough(REGIONS[name])


@pytest.mark.parametrize("name", THROUGH_DYNAMO)
def test_so_they_are_through_dynamo(name):
    model, names = tiny(name)
    torch.compiler.reset()
    before = set(fxfuse.compiled_graphs())
    try:
        assert_outputs_are_eagers(model, torch.compile(model, backend="fxfuse"), names, 2)
    except (torch._dynamo.exc.InternalTorchDynamoError, NameError) as error:
        torch.compiler.reset()
        with torch.no_grad(), pytest.raises(type(error)):
            torch.compile(model, backend="eager")(**{name: INPUTS[name](2) for name in names})
        pytest.skip(f"Dynamo of torch {torch.__version__} cannot trace transformers {transformers.__version__}")
    assert kernels(*set(fxfuse.compiled_graphs()) - before) >= enough(THROUGH_DYNAMO[name])


ASKED = [
    {},
    {"output_hidden_states": True},
    {"output_attentions": True},
    {"output_hidden_states": False, "return_dict": False},
    {"output_hidden_states": True, "output_attentions": True, "return_dict": False},
    {"return_dict": True},
    {},
]
"""What one optimised model is asked for, in this order."""


def same_outputs(actual, expected):
    """Structures, types and values of two outputs are equal, but for rounding."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        return
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        actual, expected = list(actual.values()), list(expected.values())
    if isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for have, want in zip(actual, expected, strict=True):
            same_outputs(have, want)


@pytest.mark.parametrize("by_default", [False, True])
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "ViT", "BERT"])
def test_hidden_states_and_attentions_are_there_when_they_are_asked_for(name, by_default):
    model, names = tiny(name)
    model.config._attn_implementation = "eager"  # the one that has attentions to give
    model.config.output_hidden_states = by_default
    inputs = {name: INPUTS[name](2) for name in names}
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for _ in range(2):
            for asked in ASKED:
                expected = model(**inputs, **asked)
                same_outputs(fast(**inputs, **asked), expected)
    assert len(model(**inputs, output_hidden_states=True).hidden_states) == model.config.num_hidden_layers + 1
