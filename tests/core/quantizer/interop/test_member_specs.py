# SPDX-License-Identifier: Apache-2.0
"""Every kind of specification, in a vocabulary that is not core's, gives what core's own gives."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from qompose.spec import SharedQuantizationSpec
from qompose.spec.quantization_spec import DerivedQuantizationSpec, FixedQParamsQuantizationSpec
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.core.quantizer.interop import foreign
from tests.core.quantizer.interop.foreign import (
    FIXED,
    INT8,
    UINT8,
    WEIGHT,
    Annotation,
    By,
    Derived,
    Foreign,
    Shared,
    Spec,
    aten,
    calls,
    named,
    put,
)
from tests.core.toy import (
    Annotator,
    annotate,
    convert,
    export,
    groups_of,
    nodes_calling,
    plan_of,
    prepare,
    randn,
    seeded,
    sqnr,
)

X = randn(6, 4)
LINEAR = aten.linear.default


class Other(Foreign):
    """A second member, that has nothing to do with it."""

    targets = (aten.tanh.default,)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.a(x) + torch.tanh(self.b(x)))


PROGRAM = export(seeded(Net()), X)


class TestVocabulary:
    """Every kind of specification gives what core's own gives."""

    @staticmethod
    def scale_of_product(observers: list[Any]) -> tuple[Tensor, Tensor]:
        activation, weight = (observer.calculate_qparams() for observer in observers)
        scale = activation[0] * weight[0]
        return scale, torch.zeros_like(scale, dtype=torch.int64)

    def write(self, node: Node, shared: Any, derived: Any, fixed: Any, put: Any) -> None:
        if node.target is LINEAR:
            x, weight, bias = node.args
            put(node, {x: INT8, weight: WEIGHT, bias: derived(node)}, INT8)
        elif node.target is aten.add.Tensor:
            first, second = node.args
            put(node, {first: INT8, second: shared((first, node))}, shared((first, node)))
        elif node.target is aten.tanh.default:
            put(node, {node.args[0]: UINT8}, shared((node.args[0], node)))
        elif node.target is aten.sigmoid.default:
            put(node, {node.args[0]: INT8}, fixed)

    def derived(self, kind: Any, sequence: Any, node: Node) -> Any:
        return kind(
            sequence([(node.args[0], node), (node.args[1], node)]), self.scale_of_product, torch.int32,
            -(2**31), 2**31 - 1, torch.per_channel_symmetric, ch_axis=0,
        )  # fmt: skip

    def theirs(self, sequence: Any) -> Any:
        def write(model: GraphModule) -> None:
            for node in calls(model):
                self.write(node, Shared, lambda n: self.derived(Derived, sequence, n), FIXED, put)

        return By(write)

    @pytest.mark.parametrize("sequence", [list, tuple])
    def test_all_kinds(self, sequence: Any) -> None:
        fixed = FixedQParamsQuantizationSpec(**vars(FIXED))

        def write(node: Node) -> None:
            derived = lambda n: self.derived(DerivedQuantizationSpec, list, n)  # noqa: E731
            self.write(node, SharedQuantizationSpec, derived, fixed, annotate)

        ours = Annotator(write)
        theirs = qompose.compose(self.theirs(sequence))
        assert groups_of(prepare(PROGRAM, theirs)) == groups_of(prepare(PROGRAM, ours))
        found, expected = (convert(PROGRAM, quantizer, X) for quantizer in (theirs, ours))
        assert torch.equal(found(X), expected(X))
        assert sqnr(PROGRAM.module()(X), found(X)) > 20

    def test_a_chain_of_references_against_the_order_of_the_graph(self) -> None:
        def write(model: GraphModule) -> None:
            linear, tanh, add = (named(model, name) for name in ("linear", "tanh", "add"))
            put(linear, output=Shared((linear, add)))
            put(tanh, output=INT8)
            put(add, {linear: Shared((tanh, add)), tanh: Shared(tanh)}, Shared((linear, add)))

        (group,) = groups_of(prepare(PROGRAM, qompose.compose(By(write))))
        assert group >= {
            "output of linear", "linear -> add", "tanh -> add", "output of tanh", "output of add",
        }  # fmt: skip

    def test_references_to_one_another_that_no_specification_ends(self) -> None:
        def write(model: GraphModule) -> None:
            add = named(model, "add")
            first, second = add.args
            put(add, {first: Shared((second, add)), second: Shared((first, add))})  # type: ignore[dict-item]

        with pytest.raises(qompose.errors.SharingError, match=r"linear -> add \(tests\.By"):
            prepare(PROGRAM, qompose.compose(By(write)))

    def test_a_reference_to_what_another_member_took(self) -> None:
        """It is not followed to what the first wants: the second's backend has no kernel for that."""

        def write(model: GraphModule) -> None:
            linear, add = named(model, "linear"), named(model, "add")
            put(linear, {linear.args[0]: UINT8}, UINT8)  # type: ignore[dict-item]
            put(add, dict.fromkeys(add.all_input_nodes, Shared(linear)), Shared(linear))

        prepared = prepare(PROGRAM, qompose.compose(Foreign(), By(write)))
        plan = plan_of(prepared)
        assert {c.owner for c in plan.claims if "add" in c.nodes} == {"tests.By"}
        (group,) = (g for g in plan.groups if "output of add" in map(str, g.points))
        assert getattr(group.spec, "dtype", None) is torch.uint8
        assert plan.requantizations()

    def test_an_edge_is_quantized_once_where_both_sides_say_the_same(self) -> None:
        prepared = prepare(PROGRAM, qompose.compose(Foreign(), Other()))
        prepared(X)
        converted = qompose.convert_pt2e(prepared)
        assert len(nodes_calling(converted, "quantize_per_tensor")) == 4
        assert not plan_of(prepared).requantizations()


def test_the_vocabulary_is_not_core_s() -> None:
    """Or all of this would show nothing."""
    for kind in (Spec, Shared, Derived, foreign.Fixed, Annotation, Foreign):
        assert not [base for base in kind.__mro__ if base.__module__.startswith("qompose")]
