"""The minimal cut costs what the cheapest of all divisions costs."""

from __future__ import annotations

import itertools
import random

import pytest

from fxfuse.min_cut import NEVER, SINK, SOURCE, Network


def cost(edges, chosen):
    return sum(price for tail, head, price in edges if tail in chosen and head not in chosen)


@pytest.mark.parametrize("seed", range(30))
def test_it_is_as_cheap_as_the_cheapest_division(seed):
    choose = random.Random(seed)
    inner = list(range(choose.randint(1, 6)))
    ends = [SOURCE, SINK, *inner]
    edges = [(*choose.sample(ends, 2), choose.choice((1, 2, 5, 9))) for _ in range(choose.randint(1, 20))]
    network = Network()
    for edge in edges:
        network.add(*edge)
    chosen = network.with_source()
    subsets = itertools.chain.from_iterable(itertools.combinations(inner, count) for count in range(len(inner) + 1))
    cheapest = [{SOURCE, *subset} for subset in subsets]
    least = min(cost(edges, subset) for subset in cheapest)
    assert SOURCE in chosen and SINK not in chosen
    assert cost(edges, chosen) == least
    # and the smallest of those that are as cheap
    assert all(chosen <= subset for subset in cheapest if cost(edges, subset) == least)


def test_what_must_not_be_cut_is_not():
    network = Network()
    for edge in ((SOURCE, "a", 7), ("a", "b", NEVER), ("b", SINK, 9)):
        network.add(*edge)
    assert network.with_source() == {SOURCE}
