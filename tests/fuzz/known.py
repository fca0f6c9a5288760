"""Findings that are known and not yet mended: counted apart. A line goes when its fault is mended."""

from __future__ import annotations

import re
from typing import Any

KNOWN = (
    # Strides of dimensions of size 1, where the reference has another operator than eager (relu for relu_).
    ("strides", r"inplace=True|relu_"),
)
"""(kind, what the minimised model's own lines contain)."""


def is_known(finding: dict[str, Any]) -> bool:
    lines = "\n".join(f"{line[1]} {line[2]}" for line in finding.get("case", {}).get("lines", []))
    return any(finding["kind"] == kind and re.search(words, lines) for kind, words in KNOWN)
