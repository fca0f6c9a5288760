"""Compiles and runs a small model with one kernel, and compares it with float64, in a process for `fxfuse doctor`.

    python -m fxfuse.cli.probe cuda:0

prints JSON: {"kernel": …, "seconds": …, "error": …, "eager_error": …}, or {"failure": …}. A kernel that crashes ends
this process, and not the doctor.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import nn

import fxfuse


def probe(device: torch.device) -> dict[str, Any]:
    """Builds and runs a linear with GELU behind it. Raises what fxfuse raises with strict=True, and AssertionError.

    Returns the kernel's name, seconds from the model to its first result, and the relative errors against float64.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU()).eval().to(device)
    x = torch.randn(32, 64, device=device)
    started = time.perf_counter()
    with torch.no_grad():
        fast = fxfuse.optimize(model, (x,), strict=True)
        fast(x)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        verified = fxfuse.verify(model, fast, (x,))
    (region,) = fxfuse.explain(fast).regions
    found = {
        "kernel": region.kernel, "seconds": seconds, "error": verified.error, "eager_error": verified.eager_error,
    }  # fmt: skip
    return found if verified.ok else {**found, "failure": f"the result is wrong: {verified.problem}"}


if __name__ == "__main__":
    try:
        outcome = probe(torch.device(sys.argv[1]))
    except Exception as error:  # whatever it is, it is the finding
        outcome = {"failure": f"{type(error).__name__}: {error}"}
    print(json.dumps(outcome))
