# SPDX-License-Identifier: Apache-2.0
"""Quantizers of torchao and ExecuTorch, unmodified, as members of a composition.

Quantizers written for torchao or ExecuTorch as members of a composition, recognised by shape.

Such a quantizer rewrites and annotates a copy of the program that is its own: it sees nothing of other
members, and they see nothing of it. What it wrote becomes claims, arbitrated like any other. What it
rewrote is found by comparing the copy with the program (`alignment`), and made in the program only where
one of its claims stands.

Asking a foreign quantizer about a program: its hooks, in the order that engines of this field call them.

It works on copies of itself and of the program, behind a fence. What it did shows in the copy.

What a quantizer writes into nodes' meta besides annotations, for tools that come later.

Partitioners of several backends look for such entries on the operators that their quantizer annotated.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from qompose.errors import QomposeWarning, UserError, blaming
from qompose.program.aten_operators import with_sources, without_sources
from qompose.program.control_flow import nodes_in
from qompose.program.graph import copy_graph_module
from qompose.program.meta import ANNOTATION_KEY, CUSTOM_KEY, PROVENANCE
from qompose.quantizer.annotations import annotated_nodes, claims_of
from qompose.quantizer.base import Quantizer, labelled
from qompose.quantizer.interop.alignment import Alignment, align
from qompose.quantizer.interop.correspondence import stamp
from qompose.quantizer.interop.process_state import USED_RANDOM_NUMBERS, fenced
from qompose.quantizer.interop.sandbox import (
    edited,
    own_constants,
    program_of,
    sizes_kept,
    tensors_kept,
)
from qompose.quantizer.interop.torchao_engine import annotate_for_host
from qompose.spec.claim import Apply, Change, Claim, Proposal, clear_annotations, node_annotation
from qompose.spec.quantization_spec import EdgeOrNode

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on


def adapt(quantizer: Any) -> Quantizer:
    """Return a quantizer written for another engine as one of qompose's own.

    Raises:
        UserError: it has no `annotate` and `validate`.
    """
    if isinstance(quantizer, Quantizer):
        return quantizer
    if isinstance(quantizer, (str, list, tuple)):
        raise UserError(
            f"{quantizer!r} is no quantizer; qompose.compose makes one of names and members"
        )
    if isinstance(quantizer, type):
        raise UserError(f"{quantizer.__name__} is a class, not a quantizer: call it")
    if not is_quantizer(quantizer):
        kind = type(quantizer)
        program = isinstance(quantizer, (nn.Module, ExportedProgram))
        remedy = "; the program comes first, then the quantizer" if program else ""
        raise UserError(
            f"An object of {kind.__module__}.{kind.__qualname__} is no quantizer: it has no annotate and "
            f"validate methods{remedy}"
        )
    return AdaptedQuantizer(quantizer)


class AdaptedQuantizer(Quantizer):
    """A quantizer of another engine, asked on a copy of itself and of the program."""

    works_apart = True

    def __init__(self, quantizer: Any) -> None:
        super().__init__()
        self.quantizer = quantizer
        self._asking: Asking | None = None  # as it was asked last: hooks may build on one another
        self._heard: dict[str, Proposal] | None = None

    @property
    def name(self) -> str:
        kind = type(self.quantizer)
        return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"

    def bound(self, exported: GraphModule) -> Self:
        bound = copy.copy(self)
        bound._is_bound = True
        bound._heard = {}  # a program that occurs again in one prepare is annotated once
        return bound

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate for another engine; rewrite `model` in place where the quantizer's claims need it."""
        return annotate_for_host(model, self, labelled)

    def propose(
        self, model: GraphModule, taken: Sequence[Claim], on_conflict: str = "error"
    ) -> Proposal:
        """Return its claims on the program; those of other members are hidden from it."""
        if self._heard is None:
            return self._ask(model)
        program = str(model.graph)
        if program not in self._heard:
            self._heard[program] = self._ask(model)
        return self._heard[program]

    def _ask(self, model: GraphModule) -> Proposal:
        self._asking = Asking(self.name, self.quantizer)
        return self._asking.about(model)

    def prepare_obs_or_fq_callback(
        self, model: GraphModule, edge_or_node_to_obs_or_fq: dict[EdgeOrNode, nn.Module]
    ) -> None:
        asking = self._asking or Asking(self.name, self.quantizer)
        said = Proposal()
        hook = "prepare_obs_or_fq_callback"
        if not hasattr(asking.member, hook):
            return
        with (
            sizes_kept(model) as assumed,
            tensors_kept(model, self.name, buffers=True),
        ):  # the common program
            asking.call(said, hook, model, edge_or_node_to_obs_or_fq)
        if assumed:
            said.notes.append(
                f"{self.name}: {hook} let torch assume {', '.join(assumed)}, which was undone"
            )
        for note in said.notes:  # the plan is made already
            warnings.warn(note, QomposeWarning, stacklevel=2)


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


_OURS = {*PROVENANCE, ANNOTATION_KEY, "val", "tensor_meta"}


def marks_between(before: GraphModule, after: GraphModule) -> dict[str, dict[str, Any]]:
    """Return the entries that nodes of `after` have beyond those of the same name in `before`.

    Entries under "custom" are compared one by one. Those that hold nodes or graphs are left out: they
    would keep a copy of the program alive, and mean nothing in another one.
    """
    known = {node.name: node.meta for node in before.graph.nodes}
    pairs = ((node, known[node.name]) for node in after.graph.nodes if node.name in known)
    found = {node.name: dict(_entries(node.meta, meta)) for node, meta in pairs}
    return {name: entries for name, entries in found.items() if entries}


def _entries(meta: Mapping[str, Any], earlier: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in meta.items():
        if key not in earlier and key not in _OURS and _is_plain(value):
            yield key, value
    had = earlier.get("custom") or {}
    custom = {
        key: value
        for key, value in (meta.get("custom") or {}).items()
        if key not in had and key != CUSTOM_KEY and _is_plain(value)
    }
    if custom:
        yield "custom", custom


def _is_plain(value: object) -> bool:
    parts = [*pytree.tree_leaves(value), *getattr(value, "__dict__", {}).values()]
    return not any(isinstance(part, (Node, Graph, GraphModule)) for part in parts)
