"""Every code block of the documents runs as it stands, in order, in one namespace for each document.

A comment of HTML, which no reader sees, says what else a block needs:

    <!-- run: code -->          runs the code before the blocks that follow
    <!-- prints: code -->       the next block is what this code prints
    <!-- not run: reason -->    the next block is not run
    <!-- needs a GPU -->        the next block is not run without one
"""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCUMENTS = (pytest.param("README.md", marks=pytest.mark.slow), "docs/layers.md")  # torch.compile takes a while


@dataclass(frozen=True)
class Block:
    """A code block, or the code of a comment."""

    line: int
    """Of its first line, from 1."""
    code: str
    marks: tuple[str, ...] = ()
    """Comments that stand before it since the last block."""
    hidden: bool = False

    @property
    def reason_not_to_run(self) -> str | None:
        if any(mark == "needs a GPU" for mark in self.marks) and not torch.cuda.is_available():
            return "needs a GPU"
        return next((mark for mark in self.marks if mark.startswith("not run:")), None)

    @property
    def printed_by(self) -> str | None:
        """The code whose output the block is."""
        found = (mark.partition(":")[2] for mark in self.marks if mark.startswith("prints:"))
        return next((textwrap.dedent(code).strip() for code in found), None)


_COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)
_FENCED = re.compile(r"^(`{3,}|~{3,})[^\n]*\n(.*?)^\1[ ]*$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?: {4}[^\n]*(?:\n|\Z)|\n(?= *\n* {4}))+)")


def blocks_of(text: str) -> list[Block]:
    """The code of a document in Markdown: fenced or indented blocks, and of comments that run some."""
    found = [(match.start(), "comment", match[1]) for match in _COMMENT.finditer(text)]
    found += [(match.start(2), "block", match[2]) for match in _FENCED.finditer(text)]
    spans = [match.span() for pattern in (_COMMENT, _FENCED) for match in pattern.finditer(text)]
    for match in _INDENTED.finditer(text):
        if not any(begin <= match.start() < end for begin, end in spans):
            found.append((match.start(), "block", textwrap.dedent(match[1])))
    blocks: list[Block] = []
    marks: list[str] = []
    for start, kind, content in sorted(found):
        line = text.count("\n", 0, start) + 1
        mark = content.strip()
        if kind == "comment" and mark.startswith("run:"):
            before = content.index("run:") + len("run:")
            code = textwrap.dedent(content[before:].lstrip(" "))
            blocks.append(Block(line, code, hidden=True))
        elif kind == "comment":
            marks.append(mark)
        else:
            blocks.append(Block(line, content, tuple(marks)))
            marks.clear()
    return blocks


def run(block: Block, name: str, names: dict[str, object]) -> None:
    """Runs a block, whose lines have their numbers in tracebacks."""
    if block.reason_not_to_run is not None:
        return
    code = block.printed_by or block.code
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * (block.line - 1) + code, name, "exec"), names)
    if block.printed_by is not None:
        assert printed.getvalue().strip() == block.code.strip(), f"{name}:{block.line}"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of torch's own
@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_runs_as_it_stands(document, own_operations, monkeypatch, tmp_path):
    if "transformers" in (ROOT / document).read_text():
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()
    names: dict[str, object] = {"__name__": "documentation"}
    for block in blocks_of((ROOT / document).read_text()):
        run(block, document, names)


DOCUMENT = """\
Words.

<!-- run:
x = 1
-->

    y = x + 1

    assert y == 2

More words:
    which is no block, but the paragraph's second line.

<!-- not run: it installs packages -->

    pip install everything

```python
z = y + 1
```

<!-- prints: print(z) -->

    3

<!-- needs a GPU -->
```
torch.cuda.not_there()
```
"""


def test_blocks_are_found_with_what_is_said_of_them():
    blocks = blocks_of(DOCUMENT)
    assert [(block.code.strip(), block.marks) for block in blocks if not block.hidden] == [
        ("y = x + 1\n\nassert y == 2", ()),
        ("pip install everything", ("not run: it installs packages",)),
        ("z = y + 1", ()),
        ("3", ("prints: print(z)",)),
        ("torch.cuda.not_there()", ("needs a GPU",)),
    ]
    lines = DOCUMENT.splitlines()
    assert all(block.code.splitlines()[0].strip() in lines[block.line - 1] for block in blocks if not block.hidden)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a block says that it needs a GPU")
def test_blocks_run_in_order_in_one_namespace():
    names: dict[str, object] = {}
    for block in blocks_of(DOCUMENT):
        run(block, "document", names)
    assert names["z"] == 3


@pytest.mark.parametrize(
    ("document", "error"),
    [("    pip install it\n", SyntaxError), ("    unknown + 1\n", NameError),
     ("<!-- prints: print(4) -->\n\n    5\n", AssertionError)],
)  # fmt: skip
def test_blocks_that_do_not_run_are_found(document, error):
    (block,) = blocks_of(document)
    with pytest.raises(error):
        run(block, "document", {})
