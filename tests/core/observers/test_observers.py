# SPDX-License-Identifier: Apache-2.0
"""Observers: they change nothing, see everything once, and leave masks alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import qompose
import torch
from hypothesis import given, settings, strategies as st
from qompose.errors import CalibrationError, ConfigError
from qompose.observers import (
    FixedQParamsObserver,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelHistogramObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    observer_for_range,
    weight_observer_for_range,
)
from qompose.observers.histogram_observers import ACTIVATION_RANGES, WEIGHT_RANGES
from torch import Tensor
from torch.ao.quantization import observer as peer

from tests.core.toy import randn

PER_TENSOR = [MinMaxObserver, MovingAverageMinMaxObserver, HistogramObserver]
CHANNELS = [
    PerChannelMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelHistogramObserver,
]
ESTIMATING = [*PER_TENSOR, *CHANNELS]
INFINITY = math.inf
LARGEST = torch.finfo(torch.float32).max


def seen(kind: Any, *batches: Tensor, **arguments: Any) -> Any:
    observer = kind(dtype=torch.int8, **arguments)
    for batch in batches:
        assert observer(batch) is batch
    return observer


@pytest.mark.parametrize(
    ("kind", "twin", "arguments"),
    [
        (MinMaxObserver, peer.MinMaxObserver, {}),
        (MovingAverageMinMaxObserver, peer.MovingAverageMinMaxObserver, {}),
        (
            MovingAverageMinMaxObserver,
            peer.MovingAverageMinMaxObserver,
            {"averaging_constant": 0.3},
        ),
        (PerChannelMinMaxObserver, peer.PerChannelMinMaxObserver, {"ch_axis": 0}),
        (PerChannelMinMaxObserver, peer.PerChannelMinMaxObserver, {"ch_axis": 1}),
        (
            MovingAveragePerChannelMinMaxObserver,
            peer.MovingAveragePerChannelMinMaxObserver,
            {"ch_axis": 1, "averaging_constant": 0.25},
        ),
    ],
    ids=lambda value: getattr(value, "__module__", "") and value.__name__,
)
def test_parameters_are_those_of_torchs_observer(kind: Any, twin: Any, arguments: Any) -> None:
    batches = [randn(4, 3, 5, seed=seed) * (seed + 1) for seed in range(4)]
    qscheme = torch.per_channel_affine if "ch_axis" in arguments else torch.per_tensor_affine
    shared = {"dtype": torch.int8, "qscheme": qscheme, "eps": 2**-12, **arguments}
    ours, theirs = kind(**shared), twin(**shared)
    for batch in batches:
        ours(batch), theirs(batch)
    for one, other in zip(ours.calculate_qparams(), theirs.calculate_qparams(), strict=True):
        assert torch.equal(one.flatten(), other.flatten().to(one.dtype))


@pytest.mark.parametrize("mask", [-INFINITY, INFINITY, -LARGEST, LARGEST, -LARGEST / 2], ids=str)
@pytest.mark.parametrize("kind", ESTIMATING, ids=lambda kind: kind.__name__)
def test_mask_values_are_counted_and_widen_nothing(kind: Any, mask: float) -> None:
    x = randn(3, 8)
    x[:, 0] = 0.0  # zero is in every range, so replacing it by a mask value changes no range
    masked = x.clone()
    masked[0, 0] = masked[2, 0] = mask
    plain, other = seen(kind, x), seen(kind, masked)
    assert (plain.screen.masked, other.screen.masked) == (0, 2)
    for one, two in zip(plain.calculate_qparams(), other.calculate_qparams(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ESTIMATING, ids=lambda kind: kind.__name__)
def test_the_smallest_float_of_each_type_is_a_mask_value(kind: Any, dtype: torch.dtype) -> None:
    x = randn(3, 4).to(dtype)
    x[1, 1] = torch.finfo(dtype).min
    observer = seen(kind, x)
    assert observer.screen.masked == 1
    assert bool(torch.isfinite(observer.calculate_qparams()[0]).all())


@pytest.mark.parametrize("value", [1e39, 1e200], ids=str)
@pytest.mark.parametrize("kind", ESTIMATING, ids=lambda kind: kind.__name__)
def test_float64_values_beyond_float32_give_no_infinite_scale(kind: Any, value: float) -> None:
    observer = seen(kind, torch.tensor([[1.0, value]], dtype=torch.float64))
    assert observer.screen.masked == 1
    assert bool(torch.isfinite(observer.calculate_qparams()[0]).all())


@pytest.mark.parametrize("kind", ESTIMATING, ids=lambda kind: kind.__name__)
def test_nan_is_an_error(kind: Any) -> None:
    x = randn(2, 3)
    x[1, 1] = math.nan
    with pytest.raises(CalibrationError, match="NaN"):
        seen(kind, x)


@pytest.mark.parametrize("kind", ESTIMATING, ids=lambda kind: kind.__name__)
def test_empty_tensors_are_nothing_seen(kind: Any) -> None:
    observer = seen(kind, torch.empty(0, 3))
    assert not observer.calibrated
    observer(randn(2, 3))
    assert observer.calibrated


@pytest.mark.parametrize("kind", ESTIMATING, ids=lambda kind: kind.__name__)
def test_a_constant_is_looked_at_once_until_it_changes(kind: Any) -> None:
    weight = torch.ones(2, 2)
    observer = kind(dtype=torch.int8)
    observer.constant = True
    looks = []
    observer.observe = lambda x: looks.append(x.clone())
    for _ in range(3):
        observer(weight)
    assert len(looks) == 1
    weight.mul_(2)
    observer(weight)
    assert [float(look[0, 0]) for look in looks] == [1.0, 2.0]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=20), st.integers(0, 20))
def test_min_max_does_not_depend_on_the_split(data: list[float], cut: int) -> None:
    x = torch.tensor(data)
    parts = seen(MinMaxObserver, x[cut:], x[:cut])
    whole = seen(MinMaxObserver, x)
    assert torch.equal(parts.minimum, whole.minimum)
    assert torch.equal(parts.maximum, whole.maximum)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_channels_are_those_of_the_axis(axis: int) -> None:
    x = randn(3, 4, 5)
    observer = seen(PerChannelMinMaxObserver, x, ch_axis=axis)
    others = tuple(dim for dim in range(3) if dim != axis % 3)
    assert torch.equal(observer.minimum, x.amin(others))
    assert torch.equal(observer.maximum, x.amax(others))


def test_gradients_are_not_kept() -> None:
    observer = seen(MinMaxObserver, torch.ones(2, requires_grad=True))
    assert not observer.minimum.requires_grad


def test_fixed_parameters_come_out_as_they_went_in() -> None:
    observer = FixedQParamsObserver(1 / 256, 7, dtype=torch.uint8)
    observer(randn(3))
    scale, zero_point = observer.calculate_qparams()
    assert (float(scale), int(zero_point)) == (1 / 256, 7)
    assert observer.calibrated


def test_a_placeholder_has_no_parameters() -> None:
    observer = seen(PlaceholderObserver, randn(3))
    assert observer.calibrated
    with pytest.raises(ConfigError, match="run time"):
        observer.calculate_qparams()


@pytest.mark.parametrize("kind", PER_TENSOR, ids=lambda kind: kind.__name__)
def test_schemes_that_are_not_estimated_are_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=f"{kind.__name__} does not estimate.*per_channel"):
        kind(qscheme=torch.per_channel_symmetric)


def test_factories_compare_by_value_and_later_arguments_win() -> None:
    first = MinMaxObserver.with_args(eps=2**-12, quant_min=-127)
    second = MinMaxObserver.with_args(quant_min=-127).with_args(eps=2**-12)
    assert first == second
    assert hash(first) == hash(second)
    assert first != MinMaxObserver.with_args(eps=2**-12, quant_min=-128)
    assert first != HistogramObserver.with_args(eps=2**-12, quant_min=-127)
    assert first.with_args(eps=0.5)(dtype=torch.int8).eps == 0.5
    assert first(dtype=torch.int8, eps=0.25).eps == 0.25


@pytest.mark.parametrize("word", sorted(ACTIVATION_RANGES))
def test_every_word_stands_for_an_observer(word: str) -> None:
    assert isinstance(
        observer_for_range(word)(dtype=torch.int8), qompose.observers.min_max.Observer
    )


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("word", sorted(WEIGHT_RANGES))
def test_every_word_of_weights_stands_for_an_observer(word: str, per_channel: bool) -> None:
    observer: Any = weight_observer_for_range(word, per_channel=per_channel)(dtype=torch.int8)
    assert isinstance(observer, qompose.observers.min_max.Observer)
    assert observer.per_channel == per_channel
    assert observer.mergeable


def test_an_unknown_word_of_weights_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"weight_range .*'histogram', 'minmax', 'mse'.*'max'"):
        weight_observer_for_range("max")


def test_an_unknown_word_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"minmax.*moving_average.*mse.*'median'"):
        observer_for_range("median")
