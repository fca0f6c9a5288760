"""optimize(): capture, match, simplify, replace; kernels are compiled at first use."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from fxfuse import plans, program
from fxfuse.arguments import Inputs, arguments_of
from fxfuse.capture import capture
from fxfuse.errors import CaptureError, FxfuseError, UnsupportedError
from fxfuse.module import FusedModule, is_fused, state_of, with_fused_children
from fxfuse.program.values import device_of
from fxfuse.replacement import Settings
from fxfuse.state import called_unchanged


def optimize(
    model: nn.Module | torch.export.ExportedProgram,
    example_inputs: Inputs | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    strict: bool = False,
    fp32: Literal["exact", "fast"] = "exact",
    cuda_graphs: bool = False,
) -> fx.GraphModule:
    """A model that computes the same with one kernel for every Linear or Conv2d and the pointwise work after it.

    Other chains of pointwise operations, perhaps after an operation of torch's library, become one pass each.

        fast = fxfuse.optimize(model)
        print(fxfuse.explain(fast))

    Args:
        model: any nn.Module or fx.GraphModule, in training or evaluation mode, on any device, or a program that
            torch.export made of one. It is not changed. Its parameters and buffers are shared with the result, under
            the same names.
        example_inputs: the arguments of one call: a tuple of positional ones, a dict of keyword arguments
            (`optimize(model, tokenizer(text, return_tensors="pt"))`), or a tensor. If given, all kernels that the call
            needs are compiled now (in parallel) instead of at the first call.
        kwargs: keyword arguments of that call beside positional ones.
        strict: raise where fxfuse would otherwise fall back to torch: CaptureError for a model that cannot be traced,
            UnsupportedError, ToolchainError or BuildError for a region that cannot run as a kernel. A model whose
            parameters have no shape yet (LazyLinear) is a CaptureError in any case.
        fp32: how float32 matrix products are computed on a GPU. "exact": as accurate as eager's, so TF32 is used where
            torch's switches allow it and torch's library uses it for that problem. "fast": TF32 wherever the switches
            allow it. Where they ask for full precision, each row of x and of the weight is scaled, and its numbers are
            split into two float16 numbers each. This is about twice as fast, and as accurate for rows whose numbers are
            within a factor of 2^18 of each other; smaller numbers lose digits. It takes scratch memory as large as x
            and the weight at every call.
        cuda_graphs: on a GPU, replay the model as one CUDA graph for calls without gradients in evaluation mode. The
            call of `example_inputs` is captured now. Other calls are captured at the second of a kind (shapes, dtypes,
            strides, values that are no tensors), for up to 8 kinds. Results are the caller's own. Weights may change in
            place at any time. They may also move to other memory; the graphs are then captured again. Whatever a
            forward does in Python, or reads from attributes that are no tensors, is fixed at the capture. The report
            says which calls ran without a graph, and why. With strict=True, UnsupportedError is raised if the example's
            call cannot be captured. Training steps of a kind that comes again and again have two graphs, one of the
            forward and one of the backward; parameters' gradients then lie in the graph's memory until they are set to
            None.

    Returns a GraphModule that behaves as the model does: train() and eval(), to(), half(), state_dict(),
    load_state_dict(), gradients, copy.deepcopy and pickle included. Later changes are seen as follows:

    - Hooks and modules that are set on it or inside of it, and attributes of its own: at the next call.
    - Attributes of modules inside of it (a dropout's p): at the next train() or eval() that changes a mode. If
      torch.compile has compiled it, this holds for all of the above.
    - Anything that is set on `model`, and a bias where there was none: never. verify() names them.

    With FXFUSE_DISABLE=1 in the environment it is the traced model with nothing fused. Raises FxfuseError for arguments
    of another kind.

    torch.compile and torch.export take it with its fused operators. torch.export (unless strict=True) passes the
    arguments of a graph module by position, whatever their names: leave none out before the last one that you give.
    """
    example = None
    if example_inputs is not None or kwargs is not None:
        example = arguments_of(example_inputs, kwargs, "example_inputs")
    if isinstance(model, torch.export.ExportedProgram):
        model = model.module()
    if not isinstance(model, nn.Module):
        raise FxfuseError(f"optimize takes an nn.Module, not {type(model).__name__}; wrap a function in a module")
    if isinstance(model, torch.jit.ScriptModule):
        raise FxfuseError("optimize takes Python modules; optimize the model before torch.jit compiles it")
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    _check_parameters(model)
    settings = Settings(strict, fp32, cuda_graphs)
    before = settings
    if isinstance(model, FusedModule):
        before, model = state_of(model).settings, state_of(model).captured.root
    captured = capture(model, is_fused, strict)
    for child in captured.root.modules():
        if isinstance(child, FusedModule) and state_of(child).settings == before != settings:  # fused with the model
            state_of(child).settings = settings
            child._derive(state_of(child).captured)
    fast = FusedModule(with_fused_children(captured, settings), settings, cuda_graphs)
    if example is not None:
        compile_for(fast, *example)
    if example is not None and cuda_graphs:
        _capture_for(fast, *example)
    return fast


def _check_parameters(model: nn.Module) -> None:
    """Raises CaptureError if a module waits for its first call to know its parameters' shapes."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        tensors = {**module._parameters, **module._buffers}
        lazy = next((name for name, tensor in tensors.items() if is_lazy(tensor)), None)
        if lazy is not None:
            which = f"module '{path}'" if path else "the model"
            raise CaptureError(
                f"{which} ({type(module).__name__}) has no '{lazy}' yet: its shape follows from the first input; "
                "call the model once before fxfuse.optimize"
            )


def compile_for(fast: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> None:
    """Compiles every kernel that `fast(*args, **kwargs)` needs, several at a time, and chooses among them."""
    states = [state_of(item) for item in fast.modules() if isinstance(item, FusedModule)]
    for state in states:
        if state.recapture is not None:
            state.recapture.hurry()
    with plans.preparing() as drafts:
        given = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs or {}))) if isinstance(leaf, torch.Tensor)]
        device = device_of([*given, *fast.parameters(), *fast.buffers()])
        if device is not None and any(state.programs is not None for state in states):
            for source in program.sources(device):
                drafts.beside(functools.partial(program.prepare, source))
        called_unchanged(fast, args, kwargs or {})


def _capture_for(fast: FusedModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Captures `fast(*args, **kwargs)` as a CUDA graph."""
    state = state_of(fast)
    assert state.replays is not None
    reason = state.replays.prepare(fast, vars(type(fast).forward)["__wrapped__"], args, kwargs)
    if reason is not None and state.settings.strict:
        raise UnsupportedError(f"the model cannot be captured as a CUDA graph: {reason}")
