# SPDX-License-Identifier: Apache-2.0
"""One row of a rule table: pattern, roles, specs, guard and kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from qompose.backend.constraints import RoleSpec, TensorConstraint
from qompose.backend.kernel import Kernel
from qompose.backend.pattern import Match, OperatorPattern, Pattern
from qompose.errors import ConfigError, near_names
from qompose.spec.qparams import Bounds
from qompose.spec.quantization_spec import QuantizationConfig, QuantizationSpec, describe_spec

Guard: TypeAlias = Callable[[Match], "str | None"]
"""Returns why a rule cannot take a match, None where it can."""
STATIC, DYNAMIC, WEIGHT_ONLY = "static", "dynamic", "weight-only"
ACTIVATION_ONLY = "activation-only"
"""The mode of a rule with a weight under a configuration that leaves weights in float."""
CONDITIONS = (None, "all", "any", "no_float")
ROLES = ("activation", "weight", "output")
MODES = (STATIC, DYNAMIC, WEIGHT_ONLY, ACTIVATION_ONLY)
LAYOUT = ("ch_axis", "block_size")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of a backend's table. The order of rows is their priority: longest fusion first.

    Attributes:
        patterns: the variants (bias or none, ranks, in-place forms) in which the operation occurs.
        drawing: the operation in one line, `conv2d -> relu`.
        anchor: the name of the operator whose place in the model decides the configuration.
        activations: names of the float inputs that get `config.input_activation`.
        weight: name of the parameter that gets `config.weight`; it must be a parameter or buffer.
        bias: name of the float parameter that is added to the product, in the variants that have one.
        integer_bias: the kernel adds the bias as an integer, in steps of input scale times weight scale;
            the converted model adds what that integer stands for.
        channels: the (input, output) dimensions that belong to dimensions 1 and 0 of the weight; None
            where the rule is no plain product (up to a relu). They allow balancing, and SmoothQuant.
        output: whether the output gets `config.output_activation`.
        shares: inputs and output have the same scale and zero point (views, pooling, concatenation).
        carries: the operator computes nothing, so that the rule applies only where something quantized
            reads its output: between a product and a float operator it would only keep the product's
            channels from being balanced.
        condition: when the rule applies: "all" or "any" of its inputs must be quantized already, or
            "no_float": none of them may come from an operator that computes in float (model inputs and
            parameters do not). None applies it anywhere.
        modes: the kinds of configuration that apply.
        layout: by role, what the shape of the operator's tensors makes of a specification's `ch_axis` or
            `block_size`, where it has one: `{"weight": {"ch_axis": 1}}` for a transposed convolution, whose
            weight has its output channels there. So one configuration serves operators of any layout.
        accepts: constraints by role: "activation", "weight", "output".
        guard: returns the reason why a match cannot be taken, or None; or several of that kind, of whose
            reasons the first counts.
        kernels: by target name.

    Raises:
        ConfigError: a field has a value of another kind, or speaks of names that the patterns have not.
    """

    name: str
    patterns: tuple[Pattern | OperatorPattern, ...]
    drawing: str = ""
    anchor: str = "output"
    activations: tuple[str, ...] = ("input",)
    weight: str | None = None
    bias: str | None = None
    integer_bias: bool = False
    channels: tuple[int, int] | None = None
    output: bool = True
    shares: bool = False
    carries: bool = False
    condition: str | None = None
    modes: frozenset[str] = frozenset({STATIC})
    layout: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))
    accepts: Mapping[str, TensorConstraint] = field(default_factory=lambda: MappingProxyType({}))
    guard: Guard | Sequence[Guard] | None = None
    kernels: Mapping[str, Kernel] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        """Refuse what would never apply, or never be looked at."""
        faults = [*_kind_faults(self)] or [*_word_faults(self), *_name_faults(self)]
        if faults:
            raise ConfigError(f"rule {self.name}: {'; '.join(faults)}")

    def specs_for(self, config: QuantizationConfig) -> dict[str, RoleSpec]:
        """Return the specification that a configuration gives to each role that this rule quantizes.

        An output that shares the parameters of the inputs has none of its own.
        """
        roles = {
            "activation": config.input_activation if self.activations else None,
            "weight": config.weight if self.weight else None,
            "output": config.output_activation if self.output and not self.shares else None,
        }
        return {
            role: self._laid_out(role, spec) for role, spec in roles.items() if spec is not None
        }

    def _laid_out(self, role: str, spec: RoleSpec) -> RoleSpec:
        """Return a specification for the shape that tensors of this role have."""
        if not isinstance(spec, QuantizationSpec):
            return spec
        fitted = {
            k: v for k, v in self.layout.get(role, {}).items() if getattr(spec, k) is not None
        }
        return replace(spec, **fitted) if fitted else spec

    def mode_for(self, config: QuantizationConfig) -> str:
        """Return the mode, one of `MODES`, in which this rule would follow a configuration."""
        return ACTIVATION_ONLY if self.weight and config.weight is None else config.mode

    def objection(self, config: QuantizationConfig) -> str | None:
        """Return why a configuration does not fit this rule, None where it does."""
        mode = self.mode_for(config)
        if mode not in self.modes:
            leaves = f"{config} leaves the weight of rule {self.name} in float, and "
            who = f"{leaves}it" if mode == ACTIVATION_ONLY else f"rule {self.name}"
            return f"{who} has no {mode} form"
        if config.bias is not None:
            return f"rule {self.name} leaves biases in float"
        specs = self.specs_for(config)
        if not specs:
            return f"{config} leaves every role of rule {self.name} in float"
        if self.shares and config.input_activation is not None:
            specs["output"] = config.input_activation
        for role, spec in specs.items():
            constraint = self.accepts.get(role)
            objection = constraint.objection(role, spec) if constraint is not None else None
            if objection is not None:
                return f"{objection} (rule {self.name}, {role} {describe_spec(spec)})"
        return None

    @property
    def guards(self) -> tuple[Guard, ...]:
        """Return the functions of `guard`, one or several."""
        if self.guard is None:
            return ()
        return tuple(self.guard) if isinstance(self.guard, Sequence) else (self.guard,)

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the roles that the rule has."""
        has = {"activation": self.activations, "weight": self.weight, "output": self.output}
        return tuple(role for role, value in has.items() if value)

    def bounds_for(self, role: str) -> Bounds | None:
        """Return what the kernel asks of a role's scale and zero point, None where it takes any."""
        constraint = self.accepts.get(role)
        return None if constraint is None else constraint.bounds


def _kind_faults(rule: Any) -> Iterator[str]:
    """Yield what is of another kind than it has to be."""
    if not isinstance(rule.patterns, tuple) or not rule.patterns:
        yield f"patterns={rule.patterns!r} is no tuple of patterns"
        return
    for pattern in rule.patterns:
        if not isinstance(pattern, (Pattern, OperatorPattern)):
            yield f"{pattern!r} is neither a Pattern nor an OperatorPattern"
    for role, constraint in rule.accepts.items():
        if not isinstance(constraint, TensorConstraint):
            yield f"accepts[{role!r}]={constraint!r} is no TensorConstraint"
    for target, kernel in rule.kernels.items():
        if not isinstance(kernel, Kernel):
            yield f"kernels[{target!r}]={kernel!r} is no Kernel: wrap it as Kernel(name, function)"
    if isinstance(rule.activations, str):
        yield f"activations={rule.activations!r} is a string, not a tuple of names"
    if isinstance(rule.guard, str) or not all(map(callable, rule.guards)):
        yield f"guard={rule.guard!r} is no function of a match"


def _word_faults(rule: Rule) -> Iterator[str]:
    """Yield the words that are none of those there are."""
    given: tuple[tuple[str, Iterable[object], tuple[str | None, ...]], ...] = (
        ("condition", (rule.condition,), CONDITIONS),
        ("modes", rule.modes, MODES),
        ("accepts", rule.accepts, ROLES),
        ("layout", rule.layout, ROLES),
        ("layout", (name for given in rule.layout.values() for name in given), LAYOUT),
    )
    for field_name, words, known in given:
        for word in words:
            if word not in known:
                names = [name for name in known if name]
                yield (
                    f"{field_name} has {word!r}, and there are {', '.join(names)}"
                    f"{near_names(str(word), names)}"
                )


def _name_faults(rule: Rule) -> Iterator[str]:
    """Yield the names that a pattern has not. A bias occurs in some variants alone."""
    named = {rule.anchor, *rule.activations, *([rule.weight] if rule.weight else [])}
    for pattern in rule.patterns:
        unknown = sorted(named - pattern.names)
        if unknown:
            hints = "".join(near_names(name, pattern.names) for name in unknown)
            known = ", ".join(sorted(pattern.names))
            yield f"it speaks of {', '.join(unknown)}{hints}, and its pattern has {known}"
            return
    if rule.bias and not any(rule.bias in pattern.names for pattern in rule.patterns):
        known = ", ".join(sorted(rule.patterns[0].names))
        yield f"it speaks of the bias {rule.bias}, which no pattern has; the first has {known}"
