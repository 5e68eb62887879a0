# SPDX-License-Identifier: Apache-2.0
"""Asking a foreign quantizer about a program: its hooks, in the order that engines of this field call them.

It works on copies of itself and of the program, behind a fence. What it did shows in the copy.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from qompose.annotations import annotated_nodes, claims_of, clear_annotations, node_annotation
from qompose.claims import Apply, Change, Proposal
from qompose.errors import QomposeWarning, UserError, blaming
from qompose.graph import copy_graph_module
from qompose.interop.alignment import Alignment, align, stamp
from qompose.interop.constants import own_constants, tensors_kept
from qompose.interop.fence import fenced
from qompose.interop.marks import marks_between
from qompose.interop.process import USED_RANDOM_NUMBERS
from qompose.interop.sizes import sizes_kept
from qompose.nested import nodes_in
from qompose.oversight import edited, program_of
from qompose.sources import with_sources, without_sources

ANNOTATE, VALIDATE = "annotate", "validate"


class Asking:
    """One foreign quantizer, asked about one program.

    Args:
        name: what messages call it.
        quantizer: is copied; where that is impossible it is asked itself, and what it keeps is noted.
    """

    def __init__(self, name: str, quantizer: Any) -> None:
        self.name, self.quantizer = name, quantizer
        self._transforms = hasattr(quantizer, "transform_for_annotation")
        self.member, copied = _copied(name, quantizer)
        self._before = None if copied else _state(quantizer)

    def about(self, model: GraphModule) -> Proposal:
        """Let it transform, annotate and validate a copy of `model`, and return what it claims.

        Raises:
            MemberError: one of its hooks raised.
            UserError: what it returned or did is nothing that claims can be made of; the message names it.
        """
        proposal, own = Proposal(), _own_copy(model)
        with sizes_kept(own) as assumed, tensors_kept(own, self.name):
            own = self._transformed(proposal, own)
            with_sources(own)  # anew: operators that it made have copies of others' entries
            edits = self._annotated(proposal, own)
        without_sources(own)  # what it made may become part of the program, which can be saved
        try:
            with sizes_kept(own):
                alignment = align(model, own)
        except UserError as error:
            if not self._transforms:
                raise UserError(
                    f"{self.name}: {' and '.join(edits) or ANNOTATE}: {error}"
                ) from error
            return self._refused(model, str(error))
        proposal.notes += self._checked(edits, alignment, model)
        proposal.changes = alignment.changes
        proposal.apply, unproven = self._on_trust(alignment)
        proposal.marks = marks_between(model, own)
        proposal.claims = claims_of(self.name, annotated_nodes(own), proposal)
        proposal.notes += [
            *unproven,
            *self._assumptions(assumed),
            *self._astray(own),
            *self._kept(),
        ]
        return proposal

    def _annotated(self, proposal: Proposal, own: GraphModule) -> dict[str, list[str]]:
        """Let it annotate and validate; return the operators that it changed there, by hook."""
        before = program_of(own)
        self._annotate(proposal, own)
        annotated = program_of(own)
        answer = self.call(proposal, VALIDATE, own)
        if answer is False:
            proposal.notes.append(f"{self.name}: validate returned False")
        edits = {
            ANNOTATE: edited(before, annotated),
            VALIDATE: edited(annotated, program_of(own)),
        }
        return {hook: names for hook, names in edits.items() if names}

    def _checked(
        self, edits: Mapping[str, Sequence[str]], alignment: Alignment, model: GraphModule
    ) -> list[str]:
        """Describe changes that were made elsewhere than in the transform.

        Raises:
            UserError: they are not shown to compute the same.
        """
        wrong = [*alignment.unproven] if edits else []
        if wrong and self._transforms:
            by_transform = {change.nodes for change in self._unproven_of_transform(model)}
            wrong = [change for change in wrong if change.nodes not in by_transform]
        listed = [f"{hook} ({', '.join(names)})" for hook, names in edits.items()]
        if wrong:
            places = ", ".join(name for change in wrong for name in change.nodes or change.pieces)
            raise UserError(
                f"{self.name} changed the program in {' and in '.join(listed)}, and what it makes of "
                f"{places} could not be shown to compute the same: annotate may only annotate, and validate "
                "only look; transform_for_annotation is for changes"
            )
        return [
            f"{self.name} changed the program in {where}; that computes the same, and is done where a "
            "claim stands on it"
            for where in listed
        ]

    def _unproven_of_transform(self, model: GraphModule) -> Sequence[Change]:
        """Return what its transform alone makes that cannot be shown to compute the same."""
        again, own = Asking(self.name, self.quantizer), _own_copy(model)
        with sizes_kept(own), tensors_kept(own, self.name):
            own = again._transformed(Proposal(), own)
            without_sources(own)
            try:
                return align(model, own).unproven
            except UserError:
                return ()

    def _on_trust(self, alignment: Alignment) -> tuple[Apply, list[str]]:
        """Return what makes the changes, and warns of those that are unproven, and notes of these."""
        notes = {
            change: f"{self.name}: what its transform_for_annotation makes of {', '.join(change.nodes)} "
            "could not be shown to compute the same, and is taken on trust where a claim stands on it"
            for change in alignment.unproven
        }
        silent = dict(notes)

        def apply(
            working: GraphModule, changes: Collection[Change], called: Mapping[str, str]
        ) -> None:
            for change in changes:
                if change in silent:  # once, however often the program is made
                    warnings.warn(silent.pop(change), QomposeWarning, stacklevel=2)
            alignment.apply(working, changes, called)

        return apply, [*notes.values()]

    def _assumptions(self, assumed: Sequence[str]) -> list[str]:
        if not assumed:
            return []
        return [
            f"{self.name} lets torch assume {', '.join(dict.fromkeys(assumed))} of the program's sizes. That "
            "was undone, so the program takes the inputs that it took; where a claim stands on what "
            "its transform_for_annotation made under that assumption, it may fail for others"
        ]

    def call(self, proposal: Proposal, hook: str, *arguments: Any) -> Any:
        """Call a hook behind a fence, if there is one; what it did to the process becomes notes."""
        if not hasattr(self.member, hook):
            return None
        with blaming(f"{self.name}: {hook}"), fenced() as effects:
            result = getattr(self.member, hook)(*arguments)
        said = [effect for effect in effects if not effect.startswith(USED_RANDOM_NUMBERS)]
        proposal.notes += [f"{self.name}: {hook} {effect}" for effect in said]
        return result

    def _transformed(self, proposal: Proposal, own: GraphModule) -> GraphModule:
        if not self._transforms:
            return own
        result = self.call(proposal, "transform_for_annotation", own)
        if not isinstance(result, GraphModule):
            raise UserError(
                f"{self.name}: transform_for_annotation returned {result!r}, not a GraphModule"
            )
        return result

    def _refused(self, model: GraphModule, reason: str) -> Proposal:
        """Ask once more, about the program as it is: what the transform did to it cannot be followed."""
        again = Asking(self.name, self.quantizer)
        again._transforms = False
        proposal = again.about(model)
        proposal.notes.append(f"{self.name}: transform_for_annotation was refused: {reason}")
        self.member = again.member
        return proposal

    def _annotate(self, proposal: Proposal, own: GraphModule) -> None:
        result = self.call(proposal, ANNOTATE, own)
        if result is not None and result is not own:
            raise UserError(
                f"{self.name}: annotate returned another {type(result).__name__} than it was given; what it "
                "wrote there would be lost. It annotates the given program in place."
            )

    def _astray(self, own: GraphModule) -> list[str]:
        """Describe annotations in bodies, about which it is asked one by one."""
        inside = [
            node.name
            for node in nodes_in(own)
            if node.graph is not own.graph and node_annotation(node) is not None
        ]
        if not inside:
            return []
        return [
            f"{self.name} annotated {', '.join(inside)}, which are in bodies of the program that it was "
            "asked about; of these, what it annotates counts when it is asked about the body itself"
        ]

    def _kept(self) -> list[str]:
        """Describe what a quantizer that cannot be copied keeps of the program."""
        if self._before is None:
            return []
        now = _state(self.member)
        changed = [
            name
            for name in now.keys() | self._before.keys()
            if now.get(name) != self._before.get(name)
        ]
        if not changed:
            return []
        return [
            f"{self.name} cannot be copied, so it was asked itself, and changed: {', '.join(sorted(changed))}"
        ]


def _own_copy(model: GraphModule) -> GraphModule:
    own = copy_graph_module(model)
    own_constants(own)
    clear_annotations(own)
    stamp(own)
    with_sources(own)
    return own


def is_quantizer(candidate: object) -> bool:
    """Tell whether an object has the methods that engines of this field call on a quantizer."""
    return all(callable(getattr(candidate, name, None)) for name in (ANNOTATE, VALIDATE))


def _copied(name: str, quantizer: Any) -> tuple[Any, bool]:
    """Return a deep copy and True, or the quantizer itself and False where it cannot be copied.

    Raises:
        UserError: what it gives out for a copy is no quantizer.
    """
    try:
        copied = copy.deepcopy(quantizer)
    except Exception:  # its own code, or that of what it holds, may refuse in any way
        return quantizer, False
    if not is_quantizer(copied):
        raise UserError(
            f"{name}: copy.deepcopy of it gives {copied!r}, which has no annotate and validate methods; mend "
            "its __deepcopy__ (or __reduce__), or let it raise, if it cannot be copied"
        )
    return copied, True


def _state(quantizer: Any) -> Mapping[str, str]:
    return {name: repr(value) for name, value in getattr(quantizer, "__dict__", {}).items()}
