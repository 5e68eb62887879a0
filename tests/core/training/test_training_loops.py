# SPDX-License-Identifier: Apache-2.0
"""What loops do besides steps, and models whose training is easily got wrong."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationSpec
from qompose.observers import LearnableFakeQuantize
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.qat import batch_for, prepared_for, product_model, product_quantizer
from tests.core.toy import STATIC, Model, NullQuantizer, randn, seeded, sqnr, toy
from tests.core.training.test_training import DEEPCOPY, conv_net, steps, trained


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


@pytest.mark.parametrize("resumed", ["plain", pytest.param("compiled", marks=pytest.mark.full)])
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
@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # dynamo's own
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


def test_nothing_quantized_still_trains() -> None:
    x, model = batch_for("conv2d"), product_model("conv2d", "relu", bias=True).train()
    with pytest.warns(qompose.QomposeWarning, match="Nothing was quantized"):
        prepared = prepared_for(model, x, NullQuantizer())
    torch.manual_seed(0)
    out = prepared(x)
    torch.manual_seed(0)
    assert torch.equal(out, model(x))
