# SPDX-License-Identifier: Apache-2.0
"""Models whose training is easily got wrong: shared, frozen, in bodies, with overflows, and failures."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import qompose
import torch
from qompose.training.train_eval import SwitchedOperator
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.qat import batch_for, prepared_for, product_model, product_quantizer
from tests.core.toy import NullQuantizer, sqnr


def without_rounding(model: nn.Module, x: Tensor) -> GraphModule:
    prepared = prepared_for(model, x)
    prepared.apply(qompose.training.disable_fake_quant)
    return prepared


class SharedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(6, 8, 3), nn.Conv2d(6, 8, 3)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.one(x)) + self.norm(self.other(x))


def test_a_batch_norm_behind_two_convolutions() -> None:
    """The second uses the statistics that the first one has just moved."""
    x, model = 30 * batch_for("conv2d"), SharedNorm().train()
    prepared = without_rounding(model, x)
    for _ in range(3):
        torch.testing.assert_close(prepared(x), model(x), rtol=1e-4, atol=1e-4)
    state = prepared.state_dict()
    torch.testing.assert_close(state["norm.running_var"], model.norm.running_var)
    torch.testing.assert_close(state["norm.running_mean"], model.norm.running_mean)
    assert int(state["norm.num_batches_tracked"]) == int(model.norm.num_batches_tracked)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_overflowed_is_over(bad: float) -> None:
    """As those that a GradScaler skips: the loss shows it, and the next step is as before."""
    x = batch_for("linear")
    model = product_model("linear", "relu", bias=True, norm=False)
    prepared = prepared_for(model.train(), x)
    prepared(x)
    broken = x.clone()
    broken[0, 0] = bad
    assert not bool(torch.isfinite(prepared(broken)).all())
    prepared(x)
    ranges = [m.minimum for m in prepared.modules() if hasattr(m, "minimum")]
    assert all(bool(torch.isfinite(low).all()) for low in ranges)
    converted = qompose.convert_pt2e(prepared)
    assert {row.operator for row in qompose.report(converted).rows if row.state == "float"} == {
        "aten.dropout"
    }


def test_dropout_in_a_branch() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(
                x.sum() > 0,
                lambda x: self.drop(self.one(x)),
                lambda x: self.drop(self.other(x)) * 2,
                (x,),
            )

    x = torch.ones(16, 6)
    for trains in (True, False):
        program = torch.export.export(Branches().train(trains), (x,))
        prepared = qompose.prepare_qat_pt2e(program, product_quantizer())
        for sign in (1, -1):
            dropped = (prepared.train()(sign * x) == 0).float().mean()
            assert 0.2 < float(dropped) < 0.8
            assert not bool((prepared.eval()(sign * x) == 0).any())


class Frozen(nn.Module):
    """A part without gradients before one with them."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3)
        self.drop, self.part = nn.Dropout(0.5), part

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.drop(x) if self.part == "drop" else x
            x = self.norm(self.conv(x)) if self.part == "conv" else x
            x = self.norm(x) if self.part == "norm" else x
        return self.last(x)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("part", ["conv", "norm", "drop"])
def test_a_part_without_gradients(part: str, trains: bool) -> None:
    x = batch_for("conv2d")
    torch.manual_seed(0)
    model = Frozen(part).train(trains)
    prepared = without_rounding(model, x).train()
    first, second = prepared(x), prepared(x)
    assert torch.is_grad_enabled()
    assert torch.allclose(first, second, atol=1e-5) == (part != "drop")
    prepared(x).sum().backward()
    assert prepared.get_parameter("last.weight").grad is not None
    assert prepared.eval()(x).shape == first.shape


def test_a_batch_norm_that_was_exported_in_evaluation_stays_so_and_is_named() -> None:
    model: Any = product_model("conv2d", "relu", bias=True).train()
    model[1].eval()
    x = batch_for("conv2d")
    prepared = without_rounding(model, x)
    prepared(x)
    state = prepared.state_dict()
    assert torch.equal(state["1.running_mean"], torch.zeros(10))
    assert not torch.equal(state["5.running_mean"], torch.zeros(4))
    (note,) = qompose.report(prepared).notes
    assert "in 1) keeps its running statistics in training: it was exported in evaluation" in note
    prepared.apply(qompose.training.unfreeze_batch_norm)
    prepared(x)
    assert not torch.equal(prepared.get_buffer("1.running_mean"), torch.zeros(10))


def test_conversion_in_place_that_fails_leaves_the_model() -> None:
    x = batch_for("conv2d")
    prepared = prepared_for(product_model("conv2d", "relu", bias=True).train(), x)
    before = {k: v.clone() for k, v in prepared.state_dict().items()}
    with pytest.raises(qompose.errors.UncalibratedError):
        qompose.convert_pt2e(prepared, inplace=True)
    after = prepared.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(v, after[k]) for k, v in before.items())
    assert isinstance(prepared.get_parameter("0.weight"), nn.Parameter)
    prepared(x)
    prepared.eval().apply(qompose.training.disable_observer)
    simulated = prepared(x)
    assert sqnr(simulated, qompose.convert_pt2e(prepared, inplace=True)(x)) > 40


def test_conversion_leaves_observers_as_they_are() -> None:
    x = batch_for("conv2d")
    prepared = prepared_for(product_model("conv2d", "relu", bias=True).train(), x)
    prepared(x).sum().backward()
    torch.optim.SGD(prepared.parameters(), lr=0.1).step()
    before = {k: v.clone() for k, v in prepared.state_dict().items()}
    qompose.convert_pt2e(prepared)
    assert all(torch.equal(v, before[k]) for k, v in prepared.state_dict().items())


def test_buffers_that_are_written_keep_no_gradients() -> None:
    class Written(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            self.mean.copy_(0.9 * self.mean + 0.1 * y.mean(0))
            return y - self.mean

    x = batch_for("linear")
    spec = qompose.QuantizationSpec(
        torch.int8, qompose.observers.LearnableFakeQuantize, -128, 127, torch.per_tensor_affine
    )
    prepared = prepared_for(Written().train(), x, product_quantizer(spec))
    for _ in range(3):
        prepared(x).sum().backward()
    assert not prepared.get_buffer("mean").requires_grad


def test_a_switch_is_pickled() -> None:
    switch = SwitchedOperator(torch.ops.aten.dropout.default, 2, True, False)
    again = pickle.loads(pickle.dumps(switch)).eval()
    x = torch.ones(4)
    assert torch.equal(again(x, 0.5), x)
    assert copy.deepcopy(switch).operator is torch.ops.aten.dropout.default


def test_nothing_quantized_still_trains() -> None:
    x = batch_for("conv2d")
    model: Any = product_model("conv2d", "relu", bias=True).train()
    program = torch.export.export(model, (x,))
    with pytest.warns(qompose.QomposeWarning, match="Nothing was quantized"):
        prepared = qompose.prepare_qat_pt2e(program, NullQuantizer())
    torch.manual_seed(0)
    out = prepared(x)
    torch.manual_seed(0)
    assert torch.equal(out, model(x))
