"""CPU kernels without a compiler: the same pointers, sizes and strides, the epilogue evaluated by torch.

What is lost: the generated C++ text and kernels/*.h are not run. What stays: which expression, which addresses,
strides, dtypes and numbers a plan hands to its kernel, all of which are really read and written.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import struct
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from fxfuse import build, program
from fxfuse.cpu import codegen
from fxfuse.errors import BuildError
from fxfuse.reference import evaluate

_known: dict[str, tuple[Any, torch.dtype, Any]] = {}


def _tensor(address: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """The memory at `address`, as the kernel would see it."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    memory = (ctypes.c_char * (extent * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(sizes, strides)


def _launch(text: str) -> build.Launch:
    expression, dtype, kinds = _known[text]

    def launch(params: bytes, threads: int, out: int, *pointers: int) -> None:
        numbers = struct.unpack(f"{len(params) // 8}q", params)
        sizes, strides = numbers[:3], (*numbers[3:5], 1)
        if 0 in sizes:
            return
        result = _tensor(out, dtype, sizes, strides)
        operands = []
        for index, (kind, pointer) in enumerate(zip(kinds, pointers, strict=True)):
            if kind.dtype is None:  # a host scalar's bits
                operands.append(torch.tensor(struct.unpack("f", struct.pack("I", pointer))[0]))
                continue
            view = _tensor(pointer, kind.dtype, sizes, numbers[5 + 3 * index : 8 + 3 * index])
            operands.append(view if kind.dtype is torch.bool else view.float())
        with torch.no_grad():
            result.copy_(evaluate(expression, result.float(), operands))

    return launch


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Inside, kernels for the CPU are interpreted."""
    generate, load = codegen.generate, build.load

    def remembering(expression: Any, output: torch.dtype, operands: Any) -> str:
        text = generate(expression, output, operands)
        _known[text] = (expression, output, tuple(operands))
        return text

    def loading(source: build.Source) -> build.Launch:
        return _launch(source.text) if source.text in _known else load(source)

    with mock.patch.object(codegen, "generate", remembering), mock.patch.object(build, "load", loading):
        yield


@contextlib.contextmanager
def sampled(share: float) -> Iterator[None]:
    """Inside, that share of all kernels is compiled, the same ones in every process; regions of others run in torch."""
    load = build.load

    def loading(source: build.Source) -> build.Launch:
        if int(hashlib.sha256(source.text.encode()).hexdigest()[:8], 16) >= share * 16**8:
            raise BuildError("the fuzzer compiles a share of the kernels")
        return load(source)

    with mock.patch.object(build, "load", loading):
        yield


@contextlib.contextmanager
def without_programs() -> Iterator[None]:
    """Inside, graphs run their own code at every call, with plans and short cuts for each region."""

    def call(self: program.Programs, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    with mock.patch.object(program.Programs, "call", call):
        yield
