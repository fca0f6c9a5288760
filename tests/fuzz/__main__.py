"""python -m tests.fuzz --models N --seed S: draws, runs, minimises and reports. Exit status 1 if anything was found."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

LIMIT_S = {"cpu": 90.0, "cuda": 300.0}
"""A model that takes longer is a finding; on a GPU it waits for compilers."""

RUNS = ("without programs", "merged", "as it is", "replayed")
"""How one model after another is run: without programs what calls of single regions do is looked at, too; merged on a
CPU are programs as on a GPU (loops.py); replayed are calls and training steps as CUDA graphs (graphs.py)."""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first model; the others' follow it")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where models and inputs are")
    parser.add_argument(
        "--compile", type=float, default=0.0,
        help="on the CPU the share of models whose kernels are compiled, and not interpreted; on a GPU that of kernels",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no model later than that")
    parser.add_argument("--slow", type=float, default=0.002, help="fraction of steps that export or compile")
    parser.add_argument("--output", default="", help="file for the findings as JSON lines")
    parser.add_argument("--fault", default="", help="a planted fault (tests/fuzz/faults.py): stops when it is found")
    parser.add_argument("--show", type=int, help="print the source of this seed's model and its steps")
    parser.add_argument("--eager", action="store_true", help="compare eager with itself")
    parser.add_argument("--work", nargs=2, type=int, metavar=("FIRST", "STRIDE"), help=argparse.SUPPRESS)
    return parser.parse_args()


# ------------------------------------------------------------------------------------------- one process


def _work(options: argparse.Namespace) -> None:
    """Runs models, a JSON line before and after each."""
    import torch

    from . import drive, faults
    from .draw import draw
    from .graphs import replayed
    from .interpret import interpreted, sampled, without_programs
    from .loops import interpreted_loops
    from .minimise import minimise

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    first, stride = options.work
    for seed in range(first, options.seed + options.models, stride):
        print(json.dumps({"begun": seed}), flush=True)
        compiled = seed % 1000 < options.compile * 1000
        with contextlib.ExitStack() as stack:
            if options.device == "cuda":
                stack.enter_context(sampled(options.compile))
            elif not compiled:
                stack.enter_context(interpreted())
            run = RUNS[seed % len(RUNS)]
            if run == "without programs":
                stack.enter_context(without_programs())
            if run == "merged" and options.device == "cpu":
                stack.enter_context(interpreted_loops())
            if run == "replayed":
                stack.enter_context(replayed(options.device))
            case = draw(seed, options.slow, options.device, programs=run == "merged", repeats=run == "replayed")
            if options.fault:
                with faults.planted(options.fault):
                    finding = drive.run(case)
                if finding is not None and drive.run(case) is not None:
                    finding = None  # it is there without the fault, too
                found: Any = None if finding is None else dataclasses.asdict(finding)
            elif options.eager:
                found = (
                    None if (finding := drive.run(case, lambda model: model)) is None else dataclasses.asdict(finding)
                )
            else:
                finding = drive.run(case)
                found = None
                if finding is not None:
                    small, finding = minimise(case, finding)
                    found = dataclasses.asdict(finding) | {"case": small.as_dict(), "source": small.source()}
        print(json.dumps({"done": seed, "features": case.features(), "finding": found}), flush=True)


# --------------------------------------------------------------------------------------------- all of them


def _lines(options: argparse.Namespace, job: int, results: queue.Queue[dict[str, Any]]) -> None:
    """One process after another for every `jobs`-th seed, until all are done."""
    next_seed, end = options.seed + job, options.seed + options.models
    until = time.monotonic() + options.minutes * 60
    while next_seed < end and time.monotonic() < until:
        command = [sys.executable, "-m", "tests.fuzz", *sys.argv[1:], "--work", str(next_seed), str(options.jobs)]
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
            watch: list[threading.Timer] = []
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith("{"):
                    continue
                for timer in watch:
                    timer.cancel()
                watch = [threading.Timer(LIMIT_S[options.device], process.kill)]
                watch[0].start()
                result = json.loads(line)
                if "done" in result:
                    results.put(result)
                    next_seed = result["done"] + options.jobs
                    if time.monotonic() > until:
                        process.kill()
            for timer in watch:
                timer.cancel()
            code = process.wait()
            if next_seed < end and time.monotonic() < until:
                errors.seek(0)
                name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
                text = f"{name}; see --show {next_seed}\n{errors.read()[-1500:]}"
                alone = [*command[:-3], "--eager", "--models", "1", "--seed", str(next_seed), "--jobs", "1"]
                own = not options.eager and subprocess.run(alone, capture_output=True).returncode != 0
                finding = {"kind": "process ended", "step": -1, "text": text, "source": ""}
                results.put({"done": next_seed, "features": ["torch's own end"] if own else [],
                             "finding": None if own else finding})  # fmt: skip
                next_seed += options.jobs
    results.put({})


def _main() -> int:
    options = _options()
    if options.show is not None:
        from .draw import draw

        case = draw(options.show, options.slow, options.device, RUNS[options.show % len(RUNS)] == "merged")
        print(case.source(), f"# inputs {case.inputs}, {case.dtype}; steps: {case.steps}", sep="")
        return 0
    if options.work:
        _work(options)
        return 0
    if options.device == "cuda":
        os.environ.setdefault("FXFUSE_TUNE", "0")  # one candidate each
    os.environ.setdefault("FXFUSE_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"fxfuse-fuzz-{os.getuid()}"))
    started, results = time.monotonic(), queue.Queue[dict[str, Any]]()
    for job in range(options.jobs):
        threading.Thread(target=_lines, args=(options, job, results), daemon=True).start()
    features: collections.Counter[str] = collections.Counter()
    kinds: dict[str, list[int]] = collections.defaultdict(list)
    count = 0
    running = options.jobs
    with open(options.output or os.devnull, "w") as output:
        while running:
            result = results.get()
            if not result:
                running -= 1
                continue
            count += 1
            features.update(set(result["features"]))
            finding = result["finding"]
            if finding is None:
                continue
            print(json.dumps({"seed": result["done"], **finding}), file=output, flush=True)
            label = _label(finding)
            kinds[label].append(result["done"])
            if len(kinds[label]) == 1:
                print(f"\n--- seed {result['done']}: {label}\n{finding['text']}\n{finding.get('source', '')}"
                      f"# {_steps(finding)}", flush=True)  # fmt: skip
            if options.fault and not finding["text"].startswith("exit status"):
                print(f"{options.fault}: found after {count} models by its {finding['kind']}")
                return 1
    minutes = (time.monotonic() - started) / 60
    rate = f"{minutes:.1f} minutes ({count / minutes:.0f} a minute)"
    print(f"\n{count} models from seed {options.seed} in {rate}, {sum(map(len, kinds.values()))} findings")
    for label, seeds in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(f"{len(seeds):6} {label}: seeds {seeds[:5]}")
    print("features:", ", ".join(f"{name} {number}" for name, number in features.most_common()))
    return 1 if kinds else 0


def _steps(finding: dict[str, Any]) -> str:
    case = finding.get("case", {})
    return f"inputs (batch, {case.get('inputs')}), {case.get('dtype')}; steps: {case.get('steps')}"


def _label(finding: dict[str, Any]) -> str:
    """The kind, and the features of the minimised model."""
    case = finding.get("case", {})
    parts = sorted({line[0] for line in case.get("lines", [])} | {f"step {step[0]}" for step in case.get("steps", [])})
    return f"{finding['kind']}: {', '.join(parts)}"


if __name__ == "__main__":
    sys.exit(_main())
