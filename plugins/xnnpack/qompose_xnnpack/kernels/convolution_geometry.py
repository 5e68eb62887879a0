# SPDX-License-Identifier: Apache-2.0
"""The geometry of a convolution in numbers: stride, padding, dilation, groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from qompose.backend import QuantizedTensor, Region
from torch.fx import Node

_PLAIN = ("stride", "padding", "dilation", "groups")
_TRANSPOSED = ("stride", "padding", "output_padding", "groups", "dilation")


def geometry_of(region: Region, kernel: Sequence[int]) -> tuple[list[Any], list[int]]:
    """Return the geometry of a region's convolution, and the zeros to put around its input besides.

    The geometry is in the order of the operator's arguments. The zeros are those of padding="same" where it
    needs more on one side, in the form of `torch.nn.functional.pad`: last dimension first.
    """
    transposed = "transpose" in str(region.node("op").target)
    names = _TRANSPOSED if transposed else _PLAIN
    geometry = {name: region.argument("op", name) for name in names}
    zeros = [0, 0] * len(kernel)
    if isinstance(geometry["padding"], str):
        zeros, geometry["padding"] = _named_padding(geometry, kernel), [0] * len(kernel)
        before, behind = zeros[::2], zeros[1::2]
        if before == behind:  # the operator itself pads both sides alike
            zeros, geometry["padding"] = [0, 0] * len(kernel), before[::-1]
    return list(geometry.values()), zeros


def _named_padding(geometry: dict[str, Any], kernel: Sequence[int]) -> list[int]:
    """Return the zeros that padding="same" or "valid" puts around, last dimension first."""
    if geometry["padding"] == "valid":
        return [0, 0] * len(kernel)
    dilation = list(geometry["dilation"])
    dilation = dilation * len(kernel) if len(dilation) == 1 else dilation
    totals = [gap * (size - 1) for gap, size in zip(dilation, kernel, strict=True)]
    return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]


def with_padding_operator(region: Region, zeros: Sequence[int]) -> list[int]:
    """Return `zeros` and those that the region's padding operator puts around the input, added up."""
    pads = list(region.argument("pad", "pad"))
    pads += [0] * (len(zeros) - len(pads))
    return [a + b for a, b in zip(zeros, pads, strict=True)]


def padded_input(
    region: Region, source: Node, weight: QuantizedTensor, *zero: int
) -> tuple[Node, list[Any]]:
    """Return what a convolution reads and its geometry, with a padding step inserted where it is needed.

    Args:
        source: the input of the region, of integers or floats.
        zero: the value that stands for zero in `source`: the zero point of integers.
    """
    geometry, zeros = geometry_of(region, weight.tensor.shape[2:])
    if region.has("pad"):
        zeros = with_padding_operator(region, zeros)
    if not any(zeros):
        return source, geometry
    pad = torch.ops.aten.constant_pad_nd.default
    return region.step(pad, source, zeros, *zero), geometry
