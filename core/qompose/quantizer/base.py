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
    """Says which operators of an exported program are quantized, and how.

    Subclasses annotate: `annotate` puts a QuantizationAnnotation into `node.meta` of the nodes it wants.
    A quantizer keeps no state of the programs it saw. torchao's `prepare_pt2e` takes it too
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
        """Return the quantizers that make claims: this one, or those of a composition."""
        return (self,)

    @property
    def labelled_members(self) -> list[tuple[str, Quantizer]]:
        """Return (label, member) of each member; a name that occurs again gets a number."""
        names = [member.name for member in self.members]
        labels: list[str] = []
        for name in names:
            numbered = (f"{name}#{number}" for number in count(2))
            taken = {*labels, *names}  # a member may be called "x#2" itself
            free = next(n for n in numbered if n not in taken) if name in labels else name
            labels.append(free)
        return list(zip(labels, self.members, strict=True))

    def bound(self, exported: GraphModule) -> Quantizer:
        """Return this quantizer with its settings applied to one program, before any rewrite.

        The copy is asked about that program and let go of; the quantizer itself keeps nothing of it.

        Raises:
            SelectorError: a setting names something exactly that is not in the program.
        """
        return self

    def start(self) -> None:
        """Forget what hooks remember of one another; the engine is going to call them from the first on."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Rewrite a copy of the program before it is annotated.

        As it stands, this is for other engines: it makes the `rewrites` that claims cover. qompose's own
        engine makes those itself, and calls what overrides this.
        """
        return model if self._is_bound else transform_for_torchao(model, self)

    @abstractmethod
    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate the nodes of `model` in place and return it."""

    def validate(self, model: GraphModule) -> None:
        """Raise where the annotated program cannot run on the backend."""

    def prepare_obs_or_fq_callback(
        self, model: GraphModule, edge_or_node_to_obs_or_fq: dict[EdgeOrNode, nn.Module]
    ) -> None:
        """Look at, or replace, the observers before they are inserted."""

    def check_program(self, exported: GraphModule) -> list[str]:
        """Return what of the settings applies to nothing; asked once the program was annotated."""
        return []

    def objection_to_rewrite(self, claim: Claim, nodes: Sequence[Node]) -> str | None:
        """Return why operators of the exported program must not be merged for one of its claims, or None."""
        return None

    def objection_to_spec(self, claim: Claim, spec: QuantizationSpec) -> str | None:
        """Return why the parameter of one of this quantizer's claims cannot have `spec`, or None.

        It is asked where the parameter is tied to one that another claim wants otherwise.
        """
        return "its quantizer annotates, and says nothing of other specifications"

    def propose(
        self, model: GraphModule, taken: Sequence[Claim], on_conflict: str = PRIORITY
    ) -> Proposal:
        """Return claims on `model`, given those of earlier members. `model` is left as it is."""
        return propose_annotations(self.name, self.annotate, model, taken, on_conflict)

    def quantization_capabilities(self) -> Capabilities:
        """Return what this quantizer can do, a row per pattern and configuration."""
        return Capabilities((), silent=(self.name,))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON data, which `qompose.quantizer.quantizer_from_dict` reads.

        Raises:
            ConfigError: they hold what data cannot name, such as a function.
        """
        raise ConfigError(f"{self.name} is defined in code and cannot be saved; create it again")

    def to_json(self) -> str:
        """Return the settings as JSON text; see `to_dict`."""
        return json.dumps(self.to_dict(), indent=2)
