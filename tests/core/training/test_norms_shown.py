# SPDX-License-Identifier: Apache-2.0
"""Quantizers that look for the batch norms which are folded for training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationSpec, Quantizer
from qompose.errors import MemberError
from qompose.observers import FakeQuantize, MovingAveragePerChannelMinMaxObserver
from qompose.program.meta import ANNOTATION_KEY
from qompose.spec import DerivedQuantizationSpec, SharedQuantizationSpec
from torch import Tensor, nn
from torch.export import export
from torch.fx import GraphModule, Node

from tests.core.qat import ACTIVATION, batch_for, product_model, product_quantizer
from tests.core.toy import annotate

aten = torch.ops.aten
X = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))
WEIGHT = QuantizationSpec(
    torch.int8,
    FakeQuantize.with_args(observer=MovingAveragePerChannelMinMaxObserver),
    -127,
    127,
    torch.per_channel_symmetric,
    ch_axis=0,
)


class TwoBranches(nn.Module):
    """Two convolutions with batch norms, the first with a bias, side by side."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.other, self.other_norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.norm(self.conv(x)), self.other_norm(self.other(x))])


def norms_of(model: GraphModule) -> list[Node]:
    return [node for node in model.graph.nodes if node.target is aten.batch_norm.default]


def integer_bias(observers: list[Any]) -> tuple[Tensor, Tensor]:
    scale = observers[0].calculate_qparams()[0] * observers[1].calculate_qparams()[0]
    return scale, torch.zeros_like(scale, dtype=torch.int32)


def annotate_branches(model: GraphModule) -> None:
    """Annotate outputs at the batch norms, one bias as integers, and let all outputs share."""
    first, second = norms_of(model)
    for norm in (first, second):
        conv: Any = norm.args[0]
        x, weight, *bias = conv.all_input_nodes
        inputs: dict[Node, Any] = {x: ACTIVATION, weight: WEIGHT}
        if bias:
            inputs[bias[0]] = DerivedQuantizationSpec(
                derived_from=[(x, conv), (weight, conv)],
                derive_qparams_fn=integer_bias,
                dtype=torch.int32,
                quant_min=-(2**31),
                quant_max=2**31 - 1,
                qscheme=torch.per_channel_symmetric,
                ch_axis=0,
            )
        annotate(conv, inputs)
        annotate(norm, {}, ACTIVATION)
    second.meta[ANNOTATION_KEY].output_qspec = SharedQuantizationSpec(first)
    (cat,) = first.users
    annotate(
        cat,
        {norm: SharedQuantizationSpec(first) for norm in (first, second)},
        SharedQuantizationSpec(first),
    )


class Native(Quantizer):
    def annotate(self, model: GraphModule) -> GraphModule:
        annotate_branches(model)
        return model


class Foreign:
    """Of another engine: it has the methods, and no class of qompose's."""

    def __init__(self) -> None:
        self.modes: list[bool] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Foreign:
        return self

    def annotate(self, model: GraphModule) -> GraphModule:
        self.modes = [bool(norm.args[5]) for norm in norms_of(model)]
        annotate_branches(model)
        return model

    def validate(self, model: GraphModule) -> None:
        pass


@pytest.mark.parametrize("quantizer", [Native(), Foreign()], ids=["native", "foreign"])
def test_what_is_said_of_a_batch_norm_is_of_what_it_is_folded_into(quantizer: Any) -> None:
    prepared = qompose.prepare_qat_pt2e(export(TwoBranches(), (X,)), quantizer)
    optimizer = torch.optim.SGD(prepared.parameters(), 1e-2)
    for _ in range(3):
        prepared(X).square().mean().backward()
        optimizer.step()
    prepared.apply(qompose.training.disable_observer).eval()
    converted = qompose.convert_pt2e(prepared)
    assert not norms_of(converted)
    made = [str(n.target).removeprefix("quantized_decomposed.") for n in converted.graph.nodes]
    assert made.count("quantize_per_tensor.default") == 4
    assert made.count("dequantize_per_channel.default") == 3  # with the bias
    shared = {
        node.args[1:3]
        for node, name in zip(converted.graph.nodes, made, strict=True)
        if name == "quantize_per_tensor.default" and node.all_input_nodes[0].op == "call_function"
    }
    assert len(shared) == 1
    with torch.no_grad():
        assert (prepared(X) - converted(X)).abs().max() <= shared.pop()[0] * 1.001


def places_of(spec: Any) -> list[Any]:
    """Nodes and edges that a specification refers to."""
    if isinstance(spec, SharedQuantizationSpec):
        return [spec.edge_or_node]
    return list(spec.derived_from) if isinstance(spec, DerivedQuantizationSpec) else []


@pytest.mark.parametrize("kind", ["two branches", "dropout between products"])
def test_annotations_are_of_what_is_trained(kind: str) -> None:
    """They name what is in the prepared graph and is read there; outputs they speak of are observed."""
    if kind == "two branches":
        program, quantizer = export(TwoBranches(), (X,)), Native()
    else:
        model = product_model("conv2d", "relu", bias=True).train()
        program, quantizer = export(model, (batch_for("conv2d"),)), product_quantizer()
    prepared = qompose.prepare_qat_pt2e(program, quantizer)
    nodes = [*prepared.graph.nodes]
    read = {
        (source, node)
        for node in nodes
        for given in node.all_input_nodes
        for source in (given, *given.all_input_nodes)  # an observer lies between
    }
    annotated = [(node, node.meta[ANNOTATION_KEY]) for node in nodes if ANNOTATION_KEY in node.meta]
    named = [(source, node) for node, said in annotated for source in said.input_qspec_map]
    for _, said in annotated:
        named += [p for s in said.input_qspec_map.values() for p in places_of(s)]
        named += places_of(said.output_qspec)
    assert len(annotated) >= 5 and set(named) <= {*nodes, *read}
    told = {node for node, said in annotated if said.output_qspec is not None}
    observed = {n.args[0] for n in nodes if "activation_post_process" in str(n.target)}
    assert told and told <= observed


def annotate_as_seen(model: GraphModule) -> None:
    """Annotate each convolution, and the output of the batch norm behind it where it shows."""
    for conv in [node for node in model.graph.nodes if node.target is aten.conv2d.default]:
        (behind,) = conv.users
        annotate(conv, dict(zip(conv.all_input_nodes[:2], (ACTIVATION, WEIGHT), strict=True)))
        if behind.target is aten.batch_norm.default:
            annotate(behind, {}, ACTIVATION)


def annotate_outputs(model: GraphModule) -> None:
    """Annotate the output of each convolution, whatever reads it."""
    for conv in [node for node in model.graph.nodes if node.target is aten.conv2d.default]:
        annotate(conv, {}, ACTIVATION)


@pytest.mark.parametrize("marks", [annotate_as_seen, annotate_outputs])
def test_a_batch_norm_counts_for_a_quantizer_that_annotates_the_folded_program_too(
    marks: Callable[[GraphModule], None],
) -> None:
    class Annotates(Quantizer):
        def annotate(self, model: GraphModule) -> GraphModule:
            marks(model)
            return model

    prepared = qompose.prepare_qat_pt2e(export(TwoBranches(), (X,)), Annotates())
    claims = prepared.meta["qompose"].plan.claims
    outputs = {spec.point.source for c in claims for spec in c.specs if spec.point.user is None}
    assert outputs == {"conv2d", "conv2d_1"}
    assert not [note for note in qompose.report(prepared).notes if "folded into" in note]


def test_other_engines_see_batch_norms_in_training() -> None:
    quantizer = Foreign()
    model = TwoBranches()
    model.other_norm.eval()
    qompose.prepare_qat_pt2e(export(model, (X,)), quantizer)
    assert quantizer.modes == [True, False]


def test_nothing_can_be_said_of_what_lies_in_between() -> None:
    class Between(Foreign):
        def annotate(self, model: GraphModule) -> GraphModule:
            for norm in norms_of(model):
                conv: Any = norm.args[0]
                annotate(
                    conv, dict(zip(conv.all_input_nodes[:2], (ACTIVATION, WEIGHT), strict=True))
                )
                annotate(norm, {conv: ACTIVATION}, ACTIVATION)
            return model

    prepared = qompose.prepare_qat_pt2e(export(TwoBranches(), (X,)), Between())
    notes = [note for note in qompose.report(prepared).notes if "folded into" in note]
    assert [note.split("annotation of ")[1].split(" by ")[0] for note in notes] == [
        "conv2d -> batch_norm",
        "conv2d_1 -> batch_norm_1",
    ]
    assert len(prepared.meta["qompose"].plan.rewrites) == 2


def test_an_error_on_both_forms_is_that_of_the_folded_one() -> None:
    class Fails(Quantizer):
        def annotate(self, model: GraphModule) -> GraphModule:
            raise KeyError("folded" if not norms_of(model) else "in place")

    with pytest.raises(MemberError, match="folded"):
        qompose.prepare_qat_pt2e(export(TwoBranches(), (X,)), Fails())
