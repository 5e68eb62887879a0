# SPDX-License-Identifier: Apache-2.0
"""Islands: what multiplies nothing, with float all around it, stays in float unless it is all there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig, Quantizer
from qompose.quantizer.rule_quantizer import RuleQuantizer
from torch import Tensor, nn
from torch.fx import Node

from tests.core.qat import ACTIVATION, weight_spec
from tests.core.toy import (
    ADD,
    ADD_RELU,
    DYNAMIC,
    INT8,
    LINEAR,
    RELU,
    STATIC,
    Annotator,
    Model,
    annotate,
    aten,
    claimed,
    convert,
    export,
    plan_of,
    prepare,
    randn,
    seeded,
    sqnr,
    toy,
)

X = randn(4, 8)


def program(forward: Callable[..., Any], **parts: Any) -> torch.export.ExportedProgram:
    layers = {name: nn.Linear(8, 8) for name in ("first", "second")}
    return export(seeded(Model(forward, **{**layers, **parts})), X)


def quantizer() -> RuleQuantizer:
    return toy(LINEAR, ADD_RELU, ADD, RELU)


def of(forward: Callable[..., Any], chosen: Quantizer | None = None, **parts: Any) -> set[str]:
    """The operators that are claimed."""
    claims = claimed(prepare(program(forward, **parts), chosen or quantizer()))
    return {name for nodes in claims.values() for name in nodes}


BETWEEN_FLOATS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "an input and a float reader": (lambda m, x: m.first((x + x).tanh()), {"linear"}),
    "an output": (lambda m, x: (m.first(x), x + x), {"linear"}),
    "several, one behind the other": (
        lambda m, x: m.first(((x + x) + x).relu().tanh()), {"linear"},
    ),
    "a product before float": (lambda m, x: m.first(x).tanh() + x, {"linear"}),
    "an input that a product reads too": (lambda m, x: (m.first(x), (x + x).tanh()), {"linear"}),
}  # fmt: skip
BESIDE_INTEGERS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "read by a product": (lambda m, x: m.first(x + x), {"linear", "add"}),
    "of a product": (lambda m, x: (m.first(x) + m.first(x)).tanh(), {"linear", "linear_1", "add"}),
    "one side is float": (lambda m, x: (m.first(x) + x.tanh()).tanh(), {"linear", "add"}),
    "behind another": (
        lambda m, x: ((m.first(x) + x) + x.tanh()).tanh(), {"linear", "add", "add_1"},
    ),
    "before another": (
        lambda m, x: m.first((x.tanh() + x) + x), {"linear", "add", "add_1"},
    ),
}  # fmt: skip
CASES = {**BETWEEN_FLOATS, **BESIDE_INTEGERS}


@pytest.mark.parametrize(("forward", "expected"), CASES.values(), ids=CASES)
def test_what_nobody_gives_or_takes_integers_from_stays_in_float(
    forward: Callable[..., Any], expected: set[str]
) -> None:
    assert of(forward) == expected


def test_training_is_no_different() -> None:
    config = QuantizationConfig(ACTIVATION, ACTIVATION, weight_spec(0), is_qat=True, algorithms=())
    trained = quantizer().set_global(config)
    forward, expected = BETWEEN_FLOATS["an output"]
    prepared = qompose.prepare_qat_pt2e(program(forward), trained)
    assert {name for nodes in claimed(prepared).values() for name in nodes} == expected


@pytest.mark.parametrize("forward", [lambda m, x: x + x, lambda m, x: (x + x).relu().tanh()])
def test_it_is_quantized_where_it_is_all_there_is(forward: Callable[..., Any]) -> None:
    assert "add" in of(forward)
    assert "add" in of(forward, qompose.compose(quantizer(), toy(LINEAR, name="products")))


def test_it_is_quantized_where_no_rule_speaks_of_products() -> None:
    assert of(lambda m, x: m.first((x + x).tanh()), toy(ADD)) == {"add"}


def test_it_stays_in_float_when_all_products_are_left_there() -> None:
    """Who tunes a model leaves one product after the other in float, and gains nothing by islands."""
    chosen = quantizer().set_module_type(nn.Linear, None)
    assert of(lambda m, x: m.first((x + x).tanh()), chosen) == set()


SELECTORS: dict[str, Callable[[RuleQuantizer], RuleQuantizer]] = {
    "operator": lambda q: q.set_operator_type(aten.add.Tensor, STATIC),
    "filter": lambda q: q.set_filter(lambda node: node.name == "add", STATIC),
    "call": lambda q: q.set_module_name_object_type_order("", torch.add, 0, STATIC),
}


@pytest.mark.parametrize("select", SELECTORS.values(), ids=SELECTORS)
def test_it_is_quantized_where_a_selector_asks_for_it(
    select: Callable[[RuleQuantizer], RuleQuantizer],
) -> None:
    """Those that exchange integers with it are quantized with it."""
    asked = of(lambda m, x: m.first(((x + x) + x).tanh()), select(quantizer()))
    assert asked == {"linear", "add", "add_1"}


def test_the_reason_says_how_to_quantize_it() -> None:
    plan = plan_of(prepare(program(BETWEEN_FLOATS["an output"][0]), quantizer()))
    (add,) = (o for o in plan.operators if o.name == "add")
    assert add.claim is None and "set_operator_type(torch.ops.aten.add.Tensor, " in add.reason


def test_neighbors_of_any_member_count() -> None:
    members = toy(ADD, name="sums"), toy(LINEAR, name="products")
    assert of(BESIDE_INTEGERS["of a product"][0], qompose.compose(*members)) == {
        "linear", "linear_1", "add",
    }  # fmt: skip
    assert of(BETWEEN_FLOATS["an output"][0], qompose.compose(*members)) == {"linear"}


def test_dynamic_neighbors_take_and_give_floats() -> None:
    members = toy(ADD, name="sums"), toy(LINEAR, name="products", config=DYNAMIC)
    assert of(BESIDE_INTEGERS["of a product"][0], qompose.compose(*members)) == {
        "linear", "linear_1",
    }  # fmt: skip


def test_annotations_are_followed_as_they_are() -> None:
    def annotate_add(node: Node) -> None:
        if node.target is aten.add.Tensor:
            annotate(node, dict.fromkeys(node.all_input_nodes, INT8), INT8)

    members = toy(LINEAR), Annotator(annotate_add)
    assert of(BETWEEN_FLOATS["an output"][0], qompose.compose(*members)) == {"linear", "add"}


def test_who_lost_it_to_an_island_is_heard_again() -> None:
    """The second asks for the sum by name, and the first only by its configuration for everything."""
    second = toy(ADD, name="second").set_operator_type(aten.add.Tensor, STATIC)
    prepared = prepare(
        program(BETWEEN_FLOATS["an output"][0]), qompose.compose(quantizer(), second)
    )
    plan = plan_of(prepared)
    assert [(c.owner, c.nodes) for c in plan.claims] == [
        ("toy", ("linear",)), ("second", ("add",)),
    ]  # fmt: skip
    assert not plan.conflicts


@pytest.mark.parametrize(
    ("rows", "width", "claims"),
    [(256, 200, {"linear", "add"}), (64, 200, {"linear"}), (256, 30_000, {"linear"})],
)
def test_a_table_that_takes_much_of_the_model_is_kept_as_integers(
    rows: int, width: int, claims: set[str]
) -> None:
    """Positions, say: the sum is quantized for their sake where they weigh something."""
    wide = {
        "first": nn.Linear(8, width),
        "second": nn.Identity(),
        "table": nn.Buffer(randn(rows, 1, 8)),
    }
    assert of(lambda m, x: m.first((x + m.table).tanh()), **wide) == claims


def test_the_model_is_measured_once_for_all_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting its numbers for each would take time that grows with the square of the model."""
    counted: list[int] = []
    measured = nn.Module.buffers

    def buffers(module: nn.Module, recurse: bool = True) -> Any:
        counted[-1] += 1
        return measured(module, recurse)

    monkeypatch.setattr(nn.Module, "buffers", buffers)
    for number in (2, 9):
        tables = {f"table_{i}": nn.Buffer(randn(256, 1, 8)) for i in range(number)}
        counted.append(0)
        of(
            lambda m, x, tables=tables: m.first(sum((x + getattr(m, t)).tanh() for t in tables)),
            **tables,
        )
    assert counted[0] == counted[1]


def test_bodies_belong_to_the_program() -> None:
    """A branch that only adds is an island where the program outside it multiplies."""

    def branches(m: Any, x: Tensor) -> Any:
        y = torch.cond(x.sum() > 0, lambda x: (x + x).tanh(), lambda x: x.tanh(), (x,))
        return m.first(x), y

    assert of(branches) == {"linear"}


def test_heavy_tails_of_the_input_do_not_reach_the_product() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.first(torch.tanh(x + m.shift))

    model = program(forward, shift=nn.Buffer(torch.full((8,), -1.0)))
    heavy = torch.exp(2 * randn(4, 8, seed=1))
    expected = model.module()(heavy)
    asked = quantizer().set_operator_type(aten.add.Tensor, STATIC)
    alone, rounded = (convert(model, chosen, heavy)(heavy) for chosen in (quantizer(), asked))
    assert sqnr(expected, alone) > sqnr(expected, rounded) + 10
