# SPDX-License-Identifier: Apache-2.0
"""The Quantizer interface, which all quantizers of qompose have."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from qompose.backend.capabilities import Capabilities
from qompose.errors import ConfigError
from qompose.quantizer.annotations import propose_annotations
from qompose.quantizer.interop.torchao_engine import transform_for_torchao
from qompose.spec.claim import PRIORITY, Claim, Proposal
from qompose.spec.quantization_spec import (
    QUANTIZERS,
    EdgeOrNode,
    QuantizationSpec,
    register_virtual_subclasses,
    virtual_subclass_of,
)


@virtual_subclass_of(QUANTIZERS, "Quantizer")
class Quantizer(ABC):
    """Decides which operators of an exported program are quantized, and how.

    Subclasses implement `annotate`, which puts a QuantizationAnnotation into `node.meta` of each node to
    quantize. A quantizer keeps no state about programs. torchao's `prepare_pt2e` accepts it too
    (`qompose.quantizer.interop.torchao_engine`).
    """

    rewrites: tuple[str, ...] = ()
    """Names of the tentative rewrites (`qompose.program.rewrites`) that this quantizer asks for."""
    on_conflict: str = PRIORITY
    """What happens where members want the same operators; a composition may say otherwise."""
    expects_folded = False
    """Whether its engine folds every batch norm before it asks: what it wants without is not meant."""
    _is_bound = False  # of copies that `bound` makes, which only qompose's engine has, it is True

    def __init__(self) -> None:
        register_virtual_subclasses()

    @property
    def name(self) -> str:
        """Return what reports call this quantizer."""
        return type(self).__name__

    @property
    def members(self) -> tuple[Quantizer, ...]:
        """Return the quantizers that make claims: this one, or the members of a composition."""
        return (self,)

    @property
    def labelled_members(self) -> list[tuple[str, Quantizer]]:
        """Return (label, member) pairs; repeated names are numbered."""
        names = [member.name for member in self.members]
        labels: list[str] = []
        for name in names:
            numbered = (f"{name}#{number}" for number in count(2))
            taken = {*labels, *names}  # a member may be called "x#2" itself
            free = next(n for n in numbered if n not in taken) if name in labels else name
            labels.append(free)
        return list(zip(labels, self.members, strict=True))

    def bound(self, exported: GraphModule) -> Quantizer:
        """Return a copy of this quantizer with its settings resolved for one program, before any rewrite.

        The copy answers for that program only and is then discarded.

        Raises:
            SelectorError: a setting names something that is not in the program.
        """
        return self

    def start(self) -> None:
        """Reset what hooks share; the engine calls this before the first of them."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Rewrite a copy of the program before it is annotated, in place or as a new module.

        A graph without an output node, as `Graph.graph_copy` makes them, returns what the program returned.

        The default is for other engines: it applies the `rewrites` that claims cover. qompose's engine
        applies those itself and calls only overrides.
        """
        return model if self._is_bound else transform_for_torchao(model, self)

    @abstractmethod
    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate the nodes of `model` in place and return it."""

    def validate(self, model: GraphModule) -> None:
        """Raise an error if the annotated program cannot run on the backend."""

    def prepare_obs_or_fq_callback(
        self, model: GraphModule, edge_or_node_to_obs_or_fq: dict[EdgeOrNode, nn.Module]
    ) -> None:
        """Look at, or replace, the observers before they are inserted."""

    def check_program(self, exported: GraphModule) -> list[str]:
        """Return the settings that matched nothing; called after the program was annotated."""
        return []

    def objection_to_rewrite(self, claim: Claim, nodes: Sequence[Node]) -> str | None:
        """Return why operators must not be rewritten for one of this quantizer's claims, or None."""
        return None

    def objection_to_spec(self, claim: Claim, spec: QuantizationSpec) -> str | None:
        """Return why the parameter of one of this quantizer's claims cannot have `spec`, or None.

        Called if the parameter is tied to one for which another claim has a different specification.
        """
        return "its quantizer accepts no other specification"

    def propose(
        self, model: GraphModule, taken: Sequence[Claim], on_conflict: str = PRIORITY
    ) -> Proposal:
        """Return claims on `model`, given those of earlier members. `model` is left unchanged."""
        return propose_annotations(self.name, self.annotate, model, taken, on_conflict)

    def quantization_capabilities(self) -> Capabilities:
        """Return what this quantizer can do, as a row for each pattern and configuration."""
        return Capabilities((), silent=(self.name,))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON data, which `qompose.quantizer.quantizer_from_dict` reads.

        Raises:
            ConfigError: they contain something that JSON cannot express, such as a function.
        """
        raise ConfigError(
            f"{self.name} is defined in code and cannot be saved; construct it in code instead of "
            "loading it"
        )

    def to_json(self) -> str:
        """Return the settings as JSON text; see `to_dict`."""
        return json.dumps(self.to_dict(), indent=2)
