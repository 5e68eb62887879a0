# SPDX-License-Identifier: Apache-2.0
"""What loops do besides steps: checkpoints of all kinds, averages, several optimizers, freezing."""

from __future__ import annotations

import copy
import io
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
from tests.core.toy import STATIC, randn, seeded, sqnr, toy
from tests.core.training.test_training import DEEPCOPY, steps, without_dropout


def learned(qscheme: torch.qscheme = torch.per_tensor_affine) -> QuantizationSpec:
    return QuantizationSpec(torch.int8, LearnableFakeQuantize, -127, 127, qscheme)


def trained() -> tuple[GraphModule, Tensor]:
    x = batch_for("conv2d")
    prepared = prepared_for(product_model("conv2d", "relu", bias=True).train(), x)
    steps(prepared, [x])
    return prepared, x


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
        with pytest.raises(
            qompose.errors.StageError, match=r"torch.save .* save the state_dict\(\)"
        ):
            function(torch.load(file, weights_only=False))  # type: ignore[operator]


@pytest.mark.parametrize("resumed", ["plain", "compiled"])
def test_a_checkpoint_of_a_compiled_model(resumed: str) -> None:
    """torch prefixes the names in a state dict of what it compiled; of the model itself it does not."""
    prepared, x = trained()
    compiled: Any = torch.compile(prepared, backend="eager")
    steps(compiled, [x])
    fresh = prepared_for(product_model("conv2d", "relu", bias=True).train(), x)
    if resumed == "compiled":
        torch.compile(fresh, backend="eager").load_state_dict(compiled.state_dict())
    else:
        fresh.load_state_dict(compiled._orig_mod.state_dict())
    torch.manual_seed(1)
    on = steps(compiled, [x, x])
    torch.manual_seed(1)
    assert steps(fresh, [x, x]) == pytest.approx(on, rel=1e-4)
    assert sqnr(prepared.eval()(x), qompose.convert_pt2e(prepared)(x)) > 40


class Views(nn.Module):
    """Two operators that leave integers as they are."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 4).view(-1, 8)


@pytest.mark.parametrize("kind", ["moving_average", "learned"])
def test_a_checkpoint_that_has_shared_tensors_once(kind: str, tmp_path: Path) -> None:
    """As accelerate writes it, by safetensors: of a fake-quantizer in two places, one has a name in it."""
    x = randn(4, 8)
    model = seeded(nn.Sequential(nn.Linear(8, 8), Views(), nn.Linear(8, 4)))
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
    x = batch_for("conv2d")
    prepared = prepared_for(product_model("conv2d", "relu", bias=True).train(), x)
    prepared(x)
    save_model(prepared, str(tmp_path / "model.safetensors"))


@DEEPCOPY
@pytest.mark.parametrize("kind", ["moving averages", "learned"])
def test_an_average_of_weights(kind: str) -> None:
    """Made after a first batch, when ranges have their size; it is deployed like the model itself."""
    x = batch_for("conv2d")
    quantizer = product_quantizer(learned()) if kind == "learned" else None
    prepared = prepared_for(product_model("conv2d", "relu", bias=True).train(), x, quantizer)
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
    x = batch_for("conv2d")
    spec = learned(torch.per_tensor_symmetric)
    model = product_model("conv2d", "relu", bias=True).train()
    prepared = prepared_for(model, x, product_quantizer(spec))
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
    x = batch_for("conv2d")
    spec = learned(torch.per_tensor_symmetric)
    model = product_model("conv2d", "relu", bias=True).train()
    prepared = prepared_for(model, x, product_quantizer(spec)).requires_grad_(False)
    assert not prepared(x).requires_grad
    prepared.requires_grad_(True)
    steps(prepared, [x, x, x])
    points = [b for n, b in prepared.state_dict().items() if n.endswith("zero_point")]
    assert points and not any(bool(point.any()) for point in points)


@DEEPCOPY
@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # dynamo's own
def test_learned_scales_compile_in_one_graph() -> None:
    x = batch_for("conv2d")
    model = product_model("conv2d", "relu", bias=True).train()
    prepared = prepared_for(model, x, product_quantizer(learned()))
    steps(prepared, [x])
    prepared.eval().zero_grad()
    twin = copy.deepcopy(prepared)
    compiled = torch.compile(prepared, fullgraph=True, backend="aot_eager")
    for own in (compiled, twin):
        own(x).square().sum().backward()
    for (name, one), other in zip(prepared.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


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


def test_checkpointed_gradients_from_the_first_step() -> None:
    """Observers see a batch twice, as batch norms do; gradients are those of the second time."""
    x = batch_for("conv2d")
    prepared = prepared_for(without_dropout(product_model("conv2d", "relu", bias=True)).train(), x)
    for _ in range(2):
        out = torch.utils.checkpoint.checkpoint(prepared, x, use_reentrant=False)
        out.square().mean().backward()
    assert all(
        bool(torch.isfinite(p.grad).all()) for p in prepared.parameters() if p.grad is not None
    )
    assert sqnr(prepared.eval()(x), qompose.convert_pt2e(prepared)(x)) > 40
