"""Generated source text in, a loaded kernel out; the only file that calls load_inline.

`load(source)` returns a function launch(params, context, *pointers) (binding.h). Builds are cached on disk (cache.py)
under a hash of everything that decides the machine code: the source, every header of the package, the flags, torch and
Python. Each set of compilers has entries of its own; where there is none, anybody's entry will do. An entry is built
in a temporary folder and renamed into place, so that neither a second process nor a kill can leave half an entry.

A build has a thread of its own, which no KeyboardInterrupt can reach: no lock is left held, and who waits can stop
waiting. toolchain.py sees to it that compilers end.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import inspect
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from fxfuse import cache, toolchain
from fxfuse.errors import BuildError, ToolchainError
from fxfuse.locks import free_in_children

logger = logging.getLogger("fxfuse")

PACKAGE: Final = Path(__file__).parent
Launch = Callable[..., None]
"""launch(params: bytes, context: int, *pointers: int); raises RuntimeError with the device's message."""

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


# ------------------------------------------------------------------------------------------------ keys


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


def _key(source: Source) -> str:
    """What a kernel depends on beside its compilers, as 32 hexadecimal digits."""
    parts = [
        source.text, repr(source.architecture), package_digest(), repr(_flags(source)),
        torch.__version__, sys.version, "" if source.is_cuda else _machine(),
    ]  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _flags(source: Source) -> tuple[str, ...]:
    if source.architecture is None:
        return CPU_FLAGS
    major, minor = source.architecture
    specific = "a" if (major, minor) == (9, 0) else ""  # with the instructions that only Hopper has
    return (*CUDA_FLAGS, f"-gencode=arch=compute_{major}{minor}{specific},code=sm_{major}{minor}{specific}")


# --------------------------------------------------------------------------------------------- loading

_loaded: dict[str, Launch] = {}
_loading = free_in_children(threading.Lock())


def load(source: Source) -> Launch:
    """The compiled kernel: from this process, from the cache, or built now (seconds).

    Safe to call from several threads and processes. Raises ToolchainError or BuildError, NotBuilt inside `built_only`.
    """
    key = _key(source)
    found = _loaded.get(key) or _load_cached(key, source)
    if found is None:
        check_may_build()
        found = _build_once(source, key)
    return found


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


def _load_cached(key: str, source: Source) -> Launch | None:
    with _loading:
        if key in _loaded:
            return _loaded[key]
        for entry in cache.find(key, toolchain.identity(source.is_cuda)):
            try:
                launch = _loaded[key] = _import(cache.library_of(entry))
            except Exception as error:  # whatever importing a file can raise, beside cache.UNREADABLE
                logger.info("fxfuse: rebuilding a cached kernel: %s", error)
                cache.remove(entry)
            else:
                cache.touch(entry)
                return launch
        return None


def _import(library: Path) -> Launch:
    name = library.name.split(".")[0]  # with the kernel's key, as the function PyInit_… in it
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    launch: Launch = module.launch
    return launch


# -------------------------------------------------------------------------------------------- building

_PROCESSORS: Final = os.cpu_count() or 1
_PRUNE_EVERY: Final = 64
"""Builds of a process, the first included, after which what is too old or too much in the cache is removed."""


@dataclass(frozen=True)
class _Running:
    """A kernel that is being built."""

    job: toolchain.Job
    launch: Future[Launch]


_lock = free_in_children(threading.Lock())
"""Held while a build begins or ends, never while one runs."""
_running: dict[str, _Running] = {}
_finished = 0
_compilers: dict[bool, threading.Semaphore] = {}
"""As many at a time as there are processors: every one takes half a gigabyte, and callers ask for whole networks.

Where kernels are for a GPU one less: what is compiled already is measured meanwhile.
"""
_worked: set[str] = set()
"""Compilers that made a kernel in this process."""
_hung: dict[tuple[str, float], ToolchainError] = {}
"""Those that made none within a limit of time: nobody waits for them as long again."""


def _renew() -> None:
    """In a new process, also one that was forked, nothing is being built."""
    _running.clear()
    _compilers[False] = threading.BoundedSemaphore(_PROCESSORS)
    _compilers[True] = threading.BoundedSemaphore(max(1, _PROCESSORS - 1))


_renew()
os.register_at_fork(after_in_child=_renew)


def _build_once(source: Source, key: str) -> Launch:
    """The kernel, when the thread that builds it has finished."""
    toolchain.check(source.is_cuda)
    with _lock:
        build = _running.get(key)
        if build is None:
            build = _Running(toolchain.Job(), Future())
            threading.Thread(target=_work, args=(source, key, build), name=f"fxfuse: {source.label}").start()
            _running[key] = build
    with interrupted_together():
        return build.launch.result()


@contextlib.contextmanager
def interrupted_together() -> Iterator[None]:
    """Inside, a KeyboardInterrupt ends all builds, and so those that other threads wait for."""
    try:
        yield
    except KeyboardInterrupt:
        interrupt()
        raise


def interrupt() -> None:
    """Ends all builds: who waits for one gets a KeyboardInterrupt. What is asked for later is built as ever."""
    with _lock:
        builds = list(_running.values())
    for build in builds:
        build.job.end()


def _work(source: Source, key: str, build: _Running) -> None:
    """What a build's thread does."""
    global _finished
    try:
        _yield_processors()
        with _compilers[source.is_cuda]:
            launch = _load_cached(key, source) or _compile(source, key, build.job)  # another process may have made it
            _loaded[key] = launch
    except BaseException as error:  # it is those' who wait
        _leave(key, build)
        build.launch.set_exception(error)
    else:
        _leave(key, build)
        build.launch.set_result(launch)
        with _lock:
            _finished += 1
            prune = _finished % _PRUNE_EVERY == 1
        if prune:  # nobody waits for it
            cache.prune()


def _leave(key: str, build: _Running) -> None:
    with _lock:
        if _running.get(key) is build:
            del _running[key]


def _compile(source: Source, key: str, job: toolchain.Job) -> Launch:
    compilers = toolchain.identity(source.is_cuda) or ""
    hung = (compilers, toolchain.limit())
    if hung in _hung:
        raise _hung[hung]
    started = time.monotonic()
    logger.info("fxfuse: compiling %s for %s", source.label, "CUDA" if source.is_cuda else "CPU")
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(cache.building(key))
        except OSError as error:
            raise ToolchainError(f"nothing can be written to the kernel cache: {error}") from error
        try:
            job.run(lambda: _load_inline(source, f"fxfuse_{key}", folder), folder)
            library = next(folder.glob("*.so"))  # load_inline adds a version to a name that it builds again
            launch = _import(library)
        except toolchain.TimeLimit as error:
            text = f"{error} (FXFUSE_COMPILE_TIMEOUT sets this limit)"
            if compilers in _worked:
                raise BuildError(f"{source.label}: {text}") from error
            raise _hung.setdefault(hung, ToolchainError(text)) from error
        except Exception as error:  # load_inline raises whatever its steps do: RuntimeError, OSError, ImportError, …
            kept = cache.keep_failed(folder, key)
            raise BuildError(
                f"{source.label} did not compile; its source is kept in {kept}. The compiler said:\n{error}"
            ) from error
        _worked.add(compilers)
        try:
            cache.finish(folder, key, compilers, library.name, source.label)
        except OSError as error:
            # Another process finished the same entry first, or the disk is full. Ours is loaded, so nothing is lost.
            logger.info("fxfuse: a kernel is not kept in the cache: %s", error)
    logger.info("fxfuse: compiled %s in %.1f s", source.label, time.monotonic() - started)
    return launch


COMPILERS_NICE: Final = 10
"""How much lower the priority of compilers is than that of the thread that measures: the launches of a timed run must
be issued within 0.2 ms (benchmark.AHEAD_CYCLES), so it cannot wait for a processor."""


def _yield_processors() -> None:
    """Lowers the priority of this thread, and of the processes that it starts."""
    if platform.system() == "Linux":  # elsewhere threads have no priority of their own
        with contextlib.suppress(OSError):
            os.nice(COMPILERS_NICE)


def _load_inline(source: Source, name: str, directory: Path) -> None:
    from torch.utils import cpp_extension

    arguments: dict[str, Any] = {}
    includes = [str(PACKAGE), str(PACKAGE / ("cuda" if source.is_cuda else "cpu") / "kernels")]
    # Without torch's headers a kernel takes 3 s to compile instead of 60.
    if "no_implicit_headers" in inspect.signature(cpp_extension.load_inline).parameters:
        arguments["no_implicit_headers"] = True
    else:  # torch before 2.7 always includes them: those here are empty
        includes.insert(0, str(PACKAGE / "implicit"))
    binding = '#include "binding.h"\n'
    for_the_host = f"\n#ifndef __CUDA_ARCH__\n{binding}#endif\n"
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
