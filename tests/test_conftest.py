# SPDX-License-Identifier: Apache-2.0
"""What tests patch in torch makes them quicker, and changes nothing that they see."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.processes import python

TABLE = "print(*sorted(map(str, torch.export.default_decompositions())), sep='\\n')"


def test_programs_are_decomposed_as_without_tests() -> None:
    """Also where the table of decompositions is the first that looks for operators."""
    found = python("-c", f"import tests.conftest, torch; {TABLE}")
    assert found == python("-c", f"import torch; {TABLE}")


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def test_stacks_of_nodes_have_their_lines() -> None:
    """Though none is read before somebody asks."""
    program = torch.export.export(Sine(), (torch.ones(2),))
    (node,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    assert node.stack_trace is not None and "return x.sin()" in node.stack_trace
