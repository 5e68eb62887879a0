# SPDX-License-Identifier: Apache-2.0
"""A kernel for rules that have none yet: the integer arithmetic that other kernels are tested against."""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from qompose.backend import integer_arithmetic
from qompose.backend.integer_arithmetic import Grid, Sum
from qompose.backend.integer_reference import CLAMPS, REFERENCES, Emitter, Site, bounds_of
from qompose.backend.kernel import Kernel, NotLowerable, QuantizedTensor, Region
from qompose.program.graph import arguments_of

aten = torch.ops.aten


def reference(region: Region) -> Node:
    """Emit a region as exact integer sums in aten operators, rescaled in float64 and rounded once.

    An operator without a reference that follows one with, such as gelu behind a linear, computes in float
    on the rescaled sums.

    Raises:
        NotLowerable: an operator that reads the region's inputs has no reference for them, as where weights
            alone are quantized.
    """
    with region.module.graph.inserting_before(region.output_node):
        value = _Computation(region).value()
    return cast(Any, value).node  # type: ignore[no-any-return]


def reference_kernel(*, float_output: bool = False, otherwise: Kernel | None = None) -> Kernel:
    """Return the kernel that computes what the integer reference does, in process: right, and slow.

    It is for rules whose kernel is not written yet, and for the end of a chain.

    Args:
        float_output: for rules whose activations are quantized when the model runs.
        otherwise: what is tried where there is no reference.
    """
    return Kernel("integer reference", reference, float_output, otherwise=otherwise)


INTEGER_REFERENCE: Final = reference_kernel()
"""The kernel of a rule with static activations."""


class _Recording(Emitter):
    """Emits into a region: its nodes are the region's, and equal buffers are stored once."""

    def __init__(self, region: Region) -> None:
        super().__init__(region.module)
        self.region = region

    def create_arg(self, a: Any) -> Any:
        """Make a buffer of a tensor that depends on constants only."""
        if not isinstance(a, Tensor):
            return super().create_arg(a)
        kind = "real" if a.is_floating_point() else "integer"
        return self.region.constant(f"{self.base}_{kind}", a)

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        """Insert a call."""
        node = super().create_node(*args, **kwargs)
        if node not in self.region.inserted:
            self.region.inserted.append(node)
        return node


class _Computation:
    """What the operators of a region give: sums of integers, or floats behind them."""

    def __init__(self, region: Region) -> None:
        self.region, self.emitter = region, _Recording(region)
        self.sums: dict[Node, Sum] = {}
        self.floats: dict[Node, Tensor] = {}

    def value(self) -> Tensor:
        """Return the region's output, integers where its readers want them."""
        for node in self.region.nodes:
            self.emitter.start(node)
            self._compute(node)
        output, node = self.region.output, self.region.output_node
        if output is None:
            return self._float(node)
        if node in self.sums:
            return integer_arithmetic.to_integers(self.sums[node], _grid(output))
        return integer_arithmetic.quantize(self.floats[node], _grid(output))

    def _compute(self, node: Node) -> None:
        """Compute an operator: on integers where it has a reference, else on floats of those before it."""
        first = next(iter(node.all_input_nodes), None)
        arguments = arguments_of(node)
        passes = node.target is aten.dropout.default and not arguments["train"]
        if first in self.sums and passes:
            self.sums[node] = self.sums[first]
        elif first in self.sums and node.target in CLAMPS and not self.sums[first].is_clamped:
            self.sums[node] = integer_arithmetic.clamped(self.sums[first], *bounds_of(node))
        else:
            try:
                if node.target not in REFERENCES:
                    raise NotLowerable(f"{node.target} has no integer reference")
                _, build = REFERENCES[node.target]
                self.sums[node] = build(Site(node, arguments, self.emitter, self.sums))
            except (NotLowerable, OverflowError) as reason:
                if not self._reads_ours(node):
                    raise NotLowerable(str(reason)) from reason
                self.floats[node] = self._in_float(node)

    def _reads_ours(self, node: Node) -> bool:
        return any(source in self.sums or source in self.floats for source in node.all_input_nodes)

    def _in_float(self, node: Node) -> Tensor:
        """Call an operator, in the form that writes to nothing, on floats."""
        args, kwargs = map_arg((node.args, node.kwargs), self._float)
        result: Tensor = _functional(node.target)(*args, **kwargs)
        return result

    def _float(self, node: Node) -> Tensor:
        """Return the float value of a node, once computed."""
        if node not in self.floats:
            made = node in self.sums
            dtype = node.meta["val"].dtype if made else None
            self.floats[node] = (
                integer_arithmetic.to_floats(self.sums[node], dtype)
                if made and dtype is not None
                else self.emitter.proxied(node)
            )
        return self.floats[node]


def _functional(target: Any) -> Any:
    """Return an operator of aten, for an in-place one the one that returns a new tensor."""
    if not target._schema.is_mutable:
        return target
    name, overload = target._schema.name.partition("::")[2], target._overloadname
    packet = getattr(aten, name.removesuffix("_"))
    return getattr(packet, overload)


def _grid(output: QuantizedTensor) -> Grid:
    return Grid(float(output.scale), output.zero_point, output.low, output.high, output.dtype)
