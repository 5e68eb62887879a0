# SPDX-License-Identifier: Apache-2.0
"""What keeps Inductor's own patterns from oneDNN's operators in a graph that is frozen.

Freezing looks for a product and a function behind it, to fuse them as its own quantization leaves them. Of a
product that has a function in it already, or gives integers, it thinks that this cannot be, and fails (torch
2.13: "assert kwargs['postop_name'] == 'none'", KeyError 'o_inv_scale'). So an operator that does nothing
stands between the two until those patterns are through; `remove` takes it away then.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Node

from qompose_x86_inductor.ops import NAMESPACE
from qompose_x86_inductor.registration import register

_LIBRARY: Final = register(
    NAMESPACE,
    {"unchanged": "(Tensor x) -> Tensor"},
    {"unchanged": (Tensor.clone, torch.empty_like)},
)
OPERATOR: Final = getattr(torch.ops, NAMESPACE).unchanged.default


def needed(arguments: dict[str, Any]) -> bool:
    """Whether Inductor misreads what may stand behind a product with these arguments, by name."""
    return arguments.get("post_op", "none") != "none" or arguments.get("out_dtype") is not None


def put_behind(node: Node) -> None:
    """Let the readers of a product read it through the operator, in place."""
    with node.graph.inserting_after(node):
        shield = node.graph.call_function(OPERATOR, (node,))
    shield.meta.update({key: node.meta[key] for key in ("val",) if key in node.meta})
    node.replace_all_uses_with(shield, delete_user_cb=lambda user: user is not shield)


def remove(node: Node) -> None:
    """Let readers read the product itself, in Inductor's graph and in place."""
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    node.graph.erase_node(node)
