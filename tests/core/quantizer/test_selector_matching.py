# SPDX-License-Identifier: Apache-2.0
"""Selectors on programs: predicates, what has no effect, and what rewrites leave."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose import RuleQuantizer, UserError
from qompose.errors import ConfigError, MemberError, SelectorError
from qompose.program.graph import module_path
from torch import Tensor, nn

from tests.core.places import (
    CALLS,
    HELD,
    IS_LINEAR,
    PROGRAM,
    Caller,
    X,
    configs,
    regions,
    rules,
    scanned,
)
from tests.core.toy import (
    ADD,
    CONV,
    CONV_RELU,
    DYNAMIC,
    LINEAR,
    MATMUL,
    STATIC,
    Model,
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

    @pytest.mark.parametrize("strict", [False, True])
    def test_it_is_asked_in_the_order_of_a_run(self, strict: bool) -> None:
        """The operators of a body stand where it is called; its call and results are none."""
        seen: list[str] = []
        program = export(seeded(regions()), X, strict=strict)
        prepare(
            program, rules().set_filter(lambda node: not seen.append(module_path(node)), STATIC)
        )
        assert seen == ["a", "b", "c", "d"]

    def test_a_member_that_occurs_twice_asks_once(self) -> None:
        seen: list[str] = []
        quantizer = rules().set_filter(lambda node: not seen.append(node.name), STATIC)
        prepare(PROGRAM, qompose.compose(quantizer, quantizer))
        assert len(seen) == len(set(seen)) == 5

    def test_an_error_of_a_predicate_names_the_operator(self) -> None:
        quantizer = rules().set_filter(lambda node: node.nothing, STATIC)  # type: ignore[attr-defined]
        with pytest.raises(MemberError, match=r"filter <lambda> .*linear \(aten.linear in fi"):
            prepare(PROGRAM, quantizer)

    def test_an_answer_may_be_about_an_open_size(self) -> None:
        program = export(
            nn.Linear(8, 4), randn(6, 8), dynamic_shapes=({0: torch.export.Dim("n", min=4)},)
        )
        quantizer = rules().set_filter(lambda node: node.meta["val"].shape[0] > 2, STATIC)
        assert configs(program, quantizer)["linear"] == "static"

    @pytest.mark.parametrize("answer", ["no", None, 1, []], ids=repr)
    @pytest.mark.parametrize("setter", ["set_filter", "set_filter_function"])
    def test_an_answer_that_is_neither_true_nor_false_is_refused(
        self, answer: Any, setter: str
    ) -> None:
        arguments = (STATIC,) if setter == "set_filter" else ()
        quantizer = getattr(rules(), setter)(lambda node: answer, *arguments)
        with pytest.raises(SelectorError, match=rf"linear .*{re.escape(repr(answer))}"):
            prepare(PROGRAM, quantizer)


class TestNotes:
    """What a setting does not reach is said; strict makes it an error."""

    @pytest.mark.parametrize(
        ("setting", "note"),
        [
            pytest.param(lambda q: q.set_filter(lambda n: False, None), "py:", id="filter"),
            pytest.param(
                lambda q: q.set_module_type(nn.Linear, DYNAMIC).set_operator_type(aten.linear, STATIC),
                "Linear", id="overruled",
            ),
            pytest.param(lambda q: q.set_operator_type(torch.sin, None), "aten.sin", id="type"),
            pytest.param(
                lambda q: q.set_operator_type(IS_LINEAR, DYNAMIC).set_operator_type(aten.linear, STATIC),
                "aten.linear", id="overruled under the same name",
            ),
        ],
    )  # fmt: skip
    def test_a_setting_without_effect(self, setting: Callable[[Any], Any], note: str) -> None:
        quantizer = setting(toy(LINEAR, ADD))
        assert [note in line for line in plan_of(prepare(PROGRAM, quantizer)).notes] == [True]
        with pytest.raises(UserError, match="strict"):
            prepare(PROGRAM, quantizer, strict=True)

    def test_nothing_is_said_where_everything_has_effect(self) -> None:
        quantizer = toy(LINEAR, ADD).set_module_name("first", None).set_operator_type(ADD_OP, None)
        assert plan_of(prepare(PROGRAM, quantizer)).notes == ()

    def test_a_type_that_only_a_decomposition_calls_is_not_missed(self) -> None:
        quantizer = toy(MATMUL, config=None, rewrites=("split_attention",))
        quantizer.set_operator_type(torch.matmul, STATIC)
        assert len(plan_of(prepare(ATTENTION, quantizer, strict=True)).claims) == 2


ADD_OP, SDPA = aten.add.Tensor, F.scaled_dot_product_attention


def narrowed(quantizer: RuleQuantizer) -> RuleQuantizer:
    return quantizer.set_filter_function(lambda node: node.target is aten.conv2d.default)


class TestFolding:
    """Whose selectors keep a batch norm from being folded: those of who takes the convolution."""

    @pytest.mark.parametrize("left", ["0", "1"], ids=["the convolution", "the batch norm"])
    @pytest.mark.parametrize("first", [False, True])
    def test_other_members_have_no_say(self, left: str, first: bool) -> None:
        """The other member has no rule for convolutions."""
        one, two = toy(CONV, name="one"), toy(LINEAR, name="two").set_module_name(left, None)
        prepared = prepare(NORMED, qompose.compose(*((two, one) if first else (one, two))))
        assert plan_of(prepared).rewrites
        assert not [note for note in plan_of(prepared).notes if "fold_batch_norm" in note]

    def test_the_member_that_takes_it_decides(self) -> None:
        left, taking = toy(CONV, name="left").set_module_name("0", None), toy(CONV, name="taking")
        plan = plan_of(prepare(NORMED, qompose.compose(left, taking)))
        assert [claim.owner for claim in plan.claims] == ["taking"]
        assert plan.rewrites
        taking.set_module_name("1", None)
        plan = plan_of(prepare(NORMED, qompose.compose(left, taking)))
        assert [claim.owner for claim in plan.claims] == ["taking"]
        assert not plan.rewrites
        assert any("module name 1" in note for note in plan.notes)

    def test_a_filter_function_speaks_of_what_is_quantized_and_blocks_no_fusion(self) -> None:
        plan = plan_of(prepare(NORMED, narrowed(toy(CONV_RELU, CONV, LINEAR))))
        assert [claim.rule for claim in plan.claims] == ["conv_relu"]
        assert plan.rewrites

    def test_what_a_filter_function_leaves_out_says_so(self) -> None:
        report = qompose.report(prepare(PROGRAM, narrowed(toy(LINEAR, ADD))))
        assert all("filter function" in row.reason for row in report.rows)
        assert not any("global" in note for note in report.notes)


def test_a_subclass_that_annotates_for_itself_is_refused() -> None:
    """This engine would not call it, which would be silent."""

    class Own(RuleQuantizer):
        def annotate(self, model: Any) -> Any:
            return super().annotate(model)

    with pytest.raises(UserError, match=r"Own .*annotate"):
        prepare(PROGRAM, Own(ToyBackend([LINEAR])).set_global(STATIC))


NORMED = export(
    seeded(nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU())), randn(1, 2, 4, 4)
)


def attend(m: Any, x: Tensor) -> Tensor:
    x = m.block(x)
    return SDPA(x, x, x)


ATTENTION = export(seeded(Model(attend, block=nn.Linear(4, 4))), randn(1, 3, 4))


@pytest.mark.parametrize(
    ("setting", "taken"),
    [
        pytest.param(lambda q: q, 2, id="global"),
        pytest.param(lambda q: q.set_filter(lambda n: "scaled" in n.name, None), 0, id="filter"),
        pytest.param(lambda q: q.set_operator_type(SDPA, None), 0, id="type"),
        pytest.param(
            lambda q: q.set_module_name_object_type_order("", SDPA, 0, None), 0, id="call"
        ),
        pytest.param(lambda q: q.set_subgraph("block", "block", None), 2, id="subgraph without it"),
        pytest.param(lambda q: q.set_filter_function(lambda n: "lin" in n.name), 0, id="narrowed"),
    ],
)
def test_the_pieces_of_an_operator_that_is_taken_apart_have_its_settings(
    setting: Any, taken: int
) -> None:
    quantizer = setting(toy(MATMUL, rewrites=("split_attention",)))
    assert len(plan_of(prepare(ATTENTION, quantizer)).claims) == taken


LAYERS = {"body": nn.Linear(3, 3), "head": nn.Linear(3, 3)}
BOTH = export(seeded(Model(lambda m, x: m.head(m.body(x)), **LAYERS)), X)
ANY_FORM = dataclasses.replace(LINEAR, modes=LINEAR.modes | {"activation-only"}, kernels={})


@pytest.mark.parametrize(
    ("role", "sources"),
    [
        pytest.param("activation", {"head_weight"}, id="weights alone"),
        pytest.param("weight", {"linear", "linear_1"}, id="activations alone"),
    ],
)
def test_a_selector_can_leave_one_role_in_float(role: str, sources: set[str]) -> None:
    quantizer = toy(ANY_FORM, config=None).set_module_name("head", STATIC.without(role))
    converted = convert(BOTH, quantizer, X)
    points = {spec.point for claim in plan_of(converted).claims for spec in claim.specs}
    assert {point.source for point in points} == sources
    simulated = qompose.report(converted).rows[1]
    assert (simulated.state, simulated.config) == ("simulated (Q/DQ)", f"static without {role}")


def test_a_backend_without_such_a_form_refuses() -> None:
    assert STATIC.without() == STATIC
    assert STATIC.without("activation").weight == STATIC.weight
    with pytest.raises(ConfigError, match="'bias'"):
        STATIC.without("bias")
    with pytest.raises(ConfigError, match="activation-only"):
        rules(LINEAR).set_module_name("head", STATIC.without("weight"))
    with pytest.raises(ConfigError, match="weight-only"):
        static = dataclasses.replace(LINEAR, modes=frozenset({"static"}))
        rules(static).set_global(STATIC.without("activation"))


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [
        pytest.param(lambda q: q.set_module_name("blocks", STATIC), [0, 1], id="name"),
        pytest.param(lambda q: q.set_module_name("parts", STATIC), [2], id="dictionary"),
        pytest.param(lambda q: q.set_module_name("parts.an odd name", STATIC), [2], id="odd name"),
        pytest.param(lambda q: q.set_module_name_regex("blocks", STATIC), [0, 1], id="regex"),
        pytest.param(lambda q: q.set_subgraph("blocks", "blocks.1", STATIC), [0, 1], id="subgraph"),
        pytest.param(
            lambda q: q.set_module_name_object_type_order("blocks", nn.Sequential, 1, STATIC), [1],
            id="call",
        ),
    ],
)  # fmt: skip
def test_containers_are_modules(setting: Any, chosen: list[int]) -> None:
    found = list(configs(HELD, setting(rules())).values())
    assert [number for number, config in enumerate(found) if config == "static"] == chosen


STRICTNESS = pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.full)])


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
        ("inputs", "outputs", "named"),
        [
            pytest.param("lefd", "last", "'lefd' .*'left'", id="name"),
            pytest.param("last", "first", "last .*first", id="against the flow"),
            pytest.param("left", "right", "left .*right", id="beside each other"),
        ],
    )
    def test_errors(self, inputs: str, outputs: str, named: str) -> None:
        with pytest.raises(SelectorError, match=f"toy: .*{named}"):
            prepare(PROGRAM, rules().set_subgraph(inputs, outputs, None))

    def test_a_name_of_an_operator_and_of_a_module_has_to_say_which(self) -> None:
        layers = {"first": nn.Linear(3, 3), "linear": nn.Linear(3, 3)}
        program = export(seeded(Model(lambda m, x: m.linear(m.first(x)), **layers)), X)
        # operator linear is in first, linear_1 in linear
        with pytest.raises(SelectorError, match=r"linear .*first"):
            prepare(program, rules().set_subgraph("linear", "linear", None))
        for name, chosen in [("operator:linear", "linear"), ("module:linear", "linear_1")]:
            found = configs(program, rules().set_subgraph(name, name, STATIC))
            assert [n for n, config in found.items() if config == "static"] == [chosen]
        with pytest.raises(SelectorError, match="'module:first_'"):
            prepare(program, rules().set_subgraph("module:first_", "linear", None))

    @STRICTNESS
    @pytest.mark.parametrize(
        ("inputs", "outputs", "chosen"),
        [
            pytest.param("a", "b", {"a", "b"}, id="into a body"),
            pytest.param("c", "d", {"c", "d"}, id="out of a body"),
            pytest.param("b", "c", {"b", "c"}, id="inside"),
            pytest.param("a", "d", {"a", "b", "c", "d"}, id="through"),
        ],
    )
    def test_paths_lead_into_bodies_and_out_of_them(
        self, inputs: str, outputs: str, chosen: set[str], strict: bool
    ) -> None:
        program = export(seeded(regions()), X, strict=strict)
        plan = plan_of(prepare(program, rules().set_subgraph(inputs, outputs, STATIC)))
        assert {o.module for o in plan.operators if o.claim is not None} == chosen

    def test_paths_lead_through_the_slices_of_a_scan(self) -> None:
        with torch.no_grad():
            program = torch.export.export(seeded(scanned()), (randn(5, 2, 3),))
        plan = plan_of(prepare(program, rules().set_subgraph("before", "after", STATIC)))
        taken = {o.module for o in plan.operators if o.claim is not None}
        assert taken == {"before", "cell", "after"}


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

    @STRICTNESS
    def test_calls_in_bodies_count_in_the_order_of_a_run(self, strict: bool) -> None:
        program = export(seeded(regions()), X, strict=strict)
        for number, module in enumerate("abcd"):
            quantizer = rules().set_module_name_object_type_order("", nn.Linear, number, STATIC)
            plan = plan_of(prepare(program, quantizer))
            assert [o.module for o in plan.operators if o.claim is not None] == [module]

    def test_a_module_call_is_all_that_it_computes(self) -> None:
        quantizer = rules().set_module_name_object_type_order("", Caller.Inner, 0, STATIC)
        found = configs(CALLS, quantizer)
        static = [name for name, config in found.items() if config == "static"]
        assert static == ["linear", "linear_1", "linear_2", "linear_3"]

    @pytest.mark.parametrize(
        ("module", "kind", "index", "message"),
        [
            pytest.param("iner", F.linear, 0, "'iner'.*'inner'", id="module"),
            pytest.param("inner", F.linear, 2, r"aten.linear .*linear_1, linear_3", id="index"),
            pytest.param("", nn.Linear, 0, "torch.nn.*Linear", id="not its own"),
        ],
    )
    def test_what_is_not_there_is_an_error(
        self, module: str, kind: Any, index: int, message: str
    ) -> None:
        quantizer = rules().set_module_name_object_type_order(module, kind, index, None)
        with pytest.raises(SelectorError, match=message):
            prepare(CALLS, quantizer)
