# SPDX-License-Identifier: Apache-2.0
"""Factors of channels between a product's function and the quantization of its result, as a part of it.

SmoothQuant leaves them where the function keeps them from the weight: linear, gelu, mul, quantize. Between
our C++ and what Inductor makes of the rest, all values would go through memory as floats.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, fx

from qompose_x86_inductor.inductor import buffers
from qompose_x86_inductor.onednn.arguments import CONVOLUTIONS, QUANTIZED, ProductCall

_MULTIPLY: Final = torch.ops.aten.mul.Tensor
QUANTIZE: Final = torch.ops.quantized_decomposed.quantize_per_tensor.default


def take(node: fx.Node, call: ProductCall) -> tuple[ProductCall, Tensor | None]:
    """Let a product return the integers that others make of it, where its only reader multiplies it first.

    Args:
        node: a call that returns floats by a function, read by what is removed then, in place.

    Returns:
        The call with that scale, zero point and dtype, and the factors (out,); or as it is, and None.
    """
    multiplied = _only_reader(node, _MULTIPLY)
    quantized = None if multiplied is None else _only_reader(multiplied, QUANTIZE)
    if call.out.dtype not in (None, torch.float32) or multiplied is None or quantized is None:
        return call, None
    factors, out = _factors(multiplied, node, call.operator), _integers(quantized)
    if factors is None or out is None:
        return call, None
    quantized.replace_all_uses_with(node)
    node.meta["val"] = node.meta["val"].to(out["dtype"])
    for read in (quantized, multiplied):
        node.graph.erase_node(read)
    return call._replace(out=call.out._replace(**out)), factors


def _only_reader(node: fx.Node, target: Any) -> fx.Node | None:
    (reader, *others) = node.users or (None,)
    return reader if reader is not None and not others and reader.target is target else None


def _factors(multiplied: fx.Node, node: fx.Node, operator: str) -> Tensor | None:
    """Return the constant (out,) by which each channel of a matrix or an image is multiplied."""
    x, other = multiplied.args
    gm, result = node.graph.owning_module, node.meta.get("val")
    assert gm is not None
    value = buffers.constant(gm, other if x is node else x)
    if value is None or result is None:
        return None
    after, rank = (2, 4) if operator in CONVOLUTIONS else (0, result.dim())
    channels = result.shape[-1 - after]
    before = value.dim() - 1 - after
    fits = 0 <= before < rank - after and [*value.shape] == [1] * before + [channels] + [1] * after
    return value.flatten() if fits else None


def _integers(quantized: fx.Node) -> dict[str, Any] | None:
    """Return scale, zero point and dtype, where the bounds are the dtype's."""
    if len(quantized.args) != 6 or quantized.args[5] not in QUANTIZED:
        return None
    _, scale, zero_point, low, high, dtype = quantized.args
    limits = torch.iinfo(dtype)  # type: ignore[arg-type]
    if (low, high) != (limits.min, limits.max):
        return None
    return {"scale": scale, "zero_point": zero_point, "dtype": dtype}
