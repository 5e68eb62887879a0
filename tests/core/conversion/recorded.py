# SPDX-License-Identifier: Apache-2.0
"""Whether the examples that nodes have are what they compute."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node


class _Recorded(Interpreter):
    """Collects the nodes whose recorded example is not what they compute, in type or shape."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.wrong: list[str] = []

    def run_node(self, n: Node) -> Any:
        result, recorded = super().run_node(n), n.meta.get("val")
        if isinstance(result, Tensor) and n.op != "placeholder":
            same = recorded.dtype is result.dtype and len(recorded.shape) == result.dim()
            sizes = zip(recorded.shape, result.shape, strict=False)
            if not same or any(a != b for a, b in sizes if isinstance(a, int)):
                self.wrong.append(f"{n.format_node()}: {recorded}")
        return result


def wrongly_recorded(model: GraphModule, *inputs: Tensor) -> list[str]:
    """Each such node, with what is recorded for it."""
    interpreter = _Recorded(model)
    interpreter.run(*inputs)
    return interpreter.wrong
