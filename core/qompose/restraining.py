# SPDX-License-Identifier: Apache-2.0
"""A quantizer without selectors of its own, told to leave some operators in float."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn
from torch.fx import GraphModule, Node

from qompose.capabilities import Capabilities
from qompose.claims import Claim, Proposal, Rejection, standing_on
from qompose.hosting import annotate_for_host
from qompose.nested import nodes_in
from qompose.quantizer import Quantizer, labelled
from qompose.selection import Assignment
from qompose.selectors import Selectors, Setting
from qompose.specs import EdgeOrNode, QuantizationSpec

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on


class Restrained(Quantizer):
    """A quantizer whose claims are not heard where settings say float; all else is its own.

    Args:
        member: any quantizer that annotates: of another engine, or code.
        settings: selectors that leave operators in float.
    """

    def __init__(self, member: Quantizer, settings: Iterable[Setting]) -> None:
        super().__init__()
        self.member, self.settings = member, tuple(settings)
        self.rewrites, self.on_conflict = member.rewrites, member.on_conflict
        self.works_apart = member.works_apart
        self._assignment: Assignment | None = None

    @property
    def name(self) -> str:
        return self.member.name

    def also(self, settings: Iterable[Setting]) -> Restrained:
        """Return a quantizer with more settings."""
        return Restrained(self.member, (*self.settings, *settings))

    def bound(self, exported: GraphModule) -> Self:
        copied = copy.copy(self)
        copied.member, copied._is_bound = self.member.bound(exported), True
        copied._assignment = Assignment(Selectors(list(self.settings)), exported)
        return copied

    def propose(
        self, model: GraphModule, taken: Sequence[Claim], on_conflict: str = "error"
    ) -> Proposal:
        """Return the member's claims but for those that cover an operator which a setting leaves in float."""
        assignment = self._assignment or self.bound(model)._assignment
        assert assignment is not None
        proposal = self.member.propose(model, taken, on_conflict)
        nodes = {node.name: node for node in nodes_in(model)}
        kept, refused = [], list(proposal.rejections)
        for claim in proposal.claims:
            covered = standing_on(claim, proposal.changes).territory
            chosen = (assignment.select(nodes[name]) for name in covered if name in nodes)
            by = next((selection.selector for selection in chosen if selection.selected), None)
            if by is None:
                kept.append(claim)
            else:
                refused.append(
                    Rejection(claim.owner, claim.rule, claim.nodes, f"left in float by {by}")
                )
        return replace(proposal, claims=kept, rejections=refused)

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        if type(self.member).transform_for_annotation is Quantizer.transform_for_annotation:
            return super().transform_for_annotation(model)
        return self.member.transform_for_annotation(model)

    def annotate(self, model: GraphModule) -> GraphModule:
        return annotate_for_host(model, self, labelled)

    def validate(self, model: GraphModule) -> None:
        self.member.validate(model)

    def prepare_obs_or_fq_callback(
        self, model: GraphModule, edge_or_node_to_obs_or_fq: dict[EdgeOrNode, nn.Module]
    ) -> None:
        self.member.prepare_obs_or_fq_callback(model, edge_or_node_to_obs_or_fq)

    def check_program(self, exported: GraphModule) -> list[str]:
        return self.member.check_program(exported)

    def objection_to_rewrite(self, claim: Claim, nodes: Sequence[Node]) -> str | None:
        return self.member.objection_to_rewrite(claim, nodes)

    def objection_to_spec(self, claim: Claim, spec: QuantizationSpec) -> str | None:
        return self.member.objection_to_spec(claim, spec)

    def quantization_capabilities(self) -> Capabilities:
        return self.member.quantization_capabilities()
