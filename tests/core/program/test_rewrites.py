# SPDX-License-Identifier: Apache-2.0
"""Tentative rewrites: made where they change rounding alone and a claim covers them, and nowhere else."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig
from qompose.plan.plan import Rewrite
from qompose.program.graph import constant_of, copy_graph_module
from qompose.program.rewrites import (
    FOLD_BATCH_NORM,
    SCALAR_TO_TENSOR,
    apply_rewrites,
    find_rewrites,
    store_computed,
)
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from tests.core.toy import (
    ADD,
    CONV,
    CONV_RELU,
    INT8,
    LINEAR,
    MATMUL,
    WEIGHT,
    Annotator,
    Call,
    Model,
    NullQuantizer,
    OperatorPattern,
    annotate,
    convert,
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
from tests.sampling import at_once
from tests.zoo import ZooModel, by_name, tagged

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights")

EXPECTED = {
    "bn_conv_two_norms": ["aten.conv2d in conv"] * 2,
    "bn_conv_output_two_norms": ["conv2d, batch_norm, batch_norm_1"],
    "bn_conv_with_and_without": ["weight of conv2d (aten.conv2d in normed)"],
    "bn_conv_skip": ["conv2d (aten.conv2d in conv)"],
    "bn_linear_skip": ["linear (aten.linear in linear)"],
    "bn_linear_tied": ["weight of linear (aten.linear in linear)"],
}
"""What keeps the batch norms of the zoo's `fold` models from being folded, a line for each cause."""


@pytest.mark.parametrize("quantizer", [toy(CONV, LINEAR), NullQuantizer()], ids=["toy", "null"])
@pytest.mark.parametrize("model", tagged("fold"), ids=str)
def test_obstacles_are_reported_and_nothing_is_folded(
    model: ZooModel, quantizer: qompose.Quantizer
) -> None:
    program, inputs = model.export(), model.inputs()
    prepared = prepare(program, quantizer)
    assert plan_of(prepared).rewrites == ()
    obstacles = [note for note in plan_of(prepared).notes if FOLD_BATCH_NORM in note]
    assert len(obstacles) == len(EXPECTED[model.name])
    for note, expected in zip(obstacles, EXPECTED[model.name], strict=True):
        assert expected in note
    with torch.no_grad():
        assert torch.equal(prepared(*inputs), program.module()(*inputs))


FOLDED = [("conv_bn_relu", 2), ("mlp_bn", 2), ("resnet18", 8), ("shared_conv", 2)]


@pytest.mark.parametrize(("name", "folded"), at_once(FOLDED, FOLDED[0], FOLDED[1], FOLDED[3]))
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
    assert len(qompose.report(prepared).rewrites) == len(rewrites)
    claim_of = {operator.name: operator.claim for operator in plan_of(prepared).operators}
    for rewrite in rewrites:
        (piece,) = rewrite.pieces
        assert {claim_of[name] for name in rewrite.nodes} == {claim_of[piece]} != {None}


@pytest.mark.filterwarnings("ignore:Nothing was quantized")
@pytest.mark.parametrize("quantizer", [toy(LINEAR), NullQuantizer()], ids=["toy", "null"])
def test_batch_norms_that_nobody_claims_are_folded_if_asked(quantizer: qompose.Quantizer) -> None:
    model = by_name("conv_bn_relu")
    program, inputs = model.export(), model.inputs()
    norms = operators(program.graph_module)["batch_norm"]
    prepared = qompose.prepare_pt2e(program, quantizer, fold_batch_norms=True)
    assert norms and not operators(prepared)["batch_norm"]
    assert [r.name for r in plan_of(prepared).rewrites] == [FOLD_BATCH_NORM] * norms
    report = qompose.report(prepared)
    assert len(report.rewrites) == norms
    reasons = {row.name: row.reason for row in report.rows}
    assert "folded into conv2d_1" in reasons["batch_norm_1"]
    with torch.no_grad():
        assert sqnr(program.module()(*inputs), prepared(*inputs)) > 100


@pytest.mark.filterwarnings("ignore:Nothing was quantized")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize(
    ("layers", "shape", "decomposed"),
    [
        ([nn.Linear(3, 5), nn.BatchNorm1d(5)], (2, 5, 3), False),
        ([nn.Conv1d(3, 5, 1), nn.BatchNorm1d(5)], (2, 3, 4), True),
        ([nn.Tanh(), nn.BatchNorm1d(3), nn.Conv1d(3, 5, 1)], (2, 3, 4), False),
    ],
    ids=["not over features", "decomposed", "no layer before"],
)
def test_batch_norms_that_were_to_be_folded_and_cannot_be_are_named(
    layers: list[nn.Module], shape: tuple[int, ...], decomposed: bool
) -> None:
    program, x = export(seeded(nn.Sequential(*layers)), randn(*shape)), randn(*shape)
    program = program.run_decompositions() if decomposed else program
    (norm,) = (n.name for n in program.graph.nodes if "batch_norm" in str(n.target))
    with pytest.warns(qompose.QomposeWarning) as caught:
        prepared = qompose.prepare_pt2e(program, NullQuantizer(), fold_batch_norms=True)
    assert torch.equal(prepared(x), program.module()(x))
    report = qompose.report(prepared)
    assert norm in str(caught[0].message)
    assert sum(norm in note for note in report.notes) == 1
    assert FOLD_BATCH_NORM in next(row.reason for row in report.rows if row.name == norm)


def test_a_batch_norm_behind_a_layer_that_was_quantized_before_is_named() -> None:
    x = randn(2, 3, 4, 4)
    conv = seeded(nn.Conv2d(3, 4, 1))
    config = QuantizationConfig(INT8, None, WEIGHT)
    before = convert(export(conv, x), toy(CONV, config=config), x)
    program = torch.export.export(nn.Sequential(before, nn.BatchNorm2d(4).eval()), (x,))
    with pytest.warns(qompose.QomposeWarning) as caught:
        prepared = qompose.prepare_pt2e(program, toy(LINEAR), fold_batch_norms=True)
    assert ["batch_norm" in str(warning.message) for warning in caught] == [True]
    assert operators(prepared)["batch_norm"] == 1


def trained(layer: nn.Module, norm: nn.Module) -> nn.Module:
    model = seeded(nn.Sequential(layer, norm))
    if norm.running_mean is not None:
        norm.running_mean.copy_(randn(norm.num_features, seed=1))
        norm.running_var.copy_(randn(norm.num_features, seed=2).square() + 0.5)
    return model


FOLDS = {
    "conv1d": (nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), (3, 2, 8)),
    "no bias": (nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), (3, 2, 8, 8)),
    "grouped": (nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4), (3, 4, 8, 8)),
    "padding same": (nn.Conv2d(2, 4, 3, padding="same"), nn.BatchNorm2d(4), (3, 2, 8, 8)),
    "conv3d": (nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4), (2, 2, 4, 4, 4)),
    "transposed": (nn.ConvTranspose2d(2, 4, 3), nn.BatchNorm2d(4), (3, 2, 5, 5)),
    "linear": (nn.Linear(3, 4), nn.BatchNorm1d(4), (5, 3)),
    "plain": (nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4, affine=False), (5, 3)),
    "large eps": (nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4, eps=0.3), (3, 2, 4, 4)),
}
OBSTACLES = {
    "linear over rows": (nn.Linear(3, 4), nn.BatchNorm1d(5), (2, 5, 3)),
    "grouped": (nn.ConvTranspose2d(4, 4, 3, groups=2), nn.BatchNorm2d(4), (3, 4, 5, 5)),
    "no statistics": (
        nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4, track_running_stats=False), (3, 2, 4, 4),
    ),
    "unbatched convolution": (nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), (4, 4)),
}  # fmt: skip


def candidates(model: nn.Module, x: Tensor, wanted: str) -> Any:
    module = copy_graph_module(export(model, x).module(check_guards=False))
    return module, find_rewrites(module, {wanted})


@pytest.mark.parametrize(("layer", "norm", "shape"), FOLDS.values(), ids=FOLDS)
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


@pytest.mark.parametrize(("layer", "norm", "shape"), OBSTACLES.values(), ids=OBSTACLES)
def test_what_would_change_more_is_not_folded(
    layer: nn.Module, norm: nn.Module, shape: tuple[int, ...]
) -> None:
    _, (candidate,) = candidates(trained(layer, norm), randn(*shape), FOLD_BATCH_NORM)
    assert candidate.obstacle


def shared(kind: str, layer: str = "conv") -> nn.Module:
    """A product and batch norm that are called three times, one time not like the others."""

    def call(m: Any, x: Tensor) -> Tensor:
        return m.norm(m.layer(x))

    def other(m: Any, x: Tensor) -> Tensor:
        apart = {"other bias": m.plain.bias, "no bias": None}
        y = F.conv2d(x, m.layer.weight, apart.get(kind, m.layer.bias), padding=1)
        norm, eps = (
            m.other if kind == "other norm" else m.norm,
            0.1 if kind == "other eps" else 1e-5,
        )
        if kind == "no norm":
            return y
        z = F.batch_norm(y, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=eps)
        return z + y if kind == "read twice" else z

    def forward(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        last = m.layer.weight.sum() if kind == "summed" else other(m, x) if layer == "conv" else x
        if kind == "in a branch":
            last = torch.cond(x.sum() > 0, lambda y: other(m, y), lambda y: y - 1, (x,))
        return F.relu(call(m, x)), torch.tanh(call(m, x + 1)), last

    made: dict[str, Any] = {
        "conv": (lambda: nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d),
        "transposed": (lambda: nn.ConvTranspose2d(4, 4, 3, padding=1), nn.BatchNorm2d),
        "linear": (lambda: nn.Linear(4, 4), nn.BatchNorm1d),
    }
    product, norm = made[layer]
    layers = {"layer": product(), "plain": product(), "norm": norm(4), "other": norm(4)}
    model = seeded(Model(forward, **layers))
    for n, statistics in enumerate((layers["norm"], layers["other"])):
        statistics.running_mean.copy_(randn(4, seed=n))
        statistics.running_var.copy_(randn(4, seed=n + 2).square() + 0.5)
    return model


def give_weight_another_name(module: GraphModule, name: str) -> None:
    """Let a product read its weight under a name of its own, as programs that are not exported may."""
    product = next(node for node in module.graph.nodes if node.name == name)
    module.again = constant_of(product.args[1])
    with module.graph.inserting_before(product):
        read = module.graph.get_attr("again")
    read.meta = dict(product.args[1].meta)
    product.args = (product.args[0], read, *product.args[2:])


@pytest.mark.parametrize(
    ("layer", "tied", "number"),
    [("conv", False, 3), ("conv", True, 3), ("transposed", False, 2), ("linear", False, 2)],
)
def test_a_batch_norm_is_folded_once_for_all_readers(layer: str, tied: bool, number: int) -> None:
    model, x = shared("", layer), randn(*((3, 4) if layer == "linear" else (3, 4, 5, 5)))
    module, found = candidates(model, x, FOLD_BATCH_NORM)
    if tied:
        give_weight_another_name(module, found[-1].nodes[0])
    found = find_rewrites(module, {FOLD_BATCH_NORM})
    assert [candidate.obstacle for candidate in found] == [None] * number
    pieces = apply_rewrites(module, found)
    module.graph.lint()
    module.recompile()
    assert not operators(module)["batch_norm"]
    products = [node for node in module.graph.nodes if node.name in {n for p in pieces for n in p}]
    assert len(products) == number
    for position in (1, 2):
        constants = [constant_of(product.args[position]) for product in products]
        assert all(constant is constants[0] for constant in constants), "stored once"
    for expected, value in zip(model(x), module(x), strict=True):
        assert sqnr(expected, value) > 100


@pytest.mark.parametrize(
    "kind",
    [
        "other bias", "no bias", "other norm", "other eps", "no norm", "read twice", "summed",
        "in a branch",
    ],
)  # fmt: skip
def test_a_weight_with_another_use_is_folded_for_none(kind: str) -> None:
    _, found = candidates(shared(kind), randn(3, 4, 5, 5), FOLD_BATCH_NORM)
    assert len(found) >= 2
    assert all(candidate.obstacle for candidate in found)
    named = {"summed": "sum_1", "in a branch": "weight"}.get(kind, "conv2d (")
    assert all(named in candidate.obstacle for candidate in found[-2:])


def test_a_weight_that_is_the_input_too_is_not_folded() -> None:
    layers = {"layer": nn.Conv2d(3, 3, 3, padding=1), "norm": nn.BatchNorm2d(3)}
    model = seeded(Model(lambda m, x: m.norm(m.layer(m.layer.weight)) + x, **layers))
    _, (candidate,) = candidates(model, randn(3, 3, 3, 3), FOLD_BATCH_NORM)
    assert candidate.obstacle


class AllButOne(Annotator):
    """Claims the convolutions of a program but the second."""

    def __init__(self) -> None:
        super().__init__(self.claim)

    @staticmethod
    def claim(node: Node) -> None:
        if node.target is aten.conv2d.default and node.name != "conv2d_1":
            annotate(node, {node.args[0]: INT8, node.args[1]: WEIGHT}, INT8)


def test_readers_of_a_weight_are_folded_if_claims_cover_all() -> None:
    x = randn(3, 4, 5, 5)
    prepared = prepare(export(shared(""), x), AllButOne())
    assert plan_of(prepared).rewrites == ()
    assert len(plan_of(prepared).claims) == 2
    (note,) = (note for note in plan_of(prepared).notes if FOLD_BATCH_NORM in note)
    assert "conv2d_1" in note


def test_a_shared_weight_is_quantized_once() -> None:
    x = randn(3, 4, 5, 5)
    program = export(shared(""), x)
    prepared = prepare(program, toy(CONV_RELU, CONV))
    prepared(x)
    converted = qompose.convert_pt2e(prepared)
    stored = [value for value in converted.state_dict().values() if value.dtype == torch.int8]
    assert [value.shape for value in stored] == [(4, 4, 3, 3)]
    for expected, value in zip(program.module()(x), converted(x), strict=True):
        assert sqnr(expected, value) > 25


def computed(kind: str) -> nn.Module:
    """A convolution under a batch norm, one of whose parameters the program computes or writes."""

    def forward(m: Any, x: Tensor) -> Tensor:
        bias = m.conv.bias * 2 if kind == "bias" else m.conv.bias
        scale = m.norm.weight * 2 if kind == "scale" else m.norm.weight
        y = F.conv2d(x, m.conv.weight, bias)
        y = F.batch_norm(y, m.mean, m.norm.running_var, scale, m.norm.bias)
        if kind == "mean":
            m.mean.add_(1)
        return y

    layers = {"conv": nn.Conv2d(2, 4, 1), "norm": nn.BatchNorm2d(4)}
    return seeded(Model(forward, **layers, mean=nn.Buffer(torch.ones(4))))


@pytest.mark.parametrize(("kind", "named"), [("bias", "mul"), ("scale", "mul"), ("mean", "mean")])
def test_computed_and_written_parameters_are_not_folded(kind: str, named: str) -> None:
    x = randn(2, 2, 3, 3)
    _, (candidate,) = candidates(computed(kind), x, FOLD_BATCH_NORM)
    assert named in candidate.obstacle
    _, (plain,) = candidates(computed(""), x, FOLD_BATCH_NORM)
    assert plain.obstacle is None


def scalars(x: Tensor) -> Tensor:
    return (x + 2.5) * 3


def test_scalars_become_tensors_where_a_claim_wants_them() -> None:
    x = randn(4, 4)
    program = export(Call(scalars), x)
    assert plan_of(prepare(program, toy(ADD))).claims == ()
    prepared = prepare(program, toy(ADD, rewrites=(SCALAR_TO_TENSOR,)))
    assert plan_of(prepared).rewrites == (Rewrite(SCALAR_TO_TENSOR, ("add",), ("add",)),)
    assert torch.equal(prepared(x), scalars(x))
    (mul,) = (n for n in prepared.graph.nodes if n.target is aten.mul.Tensor)
    assert mul.args[1] == 3, "nobody claims the product"


def test_scalars_beside_integers_stay() -> None:
    x = torch.arange(4, dtype=torch.int32)
    prepared = prepare(export(Call(lambda x: x + 2), x), toy(ADD, rewrites=(SCALAR_TO_TENSOR,)))
    assert plan_of(prepared).rewrites == ()
    assert prepared(x).dtype is torch.int32
    assert torch.equal(prepared(x), x + 2)


def test_an_unknown_rewrite_is_an_error() -> None:
    program = export(Call(scalars), randn(4, 4))
    with pytest.raises(qompose.UserError, match=r"split_atention.*split_attention"):
        prepare(program, toy(ADD, rewrites=("split_atention",)))


MUL = rule("mul", OperatorPattern((aten.mul.Tensor,)), activations=("self", "other"))
WIDTH, HEADS = 16, 4
MODERATE = WIDTH**-0.5  # the size of weights that keep values of about one


def attend_and_expand(m: Any, x: Tensor) -> Tensor:
    """A transformer's block as models write it."""
    parts = m.project(m.first(x)).chunk(3, dim=-1)
    q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + m.out(y.transpose(1, 2).flatten(2))
    return x + m.down(F.gelu(m.up(m.second(x))))


def block() -> nn.Module:
    sizes = {"project": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
    layers = {name: nn.Linear(a * WIDTH, b * WIDTH) for name, (a, b) in sizes.items()}
    norms = {name: nn.LayerNorm(WIDTH) for name in ("first", "second")}
    return seeded(Model(attend_and_expand, **layers, **norms), size=MODERATE)


def splitting(*rules: Any, name: str = "split_attention") -> qompose.RuleQuantizer:
    return toy(*rules, rewrites=(name,))


def covered(prepared: Any) -> float:
    operators = plan_of(prepared).operators
    return sum(o.macs for o in operators if o.claim is not None) / sum(o.macs for o in operators)


@cache
def block_program() -> tuple[ExportedProgram, Tensor]:
    x = randn(2, 12, WIDTH)
    return export(block(), x), x


def test_most_of_a_transformer_block_is_annotated() -> None:
    program, x = block_program()
    assert covered(prepare(program, toy(LINEAR, MATMUL, ADD))) < 0.9
    prepared = prepare(program, splitting(LINEAR, MATMUL, ADD))
    assert covered(prepared) >= 0.9
    (rewrite,) = plan_of(prepared).rewrites
    assert rewrite.nodes == ("scaled_dot_product_attention",)
    assert "scaled_dot_product_attention_matmul" in rewrite.pieces
    with torch.no_grad():
        assert sqnr(program.module()(x), prepared(x)) > 100
    assert sqnr(program.module()(x), qompose.convert_pt2e(prepared)(x)) > 20


@pytest.mark.parametrize(
    ("name", "model", "shape"),
    [
        ("split_attention", block(), (2, 5, WIDTH)),
        ("split_hardswish", nn.Sequential(nn.Linear(3, 3), nn.Hardswish()), (2, 3)),
        ("unroll_recurrent", nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 3)), (2, 2, 3)),
    ],
)
def test_without_a_claimant_operators_stay_as_exported(
    name: str, model: nn.Module, shape: tuple[int, ...]
) -> None:
    x = randn(*shape)
    program = export(seeded(model), x)

    class Asking(NullQuantizer):
        rewrites = (name,)

    for quantizer in (Asking(), splitting(CONV, name=name)):
        prepared = prepare(program, quantizer)
        assert plan_of(prepared).rewrites == ()
        assert operators(prepared) == operators(program.graph_module)
        with torch.no_grad():
            pairs = (tree_leaves(f(x)) for f in (program.module(), prepared))
            assert all(map(torch.equal, *pairs))


def test_each_site_is_kept_or_rolled_back_by_itself() -> None:
    x = randn(2, 5, WIDTH)
    program = export(nn.Sequential(block(), block()), x)
    quantizer = splitting(MATMUL).set_module_name("0", None)
    prepared = prepare(program, quantizer)
    assert [r.nodes for r in plan_of(prepared).rewrites] == [("scaled_dot_product_attention_1",)]
    assert operators(prepared)["scaled_dot_product_attention"] == 1
    assert {c.anchor for c in plan_of(prepared).claims} == {
        "scaled_dot_product_attention_1_matmul",
        "scaled_dot_product_attention_1_matmul_1",
    }


def test_what_a_claim_takes_whole_is_not_taken_apart() -> None:
    whole = rule(
        "whole", OperatorPattern((aten.scaled_dot_product_attention.default,)),
        activations=("query", "key", "value"),
    )  # fmt: skip
    prepared = prepare(
        block_program()[0], qompose.compose(splitting(MATMUL), toy(whole, name="second"))
    )
    assert plan_of(prepared).rewrites == ()
    assert [claim.rule for claim in plan_of(prepared).claims] == ["whole"]


@pytest.mark.parametrize(
    ("name", "model", "shape", "rules", "pieces"),
    [
        ("split_layer_norm", nn.LayerNorm(8), (4, 8), (MUL,), {"mul": 3}),
        ("split_hardswish", nn.Hardswish(), (4, 8), (MUL,), {"mul": 1, "hardsigmoid": 1}),
        ("split_cells", nn.LSTMCell(8, 4), (4, 8), (LINEAR,), {"linear": 2, "tanh": 2}),
        ("unroll_recurrent", nn.GRU(8, 4, 2), (3, 4, 8), (LINEAR,), {"linear": 8}),
    ],
)
def test_pieces_are_claimed_and_quantized(
    name: str, model: nn.Module, shape: tuple[int, ...], rules: Any, pieces: dict[str, int]
) -> None:
    x = randn(*shape)
    program = export(seeded(model, size=MODERATE), x)
    prepared = prepare(program, splitting(*rules, name=name))
    assert [r.name for r in plan_of(prepared).rewrites] == [name]
    assert pieces.items() <= operators(prepared).items()
    with torch.no_grad():
        prepared(x)
        converted = qompose.convert_pt2e(prepared)
        references, actuals = (tree_leaves(f(x)) for f in (program.module(), converted))
    for reference, actual in zip(references, actuals, strict=True):
        assert sqnr(reference, actual) > 25


def windows(size: int) -> Tensor:
    """Scores are lowered where two places are far from each other."""
    place = torch.arange(size)
    return (place[:, None] - place[None]).abs().gt(3).float() * -9.0


class Masked(nn.Module):
    """Two layers of attention that compute a mask each."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.shift = size, nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            mask = windows(self.size) + self.shift
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask) + torch.arange(4).float()
        return x


class Written(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(9).float().expand(9, 9).contiguous()
        mask[0] = x.sum()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


class WrittenInside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = windows(9)
        with torch.no_grad():
            mask[:, :4] = 50.0
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask * -2.0)


class Returned(nn.Module):
    """Callers may write to a result."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = windows(9) + 1.0
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask), mask.unsqueeze(0)


class Counted(nn.Module):
    """A mask by an operator of others, which gives another one in each call."""

    def forward(self, x: Tensor) -> Tensor:
        mask: Tensor = torch.ops.qompose_tests.count(torch.zeros(9, 9))
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


@torch.library.custom_op("qompose_tests::count", mutates_args=())
def count(x: Tensor) -> Tensor:
    CALLS.append(0)
    return x + len(CALLS) * torch.eye(9)


CALLS: list[int] = []
count.register_fake(torch.empty_like)


@torch.no_grad()  # attention of what is trained has another kernel
def stored(model: nn.Module, size: int) -> tuple[GraphModule, list[Any], dict[str, Tensor]]:
    """A program with its computed values stored, what it computed before, and the buffers that it has now."""
    x = randn(1, 1, size, 4)
    program = export(model.eval(), x).module()
    wanted = program(x)
    store_computed(program)
    program.recompile()
    return program, [x, wanted], dict(program.named_buffers())


@torch.no_grad()
def test_masks_that_are_computed_are_stored_once_and_what_is_added_is_not() -> None:
    program, (x, wanted), buffers = stored(Masked(9), 9)
    assert all(torch.equal(program(x), wanted) for _ in range(2))
    assert [tuple(value.shape) for value in buffers.values()] == [(9, 9)]


@torch.no_grad()
@pytest.mark.parametrize(
    ("model", "size"),
    [(Written(), 9), (WrittenInside(), 9), (Returned(), 9), (Masked(1100), 1100)],
    ids=["written to", "written to inside", "a result", "large"],
)
def test_masks_that_others_change_or_that_are_large_are_not_stored(
    model: nn.Module, size: int
) -> None:
    program, (x, wanted), buffers = stored(model, size)
    assert all(map(torch.equal, tree_leaves(program(x)), tree_leaves(wanted)))
    assert buffers == {}


def test_what_operators_of_others_compute_is_not_stored() -> None:
    program, (x, _), buffers = stored(Counted(), 9)
    assert buffers == {}
    assert not torch.equal(program(x), program(x))
