# SPDX-License-Identifier: Apache-2.0
"""What quantizers rewrite themselves is in the report: whose rewrite, of what, and what stands there now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose import Quantizer
from qompose.errors import ConfigError
from qompose.plan.plan import Rewrite
from qompose.quantizer.composition import ComposableQuantizer
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.core.toy import (
    LINEAR,
    SIGMOID,
    NullQuantizer,
    convert,
    export,
    plan_of,
    prepare,
    randn,
    seeded,
    toy,
)

aten = torch.ops.aten
X = randn(4, 4)
TRANSFORM = ": transform_for_annotation"


def replaced(target: Any, build: Callable[[GraphModule, Node], Node]) -> type[Quantizer]:
    """A kind of quantizer that replaces the operators of a target, and annotates nothing."""

    class Replacing(NullQuantizer):
        def transform_for_annotation(self, model: GraphModule) -> GraphModule:
            for node in model.graph.find_nodes(op="call_function", target=target):
                with model.graph.inserting_before(node):
                    made = build(model, node)
                node.replace_all_uses_with(made)
                model.graph.erase_node(node)
            model.recompile()
            return model

    return Replacing


def like(model: GraphModule, node: Node, target: Any, *args: Any) -> Node:
    made = model.graph.call_function(target, args)
    made.meta = dict(node.meta)
    return made


def product_and_sum(model: GraphModule, node: Node) -> Node:
    product = like(model, node, aten.linear.default, *node.args[:2])
    return like(model, node, aten.add.Tensor, product, node.args[2])


def sigmoid_times(model: GraphModule, node: Node) -> Node:
    return like(
        model, node, aten.mul.Tensor, node.args[0],
        like(model, node, aten.sigmoid.default, node.args[0]),
    )  # fmt: skip


Split = type("Split", (replaced(aten.linear.default, product_and_sum),), {})
Silu = type("Silu", (replaced(aten.silu.default, sigmoid_times),), {})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.silu(self.a(x)))


PROGRAM = export(seeded(Net()), X)
RULES = (LINEAR, SIGMOID)


def test_what_was_made_is_listed_where_it_stands_and_what_is_gone_is_not() -> None:
    lowered = qompose.lower(convert(PROGRAM, qompose.compose(Split(), toy(LINEAR)), X))
    report = qompose.report(lowered)
    assert [(r.name, r.operator, r.module, r.macs, r.owner) for r in report.rows] == [
        ("linear_default", "aten.linear", "a", 64, "toy"),
        ("add_tensor", "aten.add.Tensor", "a", 0, ""),
        ("silu", "aten.silu", "", 0, ""),
        ("tanh", "aten.tanh", "", 0, ""),
    ]
    assert report.coverage() == 1.0
    assert report.rewrites == (
        "Split: transform_for_annotation: linear became linear_default, add_tensor",
    )
    qompose.assert_lowered(lowered)
    assert not any("at no float operator" in note for note in report.notes)


def test_each_member_has_a_rewrite_and_a_note_of_its_own() -> None:
    plan = plan_of(prepare(PROGRAM, qompose.compose(Split(), toy(*RULES), Silu(), NullQuantizer())))
    assert plan.rewrites == (
        Rewrite(f"Split{TRANSFORM}", ("linear",), ("linear_default", "add_tensor"), member="Split"),
        Rewrite(f"Silu{TRANSFORM}", ("silu",), ("sigmoid_default", "mul_tensor"), member="Silu"),
    )
    assert [note for note in plan.notes if "rewrote" in note] == [
        f"{name}: transform_for_annotation rewrote the program" for name in ("Split", "Silu")
    ]
    assert {o.name for o in plan.operators if o.claim is not None} == {
        "linear_default", "sigmoid_default",
    }  # fmt: skip
    assert "rewritten by Silu: transform_for_annotation: silu became" in str(plan)


def test_two_members_of_one_name_are_told_apart() -> None:
    again = type(
        "Split", (replaced(aten.add.Tensor, lambda m, n: like(m, n, aten.sub.Tensor, *n.args)),), {}
    )
    plan = plan_of(
        prepare(PROGRAM, qompose.compose(Split(), qompose.compose(again()), toy(LINEAR)))
    )
    assert [(r.name, r.nodes) for r in plan.rewrites] == [
        ("Split: transform_for_annotation", ("linear",)),
        ("Split#2: transform_for_annotation", ("add_tensor",)),
    ]
    assert [o.name for o in plan.operators] == ["linear_default", "sub_tensor", "silu", "tanh"]


def test_a_composition_with_a_transform_of_its_own_is_one_step() -> None:
    class Own(ComposableQuantizer):
        transform_for_annotation = Split.transform_for_annotation

    plan = plan_of(prepare(PROGRAM, Own((Silu(), toy(LINEAR)))))
    assert [r.name for r in plan.rewrites] == ["Silu+toy: transform_for_annotation"]


def test_an_operator_that_kept_its_name_is_listed_as_what_it_is_now() -> None:
    class Retarget(NullQuantizer):
        def transform_for_annotation(self, model: GraphModule) -> GraphModule:
            for node in model.graph.find_nodes(op="call_function", target=aten.tanh.default):
                node.target = aten.sigmoid.default
            return model

    plan = plan_of(prepare(PROGRAM, qompose.compose(Retarget(), toy(SIGMOID))))
    assert plan.rewrites == (
        Rewrite(f"Retarget{TRANSFORM}", ("tanh",), ("tanh",), member="Retarget"),
    )
    (operator,) = (o for o in plan.operators if o.name == "tanh")
    assert (operator.operator, operator.claim) == ("aten.sigmoid", 0)


def test_an_operator_whose_arguments_were_changed_is_named_and_one_behind_it_is_not() -> None:
    class Rewire(NullQuantizer):
        def transform_for_annotation(self, model: GraphModule) -> GraphModule:
            (silu,) = model.graph.find_nodes(op="call_function", target=aten.silu.default)
            (x,) = model.graph.find_nodes(op="placeholder")
            silu.args = (x,)
            return model

    plan = plan_of(prepare(PROGRAM, qompose.compose(Rewire(), toy(LINEAR))))
    assert [r.nodes for r in plan.rewrites] == [("silu",)]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.yes, self.no = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, self.yes, lambda x: self.no(x).relu(), (x,)).tanh()


def test_bodies_are_compared_too() -> None:
    halved = replaced(
        aten.relu.default, lambda m, n: like(m, n, aten.maximum.default, n.args[0], n.args[0])
    )
    plan = plan_of(prepare(export(Branches(), X), qompose.compose(halved(), toy(LINEAR))))
    (rewrite,) = plan.rewrites
    assert rewrite.nodes == ("false_graph_0_relu",)
    assert rewrite.pieces == ("false_graph_0_maximum_default",)
    names = [o.name for o in plan.operators]
    assert names.index("false_graph_0_maximum_default") == names.index("false_graph_0_linear") + 1
    assert "false_graph_0_relu" not in names
    assert sum(o.macs for o in plan.operators) == 2 * 4 * 16


def test_made_operators_get_an_example_of_their_value() -> None:
    """Which is what transforms leave out: rules and reports read shapes from it."""

    def build(model: GraphModule, node: Node) -> Node:
        return model.graph.call_function(aten.linear.default, node.args)

    plan = plan_of(prepare(PROGRAM, qompose.compose(replaced(aten.linear.default, build)())))
    assert next((o.name, o.macs) for o in plan.operators) == ("linear_default", 64)


def test_a_transform_that_changes_nothing_is_not_mentioned() -> None:
    class Copying(NullQuantizer):
        def transform_for_annotation(self, model: GraphModule) -> GraphModule:
            return GraphModule(model, model.graph)

    plan = plan_of(prepare(PROGRAM, qompose.compose(Copying(), toy(LINEAR))))
    assert not plan.rewrites
    assert not any("rewrote" in note for note in plan.notes)


def test_can_quantize_answers_for_what_was_made() -> None:
    members = [Split(), toy(LINEAR)]
    assert qompose.can_quantize(PROGRAM, "linear_default", members)
    added = qompose.can_quantize(PROGRAM, "add_tensor", members)
    assert not added
    assert ("toy", "none of its rules matches aten.add.Tensor here") in added.reasons
    assert all("became linear_default, add_tensor" in a.rewrites[0] for a in [added])


def test_can_quantize_says_who_rewrote_what_is_gone() -> None:
    answer = qompose.can_quantize(PROGRAM, "linear", [Split(), toy(LINEAR)])
    assert not answer
    assert answer.reason == (
        "program: Split rewrote it by its transform_for_annotation; ask about what it made: "
        "linear_default, add_tensor"
    )
    assert not qompose.can_quantize(PROGRAM, "linear", [Split()])
    assert qompose.can_quantize(PROGRAM, "linear", [toy(LINEAR)])


def test_can_quantize_knows_the_names_that_were_made() -> None:
    with pytest.raises(ConfigError, match="did you mean 'linear_default'"):
        qompose.can_quantize(PROGRAM, "linear_defaul", [Split(), toy(LINEAR)])
    with pytest.raises(ConfigError, match="has no 'linear_default'"):
        qompose.can_quantize(PROGRAM, "linear_default", [toy(LINEAR)])


class TwoValues(nn.Module):
    """Two outputs of one shape, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner(x).relu(), self.inner(x).tanh(), k + 1


def editing(edit: Callable[[GraphModule, dict[str, Node]], None]) -> Quantizer:
    """A quantizer that edits the program in place, and annotates nothing."""

    class Editing(NullQuantizer):
        def transform_for_annotation(self, model: GraphModule) -> GraphModule:
            edit(model, {node.name: node for node in model.graph.nodes})
            model.recompile()
            return model

    return Editing()


INPUTS = (randn(4, 4), torch.arange(4))


def swap(model: GraphModule, nodes: dict[str, Node]) -> None:
    first, second, third = nodes["output"].args[0]  # type: ignore[misc]
    nodes["output"].args = ((second, first, third),)


def widen(model: GraphModule, nodes: dict[str, Node]) -> None:
    with model.graph.inserting_after(nodes["relu"]):
        wide = model.graph.call_function(aten.to.dtype, (nodes["relu"], torch.float64))
    _, second, third = nodes["output"].args[0]  # type: ignore[misc]
    nodes["output"].args = ((wide, second, third),)


def test_a_transform_that_returns_other_values_is_refused() -> None:
    with pytest.raises(qompose.UserError) as caught:
        prepare(export(seeded(TwoValues()), *INPUTS), editing(swap))
    assert "Editing: transform_for_annotation" in str(caught.value)


def divide(model: GraphModule, nodes: dict[str, Node]) -> None:
    nodes["add"].target, nodes["add"].args = aten.div.Tensor, (nodes["k"], 2)


def cast_inside(model: GraphModule, nodes: dict[str, Node]) -> None:
    with model.graph.inserting_before(nodes["relu"]):
        wide = model.graph.call_function(aten.to.dtype, (nodes["linear"], torch.float64))
    nodes["relu"].args = (wide,)


@pytest.mark.parametrize(
    ("edit", "name"), [(divide, "add"), (cast_inside, "relu"), (widen, "relu where it is returned")]
)
def test_a_value_of_another_dtype_is_undone(edit: Any, name: str) -> None:
    model = seeded(TwoValues())
    prepared = prepare(export(model, *INPUTS), editing(edit))
    for expected, actual in zip(model(*INPUTS), prepared(*INPUTS), strict=True):
        assert torch.equal(expected, actual)
    assert any(f"would have given {name} another dtype" in n for n in plan_of(prepared).notes)


def test_annotate_may_remove_what_no_result_depends_on() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.pooler = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            found = self.inner(x)
            self.pooler(found).tanh()
            return found.relu()

    class Tidy:
        def annotate(self, model: GraphModule) -> GraphModule:
            model.graph.eliminate_dead_code()
            return model

        def validate(self, model: GraphModule) -> None: ...

    model = seeded(Unused())
    prepared = prepare(export(model, X), qompose.compose(Tidy(), toy(LINEAR)))
    assert torch.equal(prepared(X), model(X))
