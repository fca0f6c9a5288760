"""nn.Module → fx.Graph, as much of it as can be traced.

`capture(model)` never changes the model: it works on a copy that shares parameters, buffers and other tensors but
nothing else. A module whose forward cannot be traced (control flow on values, unknown libraries) is left to run as
Python, as one node of its parent's graph, and its children are captured one by one.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx, nn

from fxfuse.errors import CaptureError

logger = logging.getLogger("fxfuse")


VARIABLE_KEYWORDS: Final = "**"
"""The key in `Captured.specialised` that says: without further keyword arguments."""


@dataclass(frozen=True)
class Untraced:
    """A module that runs as Python."""

    path: str
    """Its path in the model; "" for the model itself."""
    reason: str
    """The line that stopped the trace and what it said."""


@dataclass(frozen=True)
class Captured:
    """A model ready for matching."""

    root: nn.Module
    """The copy whose parameters, buffers and modules `graph` refers to."""
    graph: fx.Graph | None
    """None if the model's own forward cannot be traced."""
    untraced: tuple[Untraced, ...] = ()
    """What runs as Python: modules that are nodes of `graph`, or the model itself."""
    specialised: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of forward for whose default values, and no others, `graph` is right."""


def copy_sharing_tensors(model: nn.Module) -> nn.Module:
    """A deep copy of `model` whose tensors are the model's own: parameters, buffers, and tensors in attributes."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, torch.Tensor):
                memo[id(tensor)] = tensor
    return copy.deepcopy(model, memo)


class _Tracer(fx.Tracer):
    """Symbolic tracing that stops at torch.nn's modules, at `opaque` ones, and at graphs that are fused already.

    Parameters of forward that have a default are traced with its value instead of a proxy: `if mask is not None` asks
    a question that no proxy can answer. The graph keeps them as placeholders; `specialised` says what they must be.
    """

    def __init__(self, opaque: set[nn.Module], is_captured: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._opaque = opaque
        self._is_captured = is_captured
        self.specialised: dict[str, Any] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self._opaque or self._is_captured(m) or super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        parameters = list(inspect.signature(root_fn).parameters.values())[1:]
        kinds = inspect.Parameter
        prefixes: dict[Any, str] = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        for parameter in parameters:
            stars = prefixes.get(parameter.kind, "")
            has_default = parameter.default is not kinds.empty
            annotation = None if parameter.annotation is kinds.empty else parameter.annotation
            value: Any = self.create_proxy(
                "placeholder",
                stars + parameter.name,
                (parameter.default,) if has_default else (),
                {},
                type_expr=annotation,
            )
            if has_default:
                value = self.specialised[parameter.name] = parameter.default
            if stars == "*":
                positional.extend(value)  # raises TraceError: how many there are is not known
            elif stars == "**":
                self.specialised[VARIABLE_KEYWORDS] = None  # traced without any
            elif parameter.kind is kinds.KEYWORD_ONLY:
                keywords[parameter.name] = value
            else:
                positional.append(value)
        return (lambda *args: root_fn(*args, **keywords)), [self.root, *positional]

    def create_arg(self, a: Any) -> Any:
        """As fx.Tracer.create_arg, but a dictionary with a class of its own keeps it (transformers' ModelOutput)."""
        if isinstance(a, dict) and type(a) is not dict:
            if not dataclasses.is_dataclass(a):
                raise fx.proxy.TraceError(f"a {type(a).__name__} is built, which a graph cannot hold")
            values = {item.name: self.create_arg(getattr(a, item.name)) for item in dataclasses.fields(a)}
            return self.create_node("call_function", type(a), (), values)
        return super().create_arg(a)


def _where(error: BaseException) -> tuple[nn.Module | None, str]:
    """The innermost module in whose forward the trace stopped, and the line there that did it."""
    module: nn.Module | None = None
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        name, variables = frame.f_code.co_name, frame.f_code.co_varnames
        owner = frame.f_locals.get(variables[0]) if frame.f_code.co_argcount else None  # a method's self
        tracing = frame.f_globals.get("__name__", "").startswith(("torch.fx", "torch.nn.modules.module", __name__))
        if isinstance(owner, nn.Module) and not tracing:
            module = owner
            line = f"{frame.f_code.co_filename}:{number} in {type(owner).__name__}.{name}"
    message = (str(error).strip() or type(error).__name__).splitlines()[0]
    return module, f"{line}: {message}" if line else message


def capture(model: nn.Module, is_captured: Callable[[nn.Module], bool], strict: bool) -> Captured:
    """Traces a copy of `model` (see `trace`)."""
    return trace(copy_sharing_tensors(model), is_captured, strict)


def trace(root: nn.Module, is_captured: Callable[[nn.Module], bool], strict: bool) -> Captured:
    """Traces `root` itself, in its present mode.

    Args:
        is_captured: says of a module that it is a fused graph already, to be kept as one node.
        strict: raise CaptureError, naming the line, instead of leaving modules to Python.
    """
    if isinstance(root, fx.GraphModule):
        return Captured(root, copy.deepcopy(root.graph))
    paths = {module: path for path, module in root.named_modules()}
    opaque: dict[nn.Module, str] = {}
    while True:
        tracer = _Tracer(set(opaque), is_captured)
        try:
            graph = tracer.trace(root)
            break
        except Exception as error:  # tracing runs the user's code, which may raise anything
            module, reason = _where(error)
            if strict:
                raise CaptureError(f"the model cannot be traced: {reason}") from error
            if module is None or module not in paths or module in opaque:
                module = root
            logger.info("fxfuse: '%s' runs as Python: %s", paths[module], reason)
            opaque[module] = reason
            if module is root:
                return Captured(root, None, (Untraced("", reason),))
    reached = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    untraced = tuple(Untraced(paths[m], reason) for m, reason in opaque.items() if paths[m] in reached)
    return Captured(root, graph, untraced, tracer.specialised)
