# SPDX-License-Identifier: Apache-2.0
"""Kernels of the sound backend that read two inputs, or literals. They can be told to go wrong in one way."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from qompose.backend import Kernel, OperatorPattern, Pattern, Region, Rule
from torch import Tensor
from torch.fx import Node

from tests.core.sound_backend import ACCEPTS, float32

aten = torch.ops.aten


def steps(y: Tensor, scale: float, zero_point: int, low: int, high: int) -> Tensor:
    return (torch.round(y / scale) + zero_point).clamp(low, high).to(torch.int8)


@torch.library.custom_op("qompose_sound::matmul", mutates_args=())
def sound_matmul(
    a: Tensor, a_scale: float, a_zero: int, b: Tensor, b_scale: float, b_zero: int,
    scale: float, zero_point: int, low: int, high: int,
) -> Tensor:  # fmt: skip
    """The product, exactly."""
    real = torch.matmul(a.double() - a_zero, b.double() - b_zero) * (a_scale * b_scale)
    return steps(real, scale, zero_point, low, high)


@sound_matmul.register_fake
def _(a: Tensor, a_scale: float, a_zero: int, b: Tensor, *rest: Any) -> Tensor:
    return torch.matmul(a.float(), b.float()).to(torch.int8)


def matmul(fault: str = "") -> Rule:
    """The rule; `fault` says which parameters its kernel confuses."""

    def emit(region: Region) -> Node:
        a, b, out = (region.quantized(role) for role in ("self", "other", "output"))
        first, second = (a.scale, a.zero_point), (b.scale, b.zero_point)
        if fault == "swapped":
            first, second = (a.scale, b.zero_point), (b.scale, a.zero_point)
        if fault == "first for both":
            second = first
        return region.call(
            torch.ops.qompose_sound.matmul.default, a.node, *first, b.node, *second,
            out.scale, out.zero_point, out.low, out.high, dtype=out.dtype,
        )  # fmt: skip

    return Rule(
        name="matmul", patterns=(OperatorPattern((aten.matmul.default,)),), activations=("self", "other"),
        accepts={role: ACCEPTS[role] for role in ("activation", "output")}, guard=float32,
        kernels={"torch": Kernel("sound.matmul", emit)},
    )  # fmt: skip


@torch.library.custom_op("qompose_sound::conv1d", mutates_args=())
def sound_conv1d(
    x: Tensor, x_scale: float, x_zero: int, weight: Tensor, scales: Tensor, stride: int, padding: int,
    dilation: int, groups: int, scale: float, zero_point: int, low: int, high: int, pads_zero: bool,
) -> Tensor:  # fmt: skip
    """The convolution, exactly. It pads with the integer zero where `pads_zero`, which is wrong."""
    if pads_zero:
        x, padding = F.pad(x, (padding, padding)), 0
    sums = F.conv1d(x.double() - x_zero, weight.double(), None, stride, padding, dilation, groups)
    return steps(sums * scales.double()[:, None] * x_scale, scale, zero_point, low, high)


@sound_conv1d.register_fake
def _(
    x: Tensor, x_scale: float, x_zero: int, weight: Tensor, scales: Tensor, stride: int, padding: int,
    dilation: int, groups: int, *rest: Any,
) -> Tensor:  # fmt: skip
    product = F.conv1d(x.float(), weight.float(), None, stride, padding, dilation, groups)
    return product.to(torch.int8)


def conv(fault: str = "") -> Rule:
    """The rule; `fault` names a literal that its kernel does not read, or the padding."""

    def emit(region: Region) -> Node:
        x, weight, out = (region.quantized(role) for role in ("input", "weight", "output"))
        known = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
        given = {name: region.argument("op", name) for name in known if name != fault}
        literals = [v[0] if isinstance(v, (list, tuple)) else v for v in (known | given).values()]
        return region.call(
            torch.ops.qompose_sound.conv1d.default, x.node, x.scale, x.zero_point, weight.node,
            region.constant("scales", weight.scales), *literals,
            out.scale, out.zero_point, out.low, out.high, fault == "pads zero", dtype=out.dtype,
        )  # fmt: skip

    pattern = Pattern(
        lambda input, weight: F.conv1d(input, weight),
        ((2, 4, 9), (6, 4, 3)),
        (("op", aten.conv1d.default),),
    )
    return Rule(
        name="conv1d", patterns=(pattern,), anchor="op", weight="weight", accepts=ACCEPTS, guard=float32,
        kernels={"torch": Kernel("sound.conv1d", emit)},
    )  # fmt: skip
