# SPDX-License-Identifier: Apache-2.0
"""Histograms of channels do not know how their data was split, and each is that of its channel alone."""

from __future__ import annotations

import math

import pytest
import qompose
import torch
from hypothesis import example, given, settings, strategies as st
from qompose.observers import histogram
from qompose.observers.histogram import CHANNEL_BINS, ChannelHistograms
from torch import Tensor

from tests.core.toy import randn

numbers = st.floats(-(2.0**127), 2.0**127, width=32)
rows = st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=20)
"""Three channels, and so many values of each."""
exhaustive = settings(max_examples=300, deadline=None)


def of(*batches: Tensor) -> ChannelHistograms:
    found = ChannelHistograms()
    for batch in batches:
        found.add(batch)
    return found


def merged(*parts: ChannelHistograms) -> ChannelHistograms:
    found = ChannelHistograms()
    for part in parts:
        found.merge(part)
    return found


def tensor(data: list[tuple[float, ...]]) -> Tensor:
    return torch.tensor(data, dtype=torch.float32).T


def assert_same(one: ChannelHistograms, other: ChannelHistograms) -> None:
    assert one.values == other.values
    for name in ("exponents", "low", "high", "counts"):
        a, b = getattr(one, name), getattr(other, name)
        assert a.dtype == b.dtype and torch.equal(a, b), name


@exhaustive
@given(rows, st.lists(st.integers(0, 20), max_size=4), st.randoms(use_true_random=False))
@example([(-1e-38, 0.0, 1.0), (1e30, 1e-30, -1.0)], [1], None)
def test_split_and_order_of_the_data_do_not_matter(data, cuts, random) -> None:  # type: ignore[no-untyped-def]
    x = tensor(data)
    places = sorted(min(cut, len(data)) for cut in cuts)
    batches = [part for part in torch.tensor_split(x, places, dim=1) if part.numel()]
    if random is not None:
        random.shuffle(batches)
    assert_same(of(*batches), of(x))


@exhaustive
@given(rows, rows, rows)
def test_merging_is_associative_and_commutative(first, second, third) -> None:  # type: ignore[no-untyped-def]
    parts = [of(tensor(data)) for data in (first, second, third)]
    everything = of(tensor([*first, *second, *third]))
    assert_same(merged(parts[0], merged(parts[1], parts[2])), everything)
    assert_same(merged(merged(parts[0], parts[1]), parts[2]), everything)
    assert_same(merged(*reversed(parts)), everything)


def test_nothing_is_the_neutral_element_and_merging_changes_no_other() -> None:
    one, x = of(randn(3, 10)), randn(3, 10)
    assert_same(merged(one, ChannelHistograms()), one)
    assert_same(merged(ChannelHistograms(), one), one)
    grown = merged(one)
    grown.add(100 * x)
    assert_same(one, of(randn(3, 10)))


@exhaustive
@given(rows)
def test_every_value_is_counted_once_in_its_own_bin(data) -> None:  # type: ignore[no-untyped-def]
    found = of(tensor(data))
    assert found.values == len(data)
    for channel, values in enumerate(zip(*data, strict=True)):
        width = 2.0 ** int(found.exponents[channel])
        expected = torch.zeros(CHANNEL_BINS, dtype=torch.int32)
        for value in values:
            expected[math.floor(value / width) + CHANNEL_BINS // 2] += 1
        assert torch.equal(found.counts[channel], expected)
        assert float(found.low[channel]) == min(values)
        assert float(found.high[channel]) == max(values)


def test_channels_are_counted_in_parts_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    x, sizes = randn(40, 3000), []
    whole, count = of(x), histogram._counted

    def counted(part: Tensor, exponents: Tensor) -> Tensor:
        sizes.append(part.numel())
        return count(part, exponents)

    monkeypatch.setattr(histogram, "_AT_ONCE", 10_000)
    monkeypatch.setattr(histogram, "_counted", counted)
    assert_same(of(x), whole)
    assert max(sizes) <= 10_000 and sum(sizes) == x.numel()


def test_more_values_than_an_int32_counts() -> None:
    one = of(torch.ones(2, 3))
    assert one.counts.dtype == torch.int32
    for _ in range(30):
        one = merged(one, one)
    assert one.values == 3 * 2**30 and one.counts.dtype == torch.int64
    assert one.counts.sum(1).tolist() == [one.values] * 2


def test_another_number_of_channels() -> None:
    with pytest.raises(qompose.errors.StatisticsError, match="3 slices, and then 4"):
        of(randn(3, 2), randn(4, 2))


@pytest.mark.parametrize("slices", [1, 2, 100])
def test_occupied_bins_are_those_with_counts(slices: int) -> None:
    """In units of each slice's bins, half of the values at each of two places, and none out of range."""
    x = torch.cat([randn(4, 50), torch.zeros(1, 50), torch.full((1, 50), -3.0)]) * 2.0**40
    found = of(x)
    parts = [*found.occupied(slices)]
    assert len(parts) == -(-len(x) // slices)
    rows = [
        (n, row, *ends)
        for n, row, *ends in (one for part in parts for one in zip(*part, strict=True))
    ]
    for number, (places, halves, low, high) in enumerate(rows):
        bins = found.counts[number].nonzero().flatten()
        assert (
            halves[halves > 0].tolist()
            == (found.counts[number, bins] / 2).repeat_interleave(2).tolist()
        )
        expected = (
            bins.repeat_interleave(2)
            - CHANNEL_BINS // 2
            + torch.tensor([0.25, 0.75]).repeat(len(bins))
        )
        assert torch.equal(places[halves > 0], expected.clamp(low, high))
    for part in parts:
        assert int((part.counts > 0).sum(1).max()) == part.counts.shape[1]
    ends = torch.stack([torch.stack(ends) for _, _, *ends in rows])
    assert float(ends.abs().max()) < CHANNEL_BINS / 2
    assert torch.equal(found.in_units_of_data(ends[:, 0]), x.amin(1))
    assert torch.equal(found.in_units_of_data(ends[:, 1]), x.amax(1))
