# SPDX-License-Identifier: Apache-2.0
"""Transposed convolutions as convolutions, the only form that ONNX Runtime computes in int8.

With stride s, the outputs o of equal (o + padding) % s are a convolution of the input by every s-th value of
the kernel. One convolution gives all of them, as s times as many channels, and its integers are laid out side
by side: the sub-pixel convolution of Shi et al. (2016), arXiv:1609.05158, and of its note arXiv:1609.07009.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from qompose.backend import NotLowerable, Region, kit
from torch import Tensor
from torch.fx import Node

from qompose_onnx.regions import before_op, behind, called, dequantized_constant, for_runtimes, held

aten = torch.ops.aten
_CONVOLUTIONS = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}


def as_convolution(region: Region) -> None:
    """Rewrite the region of a transposed convolution in place.

    Raises:
        NotLowerable: its input or weight arrives in float, or its weight or bias is computed.
    """
    op, geometry = region.node("op"), kit.geometry_of(region)
    kernel = region.inputs("weight")[0].meta["val"].shape[2:]
    spans = [d * (n - 1) + 1 for d, n in zip(geometry.dilation, kernel, strict=True)]
    taps = [math.ceil(n / s) for n, s in zip(spans, geometry.stride, strict=True)]
    more = _added(geometry, spans, taps)
    around = [tap - 1 + added for tap, added in zip(taps, more, strict=True)]
    source, ones = region.inputs("input")[0], [1] * len(taps)
    read, bias = _weight(region, geometry, taps), _bias(region, math.prod(geometry.stride))
    args = (source, read, bias, ones, around, ones, geometry.groups)
    draft = region.step(_CONVOLUTIONS[len(taps)], *args)
    for node in {op, region.output_node}:
        node.meta["val"] = draft.meta["val"]
    op.target, op.args, op.kwargs = draft.target, args, {}
    op.graph.erase_node(draft)
    cuts = _cuts(geometry, spans, taps, more)
    behind(region, lambda end: _side_by_side(end, geometry.stride, cuts))
    for_runtimes(region)  # last: it may remove the output's activation


def _added(geometry: kit.Geometry, spans: list[int], taps: list[int]) -> list[int]:
    """Return the zeros on each side without which the last outputs, of `output_padding`, would be missing."""
    return [
        max(0, (span + end - padding - 1) // stride - tap + 1)
        for span, end, padding, stride, tap in zip(
            spans, geometry.output_padding or [], geometry.padding, geometry.stride, taps,
            strict=True,
        )
    ]  # fmt: skip


def _cuts(
    geometry: kit.Geometry, spans: list[int], taps: list[int], more: list[int]
) -> list[tuple[int, int]]:
    """Return how many values there are too many before and after the output, in each dimension."""
    found = []
    for place, (stride, tap, added) in enumerate(zip(geometry.stride, taps, more, strict=True)):
        padding, end = geometry.padding[place], (geometry.output_padding or [])[place]
        first = padding + added * stride
        # of an input of no values, which all sizes exceed alike
        made, wanted = (tap - 1 + 2 * added) * stride, spans[place] - stride - 2 * padding + end
        found.append((first, made - first - wanted))
    return found


def _weight(region: Region, geometry: kit.Geometry, taps: list[int]) -> Node:
    """Return what dequantizes the weight of the convolution."""
    weight = region.quantized("weight")
    scales = weight.scales
    if len(scales) > 1:  # groups share them
        scales = scales.repeat(geometry.groups).repeat_interleave(math.prod(geometry.stride))
    return dequantized_constant(
        region, f"{weight.node.target}_plain", plain_weight(weight.tensor, geometry, taps), scales,
        (weight.low, weight.high, weight.dtype),
    )  # fmt: skip


def plain_weight(value: Tensor, geometry: kit.Geometry, taps: list[int]) -> Tensor:
    """Return the weight `(out * strides, in / groups, *taps)` of one `(in, out / groups, *kernel)`.

    Channel `c * strides + r` gives the outputs of channel c at places with the remainder r.
    """
    dims, groups = len(taps), geometry.groups
    across, out = value.shape[0] // groups, value.shape[1]
    lengths = [tap * stride for tap, stride in zip(taps, geometry.stride, strict=True)]
    spread = value.new_zeros(groups, across, out, *lengths)
    ends = zip(geometry.dilation, value.shape[2:], strict=True)
    places = tuple(slice(0, gap * (size - 1) + 1, gap) for gap, size in ends)
    everywhere: Any = (..., *places)
    spread[everywhere] = value.reshape(groups, across, out, *value.shape[2:])
    split = [n for pair in zip(taps, geometry.stride, strict=True) for n in pair]
    tap_dims, phase_dims = range(3, 3 + 2 * dims, 2), range(4, 4 + 2 * dims, 2)
    found = spread.reshape(groups, across, out, *split).flip([*tap_dims])
    found = found.permute(0, 2, *phase_dims, 1, *tap_dims)
    return found.reshape(groups * out * math.prod(geometry.stride), across, *taps).contiguous()


def _bias(region: Region, phases: int) -> Node | None:
    bias = region.argument("op", "bias")
    if bias is None:
        return None
    value = held(region, bias)
    if value is None:
        raise NotLowerable(f"{bias.name} is computed at run time; this kernel requires a constant")
    repeated = value.repeat_interleave(phases)
    return before_op(region, region.constant(f"{bias.target}_plain", repeated))


def _side_by_side(end: Node, strides: list[int], cuts: list[tuple[int, int]]) -> Node:
    """Lay out channels `(N, C * strides, ...)` as `(N, C, ...)`, without the values that are too many."""
    dims, phases = len(strides), math.prod(strides)
    found = end
    if dims == 2 and strides[0] == strides[1] > 1:  # ONNX has an operator for it
        found = called(aten.pixel_shuffle.default, found, strides[0])
    elif phases > 1:
        channels = end.meta["val"].shape[1] // phases
        found = called(aten.unflatten.int, found, 1, [channels, *strides])
        order = [n for dim in range(dims) for n in (2 + dims + dim, 2 + dim)]
        found = called(aten.permute.default, found, [0, 1, *order])
        for dim in range(2, 2 + dims):
            found = called(aten.flatten.using_ints, found, dim, dim + 1)
    for dim, (first, last) in enumerate(cuts, 2):
        if first or last:
            found = called(aten.slice.Tensor, found, dim, first, -last if last else 2**63 - 1)
    return found
