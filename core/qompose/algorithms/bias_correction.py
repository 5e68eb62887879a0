# SPDX-License-Identifier: Apache-2.0
"""Bias correction: the mean error of rounded weights taken off the bias.

Rounding a weight by E moves the mean of a product's outputs by `E[E x] = E E[x]`, which the means of the
input's channels tell (Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias
Correction", 2019). Of a convolution that is computed by itself, on an image of means, so that padding,
strides and groups count as they do. The rounding of activations is without bias, and is left alone.

Errors of outputs in the mean add up over layers, and through what takes means of its own, such as pooling;
what is left of errors without it mostly does not.

Means of padding say nothing of words. So the correction is judged on the rows that the observer of the input
keeps (`qompose.algorithms.products`): their error has to become smaller by it, and by the mean of one half of
the examples on the other. Where no rows are kept it is made if a configuration asks for it by word. An input
that is float or dynamic has no such observer: its means are those of the distinct rows of
examples (`qompose.observers.input_sums`), and those of one half have to make the error of the other smaller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from qompose.algorithms.calibrated import Calibrated
from qompose.algorithms.interface import Algorithm, NotChanged, NotKnown
from qompose.algorithms.product_inputs import InputRows, times_smaller
from qompose.algorithms.products import (
    Operands,
    change_products,
    channel_dim,
    channels_of,
    groups_of,
    product_node,
    products_with_weights,
    reader_of,
    rows_read,
    taps_of,
    weight_group,
)
from qompose.observers.input_sums import Columns
from qompose.program.aliasing import written_buffers
from qompose.program.batch_norm_folding import TRANSPOSED
from qompose.program.control_flow import count_readers
from qompose.program.graph import address_of, constant_of, value_of
from qompose.spec.algorithm_choice import BIAS_CORRECTION
from qompose.spec.claim import Claim
from qompose.spec.qdq import integers_of, values_of_integers


class BiasCorrection(Algorithm):
    """Corrects the biases of products whose claims ask for it."""

    word = BIAS_CORRECTION
    needs_data = True

    def watch_means(
        self, claims: Sequence[Claim], nodes: Mapping[str, Node]
    ) -> Iterator[tuple[Node, int, bool]]:
        for claim in filter(_is_observed, filter(self.is_wanted, claims)):
            if (node := product_node(claim, nodes)) is not None:
                operands = Operands.of(node)
                dim = channel_dim(node, operands.weight)
                yield operands.source, dim, self.is_asked(claim)

    def watch_moments(
        self, claims: Sequence[Claim], nodes: Mapping[str, Node]
    ) -> Iterator[tuple[Node, Columns, int]]:
        wanted = (c for c in claims if self.is_wanted(c) and not _is_observed(c))
        for product in products_with_weights(wanted, nodes):
            yield product.source, *channels_of(product)

    def correct(self, found: Calibrated) -> None:
        correction = cache(lambda: _Correction(found))

        def corrected(product: Operands, claim: Claim) -> str:
            name, bias, effect = correction().of(product, observed=_is_observed(claim))
            found.parameters[name] = bias
            return effect

        change_products(found, self, corrected)


def _is_observed(claim: Claim) -> bool:
    """Tell whether the input of a product has an observer of its own, which may keep rows of it."""
    return claim.mode == "static"


class _Correction:
    def __init__(self, found: Calibrated) -> None:
        self._found, self._factors, model = found, found.factors, found.model
        self._readers = count_readers(model)
        self._written = written_buffers(model.graph)

    def of(self, product: Operands, *, observed: bool) -> tuple[str, Tensor, str]:
        """Return the name of a product's bias, the corrected bias, and how much the correction is.

        Raises:
            NotChanged: it stays as it is.
        """
        if product.bias is None:
            raise NotChanged("it has no bias to correct")
        bias, name = constant_of(product.bias), product.bias.name
        if bias is None:
            raise NotChanged(f"its bias {name} is not a parameter")
        own = bool(self._factors.absorbed(name))  # it gets a tensor of its own to take them up
        if not own and self._readers.get(address_of(bias), 0) > 1:
            raise NotChanged(f"{product.bias.target} is also read by other operators")
        if str(product.bias.target) in self._written:
            raise NotChanged(f"the program writes to {product.bias.target}")
        rounding = self._rounding(product)
        if observed:
            mean = self._mean(product)
            unmeasured = self._check_gain(product, rounding, mean)
        else:
            mean, unmeasured = self._mean_of_rows(product, rounding), ""
        moved = _moved(product, rounding, mean)
        value = self._factors.constant(name)
        corrected = (value.double() + moved.to(value.device)).to(value.dtype)
        if isinstance(bias, torch.nn.Parameter) and not own:
            corrected = torch.nn.Parameter(corrected, bias.requires_grad)
        most, usual = float(moved.abs().amax()), float(moved.square().mean().sqrt())
        return (
            name,
            corrected,
            (
                f"corrected the means of its outputs by up to {most:.3g} ({usual:.3g} root mean "
                f"square){unmeasured}"
            ),
        )

    def _mean(self, product: Operands) -> Tensor:
        """Return the means of the input as the weight sees it: with the factors of its channels."""
        observer = self._found.sums.get((product.source, None))
        found: Tensor | str = "not recorded"
        if observer is not None:
            # Another product may read the input too, along another dimension.
            dim, kept = channel_dim(product.node, product.weight), observer.dim
            another = f"of dimension {kept}, its channels are in dimension {dim}"
            found = observer.seen().values() if kept == dim else another
        if isinstance(found, str):
            raise NotKnown(f"the means of its input {product.source.name} are unknown ({found})")
        return self._as_weighted(product, found)

    def _as_weighted(self, product: Operands, mean: Tensor) -> Tensor:
        """Return means of channels, the last dimension, with the factors that the weight took up."""
        for vector, dim in self._factors.absorbed(product.weight.name):
            mean = mean / vector.double().cpu() if dim == 1 else mean
        return mean

    def _mean_of_rows(self, product: Operands, rounding: Tensor) -> Tensor:
        """Return the means of an input that is float or dynamic, over its distinct rows.

        Raises:
            NotChanged: they are not known, or those of each half of the examples are no good for the other.
        """
        observer = self._found.sums.get((product.source, channels_of(product)[0]))
        if observer is None or not bool(observer.count.any()):
            raise NotChanged("its input never saw calibration data")
        if not bool(observer.count.all()):
            raise NotChanged(
                "calibration saw too few distinct examples of its input to hold any out"
            )
        count, sums = observer.count.cpu().double(), observer.total[:, 0, 0].cpu()
        if not bool(sums.isfinite().all()):
            raise NotChanged("its input has non-finite values")
        halves = self._as_weighted(product, sums / count[:, None])
        groups, transposed = groups_of(product.node), product.node.target in TRANSPOSED
        of_row = taps_of(rounding.cpu(), groups, transposed).sum(3)
        moved = torch.einsum("goi,hgi->hgo", of_row, halves.view(2, groups, -1))
        # Of n rows with mean m, weights that are off by e have n (e m)^2 less squared error if the bias takes
        # up e m, and n ((e m)^2 - (e m - e m')^2) less if it takes up e m', by the mean of the other half.
        left, before = (moved - moved.flip(0)).square(), moved.square()
        gained = ((before - left).sum((1, 2)) * count).sum()
        if not gained > 0:
            raise NotChanged("its squared error on held-out calibration data would not decrease")
        return self._as_weighted(product, sums.sum(0) / count.sum())

    def _check_gain(self, product: Operands, rounding: Tensor, mean: Tensor) -> str:
        """Check that a correction makes the error of a product smaller on the rows that are kept.

        Where somebody asked for it by word and that cannot be checked, say why; else return "".

        Raises:
            NotChanged: it does not; or none are kept, and nobody asked for it by word.
        """
        reader = reader_of(self._found, product)
        try:
            rows = rows_read(self._found, product, reader)
        except NotChanged as reason:
            if self._found.sums[product.source, None].asked:
                return f"; whether that reduces the error was not measured: {reason}"
            raise
        gain = _gain(rows, taps_of(rounding, reader.groups, reader.transposed).sum(3), mean)
        if gain <= 1.0:
            raise NotChanged(
                "its squared error on calibration data would not decrease (before/after ratio "
                f"{gain:.2f})"
            )
        return ""

    def _rounding(self, product: Operands) -> Tensor:
        """Return what rounding takes from the weight."""
        number, q = weight_group(self._found, product)
        weight = self._factors.constant(product.weight.name)
        integers = self._found.integers.get(number)
        if integers is None:
            integers = integers_of(weight, q)
        return weight.double() - values_of_integers(integers, q).double()


def _gain(rows: InputRows, rounding: Tensor, mean: Tensor) -> float:
    """Return how many times smaller the error becomes, at least: by a mean, and on rows held back.

    Args:
        rounding: what it takes from the weight, summed over taps, `(groups, outputs, C / groups)`.
        mean: of the input, `(C,)`.

    Raises:
        NotChanged: errors are not finite.
    """
    rounding, rows = rounding.float(), replace(rows, noise=0.0)
    mean = (mean * rows.unit).to(rows.rows).view(len(rows.rows), 1, -1)
    first, second = rows.halves()
    known = rows.shifted(mean).error(rounding)
    held_back = [
        held.shifted(half.mean()).error(rounding)
        for held, half in ((first, second), (second, first))
    ]
    return times_smaller(rows.error(rounding), max(known, sum(held_back)))


def _moved(product: Operands, rounding: Tensor, mean: Tensor) -> Tensor:
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
        raise NotChanged("the size of its input is unknown")
    return int(hint)
