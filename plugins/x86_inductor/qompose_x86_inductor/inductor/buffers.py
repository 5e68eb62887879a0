# SPDX-License-Identifier: Apache-2.0
"""What calls of C++ of our own read besides activations: buffers of the graph's module."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor


def registered(gm: torch.fx.GraphModule, value: Tensor) -> str:
    """Return the name of a new buffer of a module."""
    name = f"_qompose_x86_native_{sum(1 for _ in gm.buffers())}"
    gm.register_buffer(name, value.detach(), persistent=False)
    return name


def constant(gm: torch.fx.GraphModule, node: Any) -> Tensor | None:
    """Return the tensor of a module that a node stands for, or None."""
    if not isinstance(node, torch.fx.Node) or node.op != "get_attr":
        return None
    value = operator.attrgetter(str(node.target))(gm)
    return value if isinstance(value, Tensor) else None
