"""Compiles generated source text and loads the kernel. This is the only file that calls load_inline.

`load(source)` returns a function launch(params, context, *pointers) (binding.h).

- *Cache.* Builds are cached on disk (cache.py) under a hash of everything that decides the machine code: the source,
  every header of the package, the flags, torch and Python. Each set of compilers has entries of its own. Without
  compilers, any set's entry will do. An entry is built in a temporary folder and renamed into place, so neither a
  second process nor a kill can leave half an entry.
- *Units.* Kernels that wait for a processor are compiled together, as one *unit*. Most of a compiler's time goes into
  headers, so eight kernels of loops take hardly longer than one. The cache entries of a unit's kernels all link to its
  library.
- *Threads.* A build has its own thread. Python raises no KeyboardInterrupt there, so no lock is left held, and a thread
  that waits for a build can stop waiting. toolchain.py makes sure that compilers end.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import inspect
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from fxfuse import cache, dump, packaged, progress, toolchain
from fxfuse.cuda import gpu
from fxfuse.errors import BuildError, FxfuseError, MissingKernelError, ToolchainError
from fxfuse.locks import free_in_children

logger = logging.getLogger("fxfuse")

PACKAGE: Final = Path(__file__).parent
Launch = Callable[..., None]
"""launch(params: bytes, context: int, *pointers: int); raises RuntimeError with the device's message."""

CPU_FLAGS: Final = (
    # load_inline adds the standard of torch's headers, which guard.h includes: C++17, later C++20
    "-O3", "-march=native", "-fopenmp",
    # Both are safe for NaN and inf: errno is never read, and no floating-point trap handler is installed.
    "-fno-math-errno", "-fno-trapping-math",
    # a * b + c is contracted where cpu/kernels/math.h says so and nowhere else: its error bounds depend on it
    "-ffp-contract=off",
    # g++'s partial redundancy elimination shares truth values between branches, which stops the vectoriser
    "-fno-tree-pre",
    "-fvisibility=hidden",
)  # fmt: skip
CUDA_FLAGS: Final = (
    "-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xcompiler", "-fvisibility=hidden",
    # g++ is told that it has read <bits/specfun.h>, Bessel functions and the like: half a second of a unit's two
    "-D_GLIBCXX_BITS_SPECFUN_H=1",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A kernel's complete source text, apart from the package's headers, and what it is built for."""

    text: str
    architecture: tuple[int, int] | None = None
    """Compute capability of the GPU to build for; None for CPU code."""
    label: str = "kernel"
    """The kernel's name in messages: "linear: relu(acc + o0)"."""
    cpu: str = "native"
    """For CPU code, the value of -march; by default the instructions of this machine."""
    calls_torch: bool = False
    """Whether it is linked to torch's libraries."""

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
    """What -march=native means on this machine."""
    try:
        flags = next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))
        )
    except (OSError, StopIteration):
        flags = platform.processor()
    return platform.machine() + flags


def _key(source: Source) -> str:
    """A kernel's key: a hash, in 32 hexadecimal digits, of everything that it depends on but its compilers."""
    parts = [
        source.text, repr(source.architecture), package_digest(), repr(_flags(source)),
        torch.__version__, sys.version, "" if source.is_cuda or source.cpu != "native" else _machine(),
    ]  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def portable_key(source: Source) -> str:
    """A kernel's key in a package: like `_key`, but the same on whichever machine the kernel is compiled."""
    flags = CPU_FLAGS if source.architecture is None else _flags(source)
    parts = [source.text, repr(source.architecture), package_digest(), repr(flags)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _flags(source: Source) -> tuple[str, ...]:
    if source.architecture is None:
        return tuple(f"-march={source.cpu}" if flag.startswith("-march=") else flag for flag in CPU_FLAGS)
    major, minor = source.architecture
    specific = "a" if (major, minor) == (9, 0) else ""  # includes the instructions that only Hopper has
    return (*CUDA_FLAGS, f"-gencode=arch=compute_{major}{minor}{specific},code=sm_{major}{minor}{specific}")


# --------------------------------------------------------------------------------------------- loading

_loaded: dict[str, Launch] = {}
_loading = free_in_children(threading.Lock())


def load(source: Source) -> Launch:
    """The compiled kernel: from this process, from a package, from the cache, or built now (seconds).

    Safe to call from several threads and processes. Raises ToolchainError or BuildError, NotBuilt inside `built_only`,
    MissingKernelError in calls of a package (packaged.only).
    """
    key = _key(source)
    found = _at_hand(key, source)
    if found is None:
        begun: list[Source] | None = getattr(_thread, "begun", None)
        if begun is not None:
            _requested([(key, source)])
            begun.append(source)
            return _absent(key)
        [found] = _built([(key, source)])
    packaged.note_kernel(key, source)
    _source_of[found] = source
    for sources in getattr(_thread, "noted", ()):
        sources.append(source)
    return found


def _at_hand(key: str, source: Source) -> Launch | None:
    """The kernel, if it need not be built. Raises what `load` raises if it may not be."""
    dump.kernel(source.text, source.label, key, source.is_cuda, _flags(source))
    is_absent = source.is_cuda and gpu.standing_in() is not None
    found = _absent(key) if is_absent else _loaded.get(key) or _load_packaged(source) or _load_cached(key, source)
    if found is None:
        check_may_build(source.label)
    return found


def load_each(sources: Sequence[Source]) -> list[Launch | MissingKernelError]:
    """Loads several kernels at once. For a kernel that a package does not have, the list holds its MissingKernelError.

    Raises what `load` raises otherwise.
    """
    call, standing = packaged.this_call(), gpu.standing_in()
    begin(sources)

    def loaded(source: Source) -> Launch | MissingKernelError:
        try:
            with packaged.only(*call), gpu.instead_of(standing):  # the state of the calling thread
                return load(source)
        except MissingKernelError as error:
            return error

    with ThreadPoolExecutor(max(1, len(sources))) as pool:
        return list(pool.map(loaded, sources))


def begin(sources: Sequence[Source]) -> None:
    """Begins to build kernels that will be loaded later, unless they are at hand. Whatever fails is told then."""
    with contextlib.suppress(FxfuseError, NotBuilt):
        pairs = [(_key(source), source) for source in sources]
        _requested([(key, source) for key, source in pairs if _at_hand(key, source) is None])


class _Absent:
    """A kernel for a GPU that is not here, or one that is not compiled yet: launching it does nothing."""

    def __init__(self, key: str) -> None:
        self.functions = (int(key, 16),) * 2
        """Stands for the addresses of its two functions (binding.h), and is as unique as they are."""

    def launch(self, params: bytes, context: int, *pointers: int) -> None:
        """Does nothing."""


@functools.cache
def _absent(key: str) -> Launch:
    return _Absent(key).launch


_source_of: Final[dict[Launch, Source]] = {}


def source_of(launch: Launch) -> Source | None:
    """The source of a kernel that was loaded in this process; None if `launch` is no such kernel."""
    return _source_of.get(launch)


def file_of(source: Source) -> str:
    """The name of the file to which FXFUSE_DUMP writes the source."""
    return dump.file_name(source.label, _key(source), source.is_cuda)


@contextlib.contextmanager
def noted() -> Iterator[list[Source]]:
    """Inside, the source of each kernel that this thread loads is added to the list."""
    outer: tuple[list[Source], ...] = getattr(_thread, "noted", ())
    sources: list[Source] = []
    _thread.noted = (*outer, sources)
    try:
        yield sources
    finally:
        _thread.noted = outer


_thread = threading.local()


@contextlib.contextmanager
def begun() -> Iterator[list[Source]]:
    """Inside, this thread waits for no kernel: `load` begins to build it and gives a stand-in. The list has its source.

    What needs several kernels is made inside first, and if anything is in the list, once more outside: then its kernels
    compile together, and not one after the other.
    """
    outer = getattr(_thread, "begun", None)
    sources: list[Source] = []
    _thread.begun = sources
    try:
        yield sources
    finally:
        _thread.begun = outer


class NotBuilt(Exception):
    """A kernel would have to be compiled inside `built_only`."""


@contextlib.contextmanager
def built_only() -> Iterator[None]:
    """Inside, this thread compiles nothing: a kernel that would have to be compiled raises NotBuilt."""
    outer = getattr(_thread, "built_only", False)
    _thread.built_only = True
    try:
        yield
    finally:
        _thread.built_only = outer


def may_build() -> bool:
    """Whether this thread is outside of `built_only`."""
    return not getattr(_thread, "built_only", False)


def check_may_build(label: str) -> None:
    """Raises NotBuilt inside `built_only`, and MissingKernelError in a call of a package (packaged.only)."""
    if not may_build():
        raise NotBuilt
    packaged.check_may_build(label)


def _load_cached(key: str, source: Source) -> Launch | None:
    with _loading:
        if key in _loaded:
            return _loaded[key]
        for entry in cache.find(key, toolchain.identity(source.is_cuda)):
            try:
                launch = _loaded[key] = import_library(key, cache.library_of(entry))
            except Exception as error:  # importing a file can raise anything, and reading it cache.UNREADABLE
                logger.info("fxfuse: rebuilding a cached kernel: %s", error)
                cache.remove(entry)
            else:
                cache.touch(entry)
                return launch
        return None


def _load_packaged(source: Source) -> Launch | None:
    """The kernel, if a package brought it; None for CPU code of other instructions than this machine's."""
    if not packaged.kernels or source.cpu != "native":
        return None
    return packaged.kernels.get(portable_key(source))


def libraries_of(sources: Sequence[Source]) -> list[tuple[str, Path]]:
    """The keys of kernels, and their libraries in the cache. Those that are not there are built together.

    Raises ToolchainError or BuildError, and FileNotFoundError if the cache did not keep one.
    """
    keys = [_key(source) for source in sources]
    pairs = list(zip(keys, sources, strict=True))
    # one that is loaded came from a package, or was removed from the cache meanwhile
    _built([(key, source) for key, source in pairs if _in_cache(key, source) is None])
    found = []
    for key, source in pairs:
        library = _in_cache(key, source)
        if library is None:
            raise FileNotFoundError(f"the kernel cache did not keep {source.label}")
        found.append((key, library))
    return found


def _in_cache(key: str, source: Source) -> Path | None:
    for entry in cache.find(key, toolchain.identity(source.is_cuda)):
        with contextlib.suppress(*cache.UNREADABLE):
            return cache.library_of(entry)
    return None


class _Kernel(ctypes.Structure):
    """What a library has for a kernel (binding.h)."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("call", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p),
        ("entry", ctypes.c_void_p), ("error", ctypes.c_void_p),
    )  # fmt: skip


class _Compiled:
    """What the function of a compiled kernel belongs to."""

    def __init__(self, library: ctypes.CDLL, kernel: _Kernel) -> None:
        self.functions = (kernel.entry, kernel.error)
        """The addresses of its two functions (binding.h)."""
        self._kept = library, kernel


_new_function: Final = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
    ("PyCFunction_NewEx", ctypes.pythonapi)
)
"""The function for a PyMethodDef, with what it belongs to, and no Python module."""


def import_library(key: str, library: Path) -> Launch:
    """The `launch` function of the kernel `key` in a library. Raises ImportError or OSError if it cannot be loaded."""
    loaded = ctypes.CDLL(str(library))
    try:
        kernel = _Kernel.in_dll(loaded, _symbol(key))
    except ValueError as error:
        raise ImportError(f"{library} has no kernel {key}") from error
    launch: Launch = _new_function(ctypes.addressof(kernel), _Compiled(loaded, kernel), None)
    return launch


@functools.cache
def _bring_runtime() -> None:
    """Loads the CUDA runtime that kernels are linked to, where torch has none: the loader might not find it."""
    home = toolchain.cuda_home()
    for folder in ("lib64", "lib"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(os.path.join(home or "", folder, "libcudart.so"), mode=ctypes.RTLD_GLOBAL)
            return


def _symbol(key: str) -> str:
    """What a kernel is called in its library, and a library by its first kernel."""
    return f"fxfuse_{key}"


# -------------------------------------------------------------------------------------------- building

PROCESSORS: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""Processors that this process may use."""
MOST_OF_A_UNIT: Final = 8
"""Most kernels of separate requests that are compiled together: with more, one would wait too long for the unit."""
MOST_TOGETHER: Final = 16
"""Most kernels of one request that are compiled together: nothing waits for the first of them."""
_PRUNE_EVERY: Final = 64
"""The cache is pruned after the first build of a process, and then after every so many further builds."""


@dataclass(frozen=True, eq=False)
class _Build:
    """A kernel that is being built."""

    source: Source
    key: str
    job: toolchain.Job
    launch: Future[Launch]
    together: int = 1
    """The size of the unit, at least, if so many kernels wait (`_even_unit`)."""


_lock = free_in_children(threading.Lock())
"""Held while a build begins or ends, never while one runs."""
_running: dict[str, _Build] = {}
_waiting: list[_Build] = []
"""Builds that no thread has started to compile, in the order in which they were requested."""
_finished = 0
_compilers: dict[bool, threading.Semaphore] = {}
"""Semaphores, by whether kernels are for a GPU: at most one compiler runs for each processor (`_processors`).

A compiler takes half a gigabyte, and callers request the kernels of whole networks. With several processors, builds for
a GPU leave one processor free, on which kernels that are compiled already are measured meanwhile.
"""
_worked: set[str] = set()
"""Compilers (toolchain.identity) that made a kernel in this process."""
_hung: dict[tuple[str, float], ToolchainError] = {}
"""The errors of compilers that made no kernel within a time limit, by (compilers, limit). They are not tried again."""


def _processors(cuda: bool) -> int:
    return PROCESSORS - 1 if cuda and PROCESSORS > 2 else PROCESSORS


def _renew() -> None:
    """Resets the state of builds, for a new or forked process: nothing is being built there."""
    _running.clear()
    _waiting.clear()
    _compilers.update({cuda: threading.BoundedSemaphore(_processors(cuda)) for cuda in (False, True)})


_renew()
os.register_at_fork(after_in_child=_renew)


def _built(wanted: Sequence[tuple[str, Source]]) -> list[Launch]:
    """The kernels of these keys and sources, built by threads of their own.

    Waits for a build of the same kernel that has begun already.
    """
    builds = _requested(wanted)
    progress.deliver()
    with interrupted_together():
        return [build.launch.result() for build in builds]


def _requested(wanted: Sequence[tuple[str, Source]]) -> list[_Build]:
    """The builds of kernels, begun here or before."""
    for cuda in {source.is_cuda for _, source in wanted}:
        toolchain.check(cuda)
    with _lock:
        new = {key: source for key, source in wanted if key not in _running}
        for key, source in new.items():
            alike = sum(other.is_cuda == source.is_cuda for other in new.values())
            build = _running[key] = _Build(source, key, toolchain.Job(), Future(), _even_unit(alike, source.is_cuda))
            _waiting.append(build)
            progress.add("compile", source.label, total=1)
        builds = [_running[key] for key, _ in wanted]
    for source in new.values():  # when all of them wait: the first thread would else take one kernel by itself
        threading.Thread(target=_work, args=(source.is_cuda,), name=f"fxfuse: {source.label}").start()
    return builds


def _even_unit(kernels: int, cuda: bool) -> int:
    """The size of the units for kernels that are requested, and waited for, together."""
    processors = _processors(cuda)
    rounds = -(-kernels // (processors * MOST_TOGETHER))
    return -(-kernels // (processors * rounds))


@contextlib.contextmanager
def interrupted_together() -> Iterator[None]:
    """Inside, a KeyboardInterrupt ends all builds, also those that other threads wait for."""
    try:
        yield
    except KeyboardInterrupt:
        interrupt()
        raise


def interrupt() -> None:
    """Ends all builds. Threads that wait for one get a KeyboardInterrupt. Later requests are built as usual."""
    with _lock:
        builds = list(_running.values())
    for build in builds:
        build.job.end()


def _work(cuda: bool) -> None:
    """The work of a build's thread: compiles one unit of the builds that wait, if any are left."""
    _yield_processors()
    with _compilers[cuda]:
        unit = _next_unit(cuda)
        try:
            unit = [build for build in unit if not _is_made(build)]
            _build_unit(unit)
        except BaseException as error:
            for build in unit:
                _leave(build, error)


def _next_unit(cuda: bool) -> list[_Build]:
    """Takes a share of the builds that wait, all of one architecture. While a processor is free, no build waits for
    others, unless they were requested together."""
    with _lock:
        waiting = [build for build in _waiting if build.source.is_cuda == cuda]
        alike = [build for build in waiting if build.source.architecture == waiting[0].source.architecture]
        share = min(MOST_OF_A_UNIT, -(-len(waiting) // _processors(cuda)))
        unit = alike[: max(share, waiting[0].together if waiting else 0)]
        _waiting[:] = [build for build in _waiting if build not in unit]
    return unit


def _is_made(build: _Build) -> bool:
    """Whether another process has built the kernel meanwhile. If so, the build is finished."""
    launch = _load_cached(build.key, build.source)
    if launch is not None:
        _leave(build, launch)
    return launch is not None


def _build_unit(unit: Sequence[_Build]) -> None:
    """Builds the kernels together. If the unit does not compile, each is built by itself, so that only one fails."""
    if not unit:
        return
    try:
        launches = _compile(unit)
    except BuildError:
        if len(unit) == 1:
            raise
        for build in unit:
            try:
                _build_unit([build])
            except BaseException as error:
                _leave(build, error)
        return
    for build, launch in zip(unit, launches, strict=True):
        _leave(build, launch)


def _leave(build: _Build, result: Launch | BaseException) -> None:
    """Finishes a build: hands its result or exception to the threads that wait for it."""
    global _finished
    if not isinstance(result, BaseException):
        _loaded[build.key] = result
    with _lock:
        if _running.get(build.key) is build:
            del _running[build.key]
            progress.add("compile", build.source.label, done=1)
    try:
        progress.deliver()  # before the waiting threads go on, and perhaps print
    finally:
        if isinstance(result, BaseException):
            build.launch.set_exception(result)
        else:
            build.launch.set_result(result)
    if isinstance(result, BaseException):
        return
    with _lock:
        _finished += 1
        prune = _finished % _PRUNE_EVERY == 1
    if prune:  # no thread waits for this
        cache.prune()


def _compile(unit: Sequence[_Build]) -> list[Launch]:
    first, label = unit[0], ", ".join(build.source.label for build in unit)
    compilers = toolchain.identity(first.source.is_cuda) or ""
    hung = (compilers, toolchain.limit())
    if hung in _hung:
        raise _hung[hung]
    started = time.monotonic()
    logger.info("fxfuse: compiling %s for %s", label, "CUDA" if first.source.is_cuda else "CPU")
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(cache.building(first.key))
        except OSError as error:
            raise ToolchainError(f"nothing can be written to the kernel cache: {error}") from error
        try:
            sources = {build.key: build.source for build in unit}
            first.job.run(lambda: _load_inline(sources, _symbol(first.key), folder), folder)
            library = next(folder.glob("*.so"))
            if first.source.is_cuda and torch.version.cuda is None:
                _bring_runtime()
            launches = [import_library(build.key, library) for build in unit]
        except toolchain.TimeLimit as error:
            text = f"{error} (FXFUSE_COMPILE_TIMEOUT sets this limit)"
            if compilers in _worked:
                raise BuildError(f"{label}: {text}") from error
            raise _hung.setdefault(hung, ToolchainError(text)) from error
        except Exception as error:  # load_inline raises whatever its steps do: RuntimeError, OSError, ImportError, …
            kept = cache.keep_failed(folder, first.key) if len(unit) == 1 else folder
            raise BuildError(
                f"{label} did not compile; its source is kept in {kept}. The compiler said:\n{error}"
            ) from error
        _worked.add(compilers)
        for build in reversed(unit):  # the folder becomes the entry of the first, so it is last
            keep = cache.finish if build is first else cache.share
            try:
                keep(library, build.key, compilers, build.source.text, build.source.label)
            except OSError as error:
                # Another process finished the same entry first, or the disk is full. Ours is loaded: nothing is lost.
                logger.info("fxfuse: a kernel is not kept in the cache: %s", error)
    logger.info("fxfuse: compiled %s in %.1f s", label, time.monotonic() - started)
    return launches


COMPILERS_NICE: Final = 10
"""The nice value added for compilers. The thread that measures must issue the launches of a timed run within 0.2 ms
(benchmark.AHEAD_CYCLES), so it cannot wait for a processor."""


def _yield_processors() -> None:
    """Lowers the priority of this thread, and of the processes that it starts."""
    if platform.system() == "Linux":  # elsewhere threads have no priority of their own
        with contextlib.suppress(OSError):
            os.nice(COMPILERS_NICE)


def unit_text(sources: Mapping[str, Source]) -> str:
    """The text of a unit. Macros make the kernels' names distinct, and each kernel gets a binding.

    A kernel's text defines everything in a namespace fxfuse_kernel, except for the two functions of binding.h.

    Args:
        sources: by the kernels' keys.
    """
    binding = ["#ifndef __CUDA_ARCH__", '#include "binding.h"', "#endif"]  # device passes do not know Python
    names = ("fxfuse_kernel", "fxfuse_launch", "fxfuse_error")
    parts = []
    for number, source in enumerate(sources.values()):
        parts += [f"#define {name} {name}_{number}" for name in names]
        parts += [source.text, *(f"#undef {name}" for name in names)]
    kernels = [f"FXFUSE_KERNEL({_symbol(key)}, {number})" for number, key in enumerate(sources)]
    return "\n".join([*binding, *parts, "#ifndef __CUDA_ARCH__", *kernels, "#endif", ""])


def _load_inline(sources: Mapping[str, Source], name: str, directory: Path) -> None:
    from torch.utils import cpp_extension

    first = next(iter(sources.values()))
    arguments: dict[str, Any] = {}
    link_flags = [] if first.is_cuda or platform.system() == "Darwin" else ["-fopenmp"]
    if not any(source.calls_torch for source in sources.values()):
        # load_inline links torch's libraries, which takes a third of a small kernel's time: empty ones are found before
        link_flags.append(f"-L{PACKAGE / 'implicit'}")
    includes = [str(PACKAGE), str(PACKAGE / ("cuda" if first.is_cuda else "cpu") / "kernels")]
    # A kernel takes 3 s to compile without torch's headers, and 60 s with them.
    if "no_implicit_headers" in inspect.signature(cpp_extension.load_inline).parameters:
        arguments["no_implicit_headers"] = True
    else:  # torch before 2.7 always includes them: empty headers take their place
        includes.insert(0, str(PACKAGE / "implicit"))
    if first.is_cuda:
        arguments |= {
            "cpp_sources": [""],  # the binding in a file of its own would take longer
            "cuda_sources": [unit_text(sources)],
            "extra_cuda_cflags": list(_flags(first)),
        }
    else:
        arguments |= {"cpp_sources": [unit_text(sources)], "extra_cflags": list(_flags(first))}
    cpp_extension.load_inline(
        name=name,
        extra_include_paths=includes,
        build_directory=str(directory),
        with_cuda=first.is_cuda,
        extra_ldflags=link_flags,
        is_python_module=False,  # import_library makes the function of each kernel
        verbose=False,
        **arguments,
    )
