# SPDX-License-Identifier: Apache-2.0
"""The ways through quantization that `zoo.py` takes models: what is installed here, and peers beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import qompose
from qompose.backend.discovery import USABLE, check_backend, load_backend
from qompose.backend.interface import Backend
from qompose.quantizer.composition import quantizer_of
from qompose.quantizer.rule_quantizer import RuleQuantizer

TORCH = "torch"
EXPORT = "export"


@dataclass(frozen=True)
class Flow:
    """One way: members in order of priority, each with a configuration; and a target.

    Attributes:
        first: the configuration is the first of its mode, in every member.
        dynamic: models are exported with a dynamic batch, and run with another one than that of the export.
        peer: whose flow it is, "" for ours. A peer has no members.
    """

    members: tuple[tuple[str, str], ...] = ()
    target: str = TORCH
    mode: str = ""
    first: bool = True
    dynamic: bool = False
    peer: str = ""

    @property
    def backend(self) -> str:
        """The backends by name, in order of priority; or the peer."""
        return self.peer or " + ".join(name for name, _ in self.members) or EXPORT

    @property
    def name(self) -> str:
        """What the table and the state call it."""
        if self.peer or not self.members:
            return self.backend
        parts = " + ".join(f"{name} {config}" for name, config in self.members)
        return f"{parts}, {self.target}{', dynamic batch' * self.dynamic}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Flow:
        return cls(**{**data, "members": tuple(tuple(member) for member in data["members"])})

    def quantizer(self) -> qompose.Quantizer:
        """The composition of the members."""
        return qompose.compose(*(_configured(*member) for member in self.members))


def _configured(name: str, config: str) -> qompose.Quantizer:
    quantizer = quantizer_of(name)
    if isinstance(quantizer, RuleQuantizer):
        quantizer.set_global(quantizer.backend.configs[config])
    return quantizer


def usable() -> tuple[list[Backend], list[str]]:
    """The installed backends that can be used here, and a line for each other backend or target."""
    found, notes = [], []
    for info in qompose.backends():
        health = check_backend(info)
        if health.status == USABLE:
            found.append(load_backend(info.name))
        else:
            notes.append(f"{info.name} is {health.status}: {health.problem}")
        notes += [f"{info.name}, target {t}: {why}" for t, why in health.targets.items() if why]
    return found, notes


def flows(backends: Sequence[Backend]) -> Iterator[Flow]:
    """Every backend with every configuration of capabilities on every target; and what completes another.

    Two backends complete each other where no operator is in rules of both: then the first configuration
    of the one goes with the first configuration of each mode of the other. With a dynamic batch go the
    first configurations.
    """
    for backend in backends:
        for flow in _alone(backend, _runtimes(backend)):
            yield flow
            if flow.members[0][1] == next(iter(backend.configs)):
                yield Flow(flow.members, flow.target, flow.mode, dynamic=True)
    for one, other in combinations(backends, 2):
        if _operators(one).isdisjoint(_operators(other)):
            yield from _together(one, other, _runtimes(one, other))


def _runtimes(*members: Backend) -> list[str]:
    """The targets of a composition: core's, and those that its members bring and that can be used here."""
    brought = [t.name for b in members for t in b.targets if t.availability() is None]
    return [TORCH, *dict.fromkeys(brought)]


def _alone(backend: Backend, targets: Iterable[str]) -> list[Flow]:
    rows = [row for row in backend.quantization_capabilities() if not row.settings.is_qat]
    found, seen = [], set()
    for config in dict.fromkeys(row.config for row in rows):
        mode = backend.configs[config].mode
        reached = {target for row in rows if row.config == config for target in row.targets}
        for target in (t for t in targets if t in reached):
            first = (mode, target) not in seen
            found.append(Flow(((backend.name, config),), target, mode, first))
        seen |= {(mode, target) for target in reached}
    return found


def _operators(backend: Backend) -> set[str]:
    rows = backend.quantization_capabilities()
    return {name for row in rows for variant in row.operators for name in variant}


def _together(one: Backend, other: Backend, targets: Sequence[str]) -> Iterator[Flow]:
    """The one that has fewer operators is the helper; disjoint ones may stand in either order."""
    helper, main = sorted((one, other), key=lambda b: len(_operators(b)))
    helping = {flow.target: flow for flow in reversed(_alone(helper, targets)) if flow.first}
    for flow in _alone(main, targets):
        if flow.first and flow.target in helping:
            members = (*helping[flow.target].members, *flow.members)
            yield Flow(members, flow.target, flow.mode)
