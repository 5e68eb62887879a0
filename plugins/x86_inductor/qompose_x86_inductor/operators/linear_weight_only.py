# SPDX-License-Identifier: Apache-2.0
"""The operators ``linear_*_weight``: floats multiplied by a weight that is stored in fewer bits.

``x`` is (..., in), float32, bfloat16 or float16, and the result (..., out) has its dtype; the arithmetic
is that of float32. The bias is a float (out,).

``linear_int8_weight`` multiplies integers, where oneDNN does so exactly: each row of ``x`` becomes 32-bit
fixed-point numbers, whose range is that of the row, and these become four rows of 8 bits (`_planes`), which
one product reads the weight for. Inputs are rounded to 24 bits, as float32 is, and by 2**-32 of the largest
of their row: beside an input of 1e8, those of 1 have few bits left. torch's own kernel takes 16 times as long
for one row and 140 times for 64 (torch 2.13, AVX-512); it is what other machines get, and what the other
operators use: it reads the weight as it is stored. (Those for bfloat16 read past the end of rows whose length
is not a multiple of 16, and round scales.)

=====================  ====================================  ==============================
operator               weight                                w_scale
=====================  ====================================  ==============================
linear_int8_weight     int8 (out, in)                        float32 (out,)
linear_int4_weight     int8 (out, in), values in -8 .. 7     float32 (out, in / group)
linear_float16_weight  float16 (out, in); ``x`` float32      none
=====================  ====================================  ==============================

The scales of ``linear_int4_weight`` may be (out, in / group, 2): each with the value of the integer 0 beside
it, which is ``-zero_point * scale``.

The functions ``*_in_graph`` compute the same in operators of torch alone, for compilers: the packing
that they hold depends on the weight alone, so that freezing folds it. Its layout is that of this
machine's vector instructions (``torch.backends.cpu.get_cpu_capability()``), and only right on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from qompose.backend import kit
from torch import Tensor

from qompose_x86_inductor.onednn import calls, exactness
from qompose_x86_inductor.onednn.arguments import FLOAT32, NAMESPACE, Product, check_matrices
from qompose_x86_inductor.onednn.packed_weights import cached
from qompose_x86_inductor.operators.registration import register

GROUP_SIZES: Final = (32, 64, 128, 256)
"""The group sizes of int4 weights that torch's kernel supports."""

FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)

_ROWS: Final = 16
"""The kernel takes int4 weights whose output channels are a multiple of this."""

SCHEMAS: Final[dict[str, str]] = {
    "linear_int8_weight": "(Tensor x, Tensor weight, Tensor w_scale, Tensor? bias) -> Tensor",
    "linear_int4_weight": "(Tensor x, Tensor weight, Tensor w_scale, Tensor? bias) -> Tensor",
    "linear_float16_weight": "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
}


_PLANES: Final = 4
_BASE: Final = 256
_MIDDLE: Final = 128
"""The uint8 that stands for the digit 0; digits are -128 to 127."""
_LARGEST: Final = 127 * _BASE**3
"""A number of four digits that float32 holds, and none of whose smaller ones carries beyond them."""
_LEAST_RANGE: Final = 1e-30


def _planes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 rows (M, in) as digits, uint8 (4 M, in), the highest first, and scales, (M, 1).

    Row `m` is `scale[m] * sum(256**(3 - k) * (digits[k * M + m] - 128) for k in range(4))`.
    """
    scale = rows.abs().amax(1, keepdim=True).clamp(min=_LEAST_RANGE) / _LARGEST
    left = torch.round(rows / scale).clamp(-_LARGEST, _LARGEST)
    digits: list[Tensor] = []
    for _ in range(_PLANES - 1):
        carried = torch.floor((left + _MIDDLE) * (1 / _BASE))
        digits.insert(0, left - _BASE * carried)
        left = carried
    return (torch.cat([left, *digits]) + _MIDDLE).to(torch.uint8), scale


def _by_planes(
    x: Tensor, bias: Tensor | None, channels: int, sums: Callable[[Tensor], Tensor]
) -> Tensor:
    """Multiply by integers; ``sums`` returns float32 products (4 M, out) of digits, scales included."""
    digits, scale = _planes(_rows(x))
    total, *lower = sums(digits).view(_PLANES, -1, channels).unbind(0)
    for plane in lower:
        total = total * _BASE + plane
    return _finish(total * scale, x, bias)


def _int8_weight(x: Tensor, weight: Tensor, w_scale: Tensor, bias: Tensor | None) -> Tensor:
    _check_int8(x, weight, w_scale)
    if x.numel() == 0 or not multiplies_integers(weight):
        return int8_weight_in_float(x, weight, w_scale, bias)

    def sums(digits: Tensor) -> Tensor:
        product: Tensor = torch.ops.qompose_x86.linear.default(
            digits, 1.0, _MIDDLE, weight, w_scale, None
        )
        return product

    return _by_planes(x, bias, weight.shape[0], sums)


def multiplies_integers(weight: Tensor) -> bool:
    """Return whether oneDNN's sums of products with an int8 weight (out, in) are exact here."""
    return 0 < weight.shape[1] <= kit.MAX_DEPTH and exactness.admits(weight)


def int8_weight_in_graph(
    x: Tensor, weight: Tensor, w_scale: Tensor, bias: Tensor | None, *, zero_points: Tensor
) -> Tensor:
    """Compute ``linear_int8_weight`` for a weight that `multiplies_integers`; no ``x`` may be empty.

    ``zero_points`` are int32 zeros (out,).
    """
    _check_int8(x, weight, w_scale)

    def sums(digits: Tensor) -> Tensor:
        packed = calls.Packed(calls.prepack_linear(weight), zero_points)
        product = Product(digits, 1.0, _MIDDLE, weight, w_scale, None)
        return calls.linear(product, packed, FLOAT32)

    return _by_planes(x, bias, weight.shape[0], sums)


def int8_weight_in_float(x: Tensor, weight: Tensor, w_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``linear_int8_weight`` for any weight by torch's kernel, which needs no packing."""
    _check_int8(x, weight, w_scale)
    if weight.shape[1] == 0:
        return _without_inputs(x, weight, bias)
    product = torch.ops.aten._weight_int8pack_mm.default
    return _finish(product(_rows(x), weight.contiguous(), w_scale), x, bias)


def _check_int8(x: Tensor, weight: Tensor, w_scale: Tensor) -> None:
    _check("linear_int8_weight", x, weight, torch.int8)
    _check_scales("linear_int8_weight", weight, w_scale, w_scale.shape == weight.shape[:1])


def int4_weight_in_graph(x: Tensor, weight: Tensor, w_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``linear_int4_weight``."""
    group = _check_groups(x, weight, w_scale)
    return _int4(x, weight.shape[0], group, pack_int4(weight), pack_scales(w_scale), bias)


def _int4_weight(x: Tensor, weight: Tensor, w_scale: Tensor, bias: Tensor | None) -> Tensor:
    group = _check_groups(x, weight, w_scale)
    packed = cached(weight, "int4", lambda: pack_int4(_in_four_bits(weight)))
    scales = cached(w_scale, "int4", lambda: pack_scales(w_scale))
    return _int4(x, weight.shape[0], group, packed, scales, bias)


def pack_int4(weight: Tensor) -> Tensor:
    """Return an int8 weight (out, in) with values in -8 .. 7 as torch's int4 kernel reads it: uint8."""
    whole = _in_full_rows(weight).to(torch.int32) + 8
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default(whole, 1)
    return packed


def pack_scales(w_scale: Tensor) -> Tensor:
    """Return scales as that kernel reads them: float32 (groups, out, 2), with the value of the integer 0."""
    both = w_scale if w_scale.dim() == 3 else F.pad(w_scale.unsqueeze(-1), (0, 1))
    return _in_full_rows(both).transpose(0, 1).contiguous()


def _in_full_rows(constant: Tensor) -> Tensor:
    """Repeat rows of a tensor up to a number that the kernel accepts; their results are cut off."""
    rows = constant.shape[0]
    lacking = -rows % _ROWS
    whole, part = divmod(lacking, max(rows, 1))
    return torch.cat([constant] * (1 + whole) + [constant[:part]]) if lacking else constant


def _int4(
    x: Tensor, channels: int, group: int, packed: Tensor, scales: Tensor, bias: Tensor | None
) -> Tensor:
    product = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    return _finish(product(_rows(x), packed, group, scales)[:, :channels], x, bias)


def float16_weight_in_graph(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``linear_float16_weight``."""
    return _float16(x, weight, _pack_float16, bias)


def _float16_weight(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _float16(x, weight, lambda w: cached(w, "float16", lambda: _pack_float16(w)), bias)


def _pack_float16(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.onednn.linear_prepack_fp16.default(weight.contiguous(), None)
    return packed


def _float16(
    x: Tensor, weight: Tensor, pack: Callable[[Tensor], Tensor], bias: Tensor | None
) -> Tensor:
    _check("linear_float16_weight", x, weight, torch.float16)
    if weight.shape[1] == 0:
        return _without_inputs(x, weight, bias)
    product = torch.ops.onednn.linear_dynamic_fp16.default
    result: Tensor = product(_rows(x), pack(weight), bias)
    return result.view(*x.shape[:-1], weight.shape[0])


# -- in common ------------------------------------------------------------------


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).to(torch.float32).contiguous()


def _without_inputs(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the result for a weight of no columns, zeros and the bias; torch's kernels refuse those."""
    return _finish(x.new_zeros((*x.shape[:-1], weight.shape[0])), x, bias)


def _finish(product: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """Add the bias, and give the result the dtype and the leading sizes of ``x``."""
    total = product if bias is None else product + bias
    return total.to(x.dtype).reshape(*x.shape[:-1], total.shape[-1]).contiguous()


def _check(operator: str, x: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    floats = FLOATS if dtype == torch.int8 else (torch.float32,)
    if x.dtype not in floats or weight.dtype != dtype:
        given = f"{x.dtype} and {weight.dtype}"
        raise ValueError(
            f"{NAMESPACE}::{operator}: expected x in {floats} and weight {dtype}, got {given}"
        )
    check_matrices(operator, x, weight)


def _check_scales(operator: str, weight: Tensor, w_scale: Tensor, fits: bool) -> None:
    if w_scale.dtype != torch.float32 or not fits:
        given = f"{w_scale.dtype} {tuple(w_scale.shape)} for a weight {tuple(weight.shape)}"
        raise ValueError(f"{NAMESPACE}::{operator}: w_scale does not fit: {given}")


def _check_groups(x: Tensor, weight: Tensor, w_scale: Tensor) -> int:
    """Return the size of a weight's groups."""
    _check("linear_int4_weight", x, weight, torch.int8)
    depth, groups = weight.shape[1], w_scale.shape[1] if w_scale.dim() > 1 else 0
    size = depth // groups if groups else 0
    one = (weight.shape[0], groups)
    fits = w_scale.shape in (one, (*one, 2)) and size * groups == depth
    _check_scales("linear_int4_weight", weight, w_scale, fits and size in GROUP_SIZES)
    return size


def _in_four_bits(weight: Tensor) -> Tensor:
    low, high = (int(bound) for bound in torch.aminmax(weight))
    if low < -8 or high > 7:
        raise ValueError(
            f"{NAMESPACE}::linear_int4_weight: expected values in -8 .. 7, got {low} .. {high}"
        )
    return weight


def _like_x(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


register(
    NAMESPACE,
    SCHEMAS,
    {
        "linear_int8_weight": (_int8_weight, _like_x),
        "linear_int4_weight": (_int4_weight, _like_x),
        "linear_float16_weight": (_float16_weight, _like_x),
    },
)
