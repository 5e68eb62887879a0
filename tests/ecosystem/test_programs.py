# SPDX-License-Identifier: Apache-2.0
"""Programs that quantizers of ExecuTorch rewrite in ways that are hard to follow: each is quantized well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from torch import Tensor, nn

from tests.core.toy import Model, plan_of
from tests.ecosystem import makers

# These packages warn when they are imported and when they run.
pytestmark = pytest.mark.filterwarnings("ignore")

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def written(m: Any, x: Tensor) -> Tensor:
    y = x + 1
    z = y.view(-1, 8)
    y.relu_()
    return m.a(z)


def part_written(m: Any, x: Tensor) -> Tensor:
    y = m.convolution(x)
    y[:, :1] = 0
    return y.clone()


def quantized(
    make: Callable[[], Any], program: nn.Module, *batches: tuple[Tensor, ...], within: float = 0.03
) -> Any:
    """Prepare, calibrate and convert; the error of the first output is a share of its norm."""
    exported = torch.export.export(program.eval(), batches[0])
    prepared = qompose.prepare_pt2e(exported, qompose.compose(make()))
    for batch in batches:
        prepared(*batch)
    converted = qompose.convert_pt2e(prepared)
    for batch in batches:
        ours, exact = converted(*batch), exported.module()(*batch)
        first, expected = (y[0] if isinstance(y, tuple) else y for y in (ours, exact))
        assert (first - expected).norm() < within * expected.norm()
    return prepared


def seeded(function: Callable[..., Any], tied: bool = False) -> nn.Module:
    """A function of layers and of inputs."""
    torch.manual_seed(0)
    layers = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "convolution": nn.Conv2d(3, 4, 3)}
    if tied:
        layers["b"].weight = layers["a"].weight
    return Model(function, **layers)


@pytest.mark.parametrize("make", [makers.cortex_m, makers.tosa], ids=lambda make: make.__name__)
def test_bodies_that_a_transform_of_what_is_around_rewrites(make: Any) -> None:
    # Cortex-M gives the branches' input and output the scale of the condition's operand.
    branches = seeded(
        lambda m, x: torch.cond(x.sum() > 0, lambda x: x + 1.0, lambda x: x * 2.0, (x,))
    )
    prepared = quantized(make, branches, (X.abs(),), (-X.abs(),), within=0.12)
    owners = {claim.owner for claim in plan_of(prepared).claims}
    inside = [c for c in plan_of(prepared).claims if any("graph_0" in n for n in c.nodes)]
    assert inside and len(owners) == 1


@pytest.mark.parametrize(
    "make", [makers.tosa, makers.ethos_u, makers.cortex_m], ids=lambda make: make.__name__
)
def test_biases_of_tied_weights(make: Any) -> None:
    prepared = quantized(make, seeded(lambda m, x: m.b(torch.tanh(m.a(x))), tied=True), (X,))
    points = {str(point) for group in plan_of(prepared).groups for point in group.points}
    assert {"a_bias -> linear", "b_bias -> linear_1"} <= points
    assert {"b_weight -> linear", "b_weight -> linear_1"} <= points


def test_a_constant_that_a_transform_makes_of_what_is_returned() -> None:
    prepared = quantized(makers.tosa, seeded(lambda m, x: (m.a(x), m.a.weight + 1)), (X,))
    assert [rewrite.nodes for rewrite in plan_of(prepared).rewrites] == [("add",)]


def test_a_weight_that_is_returned_too() -> None:
    program = seeded(lambda m, x, i: (m.a(x), m.a.weight, i))
    prepared = quantized(makers.tosa, program, (X, torch.arange(4)))
    assert any("linear" in claim.nodes for claim in plan_of(prepared).claims)


IN_PLACE = [
    (makers.tosa, written, X, "a_bias -> linear"),
    (makers.cortex_m, written, X, "a_bias -> linear"),
    (lambda: makers.cadence("Default"), written, X, "a_bias -> linear"),
    (makers.tosa, part_written, torch.ones(1, 3, 8, 8), "output of conv2d"),
    (makers.cortex_m, part_written, torch.ones(1, 3, 8, 8), ""),
]


@pytest.mark.parametrize(
    ("make", "function", "x", "place"),
    IN_PLACE,
    ids=["tosa", "cortex_m", "cadence", "tosa in part", "cortex_m in part"],
)
def test_what_depends_on_a_value_written_in_place(
    make: Any, function: Any, x: Tensor, place: str
) -> None:
    prepared = quantized(make, seeded(function), (x,))
    notes = [note for note in plan_of(prepared).notes if "in place" in note]
    assert any(place in note and "executorch." in note for note in notes) or not place
