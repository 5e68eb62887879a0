# SPDX-License-Identifier: Apache-2.0
"""The knapsack of mixed precision, against all assignments there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from hypothesis import given, strategies as st
from qompose.diagnosis.knapsack import Option, frontier, within

OPTIONS = st.builds(
    Option,
    name=st.text("abc", min_size=1, max_size=3),
    bytes=st.integers(1, 40),
    cost=st.integers(0, 40).map(lambda n: n / 8),  # sums of eighths are exact
)
SITES = st.dictionaries(
    st.sampled_from(["one", "two", "three", "four"]),
    st.lists(OPTIONS, min_size=1, max_size=4),
    min_size=1,
)


def sizes(options: Iterable[Option]) -> tuple[int, float]:
    """The bytes and the cost of an assignment."""
    chosen = [*options]
    return sum(o.bytes for o in chosen), math.fsum(o.cost for o in chosen)


@given(SITES)
def test_nothing_of_so_few_bytes_is_cheaper(options: dict[str, list[Option]]) -> None:
    """Each assignment is smaller than the one before; the first costs least, the last is the smallest."""
    every = [sizes(chosen) for chosen in itertools.product(*options.values())]
    found = [sizes(assigned.values()) for assigned in frontier(options)]
    for size, cost in found:
        assert cost == min(c for s, c in every if s <= size)
    assert all(before[0] > after[0] for before, after in itertools.pairwise(found))
    assert found[0][1] == min(cost for _, cost in every)
    assert found[-1][0] == min(size for size, _ in every)


@given(SITES, st.integers(1, 160))
def test_what_is_left_of_the_bytes_is_spent(options: dict[str, list[Option]], most: int) -> None:
    """No single site could have a cheaper option; and nothing is found only where nothing fits."""
    found = within(options, most)
    smallest = sum(min(o.bytes for o in some) for some in options.values())
    assert (found is None) == (smallest > most)
    if found is None:
        return
    total, cost = sizes(found.values())
    assert total <= most
    assert cost <= next(c for s, c in map(sizes, map(dict.values, frontier(options))) if s <= most)
    for site, some in options.items():
        for option in some:
            fits = total - found[site].bytes + option.bytes <= most
            assert not (fits and option.cost < found[site].cost)
