# SPDX-License-Identifier: Apache-2.0
"""What XNNPACK's operators ask of shapes and literals: a guard returns why it takes no match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from qompose import Match
from torch.fx import Node

from qompose_xnnpack.integer import MAX_DEPTH

Guard: TypeAlias = "Callable[[Match], str | None]"


def both(*guards: Guard) -> Guard:
    """Return a guard that objects where one of several does, with the first reason."""

    def guard(match: Match) -> str | None:
        return next(filter(None, (guard(match) for guard in guards)), None)

    return guard


def float32(match: Match) -> str | None:
    """XNNPACK's quantized operators stand for float32."""
    dtype = match.output.meta["val"].dtype
    if dtype is torch.float32:
        return None
    return f"XNNPACK's int8 operators stand for float32, not {dtype}"


def rank(name: str, wanted: int) -> Guard:
    """An input has a number of dimensions."""

    def guard(match: Match) -> str | None:
        shape = _shape(match, name)
        if len(shape) == wanted:
            return float32(match)
        return (
            float32(match) or f"{name} has {len(shape)} dimensions, and the kernel takes {wanted}"
        )

    return guard


def shallow(match: Match) -> str | None:
    """More products than this may overflow the 32 bits in which they are added."""
    operator = match.node("op")
    weight = _shape(match, "weight")
    transposed = operator is not None and "transpose" in str(operator.target)
    depth = 1
    for dim, size in enumerate(weight):
        depth *= size if dim != int(transposed) else 1
    if transposed:
        depth //= argument(match, "op", "groups")
    if depth <= MAX_DEPTH:
        return None
    return f"a sum of {depth} products may overflow int32; at most {MAX_DEPTH} are safe"


def ungrouped(match: Match) -> str | None:
    """XNNPACK has scales per output channel of a transposed convolution for one group only."""
    groups = argument(match, "op", "groups")
    if groups == 1:
        return None
    return f"it has {groups} groups, for which XNNPACK takes static per-tensor weights alone"


def grouped(match: Match) -> str | None:
    """The counterpart of ``ungrouped``."""
    return "it has one group" if argument(match, "op", "groups") == 1 else None


def not_depthwise(match: Match) -> str | None:
    """XNNPACK's dynamic convolutions leave out depthwise ones, which have a channel per group."""
    groups, weight = argument(match, "op", "groups"), _shape(match, "weight")
    if groups > 1 and weight[1] == 1:
        return "XNNPACK has no dynamic depthwise convolution"
    return None


def zeros_around_image(match: Match) -> str | None:
    """Only zeros around height and width become a part of a convolution."""
    pads = argument(match, "pad", "pad")
    mode, value = argument(match, "pad", "mode"), argument(match, "pad", "value")
    spatial = len(_shape(match, "input")) - 2
    if mode not in (None, "constant") or value not in (None, 0):
        return "only padding with zeros becomes a part of the convolution"
    if not all(isinstance(n, int) and n >= 0 for n in pads):
        return "padding that crops, or of sizes known at run time, is no part of the convolution"
    if any(pads[2 * spatial :]):
        return "padding along batch or channels is no part of the convolution"
    return None


def unscaled(match: Match) -> str | None:
    """XNNPACK adds and subtracts without `alpha`."""
    factors = [node.kwargs["alpha"] for node in match.nodes if "alpha" in node.kwargs]
    return (
        "the second operand is scaled by alpha" if any(f != 1 for f in factors) else float32(match)
    )


def mean_over_image(match: Match) -> str | None:
    """XNNPACK averages over height and width of an image."""
    wrong_rank = rank("self", 4)(match)
    dims: Any = match.captures.get("dim")
    if wrong_rank or not isinstance(dims, (list, tuple)):
        return wrong_rank or "the mean is over everything"
    if {dim % 4 for dim in dims} != {2, 3}:
        return "only means over height and width of an image run in int8"
    if argument(match, "output", "dtype") is not None:
        return "the mean is asked for in another dtype"
    return None


def keeps_dimensions(match: Match) -> str | None:
    """XNNPACK's mean keeps the dimensions it averages over."""
    return (
        None
        if match.captures.get("keepdim")
        else "it drops dimensions, which rule mean_dropping does"
    )


def drops_dimensions(match: Match) -> str | None:
    """The counterpart of ``keeps_dimensions``."""
    return "it keeps dimensions, which rule mean does" if match.captures.get("keepdim") else None


def over_whole_image(match: Match) -> str | None:
    """An average pooling whose one window is the image is XNNPACK's mean; others compute in float."""
    size = _shape(match, "self")
    kernel = _pair(argument(match, "output", "kernel_size"))
    padding = _pair(argument(match, "output", "padding"))
    divisor = argument(match, "output", "divisor_override")
    whole = len(size) == 4 and list(size[2:]) == kernel and padding == [0, 0]
    if whole and divisor in (None, kernel[0] * kernel[1]):
        return float32(match)
    return "XNNPACK averages windows in float; a window of the whole image runs in int8"


def to_one(match: Match) -> str | None:
    """ExecuTorch turns an adaptive pooling into a mean only where one value is left per channel."""
    size: Any = match.captures.get("output_size")
    one = list(size) in ([1], [1, 1])
    return rank("self", 4)(match) or (
        None if one else f"adaptive pooling to {size} has no int8 form"
    )


def window(match: Match) -> str | None:
    """XNNPACK's windows leave no gaps, and where they pass the border, sizes have to be known."""
    kernel = _pair(argument(match, "output", "kernel_size"))
    stride = _pair(argument(match, "output", "stride") or kernel)
    if any(step > size for step, size in zip(stride, kernel, strict=True)):
        return (
            f"windows of {kernel} leave gaps at a stride of {stride}, which XNNPACK does not take"
        )
    if argument(match, "output", "ceil_mode") and varies(match):
        return "ceil_mode with sizes known only at run time, which XNNPACK does not take"
    return rank("self", 4)(match)


def varies(match: Match) -> bool:
    """Whether a size of the output is known only at run time."""
    return any(isinstance(size, torch.SymInt) for size in match.output.meta["val"].shape)


def known_size(match: Match) -> str | None:
    """XNNPACK's views and slices have sizes that are known beforehand."""
    return (
        "its size is known only at run time, and XNNPACK takes no such view"
        if varies(match)
        else None
    )


def unit_step(match: Match) -> str | None:
    """XNNPACK slices without gaps."""
    return (
        None if argument(match, "output", "step") == 1 else "it has a step, which XNNPACK has not"
    )


def several(match: Match) -> str | None:
    """ExecuTorch's partitioner counts the different tensors that are concatenated."""
    different = len(set(match.tensors("tensors")))
    return None if different > 1 else "XNNPACK concatenates two or more different tensors"


def not_training(match: Match) -> str | None:
    """Dropout leaves values alone where a model is not being trained."""
    return "it drops values, in training" if argument(match, "output", "train") else None


def argument(match: Match, name: str, wanted: str) -> Any:
    """Return an argument of an operator by its name in the schema, its default if left out."""
    node = match.node(name)
    assert isinstance(node, Node)
    schema: Any = node.target
    for index, parameter in enumerate(schema._schema.arguments):
        if parameter.name == wanted:
            given = node.args[index] if index < len(node.args) else None
            return node.kwargs.get(wanted, parameter.default_value) if given is None else given
    return None


def _pair(size: Any) -> list[Any]:
    """Return what is given for both axes, or once for both; no padding at all is 0."""
    sizes = [*size] if isinstance(size, (list, tuple)) else [size]
    return sizes * 2 if len(sizes) == 1 else sizes


def _shape(match: Match, name: str) -> tuple[Any, ...]:
    node = match.node(name)
    return () if node is None else tuple(node.meta["val"].shape)
