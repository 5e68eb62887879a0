# SPDX-License-Identifier: Apache-2.0
"""SmoothQuant and channel scaling: large channels of activations moved into weights.

A tensor quantized per tensor has one step for all channels, so one large channel drowns the others. For
a product `y = W x + b` and positive vectors d, e::

    W x = (W diag(d)) (x / d)          y = e * ((diag(1/e) W) x + b / e)

so the input is divided by d before it is quantized, or the output multiplied by e after it was, and
the weight takes up the rest. Factors are powers of `2 ** 0.25`: finer steps than powers of two fit the
channels better, but `W diag(d)` and `x / d` are rounded to floats once more. In float32 that changes a value
by about one part in ten million, far below a step of the integers.

Channel scaling does it where it halves the squared error at least (`qompose.algorithms.factor_search`). The
rows of a product or normalization in front take up the division where they can, as through a relu, an
attention or a gate. That is all there is for integers between two products. At the border to float
operators an extra product can meet a float tensor, which has to be worth its time: it saves more the smaller
the product is that it serves. Gains are measured on rows of the calibration data from which the factors were
not made: a range of each channel takes many more rows to find than one for all of them, and from a few rows
it is too narrow for the next.

SmoothQuant is for inputs alone, and goes further, because it is asked for: weights may have one scale,
activations may be dynamic, and a gain need not pay for a pass over the tensor. Where a layer norm makes the
input, and nothing else reads it, its own parameters take up the division, and nothing is left to do at run
time (Xiao et al., "SmoothQuant", 2022).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.channel_factors import (
    Absorbers,
    Factors,
    gain_needed,
    is_per_channel,
    parameter_of,
    who_divides,
)
from qompose.algorithms.channel_paths import absorbers_of, find_absorbers
from qompose.algorithms.factor_search import input_factors, output_factors
from qompose.algorithms.interface import Algorithm, Watched
from qompose.algorithms.products import product_node
from qompose.observers.channel_ranges import (
    INPUT,
    OUTPUT,
    Balance,
    ChannelSample,
    PerChannelRangeObserver,
)
from qompose.observers.make_observer import has_data
from qompose.observers.min_max import Observer
from qompose.plan.plan import Group
from qompose.program.control_flow import count_readers, nodes_in
from qompose.program.graph import address_of, constant_of, describe, value_of
from qompose.spec.algorithm_choice import SMOOTH_QUANT, AlgorithmChoice, word_of
from qompose.spec.claim import Claim, Point
from qompose.spec.qdq import axis_of
from qompose.spec.qparams import CASTS
from qompose.spec.quantization_spec import FixedQParamsQuantizationSpec, QuantizationSpec

aten = torch.ops.aten


_DEVIATIONS = 2.0
"""How far from its mean a normalized channel goes on any data: a value in twenty, if they are Gaussian.

With three and more, a ViT and a ConvNeXt lost up to 0.4 dB on data like that of calibration.
"""


_ROWS_PER_CHANNEL = 64
"""How many rows, for each channel, tell the ranges of integers between two layers.

With 256 rows of 64 channels, factors that had half the error on images like those of calibration cost a
network of convolutions 0.5 dB on photographs with one backend, and 2.2 with another.
"""


class _NotSmoothed(Exception):  # noqa: N818 - a state, not a mistake
    """Raised with the reason why the channels of an input cannot have factors."""


class Smoothing(Algorithm):
    """SmoothQuant of the products whose configurations ask for it."""

    word = SMOOTH_QUANT

    def watch_channels(
        self, model: GraphModule, claims: Sequence[Claim], groups: Sequence[Group]
    ) -> Watched:
        nodes = {node.name: node for node in nodes_in(model)}
        asked, notes = _inputs(claims, nodes)
        placing, found = _Placing(model, claims, groups, nodes), dict[int, Balance]()
        number_of = {point: number for number, group in enumerate(groups) for point in group.points}
        together: dict[int, list[Point]] = defaultdict(list)
        for point in asked:
            together[number_of[point]].append(point)
        for number, points in together.items():
            try:
                found[number] = placing.balance(groups[number], points)
            except _NotSmoothed as reason:
                users = ", ".join(describe(nodes[point.user or ""]) for point in points)
                notes.append(f"{SMOOTH_QUANT} was not applied to the input of {users}: {reason}")
        return Watched(placing.unasked(groups) | found, tuple(notes))

    def choose_factors(self, found: Calibrated, number: int, balance: Balance) -> None:
        group = found.plan.groups[number]
        strength = "" if balance.alpha is None else f" with alpha {balance.alpha:g}"
        what = f"{_where(group, found.nodes)}{strength}"
        if not all(self.is_wanted(found.plan.claims[claim], found) for claim in group.claims):
            return
        try:
            factors = _factors(found, number, balance)
        except _NotSmoothed as reason:
            if not balance.unasked:
                found.refused.append(f"{SMOOTH_QUANT} was not applied to {what}: {reason}")
        else:
            found.take(number, balance, factors)
            found.made.append(
                f"{SMOOTH_QUANT} on {what}: {_described(balance, factors, found.nodes)}"
            )


def _factors(found: Calibrated, number: int, balance: Balance) -> Factors:
    """Return the factors that somebody asked for.

    Raises:
        _NotSmoothed: there are none.
    """
    observer, needed = found.observers[number], gain_needed(balance.absorbers)
    if not has_data(observer):
        raise _NotSmoothed("it never saw data")
    if not isinstance(observer, PerChannelRangeObserver):
        raise _NotSmoothed("its observer was replaced")
    if not observer.knows_channels:
        raise _NotSmoothed("its statistics have no channel ranges")
    if observer.range_is_set:
        raise _NotSmoothed("its range was set manually")
    if not found.is_whole(number):
        raise _NotSmoothed("one of its readers stays in float")
    dynamic = getattr(found.plan.groups[number].spec, "is_dynamic", False)
    qparams = None if dynamic else observer.calculate_qparams()
    products, scheme = [*found.weights(balance.weights)], found.scheme(number)
    expected = _expected(found, balance.absorbers)
    factors = input_factors(
        observer.channels, products, scheme, qparams, needed, balance.alpha, expected
    )
    if factors is None:
        raise _NotSmoothed(
            "no factors reduce the squared error on held-out calibration data by at least "
            f"{needed}x, or calibration saw fewer than 32 rows or too few different examples"
        )
    return factors


def _expected(found: Calibrated, absorbers: Sequence[str]) -> Tensor | None:
    """Return magnitudes that the rows of a normalization may well have, whatever was seen of them.

    Data that is mostly padding leaves channels quiet that are not so on other data, and rows held back are of
    the same kind. A range for what is left of the loud ones would cut them off, which cost a ConvNeXt 10 dB.
    """
    parameters = [found.factors.constant(name).abs().float() for name in absorbers]
    if not parameters or parameters[0].dim() > 1:
        return None  # a product tells nothing of what it gives
    scale, *bias = parameters
    return _DEVIATIONS * scale + sum(bias)


def _described(balance: Balance, factors: Factors, nodes: Mapping[str, Node]) -> str:
    how = who_divides(balance.absorbers, nodes)
    moved, most = int((factors.values != 1).sum()), float(factors.values.max())
    return f"{moved} of {len(factors.values)} channels divided by up to {most:g}, {how}; {factors.effect}"


def _where(group: Group, nodes: Mapping[str, Node]) -> str:
    """Name the tensor of a group, and those who read it with their modules."""
    users = ", ".join(describe(nodes[point.user]) for point in group.points if point.user)
    return f"{group.points[0].source} (input of {users})"


def _inputs(claims: Sequence[Claim], nodes: Mapping[str, Node]) -> tuple[list[Point], list[str]]:
    """Return the edges into products whose claims ask for it, and what is to be said of others that ask."""
    found: list[Point] = []
    notes: list[str] = []
    for claim in (claim for claim in claims if _asked(claim) is not None):
        node = product_node(claim, nodes)
        points = {spec.point for spec in claim.specs}
        source = None if node is None else node.args[0]
        edge = Point(source.name, node.name) if node and isinstance(source, Node) else None
        if edge in points and edge is not None:
            found.append(edge)
        else:
            where = describe(nodes[claim.anchor])
            reason = "it is not a linear or convolution with a quantized input"
            notes.append(f"{SMOOTH_QUANT} was not applied to {where}: {reason}")
    return found, notes


class _Placing:
    def __init__(
        self,
        model: GraphModule,
        claims: Sequence[Claim],
        groups: Sequence[Group],
        nodes: Mapping[str, Node],
    ) -> None:
        self.claims, self.nodes = claims, nodes
        self.readers = count_readers(model)
        self.group_of = {point: group for group in groups for point in group.points}

    def balance(self, group: Group, asked: Sequence[Point]) -> Balance:
        """Return what may be done to a group.

        Raises:
            _NotSmoothed: nothing.
        """
        self._check_group(group, asked)
        claims = [self.claims[number] for number in group.claims]
        for claim in claims:
            self._check_weight(claim, group)
        products = [claim.product for claim in claims if claim.product is not None]
        dims = {product.input_dim for product in products}
        if len(dims) > 1:
            raise _NotSmoothed("its readers have their channels in different dimensions")
        weights, biases = (tuple(getattr(p, name) for p in products) for name in ("weight", "bias"))
        source = self.nodes[group.points[0].source]
        users = [point.user for point in group.points if point.user]
        (dim,) = dims
        absorbers = absorbers_of(source, users, dim, self.readers, self.group_of)
        strengths = {_asked(claim) for claim in claims}
        if len(strengths) > 1:
            listed = " and ".join(sorted(map(str, strengths)))
            raise _NotSmoothed(f"its readers request different strengths: {listed}")
        alpha = getattr(strengths.pop(), "alpha", None)
        return Balance(INPUT, dim, weights, biases, SMOOTH_QUANT, absorbers, alpha)

    def unasked(self, groups: Sequence[Group]) -> dict[int, Balance]:
        """Return what costs no time, for groups whose configurations leave it to the engine."""
        found: dict[int, Balance] = {}
        for number, group in enumerate(groups):
            claims = [self.claims[claim] for claim in group.claims]
            if not all(SMOOTH_QUANT in claim.unasked for claim in claims):
                continue
            try:
                balance = self.balance(group, group.points)
            except _NotSmoothed:
                continue
            if balance.absorbers:
                found[number] = replace(balance, unasked=True)
        return found

    def _check_group(self, group: Group, asked: Sequence[Point]) -> None:
        source, spec = group.points[0].source, group.spec
        others = [point for point in group.points if point.source != source]
        if Point(source) in self.group_of:
            raise _NotSmoothed(
                f"{source} already has one scale for all its readers; use equalization "
                "to balance channels between two layers"
            )
        if others:
            raise _NotSmoothed(f"it shares its range with {others[0]}")
        if constant_of(self.nodes[source]) is not None:
            raise _NotSmoothed("it is a parameter")
        silent = [point for point in group.points if point not in asked]
        if silent:
            raise _NotSmoothed(
                f"it shares its scale with {silent[0]}, to which {SMOOTH_QUANT} is not applied"
            )
        if isinstance(spec, FixedQParamsQuantizationSpec) or not isinstance(spec, QuantizationSpec):
            raise _NotSmoothed("its scale is not estimated from data")
        if spec.dtype in CASTS or not _is_ours(spec):
            raise _NotSmoothed("its observer is not from qompose")
        if spec.block_size not in (None, (-1,)):
            raise _NotSmoothed("its scale is neither per tensor nor per token")

    def _check_weight(self, claim: Claim, group: Group) -> None:
        product = claim.product
        node = product_node(claim, self.nodes)
        if product is None or node is None:
            raise _NotSmoothed(
                f"rule {claim.rule} of {claim.owner} does not say which channels its weight has "
                "(Rule.channels): it is no plain linear layer or convolution, or the rule lacks them"
            )
        weight = self.nodes[product.weight]
        constant = constant_of(weight)
        if constant is None or self.readers.get(address_of(constant), 0) != 1:
            raise _NotSmoothed(f"{weight.target} is not a parameter with a single reader")
        source = node.args[0]
        assert isinstance(source, Node)
        if Point(source.name, node.name) not in group.points:
            raise _NotSmoothed(f"{describe(node)} does not read it")
        channels = value_of(source).shape[product.input_dim]
        if constant.dim() < 2 or constant.shape[1] != channels:
            raise _NotSmoothed(
                f"the weight of {describe(node)} has the shape {list(constant.shape)}, but its input has "
                f"{channels} channels along dimension {product.input_dim}: it is a grouped convolution, or "
                f"`channels` of rule {claim.rule} is wrong"
            )
        spec = self.group_of[Point(weight.name, node.name)].spec
        if not isinstance(spec, QuantizationSpec) or spec.dtype in CASTS:
            raise _NotSmoothed(f"{weight.target} is not quantized to integers with an observer")
        if spec.block_size is not None or axis_of(spec) not in (None, 0) or not _is_ours(spec):
            raise _NotSmoothed(
                f"{weight.target} must have a qompose observer, per tensor or per output channel"
            )


def _asked(claim: Claim) -> AlgorithmChoice | None:
    """Return the SmoothQuant that a claim's configuration asks for, with its strength."""
    return next((c for c in claim.algorithms if word_of(c) == SMOOTH_QUANT), None)


def _is_ours(spec: QuantizationSpec) -> bool:
    """Tell whether an observer of qompose estimates a tensor: others go by rules of their own."""
    kind: Any = spec.observer_or_fake_quant_ctr
    kind = getattr(kind, "observer", kind)
    return isinstance(kind, type) and issubclass(kind, Observer)


class ChannelScaling(Algorithm):
    """Evens out channels wherever a configuration has `balance`."""

    def watch_channels(
        self, model: GraphModule, claims: Sequence[Claim], groups: Sequence[Group]
    ) -> Watched:
        if not any(claim.product for claim in claims):
            return Watched()
        borders = _Borders.of(model, claims)
        found = {number: borders.balance(group) for number, group in enumerate(groups)}
        return Watched({number: balance for number, balance in found.items() if balance})

    def choose_factors(self, found: Calibrated, number: int, balance: Balance) -> None:
        factors, absorbers = _worthwhile(found, number, balance)
        if factors is not None:
            found.take(number, balance, factors, absorbers)
            how = f", {who_divides(absorbers.parameters, found.nodes)}" if absorbers else ""
            point = found.plan.groups[number].points[0]
            found.made.append(f"balanced the channels of {point}{how}: {factors.effect}")


def _worthwhile(
    found: Calibrated, number: int, balance: Balance
) -> tuple[Factors | None, Absorbers | None]:
    """Return the factors of a group that are worth their time, and what divides by them for nothing."""
    observer = found.observers[number]
    weight_groups = [found.plan.groups[found.weight_group(name)] for name in balance.weights]
    per_channel = all(map(is_per_channel, weight_groups))
    if not isinstance(observer, PerChannelRangeObserver) or not per_channel:
        return None, None  # a replaced observer; a weight that cannot take up factors
    if not observer.knows_channels:
        return None, None  # statistics of another preparation, which did not look at channels
    if observer.range_is_set:
        point = found.plan.groups[number].points[0]
        found.refused.append(f"did not balance the channels of {point}: its range was set manually")
        return None, None
    if not found.is_whole(number):
        return None, None  # a reader left in float
    if balance.side == INPUT:
        return _of_input(found, number, balance, observer)
    weight = found.factors.constant(balance.weights[0])
    scheme, qparams = found.scheme(number), observer.calculate_qparams()
    return output_factors(observer.channels, weight, scheme, qparams), None


def _of_input(
    found: Calibrated, number: int, balance: Balance, observer: PerChannelRangeObserver
) -> tuple[Factors | None, Absorbers | None]:
    """Return the factors of a product's input that are worth their time, and what takes them up."""
    channels, points = observer.channels, found.plan.groups[number].points
    shapes = [parameter_of(found.nodes[name]).shape for name in balance.weights]
    if any(shape[1] != channels.low.numel() for shape in shapes):
        return None, None  # a grouped convolution
    source, users = found.nodes[points[0].source], [point.user for point in points if point.user]
    absorbers = find_absorbers(found, source, users, balance.dim, with_range=True)
    if len(users) < len(points) and (absorbers is None or not _knows_ranges(channels)):
        return None, None  # integers, which only the layer in front can divide
    expected = None
    if absorbers is not None:
        of_rows = _expected(found, absorbers.parameters)
        expected = None if of_rows is None else of_rows[absorbers.rows.to(of_rows.device)]
    factors = input_factors(
        channels,
        [*found.weights(balance.weights)],
        found.scheme(number),
        observer.calculate_qparams(),
        expected=expected,
        absorbers=absorbers,
    )
    return factors, absorbers


def _knows_ranges(channels: ChannelSample) -> bool:
    """Tell whether so many rows were seen that the next one is seldom beyond the range of a channel.

    With `C` channels that are alike, it is so with one row in `n / C`. Factors take the room that the loudest
    channel gives all others, and what is beyond is cut off. Pooled features have but a row for each example.
    """
    return float(channels.weights.sum()) >= _ROWS_PER_CHANNEL * channels.low.numel()


@dataclass(frozen=True)
class _Borders:
    """Finds the groups whose tensor is a product's on one side, and float or a product's on the other.

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
        source, sides = group.points[0].source, {point.user is None for point in group.points}
        claims = [self.claims[number] for number in group.claims]
        balanced = all(c.product is not None and c.product.balanced for c in claims)
        balanced = balanced and not getattr(group.spec, "is_dynamic", False)
        if not balanced or any(point.source != source for point in group.points):
            return None
        between = len(sides) > 1  # integers, of which the claim in front is one
        served = [claim for claim in claims if not between or claim.output != source]
        known = [claim.product for claim in served if claim.product is not None]
        parameters = [name for p in known for name in (p.weight, p.bias) if name]
        if not all(self._is_private(name) for name in parameters):
            return None
        if sides == {True} and self.points[source] == 1:
            side, dims = OUTPUT, {product.output_dim for product in known}
        elif False in sides and constant_of(self.nodes[source]) is None:
            side, dims = INPUT, {product.input_dim for product in known}
            read = len(known) + between
            if len(group.points) != read or self.points[source] != read:
                return None
        else:
            return None
        weights, biases = tuple(p.weight for p in known), tuple(p.bias for p in known)
        return Balance(side, dims.pop(), weights, biases) if len(dims) == 1 else None

    def _is_private(self, name: str) -> bool:
        """Tell whether a parameter is read in one place of the program, under no other name either."""
        constant = constant_of(self.nodes[name])
        return constant is not None and self.readers.get(address_of(constant), 0) == 1
