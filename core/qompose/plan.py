# SPDX-License-Identifier: Apache-2.0
"""The Plan: plain data that says what is quantized, how, by whom, and why the rest is not.

It is made once, travels in the `meta` of every later GraphModule, and is all that later stages read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from qompose.backend import Backend
from qompose.balancing import Balance
from qompose.claims import Claim, Conflict, Point
from qompose.errors import StageError
from qompose.graph import STAGE_KEY
from qompose.specs import QuantizationSpecBase, describe_spec, spec_to_dict

META_KEY = STAGE_KEY


Model = TypeVar("Model")


@dataclass(frozen=True)
class Group:
    """Points that have one scale and zero point, and the one specification they share.

    `depends_on` are the groups from whose observers a derived specification is computed. `balance` is
    set where channels may get factors of their own (`qompose.balancing`).
    """

    points: tuple[Point, ...]
    spec: QuantizationSpecBase
    claims: tuple[int, ...]
    depends_on: tuple[int, ...] = ()
    balance: Balance | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the group as JSON data."""
        return {
            "points": [str(point) for point in self.points],
            "spec": spec_to_dict(self.spec),
            "claims": list(self.claims),
            "depends_on": list(self.depends_on),
        }


@dataclass(frozen=True)
class Operator:
    """One operator of the exported program, and what the plan made of it.

    `claim` is the number of the claim that covers it; where there is none, `reason` says why.
    `macs` counts multiply-accumulates for one call with the example shapes.
    """

    name: str
    operator: str
    module: str
    macs: int
    claim: int | None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the operator as JSON data."""
        return dict(self.__dict__)


@dataclass(frozen=True)
class Rewrite:
    """A rewrite that a claim covers: the program differs from the exported one there, if only by rounding.

    `nodes` are the exported operators, `pieces` those that stand in their place; a claim holds one of them.
    """

    name: str
    nodes: tuple[str, ...]
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Who takes which region, which tensors share parameters, and what happened to every operator."""

    claims: tuple[Claim, ...]
    groups: tuple[Group, ...]
    operators: tuple[Operator, ...]
    conflicts: tuple[Conflict, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    notes: tuple[str, ...] = ()
    float_bytes: int = 0

    def requantizations(self, dropped: Collection[int] = ()) -> int:
        """Count the edges that take a quantized output on to other quantization parameters.

        Args:
            dropped: claims that were not followed.
        """
        points = {
            spec.point
            for number, claim in enumerate(self.claims)
            if number not in dropped
            for spec in claim.specs
        }
        group_of = {point: i for i, g in enumerate(self.groups) for point in g.points}
        return sum(
            group_of.get(Point(point.source), group_of[point]) != group_of[point]
            for point in points
            if point.user is not None and Point(point.source) in points
        )

    def __str__(self) -> str:
        group_of = {point: i for i, g in enumerate(self.groups) for point in g.points}
        module_of = {operator.name: operator.module for operator in self.operators}
        lines = []
        for claim in self.claims:
            where = module_of.get(claim.anchor)
            lines.append(
                f"{claim.owner}, rule {claim.rule}: {' -> '.join(claim.nodes)}"
                f"{f' in {where}' if where else ''}, {claim.mode}"
            )
            for spec in claim.specs:
                shared = f"as {spec.references[0]}" if spec.shared else describe_spec(spec.spec)
                lines.append(f"    {spec.point}: {shared}, group {group_of[spec.point]}")
        lines += [
            f"float: {o.name} ({o.operator}{f' in {o.module}' if o.module else ''}): {o.reason}"
            for o in self.operators
            if o.claim is None
        ]
        lines += [f"rewritten by {r.name}: {', '.join(r.nodes)}" for r in self.rewrites]
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON data."""
        return {
            "claims": [_claim_to_dict(claim) for claim in self.claims],
            "groups": [group.to_dict() for group in self.groups],
            "operators": [operator.to_dict() for operator in self.operators],
            "conflicts": [dict(conflict.__dict__) for conflict in self.conflicts],
            "rewrites": [dict(rewrite.__dict__) for rewrite in self.rewrites],
            "notes": list(self.notes),
            "float_bytes": self.float_bytes,
        }


def _claim_to_dict(claim: Claim) -> dict[str, Any]:
    keys = ("owner", "rule", "anchor", "nodes", "output", "config", "selector", "mode")
    return {key: getattr(claim, key) for key in keys}


@dataclass(frozen=True)
class Record:
    """What a GraphModule of any stage carries: the plan, how far it got, and what happened since.

    `dropped` are claims that calibration showed to be impossible, with the reason; `kernels` and
    `fallbacks` are by claim, once lowered; `balanced` describes the tensors whose channels got factors,
    `findings` those whose statistics look wrong.
    `state` has the exported values of the buffers that the program writes to, by path.
    `backends` are live objects, by the owners of claims.
    """

    plan: Plan
    stage: str
    backends: Mapping[str, Backend] = field(default_factory=dict)
    dropped: Mapping[int, str] = field(default_factory=dict)
    kernels: Mapping[int, str] = field(default_factory=dict)
    fallbacks: Mapping[int, str] = field(default_factory=dict)
    balanced: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    target: str = ""
    bytes: int = 0
    state: Mapping[str, Tensor] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        """Return the record itself: nothing in it changes."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leave the live backends out of a pickle; they are loaded by name when they are needed."""
        return {**self.__dict__, "backends": {}}


def record_of(module: object, *, stages: tuple[str, ...], function: str, remedy: str) -> Record:
    """Return the record in `module.meta`, checking that the module comes from one of `stages`.

    Raises:
        StageError: it does not.
    """
    record = getattr(module, "meta", {}).get(META_KEY)
    if not isinstance(record, Record) or record.stage not in stages:
        found = (
            f"a {record.stage} model" if isinstance(record, Record) else repr(type(module).__name__)
        )
        raise StageError(
            f"{function} takes a {' or '.join(stages)} model, and got {found}. {remedy}"
        )
    return record


def attach(module: Model, record: Record) -> Model:
    """Put a record into a module's meta and return the module."""
    holder: Any = module
    holder.meta = {**getattr(module, "meta", {}), META_KEY: record}
    return module
