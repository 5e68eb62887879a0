# SPDX-License-Identifier: Apache-2.0
"""Range searches: they never lose to the whole range, by the measure that each of them minimises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from qompose.observers.clipping_range_search import (
    Candidates,
    best_range,
    best_ranges,
    divergence,
    percentile_range,
    power_error,
)
from qompose.observers.histogram import ChannelHistograms, Histogram
from qompose.spec.qparams import choose_qparams
from torch import Tensor

from tests.core.observers.test_histogram import of
from tests.core.toy import randn

ordinary = st.lists(st.floats(-(2.0**20), 2.0**20, width=32), min_size=1, max_size=60)

BOUNDS = [(-128, 127), (-127, 127), (-64, 63), (-8, 7)]
SCHEMES = [
    pytest.param(torch.per_tensor_affine, id="affine"),
    pytest.param(torch.per_tensor_symmetric, id="symmetric"),
]
SHAPES = {
    "normal": randn(5000), "heavy tail": randn(5000) ** 3,
    "one outlier": torch.cat([randn(5000), torch.tensor([60.0])]), "one-sided": randn(5000).abs(),
    "negative": -randn(5000).abs() - 1, "far from zero": randn(5000) * 0.01 + 5,
    "two values": torch.tensor([-1.0, 3.0]).repeat(50),
}  # fmt: skip
LONE = torch.cat([torch.tensor([3.0]), randn(1000).abs() + 4])


@pytest.mark.parametrize("power", [2.0, 3.0])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_the_best_range_is_never_worse_than_the_whole(
    name: str, bounds: tuple[int, int], scheme: Any, power: float
) -> None:
    histogram = of(SHAPES[name])
    low, high = search(histogram, bounds, scheme, power)
    whole = whole_range(histogram, scheme)
    best = error(histogram, (low, high), bounds, scheme, power)
    assert best <= error(histogram, whole, bounds, scheme, power) * (1 + 1e-5)
    assert whole[0] <= low <= 0 <= high <= whole[1]
    if scheme is torch.per_tensor_symmetric:
        assert low == -high


@pytest.mark.parametrize(
    ("name", "gain"), [("heavy tail", 1.5), ("one outlier", 1.5), ("normal", 1.05)]
)
def test_clipping_pays_where_there_are_tails(name: str, gain: float) -> None:
    """Measured on the data itself, at four bits, where the step is coarse enough to matter."""
    x, scheme = SHAPES[name], torch.per_tensor_affine
    best, whole = (
        float((x - rounded(x, *ends, (-8, 7), scheme)).square().mean())
        for ends in (search(of(x), (-8, 7), scheme), (float(x.min()), float(x.max())))
    )
    assert whole / best > gain


@pytest.mark.parametrize("constant", [0.0, 3.0, -3.0, 1e-30, 2.0**120])
def test_a_constant_has_a_range_to_zero(constant: float) -> None:
    """Of a tensor, and of a channel."""
    x, bounds, scheme = torch.full((7,), constant), (-128, 127), torch.per_tensor_affine
    for low, high in (search(of(x), bounds, scheme), channels_search([x], bounds, scheme)):
        assert float(low) == pytest.approx(min(constant, 0.0))
        assert float(high) == pytest.approx(max(constant, 0.0))


def search(
    histogram: Histogram, bounds: tuple[int, int], scheme: Any, power: float = 2.0
) -> tuple[float, float]:
    symmetric = scheme is torch.per_tensor_symmetric
    steps = bounds[1] - bounds[0]
    lowest = bounds[0] if symmetric else None
    low, high = best_range(histogram, steps=steps, cost=power_error(power), lowest=lowest)
    return float(low), float(high)


def whole_range(histogram: Histogram, scheme: Any) -> tuple[float, float]:
    low, high = min(histogram.minimum, 0.0), max(histogram.maximum, 0.0)
    largest = max(-low, high)
    return (-largest, largest) if scheme is torch.per_tensor_symmetric else (low, high)


def error(
    histogram: Histogram, ends: tuple[float, float], bounds: Any, scheme: Any, power: float = 2.0
) -> float:
    """Error on the histogram, with the parameters that the range really leads to."""
    centres = histogram.centres().clamp(histogram.minimum, histogram.maximum)
    difference = rounded(centres, *ends, bounds, scheme) - centres
    return float((difference.abs() ** power * histogram.counts).sum())


def rounded(x: Tensor, low: float, high: float, bounds: tuple[int, int], scheme: Any) -> Tensor:
    scale, zero_point = choose_qparams(
        torch.tensor(low), torch.tensor(high), dtype=torch.int8, quant_min=bounds[0],
        quant_max=bounds[1], qscheme=scheme, eps=2.0**-126,
    )  # fmt: skip
    integers = torch.round(x.double() / scale.double()) + zero_point
    return (integers.clamp(*bounds) - zero_point) * scale.double()


def test_a_search_looks_at_occupied_bins_alone_and_no_further_than_the_data() -> None:
    seen: list[Candidates] = []

    def cost(candidates: Candidates) -> Tensor:
        seen.append(candidates)
        return power_error(2.0)(candidates)

    best_range(of(torch.tensor([0.5, 1.0, 1.0, 300.0])), steps=255, cost=cost)
    for candidates in seen:
        assert candidates.counts.flatten().tolist() == [1.0, 2.0, 1.0]
        assert float(candidates.centres.min()) >= 0.5 and float(candidates.centres.max()) == 300.0


def test_the_ends_of_a_percentile_are_those_of_bins() -> None:
    """Of a hundred values, the second and the last but one where two at each end may be beyond."""
    histogram = of(torch.arange(1.0, 101.0))
    half = 2.0**histogram.exponent / 2
    for percentile, ends in ((100.0, (1, 100)), (99.0, (2, 99)), (98.0, (3, 98)), (50.0, (51, 50))):
        low, high = percentile_range(histogram, percentile)
        assert abs(float(low) - ends[0]) <= 2 * half and abs(float(high) - ends[1]) <= 2 * half


def test_divergence_is_that_of_the_formula() -> None:
    """Spelt out for one way to quantize: six bins, three levels, a value clipped at each end."""
    centres = torch.arange(-3.0, 3.0, dtype=torch.float64)
    counts = torch.tensor([1.0, 4.0, 2.0, 6.0, 3.0, 5.0], dtype=torch.float64)
    wanted = torch.tensor([[-2.0, -1.0, 0.0, 0.0, 1.0, 2.0]], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    found = divergence(Candidates(centres, counts, wanted, one, -one, 2))
    p = torch.tensor([5.0, 2.0, 6.0, 8.0], dtype=torch.float64) / 21
    q = torch.tensor([4.0, 4.0, 4.0, 3.0], dtype=torch.float64) / 15
    torch.testing.assert_close(found, (p * torch.log(p / q)).sum().reshape(1))


@pytest.mark.parametrize("bounds", [(-128, 127), (-8, 7)], ids=str)
@pytest.mark.parametrize("x", [*SHAPES.values(), LONE], ids=[*SHAPES, "one far below the others"])
def test_entropy_gives_a_range_inside_the_data(x: Tensor, bounds: tuple[int, int]) -> None:
    """It holds nearly all values, to half a step."""
    histogram, steps = of(x), bounds[1] - bounds[0]
    low, high = best_range(histogram, steps=steps, cost=divergence)
    assert (
        min(histogram.minimum, 0.0) - 1e-6 <= low <= 0 <= high <= max(histogram.maximum, 0.0) + 1e-6
    )
    half = (high - low) / steps / 2
    assert float(((x > low - half) & (x < high + half)).float().mean()) > 0.9


@settings(max_examples=100, deadline=None)
@given(ordinary, st.sampled_from([90.0, 99.0, 99.99, 100.0]))
def test_percentiles_leave_out_at_most_so_many(data: list[float], percentile: float) -> None:
    x = torch.tensor(data, dtype=torch.float32)
    low, high = percentile_range(of(x), percentile)
    most = len(data) * (100 - percentile) / 100
    assert int((x < low).sum()) <= most + 1e-9
    assert int((x > high).sum()) <= most + 1e-9
    assert float(x.min()) <= low and high <= float(x.max())


class TestChannels:
    """The search of channels is that of a tensor, for each of them; their bins are four times as wide."""

    @pytest.mark.parametrize("scheme", SCHEMES)
    @pytest.mark.parametrize("bounds", BOUNDS, ids=str)
    def test_each_has_nearly_the_error_of_its_own_search(
        self, bounds: tuple[int, int], scheme: Any
    ) -> None:
        lows, highs = channels_search([*SHAPES.values()], bounds, scheme)
        for name, low, high in zip(SHAPES, lows, highs, strict=True):
            x, histogram = SHAPES[name], of(SHAPES[name])
            found, alone = (
                float((x - rounded(x, *ends, bounds, scheme)).square().sum())
                for ends in ((float(low), float(high)), search(histogram, bounds, scheme))
            )
            assert found <= 1.05 * alone, name
            whole = whole_range(histogram, scheme)
            assert whole[0] <= low <= 0 <= high <= whole[1], name

    def test_channels_do_not_see_one_another(self) -> None:
        """Nor whether they are searched in one part or in several, with others that have more bins."""
        shapes = [*SHAPES.values(), *(x * 2.0**50 for x in SHAPES.values())]
        lows, highs = channels_search(shapes, (-8, 7), torch.per_tensor_affine)
        for number, x in enumerate(shapes):
            (low,), (high,) = channels_search([x], (-8, 7), torch.per_tensor_affine)
            assert (low, high) == (lows[number], highs[number])


def channels(shapes: list[Tensor]) -> ChannelHistograms:
    """Histograms of channels that have as many values each: the short ones are repeated."""
    most = max(map(len, shapes))
    found = ChannelHistograms()
    found.add(torch.stack([x.repeat(-(-most // len(x)))[:most] for x in shapes]))
    return found


def channels_search(
    shapes: list[Tensor], bounds: tuple[int, int], scheme: Any
) -> tuple[Tensor, Tensor]:
    lowest = bounds[0] if scheme is torch.per_tensor_symmetric else None
    steps = bounds[1] - bounds[0]
    return best_ranges(channels(shapes), steps=steps, cost=power_error(2.0), lowest=lowest)
