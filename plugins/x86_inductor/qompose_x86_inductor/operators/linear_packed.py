# SPDX-License-Identifier: Apache-2.0
"""The operator ``linear_packed``: weights of four or eight bits, which are packed once, for all processors.

``x`` is float32 (..., in), and so is the result (..., out). Its rows are multiplied as floats, or quantized
first, each with a scale and perhaps a zero point of its own, those of `kit.choose_qparams_per_row`. What is
not finite shows in its own row alone.

`pack` makes ``weight``, ``scales`` and ``zeros`` (zero points), in panels of `LANES` output channels, and
``sizes`` are a `LinearSizes`. ``columns``, float32 (out,), are the sums of each channel's weights, for rows
with zero points.

``linears_packed`` computes several of one ``x``, whose results (..., all outs) lie side by side. Its
constants are the five of each; its sizes, of each too, differ in their channels alone.

C++ computes them (`native.packed_linear`), in this process and in compiled programs. `reference` computes the
same with operators of torch: where the C++ is not wanted or does not compile. There a compiler folds the
weight into floats.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from qompose.backend import kit
from torch import Tensor

from qompose_x86_inductor.native import packed_linear
from qompose_x86_inductor.onednn.arguments import NAMESPACE
from qompose_x86_inductor.operators.registration import register

LANES: Final = 16
UNIT: Final = 8
"""Inputs that are packed together."""
FOUR_BITS: Final = (-8, 7)
GROUP_SIZES: Final = (32, 64, 128, 256)
"""The sizes of groups that configurations offer; the operator knows any multiple of `UNIT`."""
FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
"""The types of inputs of linears with such weights; the arithmetic is that of float32."""


_CONSTANTS: Final = {
    "weight": (torch.uint8,),
    "scales": (torch.float32, torch.bfloat16),
    "zeros": (torch.int8,),
    "columns": (torch.float32,),
    "bias": (torch.float32,),
}
"""The tensors of a weight, and the types that the C++ reads."""


class Rows(enum.IntEnum):
    """How rows are multiplied; `enum RowMode` of packed_linear.h."""

    FLOATS = 0
    SYMMETRIC = 1
    AFFINE = 2


class LinearSizes(NamedTuple):
    """Numbers of a weight.

    ``inputs`` are those of a row, ``depth`` the same in whole units, ``group`` how many share a scale.
    """

    channels: int
    depth: int
    group: int
    bits: int
    rows: int
    inputs: int


class PackedLinear(NamedTuple):
    """A weight: flat uint8; scales (panels, groups, lanes), float32, or bfloat16 where that holds them.

    Zero points are int8 of that shape, None where all are 0.
    """

    weight: Tensor
    scales: Tensor
    zero_points: Tensor | None


def pack(weight: Tensor, scales: Tensor, zero_points: Tensor | None, bits: int) -> PackedLinear:
    """Return int8 (out, in), scales and zero points (out, groups) as the operator reads them."""
    units = -(-weight.shape[1] // UNIT)
    step = LANES * max(1, _AT_A_TIME // (LANES * UNIT * units or 1))
    size = units * UNIT * bits // 8
    packed = torch.empty(-(-len(weight) // LANES) * LANES * size, dtype=torch.uint8)
    for first in range(0, len(weight), step):
        part = _packed(weight[first : first + step], bits)
        packed[first * size : first * size + len(part)] = part
    rounded = scales.bfloat16()
    stored = rounded if torch.equal(rounded.float(), scales) else scales
    some = zero_points is not None and bool(zero_points.any())
    return PackedLinear(
        packed,
        _in_panels(stored),
        _in_panels(zero_points.to(torch.int8)) if some and zero_points is not None else None,
    )


_AT_A_TIME: Final = 2**20
"""How many integers are packed at a time, about: temporaries are then small beside a model."""


def _packed(rows: Tensor, bits: int) -> Tensor:
    """Return whole panels of integers, flat uint8; the last rows and inputs may be missing."""
    filled = F.pad(rows, (0, -rows.shape[1] % UNIT, 0, -len(rows) % LANES))
    halves = filled.reshape(len(filled) // LANES, LANES, filled.shape[1] // UNIT, 2, UNIT // 2)
    if bits == 4:
        low, high = (halves + 8).to(torch.uint8).unbind(3)
        return (low | high << 4).transpose(1, 2).flatten()
    return halves.permute(0, 2, 3, 1, 4).contiguous().view(torch.uint8).flatten()


def _in_panels(values: Tensor) -> Tensor:
    filled = F.pad(values, (0, 0, 0, -len(values) % LANES))
    return filled.view(-1, LANES, values.shape[1]).transpose(1, 2).contiguous()


def unpack(packed: PackedLinear, sizes: LinearSizes) -> Tensor:
    """Return the weight that `pack` was given as floats, scales included: (out, depth)."""
    filled = -(-sizes.channels // LANES) * LANES
    if sizes.bits == 4:
        lanes = packed.weight.view(-1, sizes.depth // UNIT, LANES, UNIT // 2).transpose(1, 2)
        values = torch.stack([lanes & 15, lanes >> 4], 3).float() - 8
    else:
        units = packed.weight.view(torch.int8).view(-1, sizes.depth // UNIT, 2, LANES, UNIT // 2)
        values = units.permute(0, 3, 1, 2, 4).float()
    groups = values.reshape(filled, packed.scales.shape[1], sizes.group)
    if packed.zero_points is not None:
        groups = groups - packed.zero_points.transpose(1, 2).reshape(filled, -1, 1).float()
    scaled = groups * packed.scales.transpose(1, 2).reshape(filled, -1, 1).float()
    return scaled.reshape(filled, sizes.depth)[: sizes.channels]


def reference(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    columns: Tensor | None,
    bias: Tensor | None,
    sizes: list[int],
) -> Tensor:
    """Return what the operator computes from its arguments."""
    _check(x, sizes)
    of = LinearSizes(*sizes)
    if of.depth == 0:
        return _without_inputs(x, bias, of)
    rows = x.reshape(-1, x.shape[-1])
    rows = F.pad(rows, (0, of.depth - rows.shape[1]))
    values = unpack(PackedLinear(weight, scales, zeros), of)
    if of.rows == Rows.FLOATS:
        total = F.linear(rows, values, bias)
    else:
        symmetric = of.rows == Rows.SYMMETRIC
        scale, zero_point = kit.choose_qparams_per_row(rows, symmetric=symmetric)
        integers = kit.quantize_rows(rows, scale, zero_point).float()
        shifted = integers if zero_point is None else integers - zero_point
        total = F.linear(shifted, values) * torch.where(scale.isfinite(), scale, torch.nan)
        total = total if bias is None else total + bias
    return total.reshape(*x.shape[:-1], of.channels)


def _compute(x: Tensor, *arguments: Any) -> Tensor:
    *tensors, sizes = arguments
    compute = packed_linear.compiled()
    if compute is None:
        return reference(x, *arguments)
    _check(x, sizes)
    _check_constants(tensors)
    if sizes[1] == 0:
        return _without_inputs(x, tensors[-1], LinearSizes(*sizes))
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return compute(rows, (*tensors,), (*sizes,)).view(*x.shape[:-1], sizes[0])


def _several(x: Tensor, constants: Sequence[Tensor | None], sizes: list[int]) -> Tensor:
    count, of_each = len(_CONSTANTS), len(LinearSizes._fields)
    each = range(len(sizes) // of_each)
    parts = (
        _compute(x, *constants[i * count :][:count], sizes[i * of_each :][:of_each]) for i in each
    )
    return torch.cat([*parts], -1)


def _fake_several(x: Tensor, constants: Sequence[Tensor | None], sizes: list[int]) -> Tensor:
    of_each = len(LinearSizes._fields)
    _check(x, sizes[:of_each])
    return x.new_empty((*x.shape[:-1], sum(sizes[::of_each])))


def _without_inputs(x: Tensor, bias: Tensor | None, of: LinearSizes) -> Tensor:
    added = x.new_zeros(of.channels) if bias is None else bias
    return added.expand(*x.shape[:-1], of.channels).clone(memory_format=torch.contiguous_format)


def _check(x: Tensor, sizes: list[int]) -> None:
    of = LinearSizes(*sizes)
    if x.dtype != torch.float32 or x.dim() == 0 or x.shape[-1] != of.inputs:
        raise ValueError(
            f"{NAMESPACE}::linear_packed: expected x float32 (..., {of.inputs}), got {x.dtype} "
            f"{tuple(x.shape)}"
        )


def _check_constants(tensors: Sequence[Tensor | None]) -> None:
    """Check what the C++ reads by address: a module may have been converted to another dtype."""
    for name, tensor, dtypes in zip(_CONSTANTS, tensors, _CONSTANTS.values(), strict=True):
        if tensor is not None and (tensor.dtype not in dtypes or not tensor.is_contiguous()):
            wanted = " or ".join(str(dtype) for dtype in dtypes)
            raise ValueError(
                f"{NAMESPACE}::linear_packed: {name} must be contiguous with dtype {wanted}, got "
                f"{tensor.dtype}, strides {tensor.stride()}; cast the model before quantizing it"
            )


def _fake(x: Tensor, *arguments: Any) -> Tensor:
    _check(x, arguments[-1])
    return x.new_empty((*x.shape[:-1], arguments[-1][0]))


register(
    NAMESPACE,
    {
        "linear_packed": (
            "(Tensor x, Tensor weight, Tensor scales, Tensor? zeros, Tensor? columns, Tensor? bias,"
            " int[] sizes) -> Tensor"
        ),
        "linears_packed": "(Tensor x, Tensor?[] constants, int[] sizes) -> Tensor",
    },
    {"linear_packed": (_compute, _fake), "linears_packed": (_several, _fake_several)},
    torch.Tag.needs_contiguous_strides,
)
OPERATOR: Final = torch.ops.qompose_x86.linear_packed.default
SEVERAL: Final = torch.ops.qompose_x86.linears_packed.default
