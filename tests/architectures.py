"""What each GPU architecture that kernels are made for has: CUDA C++ Programming Guide, compute capabilities."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """Of a GPU of the kind."""

    multiprocessors: int
    shared: int
    """Bytes per multiprocessor."""
    shared_per_block: int
    """Bytes that a thread block may have."""


_LARGE = 164 << 10, 163 << 10
_LARGER = 228 << 10, 227 << 10
_SMALL = 100 << 10, 99 << 10

ARCHITECTURES = {
    (8, 0): Architecture(108, *_LARGE),  # A100
    (8, 6): Architecture(84, *_SMALL),  # A40
    (8, 7): Architecture(16, *_LARGE),  # Orin
    (8, 9): Architecture(58, *_SMALL),  # L4
    (9, 0): Architecture(132, *_LARGER),  # H200
    (10, 0): Architecture(148, *_LARGER),  # B200
    (10, 3): Architecture(148, *_LARGER),  # B300
    (11, 0): Architecture(20, *_LARGER),  # Thor
    (12, 0): Architecture(170, *_SMALL),  # RTX 5090
    (12, 1): Architecture(48, *_SMALL),  # GB10
}
"""By compute capability. All have 65536 registers per multiprocessor and per block."""
