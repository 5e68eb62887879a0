# SPDX-License-Identifier: Apache-2.0
"""The quantization parameters that torch's fused fake-quantizer trains with, for those who compare with it.

The formula is that of `ChooseQuantizationParams` in ATen/native/quantized/cpu/QuantUtils.h, in its types.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST_SCALE = 6.1e-5


def fbgemm_qparams(
    minimum: Tensor, maximum: Tensor, low: int, high: int, *, symmetric: bool
) -> tuple[Tensor, Tensor]:
    """Return scale, float32, and zero point, int64, for ranges of shape `()` or `(C,)`.

    With `n = high - low`, a symmetric range that has both signs is stretched to `-(n // 2 + 1)` and `n // 2`
    steps, and its zero point is the middle; one of a single sign is treated as affine. Scales are at least
    6.1e-5, and 6.1e-5 times 127 or so is the least range; a range of zero has the scale 0.1.
    """
    steps = high - low
    both = (minimum < 0) & (maximum > 0) & symmetric
    down, up = -(steps // 2 + 1), steps // 2
    step = torch.maximum((minimum / down).abs(), (maximum / up).abs()).double()
    minimum = torch.where(both, (step * down).float(), minimum).clamp(max=0.0).double()
    maximum = torch.where(both, (step * up).float(), maximum).clamp(min=0.0).double()
    scale = (maximum - minimum) / steps
    none = (scale.float() == 0) | torch.isinf(1.0 / scale.float())
    scale = torch.where(none, 0.1, scale)
    minimum, maximum, scale = _widened(minimum, maximum, scale, steps)
    below, above = minimum / scale, maximum / scale
    from_below = abs(low) - below.abs() < abs(high) - above.abs()
    zero_point = torch.where(from_below, low - below, high - above)
    zero_point = torch.where(both, (low + high) / 2, zero_point)
    return scale.float(), zero_point.clamp(low, high).round().to(torch.int64)


def _widened(
    minimum: Tensor, maximum: Tensor, scale: Tensor, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return range and scale, the range stretched where the scale was too small; an end at zero stays."""
    small = scale < _LEAST_SCALE
    factor = torch.where(small, (_LEAST_SCALE / scale.float()).double(), 1.0)
    span = torch.full_like(scale, _LEAST_SCALE * steps)
    lower = torch.where(small & (minimum != 0) & (maximum == 0), -span, minimum * factor)
    upper = torch.where(small & (minimum == 0), span, maximum * factor)
    return lower.float().double(), upper.float().double(), torch.where(small, _LEAST_SCALE, scale)
