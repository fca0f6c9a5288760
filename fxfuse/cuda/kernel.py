"""A CUDA kernel that can run a problem: what the kernel families' `candidates` return."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """A kernel template with its tile, and the run-time arguments for one problem.

    `header`, `type` and the epilogue determine what is compiled. `params` changes with shapes.
    """

    name: str
    """Its name in reports: "gemm tf32x3 128x128x32, 4 stages"."""
    header: str
    """File in cuda/kernels that defines the template."""
    type: str
    """C++ type in namespace fxfuse, with {output} and {epilogue} to be filled in."""
    params: bytes
    """The kernel's `Problem` struct, packed."""
    workspace: int = 0
    """Bytes of scratch memory that a launch needs besides the output; 0 for none. Its address (aligned to 256 bytes,
    contents undefined) stands between those of the kernel's tensors and those of the operands. The type's kTensors
    includes the workspace."""
    shared: int = 0
    """Bytes of dynamic shared memory of a thread block; 0 where the launch chooses a number that fits."""
    together: int = 1
    """Most problems that one launch may run; they differ only in sizes and addresses. If this is more than 1, `params`
    begins with the number of problems (int64). Params and addresses of further problems follow those of the first."""
    in_place: bool = True
    """Whether the output may lie in an operand's memory (values.Launch.in_place): an operand's element is read for the
    output's element at the same place alone, and never again after that is stored."""
    estimate: float | None = None
    """Microseconds by the family's model of time; None where the family only orders its kernels."""
