# SPDX-License-Identifier: Apache-2.0
"""Rows that are kept: the same however data is split, ordered and merged, and the large ones among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from qompose.observers.row_sample import (
    FEWEST,
    MOST,
    MOST_FREQUENT,
    PER_EXAMPLE,
    STRATA,
    VALUES,
    RowSample,
)
from torch import Tensor

from tests.core.toy import randn


def of(dim: int, *batches: Tensor) -> RowSample:
    sample = RowSample()
    for batch in batches:
        sample.add(batch, dim)
    return sample


def assert_same(one: RowSample, other: RowSample) -> None:
    assert torch.equal(one.rows, other.rows)
    assert torch.equal(one.order, other.order)
    assert one.counts == other.counts
    assert torch.equal(one.weights, other.weights)
    assert torch.equal(one.frequent.rows, other.frequent.rows)
    assert torch.equal(one.frequent.numbers, other.frequent.numbers)


def on(backgrounds: Tensor, places: int = 40, seed: int = 0) -> Tensor:
    """Examples of rows, of which a half is the background: `(N, places, C)`."""
    x = randn(len(backgrounds), places, backgrounds.shape[1], seed=seed)
    x[:, ::2] = backgrounds[:, None]
    return x


SIZES = 2.0 ** torch.linspace(-40, 40, 3000).unsqueeze(1)
DATA = {
    "rows": (randn(3000, 5), 1),
    "rows of every size": (randn(3000, 5) * SIZES[torch.randperm(3000)], 1),
    "images": (randn(90, 4, 6, 6), 1),
    "tokens": (randn(40, 50, 8), 2),
    "equal examples": (randn(1, 3, 7).repeat(60, 1, 1), 2),
    "rows of several examples": (
        (1 + randn(300, 8).abs() / 20)[(randn(40, 50, seed=1) * 1e4).long() % 300], 2,
    ),
    "zeros": (torch.zeros(40, 3), 1),
    "three backgrounds": (on(randn(3, 6).repeat(20, 1)), 2),
    "a background for each": (on(randn(90, 6)), 2),
}  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(DATA)),
    cuts=st.lists(st.integers(0, 90), max_size=4).map(sorted),
    order=st.randoms(use_true_random=False),
    looks=st.booleans(),
)
def test_splits_orders_and_merges_do_not_matter(
    name: str, cuts: list[int], order: Any, looks: bool
) -> None:
    x, dim = DATA[name]
    parts = [part for part in x.tensor_split(cuts) if len(part)]
    order.shuffle(parts)
    whole, split, merged = of(dim, x), RowSample(), RowSample()
    for part in parts:
        split.add(part, dim)
        merged.merge(of(dim, part))
        if looks:  # whoever looks on the way changes nothing
            assert len(split.rows) and len(merged.rows)
    assert_same(split, whole)
    assert_same(merged, whole)


def test_rows_that_are_an_eighth_of_an_example_are_counted() -> None:
    often, seldom, other = randn(3, 4)
    x = randn(2, 32, 4, seed=1)
    x[0, :9], x[0, 20:22], x[1, 5:7], x[1, 10:14] = often, seldom, often, other
    found = of(2, x).frequent
    counted = {
        tuple(row.tolist()): n for row, (_, n) in zip(found.rows, found.numbers, strict=True)
    }
    assert {row: int(n) for row, n in counted.items()} == {
        tuple(often.tolist()): 9, tuple(other.tolist()): 4,
    }  # fmt: skip
    assert not len(of(2, x[:, :15]).frequent.rows)  # too few to tell


def test_of_many_backgrounds_some_are_kept() -> None:
    x, dim = DATA["a background for each"]
    found = of(dim, x).frequent
    assert len(found.rows) == MOST_FREQUENT < len(x)
    assert {*found.numbers[:, 1].tolist()} == {20}


def test_of_equal_rows_the_first_example_is_taken_however_late_it_comes() -> None:
    x, dim = DATA["rows of several examples"]
    for each in (x, x.flip(0)):
        assert_same(of(dim, *each.split(1)), of(dim, x))


@pytest.mark.parametrize("name", DATA)
def test_rows_are_rows_of_the_data(name: str) -> None:
    x, dim = DATA[name]
    sample = of(dim, x)
    everything = {tuple(row.tolist()) for row in x.movedim(dim, -1).flatten(0, -2)}
    kept = [tuple(row.tolist()) for row in sample.rows]
    assert {*kept} <= everything and len({*kept}) == len(kept)
    assert sample.seen == len(x.movedim(dim, -1).flatten(0, -2))
    assert float(sample.weights.sum()) == pytest.approx(sample.seen)
    assert 0 < len(sample.rows) <= MOST * STRATA


def test_the_largest_rows_are_kept_however_rare_they_are() -> None:
    x = randn(20_000, 12)
    x[123, 4], x[9876, 5] = 900.0, -1000.0
    largest = of(1, *x.split(500)).rows.abs().amax(1)
    assert {900.0, 1000.0} <= {*largest.tolist()}


def test_a_stratum_is_half_an_octave() -> None:
    x = torch.tensor([1.0, 1.41, 1.42, 1.99, 2.0, -2.5]).unsqueeze(1)
    assert [*of(1, x).counts.values()] == [2, 2, 2]


def test_both_zeros_are_one_number() -> None:
    assert len(of(1, torch.tensor([[0.0, 1.0], [-0.0, 1.0]])).rows) == 1


def test_small_rows_are_one_stratum() -> None:
    """Those that are 2**8 times smaller than the largest, which may come last."""
    small = torch.cat([torch.full((50, 3), 2.0**-k) * (1 + torch.rand(50, 3)) for k in range(30)])
    sample = of(1, small, torch.full((1, 3), 5.0))
    assert max(sample.counts) - min(sample.counts) == STRATA - 1
    assert max(sample.counts.values()) > 50 * 20
    assert sample.counts == of(1, torch.full((1, 3), 5.0), small).counts


def test_a_mean_over_the_sample_is_that_of_the_data() -> None:
    x = randn(30_000, 16) * torch.rand(30_000, 1) ** 4
    sample = of(1, *x.split(1000))
    found = (sample.rows.square().sum(1) * sample.weights).sum() / sample.weights.sum()
    assert float(found) == pytest.approx(float(x.square().sum(1).mean()), rel=0.1)


def test_halves_are_of_different_examples() -> None:
    x = randn(200, 10, 6)
    sample = of(2, x)
    example = {tuple(row.tolist()): number for number, rows in enumerate(x) for row in rows}
    sides = [
        {example[tuple(row.tolist())] for row in sample.rows[half]}
        for half in (sample.half, ~sample.half)
    ]
    assert sides[0].isdisjoint(sides[1])
    assert min(map(len, sides)) > 60
    assert sample.examples == len(sides[0] | sides[1])


BINARY = (torch.rand(4000, 64, generator=torch.Generator().manual_seed(0)) > 0.5).float()


@pytest.mark.parametrize(
    "x",
    [torch.eye(256), BINARY, torch.randn(1000, 512).clamp(max=2.9)],
    ids=["one of many", "binary", "wide"],
)
def test_different_rows_have_different_hashes(x: Tensor) -> None:
    hashes = [of(1, part).order[:, 1] for part in x.split(50)]
    assert len(torch.cat(hashes).unique()) == len(x.unique(dim=0))


def test_how_many_are_kept() -> None:
    """So many of a stratum, fewer where they are wide, and no part of the data is preferred."""
    assert PER_EXAMPLE / 2 < of(1, randn(1, 3, 100, 100)).seen <= PER_EXAMPLE
    assert len(of(1, randn(1, 3)).rows) == 1
    assert len(of(1, torch.ones(500, 4096) + randn(500, 4096) / 100).rows) == VALUES // 4096
    assert len(of(1, torch.ones(50, VALUES) + torch.arange(50).unsqueeze(1) / 1000).rows) == FEWEST
    x = 1 + torch.arange(5000.0).reshape(-1, 1) / 15000
    kept = of(1, x).rows.flatten()
    assert len(kept.unique()) == MOST
    assert float(kept.mean()) == pytest.approx(float(x.mean()), rel=0.02)


@pytest.mark.parametrize(("shape", "dim"), [((), 0), ((7,), 0), ((7, 3), 0)])
def test_tensors_whose_first_dimension_has_the_channels(shape: tuple[int, ...], dim: int) -> None:
    x = randn(*shape)
    sample = of(dim, x)
    assert sample.rows.shape[1] == (x.shape[dim] if x.dim() else 1)
    assert sample.seen == len(sample.rows)
    assert sample.examples == 1


def test_nothing_is_merged_into_nothing() -> None:
    empty, some = RowSample(), of(1, randn(4, 3))
    empty.merge(RowSample())
    assert empty.seen == 0 and not len(empty.rows) and not len(empty.weights)
    empty.merge(some)
    some.merge(RowSample())
    assert_same(empty, some)


@pytest.mark.parametrize("channels", [3, 48])
def test_how_many_rows_differ_is_estimated_of_more_than_are_kept(channels: int) -> None:
    drawn = of(2, randn(200, 100, channels, seed=0))
    assert len(drawn.rows) < drawn.seen / 2
    assert 0.85 * drawn.seen < drawn.different <= drawn.seen


@pytest.mark.parametrize(
    ("different", "times", "spread", "repeated"),
    [(100, 20, 12, True), (100, 5, 12, False), (300, 20, 12, False), (100, 20, 48, False)],
)
def test_rows_are_repeated_where_few_differ_of_many(
    different: int, times: int, spread: int, repeated: bool
) -> None:
    """Of 48 channels: 192 different rows are enough, or one row in ten, or rows in all directions."""
    rows = randn(different, spread, seed=0) @ randn(spread, 48, seed=1)
    rows = rows if spread < 48 else randn(different, 48, seed=0)
    rows = rows.repeat(times, 1)
    sample = of(2, rows[torch.randperm(len(rows))].view(-1, 20, 48))
    assert (sample.different, sample.seen) == (different, different * times)
    assert sample.repeated is repeated


@pytest.mark.parametrize("directions", [1, 7, 48])
def test_dimensions_are_those_that_rows_spread_over(directions: int) -> None:
    """Evenly: of the corners of a cross that is not around zero; one is far from it."""
    corners = torch.cat([torch.eye(48)[:directions], -torch.eye(48)[:directions]]) + 3
    assert of(1, corners).dimensions == pytest.approx(directions, rel=0.01)
