"""fxfuse.source() and FXFUSE_DUMP: what runs, with the torch code that it came from."""

import gc
import logging
import os
import re
import stat
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import Net, conv, linear, randn
from torch import nn

import fxfuse
from fxfuse import build, dump, listing
from fxfuse.cuda import tune


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear()

    def forward(self, x):
        x = self.fc(x)
        return x * torch.sigmoid(x)  # swish


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), linear()

    def forward(self, x):
        x = self.block(x)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return self.head(x).relu()


def line_of(text):
    """Where this file has a text first."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


SWISH, NORM = "x * torch.sigmoid(x)", "x = x * torch.rsqrt("


def used(model=None, calls=4):
    fast = fxfuse.optimize(model or Model().eval())
    with torch.no_grad():
        for _ in range(calls):
            fast(randn(3, 8))
    return fast


def number_of(fast, name):
    """A region's number, as the graph's code tells it."""
    return int(re.search(rf"{name} = .*region = (\d+)", fast.code)[1])


def test_a_regions_source_stands_below_the_torch_code_that_it_computes():
    fast = used()
    number = number_of(fast, "block_fc_fused")
    text = fxfuse.source(fast, number)
    assert f"// region {number}, block_fc_fused in the model: linear: silu(acc)" in text
    assert f"//   test_source.py:{line_of(SWISH)}: return {SWISH}  # swish" in text
    assert "//   sigmoid = torch.sigmoid(block_fc)" in text
    assert "// runs as linear by torch + one pass" in text
    assert "acc * sigmoid(acc)" in text and 'extern "C" int fxfuse_launch' in text
    assert "relu" not in text, "the other region is not asked for"


def test_comments_stand_before_the_code_that_they_are_about():
    text = fxfuse.source(used())
    comment, code = text.index(f"test_source.py:{line_of(SWISH)}"), text.index("acc * sigmoid(acc)")
    assert comment < code < text.index("maximum(acc, 0.0f)")


def test_kernels_of_programs_tell_all_that_they_compute():
    fast = used()
    text = fxfuse.source(fast)
    (merged,) = [part for part in text.split("\n\n\n") if part.startswith("// launch ")]
    assert "square, mean, " in merged.splitlines()[0]
    assert f"test_source.py:{line_of(NORM)}" in merged and "//   square = mul.square()" in merged
    assert "struct Body" in merged
    chain = next(region for region in fxfuse.explain(fast).regions if region.chain)
    number = number_of(fast, chain.node)
    assert merged.strip() in fxfuse.source(fast, number), "it has a part in it"
    assert "// launch" not in fxfuse.source(fast, number_of(fast, "head_fused"))


def test_each_source_stands_once():
    model = nn.Sequential(*(layer for _ in range(3) for layer in (linear(), nn.ReLU()))).eval()
    text = fxfuse.source(used(model))
    assert text.count("// region ") == 3
    assert text.count("maximum(acc, 0.0f)") == 1 and text.count(": as above") == 2


def test_before_any_call_there_is_none_and_the_text_says_so():
    text = fxfuse.source(fxfuse.optimize(Model().eval()))
    assert text.count(listing.NOT_CALLED) == 3 and "#include" not in text


def test_what_torch_runs_has_its_reason():
    fast = fxfuse.optimize(Model().eval().double())
    with torch.no_grad():
        fast(randn(3, 8).double())
    assert "// torch runs it: kernels have float32, float16 and bfloat16" in fxfuse.source(fast)


def test_parts_of_what_runs_as_python_say_where_they_are():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Model()

        def forward(self, x):
            return self.inner(x) if x.sum() < 1e9 else x

    assert "block_fc_fused in 'inner'" in fxfuse.source(used(Outer().eval(), calls=1))


def test_dynamos_graphs_have_lines_too():
    torch.compiler.reset()
    before = set(fxfuse.compiled_graphs())
    model = torch.compile(Model().eval(), backend="fxfuse")
    with torch.no_grad():
        model(randn(3, 8))
    (graph,) = set(fxfuse.compiled_graphs()) - before
    assert f"test_source.py:{line_of(SWISH)}: return {SWISH}" in fxfuse.source(graph)


def test_training_has_its_graphs():
    fast = fxfuse.optimize(Model())
    for _ in range(4):
        fast(randn(3, 8)).sum().backward()
    reasons = [line for line in fxfuse.explain(fast).training if "this version of torch" in line]
    if reasons:
        pytest.skip(reasons[0])
    assert len(re.findall(r"^// region ", fxfuse.source(fast), re.MULTILINE)) > 3


def test_numbers_that_no_region_has_are_refused():
    fast = used(calls=1)
    with pytest.raises(fxfuse.FxfuseError, match=r"no region 987654 in this model; its regions are: \d+, \d+, \d+"):
        fxfuse.source(fast, 987654)
    with pytest.raises(fxfuse.FxfuseError, match=r"this Model has no kernels: source takes what fxfuse.optimize"):
        fxfuse.source(Model())


# ------------------------------------------------------------------------------------------------ FXFUSE_DUMP


@pytest.fixture
def dumped(tmp_path, monkeypatch, forget):
    """A function that returns the folder of this process."""
    monkeypatch.setenv("FXFUSE_DUMP", str(tmp_path / "a" / "dump"))
    dump._folder.cache_clear()
    yield lambda: next((tmp_path / "a" / "dump").iterdir())
    dump._folder.cache_clear()
    dump._rewriting.clear()


def folder_of(run, name):
    (found,) = run.glob(f"*-{name}")
    return found


def test_without_the_variable_nothing_is_written(tmp_path, monkeypatch, forget):
    monkeypatch.delenv("FXFUSE_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    used()
    assert not list(tmp_path.iterdir()) and not dump._rewriting


def test_everything_that_is_built_is_written(dumped):
    fast = used()
    run = dumped()
    folder = folder_of(run, "Model")
    assert sorted(path.name for path in folder.iterdir()) == ["after.py", "before.py", "map.txt", "program-1.txt"]
    assert "sigmoid = torch.sigmoid(block_fc)" in (folder / "before.py").read_text()
    assert "region = " in (folder / "after.py").read_text()
    kernels = {path.name: path.read_text() for path in (run / "kernels").iterdir()}
    (swish,) = [text for name, text in kernels.items() if name.startswith("linear-silu-acc-") and name.endswith(".cpp")]
    shown = fxfuse.source(fast, number_of(fast, "block_fc_fused"))
    assert "// compiled with -O3" in swish
    assert swish[swish.index("#include") :].strip() in shown, "as compiled"


def table_of(text):
    """Rows of a map by the names of their columns, which stand where the header has them."""
    lines = text.splitlines()
    header = next(line for line in lines if line.startswith("line "))
    begins = [match.start() for match in re.finditer(r"(?:^|(?<=  ))\S", header)]
    spans = list(zip(begins, [*begins[1:], None], strict=True))

    def cells(line):
        return [line[slice(*span)].strip() for span in spans]

    return [dict(zip(cells(header), cells(line), strict=True)) for line in lines if re.match(r"\d", line)]


def test_the_map_leads_from_the_models_lines_to_kernels_and_back(dumped):
    used()
    run = dumped()
    folder = folder_of(run, "Model")
    text = (folder / "map.txt").read_text()
    assert text.startswith(__file__)
    rows = table_of(text)
    model = Path(__file__).read_text().splitlines()
    assert [int(row["line"]) for row in rows] == sorted(int(row["line"]) for row in rows)
    assert all(row["the model's code"] == model[int(row["line"]) - 1].strip() for row in rows)
    by_node = {row["node"]: row for row in rows}
    swish, square = by_node["sigmoid"], by_node["square"]
    for name, begin in (("before.py", "    sigmoid = "), ("after.py", "    block_fc_fused = ")):
        assert (folder / name).read_text().splitlines()[int(swish[name]) - 1].startswith(begin)
    assert re.fullmatch(r"linear by torch \+ one pass \(kernels/linear-silu-acc-\w+\.cpp\)", swish["runs as"])
    assert square["region"] == "" and re.fullmatch(r"kernels/loops-\w+\.cpp", square["in a program"])
    named = re.findall(r"kernels/[^\s,)]+", text)
    assert named and all((run / name).is_file() for name in named)


def test_a_program_lists_its_launches(dumped):
    used()
    text = (folder_of(dumped(), "Model") / "program-1.txt").read_text()
    assert re.search(r"^0 +block_fc_fused, square, mean, \w+ +kernels/loops-\w+\.cpp$", text, re.MULTILINE)
    assert re.search(r"^1 +\w+ +kernels/\w+-[\w-]+\.cpp$", text, re.MULTILINE)
    assert "2 addmm" in text and "def program(given, t):" in text


def test_its_folder_is_private_and_said_aloud(dumped, caplog):
    old = os.umask(0)
    try:
        with caplog.at_level(logging.WARNING, logger="fxfuse"):
            used(calls=1)
    finally:
        os.umask(old)
    run = dumped()
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert re.fullmatch(r"run-\d{8}-\d{6}-\w+", run.name)
    assert [record.getMessage() for record in caplog.records if str(run) in record.getMessage()]


def test_models_die_while_their_files_stay(dumped):
    fast = used()
    alive = weakref.ref(fast)
    del fast
    gc.collect()
    assert alive() is None and not dump._rewriting
    assert folder_of(dumped(), "Model").exists()


def test_a_folder_that_cannot_be_made_stops_nobody(monkeypatch, tmp_path, caplog, forget):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FXFUSE_DUMP", str(tmp_path / "file"))
    model = Net(lambda m, x: m.c(x).relu(), c=conv()).eval()
    fast = fxfuse.optimize(model)
    with torch.no_grad():
        torch.testing.assert_close(fast(randn(2, 4, 6, 6)), model(randn(2, 4, 6, 6)))
    said = [record.getMessage() for record in caplog.records if "FXFUSE_DUMP" in record.getMessage()]
    assert len(said) == 1 and "is not written" in said[0]


def test_a_candidates_plan_knows_what_it_launches(monkeypatch):
    """Of several that are compiled, the one that is chosen."""
    sources = {name: build.Source(f"// {name}") for name in ("first", "second")}
    problem = SimpleNamespace(label="a problem")
    monkeypatch.setattr(build, "_load_cached", lambda key, source: lambda *args: None)

    def candidate(name):
        def compiled():
            launch = build.load(sources[name])
            return lambda x, weight, bias, operands: launch()

        return tune.Candidate(name, name, compiled)

    candidates = [candidate(name) for name in sources]
    monkeypatch.setattr(tune, "enabled", lambda: False)
    assert tune.draft(problem, candidates)().sources == (sources["first"],)
    monkeypatch.setattr(tune, "enabled", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tune, "_contestants", list)
    monkeypatch.setattr(tune, "_recall", lambda problem: None)
    monkeypatch.setattr(tune, "_measure", lambda problem, ready: {"first": 2.0, "second": 1.0})
    monkeypatch.setattr(tune, "_errors", lambda problem, ready: {})
    monkeypatch.setattr(tune, "_remember", lambda problem, choice: None)
    assert tune.draft(problem, candidates)().sources == (sources["second"],)
