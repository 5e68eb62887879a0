# SPDX-License-Identifier: Apache-2.0
"""Observers of histograms: each with its own rule, all with exact extremes; and torch's by its word."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from qompose.observers import EntropyObserver, HistogramObserver, PercentileObserver
from qompose.observers.config import OF_TORCH, observer_for_range
from qompose.observers.histogram import EXAMPLE
from torch.ao.quantization.observer import HistogramObserver as OfTorch

from tests.core.calibration.test_collecting import DATA, config, parameters, prepared, quantizer
from tests.core.toy import randn

KINDS = [HistogramObserver, PercentileObserver, EntropyObserver]


@pytest.mark.parametrize("kind", KINDS)
def test_extremes_are_exact_where_a_part_is_counted(kind: Any) -> None:
    x = randn(2, 8 * EXAMPLE)
    x[1, 77], x[0, 78] = 50.0, -40.0
    observer = kind(torch.int8)
    assert not observer.calibrated
    observer(x)
    facts = observer.facts()
    assert (facts.minimum, facts.maximum) == (-40.0, 50.0)
    assert facts.values == x.numel() == facts.histogram.total
    assert int((facts.histogram.counts > 0).sum()) > 100


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_gives_nearly_the_range_of_all(kind: Any) -> None:
    """The tails of two million values reach further than those of 32,768: a seventh, where tails count."""
    x = randn(8, 64 * EXAMPLE)
    part, whole = kind(torch.int8), kind(torch.int8)
    part(x)
    whole(x.flatten())  # a value in each example
    one, other = part.calculate_qparams()[0], whole.calculate_qparams()[0]
    assert float(one) == pytest.approx(float(other), rel=0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_symmetric_integers_with_and_without_a_sign_have_one_scale(kind: Any) -> None:
    scales = []
    for dtype in (torch.int8, torch.uint8):
        observer = kind(dtype, qscheme=torch.per_tensor_symmetric)
        observer(randn(20_000))
        scales.append(observer.calculate_qparams()[0])
    assert torch.equal(*scales)


@pytest.mark.parametrize("bounds", [(-128, 127), (-64, 63)], ids=str)
def test_entropy_does_not_clip_because_of_zeros(bounds: tuple[int, int]) -> None:
    """However many values a rectifier sets to zero, what it lets through has about the same range."""
    positive, ends = randn(20_000).abs(), []
    for zeros in (0, 20_000, 200_000):
        observer = EntropyObserver(torch.int8, quant_min=bounds[0], quant_max=bounds[1])
        observer(torch.cat([positive, torch.zeros(zeros)]))
        ends.append(float(observer.calculate_qparams()[0]))
    assert ends == pytest.approx([ends[0]] * 3, rel=0.1)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_entropy_of_a_constant(value: float) -> None:
    observer = EntropyObserver(torch.int8)
    observer(torch.full((50,), value))
    scale, _ = observer.calculate_qparams()
    assert float(scale) == pytest.approx(max(value / 255, observer.eps))


def test_parameters_are_counted_whole() -> None:
    observer = HistogramObserver(torch.int8)
    observer.constant = True
    observer(x := randn(2, 8 * EXAMPLE))
    assert observer.histogram.total == x.numel()
    assert int((observer.histogram.counts == 1).sum()) > 0, "each value stands for itself"


@pytest.mark.parametrize("percentile", [50, 100.1, -1])
def test_a_percentile_that_is_none(percentile: float) -> None:
    with pytest.raises(qompose.errors.ConfigError, match="percentile"):
        PercentileObserver(torch.int8, percentile=percentile)
    assert PercentileObserver(torch.int8, percentile=100).percentile == 100


def test_torchs_own_gives_its_parameters_bit_by_bit() -> None:
    model = prepared(quantizer(config(observer_for_range(OF_TORCH))))
    model(DATA)
    model(3 * DATA)
    theirs = OfTorch(
        dtype=torch.int8, qscheme=torch.per_tensor_affine, quant_min=-128, quant_max=127
    )
    theirs(DATA)
    theirs(3 * DATA)
    scale, zero_point = theirs.calculate_qparams()
    assert parameters(model)[0][:2] == (float(scale), int(zero_point))
