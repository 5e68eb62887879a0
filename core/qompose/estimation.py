# SPDX-License-Identifier: Apache-2.0
"""From what observers saw to quantization parameters: which groups live, and with which numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qompose.balancing import (
    OUTPUT,
    Balance,
    Factors,
    FakeQuantize,
    Scheme,
    balance_input,
    balance_output,
)
from qompose.claims import Point
from qompose.errors import CalibrationError, UncalibratedError
from qompose.graph import constant_of, get_attribute, set_attribute
from qompose.numerics import (
    DEFAULT_EPS,
    PER_CHANNEL,
    along,
    choose_qparams,
    fake_quantize,
    quantized_range,
)
from qompose.observing import OBSERVER_PREFIX, BalancedObserver, make_observer
from qompose.plan import Group, Plan
from qompose.specs import DerivedQuantizationSpec


@dataclass(frozen=True)
class QParams:
    """Scale and zero point of a group, `()` per tensor and `(C,)` per channel, and its integers."""

    scale: Tensor
    zero_point: Tensor
    low: int
    high: int
    dtype: torch.dtype


class Estimation:
    """Reads the observers of a prepared model's copy. Parameters that balancing changes change there.

    Attributes:
        dropped: claims that cannot be followed, with the reason.
        factors: by group, what its channels are divided by before they are quantized.
        qparams: by group that lives and is not dynamic.
        sites: the observer nodes, each with the number of its group.
    """

    def __init__(self, model: GraphModule, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.dropped: dict[int, str] = {}
        self.factors: dict[int, Factors] = {}
        self.qparams: dict[int, QParams] = {}
        self.sites: list[tuple[Node, int]] = [
            (node, int(str(node.target).removeprefix(OBSERVER_PREFIX)))
            for node in model.graph.nodes
            if node.op == "call_module" and str(node.target).startswith(OBSERVER_PREFIX)
        ]
        self._observed = {node: _observed(node) for node, _ in self.sites}
        self._claim_of = {
            spec.point: number for number, claim in enumerate(plan.claims) for spec in claim.specs
        }
        self._group_of = {
            point: number for number, group in enumerate(plan.groups) for point in group.points
        }
        self._group_of_value = {node.args[0]: number for node, number in reversed(self.sites)}
        self._nodes = {node.name: node for node in model.graph.nodes}

    def run(self, *, allow_uncalibrated: bool) -> None:
        """Fill the attributes.

        Raises:
            UncalibratedError: an observer saw nothing, and `allow_uncalibrated` is False.
            CalibrationError: a tensor's statistics give no usable scale.
        """
        self._observe_constants(range(len(self.plan.groups)))
        self._drop_masked()
        self._check_calibrated(allow_uncalibrated)
        for number, group in enumerate(self.plan.groups):
            if group.balance is not None and self.alive(number):
                self._balance(number, group.balance)
        for number, group in enumerate(self.plan.groups):
            if self._needs_data(number):
                self.qparams[number] = self._calculate(number, group)

    def alive(self, number: int) -> bool:
        """Tell whether any claim still wants a group."""
        return any(claim not in self.dropped for claim in self.plan.groups[number].claims)

    def _needs_data(self, number: int) -> bool:
        """Tell whether a group's parameters come from data: those of dynamic ones do not."""
        dynamic = getattr(self.plan.groups[number].spec, "is_dynamic", False)
        return self.alive(number) and not dynamic

    def reads_quantized(self, node: Node, user: Node, number: int) -> bool:
        """Tell whether a reader of an observer node wants integers: not if its claim was dropped."""
        value = self._observed[node]
        return any(
            self._group_of.get(point) == number and self._claim_of[point] not in self.dropped
            for point in (Point(value), Point(value, user.name))
        )

    def observer(self, number: int) -> Any:
        """Return the observer of a group."""
        return get_attribute(self.model, f"{OBSERVER_PREFIX}{number}")

    def describe(self, number: int) -> str:
        """Name a group's first tensor with its module and who wants it, for messages."""
        group = self.plan.groups[number]
        claim = self.plan.claims[group.claims[0]]
        where = next((o.module for o in self.plan.operators if o.name == claim.anchor), "")
        place = f"{group.points[0]}{f' in {where}' if where else ''}"
        return f"{place} ({claim.owner}, rule {claim.rule})"

    def _observe_constants(self, numbers: Any) -> None:
        """Let observers of parameters see them: those need no calibration data."""
        wanted = set(numbers)
        with torch.no_grad():
            for node, number in self.sites:
                value = node.args[0]
                constant = constant_of(value) if isinstance(value, Node) else None
                if constant is not None and number in wanted:
                    self.observer(number)(constant)

    def _drop_masked(self) -> None:
        for number, group in enumerate(self.plan.groups):
            masked = int(getattr(self.observer(number), "masked", 0))
            if masked:
                reason = (
                    f"{group.points[0]} holds {masked} mask values "
                    "(infinite, or near the largest float)"
                )
                self.dropped.update(dict.fromkeys(group.claims, reason))

    def _check_calibrated(self, allow_uncalibrated: bool) -> None:
        missing = [
            number
            for number in range(len(self.plan.groups))
            if self._needs_data(number) and not _has_data(self.observer(number))
        ]
        if missing and not allow_uncalibrated:
            raise UncalibratedError([self.describe(number) for number in missing])
        for number in missing:
            group = self.plan.groups[number]
            reason = f"{group.points[0]} never saw calibration data"
            self.dropped.update(dict.fromkeys(group.claims, reason))

    def _calculate(self, number: int, group: Group) -> QParams:
        spec: Any = group.spec
        low, high = quantized_range(spec.dtype, spec.quant_min, spec.quant_max)
        if number in self.factors:
            scale, zero_point = self.factors[number].scale, self.factors[number].zero_point
        elif isinstance(spec, DerivedQuantizationSpec):
            sources: list[nn.Module] = [self.observer(n) for n in group.depends_on]
            scale, zero_point = spec.derive_qparams_fn(sources)
        else:
            scale, zero_point = self.observer(number).calculate_qparams()
        if not bool(torch.isfinite(scale).all()):
            raise CalibrationError(f"{self.describe(number)} has the scale {scale}")
        return QParams(scale.detach(), zero_point.detach(), low, high, spec.dtype)

    def _balance(self, number: int, balance: Balance) -> None:
        """Decide on a group's factors and move them into the parameters behind or before it."""
        group, observer = self.plan.groups[number], self.observer(number)
        groups = [self._weight_group(name) for name in balance.weights]
        per_channel = all(_is_per_channel(self.plan.groups[n]) for n in groups)
        whole = not any(claim in self.dropped for claim in group.claims)
        if not isinstance(observer, BalancedObserver) or not per_channel or not whole:
            return  # a replaced observer; a weight that cannot take up factors; a reader left in float
        channels = observer.channels
        scheme = self._scheme(number)
        weights = [self._constant(name) for name in balance.weights]
        if balance.side == OUTPUT:
            factors = balance_output(channels, scheme, observer.calculate_qparams())
        elif any(weight.shape[1] != channels.low.numel() for weight in weights):
            return  # a grouped convolution
        else:
            quantizers = [self._weight_quantizer(n) for n in groups]
            products = list(zip(weights, quantizers, strict=True))
            factors = balance_input(channels, products, scheme, observer.calculate_qparams())
        if factors is not None:
            self.factors[number] = factors
            self._absorb(balance, factors, groups)

    def _scheme(self, number: int) -> Scheme:
        spec: Any = self.plan.groups[number].spec
        low, high = quantized_range(spec.dtype, spec.quant_min, spec.quant_max)
        eps = getattr(self.observer(number).tensor_observer, "eps", DEFAULT_EPS)

        def choose(minimum: Tensor, maximum: Tensor) -> tuple[Tensor, Tensor]:
            return choose_qparams(
                minimum,
                maximum,
                dtype=spec.dtype,
                quant_min=spec.quant_min,
                quant_max=spec.quant_max,
                qscheme=spec.qscheme,
                eps=eps,
            )

        return Scheme(low, high, choose)

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

    def _absorb(self, balance: Balance, factors: Factors, weight_groups: list[int]) -> None:
        for name in balance.weights:
            weight = self._constant(name)
            vector = 1 / factors.values if balance.side == OUTPUT else factors.values
            dim = 0 if balance.side == OUTPUT else 1
            self._store(name, weight * along(vector, dim, weight.dim()))
        if balance.side == OUTPUT:
            for name in filter(None, balance.biases):
                self._store(name, self._constant(name) / factors.values)
        for number in weight_groups:  # they saw the weight before
            fresh = make_observer(self.plan.groups[number].spec)
            set_attribute(self.model, f"{OBSERVER_PREFIX}{number}", fresh)
        self._observe_constants(weight_groups)

    def _constant(self, name: str) -> Tensor:
        constant = constant_of(self._nodes[name])
        assert constant is not None
        return constant.detach()

    def _store(self, name: str, value: Tensor) -> None:
        set_attribute(self.model, str(self._nodes[name].target), value)

    def _weight_group(self, name: str) -> int:
        return self._group_of_value[self._nodes[name]]

    def balanced(self) -> list[str]:
        """Describe the tensors whose channels got factors."""
        return [
            f"channels of {self.plan.groups[number].points[0]} were balanced: "
            f"squared error on calibration data {factors.gain:.1f} times smaller"
            for number, factors in self.factors.items()
        ]


def _has_data(observer: Any) -> bool:
    """Tell whether an observer saw anything; those of torch keep empty or infinite bounds until then."""
    bound = getattr(observer, "min_val", None)
    if hasattr(observer, "calibrated") or not isinstance(bound, Tensor):
        return bool(getattr(observer, "calibrated", True))
    return bound.numel() > 0 and bool(torch.isfinite(bound).all())


def _is_per_channel(group: Group) -> bool:
    return getattr(group.spec, "qscheme", None) in PER_CHANNEL


def _observed(node: Node) -> str:
    """Return the name of the value that an observer node sees, behind other observers."""
    while node.op == "call_module":
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node.name
