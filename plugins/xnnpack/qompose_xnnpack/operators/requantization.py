# SPDX-License-Identifier: Apache-2.0
"""The rescaling of int32 accumulators to int8, as XNNPACK rounds it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from qompose.backend import kit
from torch import Tensor


class StaticProduct(NamedTuple):
    """The arguments that every static linear and convolution begins with: an int8 input and constants.

    ``w_scale``: float32 ``(O,)`` or ``(1,)``; ``bias``: float32 ``(O,)``.
    """

    x: Tensor
    x_scale: float
    x_zp: int
    weight: Tensor
    w_scale: Tensor
    bias: Tensor | None

    @classmethod
    def read(cls, arguments: Sequence[Any]) -> tuple[StaticProduct, Sequence[Any]]:
        """Return the record of an operator's arguments, and those behind: geometry, then the output."""
        return cls(*arguments[:6]), arguments[6:]

    def finished(self, total: Tensor, depth: int, out: Sequence[Any]) -> Tensor:
        """Add the bias to ``total: int32 (N, O, ...)``, whose channels are on axis 1, and rescale the sum.

        ``depth``: the most products in a sum; ``out``: scale, zero point and clamp of the output.
        """
        unit = self.w_scale.to(torch.float32) * self.x_scale  # of one count of the accumulator
        along_channels = (-1,) + (1,) * (total.dim() - 2)
        if self.bias is not None:
            total = total.add_(_int_bias(self.bias, unit, depth).view(along_channels))
        out_scale, *limits = out
        return kit.requantize(total, (unit / out_scale).view(along_channels), *limits)


def _int_bias(bias: Tensor, unit: Tensor, depth: int) -> Tensor:
    """Return float32 ``bias: (O,)`` as int32 counts of ``unit = x_scale * w_scale``, like ExecuTorch's.

    It saturates early enough that adding ``depth`` products cannot wrap around int32.
    """
    limit = 2**31 - 1 - depth * 255 * 128
    steps = (bias.to(torch.float32) * (1.0 / unit)).round_().to(torch.float64)
    return steps.clamp_(-limit, limit).to(torch.int32)


def quantized_bound(value: float, scale: float, zero_point: int) -> int:
    """Return the integer that XNNPACK clamps to for a real bound of an int8 tensor.

    This holds for an activation fused behind a linear or a convolution, plain or transposed, and for
    a clamp, hardtanh or relu between equal scales (run on executorch 1.5.1). In float32:
    ``round(clamp(value / scale + zero_point, -128, 127))``, ties to even. The zero point is added
    before rounding, so the result is not always what ``quantize_per_tensor`` gives: there, ties and
    quotients that a product with ``1 / scale`` misses by a hair go the other way. Behind a sum, a
    difference or a product ExecuTorch fuses no hardtanh, and computes both in float.

    ``value`` may be infinite. Raises ``ValueError`` where it is not a number.
    """
    if math.isnan(value):
        raise ValueError("a bound of a clamp is not a number")
    steps = torch.tensor(value, dtype=torch.float32) / torch.tensor(scale, dtype=torch.float32)
    return int((steps + zero_point).clamp(-128, 127).round())
