# SPDX-License-Identifier: Apache-2.0
"""What is rewritten in an edge program before XNNPACK's partitioner sees it."""

from __future__ import annotations

from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.passes.infra.pass_base import PassResult

from qompose_xnnpack.partitioning import computes, name_of

_EXPAND = "aten.expand_copy.default"


def without_idle_expands(module: GraphModule) -> PassResult:
    """Let what reads an expand to the size that its input has read the input, in place.

    Decomposing a matrix product leaves one at each operand. XNNPACK has no such operator, so it would
    end a delegate on both sides of every product, to copy the operand with a portable kernel.
    """
    idle = [node for node in module.graph.nodes if _is_idle(node)]
    for node in idle:
        node.replace_all_uses_with(node.all_input_nodes[0])
        module.graph.erase_node(node)
    return PassResult(module, bool(idle))


def _is_idle(node: Node) -> bool:
    if not computes(node) or name_of(node) != _EXPAND or _is_returned(node):
        return False
    before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return before.dim() == after.dim() and all(
        statically_known_true(old == new)
        for old, new in zip(
            (*before.shape, *before.stride()), (*after.shape, *after.stride()), strict=True
        )
    )


def _is_returned(node: Node) -> bool:
    """Whether a node is an output, which has a name of its own."""
    return any(user.op == "output" for user in node.users)
