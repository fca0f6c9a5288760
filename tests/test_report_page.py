"""The page that a report writes: valid, whole, without requests; what is measured for it; where graphs are drawn."""

import itertools
import json
import random
import re
import shutil
import struct
import subprocess
import zlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import CAPABILITY, Net, conv, linear, parsed_html, randn
from torch import nn
from torch._C._autograd import DeviceType

import fxfuse
from fxfuse import plans
from fxfuse.module import state_of
from fxfuse.program.values import Step
from fxfuse.report.layered import GAP, layout_of
from fxfuse.report.measure import Span, kernel_name, spans_of
from fxfuse.report.work import work_of


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x):
        hidden = F.silu(self.a(x)) * 0.5  # </script> & <b>
        x = self.norm(x + self.b(hidden))
        return torch.softmax(x, -1).reshape(-1, 2, 4).transpose(1, 2) * 3 + 1


class Asks(nn.Module):
    """A question about values, which no trace can answer."""

    def __init__(self):
        super().__init__()
        self.fc = linear()

    def forward(self, x):
        return torch.relu(self.fc(x)) if float(x.sum()) > 1e9 else torch.tanh(self.fc(x))


def partly_traced():
    return Net(lambda m, x: torch.relu(m.c(m.asks(torch.sigmoid(m.a(x))))), a=linear(), asks=Asks(), c=linear()).eval()


def called(model, *inputs, times=4):
    fast = fxfuse.optimize(model.eval())
    with torch.no_grad():
        for _ in range(times):
            fast(*inputs)
    return fast


def page_of(fast, path, *inputs):
    """The text of a model's page, what its elements are, and the data that it draws."""
    fxfuse.explain(fast).to_html(path / "page.html", *inputs)
    text = (path / "page.html").read_text(encoding="utf-8")
    return text, parsed_html(text), json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


MODELS = {
    "perceptron": (Mlp, (randn(4, 8),)),
    "convolution": (lambda: Net(lambda m, x: F.max_pool2d(F.relu(m.c(x)), 2), c=conv()), (randn(2, 4, 10, 10),)),
    "partly traced": (partly_traced, (randn(2, 8),)),
    "nothing fused": (lambda: Net(lambda m, x: x.sum()), (randn(2, 8),)),
    "Python alone": (Asks, (randn(2, 8),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_region_and_node_is_on_a_page_that_loads_nothing(name, tmp_path):
    make, inputs = MODELS[name]
    fast = called(make(), *inputs)
    text, html, data = page_of(fast, tmp_path)
    report = fxfuse.explain(fast)
    assert [region["number"] for region in data["regions"]] == [region.number for region in report.regions]
    assert {("tr", "data-region", str(region.number)) for region in report.regions} <= set(html.attributes)
    for (_, module), graph in zip(report.graphs, data["graphs"], strict=True):
        captured = state_of(module).captured.graph
        drawn = [{node["name"] for node in graph[side]["nodes"]} for side in ("before", "after")]
        if captured is None:
            assert drawn == [{"python"}, {"python"}]
            continue
        for nodes, have in zip((captured.nodes, module._graph.nodes), drawn, strict=True):
            assert have == {node.name for node in nodes if node.op != "get_attr"}
        numbers = {region.number for region in state_of(module).regions}
        for side in ("before", "after"):
            assert {node["region"] for node in graph[side]["nodes"]} - {None} == numbers
    assert not loads(text, html)


def loads(text, html):
    """What a browser would fetch."""
    links = [value for tag, name, value in html.attributes if name in ("src", "href", "action", "srcset", "poster")]
    outside = [link for link in links if not link.startswith(("#", "data:"))]
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    script = re.search(r"<script>(.*)</script>", text, re.DOTALL)[1]
    asked = re.findall(r"fetch\(|XMLHttpRequest|import\(|\.src\b", script)
    return outside + re.findall(r"url\(|@import", style) + asked


def test_a_node_says_where_it_comes_from_and_what_it_is_like(tmp_path):
    _, _, data = page_of(called(Mlp(), randn(4, 8)), tmp_path)
    (graph,) = data["graphs"]
    (node,) = [node for node in graph["before"]["nodes"] if node["name"] == "silu"]
    details = dict(node["details"])
    assert (details["shape"], details["dtype"], details["layout"]) == ("4×16", "float32", "contiguous")
    assert details["source"].startswith(f"{__file__}:") and details["source"].endswith(" in forward")
    assert details["line"] == "hidden = F.silu(self.a(x)) * 0.5  # </script> & <b>"
    assert details["expression"] == "silu(acc) * 0.5"
    (transposed,) = [node for node in graph["before"]["nodes"] if node["name"] == "transpose"]
    assert dict(transposed["details"])["layout"] == "strides (8, 1, 4)"
    (fused,) = [node for node in graph["after"]["nodes"] if node["name"] == "a_fused"]
    assert fused["kind"] == "linear" and dict(fused["details"])["replaces"] == "a, silu, mul"
    read = [value for key, value in fused["details"] if key == "reads"]
    assert read == ["a.weight 16×8 float32", "a.bias 16 float32"]


def test_a_child_with_a_graph_of_its_own_is_named(tmp_path):
    _, _, data = page_of(called(partly_traced(), randn(2, 8)), tmp_path)
    (node,) = [node for node in data["graphs"][0]["after"]["nodes"] if node["kind"] == "graph"]
    assert dict(node["details"])["has a graph of its own"] == "asks"
    assert [graph["name"] for graph in data["graphs"]] == ["", "asks"]


def test_inputs_say_what_values_are_like_where_no_program_does(tmp_path):
    _, _, data = page_of(called(partly_traced(), randn(2, 8)), tmp_path, randn(3, 8))
    shapes = {node["name"]: dict(node["details"]).get("shape") for node in data["graphs"][0]["before"]["nodes"]}
    assert set(shapes.values()) == {"3×8"}


def test_graphs_of_training_steps_are_there(tmp_path):
    model = Net(lambda m, x: torch.relu(m.b(torch.relu(m.a(x)))), a=linear(), b=linear())
    fast = fxfuse.optimize(model)
    for _ in range(4):
        fast(randn(4, 8)).sum().backward()
    if state_of(fast).training.reason is not None:
        pytest.skip(f"no training steps: {state_of(fast).training.reason}")
    _, _, data = page_of(fast, tmp_path)
    assert [graph["name"] for graph in data["graphs"]] == ["", "in training, forward", "in training, backward"]


def test_without_inputs_nothing_is_timed_and_there_are_no_roofs(tmp_path):
    fast = called(Mlp(), randn(4, 8))
    text, _, data = page_of(fast, tmp_path)
    (track,) = data["tracks"]
    (program,) = state_of(fast).programs.programs
    assert not track["timed"] and [span[2] for span in track["spans"]] == [step.what for step in program.steps]
    assert data["roofs"] is None and "nothing was timed" in text
    assert all(region["point"] is None for region in data["regions"])


def test_with_inputs_eager_and_fused_calls_are_timed(tmp_path):
    model, x = Mlp().eval(), randn(4, 8)
    fast, before = fxfuse.optimize(model), x.clone()
    text, _, data = page_of(fast, tmp_path, (x,))
    eager, fused = data["tracks"]
    assert (eager["name"], fused["name"]) == ("eager", "fxfuse") and eager["timed"] and fused["timed"]
    assert {"aten::linear", "aten::silu", "aten::softmax"} <= {span[2] for span in eager["spans"]}
    (program,) = state_of(fast).programs.programs
    ours = [span for span in fused["spans"] if span[5]]
    assert len(ours) == program.launches and not any(span[5] for span in eager["spans"])
    assert ["a_fused"] in [span[4] for span in ours]
    assert all(sum(span[1] for span in track["spans"]) > 0 for track in data["tracks"])  # torch 2.3 counts whole us
    assert all(region["point"]["speed"] > 0 for region in data["regions"])
    assert data["roofs"]["bandwidth"] > 0 and [dtype for dtype, _ in data["roofs"]["speeds"]] == ["float32"]
    assert "eager → fxfuse" in text and torch.equal(x, before)


@pytest.mark.gpu
@pytest.mark.skipif(CAPABILITY < (8, 0), reason="needs an sm_80 GPU")
def test_on_a_gpu_kernels_are_timed_and_name_their_nodes(tmp_path):
    fast = fxfuse.optimize(Mlp().eval().cuda())
    _, _, data = page_of(fast, tmp_path, (randn(64, 8).cuda(),))
    eager, fused = data["tracks"]
    nodes = {name for span in fused["spans"] for name in span[4]}
    assert {"a_fused", "b_fused"} <= nodes and any(span[5] for span in fused["spans"])
    assert eager["spans"] and not any(span[2].startswith(("aten::", "fxfuse step")) for span in fused["spans"])
    assert all(region["point"] for region in data["regions"]) and data["roofs"]["bandwidth"] > 1e11


def test_measuring_leaves_the_model_as_it_was(tmp_path):
    class Counts(Mlp):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    model = Counts().eval()
    fast = fxfuse.optimize(model)
    fxfuse.explain(fast).to_html(tmp_path / "page.html", inputs=randn(4, 8))
    assert model.calls == 0 and fast.calls == 0


def test_inputs_of_another_kind_are_refused(tmp_path):
    with pytest.raises(fxfuse.FxfuseError, match="inputs is a int"):
        fxfuse.explain(fxfuse.optimize(Mlp())).to_html(tmp_path / "page.html", 3)
    assert not (tmp_path / "page.html").exists()


def test_a_compiled_model_has_a_page(tmp_path):
    torch.compiler.reset()
    compiled = torch.compile(Mlp().eval(), backend="fxfuse")
    with torch.no_grad():
        compiled(randn(4, 8))
    text, _, data = page_of(compiled, tmp_path, (randn(4, 8),))
    assert "<title>fxfuse: Mlp</title>" in text
    names = [node["name"] for graph in data["graphs"] for node in graph["before"]["nodes"]]
    assert not any("parameters" in name for name in names), "they are read, and no nodes"
    assert [track["name"] for track in data["tracks"]] == ["eager", "fxfuse"]
    torch.compiler.reset()


# ----------------------------------------------------------------------------------------- what regions have to do


def works(fast):
    return [
        [work_of(problem, plan) for problem, plan in plans.problems_of(region.number).items()]
        for region in fxfuse.explain(fast).regions
    ]


def test_the_work_of_a_linear():
    fast = called(Net(lambda m, x: torch.relu(m.fc(x)) * 2, fc=linear(16)), randn(4, 8))
    ((work,),) = works(fast)
    rows, inner, columns = 4, 8, 16
    result = rows * columns
    assert work.flops == 2 * rows * inner * columns + 2 * result, "a product, relu and a multiplication"
    assert work.nbytes == 4 * (rows * inner + inner * columns + columns + result)
    # eager writes and reads two results more; here torch's product lies in memory, and is read by the pass
    assert work.saved == 4 * (4 * result) - 4 * (2 * result)
    assert (work.shape, work.dtype) == ((rows, columns), torch.float32)


def test_the_work_of_a_chain_and_of_what_torch_runs():
    chain = called(Net(lambda m, x: torch.relu(x) * 2 + 1), randn(4, 8))
    ((work,),) = works(chain)
    assert (work.flops, work.nbytes, work.saved) == (3 * 32, 2 * 128, 4 * 128)
    unsupported = called(Net(lambda m, x: torch.relu(x) * 2 + 1), randn(4, 8, dtype=torch.float64))
    ((work,),) = works(unsupported)
    assert work.saved == 0, "torch runs it, operation by operation"


def test_the_work_of_a_convolution():
    fast = called(Net(lambda m, x: torch.relu(m.c(x)), c=conv()), randn(2, 4, 10, 10))
    ((work,),) = works(fast)
    assert work.flops == 2 * (2 * 8 * 8 * 8) * (4 * 9) + 2 * 8 * 8 * 8


# ------------------------------------------------------------------------------------------------- profiler's events


def event(name, start, end, kind=DeviceType.CPU):
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=kind)


STEPS = [("", Step(True, ("a", "b"), "one pass")), ("inner", Step(False, ("c",), "mm"))]


def test_operators_are_the_outermost_and_steps_have_their_names():
    events = [
        event("aten::addmm", 12, 18),
        event("Torch-Compiled Region: 0/0", 0, 40),
        event("aten::linear", 10, 20),
        event("fxfuse step 1", 20, 30),
        event("aten::mm", 21, 29),
        event("fxfuse step 0", 30, 34),
    ]
    assert spans_of(events, STEPS, on_gpu=False) == (
        Span("aten::linear", 0, pytest.approx(10e-6)),
        Span("mm", pytest.approx(10e-6), pytest.approx(10e-6), "inner", ("c",)),
        Span("one pass", pytest.approx(20e-6), pytest.approx(4e-6), "", ("a", "b"), True),
    )


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("aten::convolution", "aten::convolution"),
        ("sm80_xmma_gemm_f32f32_tilesize32x32x8_cublas", "sm80_xmma_gemm_f32f32_tilesize32x32x8_cublas"),
        ("void cudnn::bn_fw_inf_kernel_NCHW<float, float, true, 1>(float, float)", "cudnn::bn_fw_inf_kernel_NCHW"),
        (
            "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<"
            "float, float, float, at::native::binary_internal::MulFunctor<float> > >(at::TensorIteratorBase&)>(int)",
            "elementwise_kernel: MulFunctor",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::launch_clamp_scalar("
            "at::TensorIteratorBase&, c10::Scalar)::{lambda()#1}, std::array<char*, 2ul> >(int)",
            "vectorized_elementwise_kernel: launch_clamp_scalar",
        ),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, 5, false>(float*)", "softmax_warp_forward"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
    ],
)
def test_kernels_have_names_for_people(name, shown):
    assert kernel_name(name) == shown


def test_kernels_on_a_gpu_are_those_of_the_step_around_them():
    cuda = DeviceType.CUDA
    events = [
        event("aten::mm", 0, 90),
        event("fxfuse step 0", 100, 110, cuda),
        event("pointwise<float>", 101, 108, cuda),
        event("fxfuse step 1", 111, 121, cuda),
        event("sm90_gemm", 112, 116, cuda),
        event("reduce", 117, 120, cuda),
        event("Memcpy DtoD", 130, 131, cuda),
    ]
    spans = spans_of(events, STEPS, on_gpu=True)
    assert [(span.name, span.nodes, span.ours) for span in spans] == [
        ("one pass", ("a", "b"), True),
        ("sm90_gemm", ("c",), False),
        ("reduce", ("c",), False),
        ("Memcpy DtoD", (), False),
    ]
    assert spans[0].start == 0 and spans[1].start == pytest.approx(11e-6)


# ------------------------------------------------------------------------------------------------------- the layout


def random_graph(count, seed):
    """Mostly a chain, with shortcuts of any length."""
    drawn = random.Random(seed)
    widths = {f"n{number}": drawn.uniform(30, 200) for number in range(count)}
    edges = {(f"n{drawn.randrange(max(0, last - 4), last)}", f"n{last}") for last in range(1, count)}
    edges |= {tuple(f"n{number}" for number in sorted(drawn.sample(range(count), 2))) for _ in range(count // 4)}
    return widths, sorted(edges, key=lambda edge: int(edge[1][1:]))


@pytest.mark.parametrize("count", [1, 2, 50, 1000])
def test_nodes_do_not_overlap_and_edges_go_down(count):
    widths, edges = random_graph(count, seed=count)
    layout = layout_of(widths, edges)
    layers = {}
    for name, (x, y) in layout.centres.items():
        left, right = x - widths[name] / 2, x + widths[name] / 2
        assert left >= -0.01 and right <= layout.width + 0.01 and 0 < y < layout.height
        layers.setdefault(y, []).append((left, right))
    for row in layers.values():
        row.sort()
        assert all(right[0] - left[1] >= GAP - 0.01 for left, right in itertools.pairwise(row))
    for (first, last), route in zip(edges, layout.routes, strict=True):
        assert route[0] == layout.centres[first] and route[-1] == layout.centres[last]
        assert all(above[1] < below[1] for above, below in itertools.pairwise(route))


def test_a_straight_chain_is_drawn_straight():
    widths = {f"n{number}": 50.0 for number in range(30)}
    layout = layout_of(widths, [(f"n{number}", f"n{number + 1}") for number in range(29)])
    assert len({x for x, _ in layout.centres.values()}) == 1


def test_an_empty_graph_has_a_layout():
    assert layout_of({}, []).centres == {}


# ---------------------------------------------------------------------------------------------------- in a browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "headless_shell")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: Debian's package is 'chromium'")
LIGHT, DARK = 1, 0


def browse(path, *options, scheme=LIGHT, fragment=""):
    """What headless Chromium prints of a page, with no network."""
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=900,620",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--blink-settings=preferredColorScheme={scheme}",
        "--virtual-time-budget=4000", f"--user-data-dir={path.parent / 'profile'}", *options,
        f"{path.as_uri()}{fragment}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    fxfuse.explain(fxfuse.optimize(Mlp().eval())).to_html(path, randn(4, 8))
    return path


def classes(dom, name):
    """How many elements of a drawn page have a class."""
    return sum(name in (value or "").split() for _, key, value in parsed_html(dom).attributes if key == "class")


@needs_browser
def test_a_browser_draws_graph_timeline_and_roofline(page):
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])
    dom = browse(page, "--dump-dom")
    (graph,) = data["graphs"]
    sides = [graph["before"], graph["after"]]
    assert classes(dom, "node") == sum(len(side["nodes"]) for side in sides)
    assert classes(dom, "link") == sum(len(side["edges"]) for side in sides)
    assert classes(dom, "span") == sum(len(track["spans"]) for track in data["tracks"])
    assert classes(dom, "point") == len(data["regions"]) == 3
    assert classes(dom, "roofline") == 2


@needs_browser
def test_a_browser_finds_and_shows_nodes(page):
    found = browse(page, "--dump-dom", fragment="#search=silu")
    assert classes(found, "found") > 2 and " found</output>" in found
    chosen = browse(page, "--dump-dom", fragment="#node=/a_fused")
    assert classes(chosen, "chosen") >= 1
    assert classes(chosen, "same") == 4, "the region, and the three nodes that it replaces"
    assert '<dd class="code">a, silu, mul</dd>' in chosen


@needs_browser
def test_what_is_drawn_is_light_or_dark(page, tmp_path):
    pixels = {}
    for scheme in (LIGHT, DARK):
        picture = tmp_path / f"{scheme}.png"
        browse(page, f"--screenshot={picture}", scheme=scheme)
        pixels[scheme] = pixels_of(picture.read_bytes())
    light, dark = (rows[500][5][:3] for rows in (pixels[LIGHT], pixels[DARK]))
    assert light == (0xF6, 0xF7, 0xF9) and dark == (0x12, 0x15, 0x1A), "the page beside the graph"
    for scheme, stroke in ((LIGHT, (0x25, 0x63, 0xC9)), (DARK, (0x79, 0xA8, 0xFF))):
        inside = [pixel[:3] for row in pixels[scheme][300:] for pixel in row[40:800]]
        assert inside.count(stroke) > 100, "regions have the colour of their kind"


def pixels_of(png):
    """The rows of pixels of a PNG with 8 bits for each of 3 or 4 channels, as W3C's recommendation has it."""
    at, compressed = 8, b""
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        body = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, _, depth, colour = struct.unpack(">IIBB", body[:10])
        compressed += body if kind == b"IDAT" else b""
        at += 12 + length
    size = {2: 3, 6: 4}[colour]
    assert depth == 8
    raw, rows, before = zlib.decompress(compressed), [], bytearray(width * size)
    for start in range(0, len(raw), width * size + 1):
        kind, line = raw[start], bytearray(raw[start + 1 : start + 1 + width * size])
        for index in range(len(line)):
            left, up = line[index - size] if index >= size else 0, before[index]
            corner = before[index - size] if index >= size else 0
            line[index] = (line[index] + (0, left, up, (left + up) // 2, paeth(left, up, corner))[kind]) & 255
        rows.append([tuple(line[place : place + size]) for place in range(0, len(line), size)])
        before = line
    return rows


def paeth(left, up, corner):
    near = left + up - corner
    return min((left, up, corner), key=lambda value: abs(near - value))
