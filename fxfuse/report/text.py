"""A report as text: a few lines, or all of it."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from tabulate import tabulate

from fxfuse.report.data import RegionReport, Report, SkippedReport

_COLUMN: Final = 60
"""Characters at which long cells of the table wrap."""
_WIDTH: Final = 110
"""Characters at which lines of the short report wrap."""
MOST_NAMED: Final = 3
"""The most things of a kind that the short report names. It counts the others."""
_MOST_REASONS: Final = 8
_LONGEST: Final = 40
"""The most characters of an epilogue or a kernel that the short report shows."""
_NUMBERED: Final = re.compile(r"_\d+(?=')")
"""The number at the end of a node's name between quotation marks."""


# ---------------------------------------------------------------------------------------------------------- short


def short(report: Report) -> str:
    """The short report: a line for each kind of region, the nodes left alone, and the operations of a call."""
    lines = [headline(report.regions)]
    lines += tabulate(kinds_of(report.regions), tablefmt="plain", disable_numparse=True).splitlines()
    lines += report.channels_last[:1]
    lines += figures(report)
    lines += report.cuda_graphs
    lines += map(_wrapped, report.dynamo)
    lines += [_wrapped(line) for line in report.training if "come from torch" in line]
    if report.skipped:
        lines.append(f"left alone: {len(report.skipped)}")
        groups = reasons(report.skipped)
        lines += [_wrapped(f"  {len(nodes)} x ({few(nodes)}): {reason}") for reason, nodes in groups[:_MOST_REASONS]]
        if len(groups) > _MOST_REASONS:
            rest = sum(len(nodes) for _, nodes in groups[_MOST_REASONS:])
            lines.append(f"  {rest} x for {len(groups) - _MOST_REASONS} other reasons")
    return "\n".join([*lines, "(all of it: explain(..., verbose=True); as a page: .to_html(path))"])


def _wrapped(line: str) -> str:
    return textwrap.fill(line, _WIDTH, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False)


def kinds_of(regions: Sequence[RegionReport]) -> list[tuple[str, str, str, str]]:
    """For each kind of region: its name, how many there are, what runs them, and their epilogues."""
    by_kind: dict[str, list[RegionReport]] = {}
    for region in regions:
        by_kind.setdefault(region.anchor, []).append(region)
    return [
        (
            kind,
            str(len(alike)),
            most_frequent(_shortened(_runs(region)) for region in alike),
            most_frequent(_shortened(region.epilogue) for region in alike),
        )
        for kind, alike in by_kind.items()
    ]


def _runs(region: RegionReport) -> str:
    if region.kernel is not None:
        return region.kernel
    return "not called yet" if region.fallback is None else f"torch: {region.fallback}"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def most_frequent(items: Iterable[str]) -> str:
    """The most frequent of some texts. If there are others, also its count and the number of other texts."""
    counts = Counter(items)
    (name, count), *others = counts.most_common()
    return f"{name} ({count}), {counted(len(others), 'other')}" if others else name


def few(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    named = ", ".join(names[:MOST_NAMED])
    return named + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")


def reasons(skipped: Sequence[SkippedReport]) -> list[tuple[str, list[str]]]:
    """Why nodes were left alone, each reason with its nodes; the most frequent first.

    Reasons that differ only in the numbers of the nodes that they name ('view_1', 'view_2') count as one.
    """
    groups: dict[str, list[SkippedReport]] = {}
    for item in skipped:
        groups.setdefault(_NUMBERED.sub("", item.reason), []).append(item)
    ranked = sorted(groups.values(), key=lambda group: -len(group))
    return [(group[0].reason, [item.node for item in group]) for group in ranked]


def figures(report: Report) -> list[str]:
    """A call's operations, its predicted memory traffic, and its measured gain, as far as these are known."""
    return [line for line in (operations(report), traffic(report), gain(report)) if line]


def operations(report: Report) -> str:
    """The operations of a call, before and after; empty if nothing was captured."""
    counts = report.operations
    if not counts.before:
        return ""
    calls = ", ".join(f"{name} {count}" for name, count in counts.calls[:MOST_NAMED])
    more = "" if len(counts.calls) <= MOST_NAMED else ", …"
    torch = counted(counts.after - counts.kernels, "call")
    python = "; what runs as Python is not counted" if counts.has_python else ""
    return (
        f"a call: {counts.before} operations before; now {counted(counts.kernels, 'kernel')} and {torch} of torch"
        f"{f' ({calls}{more})' if calls else ''}{python}"
    )


def counted(count: int, name: str) -> str:
    """ "1 kernel", "2 kernels"."""
    return f"{count} {name}{'' if count == 1 else 's'}"


def traffic(report: Report) -> str:
    """How much less memory the regions with known shapes read and write; empty if it is not less."""
    moved = [region.moved for region in report.regions if region.moved is not None]
    before, now = (sum(nbytes) for nbytes in zip(*moved, strict=True)) if moved else (0, 0)
    if now >= before:
        return ""
    return (
        f"predicted: {bytes_as_text(now)} read and written by {counted(len(moved), 'region')} a call, "
        f"{bytes_as_text(before)} by eager's operations ({before / now:.1f}x)"
    )


def bytes_as_text(count: float) -> str:
    """A number of bytes in the largest unit of which there is at least one."""
    return scaled(count, ("B", "KiB", "MiB", "GiB"), 1024)


def scaled(count: float, units: Sequence[str], step: int) -> str:
    """A number in the largest unit in which it is at least one, with three digits."""
    at = 0
    while at < len(units) - 1 and count >= step:
        count, at = count / step, at + 1
    return f"{count:.3g} {units[at]}" if count < step else f"{count:.0f} {units[at]}"


def gain(report: Report) -> str:
    """How much faster kernels were than torch's library, where that was measured; empty if nowhere."""
    gains = [pair for region in report.regions for pair in region.gains]
    if not gains:
        return ""
    before, now = (sum(times) for times in zip(*gains, strict=True))
    return (
        f"measured: {counted(len(gains), 'problem')}, {before * 1e3:.3f} ms by torch's library and a pass, "
        f"{now * 1e3:.3f} ms now ({before / now:.2f}x)"
    )


# ----------------------------------------------------------------------------------------------------- everything


def everything(report: Report) -> str:
    """All that the report knows, in tables."""
    parts = [headline(report.regions)]
    if report.regions:
        alike: dict[tuple[str, str, str], list[RegionReport]] = {}
        for region in report.regions:
            alike.setdefault((region.anchor, region.epilogue, how(region)), []).append(region)
        rows = [
            (anchor, len(regions), _cell(_replaced(regions)), _cell(epilogue), _cell(way))
            for (anchor, epilogue, way), regions in alike.items()
        ]
        headers = ("anchor", "count", "replaces", "epilogue", "kernel")
        parts.append(tabulate(rows, headers=headers, tablefmt="simple_outline"))
    parts += figures(report)
    parts += remarks(report)
    if report.skipped:
        parts.append(f"{len(report.skipped)} not fused")
        rows_of_skipped = [(item.node, _cell(item.reason)) for item in report.skipped]
        parts.append(tabulate(rows_of_skipped, headers=("node", "reason"), tablefmt="simple_outline"))
    return "\n".join(parts)


def remarks(report: Report) -> tuple[str, ...]:
    """The report's lines about the model as a whole."""
    return (*report.channels_last, *report.cuda_graphs, *report.dynamo, *report.programs, *report.training)


def _cell(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _COLUMN)) or "-"


def headline(regions: Sequence[RegionReport]) -> str:
    """How many regions there are. Those that ran as a kernel are called fused."""
    total = counted(len(regions), "region")
    fused = sum(region.kernel is not None for region in regions)
    by_torch = sum(region.kernel is None and region.fallback is not None for region in regions)
    if fused == len(regions):
        return f"{total} fused"
    counts = {"fused": fused, "run by torch": by_torch, "not called yet": len(regions) - fused - by_torch}
    if not fused + by_torch:
        return f"{total} found, not called yet"
    return f"{total}: " + ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def _replaced(regions: Sequence[RegionReport]) -> str:
    """The nodes of the first of some regions that are alike, and how many more there are."""
    first, *others = regions
    return ", ".join(first.nodes) + (f"; and {len(others)} like it" if others else "")


def how(region: RegionReport) -> str:
    """What runs a region: its kernel, with times, error and scratch memory, and why torch ran it."""
    ways = [region.kernel] if region.kernel else []
    for contest in region.measured:
        ranked = sorted(contest, key=lambda item: item[1])
        times = ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in ranked)
        ways.append(f"measured: {times}")
    if region.error is not None:
        ways.append(f"error {region.error:.2g}x of what eager's allows")
    if region.workspace:
        ways.append(f"scratch memory {region.workspace / 2**20:.1f} MB")
    if region.fallback:
        ways.append(f"torch: {region.fallback}")
    return "; ".join(ways) or "(not called yet)"
