"""Problems and plans. A `Problem` is a region with concrete shapes, strides, dtypes and device: a frozen value.

A `Plan` is what runs a problem (cpu/plan.py, cuda/plan.py make them). The checks here decide whether a kernel may run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import torch
import torch.nn.functional as F

from fxfuse import ops, results
from fxfuse.build import Source
from fxfuse.errors import ExpressionError, UnsupportedError
from fxfuse.expression import Acc, Call, Const, Expr, Operand, operand_count, parse, postorder, rewrite
from fxfuse.layout import Strides, channels_last_strides, contiguous_strides, is_channels_last
from fxfuse.pooling import MaxPool, pooled
from fxfuse.reference import evaluate, operand_at

Run: TypeAlias = Callable[[torch.Tensor, Any, "torch.Tensor | None", Sequence[torch.Tensor]], torch.Tensor]
"""run(x, weight, bias, operands) -> result; weight is a tensor for PRODUCTS, and None for a chain"""


class ByAddress:
    """A Run that needs only the addresses of a call's tensors. A caller that knows them can call `launch` itself."""

    def __init__(self, launch: Callable[[tuple[torch.Tensor, ...], list[int]], torch.Tensor]) -> None:
        """launch(tensors, addresses) -> result: the call's tensors as `in_order` has them, and their addresses."""
        self.launch = launch

    def __call__(
        self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None, operands: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        tensors = in_order(x, weight, bias, operands)
        return self.launch(tensors, [tensor.data_ptr() for tensor in tensors])


def in_order(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, operands: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """A call's tensors in the order x, weight, operands, bias. A weight or bias that is None is left out."""
    if weight is None:
        return (x, *operands) if bias is None else (x, *operands, bias)
    return (x, weight, *operands) if bias is None else (x, weight, *operands, bias)


RESULT_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


class Refused(UnsupportedError):
    """torch itself does not accept the tensors. Torch runs the region and raises the exception that eager raises."""


class Declined(UnsupportedError):
    """No kernel is wanted: it would gain nothing, or the region computes no floating-point numbers. Not an error, even
    if `strict`."""


MAX_OPERANDS: Final = 48
"""Most operands of a kernel: a launch takes 64 addresses (binding.h), some of which are the anchor's own tensors."""

OPERAND_DTYPES: Final = (
    *RESULT_DTYPES, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


@dataclass(frozen=True)
class TensorMeta:
    """The properties of a tensor that a plan may depend on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    alignment: int = 16
    """Largest power of two, up to 16, that divides the data's address in bytes."""
    is_parameter: bool = False
    """Whether it is a parameter. A parameter's shape does not change from call to call."""

    @classmethod
    def of(cls, tensor: torch.Tensor, device: torch.device, alignment: int = 16) -> TensorMeta:
        """The meta of a tensor on `device` with the shape, strides and dtype of `tensor`, which may be elsewhere."""
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, device, alignment, is_parameter)

    def empty(self) -> torch.Tensor:
        """A meta tensor with this shape, these strides and this dtype."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Problem:
    """A region with concrete shapes, strides, dtypes and device."""

    kind: str
    """The fused operator: a key of ANCHORS."""
    options: tuple[tuple[str, Any], ...]
    """The anchor's options: addmm's beta and alpha; a convolution's stride, padding, dilation and groups; a
    normalisation's shape and eps; for a chain, whether the pass may overwrite x."""
    epilogue: str
    x: TensorMeta
    weight: TensorMeta | None
    """None for a chain, and for a normalisation without a weight: see `anchor_weight`."""
    bias: TensorMeta | None
    operands: tuple[TensorMeta, ...]
    fp32: str = "exact"
    """How float32 products may be computed where torch's switches ask for full precision: see fxfuse.optimize."""
    pool: tuple[Any, ...] = ()
    """The fields of the MaxPool that is applied to the epilogue's result; empty if there is none."""
    written: Expr | None = None
    """The epilogue as the model wrote it, which torch runs; None if `epilogue` is that."""
    replayed: bool = False
    """Whether the call becomes a part of a CUDA graph, so that the CPU's time for it does not matter."""

    @property
    def expression(self) -> Expr:
        return parsed(self.epilogue)

    @property
    def is_chain(self) -> bool:
        """Whether there is no anchor."""
        return self.kind == "pointwise"

    @property
    def label(self) -> str:
        """The problem's name in messages."""
        return f"{self.kind}: {self.epilogue}" + (f"; {MaxPool(*self.pool)}" if self.pool else "")

    def reference(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, operands: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The problem's result by torch, operation by operation."""
        epilogue = self.expression if self.written is None else self.written
        return run_reference(self.kind, self.options, epilogue, self.pool, x, weight, bias, operands)


@dataclass(frozen=True)
class Pass:
    """What the only launch of a plan computes: an expression for each element, or for each row of a LayerNorm."""

    expression: Expr
    """The expression of acc and the problem's operands."""
    reads_bias: bool
    """Whether the bias is the last operand of `expression`."""
    acc: str
    """What acc is. "library": the result of the anchor, which torch ran before. "layer_norm": the result of a LayerNorm
    that the launch computes, too."""


@dataclass(frozen=True)
class Plan:
    """What runs a problem."""

    run: Run
    kernel: str | None
    """The kernel's name; None if torch runs it."""
    reason: str | None = None
    """Why torch runs it, if it does."""
    measured: tuple[tuple[str, float], ...] = ()
    """(name, seconds) of each candidate that was measured."""
    errors: tuple[tuple[str, float], ...] = ()
    """(name, error) of each candidate whose error was compared with eager's: a multiple of the largest one allowed."""
    workspace: int = 0
    """Bytes of scratch memory that a call allocates besides its output."""
    provisional: bool = False
    """Whether the plan is for this call only, because nothing could be measured now."""
    computes: Pass | None = None
    """What its only launch computes, if that can be merged into another kernel of a program; else None."""
    sources: tuple[Source, ...] = ()
    """The sources of the kernels that it launches; empty if they are not known."""


def in_turn(first: Plan, second: Plan, run: Run) -> Plan:
    """The plan of a problem that was split in two; `run` runs both parts, one after the other."""
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
"""A problem's compiled kernels. Calling the draft chooses between them, by measuring if need be, and gives the plan.
Within `may_postpone` it may raise Postponed."""


class Postponed(BaseException):
    """A draft needs more kernels: it should be called again after `compile()`. No error, so no handler of those."""

    def __init__(self, compile: Callable[[], object]) -> None:
        super().__init__()
        self.compile = compile


_may_postpone = threading.local()


@contextlib.contextmanager
def may_postpone() -> Iterator[None]:
    """Inside, drafts that this thread calls raise Postponed before they wait for a compiler."""
    _may_postpone.now = True
    try:
        yield
    finally:
        _may_postpone.now = False


def postpone(compile: Callable[[], object]) -> None:
    """Raises Postponed within `may_postpone`; elsewhere it compiles at once."""
    if getattr(_may_postpone, "now", False):
        raise Postponed(compile)
    compile()


@functools.lru_cache(maxsize=4096)
def parsed(epilogue: str) -> Expr:
    """The epilogue's expression, cached.

    Raises ExpressionError if the text is not an expression, if it calls an operation that is not in the table or one
    with a wrong number of arguments, or if it computes with numbers alone.
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


# numbers of arguments were checked against the row that is replaced
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


def _conv2d_weight(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kernel: Sequence[int],
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
) -> torch.Tensor:  # fmt: skip
    """The gradient of a convolution's filters, in channels_last. x is its result's gradient, the weight its input."""
    if x.dtype == torch.float64:  # for comparisons; torch's convolutions would take much more memory
        return _conv2d_weight_by_taps(x, weight, kernel, stride, padding, dilation, groups)
    filters = x.new_empty(1).expand(x.shape[1], weight.shape[1] // groups, *kernel)  # only its shape is read
    options = (list(stride), list(padding), list(dilation), False, [0, 0], groups, [False, True, False])
    result: torch.Tensor = torch.ops.aten.convolution_backward(x, weight, filters, None, *options)[1]
    return result.contiguous(memory_format=torch.channels_last)


def _conv2d_weight_by_taps(
    dy: torch.Tensor, x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> torch.Tensor:  # fmt: skip
    """`_conv2d_weight`, one position of the filter after another."""
    images = F.pad(x, (padding[1], padding[1], padding[0], padding[0])).unflatten(1, (groups, -1))
    gradient, taps = dy.unflatten(1, (groups, -1)), []
    spans = [(size - 1) * step + 1 for size, step in zip(dy.shape[2:], stride, strict=True)]
    for row, col in itertools.product(*map(range, kernel)):
        y, z = row * dilation[0], col * dilation[1]
        seen = images[..., y : y + spans[0] : stride[0], z : z + spans[1] : stride[1]]
        taps.append(torch.einsum("ngkyx,ngcyx->gkc", gradient, seen).flatten(0, 1))
    found: torch.Tensor = torch.stack(taps, -1).view(*taps[0].shape, *kernel)
    return found.contiguous(memory_format=torch.channels_last)


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
    "conv2d_weight": _conv2d_weight,
    "conv3d": _conv3d,
    "layer_norm": _layer_norm,
    "pointwise": _pointwise,
}
"""The anchor of each fused operator, in torch: anchor(x, weight, bias, **options)."""

CONVOLUTIONS: Final[Mapping[str, int]] = {"conv2d": 2, "conv3d": 3}
"""The convolutions, and the number of dimensions that their filters move along."""

BY_CONVOLUTION: Final = frozenset({"conv2d_weight", *CONVOLUTIONS})
"""The products that torch computes as convolutions. torch's switch for TF32 in convolutions applies to them."""

PRODUCTS: Final = frozenset({"linear", "gated_linear", "matmul", "mm", "addmm", "bmm", *BY_CONVOLUTION})
"""The anchors that multiply x with a weight of its dtype. torch's switches for TF32 apply to them."""

BY_ROWS: Final = frozenset({"linear", "gated_linear"})
"""The matrix products whose weight is (N, K). The others' is (K, N), and (batch, K, N) for bmm."""

THIN: Final = 8
"""Most terms of the sums of a thin product, and most rows or columns of its result."""


def is_thin(terms: int, side: int) -> bool:
    """Whether a product is thin, so that a tile of tensor cores would be mostly empty: a pass computes it sooner.

    Args:
        terms: of each of its sums.
        side: rows or columns of its result, whichever are fewer.
    """
    return 0 < max(terms, side) <= THIN


OPTION_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    kind: tuple(inspect.signature(anchor).parameters)[3:] for kind, anchor in ANCHORS.items()
}
"""The names of each anchor's options: the keys of Problem.options, in the order of the operator's schema."""


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
    """Splits the operands of a gated linear into the gate's weight, the gate's bias, and the operands o1, o2, ...

    The gate is the second linear of x. The epilogue calls its result, bias included, o0. In `operands` its weight is
    the first and its bias, if it has one, the last.
    """
    named = operand_count(epilogue)
    operand_at(operands, max(named, 1) - 1)
    return operands[0], operands[named] if len(operands) > named else None, tuple(operands[1:named])


def anchor_alone(problem: Problem) -> Run:
    """A Run of the anchor by torch, for regions with the epilogue "acc"."""

    def run(
        x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, operands: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        return run_anchor(problem.kind, problem.options, x, weight, bias)

    return run


def anchor_meta(problem: Problem) -> torch.Tensor:
    """The anchor's result as a meta tensor. Raises Refused where torch does not accept the shapes."""
    if problem.kind in CONVOLUTIONS:
        _check_convolution(problem)
    shape = results.of_anchor(problem.kind, dict(problem.options), problem.x, problem.weight, problem.bias)
    try:
        if shape is None:
            weight, bias = (meta.empty() if meta is not None else None for meta in (problem.weight, problem.bias))
            acc = run_anchor(problem.kind, problem.options, problem.x.empty(), weight, bias)
        else:
            acc = torch.empty(shape, dtype=problem.x.dtype, device="meta")
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise Refused(f"torch does not accept these tensors: {error}") from None
    if problem.kind in CONVOLUTIONS:
        return acc.as_strided(acc.shape, _convolution_strides(problem, acc.shape))
    if problem.kind == "conv2d_weight":
        return acc.as_strided(acc.shape, channels_last_strides(acc.shape))
    # a meta layer_norm keeps x's layout; torch's kernels make x contiguous first
    return acc.as_strided(acc.shape, contiguous_strides(acc.shape)) if problem.kind == "layer_norm" else acc


def _check_convolution(problem: Problem) -> None:
    """Checks what torch's kernels of a convolution check and its meta function does not. Raises Refused."""
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
    """Strides of a convolution's result: channels_last if the input or the weight is, else contiguous.

    (torch's meta function only guesses them.)
    """
    x, weight = problem.x, anchor_weight(problem)
    batched = len(shape) == CONVOLUTIONS[problem.kind] + 2
    x_shape, x_strides = (x.shape, x.strides) if batched else ((1, *x.shape), (x.shape[0] * x.strides[0], *x.strides))
    if is_channels_last(x_shape, x_strides) or is_channels_last(weight.shape, weight.strides):
        return channels_last_strides(shape if batched else (1, *shape))[-len(shape) :]
    return contiguous_strides(shape)


def as_images(kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> tuple[int, int] | None:
    """The two dimensions of a volume, of depth, height and width (0, 1, 2), along which flat filters move.

    A convolution of volumes with flat filters is one of images:

    - (0, 1): an image's height is the depth, its width a plane's height and width together.
    - (1, 2): each plane is an image.

    None if the filters are not flat.
    """
    if tuple(kernel[1:]) == (1, 1) and tuple(padding[1:]) == (0, 0) and tuple(stride[1:]) == (1, 1):
        return 0, 1
    return (1, 2) if kernel[0] == 1 and padding[0] == 0 else None


# ---------------------------------------------------------------------------------------------- checks


def channel_operands(expression: Expr) -> frozenset[int]:
    """Indices of the operands that are vectors along dimension 1 of the result (batch_norm's and prelu's).

    Raises UnsupportedError if one is read along other dimensions, too: a kernel reads each operand in one way.
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
    """`settle` for a kernel whose result has acc's shape and strides: the epilogue, and the dtype of its result.

    Args:
        acc: the anchor's result as a meta tensor with eager's strides.

    Raises UnsupportedError as `settle` does, and if the result's shape or strides differ from acc's.
    """
    expression, result = settle(problem, acc)
    if result.shape != acc.shape:
        raise UnsupportedError(f"an operand enlarges the result from {tuple(acc.shape)} to {tuple(result.shape)}")
    if any(size > 1 and result.stride(dim) != acc.stride(dim) for dim, size in enumerate(acc.shape)):
        raise UnsupportedError(f"eager's result has strides {result.stride()}, its anchor's {acc.stride()}")
    return expression, result.dtype


def settle(problem: Problem, acc: torch.Tensor) -> tuple[Expr, torch.Tensor]:
    """The epilogue with `type_as` and `assign` replaced by casts, and its result as a meta tensor.

    Casts that do not change the dtype are removed. A kernel computes every intermediate in float32. This is as exact as
    eager, or better, if eager computes every intermediate in a floating dtype up to float32. It would not be for
    integers, which wrap and truncate, nor for float64, which has more digits.

    Raises UnsupportedError if an intermediate or the result has another dtype, or if there are more than MAX_OPERANDS
    operands.
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
    """Every node of the epilogue with its value as a meta tensor, arguments before users. Raises Refused."""
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
    """The row's result for meta tensors, with the strides that torch's kernels give it.

    A meta function first copies expanded tensors of 16 bits or integers to float32, and the copy has strides of its
    own. torch's kernels make no such copy, except on a CPU where the tensors have several dtypes.
    """
    known = results.of_row(row, args)
    if known is not None:
        return known
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
    """The problem without unread operands, and the indices of those that are left; None if all are read.

    `type_as` uses only the dtype of its second argument. That operand may have any shape, so a kernel must not get its
    address. Raises as `evaluate_all` does, and UnsupportedError if `type_as` moves a tensor to another device.
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
    """Whether the expression's value is on x's device: whether it reads at least one tensor that is."""
    leaves = [node for node in postorder(expression) if isinstance(node, Acc | Operand)]
    metas = [problem.operands[leaf.index] if isinstance(leaf, Operand) else problem.x for leaf in leaves]
    return any(meta.device == problem.x.device for meta in metas)


def check_operand(operand: TensorMeta) -> None:
    """Raises UnsupportedError if kernels cannot read operands of this dtype."""
    # a float64 scalar is fine: without dimensions it does not promote what it meets
    if operand.dtype not in OPERAND_DTYPES and not (operand.dtype == torch.float64 and operand.shape == ()):
        raise UnsupportedError(f"an operand is of {operand.dtype}, which kernels do not read")


_CASTS: Final = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def _settled(row: ops.PointwiseOp, args: list[Expr], values: list[Any], result: torch.Tensor) -> Expr:
    if row.boolean:
        # logical operations read truth values only; numbers that are compared must fit float32
        logical = row.name.startswith("logical")
        computed = torch.float32 if logical else torch.result_type(values[0], values[-1])
    else:
        computed = result.dtype
    if computed not in RESULT_DTYPES:
        raise UnsupportedError(f"{row.name} computes in {computed}; kernels compute in float32")
    if row.name in ("type_as", "assign"):
        return _cast_to(result.dtype, args[0], values[0].dtype)
    node = Call(row.in_place_of or row.name, tuple(args))
    if torch.float16 in (computed, result.dtype) and ops.asks_for_overflow(node):
        return Call(node.op, tuple(arg if isinstance(arg, Const) else Call("float16", (arg,)) for arg in args))
    return node


def _cast_to(dtype: torch.dtype, node: Expr, before: torch.dtype) -> Expr:
    return node if before == dtype else Call(_CASTS[dtype], (node,))
