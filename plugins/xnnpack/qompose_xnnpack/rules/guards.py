# SPDX-License-Identifier: Apache-2.0
"""The guards of the rules: what XNNPACK requires of shapes and literals."""

from __future__ import annotations

from typing import Any

import torch
from qompose.backend import Guard, Match

from qompose_xnnpack.operators.integer_matmul import MAX_DEPTH


def float32(match: Match) -> str | None:
    """XNNPACK's quantized operators compute what is float32 in the model."""
    dtype = match.output.meta["val"].dtype
    if dtype is torch.float32:
        return None
    return f"XNNPACK's int8 operators stand for float32, not {dtype}"


def rank(name: str, wanted: int) -> Guard:
    """The input `name` must have `wanted` dimensions."""

    def guard(match: Match) -> str | None:
        shape = _shape(match, name)
        if len(shape) == wanted:
            return float32(match)
        return (
            float32(match) or f"{name} has {len(shape)} dimensions, and the kernel takes {wanted}"
        )

    return guard


def no_overflow(match: Match) -> str | None:
    """The sum of products must fit the 32 bits in which it is accumulated."""
    weight, transposed = _shape(match, "weight"), _transposed(match)
    depth = 1
    for dim, size in enumerate(weight):
        depth *= size if dim != int(transposed) else 1
    if transposed:
        depth //= match.argument("op", "groups")
    if depth <= MAX_DEPTH:
        return None
    return f"a sum of {depth} products may overflow int32; at most {MAX_DEPTH} are safe"


def one_group(match: Match) -> str | None:
    """XNNPACK has scales per output channel of a transposed convolution for one group only."""
    groups = match.argument("op", "groups")
    if groups == 1:
        return None
    return f"it has {groups} groups, for which XNNPACK takes static per-tensor weights alone"


def several_groups(match: Match) -> str | None:
    """The counterpart of ``one_group``."""
    return "it has one group" if match.argument("op", "groups") == 1 else None


def not_depthwise(match: Match) -> str | None:
    """XNNPACK has no dynamic depthwise convolution.

    ExecuTorch calls a convolution so, plain or transposed, if it has one input channel per group, even in a
    single group.
    """
    groups, weight = match.argument("op", "groups"), _shape(match, "weight")
    channels = weight[0] // groups if _transposed(match) else weight[1]
    if channels == 1:
        return "XNNPACK has no dynamic convolution of one input channel, or of one per group"
    return None


def not_pointwise(match: Match) -> str | None:
    """A rule with a range per image does not match what XNNPACK computes with one per pixel.

    It runs a convolution by one pixel as a linear over the channels, whatever its dilation, but not with
    a stride, padding or groups (executorch 1.5.1). An image of one pixel is the same either way.
    """
    padding = match.argument(
        "op", "padding"
    )  # "same" and "valid" pad nothing for a kernel of one pixel
    around = [0] if isinstance(padding, str) else padding
    moved = match.argument("op", "groups") > 1 or any(around)
    if moved or any(step > 1 for step in _pair(match.argument("op", "stride"))):
        return None
    if _one_pixel(_shape(match, "input")) or not _one_pixel(_shape(match, "weight")):
        return None
    return (
        "XNNPACK quantizes each pixel of a pointwise convolution by itself, which the graph cannot "
        "say; keep it static, or write it as a linear over the channels"
    )


def _one_pixel(shape: tuple[Any, ...]) -> bool:
    """Whether what is behind the first two dimensions is known to be one pixel."""
    return all(isinstance(size, int) and size == 1 for size in shape[2:])


def output_padding_below_stride(match: Match) -> str | None:
    """A transposed convolution of XNNPACK fails at run time where torch's, dilated, would not."""
    stride, extra = (_pair(match.argument("op", name)) for name in ("stride", "output_padding"))
    if all(more < step for more, step in zip(extra, stride, strict=True)):
        return None
    return f"its output_padding {extra} is not below its stride {stride}, which XNNPACK demands"


def _transposed(match: Match) -> bool:
    operator = match.node("op")
    return operator is not None and "transpose" in str(operator.target)


def spatial_zero_padding(match: Match) -> str | None:
    """Only zeros around height and width become part of a convolution."""
    pads, value = match.argument("pad", "pad"), match.argument("pad", "value")
    spatial = len(_shape(match, "input")) - 2
    if not _pads_with_a_constant(match) or value not in (None, 0):
        return "only padding with zeros becomes a part of the convolution"
    if not all(isinstance(n, int) and n >= 0 for n in pads):
        return "padding that crops, or of sizes known at run time, is not part of the convolution"
    if any(pads[2 * spatial :]):
        return "padding along batch or channels is not part of the convolution"
    return None


def _pads_with_a_constant(match: Match) -> bool:
    pad = match.node("pad")
    constant = pad is not None and pad.target is torch.ops.aten.constant_pad_nd.default
    return constant or match.argument("pad", "mode") == "constant"


def without_alpha(match: Match) -> str | None:
    """XNNPACK adds and subtracts without the factor `alpha`."""
    factors = [node.kwargs["alpha"] for node in match.nodes if "alpha" in node.kwargs]
    return (
        "the second operand is scaled by alpha" if any(f != 1 for f in factors) else float32(match)
    )


def not_scalar(match: Match) -> str | None:
    """XNNPACK takes a quantized tensor without dimensions as a constant alone (executorch 1.5.1)."""
    for name in ("self", "other"):
        node = match.node(name)
        if node is not None and node.op != "get_attr" and not _shape(match, name):
            return f"{name} has no dimensions, which XNNPACK takes of constants alone"
    return None


def mean_over_image(match: Match) -> str | None:
    """XNNPACK averages over height and width of an image."""
    wrong_rank = rank("self", 4)(match)
    dims: Any = match.captures.get("dim")
    if wrong_rank or not isinstance(dims, (list, tuple)):
        return wrong_rank or "the mean is over everything"
    if {dim % 4 for dim in dims} != {2, 3}:
        return "only means over height and width of an image run in int8"
    if match.argument("output", "dtype") is not None:
        return "the mean is asked for in another dtype"
    return None


def global_average(match: Match) -> str | None:
    """XNNPACK computes an average pooling in int8 only if its one window is the image."""
    size = _shape(match, "self")
    kernel = _pair(match.argument("output", "kernel_size"))
    padding = _pair(match.argument("output", "padding"))
    divisor = match.argument("output", "divisor_override")
    whole = len(size) == 4 and list(size[2:]) == kernel and padding == [0, 0]
    if whole and divisor in (None, kernel[0] * kernel[1]):
        return float32(match)
    return "XNNPACK averages windows in float; a window of the whole image runs in int8"


def to_one_pixel(match: Match) -> str | None:
    """ExecuTorch turns an adaptive pooling into a mean only if one value per channel remains."""
    size: Any = match.captures.get("output_size")
    one = list(size) in ([1], [1, 1])
    return rank("self", 4)(match) or (
        None if one else f"adaptive pooling to {size} has no int8 form"
    )


def pooling_window(match: Match) -> str | None:
    """XNNPACK's windows leave no gaps, and its `ceil_mode` requires known sizes."""
    kernel = _pair(match.argument("output", "kernel_size"))
    stride = _pair(match.argument("output", "stride") or kernel)
    if any(step > size for step, size in zip(stride, kernel, strict=True)):
        return (
            f"windows of {kernel} leave gaps at a stride of {stride}, which XNNPACK does not take"
        )
    if match.argument("output", "ceil_mode") and _has_unknown_size(match):
        return "ceil_mode with sizes known only at run time, which XNNPACK does not take"
    return rank("self", 4)(match)


def _has_unknown_size(match: Match) -> bool:
    """Whether a size of the output is known only at run time."""
    return any(isinstance(size, torch.SymInt) for size in match.output.meta["val"].shape)


def not_training(match: Match) -> str | None:
    """Dropout changes nothing in a model that is not being trained."""
    return "it drops values, in training" if match.argument("output", "train") else None


def _pair(size: Any) -> list[Any]:
    """Return a size for both axes, of which one may have been given for both."""
    sizes = [*size] if isinstance(size, (list, tuple)) else [size]
    return sizes * 2 if len(sizes) == 1 else sizes


def _shape(match: Match, name: str) -> tuple[Any, ...]:
    node = match.node(name)
    return () if node is None else tuple(node.meta["val"].shape)
