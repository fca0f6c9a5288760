"""The arithmetic of products, as torch's switches ask for at call time.

float32 products run as 3xTF32 (as accurate as float32) or, where torch is allowed TF32, as one TF32 product.

"fp16x3", products of scaled halves, is twice as fast as 3xTF32. No switch of torch asks for it, because its range is
limited. Each row of x, and the weights of each output feature, are scaled to the range of fp16. A number keeps 22 bits
down to about 2^-18 of the largest in its row; smaller ones have an absolute error of 2^-40 of the largest. This is as
accurate as float32 unless both ranges are wide and small x meet large weights: x[:, k] * d[k] times w[:, k] / d[k]
loses as many bits as d's range has beyond 2^18. NaN and infinities in x and the weight give float32's results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

import torch

from fxfuse.problem import BY_CONVOLUTION, PRODUCTS

Precision = Literal["tf32x3", "tf32", "fp16", "bf16", "fp16x3"]

MMA: Final[dict[Precision, str]] = {"tf32x3": "Tf32x3", "tf32": "Tf32", "fp16": "Fp16", "bf16": "Bf16"}
"""The struct of mma.cuh for each precision. fp16x3 has a kernel of its own."""
ELEMENT: Final[dict[Precision, str]] = {
    "tf32x3": "float", "tf32": "float", "fp16": "Float16", "bf16": "BFloat16", "fp16x3": "float"
}  # fmt: skip
"""The C++ type of x and the weight for each precision."""


def element_bytes(precision: Precision) -> int:
    """Bytes of an element of x and the weight."""
    return 4 if ELEMENT[precision] == "float" else 2


def _reader(operations: str, old: Callable[[], bool]) -> Callable[[], bool]:
    """A function that reads torch's switch for TF32 in "matmul" or "conv".

    torch has two generations of switches: `allow_tf32` and, from 2.9 on, `fp32_precision`. Reading the old one after
    the new one was set raises, so the new one is read first. Every call of a fused operator reads the switches,
    so their C functions are called: the properties of torch.backends take ten times as long.
    """
    new: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)
    if new is None:
        return old

    def read() -> bool:
        setting = new("cuda", operations)
        if setting == "none":  # inherits the general setting
            setting = new("generic", "all")
        if setting in ("tf32", "ieee"):
            return setting == "tf32"
        try:
            return old()
        except RuntimeError:  # the two disagree; torch's libraries follow the new one, which does not say TF32
            return False

    return read


_READERS: Final[dict[bool, Any]] = {
    False: _reader("matmul", torch._C._get_cublas_allow_tf32),
    True: _reader("conv", torch._C._get_cudnn_allow_tf32),
}


def tf32_allowed(kind: str) -> bool:
    """Whether torch may use TF32 for anchors of this kind."""
    return kind in PRODUCTS and bool(_READERS[kind in BY_CONVOLUTION]())


def precision(kind: str, dtype: torch.dtype, fp32: str = "exact") -> Precision:
    """The arithmetic that torch's switches allow for an anchor of this kind and dtype; `fp32` as in fxfuse.optimize."""
    if dtype == torch.float16:
        return "fp16"
    if dtype == torch.bfloat16:
        return "bf16"
    if tf32_allowed(kind):
        return "tf32"
    return "fp16x3" if fp32 == "fast" and kind not in BY_CONVOLUTION else "tf32x3"
