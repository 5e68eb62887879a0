# SPDX-License-Identifier: Apache-2.0
"""One trial of tuning: some operators are left in float by selectors, and the result is scored."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from rich.progress import Progress
from torch.export import ExportedProgram
from torch.fx import GraphModule

from qompose.calibration.calibrator import calibrate
from qompose.calibration.statistics_data import Statistics, prepared_record, statistics, watched
from qompose.calibration.statistics_file import Entry
from qompose.conversion.convert import convert_pt2e
from qompose.diagnosis.error_measures import number_of
from qompose.diagnosis.operator_sensitivity import Sensitivity, SiteCost, measured, site_of
from qompose.diagnosis.tuning_result import excluding, once
from qompose.errors import QomposeWarning, StatisticsError, UserError, blaming
from qompose.lowering.lower_regions import lower
from qompose.observers.channel_ranges import base_observer
from qompose.observers.input_sums import Columns, Means, Moments
from qompose.observers.make_observer import observer_nodes, observers_of
from qompose.observers.min_max import Observer
from qompose.plan.operator_ids import Site, isolate
from qompose.plan.plan import Operator, Plan, Record
from qompose.plan.user_program import as_graph_module
from qompose.preparation.prepare import prepare_pt2e
from qompose.program.control_flow import hoist_constants
from qompose.program.graph import module_path, refresh
from qompose.program.meta import META_KEY
from qompose.quantizer.base import Quantizer
from qompose.quantizer.rule_quantizer import RuleQuantizer
from qompose.quantizer.selector_matching import Program, calls_of
from qompose.spec.quantization_spec import QuantizationConfig
from qompose.spec.selectors import (
    CALL,
    SUBGRAPH,
    Call,
    Setting,
    for_call,
    for_name,
    kind_of,
)

RANKING_BATCHES = 4
"""How many batches costs are measured on: they guide the search, which asks the metric about every step."""


def origin(operator: Operator) -> str:
    """Return the exported operator's name of what reports list, also of a piece of one."""
    return operator.name.partition("/")[0]


def territory(plan: Plan, claims: Collection[int]) -> set[str]:
    """Return the names of the exported operators that claims cover."""
    return {origin(operator) for operator in plan.operators if operator.claim in claims}


class Picker:
    """Finds the setting that picks one operator of a program and none that anybody else quantizes.

    Args:
        exported: the program, as it is when quantizers are asked.
        plan: what they made of it.
        by_call: name single calls, because a module's name would not win over the settings there are.
    """

    def __init__(self, exported: GraphModule, plan: Plan, *, by_call: bool) -> None:
        self._program, self._by_call = Program(exported), by_call
        self._claimed = {origin(o) for o in plan.operators if o.claim is not None}

    def setting(
        self, name: str, wanted: Collection[str], config: QuantizationConfig | None = None
    ) -> Setting | None:
        """Return the setting for an operator; None where the program has none of that name.

        Args:
            wanted: all operators that it is for: a module that holds no others is named.
            config: what it gives them; None leaves them in float.
        """
        node = self._program.by_name.get(name)
        if node is None or not isinstance(node.target, torch._ops.OpOverload):
            return None
        path = module_path(node)
        inside = self._program.inside.get(path, [])
        others = {n.name for n in inside if n.name in self._claimed}.difference(wanted)
        if path and not others and not self._by_call:
            return for_name(path, config)
        kind = kind_of(node.target)
        calls = calls_of(Call(path, kind, 0), inside)
        return for_call(path, kind, calls.index([node]), config)


def names_single_calls(quantizer: Quantizer) -> bool:
    """Tell whether a quantizer has settings that win over those of modules."""
    return any(
        setting.level in (SUBGRAPH, CALL)
        for member in quantizer.members
        if isinstance(member, RuleQuantizer)
        for setting in member.selectors.settings
    )


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
        with torch.no_grad(), blaming(f"metric (model with {what})"):
            said = self.metric(model)
        return number_of(said, f"metric (model with {what}) returned")


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
        self._means: dict[Site, Means] = {}
        self._moments: dict[tuple[Site, Columns], Moments] = {}
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

    def float_score(self) -> float:
        """Return the score of the program itself.

        Raises:
            UserError: it is not finite.
        """
        score = self.task.score(self._floats, "nothing quantized")
        if not math.isfinite(score):
            raise UserError(
                f"metric must return a finite score for the float model, got {score}. A ratio to the "
                "error, such as SQNR, has none there: return the error with a minus, or a bounded ratio"
            )
        return score

    def ranking(self, calibrated: GraphModule, bar: Progress) -> Sensitivity:
        """Return what each site of a calibrated model costs, measured on a few batches."""
        task = self.task
        count = RANKING_BATCHES if task.limit is None else min(task.limit, RANKING_BATCHES)
        some = islice(task.batches, count)
        return measured(calibrated, some, bar, transform=task.transform, caller="tune")

    def calibrated(self, prepared: GraphModule) -> GraphModule:
        """Give observers what was seen of their tensors before; where that is not known, run the data."""
        record = prepared_record(prepared, "tune")
        wanted = [sites for _, sites in watched(prepared, record)]
        known = [self._entries[sites] for sites in wanted if sites in self._entries]
        seen = Statistics(
            tuple(known),
            record.fingerprint,
            means=tuple(self._means.items()),
            moments=tuple((site, seen) for (site, _), seen in self._moments.items()),
        )
        own = all(
            isinstance(base_observer(observer), Observer)
            for observer in observers_of(observer_nodes(prepared)).values()
        )
        if not (own and len(known) == len(wanted) and _taken(seen, prepared)):
            task = self.task
            calibrate(
                prepared, task.batches, transform=task.transform, limit=task.limit, progress=False
            )
            self._remember(statistics(prepared))
        return prepared

    def _remember(self, seen: Statistics) -> None:
        """Keep what was seen of each tensor, and of several the one with ranges of its channels."""
        for entry in seen.entries:
            known = self._entries.get(entry.sites)
            if known is None or known.facts.channels is None:
                self._entries[entry.sites] = entry
        self._means |= dict(seen.means)
        self._moments |= {(site, moments.columns): moments for site, moments in seen.moments}

    @cached_property
    def base_calibrated(self) -> GraphModule:
        """Return the base with its ranges estimated."""
        return self.calibrated(self.base)

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
        # The operator whose configuration decides about a site comes first.
        asked = {name: [self.sites[name].name.partition("/")[0]] for name in names}
        while True:
            settings = {name: self._settings(asked[name], wanted) for name in names}
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

    def _settings(self, operators: list[str], wanted: set[str]) -> tuple[Setting, ...]:
        """Return the settings of operators; those made by a rewrite have none."""
        found = (self._picker.setting(operator, wanted) for operator in operators)
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
                f"{land[0]} is quantized by {owner}, and no selector of {owner} leaves it in float",
            )
        anchors = {plan.claims[left[operator] or 0].anchor for operator in new}
        asked.append(next((operator for operator in new if operator in anchors), new[0]))

    def settings(self, name: str, config: QuantizationConfig) -> tuple[Setting, ...]:
        """Return the settings that give all operators of a site a configuration."""
        land = territory(self.plan, {self.sites[name].claim})
        # A rule takes several operators only where all have one configuration.
        found = (self._picker.setting(operator, land, config) for operator in sorted(land))
        return once(setting for setting in found if setting is not None)

    def model(self, names: Collection[str]) -> tuple[Any, tuple[int, int]]:
        """Return the model with some sites in float, and the sizes that `Attempt` has of it.

        Raises:
            CannotExclude: one of the sites stays quantized.
        """
        with _quiet():
            chosen = self.chosen(names) if names else Chosen(self.base, {})
            prepared = self.calibrated(chosen.prepared) if names else self.base_calibrated
        converted = self.converted(prepared)
        return self.lowered(converted), sizes_of(converted)

    def converted(self, calibrated: GraphModule) -> GraphModule:
        """Return a calibrated model converted."""
        with _quiet():
            return convert_pt2e(calibrated)

    def lowered(self, converted: GraphModule) -> Any:
        """Return what is measured of a converted model: itself, or what it is lowered to."""
        with _quiet():
            target = self.task.target
            return converted if target is None else lower(converted, target=target, progress=False)

    def calibrated_by(self, quantizer: Quantizer) -> GraphModule:
        """Return the program prepared by another quantizer than that of the task, and calibrated."""
        with _quiet():
            return self.calibrated(prepare_pt2e(self.task.model, quantizer))


def sizes_of(converted: GraphModule) -> tuple[int, int]:
    """Return the multiply-accumulates that no claim covers, or a dropped one, and how many claims stand."""
    record: Record = converted.meta[META_KEY]
    plan, dropped = record.plan, record.dropped
    in_float = [o.macs for o in plan.operators if o.claim is None or o.claim in dropped]
    return sum(in_float), len(plan.claims) - len(dropped)


def _taken(seen: Statistics, prepared: GraphModule) -> bool:
    """Let observers go by what was seen; return whether it holds all that they would keep."""
    try:
        seen.apply(prepared, complete=True)
    except StatisticsError:  # of other specifications: they have to see the data themselves
        return False
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what is tried from warning of what was tried: the setting that is chosen will say it again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QomposeWarning)
        yield
