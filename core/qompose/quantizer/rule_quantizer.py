# SPDX-License-Identifier: Apache-2.0
"""RuleQuantizer: the quantizer that works from a backend's rule table, configured by selectors.

Its settings as JSON data::

    [{"select": "global", "config": "static per-channel"},
     {"select": "object type", "module type": "torch.nn.Linear", "config": null},
     {"select": "object type", "operator": "aten.add.Tensor", "config": null},
     {"select": "module name", "name": "head", "config": {"weight": {...}, ...}}]

A configuration is a name that its backend gives it, or spelt out (`observers.config`), or null
for float.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from qompose.backend.capabilities import Capabilities, capability_rows
from qompose.backend.discovery import backend_fault
from qompose.backend.interface import Backend
from qompose.backend.rule import Rule
from qompose.errors import ConfigError, SelectorError, UserError, near_names
from qompose.observers.config import config_from_json, config_to_json
from qompose.program.graph import owner_of
from qompose.program.rewrites import ADD_BIAS
from qompose.quantizer.base import Quantizer
from qompose.quantizer.interop.torchao_engine import annotate_for_torchao, name_observers
from qompose.quantizer.rule_matching import propose_rules
from qompose.quantizer.selector_matching import Assignment
from qompose.spec.algorithm_choice import wants_bias
from qompose.spec.claim import PRIORITY, Claim, Proposal
from qompose.spec.quantization_spec import EdgeOrNode, QuantizationConfig, QuantizationSpec
from qompose.spec.selectors import (
    CALL,
    FILTER,
    GLOBAL,
    NAME,
    REGEX,
    SUBGRAPH,
    TYPE,
    ConfigChoice,
    Kind,
    ObjectType,
    Selectors,
    Setting,
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

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on


class RuleQuantizer(Quantizer):
    """A quantizer that follows a backend's rule table and the user's selectors (`spec.selectors`).

    Selectors also accept the name of a configuration, as in `set_global("static per-channel")`, or a mode,
    which means the backend's first configuration of that mode.

    Raises:
        ConfigError: `backend` is not a `Backend`, it was written for another version of that interface, or
            its tables hold something else than they should.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        if not isinstance(backend, Backend):
            raise ConfigError(f"RuleQuantizer expects a Backend, got {backend!r}{_remedy(backend)}")
        fault = backend_fault(backend, "the package of the backend")
        if fault is not None:
            raise ConfigError(f"backend {backend.name}: {fault}")
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

    def set_global(self, config: ConfigChoice) -> Self:
        """Use `config` for every operator that no other selector matches."""
        self._selectors.set(for_everything(self._checked(config)))
        return self

    def set_object_type(self, object_type: ObjectType, config: ConfigChoice) -> Self:
        """Use `config` for a module type, an aten operator, or the operators of a torch function.

        Raises:
            SelectorError: `object_type` is not one of these.
        """
        self._selectors.set(for_kind(kind_of(object_type), self._checked(config)))
        return self

    def set_module_type(self, module_type: type[nn.Module], config: ConfigChoice) -> Self:
        """Use `config` for all operators in modules of a type, including their submodules.

        Raises:
            SelectorError: `module_type` is not a module type.
        """
        if not kind_of(module_type).modules:
            raise SelectorError(
                f"expected a torch.nn.Module type, got {module_type!r}; for an operator, use "
                "set_operator_type"
            )
        return self.set_object_type(module_type, config)

    def set_operator_type(self, operator_type: ObjectType, config: ConfigChoice) -> Self:
        """Use `config` for an aten operator, or the operators of a torch function.

        Raises:
            SelectorError: `operator_type` is neither.
        """
        if not kind_of(operator_type).operators:
            raise SelectorError(
                f"expected an operator or torch function, got {operator_type!r}; for a module "
                "type, use set_module_type"
            )
        return self.set_object_type(operator_type, config)

    def set_module_name_regex(self, regex: str, config: ConfigChoice) -> Self:
        """Use `config` inside modules whose whole path matches `regex`; the expression set first wins.

        Raises:
            SelectorError: `regex` does not compile.
        """
        self._selectors.set(for_regex(regex, self._checked(config)))
        return self

    def set_filter(self, function: Callable[[Node], bool], config: ConfigChoice) -> Self:
        """Use `config` for the operators of the exported program for which `function(node)` is true.

        It is called once for every operator, in graph order, when a program is prepared; what is neither True
        nor False is refused then.

        Raises:
            SelectorError: `function` cannot be called.
        """
        self._selectors.set(for_filter(function, self._checked(config)))
        return self

    def set_module_name(self, module_name: str, config: ConfigChoice) -> Self:
        """Use `config` for one module and everything inside it; None leaves it in float.

        A name that is not in the program is an error when the program is prepared.
        """
        self._selectors.set(for_name(module_name, self._checked(config)))
        return self

    def set_subgraph(
        self,
        inputs: str | Sequence[str],
        outputs: str | Sequence[str],
        config: ConfigChoice,
    ) -> Self:
        """Use `config` for all operators on a path from `inputs` to `outputs`, inclusive.

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
        config: ConfigChoice,
    ) -> Self:
        """Use `config` for one call in a module's own code: number `index`, counted from 0.

        Args:
            module_name: path of the module; "" is the model itself. Calls in its submodules do not count.
            object_type: the operator or function it calls, or the type of submodules.
        """
        kind = kind_of(object_type)
        self._selectors.set(for_call(module_name, kind, index, self._checked(config)))
        return self

    def set_filter_function(self, function: Callable[[Node], bool]) -> Self:
        """Narrow all selectors to the operators for which `function(node)` is true.

        Raises:
            SelectorError: `function` cannot be called.
        """
        check_predicate(function)
        self._selectors.filter_function = function
        return self

    def _checked(self, config: ConfigChoice) -> QuantizationConfig | None:
        """Refuse a configuration that no rule, or no rule with a weight, of the backend can follow."""
        if config is None:
            return None
        if isinstance(config, str):
            config = config_named(config, self.backend.configs, self.name)
        if not isinstance(config, QuantizationConfig):
            raise ConfigError(
                "config must be a QuantizationConfig, a configuration name, or None for "
                f"float, got {config!r}"
            )
        for option in config.options:
            _check_option(self.backend, option, config)
        weighted = [rule for rule in self.backend.rules if rule.weight and config.weight]
        rules = weighted or self.backend.rules
        if not rules:
            raise ConfigError(
                f"Backend {self.name!r} has no rules, so it supports no configuration"
            )
        if all(rule.objection(config) for rule in rules):
            reasons = "\n".join(f"  - {reason}" for reason in _objections(rules, config))
            raise ConfigError(f"Backend {self.name!r} does not support {config}:\n{reasons}")
        return config

    def bound(self, exported: GraphModule) -> Self:
        copied = copy.copy(self)
        try:
            copied._assignment, copied._is_bound = Assignment(self._selectors, exported), True
        except SelectorError as error:
            raise SelectorError(f"{self.name}: {error}") from None
        if any(map(wants_bias, self._selectors.configs())):
            copied.rewrites = (*self.rewrites, ADD_BIAS)
        return copied

    def _assigned(self, program: GraphModule) -> Assignment:
        assignment = self._assignment or self.bound(program)._assignment
        assert assignment is not None
        return assignment

    def propose(
        self, model: GraphModule, taken: Sequence[Claim], on_conflict: str = PRIORITY
    ) -> Proposal:
        backend, assigned = self.backend, self._assigned(model)
        return propose_rules(self.name, backend.rules, assigned, model, backend.left_in_float)

    def check_program(self, exported: GraphModule) -> list[str]:
        """Return the selectors that matched nothing.

        Raises:
            SelectorError: an exact name is not in the program.
            UserError: a subclass overrides `annotate`, which this engine would not call.
        """
        if type(self).annotate is not RuleQuantizer.annotate:
            raise UserError(
                f"{type(self).__name__} overrides annotate, but a quantizer with a rule table "
                "makes its claims in propose. Override propose, use selectors (set_filter "
                "accepts any predicate), or derive from qompose.Quantizer"
            )
        return [f"{self.name}: {note}" for note in self._assigned(exported).notes()]

    def objection_to_rewrite(self, claim: Claim, nodes: Sequence[Node]) -> str | None:
        assignment = self._assigned(owner_of(nodes[0]))
        chosen = [s for s in map(assignment.select, nodes) if s.selected]
        for other in chosen[1:]:
            if other.config != chosen[0].config:
                return f"{other.selector} sets {other.config or 'float'} for a part of it"
        return None

    def objection_to_spec(self, claim: Claim, spec: QuantizationSpec) -> str | None:
        rule = self.backend.rule(claim.rule)
        constraint = rule.accepts.get("weight") if rule else None
        return constraint.objection("weight", spec) if constraint else None

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate nodes without an annotation, for engines that read annotations (`torchao_engine`)."""
        return annotate_for_torchao(model, self)

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
            ConfigError: the backend does not support one of their configurations.
        """
        if not isinstance(selectors, Selectors):
            raise ConfigError(f"selectors must be a Selectors object, got {selectors!r}")
        for config in selectors.configs():
            self._checked(config)
        copied = copy.copy(self)
        copied._selectors = selectors.copy()
        return copied

    def quantization_capabilities(self) -> Capabilities:
        return capability_rows(self.backend, self._selectors.configs())


def _check_option(backend: Backend, option: str, config: QuantizationConfig) -> None:
    """Refuse an option that would be ignored: no rule has it, or none that has follows the configuration."""
    rules = [rule for rule in backend.rules if rule.option == option]
    if not rules:
        known = {rule.option for rule in backend.rules if rule.option}
        hint = near_names(option, known) or f". Available: {', '.join(sorted(known)) or 'none'}"
        raise ConfigError(f"Backend {backend.name!r} has no rule with the option {option!r}{hint}")
    reasons = [rule.objection(config) for rule in rules]
    if all(reasons):
        raise ConfigError(
            f"Backend {backend.name!r} does not support the option {option!r} of {config}: {reasons[0]}"
        )


def _remedy(given: object) -> str:
    if isinstance(given, str):
        return f"; qompose.quantizer_of({given!r}) returns the quantizer of an installed backend"
    return "; create an instance" if isinstance(given, type) and issubclass(given, Backend) else ""


def _objections(rules: Sequence[Rule], config: QuantizationConfig) -> Iterator[str]:
    """Yield what the rules object to; those of another mode are counted where there are some of this one."""
    fitting = [rule for rule in rules if rule.mode_for(config) in rule.modes]
    yield from dict.fromkeys(str(rule.objection(config)) for rule in fitting or rules)
    others = len(rules) - len(fitting)
    if fitting and others:
        yield f"{others} other rules do not support {config.mode} quantization"


Named = Mapping[str, QuantizationConfig]
Config = QuantizationConfig | None


def config_named(name: str, named: Named, owner: str) -> QuantizationConfig:
    """Return a backend's configuration of a name, or else its first one of a mode.

    Raises:
        ConfigError: it has neither.
    """
    if name in named:
        return named[name]
    of_mode = (config for config in named.values() if config.mode == name)
    found = next(of_mode, None)
    if found is None:
        raise ConfigError(
            f"Backend {owner!r} has no configuration {name!r}{near_names(name, named)}. "
            f"Available: {', '.join(map(repr, named)) or 'none'}"
        )
    return found


@dataclass(frozen=True)
class _Form:
    """How the key of one level is written: as which entries, and what makes a setting of them.

    With `kind`, one more entry is a module type or an operator.
    """

    write: Callable[[Any], dict[str, Any]]
    read: Callable[..., Setting]
    keys: Mapping[str, type]
    kind: bool = False


_MODULE, _OPERATOR = "module type", "operator"


def _type_of(kind: Kind) -> dict[str, str | list[str]]:
    names = sorted(kind.modules | kind.operators)
    return {_MODULE if kind.modules else _OPERATOR: names[0] if len(names) == 1 else names}


def _operators(written: object) -> Kind:
    """Return what the names of operators stand for: `aten.linear`, or a list of such."""
    listed = written if isinstance(written, list) else [written]
    names = [name for name in listed if isinstance(name, str)]
    if not names or len(names) < len(listed):
        raise SelectorError(f"operator must be a name or non-empty list of names, got {written!r}")
    unknown = [name for name in names if not _operator(name)]
    if unknown:
        raise SelectorError(
            f"no operator {' or '.join(map(repr, unknown))} is registered; if it belongs to "
            "another package, import that package first"
        )
    return Kind(operators=frozenset(names))


def _operator(name: str) -> bool:
    """Tell whether a name is that of an operator in this process: `aten.add` or `aten.add.Tensor`."""
    namespace, _, rest = name.partition(".")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), base, None) if base else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    return not overload or hasattr(packet, overload)


def _module(written: object) -> Kind:
    """Return a module type by a name under which it can be found, without importing anything.

    A class of a module that is not imported yet is known by its full name alone; whether the model has it
    is said when the model is prepared.
    """
    path = written.split(".") if isinstance(written, str) else []
    if len(path) < 2 or not all(part.isidentifier() or part == "<locals>" for part in path):
        raise SelectorError(f"{_MODULE} must be a name such as 'torch.nn.Linear', got {written!r}")
    home = max((n for n in range(1, len(path)) if ".".join(path[:n]) in sys.modules), default=0)
    found: Any = sys.modules[".".join(path[:home])] if home else None
    for part in path[home:]:
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if isinstance(found, type) and issubclass(found, nn.Module):
        return kind_of(found)
    if home == len(path) - 1:
        known = [
            n for n, v in vars(sys.modules[".".join(path[:home])]).items() if isinstance(v, type)
        ]
        raise SelectorError(f"{written!r} is not a module type{near_names(path[-1], known)}")
    return Kind(modules=frozenset({".".join(path)}))


_KINDS: dict[str, Callable[[object], Kind]] = {_MODULE: _module, _OPERATOR: _operators}
_FORMS: dict[str, _Form] = {
    GLOBAL: _Form(lambda key: {}, for_everything, {}),
    TYPE: _Form(_type_of, for_kind, {}, kind=True),
    REGEX: _Form(lambda key: {"regex": key}, for_regex, {"regex": str}),
    NAME: _Form(lambda key: {"name": key}, for_name, {"name": str}),
    SUBGRAPH: _Form(
        lambda key: {"inputs": list(key.inputs), "outputs": list(key.outputs)},
        lambda inputs, outputs, config: for_subgraph(tuple(inputs), tuple(outputs), config),
        {"inputs": list, "outputs": list},
    ),
    CALL: _Form(
        lambda key: {"name": key.module, **_type_of(key.kind), "index": key.index},
        lambda name, kind, index, config: for_call(name, kind, index, config),
        {"name": str, "index": int},
        kind=True,
    ),
}


def selectors_to_data(selectors: Selectors, named: Named) -> list[dict[str, Any]]:
    """Return settings as JSON data, in the order in which they were made.

    Raises:
        ConfigError: a setting is a function, or a configuration holds what data cannot name.
    """
    if selectors.filter_function is not None:
        raise ConfigError("a filter function is code, so it cannot be saved")
    return [_setting_to_data(setting, named) for setting in selectors.settings]


def _setting_to_data(setting: Setting, named: Named) -> dict[str, Any]:
    if setting.level == FILTER:
        raise ConfigError(
            f"{setting.label} is code, so it cannot be saved; select the operators by "
            "type, module name or subgraph instead"
        )
    key = _FORMS[setting.level].write(setting.key)
    return {"select": setting.level, **key, "config": _config_to_data(setting.config, named)}


def _config_to_data(config: Config, named: Named) -> Any:
    called = getattr(config, "name", None)  # reports tell equal ones apart by it
    names = (name for name, known in named.items() if (known, known.name) == (config, called))
    return next(names, None) or config_to_json(config)


def selectors_from_data(data: Any, named: Named, owner: str) -> Selectors:
    """Return the settings that JSON data stands for.

    Args:
        named: the backend's own configurations.
        owner: whose settings they are, for messages.

    Raises:
        ConfigError, SelectorError: the data is malformed; the message says which entry.
    """
    if not isinstance(data, list):
        raise ConfigError(f"{owner}: selectors must be a list of settings, got {data!r}")
    selectors = Selectors()
    for number, entry in enumerate(data):
        where = f"{owner}, selector {number}"
        try:
            selectors.set(_setting_from_data(entry, named, owner))
        except (ConfigError, SelectorError) as error:
            raise type(error)(f"{where}: {error}") from None
    return selectors


def _setting_from_data(entry: Any, named: Named, owner: str) -> Setting:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"expected an object with the keys select and config, got {entry!r}")
    level = entry.get("select")
    if not isinstance(level, str) or level not in _FORMS:
        raise ConfigError(
            f"select must be one of {', '.join(_FORMS)}, got {level!r}{near_names(str(level), _FORMS)}"
        )
    form = _FORMS[level]
    which = _which_kind(entry) if form.kind else ()
    check_keys(entry, ("select", *form.keys, *which, "config"))
    for key, kind in form.keys.items():
        if not isinstance(entry[key], kind) or isinstance(entry[key], bool):
            raise ConfigError(f"{key} must be of type {kind.__name__}, got {entry[key]!r}")
    values = {key: entry[key] for key in form.keys}
    for key in which:
        values["kind"] = _KINDS[key](entry[key])
    return form.read(**values, config=_config_from_data(entry["config"], named, owner))


def _which_kind(entry: Mapping[str, Any]) -> tuple[str]:
    given = [key for key in _KINDS if key in entry]
    if len(given) != 1:
        raise ConfigError(f"expected one key of {[*_KINDS]}, got {given or 'none'}")
    return (given[0],)


def check_keys(data: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    """Raise ConfigError unless data has exactly these keys."""
    unknown = [f"{key!r}{near_names(str(key), keys)}" for key in data if key not in keys]
    missing = [repr(key) for key in keys if key not in data]
    if unknown:
        raise ConfigError(f"unknown keys {', '.join(unknown)}. Known keys: {', '.join(keys)}")
    if missing:
        raise ConfigError(f"missing keys {', '.join(missing)}")


def _config_from_data(data: Any, named: Named, owner: str) -> Config:
    return config_named(data, named, owner) if isinstance(data, str) else config_from_json(data)
