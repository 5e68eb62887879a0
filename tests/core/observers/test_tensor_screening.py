# SPDX-License-Identifier: Apache-2.0
"""A screen of tensors knows what a screen of numbers knows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from qompose.observers.value_screening import Screen, TensorScreen
from torch import Tensor

NUMBERS = st.one_of(
    st.floats(-5, 5, width=32),
    st.sampled_from([-math.inf, torch.finfo(torch.float32).min, -1e9, -10000.0, -1001.0, 0.0]),
)
BATCHES = st.lists(
    st.lists(NUMBERS, min_size=1, max_size=6).map(torch.tensor), min_size=1, max_size=4
)


@settings(max_examples=200, deadline=None)
@given(batches=BATCHES)
def test_the_same_is_seen(batches: list[Tensor]) -> None:
    ours, known = TensorScreen(), Screen()
    for batch in batches:
        one, other = ours.clean(batch, "x"), known.clean(batch, "x")
        assert torch.equal(one.values, other.values)
        assert (float(one.low), float(one.high)) == (float(other.low), float(other.high))
    assert vars(ours.snapshot()) == pytest.approx(vars(known))
    assert bool(ours.holds_mask()) == (known.mask is not None)


def test_nan_is_left_out() -> None:
    screen = TensorScreen()
    cleaned = screen.clean(torch.tensor([1.0, math.nan, -2.0]), "x")
    assert (float(cleaned.low), float(cleaned.high)) == (-2.0, 1.0)
    assert (screen.snapshot().masked, screen.snapshot().values) == (0, 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, torch.finfo(torch.float32).max])
def test_an_overflow_is_no_mask(bad: float) -> None:
    screen = TensorScreen()
    screen.clean(torch.tensor([1.0, bad, -math.inf]), "x")
    assert not screen.holds_mask()
    assert float(screen.sizes[0]) == 1.0


def test_what_another_has_seen_is_taken() -> None:
    known, screen = Screen(), TensorScreen()
    known.clean(torch.tensor([1.0, -math.inf]), "x")
    screen.take(known)
    assert vars(screen.snapshot()) == vars(known)
    assert bool(screen.holds_mask())
