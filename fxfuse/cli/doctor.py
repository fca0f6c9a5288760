"""`fxfuse doctor`: what fxfuse needs, what is there, and whether a kernel can be built and run on each device.

Exit code 1 if something that fxfuse needs here is missing; each such point names the remedy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch

import fxfuse
from fxfuse import cache, toolchain
from fxfuse.cli import terminal

LEAST_PYTHON, LEAST_TORCH, LEAST_CUDA, LEAST_GPU = (3, 10), (2, 3), (12, 1), (8, 0)
PROBES_PER_LIMIT: Final = 3
"""A probe compiles this many units, each of which may take FXFUSE_COMPILE_TIMEOUT."""

State = Literal["ok", "warning", "failed", "absent"]
_COLOURS: Final[dict[State, str]] = {"ok": "green", "warning": "yellow", "failed": "red", "absent": "grey"}


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    state: State
    """"absent": not there, and not needed."""
    text: str
    remedy: str = ""
    """What to install or set, unless all is well."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Details for programs that read the JSON."""


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "doctor", help="check this machine: torch, compilers, GPUs, the cache; build and run a kernel",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    parser.add_argument("--no-kernel", action="store_true", help="build and run nothing, which takes seconds")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Checks everything, and prints each point as soon as it is known."""
    found = []
    for check in checks(kernels=not given.no_kernel):
        found.append(check)
        if not given.json:
            _print(check)
    failed = [check.name for check in found if check.state == "failed"]
    if given.json:
        print(json.dumps({"ok": not failed, "checks": [asdict(check) for check in found]}, indent=1))
    elif failed:
        print(f"\n{len(failed)} failed: {', '.join(failed)}")
    else:
        print("\nnothing is missing; no kernel was built" if given.no_kernel else "\nfxfuse works here.")
    return 1 if failed else 0


def _print(check: Check) -> None:
    state = terminal.painted(f"{check.state:7}", _COLOURS[check.state], sys.stdout)
    lines = check.text.splitlines() + [f"→ {line}" for line in check.remedy.splitlines()]
    print(f"{state}  {check.name:16}  " + f"\n{'':27}".join(lines), flush=True)


def checks(kernels: bool = True) -> Iterator[Check]:
    """Makes the checks one by one. `kernels`: whether to build and run a kernel on each device, which takes seconds."""
    yield check_python()
    yield check_torch()
    yield check_fxfuse()
    yield check_cxx()
    yield check_ninja()
    gpus = list(check_gpus())
    yield from gpus
    usable = [check.facts["capability"] for check in gpus if check.facts and check.state == "ok"]
    yield check_nvcc(usable)
    yield check_cache()
    if not kernels:
        return
    compilers = toolchain.cxx() is not None and toolchain.ninja() is not None
    with tempfile.TemporaryDirectory(prefix="fxfuse-doctor-") as folder:  # empty; GPUs that are alike share a kernel
        yield check_kernel("cpu", compilers, folder)
        for check in gpus:
            if check.facts and check.state == "ok":
                yield check_kernel(check.facts["device"], compilers and toolchain.nvcc() is not None, folder)


# ----------------------------------------------------------------------------------------------- software


def check_python() -> Check:
    """The interpreter's version."""
    version = platform.python_version()
    if sys.version_info[:2] < LEAST_PYTHON:
        return Check("Python", "failed", version, f"install Python {_dotted(LEAST_PYTHON)} or newer")
    return Check("Python", "ok", f"{version} ({sys.executable})", facts={"version": version})


def check_torch() -> Check:
    """torch's version, and what it was built for."""
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs only"
    facts = {"version": torch.__version__, "cuda": torch.version.cuda}
    text = f"{torch.__version__}, {built}"
    if _numbers(torch.__version__) < LEAST_TORCH:
        return Check("torch", "failed", text, f"pip install 'torch>={_dotted(LEAST_TORCH)}'", facts)
    return Check("torch", "ok", text, facts=facts)


def check_fxfuse() -> Check:
    """fxfuse's version, where it is, and the environment variables that change what it does."""
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith("FXFUSE_")}
    text = f"{fxfuse.__version__} ({Path(fxfuse.__file__).parent})"
    text += "".join(f"\n{name}={value}" for name, value in settings.items())
    facts = {"version": fxfuse.__version__, "environment": settings}
    if settings.get("FXFUSE_DISABLE") == "1":
        return Check("fxfuse", "warning", text, "unset FXFUSE_DISABLE: with it nothing is fused", facts)
    return Check("fxfuse", "ok", text, facts=facts)


def check_cxx() -> Check:
    """The C++ compiler."""
    command = toolchain.cxx()
    if command is None:
        named = f" (CXX={os.environ['CXX']})" if os.environ.get("CXX") else ""
        return Check("C++ compiler", "failed", f"none found{named}", "apt install g++, or set CXX to a compiler")
    said = _output([*command, "--version"])
    if said is None:
        remedy = "install a compiler that runs here (apt install g++), or set CXX to one"
        return Check("C++ compiler", "failed", f"{shlex.join(command)} cannot be run", remedy)
    text = f"{said.partition(chr(10))[0]} ({shlex.join(command)})"
    return Check("C++ compiler", "ok", text, facts={"command": command})


def check_ninja() -> Check:
    """ninja, which torch's load_inline starts compilers with."""
    path = toolchain.ninja()
    if path is None:
        return Check("ninja", "failed", "none found", "pip install ninja")
    return Check("ninja", "ok", f"{_output([path, '--version']) or '?'} ({path})".replace("\n", ""))


# --------------------------------------------------------------------------------------------------- GPUs


def check_gpus() -> Iterator[Check]:
    """Each GPU with its architecture; one point if there is none."""
    if not torch.cuda.is_available():
        yield _no_gpu()
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        text = f"{properties.name}, {_sm(capability)}, {terminal.size(properties.total_memory)}"
        facts = {"device": f"cuda:{index}", "name": properties.name, "capability": capability}
        if capability < LEAST_GPU:
            remedy = f"kernels need {_sm(LEAST_GPU)} (A100) or newer: models on it run as torch runs them"
            yield Check(f"GPU {index}", "warning", text, remedy, facts)
        else:
            yield Check(f"GPU {index}", "ok", text, facts=facts)


def _no_gpu() -> Check:
    if not (Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi")):
        return Check("GPU", "absent", "no NVIDIA driver here: models run on the CPU")
    if torch.version.cuda is None:
        remedy = "install a build of torch for CUDA (pytorch.org/get-started)"
        return Check("GPU", "warning", "there is an NVIDIA driver, but torch is built for CPUs only", remedy)
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Check("GPU", "warning", "CUDA_VISIBLE_DEVICES hides all", "unset CUDA_VISIBLE_DEVICES")
    remedy = f"install a driver for CUDA {torch.version.cuda}; `nvidia-smi` says what there is"
    return Check("GPU", "warning", "there is an NVIDIA driver, but torch finds no GPU that it can use", remedy)


_NOT_NEEDED: Final = "not needed, but for `fxfuse compile --arch sm_80`"


def check_nvcc(capabilities: list[tuple[int, int]]) -> Check:
    """The CUDA compiler, compared with torch's CUDA version and these GPUs' architectures."""
    path = toolchain.nvcc()
    wanted = torch.version.cuda
    toolkit = f"install the CUDA toolkit {wanted or _dotted(LEAST_CUDA)} (conda install cuda-nvcc), or set CUDA_HOME"
    if path is None:
        if not capabilities:
            why = "no GPU to compile for" if wanted else "torch is built for CPUs only"
            return Check("nvcc", "absent", f"{_NOT_NEEDED}: {why}")
        return Check("nvcc", "failed", "none found: models on a GPU run as torch runs them", toolkit)
    said = _output([path, "--version"]) or ""
    match = re.search(r"release (\d+\.\d+)", said)
    if match is None:
        return Check("nvcc", "failed" if capabilities else "warning", f"{path} cannot be run", toolkit)
    version, facts = match[1], {"path": path, "version": match[1]}
    text = f"{version} ({path})"
    if _numbers(version) < LEAST_CUDA:
        return Check("nvcc", "failed" if capabilities else "warning", f"{text} is too old", toolkit, facts)
    known = _output([path, "--list-gpu-code"]) or ""
    foreign = [_sm(capability) for capability in capabilities if known and _sm(capability) not in known.split()]
    if foreign:
        newer = f"install a CUDA toolkit that has {foreign[0]}, or set CUDA_HOME to one"
        return Check("nvcc", "failed", f"{text} does not compile for {foreign[0]}", newer, facts)
    if wanted is None:
        return Check("nvcc", "absent", f"{text}; {_NOT_NEEDED}: torch is built for CPUs only", facts=facts)
    if _numbers(version)[0] != _numbers(wanted)[0]:
        return Check("nvcc", "warning", f"{text}, while torch is built for CUDA {wanted}", toolkit, facts)
    return Check("nvcc", "ok", f"{text}; torch is built for CUDA {wanted}", facts=facts)


# ------------------------------------------------------------------------------------------ cache, kernels


def check_cache() -> Check:
    """Where kernels are kept, whether what lies there is trusted, and whether more can be kept."""
    status = cache.status()
    facts = {**vars(status), "directory": str(status.directory)}
    text = f"{status.directory}: {status.kernels} kernels, {terminal.size(status.bytes)}"
    own = "chmod go-w it if it is yours, or set FXFUSE_CACHE_DIR to a folder of your own"
    if status.problem:
        return Check("cache", "warning", f"{text}; not trusted: {status.problem}", own, facts)
    if not status.writable:
        text += "; read-only: new kernels are compiled again in each process"
        return Check("cache", "warning", text, "set FXFUSE_CACHE_DIR to a folder that you can write", facts)
    return Check("cache", "ok", text if status.exists else f"{status.directory} (made when it is needed)", facts=facts)


def check_kernel(device: str, can_compile: bool, folder: str) -> Check:
    """Builds a kernel with `folder` as the cache, runs it and compares it with float64, in another process."""
    name = f"kernel on {device}"
    if not can_compile:
        return Check(name, "failed", "not built, since a compiler is missing", "see above")
    terminal.note(f"{'':9}{name}: a small one is compiled, which takes some seconds")
    environment = {**os.environ, "FXFUSE_CACHE_DIR": folder, "FXFUSE_TUNE": "0", "FXFUSE_PROGRESS": "0"}
    environment.pop("FXFUSE_DISABLE", None)
    package = str(Path(fxfuse.__file__).parent.parent)  # the one that this process has
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    outcome = _probe([sys.executable, "-m", "fxfuse.cli.probe", device], environment)
    if "failure" in outcome:
        remedy = "mend what is marked above; if all else is ok, report this with `fxfuse doctor --json`"
        return Check(name, "failed", outcome["failure"], remedy, outcome)
    text = (
        f"{outcome['kernel']}: first result after {outcome['seconds']:.1f} s, compiling included; "
        f"error {outcome['error']:.1e} against float64 (eager's {outcome['eager_error']:.1e})"
    )
    return Check(name, "ok", text, facts=outcome)


def _probe(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """What the process found; how it ended, if it found nothing."""
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    seconds = PROBES_PER_LIMIT * toolchain.limit()
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it then ends its compilers
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=2 * toolchain.GRACE)
        process.kill()
        return {"failure": f"it was ended after {seconds:g} s"}
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    try:
        found: dict[str, Any] = json.loads(output.splitlines()[-1])
        return found
    except (IndexError, ValueError):
        ended = f"ended by {signal.Signals(-process.returncode).name}" if process.returncode < 0 else "without a result"
        last = "\n".join(errors.strip().splitlines()[-5:])
        return {"failure": f"the process {ended}\n{last}".strip()}


# ------------------------------------------------------------------------------------------------- helpers


def _output(command: list[str]) -> str | None:
    """What a program prints; None if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _sm(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"
