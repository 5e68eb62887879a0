# SPDX-License-Identifier: Apache-2.0
"""Regions that ExecuTorch gets in a form of their own, with sizes that are known at run time only."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import qompose
import torch
from qompose.testing.fixtures import sqnr
from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config
from torch import Tensor, nn
from torch.export import Dim

from tests.sampling import at_once

pytest.importorskip("executorch")


@pytest.mark.parametrize(
    ("options", "dynamic"),
    at_once(
        itertools.product(({"is_per_channel": True}, {"group_size": 32}), ((), (0,), (1,), (0, 1))),
        ({"group_size": 32}, (1,)),
    ),
    ids=str,
)
def test_a_linear_of_weights_alone(dynamic: tuple[int, ...], options: dict[str, Any]) -> None:
    """Batch and tokens are both dynamic in a language model."""
    model, example = nn.Linear(32, 16).eval(), torch.randn(2, 4, 32)
    dims = {dim: Dim(f"dim{dim}", min=1, max=9) for dim in dynamic}
    program = torch.export.export(model, (example,), dynamic_shapes=(dims,) if dims else None)
    config = get_symmetric_quantization_config(weight_only=True, **options)
    prepared = qompose.prepare_pt2e(program, XNNPACKQuantizer().set_global(config))
    converted = qompose.convert_pt2e(prepared)
    lowered = qompose.lower(converted, target="executorch")
    for batch, tokens in ((2, 4), (7 if 0 in dynamic else 2, 3 if 1 in dynamic else 4)):
        x = torch.randn(batch, tokens, 32)
        assert sqnr(converted(x).detach(), lowered.run(x)) > 100
    (row,) = qompose.report(lowered).rows
    assert row.state == "float kernel on integers"


class Attends(nn.Module):
    """A linear layer behind attention, whose result ExecuTorch has in other strides than export."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(x.shape[0], 6, 4, 16).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        out: Tensor = self.last(mixed.transpose(1, 2).reshape(x.shape[0], 6, 64))
        return out


@pytest.mark.parametrize("dynamic", at_once((True, False), True), ids=["dynamic", "static"])
def test_a_linear_of_weights_alone_behind_attention(dynamic: bool) -> None:
    shapes = ({0: Dim("batch", min=1, max=8)},) if dynamic else None
    program = torch.export.export(Attends().eval(), (torch.randn(4, 6, 64),), dynamic_shapes=shapes)
    config = get_symmetric_quantization_config(is_per_channel=True, weight_only=True)
    converted = qompose.convert_pt2e(
        qompose.prepare_pt2e(program, XNNPACKQuantizer().set_global(config))
    )
    lowered = qompose.lower(converted, target="executorch")
    x = torch.randn(3 if dynamic else 4, 6, 64)
    assert sqnr(converted(x).detach(), lowered.run(x)) > 100
