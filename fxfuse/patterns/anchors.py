"""Anchors: the GEMMs, convolutions and normalisations that a region starts from.

`find_anchor` describes what one node of a traced graph computes, in terms of the fused operators (functional.py): its
tensors and its further options.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxfuse import functional, ops  # noqa: F401 (functional registers operators that are looked up here)
from fxfuse.hooks import has_hooks, why_no_kernel
from fxfuse.layout import ends_aligned
from fxfuse.ops import REQUIRED, Rejected
from fxfuse.problem import RESULT_DTYPES, as_images


@dataclass(frozen=True)
class Attribute:
    """A parameter or buffer by its path in the model, read anew at every call."""

    path: str


Source: TypeAlias = fx.Node | Attribute
"""Where a tensor of a region comes from."""


@dataclass(frozen=True)
class Anchor:
    """What an anchor node computes: `kind`(x, weight, bias, **options)."""

    kind: str
    """The fused operator's name.

    "linear" and "gated_linear" have a weight (N, K); "matmul", "mm" and "addmm" have (K, N); in "bmm" both sides have a
    batch. "conv2d_weight" is the gradient of a convolution's filters: x is its result's gradient, the weight its input.
    The others: "conv2d", "conv3d", "layer_norm", "pointwise" for a chain, whose acc is x itself."""
    x: Source
    weight: Source | None
    bias: Source | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def tensor_at(root: nn.Module, path: str) -> Any:
    """The attribute of `root` at a dotted path; raises AttributeError if there is none."""
    return operator.attrgetter(path)(root)


def known_tensor(root: nn.Module, source: Any) -> torch.Tensor | None:
    """The parameter or buffer behind `source`, or the part of one that it is, else the fake tensor that Dynamo or
    torch.export noted for it, else None.

    The sizes of a fake tensor may be symbols.
    """
    path = source.path if isinstance(source, Attribute) else None
    if isinstance(source, fx.Node) and source.op == "call_method" and source.target == "t":
        matrix = known_tensor(root, source.args[0])
        return matrix.t() if matrix is not None and matrix.dim() <= 2 else None
    if isinstance(source, fx.Node) and source.target is operator.getitem and noted(source) is None:
        rows: Any = source.args[1]
        whole = known_tensor(root, source.args[0])
        return whole.detach()[rows] if whole is not None and _are_rows(rows) and whole.dim() > 0 else None
    if isinstance(source, fx.Node) and source.op == "get_attr":
        path = str(source.target)
    tensor = tensor_at(root, path) if path is not None else noted(source)
    return tensor if isinstance(tensor, torch.Tensor) else None


def _are_rows(index: Any) -> bool:
    """Whether an index is a slice of known numbers that torch takes."""
    if not isinstance(index, slice) or not all(
        end is None or type(end) is int for end in (index.start, index.stop, index.step)
    ):
        return False
    return index.step is None or index.step > 0


def noted(node: Any) -> Any:
    """The fake value that Dynamo ("example_value") or torch.export ("val") noted for a node; None if neither did."""
    meta = node.meta if isinstance(node, fx.Node) else {}
    return meta.get("val", meta.get("example_value"))


# -------------------------------------------------------------------------------------------- modules


def _parameter(node: fx.Node, module: nn.Module, name: str) -> Attribute | None:
    return None if getattr(module, name) is None else Attribute(f"{node.target}.{name}")


def _input(node: fx.Node) -> fx.Node:
    args = [*node.args, *node.kwargs.values()]
    if len(args) != 1 or not isinstance(args[0], fx.Node):
        raise Rejected("its input is not one tensor")
    return args[0]


def _linear_module(root: nn.Module, node: fx.Node, module: nn.Linear) -> Anchor:
    return Anchor("linear", _input(node), Attribute(f"{node.target}.weight"), _parameter(node, module, "bias"))


def _conv2d_module(root: nn.Module, node: fx.Node, module: nn.Conv2d) -> Anchor:
    if module.padding_mode != "zeros":
        raise Rejected(f"padding_mode={module.padding_mode!r} (only zeros)")
    options = _conv2d_options(module.stride, module.padding, module.dilation, module.groups, module.kernel_size)
    return Anchor("conv2d", _input(node), Attribute(f"{node.target}.weight"), _parameter(node, module, "bias"), options)


def _conv3d_module(root: nn.Module, node: fx.Node, module: nn.Conv3d) -> Anchor | None:
    if module.padding_mode != "zeros":
        return None
    weight, bias = Attribute(f"{node.target}.weight"), _parameter(node, module, "bias")
    return _conv3d(root, _input(node), weight, bias, module.stride, module.padding, module.dilation, module.groups)


def _layer_norm_module(root: nn.Module, node: fx.Node, module: nn.LayerNorm) -> Anchor | None:
    weight, bias = (_parameter(node, module, name) for name in ("weight", "bias"))
    return _normalisation(root, _input(node), module.normalized_shape, weight, bias, module.eps)


def _normalisation(
    root: nn.Module, x: fx.Node, shape: Any, weight: Source | None, bias: Source | None, eps: Any
) -> Anchor | None:
    """The anchor of a LayerNorm that a kernel of fxfuse may compute; None for one that is better left to torch."""
    known = isinstance(shape, Sequence) and all(type(size) is int for size in shape) and isinstance(eps, int | float)
    if not known or 0 in shape or not _is_for_kernels(root, x, weight, bias):
        return None
    return Anchor("layer_norm", x, weight, bias, {"normalized_shape": list(shape), "eps": float(eps)})


def _is_for_kernels(root: nn.Module, x: fx.Node, *parameters: Source | None) -> bool:
    """Whether those of the tensors that are known are on a GPU and have a dtype that kernels read.

    If none is known, they are assumed to be where the model's first parameter is.
    """
    sources = [source for source in (x, *parameters) if source is not None]
    known = [tensor for tensor in (known_tensor(root, source) for source in sources) if tensor is not None]
    if any(tensor.dtype not in RESULT_DTYPES for tensor in known):
        return False
    known = known or list(itertools.islice(root.parameters(), 1))
    return bool(known) and all(map(_on_gpu, known))


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


_MODULES: Final[Mapping[type[nn.Module], Callable[[nn.Module, fx.Node, Any], Anchor | None]]] = {
    nn.Linear: _linear_module,
    nn.Conv2d: _conv2d_module,
    nn.Conv3d: _conv3d_module,
    nn.LayerNorm: _layer_norm_module,
}


# ------------------------------------------------------------------------------------------ functions


def _pair(value: Any, name: str) -> tuple[int, int]:
    pair = _numbers(value, 2)
    if pair is None:
        raise Rejected(f"{name}={value!r} is not known before the model runs")
    return pair[0], pair[1]


def _numbers(value: Any, count: int) -> list[int] | None:
    """A convolution's option as `count` numbers; None if it is a word, or not known before the model runs."""
    found = [value] if isinstance(value, int) else list(value) if isinstance(value, Sequence) else []
    found = found * count if len(found) == 1 else found
    return found if len(found) == count and all(isinstance(item, int) for item in found) else None


def _conv2d_options(
    stride: Any, padding: Any, dilation: Any, groups: Any, kernel: Sequence[int] | None
) -> dict[str, Any]:
    """The fused operator's options: padding as (vertical, horizontal), or (top, bottom, left, right) if uneven."""
    if not isinstance(groups, int):
        raise Rejected(f"groups={groups!r} is not known before the model runs")
    stride, dilation = _pair(stride, "stride"), _pair(dilation, "dilation")
    if padding == "valid":
        sides: tuple[int, ...] = (0, 0)
    elif padding == "same":
        if stride != (1, 1):
            raise Rejected("padding='same' with a stride, which torch refuses")
        if kernel is None:
            raise Rejected("padding='same' with a weight whose size is not known before the model runs")
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        halves = [total // 2 for total in totals]
        even = all(total % 2 == 0 for total in totals)
        # torch adds an odd row at the bottom and an odd column at the right
        sides = (halves[0], halves[1]) if even else (
            halves[0], totals[0] - halves[0], halves[1], totals[1] - halves[1],
        )  # fmt: skip
    else:
        sides = _pair(padding, "padding")
    return {"stride": list(stride), "padding": list(sides), "dilation": list(dilation), "groups": groups}


def _tensor(value: Any, what: str) -> fx.Node:
    if not isinstance(value, fx.Node):
        raise Rejected(f"its {what} is not a tensor of the graph")
    return value


def _optional_tensor(value: Any, what: str) -> fx.Node | None:
    return None if value is None else _tensor(value, what)


def _weight_matrix(root: nn.Module, value: Any) -> fx.Node:
    """The right side of a product: a 2-D parameter or buffer, perhaps transposed, or another value known to be 2-D."""
    source = _tensor(value, "right side")
    transposed = (
        (source.op == "call_method" and source.target == "t" and len(source.args) == 1)
        or (source.op == "call_function" and source.target is torch.t and len(source.args) == 1)
        or (source.op == "call_function" and source.target is getattr and source.args[1:] in (("T",), ("mT",)))
    )
    tensor = known_tensor(root, source.args[0] if transposed else source)
    if tensor is None:
        raise Rejected("its right side is not a parameter or buffer")
    if tensor.dim() != 2:
        raise Rejected(f"its right side has {tensor.dim()} dimensions, not 2")
    return source


def _linear(root: nn.Module, x: Any, weight: Any, bias: Any) -> Anchor:
    return Anchor("linear", _tensor(x, "input"), _tensor(weight, "weight"), _optional_tensor(bias, "bias"))


def _matmul(root: nn.Module, x: Any, weight: Any) -> Anchor:
    return Anchor("matmul", _tensor(x, "left side"), _weight_matrix(root, weight))


def _mm(root: nn.Module, x: Any, weight: Any) -> Anchor:
    return Anchor("mm", _tensor(x, "left side"), _weight_matrix(root, weight))


def _bmm(root: nn.Module, x: Any, weight: Any) -> Anchor | None:
    """A product of batches for which fxfuse's kernels may be faster than a library; None for others.

    These are products in float32, and those whose rows do not end aligned.
    """
    left, right = (known_tensor(root, side) for side in (x, weight))
    if left is None or right is None or not (left.is_cuda and right.is_cuda and left.dtype in RESULT_DTYPES):
        return None
    lengths = (*left.shape[1:], right.shape[2])
    if any(type(length) is not int for length in lengths):  # computing with symbols would tie the graph to these sizes
        return None
    if left.dtype != torch.float32 and ends_aligned(left.dtype, *lengths):
        return None
    return Anchor("bmm", _tensor(x, "left side"), _tensor(weight, "right side"))


def _addmm(root: nn.Module, bias: Any, x: Any, weight: Any, beta: Any, alpha: Any) -> Anchor:
    if not all(isinstance(value, int | float) for value in (beta, alpha)):
        raise Rejected("alpha or beta is not known before the model runs")
    options = {"beta": float(beta), "alpha": float(alpha)}
    return Anchor("addmm", _tensor(x, "left side"), _weight_matrix(root, weight), _tensor(bias, "bias"), options)


def _conv2d(
    root: nn.Module, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: Any
) -> Anchor:
    weight = _tensor(weight, "weight")
    tensor = known_tensor(root, weight)
    options = _conv2d_options(stride, padding, dilation, groups, None if tensor is None else tensor.shape[-2:])
    return Anchor("conv2d", _tensor(x, "input"), weight, _optional_tensor(bias, "bias"), options)


def _conv2d_weight(
    root: nn.Module, x: Any, weight: Any, bias: Any, operands: Any, epilogue: str, kernel: Any, stride: Any,
    padding: Any, dilation: Any, groups: Any,
) -> Anchor | None:  # fmt: skip
    """The gradient of filters in a training step (decompositions.py); None if it has an epilogue already."""
    if epilogue != "acc":
        return None
    sides = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    options = {**{name: tuple(side) for name, side in sides.items()}, "groups": groups}
    return Anchor("conv2d_weight", x, weight, options=options)


def _conv3d(
    root: nn.Module, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: Any
) -> Anchor | None:
    """A convolution of volumes with flat filters, which is one of images; None for one that is left to torch.

    Factorised convolutions (R(2+1)D, S3D, P3D) have flat filters, and so have those of 1x1x1.
    """
    filters = known_tensor(root, weight)
    sources = [source for source in (x, weight, bias) if source is not None]
    stride, padding, dilation = _numbers(stride, 3), _numbers(padding, 3), _numbers(dilation, 3)
    if filters is None or filters.dim() != 5 or stride is None or padding is None or dilation is None or groups != 1:
        return None
    if not all(isinstance(source, fx.Node | Attribute) for source in sources) or not _is_for_kernels(root, *sources):
        return None
    if as_images(filters.shape[2:], stride, padding) is None:
        return None
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return Anchor("conv3d", x, weight, bias, options)


def _convolution(
    root: nn.Module, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: Any,
    output_padding: Any, groups: Any,
) -> Anchor | None:  # fmt: skip
    """aten.convolution, which every convolution becomes in the graphs of AOTAutograd."""
    tensor = known_tensor(root, _tensor(weight, "weight"))
    if tensor is not None and tensor.dim() == 5 and not transposed:
        return _conv3d(root, x, weight, bias, stride, padding, dilation, groups)
    if transposed or tensor is None or tensor.dim() != 4:
        raise Rejected("a convolution that is transposed or not known to have two dimensions")
    return _conv2d(root, x, weight, bias, stride, padding, dilation, groups)


def _layer_norm(
    root: nn.Module, x: Any, shape: Any, weight: Any, bias: Any, eps: Any, cudnn_enable: Any
) -> Anchor | None:
    if not all(value is None or isinstance(value, fx.Node) for value in (weight, bias)) or not isinstance(x, fx.Node):
        return None
    return _normalisation(root, x, shape, weight, bias, eps)


@dataclass(frozen=True)
class _Function:
    """A function whose calls may be anchors: its parameters as torch names them, and what makes the anchor of them."""

    name: str
    params: Mapping[str, Any]
    build: Callable[..., Anchor | None]


_LINEAR: Final = _Function("linear", {"input": REQUIRED, "weight": REQUIRED, "bias": None}, _linear)
_MATMUL: Final = _Function("matmul", {"input": REQUIRED, "other": REQUIRED}, _matmul)
_MM: Final = _Function("mm", {"input": REQUIRED, "mat2": REQUIRED}, _mm)
_ADDMM: Final = _Function(
    "addmm", {"input": REQUIRED, "mat1": REQUIRED, "mat2": REQUIRED, "beta": 1, "alpha": 1}, _addmm
)
_BMM: Final = _Function("bmm", {"input": REQUIRED, "mat2": REQUIRED}, _bmm)
_CONV2D: Final = _Function(
    "conv2d",
    {"input": REQUIRED, "weight": REQUIRED, "bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1},
    _conv2d,
)
_CONV2D_WEIGHT: Final = _Function(
    "conv2d_weight",
    dict.fromkeys(
        ("x", "weight", "bias", "operands", "epilogue", "kernel", "stride", "padding", "dilation", "groups"), REQUIRED
    ),
    _conv2d_weight,
)
_CONV3D: Final = _Function("conv3d", _CONV2D.params, _conv3d)
_CONVOLUTION: Final = _Function(
    "convolution",
    dict.fromkeys(
        ("input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups"), REQUIRED
    ),
    _convolution,
)
_LAYER_NORM: Final = _Function(
    "layer_norm",
    {"input": REQUIRED, "normalized_shape": REQUIRED, "weight": None, "bias": None, "eps": 1e-5, "cudnn_enable": True},
    _layer_norm,
)
_FUNCTIONS: Final[Mapping[Any, _Function]] = {
    F.linear: _LINEAR,
    torch.matmul: _MATMUL,
    operator.matmul: _MATMUL,
    torch.mm: _MM,
    torch.addmm: _ADDMM,
    torch.bmm: _BMM,
    F.conv2d: _CONV2D,
    torch.conv2d: _CONV2D,
    F.conv3d: _CONV3D,
    torch.conv3d: _CONV3D,
    F.layer_norm: _LAYER_NORM,
    torch.layer_norm: _LAYER_NORM,
    torch.ops.aten.linear: _LINEAR,
    torch.ops.aten.matmul: _MATMUL,
    torch.ops.aten.mm: _MM,
    torch.ops.aten.addmm: _ADDMM,
    torch.ops.aten.bmm: _BMM,
    torch.ops.fxfuse.conv2d_weight: _CONV2D_WEIGHT,
    torch.ops.aten.conv2d: _CONV2D,
    torch.ops.aten.conv3d: _CONV3D,
    torch.ops.aten.convolution: _CONVOLUTION,
    torch.ops.aten.layer_norm: _LAYER_NORM,
}
_METHODS: Final[Mapping[str, _Function]] = {"matmul": _MATMUL, "mm": _MM, "addmm": _ADDMM, "bmm": _BMM}


# --------------------------------------------------------------------------------------------- finding


def find_anchor(root: nn.Module, node: fx.Node) -> Anchor | None:
    """What `node` computes if it is an anchor, else None. Raises ops.Rejected for an anchor that cannot be fused."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        build = _MODULES.get(type(module))
        if build is None:
            return None
        if has_hooks(module):
            raise Rejected(f"the module {why_no_kernel(module)}")
        return build(root, node, module)
    function = None
    if node.op == "call_function":
        function = _FUNCTIONS.get(ops.function_of(node.target))
    elif node.op == "call_method":
        function = _METHODS.get(str(node.target))
    if function is None:
        return None
    bound = ops.bind(function, node.args, node.kwargs)
    return function.build(root, *bound)
