# SPDX-License-Identifier: Apache-2.0
"""The observer that keeps a range per channel beside that of the tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from qompose.errors import StatisticsError
from qompose.observers.auto_range import AutoRangeObserver
from qompose.observers.foreign_observer import guard_of
from qompose.observers.min_max import MinMaxObserver, Observer, PerChannelMinMaxObserver
from qompose.observers.row_sample import RowSample
from qompose.observers.tensor_statistics import Facts
from qompose.observers.value_screening import Screen, slice_extremes, unmasked


class PerChannelRangeObserver(nn.Module):
    """An observer of a whole tensor that also keeps the range of each of its channels, and some rows.

    Args:
        tensor_observer: estimates the range of the tensor, if it is not balanced.
        dim: the channel dimension.
    """

    asked = True
    """Set by prepare: whether somebody asked for factors by word, and not only where they help."""

    def __init__(self, tensor_observer: nn.Module, dim: int) -> None:
        super().__init__()
        self.tensor_observer = tensor_observer
        self._know_no_channels(dim)

    def _know_no_channels(self, dim: int) -> None:
        self.channel_observer = PerChannelMinMaxObserver(
            dtype=torch.int8, qscheme=torch.per_channel_symmetric, ch_axis=dim
        )
        self.channel_observer.subject = getattr(
            self.tensor_observer, "subject", self.channel_observer.subject
        )
        self._sample = RowSample()

    @property
    def sample(self) -> RowSample:
        """Return some rows of the tensor; an observer that keeps them for itself keeps them here too."""
        inner = self.tensor_observer
        return inner.sample if isinstance(inner, AutoRangeObserver) else self._sample

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
        if _masked_by(inner) != before:
            x = unmasked(x)
            low, high = slice_extremes(x, axis)
        self.channel_observer.widen(low, high)
        if self.sample is self._sample:
            self._sample.add(x, axis)

    def calculate_qparams(self) -> Any:
        """Return scale and zero point of the whole tensor."""
        return self.tensor_observer.calculate_qparams()  # type: ignore[operator]

    @property
    def channels(self) -> ChannelSample:
        """Return the exact range of each channel, and some rows of what was seen."""
        observer, sample = self.channel_observer, self.sample
        return ChannelSample(
            observer.minimum,
            observer.maximum,
            sample.rows,
            sample.weights.to(sample.rows.device, torch.float32),
            sample.half.to(sample.rows.device),
        )

    def facts(self) -> Facts:
        """Return what was seen of the whole tensor, its channels and some rows."""
        found: Facts = self.tensor_observer.facts()  # type: ignore[operator]
        channels = self.channel_observer.facts().channels
        sample = self.sample if self.knows_channels else found.sample
        return replace(found, channels=channels, sample=sample)

    def take(self, facts: Facts) -> None:
        """Go by what other observers have seen.

        Where nobody asked for factors, those of the whole tensor are enough, and there will be no factors.

        Raises:
            StatisticsError: they did not keep the ranges of the channels and some rows.
        """
        axis = self.channel_observer.ch_axis
        known = facts.channels is not None and facts.channels.axis == axis
        if not self.asked and not (known and facts.sample is not None):
            self.tensor_observer.take(facts)  # type: ignore[operator]
            self._know_no_channels(axis)
            return
        if facts.sample is None:
            raise StatisticsError("no sampled rows to balance channels with")
        seen = facts.channels
        if seen is not None and facts.sample.rows.shape[1] != len(seen.low):
            raise StatisticsError("the sampled rows belong to another tensor")
        # A range that somebody chose is of the whole tensor; channels are balanced by what was seen.
        self.channel_observer.take(replace(facts, set_range=None))
        self.tensor_observer.take(facts)  # type: ignore[operator]
        self._sample = RowSample()
        if self.sample is self._sample:
            self._sample.merge(facts.sample)

    @property
    def calibrated(self) -> bool:
        """Tell whether any tensor was seen."""
        whole = bool(getattr(self.tensor_observer, "calibrated", False))
        return self.knows_channels or (whole and not self.asked)

    @property
    def knows_channels(self) -> bool:
        """Tell whether the ranges of channels are known."""
        return self.channel_observer.calibrated

    @property
    def range_is_set(self) -> bool:
        """Tell whether somebody chose the range of the tensor, which factors would overrule."""
        return getattr(base_observer(self), "set_range", None) is not None

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


def sample_of(observer: Any) -> RowSample | None:
    """Return rows that the observer of a product's input keeps, None where it keeps none.

    Nor where only windows of several rows are read: an image of few colors has many different windows.
    """
    inner = base_observer(observer)
    if not isinstance(inner, AutoRangeObserver):
        return observer.sample if isinstance(observer, PerChannelRangeObserver) else None
    return inner.sample if any(reader.reads_rows for reader in inner.readers) else None


INPUT, OUTPUT = "input", "output"
_FEWEST_ROWS = 32


@dataclass(frozen=True)
class Balance:
    """Which side of which products a group's tensor is on, and its channel dimension.

    `weights` and `biases` name the parameters, one for each product; "" is no bias. `algorithm` is the word
    by which somebody asked for factors that pay in accuracy alone, `alpha` the exponent asked for; None tries
    several. `absorbers` name parameters of what makes the tensor that divide it in place of an operator.
    `unasked` tells that nobody asked, and that it is done where it helps.
    """

    side: str
    dim: int
    weights: tuple[str, ...]
    biases: tuple[str, ...]
    algorithm: str = ""
    absorbers: tuple[str, ...] = ()
    alpha: float | None = None
    unasked: bool = False


@dataclass(frozen=True)
class ChannelSample:
    """What is known of a tensor: each channel's exact range, `(C,)`, over all rows; some rows, `(N, C)`.

    `weights` tell for how many of all rows each stands, `half` which of them are of the examples that judge.
    """

    low: Tensor
    high: Tensor
    rows: Tensor
    weights: Tensor
    half: Tensor

    def trials(self) -> tuple[tuple[ChannelSample, ChannelSample], ...]:
        """Return pairs of what factors are made from and the rows that they are measured on.

        Each half is held back once, ranges of channels too: the range of a channel takes many more rows to
        find than that of all of them, and factors that leave no channel any room cost most on data from
        elsewhere. Of a few rows nothing can be told.
        """
        few = float(self.weights.sum()) < _FEWEST_ROWS
        if few or bool(self.half.all()) or not bool(self.half.any()):
            return ()
        first, second = self._part(~self.half), self._part(self.half)
        return (first, second), (second, first)

    def _part(self, which: Tensor) -> ChannelSample:
        rows = self.rows[which]
        return ChannelSample(
            rows.amin(0), rows.amax(0), rows, self.weights[which], self.half[which]
        )

    @property
    def largest(self) -> Tensor:
        """Return the largest magnitude of each channel."""
        return torch.maximum(-self.low, self.high)
