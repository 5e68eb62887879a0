# SPDX-License-Identifier: Apache-2.0
"""From the statistics of a prepared model to its quantization parameters: the Solution."""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from qompose.algorithms import algorithms_of
from qompose.algorithms.blocks import Learned, learned_of
from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.channel_factors import ChannelFactors
from qompose.conversion.integer_bias import rounded_biases, widen_scales_for_int32
from qompose.errors import (
    CalibrationError,
    ConfigError,
    StageError,
    UncalibratedError,
    UnlearnedError,
    blaming,
    first_of,
    warn_user,
)
from qompose.observers.auto_range import WHOLE, AutoRangeObserver, Choice
from qompose.observers.channel_ranges import PerChannelRangeObserver, base_observer, screen_of
from qompose.observers.fake_quantize import FakeQuantize
from qompose.observers.foreign_observer import can_stand
from qompose.observers.input_sums import without_rows
from qompose.observers.make_observer import (
    DerivedObserver,
    UnitScaleObserver,
    check_observer,
    eps_of,
    has_data,
    integer_bounds,
    least_scale,
    observer_nodes,
    observers_of,
    qparams_of,
    was_fed,
)
from qompose.observers.min_max import PlaceholderObserver, keeps_a_range_alone
from qompose.observers.value_screening import FAR_FROM_TYPICAL, Screen
from qompose.plan.plan import Group, Plan, subject_of
from qompose.program.control_flow import RUNNERS, bodies_of, body_labels, is_nested_call, nodes_in
from qompose.program.disk import do_ahead, kept, spools
from qompose.program.graph import constant_of, module_path, value_of
from qompose.program.meta import GROUP_TAG, RAN_KEY, tag_of
from qompose.spec.claim import Point
from qompose.spec.qdq import Absorbed, QParams
from qompose.spec.qparams import CASTS, FLOAT_ZERO_POINT, UNIT_SCALE, AllowUncalibrated, Bounds
from qompose.spec.quantization_spec import QuantizationSpec, converts_itself

"""The `allow_uncalibrated` that gives tensors without data a scale of 1."""


@dataclass(frozen=True)
class Observed:
    """A node that calls an observer, the number of its group, and the name of the tensor it sees."""

    node: Node
    group: int
    tensor: str


@dataclass(frozen=True)
class Solution:
    """What a prepared model's statistics give; whatever is done with it changes neither.

    Attributes:
        observed: the observer nodes, in the order of the program.
        observers: by group.
        delegated: groups whose observers replace their own nodes, by number; how messages name their tensors.
        qparams: by group that lives, is not dynamic and is not delegated.
        factors: which channels get factors, and which parameters take them up.
        integers: by group of a weight, its integers, where they are not those next to its values.
        parameters: by name, the parameters that get other values before they are read: biases with factors
            or corrections, and what divides the input of a product.
        biases: by claim, the bias that its kernel adds as integers.
        dropped: claims that cannot be followed, with the reason.
        askers: the claims that ask for a point in a group, which are not dropped.
        made: a line for each change of channels and biases.
        findings: a line for each tensor whose statistics look wrong.
        found: the program as algorithms saw it last.
    """

    observed: Sequence[Observed]
    observers: Mapping[int, Any]
    delegated: Mapping[int, str]
    qparams: Mapping[int, QParams]
    factors: ChannelFactors
    integers: Mapping[int, Tensor]
    parameters: Mapping[str, Tensor]
    biases: Mapping[int, Tensor]
    dropped: Mapping[int, str]
    askers: Mapping[tuple[Point, int], int]
    made: Sequence[str]
    findings: Sequence[str]
    found: Calibrated

    def absorbed(self, name: str) -> Absorbed:
        """Return the factors that a parameter takes up as it becomes integers."""
        return () if name in self.parameters else self.factors.absorbed(name)

    def claims_reading(self, observed: Observed, reader: Node) -> frozenset[int]:
        """Return the claims for whose sake a reader of an observer node reads integers; of floats, none."""
        points = (Point(observed.tensor), Point(observed.tensor, reader.name))
        asked = ((point, observed.group) for point in points)
        return frozenset(self.askers[point] for point in asked if point in self.askers)


def solve(
    model: GraphModule,
    plan: Plan,
    *,
    allow_uncalibrated: AllowUncalibrated,
    unlearned: bool = False,
) -> Solution:
    """Return the quantization parameters of a prepared model, which is left as it is.

    With `unlearned`, algorithms that learn from data need not have done so.

    A claim whose tensor held mask values (infinities, or values near the dtype's largest) is dropped: its
    region stays in float.

    Raises:
        StageError: observers that prepare inserted are not in the model any more.
        UncalibratedError: an observer saw nothing, and `allow_uncalibrated` is False.
        CalibrationError: a tensor's statistics give no usable scale.
    """
    return QParamsSolver(model, plan, unlearned).solve(allow_uncalibrated=allow_uncalibrated)


def check_needs_no_data(model: GraphModule, plan: Plan) -> None:
    """Check that a prepared model can be converted without calibration data.

    Raises:
        UncalibratedError: its parts are quantized statically, or channels get factors; it lists the tensors.
        UnlearnedError: algorithms learn from data.
    """
    QParamsSolver(model, plan).check_needs_no_data()


class QParamsSolver:
    """Finds out which groups of a prepared model live, and with which numbers; see `Solution`."""

    def __init__(self, model: GraphModule, plan: Plan, unlearned: bool = False) -> None:
        self.model, self.plan, self._unlearned = model, plan, unlearned
        self._algorithms = algorithms_of(plan.claims)
        self.dropped: dict[int, str] = {}
        self._assumed: list[str] = []
        self._widened: dict[int, float] = {}
        self._attempts: Counter[int] = Counter()
        self._nodes = {node.name: node for node in nodes_in(model)}
        calls = observer_nodes(model)
        self._observed = [Observed(node, number, _seen_by(node)) for node, number in calls]
        self._observers = observers_of(calls)
        self._group_of_value = {node.args[0]: number for node, number in reversed(calls)}
        self._claim_of = {
            spec.point: number for number, claim in enumerate(plan.claims) for spec in claim.specs
        }
        self._group_of = plan.group_of
        self._labels = body_labels(model)
        self._check_complete()
        self._found: Calibrated  # made anew by each estimate

    def _check_complete(self) -> None:
        gone = [n for n in range(len(self.plan.groups)) if n not in self._observers]
        if gone and not self._observers:
            raise StageError(
                "the prepared model has lost the observers of "
                f"{', '.join(map(self.describe, gone))}. Convert the model that prepare_pt2e "
                "returned or a deep copy of it, not a re-traced model."
            )
        for number in gone:  # somebody took it out of the graph, which is the way of this field
            self._observers[number] = PlaceholderObserver()
            self._drop(
                self.plan.groups[number], f"the observer of {self.describe(number)} was removed"
            )

    def solve(self, *, allow_uncalibrated: AllowUncalibrated) -> Solution:
        """Return what the statistics give."""
        self._observe_constants()
        self._drop_masked()
        self._check_calibrated(allow_uncalibrated)
        self._check_learned(bool(allow_uncalibrated))
        self._drop_what_cannot_stand()
        self._estimate()
        while self._drop_out_of_bounds():  # others may have been scaled with what is dropped now
            self._estimate()
        return self._solution()

    def _estimate(self) -> None:
        """Decide on factors and compute parameters, of what is not dropped."""
        self._drop_underived()
        self._found = found = self._undecided()
        for number in filter(self.alive, range(len(self.plan.groups))):
            self._algorithms.choose_factors(found, number)
        self._algorithms.scale_inputs(found)
        for number, group in enumerate(self.plan.groups):
            known = not getattr(group.spec, "is_dynamic", False)
            if known and self._needs_data(number) and not self.converts_itself(number):
                found.qparams[number] = self._kept(number, self._calculate(number, group))
        zeros = {n for n in found.qparams if always_zero(screen_of(self.observer(n)))}
        self._widened = widen_scales_for_int32(
            self.plan, self._nodes, found.qparams, self.dropped, zeros
        )
        self._take_learned()

    def _take_learned(self) -> None:
        """Give weights the scales and integers that were learned of them."""
        found, learned = self._found, learned_of(self.model) or Learned()
        found.refused.extend(learned.refused)
        for word, number in self._waiting().items():
            found.refused.append(
                f"{word} was not applied to {number} layers: it had no calibration data"
            )
        groups = {
            str(value.target): group
            for value, group in self._group_of_value.items()
            if isinstance(value, Node) and value.op == "get_attr"
        }
        for weight in learned.weights:
            number = groups.get(weight.path, -1)
            if number not in found.qparams:
                continue
            q = found.qparams[number]
            applied = weight.applied(q)
            if applied is None:
                raise CalibrationError(
                    f"the integers of {self.describe(number)} were learned for other scales or "
                    "zero points. Run qompose.calibrate again with batches and, if resume= was "
                    "given, another file"
                )
            found.qparams[number], found.integers[number] = applied
            found.made.append(weight.line)

    def _undecided(self) -> Calibrated:
        """Return the program as algorithms find it."""
        return Calibrated(
            self.model,
            self.plan,
            self._nodes,
            self._observers,
            self._group_of_value,
            self.dropped,
            ChannelFactors(self.plan, self._nodes),
        )

    def _solution(self) -> Solution:
        found = self._found
        self._algorithms.correct(found, unlearned=self._unlearned)
        for group, q in found.qparams.items():  # an algorithm may have written to its tensors
            self._check(group, q)
        parameters = {**found.factors.beside_weights(), **found.parameters}
        return Solution(
            observed=self._observed,
            observers=self._observers,
            delegated={n: self.describe(n) for n in self._observers if self.converts_itself(n)},
            qparams=found.qparams,
            factors=found.factors,
            integers=found.integers,
            parameters=parameters,
            biases=rounded_biases(self.plan, self._nodes, found.qparams, self.dropped, parameters),
            dropped=self.dropped,
            askers={
                (point, number): claim
                for point, claim in self._claim_of.items()
                if claim not in self.dropped and (number := self._group_of.get(point)) is not None
            },
            made=[*found.made, *self._ranges()],
            findings=self._findings(parameters),
            found=found,
        )

    def alive(self, number: int) -> bool:
        """Tell whether any claim still wants a group."""
        return any(claim not in self.dropped for claim in self.plan.groups[number].claims)

    def converts_itself(self, number: int) -> bool:
        """Tell whether a group's observer replaces its own nodes."""
        return converts_itself(self.observer(number))

    def _needs_data(self, number: int) -> bool:
        """Tell whether an observer must have seen data: not if a group is dynamic, or only a cast.

        One that converts itself may take at least the size of its blocks from data.
        """
        spec: Any = self.plan.groups[number].spec
        without = spec.dtype in CASTS or getattr(spec, "is_dynamic", False)
        # Factors come from data.
        watched = isinstance(self.observer(number), PerChannelRangeObserver)
        return self.alive(number) and (not without or watched or self.converts_itself(number))

    def observer(self, number: int) -> Any:
        """Return the observer of a group."""
        return self._observers[number]

    def describe(self, number: int) -> str:
        """Name a group's first tensor with its module and who wants it, for messages."""
        return subject_of(self.plan.groups[number], self.plan.claims, self._nodes, self._labels)

    def _observe_constants(self) -> None:
        """Let observers of parameters see them, since those need no calibration data."""
        fed = {number for number, observer in self._observers.items() if was_fed(observer)}
        idle = set(_never_run(self.model))
        constants: dict[int, list[Tensor]] = defaultdict(list)
        for node, number in ((each.node, each.group) for each in self._observed):
            value = node.args[0]
            constant = constant_of(value) if isinstance(value, Node) else None
            if constant is not None and (number not in fed or node.graph in idle):
                constants[number].append(constant)
        jobs = {
            f"seen {number}": partial(self._statistics, number, seen)
            for number, seen in constants.items()
            if spools() and keeps_a_range_alone(self.observer(number))
        }
        do_ahead("looking at weights", jobs)
        for number, seen in constants.items():
            if job := jobs.get(f"seen {number}"):
                self.observer(number).restore(kept(f"seen {number}", job))
            else:
                self._observe(number, seen)

    def _statistics(self, number: int, constants: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return what an observer's copy sees: the observer itself would keep it in memory."""
        observer = copy.deepcopy(self.observer(number))
        self._show(observer, number, constants)
        state: dict[str, Tensor] = observer.state()
        return state

    def _observe(self, number: int, constants: Sequence[Tensor]) -> None:
        if isinstance(self.observer(number), FakeQuantize):  # the model may be trained on
            self._observers[number] = copy.deepcopy(self.observer(number))
        self._show(self.observer(number), number, constants)

    def _show(self, observer: Any, number: int, constants: Sequence[Tensor]) -> None:
        with torch.no_grad(), blaming(f"the observer of {self.describe(number)}"):
            for constant in constants:
                observer(constant)

    def check_needs_no_data(self) -> None:
        """Raise what `solve` would, before weights are looked at."""
        weights = {
            e.group for e in self._observed if constant_of(e.node.all_input_nodes[0]) is not None
        }
        missing = [
            self.describe(number)
            for number in range(len(self.plan.groups))
            if number not in weights
            and self._needs_data(number)
            and not has_data(self.observer(number))
        ]
        if missing:
            raise UncalibratedError(missing)
        if asked := self._algorithms.without_data(self.plan.claims):
            raise UnlearnedError(asked)

    def _drop_masked(self) -> None:
        for group, observer in ((g, self.observer(n)) for n, g in enumerate(self.plan.groups)):
            screen = screen_of(observer)
            if screen is not None and screen.mask:
                self._drop(group, f"{group.points[0]} has {screen.mask}")

    def _drop(self, group: Group, reason: str) -> None:
        self.dropped.update(dict.fromkeys(group.claims, reason))

    def _check_calibrated(self, allow_uncalibrated: AllowUncalibrated) -> None:
        missing = [
            number
            for number in range(len(self.plan.groups))
            if self._needs_data(number) and not has_data(self.observer(number))
        ]
        idle = self._idle_points(missing)
        if (missing or idle) and not allow_uncalibrated:
            raise UncalibratedError([*map(self.describe, missing), *idle.values()])
        if allow_uncalibrated == UNIT_SCALE:
            self._give_unit_scales(missing, idle)
        else:
            for group in (self.plan.groups[number] for number in missing):
                self._drop(group, f"{group.points[0]} {_UNSEEN}")
            for point in idle:
                self.dropped.setdefault(self._claim_of[point], f"{point} {_UNSEEN}")
        for number in set(range(len(self.plan.groups))) - {*missing}:
            if self._needs_data(number) and _saw_only_nan(self.observer(number)):
                raise CalibrationError(f"{self.describe(number)} was NaN in all of the training")

    def _give_unit_scales(self, missing: Sequence[int], idle: Mapping[Point, str]) -> None:
        """Give groups that saw nothing a scale of 1, and leave those in float that can have none.

        Args:
            idle: how messages name the tensors of `_idle_points`, which keep the scale that there is.
        """
        for number in missing:
            name, reason = self.describe(number), self._assume(number)
            if reason is not None:
                self._drop(self.plan.groups[number], f"{name} {_UNSEEN}, and {reason}")
                self._assumed.append(f"{name} {_UNSEEN}, and stays in float because {reason}")
        self._derive_anew()
        told = f"{_UNSEEN}: its scale is that of tensors outside, which did"
        self._assumed += [f"{name} {told}" for name in idle.values()]
        if self._assumed:
            listed = "\n  - ".join(self._assumed)
            warn_user(f"what this model computes means nothing without data:\n  - {listed}")

    def _derive_anew(self) -> None:
        """Let what is derived from other observers read those that took their place."""
        derived = {
            n: copy.copy(o) for n, o in self._observers.items() if isinstance(o, DerivedObserver)
        }
        self._observers |= derived
        for number, observer in derived.items():
            observer.derive_from([self.observer(n) for n in self.plan.groups[number].depends_on])

    def _assume(self, number: int) -> str | None:
        """Let a group that saw nothing do without data, and note how; return why it cannot, if so."""
        spec: Any = self.plan.groups[number].spec
        observer, name = self.observer(number), self.describe(number)
        if self.converts_itself(number):
            return "its observer, of another package, replaces its own nodes"
        if getattr(spec, "is_dynamic", False):
            self._assumed.append(f"{name} {_UNSEEN}: its channels get no factors")
            return None
        try:
            unit = UnitScaleObserver(spec, observer, value_of(self._value(number)))
        except ConfigError as error:
            return str(error)
        self._observers[number] = unit
        self._assumed.append(f"{name} {_UNSEEN}: its scale is 1")
        return None

    def _check_learned(self, allow_uncalibrated: bool) -> None:
        """Check that algorithms which learn from data had their turn.

        Raises:
            UnlearnedError: they had not, and `allow_uncalibrated` is False.
        """
        if self._waiting() and not allow_uncalibrated:
            raise UnlearnedError(self._waiting())

    def _waiting(self) -> Counter[str]:
        """Count the products whose algorithms were to learn of them and have not, by word."""
        learned = learned_of(self.model)
        if self._unlearned or (learned is not None and learned.whole):
            return Counter()
        return Counter(a.word for a, _, _ in self._algorithms.learning(self.plan.claims))

    def _idle_points(self, missing: list[int]) -> dict[Point, str]:
        """Name the tensors in bodies that never ran, whose groups have data from elsewhere only."""
        graphs, labels = set(_never_run(self.model)), self._labels
        return {
            point: f"{point} in {module_path(anchor) or 'the program'} in {labels[anchor.graph]} "
            f"({claim.owner}, rule {claim.rule})"
            for claim in self.plan.claims
            if (anchor := self._nodes[claim.anchor]).graph in graphs
            for point in (spec.point for spec in claim.specs)
            if constant_of(self._nodes[point.source]) is None
            and (number := self._group_of[point]) not in missing
            and self._needs_data(number)
        }

    def _drop_what_cannot_stand(self) -> None:
        """Drop the claims in bodies whose observers would put what cannot be run there."""
        for each in self._observed:
            node, number = each.node, each.group
            if node.graph is self.model.graph or not node.users or not self.alive(number):
                continue
            if self.converts_itself(number) and not can_stand(node, self.describe(number)):
                made = (
                    f"{type(self.observer(number)).__name__} replaces {each.tensor} with a module"
                )
                reason = f"{made}, which {self._labels[node.graph]} cannot contain"
                self._drop(self.plan.groups[number], reason)

    def _kept(self, number: int, q: QParams) -> QParams:
        """Keep the parameters of a weight on disk, if tensors are kept there: groups have many."""
        if q.per_tensor or constant_of(self._value(number)) is None:
            return q
        parts = {"scale": q.scale, "zero_point": q.zero_point}
        self._attempts[number] += 1
        made = kept(f"qparams {number} {self._attempts[number]}", lambda: parts)
        return replace(q, scale=made["scale"], zero_point=made["zero_point"])

    def _drop_underived(self) -> None:
        """Drop the claims whose parameters would be derived from tensors that stay in float."""
        for group in self.plan.groups:
            for source in group.depends_on:
                if not self.alive(source):
                    self._drop(group, f"{self.plan.groups[source].points[0]} stays in float")

    def _drop_out_of_bounds(self) -> bool:
        """Drop the claims whose kernels do not support a tensor's parameters; tell whether there are any."""
        found = {
            number: f"{spec.point} has {objections[0]}"
            for number, claim in enumerate(self.plan.claims)
            if number not in self.dropped
            for spec in claim.specs
            if spec.bounds is not None
            and (objections := self._out_of_bounds(self._group_of[spec.point], spec.bounds))
        }
        self.dropped.update(found)
        return bool(found)

    def _out_of_bounds(self, number: int, bounds: Bounds) -> list[str]:
        spec: Any = self.plan.groups[number].spec
        if q := self._found.qparams.get(number):
            return bounds.objections(q.scale, q.zero_point)
        least = None if spec.dtype in CASTS else least_scale(spec, self.observer(number))
        return [] if least is None else bounds.lowest.objections(least, 0)

    def _calculate(self, number: int, group: Group) -> QParams:
        spec: Any = group.spec
        observer, factors = self.observer(number), self._found.factors.factors.get(number)
        self._check_bounds(number, spec)
        if factors is not None:
            scale, zero_point = factors.scale, factors.zero_point
        elif (rows := self._found.factors.qparams_of_rows(number)) is not None:
            scale, zero_point = rows
        else:
            with blaming(f"calculate_qparams of the observer of {self.describe(number)}"):
                scale, zero_point = map(torch.as_tensor, observer.calculate_qparams())
        scale, zero_point = scale.detach(), self._integral(number, zero_point.detach())
        q = qparams_of(spec, observer, scale, zero_point).for_rank(
            value_of(self._value(number)).dim()
        )
        q = self._algorithms.choose_qparams(self._found, number, q)
        self._check(number, q)
        return q

    def _check(self, number: int, q: QParams) -> None:
        """Check that a group can have quantization parameters."""
        for problem in invalid(q, tuple(value_of(self._value(number)).shape)):
            raise CalibrationError(
                f"{self.describe(number)} has invalid quantization parameters: it {problem}"
            )

    def _check_bounds(self, number: int, spec: Any) -> None:
        """Check the range of a group's integers; users may have replaced its observer since."""
        observer = base_observer(self.observer(number))
        try:
            if isinstance(spec, QuantizationSpec):
                check_observer(observer, spec)
            integer_bounds(spec, observer)
        except ConfigError as error:
            raise ConfigError(f"{self.describe(number)}: {error}") from error

    def _integral(self, number: int, zero_point: Tensor) -> Tensor:
        """Return zero points as integers, except in the scheme whose zero points are floats."""
        scheme = getattr(self.plan.groups[number].spec, "qscheme", None)
        if not zero_point.is_floating_point() or scheme in FLOAT_ZERO_POINT:
            return zero_point
        if not torch.equal(zero_point, zero_point.round()):  # NaN is not equal to itself
            raise CalibrationError(
                f"the observer of {self.describe(number)} returned the zero point "
                f"{zero_point.tolist()}, but {scheme} requires integers"
            )
        return zero_point.to(torch.int64)

    def _value(self, number: int) -> Node:
        return self._nodes[self.plan.groups[number].points[0].source]

    def _findings(self, changed: Mapping[str, Tensor]) -> list[str]:
        """Describe the tensors whose statistics look wrong, though parameters can be computed of them."""
        parameters = {name for name, node in self._nodes.items() if constant_of(node) is not None}
        activations = {
            number: float(q.scale)
            for number, q in self._found.qparams.items()
            if q.per_tensor and self.plan.groups[number].points[0].source not in parameters
        }
        typical = median(activations.values()) if activations else 0.0
        found = []
        for number, scale in activations.items():
            observer = self.observer(number)
            for problem in outliers(scale, typical, screen_of(observer), eps_of(observer) or 0.0):
                found.append(f"{self.describe(number)} {problem}")
        found += [
            (
                f"{self.describe(number)}: its scale was increased by up to {factor:.3g}x so that "
                "the bias fits into int32"
            )
            for number, factor in self._widened.items()
        ]
        refused = self._found.refused
        few = [*self._too_few_examples(), *self._mostly_repeated(), *self._without_channels()]
        few += self._without_rows()
        found += self._not_finite()
        return [
            *self._assumed,
            *found,
            *refused,
            *few,
            *self._few_levels(),
            *self._lost_in_casts(changed),
        ]

    def _choices(self) -> Iterator[tuple[int, Choice]]:
        """Yield the groups whose range was chosen by what reads them, and the choice."""
        for number in self._found.qparams:
            observer = base_observer(self.observer(number))
            unset = isinstance(observer, AutoRangeObserver) and observer.set_range is None
            if unset and number not in self._found.factors.factors:
                yield number, observer.choice

    def _ranges(self) -> Iterator[str]:
        """Describe the ranges that are not those of all values."""
        for number, choice in self._choices():
            if choice.name != WHOLE:
                who = (
                    "on held-out examples its readers"
                    if choice.clips
                    else "with the same row at many places, its readers"
                )
                yield (
                    f"range of {self.plan.groups[number].points[0]}: [{choice.low:.4g}, "
                    f"{choice.high:.4g}], {choice.name}; {who} "
                    f"have {choice.error:.2g}x the squared error of the min/max range"
                )

    def _without_channels(self) -> Iterator[str]:
        for number in filter(self.alive, range(len(self.plan.groups))):
            observer = self.observer(number)
            watches = isinstance(observer, PerChannelRangeObserver) and has_data(observer)
            if watches and not observer.knows_channels:
                yield (
                    f"{self.describe(number)}: its channels were not balanced because its "
                    "statistics have no channel ranges"
                )

    def _too_few_examples(self) -> Iterator[str]:
        """Name the tensors that had too few examples, by their number: it may be another one for each."""
        few: dict[str, list[str]] = defaultdict(list)
        for number, choice in self._choices():
            if choice.reason and constant_of(self._value(number)) is None:
                few[choice.reason].append(str(self.plan.groups[number].points[0]))
        for reason, names in sorted(few.items()):
            yield (
                f"range of {first_of(names, _NAMED)}: min/max, because calibration "
                f"saw too few distinct examples to choose another range: {reason}"
            )

    def _mostly_repeated(self) -> Iterator[str]:
        """Name the inputs whose repeated rows left algorithms out, and how to have them all the same."""
        if not (words := sorted(self._found.left_out)):
            return
        found = [
            f"{self.plan.groups[number].points[0]} ({sample.different} of {sample.seen} rows for "
            f"{sample.rows.shape[1]} channels)"
            for number, sample in self._found.repeated.items()
        ]
        asking = ", ".join(f'"{word}"' for word in words)
        yield (
            "most of what calibration saw was repeated, such as padding. Few rows differ in "
            f"{first_of(found, _NAMED)}. What the default algorithms gain on such data may not hold "
            f"for other data, so they were not applied: {', '.join(words)}. Calibrate with fewer "
            f"repeated rows, or apply them by algorithms=({asking},)"
        )

    def _without_rows(self) -> Iterator[str]:
        """Name the experts to which calibration routed nothing."""
        for sites, idle in without_rows(self.model):
            yield (
                f"calibration routed no rows to experts {first_of([*map(str, idle)], _EXPERTS_NAMED)} of "
                f"the {len(sites)} of {sites[idle[0]]}: nothing was learned for their weights, and ranges "
                "of their inputs, if any, are those of all rows. Calibrate with data that reaches them"
            )

    def _few_levels(self) -> Iterator[str]:
        """Describe the tensors whose channels have few steps because of an observer's eps."""
        for number, q in self._found.qparams.items():
            observer: Any = base_observer(self.observer(number))
            if q.per_tensor and constant_of(self._value(number)) is None:
                continue  # an activation's statistics say more
            names = (
                ("minimum", "maximum") if hasattr(observer, "minimum") else ("min_val", "max_val")
            )
            least, most = (getattr(observer, name, None) for name in names)
            if isinstance(least, Tensor) and isinstance(most, Tensor):
                problem = few_levels(q, least, most, eps_of(observer) or 0.0)
                if problem:
                    yield f"{self.describe(number)}: {problem}"

    def _not_finite(self) -> Iterator[str]:
        """Name the parameters with NaN or infinite numbers that no observer looked at, such as biases."""
        observed = {point.source for group in self.plan.groups for point in group.points}
        for name, node in self._nodes.items():
            value = constant_of(node)
            if name in observed or not isinstance(value, nn.Parameter) or not value.numel():
                continue
            ends = torch.aminmax(value.detach()) if value.dtype in _FLOATS else ()
            if not all(end.isfinite() for end in ends):
                yield (
                    f"the parameter {node.target} contains NaN or infinite values, which reach the outputs. "
                    "Train or load the model again"
                )

    def _lost_in_casts(self, changed: Mapping[str, Tensor]) -> Iterator[str]:
        """Describe the parameters of which a smaller float type cannot hold every value."""
        for number, group in enumerate(self.plan.groups):
            source, spec = group.points[0].source, cast(Any, group.spec)
            constant = changed.get(source, constant_of(self._nodes[source]))
            if constant is None or spec.dtype not in CASTS or not self.alive(number):
                continue
            held = constant.detach().to(spec.dtype)
            lost = int((constant.isfinite() & ~held.isfinite()).sum())
            if lost:
                yield (
                    f"{self.describe(number)}: {lost} of {constant.numel()} values exceed the "
                    f"largest {held.dtype} ({torch.finfo(held.dtype).max:g}) and become "
                    "infinite or NaN. Use torch.bfloat16, or leave its operator in float"
                )


def _never_run(part: GraphModule, ran: bool = True) -> Iterator[Graph]:
    """Yield the bodies that calibration never came to, with those inside them."""
    if not ran:
        yield part.graph
    for call in filter(is_nested_call, part.graph.nodes):
        noted = call.target in RUNNERS.values()
        for body in bodies_of(call):
            yield from _never_run(body, ran and (RAN_KEY in body.meta or not noted))


def _seen_by(node: Node) -> str:
    """Return the name of the tensor that an observer node sees, behind other observers."""
    while tag_of(node, GROUP_TAG) is not None:
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node.name


def _saw_only_nan(observer: object) -> bool:
    """Return whether all that a fake quantizer was trained with is NaN, which it lets pass, as in a loss."""
    if not isinstance(observer, FakeQuantize) or observer.constant or not observer.estimates:
        return False
    return observer.calibrated and observer.screen.values == 0


_UNSEEN = "never saw calibration data"
_FEW_VALUES = 64
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NAMED, _EXPERTS_NAMED = 3, 8
"""How many tensors a line names, and how many experts."""


def invalid(q: QParams, shape: tuple[int, ...]) -> Iterator[str]:
    """Yield what makes parameters unusable for a tensor of a shape."""
    wanted = 1 if q.per_tensor else None if q.axis is None else shape[q.axis]
    if wanted is not None and not q.scale.numel() == q.zero_point.numel() == wanted:
        yield (
            f"has {q.scale.numel()} scales and {q.zero_point.numel()} zero points, expected "
            f"{wanted}"
        )
    elif wrong := _those(q.scale, torch.isfinite(q.scale) & (q.scale > 0)):
        yield f"has the scale {wrong}; scales must be positive and finite"
    elif wrong := _those(q.zero_point, torch.isfinite(q.zero_point.double())):
        yield f"has the zero point {wrong}"
    elif not q.zero_point.is_floating_point() and (
        wrong := _those(q.zero_point, (q.zero_point >= q.low) & (q.zero_point <= q.high))
    ):
        yield f"has the zero point {wrong}, outside [{q.low}, {q.high}]"


def _those(values: Tensor, good: Tensor) -> str:
    """Return the first of the values that are not good, and of how many; "" where all are."""
    bad = values[~good].flatten().tolist()
    return (
        f"{bad[0]:g}{f' ({len(bad)} of {values.numel()})' if values.numel() > 1 else ''}"
        if bad
        else ""
    )


def few_levels(q: QParams, minimum: Tensor, maximum: Tensor, eps: float) -> str:
    """Return how many channels take up few of the integers, because of `eps`; "" where none does.

    Where zero points are not integers, a channel takes up all of them unless its scale would be below `eps`.
    Other engines' observers then take the scale 1, and leave one integer. Where they are, a few such channels
    are not told: trained weights have dead ones.
    """
    spread, steps = maximum - minimum, q.high - q.low
    raised, least = torch.ones_like(spread, dtype=torch.bool), 1
    if not q.zero_point.is_floating_point():
        spread = 2 * torch.maximum(minimum.abs(), maximum.abs())
        raised, least = q.scale <= eps, (spread.numel() + 1) // 2
    few = int((raised & (spread > 0) & (spread < q.scale * steps / 4)).sum())
    if few < least:
        return ""
    which = "it uses" if spread.numel() == 1 else f"{few} of {spread.numel()} channels use"
    return (
        f"{which} less than a quarter of the {steps + 1} "
        f"integers because the eps of the observer, {eps:g}, exceeds the scale. Use a "
        "smaller eps, or leave the operator in float"
    )


def always_zero(screen: Screen | None) -> bool:
    """Tell whether values were seen, all of them zero."""
    if screen is None or not screen.values:
        return False
    return bool(screen.bulk == 0 and screen.mask is None and screen.far == -math.inf)


def outliers(scale: float, typical: float, screen: Screen | None, eps: float) -> Iterator[str]:
    """Yield what looks wrong with an activation's statistics, though its scale can be used."""
    if screen is not None and screen.values:
        if always_zero(screen):
            yield "was always zero during calibration"
        elif scale == eps and screen.bulk < eps * 127:
            yield (
                f"has values of at most {screen.bulk:g}, so its scale was raised to the eps {eps:g}"
            )
        if screen.values < _FEW_VALUES:
            yield f"was calibrated with only {screen.values} values"
    if scale > FAR_FROM_TYPICAL * typical:
        yield (
            f"has the scale {scale:g}, while the typical scale is {typical:g} (an outlier or a "
            "mask?)"
        )
