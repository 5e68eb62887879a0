# SPDX-License-Identifier: Apache-2.0
"""Tentative rewrites: made where they change rounding alone and a claim covers them, and nowhere else."""

from __future__ import annotations

import re
from typing import Any

import pytest
import qompose
import torch
from qompose.graph import copy_graph_module
from qompose.plan import Rewrite
from qompose.rewrites import FOLD_BATCH_NORM, SCALAR_TO_TENSOR, apply_rewrites, find_rewrites
from torch import Tensor, nn
from torch.nn import functional as F

from tests.core.toy import (
    ADD,
    CONV,
    CONV_RELU,
    LINEAR,
    NullQuantizer,
    OperatorPattern,
    Pattern,
    export,
    operators,
    plan_of,
    prepare,
    randn,
    rule,
    seeded,
    sqnr,
    toy,
)
from tests.zoo import ZooModel, by_name, tagged

aten = torch.ops.aten

EXPECTED = {
    "bn_conv_two_norms": ["(aten.conv2d in conv) is shared"] * 2,
    "bn_conv_output_two_norms": ["has other consumers"] * 2,
    "bn_conv_with_and_without": ["weight of conv2d (aten.conv2d in normed) is shared"],
    "bn_conv_skip": ["conv2d (aten.conv2d in conv) has other consumers"],
    "bn_linear_skip": ["linear (aten.linear in linear) has other consumers"],
    "bn_linear_tied": ["weight of linear (aten.linear in linear) is shared"],
}
"""Why each batch norm of the zoo's `fold` models must stay."""


def test_all_fold_models_of_the_zoo_are_listed_here() -> None:
    assert {model.name for model in tagged("fold")} == set(EXPECTED)


@pytest.mark.parametrize("model", tagged("fold"), ids=str)
def test_obstacles_are_reported_and_nothing_is_folded(model: ZooModel) -> None:
    program, inputs = model.export(), model.inputs()
    prepared = prepare(program, toy(CONV, LINEAR))
    assert plan_of(prepared).rewrites == ()
    obstacles = [note for note in plan_of(prepared).notes if FOLD_BATCH_NORM in note]
    assert len(obstacles) == len(EXPECTED[model.name])
    for note, expected in zip(obstacles, EXPECTED[model.name], strict=True):
        assert expected in note
    with torch.no_grad():
        assert torch.equal(prepared(*inputs), program.module()(*inputs))


@pytest.mark.parametrize(
    ("name", "folded"), [("conv_bn_relu", 2), ("mlp_bn", 2), ("resnet18", 8), ("shared_conv", 0)]
)
def test_benign_batch_norms_are_folded_and_listed(name: str, folded: int) -> None:
    model = by_name(name)
    program, inputs = model.export(), model.inputs()
    prepared = prepare(program, toy(CONV_RELU, CONV, LINEAR))
    rewrites = plan_of(prepared).rewrites
    before = operators(program.graph_module)["batch_norm"]
    assert len(rewrites) >= folded
    assert operators(prepared)["batch_norm"] == before - len(rewrites)
    with torch.no_grad():
        assert sqnr(program.module()(*inputs), prepared(*inputs)) > 100
    listed = qompose.report(prepared).rewrites
    assert all("fold_batch_norm: " in line and "batch_norm" in line for line in listed)
    assert len(listed) == len(rewrites)


def test_folding_is_undone_where_no_claim_covers_it() -> None:
    model = by_name("conv_bn_relu")
    program, inputs = model.export(), model.inputs()
    path = plan_of(prepare(program, toy(CONV))).operators[0].module
    some = prepare(program, toy(CONV).set_module_name(path, None))
    everything = plan_of(prepare(program, toy(CONV))).rewrites
    assert len(plan_of(some).rewrites) == len(everything) - 1
    none = prepare(program, NullQuantizer())
    with torch.no_grad():
        assert torch.equal(none(*inputs), program.module()(*inputs))


class ConvNorm(nn.Module):
    """A convolution or linear layer under a batch norm whose statistics are not trivial."""

    def __init__(self, layer: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = layer, norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


def trained(layer: nn.Module, norm: nn.Module) -> nn.Module:
    model = seeded(ConvNorm(layer, norm))
    if norm.running_mean is not None:
        norm.running_mean.copy_(randn(norm.num_features, seed=1))
        norm.running_var.copy_(randn(norm.num_features, seed=2).square() + 0.5)
    return model


FOLDS = [
    pytest.param(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), (3, 2, 8), id="conv1d"),
    pytest.param(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), (3, 2, 8, 8), id="no bias"),
    pytest.param(nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4), (3, 4, 8, 8), id="grouped"),
    pytest.param(
        nn.Conv2d(2, 4, 3, padding="same"), nn.BatchNorm2d(4), (3, 2, 8, 8), id="padding same"
    ),
    pytest.param(nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4), (2, 2, 4, 4, 4), id="conv3d"),
    pytest.param(nn.ConvTranspose2d(2, 4, 3), nn.BatchNorm2d(4), (3, 2, 5, 5), id="transposed"),
    pytest.param(nn.Linear(3, 4), nn.BatchNorm1d(4), (5, 3), id="linear"),
    pytest.param(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4, affine=False), (5, 3), id="plain"),
    pytest.param(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4, eps=0.3), (3, 2, 4, 4), id="large eps"),
]
OBSTACLES = [
    pytest.param(nn.Linear(3, 4), nn.BatchNorm1d(5), (2, 5, 3), "features", id="linear over rows"),
    pytest.param(
        nn.ConvTranspose2d(4, 4, 3, groups=2), nn.BatchNorm2d(4), (3, 4, 5, 5), "grouped",
        id="grouped transposed",
    ),
    pytest.param(
        nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4, track_running_stats=False), (3, 2, 4, 4),
        "training mode|running statistics", id="no statistics",
    ),
    pytest.param(
        nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), (4, 4), "", id="unbatched convolution"
    ),
]  # fmt: skip


def candidates(model: nn.Module, x: Tensor, wanted: str) -> Any:
    module = copy_graph_module(export(model, x).module(check_guards=False))
    return module, find_rewrites(module, {wanted})


@pytest.mark.parametrize(("layer", "norm", "shape"), FOLDS)
def test_a_fold_changes_rounding_alone(
    layer: nn.Module, norm: nn.Module, shape: tuple[int, ...]
) -> None:
    model, x = trained(layer, norm), randn(*shape)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    module, (candidate,) = candidates(model, x, FOLD_BATCH_NORM)
    assert candidate.obstacle is None
    apply_rewrites(module, [candidate])
    module.graph.lint()
    module.recompile()
    assert not operators(module)["batch_norm"]
    assert sqnr(model(x), module(x)) > 100
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("layer", "norm", "shape", "reason"), OBSTACLES)
def test_what_would_change_more_is_not_folded(
    layer: nn.Module, norm: nn.Module, shape: tuple[int, ...], reason: str
) -> None:
    _, (candidate,) = candidates(trained(layer, norm), randn(*shape), FOLD_BATCH_NORM)
    assert candidate.obstacle
    assert re.search(reason, candidate.obstacle)


def _transposed(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv_transpose2d(input, weight, bias)


def test_a_folded_transposed_convolution_is_quantized_along_its_own_channels() -> None:
    model, x = trained(nn.ConvTranspose2d(2, 4, 3), nn.BatchNorm2d(4)), randn(3, 2, 5, 5)
    shapes = ((1, 2, 4, 4), (2, 3, 1, 1), (3,))
    transposed = rule(
        "t", Pattern(_transposed, shapes, (("op", aten.conv_transpose2d.input),)), weight="weight"
    )
    prepared = prepare(export(model, x), toy(transposed))
    assert [r.name for r in plan_of(prepared).rewrites] == [FOLD_BATCH_NORM]
    assert sqnr(model(x), prepared(x)) > 100


class ScalarSum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 2.5) * 3


def test_scalars_become_tensors_where_a_claim_wants_them() -> None:
    x = randn(4, 4)
    program = export(ScalarSum(), x)
    plain = prepare(program, toy(ADD))
    assert plan_of(plain).claims == ()
    assert "number" in next(o.reason for o in plan_of(plain).operators if o.name == "add")
    wanting = toy(ADD, rewrites=(SCALAR_TO_TENSOR,))
    prepared = prepare(program, wanting)
    assert plan_of(prepared).rewrites == (Rewrite(SCALAR_TO_TENSOR, ("add",), "add"),)
    assert torch.equal(prepared(x), ScalarSum()(x))
    (mul,) = (n for n in prepared.graph.nodes if n.target is aten.mul.Tensor)
    assert mul.args[1] == 3, "nobody claims the product"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_scalars_beside_integers_stay(dtype: torch.dtype) -> None:
    x = torch.arange(4, dtype=dtype)
    _, found = candidates(ScalarSum(), x.float(), SCALAR_TO_TENSOR)
    assert len(found) == 2
    every = rule("any", OperatorPattern((aten.add.Tensor,)), activations=("self", "other"))

    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 2

    prepared = prepare(export(Shift(), x), toy(every, rewrites=(SCALAR_TO_TENSOR,)))
    assert prepared(x).dtype is dtype
    assert torch.equal(prepared(x), x + 2)
