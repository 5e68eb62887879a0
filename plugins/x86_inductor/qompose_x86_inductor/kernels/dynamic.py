# SPDX-License-Identifier: Apache-2.0
"""The call that replaces linears whose input is quantized when they run, with one scale."""

from __future__ import annotations

from typing import Any

import torch
from qompose.backend import DynamicTensor, NotLowerable, Region, kit
from torch.fx import Node

from qompose_x86_inductor.kernels.static import ProductEmitter
from qompose_x86_inductor.onednn.arguments import NAMESPACE
from qompose_x86_inductor.patterns import Activation

_OPS = getattr(torch.ops, NAMESPACE)


class PerTensorEmitter(ProductEmitter):
    """Emits a linear of floats that are dynamically quantized, with one scale for all of them."""

    def __init__(self, activation: Activation | None = None) -> None:
        super().__init__("linear", activation, add=False)

    def __call__(self, region: Region) -> Node:
        """Insert the call; see `qompose.backend.Kernel`.

        Raises:
            NotLowerable: the input is not quantized to uint8 with one scale.
        """
        source = region.dynamic("input")
        if source.dims is not None or source.symmetric or source.dtype is not torch.uint8:
            raise NotLowerable(f"{source.node.name} is not quantized per tensor to affine uint8")
        return region.call(
            _OPS.linear_dynamic.default,
            *_constants(region, source),
            source.low,
            source.high,
            source.eps,
            *self.post_op(region),
        )


def _constants(region: Region, source: DynamicTensor) -> list[Any]:
    weight = region.quantized("weight")
    scales = kit.channel_scales(region, weight)
    return [source.node, weight.node, scales, region.argument("linear", "bias")]
