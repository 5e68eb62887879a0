# SPDX-License-Identifier: Apache-2.0
"""From a group's specification to the module that observes it, and how such modules are named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qompose.balancing import Channels
from qompose.numerics import PER_CHANNEL
from qompose.observers import FixedQParamsObserver, PerChannelMinMaxObserver, PlaceholderObserver
from qompose.screening import Screen
from qompose.specs import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
    QuantizationSpecBase,
)

OBSERVER_PREFIX = "activation_post_process_"
SAMPLE_ROWS, SAMPLE_ROWS_PER_BATCH, SAMPLE_VALUES = 1024, 128, 2**18


def make_observer(spec: QuantizationSpecBase) -> nn.Module:
    """Make the observer or fake-quantizer of a specification.

    The specification's fields, None included, take the place of the factory's own arguments; that is
    the convention of this field.
    """
    if isinstance(spec, FixedQParamsQuantizationSpec):
        arguments = {k: v for k, v in spec.__dict__.items() if v is not None}
        return FixedQParamsObserver(**arguments)
    if isinstance(spec, DerivedQuantizationSpec):
        return DerivedObserver(spec)
    assert isinstance(spec, QuantizationSpec)
    arguments = {k: v for k, v in spec.__dict__.items() if k != "observer_or_fake_quant_ctr"}
    if spec.qscheme not in PER_CHANNEL or spec.block_size is not None:
        del arguments["ch_axis"]
    if spec.block_size is None or spec.is_dynamic:
        del arguments["block_size"]
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
        channels = x.shape[self.channel_observer.ch_axis] if x.dim() else 1
        most = min(SAMPLE_ROWS, max(1, SAMPLE_VALUES // max(1, channels)))
        if x.numel() and kept < most:
            rows = x.detach().float().movedim(self.channel_observer.ch_axis, -1)
            rows = rows.reshape(-1, rows.shape[-1])
            step = max(1, len(rows) // SAMPLE_ROWS_PER_BATCH)
            self.rows.append(rows[::step][: most - kept].clone())
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
    def screen(self) -> Screen | None:
        """Return what was seen of mask values."""
        return getattr(self.tensor_observer, "screen", None)


class DerivedObserver(PlaceholderObserver):
    """Looks at nothing: its parameters are computed from those of other observers."""

    def __init__(self, spec: DerivedQuantizationSpec) -> None:
        super().__init__(dtype=spec.dtype)
        self.derive_qparams_fn = spec.derive_qparams_fn
        self._sources: tuple[nn.Module, ...] = ()

    def derive_from(self, sources: Sequence[nn.Module]) -> None:
        """Name the observers that the parameters are computed from, in the specification's order."""
        self._sources = tuple(sources)  # in a tuple they are no submodules: others own them

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return scale and zero point as the specification's function computes them."""
        return self.derive_qparams_fn([unscreened(source) for source in self._sources])


class ScreenedObserver(nn.Module):
    """An observer of another engine, to which no mask value comes, and no NaN.

    Args:
        subject: which tensor is observed, for messages.
    """

    def __init__(self, observer: nn.Module, subject: str) -> None:
        super().__init__()
        self.observer, self.subject = observer, subject
        self.screen = Screen()

    def forward(self, x: Tensor) -> Tensor:
        """Observe `x`, and return what the observer makes of it: as a rule `x` itself."""
        if not x.numel():
            return x
        screened = self.screen.clean(x.detach(), self.subject)
        if self.screen.masked:  # the claim will be dropped: the model goes on with its own values
            self.observer(screened)
            return x
        result: Tensor = self.observer(x)
        return result

    def calculate_qparams(self) -> Any:
        """Return scale and zero point, as the observer gives them."""
        return self.observer.calculate_qparams()  # type: ignore[operator]

    @property
    def eps(self) -> float:
        """Return the observer's least scale, 0 where it has none."""
        return float(getattr(self.observer, "eps", 0.0))


def unscreened(observer: nn.Module) -> nn.Module:
    """Return the observer that users and other engines know."""
    if isinstance(observer, BalancedObserver):
        return observer.tensor_observer
    return observer.observer if isinstance(observer, ScreenedObserver) else observer
