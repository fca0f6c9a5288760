"""Errors of linear layers in float32 beside eager's own, over K and kinds of data.

    python benchmarks/accuracy.py --output benchmarks/results

Relative Frobenius norm against float64. The table gives fxfuse's error as a multiple of eager's with TF32 off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from suite import Net, arguments, provenance, write
from tabulate import tabulate
from torch import nn

import fxfuse

DATA = ("normal", "uniform", "wide")
"""wide: normal * exp(4 * normal), element by element."""
SIZES = ((1024, 1024), (16, 2048), (2048, 4096))
"""Rows of x and features of the result."""
DEPTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Row:
    """One line: errors as multiples of eager's, by K."""

    fp32: str
    data: str
    rows: int
    features: int
    ratios: dict[int, float]


def sample(kind: str, *shape: int) -> torch.Tensor:
    if kind == "uniform":
        return torch.rand(*shape)
    normal = torch.randn(*shape)
    return normal * torch.exp(4 * torch.randn(*shape)) if kind == "wide" else normal


def _error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def ratio(fp32: str, kind: str, m: int, n: int, k: int) -> float:
    """fxfuse's error as a multiple of eager's. The epilogue (x * 1) adds no error of its own."""
    torch.manual_seed(k)
    model = Net(lambda self, x: self.fc(x) * 1.0, fc=nn.Linear(k, n, bias=False)).eval()
    model.fc.weight.data = sample(kind, n, k)
    x = sample(kind, m, k)
    exact = x.double() @ model.fc.weight.double().t()
    fast = fxfuse.optimize(model, fp32="fast" if fp32 == "fast" else "exact", strict=True)
    return _error(fast(x), exact) / _error(model.fc(x), exact)


def main() -> None:
    given = arguments(__doc__).parse_args()
    rows: list[Row] = []
    with torch.no_grad(), torch.device(given.device):
        for fp32 in ("exact", "fast"):
            for kind in DATA:
                for m, n in SIZES:
                    rows.append(Row(fp32, kind, m, n, {k: ratio(fp32, kind, m, n, k) for k in DEPTHS}))
                    print(rows[-1], flush=True)
    table = [
        (row.fp32, row.data, f"{row.rows}x{row.features}", *(f"{value:.2f}" for value in row.ratios.values()))
        for row in rows
    ]
    headers = ("fp32", "data", "result", *(f"K = {k}" for k in DEPTHS))
    facts = provenance(torch.device(given.device), given.commit)
    text = (
        f"{', '.join(f'{key} {value}' for key, value in facts.items())}\n\n"
        f"Error against float64 as a multiple of eager's.\n\n"
        f"{tabulate(table, headers=headers, tablefmt='github', disable_numparse=True)}\n"
    )
    print(text)
    if given.output is not None:
        write(given.output, "accuracy", facts, text, rows)


if __name__ == "__main__":
    main()
