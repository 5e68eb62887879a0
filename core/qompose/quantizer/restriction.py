# SPDX-License-Identifier: Apache-2.0
"""`restrict`: a quantizer without selectors, and the parts of a program that it is kept out of."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.fx import GraphModule, Node

from qompose.backend.capabilities import Capabilities
from qompose.errors import SelectorError, UserError
from qompose.program.control_flow import nodes_in
from qompose.quantizer.base import Quantizer
from qompose.quantizer.interop.foreign_quantizer import adapt
from qompose.quantizer.interop.torchao_engine import annotate_for_torchao
from qompose.quantizer.rule_quantizer import RuleQuantizer
from qompose.quantizer.selector_matching import Assignment
from qompose.spec.claim import PRIORITY, Claim, Proposal, Rejection
from qompose.spec.quantization_spec import EdgeOrNode, QuantizationSpec
from qompose.spec.selectors import Selectors, Setting, setting_of

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on


class Restricted(Quantizer):
    """A quantizer whose claims are dropped where settings say float; all else is its own.

    Args:
        member: any quantizer that annotates: of another engine, or code.
        excluded: selectors of operators that it leaves in float.
        only: selectors of the operators that it may take, None for all.
    """

    def __init__(
        self,
        member: Quantizer,
        excluded: Iterable[Setting] = (),
        only: Iterable[Setting] | None = None,
    ) -> None:
        super().__init__()
        self.member, self.excluded = member, tuple(excluded)
        self.only = None if only is None else tuple(only)
        self.rewrites, self.on_conflict = member.rewrites, member.on_conflict
        self.expects_folded = member.expects_folded
        self._bounds: _Bounds | None = None

    @property
    def name(self) -> str:
        return self.member.name

    def without(self, settings: Iterable[Setting]) -> Restricted:
        """Return a quantizer that leaves more operators in float."""
        return Restricted(self.member, (*self.excluded, *settings), self.only)

    def bound(self, exported: GraphModule) -> Self:
        copied = copy.copy(self)
        copied.member, copied._is_bound = self.member.bound(exported), True
        try:
            copied._bounds = _Bounds(self.excluded, self.only, exported)
        except SelectorError as error:
            raise SelectorError(f"restrict({self.name}): {error}") from None
        return copied

    def start(self) -> None:
        self.member.start()

    def propose(
        self, model: GraphModule, taken: Sequence[Claim], on_conflict: str = PRIORITY
    ) -> Proposal:
        """Return the member's claims but for those on operators that it is kept out of."""
        bounds = self._bounds or self.bound(model)._bounds
        assert bounds is not None
        proposal = self.member.propose(model, taken, on_conflict)
        nodes = {node.name: node for node in nodes_in(model)}
        reasons = [bounds.objection([nodes[name] for name in c.nodes]) for c in proposal.claims]
        pairs = list(zip(proposal.claims, reasons, strict=True))
        out = [_refused(claim, reason) for claim, reason in pairs if reason]
        return replace(
            proposal,
            claims=[claim for claim, reason in pairs if not reason],
            rejections=[*proposal.rejections, *out],
            withdrawn=[*proposal.withdrawn, *(claim for claim, reason in pairs if reason)],
        )

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        if type(self.member).transform_for_annotation is Quantizer.transform_for_annotation:
            return super().transform_for_annotation(model)
        return self.member.transform_for_annotation(model)

    def annotate(self, model: GraphModule) -> GraphModule:
        return annotate_for_torchao(model, self)

    def validate(self, model: GraphModule) -> None:
        self.member.validate(model)

    def prepare_obs_or_fq_callback(
        self, model: GraphModule, edge_or_node_to_obs_or_fq: dict[EdgeOrNode, nn.Module]
    ) -> None:
        self.member.prepare_obs_or_fq_callback(model, edge_or_node_to_obs_or_fq)

    def check_program(self, exported: GraphModule) -> list[str]:
        bounds = self._bounds or self.bound(exported)._bounds
        assert bounds is not None
        own = [f"restrict({self.name}): {note}" for note in bounds.notes()]
        return [*self.member.check_program(exported), *own]

    def objection_to_rewrite(self, claim: Claim, nodes: Sequence[Node]) -> str | None:
        return self.member.objection_to_rewrite(claim, nodes)

    def objection_to_spec(self, claim: Claim, spec: QuantizationSpec) -> str | None:
        return self.member.objection_to_spec(claim, spec)

    def quantization_capabilities(self) -> Capabilities:
        return self.member.quantization_capabilities()


def _refused(claim: Claim, reason: str) -> Rejection:
    return Rejection(claim.owner, claim.rule, claim.nodes, reason)


class _Bounds:
    """Where in one program a quantizer may claim operators."""

    def __init__(
        self, excluded: Iterable[Setting], only: Iterable[Setting] | None, exported: GraphModule
    ) -> None:
        self._outside = Assignment(Selectors(list(excluded)), exported)
        self._inside = None if only is None else Assignment(Selectors(list(only)), exported)

    def objection(self, region: Sequence[Node]) -> str | None:
        """Return why a region may not be claimed, None where it may.

        An input or a parameter has no module or operator: what reads it decides.
        """
        calls = [node for node in region if node.op == "call_function"]
        readers = [[user for node in region for user in node.users]]
        regions = [calls] if calls else readers
        reasons = [self._objection(node) for nodes in regions for node in nodes]
        if not calls:
            return reasons[0] if reasons and all(reasons) else None
        return next((reason for reason in reasons if reason), None)

    def _objection(self, node: Node) -> str | None:
        if (by := self._outside.select(node)).selected:
            return f"left in float by {by.selector}"
        if self._inside is not None and not self._inside.select(node).selected:
            return f"{node.name} is outside the only= selectors"
        return None

    def notes(self) -> list[str]:
        """Return the selectors that pick nothing."""
        both = [self._outside, *([] if self._inside is None else [self._inside])]
        return [note for assignment in both for note in assignment.notes()]


def restrict(
    quantizer: Any, *, exclude: Iterable[object] = (), only: Iterable[object] | None = None
) -> Quantizer:
    """Keep a quantizer without selectors, such as one of torchao, out of parts of a model.

    What it annotates there is dropped, as whole regions, and later members may claim it. What its
    `transform_for_annotation` rewrites stays.

    Args:
        quantizer: a quantizer of another engine, or one that annotates.
        exclude: what it must not quantize: paths of modules, regular expressions (`re.compile`) of such
            paths, module types, aten operators, torch functions, or predicates of a `torch.fx.Node`.
        only: the same forms; everything else is excluded.

    Raises:
        UserError: `quantizer` has selectors, or is a composition or not a quantizer.
        SelectorError: an entry has none of these forms; when the program is prepared, a path is that of no
            module. Another entry that matches nothing is a note, and an error there with `strict=True`.
    """
    adapted = adapt(quantizer)
    if isinstance(adapted, RuleQuantizer):
        raise UserError(
            f"{adapted.name} has selectors; use set_module_name(path, None) and similar methods"
        )
    if adapted.members != (adapted,):
        raise UserError(
            f"{adapted.name} is a composition; restrict its members before composing them"
        )
    left = _settings(adapted.name, "exclude", exclude)
    wanted = None if only is None else _settings(adapted.name, "only", only)
    if not isinstance(adapted, Restricted):
        return Restricted(adapted, left, wanted)
    if wanted is not None and adapted.only is not None:
        raise UserError(f"{adapted.name} is already restricted by only=; combine both in one only=")
    both = adapted.only if wanted is None else wanted
    return Restricted(adapted.member, (*adapted.excluded, *left), both)


def _settings(name: str, argument: str, entries: object) -> tuple[Setting, ...]:
    if isinstance(entries, (str, re.Pattern)) or not isinstance(entries, Iterable):
        raise SelectorError(
            f"restrict({name}): {argument}= must be a list of selectors, got {entries!r}"
        )
    try:
        return tuple(setting_of(entry, None) for entry in entries)
    except SelectorError as error:
        raise SelectorError(f"restrict({name}), {argument}=: {error}") from None
