# SPDX-License-Identifier: Apache-2.0
"""Stages ask whatever algorithm is in the table, and follow what it decides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
import qompose
import torch
from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.channel_factors import Factors
from qompose.algorithms.interface import Algorithm, Rewritten, Watched
from qompose.observers.channel_ranges import INPUT, Balance
from qompose.plan.plan import Group, Rewrite
from qompose.spec.claim import Claim
from torch import nn
from torch.fx import GraphModule, Node

from tests.core.toy import LINEAR, Model, export, nodes_calling, prepare, toy


class Fifth(Algorithm):
    """Takes part in every step: halves inputs, and adds one to biases."""

    word = "fifth"

    def rewrite(self, model: GraphModule, claims: Sequence[Claim]) -> Rewritten:
        (claim,) = claims
        return Rewritten((Rewrite("fifth", claim.nodes, ()),), ("fifth of another was not made",))

    def watch_channels(
        self, model: GraphModule, claims: Sequence[Claim], groups: Sequence[Group]
    ) -> Watched:
        (number,) = (
            n for n, g in enumerate(groups) if g.points[0].user and g.points[0].source == "x"
        )
        return Watched({number: Balance(INPUT, 1, ("layer_weight",), ("",), self.word)})

    def watch_means(
        self, claims: Sequence[Claim], nodes: Mapping[str, Node]
    ) -> Iterator[tuple[Node, int, bool]]:
        yield nodes["x"], 1, True

    def choose_factors(self, found: Calibrated, number: int, balance: Balance) -> None:
        two = torch.full((4,), 2.0)
        found.take(number, balance, Factors(two, torch.tensor(0.5), torch.tensor(0), 1.0))
        found.made.append("fifth halved")

    def correct(self, found: Calibrated) -> None:
        assert found.qparams
        (name,) = (n for n in found.nodes if n.endswith("bias"))
        found.parameters[name] = found.factors.constant(name) + 1
        found.refused.append("fifth left the rest")


@pytest.fixture
def fifth(monkeypatch: pytest.MonkeyPatch) -> None:
    for stage in ("preparation.annotate", "preparation.prepare", "conversion.qparams_solver"):
        monkeypatch.setattr(f"qompose.{stage}.ALGORITHMS", (Fifth(),))


@pytest.mark.usefixtures("fifth")
def test_every_step_of_an_algorithm_is_followed() -> None:
    layer, x = nn.Linear(4, 3), torch.linspace(-1, 1, 40).view(10, 4)
    prepared = prepare(export(Model(lambda m, x: m.layer(x), layer=layer), x), toy(LINEAR))
    prepared(x)
    converted = qompose.convert_pt2e(prepared)
    report = qompose.report(converted)
    assert [text for text in report.rewrites if "fifth" in text][-1] == "fifth halved"
    assert "fifth of another was not made" in report.notes
    assert "fifth left the rest" in report.notes
    (quantize, *_) = nodes_calling(converted, "quantize_per_tensor")
    assert quantize.args[1] == 0.5
    state = converted.state_dict()
    assert torch.equal(state["x_factors"].flatten(), torch.full((4,), 0.5))
    assert torch.equal(state["layer.bias"], layer.bias + 1)
    weight = state["layer.weight_q"] * state["layer.weight_scale"].unsqueeze(1)
    torch.testing.assert_close(weight, 2 * layer.weight, atol=0.01, rtol=0.0)
