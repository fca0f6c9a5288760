"""Interval rules: the range of an operation's result, given its arguments' ranges.

A rule takes the operation's torch reference and one `Interval` per argument and returns an `Interval` that holds
every non-NaN result in every floating dtype the expression may be evaluated in. NaN is not tracked, so an interval is
a reason to drop only those operations that pass NaN through unchanged. `simplify` uses intervals to remove clamps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

_SLACK = 2.0**-7
"""Computed bounds are widened by one ulp of bfloat16, the coarsest dtype that an intermediate is ever rounded to."""


@dataclass(frozen=True)
class Interval:
    """The closed range [lo, hi]; a constant has lo == hi."""

    lo: float
    hi: float

    def within(self, lo: float, hi: float) -> bool:
        return lo <= self.lo and self.hi <= hi


def of_constant(value: float) -> Interval:
    """The interval of a number as a scalar argument, which torch rounds to the dtype it computes in."""
    if math.isnan(value):
        return ANYTHING
    rounded = [float(torch.tensor(value, dtype=torch.float64).to(dtype)) for dtype in (torch.float16, torch.bfloat16)]
    return Interval(min(value, *rounded), max(value, *rounded))


ANYTHING = Interval(-math.inf, math.inf)

Rule: TypeAlias = Callable[..., Interval]
"""rule(reference, *argument_intervals) -> Interval"""


def _widened(lo: float, hi: float, within: Interval = ANYTHING) -> Interval:
    """[lo, hi] with room for rounding, but never beyond `within`; a NaN bound means unbounded."""
    lo = -math.inf if math.isnan(lo) else lo - abs(lo) * _SLACK
    hi = math.inf if math.isnan(hi) else hi + abs(hi) * _SLACK
    return Interval(max(lo, within.lo), min(hi, within.hi))


def _value(reference: Callable[..., Any], x: float, parameters: tuple[float, ...] = ()) -> float:
    return float(reference(torch.tensor(x, dtype=torch.float64), *parameters))


def anything(reference: Callable[..., Any], *args: Interval) -> Interval:
    """No knowledge."""
    return ANYTHING


def always(lo: float, hi: float) -> Rule:
    """The result lies in [lo, hi] whatever the arguments are."""

    def rule(reference: Callable[..., Any], *args: Interval) -> Interval:
        return Interval(lo, hi)

    return rule


def increasing(lo: float = -math.inf, hi: float = math.inf, sign: Callable[..., bool] | None = None) -> Rule:
    """The result does not decrease with the first argument, and lies in [lo, hi]. Other arguments are constants.

    With `sign`, this is so only if sign(*parameters) holds (a leaky_relu with a negative slope is not monotone).
    """

    def rule(reference: Callable[..., Any], x: Interval, *parameters: Interval) -> Interval:
        # a constant parameter is a short interval, since dtypes round it differently
        if any(parameter.hi - parameter.lo > _SLACK * abs(parameter.lo) for parameter in parameters):
            return ANYTHING
        corners = list(itertools.product(*((parameter.lo, parameter.hi) for parameter in parameters)))
        if sign is not None and not all(sign(*corner) for corner in corners):
            return ANYTHING
        lowest = [_value(reference, x.lo, corner) for corner in corners]
        highest = [_value(reference, x.hi, corner) for corner in corners]
        unknown = any(math.isnan(value) for value in (*lowest, *highest))
        return Interval(lo, hi) if unknown else _widened(min(lowest), max(highest), Interval(lo, hi))

    return rule


def valley(argmin: float, minimum: float, left_limit: float = math.inf) -> Rule:
    """The result falls from `left_limit` (its value at -inf) to `minimum` at `argmin`, then rises for ever."""

    def rule(reference: Callable[..., Any], x: Interval) -> Interval:
        left = left_limit if math.isinf(x.lo) and x.lo < 0 else _value(reference, x.lo)
        right = left_limit if math.isinf(x.hi) and x.hi < 0 else _value(reference, x.hi)
        lowest = minimum if x.lo <= argmin <= x.hi else min(left, right)
        highest = max(left, right)
        return _widened(lowest, highest, Interval(0.0, math.inf) if minimum == 0.0 else ANYTHING)

    return rule


def add(reference: Callable[..., Any], a: Interval, b: Interval) -> Interval:
    return _widened(a.lo + b.lo, a.hi + b.hi)


def subtract(reference: Callable[..., Any], a: Interval, b: Interval) -> Interval:
    return _widened(a.lo - b.hi, a.hi - b.lo)


def add_scaled(reference: Callable[..., Any], a: Interval, b: Interval, alpha: Interval) -> Interval:
    return add(reference, a, multiply(reference, b, alpha))


def sub_scaled(reference: Callable[..., Any], a: Interval, b: Interval, alpha: Interval) -> Interval:
    return subtract(reference, a, multiply(reference, b, alpha))


def addcmul(reference: Callable[..., Any], x: Interval, a: Interval, b: Interval, value: Interval) -> Interval:
    return add(reference, x, multiply(reference, multiply(reference, a, b), value))


def multiply(reference: Callable[..., Any], a: Interval, b: Interval) -> Interval:
    # 0 * inf is NaN only where an argument is infinite, and NaN is not tracked. So as a bound, 0 * inf is 0.
    products = [0.0 if 0.0 in (x, y) else x * y for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    return _widened(min(products), max(products))


def divide(reference: Callable[..., Any], a: Interval, b: Interval) -> Interval:
    if b.lo <= 0.0 <= b.hi or math.isinf(b.lo) or math.isinf(b.hi):
        return ANYTHING
    return multiply(reference, a, Interval(1.0 / b.hi, 1.0 / b.lo))


def negate(reference: Callable[..., Any], a: Interval) -> Interval:
    return Interval(-a.hi, -a.lo)


def minimum(reference: Callable[..., Any], a: Interval, b: Interval) -> Interval:
    return Interval(min(a.lo, b.lo), min(a.hi, b.hi))


def maximum(reference: Callable[..., Any], a: Interval, b: Interval) -> Interval:
    return Interval(max(a.lo, b.lo), max(a.hi, b.hi))


def clamp(reference: Callable[..., Any], x: Interval, lo: Interval, hi: Interval) -> Interval:
    return minimum(reference, maximum(reference, x, lo), hi)


def either(reference: Callable[..., Any], condition: Interval, a: Interval, b: Interval) -> Interval:
    return Interval(min(a.lo, b.lo), max(a.hi, b.hi))


def filled(reference: Callable[..., Any], x: Interval, mask: Interval, value: Interval) -> Interval:
    return either(reference, mask, x, value)


def last(reference: Callable[..., Any], *args: Interval) -> Interval:
    """The last argument's interval, whatever the others are."""
    return args[-1]


def same(reference: Callable[..., Any], x: Interval, *others: Interval) -> Interval:
    """The result is the first argument's value, perhaps rounded to another dtype."""
    return _widened(x.lo, x.hi)
