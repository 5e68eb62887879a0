# SPDX-License-Identifier: Apache-2.0
"""The functions that may follow a product, under oneDNN's names for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch.nn.functional as F
from torch import Tensor


class PostOp(NamedTuple):
    """A function that follows a product.

    ``arity``: the length of ``post_op_args``; ``compute``: its meaning in float, given the real
    values, ``post_op_args`` and ``algorithm``; ``operators``: which operators accept it; ``fused``:
    which of them leave it to oneDNN. The others compute it on oneDNN's float32 result.
    """

    arity: int
    compute: Callable[[Tensor, Sequence[float], str], Tensor]
    operators: tuple[str, ...]
    fused: tuple[str, ...]


_SUMS: Final = ("conv2d_add", "linear_add")
_UNARY: Final = ("linear", "conv2d")
_EVERYWHERE: Final = (*_UNARY, *_SUMS)

# oneDNN's quantized convolution has neither gelu nor leaky_relu.
POST_OPS: Final[dict[str, PostOp]] = {
    "none": PostOp(0, lambda real, args, algorithm: real, _EVERYWHERE, _EVERYWHERE),
    "relu": PostOp(0, lambda real, args, algorithm: F.relu(real), _EVERYWHERE, _EVERYWHERE),
    "hardtanh": PostOp(2, lambda real, args, algorithm: real.clamp(*args), _UNARY, _UNARY),
    "hardswish": PostOp(0, lambda real, args, algorithm: F.hardswish(real), _UNARY, _UNARY),
    "swish": PostOp(0, lambda real, args, algorithm: F.silu(real), _UNARY, _UNARY),
    "gelu": PostOp(
        0, lambda real, args, algorithm: F.gelu(real, approximate=algorithm), _UNARY, ("linear",)
    ),
    "leaky_relu": PostOp(
        1, lambda real, args, algorithm: F.leaky_relu(real, args[0]), _UNARY, ("linear",)
    ),
    "tanh": PostOp(0, lambda real, args, algorithm: real.tanh(), ("linear",), ("linear",)),
}

POST_SCHEMA: Final = 'str post_op="none", float[] post_op_args=[], str algorithm="none"'
"""A post-op in the schema of an operator that accepts all of them."""
