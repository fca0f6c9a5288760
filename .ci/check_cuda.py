"""Compiles every kernel template, with generated epilogues, for sm_80: no GPU needed.

With nvcc: no register spills, at most 163 KB of shared memory. With NVRTC 12.1, if it is installed: the sources stay
within CUDA 12.1. Exits non-zero with a table of what failed.

    python .ci/check_cuda.py [--arch 80] [--only SUBSTRING]
"""

from __future__ import annotations

import argparse
import ctypes
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import util
from pathlib import Path

import torch
from tabulate import tabulate

from fxfuse.build import PACKAGE
from fxfuse.cuda.catalogue import sources

SHARED_LIMIT = 163 << 10  # bytes per block on sm_80
KERNELS = PACKAGE / "cuda" / "kernels"


@dataclass
class Outcome:
    """What the compilers said of one source."""

    name: str
    registers: int = 0
    spills: int = 0
    shared: int = 0
    error: str = ""


def compile_with_nvcc(name: str, text: str, arch: int) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.cu"
        source.write_text(text)
        command = [
            "nvcc", "-std=c++17", "-O3", "--expt-relaxed-constexpr", f"-arch=sm_{arch}", "-cubin", "-Xptxas", "-v",
            "-I", str(KERNELS), "-I", str(PACKAGE), "-o", str(Path(folder) / "kernel.cubin"), str(source),
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True)
    outcome = Outcome(name)
    if result.returncode != 0:
        outcome.error = result.stderr.strip()
        return outcome
    outcome.registers = max(map(int, re.findall(r"Used (\d+) registers", result.stderr)), default=0)
    outcome.spills = sum(map(int, re.findall(r"(\d+) bytes spill stores", result.stderr)))
    outcome.shared = max(map(int, re.findall(r"(\d+) bytes smem", result.stderr)), default=0)
    return outcome


def nvrtc_errors(text: str, arch: int) -> str:
    """What NVRTC 12.1 says of the device code; empty if it compiles."""
    nvrtc = ctypes.CDLL(_wheel_file("nvidia.cuda_nvrtc", "lib/libnvrtc.so.12"))
    include = _wheel_file("nvidia.cuda_runtime", "include")
    # NVRTC has no standard library; the kernels need no more of it than this.
    headers = {
        "cstdint": "typedef signed char int8_t; typedef unsigned char uint8_t; typedef short int16_t;"
        "typedef unsigned short uint16_t; typedef int int32_t; typedef unsigned uint32_t;"
        "typedef long long int64_t; typedef unsigned long long uint64_t; typedef unsigned long long uintptr_t;",
    }
    program = ctypes.c_void_p()
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", len(headers), texts, names)
    options = [
        f"--gpu-architecture=compute_{arch}", "--std=c++17", "-default-device", f"-I{KERNELS}", f"-I{PACKAGE}", f"-I{include}",
    ]  # fmt: skip
    code = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    )
    if code == 0:
        return ""
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    return log.value.decode()


def _wheel_file(package: str, path: str) -> str:
    spec = util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return str(Path(next(iter(spec.submodule_search_locations))) / path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=80, help="compute capability, e.g. 80 or 90")
    parser.add_argument("--only", default="", help="check only kernels whose name contains this")
    arguments = parser.parse_args()
    catalogue = [(source.label, source.text) for source in sources() if arguments.only in source.label]
    with_nvrtc = util.find_spec("nvidia") is not None and util.find_spec("nvidia.cuda_nvrtc") is not None

    def check(item: tuple[str, str]) -> Outcome:
        outcome = compile_with_nvcc(*item, arguments.arch)
        if with_nvrtc and not outcome.error:
            errors = nvrtc_errors(item[1], arguments.arch)
            outcome.error = f"NVRTC 12.1: {errors}" if errors else ""
        return outcome

    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        outcomes = list(pool.map(check, catalogue))
    rows = []
    failed = []
    for outcome in outcomes:
        problem = outcome.error.splitlines()[0] if outcome.error else ""
        problem = problem or (f"{outcome.spills} bytes spilled" if outcome.spills else "")
        problem = problem or ("more than 163 KB shared" if outcome.shared > SHARED_LIMIT else "")
        rows.append((outcome.name, outcome.registers, outcome.spills, problem or "ok"))
        if problem:
            failed.append(outcome)
    print(tabulate(rows, headers=("kernel", "registers", "spilled bytes", f"sm_{arguments.arch}")))
    for outcome in failed:
        print(f"\n{outcome.name}:\n{outcome.error}")
    print(f"{len(outcomes) - len(failed)} passed, {len(failed)} failed; NVRTC 12.1 {'checked' if with_nvrtc else 'not installed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
