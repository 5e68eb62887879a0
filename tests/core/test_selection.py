# SPDX-License-Identifier: Apache-2.0
"""Selectors on programs: predicates, paths between operators, calls by number, and what rewrites leave."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose import ConfigError, MemberError, RuleQuantizer, SelectorError, UserError
from torch import Tensor, nn
from torch.fx import Node

from tests.core.toy import (
    ADD,
    CONV,
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
X = randn(4, 3)
IS_LINEAR = aten.linear.default


def rules(*table: Any) -> RuleQuantizer:
    return RuleQuantizer(ToyBackend(table or [LINEAR, ADD]))


def configs(program: Any, quantizer: RuleQuantizer) -> dict[str, str]:
    """Operator -> the configuration of its claim, of those that some rule could take."""
    plan = plan_of(prepare(program, quantizer))
    return {
        o.name: "float" if o.claim is None else plan.claims[o.claim].config
        for o in plan.operators
        if o.operator in ("aten.linear", "aten.add.Tensor", "aten.conv2d")
    }


class Branches(nn.Module):
    """Two layers beside each other, joined, and one layer after that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left = nn.Linear(3, 3), nn.Linear(3, 3)
        self.right, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.left(x) + self.right(x))


PROGRAM = export(seeded(Branches()), X)


class Caller(nn.Module):
    """Calls one function three times, the last time in a submodule, and one layer twice."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.fc = nn.Parameter(torch.empty(3, 3)), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = F.linear(self.fc(x), self.weight)
            return F.linear(self.fc(x), self.weight)

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = Caller.Inner(), nn.Parameter(torch.empty(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.inner(x), self.weight)


CALLS = export(
    seeded(Caller()), X
)  # linear: inner.fc, linear_1: inner, 2: inner.fc, 3: inner, 4: model


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

    def test_it_says_which_selector_it_was(self) -> None:
        def odd_ones(node: Node) -> bool:
            return True

        row = qompose.report(prepare(PROGRAM, rules().set_filter(odd_ones, STATIC))).rows[0]
        assert row.selector == "filter odd_ones"

    def test_an_error_of_a_predicate_names_the_operator(self) -> None:
        quantizer = rules().set_filter(lambda node: node.nothing, STATIC)  # type: ignore[attr-defined]
        with pytest.raises(
            MemberError, match=r"filter <lambda>, asked about linear \(aten.linear in fi"
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


class TestSubgraph:
    """`set_subgraph`."""

    @pytest.mark.parametrize(
        ("inputs", "outputs", "chosen"),
        [
            pytest.param("first", "last", {"linear", "linear_1", "linear_2", "add", "linear_3"}, id="all"),
            pytest.param("left", "add", {"linear_1", "add"}, id="one branch"),
            pytest.param("linear_2", "linear_2", {"linear_2"}, id="one operator"),
            pytest.param(["left", "right"], ["add"], {"linear_1", "linear_2", "add"}, id="several"),
        ],
    )  # fmt: skip
    def test_what_lies_between(self, inputs: Any, outputs: Any, chosen: set[str]) -> None:
        quantizer = rules().set_global(STATIC).set_subgraph(inputs, outputs, None)
        found = configs(PROGRAM, quantizer)
        assert {name for name, config in found.items() if config == "float"} == chosen

    @pytest.mark.parametrize(
        ("inputs", "outputs", "message"),
        [
            pytest.param("lefd", "last", "'lefd' is no operator and no module .*'left'", id="name"),
            pytest.param(
                "last", "first", "no path leads from last to first", id="against the flow"
            ),
            pytest.param(
                "left", "right", "no path leads from left to right", id="beside each other"
            ),
        ],
    )
    def test_errors(self, inputs: str, outputs: str, message: str) -> None:
        with pytest.raises(SelectorError, match=f"toy: .*{message}"):
            prepare(PROGRAM, rules().set_subgraph(inputs, outputs, None))

    def test_bodies_inside_belong_to_it(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

            def forward(self, x: Tensor) -> Tensor:
                x = self.a(x)
                with torch.no_grad():
                    x = self.b(x)
                return x.neg()

        program = export(seeded(Net()), X)
        quantizer = rules().set_global(STATIC).set_subgraph("a", "neg", None)
        assert set(configs(program, quantizer).values()) == {"float"}


class TestCall:
    """`set_module_name_object_type_order`."""

    @pytest.mark.parametrize(
        ("module", "kind", "index", "chosen"),
        [
            pytest.param("inner", F.linear, 0, "linear_1", id="the module's own first call"),
            pytest.param("inner", F.linear, 1, "linear_3", id="its second"),
            pytest.param("inner", aten.linear, 1, "linear_3", id="an operator"),
            pytest.param("inner", aten.linear.default, 0, "linear_1", id="an overload"),
            pytest.param("", F.linear, 0, "linear_4", id="the model itself"),
            pytest.param("inner", nn.Linear, 0, "linear", id="a submodule"),
            pytest.param("inner", nn.Linear, 1, "linear_2", id="the same submodule again"),
            pytest.param("inner.fc", F.linear, 1, "linear_2", id="in the submodule"),
        ],
    )
    def test_calls_are_counted_by_module(
        self, module: str, kind: Any, index: int, chosen: str
    ) -> None:
        quantizer = rules().set_global(STATIC)
        quantizer.set_module_name_object_type_order(module, kind, index, DYNAMIC)
        found = configs(CALLS, quantizer)
        assert [name for name, config in found.items() if config == "dynamic"] == [chosen]

    def test_a_module_call_is_all_that_it_computes(self) -> None:
        quantizer = rules().set_module_name_object_type_order("", Caller.Inner, 0, STATIC)
        found = configs(CALLS, quantizer)
        assert [name for name, config in found.items() if config == "static"] == [
            *("linear", "linear_1", "linear_2", "linear_3")
        ]

    @pytest.mark.parametrize(
        ("module", "kind", "index", "message"),
        [
            pytest.param("iner", F.linear, 0, "'iner'.*did you mean 'inner'", id="module"),
            pytest.param(
                "inner", F.linear, 2, r"2 calls of aten.linear \(linear_1, linear_3\)", id="index"
            ),
            pytest.param("", nn.Linear, 0, "0 calls of torch.nn.*Linear.*none", id="not its own"),
        ],
    )
    def test_what_is_not_there_is_an_error(
        self, module: str, kind: Any, index: int, message: str
    ) -> None:
        quantizer = rules().set_module_name_object_type_order(module, kind, index, None)
        with pytest.raises(SelectorError, match=message):
            prepare(CALLS, quantizer)


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
                lambda q: q.set_filter(lambda n: False, None), "filter <lambda> picks no op", id="filter"
            ),
            pytest.param(
                lambda q: q.set_module_type(nn.Linear, DYNAMIC).set_operator_type(aten.linear, STATIC),
                "Linear decides about none of the 4 operators that it picks",
                id="overruled",
            ),
            pytest.param(lambda q: q.set_operator_type(torch.sin, None), "aten.sin occurs now", id="type"),
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


ADD_OP = aten.add.Tensor


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        return F.scaled_dot_product_attention(x, x, x)


MATMUL = qompose.Rule(
    name="matmul",
    patterns=(qompose.OperatorPattern((aten.matmul.default,)),),
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
    with pytest.raises(ConfigError, match="'bias' is neither"):
        STATIC.without("bias")
    with pytest.raises(ConfigError, match="no activation-only form"):
        rules(LINEAR).set_module_name("head", STATIC.without("weight"))
    with pytest.raises(ConfigError, match="no weight-only form"):
        static = dataclasses.replace(LINEAR, modes=frozenset({"static"}))
        rules(static).set_global(STATIC.without("activation"))
