# SPDX-License-Identifier: Apache-2.0
"""Tied parameters: one table of integers for all that read it, or a note that says why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig
from qompose.program.graph import copy_graph_module
from qompose.quantizer.tied_weights import unify_specs
from qompose.spec.claim import Claim, Point, PointSpec
from qompose.spec.quantization_spec import QuantizationSpec
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from tests.core.toy import (
    CONV,
    LINEAR,
    PER_TENSOR,
    STATIC,
    WEIGHT,
    WEIGHT_PER_TENSOR,
    Annotator,
    Model,
    annotate,
    convert,
    export,
    plan_of,
    randn,
    seeded,
    sqnr,
    toy,
)
from tests.zoo import by_name

aten = torch.ops.aten
NARROW = replace(WEIGHT, quant_min=-64, quant_max=63)
ROWS = replace(WEIGHT, ch_axis=1)


def tied() -> nn.Module:
    layers = {"tokens": nn.Embedding(12, 8), "body": nn.Linear(8, 8)}
    model = Model(
        lambda m, x: m.head(m.body(m.tokens(x)).relu()), **layers, head=nn.Linear(8, 12, bias=False)
    )
    model.head.weight = model.tokens.weight
    return seeded(model)


IDS = torch.arange(12).reshape(2, 6)


def wants(operator: Any, weight: QuantizationSpec, position: int, name: str) -> Annotator:
    """Wants the parameter at an argument's position of every call of an operator."""

    def annotate_node(node: Any) -> None:
        if node.target is operator:
            annotate(node, {node.args[position]: weight})

    return Annotator(annotate_node, name)


def tables(module: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all matrices."""
    return {name: tuple(t.shape) for name, t in module.state_dict().items() if t.dim() > 1}


@pytest.mark.parametrize("order", [1, -1], ids=["in order", "reversed"])
def test_the_first_scheme_that_suits_all_is_taken(order: int) -> None:
    """An annotation says nothing of other specifications; the rule of the head takes any."""
    members = [wants(aten.embedding.default, NARROW, 0, "tables"), toy(LINEAR)][::order]
    model = tied()
    converted = convert(export(model, IDS), qompose.compose(*members), IDS)
    (note,) = (note for note in qompose.report(converted).notes if "head.weight" in note)
    for name in ("head.weight", "embedding (tables", "linear_1 (toy", "[-64, 63]"):
        assert name in note
    assert tables(converted) == {"body.weight_q": (8, 8), "head.weight_q": (12, 8)}
    assert int(converted.state_dict()["head.weight_q"].abs().amax()) <= 64
    assert sqnr(model(IDS), converted(IDS)) > 28


def test_two_tables_are_said_to_be_two() -> None:
    tokens = wants(aten.embedding.default, NARROW, 0, "tables")
    head = wants(aten.linear.default, WEIGHT, 1, "heads")
    model = tied()
    converted = convert(export(model, IDS), qompose.compose(tokens, head), IDS)
    (note,) = (note for note in qompose.report(converted).notes if "head.weight" in note)
    assert "embedding (tables" in note and "linear_1 (heads" in note
    assert sorted(tables(converted).values()) == [(8, 8), (12, 8), (12, 8)]
    assert sqnr(model(IDS), converted(IDS)) > 28


def reads(owner: str, parameter: str, user: str, spec: QuantizationSpec) -> Claim:
    return Claim(
        owner=owner, rule="r", anchor=user, nodes=(user,), output=user,
        specs=(PointSpec(Point(parameter, user), spec),),
    )  # fmt: skip


def tied_claims(one: QuantizationSpec, other: QuantizationSpec) -> tuple[Any, list[Claim]]:
    """A program that reads one parameter twice, and the two claims on it."""
    module = copy_graph_module(export(tied(), IDS).module(check_guards=False))
    name = next(n for n in module.graph.nodes if n.name == "linear_1").args[1].name
    return module, [reads("a", name, "embedding", one), reads("b", name, "linear_1", other)]


def test_a_rule_that_refuses_leaves_the_choice_to_the_other() -> None:
    module, claims = tied_claims(NARROW, WEIGHT)

    def b_refuses(claim: Claim, spec: QuantizationSpec) -> str | None:
        return "its kernel wants 8 bits" if claim.owner == "b" else None

    changed, _ = unify_specs(module, claims, b_refuses)
    assert [claim.specs[0].spec for claim in changed] == [WEIGHT, WEIGHT]


@pytest.mark.parametrize(
    ("one", "other"),
    [(ROWS, WEIGHT), (NARROW, WEIGHT), (WEIGHT_PER_TENSOR, WEIGHT)],
    ids=["other dimension", "neither takes the other's", "per tensor"],
)
def test_where_no_scheme_suits_every_objection_is_named(
    one: QuantizationSpec, other: QuantizationSpec
) -> None:
    module, claims = tied_claims(one, other)
    changed, (note,) = unify_specs(module, claims, lambda claim, spec: "it says so")
    assert changed == claims
    assert "embedding (a, rule r)" in note and "linear_1 (b, rule r)" in note


def test_like_specifications_need_no_note() -> None:
    module, claims = tied_claims(replace(WEIGHT), WEIGHT)
    assert unify_specs(module, claims, lambda c, s: "no") == (claims, [])


def halves() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer, half in zip(model, torch.randn(8, 4).chunk(2), strict=True):
        layer.weight = nn.Parameter(half)
    return model


def test_parts_of_one_storage_are_not_tied() -> None:
    module = copy_graph_module(export(halves(), randn(2, 4)).module(check_guards=False))
    nodes = {node.name: node for node in module.graph.nodes}
    claims = [
        reads("a", nodes["linear"].args[1].name, "linear", NARROW),
        reads("b", nodes["linear_1"].args[1].name, "linear_1", WEIGHT),
    ]
    assert unify_specs(module, claims, lambda claim, spec: None) == (claims, [])


def siamese() -> nn.Module:
    """One weight read by two layers, at tensors of very different scales."""
    layers = {"left": nn.Linear(8, 8), "right": nn.Linear(8, 8)}
    layers["right"].weight = layers["left"].weight
    return Model(lambda m, x, y: F.cosine_similarity(m.left(x), m.right(y * 100), dim=-1), **layers)


TWO_NAMES = by_name("weight_of_two_names")
SHARED: dict[str, tuple[nn.Module, tuple[Tensor, ...], float]] = {
    "siamese": (siamese(), (randn(5, 8), randn(5, 8, seed=1)), 28),
    "two names": (TWO_NAMES.build(), TWO_NAMES.inputs(), 25),
}


@pytest.mark.parametrize("config", [STATIC, PER_TENSOR], ids=str)
@pytest.mark.parametrize(("model", "inputs", "bound"), SHARED.values(), ids=SHARED)
def test_a_shared_parameter_is_stored_once(
    model: nn.Module, inputs: tuple[Tensor, ...], bound: float, config: QuantizationConfig
) -> None:
    model = seeded(model)
    converted = convert(export(model, *inputs), toy(LINEAR, CONV, config=config), *inputs)
    matrices = [t for t in converted.state_dict().values() if t.dim() > 1]
    assert len({t.data_ptr() for t in matrices}) == 1
    assert all(t.dtype is torch.int8 for t in matrices)
    pairs = zip(*map(tree_leaves, (model(*inputs), converted(*inputs))), strict=True)
    assert all(sqnr(one, other) > bound for one, other in pairs)
    groups, claims = plan_of(converted).groups, plan_of(converted).claims
    assert len(groups) > len(claims), "activations keep scales of their own"


def test_what_stays_in_float_beside_the_integers_is_named() -> None:
    converted = convert(export(tied(), IDS), toy(LINEAR), IDS)
    (note,) = (n for n in qompose.report(converted).notes if "head.weight" in n)
    assert "linear_1" in note and "embedding" in note
    assert {tables(converted)[n] for n in tables(converted)} == {(12, 8), (8, 8)}
