"""The compilers: which ones there are, and running load_inline with them so that it always ends.

load_inline starts ninja, and ninja compilers. A `Job` gives those a session of their own, a limit of time
(FXFUSE_COMPILE_TIMEOUT, seconds), and an end when the user interrupts. It also mends what torch writes for ninja where
CXX has arguments or a path has characters that ninja or the shell would read otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from fxfuse import cache
from fxfuse.errors import ToolchainError
from fxfuse.locks import free_in_children

logger = logging.getLogger("fxfuse")

PACKAGE: Final = Path(__file__).parent
LIMIT: Final = 120.0
"""Seconds for one kernel, where FXFUSE_COMPILE_TIMEOUT says nothing; the largest takes twenty."""
GRACE: Final = 2.0
"""Seconds in which ninja may end its compilers before all are killed."""


# ------------------------------------------------------------------------------------------ what there is


def cxx() -> list[str] | None:
    """The C++ compiler's command, as CXX says ("g++", "ccache g++", "g++ -pipe"); None if there is none."""
    named = os.environ.get("CXX") or "c++"  # as torch chooses
    whole = shutil.which(named)
    if whole is not None:
        return [whole]
    try:
        words = shlex.split(named)
    except ValueError:  # a quotation mark without its other
        return None
    program = shutil.which(words[0]) if words else None
    return None if program is None else [program, *words[1:]]


def cuda_home() -> str | None:
    """The folder of the CUDA toolkit that builds kernels: what CUDA_HOME says, what torch takes (nothing, if it was
    built without CUDA), where the nvcc on the PATH is, or the usual place. None if there is none."""
    from torch.utils.cpp_extension import CUDA_HOME  # torch's guess, which need not be one

    named = os.environ.get("CUDA_HOME")
    if named:
        return named
    found = shutil.which("nvcc")
    behind_links = None if found is None else str(Path(os.path.realpath(found)).parents[1])
    folders = [folder for folder in (CUDA_HOME, behind_links, "/usr/local/cuda") if folder]
    return next((folder for folder in folders if os.path.exists(os.path.join(folder, "include", "cuda.h"))), CUDA_HOME)


def nvcc() -> str | None:
    """The CUDA compiler of `cuda_home`."""
    home = cuda_home()
    return shutil.which("nvcc", path=os.path.join(home, "bin")) if home else None


def nvcc_version() -> str | None:
    """The release of `nvcc`, as torch.version.cuda says it ("13.0"); None if there is none that runs."""
    found = re.search(r"release (\d+\.\d+)", _said_by_nvcc("--version"))
    return found[1] if found else None


def nvcc_architectures() -> list[str]:
    """The GPUs that `nvcc` compiles for ("sm_80"); none if it does not tell."""
    return _said_by_nvcc("--list-gpu-code").split()


def _said_by_nvcc(option: str) -> str:
    compiler = nvcc()
    return "" if compiler is None else _said_by(compiler, option)


@functools.cache
def _said_by(compiler: str, option: str) -> str:
    try:
        done = subprocess.run([compiler, option], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def ninja() -> str | None:
    """ninja on the PATH, or the one that pip installed beside this Python, which PATH need not contain."""
    found = shutil.which("ninja")
    if found is not None:
        return found
    directory = _ninja_directory()
    return None if directory is None else shutil.which("ninja", path=directory)


def _ninja_directory() -> str | None:
    try:
        import ninja
    except ImportError:
        return None
    return str(ninja.BIN_DIR)


def check(cuda: bool) -> None:
    """Raises ToolchainError naming what is missing and how to get it."""
    if cxx() is None:
        raise ToolchainError("no C++ compiler found: install one (Debian, Ubuntu: apt install g++) or set CXX")
    if ninja() is None:
        raise ToolchainError("no ninja found: pip install ninja")
    if cuda and nvcc() is None:
        raise ToolchainError(
            "no nvcc found: install the CUDA toolkit that matches torch.version.cuda, or set CUDA_HOME"
        )


def identity(cuda: bool) -> str | None:
    """Which compilers build, so that a replaced one is noticed without running it; None if something is missing."""
    try:
        check(cuda)
        words = [*(cxx() or []), *([nvcc() or ""] if cuda else [])]
        return "\0".join(_identity(word) for word in words)
    except (ToolchainError, OSError):
        return None


def _identity(word: str) -> str:
    """A program's path, size and age; another word as it is."""
    program = None if word.startswith("-") else shutil.which(word)
    if program is None:
        return word
    status = os.stat(program)
    return f"{os.path.realpath(program)}:{status.st_size}:{status.st_mtime_ns}"


def limit() -> float:
    """Seconds that a kernel's compilers may take."""
    text = os.environ.get("FXFUSE_COMPILE_TIMEOUT", "")
    try:
        seconds = float(text or LIMIT)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        logger.warning("fxfuse: FXFUSE_COMPILE_TIMEOUT=%r is no number of seconds", text)
        return LIMIT
    return seconds


# --------------------------------------------------------------------------------------------- running


class TimeLimit(Exception):
    """Compilers took longer than they may, and were ended."""


class _Ended(BaseException):
    """The same within load_inline, which has an answer to some exceptions."""


class Job:
    """What load_inline starts in one thread, which another may end."""

    def __init__(self) -> None:
        self.ended = False
        """Whether somebody asked for its end."""
        self.compiler: str | None = None
        """What torch is to take for the compiler, if not what CXX says."""
        self._deadline = 0.0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[Any] | None = None
        self._command: list[str] = []
        self._ninja: str | None = None
        self._links = ""

    def run(self, load_inline: Callable[[], None], directory: Path) -> None:
        """Calls `load_inline`, which builds in `directory`, in this thread.

        Raises what it raises; TimeLimit after FXFUSE_COMPILE_TIMEOUT, KeyboardInterrupt after `end`.
        """
        if self.ended:
            raise KeyboardInterrupt
        self._command, self._ninja = cxx() or [], ninja()
        _redirect()
        seconds = limit()
        self._deadline = time.monotonic() + seconds
        _thread.job = self
        try:
            with self._compiler(directory), self._folder_for_links(directory):
                load_inline()
        except _Ended:
            raise TimeLimit(f"{shlex.join(self._command)} was ended after {seconds:g} s") from None
        finally:
            _thread.job = None

    @contextlib.contextmanager
    def _compiler(self, directory: Path) -> Iterator[None]:
        """torch takes CXX for one program's name, of no special characters: any other command becomes a program."""
        named = os.environ.get("CXX", "c++")
        if len(self._command) == 1 and named and _SAFE.fullmatch(named):
            yield
            return
        script = directory / "c++"
        script.write_text(f'#!/bin/sh\nexec {shlex.join(self._command)} "$@"\n')
        script.chmod(0o700)
        self.compiler = str(script)
        yield
        script.unlink()

    @contextlib.contextmanager
    def _folder_for_links(self, directory: Path) -> Iterator[None]:
        if not _unsafe(directory):
            yield
            return
        usual = tempfile.gettempdir()
        with cache.temporary_folder(usual if _SAFE.fullmatch(usual) else "/tmp") as folder:
            self._links = str(folder)
            yield

    def end(self) -> None:
        """Ends its processes; the thread in `run` gets a KeyboardInterrupt."""
        with self._lock:
            self.ended = True
            process = self._process
        if process is not None:  # without waiting, since others are to end as well
            threading.Thread(target=_end, args=(process,), name="fxfuse: end").start()

    def execute(self, command: Sequence[str], check: bool = False, **options: Any) -> subprocess.CompletedProcess[Any]:
        """subprocess.run in a session of its own, until the limit."""
        command = list(command)
        if command[0] == "ninja":
            command[0] = self._ninja or "ninja"
            if "cwd" in options:
                _mend(Path(options["cwd"]), self._links)
        with self._lock:
            if self.ended:
                raise KeyboardInterrupt
            options = {"stdin": subprocess.DEVNULL, **options}
            process = self._process = subprocess.Popen(command, start_new_session=True, **options)
        try:
            try:
                output, errors = process.communicate(timeout=max(0.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _end(process)
                with contextlib.suppress(subprocess.TimeoutExpired):  # somebody else has its output open
                    process.communicate(timeout=GRACE)
                raise _Ended from None
        finally:
            with self._lock:
                self._process = None
        if self.ended:
            raise KeyboardInterrupt
        if check and process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, command, output, errors)
        return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _end(process: subprocess.Popen[Any]) -> None:
    """Ends a session's leader and whatever it has started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)  # ninja then ends its compilers, which are in groups of their own
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    for member in _session(process.pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(member, signal.SIGKILL)


def _session(leader: int) -> list[int]:
    """The processes of a session, where the system tells (/proc)."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            # pid (program's name) state ppid pgrp session …
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == leader:
                members.append(int(stat.parent.name))
    return members


_thread = threading.local()


def _job() -> Job | None:
    return getattr(_thread, "job", None)


class _Subprocess:
    """The module subprocess as torch.utils.cpp_extension sees it: what a job's thread starts is the job's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def run(self, command: Any, **options: Any) -> Any:
        job = _job()
        return subprocess.run(command, **options) if job is None else job.execute(command, **options)

    def check_output(self, command: Any, **options: Any) -> Any:
        job = _job()
        if job is None:
            return subprocess.check_output(command, **options)
        return job.execute(command, check=True, stdout=subprocess.PIPE, **options).stdout


_redirected = free_in_children(threading.Lock())


def _redirect() -> None:
    """Lets torch.utils.cpp_extension start a job's processes through the job. Other threads' go as they did."""
    import torch.utils.cpp_extension

    cpp_extension: Any = torch.utils.cpp_extension
    with _redirected:
        if isinstance(cpp_extension.subprocess, _Subprocess):
            return
        replaced: dict[str, Callable[..., Any]] = {
            "get_cxx_compiler": lambda job: job.compiler,
            # flags name the architecture; older versions of torch add all that they see, and compile for each
            "_get_cuda_arch_flags": lambda job: [],
            "_join_cuda_home": lambda job, *parts: os.path.join(cuda_home() or "", *parts),
        }
        if torch.version.cuda is None:  # then torch has no library for a GPU
            link = cpp_extension._prepare_ldflags
            replaced["_prepare_ldflags"] = lambda job, *given: _without_torchs_gpu(link(*given))
        for name, instead in replaced.items():
            setattr(cpp_extension, name, _in_jobs(getattr(cpp_extension, name), instead))
        cpp_extension.subprocess = _Subprocess()


def _without_torchs_gpu(flags: Sequence[str]) -> list[str]:
    """The linker's flags without torch's libraries for a GPU, of which kernels need nothing."""
    return [flag for flag in flags if flag not in ("-lc10_cuda", "-ltorch_cuda")]


def _in_jobs(function: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, but in a job's thread what `instead` gives, if not None."""
    takes_arguments = len(inspect.signature(instead).parameters) > 1

    @functools.wraps(function)
    def either(*args: Any, **options: Any) -> Any:
        job = _job()
        result = None if job is None else instead(job, *args) if takes_arguments else instead(job)
        return function(*args, **options) if result is None else result

    return either


# ---------------------------------------------------------------------------------------- paths of any name

_SAFE: Final = re.compile(r"[A-Za-z0-9_@%+=:,./-]*")


def _mend(directory: Path, links: str) -> None:
    """Replaces paths in ninja's file that ninja or the shell would misread by links to them, in the folder `links`.

    torch writes them as they are, or with spaces escaped in one way where it takes two.
    """
    file = directory / "build.ninja"
    unsafe = _unsafe(directory)
    if not unsafe or not file.exists():
        return
    text = file.read_text()
    for path in unsafe:
        spellings = {path, shlex.quote(path).strip("'"), path.replace(" ", "$ ")}
        if any(spelling in text for spelling in spellings):
            link = os.path.join(links, os.urandom(8).hex())
            os.symlink(path, link)
            for spelling in sorted(spellings, key=len, reverse=True):
                text = text.replace(spelling, link)
    file.write_text(text)


def _unsafe(directory: Path) -> list[str]:
    """Of the folders below which the paths lie that torch writes, those of such names, the longest first."""
    import sysconfig

    from torch.utils import cpp_extension

    paths = {
        str(directory), os.path.abspath(directory), str(PACKAGE), str(Path(cpp_extension.TORCH_LIB_PATH).parent),
        os.environ.get("CUDA_HOME") or cpp_extension.CUDA_HOME or "", sysconfig.get_path("include"),
        sys.prefix, sys.base_prefix,
    }  # fmt: skip
    return sorted((path for path in paths if not _SAFE.fullmatch(path)), key=len, reverse=True)
