"""One model by eager, torch.compile in each mode, fxfuse, ONNX Runtime and TensorRT: a table for others to check.

    python benchmarks/compare.py                                        # a small convolutional network
    python benchmarks/compare.py --model ResNet-50 --dtype float16 --output results
    python benchmarks/compare.py --model my_model.py:build --only eager fxfuse ONNX

A model is a name of this file or of networks.py (torchvision or transformers must be installed), or a function
`build()`, in a file or a module, that returns a model and a tuple of its positional arguments, all tensors.

Each contestant gets the same weights and arguments. They run in turns of random order, in one process; a run ends when
its results are there, so that what the CPU does counts. Beside the median stands the least time, since other programs
that want the same processors lengthen the median. ONNX Runtime and TensorRT use TF32 where torch's switch for matrix
products allows it, which it does not by default. The error is the distance to the float64 model's result as a part of
that result's norm, the largest of all outputs. Compile time is what preparing and the first calls take beyond as many
median calls. What is not installed, or fails, is a row that says why: no package but fxfuse's own is needed.

ONNX Runtime needs the packages onnx, onnxscript and onnxruntime (on a GPU onnxruntime-gpu), TensorRT onnx, onnxscript
and tensorrt. Both read what torch.onnx exports.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.metadata
import importlib.util
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from contestants import compiled, distance_between, told, wait
from suite import arguments, provenance, read, write
from tabulate import tabulate
from torch import nn

import fxfuse
from fxfuse.verify import leaves_of

Arguments = tuple[torch.Tensor, ...]
Call = Callable[[], Any]
EAGER: Final = "eager"
WARM_UP: Final = 8
"""Calls before any is timed: fxfuse's programs begin at the third, at which Dynamo captures what fx cannot trace."""
LEAST_RUNS: Final = 5


class NotHere(Exception):
    """A contestant that this machine cannot run; the text says what is missing."""


# ----------------------------------------------------------------------------------------------- models


class Small(nn.Module):
    """A convolutional network of a megabyte, as a first model to try."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.SiLU())
        self.head = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512), nn.LayerNorm(512))


MODELS: Final[dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]] = {
    "small": (Small, (8, 3, 32, 32)),
    "mlp": (_mlp, (64, 512)),
}
"""By name, what makes a model, and the shape of its argument."""


def model_of(name: str, batch: int | None) -> tuple[nn.Module, Arguments]:
    """The model of that name with random weights, and arguments; on the CPU, in float32."""
    torch.manual_seed(0)
    if name in MODELS:
        build, shape = MODELS[name]
        return build().eval(), (torch.randn(shape if batch is None else (batch, *shape[1:])),)
    if ":" in name:
        where, _, function = name.rpartition(":")
        model, args = getattr(_module(where), function)()
        return model.eval(), tuple(args)
    from networks import NETWORKS, trained

    if name not in NETWORKS:
        raise SystemExit(
            f"there is no model {name!r}: it is one of {', '.join([*MODELS, *NETWORKS])}, or file.py:function"
        )
    network = NETWORKS[name]
    shape = (network.shape[0] if batch is None else batch, *network.shape[1:])
    x = torch.randint(network.tokens, shape) if network.tokens else torch.randn(shape)
    return trained(network.build()), (x,)


def _module(where: str) -> Any:
    """The Python module of a file, or of a name."""
    if not where.endswith(".py"):
        return importlib.import_module(where)
    spec = importlib.util.spec_from_file_location(Path(where).stem, where)
    if spec is None or spec.loader is None or not Path(where).is_file():
        raise SystemExit(f"there is no file {where}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------ contestants


@dataclass
class Setting:
    """What all contestants get."""

    model: nn.Module
    args: Arguments
    folder: Path
    """For files while they run."""
    expected: list[torch.Tensor] = field(default_factory=list)
    """Eager's results: contestants that write into memory that they are given get memory like theirs."""

    @property
    def device(self) -> torch.device:
        return self.args[0].device

    @functools.cached_property
    def onnx(self) -> Path:
        """The model as a file of ONNX."""
        path = self.folder / "model.onnx"
        torch.onnx.export(self.model, self.args, str(path))
        return path


def _needs_gpu(setting: Setting, what: str) -> None:
    if setting.device.type != "cuda":
        raise NotHere(f"{what} need a GPU")


def _packages(*names: str) -> None:
    """Raises NotHere unless all of them are installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise NotHere(f"not installed: {', '.join(missing)}")


def _eager(setting: Setting) -> Call:
    return lambda: setting.model(*setting.args)


def _compiled(mode: str) -> Callable[[Setting], Call]:
    return lambda setting: compiled(setting.model, lambda called: called(*setting.args), mode)


def _optimised(setting: Setting, graphs: bool = False) -> Call:
    if graphs:
        _needs_gpu(setting, "CUDA graphs")
    fast = fxfuse.optimize(setting.model, setting.args, cuda_graphs=graphs)
    return lambda: fast(*setting.args)


def _by_backend(setting: Setting) -> Call:
    fast = torch.compile(setting.model, backend="fxfuse")
    return lambda: fast(*setting.args)


def _numpy_type(tensor: torch.Tensor) -> Any:
    """What ONNX Runtime calls a tensor's dtype."""
    try:
        return torch.empty(0, dtype=tensor.dtype).numpy().dtype.type
    except TypeError:
        raise NotHere(f"numpy, by which ONNX Runtime is told of tensors, has no {tensor.dtype}") from None


def _onnx_runtime(setting: Setting) -> Call:
    _packages("onnx", "onnxscript", "onnxruntime")
    import onnxruntime

    gpu = setting.device.type == "cuda"
    provider: Any = "CPUExecutionProvider"
    if gpu:
        provider = ("CUDAExecutionProvider", {"use_tf32": int(torch.backends.cuda.matmul.allow_tf32)})
        if provider[0] not in onnxruntime.get_available_providers():
            raise NotHere("this onnxruntime knows no GPU: install onnxruntime-gpu")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(setting.onnx), options, providers=[provider])
    results = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in setting.expected]
    given = [tensor.contiguous() for tensor in setting.args]
    binding = session.io_binding()
    for bind, described, tensors in (
        (binding.bind_input, session.get_inputs(), given),
        (binding.bind_output, session.get_outputs(), results),
    ):
        for one, tensor in zip(described, tensors, strict=True):
            place = (setting.device.type, setting.device.index or 0, _numpy_type(tensor), list(tensor.shape))
            bind(one.name, *place, tensor.data_ptr())

    def call() -> list[torch.Tensor]:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return results

    call.keeps = given  # type: ignore[attr-defined]  # the binding knows addresses only
    return call


def _tensorrt(setting: Setting) -> Call:
    _needs_gpu(setting, "TensorRT's engines")
    _packages("onnx", "onnxscript", "tensorrt")
    import tensorrt

    log = tensorrt.Logger(tensorrt.Logger.ERROR)
    builder = tensorrt.Builder(log)
    network = builder.create_network(1 << int(tensorrt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = tensorrt.OnnxParser(network, log)
    if not parser.parse_from_file(str(setting.onnx)):
        raise RuntimeError("; ".join(str(parser.get_error(number)) for number in range(parser.num_errors)))
    config = builder.create_builder_config()
    if not torch.backends.cuda.matmul.allow_tf32:
        config.clear_flag(tensorrt.BuilderFlag.TF32)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError("TensorRT built no engine")
    runtime = tensorrt.Runtime(log)
    engine = runtime.deserialize_cuda_engine(plan)
    context = engine.create_execution_context()
    results = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in setting.expected]
    given = [tensor.contiguous() for tensor in setting.args]
    names = [engine.get_tensor_name(number) for number in range(engine.num_io_tensors)]
    is_input = [engine.get_tensor_mode(name) == tensorrt.TensorIOMode.INPUT for name in names]
    for kind, tensors in ((True, given), (False, results)):
        chosen = [name for name, one in zip(names, is_input, strict=True) if one is kind]
        for name, tensor in zip(chosen, tensors, strict=True):
            context.set_tensor_address(name, tensor.data_ptr())

    def call() -> list[torch.Tensor]:
        if not context.execute_async_v3(torch.cuda.current_stream(setting.device).cuda_stream):
            raise RuntimeError("TensorRT could not run its engine")
        return results

    call.keeps = given, engine, runtime  # type: ignore[attr-defined]  # the context knows addresses only
    return call


CONTESTANTS: Final[dict[str, tuple[str, Callable[[Setting], Call]]]] = {
    EAGER: ("torch", _eager),
    "torch.compile": ("torch", _compiled("default")),
    "torch.compile, reduce-overhead": ("torch", _compiled("reduce-overhead")),
    "torch.compile, max-autotune-no-cudagraphs": ("torch", _compiled("max-autotune-no-cudagraphs")),
    "torch.compile, max-autotune": ("torch", _compiled("max-autotune")),
    "fxfuse": ("fxfuse", _optimised),
    "fxfuse, CUDA graphs": ("fxfuse", functools.partial(_optimised, graphs=True)),
    'torch.compile, backend="fxfuse"': ("fxfuse", _by_backend),
    "ONNX Runtime": ("onnxruntime", _onnx_runtime),
    "TensorRT": ("tensorrt", _tensorrt),
}
"""By name: whose version is told, and what makes its call ready. Whatever that raises is the row's reason."""


def _version(package: str) -> str:
    if package in ("torch", "fxfuse"):
        return str({"torch": torch, "fxfuse": fxfuse}[package].__version__)
    try:
        names = importlib.metadata.packages_distributions().get(package, [package])
        return importlib.metadata.version(names[0])
    except importlib.metadata.PackageNotFoundError:
        return ""


# -------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Row:
    """What one contestant takes."""

    model: str
    dtype: str
    shapes: str
    """Of the arguments."""
    contestant: str
    version: str
    """Of its package; empty if that is not installed."""
    median: float | None = None
    """Milliseconds; None for what did not run."""
    minimum: float | None = None
    speed_up: float | None = None
    """Over eager."""
    error: float | None = None
    """Against float64, as a part of the norm."""
    compile_time: float | None = None
    """Seconds."""
    runs: int = 0
    reason: str = ""
    """Why it did not run."""
    commit: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.model, self.dtype, self.shapes, self.contestant


def exact_results(setting: Setting) -> list[torch.Tensor] | None:
    """The float64 model's; None if it does not run in float64."""
    try:
        model = copy.deepcopy(setting.model).double()
        return _tensors(model(*(arg.double() if arg.is_floating_point() else arg for arg in setting.args)))
    except Exception as error:
        print(f"no errors are told, since the model does not run in float64: {told(error)}")
        return None


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor)]


def compared(setting: Setting, names: Sequence[str], seconds: float, like: Row) -> list[Row]:
    """A row for each contestant, like `like` in what they have in common.

    Args:
        seconds: how long to measure all of them together.
    """
    exact = exact_results(setting)
    setting.expected = _tensors(setting.model(*setting.args))
    rows = {name: replace(like, contestant=name, version=_version(CONTESTANTS[name][0])) for name in names}
    calls: dict[str, Call] = {}
    before: dict[str, float] = {}
    for name in names:
        started = time.perf_counter()
        try:
            call = CONTESTANTS[name][1](setting)
            for _ in range(WARM_UP):
                result = call()
            wait(setting.device)
            before[name] = time.perf_counter() - started
            made = _tensors(result)
            far = None if exact is None else distance_between(exact, made)
            rows[name] = replace(rows[name], error=far)
            calls[name] = call
        except NotHere as reason:
            rows[name] = replace(rows[name], reason=str(reason))
        except Exception as error:  # a compiler may fail in any way; the others are still worth measuring
            rows[name] = replace(rows[name], reason=told(error))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)  # another one in each round: what else the machine does may come and go in step with them
    deadline = time.monotonic() + seconds
    while calls and (time.monotonic() < deadline or min(map(len, samples.values())) < LEAST_RUNS):
        for name in order.sample(list(calls), len(calls)):
            started = time.perf_counter()
            result = calls[name]()
            wait(setting.device)
            samples[name].append(time.perf_counter() - started)
            del result
    medians = {name: statistics.median(times) for name, times in samples.items()}
    for name, median in medians.items():
        rows[name] = replace(
            rows[name],
            median=median * 1e3,
            minimum=min(samples[name]) * 1e3,
            speed_up=medians[EAGER] / median if EAGER in medians else None,
            compile_time=max(0.0, before[name] - WARM_UP * median),
            runs=len(samples[name]),
        )
    return list(rows.values())


def render(rows: Sequence[Row]) -> str:
    """One table of all."""

    def cell(number: float | None, form: str) -> str:
        return "-" if number is None else format(number, form)

    table = [
        (
            row.contestant, row.version or "-", cell(row.median, ".4g"), cell(row.minimum, ".4g"),
            "-" if row.speed_up is None else f"{row.speed_up:.2f}x", cell(row.error, ".1e"),
            cell(row.compile_time, ".1f"), row.runs, f"not run: {row.reason}" if row.reason else "",
        )
        for row in rows
    ]  # fmt: skip
    headers = ("", "version", "median ms", "min ms", "speed-up over eager", "error", "compile time s", "runs", "")
    return tabulate(table, headers=headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="small", help="a name, or file.py:function or module:function")
    parser.add_argument("--batch", type=int, default=None, help="rows or images, for models that have a name")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--only", nargs="*", default=[""], help="contestants whose name contains one of these")
    parser.add_argument("--seconds", type=float, default=10.0, help="measuring time for all contestants together")
    given = parser.parse_args()
    device, dtype = torch.device(given.device), getattr(torch, given.dtype)
    facts = provenance(device, given.commit)
    model, args = model_of(given.model, given.batch)
    model = model.to(device, dtype)
    args = tuple(arg.to(device, dtype if arg.is_floating_point() else None) for arg in args)
    shapes = ", ".join("x".join(map(str, arg.shape)) for arg in args)
    like = Row(given.model, given.dtype, shapes, "", "", commit=facts["commit"])
    names = [name for name in CONTESTANTS if any(part in name for part in given.only)]
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        rows = compared(Setting(model, args, Path(folder)), names, given.seconds, like)
    heading = ", ".join(f"{key} {value}" for key, value in facts.items())
    print(f"\n{heading}\n\n{_titled(rows)}")
    if given.output is not None:
        kept = {row.key: row for row in read(given.output, "compare", facts, Row)}
        kept.update((row.key, row) for row in rows)
        cases = dict.fromkeys(key[:-1] for key in kept)
        tables = [_titled([row for row in kept.values() if row.key[:-1] == case]) for case in cases]
        write(given.output, "compare", facts, "\n\n".join([heading, *tables]) + "\n", list(kept.values()))


def _titled(rows: Sequence[Row]) -> str:
    first = rows[0]
    return f"{first.model}, {first.dtype}, arguments of {first.shapes}; medians of interleaved runs\n\n{render(rows)}"


if __name__ == "__main__":
    main()
