# SPDX-License-Identifier: Apache-2.0
"""The search for factors of channels, with their error measured on rows that they were not made from.

Factors are powers of two, of at least 1: they shrink large channels and leave quiet ones their headroom, so
that a channel which happened to be silent during calibration is not cut off when it speaks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from qompose.algorithms.calibrated import FakeQuantize, Scheme
from qompose.algorithms.channel_factors import Factors
from qompose.observers.channel_ranges import ChannelSample
from qompose.observers.clipping_range_search import best_range, power_error
from qompose.observers.histogram import Histogram
from qompose.spec.qparams import along, fake_quantize

_LEAST_GAIN, _PLENTY_OF_WORK = 2.0, 256
_EXPONENTS = (0.25, 0.5, 0.75, 1.0)
_LARGEST_FACTOR = 2.0**8
_POWER = 3.0


def input_factors(
    channels: ChannelSample,
    products: Sequence[tuple[Tensor, FakeQuantize]],
    scheme: Scheme,
    qparams: tuple[Tensor, Tensor] | None,
    needed: float | None = None,
    alpha: float | None = None,
) -> Factors | None:
    """Return factors for the input of products, or None where none are worthwhile.

    Candidates are `(largest input / largest weight) ** exponent` per channel, as in SmoothQuant (Xiao et
    al. 2022), for several exponents. The error is that of the products on the sample.

    Args:
        products: weights, shape `(out, C, ...)`, each with the way it is going to be quantized.
        qparams: scale and zero point without factors; None where they are chosen at run time.
        needed: how many times smaller the error has to become; None where it has to be worth its time.
        alpha: the only exponent to try.
    """
    heaviest = torch.stack([w.abs().transpose(0, 1).flatten(1).amax(1) for w, _ in products]).amax(
        0
    )

    def size(seen: ChannelSample, exponent: float) -> Tensor:
        return seen.largest**exponent / heaviest.clamp(min=1e-30) ** (1 - exponent)

    def error(sample: Tensor, factors: Tensor, scale: Tensor, zero_point: Tensor) -> float:
        quantized = scheme.simulate(sample / factors, scale, zero_point)
        return sum(_product_error(sample, quantized, factors, *p) for p in products)

    exponents = _EXPONENTS if alpha is None else (alpha,)
    sizes = [partial(size, exponent=exponent) for exponent in exponents]
    if needed is None:
        needed = _needed_gain(weight.numel() // weight.shape[1] for weight, _ in products)
    return _best(channels, sizes, scheme, qparams, error, needed)


def _needed_gain(work: Iterable[int]) -> float:
    """Return how many times smaller the squared error has to become for factors to be worth their time.

    Factors at run time are a pass over the tensor in float. Beside hundreds of multiply-accumulates for
    each of its elements that is nothing. Beside the few dozen of a pointwise convolution it is not:
    fourteen such passes cost MobileNet-V3 a twelfth of its time on a processor with int8 kernels.

    Args:
        work: of each product, the multiply-accumulates for one element of the tensor with factors.
    """
    return _LEAST_GAIN * math.sqrt(max(1.0, _PLENTY_OF_WORK / max(sum(work), 1)))


def _product_error(
    sample: Tensor, quantized: Tensor, factors: Tensor, weight: Tensor, quantize: FakeQuantize
) -> float:
    """Return the squared error of a product; the taps of a convolution count as products of their own."""
    exact = sample @ _taps(weight).T
    scaled = quantize(weight * along(factors, 1, weight.dim()))
    return float(((quantized @ _taps(scaled).T - exact) ** 2).sum())


def _taps(weight: Tensor) -> Tensor:
    return weight.transpose(0, 1).flatten(1).T


def output_factors(
    channels: ChannelSample, weight: Tensor, scheme: Scheme, qparams: tuple[Tensor, Tensor]
) -> Factors | None:
    """Return factors for a product's output, or None where none are worthwhile; see `input_factors`."""

    def error(sample: Tensor, factors: Tensor, scale: Tensor, zero_point: Tensor) -> float:
        quantized = fake_quantize(sample / factors, scale, zero_point, scheme.low, scheme.high)
        return float(((quantized * factors - sample) ** 2).sum())

    needed = _needed_gain([weight.numel() // weight.shape[0]])
    return _best(channels, [lambda seen: seen.largest], scheme, qparams, error, needed)


def _best(
    channels: ChannelSample,
    sizes: Sequence[Callable[[ChannelSample], Tensor]],
    scheme: Scheme,
    qparams: tuple[Tensor, Tensor] | None,
    error: Callable[[Tensor, Tensor, Tensor, Tensor], float],
    needed: float,
) -> Factors | None:
    """Return the factors by those of `sizes` that have the least error on rows they are not made from.

    None where that is not `needed` times smaller than without factors.
    """
    trials = channels.trials()

    def chosen(seen: ChannelSample, factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return factors, *scheme.choose(*_divided_range(seen, factors, scheme, qparams))

    def held_back_error(factors_of: Callable[[ChannelSample], Tensor]) -> float:
        return sum(error(held.sample, *chosen(seen, factors_of(seen))) for seen, held in trials)

    if not trials:
        return None
    before, gains = held_back_error(lambda seen: torch.ones_like(seen.low)), list[float]()
    for size in sizes:
        after = held_back_error(lambda seen, size=size: _powers_of_two(size(seen)))  # type: ignore[misc]
        gains.append(before / max(after, 1e-30))
    gain, best = max(gains), sizes[gains.index(max(gains))]
    if gain < needed:
        return None
    return Factors(*chosen(channels, _powers_of_two(best(channels))), gain)


def _powers_of_two(sizes: Tensor) -> Tensor:
    """Return the powers of two next to the sizes over their median; channels that say nothing have 1."""
    alive = sizes > 0
    if not bool(alive.any()):
        return torch.ones_like(sizes)
    ratios = sizes.clamp(min=1e-30) / sizes[alive].median()
    return torch.exp2(torch.log2(ratios).round()).clamp(1.0, _LARGEST_FACTOR)


def _divided_range(
    channels: ChannelSample, factors: Tensor, scheme: Scheme, qparams: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Search the range of the divided tensor on the sample, within the range that was seen.

    A sample misses the rarest extremes, so no more of the range is cut off than all of the data allowed
    for the undivided tensor, whose parameters are `qparams`. At run time nothing is cut off.
    """
    if qparams is None:
        return (channels.low / factors).amin(), (channels.high / factors).amax()
    histogram = Histogram()
    histogram.add(channels.sample / factors)
    histogram.minimum = float((channels.low / factors).amin())
    histogram.maximum = float((channels.high / factors).amax())
    low, high = best_range(histogram, steps=scheme.high - scheme.low, cost=power_error(_POWER))
    kept_low, kept_high = _kept(channels, scheme, *qparams)
    return (
        torch.minimum(low, kept_low * histogram.minimum),
        torch.maximum(high, kept_high * histogram.maximum),
    )


def _kept(
    channels: ChannelSample, scheme: Scheme, scale: Tensor, zero_point: Tensor
) -> tuple[Tensor, Tensor]:
    """Return how much of the range below and above zero the undivided tensor's parameters keep."""
    seen = torch.stack([channels.low.amin().clamp(max=0), channels.high.amax().clamp(min=0)])
    ends = (torch.tensor([scheme.low, scheme.high]) - zero_point) * scale
    kept = torch.where(seen == 0, 0.0, ends / torch.where(seen == 0, 1.0, seen)).clamp(0.0, 1.0)
    return kept[0], kept[1]
