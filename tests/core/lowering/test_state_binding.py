# SPDX-License-Identifier: Apache-2.0
"""State dicts of quantized programs go to programs with the same scales only."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import qompose
import torch
from qompose.errors import StateError
from torch import Tensor, nn

from tests.core.toy import DYNAMIC, LINEAR, STATIC, convert, export, randn, seeded, toy

X = randn(3, 8)
LAYER = seeded(nn.Linear(8, 4))


def made(stage: str, data: Tensor, config: Any = STATIC) -> Any:
    model = convert(export(LAYER, X), toy(LINEAR, config=config), data)
    return qompose.lower(model) if stage == "lowered" else model


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("stage", ["converted", "lowered"])
class TestLoading:
    def test_a_state_for_other_scales_is_refused_and_nothing_is_loaded(self, stage: str) -> None:
        model, other = made(stage, X), made(stage, X * 30)
        before, state = model(X), other.state_dict()
        for each in (model, copy.deepcopy(model)):
            with pytest.raises(StateError):
                each.load_state_dict(state, strict=False)
            assert torch.equal(each(X), before)
        with pytest.raises(StateError):
            nn.Sequential(model).load_state_dict(nn.Sequential(other).state_dict())

    def test_a_state_for_the_same_scales_is_loaded(self, stage: str) -> None:
        model, file = made(stage, X), io.BytesIO()
        wanted, state = model(X), model.state_dict()
        torch.save(state, file)
        file.seek(0)
        fresh = made(stage, X)
        for buffer in fresh.buffers():
            buffer.zero_()
        fresh.load_state_dict(torch.load(file))
        assert torch.equal(fresh(X), wanted)

    def test_a_state_that_does_not_say_is_loaded_with_a_warning(self, stage: str) -> None:
        model = made(stage, X)
        with pytest.warns(qompose.QomposeWarning, match="scales"):
            model.load_state_dict(dict(model.state_dict()))

    def test_scales_that_are_chosen_at_run_time_hold_for_any_state(self, stage: str) -> None:
        model, other = made(stage, X, DYNAMIC), made(stage, X * 30, DYNAMIC)
        model.load_state_dict(other.state_dict())
        assert torch.equal(model(X), other(X))

    def test_only_programs_with_a_record_are_bound(self, stage: str) -> None:
        model = made(stage, X)
        exported = torch.export.export(model, (X,)).module()
        for program, bound in ((model, True), (exported, False)):
            state: Any = program.state_dict()
            assert ("qompose_literals" in str(state._metadata)) is bound
