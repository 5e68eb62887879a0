# SPDX-License-Identifier: Apache-2.0
"""A transform's changes, place by place: each can be made alone, and all together are what it made."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from qompose.spec.claim import Change
from torch.fx import GraphModule

from tests.core.quantizer.interop import transforms
from tests.core.quantizer.interop.aligning import (
    check,
)
from tests.core.quantizer.interop.programs import Random, example, exported, programs
from tests.core.quantizer.interop.transforms import rebuild

aten = torch.ops.aten


@given(
    model=programs,
    names=st.lists(st.sampled_from(sorted(transforms.REWRITES)), max_size=4, unique=True),
    stamped=st.booleans(),
    rebuilt=st.booleans(),
    unstamped=st.sampled_from([0, 0, 1, 2, 3]),
    dynamic=st.booleans(),
    data=st.data(),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_any_subset_of_changes_can_be_made(
    model: Random,
    names: list[str],
    stamped: bool,
    rebuilt: bool,
    unstamped: int,
    dynamic: bool,
    data: st.DataObject,
) -> None:
    """Of every `unstamped`-th node the stamp is lost."""

    def transform(own: GraphModule) -> GraphModule:
        for name in names:
            own = transforms.REWRITES[name](own, stamped)
        own.recompile()
        number = {node: i for i, node in enumerate(own.graph.nodes)}
        return (
            rebuild(own, lambda n: unstamped > 0 and number[n] % unstamped == 0) if rebuilt else own
        )

    def chosen(changes: Any) -> list[Change]:
        return data.draw(st.lists(st.sampled_from(changes), unique=True)) if changes else []

    check(exported(model, dynamic), transform, example(1, 5 if dynamic else 3), chosen)
