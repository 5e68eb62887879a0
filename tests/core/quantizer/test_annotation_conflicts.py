# SPDX-License-Identifier: Apache-2.0
"""Quantizers that annotate, one after the other: what is taken stays as it was, or is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose import Quantizer
from qompose.errors import AnnotationConflictError
from qompose.program.meta import ANNOTATION_KEY
from torch import Tensor, nn
from torch.fx import Node

from tests.core.toy import (
    INT8,
    LINEAR,
    UINT8,
    WEIGHT,
    Annotator,
    annotate,
    export,
    graph_text,
    plan_of,
    prepare,
    randn,
    seeded,
    toy,
)

aten = torch.ops.aten


class Tutorial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.a(x) + torch.tanh(self.b(x)))


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    return export(seeded(Tutorial()), randn(6, 4))


def linears(output: Any = INT8) -> Callable[[Node], None]:
    def annotate_node(node: Node) -> None:
        if node.target is aten.linear.default:
            annotate(node, {node.args[0]: INT8, node.args[1]: WEIGHT}, output)

    return annotate_node


def overwrite(node: Node) -> None:
    linears(UINT8)(node)


def clear(node: Node) -> None:
    if ANNOTATION_KEY in node.meta:
        node.meta[ANNOTATION_KEY].input_qspec_map.clear()


def remove(node: Node) -> None:
    node.meta.pop(ANNOTATION_KEY, None)


def add_an_edge(node: Node) -> None:
    if node.target is aten.linear.default:
        node.meta[ANNOTATION_KEY].input_qspec_map[node.args[2]] = INT8


def replace_an_edge(node: Node) -> None:
    if node.target is aten.linear.default:
        node.meta[ANNOTATION_KEY].input_qspec_map[node.args[0]] = UINT8


CHANGES = [
    pytest.param(overwrite, "changed", id="overwrites"),
    pytest.param(replace_an_edge, "changed", id="replaces an edge in place"),
    pytest.param(clear, "changed", id="clears in place"),
    pytest.param(add_an_edge, "changed", id="adds an edge in place"),
    pytest.param(remove, "removed", id="removes"),
]
EARLIER = [
    pytest.param(Annotator(linears(), "earlier"), id="after an annotator"),
    pytest.param(toy(LINEAR, name="earlier"), id="after a rule table"),
]


@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize(("change", "word"), CHANGES)
def test_a_changed_annotation_is_an_error_that_names_both(
    earlier: Quantizer, change: Any, word: str, program: torch.export.ExportedProgram
) -> None:
    later = Annotator(change, "later")
    with pytest.raises(AnnotationConflictError) as caught:
        prepare(program, qompose.compose(earlier, later))
    error = caught.value
    assert (error.earlier, error.later, error.node) == ("earlier", "later", "linear")
    assert all(text in str(error) for text in ("'earlier'", "'later'", "'linear'", word))
    assert isinstance(error, RuntimeError)


@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize(("change", "word"), CHANGES)
def test_the_first_may_win_and_the_change_is_undone_and_listed(
    earlier: Quantizer, change: Any, word: str, program: torch.export.ExportedProgram
) -> None:
    later = Annotator(change, "later")
    both = prepare(program, qompose.compose(earlier, later, on_conflict="first"))
    alone = prepare(program, earlier)
    assert graph_text(both) == graph_text(alone)
    assert plan_of(both).groups == plan_of(alone).groups
    for node in ("linear", "linear_1"):
        assert any(
            node in note and "earlier" in note and "later" in note and word in note
            for note in plan_of(both).notes
        )


@pytest.mark.parametrize("earlier", EARLIER)
def test_an_equal_annotation_is_no_change(
    earlier: Quantizer, program: torch.export.ExportedProgram
) -> None:
    again = Annotator(linears(), "later")
    prepared = prepare(program, qompose.compose(earlier, again))
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


def _retarget(node: Node) -> None:
    if node.target is aten.linear.default:
        node.target = aten.bilinear.default


def _rewire(node: Node) -> None:
    if node.target is aten.add.Tensor:
        node.args = (node.args[1], node.args[0])


def _scale(node: Node) -> None:
    if node.target is aten.add.Tensor:
        node.kwargs = {"alpha": 2}


@pytest.mark.parametrize(
    ("edit", "named"),
    [(_retarget, "linear, linear_1"), (_rewire, "add"), (_scale, "add")],
)
def test_an_edit_that_keeps_the_names_of_nodes_is_no_annotation(
    program: torch.export.ExportedProgram, edit: Callable[[Node], None], named: str
) -> None:
    with pytest.raises(
        qompose.UserError, match=rf"editor: annotate changed the program at {named}"
    ):
        prepare(program, qompose.compose(toy(LINEAR), Annotator(edit, "editor")))
