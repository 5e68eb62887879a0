# SPDX-License-Identifier: Apache-2.0
"""What members annotate: places and values of every kind, each followed or dropped by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose.errors import ConfigError
from qompose.quantizer.annotations import native_spec
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
    Tanhs,
    arrangements,
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
MODEL = Model(
    lambda m, x: torch.sigmoid(m.a(x) + torch.tanh(m.b(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4)
)
PROGRAM = export(seeded(MODEL), X)


def prepared_by(write: Callable[[GraphModule], None], program: Any = PROGRAM) -> list[GraphModule]:
    return [prepare(program, qompose.compose(*chosen)) for chosen in arrangements(By(write))]


def all_said(module: GraphModule) -> str:
    report = qompose.report(module)
    return "\n".join([*(row.reason for row in report.rows), *report.notes])


class TestPlaces:
    """Nodes that are no operators."""

    def test_an_input(self) -> None:
        for prepared in prepared_by(lambda model: put(named(model, "x"), output=INT8)):
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

        for chosen in arrangements(By(write)):
            found = points_of(prepare(PROGRAM, qompose.compose(*chosen)))
            assert ("output of a_weight" if spec else "a_weight -> linear") in found
            assert not any("bias" in point for point in found)

    def test_the_edge_to_the_end_of_the_program(self) -> None:
        def write(model: GraphModule) -> None:
            put(named(model, "output"), {named(model, "sigmoid"): INT8})

        for prepared in prepared_by(write):
            assert "sigmoid -> output" in points_of(prepared)
            assert torch.equal(prepared(X), PROGRAM.module()(X))
            (last,) = named(qompose.convert_pt2e(prepared), "output").all_input_nodes
            assert "dequantize_per_tensor" in str(last.target)


def _tokens(m: Any, ids: Tensor) -> Tensor:
    first, second = m.head(m.table(ids)).chunk(2, -1)
    return first.tanh() * second


IDS = torch.tensor([[1, 2, 3]])
LAYERS = {"table": nn.Embedding(10, 4), "head": nn.Linear(4, 4)}
TOKENS = export(seeded(Model(_tokens, **LAYERS)), IDS)


def beside(model: GraphModule) -> None:
    (node,) = calls(model, aten.embedding.default)
    weight, ids = node.args[:2]
    put(node, {weight: WEIGHT, ids: INT8}, INT8)


def split(model: GraphModule) -> None:
    (node,) = calls(model, aten.chunk.default)
    put(node, {node.args[0]: INT8}, INT8)


TABLE = {"table_weight -> embedding", "output of embedding"}
KNOWN = lambda m: put(named(m, "ids"), output=FIXED)  # noqa: E731
DROPPED: dict[str, tuple[Any, Any, set[str], str, str]] = {
    "integers that come in": (
        TOKENS, lambda m: put(named(m, "ids"), output=INT8), set(), "output of ids", "int64",
    ),
    "integers with known parameters": (TOKENS, KNOWN, set(), "output of ids", "int64"),
    "integers on an edge": (TOKENS, beside, TABLE, "ids -> embedding", "int64"),
    "several tensors in one value": (TOKENS, split, {"linear -> chunk"}, "output of chunk", ""),
    "what the end makes": (
        PROGRAM, lambda m: put(named(m, "output"), output=INT8), set(), "output of output", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("program", "write", "followed", "dropped", "why"), DROPPED.values(), ids=DROPPED
)
def test_what_has_no_float_tensor_is_dropped_with_the_reason(
    program: Any, write: Any, followed: set[str], dropped: str, why: str
) -> None:
    inputs = X if program is PROGRAM else IDS
    for prepared in prepared_by(write, program):
        found = points_of(prepared)
        assert followed <= found and dropped not in found
        said = all_said(prepared).splitlines()
        place = dropped.replace("output of output", "output")  # the end, which makes nothing
        assert any(all(word in line for word in ("tests.By", place, why)) for line in said)
        assert torch.equal(prepared(inputs), program.module()(inputs))


def _written(m: Any, x: Tensor) -> Tensor:
    """Memory that is read under one name after it was written under another."""
    y = x + 1
    z = y.view(-1, 4)
    y.relu_()
    return m.linear(z).tanh()


WRITTEN = export(seeded(Model(_written, linear=nn.Linear(4, 4))), X)


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
                (note,) = [n for n in plan_of(prepared).notes if f"annotation of {place} by" in n]
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


def of_type(dtype: Any, *bounds: int) -> Callable[[Node], Any]:
    return lambda node: Annotation({}, Spec(dtype, INT8.observer_or_fake_quant_ctr, *bounds))


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
        lambda node: Annotation({named(node.graph.owning_module, "tanh"): INT8}), "tanh -> linear",
    ),
    "a reference to no node": (lambda node: Annotation({}, Shared("linear")), "linear"),
    "a reference to nothing": (lambda node: Annotation({}, Shared(None)), "linear"),
    "a dtype that is none": (of_type(torch.int64), "output of linear.*int64"),
    "no dtype": (of_type(None), "linear"),
    "a dtype by name": (of_type("int8"), "linear.*'int8'"),
    "bounds outside the dtype": (of_type(torch.int8, -999, 999), "output of linear"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "where"), NONSENSE.values(), ids=NONSENSE)
def test_what_no_engine_can_follow_is_named_with_its_member(make: Any, where: str) -> None:
    def write(model: GraphModule) -> None:
        node = named(model, "linear")
        node.meta[KEY] = make(node)

    for chosen in arrangements(By(write)):
        with pytest.raises(ConfigError, match=f"(?s){where}") as caught:
            prepare(PROGRAM, qompose.compose(*chosen))
        assert "tests.By" in str(caught.value)


def _branches(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: m.yes(x).tanh(), m.no, (x,)).tanh()


BRANCHES = export(seeded(Model(_branches, yes=nn.Linear(4, 4), no=nn.Linear(4, 4))), X)


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

        prepared = prepare(BRANCHES, qompose.compose(FromOutside(), Tanhs()))
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
        moved = replace(FIXED, scale=0.5, zero_point=3)
        assert native_spec(moved) == FixedQParamsQuantizationSpec(**vars(moved))
        assert native_spec(replace(INT8, is_dynamic=True)).is_dynamic

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

        plan = plan_of(prepare(PROGRAM, qompose.compose(Foreign(), By(write))))
        assert {c.owner for c in plan.claims if "add" in c.nodes} == {"tests.By"}
        (group,) = (g for g in plan.groups if "output of add" in map(str, g.points))
        assert getattr(group.spec, "dtype", None) is torch.uint8
        assert plan.requantizations()
