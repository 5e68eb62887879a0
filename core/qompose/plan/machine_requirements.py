# SPDX-License-Identifier: Apache-2.0
"""What a plan asks of the machine it runs on."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from qompose.backend.interface import Backend, RuleUse
from qompose.errors import (
    BackendNotFoundError,
    ConfigError,
    PluginError,
    RequirementWarning,
    blaming,
)
from qompose.plan.plan import Plan, Record
from qompose.spec.claim import Claim, Point
from qompose.spec.quantization_spec import QuantizationSpecBase


def requirements_of(
    plan: Plan, backends: Mapping[str, Backend], dropped: Collection[int]
) -> dict[str, dict[str, str]]:
    """Return by owner what the claims that were followed ask of a machine, if they ask anything.

    Raises:
        MemberError: a backend fails when it is asked.
        ConfigError: it answers with anything but texts.
    """
    specs = {point: group.spec for group in plan.groups for point in group.points}
    uses: dict[str, list[RuleUse]] = defaultdict(list)
    for number, claim in enumerate(plan.claims):
        if number not in dropped and claim.owner in backends:
            uses[claim.owner].append(RuleUse(claim.rule, claim.mode, _by_role(claim, specs)))
    found = {}
    for owner, used in uses.items():
        who = f"backend {owner!r}: requirements"
        with blaming(who):
            asked = backends[owner].requirements(tuple(used))
        if not isinstance(asked, Mapping) or not all(
            isinstance(text, str) for item in asked.items() for text in item
        ):
            raise ConfigError(f"{who} gave {asked!r}, and no mapping of texts to texts")
        if asked:
            found[owner] = dict(asked)
    return found


def _by_role(
    claim: Claim, specs: Mapping[Point, QuantizationSpecBase]
) -> dict[str, QuantizationSpecBase]:
    captures = dict(claim.captures)
    roles = {Point(captures.get(o.role, ""), o.user): o.role for o in claim.operands}
    roles[Point(claim.output)] = "output"
    return {
        roles[spec.point]: specs.get(spec.point, spec.spec)
        for spec in claim.specs
        if spec.point in roles
    }


def objections(record: Record) -> Iterator[str]:
    """Yield who asks for what, and why this machine has not got it.

    A backend that cannot be loaded is not asked: `lower` says so when it needs it.

    Raises:
        MemberError: a backend fails when it is asked.
    """
    for owner, asked in record.requirements.items():
        try:
            backend = record.backends.get(owner)
        except (BackendNotFoundError, PluginError):
            continue
        if backend is None:
            continue
        with blaming(f"backend {owner!r}: objection"):
            reason = backend.objection(asked)
        if reason:
            yield f"{owner} requires {listed(asked)}: {reason}"


def listed(asked: Mapping[str, str]) -> str:
    """Return requirements in one line."""
    return ", ".join(f"{name} {value}" for name, value in asked.items())


def notes_on(record: Record) -> tuple[str, ...]:
    """Return what reports say: a line per owner that asks anything."""
    return tuple(f"{owner} requires {listed(a)}" for owner, a in record.requirements.items())


def warn(found: Collection[str], stacklevel: int) -> None:
    """Say aloud that a model runs here, and not on the kernels that it was made for."""
    if found:
        lines = "".join(f"\n  - {line}" for line in found)
        message = f"This model was made for another machine, and may be slow on this one:{lines}"
        warnings.warn(message, RequirementWarning, stacklevel=stacklevel + 1)
