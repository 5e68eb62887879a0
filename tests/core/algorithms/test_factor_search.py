# SPDX-License-Identifier: Apache-2.0
"""Factors of channels: the best of those tried, where they are worth their time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from qompose.algorithms import factor_search
from qompose.algorithms.calibrated import RoundedWeight, Scheme
from qompose.algorithms.channel_factors import Absorbers
from qompose.observers.channel_ranges import ChannelSample
from qompose.observers.min_max import MinMaxObserver
from torch import Tensor

from tests.core.toy import randn

SCHEME = Scheme(0, 255, MinMaxObserver(torch.uint8)._qparams)


def rounded(weight: Tensor) -> Tensor:
    step = weight.abs().amax() / 127
    return (weight / step).round() * step


def found(x: Tensor, weight: Tensor, **options: Any) -> Any:
    ends, half = (x.amin(0), x.amax(0)), torch.arange(len(x)) % 2 == 1
    seen = ChannelSample(*ends, x, torch.ones(len(x)), half)
    plain, products = (
        SCHEME.choose(x.amin(), x.amax()),
        [RoundedWeight(weight, rounded, by_row=False)],
    )
    return factor_search.input_factors(seen, products, SCHEME, plain, **options)


def uneven(sizes: float, weights: float, outputs: int = 24) -> tuple[Tensor, Tensor]:
    """Rows, and a weight whose channels have the sizes of theirs to some power."""
    loud = 2 ** (sizes * randn(32, seed=1))
    return randn(256, 32) * loud, randn(outputs, 32, seed=2) * loud**weights


@pytest.mark.parametrize(("sizes", "weights"), [(1, -0.5), (2, 0), (2, -1)])
def test_the_best_exponent_level_and_room_are_nearly_found(
    monkeypatch: pytest.MonkeyPatch, sizes: float, weights: float
) -> None:
    data, gains = uneven(sizes, weights), []
    best = found(*data, needed=0.0).gain
    names = ("_EXPONENTS", "_LEVELS", "_ROOMS")
    for way in itertools.product(*(getattr(factor_search, name) for name in names)):
        for name, value in zip(names, way, strict=True):
            monkeypatch.setattr(factor_search, name, (value,))
        gains.append(found(*data, needed=0.0).gain)
    assert best > 0.95 * max(gains)


def test_factors_are_worth_their_time_where_there_are_many_outputs() -> None:
    assert found(*uneven(1, -0.5, outputs=512)) is not None
    assert found(*uneven(1, -0.5, outputs=24)) is None


def test_what_a_parameter_divides_by_need_not_be_worth_its_time() -> None:
    """Yet data from elsewhere has to be reckoned with."""
    each = Absorbers(("weight",), torch.arange(32), 32, {})
    gains = [found(*uneven(size, -0.5), needed=0.0).gain for size in (0.3, 1)]
    assert gains[0] < 2 < gains[1]
    assert found(*uneven(0.3, -0.5), absorbers=each) is None
    assert found(*uneven(1, -0.5), absorbers=each) is not None is found(*uneven(1, -0.5))


def test_channels_of_one_row_have_one_factor() -> None:
    pairs = Absorbers(("weight",), torch.arange(16).repeat_interleave(2), 16, {})
    values = found(*uneven(1, -0.5), needed=0.0, absorbers=pairs).values
    assert torch.equal(values[::2], values[1::2]) and values.amax() > 1


def test_just_what_is_needed_is_enough() -> None:
    """Of the gain, and of rows."""
    x, weight = uneven(1, -0.5)
    gain = found(x, weight, needed=0.0).gain
    assert found(x, weight, needed=gain) is not None
    assert found(x[:32], weight, needed=0.0) is not None
    assert found(x[:31], weight, needed=0.0) is None


def test_silent_channels_have_no_factor_and_do_not_count() -> None:
    x, weight = uneven(2, 0)
    x[:, :20] = 0.0
    factors = found(x, weight, needed=0.0, alpha=1.0).values
    assert factors[:20].tolist() == [1.0] * 20
    assert factors[20:].amin() == 1.0 < factors[20:].amax()


def test_where_squares_are_beyond_the_largest_float_there_are_no_factors() -> None:
    x, weight = uneven(1, -0.5, outputs=512)
    x[7, 3] = 1e30
    assert found(x, weight) is None
