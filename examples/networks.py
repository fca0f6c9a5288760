"""Whole networks, built from a configuration with random weights (nothing is downloaded): pip install transformers.

    python examples/networks.py resnet50
    python examples/networks.py mobilenetv2 --device cuda --dtype bfloat16 --batch 64 --size 224

Prints how many convolutions were fused and which were not, the error against float64 beside eager's, and a table of
times.
"""

from __future__ import annotations

import argparse
import logging

import torch
from torch import nn

import fxfuse


def build(name: str) -> nn.Module:
    """One of transformers' image networks in evaluation mode, with batch statistics that keep activations in range."""
    from transformers import MobileNetV2Config, MobileNetV2Model, ResNetConfig, ResNetModel

    torch.manual_seed(0)
    models = {
        "resnet50": lambda: ResNetModel(ResNetConfig()),  # the default configuration is ResNet-50
        # tf_padding computes every layer's padding in Python from the image's size, which no graph can hold
        "mobilenetv2": lambda: MobileNetV2Model(MobileNetV2Config(tf_padding=False)),
    }
    model = models[name]().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # as if trained: not the identity that fresh statistics give
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=("resnet50", "mobilenetv2"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--batch", type=int, default=None, help="images; 32 on a GPU and 1 on a CPU if not given")
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--compare", nargs="*", default=["eager", "torch.compile"])
    parser.add_argument("--seconds", type=float, default=4.0, help="measuring time")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("fxfuse").setLevel(logging.INFO)
    batch = arguments.batch or (32 if arguments.device.startswith("cuda") else 1)
    dtype = getattr(torch, arguments.dtype)
    model = build(arguments.network).to(arguments.device, dtype)
    images = torch.randn(batch, 3, arguments.size, arguments.size, device=arguments.device, dtype=dtype)
    with torch.no_grad():
        fast = fxfuse.optimize(model, example_inputs=(images,))
        report = fxfuse.explain(fast)
        print(report)
        convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
        fused = sum(region.anchor == "conv2d" for region in report.regions)
        print(f"\n{fused} of {convolutions} convolutions fused\n")
        print(fxfuse.verify(model, fast, (images,)), "\n")
        print(fxfuse.benchmark(model, fast, (images,), compare=arguments.compare, seconds=arguments.seconds))


if __name__ == "__main__":
    main()
