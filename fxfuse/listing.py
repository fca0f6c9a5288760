"""Lists where kernels came from: a region's kernels below the torch code that they compute, and FXFUSE_DUMP's files.

A graph's nodes know the line of the model that made them (`meta["stack_trace"]`, in torch's form). Regions know their
nodes. Plans and programs know the sources of the kernels that they launch. So each kernel can be traced back.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch import fx

from fxfuse import build, dump, plans
from fxfuse.program import Program
from fxfuse.replacement import FusedRegion

NOT_CALLED: Final = "no kernel was chosen yet: call the model first"


@dataclass(frozen=True)
class ModelLine:
    """A line of the model's code."""

    file: str
    number: int
    text: str

    @classmethod
    def of(cls, node: fx.Node) -> ModelLine | None:
        """The line that made a node: the innermost that is not torch's own; None if the node has none."""
        trace = node.meta.get("stack_trace") or ""
        found = [cls(file, int(number), text.strip()) for file, number, text in _FRAME.findall(trace)]
        return next((line for line in reversed(found) if "/torch/" not in line.file), found[-1] if found else None)

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.number}"


_FRAME: Final = re.compile(r'File "([^"\n]*)", line (\d+), in [^\n]*\n([^\n]*)')
"""A frame as tracebacks write it."""


@dataclass(frozen=True)
class Listing:
    """A graph as it was captured, and as it was fused."""

    name: str
    """"the model", or the path of a part of it."""
    before: fx.Graph | None
    """None for a part that runs as Python."""
    after: fx.Graph
    regions: tuple[FusedRegion, ...]
    programs: tuple[Program, ...] = ()

    def nodes_of(self, name: str) -> tuple[str, ...]:
        """The captured nodes that a node of the fused graph stands for."""
        return next((region.nodes for region in self.regions if region.fused == name), (name,))

    @functools.cached_property
    def _captured(self) -> dict[str, fx.Node]:
        return {node.name: node for node in (self.before.nodes if self.before is not None else ())}

    @functools.cached_property
    def _statements(self) -> dict[str, tuple[int, str]]:
        return {} if self.before is None else statements(code_of(self.before))

    def torch_code(self, names: Iterable[str]) -> Iterator[str]:
        """C++ comments: the lines of the model that made these captured nodes, and the nodes as statements."""
        names = list(names)
        lines = [ModelLine.of(self._captured[name]) for name in names if name in self._captured]
        for line in dict.fromkeys(line for line in lines if line is not None):
            yield f"//   {line}: {line.text}" if line.text else f"//   {line}"
        found = [self._statements[name][1] for name in names if name in self._statements]
        if found:
            yield "// as captured:"
            yield from (f"//   {statement}" for statement in found)


def code_of(graph: fx.Graph) -> str:
    """A graph's code, which begins with its signature."""
    return graph.python_code("self").src.strip("\n") + "\n"


def statements(code: str) -> dict[str, tuple[int, str]]:
    """By the name of each node, the number of the line in a graph's code that makes it, and the statement there."""
    found: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(code.splitlines(), 1):
        match = _STATEMENT.match(line)
        if match:
            found.setdefault(match[1], (number, f"{match[1]} = {match[2]}"))
    return found


_STATEMENT: Final = re.compile(r"    (\w+)(?: *:[^=]*)? = (.*?)(?:;  \w.* = None)?$")
"""A node's line as fx writes it. Behind the statement, fx sets names to None that are no longer needed."""


# ---------------------------------------------------------------------------------------------- sources


def region_text(listing: Listing, region: FusedRegion, shown: set[build.Source]) -> str:
    """A region's kernels, each once, below the torch code that they compute.

    Args:
        shown: the sources that were shown above already; those of this region are added.
    """
    head = [f"// region {region.number}, {region.fused} in {listing.name}: {_kind(region)}: {region.epilogue}"]
    head += listing.torch_code(region.nodes)
    made = plans.of_region(region.number)
    reasons = [*plans.reasons_without_plan(region.number), *(plan.reason for plan in made if plan.reason)]
    head += [f"// runs as {kernel}" for kernel in dict.fromkeys(plan.kernel for plan in made if plan.kernel)]
    head += [f"// torch runs it: {reason}" for reason in dict.fromkeys(reasons)]
    if not made and not reasons:
        head.append(f"// {NOT_CALLED}")
    parts = ["\n".join(head)]
    for source in dict.fromkeys(source for plan in made for source in plan.sources):
        parts.append(_source_text(source, shown))
    return "\n\n".join(parts)


def _kind(region: FusedRegion) -> str:
    if region.library is not None:
        return f"a pass after {region.library}"
    return "a pointwise chain" if region.kind == "pointwise" else region.kind


def _source_text(source: build.Source, shown: set[build.Source]) -> str:
    where = "this CPU" if source.architecture is None else "sm_{}{}".format(*source.architecture)
    first = f"// {source.label}, for {where}"
    if source in shown:
        return f"{first}: as above"
    shown.add(source)
    return f"{first}\n{source.text.strip()}"


def program_text(listing: Listing, program: Program, shown: set[build.Source], of: FusedRegion | None = None) -> str:
    """The kernels that a program launches instead of several nodes, each below the torch code that it computes.

    Args:
        of: if given, only kernels that compute this region, alone or with others.
        shown: as in `region_text`. Sources in it are left out.
    """
    parts = []
    for number, (names, source) in enumerate(program.kernels):
        if source is None or source in shown or (of is not None and of.fused not in names):
            continue
        head = [f"// launch {number} of a program of {listing.name}: {', '.join(names)}"]
        head += listing.torch_code(inner for name in names for inner in listing.nodes_of(name))
        parts.append("\n".join([*head, _source_text(source, shown)]))
    return "\n\n".join(parts)


# ------------------------------------------------------------------------------------------------ files


def write_graphs(folder: str, listing: Listing) -> None:
    """Writes FXFUSE_DUMP's before.py and after.py, and its map as far as it is known."""
    about = f"# {listing.name}: the graph's code"
    if listing.before is not None:
        dump.write(f"{about} as it was captured\n{code_of(listing.before)}", folder, "before.py")
    dump.write(f"{about} with its regions fused\n{code_of(listing.after)}", folder, "after.py")
    write_map(folder, listing)


def write_map(folder: str, listing: Listing) -> None:
    """Writes FXFUSE_DUMP's map.txt: for each line of the model its nodes, their lines in both files, and what runs
    them."""
    if listing.before is None:
        return
    before, after = statements(code_of(listing.before)), statements(code_of(listing.after))
    owners = {name: region for region in listing.regions for name in region.nodes}
    launched: dict[str, dict[str, None]] = {}
    """By node of the fused graph, the files of the programs' kernels that compute the node."""
    for program in listing.programs:
        for names, source in program.kernels:
            if source is not None:
                for name in names:
                    launched.setdefault(name, {})[_file_of(source)] = None
    rows: dict[str, list[tuple[int, Sequence[object]]]] = {}
    for node in listing.before.nodes:
        if node.name not in before:
            continue
        line, region = ModelLine.of(node), owners.get(node.name)
        name = node.name if region is None else region.fused
        cells = (
            node.name, _line_in(before, node.name), _line_in(after, name),
            *(("", "") if region is None else (region.number, _kernels_of(region))), ", ".join(launched.get(name, ())),
        )  # fmt: skip
        file, number, text = ("", 0, "") if line is None else (line.file, line.number, line.text)
        rows.setdefault(file, []).append((number, (number or "", text, *cells)))
    headers = ("line", "the model's code", "node", "before.py", "after.py", "region", "runs as", "in a program")
    parts = []
    for file, found in rows.items():
        found.sort(key=lambda row: row[0])
        table = _columns(headers, [row for _, row in found])
        parts.append(f"{file or 'no line is known'}\n\n{table}\n")
    dump.write("\n".join(parts), folder, "map.txt")


def _columns(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table without rules, every column as wide as its widest cell."""
    texts = [list(headers), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    aligned = (map(str.ljust, row, widths) for row in texts)
    return "\n".join("  ".join(row).rstrip() for row in aligned)


def _file_of(source: build.Source) -> str:
    return f"{dump.KERNELS}/{build.file_of(source)}"


def _line_in(known: Mapping[str, tuple[int, str]], name: str) -> object:
    return known[name][0] + 1 if name in known else ""  # the file begins with a comment line


def _kernels_of(region: FusedRegion) -> str:
    """What runs a region, and the files of its kernels."""
    made = plans.of_region(region.number)
    ways = []
    for plan in made:
        files = ", ".join(map(_file_of, plan.sources))
        what = plan.kernel or f"torch: {plan.reason}"
        ways.append(f"{what} ({files})" if files else what)
    ways += [f"torch: {reason}" for reason in plans.reasons_without_plan(region.number)]
    return "; ".join(dict.fromkeys(ways)) or "not called yet"


def write_program(folder: str, number: int, program: Program) -> None:
    """Writes FXFUSE_DUMP's list of what a call launches, and the code of the call."""
    rows = []
    for place, (names, source) in enumerate(program.kernels):
        file = "" if source is None else _file_of(source)
        rows.append((place, ", ".join(names), file))
    table = _columns(("launch", "nodes of after.py", "kernel"), rows)
    calls = "\n".join(f"{count} {name}" for name, count in program.calls.most_common()) or "none"
    memory = f"{program.arena_size} bytes for results of kernels at once"
    text = f"{table}\n\ncalls of torch:\n{calls}\n\n{memory}\n\n{program.code}"
    dump.write(text, folder, f"program-{number}.txt")
