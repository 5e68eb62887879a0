# SPDX-License-Identifier: Apache-2.0
"""Regions that ExecuTorch gets in a form of their own, with sizes that are known at run time only."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from qompose.testing.measures import sqnr
from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config
from torch import nn
from torch.export import Dim

pytest.importorskip("executorch")


@pytest.mark.parametrize("options", [{"is_per_channel": True}, {"group_size": 32}], ids=str)
@pytest.mark.parametrize("dynamic", [(), (0,), (1,), (0, 1)], ids=str)
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
