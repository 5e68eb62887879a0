# SPDX-License-Identifier: Apache-2.0
"""Modules that watch tensors and choose ranges, fake quantize modules, and the usual specifications."""

from qompose.observers.auto_range import AutoRangeObserver
from qompose.observers.config import (
    activation_spec,
    config_from_json,
    config_to_json,
    observer_for_range,
    spec_from_json,
    spec_to_json,
    training_config,
    weight_observer_for_range,
    weight_spec,
)
from qompose.observers.fake_quantize import (
    FakeQuantize,
    FixedQParamsFakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    LearnableFakeQuantize,
)
from qompose.observers.histogram_observers import (
    EntropyObserver,
    HistogramObserver,
    PercentileObserver,
    PerChannelHistogramObserver,
)
from qompose.observers.min_max import (
    FixedQParamsObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerBlockMinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)

__all__ = [
    "AutoRangeObserver",
    "EntropyObserver",
    "FakeQuantize",
    "FixedQParamsFakeQuantize",
    "FixedQParamsObserver",
    "FusedMovingAvgObsFakeQuantize",
    "HistogramObserver",
    "LearnableFakeQuantize",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "PerBlockMinMaxObserver",
    "PerChannelHistogramObserver",
    "PerChannelMinMaxObserver",
    "PercentileObserver",
    "PlaceholderObserver",
    "activation_spec",
    "config_from_json",
    "config_to_json",
    "observer_for_range",
    "spec_from_json",
    "spec_to_json",
    "training_config",
    "weight_observer_for_range",
    "weight_spec",
]
