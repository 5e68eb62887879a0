# SPDX-License-Identifier: Apache-2.0
"""The calls that replace recurrent layers whose matrices are quantized."""

from __future__ import annotations

from typing import Any, Final

import torch
from qompose.backend import Kernel, Region, kit
from torch.fx import Node

from qompose_x86_inductor import operators as _operators  # noqa: F401 - registers
from qompose_x86_inductor.onednn.arguments import NAMESPACE

_OPS: Final = getattr(torch.ops, NAMESPACE)
_KEPT: Final = ("has_biases", "num_layers", "bidirectional", "batch_first")


def kernel_of(name: str) -> Kernel:
    """Return the kernel of "lstm" or "gru"."""
    target = getattr(_OPS, name).default

    def emit(region: Region) -> Node:
        weights = region.quantized_inputs("params")
        scales = [kit.channel_scales(region, weight) for weight in weights]
        matrices = dict(zip(region.inputs("params"), (w.node for w in weights), strict=True))
        params: Any = region.argument("output", "params")
        integers = [matrices.get(parameter, parameter) for parameter in params]
        inputs = [region.argument("output", name) for name in ("input", "hx")]
        rest = [region.argument("output", name) for name in _KEPT]
        return region.call(target, *inputs, integers, scales, *rest)

    return Kernel(f"{NAMESPACE}.{name}", emit, float_output=True, float_arithmetic=True)
