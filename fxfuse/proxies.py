"""Proxies: the values that a forward computes with while it is traced, and their answers to questions about them.

`isinstance(x, torch.Tensor)` is False for fx's proxies, so that the wrong branch would be traced. While a model is
traced, such questions are answered for the value that a call will have (`answering`), if the answer is sure whatever
the model is called with. Otherwise they end the trace, even if the model's code catches the error: what it does then is
not what it does at a call. `x is None` cannot be intercepted. So where code takes a part of a module's result, which
may be None, that code is examined (`_asked_for_none`).
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import importlib.abc
import operator
import re
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, FrameType, ModuleType
from typing import Any, Final

import torch
from torch import fx, nn

from fxfuse.locks import free_in_children
from fxfuse.patterns.tensors import tensors_of


class Proxy(fx.Proxy):
    """A proxy for which `x += 1` overwrites x, as it does for tensors. Setting an attribute on it ends the trace."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the value, for code of the model that reads this attribute or matches it with `case`.

        torch's own C++ would otherwise take a proxy for a tensor in memory.
        """
        frame = sys._getframe(1)
        if _is_users(frame) and _step(frame) in (*_READING, "MATCH_CLASS"):
            return class_of(self.tracer, self.node)
        return type(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("node", "tracer"):
            raise _unanswered(self.tracer, f"the attribute {name!r} of a value is set, which a graph does not hold")
        object.__setattr__(self, name, value)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __getattr__(self, name: str) -> fx.proxy.Attribute:
        if name in ("grad_fn", "grad"):
            raise _unanswered(self.tracer, f"what a value's {name} is, is asked, and not known")
        frame = sys._getframe(1)
        if _is_users(frame):
            other = _other_class(self.tracer, self.node)
            if other is not None and not hasattr(other, name):
                raise AttributeError(f"'{other.__name__}' object has no attribute '{name}'")
        if not hasattr(torch.Tensor, name):
            if _is_users(frame):
                asked = _step(frame) not in _READING  # by hasattr or getattr
                if issubclass(class_of(self.tracer, self.node), torch.Tensor) if asked else self._is_surely_tensor():
                    raise AttributeError(f"'Tensor' object has no attribute '{name}'")
            self._check_no_question(frame, [f".{name}"])
        return _Attribute(self, name)

    def __getitem__(self, index: Any) -> fx.Proxy:
        self._check_no_question(sys._getframe(1), [f"[{index!r}]"] if isinstance(index, int | str) else [])
        return self.tracer.create_proxy("call_function", operator.getitem, (self, index), {})

    def __iter__(self) -> Iterator[fx.Proxy]:
        """As fx.Proxy's: the number of values follows from the code that unpacks them."""
        frame = sys._getframe(1)
        count, names = _unpacked_into(frame)
        if count is None:
            return self.tracer.iter(self)
        self._check_no_question(frame, names)
        return (self[place] for place in range(count))

    def __len__(self) -> int:
        raise _unanswered(self.tracer, "the length of a value is asked, and not known")

    def __int__(self) -> int:
        raise _unanswered(self.tracer, "a value is made a number of Python's, which a graph does not hold")

    def __float__(self) -> float:
        raise _unanswered(self.tracer, "a value is made a number of Python's, which a graph does not hold")

    def __hash__(self) -> int:
        """As a tensor's, which is its identity. Other values are found in a dictionary or set by what they are."""
        if _is_users(sys._getframe(1)) and not issubclass(class_of(self.tracer, self.node), torch.Tensor):
            raise _unanswered(self.tracer, "a value is looked up in a dictionary or set, and not known")
        return object.__hash__(self)

    def _check_no_question(self, frame: FrameType, names: Iterable[str]) -> None:
        """Raises TraceError if the code asks whether one of `names`, parts of a module's result, is None."""
        node = self.node
        while node.op == "call_function" and node.target in (operator.getitem, getattr):
            if not isinstance(node.args[0], fx.Node):
                return
            node = node.args[0]
        if node.op != "call_module":
            return
        asked = _asked_for_none(frame.f_code).intersection(names)
        if asked:
            raise _unanswered(
                self.tracer, f"whether '{min(asked)}' of what '{node}' returns is None is asked, and not known"
            )

    def _is_surely_tensor(self) -> bool:
        """Whether the value is known to be a tensor already. No argument is taken for a tensor to answer this."""
        return _tensor_class(self.tracer, self.node) is not None


class _Attribute(fx.proxy.Attribute, Proxy):
    """An attribute of a value, or a method until it is called."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("root", "attr", "_node"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)


def _augmented(function: Callable[..., Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


_AUGMENTED: Final = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")
for _name in _AUGMENTED:
    setattr(Proxy, f"__i{_name}__", _augmented(getattr(operator, f"__i{_name}__")))


class BufferProxy(Proxy):
    """A proxy for a buffer, which is read at every call. Questions about its shape are answered while tracing."""

    _buffer: torch.Tensor

    def __init__(self, node: fx.Node, tracer: Any, buffer: torch.Tensor) -> None:
        super().__init__(node, tracer)
        object.__setattr__(self, "_buffer", buffer)

    @property
    def buffer(self) -> torch.Tensor:
        """The buffer itself."""
        return self._buffer

    @property
    def shape(self) -> torch.Size:
        return self._buffer.shape

    @property
    def ndim(self) -> int:
        return self._buffer.ndim

    def size(self, *dim: int) -> Any:
        return self._buffer.size(*dim)

    def dim(self) -> int:
        return self._buffer.dim()

    def numel(self) -> int:
        return self._buffer.numel()


def _augmented_buffer(function: Callable[..., Any]) -> Callable[[BufferProxy, Any], BufferProxy]:
    def augmented(self: BufferProxy, other: Any) -> BufferProxy:
        node = self.tracer.create_proxy("call_function", function, (self, other), {}).node
        return BufferProxy(node, self.tracer, self._buffer)  # the same buffer: `self.steps += 1` replaces nothing

    return augmented


for _name in _AUGMENTED:
    setattr(BufferProxy, f"__i{_name}__", _augmented_buffer(getattr(operator, f"__i{_name}__")))


def _unanswered(tracer: Any, reason: str) -> fx.proxy.TraceError:
    """An error for a question that ends the trace. It ends it even if the model's code catches the error."""
    error = fx.proxy.TraceError(reason)
    tracer.note_stop(error)
    return error


# ------------------------------------------------------------------------- whether a value is None


@functools.lru_cache(maxsize=1024)
def _steps(code: CodeType) -> list[dis.Instruction]:
    return list(dis.get_instructions(code))


@functools.lru_cache(maxsize=1024)
def _asked_for_none(code: CodeType) -> frozenset[str]:
    """The things that a function compares with None: variables, attributes as ".name", elements as "[0]"."""
    asked = set()
    steps = _steps(code)
    for place, step in enumerate(steps):
        if step.opname == "IS_OP" and place and _is_none(steps[place - 1]):
            place -= 1
        elif not re.search(r"IF_(NOT_)?NONE$", step.opname):
            continue
        asked.add(_loaded(steps[:place]))
    return frozenset(asked)


def _is_none(step: dis.Instruction) -> bool:
    return step.opname == "LOAD_CONST" and step.argval is None


def _loaded(steps: list[dis.Instruction]) -> str:
    """The thing that the last of these steps puts on the stack, in the notation of `_asked_for_none`."""
    step = steps[-1]
    if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return f".{step.argval}"
    if step.opname.startswith("BINARY_") and len(steps) > 1:  # of a container
        return f"[{steps[-2].argval!r}]"
    return step.argval[-1] if isinstance(step.argval, tuple) else str(step.argval)


def _unpacked_into(frame: FrameType) -> tuple[int | None, list[str]]:
    """The number of values that the frame now unpacks, and the variables that get them. None if it unpacks nothing."""
    steps = iter(_steps_from(frame))
    current = next(steps)
    if current.opname != "UNPACK_SEQUENCE":
        return None, []
    names: list[str] = []
    for step, _ in zip(steps, range(current.argval), strict=False):
        names += step.argval if isinstance(step.argval, tuple) else [str(step.argval)]
    return current.argval, names


def _steps_from(frame: FrameType) -> list[dis.Instruction]:
    """The instruction that the frame now executes, and those after it. `f_lasti` may be that of a cache behind it."""
    steps = _steps(frame.f_code)
    return steps[sum(step.offset <= frame.f_lasti for step in steps) - 1 :]


def _step(frame: FrameType) -> str:
    """The name of the instruction that the frame now executes."""
    return _steps_from(frame)[0].opname


_READING: Final = ("LOAD_ATTR", "LOAD_METHOD")
"""Instructions that read an attribute."""


# ------------------------------------------------------------------------------ what a value is


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """A context in which Python's own functions, asked by a model's code, answer for the value of a proxy."""

    @contextlib.contextmanager
    def as_ever() -> Iterator[None]:
        with _counted(imports=1), contextlib.ExitStack() as modes:  # the module that is imported may import others
            for _ in range(torch._C._len_torch_function_stack()):
                modes.enter_context(torch.overrides._pop_mode_temporarily())
            yield

    imports = _Imports(as_ever)
    sys.meta_path.insert(0, imports)
    try:
        with _counted(traces=1):
            yield
    finally:
        sys.meta_path.remove(imports)


class _Underway:
    """What all threads do. Python's own functions are replaced while any of them traces, and none imports a module."""

    lock: Final = free_in_children(threading.Lock())
    traces = imports = 0
    before: Mapping[str, Any] = {}
    """The functions that are replaced now."""

    @classmethod
    def count(cls, traces: int, imports: int) -> None:
        with cls.lock:  # traces and imports of several threads overlap in any way
            were_replaced = bool(cls.traces and not cls.imports)
            cls.traces, cls.imports = cls.traces + traces, cls.imports + imports
            are_replaced = bool(cls.traces and not cls.imports)
            if are_replaced and not were_replaced:
                cls.before = {name: vars(builtins)[name] for name in _ANSWERING}
                vars(builtins).update(_ANSWERING)
            elif were_replaced and not are_replaced:
                vars(builtins).update(cls.before)


@contextlib.contextmanager
def _counted(traces: int = 0, imports: int = 0) -> Iterator[None]:
    """A context that counts as so many traces and imports."""
    _Underway.count(traces, imports)
    try:
        yield
    finally:
        _Underway.count(-traces, -imports)


_isinstance, _type, _callable = isinstance, type, callable


def _is_instance(value: Any, classes: Any) -> bool:
    if _isinstance(value, classes):
        return True
    if not issubclass(_type(value), Proxy) or not _is_users(_asking_frame()):
        return False
    return issubclass(class_of(value.tracer, value.node), classes)


def _is_callable(value: Any) -> bool:
    """A proxy has the method `__call__`."""
    if issubclass(_type(value), Proxy) and _is_users(sys._getframe(1)):
        return any("__call__" in vars(base) for base in class_of(value.tracer, value.node).__mro__)
    return _callable(value)


class _AsType(type):
    """The class of `_Type`, which is called, compared and asked as `type` is."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        found = _type(*args, **kwargs)
        if len(args) == 1 and issubclass(found, Proxy) and _is_users(sys._getframe(1)):
            return class_of(args[0].tracer, args[0].node)
        return cls if found is _type else found

    def __instancecheck__(cls, value: Any) -> bool:
        return _isinstance(value, _type)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, _type)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _type

    def __hash__(cls) -> int:
        return hash(_type)

    def __new__(cls, name: str, bases: tuple[type, ...], names: dict[str, Any], **options: Any) -> Any:
        """A class that is derived from `_Type`, by code that means `type`, is derived from `type`."""
        if any(base is _type for base in bases):
            return super().__new__(cls, name, bases, names)
        meant = tuple(_type if base is _Type else base for base in bases)
        return types.new_class(name, meant, options, lambda body: body.update(names))


class _Type(type, metaclass=_AsType):
    """Stands for `type` during a trace: `type(x)` of a proxy is the class of the value."""

    def __class_getitem__(cls, item: Any) -> Any:
        return _type[item]


_ANSWERING: Final[Mapping[str, Any]] = {"isinstance": _is_instance, "type": _Type, "callable": _is_callable}


class _Imports(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules during a trace with Python's own functions, and without modes that record operations on tensors.

    Otherwise Dynamo, which torch imports when it is first needed (by torch.utils.checkpoint, say), would keep the
    replaced functions for good. A module whose import fails half-way may never be imported again.
    """

    def __init__(self, as_ever: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._as_ever = as_ever
        self._loaders: dict[str, importlib.abc.Loader] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return None
        assert spec.loader is not None
        self._loaders[name], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loaders[spec.name].create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = loader = self._loaders.pop(module.__spec__.name)
        with self._as_ever():
            loader.exec_module(module)


def _asking_frame() -> FrameType:
    """The frame that calls the caller. If that is a function of torch that asks for others, the frame that calls it."""
    frame = sys._getframe(2)
    while frame.f_code in _ASKING and frame.f_back is not None:
        frame = frame.f_back
    return frame


_ASKING: Final = frozenset(
    asking.__code__
    for asking in (
        torch.is_tensor, torch.jit.isinstance, torch._jit_internal._isinstance, torch._jit_internal.container_checker,
    )
)  # fmt: skip
"""torch's functions that ask for the class of an argument."""


def _is_users(frame: FrameType) -> bool:
    """Whether the frame runs code of the model, or of a library that is neither torch nor fxfuse."""
    return not _is_torchs(str(frame.f_globals.get("__name__")))


def _is_torchs(module: str) -> bool:
    """Whether the Python module of this name belongs to torch or fxfuse."""
    return module.split(".")[0] in ("torch", "fxfuse")


def class_of(tracer: Any, node: fx.Node) -> type:
    """The class that the node's value has at every call.

    An argument about which nothing is known is taken for a tensor, and noted in the tracer's `taken_for_tensors`.
    Raises TraceError where the class may differ from call to call.
    """
    found = _tensor_class(tracer, node)
    if found is None and node.op == "placeholder" and not str(node.target).startswith("*"):
        tracer.taken_for_tensors.add(str(node.target))
        found = torch.Tensor
    found = found or _other_class(tracer, node)
    if found is None:
        raise _unanswered(tracer, f"the class of '{node}' is asked for, which a graph does not know")
    return found


def _tensor_class(tracer: Any, node: fx.Node) -> type | None:
    """The value's class, torch.Tensor or that of a parameter, if it is surely a tensor; else None."""
    root = tracer.root
    if node.op == "get_attr":
        *path, name = str(node.target).split(".")
        owner = root
        for child in path:
            owner = owner._modules[child]
        found = {**vars(owner), **owner._buffers, **owner._parameters}.get(name)  # its __getattr__ gives proxies now
        return type(found) if isinstance(found, torch.Tensor) else None
    taken: set[str] = tracer.taken_for_tensors
    assumed = [item for item in node.graph.nodes if item.op == "placeholder" and item.target in taken]
    return torch.Tensor if node in assumed or node in tensors_of(root, node.graph, assumed) else None


MODES: Final = (
    "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_autocast_cpu_enabled",
    "get_autocast_dtype", "get_autocast_gpu_dtype", "get_autocast_cpu_dtype",
)  # fmt: skip
"""torch's functions that tell the current gradient mode and autocast."""


@contextlib.contextmanager
def modes_asked(root: nn.Module, asked: Callable[[str], None]) -> Iterator[None]:
    """A context in which `asked` gets the name of each of `MODES` that a model's code calls.

    The code may call them as attributes of torch, or by names in a Python module that defines one of the model's
    layers. Calls by torch's own modules do not count: they decide only how these compute, not what.
    """

    def telling(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def told(*args: Any, **kwargs: Any) -> Any:
            if _is_users(sys._getframe(1)):
                asked(name)
            return function(*args, **kwargs)

        return told

    functions = {name: getattr(torch, name) for name in MODES if hasattr(torch, name)}  # not every torch has all
    by_identity = {id(function): telling(name, function) for name, function in functions.items()}
    sources = {sys.modules.get(type(module).__module__) for module in root.modules()}
    names = [vars(source) for source in sources if source is not None and not _is_torchs(source.__name__)]
    with contextlib.ExitStack() as stack:
        for where in (vars(torch), *names):
            for name, value in list(where.items()):
                if id(value) in by_identity:
                    stack.callback(where.__setitem__, name, value)
                    where[name] = by_identity[id(value)]
        yield


_CLASSES: Final[dict[str, type]] = {
    "shape": torch.Size, "dtype": torch.dtype, "device": torch.device, "ndim": int, "dim": int, "numel": int,
    "ndimension": int, "nelement": int, "__len__": int, "is_cuda": bool, "requires_grad": bool, "layout": torch.layout,
    "is_contiguous": bool, "is_floating_point": bool, "is_complex": bool, "get_device": int, "element_size": int,
    "storage_offset": int,
}  # fmt: skip
"""Attributes and methods of a tensor that give something other than a tensor, and its class."""
_OF_NUMBERS: Final = frozenset(
    {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg, operator.pos}
)


def _other_class(tracer: Any, node: fx.Node) -> type | None:
    """The class of a value that is surely no tensor."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return None
    asks = node.target if node.op == "call_method" else node.args[1] if node.target is getattr else None
    if asks in ("size", "stride"):
        found: type | None = int
        if len(node.args) == 1 and not node.kwargs:
            found = torch.Size if asks == "size" else tuple
    else:
        found = None if asks is None else _CLASSES.get(str(asks))
    if found is not None:
        return found if _tensor_class(tracer, first) is not None else None
    if node.target is operator.getitem and _other_class(tracer, first) in (torch.Size, tuple):
        return _other_class(tracer, first) if isinstance(node.args[1], slice) else int
    if node.target in _OF_NUMBERS:
        classes = [_other_class(tracer, arg) if isinstance(arg, fx.Node) else type(arg) for arg in node.args]
        return int if all(cls is int for cls in classes) else None
    return None
