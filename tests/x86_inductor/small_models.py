# SPDX-License-Identifier: Apache-2.0
"""What tests of the rules share: functions of layers as models, and the way through quantization."""

from __future__ import annotations

from typing import Any

import qompose
import torch
from qompose.program.decompositions import same_layout
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.products import x86


def converted(model: nn.Module, *inputs: Tensor, **choices: Any) -> GraphModule:
    """The Q/DQ model, calibrated with its inputs; `choices` are those of the configuration."""
    quantizer = x86(range="minmax", balance=False, algorithms=(), **choices)
    exported = torch.export.export(model.eval(), inputs)
    prepared = qompose.prepare_pt2e(exported, quantizer)
    prepared(*inputs)
    return qompose.convert_pt2e(prepared)


def lowered(model: nn.Module, x: Tensor, dynamic_shapes: Any = None, **choices: Any) -> GraphModule:
    """The lowered model, calibrated with its input; `choices` are those of the configuration."""
    result = qompose.quantize(
        model.eval(), (x,), backends=x86(**choices), calibration=[(x,)], progress=False,
        dynamic_shapes=dynamic_shapes,
    ).model  # fmt: skip
    assert isinstance(result, GraphModule)
    return result


def rules(model: GraphModule) -> dict[str, str]:
    """By operator, the rule that claims it."""
    return {row.name: row.rule for row in qompose.report(model).rows if row.owner}


def reasons(model: GraphModule) -> str:
    """Why operators stayed in float, as the report says."""
    return "; ".join(row.reason for row in qompose.report(model).rows)


def calls(model: GraphModule) -> list[str]:
    """The operators that a graph calls, without their overloads."""
    nodes = (node for node in model.graph.nodes if node.op == "call_function")
    return [str(node.target).rpartition(".")[0] for node in nodes]


def assert_lowers_right(model: GraphModule, *inputs: Tensor) -> GraphModule:
    """The lowered model gives what the Q/DQ model gives, to one step of its own, and writes to no input."""
    lowered = qompose.lower(model)
    before = [each.clone() for each in inputs]
    with torch.no_grad():
        found, expected = lowered(*inputs), model(*inputs)
    assert all(map(torch.equal, inputs, before))
    assert found.shape == expected.shape and same_layout(found, expected)
    largest = max(float(expected.abs().max()), 1e-3)
    assert float((found - expected).abs().max()) <= 2e-2 * largest
    close = (found - expected).abs() <= 1e-4 * largest
    assert float(close.float().mean()) > 0.95  # a value between two integers may become either
    return lowered
