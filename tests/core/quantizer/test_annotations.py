# SPDX-License-Identifier: Apache-2.0
"""Quantizers that annotate, as the tutorials of this field write them: alone, and one after the other.

What an earlier one took stays as it was, or is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import qompose
import torch
from qompose import Quantizer
from qompose.errors import AnnotationConflictError, ConfigError
from qompose.program.meta import ANNOTATION_KEY
from qompose.spec import DerivedQuantizationSpec, QuantizationAnnotation
from torch import nn
from torch.fx import Node

from tests.core.quantizer.interop.foreign import derived_bias
from tests.core.toy import (
    INT8,
    LINEAR,
    LINEAR_RELU,
    UINT8,
    WEIGHT,
    WEIGHT_PER_TENSOR,
    Annotator,
    Model,
    annotate,
    convert,
    export,
    graph_text,
    nodes_calling,
    plan_of,
    prepare,
    randn,
    seeded,
    sqnr,
    toy,
)

aten = torch.ops.aten
bias_of = partial(derived_bias, kind=DerivedQuantizationSpec)


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    layers = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    model = Model(lambda m, x: torch.sigmoid(m.a(x) + torch.tanh(m.b(x))), **layers)
    return export(seeded(model), randn(6, 4))


@pytest.mark.parametrize("per_channel", [False, True], ids=["per tensor", "per channel"])
def test_a_derived_bias_is_int32_with_the_scale_of_the_product(per_channel: bool) -> None:
    def annotate_linear(node: Node) -> None:
        if node.target is aten.linear.default:
            x, weight, bias = node.args
            spec = WEIGHT if per_channel else WEIGHT_PER_TENSOR
            annotate(node, {x: INT8, weight: spec, bias: bias_of(node, per_channel=per_channel)})

    model, x = seeded(nn.Linear(4, 3)), randn(6, 4)
    converted = convert(export(model, x), Annotator(annotate_linear), x)
    (linear,) = nodes_calling(converted, "linear")
    state = converted.state_dict()
    x_scale, weight_scale, bias_scale = (read.args[1] for read in linear.args)
    if per_channel:
        weight_scale, bias_scale = state[weight_scale.target], state[bias_scale.target]
    weight_scale, bias_scale = torch.as_tensor(weight_scale), torch.as_tensor(bias_scale)
    assert not any(t.dtype is torch.float32 for name, t in state.items() if name == "bias")
    (integers,) = (tensor for tensor in state.values() if tensor.dtype is torch.int32)
    assert torch.allclose(bias_scale, weight_scale * x_scale, rtol=1e-6)
    assert torch.equal(integers, torch.round(model.bias / bias_scale).to(torch.int32))
    assert sqnr(model(x), converted(x)) > 35


def test_fused_operators_are_one_claim() -> None:
    """As quantizers of this field annotate a fusion: the input on its first, the output on its last."""

    def fuse(node: Node) -> None:
        if node.target is aten.relu.default:
            linear = node.args[0]
            annotate(linear, {linear.args[0]: INT8, linear.args[1]: WEIGHT})
            annotate(node, {}, INT8)
            for fused in (linear, node):
                fused.meta[ANNOTATION_KEY]._annotated = True

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    prepared = prepare(export(model, randn(2, 3)), Annotator(fuse))
    assert [claim.nodes for claim in plan_of(prepared).claims] == [
        ("linear", "relu"), ("linear_1", "relu_1"),
    ]  # fmt: skip
    assert graph_text(prepared) == graph_text(
        prepare(export(model, randn(2, 3)), toy(LINEAR_RELU, LINEAR))
    )


def test_static_scales_along_a_dimension_without_a_fixed_size_are_refused() -> None:
    """Converted, the model would run with the size that calibration saw, and fail with all others."""

    def annotate_linear(node: Node) -> None:
        if node.target is aten.linear.default:
            annotate(node, {node.args[0]: replace(WEIGHT, ch_axis=0)})

    sizes, x = ({0: torch.export.Dim("batch", min=2, max=64)},), randn(5, 4)
    prepare(export(seeded(nn.Linear(4, 3)), x), Annotator(annotate_linear))
    with pytest.raises(ConfigError, match="no fixed size"):
        prepare(export(nn.Linear(4, 3), x, dynamic_shapes=sizes), Annotator(annotate_linear))


@pytest.mark.parametrize(
    "wrong",
    {
        "no annotation": lambda node: node.meta.update({ANNOTATION_KEY: "int8"}),
        "an edge from itself": lambda node: annotate(node, {node: INT8}, INT8),
        "an edge from the fusion's input": lambda node: annotate(node, {first(node): INT8}),
    }.items(),
    ids=lambda case: case[0],
)
def test_neighbours_that_are_annotated_wrongly_are_named(wrong: Any) -> None:
    """Each reads the one before it, so they are looked at for fusions."""

    def annotate_node(node: Node) -> None:
        if node.op == "call_function":
            wrong[1](node)

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    with pytest.raises(ConfigError, match="input_qspec_map"):
        prepare(export(model, randn(2, 3)), Annotator(annotate_node))


def first(node: Node) -> Node:
    """The input of the program."""
    return next(n for n in node.graph.nodes if n.op == "placeholder")


def linears(output: Any = INT8) -> Callable[[Node], None]:
    def annotate_node(node: Node) -> None:
        if node.target is aten.linear.default:
            annotate(node, {node.args[0]: INT8, node.args[1]: WEIGHT}, output)

    return annotate_node


def in_the_map(edit: Callable[[Node, dict[Any, Any]], Any]) -> Callable[[Node], None]:
    def annotate_node(node: Node) -> None:
        if node.target is aten.linear.default:
            edit(node, node.meta[ANNOTATION_KEY].input_qspec_map)

    return annotate_node


CHANGES: dict[str, tuple[Callable[[Node], Any], str]] = {
    "overwrites": (linears(UINT8), "changed"),
    "replaces an edge in place": (
        in_the_map(lambda node, edges: edges.update({node.args[0]: UINT8})), "changed",
    ),
    "clears in place": (in_the_map(lambda node, edges: edges.clear()), "changed"),
    "adds an edge in place": (
        in_the_map(lambda node, edges: edges.update({node.args[2]: INT8})), "changed",
    ),
    "removes": (lambda node: node.meta.pop(ANNOTATION_KEY, None), "removed"),
}  # fmt: skip
EARLIER = [
    pytest.param(Annotator(linears(), "earlier"), id="after an annotator"),
    pytest.param(toy(LINEAR, name="earlier"), id="after a rule table"),
]


@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize(("change", "word"), CHANGES.values(), ids=CHANGES)
def test_a_changed_annotation_is_an_error_or_undone(
    earlier: Quantizer, change: Any, word: str, program: torch.export.ExportedProgram
) -> None:
    later = Annotator(change, "later")
    with pytest.raises(AnnotationConflictError) as caught:
        prepare(program, qompose.compose(earlier, later))
    error = caught.value
    assert (error.earlier, error.later, error.node) == ("earlier", "later", "linear")
    assert error.change == word
    both = prepare(program, qompose.compose(earlier, later, on_conflict="first"))
    alone = prepare(program, earlier)
    assert graph_text(both) == graph_text(alone)
    assert plan_of(both).groups == plan_of(alone).groups
    for node in ("linear", "linear_1"):
        named = ("earlier", "later", node, word)
        assert any(all(name in note for name in named) for note in plan_of(both).notes)


@pytest.mark.parametrize("earlier", EARLIER)
def test_an_equal_annotation_is_no_change(
    earlier: Quantizer, program: torch.export.ExportedProgram
) -> None:
    prepared = prepare(program, qompose.compose(earlier, Annotator(linears(), "later")))
    assert {claim.owner for claim in plan_of(prepared).claims} == {"earlier"}


def test_later_members_see_what_is_taken(program: torch.export.ExportedProgram) -> None:
    seen = []

    def look(node: Node) -> None:
        if node.op == "call_function":
            annotation = node.meta.get(ANNOTATION_KEY)
            seen.append((node.name, bool(annotation and annotation._annotated)))

    prepare(program, qompose.compose(toy(LINEAR), Annotator(look)))
    assert set(seen) == {
        ("linear", True), ("linear_1", True), ("tanh", False), ("add", False), ("sigmoid", False),
    }  # fmt: skip


def test_what_else_an_annotation_says_stays_on_the_operator() -> None:
    """Tools of this field look there for flags of a quantizer's own, in converted programs too."""

    @dataclass
    class Own(QuantizationAnnotation):
        _is_output_of_quantized_pattern: bool = False
        held: Any = None

    def annotate_linear(node: Node) -> None:
        if node.target is torch.ops.aten.linear.default:
            node.meta[ANNOTATION_KEY] = Own({node.all_input_nodes[0]: INT8}, held=node)
            node.meta[ANNOTATION_KEY]._is_output_of_quantized_pattern = True

    x = randn(2, 3)
    prepared = prepare(export(nn.Linear(3, 3), x), Annotator(annotate_linear))
    prepared(x)
    for model, edges in ((prepared, 1), (qompose.convert_pt2e(prepared), 0)):
        (node,) = nodes_calling(model, "linear")
        found = vars(node.meta[ANNOTATION_KEY])
        assert found["_annotated"] and found["_is_output_of_quantized_pattern"] is True
        assert len(found["input_qspec_map"]) == edges and "held" not in found
