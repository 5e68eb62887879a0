# SPDX-License-Identifier: Apache-2.0
"""Capabilities: what a backend can do, as rows generated from the table that annotates and lowers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from qompose.backend import Backend
from qompose.rules import Rule
from qompose.specs import QuantizationConfig, QuantizationSpecBase, granularity, spec_to_dict


@dataclass(frozen=True)
class Capability:
    """One pattern under one of a backend's named configurations.

    `kernels` has (target, kernel name) pairs.
    """

    backend: str
    pattern: str
    drawing: str
    config: str
    mode: str
    activation: QuantizationSpecBase | None
    weight: QuantizationSpecBase | None
    output: QuantizationSpecBase | None
    granularity: str
    qat: bool
    kernels: tuple[tuple[str, str], ...]
    constraints: tuple[str, ...] = ()

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the targets that have a kernel for this row."""
        return tuple(target for target, _ in self.kernels)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON data."""
        return {
            "backend": self.backend,
            "pattern": self.pattern,
            "drawing": self.drawing,
            "config": self.config,
            "mode": self.mode,
            "activation": spec_to_dict(self.activation),
            "weight": spec_to_dict(self.weight),
            "output": spec_to_dict(self.output),
            "granularity": self.granularity,
            "qat": self.qat,
            "kernels": dict(self.kernels),
            "constraints": list(self.constraints),
        }


@dataclass(frozen=True)
class Support:
    """An answer to "can you?": true or false, with the reason for a no."""

    supported: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.supported


@dataclass(frozen=True)
class Capabilities(Sequence[Capability]):
    """Rows, with the tables they come from. An immutable sequence."""

    rows: tuple[Capability, ...]
    tables: tuple[tuple[str, tuple[Rule, ...]], ...] = ()

    @overload
    def __getitem__(self, index: int) -> Capability: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Capability]: ...
    def __getitem__(self, index: int | slice) -> Capability | Sequence[Capability]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Capability]:
        return iter(self.rows)

    def __add__(self, other: Capabilities) -> Capabilities:
        return Capabilities(self.rows + other.rows, self.tables + other.tables)

    def supports(self, pattern: str, config: QuantizationConfig) -> Support:
        """Answer whether some backend has rule `pattern` and can follow `config` with it."""
        reasons = []
        for backend, rules in self.tables:
            for rule in (rule for rule in rules if rule.name == pattern):
                objection = rule.objection(config)
                if objection is None:
                    return Support(True)
                reasons.append(f"{backend}: {objection}")
        known = sorted({rule.name for _, rules in self.tables for rule in rules})
        unknown = f"no backend has a rule {pattern!r}; known: {', '.join(known) or 'none'}"
        return Support(False, "; ".join(reasons) or unknown)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the rows as JSON data."""
        return [row.to_dict() for row in self.rows]

    def __str__(self) -> str:
        header = ("backend", "pattern", "config", "kernels")
        lines = [
            (r.backend, r.drawing, r.config, ", ".join(f"{t}: {k}" for t, k in r.kernels))
            for r in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in (header, *lines)
        )


def capability_rows(backend: Backend) -> Capabilities:
    """Return a row for each rule of a backend under each of its named configurations that fits it."""
    rows = tuple(
        _row(backend.name, rule, name, config)
        for rule in backend.rules
        for name, config in backend.configs.items()
        if rule.objection(config) is None
    )
    return Capabilities(rows, ((backend.name, tuple(backend.rules)),))


def _row(backend: str, rule: Rule, name: str, config: QuantizationConfig) -> Capability:
    specs = rule.specs_for(config)
    return Capability(
        backend=backend,
        pattern=rule.name,
        drawing=rule.drawing or rule.name,
        config=name,
        mode=config.mode,
        activation=specs.get("activation"),
        weight=specs.get("weight"),
        output=specs.get("activation") if rule.shares else specs.get("output"),
        granularity=granularity(specs.get("weight") or specs.get("activation")),
        qat=config.is_qat,
        kernels=tuple((target, kernel.name) for target, kernel in rule.kernels.items()),
        constraints=tuple(f"{role}: {constraint}" for role, constraint in rule.accepts.items()),
    )
