# SPDX-License-Identifier: Apache-2.0
"""Quantizers of qompose asked by another engine, which here is a few lines that ask as such engines do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QomposeWarning, QuantizationConfig, QuantizationSpec
from qompose.backend import OperatorPattern, TensorConstraint
from qompose.errors import ConfigError, SharingError, UncalibratedError
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


class Net(nn.Module):
    """A linear layer, a number added, and another layer with a relu."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.head(self.body(x) + 2))


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


def net() -> GraphModule:
    return export(seeded(Net()), randn(3, 4)).module()


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
        assert (
            inputs_of(notes["add"]) == inputs_of(own["add"]) == {"linear": INT8, "_scalar_0": INT8}
        )
        assert torch.equal(result(randn(3, 4)), expected)

    def test_not_covered(self) -> None:
        model = net()
        assert hosted(model, toy(LINEAR, rewrites=("scalar_to_tensor",))) is model
        assert "_scalar_0" not in {node.name for node in model.graph.nodes}

    def test_batch_norm_is_folded_where_the_host_did_not(self) -> None:
        result = hosted(by_name("mlp_bn").export().module(), toy(LINEAR, LINEAR_RELU))
        assert operators(result)["batch_norm"] == 0

    def test_a_selector_of_a_part_keeps_it_from_being_joined(self) -> None:
        program = by_name("mlp_bn").export().module()
        norm = next(n for n in program.graph.nodes if n.target is aten.batch_norm.default)
        path = list(norm.meta["nn_module_stack"].values())[-1][0].removeprefix("L['self'].")
        quantizer = toy(LINEAR, LINEAR_RELU).set_module_name(_path(path), None)
        result = hosted(program, quantizer)
        assert operators(result)["batch_norm"] == 1

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

    @pytest.mark.parametrize("whole", [False, True], ids=["pieces are claimed", "taken whole"])
    def test_attention_is_taken_apart_only_for_who_wants_its_pieces(self, whole: bool) -> None:
        """That another member takes it whole counts too: the rewrites are those of the composition."""
        attend = aten.scaled_dot_product_attention.default
        names = ("query", "key", "value")
        one = toy(rule("attention", OperatorPattern((attend,)), activations=names), name="whole")
        two = toy(
            rule("product", OperatorPattern((aten.matmul.default,)), activations=("self", "other")),
            name="pieces",
            rewrites=("split_attention",),
        )
        inputs = [randn(1, 2, 4, 8, seed=i) for i in range(3)]
        model = hosted(
            export(Attention(), *inputs).module(), qompose.compose(*([one] * whole), two)
        )
        assert operators(model)["scaled_dot_product_attention"] == int(whole)
        (first, *_) = annotated(model)
        assert (first == "scaled_dot_product_attention") == whole

    def test_a_composition_rewrites_for_all_members_at_once(self) -> None:
        scalars = ("scalar_to_tensor",)
        one, two = (
            toy(ADD, name="one", rewrites=scalars),
            toy(LINEAR, ADD, name="two", rewrites=scalars),
        )
        result = hosted(net(), qompose.compose(one, two))
        assert list(inputs_of(annotated(result)["add"])) == ["linear", "_scalar_0"]
        assert {"linear", "linear_1"} < set(annotated(result))

    def test_what_is_annotated_already_is_not_rewritten(self) -> None:
        model = net()
        add = next(node for node in model.graph.nodes if node.name == "add")
        add.meta[ANNOTATION_KEY] = QuantizationAnnotation(_annotated=True)
        quantizer = qompose.compose(toy(LINEAR, ADD, rewrites=("scalar_to_tensor",)))
        assert hosted(model, quantizer) is model

    def test_nothing_is_left_in_meta(self) -> None:
        quantizer = toy(LINEAR, ADD, rewrites=("scalar_to_tensor",))
        model = net()
        result = hosted(model, quantizer, qompose.compose(quantizer))
        assert not [key for key in (*model.meta, *result.meta) if key.startswith("qompose")]

    def test_our_engine_does_not_call_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
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


def _path(path: str) -> str:
    return path.replace("['", ".").replace("']", "")


class Tied(nn.Module):
    """A table that is looked up, and that a linear layer multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


def test_a_tied_table_has_one_specification() -> None:
    lookup = rule("lookup", OperatorPattern((aten.embedding.default,)), activations=(),
                  weight="weight", output=False, modes=frozenset({"weight-only"}))  # fmt: skip
    eight = replace(WEIGHT, quant_min=-128)
    config = QuantizationConfig(None, None, eight, name="weight-only")
    quantizer = qompose.compose(toy(LINEAR, name="one"), toy(lookup, config=config, name="two"))
    program = export(seeded(Tied()), torch.tensor([0, 5]))
    notes, own = annotated(hosted(program.module(), quantizer)), by_own_engine(program, quantizer)
    for name in ("embedding", "linear"):
        (spec,) = {s for s in inputs_of(notes[name]).values() if s.ch_axis == 0}
        assert spec == WEIGHT
        assert spec in inputs_of(own[name]).values()


class TestStanding:
    """What others annotated before."""

    @pytest.mark.parametrize("marked", [True, False], ids=["marked", "not marked"])
    def test_it_stays_and_a_shorter_rule_takes_what_is_left(self, marked: bool) -> None:
        model = net()
        linear = next(node for node in model.graph.nodes if node.name == "linear_1")
        note = QuantizationAnnotation({}, UINT8, _annotated=marked)
        linear.meta[ANNOTATION_KEY] = note
        hosted(model, toy(LINEAR_RELU, LINEAR, RELU))
        assert annotated(model)["linear_1"] is note
        assert (note.input_qspec_map, note.output_qspec) == ({}, UINT8)
        assert inputs_of(annotated(model)["relu"]) == {"linear_1": INT8}
        assert "linear" in annotated(model)

    def test_a_mark_alone_takes_a_node(self) -> None:
        model = net()
        linear = next(node for node in model.graph.nodes if node.name == "linear")
        linear.meta[ANNOTATION_KEY] = QuantizationAnnotation(_annotated=True)
        hosted(model, toy(LINEAR))
        assert annotated(model)["linear"].input_qspec_map == {}

    def test_an_empty_annotation_takes_nothing(self) -> None:
        model = net()
        linear = next(node for node in model.graph.nodes if node.name == "linear")
        linear.meta[ANNOTATION_KEY] = QuantizationAnnotation()
        hosted(model, toy(LINEAR))
        assert annotated(model)["linear"].input_qspec_map

    def test_its_outputs_count_as_quantized(self) -> None:
        """A rule that applies behind quantized tensors applies behind theirs."""
        behind = rule("relu", OperatorPattern((aten.relu.default,)), activations=("self",),
                      condition="all")  # fmt: skip
        model = net()
        linear = next(node for node in model.graph.nodes if node.name == "linear_1")
        linear.meta[ANNOTATION_KEY] = QuantizationAnnotation({}, INT8, _annotated=True)
        hosted(model, toy(behind))
        assert "relu" in annotated(model)

    def test_users_members_do_not_see_it_as_free(self) -> None:
        seen: list[str] = []

        def look(node: Node) -> None:
            if ANNOTATION_KEY in node.meta:
                seen.append(node.name)

        model = net()
        linear = next(node for node in model.graph.nodes if node.name == "linear")
        linear.meta[ANNOTATION_KEY] = QuantizationAnnotation({}, INT8, _annotated=True)
        hosted(model, qompose.compose(Annotator(look)))
        assert seen == ["linear"]

    def test_two_of_ours_beside_one_another(self) -> None:
        model = hosted(net(), toy(LINEAR, name="one"), toy(LINEAR_RELU, RELU, name="two"))
        notes = annotated(model)
        assert inputs_of(notes["linear_1"])["add"] == INT8
        assert inputs_of(notes["relu"]) == {"linear_1": INT8}


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
BFLOAT16 = QuantizationSpec(torch.bfloat16, qompose.observers.PlaceholderObserver)


class TestWhatIsNotDone:
    """Errors and warnings that name it."""

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (
                replace(STATIC, weight=BLOCKS),
                r"body_weight -> linear \(toy, rule linear\) is int8 .* per-block \(4,\), and only "
                "qompose's own engine has operators for that.* without block_size",
            ),
            (replace(DYNAMIC, input_activation=PER_TOKEN), "x -> linear .*per-token.*block_size"),
            (QuantizationConfig(None, None, BFLOAT16), "bfloat16, and only .* without bfloat16"),
        ],
        ids=["blocks", "per token", "bfloat16"],
    )
    def test_refused(self, config: QuantizationConfig, message: str) -> None:
        with pytest.raises(ConfigError, match=f"(?s){message}"):
            hosted(net(), toy(LINEAR, config=config))

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda: toy(
                    replace(LINEAR, channels=(-1, -1), bias="bias"),
                    config=replace(STATIC, balance=True),
                ),
                "toy: the channels of 2 products are not balanced; .* balance=False",
            ),
            (
                lambda: toy(replace(RELU, accepts={"output": BOUNDED})),
                r"toy, rule relu: nobody checks .* of output of relu",
            ),
            (lambda: toy(SIGMOID, LINEAR, config=None), "nothing is annotated; of 2 regions: "),
            (lambda: toy(LINEAR).set_module_type(nn.Conv2d, None), "Conv2d.* occurs nowhere"),
        ],
        ids=["balance", "bounds", "nothing", "a selector that matches nothing"],
    )  # fmt: skip
    def test_warned_of(self, make: Callable[[], Any], message: str) -> None:
        with pytest.warns(QomposeWarning, match=f"(?s)annotates for another engine.*{message}"):
            hosted(net(), make())

    def test_what_others_took_is_no_cause_for_a_warning(self) -> None:
        hosted(net(), toy(LINEAR), toy(LINEAR, name="again"))

    def test_nor_is_a_program_without_its_operators(self) -> None:
        hosted(net(), toy(SIGMOID))

    def test_shared_with_what_nobody_annotates(self) -> None:
        def relu(node: Node) -> None:
            if node.target is aten.relu.default:
                (source,) = node.all_input_nodes
                annotate(node, {source: qompose.spec.SharedQuantizationSpec(source)})

        with pytest.raises(SharingError, match=r"linear_1 -> relu shares .* of output of linear_1"):
            hosted(net(), qompose.compose(Annotator(relu)))

    def test_notes_are_logged(self, logged: Listen) -> None:
        def output(node: Node) -> None:
            if node.op == "output":
                annotate(node, {}, INT8)

        heard = logged(logging.INFO, "qompose")
        hosted(net(), qompose.compose(Annotator(output)))
        assert "annotates output, which was not followed" in heard.text


class TestBodies:
    """Hosts ask about the bodies of some loops, after the program, as about programs of their own."""

    def test_exact_names_are_looked_up_in_the_whole_program(self) -> None:
        quantizer = toy(LINEAR).set_module_name("head", None)
        with pytest.warns(QomposeWarning, match="left in float by module name head"):
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

        class Loop(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                x = self.first(x) + x
                step = torch.ops.higher_order.while_loop
                return step(lambda x: x.sum() < 4, lambda x: (x + x,), (x,), ())[0]

        asked: list[str] = []

        def every(node: Node) -> bool:
            asked.append(node.name)
            return True

        quantizer = toy(ADD, config=None).set_filter(every, STATIC)
        hosted(export(seeded(Loop()), randn(2, 4)).module(), quantizer)
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
        "observer", [qompose.observers.MinMaxObserver, qompose.observers.HistogramObserver]
    )
    def test_without_data_there_are_no_parameters(self, observer: Any) -> None:
        with pytest.raises(UncalibratedError, match="the observed tensor"):
            observer().calculate_qparams()

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
        observer = qompose.observers.PlaceholderObserver(
            dtype, quant_min=asked[0], quant_max=asked[1]
        )
        assert (observer.quant_min, observer.quant_max) == bounds

    def test_written_out_bounds_do_not_move_the_zero_point(self) -> None:
        """torch gives symmetric uint8 the zero point 128, and 127 where both bounds are given."""
        for low, zero_point in ((None, 128), (0, 127)):
            observer = qompose.observers.MinMaxObserver(
                torch.uint8, qscheme=torch.per_tensor_symmetric, quant_min=low,
                quant_max=None if low is None else 255,
            )  # fmt: skip
            observer(randn(4))
            assert observer.calculate_qparams()[1] == zero_point

    def test_the_name_of_a_factory_is_that_of_its_observer(self) -> None:
        assert qompose.observers.PerChannelMinMaxObserver.with_args(eps=1.0).__name__ == (
            "PerChannelMinMaxObserver"
        )

    @pytest.mark.parametrize("make", [INT8, WEIGHT], ids=["per tensor", "per channel"])
    def test_most_have_no_conversion_of_their_own(self, make: QuantizationSpec) -> None:
        observer = make.observer_or_fake_quant_ctr(qscheme=make.qscheme)
        observer(randn(3, 3))
        assert not hasattr(observer, "convert")
