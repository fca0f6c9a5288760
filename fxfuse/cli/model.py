"""MODEL on a command line: how it is written, and the module and example call that it stands for."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxfuse.arguments import arguments_of
from fxfuse.cli import terminal
from fxfuse.cli.cases import CASES
from fxfuse.cli.networks import IMAGE, InputsFor, as_if_trained, from_timm, from_torchvision, from_transformers
from fxfuse.errors import FxfuseError

DTYPES: Final = ("float32", "float16", "bfloat16")
_INPUT_DTYPES: Final = (*DTYPES, "float64", "int64", "int32", "int16", "int8", "uint8", "bool")

Call = tuple[tuple[Any, ...], dict[str, Any]]

HELP: Final = """\
MODEL is one of
  package.module:callable   what makes an nn.Module, or (module, inputs); it is looked for here, too
  timm:NAME                 as timm.list_models() has it, with random weights
  torchvision:NAME          as torchvision.models.list_models() has it, with random weights
  transformers:TYPE         a model type ("bert") of four layers, with random weights; --full: its default size
  a built-in case:
{cases}
Nothing is downloaded.""".format(cases="\n".join(f"    {name:24}{case.description}" for name, case in CASES.items()))


class ModelError(FxfuseError):
    """A model of the command line cannot be made or called; the message says what helps."""


@dataclass(frozen=True)
class InputSpec:
    """An input of random numbers: [NAME=]8x3x224x224[:DTYPE]."""

    name: str | None
    """The name of a keyword argument; None for a positional one."""
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None for the model's dtype."""

    @staticmethod
    def parse(text: str) -> InputSpec:
        """The input that `text` describes. Raises argparse.ArgumentTypeError if it is none."""
        match = re.fullmatch(r"(?:([A-Za-z_]\w*)=)?(\d+(?:x\d+)*)(?::(\w+))?", text)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is no input; write 8x3x224x224, 8x128:int64 or mask=8x128:bool")
        name, shape, dtype = match.groups()
        if dtype is not None and dtype not in _INPUT_DTYPES:
            raise argparse.ArgumentTypeError(f"{dtype!r} is no dtype of inputs; there are {', '.join(_INPUT_DTYPES)}")
        sizes = tuple(map(int, shape.split("x")))
        return InputSpec(name, sizes, None if dtype is None else getattr(torch, dtype))

    def make(self, model: nn.Module) -> torch.Tensor:
        """Normally distributed numbers, or integers that are valid rows in all of the model's embeddings."""
        dtype = self.dtype or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        if dtype.is_floating_point:
            return torch.randn(self.shape).to(dtype)
        rows = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
        return torch.randint(0, 2 if dtype is torch.bool else min([*rows, 100]), self.shape).to(dtype)


@dataclass(frozen=True)
class Subject:
    """A model in evaluation mode, and a call that eager answers."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device

    def describe(self) -> str:
        """The model, its parameters and the call's tensors, in a line."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        named = [*((None, value) for value in self.args), *self.kwargs.items()]
        inputs = [f"{name}=" * (name is not None) + _described(value) for name, value in named]
        return f"{self.name}: {parameters / 1e6:.3g} million parameters; called with {', '.join(inputs) or 'nothing'}"


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape = "x".join(map(str, value.shape)) or "scalar"
        return f"{shape}:{str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__


# ---------------------------------------------------------------------------------------------- options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL, and the options for how it is made, called and optimised."""
    parser.add_argument("model", metavar="MODEL", type=_spec, help="see below")
    parser.add_argument(
        "--input", metavar="SHAPE", action="append", default=[], type=InputSpec.parse, dest="inputs",
        help="an argument of random numbers: 8x3x224x224, 8x128:int64, or mask=8x128:bool for a keyword argument; "
        "repeat it for more. Needed where MODEL brings no inputs",
    )  # fmt: skip
    parser.add_argument("--batch", type=_positive, help="of a named model's inputs (default: 16 on a GPU, else 1)")
    parser.add_argument("--device", type=_device, help='"cpu", "cuda", "cuda:1" (default: the GPU, if there is one)')
    parser.add_argument("--dtype", choices=DTYPES, help="of the model and its inputs (default: as MODEL makes them)")
    parser.add_argument("--full", action="store_true", help="a model of transformers at its default size")
    parser.add_argument("--fp32", choices=("exact", "fast"), default="exact", help="as fxfuse.optimize takes it")
    parser.add_argument("--cuda-graphs", action="store_true", help="replay calls as CUDA graphs")


def options(given: argparse.Namespace) -> dict[str, Any]:
    """The options of fxfuse.optimize that the command line has."""
    return {"fp32": given.fp32, "cuda_graphs": given.cuda_graphs}


def _spec(text: str) -> str:
    source, colon, name = text.partition(":")
    if not colon and text not in CASES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no built-in case ({', '.join(CASES)}); write package.module:callable, timm:NAME, "
            "torchvision:NAME or transformers:TYPE"
        )
    if colon and not (source and name):
        raise argparse.ArgumentTypeError(f"{text!r} has nothing on one side of its colon")
    return text


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f'{text!r} is no device; write "cpu", "cuda" or "cuda:1"') from None


# --------------------------------------------------------------------------------------------- loading


def load(given: argparse.Namespace) -> Subject:
    """The model that the command line names, on its device, and a call of it that eager answers. Raises ModelError."""
    device = _available(given.device)
    terminal.note(f"{given.model}: it is made and called once by torch, which imports what it needs")
    torch.manual_seed(0)
    model, calls = _made(given.model, device, given.full, given.batch or (16 if device.type == "cuda" else 1))
    dtype = getattr(torch, given.dtype) if given.dtype else None
    model = model.eval().to(device, dtype)
    refused = None
    for call in [_given(given.inputs, model)] if given.inputs else calls():
        call = pytree.tree_map_only(torch.Tensor, functools.partial(_moved, device=device, dtype=dtype), call)
        try:
            with torch.no_grad():
                model(*call[0], **call[1])
        except Exception as error:  # a model may refuse its arguments in any way
            refused = error
            continue
        return Subject(given.model, model, call[0], call[1], device)
    if refused is None:
        raise ModelError(f"{given.model} says nothing about its inputs; give them: --input 8x3x224x224")
    said = str(refused).strip().partition("\n")[0]
    raise ModelError(
        f"{given.model} cannot be called without fxfuse, either: {type(refused).__name__}: {said}. "
        "Other inputs: --input 8x3x224x224, --input NAME=8x128:int64"
    ) from refused


def _given(inputs: Iterable[InputSpec], model: nn.Module) -> Call:
    """The call that --input describes."""
    made = [(spec.name, spec.make(model)) for spec in inputs]
    return tuple(x for name, x in made if name is None), {name: x for name, x in made if name is not None}


def _moved(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else None)


def _available(device: torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"there is no device {device} here; `fxfuse doctor` says what there is")
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"fxfuse has kernels for cpu and cuda, not for {device.type}")
    return device


def _made(spec: str, device: torch.device, full: bool, batch: int) -> tuple[nn.Module, Callable[[], Iterable[Call]]]:
    """The model and the calls that it may answer, the likeliest first."""
    if spec in CASES:
        gpu = device.type == "cuda"
        case = CASES[spec]
        model, shape = case.build(gpu), case.gpu_shape if gpu else case.cpu_shape
        return model, lambda: [((torch.randn(shape),), {})]
    source, _, name = spec.partition(":")
    named: dict[str, Callable[[], tuple[nn.Module, InputsFor]]] = {
        "timm": lambda: from_timm(name),
        "torchvision": lambda: from_torchvision(name),
        "transformers": lambda: from_transformers(name, full),
    }
    if source not in named:
        return _imported(source, name)
    try:
        model, inputs_for = named[source]()
    except ImportError as error:
        missing = (error.name or source).partition(".")[0]
        raise ModelError(f"{spec} needs {source}, which cannot be imported ({error}): pip install {missing}") from error
    except Exception as error:  # a package may refuse a name in any way
        raise ModelError(f"{source} does not make {name!r}: {type(error).__name__}: {error}") from error
    as_if_trained(model)
    return model, lambda: (
        (tuple(x for name, x in inputs.items() if name == IMAGE), {n: x for n, x in inputs.items() if n != IMAGE})
        for inputs in inputs_for(batch)
    )


def _imported(module: str, name: str) -> tuple[nn.Module, Callable[[], Iterable[Call]]]:
    """What `module:name` makes: a module, or a module and the arguments of a call."""
    spec = f"{module}:{name}"
    if os.getcwd() not in sys.path:  # where `python -m` looks, and an installed script does not
        sys.path.insert(0, os.getcwd())
    try:
        found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        made: Any = found if isinstance(found, nn.Module) or not callable(found) else found()
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):  # one that the module imports
            raise ModelError(f"importing {module} failed: {error}; install what it needs") from error
        raise ModelError(f"there is no module {module} here; start in its folder, or set PYTHONPATH") from error
    except Exception as error:  # the code is anybody's
        raise ModelError(f"{spec} failed: {type(error).__name__}: {error} (--traceback says where)") from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{spec} is to make an nn.Module, or (module, inputs); it makes a {type(made).__name__}")
    call = None if inputs is None else arguments_of(inputs, None, f"the second of what {spec} makes")
    return model, lambda: [] if call is None else [call]
