# SPDX-License-Identifier: Apache-2.0
"""The usual specifications for activations and weights, and the form they take in training.

They are what most integer kernels ask for, so that backends need not spell them out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from qompose.errors import ConfigError, near_names
from qompose.observers.fake_quantize import (
    FakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    LearnableFakeQuantize,
)
from qompose.observers.histogram_observers import (
    DEFAULT_RANGE,
    HistogramObserver,
    SearchingObserver,
    observer_for_range,
    weight_observer_for_range,
)
from qompose.observers.min_max import (
    MovingAverageMinMaxObserver,
    Observer,
    PerBlockMinMaxObserver,
    PlaceholderObserver,
)
from qompose.spec.observer_factory import ObserverFactory, class_of
from qompose.spec.quantization_spec import QuantizationConfig, QuantizationSpec

WEIGHT_EPS = 2**-12
"""The least scale of a weight, which torch's backends have for all that they quantize."""


def activation_spec(
    dtype: torch.dtype,
    low: int,
    high: int,
    *,
    range: str = "histogram",
    is_dynamic: bool = False,
    per_token: bool = False,
) -> QuantizationSpec:
    """Return affine integers with one scale per tensor, or, if asked for, per token.

    Args:
        low, high: the bounds of the integers.
        range: how the range is estimated, see `observer_for_range`. Checked, but of no use, if dynamic.
        is_dynamic: choose the scale when the model runs.
        per_token: choose one for each index of all dimensions but the last; `is_dynamic` only.

    Raises:
        ConfigError: there is no such word, or `per_token` without `is_dynamic`.
    """
    estimated = observer_for_range(range)
    if per_token and not is_dynamic:
        raise ConfigError("per_token=True needs is_dynamic=True: tokens are known at run time")
    return QuantizationSpec(
        dtype=dtype,
        observer_or_fake_quant_ctr=PlaceholderObserver if is_dynamic else estimated,
        quant_min=low,
        quant_max=high,
        qscheme=torch.per_channel_affine if per_token else torch.per_tensor_affine,
        is_dynamic=is_dynamic,
        block_size=(-1,) if per_token else None,
    )


def weight_spec(
    low: int,
    high: int,
    *,
    per_channel: bool = True,
    group_size: int | None = None,
    range: str = "minmax",
) -> QuantizationSpec:
    """Return symmetric int8 storage with a scale for each output channel, in dimension 0.

    Args:
        low, high: the bounds of the integers; -8 and 7 for four bits.
        per_channel: False: one scale for the whole weight. Of no effect in groups.
        group_size: one scale for so many inputs in a row, rounded to bfloat16.
        range: how the range is estimated, see `weight_observer_for_range`; "minmax" alone in groups.

    Raises:
        ConfigError: there is no such specification.
    """
    estimated = weight_observer_for_range(range, per_channel=per_channel)
    if group_size is not None:
        if range != "minmax":
            raise ConfigError(
                f"weight_range={range!r} is for one scale per channel or per tensor: a group of "
                f"{group_size} weights has the scale that holds all of them, which is "
                "weight_range='minmax'"
            )
        return QuantizationSpec(
            dtype=torch.int8,
            observer_or_fake_quant_ctr=PerBlockMinMaxObserver.with_args(scale_dtype=torch.bfloat16),
            quant_min=low,
            quant_max=high,
            qscheme=torch.per_channel_symmetric,
            block_size=(group_size,),
        )
    return QuantizationSpec(
        dtype=torch.int8,
        observer_or_fake_quant_ctr=estimated.with_args(eps=WEIGHT_EPS),
        quant_min=low,
        quant_max=high,
        qscheme=torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric,
        ch_axis=0 if per_channel else None,
    )


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
