# SPDX-License-Identifier: Apache-2.0
"""Claims that refer to what another member would annotate, and does not because it lost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import qompose
import torch
from qompose.errors import SharingError
from qompose.quantizer.arbitration import inherit_specs, unresolved
from qompose.spec.claim import Claim, Point, PointSpec, shared_with
from torch import nn
from torch.fx import GraphModule, Node

from tests.core.quantizer.interop.foreign import (
    INT8 as ACTIVATION,
    Annotation,
    Derived,
    Foreign,
    Tanhs,
    bias_scale,
    derived_bias,
    put,
)
from tests.core.toy import INT8, UINT8, Model, export, graph_text, plan_of, prepare, randn, seeded

X = randn(6, 4)
PROGRAM = export(seeded(Model(lambda m, x: torch.tanh(m.a(x)), a=nn.Linear(4, 4))), X)


class Biases(Foreign):
    """Annotates biases alone, by what others say of what is multiplied."""

    output: Any = None

    def asked(self, node: Node) -> Any:
        return Annotation({node.args[2]: derived_bias(node)}, self.output)


class AndOutputs(Biases):
    """The output as well, which needs nobody."""

    output = ACTIVATION


class Linears(Foreign):
    """Annotates inputs of the program too."""

    def annotate(self, model: GraphModule) -> None:
        super().annotate(model)
        for node in model.graph.nodes:
            if node.op == "placeholder":
                put(node, output=ACTIVATION)


def claims(prepared: GraphModule) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for claim in plan_of(prepared).claims:
        found.setdefault(claim.owner, set()).update(str(spec.point) for spec in claim.specs)
    return found


LINEARS = {"x -> linear", "a_weight -> linear", "output of linear", "output of x"}


@pytest.mark.parametrize("others", list(itertools.permutations([Linears, Tanhs])))
def test_what_cannot_stand_alone_takes_nothing(others: Any) -> None:
    """The member whose claim it needs has its place, wherever it stands; both are named."""
    members = [kind() for kind in others]
    expected = prepare(PROGRAM, qompose.compose(*members))
    prepared = prepare(PROGRAM, qompose.compose(Biases(), *members))
    assert graph_text(prepared) == graph_text(expected)
    assert claims(prepared) == claims(expected)
    assert claims(prepared)["tests.Linears"] == LINEARS
    (note,) = [n for n in plan_of(prepared).notes if "a_bias -> linear" in n]
    assert "tests.Biases" in note and "tests.Linears" in note
    assert plan_of(prepared).idle_owners == ("tests.Biases",)
    lost = {(c.winner, c.loser) for c in plan_of(prepared).conflicts}
    assert lost == {("tests.Linears", "tests.Biases")}
    assert not any("lost" in row.reason for row in qompose.report(prepared).rows if row.owner)


def test_what_can_keeps_its_place_without_it() -> None:
    prepared = prepare(PROGRAM, qompose.compose(AndOutputs(), Linears()))
    assert claims(prepared)["tests.AndOutputs"] == {"output of linear"}
    (note,) = [n for n in plan_of(prepared).notes if "a_bias -> linear" in n]
    assert "tests.AndOutputs" in note and "tests.Linears" in note
    assert ("tests.AndOutputs", "tests.Linears") in {
        (c.winner, c.loser) for c in plan_of(prepared).conflicts
    }
    prepared(X)
    qompose.convert_pt2e(prepared)


def test_what_nobody_annotates_is_an_error() -> None:
    with pytest.raises(SharingError, match=r"a_bias -> linear \(tests\.Biases.*x -> linear"):
        prepare(PROGRAM, qompose.compose(Biases(), Tanhs()))


def test_what_an_earlier_member_annotates_elsewhere_is_used() -> None:
    """A claim that refers to another region's points, of a member before it, is none of these."""

    class Cosines(Tanhs):
        def asked(self, node: Node) -> Any:
            source = node.args[0]
            spec = Derived(
                [source], lambda o: o[0].calculate_qparams(), torch.int8, -128, 127,
                torch.per_tensor_affine,
            )  # fmt: skip
            return Annotation({}, spec)

    for members in ([Linears(), Cosines()], [Cosines(), Linears()]):
        prepared = prepare(PROGRAM, qompose.compose(*members))
        assert claims(prepared)["tests.Cosines"] == {"output of tanh"}
        assert claims(prepared)["tests.Linears"] == LINEARS


def claim(owner: str, node: str, *specs: PointSpec) -> Claim:
    return Claim(owner=owner, rule="r", anchor=node, nodes=(node,), output=node, specs=specs)


class TestOrphaned:
    """Claims by hand."""

    derived = qompose.spec.DerivedQuantizationSpec([], bias_scale, torch.int8)
    a, b, c = (Point(name) for name in "abc")
    needy = claim("one", "b", PointSpec(b, derived, (a,)))

    def test_a_reason_names_place_and_loser_and_who_won(self) -> None:
        loser = claim("three", "x", PointSpec(self.a, INT8))
        winner = claim("two", "x", PointSpec(Point("x"), INT8))
        for others, words in ([winner], ("of a", "three", "two")), ([], ("of a", "three")):
            (reason,) = unresolved([self.needy, *others], [loser]).values()
            assert all(word in reason for word in words)

    def test_what_shares_with_it_goes_too(self) -> None:
        follower = claim("one", "c", shared_with(self.c, self.b))
        loser = claim("three", "a", PointSpec(self.a, INT8))
        assert unresolved([self.needy, follower], [loser]).keys() == {self.b, self.c}

    def test_what_stands_or_is_nobodys_is_no_reason(self) -> None:
        standing = claim("two", "a", PointSpec(self.a, INT8))
        loser = claim("three", "a", PointSpec(self.a, INT8))
        assert unresolved([self.needy, standing], [loser]) == unresolved([self.needy], []) == {}

    def test_each_owner_inherits_what_it_meant(self) -> None:
        """Two members lost the same place, each of which wanted integers of its own there."""
        wanted = {"one": (self.b, INT8), "two": (self.c, UINT8)}
        chosen = [claim(owner, "x", shared_with(p, self.a)) for owner, (p, _) in wanted.items()]
        lost = [claim(owner, "a", PointSpec(self.a, spec)) for owner, (_, spec) in wanted.items()]
        inherited = [spec.spec for each in inherit_specs(chosen, lost) for spec in each.specs]
        assert inherited == [INT8, UINT8]

    def test_an_owner_inherits_at_each_place_that_it_lost(self) -> None:
        places = {Point("d"): (self.a, INT8), Point("e"): (self.b, UINT8)}
        chosen = [claim("one", "x", *(shared_with(p, at) for p, (at, _) in places.items()))]
        lost = [claim("one", at.source, PointSpec(at, spec)) for at, spec in places.values()]
        (inherited,) = inherit_specs(chosen, lost)
        assert [spec.spec for spec in inherited.specs] == [INT8, UINT8]

    def test_an_owner_inherits_no_further_than_what_stands(self) -> None:
        """It lost a place that shares with another, which stands, though not by its own claim."""
        shared = [shared_with(self.b, self.a), shared_with(self.a, Point("d"))]
        lost = [claim("one", spec.point.source, spec) for spec in shared]
        chosen = [claim("one", "x", shared_with(self.c, self.b))]
        chosen += [claim("two", "a", PointSpec(self.a, INT8))]
        inherited, _ = inherit_specs(chosen, lost)
        assert [spec.references for spec in inherited.specs] == [(self.a,)]
