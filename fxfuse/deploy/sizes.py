"""Conditions on sizes under which an exported graph is right: as data, and checked for a call.

torch.export writes them in sympy. Here an expression is a number, a symbol's name, or a list of an operation's name and
its operands: ["eq", ["mod", "s0", 8], 0].
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, Final

from fxfuse.errors import PackageError

_OPERATIONS: Final[Mapping[str, tuple[str, Callable[..., Any]]]] = {
    "Add": ("add", lambda *items: sum(items)),
    "Mul": ("mul", lambda *items: math.prod(items)),
    "Mod": ("mod", operator.mod),
    "PythonMod": ("mod", operator.mod),
    "FloorDiv": ("floordiv", operator.floordiv),
    "CleanDiv": ("floordiv", operator.floordiv),
    "Pow": ("pow", operator.pow),
    "Max": ("max", max),
    "Min": ("min", min),
    "Equality": ("eq", operator.eq),
    "Unequality": ("ne", operator.ne),
    "StrictLessThan": ("lt", operator.lt),
    "LessThan": ("le", operator.le),
    "StrictGreaterThan": ("gt", operator.gt),
    "GreaterThan": ("ge", operator.ge),
    "And": ("and", lambda *items: all(items)),
    "Or": ("or", lambda *items: any(items)),
    "Not": ("not", operator.not_),
}
"""By sympy's name (or that of torch's own sympy function): the name here, and its function of numbers."""
_BY_NAME: Final = dict(_OPERATIONS.values())


def described(expression: Any) -> Any:
    """A sympy expression as data. Raises PackageError for a function that is not in the table."""
    if expression.is_Symbol:
        return str(expression)
    if expression.is_Integer:
        return int(expression)
    if str(expression) in ("True", "False"):
        return str(expression) == "True"
    name = type(expression).__name__
    if name not in _OPERATIONS:
        raise PackageError(f"sizes are to satisfy {expression}, which a package cannot say")
    return [_OPERATIONS[name][0], *map(described, expression.args)]


def value(expression: Any, symbols: Mapping[str, int]) -> Any:
    """The value of an expression for these sizes."""
    if isinstance(expression, list):
        return _BY_NAME[expression[0]](*(value(part, symbols) for part in expression[1:]))
    return symbols[expression] if isinstance(expression, str) else expression


def text(expression: Any) -> str:
    """The text of an expression, for messages."""
    signs = {"add": "+", "mul": "*", "mod": "%", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
    if not isinstance(expression, list):
        return str(expression)
    parts = [f"({text(part)})" if isinstance(part, list) else text(part) for part in expression[1:]]
    if expression[0] in signs and len(parts) > 1:
        return reduce(lambda one, other: f"{one} {signs[expression[0]]} {other}", parts)
    return f"{expression[0]}({', '.join(parts)})"
