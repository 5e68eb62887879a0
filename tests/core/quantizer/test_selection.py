# SPDX-License-Identifier: Apache-2.0
"""Selectors on programs: predicates, what has no effect, and what rewrites leave."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose import RuleQuantizer, UserError
from qompose.errors import ConfigError, MemberError
from qompose.program.graph import module_path
from torch import Tensor, nn
from torch.fx import Node

from tests.core.places import (
    IS_LINEAR,
    PROGRAM,
    Regions,
    X,
    configs,
    rules,
)
from tests.core.toy import (
    ADD,
    CONV,
    CONV_RELU,
    DYNAMIC,
    LINEAR,
    PER_TENSOR,
    RELU,
    STATIC,
    WEIGHT_ONLY,
    ToyBackend,
    convert,
    export,
    plan_of,
    prepare,
    randn,
    seeded,
    toy,
)

aten = torch.ops.aten


class TestFilter:
    """`set_filter`."""

    def test_every_other_linear(self) -> None:
        """The predicate keeps count: it is asked once about each operator, in graph order."""
        count = itertools.count()
        quantizer = rules().set_filter(
            lambda n: n.target is IS_LINEAR and next(count) % 2 == 0, DYNAMIC
        )
        names = ["linear", "linear_1", "linear_2", "linear_3"]
        found = configs(PROGRAM, quantizer)
        assert [found[name] for name in names] == ["dynamic", "float"] * 2

    def test_linears_with_an_input_of_three_dimensions(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

            def forward(self, x: Tensor) -> Tensor:
                return self.b(self.a(x).sum(1))

        def deep(node: Node) -> bool:
            return node.target is IS_LINEAR and node.args[0].meta["val"].dim() == 3  # type: ignore[union-attr]

        program = export(seeded(Net()), randn(2, 4, 3))
        assert configs(program, rules().set_filter(deep, STATIC)) == {
            "linear": "static",
            "linear_1": "float",
        }

    @pytest.mark.parametrize("strict", [False, True])
    def test_it_is_asked_in_the_order_of_a_run(self, strict: bool) -> None:
        """The operators of a body stand where it is called; its call and results are none."""
        seen: list[str] = []
        program = export(seeded(Regions()), X, strict=strict)
        prepare(program, rules().set_filter(lambda node: seen.append(module_path(node)), STATIC))
        assert seen == ["a", "b", "c", "d"]

    def test_a_member_that_occurs_twice_asks_once(self) -> None:
        seen: list[str] = []
        quantizer = rules().set_filter(lambda node: seen.append(node.name), STATIC)
        prepare(PROGRAM, qompose.compose(quantizer, quantizer))
        assert len(seen) == len(set(seen)) == 5

    def test_it_says_which_selector_it_was(self) -> None:
        def odd_ones(node: Node) -> bool:
            return True

        row = qompose.report(prepare(PROGRAM, rules().set_filter(odd_ones, STATIC))).rows[0]
        assert row.selector == "filter odd_ones"

    def test_an_error_of_a_predicate_names_the_operator(self) -> None:
        quantizer = rules().set_filter(lambda node: node.nothing, STATIC)  # type: ignore[attr-defined]
        with pytest.raises(
            MemberError, match=r"filter <lambda> at .*, asked about linear \(aten.linear in fi"
        ):
            prepare(PROGRAM, quantizer)

    def test_the_same_quantizer_serves_several_programs(self) -> None:
        """Nothing of one program is kept: the predicate is asked anew."""
        seen: list[str] = []
        quantizer = rules().set_filter(lambda node: bool(seen.append(node.name)) or True, STATIC)
        configs(PROGRAM, quantizer)
        first = list(seen)
        configs(PROGRAM, quantizer)
        assert seen == first * 2
        assert first == ["linear", "linear_1", "linear_2", "add", "linear_3"]


class Slide(nn.Module):
    """The modules that the chain of selectors below speaks of."""

    class Bar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv0, self.conv1 = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)
            self.weight = nn.Parameter(torch.empty(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv1(self.conv0(x)).flatten(1)
            return F.linear(F.linear(x, self.weight), self.weight)

    class Foo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bar, self.other = Slide.Bar(), nn.Conv2d(2, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.bar(self.other(x))

    def __init__(self) -> None:
        super().__init__()
        self.foo, self.module1 = Slide.Foo(), nn.Linear(2, 2)
        self.loose, self.act = nn.Linear(2, 2), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.module1(self.foo(x))
        return self.act(self.loose(x)) + torch.sigmoid(x)


def test_the_chain_of_a_qconfig_mapping_works_with_configurations_in_place_of_qconfigs() -> None:
    c, c1, c2, c3 = STATIC, DYNAMIC, WEIGHT_ONLY, PER_TENSOR
    quantizer = (
        rules(LINEAR, CONV, RELU, ADD)
        .set_global(c)
        .set_object_type(torch.nn.Linear, c1)
        .set_object_type(torch.nn.ReLU, c1)
        .set_module_name_regex("foo.*bar.*conv[0-9]+", c1)
        .set_module_name_regex("foo.*", c2)
        .set_module_name("module1", c1)
        .set_module_name_object_type_order("foo.bar", F.linear, 0, c3)
    )
    plan = plan_of(prepare(export(seeded(Slide()), randn(1, 2, 1, 1)), quantizer))
    given = {o.name: plan.claims[o.claim].config for o in plan.operators if o.claim is not None}
    assert given == {
        "conv2d": "weight-only",  # foo.other
        "conv2d_1": "dynamic",  # foo.bar.conv0
        "conv2d_2": "dynamic",
        "linear": "per tensor",  # the first of foo.bar
        "linear_1": "weight-only",
        "linear_2": "dynamic",  # module1
        "linear_3": "dynamic",  # a Linear
        "relu": "dynamic",
        "add": "static",
    }


class TestNotes:
    """What a setting does not reach is said; strict makes it an error."""

    @pytest.mark.parametrize(
        ("setting", "note"),
        [
            pytest.param(
                lambda q: q.set_filter(lambda n: False, None), "py:", id="filter"
            ),
            pytest.param(
                lambda q: q.set_module_type(nn.Linear, DYNAMIC).set_operator_type(aten.linear, STATIC),
                "Linear decides about none of the 4 operators that it picks",
                id="overruled",
            ),
            pytest.param(lambda q: q.set_operator_type(torch.sin, None), "aten.sin occurs now", id="type"),
            pytest.param(
                lambda q: q.set_operator_type(IS_LINEAR, DYNAMIC).set_operator_type(aten.linear, STATIC),
                "type aten.linear decides about none of the 4", id="overruled under the same name",
            ),
        ],
    )  # fmt: skip
    def test_a_setting_without_effect(self, setting: Callable[[Any], Any], note: str) -> None:
        quantizer = setting(toy(LINEAR, ADD))
        assert [note in line for line in plan_of(prepare(PROGRAM, quantizer)).notes] == [True]
        with pytest.raises(UserError, match="strict=True"):
            prepare(PROGRAM, quantizer, strict=True)

    def test_nothing_is_said_where_everything_has_effect(self) -> None:
        quantizer = toy(LINEAR, ADD).set_module_name("first", None).set_operator_type(ADD_OP, None)
        assert plan_of(prepare(PROGRAM, quantizer)).notes == ()

    def test_a_type_that_only_a_decomposition_calls_is_not_missed(self) -> None:
        quantizer = toy(MATMUL, config=None, rewrites=("split_attention",))
        quantizer.set_operator_type(torch.matmul, STATIC)
        plan = plan_of(prepare(export(seeded(Attention()), randn(1, 3, 4)), quantizer, strict=True))
        assert len(plan.claims) == 2


ADD_OP = aten.add.Tensor


def narrowed(quantizer: RuleQuantizer) -> RuleQuantizer:
    return quantizer.set_filter_function(lambda node: node.target is aten.conv2d.default)


class TestFolding:
    """Whose selectors keep a batch norm from being folded: those of who takes the convolution."""

    @pytest.mark.parametrize(
        ("other", "folded"),
        [
            pytest.param(lambda q: q.set_module_name("0", None), True, id="leaves the convolution"),
            pytest.param(lambda q: q.set_module_name("1", None), True, id="leaves the batch norm"),
            pytest.param(lambda q: q, True, id="comes second and takes nothing"),
        ],
    )
    @pytest.mark.parametrize("first", [False, True])
    def test_other_members_have_no_say(self, other: Any, folded: bool, first: bool) -> None:
        """The other member has no rule for convolutions, or its selectors leave it alone."""
        one, two = toy(CONV, name="one"), other(toy(LINEAR, name="two"))
        prepared = prepare(NORMED, qompose.compose(*((two, one) if first else (one, two))))
        assert bool(plan_of(prepared).rewrites) is folded
        assert not [note for note in plan_of(prepared).notes if "was not made" in note]

    def test_the_member_that_takes_it_decides(self) -> None:
        left, taking = toy(CONV, name="left").set_module_name("0", None), toy(CONV, name="taking")
        plan = plan_of(prepare(NORMED, qompose.compose(left, taking)))
        assert [claim.owner for claim in plan.claims] == ["taking"]
        assert plan.rewrites
        taking.set_module_name("1", None)
        plan = plan_of(prepare(NORMED, qompose.compose(left, taking)))
        assert [claim.owner for claim in plan.claims] == ["taking"]
        assert not plan.rewrites
        assert any("was not made: module name 1 wants float" in note for note in plan.notes)

    def test_a_filter_function_speaks_of_what_is_quantized_and_blocks_no_fusion(self) -> None:
        plan = plan_of(prepare(NORMED, narrowed(toy(CONV_RELU, CONV, LINEAR))))
        assert [claim.rule for claim in plan.claims] == ["conv_relu"]
        assert plan.rewrites

    def test_what_a_filter_function_leaves_out_says_so(self) -> None:
        report = qompose.report(prepare(PROGRAM, narrowed(toy(LINEAR, ADD))))
        assert {row.reason for row in report.rows} == {"toy: the filter function leaves it out"}
        assert ["global" in note for note in report.notes if "decides" in note] == []


def test_a_subclass_that_annotates_for_itself_is_refused() -> None:
    """This engine would not call it, which would be silent."""

    class Own(RuleQuantizer):
        def annotate(self, model: Any) -> Any:
            return super().annotate(model)

    with pytest.raises(UserError, match="Own has an annotate of its own"):
        prepare(PROGRAM, Own(ToyBackend([LINEAR])).set_global(STATIC))


NORMED = export(
    seeded(nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU())), randn(1, 2, 4, 4)
)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        return F.scaled_dot_product_attention(x, x, x)


MATMUL = qompose.backend.Rule(
    name="matmul",
    patterns=(qompose.backend.OperatorPattern((aten.matmul.default,)),),
    activations=("self", "other"),
)


@pytest.mark.parametrize(
    ("setting", "taken"),
    [
        pytest.param(lambda q: q, 2, id="global"),
        pytest.param(lambda q: q.set_filter(lambda n: "scaled" in n.name, None), 0, id="filter"),
        pytest.param(
            lambda q: q.set_operator_type(F.scaled_dot_product_attention, None), 0, id="type"
        ),
        pytest.param(
            lambda q: q.set_module_name_object_type_order(
                "", F.scaled_dot_product_attention, 0, None
            ),
            0,
            id="call",
        ),
        pytest.param(lambda q: q.set_subgraph("block", "block", None), 2, id="subgraph without it"),
        pytest.param(lambda q: q.set_filter_function(lambda n: "lin" in n.name), 0, id="narrowed"),
    ],
)
def test_the_pieces_of_an_operator_that_is_taken_apart_have_its_settings(
    setting: Any, taken: int
) -> None:
    quantizer = setting(toy(MATMUL, rewrites=("split_attention",)))
    plan = plan_of(prepare(export(seeded(Attention()), randn(1, 3, 4)), quantizer))
    assert len(plan.claims) == taken


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


BOTH = export(seeded(Both()), X)
ANY_FORM = dataclasses.replace(LINEAR, modes=LINEAR.modes | {"activation-only"}, kernels={})


@pytest.mark.parametrize(
    ("role", "inputs"),
    [
        pytest.param("activation", {"head.weight"}, id="weights alone"),
        pytest.param("weight", {"linear"}, id="activations alone"),
    ],
)
def test_a_selector_can_leave_one_role_in_float(role: str, inputs: set[str]) -> None:
    quantizer = toy(ANY_FORM, config=None).set_module_name("head", STATIC.without(role))
    converted = convert(BOTH, quantizer, X)
    names = {str(p.source).replace("_", ".") for c in plan_of(converted).claims for p in points(c)}
    assert names == inputs | ({"linear.1"} if role == "weight" else set())
    simulated = qompose.report(converted).rows[1]
    assert (simulated.state, simulated.config) == ("simulated (Q/DQ)", f"static without {role}")


def points(claim: Any) -> list[Any]:
    return [spec.point for spec in claim.specs]


def test_a_backend_without_such_a_form_refuses() -> None:
    assert STATIC.without() == STATIC
    assert STATIC.without("activation").weight == STATIC.weight
    with pytest.raises(ConfigError, match=r"roles must be .*'bias'"):
        STATIC.without("bias")
    with pytest.raises(ConfigError, match="no activation-only form"):
        rules(LINEAR).set_module_name("head", STATIC.without("weight"))
    with pytest.raises(ConfigError, match="no weight-only form"):
        static = dataclasses.replace(LINEAR, modes=frozenset({"static"}))
        rules(static).set_global(STATIC.without("activation"))
