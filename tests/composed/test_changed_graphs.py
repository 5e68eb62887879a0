# SPDX-License-Identifier: Apache-2.0
"""What somebody changed after the conversion, to what no kernel takes, runs as the graph says."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from qompose_x86_inductor import X86InductorQuantizer, get_x86_inductor_linear_dynamic_fp16_config
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.toy import Model, sqnr
from tests.products import x86, xnnpack
from tests.xnnpack.executorch_target.runtime import converted

aten = torch.ops.aten
ROWS = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))


def assert_simulated(changed: GraphModule, x: Tensor, number: int) -> None:
    """As many operators, of those that do not have a kernel of a product."""
    changed.recompile()
    with pytest.warns(qompose.QomposeWarning):
        lowered = qompose.lower(changed)
    states = [row.state for row in qompose.report(lowered).rows]
    assert states.count("simulated (Q/DQ)") == number
    assert sqnr(changed(x), lowered(x)) > 35


@pytest.mark.parametrize("quantizer", [xnnpack(), x86()], ids=["xnnpack", "x86"])
def test_operators_that_end_with_another_scale_than_they_begin(quantizer: Any) -> None:
    """A pooling, a clamp and a copy."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.two(nn.functional.max_pool2d(m.one(x), 2).relu().clone())

    model, x = (
        Model(forward, one=nn.Conv2d(3, 4, 3), two=nn.Conv2d(4, 4, 2)),
        torch.randn(2, 3, 8, 8),
    )
    changed = converted(model, x, quantizer=quantizer)
    for node in changed.graph.nodes:
        if node.target in (aten.max_pool2d.default, aten.clone.default):
            (end,) = node.users
            for part in (end, *end.users):
                part.update_arg(1, 2 * part.args[1])
    assert_simulated(changed, x, 3)


@pytest.mark.parametrize(
    "quantizer",
    [xnnpack(is_dynamic=True), x86(is_dynamic=True), x86(is_dynamic=True, per_token=True)],
    ids=["xnnpack", "x86", "x86 per token"],
)
def test_integers_of_a_linear_in_other_bounds(quantizer: Any) -> None:
    changed = converted(nn.Linear(24, 16), ROWS, quantizer=quantizer)
    other: dict[Any, Any] = {-128: -127, 255: 127, torch.uint8: torch.int8}
    for node in changed.graph.nodes:
        node.args = tuple(other.get(argument, argument) for argument in node.args)
    assert_simulated(changed, ROWS, 1)


def test_a_weight_that_is_float32_again() -> None:
    quantizer = X86InductorQuantizer().set_global(get_x86_inductor_linear_dynamic_fp16_config())
    changed = converted(nn.Linear(24, 16), ROWS, quantizer=quantizer)
    changed.weight_half = changed.weight_half.float()
    (read,) = changed.graph.find_nodes(op="get_attr", target="weight_half")
    read.meta["val"] = read.meta["val"].float()
    assert_simulated(changed, ROWS, 1)
