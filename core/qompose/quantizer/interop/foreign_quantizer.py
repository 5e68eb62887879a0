# SPDX-License-Identifier: Apache-2.0
"""Quantizers of torchao and ExecuTorch, unmodified, as members of a composition: recognised by shape.

Such a quantizer rewrites the common program in its turn, and annotates a copy of it that shows nothing of
what other members annotated. What it wrote there becomes claims, arbitrated like any other.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from qompose.backend.interface import Backend
from qompose.errors import UserError, blaming
from qompose.program.aten_operators import with_sources, without_sources
from qompose.program.control_flow import nodes_in
from qompose.program.rewrites import FOLD_WEIGHT
from qompose.quantizer.annotations import propose_annotations
from qompose.quantizer.base import Quantizer
from qompose.quantizer.interop.hook_guard import restore_process
from qompose.quantizer.interop.torchao_engine import annotate_for_torchao
from qompose.spec.claim import PRIORITY, Claim, Proposal, node_annotation
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
    if isinstance(quantizer, type):
        raise UserError(f"{quantizer.__name__} is a class, not a quantizer; create an instance")
    if not is_quantizer(quantizer):
        kind = type(quantizer)
        remedy = ""
        if isinstance(quantizer, (nn.Module, ExportedProgram)):
            remedy = "; stages take the program first, then the quantizer"
        elif isinstance(quantizer, (str, list, tuple)):
            remedy = "; create one from names and members with qompose.compose"
        elif isinstance(quantizer, Backend):
            remedy = "; pass qompose.RuleQuantizer(backend)"
        raise UserError(
            f"expected a quantizer, got {kind.__module__}.{kind.__qualname__}, which lacks "
            f"annotate() or validate(){remedy}"
        )
    return AdaptedQuantizer(quantizer)


class AdaptedQuantizer(Quantizer):
    """A quantizer of another engine. A copy of it is asked about each program, from its first hook on."""

    expects_folded = True
    rewrites = (FOLD_WEIGHT,)  # as its engine does with a parameter that it quantizes

    def __init__(self, quantizer: Any) -> None:
        super().__init__()
        self.quantizer = quantizer
        self._asked: Any = quantizer
        # Of one that cannot be copied, its attributes.
        self._before: Mapping[str, str] | None = None

    @property
    def name(self) -> str:
        kind = type(self.quantizer)
        return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"

    def bound(self, exported: GraphModule) -> Self:
        bound = copy.copy(self)
        bound._is_bound = True
        bound.start()
        return bound

    def start(self) -> None:
        self._asked, copied = _copied(self.name, self.quantizer)
        self._before = None if copied else _state(self.quantizer)

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Let the quantizer rewrite a program, which may become another object."""
        if not hasattr(self._asked, TRANSFORM):
            return model
        with_sources(model)
        result = self._call(TRANSFORM, model)
        if isinstance(result, GraphModule):
            without_sources(result)
        return result  # type: ignore[no-any-return]

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate for another engine."""
        return annotate_for_torchao(model, self)

    def propose(
        self, model: GraphModule, taken: Sequence[Claim], on_conflict: str = PRIORITY
    ) -> Proposal:
        """Return its claims on the program; those of other members are hidden from it."""
        notes: list[str] = []

        def validate(own: GraphModule) -> None:
            if self._call(VALIDATE, own) is False:
                notes.append(f"{self.name}: validate returned False")
            notes.extend(self._astray(own))

        proposal = propose_annotations(
            self.name, partial(self._call, ANNOTATE), model, (), on_conflict, validate=validate
        )
        return replace(proposal, notes=[*proposal.notes, *notes, *self._kept()])

    def prepare_obs_or_fq_callback(
        self, model: GraphModule, edge_or_node_to_obs_or_fq: dict[EdgeOrNode, nn.Module]
    ) -> None:
        if hasattr(self._asked, CALLBACK):
            self._call(CALLBACK, model, edge_or_node_to_obs_or_fq)

    def _call(self, hook: str, *arguments: Any) -> Any:
        with blaming(f"{self.name}: {hook}"), restore_process():
            return getattr(self._asked, hook)(*arguments)

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
            (
                f"{self.name} annotated {', '.join(inside)} in subgraphs; annotations there only "
                "count when it is called on the subgraph itself"
            )
        ]

    def _kept(self) -> list[str]:
        """Describe what a quantizer that cannot be copied keeps of the program."""
        if self._before is None:
            return []
        now = _state(self._asked)
        changed = [
            name
            for name in now.keys() | self._before.keys()
            if now.get(name) != self._before.get(name)
        ]
        if not changed:
            return []
        return [
            (
                f"{self.name} cannot be copied, so the original was used and changed: "
                f"{', '.join(sorted(changed))}"
            )
        ]


TRANSFORM, ANNOTATE, VALIDATE = "transform_for_annotation", "annotate", "validate"
CALLBACK = "prepare_obs_or_fq_callback"


def is_quantizer(candidate: object) -> bool:
    """Tell whether an object has the methods that engines of this field call on a quantizer."""
    return all(callable(getattr(candidate, name, None)) for name in (ANNOTATE, VALIDATE))


def _copied(name: str, quantizer: Any) -> tuple[Any, bool]:
    """Return a deep copy and True, or the quantizer itself and False where it cannot be copied.

    Raises:
        UserError: its copy is not a quantizer.
    """
    try:
        copied = copy.deepcopy(quantizer)
    except Exception:  # its own code, or that of what it holds, may refuse in any way
        return quantizer, False
    if not is_quantizer(copied):
        raise UserError(
            f"{name}: copy.deepcopy returned {copied!r}, which lacks annotate or validate. "
            "Fix the quantizer's __deepcopy__ (or __reduce__), or raise an error there if the "
            "quantizer cannot be copied"
        )
    return copied, True


def _state(quantizer: Any) -> Mapping[str, str]:
    return {name: repr(value) for name, value in getattr(quantizer, "__dict__", {}).items()}
