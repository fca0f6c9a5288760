"""torch.compile(model, backend="fxfuse").

Dynamo finds it by an entry point (pyproject.toml), so that fxfuse need not be imported. Dynamo captures the model:
with graph breaks where Python must run, symbols for sizes that vary, and parameters as inputs. Its graphs are matched
and replaced as those of `optimize` are. They are taken as they come, above AOTAutograd, which would take linears and
batch normalisations apart only for them to be put together again; gradients come as from every optimised model.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import fx
from torch.utils.checkpoint import checkpoint

from fxfuse import plans
from fxfuse.capture import Captured
from fxfuse.errors import FxfuseError
from fxfuse.optimize import FusedModule, Settings, state_of

_MODES: Final = ("default", "max-autotune", "max-autotune-no-cudagraphs")

_graphs: Final[weakref.WeakSet[FusedModule]] = weakref.WeakSet()


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
        mode: torch.compile's. Candidates are measured in every mode ("max-autotune" asks for nothing more).
        options: torch.compile's: `strict` and `fp32`, as fxfuse.optimize takes them.

    The first call computes with torch and compiles all kernels that it would have needed, in parallel.

    Raises FxfuseError for other modes and options.
    """
    if mode is not None and mode not in _MODES:
        raise FxfuseError(f"backend 'fxfuse' has no mode {mode!r}; it has {', '.join(_MODES)}")
    given = dict(options or {})
    known = [item.name for item in dataclasses.fields(Settings)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise FxfuseError(f"backend 'fxfuse' has no option {unknown[0]!r}; it has {', '.join(known)}")
    fused = _fused(gm, Settings(**given))
    _graphs.add(fused)
    return _prepared_by_first_call(fused)


def compiled_graphs() -> tuple[FusedModule, ...]:
    """The graphs that torch.compile(…, backend="fxfuse") uses now, for `explain`; in no particular order."""
    return tuple(_graphs)


def _fused(gm: fx.GraphModule, settings: Settings) -> FusedModule:
    """The graph with its regions fused, and those of the graphs that it checkpoints."""
    graph = copy.deepcopy(gm.graph)
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "tag_activation_checkpoint":
            body, node.target = node.args[0].target, recomputed
            setattr(gm, body, _fused(getattr(gm, body), settings))
    return FusedModule(Captured(gm, graph), settings)


def recomputed(body: FusedModule, *args: Any, use_reentrant: bool = False, **options: Any) -> Any:
    """torch.utils.checkpoint of a part of the graph: the operator that stands for it leaves it to AOTAutograd."""
    root = state_of(body).captured.root
    context = root.meta.get("_checkpoint_context_fn") if isinstance(root, fx.GraphModule) else None
    if context is not None:  # what selective checkpointing keeps
        options["context_fn"] = context
    return checkpoint(body, *args, use_reentrant=False, **options)


def _prepared_by_first_call(fused: FusedModule) -> Callable[..., Any]:
    ready = False

    def run(*args: Any) -> Any:
        nonlocal ready
        if ready:
            return fused(*args)
        ready = True
        with plans.preparing():
            return fused(*args)

    return run
