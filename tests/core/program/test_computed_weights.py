# SPDX-License-Identifier: Apache-2.0
"""Weights computed from parameters alone become parameters; products by a parameter become linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.core.toy import (
    LINEAR,
    Model,
    NullQuantizer,
    convert,
    export,
    prepare,
    randn,
    seeded,
    sqnr,
    toy,
)

X = randn(5, 6)
REWRITES = ("fold_weight", "product_to_linear")


def net(function: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """A function of an input and of parameters and a buffer."""
    layers = {
        "narrow": nn.Linear(6, 2),
        "wide": nn.Linear(2, 6),
        "count": nn.Buffer(torch.ones(())),
    }
    weight, bias = nn.Parameter(torch.empty(8, 6)), nn.Parameter(torch.empty(8))
    return seeded(Model(function, weight=weight, bias=bias, **layers))


def quantized(model: nn.Module, *inputs: Tensor) -> tuple[qompose.Report, float]:
    """The report of a lowered model, and its decibels; the prepared one is checked against the exported."""
    prepared = prepare(export(model, *inputs), toy(LINEAR, rewrites=REWRITES))
    with torch.no_grad():
        torch.testing.assert_close(prepared(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)
        lowered = qompose.lower(qompose.convert_pt2e(prepared))
        return qompose.report(lowered), sqnr(model(*inputs), lowered(*inputs))


def _grown(self: Any, x: Tensor) -> Tensor:
    y = F.linear(x, self.weight * self.count)
    self.count.add_(1)
    return y


FOLDED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "rows": lambda self, x: F.linear(x, self.weight[:4], self.bias[:4]),
    "columns of the transpose": lambda self, x: F.linear(x[:, :4], self.weight.t()[:, 2:6]),
    "part of a split": lambda self, x: F.linear(x, self.weight.chunk(2)[1]),
    "standardised": lambda self, x: F.linear(x, (self.weight - self.weight.mean()) / self.weight.std()),
    "low rank": lambda self, x: F.linear(x, self.wide.weight @ self.narrow.weight, self.wide.bias),
    "of numbers alone": lambda self, x: F.linear(x, torch.eye(6) * 0.5),
}  # fmt: skip


def test_what_is_folded_is_no_work_any_more() -> None:
    report, _ = quantized(net(FOLDED["low rank"]), X)
    (product,) = report.why("aten.matmul")
    assert (product.state, product.macs) == ("float", 0)
    assert report.coverage() == 1.0


@pytest.mark.parametrize("name", FOLDED)
def test_what_is_computed_from_parameters_is_a_weight(name: str) -> None:
    report, decibels = quantized(net(FOLDED[name]), X)
    (row,) = report.why("aten.linear")
    assert (row.state, row.owner) == ("int8 kernel", "toy")
    assert decibels > 25
    assert [line for line in report.rewrites if line.startswith("fold_weight: linear")]


def test_weight_norm_and_its_batch_of_operators_leave_the_program() -> None:
    model = seeded(nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4)), nn.ReLU()))
    prepared = prepare(export(model, X), toy(LINEAR, rewrites=REWRITES))
    left = {str(n.target) for n in prepared.graph.nodes if n.op == "call_function"}
    assert left == {"aten.linear.default", "aten.relu.default"}


PRODUCTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "matmul": lambda self, x: x @ self.weight.t(),
    "matmul of rank 3": lambda self, x: x.view(5, 1, 6) @ self.weight.mT,
    "mm": lambda self, x: torch.mm(x, self.weight[:6]),
    "addmm": lambda self, x: torch.addmm(self.bias, x, self.weight.t()),
    "mm by a product": lambda self, x: torch.mm(x, self.wide.weight @ self.narrow.weight),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_by_a_parameter_is_a_linear_layer(name: str) -> None:
    report, decibels = quantized(net(PRODUCTS[name]), X)
    rows = [row for row in report.rows if row.owner == "toy"]
    assert [row.state for row in rows] == ["int8 kernel"]
    assert rows[0].operator in ("aten.matmul", "aten.mm", "aten.addmm")
    assert decibels > 25


NOT_FOLDED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "by an input": (lambda self, x: F.linear(x, self.weight * x.mean()), "weight"),
    "by chance": (lambda self, x: F.linear(x, F.dropout(self.weight, 0.5, True)), "weight"),
    "that changes": (_grown, "count"),
    "product of inputs": (lambda self, x: x @ x.t(), ""),
    "addmm with a factor": (lambda m, x: torch.addmm(m.bias, x, m.weight.t(), alpha=0.5), "alpha=0.5"),
    "addmm of rows": (lambda self, x: torch.addmm(x @ x.t() @ x, x, self.weight[:6]), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_FOLDED)
def test_what_differs_between_calls_or_is_no_linear_layer_stays(name: str) -> None:
    function, why = NOT_FOLDED[name]
    report = qompose.report(prepare(export(net(function), X), toy(LINEAR, rewrites=REWRITES)))
    assert not report.rewrites
    told = [row.reason for row in report.rows] + list(report.notes)
    assert any(why in line for line in told), told


def test_nothing_is_folded_where_nobody_asks_or_claims() -> None:
    program = export(net(FOLDED["standardised"]), X)
    for quantizer in (toy(LINEAR), toy(LINEAR, rewrites=REWRITES, config=None), NullQuantizer()):
        assert not qompose.report(prepare(program, quantizer)).rewrites


def test_in_training_the_parameters_stay_what_is_trained() -> None:
    program = export(net(FOLDED["rows"]), X)
    with pytest.warns(qompose.QomposeWarning, match="weight"):
        prepared = qompose.prepare_qat_pt2e(program, toy(LINEAR, rewrites=REWRITES))
    assert not qompose.report(prepared).rewrites
    assert "weight" in dict(prepared.named_parameters())


def test_nothing_of_the_expression_stays_in_the_state() -> None:
    program = export(net(FOLDED["rows"]), X)
    state = convert(program, toy(LINEAR, rewrites=REWRITES), X).state_dict()
    assert {"weight", "bias"}.isdisjoint(state)
    (weight,) = [tensor for tensor in state.values() if tensor.dim() == 2]
    assert (weight.dtype, weight.shape) == (torch.int8, (4, 6))
