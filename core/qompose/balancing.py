# SPDX-License-Identifier: Apache-2.0
"""Balancing: channels of very different size get a scale each, by powers of two moved into weights.

A tensor quantized per tensor has one step for all channels, so one large channel drowns the others. For
a product `y = W x + b` and positive vectors d, e::

    W x = (W diag(d)) (x / d)          y = e * ((diag(1/e) W) x + b / e)

so the input is divided by d before it is quantized, or the output multiplied by e after it was, and
the weight takes up the rest. With powers of two this is exact in floating point, up to overflow. It is
done only at the border to float operators, where the extra product meets a float tensor, and only where
it saves at least a fifth of the expected squared error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

INPUT, OUTPUT = "input", "output"

_WORTHWHILE = 0.8
_EXPONENTS = (0.25, 0.5, 0.75, 1.0)
_SMALLEST = 2.0**-40


@dataclass(frozen=True)
class Balance:
    """Which side of which products a group's tensor is on, and its channel dimension.

    `weights` and `biases` name the parameters, one for each product; "" is no bias.
    """

    side: str
    dim: int
    weights: tuple[str, ...]
    biases: tuple[str, ...]


@dataclass(frozen=True)
class Factors:
    """What a side is divided by before quantization, shape `(C,)`, and the error that is expected.

    `minimum` and `maximum` are those of the divided tensor; `gain` is the old error over the new one.
    """

    values: Tensor
    minimum: Tensor
    maximum: Tensor
    gain: float


def balance_input(
    low: Tensor, high: Tensor, weights: Sequence[Tensor], scale: float, steps: int
) -> Factors | None:
    """Return factors for a product's input, or None where none are worthwhile.

    The expected squared error of the product has a part from the input's rounding, `step**2 *
    |W_j|**2` summed over channels j, and one from the weight's, `weight step**2 * |x_j|**2`. The
    candidates are `(largest input / largest weight) ** exponent` per channel, as in SmoothQuant
    (Xiao et al. 2022), for several exponents.

    Args:
        low, high: range of each input channel, shape `(C,)`.
        weights: shape `(out, C, ...)`, of all the products that read the input.
        scale: the step without balancing, in units of the input.
        steps: how many steps the input has.
    """
    matrices = [
        weight.detach().double().flatten(2).norm(dim=2)
        if weight.dim() > 2
        else weight.detach().double().abs()
        for weight in weights
    ]
    matrix = torch.cat(matrices)
    largest = torch.maximum(-low, high).double().clamp(min=_SMALLEST)
    heaviest = matrix.amax(0).clamp(min=_SMALLEST)
    before = _product_error(torch.ones_like(largest), largest, matrix, scale)
    best: Factors | None = None
    for exponent in _EXPONENTS:
        factors = _powers_of_two(largest**exponent / heaviest ** (1 - exponent))
        balanced = _divided(low, high, factors)
        step = float(balanced[1] - balanced[0]) / steps
        gain = before / _product_error(factors, largest, matrix, step)
        if gain > (best.gain if best else 1 / _WORTHWHILE):
            best = Factors(factors.float(), *balanced, gain)
    return best


def _product_error(factors: Tensor, largest: Tensor, matrix: Tensor, step: float) -> float:
    weighted = matrix * factors
    weight_steps = weighted.amax(1) / 127
    inputs = (largest / factors) ** 2 / 3  # the mean square of a uniform distribution
    return float(step**2 * (weighted**2).sum() + (weight_steps**2).sum() * inputs.sum())


def balance_output(low: Tensor, high: Tensor, scale: float, steps: int) -> Factors | None:
    """Return factors for a product's output, or None where none are worthwhile; see `balance_input`."""
    factors = _powers_of_two(torch.maximum(-low, high).double().clamp(min=_SMALLEST))
    balanced = _divided(low, high, factors)
    step = float(balanced[1] - balanced[0]) / steps
    after = float(((step * factors) ** 2).mean())
    gain = scale**2 / max(after, _SMALLEST)
    return Factors(factors.float(), *balanced, gain) if gain > 1 / _WORTHWHILE else None


def _powers_of_two(sizes: Tensor) -> Tensor:
    """Return the nearest power of two of each size over their median, within 2**-24 and 2**24."""
    return torch.exp2(torch.log2(sizes / sizes.median()).round().clamp(-24, 24))


def _divided(low: Tensor, high: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the range of the whole tensor after division."""
    minimum = (low.double() / factors).amin().clamp(max=0.0)
    return minimum.float(), (high.double() / factors).amax().clamp(min=0.0).float()
