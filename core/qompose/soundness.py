# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the parameters that calibration gave: unusable ones, and suspicious statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from qompose.schemes import QParams
from qompose.screening import Screen

FAR_FROM_TYPICAL = 1000.0
"""How many times the median a tensor's scale or magnitude is that has an outlier, or a mask."""
_FEW_VALUES = 64


def unusable(q: QParams, shape: tuple[int, ...]) -> Iterator[str]:
    """Yield what makes parameters unusable for a tensor of a shape."""
    wanted = 1 if q.per_tensor else None if q.axis is None else shape[q.axis]
    if wanted is not None and not q.scale.numel() == q.zero_point.numel() == wanted:
        yield f"has {q.scale.numel()} scales and {q.zero_point.numel()} zero points, not {wanted}"
    elif wrong := _those(q.scale, torch.isfinite(q.scale) & (q.scale > 0)):
        yield f"has the scale {wrong}, which is not positive and finite"
    elif wrong := _those(q.zero_point, torch.isfinite(q.zero_point.double())):
        yield f"has the zero point {wrong}"
    elif not q.zero_point.is_floating_point() and (
        wrong := _those(q.zero_point, (q.zero_point >= q.low) & (q.zero_point <= q.high))
    ):
        yield f"has the zero point {wrong}, outside [{q.low}, {q.high}]"


def _those(values: Tensor, good: Tensor) -> str:
    """Return the first of the values that are not good, and of how many; "" where all are."""
    bad = values[~good].flatten().tolist()
    return (
        f"{bad[0]:g}{f' ({len(bad)} of {values.numel()})' if values.numel() > 1 else ''}"
        if bad
        else ""
    )


def coarse(q: QParams, minimum: Tensor, maximum: Tensor, eps: float) -> str:
    """Return how many channels take up few of the integers, because of `eps`; "" where none does.

    Where zero points are no integers, a channel takes up all of them unless its scale would be below `eps`.
    Other engines' observers then take the scale 1, and leave one integer.
    """
    if not q.zero_point.is_floating_point() or q.per_tensor:
        return ""
    spread, steps = maximum - minimum, q.high - q.low
    few = int(((spread > 0) & (spread < q.scale * steps / 4)).sum())
    if not few:
        return ""
    return (
        f"{few} of {spread.numel()} channels take up less than a quarter of the {steps + 1} integers, since "
        f"{eps:g}, the eps of their observer, is more than their scale would be: give it a smaller eps"
    )


def suspicious(scale: float, typical: float, screen: Screen | None, eps: float) -> Iterator[str]:
    """Yield what looks wrong with an activation's statistics, though its scale can be used."""
    if screen is not None and screen.values:
        if screen.bulk == 0 and screen.mask is None and screen.far == -math.inf:
            yield "was zero throughout calibration"
        elif scale == eps and screen.bulk < eps * 127:
            yield f"has values of at most {screen.bulk:g}, and its scale was raised to the eps {eps:g}"
        if screen.values < _FEW_VALUES:
            yield f"was calibrated with {screen.values} values"
    if scale > FAR_FROM_TYPICAL * typical:
        yield f"has the scale {scale:g}, the typical one is {typical:g}: an outlier or a mask?"
