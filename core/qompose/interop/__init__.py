# SPDX-License-Identifier: Apache-2.0
"""Quantizers written for torchao or ExecuTorch as members of a composition, recognised by shape.

Such a quantizer rewrites and annotates a copy of the program that is its own: it sees nothing of other
members, and they see nothing of it. What it wrote becomes claims, arbitrated like any other. What it
rewrote is found by comparing the copy with the program (`alignment`), and made in the program only where
one of its claims stands.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from qompose.claims import Claim, Proposal
from qompose.errors import QomposeWarning, UserError
from qompose.hosting import annotate_for_host
from qompose.interop.asking import Asking, is_quantizer
from qompose.interop.constants import tensors_kept
from qompose.interop.sizes import sizes_kept
from qompose.quantizer import Quantizer, labelled
from qompose.specs import EdgeOrNode

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
