"""The fused operators: linear, gated_linear, matmul, mm, addmm, bmm, conv2d, conv2d_weight, conv3d, layer_norm,
pointwise.

Each is a function of this module and an operator in torch.ops.fxfuse. It takes the anchor's arguments, the other
tensors that the epilogue reads, and the epilogue as text:

    fxfuse.functional.linear(x, weight, bias, [operands], "relu(acc + o0)")

- gated_linear computes two linears of one x. The epilogue calls the result of the second one o0. The second weight is
  the first operand; the second bias, if there is one, is the last: gated_linear(x, v, None, [w], "silu(o0) * acc").
- pointwise has no anchor, weight or bias: x is acc. `overwrite` says that nothing else reads x, so that the result may
  overwrite it.
- With `pool`, the fields of a MaxPool, max_pool2d is applied to the epilogue's result.

torch.ops.fxfuse.* are ordinary torch operators. torch.compile and torch.export do not look inside them (they have a
meta kernel). They are differentiable: the region's torch reference runs when a gradient is needed. They are safe under
autocast and inference mode. Optimised graphs call the functions. A function goes straight to the plan, or to the
reference, where this makes no difference: the dispatcher takes 15 us for an operator that is implemented in Python.
Otherwise it calls torch.ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from fxfuse import ops, plans
from fxfuse.cuda import gpu, stand_in
from fxfuse.cuda.stand_in import StandIn
from fxfuse.hooks import is_in_parts
from fxfuse.plans import GRADIENTS_DUE, IN_PARTS, RECAST, REMOVED, TRANSFORMED
from fxfuse.problem import ANCHORS, OPTION_NAMES, PRODUCTS, gate_of, in_order, parsed, run_reference

LIBRARY: Final = torch.library.Library("fxfuse", "DEF")
_COMMON: Final = "Tensor x, {weight} weight, Tensor? bias, Tensor[] operands, str epilogue"
_CALLER: Final = 'bool strict=False, int region=0, str fp32="exact", int[] pool=[]'
_OPTIONS: Final = {
    "linear": "",
    "gated_linear": "",
    "matmul": "",
    "mm": "",
    "addmm": ", float beta, float alpha",
    "bmm": "",
    "conv2d": ", int[] stride, int[] padding, int[] dilation, int groups",
    "conv2d_weight": ", int[] kernel, int[] stride, int[] padding, int[] dilation, int groups",
    "conv3d": ", int[] stride, int[] padding, int[] dilation, int groups",
    "layer_norm": ", int[] normalized_shape, float eps",
    "pointwise": ", bool overwrite",
}
"""The options (problem.OPTION_NAMES) in each operator's schema."""


def operator(kind: str) -> torch._ops.OpOverload:
    """The registered operator for regions with an anchor of this kind."""
    overload: torch._ops.OpOverload = getattr(torch.ops.fxfuse, kind).default
    return overload


def function(kind: str) -> Callable[..., torch.Tensor]:
    """The function of this module for regions with an anchor of this kind. Optimised graphs call it."""
    found: Callable[..., torch.Tensor] = globals()[kind]
    return found


def option_values(kind: str, options: Any) -> tuple[Any, ...]:
    """The values of an anchor's options, in the order of the operator's arguments."""
    return tuple(_hashable(options[name]) for name in OPTION_NAMES[kind])


def as_operand(value: Any) -> torch.Tensor:
    """Converts an argument of the model to an operand: a number becomes a 0-d tensor, a tensor stays as it is."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, fx.Proxy):  # somebody traces the optimised model
        return value.tracer.create_proxy("call_function", as_operand, (value,), {})  # type: ignore[return-value]
    # float64 keeps the number's digits; without dimensions it promotes as the number itself would
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu")


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------ the short way

_PLAIN: Final = frozenset((torch.Tensor, torch.nn.Parameter, StandIn))
"""Tensor classes whose operators nothing intercepts: no subclasses and no fakes. StandIn, for a described GPU, counts
as one of them."""
_STRIDED: Final = frozenset((torch.strided,))
_NO_DISPATCH: Final = torch._C._disabled_torch_dispatch_impl
_layout: Final[Callable[..., Any]] = torch.Tensor.layout.__get__  # type: ignore[attr-defined]
_is_neg: Final = torch.Tensor.is_neg
_is_zerotensor: Final = torch.Tensor._is_zerotensor


def _observed(profiled: bool = True) -> bool:
    """Whether anything is active that must see operator calls and that has no dispatch key.

    This is a compilation, a function mode, forward-mode derivatives, a trace, or, if `profiled`, a profiler.
    """
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_function_stack()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or (profiled and torch._C._autograd._profiler_enabled())
    )


def _intercepted() -> bool:
    """Whether a dispatch mode, autocast or a torch.func transformation is active in this thread."""
    return bool(
        torch._C._len_torch_dispatch_stack() > (0 if gpu.standing_in() is None else stand_in.modes())
        or torch._C._is_any_autocast_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _needs_gradient(tensors: Sequence[torch.Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _knows_torch_only(tensor: Any) -> bool:
    """Whether `tensor` implements torch's operators itself (jagged, quantised and distributed tensors), so that only
    torch's operators can run on it."""
    dispatch = getattr(type(tensor), "__torch_dispatch__", _NO_DISPATCH)
    return dispatch is not _NO_DISPATCH and not isinstance(tensor, FakeTensor | FunctionalTensor)


def _lacks_one(operands: Sequence[torch.Tensor | None]) -> bool:
    """Whether an operand is None: a parameter (a normalisation's weight, a gate's bias) that has been set to None."""
    for operand in operands:  # noqa: SIM110 - Dynamo of torch 2.3 traces no generators
        if operand is None:
            return True
    return False


def _reference(
    kind: str, values: Sequence[Any], epilogue: str, pool: Sequence[int], region: int,
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, operands: Sequence[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """The region's result by torch, operation by operation."""
    options = tuple(zip(OPTION_NAMES[kind], values, strict=True))
    expression = plans.as_written(region, epilogue) or parsed(epilogue)
    return run_reference(kind, options, expression, pool, x, weight, bias, operands)


def _function(kind: str) -> Callable[..., torch.Tensor]:
    overload = operator(kind)

    def fused(  # type: ignore[no-untyped-def]
        x, weight, bias, operands, epilogue, *values, strict=False, region=0, fp32="exact", pool=()
    ) -> torch.Tensor:
        tensors = in_order(x, weight, bias, operands)
        observed = _observed()
        if not observed:  # first: torch.compile could not trace what follows
            shortcut = plans.shortcuts.get(region)
            if shortcut is not None:
                try:
                    result = shortcut((kind, epilogue, values, strict, fp32, pool), tensors)
                except Exception:
                    result = None  # the long way below raises it again and handles it
                if result is not None:
                    return result
        if (
            not observed
            and not _intercepted()
            and _PLAIN.issuperset(map(type, tensors))
            and _STRIDED.issuperset(map(_layout, tensors))
            and not any(map(_is_neg, tensors))  # memory holds these values without their sign change
            and not any(map(_is_zerotensor, tensors))  # these have no memory
            and (x.is_cpu or x.is_cuda)
            and not x.is_nested
        ):
            if _needs_gradient(tensors):
                plans.without_plan[GRADIENTS_DUE].add(region)
                return _reference(kind, values, epilogue, pool, region, x, weight, bias, operands)
            if values:
                values = tuple(map(_hashable, values))
            return plans.run(kind, epilogue, values, strict, region, fp32, tuple(pool), x, weight, bias, operands)
        if _lacks_one(operands):
            plans.without_plan[REMOVED].add(region)
            return _reference(kind, values, epilogue, pool, region, x, weight, bias, operands)
        if not torch.compiler.is_compiling() and any(map(_knows_torch_only, tensors)):
            plans.without_plan[IN_PARTS if any(map(is_in_parts, tensors)) else TRANSFORMED].add(region)
            return _reference(kind, values, epilogue, pool, region, x, weight, bias, operands)
        return overload(  # type: ignore[no-any-return]
            x, weight, bias, operands, epilogue, *values, strict=strict, region=region, fp32=fp32, pool=pool
        )

    fused.__name__ = fused.__qualname__ = kind
    fused.__doc__ = f"""torch.ops.fxfuse.{kind}, called directly where that makes no difference.

    Args:
        x, weight, bias: as the anchor takes them (problem.ANCHORS). The bias may be None, and layer_norm's
            weight; pointwise has neither.
        operands: the tensors that the epilogue calls o0, o1, ...
        epilogue: an expression (fxfuse.expression) in acc, the anchor's result.
        values: the anchor's options.
        strict: raise where the region would otherwise run in torch.
        region: a number of its own for each region of each optimised model.
        fp32: "exact" or "fast", see fxfuse.optimize.
        pool: the fields of a pooling.MaxPool, or nothing.
    """
    return fused


# ------------------------------------------------------------------------------------ the dispatcher's way


def _transformed(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether the region must run operation by operation: under torch.func, with forward-mode derivatives, or with
    tensors that are not plain strided ones."""
    return forward_ad._current_level >= 0 or any(tensor is not None and _is_special(tensor) for tensor in tensors)


def _is_special(tensor: torch.Tensor) -> bool:
    """Whether reading the tensor's memory by its strides does not give its values: see the cases."""
    return (
        tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_neg()
        or tensor._is_zerotensor()
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or _knows_torch_only(tensor)
    )


def current_autocast(device: str) -> torch.dtype | None:
    """The dtype in which torch.autocast computes products now, on "cpu" or "cuda"; None where it is disabled."""
    if hasattr(torch, "get_autocast_dtype"):  # since torch 2.4
        is_enabled = torch.is_autocast_enabled(device)
    else:
        is_enabled = torch.is_autocast_cpu_enabled() if device == "cpu" else torch.is_autocast_enabled()
    return autocast_dtype(device) if is_enabled else None


def autocast_dtype(device: str) -> torch.dtype:
    """The dtype in which torch.autocast computes products where it is enabled, on "cpu" or "cuda"."""
    if hasattr(torch, "get_autocast_dtype"):  # since torch 2.4
        return torch.get_autocast_dtype(device)
    return torch.get_autocast_cpu_dtype() if device == "cpu" else torch.get_autocast_gpu_dtype()


def _casting(device: str, dtype: torch.dtype) -> Callable[[torch.Tensor | None], torch.Tensor | None]:
    """A function that casts a tensor as torch.autocast does for an operation in `dtype`."""

    def cast(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        eligible = tensor.device.type == device and tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if eligible else tensor

    return cast


def _of_its_own(result: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`result`, cloned if it shares memory with an argument: an operator returns neither an argument nor a view."""
    for tensor in tensors:
        strided = tensor.layout is result.layout is torch.strided and not tensor.is_nested
        if tensor is result or (strided and tensor.untyped_storage()._cdata == result.untyped_storage()._cdata):
            return result.clone()
    return result


_EAGER_KEYS: Final = (
    "FuncTorchBatched",  # torch.func.vmap
    # other layouts, in inference mode, which skips "Autograd"
    "SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA", "MkldnnCPU", "NestedTensorCPU", "NestedTensorCUDA",
)  # fmt: skip
"""Dispatch keys under which the region runs as in eager, operation by operation."""


register_fake: Final[Callable[..., Any]] = getattr(torch.library, "register_fake", None) or torch.library.impl_abstract
"""Registers an operator's implementation for fake and meta tensors. It has this name since torch 2.4."""


def _with_empty_lists(implementation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wraps `implementation`, which gets empty lists where AOTInductor's packages pass None for them."""

    def given(x, weight, bias, operands, epilogue, *values, pool=(), **caller) -> torch.Tensor:  # type: ignore[no-untyped-def]
        return implementation(x, weight, bias, operands or [], epilogue, *values, pool=pool or [], **caller)

    return given


def _implement(kind: str) -> None:
    overload = operator(kind)

    def kernel(  # type: ignore[no-untyped-def]
        x, weight, bias, operands, epilogue, *values, strict=False, region=0, fp32="exact", pool=()
    ) -> torch.Tensor:
        values = (False,) if kind == "pointwise" else tuple(map(_hashable, values))
        said = (kind, epilogue, values, strict, region, fp32, tuple(pool))
        return _of_its_own(plans.run(*said, x, weight, bias, operands, directly=False), (x, *operands))

    def reference(x, weight, bias, operands, epilogue, *values, pool=(), region=0, **_caller) -> torch.Tensor:  # type: ignore[no-untyped-def]
        return _reference(kind, values, epilogue, pool, region, x, weight, bias, operands)

    def transformed(x, weight, bias, operands, epilogue, *values, **caller) -> torch.Tensor:  # type: ignore[no-untyped-def]
        plans.without_plan[TRANSFORMED].add(caller.get("region", 0))
        return reference(x, weight, bias, operands, epilogue, *values, **caller)

    def fake(  # type: ignore[no-untyped-def]
        x, weight, bias, operands, epilogue, *values, strict=False, region=0, fp32="exact", pool=()
    ) -> torch.Tensor:
        said = (kind, epilogue, tuple(map(_hashable, values)), strict, region, fp32, tuple(pool))
        plans.foresee(*said, x, weight, bias, operands)
        # a convolution's strides depend on the device, which fake tensors know
        values = (False,) if kind == "pointwise" else values
        return _of_its_own(_reference(kind, values, epilogue, pool, region, x, weight, bias, operands), (x, *operands))

    def autograd(x, weight, bias, operands, epilogue, *values, **caller) -> torch.Tensor:  # type: ignore[no-untyped-def]
        tensors = (x, weight, bias, *operands)
        due = _needs_gradient(tensors)
        if due or _transformed(tensors):
            plans.without_plan[GRADIENTS_DUE if due else TRANSFORMED].add(caller.get("region", 0))
            return reference(x, weight, bias, operands, epilogue, *values, **caller)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(x, weight, bias, operands, epilogue, *values, **caller)  # type: ignore[no-any-return]

    def autocast(device: str) -> Callable[..., torch.Tensor]:
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device.upper()}"))

        def cast_first(x, weight, bias, operands, epilogue, *values, **caller) -> torch.Tensor:  # type: ignore[no-untyped-def]
            normalises = kind == "layer_norm"  # autocast: float32 on a GPU, the input's dtype on a CPU
            if ops.is_recast(parsed(epilogue)) or (normalises and device == "cpu"):
                plans.without_plan[RECAST].add(caller.get("region", 0))
                return reference(x, weight, bias, operands, epilogue, *values, **caller)
            tensors = (x, weight, bias)
            if kind != "pointwise":
                cast = _casting(device, torch.float32 if normalises else autocast_dtype(device))
                tensors = (cast(x), cast(weight), cast(bias))
                if kind == "gated_linear":
                    gate, gate_bias, others = gate_of(parsed(epilogue), operands)
                    operands = [cast(gate), *others, *([] if gate_bias is None else [cast(gate_bias)])]
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return overload(*tensors, operands, epilogue, *values, **caller)  # type: ignore[no-any-return]

        return cast_first

    for device in ("cpu", "cuda"):
        LIBRARY.impl(kind, _with_empty_lists(kernel), device.upper())
        LIBRARY.impl(kind, _with_empty_lists(autocast(device)), f"Autocast{device.upper()}")
    LIBRARY.impl(kind, _with_empty_lists(autograd), "Autograd")
    register_fake(f"fxfuse::{kind}", fake, lib=LIBRARY)
    for key in _EAGER_KEYS:
        LIBRARY.impl(kind, _with_empty_lists(transformed), key)


for _kind in ANCHORS:
    _tensors = _COMMON.format(weight="Tensor" if _kind in PRODUCTS else "Tensor?")
    LIBRARY.define(f"{_kind}({_tensors}{_OPTIONS[_kind]}, *, {_CALLER}) -> Tensor")
    _implement(_kind)

linear = _function("linear")
gated_linear = _function("gated_linear")
matmul = _function("matmul")
mm = _function("mm")
addmm = _function("addmm")
bmm = _function("bmm")
conv2d = _function("conv2d")
conv2d_weight = _function("conv2d_weight")
conv3d = _function("conv3d")
layer_norm = _function("layer_norm")
pointwise = _function("pointwise")
