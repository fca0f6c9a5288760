"""Kernels of a package for GPUs that are not here: which ones a model needs there, and how they are chosen.

The model is on a CPU. Its graphs run on tensors that stand in for a GPU's (cuda/stand_in.py), while a described GPU of
each architecture answers instead of a real one (cuda/gpu.py). So regions are planned, and programs recorded and merged,
as they will be there. The package gets the kernels that are asked for on the way. Nothing is measured: the first
candidate of each problem is chosen, as with FXFUSE_TUNE=0, and again where the package is loaded.

One fact that decides on kernels is known on the GPU only: whether torch's library computes a float32 product in TF32
where it may. So the package gets kernels for both answers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxfuse import packaged, toolchain
from fxfuse.cuda.gpu import ARCHITECTURES, Gpu, Standing, instead_of, of_architecture
from fxfuse.cuda.stand_in import DEVICE, StandIn, standing_in
from fxfuse.deploy import graphs
from fxfuse.deploy.entries import Arguments, Entry, call_of
from fxfuse.deploy.loaded import module_of
from fxfuse.deploy.tensors import Tensors, tree_of
from fxfuse.errors import PackageError
from fxfuse.state import copied

_CALLS = 2
"""Calls of each example: the first is planned, the second recorded as a program."""


def gpus_of(names: Sequence[str]) -> list[Gpu]:
    """The described GPUs of architectures ("sm_80"), each once.

    Raises PackageError for a name that is unknown, and where no CUDA compiler is found that knows it.
    """
    found = []
    for name in dict.fromkeys(names):
        gpu = of_architecture(name)
        if gpu is None:
            known = ", ".join(gpu.architecture for gpu in ARCHITECTURES.values())
            raise PackageError(f"kernels cannot be compiled for {name!r}; for GPUs there are {known}")
        found.append(gpu)
    if found and toolchain.nvcc_version() is None:
        raise PackageError(
            "kernels for a GPU need nvcc, and none is found: install the CUDA toolkit of the version that torch has "
            "where the package will be loaded, or set CUDA_HOME"
        )
    compiled = toolchain.nvcc_architectures() if found else []
    for gpu in found:
        if compiled and gpu.architecture not in compiled:
            raise PackageError(
                f"nvcc {toolchain.nvcc_version()} does not compile for {gpu.architecture}; install a newer CUDA "
                "toolkit, of the version that torch has where the package will be loaded"
            )
    return found


def on_gpu(described: Mapping[str, Any]) -> dict[str, Any]:
    """The GRAPHS of a package for a model on a CPU, moved to a GPU with all its tensors."""
    moved = dict(described)
    moved["device"] = DEVICE.type
    moved["entries"] = [{**entry, "nodes": _moved(entry["nodes"])} for entry in described["entries"]]
    moved["tensors"] = [{**tensor, "device": DEVICE.type} for tensor in described["tensors"]]
    moved["examples"] = [
        {**example, "leaves": [leaf and {**leaf, "device": DEVICE.type} for leaf in example["leaves"]]}
        for example in described["examples"]
    ]
    return moved


def _moved(item: Any) -> Any:
    """Nodes (graphs.describe), changed to make tensors on a GPU where they made them on a CPU."""
    if isinstance(item, list):
        return graphs.encoded(DEVICE) if item == graphs.encoded(torch.device("cpu")) else list(map(_moved, item))
    return item


def graph_of(described: Mapping[str, Any], tensors: Tensors, number: int) -> fx.GraphModule:
    """The graph of an entry, for torch alone to run."""
    nodes = Entry.of(described["entries"][number]).nodes
    return fx.GraphModule(tree_of(described, tensors.values), graphs.rebuilt(nodes, torch.device("cpu")))


def used_by(
    signature: inspect.Signature, described: Mapping[str, Any], tensors: Tensors, examples: Sequence[Arguments],
    gpus: Sequence[Gpu],
) -> packaged.Used:  # fmt: skip
    """The kernels, not compiled yet, and the choices that the examples need on GPUs like these.

    Args:
        described: the result of `on_gpu`.
        tensors: the model's, on a CPU.
    """
    total = packaged.Used()
    for one in (alike for gpu in gpus for alike in gpu.alike()):
        for tf32 in (False, True):
            standing = Standing(one, tf32)
            with instead_of(standing), packaged.noting() as used:
                _run(signature, described, tensors, examples)
            total.sources.update(used.sources)
            total.choices.update(used.choices)
            if not standing.is_asked:
                break
    return total


def _run(
    signature: inspect.Signature, described: Mapping[str, Any], tensors: Tensors, examples: Sequence[Arguments]
) -> None:
    with torch.no_grad(), standing_in():
        tree = _tree(described, tensors)
        loaded = module_of({**described, "cuda_graphs": False}, tree, DEVICE, "the package", builds=True)
        for example in examples:
            given = pytree.tree_map_only(torch.Tensor, lambda tensor: StandIn(copied(tensor.detach())), example)
            args, kwargs = call_of(signature, given)
            for _ in range(_CALLS):
                loaded(*args, **kwargs)


def _tree(described: Mapping[str, Any], tensors: Tensors) -> nn.Module:
    """The model's tensors on the GPU that is not here. Buffers are copies, because calls may write into them."""
    buffers = {entry["storage"] for entry in described["tensors"] if entry["kind"] == "buffer"}
    copies = {number: tensors.storages[number].clone().untyped_storage() for number in buffers}
    values: dict[str, torch.Tensor] = {}
    for entry in described["tensors"]:
        value = tensors.values[entry["path"]]
        if entry["storage"] in copies:
            place = entry["offset"], entry["shape"], entry["strides"]
            value = torch.empty(0, dtype=value.dtype).set_(copies[entry["storage"]], *place)
        values[entry["path"]] = StandIn(value)
    return tree_of(described, values)
