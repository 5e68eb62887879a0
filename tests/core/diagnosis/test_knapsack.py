# SPDX-License-Identifier: Apache-2.0
"""The knapsack of mixed precision, against all assignments there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from hypothesis import given, strategies as st
from qompose.diagnosis.knapsack import Option, efficient

OPTIONS = st.builds(
    Option,
    name=st.text("abc", min_size=1, max_size=3),
    bytes=st.integers(1, 40),
    cost=st.integers(0, 40).map(lambda n: n / 8),  # sums of eighths are exact
)
SITES = st.dictionaries(
    st.sampled_from(["one", "two", "three", "four"]),
    st.lists(OPTIONS, min_size=1, max_size=3),
    min_size=1,
)


def sizes(options: Iterable[Option]) -> tuple[int, float]:
    """The bytes and the cost of an assignment."""
    chosen = [*options]
    return sum(o.bytes for o in chosen), math.fsum(o.cost for o in chosen)


@given(SITES)
def test_all_that_nothing_beats_are_found(options: dict[str, list[Option]]) -> None:
    """From the one of least cost to the smallest, each smaller than the one before."""
    every = [sizes(chosen) for chosen in itertools.product(*options.values())]
    found = [sizes(assigned.values()) for assigned in efficient(options)]
    unbeaten = {
        (size, cost)
        for size, cost in every
        if not any(s <= size and c <= cost and (s, c) != (size, cost) for s, c in every)
    }
    assert found == sorted(unbeaten, reverse=True)


@given(SITES, st.integers(1, 160))
def test_the_cheapest_of_those_that_fit_is_the_first(
    options: dict[str, list[Option]], most: int
) -> None:
    every = [sizes(chosen) for chosen in itertools.product(*options.values())]
    fitting = [cost for size, cost in every if size <= most]
    found = [sizes(assigned.values()) for assigned in efficient(options, most)]
    assert [cost for _, cost in found[:1]] == ([min(fitting)] if fitting else [])
    assert all(size <= most for size, _ in found)


def test_of_many_sites_some_assignments_are_kept() -> None:
    """A few hundred of 3**40, and hardly any cheaper than these."""
    sizes_of = [1 + 7 * n % 31 for n in range(40)]
    options = {
        str(n): [Option(str(k), size * k * 1000 + n, size / k**2) for k in (2, 3, 4)]
        for n, size in enumerate(sizes_of)
    }
    found = [sizes(assigned.values()) for assigned in efficient(options)]
    assert 100 < len(found) <= 501
    total = sum(sizes_of)
    for size, cost in found[:: len(found) // 7]:
        # No assignment costs less than one that may divide sites, all of which here have the same options.
        k = size / (1000 * total)
        bound = next(
            total * (1 / a**2 + (k - a) * (1 / (a + 1) ** 2 - 1 / a**2)) for a in (3, 2) if k >= a
        )
        assert cost < bound * 1.02
