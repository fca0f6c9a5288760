"""Which arithmetic a kernel uses: what torch's own switches ask for at call time.

float32 products run as 3xTF32 (float32-level accuracy) or, where torch is allowed TF32, as one TF32 product. torch has
two generations of switches: `allow_tf32` and, from 2.9 on, `fp32_precision`; reading the old one after the new one was
set raises, so the new one is asked first.

No switch of torch's asks for "fp16x3", products of scaled halves at twice the speed of 3xTF32: its range is limited.
Each row of x, and the weights of each output feature, are scaled to what fp16 can hold. A number keeps 22 bits down to
about 2^-18 of its row's largest; smaller ones have an absolute error of 2^-40 of the largest. That is as accurate as
float32 unless both ranges are wide and small x meet large weights: x[:, k] * d[k] times w[:, k] / d[k] loses as many
bits as d's range has beyond 2^18. NaN and infinities are where float32 has them.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

Precision = Literal["tf32x3", "fp16x3", "tf32", "fp16", "bf16"]


def _tf32_allowed(new: Any, old: Any) -> bool:
    setting = getattr(new, "fp32_precision", None)
    if setting in ("tf32", "ieee"):
        return bool(setting == "tf32")
    general = getattr(torch.backends, "fp32_precision", None)
    if setting is not None and general in ("tf32", "ieee"):  # "none" inherits the general setting
        return bool(general == "tf32")
    return bool(old.allow_tf32)


def tf32_allowed() -> tuple[bool, bool]:
    """Whether torch may use TF32 in (matrix products, convolutions)."""
    return (
        _tf32_allowed(torch.backends.cuda.matmul, torch.backends.cuda.matmul),
        _tf32_allowed(getattr(torch.backends.cudnn, "conv", None), torch.backends.cudnn),
    )


def precision(kind: str, dtype: torch.dtype) -> Precision:
    """The arithmetic for an anchor of this kind on tensors of this dtype."""
    if dtype == torch.float16:
        return "fp16"
    if dtype == torch.bfloat16:
        return "bf16"
    matmul, convolution = tf32_allowed()
    return "tf32" if (convolution if kind == "conv2d" else matmul) else "tf32x3"
