# SPDX-License-Identifier: Apache-2.0
"""How outputs are compared: in quantization steps, as a part of the largest value, or in decibels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from qompose import decomposed
from qompose.graph import constant_of
from qompose.numerics import decibels

ONE_STEP = 1.001
"""A step, and what float32 adds to it where integers up to 2**8 are scaled."""

MOST_OFF = 0.25
"""The part of the values that may be a step off: ties and rounding twice move some, truncating half."""

ENOUGH_VALUES = 32
"""Below as many, a few ties decide how many values are off."""


def tensors_of(outputs: Any) -> list[Tensor]:
    """Return the tensors in what a model returned, in order."""
    return [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]


def sqnr(reference: Tensor, actual: Tensor) -> float:
    """Return the signal to quantization noise ratio in decibels, infinite where both are equal."""
    reference, actual = reference.double(), actual.double()
    noise = float((reference - actual).square().sum())
    return decibels(float(reference.square().sum()), noise)


def steps_of(converted: GraphModule) -> list[Tensor | None]:
    """Return one quantization step of each output of a Q/DQ model, None for outputs that are floats.

    Channels may have factors behind the dequantize operator (balancing); then so have their steps.
    """
    (output,) = [node for node in converted.graph.nodes if node.op == "output"]
    values = pytree.tree_leaves(output.args[0])
    return [_step(value) if isinstance(value, Node) else None for value in values]


def _step(node: Node) -> Tensor | None:
    factor = torch.tensor(1.0)
    while node.target is torch.ops.aten.mul.Tensor:
        first, second = node.args
        constant = constant_of(second) if isinstance(second, Node) else None
        if constant is None or not isinstance(first, Node):
            return None
        node, factor = first, factor * constant
    if node.target is not decomposed.dequantize_per_tensor or isinstance(node.args[1], Node):
        return None
    scale: Any = node.args[1]
    return factor * float(scale)


def difference(reference: Tensor, actual: Tensor, step: Tensor | None, part: float) -> str | None:
    """Return how an output differs too much from its reference, None where it does not.

    Args:
        step: one quantization step of the output, by which it may be off; None for floats.
        part: the part of the largest magnitude in `reference` by which floats may be off.
    """
    if reference.shape != actual.shape:
        return f"shape {tuple(actual.shape)}, and the reference has {tuple(reference.shape)}"
    if reference.dtype != actual.dtype:
        return f"{actual.dtype}, and the reference is {reference.dtype}"
    if not reference.numel():
        return None
    reference, actual = reference.double(), actual.double()
    largest = float(reference.abs().max())
    unit = step.double() if step is not None else torch.tensor(max(largest, 1e-30) * part).double()
    off = ((actual - reference) / unit).abs()
    off = torch.where(torch.isfinite(off), off, torch.inf)
    if float(off.max()) <= ONE_STEP:
        return None
    place = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
    where = f"at {list(place)}: {float(actual[place]):.6g} for {float(reference[place]):.6g}"
    wrong = f"{int((off > ONE_STEP).sum())} of {off.numel()} values are off"
    if step is not None:
        return f"{wrong}, by up to {float(off.max()):.4g} steps of the output ({where})"
    return f"{wrong}, by up to {float(off.max()) * part:.3g} of the largest value ({where})"


def first_difference(
    references: Sequence[Tensor],
    actuals: Sequence[Tensor],
    steps: Sequence[Tensor | None],
    part: float,
) -> str | None:
    """Return how the first of several outputs that differs too much does, None where none does."""
    if len(references) != len(actuals):
        return f"{len(actuals)} outputs, and the reference has {len(references)}"
    for number, (reference, actual, step) in enumerate(
        zip(references, actuals, steps, strict=True)
    ):
        found = difference(reference, actual, step, part)
        if found is not None:
            return found if len(references) == 1 else f"output {number}: {found}"
    return None


def rounding_fault(
    references: Sequence[Tensor], actuals: Sequence[Tensor], step: Tensor
) -> str | None:
    """Return how the roundings of one output are wrong in sum, None where they are not.

    Values at the ends of the range are left out: a saturated value hides how it was rounded.

    Args:
        references, actuals: the output for several batches, each value within a step.
    """
    offs = []
    for reference, actual in zip(references, actuals, strict=True):
        inside = (reference > reference.min()) & (reference < reference.max())
        offs.append((((actual - reference) / step).double())[inside].round())
    off = torch.cat(offs)
    if off.numel() < ENOUGH_VALUES:
        return None
    share, bias = float((off != 0).double().mean()), float(off.mean())
    if share <= MOST_OFF:
        return None
    return f"{share:.0%} of {off.numel()} values are off by a step, {bias:+.2f} steps on average"
