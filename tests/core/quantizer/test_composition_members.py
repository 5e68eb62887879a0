# SPDX-License-Identifier: Apache-2.0
"""Members side by side: two of one backend, what they keep of a program, tensors that two of them tie."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import qompose
import torch
from qompose import Quantizer
from qompose.errors import SharingError
from qompose.spec.claim import Claim, Proposal
from qompose.spec.quantization_spec import SharedQuantizationSpec
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.quantizer.test_composition import PROGRAM, Net, X
from tests.core.toy import (
    DYNAMIC,
    INT8,
    LINEAR,
    SIGMOID,
    STATIC,
    UINT8,
    WEIGHT,
    Annotator,
    NullQuantizer,
    annotate,
    aten,
    export,
    graph_text,
    plan_of,
    prepare,
    randn,
    seeded,
    toy,
)


class TestOneBackendTwice:
    """A static body and a dynamic head: which is which can be read everywhere."""

    def both(self) -> Quantizer:
        head = toy(LINEAR, config=None).set_module_name("head", DYNAMIC)
        return qompose.compose(head, toy(LINEAR, SIGMOID))

    def test_each_has_a_label_of_its_own(self) -> None:
        report = qompose.report(prepare(PROGRAM, self.both()))
        owners = {
            row.module: (row.owner, row.config, row.selector) for row in report.rows if row.macs
        }
        assert owners == {
            "body": ("toy#2", "static", "global"),
            "head": ("toy", "dynamic", "module name head"),
        }
        assert [(r[0], r[2], r[3]) for r in report.by_owner()] == [
            ("toy#2", "static", "global"), ("toy", "dynamic", "module name head"),
        ]  # fmt: skip

    @pytest.mark.parametrize("width", [80, 120])
    def test_the_text_tells_them_apart(self, width: int) -> None:
        text = qompose.report(prepare(PROGRAM, self.both())).to_text(width)
        lines = [line.split() for line in text.splitlines()]
        assert ["toy#2", "observed", "static", "global", "2", "96"] in lines
        assert ["toy", "observed", "dynamic", "module", "name", "head", "1", "48"] in lines

    def test_reasons_name_the_right_one(self) -> None:
        first = toy(LINEAR).set_module_name("body", None)
        second = toy(LINEAR).set_module_name("body", None)
        report = qompose.report(prepare(PROGRAM, qompose.compose(first, second)))
        assert report.why("linear")[0].reason.startswith("toy: left in float by module name body")
        assert any(note.startswith("toy#2 claims nothing") for note in report.notes)


class TestState:
    """A quantizer is settings; what it saw is gone."""

    def members(self) -> list[Quantizer]:
        def look(node: Any) -> None:
            if node.target is aten.tanh.default:
                annotate(node, {node.args[0]: INT8}, INT8)

        return [toy(LINEAR).set_module_name("head", STATIC), Annotator(look), NullQuantizer()]

    def test_no_graph_is_kept_alive(self) -> None:
        """Neither the program, nor the copies that members were shown, nor what came of it."""
        watched: list[weakref.ref[Any]] = []

        class Watching(NullQuantizer):
            def bound(self, exported: GraphModule) -> Quantizer:
                watched.append(weakref.ref(exported))
                return self

            def annotate(self, model: GraphModule) -> GraphModule:
                watched.append(weakref.ref(model))
                return model

            def validate(self, model: GraphModule) -> None:
                watched.append(weakref.ref(model))

        quantizer = qompose.compose(*self.members(), Watching())
        module = export(seeded(Net()), X).module(check_guards=False)
        prepared = prepare(module, quantizer)
        assert len(watched) >= 3
        watched += [
            weakref.ref(thing) for thing in (module, module.graph, prepared, prepared.graph)
        ]
        del module, prepared
        gc.collect()
        assert [ref() for ref in watched] == [None] * len(watched)
        assert len(quantizer.members) == 4

    def test_reuse_is_as_good_as_new(self) -> None:
        class Other(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.head, self.more = nn.Linear(4, 4), nn.Linear(4, 3)

            def forward(self, x: Tensor) -> Tensor:
                return torch.tanh(self.more(self.head(x)))

        programs = [PROGRAM, export(seeded(Other()), X), export(seeded(Net(), seed=3), randn(2, 4))]
        used = qompose.compose(*self.members())
        for program in programs:
            again = prepare(program, used)
            fresh = prepare(program, qompose.compose(*self.members()))
            assert graph_text(again) == graph_text(fresh)
            assert plan_of(again) == plan_of(fresh)


class TestSharing:
    """Two owners that tie one tensor to different ones."""

    def test_both_are_named(self) -> None:
        def shares(where: str, with_input_of: str) -> Any:
            """Annotate the edge into an operator as sharing with another operator's input."""

            def look(node: Any) -> None:
                if node.name == where:
                    nodes = {n.name: n for n in node.graph.nodes}
                    other = nodes[with_input_of]
                    annotate(node, {node.args[0]: SharedQuantizationSpec((other.args[0], other))})

            return look

        def products(node: Any) -> None:
            spec = {"linear": INT8, "linear_1": UINT8}.get(node.name)
            if spec is not None:
                annotate(node, {node.args[0]: spec, node.args[1]: WEIGHT})

        first, base = Annotator(shares("sigmoid", "linear"), "first"), Annotator(products, "base")

        class Second(Annotator):
            """Wants the same edge to share with another tensor, in a claim of its own."""

            def propose(
                self, model: GraphModule, taken: Sequence[Claim], on_conflict: str = "error"
            ) -> Proposal:
                proposal = super().propose(model, (), on_conflict)
                moved = [
                    Claim(owner="", rule="annotation", anchor="tanh", nodes=("tanh",), output="tanh",
                          specs=claim.specs)
                    for claim in proposal.claims
                ]  # fmt: skip
                return Proposal(moved)

        second = Second(shares("sigmoid", "linear_1"), "second")
        with pytest.raises(SharingError) as caught:
            prepare(PROGRAM, qompose.compose(base, first, second))
        for text in ("linear -> sigmoid", "first, rule annotation", "second, rule annotation"):
            assert text in str(caught.value)
