"""A model's tensors in a package: each storage once, as it is in memory, and where in it each tensor lies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fxfuse.deploy.archive import Reader
from fxfuse.errors import PackageError


class Tensors:
    """The tensors of a model, and other tensors that its graphs read: each storage once."""

    def __init__(self, root: nn.Module, constants: Mapping[str, torch.Tensor]) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self._root, self._constants = root, constants
        self._numbers: dict[int, int] = {}
        self.storages: list[torch.Tensor] = []
        """A tensor of bytes over each storage."""
        self.constant: set[int] = set()
        """Numbers of the storages that graphs read and no state_dict has."""
        self._entries: list[dict[str, Any]] = []
        for path, module in root.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
                for name, tensor in table.items():
                    if tensor is not None:
                        persistent = name not in module._non_persistent_buffers_set
                        self._add(prefix + name, kind, tensor, persistent)
        for path, tensor in constants.items():
            self._add(path, "buffer", tensor, False)

    def _add(self, path: str, kind: str, tensor: torch.Tensor, persistent: bool) -> None:
        kinds = (torch.Tensor, nn.Parameter, getattr(nn, "Buffer", None))
        if type(tensor) not in kinds or tensor.layout is not torch.strided:
            raise PackageError(f"'{path}' is a {type(tensor).__name__} ({tensor.layout}), which a package cannot hold")
        tensor = tensor.detach()
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self.storages)
            self.storages.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
        number = self._numbers[storage._cdata]
        if not persistent:
            self.constant.add(number)
        self.values[path] = tensor
        self._entries.append({
            "path": path, "kind": kind, "persistent": persistent, "storage": number,
            "bytes": storage.nbytes(), "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape),
            "strides": list(tensor.stride()), "offset": tensor.storage_offset(), "device": tensor.device.type,
        })  # fmt: skip

    def described(self) -> dict[str, Any]:
        """Modules and tensors in the order of state_dict()."""
        return {
            "modules": [path for path, _ in self._root.named_modules(remove_duplicate=False) if path],
            "tensors": self._entries,
        }


def read(
    reader: Reader, described: Mapping[str, Any], device: torch.device, given: Mapping[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    memories: dict[int, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for entry in described["tensors"]:
        path, place = entry["path"], device if entry["device"] == device.type else torch.device("cpu")
        if given is not None and entry["persistent"]:
            values[path] = _given(given, entry, reader.what).to(place)
            continue
        if entry["persistent"] and not reader.manifest["weights"]:
            raise PackageError(f"{reader.what} has no weights: give load() a state_dict of the model")
        number = entry["storage"]
        if number not in memories:
            memory = torch.empty(entry["bytes"], dtype=torch.uint8)
            reader.read_into(f"tensors/{number}", memory)
            memories[number] = memory.to(place)
        values[path] = _view(memories[number], entry)
    if given is not None:
        unknown = sorted(set(given) - {entry["path"] for entry in described["tensors"] if entry["persistent"]})
        if unknown:
            raise PackageError(f"state_dict has '{unknown[0]}', which the model of {reader.what} has not")
    return values


def _view(memory: torch.Tensor, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, entry["dtype"])
    shape, strides, offset = entry["shape"], entry["strides"], entry["offset"]
    most = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    if math.prod(shape) and most * dtype.itemsize > memory.numel():
        raise ValueError(f"'{entry['path']}' is not within its memory")
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), offset, shape, strides)


def _given(given: Mapping[str, torch.Tensor], entry: Mapping[str, Any], what: str) -> torch.Tensor:
    path, wanted = entry["path"], (torch.Size(entry["shape"]), getattr(torch, entry["dtype"]))
    if path not in given:
        raise PackageError(f"state_dict has no '{path}', which the model of {what} has")
    found = given[path].detach()
    if (found.shape, found.dtype) != wanted:
        raise PackageError(
            f"'{path}' of state_dict is {found.dtype} {list(found.shape)}, {what} has {wanted[1]} {entry['shape']}"
        )
    laid = torch.empty_strided(found.shape, entry["strides"], dtype=found.dtype, device=found.device)
    return laid.copy_(found)  # a copy: the caller's tensors stay his own, and kernels are for these strides


def tree_of(described: Mapping[str, Any], values: Mapping[str, torch.Tensor]) -> nn.Module:
    """Modules without code that hold the model's tensors under its names. Equal memory becomes one tensor."""
    root = nn.Module()
    for path in described["modules"]:
        parent, _, name = path.rpartition(".")
        root.get_submodule(parent).register_module(name, nn.Module())
    known: dict[tuple[Any, ...], torch.Tensor] = {}
    for entry in described["tensors"]:
        parent, _, name = entry["path"].rpartition(".")
        is_parameter = entry["kind"] == "parameter"
        value = values[entry["path"]]
        place = entry["storage"], entry["offset"], *entry["shape"], *entry["strides"], value.data_ptr()
        what = (entry["kind"], value.dtype, *place)
        if what not in known:
            known[what] = nn.Parameter(value, requires_grad=False) if is_parameter else value
        module = root.get_submodule(parent)
        if is_parameter:
            module.register_parameter(name, known[what])  # type: ignore[arg-type]
        else:
            module.register_buffer(name, known[what], persistent=entry["persistent"])
    return root
