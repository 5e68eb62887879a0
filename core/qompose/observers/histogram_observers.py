# SPDX-License-Identifier: Apache-2.0
"""Observers that keep a histogram and choose a range from it.

`HistogramObserver` is this package's own: its range search knows `quant_min` and `quant_max`, and its
statistics merge. torch's class of that name is another, `torch.ao.quantization.HistogramObserver`;
`range="torch_histogram"` takes it, bit by bit what it is there, and with its costs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qompose.errors import ConfigError, StatisticsError
from qompose.observers.clipping_range_search import (
    Cost,
    best_range,
    best_ranges,
    divergence,
    percentile_range,
    power_error,
)
from qompose.observers.histogram import ChannelHistograms, Histogram, sample_of
from qompose.observers.min_max import Observer, gathered
from qompose.observers.tensor_statistics import Channels, Facts
from qompose.observers.value_screening import Cleaned
from qompose.spec.qparams import FLOAT_ZERO_POINT, SYMMETRIC, quantized_range, symmetric_zero_point


class SearchingObserver(Observer):
    """An observer that searches for the range that its integers serve best."""

    mergeable = True

    def _counted(self) -> dict[str, Tensor]:
        """Return what was counted, by the names that it has in a state dict."""
        raise NotImplementedError

    def _count_on(self, counted: dict[str, Tensor]) -> None:
        """Go on from what was counted."""
        raise NotImplementedError

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in self._counted().items():
            destination[prefix + name] = tensor.clone()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool,
        missing_keys: list[str], *rest: Any,
    ) -> None:  # fmt: skip
        names = [*self._counted()]
        missing = [prefix + name for name in names if prefix + name not in state_dict]
        missing_keys += missing if strict else []
        found = {name: state_dict.pop(prefix + name, None) for name in names}
        if not missing:
            self._count_on({name: tensor.cpu().clone() for name, tensor in found.items()})
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing_keys, *rest)

    def _levels(self) -> tuple[int, int | None]:
        """Return how many steps there are, and the lowest level where the scheme is symmetric."""
        low, high = quantized_range(self.dtype, *self._asked)
        if self.qscheme not in SYMMETRIC:
            return high - low, None
        return high - low, low - symmetric_zero_point(self.dtype, *self._asked)


class OfHistogram(SearchingObserver):
    """An observer whose statistics are a histogram of one tensor.

    The bins are powers of two wide, so the histogram, and with it the range, does not depend on how the
    data is split into batches or in which order they come (`Histogram`). Of large examples a
    fixed part is counted; the least and the largest value are always exact.
    """

    def __init__(self, dtype: torch.dtype = torch.uint8, **arguments: Any) -> None:
        super().__init__(dtype, **arguments)
        self.histogram = Histogram()

    def _counted(self) -> dict[str, Tensor]:
        found = self.histogram
        exponent = math.nan if found.exponent is None else found.exponent
        ends = torch.tensor([exponent, found.minimum, found.maximum], dtype=torch.float64)
        return {"counts": found.counts, "ends": ends}

    def _count_on(self, counted: dict[str, Tensor]) -> None:
        exponent, low, high = counted["ends"].tolist()
        self.histogram = found = Histogram()
        found.counts, found.minimum, found.maximum = counted["counts"], low, high
        found.exponent = None if math.isnan(exponent) else int(exponent)

    def observe(self, x: Tensor) -> None:
        self._count(self._screened(x))

    def _count(self, seen: Cleaned) -> None:
        """Add a tensor without mask values."""
        values, each = (seen.values, 1) if self.constant else sample_of(seen.values)
        self.histogram.add(values.float(), each=each, extremes=(seen.low, seen.high))

    def observe_together(self, x: Tensor) -> None:
        before, self.histogram = self.histogram, Histogram()
        self.observe(x)
        for counts, ends in zip(*map(gathered, OfHistogram._counted(self).values()), strict=True):
            OfHistogram._count_on(self, {"counts": counts, "ends": ends})
            before.merge(self.histogram)
        self.histogram = before

    def facts(self) -> Facts:
        found = self.histogram
        if not found.total:
            return super().facts()
        return replace(
            super().facts(), minimum=found.minimum, maximum=found.maximum, histogram=found
        )

    def take(self, facts: Facts) -> None:
        if facts.histogram is None and facts.set_range is None:
            raise StatisticsError("no histogram was recorded")
        super().take(facts)
        self.histogram = Histogram()
        if facts.histogram is not None:
            self.histogram.merge(facts.histogram)

    @property
    def calibrated(self) -> bool:
        return self.histogram.total > 0 or self.set_range is not None

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        self._check_calibrated()
        if self.set_range is not None:
            low, high = self.set_range
            return self._qparams(torch.tensor(low), torch.tensor(high))
        return self._qparams(*self._range())

    def _range(self) -> tuple[Tensor, Tensor]:
        """Return the least and the largest value that is not clipped."""
        raise NotImplementedError

    def _cheapest(self, histogram: Histogram, cost: Cost) -> tuple[Tensor, Tensor]:
        steps, lowest = self._levels()
        return best_range(histogram, steps=steps, cost=cost, lowest=lowest)


class HistogramObserver(OfHistogram):
    """The range of least quantization error, found on a histogram of what was seen.

    The error of a value counts with the given `power`: 2 is the mean squared error, and the more the
    power, the less is clipped. The default of 3 was chosen by task accuracy: clipping what a squared
    error allows costs a transformer more neighbours than its finer steps win.
    """

    def __init__(
        self, dtype: torch.dtype = torch.uint8, power: float = 3.0, **arguments: Any
    ) -> None:
        super().__init__(dtype, **arguments)
        self.power = power

    def _range(self) -> tuple[Tensor, Tensor]:
        return self._cheapest(self.histogram, power_error(self.power))


class PercentileObserver(OfHistogram):
    """The range that holds all values but `100 - percentile` percent at each end.

    Raises:
        ConfigError: `percentile` is not above 50 and at most 100.
    """

    def __init__(
        self, dtype: torch.dtype = torch.uint8, percentile: float = 99.99, **arguments: Any
    ) -> None:
        super().__init__(dtype, **arguments)
        if not 50 < percentile <= 100:
            raise ConfigError(f"percentile must be above 50 and at most 100, got {percentile}")
        self.percentile = percentile

    def _range(self) -> tuple[Tensor, Tensor]:
        return percentile_range(self.histogram, self.percentile)


class EntropyObserver(OfHistogram):
    """The range whose quantized values have the least Kullback-Leibler divergence from the data's.

    Values of zero count as much as those beside them, as in NVIDIA's pytorch-quantization, whose
    histograms begin there (`calib/histogram.py`). With all of them in, the sum of terms is nearly that of
    zero alone, and half of what a rectifier gives is clipped.
    """

    def _range(self) -> tuple[Tensor, Tensor]:
        return self._cheapest(self.histogram.without_peak_at_zero(), divergence)


class PerChannelHistogramObserver(SearchingObserver):
    """The range of least quantization error of each slice along `ch_axis`, on a histogram of its own.

    As `HistogramObserver`, with the same `power`; every value is counted, because what has a scale for each
    channel is a parameter as a rule, which is looked at once (`qompose.observers.histogram`).

    Raises:
        ConfigError: the scheme has zero points that are not integers, whose range need not hold zero.
    """

    per_channel = True

    def __init__(
        self,
        dtype: torch.dtype = torch.uint8,
        ch_axis: int = 0,
        power: float = 3.0,
        **arguments: Any,
    ) -> None:
        super().__init__(dtype, **arguments)
        if self.qscheme in FLOAT_ZERO_POINT:
            raise ConfigError(f"{type(self).__name__} does not support qscheme {self.qscheme}")
        self.ch_axis, self.power = ch_axis, power
        self.histograms = ChannelHistograms()

    def _counted(self) -> dict[str, Tensor]:
        found = self.histograms
        ends = {"low": found.low, "high": found.high, "values": torch.tensor(found.values)}
        return {"counts": found.counts, "exponents": found.exponents, **ends}

    def _count_on(self, counted: dict[str, Tensor]) -> None:
        self.histograms = found = ChannelHistograms()
        found.counts, found.exponents = counted["counts"], counted["exponents"]
        found.low, found.high = counted["low"], counted["high"]
        found.values = int(counted["values"])

    def observe(self, x: Tensor) -> None:
        values = self._screened(x).values.float()
        self.histograms.add(values.movedim(self.ch_axis, 0).flatten(1))

    def facts(self) -> Facts:
        found = self.histograms
        if not found.values:
            return super().facts()
        return replace(
            super().facts(), channels=Channels(self.ch_axis, found.low, found.high, found)
        )

    def take(self, facts: Facts) -> None:
        seen = facts.channels
        if seen is None or seen.axis != self.ch_axis or seen.histograms is None:
            raise StatisticsError(
                f"no per-channel histograms were recorded along dimension {self.ch_axis}"
            )
        super().take(facts)
        self.histograms = ChannelHistograms()
        self.histograms.merge(seen.histograms)

    @property
    def calibrated(self) -> bool:
        return bool(self.histograms.values)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        self._check_calibrated()
        if self.set_range is not None:
            return self._qparams(*self.facts().channel_ranges(self.ch_axis))
        steps, lowest = self._levels()
        cost = power_error(self.power)
        return self._qparams(*best_ranges(self.histograms, steps=steps, cost=cost, lowest=lowest))
