"""The file of a package: a zip of plain members, each with its size and SHA-256 in the manifest.

    manifest.json       what is here, for which software and machine; its own digest stands beside its contents
    graphs.json         modules, tensors and graphs, by names (graphs.py)
    tensors/0 …         the bytes of each tensor's memory, uncompressed: nothing is unpickled
    kernels/….so        compiled kernels

Digests find damage. They say nothing about who made the file. Kernels are native code, so a package needs as much trust
as any library. `opened` refuses files that others could have written, unless the caller knows the file's digest.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from fxfuse.errors import PackageError

FORMAT: Final = 2
"""The version of the file's format. No other one is read."""
MANIFEST: Final = "manifest.json"
_KIND: Final = "fxfuse package"
_MOST_MANIFEST: Final = 64 << 20
_CHUNK: Final = 1 << 20
_UNREADABLE: Final = (
    zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError,
    NotImplementedError, RuntimeError,
)  # fmt: skip
"""What reading a damaged zip or JSON document can raise."""


class Writer:
    """A package that is being written. It is renamed into place when the block ends without an exception."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._members: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Writer:
        try:
            descriptor, name = tempfile.mkstemp(prefix=f".{self._path.name}-", dir=self._path.parent)
        except OSError as error:
            raise PackageError(f"{self._path} cannot be written: {error}") from error
        self._written = Path(name)
        self._file = os.fdopen(descriptor, "wb")
        self._zip = zipfile.ZipFile(self._file, "w", allowZip64=True)
        return self

    def add(self, name: str, data: bytes | memoryview, compress: bool) -> None:
        """Adds a member."""
        info = zipfile.ZipInfo(name)  # dated 1980, so that equal packages are equal files
        info.compress_type = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
        with self._zip.open(info, "w", force_zip64=len(data) > zipfile.ZIP64_LIMIT // 2) as member:
            member.write(data)
        self._members[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Adds the manifest, which lists the members added before. It comes last."""
        value = {**manifest, "members": self._members}
        document = {"kind": _KIND, "format": FORMAT, "digest": _digest(value), "value": value}
        self._zip.writestr(zipfile.ZipInfo(MANIFEST), json.dumps(document, indent=1), zipfile.ZIP_DEFLATED)

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self._zip.close()
            self._file.close()
            if kind is None:
                umask = os.umask(0)
                os.umask(umask)
                self._written.chmod(0o644 & ~umask)
                self._written.replace(self._path)
        except OSError as error:
            raise PackageError(f"{self._path} cannot be written: {error}") from error
        finally:
            self._written.unlink(missing_ok=True)


class Reader:
    """An open package. Every method raises PackageError for a file that is not what was saved."""

    def __init__(self, file: BinaryIO, what: str) -> None:
        self.what = what
        try:
            self._zip = zipfile.ZipFile(file)
            info = self._zip.getinfo(MANIFEST)
            if info.file_size > _MOST_MANIFEST:
                raise ValueError("its manifest is too large")
            document = json.loads(self._zip.read(info))
            kind, version = document["kind"], document["format"]
        except _UNREADABLE as error:
            raise PackageError(f"{what} is no package of fxfuse, or not all of one: {_said(error)}") from error
        if kind != _KIND or version != FORMAT:
            raise PackageError(
                f"{what} has format {version!r} of {kind!r}, this fxfuse reads {FORMAT} of {_KIND!r}; save it again"
            )
        if _digest(document.get("value")) != document.get("digest"):
            raise PackageError(f"{what} is damaged: its manifest is not what was saved")
        self.manifest: dict[str, Any] = document["value"]
        names = [info.filename for info in self._zip.infolist()]
        if sorted(names) != sorted([*self.manifest["members"], MANIFEST]):
            raise PackageError(f"{what} is damaged: it has other members than were saved")

    def read(self, name: str) -> bytes:
        """The bytes of a member."""
        return b"".join(self._chunks(name))

    def read_into(self, name: str, memory: torch.Tensor) -> None:
        """Reads a member into a tensor of as many bytes."""
        view, at = _bytes_of(memory.untyped_storage()), 0
        for chunk in self._chunks(name):
            view[at : at + len(chunk)] = chunk
            at += len(chunk)

    def _chunks(self, name: str) -> Iterator[bytes]:
        """A member's bytes, part by part. Raises PackageError at the end if they are not what was saved."""
        try:
            expected = self.manifest["members"][name]
            size, digest = int(expected["bytes"]), hashlib.sha256()
            with self._zip.open(name) as member:
                done = 0
                while chunk := member.read(_CHUNK):
                    done += len(chunk)
                    if done > size:
                        break
                    digest.update(chunk)
                    yield chunk
        except _UNREADABLE as error:
            raise PackageError(f"{self.what} is damaged: {name} cannot be read: {_said(error)}") from error
        if done != size or digest.hexdigest() != expected["sha256"]:
            raise PackageError(f"{self.what} is damaged: {name} is not what was saved")


def opened(path: str | os.PathLike[str], sha256: str | None, check_owner: bool) -> BinaryIO:
    """Opens the file for reading, if it can be trusted as the caller asked (fxfuse.load); else raises PackageError.

    Everything afterwards is read from this open file, whatever takes its place on disk.
    """
    try:
        # if it is a pipe, this does not wait for a writer; the caller closes the file
        file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115
    except OSError as error:
        raise PackageError(f"{path} cannot be opened: {error.strerror or error}") from error
    try:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise PackageError(f"{path} is not a file")
        if sha256 is not None:
            found = _digest_of(file)
            if found != sha256.lower():
                raise PackageError(f"{path} has the SHA-256 {found}, not {sha256}: it is another file")
        elif check_owner:
            _check_owner(path, status)
        return file
    except BaseException:
        file.close()
        raise


def _check_owner(path: str | os.PathLike[str], status: os.stat_result) -> None:
    remedy = "loading it runs its code; if you trust it, say so by sha256=… or check_owner=False"
    if status.st_uid not in (os.getuid(), 0):
        raise PackageError(f"{path} belongs to another user (uid {status.st_uid}): {remedy}")
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise PackageError(f"{path} can be written by other users: chmod go-w it first; {remedy}")


def digest_of(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return _digest_of(file)


def _digest_of(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    file.seek(0)
    return digest.hexdigest()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__


# ------------------------------------------------------------------------------------------------ memory


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The whole memory that a tensor on a CPU is in."""
    return _bytes_of(tensor.untyped_storage())


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    if not storage.nbytes():
        return memoryview(b"")
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    memory.storage = storage  # type: ignore[attr-defined]  # alive for as long as the view
    return memoryview(memory).cast("B")
