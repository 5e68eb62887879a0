# SPDX-License-Identifier: Apache-2.0
"""What members annotate: places and values of every kind, each followed or dropped by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose.errors import ConfigError
from qompose.spec import SharedQuantizationSpec
from qompose.spec.quantization_spec import DerivedQuantizationSpec, FixedQParamsQuantizationSpec
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.core.quantizer.interop.foreign import (
    FIXED,
    INT8,
    KEY,
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
    derived_bias,
    named,
    put,
)
from tests.core.toy import (
    Annotator,
    Model,
    annotate,
    convert,
    export,
    graph_text,
    groups_of,
    plan_of,
    points_of,
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


PROGRAM = export(
    seeded(
        Model(
            lambda m, x: torch.sigmoid(m.a(x) + torch.tanh(m.b(x))),
            a=nn.Linear(4, 4),
            b=nn.Linear(4, 4),
        )
    ),
    X,
)


def members(write: Callable[[GraphModule], None]) -> list[Any]:
    """Alone, first and second: where it stands makes no difference to what it is told."""
    return [[By(write)], [By(write), Other()], [Other(), By(write)]]


def prepared_by(write: Callable[[GraphModule], None], program: Any = PROGRAM) -> list[GraphModule]:
    return [prepare(program, qompose.compose(*chosen)) for chosen in members(write)]


def said(module: GraphModule, where: str) -> str:
    """All that the report says of a node, and of the annotation that was dropped there."""
    report = qompose.report(module)
    reasons = [row.reason for row in report.rows if row.name == where]
    return "\n".join([*reasons, *(note for note in report.notes if where in note)])


def all_said(module: GraphModule) -> str:
    report = qompose.report(module)
    return "\n".join([*(row.reason for row in report.rows), *report.notes])


class TestPlaces:
    """Nodes that are no operators."""

    def test_an_input(self) -> None:
        def write(model: GraphModule) -> None:
            put(named(model, "x"), output=INT8)

        for prepared in prepared_by(write):
            assert "output of x" in points_of(prepared)
            prepared(X)
            (quantize,) = named(qompose.convert_pt2e(prepared), "x").users
            assert "quantize_per_tensor" in str(quantize.target)

    @pytest.mark.parametrize("spec", [None, WEIGHT], ids=["nothing asked", "a specification"])
    def test_a_parameter(self, spec: Any) -> None:
        """Marked only, as several quantizers do, or with what is usually said of the edge to its user."""

        def write(model: GraphModule) -> None:
            for node in calls(model, LINEAR):
                x, weight, bias = node.args
                put(weight, output=spec)  # type: ignore[arg-type]
                put(bias)  # type: ignore[arg-type]
                put(node, {x: INT8, **({} if spec else {weight: WEIGHT})}, INT8)

        for chosen in members(write):
            found = points_of(prepare(PROGRAM, qompose.compose(*chosen)))
            assert ("output of a_weight" if spec else "a_weight -> linear") in found
            assert not any("bias" in point for point in found)

    def test_the_edge_to_the_end_of_the_program(self) -> None:
        def write(model: GraphModule) -> None:
            put(named(model, "output"), {named(model, "sigmoid"): INT8})

        for prepared in prepared_by(write):
            assert "sigmoid -> output" in points_of(prepared)
            assert torch.equal(prepared(X), PROGRAM.module()(X))
            converted = qompose.convert_pt2e(prepared)
            (last,) = named(converted, "output").all_input_nodes
            assert "dequantize_per_tensor" in str(last.target)

    def test_what_the_end_makes_is_nothing(self) -> None:
        def write(model: GraphModule) -> None:
            put(named(model, "output"), output=INT8)

        for prepared in prepared_by(write):
            assert "output of output" not in points_of(prepared)
            assert "output" in said(prepared, "output") and "tests.By" in said(prepared, "output")


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        first, second = self.head(self.table(ids)).chunk(2, -1)
        return first.tanh() * second


IDS = torch.tensor([[1, 2, 3]])
TOKENS = export(seeded(Tokens()), IDS)


class TestValues:
    """Values that have no float tensor: what was asked of them is dropped, with the reason."""

    @pytest.mark.parametrize("spec", [INT8, FIXED], ids=["observed", "fixed"])
    def test_integers_that_come_in(self, spec: Any) -> None:
        def write(model: GraphModule) -> None:
            put(named(model, "ids"), output=spec)

        for prepared in prepared_by(write, TOKENS):
            assert "int64" in said(prepared, "ids") and "tests.By" in said(prepared, "ids")
            assert torch.equal(prepared(IDS), TOKENS.module()(IDS))

    def test_integers_on_an_edge_beside_one_that_is_followed(self) -> None:
        def write(model: GraphModule) -> None:
            (node,) = calls(model, aten.embedding.default)
            weight, ids = node.args[:2]
            put(node, {weight: WEIGHT, ids: INT8}, INT8)

        for prepared in prepared_by(write, TOKENS):
            assert {"table_weight -> embedding", "output of embedding"} <= points_of(prepared)
            assert "ids -> embedding" not in points_of(prepared)
            assert "int64" in all_said(prepared)

    def test_several_tensors_in_one_value(self) -> None:
        def write(model: GraphModule) -> None:
            (node,) = calls(model, aten.chunk.default)
            put(node, {node.args[0]: INT8}, INT8)

        for prepared in prepared_by(write, TOKENS):
            assert "linear -> chunk" in points_of(prepared)
            assert "output of chunk" not in points_of(prepared)
            assert "output of chunk" in all_said(prepared) and "tests.By" in all_said(prepared)


class Written(nn.Module):
    """Memory that is read under one name after it was written under another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        z = y.view(-1, 4)
        y.relu_()
        return self.linear(z).tanh()


WRITTEN = export(seeded(Written()), X)


class TestDependents:
    """What takes its parameters from a place that cannot be quantized is dropped with it, and said."""

    def test_a_derived_bias(self) -> None:
        def write(model: GraphModule) -> None:
            (node,) = calls(model, LINEAR)
            x, weight, bias = node.args
            put(node, {x: INT8, weight: WEIGHT, bias: derived_bias(node)}, INT8)

        for prepared in prepared_by(write, WRITTEN):
            found = points_of(prepared)
            assert {"linear_weight -> linear", "output of linear"} <= found
            assert not {"view -> linear", "linear_bias -> linear"} & found
            for place in ("view -> linear", "linear_bias -> linear"):
                (note,) = [n for n in plan_of(prepared).notes if f"annotates {place}," in n]
                assert "tests.By" in note and "view" in note.partition(place)[2]
            assert torch.equal(prepared(X), WRITTEN.module()(X))
            qompose.convert_pt2e(prepared)

    def test_a_chain_of_shared_ones(self) -> None:
        """Through regions of their own, in either order of the graph; the last has nothing left."""

        def write(model: GraphModule) -> None:
            linear, tanh = named(model, "linear"), named(model, "tanh")
            put(named(model, "x"), output=Shared((linear, tanh)))
            put(linear, {linear.args[0]: INT8, linear.args[1]: WEIGHT})
            put(tanh, {linear: Shared((linear.args[0], linear))}, Shared((linear, tanh)))

        for prepared in prepared_by(write, WRITTEN):
            assert {p for p in points_of(prepared) if "linear" in p} <= {
                "linear_weight -> linear", "output of linear", "linear -> tanh", "output of tanh",
            }  # fmt: skip
            assert "linear -> tanh" in all_said(prepared)
            assert "output of x" not in points_of(prepared)


class Odd:
    """No specification."""

    dtype = torch.int8

    def __repr__(self) -> str:
        return "an odd one"


NONSENSE: dict[str, tuple[Callable[[Node], Any], str]] = {
    "an unknown kind of specification": (
        lambda node: Annotation({node.args[0]: Odd()}), "x -> linear.*an odd one",
    ),
    "an unknown kind for the output": (lambda node: Annotation({}, Odd()), "output of linear"),
    "text for a specification": (lambda node: Annotation({}, "int8"), "output of linear"),
    "no annotation": (lambda node: object(), "linear"),
    "a list of edges": (lambda node: Annotation([node.args[0]]), "linear"),  # type: ignore[arg-type]
    "an edge by name": (lambda node: Annotation({"x": INT8}), "linear"),
    "an edge that is not read": (
        lambda node: Annotation({named(node.graph.owning_module, "tanh"): INT8}),
        "tanh -> linear",
    ),
    "a reference to no node": (lambda node: Annotation({}, Shared("linear")), "linear"),
    "a reference to nothing": (lambda node: Annotation({}, Shared(None)), "linear"),
    "a dtype that is none": (
        lambda node: Annotation({}, Spec(torch.int64, INT8.observer_or_fake_quant_ctr)),
        "output of linear.*int64",
    ),
    "no dtype": (
        lambda node: Annotation({}, Spec(None, INT8.observer_or_fake_quant_ctr)), "linear",  # type: ignore[arg-type]
    ),
    "a dtype by name": (
        lambda node: Annotation({}, Spec("int8", INT8.observer_or_fake_quant_ctr)), "linear.*'int8'",  # type: ignore[arg-type]
    ),
    "bounds outside the dtype": (
        lambda node: Annotation({}, Spec(torch.int8, INT8.observer_or_fake_quant_ctr, -999, 999)),
        "output of linear",
    ),
}  # fmt: skip


class TestNonsense:
    """What no engine can follow is an error that names the member and the place."""

    @pytest.mark.parametrize("case", NONSENSE)
    def test_it_is_named(self, case: str) -> None:
        make, where = NONSENSE[case]

        def write(model: GraphModule) -> None:
            node = named(model, "linear")
            node.meta[KEY] = make(node)

        for chosen in members(write):
            with pytest.raises(ConfigError, match=f"(?s){where}") as caught:
                prepare(PROGRAM, qompose.compose(*chosen))
            assert "tests.By" in str(caught.value)


BRANCHES = export(
    seeded(
        Model(
            lambda m, x: torch.cond(x.sum() > 0, lambda x: m.yes(x).tanh(), m.no, (x,)).tanh(),
            yes=nn.Linear(4, 4),
            no=nn.Linear(4, 4),
        )
    ),
    X,
)


class TestBodies:
    """Control flow: what an engine asks about, and what a member finds itself."""

    def test_a_member_that_walks_into_bodies_itself(self) -> None:
        """It finds there what it is asked about anyway, and writes it twice."""

        class Walking(Foreign):
            def annotate(self, model: GraphModule) -> None:
                for part in (m for m in model.modules() if isinstance(m, GraphModule)):
                    super().annotate(part)

        walking = prepare(BRANCHES, qompose.compose(Walking()))
        assert graph_text(walking) == graph_text(prepare(BRANCHES, qompose.compose(Foreign())))
        assert groups_of(walking) == groups_of(prepare(BRANCHES, qompose.compose(Foreign())))

    def test_what_is_written_in_a_body_from_outside_only_is_not_lost_silently(self) -> None:
        class FromOutside(Foreign):
            def annotate(self, model: GraphModule) -> None:
                for name, part in model.named_children():
                    if name.startswith(("true_graph", "false_graph")):
                        super().annotate(part)

        prepared = prepare(BRANCHES, qompose.compose(FromOutside(), Other()))
        taken = [c for c in plan_of(prepared).claims if c.owner == "tests.FromOutside"]
        said = [n for n in plan_of(prepared).notes if "tests.FromOutside" in n and "_linear" in n]
        assert len(taken) == 2 or said


class TestVocabulary:
    """Every kind of specification gives what core's own gives."""

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

    def theirs(self, sequence: Any) -> Any:
        def write(model: GraphModule) -> None:
            for node in calls(model):
                self.write(node, Shared, lambda n: derived_bias(n, Derived, sequence), FIXED, put)

        return By(write)

    @pytest.mark.parametrize("sequence", [list, tuple])
    def test_all_kinds(self, sequence: Any) -> None:
        fixed = FixedQParamsQuantizationSpec(**vars(FIXED))

        def write(node: Node) -> None:
            derived = lambda n: derived_bias(n, DerivedQuantizationSpec)  # noqa: E731
            self.write(node, SharedQuantizationSpec, derived, fixed, annotate)

        ours = Annotator(write)
        theirs = qompose.compose(self.theirs(sequence))
        assert groups_of(prepare(PROGRAM, theirs)) == groups_of(prepare(PROGRAM, ours))
        found, expected = (convert(PROGRAM, quantizer, X) for quantizer in (theirs, ours))
        assert torch.equal(found(X), expected(X))
        assert sqnr(PROGRAM.module()(X), found(X)) > 20

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
