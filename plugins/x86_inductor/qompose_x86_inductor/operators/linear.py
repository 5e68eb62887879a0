# SPDX-License-Identifier: Apache-2.0
"""The operators ``linear`` and ``linear_add``: int8 matrix products by oneDNN."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qompose_x86_inductor.onednn import calls, packed_weights
from qompose_x86_inductor.onednn.arguments import (
    FLOAT32,
    Output,
    Product,
    ProductCall,
    flip_sign_bit,
    matrix_shape,
)
from qompose_x86_inductor.onednn.calls import Packed


def linear(*arguments: Any) -> Tensor:
    """Compute ``qompose_x86::linear``."""
    _, product, out, *_ = ProductCall.read("linear", arguments).checked()
    packed = packed_weights.linear(product.weight)
    # oneDNN gives an empty x of rank 3 or more a result of rank 2.
    if packed.weight is not None and product.x.numel() > 0:
        return calls.linear(product, packed, out)
    return out.finish(_exact(product))


def linear_fake(*arguments: Any) -> Tensor:
    """Return its result without values."""
    return _empty(ProductCall.read("linear", arguments).checked())


def linear_in_graph(*arguments: Any, zero_points: Tensor) -> Tensor:
    """Compute it in oneDNN's operators, packing included; ``zero_points`` is int32 zeros (out,)."""
    _, product, out, *_ = ProductCall.read("linear", arguments).checked()
    packed = Packed(calls.prepack_linear(product.weight), zero_points)
    return retyped(calls.linear(product, packed, typed_like(product.x, out)), out)


def linear_add(*arguments: Any) -> Tensor:
    """Compute ``qompose_x86::linear_add``."""
    _, product, out, _, summand = ProductCall.read("linear_add", arguments).checked()
    assert summand is not None
    packed = packed_weights.linear(product.weight)
    if packed.weight is not None and product.x.numel() > 0:
        return calls.linear_sum(product, packed, summand.tensor, out)
    return out.finish(_exact(product) + summand.tensor)


def linear_add_fake(*arguments: Any) -> Tensor:
    """Return its result without values."""
    return _empty(ProductCall.read("linear_add", arguments).checked())


def linear_add_in_graph(*arguments: Any, zero_points: Tensor) -> Tensor:
    """Compute it in oneDNN's operators, packing included; ``zero_points`` is int32 zeros (out,).

    The summand is added in float32, which Inductor fuses with what follows.
    """
    _, product, out, _, summand = ProductCall.read("linear_add", arguments).checked()
    assert summand is not None
    packed = Packed(calls.prepack_linear(product.weight), zero_points)
    return out.finish(calls.linear(product, packed, FLOAT32) + summand.tensor)


def typed_like(x: Tensor, out: Output) -> Output:
    """Return the output to ask oneDNN for in a graph that Inductor compiles; `retyped` undoes it.

    Inductor assumes that integers which oneDNN makes have the dtype of ``x``, and misreads others
    silently (torch 2.13, `QConvPointWisePT2E.create`).
    """
    if out.dtype in (torch.float32, x.dtype):
        return out
    shift = 128 if x.dtype == torch.uint8 else -128
    return out._replace(dtype=x.dtype, zero_point=out.zero_point + shift)


def retyped(result: Tensor, out: Output) -> Tensor:
    """Return the result of a product by `typed_like` in the dtype of ``out``."""
    if result.dtype == out.dtype:
        return result
    flipped = flip_sign_bit(result)
    return flipped if out.dtype == torch.uint8 else flipped.view(torch.int8)


def _empty(call: ProductCall) -> Tensor:
    return call.product.x.new_empty(matrix_shape(call.product), dtype=call.out.dtype)


def _exact(product: Product) -> Tensor:
    return product.real(F.linear(*product.centred()), 0)
