# SPDX-License-Identifier: Apache-2.0
"""The histogram does not know how its data was split, and its range search never loses to min-max."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from qompose.histogram import BINS, Histogram, best_range
from qompose.numerics import choose_qparams
from torch import Tensor

from tests.core.toy import randn

values = st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=30)
ordinary = st.lists(st.floats(-(2.0**20), 2.0**20, width=32), min_size=1, max_size=60)
exhaustive = settings(max_examples=300, deadline=None)

BOUNDS = [(-128, 127), (-127, 127), (-64, 63), (-8, 7)]
SCHEMES = [
    pytest.param(torch.per_tensor_affine, id="affine"),
    pytest.param(torch.per_tensor_symmetric, id="symmetric"),
]
SHAPES = {
    "normal": randn(5000),
    "heavy tail": randn(5000) ** 3,
    "one outlier": torch.cat([randn(5000), torch.tensor([60.0])]),
    "one-sided": randn(5000).abs(),
    "negative": -randn(5000).abs() - 1,
    "far from zero": randn(5000) * 0.01 + 5,
    "two values": torch.tensor([-1.0, 3.0]).repeat(50),
}


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


def test_memory_does_not_grow() -> None:
    histogram = of(*(randn(100, seed=seed) * 10.0**seed for seed in range(-8, 8)))
    assert histogram.counts.shape == (BINS,)
    assert histogram.total == 1600


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


@settings(max_examples=150, deadline=None)
@given(ordinary, st.sampled_from(BOUNDS), st.sampled_from([s.values[0] for s in SCHEMES]))
@example([1.0], (-8, 7), torch.per_tensor_symmetric)
@example([1.0, -1.0], (-8, 7), torch.per_tensor_affine)
def test_the_best_range_is_never_worse_on_any_data(data, bounds, scheme) -> None:  # type: ignore[no-untyped-def]
    histogram = of(torch.tensor(data, dtype=torch.float32))
    ends = search(histogram, bounds, scheme)
    whole = whole_range(histogram, scheme)
    tolerance = 1e-6 * max(map(abs, whole)) ** 2
    best = error(histogram, ends, bounds, scheme)
    assert best <= error(histogram, whole, bounds, scheme) * (1 + 1e-4) + tolerance


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


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        pytest.param(torch.zeros(7), (0.0, 0.0), id="zeros"),
        pytest.param(torch.full((7,), 3.0), (0.0, 3.0), id="positive constant"),
        pytest.param(torch.full((7,), -3.0), (-3.0, 0.0), id="negative constant"),
        pytest.param(torch.tensor([1e-30]), (0.0, 1e-30), id="tiny"),
    ],
)
def test_degenerate_data(x: Tensor, expected: tuple[float, float]) -> None:
    low, high = search(of(x), (-128, 127), torch.per_tensor_affine)
    assert float(low) == pytest.approx(expected[0])
    assert float(high) == pytest.approx(expected[1])


def search(
    histogram: Histogram, bounds: tuple[int, int], scheme: Any, power: float = 2.0
) -> tuple[float, float]:
    symmetric = scheme is torch.per_tensor_symmetric
    steps = bounds[1] - bounds[0]
    lowest = bounds[0] if symmetric else None
    low, high = best_range(histogram, steps=steps, power=power, lowest=lowest)
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
