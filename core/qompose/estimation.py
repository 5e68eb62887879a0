# SPDX-License-Identifier: Apache-2.0
"""From what observers saw to quantization parameters: which groups live, and with which numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from qompose.balancing import (
    OUTPUT,
    Balance,
    Factors,
    FakeQuantize,
    Scheme,
    balance_input,
    balance_output,
)
from qompose.bounds import Bounds
from qompose.claims import Point
from qompose.errors import CalibrationError, UncalibratedError, blaming
from qompose.graph import constant_of, get_attribute, module_path, owner_of, set_attribute, value_of
from qompose.nested import bodies_of, body_labels, is_nested_call, nodes_in
from qompose.numerics import (
    DEFAULT_EPS,
    along,
    choose_qparams,
    fake_quantize,
    quantized_range,
)
from qompose.observing import (
    OBSERVER_PREFIX,
    BalancedObserver,
    ScreenedObserver,
    least_scale,
    make_observer,
)
from qompose.plan import Group, Plan
from qompose.running import RAN_KEY, RUNNERS
from qompose.schemes import Absorbed, QParams, axis_of, in_rows
from qompose.screening import Screen
from qompose.soundness import suspicious, unusable


class Estimation:
    """Reads the observers of a prepared model, and leaves it as it is until `store_constants`.

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
            for node in nodes_in(model)
            if node.op == "call_module" and str(node.target).startswith(OBSERVER_PREFIX)
        ]
        self._observers: dict[int, Any] = {
            number: get_attribute(owner_of(node), str(node.target)) for node, number in self.sites
        }
        self._balanced_weights: dict[int, str] = {}  # by group
        self._absorbed: dict[str, list[tuple[Tensor, int]]] = defaultdict(list)
        self._observed = {node: _observed(node) for node, _ in self.sites}
        self._claim_of = {
            spec.point: number for number, claim in enumerate(plan.claims) for spec in claim.specs
        }
        self._group_of = {
            point: number for number, group in enumerate(plan.groups) for point in group.points
        }
        self._group_of_value = {node.args[0]: number for node, number in reversed(self.sites)}
        self._nodes = {node.name: node for node in nodes_in(model)}

    def run(self, *, allow_uncalibrated: bool) -> None:
        """Fill the attributes.

        Raises:
            UncalibratedError: an observer saw nothing, and `allow_uncalibrated` is False.
            CalibrationError: a tensor's statistics give no usable scale.
        """
        self._observe_constants()
        self._drop_masked()
        self._check_calibrated(allow_uncalibrated)
        self._estimate()
        while self._drop_out_of_bounds():  # others may have been balanced with what is dropped now
            self._estimate()

    def _estimate(self) -> None:
        """Balance and compute parameters, of what is not dropped."""
        self._drop_underived()
        for computed in (self.factors, self.qparams, self._balanced_weights, self._absorbed):
            computed.clear()
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
        """Tell whether a group's parameters come from data: not if it is dynamic, or only a cast."""
        spec: Any = self.plan.groups[number].spec
        cast = spec.dtype.is_floating_point
        return self.alive(number) and not cast and not getattr(spec, "is_dynamic", False)

    def reads_quantized(self, node: Node, user: Node, number: int) -> bool:
        """Tell whether a reader of an observer node wants integers: not if its claim was dropped."""
        value = self._observed[node]
        return any(
            self._group_of.get(point) == number and self._claim_of[point] not in self.dropped
            for point in (Point(value), Point(value, user.name))
        )

    def observer(self, number: int) -> Any:
        """Return the observer of a group."""
        return self._observers[number]

    def describe(self, number: int) -> str:
        """Name a group's first tensor with its module and who wants it, for messages."""
        observer = self.observer(number)
        observer = getattr(observer, "tensor_observer", observer)
        return str(observer.subject)

    def _observe_constants(self) -> None:
        """Let observers of parameters see them: those need no calibration data."""
        with torch.no_grad():
            for node, number in self.sites:
                value = node.args[0]
                constant = constant_of(value) if isinstance(value, Node) else None
                if constant is not None:
                    self.observer(number)(constant)

    def _drop_masked(self) -> None:
        for number, group in enumerate(self.plan.groups):
            screen = self._screen(number)
            if screen is not None and screen.mask:
                reason = f"{group.points[0]} holds {screen.mask}"
                self.dropped.update(dict.fromkeys(group.claims, reason))

    def _screen(self, number: int) -> Screen | None:
        return getattr(self.observer(number), "screen", None)

    def _check_calibrated(self, allow_uncalibrated: bool) -> None:
        missing = [
            number
            for number in range(len(self.plan.groups))
            if self._needs_data(number) and not _has_data(self.observer(number))
        ]
        idle = self._idle_points(missing)
        if (missing or idle) and not allow_uncalibrated:
            raise UncalibratedError([*map(self.describe, missing), *idle.values()])
        for number in missing:
            group = self.plan.groups[number]
            reason = f"{group.points[0]} never saw calibration data"
            self.dropped.update(dict.fromkeys(group.claims, reason))
        for point in idle:
            reason = f"{point} never saw calibration data"
            self.dropped.setdefault(self._claim_of[point], reason)

    def _idle_points(self, missing: list[int]) -> dict[Point, str]:
        """Name the tensors in bodies that never ran, whose groups have data from elsewhere only."""
        graphs, labels = set(_never_run(self.model)), body_labels(self.model)
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

    def _drop_underived(self) -> None:
        """Drop the claims whose parameters would be derived from tensors that stay in float."""
        for group in self.plan.groups:
            for source in group.depends_on:
                if not self.alive(source):
                    reason = f"{self.plan.groups[source].points[0]} stays in float"
                    self.dropped.update(dict.fromkeys(group.claims, reason))

    def _drop_out_of_bounds(self) -> bool:
        """Drop the claims whose kernels do not take a tensor's parameters; tell whether there are any."""
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
        if q := self.qparams.get(number):
            return bounds.objections(q.scale, q.zero_point)
        least = None if spec.dtype.is_floating_point else least_scale(spec, self.observer(number))
        return [] if least is None else bounds.lowest.objections(least, 0)

    def _calculate(self, number: int, group: Group) -> QParams:
        spec: Any = group.spec
        low, high = quantized_range(spec.dtype, spec.quant_min, spec.quant_max)
        if number in self.factors:
            scale, zero_point = self.factors[number].scale, self.factors[number].zero_point
        elif number in self._balanced_weights:
            scale, zero_point = self._rows_qparams(number)
        else:
            with blaming(f"calculate_qparams of the observer of {self.describe(number)}"):
                scale, zero_point = map(torch.as_tensor, self.observer(number).calculate_qparams())
        scale, zero_point = scale.detach(), zero_point.detach()
        blocks = getattr(spec, "block_size", None) is not None
        q = QParams(scale, zero_point, low, high, spec.dtype, axis_of(spec), blocks)
        for problem in unusable(q, tuple(value_of(self._value(number)).shape)):
            raise CalibrationError(f"{self.describe(number)} {problem}; its observer gave that")
        return q

    def _value(self, number: int) -> Node:
        return self._nodes[self.plan.groups[number].points[0].source]

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
        weights = [self.constant(name) for name in balance.weights]
        if balance.side == OUTPUT:
            factors = balance_output(channels, scheme, observer.calculate_qparams())
        elif any(weight.shape[1] != channels.low.numel() for weight in weights):
            return  # a grouped convolution
        else:
            quantizers = [self._weight_quantizer(n) for n in groups]
            products = [
                (rows, quantize)
                for weight, quantize in zip(weights, quantizers, strict=True)
                for _, _, rows in in_rows(weight)
            ]
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
        outward = balance.side == OUTPUT
        vector, dim = (1 / factors.values, 0) if outward else (factors.values, 1)
        for name in balance.weights:
            self._absorbed[name].append((vector, dim))
        for name in filter(None, balance.biases if outward else ()):
            self._absorbed[name].append((vector, 0))
        self._balanced_weights.update(zip(weight_groups, balance.weights, strict=True))

    def _rows_qparams(self, number: int) -> tuple[Tensor, Tensor]:
        """Compute the parameters of a weight that took up factors: its observer saw it without them."""
        name = self._balanced_weights[number]
        constant = constant_of(self._nodes[name])
        assert constant is not None
        found = []
        for _, _, rows in in_rows(constant, self.absorbed(name)):
            observer: Any = make_observer(self.plan.groups[number].spec)
            observer(rows)
            found.append(observer.calculate_qparams())
        scales, zero_points = zip(*found, strict=True)
        return torch.cat(scales), torch.cat(zero_points)

    def absorbed(self, name: str) -> Absorbed:
        """Return the factors that a parameter took up; the model still holds it without them."""
        return self._absorbed.get(name, ())

    def constant(self, name: str) -> Tensor:
        """Return a parameter with the factors that it took up.

        It is computed anew each time, so that no second copy of all parameters is ever held.
        """
        constant = constant_of(self._nodes[name])
        assert constant is not None
        absorbed = self.absorbed(name)
        if not absorbed:
            return constant.detach()
        return torch.cat([rows for _, _, rows in in_rows(constant, absorbed)])

    def store_constants(self, names: Iterable[str]) -> None:
        """Write parameters that took up factors into the model, in place, where they are among `names`."""
        for name in names:
            if name in self._absorbed:
                node = self._nodes[name]
                set_attribute(owner_of(node), str(node.target), self.constant(name))
                del self._absorbed[name]

    def _weight_group(self, name: str) -> int:
        return self._group_of_value[self._nodes[name]]

    def findings(self) -> list[str]:
        """Describe the tensors whose statistics look wrong, though parameters can be computed of them."""
        parameters = {name for name, node in self._nodes.items() if constant_of(node) is not None}
        activations = {
            number: float(q.scale)
            for number, q in self.qparams.items()
            if q.per_tensor and self.plan.groups[number].points[0].source not in parameters
        }
        typical = median(activations.values()) if activations else 0.0
        found = []
        for number, scale in activations.items():
            screen, eps = self._screen(number), getattr(self.observer(number), "eps", 0.0)
            for problem in suspicious(scale, typical, screen, eps):
                found.append(f"{self.describe(number)} {problem}")
        return found

    def balanced(self) -> list[str]:
        """Describe the tensors whose channels got factors."""
        return [
            f"channels of {self.plan.groups[number].points[0]} were balanced: "
            f"squared error on calibration data {factors.gain:.1f} times smaller"
            for number, factors in self.factors.items()
        ]


def _never_run(part: GraphModule, ran: bool = True) -> Iterator[Graph]:
    """Yield the bodies that calibration never came to, with those inside them."""
    if not ran:
        yield part.graph
    for call in filter(is_nested_call, part.graph.nodes):
        noted = call.target in RUNNERS.values()
        for body in bodies_of(call):
            yield from _never_run(body, ran and (RAN_KEY in body.meta or not noted))


def _has_data(observer: Any) -> bool:
    """Tell whether an observer saw anything; those of torch keep empty or infinite bounds until then."""
    if isinstance(observer, ScreenedObserver):
        observer = observer.observer
    bound = getattr(observer, "min_val", None)
    if hasattr(observer, "calibrated") or not isinstance(bound, Tensor):
        return bool(getattr(observer, "calibrated", True))
    return bound.numel() > 0 and bool(torch.isfinite(bound).all())


def _is_per_channel(group: Group) -> bool:
    return axis_of(group.spec) == 0


def _observed(node: Node) -> str:
    """Return the name of the value that an observer node sees, behind other observers."""
    while node.op == "call_module":
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node.name
