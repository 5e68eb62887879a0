# SPDX-License-Identifier: Apache-2.0
"""What a program returns, where a member's transform makes another value of it than an operator's."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from qompose.program.graph import get_attribute
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.core.quantizer.interop.foreign import (
    INT8,
    KEY,
    Annotation,
    Foreign,
    aten,
    calls,
    put,
)
from tests.core.toy import export, plan_of, prepare, randn, seeded

X = randn(6, 4)


class Net(nn.Module):
    """Returns what depends on its parameters alone, beside what depends on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.a.weight + 1


PROGRAM = export(seeded(Net()), X)


class Folding(Foreign):
    """Makes a constant of an addition to a parameter, and annotates the edges to the end."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        for node in calls(model, aten.add.Tensor):
            weight = get_attribute(model, str(node.args[0].target))  # type: ignore[union-attr]
            model.register_buffer("_frozen_param0", weight.detach() + node.args[1])
            with model.graph.inserting_before(node):
                node.replace_all_uses_with(model.graph.get_attr("_frozen_param0"))
            model.graph.erase_node(node)
        model.recompile()
        return model

    def annotate(self, model: GraphModule) -> None:
        super().annotate(model)
        end = model.graph.output_node()
        end.meta[KEY] = Annotation(dict.fromkeys(end.all_input_nodes, INT8))


class AtTheRead(Folding):
    """Says the same of the read of the constant."""

    def annotate(self, model: GraphModule) -> None:
        Foreign.annotate(self, model)
        for node in model.graph.output_node().all_input_nodes:
            if node.op == "get_attr":
                put(node, output=INT8)


class Nowhere(Folding):
    """Annotates nothing that it made."""

    def annotate(self, model: GraphModule) -> None:
        Foreign.annotate(self, model)


def points(prepared: GraphModule) -> set[str]:
    return {str(point) for group in plan_of(prepared).groups for point in group.points}


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (Folding, "_frozen_param0 -> output"),
        (AtTheRead, "output of _frozen_param0"),
    ],
)
def test_a_constant_that_a_transform_puts_there_is_quantized(kind: Any, place: str) -> None:
    prepared = prepare(PROGRAM, qompose.compose(kind()))
    assert place in points(prepared)
    (rewrite,) = plan_of(prepared).rewrites
    assert (rewrite.nodes, rewrite.pieces) == (("add",), ())
    prepared(X)
    _, made = qompose.convert_pt2e(prepared)(X)
    _, expected = PROGRAM.module()(X)
    assert 0 < (made - expected).norm() < 0.01 * expected.norm()


def test_it_is_there_where_no_claim_reads_it() -> None:
    prepared = prepare(PROGRAM, qompose.compose(Nowhere()))
    assert [rewrite.nodes for rewrite in plan_of(prepared).rewrites] == [("add",)]
    assert not calls(prepared, aten.add.Tensor)


class Behind(Folding):
    """Puts an operator behind what is returned, and annotates nothing but the edge from it to the end."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        end = model.graph.output_node()
        first, *others = end.args[0]  # type: ignore[misc]
        with model.graph.inserting_before(end):
            last = model.graph.call_function(aten.clone.default, (first,))
        last.meta = {"val": first.meta["val"]}  # type: ignore[union-attr]
        end.args = ((last, *others),)
        model.recompile()
        return model

    def wanted(self, model: GraphModule) -> list[Node]:
        return []


def test_an_operator_that_only_the_end_reads() -> None:
    prepared = prepare(PROGRAM, qompose.compose(Behind()))
    assert "clone_default -> output" in points(prepared)
    assert [rewrite.pieces for rewrite in plan_of(prepared).rewrites] == [("clone_default",)]
    assert all(torch.equal(*pair) for pair in zip(prepared(X), PROGRAM.module()(X), strict=True))
