# SPDX-License-Identifier: Apache-2.0
"""GPTQ: a weight rounded one input channel after another, each making up for the errors before it.

Rounding to the nearest integer makes the error `E` of a weight small. What counts is the error of the
product, `E G E'` for the second moments `G` of its input: what one channel's rounding does to the output,
the channels that are rounded later can take back where they correlate with it (Frantar et al., "GPTQ", 2022).
The channels that matter most go first.

`G` comes from the rows that the observer of the input keeps (`qompose.algorithms.products`). There are some
hundred rows, for up to thousands of channels, so correlations are halved: `(G + diag G) / 2`. The input's own
rounding adds `scale^2 / 12` to the diagonal. The taps of a convolution are rounded apart, all with the same
`G`. Of very many channels, some are rounded together and then the next ones: time and memory grow with their
number, not with its cube.

Each half of the examples is held back once. It is done where the error there becomes smaller.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.fx import Node

from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.interface import Algorithm
from qompose.algorithms.products import (
    InputRows,
    NotChanged,
    Operands,
    change_products,
    reader_of,
    rows_read,
    taps_of,
    weight_group,
)
from qompose.observers.auto_range import Reader
from qompose.plan.plan import Group
from qompose.spec.qdq import QParams
from qompose.spec.qparams import along
from qompose.spec.quantization_spec import GPTQ as WORD, QuantizationSpec

_NEEDED = 1.05
"""How many times smaller the squared error has to become on rows held back."""
_CORRELATIONS = 0.5
"""The part of the correlations that is believed."""
MOST_TOGETHER = 2048
"""Channels whose errors are handed on to one another: the time for that grows with their cube."""
_BLOCK = 64
"""Channels whose errors are handed on to the others together, which is one large product."""
_JUDGED = 256
"""How many outputs, at least, the gain is measured on."""
_NOTHING = 1e-30


class GPTQ(Algorithm):
    """Rounds the weights of products whose claims ask for it."""

    word = WORD

    def correct(self, found: Calibrated) -> None:
        change_products(found, self.word, partial(_round, found))


def _round(found: Calibrated, node: Node) -> str:
    """Decide on the integers of a product's weight, and say what they gain.

    Raises:
        NotChanged: those next to its values stay.
    """
    product = Operands.of(node)
    number, q = weight_group(found, product)
    _check_weight(found.plan.groups[number], q, product)
    reader = reader_of(found, product)
    if reader.channels == reader.groups:
        raise NotChanged("each of its outputs reads one channel, and there is no other to make up")
    rounding = _Rounding.of(reader, q)
    rows = rows_read(found, product, reader)
    first, second = rows.halves()
    gain = rounding.some().gain(first, second)
    if not gain >= _NEEDED:  # NaN neither
        raise NotChanged(
            f"on calibration data held back its squared error would become {gain:.2f} times smaller, and "
            f"{_NEEDED} is needed"
        )
    found.integers[number] = rounding.integers(rows)
    return f"squared error on calibration data held back {gain:.2f} times smaller"


def _check_weight(group: Group, q: QParams, product: Operands) -> None:
    spec = group.spec
    if len(group.points) > 1:
        raise NotChanged(f"{product.weight.target} is read by other operators too")
    if q.blocks or q.zero_point.is_floating_point() or not isinstance(spec, QuantizationSpec):
        raise NotChanged(f"{product.weight.target} has no scale per channel or tensor")


@dataclass(frozen=True)
class _Rounding:
    """A weight and how it is quantized, as rows of input channels for each group of a convolution.

    Attributes:
        weight, step, zero_point: `(groups, rows, C / groups)`; the last two have 1 channel.
        shape: of the taps that they are made of, `(groups, outputs, C / groups, taps)`.
    """

    weight: Tensor
    step: Tensor
    zero_point: Tensor
    q: QParams
    reader: Reader
    shape: torch.Size

    @classmethod
    def of(cls, reader: Reader, q: QParams) -> _Rounding:
        assert reader.weight is not None
        weight = reader.weight.float()
        axis, rank = q.axis or 0, weight.dim()
        step, zero_point = (
            along(v.to(weight.device, torch.float32), axis, rank).expand(weight.shape)
            for v in (q.scale, q.zero_point)
        )
        taps = [taps_of(v, reader.groups, reader.transposed) for v in (weight, step, zero_point)]
        rows = [v.transpose(2, 3).flatten(1, 2) for v in taps]
        return cls(rows[0], rows[1][..., :1], rows[2][..., :1], q, reader, taps[0].shape)

    def some(self) -> _Rounding:
        """Return one of fewer outputs, spread over all: they are rounded one apart from the other."""
        apart = slice(None, None, max(1, self.weight.shape[1] // _JUDGED))
        names = ("weight", "step", "zero_point")
        return replace(self, **{name: getattr(self, name)[:, apart] for name in names})

    def gain(self, first: InputRows, second: InputRows) -> float:
        """Return how many times smaller the error becomes on the half that it is not rounded by."""
        nearest = self.nearest(self.weight)
        before = self.error(nearest, first) + self.error(nearest, second)
        after = self.error(self.rounded(first), second) + self.error(self.rounded(second), first)
        return before / max(after, _NOTHING)

    def nearest(self, values: Tensor) -> Tensor:
        """Return the nearest integers, as floats."""
        return (values / self.step).round_().add_(self.zero_point).clamp_(self.q.low, self.q.high)

    def error(self, integers: Tensor, rows: InputRows) -> float:
        """Return the squared error of the product."""
        return rows.error((integers - self.zero_point) * self.step - self.weight)

    def rounded(self, rows: InputRows) -> Tensor:
        """Return integers, as floats, in the shape of the weight."""
        exact = (self.weight / self.step).add_(self.zero_point).transpose(1, 2)
        parts = [
            _rounded(exact[:, channels], rows.moments(channels), self.q)
            for channels in _together(rows.channels)
        ]
        return torch.cat(parts, dim=1).transpose(1, 2)

    def integers(self, rows: InputRows) -> Tensor:
        """Return the integers in the shape of the parameter."""
        assert self.reader.weight is not None
        result = torch.empty(
            self.reader.weight.shape, dtype=self.q.dtype, device=self.weight.device
        )
        groups, outputs, inputs, taps = self.shape
        found = self.rounded(rows).view(groups, outputs, taps, inputs).transpose(2, 3)
        taps_of(result, self.reader.groups, self.reader.transposed).copy_(found)
        return result


def _together(channels: int) -> list[slice]:
    """Return the channels that are rounded together, as few and as equal parts as can be."""
    parts = -(-channels // MOST_TOGETHER)
    ends = [channels * part // parts for part in range(parts + 1)]
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def _rounded(exact: Tensor, moments: Tensor, q: QParams) -> Tensor:
    """Return integers, as floats, of which each channel makes up for those before it.

    Each is one of the two next to the exact value. Else channels that are quiet in calibration take up
    everything, and what they do on data that wakes them has no bound.

    Args:
        exact: `(groups, channels, rows)` in steps of the integers: what is handed on lies side by side.
        moments: `(groups, channels, channels)`.
    """
    order = moments.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True, stable=True)
    inverse = _inverse_root(_permuted(moments, order))
    channels = order[:, :, None].expand_as(exact)
    left = exact.gather(1, channels)
    inside = left.clamp(q.low, q.high)
    least, most = inside.floor(), inside.ceil()
    found, errors = torch.empty_like(left), torch.empty_like(left)
    relative = inverse / inverse.diagonal(dim1=1, dim2=2)[:, :, None]
    for first in range(0, left.shape[1], _BLOCK):
        last = min(first + _BLOCK, left.shape[1])
        for at in range(first, last):
            integers = left[:, at].round().clamp_(least[:, at], most[:, at])
            error = left[:, at] - integers
            left[:, at + 1 : last] -= relative[:, at, at + 1 : last, None] * error[:, None]
            found[:, at], errors[:, at] = integers, error
        left[:, last:] -= relative[:, first:last, last:].transpose(1, 2) @ errors[:, first:last]
    return torch.empty_like(left).scatter_(1, channels, found)


def _permuted(matrix: Tensor, order: Tensor) -> Tensor:
    rows = matrix.gather(1, order[:, :, None].expand_as(matrix))
    return rows.gather(2, order[:, None].expand_as(matrix))


def _inverse_root(moments: Tensor) -> Tensor:
    """Return the upper triangular `U` with `U' U = H^-1`, for the moments `H` with halved correlations.

    It is computed of the correlations, whose smallest eigenvalue is a half at least: float32 is enough.
    """
    sizes = moments.diagonal(dim1=1, dim2=2).clamp(min=_NOTHING).sqrt()
    shrunk = _CORRELATIONS * moments / (sizes[:, None] * sizes[:, :, None])
    shrunk.diagonal(dim1=1, dim2=2).fill_(1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(shrunk))
    root: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return root / sizes[:, None]
