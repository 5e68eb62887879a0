# SPDX-License-Identifier: Apache-2.0
"""Models in which other engines quantize nothing and say nothing: here they are quantized, or it is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import qompose
import torch
from qompose.spec import qdq
from torch import Tensor, nn

from tests.core.toy import ToyBackend, export, plan_of, randn, seeded, toy

X = randn(2, 4)


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.T


class WithoutGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.yes, self.no = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.yes(x), lambda x: self.no(x), (x,))


NOT_CONFIGURED = "no selector gives it a configuration"


@pytest.mark.parametrize(
    ("model", "quantizer", "outcome"),
    [
        pytest.param(Product, toy, r"matmul \(aten.matmul\): no rule claims it", id="matmul"),
        pytest.param(
            lambda: nn.Linear(4, 4),
            lambda: qompose.RuleQuantizer(ToyBackend()),
            NOT_CONFIGURED,
            id="no configuration",
        ),
        pytest.param(WithoutGradients, toy, 1, id="no gradients"),
        pytest.param(Branches, toy, 2, id="both branches"),
    ],
)
def test_models_in_which_others_quantize_nothing(
    model: Callable[[], nn.Module], quantizer: Callable[[], qompose.Quantizer], outcome: str | int
) -> None:
    """Either so many linears are claimed, or a warning names the operator and the reason."""
    program = export(seeded(model()), X)
    if isinstance(outcome, str):
        with pytest.warns(qompose.QomposeWarning, match=outcome):
            qompose.prepare_pt2e(program, quantizer())
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared = qompose.prepare_pt2e(program, quantizer())
    assert len(plan_of(prepared).claims) == outcome


def test_a_misspelt_name_is_an_error() -> None:
    quantizer = toy().set_module_name("liner", None)
    with pytest.raises(qompose.errors.SelectorError, match="did you mean 'linear'"):
        qompose.prepare_pt2e(export(seeded(WithoutGradients()), X), quantizer)


def test_the_report_counts_what_the_graph_holds() -> None:
    """As many quantize operators as there are quantized tensors in the plan, no more and no fewer."""
    prepared = qompose.prepare_pt2e(export(seeded(WithoutGradients()), X), toy())
    prepared(X)
    converted = qompose.convert_pt2e(prepared)
    body = next(m for name, m in converted.named_modules() if name.startswith("submod"))
    quantizes = [node for node in body.graph.nodes if qdq.is_quantize(node)]
    points = [p for g in plan_of(converted).groups for p in g.points if "weight" not in p.source]
    assert len({p.source for p in points}) == len(quantizes) == 2
