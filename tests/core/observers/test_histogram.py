# SPDX-License-Identifier: Apache-2.0
"""Histograms do not know how their data was split, of a tensor or of each of its channels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import qompose
import torch
from hypothesis import example, given, settings, strategies as st
from qompose.observers import histogram
from qompose.observers.histogram import (
    BINS,
    CHANNEL_BINS,
    EXAMPLE,
    ChannelHistograms,
    Histogram,
    places_in,
    sample_of,
)
from torch import Tensor

from tests.core.toy import randn

numbers = st.floats(-(2.0**127), 2.0**127, width=32)
rows = st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=20)
"""Three channels, and so many values of each."""
kinds = pytest.mark.parametrize("kind", [Histogram, ChannelHistograms])
exhaustive = settings(max_examples=60, deadline=None)
FACTS = {
    Histogram: ("exponent", "minimum", "maximum", "counts"),
    ChannelHistograms: ("exponents", "low", "high", "counts", "values"),
}


def of(*batches: Tensor, kind: Any = Histogram) -> Any:
    found = kind()
    for batch in batches:
        found.add(batch)
    return found


def merged(*parts: Any) -> Any:
    found = type(parts[0])()
    for part in parts:
        found.merge(part)
    return found


def tensor(data: list[tuple[float, ...]]) -> Tensor:
    return torch.tensor(data, dtype=torch.float32).T


def assert_same(one: Any, other: Any) -> None:
    for name in FACTS[type(one)]:
        a, b = (torch.as_tensor(getattr(each, name)) for each in (one, other))
        assert a.dtype == b.dtype and torch.equal(a, b), name


@kinds
@exhaustive
@given(rows, st.lists(st.integers(0, 20), max_size=4), st.randoms(use_true_random=False))
@example([(-1e-38, 0.0, 1.0), (1e30, 1e-30, -1.0)], [1], None)
@example([(-(2.0**20), 0.0, 0.0), (2.0**20, 0.0, 0.0), (-(2.0**-60), 0.0, 0.0)], [1, 2], None)
def test_split_and_order_of_the_data_do_not_matter(kind, data, cuts, random) -> None:  # type: ignore[no-untyped-def]
    x = tensor(data)
    places = sorted(min(cut, len(data)) for cut in cuts)
    batches = [part for part in torch.tensor_split(x, places, dim=1) if part.numel()]
    if random is not None:
        random.shuffle(batches)
    assert_same(of(*batches, kind=kind), of(x, kind=kind))


@kinds
@exhaustive
@given(rows, rows, rows)
def test_merging_is_associative_and_commutative(kind, first, second, third) -> None:  # type: ignore[no-untyped-def]
    parts = [of(tensor(data), kind=kind) for data in (first, second, third)]
    everything = of(tensor([*first, *second, *third]), kind=kind)
    assert_same(merged(parts[0], merged(parts[1], parts[2])), everything)
    assert_same(merged(merged(parts[0], parts[1]), parts[2]), everything)
    assert_same(merged(*reversed(parts)), everything)


@kinds
def test_nothing_is_the_neutral_element_and_merging_changes_no_other(kind: Any) -> None:
    one, x = of(randn(3, 10), kind=kind), randn(3, 10)
    assert_same(merged(one, kind()), one)
    assert_same(merged(kind(), one), one)
    grown = merged(one)
    grown.add(100 * x)
    assert_same(one, of(randn(3, 10), kind=kind))


def in_bins(values: Any, exponent: Any, bins: int) -> Tensor:
    """How many of the values lie in each bin, by the definition."""
    expected = torch.zeros(bins, dtype=torch.int64)
    for value in values:
        expected[math.floor(value / 2.0 ** int(exponent)) + bins // 2] += 1
    return expected


@exhaustive
@given(rows)
def test_every_value_is_counted_once_in_its_own_bin(data) -> None:  # type: ignore[no-untyped-def]
    x = tensor(data)
    whole, found = of(x), of(x, kind=ChannelHistograms)
    assert (whole.total, found.values) == (x.numel(), len(data))
    assert torch.equal(whole.counts, in_bins(x.flatten().tolist(), whole.exponent, BINS))
    for channel, values in enumerate(zip(*data, strict=True)):
        expected = in_bins(values, found.exponents[channel], CHANNEL_BINS)
        assert torch.equal(found.counts[channel], expected.int())
        assert float(found.low[channel]) == min(values)
        assert float(found.high[channel]) == max(values)


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


class TestChannels:
    def test_they_are_counted_in_parts_of_bounded_size(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        x, sizes = randn(40, 3000), []
        whole, count = of(x, kind=ChannelHistograms), histogram._counted

        def counted(part: Tensor, exponents: Tensor) -> Tensor:
            sizes.append(part.numel())
            return count(part, exponents)

        monkeypatch.setattr(histogram, "_AT_ONCE", 10_000)
        monkeypatch.setattr(histogram, "_counted", counted)
        assert_same(of(x, kind=ChannelHistograms), whole)
        assert max(sizes) <= 10_000 and sum(sizes) == x.numel()

    def test_more_values_than_an_int32_counts(self) -> None:
        one = of(torch.ones(2, 3), kind=ChannelHistograms)
        assert one.counts.dtype == torch.int32
        for _ in range(30):
            one = merged(one, one)
        assert one.values == 3 * 2**30 and one.counts.dtype == torch.int64
        assert one.counts.sum(1).tolist() == [one.values] * 2
        one.values = 2**31 - 1
        assert one.counts_dtype == torch.int32

    def test_another_number_of_channels_is_refused(self) -> None:
        with pytest.raises(qompose.errors.StatisticsError):
            of(randn(3, 2), randn(4, 2), kind=ChannelHistograms)

    @pytest.mark.parametrize("slices", [1, 2, 100])
    def test_occupied_bins_are_those_with_counts(self, slices: int) -> None:
        """In units of each slice's bins, half of the values at each of two places, none out of range."""
        x = torch.cat([randn(4, 50), torch.zeros(1, 50), torch.full((1, 50), -3.0)]) * 2.0**40
        found = of(x, kind=ChannelHistograms)
        parts = [*found.occupied(slices)]
        assert len(parts) == -(-len(x) // slices)
        rows = [row for part in parts for row in zip(*part, strict=True)]
        for number, (places, halves, low, high) in enumerate(row[:4] for row in rows):
            bins, taken = found.counts[number].nonzero().flatten(), halves > 0
            each = (found.counts[number, bins] / 2).repeat_interleave(2)
            assert halves[taken].tolist() == each.tolist()
            starts = bins.repeat_interleave(2) - CHANNEL_BINS // 2
            inside = starts + torch.tensor([0.25, 0.75]).repeat(len(bins))
            assert torch.equal(places[taken], inside.clamp(low, high))
        for part in parts:
            assert int((part.counts > 0).sum(1).max()) == part.counts.shape[1]
        ends = torch.stack([torch.stack(row[2:]) for row in rows])
        assert float(ends.abs().max()) < CHANNEL_BINS / 2
        assert torch.equal(found.in_units_of_data(ends[:, 0]), x.amin(1))
        assert torch.equal(found.in_units_of_data(ends[:, 1]), x.amax(1))


CPU = torch.device("cpu")
shapes = st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple)


class TestSampling:
    """What of a tensor is counted: a fixed part of each example, however it lies in memory or batches."""

    @pytest.mark.parametrize("shape", [(), (10**5,), (3, EXAMPLE), (1000, 7)], ids=str)
    def test_small_examples_are_taken_whole(self, shape: tuple[int, ...]) -> None:
        x = randn(*shape)
        values, each = sample_of(x)
        assert values is x and each == 1

    @pytest.mark.parametrize("shape", [(3, EXAMPLE + 1), (2, 256, 56, 56), (1, 128, 768)], ids=str)
    def test_of_large_ones_a_part_that_stands_for_all(self, shape: tuple[int, ...]) -> None:
        x = randn(*shape)
        values, each = sample_of(x)
        assert EXAMPLE / 2 <= values.shape[1] <= EXAMPLE
        assert values.shape[1] * each == pytest.approx(x[0].numel(), rel=0.01, abs=each)
        assert float(values.std()) == pytest.approx(1.0, rel=0.1)

    def test_memory_format_and_batches_do_not_matter(self) -> None:
        x = randn(6, 32, 20, 20)
        values, _ = sample_of(x)
        assert torch.equal(values, sample_of(x.to(memory_format=torch.channels_last))[0])
        assert torch.equal(values, torch.cat([sample_of(part)[0] for part in x.split([1, 3, 2])]))

    @given(shapes, st.integers(1, 50))
    def test_one_place_of_each_run(self, shape: tuple[int, ...], most: int) -> None:
        places, run = places_in(shape, most, CPU)
        flat = torch.zeros(len(places[0]), dtype=torch.int64)
        for index, size in zip(places, shape, strict=True):
            assert int(index.min()) >= 0 and int(index.max()) < size
            flat = flat * size + index
        assert torch.equal(flat // run, torch.arange(len(flat)))
        assert len(flat) <= most

    def test_every_column_and_channel_is_hit(self) -> None:
        """A fixed step through rows of as many columns would see one column alone."""
        channels, rows, columns = places_in((64, 64, 64), EXAMPLE, CPU)[0]
        assert len(channels.unique()) == len(rows.unique()) == len(columns.unique()) == 64
