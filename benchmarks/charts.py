"""Draws the documentation's charts from the committed results: benchmarks/results/*.json become docs/images/*.png.

    python benchmarks/charts.py
    python benchmarks/charts.py gains drawn

Every picture names the device, torch, date, commit and file of what it shows. Needs matplotlib; nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
EAGER, COMPILE, REDUCE, OURS, GRAPHS = "eager", "torch.compile", "reduce-overhead", "fxfuse", "fxfuse, CUDA graphs"
COLOURS = {EAGER: "#9aa3af", COMPILE: "#d97706", REDUCE: "#f0b463", OURS: "#2563c9", GRAPHS: "#7ba7ee"}
PRECISIONS = ("float32", "bfloat16")
OTHER_RESULTS = {"umt5": "torch.compile computes something else than eager"}
"""Families whose torch.compile's time counts in no comparison, and why (docs/notebook.md, "Drawn networks")."""

Row = Mapping[str, Any]


def results(name: str) -> tuple[list[Row], str]:
    """The rows of a file of results, and a line that says where they were measured."""
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    made = found["provenance"]
    commits = sorted({str(row["commit"]) for row in found["rows"] if "commit" in row} | {made["commit"]})
    commit = commits[0] if len(commits) == 1 else f"{len(commits)} commits, the last {made['commit']}"
    return found["rows"], f"{made['device']}, torch {made['torch']}, {made['date']}, {commit}; {name}.json"


def over_eager(times: Mapping[str, float], who: str) -> float:
    """How many times as fast as eager."""
    return times[EAGER] / times[who]


def over_best_peer(times: Mapping[str, float], peers: Sequence[str] = (EAGER, COMPILE), who: str = OURS) -> float:
    """How many times as fast as the faster of the peers."""
    return min(times[peer] for peer in peers if peer in times) / times[who]


def walls(row: Row) -> dict[str, float]:
    """Milliseconds of each contestant."""
    return {name: found["wall"] for name, found in row["contestants"].items()}


# ------------------------------------------------------------------------------------------------------ pictures


def bars(axes: Any, groups: Sequence[str], series: Mapping[str, Sequence[float]], *, form: str = "{:.2f}x") -> None:
    """Horizontal bars, a group for each name, with their numbers at the end."""
    height = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        places = [group + (index - (len(series) - 1) / 2) * height for group in range(len(groups))]
        drawn = axes.barh(places, values, height * 0.92, color=COLOURS[name], label=name)
        axes.bar_label(drawn, labels=[form.format(value) for value in values], padding=2, fontsize=7.5)
    axes.set_yticks(range(len(groups)), groups)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.margins(x=0.14)


def legend_above(axes: Any) -> None:
    """Where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    where = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.945)}
    axes.figure.legend(handles, labels, ncol=len(labels), fontsize=8, frameon=False, **where)


def line_at_one(axes: Any, *, upright: bool = True) -> None:
    (axes.axvline if upright else axes.axhline)(1, color="#444", linewidth=0.8, linestyle=":")


def two_precisions(plt: Any, rows: Sequence[Row], times_of: Callable[[Row], Mapping[str, float]], title: str) -> Any:
    """Speed-ups over eager of torch.compile and fxfuse, float32 beside bfloat16."""
    figure, both = plt.subplots(1, 2, figsize=(8.6, 3.9), sharey=True)
    for axes, precision in zip(both, PRECISIONS, strict=True):
        mine = [row for row in rows if row["precision"] == precision]
        mine.sort(key=lambda row: row["network"])
        times = [times_of(row) for row in mine]
        series = {who: [over_eager(one, who) for one in times] for who in (COMPILE, OURS)}
        bars(axes, [row["network"] for row in mine], series)
        line_at_one(axes)
        axes.set_title(precision, fontsize=10)
        axes.set_xlabel("times as fast as eager")
    figure.suptitle(title)
    legend_above(both[0])
    return figure


def gains(plt: Any) -> tuple[Any, str]:
    rows, source = results("networks-nvidia-h200")
    return two_precisions(
        plt, rows, lambda row: row["times"], "Whole networks, batches of 16 to 64: speed-up over eager"
    ), source


def training(plt: Any) -> tuple[Any, str]:
    rows, source = results("training-nvidia-h100-80gb-hbm3")
    return two_precisions(plt, rows, walls, "Training steps, forward and backward: speed-up over eager"), source


def linears(plt: Any) -> tuple[Any, str]:
    rows, source = results("gemm-nvidia-h200")
    names = list(dict.fromkeys(row["region"] for row in rows))
    figure, axes = plt.subplots(figsize=(8.6, 5.6))
    for precision, colour in zip(PRECISIONS, ("#2563c9", "#d97706"), strict=True):
        mine = {row["region"]: over_best_peer(row["times"]) for row in rows if row["precision"] == precision}
        mean = statistics.geometric_mean(mine.values())
        label = f"{precision}, geometric mean {mean:.2f}x"
        axes.scatter([mine[name] for name in names], range(len(names)), color=colour, s=26, label=label, zorder=3)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", color="#eee")
    line_at_one(axes)
    axes.set_xlabel("times as fast as the better of eager and torch.compile")
    legend_above(axes)
    figure.suptitle("One linear and its epilogue (rows x features x K)")
    return figure, source


def convolutions(plt: Any) -> tuple[Any, str]:
    rows, source = results("conv2d-nvidia-h200")
    groups: dict[str, list[float]] = {}
    for row in rows:
        layout = "" if row["layout"] == "contiguous" else ", channels_last"
        name = f"{row['group']}, {row['precision']}{layout}".replace("targets", "six long epilogues")
        groups.setdefault(name, []).append(over_best_peer(row["times"]))
    figure, axes = plt.subplots(figsize=(8.6, 6.0))
    for place, found in enumerate(groups.values()):
        axes.plot([min(found), max(found)], [place, place], color="#b8c7e6", linewidth=4, solid_capstyle="round")
        mean = statistics.geometric_mean(found)
        axes.scatter([mean], [place], color="#2563c9", s=26, zorder=3)
        axes.annotate(f"{mean:.2f}x", (mean, place), (0, 5), textcoords="offset points", fontsize=7, ha="center")
    axes.set_yticks(range(len(groups)), groups, fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8], ["1x", "2x", "4x", "8x"])
    line_at_one(axes)
    axes.set_xlabel("times as fast as the better of eager and torch.compile: geometric mean, least to most")
    figure.suptitle("One convolution and its epilogue, by group")
    return figure, source


def drawn(plt: Any) -> tuple[Any, str]:
    rows, source = results("zoo-nvidia-h200")
    figure, axes = plt.subplots(figsize=(8.6, 3.8))
    for precision, colour in zip(PRECISIONS, ("#2563c9", "#d97706"), strict=True):
        compared = [
            row for row in rows
            if row["dtype"] == precision and row["ok"] and COMPILE in row["contestants"]
            and row["family"] not in OTHER_RESULTS
        ]  # fmt: skip
        found = sorted(over_best_peer(walls(row)) for row in compared)
        label = f"{precision}: {len(found)} networks, geometric mean {statistics.geometric_mean(found):.2f}x"
        places = [index / (len(found) - 1) for index in range(len(found))]
        axes.scatter(places, found, color=colour, s=16, label=label)
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 2, 4], ["1x", "2x", "4x"])
    axes.set_xticks([])
    line_at_one(axes, upright=False)
    axes.set_ylabel("times as fast as the better\nof eager and torch.compile", fontsize=8)
    axes.set_xlabel("networks, sorted")
    axes.legend(fontsize=8)
    figure.suptitle("Networks that nobody chose: drawn from torchvision, timm and transformers")
    return figure, source


def decoder(plt: Any) -> tuple[Any, str]:
    rows, source = results("decoder-nvidia-h200")
    rows = [row for row in rows if row["tokens"] == 1]
    name = "batch {batch}, {heads}:{key_heads} heads, cache {length}"
    names = [name.format(batch=row["batch"], **row["shape"]) for row in rows]
    figure, axes = plt.subplots(figsize=(8.6, 4.4))
    times = [walls(row) for row in rows]
    bars(axes, names, {who: [one[who] for one in times] for who in COLOURS}, form="{:.2f}")
    axes.set_xlabel("milliseconds a token (less is better)")
    legend_above(axes)
    figure.suptitle("Decoding a token: 8 layers of 4096 in Llama's style, bfloat16, a static cache")
    return figure, source


def cpu(plt: Any) -> tuple[Any, str]:
    rows, source = results("regions-cpu")
    figure, axes = plt.subplots(figsize=(8.6, 4.4))
    bars(
        axes, [row["region"] for row in rows],
        {who: [over_eager(row["times"], who) for row in rows] for who in (COMPILE, OURS)},
    )  # fmt: skip
    line_at_one(axes)
    axes.set_xlabel("times as fast as eager")
    legend_above(axes)
    figure.suptitle("Regions on a CPU, float32")
    return figure, source


def accuracy(plt: Any) -> tuple[Any, str]:
    rows, source = results("accuracy-nvidia-h200")
    figure, both = plt.subplots(1, 2, figsize=(8.6, 3.6), sharey=True)
    colours = {"normal": "#2563c9", "uniform": "#12805c", "wide": "#d97706"}
    styles = {(1024, 1024): "-", (16, 2048): "--", (2048, 4096): ":"}
    for axes, fp32 in zip(both, ("exact", "fast"), strict=True):
        for row in (row for row in rows if row["fp32"] == fp32):
            style = styles[row["rows"], row["features"]]
            label = row["data"] if style == "-" else None
            ratios = {int(size): ratio for size, ratio in row["ratios"].items()}
            axes.plot(
                list(ratios), list(ratios.values()), style, color=colours[row["data"]], linewidth=1.2, label=label
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_yticks([0.125, 0.25, 0.5, 1, 2, 4], ["1/8", "1/4", "1/2", "1", "2", "4"])
        line_at_one(axes, upright=False)
        axes.set_title("exact float32 (the default)" if fp32 == "exact" else 'fp32="fast"', fontsize=10)
        axes.set_xlabel("K, the length of a sum")
    both[0].set_ylabel("error / eager's error")
    both[0].legend(fontsize=8, title="data", title_fontsize=8)
    figure.suptitle("float32 linears: error against float64, as a multiple of eager's with TF32 off")
    return figure, source


CHARTS: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "gains": gains, "linears": linears, "convolutions": convolutions, "drawn": drawn, "decoder": decoder,
    "training": training, "cpu": cpu, "accuracy": accuracy,
}  # fmt: skip


def draw(name: str, path: Path) -> str:
    """Writes one chart, and returns the line below it that says where the numbers come from."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, source = CHARTS[name](plt)
        figure.text(0.99, 0.008, source, ha="right", va="bottom", fontsize=7, color="#555")
        figure.tight_layout(rect=(0, 0.03, 1, 0.95))
        figure.savefig(path, dpi=110, metadata={"Software": None})
        plt.close(figure)
    return source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CHARTS)}; all if none is given")
    names = parser.parse_args().names or list(CHARTS)
    unknown = sorted({*names} - {*CHARTS})
    if unknown:
        parser.error(f"no chart of the name {', '.join(unknown)}: there are {', '.join(CHARTS)}")
    IMAGES.mkdir(exist_ok=True)
    for name in names:
        path = IMAGES / f"{name}.png"
        print(f"{path.relative_to(ROOT)}: {draw(name, path)}; {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
