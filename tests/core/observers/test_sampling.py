# SPDX-License-Identifier: Apache-2.0
"""What of a tensor is counted: a fixed part of each example, however it lies in memory or in batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from qompose.observers.histogram import EXAMPLE, places_in, sample_of

from tests.core.toy import randn

CPU = torch.device("cpu")
shapes = st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple)


@pytest.mark.parametrize("shape", [(), (5,), (10**5,), (3, EXAMPLE), (1000, 7), (2, 64, 8, 8)])
def test_small_examples_are_taken_whole(shape: tuple[int, ...]) -> None:
    x = randn(*shape)
    values, each = sample_of(x)
    assert values is x and each == 1


@pytest.mark.parametrize(
    "shape", [(3, EXAMPLE + 1), (2, 256, 56, 56), (1, 128, 768), (2, 3, 224, 224)]
)
def test_of_large_ones_a_part_that_stands_for_all(shape: tuple[int, ...]) -> None:
    x = randn(*shape)
    values, each = sample_of(x)
    assert EXAMPLE / 2 <= values.shape[1] <= EXAMPLE
    assert values.shape[1] * each == pytest.approx(x[0].numel(), rel=0.01, abs=each)
    assert float(values.std()) == pytest.approx(1.0, rel=0.1)


def test_memory_format_and_batches_do_not_matter() -> None:
    x = randn(6, 32, 20, 20)
    values, _ = sample_of(x)
    assert torch.equal(values, sample_of(x.to(memory_format=torch.channels_last))[0])
    assert torch.equal(values, torch.cat([sample_of(part)[0] for part in x.split([1, 3, 2])]))


@given(shapes, st.integers(1, 50))
def test_one_place_of_each_run(shape: tuple[int, ...], most: int) -> None:
    places, run = places_in(shape, most, CPU)
    flat = torch.zeros(len(places[0]), dtype=torch.int64)
    for index, size in zip(places, shape, strict=True):
        assert int(index.min()) >= 0 and int(index.max()) < size
        flat = flat * size + index
    assert torch.equal(flat // run, torch.arange(len(flat)))
    assert len(flat) <= most


def test_every_column_and_channel_is_hit() -> None:
    """A fixed step through rows of as many columns would see one column alone."""
    channels, rows, columns = places_in((64, 64, 64), EXAMPLE, CPU)[0]
    assert len(channels.unique()) == len(rows.unique()) == len(columns.unique()) == 64
