"""The module that optimize() returns: the model's own tensors under its own names, and a graph derived from it.

A chain of small functions runs before the graph's code. Each checks whether something (modes, hooks, arguments) differs
from the time of the trace, and knows what to call in that case.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import linecache
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import fx, nn

from fxfuse import channels_last, dump, ops, plans, recapture, stream_capture
from fxfuse.capture import GIVEN, VARIABLE_KEYWORDS, Captured, Constants, Untraced, fixed_in, has_own_call, trace
from fxfuse.cuda_graphs import Replays
from fxfuse.errors import FxfuseError
from fxfuse.garbage import uncollected
from fxfuse.graph_breaks import broken_at_modules, part_name, whole_again
from fxfuse.hooks import has_hooks
from fxfuse.listing import Listing, write_graphs, write_map, write_program
from fxfuse.locks import free_in_children
from fxfuse.patterns import MODE_DEPENDENT, Skipped, is_region_alone
from fxfuse.program import Program, Programs
from fxfuse.program.record import why_refused
from fxfuse.recapture import Recapture
from fxfuse.replacement import FusedRegion, Replaced, Settings, is_disabled, with_regions_replaced
from fxfuse.state import Attributes, same_attributes
from fxfuse.structure import OF_GRAPH_MODULES, Structure, changes, is_same, structure_of
from fxfuse.training import Training

logger = logging.getLogger("fxfuse")

_TABLES: Final = ("_parameters", "_modules", "_buffers")

_SHARED: Final = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set",
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
    "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
"""nn.Module's own attributes that a fused module shares with the model it was captured from."""


Arguments: TypeAlias = tuple[tuple[str, ...], Constants]
"""The arguments that decide which graph is right for a call: Captured.given and Captured.constants."""


@dataclass
class FusedState:
    """A FusedModule's own state. It is a single attribute, so that it hides only one name of the model's."""

    captured: Captured
    settings: Settings
    is_variant: bool = False
    """Whether another module calls this one for some arguments. That module has Dynamo's graphs for all arguments."""
    regions: tuple[FusedRegion, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    layouts: channels_last.Layouts = field(default_factory=channels_last.Layouts)
    modes: tuple[tuple[nn.Module, bool], ...] = ()
    """The modules whose mode decides what may be fused, with the mode that the graph was derived for."""
    variants: dict[Arguments, FusedModule] = field(default_factory=dict)
    """Graphs for calls with arguments that `captured` is not for. Each is made at the first such call."""
    own_attributes: frozenset[str] = frozenset()
    """Names of the module's attributes that the user did not give it."""
    structure: Structure = field(default_factory=Structure)
    """The modules that the graph was traced through, as they were at the trace."""
    outdated: int = 0
    """2 after an attribute of the model was set, 1 after a call since then, 0 after the graph was traced since then."""
    changes: int = 0
    """How many attributes have been set."""
    lock: Any = field(default_factory=lambda: free_in_children(threading.RLock()))
    """If several threads find the graph outdated, one derives a new graph and the others wait."""
    replays: Replays | None = None
    """The model's CUDA graphs, if it was asked for any."""
    programs: Programs | None = None
    """Runs calls without gradients."""
    training: Training | None = None
    """Runs calls that need gradients; None before the first such call."""
    recapture: Recapture | None = None
    """Dynamo's graphs of the model, if fx could not trace it whole."""
    is_part: bool = False
    """Whether another module runs this one as a part of its graph. That module looks after hooks, modes and changes."""
    parts: Parts | None = None
    """What runs in the place of the graph's own code, if some modules in it may do more than compute. None before the
    first call for which Dynamo has no graph."""
    is_prepared: bool = False
    """Whether the first call has compiled the kernels. Used for graphs of which a part runs as Python (`_prepared`)."""
    forget: Callable[[], Any] | None = None
    """Drops the plans of this graph's regions; called when another graph replaces it, or when the module dies."""

    @property
    def running(self) -> tuple[FusedState, ...]:
        """The states of all graphs that may have programs and training steps: of this one, and of its parts."""
        return (self, *map(state_of, () if self.parts is None else self.parts.each))


@dataclass(frozen=True)
class Parts:
    """A graph in parts, between modules that may do more than compute. Each part has programs and training steps."""

    whole: FusedModule
    """Calls the parts and the modules between them."""
    each: tuple[FusedModule, ...]


_STATE: Final = "_fxfuse"


def _root_of(module: nn.Module) -> nn.Module:
    """The captured model behind a fused module. Any other module, or a fused one under construction: itself."""
    state = module.__dict__.get(_STATE)
    return module if state is None else state.captured.root


def state_of(module: FusedModule) -> FusedState:
    """The module's own state; every other attribute of it is the model's."""
    state: FusedState = module._fxfuse  # an attribute of the instance comes before a child of that name
    return state


class FusedModule(fx.GraphModule):
    """The graph module that optimize() returns.

    Its graph is derived from the captured model. `train()` and `eval()` trace and derive it anew, since what a model
    does depends on its mode. Copies and pickles are made of the captured model and derive their own graph.
    """

    def __init__(
        self, captured: Captured, settings: Settings, cuda_graphs: bool | Replays = False, is_variant: bool = False,
        is_part: bool = False,
    ) -> None:  # fmt: skip
        root = captured.root
        super().__init__(root, fx.Graph(), type(root).__name__)
        # The same dictionaries: a parameter, a module or a hook that is replaced in one is replaced in the other.
        for name in _SHARED:
            if name in root.__dict__:
                self.__dict__[name] = root.__dict__[name]
        self.__dict__[_STATE] = state = FusedState(captured, settings, is_variant, is_part=is_part)
        state.replays = Replays() if cuda_graphs is True else cuda_graphs or None
        self.training = root.training
        self._derive(captured)
        if not is_part:
            _living.add(self)
        state.own_attributes = frozenset(self.__dict__)

    @uncollected()
    def _derive(self, captured: Captured, parts: Parts | None = None) -> None:
        """Makes the graph, and what the report says about it, from the captured model in its present mode.

        Args:
            parts: parts of the captured graph, in which calls are to run.
        """
        state = state_of(self)
        if state.forget is not None:
            state.forget()
        state.captured, state.variants, state.parts = captured, {}, parts
        state.modes, state.structure = ((), Structure()) if state.is_part else (_modes(captured), _structure(captured))
        is_own = not (state.is_variant or state.is_part)
        if state.recapture is None and is_own and not is_disabled() and _suits_dynamo(captured):
            state.recapture = Recapture(captured.root, state.settings)
        if state.replays is not None:
            state.replays = state.replays.fresh()
        if captured.graph is None:
            self.__dict__[_PYTHON_FORWARD] = _PythonForward(captured.root)
            replaced = Replaced(_python_graph())
        else:
            replaced = with_regions_replaced(captured, state.settings) if parts is None else _joined(parts)
        state.regions, state.skipped, state.layouts = replaced.regions, replaced.skipped, replaced.layouts
        finalizer = weakref.finalize(self, plans.forget, [region.number for region in replaced.regions])
        finalizer.atexit = False
        state.forget = finalizer
        self.graph = replaced.graph
        if dump.is_on():
            _dump(self)

    @property
    def graph(self) -> fx.Graph:
        """As GraphModule.graph, but torch.export gets a graph that calls this module.

        torch.export interprets a graph module's graph instead of calling the module. With this graph, arguments with
        defaults and modules that run as Python behave as in a call.
        """
        exporting = torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack()
        return _calling_graph(self) if exporting else super().graph

    @graph.setter
    def graph(self, graph: fx.Graph) -> None:
        fx.GraphModule.graph.__set__(self, graph)  # type: ignore[attr-defined]

    def recompile(self) -> Any:
        """As GraphModule.recompile. Calls with arguments that the graph was not traced for go to a variant."""
        with self._graph.on_generate_code(lambda _: functools.partial(_with_short_lookups, self)):
            code = super().recompile()
        drop_source_with(type(self).forward)
        self._code = self._graph.python_code(root_module="self").src  # for code that makes a GraphModule of this one
        # GraphModule's own __call__ costs a microsecond, and adds a line to errors. nn.Module's is inherited, not
        # assigned, because a trace of a model around this one patches it.
        if "__call__" in vars(type(self)):
            del type(self).__call__
        if _STATE in self.__dict__:
            state = state_of(self)
            if state.captured.graph is None and has_own_call(state.captured.root):
                type(self).__call__ = _calling(state.captured.root)  # type: ignore[method-assign]
            state.programs = Programs(state.captured.root, self._graph)
            if state.parts is not None or _may_have_parts(state):
                type(self).forward = _in_parts(type(self).forward)
            if state.programs.reason is None:
                type(self).forward = _programmed(type(self).forward)
            state.training = None
            if state.captured.graph is not None:
                type(self).forward = _trained(type(self).forward)
            if state.is_part:
                return code
            if state.captured.tensors:
                type(self).forward = _for_tensors(type(self).forward, state.captured)
            if state.captured.graph is not None and not isinstance(state.captured.root, fx.GraphModule):
                type(self).forward = _guarded(type(self).forward, state.captured)
            if state.structure.modules:
                type(self).forward = _watching(type(self).forward)
            if any(stops(state.captured)):
                state.is_prepared = False
                type(self).forward = _prepared(type(self).forward)
                if state.recapture is not None:
                    type(self).forward = _recaptured(type(self).forward)
            type(self).forward = _unless_hooked(type(self).forward, state.captured.root)
            if state.replays is not None:
                type(self).forward = _replaying(type(self).forward)
        return code

    def train(self, mode: bool = True) -> FusedModule:
        """As nn.Module.train; the graph is traced and fused anew if any module's mode changes."""
        if any(module.training != mode for module in self.modules()):
            super().train(mode)
            state_of(self).captured.root.training = mode
            self._retrace()
        return self

    def _retrace(self) -> None:
        """Traces the captured model as it is now, for the same arguments, and derives the graph from that."""
        state = state_of(self)

        def traced() -> Captured:
            before = state.captured
            captured = trace(before.root, is_fused, state.settings.strict, before.given, before.constants)
            return with_fused_children(captured, state.settings)

        self._renew(traced)

    def _renew(self, captured: Callable[[], Captured]) -> None:
        """Derives the graph anew; other threads' calls wait until it is there."""
        state = state_of(self)
        with state.lock:
            changes, state.outdated = state.changes, state.outdated or 1
            self._derive(captured())
            if state.changes == changes:  # else another thread has set an attribute
                state.outdated = 0

    @property
    def __class__(self) -> type:
        """The model's class, for `isinstance` in a forward that runs as Python and meets fused children."""
        if torch._guards.CompileContext.try_get() is not None:  # Dynamo finds a module's code by its class
            return type(self)
        return type(_root_of(self))

    @__class__.setter
    def __class__(self, value: type) -> None:
        state_of(self).captured.root.__class__ = value  # by torch's parametrisations: a class derived from the above

    def __setattr__(self, name: str, value: Any) -> None:
        """As nn.Module's, but an attribute that the model has is set on the model, where the model's code reads it."""
        is_module = isinstance(value, nn.Module)
        of_class = getattr(type(self), name, None)
        if not is_module and (name in OF_GRAPH_MODULES or isinstance(of_class, property)):
            object.__setattr__(self, name, value)  # even if a child of the model has this name
        elif name not in self.__dict__ and of_class is None and name in vars(_root_of(self)):
            root = _root_of(self)
            before = vars(root)[name]
            is_known = value is before or (is_same(value, before) and not callable(value))
            setattr(root, name, value)
            if not (is_known or isinstance(value, torch.Tensor)):  # tensors are read anew
                state = state_of(self)
                state.changes, state.outdated = state.changes + 1, 2
                if state.replays is not None:
                    state.replays = state.replays.fresh()
        else:
            super().__setattr__(name, value)

    def _fxfuse_tensor(self, module: nn.Module, name: str) -> Any:
        """getattr(module, name) of a tensor, in a fifth of the time: the graph reads every parameter at every call."""
        found: torch.Tensor | None = module._parameters.get(name)
        if found is None:
            found = module._buffers.get(name)
        if found is not None:
            return found
        try:
            return getattr(module, name)
        except AttributeError as error:
            path = next((path for path, item in self.named_modules() if item is module), "")
            raise FxfuseError(
                f"'{path}.{name}' is gone: the model, whose tables of parameters this one shares, was pruned or "
                "parametrised after fxfuse.optimize(); call fxfuse.optimize again"
            ) from error

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        for table in _TABLES:  # as nn.Module's; all other names are the model's
            if table in own and name in own[table]:
                return own[table][name]
        if _STATE not in own or name.startswith("__"):
            return super().__getattr__(name)
        return getattr(state_of(self).captured.root, name)  # configuration that the model keeps in attributes

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(state_of(self).captured.root)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(state_of(self).captured.root)  # type: ignore[call-overload, no-any-return]

    def __getitem__(self, index: Any) -> Any:
        return state_of(self).captured.root[index]  # type: ignore[index]

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedModule:
        state = state_of(self)
        extras = copy.deepcopy(_extras(self), memo)
        root = copy.deepcopy(state.captured.root, memo)
        twin = _rebuild(root, state.settings, extras, state.replays is not None)
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> tuple[Callable[..., FusedModule], tuple[Any, ...]]:
        state = state_of(self)
        return _rebuild, (state.captured.root, state.settings, _extras(self), state.replays is not None)

    def __reduce_package__(self, exporter: Any) -> tuple[Callable[..., FusedModule], tuple[Any, ...]]:
        """For torch.package, as __reduce__: fx's own would store this graph, and everything the module knows."""
        _, arguments = self.__reduce__()
        return _rebuild_from_package, arguments


_living: Final[weakref.WeakSet[FusedModule]] = weakref.WeakSet()


def listing_of(module: FusedModule, name: str) -> Listing:
    """The Listing of a module's graph, for people: its captured and fused form, its regions and its programs."""
    state = state_of(module)
    programs = tuple(program for one in state.running if one.programs is not None for program in one.programs.programs)
    return Listing(name, state.captured.graph, module._graph, state.regions, programs)


def _dump(module: FusedModule) -> None:
    """Writes FXFUSE_DUMP's files about a graph, now and whenever more is known."""
    state, name = state_of(module), type(_root_of(module)).__name__
    folder, alive = dump.new_name(name), weakref.ref(module)
    write_graphs(folder, listing_of(module, name))

    def rewrite() -> None:
        module = alive()
        if module is not None:
            write_map(folder, listing_of(module, name))

    dump.when_planned([region.number for region in state.regions], rewrite)

    def program_made(number: int, program: Program) -> None:
        write_program(folder, number, program)
        rewrite()

    if state.programs is not None:
        state.programs.when_made = program_made


def _derive_without(row: ops.PointwiseOp) -> None:
    """Derives all graphs anew that use an operation which register_pointwise has redefined.

    Graphs that Dynamo or torch.export captured are not captured again: a function that is no longer a spelling computes
    what it always did. Other models are traced again, because the code that they call may have changed.
    """
    changed = [module for module in list(_living) if _has_to_do_with(row, state_of(module))]
    for module in changed:
        state = state_of(module)
        if isinstance(state.captured.root, fx.GraphModule):
            module._renew(lambda captured=state.captured: captured)  # type: ignore[misc]
        else:
            module._retrace()
    for module in list(_living) if changed else ():
        state = state_of(module)
        if state.replays is not None:  # its CUDA graphs may contain what another module runs
            state.replays = state.replays.fresh()


def _has_to_do_with(row: ops.PointwiseOp, state: FusedState) -> bool:
    if any(row.is_called_in(region.epilogue) for region in state.regions):
        return True
    root, graph = state.captured.root, state.captured.graph
    for node in graph.nodes if graph is not None else ():
        target = type(root.get_submodule(str(node.target))) if node.op == "call_module" else node.target
        epilogues = [arg for arg in node.args if isinstance(arg, str)] if node.op == "call_function" else []
        if any(map(row.is_called_in, epilogues)) or (node.op.startswith("call") and target in row.spellings):
            return True
    return False


ops.on_replacement.append(_derive_without)


def drop_source_with(forward: Callable[..., Any]) -> None:
    """Frees the text of a graph's code together with the code. fx, and linecache for tracebacks, would keep it."""
    assert isinstance(forward, types.FunctionType)
    name = forward.__code__.co_filename
    if name.startswith(_SOURCE_OF_ONE):
        weakref.finalize(forward.__code__, _drop_source, name).atexit = False


_SOURCE_OF_ONE: Final = "<eval_with_key>"
"""The prefix of the file names that fx gives to code of a single graph module."""


def _drop_source(name: str) -> None:
    kept: dict[str, str] = getattr(getattr(fx.graph_module, "_loader", None), "eval_cache", {})
    kept.pop(name, None)
    linecache.cache.pop(name, None)


def _with_short_lookups(module: FusedModule, code: list[str]) -> list[str]:
    """The graph's code, with modules and tensors looked up directly in the tables of the modules that hold them.

    nn.Module.__getattr__ takes half a microsecond for each name of a path, and a region reads up to six.
    """
    short: dict[str, tuple[str, str]] = {}
    for node in module._graph.nodes:
        if node.op not in ("get_attr", "call_module") or node.target == _PYTHON_FORWARD:
            continue
        *path, name = str(node.target).split(".")
        if not _has_tables(module, path):
            continue
        if node.op == "get_attr":
            short[node.name] = _attribute_path(node.target), f"self._fxfuse_tensor({_module(path)}, {name!r})"
        else:
            short[node.name] = _attribute_path(node.target), _module([*path, name])

    def shortened(line: str) -> str:
        node, equals, value = line.partition(" = ")
        long, instead = short.get(node, ("", ""))
        return f"{node}{equals}{instead}{value[len(long) :]}" if long and value.startswith(long) else line

    return [shortened(line) for line in code]


def _has_tables(module: nn.Module, path: Sequence[str]) -> bool:
    """Whether every name of the path is in its module's table, and names a module that has tables of its own."""
    for name in path:
        child = module._modules.get(name)
        if child is None or isinstance(child, torch.jit.ScriptModule):  # whose tables are no dictionaries
            return False
        module = child
    return True


def _attribute_path(target: Any) -> str:
    """The path of an attribute as fx writes it in code."""
    path = "self"
    for name in str(target).split("."):
        path = f"{path}.{name}" if name.isidentifier() else f'getattr({path}, "{name}")'
    return path


def _module(path: Sequence[str]) -> str:
    return "self" + "".join(f"._modules[{name!r}]" for name in path)


def _extras(module: FusedModule) -> dict[str, Any]:
    """Attributes that the user gave the module."""
    own = state_of(module).own_attributes
    return {name: value for name, value in module.__dict__.items() if name not in own}


def _variant(module: FusedModule, arguments: Arguments) -> FusedModule:
    """The model, traced for calls that give these arguments other values than their defaults."""
    state = state_of(module)
    if arguments not in state.variants:
        root, settings = state.captured.root, state.settings
        given, constants = arguments
        logger.info("fxfuse: %s is traced for arguments %s %s", type(root).__name__, list(given), dict(constants))
        captured = trace(root, is_fused, settings.strict, given, constants)
        state.variants[arguments] = FusedModule(with_fused_children(captured, settings), settings, is_variant=True)
    return state.variants[arguments]


def _rebuild(root: nn.Module, settings: Settings, extras: dict[str, Any], cuda_graphs: bool) -> FusedModule:
    """A new fused module of `root`, a captured model. Its modules that run as Python have fused children already."""
    captured = trace(root, is_fused, settings.strict)
    fused = FusedModule(with_fused_children(captured, settings), settings, cuda_graphs)
    fused.__dict__.update(extras)
    return fused


def _rebuild_from_package(importer: Any, *arguments: Any) -> FusedModule:
    return _rebuild(*arguments)


def _modes(captured: Captured) -> tuple[tuple[nn.Module, bool], ...]:
    if captured.graph is None:
        return ()
    called = {str(node.target) for node in captured.graph.nodes if node.op == "call_module"}
    modules = [captured.root.get_submodule(path) for path in sorted(called)]
    return tuple((module, module.training) for module in modules if isinstance(module, MODE_DEPENDENT))


def _structure(captured: Captured) -> Structure:
    """The structure of the modules that the graph was traced through: not those run as Python or fused on their own."""
    if captured.graph is None:
        return Structure()
    apart = {captured.root.get_submodule(untraced.path) for untraced in captured.untraced}
    return structure_of(
        captured.root, lambda module: module in apart or is_fused(module) or isinstance(module, torch.jit.ScriptModule)
    )


def changes_since(fast: nn.Module, model: nn.Module) -> list[str]:
    """The changes, in words, to what decided an optimised model's graphs: in it, or in the model it was made of.

    Empty for modules that optimize() did not return.
    """
    found: dict[str, None] = {}
    model = _root_of(getattr(model, "_orig_mod", model))
    for path, fused in fast.named_modules():
        if not isinstance(fused, FusedModule):
            continue
        structure, prefix = state_of(fused).structure, f"{path}." if path else ""
        try:
            originals = [fused, model.get_submodule(path)]
        except AttributeError:
            found[f"module '{path}' is missing"] = None
            originals = [fused]
        for original in originals:
            found.update(dict.fromkeys(changes(structure, _root_of(original), prefix, original is fused, _root_of)))
    return list(found)


def _calling(root: nn.Module) -> Callable[..., Any]:
    """A `__call__` for the fused module of `root`, whose class defines its own `__call__`. Both have the same hooks."""

    stand_in = _stand_in(root)

    def call(self: FusedModule, *args: Any, **kwargs: Any) -> Any:
        # checkpoints run a forward again, in training; hooks are given the module that they are called for
        if stand_in is None or root.training or torch.compiler.is_compiling() or has_hooks(root):
            return root(*args, **kwargs)
        module = object.__new__(stand_in)
        object.__setattr__(module, "__dict__", root.__dict__)
        object.__setattr__(module, "fused", self)
        return module(*args, **kwargs)

    return _with_own_code(call)


def _stand_in(root: nn.Module) -> type[nn.Module] | None:
    """A subclass of the model's class with a fused module's forward, which the class's own `__call__` calls in the end.

    None if making a subclass runs other code. An instance has the model's own attributes.
    """
    kind = type(root)
    if type(kind) is not type or any("__init_subclass__" in vars(base) for base in kind.__mro__[:-1]):
        return None

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return type(self.fused).forward(self.fused, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__slots__": ("fused",), "forward": forward, "__module__": kind.__module__})


_GLOBAL_HOOKS: Final = tuple(
    getattr(torch.nn.modules.module, f"_global_{name}_hooks")
    for name in ("forward", "forward_pre", "backward", "backward_pre")
)


def _unless_hooked(forward: Callable[..., Any], root: nn.Module) -> Callable[..., Any]:
    """`forward`, or that of `root`, which calls its children as modules, while hooks for all modules are registered.

    Also that of `root` while Dynamo captures a model around this one whole, and in comparisons with eager.
    """
    before_forward, after_forward, backward, before_backward = _GLOBAL_HOOKS

    @functools.wraps(forward)
    def unless_hooked(self: FusedModule, *args: Any, **kwargs: Any) -> Any:
        if before_forward or after_forward or backward or before_backward:
            return root.forward(*args, **kwargs)
        # called through its module: Dynamo of torch 2.3 would overwrite a global name of this module with the answer
        if recapture.is_eager() or (torch.compiler.is_compiling() and recapture.is_capturing()):
            return root.forward(*args, **kwargs)
        return forward(self, *args, **kwargs)

    return _with_own_code(unless_hooked)


def _programmed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, the graph's own code, or a program in its place."""

    @functools.wraps(forward)
    def programmed(self: FusedModule, *args: Any, **kwargs: Any) -> Any:
        programs = state_of(self).programs
        assert programs is not None
        if programs.reason is not None:
            return forward(self, *args, **kwargs)
        return programs.call(functools.partial(forward, self), args, kwargs)

    return _with_own_code(programmed)


def _trained(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, or a training step in its place."""

    @functools.wraps(forward)
    def trained(self: FusedModule, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        state = state_of(self)
        training = state.training
        if training is None:
            assert state.captured.graph is not None
            fused = functools.partial(_fused_half, state.settings)
            state.training = training = Training(
                state.captured.root, state.captured.graph, fused, state.settings.cuda_graphs
            )
        return training.call(functools.partial(forward, self), args, kwargs)

    return _with_own_code(trained)


def _may_have_parts(state: FusedState) -> bool:
    """Whether there are modules in a graph that no program can hold, so that what is between them may have programs."""
    root, graph = state.captured.root, state.captured.graph
    if graph is None or state.is_part or isinstance(root, fx.GraphModule) or is_disabled():
        return False
    return any(why_refused(root, node) is not None for node in graph.nodes)


def _parts(captured: Captured, settings: Settings) -> Parts | None:
    """The parts of a graph between modules that may do more than compute; None if there are none that are worth it."""
    assert captured.graph is not None
    each: list[FusedModule] = []

    def made(graph: fx.Graph) -> Callable[..., Any]:
        part = FusedModule(Captured(captured.root, graph), settings, is_part=True)

        def run(*args: Any) -> Any:  # not as a module: it shares the hooks of the whole
            return type(part).forward(part, *args)

        each.append(part)
        run.__name__ = part_name(len(each))
        return run

    graph = broken_at_modules(captured.root, captured.graph, made)
    if graph is None:
        return None
    return Parts(FusedModule(Captured(captured.root, graph), settings, is_part=True), tuple(each))


def _joined(parts: Parts) -> Replaced:
    """What was fused in all parts of a graph, and between them."""
    states = [state_of(part) for part in (parts.whole, *parts.each)]
    regions, skipped, conversions = (
        tuple(itertools.chain.from_iterable(found))
        for found in zip(*((one.regions, one.skipped, one.layouts.conversions) for one in states), strict=True)
    )
    layouts = channels_last.Layouts(sum(one.layouts.convolutions for one in states), conversions)
    bodies = {part_name(number): part._graph for number, part in enumerate(parts.each, 1)}
    return Replaced(whole_again(parts.whole._graph, bodies), regions, skipped, layouts)


def _in_parts(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, the graph's own code, or its parts in its place. A compiler gets the code as a whole.

    The parts are made at the first call that Dynamo neither computes nor may compute later: few models need them.
    """
    is_known = False

    @functools.wraps(forward)
    def in_parts(self: FusedModule, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_known
        state = state_of(self)
        if torch.compiler.is_compiling() or recapture.is_waiting():
            return forward(self, *args, **kwargs)
        if state.parts is None and not is_known and not stream_capture.is_underway():
            with state.lock:
                parts = None if is_known else _parts(state.captured, state.settings)
                is_known = True
                if parts is not None:
                    self._derive(state.captured, parts)
        if state.parts is None:
            return forward(self, *args, **kwargs)
        return type(state.parts.whole).forward(state.parts.whole, *args, **kwargs)

    return _with_own_code(in_parts)


def _fused_half(settings: Settings, graph_module: fx.GraphModule, together: Sequence[int] = ()) -> FusedModule:
    """The forward or the backward of a training step, with its regions fused. `together`: as `Programs.together`."""
    half = FusedModule(Captured(graph_module, copy.deepcopy(graph_module.graph), is_laid_out=True), settings)
    programs = state_of(half).programs
    assert programs is not None, "every fused module has some"
    programs.together = together
    return half


def _watching(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, but first the graph is derived anew if the modules that it was traced through have changed.

    A dropout or normalisation has changed its mode on its own, a module was replaced or got a hook, or an attribute was
    set.
    """

    @functools.wraps(forward)
    def watching(self: FusedModule, *args: Any, **kwargs: Any) -> Any:
        state = state_of(self)
        if _has_other_modes(state):
            if stream_capture.is_underway():
                return state.captured.root.forward(*args, **kwargs)
            with state.lock:
                if _is_outdated(state):
                    self._retrace()
                elif _has_other_modes(state):
                    self._renew(lambda: state.captured)
            return type(self).forward(self, *args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return state.captured.root.forward(*args, **kwargs) if state.outdated else forward(self, *args, **kwargs)
        if state.outdated == 2:  # it may be set before every call: too often for a trace each time
            state.outdated = 1
            return state.captured.root.forward(*args, **kwargs)
        if _is_outdated(state):
            if stream_capture.is_underway():  # a trace would read the state of the GPU's random numbers
                return state.captured.root.forward(*args, **kwargs)
            with state.lock:
                if _is_outdated(state):
                    self._retrace()
            return type(self).forward(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    return _with_own_code(watching)


def _has_other_modes(state: FusedState) -> bool:
    return any(module.training is not mode for module, mode in state.modes)


def _is_outdated(state: FusedState) -> bool:
    """Whether the model has changed since the graph was captured, apart from its mode."""
    return bool(state.outdated) or not state.structure.is_as_traced(_root_of)


# Dynamo of torch 2.3 reads the code below. It supports neither `bool | int` nor frozenset() of a generator
_PLAIN: Final = (bool, int, float, str)
_TENSORS: Final = (torch.Tensor, fx.Proxy)
_REQUIRED: Final = "an argument without a default, traced as an input"


def _for_tensors(forward: Callable[..., Any], captured: Captured) -> Callable[..., Any]:
    """`forward`, for calls in which the arguments that `captured` takes for tensors are tensors.

    Other calls run as Python, because the model's forward asked for the class of these arguments.
    """
    names = list(inspect.signature(forward).parameters)[1:]
    positions = tuple((names.index(name), name) for name in sorted(captured.tensors))

    @functools.wraps(forward)
    def for_tensors(self: FusedModule, *args: Any, **kwargs: Any) -> Any:
        for position, name in positions:
            value = args[position] if position < len(args) else kwargs.get(name)
            if not isinstance(value, _TENSORS):
                return captured.root.forward(*args, **kwargs)
        return forward(self, *args, **kwargs)

    return _with_own_code(for_tensors)


def _guarded(forward: Callable[..., Any], captured: Captured) -> Callable[..., Any]:
    """`forward`, for calls with the arguments that `captured` is for. Calls with others go to a variant."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    names = [parameter.name for parameter in parameters]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    defaults = {parameter.name: _REQUIRED for parameter in parameters if parameter.kind not in variable}
    defaults.update((name, value) for name, value in captured.defaults.items() if name in names)
    positions = {names.index(name): name for name in defaults}
    takes_more = VARIABLE_KEYWORDS in captured.defaults
    traced_for = (captured.given, captured.constants)
    positional = [item for item in parameters if item.kind is not inspect.Parameter.KEYWORD_ONLY]
    required = sum(defaults.get(item.name) is _REQUIRED for item in positional)
    most = required if traced_for == ((), ()) else -1  # up to so many tensors need no further check

    def is_default(given: Any, value: Any) -> bool:
        if value is _REQUIRED:
            return isinstance(given, torch.Tensor) or bool(fixed_in(given) == GIVEN)
        return given is value or (isinstance(value, _PLAIN) and type(given) is type(value) and given == value)

    @functools.wraps(forward)
    def guarded(self: FusedModule, *args: Any, **kwargs: Any) -> Any:
        if len(args) <= most and not kwargs:
            for arg in args:
                if not isinstance(arg, torch.Tensor):
                    break
            else:
                return forward(self, *args)
        passed = {positions[i]: arg for i, arg in enumerate(args) if i in positions}
        passed.update((name, value) for name, value in kwargs.items() if name in defaults)
        others = {name: value for name, value in passed.items() if not is_default(value, defaults[name])}
        if takes_more:
            others.update((name, value) for name, value in kwargs.items() if name not in names)
        fixed = {name: fixed_in(value) for name, value in others.items()}
        in_order = sorted(fixed)  # Dynamo cannot sort pairs
        constants = tuple([(name, fixed[name]) for name in in_order if fixed[name] != GIVEN])
        given = tuple([name for name in in_order if fixed[name] == GIVEN])
        if (given, constants) == traced_for:
            return forward(self, *args, **kwargs)
        if (given, constants) not in state_of(self).variants and (
            torch.compiler.is_dynamo_compiling() or stream_capture.is_underway()
        ):
            return captured.root.forward(*args, **kwargs)  # Dynamo traces root itself, and cannot trace a trace
        # not called as a module: it shares the hooks, which are run already
        return _variant(self, (given, constants)).forward(*args, **kwargs)

    return _with_own_code(guarded)


def _suits_dynamo(captured: Captured) -> bool:
    """Whether Dynamo may capture the model: a part runs as Python, and it has no random generators of its own.

    Dynamo takes the numbers that Python's generators draw during a capture for constants. Before torch 2.6 it also
    forgets what a forward does to other objects.
    """
    return DYNAMO_KEEPS_OBJECTS and any(stops(captured)) and not Attributes(captured.root.modules()).hold_generators()


def stops(captured: Captured) -> Iterator[str]:
    """Why parts of the model run as Python: the reasons why tracing stopped, in it or in children with own graphs."""
    yield from (untraced.reason for untraced in captured.untraced)
    for node in captured.graph.nodes if captured.graph is not None else ():
        module = captured.root.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, FusedModule):
            yield from stops(state_of(module).captured)


DYNAMO_KEEPS_OBJECTS: Final = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)


def _prepared(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, a part of which runs as Python. torch computes the first call, while all kernels compile together.

    Looking ahead is not possible here: that Python must not run without data.
    """

    @functools.wraps(forward)
    def prepared(self: FusedModule, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or state_of(self).is_prepared:
            return forward(self, *args, **kwargs)
        with plans.preparing_together():
            result = forward(self, *args, **kwargs)
        state_of(self).is_prepared = True
        return result

    return _with_own_code(prepared)


def _recaptured(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, a part of which runs as Python, or Dynamo's graph of the whole."""

    @functools.wraps(forward)
    def recaptured(self: FusedModule, *args: Any, **kwargs: Any) -> Any:
        whole = state_of(self).recapture
        if whole is None or torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        return whole.call(functools.partial(forward, self), args, kwargs)

    return _with_own_code(recaptured)


def _replaying(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, replayed as a CUDA graph where that is possible."""

    @functools.wraps(forward)
    def replaying(self: FusedModule, *args: Any, **kwargs: Any) -> Any:
        replays = state_of(self).replays
        if replays is None or torch.compiler.is_compiling() or any(_GLOBAL_HOOKS):
            return forward(self, *args, **kwargs)
        return replays.call(self, forward, args, kwargs)

    return _with_own_code(replaying)


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its own code object: Dynamo keeps what it compiles by code object, a few results for each."""
    assert isinstance(function, types.FunctionType)
    function.__code__ = function.__code__.replace()
    return function


def _calling_graph(module: FusedModule) -> fx.Graph:
    """A graph that calls `module`. It is for fx.Interpreter, by which torch.export runs graphs."""

    def call(args: Sequence[Any]) -> Any:
        with same_attributes(module):  # torch.export restores those of modules that it knows, not the captured model's
            return nn.Module.__call__(module, *args)  # as a module, hooks included: an interpreter calls none

    graph = fx.Graph()
    args = graph.placeholder("*args")
    graph.output(graph.call_function(call, (args,)))
    return graph


# ------------------------------------------------------------------------------ models that run as Python

_PYTHON_FORWARD: Final = "_python_forward"


@dataclass(frozen=True)
class _PythonForward:
    """The forward of a model that cannot be traced; not a Module, so that it adds no names to state_dict()."""

    root: nn.Module

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self.root.forward(*args, **(kwargs or {}))  # fx.Interpreter gives an empty list


def _python_graph() -> fx.Graph:
    """A graph that hands whatever it is given to the model's own forward."""
    graph = fx.Graph()
    args = graph.placeholder("*args")
    kwargs = graph.placeholder("**kwargs")
    forward = graph.create_node("get_attr", _PYTHON_FORWARD)
    graph.output(graph.call_method("run", (forward, args, kwargs)))
    return graph


# ------------------------------------------------------------------------- children of what runs as Python


def is_fused(module: nn.Module) -> bool:
    return isinstance(module, FusedModule)


def with_fused_children(captured: Captured, settings: Settings) -> Captured:
    """`captured`, with the children of modules that run as Python replaced by their own fused graphs."""
    for untraced in captured.untraced:
        module = captured.root.get_submodule(untraced.path)
        _fuse_children(module, settings)
        if untraced.path and not isinstance(module, torch.jit.ScriptModule):
            parent, _, name = untraced.path.rpartition(".")
            alone = Captured(module, None, (Untraced("", untraced.reason),))
            setattr(captured.root.get_submodule(parent), name, FusedModule(alone, settings))
    return captured


def _fuse_children(module: nn.Module, settings: Settings) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):  # no forward of their own
            _fuse_children(child, settings)
        elif (
            isinstance(child, torch.jit.ScriptModule)
            or is_fused(child)
            or (_is_single_layer(child) and not _is_worth_while(child))
        ):
            continue  # nothing to fuse it with
        else:
            captured = with_fused_children(trace(child, is_fused, settings.strict), settings)
            setattr(module, name, FusedModule(captured, settings))


def _is_single_layer(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not list(module.children())


def _is_worth_while(layer: nn.Module) -> bool:
    if not isinstance(layer, nn.Linear | nn.Conv2d):  # a normalisation gains less than a graph module costs
        return False
    kind = "linear" if isinstance(layer, nn.Linear) else "conv2d"
    if kind == "linear" and layer.weight.dtype != torch.float32:  # nor does a product gain enough, even with few rows
        return False
    return is_region_alone(kind, layer.weight, layer.bias is not None)
