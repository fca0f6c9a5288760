"""save(): writes a model's graphs, tensors and kernels into one file."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxfuse import build, packaged
from fxfuse.arguments import Inputs, arguments_of
from fxfuse.cuda import gpu
from fxfuse.deploy import archive, cross, machine
from fxfuse.deploy.entries import Arguments, Entry, bound, call_of, described_signature, entries_of
from fxfuse.deploy.loaded import CALLS, GRAPHS, module_of
from fxfuse.deploy.tensors import Tensors, tree_of
from fxfuse.errors import PackageError
from fxfuse.module import FusedModule, state_of
from fxfuse.optimize import compile_for
from fxfuse.patterns import MODE_DEPENDENT
from fxfuse.recapture import FURTHEST, as_eager, distance
from fxfuse.state import called_unchanged
from fxfuse.verify import leaves_of


@dataclass(frozen=True)
class Saved:
    """What fxfuse.save wrote."""

    path: Path
    bytes: int
    sha256: str
    """The file's digest, for fxfuse.load(sha256=…)."""
    entries: tuple[Entry, ...]
    """The calls that it can run."""
    kernels: tuple[str, ...]
    """What its kernels compute."""

    def __str__(self) -> str:
        calls = "".join(f"\n  {entry}" for entry in self.entries)
        return f"{self.path}: {self.bytes / 2**20:.1f} MB, {len(self.kernels)} kernels, for calls with{calls}"


def save(
    fast: fx.GraphModule,
    path: str | os.PathLike[str],
    inputs: Inputs,
    *others: Inputs,
    dynamic_shapes: Mapping[str, Any] | None = None,
    weights: bool = True,
    architectures: Sequence[str] = ("native",),
) -> Saved:
    """Writes an optimised model into one file, with the kernels that calls like the examples need.

        fxfuse.save(fast, "resnet.fxfuse", images)
        fxfuse.save(fast, "bert.fxfuse", {"input_ids": ids, "attention_mask": mask}, {"input_ids": ids})

    Args:
        fast: what fxfuse.optimize returned, in evaluation mode.
        inputs: the arguments of an example call: a tensor, a tuple of positional arguments, or a dict of keyword
            arguments.
        others: the arguments of further examples. Sizes in which examples differ may vary in the package, if
            torch.export finds that they can. All other sizes, and arguments that are no tensors, are fixed.
        dynamic_shapes: which sizes may vary instead, by the names of forward's parameters, as torch.export.export takes
            them: {"x": {0: torch.export.Dim("batch")}}.
        weights: whether parameters and buffers are in the file. If not, fxfuse.load must be given them.
        architectures: what kernels are compiled for. On a CPU: "native", the instructions of this one, or a level that
            all target machines have: "x86-64", "x86-64-v2" (SSE4.2), "x86-64-v3" (AVX2), "x86-64-v4" (AVX-512). On a
            GPU: "native", its own architecture. If the model is on a CPU, "sm_80", "sm_90" and other names of GPUs make
            a package for those. Then nvcc compiles the kernels, nothing is measured, and no GPU is needed here.

    The examples are run without gradients, and the package's results are compared with the model's own. Dataclasses and
    mappings of their own class (transformers' ModelOutput) come back as mappings with attributes of the same names.
    Hooks are run, and become part of the graph. Extra state (get_extra_state) is not kept.

    Raises PackageError for a model that torch.export cannot capture, in training mode, on several devices, or with
    arguments or operators that a package cannot hold; ToolchainError and BuildError where a kernel cannot be built.
    """
    if not isinstance(fast, FusedModule):
        raise PackageError(f"save takes what fxfuse.optimize returned, not a {type(fast).__name__}")
    if _trains(fast, state_of(fast).captured.root):
        raise PackageError("the model is in training mode, a package is for inference: call .eval() first")
    state = state_of(fast)
    root, settings = state.captured.root, dataclasses.replace(state.settings, strict=False)
    signature = inspect.signature(root.forward)
    examples = [
        bound(signature, *arguments_of(one, None, f"example {number}"))
        for number, one in enumerate((inputs, *others), 1)
    ]
    device = _device_of(root, examples)
    cpu, gpus = _targets(architectures, device)
    entries, constants = entries_of(root, signature, examples, dynamic_shapes)
    tensors = Tensors(root, constants)
    described = {
        "signature": described_signature(signature),
        "entries": [entry.described() for entry in entries],
        "examples": [_example(example, entries) for example in examples],
        "settings": dataclasses.asdict(settings),
        "cuda_graphs": state.replays is not None,
        "device": device.type,
        **tensors.described(),
    }
    described = json.loads(json.dumps(described))  # what is run now is what will be read
    if gpus:
        _check_graphs(root, signature, described, tensors, examples)
        described = cross.on_gpu(described)
        used = cross.used_by(signature, described, tensors, examples, gpus)
    else:
        used = _used(root, signature, described, tensors, examples, device)
    with archive.Writer(path) as writer:
        writer.add(GRAPHS, json.dumps(described).encode(), compress=True)
        for number, storage in enumerate(tensors.storages):
            if weights or number in tensors.constant:
                writer.add(f"tensors/{number}", archive.bytes_of(storage.cpu()), compress=False)
        kernels = _add_kernels(writer, used.sources, cpu)
        writer.finish({
            **machine.here(),
            "cuda": gpu.cuda_version() if gpus or device.type == "cuda" else None,
            "cpu": machine.features_of(cpu) if any(not one.is_cuda for one in used.sources.values()) else [],
            "architectures": _architectures(used.sources.values()),
            "unmeasured": sorted(one.architecture for one in gpus),
            "weights": weights,
            "kernels": kernels,
            "choices": used.choices,
            "gpus": _gpus(device, gpus),
        })  # fmt: skip
    path = Path(path)
    labels = tuple(kernel["label"] for kernel in kernels.values())
    return Saved(path, path.stat().st_size, archive.digest_of(path), tuple(entries), labels)


def _trains(fast: FusedModule, root: nn.Module) -> bool:
    """Whether calls compute as in training. Of a graph that others captured, only its modules tell."""
    if isinstance(root, fx.GraphModule):
        return any(module.training for module in root.modules() if isinstance(module, MODE_DEPENDENT))
    return fast.training


def _device_of(root: nn.Module, examples: Sequence[Arguments]) -> torch.device:
    tensors = [*root.parameters(), *root.buffers()]
    tensors += [leaf for leaf in pytree.tree_leaves(list(examples)) if isinstance(leaf, torch.Tensor)]
    devices = {tensor.device for tensor in tensors}
    gpus = {device for device in devices if device.type != "cpu"}
    if len(gpus) > 1 or any(device.type != "cuda" for device in gpus):
        raise PackageError(f"the model is on {', '.join(sorted(map(str, devices)))}; a package is for a CPU or one GPU")
    return next(iter(gpus), torch.device("cpu"))


def _targets(architectures: Sequence[str], device: torch.device) -> tuple[str, list[gpu.Gpu]]:
    """The CPU that kernels are compiled for, and the described GPUs. Raises PackageError for a name that is unknown or
    cannot be served."""
    if isinstance(architectures, str) or not architectures:
        raise PackageError(f'architectures is a list of names, such as ("x86-64-v3",), not {architectures!r}')
    cpus = [name for name in architectures if not re.fullmatch(r"sm_\d+", name)]
    gpus = [name for name in architectures if name not in cpus]
    for name in cpus:
        machine.features_of(name)  # raises PackageError for one that is not known
    if len(cpus) > 1:
        raise PackageError(f"a package has kernels for one kind of CPU, not {' and '.join(cpus)}: name the lowest")
    if device.type == "cpu":
        default = machine.portable() if gpus else "native"
        return (cpus[0] if cpus else default), cross.gpus_of(gpus)
    own = gpu.architecture(torch.cuda.get_device_capability(device))
    for name in gpus:
        if name != own:
            raise PackageError(
                f"kernels for {name} are not those of the GPU that the model is on ({own}). Move the model and the "
                f"examples to the CPU to compile for {name} without one; or save the model on such a GPU, where "
                "kernels are measured, and make one file of several by fxfuse.merge"
            )
    return (cpus[0] if cpus else "native"), []


def _example(example: Arguments, entries: Sequence[Entry]) -> dict[str, Any]:
    """The number of an example's graph, and the sizes and strides of its tensors (for LoadedModule.warm_up)."""
    found = ((number, entry.tensors_of(example)) for number, entry in enumerate(entries))
    number, leaves = next((number, leaves) for number, leaves in found if leaves is not None)
    laid = [
        {"shape": list(leaf.shape), "strides": list(leaf.stride()), "device": leaf.device.type}
        if isinstance(leaf, torch.Tensor)
        else None
        for leaf in leaves
    ]
    return {"entry": number, "leaves": laid}


def _used(
    root: nn.Module, signature: inspect.Signature, described: Mapping[str, Any], tensors: Tensors,
    examples: Sequence[Arguments], device: torch.device,
) -> packaged.Used:  # fmt: skip
    """The kernels and choices that the package's graphs need for the examples.

    The examples run twice, and their results are compared with the model's own. The first time everything is compiled
    and measured. The second time only the chosen kernels are asked for.
    """
    tree = tree_of(described, tensors.values)
    for is_last in (False, True):
        loaded = module_of(described, tree, device, "the package", builds=True)
        with packaged.noting() as used, torch.no_grad():
            for example in examples:
                args, kwargs = call_of(signature, example)
                if not is_last:
                    for graph, entry in zip(loaded.graphs, loaded.entries, strict=True):
                        leaves = entry.tensors_of(example)
                        if leaves is not None:
                            compile_for(graph, leaves)
                            break
                with as_eager():
                    expected = called_unchanged(root, args, kwargs)
                for _ in range(CALLS):
                    _check_alike(expected, called_unchanged(loaded, args, kwargs))
    return used


def _check_graphs(
    root: nn.Module, signature: inspect.Signature, described: Mapping[str, Any], tensors: Tensors,
    examples: Sequence[Arguments],
) -> None:  # fmt: skip
    """Raises PackageError unless the graphs, run by torch alone, compute what the model does."""
    entries = [Entry.of(entry) for entry in described["entries"]]
    for example, said in zip(examples, described["examples"], strict=True):
        number = said["entry"]
        module, leaves = cross.graph_of(described, tensors, number), entries[number].tensors_of(example)
        assert leaves is not None, "it was found for this example"
        args, kwargs = call_of(signature, example)
        with torch.no_grad():
            with as_eager():
                expected = called_unchanged(root, args, kwargs)
            _check_alike(expected, called_unchanged(module, leaves, {}))


def _check_alike(expected: Any, result: Any) -> None:
    if not _agree(expected, result):
        raise PackageError(
            "torch.export's graph computes something else than the model, which may ask whether it is being compiled, "
            "or about values of tensors"
        )


def _agree(expected: Any, result: Any) -> bool:
    """Whether results are as close as two ways to compute the same may be (recapture.FURTHEST)."""
    tensors = [[leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)] for value in (expected, result)]
    return len(tensors[0]) == len(tensors[1]) and all(
        (want.shape, want.dtype) == (have.shape, have.dtype)
        and (
            distance(want, have) <= FURTHEST[want.dtype][want.is_cuda]
            if want.dtype in FURTHEST
            else torch.equal(want, have)
        )
        for want, have in zip(*tensors, strict=True)
    )


def _add_kernels(writer: archive.Writer, sources: Mapping[str, build.Source], cpu: str) -> dict[str, dict[str, str]]:
    """Adds libraries, each once. Returns, by the kernel's portable key, its key, member and label."""
    kernels: dict[str, dict[str, str]] = {}
    added: set[str] = set()
    targets = [one if one.is_cuda else dataclasses.replace(one, cpu=cpu) for one in sources.values()]
    try:
        libraries = [(key, library, library.read_bytes()) for key, library in build.libraries_of(targets)]
    except OSError as error:
        raise PackageError(
            f"a kernel cannot be packed: {error}; set FXFUSE_CACHE_DIR to a folder of your own"
        ) from error
    for target, (key, library, code) in zip(targets, libraries, strict=True):
        member = f"kernels/{archive.digest_of(library)[:32]}{library.suffix}"
        if member not in added:
            writer.add(member, code, compress=True)
            added.add(member)
        kernels[build.portable_key(target)] = {"key": key, "member": member, "label": target.label}
    return kernels


def _architectures(sources: Iterable[build.Source]) -> list[str]:
    """The GPU architectures that kernels are for."""
    return sorted({gpu.architecture(source.architecture) for source in sources if source.architecture is not None})


def _gpus(device: torch.device, described: Sequence[gpu.Gpu]) -> list[list[Any]]:
    """The GPUs that were measured on, or planned for, as tune.py names them."""
    if described:
        return [[one.name, one.multi_processor_count, one.architecture] for other in described for one in other.alike()]
    if device.type != "cuda":
        return []
    properties = torch.cuda.get_device_properties(device)
    architecture = gpu.architecture((properties.major, properties.minor))
    return [[properties.name, properties.multi_processor_count, architecture]]
