# SPDX-License-Identifier: Apache-2.0
"""A setting tried: some sites left in float, by the real pipeline from selectors to the caller's metric."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from qompose.calibration import calibrate
from qompose.collecting import Statistics, prepared_record, statistics, watched
from qompose.diagnosis.costs import number_of
from qompose.diagnosis.exclusion import (
    Picker,
    excluding,
    names_single_calls,
    origin,
    territory,
)
from qompose.diagnosis.sensitivity import SiteCost, site_of
from qompose.errors import QomposeWarning, StatisticsError, blaming
from qompose.exported import as_graph_module
from qompose.graph import refresh
from qompose.isolation import isolate
from qompose.nested import hoist_constants
from qompose.observers import Observer
from qompose.observing import observer_nodes, observers_of, unbalanced
from qompose.pipeline import convert_pt2e, lower, prepare_pt2e
from qompose.plan import META_KEY, Plan, Record
from qompose.quantizer import Quantizer
from qompose.selectors import Setting
from qompose.sites import Site
from qompose.statistics_files import Entry


@dataclass(frozen=True)
class Task:
    """What is tuned.

    Attributes:
        model: the exported program.
        batches: calibration data, which can be gone through again and again.
        metric: says how good a model is, which is called as the program is; higher is better.
        target: what models are lowered for before they are measured; None measures converted ones.
    """

    model: ExportedProgram | GraphModule
    quantizer: Quantizer
    batches: Iterable[Any]
    metric: Callable[[Any], Any]
    transform: Callable[[Any], Any] | None
    limit: int | None
    target: str | None

    def score(self, model: Any, what: str) -> float:
        """Return what the metric says of a model.

        Raises:
            MemberError: the metric raised an error.
            UserError: it returned no number, or NaN.
        """
        with torch.no_grad(), blaming(f"metric, asked about the model with {what},"):
            said = self.metric(model)
        return number_of(said, f"metric, asked about the model with {what}, returned")


@dataclass(frozen=True)
class Chosen:
    """A prepared model in which some sites are in float, and by which settings each of them is."""

    prepared: GraphModule
    settings: Mapping[str, tuple[Setting, ...]]

    @property
    def plan(self) -> Plan:
        """Return what its quantizers made of the rest."""
        return prepared_record(self.prepared, "tune").plan


class CannotExclude(Exception):  # noqa: N818 - it says who stands in the way, and is always caught
    """Raised where a site stays quantized whatever is set."""

    def __init__(self, site: str, why: str) -> None:
        self.site, self.why = site, why
        super().__init__(f"{site}: {why}")


class Evaluator:
    """Tries settings of one task; ranges are estimated once for each set of tensors that share one.

    Attributes:
        base: the model in which nothing is left in float.
        sites: what can be left in float, by name.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self._entries: dict[tuple[Site, ...], Entry] = {}
        self._exported = as_graph_module(task.model, "tune")
        self._floats = as_graph_module(task.model, "tune")
        for program in (self._exported, self._floats):
            isolate(program)  # it may write to its buffers, which are the caller's
        hoist_constants(self._floats)
        self._floats = refresh(self._floats)
        self.base = prepare_pt2e(task.model, task.quantizer)
        self.plan = Chosen(self.base, {}).plan
        by_call = names_single_calls(task.quantizer)
        self._picker = Picker(self._exported, self.plan, by_call=by_call)
        rows = (site_of(self.plan, number) for number in range(len(self.plan.claims)))
        self.sites: dict[str, SiteCost] = {row.name: row for row in rows if row.operators}
        self._base_is_calibrated = False

    @property
    def record(self) -> Record:
        """Return the record of the base."""
        return prepared_record(self.base, "tune")

    def float_score(self) -> float:
        """Return the score of the program itself."""
        return self.task.score(self._floats, "nothing quantized")

    def calibrated(self, prepared: GraphModule) -> GraphModule:
        """Give observers what was seen of their tensors before; where that is not known, run the data."""
        record = prepared_record(prepared, "tune")
        wanted = [sites for _, sites in watched(prepared, record)]
        known = [self._entries[sites] for sites in wanted if sites in self._entries]
        own = all(
            isinstance(unbalanced(observer), Observer)
            for observer in observers_of(observer_nodes(prepared)).values()
        )
        if not (own and len(known) == len(wanted) and _taken(known, prepared, record)):
            task = self.task
            calibrate(
                prepared, task.batches, transform=task.transform, limit=task.limit, progress=False
            )
            for entry in statistics(prepared):
                self._entries.setdefault(entry.sites, entry)
        return prepared

    def base_calibrated(self) -> GraphModule:
        """Return the base with its ranges estimated."""
        if not self._base_is_calibrated:
            self.calibrated(self.base)
            self._base_is_calibrated = True
        return self.base

    def chosen(self, names: Collection[str]) -> Chosen:
        """Prepare the program with some sites in float.

        Where a fused operator is let go of, shorter rules and other members take its parts: each of those
        gets a setting too, until none of its operators is quantized.

        Raises:
            CannotExclude: one of them stays quantized.
        """
        claims = {name: self.sites[name].claim for name in names}
        lands = {name: territory(self.plan, {claim}) for name, claim in claims.items()}
        wanted = set().union(*lands.values())
        asked = {name: [self._first(name)] for name in names}
        while True:
            settings = {name: self._settings(name, asked[name], wanted) for name in names}
            listed = dict.fromkeys(s for some in settings.values() for s in some)
            with _quiet():
                quantizer = excluding(self.task.quantizer, listed)
                chosen = Chosen(prepare_pt2e(self.task.model, quantizer), settings)
            left = {origin(o): o.claim for o in chosen.plan.operators if o.claim is not None}
            stuck = {name: sorted(land & left.keys()) for name, land in lands.items()}
            stuck = {name: land for name, land in stuck.items() if land}
            if not stuck:
                return chosen
            for name, land in stuck.items():
                self._ask_for(name, land, asked[name], chosen.plan, left)

    def _first(self, name: str) -> str:
        """Return the operator whose configuration decides about a site."""
        return self.sites[name].name.partition("/")[0]

    def _settings(self, name: str, operators: list[str], wanted: set[str]) -> tuple[Setting, ...]:
        found = [self._picker.setting(operator, wanted) for operator in operators]
        lacking = [o for o, setting in zip(operators, found, strict=True) if setting is None]
        if lacking:
            raise CannotExclude(
                name, f"{', '.join(lacking)} is not in the exported program: a rewrite made it"
            )
        return tuple(dict.fromkeys(setting for setting in found if setting is not None))

    def _ask_for(
        self,
        name: str,
        land: list[str],
        asked: list[str],
        plan: Plan,
        left: Mapping[str, int | None],
    ) -> None:
        """Name one more operator of a site, or say who holds it whatever is asked."""
        new = [operator for operator in land if operator not in asked]
        if not new:
            owner = plan.claims[left[land[0]] or 0].owner
            raise CannotExclude(
                name,
                f"{land[0]} is quantized by {owner}, and none of its selectors reaches it",
            )
        anchors = {plan.claims[left[operator] or 0].anchor for operator in new}
        asked.append(next((operator for operator in new if operator in anchors), new[0]))

    def model(self, names: Collection[str]) -> tuple[Any, dict[str, int]]:
        """Return the model with some sites in float, and the sizes that `Attempt` has of it.

        Raises:
            CannotExclude: one of the sites stays quantized.
        """
        with _quiet():
            chosen = self.chosen(names) if names else Chosen(self.base, {})
            prepared = self.calibrated(chosen.prepared) if names else self.base_calibrated()
            converted = convert_pt2e(prepared)
            facts = _sizes(converted.meta[META_KEY])
            if self.task.target is None:
                return converted, facts
            return lower(converted, target=self.task.target), facts


def _sizes(record: Record) -> dict[str, int]:
    """Return the multiply-accumulates that no claim covers, or a dropped one, and how many claims stand."""
    plan, dropped = record.plan, record.dropped
    in_float = [o.macs for o in plan.operators if o.claim is None or o.claim in dropped]
    return {"float_macs": sum(in_float), "quantized": len(plan.claims) - len(dropped)}


def _taken(entries: list[Entry], prepared: GraphModule, record: Record) -> bool:
    """Let observers go by entries; return whether these hold what they want."""
    try:
        Statistics(tuple(entries), record.fingerprint).apply(prepared)
    except StatisticsError:  # of other specifications: they have to see the data themselves
        return False
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what is tried from warning of what was tried: the setting that is chosen will say it again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QomposeWarning)
        yield
