# SPDX-License-Identifier: Apache-2.0
"""The specifications that most integer kernels ask for, so that backends need not spell them out."""

from __future__ import annotations

import torch

from qompose.errors import ConfigError
from qompose.histogram_observers import observer_for_range, weight_observer_for_range
from qompose.observers import PerBlockMinMaxObserver, PlaceholderObserver
from qompose.specs import QuantizationSpec

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
