"""The compilers: finding them, and running load_inline with them so that it always ends.

load_inline starts ninja, and ninja starts compilers. A `Job` runs these processes in a session of their own. It ends
them after a time limit (FXFUSE_COMPILE_TIMEOUT, seconds) or when the user interrupts. It also corrects what torch
writes for ninja, where CXX has arguments or a path has characters that ninja or the shell would misread.
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
"""Seconds for one kernel, if FXFUSE_COMPILE_TIMEOUT is not set; the largest takes twenty."""
GRACE: Final = 2.0
"""Seconds that ninja gets to end its compilers before all of them are killed."""


# ------------------------------------------------------------------------------------------ what there is


def cxx() -> list[str] | None:
    """The C++ compiler's command from CXX ("g++", "ccache g++", "g++ -pipe"), else c++; None if there is none."""
    named = os.environ.get("CXX") or "c++"  # torch's choice
    whole = shutil.which(named)
    if whole is not None:
        return [whole]
    try:
        words = shlex.split(named)
    except ValueError:  # an unclosed quotation mark
        return None
    program = shutil.which(words[0]) if words else None
    return None if program is None else [program, *words[1:]]


def cuda_home() -> str | None:
    """The folder of the CUDA toolkit that builds kernels; None if there is none.

    It is the variable CUDA_HOME, if set. Otherwise it is the first of these that has cuda.h: torch's guess (none, if
    torch was built without CUDA), the toolkit of the nvcc on the PATH, /usr/local/cuda; and if none has, torch's guess.
    """
    from torch.utils.cpp_extension import CUDA_HOME  # torch's guess, which need not be a toolkit

    named = os.environ.get("CUDA_HOME")
    if named:
        return named
    found = shutil.which("nvcc")
    behind_links = None if found is None else str(Path(os.path.realpath(found)).parents[1])
    folders = [folder for folder in (CUDA_HOME, behind_links, "/usr/local/cuda") if folder]
    return next((folder for folder in folders if os.path.exists(os.path.join(folder, "include", "cuda.h"))), CUDA_HOME)


def nvcc() -> str | None:
    """The CUDA compiler in `cuda_home`; None if there is none."""
    home = cuda_home()
    return shutil.which("nvcc", path=os.path.join(home, "bin")) if home else None


def nvcc_version() -> str | None:
    """The release of `nvcc`, in the form of torch.version.cuda ("13.0"); None if it does not run."""
    found = re.search(r"release (\d+\.\d+)", _said_by_nvcc("--version"))
    return found[1] if found else None


def nvcc_architectures() -> list[str]:
    """The architectures that `nvcc` compiles for ("sm_80"); empty if it does not list them."""
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
    """The path of ninja: on the PATH, else the one that pip installed for this Python; None if there is none."""
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
    """Raises ToolchainError if a compiler or ninja is missing; the message says how to get it."""
    if cxx() is None:
        raise ToolchainError("no C++ compiler found: install one (Debian, Ubuntu: apt install g++) or set CXX")
    if ninja() is None:
        raise ToolchainError("no ninja found: pip install ninja")
    if cuda and nvcc() is None:
        raise ToolchainError(
            "no nvcc found: install the CUDA toolkit that matches torch.version.cuda, or set CUDA_HOME"
        )


def identity(cuda: bool) -> str | None:
    """Identifies the compilers by path, size and age, without running them; None if one is missing."""
    try:
        check(cuda)
        words = [*(cxx() or []), *([nvcc() or ""] if cuda else [])]
        return "\0".join(_identity(word) for word in words)
    except (ToolchainError, OSError):
        return None


def _identity(word: str) -> str:
    """A program's path, size and age; any other word of a command unchanged."""
    program = None if word.startswith("-") else shutil.which(word)
    if program is None:
        return word
    status = os.stat(program)
    return f"{os.path.realpath(program)}:{status.st_size}:{status.st_mtime_ns}"


def limit() -> float:
    """The time limit for a kernel's compilers, in seconds."""
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
    """Compilers exceeded the time limit and were ended."""


class _Ended(BaseException):
    """TimeLimit inside load_inline, which handles some exceptions itself but not a BaseException."""


class Job:
    """The processes of one call of load_inline. They are started in one thread, and another thread may end them."""

    def __init__(self) -> None:
        self.ended = False
        """Whether `end` was called."""
        self.compiler: str | None = None
        """The compiler that torch is told to use; None for CXX."""
        self._deadline = 0.0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[Any] | None = None
        self._command: list[str] = []
        self._ninja: str | None = None
        self._links = ""

    def run(self, load_inline: Callable[[], None], directory: Path) -> None:
        """Calls `load_inline`, which builds in `directory`, in this thread.

        Raises what `load_inline` raises, TimeLimit after FXFUSE_COMPILE_TIMEOUT, and KeyboardInterrupt after `end`.
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
        """Makes a script of the compiler's command if torch could not run it: torch takes CXX for the name of a single
        program without special characters."""
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
        """Ends the job's processes. The thread in `run` gets a KeyboardInterrupt."""
        with self._lock:
            self.ended = True
            process = self._process
        if process is not None:  # without waiting: the caller goes on to end other jobs
            threading.Thread(target=_end, args=(process,), name="fxfuse: end").start()

    def execute(self, command: Sequence[str], check: bool = False, **options: Any) -> subprocess.CompletedProcess[Any]:
        """subprocess.run in a new session, with the job's time limit."""
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
                with contextlib.suppress(subprocess.TimeoutExpired):  # another process still has its output open
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
    """Ends the leader of a session and all processes in the session."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)  # ninja then ends its compilers, which are in groups of their own
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    for member in _session(process.pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(member, signal.SIGKILL)


def _session(leader: int) -> list[int]:
    """The processes of a session, on systems with /proc; empty elsewhere."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # the process has ended meanwhile
            # pid (program's name) state ppid pgrp session …
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == leader:
                members.append(int(stat.parent.name))
    return members


_thread = threading.local()


def _job() -> Job | None:
    return getattr(_thread, "job", None)


class _Subprocess:
    """Replaces the subprocess module in torch.utils.cpp_extension: a job's thread starts processes through its job."""

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
    """Makes torch.utils.cpp_extension start processes through the job in a job's thread, and as before in others."""
    import torch.utils.cpp_extension

    cpp_extension: Any = torch.utils.cpp_extension
    with _redirected:
        if isinstance(cpp_extension.subprocess, _Subprocess):
            return
        replaced: dict[str, Callable[..., Any]] = {
            "get_cxx_compiler": lambda job: job.compiler,
            # fxfuse's flags name the architecture; older versions of torch would add those of all GPUs that they see
            "_get_cuda_arch_flags": lambda job: [],
            "_join_cuda_home": lambda job, *parts: os.path.join(cuda_home() or "", *parts),
        }
        if torch.version.cuda is None:  # torch then has no GPU libraries to link to
            link = cpp_extension._prepare_ldflags
            replaced["_prepare_ldflags"] = lambda job, *given: _without_torchs_gpu(link(*given))
        for name, instead in replaced.items():
            setattr(cpp_extension, name, _in_jobs(getattr(cpp_extension, name), instead))
        cpp_extension.subprocess = _Subprocess()


def _without_torchs_gpu(flags: Sequence[str]) -> list[str]:
    """The linker's flags without torch's GPU libraries, which kernels do not need."""
    return [flag for flag in flags if flag not in ("-lc10_cuda", "-ltorch_cuda")]


def _in_jobs(function: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `function`: in a job's thread the result is that of `instead`, unless it is None."""
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
    """Replaces paths in ninja's file that ninja or the shell would misread by links, which it makes in the folder
    `links`.

    torch writes such paths as they are, or escapes spaces in one way where two are needed.
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
    """The folders in ninja's file whose names ninja or the shell would misread, the longest first."""
    import sysconfig

    from torch.utils import cpp_extension

    paths = {
        str(directory), os.path.abspath(directory), str(PACKAGE), str(Path(cpp_extension.TORCH_LIB_PATH).parent),
        os.environ.get("CUDA_HOME") or cpp_extension.CUDA_HOME or "", sysconfig.get_path("include"),
        sys.prefix, sys.base_prefix,
    }  # fmt: skip
    return sorted((path for path in paths if not _SAFE.fullmatch(path)), key=len, reverse=True)
