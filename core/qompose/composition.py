# SPDX-License-Identifier: Apache-2.0
"""The quantizer that is made of several."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.fx import GraphModule, Node

from qompose.capabilities import Capabilities
from qompose.claims import Claim, Proposal
from qompose.errors import ConfigError, UserError, blaming
from qompose.hosting import annotate_for_host, name_observers
from qompose.oversight import overseen
from qompose.quantizer import Quantizer, labelled
from qompose.specs import EdgeOrNode, QuantizationSpec

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on


class ComposableQuantizer(Quantizer):
    """Several quantizers as one; their order is their priority.

    Args:
        quantizers: the members; a composition among them is taken apart into its own members, which keep
            their order and come under this one's `on_conflict`.
        on_conflict: "error" raises AnnotationConflictError when a member changes what an earlier one
            annotated; "first" undoes the change and lists it.

    Raises:
        UserError: there are no members, or one is not a quantizer.
        ConfigError: a composition among them has another `on_conflict`.
    """

    def __init__(self, quantizers: Sequence[Quantizer], on_conflict: str = "error") -> None:
        super().__init__()
        if on_conflict not in ("error", "first"):
            raise ConfigError(f'on_conflict={on_conflict!r} is neither "error" nor "first"')
        if not quantizers:
            raise UserError(
                "A composition needs at least one quantizer, or the name of an installed backend. "
                "`qompose backends` lists what is installed."
            )
        for quantizer in quantizers:
            if not isinstance(quantizer, Quantizer):
                raise UserError(
                    f"{quantizer!r} is not a qompose.Quantizer; qompose.compose wraps quantizers of "
                    "other engines"
                )
            nested = isinstance(quantizer, ComposableQuantizer)
            if nested and quantizer.on_conflict != on_conflict:
                raise ConfigError(
                    f"{quantizer.name} is a composition with on_conflict={quantizer.on_conflict!r}, and it "
                    f"would be taken apart into one with on_conflict={on_conflict!r}, which is for all "
                    "members. Give both the same one."
                )
        self.quantizers = tuple(quantizers)
        self.on_conflict = on_conflict

    @property
    def members(self) -> tuple[Quantizer, ...]:
        return tuple(member for quantizer in self.quantizers for member in quantizer.members)

    @property
    def name(self) -> str:
        return "+".join(member.name for member in self.members)

    def bound(self, exported: GraphModule) -> Self:
        copied = copy.copy(self)
        once: dict[int, Quantizer] = {}  # a member that occurs again asks its predicates once
        for member in self.quantizers:
            if id(member) not in once:
                once[id(member)] = member.bound(exported)
        copied.quantizers = tuple(once[id(member)] for member in self.quantizers)
        copied._is_bound = True
        return copied

    def check_program(self, exported: GraphModule) -> list[str]:
        return [note for member in self.quantizers for note in member.check_program(exported)]

    def _owner(self, claim: Claim) -> Quantizer:
        labels = [label for label, _ in labelled(self)]
        return self.members[labels.index(claim.owner)]

    def objection_to_rewrite(self, claim: Claim, nodes: Sequence[Node]) -> str | None:
        return self._owner(claim).objection_to_rewrite(claim, nodes)

    def objection_to_spec(self, claim: Claim, spec: QuantizationSpec) -> str | None:
        return self._owner(claim).objection_to_spec(claim, spec)

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Make the members' rewrites in `model`, in their order, and return it.

        Raises:
            UserError: a member returned something else than a GraphModule.
            MemberError: a member raised an error of its own.
        """
        model = super().transform_for_annotation(model)
        for member in self.quantizers:
            if type(member).transform_for_annotation is Quantizer.transform_for_annotation:
                continue  # its rewrites are made: those of all members at once
            with blaming(f"{member.name}: transform_for_annotation"):
                model = member.transform_for_annotation(model)
            if not isinstance(model, GraphModule):
                raise UserError(
                    f"{member.name}: transform_for_annotation returned {model!r}, not a GraphModule"
                )
        return model

    def annotate(self, model: GraphModule) -> GraphModule:
        return annotate_for_host(model, self, labelled)

    def validate(self, model: GraphModule) -> None:
        for member in self.quantizers:
            with blaming(f"{member.name}: validate"):
                member.validate(model)

    def prepare_obs_or_fq_callback(
        self, model: GraphModule, edge_or_node_to_obs_or_fq: dict[EdgeOrNode, nn.Module]
    ) -> None:
        for member in self.quantizers:
            with (
                blaming(f"{member.name}: prepare_obs_or_fq_callback"),
                overseen(member.name, model, edge_or_node_to_obs_or_fq),
            ):
                member.prepare_obs_or_fq_callback(model, edge_or_node_to_obs_or_fq)
        name_observers(edge_or_node_to_obs_or_fq)

    def propose(
        self, model: GraphModule, taken: Sequence[Claim], on_conflict: str = "error"
    ) -> Proposal:
        """Refuse: claims are made by the members.

        Raises:
            UserError: always.
        """
        raise UserError("a composition makes no claims of its own: ask its members")

    def to_dict(self) -> dict[str, Any]:
        if type(self) is not ComposableQuantizer:
            return super().to_dict()
        return {
            "on_conflict": self.on_conflict,
            "members": [quantizer.to_dict() for quantizer in self.quantizers],
        }

    def quantization_capabilities(self) -> Capabilities:
        result = Capabilities(())
        for member in self.members:
            result += member.quantization_capabilities()
        return result
