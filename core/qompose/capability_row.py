# SPDX-License-Identifier: Apache-2.0
"""A row of capabilities: one pattern under one configuration of a backend, as a value and as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qompose.configs import SETTINGS, SPEC, with_stand_ins
from qompose.constraints import CONSTRAINT, TensorConstraint
from qompose.encoding import (
    BOOLEAN,
    TEXT,
    Codec,
    check_mapping,
    pairs,
    read_fields,
    record,
    sequence,
)
from qompose.querying import sequences
from qompose.rules import Rule
from qompose.specs import QuantizationConfig, QuantizationSpecBase, granularity
from qompose.training_specs import why_not_trained


@dataclass(frozen=True, kw_only=True)
class Capability:
    """One pattern under one configuration of a backend.

    Attributes:
        pattern: the rule's name; `drawing` shows it in one line.
        operators: what it calls, in order, for each of its variants: names of aten operators.
        config: the configuration's name; `settings` is the configuration itself.
        activation, weight, output: what each role gets; None where the rule leaves it alone or in float.
        granularity: of the weight, else of the activation.
        kernels: (target, kernel name) pairs.
        constraints: (role, constraint) pairs: what configurations may ask for.
        shares: inputs and output have one scale and zero point.
        condition: when the rule applies, as in `Rule`.
        guarded: the rule has a guard: it also looks at each operator.
        carries: it applies only where something quantized reads its output.
    """

    backend: str
    pattern: str
    drawing: str
    operators: tuple[tuple[str, ...], ...]
    config: str
    settings: QuantizationConfig
    mode: str
    activation: QuantizationSpecBase | None
    weight: QuantizationSpecBase | None
    output: QuantizationSpecBase | None
    granularity: str
    qat: bool
    kernels: tuple[tuple[str, str], ...]
    constraints: tuple[tuple[str, TensorConstraint], ...] = ()
    shares: bool = False
    condition: str = ""
    guarded: bool = False
    carries: bool = False

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the targets that have a kernel for this row."""
        return tuple(target for target, _ in self.kernels)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return constraints, sharing and condition in words."""
        found = [f"{role}: {constraint.describe()}" for role, constraint in self.constraints]
        found += ["output has the scale of the inputs"] if self.shares else []
        found += [_CONDITIONS.get(self.condition, self.condition)] if self.condition else []
        found += ["only where something quantized reads its output"] if self.carries else []
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON data; of an observer of another package it has the name."""
        data: dict[str, Any] = _ROW.write(self, "row")
        return {**data, "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Capability:
        """Return the row that data stands for, equal to the one it was written from.

        Raises:
            ConfigError: the data is malformed; the message says where.
        """
        check_mapping(data, "row")
        known = {
            key: value for key, value in data.items() if key != "notes"
        }  # follows from the rest
        row: Capability = read_fields(known, cls, _FIELDS, "row")
        return row


_CONDITIONS = {
    "all": "only where all inputs are quantized",
    "any": "only where an input is quantized",
    "no_float": "only where no input comes from a float operator",
}


def _with_stand_ins(codec: Codec) -> Codec:
    """Return the codec of what may hold observers of other packages: of those, the names are written."""
    return Codec(lambda value, path: codec.write(with_stand_ins(value), path), codec.read)


_FIELDS: dict[str, Codec] = {
    **dict.fromkeys(("backend", "pattern", "drawing"), TEXT),
    "operators": sequence(sequence(TEXT)),
    "config": TEXT,
    "settings": _with_stand_ins(SETTINGS),
    "mode": TEXT,
    **dict.fromkeys(("activation", "weight", "output"), _with_stand_ins(SPEC)),
    "granularity": TEXT,
    "qat": BOOLEAN,
    "kernels": pairs(TEXT),
    "constraints": pairs(CONSTRAINT),
    "shares": BOOLEAN,
    "condition": TEXT,
    "guarded": BOOLEAN,
    "carries": BOOLEAN,
}
_ROW = record(Capability, _FIELDS, defaults=True)


def row_of(backend: str, rule: Rule, name: str, config: QuantizationConfig) -> Capability:
    """Return the row of a rule of a backend under a configuration that fits it."""
    specs = rule.specs_for(config)
    return Capability(
        backend=backend,
        pattern=rule.name,
        drawing=rule.drawing or rule.name,
        operators=sequences(rule),
        config=name,
        settings=config,
        mode=config.mode,
        activation=specs.get("activation"),
        weight=specs.get("weight"),
        output=specs.get("output"),
        granularity=granularity(specs.get("weight", specs.get("activation"))),
        qat=why_not_trained(config) is None,
        kernels=kernels_of(rule),
        constraints=tuple((r, c) for r, c in rule.accepts.items() if r in rule.roles),
        shares=rule.shares,
        condition=rule.condition or "",
        guarded=bool(rule.guards),
        carries=rule.carries,
    )


def kernels_of(rule: Rule) -> tuple[tuple[str, str], ...]:
    """Return the (target, kernel name) pairs of a rule."""
    return tuple((target, kernel.promise) for target, kernel in rule.kernels.items())
