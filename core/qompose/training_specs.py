# SPDX-License-Identifier: Apache-2.0
"""From a configuration of calibration to the one of training: the same integers, from fake-quantizers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qompose.errors import ConfigError, near_names
from qompose.factories import ObserverFactory, class_of
from qompose.fake_quantize import FakeQuantize, FusedMovingAvgObsFakeQuantize
from qompose.histogram_observers import (
    DEFAULT_RANGE,
    HistogramObserver,
    SearchingObserver,
    observer_for_range,
)
from qompose.learned import LearnableFakeQuantize
from qompose.observers import MovingAverageMinMaxObserver, Observer
from qompose.specs import QuantizationConfig, QuantizationSpec

FAKE_QUANTIZERS = ("moving_average", "learned")
"""The words for how scales are found in training."""


def training_config(
    config: QuantizationConfig, fake_quantize: str = "moving_average", *, is_qat: bool = True
) -> QuantizationConfig:
    """Return a configuration for `prepare_qat_pt2e` that gives the same integers.

    Channels are not balanced: weights that are trained find their own way.

    Args:
        config: for calibration. Its observers stay, but for the default one of activations, whose search
            takes longer than a step: moving averages take its place.
        fake_quantize: "moving_average", or "learned": scales per tensor and per channel become parameters,
            whose first values the observers give.
        is_qat: False returns `config` as it is, for functions that have such an argument.

    Raises:
        ConfigError: there is no such word, or it would have no effect; ranges are asked for that are
            searched, or repairs, which are for what is not trained.
    """
    if fake_quantize not in FAKE_QUANTIZERS:
        hint = near_names(str(fake_quantize), FAKE_QUANTIZERS)
        raise ConfigError(f"fake_quantize={fake_quantize!r} is not one of {FAKE_QUANTIZERS}{hint}")
    learned = fake_quantize == "learned"
    if not is_qat:
        if learned:
            raise ConfigError("fake_quantize='learned' is for training: it needs is_qat=True")
        return config
    if config.repairs:
        raise ConfigError(
            f"repairs={config.repairs} are for models that are not trained: training finds weights that "
            "suit their integers"
        )
    return replace(
        config,
        input_activation=_trained(config.input_activation, learned),
        output_activation=_trained(config.output_activation, learned),
        weight=_trained(config.weight, learned),
        bias=_trained(config.bias, learned),
        is_qat=True,
        balance=False,
        name=f"{config} trained{' with learned scales' if learned else ''}",
    )


def why_not_trained(config: QuantizationConfig) -> str | None:
    """Return why a configuration has no form for training, None where it has one."""
    try:
        training_config(config)
    except ConfigError as error:
        return str(error)
    return None


def _trained(spec: Any, learned: bool) -> Any:
    """Return a specification with a fake-quantizer; those of other packages and fixed ones stay."""
    kind = class_of(getattr(spec, "observer_or_fake_quant_ctr", None))
    if not isinstance(spec, QuantizationSpec) or not _is_observer(kind):
        return spec
    factory: Any = spec.observer_or_fake_quant_ctr
    trainable = kind.estimates and not spec.is_dynamic and spec.block_size is None
    made: type[FakeQuantize] = FakeQuantize
    if learned and trainable and not spec.dtype.is_floating_point:
        made = LearnableFakeQuantize  # whose observer is asked once, for the first values
    elif factory in (kind, observer_for_range(DEFAULT_RANGE)) and kind is HistogramObserver:
        made, factory = FusedMovingAvgObsFakeQuantize, MovingAverageMinMaxObserver
    elif issubclass(kind, SearchingObserver):
        raise ConfigError(
            f"{kind.__name__} searches its range, which takes longer than a step of training: take the "
            'default, "minmax" or "moving_average", or learned scales, which it gives their first values'
        )
    elif issubclass(kind, MovingAverageMinMaxObserver):
        made = FusedMovingAvgObsFakeQuantize
    return replace(spec, observer_or_fake_quant_ctr=ObserverFactory(made, (("observer", factory),)))


def _is_observer(kind: Any) -> bool:
    if not isinstance(kind, type) or not issubclass(kind, Observer):
        return False
    return not issubclass(kind, FakeQuantize)
