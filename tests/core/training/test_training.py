# SPDX-License-Identifier: Apache-2.0
"""A model that is prepared to be trained trains like itself, and is deployed as it was trained."""

from __future__ import annotations

import copy
import io
import itertools
import math
from functools import cache
from typing import Any

import pytest
import qompose
import torch
from qompose.observers.fake_quantize import FakeQuantize
from qompose.training.train_eval import BatchNorm
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.qat import (
    PRODUCTS,
    TAILS,
    batch_for,
    batch_norms_in,
    prepared_for,
    product_model,
    product_quantizer,
)
from tests.core.toy import LINEAR, Model, export, randn, seeded, sqnr, toy
from tests.sampling import at_once

DEEPCOPY = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch of itself
COVERING = {
    ("linear", "relu", True), ("conv1d", "hardtanh", False), ("conv2d", "alone", True),
    ("conv2d", "relu6", False), ("conv3d", "relu", False), ("conv_transpose1d", "relu6", True),
    ("conv_transpose2d", "alone", False), ("conv_transpose3d", "hardtanh", True),
}  # fmt: skip
"""Each product, and each tail with and without a bias."""
MATRIX = at_once(itertools.product(PRODUCTS, TAILS, (True, False)), *COVERING)


def steps(model: nn.Module, batches: list[Tensor], rate: float = 0.05) -> list[float]:
    """Train on the mean of a fixed random projection of what comes out, and return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    losses = []
    for x in batches:
        optimizer.zero_grad()
        out = model(x)
        target = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
        loss = (out - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@cache
def conv_program() -> torch.export.ExportedProgram:
    model = product_model("conv2d", "relu", bias=True).train()
    return torch.export.export(model, (batch_for("conv2d"),))


def conv_net(quantizer: Any = None) -> tuple[GraphModule, Tensor]:
    """A model that is prepared to be trained, and a batch."""
    program = conv_program()
    torch.manual_seed(0)
    prepared = qompose.prepare_qat_pt2e(program, quantizer or product_quantizer())
    return prepared, batch_for("conv2d")


def trained(quantizer: Any = None) -> tuple[GraphModule, Tensor]:
    prepared, x = conv_net(quantizer)
    steps(prepared, [x])
    return prepared, x


@pytest.mark.parametrize(("kind", "tail", "bias"), MATRIX)
def test_without_rounding_it_trains_like_the_float_model(kind: str, tail: str, bias: bool) -> None:
    """Losses, parameters and running statistics: eps and momentum are the model's own."""
    model = product_model(kind, tail, bias=bias).train()
    for dropout in (m for m in model if isinstance(m, nn.Dropout)):
        dropout.p = 0.0
    prepared = prepared_for(model, batch_for(kind))
    prepared.apply(qompose.training.disable_fake_quant)
    batches = [batch_for(kind, seed) for seed in range(4)]
    assert steps(prepared, batches) == pytest.approx(steps(model, batches), rel=1e-4)
    trained, state = prepared.state_dict(), model.state_dict()
    assert {name for name in trained if "activation_post_process" not in name} == {*state}
    for name, value in state.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("kind", "tail", "bias"), MATRIX)
def test_what_is_deployed_is_what_was_trained(kind: str, tail: str, bias: bool) -> None:
    model = product_model(kind, tail, bias=bias).train()
    prepared = prepared_for(model, batch_for(kind))
    steps(prepared, [batch_for(kind, seed) for seed in range(6)])
    prepared.eval()
    x = batch_for(kind, 99)
    simulated = prepared(x)
    converted = qompose.convert_pt2e(prepared)
    assert batch_norms_in(converted) == []
    assert not any(n.op == "call_module" for n in converted.graph.nodes)
    assert sqnr(simulated, converted(x)) > 40
    assert sqnr(simulated, model.eval()(x)) < 40, "training changed nothing"
    assert not any("running" in name for name in converted.state_dict())


@pytest.mark.parametrize("kind", at_once(PRODUCTS, "linear", "conv2d"))
@pytest.mark.parametrize("trains", [True, False], ids=["in training", "in evaluation"])
def test_it_does_not_matter_in_which_mode_it_was_exported(kind: str, trains: bool) -> None:
    x = batch_for(kind)
    model = product_model(kind, "relu", bias=True).train(trains)
    prepared = prepared_for(model, x)
    assert prepared.training is trains
    prepared.train()
    first, second = prepared(x), prepared(x)
    assert not torch.equal(first, second), "dropout is on"
    prepared.eval()
    prepared.apply(qompose.training.disable_observer)
    before = {name: value.clone() for name, value in prepared.named_buffers()}
    assert torch.equal(prepared(x), prepared(x)), "dropout is off"
    for name, value in prepared.named_buffers():
        assert torch.equal(value, before[name]), f"{name} is that of training"


def test_the_exported_program_is_left_alone() -> None:
    before = copy.deepcopy(conv_program().state_dict)
    trained()
    for name, value in conv_program().state_dict.items():
        assert torch.equal(value, before[name]), name


def test_in_place_it_trains_the_models_own_parameters() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).train()
    program = torch.export.export(model, (batch_for("linear"),)).module()
    prepared = qompose.prepare_qat_pt2e(program, product_quantizer(), inplace=True)
    assert prepared is program
    assert prepared.get_parameter("0.weight") is model[0].weight
    steps(prepared, [batch_for("linear")])
    assert qompose.convert_pt2e(prepared, inplace=True) is program
    assert batch_norms_in(prepared) == []


def test_tied_parameters_stay_tied() -> None:
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    tied[1].weight = tied[0].weight
    prepared = prepared_for(tied.train(), batch_for("linear"))
    steps(prepared, [batch_for("linear")])
    assert len({p.data_ptr() for n, p in prepared.named_parameters() if "weight" in n}) == 1


def test_a_scale_that_starts_at_zero_is_learned() -> None:
    """As in a residual block whose last batch norm starts with nothing."""
    model: Any = product_model("conv2d", "alone", bias=False).train()
    with torch.no_grad():
        model[-2].weight[:2] = 0.0
    prepared = prepared_for(model, batch_for("conv2d"))
    batches = [batch_for("conv2d", seed) for seed in range(3)]
    assert all(map(math.isfinite, steps(prepared, batches, rate=0.5)))
    assert bool((prepared.get_parameter("5.weight")[:2].abs() > 1e-4).all())


def test_a_channel_without_scale_is_nothing_in_evaluation() -> None:
    model: Any = product_model("conv2d", "alone", bias=True).eval()
    with torch.no_grad():
        model[-2].weight[:2] = 0.0
        model[-2].bias.copy_(torch.tensor([0.5, -0.5, 1.0, 0.0]))
    x = batch_for("conv2d")
    prepared = prepared_for(model, x)
    torch.testing.assert_close(prepared(x)[:, 0], torch.full((8, 7, 7), 0.5), rtol=0, atol=0.02)
    assert sqnr(model(x), prepared(x)) > 30
    assert sqnr(prepared(x), qompose.convert_pt2e(prepared)(x)) > 40


def kept() -> Any:
    """A batch norm that cannot be folded, an LSTM with dropout, and attention."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.norm(m.linear(x).relu() + x).unsqueeze(0)
        attention = nn.functional.scaled_dot_product_attention
        return attention(x, x, x, dropout_p=0.5 if m.training else 0.0) + m.rnn(x)[0]

    rnn = nn.LSTM(6, 6, num_layers=2, dropout=0.5, batch_first=True)
    return Model(forward, norm=nn.BatchNorm1d(6), linear=nn.Linear(6, 6), rnn=rnn).train()


@pytest.mark.filterwarnings("ignore:The tensor attributes self.rnn._flat_weights")
class TestModes:
    def test_all_that_differs_in_training_follows(self) -> None:
        x = batch_for("linear")
        model = kept()
        prepared = prepared_for(model, x)
        assert not torch.equal(prepared(x), prepared(x))
        prepared.eval()
        prepared.apply(qompose.training.disable_observer)
        assert torch.equal(prepared(x), prepared(x))
        prepared.apply(qompose.training.disable_fake_quant)
        model.norm.load_state_dict(
            {k.removeprefix("norm."): v for k, v in prepared.state_dict().items() if "norm" in k}
        )
        torch.testing.assert_close(prepared(x), model.eval()(x))

    def test_conversion_leaves_operators_of_evaluation(self) -> None:
        x = batch_for("linear")
        prepared = prepared_for(kept(), x)
        steps(prepared, [x])
        converted = qompose.convert_pt2e(prepared)
        assert torch.equal(converted(x), converted(x))
        assert not any(n.op == "call_module" for n in converted.graph.nodes)
        names = [str(n.target) for n in converted.graph.nodes if n.op == "call_function"]
        assert "aten.batch_norm.default" in names and "aten.lstm.input" in names

    def test_a_plain_average_of_statistics_is_said_to_be_lost(self) -> None:
        """torch exports it in evaluation alone, and then as a momentum of 0."""
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=None)).eval()
        prepared = prepared_for(model, batch_for("linear"))
        (note,) = qompose.report(prepared).notes
        assert note.startswith("batch_norm (aten.batch_norm in 1) ")

    def test_a_batch_norm_that_is_frozen(self) -> None:
        prepared, x = conv_net()
        prepared(x)
        prepared.apply(qompose.training.freeze_batch_norm)
        before = {k: v.clone() for k, v in prepared.named_buffers() if "running" in k}
        prepared(batch_for("conv2d", 5))
        assert all(torch.equal(v, prepared.get_buffer(k)) for k, v in before.items())
        prepared.apply(qompose.training.unfreeze_batch_norm)
        prepared(batch_for("conv2d", 5))
        assert not any(torch.equal(v, prepared.get_buffer(k)) for k, v in before.items())


class TestLoop:
    """What a training loop does with a model works with this one."""

    def test_a_state_is_saved_and_resumed(self) -> None:
        prepared, x = trained()
        file = io.BytesIO()
        torch.save(prepared.state_dict(), file)
        file.seek(0)
        fresh, _ = conv_net()
        fresh.load_state_dict(torch.load(file))
        torch.manual_seed(1)
        on = steps(prepared, [x, x])
        torch.manual_seed(1)
        assert steps(fresh, [x, x]) == on
        one, other = (qompose.convert_pt2e(p.eval()) for p in (prepared, fresh))
        assert torch.equal(one(x), other(x))

    def test_switches_are_part_of_the_state(self) -> None:
        prepared, x = trained()
        prepared.apply(qompose.training.disable_observer)
        fresh, _ = conv_net()
        fresh.load_state_dict(prepared.state_dict())
        kept = {k: v.clone() for k, v in fresh.named_buffers() if k.endswith("minimum")}
        with torch.no_grad():
            fresh(10 * x)
        assert all(torch.equal(v, fresh.get_buffer(k)) for k, v in kept.items())

    @DEEPCOPY
    def test_a_copy_is_independent(self) -> None:
        prepared, x = trained()
        copied = copy.deepcopy(prepared)
        before = {k: v.clone() for k, v in prepared.state_dict().items()}
        steps(copied, [x])
        assert all(torch.equal(v, before[k]) for k, v in prepared.state_dict().items())
        assert sqnr(copied.eval()(x), qompose.convert_pt2e(copied)(x)) > 40

    def test_conversion_leaves_the_model_to_be_trained_on(self) -> None:
        prepared, x = trained()
        before = {k: v.clone() for k, v in prepared.state_dict().items()}
        first = qompose.convert_pt2e(prepared)
        assert all(torch.equal(v, before[k]) for k, v in prepared.state_dict().items())
        out = first(x)
        steps(prepared, [x, x])
        assert torch.equal(first(x), out)
        assert not torch.equal(qompose.convert_pt2e(prepared)(x), out)

    def test_autocast(self) -> None:
        prepared, x = trained()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = prepared(x)
        out.float().square().mean().backward()
        gradients = [p.grad for p in prepared.parameters()]
        assert all(g is not None and bool(torch.isfinite(g).all()) for g in gradients)

    def test_a_model_of_bfloat16(self) -> None:
        x = batch_for("conv2d").bfloat16()
        prepared = prepared_for(product_model("conv2d", "relu", bias=True).bfloat16().train(), x)
        steps(prepared, [x, x])
        assert prepared.eval()(x).dtype is torch.bfloat16

    def test_gradient_checkpointing(self) -> None:
        prepared, x = trained()
        prepared.apply(qompose.training.disable_observer)
        prepared.apply(qompose.training.freeze_batch_norm)
        prepared.eval()
        x.requires_grad_()
        plain = torch.autograd.grad(prepared(x).sum(), x)[0]
        kept = torch.utils.checkpoint.checkpoint(prepared, x, use_reentrant=False)
        assert torch.equal(torch.autograd.grad(kept.sum(), x)[0], plain)


def test_rules_are_trained_as_they_are_calibrated() -> None:
    """A configuration of calibration is simulated too, and batch norms are folded for rules."""
    model = seeded(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))
    x = batch_for("linear")
    prepared = qompose.prepare_qat_pt2e(export(model, x), toy(LINEAR))
    assert {type(m) for m in prepared.modules() if isinstance(m, FakeQuantize)} == {FakeQuantize}
    assert any(isinstance(m, BatchNorm) for m in prepared.modules())
    steps(prepared.train(), [x, x])
    simulated = prepared.eval()(x)
    converted = qompose.convert_pt2e(prepared)
    assert sqnr(simulated, converted(x)) > 40
    lowered = qompose.lower(converted)
    assert qompose.report(lowered).count("int8 kernel") == 3  # the batch norm is part of one


def test_a_mask_is_left_alone() -> None:
    def masked(m: Any, x: Tensor) -> Tensor:
        y = m.first(x).masked_fill(torch.eye(16, 6) > 0, -math.inf)
        return m.second(y.softmax(-1)) + y.clamp(min=-5)

    x = randn(16, 6)
    model = Model(masked, first=nn.Linear(6, 6), second=nn.Linear(6, 6))
    prepared = prepared_for(seeded(model).train(), x)
    assert bool(torch.isfinite(prepared(x)).all())


def test_what_does_not_train() -> None:
    model = nn.Linear(6, 4)
    with pytest.raises(qompose.errors.NotExportedError):
        qompose.prepare_qat_pt2e(model, product_quantizer())  # type: ignore[arg-type]
    prepared = prepared_for(model, batch_for("linear"))
    with pytest.raises(qompose.errors.StageError, match="prepare_qat_pt2e"):
        qompose.prepare_qat_pt2e(prepared, product_quantizer())
