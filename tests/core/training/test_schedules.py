# SPDX-License-Identifier: Apache-2.0
"""What a training loop switches on the way, however it came to a step."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
from qompose.errors import ConfigError
from qompose.observers import FakeQuantize
from qompose.training import QATSchedule
from qompose.training.train_eval import BatchNorm
from torch.fx import GraphModule

from tests.core.qat import batch_for, prepared_for, product_model


def prepared() -> GraphModule:
    return prepared_for(product_model("linear", "relu", bias=True).train(), batch_for("linear"))


def state_of(model: GraphModule) -> tuple[bool, bool, bool]:
    """Whether it simulates, observes, and takes batch statistics; the same in all of the model."""
    fakes = [m for m in model.modules() if isinstance(m, FakeQuantize)]
    norms = [m for m in model.modules() if isinstance(m, BatchNorm)]
    (found,) = {
        (bool(f.fake_quant_enabled), bool(f.observer_enabled), not n.frozen)
        for f in fakes
        for n in norms
    }
    return found


SCHEDULE = QATSchedule(fake_quantize_from=2, observers_until=4, batch_norm_until=3)
STATES = {
    0: (False, True, True), 1: (False, True, True), 2: (True, True, True),
    3: (True, True, False), 4: (True, False, False), 9: (True, False, False),
}  # fmt: skip


@pytest.mark.parametrize("steps", [[*STATES], [9, 0, 4, 2]], ids=["in order", "resumed"])
def test_a_step_has_its_state(steps: list[int]) -> None:
    model = prepared()
    for step in steps:
        SCHEDULE.apply(model, step)
        assert state_of(model) == STATES[step]


def test_by_itself_all_goes_on() -> None:
    model = prepared()
    QATSchedule().apply(model, 10**6)
    assert state_of(model) == (True, True, True)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"fake_quantize_from": -1}, "fake_quantize_from must be the number of a step, got -1"),
        ({"batch_norm_until": True}, "batch_norm_until must be the number of a step"),
        ({"observers_until": 0}, "without a step there are no ranges to keep"),
    ],
)
def test_what_is_no_schedule(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        QATSchedule(**options)


def test_other_modules_are_left_alone() -> None:
    model = product_model("linear", "relu", bias=True)
    for switch in (
        qompose.training.disable_observer, qompose.training.enable_observer,
        qompose.training.disable_fake_quant, qompose.training.enable_fake_quant,
        qompose.training.freeze_batch_norm, qompose.training.unfreeze_batch_norm,
    ):  # fmt: skip
        model.apply(switch)
    assert not hasattr(model[1], "frozen")
