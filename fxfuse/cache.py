"""The kernel cache on disk. Functions to list, verify, prune and clear it are for users, too.

    for entry in fxfuse.cache.entries():
        print(entry.label, entry.bytes)

`fxfuse cache` does the same in a shell.

- *Contents.* The cache (FXFUSE_CACHE_DIR, else the user's cache folder) holds one folder for each compiled kernel, and
  measurements in `choices`.
- *Trust.* A file is loaded only if it is a regular file of this user, in folders of this user that no other user can
  write, with no symbolic link in its path below the cache. It names the key that it is for, and its digest is checked.
- *Size.* Leftovers of killed processes and failed builds are removed after a day. Of the kernels, the last used 2 GB
  are kept (FXFUSE_CACHE_LIMIT). Files and folders whose names fxfuse does not give are never touched.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger("fxfuse")

LIMIT: Final = 2 << 30
"""Bytes of kernels that are kept, if FXFUSE_CACHE_LIMIT is not set."""
LEFT_OVER: Final = 24 * 3600.0
"""Seconds after which unfinished files and folders are removed."""

_MANIFEST: Final = "manifest.json"
_LOCK: Final = ".lock"
"""A file in each folder that a process works in. The process holds a lock (flock) on it meanwhile."""
_TEMPORARY: Final = "fxfuse-cache-"
_MOST_TEXT: Final = 1 << 20  # bytes of a document
_MOST_LIBRARY: Final = 1 << 30

_KEY: Final = "[0-9a-f]{32}"
_ENTRY: Final = re.compile(rf"({_KEY})(-[0-9a-f]{{8}})?")
"""The name of a kernel's folder: its key, and a hash of its compilers (missing in entries of fxfuse 0.1)."""
_CHOICE: Final = re.compile(rf"{_KEY}\.json")
_UNFINISHED: Final = re.compile(rf"failed-{_KEY}|\.{_KEY}-\w+|\.removed-\w+")

UNREADABLE: Final = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Exceptions that reading a damaged document can raise."""


# ------------------------------------------------------------------------------------------- its folder


def directory() -> Path:
    """The cache's folder: FXFUSE_CACHE_DIR, else $XDG_CACHE_HOME/fxfuse, else ~/.cache/fxfuse."""
    explicit = os.environ.get("FXFUSE_CACHE_DIR")
    if explicit:
        return Path(explicit).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # the XDG specification: "If an implementation encounters a relative path […] it should […] ignore it."
    return (base if base.is_absolute() else Path.home() / ".cache") / "fxfuse"


def folders() -> list[Path]:
    """The folders where kernels are looked for: the cache, which may be read-only, and this process's temporary one."""
    found = [_used_instead[0]] if _used_instead else []
    cache = directory()
    with contextlib.suppress(OSError):
        _check_private(cache.stat(), cache)
        found.insert(0, cache)
    return found


def writable() -> Path:
    """The cache's folder, created if need be. If it cannot be used, a temporary one, with a warning."""
    cache = directory()
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(cache.stat(), cache)
        if not os.access(cache, os.W_OK | os.X_OK):
            raise PermissionError(f"{cache} is not writable")
        return cache
    except OSError as error:
        return _temporary(cache, str(error))


def _check_private(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{path} is not a folder")
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise PermissionError(f"{path} belongs to or is writable by another user")


_used_instead: list[Path] = []
"""The temporary cache of this process, if it has one."""


@contextlib.contextmanager
def temporary_folder(within: str) -> Iterator[Path]:
    """A temporary folder in the folder `within`. If this process is killed, the folder is removed after a day."""
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=within) as name:
        descriptor = lock(Path(name))
        try:
            yield Path(name)
        finally:
            if descriptor is not None:
                os.close(descriptor)


@functools.cache
def _temporary(instead_of: Path, reason: str) -> Path:
    if not _used_instead:
        folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
        _used_instead.append(folder)
        atexit.register(_remove_temporary, folder, lock(folder), os.getpid())
    logger.warning(
        "fxfuse: the kernel cache cannot be used (%s); building in %s for this process only. "
        "Set FXFUSE_CACHE_DIR to a folder of your own.", reason, _used_instead[0],
    )  # fmt: skip
    return _used_instead[0]


def _remove_temporary(folder: Path, descriptor: int | None, owner: int) -> None:
    if os.getpid() == owner:  # not a forked child
        shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------------------------------------- reading


def read(cache: Path, *names: str, most: int = _MOST_TEXT) -> bytes:
    """The bytes of the file cache/names[0]/names[1]/…, if the file and its folders are private to this user.

    Raises OSError if they are not, and ValueError if the file has more than `most` bytes.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as opened:
        folder = os.open(cache, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, folder)
        _check_private(os.fstat(folder), cache)
        for name in names[:-1]:
            folder = os.open(_plain(name), flags | os.O_DIRECTORY, dir_fd=folder)
            opened.callback(os.close, folder)
            _check_private(os.fstat(folder), Path(name))
        descriptor = os.open(_plain(names[-1]), flags, dir_fd=folder)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                raise PermissionError(f"{names[-1]} is not a file of this user's")
            if status.st_size > most:
                raise ValueError(f"{names[-1]} has {status.st_size} bytes")
            return file.read(most)


def _plain(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not a file's name")
    return name


def read_document(cache: Path, *names: str, key: str) -> Any:
    """The value that `write_document` stored for `key`. Raises one of UNREADABLE if the file is not what it stored."""
    document = json.loads(read(cache, *names))
    if not isinstance(document, dict) or document.keys() != {"key", "digest", "value"}:
        raise ValueError("it is none of this version's")
    if document["key"] != key:
        raise ValueError(f"it is another one's, of key {document['key']}")
    if document["digest"] != _digest(document["value"]):
        raise ValueError("it is damaged")
    return document["value"]


def write_document(path: Path, key: str, value: Any) -> None:
    """Stores a JSON value. Readers see all of it or nothing. Raises OSError if it cannot be written."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor, written = tempfile.mkstemp(prefix=".removed-", dir=path.parent)  # a name that is pruned if left there
    try:
        with open(descriptor, "w") as file:
            json.dump({"key": key, "digest": _digest(value), "value": value}, file, indent=1)
        os.replace(written, path)
    except BaseException:
        os.unlink(written)
        raise


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------- kernels


@dataclass(frozen=True)
class Entry:
    """A compiled kernel in the cache."""

    path: Path
    label: str
    """What the kernel computes."""
    bytes: int
    used: float
    """When the kernel was last loaded or built, in seconds since the epoch."""


def find(key: str, compilers: str | None) -> list[Path]:
    """Folders with the kernel `key` from these compilers. With None, from any compilers, the last used first."""
    if compilers is not None:
        return [path for path in (cache / entry_name(key, compilers) for cache in folders()) if os.path.lexists(path)]
    found = []
    for cache in folders():
        with contextlib.suppress(OSError):
            found += [(_used(path), path) for path in cache.glob(f"{key}-*") if _ENTRY.fullmatch(path.name)]
    return [path for _, path in sorted(found, reverse=True)]


def entry_name(key: str, compilers: str) -> str:
    """The name of a kernel's folder."""
    return f"{key}-{hashlib.sha256(compilers.encode()).hexdigest()[:8]}"


def library_of(entry: Path) -> Path:
    """The library in an entry. Raises one of UNREADABLE unless everything about the entry is as it should be."""
    return _checked(entry)[1]


def _checked(entry: Path) -> tuple[dict[str, Any], Path]:
    match = _ENTRY.fullmatch(entry.name)
    if match is None:
        raise ValueError(f"{entry.name} is not a kernel's name")
    manifest = read_document(entry.parent, entry.name, _MANIFEST, key=match[1])
    name = manifest["library"]
    if not re.fullmatch(rf"fxfuse_{match[1]}\.\w+", name):
        raise ValueError(f"its library is named {name!r}")
    if hashlib.sha256(read(entry.parent, entry.name, name, most=_MOST_LIBRARY)).hexdigest() != manifest["sha256"]:
        raise ValueError("its library is damaged")
    return manifest, entry / name


def touch(entry: Path) -> None:
    """Notes that an entry was used."""
    with contextlib.suppress(OSError):  # a read-only cache does not note this
        os.utime(entry / _MANIFEST)


def _used(entry: Path) -> float:
    try:
        return os.lstat(entry / _MANIFEST).st_mtime
    except OSError:
        return 0.0


@contextlib.contextmanager
def building(key: str) -> Iterator[Path]:
    """A new folder to build a kernel in. It is locked inside, and removed afterwards if it is still there."""
    folder = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=writable()))
    descriptor = lock(folder)
    try:
        yield folder
    finally:
        if descriptor is not None:
            os.close(descriptor)
        remove(folder)


def share(library: Path, key: str, compilers: str, text: str, label: str) -> None:
    """Makes an entry for a further kernel of a library, by a link to it. Raises OSError if that is impossible."""
    with building(key) as folder:
        try:
            os.link(library, folder / library.name)
        except OSError:  # a file system without links
            shutil.copy(library, folder / library.name)
        finish(folder / library.name, key, compilers, text, label)


def finish(library: Path, key: str, compilers: str, text: str, label: str) -> None:
    """Turns the folder in which `library` was built into a kernel's entry.

    Raises OSError, for example on a full disk; then there is no entry.

    Args:
        text: the kernel's source, which is kept for people to read.
    """
    folder, name = library.parent, f"fxfuse_{key}{library.suffix}"
    sha256 = hashlib.sha256(library.read_bytes()).hexdigest()
    for path in folder.iterdir():
        if path != library:
            path.unlink()
    library.rename(folder / name)
    (folder / "kernel.txt").write_text(text)
    value = {"library": name, "sha256": sha256, "label": label, "compilers": compilers}
    write_document(folder / _MANIFEST, key, value)
    folder.rename(folder.parent / entry_name(key, compilers))


def keep_failed(folder: Path, key: str) -> Path:
    """Keeps the folder of a failed build for people to read. Returns its new path."""
    kept = folder.parent / f"failed-{key}"
    try:
        remove(kept)
        folder.rename(kept)
    except OSError:  # another process keeps its own
        return folder if folder.exists() else kept
    return kept


def lock(folder: Path) -> int | None:
    """Marks a folder as one that a living process works in, until the returned descriptor is closed.

    None if it cannot be locked.
    """
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:  # a full disk: other processes then go by the folder's age
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None
    return descriptor


def _is_locked(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder of the cache, if that is possible."""
    with contextlib.suppress(OSError):
        if not path.name.startswith("."):  # renamed first, so that no process finds half of it
            hidden = path.with_name(f".removed-{os.urandom(8).hex()}")
            path.rename(hidden)
            path = hidden
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


# ----------------------------------------------------------------------------------------- for everybody


@dataclass(frozen=True)
class Status:
    """The contents of the cache, and whether it can be used."""

    directory: Path
    exists: bool
    problem: str | None
    """Why the cache is not used (it is not a private folder of this user); None if it can be used."""
    writable: bool
    """Whether new kernels are kept in it, also if it must be created. If not, each process has a temporary one."""
    kernels: int
    choices: int
    """Number of stored measurements: choices between candidates, and others."""
    bytes: int
    """Bytes of kernels and measurements."""
    limit: int
    """Bytes of kernels that are kept when it is pruned."""


def status() -> Status:
    """The state of the cache. Changes nothing."""
    cache = directory()
    exists, problem = os.path.lexists(cache), None
    if exists:
        try:
            _check_private(cache.stat(), cache)
        except OSError as error:
            problem = str(error)
    made_in = next(path for path in (cache, *cache.parents) if path.exists())
    writable = problem is None and made_in.is_dir() and os.access(made_in, os.W_OK | os.X_OK)
    kernels = _scan(cache, _ENTRY)
    choices = _scan(cache / "choices", _CHOICE)
    size = sum(map(_size, [*kernels, cache / "choices"]))
    return Status(cache, exists, problem, writable, len(kernels), len(choices), size, _limit())


def entries() -> list[Entry]:
    """The kernels in the cache, last used first."""
    found = []
    for path in _scan(directory(), _ENTRY):
        try:
            value = json.loads(read(path.parent, path.name, _MANIFEST)).get("value", {})
            label = str(value.get("label", "?"))
        except UNREADABLE:
            label = "?"
        found.append(Entry(path, label, _size(path), _used(path)))
    return sorted(found, key=lambda entry: entry.used, reverse=True)


def verify() -> dict[Path, str]:
    """The kernels that would be built again instead of loaded, and why. Other versions of fxfuse may have made them."""
    bad = {}
    for path in _scan(directory(), _ENTRY):
        try:
            _checked(path)
        except UNREADABLE as error:
            bad[path] = str(error) or type(error).__name__
    return bad


def prune(limit: int | None = None) -> int:
    """Removes kernels beyond `limit` bytes, and what killed processes and failed builds left more than a day ago.

    Args:
        limit: bytes of kernels to keep, the last used ones. By default FXFUSE_CACHE_LIMIT (a number of bytes, or
            "500M", "2G"), else 2 GB.

    Returns the number of bytes freed. Folders in which a running process builds are kept.
    """
    freed = sum(map(_remove_counted, _left_over(directory(), _UNFINISHED)))
    freed += sum(map(_remove_counted, _left_over(Path(tempfile.gettempdir()), re.compile(rf"{_TEMPORARY}\w+"), True)))
    return freed + _evict(_limit() if limit is None else limit)


def clear() -> int:
    """Removes all kernels and measurements. Returns the number of bytes freed. Processes keep what they have loaded."""
    cache = directory()
    freed = _evict(0) + prune()
    for path in _scan(cache, _UNFINISHED):
        freed += 0 if _is_locked(path) else _remove_counted(path)
    choices = cache / "choices"
    return freed + (_remove_counted(choices) if choices.is_dir() and not choices.is_symlink() else 0)


def _evict(limit: int) -> int:
    """Keeps the last used kernels up to `limit` bytes and removes the others. Returns the number of bytes freed."""
    freed = kept = 0
    used = sorted(((_used(path), path) for path in _scan(directory(), _ENTRY)), reverse=True)
    for _, path in used:
        size = _size(path)
        if kept + size > limit:
            freed += _remove_counted(path)
        else:
            kept += size
    return freed


def _left_over(folder: Path, names: re.Pattern[str], must_have_lock: bool = False) -> Iterator[Path]:
    for path in _scan(folder, names):
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            ours = status.st_uid == os.getuid() and (not must_have_lock or os.path.lexists(path / _LOCK))
            if ours and time.time() - status.st_mtime > LEFT_OVER and not _is_locked(path):
                yield path


def _scan(folder: Path, names: re.Pattern[str]) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if names.fullmatch(path.name))
    except OSError:
        return []


def _files(path: Path) -> Iterator[os.stat_result]:
    for parent, _, files in os.walk(path):
        for name in files:
            with contextlib.suppress(OSError):
                yield os.lstat(os.path.join(parent, name))


def _size(path: Path) -> int:
    """Bytes of an entry. A library that several entries link to counts in equal parts for each."""
    return sum(status.st_size // status.st_nlink for status in _files(path))


def _remove_counted(path: Path) -> int:
    """Removes an entry. Returns the number of bytes freed: a shared library's only with the last entry that has it."""
    size = sum(status.st_size for status in _files(path) if status.st_nlink == 1)
    remove(path)
    return 0 if os.path.lexists(path) else size


def parse_bytes(text: str) -> int:
    """A number of bytes from "1000000", "500M" or "2G" (powers of 1024). Raises ValueError for other text."""
    match = re.fullmatch(r"([0-9]{1,15})\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no number of bytes, such as 500M or 2G")
    return int(match[1]) << 10 * " KMGT".index(match[2].upper() or " ")


def _limit() -> int:
    text = os.environ.get("FXFUSE_CACHE_LIMIT", "").strip()
    try:
        return parse_bytes(text or str(LIMIT))
    except ValueError as error:
        logger.warning("fxfuse: FXFUSE_CACHE_LIMIT: %s", error)
        return LIMIT
