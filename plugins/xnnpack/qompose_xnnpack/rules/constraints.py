# SPDX-License-Identifier: Apache-2.0
"""The quantization that XNNPACK accepts in each role of an operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from qompose.backend import TensorConstraint

GROUP_SIZES = (32, 64, 128, 256)
"""Sizes of int4 groups: XNNPACK packs multiples of 32 (executorch 1.5.1)."""

# ExecuTorch's serializer drops narrower bounds of activations silently: they are rejected here.
INT8 = TensorConstraint(
    dtypes=frozenset({torch.int8}),
    qschemes=frozenset({torch.per_tensor_affine}),
    quant_range=(-128, 127),
)
WEIGHT = TensorConstraint(
    dtypes=frozenset({torch.int8}),
    qschemes=frozenset({torch.per_channel_symmetric, torch.per_tensor_symmetric}),
    ch_axis=0,
    quant_min_lower_bound=-127,
)
PER_TENSOR = replace(WEIGHT, qschemes=frozenset({torch.per_tensor_symmetric}), ch_axis=None)
PER_CHANNEL = replace(WEIGHT, qschemes=frozenset({torch.per_channel_symmetric}))
GROUPS = replace(
    PER_CHANNEL,
    ch_axis=None,
    quant_min_lower_bound=None,
    quant_range=(-8, 7),
    block_sizes=frozenset((size,) for size in GROUP_SIZES),
)


def static(weight: TensorConstraint = WEIGHT) -> Mapping[str, TensorConstraint]:
    """Return the constraints of an operator whose scales are known from calibration."""
    return {"activation": INT8, "output": INT8, "weight": weight}


def dynamic(weight: TensorConstraint, *, dims: int | None = 1) -> Mapping[str, TensorConstraint]:
    """Return the constraints of an operator whose activation is quantized when the model runs.

    One scale and zero point hold for the last `dims` dimensions, or for the whole tensor if it is None.
    """
    if dims is None:
        return {"activation": INT8, "weight": weight}
    activation = replace(
        INT8,
        qschemes=frozenset({torch.per_channel_affine}),
        block_sizes=frozenset({(-1,) * dims}),
    )
    return {"activation": activation, "weight": weight}
