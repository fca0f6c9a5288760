"""Every code block of the documents runs as it stands, in order, in one namespace for each document.

A comment of HTML, which no reader sees, says what else a block needs:

    <!-- run: code -->          runs the code before the blocks that follow
    <!-- prints: code -->       the next block is what this code prints
    <!-- not run: reason -->    the next block is not run
    <!-- needs a GPU -->        the next block is not run without one
    <!-- needs torch 2.6 -->    nor the next block with an older torch
    <!-- in a shell -->         the next block is run by bash, in which `fxfuse` is the command of this checkout

The site that mkdocs makes of the documents has no warnings; pictures and reports are committed, small and whole.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import struct
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

import fxfuse

ROOT = Path(__file__).parent.parent
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
SLOW = {
    "README.md",
    "docs/command-line.md",
    "docs/deployment.md",
    "docs/index.md",
    "docs/llm.md",
    "docs/torch-compile.md",
}
"""They start processes, or wait for torch.compile or for a measurement."""
DOCUMENTS = [pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in ("README.md", *PAGES)]


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
        for mark in self.marks:
            if mark.startswith("needs torch ") and TorchVersion(torch.__version__) < mark.removeprefix("needs torch "):
                return mark
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
    if "in a shell" in block.marks:
        command = f'set -eu\nfxfuse() {{ "{sys.executable}" -m fxfuse "$@"; }}\n{block.code}'
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            ["bash", "-c", command],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": paths},
        )
        assert done.returncode == 0, f"{name}:{block.line}\n{done.stdout}{done.stderr}"
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
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "documentation"}
    for block in blocks_of((ROOT / document).read_text()):
        run(block, document, names)


# ------------------------------------------------------------------------------------------------------- the site


def test_every_public_name_is_on_the_api_page():
    page = (ROOT / "docs" / "api.md").read_text()
    documented = {line.rpartition(".")[2] for line in page.splitlines() if line.startswith(":::")}
    errors = {name for name in fxfuse.__all__ if name in vars(fxfuse.errors)}
    assert "::: fxfuse.errors" in page
    assert documented - {"errors"} == set(fxfuse.__all__) - errors


def test_the_site_is_built_without_warnings(tmp_path):
    for needed in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for page in PAGES:
        text = (tmp_path / "site" / Path(page).name).with_suffix(".html").read_text()
        assert not re.findall(r'(?:src|rel="stylesheet" href)="https?://', text), f"{page} asks another server"
    assert not list((tmp_path / "site").rglob("*.py"))


def links_of(document: Path) -> list[str]:
    """Where links and pictures of a document lead, those to other servers left out."""
    found = re.findall(r"\]\(([^)\s]+)\)", document.read_text())
    return [link for link in found if not link.startswith(("http://", "https://", "#"))]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", *PAGES])
def test_links_lead_to_files(name):
    document = ROOT / name
    missing = [link for link in links_of(document) if not (document.parent / link.partition("#")[0]).exists()]
    assert not missing


def test_every_page_is_in_the_navigation_and_the_readme_is_one_screen():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page for page in PAGES if f": {Path(page).name}\n" not in navigation] == []
    assert len((ROOT / "README.md").read_text().splitlines()) <= 60


# --------------------------------------------------------------------------------------------------- the pictures


def script(path):
    """The module of a script, which does not run."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def charts():
    return script("benchmarks/charts.py")


def test_the_picture_of_how_it_works_is_of_the_graphs_there_are(monkeypatch, tmp_path):
    pictures = script("docs/pictures.py")
    committed = pictures.PICTURE.read_text()
    monkeypatch.setattr(pictures, "PICTURE", tmp_path / "way.svg")
    monkeypatch.setattr(pictures, "DOCS", tmp_path / "docs")
    pictures.main()
    drawn = [re.findall(r"<text [^>]*>([^<]*)", text) for text in ((tmp_path / "way.svg").read_text(), committed)]
    assert drawn[0] == drawn[1] and "tanh(silu(acc) * 0.5)" in drawn[1]


def test_every_chart_is_committed_small_and_shown():
    pages = "".join((ROOT / page).read_text() for page in PAGES)
    for name in charts().CHARTS:
        picture = ROOT / "docs" / "images" / f"{name}.png"
        assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size < 150_000
        assert f"(images/{name}.png)" in pages


@pytest.mark.parametrize("name", ["gains", "drawn"])
def test_charts_are_drawn_from_results_and_name_the_machine(name, tmp_path):
    pytest.importorskip("matplotlib")
    source = charts().draw(name, tmp_path / "chart.png")
    header = (tmp_path / "chart.png").read_bytes()[:24]
    assert min(struct.unpack(">II", header[16:])) > 300, "pixels"
    assert "NVIDIA H200, torch 2.11.0+cu130, 2026-" in source and source.endswith(".json")


def test_speed_ups_are_of_the_faster_peer():
    times = {"eager": 6.0, "torch.compile": 3.0, "fxfuse": 2.0}
    assert charts().over_best_peer(times) == 1.5
    assert charts().over_best_peer({"eager": 6.0, "fxfuse": 2.0}) == 3.0
    assert charts().over_eager(times, "torch.compile") == 2.0


@pytest.mark.parametrize("name", ["resnet50", "llama", "untraced"])
def test_reports_are_whole_pages_without_requests(name):
    folder = ROOT / "docs" / "reports"
    text = (folder / f"{name}.html").read_text()
    assert text.startswith("<!DOCTYPE html>") and text.rstrip().endswith("</html>")
    assert not re.search(r"""(?:src|href)=["']https?://""", text)
    assert not re.search(r"(?<![\w.])/(?:home|root|tmp|usr|work)/", text), "a path of the machine that made it"
    for path in (folder / f"{name}.html", *folder.glob(f"{name}-*.png")):
        assert path.stat().st_size < 600_000


# ----------------------------------------------------------------------------------------------- the mechanism

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

<!-- needs torch 99.0 -->
```
torch.not_there_either()
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
        ("torch.not_there_either()", ("needs torch 99.0",)),
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
     ("<!-- prints: print(4) -->\n\n    5\n", AssertionError), ("<!-- in a shell -->\n\n    false\n", AssertionError)],
)  # fmt: skip
def test_blocks_that_do_not_run_are_found(document, error):
    (block,) = blocks_of(document)
    with pytest.raises(error):
        run(block, "document", {})
