# SPDX-License-Identifier: Apache-2.0
"""Channel scaling: factors (powers of two) that even out channels, searched and applied.

A tensor quantized per tensor has one step for all channels, so one large channel drowns the others. For
a product `y = W x + b` and positive vectors d, e::

    W x = (W diag(d)) (x / d)          y = e * ((diag(1/e) W) x + b / e)

so the input is divided by d before it is quantized, or the output multiplied by e after it was, and
the weight takes up the rest. With powers of two this is exact in floating point, up to overflow. It is
done only at the border to float operators, where the extra product meets a float tensor, and only where
it is worth its time: where it halves the squared error at least, and saves more the smaller the product is
that it serves (`_needed_gain`). That is measured on rows of the calibration data from which the factors
were not made: a range of each channel takes many more rows to find than one for all of them, and from a
few rows it is too narrow for the next.

Factors are at least 1: they shrink large channels and leave quiet ones their headroom, so that a channel
which happened to be silent during calibration is not cut off when it speaks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from qompose.observers.channel_ranges import OUTPUT, Balance, ChannelSample, PerChannelRangeObserver
from qompose.observers.clipping_range_search import best_range, power_error
from qompose.observers.histogram import Histogram
from qompose.observers.make_observer import eps_of, make_observer
from qompose.plan.plan import Group, Plan
from qompose.program.graph import constant_of, describe
from qompose.program.meta import FACTORS_TAG, tag
from qompose.spec.claim import Claim
from qompose.spec.qdq import Absorbed, axis_of, in_rows
from qompose.spec.qparams import DEFAULT_EPS, along, choose_qparams, fake_quantize, quantized_range

_LEAST_GAIN, _PLENTY_OF_WORK = 2.0, 256
_EXPONENTS = (0.25, 0.5, 0.75, 1.0)
_LARGEST_FACTOR = 2.0**8
_POWER = 3.0
FakeQuantize = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Factors:
    """What a side is divided by before quantization, shape `(C,)`, and the parameters it then has.

    Parameters that are chosen at run time are not those that it has here.
    `gain` is the error without factors over the one with them, both measured on rows held back.
    """

    values: Tensor
    scale: Tensor
    zero_point: Tensor
    gain: float


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


def input_factors(
    channels: ChannelSample,
    products: Sequence[tuple[Tensor, FakeQuantize]],
    scheme: Scheme,
    qparams: tuple[Tensor, Tensor] | None,
    needed: float | None = None,
    alpha: float | None = None,
) -> Factors | None:
    """Return factors for the input of products, or None where none are worthwhile.

    Candidates are `(largest input / largest weight) ** exponent` per channel, as in SmoothQuant (Xiao et
    al. 2022), for several exponents. The error is that of the products on the sample.

    Args:
        products: weights, shape `(out, C, ...)`, each with the way it is going to be quantized.
        qparams: scale and zero point without factors; None where they are chosen at run time.
        needed: how many times smaller the error has to become; None where it has to be worth its time.
        alpha: the only exponent to try.
    """
    heaviest = torch.stack([w.abs().transpose(0, 1).flatten(1).amax(1) for w, _ in products]).amax(
        0
    )

    def size(seen: ChannelSample, exponent: float) -> Tensor:
        return seen.largest**exponent / heaviest.clamp(min=1e-30) ** (1 - exponent)

    def error(sample: Tensor, factors: Tensor, scale: Tensor, zero_point: Tensor) -> float:
        quantized = scheme.simulate(sample / factors, scale, zero_point)
        return sum(_product_error(sample, quantized, factors, *p) for p in products)

    exponents = _EXPONENTS if alpha is None else (alpha,)
    sizes = [partial(size, exponent=exponent) for exponent in exponents]
    if needed is None:
        needed = _needed_gain(weight.numel() // weight.shape[1] for weight, _ in products)
    return _best(channels, sizes, scheme, qparams, error, needed)


def _needed_gain(work: Iterable[int]) -> float:
    """Return how many times smaller the squared error has to become for factors to be worth their time.

    Factors at run time are a pass over the tensor in float. Beside hundreds of multiply-accumulates for
    each of its elements that is nothing. Beside the few dozen of a pointwise convolution it is not:
    fourteen such passes cost MobileNet-V3 a twelfth of its time on a processor with int8 kernels.

    Args:
        work: of each product, the multiply-accumulates for one element of the tensor with factors.
    """
    return _LEAST_GAIN * math.sqrt(max(1.0, _PLENTY_OF_WORK / max(sum(work), 1)))


def _product_error(
    sample: Tensor, quantized: Tensor, factors: Tensor, weight: Tensor, quantize: FakeQuantize
) -> float:
    """Return the squared error of a product; the taps of a convolution count as products of their own."""
    exact = sample @ _taps(weight).T
    scaled = quantize(weight * along(factors, 1, weight.dim()))
    return float(((quantized @ _taps(scaled).T - exact) ** 2).sum())


def _taps(weight: Tensor) -> Tensor:
    return weight.transpose(0, 1).flatten(1).T


def output_factors(
    channels: ChannelSample, weight: Tensor, scheme: Scheme, qparams: tuple[Tensor, Tensor]
) -> Factors | None:
    """Return factors for a product's output, or None where none are worthwhile; see `input_factors`."""

    def error(sample: Tensor, factors: Tensor, scale: Tensor, zero_point: Tensor) -> float:
        quantized = fake_quantize(sample / factors, scale, zero_point, scheme.low, scheme.high)
        return float(((quantized * factors - sample) ** 2).sum())

    needed = _needed_gain([weight.numel() // weight.shape[0]])
    return _best(channels, [lambda seen: seen.largest], scheme, qparams, error, needed)


def _best(
    channels: ChannelSample,
    sizes: Sequence[Callable[[ChannelSample], Tensor]],
    scheme: Scheme,
    qparams: tuple[Tensor, Tensor] | None,
    error: Callable[[Tensor, Tensor, Tensor, Tensor], float],
    needed: float,
) -> Factors | None:
    """Return the factors by those of `sizes` that have the least error on rows they are not made from.

    None where that is not `needed` times smaller than without factors.
    """
    trials = channels.trials()

    def chosen(seen: ChannelSample, factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return factors, *scheme.choose(*_divided_range(seen, factors, scheme, qparams))

    def held_back_error(factors_of: Callable[[ChannelSample], Tensor]) -> float:
        return sum(error(held.sample, *chosen(seen, factors_of(seen))) for seen, held in trials)

    if not trials:
        return None
    before, gains = held_back_error(lambda seen: torch.ones_like(seen.low)), list[float]()
    for size in sizes:
        after = held_back_error(lambda seen, size=size: _powers_of_two(size(seen)))  # type: ignore[misc]
        gains.append(before / max(after, 1e-30))
    gain, best = max(gains), sizes[gains.index(max(gains))]
    if gain < needed:
        return None
    return Factors(*chosen(channels, _powers_of_two(best(channels))), gain)


def _powers_of_two(sizes: Tensor) -> Tensor:
    """Return the powers of two next to the sizes over their median; channels that say nothing have 1."""
    alive = sizes > 0
    if not bool(alive.any()):
        return torch.ones_like(sizes)
    ratios = sizes.clamp(min=1e-30) / sizes[alive].median()
    return torch.exp2(torch.log2(ratios).round()).clamp(1.0, _LARGEST_FACTOR)


def _divided_range(
    channels: ChannelSample, factors: Tensor, scheme: Scheme, qparams: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Search the range of the divided tensor on the sample, within the range that was seen.

    A sample misses the rarest extremes, so no more of the range is cut off than all of the data allowed
    for the undivided tensor, whose parameters are `qparams`. At run time nothing is cut off.
    """
    if qparams is None:
        return (channels.low / factors).amin(), (channels.high / factors).amax()
    histogram = Histogram()
    histogram.add(channels.sample / factors)
    histogram.minimum = float((channels.low / factors).amin())
    histogram.maximum = float((channels.high / factors).amax())
    low, high = best_range(histogram, steps=scheme.high - scheme.low, cost=power_error(_POWER))
    kept_low, kept_high = _kept(channels, scheme, *qparams)
    return (
        torch.minimum(low, kept_low * histogram.minimum),
        torch.maximum(high, kept_high * histogram.maximum),
    )


def _kept(
    channels: ChannelSample, scheme: Scheme, scale: Tensor, zero_point: Tensor
) -> tuple[Tensor, Tensor]:
    """Return how much of the range below and above zero the undivided tensor's parameters keep."""
    seen = torch.stack([channels.low.amin().clamp(max=0), channels.high.amax().clamp(min=0)])
    ends = (torch.tensor([scheme.low, scheme.high]) - zero_point) * scale
    kept = torch.where(seen == 0, 0.0, ends / torch.where(seen == 0, 1.0, seen)).clamp(0.0, 1.0)
    return kept[0], kept[1]


_FOR_NOTHING, _FOR_A_PASS = 1.05, 1.25
"""How many times smaller an error has to become by a repair: where parameters do all of it, and where not."""
_PER_TENSOR = {
    torch.per_channel_affine: torch.per_tensor_affine,
    torch.per_channel_symmetric: torch.per_tensor_symmetric,
}


@dataclass(frozen=True)
class ChannelFactors:
    """The factors that were decided on, and the parameters that are going to take them up.

    The model still holds those without them.

    Attributes:
        plan: the plan of the model.
        nodes: those of the prepared model, by name.
        factors: by group, what its channels are divided by before they are quantized.
        refused: what was asked for by word and has no factors, with the reason.
        weights: by group of a weight that takes up factors, its name.
        taken_up: by name of a parameter, vectors and the dimensions along which they multiply it.
    """

    plan: Plan
    nodes: Mapping[str, Node]
    factors: dict[int, Factors] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    weights: dict[int, str] = field(default_factory=dict)
    taken_up: dict[str, list[tuple[Tensor, int]]] = field(default_factory=dict)

    def absorbed(self, name: str) -> Absorbed:
        """Return the factors that a parameter is going to take up."""
        return self.taken_up.get(name, ())

    def constant(self, name: str) -> Tensor:
        """Return a parameter with its factors.

        It is computed anew each time, so that no second copy of all parameters is ever held.
        """
        constant, absorbed = _parameter(self.nodes[name]), self.absorbed(name)
        if not absorbed:
            return constant.detach()
        return torch.cat([rows for _, _, rows in in_rows(constant, absorbed)])

    def beside_weights(self) -> dict[str, Tensor]:
        """Return all other parameters that take up factors, with those: biases, and what makes an input."""
        sides = [group.balance for group in self.plan.groups if group.balance is not None]
        names = (name for side in sides for name in (*side.biases, *side.absorbers))
        return {name: self.constant(name) for name in names if name in self.taken_up}

    def qparams_of_rows(self, number: int) -> tuple[Tensor, Tensor] | None:
        """Return scales and zero points of a weight that takes up factors: its observer saw it without them.

        Of any other group, None.
        """
        if (name := self.weights.get(number)) is None:
            return None
        found, group = [], self.plan.groups[number]
        whole: Any = make_observer(group.spec)
        per_channel = _is_per_channel(group)
        for _, _, rows in in_rows(_parameter(self.nodes[name]), self.absorbed(name)):
            observer: Any = make_observer(group.spec) if per_channel else whole
            observer(rows)
            found.append(observer.calculate_qparams())
        if not per_channel:
            return whole.calculate_qparams()  # type: ignore[no-any-return]
        scales, zero_points = zip(*found, strict=True)
        return torch.cat(scales), torch.cat(zero_points)

    def described(self) -> list[str]:
        """Describe the tensors whose channels got factors."""
        return [self._described(number, factors) for number, factors in self.factors.items()]

    def _described(self, number: int, factors: Factors) -> str:
        gain = f"squared error on calibration data held back {factors.gain:.1f} times smaller"
        group, balance = self.plan.groups[number], self.plan.groups[number].balance
        if balance is None or not balance.repair:
            return f"channels of {group.points[0]} were balanced: {gain}"
        how = "by a product in the graph"
        if balance.absorbers:
            paths = (str(self.nodes[name].target) for name in balance.absorbers)
            how = f"by {' and '.join(paths)}"
        moved, most = int((factors.values > 1).sum()), float(factors.values.max())
        return (
            f"{_asked(balance)} of {_where(group, self.nodes)}: {moved} of {len(factors.values)} channels "
            f"divided by up to {most:g}, {how}; {gain}"
        )


def commit_factors(found: ChannelFactors) -> None:
    """Tag every value of the model, in place, with the factors that it is held with from now on."""
    for name, absorbed in found.taken_up.items():
        _tag_factors(found.nodes[name], [(dim, vector) for vector, dim in absorbed])
    for number, factors in found.factors.items():
        group, balance = found.plan.groups[number], found.plan.groups[number].balance
        if balance is not None and (balance.side == OUTPUT or balance.absorbers):
            for name in _given_by(group.points[0].source, found.plan.claims):
                _tag_factors(found.nodes[name], [(balance.dim, 1 / factors.values)])


def _given_by(source: str, claims: Iterable[Claim]) -> list[str]:
    """Return what gives a tensor: the operators of its claim, which come to it one by one."""
    names = (name for claim in claims if claim.output == source for name in claim.nodes)
    return [*names] or [source]


class FactorSearch:
    """Decides which tensors' channels get factors, and leaves the model as it is.

    Args:
        nodes: those of the prepared model, by name.
        observers: those of the plan's groups.
        group_of_value: the group that a value belongs to first.
        dropped: claims that are not followed.
    """

    def __init__(
        self,
        plan: Plan,
        nodes: Mapping[str, Node],
        observers: Mapping[int, Any],
        group_of_value: Mapping[Any, int],
        dropped: Collection[int],
    ) -> None:
        self._groups, self._nodes, self._observers = plan.groups, nodes, observers
        self._group_of_value, self._dropped = group_of_value, dropped
        self._found = ChannelFactors(plan, nodes)

    def run(self, alive: Iterable[int]) -> ChannelFactors:
        """Decide group by group: a weight takes up the factors of one before the next is looked at.

        Args:
            alive: groups that any claim still wants.
        """
        for number in alive:
            balance = self._groups[number].balance
            if balance is not None and balance.repair:
                self._repair(number, balance)
            elif balance is not None:
                self._balance(number, balance)
        return self._found

    def _balance(self, number: int, balance: Balance) -> None:
        """Decide on a group's factors and move them into the parameters behind or before it."""
        observer, found = self._observers[number], self._found
        weight_groups = [self._groups[self._weight_group(name)] for name in balance.weights]
        per_channel = all(map(_is_per_channel, weight_groups))
        whole = self._dropped_none(number)
        if not isinstance(observer, PerChannelRangeObserver) or not per_channel or not whole:
            return  # a replaced observer; a weight that cannot take up factors; a reader left in float
        channels, scheme = observer.channels, self._scheme(number)
        shapes = [_parameter(self._nodes[name]).shape for name in balance.weights]
        if balance.side == OUTPUT:
            weight = found.constant(balance.weights[0])
            factors = output_factors(channels, weight, scheme, observer.calculate_qparams())
        elif any(shape[1] != channels.low.numel() for shape in shapes):
            return  # a grouped convolution
        else:
            products = [*self._products(balance)]
            factors = input_factors(channels, products, scheme, observer.calculate_qparams())
        if factors is not None:
            self._take(number, balance, factors)

    def _products(self, balance: Balance) -> Iterator[tuple[Tensor, FakeQuantize]]:
        """Yield the weights that read a tensor, each with the way it is going to be quantized."""
        for name in balance.weights:
            weight_group, weight = self._weight_group(name), self._found.constant(name)
            quantize = self._weight_quantizer(weight_group)
            if _is_per_channel(self._groups[weight_group]):
                yield from ((rows, quantize) for _, _, rows in in_rows(weight))
            else:
                yield weight, quantize

    def _dropped_none(self, number: int) -> bool:
        return not any(claim in self._dropped for claim in self._groups[number].claims)

    def _repair(self, number: int, balance: Balance) -> None:
        """Decide on the factors that somebody asked for; say where there are none, and why."""
        observer, factors = self._observers[number], None
        if not isinstance(observer, PerChannelRangeObserver):
            reason = "its observer was replaced"
        elif not self._dropped_none(number):
            reason = "one of its readers stays in float"
        else:
            dynamic = getattr(self._groups[number].spec, "is_dynamic", False)
            qparams = None if dynamic else observer.calculate_qparams()
            products, asked = [*self._products(balance)], (_needed(balance), balance.alpha)
            scheme = self._scheme(number)
            factors = input_factors(observer.channels, products, scheme, qparams, *asked)
            reason = (
                f"on calibration data held back no factors make the squared error {_needed(balance)} times "
                "smaller, or there are fewer than 32 rows of it"
            )
        if factors is not None:
            self._take(number, balance, factors)
        else:
            where = _where(self._groups[number], self._nodes)
            self._found.refused.append(f"{_asked(balance)} of {where} was not made: {reason}")

    def _scheme(self, number: int) -> Scheme:
        spec: Any = self._groups[number].spec
        low, high = quantized_range(spec.dtype, spec.quant_min, spec.quant_max)
        eps = eps_of(self._observers[number])

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

    def _weight_quantizer(self, number: int) -> FakeQuantize:
        """Return what a weight of a group is going to be once it is quantized, per row."""
        spec: Any = self._groups[number].spec
        low, high = quantized_range(spec.dtype, spec.quant_min, spec.quant_max)

        def quantize(weight: Tensor) -> Tensor:
            observer: Any = make_observer(spec)
            observer(weight)
            scale, zero_point = (along(v, 0, weight.dim()) for v in observer.calculate_qparams())
            return fake_quantize(weight, scale, zero_point, low, high)

        return quantize

    def _take(self, number: int, balance: Balance, factors: Factors) -> None:
        """Give a group factors, and the parameters behind or before it what evens them out."""
        found, outward = self._found, balance.side == OUTPUT
        vector, dim = (1 / factors.values, 0) if outward else (factors.values, 1)
        absorbed = [(name, (vector, dim)) for name in balance.weights]
        absorbed += [(name, (vector, 0)) for name in balance.biases if name and outward]
        absorbed += [(name, (1 / factors.values, 0)) for name in balance.absorbers]
        for name, factor in absorbed:
            found.taken_up.setdefault(name, []).append(factor)
        found.factors[number] = factors
        found.weights.update((self._weight_group(name), name) for name in balance.weights)

    def _weight_group(self, name: str) -> int:
        return self._group_of_value[self._nodes[name]]


def _needed(balance: Balance) -> float:
    return _FOR_NOTHING if balance.absorbers else _FOR_A_PASS


def _asked(balance: Balance) -> str:
    strength = "" if balance.alpha is None else f" with alpha {balance.alpha:g}"
    return f"{balance.repair}{strength}"


def _parameter(node: Node) -> Tensor:
    constant = constant_of(node)
    assert constant is not None
    return constant


def _is_per_channel(group: Group) -> bool:
    return axis_of(group.spec) == 0


def _where(group: Group, nodes: Mapping[str, Node]) -> str:
    """Name the tensor of a group, and those who read it with their modules."""
    users = ", ".join(describe(nodes[point.user]) for point in group.points if point.user)
    return f"{group.points[0].source}, the input of {users}"


def _tag_factors(node: Node, factors: list[tuple[int, Tensor]]) -> None:
    tag(node, **{FACTORS_TAG: [[dim, vector.tolist()] for dim, vector in factors]})
