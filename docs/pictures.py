"""Draws the graphs of docs/how-it-works.md: one model as it is captured, matched, fused and launched.

    python docs/pictures.py

The graphs are those that `fxfuse.explain(fast).to_html()` draws, of the model that the page shows: its code is read
from the page itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch

import fxfuse
from fxfuse.report.drawing import CHARACTER, Drawing, Drawn, drawings_of
from fxfuse.report.layered import LAYER
from fxfuse.report.measure import steps_of

DOCS = Path(__file__).resolve().parent
PAGE, PICTURE = DOCS / "how-it-works.md", DOCS / "images" / "way.svg"
COLOURS = (("#dbe4f8", "#2563c9"), ("#fbe6d4", "#c2560c"))
"""Fill and stroke of each region."""
PLAIN = ("#ffffff", "#8b93a1")
HEIGHT, LINE, GAP, TOP = 40, 15, 34, 46
"""Of a box, of a line in it, between columns, and above the first box, in pixels."""


def the_model() -> tuple[torch.nn.Module, torch.Tensor]:
    """What the first code block of the page makes."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    if code is None:
        raise SystemExit(f"{PAGE.name} has no code block: it shows the model that is drawn")
    names: dict[str, Any] = {"__name__": "way"}
    exec(compile(code[1], PAGE.name, "exec"), names)
    return names["model"], names["x"]


def box(x: float, y: float, width: float, lines: Sequence[str], colours: tuple[str, str]) -> str:
    """A node with its centre at (x, y)."""
    fill, stroke = colours
    top = y + 5 - (len(lines) - 1) / 2 * LINE
    rows = "".join(
        f'<text x="{x:.1f}" y="{top + index * LINE:.1f}" class="l{index}">{escape(line)}</text>'
        for index, line in enumerate(lines)
    )
    return (
        f'<rect x="{x - width / 2:.1f}" y="{y - HEIGHT / 2:.1f}" width="{width:.1f}" height="{HEIGHT}" rx="6" '
        f'fill="{fill}" stroke="{stroke}"/>{rows}'
    )


def edge(points: Sequence[tuple[float, float]]) -> str:
    """From box to box, by way of the points between."""
    (x, y), *rest = points
    path = f"M{x:.1f} {y + HEIGHT / 2:.1f}"
    y += HEIGHT / 2
    for index, (to_x, to_y) in enumerate(rest):
        to_y -= HEIGHT / 2 if index == len(rest) - 1 else 0
        middle = (y + to_y) / 2
        path += f" C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}"
        x, y = to_x, to_y
    return f'<path d="{path}"/>'


def wide(lines: Sequence[str]) -> float:
    return CHARACTER * max(map(len, lines)) + 20


def graph(drawing: Drawing, left: float, coloured: bool) -> str:
    """A column with a graph."""

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return left + point[0], TOP + point[1]

    def drawn(node: Drawn) -> str:
        lines = [line for line in (node.title, node.subtitle) if line]
        colours = COLOURS[(node.region - first) % len(COLOURS)] if coloured and node.region is not None else PLAIN
        return box(*place(drawing.layout.centres[node.name]), wide(lines), lines, colours)

    first = min((node.region for node in drawing.nodes if node.region is not None), default=0)
    edges = "".join(edge([place(point) for point in route]) for route in drawing.layout.routes)
    return edges + "".join(map(drawn, drawing.nodes))


def main() -> None:
    model, x = the_model()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        for _ in range(3):
            fast(x)
    report = fxfuse.explain(fast)
    ((name, module),) = report.graphs
    drawings = drawings_of(name, module, {})
    steps = steps_of(report.graphs).spans
    launches = [(step.name, "a launch" if step.ours else "a call of torch", step.ours) for step in steps]
    parts: list[str] = []
    left = GAP / 2
    for title, drawing, coloured in (
        ("1. captured", drawings.before, False),
        ("2. matched", drawings.before, True),
        ("3. fused", drawings.after, True),
    ):
        parts.append(f'<text x="{left + drawing.layout.width / 2:.1f}" y="24" class="title">{title}</text>')
        parts.append(graph(drawing, left, coloured))
        left += drawing.layout.width + GAP
    width = max(wide(one[:2]) for one in launches)
    parts.append(f'<text x="{left + width / 2:.1f}" y="24" class="title">4. a program</text>')
    for index, (what, kind, ours) in enumerate(launches):
        colours = COLOURS[index // 2 % 2] if ours else PLAIN
        parts.append(box(left + width / 2, TOP + LAYER * (index + 0.5), width, (what, kind), colours))
    right, height = left + width + GAP / 2, TOP + drawings.before.layout.height
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right:.0f} {height:.0f}" width="{right:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="one model, step by step"><style>text{{font:12px sans-serif;'
        "text-anchor:middle;fill:#1a1f29}.l1{font-size:10.5px;fill:#5b6472}.title{font-size:15px;font-weight:600}"
        "path{fill:none;stroke:#a3a9b4}</style>"
        f'<rect width="100%" height="100%" fill="#f6f7f9"/>{"".join(parts)}</svg>\n',
        encoding="utf-8",
    )
    print(f"{PICTURE.relative_to(DOCS.parent)}: {PICTURE.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
