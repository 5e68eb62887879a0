# SPDX-License-Identifier: Apache-2.0
"""What functions that emit kernels share: bounds, windows, geometry of convolutions, scales, moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import torch
from torch.fx import Node

from qompose.backend.integer_reference import CLAMPS, bounds_of
from qompose.backend.kernel import Kernel, NotLowerable, QuantizedTensor, Region
from qompose.backend.kit.guards import sizes

aten = torch.ops.aten

Rounding: TypeAlias = "Callable[[float, float, int], int]"
"""Returns the integer that stands for a value, of a scale and a zero point."""

_FAR = 2.0**62
"""Steps beyond those of any integers."""


def float_bounds(region: Region, name: str = "output") -> tuple[float, float]:
    """Return the bounds of a relu, relu6, hardtanh or clamp, infinite where it has none.

    Args:
        name: of the operator in the rule's pattern.

    Raises:
        NotLowerable: the operator is none of those, or a bound is computed.
    """
    node = region.node(name)
    if node.target not in CLAMPS:
        raise NotLowerable(f"{node.target} has no bounds")
    low, high = bounds_of(node)
    return -math.inf if low is None else low, math.inf if high is None else high


def nearest_integer(value: float, scale: float, zero_point: int) -> int:
    """Return the integer that stands for a value, infinite or not: rounded half to even, then shifted."""
    return round(min(max(value / scale, -_FAR), _FAR)) + zero_point


def integer_bounds(
    region: Region, name: str = "output", rounding: Rounding = nearest_integer
) -> tuple[int, int]:
    """Return the integers between which a relu, hardtanh or clamp keeps the region's output.

    Args:
        name: of the operator in the rule's pattern; without it in a match, the output's own bounds.
        rounding: how the kernel makes an integer of a bound.

    Raises:
        NotLowerable: the output is not quantized, or a bound is computed or not a number.
    """
    output = region.quantized("output")
    if not region.has(name):
        return output.low, output.high
    bounds = float_bounds(region, name)
    if any(map(math.isnan, bounds)):
        raise NotLowerable(f"a bound of {region.node(name).name} is NaN")
    low, high = (rounding(bound, output.scale, output.zero_point) for bound in bounds)
    return _within(low, output), _within(high, output)


def _within(integer: int, output: QuantizedTensor) -> int:
    return min(max(integer, output.low), output.high)


def kept(region: Region) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Return the only input of a region and its output, which have one scale and zero point.

    Raises:
        NotLowerable: they have not.
    """
    (source,) = region.quantized_inputs(region.claim.operands[0].role)
    output = region.quantized("output")
    if source.qparams != output.qparams:
        raise NotLowerable("its input and output have different quantization parameters")
    return source, output


class ClampOnIntegers:
    """Emits a relu, hardtanh or clamp of one scale as a clamp of integers.

    Args:
        rounding: how the kernel makes an integer of a bound.
    """

    def __init__(self, rounding: Rounding = nearest_integer) -> None:
        self.rounding = rounding

    def __call__(self, region: Region) -> Node:
        """Insert the call; see `qompose.backend.Kernel`.

        Raises:
            NotLowerable: input and output differ in scale or zero point.
        """
        source, output = kept(region)
        low, high = integer_bounds(region, "output", self.rounding)
        return region.call(aten.clamp.default, source.node, low, high, dtype=output.dtype)


def unmoved(region: Region) -> Node:
    """Put the integers of its input in the place of an operator that changes no value, such as a copy.

    Raises:
        NotLowerable: input and output differ in scale or zero point.
    """
    return kept(region)[0].node


CLAMP_ON_INTEGERS: Final = Kernel("clamp on integers", ClampOnIntegers())
"""Runs a relu, hardtanh or clamp of one scale."""
UNMOVED: Final = Kernel("no operator", unmoved)
"""Leaves out an operator that changes no value."""


def window(region: Region, *names: str) -> list[Any]:
    """Return literal arguments of a pool, in the order of their names; a stride left out is the kernel size.

    Raises:
        ConfigError: the operator has no such argument.
    """
    found = {name: region.argument("output", name) for name in names}
    if "stride" in found:
        found["stride"] = found["stride"] or region.argument("output", "kernel_size")
    return list(found.values())


_WINDOW = ("kernel_size", "stride", "padding")
_POOL_ARGUMENTS = {
    "max_pool1d": (*_WINDOW, "dilation", "ceil_mode"),
    "max_pool2d": (*_WINDOW, "dilation", "ceil_mode"),
    "avg_pool2d": (*_WINDOW, "ceil_mode", "count_include_pad", "divisor_override"),
    "adaptive_avg_pool2d": ("output_size",),
    "mean": ("dim", "keepdim"),
}


def pool_arguments(region: Region) -> list[Any]:
    """Return the literal arguments of a pool or mean, in the order of its schema (`window`).

    Raises:
        NotLowerable: the operator is none of those in `POOLS`.
    """
    name = str(region.node("output").target).removeprefix("aten.").partition(".")[0]
    if name not in _POOL_ARGUMENTS:
        raise NotLowerable(f"{name} is not a pooling operator")
    return window(region, *_POOL_ARGUMENTS[name])


def channel_scales(region: Region, weight: QuantizedTensor, *, expand: bool = True) -> Node:
    """Return a node that reads a weight's scales, float32 of shape `(out,)`.

    Args:
        expand: repeat the scale of a weight that has one; False: leave it of shape `(1,)`.

    Raises:
        NotLowerable: the weight is computed.
    """
    if isinstance(weight.scale, Node):
        return weight.scale
    scales = weight.scales
    if expand:
        scales = scales.expand(weight.tensor.shape[0]).clone()
    return region.constant(f"{weight.node.target}_scale", scales)


@dataclass(frozen=True)
class Geometry:
    """Of a convolution, a number for each spatial dimension.

    Attributes:
        zeros: to be put around the input besides `padding`, in the form of `torch.nn.functional.pad`: the
            last dimension first, before and after it. They are those of padding="same" where one side has
            more, and of a padding operator that belongs to the region.
        output_padding: of a transposed convolution; None of others.
    """

    stride: list[Any]
    padding: list[Any]
    dilation: list[Any]
    groups: int
    zeros: list[int]
    output_padding: list[Any] | None = None

    @property
    def arguments(self) -> list[Any]:
        """Return the arguments of `aten.conv*` after the bias, `zeros` aside."""
        if self.output_padding is None:
            return [self.stride, self.padding, self.dilation, self.groups]
        return [self.stride, self.padding, self.output_padding, self.groups, self.dilation]


def geometry_of(region: Region, operator: str = "op", *, pad: str | None = "pad") -> Geometry:
    """Return the geometry of a region's convolution, with padding="same" and "valid" in numbers.

    Args:
        operator: the name of the convolution in the rule's pattern.
        pad: the name of a padding operator before it, which is looked for; None: leave it to itself.

    Raises:
        ConfigError: there is no such operator.
    """
    kernel = list(region.inputs("weight")[0].meta["val"].shape[2:])
    transposed = "transpose" in str(region.node(operator).target)
    names = ("stride", "dilation", *(("output_padding",) if transposed else ()))
    found = {name: sizes(region.argument(operator, name), len(kernel)) for name in names}
    padding, zeros = region.argument(operator, "padding"), [0, 0] * len(kernel)
    if isinstance(padding, str):
        zeros, padding = _named_padding(padding, found["dilation"], kernel), [0] * len(kernel)
        before, after = zeros[::2], zeros[1::2]
        if before == after:  # the operator itself pads both sides alike
            zeros, padding = [0, 0] * len(kernel), before[::-1]
    groups = region.argument(operator, "groups")
    geometry = Geometry(padding=sizes(padding, len(kernel)), groups=groups, zeros=zeros, **found)
    return geometry if pad is None or not region.has(pad) else with_pad(region, geometry, pad)


def with_pad(region: Region, geometry: Geometry, pad: str = "pad") -> Geometry:
    """Return a geometry with the zeros of the region's padding operator added to its own.

    Raises:
        ConfigError: there is no such operator.
    """
    around = list(region.argument(pad, "pad"))
    around += [0] * (len(geometry.zeros) - len(around))
    added = [a + b for a, b in zip(geometry.zeros, around, strict=True)]
    return replace(geometry, zeros=added)


def _named_padding(word: str, dilation: Sequence[int], kernel: Sequence[int]) -> list[int]:
    """Return the zeros that padding="same" or "valid" puts around, last dimension first."""
    if word == "valid":
        return [0, 0] * len(kernel)
    totals = [gap * (size - 1) for gap, size in zip(dilation, kernel, strict=True)]
    return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]


def padded(region: Region, source: Node, geometry: Geometry, *zero: int) -> Node:
    """Return what a convolution reads, in a step with `geometry.zeros` around it where there are any.

    Args:
        source: the node of its input, integers or floats of shape `(N, C, ...)`.
        zero: the value that stands for zero: the zero point of integers.
    """
    if not any(geometry.zeros):
        return source
    return region.step(aten.constant_pad_nd.default, source, geometry.zeros, *zero)
