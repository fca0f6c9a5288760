"""A report as a compact table, for notebooks: it takes the notebook's own colours."""

from __future__ import annotations

from html import escape

from fxfuse.report import text
from fxfuse.report.data import Report

_CELL = "text-align:left;vertical-align:top;padding:2px 12px 2px 0"


def html_of(report: Report) -> str:
    """The short report as HTML. Nodes that were left alone, and remarks on the whole model, are folded away."""
    rows = [("region", "count", "run by", "epilogue"), *text.kinds_of(report.regions)]
    head, *body = [
        "".join(f'<{tag} style="{_CELL}">{escape(cell)}</{tag}>' for cell in row)
        for row, tag in zip(rows, ["th", *["td"] * (len(rows) - 1)], strict=True)
    ]
    parts = [f"<div><b>{escape(text.headline(report.regions))}</b></div>"]
    if body:
        lines = "".join(f"<tr>{row}</tr>" for row in body)
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>")
    parts += [f"<div>{escape(line)}</div>" for line in text.figures(report)]
    groups = [f"{len(nodes)} × ({text.few(nodes)}): {reason}" for reason, nodes in text.reasons(report.skipped)]
    parts.append(_folded(f"left alone: {len(report.skipped)}", groups))
    parts.append(_folded("of the whole model", text.remarks(report)))
    return f"<div>{''.join(parts)}</div>"


def _folded(title: str, lines: list[str] | tuple[str, ...]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<details><summary>{escape(title)}</summary><ul>{items}</ul></details>"
