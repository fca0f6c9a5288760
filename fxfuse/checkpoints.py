"""Checkpoints in a graph (torch.utils.checkpoint): parts whose values the backward of a training step recomputes.

Dynamo keeps the body of a checkpoint as a graph of its own (backend.py). This module inlines the body into the graph
around it, and marks its nodes for torch's partitioner. The backward then recomputes what it would recompute in eager.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterator
from typing import Any, Final

from torch import fx, nn
from torch.fx import traceback
from torch.utils import checkpoint

from fxfuse.program.values import Refused

AGAIN: Final = "recompute"
"""The key, in a node's meta, of the mark that torch's partitioner reads. torch.fx copies it to nodes traced from it."""
_PART: Final = "ac_graph_id"
"""The key, also in a node's meta, of the checkpoint's number. What one checkpoint passes to the next is kept."""
_POLICY: Final[Any] = getattr(checkpoint, "CheckpointPolicy", None)
_MARK: Final[Any] = True if _POLICY is None else _POLICY.MUST_RECOMPUTE


def has_any(graph: fx.Graph) -> bool:
    """Whether a graph contains a checkpoint."""
    return any(map(_is_checkpoint, graph.nodes))


def inlined(root: nn.Module, graph: fx.Graph) -> fx.Graph:
    """The graph itself if it has no checkpoints, else a copy with marked nodes in place of each checkpoint.

    Raises Refused for a checkpoint that chooses what to keep, or whose graph has attributes or calls modules.
    """
    if not has_any(graph):
        return graph
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    for number, node in enumerate([node for node in copied.nodes if _is_checkpoint(node)]):
        of, *given = node.args
        captured_root, captured = _captured(root.get_submodule(str(of.target)))
        if getattr(captured_root, "meta", {}).get("_checkpoint_context_fn") is not None:
            raise Refused("a checkpoint in it chooses what is kept (selective checkpointing)")
        arguments = [one for one in captured.nodes if one.op == "placeholder"]
        if len(arguments) != len(given) or any(one.op in ("get_attr", "call_module") for one in captured.nodes):
            raise Refused("a checkpoint in it has tensors of its own")
        values = dict(zip(arguments, given, strict=True))
        with copied.inserting_before(node):
            result = copied.graph_copy(captured, values)
        for own, new in values.items():
            if own.op != "placeholder":
                new.meta[AGAIN], new.meta[_PART] = _MARK, number
        _replace(node, result)
        if not of.users:
            copied.erase_node(of)
    return copied


def marked(graph: fx.Graph) -> contextlib.AbstractContextManager[Any]:
    """A context in which traced nodes get the marks of the graph's nodes, if there are any."""
    return traceback.preserve_node_meta() if _has_marks(graph) else contextlib.nullcontext()


def _has_marks(graph: fx.Graph) -> bool:
    return any(AGAIN in node.meta for node in graph.nodes)


@contextlib.contextmanager
def drawing_nothing(graph: fx.Graph) -> Iterator[None]:
    """A context in which torch's partitioner, in this thread, assumes that no marked operator draws random numbers.

    By its tag it would assume that attention draws, even without dropout. The caller holds the lock of traces
    (joint.py).
    """
    if not _has_marks(graph):
        yield
        return
    from torch._functorch import partitioners

    asked: Any = partitioners.has_recomputable_rng_ops
    thread = threading.get_ident()
    partitioners.has_recomputable_rng_ops = lambda fx_g: threading.get_ident() != thread and asked(fx_g)
    try:
        yield
    finally:
        partitioners.has_recomputable_rng_ops = asked


def _is_checkpoint(node: fx.Node) -> bool:
    return bool(getattr(node.target, "is_checkpoint", False))


def _captured(body: nn.Module) -> tuple[nn.Module, fx.Graph]:
    """The root and the graph of a checkpoint's body before its regions were fused."""
    from fxfuse.module import state_of  # which imports training.py

    captured = state_of(body).captured  # type: ignore[arg-type]
    if captured.graph is None:
        raise Refused("a checkpoint in it runs as Python")
    return captured.root, captured.graph


def _replace(node: fx.Node, result: Any) -> None:
    """Replaces a checkpoint by the result of its inlined graph."""
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    for user in list(node.users):
        if user.target is not operator.getitem or not isinstance(result, tuple | list):
            raise Refused("what a checkpoint in it gives is used as a whole")
        place: Any = user.args[1]
        user.replace_all_uses_with(result[place])
        user.graph.erase_node(user)
    node.graph.erase_node(node)
