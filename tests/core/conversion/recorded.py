# SPDX-License-Identifier: Apache-2.0
"""What the nodes of a program compute, and whether the examples that they have are like it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node


class _Watched(Interpreter):
    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.seen: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        self.seen[n] = super().run_node(n)
        return self.seen[n]


def computed(model: GraphModule, *inputs: Tensor) -> dict[Node, Any]:
    """By node, what it gives."""
    watched = _Watched(model)
    watched.run(*inputs)
    return watched.seen


def wrongly_recorded(model: GraphModule, *inputs: Tensor) -> list[str]:
    """The nodes whose example has another type or shape than what they give."""
    wrong = []
    for node, result in computed(model, *inputs).items():
        recorded = node.meta.get("val")
        if isinstance(result, Tensor) and node.op != "placeholder":
            same = recorded.dtype is result.dtype and len(recorded.shape) == result.dim()
            sizes = zip(recorded.shape, result.shape, strict=False)
            if not same or any(a != b for a, b in sizes if isinstance(a, int)):
                wrong.append(f"{node.format_node()}: {recorded}")
    return wrong
