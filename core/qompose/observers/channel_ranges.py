# SPDX-License-Identifier: Apache-2.0
"""The observer that keeps a range per channel beside that of the tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from qompose.errors import StatisticsError
from qompose.observers.foreign_observer import guard_of
from qompose.observers.min_max import MinMaxObserver, Observer, PerChannelMinMaxObserver
from qompose.observers.tensor_statistics import Facts, RowSample
from qompose.observers.value_screening import Screen, slice_extremes, unmasked


class PerChannelRangeObserver(nn.Module):
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
        self.sample = RowSample()

    def forward(self, x: Tensor) -> Tensor:
        """Observe `x`, of any shape that has `dim`, and return it unchanged."""
        if x.numel():
            self._observe(x.detach())
        return x

    def _observe(self, x: Tensor) -> None:
        """Look at each channel once; what the whole tensor's observer asks for follows from that."""
        axis, inner = self.channel_observer.ch_axis, self.tensor_observer
        low, high = slice_extremes(x, axis)
        if isinstance(inner, Observer):
            inner.ends = low.amin(), high.amax()
        before = _masked_by(inner)
        try:
            inner(x)
        finally:
            if isinstance(inner, Observer):
                inner.ends = None
        if _masked_by(inner) > before:
            low, high = slice_extremes(unmasked(x), axis)
        self.channel_observer.widen(low, high)
        self.sample.add(x, axis)

    def calculate_qparams(self) -> Any:
        """Return scale and zero point of the whole tensor."""
        return self.tensor_observer.calculate_qparams()  # type: ignore[operator]

    @property
    def channels(self) -> ChannelSample:
        """Return the exact range of each channel, and some rows of what was seen."""
        observer = self.channel_observer
        return ChannelSample(observer.minimum, observer.maximum, self.sample.rows, self.sample.seen)

    def facts(self) -> Facts:
        """Return what was seen of the whole tensor, its channels and some rows."""
        found: Facts = self.tensor_observer.facts()  # type: ignore[operator]
        channels = self.channel_observer.facts().channels
        return replace(found, channels=channels, sample=self.sample if self.calibrated else None)

    def take(self, facts: Facts) -> None:
        """Go by what other observers have seen.

        Raises:
            StatisticsError: they did not keep the ranges of the channels and some rows.
        """
        if facts.sample is None:
            raise StatisticsError("no rows, by which channels are balanced")
        # A range that somebody chose is of the whole tensor; channels are balanced by what was seen.
        self.channel_observer.take(replace(facts, set_range=None))
        self.tensor_observer.take(facts)  # type: ignore[operator]
        self.sample = RowSample()
        self.sample.merge(facts.sample)

    @property
    def calibrated(self) -> bool:
        """Tell whether any tensor was seen."""
        return self.channel_observer.calibrated

    @property
    def screen(self) -> Screen | None:
        """Return what was seen of mask values."""
        return screen_of(self.tensor_observer)


def watching(observer: Any) -> MinMaxObserver:
    """Return an observer of a tensor whose scale is chosen at run time, and whose channels get factors.

    It stands for the placeholder in every way but for its quantization parameters, which nothing reads.
    """
    return MinMaxObserver(
        dtype=observer.dtype,
        quant_min=observer.quant_min,
        quant_max=observer.quant_max,
        eps=observer.eps,
    )


def _masked_by(observer: nn.Module) -> int:
    screen = screen_of(observer)
    return 0 if screen is None else screen.masked


def base_observer(observer: Any, *, inside_fake_quantize: bool = False) -> Any:
    """Return the observer that users and other engines know, or that which estimates the range for it."""
    known = observer.tensor_observer if isinstance(observer, PerChannelRangeObserver) else observer
    return getattr(known, "activation_post_process", known) if inside_fake_quantize else known


def screen_of(observer: nn.Module) -> Screen | None:
    """Return what an observer saw of mask values, None where nobody looked."""
    guard = guard_of(observer)
    return guard.screen if guard is not None else getattr(observer, "screen", None)


INPUT, OUTPUT = "input", "output"
_FEWEST_ROWS, _PLENTY = 32, 4


@dataclass(frozen=True)
class Balance:
    """Which side of which products a group's tensor is on, and its channel dimension.

    `weights` and `biases` name the parameters, one for each product; "" is no bias. `repair` is the word by
    which somebody asked for factors that pay in accuracy alone, `alpha` the exponent asked for; None tries
    several. `absorbers` name parameters of what makes
    the tensor that divide it in place of an operator.
    """

    side: str
    dim: int
    weights: tuple[str, ...]
    biases: tuple[str, ...]
    repair: str = ""
    absorbers: tuple[str, ...] = ()
    alpha: float | None = None


@dataclass(frozen=True)
class ChannelSample:
    """What is known of a tensor: each channel's exact range, `(C,)`, over all `rows`; some rows, `(N, C)`."""

    low: Tensor
    high: Tensor
    sample: Tensor
    rows: int

    def trials(self) -> tuple[tuple[ChannelSample, ChannelSample], ...]:
        """Return pairs of what factors are made from and the rows that they are measured on.

        Where the sample is a small part of all rows, the ranges hardly depend on it. Else each half is
        held back once; of a few rows nothing can be told.
        """
        if self.rows >= _PLENTY * len(self.sample):
            return ((self, self),)
        if len(self.sample) < _FEWEST_ROWS:
            return ()
        middle = len(self.sample) // 2
        first, second = (
            ChannelSample(part.amin(0), part.amax(0), part, len(part))
            for part in (self.sample[:middle], self.sample[middle:])
        )
        return (first, second), (second, first)

    @property
    def largest(self) -> Tensor:
        """Return the largest magnitude of each channel."""
        return torch.maximum(-self.low, self.high)
