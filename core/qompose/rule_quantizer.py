# SPDX-License-Identifier: Apache-2.0
"""The quantizer that works from a backend's rule table and the user's selectors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.fx import GraphModule, Node

from qompose.backend import Backend
from qompose.capabilities import Capabilities, capability_rows
from qompose.claims import Claim, Proposal
from qompose.configuring import selectors_to_data
from qompose.errors import ConfigError, SelectorError, UserError
from qompose.graph import owner_of
from qompose.hosting import annotate_for_host, name_observers
from qompose.matching import propose_rules
from qompose.quantizer import Quantizer, labelled
from qompose.repairs.words import BIAS_CORRECTION
from qompose.rewrites import ADD_BIAS
from qompose.rules import Rule
from qompose.selection import Assignment
from qompose.selectors import (
    ObjectType,
    Selectors,
    check_predicate,
    for_call,
    for_everything,
    for_filter,
    for_kind,
    for_name,
    for_regex,
    for_subgraph,
    kind_of,
)
from qompose.specs import EdgeOrNode, QuantizationConfig, QuantizationSpec

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on


class RuleQuantizer(Quantizer):
    """A quantizer that works from a backend's rule table and the user's selectors (`qompose.selectors`)."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self.rewrites = backend.rewrites
        self._selectors = Selectors()
        self._assignment: Assignment | None = None  # that of the program a copy is bound to

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def selectors(self) -> Selectors:
        """Return a copy of the settings made so far."""
        return self._selectors.copy()

    def set_global(self, config: QuantizationConfig | None) -> Self:
        """Use `config` for every operator that no other selector speaks of."""
        self._selectors.set(for_everything(self._checked(config)))
        return self

    def set_object_type(self, object_type: ObjectType, config: QuantizationConfig | None) -> Self:
        """Use `config` for a module type, an aten operator, or what a function of torch is exported as.

        Raises:
            SelectorError: `object_type` is none of these.
        """
        self._selectors.set(for_kind(kind_of(object_type), self._checked(config)))
        return self

    def set_module_type(
        self, module_type: type[nn.Module], config: QuantizationConfig | None
    ) -> Self:
        """Use `config` for what modules of a type compute, their submodules included.

        Raises:
            SelectorError: `module_type` is no type of module.
        """
        if not kind_of(module_type).modules:
            raise SelectorError(
                f"{module_type!r} is no torch.nn.Module type: see set_operator_type"
            )
        return self.set_object_type(module_type, config)

    def set_operator_type(
        self, operator_type: ObjectType, config: QuantizationConfig | None
    ) -> Self:
        """Use `config` for an aten operator, or what a function of torch is exported as.

        Raises:
            SelectorError: `operator_type` is neither.
        """
        if not kind_of(operator_type).operators:
            raise SelectorError(f"{operator_type!r} is no operator: see set_module_type")
        return self.set_object_type(operator_type, config)

    def set_module_name_regex(self, regex: str, config: QuantizationConfig | None) -> Self:
        """Use `config` for what is inside modules whose whole path `regex` matches; the first set wins.

        Raises:
            SelectorError: `regex` does not compile.
        """
        self._selectors.set(for_regex(regex, self._checked(config)))
        return self

    def set_filter(
        self, function: Callable[[Node], object], config: QuantizationConfig | None
    ) -> Self:
        """Use `config` for the operators of the exported program for which `function(node)` is true.

        It is called once for every operator, in graph order.

        Raises:
            SelectorError: `function` cannot be called.
        """
        self._selectors.set(for_filter(function, self._checked(config)))
        return self

    def set_module_name(self, module_name: str, config: QuantizationConfig | None) -> Self:
        """Use `config` for one module and all inside it; None leaves them in float.

        A name that is not in the program is an error when the program is prepared.
        """
        self._selectors.set(for_name(module_name, self._checked(config)))
        return self

    def set_subgraph(
        self,
        inputs: str | Sequence[str],
        outputs: str | Sequence[str],
        config: QuantizationConfig | None,
    ) -> Self:
        """Use `config` for all that lies on a path from `inputs` to `outputs`, these included.

        Args:
            inputs, outputs: names of operators of the exported program, or paths of modules.
        """
        self._selectors.set(for_subgraph(inputs, outputs, self._checked(config)))
        return self

    def set_module_name_object_type_order(
        self,
        module_name: str,
        object_type: ObjectType,
        index: int,
        config: QuantizationConfig | None,
    ) -> Self:
        """Use `config` for the call number `index`, from 0, that one module itself makes.

        Args:
            module_name: path of the module; "" is the model itself. Calls in its submodules do not count.
            object_type: the operator or function it calls, or the type of submodules.
        """
        kind = kind_of(object_type)
        self._selectors.set(for_call(module_name, kind, index, self._checked(config)))
        return self

    def set_filter_function(self, function: Callable[[Node], object]) -> Self:
        """Narrow all selectors to the operators for which `function(node)` is true.

        Raises:
            SelectorError: `function` cannot be called.
        """
        check_predicate(function)
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
        rules = weighted or self.backend.rules
        if all(rule.objection(config) for rule in rules):
            reasons = "\n".join(f"  - {reason}" for reason in _objections(rules, config))
            raise ConfigError(f"Backend {self.name!r} cannot follow {config}:\n{reasons}")
        return config

    def bound(self, exported: GraphModule) -> Self:
        copied = copy.copy(self)
        try:
            copied._assignment, copied._is_bound = Assignment(self._selectors, exported), True
        except SelectorError as error:
            raise SelectorError(f"{self.name}: {error}") from None
        if any(BIAS_CORRECTION in config.repairs for config in self._selectors.configs()):
            copied.rewrites = (*self.rewrites, ADD_BIAS)
        return copied

    def _assigned(self, program: GraphModule) -> Assignment:
        assignment = self._assignment or self.bound(program)._assignment
        assert assignment is not None
        return assignment

    def propose(
        self, model: GraphModule, taken: Sequence[Claim], on_conflict: str = "error"
    ) -> Proposal:
        backend, assigned = self.backend, self._assigned(model)
        return propose_rules(self.name, backend.rules, assigned, model, backend.left_in_float)

    def check_program(self, exported: GraphModule) -> list[str]:
        """Return which selectors apply to nothing.

        Raises:
            SelectorError: an exact name is not in the program.
            UserError: a subclass has an `annotate` of its own, which this engine would not call.
        """
        if type(self).annotate is not RuleQuantizer.annotate:
            raise UserError(
                f"{type(self).__name__} has an annotate of its own, and a quantizer that works from a rule "
                "table makes its claims in propose: override that, narrow it by selectors (set_filter picks "
                "by any predicate), or derive from qompose.Quantizer"
            )
        return [f"{self.name}: {note}" for note in self._assigned(exported).notes()]

    def objection_to_rewrite(self, claim: Claim, nodes: Sequence[Node]) -> str | None:
        assignment = self._assigned(owner_of(nodes[0]))
        chosen = [s for s in map(assignment.select, nodes) if s.selected]
        for other in chosen[1:]:
            if other.config != chosen[0].config:
                return f"{other.selector} wants {other.config or 'float'} for a part of it"
        return None

    def objection_to_spec(self, claim: Claim, spec: QuantizationSpec) -> str | None:
        rule = self.backend.rule(claim.rule)
        constraint = rule.accepts.get("weight") if rule else None
        return constraint.objection("weight", spec) if constraint else None

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate what nobody annotated before; for engines that read annotations (`qompose.hosting`)."""
        return annotate_for_host(model, self, labelled)

    def prepare_obs_or_fq_callback(
        self, model: GraphModule, edge_or_node_to_obs_or_fq: dict[EdgeOrNode, nn.Module]
    ) -> None:
        name_observers(edge_or_node_to_obs_or_fq)

    def to_dict(self) -> dict[str, Any]:
        make = self.backend.quantizer_class
        if type(self) is not RuleQuantizer and (make is None or type(self) is not type(make())):
            return super().to_dict()
        return {
            "backend": self.name,
            "selectors": selectors_to_data(self._selectors, self.backend.configs),
        }

    def with_selectors(self, selectors: Selectors) -> Self:
        """Return a quantizer of the same backend that has these settings and no others.

        Raises:
            ConfigError: the backend cannot follow one of their configurations.
        """
        if not isinstance(selectors, Selectors):
            raise ConfigError(f"{selectors!r} are no selectors: take those of a quantizer")
        for config in selectors.configs():
            self._checked(config)
        copied = copy.copy(self)
        copied._selectors = selectors.copy()
        return copied

    def quantization_capabilities(self) -> Capabilities:
        return capability_rows(self.backend, self._selectors.configs())


def _objections(rules: Sequence[Rule], config: QuantizationConfig) -> Iterator[str]:
    """Yield what the rules object to; those of another mode are counted where there are some of this one."""
    fitting = [rule for rule in rules if rule.mode_for(config) in rule.modes]
    yield from dict.fromkeys(str(rule.objection(config)) for rule in fitting or rules)
    others = len(rules) - len(fitting)
    if fitting and others:
        yield f"{others} other rules have no {config.mode} form"
