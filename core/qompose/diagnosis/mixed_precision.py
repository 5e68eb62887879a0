# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: the configuration of each site, of several, for few bytes or little loss.

Each choice is given to all sites at once, and what it costs at each of them alone is measured
(`qompose.sensitivity`), with the integers and scales that its algorithms make. Costs and bytes fill a
knapsack (`qompose.diagnosis.knapsack`), and what comes out is prepared, calibrated, converted and measured as
a whole, since costs do not quite add up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from rich.progress import Progress
from torch import Tensor
from torch.fx import GraphModule, Node

from qompose.calibration.statistics_data import prepared_record
from qompose.diagnosis.knapsack import Option, efficient
from qompose.diagnosis.operator_sensitivity import SiteCost
from qompose.diagnosis.tuning_result import (
    AS_IT_IS,
    Assigned,
    Attempt,
    Tuning,
    named_choices,
    settings_by_member,
    with_settings,
    written_or_noted,
)
from qompose.diagnosis.tuning_trials import (
    CannotExclude,
    Evaluator,
    origin,
    sizes_of,
)
from qompose.errors import ConfigError, TuningError, UserError
from qompose.plan.plan import Plan, Record
from qompose.program.aliasing import DisjointSets
from qompose.program.control_flow import nodes_in
from qompose.program.graph import constant_of, layout_of
from qompose.program.meta import META_KEY
from qompose.quantizer.base import Quantizer
from qompose.quantizer.rule_quantizer import RuleQuantizer
from qompose.spec.claim import Claim
from qompose.spec.quantization_spec import QuantizationConfig, QuantizationSpec
from qompose.spec.selectors import Setting
from qompose.storage.artifact_file import stored_bytes

FLOAT = "float"
_IN_BODIES = "its parameters are read in a control-flow subgraph, where their size is unknown"
_BEYOND = 4
"""How many assignments are tried that are smaller than one that does not meet the target."""
Choices = Mapping[str, QuantizationConfig | None]
"""Configurations by name, None for float."""


def named_choices_of(choices: object) -> dict[str, QuantizationConfig | None]:
    """Return choices by their names.

    Raises:
        UserError: there are none, two have one name, or one is no configuration.
    """
    if isinstance(choices, Mapping):
        pairs = [*choices.items()]
    elif isinstance(choices, Iterable) and not isinstance(choices, (str, bytes)):
        pairs = [(FLOAT if config is None else str(config), config) for config in choices]
    else:
        raise UserError(
            "choices must be a sequence of configurations, or a mapping from names to "
            f"configurations, got {choices!r}"
        )
    for name, config in pairs:
        if config is not None and not isinstance(config, QuantizationConfig):
            raise UserError(
                "choices must contain QuantizationConfig objects, or None for float, got "
                f"{config!r}"
            )
        if config is not None and config.is_qat:
            raise UserError(
                f"the choice {name!r} is for training (is_qat=True), but tune calibrates; use "
                "a configuration without is_qat"
            )
        if not isinstance(name, str) or not name or name == AS_IT_IS:
            raise UserError(f"choice names must be strings, not '' or {AS_IT_IS!r}, got {name!r}")
    again = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if again:
        raise UserError(f"two choices are named {again[0]!r}; pass a mapping with distinct names")
    if not pairs:
        raise UserError(
            "choices is empty; it must contain a configuration or None (float). The quantizer's "
            "own configuration is always included"
        )
    return dict(pairs)


@dataclass
class MixedSearch:
    """Looks for the choice of each site.

    Attributes:
        max_drop, max_bytes: the target; one of them is None.
        sites: those that have parameters, and a member with selectors that quantizes them.
        options: by site, what is known of each choice that it can have.
        settings: by site and choice, the selectors.
        attempts: what was tried, by the choices of all sites, in order.
    """

    evaluator: Evaluator
    choices: Choices
    max_drop: float | None
    max_bytes: int | None
    bar: Progress
    sites: dict[str, SiteCost] = field(default_factory=dict)
    options: dict[str, dict[str, Option]] = field(default_factory=dict)
    settings: dict[tuple[str, str], tuple[Setting, ...]] = field(default_factory=dict)
    attempts: dict[tuple[tuple[str, str], ...], Attempt] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._task = self.bar.add_task("settings", total=None)
        self.float_score = self.evaluator.float_score()
        self.sites = dict(self._adjustable())
        self._check_sites()

    def _check_sites(self) -> None:
        if not self.sites:
            raise UserError(
                "nothing to tune: no operator with parameters outside control flow is quantized "
                "by a quantizer with selectors" + "".join(f"\n  - {note}" for note in self.notes)
            )

    def _adjustable(self) -> Iterator[tuple[str, SiteCost]]:
        """Yield the sites with parameters whose member takes configurations; name the others."""
        members = dict(self.evaluator.task.quantizer.labelled_members)
        parts = _Parameters(self.evaluator.base)
        for name, site in self.evaluator.sites.items():
            if not parts.of(self._nodes(self.evaluator.plan, site.claim)):
                continue
            if isinstance(members.get(site.owner), RuleQuantizer):
                yield name, site
            else:
                self.notes.append(f"{site.label} is unchanged: {site.owner} has no selectors")

    @staticmethod
    def _nodes(plan: Plan, claim: int) -> Sequence[str]:
        return plan.claims[claim].nodes

    def run(self) -> Tuning:
        """Measure the choices, fill the knapsack, and try what comes out.

        Raises:
            ConfigError: no member's backend can follow one of the choices.
            TuningError: no assignment meets the target.
        """
        as_it_is = self._measure(
            AS_IT_IS, self.evaluator.base_calibrated, dict.fromkeys(self.sites, ())
        )
        self._check_sites()
        self._tried({}, as_it_is)
        for choice, config in self.choices.items():
            if config is None:
                self._measure_float(choice)
            else:
                self._measure_choice(choice, config)
        while not self._searched():
            pass
        return self._result()

    def _searched(self) -> bool:
        """Search with the options that there are; tell whether all of those that were tried hold."""
        before = {site: len(known) for site, known in self.options.items()}
        options = {tied[0]: some for tied in self._tied if (some := self._options_of(tied))}
        if self.max_bytes is None:
            self._fewest_bytes(efficient(options))
        else:
            self._within_bytes(options, self.max_bytes)
        return before == {site: len(known) for site, known in self.options.items()}

    @cached_property
    def _tied(self) -> list[tuple[str, ...]]:
        """The sites, of which those that read one tensor are together: they have its integers."""
        numbers, first = {name: number for number, name in enumerate(self.sites)}, dict[Any, int]()
        joined, found = DisjointSets(range(len(numbers))), dict[int, tuple[str, ...]]()
        for name, number in numbers.items():
            held = self._base_parameters.of(
                self._nodes(self.evaluator.plan, self.sites[name].claim)
            )
            for tensor in held.values():
                joined.join(number, first.setdefault(layout_of(tensor), number))
        for name, number in numbers.items():
            root = joined.find(number)
            found[root] = (*found.get(root, ()), name)
        return list(found.values())

    def _options_of(self, tied: Sequence[str]) -> list[Option]:
        """Return the options that all of some sites have, for all of them."""
        several = [self.options.get(name, {}) for name in tied]
        return [
            Option(
                choice,
                sum(known[choice].bytes for known in several),
                sum(known[choice].cost for known in several),
            )
            for choice in several[0]
            if all(choice in known for known in several)
        ]

    def _names(self, assigned: Mapping[str, Option]) -> dict[str, str]:
        """Return the choice of each site."""
        by_first = {tied[0]: tied for tied in self._tied}
        return {name: option.name for site, option in assigned.items() for name in by_first[site]}

    def _measure_choice(self, choice: str, config: QuantizationConfig) -> None:
        """Give a choice to all sites whose member can follow it, and measure what it costs each of them."""
        given, refused = dict[str, tuple[Setting, ...]](), list[ConfigError]()
        for owner in dict.fromkeys(site.owner for site in self.sites.values()):
            settings = dict(self._settings(owner, config))
            listed = {owner: [s for some in settings.values() for s in some]}
            try:
                with_settings(self.evaluator.task.quantizer, listed)
            except ConfigError as error:
                refused.append(error)
            else:
                given |= settings
        if refused and not given:
            raise refused[0]
        self.settings |= {(name, choice): settings for name, settings in given.items()}
        calibrated = self.evaluator.calibrated_by(self._quantizer(dict.fromkeys(given, choice)))
        plan, taken = prepared_record(calibrated, "tune").plan, dict[str, tuple[int, ...]]()
        for name in given:
            claims = _claims_of(plan, self.sites[name], str(config))
            if claims and all(self._has_weight(plan.claims[n], config) for n in claims):
                taken[name] = claims
            else:
                self.notes.append(
                    f"{self.sites[name].label} cannot be {choice!r}: {_why(plan, name)}"
                )
        converted = self._measure(choice, calibrated, taken)
        if len(taken) == len(given):
            self._tried(dict.fromkeys(taken, choice), converted)

    def _settings(
        self, owner: str, config: QuantizationConfig
    ) -> Iterator[tuple[str, tuple[Setting, ...]]]:
        for name, site in self.sites.items():
            if site.owner != owner:
                continue
            settings = self.evaluator.settings(name, config)
            if settings:
                yield name, settings
            else:
                self.notes.append(f"{site.label} is unchanged: no selector reaches it")

    def _measure(
        self, choice: str, calibrated: GraphModule, taken: Mapping[str, tuple[int, ...]]
    ) -> GraphModule:
        """Measure what a choice costs at sites, and the bytes it takes; return the converted program.

        Args:
            taken: sites, each with its claims in this program; none are its own.
        """
        costs = {row.claim: row.cost for row in self.evaluator.ranking(calibrated, self.bar)}
        plan = prepared_record(calibrated, "tune").plan
        converted = self.evaluator.converted(calibrated)
        parameters, counted = _Parameters(converted), _Counted()
        for name in taken:
            claims = taken[name] or (self.sites[name].claim,)
            cost = sum(costs.get(claim, 0.0) for claim in claims)
            if not math.isfinite(cost):
                self.notes.append(
                    f"{self.sites[name].label} as {choice!r} has the cost {cost} and is excluded"
                )
                continue
            nodes = [node for claim in claims for node in self._nodes(plan, claim)]
            held = parameters.of(nodes)
            if held:
                option = Option(choice, stored_bytes(counted.new(held)), cost)
                self.options.setdefault(name, {})[choice] = option
            else:
                site = self.sites.pop(name)
                self.notes.append(f"{site.label} is unchanged: {_IN_BODIES}")
        return converted

    def _measure_float(self, choice: str) -> None:
        """Learn how each site is left in float, and what its parameters take then."""
        counted = _Counted()
        for name, site in self.sites.items():
            try:
                self.settings[name, choice] = self.evaluator.chosen([name]).settings[name]
            except CannotExclude as error:
                self.notes.append(f"{site.label} cannot be left in float: {error.why}")
                continue
            held = self._base_parameters.of(self._nodes(self.evaluator.plan, site.claim))
            size = stored_bytes(counted.new(held))
            self.options.setdefault(name, {})[choice] = Option(choice, size, 0.0)

    def _quantizer(self, assigned: Mapping[str, str]) -> Quantizer:
        quantizer = self.evaluator.task.quantizer
        rows = [self._row(name, choice) for name, choice in assigned.items()]
        return with_settings(quantizer, settings_by_member(quantizer, rows))

    def _row(self, name: str, choice: str) -> Assigned:
        site, option = self.sites[name], self.options.get(name, {}).get(choice)
        return Assigned(
            name=name,
            operator=site.operator,
            module=site.module,
            macs=site.macs,
            owner=site.owner,
            choice=choice,
            bytes=0 if option is None else option.bytes,
            cost=0.0 if option is None else option.cost,
            settings=self.settings.get((name, choice), ()),
        )

    def attempt(self, assigned: Mapping[str, str]) -> Attempt:
        """Try an assignment, unless it is known."""
        given = {name: choice for name, choice in assigned.items() if choice != AS_IT_IS}
        key = tuple(sorted(given.items()))
        if key not in self.attempts:
            calibrated = self.evaluator.calibrated_by(self._quantizer(given))
            self._tried(given, self.evaluator.converted(calibrated))
        return self.attempts[key]

    def _tried(self, given: Mapping[str, str], converted: GraphModule) -> None:
        """Ask the metric about an assignment. One that does not hold beside the others is not met."""
        key = tuple(sorted(given.items()))
        everything = tuple((name, given.get(name, AS_IT_IS)) for name in sorted(self.sites))
        what = named_choices(everything)
        score = self.evaluator.task.score(self.evaluator.lowered(converted), what)
        drop, size = self.float_score - score, stored_bytes(_state(converted))
        held = {name: self._holds(name, choice, converted) for name, choice in key}
        met = all(held.values()) and (self.max_drop is None or drop <= self.max_drop)
        met = met and (self.max_bytes is None or size <= self.max_bytes)
        excluded = tuple(name for name, choice in key if self.choices[choice] is None)
        self.attempts[key] = Attempt(
            excluded, score, drop, *sizes_of(converted), met, everything, size
        )
        self.bar.advance(self._task)

    def _holds(self, name: str, choice: str, converted: GraphModule) -> bool:
        """Tell whether a site has its choice in a program; else it is none of its options any more."""
        config, site = self.choices[choice], self.sites[name]
        record: Record = converted.meta[META_KEY]
        if config is None:
            holds = not _claims_of(record.plan, site)
        else:
            claims = _claims_of(record.plan, site, str(config))
            holds = bool(claims) and record.dropped.keys().isdisjoint(claims)
            holds = holds and all(self._has_weight(record.plan.claims[n], config) for n in claims)
        if not holds:
            self.notes.append(
                f"{site.label} cannot be {choice!r} in combination with the other choices"
            )
            self.options[name].pop(choice, None)
        return holds

    def _has_weight(self, claim: Claim, config: QuantizationConfig) -> bool:
        """Tell whether a claim has parameters with the integers of a configuration, not of another reader.

        Readers of one tensor get one specification, of any of them.
        """
        if config.weight is None:
            return True
        wanted = _integers(config.weight)
        own = [s.spec for s in claim.specs if self._base_parameters.reads(s.point.source)]
        found = [_integers(spec) for spec in own if isinstance(spec, QuantizationSpec)]
        return not found or wanted in found

    @cached_property
    def _base_parameters(self) -> _Parameters:
        return _Parameters(self.evaluator.base)

    def _fewest_bytes(self, assignments: list[dict[str, Option]]) -> None:
        """Find where the target begins not to be met, between the cheapest assignment and the smallest.

        Costs do not quite add up, so that smaller ones may meet it again: some of those are tried, too.
        """
        fails = self._first_miss(assignments, -1, len(assignments))
        beyond = range(fails + 1, len(assignments))
        for place in reversed(beyond[:: max(1, len(beyond) // _BEYOND)]):
            if self.attempt(self._names(assignments[place])).met:
                self._first_miss(assignments, place, len(assignments))
                return

    def _first_miss(self, assignments: Sequence[dict[str, Option]], meets: int, fails: int) -> int:
        """Halve between one that meets the target and one that does not; return the last that did not."""
        while fails - meets > 1:
            middle = (fails + meets) // 2
            met = self.attempt(self._names(assignments[middle])).met
            fails, meets = (fails, middle) if met else (middle, meets)
        return fails

    def _within_bytes(self, options: Mapping[str, Sequence[Option]], most: int) -> None:
        """Try the cheapest assignment that fits; the next smaller ones where it is larger than its parts."""
        own = sum(known[AS_IT_IS].bytes for known in self.options.values() if AS_IT_IS in known)
        room = most - (self.attempts[()].bytes - own)
        while fitting := efficient(options, room):
            found = fitting[0]
            attempt = self.attempt(self._names(found))
            if (
                attempt.met or attempt.bytes <= most
            ):  # or it does not hold, and others have to be looked for
                return
            room = sum(option.bytes for option in found.values()) - max(1, attempt.bytes - most)
        # Sums of bytes are not quite those of the whole, of which the smallest may fit.
        self.attempt(self._names(efficient(options)[-1]))

    def _result(self) -> Tuning:
        met = [attempt for attempt in self.attempts.values() if attempt.met]
        if not met:
            self._fail()
        if self.max_bytes is None:
            return self._tuning(min(met, key=lambda a: (a.bytes, a.drop)))
        return self._tuning(min(met, key=lambda a: (a.drop, a.bytes)))

    def _fail(self) -> NoReturn:
        tried = self.attempts.values()
        if self.max_bytes is None:
            best = min(tried, key=lambda a: a.drop)
            what = f"within {self.max_drop:g} of the float score {self.float_score:.6g}"
            which = f"the best one has score {best.score:.6g} and {best.bytes:,} bytes"
        else:
            best = min(tried, key=lambda a: a.bytes)
            what = f"at most {self.max_bytes:,} bytes"
            which = f"the smallest one has {best.bytes:,} bytes"
        raise TuningError(
            f"no trial kept its choices and was {what}; {which} ({named_choices(best.assigned)})"
            + "".join(f"\n  - {note}" for note in dict.fromkeys(self.notes)),
            self._tuning(best),
        )

    def _tuning(self, attempt: Attempt) -> Tuning:
        given, evaluator = dict(attempt.assigned), self.evaluator
        rows = [self._row(name, choice) for name, choice in given.items()]
        quantizer, notes = self._quantizer(given), [*dict.fromkeys(self.notes)]
        written = written_or_noted(quantizer, notes)
        return Tuning(
            excluded=(),
            score=attempt.score,
            float_score=self.float_score,
            quantized_score=self.attempts[()].score,
            max_drop=self.max_drop,
            float_macs=attempt.float_macs,
            macs=sum(operator.macs for operator in evaluator.plan.operators),
            attempts=tuple(self.attempts.values()),
            notes=tuple(notes),
            written=written,
            assigned=tuple(sorted(rows, key=lambda row: (-row.bytes, row.name))),
            bytes=attempt.bytes,
            max_bytes=self.max_bytes,
            _quantizer=quantizer,
        )


def _integers(spec: Any) -> tuple[object, ...]:
    """Return what kind of integers a specification asks for."""
    names = "dtype", "quant_min", "quant_max", "block_size"
    return tuple(getattr(spec, name, None) for name in names)


def _claims_of(plan: Plan, site: SiteCost, config: str | None = None) -> tuple[int, ...]:
    """Return the claims that hold a site, all of its owner and a configuration if that is given.

    None where the operator that it is named after is in none of them.
    """
    wanted = {name.partition("/")[0] for name in (site.name, *site.operators)}
    found = dict[int, set[str]]()
    for operator in plan.operators:
        if operator.claim is not None and origin(operator) in wanted:
            found.setdefault(operator.claim, set()).add(origin(operator))
    if config is not None:
        fits = (site.owner, config)
        kept = (n for n in found if (plan.claims[n].owner, plan.claims[n].config) == fits)
        found = {number: found[number] for number in kept}
    named = any(site.name.partition("/")[0] in names for names in found.values())
    return tuple(sorted(found)) if named else ()


def _why(plan: Plan, name: str) -> str:
    """Return why an operator is not quantized as it was to be."""
    found = next((o for o in plan.operators if origin(o) == name.partition("/")[0]), None)
    if found is None or found.claim is not None:
        return "another rule claims it"
    return found.reason


def _state(module: GraphModule) -> dict[str, Tensor]:
    state = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return dict(state)


class _Counted:
    """Tensors whose bytes were counted, at the first site that reads them."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    def new(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the others, which are counted then."""
        found = {path: value for path, value in held.items() if layout_of(value) not in self._seen}
        self._seen.update(map(layout_of, found.values()))
        return found


class _Parameters:
    """The parameters and buffers that operators of a program read, also through what is computed of them."""

    def __init__(self, program: GraphModule) -> None:
        self._nodes = {node.name: node for node in nodes_in(program)}
        self._constant: set[Node] = set()
        for node in self._nodes.values():
            read = node.all_input_nodes
            computed = (
                node.op in ("call_function", "call_module")
                and read
                and self._constant.issuperset(read)
            )
            if node.op == "get_attr" or computed:
                self._constant.add(node)

    def reads(self, name: str) -> bool:
        """Tell whether a value is a parameter, or computed of parameters alone."""
        return self._nodes.get(name) in self._constant

    def of(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return those that some nodes read, by where they stand."""
        found: dict[str, Tensor] = {}
        readers = [self._nodes[name] for name in names if name in self._nodes]
        waiting = [source for reader in readers for source in reader.all_input_nodes]
        while waiting:
            node = waiting.pop()
            if node in self._constant:
                value = constant_of(node)
                if value is not None:
                    found[str(node.target)] = value
                waiting += node.all_input_nodes
        return found
