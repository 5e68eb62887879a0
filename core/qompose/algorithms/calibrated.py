# SPDX-License-Identifier: Apache-2.0
"""A calibrated program as algorithms see it: what is known of its groups, and what was decided so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qompose.algorithms.channel_factors import (
    Absorbers,
    ChannelFactors,
    Divided,
    Factors,
    is_per_channel,
)
from qompose.observers.auto_range import FEWEST_EXAMPLES
from qompose.observers.channel_ranges import INPUT, OUTPUT, Balance, sample_of
from qompose.observers.input_sums import Columns, input_observers
from qompose.observers.make_observer import eps_of, make_observer
from qompose.observers.row_sample import RowSample
from qompose.plan.plan import Plan
from qompose.program.control_flow import count_readers
from qompose.program.graph import value_of
from qompose.spec.qdq import QParams, in_rows
from qompose.spec.qparams import DEFAULT_EPS, along, choose_qparams, fake_quantize, quantized_range

FakeQuantize = Callable[[Tensor], Tensor]
Choose = Callable[[Tensor, Tensor], "tuple[Tensor, Tensor]"]
"""From minimum and maximum to scale and zero point, in the scheme of the group."""


@dataclass(frozen=True)
class Scheme:
    """How a group is quantized: its integers, and the formula for its parameters.

    `per_row` tells that they are chosen at run time, from each row.
    """

    low: int
    high: int
    choose: Choose
    per_row: bool = False

    def simulate(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Quantize rows, `(N, C)`, and dequantize them."""
        if self.per_row:
            scale, zero_point = self.choose(x.amin(1, keepdim=True), x.amax(1, keepdim=True))
        return fake_quantize(x, scale, zero_point, self.low, self.high)


@dataclass(frozen=True)
class RoundedWeight:
    """A weight, or some of its rows, and what it is going to be once it is quantized.

    `by_row` tells that each row is quantized by itself.
    """

    values: Tensor
    quantize: FakeQuantize
    by_row: bool


_PER_TENSOR = {
    torch.per_channel_affine: torch.per_tensor_affine,
    torch.per_channel_symmetric: torch.per_tensor_symmetric,
}


@dataclass(frozen=True)
class Calibrated:
    """A calibrated program, and the decisions of the algorithms that were asked already.

    The program itself is left as it is; conversion follows the decisions when all are made.

    Attributes:
        model, plan: the program and its plan.
        nodes: those of the program, by name.
        observers: by group.
        group_of_value: the group that a value belongs to first.
        dropped: claims that are not followed, with the reason.
        factors: those of channels, and which parameters take them up.
        qparams: by group, filled in when all factors are chosen.
        integers: by group of a weight, its integers, where they are not those next to its values.
        parameters: by name, parameters with new values, besides those that take up factors.
        made: a line for each change.
        refused: a line for each that was asked for and not made, with the reason.
        left_out: words of algorithms that nobody asked for and `repeated` kept from being made.
    """

    model: GraphModule
    plan: Plan
    nodes: Mapping[str, Node]
    observers: Mapping[int, Any]
    group_of_value: Mapping[Any, int]
    dropped: Mapping[int, str]
    factors: ChannelFactors
    qparams: dict[int, QParams] = field(default_factory=dict)
    integers: dict[int, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)

    @cached_property
    def sums(self) -> dict[tuple[Node, Columns | None], Any]:
        """The observers of sums over inputs, by the input and the columns of second moments."""
        return {
            (value, getattr(observer, "columns", None)): observer
            for _, value, observer in input_observers(self.model)
        }

    @cached_property
    def readers(self) -> dict[int, int]:
        """Return how many operators read each parameter, by address."""
        return count_readers(self.model)

    @cached_property
    def repeated(self) -> dict[int, RowSample]:
        """The rows of inputs of products that saw little but the same ones, by group.

        Held-out examples are of the same few rows then, and tell nothing of other data. That holds for the
        whole program: behind attention all rows of padding differ a little, and most is lost there.
        """
        balances = {n: self.plan.groups[n].balance for n in self.observers if self.is_whole(n)}
        samples = {
            number: sample_of(self.observers[number])
            for number, balance in balances.items()
            if balance is None or balance.side == INPUT
        }
        return {
            number: sample
            for number, sample in samples.items()
            if sample is not None and sample.examples >= FEWEST_EXAMPLES and sample.repeated
        }

    def is_whole(self, number: int) -> bool:
        """Tell whether all claims of a group are followed."""
        return not any(claim in self.dropped for claim in self.plan.groups[number].claims)

    def weight_group(self, name: str) -> int:
        """Return the group of a parameter."""
        return self.group_of_value[self.nodes[name]]

    def take(
        self, number: int, balance: Balance, factors: Factors, absorbers: Absorbers | None = None
    ) -> None:
        """Give a group factors, and the parameters behind or before it what evens them out.

        Args:
            absorbers: what divides the channels, where neither an operator nor a normalization does.
        """
        found, outward = self.factors, balance.side == OUTPUT
        vector, dim = (1 / factors.values, 0) if outward else (factors.values, 1)
        absorbed = [(name, (vector, dim)) for name in balance.weights]
        absorbed += [(name, (vector, 0)) for name in balance.biases if name and outward]
        absorbed += [(name, (1 / factors.values, 0)) for name in balance.absorbers]
        for name, factor in absorbed:
            found.taken_up.setdefault(name, []).append(factor)
        found.factors[number] = factors
        found.weights.update((self.weight_group(name), name) for name in balance.weights)
        if absorbers is not None:
            self._absorb(factors.values, absorbers)
            found.absorbers[number] = absorbers

    def divide(self, source: str, divided: Divided, weights: Sequence[str]) -> None:
        """Have a float tensor divided by factors, which the weights of those that read it take up.

        Args:
            source: name of the tensor; all operators that are to read it so are named at once.
            weights: names of their weights, whose dimension 1 has the channels.

        Raises:
            ValueError: it is divided already, or factors are not a positive, finite number for each channel,
                or differ where one row of a parameter takes up several.
        """
        found, values = self.factors, divided.values
        channels = value_of(self.nodes[source]).shape[divided.dim]
        if source in found.divided:
            raise ValueError(
                f"{source} is already divided by factors; call divide once, with the weights of "
                "all operators that read it"
            )
        if values.shape != (channels,) or not bool((values.isfinite() & (values > 0)).all()):
            raise ValueError(f"factors of {source} must be {channels} positive, finite numbers")
        if divided.absorbers is not None:
            of_rows, rows = divided.absorbers.of_rows(values), divided.absorbers.rows
            if not torch.equal(of_rows[rows.to(values.device)], 1 / values):
                raise ValueError(
                    f"factors of {source} must be equal for channels absorbed by one parameter row"
                )
        for name in weights:
            found.taken_up.setdefault(name, []).append((values, 1))
        if divided.absorbers is not None:
            self._absorb(values, divided.absorbers)
        found.divided[source] = divided
        found.weights.update((self.weight_group(name), name) for name in weights)

    def _absorb(self, values: Tensor, absorbers: Absorbers) -> None:
        """Have the rows of parameters divided by factors of the channels that come from them."""
        for name in absorbers.parameters:
            self.factors.taken_up.setdefault(name, []).append((absorbers.of_rows(values), 0))
            if self.nodes[name] in self.group_of_value:
                self.factors.weights[self.weight_group(name)] = name

    def scheme(self, number: int) -> Scheme:
        """Return how a group of activations is quantized."""
        spec: Any = self.plan.groups[number].spec
        low, high = quantized_range(spec.dtype, spec.quant_min, spec.quant_max)
        eps = eps_of(self.observers[number])

        def choose(minimum: Tensor, maximum: Tensor) -> tuple[Tensor, Tensor]:
            return choose_qparams(
                minimum,
                maximum,
                dtype=spec.dtype,
                quant_min=spec.quant_min,
                quant_max=spec.quant_max,
                qscheme=_PER_TENSOR.get(spec.qscheme, spec.qscheme),
                eps=DEFAULT_EPS if eps is None else eps,
            )

        return Scheme(low, high, choose, per_row=getattr(spec, "block_size", None) is not None)

    def weights(self, names: Sequence[str]) -> Iterator[RoundedWeight]:
        """Yield weights with the factors decided so far, each with the way it is going to be quantized.

        Those with a scale per row come in parts of some rows, so that no large copy is ever held.
        """
        for name in names:
            number, weight = self.weight_group(name), self.factors.constant(name)
            quantize = self._weight_quantizer(number)
            if is_per_channel(self.plan.groups[number]):
                yield from (RoundedWeight(rows, quantize, True) for _, _, rows in in_rows(weight))
            else:
                yield RoundedWeight(weight, quantize, False)

    def _weight_quantizer(self, number: int) -> FakeQuantize:
        """Return what a weight of a group is going to be once it is quantized, per row."""
        spec: Any = self.plan.groups[number].spec
        low, high = quantized_range(spec.dtype, spec.quant_min, spec.quant_max)

        def quantize(weight: Tensor) -> Tensor:
            observer: Any = make_observer(spec)
            observer(weight)
            scale, zero_point = (along(v, 0, weight.dim()) for v in observer.calculate_qparams())
            return fake_quantize(weight, scale, zero_point, low, high)

        return quantize
