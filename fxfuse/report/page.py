"""A report as one HTML page that needs nothing else: data and tables put into page.html, page.css and page.js."""

from __future__ import annotations

import importlib.resources
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

import torch

from fxfuse import plans
from fxfuse.arguments import Inputs, arguments_of
from fxfuse.errors import FxfuseError
from fxfuse.module import FusedModule, state_of
from fxfuse.report import measure, text
from fxfuse.report.collect import explain
from fxfuse.report.data import RegionReport, Report
from fxfuse.report.drawing import Drawing, described, drawings_of
from fxfuse.report.text import bytes_as_text, scaled
from fxfuse.report.work import Work, work_of

_MOST_LISTED: Final = 12
"""The most kernels and operators of a call that are listed by the time they take."""
_COPIES: Final = ("copy", "clone", "contiguous", "_to_copy", "to")
"""Operators that copy."""


@dataclass(frozen=True)
class _Row:
    """One region as the page shows it, with its latest problem."""

    region: RegionReport
    graph: str
    work: Work | None
    seconds: float | None
    """Its time in the timed call, or its kernel's time in the contest that it won; None if neither was measured."""
    is_shared: bool = False
    """Whether it shares launches with other nodes. The time of such a launch counts for each in equal parts."""


def write(
    report: Report, path: str | os.PathLike[str], inputs: Inputs | None, kwargs: Mapping[str, Any] | None
) -> None:
    """See Report.to_html."""
    measured = None
    if inputs is not None or kwargs is not None:
        args, keywords = arguments_of(inputs, kwargs, "inputs")
        model = report.model
        if model is None:
            raise FxfuseError("this report was not made by fxfuse.explain: it knows no model that could be called")
        measure.warm_up(model, args, keywords)
        report = explain(model, report.verbose)  # calls make graphs and plans
        measured = measure.measured(model, report.graphs, args, keywords, _dtypes(report))
    Path(path).write_text(html_of(report, measured), encoding="utf-8")


def _dtypes(report: Report) -> set[torch.dtype]:
    """The dtypes of the products that regions compute."""
    problems = (problem for region in report.regions for problem in plans.problems_of(region.number))
    return {problem.x.dtype for problem in problems if not problem.is_chain}


def html_of(report: Report, measured: measure.Measured | None = None) -> str:
    """The page as HTML."""
    rows = [_row(region, report, measured) for region in report.regions]
    tracks = measured.tracks if measured is not None else (measure.steps_of(report.graphs),)
    data = {
        "graphs": [
            _graph(name, module, {} if measured is None else measured.values.get(module, {}))
            for name, module in _graphs(report)
        ],
        "regions": [_region_data(row) for row in rows],
        "tracks": [_track(track) for track in tracks],
        "roofs": _roofs(measured),
    }
    name = type(getattr(report.model, "_orig_mod", report.model)).__name__ if report.model is not None else "model"
    parts = {
        "title": escape(f"fxfuse: {name}"),
        "headline": escape(text.headline(report.regions)),
        "tiles": _tiles(report, measured, rows),
        "timeline_note": escape(_timeline_note(report, tracks, measured)),
        "longest": "".join(_longest(track) for track in tracks if track.is_timed),
        "regions": _regions_table(rows),
        "skipped": _skipped_table(report),
        "copies": _copies(report, tracks),
        "roofline_note": escape(_roofline_note(rows, measured)),
        "text": escape(text.everything(report)),
        "style": _file("page.css"),
        "script": _file("page.js"),
        # in a script element nothing may look like the end of one
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    return re.sub("<!--([a-z_]+)-->", lambda place: parts[place[1]], _file("page.html"))


def _file(name: str) -> str:
    return importlib.resources.files("fxfuse.report").joinpath(name).read_text(encoding="utf-8")


def _graphs(report: Report) -> list[tuple[str, FusedModule]]:
    """The graphs, with unique names. A module's further graphs, for other arguments, are numbered. Those of training
    steps come last."""
    found = list(report.graphs)
    for name, module in report.graphs:
        training = state_of(module).training
        for step in training.steps if training is not None else ():
            graphs = [(which, graph) for which, graph in step.graphs if isinstance(graph, FusedModule)]
            found += [(f"{name} in training, {which}".strip(), graph) for which, graph in graphs]
    counts: dict[str, int] = defaultdict(int)
    named = []
    for name, module in found:
        counts[name] += 1
        named.append((name if counts[name] == 1 else f"{name} ({counts[name]})".strip(), module))
    return named


# ----------------------------------------------------------------------------------------------------------- data


def _row(region: RegionReport, report: Report, measured: measure.Measured | None) -> _Row:
    problems = plans.problems_of(region.number)
    work, seconds = None, None
    if problems:
        problem, plan = list(problems.items())[-1]
        work = work_of(problem, plan)
        seconds = dict(plan.measured).get(plan.kernel or "")
    graph = next((name for name, module in report.graphs if _has(module, region.number)), "")
    node = region.node.removeprefix(f"{graph}." if graph else "")
    tracks = () if measured is None else measured.tracks
    spans = [span for track in tracks for span in track.spans if node in span.nodes and span.graph == graph]
    if spans:
        seconds = sum(span.seconds / len(span.nodes) for span in spans)
    return _Row(region, graph, work, seconds, any(span.nodes != (node,) for span in spans))


def _has(module: FusedModule, number: int) -> bool:
    return any(region.number == number for region in state_of(module).regions)


def _graph(name: str, module: FusedModule, seen: Mapping[str, Any]) -> dict[str, Any]:
    drawings = drawings_of(name, module, seen)
    return {"name": name, "before": _drawing(drawings.before), "after": _drawing(drawings.after)}


def _drawing(drawing: Drawing) -> dict[str, Any]:
    place = drawing.layout.centres
    return {
        "width": round(drawing.layout.width, 1),
        "height": round(drawing.layout.height, 1),
        "nodes": [
            {
                "name": node.name, "title": node.title, "subtitle": node.subtitle, "kind": node.kind,
                "region": node.region, "details": node.details,
                "x": round(place[node.name][0], 1), "y": round(place[node.name][1], 1),
            }
            for node in drawing.nodes
        ],
        "edges": [[round(number, 1) for point in route for number in point] for route in drawing.layout.routes],
    }  # fmt: skip


def _region_data(row: _Row) -> dict[str, Any]:
    """The data of a region for the graph and the roofline."""
    region, work, seconds = row.region, row.work, row.seconds
    details = [("kernel", region.kernel or text.how(region))]
    details += [("torch", region.fallback)] if region.fallback else []
    details += [("candidates", _candidates(contest)) for contest in region.measured]
    if work is not None:
        details += [("work", _work(work)), ("saved", f"{bytes_as_text(work.saved)} a call")]
    details += [("time", _time(row))] if seconds else []
    point = None
    if work is not None and seconds and work.flops and work.nbytes:
        point = {"intensity": work.flops / work.nbytes, "speed": work.flops / seconds}
    return {
        "number": region.number, "node": region.node, "kind": region.anchor, "epilogue": region.epilogue,
        "details": details, "point": point,
    }  # fmt: skip


def _track(track: measure.Track) -> dict[str, Any]:
    spans = [
        [round(span.start * 1e6, 3), round(span.seconds * 1e6, 3), span.name, span.graph, span.nodes, int(span.ours)]
        for span in track.spans
    ]
    return {"name": track.name, "timed": track.is_timed, "spans": spans}


def _roofs(measured: measure.Measured | None) -> dict[str, Any] | None:
    if measured is None:
        return None
    return {"bandwidth": measured.bandwidth, "speeds": [list(item) for item in measured.speeds]}


# --------------------------------------------------------------------------------------------------------- tables


def _tiles(report: Report, measured: measure.Measured | None, rows: Sequence[_Row]) -> str:
    """The tiles at the top: a few numbers."""
    counts = report.operations
    fused = sum(region.kernel is not None for region in report.regions)
    tiles = [("regions", str(len(report.regions)), f"{fused} run as kernels")]
    if counts.before:
        calls = text.counted(counts.after - counts.kernels, "call")
        kernels = f"{text.counted(counts.kernels, 'kernel')}, {calls} of torch"
        tiles.append(("operations a call", f"{counts.before} → {counts.after}", kernels))
    if measured is not None:
        ratio = measured.eager / measured.fused
        detail = f"{ratio:.2f}x; medians, {measured.device}"
        tiles.append(("eager → fxfuse", f"{_seconds(measured.eager)} → {_seconds(measured.fused)}", detail))
    saved = sum(row.work.saved for row in rows if row.work is not None)
    if saved:
        tiles.append(("not moved", bytes_as_text(saved), "of intermediate results, a call of each region"))
    if report.skipped:
        reasons = text.counted(len(text.reasons(report.skipped)), "reason")
        tiles.append(("left alone", str(len(report.skipped)), f"for {reasons}"))
    return "".join(
        f'<div class="tile"><div class="name">{escape(name)}</div><div class="value">{escape(value)}</div>'
        f'<div class="detail">{escape(detail)}</div></div>'
        for name, value, detail in tiles
    )


def _regions_table(rows: Sequence[_Row]) -> str:
    if not rows:
        return "<p>Nothing was fused.</p>"
    head = ("node", "kind", "epilogue", "kernel and candidates", "result", "work", "saved", "time")
    body = []
    for row in rows:
        region, work = row.region, row.work
        value = "" if work is None else _result(work)
        cells = [
            f'<a href="#node={escape(row.graph)}/{escape(_own_name(row))}">{escape(region.node)}</a>'
            f'<div class="note">{escape(", ".join(region.nodes))}</div>',
            f'<span class="kind" data-kind="{escape(region.anchor)}">{escape(region.anchor)}</span>',
            f"<code>{escape(region.epilogue)}</code>",
            _kernel_cell(region),
            escape(value),
            "" if work is None else escape(_work(work)),
            "" if work is None else escape(bytes_as_text(work.saved)),
            escape(_time(row)),
        ]
        body.append(f'<tr data-region="{region.number}">{_cells(cells, numbers=2)}</tr>')
    return _table(head, body)


def _cells(cells: Sequence[str], numbers: int = 0) -> str:
    """The cells of a row. The last `numbers` of them hold numbers."""
    first = len(cells) - numbers
    return "".join(f"<td{' class=number' if at >= first else ''}>{cell}</td>" for at, cell in enumerate(cells))


def _time(row: _Row) -> str:
    return f"{'≈ ' if row.is_shared else ''}{_seconds(row.seconds)}" if row.seconds else ""


def _own_name(row: _Row) -> str:
    return row.region.node.removeprefix(f"{row.graph}." if row.graph else "")


def _kernel_cell(region: RegionReport) -> str:
    lines = [escape(region.kernel or text.how(region))]
    if region.kernel and region.fallback:
        lines.append(f'<div class="note">torch, for some calls: {escape(region.fallback)}</div>')
    for contest in region.measured:
        items = "".join(f"<li>{escape(name)}: {_seconds(seconds)}</li>" for name, seconds in _ranked(contest))
        lines.append(f"<details><summary>{len(contest)} candidates measured</summary><ol>{items}</ol></details>")
    if region.error is not None:
        lines.append(f'<div class="note">error {region.error:.2g}x of what eager\'s allows</div>')
    if region.workspace:
        lines.append(f'<div class="note">scratch memory {bytes_as_text(region.workspace)}</div>')
    return "".join(lines)


def _skipped_table(report: Report) -> str:
    if not report.skipped:
        return "<p>Nothing: every candidate is in a region.</p>"
    body = [
        f"<tr><td>{len(nodes)}</td><td>{escape(reason)}</td><td>{escape(', '.join(nodes))}</td></tr>"
        for reason, nodes in text.reasons(report.skipped)
    ]
    return _table(("count", "why", "nodes"), body)


def _copies(report: Report, tracks: Sequence[measure.Track]) -> str:
    """Conversions of layouts, and torch's operators in programs that copy."""
    lines = [escape(line.strip()) for line in report.channels_last]
    by_name: dict[str, list[str]] = defaultdict(list)
    for track in tracks:
        for span in track.spans if track.name == "fxfuse" else ():
            name = _operator(span.name)
            if name in _COPIES and not span.ours:
                by_name[name] += span.nodes or [span.name]
    lines += [f"{len(nodes)} × {escape(name)}: {escape(text.few(nodes))}" for name, nodes in by_name.items()]
    if not lines:
        return "<p>None that are known of.</p>"
    return "<ul>" + "".join(f"<li>{line}</li>" for line in lines) + "</ul>"


def _operator(name: str) -> str:
    """ "clone" for "aten::clone" and "aten.clone.default"."""
    return name.removeprefix("aten::").removeprefix("aten.").partition(".")[0].rstrip("_")


def _longest(track: measure.Track) -> str:
    """A table of the kernels or operators of a call that took the most time."""
    sums: dict[str, list[float]] = defaultdict(list)
    for span in track.spans:
        sums[span.name].append(span.seconds)
    total = sum(map(sum, sums.values()))
    ranked = sorted(sums.items(), key=lambda item: -sum(item[1]))[:_MOST_LISTED]
    body = [
        f"<tr>{_cells(cells, numbers=3)}</tr>"
        for cells in (
            (
                f'<span title="{escape(name)}">{escape(name)}</span>',
                str(len(times)),
                _seconds(sum(times)),
                f"{100 * sum(times) / total:.0f} %",
            )
            for name, times in ranked
        )
    ]
    caption = f"{track.name}: {len(track.spans)} in {_seconds(total)}"
    return f"<div><h3>{escape(caption)}</h3>{_table(('what', 'count', 'time', 'share'), body)}</div>"


def _table(head: Iterable[str], body: Iterable[str]) -> str:
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    rows = "".join(body)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{rows}</tbody></table></div>'


# ---------------------------------------------------------------------------------------------------------- notes


def _timeline_note(report: Report, tracks: Sequence[measure.Track], measured: measure.Measured | None) -> str:
    if measured is not None:
        programs = [state_of(module).programs for _, module in report.graphs]
        unseen = (
            " Graphs without a program run node by node: on a CPU only torch's operators in them are seen."
            if any(known is None or not known.programs for known in programs)
            else ""
        )
        return (
            f"One call of each, measured by torch.profiler ({measured.device}): kernels on a GPU, operators on a CPU. "
            f"Profiling takes time itself: the medians above are of calls that nobody watched.{unseen}"
        )
    if any(track.spans for track in tracks):
        return (
            "In the order of the program's steps, all as wide as each other: nothing was timed. "
            "report.to_html(path, inputs=(x,)) times a call, and eager's beside it."
        )
    return (
        "No program yet: calls without gradients run as one from the third of a kind on. Call the model, or use "
        "report.to_html(path, inputs=(x,))."
    )


def _roofline_note(rows: Sequence[_Row], measured: measure.Measured | None) -> str:
    known = sum(row.seconds is not None and row.work is not None for row in rows)
    if not known:
        return (
            "No region's time is known. On a GPU kernels are measured at their first call; "
            "report.to_html(path, inputs=(x,)) times regions on any device."
        )
    left = len(rows) - known
    others = f" {left} have no time: they did not run in that call." if left else ""
    if any(row.is_shared for row in rows):
        others += " Launches that nodes share (≈) count in equal parts."
    roofs = (
        " Roofs: the fastest copy and the fastest matrix product of torch that were measured."
        if measured is not None
        else " Roofs are measured with to_html(path, inputs=(x,)) only."
    )
    return (
        f"{known} regions: operations for each byte that they must move, and operations a second. "
        f"An elementwise operation counts as one.{others}{roofs}"
    )


def _result(work: Work) -> str:
    meta = torch.empty_strided(work.shape, work.strides, dtype=work.dtype, device="meta")
    return " ".join(item for _, item in described(meta))


def _candidates(contest: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in _ranked(contest))


def _ranked(contest: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted(contest, key=lambda item: item[1])


def _work(work: Work) -> str:
    return f"{scaled(work.flops, ('FLOP', 'kFLOP', 'MFLOP', 'GFLOP', 'TFLOP'), 1000)}, {bytes_as_text(work.nbytes)}"


def _seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
