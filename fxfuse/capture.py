"""nn.Module → fx.Graph, for as much of the model as can be traced.

`capture(model)` never changes the model: it works on a copy that shares parameters, buffers and other tensors but
nothing else. A module whose forward cannot be traced (control flow on values, unknown libraries) runs as Python. It
becomes one node of its parent's graph, and its children are captured one by one.
"""

from __future__ import annotations

import ast
import contextlib
import contextvars
import copy
import dataclasses
import inspect
import keyword
import linecache
import logging
import sys
import threading
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final, TypeAlias

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxfuse import attention_modules, ops
from fxfuse.errors import CaptureError, first_line
from fxfuse.functional import autocast_dtype
from fxfuse.hooks import has_hooks, hooks_of
from fxfuse.locks import free_in_children
from fxfuse.proxies import BufferProxy, Proxy, answering, modes_asked
from fxfuse.recording import Recording, no_saved_tensors_hooks
from fxfuse.state import Attributes, RandomState

logger = logging.getLogger("fxfuse")


Constants: TypeAlias = tuple[tuple[str, Any], ...]
"""Arguments whose values a graph is traced for, sorted by name: (name, fixed part of the value, see `fixed_in`)."""

GIVEN: Final = -1
"""Stands for a value, or an item of one, that is an input of the graph. No value that is traced for equals it."""

VARIABLE_KEYWORDS: Final = "**"
"""The key in `Captured.defaults` that stands for further keyword arguments. By default there are none."""


@dataclass(frozen=True)
class Untraced:
    """A module that runs as Python."""

    path: str
    """Its path in the model; "" for the model itself."""
    reason: str
    """The line that stopped the trace, and the error's message."""


@dataclass(frozen=True)
class Captured:
    """A model ready for matching."""

    root: nn.Module
    """The copy whose parameters, buffers and modules `graph` refers to."""
    graph: fx.Graph | None
    """None if the model's own forward cannot be traced."""
    untraced: tuple[Untraced, ...] = ()
    """The modules that run as Python: nodes of `graph`, or the model itself."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The defaults of forward's arguments, for those that have one."""
    given: tuple[str, ...] = ()
    """The sorted names of arguments with a default, and of further keyword arguments, that are inputs of the graph. For
    each of the others the graph is right for one value only."""
    constants: Constants = ()
    """These single values where they are not the defaults, including those of further keyword arguments."""
    tensors: frozenset[str] = frozenset()
    """Arguments that must be tensors for the graph to be right, because the forward asked for their class."""
    is_laid_out: bool = False
    """Whether the layouts of its values were chosen already (joint.py)."""


def copy_sharing_tensors(model: nn.Module) -> nn.Module:
    """A copy of `model` whose tensors are the model's own: parameters and buffers (with the dictionaries that hold
    them), and tensors in attributes.

    Apart from the tensors it is a deep copy. If something in the model cannot be copied (a lock, an open file), only
    the modules are copied, and share their other attributes with the model's.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        leaves = pytree.tree_leaves([module._parameters, module._buffers, dict(vars(module))])
        memo.update((id(leaf), leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
        # the dictionaries themselves, so that converting one model (to, half) converts the other, buffers included
        memo.update((id(table), table) for table in (module._parameters, module._buffers))
        memo.update((id(hook), hook) for table in hooks_of(module) for hook in table.values())
    try:
        for module in reversed(list(model.modules())):
            if isinstance(module, nn.parallel.DistributedDataParallel):
                memo[id(module)] = _with_same_reducer(module, memo)
        return copy.deepcopy(model, memo)
    except Exception as error:  # whatever __deepcopy__ or __reduce__ of an attribute raises
        logger.info("fxfuse: %s cannot be copied deeply (%s); its modules are copied", type(model).__name__, error)
        return _copy_modules(model, {})


def _with_same_reducer(
    module: nn.parallel.DistributedDataParallel, memo: dict[int, Any]
) -> nn.parallel.DistributedDataParallel:
    """A copy with the same reducer, which sends gradients. A deep copy would get a new one, without the hooks for
    communication."""
    twin = object.__new__(module.__class__)
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = copy.deepcopy(module._modules, memo)
    return twin


def _copy_modules(module: nn.Module, done: dict[nn.Module, nn.Module]) -> nn.Module:
    """A copy of a tree of modules; everything that is no module is shared."""
    if module not in done:
        twin = done[module] = object.__new__(module.__class__)  # a class may have a __new__ of its own (FSDP2's)
        twin.__dict__.update(module.__dict__)
        children = ((name, child) for name, child in module._modules.items())
        twin.__dict__["_modules"] = {
            name: None if child is None else _copy_modules(child, done) for name, child in children
        }
    return done[module]


class _Tracer(fx.Tracer):
    """Symbolic tracing that stops at torch.nn's modules, at `opaque` ones, and at graphs that are fused already.

    torch.nn's modules with attention are taken apart (attention_modules.py), but those in `whole`.

    Arguments of forward that have a default and are not `given` get no proxy, which could not answer
    `if mask is not None`. They are traced with their default, or with their value among `constants`. The graph keeps
    them as placeholders.
    """

    def __init__(
        self,
        opaque: set[nn.Module],
        is_captured: Callable[[nn.Module], bool],
        given: tuple[str, ...] | None,
        constants: Constants,
        lasting: Mapping[int, torch.Tensor] | None = None,
        whole: Set[nn.Module] = frozenset(),
    ) -> None:
        super().__init__(autowrap_functions=ops.own_functions())
        self._recording = Recording(self)
        self._lasting = lasting
        self.unknown: dict[int, torch.Tensor] = {}
        self.tensor_attrs = {}
        self._thread = threading.get_ident()
        self._opaque = opaque
        self._is_captured = is_captured
        self._asked = given
        self._constants = dict(constants)
        self.given: tuple[str, ...] = given or ()
        self.defaults: dict[str, Any] = {}
        self.made_lists: list[tuple[list[Any], list[Any]]] = []
        """Lists that forward gets as arguments, each with its items before the trace."""
        self._modes = _modes()
        self._context = _context()
        self._entered: list[tuple[nn.Module, dict[Any, int]]] = []
        self._whole, self._taken_apart = whole, set[nn.Module]()
        self.attended: dict[fx.Node, nn.Module] = {}
        """The results of attention that was taken apart."""
        self.weights: list[fx.Node] = []
        """Its weights of keys."""
        self._buffer_paths: dict[int, str] = {}
        self.taken_for_tensors: set[str] = set()
        self.stop: tuple[list[nn.Module], str] | None = None
        """The first question that ends the trace: the modules in whose forward it was asked, and why it does."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m in self._taken_apart:
            return False
        return m in self._opaque or self._is_captured(m) or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """As fx.Tracer.call_module. Calls in other threads, which fx's patch of nn.Module diverts, too, just run."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        if m is self.root:  # its class has a __call__ of its own, which comes back here; hooks run outside the graph
            return m.forward(*args, **kwargs)
        context = _context()
        if context != self._context and any(map(has_hooks, m.modules())):
            unaware = [entered for entered, before in self._entered if before == self._context]
            raise _StateError(
                unaware[-1] if unaware else None,
                f"it sets a context variable, which hooks of a {type(m).__name__} would not find in a graph",
            )
        if not has_hooks(m):
            forward = m.forward  # hooks for all modules must not run in a trace
        if _modes() != self._modes:
            return super().call_module(m, forward, args, kwargs)
        self._entered.append((m, context))
        by_parts = None
        if m not in self._opaque and m not in self._whole and not self._is_captured(m):
            by_parts = attention_modules.traceable(m, args, kwargs)
        if by_parts is None:
            self._taken_apart.discard(m)  # a call with other arguments may have been
        else:
            self._taken_apart.add(m)
            forward, args, kwargs = by_parts, (), {}
        randomness = RandomState()
        result = super().call_module(m, forward, args, kwargs)
        if by_parts is not None and isinstance(m, nn.MultiheadAttention):
            if m.batch_first:
                self.attended[result[0].node] = m
            self.weights += [] if result[1] is None else [result[1].node]
        if not randomness.is_present():
            raise _StateError(m, DRAWS)
        self._entered.pop()
        return result

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """As fx.Tracer.create_node. Raises _StateError after a switch of autocast or gradients: no graph holds that."""
        if _modes() != self._modes:
            raise _StateError(
                self._entered[-1][0] if self._entered else None,
                "it switches autocast or gradients for a part of its operations",
            )
        kind, target = args[:2]
        if kind in ("call_module", "get_attr") and not all(map(_can_be_code, str(target).split("."))):
            raise fx.proxy.TraceError(f"the name {str(target)!r} cannot stand in generated code")
        node = super().create_node(*args, **kwargs)
        line = _line_of_model()
        if line is not None:
            node.meta["stack_trace"] = line
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Proxy(node, self)

    def note_stop(self, error: Exception) -> None:
        """Notes an error that is raised to end the trace, since the model's code may catch it."""
        if self.stop is None:
            frames = list(_frames_of_trace(sys._getframe(1)))
            self.stop = _where(((frame, frame.f_lineno) for frame in reversed(frames)), error)

    def to_bool(self, obj: fx.Proxy) -> bool:
        return self._or_stopped(super().to_bool, obj)  # type: ignore[no-any-return]

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        return self._or_stopped(super().iter, obj)  # type: ignore[no-any-return]

    def _or_stopped(self, asked: Callable[[fx.Proxy], Any], value: fx.Proxy) -> Any:
        try:
            return asked(value)
        except fx.proxy.TraceError as error:
            self.note_stop(error)
            raise

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """As fx.Tracer.getattr; another thread gets the attribute itself."""
        if threading.get_ident() != self._thread:
            return attr_val
        if isinstance(attr_val, torch.Tensor) and not isinstance(attr_val, nn.Parameter):
            path = self._buffer_paths.get(id(attr_val))
            if path is not None:  # without a proxy, what is computed from it would be constant
                if path not in parameter_proxy_cache:
                    node = self.create_node("get_attr", path, (), {})
                    parameter_proxy_cache[path] = BufferProxy(node, self, attr_val)
                return parameter_proxy_cache[path]
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        # torch.func.functional_call puts tensors that are no Parameters in their place
        swapped = [(path, value) for path, value in root.named_parameters() if not isinstance(value, nn.Parameter)]
        self._buffer_paths = {id(value): path for path, value in [*swapped, *root.named_buffers()]}
        with torch.inference_mode(False), torch.enable_grad(), no_saved_tensors_hooks(), self._leaves_called(root):
            self._modes = _modes()  # with gradients, so that whoever switches them off is noticed
            with (
                _ranks_checked_later(), _own_functions_wrapped(), self._recording, answering(),
                modes_asked(root, self._ask),
            ):  # fmt: skip
                return super().trace(root, concrete_args)

    def _ask(self, name: str) -> None:
        """Called when the model asks for a mode. The trace ends: other calls may run under another."""
        if threading.get_ident() == self._thread:
            raise _StateError(
                self._entered[-1][0] if self._entered else None,
                f"it asks for a mode of torch (torch.{name}), which a graph does not hold",
            )

    @contextlib.contextmanager
    def _leaves_called(self, root: nn.Module) -> Iterator[None]:
        """Inside, calls of modules that are nodes are recorded even if their class has a `__call__` of its own."""
        leaves = [m for m in root.modules() if m in self._opaque or self._is_captured(m)]
        classes = {type(m) for m in leaves if type(m).__call__ is not nn.Module.__call__}

        def recording(call: Callable[..., Any]) -> Callable[..., Any]:
            def recorded(m: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() == self._thread and (m in self._opaque or self._is_captured(m)):
                    return self.call_module(m, m.forward, args, kwargs)
                return call(m, *args, **kwargs)

            return recorded

        with contextlib.ExitStack() as stack:
            for cls in classes:
                stack.callback(_restore_call, cls, vars(cls).get("__call__"))
                cls.__call__ = recording(cls.__call__)  # type: ignore[method-assign]
            yield

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        parameters = list(inspect.signature(root_fn).parameters.values())[1:]
        kinds = inspect.Parameter
        prefixes: dict[Any, str] = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        named = [parameter for parameter in parameters if parameter.kind not in prefixes]
        if self._asked is None and named and all(parameter.default is not kinds.empty for parameter in named):
            self.given = (named[0].name,)
        constants = dict(self._constants)
        annotations: list[Any] = []
        by_name = False  # true after the first argument that is left out
        for parameter in parameters:
            stars = prefixes.get(parameter.kind, "")
            has_default = parameter.default is not kinds.empty
            if self.defaults and not has_default and not stars:
                reason = f"'{parameter.name}' is required although it follows arguments with defaults"
                raise fx.proxy.TraceError(f"{reason}, which a graph's signature cannot say")
            annotation = None if parameter.annotation is kinds.empty else parameter.annotation
            # each `bool | None` is a new object, and torch 2.6 expects equal annotations to be one object
            annotation = next((other for other in annotations if other == annotation), annotation)
            annotations.append(annotation)
            value: Any = self.create_proxy(
                "placeholder",
                stars + parameter.name,
                ((parameter.default if _is_literal(parameter.default) else None),) if has_default else (),
                {},
                type_expr=annotation,
            )
            if parameter.name in constants:
                constants[parameter.name] = self._traced_for(constants[parameter.name], value)
            if has_default:
                self.defaults[parameter.name] = parameter.default
            left_out = has_default and parameter.name not in self.given
            if stars == "*":
                positional.extend(value)  # raises TraceError: their number is not known
            elif stars == "**":
                self.defaults[VARIABLE_KEYWORDS] = None
                names = {item.name for item in named}
                keywords.update((name, value[name]) for name in self.given if name not in names)
                for name in constants.keys() - names:
                    if isinstance(constants[name], tuple):
                        constants[name] = self._traced_for(constants[name], value[name])
            elif not has_default and parameter.kind is not kinds.KEYWORD_ONLY:
                positional.append(constants.pop(parameter.name, value))
            elif parameter.kind is kinds.POSITIONAL_ONLY:
                positional.append(constants.pop(parameter.name, parameter.default) if left_out else value)
            elif left_out or parameter.name in constants:
                by_name = True
            elif by_name or parameter.kind is kinds.KEYWORD_ONLY:
                keywords[parameter.name] = value
            else:
                positional.append(value)
        keywords.update(constants)
        call = type(self.root).__call__ if has_own_call(self.root) else root_fn
        return (lambda *args: call(*args, **keywords)), [self.root, *positional]

    def _traced_for(self, fixed: Any, value: Any) -> Any:
        """The argument that forward is traced with: `fixed`, with parts of the proxy `value` where it is GIVEN."""
        if isinstance(fixed, tuple):
            is_list, *items = fixed
            made = [self._traced_for(item, value[i]) if _is_in_part(item) else item for i, item in enumerate(items)]
            if is_list:
                self.made_lists.append((made, list(made)))
            return made if is_list else tuple(made)
        return value if fixed == GIVEN else fixed

    def create_arg(self, a: Any) -> Any:
        """As fx.Tracer.create_arg, but objects of dict's subclasses keep their class (transformers' ModelOutput)."""
        if isinstance(a, dict) and type(a) is not dict:
            if not dataclasses.is_dataclass(a):
                raise fx.proxy.TraceError(f"a {type(a).__name__} is built, which a graph cannot hold")
            values = {item.name: self.create_arg(getattr(a, item.name)) for item in dataclasses.fields(a)}
            return self.create_node("call_function", type(a), (), values)
        if isinstance(a, torch.Tensor):
            node = self._recording.node_of(a)
            if node is not None:
                return node
            if not isinstance(a, nn.Parameter) and id(a) not in self._buffer_paths and a not in self.tensor_attrs:
                self._meet(a)
        return super().create_arg(a)

    def _meet(self, tensor: torch.Tensor) -> None:
        """Notes a tensor of unknown origin, assumed to exist at every call. Raises TraceError if the previous trace
        met other tensors."""
        if self._lasting is not None and id(tensor) not in self._lasting:
            raise fx.proxy.TraceError("a tensor is made anew at every call in a way that a graph does not hold")
        self.unknown[id(tensor)] = tensor


_RANKS: Final[Mapping[type[nn.Module], tuple[int, ...]]] = {
    nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,),
}  # fmt: skip
"""The ranks that torch's batch normalisations accept."""


@contextlib.contextmanager
def _ranks_checked_later() -> Iterator[None]:
    """Inside, torch's batch normalisations check the rank of a value when the graph runs: no proxy knows its rank.

    Modules of torch's own classes are nodes. Those of subclasses are traced, and may call the forward of torch's class.
    """

    def recording(check: Callable[..., None], ranks: tuple[int, ...]) -> Callable[..., None]:
        def recorded(module: nn.Module, x: Any) -> None:
            rank = x.dim() if isinstance(x, fx.Proxy) else None
            if isinstance(rank, fx.Proxy):
                ops.check_rank(rank, ranks)
            else:
                check(module, x)

        return recorded

    with contextlib.ExitStack() as stack:
        for layer, ranks in _RANKS.items():
            check = vars(layer)["_check_input_dim"]
            stack.callback(setattr, layer, "_check_input_dim", check)
            setattr(layer, "_check_input_dim", recording(check, ranks))  # noqa: B010
        yield


@contextlib.contextmanager
def _own_functions_wrapped() -> Iterator[None]:
    """Inside, the user's own operations are wrapped (torch.fx.wrap) in the Python modules that define them.

    fx itself finds these functions, by `autowrap_functions`, in the Python modules of the forwards that it traces.
    """
    table: dict[tuple[int, str], Any] = getattr(fx._symbolic_trace, "_wrapped_fns_to_patch", {})
    added = {
        (id(function.__globals__), name): function.__globals__
        for function in ops.own_functions()
        for name, value in function.__globals__.items()
        if value is function
    }
    added = {key: names for key, names in added.items() if key not in table}
    table.update(added)
    try:
        yield
    finally:
        for key in added:
            del table[key]


DRAWS: Final = "it draws or sets random numbers in a way that a graph does not hold"
"""Why a module runs as Python if it draws random numbers of Python or numpy, or torch's unseen by the trace."""


def has_own_call(module: nn.Module) -> bool:
    """Whether the module's class has a __call__ of its own (transformers' layers do, for gradient checkpointing)."""
    return not isinstance(module, fx.GraphModule) and type(module).__call__ is not nn.Module.__call__


def _restore_call(cls: Any, call: Any) -> None:
    if call is None:
        del cls.__call__
    else:
        cls.__call__ = call


def _modes() -> tuple[Any, ...]:
    """The state of torch's switches: autocast with its dtypes, gradients, inference mode."""
    autocast = torch._C._is_any_autocast_enabled()
    dtypes = [autocast_dtype(device) for device in ("cpu", "cuda")] if autocast else []
    return (autocast, *dtypes, torch.is_grad_enabled(), torch.is_inference_mode_enabled())


def _context() -> dict[Any, int]:
    """Context variables that are set, with the identity of their values."""
    return {variable: id(value) for variable, value in contextvars.copy_context().items()}


class _StateError(fx.proxy.TraceError):
    """Operations run in a state that `module` has set for the duration of its forward. None stands for the root."""

    def __init__(self, module: nn.Module | None, reason: str) -> None:
        super().__init__(reason)
        self.module = module


def _can_be_code(name: str) -> bool:
    """Whether fx writes `name`, of a module or tensor in its parent, as code that refers to it.

    For an identifier fx writes `parent.name`, and Python normalises the name. Otherwise fx writes
    `getattr(parent, "name")` without escapes: a quotation mark in the name would end the text.
    """
    if name.isidentifier():
        return not keyword.iskeyword(name) and unicodedata.normalize("NFKC", name) == name
    return name.isprintable() and '"' not in name and "\\" not in name


def _hidden_name(graph: fx.Graph) -> str | None:
    """The name of an argument, if any, that hides another use of this name in the graph's code: `self`, `torch`,
    `getattr`.

    fx renames nodes, but arguments keep their names.
    """
    arguments = {str(node.target).lstrip("*"): node.name for node in graph.nodes if node.op == "placeholder"}
    always = next((name for name in ("self", "torch") if name in arguments), None)
    if always is not None:
        return always
    # fx knows which other names may be needed: it gives such an argument's node another name, in a line of its own
    suspects = [name for name, node in arguments.items() if name != node]
    if not suspects:
        return None
    code = ast.parse(graph.python_code("self").src)
    read = [node.id for node in ast.walk(code) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return next((name for name in suspects if read.count(name) > 1), None)


def _unsure_result(graph: fx.Graph) -> str | None:
    """An attribute of a module's result (no tensor's attribute) that is returned in a tuple, list or dictionary.

    Eager may leave out an attribute that is None (transformers' `to_tuple`), and no proxy can answer `is None`.
    Dataclasses are built when the graph runs, and leave out then what is None.
    """
    output = next(node for node in graph.nodes if node.op == "output")
    if isinstance(output.args[0], fx.Node):
        return None
    for node in output.all_input_nodes:
        if node.op == "call_function" and node.target is getattr and isinstance(node.args[0], fx.Node):
            name = str(node.args[1])
            if node.args[0].op == "call_module" and not hasattr(torch.Tensor, name):
                return name
    return None


def fixed_in(value: Any) -> Any:
    """The fixed part of an argument: values that a graph is traced for, since models branch on them and they are few.

    None, a bool and a str are fixed. A list or tuple gives (whether it is a list, *items), each item as its fixed part,
    but strings as GIVEN. The result is GIVEN if nothing is fixed.

    Dynamo traces this function, also that of torch 2.3, which does not know `bool | str`.
    """
    if value is None or isinstance(value, _FEW_VALUES):
        return value
    if type(value) is list or type(value) is tuple:
        items = [GIVEN if isinstance(item, str) else fixed_in(item) for item in value]
        if not items or any(item != GIVEN for item in items):
            return (type(value) is list, *items)
    return GIVEN


_FEW_VALUES: Final = (bool, str)


def _is_in_part(fixed: Any) -> bool:
    """Whether some part of a value is an input of the graph. `fixed` is the value's fixed part (`fixed_in`)."""
    return any(map(_is_in_part, fixed[1:])) if isinstance(fixed, tuple) else bool(fixed == GIVEN)


def _is_literal(value: Any) -> bool:
    """Whether a default can stand in a graph's generated signature."""
    return value is None or isinstance(value, bool | int | float | str)


def _line_of_model() -> str | None:
    """The line of the model's own code that is being traced, as fx writes it; None if only torch's code runs."""
    for frame in _frames_of_trace(sys._getframe(2)):
        if str(frame.f_globals.get("__name__")).split(".")[0] not in ("torch", "fxfuse"):
            name, number = frame.f_code.co_filename, frame.f_lineno
            line = linecache.getline(name, number, frame.f_globals).strip()
            return f'  File "{name}", line {number}, in {frame.f_code.co_name}\n    {line}\n'
    return None


def _frames_of_trace(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the trace that is under way, from this one outwards."""
    while frame is not None and frame.f_code is not _Tracer.trace.__code__:
        yield frame
        frame = frame.f_back


_MACHINERY: Final = ("torch.fx", "torch.nn.modules.module", "torch.utils.checkpoint", __name__)
"""Python modules whose functions run in between a model's own functions."""


def _where(frames: Iterable[tuple[FrameType, int]], error: Exception) -> tuple[list[nn.Module], str]:
    """The modules in whose forward an error stopped the trace, the innermost last, and the line that did."""
    modules: list[nn.Module] = []
    line = ""
    for frame, number in frames:
        name, variables = frame.f_code.co_name, frame.f_code.co_varnames
        owner = frame.f_locals.get(variables[0]) if frame.f_code.co_argcount else None  # a method's self
        tracing = frame.f_globals.get("__name__", "").startswith(_MACHINERY)
        if isinstance(owner, nn.Module) and not tracing:
            modules.append(owner)
            line = f"{frame.f_code.co_filename}:{number} in {type(owner).__name__}.{name}"
    message = first_line(error)
    if isinstance(error, fx.proxy.TraceError):
        message = message.partition(". ")[0]  # the rest explains what torch.fx is
    return modules, f"{line}: {message}" if line else message


def _put_buffers_back(modules: Iterable[nn.Module]) -> None:
    """Puts back buffers to which a forward assigned their own proxy (`self.steps += 1`)."""
    for module in modules:
        for name, value in module._buffers.items():
            if isinstance(value, BufferProxy):
                module._buffers[name] = value.buffer


_tracing: Final = free_in_children(threading.RLock())
"""fx patches nn.Module while it traces: two traces at a time would undo each other's patches."""


def capture(model: nn.Module, is_captured: Callable[[nn.Module], bool], strict: bool) -> Captured:
    """Traces a copy of `model` (see `trace`)."""
    return trace(copy_sharing_tensors(model), is_captured, strict)


def trace(
    root: nn.Module,
    is_captured: Callable[[nn.Module], bool],
    strict: bool,
    given: tuple[str, ...] | None = None,
    constants: Constants = (),
) -> Captured:
    """Traces `root` itself, in its present mode.

    Args:
        given: the sorted names of arguments with a default, and of further keyword arguments, to which calls will give
            values of their own. If None: the first argument if all arguments have defaults, else none.
        constants: values that calls will give to other arguments.
        is_captured: whether a module is a fused graph already, to be kept as one node.
        strict: raise CaptureError, naming the line, instead of leaving modules to Python.
    """
    if isinstance(root, fx.GraphModule):
        return Captured(root, copy.deepcopy(root.graph))
    if "forward" in vars(root):
        return Captured(root, None, (Untraced("", "its forward is an attribute of the instance"),))
    paths = {module: path for path, module in root.named_modules()}
    # hooks must run at every call, not once while tracing
    opaque = {
        m: "it has hooks"
        for m, path in paths.items()
        if m is not root and has_hooks(m) and not is_captured(m) and not fx.Tracer().is_leaf_module(m, path)
    }
    plain = [m for m in paths if not isinstance(m, torch.jit.ScriptModule) and not is_captured(m)]
    lasting: dict[int, torch.Tensor] | None = None
    whole: set[nn.Module] = set()
    while True:
        tracer = _Tracer(set(opaque), is_captured, given, constants, lasting, whole)
        attributes, randomness, names = Attributes(plain), RandomState(), set(vars(root))
        refused: dict[nn.Module, str] = {}
        failed = False
        cause: Exception | None = None

        def refuse(modules: Iterable[nn.Module | None], reason: str) -> None:
            # the last of them that does not run as Python already
            known = [module for module in modules if module in paths and module not in opaque]
            refused[known[-1] if known and known[-1] is not None else root] = reason  # noqa: B023

        try:
            with _tracing:
                graph = tracer.trace(root)
            for node in tracer.weights:
                attention_modules.erase_unread(node)
            # Pickling a module made of this graph traces its code again. fx's own tracer suffices for that.
            graph._tracer_cls = None
            hidden = _hidden_name(graph)
            if hidden is not None:
                raise _StateError(None, f"its argument '{hidden}' hides what generated code calls so")
            if any(list(map(id, now)) != list(map(id, before)) for now, before in tracer.made_lists):
                raise _StateError(None, "it changes a list that it is given")
            unsure = _unsure_result(graph)
            if unsure is not None:
                raise _StateError(None, f"it returns '{unsure}' of what a module returns, which it leaves out if None")
        except Exception as error:  # tracing runs the user's code, which may raise anything
            # kept only where it is raised: its traceback has this frame, and would keep the tensors of all callers
            failed, cause = True, error if strict else None
            modules, reason = _where(traceback.walk_tb(error.__traceback__), error)
            refuse([error.module] if isinstance(error, _StateError) else modules, reason)
        if tracer.stop is not None and not failed:  # what the model's code does after that is not what a call does
            failed = True
            refuse(*tracer.stop)
        added = set(vars(root)).difference(names).intersection(tracer.tensor_attrs.values())
        lasting_read = {name: vars(root).pop(name) for name in added}
        _put_buffers_back(plain)
        for module, name in attributes.changes().items():
            if not failed:
                refuse([module], f"{type(module).__name__}.forward: it sets the attribute '{name}'")
        attributes.restore()
        if not failed and not randomness.is_present():
            refuse([root], f"{type(root).__name__}.forward: {DRAWS}")
        randomness.restore()
        if not refused and tracer.unknown and lasting is None:
            lasting = tracer.unknown  # tensors that forward makes are other objects the next time
            continue
        visible = set() if refused else attention_modules.seen_by_caller(graph, root, tracer.attended)
        if visible:
            whole |= visible
            continue
        if not refused:
            vars(root).update(lasting_read)
            break
        for module, reason in refused.items():
            if strict:
                raise CaptureError(f"the model cannot be traced: {reason}") from cause
            logger.info("fxfuse: '%s' runs as Python: %s", paths[module], reason)
        opaque.update(refused)
        if root in refused:
            return Captured(root, None, (Untraced("", refused[root]),))
    reached = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    untraced = tuple(Untraced(paths[m], reason) for m, reason in opaque.items() if paths[m] in reached)
    tensors = frozenset(tracer.taken_for_tensors)
    return Captured(root, graph, untraced, tracer.defaults, tracer.given, constants, tensors)
