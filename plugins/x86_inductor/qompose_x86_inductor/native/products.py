# SPDX-License-Identifier: Apache-2.0
"""The operators of products that compiled programs run in C++ of our own (products.h, depthwise.h, planes.h).

They are ``native_product``, ``native_depthwise`` and ``quantize_planes``. Inductor compiles the headers
beside this file into each program, for the set of `processor`. `reference` is what the operators compute, in
operators of torch.

Of the two products:

* ``x`` is uint8 (N, H, W, C), contiguous, and so is the result (N, H', W', out), of any of three types;
* ``weight`` is int8 as `pack` leaves it, in whole vectors of channels (a depthwise one: blocks of four
  vectors);
* ``start``, int32, is what sums begin with; ``scale`` and ``bias``, float32, are applied to them, and what a
  function makes of that is multiplied by ``per_step``; all four have a value for each of those channels;
* ``other``, of the result's shape, is added; ``sizes`` and ``ends`` are `ProductSizes` and `ProductEnds`.

``quantize_planes`` quantizes a float32 image (N, C, H, W) of two to `MOST_PLANES` channels to uint8
(N, H, W, C).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from qompose.backend import kit
from torch import Tensor

from qompose_x86_inductor.native import code
from qompose_x86_inductor.native.processor import Isa
from qompose_x86_inductor.onednn.arguments import NAMESPACE
from qompose_x86_inductor.onednn.post_ops import POST_OPS
from qompose_x86_inductor.operators.registration import register

FOUR, MOST_PLANES = 4, 4
KINDS: Final = (torch.uint8, torch.int8, torch.float32)

# Names and algorithms of post-ops, in the order of `enum Function` in finish.h.
FUNCTIONS: Final = (
    ("none", "none"), ("hardswish", "none"), ("swish", "none"), ("gelu", "none"), ("gelu", "tanh"),
    ("tanh", "none"), ("leaky_relu", "none"),
)  # fmt: skip


class ProductSizes(NamedTuple):
    """The numbers of `enum Size` in arguments.h, in its order; pairs are of height and width.

    ``lanes`` are those of the vectors that the weight is packed for. ``group_depth`` and ``group_channels``
    are inputs and outputs of a group as `in_groups` makes them, multiples of 4 and of the lanes, of which
    the last group may have fewer; 0 where there is one group. ``own_depth`` is how many of the
    inputs, side by side, an output has weights for; 0 where it has for all.
    """

    channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    x_zp: int
    function: int
    zero_point: int
    kind: int
    lanes: int
    group_depth: int = 0
    group_channels: int = 0
    own_depth: int = 0

    @property
    def joined(self) -> bool:
        """Return whether the columns of a window are adjacent, so that a line of it is one run of bytes."""
        return self.kernel[1] == 1 or (self.dilation[1] == 1 and not self.group_depth)

    def flat(self) -> list[int]:
        """Return them as the operators expect them."""
        return [n for value in self for n in (value if isinstance(value, tuple) else (value,))]

    @classmethod
    def read(cls, flat: list[int]) -> ProductSizes:
        """Return the sizes that `flat` wrote."""
        kernel, stride, padding, dilation = ((flat[at], flat[at + 1]) for at in range(1, 9, 2))
        return cls(flat[0], kernel, stride, padding, dilation, *flat[9:])

    def shape(self, x: Tensor) -> list[int]:
        """Return the shape of the result, (N, H', W', out), symbolic where the image is."""
        sides = zip(x.shape[1:3], *self[1:5], strict=True)
        spatial = [(i + 2 * p - d * (k - 1) - 1) // s + 1 for i, k, s, p, d in sides]
        return [x.shape[0], *spatial, self.channels]


class ProductEnds(NamedTuple):
    """The numbers of `enum End` there, in its order.

    Bounds and scales are in steps of the result, of floats in units.
    """

    other_scale: float
    other_zp: float
    slope: float
    low: float
    high: float


def pack(weight: Tensor, sizes: ProductSizes, *, depthwise: bool) -> Tensor:
    """Return an int8 weight (out, in, kh, kw) as the C++ reads it, flat."""
    taps = weight.permute(0, 2, 3, 1)
    if depthwise:
        columns = filled(weight[:, 0].transpose(1, 2), 2, FOUR)
        return _pack_depthwise(columns.flatten(1), sizes.lanes)
    runs = taps.flatten(2) if sizes.joined else taps.flatten(1, 2)
    runs = filled(filled(runs, 2, FOUR), 0, sizes.lanes)
    quads = runs.reshape(*runs.shape[:2], -1, FOUR)
    groups = torch.split(quads, sizes.group_channels or len(quads))
    panels = (panel for group in groups for panel in torch.split(group, FOUR * sizes.lanes))
    return torch.cat([panel.permute(1, 2, 0, 3).flatten() for panel in panels])


def in_groups(weight: Tensor, groups: int, sizes: ProductSizes) -> tuple[Tensor, ProductSizes]:
    """Join groups of an int8 weight (out, in, kh, kw) for whole vectors of outputs.

    Those that fill one vector, with as many inputs as outputs, keep their weights: the C++ brings each lane
    its own inputs. Others get zeros where they do not meet.

    Returns:
        The weight, and the sizes with those of the groups.
    """
    depth, channels, lanes = weight.shape[1], weight.shape[0] // groups, sizes.lanes
    if depth == channels < lanes and channels % FOUR == 0 and lanes % channels == 0:
        return weight, sizes._replace(group_depth=lanes, group_channels=lanes, own_depth=channels)
    joined = math.lcm(lanes // math.gcd(lanes, channels), FOUR // math.gcd(FOUR, depth))
    joined = min(joined, groups)
    whole = filled(weight.reshape(groups, channels, *weight.shape[1:]), 0, joined)
    apart = whole.new_zeros(len(whole), channels, joined, *weight.shape[1:])
    number = torch.arange(len(whole))
    apart[number, :, number % joined] = whole
    result = apart.flatten(2, 3).flatten(0, 1)[: len(weight)]
    if joined == groups:
        return result, sizes
    return result, sizes._replace(group_depth=depth * joined, group_channels=channels * joined)


def unpack(packed: Tensor, sizes: ProductSizes, depth: int, *, depthwise: bool) -> Tensor:
    """Return the weight (out, in, kh, kw) that `pack` was given; ``depth`` is its number of inputs."""
    (height, width), channels, lanes = sizes.kernel, sizes.channels, sizes.lanes
    panel = FOUR * lanes
    if depthwise:
        whole = -(-channels // panel) * panel
        blocks = packed.reshape(-1, packed.numel() // whole // FOUR, panel, FOUR)
        taps = torch.cat([_in_order(block.permute(1, 0, 2).flatten(1), lanes) for block in blocks])
        columns = taps[:channels].reshape(channels, 1, width, -1)[..., :height]
        return columns.transpose(2, 3).contiguous()
    count, length = (height, width * depth) if sizes.joined else (height * width, depth)
    quads, whole = -(-length // FOUR), -(-channels // lanes) * lanes
    each = sizes.group_channels or whole
    panels, at = [], 0
    while at < whole:
        rows = min(panel, whole - at, each - at % each)
        part = packed[at * count * quads * FOUR :][: rows * count * quads * FOUR]
        panels.append(part.reshape(count, quads, rows, FOUR).permute(2, 0, 1, 3).flatten(2))
        at += rows
    runs = torch.cat(panels)[:channels, :, :length]
    return runs.reshape(channels, height, width, depth).permute(0, 3, 1, 2)


def per_channel(values: Tensor, lanes: int, *, depthwise: bool) -> Tensor:
    """Return a vector (out,) with zeros up to whole vectors, in the order of packed weights."""
    if not depthwise:
        return filled(values, 0, lanes)
    return _interleaved(_in_blocks(values, FOUR * lanes), lanes)


def _in_blocks(values: Tensor, panel: int) -> Tensor:
    """Return values of channels, the first axis, in blocks; a last one of half the channels or less twice."""
    left = len(values) % panel
    if not 0 < left <= panel // 2:
        return filled(values, 0, panel)
    last = filled(values[-left:], 0, panel // 2)
    return torch.cat([values[:-left], last, last])


def _pack_depthwise(taps: Tensor, lanes: int) -> Tensor:
    """Pack (out, taps)."""
    panel = FOUR * lanes
    blocks = torch.split(_interleaved(_in_blocks(filled(taps, 1, FOUR), panel), lanes), panel)
    return torch.cat([
        block.reshape(panel, -1, FOUR).permute(1, 0, 2).flatten() for block in blocks
    ])  # fmt: skip


def _interleaved(values: Tensor, lanes: int) -> Tensor:
    """Return blocks of four vectors of channels, the first axis, in the order that depthwise.h unpacks to."""
    within = (lanes // FOUR, FOUR, FOUR)
    return values.reshape(-1, *within, *values.shape[1:]).transpose(1, 2).flatten(0, 3)


def _in_order(values: Tensor, lanes: int) -> Tensor:
    """Return what `_interleaved` was given."""
    within = (FOUR, lanes // FOUR, FOUR)
    return values.reshape(-1, *within, *values.shape[1:]).transpose(1, 2).flatten(0, 3)


def filled(values: Tensor, dim: int, multiple: int) -> Tensor:
    """Return values with zeros appended along an axis, up to a multiple."""
    missing = -values.shape[dim] % multiple
    return F.pad(values, [0, 0] * (values.dim() - 1 - dim) + [0, missing])


def reference(*arguments: Any, depthwise: bool) -> Tensor:
    """Return what an operator computes from its arguments."""
    x, packed, *given, other, flat, given_ends = arguments
    sizes, ends = ProductSizes.read(flat), ProductEnds(*given_ends)
    depth = sizes.own_depth or sizes.group_depth or x.shape[3]
    weight = unpack(packed, sizes, depth, depthwise=depthwise)
    vectors = [_of_channels(v, sizes, depthwise=depthwise) for v in given if v is not None]
    start, scale, bias, *per_step = vectors
    real = (_raw_sums(x, weight, sizes) + start) * scale + bias
    if other is not None:
        shift = 0.0 if other.dtype == torch.float32 else ends.other_zp
        real = real + (other.double() - shift) * ends.other_scale
    name, algorithm = FUNCTIONS[sizes.function]
    if name != "none":
        real = POST_OPS[name].compute(real, [ends.slope], algorithm) * per_step[0]
    real, kind = real.clamp(ends.low, ends.high), KINDS[sizes.kind]
    steps: Tensor = real
    if kind != torch.float32:
        steps = torch.round(real.nan_to_num(nan=ends.low)) + sizes.zero_point
    return steps.to(kind).contiguous()


def _of_channels(packed: Tensor, sizes: ProductSizes, *, depthwise: bool) -> Tensor:
    """Return float64 (out,) of what `per_channel` made."""
    values = _in_order(packed, sizes.lanes) if depthwise else packed
    return values[: sizes.channels].double()


def _raw_sums(x: Tensor, weight: Tensor, sizes: ProductSizes) -> Tensor:
    """Return float64 sums (N, H', W', out) of the integers, padded with the zero point."""
    (above, beside), whole = sizes.padding, weight.double()
    image = F.pad(x.permute(0, 3, 1, 2).double(), [beside, beside, above, above], value=sizes.x_zp)
    if sizes.group_depth:
        image, whole = filled(image, 1, sizes.group_depth), filled(whole, 0, sizes.group_channels)
    groups = image.shape[1] // weight.shape[1]
    sums = F.conv2d(image, whole, None, sizes.stride, 0, sizes.dilation, groups)
    return sums[:, : sizes.channels].permute(0, 2, 3, 1)


def reference_planes(x: Tensor, scale: float, zero_point: int, low: int, high: int) -> Tensor:
    """Return what ``quantize_planes`` computes."""
    integers = kit.quantize(x, scale, zero_point, low, high, torch.uint8)
    return integers.permute(0, 2, 3, 1).contiguous()


def _fake_planes(x: Tensor, *_: Any) -> Tensor:
    batch, channels, height, width = x.shape
    return x.new_empty((batch, height, width, channels), dtype=torch.uint8)


def _fake(x: Tensor, *arguments: Any) -> Tensor:
    sizes = ProductSizes.read(arguments[-2])
    return x.new_empty(sizes.shape(x), dtype=KINDS[sizes.kind])


_SCHEMA: Final = (
    "(Tensor x, Tensor weight, Tensor start, Tensor scale, Tensor bias, Tensor? per_step, Tensor? other,"
    " int[] sizes, float[] ends) -> Tensor"
)
_SCHEMAS: Final = {
    "native_product": _SCHEMA,
    "native_depthwise": _SCHEMA,
    "quantize_planes": "(Tensor x, float scale, int zero_point, int low, int high) -> Tensor",
}
register(
    NAMESPACE,
    _SCHEMAS,
    {
        "native_product": (code.uncompiled(functools.partial(reference, depthwise=False)), _fake),
        "native_depthwise": (code.uncompiled(functools.partial(reference, depthwise=True)), _fake),
        "quantize_planes": (reference_planes, _fake_planes),
    },
    torch.Tag.needs_contiguous_strides,
)
PRODUCT, DEPTHWISE, PLANES = (
    getattr(getattr(torch.ops, NAMESPACE), name).default for name in _SCHEMAS
)

_OF_PRODUCTS: Final = (*[code.HANDLE] * 5, *[code.OPTIONAL] * 2, code.INTEGERS, code.NUMBERS)
_OF_PLANES: Final = (code.HANDLE, "double", *["int64_t"] * 3)
_ARGUMENTS: Final = {PRODUCT: _OF_PRODUCTS, DEPTHWISE: _OF_PRODUCTS, PLANES: _OF_PLANES}


def shims(isa: Isa, functions: Iterable[int], *, alone: bool) -> dict[Any, list[str]]:
    """Return texts for torch's option ``aot_inductor.custom_ops_to_c_shims``, with the code of shims.h.

    Args:
        isa: what it is compiled for.
        functions: those that products need, by their numbers among `FUNCTIONS`. With all of them, and all
            layers, compilers take twice the time.
        alone: whether there is nothing but products, no layer and no attention.
    """
    texts = {
        operator: [code.declaration(name, *arguments)]
        for name, (operator, arguments) in zip(_SCHEMAS, _ARGUMENTS.items(), strict=True)
    }
    needed = [f"QOMPOSE_FUNCTIONS {sum(1 << number for number in {0, *functions})}"]
    needed += ["QOMPOSE_PRODUCTS_ALONE 1"] * alone
    return {**texts, PRODUCT: [code.with_code(texts[PRODUCT][0], "shims.h", isa, *needed)]}
