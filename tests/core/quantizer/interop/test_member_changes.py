# SPDX-License-Identifier: Apache-2.0
"""What members change besides annotations: operators, constants and meta."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import qompose
import torch
from qompose import UserError
from qompose.errors import MemberError
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from tests.core.quantizer.interop.foreign import Foreign, acting, aten, calls, like, names, rebuilt
from tests.core.quantizer.interop.gallery import (
    EXPECTED,
    GALLERY,
    LINEAR,
    MUL,
    PROGRAM,
    SILU,
    Decomposing,
    Marking,
    Rebuilding,
    RebuildingInPieces,
    X,
    net,
)
from tests.core.quantizer.interop.test_members import HOOKS
from tests.core.toy import Model, export, graph_text, plan_of, prepare, randn, seeded

Silu = type("Silu", (Foreign,), {"targets": (SILU,)})
Linears = type("Linears", (Foreign,), {"targets": (LINEAR,)})


def targets(module: GraphModule) -> list[Any]:
    return [node.target for node in calls(module)]


def an_input_is_gone(model: GraphModule) -> None:
    x, weight = (model.graph.find_nodes(op=op)[0] for op in ("placeholder", "get_attr"))
    x.replace_all_uses_with(weight)
    model.graph.erase_node(x)
    model.recompile()


def two_outputs(model: GraphModule) -> None:
    end = model.graph.output_node()
    end.args = ((*end.args[0], *end.args[0]),)  # type: ignore[misc]
    model.recompile()


class TestTransforms:
    """Operators that a transform makes."""

    @pytest.mark.parametrize("kind", [Decomposing, RebuildingInPieces])
    @pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
    def test_they_are_made_and_listed(self, kind: Any, first: bool) -> None:
        """And who wanted what was rewritten has nothing."""
        members = [kind(), Linears(), Silu()] if first else [Silu(), Linears(), kind()]
        prepared = prepare(PROGRAM, qompose.compose(*members))
        assert SILU not in targets(prepared) and MUL in targets(prepared)
        plan = plan_of(prepared)
        (rewrite,) = plan.rewrites
        assert rewrite.member == f"tests.{kind.__name__}" and rewrite.nodes == ("silu",)
        owners = {c.owner for c in plan.claims if set(c.nodes) & set(rewrite.pieces)}
        assert owners == {f"tests.{kind.__name__}"}
        assert plan.idle_owners == ("tests.Silu",)
        assert "silu" not in [row.name for row in qompose.report(prepared).rows]
        torch.testing.assert_close(prepared(X), EXPECTED)
        meta = [n.meta for n in calls(prepared) if n.name in rewrite.pieces]
        assert all(m["val"].shape == (6, 4) for m in meta), "as operators that were exported have"

    @pytest.mark.parametrize("kind", [Decomposing, RebuildingInPieces])
    def test_what_nobody_claims_is_listed_too(self, kind: Any) -> None:
        idle = type("Idle", (kind,), {"wanted": lambda self, model: []})
        prepared = prepare(PROGRAM, qompose.compose(Linears(), idle()))
        (rewrite,) = plan_of(prepared).rewrites
        assert (rewrite.member, rewrite.nodes) == ("tests.Idle", ("silu",))
        rows = {row.name: row for row in qompose.report(prepared).rows}
        assert all(rows[name].state == "float" for name in rewrite.pieces)

    def test_names_that_a_new_module_gives_do_not_matter(self) -> None:
        kind = type("Plain", (Foreign,), {"targets": (LINEAR, SILU)})
        renamed, plain = (prepare(PROGRAM, qompose.compose(k())) for k in (Rebuilding, kind))
        assert graph_text(renamed) == graph_text(plain)
        one, other = plan_of(renamed), plan_of(plain)
        assert [c.nodes for c in one.claims] == [c.nodes for c in other.claims]
        assert one.groups == other.groups
        assert not plan_of(renamed).rewrites
        assert renamed.state_dict().keys() == plain.state_dict().keys()

    @pytest.mark.parametrize("whole", [True, False], ids=["whole", "without what is returned"])
    def test_a_graph_without_output_returns_what_the_program_returned(self, whole: bool) -> None:
        """`Graph.graph_copy` copies no output."""

        def swap(graph: Graph) -> None:
            for node in graph.find_nodes(op="call_function", target=SILU):
                node.target = aten.tanh.default

        class Copying(Foreign):
            def transform_for_annotation(self, model: GraphModule) -> GraphModule:
                graph = Graph()
                graph.graph_copy(model.graph, {})
                swap(graph)
                if not whole:
                    graph.erase_node([*graph.nodes][-1])
                return GraphModule(model, graph)

        if whole:
            prepared = prepare(PROGRAM, qompose.compose(Copying()))
            swap((expected := PROGRAM.module()).graph)
            expected.recompile()
            torch.testing.assert_close(prepared(X), expected(X))
        else:
            with pytest.raises(UserError, match=r"tests\.Copying: transform_for_annotation"):
                prepare(PROGRAM, qompose.compose(Copying()))

    @pytest.mark.parametrize("harm", [an_input_is_gone, two_outputs])
    def test_a_program_of_another_signature_is_refused(self, harm: Any) -> None:
        member = acting("transform_for_annotation", harm)
        for members in ([member], [Silu(), member]):
            with pytest.raises(UserError, match=r"tests\.Acting: transform_for_annotation"):
                prepare(PROGRAM, qompose.compose(*members))


@pytest.mark.parametrize("kind", [Decomposing, RebuildingInPieces])
def test_bodies_of_control_flow_are_rewritten_before_what_calls_them(kind: Any) -> None:
    silu = nn.functional.silu
    program = export(Model(lambda m, x: silu(torch.cond(x.sum() > 0, silu, torch.neg, (x,)))), X)
    prepared = prepare(program, qompose.compose(kind(), Linears()))
    (rewrite,) = plan_of(prepared).rewrites
    assert set(rewrite.nodes) == {"silu", "true_graph_0_silu"}
    claimed = {n for claim in plan_of(prepared).claims for n in claim.nodes}
    inside = [name for name in rewrite.pieces if name.startswith("true_graph_0")]
    assert claimed & set(inside) and claimed & (set(rewrite.pieces) - set(inside))
    for x in (X.abs(), -X.abs()):
        torch.testing.assert_close(prepared(x), program.module()(x))


def test_a_batch_norm_that_nobody_wants_folded_stays() -> None:
    """Its engine shows every batch norm folded; what a member wants in front of one is not meant."""

    class Convolutions(Foreign):
        def wanted(self, model: GraphModule) -> list[Node]:
            found = calls(model, aten.conv2d.default)
            return [n for n in found if next(iter(n.users)).target is aten.batch_norm.default]

        def asked(self, node: Node) -> Any:
            return self.annotation({}, self.spec, True, True)

    layers = {"conv": nn.Conv2d(2, 2, 1), "norm": nn.BatchNorm2d(2)}
    model = seeded(Model(lambda m, x: torch.relu(m.norm(m.conv(x))), **layers))
    prepared = prepare(export(model, randn(1, 2, 4, 4)), qompose.compose(Convolutions()))
    assert not plan_of(prepared).claims and calls(prepared, aten.batch_norm.default)
    (row,) = [r for r in qompose.report(prepared).rows if r.operator == "aten.conv2d"]
    assert "it does not claim it with the batch norm folded" in row.reason


def finite(buffer: Tensor) -> Tensor:
    return buffer.masked_fill(buffer.isinf(), -255.0)


def double(model: GraphModule, *_: Any) -> None:
    with torch.no_grad():
        model.get_parameter("b.weight").mul_(2)


class Changing(Foreign):
    """Puts another tensor for every buffer, in a new module."""

    targets = (aten.add.Tensor,)
    change: Any = None

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        for name, buffer in list(model.named_buffers()):
            setattr(model, name, self.change(buffer))
        return rebuilt(model)


class TestConstants:
    """Values that a member writes: the user's own are never touched."""

    class Finite(Foreign):
        """Puts a finite number for every -inf, as one does whose device has no infinities."""

        targets = (aten.add.Tensor,)

        def annotate(self, model: GraphModule) -> None:
            for name, buffer in list(model.named_buffers()):
                setattr(model, name, finite(buffer))
            super().annotate(model)

    class InPlace(Finite):
        """Writes to the tensor itself."""

        def annotate(self, model: GraphModule) -> None:
            for buffer in model.buffers():
                buffer.copy_(finite(buffer))
            Foreign.annotate(self, model)

    def test_what_annotate_writes_to_buffers_is_its_copies(self) -> None:
        program = torch.export.export(PROGRAM.module(check_guards=False), (X,))
        before = {k: v.clone() for k, v in program.state_dict.items()}
        for members in ([self.InPlace()], [Linears(), self.InPlace()]):
            prepared = prepare(program, qompose.compose(*members))
            notes = plan_of(prepared).notes
            (note,) = (n for n in notes if n.startswith("tests.InPlace: annotate"))
            assert "mask" in note
            assert torch.equal(prepared(X), EXPECTED)
            for name, value in program.state_dict.items():
                assert torch.equal(value, before[name]), name

    def test_another_tensor_in_annotate_is_an_error(self) -> None:
        for members in ([self.Finite()], [Linears(), self.Finite()]):
            with pytest.raises(UserError, match=r"tests\.Finite: annotate .*\badd\b"):
                prepare(PROGRAM, qompose.compose(*members))

    @pytest.mark.parametrize(
        ("hook", "act", "named"),
        [
            *((hook, double, r"b\.weight") for hook in HOOKS),
            ("transform_for_annotation", lambda m: m.get_buffer("mask").zero_(), "mask"),
        ],
    )
    def test_a_write_is_an_error_that_names_it(self, hook: str, act: Any, named: str) -> None:
        with pytest.raises(UserError, match=rf"tests\.Acting: {hook} .*\b{named}\b"):
            prepare(export(net(), X), qompose.compose(Linears(), acting(hook, act)))

    def test_a_write_is_told_of_where_the_hook_fails_behind_it(self) -> None:
        def fail(model: GraphModule) -> None:
            double(model)
            raise ValueError("why")

        with pytest.raises(UserError, match=r"tests\.Acting") as caught:
            prepare(export(net(), X), qompose.compose(acting("annotate", fail)))
        chain = f"{caught.value} {caught.value.__cause__} {caught.value.__context__}"
        assert "b.weight" in str(caught.value) and "ValueError: why" in chain

    def test_a_new_tensor_in_the_transform_is_listed_where_it_is_read(self) -> None:
        kind = type("Finite", (Changing,), {"change": staticmethod(finite)})
        program = torch.export.export(net(), (X,))
        before = {k: v.clone() for k, v in program.state_dict.items()}
        prepared = prepare(program, qompose.compose(kind(), Linears()))
        (rewrite,) = plan_of(prepared).rewrites
        assert (rewrite.member, rewrite.nodes) == ("tests.Finite", ("add",))
        assert all(torch.equal(value, before[name]) for name, value in program.state_dict.items())
        torch.testing.assert_close(prepared(X), EXPECTED)
        assert qompose.convert_pt2e(prepared)(X).isfinite().all()

    def test_a_new_tensor_of_the_same_numbers_is_no_change(self) -> None:
        kind = type("Copying", (Changing,), {"change": staticmethod(Tensor.clone)})
        prepared = prepare(PROGRAM, qompose.compose(kind()))
        plain = type("Plain", (Foreign,), {"targets": Changing.targets})
        assert not plan_of(prepared).rewrites
        assert graph_text(prepared) == graph_text(prepare(PROGRAM, qompose.compose(plain())))


def operators_behind(node: Node) -> list[Node]:
    """The operators that read a value, as it is or observed."""
    found: list[Node] = []
    for user in node.users:
        found += operators_behind(user) if user.op == "call_module" else [user]
    return found


class TestMarks:
    """Entries of meta, for tools that come later."""

    KEY = "_arm_annotation_info"

    def marked(self, module: GraphModule) -> list[str]:
        return names(n for n in calls(module) if self.KEY in (n.meta.get("custom") or {}))

    @pytest.mark.parametrize("order", [0, 1], ids=["alone", "behind another"])
    def test_they_stay_on_what_it_owns_and_only_there(self, order: int) -> None:
        prepared = prepare(PROGRAM, qompose.compose(*[Linears()] * order + [Marking()]))
        owned = [
            name for c in plan_of(prepared).claims for name in c.nodes if c.owner == "tests.Marking"
        ]
        assert sorted(self.marked(prepared)) == sorted(owned)
        assert owned == (["silu"] if order else ["linear", "silu", "linear_1"])
        matched = [n for n in prepared.graph.nodes if "quantizer_matched" in n.meta]
        assert sorted(names(n for n in matched if n.op == "call_function")) == sorted(owned)
        parameters = [n for n in prepared.graph.nodes if n.op == "get_attr"]
        read = names(n for n in parameters if {*names(operators_behind(n))} & {*owned})
        assert read == ([] if order else [name for name in names(parameters) if name != "mask"])
        assert names(n for n in matched if n.op != "call_function") == read
        others = [n for n in prepared.graph.nodes if n.op != "call_function"]
        assert names(n for n in others if self.KEY in (n.meta.get("custom") or {})) == read

    def test_they_outlast_conversion_and_saving(self, tmp_path: Any) -> None:
        prepared = prepare(PROGRAM, qompose.compose(Linears(), Marking()))
        prepared(X)
        converted = qompose.convert_pt2e(prepared)
        is_operator = {n.name for n in calls(converted) if "quantize_per" not in n.name}
        assert is_operator.intersection(self.marked(converted)) == {"silu"}
        torch.export.save(torch.export.export(converted, (X,)), tmp_path / "model.pt2")
        loaded = torch.export.load(tmp_path / "model.pt2")
        kept = [n for n in loaded.graph.nodes if self.KEY in (n.meta.get("custom") or {})]
        assert [n.target for n in kept if "quantize_per" not in n.name] == [SILU]

    def test_the_users_marks_stay_for_everybody(self) -> None:
        module = PROGRAM.module(check_guards=False)
        for node in calls(module):
            node.meta["custom"] = {"mine": node.name}
        prepared = prepare(module, qompose.compose(Linears(), Marking()))
        for node in calls(prepared):
            if "activation_post_process" not in node.name:
                assert node.meta["custom"]["mine"] == node.name
        assert self.marked(prepared) == ["silu"]

    @pytest.mark.parametrize("kind", [RebuildingInPieces, Decomposing])
    def test_they_stay_on_what_a_transform_made(self, kind: Any) -> None:
        class Both(kind):  # type: ignore[misc, valid-type]
            def annotate(self, model: GraphModule) -> Any:
                for node in calls(model, MUL):
                    node.meta["custom"] = {TestMarks.KEY: "product"}
                return super().annotate(model)

        prepared = prepare(PROGRAM, qompose.compose(Both(), Linears()))
        (product,) = calls(prepared, MUL)
        assert self.marked(prepared) == [product.name]

    def test_marks_that_hold_the_program_are_not_kept(self) -> None:
        """They would keep the copy alive that the member saw, and name nodes that are in no other."""

        class Holding(Foreign):
            def annotate(self, model: GraphModule) -> None:
                for node in self.wanted(model):
                    node.meta["custom"] = {"nodes": [node], "number": 3}
                    node.meta["node"] = node
                    node.meta["graph"] = {"of": model.graph}
                super().annotate(model)

        prepared = prepare(PROGRAM, qompose.compose(Holding()))
        for node in calls(prepared, LINEAR):
            assert not {"node", "graph"} & node.meta.keys()
            assert node.meta["custom"].keys() & {"nodes", "number"} == {"number"}


@pytest.mark.parametrize("name", GALLERY)
def test_what_nobody_claims_is_what_was_exported(name: str) -> None:
    """Operators outside of claims keep target, arguments and provenance."""
    prepared = prepare(PROGRAM, qompose.compose(GALLERY[name]()))
    claimed = {n for claim in plan_of(prepared).claims for n in claim.nodes}
    claimed |= {n for rewrite in plan_of(prepared).rewrites for n in rewrite.nodes}
    found = {node.name: node for node in calls(prepared)}
    for node in calls(PROGRAM.module(check_guards=False)):
        if node.name not in claimed:
            assert found[node.name].target is node.target
            assert found[node.name].meta["nn_module_stack"] == node.meta["nn_module_stack"]
            assert "source_fn_stack" not in found[node.name].meta


def test_numbers_do_not_depend_on_the_batch_that_was_exported() -> None:
    program = export(net(), X, dynamic_shapes=[{0: torch.export.Dim("batch")}])
    prepared = prepare(program, qompose.compose(RebuildingInPieces(), Linears()))
    other = randn(3, 4, seed=5)
    torch.testing.assert_close(prepared(other), net()(other))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch 2.13, about itself
class TestCopies:
    """A transform that works on a copy of the program."""

    class Copying(Foreign):
        targets = (LINEAR,)

        def transform_for_annotation(self, model: GraphModule) -> GraphModule:
            return copy.deepcopy(model)

    def test_parameters_are_those_of_the_program(self) -> None:
        program = torch.export.export(PROGRAM.module(check_guards=False), (X,))
        prepared = prepare(program, qompose.compose(self.Copying()))
        assert not plan_of(prepared).rewrites
        own = dict(prepared.named_parameters())
        assert own and all(own[name] is program.state_dict[name] for name in own)

    def test_each_of_equal_parameters_is_its_own(self) -> None:
        net = seeded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        with torch.no_grad():
            for layer in net.children():
                layer.bias.zero_()
        prepared = prepare(export(net, X), qompose.compose(self.Copying()))
        assert all(prepared.get_parameter(name) is p for name, p in net.named_parameters())

    def test_what_it_changes_of_a_copy_is_a_rewrite(self) -> None:
        class Scaling(self.Copying):  # type: ignore[name-defined,misc]
            def transform_for_annotation(self, model: GraphModule) -> GraphModule:
                made = copy.deepcopy(model)
                with torch.no_grad():
                    next(made.parameters()).mul_(2)
                return made

        assert len(plan_of(prepare(PROGRAM, qompose.compose(Scaling()))).rewrites) == 1


def test_a_node_in_front_of_what_it_reads_is_named() -> None:
    class Hasty(Foreign):
        def transform_for_annotation(self, model: GraphModule) -> GraphModule:
            (silu, *_) = calls(model, SILU)
            silu.args[0].append(node := like(silu, aten.neg.default, silu))  # type: ignore[union-attr]
            silu.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)
            return model

    with pytest.raises(MemberError, match=r"^tests\.Hasty: .* neg\w* before its input silu\b"):
        prepare(PROGRAM, qompose.compose(Linears(), Hasty()))
