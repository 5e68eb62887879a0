# SPDX-License-Identifier: Apache-2.0
"""The search for factors of channels, with their error measured on rows that they were not made from.

Factors are powers of `2 ** 0.25`, of at least 1: they shrink large channels and leave quiet ones their
headroom, so that a channel which happened to be silent during calibration is not cut off when it speaks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from qompose.algorithms.calibrated import RoundedWeight, Scheme
from qompose.algorithms.channel_factors import JUDGED, Absorbers, Factors, in_steps
from qompose.algorithms.product_inputs import times_smaller
from qompose.observers.auto_range import in_unit, measured_against, unit_of
from qompose.observers.channel_ranges import ChannelSample
from qompose.spec.qparams import along, fake_quantize

_LEAST_GAIN, _PLENTY_OF_WORK = 2.0, 256
"""What data from elsewhere takes off a gain, and the work beside which a pass is nothing.

Rows held back are of the same source as those that factors are made from. Factors take the headroom of quiet
channels, of which other data makes use, and a value that is cut off has an error of many that are rounded. A
U-Net's gains of 1.16 to 1.58 on images like those of calibration were 0.02 to 0.83 on photographs, those of
2.1 and 5.9 were 1.4 and 4.1; a language model's of 1.55 was 0.09 on texts in other languages.
"""
_EXPONENTS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.25)
_LEVELS = (0.3, 0.5, 0.7, 0.85, 0.95, 0.98, 0.995)
_MEDIAN = 0.5
_LARGEST_FACTOR = 2.0**8
_ROOMS = (1.0, 2.0**0.25, 2.0**0.5)
"""How far the range goes beyond what was seen: with channels that are all alike, each new row has one that is
larger than before."""

Error = Callable[[Tensor, Tensor, Tensor], float]
"""The error of some rows, by factors, scale and zero point."""


def input_factors(
    channels: ChannelSample,
    products: Sequence[RoundedWeight],
    scheme: Scheme,
    qparams: tuple[Tensor, Tensor] | None,
    needed: float | None = None,
    alpha: float | None = None,
    expected: Tensor | None = None,
    absorbers: Absorbers | None = None,
) -> Factors | None:
    """Return factors for the input of products, or None where none are worthwhile.

    Channels have sizes, `largest input ** exponent / largest weight ** (1 - exponent)`, as in SmoothQuant
    (Xiao et al. 2022), and those above some quantile of all sizes are divided by what they have more than
    that: a high one takes care of a few outliers, and leaves all others the room that the range has for
    them. Several exponents and quantiles are tried. The error is that of each row of the products on the
    sample, in the size of that row (`qompose.observers.auto_range`).

    Args:
        products: weights, shape `(out, C, ...)`, or some of their rows.
        qparams: scale and zero point without factors; None where they are chosen at run time.
        needed: how many times smaller the error has to become; None where it has to be so on data from
            elsewhere, and to be worth its time.
        alpha: the only exponent to try, with the median.
        expected: magnitudes that the range has to hold besides what was seen, by channel, `(C,)`.
        absorbers: parameters that divide the channels for nothing; those of one row get one factor.
    """
    weights = [product.values for product in products]
    heaviest = torch.stack([w.abs().transpose(0, 1).flatten(1).amax(1) for w in weights]).amax(0)

    unit, of_weights = unit_of(channels.largest), unit_of(heaviest)
    heaviest = in_unit(heaviest, of_weights)

    def size(seen: ChannelSample, exponent: float) -> Tensor:
        largest = in_unit(seen.largest, unit)
        sizes = largest**exponent / heaviest.clamp(min=1e-30) ** (1 - exponent)
        return sizes if absorbers is None else absorbers.even(sizes)

    work = [weight.numel() // weight.shape[1] for weight in weights]
    judged = [_Outputs.of(product, max(1, sum(work) // JUDGED)) for product in products]

    def error_on(held: ChannelSample) -> Error:
        rows = in_unit(held.rows, unit)
        exact = [rows @ in_unit(outputs.weight(), of_weights).T for outputs in judged]
        sizes = [measured_against(rows.square().sum(1), held.weights) for rows in exact]

        def error(factors: Tensor, scale: Tensor, zero_point: Tensor) -> float:
            quantized = in_unit(scheme.simulate(held.rows / factors, scale, zero_point), unit)
            rounded = (in_unit(outputs.rounded(factors), of_weights) for outputs in judged)
            found = (quantized @ weight.T for weight in rounded)
            return sum(map(partial(_relative, held), exact, found, sizes))

        return error

    if needed is None:
        needed = _LEAST_GAIN if absorbers else _needed_gain(work)
    search = _Search(channels, size, scheme, qparams, error_on, expected)
    return search.best(
        needed, *((_EXPONENTS, _LEVELS) if alpha is None else ((alpha,), (_MEDIAN,)))
    )


def _needed_gain(work: Iterable[int]) -> float:
    """Return how many times smaller the squared error has to become for factors to be worth their time.

    Factors at run time are a pass over the tensor in float. Beside hundreds of multiply-accumulates for
    each of its elements that is nothing. Beside the few dozen of a pointwise convolution it is not:
    fourteen such passes cost MobileNet-V3 a twelfth of its time on a processor with int8 kernels.

    Args:
        work: of each product, the multiply-accumulates for one element of the tensor with factors.
    """
    return _LEAST_GAIN * math.sqrt(max(1.0, _PLENTY_OF_WORK / max(sum(work), 1)))


@dataclass(frozen=True)
class _Outputs:
    """Outputs of a product on which an error is measured; a convolution's taps count as outputs.

    Attributes:
        product: those rows of its weight that they need; all where rows are not quantized by themselves.
        places: of the outputs, among all that `product` gives.
    """

    product: RoundedWeight
    places: Tensor

    @classmethod
    def of(cls, product: RoundedWeight, apart: int) -> _Outputs:
        """Return every `apart`-th output."""
        values = product.values
        taps = max(1, values.numel() // (values.shape[0] * values.shape[1]))
        places = torch.arange(0, len(values) * taps, apart, device=values.device)
        if not product.by_row:
            return cls(product, places)
        rows, within = torch.unique(places // taps, return_inverse=True)
        return cls(replace(product, values=values[rows]), within * taps + places % taps)

    def weight(self) -> Tensor:
        """Return what they multiply the channels by, `(outputs, C)`."""
        return _taps(self.product.values)[self.places]

    def rounded(self, factors: Tensor) -> Tensor:
        """Return the same of the weight that takes up factors, as it is going to be quantized."""
        values = self.product.values
        return _taps(self.product.quantize(values * along(factors, 1, values.dim())))[self.places]


def _relative(held: ChannelSample, exact: Tensor, found: Tensor, sizes: Tensor) -> float:
    """Return the squared error of all rows, each in its size, `(N,)`."""
    return float(((found - exact).square().sum(1) / sizes * held.weights).sum())


def _taps(weight: Tensor) -> Tensor:
    return weight.transpose(0, 1).flatten(1).T


def output_factors(
    channels: ChannelSample, weight: Tensor, scheme: Scheme, qparams: tuple[Tensor, Tensor]
) -> Factors | None:
    """Return factors for a product's output, or None where none are worthwhile; see `input_factors`."""
    unit = unit_of(channels.largest)

    def error_on(held: ChannelSample) -> Error:
        exact = in_unit(held.rows, unit)
        sizes = measured_against(exact.square().sum(1), held.weights)

        def error(factors: Tensor, scale: Tensor, zero_point: Tensor) -> float:
            given = held.rows / factors
            quantized = fake_quantize(given, scale, zero_point, scheme.low, scheme.high)
            return _relative(held, exact, in_unit(quantized * factors, unit), sizes)

        return error

    needed = _needed_gain([weight.numel() // weight.shape[0]])
    search = _Search(channels, lambda seen, exponent: seen.largest, scheme, qparams, error_on)
    return search.best(needed, (1.0,), _LEVELS)


@dataclass(frozen=True)
class _Way:
    """How factors are made: the exponent of sizes, the quantile that has the factor 1, and the room."""

    exponent: float
    level: float
    room: float


@dataclass(frozen=True)
class _Search:
    """The search for factors of least error on rows that they are not made from.

    With factors nothing is clipped: they have done what clipping is for.

    Attributes:
        size: of each channel, by what was seen of it and an exponent.
        qparams: without factors, None where they are chosen at run time.
        error_on: returns the error on some rows, as a function of factors, scale and zero point.
        expected: magnitudes by channel that the range has to hold in any case.
    """

    channels: ChannelSample
    size: Callable[[ChannelSample, float], Tensor]
    scheme: Scheme
    qparams: tuple[Tensor, Tensor] | None
    error_on: Callable[[ChannelSample], Error]
    expected: Tensor | None = None

    def best(
        self, needed: float, exponents: Sequence[float], levels: Sequence[float]
    ) -> Factors | None:
        """Return the best factors, None where their error is not so many times smaller than without any.

        Level, exponent and room are looked for in turn, until none of them gets better.
        """
        trials = [(seen, self.error_on(held)) for seen, held in self.channels.trials()]
        if not trials:
            return None

        @cache
        def held_back(way: _Way) -> float:
            return sum(error(*self._chosen(seen, way)) for seen, error in trials)

        def turned(way: _Way) -> _Way:
            for name, values in choices.items():
                way = min((replace(way, **{name: value}) for value in values), key=held_back)
            return way

        rooms = (1.0,) if self.scheme.per_row else _ROOMS
        choices = {"level": levels, "exponent": exponents, "room": rooms}
        last, way = None, turned(_Way(exponents[0], _MEDIAN, 1.0))
        while last is None or held_back(way) < held_back(last):
            last, way = way, turned(way)
        gain = times_smaller(self._without(trials), held_back(way))
        if gain < needed:
            return None
        return Factors(*self._chosen(self.channels, way), gain)

    def _without(self, trials: Iterable[tuple[ChannelSample, Error]]) -> float:
        """Return the error without factors."""
        none = torch.ones_like(self.channels.low)
        return sum(
            error(none, *(self._parameters(seen, none) if self.qparams is None else self.qparams))
            for seen, error in trials
        )

    def _chosen(self, seen: ChannelSample, way: _Way) -> tuple[Tensor, Tensor, Tensor]:
        factors = _factors_above(self.size(seen, way.exponent), way.level)
        return factors, *self._parameters(seen, factors, way.room)

    def _parameters(
        self, seen: ChannelSample, factors: Tensor, room: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        low, high = (seen.low / factors).amin() * room, (seen.high / factors).amax() * room
        if self.expected is not None:
            most = (self.expected / factors).amax()
            low, high = torch.minimum(low, -most), torch.maximum(high, most)
        return self.scheme.choose(low, high)


def _factors_above(sizes: Tensor, level: float) -> Tensor:
    """Return the sizes over a quantile of them, in steps of a quarter octave; silent channels have 1."""
    alive = sizes > 0
    if not bool(alive.any()):
        return torch.ones_like(sizes)
    ratios = sizes.clamp(min=1e-30) / torch.quantile(sizes[alive], level)
    return in_steps(ratios).clamp(1.0, _LARGEST_FACTOR)
