# SPDX-License-Identifier: Apache-2.0
"""The operator ``mul``, the product of two quantized tensors, in operators of torch that Inductor fuses.

oneDNN's own, ``onednn::qmul``, takes uint8 alone and was wrong by many steps for operands with zero points
(torch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qompose_x86_inductor.onednn.arguments import Output, check_quantized


def mul_in_graph(
    x: Tensor,
    x_scale: float,
    x_zp: int,
    other: Tensor,
    other_scale: float,
    other_zp: int,
    *out: Any,
) -> Tensor:
    """Compute ``qompose_x86::mul``, of any two shapes that broadcast."""
    check_quantized("mul", x, None)
    check_quantized("mul", other, None)
    output = Output(*out).checked("mul")
    product = (x.to(torch.float32) - x_zp) * (other.to(torch.float32) - other_zp)
    return output.quantize(product * (x_scale * other_scale))
