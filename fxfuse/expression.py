"""The epilogue as a value: what happens to an anchor's result before it is stored.

An expression is a DAG of four kinds of node: `Acc` (the anchor's result, bias included), `Operand` (another
tensor, broadcast to the result's shape), `Const` (a Python number) and `Call` (a row of the op table applied to
expressions). Nodes are interned: structurally equal expressions are the same object, so equality is identity,
hashing is free, and a value that is used twice is one node.

`str(expression)` and `parse(text)` are inverses. The text is what travels in the graph:

    tanh(clamp(silu(acc) * 0.5, -1, 1))
    t0 = acc + o0; t0 * sigmoid(t0)

`acc` is the anchor's result, `o0`, `o1`, … are the operands, and `t0 = …;` names a value that is used more than once.
"""

from __future__ import annotations

import math
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, TypeAlias

from fxfuse.errors import ExpressionError
from fxfuse.locks import free_in_children

Number: TypeAlias = bool | int | float

INFIX: dict[str, tuple[str, int]] = {
    "lt": ("<", 1), "le": ("<=", 1), "gt": (">", 1), "ge": (">=", 1), "eq": ("==", 1), "ne": ("!=", 1),
    "add": ("+", 2), "sub": ("-", 2),
    "mul": ("*", 3), "div": ("/", 3),
}  # fmt: skip
"""Operations written between their arguments, with their precedence; all associate to the left."""

_COMPARISON_PRECEDENCE = 1
_UNARY_PRECEDENCE = 4
_ATOM_PRECEDENCE = 5
_MAX_NESTING = 24
"""Text is written with no deeper nesting: deeper values get a name, so that any parser's stack suffices."""
_MAX_NESTING_READ = 64
"""Text with deeper nesting is refused."""
NUMBERS: Final = range(-(2**63), 2**64)
"""Integers that torch accepts as a number beside a tensor."""
_MAX_DIGITS = 20
"""Most digits of an integer in NUMBERS."""


class _Interned(type):
    """Makes construction return the one existing node with the same contents."""

    _nodes: ClassVar[weakref.WeakValueDictionary[tuple[Any, ...], Any]] = weakref.WeakValueDictionary()
    _lock = free_in_children(threading.Lock())

    def __call__(cls, *args: Any) -> Any:
        key = (cls, *(cls._key(arg) for arg in args))
        with cls._lock:
            node = cls._nodes.get(key)
            if node is None:
                node = super().__call__(*args)
                cls._nodes[key] = node
            return node

    @staticmethod
    def _key(arg: Any) -> Any:
        # 1, 1.0 and True are equal in Python but promote differently in torch; so do 0.0 and -0.0 in arithmetic.
        return (type(arg), repr(arg)) if isinstance(arg, bool | int | float) else arg


@dataclass(frozen=True, eq=False)
class Expr(metaclass=_Interned):
    """Base of the four node kinds. Immutable; equality is identity (see the module's docstring)."""

    def __str__(self) -> str:
        return _to_text(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, eq=False, repr=False)
class Acc(Expr):
    """The anchor's result, bias included."""


@dataclass(frozen=True, eq=False, repr=False)
class Operand(Expr):
    """The index-th further tensor of the region."""

    index: int


@dataclass(frozen=True, eq=False, repr=False)
class Const(Expr):
    """A Python number. Its type takes part in torch's dtype promotion."""

    value: Number


@dataclass(frozen=True, eq=False, repr=False)
class Call(Expr):
    """A row of the op table, by name, applied to arguments."""

    op: str
    args: tuple[Expr, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Wildcard(Expr):
    """A variable in a rewrite rule's pattern; never part of an epilogue."""

    name: str


def call(op: str, *args: Expr | Number) -> Call:
    """`Call` with plain numbers allowed as arguments."""
    return Call(op, tuple(arg if isinstance(arg, Expr) else Const(arg) for arg in args))


def postorder(*roots: Expr) -> Iterator[Expr]:
    """Every node below the roots once, arguments before their users. Never recurses."""
    done: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        node, args_done = stack.pop()
        if node in done:
            continue
        if args_done or not isinstance(node, Call):
            done.add(node)
            yield node
        else:
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args))


def rewrite(root: Expr, function: Callable[[Expr], Expr]) -> Expr:
    """Rebuilds `root` bottom-up, each node replaced by function(node with its new arguments)."""
    result: dict[Expr, Expr] = {}
    for node in postorder(root):
        if isinstance(node, Call):
            rebuilt: Expr = Call(node.op, tuple(result[arg] for arg in node.args))
        else:
            rebuilt = node
        result[node] = function(rebuilt)
    return result[root]


def operand_count(root: Expr) -> int:
    """One more than the highest operand index in `root`."""
    return max((node.index + 1 for node in postorder(root) if isinstance(node, Operand)), default=0)


def depends_on_acc(root: Expr) -> bool:
    """Whether the anchor's result takes part in `root` at all."""
    return any(isinstance(node, Acc) for node in postorder(root))


# ---------------------------------------------------------------------------------------------- text


def _number_text(value: Number) -> str:
    return repr(value)  # repr round-trips int, float, inf, nan and bool


def _to_text(root: Expr) -> str:
    nodes = list(postorder(root))
    uses: dict[Expr, int] = {}
    for node in nodes:
        for arg in node.args if isinstance(node, Call) else ():
            uses[arg] = uses.get(arg, 0) + 1

    text: dict[Expr, tuple[str, int]] = {}  # node -> (text, precedence)
    depth: dict[Expr, int] = {}
    bindings: list[str] = []
    for node in nodes:
        text[node] = _node_text(node, text)
        depth[node] = 1 + max((depth[arg] for arg in node.args), default=0) if isinstance(node, Call) else 0
        shared = uses.get(node, 0) > 1 or depth[node] >= _MAX_NESTING
        if isinstance(node, Call) and node is not root and shared:
            name = f"t{len(bindings)}"
            bindings.append(f"{name} = {text[node][0]}; ")
            text[node] = (name, _ATOM_PRECEDENCE)
            depth[node] = 0
    return "".join(bindings) + text[root][0]


def _node_text(node: Expr, text: dict[Expr, tuple[str, int]]) -> tuple[str, int]:
    match node:
        case Acc():
            return "acc", _ATOM_PRECEDENCE
        case Operand(index):
            return f"o{index}", _ATOM_PRECEDENCE
        case Wildcard(name):
            return name, _ATOM_PRECEDENCE
        case Const(value):
            negative = not isinstance(value, bool) and (value < 0 or math.copysign(1.0, value) < 0)
            return _number_text(value), _UNARY_PRECEDENCE if negative else _ATOM_PRECEDENCE
        case Call(op, (left, right)) if op in INFIX:
            symbol, precedence = INFIX[op]

            def side(arg: Expr, minimum: int) -> str:
                arg_text, arg_precedence = text[arg]
                return arg_text if arg_precedence >= minimum else f"({arg_text})"

            # a < b < c means something else in Python, so a comparison inside a comparison gets parentheses
            left_minimum = precedence + 1 if precedence == _COMPARISON_PRECEDENCE else precedence
            return f"{side(left, left_minimum)} {symbol} {side(right, precedence + 1)}", precedence
        case Call("neg", (arg,)) if not isinstance(arg, Const):
            arg_text, arg_precedence = text[arg]
            return (f"-{arg_text}" if arg_precedence == _ATOM_PRECEDENCE else f"-({arg_text})"), _UNARY_PRECEDENCE
        case Call(op, args):
            return f"{op}({', '.join(text[arg][0] for arg in args)})", _ATOM_PRECEDENCE
    raise AssertionError(f"unknown expression node {type(node).__name__}")


_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<symbol><=|>=|==|!=|[-+*/<>(),=;]))"
)
_NAMED_NUMBERS: dict[str, Number] = {"inf": math.inf, "nan": math.nan, "True": True, "False": False}


def parse(text: str, variables: Sequence[str] = ()) -> Expr:
    """The expression that `text` spells; `str()` of it gives equal text back.

    `variables` are names to read as `Wildcard`s (rewrite rules use this). Nothing but the grammar is interpreted;
    whether a called operation exists is for the op table to say. Raises ExpressionError with the position.
    """
    return _Parser(text, variables).parse()


def _excerpt(text: str, position: int) -> str:
    """`text`; if it is long, only the part around the position."""
    start, end = max(position - 60, 0), position + 60
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


class _Parser:
    """Recursive descent over `text`, one method per precedence level."""

    def __init__(self, text: str, variables: Sequence[str]) -> None:
        self.text = text
        self.names: dict[str, Expr] = {name: Wildcard(name) for name in variables}
        self.tokens: list[tuple[str, str, int]] = []  # kind, text, position
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                raise self.error("unexpected character", position)
            kind = str(match.lastgroup)
            self.tokens.append((kind, match.group(kind), match.start(kind)))
            position = match.end()
        self.next = 0
        self.nesting = 0

    def error(self, what: str, position: int | None = None) -> ExpressionError:
        if position is None:
            position = self.tokens[self.next][2] if self.next < len(self.tokens) else len(self.text)
        return ExpressionError(f"{what} at position {position} of epilogue {_excerpt(self.text, position)!r}")

    def peek(self, ahead: int = 0) -> str:
        index = self.next + ahead
        return self.tokens[index][1] if index < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> tuple[str, str]:
        if self.next >= len(self.tokens) or (expected is not None and self.peek() != expected):
            raise self.error(f"expected {expected!r}" if expected else "unexpected end")
        kind, text, _ = self.tokens[self.next]
        self.next += 1
        return kind, text

    def parse(self) -> Expr:
        while self.peek(1) == "=":
            kind, name = self.take()
            if kind != "name" or not re.fullmatch(r"t[0-9]+", name) or name in self.names:
                raise self.error(f"cannot name a value {_excerpt(name, 0)!r} (names are t0, t1, …, each given once)")
            self.take("=")
            self.names[name] = self.infix(1)
            self.take(";")
        result = self.infix(1)
        if self.next != len(self.tokens):
            raise self.error("unexpected text")
        return result

    def infix(self, minimum: int) -> Expr:
        self.nesting += 1
        if self.nesting > _MAX_NESTING_READ:
            raise self.error("values nest too deep (name inner ones: t0 = …; t1 = …;)")
        left = self.unary()
        while True:
            found = [(op, level) for op, (symbol, level) in INFIX.items() if symbol == self.peek() and level >= minimum]
            if not found:
                self.nesting -= 1
                return left
            op, level = found[0]
            self.take()
            left = Call(op, (left, self.infix(level + 1)))

    def unary(self) -> Expr:
        signs = 0
        while self.peek() == "-":
            self.take()
            signs += 1
        is_number = self.next < len(self.tokens) and self.tokens[self.next][0] == "number"
        position = self.next
        value = self.atom()
        if signs and (is_number or self.tokens[position][1] in ("inf", "nan")):
            assert isinstance(value, Const)
            if isinstance(value.value, int) and -value.value not in NUMBERS:
                self.next = position
                raise self.error("a number too small for torch")
            value, signs = Const(-value.value), signs - 1
        for _ in range(signs):
            value = Call("neg", (value,))
        return value

    def atom(self) -> Expr:
        position = self.tokens[self.next][2] if self.next < len(self.tokens) else None
        kind, token = self.take()
        if kind == "number":
            if not token.isdigit():
                return Const(float(token))
            if len(token.lstrip("0")) > _MAX_DIGITS or int(token.lstrip("0") or "0") not in NUMBERS:
                raise self.error("a number too large for torch", position)
            return Const(int(token.lstrip("0") or "0"))
        if token == "(":
            inner = self.infix(1)
            self.take(")")
            return inner
        if kind != "name":
            raise self.error(f"unexpected {token!r}", position)
        if self.peek() == "(":
            return Call(token, self.arguments())
        if token in self.names:
            return self.names[token]
        if token == "acc":
            return Acc()
        if re.fullmatch(r"o[0-9]{1,4}", token):
            return Operand(int(token[1:]))
        if token in _NAMED_NUMBERS:
            return Const(_NAMED_NUMBERS[token])
        raise self.error(f"unknown name {_excerpt(token, 0)!r}", position)

    def arguments(self) -> tuple[Expr, ...]:
        self.take("(")
        args: list[Expr] = []
        while self.peek() != ")":
            if args:
                self.take(",")
            args.append(self.infix(1))
        self.take(")")
        return tuple(args)
