# SPDX-License-Identifier: Apache-2.0
"""Quantizers written for torchao or ExecuTorch as members of a composition, recognised by shape.

Such a quantizer annotates a snapshot of the program on which nobody else's annotations can be seen; what
it wrote becomes claims that are arbitrated like any other.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from qompose.annotations import propose_annotations
from qompose.claims import Claim, Proposal
from qompose.errors import UserError, blaming
from qompose.graph import copy_graph_module
from qompose.quantizer import Quantizer


def is_foreign_quantizer(candidate: object) -> bool:
    """Tell whether an object has the methods that engines of this field call on a quantizer."""
    return all(callable(getattr(candidate, name, None)) for name in ("annotate", "validate"))


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
    if not is_foreign_quantizer(quantizer):
        raise UserError(f"{quantizer!r} is no quantizer: it has no annotate and validate methods")
    return AdaptedQuantizer(quantizer)


class AdaptedQuantizer(Quantizer):
    """A quantizer of another engine, asked on a copy of itself and of the program."""

    def __init__(self, quantizer: Any) -> None:
        self.quantizer = quantizer

    @property
    def name(self) -> str:
        return (
            f"{type(self.quantizer).__module__.partition('.')[0]}.{type(self.quantizer).__name__}"
        )

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate `model` in place with a copy of the quantizer, so that it keeps no state of it."""
        copied(self.quantizer).annotate(model)
        return model

    def propose(
        self, model: GraphModule, taken: Sequence[Claim], on_conflict: str = "error"
    ) -> Proposal:
        """Return its claims on the program; earlier members' claims are hidden from it."""
        proposal = propose_annotations(self.name, self.annotate, model, (), on_conflict)
        change = self._rewrite_it_wants(model)
        if change:
            proposal.notes.append(change)
        return proposal

    def _rewrite_it_wants(self, model: GraphModule) -> str | None:
        """Return a note where its transform would rewrite the program, which is not done for it."""
        transform = getattr(self.quantizer, "transform_for_annotation", None)
        if transform is None:
            return None
        before = copy_graph_module(model)
        with blaming(f"{self.name}: transform_for_annotation"):
            after = copied(self.quantizer).transform_for_annotation(copy_graph_module(model))
        if not isinstance(after, GraphModule):
            raise UserError(
                f"{self.name}: transform_for_annotation returned {after!r}, not a GraphModule"
            )
        if str(after.graph) == str(before.graph):
            return None
        return f"{self.name}: its transform_for_annotation was not applied: it rewrites operators"

    def validate(self, model: GraphModule) -> None:
        copied(self.quantizer).validate(model)

    def prepare_obs_or_fq_callback(
        self, model: GraphModule, edge_or_node_to_obs_or_fq: Any
    ) -> None:
        callback = getattr(self.quantizer, "prepare_obs_or_fq_callback", None)
        if callback is not None:
            callback(model, edge_or_node_to_obs_or_fq)


def copied(quantizer: Any) -> Any:
    """Return a deep copy of a quantizer, or itself where it cannot be copied."""
    try:
        return copy.deepcopy(quantizer)
    except (TypeError, ValueError, AttributeError):
        return quantizer
