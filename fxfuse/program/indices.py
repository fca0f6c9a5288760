"""Index expressions: integer expressions over loop variables, which say where in memory an element lies.

An `Index` is a constant plus a sum of atoms with coefficients. An atom is a variable, a quotient or a remainder of
another index, or an integer read from a tensor. Sums are simplified as they are made, by the ranges of their atoms. So
a view of a view of a copy is again the sum that a person would write. Indices are equal if they are the same sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Variable:
    """A loop variable: 0 to size - 1."""

    name: str
    size: int

    @property
    def key(self) -> str:
        return self.name

    @property
    def range(self) -> tuple[int, int]:
        return 0, self.size - 1


@dataclass(frozen=True)
class Quotient:
    """of // by, where `of` is not negative."""

    of: Index
    by: int

    @functools.cached_property
    def key(self) -> str:
        return f"({self.of.key})//{self.by}"

    @functools.cached_property
    def range(self) -> tuple[int, int]:
        low, high = self.of.range
        return low // self.by, high // self.by


@dataclass(frozen=True)
class Remainder:
    """of % by, where `of` is not negative."""

    of: Index
    by: int

    @functools.cached_property
    def key(self) -> str:
        return f"({self.of.key})%{self.by}"

    @property
    def range(self) -> tuple[int, int]:
        return 0, self.by - 1


@dataclass(frozen=True)
class Element:
    """An integer that is read from memory: 0 to size - 1. If `wraps`, size is added to a negative integer."""

    memory: Any
    """The memory that it is read from (a Slot): anything with a name."""
    at: Index
    dtype: Any
    size: int
    wraps: bool

    @functools.cached_property
    def key(self) -> str:
        return f"{self.memory.name}[{self.at.key}]"

    @property
    def range(self) -> tuple[int, int]:
        return 0, self.size - 1


Atom: TypeAlias = Variable | Quotient | Remainder | Element


@dataclass(frozen=True)
class Index:
    """constant + the sum of coefficient * atom."""

    terms: tuple[tuple[Atom, int], ...] = ()
    """Ordered by the atoms' keys; no coefficient is 0."""
    constant: int = 0

    @functools.cached_property
    def key(self) -> str:
        return "+".join([*(f"{coefficient}*{atom.key}" for atom, coefficient in self.terms), str(self.constant)])

    @functools.cached_property
    def range(self) -> tuple[int, int]:
        """The least and the greatest value, as if the atoms were independent."""
        low = high = self.constant
        for atom, coefficient in self.terms:
            ends = [coefficient * end for end in atom.range]
            low, high = low + min(ends), high + max(ends)
        return low, high

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.terms, self.constant + other)
        terms = dict(self.terms)
        for atom, coefficient in other.terms:
            terms[atom] = terms.get(atom, 0) + coefficient
        return _sum(terms, self.constant + other.constant)

    def __mul__(self, by: int) -> Index:
        if by == 0:
            return Index()
        return Index(tuple((atom, coefficient * by) for atom, coefficient in self.terms), self.constant * by)

    def __sub__(self, other: Index | int) -> Index:
        return self + (-other if isinstance(other, int) else other * -1)

    def __floordiv__(self, by: int) -> Index:
        if by == 1:
            return self
        whole, rest = self._split(by)
        if rest.range[1] < by:
            return whole
        unit, even, odd = rest._multiples(by)
        if unit > 1:  # rest == unit * even + odd, with 0 <= odd < unit
            return whole + even // (by // unit)
        if not rest.terms:
            return whole + rest.constant // by
        if rest.constant == 0 and len(rest.terms) == 1:
            (atom, coefficient), *_ = rest.terms
            if coefficient == 1 and isinstance(atom, Quotient):
                return whole + _of(Quotient(atom.of, atom.by * by))
        return whole + _of(Quotient(odd, by))

    def __mod__(self, by: int) -> Index:
        if by == 1:
            return Index()
        _, rest = self._split(by)
        if rest.range[1] < by:
            return rest
        unit, even, odd = rest._multiples(by)
        if unit > 1:
            return (even % (by // unit)) * unit + odd
        if not rest.terms:
            return Index((), rest.constant % by)
        if rest.constant == 0 and len(rest.terms) == 1:
            (atom, coefficient), *_ = rest.terms
            if coefficient == 1 and isinstance(atom, Remainder) and atom.by % by == 0:
                return atom.of % by
        return _of(Remainder(odd, by))

    def _split(self, by: int) -> tuple[Index, Index]:
        """(whole, rest), with self == by * whole + rest. The rest is as small as possible, but not negative."""
        terms = tuple((atom, coefficient) for atom, coefficient in self.terms if coefficient % by)
        least = -Index(terms).range[0]
        constant = least + (self.constant - least) % by
        whole = tuple((atom, coefficient // by) for atom, coefficient in self.terms if coefficient % by == 0)
        return Index(whole, (self.constant - constant) // by), Index(terms, constant)

    def _multiples(self, of: int) -> tuple[int, Index, Index]:
        """(unit, even, odd), with self == unit * even + odd, 0 <= odd < unit, and `of` a multiple of unit.

        The unit is the greatest that is found. If none is found, (1, 0, self).
        """
        terms = sorted(self.terms, key=lambda term: abs(term[1]))
        for count in range(len(terms)):
            unit = math.gcd(of, *(coefficient for _, coefficient in terms[count:]))
            if unit > 1:
                even, odd = self._split(unit)
                if odd.range[1] < unit:
                    return unit, even, odd
        return 1, Index(), self

    def replaced(self, change: Callable[[Atom], Index | None]) -> Index:
        """The index with each atom replaced by `change(atom)`.

        Where that is None, the atom stays, and the index inside it is replaced in the same way.
        """
        return self._rebuilt(change, lambda of: of.replaced(change))

    def with_sum(self, whole: Index, value: Index) -> Index:
        """The index with the sum `whole` replaced by `value`, wherever a multiple of it is found, inside atoms too.

        If `value` is a variable with fewer values than the sum, quotients and remainders become simpler.
        """
        terms = dict(self.terms)
        shares = {divmod(terms.get(atom, 0), coefficient) for atom, coefficient in whole.terms}
        (factor, rest), *others = shares
        factor = 0 if others or rest else factor
        left = (self - whole * factor)._rebuilt(lambda _: None, lambda of: of.with_sum(whole, value))
        return left + value * factor

    def _rebuilt(self, change: Callable[[Atom], Index | None], inner: Callable[[Index], Index]) -> Index:
        """The index with each atom replaced by `change(atom)`.

        Where that is None, the atom stays, and `inner` is applied to the index inside it.
        """
        result = Index((), self.constant)
        for atom, coefficient in self.terms:
            new = change(atom)
            if new is None:
                match atom:
                    case Quotient(of, by):
                        new = inner(of) // by
                    case Remainder(of, by):
                        new = inner(of) % by
                    case Element(memory, at, dtype, size, wraps):
                        new = _of(Element(memory, inner(at), dtype, size, wraps))
                    case _:
                        new = _of(atom)
            result = result + new * coefficient
        return result

    def substituted(self, values: Mapping[str, Index]) -> Index:
        """The index with variables replaced by `values`, by name."""
        return self.replaced(lambda atom: values.get(atom.name) if isinstance(atom, Variable) else None)

    def atoms(self) -> Iterable[Atom]:
        """All atoms, nested ones included. Inner atoms come first."""
        for atom, _ in self.terms:
            match atom:
                case Quotient(of, _) | Remainder(of, _):
                    yield from of.atoms()
                case Element(_, at, _, _, _):
                    yield from at.atoms()
            yield atom

    def depends_on(self, name: str) -> bool:
        return any(isinstance(atom, Variable) and atom.name == name for atom in self.atoms())


def _ordered(terms: Iterable[tuple[Atom, int]]) -> tuple[tuple[Atom, int], ...]:
    return tuple(sorted(terms, key=lambda term: term[0].key))


def _of(atom: Atom) -> Index:
    return Index(((atom, 1),))


def _sum(terms: dict[Atom, int], constant: int) -> Index:
    """The sum of these terms and a constant. A quotient is joined with its remainder: x // b * b + x % b is x."""
    for atom, coefficient in list(terms.items()):
        if not isinstance(atom, Remainder) or coefficient == 0:
            continue
        quotient = atom.of // atom.by
        if len(quotient.terms) == 1 and quotient.constant == 0 and quotient.terms[0][1] == 1:
            other = quotient.terms[0][0]
            if terms.get(other) == coefficient * atom.by:
                del terms[other], terms[atom]
                return _sum(terms, constant) + atom.of * coefficient
    return Index(_ordered((atom, coefficient) for atom, coefficient in terms.items() if coefficient), constant)


def variable(name: str, size: int) -> Index:
    """A loop variable as an index; the number 0 if `size` is 1."""
    return Index() if size == 1 else _of(Variable(name, size))


def element(memory: Any, at: Index, dtype: Any, size: int, wraps: bool) -> Index:
    """An integer read from memory (`Element`), as an index."""
    return _of(Element(memory, at, dtype, size, wraps))


def dot(coordinates: Iterable[Index], strides: Iterable[int]) -> Index:
    """The sum of coordinate * stride."""
    return sum((at * stride for at, stride in zip(coordinates, strides, strict=True)), Index())
