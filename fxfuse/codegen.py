"""Expression to C++: the part that the CUDA and the CPU code generators share."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from fxfuse import ops
from fxfuse.expression import Acc, Call, Const, Expr, Number, Operand, postorder, rewrite


def literal(value: Number) -> str:
    """A Python number as C++: a float literal (rounded as torch rounds scalars), or true or false."""
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        single = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        single = math.copysign(math.inf, value)
    if math.isnan(single):
        return "not_a_number()"
    if math.isinf(single):
        return "infinity()" if single > 0 else "(-infinity())"
    text = f"{value!r}f" if isinstance(value, float) else f"{float(value)!r}f"
    return f"({text})" if text.startswith("-") else text


MASK: Final = "Mask"
"""The type of a condition that is given as bits, to choose between floats (cpu/kernels/math.h)."""


def statements(expression: Expr, kinds: Mapping[Expr, str] | None = None, normal: Collection[Expr] = ()) -> list[str]:
    """C++ statements that compute `expression` from variables acc, o0, o1, …; the last one returns it.

    Every value is computed once, in single-assignment form. Its type is float, or bool for comparisons, unless `kinds`
    gives another one for a call or operand. A call with a float among its arguments computes with floats, and so does
    one whose value is a float: in C++ the quotient of two integers, or of two truth values, is an integer.

    Args:
        normal: operands that are the same for many elements, and are normal floats, as are their inverses.
    """
    lines: list[str] = []
    text: dict[Expr, str] = {}

    def kind_of(node: Expr) -> str:
        if kinds is not None and node in kinds:
            return kinds[node]
        return "bool" if isinstance(node, Call) and ops.row(node.op).boolean else "float"

    for node in postorder(rewrite(expression, _without_unread)):
        match node:
            case Acc():
                text[node] = "acc"
            case Operand(index):
                text[node] = f"o{index}"
            case Const(value):
                text[node] = literal(value)
            case Call(op, args):
                name = f"v{len(lines)}"
                reads_floats = any(kind_of(arg) in ("float", "double") for arg in args)
                if reads_floats or kind_of(node) == "float":
                    values = [_as_float(arg, text[arg], kind_of(arg), reads_floats) for arg in args]
                else:
                    values = [_as_integer(arg, text[arg], kind_of(arg)) for arg in args]
                temporaries, code = ops.expand_code(ops.row(op), values, name)
                if kind_of(args[0]) == MASK:
                    code = f"chosen({', '.join(values)})"
                if op == "div" and (_has_inverse(args[1]) or args[1] in normal):
                    code = f"divide_by_constant({values[0]}, {values[1]})"
                if code in text.values():  # the same code as an earlier value: it needs no variable
                    text[node] = code
                    continue
                lines += [f"const float {variable} = {value_text};" for variable, value_text in temporaries]
                lines.append(f"const {kind_of(node)} {name} = {code};")
                text[node] = name
    return [*lines, f"return {_as_integer(node, text[node], kind_of(node))};"]


_INTEGERS: Final = ("int32_t", "int64_t")


def _as_float(node: Expr, text: str, kind: str, beside_float: bool) -> str:
    if kind in _INTEGERS:
        return text if isinstance(node, Const) else f"static_cast<float>({text})"  # a literal is a float
    if kind == "bool" and not beside_float:  # beside a float it becomes one anyway
        return f"static_cast<float>(+{text})"  # by an int: g++ would make a branch of the conversion, and no vectors
    return text


def _as_integer(node: Expr, text: str, kind: str) -> str:
    return f"{kind}{{{node.value}}}" if isinstance(node, Const) and kind in _INTEGERS else text


def _without_unread(node: Expr) -> Expr:
    """The call with 0.0 for arguments that its code does not read: of full_like's tensor only dtype and shape count."""
    if not isinstance(node, Call):
        return node
    code = ops.row(node.op).code
    return Call(node.op, tuple(arg if f"{{{i}}}" in code else Const(0.0) for i, arg in enumerate(node.args)))


def _has_inverse(node: Expr) -> bool:
    """Whether a node is a number that is a normal float, and so is its inverse: division can be multiplication."""
    return isinstance(node, Const) and 2.0**-126 <= abs(float(node.value)) <= 2.0**126


def function(
    expression: Expr, operand_count: int, qualifiers: str, kinds: Mapping[Expr, str] | None = None,
    name: str = "expression", normal: Collection[Expr] = (),
) -> str:  # fmt: skip
    """The struct's member `<qualifiers> float <name>(float acc, float o0, …)`, with types as in `statements`."""
    types = {} if kinds is None else {node.index: kind for node, kind in kinds.items() if isinstance(node, Operand)}
    parameters = ", ".join(["float acc", *(f"{types.get(index, 'float')} o{index}" for index in range(operand_count))])
    body = "\n".join(f"        {line}" for line in statements(expression, kinds, normal))
    result = "float" if kinds is None else kinds[expression]
    return f"    {qualifiers} {result} {name}({parameters}) {{\n{body}\n    }}"


@dataclass(frozen=True)
class OperandKind:
    """How an operand is read, as far as the machine code depends on it."""

    dtype: torch.dtype | None
    """None for a number that the host passes at each call (a 0-d CPU tensor)."""
    varies: tuple[bool, bool, bool]
    """Along which of (batch, row, col) it varies; it broadcasts along the others."""
    access: int = 0
    """Bytes, a power of two up to 16, that divide the addresses of all its rows; 0 if elements of a row are not
    adjacent, or if it does not vary along col. Only CUDA kernels depend on it."""


INTEGER_TYPES: Final = {
    torch.bool: "bool",
    torch.uint8: "uint8_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
}
"""C++ names that are the same on every device."""


def operand_type(kind: OperandKind, cpp_types: Mapping[torch.dtype, str], with_access: bool = False) -> str:
    """The C++ type that reads an operand: Operand<T, dimensions>, Operand<T, dimensions, access>, or HostScalar."""
    if kind.dtype is None:
        return "HostScalar"
    names = [name for name, varies in zip(("kBatch", "kRow", "kCol"), kind.varies, strict=True) if varies]
    access = f", {kind.access}" if with_access else ""
    return f"Operand<{cpp_types[kind.dtype]}, {' | '.join(names) or '0'}{access}>"
