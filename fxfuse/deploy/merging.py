"""merge(): joins packages of one model, saved on machines of several kinds, into one file for all of them."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from fxfuse.deploy import archive
from fxfuse.deploy.loaded import GRAPHS
from fxfuse.errors import PackageError


def merge(path: str | os.PathLike[str], *packages: str | os.PathLike[str], check_owner: bool = True) -> None:
    """Writes one package with the kernels and choices of several, for GPUs of all their architectures.

        fxfuse.save(fast, "a100.fxfuse", images)       # on an A100
        fxfuse.save(fast, "h100.fxfuse", images)       # on an H100
        fxfuse.merge("model.fxfuse", "a100.fxfuse", "h100.fxfuse")

    Kernels are measured on the GPU that the model is on, so each kind of machine saves a package of its own. A package
    for GPUs that were not there (`architectures` of fxfuse.save) may be among them.
    Code for CPUs comes from the first package: save it for a level that all machines have (`architectures`).

    Args:
        path: the file to write.
        packages: at least two, of the same model, weights, examples and versions.
        check_owner: as fxfuse.load takes it.

    Raises PackageError for packages that differ in more than their kernels and choices, or cannot be read.
    """
    if len(packages) < 2:
        raise PackageError("merge takes at least two packages")
    with contextlib.ExitStack() as stack:
        readers = [
            archive.Reader(
                stack.enter_context(archive.opened(one, None, check_owner)), f"package '{os.path.basename(one)}'"
            )
            for one in packages
        ]
        first, *others = readers
        for other in others:
            _check_alike(first, other)
        nothing: dict[str, Any] = {"kernels": {}, "choices": {}, "gpus": [], **dict.fromkeys(_LISTS, ())}
        manifest: dict[str, Any] = {**first.manifest, **nothing}
        writer = stack.enter_context(archive.Writer(path))
        added: set[str] = set()
        for reader in readers:
            manifest["gpus"] += [gpu for gpu in reader.manifest["gpus"] if gpu not in manifest["gpus"]]
            for name in _LISTS:
                manifest[name] = sorted({*manifest[name], *reader.manifest[name]})
            manifest["choices"] = {**reader.manifest["choices"], **manifest["choices"]}
            manifest["kernels"] = {**reader.manifest["kernels"], **manifest["kernels"]}
        needed = {kernel["member"] for kernel in manifest["kernels"].values()}
        for reader in readers:
            for name in reader.manifest["members"]:
                if name not in added and (not name.startswith("kernels/") or name in needed):
                    writer.add(name, reader.read(name), compress=not name.startswith("tensors/"))
                    added.add(name)
        writer.finish({name: value for name, value in manifest.items() if name != "members"})


_LISTS = ("architectures", "unmeasured")
_OWN = (*_LISTS, "kernels", "choices", "gpus", "members", "cpu")
"""Items of the manifest in which packages of one model may differ."""


def _check_alike(one: archive.Reader, other: archive.Reader) -> None:
    for name in sorted({*one.manifest, *other.manifest} - {*_OWN}):
        if one.manifest.get(name) != other.manifest.get(name):
            raise PackageError(
                f"{one.what} is for {name} {one.manifest.get(name)}, {other.what} for {other.manifest.get(name)}"
            )
    for name in sorted({*one.manifest["members"], *other.manifest["members"]}):
        is_alike = one.manifest["members"].get(name) == other.manifest["members"].get(name)
        if not name.startswith("kernels/") and not is_alike:
            what = "calls" if name == GRAPHS else "weights"
            raise PackageError(f"{one.what} and {other.what} are not of one model: their {what} differ")
