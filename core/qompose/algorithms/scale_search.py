# SPDX-License-Identifier: Apache-2.0
"""Scale search: ranges of weights below eight bits, narrower where clipping a few values serves the others.

With few integers the step is so coarse that the largest value of a channel or a block, for which it has to be
as coarse as it is, may better be clipped. Parts of the range of all values are tried, and for each channel or
block the one of least squared error is taken, without data. The inputs of a product are supposed to have no
correlations, and a mean as large as their deviation: its error is `sum(e^2) + sum(e)^2`. The second term
counts, since what is clipped often lies on one side of 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.interface import Algorithm
from qompose.algorithms.products import NOTHING, NotChanged, check_own_scales, product_node
from qompose.observers.make_observer import make_observer
from qompose.program.graph import constant_of
from qompose.spec.algorithm_choice import SCALE_SEARCH as WORD
from qompose.spec.qdq import QParams, in_rows, integers_of, values_of_integers
from qompose.spec.qparams import in_blocks

_PARTS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)
"""Of the range of all values; the first that is best is taken."""


class ScaleSearch(Algorithm):
    """Searches the ranges of weights whose claims ask for it, or are below eight bits and ask for nothing."""

    word = WORD

    def choose_qparams(self, found: Calibrated, number: int, q: QParams) -> QParams | None:
        plan = found.plan
        weight = found.nodes[plan.groups[number].points[0].source]
        claims = [plan.claims[claim] for claim in plan.groups[number].claims]
        if constant_of(weight) is None or not all(map(self.is_wanted, claims)):
            return None
        try:
            check_own_scales(found, number)
            products = all(product_node(claim, found.nodes) is not None for claim in claims)
            chosen, gain = _searched(found, number, q, is_product=products)
        except NotChanged as reason:
            if any(map(self.is_asked, claims)):
                found.refused.append(f"{self.word} of {weight.target} was not made: {reason}")
            return None
        found.made.append(
            f"{self.word} of {weight.target}: squared error {gain:.2f} times smaller than with the range of "
            "all values"
        )
        return chosen

    def correct(self, found: Calibrated) -> None:
        """Say which weights that were asked for have no scale."""
        plan = found.plan
        for group in plan.groups:
            dtype = getattr(group.spec, "dtype", None)
            weight = found.nodes[group.points[0].source]
            asked = any(self.is_asked(plan.claims[claim]) for claim in group.claims)
            if (
                asked
                and dtype is not None
                and dtype.is_floating_point
                and constant_of(weight) is not None
            ):
                reason = f"it is stored as {dtype}, which has no scale"
                found.refused.append(f"{self.word} of {weight.target} was not made: {reason}")


def _searched(
    found: Calibrated, number: int, q: QParams, *, is_product: bool
) -> tuple[QParams, float]:
    """Return the parameters of least error, and how many times smaller that is.

    Raises:
        NotChanged: the range of all values is best.
    """
    group = found.plan.groups[number]
    weight = found.factors.constant(group.points[0].source)
    in_parts = q.blocks or q.axis == 0
    parts = _rows(weight, q) if in_parts else [weight]
    pieces = [_best(part, q, group.spec, is_product) for part in parts]
    scales, zero_points, before, after = zip(*pieces, strict=True)
    if not sum(after) < sum(before):
        raise NotChanged("no narrower range has a smaller error")
    scale, zero_point = (torch.cat(p) if in_parts else p[0] for p in (scales, zero_points))
    return replace(q, scale=scale, zero_point=zero_point), sum(before) / max(sum(after), NOTHING)


def _rows(weight: Tensor, q: QParams) -> Iterator[Tensor]:
    """Yield a weight in parts of some rows that share no scale, so that no large copy is ever held."""
    block = weight.shape[0] // q.scale.shape[0] if q.blocks and weight.numel() else 1
    yield from (rows for _, _, rows in in_rows(weight, multiple=block))


def _best(
    values: Tensor, q: QParams, spec: Any, is_product: bool
) -> tuple[Tensor, Tensor, float, float]:
    """Return scale and zero point of least error, the error of the range of all values, and the least."""
    observer: Any = make_observer(spec)
    observer(values)

    def tried(part: float) -> tuple[Tensor, Tensor, Tensor]:
        scale, zero_point = observer.qparams_of_part(part)
        now = replace(q, scale=scale, zero_point=zero_point)
        off = values_of_integers(integers_of(values, now), now) - values.float()
        error = _of_scales(off.square(), now)
        return scale, zero_point, error + is_product * _of_scales(off, now).square()

    best = tried(1.0)
    before = best[2].sum()
    for found in map(tried, _PARTS):
        better = found[2] < best[2]
        scale, zero_point, error = (
            torch.where(better, *two) for two in zip(found, best, strict=True)
        )
        best = scale, zero_point, error
    return best[0], best[1], float(before), float(best[2].sum())


def _of_scales(values: Tensor, q: QParams) -> Tensor:
    """Return sums over the values of each scale, in the shape of the scales."""
    if q.blocks:
        sizes = tuple(n // k for n, k in zip(values.shape, q.scale.shape, strict=True))
        return in_blocks(values, sizes).sum(tuple(range(1, 2 * values.dim(), 2)))
    if q.axis is None:
        return values.sum().view(q.scale.shape)
    return values.sum([dim for dim in range(values.dim()) if dim != q.axis % values.dim()])
