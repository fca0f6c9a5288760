"""torch.compile(model, backend="fxfuse").

Dynamo finds the backend by an entry point: that of the installed package (pyproject.toml), so that fxfuse need not be
imported, or the one that importing fxfuse adds. Dynamo captures the model, with graph breaks where Python must run,
symbols for sizes that vary, and parameters as inputs. Its graphs are matched and replaced like those of `optimize`.
They do not go through AOTAutograd first: it would take linears and batch normalisations apart, only for them to be put
together again. Gradients work as for every optimised model.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, Literal

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fxfuse import attention_modules, plans
from fxfuse.capture import Captured
from fxfuse.cuda_graphs import Replays
from fxfuse.errors import FxfuseError, FxfuseWarning
from fxfuse.graph_breaks import broken, parts_of
from fxfuse.in_parts import compiled_by_parts, has_parts
from fxfuse.module import FusedModule, state_of
from fxfuse.replacement import Settings

REDUCE_OVERHEAD: Final = "reduce-overhead"
_MODES: Final = ("default", REDUCE_OVERHEAD, "max-autotune", "max-autotune-no-cudagraphs")

_graphs: Final[weakref.WeakKeyDictionary[FusedModule, tuple[_Caller, ...]]] = weakref.WeakKeyDictionary()
"""The graphs in use, in the order in which they were compiled, each with the models whose call needed it."""


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """One of Dynamo's graphs with its regions fused: what torch.compile(model, backend="fxfuse") runs.

    Args:
        gm, example_inputs: as Dynamo gives them.
        mode: torch.compile's. On a GPU "reduce-overhead" sets the option `cuda_graphs`. Elsewhere it changes nothing,
            and a warning says so once. Candidates are measured in every mode, so "max-autotune" adds nothing.
        options: torch.compile's: `strict`, `fp32` and `cuda_graphs`, as fxfuse.optimize takes them. CUDA graphs capture
            the second call of a kind without gradients, since there is no example, and read parameters and buffers in
            place.

    The first call computes with torch and compiles all kernels that it would have needed, in parallel.

    Raises FxfuseError for other modes and options; the message lists the known ones.
    """
    if mode is not None and mode not in _MODES:
        raise FxfuseError(f"torch.compile's backend 'fxfuse' has no mode {mode!r}; it has {', '.join(_MODES)}")
    given = dict(options or {})
    known = [item.name for item in dataclasses.fields(Settings)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise FxfuseError(
            f"torch.compile's backend 'fxfuse' has no option {unknown[0]!r}; it has {', '.join(known)}, "
            "which are fxfuse.optimize's"
        )
    given.setdefault("cuda_graphs", mode == REDUCE_OVERHEAD and _on_gpu(gm, example_inputs))
    settings, callers = Settings(**given), _callers(gm)
    if has_parts(gm, example_inputs):
        by_parts = compiled_by_parts(gm, example_inputs, settings, lambda half: _graphs.update({half: callers}))
        if by_parts is not None:
            return by_parts
    fused = fused_graph(gm, settings, Replays(lends=True) if settings.cuda_graphs else False)
    _graphs[fused] = callers
    return prepared(fused)


def _on_gpu(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether the graph has tensors on a GPU, as mode="reduce-overhead" needs. If not, a warning says so once."""
    leaves = pytree.tree_leaves((list(example_inputs), *(list(named) for named in (gm.parameters(), gm.buffers()))))
    found = any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in leaves)
    if not found and not _overhead_stays:
        _overhead_stays.append(True)
        warnings.warn(
            f'fxfuse: mode="{REDUCE_OVERHEAD}" replays CUDA graphs, and this model is not on a GPU: '
            "it runs as it does without that mode.", FxfuseWarning, stacklevel=3,
        )  # fmt: skip
    return found


_overhead_stays: Final[list[bool]] = []
"""Not empty once the warning was given."""


def compiled_graphs(model: nn.Module | None = None) -> tuple[FusedModule, ...]:
    """The graphs that torch.compile(…, backend="fxfuse") uses now, in the order in which they were compiled.

    Args:
        model: a model, or what torch.compile made of it: only the graphs that were compiled during calls of it. Dynamo
            shares them between models of one class whose parameters have the same shapes.
    """
    if model is None:
        return tuple(_graphs)
    wanted = _Caller.of(model)
    return tuple(graph for graph, callers in list(_graphs.items()) if any(map(wanted.is_like, callers)))


@dataclass(frozen=True)
class _Caller:
    """A model during whose call a graph was compiled."""

    module: weakref.ref[nn.Module]
    kind: type
    tensors: frozenset[tuple[str, tuple[int, ...], torch.dtype]]
    """The name, shape and dtype of each of its parameters and buffers."""

    @classmethod
    def of(cls, module: nn.Module) -> _Caller:
        module = getattr(module, "_orig_mod", module)  # what torch.compile wraps
        tensors = [*module.named_parameters(), *module.named_buffers()]
        known = [(name, tensor) for name, tensor in tensors if not is_lazy(tensor)]
        described = frozenset((name, tuple(tensor.shape), tensor.dtype) for name, tensor in known)
        return cls(weakref.ref(module), type(module), described)

    def is_like(self, other: _Caller) -> bool:
        return self.module() is other.module() or (self.kind, self.tensors) == (other.kind, other.tensors)


def _callers(gm: fx.GraphModule) -> tuple[_Caller, ...]:
    """The models that are being called now: those whose methods are on the stack, except `gm`, the graph they need."""
    found: dict[int, nn.Module] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
        if isinstance(owner, nn.Module) and owner is not gm:
            found.setdefault(id(owner), owner)
        frame = frame.f_back
    return tuple(map(_Caller.of, found.values()))


def fused_graph(gm: fx.GraphModule, settings: Settings, cuda_graphs: Replays | Literal[False] = False) -> FusedModule:
    """The graph with its regions fused, also in the graphs that it checkpoints or that it is broken into."""
    gm = broken(gm, lambda part: fused_graph(part, settings))
    graph = copy.deepcopy(gm.graph)
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "tag_activation_checkpoint":
            body, node.target = node.args[0].target, recomputed
            setattr(gm, body, fused_graph(getattr(gm, body), settings))
    attention_modules.take_apart(graph, gm)
    return FusedModule(Captured(gm, graph), settings, cuda_graphs)


_FIRST_CALLS: Final = 6
"""The number of first calls in which every part of a graph makes its training step, if all calls are of one kind."""


def prepared(fused: FusedModule) -> Callable[..., Any]:
    """Wraps a graph. Its first calls compute by torch and compile all kernels, those of all parts together."""
    return plans.prepared_by_first_calls(fused, _FIRST_CALLS if parts_of(fused) else 1)


def recomputed(body: FusedModule, *args: Any, use_reentrant: bool = False, **options: Any) -> Any:
    """Runs a part of the graph under torch.utils.checkpoint. It replaces Dynamo's operator, which would leave this to
    AOTAutograd."""
    root = state_of(body).captured.root
    context = root.meta.get("_checkpoint_context_fn") if isinstance(root, fx.GraphModule) else None
    if context is not None:  # it decides what selective checkpointing keeps
        options["context_fn"] = context
    return checkpoint(body, *args, use_reentrant=False, **options)


recomputed.is_checkpoint = True  # type: ignore[attr-defined]  # for training.py


# ------------------------------------------------------------------------------------------- registration

_NAME: Final = "fxfuse"
_REGISTRY: Final = "torch._dynamo.backends.registry"


class _Distribution(importlib.metadata.Distribution):
    """fxfuse in the form of an installed package, as far as entry points go."""

    def read_text(self, filename: str) -> str | None:
        texts = {
            "METADATA": f"Name: {_NAME}\nVersion: {sys.modules[_NAME].__version__}\n",
            "entry_points.txt": f"[torch_dynamo_backends]\n{_NAME} = {_NAME}.dynamo:{compile_graph.__name__}\n",
        }
        return texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: {_NAME} is not installed")


class _Finder(importlib.metadata.DistributionFinder):
    """Makes `_Distribution` known to importlib.metadata; imports nothing. Installed packages come before it."""

    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        name = getattr(context, "name", None)
        return [_Distribution()] if name is None or name.lower() == _NAME else []


def _register() -> None:
    """Makes the backend known to Dynamo, without importing Dynamo, which takes a second."""
    registry = sys.modules.get(_REGISTRY)
    if registry is None:
        sys.meta_path.append(_Finder())
    elif _NAME not in registry._BACKENDS:  # it may have looked for entry points already
        registry.register_backend(compile_graph, name=_NAME)


_register()
