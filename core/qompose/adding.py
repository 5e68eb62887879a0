# SPDX-License-Identifier: Apache-2.0
"""Biases that kernels add as integers: the values that those integers stand for.

A kernel whose products are int32 adds a bias in steps of input scale times weight scale. A simulation that
adds the bias itself is off by up to half such a step in every output, which deep models amplify.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qompose.graph import constant_of
from qompose.nested import nodes_in
from qompose.schemes import QParams

if TYPE_CHECKING:
    from qompose.claims import AddedBias, Point
    from qompose.estimation import Estimation
    from qompose.plan import Plan


def integer_biases(
    model: GraphModule, plan: Plan, estimation: Estimation
) -> Iterator[tuple[Node, Node, Tensor]]:
    """Yield the biases of a converted model that kernels add as integers.

    Returns:
        the node that reads the bias, the operator that adds it, and the values its integers stand for.
    """
    nodes = {node.name: node for node in nodes_in(model)}
    groups = {point: number for number, group in enumerate(plan.groups) for point in group.points}
    for number, claim in enumerate(plan.claims):
        bias = claim.bias
        node = nodes.get(bias.name) if bias is not None else None
        value = constant_of(node) if node is not None else None
        if bias is None or node is None or value is None or number in estimation.dropped:
            continue
        step = _step(bias, groups, estimation.qparams)
        if step is None or step.shape not in ((), value.shape):
            continue
        rounded = (torch.round(value.detach().float() * (1.0 / step)) * step).to(value.dtype)
        for reader in [user for user in node.users if user.name in claim.nodes]:
            yield node, reader, rounded


def _step(
    bias: AddedBias, groups: Mapping[Point, int], qparams: Mapping[int, QParams]
) -> Tensor | None:
    """Return the step, `()` or `(C,)`; None where a scale is not known."""
    found = [qparams.get(groups.get(point, -1)) for point in (bias.input, bias.weight)]
    source, weight = found
    if source is None or weight is None or not source.per_tensor or weight.blocks:
        return None
    return weight.scale.float() * source.scale.float()
