# SPDX-License-Identifier: Apache-2.0
"""One operator of one program: quantized or not, by whom, and why; the answer is what prepare does."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig, can_quantize
from qompose.backend import Target
from qompose.diagnosis import NodeSupport
from qompose.errors import ConfigError, SelectorError, SharingError, StageError
from qompose.plan.operator_ids import QUANTIZED_BEFORE
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.toy import (
    ADD,
    CONV,
    CONV_RELU,
    DYNAMIC,
    INT8,
    LINEAR,
    LINEAR_RELU,
    RELU,
    SIGMOID,
    STATIC,
    STATIC_UINT8,
    VIEW,
    Annotator,
    Call,
    Model,
    ToyBackend,
    annotate,
    aten,
    convert,
    export,
    graph_text,
    plan_of,
    prepare,
    randn,
    seeded,
    toy,
)
from tests.sampling import at_once

IMAGE, ROWS = randn(1, 2, 6, 6), randn(2, 3)


def mixed(forward: Any = None) -> Any:
    """A convolution with its batch norm, and what follows."""

    def usual(m: Any, x: Tensor) -> Tensor:
        return m.head(m.relu(m.norm(m.conv(x))).mean((2, 3))).tanh()

    layers = {"conv": nn.Conv2d(2, 4, 3), "norm": nn.BatchNorm2d(4), "relu": nn.ReLU()}
    return export(seeded(Model(forward or usual, **layers, head=nn.Linear(4, 3))), IMAGE)


MIXED = mixed()
TABLE = (CONV_RELU, LINEAR)


class TestYes:
    def test_who_and_by_what(self) -> None:
        answer = can_quantize(MIXED, "linear", toy(*TABLE))
        assert answer
        assert answer == NodeSupport(
            node="linear", operator="aten.linear", module="head", supported=True, owner="toy",
            rule="linear", config="static", mode="static", selector="global", nodes=("linear",),
            kernels=(("torch", "toy linear"),),
        )  # fmt: skip
        assert answer.reason == ""
        assert json.loads(json.dumps(answer.to_dict()))["kernels"] == {"torch": "toy linear"}
        assert "toy linear" in str(answer)

    @pytest.mark.parametrize("node", ["conv2d", "batch_norm", "relu"])
    def test_every_operator_of_a_region_and_what_is_folded_into_it(self, node: str) -> None:
        answer = can_quantize(MIXED, node, toy(*TABLE))
        assert (answer.rule, answer.nodes) == ("conv_relu", ("conv2d", "relu"))
        folded = ("rewritten by fold_batch_norm: conv2d, batch_norm",)
        assert answer.rewrites == (() if node == "relu" else folded)

    def test_a_rewrite_of_one_operator_names_it_once(self) -> None:
        quantizer = toy(ADD, rewrites=("scalar_to_tensor",))
        answer = can_quantize(export(Call(lambda x: x + 2), ROWS), "add", quantizer)
        assert answer.rewrites == ("rewritten by scalar_to_tensor: add",)

    def test_a_rule_without_kernel_says_so(self) -> None:
        answer = can_quantize(MIXED, "relu", toy(*TABLE))
        assert answer.kernels == ()
        (said,) = answer.unavailable
        assert "conv_relu" in said

    def test_a_node_stands_for_itself(self) -> None:
        (node,) = (n for n in MIXED.graph.nodes if n.name == "linear")
        assert can_quantize(MIXED, node, toy(*TABLE)).node == "linear"

    def test_selectors_decide(self) -> None:
        quantizer = toy(*TABLE).set_module_name("head", DYNAMIC)
        answer = can_quantize(MIXED, "linear", quantizer)
        assert (answer.config, answer.mode) == ("dynamic", "dynamic")
        assert "head" in answer.selector
        assert not can_quantize(MIXED, "linear", quantizer.set_module_name("head", None))

    def test_the_first_member_wins(self) -> None:
        composed = qompose.compose(toy(LINEAR, name="A"), toy(*TABLE, name="B"))
        assert can_quantize(MIXED, "linear", composed).owner == "A"
        assert can_quantize(MIXED, "relu", [*composed.members]).owner == "B"

    def test_a_quantizer_that_annotates(self) -> None:
        def mark(node: Any) -> None:
            if node.target is aten.linear.default:
                annotate(node, {node.args[0]: INT8}, INT8)

        answer = can_quantize(MIXED, "linear", [toy(CONV), Annotator(mark, "theirs")])
        assert answer.owner == "theirs"
        assert answer.kernels == ()
        (said,) = answer.unavailable
        assert "theirs" in said


def skip(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.norm(y) + y


FLATTEN = replace(VIEW, patterns=(qompose.backend.OperatorPattern((aten.flatten.using_ints,)),))
REFUSED: dict[str, tuple[Any, str, Any, str, str]] = {
    "no rule": (MIXED, "tanh", toy(*TABLE), "toy", "aten.tanh"),
    "no selector": (MIXED, "linear", toy(*TABLE, config=None), "toy", "global"),
    "a condition on the inputs": (export(nn.Flatten(), IMAGE), "flatten", toy(FLATTEN), "toy", "rule view:"),
    "no rule for a batch norm": (mixed(skip), "batch_norm", toy(CONV), "toy", "aten.batch_norm"),
    "not folded": (mixed(skip), "batch_norm", toy(CONV), "program", "fold_batch_norm.*conv2d"),
    "nobody takes its convolution": (MIXED, "batch_norm", toy(LINEAR), "program", "conv2d"),
    # The batch norm is gone where it is folded; its module is a name all the same.
    "a module that is folded": (
        MIXED, "batch_norm", toy(*TABLE).set_module_name("norm", None),
        "program", "fold_batch_norm was not applied.*norm",
    ),
}  # fmt: skip


class TestNo:
    @pytest.mark.parametrize("name", REFUSED)
    def test_the_member_says_why(self, name: str) -> None:
        program, node, quantizer, member, said = REFUSED[name]
        answer = can_quantize(program, node, quantizer)
        assert not answer
        assert answer.rewrites == ()
        (reason,) = (text for each, text in answer.reasons if each == member)
        assert re.search(said, reason)
        assert reason in str(answer)

    def test_each_member_gives_its_reasons(self) -> None:
        picky = replace(LINEAR, guard=lambda match: "too small to be worth it")
        composed = qompose.compose(
            toy(picky, name="A"), toy(SIGMOID, name="B"), Annotator(lambda node: None, "theirs")
        )
        reasons = can_quantize(MIXED, "linear", composed).reasons
        assert [member for member, _ in reasons] == ["A", "B", "theirs"]
        assert reasons[0][1] == "rule linear: too small to be worth it"

    @pytest.mark.parametrize("kind", [tuple, list])
    def test_of_several_guards_the_first_that_objects_gives_the_reason(self, kind: Any) -> None:
        guards = kind((lambda m: None, lambda m: "too small", lambda m: "too large"))
        answer = can_quantize(MIXED, "linear", toy(replace(LINEAR, guard=guards)))
        assert answer.reasons == (("toy", "rule linear: too small"),)
        assert can_quantize(MIXED, "linear", toy(replace(LINEAR, guard=kind(guards[:1]))))
        assert can_quantize(MIXED, "linear", toy(replace(LINEAR, guard=kind(()))))

    @pytest.mark.parametrize("node", ["x", "conv_weight", "output"])
    def test_what_is_no_operator(self, node: str) -> None:
        answer = can_quantize(MIXED, node, toy(*TABLE))
        assert not answer
        assert answer.reason


class TestWithAConfiguration:
    def test_it_takes_the_place_of_the_selectors(self) -> None:
        quantizer = toy(*TABLE, config=None)
        assert not can_quantize(MIXED, "linear", quantizer)
        answer = can_quantize(MIXED, "linear", quantizer, STATIC_UINT8)
        assert (answer.owner, answer.config) == ("toy", "static uint8")
        assert quantizer.selectors.configs() == []

    def test_a_member_that_refuses_it_says_why_and_others_are_asked(self) -> None:
        narrow = replace(SIGMOID, modes=frozenset({"dynamic"}))
        composed = qompose.compose(toy(narrow, name="A", config=None), toy(*TABLE, name="B"))
        assert can_quantize(MIXED, "linear", composed, STATIC).owner == "B"
        reasons = dict(can_quantize(MIXED, "tanh", composed, STATIC).reasons)
        assert "rule sigmoid" in reasons["A"]
        assert "aten.tanh" in reasons["B"]

    def test_all_refuse_it(self) -> None:
        biased = replace(STATIC, bias=STATIC.input_activation)
        answer = can_quantize(MIXED, "linear", toy(*TABLE), biased)
        assert (answer.node, answer.operator, answer.module) == ("linear", "aten.linear", "head")
        assert "bias" in dict(answer.reasons)["toy"]

    def test_one_that_annotates_has_none(self) -> None:
        answer = can_quantize(MIXED, "linear", [Annotator(print, "theirs")], STATIC)
        assert [member for member, _ in answer.reasons] == ["theirs"]

    def test_what_is_no_configuration(self) -> None:
        with pytest.raises(ConfigError, match="QuantizationConfig"):
            can_quantize(MIXED, "linear", toy(), 8)  # type: ignore[arg-type]

    def test_a_subclass_keeps_its_ways(self) -> None:
        class Mine(qompose.RuleQuantizer):
            name = "mine"

        answer = can_quantize(MIXED, "linear", Mine(ToyBackend(TABLE)), STATIC)
        assert answer.owner == "mine"


class TestAvailability:
    def backend(self, **facts: Any) -> ToyBackend:
        kernels = {**LINEAR.kernels, "chip": qompose.backend.Kernel("chip linear")}
        backend = ToyBackend((replace(LINEAR, kernels=kernels),))
        backend.__dict__.update(facts)
        return backend

    def test_what_keeps_kernels_from_running_here(self) -> None:
        chip = Target("chip", lambda *_: None, lambda: "no chip here: buy one")  # type: ignore[arg-type,return-value]
        backend = self.backend(targets=(chip,), availability=lambda: "needs another processor")
        answer = can_quantize(MIXED, "linear", qompose.RuleQuantizer(backend).set_global(STATIC))
        assert answer
        backend_says, target_says = answer.unavailable
        assert "needs another processor" in backend_says
        assert "no chip here: buy one" in target_says

    def test_a_runtime_that_nobody_brings(self) -> None:
        quantizer = qompose.RuleQuantizer(self.backend()).set_global(STATIC)
        (said,) = can_quantize(MIXED, "linear", quantizer).unavailable
        assert "chip" in said


def branches(m: Any, x: Tensor) -> Tensor:
    """Operators in both bodies of a cond, of the same names."""
    y: Tensor = torch.cond(x.sum() > 0, m.one, lambda x: m.other(x).relu(), (x,))
    with torch.no_grad():
        return y.sigmoid()


class TestBodies:
    program = export(seeded(Model(branches, one=nn.Linear(3, 3), other=nn.Linear(3, 3))), ROWS)

    def names(self) -> list[str]:
        return [o.name for o in plan_of(prepare(self.program, toy())).operators]

    def test_a_node_of_a_body(self) -> None:
        body = self.program.graph_module.true_graph_0
        assert isinstance(body, GraphModule)
        (node,) = (n for n in body.graph.nodes if n.target is aten.linear.default)
        answer = can_quantize(self.program, node, toy(LINEAR))
        assert answer.node.startswith("true_graph_0")
        assert answer

    def test_a_parameter_is_no_operator(self) -> None:
        bodies = [m for m in self.program.graph_module.modules() if isinstance(m, GraphModule)]
        nodes = [n for body in bodies for n in body.graph.nodes if n.op == "placeholder"]
        inputs = {node.name for node in nodes if node.name.startswith("p_")}
        assert inputs
        for name in inputs:
            with pytest.raises(ConfigError, match=f"'{name}'.*parameter"):
                can_quantize(self.program, name, toy(LINEAR))

    def test_a_name_that_several_bodies_have(self) -> None:
        with pytest.raises(ConfigError, match="true_graph_0_linear"):
            can_quantize(self.program, "linear", toy(LINEAR))

    def test_a_name_that_one_body_has(self) -> None:
        answer = can_quantize(self.program, "relu", toy(LINEAR, RELU))
        assert answer.node == "false_graph_0_relu"
        assert answer

    def test_a_module_that_is_in_one_body_alone(self) -> None:
        quantizer = toy(LINEAR).set_module_name("one", None)
        answers = [can_quantize(self.program, n, quantizer) for n in self.names() if "linear" in n]
        assert sorted(map(bool, answers)) == [False, True]

    def test_what_no_grad_wraps(self) -> None:
        (name,) = (name for name in self.names() if "sigmoid" in name)
        assert can_quantize(self.program, name, toy(SIGMOID)).rule == "sigmoid"

    def test_the_call_itself(self) -> None:
        answer = can_quantize(self.program, "cond", toy(LINEAR))
        assert not answer
        assert answer.reason


class TestTakenApart:
    """An operator that a rewrite splits is answered for as a whole, and piece by piece."""

    program = export(
        Model(lambda m, q: nn.functional.scaled_dot_product_attention(q, q, q)), randn(1, 2, 4, 8)
    )
    pattern = qompose.backend.OperatorPattern((aten.softmax.int,))
    softmax = replace(SIGMOID, name="softmax", patterns=(pattern,))
    node = "scaled_dot_product_attention"

    def quantizer(self) -> qompose.RuleQuantizer:
        return toy(self.softmax, rewrites=("split_attention",))

    def test_the_whole(self) -> None:
        answer = can_quantize(self.program, self.node, self.quantizer())
        assert answer.rule == "softmax"
        assert any("rewritten by split_attention" in line for line in answer.rewrites)
        assert any("matmul" in reason for _, reason in answer.reasons)


class TestMistakes:
    @pytest.mark.parametrize(
        ("node", "named"),
        [
            ("lineer", "'linear'"),
            ("", "''"),
            (3, "3"),
            (next(n for n in mixed().graph.nodes if n.name == "linear"), "'linear'"),
        ],
        ids=["a typing error", "nothing", "a number", "a node of another program"],
    )
    def test_no_such_node(self, node: Any, named: str) -> None:
        with pytest.raises(ConfigError, match=named):
            can_quantize(MIXED, node, toy(*TABLE))

    def test_no_such_piece_of_an_operator(self) -> None:
        apart = TestTakenApart
        with pytest.raises(ConfigError, match="'sofmax'"):
            can_quantize(apart.program, f"{apart.node}/sofmax", apart().quantizer())

    def test_a_selector_that_names_no_module(self) -> None:
        with pytest.raises(SelectorError, match="hed"):
            can_quantize(MIXED, "linear", toy(*TABLE).set_module_name("hed", None))

    def test_annotations_that_prepare_would_refuse(self) -> None:
        def mark(node: Any) -> None:
            if node.target is aten.linear.default:
                shared = qompose.spec.SharedQuantizationSpec(node.args[0])
                annotate(node, {node.args[1]: shared})

        with pytest.raises(SharingError):
            can_quantize(MIXED, "tanh", Annotator(mark))

    def test_a_model_that_went_through_prepare(self) -> None:
        with pytest.raises(StageError, match="can_quantize"):
            can_quantize(prepare(MIXED, toy(*TABLE)), "linear", toy(*TABLE))


def test_the_program_is_left_alone() -> None:
    module = MIXED.module()
    before = graph_text(module), {k: v.clone() for k, v in module.state_dict().items()}
    can_quantize(module, "conv2d", toy(*TABLE))
    assert graph_text(module) == before[0]
    assert all(torch.equal(v, before[1][k]) for k, v in module.state_dict().items())
    converted = convert(module, toy(*TABLE), IMAGE)
    assert qompose.report(converted).count("simulated (Q/DQ)") == 4


@pytest.mark.parametrize("strict", [False, True])
def test_of_what_was_quantized_before_the_export_its_quantizer_is_told(strict: bool) -> None:
    """It is no member; what is not known of it is said."""
    part = convert(export(seeded(nn.Linear(3, 3)), ROWS), toy(LINEAR), ROWS)
    model = Model(lambda m, x: m.last(m.part(x).tanh()), last=nn.Linear(3, 3))
    model.part = part
    program = export(seeded(model), ROWS, strict=strict)
    other = qompose.compose(toy(RELU, name="other"), Annotator(lambda node: None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qompose.QomposeWarning)  # "toy" is not installed
        answer = can_quantize(program, "linear", other)
    assert answer and answer.owner == ("toy" if strict else QUANTIZED_BEFORE)
    assert answer.unavailable and not answer.kernels


CASES = {"batch norm": MIXED, "bodies": TestBodies.program, "attention": TestTakenApart.program}


@pytest.mark.parametrize(
    ("case", "config"),
    at_once(
        itertools.product(CASES, (None, STATIC, DYNAMIC)),
        *(("batch norm", None), ("batch norm", STATIC), ("bodies", DYNAMIC), ("attention", None)),
    ),
    ids=str,
)
def test_the_answer_is_what_prepare_does(case: str, config: QuantizationConfig | None) -> None:
    program = CASES[case]
    table = (CONV_RELU, LINEAR_RELU, LINEAR, SIGMOID, ADD, TestTakenApart.softmax)
    quantizer, told = (
        toy(*table, config=used, rewrites=("split_attention",))
        for used in (STATIC, config or STATIC)
    )
    plan = plan_of(prepare(program, told))
    for operator in plan.operators:
        answer = can_quantize(program, operator.name, quantizer, config)
        assert bool(answer) == (operator.claim is not None), str(answer)
        if operator.claim is None:
            assert answer.reasons
        else:
            claim = plan.claims[operator.claim]
            assert answer.nodes == claim.nodes
            assert (answer.owner, answer.rule) == (claim.owner, claim.rule)
