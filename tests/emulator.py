"""Runs generated CUDA sources on the CPU: emulated_gpu stands in for the GPU, torch's CPU tensors for its memory."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fxfuse.build import PACKAGE
from fxfuse.codegen import OperandKind
from fxfuse.cuda import codegen
from fxfuse.cuda.kernel import Kernel
from fxfuse.expression import parse

DEVICE = Path(__file__).parent / "emulated_gpu"
KERNELS = PACKAGE / "cuda" / "kernels"
MACHINE = "libmachine.so"
_MORE_FLAGS = os.environ.get("FXFUSE_EMULATOR_FLAGS", "").split()  # such as AddressSanitizer's, see CONTRIBUTING.md
_COMPILER = ("g++", "-std=c++17", "-w", "-fno-strict-aliasing", "-fPIC", *_MORE_FLAGS)
_OF_KERNELS = (*_COMPILER, "-O1", "-fno-gnu-unique")
"""Kernels' static variables, shared memory among them, are each library's own."""


@dataclass(frozen=True)
class Operand:
    """An operand of the epilogue: a tensor, and its strides along (batch, row, col), 0 where it broadcasts."""

    tensor: torch.Tensor
    strides: tuple[int, int, int]


def launch(
    kernel: Kernel, epilogue: str, tensors: Sequence[torch.Tensor], operands: Sequence[Operand] = (),
    tf32: bool = False, output: torch.dtype | None = None,
) -> bool:  # fmt: skip
    """Runs `kernel` with `epilogue` on its tensors (inputs, then the output), on the emulated GPU.

    Args:
        output: the dtype of the kernel's result, if that is not the last tensor.

    Operands are read element by element, as those whose addresses nothing is known of. Returns whether warps multiplied
    alone (mma): warpgroups hand on to them what they find not finite.

    Runs it once more for each operand that lies as the output does, with the output in the operand's memory, if the
    kernel allows this (Kernel.in_place). The result must be the same.
    """
    out = tensors[-1]
    dtype = out.dtype if output is None else output
    library = compiled(codegen.generate(parse(epilogue), dtype, _kinds(operands), kernel, tf32=tf32))
    params = kernel.params + b"".join(struct.pack("<3q", *operand.strides) for operand in operands)

    def run(tensors: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        workspace = [torch.full((kernel.workspace,), 0xAB, dtype=torch.uint8)] if kernel.workspace else []  # undefined
        addresses = [tensor.data_ptr() for tensor in (*tensors, *workspace, *operands)]
        code = library.fxfuse_launch(params, (ctypes.c_uint64 * len(addresses))(*addresses), ctypes.c_uint64(0))
        if code != 0:
            raise RuntimeError(f"{kernel.name}: {library.fxfuse_error(code)}")

    before, given = library.emulated_warp_products(), [operand.tensor for operand in operands]
    run(tensors, given)
    by_warps = bool(library.emulated_warp_products() != before)
    for operand in given if kernel.in_place else ():
        if (operand.shape, operand.stride(), operand.dtype) != (out.shape, out.stride(), out.dtype):
            continue
        shared = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype).copy_(operand)
        run([shared if tensor is out else tensor for tensor in tensors],
            [shared if tensor is operand else tensor for tensor in given])  # fmt: skip
        is_same = (shared == out) | (shared.isnan() & out.isnan())
        assert is_same.all(), f"{kernel.name} computes something else in the memory of an operand"
    return by_warps


def _kinds(operands: Sequence[Operand]) -> tuple[OperandKind, ...]:
    return tuple(
        OperandKind(operand.tensor.dtype, tuple(stride > 0 for stride in operand.strides), 0)  # type: ignore[arg-type]
        for operand in operands
    )


def launch_together(kernel: Kernel, epilogue: str, products: Sequence[Together]) -> None:
    """Runs several problems of a kernel by one launch (Kernel.together)."""
    output = products[0].tensors[-1].dtype
    library = compiled(codegen.generate(parse(epilogue), output, _kinds(products[0].operands), kernel))
    params, addresses = b"", list[int]()
    for number, one in enumerate(products):
        count = struct.pack("<q", len(products)) if number == 0 else one.params[:8]
        params += count + one.params[8:]
        params += b"".join(struct.pack("<3q", *operand.strides) for operand in one.operands)
        addresses += [tensor.data_ptr() for tensor in (*one.tensors, *(operand.tensor for operand in one.operands))]
    code = library.fxfuse_launch(params, (ctypes.c_uint64 * len(addresses))(*addresses), ctypes.c_uint64(0))
    if code != 0:
        raise RuntimeError(f"{kernel.name}: {library.fxfuse_error(code)}")


@dataclass(frozen=True)
class Together:
    """One of several problems of a launch."""

    params: bytes
    tensors: Sequence[torch.Tensor]
    operands: Sequence[Operand] = ()


def available() -> bool:
    """Whether this machine has what the emulation is made with: Linux's contexts, and a g++ that knows _Float16."""
    if sys.platform != "linux" or shutil.which("g++") is None:
        return False
    command = [*_COMPILER, "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input="_Float16 half = 1;", text=True, capture_output=True).returncode == 0


def _translated(text: str) -> str:
    """CUDA's syntax that a C++ compiler does not know, as calls of the emulation."""
    text = re.sub(r"(\w+(?:<[^<>]*>)?)<<<(.*?),\s*stream>>>\(", r"emulation::launch(\1, \2, ", text, flags=re.S)
    text = re.sub(r"__shared__ (alignas\(\d+\))", r"\1 __shared__", text)
    shared = r"extern __shared__ __align__\(\d+\) (unsigned char|float) (\w+)\[\];"
    return re.sub(shared, r"auto* \2 = reinterpret_cast<\1*>(emulation::shared);", text)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """A folder with the kernels' headers as g++ takes them, and the machine; it goes with the process."""
    made = tempfile.TemporaryDirectory()
    folder = Path(made.name)
    for header in KERNELS.glob("*.cuh"):
        (folder / header.name).write_text(_translated(header.read_text()))
    for file in DEVICE.iterdir():  # ptx.cuh among them
        (folder / file.name).write_text(file.read_text())
    machine, runtime = folder / "machine.cpp", folder / "cuda_runtime.h"
    subprocess.run([*_COMPILER, "-O2", "-shared", "-o", str(folder / MACHINE), str(machine)], check=True)
    subprocess.run([*_OF_KERNELS, "-o", f"{runtime}.gch", str(runtime)], check=True)
    return made


@functools.cache
def compiled(source: str) -> ctypes.CDLL:
    """A generated CUDA source as a library for the CPU."""
    folder = Path(_folder().name)
    path = folder / hashlib.sha256(source.encode()).hexdigest()[:16]
    path.with_suffix(".cpp").write_text(source)
    command = [
        *_OF_KERNELS, "-shared", "-I", str(folder), "-I", str(PACKAGE), "-include", "cuda_runtime.h",  # as nvcc does
        "-o", str(path.with_suffix(".so")), str(path.with_suffix(".cpp")), str(folder / MACHINE),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    library = ctypes.CDLL(str(path.with_suffix(".so")))
    library.fxfuse_error.restype = ctypes.c_char_p
    library.emulated_warp_products.restype = ctypes.c_int64
    return library
