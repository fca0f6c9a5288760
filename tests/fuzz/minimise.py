"""Smaller cases with the same kind of finding."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator

from . import drive
from .draw import Case

LIMIT_S = 10.0


def minimise(case: Case, finding: drive.Finding) -> tuple[Case, drive.Finding]:
    """Drops steps and lines, and simplifies steps, as long as a finding of the same kind remains."""
    end = time.monotonic() + LIMIT_S
    case = dataclasses.replace(case, steps=case.steps[: finding.step + 1])
    smaller = True
    while smaller and time.monotonic() < end:
        smaller = False
        for candidate in _smaller(case):
            try:
                found = drive.run(candidate)
            except Exception:  # a line that is gone was needed: no model at all
                continue
            if found is not None and found.kind == finding.kind:
                case, finding, smaller = candidate, found, True
                break
            if time.monotonic() > end:
                break
    return case, finding


def _smaller(case: Case) -> Iterator[Case]:
    for index in range(len(case.steps)):
        yield dataclasses.replace(case, steps=case.steps[:index] + case.steps[index + 1 :])
    for index, (*_, instead) in enumerate(case.lines):
        rest = case.lines[:index] + case.lines[index + 1 :]
        value = _result(case.lines[index])
        used = any(_uses(text, value) for _, _, text, _ in rest) or _uses(case.output, value)
        if not used:
            yield dataclasses.replace(case, lines=rest)
        elif instead:
            lines = [(a, b, _put(text, value, instead), _put(d, value, instead)) for a, b, text, d in rest]
            yield dataclasses.replace(case, lines=lines, output=_put(case.output, value, instead))
    if case.output != (simple := re.findall(r"v\d+", case.output)[:1] or ["x"])[0]:
        yield dataclasses.replace(case, output=simple[0])
    if case.argument:
        yield dataclasses.replace(case, argument=False)
    if case.lines and case.output == _result(case.lines[-1]):
        for line in case.lines[:-1]:
            yield dataclasses.replace(case, output=_result(line))
    for index, (what, batch, layout) in enumerate(case.steps):
        for simpler in ((what, 3, layout), (what, batch, "plain"), ("call", batch, layout)):
            if simpler != (what, batch, layout):
                yield dataclasses.replace(case, steps=[*case.steps[:index], simpler, *case.steps[index + 1 :]])


def _result(line: tuple[str, str, str, str]) -> str:
    return re.findall(r"(?:^|\n)\s*(v\d+) =", line[2])[0]


def _uses(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None


def _put(text: str, name: str, instead: str) -> str:
    return re.sub(rf"\b{name}\b", instead, text)
