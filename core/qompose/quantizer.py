# SPDX-License-Identifier: Apache-2.0
"""Quantizers: the interface, the one that works from a rule table, and the composition of several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from torch import nn
from torch.fx import GraphModule, Node

from qompose.annotations import propose_annotations, write_annotations
from qompose.arbitration import compose_claims
from qompose.backend import Backend
from qompose.capabilities import Capabilities, capability_rows
from qompose.claims import Claim, Proposal
from qompose.errors import ConfigError, UserError
from qompose.matching import propose_rules
from qompose.nested import nodes_in
from qompose.selectors import Selectors, check_regex, check_type_key
from qompose.specs import EdgeOrNode, QuantizationConfig, QuantizationSpec

if TYPE_CHECKING:
    from torch._ops import OpOverload, OpOverloadPacket


class Quantizer(ABC):
    """Says which operators of an exported program are quantized, and how.

    Subclasses annotate: `annotate` puts a QuantizationAnnotation into `node.meta` of the nodes it wants.
    A quantizer keeps no state of the programs it saw.
    """

    rewrites: tuple[str, ...] = ()
    """Names of the tentative rewrites (`qompose.rewrites`) that this quantizer asks for."""
    on_conflict: str = "error"
    """What happens when a member changes an earlier one's annotation; a composition may say "first"."""

    @property
    def name(self) -> str:
        """Return what reports call this quantizer."""
        return type(self).__name__

    @property
    def members(self) -> tuple[Quantizer, ...]:
        """Return the quantizers that make claims: this one, or those of a composition."""
        return (self,)

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Rewrite a copy of the program before it is annotated."""
        return model

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
        """Look at the program before any rewrite; return what of the settings applies to nothing."""
        return []

    def objection_to_rewrite(self, nodes: Sequence[Node]) -> str | None:
        """Return why operators of the exported program must not be merged into one, or None."""
        return None

    def objection_to_spec(self, claim: Claim, spec: QuantizationSpec) -> str | None:
        """Return why the parameter of one of this quantizer's claims cannot have `spec`, or None.

        It is asked where the parameter is tied to one that another claim wants otherwise.
        """
        return "its quantizer annotates, and says nothing of other specifications"

    def propose(
        self, model: GraphModule, taken: Sequence[Claim], on_conflict: str = "error"
    ) -> Proposal:
        """Return claims on `model`, given those of earlier members. `model` is left as it is."""
        return propose_annotations(self.name, self.annotate, model, taken, on_conflict)

    def quantization_capabilities(self) -> Capabilities:
        """Return what this quantizer can do, a row per pattern and configuration."""
        return Capabilities(())


class RuleQuantizer(Quantizer):
    """A quantizer that works from a backend's rule table and the user's selectors."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.rewrites = backend.rewrites
        self._selectors = Selectors()

    @property
    def name(self) -> str:
        return self.backend.name

    def set_global(self, config: QuantizationConfig | None) -> Self:
        """Use `config` for every operator that no other selector speaks of."""
        self._selectors.everything = self._checked(config)
        self._selectors.has_global = True
        return self

    def set_object_type(
        self,
        object_type: type[nn.Module] | OpOverload | OpOverloadPacket,
        config: QuantizationConfig | None,
    ) -> Self:
        """Use `config` for a module type, or for an aten operator.

        Raises:
            SelectorError: `object_type` is neither.
        """
        check_type_key(object_type)
        self._selectors.types.pop(object_type, None)  # the later setting comes last, and wins
        self._selectors.types[object_type] = self._checked(config)
        return self

    set_module_type = set_object_type
    set_operator_type = set_object_type

    def set_module_name_regex(self, regex: str, config: QuantizationConfig | None) -> Self:
        """Use `config` for the modules whose whole path `regex` matches.

        Raises:
            SelectorError: `regex` does not compile.
        """
        check_regex(regex)
        self._selectors.regexes.pop(regex, None)
        self._selectors.regexes[regex] = self._checked(config)
        return self

    def set_module_name(self, module_name: str, config: QuantizationConfig | None) -> Self:
        """Use `config` for one module and all inside it; None leaves them in float.

        A name that is not in the program is an error when the program is prepared.
        """
        self._selectors.names[module_name] = self._checked(config)
        return self

    def set_filter_function(self, function: Callable[[Node], bool]) -> Self:
        """Narrow all selectors to the operators for which `function(node)` is true."""
        self._selectors.filter_function = function
        return self

    def _checked(self, config: QuantizationConfig | None) -> QuantizationConfig | None:
        """Refuse a configuration that no rule, or no rule with a weight, of the backend can follow."""
        if config is None:
            return None
        if not isinstance(config, QuantizationConfig):
            raise ConfigError(
                f"{config!r} is no QuantizationConfig (None leaves operators in float)"
            )
        weighted = [rule for rule in self.backend.rules if rule.weight and config.weight]
        objections = [rule.objection(config) for rule in weighted or self.backend.rules]
        if all(objections):
            reasons = "\n".join(f"  - {reason}" for reason in dict.fromkeys(map(str, objections)))
            raise ConfigError(f"Backend {self.name!r} cannot follow {config}:\n{reasons}")
        return config

    def propose(
        self, model: GraphModule, taken: Sequence[Claim], on_conflict: str = "error"
    ) -> Proposal:
        return propose_rules(self.name, self.backend.rules, self._selectors, model)

    def check_program(self, exported: GraphModule) -> list[str]:
        """Check the selectors against the program.

        Raises:
            SelectorError: an exact module name is not in it.
        """
        operators = [node for node in nodes_in(exported) if node.op == "call_function"]
        self._selectors.check_names(operators, self.name)
        return [f"{self.name}: {note}" for note in self._selectors.unmatched(operators)]

    def objection_to_rewrite(self, nodes: Sequence[Node]) -> str | None:
        selections = [self._selectors.select(node) for node in nodes]
        chosen = [selection for selection in selections if selection.selected]
        for other in chosen[1:]:
            if other.config != chosen[0].config:
                return f"{other.selector} wants {other.config or 'float'} for a part of it"
        return None

    def objection_to_spec(self, claim: Claim, spec: QuantizationSpec) -> str | None:
        rule = self.backend.rule(claim.rule)
        constraint = rule.accepts.get("weight") if rule else None
        return constraint.objection("weight", spec) if constraint else None

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate as this quantizer alone would; for engines that read annotations."""
        self.check_program(model)
        write_annotations(model, compose_claims(model, labelled(self)).chosen)
        return model

    def quantization_capabilities(self) -> Capabilities:
        return capability_rows(self.backend)


class ComposableQuantizer(Quantizer):
    """Several quantizers as one; their order is their priority.

    Args:
        quantizers: the members; a composition among them is taken apart into its own members.
        on_conflict: "error" raises AnnotationConflictError when a member changes what an earlier one
            annotated; "first" undoes the change and lists it.

    Raises:
        UserError: there are no members, or one is not a quantizer.
    """

    def __init__(self, quantizers: Sequence[Quantizer], on_conflict: str = "error") -> None:
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
        self.quantizers = tuple(quantizers)
        self.on_conflict = on_conflict

    @property
    def members(self) -> tuple[Quantizer, ...]:
        return tuple(member for quantizer in self.quantizers for member in quantizer.members)

    @property
    def name(self) -> str:
        return "+".join(member.name for member in self.members)

    def check_program(self, exported: GraphModule) -> list[str]:
        return [note for member in self.members for note in member.check_program(exported)]

    def objection_to_rewrite(self, nodes: Sequence[Node]) -> str | None:
        objections = (member.objection_to_rewrite(nodes) for member in self.members)
        return next(filter(None, objections), None)

    def objection_to_spec(self, claim: Claim, spec: QuantizationSpec) -> str | None:
        labels = [label for label, _ in labelled(self)]
        return self.members[labels.index(claim.owner)].objection_to_spec(claim, spec)

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        for member in self.members:
            model = member.transform_for_annotation(model)
        return model

    def annotate(self, model: GraphModule) -> GraphModule:
        composition = compose_claims(model, labelled(self), self.on_conflict)
        write_annotations(model, composition.chosen)
        return model

    def validate(self, model: GraphModule) -> None:
        for member in self.members:
            member.validate(model)

    def prepare_obs_or_fq_callback(
        self, model: GraphModule, edge_or_node_to_obs_or_fq: dict[EdgeOrNode, nn.Module]
    ) -> None:
        for member in self.members:
            member.prepare_obs_or_fq_callback(model, edge_or_node_to_obs_or_fq)

    def propose(
        self, model: GraphModule, taken: Sequence[Claim], on_conflict: str = "error"
    ) -> Proposal:
        raise UserError("a composition makes no claims of its own: ask its members")

    def quantization_capabilities(self) -> Capabilities:
        result = Capabilities(())
        for member in self.members:
            result += member.quantization_capabilities()
        return result


def labelled(quantizer: Quantizer) -> list[tuple[str, Any]]:
    """Return (label, propose) of each member; a name that occurs again gets a number."""
    result: list[tuple[str, Any]] = []
    seen: dict[str, int] = {}
    for member in quantizer.members:
        seen[member.name] = seen.get(member.name, 0) + 1
        number = seen[member.name]
        result.append((member.name if number == 1 else f"{member.name}#{number}", member.propose))
    return result
