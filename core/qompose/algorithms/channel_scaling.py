# SPDX-License-Identifier: Apache-2.0
"""Channel scaling: factors that even out channels at the border to float.

A tensor quantized per tensor has one step for all channels, so one large channel drowns the others. For
a product `y = W x + b` and positive vectors d, e::

    W x = (W diag(d)) (x / d)          y = e * ((diag(1/e) W) x + b / e)

so the input is divided by d before it is quantized, or the output multiplied by e after it was, and
the weight takes up the rest. Factors are powers of `2 ** 0.25`: finer steps than powers of two fit the
channels better, but `W diag(d)` and `x / d` are rounded to floats once more. In float32 that changes a value
by about one part in ten million, far below a step of the integers.

It is done only at the border to float operators, where the extra product meets a float tensor, and only
where it is worth its time: where it halves the squared error at least, and saves more the smaller the
product is that it serves (`qompose.algorithms.factor_search`). That is measured on rows of the calibration
data from which the factors were not made: a range of each channel takes many more rows to find than one for
all of them, and from a few rows it is too narrow for the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.channel_factors import Factors, is_per_channel, parameter_of
from qompose.algorithms.factor_search import input_factors, output_factors
from qompose.algorithms.interface import Algorithm, Watched
from qompose.observers.channel_ranges import INPUT, OUTPUT, Balance, PerChannelRangeObserver
from qompose.plan.plan import Group
from qompose.program.control_flow import count_readers, nodes_in
from qompose.program.graph import address_of, constant_of
from qompose.spec.claim import Claim


class ChannelScaling(Algorithm):
    """Evens out channels wherever a configuration has `balance`, at the border to float operators."""

    def watch_channels(
        self, model: GraphModule, claims: Sequence[Claim], groups: Sequence[Group]
    ) -> Watched:
        if not any(claim.product for claim in claims):
            return Watched()
        borders = _Borders.of(model, claims)
        found = {number: borders.balance(group) for number, group in enumerate(groups)}
        return Watched({number: balance for number, balance in found.items() if balance})

    def choose_factors(self, found: Calibrated, number: int, balance: Balance) -> None:
        factors = _factors(found, number, balance)
        if factors is not None:
            found.take(number, balance, factors)
            found.made.append(
                f"channels of {found.plan.groups[number].points[0]} were balanced: {factors.effect}"
            )


def _factors(found: Calibrated, number: int, balance: Balance) -> Factors | None:
    """Return the factors of a group that are worth their time."""
    observer = found.observers[number]
    weight_groups = [found.plan.groups[found.weight_group(name)] for name in balance.weights]
    per_channel = all(map(is_per_channel, weight_groups))
    if not isinstance(observer, PerChannelRangeObserver) or not per_channel:
        return None  # a replaced observer; a weight that cannot take up factors
    if not observer.knows_channels:
        return None  # statistics of another preparation, which did not look at channels
    if observer.range_is_set:
        point = found.plan.groups[number].points[0]
        found.refused.append(f"channels of {point} were not balanced: its range was set by hand")
        return None
    if not found.is_whole(number):
        return None  # a reader left in float
    channels, scheme = observer.channels, found.scheme(number)
    if balance.side == OUTPUT:
        weight = found.factors.constant(balance.weights[0])
        return output_factors(channels, weight, scheme, observer.calculate_qparams())
    shapes = [parameter_of(found.nodes[name]).shape for name in balance.weights]
    if any(shape[1] != channels.low.numel() for shape in shapes):
        return None  # a grouped convolution
    products = [*found.weights(balance.weights)]
    return input_factors(channels, products, scheme, observer.calculate_qparams())


@dataclass(frozen=True)
class _Borders:
    """Finds the groups whose tensor is float on one side, and a product's on the other.

    What a region gives is float too where it has no point of its own, as the output of a product that is
    fused with the function behind it.

    Attributes:
        points: how many points each value has.
    """

    claims: Sequence[Claim]
    nodes: Mapping[str, Node]
    readers: Mapping[int, int]
    points: Mapping[str, int]

    @classmethod
    def of(cls, model: GraphModule, claims: Sequence[Claim]) -> _Borders:
        places = {spec.point for claim in claims for spec in claim.specs}
        return cls(
            claims,
            {node.name: node for node in nodes_in(model)},
            count_readers(model),
            Counter(point.source for point in places),
        )

    def balance(self, group: Group) -> Balance | None:
        """Return how a group's channels may be balanced, None where they may not."""
        products = [self.claims[number].product for number in group.claims]
        source = group.points[0].source
        balanced = all(product is not None and product.balanced for product in products)
        balanced = balanced and not getattr(group.spec, "is_dynamic", False)
        if not balanced or any(point.source != source for point in group.points):
            return None
        known = [product for product in products if product is not None]
        parameters = [name for p in known for name in (p.weight, p.bias) if name]
        if not all(self._is_private(name) for name in parameters):
            return None
        sides = {point.user is None for point in group.points}
        if sides == {True} and self.points[source] == 1:
            side, dims = OUTPUT, {product.output_dim for product in known}
        elif sides == {False} and constant_of(self.nodes[source]) is None:
            side, dims = INPUT, {product.input_dim for product in known}
            if len(group.points) != len(known) or self.points[source] != len(known):
                return None
        else:
            return None
        weights, biases = tuple(p.weight for p in known), tuple(p.bias for p in known)
        return Balance(side, dims.pop(), weights, biases) if len(dims) == 1 else None

    def _is_private(self, name: str) -> bool:
        """Tell whether a parameter is read in one place of the program, under no other name either."""
        constant = constant_of(self.nodes[name])
        return constant is not None and self.readers.get(address_of(constant), 0) == 1
