"""Networks of torchvision, timm and transformers by name, with random weights, and inputs that they may take.

    model, inputs_for = from_timm("resnet50")
    for inputs in inputs_for(16): ...

Nothing is downloaded. The packages are imported when one of their networks is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from fxfuse.errors import FxfuseError

Inputs: TypeAlias = dict[str, torch.Tensor]
"""Tensors by name. An image, the only positional argument, has the empty name IMAGE."""
InputsFor: TypeAlias = Callable[[int], Iterator[Inputs]]
"""From a batch size to the inputs that the model may take, the likeliest first. Raises UnknownInputs."""

IMAGE: Final = ""
NOTHING: Final = 1e-3
"""A parameter with no value above this starts as good as zero: heads, residual branches' last layers, layer scales."""
TOKENS: Final = 128
"""Tokens of a text."""


class UnknownInputs(FxfuseError):
    """A network takes inputs that are not known here."""


def from_torchvision(name: str) -> tuple[nn.Module, InputsFor]:
    """A model of torchvision's. Raises UnknownInputs, ImportError, and what torchvision raises for an unknown name."""
    import torchvision

    family = torchvision.models.get_model_builder(name).__module__.removeprefix("torchvision.models.")
    if family.partition(".")[0] in ("detection", "optical_flow"):
        raise UnknownInputs("its input is not one tensor")
    backbone = {"weights_backbone": None} if family.startswith("segm") else {}
    model = torchvision.models.get_model(name, weights=None, **backbone)
    side = 299 if "inception" in name else 224
    return model, _images((3, 16, side, side) if family.startswith("video") else (3, side, side))


def from_timm(name: str) -> tuple[nn.Module, InputsFor]:
    """A model of timm's. Raises ImportError, and what timm raises for an unknown name."""
    import timm

    model = timm.create_model(name, pretrained=False)
    return model, _images(tuple(model.default_cfg["input_size"]))


def _images(shape: tuple[int, ...]) -> InputsFor:
    return lambda batch: iter([{IMAGE: torch.randn(batch, *shape)}])


def from_transformers(kind: str, full: bool = False, channels: int = 768) -> tuple[nn.Module, InputsFor]:
    """A model of transformers' by its type ("bert"), with its default configuration.

    Args:
        full: at full size; if not, with four layers.
        channels: the most channels of a model that is not at full size.

    Raises ImportError, and what transformers raises for an unknown type.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    configuration = transformers.CONFIG_MAPPING[kind]
    config = configuration() if full else configuration(**_shrunk(configuration(), channels))
    config.use_cache = False
    model_class: Any = MODEL_MAPPING[configuration]
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    model = model_class(config)
    text = config.get_text_config()
    tokens = getattr(text, "vocab_size", None) or 1000
    vision = getattr(config, "vision_config", config)

    def inputs_for(batch: int) -> Iterator[Inputs]:
        name = model.main_input_name
        ids = torch.randint(min(2, tokens - 1), min(tokens, 30000), (batch, TOKENS))
        if name == "pixel_values":
            size = getattr(vision, "image_size", None) or 224
            height, width = size if isinstance(size, list | tuple) else (size, size)
            channels = getattr(vision, "num_channels", None) or 3
            inputs = {name: torch.randn(batch, channels, height, width)}
            yield inputs
            yield {**inputs, "input_ids": ids}
            return
        if name == "input_values":
            yield {name: torch.randn(batch, 16000)}
            return
        if name == "input_features":
            bins = getattr(config, "num_mel_bins", None) or 80
            inputs = {name: torch.randn(batch, bins, 2 * getattr(config, "max_source_positions", 1500))}
            yield inputs
            yield {**inputs, "decoder_input_ids": ids[:, :16]}
            return
        if name != "input_ids":
            raise UnknownInputs(f"its main input is {name}")
        yield {name: ids}
        yield {name: ids, "decoder_input_ids": ids[:, :64]}

    return model, inputs_for


def _shrunk(config: Any, channels: int) -> dict[str, Any]:
    """Arguments that make a configuration small: four layers, at most `channels` channels."""
    limits = {
        "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "encoder_layers": 4, "decoder_layers": 4,
        "hidden_size": channels, "intermediate_size": 4 * channels, "d_model": channels,
        "encoder_ffn_dim": 4 * channels, "decoder_ffn_dim": 4 * channels,
        "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "vocab_size": 32768,
    }  # fmt: skip
    values = vars(config)
    changed: dict[str, Any] = {
        name: limit for name, limit in limits.items() if isinstance(values.get(name), int) and values[name] > limit
    }
    if "vocab_size" in changed:  # special tokens beyond it would be no rows of the embedding
        beyond = (name for name, value in values.items() if isinstance(value, int) and value >= changed["vocab_size"])
        changed |= dict.fromkeys((name for name in beyond if name.endswith("_token_id")), 1)
    layers = values.get("num_hidden_layers")
    if "num_hidden_layers" in changed:  # lists with one item for each layer
        changed |= {name: value[: changed["num_hidden_layers"]] for name, value in values.items()
                    if isinstance(value, list) and len(value) == layers}  # fmt: skip
    for name in getattr(type(config), "sub_configs", {}):
        if values.get(name) is not None:
            changed[name] = {**values[name].to_dict(), **_shrunk(values[name], channels)}
    return changed


def as_if_trained(model: nn.Module) -> None:
    """Gives random values to parameters that start as zero, and random statistics to BatchNorm2d.

    Otherwise heads and branches of zeros would hide the layers before them.
    """
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None and module.running_var is not None:
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.numel() and float(parameter.detach().abs().max()) < NOTHING:
            nn.init.normal_(parameter, std=0.05)
