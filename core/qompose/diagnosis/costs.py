# SPDX-License-Identifier: Apache-2.0
"""How far outputs are from those in float: by the power of the error, or a metric of the caller's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from qompose.errors import UserError, blaming
from qompose.graph import pytree_info

Metric: TypeAlias = Callable[[Any, Any], Any]


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


class Measure(Protocol):
    """Adds batches to costs."""

    def start(self) -> Cost:
        """Return a cost of nothing."""

    def add(self, cost: Cost, outputs: Any, floats: Any) -> None:
        """Add a batch's outputs, as the output node has them, and those in float."""


def measure_of(program: GraphModule, metric: Metric | None) -> Measure:
    """Return what measures the outputs of a program."""
    return Powers() if metric is None else Said(program, metric)


class Powers:
    """The power of the error of each output over the output's own."""

    def start(self) -> Cost:
        return Cost()

    def add(self, cost: Cost, outputs: Any, floats: Any) -> None:
        """Add a batch.

        Raises:
            UserError: there is no output of floats.
        """
        pairs = list(_float_pairs(outputs, floats))
        if not pairs:
            raise UserError(
                "the program returns no floats, of which an error could be taken: pass metric="
            )
        for number, value, reference in pairs:
            noise, signal = _powers(value, reference)
            cost.noise[number] += noise
            cost.signal[number] += signal


def _float_pairs(outputs: Any, floats: Any) -> Iterator[tuple[int, Tensor, Tensor]]:
    pairs = zip(pytree.tree_leaves(outputs), pytree.tree_leaves(floats), strict=True)
    for number, (value, reference) in enumerate(pairs):
        if isinstance(reference, Tensor) and reference.is_floating_point():
            yield number, value, reference


def _powers(value: Tensor, reference: Tensor) -> tuple[float, float]:
    """Return the power of the error and of the reference, where that is finite.

    What is infinite in float, such as a mask, has to be the same: anything else is an error without bound.
    """
    if value is reference:
        noise = 0.0
    elif value.shape != reference.shape:
        noise = math.inf
    else:
        same = (value == reference) | (value.isnan() & reference.isnan())
        error = torch.where(same, 0.0, value.double() - reference.double())
        noise = float(error.square().sum())
        noise = math.inf if math.isnan(noise) else noise
    finite = reference.double().nan_to_num(0.0, 0.0, 0.0)
    return noise, float(finite.square().sum())


def _ratio(noise: float, signal: float) -> float:
    if noise == 0:
        return 0.0
    return noise / signal if signal else math.inf


class Said:
    """What a metric of the caller's says of each batch."""

    def __init__(self, program: GraphModule, metric: Metric) -> None:
        info = pytree_info(program.graph)
        self._spec = None if info is None else info.out_spec
        self._metric = metric

    def start(self) -> Cost:
        return Cost()

    def add(self, cost: Cost, outputs: Any, floats: Any) -> None:
        """Add a batch.

        Raises:
            UserError: the metric returned no number.
            MemberError: it raised an error.
        """
        with blaming("metric="):
            said = self._metric(self._as_returned(outputs), self._as_returned(floats))
        cost.said.append(number_of(said, "metric= returned"))

    def _as_returned(self, outputs: Any) -> Any:
        """Return outputs in the form in which the program returns them."""
        if self._spec is None:
            return outputs
        flat: Sequence[Any] = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        return pytree.tree_unflatten(list(flat), self._spec)


def number_of(said: Any, what: str) -> float:
    """Return what a metric returned as a number.

    Raises:
        UserError: it is none, or NaN.
    """
    single = isinstance(said, Tensor) and said.numel() == 1
    if isinstance(said, (bool, str, bytes)) or not (single or hasattr(said, "__float__")):
        raise UserError(f"{what} {said!r}, which is no number")
    try:
        number = float(said)
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} {said!r}, which is no number: {error}") from error
    if math.isnan(number):
        raise UserError(f"{what} NaN, by which nothing can be compared")
    return number + 0.0  # no -0.0
