# SPDX-License-Identifier: Apache-2.0
"""Rows that are kept: the same however data is split, ordered and merged, and rows that were there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from qompose.observers.tensor_statistics import PER_EXAMPLE, ROWS, RowSample
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
    assert one.seen == other.seen


DATA = {
    "rows": (randn(3000, 5), 1),
    "images": (randn(90, 4, 6, 6), 1),
    "tokens": (randn(40, 50, 8), 2),
    "equal examples": (randn(1, 3, 7).repeat(60, 1, 1), 2),
}


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(DATA)),
    cuts=st.lists(st.integers(0, 90), max_size=4).map(sorted),
    order=st.randoms(use_true_random=False),
)
def test_splits_orders_and_merges_do_not_matter(name: str, cuts: list[int], order: Any) -> None:
    x, dim = DATA[name]
    parts = [part for part in x.tensor_split(cuts) if len(part)]
    order.shuffle(parts)
    whole = of(dim, x)
    assert_same(of(dim, *parts), whole)
    merged = RowSample()
    for part in parts:
        merged.merge(of(dim, part))
    assert_same(merged, whole)


@pytest.mark.parametrize("name", DATA)
def test_rows_are_rows_of_the_data(name: str) -> None:
    x, dim = DATA[name]
    sample = of(dim, x)
    everything = {tuple(row.tolist()) for row in x.movedim(dim, -1).flatten(0, -2)}
    assert {tuple(row.tolist()) for row in sample.rows} <= everything
    assert sample.seen == len(x.movedim(dim, -1).flatten(0, -2))
    assert 0 < len(sample.rows) <= ROWS


BINARY = (torch.rand(4000, 64, generator=torch.Generator().manual_seed(0)) > 0.5).float()


@pytest.mark.parametrize(
    "x",
    [torch.eye(256), BINARY, torch.randn(1000, 512).clamp(max=2.9)],
    ids=["one of many", "binary", "wide"],
)
def test_different_examples_have_different_hashes(x: Tensor) -> None:
    hashes = [of(1, part).order[:, 0] for part in x.split(50)]
    assert len(torch.cat(hashes).unique()) == len(x.unique(dim=0))


def test_examples_with_one_hash_are_told_apart() -> None:
    """They differ where no value is hashed: in one of 4096 places, of which 256 are."""
    x = torch.zeros(64, 4096).scatter(1, torch.arange(64).unsqueeze(1) * 61, 1.0)
    whole = of(1, x)
    assert len(whole.order[:, 0].unique()) < 64
    assert len(whole.rows) == 64
    assert_same(of(1, *x.flip(0).split(7)), whole)


def test_how_many_are_kept() -> None:
    """A few of each example, fewer where they are wide, and no part of the data is preferred."""
    assert len(of(1, randn(1, 3, 100, 100)).rows) == PER_EXAMPLE
    assert len(of(1, randn(1, 3)).rows) == 1
    assert len(of(1, randn(200, 4096)).rows) == 64
    x = torch.arange(5000.0).reshape(-1, 1)
    kept = of(1, x).rows.flatten()
    assert len(kept.unique()) == ROWS
    assert float(kept.mean()) == pytest.approx(2500, rel=0.1)


@pytest.mark.parametrize(("shape", "dim"), [((), 0), ((7,), 0), ((7, 3), 0)])
def test_tensors_whose_first_dimension_has_the_channels(shape: tuple[int, ...], dim: int) -> None:
    x = randn(*shape)
    sample = of(dim, x)
    assert sample.rows.shape[1] == (x.shape[dim] if x.dim() else 1)
    assert sample.seen == len(sample.rows)


def test_nothing_is_merged_into_nothing() -> None:
    empty, some = RowSample(), of(1, randn(4, 3))
    empty.merge(RowSample())
    assert empty.seen == 0 and not len(empty.rows)
    empty.merge(some)
    some.merge(RowSample())
    assert_same(empty, some)
