# SPDX-License-Identifier: Apache-2.0
"""How far values of one program are from those of another, summed over inputs, with the likely causes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from qompose.diagnosis.replay import ReaderGrid
from qompose.errors import UserError, blaming
from qompose.program.graph import pytree_info
from qompose.reporting.report_data import (
    ARITHMETIC,
    CLIPPING,
    EQUAL,
    FALLBACK,
    INHERITED,
    KERNEL_ERROR,
    NOT_FINITE,
    ROUNDING,
)
from qompose.spec.qparams import decibels

Metric: TypeAlias = Callable[[Tensor, Tensor], float]
"""Takes a value of the reference and the other program's, and returns a number."""
FLOAT_STEPS = 255
"""Floats that kernels return have no step: it is this part of their largest magnitude, as at 8 bits."""
_ARITHMETIC = 1e-9
"""A part of a value's power (90 dB) below which a difference is that of the order of float operations."""
_MORE_THAN_A_STEP = 1.001
"""A kernel and its region may round a sum to different sides, and no further."""


@dataclass
class Tally:
    """Sums over all inputs.

    Attributes:
        grid: on which the other program's readers have the value; None: in float.
        signal, noise, own: sums of squares, of the reference, of the difference in the whole run, and of
            that where the operator reads the reference's values; `own` is None until that was run.
        clipped, rounded: of what the grid does to the reference: beyond its ends, and between them.
        outside, values: how many of the reference's values are beyond the grid's ends, of how many.
        least, most: of the reference.
        steps: see `Compared.steps`; None until a kernel was counted.
        astray: the same, by which a kernel is wrong. Of one that returns floats, which may round less than
            quantize and dequantize operators do, those values count that are further off the reference than
            the region's, in steps of no less than the most that the region is off it.
        inputs, metrics: how many values were counted, and the sums of what the caller's metrics gave.
    """

    grid: ReaderGrid | None
    signal: float = 0.0
    noise: float = 0.0
    own: float | None = None
    clipped: float = 0.0
    rounded: float = 0.0
    outside: int = 0
    values: int = 0
    least: float = math.inf
    most: float = -math.inf
    steps: float | None = None
    astray: float = 0.0
    inputs: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def add(self, reference: Tensor, other: Tensor, metrics: Mapping[str, Metric]) -> None:
        """Count a value of the whole run."""
        self.inputs += 1
        wanted, error = _finite(reference.double(), other.double())
        self.signal += _power(wanted)
        self.noise += _power(error)
        for name, metric in metrics.items():
            with blaming(f"metric {name!r}"):
                said = metric(reference.clone(), other.clone())  # it may write to them
            said = number_of(said, f"metric {name!r} returned")
            self.metrics[name] = self.metrics.get(name, 0.0) + said
        if self.grid is not None and wanted.numel():
            inside = wanted.clamp(self.grid.least, self.grid.most)
            self.outside += int((inside != wanted).sum())
            self.clipped += _power(inside - wanted)
            self.rounded += _power(self.grid.rounded(inside) - inside)
            self.least = min(self.least, float(wanted.amin()))
            self.most = max(self.most, float(wanted.amax()))
        self.values += wanted.numel()

    def add_own(self, reference: Tensor, own: Tensor) -> None:
        """Count what the operator gives for the reference's values."""
        _, error = _finite(reference.double(), own.double())
        self.own = (self.own or 0.0) + _power(error)

    def add_kernel(self, simulated: Tensor, own: Tensor, reference: Tensor) -> None:
        """Count what a kernel gives beside the region that it replaced, both for the reference's values."""
        if not own.numel():
            return
        wanted, error = _finite(simulated.double(), own.double())
        step = self.grid.scale if self.grid else float(wanted.abs().amax()) / FLOAT_STEPS
        self.steps = max(_steps(error, step), self.steps or 0.0)
        if self.grid is None:
            _, off = _finite(reference.double(), own.double())
            _, rounded = _finite(reference.double(), simulated.double())
            error = torch.where(off.abs() > rounded.abs(), error, 0.0)
            step = max(step, float(rounded.abs().amax()))
        self.astray = max(_steps(error, step), self.astray)

    @property
    def sqnr(self) -> float:
        """Of the whole run, in dB."""
        return decibels(self.signal, self.noise)

    @property
    def own_sqnr(self) -> float | None:
        """Of the operator alone, in dB."""
        return None if self.own is None else decibels(self.signal, self.own)

    @property
    def relative_error(self) -> float:
        """The norm of the difference as a part of the reference's."""
        if not self.noise:
            return 0.0
        return math.sqrt(self.noise / self.signal) if self.signal else math.inf

    @property
    def clipping(self) -> float | None:
        """The part of the reference's values beyond the grid's ends."""
        return None if self.grid is None or not self.values else self.outside / self.values

    @property
    def range_use(self) -> float | None:
        """The part of the grid's range that the reference spans."""
        if self.grid is None or self.most < self.least:
            return None
        span = min(self.most, self.grid.most) - max(self.least, self.grid.least)
        return max(span, 0.0) / (self.grid.most - self.grid.least)

    def cause(self, fallback: bool) -> str:
        """Return why the value differs; `fallback`: its region was to have a kernel and has none."""
        if self.astray > _MORE_THAN_A_STEP:
            return KERNEL_ERROR
        if not self.noise and not self.own:
            return EQUAL
        own = self.noise if self.own is None else self.own
        if math.isinf(own):
            return NOT_FINITE
        if own <= _ARITHMETIC * self.signal:
            return ARITHMETIC if self.noise <= _ARITHMETIC * self.signal else INHERITED
        if self.clipped > self.rounded and self.clipped > own / 2:
            return CLIPPING
        return FALLBACK if fallback else ROUNDING

    def figures(self) -> dict[str, Any]:
        """Return what `Compared` has of numbers, by name."""
        return {
            "sqnr": self.sqnr,
            "relative_error": self.relative_error,
            "own_sqnr": self.own_sqnr,
            "steps": self.steps,
            "clipping": self.clipping,
            "range_use": self.range_use,
            "metrics": {name: total / self.inputs for name, total in self.metrics.items()},
        }


def _finite(wanted: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """Return a value without what is not finite, and what another is off it: none where they agree."""
    error = found - wanted
    if bool(error.isfinite().all()):
        return wanted, error
    same = (wanted == found) | (wanted.isnan() & found.isnan())
    finite = torch.where(wanted.isfinite(), wanted, 0.0)
    return finite, torch.where(same, 0.0, torch.nan_to_num(error, math.inf, math.inf, -math.inf))


def _power(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))


def _steps(error: Tensor, step: float) -> float:
    """Return the largest error in steps; without a step, any error is without bound."""
    apart = float(error.abs().amax())
    return apart / step if step else math.inf * apart if apart else 0.0


CostMetric: TypeAlias = Callable[[Any, Any], Any]


@dataclass
class Cost:
    """What was added up over batches: powers of errors and signals by output, or what a metric said."""

    noise: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    signal: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    said: list[float] = field(default_factory=list)

    def mean(self, batches: int) -> float:
        """Return the cost per output, or per batch what the metric said."""
        if self.said:
            return sum(self.said) / batches
        ratios = [_ratio(self.noise[n], self.signal[n]) for n in self.noise]
        return sum(ratios) / len(ratios) if ratios else 0.0


Measure: TypeAlias = Callable[[Cost, Any, Any], None]
"""Adds a batch's outputs, as the output node has them, and those in float to a cost."""


def measure_of(program: GraphModule, metric: CostMetric | None) -> Measure:
    """Return what measures the outputs of a program: by their error, or by a metric of the caller's.

    The measure raises UserError where there is no output of floats, or the metric returns no number, and
    MemberError where the metric fails.
    """
    if metric is None:
        return _add_error
    info = pytree_info(program.graph)
    return partial(_add_metric, metric, None if info is None else info.out_spec)


def _add_error(cost: Cost, outputs: Any, floats: Any) -> None:
    """Add the power of the error of each output, and the output's own."""
    pairs = zip(pytree.tree_leaves(outputs), pytree.tree_leaves(floats), strict=True)
    found = [
        (number, value, reference)
        for number, (value, reference) in enumerate(pairs)
        if isinstance(reference, Tensor) and reference.is_floating_point()
    ]
    if not found:
        raise UserError("no float output to compare; pass metric= to sensitivity, ranking= to tune")
    for number, value, reference in found:
        noise, signal = _powers(value, reference)
        cost.noise[number] += noise
        cost.signal[number] += signal


def _powers(value: Tensor, reference: Tensor) -> tuple[float, float]:
    """Return the power of the error and of the reference, where that is finite.

    What is infinite in float, such as a mask, has to be the same: anything else is an error without bound.
    """
    if value.shape != reference.shape:
        return math.inf, _powers(reference, reference)[1]
    finite, error = _finite(reference.double(), value.double())
    return 0.0 if value is reference else _power(error), _power(finite)


def _ratio(noise: float, signal: float) -> float:
    if noise == 0:
        return 0.0
    return noise / signal if signal else math.inf


def _add_metric(
    metric: CostMetric, spec: pytree.TreeSpec | None, cost: Cost, outputs: Any, floats: Any
) -> None:
    """Add what a metric says of a batch, given outputs in the form in which the program returns them."""

    def as_returned(values: Any) -> Any:
        flat = values if isinstance(values, (tuple, list)) else [values]
        return values if spec is None else pytree.tree_unflatten(list(flat), spec)

    with blaming("metric="):
        said = metric(as_returned(outputs), as_returned(floats))
    cost.said.append(number_of(said, "metric= returned"))


def number_of(said: Any, what: str) -> float:
    """Return what a metric returned as a number.

    Raises:
        UserError: it is not a number, or NaN.
    """
    single = isinstance(said, Tensor) and said.numel() == 1
    if isinstance(said, (bool, str, bytes)) or not (single or hasattr(said, "__float__")):
        raise UserError(f"{what} {said!r}, expected a number")
    try:
        number = float(said)
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} {said!r}, expected a number: {error}") from error
    if math.isnan(number):
        raise UserError(f"{what} NaN, expected a number")
    return number + 0.0  # no -0.0
