"""Generated source text in, a loaded kernel out; the only file that calls load_inline.

`load(source)` returns a function launch(params, context, *pointers) (binding.h). Builds are cached on disk (cache.py)
under a hash of everything that decides the machine code: the source, every header of the package, the flags, torch and
Python. Each set of compilers has entries of its own; where there is none, anybody's entry will do. An entry is built
in a temporary folder and renamed into place, so that neither a second process nor a kill can leave half an entry.

Kernels that wait for a processor are compiled together, as one *unit*: most of a compiler's time goes into headers, so
that eight kernels of loops take hardly longer than one. A unit's library is the entry of each of its kernels, by links.

A build has a thread of its own, which no KeyboardInterrupt can reach: no lock is left held, and who waits can stop
waiting. toolchain.py sees to it that compilers end.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from fxfuse import cache, dump, packaged, progress, toolchain
from fxfuse.cuda import gpu
from fxfuse.errors import BuildError, MissingKernelError, ToolchainError
from fxfuse.locks import free_in_children

logger = logging.getLogger("fxfuse")

PACKAGE: Final = Path(__file__).parent
Launch = Callable[..., None]
"""launch(params: bytes, context: int, *pointers: int); raises RuntimeError with the device's message."""

CPU_FLAGS: Final = (
    # load_inline names the standard that torch's headers, which guard.h includes, are written in: C++17, later C++20
    "-O3", "-march=native", "-fopenmp",
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
    cpu: str = "native"
    """For CPU code, the instructions that it may use, as -march says; those of this machine by default."""

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
        torch.__version__, sys.version, "" if source.is_cuda or source.cpu != "native" else _machine(),
    ]  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def portable_key(source: Source) -> str:
    """What a kernel computes, for a GPU's architecture or any CPU, whichever machine compiles it: a package's key."""
    flags = CPU_FLAGS if source.architecture is None else _flags(source)
    parts = [source.text, repr(source.architecture), package_digest(), repr(flags)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _flags(source: Source) -> tuple[str, ...]:
    if source.architecture is None:
        return tuple(f"-march={source.cpu}" if flag.startswith("-march=") else flag for flag in CPU_FLAGS)
    major, minor = source.architecture
    specific = "a" if (major, minor) == (9, 0) else ""  # with the instructions that only Hopper has
    return (*CUDA_FLAGS, f"-gencode=arch=compute_{major}{minor}{specific},code=sm_{major}{minor}{specific}")


# --------------------------------------------------------------------------------------------- loading

_loaded: dict[str, Launch] = {}
_loading = free_in_children(threading.Lock())


def load(source: Source) -> Launch:
    """The compiled kernel: from this process, from the cache, from a package, or built now (seconds).

    Safe to call from several threads and processes. Raises ToolchainError or BuildError, NotBuilt inside `built_only`,
    MissingKernelError in calls of a package (packaged.only).
    """
    key = _key(source)
    dump.kernel(source.text, source.label, key, source.is_cuda, _flags(source))
    is_absent = source.is_cuda and gpu.standing_in() is not None
    found = _absent(key) if is_absent else _loaded.get(key) or _load_cached(key, source) or _load_packaged(source)
    if found is None:
        check_may_build(source.label)
        found = _build_once(source, key)
    packaged.note_kernel(key, source)
    _source_of[found] = source
    for sources in getattr(_thread, "noted", ()):
        sources.append(source)
    return found


def load_each(sources: Sequence[Source]) -> list[Launch | MissingKernelError]:
    """`load` each, together; the error in the place of a kernel that a package does not have.

    Raises what `load` does beside that.
    """
    call, standing = packaged.this_call(), gpu.standing_in()

    def loaded(source: Source) -> Launch | MissingKernelError:
        try:
            with packaged.only(*call), gpu.instead_of(standing):  # as the thread that asks
                return load(source)
        except MissingKernelError as error:
            return error

    with ThreadPoolExecutor(max(1, len(sources))) as pool:
        return list(pool.map(loaded, sources))


class _Absent:
    """A kernel for a GPU that is not here: to launch it does nothing."""

    def __init__(self, key: str) -> None:
        self.functions = (int(key, 16),) * 2
        """In the place of the addresses of its two functions (binding.h), as distinct as those."""

    def launch(self, params: bytes, context: int, *pointers: int) -> None:
        """Does nothing."""


@functools.cache
def _absent(key: str) -> Launch:
    return _Absent(key).launch


_source_of: Final[dict[Launch, Source]] = {}


def source_of(launch: Launch) -> Source | None:
    """The text of a kernel that was loaded in this process; None if it is none."""
    return _source_of.get(launch)


def file_of(source: Source) -> str:
    """What FXFUSE_DUMP calls the file with its text."""
    return dump.file_name(source.label, _key(source), source.is_cuda)


@contextlib.contextmanager
def noted() -> Iterator[list[Source]]:
    """Inside, a list to which each kernel's source is added that this thread loads."""
    outer: tuple[list[Source], ...] = getattr(_thread, "noted", ())
    sources: list[Source] = []
    _thread.noted = (*outer, sources)
    try:
        yield sources
    finally:
        _thread.noted = outer


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


def check_may_build(label: str) -> None:
    """Raises NotBuilt inside `built_only`, MissingKernelError in a call of a package that compiles nothing."""
    if not may_build():
        raise NotBuilt
    packaged.check_may_build(label)


def _load_cached(key: str, source: Source) -> Launch | None:
    with _loading:
        if key in _loaded:
            return _loaded[key]
        for entry in cache.find(key, toolchain.identity(source.is_cuda)):
            try:
                launch = _loaded[key] = _import(key, cache.library_of(entry))
            except Exception as error:  # whatever importing a file can raise, beside cache.UNREADABLE
                logger.info("fxfuse: rebuilding a cached kernel: %s", error)
                cache.remove(entry)
            else:
                cache.touch(entry)
                return launch
        return None


def _load_packaged(source: Source) -> Launch | None:
    """A kernel that a package brought, whose instructions are known here."""
    if not packaged.kernels or source.cpu != "native":
        return None
    return packaged.kernels.get(portable_key(source))


def library_of(source: Source) -> tuple[str, Path]:
    """A kernel's key, and its library in the cache, where it is built if it is not there.

    Raises ToolchainError or BuildError, FileNotFoundError if the cache keeps nothing.
    """
    key = _key(source)
    for attempt in (1, 2):
        for entry in cache.find(key, toolchain.identity(source.is_cuda)):
            with contextlib.suppress(*cache.UNREADABLE):
                return key, cache.library_of(entry)
        if attempt == 1:  # a package brought it, or it was removed meanwhile
            _build_once(source, key)
    raise FileNotFoundError(f"the kernel cache did not keep {source.label}")


def libraries_of(sources: Sequence[Source]) -> list[tuple[str, Path]]:
    """`library_of` each; those that are not in the cache are built together."""
    with ThreadPoolExecutor(MOST_OF_A_UNIT * PROCESSORS) as pool, interrupted_together():
        return list(pool.map(library_of, sources))


def import_library(key: str, library: Path) -> Launch:
    """The function launch of the kernel `key` in a library. Raises ImportError or OSError if it cannot be loaded."""
    return _import(key, library)


def _import(key: str, library: Path) -> Launch:
    name = _module(key)
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    launch: Launch = module.launch
    return launch


@functools.cache
def _bring_runtime() -> None:
    """Loads the CUDA runtime that kernels are linked to, where torch has none and it may not lie where libraries do."""
    home = toolchain.cuda_home()
    for folder in ("lib64", "lib"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(os.path.join(home or "", folder, "libcudart.so"), mode=ctypes.RTLD_GLOBAL)
            return


def _module(key: str) -> str:
    """The name of a kernel's extension module, and of the function PyInit_… that makes it."""
    return f"fxfuse_{key}"


# -------------------------------------------------------------------------------------------- building

PROCESSORS: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""That this process may use."""
MOST_OF_A_UNIT: Final = 8
"""Kernels that are compiled together: with more, the last of them are waited for too long."""
_PRUNE_EVERY: Final = 64
"""Builds of a process, the first included, after which what is too old or too much in the cache is removed."""


@dataclass(frozen=True, eq=False)
class _Build:
    """A kernel that is being built."""

    source: Source
    key: str
    job: toolchain.Job
    launch: Future[Launch]


_lock = free_in_children(threading.Lock())
"""Held while a build begins or ends, never while one runs."""
_running: dict[str, _Build] = {}
_waiting: list[_Build] = []
"""Those of which nobody compiles yet, in the order in which they were asked for."""
_finished = 0
_compilers: dict[bool, threading.Semaphore] = {}
"""As many at a time as there are processors: every one takes half a gigabyte, and callers ask for whole networks.

Where kernels are for a GPU one less, if there are several: what is compiled already is measured meanwhile.
"""
_worked: set[str] = set()
"""Compilers that made a kernel in this process."""
_hung: dict[tuple[str, float], ToolchainError] = {}
"""Those that made none within a limit of time: nobody waits for them as long again."""


def _processors(cuda: bool) -> int:
    return PROCESSORS - 1 if cuda and PROCESSORS > 2 else PROCESSORS


def _renew() -> None:
    """In a new process, also one that was forked, nothing is being built."""
    _running.clear()
    _waiting.clear()
    _compilers.update({cuda: threading.BoundedSemaphore(_processors(cuda)) for cuda in (False, True)})


_renew()
os.register_at_fork(after_in_child=_renew)


def _build_once(source: Source, key: str) -> Launch:
    """The kernel, when a thread that builds it has finished."""
    toolchain.check(source.is_cuda)
    with _lock:
        build = _running.get(key)
        if build is None:
            build = _running[key] = _Build(source, key, toolchain.Job(), Future())
            _waiting.append(build)
            progress.add("compile", source.label, total=1)
            threading.Thread(target=_work, args=(source.is_cuda,), name=f"fxfuse: {source.label}").start()
    progress.deliver()
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


def _work(cuda: bool) -> None:
    """What a thread does that was started for a build: builds a unit of those that wait, if there are any left."""
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
    """Takes its share of the builds that wait, of one architecture: none waits for others while a processor is free."""
    with _lock:
        waiting = [build for build in _waiting if build.source.is_cuda == cuda]
        alike = [build for build in waiting if build.source.architecture == waiting[0].source.architecture]
        unit = alike[: min(MOST_OF_A_UNIT, -(-len(waiting) // _processors(cuda)))]
        _waiting[:] = [build for build in _waiting if build not in unit]
    return unit


def _is_made(build: _Build) -> bool:
    """Whether another process has made it meanwhile."""
    launch = _load_cached(build.key, build.source)
    if launch is not None:
        _leave(build, launch)
    return launch is not None


def _build_unit(unit: Sequence[_Build]) -> None:
    """Builds them together; each by itself if that fails, so that a failure is that of one."""
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
    """Hands a build's result, or what ended it, to those who wait for it."""
    global _finished
    if not isinstance(result, BaseException):
        _loaded[build.key] = result
    with _lock:
        if _running.get(build.key) is build:
            del _running[build.key]
            progress.add("compile", build.source.label, done=1)
    try:
        progress.deliver()  # before those who wait go on, and perhaps print
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
    if prune:  # nobody waits for it
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
            first.job.run(lambda: _load_inline(sources, _module(first.key), folder), folder)
            library = next(folder.glob("*.so"))
            if first.source.is_cuda and torch.version.cuda is None:
                _bring_runtime()
            launches = [_import(build.key, library) for build in unit]
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
        for build in reversed(unit):  # the first one's entry is the folder itself
            keep = cache.finish if build is first else cache.share
            try:
                keep(library, build.key, compilers, build.source.text, build.source.label)
            except OSError as error:
                # Another process finished the same entry first, or the disk is full. Ours is loaded: nothing is lost.
                logger.info("fxfuse: a kernel is not kept in the cache: %s", error)
    logger.info("fxfuse: compiled %s in %.1f s", label, time.monotonic() - started)
    return launches


COMPILERS_NICE: Final = 10
"""How much lower the priority of compilers is than that of the thread that measures: the launches of a timed run must
be issued within 0.2 ms (benchmark.AHEAD_CYCLES), so it cannot wait for a processor."""


def _yield_processors() -> None:
    """Lowers the priority of this thread, and of the processes that it starts."""
    if platform.system() == "Linux":  # elsewhere threads have no priority of their own
        with contextlib.suppress(OSError):
            os.nice(COMPILERS_NICE)


def unit_text(sources: Mapping[str, Source]) -> str:
    """The text of a unit, by the kernels' keys: their names are made different, and each gets a module.

    What a kernel's text defines is in a namespace fxfuse_kernel, but for the two functions of binding.h.
    """
    binding = ["#ifndef __CUDA_ARCH__", '#include "binding.h"', "#endif"]  # passes for a device do not know Python
    names = ("fxfuse_kernel", "fxfuse_launch", "fxfuse_error")
    parts = []
    for number, source in enumerate(sources.values()):
        parts += [f"#define {name} {name}_{number}" for name in names]
        parts += [source.text, *(f"#undef {name}" for name in names)]
    modules = [f"FXFUSE_MODULE({_module(key)}, {number})" for number, key in enumerate(sources)]
    return "\n".join([*binding, *parts, "#ifndef __CUDA_ARCH__", *modules, "#endif", ""])


def _load_inline(sources: Mapping[str, Source], name: str, directory: Path) -> None:
    from torch.utils import cpp_extension

    first = next(iter(sources.values()))
    arguments: dict[str, Any] = {}
    includes = [str(PACKAGE), str(PACKAGE / ("cuda" if first.is_cuda else "cpu") / "kernels")]
    # Without torch's headers a kernel takes 3 s to compile instead of 60.
    if "no_implicit_headers" in inspect.signature(cpp_extension.load_inline).parameters:
        arguments["no_implicit_headers"] = True
    else:  # torch before 2.7 always includes them: those here are empty
        includes.insert(0, str(PACKAGE / "implicit"))
    if first.is_cuda:
        arguments |= {
            "cpp_sources": [""],  # as a file of its own the binding takes longer
            "cuda_sources": [unit_text(sources)],
            "extra_cuda_cflags": list(_flags(first)),
        }
    else:
        arguments |= {"cpp_sources": [unit_text(sources)], "extra_cflags": list(_flags(first))}
        if platform.system() != "Darwin":
            arguments["extra_ldflags"] = ["-fopenmp"]
    cpp_extension.load_inline(
        name=name,
        extra_include_paths=includes,
        build_directory=str(directory),
        with_cuda=first.is_cuda,
        is_python_module=False,  # _import does it, for each kernel
        verbose=False,
        **arguments,
    )
