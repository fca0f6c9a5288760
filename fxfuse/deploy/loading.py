"""load(): the model that a package holds, if the file can be trusted and is for this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fxfuse import build as builds
from fxfuse import cache, packaged
from fxfuse.cuda import gpu
from fxfuse.deploy import archive, machine, tensors
from fxfuse.deploy.loaded import GRAPHS, LoadedModule, module_of
from fxfuse.errors import PackageError


def load(
    path: str | os.PathLike[str],
    *,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    device: torch.device | str | None = None,
    strict: bool = False,
    build: bool = False,
    sha256: str | None = None,
    check_owner: bool = True,
) -> LoadedModule:
    """The model that fxfuse.save wrote, ready to run: no compiler is needed, nor the model's own source.

        fast = fxfuse.load("resnet.fxfuse")
        y = fast(images)

    **Loading a package runs its code**: kernels are native code, as in any shared library. So the file must belong to
    you or root, and nobody else may be able to write it; or you give its digest (`sha256`). Digests inside the file
    find damage, and say nothing about who made it.

    Args:
        state_dict: parameters and buffers by name, for a package without weights, or to replace its own.
        device: where the model goes: by default the CPU, or the current GPU if it was saved on one.
        strict: raise MissingKernelError for a call that needs a kernel which the package does not have. By default
            torch runs it with a warning, and fxfuse.explain gives the reason.
        build: compile such kernels, if there is a compiler, as an optimised model does. (By default nothing is ever
            compiled.)
        sha256: the file's digest (Saved.sha256). With it the file may be anybody's, but no other file is loaded.
        check_owner: False to load a file that others own or can write.

    Returns a module with the model's parameters and buffers under their own names, for inference. It takes the model's
    arguments, and returns what the model does. Its `entries` are the calls that it was saved for, `graphs` their fused
    graphs, as fxfuse.explain takes them.

    Raises PackageError for a file that is damaged, not trusted, of another version of fxfuse, torch, Python or CUDA, or
    for another machine; it says which.
    """
    what = f"package '{os.path.basename(path)}'"
    with archive.opened(path, sha256, check_owner) as file:
        reader = archive.Reader(file, what)
        manifest = reader.manifest
        try:
            machine.check(manifest, what)
            described = json.loads(reader.read(GRAPHS))
            place = torch.device(device or described["device"])
            if place.type != described["device"]:
                raise PackageError(f"{what} was saved for {described['device']}, not {place.type}: save one for that")
            unmeasured = False
            if place.type == "cuda":
                machine.check_cuda(manifest, what)
                place = torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)
                unmeasured = machine.check_gpu(manifest, place, what)
            values = tensors.read(reader, described, place, state_dict)
            _import_kernels(reader)
            _import_choices(manifest, place)
            described["settings"]["strict"] = strict
            return module_of(described, tensors.tree_of(described, values), place, what, build, unmeasured)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PackageError(f"{what} does not hold what a package of its format does: {error!r}") from error


def _import_kernels(reader: archive.Reader) -> None:
    """Loads the package's libraries, which then need no file any more."""
    kernels = reader.manifest["kernels"]
    with _folder(reader.what) as folder:
        files: dict[str, Path] = {}
        for number, member in enumerate(sorted({kernel["member"] for kernel in kernels.values()})):
            files[member] = folder / f"{number}.so"
            files[member].write_bytes(reader.read(member))
        for key, kernel in kernels.items():
            if not re.fullmatch("[0-9a-f]{32}", kernel["key"]):
                raise ValueError(f"a kernel's key is {kernel['key']!r}")
            if key in packaged.kernels:  # another package of this process brought it
                continue
            try:
                packaged.kernels[key] = builds.import_library(kernel["key"], files[kernel["member"]])
            except (ImportError, OSError) as error:
                raise PackageError(
                    f"{reader.what}: the kernel for {kernel['label']} cannot be loaded here: {error}. If programs may "
                    "not run from its folder (noexec), set TMPDIR to one where they may"
                ) from error


def _import_choices(manifest: Mapping[str, Any], device: torch.device) -> None:
    """Takes over the package's choices, and the GPUs of this one's architecture that they were measured on."""
    packaged.choices.update(manifest["choices"])
    own = gpu.architecture(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None
    for name, multiprocessors, architecture in manifest["gpus"]:
        if architecture == own and (name, multiprocessors) not in packaged.gpus:
            packaged.gpus.append((str(name), int(multiprocessors)))


@contextlib.contextmanager
def _folder(what: str) -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(cache.temporary_folder(tempfile.gettempdir()))
        except OSError as error:
            raise PackageError(f"{what} cannot be unpacked: {error}; set TMPDIR to a folder of your own") from error
        yield folder
