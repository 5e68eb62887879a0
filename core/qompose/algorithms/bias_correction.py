# SPDX-License-Identifier: Apache-2.0
"""Bias correction: the mean error of rounded weights taken off the bias.

Rounding a weight by E moves the mean of a product's outputs by `E[E x] = E E[x]`, which the means of the
input's channels tell (Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias
Correction", 2019). Of a convolution that is computed by itself, on an image of means, so that padding,
strides and groups count as they do. The rounding of activations is without bias, and is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.interface import Algorithm
from qompose.algorithms.products import channel_dim, product_node
from qompose.observers.tensor_statistics import mean_observers
from qompose.program.aliasing import written_buffers
from qompose.program.control_flow import count_readers, graphs_in
from qompose.program.graph import address_of, behind_modules, constant_of, describe, value_of
from qompose.spec.claim import Claim, Point
from qompose.spec.qdq import QParams, integers_of, static_pair
from qompose.spec.quantization_spec import BIAS_CORRECTION


class _NotCorrected(Exception):  # noqa: N818 - a state, not a mistake
    """Raised with the reason why a bias stays as it is."""


class _NotKnown(_NotCorrected):
    """Raised where statistics do not have the means."""


@dataclass(frozen=True)
class _Operands:
    """What a product of a prepared program reads, behind the observers."""

    node: Node
    source: Node
    weight: Node
    bias: Node | None

    @classmethod
    def of(cls, node: Node) -> _Operands:
        bias = node.args[2] if len(node.args) > 2 else None
        return cls(
            node,
            behind_modules(node.args[0]),
            behind_modules(node.args[1]),
            None if bias is None else behind_modules(bias),
        )


class BiasCorrection(Algorithm):
    """Corrects the biases of products whose claims ask for it."""

    word = BIAS_CORRECTION

    def watch_means(
        self, claims: Sequence[Claim], nodes: Mapping[str, Node]
    ) -> Iterator[tuple[Node, int, bool]]:
        for claim in claims:
            node = product_node(claim, nodes) if _wanted(claim) else None
            if node is not None:
                operands = _Operands.of(node)
                dim = channel_dim(node, operands.weight)
                yield operands.source, dim, not claim.repairs_itself

    def correct(self, found: Calibrated) -> None:
        asking = [(n, claim) for n, claim in enumerate(found.plan.claims) if _wanted(claim)]
        if not asking:
            return
        correction, unknown = _Correction(found), list[str]()
        for number, claim in asking:
            node = product_node(claim, found.nodes)
            try:
                if node is None:
                    raise _NotCorrected("it is neither a linear nor a convolution")
                if number in found.dropped:
                    raise _NotCorrected(f"it stays in float, since {found.dropped[number]}")
                name, bias, effect = correction.of(node)
            except _NotCorrected as reason:
                if claim.repairs_itself:
                    unknown += [str(reason)] if isinstance(reason, _NotKnown) else []
                    continue
                where = describe(found.nodes[claim.anchor] if node is None else node)
                found.refused.append(f"{BIAS_CORRECTION} of {where} was not made: {reason}")
            else:
                found.parameters[name] = bias
                found.made.append(f"{BIAS_CORRECTION} of {describe(node)}: {effect}")
        if unknown:
            products = f"{len(unknown)} product{'s' * (len(unknown) > 1)}"
            found.refused.append(f"{BIAS_CORRECTION} of {products} was not made: {unknown[0]}")


def _wanted(claim: Claim) -> bool:
    return claim.repairs_itself or BIAS_CORRECTION in claim.repairs


class _Correction:
    def __init__(self, found: Calibrated) -> None:
        model = found.model
        self._qparams, self._factors = found.qparams, found.factors
        self._means = {v: observer.means().values() for _, v, observer in mean_observers(model)}
        self._readers = count_readers(model)
        self._written = {p for part in graphs_in(model) for p in written_buffers(part.graph)}
        self._groups = found.plan.group_of

    def of(self, node: Node) -> tuple[str, Tensor, str]:
        """Return the name of a product's bias, the corrected bias, and how much the correction is.

        Raises:
            _NotCorrected: it stays as it is.
        """
        product = _Operands.of(node)
        if product.bias is None:
            raise _NotCorrected("it has no bias, and its kernel was chosen without one")
        bias, name = constant_of(product.bias), product.bias.name
        if bias is None:
            raise _NotCorrected(f"{name}, which it adds, is computed")
        own = bool(self._factors.absorbed(name))  # it gets a tensor of its own to take them up
        if not own and self._readers.get(address_of(bias), 0) > 1:
            raise _NotCorrected(f"{product.bias.target} is read by other operators too")
        if str(product.bias.target) in self._written:
            raise _NotCorrected(f"the program writes to {product.bias.target}")
        mean = self._mean(product)
        moved = _moved(product, self._rounding(product), mean)
        value = self._factors.constant(name)
        corrected = (value.double() + moved.to(value.device)).to(value.dtype)
        if isinstance(bias, torch.nn.Parameter) and not own:
            corrected = torch.nn.Parameter(corrected, bias.requires_grad)
        most, usual = float(moved.abs().amax()), float(moved.square().mean().sqrt())
        return (
            name,
            corrected,
            f"the means of its outputs were off by up to {most:.3g}, {usual:.3g} in the root mean square",
        )

    def _mean(self, product: _Operands) -> Tensor:
        """Return the means of the input as the weight sees it: with the factors of its channels."""
        found = self._means.get(product.source, "they were not kept")
        if isinstance(found, str):
            raise _NotKnown(f"of the means of {product.source.name}: {found}")
        for vector, dim in self._factors.absorbed(product.weight.name):
            found = found / vector.double().cpu() if dim == 1 else found
        return found

    def _rounding(self, product: _Operands) -> Tensor:
        """Return what rounding takes from the weight."""
        number = self._groups.get(Point(product.weight.name, product.node.name))
        q = None if number is None else self._qparams.get(number)
        if q is None:
            raise _NotCorrected(f"{product.weight.target} has no integers that are known here")
        weight = self._factors.constant(product.weight.name)
        return weight.double() - _as_rounded(weight, q).double()


def _as_rounded(weight: Tensor, q: QParams) -> Tensor:
    scale, zero_point = q.scale.to(weight.device), q.zero_point.to(weight.device)
    given: tuple[Any, Any] = (
        (float(scale), int(zero_point)) if q.per_tensor else (scale, zero_point)
    )
    pair = static_pair(q, tuple(weight.shape), *given)
    arguments, keywords = pair.to_float(torch.float32)
    rounded: Tensor = pair.dequantize(integers_of(weight, q), *arguments, **keywords)
    return rounded


def _moved(product: _Operands, rounding: Tensor, mean: Tensor) -> Tensor:
    """Return the mean of what a product gives for a weight, by output channel, on an image of means."""
    shape = [_size(size) for size in value_of(product.source).shape]
    dim = channel_dim(product.node, product.weight)
    shape[:dim] = [1] * dim
    image = mean.view(-1, *[1] * (len(shape) - dim - 1)).expand(shape)
    operator: Any = product.node.target
    rest = product.node.args[3:]
    result: Tensor = operator(image, rounding.cpu(), None, *rest, **product.node.kwargs)
    return result.mean([d for d in range(result.dim()) if d != dim])


def _size(size: Any) -> int:
    """Return a size; of one that is open, that of the example."""
    hint = size if isinstance(size, int) else size.node.hint
    if hint is None:
        raise _NotCorrected("the size of its input is open")
    return int(hint)
