# SPDX-License-Identifier: Apache-2.0
"""The observer that chooses a range by the error which its readers get to see.

A range that minimises the error of values clips the few rows that carry a text: there are too few of them to
count. What counts is the output of the product that reads the tensor. For a weight `W` the squared error of
an output row is `e G e'` with the error `e` of the input row and `G = W'W`, and it is measured against the
size of that row, `x G x'`, because what follows a product in a network, a normalisation or a softmax, looks
at each row by itself. Rows that are smaller than the mean are measured against the mean: of what is nearly
nothing nobody needs every digit.

Candidates are the whole range and parts of the largest magnitude. One is chosen on the rows of half of the
examples, and has to be much better than the whole range on those of the other half too, which took no part
in choosing.

What a network makes of a background is the same row at most places. All of these have the same error, which
sums over the taps of a window, where the errors of other rows average out. So for convolutions the whole
range is widened by up to a sixteenth where such rows are then nearer to steps. Nothing is clipped, and steps
are hardly larger: where there is no background, little is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qompose.errors import StatisticsError
from qompose.observers.histogram_observers import OfHistogram
from qompose.observers.min_max import version_of
from qompose.observers.row_sample import FrequentRows, RowSample
from qompose.observers.tensor_statistics import Facts
from qompose.observers.value_screening import Cleaned, unmasked
from qompose.spec.qparams import fake_quantize

FEWEST_EXAMPLES = 8
"""With fewer different examples nothing is chosen: the range is that of all values."""
WHOLE = "min-max"
_PARTS = (2, 4, 8, 16, 32, 64)
_NEEDED = 0.1
"""The most that readers may see of the error of the whole range.

Data from elsewhere is larger than what calibration saw, and clipped: a U-Net lost 6 dB on photographs by a
range that had 0.31 of the error on images like those it was calibrated with. Ranges that clip little and
gain little were tried, too: nine tenths of the error here cost 3 dB on data alike that was not seen.
"""
_WIDER = tuple(part / 512 for part in range(1, 33))
"""By how much the whole range may be widened."""
_FREQUENT, _NEEDED_WIDER = 0.25, 0.7
"""It is widened where frequent rows are this part of all, and readers see this part of its error at most."""
_NOTHING = 1e-30


@dataclass(frozen=True, eq=False)
class Reader:
    """What reads a tensor: a product by a weight, or, where there is no weight, whatever takes the values.

    The taps of a convolution count as products of their own.

    Attributes:
        weight: `(out, in / groups, ...)`, or `(in, out / groups, ...)` if `transposed`.
    """

    weight: Tensor | None = None
    groups: int = 1
    transposed: bool = False

    def in_unit(self) -> Reader:
        """Return the same with its weight in a unit that keeps squares of products within float32."""
        weight = self.weight
        return self if weight is None else replace(self, weight=in_unit(weight, unit_of(weight)))

    @property
    def reads_rows(self) -> bool:
        """Tell whether it is a product that reads each row by itself, not a window of several."""
        return self.weight is not None and self.weight.shape[2:].numel() == 1

    def squared_sizes(self, rows: Tensor) -> Tensor:
        """Return the squared size of what it makes of each row, `(N,)`."""
        return self.measure(rows.device)(rows)

    def measure(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Return `squared_sizes`, to be called several times.

        It goes by the products themselves, or by `G` where that has fewer columns than there are outputs.
        """
        if self.weight is None:
            return _squared_sizes
        weight = self.weight.detach().to(device, torch.float32)
        weight = weight.reshape(*weight.shape[:2], -1)
        grouped = weight.reshape(self.groups, -1, *weight.shape[1:])
        inputs = (grouped if self.transposed else grouped.transpose(1, 2)).flatten(2)
        if inputs.shape[2] > inputs.shape[1]:
            return partial(_squared_sizes, gram=inputs @ inputs.transpose(1, 2))
        return partial(_squared_sizes, factor=inputs)

    @property
    def sums_windows(self) -> bool:
        """Tell whether it sums over a window of rows, all of it for each output."""
        return self.weight is not None and not (self.transposed or self.reads_rows)

    def of_one_row(self) -> Reader:
        """Return what it is to windows that have the same row everywhere."""
        if self.weight is None:
            return self
        return replace(
            self, weight=self.weight.flatten(2).sum(2) if self.weight.dim() > 2 else self.weight
        )

    def squared_size_of_noise(self, channels: int) -> float:
        """Return the mean squared size of what it makes of independent errors of variance 1."""
        return (
            channels if self.weight is None else float(self.weight.detach().float().square().sum())
        )

    @property
    def channels(self) -> int | None:
        """Return how many channels it reads, None for any number."""
        if self.weight is None:
            return None
        return self.weight.shape[0] if self.transposed else self.weight.shape[1] * self.groups


VALUES = Reader()
"""Who reads the values of a tensor themselves."""


def _fitting(readers: Sequence[Reader], channels: int) -> list[Reader]:
    """Return the readers of rows of so many channels; the values' own where there are none."""
    return [r for r in readers if r.channels in (None, channels)] or [VALUES]


def _squared_sizes(
    rows: Tensor, gram: Tensor | None = None, factor: Tensor | None = None
) -> Tensor:
    """Return `x G x'` of each row, for `G`, a factor `F F'` of it, `(groups, in / groups, k)`, or 1."""
    matrix = factor if gram is None else gram
    if matrix is None:
        return rows.square().sum(1)
    grouped = rows.reshape(len(rows), len(matrix), -1).transpose(0, 1)
    product = grouped @ matrix
    by = product if gram is None else grouped
    return (product * by).sum((0, 2)).clamp(min=0.0)


_USUAL = 16
"""Magnitudes that are a power of two of at most so much keep squares of their products within float32."""


def unit_of(values: Tensor) -> float:
    """Return the power of two by which values are multiplied so that squares of products are within float32.

    It is 1 where they are anyway, as for most tensors, and for zeros and what is not finite. Multiplying by
    it rounds nothing: what is found is the same, whatever power of two a tensor is multiplied by.
    """
    largest = 0.0
    if values.numel():
        largest = float(torch.stack(values.detach().aminmax()).abs().amax())
    if not 0 < largest < math.inf:
        return 1.0
    exponent = math.frexp(largest)[1]
    return 1.0 if abs(exponent) <= _USUAL else 2.0 ** max(-126, min(126, -exponent))


def in_unit(values: Tensor, unit: float) -> Tensor:
    """Return values multiplied by a unit (`unit_of`): themselves where that is 1."""
    return values if unit == 1 else values * unit


def measured_against(sizes: Tensor, weights: Tensor) -> Tensor:
    """Return what the squared errors of rows are divided by, `(N,)`: their sizes, or the mean of all."""
    mean = (sizes * weights).sum() / weights.sum()
    return torch.maximum(sizes, mean).clamp(min=_NOTHING)


@dataclass(frozen=True)
class Choice:
    """The range that was chosen, how it is called, and why.

    `error` is that of the readers in that of the whole range, which is 1.0: on rows held back, or, where the
    range was widened, on all. `clips` tells whether it is smaller than the whole range.
    """

    low: float
    high: float
    name: str
    error: float = 1.0
    reason: str = ""
    clips: bool = True


class AutoRangeObserver(OfHistogram):
    """The range that its readers serve best, of several candidates; see `qompose.observers.auto_range`.

    Prepare tells it who reads the tensor. Where nobody did, the error is that of the values. With fewer
    than eight different examples the range is that of all values.
    """

    channel_dim = -1
    """Set by prepare: the dimension of the channels."""
    channels: int | None = None
    """Set by prepare, else by the first tensor: how many. Tensors of another size share the range alone."""
    readers: Sequence[Reader] = (VALUES,)
    """Set by prepare: who reads the tensor. Nobody where no rows are of it alone: nothing is chosen then."""

    def __init__(self, dtype: torch.dtype = torch.uint8, **arguments: Any) -> None:
        super().__init__(dtype, **arguments)
        self.sample = RowSample()
        self._chosen: tuple[Any, Choice] | None = None
        self._has_rows_of_last = False

    def _counted(self) -> dict[str, Tensor]:
        counts = torch.tensor([*self.sample.counts.items()], dtype=torch.int64).reshape(-1, 2)
        sample = {"rows": self.sample.rows, "order": self.sample.order, "strata": counts}
        often = {"frequent": self.sample.frequent.rows, "times": self.sample.frequent.numbers}
        return {**super()._counted(), **sample, **often}

    def _count_on(self, counted: dict[str, Tensor]) -> None:
        super()._count_on(counted)
        counts = dict(counted["strata"].tolist())
        often = FrequentRows(counted["frequent"], counted["times"])
        self.sample = RowSample(counted["rows"], counted["order"], counts, often)

    def _count(self, seen: Cleaned) -> None:
        super()._count(seen)
        self._keep_rows(seen.values)

    def _see_again(self, x: Tensor) -> None:
        """Keep rows of a view if that has the channels that the first one lacks: of what is flattened."""
        if x.numel() and not self._has_rows_of_last:
            self._keep_rows(unmasked(x))

    def _keep_rows(self, x: Tensor) -> None:
        dim = self.channel_dim
        there = -x.dim() <= dim < x.dim()
        if self.channels is None and there:  # nobody told
            self.channels = x.shape[dim]
        self._has_rows_of_last = there and x.shape[dim] == self.channels
        if self._has_rows_of_last and self.readers:
            self.sample.add(x, dim)

    def facts(self) -> Facts:
        seen = self.sample if self.calibrated else None
        return replace(super().facts(), sample=seen)

    def take(self, facts: Facts) -> None:
        if facts.sample is None and facts.set_range is None:
            raise StatisticsError("no sampled rows to choose a range from")
        super().take(facts)
        self.sample = RowSample()
        if facts.sample is not None:
            self.sample.merge(facts.sample)

    def _range(self) -> tuple[Tensor, Tensor]:
        chosen = self.choice
        return torch.tensor(chosen.low), torch.tensor(chosen.high)

    @property
    def choice(self) -> Choice:
        """Return the range for what was seen until now."""
        self._check_calibrated()
        weights = (reader.weight for reader in self.readers)
        key = (
            *(
                self.histogram.total,
                self.histogram.minimum,
                self.histogram.maximum,
                self.sample.seen,
            ),
            *((id(weight), version_of(weight)) for weight in weights if weight is not None),
        )
        if self._chosen is None or self._chosen[0] != key:
            self._chosen = key, self._choose()
        return self._chosen[1]

    def _choose(self) -> Choice:
        whole = Choice(self.histogram.minimum, self.histogram.maximum, WHOLE, clips=False)
        if not self.readers:
            return whole
        if not self.sample.seen:
            return replace(
                whole, reason=f"no value has the {self.channels} channels of its readers"
            )
        if (examples := self.sample.examples) < FEWEST_EXAMPLES:
            seen = f"{examples} distinct example{'s' * (examples != 1)}"
            return replace(whole, reason=f"{seen}, {FEWEST_EXAMPLES} required")
        trial = _Trial.of(self.sample, self.readers)
        least = trial.errors(self._rounded(trial.rows, whole))
        best, fitted = whole, least[0]
        for candidate in self._candidates():
            errors = trial.errors(self._rounded(trial.rows, candidate))
            ratios = [error / max(of, _NOTHING) for error, of in zip(errors, least, strict=True)]
            # Each by itself: NaN, which max() may pass over, is no gain.
            if all(ratio <= _NEEDED for ratio in ratios) and errors[0] < fitted:
                best, fitted = replace(candidate, error=ratios[1]), errors[0]
        return best if best.clips else self._widened(whole)

    def _widened(self, whole: Choice) -> Choice:
        """Return the whole range, or one a little wider that represents frequent rows much better."""
        if int(self.sample.frequent.numbers[:, 1].sum()) < _FREQUENT * self.sample.seen:
            return whole
        readers = _fitting(self.readers, self.sample.rows.shape[1])
        if not any(r.sums_windows for r in readers) or any(r.transposed for r in readers):
            return whole
        background = _Background.of(self.sample, readers)
        before, best = background.error(*self._steps_of(background.rows, whole)), whole
        if not 0 < before < math.inf:
            return whole
        for part in _WIDER:
            low = min(whole.low, whole.low * (1 + part))
            high = max(whole.high, whole.high * (1 + part))
            choice = Choice(low, high, f"widened by {part:.1%}", clips=False)
            ratio = background.error(*self._steps_of(background.rows, choice)) / before
            if ratio <= _NEEDED_WIDER and ratio < best.error:  # NaN neither
                best = replace(choice, error=ratio)
        return best

    def _candidates(self) -> Iterator[Choice]:
        """Yield ranges that clip, from the widest."""
        seen = self.histogram
        largest = max(-seen.minimum, seen.maximum)
        for part in _PARTS:
            end = largest / part
            name = f"up to 1/{part} of the largest magnitude"
            yield Choice(max(seen.minimum, -end), min(seen.maximum, end), name)

    def _rounded(self, rows: Tensor, choice: Choice) -> Tensor:
        return self._steps_of(rows, choice)[0]

    def _steps_of(self, rows: Tensor, choice: Choice) -> tuple[Tensor, float]:
        """Return rows as a range represents them, and the size of its steps."""
        ends = torch.tensor([choice.low, choice.high])
        scale, zero_point = (value.to(rows.device) for value in self._qparams(*ends))
        assert self.quant_min is not None and self.quant_max is not None
        rounded = fake_quantize(rows, scale, zero_point, self.quant_min, self.quant_max)
        return rounded, float(scale)


@dataclass(frozen=True)
class _Trial:
    """Rows, and what each reader makes of them in their unit."""

    rows: Tensor
    unit: float
    weights: Tensor
    half: Tensor
    readers: Sequence[tuple[Callable[[Tensor], Tensor], Tensor]]

    @classmethod
    def of(cls, sample: RowSample, readers: Sequence[Reader]) -> _Trial:
        rows, unit = sample.rows, unit_of(sample.rows)
        weights = sample.weights.to(rows.device, torch.float32)
        fitting = _fitting(readers, rows.shape[1])
        measures = [reader.in_unit().measure(rows.device) for reader in fitting]
        sizes = (measure(in_unit(rows, unit)) for measure in measures)
        seen = [(m, measured_against(s, weights)) for m, s in zip(measures, sizes, strict=True)]
        return cls(rows, unit, weights, sample.half.to(rows.device), seen)

    def errors(self, rounded: Tensor) -> tuple[float, float]:
        """Return the error of what is chosen by, and that of what is held back."""
        difference = in_unit(rounded - self.rows, self.unit)
        each = sum(measure(difference) / against for measure, against in self.readers)
        each = each * self.weights
        return float(each[~self.half].sum()), float(each[self.half].sum())


@dataclass(frozen=True)
class _Background:
    """Frequent rows, and what each reader makes of their errors and of those of other rows.

    Windows of frequent rows have the same row everywhere, and so one error. Those of other rows are taken to
    be independent, as of values that lie anywhere between two steps.
    """

    rows: Tensor
    unit: float
    parts: Tensor
    readers: Sequence[tuple[Callable[[Tensor], Tensor], float, float]]

    @classmethod
    def of(cls, sample: RowSample, readers: Sequence[Reader]) -> _Background:
        rows, weights = sample.rows, sample.weights.to(sample.rows.device, torch.float32)
        unit, seen = unit_of(rows), []
        for reader in (one.in_unit() for one in readers):
            sizes = reader.squared_sizes(in_unit(rows, unit)) * weights
            size = float(sizes.sum() / weights.sum())
            of_noise = reader.squared_size_of_noise(rows.shape[1])
            seen.append((reader.of_one_row().measure(rows.device), of_noise, max(size, _NOTHING)))
        often = sample.frequent
        parts = often.numbers[:, 1].to(rows.device, torch.float32) / sample.seen
        return cls(often.rows.to(rows.device), unit, parts, seen)

    def error(self, rounded: Tensor, step: float) -> float:
        """Return the mean squared error of the readers, in the sizes of what they make of all rows."""
        difference = in_unit(rounded - self.rows, self.unit)
        others = max(0.0, 1.0 - float(self.parts.sum())) * (step * self.unit) ** 2 / 12
        return sum(
            (float((measure(difference) * self.parts).sum()) + others * of_noise) / size
            for measure, of_noise, size in self.readers
        )
