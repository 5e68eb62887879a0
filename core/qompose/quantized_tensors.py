# SPDX-License-Identifier: Apache-2.0
"""What kernels are told of a tensor: the node that holds it, and what its integers mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from qompose.graph import constant_of
from qompose.rules import NotLowerable


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized tensor: the node that holds its integers, and what they mean.

    `value = (integer - zero_point) * scale`. Per tensor, `scale` is a float and `zero_point` an int; per
    channel they are nodes of shape `(C,)`, along dimension `axis`; in groups of `group` integers within the
    rows of a matrix, of shape `(rows, groups)`. `low` and `high` bound the integers.
    """

    node: Node
    scale: Any
    zero_point: Any
    low: int
    high: int
    dtype: torch.dtype
    axis: int | None = None
    group: int | None = None

    @property
    def tensor(self) -> Tensor:
        """Return the integers of a parameter, in its shape.

        Raises:
            NotLowerable: the tensor is computed when the model runs.
        """
        return _constant(self.node)

    @property
    def scales(self) -> Tensor:
        """Return the scale as a float32 tensor, `(C,)` per channel and `(1,)` per tensor; see `group`.

        Raises:
            NotLowerable: it is computed when the model runs.
        """
        return _constant(self.scale) if isinstance(self.scale, Node) else torch.tensor([self.scale])

    @property
    def zero_points(self) -> Tensor:
        """Return the zero point as a tensor, `(C,)` per channel and `(1,)` per tensor; see `group`.

        Raises:
            NotLowerable: it is computed when the model runs.
        """
        if isinstance(self.zero_point, Node):
            return _constant(self.zero_point)
        return torch.tensor([self.zero_point])

    @property
    def qparams(self) -> tuple[Any, ...]:
        """Return all but the node: equal for tensors that may be exchanged."""
        return (self.scale, self.zero_point, self.low, self.high, self.dtype, self.axis, self.group)


@dataclass(frozen=True)
class DynamicTensor:
    """A tensor that is quantized when the model runs: the node that holds its floats, and how it is.

    One scale is for all of its last `dims` dimensions, None: for the whole tensor. The zero point is 0 where
    `symmetric`. `low` and `high` bound the integers, and `eps` the scale, from below; None: only that it is
    above 0, in the way of the operator that chooses it.
    """

    node: Node
    dims: int | None
    symmetric: bool
    low: int
    high: int
    dtype: torch.dtype
    eps: float | None = None


def _constant(node: Node) -> Tensor:
    constant = constant_of(node)
    if constant is None:
        raise NotLowerable(f"{node.name} is computed, not a parameter")
    return constant
