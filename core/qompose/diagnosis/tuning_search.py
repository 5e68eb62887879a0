# SPDX-License-Identifier: Apache-2.0
"""`tune`: the search for the operators that have to stay in float to meet an accuracy target."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NoReturn

from rich.progress import Progress
from torch.export import ExportedProgram
from torch.fx import GraphModule

from qompose.console import on_terminal, progress_bar
from qompose.diagnosis.mixed_precision import (
    Choices,
    MixedSearch,
    named_choices_of,
)
from qompose.diagnosis.operator_sensitivity import Sensitivity, SiteCost
from qompose.diagnosis.tuning_result import (
    Attempt,
    Excluded,
    Tuning,
    excluding,
    named_or_nothing,
    written_or_noted,
)
from qompose.diagnosis.tuning_trials import (
    CannotExclude,
    Chosen,
    Evaluator,
    Task,
    origin,
    territory,
)
from qompose.errors import TuningError, UserError
from qompose.plan.user_program import as_graph_module
from qompose.program.batches import check_limit, check_several, keeper, run_batch
from qompose.quantizer.composition import QuantizerLike, as_quantizer
from qompose.spec.quantization_spec import QuantizationConfig

_LEAST_SHARE = 0.1
"""Operators count as if they had this part of the mean of all multiply-accumulates: some have none."""


def tune(
    model: ExportedProgram | GraphModule,
    quantizer: QuantizerLike,
    data: Iterable[Any],
    metric: Callable[[Any], Any],
    max_drop: float | None = None,
    *,
    choices: Choices | Iterable[QuantizationConfig | None] | None = None,
    max_bytes: int | None = None,
    target: str | None = None,
    ranking: Sensitivity | None = None,
    transform: Callable[[Any], Any] | None = None,
    limit: int | None = None,
    progress: bool | None = None,
) -> Tuning:
    """Find selectors that meet a target: what to leave in float, or which configuration each operator gets.

    Without `choices`, as few multiply-accumulates stay in float as the target allows. Operators are moved to
    float in the order of their cost per multiply-accumulate until the target is met; then each is quantized
    again, largest first, if the target still holds. So no single operator could be quantized in addition.

    With `choices`, every operator with parameters gets one of them, or stays as the quantizer says: with
    `max_drop` for the smallest file, with `max_bytes` for the smallest loss. The cost of each choice at each
    operator is measured on four batches, and the choices are combined as a knapsack
    (`qompose.diagnosis.knapsack`).

    Every candidate is prepared, calibrated, converted and measured.

    Args:
        model: an exported program.
        quantizer: it is left unchanged.
        data: calibration batches, as for `calibrate`. They are iterated more than once; an iterator is
            kept in memory.
        metric: a function of a model, called as the program is, that returns a score; higher is better. The
            float program is scored, too.
        max_drop: how far below the float program's score the result may be, in units of the metric.
        choices: configurations, with None for float; or a mapping of names to them.
        max_bytes: the largest size of all parameters and buffers in a file of `qompose.save`. With
            `choices`, and instead of `max_drop`.
        target: what to lower models for before they are scored; None scores converted models.
        ranking: an earlier `sensitivity` of this model and quantizer; None measures four batches.
        transform, limit: as for `calibrate`.
        progress: whether to show a progress bar; None shows it on a terminal.

    Raises:
        TuningError: no setting meets the target; its `tuning` is the best that was found.
        UserError: `max_drop` is negative or not a number; `max_bytes`, `choices`, `limit` or `ranking` is
            invalid, or of another model; the metric returns no number.
        ConfigError: no backend of the quantizer can follow one of the choices.
        MemberError: the metric raised an error.
        NotExportedError, SelectorError, CalibrationError: as the stages raise them.
    """
    _check_target(max_drop, max_bytes, choices, ranking)
    check_limit(limit)
    if ranking is not None and not isinstance(ranking, Sensitivity):
        raise UserError(
            f"ranking must be the result of sensitivity(), got {type(ranking).__name__}"
        )
    check_several(data, "tune")
    quantizer = as_quantizer(quantizer)
    if isinstance(data, Iterator):
        numbered = enumerate(islice(data, limit), start=1)
        keep = keeper(as_graph_module(model, "tune"))
        data = [run_batch(keep, batch, transform, number) for number, batch in numbered]
        transform = None
    task = Task(model, quantizer, data, metric, transform, limit, target)
    evaluator = Evaluator(task)
    with progress_bar(on_terminal(progress)) as bar:
        if choices is not None:
            return MixedSearch(evaluator, named_choices_of(choices), max_drop, max_bytes, bar).run()
        assert max_drop is not None
        search = Search(evaluator, max_drop, bar)
        if not search.met(()):
            search.run(ranking)
        return search.result()


def _check_target(max_drop: object, max_bytes: object, choices: object, ranking: object) -> None:
    """Check that there is one target, and that the other arguments are for the same search."""
    if choices is None:
        if max_bytes is not None:
            raise UserError("max_bytes requires choices=")
    elif ranking is not None:
        raise UserError(
            "ranking= cannot be combined with choices=: tune measures the cost of each choice"
        )
    if (max_drop is None) == (max_bytes is None):
        either = "max_drop" if choices is None else "exactly one of max_drop and max_bytes"
        raise UserError(f"{either} must be given as the target")
    if max_bytes is not None and (type(max_bytes) is not int or max_bytes <= 0):
        raise UserError(f"max_bytes must be a positive integer, got {max_bytes!r}")
    if max_drop is not None:
        _check_drop(max_drop)


def _check_drop(max_drop: object) -> None:
    if isinstance(max_drop, bool) or not isinstance(max_drop, (int, float)):
        raise UserError(f"max_drop must be a number, got {max_drop!r}")
    if not (math.isfinite(max_drop) and max_drop >= 0):
        raise UserError(f"max_drop must be finite and not negative, got {max_drop!r}")


def _ranked(evaluator: Evaluator, ranking: Sensitivity) -> list[SiteCost]:
    """Return the sites, those first that cost most for each multiply-accumulate."""
    costs = {row.name: row.cost for row in ranking}
    if evaluator.sites and costs.keys().isdisjoint(evaluator.sites):
        raise UserError("ranking contains no site of this model; it belongs to another model")
    sites = [replace(row, cost=costs.get(name, 0.0)) for name, row in evaluator.sites.items()]
    mean = sum(site.macs for site in sites) / max(len(sites), 1)
    least = max(_LEAST_SHARE * mean, 1.0)
    return sorted(sites, key=lambda site: (-site.cost / max(site.macs, least), -site.cost))


@dataclass
class Search:
    """Looks for the sites that have to stay in float.

    Attributes:
        found: the last setting that met the target: each that is tried after it leaves less in float.
        notes: which sites cannot be left in float.
        ranking_notes: what a ranking that was measured here says beside its costs.
        attempts: what was tried, by the sites in float, in alphabetical order.
    """

    evaluator: Evaluator
    max_drop: float
    bar: Progress
    found: tuple[str, ...] | None = None
    attempts: dict[tuple[str, ...], Attempt] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ranking_notes: tuple[str, ...] = ()
    costs: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._task = self.bar.add_task("settings", total=None)
        self.float_score = self.evaluator.float_score()

    def met(self, names: Collection[str]) -> bool:
        """Try a setting, unless it is known; tell whether it meets the target.

        Raises:
            CannotExclude: one of the sites stays quantized.
        """
        attempt = self._attempt(tuple(sorted(names)))
        if attempt.met and (attempt.quantized or not names):
            self.found = attempt.excluded
        return attempt.met

    def _attempt(self, names: tuple[str, ...]) -> Attempt:
        if names not in self.attempts:
            model, sizes = self.evaluator.model(names)
            what = f"{', '.join(names)} in float" if names else "everything quantized"
            score = self.evaluator.task.score(model, what)
            drop = self.float_score - score
            self.attempts[names] = Attempt(names, score, drop, *sizes, drop <= self.max_drop)
            self.bar.advance(self._task)
        return self.attempts[names]

    def run(self, ranking: Sensitivity | None) -> None:
        """Find sites to leave in float that meet the target.

        Raises:
            UserError: the ranking is of another model.
            TuningError: there are none.
        """
        if ranking is None:
            ranking = self.evaluator.ranking(self.evaluator.base_calibrated, self.bar)
            self.ranking_notes = tuple(ranking.notes)
        ranked = _ranked(self.evaluator, ranking)
        self.costs = {site.name: site.cost for site in ranked}
        order = [site.name for site in ranked]
        size = self._enough(order)
        if size is not None:
            self._take_back(order[:size])
        if self.found is None:
            self._fail(len(order))

    def _enough(self, order: list[str]) -> int | None:
        """Return how many of the first sites are enough; None if all are not.

        The number is doubled until it is enough, and then halved in between: where a few sites are to
        blame, few settings are tried. Sites that cannot be left in float are taken out of `order`.
        """
        fails, size = 0, 1
        while not self._enough_are(order, size):
            if size >= len(order):
                return None
            fails, size = size, size * 2
        size = min(size, len(order))
        while size - fails > 1:
            middle = (fails + size) // 2
            fails, size = (fails, middle) if self._enough_are(order, middle) else (middle, size)
        return size

    def _enough_are(self, order: list[str], size: int) -> bool:
        """Tell whether the first sites are enough; those that cannot be in float make room for others."""
        while order:
            try:
                return self.met(order[:size])
            except CannotExclude as error:
                order.remove(error.site)
                label = self.evaluator.sites[error.site].label
                self.notes.append(f"{label} cannot be left in float: {error.why}")
        return False

    def _take_back(self, names: Sequence[str]) -> None:
        """Quantize sites again, the largest first, as long as the target is met."""
        sites, staying = self.evaluator.sites, set(names)
        largest = sorted(names, key=lambda name: (-sites[name].macs, self.costs[name]))
        changed = True
        while changed:
            changed = False
            for name in [n for n in largest if n in staying]:
                if self._can_be_quantized(staying, name):
                    staying.remove(name)
                    changed = True

    def _can_be_quantized(self, staying: set[str], name: str) -> bool:
        try:
            return self.met(staying - {name})
        except CannotExclude:
            return False

    def _fail(self, able: int) -> NoReturn:
        """Say that no setting meets the target, which is the best, and what stands in the way."""
        tried = [a for a in self.attempts.values() if a.quantized] or [self.attempts[()]]
        best = max(tried, key=lambda attempt: attempt.score)
        every = f"{able} of {len(self.evaluator.sites)} sites can be left in float"
        which = f"the best one has score {best.score:.6g} with "
        which += f"{named_or_nothing(best.excluded)} in float"
        if not math.isfinite(best.score):
            which = f"the metric returned {best.score} for all {len(tried)} settings"
        raise TuningError(
            f"no setting with quantized operators is within {self.max_drop:g} of the float score "
            f"{self.float_score:.6g}; {which} ({every})"
            + "".join(f"\n  - {note}" for note in self.notes),
            self._tuning(best),
        )

    def result(self) -> Tuning:
        """Return what was found."""
        assert self.found is not None
        return self._tuning(self.attempts[self.found])

    def _tuning(self, attempt: Attempt) -> Tuning:
        evaluator, notes = self.evaluator, [*self.notes, *self.ranking_notes]
        base = Chosen(evaluator.base, {})
        chosen = evaluator.chosen(attempt.excluded) if attempt.excluded else base
        rows = tuple(
            self._excluded(name, chosen)
            for name in sorted(attempt.excluded, key=lambda n: (-evaluator.sites[n].macs, n))
        )
        listed = {setting for row in rows for setting in row.settings}
        quantizer = excluding(evaluator.task.quantizer, [s for r in rows for s in r.settings])
        quantizer = quantizer if listed else evaluator.task.quantizer
        listed_already = {name for row in rows for name in row.others}
        more = sorted(set(_lost(evaluator, attempt.excluded, chosen)) - listed_already)
        notes += [f"{name} also stays in float" for name in more]
        written = written_or_noted(quantizer, notes)
        return Tuning(
            excluded=rows,
            score=attempt.score,
            float_score=self.float_score,
            quantized_score=self.attempts[()].score,
            max_drop=self.max_drop,
            float_macs=attempt.float_macs,
            macs=sum(operator.macs for operator in evaluator.plan.operators),
            attempts=tuple(self.attempts.values()),
            notes=tuple(notes),
            written=written,
            _quantizer=quantizer,
        )

    def _excluded(self, name: str, chosen: Chosen) -> Excluded:
        site, evaluator = self.evaluator.sites[name], self.evaluator
        return Excluded(
            name=name,
            operator=site.operator,
            module=site.module,
            macs=site.macs,
            cost=self.costs[name],
            settings=chosen.settings[name],
            others=tuple(_lost(evaluator, (name,), evaluator.chosen([name]))),
        )


def _lost(evaluator: Evaluator, names: Sequence[str], chosen: Chosen) -> Iterator[str]:
    """Yield the operators that are quantized with nothing in float, and not with some sites in float."""
    meant = territory(evaluator.plan, {evaluator.sites[name].claim for name in names})
    before = {origin(o) for o in evaluator.plan.operators if o.claim is not None}
    after = {origin(o) for o in chosen.plan.operators if o.claim is not None}
    yield from sorted(before - after - meant)
