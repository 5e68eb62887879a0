# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the parameters that calibration gave: unusable ones, and suspicious statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from qompose.schemes import QParams
from qompose.screening import Screen

_FAR_FROM_TYPICAL, _FEW_VALUES = 1000.0, 64


def unusable(q: QParams, shape: tuple[int, ...]) -> Iterator[str]:
    """Yield what makes parameters unusable for a tensor of a shape."""
    wanted = 1 if q.per_tensor else None if q.axis is None else shape[q.axis]
    if wanted is not None and not q.scale.numel() == q.zero_point.numel() == wanted:
        yield f"has {q.scale.numel()} scales and {q.zero_point.numel()} zero points, not {wanted}"
    elif not bool((torch.isfinite(q.scale) & (q.scale > 0)).all()):
        yield f"has the scale {q.scale.tolist()}, which is not positive and finite"
    elif not bool(torch.isfinite(q.zero_point.double()).all()):
        yield f"has the zero point {q.zero_point.tolist()}"
    elif not q.zero_point.is_floating_point() and not bool(
        ((q.zero_point >= q.low) & (q.zero_point <= q.high)).all()
    ):
        yield f"has the zero point {q.zero_point.tolist()}, outside [{q.low}, {q.high}]"


def suspicious(scale: float, typical: float, screen: Screen | None, eps: float) -> Iterator[str]:
    """Yield what looks wrong with an activation's statistics, though its scale can be used."""
    if screen is not None and screen.values:
        if screen.bulk == 0 and screen.mask is None and screen.far == -math.inf:
            yield "was zero throughout calibration"
        elif scale == eps and screen.bulk < eps * 127:
            yield f"has values of at most {screen.bulk:g}, and its scale was raised to the eps {eps:g}"
        if screen.values < _FEW_VALUES:
            yield f"was calibrated with {screen.values} values"
    if scale > _FAR_FROM_TYPICAL * typical:
        yield f"has the scale {scale:g}, the typical one is {typical:g}: an outlier or a mask?"
