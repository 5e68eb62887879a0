# SPDX-License-Identifier: Apache-2.0
"""State dicts of quantized programs go to programs with the same scales only."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose.errors import StateError
from torch import Tensor, nn

from tests.core.toy import (
    DYNAMIC,
    LINEAR,
    PER_TENSOR,
    STATIC,
    WEIGHT_ONLY,
    convert,
    export,
    randn,
    seeded,
    toy,
)
from tests.processes import python

X = randn(3, 8)
LAYER = seeded(nn.Linear(8, 4))
MARK = "qompose_scales"


class Halved(nn.Module):
    """A layer, and a number in the code that is no scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = copy.deepcopy(LAYER)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * 0.5


def made(stage: str, data: Tensor, config: Any = STATIC, layer: nn.Module = LAYER) -> Any:
    model = convert(export(layer, X), toy(LINEAR, config=config), data)
    return qompose.lower(model) if stage == "lowered" else model


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("stage", ["converted", "lowered"])
class TestLoading:
    def test_a_state_for_other_scales_is_refused_and_nothing_is_loaded(self, stage: str) -> None:
        model, other = made(stage, X), made(stage, X * 30)
        before, state = model(X), other.state_dict()
        with pytest.raises(StateError) as refused:
            model.load_state_dict(state, strict=False)
        assert torch.equal(model(X), before)
        assert (refused.value.path, refused.value.stages) == ("", (stage, stage))

    @pytest.mark.parametrize(
        "copies",
        [copy.copy, copy.deepcopy, lambda model: copy.copy(copy.deepcopy(copy.copy(model)))],
        ids=["copy", "deepcopy", "copies of copies"],
    )
    def test_copies_are_bound(self, stage: str, copies: Callable[[Any], Any]) -> None:
        copied, other = copies(made(stage, X)), made(stage, X * 30)
        with pytest.raises(StateError):
            copied.load_state_dict(other.state_dict())
        copied.load_state_dict(copies(made(stage, X)).state_dict())

    def test_in_a_larger_module_its_place_is_named(self, stage: str) -> None:
        """What stands before it is loaded by then, and the message says so."""
        first = nn.Linear(8, 8)
        loaded, quantized = copy.deepcopy(first), made(stage, X)
        model, other = nn.Sequential(loaded, quantized), nn.Sequential(first, made(stage, X * 30))
        nn.init.zeros_(loaded.weight)
        before = quantized(X)
        with pytest.raises(
            RuntimeError, match="loaded already"
        ) as refused:  # as torch's own errors
            model.load_state_dict(other.state_dict())
        assert isinstance(refused.value, StateError)
        assert refused.value.path == "1"
        assert torch.equal(quantized(X), before)
        assert torch.equal(loaded.weight, first.weight)

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

    def test_a_state_that_does_not_say_is_loaded_with_a_warning_at_the_users_line(
        self, stage: str
    ) -> None:
        model = made(stage, X)
        for holder in (model, nn.Sequential(model)):
            with pytest.warns(qompose.QomposeWarning, match="scales") as told:
                holder.load_state_dict(dict(holder.state_dict()))
            assert [warning.filename for warning in told] == [__file__]

    @pytest.mark.filterwarnings("ignore:(?s).*no int8 kernel")  # the toy has none for weights alone
    @pytest.mark.parametrize("config", [DYNAMIC, WEIGHT_ONLY, None], ids=lambda c: c and c.name)
    def test_without_scales_in_the_code_any_state_is_loaded(self, stage: str, config: Any) -> None:
        """Scales are computed at run time, or they are in the state dict, or there are none."""
        model, other = (made(stage, X * s, config, Halved()) for s in (1, 30))
        state = dict(other.state_dict())
        for tensor in model.state_dict().values():
            tensor.zero_()
        with warnings.catch_warnings():
            warnings.simplefilter("error", qompose.QomposeWarning)
            model.load_state_dict(state)
        assert torch.equal(model(X), other(X))

    def test_what_torch_makes_anew_of_a_program_is_not_bound(self, stage: str) -> None:
        model = made(stage, X)
        exported = torch.export.export(model, (X,)).module()
        for program, bound in ((model, True), (exported, False)):
            state: Any = program.state_dict()
            assert (MARK in str(state._metadata)) is bound


def test_the_one_scale_of_a_weight_is_in_the_code_too() -> None:
    config = PER_TENSOR
    weight_only = qompose.QuantizationConfig(None, None, config.weight, name="w", algorithms=())
    model = made("converted", X, weight_only)
    other = made("converted", X, weight_only, seeded(nn.Linear(8, 4), 1))
    with pytest.raises(StateError):
        model.load_state_dict(other.state_dict())


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_another_stage_is_named() -> None:
    converted, lowered = made("converted", X), made("lowered", X)
    with pytest.raises(StateError) as refused:
        converted.load_state_dict(lowered.state_dict(), strict=False)
    assert refused.value.stages == ("lowered", "converted")


class Sized(nn.Module):
    """A function of a size, torch's own in Python, that is called with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = LAYER

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * torch.sym_max(x.shape[0] * 0.1, 0.5)  # type: ignore[no-untyped-call]


def mark_of_sized() -> str:
    """Return the mark, and whether the program has a function whose text has its address."""
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(Sized(), (X,), dynamic_shapes=({0: rows},))
    model = convert(program, toy(LINEAR, config=STATIC), X)
    addresses = any(" at 0x" in str(node.target) for node in model.graph.nodes)
    state: Any = model.state_dict()
    return f"{state._metadata[''][MARK]} {addresses}"


def test_the_mark_is_the_same_in_every_process() -> None:
    source = f"from {__name__} import mark_of_sized; print(mark_of_sized())"
    one = python("-c", source).splitlines()[-1]
    assert one == mark_of_sized()
    assert one.endswith("True")
