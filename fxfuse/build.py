"""Generated source text in, a loaded kernel out; the only file that calls load_inline.

`load(source)` returns a function launch(params, context, *pointers) (binding.h). Builds are cached on disk under a
hash of everything that decides the machine code: the source, every header of the package, the flags, the compilers,
torch and Python. The cache (FXFUSE_CACHE_DIR, else the user's cache folder) is private to the user. An entry is built
in a temporary folder and renamed into place, so that neither a second process nor a kill can leave half an entry; its
library is checked against a recorded hash before it is loaded, so a damaged one is rebuilt.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import inspect
import json
import logging
import os
import platform
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from fxfuse.errors import BuildError, ToolchainError

logger = logging.getLogger("fxfuse")

PACKAGE: Final = Path(__file__).parent
Launch = Callable[..., None]
"""launch(params: bytes, context: int, *pointers: int); raises RuntimeError with the device's message."""

_MANIFEST: Final = "manifest.json"

CPU_FLAGS: Final = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp",
    # Both are safe for NaN and inf: errno is never read, and no floating-point trap handler is installed.
    "-fno-math-errno", "-fno-trapping-math",
    # a * b + c is contracted where cpu/kernels/math.h says so and nowhere else: its error bounds depend on it
    "-ffp-contract=off",
    # g++'s partial redundancy elimination shares truth values between branches, and the vectoriser then gives up
    "-fno-tree-pre",
    "-fvisibility=hidden",
)  # fmt: skip
CUDA_FLAGS: Final = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xcompiler", "-fvisibility=hidden")


@dataclass(frozen=True)
class Source:
    """A kernel's complete text: what the compiler sees but for the package's headers."""

    text: str
    architecture: tuple[int, int] | None = None
    """Compute capability of the GPU to build for; None for CPU code."""
    label: str = "kernel"
    """What it is, for messages: "linear: relu(acc + o0)"."""

    @property
    def is_cuda(self) -> bool:
        return self.architecture is not None


# ----------------------------------------------------------------------------------------------- cache


def cache_directory() -> Path:
    """Where builds are kept: FXFUSE_CACHE_DIR, else $XDG_CACHE_HOME/fxfuse, else ~/.cache/fxfuse."""
    explicit = os.environ.get("FXFUSE_CACHE_DIR")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fxfuse"


def private_cache() -> Path:
    """The cache directory, or a temporary one where it cannot be used."""
    return _private(cache_directory())


def _private(directory: Path) -> Path:
    """`directory`, created if need be, if only this user can write there; else a temporary one, with a warning."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise PermissionError(f"{directory} belongs to or is writable by another user")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(f"{directory} is not writable")
        return directory
    except OSError as error:
        return _temporary(directory, str(error))


@functools.cache
def _temporary(instead_of: Path, reason: str) -> Path:
    fallback = Path(tempfile.mkdtemp(prefix="fxfuse-"))
    logger.warning(
        "fxfuse: the kernel cache cannot be used (%s); building in %s for this process only. "
        "Set FXFUSE_CACHE_DIR to a folder of your own.", reason, fallback,
    )  # fmt: skip
    return fallback


def digest_of(files: Iterable[Path]) -> str:
    """Hash of the files' names and contents."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


@functools.cache
def package_digest() -> str:
    """Hash of every header that generated sources include."""
    return digest_of([*sorted(PACKAGE.rglob("*.h")), *sorted(PACKAGE.rglob("*.cuh"))])


@functools.cache
def _machine() -> str:
    """What -march=native means here."""
    try:
        flags = next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))
        )
    except (OSError, StopIteration):
        flags = platform.processor()
    return platform.machine() + flags


def _identity(program: str | None) -> str:
    """A compiler's path, size and age: enough to notice that it was replaced, without running it."""
    if program is None:
        return "none"
    status = os.stat(program)
    return f"{os.path.realpath(program)}:{status.st_size}:{status.st_mtime_ns}"


def _key(source: Source) -> str:
    compilers = [_identity(_cxx())]
    if source.is_cuda:
        compilers.append(_identity(_nvcc()))
    parts = [
        source.text, repr(source.architecture), package_digest(), repr(_flags(source)), *compilers,
        torch.__version__, sys.version, "" if source.is_cuda else _machine(),
    ]  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


# ------------------------------------------------------------------------------------------- toolchain


def _cxx() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))  # as torch chooses


def _nvcc() -> str | None:
    # torch decides which CUDA toolkit builds extensions (CUDA_HOME, then PATH, then the usual folders)
    from torch.utils.cpp_extension import CUDA_HOME

    home = os.environ.get("CUDA_HOME") or CUDA_HOME
    return shutil.which("nvcc", path=os.path.join(home, "bin")) if home else None


def _ninja_directory() -> str | None:
    """Folder of the ninja that pip installed beside this Python, which PATH need not contain."""
    try:
        import ninja
    except ImportError:
        return None
    return str(ninja.BIN_DIR)


def check_toolchain(cuda: bool) -> None:
    """Raises ToolchainError naming what is missing and how to get it."""
    if _cxx() is None:
        raise ToolchainError("no C++ compiler found: install one (Debian, Ubuntu: apt install g++) or set CXX")
    if shutil.which("ninja") is None and _ninja_directory() is None:
        raise ToolchainError("no ninja found: pip install ninja")
    if cuda and _nvcc() is None:
        raise ToolchainError(
            "no nvcc found: install the CUDA toolkit that matches torch.version.cuda, or set CUDA_HOME"
        )


def _flags(source: Source) -> tuple[str, ...]:
    if source.architecture is None:
        return CPU_FLAGS
    major, minor = source.architecture
    specific = "a" if (major, minor) == (9, 0) else ""  # with the instructions that only Hopper has
    return (*CUDA_FLAGS, f"-gencode=arch=compute_{major}{minor}{specific},code=sm_{major}{minor}{specific}")


# --------------------------------------------------------------------------------------------- loading

_loaded: dict[str, Launch] = {}
_locks: dict[str, threading.Lock] = {}
_locks_lock = threading.Lock()


def load(source: Source) -> Launch:
    """The compiled kernel: from this process, from the cache, or built now (seconds).

    Safe to call from several threads and processes. Raises ToolchainError or BuildError, NotBuilt inside `built_only`.
    """
    key = _key(source)
    with _locks_lock:
        lock = _locks.setdefault(key, threading.Lock())
    if not lock.acquire(blocking=may_build()):  # another thread is building it
        raise NotBuilt
    try:
        if key not in _loaded:
            cached = _load_cached(key)
            if cached is None:
                check_may_build()
            _loaded[key] = cached or _build(source, key)
        return _loaded[key]
    finally:
        lock.release()


class NotBuilt(Exception):
    """A kernel would have to be compiled where only those that exist are asked for."""


_thread = threading.local()


@contextlib.contextmanager
def built_only() -> Iterator[None]:
    """Inside, in this thread, what would have to be compiled raises NotBuilt instead."""
    outer = getattr(_thread, "built_only", False)
    _thread.built_only = True
    try:
        yield
    finally:
        _thread.built_only = outer


def may_build() -> bool:
    """Whether this thread is outside of `built_only`."""
    return not getattr(_thread, "built_only", False)


def check_may_build() -> None:
    """Raises NotBuilt inside `built_only`."""
    if not may_build():
        raise NotBuilt


def _load_cached(key: str) -> Launch | None:
    entry = private_cache() / key
    if not entry.exists():
        return None
    try:
        manifest = json.loads((entry / _MANIFEST).read_text())
        library = entry / manifest["library"]
        if hashlib.sha256(library.read_bytes()).hexdigest() != manifest["sha256"]:
            raise ValueError("its library is damaged")
        return _import(library)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        logger.info("fxfuse: rebuilding a cached kernel: %s", error)
        shutil.rmtree(entry, ignore_errors=True)
        return None


def _import(library: Path) -> Launch:
    name = library.name.split(".")[0]
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    launch: Launch = module.launch
    return launch


def _build(source: Source, key: str) -> Launch:
    check_toolchain(source.is_cuda)
    cache = private_cache()
    name = f"fxfuse_{key}"
    started = time.monotonic()
    logger.info("fxfuse: compiling %s for %s", source.label, "CUDA" if source.is_cuda else "CPU")
    try:
        building = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=cache))
    except OSError as error:
        raise ToolchainError(f"nothing can be written to the kernel cache {cache}: {error}") from error
    try:
        one_thread = ThreadPoolExecutor(1, initializer=_yield_processors)
        with _compilers[source.is_cuda], _build_environment(), one_thread as thread:
            thread.submit(_load_inline, source, name, building).result()
    except Exception as error:  # load_inline raises whatever its steps do: RuntimeError, OSError, ImportError, …
        kept = cache / f"failed-{key}"
        shutil.rmtree(kept, ignore_errors=True)
        building.rename(kept)
        raise BuildError(
            f"{source.label} did not compile; its source is kept in {kept}. The compiler said:\n{error}"
        ) from error
    library = next(building.glob("*.so"))  # load_inline adds a version to a name that it builds again
    launch = _import(library)
    try:
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
        manifest = {"library": library.name, "sha256": digest, "label": source.label}
        (building / _MANIFEST).write_text(json.dumps(manifest))
        building.rename(cache / key)
    except OSError:
        # Another process finished the same entry first, or the disk is full. Ours is loaded, so nothing is lost.
        shutil.rmtree(building, ignore_errors=True)
    logger.info("fxfuse: compiled %s in %.1f s", source.label, time.monotonic() - started)
    return launch


_PROCESSORS: Final = os.cpu_count() or 1

_compilers: Final = {
    False: threading.BoundedSemaphore(_PROCESSORS),
    True: threading.BoundedSemaphore(max(1, _PROCESSORS - 1)),
}
"""As many at a time as there are processors: every one takes half a gigabyte, and callers ask for whole networks.

Where kernels are for a GPU one less: what is compiled already is measured meanwhile.
"""

COMPILERS_NICE: Final = 10
"""How much lower the priority of compilers is than that of the thread that measures: the launches of a timed run must
be issued within 0.2 ms (benchmark.AHEAD_CYCLES), so it cannot wait for a processor."""


def _yield_processors() -> None:
    """Lowers the priority of this thread, and of the processes that it starts."""
    if platform.system() == "Linux":  # elsewhere threads have no priority of their own
        with contextlib.suppress(OSError):
            os.nice(COMPILERS_NICE)


_environment_lock = threading.Lock()


@contextlib.contextmanager
def _build_environment() -> Iterator[None]:
    """PATH with ninja on it."""
    with _environment_lock:
        directory = _ninja_directory()
        if shutil.which("ninja") is None and directory is not None:
            os.environ["PATH"] = directory + os.pathsep + os.environ.get("PATH", "")
    yield


def _load_inline(source: Source, name: str, directory: Path) -> None:
    from torch.utils import cpp_extension

    arguments: dict[str, Any] = {}
    # Without torch's headers a kernel takes 3 s to compile instead of 60; torch before 2.6 always adds them.
    if "no_implicit_headers" in inspect.signature(cpp_extension.load_inline).parameters:
        arguments["no_implicit_headers"] = True
    binding = '#include "binding.h"\n'
    for_the_host = f"\n#ifndef __CUDA_ARCH__\n{binding}#endif\n"
    includes = [str(PACKAGE), str(PACKAGE / ("cuda" if source.is_cuda else "cpu") / "kernels")]
    if source.is_cuda:
        arguments |= {
            "cpp_sources": [""],  # as a file of its own the binding takes longer
            "cuda_sources": [source.text + for_the_host],
            "extra_cuda_cflags": list(_flags(source)),
        }
    else:
        arguments |= {"cpp_sources": [binding + source.text], "extra_cflags": list(_flags(source))}
        if platform.system() != "Darwin":
            arguments["extra_ldflags"] = ["-fopenmp"]
    cpp_extension.load_inline(
        name=name,
        extra_include_paths=includes,
        build_directory=str(directory),
        with_cuda=source.is_cuda,
        verbose=False,
        **arguments,
    )
