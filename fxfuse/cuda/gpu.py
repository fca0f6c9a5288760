"""The GPU that kernels are planned for: a GPU of this machine, or a described one that need not be here.

Planning asks everything about a GPU through this module. Inside `instead_of` a described GPU (ARCHITECTURES) answers.
So packages can be compiled for GPUs that are not here (deploy/cross.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from fxfuse import toolchain

MINIMUM_CAPABILITY: Final = (8, 0)
"""cp.async and the tensor-core instructions that kernels use came with Ampere."""


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU, named as torch.cuda.get_device_properties names them."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_multiprocessor: int
    """Bytes."""
    shared_memory_per_block_optin: int
    """Bytes that a thread block may have."""
    other_counts: tuple[int, ...] = ()
    """Numbers of multiprocessors of other GPUs of this architecture."""

    @property
    def capability(self) -> tuple[int, int]:
        return self.major, self.minor

    @property
    def architecture(self) -> str:
        """nvcc's name of the architecture: "sm_80"."""
        return architecture(self.capability)

    def alike(self) -> list[Gpu]:
        """One GPU for each number of multiprocessors in this architecture: the choice of tiles depends on it."""
        counts = (self.multi_processor_count, *self.other_counts)
        return [dataclasses.replace(self, multi_processor_count=count, other_counts=()) for count in counts]


def architecture(capability: tuple[int, int]) -> str:
    """nvcc's name of a compute capability: "sm_80"."""
    return "sm_{}{}".format(*capability)


_LARGE: Final = 164 << 10, 163 << 10
_LARGER: Final = 228 << 10, 227 << 10
_SMALL: Final = 100 << 10, 99 << 10

ARCHITECTURES: Final[Mapping[tuple[int, int], Gpu]] = {
    (major, minor): Gpu(f"a described {name}", major, minor, count, *shared, tuple(others))
    for (major, minor), name, (count, *others), shared in (
        ((8, 0), "A100", (108, 56), _LARGE),  # A30
        ((8, 6), "A40", (84, 72, 46, 28), _SMALL),  # A10, RTX 3070, RTX 3060
        ((8, 7), "Orin", (16, 8), _LARGE),
        ((8, 9), "L4", (58, 142, 128, 76, 46), _SMALL),  # L40S, RTX 4090, RTX 4080, RTX 4070
        ((9, 0), "H100 or H200", (132, 114), _LARGER),  # H100 PCIe
        ((10, 0), "B200", (148,), _LARGER),
        ((10, 3), "B300", (148,), _LARGER),
        ((11, 0), "Thor", (20,), _LARGER),
        ((12, 0), "RTX 5090", (170, 188, 84, 48), _SMALL),  # RTX PRO 6000, RTX 5080, RTX 5070
        ((12, 1), "GB10", (48,), _SMALL),
    )
}
"""A GPU of each architecture that kernels are made for, by compute capability.

Sources: CUDA C++ Programming Guide, technical specifications per compute capability (shared memory); NVIDIA's data
sheets (multiprocessors). All have 65536 registers per multiprocessor and per block.
"""


def of_architecture(name: str) -> Gpu | None:
    """The described GPU of the architecture `name` ("sm_90"); None if kernels are not made for it."""
    return next((gpu for gpu in ARCHITECTURES.values() if gpu.architecture == name), None)


@dataclass
class Standing:
    """A described GPU that answers instead of real ones, and what is assumed about it."""

    gpu: Gpu
    tf32: bool = False
    """Whether torch's library is assumed to compute float32 products in TF32 where it may."""
    is_asked: bool = False
    """Whether `tf32` was read."""


class _Thread(threading.local):
    standing: Standing | None = None


_thread = _Thread()


def standing_in() -> Standing | None:
    """The described GPU that answers in this thread; None if real ones do."""
    return _thread.standing


@contextlib.contextmanager
def instead_of(standing: Standing | None) -> Iterator[None]:
    """Inside, this thread plans for a described GPU and measures nothing; with None, for the GPUs of this machine."""
    outer, _thread.standing = _thread.standing, standing
    try:
        yield
    finally:
        _thread.standing = outer


# ------------------------------------------------------------------------------------------- questions


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU."""
    standing = _thread.standing
    return torch.cuda.get_device_capability(device) if standing is None else standing.gpu.capability


def properties(device: torch.device) -> Any:
    """The GPU's properties: those of torch.cuda.get_device_properties that `Gpu` has."""
    standing = _thread.standing
    return torch.cuda.get_device_properties(device) if standing is None else standing.gpu


def name(device: torch.device) -> str:
    """The GPU's name."""
    standing = _thread.standing
    return torch.cuda.get_device_name(device) if standing is None else standing.gpu.name


def is_there() -> bool:
    """Whether there is a GPU, real or described."""
    return _thread.standing is not None or torch.cuda.is_available()


def is_capturing() -> bool:
    """Whether the current stream is being captured as a CUDA graph, so that nothing can be measured or loaded."""
    return _thread.standing is None and torch.cuda.is_current_stream_capturing()


def index_asked() -> Callable[[], int]:
    """A function that returns the index of the current GPU."""
    return torch._C._cuda_getDevice if _thread.standing is None else lambda: 0


def stream_asked() -> Callable[[int], int]:
    """A function that returns the current stream of the GPU with a given index."""
    return torch._C._cuda_getCurrentRawStream if _thread.standing is None else lambda index: 0


# -------------------------------------------------------------------------------------------- software


def torch_version() -> str:
    """torch's version without its build ("2.13.0" for "2.13.0+cpu"): a package is for all builds."""
    return torch.__version__.partition("+")[0]


def cuda_version() -> str | None:
    """The CUDA version of kernels: torch's, or nvcc's if torch was built without CUDA. None if there is neither."""
    return torch.version.cuda or toolchain.nvcc_version()
