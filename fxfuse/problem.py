"""A problem: a region with concrete tensors, as a value. Plans (cpu/plan.py, cuda/plan.py) are made for one."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import torch
import torch.nn.functional as F

from fxfuse import ops
from fxfuse.build import Source
from fxfuse.errors import ExpressionError, UnsupportedError
from fxfuse.expression import Acc, Call, Const, Expr, Operand, operand_count, parse, postorder, rewrite
from fxfuse.layout import Strides, channels_last_strides, contiguous_strides, is_channels_last
from fxfuse.pooling import MaxPool, pooled
from fxfuse.reference import evaluate, operand_at

Run: TypeAlias = Callable[[torch.Tensor, Any, "torch.Tensor | None", Sequence[torch.Tensor]], torch.Tensor]
"""run(x, weight, bias, operands) -> result; weight is a tensor for PRODUCTS, and None for a chain"""


class ByAddress:
    """A Run that needs nothing of a call's tensors but their addresses, which whoever has them already can give it."""

    def __init__(self, launch: Callable[[tuple[torch.Tensor, ...], list[int]], torch.Tensor]) -> None:
        """launch(tensors, addresses): the call's tensors in order (`in_order`)."""
        self.launch = launch

    def __call__(
        self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None, operands: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        tensors = in_order(x, weight, bias, operands)
        return self.launch(tensors, [tensor.data_ptr() for tensor in tensors])


def in_order(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, operands: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """A call's tensors: x, weight, operands, bias, without what it has not."""
    if weight is None:
        return (x, *operands) if bias is None else (x, *operands, bias)
    return (x, weight, *operands) if bias is None else (x, weight, *operands, bias)


RESULT_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


class Refused(UnsupportedError):
    """torch itself does not accept the tensors: running the region in torch raises the exception that eager raises."""


class Declined(UnsupportedError):
    """A kernel would gain nothing, or what the region computes are no floating-point numbers: nothing is amiss."""


MAX_OPERANDS: Final = 48
"""That a kernel takes: a launch takes 64 addresses (binding.h), of which some are the anchor's own tensors."""

OPERAND_DTYPES: Final = (
    *RESULT_DTYPES, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


@dataclass(frozen=True)
class TensorMeta:
    """All that a plan may depend on of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    alignment: int = 16
    """Largest power of two, up to 16, that divides the data's address."""
    is_parameter: bool = False
    """Whether it is a parameter, whose shape does not change from call to call."""

    @classmethod
    def of(cls, tensor: torch.Tensor, device: torch.device, alignment: int = 16) -> TensorMeta:
        """What a plan may depend on of a value of the model that is like `tensor` and lies on `device`."""
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, device, alignment, is_parameter)

    def empty(self) -> torch.Tensor:
        """A meta tensor like it."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Problem:
    """One region's computation on tensors of given shapes, strides, dtypes and device."""

    kind: str
    """The fused operator: a key of ANCHORS."""
    options: tuple[tuple[str, Any], ...]
    """Of the anchor: a convolution's stride, padding, dilation, groups, a normalisation's shape and eps; whether a pass
    may overwrite x."""
    epilogue: str
    x: TensorMeta
    weight: TensorMeta | None
    """None if there is no anchor, or if a normalisation has none: see `anchor_weight`."""
    bias: TensorMeta | None
    operands: tuple[TensorMeta, ...]
    fp32: str = "exact"
    """How float32 products may be computed where torch's switches ask for full precision: see fxfuse.optimize."""
    pool: tuple[Any, ...] = ()
    """The fields of the MaxPool that the epilogue's result goes through, if any."""
    written: Expr | None = None
    """The epilogue as the model has it, if that is another: what torch runs."""

    @property
    def expression(self) -> Expr:
        return parsed(self.epilogue)

    @property
    def is_chain(self) -> bool:
        """Whether there is no anchor."""
        return self.kind == "pointwise"

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.kind}: {self.epilogue}" + (f"; {MaxPool(*self.pool)}" if self.pool else "")

    def reference(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, operands: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The result by torch, operation by operation."""
        epilogue = self.expression if self.written is None else self.written
        return run_reference(self.kind, self.options, epilogue, self.pool, x, weight, bias, operands)


@dataclass(frozen=True)
class Pass:
    """What a plan's only launch computes, element by element or row by row."""

    expression: Expr
    """Of acc and the problem's operands."""
    reads_bias: bool
    """Whether the bias is one more operand, the last."""
    acc: str
    """"library": the result of what torch ran before; "layer_norm": the anchor's own, which it computes, too."""


@dataclass(frozen=True)
class Plan:
    """How a problem is run."""

    run: Run
    kernel: str | None
    """The kernel's name; None if torch runs it."""
    reason: str | None = None
    """Why torch runs it, if it does."""
    measured: tuple[tuple[str, float], ...] = ()
    """Times in seconds of the candidates that it was chosen from, if they were measured."""
    errors: tuple[tuple[str, float], ...] = ()
    """Their errors as multiples of what eager's allows, where those were compared."""
    workspace: int = 0
    """Bytes of scratch memory that a call allocates beside its output."""
    provisional: bool = False
    """Whether it is for this call only: nothing could be measured now."""
    computes: Pass | None = None
    """What its only launch does, if kernels that others join could do that, too."""
    sources: tuple[Source, ...] = ()
    """The kernels that it launches, if it is known."""


def in_turn(first: Plan, second: Plan, run: Run) -> Plan:
    """The plan of a problem in two parts, which `run` runs one after the other."""
    plans = (first, second)
    return Plan(
        run,
        " + ".join(plan.kernel for plan in plans if plan.kernel is not None) or None,
        "; ".join(plan.reason for plan in plans if plan.reason is not None) or None,
        workspace=first.workspace + second.workspace,
        provisional=first.provisional or second.provisional,
        sources=first.sources + second.sources,
    )


Draft: TypeAlias = Callable[[], Plan]
"""A problem whose kernels are compiled. Calling it decides between them, by measuring if need be."""


@functools.lru_cache(maxsize=4096)
def parsed(epilogue: str) -> Expr:
    """The epilogue's expression; parsed once.

    Raises ExpressionError if it is none, names no operation of the table, gives one too few or too many arguments, or
    computes with numbers alone.
    """
    expression = parse(epilogue)
    for node in postorder(expression):
        if isinstance(node, Call):
            row = ops.row(node.op)
            if len(node.args) != len(row.params):
                wanted = f"{len(row.params)} ({', '.join(row.params)})"
                raise ExpressionError(f"{row.name} takes {wanted}, not {len(node.args)} arguments: {_shortened(node)}")
            if all(isinstance(arg, Const) for arg in node.args):
                raise ExpressionError(f"an operation on numbers alone: {_shortened(node)}; write its value")
    if isinstance(expression, Const):
        raise ExpressionError(f"the epilogue {expression} is a number; it must read acc or an operand")
    return expression


# how many arguments an operation takes is checked once
ops.on_replacement.append(lambda _: parsed.cache_clear())


def _shortened(expression: Expr) -> str:
    text = str(expression)
    return text if len(text) <= 120 else f"{text[:60]}…{text[-60:]}"


# --------------------------------------------------------------------------------------------- anchors


def anchor_weight(problem: Problem) -> TensorMeta:
    """The weight of a problem whose anchor is one of PRODUCTS."""
    assert problem.weight is not None, "products have one"
    return problem.weight


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def _matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.matmul(x, weight)


def _mm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(x, weight)


def _bmm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.bmm(x, weight)


def _addmm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, beta: float, alpha: float) -> torch.Tensor:
    assert bias is not None, "addmm always has one"
    return torch.addmm(bias, x, weight, beta=beta, alpha=alpha)


def _conv2d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
) -> torch.Tensor:  # fmt: skip
    if len(padding) == 4:
        top, bottom, left, right = padding
        x, padding = F.pad(x, (left, right, top, bottom)), (0, 0)
    return F.conv2d(x, weight, bias, tuple(stride), tuple(padding), tuple(dilation), groups)


def _conv3d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
) -> torch.Tensor:  # fmt: skip
    return F.conv3d(x, weight, bias, tuple(stride), tuple(padding), tuple(dilation), groups)


def _layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, normalized_shape: Sequence[int], eps: float
) -> torch.Tensor:
    return F.layer_norm(x, tuple(normalized_shape), weight, bias, eps)


def _pointwise(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, overwrite: bool
) -> torch.Tensor:
    return x


ANCHORS: Final[Mapping[str, Callable[..., torch.Tensor]]] = {
    "linear": _linear,
    "gated_linear": _linear,
    "matmul": _matmul,
    "mm": _mm,
    "addmm": _addmm,
    "bmm": _bmm,
    "conv2d": _conv2d,
    "conv3d": _conv3d,
    "layer_norm": _layer_norm,
    "pointwise": _pointwise,
}
"""What each fused operator computes before its epilogue, in torch."""

CONVOLUTIONS: Final[Mapping[str, int]] = {"conv2d": 2, "conv3d": 3}
"""Those that convolve, and the dimensions that their filters move along."""

PRODUCTS: Final = frozenset({"linear", "gated_linear", "matmul", "mm", "addmm", "bmm", *CONVOLUTIONS})
"""Those that multiply with a weight: it has x's dtype, and torch's switches for TF32 are about them."""

BY_ROWS: Final = frozenset({"linear", "gated_linear"})
"""Of them those whose weight is (N, K); that of the other matrix products is (K, N), and (batch, K, N) for bmm."""

OPTION_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    kind: tuple(inspect.signature(anchor).parameters)[3:] for kind, anchor in ANCHORS.items()
}
"""The anchors' further arguments: their names in Problem.options, and their order in the operators' schemas."""


def run_anchor(
    kind: str, options: Sequence[tuple[str, Any]], x: torch.Tensor, weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """The anchor's result by torch."""
    return ANCHORS[kind](x, weight, bias, **dict(options))


def run_reference(
    kind: str, options: Sequence[tuple[str, Any]], epilogue: Expr, pool: Sequence[int],
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, operands: Sequence[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """A region's result by torch, operation by operation."""
    if kind == "gated_linear":
        gate, gate_bias, others = gate_of(epilogue, operands)
        operands = (F.linear(x, gate, gate_bias), *others)
    return pooled(evaluate(epilogue, run_anchor(kind, options, x, weight, bias), operands), pool)


_T = TypeVar("_T")


def gate_of(epilogue: Expr, operands: Sequence[_T]) -> tuple[_T, _T | None, tuple[_T, ...]]:
    """Of the operands of a gated linear: its second weight, that one's bias, and those called o1, o2, ...

    What the epilogue calls o0 is x's product with that weight, bias included. The bias comes last, if there is one.
    """
    named = operand_count(epilogue)
    operand_at(operands, max(named, 1) - 1)
    return operands[0], operands[named] if len(operands) > named else None, tuple(operands[1:named])


def anchor_alone(problem: Problem) -> Run:
    """The anchor as torch runs it: for regions that nothing pointwise follows."""

    def run(
        x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, operands: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        return run_anchor(problem.kind, problem.options, x, weight, bias)

    return run


def anchor_meta(problem: Problem) -> torch.Tensor:
    """The anchor's result as a meta tensor: torch's own judgement of the shapes. Raises Refused."""
    weight, bias = (meta.empty() if meta is not None else None for meta in (problem.weight, problem.bias))
    if problem.kind in CONVOLUTIONS:
        _check_convolution(problem)
    try:
        acc = run_anchor(problem.kind, problem.options, problem.x.empty(), weight, bias)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise Refused(f"torch does not accept these tensors: {error}") from None
    if problem.kind in CONVOLUTIONS:
        return acc.as_strided(acc.shape, _convolution_strides(problem, acc.shape))
    # meta tensors keep the layout of x, of which torch makes a contiguous copy
    return acc.as_strided(acc.shape, contiguous_strides(acc.shape)) if problem.kind == "layer_norm" else acc


def _check_convolution(problem: Problem) -> None:
    """What torch's meta function of a convolution does not look at, and its kernels do. Raises Refused."""
    options, bias, filters = dict(problem.options), problem.bias, anchor_weight(problem).shape[0]
    sizes = (*options["stride"], *options["dilation"], options["groups"])
    if min(sizes) <= 0 or min(options["padding"]) < 0 or filters % options["groups"]:
        raise Refused(f"torch does not accept this convolution of {filters} filters: {options}")
    moved, taps, padding = CONVOLUTIONS[problem.kind], anchor_weight(problem).shape[2:], options["padding"]
    image = problem.x.shape[-moved:]
    spans = [step * (size - 1) + 1 for step, size in zip(options["dilation"], taps, strict=False)]
    if any(size + 2 * pad < span for size, pad, span in zip(image, padding, spans, strict=False)):
        raise Refused(f"torch does not accept an image of {tuple(problem.x.shape)} for filters that span {spans}")
    if bias is not None and bias.shape != (filters,):
        raise Refused(f"torch does not accept a bias of shape {bias.shape} for {filters} filters")


def _convolution_strides(problem: Problem, shape: torch.Size) -> Strides:
    """Strides of a convolution's result: channels_last if the input or the weight suggests it (meta tensors guess)."""
    x, weight = problem.x, anchor_weight(problem)
    batched = len(shape) == CONVOLUTIONS[problem.kind] + 2
    x_shape, x_strides = (x.shape, x.strides) if batched else ((1, *x.shape), (x.shape[0] * x.strides[0], *x.strides))
    if is_channels_last(x_shape, x_strides) or is_channels_last(weight.shape, weight.strides):
        return channels_last_strides(shape if batched else (1, *shape))[-len(shape) :]
    return contiguous_strides(shape)


def as_images(kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> tuple[int, int] | None:
    """How a convolution of volumes is one of images: along which of depth, height and width (0, 1, 2) the filters of
    images move. None if its filters are not flat.

    (0, 1): a plane's height and width together are an image's width. (1, 2): each plane is an image.
    """
    if tuple(kernel[1:]) == (1, 1) and tuple(padding[1:]) == (0, 0) and tuple(stride[1:]) == (1, 1):
        return 0, 1
    return (1, 2) if kernel[0] == 1 and padding[0] == 0 else None


# ---------------------------------------------------------------------------------------------- checks


def channel_operands(expression: Expr) -> frozenset[int]:
    """Operands that are read along dimension 1 of the result (batch_norm's and prelu's).

    Raises UnsupportedError if one is read along other dimensions, too: kernels read an operand in one way.
    """
    along_channels: set[Expr] = set()
    elsewhere: set[Expr] = {expression}
    for node in reversed(list(postorder(expression))):  # users first
        if isinstance(node, Call):
            ways = [way for way in (along_channels, elsewhere) if node in way]
            for position, arg in enumerate(node.args):
                for way in [along_channels] if position in ops.row(node.op).channel_args else ways:
                    way.add(arg)
    both = [f"o{node.index}" for node in along_channels & elsewhere if isinstance(node, Operand)]
    if both:
        raise UnsupportedError(f"{' and '.join(both)} is read along the channels and along other dimensions")
    return frozenset(node.index for node in along_channels if isinstance(node, Operand))


def typed(problem: Problem, acc: torch.Tensor) -> tuple[Expr, torch.dtype]:
    """The problem's epilogue with its dtypes settled, and the dtype of its result, which is to take acc's place.

    Args:
        acc: the anchor's result as a meta tensor with eager's strides.

    Raises UnsupportedError as `settle` does, and if the result is of another shape or has other strides.
    """
    expression, result = settle(problem, acc)
    if result.shape != acc.shape:
        raise UnsupportedError(f"an operand enlarges the result from {tuple(acc.shape)} to {tuple(result.shape)}")
    if any(size > 1 and result.stride(dim) != acc.stride(dim) for dim, size in enumerate(acc.shape)):
        raise UnsupportedError(f"eager's result has strides {result.stride()}, its anchor's {acc.stride()}")
    return expression, result.dtype


def settle(problem: Problem, acc: torch.Tensor) -> tuple[Expr, torch.Tensor]:
    """The problem's epilogue with its dtypes settled, and its result as a meta tensor.

    A kernel computes every intermediate in float32. That is what eager computes, or better, if every number on the way
    is of a floating dtype up to float32: integer arithmetic wraps and truncates, float64 has more digits. `type_as`
    becomes a cast to the dtype it means, or nothing.

    Raises UnsupportedError if something on the way, or the result, is of another dtype, or if there are more operands
    than MAX_OPERANDS.
    """
    if len(problem.operands) > MAX_OPERANDS:
        raise UnsupportedError(f"{len(problem.operands)} operands; kernels take {MAX_OPERANDS}")
    value = evaluate_all(problem, acc)
    result = value[problem.expression]
    settled: dict[Expr, Expr] = {}
    for node in value:
        if isinstance(node, Operand):
            check_operand(problem.operands[node.index])
        settled[node] = node
        if isinstance(node, Call):
            values, row = [value[arg] for arg in node.args], ops.row(node.op)
            if row.channel_args and values[0].shape != result.shape:
                shapes = f"{tuple(values[0].shape)} in a result of {tuple(result.shape)}"
                raise UnsupportedError(f"{row.name} of a tensor of {shapes}")
            formats = row.formats.get(problem.x.device.type)
            if formats is not None and not any(values[0].is_contiguous(memory_format=kept) for kept in formats):
                raise UnsupportedError(f"{row.name}'s result has other strides than its argument")
            settled[node] = _settled(row, [settled[arg] for arg in node.args], values, value[node])
    if result.dtype not in RESULT_DTYPES:
        raise UnsupportedError(f"the result's dtype is {result.dtype}; kernels have float32, float16 and bfloat16")
    return settled[problem.expression], result


def evaluate_all(problem: Problem, acc: torch.Tensor) -> dict[Expr, Any]:
    """Every value of the epilogue, arguments before their users, as meta tensors. Raises Refused."""
    value: dict[Expr, Any] = {}
    for node in postorder(problem.expression):
        match node:
            case Call(op, args):
                try:
                    value[node] = _with_eagers_strides(ops.row(op), [value[arg] for arg in args], problem.x.device)
                except (RuntimeError, IndexError, ValueError, TypeError) as error:
                    raise Refused(f"torch does not accept these tensors: {error}") from None
            case Operand(index):
                value[node] = operand_at(problem.operands, index).empty()
            case Const(number):
                value[node] = number
            case _:
                value[node] = acc
    return value


def _with_eagers_strides(row: ops.PointwiseOp, args: list[Any], device: torch.device) -> Any:
    """What the row computes of meta tensors.

    Of expanded ones that are of 16 bits or integers these make a copy in float32 first, which has strides of its own;
    torch's kernels do not, but for those on a CPU if the tensors are of several dtypes.
    """
    result = row.reference(*args)
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    converts = row.code != "{0}" and row.in_place_of is None and not row.boolean
    converts &= device.type != "cpu" or len({arg.dtype for arg in tensors}) == 1
    if not converts or all(t.dtype == torch.float32 or not _is_expanded(t) for t in tensors):
        return result
    twins = [_float32(arg) if isinstance(arg, torch.Tensor) and arg.dtype != torch.bool else arg for arg in args]
    return result.as_strided(result.shape, row.reference(*twins).stride())


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _float32(meta: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(meta.shape, meta.stride(), dtype=torch.float32, device="meta")


def without_unread(problem: Problem, acc: torch.Tensor) -> tuple[Problem, tuple[int, ...]] | None:
    """The problem without the operands that nothing reads, and which are left; None if all are read.

    Of what `type_as` is given only the dtype counts. Nothing else is known of that operand: it may be of any shape, so
    that no kernel may be given its address. Raises as `evaluate_all` does, and if `type_as` moves to another device.
    """
    if _operands_of(problem.expression) == set(range(len(problem.operands))) and not any(
        isinstance(node, Call) and node.op == "type_as" for node in postorder(problem.expression)
    ):
        return None
    value = evaluate_all(problem, acc)
    replaced: dict[Expr, Expr] = {}
    for node in value:
        replaced[node] = node
        if isinstance(node, Call):
            args = [replaced[arg] for arg in node.args]
            replaced[node] = Call(node.op, tuple(args))
            if node.op == "type_as" and value[node].dtype in _CASTS:
                if not _is_on_device(problem, node.args[1]):
                    raise UnsupportedError("type_as moves a tensor to another device")
                replaced[node] = _cast_to(value[node].dtype, args[0], value[node.args[0]].dtype)
    expression = replaced[problem.expression]
    left = tuple(sorted(_operands_of(expression)))
    if len(left) == len(problem.operands):
        return None
    epilogue = rewrite(expression, lambda node: Operand(left.index(node.index)) if isinstance(node, Operand) else node)
    operands = tuple(problem.operands[index] for index in left)
    return dataclasses.replace(problem, epilogue=str(epilogue), operands=operands, written=None), left


def _operands_of(expression: Expr) -> set[int]:
    return {node.index for node in postorder(expression) if isinstance(node, Operand)}


def _is_on_device(problem: Problem, expression: Expr) -> bool:
    """Whether its value is where x is, and not made of numbers on the CPU alone."""
    leaves = [node for node in postorder(expression) if isinstance(node, Acc | Operand)]
    metas = [problem.operands[leaf.index] if isinstance(leaf, Operand) else problem.x for leaf in leaves]
    return any(meta.device == problem.x.device for meta in metas)


def check_operand(operand: TensorMeta) -> None:
    """Raises UnsupportedError if kernels do not read operands like it."""
    # a float64 scalar is fine: without dimensions it does not promote what it meets
    if operand.dtype not in OPERAND_DTYPES and not (operand.dtype == torch.float64 and operand.shape == ()):
        raise UnsupportedError(f"an operand is of {operand.dtype}, which kernels do not read")


_CASTS: Final = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def _settled(row: ops.PointwiseOp, args: list[Expr], values: list[Any], result: torch.Tensor) -> Expr:
    if row.boolean:
        # logical operations see truth values only; comparisons must be of numbers that float32 holds
        logical = row.name.startswith("logical")
        computed = torch.float32 if logical else torch.result_type(*values)
    else:
        computed = result.dtype
    if computed not in RESULT_DTYPES:
        raise UnsupportedError(f"{row.name} computes in {computed}; kernels compute in float32")
    if row.name in ("type_as", "assign"):
        return _cast_to(result.dtype, args[0], values[0].dtype)
    return Call(row.in_place_of or row.name, tuple(args))


def _cast_to(dtype: torch.dtype, node: Expr, before: torch.dtype) -> Expr:
    return node if before == dtype else Call(_CASTS[dtype], (node,))
