# SPDX-License-Identifier: Apache-2.0
"""Bodies of control flow: a member changes each when it is asked about it, and their calls stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import qompose
import torch
from qompose import UserError
from qompose.program.control_flow import bodies_of, is_nested_call
from qompose.program.graph import get_attribute, set_attribute
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.core.quantizer.interop import transforms
from tests.core.quantizer.interop.aligning import aligned, applied, exported_function
from tests.core.quantizer.interop.foreign import INT8, KEY, Annotation, Foreign, aten, calls
from tests.core.toy import export, graph_text, plan_of, prepare, randn, seeded

X = randn(4, 4)
COND = torch.ops.higher_order.cond


class Branches(nn.Module):
    """Branches that a transform changes, an operator around them that it changes, and another call."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, lambda x: x + 1.0, lambda x: x * 2.0, (x,))
        with torch.no_grad():
            z = (y * 3.0).sin()
        return z * 4.0


BRANCHES = export(seeded(Branches()), X)
SCALARS = (aten.add.Tensor, aten.mul.Tensor)


def scalars_to_tensors(model: GraphModule) -> GraphModule:
    for node in calls(model, *SCALARS):
        if isinstance(node.args[1], float):
            node.update_arg(1, transforms.constant(model, node, torch.tensor(node.args[1])))
    model.recompile()
    return model


def everywhere(model: GraphModule) -> GraphModule:
    """What is done in bodies is made anew, and read under other paths, as passes that trace do."""
    for call in [node for node in model.graph.nodes if is_nested_call(node)]:
        for number, body in enumerate(bodies_of(call)):
            path = f"made_{call.name}_{number}"
            set_attribute(model, path, everywhere(body))
            with model.graph.inserting_before(call):
                read = model.graph.get_attr(path)
            old = next(n for n in call.all_input_nodes if n.op == "get_attr" and _reads(n, body))
            call.replace_input_with(old, read)
            model.graph.erase_node(old)
    return scalars_to_tensors(model)


def _reads(node: Node, body: GraphModule) -> bool:
    return get_attribute(node.graph.owning_module, str(node.target)) is body  # type: ignore[arg-type]


class Everywhere(Foreign):
    """Its transform changes bodies from outside too; it annotates edges at the ends of programs."""

    targets = SCALARS

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        return everywhere(model)

    def annotate(self, model: GraphModule) -> None:
        super().annotate(model)
        end = model.graph.output_node()
        end.meta[KEY] = Annotation(dict.fromkeys(end.all_input_nodes, INT8))


class Here(Everywhere):
    """The same, and its transform leaves bodies alone."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        return scalars_to_tensors(model)


def test_what_is_done_in_bodies_from_outside_makes_no_difference() -> None:
    prepared = prepare(BRANCHES, qompose.compose(Everywhere()))
    assert graph_text(prepared) == graph_text(prepare(BRANCHES, qompose.compose(Here())))
    changed = {name for rewrite in plan_of(prepared).rewrites for name in rewrite.nodes}
    assert {"true_graph_0_add", "false_graph_0_mul", "mul_1"} <= changed
    assert not any("cond" in name or "wrap" in name for name in changed)
    for x in (X.abs(), -X.abs()):
        torch.testing.assert_close(prepared(x), BRANCHES.module()(x))
    converted = qompose.convert_pt2e(prepared)
    for x in (X.abs(), -X.abs()):
        expected = BRANCHES.module()(x)
        assert (converted(x) - expected).norm() < 0.05 * expected.norm()


def two_branches(module: nn.Module, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin() + 1.0, lambda x: x * 2.0, (x.exp(),)).tanh()


PROGRAM = exported_function(two_branches, X)


def test_the_bodies_are_those_of_the_program() -> None:
    alignment, before, after = aligned(PROGRAM, everywhere)
    assert alignment.changes == ()
    for ours, theirs in zip(_bodies(before), _bodies(after), strict=True):
        assert [n.name for n in ours.graph.nodes] == [n.name for n in theirs.graph.nodes]
        assert ours is not theirs, "an edit of one would be one of the other"


def _bodies(program: GraphModule) -> list[GraphModule]:
    (call,) = transforms.sites(program, COND)
    return bodies_of(call)


def test_what_is_around_a_call_changes_without_it() -> None:
    """An operator is put in front of what the call reads, and one behind it; bodies are changed as well."""

    def transform(own: GraphModule) -> GraphModule:
        own = everywhere(own)
        (tanh,) = transforms.sites(own, aten.tanh.default)
        (exp,) = transforms.sites(own, aten.exp.default)
        twice = transforms.insert(exp, aten.mul.Tensor, exp.args[0], 1.0)
        exp.update_arg(0, twice)
        value = tanh.args[0]
        tanh.update_arg(0, transforms.insert(tanh, aten.add.Tensor, value, 0.0))
        own.recompile()
        return own

    alignment, before, _ = aligned(PROGRAM, transform)
    whole = applied(PROGRAM, alignment, alignment.changes)
    pieces = {name for change in alignment.changes for name in change.pieces}
    assert "exp" in pieces and "cond" not in pieces
    torch.testing.assert_close(whole(X), before(X))
    names = [[n.name for n in body.graph.nodes] for body in _bodies(before)]
    assert [[n.name for n in body.graph.nodes] for body in _bodies(whole)] == names


def swapped(own: GraphModule) -> GraphModule:
    """cond(not p, b, a) for cond(p, a, b)."""
    for call in transforms.sites(own, COND):
        condition, yes, no, operands = call.args
        inverse = transforms.insert(call, aten.logical_not.default, condition)
        call.args = (inverse, no, yes, operands)
    own.recompile()
    return own


def inlined(own: GraphModule) -> GraphModule:
    """The false branch, whatever the condition says."""
    for call in transforms.sites(own, COND):
        (getitem,) = call.users
        transforms.replace(getitem, transforms.insert(call, aten.mul.Tensor, call.args[3][0], 2.0))  # type: ignore[index]
    own.graph.eliminate_dead_code()
    own.recompile()
    return own


def widened(own: GraphModule) -> GraphModule:
    """Hands the bodies one operand more."""
    for call in transforms.sites(own, COND):
        *others, operands = call.args
        for body in bodies_of(call):
            last = [n for n in body.graph.nodes if n.op == "placeholder"][-1]
            with body.graph.inserting_after(last):
                body.graph.placeholder("more").meta = dict(last.meta)
            body.recompile()
        call.args = (*others, (*operands, operands[0]))  # type: ignore[misc, index]
    own.recompile()
    return own


@pytest.mark.parametrize("transform", [swapped, inlined, widened])
class TestRefused:
    """More than the inside of bodies: nobody could say what the member's claims inside them mean then."""

    def test_by_the_alignment(self, transform: transforms.Transform) -> None:
        with pytest.raises(UserError, match="it changed cond by more than what is in the graphs"):
            aligned(PROGRAM, transform)

    def test_a_member_is_asked_about_the_program_as_it_is(
        self, transform: Callable[[GraphModule], GraphModule]
    ) -> None:
        class Changing(Here):
            def transform_for_annotation(self, model: GraphModule) -> GraphModule:
                return transform(model)

        class AsItIs(Here):
            def transform_for_annotation(self, model: GraphModule) -> GraphModule:
                return model

        prepared = prepare(BRANCHES, qompose.compose(Changing()))
        assert graph_text(prepared) == graph_text(prepare(BRANCHES, qompose.compose(AsItIs())))
        (note,) = [n for n in plan_of(prepared).notes if "was refused" in n]
        assert "tests.Changing" in note and "cond" in note
