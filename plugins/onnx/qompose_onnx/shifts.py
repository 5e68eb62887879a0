# SPDX-License-Identifier: Apache-2.0
"""What torch's exporter is to put for shifts of bits: arithmetic, which all runtimes compute alike.

ONNX has BitShift for unsigned types alone. What torch's exporter makes of it returns uint8 as int8, and
OpenVINO 2026.4 rounds the shifted bits of uint8 and int8, and shifts negative integers wrongly.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset20 as op
from torch.fx import Node

aten = torch.ops.aten

INT64: Final = ir.DataType.INT64
AT_ONCE: Final = 30
"""Bits of a shift whose factor fits into 32 bits, with which OpenVINO computes what has 64."""


def _number(value: int) -> Any:
    return op.Constant(value=ir.tensor(np.asarray(value, np.int64)))


def _factors(bits: int) -> list[Any]:
    whole, rest = divmod(bits, AT_ONCE)
    return [_number(2**n) for n in (*[AT_ONCE] * whole, rest) if n]


def right_shift(x: Any, bits: int) -> Any:
    """Put `floor(x / 2**bits)`."""
    integers = op.Cast(x, to=INT64)
    for factor in _factors(min(bits, 63)):  # by more, only the sign is left
        integers = op.Div(op.Sub(integers, op.Mod(integers, factor)), factor)
    return op.Cast(integers, to=x.dtype)


def left_shift(x: Any, bits: int) -> Any:
    """Put `x * 2**bits`, without the bits that the type of `x` has no place for."""
    held = 8 * x.dtype.itemsize
    integers = op.Cast(x, to=INT64)
    for factor in _factors(min(bits, held)):
        integers = op.Mul(integers, factor)
    if held < 32:  # 32 and 64 bits wrap by themselves
        integers = op.Mod(integers, _number(2**held))
        if x.dtype.is_signed():
            wraps = op.GreaterOrEqual(integers, _number(2 ** (held - 1)))
            integers = op.Sub(integers, op.Where(wraps, _number(2**held), _number(0)))
    return op.Cast(integers, to=x.dtype)


SHIFTS: Final[Mapping[Any, Callable[..., Any]]] = {
    aten.__rshift__.Scalar: right_shift,
    aten.__lshift__.Scalar: left_shift,
}
"""By operator, for the table of translations of `torch.onnx.export`."""
_SAME: Final = {
    aten.bitwise_right_shift.Tensor_Scalar: aten.__rshift__.Scalar,
    aten.bitwise_left_shift.Tensor_Scalar: aten.__lshift__.Scalar,
}

_OF_SIZES: Final[Mapping[Any, Callable[..., Any]]] = {
    operator.rshift: operator.floordiv,
    operator.lshift: operator.mul,
}


def by_numbers(nodes: Iterable[Node]) -> None:
    """Let shifts by numbers be the operators that have translations, in place.

    Torch's exporter promotes the number of the others to a tensor, before it translates them. Of sizes, as in
    `x.shape[0] >> 1`, it translates only arithmetic.
    """
    for node in nodes:
        target: Any = node.target
        node.target = _SAME.get(target, target)
        if target in _OF_SIZES and isinstance(node.args[1], int):
            node.target, node.args = _OF_SIZES[target], (node.args[0], 2 ** node.args[1])
