# SPDX-License-Identifier: Apache-2.0
"""Modules that watch tensors and choose ranges, fake quantize modules, and the usual specifications.

The factories with torch's usual names, such as `default_observer` and `default_weight_fake_quant`, are here
too.
"""

from typing import Any

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
    USUAL,
    FakeQuantize,
    FakeQuantizeBase,
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
    ObserverBase,
    PerBlockMinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)
from qompose.spec.quantization_spec import ObserverFactory

PartialWrapper = ObserverFactory
"""What torch.ao and torchao call the factories that `with_args` returns."""

__all__ = [
    "AutoRangeObserver",
    "EntropyObserver",
    "FakeQuantize",
    "FakeQuantizeBase",
    "FixedQParamsFakeQuantize",
    "FixedQParamsObserver",
    "FusedMovingAvgObsFakeQuantize",
    "HistogramObserver",
    "LearnableFakeQuantize",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "ObserverBase",
    "PartialWrapper",
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


def __getattr__(name: str) -> Any:
    """Return the factory that this field has a name for."""
    if name in USUAL:
        return USUAL[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *USUAL]
