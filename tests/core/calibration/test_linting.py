# SPDX-License-Identifier: Apache-2.0
"""What looks wrong after calibration is said at once, by tensor and module; what is well is not."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import qompose
import torch
from qompose import QomposeWarning
from qompose.calibration.calibrator import lint
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.toy import ADD_RELU, LINEAR, Model, export, prepare, randn, seeded, toy


def layers(between: Callable[[Tensor], Tensor]) -> nn.Module:
    """Several layers, before the last of which something happens to the values."""
    first = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    parts = {"first": first, "last": nn.Linear(8, 8)}
    return seeded(Model(lambda m, x: m.last(between(torch.sigmoid(m.first(x)))), **parts))


X = randn(32, 8)


def calibrated(between: Callable[[Tensor], Tensor]) -> tuple[GraphModule, list[str]]:
    prepared = prepare(export(layers(between), X), toy(LINEAR, ADD_RELU))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qompose.calibrate(prepared, [X])
    messages = [str(w.message) for w in caught if issubclass(w.category, QomposeWarning)]
    return prepared, messages


def test_what_is_well_is_not_mentioned() -> None:
    prepared, messages = calibrated(lambda x: x)
    assert messages == []
    assert lint(prepared) == []


@pytest.mark.parametrize(
    ("between", "said"),
    [
        pytest.param(lambda x: x * 0 + 0.5, "was 0.5 throughout", id="constant"),
        pytest.param(lambda x: x * 0, "was 0 throughout", id="zero"),
        pytest.param(lambda x: x * 1e5, "reaches ", id="outlier"),
        pytest.param(
            lambda x: x.masked_fill(torch.eye(32, 8) > 0, -math.inf),
            "holds 8 mask values",
            id="mask",
        ),
    ],
)
def test_each_is_named_with_its_module_and_rule(
    between: Callable[[Tensor], Tensor], said: str
) -> None:
    prepared, messages = calibrated(between)
    lines = lint(prepared)
    assert said in lines[0]
    assert all(" in last (toy, rule linear) " in line for line in lines)
    assert messages == ["\n  - ".join(["After calibration these look wrong:", *lines])]


def test_a_tensor_that_no_batch_came_to() -> None:
    rare = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
    model = Model(
        lambda m, x: torch.cond(x.sum() > 1e9, m.rare, m.layer, (x,)),
        layer=nn.Linear(8, 8),
        rare=rare,
    )
    prepared = prepare(export(seeded(model), X), toy(LINEAR))
    with pytest.warns(QomposeWarning, match="rare"):
        qompose.calibrate(prepared, [X])


def test_a_model_that_was_not_prepared() -> None:
    with pytest.raises(qompose.errors.StageError, match="prepare_pt2e"):
        lint(export(seeded(nn.Linear(8, 8)), X).module())  # type: ignore[arg-type]
