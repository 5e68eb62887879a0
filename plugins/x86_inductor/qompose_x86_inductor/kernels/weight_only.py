# SPDX-License-Identifier: Apache-2.0
"""The call that replaces linears whose weight is stored as float16."""

from __future__ import annotations

import torch
from qompose.backend import NotLowerable, Region
from torch.fx import Node

from qompose_x86_inductor.onednn.arguments import NAMESPACE

_OPS = getattr(torch.ops, NAMESPACE)


def float16_weight(region: Region) -> Node:
    """Emit a linear of floats by a weight that is stored as float16.

    Raises:
        NotLowerable: the weight is stored otherwise.
    """
    read = region.inputs("weight")[0]
    stored = read.args[0] if read.target is torch.ops.aten.to.dtype else read
    if not isinstance(stored, Node) or stored.meta["val"].dtype is not torch.float16:
        raise NotLowerable(f"its weight {read.name} is not stored as float16")
    (source,) = region.inputs("input")
    bias = region.argument("linear", "bias")
    return region.call(_OPS.linear_float16_weight.default, source, stored, bias)
