# SPDX-License-Identifier: Apache-2.0
"""A model that is prepared to be trained trains like itself, and is deployed as it was trained."""

from __future__ import annotations

import copy
import io
import itertools
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationSpec
from qompose.errors import CalibrationError
from qompose.observers import LearnableFakeQuantize
from qompose.observers.fake_quantize import FakeQuantize
from qompose.training.train_eval import BatchNorm
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from tests.core.qat import (
    PRODUCTS,
    TAILS,
    batch_for,
    batch_norms_in,
    prepared_for,
    product_model,
    product_quantizer,
)
from tests.core.toy import (
    LINEAR,
    STATIC,
    Model,
    NullQuantizer,
    convert,
    export,
    randn,
    seeded,
    sqnr,
    toy,
)
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


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_that_is_called_twice(bias: bool) -> None:
    """Both calls move the same statistics and the same weight, and one folded weight is deployed."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.last(F.relu(m.tower(x)) + m.tower(x * 2 + 1).sigmoid())

    model = product_model("conv2d", "alone", bias=bias)
    layers = {"tower": nn.Sequential(*model[:2]), "last": model[-3]}
    model, x = Model(forward, **layers).train(), batch_for("conv2d")
    prepared = prepared_for(model, x)
    prepared.apply(qompose.training.disable_fake_quant)
    batches = [batch_for("conv2d", seed) for seed in range(4)]
    assert steps(prepared, batches) == pytest.approx(steps(model, batches), rel=1e-4)
    state = prepared.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-5)
    prepared.apply(qompose.training.enable_fake_quant)
    prepared.eval()
    simulated, converted = prepared(x), qompose.convert_pt2e(prepared)
    assert batch_norms_in(converted) == []
    assert sqnr(simulated, converted(x)) > 40
    integers = [v for v in converted.state_dict().values() if v.dtype == torch.int8]
    assert len(integers) == 2, "one for the tower, one for the last"


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
        (note,) = qompose.report(prepared_for(model, batch_for("linear"))).notes
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
    assert bool(torch.isfinite(prepared_for(seeded(model).train(), x)(x)).all())


def test_what_does_not_train() -> None:
    model = nn.Linear(6, 4)
    with pytest.raises(qompose.errors.NotExportedError):
        qompose.prepare_qat_pt2e(model, product_quantizer())  # type: ignore[arg-type]
    prepared = prepared_for(model, batch_for("linear"))
    with pytest.raises(qompose.errors.StageError, match="prepare_qat_pt2e"):
        qompose.prepare_qat_pt2e(prepared, product_quantizer())


def learned(qscheme: torch.qscheme = torch.per_tensor_affine) -> QuantizationSpec:
    return QuantizationSpec(torch.int8, LearnableFakeQuantize, -127, 127, qscheme)


@DEEPCOPY
def test_a_whole_model_in_a_file_has_lost_its_record() -> None:
    prepared, _ = trained()
    for model, function in (
        (prepared, qompose.convert_pt2e),
        (qompose.convert_pt2e(prepared), qompose.lower),
    ):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        with pytest.raises(qompose.errors.StageError, match="state_dict"):
            function(torch.load(file, weights_only=False))  # type: ignore[operator]


@pytest.mark.full
@pytest.mark.parametrize("resumed", ["plain", "compiled"])
def test_a_checkpoint_of_a_compiled_model(resumed: str) -> None:
    """torch prefixes the names in a state dict of what it compiled; of the model itself it does not."""
    prepared, x = trained()
    compiled: Any = torch.compile(prepared, backend="eager", fullgraph=True)
    steps(compiled, [x])
    fresh, _ = conv_net()
    if resumed == "compiled":
        torch.compile(fresh, backend="eager").load_state_dict(compiled.state_dict())
    else:
        fresh.load_state_dict(compiled._orig_mod.state_dict())
    torch.manual_seed(1)
    on = steps(compiled, [x, x])
    torch.manual_seed(1)
    assert steps(fresh, [x, x]) == pytest.approx(on, rel=1e-4)
    assert sqnr(prepared.eval()(x), qompose.convert_pt2e(prepared)(x)) > 40


@pytest.mark.parametrize("kind", ["moving_average", "learned"])
def test_a_checkpoint_that_has_shared_tensors_once(kind: str, tmp_path: Path) -> None:
    """As accelerate writes it, by safetensors: of a fake-quantizer in two places, one has a name in it."""
    x = randn(4, 8)
    # Two operators that leave integers as they are.
    views = Model(lambda m, x: x.view(-1, 4).view(-1, 8))
    model = seeded(nn.Sequential(nn.Linear(8, 8), views, nn.Linear(8, 4)))
    config = qompose.training_config(STATIC, kind)
    made = [prepared_for(model.train(), x, toy(config=config)) for _ in range(2)]
    steps(made[0], [x])
    names = [name for name, _ in made[0].named_modules(remove_duplicate=False)]
    assert len(names) > len(list(made[0].named_modules()))
    save_model(made[0], str(tmp_path / "model.safetensors"))
    load_model(made[1], tmp_path / "model.safetensors")
    one, other = (own.state_dict() for own in made)
    assert list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)
    load_model(made[0], tmp_path / "model.safetensors")


def test_ranges_of_several_processes_are_no_views(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which safetensors would refuse, since all that a view is of would have to be saved."""
    monkeypatch.setattr(qompose.observers.fake_quantize, "several_processes", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_: None)
    prepared, x = conv_net()
    prepared(x)
    save_model(prepared, str(tmp_path / "model.safetensors"))


@DEEPCOPY
@pytest.mark.parametrize("kind", ["moving averages", "learned"])
def test_an_average_of_weights(kind: str) -> None:
    """Made after a first batch, when ranges have their size; it is deployed like the model itself."""
    prepared, x = conv_net(product_quantizer(learned()) if kind == "learned" else None)
    prepared(x)
    average: Any = torch.optim.swa_utils.AveragedModel(prepared, avg_fn=lambda old, _, n: old)
    for _ in range(2):
        steps(prepared, [x])
        average.update_parameters(prepared)
    for model in (average, prepared):
        model.eval().apply(qompose.training.disable_observer)
    assert not all(map(torch.equal, average.parameters(), prepared.parameters()))
    assert sqnr(average(x), qompose.convert_pt2e(average.module)(x)) > 40


def test_two_optimizers_of_which_one_has_the_scales() -> None:
    prepared, x = conv_net(product_quantizer(learned(torch.per_tensor_symmetric)))
    named = dict(prepared.named_parameters())
    scales = [p for n, p in named.items() if n.endswith(".scale")]
    rest = [p for n, p in named.items() if not n.endswith(".scale")]
    first, second = torch.optim.SGD(rest, lr=0.1), torch.optim.Adam(scales, lr=0.01)
    prepared(x).square().mean().backward()
    weights, before = ([p.detach().clone() for p in own] for own in (rest, scales))
    second.step()
    assert all(not torch.equal(p, old) for p, old in zip(scales, before, strict=True))
    assert all(torch.equal(p, old) for p, old in zip(rest, weights, strict=True))
    first.step()
    assert not any(torch.equal(p, old) for p, old in zip(rest, weights, strict=True) if p.dim() > 1)


def test_all_is_frozen_and_unfrozen() -> None:
    """Which leaves zero points of symmetric integers where they are."""
    prepared, x = conv_net(product_quantizer(learned(torch.per_tensor_symmetric)))
    prepared.requires_grad_(False)
    assert not prepared(x).requires_grad
    prepared.requires_grad_(True)
    steps(prepared, [x, x, x])
    points = [b for n, b in prepared.state_dict().items() if n.endswith("zero_point")]
    assert points and not any(bool(point.any()) for point in points)


@pytest.mark.full
@DEEPCOPY
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo
@pytest.mark.parametrize("quantizer", [None, product_quantizer(learned())], ids=["", "learned"])
def test_torch_compile_in_one_graph(quantizer: Any) -> None:
    prepared, x = trained(quantizer)
    prepared.eval().zero_grad()
    twin = copy.deepcopy(prepared)
    compiled = torch.compile(prepared, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), twin(x))
    for own in (compiled, twin):
        own(x).square().sum().backward()
    for (name, one), other in zip(prepared.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
    for (name, one), other in zip(prepared.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_gradients_are_accumulated_as_of_one_batch() -> None:
    """In parts, with ranges and batch norms that stay."""
    x = batch_for("conv2d")
    model = product_model("conv2d", "relu", bias=True).train()
    dims = ({0: torch.export.Dim("batch", min=2)},)
    program = torch.export.export(model, (x,), dynamic_shapes=dims)
    prepared = qompose.prepare_qat_pt2e(program, product_quantizer())
    steps(prepared, [x])
    for switch in (qompose.training.disable_observer, qompose.training.freeze_batch_norm):
        prepared.apply(switch)
    for module in prepared.modules():
        if hasattr(module, "in_training"):
            module.in_training = False  # of dropout
    gradients = []
    for parts in (1, 4):
        prepared.zero_grad()
        for part in x.chunk(parts):
            (prepared(part).square().sum() / len(x)).backward()
        gradients.append([p.grad for p in prepared.parameters() if p.grad is not None])
    assert len(gradients[0]) > 6
    for whole, summed in zip(*gradients, strict=True):
        torch.testing.assert_close(summed, whole, rtol=1e-4, atol=1e-6)


def without_rounding(model: nn.Module, x: Tensor) -> GraphModule:
    prepared = prepared_for(model, x)
    prepared.apply(qompose.training.disable_fake_quant)
    return prepared


def test_a_batch_norm_behind_two_convolutions() -> None:
    """The second uses the statistics that the first one has just moved."""
    layers = {"one": nn.Conv2d(6, 8, 3), "other": nn.Conv2d(6, 8, 3), "norm": nn.BatchNorm2d(8)}
    model: Any = Model(lambda m, x: m.norm(m.one(x)) + m.norm(m.other(x)), **layers).train()
    x = 30 * batch_for("conv2d")
    prepared = without_rounding(model, x)
    for _ in range(3):
        torch.testing.assert_close(prepared(x), model(x), rtol=1e-4, atol=1e-4)
    for name, value in model.norm.named_buffers():
        torch.testing.assert_close(prepared.get_buffer(f"norm.{name}"), value)


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


def test_training_on_nothing_but_nan_is_no_training() -> None:
    x = batch_for("linear")
    prepared = prepared_for(product_model("linear", "relu", bias=True, norm=False).train(), x)
    prepared(x * math.nan)
    with pytest.raises(CalibrationError):
        qompose.convert_pt2e(prepared)


def test_dropout_in_a_branch() -> None:
    def branches(m: Any, x: Tensor) -> Any:
        one, other = (lambda x: m.drop(m.one(x)), lambda x: m.drop(m.other(x)) * 2)
        return torch.cond(x.sum() > 0, one, other, (x,))

    model = Model(branches, one=nn.Linear(6, 6), other=nn.Linear(6, 6), drop=nn.Dropout(0.5))
    x = torch.ones(16, 6)
    for trains in (True, False):
        prepared = prepared_for(model.train(trains), x)
        for sign in (1, -1):
            dropped = (prepared.train()(sign * x) == 0).float().mean()
            assert 0.2 < float(dropped) < 0.8
            assert not bool((prepared.eval()(sign * x) == 0).any())


FROZEN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "conv": lambda m, x: m.norm(m.conv(x)),
    "norm": lambda m, x: m.norm(x),
    "drop": lambda m, x: m.drop(x),
}


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("part", FROZEN)
def test_a_part_without_gradients_before_one_with_them(part: str, trains: bool) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        with torch.no_grad():
            x = FROZEN[part](m, x)
        return m.last(x)

    x = batch_for("conv2d")
    layers = {"conv": nn.Conv2d(6, 6, 3), "last": nn.Conv2d(6, 4, 3)}
    model = Model(forward, **layers, norm=nn.BatchNorm2d(6), drop=nn.Dropout(0.5)).train(trains)
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
    assert "in 1)" in note
    prepared.apply(qompose.training.unfreeze_batch_norm)
    prepared(x)
    assert not torch.equal(prepared.get_buffer("1.running_mean"), torch.zeros(10))


def test_conversion_in_place_that_fails_leaves_the_model() -> None:
    prepared, x = conv_net()
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


def test_buffers_that_are_written_keep_no_gradients() -> None:
    def written(m: Any, x: Tensor) -> Any:
        y = m.layer(x)
        m.mean.copy_(0.9 * m.mean + 0.1 * y.mean(0))
        return y - m.mean

    model = Model(written, layer=nn.Linear(6, 6))
    model.register_buffer("mean", torch.zeros(6))
    x = batch_for("linear")
    prepared = prepared_for(model.train(), x, product_quantizer(learned()))
    for _ in range(3):
        prepared(x).sum().backward()
    assert not prepared.get_buffer("mean").requires_grad


def test_what_only_quantized_parts_read_is_said_not_to_be_trained() -> None:
    """torch's operators of quantization give no gradients. A weight that something else reads has some."""
    part, x = seeded(nn.Linear(3, 3)), randn(4, 3)
    quantized = convert(export(part, x), toy(LINEAR), x)
    model = Model(
        lambda m, x: m.part(m.front(x)) + m.skip(x), front=nn.Linear(3, 3), skip=nn.Linear(3, 3)
    )
    model.part = quantized
    with pytest.warns(qompose.QomposeWarning, match=r"front\.bias, front\.weight, part\.bias"):
        prepared = prepared_for(seeded(model), x)
    prepared(x).sum().backward()
    gone = [name for name, value in prepared.named_parameters() if value.grad is None]
    assert sorted(gone) == ["front.bias", "front.weight", "part.bias"]
    assert len([line for line in qompose.report(prepared).notes if "front.weight" in line]) == 1


def test_nothing_quantized_still_trains() -> None:
    x, model = batch_for("conv2d"), product_model("conv2d", "relu", bias=True).train()
    with pytest.warns(qompose.QomposeWarning, match="Nothing was quantized"):
        prepared = prepared_for(model, x, NullQuantizer())
    torch.manual_seed(0)
    out = prepared(x)
    torch.manual_seed(0)
    assert torch.equal(out, model(x))
