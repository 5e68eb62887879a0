# SPDX-License-Identifier: Apache-2.0
"""Convert: observers become quantize and dequantize operators; parameters become integers.

Every consumer of a quantized tensor reads a dequantize of its own, so that a later partitioner can take
one region without splitting another's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qompose import decomposed
from qompose.balancing import INPUT, OUTPUT
from qompose.estimation import Estimation
from qompose.graph import (
    call,
    constant_of,
    free_attribute,
    read_attribute,
    set_attribute,
    value_of,
)
from qompose.numerics import (
    DEFAULT_EPS,
    PER_CHANNEL,
    SYMMETRIC,
    along,
    quantize_float_zero_point,
    quantized_range,
)
from qompose.plan import Plan


@dataclass(frozen=True)
class Conversion:
    """Claims that were dropped, with the reason; tensors whose channels got factors; both for reports."""

    dropped: dict[int, str]
    balanced: list[str]


def convert_observers(model: GraphModule, plan: Plan, *, allow_uncalibrated: bool) -> Conversion:
    """Replace all observers of a prepared model, in place.

    A claim whose tensor held mask values (infinities, or values near the dtype's largest) is dropped:
    its region stays in float.

    Raises:
        UncalibratedError: an observer saw nothing, and `allow_uncalibrated` is False.
        CalibrationError: a tensor's statistics give no usable scale.
    """
    estimation = Estimation(model, plan)
    estimation.run(allow_uncalibrated=allow_uncalibrated)
    _Converter(model, plan, estimation).replace_all()
    return Conversion(estimation.dropped, estimation.balanced())


@dataclass(frozen=True)
class _Operators:
    """The pair of operators that stands for a group, and what both take behind the tensor."""

    quantize: Callable[..., Any]
    dequantize: Callable[..., Any]
    arguments: tuple[Any, ...]


class _Converter:
    def __init__(self, model: GraphModule, plan: Plan, estimation: Estimation) -> None:
        self.model, self.plan, self.estimation = model, plan, estimation
        self.zeros: dict[int, str] = {}

    def replace_all(self) -> None:
        """Replace every observer node."""
        for node, number in self.estimation.sites:
            value = node.args[0]
            assert isinstance(value, Node)
            spec: Any = self.plan.groups[number].spec
            for user in list(node.users):
                if not self.estimation.reads_quantized(node, user, number):
                    user.replace_input_with(node, value)
            if node.users and getattr(spec, "is_dynamic", False):
                self._dynamic(node, value, number, spec)
            elif node.users:
                self._static(node, value, number, spec)
            self.model.graph.erase_node(node)

    def _static(self, node: Node, value: Node, number: int, spec: Any) -> None:
        balance, factors = self.plan.groups[number].balance, self.estimation.factors.get(number)
        if spec.qscheme in PER_CHANNEL:
            operators = self._per_channel(node, value, number, spec)
        else:
            operators = self._per_tensor(number)
        constant = constant_of(value)
        if constant is not None:
            quantized = self._folded(node, value, constant, operators)
        else:
            if factors is not None and balance is not None and balance.side == INPUT:
                value = self._scaled(value, 1 / factors.values, balance.dim, before=node)
            quantized = self._quantized(node, value, operators)
        rescale = None
        if factors is not None and balance is not None and balance.side == OUTPUT:
            rescale = (factors.values, balance.dim)
        self._dequantize_for_each_user(node, quantized, operators, value, rescale)

    def _per_tensor(self, number: int) -> _Operators:
        q = self.estimation.qparams[number]
        arguments = (float(q.scale), int(q.zero_point), q.low, q.high, q.dtype)
        return _Operators(
            decomposed.quantize_per_tensor, decomposed.dequantize_per_tensor, arguments
        )

    def _per_channel(self, node: Node, value: Node, number: int, spec: Any) -> _Operators:
        q = self.estimation.qparams[number]
        base = str(value.target) if value.op == "get_attr" else value.name
        with self.model.graph.inserting_before(node):
            scale = self._buffer(f"{base}_scale", q.scale, node)
            if spec.qscheme in SYMMETRIC and not bool(q.zero_point.any()):
                zero_point = self._zero(q.scale.numel(), node)
            else:
                zero_point = self._buffer(f"{base}_zero_point", q.zero_point, node)
        arguments = (scale, zero_point, spec.ch_axis, q.low, q.high, q.dtype)
        return _Operators(
            decomposed.quantize_per_channel, decomposed.dequantize_per_channel, arguments
        )

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

    def _quantized(self, node: Node, value: Node, operators: _Operators) -> Node:
        example = value_of(value).to(operators.arguments[-1])
        arguments = (value, *operators.arguments)
        with self.model.graph.inserting_before(node):
            return call(self.model.graph, operators.quantize, arguments, node, example)

    def _folded(self, node: Node, value: Node, constant: Tensor, operators: _Operators) -> Node:
        """Quantize a parameter now. Its name stays its module path, with `_q` behind it."""
        numbers = [constant_of(a) if isinstance(a, Node) else a for a in operators.arguments]
        quantize = operators.quantize
        if isinstance(numbers[1], Tensor) and numbers[1].is_floating_point():
            quantize = quantize_float_zero_point
        with torch.no_grad():
            integers = quantize(constant, *numbers)
        with self.model.graph.inserting_before(node):
            return self._buffer(f"{value.target}_q", integers, node)

    def _scaled(self, value: Node, vector: Tensor, dim: int, *, before: Node) -> Node:
        """Multiply each channel of a float tensor by a number of its own."""
        example = value_of(value)
        vector = along(vector, dim, example.dim()).to(example.dtype)
        with self.model.graph.inserting_before(before):
            factors = self._buffer(f"{_base(value)}_factors", vector, before)
            arguments = (value, factors)
            return call(self.model.graph, torch.ops.aten.mul.Tensor, arguments, before, example)

    def _dynamic(self, node: Node, value: Node, number: int, spec: Any) -> None:
        graph, example = self.model.graph, value_of(value)
        low, high = quantized_range(spec.dtype, spec.quant_min, spec.quant_max)
        symmetric = spec.qscheme in SYMMETRIC
        choose = decomposed.choose_qparams_symmetric if symmetric else decomposed.choose_qparams
        eps = float(getattr(self.estimation.observer(number), "eps", DEFAULT_EPS))
        chosen_example = (
            example.new_empty((1,), dtype=torch.float64),
            example.new_empty((1,), dtype=torch.int64),
        )
        with graph.inserting_before(node):
            chosen = call(graph, choose, (value, low, high, eps, spec.dtype), node, chosen_example)
            scale, zero_point = (
                call(graph, operator.getitem, (chosen, i), node, chosen_example[i]) for i in (0, 1)
            )
        operators = _Operators(
            decomposed.quantize_per_tensor_dynamic,
            decomposed.dequantize_per_tensor_dynamic,
            (scale, zero_point, low, high, spec.dtype),
        )
        quantized = self._quantized(node, value, operators)
        self._dequantize_for_each_user(node, quantized, operators, value, None)

    def _dequantize_for_each_user(
        self,
        node: Node,
        quantized: Node,
        operators: _Operators,
        value: Node,
        rescale: tuple[Tensor, int] | None,
    ) -> None:
        arguments, example = (quantized, *operators.arguments), value_of(value)
        for user in list(node.users):
            with self.model.graph.inserting_before(user):
                read = call(self.model.graph, operators.dequantize, arguments, user, example)
            if example.dtype is not torch.float32:
                read.kwargs = {"out_dtype": example.dtype}
            if rescale is not None:
                read = self._scaled(read, *rescale, before=user)
            user.replace_input_with(node, read)


def _base(node: Node) -> str:
    """Return a name for what belongs to a value, free of the numbers that fx adds."""
    return str(node.target) if node.op == "get_attr" else node.name
