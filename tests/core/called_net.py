# SPDX-License-Identifier: Apache-2.0
"""A lowered model with a keyword, a dictionary and a batch of any size, to compile and to package."""

from __future__ import annotations

from typing import Any

import qompose
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.toy import LINEAR, Model, randn, seeded, toy

X = randn(6, 3)


def forward(m: Any, x: Tensor, *, factor: Tensor) -> dict[str, Tensor]:
    return {"y": m.second(torch.sigmoid(m.first(x))) * factor}


def lowered_net(**facts: Any) -> GraphModule:
    """Return it with kernels of the toy backend, which has these facts besides."""
    shapes = {"x": {0: torch.export.Dim("batch", max=64)}, "factor": None}
    factor = torch.tensor(2.0)
    net = Model(forward, first=nn.Linear(3, 4), second=nn.Linear(4, 2))
    program = torch.export.export(seeded(net), (X,), {"factor": factor}, dynamic_shapes=shapes)
    prepared = qompose.prepare_pt2e(program, toy(LINEAR, **facts))
    prepared(X, factor=factor)
    result: GraphModule = qompose.lower(qompose.convert_pt2e(prepared))
    return result
