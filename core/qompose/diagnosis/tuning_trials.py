# SPDX-License-Identifier: Apache-2.0
"""One trial of tuning: some operators are left in float by selectors, and the result is scored."""

from __future__ import annotations

import copy
import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from qompose.calibration.calibrator import calibrate
from qompose.calibration.statistics_data import Statistics, prepared_record, statistics, watched
from qompose.calibration.statistics_file import Entry
from qompose.console import Block, Printable, Table
from qompose.conversion.convert import convert_pt2e
from qompose.diagnosis.error_measures import number_of
from qompose.diagnosis.operator_sensitivity import SiteCost, site_of
from qompose.errors import ConfigError, QomposeWarning, StatisticsError, UserError, blaming
from qompose.files import draft_of
from qompose.json_codec import FLOAT, Codec, codecs_of, record
from qompose.lowering.lower_regions import lower
from qompose.observers.channel_ranges import base_observer
from qompose.observers.input_sums import Columns, Means, Moments
from qompose.observers.make_observer import observer_nodes, observers_of
from qompose.observers.min_max import Observer
from qompose.plan.operator_ids import Site, isolate
from qompose.plan.plan import Operator, Plan, Record
from qompose.preparation.prepare import prepare_pt2e
from qompose.program.control_flow import hoist_constants
from qompose.program.graph import module_path, refresh
from qompose.program.meta import META_KEY
from qompose.program.user_input import as_graph_module
from qompose.quantizer.base import Quantizer
from qompose.quantizer.composition import ComposableQuantizer, Restrained, quantizer_from_dict
from qompose.quantizer.interop.foreign_quantizer import adapt
from qompose.quantizer.rule_quantizer import RuleQuantizer, selectors_from_data, selectors_to_data
from qompose.quantizer.selector_matching import Program, calls_of
from qompose.spec.quantization_spec import QuantizationConfig
from qompose.spec.selectors import (
    CALL,
    SUBGRAPH,
    Call,
    Selectors,
    Setting,
    for_call,
    for_name,
    kind_of,
)

FORMAT = 1
AS_IT_IS = "as it is"
"""The choice of a site that stays as the quantizer says."""


@dataclass(frozen=True)
class Excluded:
    """A site that stays in float.

    Attributes:
        name, operator, module, macs: as in the ranking.
        cost: what its quantization alone costs (`qompose.sensitivity`).
        settings: the selectors that leave it in float.
        others: operators that are quantized otherwise, and stay in float because this one does.
    """

    name: str
    operator: str
    module: str
    macs: int
    cost: float
    settings: tuple[Setting, ...]
    others: tuple[str, ...] = ()

    @property
    def selectors(self) -> tuple[str, ...]:
        """Return the selectors as reports call them."""
        return tuple(setting.label for setting in self.settings)


@dataclass(frozen=True)
class Assigned:
    """A site and the choice it was given.

    Attributes:
        name, operator, module, macs: as in the ranking.
        owner: label of the member that quantizes it.
        choice: name of the choice; `AS_IT_IS` for what the quantizer says itself.
        bytes: of its parameters in a file that `qompose.save` writes.
        cost: what its quantization alone costs (`qompose.sensitivity`).
        settings: the selectors that give it the choice.
    """

    name: str
    operator: str
    module: str
    macs: int
    owner: str
    choice: str
    bytes: int
    cost: float
    settings: tuple[Setting, ...]


@dataclass(frozen=True)
class Attempt:
    """A setting that was tried.

    Attributes:
        excluded: the sites in float.
        score, drop: what the metric says, and how far that is below the float score.
        float_macs: the multiply-accumulates in float.
        quantized: how many sites are quantized.
        met: whether it meets the target.
        assigned: sites and the names of the choices they were given.
        bytes: of all parameters and buffers in a file; 0 where there were no choices.
    """

    excluded: tuple[str, ...]
    score: float
    drop: float
    float_macs: int
    quantized: int
    met: bool
    assigned: tuple[tuple[str, str], ...] = ()
    bytes: int = 0


@dataclass(frozen=True)
class Tuning(Printable):
    """A configuration that meets a target, as selectors for any quantizer.

    Attributes:
        excluded: the sites that stay in float, those with the most multiply-accumulates first.
        score: of the model with these settings.
        float_score, quantized_score: of the float model, and of the quantizer as it was.
        max_drop: how far below the float score it may be; None where `max_bytes` was asked for.
        float_macs, macs: multiply-accumulates in float, whoever left them there, and of the whole model.
        attempts: all settings that were tried, in order.
        notes: what else there is to say.
        written: the quantizer with the selectors set as data; None where it cannot be written.
        assigned: with `choices`, every site that has parameters, those with the most bytes first.
        bytes: with `choices`, of all parameters and buffers in a file.
        max_bytes: how many that may be; None where `max_drop` was asked for.
    """

    excluded: tuple[Excluded, ...]
    score: float
    float_score: float
    quantized_score: float
    max_drop: float | None
    float_macs: int
    macs: int
    attempts: tuple[Attempt, ...]
    notes: tuple[str, ...] = ()
    written: Mapping[str, Any] | None = None
    assigned: tuple[Assigned, ...] = ()
    bytes: int = 0
    max_bytes: int | None = None
    _quantizer: Quantizer | None = field(default=None, compare=False, repr=False)

    @property
    def quantizer(self) -> Quantizer:
        """Return the quantizer with the selectors set; of a file, one that is made of its data.

        Raises:
            ConfigError: it could not be written; `apply` sets the selectors on yours.
            BackendNotFoundError, PluginError: a backend of its cannot be had.
        """
        if self._quantizer is not None:
            return self._quantizer
        if self.written is None:
            raise ConfigError(
                "the quantizer that was tuned is code and not in the file: make it anew, and let apply() set "
                "the selectors on it"
            )
        return quantizer_from_dict(self.written)

    @property
    def selectors(self) -> tuple[Setting, ...]:
        """Return the settings of all sites, each once."""
        sites: tuple[Excluded | Assigned, ...] = (*self.excluded, *self.assigned)
        return _once(s for site in sites for s in site.settings)

    def apply(self, quantizer: Quantizer) -> Quantizer:
        """Return a quantizer with the selectors set; it is left as it is.

        Those that say float are set on each member of a composition, and one without selectors, of another
        engine or code, is not heard there. Those that give a configuration are set on the members whose
        sites they are for.

        Raises:
            UserError: the quantizer has no such member.
            ConfigError: its backend cannot follow a configuration.
        """
        quantizer = adapt(quantizer)
        return with_settings(quantizer, settings_by_member(quantizer, self.assigned, self.excluded))

    def to_dict(self) -> dict[str, Any]:
        """Return the tuning as JSON data; a score that is infinite is a text."""
        data = _tuning().write(self, "tuning")
        return {"format": FORMAT, "quantizer": data.pop("written"), **data}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, which `load` reads, and people too.

        Raises:
            OSError: it cannot be written.
        """
        with draft_of(Path(path)) as draft:
            draft.write_text(json.dumps(self.to_dict(), indent=2) + "\n", "utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tuning:
        """Read what `save` wrote.

        Raises:
            UserError: it is not such a file, or of a newer version.
            OSError: it cannot be read.
        """
        try:
            data = json.loads(Path(path).read_text("utf-8"))
            if data["format"] > FORMAT:
                raise UserError(f"{path} was written by a newer release of qompose: upgrade")
            del data["format"]
            tuning: Tuning = _tuning().read({"written": data.pop("quantizer"), **data}, "tuning")
            return tuning
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise UserError(f"{path} holds no tuning: {type(error).__name__}: {error}") from error

    def _blocks(self) -> list[Block]:
        share = self.float_macs / self.macs if self.macs else 0.0
        drop = self.float_score - self.score
        below = f"{drop:.3g} below float" if math.isfinite(drop) else "without bound below float"
        before = "as it was" if self.assigned else "all quantized"
        head = (
            f"score {self.score:.6g}, {below} ({self.float_score:.6g}), with {share:.1%} of the "
            f"multiply-accumulates in float; {before}: {self.quantized_score:.6g}"
        )
        if self.assigned:
            head += f"; {self.bytes:,} bytes, as it was: {self.attempts[0].bytes:,}"
        return [head, *self._tables(), *(f"- {note}" for note in self.notes)]

    def _tables(self) -> Iterator[Block]:
        if self.excluded:
            header = ("in float", "selectors", "MACs", "cost", "with it")
            yield Table(header, tuple(map(_cells, self.excluded)))
        if self.assigned:
            given = ("site", "choice", "bytes", "cost", "MACs")
            yield Table(given, tuple(map(_cells_of_choice, self.assigned)))
            tried = ("tried: choices", "score", "below float", "bytes")
        else:
            tried = ("tried: in float", "score", "below float", "MACs in float")
        rows = tuple(
            (
                named_choices(a.assigned) if self.assigned else named_or_nothing(a.excluded),
                f"{a.score:.6g}",
                f"{a.drop:.3g}",
                a.bytes if self.assigned else a.float_macs,
            )
            for a in self.attempts
        )
        yield Table(tried, rows)


def _tuning() -> Codec:
    """Return how a tuning is written as data."""
    setting = Codec(
        lambda value, path: selectors_to_data(Selectors([value]), {})[0],
        lambda data, path: selectors_from_data([data], {}, path).settings[0],
    )
    quantizer = Codec(lambda value, path: value, lambda data, path: data)
    types = {float: FLOAT, Setting: setting, Mapping[str, Any]: quantizer}
    codecs = codecs_of(Tuning, types, leave_out=("_quantizer",), defaults=True)
    return record(Tuning, codecs, defaults=True)


def named_or_nothing(sites: Sequence[str]) -> str:
    """Return the names of sites in a row, or a word for that there are none."""
    return ", ".join(sites) or "nothing"


def named_choices(assigned: Iterable[tuple[str, str]]) -> str:
    """Return how many sites have which choice."""
    counts = Counter(choice for _, choice in assigned)
    return "; ".join(f"{choice}: {count}" for choice, count in counts.items()) or AS_IT_IS


def _cells(site: Excluded) -> tuple[object, ...]:
    others = ", ".join(site.others)
    return (_where(site), "; ".join(site.selectors), site.macs, f"{site.cost:.3g}", others)


def _cells_of_choice(site: Assigned) -> tuple[object, ...]:
    return (_where(site), site.choice, site.bytes, f"{site.cost:.3g}", site.macs)


def _where(site: Excluded | Assigned) -> str:
    return f"{site.name} ({site.operator}{f' in {site.module}' if site.module else ''})"


def _once(settings: Iterable[Setting]) -> tuple[Setting, ...]:
    """Return settings without those that are there already; their configurations may not be hashable."""
    found: list[Setting] = []
    for setting in settings:
        if setting not in found:
            found.append(setting)
    return tuple(found)


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


def excluding(quantizer: Quantizer, settings: Iterable[Setting]) -> Quantizer:
    """Return a quantizer with settings that say float, set on every member; the quantizer stays as it is.

    All members get them: what one leaves in float, the next would take. One that has no selectors, because
    it is code or of another engine, is not heard there (`qompose.quantizer.composition`).
    """
    listed = list(settings)
    return with_settings(quantizer, {label: listed for label, _ in quantizer.labelled_members})


def with_settings(quantizer: Quantizer, by_member: Mapping[str, Sequence[Setting]]) -> Quantizer:
    """Return a quantizer with more settings, by the labels of the members; it stays as it is.

    Those for a member without selectors have to say float.

    Raises:
        ConfigError: a member's backend cannot follow the configuration of one of them.
    """
    labels = iter([label for label, _ in quantizer.labelled_members])
    return _with_settings(quantizer, labels, by_member)


def _with_settings(
    quantizer: Quantizer, labels: Iterator[str], by_member: Mapping[str, Sequence[Setting]]
) -> Quantizer:
    if isinstance(quantizer, ComposableQuantizer):
        composed, parts = copy.copy(quantizer), quantizer.quantizers
        composed.quantizers = tuple(_with_settings(part, labels, by_member) for part in parts)
        return composed
    listed = by_member.get(next(labels), ())
    if not listed:
        return quantizer
    if isinstance(quantizer, Restrained):
        return quantizer.also(listed)
    if not isinstance(quantizer, RuleQuantizer):
        return Restrained(quantizer, listed)
    selectors = quantizer.selectors
    for setting in listed:
        selectors.set(setting)
    return quantizer.with_selectors(selectors)


def settings_by_member(
    quantizer: Quantizer, assigned: Iterable[Assigned], excluded: Iterable[Excluded] = ()
) -> dict[str, list[Setting]]:
    """Return the settings of sites by the labels of the members that get them: those that say float, all.

    Raises:
        UserError: the member that quantizes a site is not one of a quantizer's, or has no selectors.
    """
    members = dict(quantizer.labelled_members)
    found: dict[str, list[Setting]] = {label: [] for label in members}
    for setting in (s for site in excluded for s in site.settings):
        for listed in found.values():
            listed.append(setting)
    for site in assigned:
        for setting in site.settings:
            if setting.config is None:
                for listed in found.values():
                    listed.append(setting)
            elif isinstance(members.get(site.owner), RuleQuantizer):
                found[site.owner].append(setting)
            else:
                raise UserError(
                    f"{site.name} is given {site.choice!r} by a selector of {site.owner}, which is not a "
                    f"member with selectors here; members: {', '.join(members)}"
                )
    return {label: [*_once(listed)] for label, listed in found.items()}


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
        """Return the score of the program itself."""
        return self.task.score(self._floats, "nothing quantized")

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
                f"{land[0]} is quantized by {owner}, and none of its selectors reaches it",
            )
        anchors = {plan.claims[left[operator] or 0].anchor for operator in new}
        asked.append(next((operator for operator in new if operator in anchors), new[0]))

    def settings(self, name: str, config: QuantizationConfig) -> tuple[Setting, ...]:
        """Return the settings that give all operators of a site a configuration."""
        land = territory(self.plan, {self.sites[name].claim})
        # A rule takes several operators only where all have one configuration.
        found = (self._picker.setting(operator, land, config) for operator in sorted(land))
        return _once(setting for setting in found if setting is not None)

    def model(self, names: Collection[str]) -> tuple[Any, tuple[int, int]]:
        """Return the model with some sites in float, and the sizes that `Attempt` has of it.

        Raises:
            CannotExclude: one of the sites stays quantized.
        """
        with _quiet():
            chosen = self.chosen(names) if names else Chosen(self.base, {})
        converted = self.converted(chosen.prepared)
        return self.lowered(converted), sizes_of(converted)

    def converted(self, prepared: GraphModule) -> GraphModule:
        """Return a prepared model calibrated and converted."""
        with _quiet():
            return convert_pt2e(
                self.base_calibrated if prepared is self.base else self.calibrated(prepared)
            )

    def lowered(self, converted: GraphModule) -> Any:
        """Return what is measured of a converted model: itself, or what it is lowered to."""
        with _quiet():
            target = self.task.target
            return converted if target is None else lower(converted, target=target)

    def prepared(self, quantizer: Quantizer) -> GraphModule:
        """Return the program prepared by another quantizer than that of the task."""
        with _quiet():
            return prepare_pt2e(self.task.model, quantizer)


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
