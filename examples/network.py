"""What the network examples share: options, the report, verification and a table of times.

The models come from transformers, from a configuration with random weights: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable

import torch
from torch import nn

import fxfuse

Build = Callable[[bool], nn.Module]
"""Makes the model; True asks for a small one."""
Inputs = Callable[[nn.Module, int], tuple[torch.Tensor, ...]]
"""Makes a batch of that size for the model."""


def trained(model: nn.Module) -> nn.Module:
    """The model in evaluation mode, with batch statistics as if trained: not the identity that fresh ones are."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval()


def _is_anchor(module: nn.Module) -> bool:
    """Whether it is a linear or convolution: transformers has some of its own."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.dim() >= 2 and not isinstance(module, nn.Embedding)


def run(description: str | None, build: Build, inputs: Inputs) -> None:
    """An example's main()."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--batch", type=int, default=None, help="32 on a GPU and 1 on a CPU if not given")
    parser.add_argument("--small", action="store_true", help="a model and a batch of a few kilobytes")
    parser.add_argument("--fp32", default="exact", choices=("exact", "fast"))
    parser.add_argument("--cuda-graphs", action="store_true", help="replay the model as a CUDA graph")
    parser.add_argument("--compare", nargs="*", default=["eager", "torch.compile"])
    parser.add_argument("--seconds", type=float, default=4.0, help="measuring time")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    batch = given.batch or (32 if given.device.startswith("cuda") and not given.small else 1)
    torch.manual_seed(0)
    model = trained(build(given.small)).to(given.device, getattr(torch, given.dtype))
    example = tuple(
        tensor.to(given.device, model.dtype if tensor.is_floating_point() else None) for tensor in inputs(model, batch)
    )
    with torch.no_grad():
        fast = fxfuse.optimize(model, example, fp32=given.fp32, cuda_graphs=given.cuda_graphs)
        report = fxfuse.explain(fast)
        print(report)
        anchors = sum(_is_anchor(module) for module in model.modules())
        used = {region.nodes for region in report.regions if region.kernel and not region.chain}
        print(f"\n{len(used)} regions in use; the model has {anchors} linears and convolutions\n")
        print(fxfuse.verify(model, fast, example), "\n")
        print(fxfuse.benchmark(model, fast, example, compare=given.compare, seconds=given.seconds))
