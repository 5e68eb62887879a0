# SPDX-License-Identifier: Apache-2.0
"""Convert: observers become quantize and dequantize operators; parameters become integers.

Every consumer of a quantized tensor reads a dequantize of its own, so that a later partitioner can take
one region without splitting another's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qompose import decomposed
from qompose.errors import CalibrationError, UncalibratedError
from qompose.graph import (
    call,
    constant_of,
    free_attribute,
    get_attribute,
    read_attribute,
    set_attribute,
    value_of,
)
from qompose.numerics import PER_CHANNEL, SYMMETRIC, quantized_range
from qompose.plan import Group, Plan
from qompose.preparation import OBSERVER_PREFIX
from qompose.specs import DerivedQuantizationSpec


@dataclass
class Conversion:
    """What became of the groups: claims that had to be dropped, and why."""

    dropped: dict[int, str] = field(default_factory=dict)


def convert_observers(model: GraphModule, plan: Plan, *, allow_uncalibrated: bool) -> Conversion:
    """Replace all observers of a prepared model, in place.

    A claim whose tensor held mask values (infinities, or values near the dtype's largest) is dropped:
    its region stays in float.

    Raises:
        UncalibratedError: an observer saw nothing, and `allow_uncalibrated` is False.
        CalibrationError: a tensor's statistics give no usable scale.

    """
    converter = _Converter(model, plan)
    converter.observe_constants()
    converter.drop_masked()
    converter.check_calibrated(allow_uncalibrated)
    converter.compute_qparams()
    converter.replace_all()
    return Conversion(converter.dropped)


@dataclass(frozen=True)
class _QParams:
    scale: Tensor
    zero_point: Tensor
    low: int
    high: int
    dtype: torch.dtype


class _Converter:
    def __init__(self, model: GraphModule, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.dropped: dict[int, str] = {}
        self.qparams: dict[int, _QParams] = {}
        self.zeros: dict[int, str] = {}
        self.sites: list[tuple[Node, int]] = [
            (node, int(str(node.target).removeprefix(OBSERVER_PREFIX)))
            for node in model.graph.nodes
            if node.op == "call_module" and str(node.target).startswith(OBSERVER_PREFIX)
        ]

    def observer(self, number: int) -> nn.Module:
        module = get_attribute(self.model, f"{OBSERVER_PREFIX}{number}")
        assert isinstance(module, nn.Module)
        return module

    def alive(self, number: int) -> bool:
        """Tell whether any claim still wants a group."""
        return any(claim not in self.dropped for claim in self.plan.groups[number].claims)

    def observe_constants(self) -> None:
        """Let observers of parameters see them: those need no calibration data."""
        with torch.no_grad():
            for node, number in self.sites:
                constant = constant_of(node.args[0])  # type: ignore[arg-type]
                if constant is not None:
                    self.observer(number)(constant)

    def drop_masked(self) -> None:
        for number, group in enumerate(self.plan.groups):
            masked = int(getattr(self.observer(number), "masked", 0))
            if masked:
                reason = f"{group.points[0]} holds {masked} mask values (infinite, or near the largest float)"
                self.dropped.update(dict.fromkeys(group.claims, reason))

    def check_calibrated(self, allow_uncalibrated: bool) -> None:
        missing = [
            n
            for n in range(len(self.plan.groups))
            if self.alive(n) and not getattr(self.observer(n), "calibrated", True)
        ]
        if missing and not allow_uncalibrated:
            raise UncalibratedError([self._describe(self.plan.groups[n]) for n in missing])
        for number in missing:
            reason = f"{self.plan.groups[number].points[0]} never saw calibration data"
            self.dropped.update(dict.fromkeys(self.plan.groups[number].claims, reason))

    def _describe(self, group: Group) -> str:
        claim = self.plan.claims[group.claims[0]]
        where = next((o.module for o in self.plan.operators if o.name == claim.anchor), "")
        return (
            f"{group.points[0]}{f' in {where}' if where else ''} ({claim.owner}, rule {claim.rule})"
        )

    def compute_qparams(self) -> None:
        for number, group in enumerate(self.plan.groups):
            if not self.alive(number) or getattr(group.spec, "is_dynamic", False):
                continue
            scale, zero_point = self._calculate(number, group)
            if not bool(torch.isfinite(scale).all()):
                raise CalibrationError(f"{self._describe(group)} has the scale {scale}")
            self.qparams[number] = self._with_bounds(group, scale, zero_point)

    def _calculate(self, number: int, group: Group) -> tuple[Tensor, Tensor]:
        if isinstance(group.spec, DerivedQuantizationSpec):
            sources = [self.observer(n) for n in group.depends_on]
            scale, zero_point = group.spec.derive_qparams_fn(sources)
        else:
            scale, zero_point = self.observer(number).calculate_qparams()  # type: ignore[operator]
        return scale.detach(), zero_point.detach()

    def _with_bounds(self, group: Group, scale: Tensor, zero_point: Tensor) -> _QParams:
        spec: Any = group.spec
        low, high = quantized_range(spec.dtype, spec.quant_min, spec.quant_max)
        return _QParams(scale, zero_point, low, high, spec.dtype)

    def replace_all(self) -> None:
        for node, number in self.sites:
            value = node.args[0]
            assert isinstance(value, Node)
            spec: Any = self.plan.groups[number].spec
            if not self.alive(number):
                node.replace_all_uses_with(value)
            elif getattr(spec, "is_dynamic", False):
                self._dynamic(node, value, spec)
            elif spec.qscheme in PER_CHANNEL:
                self._static(node, value, self._per_channel(node, value, number, spec.ch_axis))
            else:
                self._static(node, value, self._per_tensor(number))
            self.model.graph.erase_node(node)

    def _per_tensor(
        self, number: int
    ) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]:
        q = self.qparams[number]
        arguments = (float(q.scale), int(q.zero_point), q.low, q.high, q.dtype)
        return decomposed.quantize_per_tensor, decomposed.dequantize_per_tensor, arguments

    def _per_channel(
        self, node: Node, value: Node, number: int, axis: int
    ) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]:
        q = self.qparams[number]
        base = str(value.target) if value.op == "get_attr" else value.name
        with self.model.graph.inserting_before(node):
            scale = self._buffer(f"{base}_scale", q.scale, node)
            symmetric = self.plan.groups[number].spec.qscheme in SYMMETRIC  # type: ignore[attr-defined]
            if symmetric and not bool(q.zero_point.any()):
                zero_point = self._zero(q.scale.numel(), node)
            else:
                zero_point = self._buffer(f"{base}_zero_point", q.zero_point, node)
        arguments = (scale, zero_point, axis, q.low, q.high, q.dtype)
        return decomposed.quantize_per_channel, decomposed.dequantize_per_channel, arguments

    def _zero(self, length: int, like: Node) -> Node:
        """Read the one zero tensor of a length: symmetric weights need one, and it is always the same."""
        if length not in self.zeros:
            self.zeros[length] = free_attribute(self.model, f"zero_point_{length}")
            set_attribute(self.model, self.zeros[length], torch.zeros(length, dtype=torch.int64))
        return read_attribute(self.model, self.zeros[length], like)

    def _buffer(self, path: str, value: Tensor, like: Node) -> Node:
        target = free_attribute(self.model, path)
        set_attribute(self.model, target, value)
        return read_attribute(self.model, target, like)

    def _static(
        self,
        node: Node,
        value: Node,
        operators: tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]],
    ) -> None:
        quantize, dequantize, arguments = operators
        constant = constant_of(value)
        if constant is None:
            with self.model.graph.inserting_before(node):
                quantized = call(
                    self.model.graph,
                    quantize,
                    (value, *arguments),
                    node,
                    value_of(value).to(arguments[-1]),
                )
        else:
            quantized = self._folded(node, value, constant, quantize, arguments)
        self._dequantize_for_each_user(node, quantized, dequantize, arguments, value)

    def _folded(
        self,
        node: Node,
        value: Node,
        constant: Tensor,
        quantize: Callable[..., Any],
        arguments: tuple[Any, ...],
    ) -> Node:
        """Quantize a parameter now. Its name stays its module path, with `_q` behind it."""
        numbers = tuple(constant_of(a) if isinstance(a, Node) else a for a in arguments)
        with torch.no_grad():
            integers = quantize(constant, *numbers)
        with self.model.graph.inserting_before(node):
            return self._buffer(f"{value.target}_q", integers, node)

    def _dynamic(self, node: Node, value: Node, spec: Any) -> None:
        graph = self.model.graph
        low, high = quantized_range(spec.dtype, spec.quant_min, spec.quant_max)
        symmetric = spec.qscheme in SYMMETRIC
        choose = decomposed.choose_qparams_symmetric if symmetric else decomposed.choose_qparams
        eps = float(getattr(spec.observer_or_fake_quant_ctr, "eps", torch.finfo(torch.float32).eps))
        with graph.inserting_before(node):
            example = value_of(value)
            chosen = call(
                graph,
                choose,
                (value, low, high, eps, spec.dtype),
                node,
                (
                    example.new_empty((1,), dtype=torch.float64),
                    example.new_empty((1,), dtype=torch.int64),
                ),
            )
            scale, zero_point = (
                call(graph, operator.getitem, (chosen, i), node, chosen.meta["val"][i])
                for i in (0, 1)
            )
            arguments = (scale, zero_point, low, high, spec.dtype)
            quantized = call(
                graph,
                decomposed.quantize_per_tensor_dynamic,
                (value, *arguments),
                node,
                example.to(spec.dtype),
            )
        self._dequantize_for_each_user(
            node, quantized, decomposed.dequantize_per_tensor_dynamic, arguments, value
        )

    def _dequantize_for_each_user(
        self,
        node: Node,
        quantized: Node,
        dequantize: Callable[..., Any],
        arguments: tuple[Any, ...],
        value: Node,
    ) -> None:
        for user in list(node.users):
            with self.model.graph.inserting_before(user):
                read = call(
                    self.model.graph, dequantize, (quantized, *arguments), user, value_of(value)
                )
            user.replace_input_with(node, read)
