"""CPU time of a call: tiny tensors on the GPU, so that nothing but Python and the launch is measured.

    python benchmarks/overhead.py

Microseconds from call to return, many calls queued one after another, medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from suite import Net, arguments, provenance
from tabulate import tabulate
from torch import nn

import fxfuse
from fxfuse import functional

CALLS, REPEATS = 200, 30


def microseconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median over interleaved repeats of the time per call, the GPU's queue emptied between them."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(CALLS):
                call()
            samples[name].append((time.perf_counter() - started) / CALLS * 1e6)
    return {name: statistics.median(times) for name, times in samples.items()}


def main() -> None:
    parser = arguments(__doc__)
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type != "cuda":
        parser.error("a launch is measured, which takes a GPU")
    model = Net(lambda m, x: torch.relu(m.fc(x) + m.v), fc=nn.Linear(32, 32), v=(32,)).eval().to(device)
    x = torch.randn(8, 32, device=device)
    with torch.no_grad():
        fast = fxfuse.optimize(model, strict=True)
        node = next(node for node in fast.graph.nodes if node.op == "call_function")
        weight, bias, v, epilogue, keywords = model.fc.weight, model.fc.bias, model.v, node.args[4], dict(node.kwargs)
        registered = torch.ops.fxfuse.linear.default
        calls: dict[str, Callable[[], object]] = {
            "eager linear + add + relu": lambda: torch.relu(F.linear(x, weight, bias) + v),
            "eager module": lambda: model(x),
            "fxfuse.functional.linear": lambda: functional.linear(x, weight, bias, [v], epilogue, **keywords),
            "torch.ops.fxfuse.linear": lambda: registered(x, weight, bias, [v], epilogue, **keywords),
            "optimised module": lambda: fast(x),
        }
        for call in calls.values():
            call()
        rows = [(name, f"{median:.1f}") for name, median in microseconds(calls).items()]
    print(", ".join(f"{key} {value}" for key, value in provenance(device, given.commit).items()))
    print(tabulate(rows, headers=("call", "us"), tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
