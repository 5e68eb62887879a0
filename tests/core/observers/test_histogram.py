# SPDX-License-Identifier: Apache-2.0
"""The histogram does not know how its data was split."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from qompose.observers.histogram import BINS, Histogram
from torch import Tensor

from tests.core.toy import randn

values = st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=30)
ordinary = st.lists(st.floats(-(2.0**20), 2.0**20, width=32), min_size=1, max_size=60)
exhaustive = settings(max_examples=300, deadline=None)


def of(*batches: Tensor) -> Histogram:
    histogram = Histogram()
    for batch in batches:
        histogram.add(batch)
    return histogram


def merged(*parts: Histogram) -> Histogram:
    result = Histogram()
    for part in parts:
        result.merge(part)
    return result


def assert_same(one: Histogram, other: Histogram) -> None:
    assert one.exponent == other.exponent
    assert (one.minimum, one.maximum) == (other.minimum, other.maximum)
    assert torch.equal(one.counts, other.counts)


@exhaustive
@given(values, st.lists(st.integers(0, 30), max_size=4), st.randoms(use_true_random=False))
@example([-1e-38, 1e30], [1], None)
@example([-(2.0**20), 2.0**20, -(2.0**-60)], [1, 2], None)
def test_split_and_order_of_the_data_do_not_matter(data, cuts, random) -> None:  # type: ignore[no-untyped-def]
    x = torch.tensor(data, dtype=torch.float32)
    places = sorted(min(cut, len(data)) for cut in cuts)
    batches = [part for part in torch.tensor_split(x, places) if part.numel()]
    if random is not None:
        random.shuffle(batches)
    assert_same(of(*batches), of(x))


@exhaustive
@given(values, values, values)
def test_merging_is_associative_and_commutative(first, second, third) -> None:  # type: ignore[no-untyped-def]
    parts = [of(torch.tensor(data, dtype=torch.float32)) for data in (first, second, third)]
    everything = of(torch.tensor([*first, *second, *third], dtype=torch.float32))
    assert_same(merged(parts[0], merged(parts[1], parts[2])), everything)
    assert_same(merged(merged(parts[0], parts[1]), parts[2]), everything)
    assert_same(merged(*reversed(parts)), everything)


def test_nothing_is_the_neutral_element() -> None:
    one = of(randn(10))
    assert_same(merged(one, Histogram()), one)
    assert_same(merged(Histogram(), one), one)
    assert Histogram().total == 0


@exhaustive
@given(values)
def test_every_value_is_counted_once_in_its_own_bin(data) -> None:  # type: ignore[no-untyped-def]
    x = torch.tensor(data, dtype=torch.float32)
    histogram = of(x)
    assert histogram.total == len(data)
    width = 2.0**histogram.exponent
    expected = torch.zeros(BINS, dtype=torch.int64)
    for value in data:
        expected[math.floor(value / width) + BINS // 2] += 1
    assert torch.equal(histogram.counts, expected)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [([3, 900, 5], 5), ([8, 900, 5], 8), ([3, 2, 5], 2), ([0, 900, 0], 1), ([3, 0, 5], 0)],
    ids=str,
)
def test_a_peak_at_zero_is_cut_to_what_is_beside_it(counts: list[int], expected: int) -> None:
    middle = slice(BINS // 2 - 1, BINS // 2 + 2)
    whole = of(torch.tensor([1.0]))
    whole.counts[middle] = torch.tensor(counts)
    found = whole.without_peak_at_zero()
    assert found.counts[middle].tolist() == [counts[0], expected, counts[2]]
    assert whole.counts[middle].tolist() == counts
    whole.counts[BINS // 2] = expected
    assert_same(found, whole)
