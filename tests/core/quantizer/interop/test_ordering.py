# SPDX-License-Identifier: Apache-2.0
"""Other engines make observers as they come by: what a specification refers to has come before."""

from __future__ import annotations

import pytest
import torch
from qompose.errors import SharingError
from qompose.program.meta import ANNOTATION_KEY
from qompose.quantizer.annotations import write_annotations
from qompose.quantizer.interop.torchao_engine import in_order_of_reading
from qompose.spec import DerivedQuantizationSpec
from qompose.spec.claim import Claim, Point, PointSpec, shared_with
from qompose.spec.quantization_spec import EdgeOrNode, SharedQuantizationSpec
from torch.fx import GraphModule, Node

from tests.core.toy import INT8, UINT8, Model, export, randn

NONE: frozenset[str] = frozenset()
X_RELU, RELU, RELU_TANH = Point("x", "relu"), Point("relu"), Point("relu", "tanh")
TANH, SIGMOID = Point("tanh"), Point("sigmoid")
DERIVED = DerivedQuantizationSpec([], lambda _: None, torch.int32)  # type: ignore[arg-type, return-value]


@pytest.fixture
def program() -> GraphModule:
    """x -> relu -> tanh -> sigmoid."""
    return export(
        Model(lambda m, x: torch.sigmoid(torch.tanh(torch.relu(x)))), randn(2, 2)
    ).module()


def claim(name: str, *specs: PointSpec) -> Claim:
    return Claim(owner="a", rule="r", anchor=name, nodes=(name,), output=name, specs=specs)


def read(model: GraphModule) -> list[tuple[EdgeOrNode, object]]:
    """What a host comes by, in its order."""
    found: list[tuple[EdgeOrNode, object]] = []
    for node in model.graph.nodes:
        if annotation := node.meta.get(ANNOTATION_KEY):
            found += [((source, node), s) for source, s in annotation.input_qspec_map.items()]
            found += [(node, annotation.output_qspec)] if annotation.output_qspec else []
    return found


def written(model: GraphModule, *claims: Claim, standing: frozenset[str] = NONE) -> dict[str, str]:
    """Write claims; return which place refers to which, having checked that it came before."""
    write_annotations(model, in_order_of_reading(model, claims, standing))
    before: list[EdgeOrNode] = []
    references = {}
    for place, spec in read(model):
        targets = [spec.edge_or_node] if isinstance(spec, SharedQuantizationSpec) else []
        targets += getattr(spec, "derived_from", [])
        for target in targets:
            assert target in before or _name(target) in standing
            references[_name(place)] = _name(target)
        before.append(place)
    return references


def _name(place: EdgeOrNode) -> str:
    return place.name if isinstance(place, Node) else "->".join(node.name for node in place)


def test_claims_that_need_no_change_get_none(program: GraphModule) -> None:
    claims = [claim("relu", PointSpec(X_RELU, INT8), shared_with(RELU, X_RELU))]
    assert in_order_of_reading(program, claims, NONE) == claims


def test_a_specification_that_comes_later_moves_to_the_first_of_its_group(
    program: GraphModule,
) -> None:
    later = claim("sigmoid", PointSpec(SIGMOID, UINT8))
    chain = claim("tanh", shared_with(TANH, SIGMOID), shared_with(RELU_TANH, TANH))
    first = claim("relu", shared_with(RELU, TANH, implicit=False))
    references = written(program, later, chain, first)
    assert references == {"relu->tanh": "relu", "tanh": "relu", "sigmoid": "relu"}
    notes = {n.name: n.meta.get(ANNOTATION_KEY) for n in program.graph.nodes}
    assert notes["relu"].output_qspec == UINT8


def test_edges_come_before_outputs_and_derived_ones_last(program: GraphModule) -> None:
    bias = PointSpec(RELU_TANH, DERIVED, (X_RELU, RELU))
    claims = [claim("tanh", bias), claim("relu", PointSpec(RELU, INT8), PointSpec(X_RELU, INT8))]
    ordered = in_order_of_reading(program, claims, NONE)
    assert [spec.point for spec in ordered[1].specs] == [X_RELU, RELU]
    assert written(program, *claims) == {"relu->tanh": "relu"}


def test_what_is_derived_comes_after_the_other_edges_of_its_node() -> None:
    model = export(Model(lambda m, x: x.cos() + x.sin()), randn(2)).module()
    one, other = Point("cos", "add"), Point("sin", "add")
    claims = [claim("add", PointSpec(one, DERIVED, (other,)), PointSpec(other, INT8))]
    assert written(model, *claims) == {"cos->add": "sin->add"}


def test_what_refers_to_standing_annotations_stays(program: GraphModule) -> None:
    claims = [claim("relu", shared_with(X_RELU, TANH), shared_with(RELU, X_RELU))]
    references = written(program, *claims, standing=frozenset({"tanh"}))
    assert references == {"x->relu": "tanh", "relu": "x->relu"}


def test_nodes_that_are_annotated_are_not_written_to(program: GraphModule) -> None:
    claims = [claim("relu", PointSpec(X_RELU, INT8), PointSpec(Point("x"), INT8))]
    (ordered,) = in_order_of_reading(program, claims, frozenset({"x"}))
    assert [spec.point for spec in ordered.specs] == [X_RELU]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([shared_with(RELU, TANH)], "output of relu refers to output of tanh"),
        ([shared_with(RELU, X_RELU), shared_with(X_RELU, RELU)], "which has none"),
        (
            [PointSpec(X_RELU, DERIVED, (RELU,)), PointSpec(RELU, INT8)],
            "x -> relu is derived from output of relu, which this engine processes later",
        ),
    ],
    ids=["to nothing", "in a circle", "derived from what comes later"],
)  # fmt: skip
def test_what_no_order_helps(specs: list[PointSpec], message: str, program: GraphModule) -> None:
    with pytest.raises(SharingError, match=message):
        in_order_of_reading(program, [claim("relu", *specs)], NONE)
