"""How much of public networks is fused, and whether the answers stay the same: `optimize` and the Dynamo backend.

    python benchmarks/coverage.py --output benchmarks/results
    python benchmarks/coverage.py --only Llama Swin

Small models of transformers' families, built from their configurations with random weights; nothing is downloaded and
nothing is timed. An anchor is a Linear or Conv2d (or transformers' Conv1D); on a GPU float32 anchors that nothing
pointwise follows are regions, too. Errors are against float64, beside eager's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from suite import arguments, provenance, write
from tabulate import tabulate
from torch import nn

import fxfuse

VOCABULARY, TOKENS = 100, 12
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2}
DECODER = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
           "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}  # fmt: skip
PATCHES = {**SIZES, "image_size": 32, "patch_size": 8}
STAGES = {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 24, 32]}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}


def _tokens(count: int = TOKENS) -> tuple[torch.Tensor, ...]:
    return (torch.randint(5, VOCABULARY, (2, count)),)


def _image(size: int = 32) -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 3, size, size),)


@dataclass(frozen=True)
class Family:
    """A class of transformers' with its configuration's arguments and the inputs for one call."""

    name: str
    options: dict[str, Any]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    config: str = ""
    """The configuration's class, if its name is not the model's with Config for what it is for."""

    def build(self) -> nn.Module:
        """The model, with random weights."""
        import transformers

        stem = self.config or self.name.removesuffix("Model")
        config = getattr(transformers, f"{stem}Config")(**self.options)
        return getattr(transformers, self.name)(config)  # type: ignore[no-any-return]


def _text(name: str, options: dict[str, Any], config: str = "", tokens: int = TOKENS) -> Family:
    return Family(name, {"vocab_size": VOCABULARY, **options}, lambda: _tokens(tokens), config)


def _vision(name: str, options: dict[str, Any], config: str = "", size: int = 32) -> Family:
    return Family(name, options, lambda: _image(size), config)


FAMILIES = (
    _text("BertModel", SIZES), _text("RobertaModel", SIZES), _text("ElectraModel", {**SIZES, "embedding_size": 16}),
    _text("AlbertModel", {**SIZES, "embedding_size": 16}), _text("DebertaV2Model", SIZES), _text("MPNetModel", SIZES),
    _text("DistilBertModel", {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}),
    _text("LongformerModel", {**SIZES, "attention_window": [4, 4], "max_position_embeddings": 64}, tokens=16),
    _text("FNetModel", {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}),
    _text("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, "GPT2"),
    _text("GPTNeoXModel", SIZES), _text("BloomModel", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    _text("OPTModel", {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                       "word_embed_proj_dim": 32, "max_position_embeddings": 64}),
    _text("LlamaForCausalLM", GROUPED, "Llama"), _text("MistralModel", GROUPED), _text("Qwen2Model", GROUPED),
    _text("GemmaModel", {**GROUPED, "head_dim": 8}), _text("PhiModel", SIZES),
    _text("MambaModel", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    _text("T5EncoderModel", T5, "T5"), _text("BartModel", {**DECODER, "max_position_embeddings": 64}),
    _text("CLIPTextModel", {**SIZES, "max_position_embeddings": 64, "eos_token_id": 99}, "CLIPText"),
    Family("Wav2Vec2Model", {**SIZES, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
                             "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
                             "num_feat_extract_layers": 2}, lambda: (torch.randn(2, 800),)),
    Family("PatchTSTModel", {"context_length": 32, "num_input_channels": 3, "patch_length": 8, "patch_stride": 8,
                             "d_model": 16, "num_attention_heads": 2, "ffn_dim": 32, "num_hidden_layers": 2},
           lambda: (torch.randn(2, 32, 3),)),
    _vision("ViTForImageClassification", PATCHES, "ViT"), _vision("DeiTModel", PATCHES),
    _vision("BeitModel", PATCHES), _vision("CLIPVisionModel", PATCHES, "CLIPVision"),
    _vision("SiglipVisionModel", PATCHES, "SiglipVision"),
    _vision("YolosModel", {**PATCHES, "image_size": [32, 32], "num_detection_tokens": 4}),
    _vision("Dinov2Model", {"image_size": 28, "patch_size": 7, "hidden_size": 32, "num_hidden_layers": 2,
                            "num_attention_heads": 4, "use_swiglu_ffn": True}, size=28),
    _vision("SwinModel", {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
                          "window_size": 4}),
    _vision("ConvNextForImageClassification", STAGES, "ConvNext", 64), _vision("ConvNextV2Model", STAGES, size=64),
    _vision("ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [1, 2]}, "ResNet",
            64),
    _vision("RegNetModel", {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [1, 2], "groups_width": 8},
            size=64),
    _vision("BitModel", {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [1, 2], "num_groups": 4}, size=64),
    _vision("MobileNetV1Model", {"depth_multiplier": 0.25}, size=64),
    _vision("MobileNetV2Model", {"depth_multiplier": 0.25}, size=64),
    _vision("MobileNetV2Model", {"depth_multiplier": 0.25, "tf_padding": False}, size=64),
    _vision("LevitModel", {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2],
                           "depths": [1, 1, 1], "key_dim": [8, 8, 8]}, size=64),
    _vision("PoolFormerModel", {"depths": [1, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2],
                                "padding": [2, 1], "num_encoder_blocks": 2}, size=64),
    _vision("SegformerForSemanticSegmentation", {**STAGES, "depths": [1, 1, 1, 1], "decoder_hidden_size": 16,
                                                 "num_attention_heads": [1, 2, 2, 4]}, "Segformer", 64),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One family by one way in."""

    family: str
    way: str
    anchors: int
    regions: int
    """Regions with an anchor, in use."""
    chains: int
    error: float
    eager_error: float
    ok: bool
    fallbacks: tuple[str, ...]
    """Why torch runs some of the regions."""


def measure(family: Family, way: str, device: torch.device) -> Row:
    """Optimises one model ("optimize") or compiles it ("backend"), and compares its results with eager's."""
    torch.manual_seed(0)
    model = family.build().to(device).eval()
    inputs = tuple(tensor.to(device) for tensor in family.inputs())
    before = set(fxfuse.compiled_graphs())
    with torch.no_grad():
        if way == "optimize":
            fast = fxfuse.optimize(model, inputs)
        else:
            torch._dynamo.reset()
            fast = torch.compile(model, backend="fxfuse")  # type: ignore[assignment]
        verified = fxfuse.verify(model, fast, inputs)
    graphs = [fast] if way == "optimize" else [graph for graph in fxfuse.compiled_graphs() if graph not in before]
    regions = [region for graph in graphs for region in fxfuse.explain(graph).regions]
    used = [region for region in regions if region.kernel is not None]
    return Row(
        family=family.name + ("".join(f", {k}={v}" for k, v in family.options.items() if k == "tf_padding")),
        way=way,
        anchors=sum(isinstance(m, nn.Linear | nn.Conv2d) or type(m).__name__ == "Conv1D" for m in model.modules()),
        regions=sum(not region.chain for region in used),
        chains=sum(region.chain for region in used),
        error=verified.error,
        eager_error=verified.eager_error,
        ok=verified.ok,
        fallbacks=tuple(sorted({region.fallback for region in regions if region.fallback is not None})),
    )


def render(rows: Sequence[Row]) -> str:
    """One line for each family, both ways in beside each other."""
    table = []
    for name in dict.fromkeys(row.family for row in rows):
        by_way = {row.way: row for row in rows if row.family == name}
        some = next(iter(by_way.values()))
        cells = [
            (
                f"{row.regions} + {row.chains}",
                f"{row.error:.1e} / {row.eager_error:.1e}" + ("" if row.ok else ", NOT OK"),
            )
            for row in by_way.values()
        ]
        table.append((name, some.anchors, *(cell for pair in cells for cell in pair)))
    ways = dict.fromkeys(row.way for row in rows)
    headers = [text for way in ways for text in (f"{way}: regions + chains", "error / eager's")]
    return tabulate(table, headers=("network", "anchors", *headers), tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="families whose name contains one of these")
    parser.add_argument("--ways", nargs="*", default=["optimize", "backend"], choices=["optimize", "backend"])
    given = parser.parse_args()
    device = torch.device(given.device)
    facts = provenance(device, given.commit)
    rows: list[Row] = []
    for family in FAMILIES:
        if any(part in family.name for part in given.only):
            for way in given.ways:
                rows.append(measure(family, way, device))
                print(json.dumps(asdict(rows[-1])), flush=True)
    heading = ", ".join(f"{key} {value}" for key, value in facts.items())
    print(f"\n{heading}\n{render(rows)}")
    if given.output is not None:
        write(given.output, "coverage", facts, f"{heading}\n\n{render(rows)}\n", rows)


if __name__ == "__main__":
    main()
