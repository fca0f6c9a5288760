"""Findings that are known and not yet mended: counted apart. A line goes when its fault is mended."""

from __future__ import annotations

import re
from typing import Any

KNOWN = (
    # Strides of dimensions of size 1 or of empty tensors, where the reference has another operator than eager (relu
    # for relu_, clamp for hardtanh).
    ("strides", r"inplace=True|[Hh]ardtanh|ReLU6|relu_"),
    # hardtanh's gradient is 0 at its bounds, clamp's is 1: in 16 bits values are often exactly there.
    ("gradients", r"[Hh]ardtanh|ReLU6"),
)
"""(kind, what the minimised model's own lines contain)."""


def is_known(finding: dict[str, Any]) -> bool:
    lines = "\n".join(f"{line[1]} {line[2]}" for line in finding.get("case", {}).get("lines", []))
    return any(finding["kind"] == kind and re.search(words, lines) for kind, words in KNOWN)
