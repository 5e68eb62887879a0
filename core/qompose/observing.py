# SPDX-License-Identifier: Apache-2.0
"""From a group's specification to the module that observes it, and how such modules are named."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qompose.balancing import Channels
from qompose.numerics import PER_CHANNEL
from qompose.observers import FixedQParamsObserver, PerChannelMinMaxObserver, PlaceholderObserver
from qompose.specs import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
    QuantizationSpecBase,
)

OBSERVER_PREFIX = "activation_post_process_"
SAMPLE_ROWS, SAMPLE_ROWS_PER_BATCH = 1024, 128


def make_observer(spec: QuantizationSpecBase) -> nn.Module:
    """Make the observer or fake-quantizer of a specification.

    The specification's fields, None included, take the place of the factory's own arguments; that is
    the convention of this field.
    """
    if isinstance(spec, FixedQParamsQuantizationSpec):
        arguments = {k: v for k, v in spec.__dict__.items() if v is not None}
        return FixedQParamsObserver(**arguments)
    if isinstance(spec, DerivedQuantizationSpec):
        return PlaceholderObserver(dtype=spec.dtype)
    assert isinstance(spec, QuantizationSpec)
    arguments = {k: v for k, v in spec.__dict__.items() if k != "observer_or_fake_quant_ctr"}
    if spec.qscheme not in PER_CHANNEL:
        del arguments["ch_axis"]
    return spec.observer_or_fake_quant_ctr(**arguments)


class BalancedObserver(nn.Module):
    """An observer of a whole tensor that also keeps the range of each of its channels, and some rows.

    Args:
        tensor_observer: estimates the range of the tensor, if it is not balanced.
        dim: the channel dimension.
    """

    def __init__(self, tensor_observer: nn.Module, dim: int) -> None:
        super().__init__()
        self.tensor_observer = tensor_observer
        self.channel_observer = PerChannelMinMaxObserver(
            dtype=torch.int8, qscheme=torch.per_channel_symmetric, ch_axis=dim
        )
        self.channel_observer.subject = getattr(
            tensor_observer, "subject", self.channel_observer.subject
        )
        self.rows: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Observe `x`, of any shape that has `dim`, and return it unchanged."""
        self.channel_observer(x)
        self.tensor_observer(x)
        kept = sum(map(len, self.rows))
        if x.numel() and kept < SAMPLE_ROWS:
            rows = x.detach().float().movedim(self.channel_observer.ch_axis, -1).flatten(0, -2)
            step = max(1, len(rows) // SAMPLE_ROWS_PER_BATCH)
            self.rows.append(rows[::step][: SAMPLE_ROWS - kept].clone())
        return x

    def calculate_qparams(self) -> Any:
        """Return scale and zero point of the whole tensor."""
        return self.tensor_observer.calculate_qparams()  # type: ignore[operator]

    @property
    def channels(self) -> Channels:
        """Return the exact range of each channel, and some rows of what was seen."""
        observer = self.channel_observer
        return Channels(observer.minimum, observer.maximum, torch.cat(self.rows))

    @property
    def calibrated(self) -> bool:
        """Tell whether any tensor was seen."""
        return self.channel_observer.calibrated

    @property
    def masked(self) -> int:
        """Return how many mask values were seen."""
        return int(getattr(self.tensor_observer, "masked", 0))
