"""One compilable choice of CUDA kernel for a problem: what `gemm.candidates` and `conv2d.candidates` return."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """A kernel template with its tile, and the run-time arguments that make it solve one problem.

    `header` and `type` (with the epilogue) identify what must be compiled; `params` changes with shapes.
    """

    name: str
    """For people: "gemm tf32x3 128x128x32, 4 stages"."""
    header: str
    """File in cuda/kernels that defines the template."""
    type: str
    """C++ type in namespace fxfuse, with {output} and {epilogue} to be filled in."""
    params: bytes
    """The kernel's `Problem` struct, packed."""
    workspace: int = 0
    """Bytes of scratch memory that a launch needs besides the output, 0 for none. If any, its address (aligned to 256
    bytes, contents undefined) follows those of the kernel's tensors and precedes the operands'; the type's kTensors
    counts it."""
    shared: int = 0
    """Bytes of dynamic shared memory that a thread block takes; 0 where the launch finds a number that fits."""
    together: int = 1
    """How many problems, alike but for sizes and addresses, a launch may have. If several, `params` begins with their
    number (int64), and each one's params and addresses follow those of the one before."""
    estimate: float | None = None
    """Microseconds by its family's model of time; None where the family has but an order."""
