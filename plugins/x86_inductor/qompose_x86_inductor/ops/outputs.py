# SPDX-License-Identifier: Apache-2.0
"""What every operator ends with: a function behind the sums, then a scale, a zero point and a dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qompose_x86_inductor.arguments import NAMESPACE, QUANTIZED


class PostOp(NamedTuple):
    """A function behind a product, under oneDNN's name for it.

    ``arity``: the length of ``post_op_args``; ``compute``: its meaning in float, given the real
    values, ``post_op_args`` and ``algorithm``; ``operators``: which operators take it; ``fused``:
    which of them leave it to oneDNN. The others compute it behind oneDNN's float32 result.
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
"""The last three of an `Output`, where an operator takes all of them."""


class Output(NamedTuple):
    """The arguments that every operator ends with, in the order of the schemas."""

    scale: float = 1.0
    zero_point: int = 0
    dtype: torch.dtype | None = None
    post_op: str = "none"
    args: Sequence[float] = ()
    algorithm: str = "none"

    def checked(self, operator: str) -> Output:
        """The same with a dtype. Raises ValueError on what the operator does not take."""
        dtype = self.dtype or torch.float32
        row = POST_OPS.get(self.post_op)
        taken = self.post_op == "none" or (row is not None and operator in row.operators)
        if row is None or not taken or len(self.args) != row.arity:
            known = [f"{k}/{v.arity}" for k, v in POST_OPS.items() if operator in v.operators]
            given = f"{self.post_op!r} with {len(self.args)} argument(s)"
            raise ValueError(f"{NAMESPACE}::{operator}: post_op {given} is not one of {known}")
        if dtype == torch.float32 and (self.scale, self.zero_point) != (1.0, 0):
            raise ValueError(f"{NAMESPACE}::{operator}: float32 results need out_scale=1, out_zp=0")
        if dtype != torch.float32 and dtype not in QUANTIZED:
            raise ValueError(
                f"{NAMESPACE}::{operator}: out_dtype {dtype} is not uint8/int8/float32"
            )
        return self._replace(dtype=dtype)

    def is_fused(self, operator: str) -> bool:
        """Whether oneDNN computes the post-op of this operator."""
        return operator in POST_OPS[self.post_op].fused

    def fused(self) -> tuple[Any, ...]:
        """The same for oneDNN, whose list of post-op arguments cannot be exported when empty."""
        args: list[float | None] = [*self.args]
        return (*self[:4], args or [None], self.algorithm)

    def finish(self, real: Tensor) -> Tensor:
        """What oneDNN does behind the sums: the post-op, then `quantize`."""
        return self.quantize(POST_OPS[self.post_op].compute(real, self.args, self.algorithm))

    def quantize(self, real: Tensor) -> Tensor:
        """Real values to this scale and dtype, rounding half to even and saturating."""
        if self.dtype not in QUANTIZED:
            return real.to(torch.float32)
        bounds = torch.iinfo(self.dtype)
        steps = torch.round(real / self.scale) + self.zero_point
        return steps.clamp(bounds.min, bounds.max).to(self.dtype)


FLOAT32: Final = Output(dtype=torch.float32)
"""Real values, with nothing behind the sums."""
