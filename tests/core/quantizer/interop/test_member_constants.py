# SPDX-License-Identifier: Apache-2.0
"""Parameters that a transform reads by nodes of its own: annotations of those edges mean the program's."""

from __future__ import annotations

from typing import Any

import qompose
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.quantizer.interop.foreign import INT8, WEIGHT, Derived, aten, calls, put
from tests.core.toy import export, plan_of, prepare, randn, seeded


class Tied(nn.Module):
    """One linear layer, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class ReadsAgain:
    """Gives every use of a parameter a node, as passes do that trace a program anew."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        for linear in calls(model, aten.linear.default)[1:]:
            for read in linear.args[1:]:
                with model.graph.inserting_before(linear):
                    again = model.graph.get_attr(read.target)
                again.meta = dict(read.meta)
                linear.replace_input_with(read, again)
        model.recompile()
        return model

    def annotate(self, model: GraphModule) -> None:
        for linear in calls(model, aten.linear.default):
            x, weight, bias = linear.args
            sources = [(x, linear), (weight, linear)]
            derived = Derived(
                sources,
                _bias_parameters,
                torch.int32,
                qscheme=torch.per_channel_symmetric,
                ch_axis=0,
            )
            put(linear, {x: INT8, weight: WEIGHT, bias: derived}, INT8)

    def validate(self, model: GraphModule) -> None:
        """Accept everything."""


def _bias_parameters(observers: Any) -> tuple[Tensor, Tensor]:
    (scale, _), (scales, zeros) = (observer.calculate_qparams() for observer in observers)
    return scale * scales, torch.zeros_like(zeros)


def test_edges_from_nodes_of_its_own_are_the_programs() -> None:
    x = randn(6, 4)
    program = export(seeded(Tied()), x)
    prepared = prepare(program, qompose.compose(ReadsAgain()))
    points = {str(spec.point) for claim in plan_of(prepared).claims for spec in claim.specs}
    for reader in ("linear", "linear_1"):
        assert {f"layer_weight -> {reader}", f"layer_bias -> {reader}"} <= points
    assert torch.equal(prepared(x), program.module()(x))
    converted = qompose.convert_pt2e(prepared)
    error = (converted(x) - prepared(x)).norm() / prepared(x).norm()
    assert error < 0.05
