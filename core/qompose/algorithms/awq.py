# SPDX-License-Identifier: Apache-2.0
"""AWQ: weights of few bits, scaled so that the channels that carry the most have the finest steps.

Where weights alone are quantized, their columns are multiplied by factors and the channels of their input
divided by them: `W x = (W diag(d)) (x / d)`. A channel whose inputs are large gets a factor above 1: its
column is rounded in finer steps, and the quiet ones that share a scale with it in coarser ones (Lin et al.,
"AWQ: Activation-aware Weight Quantization", 2023).

The size of a channel is the root mean square of its inputs, and its factor a power of that size. Several
powers are tried, each by the squared error of the product on second moments of the half of the examples
that the sizes are not of, where no channel counts as more than eight times the median. All products that
read a tensor get the same factors. Where nothing else reads it, the parameters of a normalization, a linear
or a convolution in front divide (`qompose.algorithms.channel_paths`), else a product in the graph, in float.

Inputs that are quantized too have SmoothQuant, which weighs both errors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.channel_factors import (
    JUDGED,
    Absorbers,
    Divided,
    gain_needed,
    in_steps,
    who_divides,
)
from qompose.algorithms.channel_paths import find_absorbers
from qompose.algorithms.interface import Algorithm, NotChanged
from qompose.algorithms.product_inputs import InputMoments, times_smaller
from qompose.algorithms.products import (
    NOTHING,
    Operands,
    channel_dim,
    expert_of,
    groups_of,
    moments_asked,
    moments_read,
    operands_of,
    product_node,
)
from qompose.observers.make_observer import make_observer, qparams_of
from qompose.program.batch_norm_folding import TRANSPOSED
from qompose.program.graph import address_of, constant_of, describe
from qompose.spec.algorithm_choice import AWQ as WORD
from qompose.spec.claim import Claim, Point
from qompose.spec.qdq import axis_of, integers_of, values_of_integers
from qompose.spec.qparams import CASTS, along
from qompose.spec.quantization_spec import QuantizationSpec

_POWERS = tuple(n / 10 for n in range(1, 11))
_LOUDEST = 8.0
"""How many times the median size of all channels one can count.

One token of a sequence, on which others lean, may be a thousand times as large as they are in a channel: its
squares alone would decide.
"""
_SMALLEST, _LARGEST = 2.0**-8, 2.0**8


class AWQ(Algorithm):
    """Scales the channels of weights whose claims ask for it."""

    word = WORD
    needs_data = True

    def watch_moments(
        self, claims: Sequence[Claim], nodes: Mapping[str, Node]
    ) -> Iterator[tuple[Node, Any, int]]:
        return moments_asked(self, claims, nodes)

    def scale_inputs(self, found: Calibrated) -> None:
        for source, products in self._products(found).items():
            try:
                divided, effect = _divided(found, source, products)
            except NotChanged as reason:
                for product in products:
                    self._refuse(found, product.node, str(reason))
            else:
                found.divide(source.name, divided, [product.weight.name for product in products])
                found.made.append(f"{self.word} on {_where(source, products)}: {effect}")

    def _products(self, found: Calibrated) -> dict[Node, list[Operands]]:
        """Return the products to change by what they read; say of others why they are not."""
        together: dict[Node, list[Operands]] = defaultdict(list)
        for number, claim in enumerate(found.plan.claims):
            if not self.is_asked(claim):
                continue
            try:
                product = operands_of(found, number)
                _check(found, product)
            except NotChanged as reason:
                node = product_node(claim, found.nodes) or found.nodes[claim.anchor]
                self._refuse(found, node, str(reason))
            else:
                together[product.source].append(product)
        places = {node: place for place, node in enumerate(found.nodes.values())}
        # A weight that takes up factors of the tensor behind it has its own, which are found without them.
        return dict(sorted(together.items(), key=lambda item: places[item[0]]))

    def _refuse(self, found: Calibrated, node: Node, reason: str) -> None:
        found.refused.append(f"{self.word} was not applied to {describe(node)}: {reason}")


def _check(found: Calibrated, product: Operands) -> None:
    """Check that the columns of a product's weight can be scaled.

    Raises:
        NotChanged: they cannot.
    """
    constant, node = constant_of(product.weight), product.node
    if constant is None:
        raise NotChanged("its weight is not a parameter")
    if groups_of(node) != 1 or node.target in TRANSPOSED:
        raise NotChanged("it is a grouped or transposed convolution")
    number = found.plan.group_of.get(Point(product.weight.name, product.node.name))
    points = () if number is None else found.plan.groups[number].points
    if found.readers.get(address_of(constant), 0) > 1 or len(points) > 1:
        raise NotChanged(f"{product.weight.target} is read by other operators or shares scales")
    spec = _spec(found, product)
    if number is None or not isinstance(spec, QuantizationSpec) or spec.dtype in CASTS:
        raise NotChanged(f"{product.weight.target} is not quantized to integers with an observer")
    block = spec.block_size or ()
    rows = len(block) < constant.dim() or block[0] == 1
    if not rows or axis_of(spec) not in (None, 0):
        raise NotChanged(f"several output channels of {product.weight.target} share a scale")


def _spec(found: Calibrated, product: Operands) -> Any:
    number = found.plan.group_of.get(Point(product.weight.name, product.node.name))
    return None if number is None else found.plan.groups[number].spec


def _where(source: Node, products: Sequence[Operands]) -> str:
    return f"{source.name} (input of {', '.join(describe(p.node) for p in products)})"


def _divided(found: Calibrated, source: Node, products: Sequence[Operands]) -> tuple[Divided, str]:
    """Return the factors of a tensor that products read, and what they gain.

    Raises:
        NotChanged: none are better than none.
    """
    dims = {channel_dim(product.node, product.weight) for product in products}
    if len(dims) > 1:
        raise NotChanged("the layers that read its input do not share one channel dimension")
    (dim,) = dims
    users = tuple(dict.fromkeys(product.node.name for product in products))
    absorbers = find_absorbers(found, source, users, dim)
    trials = _trials(found, products)
    values, gain = _best(trials, absorbers)
    needed = gain_needed(absorbers)
    if gain < needed:
        raise NotChanged(
            "without factors, the squared error on held-out calibration data is only "
            f"{gain:.2f}x that with the best factors; at least {needed}x is required"
        )
    how = who_divides(absorbers.parameters if absorbers else (), found.nodes)
    effect = (
        f"channels divided by {float(values.min()):g} to {float(values.max()):g}, {how}; squared "
        f"error on held-out calibration data reduced {gain:.2f}x"
    )
    return Divided(values, dim, users, absorbers), effect


@dataclass(frozen=True)
class _Trial:
    """A product: some rows of its weight, how they are quantized, and moments of both halves of its input."""

    weight: Tensor
    spec: Any
    halves: tuple[InputMoments, InputMoments]

    @classmethod
    def of(cls, found: Calibrated, product: Operands) -> _Trial:
        inputs = moments_read(found, product)
        weight = found.factors.constant(product.weight.name).float()
        spec = _spec(found, product)
        if axis_of(spec) == 0 or spec.block_size is not None:  # else the range is that of all rows
            weight = weight[:: max(1, weight.shape[0] // JUDGED)]
        first, second = _limited(inputs, weight.shape[1]).halves()
        return cls(weight, spec, (first, second))

    def sizes(self, half: int) -> Tensor:
        """Return the root mean square of each channel on one half, `(C,)`."""
        return _sizes(self.halves[half], self.weight.shape[1])

    def error(self, factors: Tensor, half: int) -> float:
        """Return the squared error of the product on one half, over the power of its outputs."""
        vector = along(factors, 1, self.weight.dim())
        off = _rounded(self.weight * vector, self.spec) / vector - self.weight
        both = [values.flatten(1)[None] for values in (self.weight, off)]
        power, error = self.halves[half].errors(both)
        return error / power if power else 0.0


def _trials(found: Calibrated, products: Sequence[Operands]) -> list[_Trial]:
    """Return the products by which factors are judged: not experts to which too few rows were routed.

    Raises:
        NotChanged: there are none, or others have no data.
    """
    trials, refusal = list[_Trial](), NotChanged("nothing reads it")
    for product in products:
        try:
            trials.append(_Trial.of(found, product))
        except NotChanged as reason:
            if expert_of(product.node) is None:
                raise
            refusal = reason
    if not trials:
        raise refusal
    return trials


def _sizes(inputs: InputMoments, channels: int) -> Tensor:
    """Return the root mean square of each channel, `(C,)`."""
    return inputs.powers()[0].view(channels, -1).mean(1).clamp(min=0.0).sqrt()


def _limited(inputs: InputMoments, channels: int) -> InputMoments:
    """Return moments in which no channel is much larger than the others."""
    sizes = _sizes(inputs, channels)
    alive = sizes[sizes > 0]
    if not len(alive):
        return inputs
    limits = (_LOUDEST * alive.median() / sizes.clamp(min=NOTHING)).clamp(max=1.0)
    return replace(inputs, limits=limits.repeat_interleave(inputs.channels // channels))


def _rounded(weight: Tensor, spec: Any) -> Tensor:
    """Return what a weight is going to be once it is quantized."""
    observer: Any = make_observer(spec)
    observer(weight)
    q = qparams_of(spec, observer, *observer.calculate_qparams())
    return values_of_integers(integers_of(weight, q), q)


def _best(trials: Sequence[_Trial], absorbers: Absorbers | None) -> tuple[Tensor, float]:
    """Return the factors of the power that is best on data held back, and how much smaller the error is."""
    none = trials[0].weight.new_ones(trials[0].weight.shape[1])
    before = sum(trial.error(none, half) for trial in trials for half in (0, 1))
    sizes = [torch.stack([trial.sizes(half) for trial in trials]).mean(0) for half in (0, 1)]
    if absorbers is not None:
        sizes = [absorbers.even(of_half) for of_half in sizes]

    def held_back(power: float) -> float:
        return sum(
            trial.error(_factors(sizes[1 - half], power), half)
            for trial in trials
            for half in (0, 1)
        )

    errors = {power: held_back(power) for power in _POWERS}
    power = min(errors, key=lambda p: errors[p])
    both = (sizes[0].square() + sizes[1].square()).div(2).sqrt()
    return _factors(both, power), times_smaller(before, errors[power])


def _factors(sizes: Tensor, power: float) -> Tensor:
    """Return a power of sizes around 1, in steps of a quarter octave; silent channels have the smallest."""
    alive = sizes[sizes > 0]
    if not len(alive):
        return torch.ones_like(sizes)
    raw = sizes.clamp(min=float(alive.min())) ** power
    return in_steps(raw / (raw.amax() * raw.amin()).sqrt()).clamp(_SMALLEST, _LARGEST)
