# SPDX-License-Identifier: Apache-2.0
"""Biases rounded to the int32 grid that integer kernels add.

A kernel whose products are int32 adds a bias in steps of input scale times weight scale. A simulation that
adds the bias itself is off by up to half such a step in every output, which deep models amplify.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from torch.fx import Node

from qompose.plan.plan import Plan
from qompose.program.graph import constant_of
from qompose.spec.claim import AddedBias, Point
from qompose.spec.qdq import QParams

LARGEST_BIAS: Final = 2**29
"""In steps. Products are added to it in the same 32 bits, and channel scaling may multiply it later."""


def rounded_biases(
    plan: Plan,
    nodes: Mapping[str, Node],
    qparams: Mapping[int, QParams],
    dropped: Collection[int],
    changed: Mapping[str, Tensor],
) -> dict[int, Tensor]:
    """Return, by claim, the bias that its kernel adds as integers: the values these stand for.

    Args:
        qparams: by group.
        dropped: claims that conversion gives up.
        changed: the parameters that algorithms give other values, by name.
    """
    return {
        number: (torch.round(value.float() * (1.0 / step)) * step).to(value.dtype)
        for number, _, value, step in _added(plan, nodes, qparams, dropped, changed)
    }


def widen_scales_for_int32(
    plan: Plan,
    nodes: Mapping[str, Node],
    qparams: MutableMapping[int, QParams],
    dropped: Collection[int],
    zeros: Collection[int] = (),
) -> dict[int, float]:
    """Widen the scales of weights, in place, until the biases behind them fit into 32 bits.

    Where inputs are tiny and a bias is not, its integer overflows: the kernel would add something else. A
    wider step of the weight costs nothing that the output shows, whose own step such a bias makes far larger.
    It does cost the other readers of the weight, as the steps of a recurrent layer are of which the first
    reads a state of zeros. Any scale has a zero, so there the input's is widened instead.

    Args:
        zeros: groups of activations that calibration never saw anything but zero of.

    Returns:
        by group, how many times larger its scale has become, at most.
    """
    widened: dict[int, float] = {}
    groups = plan.group_of
    for _, bias, value, step in _added(plan, nodes, qparams, dropped, {}):
        read, number = groups[bias.input], groups[bias.weight]
        source, weight = qparams[read], qparams[number]
        least = value.abs().double() / LARGEST_BIAS
        if read in zeros:
            scale = (least / weight.scale.double()).amax().to(source.scale.dtype)
            qparams[read] = replace(source, scale=torch.maximum(source.scale, scale))
            continue
        least = (least if step.shape else least.amax()) / source.scale.double()
        factor = float((least / weight.scale.double()).max())
        if factor > 1 and not weight.zero_point.any():
            scale = torch.maximum(weight.scale, least.to(weight.scale.dtype))
            qparams[number] = replace(weight, scale=scale)
            widened[number] = factor
    return widened


def _added(
    plan: Plan,
    nodes: Mapping[str, Node],
    qparams: Mapping[int, QParams],
    dropped: Collection[int],
    changed: Mapping[str, Tensor],
) -> Iterator[tuple[int, AddedBias, Tensor, Tensor]]:
    """Yield (number of a claim, its bias, the values of that, their step) where the step is known."""
    groups = plan.group_of
    for number, claim in enumerate(plan.claims):
        bias = claim.bias
        node = nodes.get(bias.name) if bias is not None else None
        value = constant_of(node) if node is not None else None
        if bias is None or value is None or number in dropped:
            continue
        value = changed.get(bias.name, value).detach()
        step = _step(bias, groups, qparams)
        if step is not None and step.shape in ((), value.shape):
            yield number, bias, value, step


def _step(
    bias: AddedBias, groups: Mapping[Point, int], qparams: Mapping[int, QParams]
) -> Tensor | None:
    """Return the step, `()` or `(C,)`; None where a scale is not known."""
    source, weight = (qparams.get(groups.get(point, -1)) for point in (bias.input, bias.weight))
    if source is None or weight is None or not source.per_tensor or weight.blocks:
        return None
    return weight.scale.float() * source.scale.float()
