"""The fused operators: torch.ops.fxfuse.linear, .matmul and .conv2d.

Each takes an anchor's arguments, the other tensors that its epilogue reads, and the epilogue as text:

    torch.ops.fxfuse.linear(x, weight, bias, [operands], "relu(acc + o0)")

They are ordinary torch operators: opaque to torch.compile and torch.export (with a meta kernel), differentiable (by
running the region's torch reference when a gradient is needed), safe under autocast and inference mode. On CPU and
CUDA tensors a plan is made at the first call for a problem and looked up afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.autograd import forward_ad

from fxfuse.errors import BuildError, FxfuseError, ToolchainError, UnsupportedError
from fxfuse.problem import ANCHORS, RESULT_DTYPES, Plan, Problem, Refused, TensorMeta, anchor_meta, parsed, run_anchor
from fxfuse.reference import evaluate

logger = logging.getLogger("fxfuse")

_LIBRARY: Final = torch.library.Library("fxfuse", "DEF")
_COMMON: Final = "Tensor x, Tensor weight, Tensor? bias, Tensor[] operands, str epilogue"
_OPTIONS: Final = {
    "linear": "",
    "matmul": "",
    "mm": "",
    "addmm": ", float beta, float alpha",
    "conv2d": ", int[] stride, int[] padding, int[] dilation, int groups",
}
"""Options in each operator's schema, in the order in which its anchor takes them (problem.ANCHORS)."""
_OPTION_NAMES: Final = {
    kind: tuple(part.split()[-1] for part in text.split(",") if part.strip()) for kind, text in _OPTIONS.items()
}

Options = tuple[tuple[str, Any], ...]


class FxfuseWarning(UserWarning):
    """A region runs in torch although it was fused; the text says why and what helps."""


# ----------------------------------------------------------------------------------------------- plans

_plans: dict[Any, tuple[Caller, Plan]] = {}
_plans_lock = threading.RLock()
_pending = threading.local()


def plans(region: int) -> list[Plan]:
    """How the problems are run that a region met so far in this process."""
    return [plan for caller, plan in list(_plans.values()) if caller.region == region]


@dataclass(frozen=True)
class Caller:
    """Who poses a problem: plans are kept for each."""

    region: int
    """A number of its own for each region of each optimised model (0 for a direct call)."""
    strict: bool


def _alignment(tensor: torch.Tensor) -> int:
    if tensor.device.type == "cpu":  # the CPU's vector loads take any address
        return 16
    address = tensor.data_ptr() | 16
    return address & -address


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    is_parameter = type(tensor) is torch.nn.Parameter
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, _alignment(tensor), is_parameter)


def _meta(tensor: torch.Tensor) -> TensorMeta:
    shape, strides, *rest = _state(tensor)
    return TensorMeta(tuple(shape), tuple(strides), *rest)


def _reference(
    kind: str, options: Options, epilogue: str,
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, operands: Sequence[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    return evaluate(parsed(epilogue), run_anchor(kind, options, x, weight, bias), operands)


def _reference_plan(problem: Problem, reason: str) -> Plan:
    def run(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, operands: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        return _reference(problem.kind, problem.options, problem.epilogue, x, weight, bias, operands)

    logger.info("fxfuse: %s runs in torch: %s", problem.label, reason)
    return Plan(run, None, reason)


def _device_plan(problem: Problem, acc: torch.Tensor) -> Plan:
    if problem.x.device.type == "cuda":
        from fxfuse.cuda.plan import make_plan
    else:
        from fxfuse.cpu.plan import make_plan
    return make_plan(problem, acc)


def _make_plan(problem: Problem, strict: bool) -> Plan:
    """The plan for `problem`: a kernel, or the torch reference with the reason (an exception if `strict`)."""
    if 0 in (*problem.x.shape, *problem.weight.shape):
        return _reference_plan(problem, "a tensor is empty")
    try:
        acc = anchor_meta(problem)  # torch's own objections come first
        _check_tensors(problem)
        return _device_plan(problem, acc)
    except UnsupportedError as error:
        if strict and not isinstance(error, Refused):
            raise UnsupportedError(f"{problem.label}: {error}") from None
        return _reference_plan(problem, str(error))
    except (ToolchainError, BuildError) as error:
        if strict:
            raise
        _warn_once(error)
        return _reference_plan(problem, str(error).partition("\n")[0])


def _check_tensors(problem: Problem) -> None:
    tensors = [problem.x, problem.weight, *([problem.bias] if problem.bias else [])]
    for tensor in tensors:
        if tensor.dtype != problem.x.dtype:
            raise Refused(f"tensors of {problem.x.dtype} and {tensor.dtype} meet in one {problem.kind}")
        if tensor.dtype not in RESULT_DTYPES:
            raise UnsupportedError(f"kernels have float32, float16 and bfloat16, not {tensor.dtype}")
        if tensor.device != problem.x.device:
            raise UnsupportedError(f"tensors on {problem.x.device} and {tensor.device} meet in one {problem.kind}")
    for operand in problem.operands:
        if operand.device != problem.x.device and not (operand.device.type == "cpu" and operand.shape == ()):
            raise UnsupportedError(f"an operand is on {operand.device}, the anchor on {problem.x.device}")


_warned: set[str] = set()


def _warn_once(error: FxfuseError) -> None:
    text = str(error)
    if text not in _warned:
        _warned.add(text)
        warnings.warn(f"fxfuse: {text}\nThe model runs as torch runs it.", FxfuseWarning, stacklevel=6)


@contextlib.contextmanager
def collect_problems() -> Iterator[list[tuple[Caller, Problem]]]:
    """Inside, operators compute with torch and only note the problems they meet that have no plan yet."""
    _pending.problems = []
    try:
        yield _pending.problems
    finally:
        del _pending.problems


def prepare(problems: Sequence[tuple[Caller, Problem]], threads: int) -> None:
    """Makes the plans for `problems`, compiling `threads` kernels at a time."""
    unique = list(dict.fromkeys(problems))

    def make(item: tuple[Caller, Problem]) -> Plan:
        caller, problem = item
        return _make_plan(problem, caller.strict)

    with ThreadPoolExecutor(max_workers=max(1, min(threads, len(unique)))) as pool:
        for (caller, problem), plan in zip(unique, pool.map(make, unique), strict=True):
            with _plans_lock:
                _plans[_key_of(caller, problem)] = (caller, plan)


def _key_of(caller: Caller, problem: Problem) -> Any:
    """The key under which `_run` looks for the plan of `problem`."""

    def state(meta: TensorMeta) -> tuple[Any, ...]:
        return (torch.Size(meta.shape), meta.strides, meta.dtype, meta.device, meta.alignment, meta.is_parameter)

    tensors = (problem.x, problem.weight, *problem.operands)
    bias = None if problem.bias is None else state(problem.bias)
    switches = _switches(problem.x.device)
    return (caller, problem.kind, problem.epilogue, problem.options, switches, bias, *map(state, tensors))


def _switches(device: torch.device) -> Any:
    """torch's precision switches where they matter."""
    if device.type != "cuda":
        return None
    from fxfuse.cuda.precision import tf32_allowed

    return tf32_allowed()


def _run(
    caller: Caller, kind: str, options: Options, epilogue: str,
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, operands: Sequence[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    key = (
        caller, kind, epilogue, options, _switches(x.device), None if bias is None else _state(bias),
        _state(x), _state(weight), *(_state(operand) for operand in operands),
    )  # fmt: skip
    entry = _plans.get(key)
    if entry is None:
        problem = Problem(
            kind, options, epilogue, _meta(x), _meta(weight), None if bias is None else _meta(bias),
            tuple(_meta(operand) for operand in operands),
        )  # fmt: skip
        pending = getattr(_pending, "problems", None)
        if pending is not None:
            pending.append((caller, problem))
            return _reference(kind, options, epilogue, x, weight, bias, operands)
        with _plans_lock:
            entry = _plans.get(key)
            if entry is None:
                entry = _plans[key] = (caller, _make_plan(problem, caller.strict))
    return entry[1].run(x, weight, bias, operands)


# ------------------------------------------------------------------------------------------- operators


def operator(kind: str) -> torch._ops.OpOverload:
    """The operator for regions with an anchor of this kind."""
    overload: torch._ops.OpOverload = getattr(torch.ops.fxfuse, kind).default
    return overload


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def options_of(kind: str, values: Sequence[Any]) -> Options:
    """An operator's further arguments as (name, value) pairs, hashable."""
    return tuple((name, _hashable(value)) for name, value in zip(_OPTION_NAMES[kind], values, strict=True))


def takes_first(target: Any, args: Sequence[Any], value: Any) -> bool:
    """Whether a call of a fused operator has `value` as its x, which only a tensor can be."""
    return any(target is operator(kind) for kind in ANCHORS) and args[0] is value


def as_operand(value: Any) -> torch.Tensor:
    """An argument of the model that may be a number, as an operand: a tensor as it is, a number as a 0-d tensor."""
    if isinstance(value, torch.Tensor):
        return value
    # float64 keeps the number's digits; without dimensions it promotes as the number itself would
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


_DEVICES: Final = ("cpu", "cuda")
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
"""Tensors that nobody intercepts: no subclass, no fake."""


def _transformed(x: torch.Tensor) -> bool:
    """Whether the region must run operation by operation: forward-mode derivatives, torch.func, nested tensors."""
    return forward_ad._current_level >= 0 or torch._C._functorch.is_functorch_wrapped_tensor(x) or x.is_nested


def _implement(kind: str) -> None:
    overload = operator(kind)

    def kernel(x, weight, bias, operands, epilogue, *values, strict=False, region=0):  # type: ignore[no-untyped-def]
        caller = Caller(region, strict)
        return _run(caller, kind, options_of(kind, values), epilogue, x, weight, bias, operands)

    def reference(x, weight, bias, operands, epilogue, *values, strict=False, region=0):  # type: ignore[no-untyped-def]
        return _reference(kind, options_of(kind, values), epilogue, x, weight, bias, operands)

    def autograd(x, weight, bias, operands, epilogue, *values, strict=False, region=0):  # type: ignore[no-untyped-def]
        tensors = (x, weight, bias, *operands)
        if (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)) or _transformed(x):
            return reference(x, weight, bias, operands, epilogue, *values)
        if type(x) in _PLAIN and x.device.type in _DEVICES and torch._C._len_torch_dispatch_stack() == 0:
            # Dispatching again would arrive at the same kernel, 15 us later.
            return kernel(x, weight, bias, operands, epilogue, *values, strict=strict, region=region)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(x, weight, bias, operands, epilogue, *values, strict=strict, region=region)

    for key in (device.upper() for device in _DEVICES):
        _LIBRARY.impl(kind, kernel, key)
    _LIBRARY.impl(kind, reference, "Meta")
    _LIBRARY.impl(kind, autograd, "Autograd")
    # Under autocast the region runs as eager would: its own operators are cast one by one.
    # Under torch.func.vmap they are batched one by one.
    for key in ("AutocastCPU", "AutocastCUDA", "FuncTorchBatched"):
        _LIBRARY.impl(kind, reference, key)


def option_values(kind: str, options: Any) -> tuple[Any, ...]:
    """An anchor's options in the order in which its operator takes them."""
    return tuple(options[name] for name in _OPTION_NAMES[kind])


for _kind in ANCHORS:
    _LIBRARY.define(f"{_kind}({_COMMON}{_OPTIONS[_kind]}, *, bool strict=False, int region=0) -> Tensor")
    _implement(_kind)
