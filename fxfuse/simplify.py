"""Rewriting epilogues: fewer and cheaper operations, the same values.

Rules are data: `_RULES` lists (pattern, replacement, condition) in the expression language itself. In a pattern `x`,
`y` match any expression and `c`, `d` match constants; the condition sees what they matched. Interval analysis
supplies the ranges that make clamps redundant. A rule must preserve NaN, infinities and dtype promotion; it may
change a finite value only by replacing a hand-written formula with the table's more accurate row of the same
function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from fxfuse import ops
from fxfuse.expression import Acc, Call, Const, Expr, Wildcard, parse, postorder, rewrite
from fxfuse.interval import ANYTHING, Interval, of_constant

Ranges = Mapping[Expr, Interval]
Matched = Mapping[str, Expr]


def ranges(root: Expr) -> dict[Expr, Interval]:
    """The interval of every node of `root`, from the rules in the op table."""
    found: dict[Expr, Interval] = {}
    for node in postorder(root):
        if isinstance(node, Call):
            op = ops.row(node.op)
            found[node] = op.interval(op.reference, *(found[arg] for arg in node.args))
        elif isinstance(node, Const):
            found[node] = of_constant(float(node.value))
        else:
            found[node] = ANYTHING
    return found


# ------------------------------------------------------------------------------------------ conditions
# Each condition takes the ranges of all nodes and what the wildcards matched.


def _number(matched: Matched, name: str) -> float:
    node = matched[name]
    assert isinstance(node, Const)
    return float(node.value)


def _inside(known: Ranges, matched: Matched) -> bool:
    return _is_float(known, matched) and known[matched["x"]].within(_number(matched, "c"), _number(matched, "d"))


def _strictly_inside(known: Ranges, matched: Matched) -> bool:
    """As `_inside`, but without the bounds, at which hardtanh has no gradient."""
    below, above = (math.nextafter(_number(matched, bound), 0.0) for bound in ("c", "d"))
    return _is_float(known, matched) and known[matched["x"]].within(below, above) and below < 0 < above


def _never_below(known: Ranges, matched: Matched) -> bool:
    return _is_float(known, matched) and known[matched["x"]].lo >= _number(matched, "c")


def _never_above(known: Ranges, matched: Matched) -> bool:
    return _is_float(known, matched) and known[matched["x"]].hi <= _number(matched, "c")


def _nonnegative(known: Ranges, matched: Matched) -> bool:
    return _is_float(known, matched) and known[matched["x"]].lo >= 0.0


def _exact_reciprocal(known: Ranges, matched: Matched) -> bool:
    """Dividing by a power of two is multiplying by its inverse, bit for bit, when both are normal in every dtype."""
    if not _is_float(known, matched):
        return False
    mantissa, exponent = math.frexp(_number(matched, "c"))
    return abs(mantissa) == 0.5 and -13 <= exponent <= 14  # float16's normal numbers start at 2^-14


def _is_float(known: Ranges, matched: Matched) -> bool:
    """Whether x surely has a floating dtype, which a Python number does not change."""
    return any(isinstance(leaf, Acc) for leaf in _numeric_leaves(matched["x"]))


def _numeric_leaves(root: Expr) -> list[Expr]:
    """The leaves from which `root`'s dtype is promoted: not those behind a comparison."""
    leaves: list[Expr] = []
    stack, seen = [root], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, Call):
            if node.op.removesuffix("_") == "masked_fill":
                stack.append(node.args[0])
            elif not ops.is_boolean(node):
                stack.extend(node.args[1:] if node.op == "where" else node.args)
        else:
            leaves.append(node)
    return leaves


Condition = Callable[[Ranges, Matched], bool]


def _always(known: Ranges, matched: Matched) -> bool:
    return True


def _reciprocal_of_c(matched: Matched) -> dict[str, Expr]:
    return {"r": Const(1.0 / _number(matched, "c"))} if "c" in matched and _number(matched, "c") != 0 else {}


# ----------------------------------------------------------------------------------------------- rules


@dataclass(frozen=True)
class Rule:
    """`pattern` becomes `replacement` wherever `condition` holds; `r` in a replacement is 1 / c."""

    pattern: Expr
    replacement: Expr
    condition: Condition


def _rule(pattern: str, replacement: str, condition: Condition = _always) -> Rule:
    wildcards = ("x", "y", "c", "d", "r")
    return Rule(parse(pattern, wildcards), parse(replacement, wildcards), condition)


_RULES = [
    # clamps that the range of their argument makes redundant
    _rule("clamp(x, c, d)", "x", _inside),
    _rule("hardtanh(x, c, d)", "x", _strictly_inside),
    _rule("maximum(x, c)", "x", _never_below),
    _rule("minimum(x, c)", "x", _never_above),
    _rule("relu(x)", "x", _nonnegative),
    _rule("abs(x)", "x", _nonnegative),
    # composites that the table computes with fewer special functions, or more accurately
    _rule("x * sigmoid(x)", "silu(x)", _is_float),
    _rule("x * tanh(softplus(x, 1.0, 20.0))", "mish(x)", _is_float),
    _rule("x * tanh(softplus(x, 1, 20))", "mish(x)", _is_float),
    # arithmetic that does nothing
    _rule("-(-x)", "x"),
    _rule("assign(x, x)", "x"),
    _rule("x * 1", "x", _is_float),
    _rule("x * 1.0", "x", _is_float),
    _rule("x / 1", "x", _is_float),
    _rule("x / 1.0", "x", _is_float),
    _rule("x - 0", "x", _is_float),
    _rule("x - 0.0", "x", _is_float),
    # a multiplication instead of a division
    _rule("x / c", "x * r", _exact_reciprocal),
]
# an operation that leaves its argument as it is does so in place, too
_RULES += [
    Rule(Call(f"{rule.pattern.op}_", rule.pattern.args), rule.replacement, rule.condition)
    for rule in _RULES
    if isinstance(rule.pattern, Call) and rule.replacement is rule.pattern.args[0] and rule.pattern.op != "assign"
]


def _match(pattern: Expr, node: Expr, matched: dict[str, Expr]) -> dict[str, Expr] | None:
    """What the wildcards must be for `pattern` to equal `node`, or None."""
    match pattern:
        case Wildcard(name):
            if name in ("c", "d") and not isinstance(node, Const):
                return None
            if name in matched:
                return matched if matched[name] is node else None
            return {**matched, name: node}
        case Call(op, args):
            if not isinstance(node, Call) or node.op != op or len(node.args) != len(args):
                return None
            orders = [node.args]
            if ops.row(op).commutative:
                orders.append(node.args[::-1])
            for order in orders:
                result: dict[str, Expr] | None = matched
                for part, arg in zip(args, order, strict=True):
                    result = None if result is None else _match(part, arg, result)
                if result is not None:
                    return result
            return None
        case _:
            return matched if pattern is node else None


def _apply_rules(root: Expr) -> Expr:
    known = ranges(root)

    def range_of(node: Expr) -> None:
        if node not in known:
            known.update((new, found) for new, found in ranges(node).items() if new not in known)

    def improve(node: Expr) -> Expr:
        for rule in _RULES:
            matched = _match(rule.pattern, node, {})
            if matched is None:
                continue
            for value in matched.values():
                range_of(value)
            if rule.condition(known, matched):
                return _substitute(rule.replacement, {**matched, **_reciprocal_of_c(matched)})
        return node

    return rewrite(root, improve)


def _substitute(template: Expr, values: Mapping[str, Expr]) -> Expr:
    return rewrite(template, lambda part: values[part.name] if isinstance(part, Wildcard) else part)


_VIEWS: Final = frozenset({"detach", "contiguous", "type_as", "float32", "float16", "bfloat16"})
"""Rows whose result may be their argument itself."""


def is_fresh(node: Expr, fresh_acc: bool) -> bool:
    """Whether the node's value is surely a tensor of its own, without gaps in memory; acc is one if `fresh_acc`."""
    while isinstance(node, Call) and (node.op in (*_VIEWS, "assign") or ops.row(node.op).in_place_of):
        node = node.args[-1 if node.op == "assign" else 0]
    return fresh_acc if isinstance(node, Acc) else isinstance(node, Call)


def _without_copies(root: Expr, fresh_acc: bool) -> Expr:
    """`root` without clones of values that nobody else has. Others decide strides, and whose memory it is."""

    def replaced(node: Expr) -> Expr:
        is_copy = isinstance(node, Call) and node.op == "clone" and is_fresh(node.args[0], fresh_acc)
        return node.args[0] if is_copy and isinstance(node, Call) else node

    return rewrite(root, replaced)


def simplify(root: Expr, fresh_acc: bool = True) -> Expr:
    """`root` with the rules applied until none does anything more.

    Args:
        fresh_acc: whether acc is a tensor of its own, without gaps in memory, as an anchor's result is.
    """
    root = _without_copies(root, fresh_acc)
    while True:
        improved = _apply_rules(root)
        if improved is root:
            return root
        root = improved
