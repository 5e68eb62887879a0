# SPDX-License-Identifier: Apache-2.0
"""Quantizers of qompose asked by another engine, which here is a few lines that ask as such engines do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import qompose
import torch
from qompose import QomposeWarning, QuantizationConfig, QuantizationSpec
from qompose.backend import OperatorPattern, TensorConstraint
from qompose.errors import ConfigError
from qompose.program.meta import ANNOTATION_KEY
from qompose.spec import QuantizationAnnotation
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.core.toy import (
    ADD,
    DYNAMIC,
    INT8,
    LINEAR,
    LINEAR_RELU,
    RELU,
    SIGMOID,
    STATIC,
    UINT8,
    WEIGHT,
    Annotator,
    Model,
    annotate,
    aten,
    export,
    operators,
    prepare,
    randn,
    rule,
    seeded,
    toy,
)
from tests.logs import Listen
from tests.zoo import by_name

MODEL = Model(
    lambda m, x: torch.relu(m.head(m.body(x) + 2)), body=nn.Linear(4, 4), head=nn.Linear(4, 2)
)
PROGRAM = export(seeded(MODEL), randn(3, 4))


def net(name: str = "", annotation: QuantizationAnnotation | None = None) -> GraphModule:
    """The program, with an annotation on one node."""
    model = PROGRAM.module()
    for node in model.graph.nodes:
        if node.name == name:
            node.meta[ANNOTATION_KEY] = annotation
    return model


def hosted(model: GraphModule, *quantizers: Any) -> GraphModule:
    """What torchao does with one quantizer, or with several in a composition of its own."""
    for quantizer in quantizers:
        model = quantizer.transform_for_annotation(model)
    for quantizer in quantizers:
        assert quantizer.annotate(model) is model
    for quantizer in quantizers:
        quantizer.validate(model)
    return model


def annotated(model: GraphModule) -> dict[str, Any]:
    return {
        node.name: note for node in model.graph.nodes if (note := node.meta.get(ANNOTATION_KEY))
    }


def by_own_engine(program: Any, quantizer: Any) -> dict[str, Any]:
    return annotated(prepare(program, quantizer))


def inputs_of(note: Any) -> dict[str, Any]:
    return {source.name: spec for source, spec in note.input_qspec_map.items()}


def test_a_member_that_rewrites_a_program_into_none_is_named() -> None:
    lost = type("Lost", (Annotator,), {"transform_for_annotation": lambda self, model: None})
    with pytest.raises(qompose.UserError, match="member: transform_for_annotation"):
        hosted(net(), qompose.compose(lost(print, "member"), toy(LINEAR)))


class TestRewrites:
    """Made where a claim covers them, as by qompose's own engine."""

    def test_covered(self) -> None:
        model, quantizer = net(), toy(LINEAR, ADD, rewrites=("scalar_to_tensor",))
        before, expected = str(model.graph), model(randn(3, 4))
        result = hosted(model, quantizer)
        assert result is not model
        assert str(model.graph) == before
        notes, own = annotated(result), by_own_engine(net(), quantizer)
        assert notes.keys() == own.keys()
        added, own_added = inputs_of(notes["add"]), inputs_of(own["add"])
        assert added == own_added == {"linear": INT8, "_scalar_0": INT8}
        assert torch.equal(result(randn(3, 4)), expected)

    def test_not_covered(self) -> None:
        model = net()
        assert hosted(model, toy(LINEAR, rewrites=("scalar_to_tensor",))) is model
        assert "_scalar_0" not in {node.name for node in model.graph.nodes}

    def test_a_selector_of_a_part_keeps_it_from_being_joined(self) -> None:
        model = by_name("mlp_bn").export().module()
        quantizer = toy(LINEAR, LINEAR_RELU)
        assert operators(hosted(model, quantizer))["batch_norm"] == 0
        quantizer.set_operator_type(aten.batch_norm.default, None)
        assert operators(hosted(model, quantizer))["batch_norm"] == 2

    def test_selectors_speak_of_the_program_before(self) -> None:
        """What a rewrite puts there inherits from the operator it comes from, which is asked about once."""
        asked: list[str] = []

        def additions(node: Node) -> bool:
            asked.append(node.name)
            return node.target is aten.add.Tensor

        quantizer = toy(LINEAR, ADD, config=None, rewrites=("scalar_to_tensor",))
        result = hosted(net(), quantizer.set_filter(additions, STATIC))
        assert list(annotated(result)) == ["add"]
        assert asked == ["linear", "add", "linear_1", "relu"]

    def test_what_is_annotated_already_is_not_rewritten(self) -> None:
        model = net("add", QuantizationAnnotation(_annotated=True))
        quantizer = qompose.compose(toy(LINEAR, ADD, rewrites=("scalar_to_tensor",)))
        assert hosted(model, quantizer) is model

    def test_nothing_is_left_in_meta(self) -> None:
        quantizer = toy(LINEAR, ADD, rewrites=("scalar_to_tensor",))
        model = net()
        result = hosted(model, quantizer, qompose.compose(quantizer))
        assert not [key for key in (*model.meta, *result.meta) if key.startswith("qompose")]

    def test_our_engine_does_not_call_it(self) -> None:
        """It makes rewrites itself; a quantizer that is bound to a program leaves the program alone."""
        quantizer = toy(ADD, rewrites=("scalar_to_tensor",))
        for each in (quantizer, qompose.compose(quantizer)):
            model = net()
            assert each.bound(model).transform_for_annotation(model) is model

    def test_a_users_quantizer_has_its_rewrites_made(self) -> None:
        class Additions(Annotator):
            rewrites = ("scalar_to_tensor",)

        def addition(node: Node) -> None:
            if node.target is aten.add.Tensor:
                annotate(node, dict.fromkeys(node.all_input_nodes, INT8), INT8)

        result = hosted(net(), Additions(addition))
        assert list(inputs_of(annotated(result)["add"])) == ["linear", "_scalar_0"]


def test_a_tied_table_has_one_specification() -> None:
    """One that is looked up, and that a linear layer multiplies by."""
    lookup = rule("lookup", OperatorPattern((aten.embedding.default,)), activations=(),
                  weight="weight", output=False, modes=frozenset({"weight-only"}))  # fmt: skip
    eight = replace(WEIGHT, quant_min=-128)
    config = QuantizationConfig(None, None, eight, name="weight-only")
    quantizer = qompose.compose(toy(LINEAR, name="one"), toy(lookup, config=config, name="two"))
    layers = {"table": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)}
    layers["head"].weight = layers["table"].weight
    tied = Model(lambda m, x: m.head(m.table(x)), **layers)
    program = export(seeded(tied), torch.tensor([0, 5]))
    notes, own = annotated(hosted(program.module(), quantizer)), by_own_engine(program, quantizer)
    for name in ("embedding", "linear"):
        (spec,) = {s for s in inputs_of(notes[name]).values() if s.ch_axis == 0}
        assert spec == WEIGHT
        assert spec in inputs_of(own[name]).values()


class TestStanding:
    """What others annotated before."""

    @pytest.mark.parametrize("marked", [True, False], ids=["marked", "not marked"])
    def test_it_stays_and_a_shorter_rule_takes_what_is_left(self, marked: bool) -> None:
        note = QuantizationAnnotation({}, UINT8, _annotated=marked)
        notes = annotated(hosted(net("linear_1", note), toy(LINEAR_RELU, LINEAR, RELU)))
        assert notes["linear_1"] is note
        assert (note.input_qspec_map, note.output_qspec) == ({}, UINT8)
        assert inputs_of(notes["relu"]) == {"linear_1": INT8}
        assert "linear" in notes

    @pytest.mark.parametrize("marked", [True, False], ids=["a mark alone", "an empty annotation"])
    def test_a_mark_takes_a_node_and_nothing_else_does(self, marked: bool) -> None:
        model = net("linear", QuantizationAnnotation(_annotated=marked))
        hosted(model, toy(LINEAR))
        assert (annotated(model)["linear"].input_qspec_map == {}) is marked

    def test_its_outputs_count_as_quantized(self) -> None:
        """A rule that applies behind quantized tensors applies behind theirs."""
        behind = rule("relu", OperatorPattern((aten.relu.default,)), activations=("self",),
                      condition="all")  # fmt: skip
        model = net("linear_1", QuantizationAnnotation({}, INT8, _annotated=True))
        assert "relu" in annotated(hosted(model, toy(behind)))


BLOCKS = QuantizationSpec(
    torch.int8, qompose.observers.PerBlockMinMaxObserver, -127, 127, torch.per_channel_symmetric,
    block_size=(4,),
)  # fmt: skip
PER_TOKEN = QuantizationSpec(
    torch.int8, qompose.observers.PlaceholderObserver, -128, 127, torch.per_channel_symmetric,
    is_dynamic=True, block_size=(-1,),
)  # fmt: skip
BOUNDED = TensorConstraint(
    dtypes=frozenset({torch.int8}),
    qschemes=frozenset({torch.per_tensor_affine}),
    scale_min_lower_bound=1e-9,
)
BALANCED = replace(LINEAR, channels=(-1, -1), bias="bias")
BFLOAT16 = QuantizationSpec(torch.bfloat16, qompose.observers.PlaceholderObserver)


class TestWhatIsNotDone:
    """Errors and warnings that name it."""

    @pytest.mark.parametrize(
        ("config", "named"),
        [
            (replace(STATIC, weight=BLOCKS), "body_weight -> linear .*toy.*block_size"),
            (replace(DYNAMIC, input_activation=PER_TOKEN), "x -> linear .*block_size"),
            (QuantizationConfig(None, None, BFLOAT16), "bfloat16"),
        ],
        ids=["blocks", "per token", "bfloat16"],
    )
    def test_refused(self, config: QuantizationConfig, named: str) -> None:
        with pytest.raises(ConfigError, match=f"(?s){named}"):
            hosted(net(), toy(LINEAR, config=config))

    WARNED: ClassVar[dict[str, tuple[Callable[[], Any], str]]] = {
        "balance": (lambda: toy(BALANCED, config=replace(STATIC, balance=True)), "toy: .*balance=False"),
        "bounds": (
            lambda: toy(replace(RELU, accepts={"output": BOUNDED})), "toy, rule relu: .*output of relu",
        ),
        "nothing": (lambda: toy(SIGMOID, LINEAR, config=None), "2 regions"),
        "a selector that matches nothing": (lambda: toy(LINEAR).set_module_type(nn.Conv2d, None), "Conv2d"),
    }  # fmt: skip

    @pytest.mark.parametrize(("make", "named"), WARNED.values(), ids=WARNED)
    def test_warned_of(self, make: Callable[[], Any], named: str) -> None:
        with pytest.warns(QomposeWarning, match=f"(?s){named}"):
            hosted(net(), make())

    def test_what_others_took_and_a_program_without_its_operators_are_no_cause(self) -> None:
        hosted(net(), toy(LINEAR), toy(LINEAR, name="again"))
        hosted(net(), toy(SIGMOID))

    def test_notes_are_logged(self, logged: Listen) -> None:
        def output(node: Node) -> None:
            if node.op == "output":
                annotate(node, {}, INT8)

        heard = logged(logging.INFO, "qompose")
        hosted(net(), qompose.compose(Annotator(output)))
        assert "annotation of output" in heard.text


class TestBodies:
    """Hosts ask about the bodies of some loops, after the program, as about programs of their own."""

    def test_exact_names_are_looked_up_in_the_whole_program(self) -> None:
        quantizer = toy(LINEAR).set_module_name("head", None)
        with pytest.warns(QomposeWarning, match="head"):
            model = hosted(by_name("scan_cell").export().module(), quantizer)
        call = next(n for n in model.graph.nodes if n.target is torch.ops.higher_order.scan)
        body = getattr(model, str(call.args[0].target))  # type: ignore[union-attr]
        assert [key for key in body.meta if key.startswith("qompose")]
        assert hosted(body, quantizer) is body
        assert not [key for key in body.meta if key.startswith("qompose")]
        with pytest.raises(qompose.errors.SelectorError, match="head"):
            hosted(body, quantizer)  # now it is a program like any other

    def test_operators_of_one_name_inside_and_outside_are_kept_apart(self) -> None:
        """They are asked about by names of their own, so none is taken for the other."""

        def loop(m: Any, x: Tensor) -> Tensor:
            step = torch.ops.higher_order.while_loop
            return step(lambda x: x.sum() < 4, lambda x: (x + x,), (m.first(x) + x,), ())[0]

        asked: list[str] = []

        def every(node: Node) -> bool:
            asked.append(node.name)
            return True

        quantizer = toy(ADD, config=None).set_filter(every, STATIC)
        model = seeded(Model(loop, first=nn.Linear(4, 4)))
        hosted(export(model, randn(2, 4)).module(), quantizer)
        assert len(asked) == len(set(asked))
        assert len([name for name in asked if "add" in name]) == 2


class TestObservers:
    """qompose's observers where another engine makes and converts them."""

    def test_they_are_told_what_they_observe(self) -> None:
        model = net()
        nodes = {node.name: node for node in model.graph.nodes}
        for quantizer in (toy(LINEAR), qompose.compose(Annotator(print))):
            observers: dict[Any, Any] = {
                (nodes["x"], nodes["linear"]): qompose.observers.MinMaxObserver(),
                nodes["relu"]: qompose.observers.HistogramObserver(),
            }
            quantizer.prepare_obs_or_fq_callback(model, observers)
            subjects = [observer.subject for observer in observers.values()]
            assert subjects == ["x -> linear in body", "output of relu"]

    @pytest.mark.parametrize(
        ("dtype", "asked", "bounds"),
        [
            (torch.uint8, (None, None), (0, 255)),
            (torch.int8, (-127, None), (-127, 127)),
            (torch.float16, (None, None), (None, None)),
        ],
    )
    def test_bounds_are_written_out(self, dtype: Any, asked: Any, bounds: Any) -> None:
        """Another engine writes an observer's bounds into the graph as they stand."""
        low, high = asked
        observer = qompose.observers.PlaceholderObserver(dtype, quant_min=low, quant_max=high)
        assert (observer.quant_min, observer.quant_max) == bounds

    def test_written_out_bounds_do_not_move_the_zero_point(self) -> None:
        """torch gives symmetric uint8 the zero point 128, and 127 where both bounds are given."""
        symmetric = {"dtype": torch.uint8, "qscheme": torch.per_tensor_symmetric}
        for bounds, zero_point in (({}, 128), ({"quant_min": 0, "quant_max": 255}, 127)):
            observer = qompose.observers.MinMaxObserver(**symmetric, **bounds)
            observer(randn(4))
            assert observer.calculate_qparams()[1] == zero_point
