# SPDX-License-Identifier: Apache-2.0
"""How messages call a tensor that is quantized: by its name, its module and body, and who wants it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Graph, Node

from qompose.claims import Claim
from qompose.graph import module_path
from qompose.plan import Group


def subject_of(
    group: Group, claims: Sequence[Claim], nodes: Mapping[str, Node], bodies: Mapping[Graph, str]
) -> str:
    """Name a group's first tensor, its module and body, and who wants it.

    Args:
        nodes: those of the program and its bodies, by name.
        bodies: what messages call each body.
    """
    claim = claims[group.claims[0]]
    anchor = nodes[claim.anchor]
    places = [module_path(anchor), bodies.get(anchor.graph, "")]
    where = "".join(f" in {place}" for place in places if place)
    return f"{group.points[0]}{where} ({claim.owner}, rule {claim.rule})"
