# SPDX-License-Identifier: Apache-2.0
"""The calls that replace linears whose input is quantized when they run, with one scale."""

from __future__ import annotations

import operator

import torch
from qompose.backend import NotLowerable, Region, kit
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
        """Insert the calls; see `qompose.backend.Kernel`.

        Raises:
            NotLowerable: the input is not quantized to uint8 with one scale.
        """
        quantized, weight = _quantized(region), region.quantized("weight")
        return region.call(
            _OPS.linear_dynamic.default,
            *quantized,
            weight.node,
            kit.channel_scales(region, weight),
            region.argument("linear", "bias"),
            *self.post_op(region),
        )


def _quantized(region: Region) -> list[Node]:
    """Return integers, scale and zero point of the input, which all linears of that tensor read."""
    source = region.dynamic("input")
    if source.dims is not None or source.symmetric or source.dtype is not torch.uint8:
        raise NotLowerable(f"{source.node.name} is not quantized per tensor to affine uint8")
    bounds = (source.low, source.high, source.eps)
    made = region.shared_step("input", _OPS.quantize_dynamic.default, source.node, *bounds)
    return [region.shared_step("input", operator.getitem, made, place) for place in range(3)]
