# SPDX-License-Identifier: Apache-2.0
"""The guards of the rules: what XNNPACK requires of shapes and literals."""

from __future__ import annotations

from typing import Any

import torch
from qompose.backend import Match, kit


def not_depthwise(match: Match) -> str | None:
    """XNNPACK has no dynamic depthwise convolution.

    ExecuTorch calls a convolution so, plain or transposed, if it has one input channel per group, even in a
    single group.
    """
    groups, weight = match.argument("op", "groups"), kit.shape_of(match.node("weight"))
    operator = match.node("op")
    transposed = operator is not None and "transpose" in str(operator.target)
    if (weight[0] // groups if transposed else weight[1]) == 1:
        return "XNNPACK has no dynamic convolution with one input channel, or one per group"
    return None


def not_pointwise(match: Match) -> str | None:
    """A rule with a range per image does not match what XNNPACK computes with one per pixel.

    It runs a convolution by one pixel as a linear over the channels, whatever its dilation, but not with
    a stride, padding or groups (executorch 1.5.1). An image of one pixel is the same either way.
    """
    padding = match.argument("op", "padding")
    # "same" and "valid" pad nothing for a kernel of one pixel
    around = [0] if isinstance(padding, str) else padding
    moved = match.argument("op", "groups") > 1 or any(around)
    if moved or any(step > 1 for step in kit.sizes(match.argument("op", "stride"), 2)):
        return None
    if _one_pixel(match, "input") or not _one_pixel(match, "weight"):
        return None
    return (
        "XNNPACK quantizes each pixel of a pointwise convolution separately, which the graph "
        "cannot express; keep it static, or write it as a linear over the channels"
    )


def _one_pixel(match: Match, name: str) -> bool:
    """Whether what is behind the first two dimensions is known to be one pixel."""
    spatial = kit.shape_of(match.node(name))[2:]
    return all(isinstance(size, int) and size == 1 for size in spatial)


def output_padding_below_stride(match: Match) -> str | None:
    """A transposed convolution of XNNPACK fails at run time where torch's, dilated, would not."""
    names = ("stride", "output_padding")
    stride, extra = (kit.sizes(match.argument("op", name), 2) for name in names)
    if all(more < step for more, step in zip(extra, stride, strict=True)):
        return None
    return f"its output_padding {extra} must be less than its stride {stride} for XNNPACK"


def not_scalar(match: Match) -> str | None:
    """XNNPACK takes a quantized tensor without dimensions as a constant alone (executorch 1.5.1)."""
    for name in ("self", "other"):
        node = match.node(name)
        if node is not None and node.op != "get_attr" and not kit.shape_of(node):
            return f"{name} has no dimensions, which XNNPACK supports only for constants"
    return None


def mean_over_image(match: Match) -> str | None:
    """XNNPACK averages over height and width of an image."""
    dims: Any = match.captures.get("dim")
    if not isinstance(dims, (list, tuple)):
        return "it is a mean over all elements"
    if {dim % 4 for dim in dims} != {2, 3}:
        return "only means over height and width of an image run in int8"
    if match.argument("output", "dtype") is not None:
        return "the mean has another output dtype"
    return None


def global_average(match: Match) -> str | None:
    """XNNPACK computes an average pooling in int8 only if its one window is the image."""
    size = kit.shape_of(match.node("self"))
    kernel = kit.sizes(match.argument("output", "kernel_size"), 2)
    padding = kit.sizes(match.argument("output", "padding"), 2)
    divisor = match.argument("output", "divisor_override")
    whole = len(size) == 4 and list(size[2:]) == kernel and padding == [0, 0]
    if whole and divisor in (None, kernel[0] * kernel[1]):
        return None
    return "XNNPACK averages windows in float, except for a window of the whole image"


def to_one_pixel(match: Match) -> str | None:
    """ExecuTorch turns an adaptive pooling into a mean only if one value per channel remains."""
    size: Any = match.captures.get("output_size")
    one = list(size) in ([1], [1, 1])
    return None if one else f"adaptive pooling to {size} has no int8 kernel"


def pooling_window(match: Match) -> str | None:
    """XNNPACK's windows leave no gaps, and its `ceil_mode` requires known sizes."""
    kernel = kit.sizes(match.argument("output", "kernel_size"), 2)
    stride = kit.sizes(match.argument("output", "stride") or kernel, 2)
    if any(step > size for step, size in zip(stride, kernel, strict=True)):
        return (
            f"windows of {kernel} with stride {stride} leave gaps, which XNNPACK does not support"
        )
    if match.argument("output", "ceil_mode") and _has_unknown_size(match):
        return "XNNPACK does not support ceil_mode with sizes known only at run time"
    return None


def _has_unknown_size(match: Match) -> bool:
    """Whether a size of the output is known only at run time."""
    return any(isinstance(size, torch.SymInt) for size in kit.shape_of(match.output))
